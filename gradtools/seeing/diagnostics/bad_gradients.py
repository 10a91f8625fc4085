"""Gradients that are useless at the given values: zero, NaN or infinite.

A framework runs the program and its backward pass (`Differentiated`) and says what cotangent each
operation was given and what it passed on (`PassedCotangents`). The analysis is the same for both:

- A gradient is lost at an operation that is given a nonzero cotangent and passes only zeros towards
  the leaf. If several nonzero cotangents of a value add up to zero, they cancel; the operation that
  is reported is the one where the paths from that value meet.
- A NaN is located where a finite cotangent enters and a non-finite one leaves.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gradtools.seeing.graphs.gradient_losses import joined
from gradtools.seeing.graphs.nodes import Node
from gradtools.seeing.graphs.recording import Vanished


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

    def gradients(self, leaves: Sequence[int]) -> Mapping[int, Any]:
        """The gradients of these leaves."""
        raise NotImplementedError

    def backward(self, leaves: Sequence[int]) -> Sequence[PassedCotangents]:
        """The operations of the backward pass towards these leaves, in program order."""
        raise NotImplementedError

    def key_of(self, leaf: int) -> Hashable:
        """The key of a leaf's value."""
        raise NotImplementedError

    def size(self, x: Any) -> float:
        """The greatest modulus of an array's entries; NaN if one is NaN, 0 if it is None."""
        raise NotImplementedError


def examined(run: Differentiated) -> dict[int, list[Vanished] | None]:
    """For each leaf where its gradient becomes zero or NaN; None if it is sound."""
    result: dict[int, list[Vanished] | None] = dict.fromkeys(run.leaves)
    grads = run.gradients([*run.leaves])
    lost = [k for k, ct in grads.items() if math.prod(ct.shape) and not run.size(ct)]
    odd = [k for k, ct in grads.items() if not math.isfinite(run.size(ct))]
    if lost or odd:
        back = _Back(run, [*lost, *odd])
        result.update((k, back.zeros(run.key_of(k))) for k in lost)
        result.update((k, back.nans(run.key_of(k))) for k in odd)
    return result


class _Back:
    """The cotangents of one backward pass."""

    def __init__(self, run: Differentiated, leaves: Sequence[int]) -> None:
        self.run, self.steps = run, run.backward(leaves)
        self.moves: list[list[bool]] = []  # which operands get a cotangent that is not zero
        self.made: dict[Hashable, bool] = {}  # whether the cotangent of a value is not zero
        self.givers: dict[Hashable, list[int]] = {}  # the steps that pass one to a value
        for at, step in enumerate(self.steps):
            self.moves.append([bool(run.size(ct)) for ct in step.passed])
            for key, ct in zip(step.results, step.given, strict=True):
                self.made[key] = bool(run.size(ct))
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
                cancelled = product >= step.least()
                passed = [step.passed[k] for k in path]
                empty = all(ct is not None and not math.prod(ct.shape) for ct in passed)
                place = Vanished(node, underflow, tuple(path), cancelled, empty=empty)
                result.append((at, place))
        return [place for _, place in sorted(result, key=lambda pair: pair[0])]

    def nans(self, leaf: Hashable) -> list[Vanished]:
        """Where a gradient became NaN or infinite, in program order."""

        def greatest(cts: Iterable[Any]) -> float:
            """The greatest modulus; NaN if one is NaN."""
            sizes = [*map(self.run.size, cts)]
            return math.nan if any(map(math.isnan, sizes)) else max(sizes)

        begins = []
        for at, path in self._towards(leaf)[0].items():
            step = self.steps[at]
            if step.explained and any(step.passed[k] is not None for k in path):
                passed = greatest(step.passed[k] for k in path)
                if math.isfinite(greatest(step.given)) and not math.isfinite(passed):
                    begins.append(step.explained(())[0])
        return [Vanished(node, kind="nan") for node in begins or [Node("add", (), ())]]


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
    """The places of a zero or NaN gradient; the origins of the output's NaN if elsewhere.

    The gradient may be finite where the output is NaN, as that of the logarithm is.
    """
    lines = {p.node.source for p in places or () if p.kind == "nan"}
    elsewhere = [Vanished(node, kind="nan_value") for node in origins if node.source not in lines]
    if elsewhere and (lines or not places):
        return elsewhere
    return None if places is None else list(places)
