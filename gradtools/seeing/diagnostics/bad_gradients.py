"""Gradients that are useless at the given values: zero, NaN or infinite.

A framework runs the backward pass of a recorded program and describes each operation by the sizes
of the cotangents that it receives and passes on (`BackwardStep`). The analysis is common to both:

- A gradient is lost at an operation that receives a nonzero cotangent and passes only zeros towards
  the leaf. If several nonzero cotangents of a value add up to zero, they cancel; the operation that
  is reported is the one where the paths from that value meet.
- A NaN is located where a finite cotangent enters and a non-finite one leaves.
"""

from __future__ import annotations

import math
from collections.abc import Container, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from gradtools.seeing.graphs.derivative_flow import any_of
from gradtools.seeing.graphs.nodes import Node
from gradtools.seeing.graphs.recording import Vanished

K = TypeVar("K", bound=Hashable)
Size = float | None


@dataclass(frozen=True, eq=False)
class BackwardStep:
    """An operation of a backward pass.

    A size is the greatest modulus of a cotangent's entries, NaN if one is NaN, 0 if there is no
    entry, None if there is no cotangent.

    Attributes:
        node: The operation in the graph; None if it is not reported.
        results: The values that it makes, by keys.
        operands: The values that it reads, by keys.
        given: The sizes of the cotangents of its results.
        passed: The sizes of the cotangents of its operands.
        empty: The positions of operands without entries.
    """

    node: Node | None
    results: Sequence[Hashable]
    operands: Sequence[Hashable]
    given: Sequence[Size]
    passed: Sequence[Size]
    empty: Container[int] = ()


def lost_at_values(
    steps: Sequence[BackwardStep], gradients: Mapping[K, float]
) -> dict[K, list[Vanished]]:
    """Where the gradients that are zero, NaN or infinite become so, in program order.

    Args:
        steps: The operations, in program order.
        gradients: The size of the gradient of each leaf, by the key of its value.
    """
    moves = [[bool(size) for size in step.passed] for step in steps]
    made: dict[Hashable, bool] = {}  # whether the cotangent of a value is nonzero
    givers: dict[Hashable, list[int]] = {}  # the steps that pass a nonzero one to a value
    for at, step in enumerate(steps):
        made.update((key, bool(size)) for key, size in zip(step.results, step.given, strict=True))
        for key, moved in zip(step.operands, moves[at], strict=True):
            if moved:
                givers.setdefault(key, []).append(at)

    def zeros(paths: Mapping[int, list[int]], values: Container[Hashable]) -> list[Vanished]:
        result = []
        for key, several in givers.items():
            if len(several) > 1 and key in values and not made.get(key):
                meeting = _meeting(steps, several)
                node = None if meeting is None else steps[meeting].node
                if meeting is not None and node is not None:
                    result.append((meeting, Vanished(node, "cancelled")))
        for at, path in paths.items():
            step = steps[at]
            given = any(made[key] for key in step.results)
            if given and step.node is not None and not any(moves[at][k] for k in path):
                kind = "empty" if all(k in step.empty for k in path) else ""
                result.append((at, Vanished(step.node, kind, tuple(path))))
        return [place for _, place in sorted(result, key=lambda pair: pair[0])]

    def nans(paths: Mapping[int, list[int]]) -> list[Vanished]:
        begins = [
            Vanished(step.node, "nan")
            for step, path in ((steps[at], path) for at, path in paths.items())
            if step.node is not None and not _is_bad(step.given)
            if _is_bad([step.passed[k] for k in path])
        ]
        return begins or [Vanished(Node("add", (), ()), "nan")]

    result = {}
    for leaf, size in gradients.items():
        if not size or not math.isfinite(size):
            paths, values = _towards(steps, leaf)
            result[leaf] = nans(paths) if size else zeros(paths, values)
    return result


def _is_bad(sizes: Iterable[Size]) -> bool:
    return not all(size is None or math.isfinite(size) for size in sizes)


def _towards(
    steps: Sequence[BackwardStep], leaf: Hashable
) -> tuple[dict[int, list[int]], set[Hashable]]:
    """The steps on a leaf's paths, each with its operands there, and the values on them."""
    values, paths = {leaf}, dict[int, list[int]]()
    for at, step in enumerate(steps):
        path = [k for k, key in enumerate(step.operands) if key in values]
        if path:
            paths[at] = path
            values.update(step.results)
    return paths, values


def _meeting(steps: Sequence[BackwardStep], at: Sequence[int]) -> int | None:
    """The position of the first step that depends on all of these, or is the last of them."""
    everything = (1 << len(at)) - 1
    carried: dict[Hashable, int] = {}
    for position, step in enumerate(steps):
        mask = any_of(1 << k for k, other in enumerate(at) if other == position)
        mask |= any_of(carried.get(value, 0) for value in step.operands)
        if mask == everything:
            return position
        carried.update((value, mask) for value in step.results if mask)
    return None


# --- NaN and infinite values -------------------------------------------------------------


def origins_of_bad_values(
    steps: Iterable[tuple[Node, Sequence[Hashable], Sequence[Hashable]]],
    bad: Container[Hashable],
    ends: Iterable[Hashable],
) -> list[Node]:
    """The operations that make NaN or infinity of finite numbers, from which the ends' come.

    Args:
        steps: Each operation of the program with the keys of its inputs and of its outputs.
        bad: The keys of the values that have a NaN or infinite entry.
        ends: The keys of the outputs.
    """
    makers = {key: (node, inputs) for node, inputs, outputs in steps for key in outputs}
    result: dict[Node, None] = {}
    todo, seen = [key for key in ends if key in bad], set[Hashable]()
    while todo:
        key = todo.pop()
        if key in seen or key not in makers:
            continue
        seen.add(key)
        node, inputs = makers[key]
        entering = [other for other in inputs if other in bad]
        todo += entering
        if not entering:
            result[node] = None
    return list(result)


def at_origins(places: Sequence[Vanished] | None, origins: Iterable[Node]) -> list[Vanished] | None:
    """The places of a zero or NaN gradient; the origins of the output's NaN if elsewhere.

    The gradient may be finite where the output is NaN, as that of the logarithm is.
    """
    lines = {p.node.source for p in places or () if p.kind == "nan"}
    elsewhere = [Vanished(node, "nan_value") for node in origins if node.source not in lines]
    if elsewhere and (lines or not places):
        return elsewhere
    return None if places is None else list(places)
