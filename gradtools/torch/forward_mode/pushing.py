"""Replacements for PyTorch's forward mode where it is wrong or missing.

While gradtools pushes a tangent, an operation of the table (`plain_programs/rows.py`) is replaced
by its plain program, or by the transpose of reverse mode (`by_transposing.py`). A custom operator
is always transposed: PyTorch silently drops its tangent if only a backward is registered.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from types import BuiltinFunctionType, MethodDescriptorType
from typing import Any

import torch
import torch.autograd.forward_ad as forward_ad
from torch.autograd.function import BackwardCFunction
from torch.overrides import TorchFunctionMode

from gradtools.errors import GradtoolsError
from gradtools.rules import replaced_at
from gradtools.torch import _upstream as upstream
from gradtools.torch.autograd_graph import surveyed
from gradtools.torch.compiling import is_compiling, nodes_of
from gradtools.torch.forward_mode.by_transposing import NoTranspose, by_reverse_mode
from gradtools.torch.functorch_wrappers import (
    is_dual,
    is_inexact,
    is_mapped,
    is_wrapped,
    levels_differentiating,
    unwrapped,
)
from gradtools.torch.known_errors import NO_STRIDES, says
from gradtools.torch.nondifferentiable import gated
from gradtools.torch.open_derivatives import caller_of
from gradtools.torch.plain_programs.modes import plain_kernel, traced
from gradtools.torch.plain_programs.rows import (
    GRADIENT_AGAIN,
    MAPPED,
    TANGENT,
    TANGENT_AGAIN,
    TANGENT_OF_GRADIENT,
    UNDER_VMAP,
    PlainProgram,
    row_of,
    traced_programs,
)
from gradtools.torch.randomness import Randomness, restored
from gradtools.torch.rules.transposing import value_and_push

Tensor = torch.Tensor
Args = tuple[Any, ...]
Kwargs = dict[str, Any]

_OPERATORS = (upstream.OpOverload, upstream.OpOverloadPacket)
_TRANSPOSABLE = (*_OPERATORS, BuiltinFunctionType, MethodDescriptorType)  # no Function of a user's


# --- replacements --------------------------------------------------------------------------------


def pushed_rightly(fun: Any, args: Args, kwargs: Kwargs, again: bool) -> Any:
    """`fun(*args, **kwargs)` in forward mode, with the right tangents.

    Args:
        fun: A function or operator of PyTorch.
        args: Its arguments.
        kwargs: Its keyword arguments.
        again: Whether the tangents may be differentiated.
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
    """The replacement for calls of a function whose tangents may be wrong; None for any other."""
    row = row_of(fun)
    if isinstance(fun, upstream.HigherOrderOperator) and fun is not upstream.custom_function_call:
        return _by_its_operations
    custom = type(fun) in _OPERATORS and _is_custom(fun)
    return partial(_called_otherwise, row) if row is not None or custom else None


def _called_otherwise(
    row: PlainProgram | None, fun: Any, args: Args, kwargs: Kwargs, again: bool
) -> Any:
    """Calls a function of the table, or a custom operator (row None), by its replacement."""
    if fun is _here.function:
        return pushed_by_pytorch(fun, args, kwargs)
    is_moved = _is_moved if row is None else _when_wrong(row, fun, again)
    if (
        row is not None
        and row.name in _NORMS
        and _is_narrow(args, kwargs)
        and _is_moved(args, kwargs)
    ):
        wide = [x.to(torch.float32) if k == 0 else x for k, x in enumerate(args)]
        return _called_otherwise(row, fun, tuple(wide), kwargs, again).to(args[0].dtype)
    if "out" in kwargs or not _is_differentiated_here() or not is_moved(args, kwargs):
        return pushed_by_pytorch(fun, args, kwargs)
    if row is None:
        return _transposed(fun, args, kwargs, opaque=True)
    if not row.applies(args, kwargs):
        return pushed_by_pytorch(fun, args, kwargs)
    if row.program is None:
        return _transposed(fun, args, kwargs, opaque=fun is upstream.linear_cross_entropy)
    return row.program(*args, **kwargs)


