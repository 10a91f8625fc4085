"""Lists the undocumented JAX names that gradtools uses, and the reasons for their use.

Other modules import the names below from this module. Private names of `jax._src` are imported for
the classes of a jaxpr, the current trace, linearization rules, and one cache. The classes are
public in `jax.extend.core`, but importing `jax.extend.core` loads all of Pallas, which takes half
of the time of `import gradtools.jax`; a test asserts that both names refer to the same objects. The
other names are one method, and attributes of equations and jaxprs (source line, function name) that
appear in drawings, formulas and error messages. All names exist in JAX 0.7.2 to 0.12 unless a
docstring states other versions. Sentences with "If JAX removes" state the effect of a removal.
`tests/jax/test_upstream.py` tests the names that the tests of the operators do not cover.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from inspect import signature
from types import CellType, FunctionType
from typing import Any

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
from jax._src.core import trace_state_clean as trace_state_clean
from jax._src.interpreters import ad as _ad

from gradtools.code_origin import is_in

ClosedJaxpr: Any = getattr(_core, "ClosedJaxpr", Jaxpr)  # JAX 0.12 merged the two classes

CustomVJPException: Any = getattr(_ad, "CustomVJPException", ())
"""The exception that JAX raises for a derivative with respect to an array that a custom_vjp
captures. If JAX removes this class, the exception is not handled."""


class RulePrimitive(Primitive):
    """A primitive with several results. JAX's caches refer weakly to the parameter `rule`.

    Attributes:
        gradtools_flow: A function, called by `reachability`, that returns the jaxpr of the data
            flow of an equation, or None.
        gradtools_program: A function, called by `checking`, that returns the jaxpr that an equation
            evaluates, or None.
    """

    multiple_results = True
    gradtools_flow: Callable[[Any], Any] | None = None
    gradtools_program: Callable[[Any], Any] | None = None


weakly_cached: set[type] = next(
    (
        vars(module)["weakref_cache_key_types"]
        for name in ("util", "multi_weakref_lru_cache")
        if hasattr(module := sys.modules.get(f"jax._src.{name}"), "weakref_cache_key_types")
    ),
    set(),
)
"""The classes of parameters to which JAX's caches of equations refer weakly.

JAX caches the output types of equations by their parameters (2048 entries). Strong references to a
rule would prevent objects over which the user's functions close from being freed. If JAX removes
the name, these objects are not freed while the rule is in the cache.
"""

enable_x64: Any = (
    jax.enable_x64 if hasattr(jax, "enable_x64") else vars(jax.experimental)["enable_x64"]
)
"""Context manager that enables or disables float64; in JAX 0.7, `jax.experimental.enable_x64`."""


def constants_of(closed: Any) -> list[Any]:
    """Returns the constants of a closed jaxpr, with NumPy arrays unwrapped.

    JAX 0.7 and 0.8 wrap NumPy arrays in a class without operators, with an attribute `val`; since
    JAX 0.9 the wrapper is a subclass of `np.ndarray`.
    """
    own = jax.Array | np.ndarray
    return [getattr(c, "val", c) if not isinstance(c, own) else c for c in closed.consts]


def stack_of(eqn: Any) -> Sequence[Any]:
    """Returns the stack frames of an equation, innermost first, up to the start of the trace.

    `jax.extend.source_info_util.summarize` returns only one line. If JAX removes the traceback,
    the findings of `why_zero` and other reports contain no source line.
    """
    traceback = getattr(getattr(eqn, "source_info", None), "traceback", None)
    return traceback.frames if traceback is not None else ()


def scopes_of(eqn: Any) -> Iterator[tuple[str, bool]]:
    """Yields the entries of an equation's name stack, and whether each is a `jax.named_scope`.

    The first entry is the outermost scope. Entries that are not scopes are transforms: "transpose",
    "jvp", "vmap". If JAX removes the name stack, drawings have no modules, and `gradient_graph`
    raises an error because it cannot distinguish the forward pass from the backward pass.
    """
    for entry in eqn.source_info.name_stack.stack:
        yield getattr(entry, "name", ""), type(entry).__name__ == "Scope"


def is_in_scope(eqns: Iterable[Any], name: str) -> bool:
    """Returns whether at least one equation has a scope or transform of this name."""
    return any(name == scope for eqn in eqns for scope, _ in scopes_of(eqn))


def name_of(jaxpr: Any) -> str:
    """Returns the name of a jaxpr's function, or "" if the name is unknown."""
    return str(getattr(getattr(jaxpr, "debug_info", None), "func_name", "") or "")


def file_of(jaxpr: Any) -> str:
    """Returns the file and line of a jaxpr's function, or "" if they are unknown.

    If JAX removes the attribute, all functions count as functions of the user.
    """
    info = getattr(jaxpr, "debug_info", None)
    return str(getattr(info, "func_src_info", None)).partition(" at ")[2]


