"""Equal values of two runs, in any layout.

Two values are equal if one is the other with its axes permuted or reshaped. A fingerprint of sums
of powers of the moduli, which no permutation changes, finds the candidates.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from gradtools.testing.diverging.runs import Run, Step
from gradtools.testing.relations import Move, layouts

NONE, WEAK, STRONG = range(3)
_MASKED = 9e3
_SAMPLE = 4096  # entries that tell a mask from numbers


def strength(x: np.ndarray) -> int:
    """How much equality with x tells: STRONG for numbers that only a computation gives."""
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
    """The layout of a in which it equals b: its name, and the move; None if there is none."""
    every = ((how.name, move) for how, move in layouts(a, b.shape) if close(move(a), b, accuracy))
    return next(every, None)


def close(a: np.ndarray, b: np.ndarray, accuracy: float) -> bool:
    """Whether two arrays are equal to an error relative to the largest entry.

    Entries of the size of a mask's constants (-1e4, -1e9) do not count as the largest.
    """
    if a.shape != b.shape:
        return False
    if a.dtype.kind not in "fc" and b.dtype.kind not in "fc":
        return bool((a == b).all())
    with np.errstate(all="ignore"):
        sizes = np.abs(np.where(np.isfinite(b), b, 0)).astype(float)
        ordinary = sizes[sizes < _MASKED].max(initial=0)
        masked = (sizes >= _MASKED) & (sizes > 1e3 * ordinary)
        size = np.where(masked, sizes, sizes[~masked].max(initial=1e-300))
        same = (a == b) | (np.isnan(a) & np.isnan(b)) | (np.abs(a - b) <= accuracy * size)
        return bool(same.all())


def match(torch: Run, jax: Run, named: Sequence[tuple[Step, Step]]) -> dict[tuple[int, int], Any]:
    """Numbers the classes of equal values of two runs in `Step.group`.

    named: Pairs of leaves that are equal whatever their values say.

    Returns:
        For the numbers of an equal pair its layout: a name and a `Move`.
    """
    prints = np.array([_fingerprint(s.value) for s in jax.steps]).reshape(-1, 5)
    strengths = np.array([strength(s.value) for s in jax.steps])
    accuracies = np.array([s.accuracy for s in jax.steps])
    candidates = list(named)
    for a in torch.steps:
        if own := strength(a.value):
            fingerprint = _fingerprint(a.value)
            allowed = 10 * np.maximum(np.minimum(accuracies, a.accuracy), 1e-9)[:, None]
            near = (np.abs(prints - fingerprint) <= allowed * np.abs(fingerprint) + 1e-300).all(1)
            candidates += [(a, jax.steps[k]) for k in np.flatnonzero(near & (strengths == own))]
    pairs: dict[tuple[int, int], Any] = {}
    classes: dict[int, list[Step]] = {}  # by the identity of a step
    for a, b in candidates:
        is_number = [s.value.dtype.kind in "fc" for s in (a, b)]
        if is_number[0] != is_number[1] or (a.number, b.number) in pairs:
            continue
        if layout := aligned(a.value, b.value, accuracy_of(a, b)):
            pairs[a.number, b.number] = layout
            first, second = (classes.setdefault(id(s), [s]) for s in (a, b))
            if first is not second:
                first += second
                classes.update((id(s), first) for s in second)
    numbers: dict[int, int] = {}
    for step in (*torch.steps, *jax.steps):
        if id(step) in classes:
            step.group = numbers.setdefault(id(classes[id(step)]), len(numbers))
    return pairs


def accuracy_of(a: Step, b: Step) -> float:
    """The accuracy of the finer side: a coarser dtype on one side is a difference."""
    return max(min(a.accuracy, b.accuracy), 1e-9)


def _fingerprint(x: np.ndarray) -> list[float]:
    finite = np.isfinite(x) if x.dtype.kind in "fc" else np.ones(x.shape, bool)
    y = np.abs(np.where(finite, x, 0)).astype(float).ravel()
    with np.errstate(over="ignore"):
        powers = [float(y.sum()), math.sqrt(float((y**2).sum())), float((y**4).sum()) ** 0.25]
    return [float(y.size), float(y.size - finite.sum()), *powers]
