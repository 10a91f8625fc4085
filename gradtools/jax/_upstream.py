"""Every undocumented name of JAX that gradtools uses, each with its reason; no other file uses any.

`jax._src` is used for one thing that is public elsewhere: the classes of a jaxpr. Their public
place, `jax.extend.core`, comes with all of Pallas, which was half of the time that
`import gradtools.jax` took; a test holds that they are the same objects. What is
left are fields of records (an equation's source, a jaxpr's origin) that only pictures, formulas
and messages read, one name of a method, what takes a DLPack capsule, and what guards transfers.
All were seen with JAX 0.10.2; each entry says what to do when it is gone.
`tests/jax/test_upstream.py` holds that each still does what is relied on.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from inspect import signature
from itertools import pairwise
from types import CellType, FunctionType, ModuleType
from typing import Any, cast

import jax
import jax.experimental
import numpy as np
from jax._src import core as _core
from jax._src.core import Jaxpr as Jaxpr
from jax._src.core import Literal as Literal
from jax._src.core import Primitive as Primitive
from jax._src.core import get_opaque_trace_state as get_opaque_trace_state
from jax._src.core import set_current_trace as set_current_trace
from jax._src.core import take_current_trace as take_current_trace
from jax.interpreters import mlir

from gradtools.code_origin import is_in

ClosedJaxpr: Any = getattr(_core, "ClosedJaxpr", Jaxpr)  # one class from JAX 0.12 on


enable_x64: Any = (
    jax.enable_x64 if hasattr(jax, "enable_x64") else vars(jax.experimental)["enable_x64"]
)
"""A block with or without float64. JAX 0.7 has it in `jax.experimental` alone."""


def constants_of(closed: Any) -> list[Any]:
    """The constants of a closed jaxpr, arrays of NumPy as such.

    JAX 0.7 and 0.8 wrap these in a class of their own, with a field `val` and without operators;
    from 0.9 on that is a subclass of NumPy's.
    """
    own = jax.Array | np.ndarray
    return [getattr(c, "val", c) if not isinstance(c, own) else c for c in closed.consts]


def stack_of(eqn: Any) -> Sequence[Any]:
    """The stack that made an equation, innermost first, up to where JAX began to trace.

    `jax.extend.source_info_util.summarize` gives one line of text. Gone: findings have no line.
    """
    traceback = getattr(getattr(eqn, "source_info", None), "traceback", None)
    return traceback.frames if traceback is not None else ()


def scopes_of(eqn: Any) -> Iterator[tuple[str, bool]]:
    """The names around an equation, outermost first, and whether each is a `jax.named_scope`.

    The others are transforms: "transpose", "jvp", "vmap". Gone: pictures have no modules, and
    `gradient_graph` cannot tell the passes from each other, which it then refuses.
    """
    for entry in eqn.source_info.name_stack.stack:
        yield getattr(entry, "name", ""), type(entry).__name__ == "Scope"


def is_in_scope(eqns: Iterable[Any], name: str) -> bool:
    """Whether one of these equations was made in a scope or transform of this name."""
    return any(name == scope for eqn in eqns for scope, _ in scopes_of(eqn))


def name_of(jaxpr: Any) -> str:
    """The name of the function behind a jaxpr. Gone: pictures say the primitive's name."""
    return str(getattr(getattr(jaxpr, "debug_info", None), "func_name", "") or "")


def file_of(jaxpr: Any) -> str:
    """The file and line of the function behind a jaxpr, if known. Gone: it counts as users'."""
    info = getattr(jaxpr, "debug_info", None)
    return str(getattr(info, "func_src_info", None)).partition(" at ")[2]


def is_of_random(jaxpr: Any) -> bool:
    """Whether a jaxpr is of a function of `jax.random`: a formula writes its draw as a letter.

    Gone: it writes out how the bits are made.
    """
    return "/jax/_src/random" in file_of(jaxpr).replace("\\", "/")


class Tracer(jax.core.Tracer):  # type: ignore[misc]
    """A tracer of ours. Gone: JAX's own text of where it was made, which names JAX's internals.

    JAX before 0.10 takes no `aval`: a tracer's type is a property of its class.
    """

    if "aval" in signature(jax.core.Tracer.__init__).parameters:

        def __init__(self, trace: Any, aval: Any) -> None:
            super().__init__(trace, aval)

    else:
        __slots__ = ("_aval",)

        def __init__(self, trace: Any, aval: Any) -> None:
            super().__init__(trace)  # type: ignore[call-arg]
            self._aval = aval

        @property
        def aval(self) -> Any:  # type: ignore[override]
            return self._aval

    def _origin_msg(self) -> str:
        return ""


