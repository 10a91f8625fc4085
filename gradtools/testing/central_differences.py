"""Compares a derivative with central differences of a function's values, along one direction.

    Re<J^H v, u>  =  Re<v, (f(x + h u) - f(x - h u)) / 2h>  =  Re<v, J u>

Each entry moves on the scale of its own size. The derivative agrees if it does at one of two steps
h. It differs if the two steps agree with each other ten times better than with it, and if so at a
nearby point, too: a kink or a tie is at one point only.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np


@dataclass
class Question:
    """A derivative at xs, and the program whose differences it is compared with.

    Attributes:
        program: `program(xs)` returns f's outputs as NumPy arrays.
        xs: The point, as NumPy arrays.
        derivative: `derivative(program, xs, given)` are the cotangents of xs, or if `forward` the
            tangents of the outputs.
        given: The cotangents of the outputs (None: zero), or if `forward` the tangents of xs.
        rng: Draws the directions.
        forward: Whether it is a pushforward.
        known: The derivative at xs, if it was computed before.
    """

    program: Any
    xs: list[Any]
    derivative: Callable[..., list[Any]]
    given: list[Any]
    rng: Any
    forward: bool = False
    known: list[Any] | None = None


@dataclass(frozen=True)
class Answer:
    """What a comparison found: "agrees", "differs" or "noisy", and the numbers."""

    verdict: str
    slope: float = 0.0
    difference: float = 0.0
    step: float = 0.0


def judge(q: Question) -> tuple[Question, Answer]:
    """Compares a derivative without edits; what does not agree is compared nearby, too.

    Returns the question at the point where it was decided, and the answer.
    """
    if q.program.edited:
        q = replace(q, program=q.program.without_edits(), known=None)
    answer = _decided(q)
    if answer.verdict == "agrees":
        return q, answer
    if not _same(_known(q), q.derivative(q.program, q.xs, q.given)):  # NaN, or another formula
        return q, answer
    away = min(30 * q.program.eps ** (1 / 3), 0.5)
    xs = [x + away * u for x, u in zip(q.xs, _moves(q), strict=True)]
    near = replace(q, xs=q.program.numbers(q.program.arrays(xs)), known=None)
    found = _decided(near)
    return near, answer if found.verdict == "differs" else found


def _same(xs: Any, ys: Any) -> bool:
    pairs = [(0 if x is None else x, 0 if y is None else y) for x, y in zip(xs, ys, strict=True)]
    return all(np.allclose(x, y, 0.01, 0.01 * np.max(np.abs(y), initial=0)) for x, y in pairs)


def _decided(q: Question) -> Answer:
    """The first answer along three directions that is not noisy."""
    answers = (ask(q) for _ in range(3))
    return next((a for a in answers if a.verdict != "noisy"), Answer("noisy"))


def normal(rng: Any, like: Any) -> Any:
    """Normal numbers of the shape of an array, complex or Hermitian if it is.

    Derivatives of Cholesky factors, eigenvalues and the like are along Hermitian tangents.
    """
    x = rng.standard_normal(like.shape)
    if np.iscomplexobj(like):
        x = x + 1j * rng.standard_normal(like.shape)
    mirrored = np.conj(like.swapaxes(-1, -2)) if like.ndim > 1 else None
    hermitian = mirrored is not None and np.array_equal(like, mirrored)
    return (x + np.conj(x.swapaxes(-1, -2))) / 2 if hermitian else x


def _dot(xs: Sequence[Any], ys: Sequence[Any], size: bool = False) -> float:
    terms = [np.conj(x) * y for x, y in zip(xs, ys, strict=True) if x is not None and y is not None]
    return float(sum(np.abs(t).sum() if size else t.real.sum() for t in terms))


def _sizes(q: Question) -> list[Any]:
    """The scale on which each entry moves: its size up to hundreds, that of the others for 0."""
    made, fine = [], 100 * q.program.eps ** (2 / 3)  # of which the moves are many roundings
    for x in q.xs:
        sizes = np.abs(np.where(np.isfinite(x), x, 0))
        typical = np.median(sizes[sizes > 0]) if (sizes > 0).any() else 1.0
        capped = np.minimum(sizes, np.maximum(100, fine * sizes))
        made.append(np.maximum(capped, min(typical, 1.0)))
    return made


def _moves(q: Question, only: int | None = None) -> list[Any]:
    """A random direction, or that of the one array `only`."""
    pairs = enumerate(zip(q.xs, _sizes(q), strict=True))
    return [normal(q.rng, x) * size * (only in (None, i)) for i, (x, size) in pairs]


def ask(q: Question, only: int | None = None) -> Answer:
    """Compares a derivative with differences along one direction.

    only: The one of xs that moves; None: all.
    """
    eps, base = q.program.eps, q.program(q.xs)
    if q.forward:
        given = [u if only in (None, i) else 0 * u for i, u in enumerate(q.given)]
        pairs = zip(given, _sizes(q), strict=True)
        scale = max(float((np.abs(u) / size).max(initial=0)) for u, size in pairs)
        if scale == 0:
            return Answer("agrees")
        us, vs = [u / scale for u in given], [normal(q.rng, y) for y in base]
        known = q.derivative(q.program, q.xs, given) if only is not None else _known(q)
        slope, size = _dot(vs, known) / scale, _dot(vs, known, size=True) / scale
        at_risk = size * max(float(np.abs(x).max(initial=0)) for x in q.xs)
    else:
        us, vs, known = _moves(q, only), q.given, _known(q)
        size = _dot(known, us, size=True)
        at_risk = _dot(known, [np.abs(x) * (u != 0) for x, u in zip(q.xs, us, strict=True)], True)
    tolerance = min(max(4 * eps**0.5, 2e-4), 0.3)
    weight = _dot(vs, [np.abs(y) + 1 for y in base], size=True)  # rounding of values of 1
    found: list[Answer] = []
    with np.errstate(all="ignore"):
        for h in (eps ** (1 / 3), 4 * eps ** (1 / 3)):
            ends = [[x + s * h * u for x, u in zip(q.xs, us, strict=True)] for s in (1, -1)]
            ends = [q.program.numbers(q.program.arrays(end)) for end in ends]
            up, down = (_dot(vs, q.program(end)) for end in ends)
            if not q.forward:  # the direction that was taken, after rounding
                moved = [(a - b) / (2 * h) for a, b in zip(*ends, strict=True)]
                slope = _dot(known, [np.where(np.isfinite(m), m, 0) for m in moved])
            difference = (up - down) / (2 * h)
            near = tolerance * max(abs(slope), abs(difference)) + min(30 * eps, 0.03) * size
            agrees = abs(slope - difference) <= near
            found.append(Answer("agrees" if agrees else "noisy", slope, difference, h))
            if agrees:
                return found[-1]
        close, far = found
        gap = min(abs(a.slope - a.difference) for a in found)
        gap = gap if np.isfinite(gap) else abs(close.difference)
        noise = 20 * eps * weight / close.step + 10 * abs(far.difference - close.difference)
        at_risk = eps * at_risk > 0.1 * weight  # a rounding of x changes the value by as much
    return replace(close, verdict="differs" if noise < gap and not at_risk else "noisy")


def _known(q: Question) -> list[Any]:
    if q.known is None:
        q.known = q.derivative(q.program, q.xs, q.given)
    return q.known
