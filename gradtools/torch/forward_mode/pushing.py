"""Replacements for PyTorch's forward mode where it is wrong or missing.

While gradtools pushes a tangent, an operation of the table (`plain_programs/rows.py`) is replaced
by its plain program, or by the transpose of reverse mode (`by_transposing.py`). A custom operator
is always transposed: PyTorch silently drops its tangent if only a backward is registered.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
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
    OPERATORS,
    OWN,
    TANGENT,
    TANGENT_AGAIN,
    TANGENT_OF_GRADIENT,
    UNDER_VMAP,
    PlainProgram,
    is_custom_operator,
    row_of,
    traced_programs,
)
from gradtools.torch.randomness import Randomness, restored
from gradtools.torch.rules.transposing import value_and_push

Tensor = torch.Tensor
Args = tuple[Any, ...]
Kwargs = dict[str, Any]

_TRANSPOSABLE = (*OPERATORS, BuiltinFunctionType, MethodDescriptorType)  # no Function of a user's
_NARROW = (torch.bfloat16, torch.float16)


class _NowTransposed(threading.local):
    transposed: Any = None  # the function whose reverse mode is evaluated: it is not replaced


_here = _NowTransposed()

# --- replacements --------------------------------------------------------------------------------


def pushed_rightly(fun: Any, args: Args, kwargs: Kwargs, again: bool) -> Any:
    """`fun(*args, **kwargs)` in forward mode, with the right tangents.

    Args:
        fun: A function or operator of PyTorch.
        args: Its arguments.
        kwargs: Its keyword arguments.
        again: Whether the tangents may be differentiated.
    """
    other = _OTHER_WAYS.get(fun, _UNKNOWN)  # dynamo traces this, and cannot trace `fun in`
    if other is _UNKNOWN:
        row, other = row_of(fun), None
        of_functions = isinstance(fun, upstream.HigherOrderOperator)
        if of_functions and fun is not upstream.custom_function_call:
            other = _by_its_operations
        elif row is not None or (type(fun) in OPERATORS and _is_custom(fun)):
            other = partial(_called_otherwise, row)
        _OTHER_WAYS[fun] = other
    if other is None:
        return pushed_by_pytorch(fun, args, kwargs)
    return other(fun, args, kwargs, again)


_UNKNOWN: Any = object()
_OTHER_WAYS: dict[Any, Callable[..., Any] | None] = {}  # by PyTorch's function; None: its own way

# Of a 16-bit input with 32-bit weights, as under autocast, PyTorch's tangent has the weights' dtype
# (no report was found), which the next layer refuses.
_NORMS = ("layer_norm", "batch_norm", "instance_norm", "group_norm")


def _called_otherwise(
    row: PlainProgram | None, fun: Any, args: Args, kwargs: Kwargs, again: bool
) -> Any:
    """Calls a function of the table, or a custom operator (row None), by its replacement.

    PyTorch's own way is taken where its tangents and their derivatives are right.
    """
    if fun is _here.transposed or "out" in kwargs or not _is_differentiated_here():
        return pushed_by_pytorch(fun, args, kwargs)
    if row is not None and row.name in _NORMS and args and args[0].dtype in _NARROW:
        others = (*args[1:], *kwargs.values())
        has_wide = any(isinstance(x, Tensor) and x.dtype == torch.float32 for x in others)
        if has_wide and _is_moved(args, kwargs):
            wide = args[0].to(torch.float32), *args[1:]
            return _called_otherwise(row, fun, wide, kwargs, again).to(args[0].dtype)
    wrong = {TANGENT: ""} if row is None else row.wrong
    if TANGENT in wrong:
        is_wrong = _is_moved(args, kwargs)
    elif GRADIENT_AGAIN in wrong or TANGENT_OF_GRADIENT in wrong:
        is_wrong = _is_moved_again(args, kwargs)
    elif upstream.peek_interpreter_stack() is not None and (MAPPED in wrong or UNDER_VMAP in wrong):
        is_wrong = len(levels_differentiating(_inexact(args, kwargs))) > 1
    else:
        is_wrong = again and TANGENT_AGAIN in wrong and not _is_in_place(fun)
        is_wrong = is_wrong and _is_moved_again(args, kwargs)
    if not is_wrong or (row is not None and not row.applies(args, kwargs)):
        return pushed_by_pytorch(fun, args, kwargs)
    if row is None or row.program is None:
        opaque = row is None or fun is upstream.linear_cross_entropy
        return _transposed(fun, args, kwargs, opaque)
    return row.program(*args, **kwargs)


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
    if not torch.is_grad_enabled():
        return False
    for x in _inexact(args, kwargs):
        tangent = None if is_wrapped(x) else forward_ad.unpack_dual(x).tangent
        if unwrapped(x).requires_grad or (tangent is not None and tangent.requires_grad):
            return True
    return False


def _transposed(fun: Any, args: Args, kwargs: Kwargs, opaque: bool) -> Any:
    """`fun(*args, **kwargs)` by reverse mode only; an in-place operation works on a copy."""
    name = str(fun) if type(fun) in OPERATORS else getattr(fun, "__name__", str(fun))
    weight = args[2] if name == "cross_entropy_loss" and len(args) > 2 else None
    if weight is not None and not is_mapped(weight):  # it has no derivative with respect to it
        args = (*args[:2], unwrapped(weight), *args[3:])
    leaves, treedef = upstream.tree_flatten((args, kwargs))
    kinds = {x.device.type for x in leaves if isinstance(x, Tensor)}
    one_by_one = opaque and upstream.peek_interpreter_stack() is not None
    # Those that something differentiates or maps.
    tensors = [(i, x) for i, x in enumerate(leaves) if isinstance(x, Tensor)]
    places = [i for i, x in tensors if is_wrapped(x) or x.requires_grad or is_dual(x)]
    in_place = _is_in_place(fun)
    if in_place:  # a rule's saved tensors must not change
        leaves[0] = leaves[0].clone()
    start: list[Randomness] = []  # before the first evaluation
    shape: list[Any] = []

    def flat(*xs: Tensor) -> list[Tensor]:
        again, named = upstream.tree_unflatten(replaced_at(leaves, places, xs), treedef)
        again = (again[0].clone(), *again[1:]) if in_place else again
        is_first = not start
        if is_first:
            start.append(Randomness.everywhere(kinds))
        before, _here.transposed = _here.transposed, fun
        try:
            with restored(None if is_first else start[0]):  # later with the same random numbers
                result = fun(*again, **named)
        finally:
            _here.transposed = before
        if is_first and one_by_one and start[0].advanced():
            raise GradtoolsError(
                f"jvp: {name} draws random numbers and is pushed by transposing its backward "
                "pass, which evaluates it again; inside of torch.func's transforms the draws "
                "of single examples cannot be repeated. Use reverse mode there."
            )
        outs, outdef = upstream.tree_flatten(result)
        shape[:] = outdef, [None if isinstance(y, Tensor) else y for y in outs]
        return [y for y in outs if isinstance(y, Tensor)]

    result = by_reverse_mode(name, flat, [leaves[i] for i in places], opaque)
    if in_place:
        return args[0].copy_(result[0])
    left = iter(result)
    return upstream.tree_unflatten([next(left) if y is None else y for y in shape[1]], shape[0])


def _is_in_place(fun: Any) -> bool:
    name = getattr(fun, "__name__", "").partition(".")[0]
    return name.endswith("_") and not name.endswith("__")


def _is_custom(operator: Any) -> bool:
    """Whether an operator is neither PyTorch's own nor a composite of such (CompositeImplicit)."""
    packet = type(operator) is upstream.OpOverloadPacket
    result = [getattr(operator, o) for o in operator.overloads()] if packet else [operator]
    key = upstream.DispatchKey.CompositeImplicitAutograd
    return not all(o.namespace in OWN or o.has_kernel_for_dispatch_key(key) for o in result)


