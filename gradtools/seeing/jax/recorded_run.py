"""`record` in JAX returns the jaxpr of a program as a graph, or JAX's error.

A program is traced abstractly, so nothing is computed. A program that branches on values, as eager
differentiation allows, is traced with concrete values where Python needs them
(`concrete_tracing.py`). An array that leaves JAX through NumPy, float or item ends the trace and is
the finding.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax

from gradtools.errors import GradtoolsError
from gradtools.jax.module_arguments import module_kinds
from gradtools.jax.recomputing import stateful
from gradtools.jax.trees import is_inexact
from gradtools.seeing.graphs.derivative_flow import behind
from gradtools.seeing.graphs.nodes import Dependence
from gradtools.seeing.graphs.recording import Recording, Run, Wanted
from gradtools.seeing.jax.graphs import graph_of
from gradtools.seeing.jax.passes import passes_at
from gradtools.seeing.jax.tracing import LEAVING, captured_arrays, trace, what_left

_FULL = Dependence.DIFFERENTIABLE
__all__ = ["captured_arrays", "is_model", "record", "repeatable", "trace"]


def record(
    run: Run,
    leaves: Sequence[Any],
    names: Sequence[str],
    wanted: Wanted = lambda x: False,
) -> Recording:
    """Records a function of flat leaves as a graph and differentiates it.

    wanted: Unused: captured arrays of JAX are constants.
    """
    try:
        traced = trace(run, leaves)
    except LEAVING as error:
        kind = what_left(error)
        if kind is None:
            raise
        return Recording(graph_of(jax.make_jaxpr(lambda *xs: [])(*leaves), names), kind)
    graph = graph_of(traced.closed, names, captured=captured_arrays(run))
    matters = behind(graph, tuple(graph.outputs))
    avals = traced.closed.out_avals
    outs = [k for k, a in enumerate(avals) if is_inexact(a) and k not in traced.host_outputs]
    reached = [i for i, v in enumerate(graph.inputs) if matters.get(v) == _FULL]
    wrt = [i for i in reached if is_inexact(leaves[i])]
    if not wrt:
        return Recording(graph)
    try:
        return Recording(graph, passes=passes_at(traced.closed, graph, leaves, wrt, outs))
    except GradtoolsError:
        raise
    except Exception as error:
        if any(node.loss == "left_framework" for _, node in graph.walk()):
            return Recording(graph)  # a finding: JAX does not differentiate callbacks
        raise GradtoolsError(
            f"why_zero: the gradient of f raised {type(error).__name__}: {error}"
        ) from error


def watchable() -> bool:
    """Returns True: a program can be traced inside of any transform."""
    return True


def repeatable(caller: str, f: Any) -> Any:
    """Wraps f so that the state of its stateful modules is restored after each run."""
    return stateful(caller, f, ()) or f


def is_model(x: Any) -> bool:
    """Returns whether x is a module of a library."""
    return isinstance(x, module_kinds())


# --- the trace ---------------------------------------------------------------------------


@dataclass(frozen=True)
class Traced:
    """A traced program.

    Attributes:
        closed: Its closed jaxpr.
        host_outputs: The indices of outputs that are not JAX arrays.
    """

    closed: Any
    host_outputs: tuple[int, ...]


def trace(run: Run, leaves: Sequence[Any]) -> Traced:
    """Traces a run to a jaxpr."""
    host: list[int] = []

    def fun(*xs: Any) -> list[Any]:
        outs = list(run(list(xs)))
        host[:] = [k for k, y in enumerate(outs) if not isinstance(y, jax.Array)]
        return [_constant(y) if k in host else y for k, y in enumerate(outs)]

    try:
        return Traced(jax.make_jaxpr(fun)(*leaves), tuple(host))
    except jax.errors.NonConcreteBooleanIndexError:
        pass
    except jax.errors.ConcretizationTypeError as error:
        if _what_left(error) is not None:
            raise
    return Traced(jaxpr_with_answers(fun, leaves), tuple(host))


def _constant(y: Any) -> Any:
    """Converts a NumPy or Python output to a constant of its shape."""
    array = np.asarray(y)
    return jnp.asarray(array) if array.dtype.kind in "fciub" else jnp.zeros(())


# --- JAX's errors ------------------------------------------------------------------------


def _what_left(error: Exception) -> Finding | None:
    """Describes how an array left JAX; None if a shape or branch depended on its values."""
    line, modules = source_of_error(error)
    written = line.text if line is not None else ""
    if isinstance(error, jax.errors.TracerBoolConversionError):
        return None
    if isinstance(error, jax.errors.TracerArrayConversionError):
        operation = "numpy"
    elif isinstance(error, jax.errors.TracerIntegerConversionError):
        operation = "int"
    else:
        names = (name for name in ("item", "tolist") if f".{name}(" in written)
        operation = refused_number(error) or next(names, "")
    message = str(error).strip().splitlines()[0]
    lost = Finding("", "left_framework", operation, line, modules, detail=message)
    return lost if operation else None


# --- captured arrays ---------------------------------------------------------------------


def captured_arrays(run: Run) -> dict[int, str]:
    """Maps the id of each array that a function can reach without arguments to its name."""
    result: dict[int, str] = {}
    for x, name in _reached(run):
        if isinstance(x, jax.Array | np.ndarray):
            result.setdefault(id(x), name)
    return result


def _reached(run: Run) -> Iterator[tuple[Any, str]]:
    """Yields all objects that a function can reach without its arguments, with names."""
    owner = getattr(run, "__self__", None)
    start = getattr(owner, "f", run)  # the user's function, without the arguments of this call
    is_array = lambda x: isinstance(x, jax.Array | np.ndarray)
    return named_objects([(start, ""), (type(start).__call__, "")], is_array)
