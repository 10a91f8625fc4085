"""Nonzero gradients that are useless: NaN or infinite, vanishing, or rounding noise.

A gradient vanishes if a step as large as the leaf itself would not change the output::

    |dy/dx| |x| < least |y|,     least = 1e-6 eps in single precision and below, 1e-21 in double

A backend reports the greatest cotangent that enters and leaves each operation's backward. NaN is
located where a finite cotangent enters and a non-finite one leaves, a vanishing gradient where the
quotient of the two is least.

A gradient is rounding noise if its terms cancel: mathematically it is zero, as that of a softmax's
sum. It is detected by Monte Carlo arithmetic (Parker 1997). The backward pass is repeated with each
cotangent c perturbed by a few units in the last place,

    c (1 + 4 eps u),   u uniform in [-1, 1)

which changes a well-conditioned gradient by a few eps, and noise by its own size.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from gradtools.seeing.graphs.nodes import Node
from gradtools.seeing.graphs.recording import Vanished

_DOUBLE, _LEAST_OF_DOUBLE, _LEAST = 1e-15, 1e-21, 1e-6
_SHAKEN = 4  # times eps
_HALF = 1e-4  # every half-precision dtype has a greater eps
DRAWS = 3  # perturbed backward passes, all of which must show noise


@dataclass(frozen=True)
class CotangentRange:
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
    """Classifies a gradient by its greatest modulus: "nan", "vanishing", or "" if ordinary.

    Args:
        gradient: The greatest modulus of the gradient; NaN if there is one.
        leaf: The greatest modulus of the leaf.
        output: The greatest modulus of the output.
        eps: The precision of the leaf's dtype.
    """
    if not math.isfinite(gradient):
        return "nan"
    least = _LEAST_OF_DOUBLE if eps < _DOUBLE else _LEAST * eps
    known = gradient and math.isfinite(leaf) and math.isfinite(output)
    return "vanishing" if known and gradient * (leaf or 1.0) < least * output else ""


def places(kind: str, handed: Iterable[CotangentRange]) -> list[Vanished] | None:
    """Where a gradient became NaN or vanishing, in program order; None if it is no finding."""
    if kind == "nan":
        begins = [h for h in handed if math.isfinite(h.given) and not math.isfinite(h.on)]
        return [Vanished(h.node, kind=kind) for h in begins] or [
            Vanished(Node("add", (), ()), kind=kind)
        ]
    shrinks = [h for h in handed if h.given and h.on]
    worst = min(shrinks, key=lambda h: h.on / h.given, default=None)
    return None if worst is None else [Vanished(worst.node, kind=kind)]


class ValueOrigins:
    """The operations that made NaN or infinity of finite numbers, for each bad value of a run.

    A value is bad if it has a NaN or infinite entry. The backend identifies values by keys.
    """

    def __init__(self) -> None:
        self._of: dict[Hashable, dict[Node, None]] = {}

    def add(self, node: Node, inputs: Iterable[Hashable], outputs: Iterable[Hashable]) -> None:
        """Adds an operation with the keys of its bad inputs and of its bad outputs."""
        entering = [self._of.get(key, {}) for key in inputs]
        origins = {n: None for of in entering for n in of} if entering else {node: None}
        self._of.update((key, origins) for key in outputs)

    def of(self, keys: Iterable[Hashable]) -> list[Node]:
        """The operations from which the bad ones of these values come."""
        return list({n: None for key in keys for n in self._of.get(key, {})})


def at_origins(places: Sequence[Vanished] | None, origins: Iterable[Node]) -> list[Vanished] | None:
    """The places of a NaN gradient; the origins of the output's NaN if these are elsewhere."""
    lines = {p.node.source for p in places or () if p.kind == "nan"}
    elsewhere = [Vanished(node, kind="nan_value") for node in origins if node.source not in lines]
    return elsewhere if lines and elsewhere else None if places is None else list(places)


def shaken(cotangent: Any, uniform: Any, eps: float) -> Any:
    """A cotangent with a rounding error in each entry, for draws from [-1, 1)."""
    return cotangent * (1 + _SHAKEN * eps * uniform)


def is_noise(gradient: float, change: float, eps: float) -> bool:
    """Whether perturbed cotangents change a gradient by about its own size.

    Args:
        gradient: The gradient's greatest modulus.
        change: The change's greatest modulus.
        eps: The precision of its dtype. In half precision the roundings of a deep network alone
            change a gradient by a quarter.
    """
    return 0 < gradient < math.inf and change >= gradient * (1.0 if eps > _HALF else 0.125)
