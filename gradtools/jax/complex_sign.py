"""The sign of complex numbers, whose derivative JAX takes as zero up to version 0.10.

The differential of s = z / |z| is

    ds = i s Im(conj(s) dz) / |z|

JAX has the rule of a real sign, so every path through a complex sign is missing in the gradient,
without an error. Such a function is refused. Its jaxpr shows the sign; a function of complex
arguments whose jaxpr is not needed otherwise is traced for this check alone, once for each
function, shapes and dtypes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import jax.numpy as jnp

from gradtools.errors import GradtoolsError
from gradtools.jax import jaxprs, reachability

if TYPE_CHECKING:
    from gradtools.seeing.graphs.nodes import Node

_clear: WeakKeyDictionary[Callable[..., Any], set[Any]] = WeakKeyDictionary()


def refuse(caller: str, closed: Any, outs: int) -> None:
    """Raises if a derivative of the first `outs` outputs goes through the sign of complex numbers.

    Args:
        caller: The operator's name.
        closed: What ``jax.make_jaxpr(f)(*args)`` returns.
        outs: The number of outputs that are differentiated.

    Raises:
        GradtoolsError: A complex sign lies on a path from an input to one of these outputs.
    """
    if not jaxprs.uses_primitive(closed, reachability.is_complex_sign):
        return
    from gradtools.seeing.graphs.losing_operations import between
    from gradtools.seeing.jax.graphs import graph_of

    graph = graph_of(closed)
    shown = replace(graph, outputs=graph.outputs[:outs])
    for value in graph.inputs:
        for node in between(shown, value, _is_complex_sign):
            place = f" at {node.source}" if node.source else ""
            raise GradtoolsError(
                f"{caller}: f takes the sign of complex numbers{place}, whose derivative this "
                "version of JAX takes for zero (z / |z| turns with z). Write z / jnp.abs(z); or "
                "gt.stop_gradient of the sign if it is meant to be a constant."
            )


def may_meet(call: Any, leaves: Sequence[Any]) -> bool:
    """Whether `call.f` may take a complex sign: leaves are complex and it is not checked yet."""
    is_complex = any(jnp.issubdtype(x.dtype, jnp.complexfloating) for x in leaves)
    return is_complex and not was_seen(call, leaves)


def was_seen(call: Any, leaves: Sequence[Any]) -> bool:
    """Whether `call.f` is known to take no complex sign at these shapes, or JAX has the rule."""
    if not reachability.complex_sign_is_a_step():
        return True
    try:
        return _key(leaves) in _clear.get(call.f, ())
    except (AttributeError, TypeError):  # no weak reference, or no hash
        return False


def remember(call: Any, leaves: Sequence[Any]) -> None:
    """Records that `call.f` takes no complex sign at these shapes, or cannot be traced."""
    try:
        _clear.setdefault(call.f, set()).add(_key(leaves))
    except (AttributeError, TypeError):
        return


def _key(leaves: Sequence[Any]) -> tuple[Any, ...]:
    return tuple((x.shape, str(x.dtype)) for x in leaves)


def _is_complex_sign(node: Node) -> bool:
    """Whether a node is a complex sign; the loss at a real sign is of another kind."""
    return node.native == "sign" and node.loss == "rule"