# --- custom code, which no mode intercepts -------------------------------------------------------

_SAVED_INPUTS = {
    **dict.fromkeys(("LinalgDet", "LinalgSlogdet", "LinalgSolveEx"), "A"),
    **dict.fromkeys(("LinalgHouseholderProduct", "NativeLayerNorm", "NativeBatchNorm"), "input"),
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
    # No mode intercepts the operations of a scripted function, but the graph shows them. This runs
    # inside of the dual level, where the saved tensors still have their tangents.
    for node in nodes_of(tracked):
        operation = type(node).__name__.removesuffix("Backward0")
        saves = operation in _SAVED_INPUTS and upstream.saved(node, "training", True)
        # Not of a norm by running statistics.
        x = upstream.saved(node, _SAVED_INPUTS[operation], None) if saves else None
        if x is not None and x.requires_grad and is_dual(x):
            message = (
                f"{caller_of(fun)}: the tangent is differentiated once more, but f calls "
                f"TorchScript that holds {operation}, of whose forward-mode rule PyTorch leaves a "
                "term out (torch#198017). Call the function that was scripted."
            )
            pushed = list(gated(pushed, [forward_ad.unpack_dual(x).primal], message))
            break
    custom = surveyed(tracked).custom if tracked else []
    custom = [
        node
        for node in custom
        if not isinstance(node, BackwardCFunction)  # of TorchScript or C++
        or upstream.forward_class(type(node)) not in upstream.bookkeeping()
    ]
    if not custom:
        return pushed
    from gradtools.torch.double_backward import gated_tangents

    along = [*zip(leaves, entered, tangents, strict=True)]
    return gated_tangents(caller_of(fun), fun, along, primals, custom, pushed)


# --- in compiled code ----------------------------------------------------------------------------


class RightTangents(TorchFunctionMode):
    """The mode that makes these replacements while dynamo traces a function that is pushed."""

    def __torch_function__(self, fun: Any, types: Any, args: Args = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if fun is Tensor.norm:  # dynamo fails to look it up in a dictionary, unlike torch.norm
            fun = torch.norm
        if fun in _TRACED:
            row = _TRACED[fun]
            if row.program is None and "out" not in kwargs and row.applies(args, kwargs):
                return _transposed_in_trace(fun, args, kwargs)
            return traced(row, fun, args, kwargs)
        if fun is upstream.checkpoint_operator():  # which traces no tangents
            with RightTangents():
                return args[0](*args[1:])
        other = is_custom_operator(fun) or isinstance(fun, upstream.HigherOrderOperator)
        if other and _inexact(args, kwargs):
            upstream.break_graph(f"jvp: PyTorch traces no tangent of {fun.__name__}")
        return fun(*args, **kwargs)


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
