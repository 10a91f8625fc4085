"""Equal values of two runs, in any layout.

Two values are equal if one is the other with its axes permuted or reshaped. A fingerprint of sums
of powers of the moduli, which no permutation changes, finds the candidates.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from gradtools.testing.diverging.runs import Run, Step
from gradtools.testing.relations import MASKED, Move, equal, layouts

NONE, WEAK, STRONG = range(3)
_SAMPLE = 4096  # the number of entries that distinguish a mask from numbers


def strength(x: np.ndarray) -> int:
    """Rates the evidence of equality with x: STRONG if equality is unlikely by chance."""
    if x.size == 0 or (x.size > 1 and bool((x == x.flat[0]).all())):
        return NONE
    if x.dtype.kind not in "fc":
        return WEAK if x.size > 1 else NONE
    if x.size == 1:
        value = complex(x.flat[0])
        is_round = abs(value * 64 - round(value.real * 64)) < 1e-12 if np.isfinite(value) else True
        return NONE if is_round else STRONG
    return WEAK if len(np.unique(x.ravel()[:_SAMPLE])) < 3 else STRONG


def aligned(a: np.ndarray, b: np.ndarray, accuracy: float) -> tuple[str, Move] | None:
    """Returns the name and the move of the layout in which a equals b, or None."""
    every = layouts(a, b.shape)
    return next(((how, move) for how, move in every if _close(move(a), b, accuracy)), None)


def _close(a: np.ndarray, b: np.ndarray, accuracy: float) -> bool:
    """Returns whether two arrays agree relative to the largest entry.

    The constants of a mask (-1e4, -1e9) are compared separately.
    """
    is_large = np.abs(b) >= MASKED
    return all(equal(a[part], b[part], accuracy) for part in (is_large, ~is_large))


def layout_of(a: Step, b: Step) -> tuple[str, Move] | None:
    """Returns the layout in which the value of step a equals the value of step b."""
    alike = (a.value.dtype.kind in "fc") == (b.value.dtype.kind in "fc")
    return aligned(a.value, b.value, accuracy_of(a, b)) if alike else None


def accuracy_of(a: Step, b: Step) -> float:
    """Returns the accuracy of the finer side: a coarser dtype on one side is a difference."""
    return max(min(a.accuracy, b.accuracy), 1e-9)


def match(
    torch: Run, jax: Run, named: Sequence[tuple[Step, Step]]
) -> list[tuple[list[Step], list[Step]]]:
    """Finds the values that both runs have, and sets `Step.entries` and `Step.is_common`.

    A reshape where the other side transposes gives an array with the entries of a common value in
    another order. Such an array equals a value of another shape, but no value of its own shape, and
    is not common.

    Args:
        torch: The run in PyTorch.
        jax: The run in JAX.
        named: Pairs of leaves that correspond, which are common even if their values are constant.

    Returns:
        The classes of values with the same entries: the steps of PyTorch and of JAX, in order.
    """
    prints = np.array([_fingerprint(s.value) for s in jax.steps]).reshape(-1, 5)
    strengths = np.array([strength(s.value) for s in jax.steps])
    accuracies = np.array([s.accuracy for s in jax.steps])
    pairs = [p for p in named if layout_of(*p)]
    for a in torch.steps:
        if own := strength(a.value):
            fingerprint = _fingerprint(a.value)
            allowed = 10 * np.maximum(np.minimum(accuracies, a.accuracy), 1e-9)[:, None]
            near = (np.abs(prints - fingerprint) <= allowed * np.abs(fingerprint) + 1e-300).all(1)
            alike = (jax.steps[k] for k in np.flatnonzero(near & (strengths == own)))
            pairs += [(a, b) for b in alike if layout_of(a, b)]
    classes: dict[int, tuple[list[Step], list[Step]]] = {}  # by the id of a step
    for a, b in pairs:
        first, second = classes.setdefault(id(a), ([a], [])), classes.setdefault(id(b), ([], [b]))
        if first is not second:
            for mine, theirs in zip(first, second, strict=True):
                mine += theirs
            classes.update((id(s), first) for side in second for s in side)
    result = [*{id(c): c for c in classes.values()}.values()]
    for n, sides in enumerate(result):
        for k, side in enumerate(sides):
            side.sort(key=lambda s: s.number)
            for s in side:
                s.entries = n
                mates = [m for m in sides[1 - k] if _axes(m) == _axes(s)]
                before = [p for p in s.parents if p.entries == n]
                s.is_common = any(layout_of(s, m) for m in mates) or (
                    not mates and all(p.is_common for p in before)
                )
    return result


def _axes(s: Step) -> list[int]:
    return sorted(n for n in s.value.shape if n != 1)


def _fingerprint(x: np.ndarray) -> list[float]:
    finite = np.isfinite(x) if x.dtype.kind in "fc" else np.ones(x.shape, bool)
    y = np.abs(np.where(finite, x, 0)).astype(float).ravel()
    with np.errstate(over="ignore"):
        powers = [float(y.sum()), math.sqrt(float((y**2).sum())), float((y**4).sum()) ** 0.25]
    return [float(y.size), float(y.size - finite.sum()), *powers]