class Tracer(jax.core.Tracer):  # type: ignore[misc]
    """Base class of gradtools' tracers.

    Before JAX 0.10 the constructor takes no `aval`: `aval` is a property of the class. If JAX
    renames `_origin_msg`, error messages contain JAX's own text about a tracer's origin.
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


def bind_again(eqn: Any, xs: Sequence[Any]) -> Any:
    """Binds the primitive of an equation to other operands.

    Since JAX 0.9 `get_bind_params` returns only the parameters; earlier versions also returned
    functions that precede the operands.
    """
    params = eqn.primitive.get_bind_params(eqn.params)
    functions, params = params if isinstance(params, tuple) else ((), params)
    return eqn.primitive.bind(*functions, *xs, **params)


def define_linearization(primitive: Primitive, rule: Callable[..., Any]) -> None:
    """Defines how a primitive is linearized: `rule(carried, *xs, **params)`.

    carried: The mask of inputs that have tangents. Some versions of JAX pass a boolean (whether the
        rule is for reverse mode) before the mask.

    JAX 0.11 changed the type that the rule must return. With JAX 0.11 and later, or if JAX removes
    the name, no rule is defined, and JAX linearizes the jvp, which is slower in eager code.
    """
    run = lambda *args, **params: rule(*args[isinstance(args[0], bool) :], **params)
    if jax.__version_info__ < (0, 11):
        getattr(_ad, "primitive_linearizations", {})[primitive] = run


def varying_axes(aval: Any) -> frozenset[Any]:
    """Returns the mesh axes over which a type varies under shard_map.

    These axes are `aval.vma` until JAX 0.9, and `aval.manual_axis_type.varying` since 0.10.
    """
    kind = getattr(aval, "manual_axis_type", None)
    return frozenset(getattr(aval, "vma", ()) if kind is None else kind.varying)


def as_varying(x: Any, axes: Sequence[Any]) -> Any:
    """Casts x to vary over the given mesh axes. JAX 0.7 has `pvary` instead of `pcast`."""
    if hasattr(jax.lax, "pcast"):
        return jax.lax.pcast(x, tuple(axes), to="varying")
    return vars(jax.lax)["pvary"](x, tuple(axes))


# --- hacks that a maintainer of JAX would reject --------------------------------------------
#
# Two other modules contain one workaround each:
# - `known_errors` matches JAX's error messages, because the errors have no types of their own.
#   Benefit: errors contain advice. Cost: if JAX changes a message, gradtools adds no advice.
# - `code_origin` reads the instruction that raised an error; see torch/_upstream.py.


def called_by_jax(depth: int) -> bool:
    """Returns whether JAX made the call that is `depth` frames above the calling frame.

    JAX converts the mask of `x[mask]` by calling `__array__`, which must raise an error if NumPy is
    the caller; only the stack frame distinguishes a call by JAX from a call by NumPy. Benefit: f
    may select elements by a condition. Cost: in a build of JAX without Python frames, an error
    reports that f branches on a value.
    """
    return is_in(("jax",), sys._getframe(depth + 1).f_code.co_filename)


def is_activation_rule(eqn: Any) -> bool:
    """Returns whether a comparison is part of the derivative of an activation function of jax.nn.

    The second derivative of relu is zero, and the jaxpr of the derivative contains only this
    comparison; no attribute distinguishes the comparison from a comparison in the user's code.
    Benefit: `why_zero` correctly reports a zero derivative. Cost: under jit, where JAX records
    no stack, `why_zero` reports a stopped gradient.
    """
    frames = stack_of(eqn)
    of_activations = os.path.join("nn", "functions.py")  # this file defines activations
    inside = (
        f.function_name
        for f in frames
        if f.file_name.endswith(of_activations) and is_in(("jax",), f.file_name)
    )
    return next(inside, "_one_hot") not in ("one_hot", "_one_hot")


def with_variables(
    f: FunctionType, cells: dict[str, Any], named: dict[str, Any], defaults: Any
) -> FunctionType:
    """Returns a function with the same code, in which some closure cells and globals are replaced.

    flax raises an error if a captured module is mutated inside of another trace. Replacing the
    module with a copy is the only workaround, since another thread may read the closure cells of
    the original function. Benefit: loops and rules may contain functions that capture modules.
    Cost: if a function's globals contain a flax module, `global` assignments in the function change
    a copy of the globals.
    """
    scope = {**f.__globals__, **named} if named else f.__globals__
    own = zip(f.__code__.co_freevars, f.__closure__ or (), strict=True)
    closure = tuple([CellType(cells[name]) if name in cells else cell for name, cell in own])
    made = FunctionType(f.__code__, scope, f.__name__, defaults, closure)
    made.__kwdefaults__ = f.__kwdefaults__
    return made
