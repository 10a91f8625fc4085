"""Lines as paths: smooth ones through the rows, and level and upright ones with round corners."""

from __future__ import annotations

from collections.abc import Sequence

Point = tuple[float, float]
Step = tuple[str, tuple[float, ...]]  # "M", "L" or "C" with its coordinates
_NOTHING = 0.05  # a step so short has no direction


def smooth(points: Sequence[tuple[float, float, float]]) -> tuple[Step, ...]:
    """A line through (x, top, bottom) of each place: straight in the rows, curved between."""
    x, top, bottom = points[0]
    steps: list[Step] = [("M", (x, top))]
    if abs(top - bottom) > _NOTHING:
        steps.append(("L", (x, bottom)))
    for next_x, next_top, next_bottom in points[1:]:
        if abs(next_x - x) < _NOTHING:
            steps.append(("L", (next_x, next_top)))
        else:
            middle = (bottom + next_top) / 2
            steps.append(("C", (x, middle, next_x, middle, next_x, next_top)))
        if abs(next_bottom - next_top) > _NOTHING:
            steps.append(("L", (next_x, next_bottom)))
        x, bottom = next_x, next_bottom
    return tuple(steps)


def rounded(points: Sequence[Point], radius: float = 6.0) -> tuple[Step, ...]:
    """A line of level and upright stretches with round corners."""
    kept = [points[0]]
    for point in points[1:]:
        if abs(point[0] - kept[-1][0]) + abs(point[1] - kept[-1][1]) > _NOTHING:
            kept.append(point)
    steps: list[Step] = [("M", kept[0])]
    for before, corner, after in zip(kept, kept[1:], kept[2:], strict=False):
        reach = min(radius, _distance(before, corner) / 2, _distance(corner, after) / 2)
        enter, leave = _towards(corner, before, reach), _towards(corner, after, reach)
        steps += [("L", enter), ("C", (*corner, *corner, *leave))]
    steps.append(("L", kept[-1]))
    return tuple(steps)


def _distance(a: Point, b: Point) -> float:
    return abs(a[0] - b[0]) + abs(a[1] - b[1])


def _towards(a: Point, b: Point, reach: float) -> Point:
    length = _distance(a, b) or 1.0
    return a[0] + (b[0] - a[0]) * reach / length, a[1] + (b[1] - a[1]) * reach / length