def is_exporting(ctx: Any) -> bool:
    """Whether a lowering is `jax.export`'s. Gone: JAX's words, of serialized host_callbacks."""
    parameters = getattr(ctx.module_context, "lowering_parameters", None)
    return bool(getattr(parameters, "for_export", False))


def is_for_one_cpu(ctx: Any) -> bool:
    """Whether a lowering is for one device, the CPU: a callback's results need no sharding.

    There `mlir.emit_python_callback`, of which `jax.pure_callback` is made, hands over NumPy
    arrays; that function makes JAX's arrays of them first, which takes longer than a small
    callback. Gone: that function.
    """
    module = ctx.module_context
    devices = getattr(getattr(module, "axis_context", None), "num_devices", 0)
    emits = hasattr(mlir, "emit_python_callback")
    return emits and devices == 1 and list(getattr(module, "platforms", ())) == ["cpu"]


def emit_callback(ctx: Any, run: Callable[..., Any], xs: Sequence[Any]) -> Any:
    """Lowers a call back into Python, where `is_for_one_cpu` says that it can be."""
    avals = ctx.avals_in, ctx.avals_out
    emit: Any = mlir.emit_python_callback
    return emit(ctx, run, None, xs, *avals, has_side_effect=False, **_no_token())[0]


@cache
def _no_token() -> dict[str, bool]:
    """The argument that JAX 0.8 added. Without it a token is made, which is not used."""
    parameters = signature(mlir.emit_python_callback).parameters
    return {"returns_token": False} if "returns_token" in parameters else {}


def bind_again(eqn: Any, xs: Sequence[Any]) -> Any:
    """The results of an equation's primitive at other operands.

    `get_bind_params` gives the parameters from JAX 0.9 on; before, functions that come before the
    operands, and the parameters.
    """
    params = eqn.primitive.get_bind_params(eqn.params)
    functions, params = params if isinstance(params, tuple) else ((), params)
    return eqn.primitive.bind(*functions, *xs, **params)


def backward_shapes_are_checked() -> bool:
    """Whether a rule's cotangents must have the shapes of its primals, as JAX checks.

    The switch `jax_disable_bwd_checks` is documented with `jax.custom_vjp`, and no attribute of
    `jax.config` that a type checker knows. JAX before 0.9 has none, and always checks.
    """
    return not getattr(jax.config, "jax_disable_bwd_checks", False)


def varying_axes(aval: Any) -> frozenset[Any]:
    """The mesh axes over which a type is different under shard_map.

    `aval.vma` until JAX 0.9, `aval.manual_axis_type.varying` from 0.10 on.
    """
    kind = getattr(aval, "manual_axis_type", None)
    return frozenset(getattr(aval, "vma", ()) if kind is None else kind.varying)


def as_varying(x: Any, axes: Sequence[Any]) -> Any:
    """x, typed as different along these mesh axes too. JAX 0.7 has `pvary` for `pcast`."""
    if hasattr(jax.lax, "pcast"):
        return jax.lax.pcast(x, tuple(axes), to="varying")
    return vars(jax.lax)["pvary"](x, tuple(axes))


def prints_as(primitive: Primitive, shown: Callable[[Any], dict[str, Any]]) -> None:
    """Of an equation of this primitive of ours, a printed jaxpr shows these parameters.

    JAX's own primitives with rules are shown so. Gone: the rule's repr, and no program.
    """

    def write(eqn: Any, context: Any, settings: Any) -> Any:
        params = shown(eqn)
        return _core._pp_eqn(eqn.replace(params=params), context, settings, params=list(params))

    _core.pp_eqn_rules[primitive] = write


# --- what a maintainer of JAX would refuse ------------------------------------------------------
#
# Beside what follows, where it is needed and nowhere else: texts of errors, for which JAX has no
# types (`known_errors`). Buys words that say what to do. Costs: reworded upstream, JAX's own error
# is raised in their place.
#
# The instruction at which an error was made (`code_origin`) is looked at as PyTorch's room says.


def called_by_jax(depth: int) -> bool:
    """Whether JAX itself made the call that stands so many calls above the caller's.

    `x[mask]` counts mask by `__array__`, as NumPy does whom it is to be refused to: nothing but the
    frame tells them apart. Buys an answer where f selects by a condition; costs a guess, which is
    "no" in an optimised JAX without frames, and f is then said to branch on a value.
    """
    return is_in(("jax",), sys._getframe(depth + 1).f_code.co_filename)


def is_activation_rule(eqn: Any) -> bool:
    """Whether a comparison was made by jax.nn's derivative of an activation, such as relu.

    At second order relu is connected with derivative zero, and this comparison is all that is left
    of it. No mark tells it from a user's. Buys "its derivative is zero" in place of "cut" in what
    why_zero says; costs that under jit, where JAX keeps no stack, it is said to be cut.
    """
    frames = stack_of(eqn)
    inside = (f.function_name for f in frames if _is_activation_file(f.file_name))
    return next(inside, "_one_hot") not in ("one_hot", "_one_hot")


