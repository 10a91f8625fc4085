"""Gradients that are useless at the given values: zero, NaN or infinite, vanishing, or noise.

A framework runs the program and its backward pass (`Differentiated`) and says what cotangent each
operation was given and what it passed on (`PassedCotangents`). The analysis is the same for both:

- A gradient is lost at an operation that is given a nonzero cotangent and passes only zeros towards
  the leaf. If several nonzero cotangents of a value add up to zero, they cancel; the operation that
  is reported is the one where the paths from that value meet.
- A gradient vanishes if a step as large as the leaf itself would not change the output::

      |dy/dx| |x| < least |y|,     least = 1e-6 eps in single precision and below, 1e-21 in double

  It is located where the cotangents shrink most, NaN where a finite cotangent enters and a
  non-finite one leaves.
- A gradient is rounding noise if its terms cancel: mathematically it is zero, as that of the sum of
  a softmax. It is detected by Monte Carlo arithmetic (Parker 1997): the backward pass is repeated
  with each cotangent c perturbed by a few units in the last place, ``c (1 + 4 eps u)`` with u
  uniform in [-1, 1), which changes a well-conditioned gradient by a few eps, and noise by its own
  size. Noise counts as zero.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from gradtools.seeing.graphs.losing_operations import joined
from gradtools.seeing.graphs.nodes import Node
from gradtools.seeing.graphs.recording import Vanished

_DOUBLE, _LEAST_OF_DOUBLE, _LEAST = 1e-15, 1e-21, 1e-6
_SHAKEN = 4  # times eps
_HALF = 1e-4  # every half-precision dtype has a greater eps
_DRAWS = 3  # perturbed backward passes, all of which must show noise


@dataclass(frozen=True, eq=False)
class PassedCotangents:
    """An operation of a backward pass. A cotangent is None where there is none.

    Attributes:
        key: Identifies the operation in another backward pass of the same run.
        results: The values that it makes, by keys.
        operands: The values that it reads, by keys.
        given: The cotangents of its results.
        passed: The cotangents of its operands.
        explained: The node to report if it passes zeros to the operands at these positions, and the
            size of these cotangents computed without underflow: zero if the factor is zero, too
            great if terms cancelled. None for an operation that is not reported.
        least: The least normal number of the cotangents' dtype, with room for rounding.
    """

    key: Hashable
    results: Sequence[Hashable]
    operands: Sequence[Hashable]
    given: Sequence[Any]
    passed: Sequence[Any]
    explained: Callable[[Sequence[int]], tuple[Node, float]] | None
    least: Callable[[], float]


class Differentiated:
    """A program that ran at the given values, with its backward pass; each framework has one.

    Attributes:
        leaves: The examined arrays, by number.
        outs: The floating outputs.
    """

    leaves: Mapping[int, Any]
    outs: Sequence[Any]

    def gradients(self, leaves: Sequence[int], draw: int | None = None) -> Mapping[int, Any]:
        """The gradients of these leaves; `draw`: the seed of rounding errors, if any."""
        raise NotImplementedError

    def backward(self, leaves: Sequence[int], draw: int | None) -> Sequence[PassedCotangents]:
        """The operations of the backward pass towards these leaves, in program order."""
        raise NotImplementedError

    def key_of(self, leaf: int) -> Hashable:
        """The key of a leaf's value."""
        raise NotImplementedError

    def size(self, x: Any) -> float:
        """The greatest modulus of an array's entries; NaN if one is NaN, 0 if it is None."""
        raise NotImplementedError

    def eps(self, x: Any) -> float:
        """The precision of an array's dtype."""
        raise NotImplementedError

    def is_noise(self, ct: Any, other: Any) -> bool:
        """Whether a cotangent is noise, given that of a perturbed backward pass.

        Noise changes by about its own size. In half precision the roundings of a deep network alone
        change a gradient by a quarter.
        """
        if ct is None:
            return False
        gradient, eps = self.size(ct), self.eps(ct)
        change = self.size(ct if other is None else other - ct)
        return 0 < gradient < math.inf and change >= gradient * (1.0 if eps > _HALF else 0.125)


def examined(run: Differentiated) -> dict[int, list[Vanished] | None]:
    """For each leaf where its gradient becomes zero, NaN or vanishing; None if it is sound."""
    result: dict[int, list[Vanished] | None] = dict.fromkeys(run.leaves)
    grads = run.gradients([*run.leaves])
    lost = [k for k, ct in grads.items() if math.prod(ct.shape) and not run.size(ct)]
    left = {k: ct for k, ct in grads.items() if k not in lost}
    noise = dict(left)
    for draw in range(_DRAWS):
        again = run.gradients([*noise], draw) if noise else {}
        noise = {k: ct for k, ct in noise.items() if run.is_noise(ct, again.get(k))}
    output = max(map(run.size, run.outs), default=0.0)
    odd: dict[int, str] = {}  # by leaf: "nan" or "vanishing"
    for k, ct in left.items():
        if k in noise:
            continue
        size, leaf, eps = run.size(ct), run.size(run.leaves[k]), run.eps(ct)
        least = _LEAST_OF_DOUBLE if eps < _DOUBLE else _LEAST * eps
        known = size and math.isfinite(leaf) and math.isfinite(output)
        if not math.isfinite(size):
            odd[k] = "nan"
        elif known and size * (leaf or 1.0) < least * output:
            odd[k] = "vanishing"
    if lost or noise or odd:
        back = _Back(run, [*lost, *noise, *odd], bool(noise))
        for k in (*lost, *noise):
            zeros = back.zeros(run.key_of(k))
            result[k] = [replace(v, noise=v.cancelled and k in noise) for v in zeros]
        for k, kind in odd.items():
            result[k] = back.extremes(run.key_of(k), kind)
    return result


