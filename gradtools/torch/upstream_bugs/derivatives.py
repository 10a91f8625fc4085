"""The table of PyTorch's wrong derivatives, and what takes their place in forward mode.

Found by sweeping all of PyTorch's own table of operators (`tests/support/sweeps`). A `Bug` names
the operation, what is wrong, upstream's issue, and what is done in its place while gradtools pushes
a tangent: mostly the transpose of reverse mode (`forward_mode/by_transposing.py`), else a formula
of plain operations. A custom operator is never trusted with forward mode: PyTorch drops its tangent
in silence wherever only a backward is registered. `docs/upstream-bugs.md` is written from this
table.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from types import (
    BuiltinFunctionType,
    FunctionType,
    MethodDescriptorType,
    MethodWrapperType,
)
from typing import Any

import torch
import torch.autograd.forward_ad as forward_ad
from torch.overrides import TorchFunctionMode

from gradtools.errors import GradtoolsError
from gradtools.rules import replaced_at
from gradtools.torch import _upstream as upstream
from gradtools.torch.compiling import is_compiling
from gradtools.torch.forward_mode.by_transposing import NoTranspose, by_reverse_mode
from gradtools.torch.functorch_wrappers import is_inexact, is_wrapped, unwrapped
from gradtools.torch.randomness import Randomness, restored
from gradtools.torch.upstream_bugs import formulas
from gradtools.torch.upstream_bugs.gradients import GRADIENT_AGAIN

Tensor = torch.Tensor
Args = tuple[Any, ...]
Kwargs = dict[str, Any]

TANGENT = "tangent"
TANGENT_AGAIN = "derivative of the tangent"
TANGENT_OF_GRADIENT = "tangent of the gradient"


@dataclass(frozen=True, eq=False, repr=False)
class Bug:
    """A derivative that PyTorch has wrong.

    Attributes:
        operation: As its documentation names it, without `torch.`.
        wrong: What is: "tangent" (forward mode), "derivative of the tangent" (reverse or forward
            mode over forward mode), "tangent of the gradient" (forward over reverse mode), or
            "derivative of the gradient" (reverse over reverse mode, and `linearize`).
        gives: What plain PyTorch gives: "another number", "NaN", "zero", "an error".
        issue: Upstream's, such as "torch#196702"; empty where no report was found.
        instead: A formula of plain operations with the same arguments; None: reverse mode is
            transposed.
        when: Of its arguments, whether they are such that it is wrong; None: always.
        example: A loss of x, with `torch`, that shows it, as Python code; empty: another of the
            same issue does.
    """

    operation: str
    wrong: str
    gives: str
    issue: str = ""
    instead: Callable[..., Any] | None = None
    when: Callable[..., bool] | None = None
    example: str = ""

    @property
    def name(self) -> str:
        return self.operation.rpartition(".")[2]


# --- when they are wrong ----------------------------------------------------------------------


def _refused(*args: Any, **kwargs: Any) -> Any:
    raise GradtoolsError(
        "the tangent of a normalisation called by its name in torch.ops.aten is differentiated "
        "once more, of whose forward-mode rule PyTorch then leaves a term out (torch#196699, "
        "torch#196700). Call it by torch.nn.functional, which goes another way."
    )


def _is_real(*args: Any, **kwargs: Any) -> bool:
    return not args[0].is_complex()  # of complex eigenvectors phases are free


def _is_complex(*args: Any, **kwargs: Any) -> bool:
    return not _is_real(*args, **kwargs)


def _by_integers(input: Tensor, other: Tensor) -> bool:
    return not is_inexact(other)


def _trains(*args: Any, **kwargs: Any) -> bool:
    return bool(args[5])


# --- the table ---------------------------------------------------------------------------------

_F = "nn.functional."
_SPD = "x @ x.mT + torch.eye(3, dtype=x.dtype)"
_OTHER = "another number"
_LOGICAL = tuple([f"logical_{name}_" for name in ("not", "and", "or", "xor")])
_OF_PRODUCTS = lambda *args, **kwargs: "prod" in (*args[4:5], kwargs.get("reduce"))
_OF_OPTIONS = lambda *args, **kwargs: kwargs.get("options") is not None
_LIES_OTHERWISE = lambda input, *args, **kwargs: not input.is_contiguous()

# The operation, what is wrong, what PyTorch gives, its issue, what stands for it, and when.
_ROWS: tuple[tuple[Any, ...], ...] = (
    ("logcumsumexp", TANGENT, f"NaN, or {_OTHER}", "torch#196705", formulas.logcumsumexp),
    ("scatter_reduce", TANGENT, _OTHER, "torch#196702", None, _OF_PRODUCTS),
    ("triangular_solve", TANGENT, _OTHER, "torch#196707"),
    ("cholesky_inverse", TANGENT, _OTHER, "torch#196682", formulas.cholesky_inverse),
    ("cholesky_solve", TANGENT, _OTHER, "torch#196694", formulas.cholesky_solve),
    ("ldexp", TANGENT, _OTHER, "torch#186556", formulas.ldexp, _by_integers),
    ("ldexp_", TANGENT, _OTHER, "torch#186556", formulas.in_place(formulas.ldexp), _by_integers),
    (f"{_F}silu", TANGENT, _OTHER, "", formulas.silu, _is_complex),
    ("silu_", TANGENT, _OTHER, "", formulas.in_place(formulas.silu), _is_complex),
    *[
        (name, TANGENT, _OTHER, "", formulas.in_place(getattr(torch, name[:-1])))
        for name in _LOGICAL
    ],
    ("_weight_norm", TANGENT, "an error", "", formulas.weight_norm),
    (f"{_F}linear_cross_entropy", TANGENT, "zero", "", None, _OF_OPTIONS),
    ("linalg.det", TANGENT_AGAIN, f"{_OTHER}, or zero", "torch#192540"),
    ("logdet", TANGENT_AGAIN, f"{_OTHER}, or zero", "torch#192540"),
    ("linalg.slogdet", TANGENT_AGAIN, f"{_OTHER}, or zero", "torch#192540"),
    ("linalg.solve", TANGENT_AGAIN, f"{_OTHER}, or zero", "torch#192540"),
    ("linalg.solve_ex", TANGENT_AGAIN, f"{_OTHER}, or zero", "torch#192540"),
    ("linalg.tensorsolve", TANGENT_AGAIN, f"{_OTHER}, or zero", "torch#192540"),
    ("linalg.householder_product", TANGENT_AGAIN, _OTHER, "torch#198017"),
    ("linalg.eigh", TANGENT_AGAIN, "NaN", "", None, _is_real),
    ("orgqr", TANGENT_AGAIN, _OTHER, "torch#198017"),
    ("cumprod", TANGENT_AGAIN, "NaN at a zero factor"),
    (f"{_F}layer_norm", TANGENT_AGAIN, _OTHER, "torch#196700", formulas.layer_norm),
    (f"{_F}batch_norm", TANGENT_AGAIN, _OTHER, "torch#196699", formulas.batch_norm, _trains),
    (f"{_F}instance_norm", TANGENT_AGAIN, _OTHER, "torch#196699", formulas.instance_norm, _trains),
    ("native_batch_norm", TANGENT_AGAIN, _OTHER, "torch#196699", _refused),
    ("_native_batch_norm_legit", TANGENT_AGAIN, _OTHER, "torch#196699", _refused),
    ("_batch_norm_with_update", TANGENT_AGAIN, _OTHER, "torch#196699", _refused),
    ("native_layer_norm", TANGENT_AGAIN, _OTHER, "torch#196700", _refused),
    *[
        (name, TANGENT_AGAIN, "an error")
        for name in (
            *("softmax", "log_softmax", "_softmax", "_log_softmax", "_safe_softmax", "logsumexp"),
            *("cross_entropy_loss", f"{_F}glu", "aminmax", "renorm", "linalg.norm"),
            *("linalg.vector_norm", "linalg.matrix_norm", "norm"),
        )
    ],
    (f"{_F}group_norm", TANGENT, "an error", "", formulas.group_norm, _LIES_OTHERWISE),
    (f"{_F}scaled_dot_product_attention", TANGENT_AGAIN, "an error", "", formulas.attention),
    (f"{_F}mse_loss", TANGENT_OF_GRADIENT, "an error", "torch#123996"),
    (f"{_F}soft_margin_loss", TANGENT_OF_GRADIENT, "an error"),
    (f"{_F}huber_loss", TANGENT_OF_GRADIENT, "an error"),
    (f"{_F}hardsigmoid", GRADIENT_AGAIN, "an error", "", formulas.hardsigmoid),
    ("cdist", GRADIENT_AGAIN, "an error", "", formulas.cdist),
    (f"{_F}pdist", GRADIENT_AGAIN, "an error", "", formulas.pdist),
)
_EXAMPLES = {
    "logcumsumexp": "torch.logcumsumexp(1000 * x, 0).sum()",
    "scatter_reduce": "x.scatter_reduce(0, torch.tensor([[0, 0, 1]]), x[1:2] + 2, 'prod').sum()",
    "triangular_solve": "torch.triangular_solve(x, x + 3, unitriangular=True)[0].sum()",
    "cholesky_inverse": "torch.cholesky_inverse(x.tril()).sum()",
    "ldexp": "torch.ldexp(x, torch.tensor([1, -1, -2])).sum()",
    f"{_F}silu": f"torch.{_F}silu(torch.complex(x, 1 - x)).abs().sum()",
    "logical_not_": "(1 * x).logical_not_().sum()",
    "logical_and_": "(1 * x).logical_and_(x).sum()",
    "logical_or_": "(1 * x).logical_or_(x).sum()",
    "logical_xor_": "(1 * x).logical_xor_(x).sum()",
    "_weight_norm": "torch._weight_norm(x, x[:, :1], 0).sum()",
    "linalg.det": "torch.linalg.det(x)",
    "logdet": f"torch.logdet({_SPD})",
    "linalg.slogdet": "torch.linalg.slogdet(x)[1]",
    "linalg.solve": "torch.linalg.solve(x + 3, x).sum()",
    "linalg.householder_product": "torch.linalg.householder_product(x, x[0]).sum()",
    "linalg.eigh": "(torch.linalg.eigh(x + x.mT)[1].abs() * x).sum()",
    "cumprod": "torch.cumprod(x * torch.tensor([[1.0], [0.0], [1.0]], dtype=x.dtype), 0).sum()",
    f"{_F}layer_norm": f"(torch.{_F}layer_norm(x, (3,)) ** 2 * x).sum()",
    f"{_F}batch_norm": f"(torch.{_F}batch_norm(x, None, None, training=True) ** 2 * x).sum()",
    f"{_F}instance_norm": f"(torch.{_F}instance_norm(x[None]) ** 2 * x).sum()",
    "softmax": "(torch.softmax(x, 0) * x).sum()",
    "log_softmax": "(torch.log_softmax(x, 0) * x).sum()",
    "logsumexp": "torch.logsumexp(x, 0).sum()",
    f"{_F}glu": f"torch.{_F}glu(x[:, :2], 1).sum()",
    f"{_F}group_norm": f"torch.{_F}group_norm(torch.stack((x, x**2))[None]"
    ".to(memory_format=torch.channels_last), 1).pow(3).sum()",
    f"{_F}scaled_dot_product_attention": f"torch.{_F}scaled_dot_product_attention(x, 2 * x, x)"
    ".sum()",
    f"{_F}mse_loss": f"torch.{_F}mse_loss(x, torch.ones_like(x))",
    f"{_F}soft_margin_loss": f"torch.{_F}soft_margin_loss(x, torch.ones_like(x))",
    f"{_F}huber_loss": f"torch.{_F}huber_loss(x, torch.ones_like(x))",
    f"{_F}hardsigmoid": f"(torch.{_F}hardsigmoid(x) ** 2).sum()",
    "cdist": "torch.cdist(x, 1 - 2 * x).sum()",
    f"{_F}pdist": f"torch.{_F}pdist(x**3).sum()",
}
BUGS = tuple([replace(Bug(*row), example=_EXAMPLES.get(row[0], "")) for row in _ROWS])
_BY_NAME = {bug.name: bug for bug in BUGS}


def bug_of(fun: Any) -> Bug | None:
    """What is wrong with a function of PyTorch's, if anything."""
    if type(fun) is FunctionType:
        return _BY_NAME[fun.__name__] if fun in _IN_PYTHON else None
    name = getattr(fun, "__name__", "").partition(".")[0]
    for prefix in ("linalg_", "special_"):
        name = name.removeprefix(prefix)
    return _BY_NAME.get(name) or _BY_NAME.get(name.removesuffix("_"))


