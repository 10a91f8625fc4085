"""Compares a derivative with central differences of a function's values, along one direction.

    Re<J^H v, u>  =  Re<v, (f(x + h u) - f(x - h u)) / 2h>  =  Re<v, J u>

Each entry moves on the scale of its own size. The derivative agrees if it does at one of two steps,
or of three more. It differs if three steps agree with each other ten times better than with it, and
so do the differences to the two sides; else the point may be a kink, or the values noisy.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

_STEPS = (1, 1 / 4, 4, 1 / 16, 16)


@dataclass
class Question:
    """A derivative at xs, and the program whose differences it is compared with.

    Attributes:
        program: `program(xs)` returns f's outputs, `base` at xs, all as NumPy arrays.
        known: The derivative: cotangents of xs, or, if us is given, tangents of the outputs.
        vs: The cotangents of the outputs (None: zero), or None to draw them.
        us: The tangents of xs, or None to draw them.
        again: `again(program, xs, us)` is the derivative of a program at other points.
        rng: Draws the directions.
    """

    program: Any
    xs: list[Any]
    known: list[Any]
    vs: list[Any] | None = None
    us: list[Any] | None = None
    again: Callable[..., list[Any]] | None = None
    rng: Any = None


@dataclass(frozen=True)
class Answer:
    """What a comparison found: "agrees", "differs", "kink" or "noisy", and the numbers."""

    verdict: str
    slope: float = 0.0
    difference: float = 0.0
    step: float = 0.0
    bend: float = 0.0  # by how much the differences to the two sides differ
    rounding: float = 0.0


def _dot(xs: Sequence[Any], ys: Sequence[Any], size: bool = False) -> float:
    terms = [np.conj(x) * y for x, y in zip(xs, ys, strict=True) if x is not None and y is not None]
    return float(sum(np.abs(t).sum() if size else t.real.sum() for t in terms))


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


def _sizes(q: Question) -> list[Any]:
    """The scale on which each entry moves: its size up to hundreds, that of the others for 0."""
    made, fine = [], 100 * q.program.eps ** (2 / 3)  # of which the moves are many roundings
    for x in q.xs:
        sizes = np.abs(np.where(np.isfinite(x), x, 0))
        typical = np.median(sizes[sizes > 0]) if (sizes > 0).any() else 1.0
        capped = np.minimum(sizes, np.maximum(100, fine * sizes))
        made.append(np.maximum(capped, min(typical, 1.0)))
    return made


def moves(q: Question, only: int | None = None) -> list[Any]:
    """A random direction, or that of the one array `only`."""
    pairs = enumerate(zip(q.xs, _sizes(q), strict=True))
    return [normal(q.rng, x) * size * (only in (None, i)) for i, (x, size) in pairs]


def ask_again(q: Question) -> Answer:
    """The first decided answer along three other directions."""
    answers = (ask(q) for _ in range(3))
    return next((a for a in answers if a.verdict != "noisy"), Answer("noisy"))


def ask(q: Question, only: int | None = None) -> Answer:
    """Compares a derivative with differences along one direction.

    only: The one of xs that moves, for a pullback; None: all.
    """
    eps = q.program.eps
    tolerance = min(max(4 * eps**0.5, 2e-4), 0.3)
    vs = [normal(q.rng, y) for y in q.program.base] if q.vs is None else q.vs
    if q.us is None:
        us, scale = moves(q, only), 1.0
        size = _dot(q.known, us, size=True)
        at_risk = _dot(q.known, [np.abs(x) * (u != 0) for x, u in zip(q.xs, us, strict=True)], True)
    else:
        pairs = zip(q.us, _sizes(q), strict=True)
        scale = max(float((np.abs(u) / size).max(initial=0)) for u, size in pairs)
        if scale == 0:
            return Answer("agrees")
        us, size = [u / scale for u in q.us], _dot(vs, q.known, size=True) / scale
        at_risk = size * max(float(np.abs(x).max(initial=0)) for x in q.xs)
    base = _dot(vs, q.program.base)
    weight = _dot(vs, [np.abs(y) + 1 for y in q.program.base], size=True)  # rounding of values of 1
    found: list[Answer] = []
    with np.errstate(all="ignore"):
        for factor in _STEPS:
            h = eps ** (1 / 3) * factor
            ends = [[x + s * h * u for x, u in zip(q.xs, us, strict=True)] for s in (1, -1)]
            ends = [q.program.numbers(q.program.arrays(end)) for end in ends]
            up, down = (_dot(vs, q.program(end)) for end in ends)
            if q.us is None:  # the direction that was taken, after rounding
                moved = [(a - b) / (2 * h) for a, b in zip(*ends, strict=True)]
                slope = _dot(q.known, [np.where(np.isfinite(m), m, 0) for m in moved])
            else:
                slope = _dot(vs, q.known) / scale
            bend = abs(up + down - 2 * base) / h
            found.append(Answer("noisy", slope, (up - down) / (2 * h), h, bend, eps * weight / h))
            for a in found if len(found) > 1 else ():
                near = tolerance * max(abs(a.slope), abs(a.difference)) + min(30 * eps, 0.03) * size
                if abs(a.slope - a.difference) <= near:
                    return replace(a, verdict="agrees")
        verdict = "noisy"
        if eps * at_risk > 0.1 * weight:  # a rounding of x changes the value by as much
            return found[1]
        by_step = sorted(found, key=lambda a: a.step)
        for three in zip(by_step, by_step[1:], by_step[2:], strict=False):
            near, middle, far = (a.difference for a in three)
            gap = min(abs(a.slope - a.difference) for a in three)
            if not np.isfinite(three[1].slope):
                gap = abs(middle)
            noise = 20 * three[0].rounding
            converges = abs(near - middle) <= max(abs(middle - far) / 2, abs(middle) / 50, noise)
            if converges and 10 * abs(near - middle) + noise < gap:
                if three[0].bend + three[0].rounding < gap / 2:
                    return replace(three[1], verdict="differs")
                verdict = "kink"
    return replace(found[1], verdict=verdict)