def _when_wrong(row: PlainProgram, fun: Any, again: bool) -> Callable[[Args, Kwargs], bool]:
    """A predicate of arguments: whether PyTorch's tangents are wrong at them."""
    if TANGENT in row.wrong:
        return _is_moved
    if GRADIENT_AGAIN in row.wrong or TANGENT_OF_GRADIENT in row.wrong:
        return _is_moved_again
    if (
        MAPPED in row.wrong or UNDER_VMAP in row.wrong
    ) and upstream.peek_interpreter_stack() is not None:
        return _is_differentiated_again
    again = again and TANGENT_AGAIN in row.wrong and not _is_in_place(fun)
    return _is_moved_again if again else _never


# Of a 16-bit input with 32-bit weights, as under autocast, PyTorch's tangent has the weights' dtype
# (no report was found), which the next layer refuses.
_NORMS = ("layer_norm", "batch_norm", "instance_norm", "group_norm")


def _is_narrow(args: Args, kwargs: Kwargs) -> bool:
    if not args or args[0].dtype not in (torch.bfloat16, torch.float16):
        return False
    others = (*args[1:], *kwargs.values())
    return any(isinstance(x, Tensor) and x.dtype == torch.float32 for x in others)


def _by_its_operations(fun: Any, args: Args, kwargs: Kwargs, again: bool) -> Any:
    """Calls a higher-order operator (cond, scan, map) by plain code; PyTorch drops its tangents."""
    if is_compiling():  # dynamo traces into it, and the compiled graph calls this again
        return fun(*args, **kwargs)
    if not _is_differentiated_here() or not _is_moved(args, kwargs):
        return pushed_by_pytorch(fun, args, kwargs)
    plain = plain_kernel(fun)
    if plain is None:
        raise GradtoolsError(
            f"jvp: f holds the operator {fun.__name__} of PyTorch's, which takes functions and may "
            "silently drop their tangents. Write it by plain operations, or use linearize."
        )
    return plain(*args, **kwargs)


def _is_differentiated_here() -> bool:
    """Whether tangents propagate here: not in a Function's forward, nor below autograd."""
    below = upstream.is_dispatch_key_excluded(upstream.DispatchKey.AutogradFunctionality)
    return upstream.is_forward_mode_enabled() and not below


def pushed_by_pytorch(fun: Any, args: Args, kwargs: Kwargs) -> Any:
    """PyTorch's own forward mode; if it raises, the transpose of its reverse mode."""
    try:
        return fun(*args, **kwargs) if kwargs else fun(*args)
    except RuntimeError as error:
        if not isinstance(error, NotImplementedError) and not says(error, NO_STRIDES):
            raise
        row = row_of(fun)
        mine = isinstance(fun, _TRANSPOSABLE) or row is not None
        mine = mine and "out" not in kwargs and not _is_in_place(fun)
        if not mine or not _is_differentiated_here() or not _is_moved(args, kwargs):
            raise
        try:
            if row is not None and row.program is not None and row.applies(args, kwargs):
                return row.program(*args, **kwargs)
            return _transposed(fun, args, kwargs, opaque=False)
        except (NoTranspose, NotImplementedError):
            raise error from None