def is_wrong_at(fun: Any, args: Args, kwargs: Kwargs) -> bool:
    bug = bug_of(fun)
    return bug is not None and (bug.when is None or bug.when(*args, **kwargs))


_LINEAR_CROSS_ENTROPY = torch.nn.functional.linear_cross_entropy
_IN_PYTHON = (
    *(_LINEAR_CROSS_ENTROPY, torch.cdist),
    *(torch.nn.functional.hardsigmoid, torch.nn.functional.silu),
)
_OPERATORS = (upstream.OpOverload, upstream.OpOverloadPacket)
_TRANSPOSABLE = (*_OPERATORS, BuiltinFunctionType, MethodDescriptorType)  # no Function of a user's


# --- what runs in its place ----------------------------------------------------------------------


def pushed_rightly(fun: Any, args: Args, kwargs: Kwargs, again: bool) -> Any:
    """`fun(*args, **kwargs)` in forward mode, with the right tangents.

    again: Whether they may be differentiated.
    """
    another = _ANOTHER_WAY.get(fun, _UNKNOWN)
    if another is _UNKNOWN:
        another = _ANOTHER_WAY[fun] = _another_way(fun)
    if another is None:
        return pushed_by_pytorch(fun, args, kwargs)
    return another(fun, args, kwargs, again)


