"""Gradients that are not zero and of no use: NaN or infinite, or too faint to move anything.

A gradient is faint if a step as large as the leaf itself would not show in the output::

    |dy/dx| |x| < least |y|,     least = 1e-6 eps in single precision and below, 1e-21 in double

A wing says how large the cotangents were that each operation was given and handed on. NaN begins
where what was given is finite and what is handed on is not; a faint gradient shrinks most where
the quotient of the two is least. Where that is a rounding error, its terms cancel: it is zero.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from gradtools.seeing.graph import Node
from gradtools.seeing.recording import Vanished

_DOUBLE, _LEAST_OF_DOUBLE, _LEAST = 1e-15, 1e-21, 1e-6
_ROUNDING = 100  # times eps


@dataclass(frozen=True)
class Handed:
    """The greatest cotangent that an operation was given on a leaf's path, and what it handed on.

    Attributes:
        node: The operation.
        given: The greatest modulus of what it was given.
        on: The greatest modulus of what it handed on; NaN if there is one.
    """

    node: Node
    given: float
    on: float


def extreme(gradient: float, leaf: float, output: float, eps: float) -> str:
    """The kind of a gradient of this greatest modulus, or nothing if it is an ordinary one.

    Args:
        gradient: The greatest modulus of the gradient; NaN if there is one.
        leaf: That of the leaf.
        output: That of the output.
        eps: The precision of the leaf's dtype.
    """
    if not math.isfinite(gradient):
        return "not_finite"
    least = _LEAST_OF_DOUBLE if eps < _DOUBLE else _LEAST * eps
    known = gradient and math.isfinite(leaf) and math.isfinite(output)
    return "faint" if known and gradient * (leaf or 1.0) < least * output else ""


def places(kind: str, handed: Iterable[Handed], eps: float) -> list[Vanished] | None:
    """Where a gradient of this kind became so, in program order; None if it is no finding."""
    if kind == "not_finite":
        begins = [h for h in handed if math.isfinite(h.given) and not math.isfinite(h.on)]
        return [Vanished(h.node, kind=kind) for h in begins] or [
            Vanished(Node("add", (), ()), kind=kind)
        ]
    shrinks = [h for h in handed if h.given and h.on]
    worst = min(shrinks, key=lambda h: h.on / h.given, default=None)
    if worst is None or worst.on / worst.given < _ROUNDING * eps:
        return None
    return [Vanished(worst.node, kind=kind)]


__all__ = ["Handed", "extreme", "places"]