def _inexact(args: Args, kwargs: Kwargs) -> list[Tensor]:
    tensors = [x for x in upstream.tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
    return [x for x in tensors if is_inexact(x) and x.layout is torch.strided]


def _is_moved(args: Args, kwargs: Kwargs) -> bool:
    """Whether any tensor has a tangent, or inside of torch.func's transforms may have one."""
    xs = _inexact(args, kwargs)
    if upstream.peek_interpreter_stack() is not None:
        return bool(xs)
    return any(forward_ad.unpack_dual(x).tangent is not None for x in xs)


def _is_moved_again(args: Args, kwargs: Kwargs) -> bool:
    """Whether tensors have a tangent and another level differentiates the results, too."""
    if not _is_moved(args, kwargs):
        return False
    levels = upstream.get_interpreter_stack() or ()
    kinds = upstream.TransformType.Grad, upstream.TransformType.Jvp
    if sum(level.key() in kinds for level in levels) > 1:
        return True
    return torch.is_grad_enabled() and any(map(_is_recorded, _inexact(args, kwargs)))


def _is_differentiated_again(args: Args, kwargs: Kwargs) -> bool:
    """Whether several levels of torch.func differentiate a tensor."""
    return len(levels_differentiating(_inexact(args, kwargs))) > 1


def _is_recorded(x: Tensor) -> bool:
    """Whether x or its tangent requires a gradient."""
    tangent = None if is_wrapped(x) else forward_ad.unpack_dual(x).tangent
    return unwrapped(x).requires_grad or (tangent is not None and tangent.requires_grad)


def _is_fixed(x: Tensor) -> bool:
    """Whether nothing differentiates or maps x."""
    if is_wrapped(x) or x.requires_grad:
        return False
    strided = x.layout is torch.strided
    return not (is_inexact(x) and strided) or forward_ad.unpack_dual(x).tangent is None


def _constant(x: Any) -> Any:
    """x unwrapped of torch.func's levels, unless vmap maps it."""
    return x if x is None or is_mapped(x) else unwrapped(x)


def _never(args: Args, kwargs: Kwargs) -> bool:
    return False


def _transposed(fun: Any, args: Args, kwargs: Kwargs, opaque: bool) -> Any:
    """`fun(*args, **kwargs)` by reverse mode only; an in-place operation works on a copy."""
    if _named(fun) == "cross_entropy_loss":  # has no derivative with respect to the class weights
        args = (*args[:2], *(_constant(x) for x in args[2:3]), *args[3:])
    leaves, treedef = upstream.tree_flatten((args, kwargs))
    drawn = _RepeatedDraws(
        _named(fun), leaves, opaque and upstream.peek_interpreter_stack() is not None
    )
    places = [i for i, x in enumerate(leaves) if isinstance(x, Tensor) and not _is_fixed(x)]
    in_place = _is_in_place(fun)
    if in_place:  # a rule's saved tensors must not change
        leaves[0] = leaves[0].clone()
    shape: list[Any] = []

    def flat(*xs: Tensor) -> list[Tensor]:
        again, named = upstream.tree_unflatten(replaced_at(leaves, places, xs), treedef)
        again = (again[0].clone(), *again[1:]) if in_place else again
        with drawn.evaluating(), _transposing(fun):
            result = fun(*again, **named)
        outs, outdef = upstream.tree_flatten(result)
        shape[:] = outdef, [None if isinstance(y, Tensor) else y for y in outs]
        return [y for y in outs if isinstance(y, Tensor)]

    result = by_reverse_mode(_named(fun), flat, [leaves[i] for i in places], opaque)
    if in_place:
        return args[0].copy_(result[0])
    left = iter(result)
    return upstream.tree_unflatten([next(left) if y is None else y for y in shape[1]], shape[0])


class _Transposing(threading.local):
    function: Any = None


_here = _Transposing()


@contextmanager
def _transposing(fun: Any) -> Iterator[None]:
    """Context in which calls of `fun` are those of its own transpose, and are not replaced."""
    before, _here.function = _here.function, fun
    try:
        yield
    finally:
        _here.function = before


class _RepeatedDraws:
    """Evaluations of a function that may draw random numbers: later ones repeat the first's draws.

    Args:
        name: The function's name in errors.
        leaves: Its arguments, for their devices.
        one_by_one: Whether vmap's examples are evaluated one by one, each with its own draws.
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
        if self._one_by_one and self._start.advanced():
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
    """Whether an operator is neither PyTorch's own nor a composite of such (CompositeImplicit)."""
    packet = type(operator) is upstream.OpOverloadPacket
    result = [getattr(operator, o) for o in operator.overloads()] if packet else [operator]
    key = upstream.DispatchKey.CompositeImplicitAutograd
    return not all(o.namespace in _OWN or o.has_kernel_for_dispatch_key(key) for o in result)


_OWN = ("aten", "prim", "prims", "gradtools")
_OWN_MODULES = tuple([f"{upstream.OPERATORS}.{name}" for name in _OWN])


# --- TorchScript, which no mode intercepts -------------------------------------------------------

_SAVED_INPUTS = {
    "LinalgDetBackward0": "A",
    "LinalgSlogdetBackward0": "A",
    "LinalgSolveExBackward0": "A",
    "LinalgHouseholderProductBackward0": "input",
    "NativeLayerNormBackward0": "input",
    "NativeBatchNormBackward0": "input",
}


def gated_at_custom_code(
    fun: Callable[..., Any],
    leaves: Any,
    entered: Sequence[Tensor],
    tangents: Any,
    primals: list[Tensor],
    pushed: list[Tensor],
) -> list[Tensor]:
    """The tangents, with gates that raise where custom code loses a derivative of them.

    entered: The leaves in the graph of the primals.
    """
    tracked = [y for y in primals if y.requires_grad]
    pushed = gated_where_unseen(caller_of(fun), tracked, pushed)
    custom = surveyed(tracked).custom if tracked else []
    custom = [node for node in custom if not _is_bookkeeping(node)]
    if not custom:
        return pushed
    from gradtools.torch.double_backward import gated_tangents

    along = [*zip(leaves, entered, tangents, strict=True)]
    return gated_tangents(caller_of(fun), fun, along, primals, custom, pushed)


def _is_bookkeeping(node: Any) -> bool:
    if not isinstance(node, BackwardCFunction):  # TorchScript and C++ functions
        return False
    return upstream.forward_class(type(node)) in upstream.bookkeeping()


def gated_where_unseen(caller: str, outs: Sequence[Tensor], pushed: list[Tensor]) -> list[Tensor]:
    """The tangents, with gates that refuse to differentiate those which TorchScript computed.

    No mode intercepts the operations of a scripted function. Must be called inside of the dual
    level, where the saved tensors still have their tangents.
    """
    for node in nodes_of(outs):
        name = type(node).__name__
        x = upstream.saved(node, _SAVED_INPUTS[name], None) if name in _SAVED_INPUTS else None
        by_input = upstream.saved(node, "training", True)  # not by running statistics
        if x is not None and by_input and x.requires_grad and is_dual(x):
            operation = name.removesuffix("Backward0")
            message = (
                f"{caller}: the tangent is differentiated once more, but f calls TorchScript that "
                f"holds {operation}, of whose forward-mode rule PyTorch leaves a term out "
                "(torch#198017). Call the function that was scripted."
            )
            return list(gated(pushed, [forward_ad.unpack_dual(x).primal], message))
    return pushed


# --- in compiled code ----------------------------------------------------------------------------


class RightTangents(TorchFunctionMode):
    """The mode that makes these replacements while dynamo traces a function that is pushed."""

    def __torch_function__(self, fun: Any, types: Any, args: Args = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if fun is Tensor.norm:  # dynamo fails to look it up in a dictionary, unlike torch.norm
            fun = torch.norm
        if fun in _TRACED:
            return _traced(_TRACED[fun], fun, args, kwargs)
        if fun is upstream.checkpoint_operator():  # which traces no tangents
            with RightTangents():
                return args[0](*args[1:])
        other = isinstance(fun, _OPERATORS) and fun.__module__ not in _OWN_MODULES
        if (other or isinstance(fun, upstream.HigherOrderOperator)) and _inexact(args, kwargs):
            upstream.break_graph(f"jvp: PyTorch traces no tangent of {fun.__name__}")
        return fun(*args, **kwargs)


def _traced(row: PlainProgram, fun: Any, args: Args, kwargs: Kwargs) -> Any:
    if row.program is None and "out" not in kwargs and row.applies(args, kwargs):
        return _transposed_in_trace(fun, args, kwargs)
    return traced(row, fun, args, kwargs)


def _transposed_in_trace(fun: Any, args: Args, kwargs: Kwargs) -> Any:
    """`fun(*args, **kwargs)`, with the tangent by differentiating its pullback."""
    leaves, treedef = upstream.tree_flatten((args, kwargs))
    places = [i for i, x in enumerate(leaves) if isinstance(x, Tensor) and is_inexact(x)]
    duals = [forward_ad.unpack_dual(leaves[i]) for i in places]
    moved = [(i, dual) for i, dual in zip(places, duals, strict=True) if dual.tangent is not None]
    if not moved:
        return fun(*args, **kwargs)
    primals = replaced_at(leaves, places, [dual.primal for dual in duals])
    shape: list[Any] = []

    def run(*xs: Tensor) -> list[Tensor]:
        filled = replaced_at(primals, [i for i, _ in moved], xs)
        again, named = upstream.tree_unflatten(filled, treedef)
        outs, outdef = upstream.tree_flatten(fun(*again, **named))
        shape[:] = [outdef]
        return outs

    xs, dxs = [dual.primal for _, dual in moved], [dual.tangent for _, dual in moved]
    pairs = zip(*value_and_push(run, xs, dxs), strict=True)
    outs = [y if dy is None else forward_ad.make_dual(y, dy) for y, dy in pairs]
    return upstream.tree_unflatten(outs, shape[0])


_TRACED = traced_programs((TANGENT, TANGENT_AGAIN))