_UNKNOWN: Any = object()
_ANOTHER_WAY: dict[Any, Callable[..., Any] | None] = {}  # by function of PyTorch's


def _another_way(fun: Any) -> Callable[..., Any] | None:
    """What calls a function that is not to be trusted; None for all others."""
    bug = bug_of(fun)
    if isinstance(fun, upstream.HigherOrderOperator) and fun is not upstream.custom_function_call:
        return _by_its_operations
    custom = type(fun) in _OPERATORS and _is_custom(fun)
    return partial(_called_otherwise, bug) if bug is not None or custom else None


def _called_otherwise(bug: Bug | None, fun: Any, args: Args, kwargs: Kwargs, again: bool) -> Any:
    """A function with a bug, or a custom operator (None)."""
    is_moved: Callable[..., bool] = _is_moved
    if bug is not None and bug.wrong != TANGENT:
        again = again and not _is_in_place(fun)
        is_moved = _is_moved_again if again or bug.wrong != TANGENT_AGAIN else _never
    if (
        bug is not None
        and bug.name in _NORMS
        and _is_narrow(args, kwargs)
        and _is_moved(args, kwargs)
    ):
        wide = [x.to(torch.float32) if k == 0 else x for k, x in enumerate(args)]
        return _called_otherwise(bug, fun, tuple(wide), kwargs, again).to(args[0].dtype)
    if "out" in kwargs or not _is_differentiated_here() or not is_moved(args, kwargs):
        return pushed_by_pytorch(fun, args, kwargs)
    if bug is None:
        return _transposed(fun, args, kwargs, opaque=True)
    if bug.when is not None and not bug.when(*args, **kwargs):
        return pushed_by_pytorch(fun, args, kwargs)
    if bug.instead is None:
        return _transposed(fun, args, kwargs, opaque=fun is _LINEAR_CROSS_ENTROPY)
    return bug.instead(*args, **kwargs)


