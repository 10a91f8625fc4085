"""`record` for JAX traces a program and returns the jaxpr as a graph.

If the program converts a tracer with NumPy, `float` or `item`, the trace ends (`tracing.py`), and
the conversion is reported as a finding.
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
from gradtools.seeing.graphs.recording import Recording, Run
from gradtools.seeing.jax.graphs import graph_of
from gradtools.seeing.jax.passes import passes_at
from gradtools.seeing.jax.tracing import LEAVING, captured_arrays, trace, what_left

_FULL = Dependence.DIFFERENTIABLE
__all__ = ["captured_arrays", "is_model", "record", "repeatable", "trace"]


def record(run: Run, leaves: Sequence[Any], names: Sequence[str]) -> Recording:
    """Traces a function of flat leaves, and computes its gradients at the leaves."""
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
            return Recording(graph)  # JAX does not differentiate callbacks
        raise GradtoolsError(
            f"why_zero: the gradient of f raised {type(error).__name__}: {error}"
        ) from error


def repeatable(caller: str, f: Any) -> Any:
    """Returns a function that calls f and restores the state of its modules after each run."""
    return stateful(caller, f, ()) or f


def is_model(x: Any) -> bool:
    """Returns whether x is a module of equinox or flax."""
    return isinstance(x, module_kinds())