def _is_activation_file(file: str) -> bool:
    """Whether a file is that in which jax.nn defines its activations."""
    return file.endswith(os.path.join("nn", "functions.py")) and is_in(("jax",), file)


def is_batch_statistic(eqn: Any) -> bool:
    """Whether a BatchNorm of flax or equinox computes statistics of its batch by an equation.

    Buys the warning that a chunk has statistics of its own; costs that a renamed method is missed.
    """
    names = [frame.function_name for frame in stack_of(eqn)]
    return "BatchNorm.__call__.<locals>._stats" in names or any(
        pair == ("_compute_stats", "BatchNorm.__call__") for pair in pairwise(names)
    )


def with_variables(
    f: FunctionType, cells: dict[str, Any], named: dict[str, Any], defaults: Any
) -> FunctionType:
    """A function with the same code, whose variables by these names are others.

    flax refuses to change a module that a function closes over inside of another trace, and there
    is no other way to hand that function a copy: its own cells are the caller's, which another
    thread may read. Buys loops and rules around such a function; costs that a global which it sets
    is set in a copy of its module's, if it names a module of flax there.
    """
    scope = {**f.__globals__, **named} if named else f.__globals__
    own = zip(f.__code__.co_freevars, f.__closure__ or (), strict=True)
    closure = tuple([CellType(cells[name]) if name in cells else cell for name, cell in own])
    made = FunctionType(f.__code__, scope, f.__name__, defaults, closure)
    made.__kwdefaults__ = f.__kwdefaults__
    return made


class _TransfersRefused:
    """Inside, this thread may move no array: what `jax.transfer_guard_*` set, set at once.

    Three of these take ten times as long, which is a third of what a small callback takes. Gone:
    these three.
    """

    __slots__ = ("before", "state")

    def __enter__(self) -> None:
        room = sys.modules["jaxlib._jax"].guard_lib
        state = self.state = room.thread_local_state()
        self.before = state.host_to_device, state.device_to_device, state.device_to_host
        refused = room.TransferGuardLevel.DISALLOW_EXPLICIT
        state.host_to_device = state.device_to_device = state.device_to_host = refused

    def __exit__(self, *raised: Any) -> None:
        state = self.state
        state.host_to_device, state.device_to_device, state.device_to_host = self.before


@contextmanager
def _transfers_refused_slowly() -> Iterator[None]:
    """The same by what JAX documents."""
    refused = "disallow_explicit"
    with (
        jax.transfer_guard_host_to_device(refused),
        jax.transfer_guard_device_to_device(refused),
        jax.transfer_guard_device_to_host(refused),
    ):
        yield


def _has_guards() -> bool:
    """Whether that is there."""
    try:
        with _TransfersRefused():
            return True
    except (AttributeError, KeyError, TypeError):
        return False


transfers_refused = _TransfersRefused if _has_guards() else _transfers_refused_slowly


@cache
def giving_capsules() -> Callable[[jax.Array], Any]:
    """What makes a DLPack capsule of an array in the CPU's memory.

    `jax.Array.__dlpack__` first makes sure, by a dozen calls, that the array is on one device;
    where JAX has no other it is. Gone: that method.
    """
    room: ModuleType | None = sys.modules.get("jaxlib._jax")
    give = getattr(room, "buffer_to_dlpack_managed_tensor", None)
    try:
        if give is not None and jax.device_count() == 1:
            give(jax.device_put(np.zeros(16)))
            return cast(Callable[[jax.Array], Any], give)
    except TypeError:  # it takes other arguments
        pass
    return lambda x: x.__dlpack__()


@cache
def taking_capsules() -> Callable[[Any], jax.Array] | None:
    """What makes a DLPack capsule of the CPU's memory an array in that memory.

    `jax.dlpack.from_dlpack` asks the CPU for a stream and catches what JAX raises, which takes six
    times as long as the rest. None, where the name is gone or takes other arguments: that function.
    """
    room: ModuleType | None = sys.modules.get("jaxlib._jax")
    take = getattr(room, "dlpack_managed_tensor_to_buffer", None)
    device, example = jax.local_devices(backend="cpu")[0], np.zeros(16)
    kind = int(example.__dlpack_device__()[0])
    if take is None:
        return None
    try:
        result = take(example.__dlpack__(), device, None, None, kind)
    except TypeError:
        return None
    whole = isinstance(result, jax.Array)
    return (lambda capsule: take(capsule, device, None, None, kind)) if whole else None