# Of a 16-bit input with 32-bit weights, as under autocast, PyTorch's tangent has the weights' dtype
# (no report was found), which the next layer refuses.
_NORMS = ("layer_norm", "batch_norm", "instance_norm", "group_norm")


def _is_narrow(args: Args, kwargs: Kwargs) -> bool:
    if not args or args[0].dtype not in (torch.bfloat16, torch.float16):
        return False
    others = (*args[1:], *kwargs.values())
    return any(isinstance(x, Tensor) and x.dtype == torch.float32 for x in others)


def _by_its_operations(fun: Any, args: Args, kwargs: Kwargs, again: bool) -> Any:
    """An operator of functions (cond, scan, map), whose tangents PyTorch drops: by plain code."""
    if is_compiling():  # dynamo looks in; it comes here again when what it made runs
        return fun(*args, **kwargs)
    if not _is_differentiated_here() or not _is_moved(args, kwargs):
        return pushed_by_pytorch(fun, args, kwargs)
    plain = _plain_kernel(fun)
    if plain is None:
        raise GradtoolsError(
            f"jvp: f holds the operator {fun.__name__} of PyTorch's, which takes functions and may "
            "drop their tangents in silence. Write it by plain operations, or use linearize."
        )
    return plain(*args, **kwargs)


def _plain_kernel(fun: upstream.HigherOrderOperator) -> Any:
    return fun.py_kernels.get(upstream.DispatchKey.CompositeExplicitAutograd)


