"""Equal values of two runs, in any layout, and relations between values that differ.

Two values are equal if one is the other with its axes permuted or reshaped. A fingerprint of sums
of powers of the moduli, which no permutation changes, finds the candidates.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from gradtools.testing.diverging.recorded_steps import Run, Step

Move = Callable[[np.ndarray], np.ndarray]  # PyTorch's layout to JAX's
NONE, WEAK, STRONG = range(3)
_MASKED = 9e3
_MOST_AXES = 5
_SAMPLE = 4096  # entries that tell a mask from numbers


def strength(x: np.ndarray) -> int:
    """How much equality with x says: STRONG for numbers that only a computation gives."""
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
    both = _layouts(a, b.shape)
    return next(((name, move) for name, move in both if close(move(a), b, accuracy)), None)


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


def related(a: np.ndarray, b: np.ndarray, accuracy: float) -> str | None:
    """How a is made from b: "transposed", "conjugate", "sign", "factor 2"; None if unknown."""
    if a.dtype == b.dtype == bool and a.size > 1:
        return "inverted" if aligned(~a, b, 0) else None
    kinds = a.dtype.kind + b.dtype.kind
    if not set(kinds) <= {"f", "c"} or a.size != b.size or not b.any() or not a.any():
        return None
    if not (np.isfinite(a).all() and np.isfinite(b).all()):
        return None
    if a.size > 1 and STRONG not in (strength(a), strength(b)):
        return None
    for name, move in _layouts(a, b.shape):
        x = move(a)
        for conjugate in (False, True) if "c" in kinds else (False,):
            y = b.conj() if conjugate else b
            factor = np.vdot(y, x) / np.vdot(y, y)
            if not factor or not close(x, factor * y, 10 * accuracy):
                continue
            words = ["" if name == "equal" else name, "conjugate" if conjugate else ""]
            if abs(factor + 1) < 1e3 * accuracy:
                words.append("sign")
            elif abs(factor - 1) > 1e3 * accuracy:
                words.append(f"factor {factor.real if abs(factor.imag) < 1e-9 else factor:.6g}")
            return ", ".join(filter(None, words)) or None
    return None


def _layouts(a: np.ndarray, shape: tuple[int, ...]) -> Iterator[tuple[str, Move]]:
    """Moves from a's layout to a shape: none, a reshape, axes permuted before or after one."""
    if a.shape == shape:
        yield "equal", lambda x: x
    thin, target = ([n for n in s if n != 1] for s in (a.shape, shape))
    if a.size != math.prod(shape) or max(len(thin), len(target)) > _MOST_AXES:
        return
    alike = sorted(thin) == sorted(target)
    if a.shape != shape and (not alike or thin == target):
        yield "reshaped", lambda x: x.reshape(shape)
    for p in [*itertools.permutations(range(len(thin)))][1:]:
        if not alike or [thin[i] for i in p] == target:
            yield "transposed", lambda x, p=p: x.reshape(thin).transpose(p).reshape(shape)  # type: ignore[misc]
    for p in [*itertools.permutations(range(len(target)))][1:] if len(target) > len(thin) else ():
        split, back = [target[i] for i in p], np.argsort(p)
        yield (
            "transposed",
            lambda x, s=split, q=back: x.reshape(s).transpose(q).reshape(shape),  # type: ignore[misc]
        )


def match(torch: Run, jax: Run, named: list[tuple[Step, Step]]) -> dict[tuple[int, int], Any]:
    """Numbers the classes of equal values of two runs in `Step.group`.

    named: Pairs of leaves that are equal whatever their values say.

    Returns:
        For the numbers of an equal pair its layout: a name and a `Move`.
    """
    pairs: dict[tuple[int, int], Any] = {}
    above: dict[tuple[str, int], tuple[str, int]] = {}

    def root(x: tuple[str, int]) -> tuple[str, int]:
        while above.setdefault(x, x) != x:
            x = above[x]
        return x

    prints = np.array([_fingerprint(s.value) for s in jax.steps]).reshape(-1, 5)
    strengths = np.array([strength(s.value) for s in jax.steps])
    accuracies = np.array([s.accuracy for s in jax.steps])
    candidates = [(a, b) for a, b in named]
    for a in torch.steps:
        if own := strength(a.value):
            fingerprint = _fingerprint(a.value)
            allowed = 10 * np.maximum(np.minimum(accuracies, a.accuracy), 1e-9)[:, None]
            near = (np.abs(prints - fingerprint) <= allowed * np.abs(fingerprint) + 1e-300).all(1)
            candidates += [(a, jax.steps[k]) for k in np.flatnonzero(near & (strengths == own))]
    for a, b in candidates:
        is_number = [s.value.dtype.kind in "fc" for s in (a, b)]
        if is_number[0] != is_number[1] or (a.number, b.number) in pairs:
            continue
        if layout := aligned(a.value, b.value, accuracy_of(a, b)):
            pairs[a.number, b.number] = layout
            above[root(("torch", a.number))] = root(("jax", b.number))
    numbers: dict[tuple[str, int], int] = {}
    for name, run in (("torch", torch), ("jax", jax)):
        for step in run.steps:
            if (name, step.number) in above:
                step.group = numbers.setdefault(root((name, step.number)), len(numbers))
    return pairs


def accuracy_of(a: Step, b: Step) -> float:
    """The accuracy of the finer side: a coarser dtype on one side is a difference."""
    return max(min(a.accuracy, b.accuracy), 1e-9)


def _fingerprint(x: np.ndarray) -> list[float]:
    finite = np.isfinite(x) if x.dtype.kind in "fc" else np.ones(x.shape, bool)
    y = np.abs(np.where(finite, x, 0)).astype(float).ravel()
    powers = [float(y.sum()), math.sqrt(float((y**2).sum())), float((y**4).sum()) ** 0.25]
    return [float(y.size), float(y.size - finite.sum()), *powers]