class _Back:
    """The cotangents of one backward pass; noise counts as zero."""

    def __init__(self, run: Differentiated, leaves: Sequence[int], noisy: bool) -> None:
        self.run, self.steps = run, run.backward(leaves, None)
        perturbed = {step.key: step for step in run.backward(leaves, 0)} if noisy else {}
        self.noise: list[list[bool]] = []  # for each step, which operands get noise
        self.moves: list[list[bool]] = []  # which operands get a cotangent that is not zero
        self.made: dict[Hashable, bool] = {}  # whether the cotangent of a value is not zero
        self.givers: dict[Hashable, list[int]] = {}  # the steps that pass one to a value
        for at, step in enumerate(self.steps):
            if (other := perturbed.get(step.key)) is not None:
                given = [*map(run.is_noise, step.given, other.given)]
                passed = [*map(run.is_noise, step.passed, other.passed)]
            else:
                given, passed = [False] * len(step.given), [False] * len(step.passed)
            sizes = zip(map(run.size, step.passed), passed, strict=True)
            self.noise.append(passed)
            self.moves.append([bool(size) and not is_noise for size, is_noise in sizes])
            for key, ct, is_noise in zip(step.results, step.given, given, strict=True):
                self.made[key] = bool(run.size(ct)) and not is_noise
            for key, moved in zip(step.operands, self.moves[at], strict=True):
                if moved:
                    self.givers.setdefault(key, []).append(at)

    def _towards(self, leaf: Hashable) -> tuple[dict[int, list[int]], set[Hashable]]:
        """The steps on the leaf's paths, each with its operands there, and the values."""
        values, paths = {leaf}, dict[int, list[int]]()
        for at, step in enumerate(self.steps):
            path = [k for k, key in enumerate(step.operands) if key in values]
            if path:
                paths[at] = path
                values.update(step.results)
        return paths, values

    def zeros(self, leaf: Hashable) -> list[Vanished]:
        """The operations at which the cotangent of a leaf becomes zero, in program order."""
        paths, values = self._towards(leaf)
        result = []
        for key, givers in self.givers.items():  # cancelled, where the paths of several meet
            if len(givers) > 1 and key in values and not self.made.get(key):
                meeting = joined([(step.operands, step.results) for step in self.steps], givers)
                explained = None if meeting is None else self.steps[meeting].explained
                if meeting is not None and explained is not None:
                    result.append((meeting, Vanished(explained(())[0], cancelled=True)))
        for at, path in paths.items():
            step, moves = self.steps[at], self.moves[at]
            given = any(self.made[key] for key in step.results)
            if given and step.explained and not any(moves[k] for k in path):
                node, product = step.explained(path)
                underflow = 0 < product < step.least()
                cancelled = any(self.noise[at][k] for k in path) or product >= step.least()
                passed = [step.passed[k] for k in path]
                empty = all(ct is not None and not math.prod(ct.shape) for ct in passed)
                place = Vanished(node, underflow, tuple(path), cancelled, empty=empty)
                result.append((at, place))
        return [place for _, place in sorted(result, key=lambda pair: pair[0])]

    def extremes(self, leaf: Hashable, kind: str) -> list[Vanished] | None:
        """Where a gradient became NaN or vanishing, in program order; None if it is no finding."""

        def greatest(cts: Iterable[Any]) -> float:
            """The greatest modulus; NaN if one is NaN."""
            sizes = [*map(self.run.size, cts)]
            return math.nan if any(map(math.isnan, sizes)) else max(sizes)

        ranges = []  # for each operation the greatest cotangents given and passed on
        for at, path in self._towards(leaf)[0].items():
            step = self.steps[at]
            if step.explained and any(step.passed[k] is not None for k in path):
                passed = greatest(step.passed[k] for k in path)
                ranges.append((step.explained(())[0], greatest(step.given), passed))
        if kind == "nan":
            begins = [n for n, of, on in ranges if math.isfinite(of) and not math.isfinite(on)]
            return [Vanished(n, kind=kind) for n in begins or [Node("add", (), ())]]
        shrinks = [(on / of, node) for node, of, on in ranges if of and on]
        worst = min(shrinks, key=lambda pair: pair[0], default=None)
        return None if worst is None else [Vanished(worst[1], kind=kind)]


# --- NaN and infinite values -------------------------------------------------------------


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


# --- rounding noise ----------------------------------------------------------------------


def shaken(cotangent: Any, uniform: Any, eps: float) -> Any:
    """A cotangent with a rounding error in each entry, for draws from [-1, 1)."""
    return cotangent * (1 + _SHAKEN * eps * uniform)