def _is_differentiated_here() -> bool:
    """Whether tangents are looked at: not in a Function's forward, nor in a dispatch mode."""
    below = upstream.is_dispatch_key_excluded(upstream.DispatchKey.AutogradFunctionality)
    return upstream.is_forward_mode_enabled() and not below


def pushed_by_pytorch(fun: Any, args: Args, kwargs: Kwargs) -> Any:
    """PyTorch's own forward mode; where it has none, the transpose of its reverse mode."""
    try:
        return fun(*args, **kwargs) if kwargs else fun(*args)
    except NotImplementedError as error:
        mine = isinstance(fun, _TRANSPOSABLE) or bug_of(fun) is not None
        mine = mine and "out" not in kwargs and not _is_in_place(fun)
        if not mine or not _is_differentiated_here() or not _is_moved(args, kwargs):
            raise
        bug = bug_of(fun)
        try:
            if bug is not None and bug.instead is not None:
                return bug.instead(*args, **kwargs)
            return _transposed(fun, args, kwargs, opaque=False)
        except (NoTranspose, NotImplementedError):
            raise error from None


class TwiceByPlainOperations(TorchFunctionMode):
    """While f is evaluated for `linearize`, which differentiates the backward pass."""

    def __torch_function__(self, fun: Any, types: Any, args: Args = (), kwargs: Any = None) -> Any:
        bug = _BY_FORMULA.get(getattr(fun, "__name__", ""))
        kwargs = kwargs or {}
        if not isinstance(fun, _ORDINARY) and isinstance(fun, upstream.HigherOrderOperator):
            fun = fun if is_compiling() else _plain_kernel(fun) or fun
        if bug is not None and bug_of(fun) is bug and "out" not in kwargs:
            fun = bug.instead if bug.when is None or bug.when(*args, **kwargs) else fun
        called: Any = fun
        return called(*args, **kwargs) if kwargs else called(*args)


# What is no operator of functions; to be asked of that class itself costs four times as much.
_ORDINARY = (BuiltinFunctionType, FunctionType, MethodDescriptorType, MethodWrapperType)
_WRONG_IN_REVERSE_TOO = (
    *("logcumsumexp", "ldexp", "ldexp_", "silu", "silu_", "_weight_norm"),
    *_LOGICAL,
)
_BY_FORMULA = {
    name: bug
    for name, bug in _BY_NAME.items()
    if bug.wrong == GRADIENT_AGAIN or name in _WRONG_IN_REVERSE_TOO
}


