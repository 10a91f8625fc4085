"""Gradients that are not zero and of no use: NaN or infinite, vanishing, or rounding noise.

A gradient vanishes if a step as large as the leaf itself would not show in the output::

    |dy/dx| |x| < least |y|,     least = 1e-6 eps in single precision and below, 1e-21 in double

A wing says how large the cotangents were that each operation was given and handed on. NaN begins
where what was given is finite and what is handed on is not; a vanishing gradient shrinks most where
the quotient of the two is least.

A gradient is rounding noise if its terms cancel: mathematically it is zero, as that of a softmax's
sum. Monte Carlo arithmetic (Parker 1997) tells: the backward pass is repeated with each cotangent
c shaken by a few units of its last place,

    c (1 + 4 eps u),   u uniform in [-1, 1)

which changes a sound gradient by as little, times its condition number, and noise by its own size.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from gradtools.seeing.graphs.nodes import Node
from gradtools.seeing.graphs.recording import Vanished

_DOUBLE, _LEAST_OF_DOUBLE, _LEAST = 1e-15, 1e-21, 1e-6
_SHAKEN = 4  # times eps
_HALF = 1e-4  # the precision of no half-precision dtype is finer
DRAWS = 3  # all of them must show it


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
        return "nan"
    least = _LEAST_OF_DOUBLE if eps < _DOUBLE else _LEAST * eps
    known = gradient and math.isfinite(leaf) and math.isfinite(output)
    return "vanishing" if known and gradient * (leaf or 1.0) < least * output else ""


def places(kind: str, handed: Iterable[Handed]) -> list[Vanished] | None:
    """Where a gradient of this kind became so, in program order; None if it is no finding."""
    if kind == "nan":
        begins = [h for h in handed if math.isfinite(h.given) and not math.isfinite(h.on)]
        return [Vanished(h.node, kind=kind) for h in begins] or [
            Vanished(Node("add", (), ()), kind=kind)
        ]
    shrinks = [h for h in handed if h.given and h.on]
    worst = min(shrinks, key=lambda h: h.on / h.given, default=None)
    return None if worst is None else [Vanished(worst.node, kind=kind)]


def shaken(cotangent: Any, uniform: Any, eps: float) -> Any:
    """A cotangent with a rounding error in each entry, for draws from [-1, 1)."""
    return cotangent * (1 + _SHAKEN * eps * uniform)


def is_noise(gradient: float, change: float, eps: float) -> bool:
    """Whether shaken cotangents change a gradient by about its own size.

    Args:
        gradient: Its greatest modulus.
        change: That of the change.
        eps: The precision of its dtype. In half precision the many roundings of a deep network
            alone come to a quarter.
    """
    return 0 < gradient < math.inf and change >= gradient * (1.0 if eps > _HALF else 0.125)