def _inexact(args: Args, kwargs: Kwargs) -> list[Tensor]:
    tensors = [x for x in upstream.tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
    return [x for x in tensors if is_inexact(x) and x.layout is torch.strided]


def _is_moved(args: Args, kwargs: Kwargs) -> bool:
    """Whether a tensor has a tangent; inside torch.func's transforms, whether it may have one."""
    xs = _inexact(args, kwargs)
    if upstream.peek_interpreter_stack() is not None:
        return bool(xs)
    return any(forward_ad.unpack_dual(x).tangent is not None for x in xs)


def _is_moved_again(args: Args, kwargs: Kwargs) -> bool:
    """Whether besides something else differentiates what becomes of a tensor."""
    if not _is_moved(args, kwargs):
        return False
    levels = upstream.get_interpreter_stack() or ()
    kinds = upstream.TransformType.Grad, upstream.TransformType.Jvp
    if sum(level.key() in kinds for level in levels) > 1:
        return True
    return torch.is_grad_enabled() and any(map(_is_recorded, _inexact(args, kwargs)))


def _is_recorded(x: Tensor) -> bool:
    """Whether x, or its tangent, is in a graph."""
    tangent = None if is_wrapped(x) else forward_ad.unpack_dual(x).tangent
    return unwrapped(x).requires_grad or (tangent is not None and tangent.requires_grad)


def _is_fixed(x: Tensor) -> bool:
    """Whether nothing differentiates or maps x."""
    if is_wrapped(x) or x.requires_grad:
        return False
    strided = x.layout is torch.strided
    return not (is_inexact(x) and strided) or forward_ad.unpack_dual(x).tangent is None


def _never(args: Args, kwargs: Kwargs) -> bool:
    return False


def _transposed(fun: Any, args: Args, kwargs: Kwargs, opaque: bool) -> Any:
    """`fun(*args, **kwargs)` by reverse mode alone; what writes in place, by a copy of its own."""
    leaves, treedef = upstream.tree_flatten((args, kwargs))
    drawn = _OneDraw(_named(fun), leaves, opaque and upstream.peek_interpreter_stack() is not None)
    places = [i for i, x in enumerate(leaves) if isinstance(x, Tensor) and not _is_fixed(x)]
    in_place = _is_in_place(fun)
    if in_place:  # what a rule saves may not change
        leaves[0] = leaves[0].clone()
    shape: list[Any] = []

    def flat(*xs: Tensor) -> list[Tensor]:
        again, named = upstream.tree_unflatten(replaced_at(leaves, places, xs), treedef)
        again = (again[0].clone(), *again[1:]) if in_place else again
        with drawn.evaluating():
            result = fun(*again, **named)
        outs, outdef = upstream.tree_flatten(result)
        shape[:] = outdef, [None if isinstance(y, Tensor) else y for y in outs]
        return [y for y in outs if isinstance(y, Tensor)]

    result = by_reverse_mode(_named(fun), flat, [leaves[i] for i in places], opaque)
    if in_place:
        return args[0].copy_(result[0])
    left = iter(result)
    return upstream.tree_unflatten([next(left) if y is None else y for y in shape[1]], shape[0])


class _OneDraw:
    """Evaluations of a function that may draw: the first goes on, others draw what it drew.

    one_by_one: Whether vmap's examples are evaluated one by one, of which each has its own draw.
    """

    def __init__(self, name: str, leaves: Sequence[Any], one_by_one: bool) -> None:
        self._name, self._one_by_one = name, one_by_one
        self._kinds = {x.device.type for x in leaves if isinstance(x, Tensor)}
        self._start: Randomness | None = None

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        if self._start is not None:
            with restored(self._start):
                yield
            return
        self._start = Randomness.everywhere(self._kinds)
        yield
        if self._one_by_one and self._start.used():
            raise GradtoolsError(
                f"jvp: {self._name} draws random numbers and is pushed by transposing its backward "
                "pass, which evaluates it again; inside of torch.func's transforms the draws of "
                "single examples cannot be repeated. Use reverse mode there."
            )


def _is_in_place(fun: Any) -> bool:
    name = getattr(fun, "__name__", "").partition(".")[0]
    return name.endswith("_") and not name.endswith("__")


def _named(fun: Any) -> str:
    return str(fun) if type(fun) in _OPERATORS else getattr(fun, "__name__", str(fun))


def _is_custom(operator: Any) -> bool:
    """Whether an operator is neither PyTorch's own nor composed of what is."""
    packet = type(operator) is upstream.OpOverloadPacket
    result = [getattr(operator, o) for o in operator.overloads()] if packet else [operator]
    key = upstream.DispatchKey.CompositeImplicitAutograd
    return not all(o.namespace in _OWN or o.has_kernel_for_dispatch_key(key) for o in result)


_OWN = ("aten", "prim", "prims", "gradtools")


# --- the same in compiled code -------------------------------------------------------------------


class RightTangents(TorchFunctionMode):
    """While dynamo traces what is pushed: functions that are not to be trusted go another way."""

    def __torch_function__(self, fun: Any, types: Any, args: Args = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if fun is Tensor.norm:  # which dynamo does not find in a dictionary, and its guards do
            fun = torch.norm
        if fun in _TRACED:
            return _traced(_TRACED[fun], fun, args, kwargs)
        if isinstance(fun, _OPERATORS) and fun.__module__.rpartition(".")[2] not in _OWN:
            raise GradtoolsError(
                f"jvp: f holds the custom operator {fun.__name__}, whose tangent PyTorch drops in "
                "compiled code. Leave this derivative out of what is compiled."
            )
        return fun(*args, **kwargs)


class RightGradients(TorchFunctionMode):
    """While dynamo traces what is pulled back: operations whose gradient is wrong."""

    def __torch_function__(self, fun: Any, types: Any, args: Args = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if fun in _TRACED_BACK:
            return _traced(_TRACED_BACK[fun], fun, args, kwargs)
        return fun(*args, **kwargs)


def _traced(bug: Bug, fun: Any, args: Args, kwargs: Kwargs) -> Any:
    if "out" in kwargs or (bug.when is not None and not bug.when(*args, **kwargs)):
        return fun(*args, **kwargs)
    if bug.instead is not None:
        return bug.instead(*args, **kwargs)
    return _transposed_in_trace(fun, args, kwargs)


def _transposed_in_trace(fun: Any, args: Args, kwargs: Kwargs) -> Any:
    """`fun(*args, **kwargs)`, its tangent by differentiating its pullback."""
    leaves, treedef = upstream.tree_flatten((args, kwargs))
    places = [i for i, x in enumerate(leaves) if isinstance(x, Tensor) and is_inexact(x)]
    duals = [forward_ad.unpack_dual(leaves[i]) for i in places]
    moved = [k for k, dual in enumerate(duals) if dual.tangent is not None]
    if not moved:
        return fun(*args, **kwargs)
    shape: list[Any] = []

    def run(*xs: Tensor) -> Any:
        primals = replaced_at([dual.primal for dual in duals], moved, xs)
        filled = replaced_at(leaves, places, primals)
        again, named = upstream.tree_unflatten(filled, treedef)
        outs, outdef = upstream.tree_flatten(fun(*again, **named))
        carried = [isinstance(y, Tensor) and is_inexact(y) for y in outs]
        shape[:] = [outdef, carried]
        pairs = list(zip(outs, carried, strict=True))
        return tuple([y for y, c in pairs if c]), tuple([y for y, c in pairs if not c])

    ys, pull, others = torch.func.vjp(run, *[duals[k].primal for k in moved], has_aux=True)  # type: ignore[misc]
    _, push = torch.func.vjp(pull, tuple([torch.ones_like(y) for y in ys]))  # type: ignore[misc]
    pushed = push(tuple([duals[k].tangent for k in moved]))[0]
    outs = [forward_ad.make_dual(y, dy) for y, dy in zip(ys, pushed, strict=True)]
    outdef, carried = shape
    result, left, rest = [], list(outs), list(others)
    for c in carried:
        result.append(left.pop(0) if c else rest.pop(0))
    return upstream.tree_unflatten(result, outdef)


def _traced_functions() -> dict[Any, Bug]:
    """The functions that dynamo sees, by name in PyTorch's namespaces."""
    spaces = (torch, Tensor, torch.linalg, torch.special, torch.nn.functional)
    result = {
        getattr(space, bug.name): bug
        for bug in BUGS
        for space in spaces
        if bug.wrong in (TANGENT, TANGENT_AGAIN) and hasattr(space, bug.name)
    }
    for name, default in (("batch_norm", False), ("instance_norm", True)):
        fun = getattr(torch.nn.functional, name)
        instead = partial(_traced_norm, fun, getattr(formulas, name), default)
        result[fun] = replace(result[fun], instead=instead, when=None)
    return result


def _traced_norm(
    plain: Any,
    formula: Any,
    default: bool,
    input: Tensor,
    running_mean: Tensor | None = None,
    running_var: Tensor | None = None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool | None = None,
    momentum: float = 0.1,
    eps: float = 1e-5,
    use_input_stats: bool | None = None,
) -> Tensor:
    """Of torch.nn.functional; by the statistics of its input, in two words, or by running ones."""
    training = use_input_stats if training is None else training
    running = running_mean, running_var
    if not (default if training is None else training):
        return plain(input, *running, weight, bias, False, momentum, eps)
    return formula(input, weight, bias, *running, True, momentum, eps, True)


_TRACED = _traced_functions()
_TRACED_BACK = {fun: bug for fun, bug in _TRACED.items() if bug.name in _WRONG_IN_REVERSE_TOO}
