"""What a derivative in the PyTorch sweep is held against; nothing here goes through gradtools' own.

For a program f at x, with a tangent u and a cotangent v drawn at random:

    J^H v    torch.autograd.grad
    J u      its transpose: Re<v, J u> = Re<J^H v, u>, and the slope of f along u
    H u      of Re<v, g(x)>, g = f + f^2 / 2s entry by entry, s the size of f, so that linear
             operators have a second derivative too: torch.autograd.grad twice, and the slope of
             its first along u

Slopes are central differences in float64, extrapolated to step zero
(`gradtools.testing.checking.slopes`).
They decide at second order. Errors are relative to the largest entry of all arrays together.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from gradtools.testing.checking.slopes import Slope, one_sided, slope
from gradtools.testing.cross_checking.tolerances import (
    EPSILONS,
    FINITE_DIFFERENCES,
    real_name,
    tolerance,
)
from tests.support.sweeps import AGREES, DIFFERS, LEFT_OUT
from tests.support.sweeps.torch_programs import TableProgram

Tensors = Sequence[Any]
REVERSE, TWICE = "reverse mode", "double backward"
DOT, SLOPE = "dot-product test", "finite differences"
_ROUNDING = 1e-6  # an ill-conditioned operation may be off by that if finite differences agree
_NEAR = 1e-3  # of the usual steps
_ZERO = 0.1
_SETTLED = 1e-5  # finite differences that disagree with each other by more say nothing


@dataclass(frozen=True)
class Judgement:
    """A result of `Outcome`, what it was held against, and what there is to say."""

    result: str
    oracle: str
    detail: str = ""


class Oracles:
    """A program with a tangent and a cotangent, and what is known of its derivatives."""

    def __init__(self, program: TableProgram) -> None:
        import torch

        self.program = program
        self.x, self.f = program.primals, program.f
        with torch.no_grad():
            self.y = tuple(y.detach().clone() for y in self.f(*self.x))
        generator = torch.Generator().manual_seed(7)
        self.u = tuple(_drawn(x, generator) for x in self.x)
        self.v = tuple(_drawn(y, generator) for y in self.y)
        self.bends = [0.5 / max(1.0, float(np.abs(vector([y])).max())) for y in self.y]
        self.name = real_name(program.dtype)
        self.fine = self.name == "float64"

    # --- functions

    def g(self, *xs: Any) -> tuple[Any, ...]:
        """f + f^2 / 2s, entry by entry."""
        return self.bent(self.f(*xs))

    def bent(self, ys: Tensors) -> tuple[Any, ...]:
        """y + y^2 / 2s."""
        return tuple(y + y * y * bend for y, bend in zip(ys, self.bends, strict=True))

    def loss(self, *xs: Any) -> Any:
        """Re<v, g(x)>."""
        return inner(self.v, self.g(*xs))

    @cached_property
    def alone(self) -> bool:
        """Whether f acts on rows by themselves; a seed of its own starts again in each chunk."""
        if not self.program.alone or len(self.x[0]) < 2:
            return False
        n = (len(self.x[0]) + 1) // 2
        halves = [self.f(*(x[:n] for x in self.x)), self.f(*(x[n:] for x in self.x))]
        return (
            apart(
                [y for half in zip(*halves, strict=True) for y in half],
                [z for y in self.y for z in (y[:n], y[n:])],
            )
            == 0
        )

    # --- sizes, below which a derivative that should be zero is rounding

    @cached_property
    def usual(self) -> float:
        """A tenth of J^H v's size, were f's relative errors those of its input."""
        return _ZERO * norm(self.v) * norm(self.y) / max(norm(self.x), 1.0)

    @property
    def usual_twice(self) -> float:
        """The same of H u."""
        return self.usual * norm(self.u) / max(norm(self.x), 1.0)

    # --- first order

    @cached_property
    def pulled(self) -> tuple[Any, ...]:
        """J^H v by reverse mode."""
        import torch

        live = tuple(x.detach().requires_grad_() for x in self.x)
        with torch.enable_grad():
            ys = self.f(*(x.view_as(x) for x in live))
        return _grad(ys, live, self.v)

    @property
    def finite(self) -> bool:
        """Whether the value and its pullback are numbers."""
        return bool(np.isfinite(vector((*self.y, *self.pulled))).all())

    @cached_property
    def slope(self) -> Slope:
        """J u by finite differences."""
        return self._slope(self.f)

    @cached_property
    def near_slope(self) -> Slope:
        """The same by small steps, which stay on one piece of a function of pieces."""
        return self._slope(self.f, _NEAR)

    def tangent(self, found: Tensors) -> Judgement:
        """Of J u."""
        flat = vector(found)
        if flat.shape != vector(self.y).shape:
            return Judgement(DIFFERS, SLOPE, "another shape")
        left, right = float(inner(self.v, found)), float(inner(self.pulled, self.u))
        size = norm(self.v) * norm(found) + norm(self.pulled) * norm(self.u)
        error = _relative(abs(left - right), max(size, self.usual * norm(self.u)))
        if error <= tolerance(self.name, 1):
            return Judgement(AGREES, DOT)
        off = self._off(flat, self.slope)
        if off is not None and off > 1:
            off = self._off(flat, self.near_slope)
        if not self.fine or off is None:
            return Judgement(DIFFERS, DOT, _times(error, tolerance(self.name, 1)))
        if off <= 1 and self.is_wrong:
            return Judgement(AGREES, SLOPE, "PyTorch's own reverse mode is wrong")
        if off <= 1 and error <= _ROUNDING:
            return Judgement(AGREES, SLOPE, f"the dot products part by {error:.0e}, as by rounding")
        if off > 1 and self._kink(self.f):
            return Judgement(LEFT_OUT, DOT, f"a kink; {_times(error, tolerance(self.name, 1))}")
        other = "agree" if off <= 1 else f"part by {off:.1e} tolerances"
        return Judgement(DIFFERS, DOT, f"error {error:.1e}; finite differences {other}")

    def cotangent(self, found: Tensors, factor: float = 1.0) -> Judgement:
        """Of J^H v."""
        error = apart(found, [factor * x for x in self.pulled], self.usual)
        if error > tolerance(self.name, 1):
            if self.is_wrong and self.reverse_mode([x / factor for x in found]).result == AGREES:
                return Judgement(AGREES, SLOPE, "PyTorch's own reverse mode is wrong")
            return Judgement(DIFFERS, REVERSE, _times(error, tolerance(self.name, 1)))
        return Judgement(AGREES, REVERSE)

    @cached_property
    def is_wrong(self) -> bool:
        """Whether finite differences say that the framework's own J^H v is wrong."""
        return self.fine and self.reverse_mode().result == DIFFERS

    def reverse_mode(self, found: Tensors | None = None) -> Judgement:
        """Of J^H v, the framework's own if no other is given, against finite differences."""
        pulled = self.pulled if found is None else found
        judgement = self._reverse_mode(pulled, self.slope)
        return (
            judgement if judgement.result == AGREES else self._reverse_mode(pulled, self.near_slope)
        )

    def _reverse_mode(self, pulled: Tensors, found: Slope) -> Judgement:
        if not np.isfinite(found.error).all() or not np.isfinite(found.value).all():
            return Judgement(LEFT_OUT, SLOPE, "finite differences do not settle")
        v = vector(self.v)
        left, right = float(found.value @ v), float(inner(pulled, self.u))
        size = norm(self.v) * float(np.linalg.norm(found.value)) + norm(pulled) * norm(self.u)
        size = max(size, self.usual * norm(self.u))
        allowed = FINITE_DIFFERENCES[self.name] * size + 4 * float(np.abs(found.error) @ np.abs(v))
        if abs(left - right) <= allowed:
            return Judgement(AGREES, SLOPE)
        if self._kink(self.f):
            return Judgement(LEFT_OUT, SLOPE, "a kink")
        return Judgement(DIFFERS, SLOPE, f"error {_relative(abs(left - right), size):.1e}")

    # --- second order

    @cached_property
    def twice(self) -> tuple[Any, ...] | None:
        """H u by double backward; None where PyTorch raises."""
        import torch

        live = tuple(x.detach().requires_grad_() for x in self.x)
        try:
            with torch.enable_grad():
                ys = self.g(*(x.view_as(x) for x in live))
                first = torch.autograd.grad(ys, live, self.v, create_graph=True, allow_unused=True)
                paired = [(g, u) for g, u in zip(first, self.u, strict=True) if g is not None]
                paired = [(g, u) for g, u in paired if g.requires_grad]
            if not paired:
                return tuple(torch.zeros_like(x) for x in live)
            return _grad([g for g, _ in paired], live, [u for _, u in paired])
        except (RuntimeError, NotImplementedError):
            return None

    @cached_property
    def slope_of_gradient(self) -> Slope:
        """H u by finite differences of reverse mode."""
        return self._slope(self._gradient)

    @cached_property
    def near_slope_of_gradient(self) -> Slope:
        """The same by small steps."""
        return self._slope(self._gradient, _NEAR)

    def _gradient(self, *xs: Any) -> tuple[Any, ...]:
        import torch

        live = tuple(x.detach().requires_grad_() for x in xs)
        with torch.enable_grad():
            ys = self.g(*(x.view_as(x) for x in live))
        return _grad(ys, live, self.v)

    def product(self, found: Tensors, factor: float = 1.0) -> Judgement:
        """Of H u."""
        allowed = tolerance(self.name, 2)
        twice = None if self.twice is None else [factor * x for x in self.twice]
        error = None if twice is None else apart(found, twice, self.usual_twice)
        flat = vector(found) / factor
        off = self._off(flat, self.slope_of_gradient) if self.fine else None
        if off is None or off > 1:
            off = self._off(flat, self.near_slope_of_gradient) if self.fine else None
        if off is None:
            if error is None:
                return Judgement(LEFT_OUT, SLOPE, "they do not settle, no double backward")
            if error <= allowed:
                return Judgement(AGREES, TWICE, "finite differences do not settle")
            return Judgement(DIFFERS, TWICE, _times(error, allowed))
        if off <= 1:
            if error is None or error <= _ROUNDING:
                return Judgement(AGREES, SLOPE)
            return Judgement(AGREES, SLOPE, f"double backward is off by {error:.0e}")
        kink = self._kink(self._gradient)
        if kink and error is not None and error <= allowed:
            return Judgement(LEFT_OUT, SLOPE, "a kink of the gradient; double backward agrees")
        told = "raises" if error is None else f"parts by {error:.1e}"
        told += ", a kink of the gradient" if kink else ""
        return Judgement(DIFFERS, SLOPE, f"{off:.1e} tolerances; double backward {told}")

    def curvature(self, found: Any) -> Judgement:
        """Of Re<u, H u>, a number."""
        judgement = self._curvature(found, self.slope_of_gradient)
        if judgement.result == AGREES:
            return judgement
        return self._curvature(found, self.near_slope_of_gradient)

    def _curvature(self, found: Any, by: Slope) -> Judgement:
        u = vector(self.u)
        size = float(np.linalg.norm(by.value) * np.linalg.norm(u))
        size = max(size, self.usual_twice * norm(self.u))
        allowed = FINITE_DIFFERENCES[self.name] * size + 4 * float(np.abs(by.error) @ np.abs(u))
        expected = float(by.value @ u)
        if self._off(by.value, by) is None:
            return Judgement(LEFT_OUT, SLOPE, "they do not settle")
        if abs(float(found) - expected) <= allowed:
            return Judgement(AGREES, SLOPE)
        if self._kink(self._gradient):
            return Judgement(LEFT_OUT, SLOPE, "a kink of the gradient")
        return Judgement(DIFFERS, SLOPE, f"{float(found):.6g}, not {expected:.6g}")

    # --- finite differences

    def _slope(self, f: Callable[..., Any], steps: float = 1.0) -> Slope:
        line = self._line(f)
        result = slope(lambda t: line(t * steps), EPSILONS[self.name] / steps)
        value, error = result.value / steps, result.error / steps
        return Slope(value, error, result.at, result.smallest * steps)

    def _line(self, f: Callable[..., Any]) -> Callable[[float], np.ndarray]:
        import torch

        def at(t: float) -> np.ndarray:
            with torch.no_grad():
                try:
                    return vector(f(*(x + t * u for x, u in zip(self.x, self.u, strict=True))))
                except (RuntimeError, ValueError):  # outside of what f takes
                    return np.full_like(vector(f(*self.x)), np.nan)

        return at

    def _off(self, found: np.ndarray, by: Slope) -> float | None:
        """The largest error in tolerances; None where finite differences do not settle."""
        scale = max(float(np.abs(by.value).max(initial=0)), float(np.abs(found).max(initial=0)))
        if not np.isfinite(by.value).all() or not (by.error <= _SETTLED * max(scale, 1.0)).all():
            return None
        if not np.isfinite(found).all():
            return float("inf")
        allowed = FINITE_DIFFERENCES[self.name] * max(scale, _SETTLED) + 4 * by.error
        return float((np.abs(found - by.value) / allowed).max(initial=0))

    def _kink(self, f: Callable[..., Any]) -> bool:
        """Whether the slopes from the left and the right differ somewhere."""
        left, right, _ = one_sided(self._line(f), EPSILONS[self.name])
        scale = max(float(np.abs(left).max(initial=0)), float(np.abs(right).max(initial=0)), 1e-3)
        return not bool((np.abs(left - right) <= 1e-4 * scale).all())


# --- arrays -------------------------------------------------------------------------------------


def inner(a: Tensors, b: Tensors) -> Any:
    """Re<a, b>, a tensor."""
    return sum(
        (x.conj() * y).real.sum() if x.is_complex() else (x * y).sum()
        for x, y in zip(a, b, strict=True)
    )


def norm(xs: Tensors) -> float:
    """The Euclidean norm of all entries."""
    return float(np.linalg.norm(vector(xs)))


def vector(xs: Tensors) -> np.ndarray:
    """All real and imaginary parts, in float64."""
    import torch

    from gradtools.torch import _upstream as upstream

    parts = []
    for x in xs:
        x = x.detach().resolve_conj().resolve_neg()
        x = x.clone() if upstream.is_zero(x) else x
        real = torch.view_as_real(x) if x.is_complex() else x
        parts.append(real.reshape(-1).to(torch.float64).numpy())
    return np.concatenate(parts) if parts else np.zeros(0)


def apart(a: Tensors, b: Tensors, least: float = 0.0) -> float:
    """max |a - b| / max(|a|, |b|, least) over all entries; inf where one alone is no number."""
    one, other = vector(a), vector(b)
    if one.shape != other.shape:
        return float("inf")
    known = np.isfinite(other)
    if not (np.isfinite(one) == known).all():
        return float("inf")
    one, other = one[known], other[known]
    size = max(np.abs(one).max(initial=0), np.abs(other).max(initial=0), least)
    return _relative(float(np.abs(one - other).max(initial=0)), float(size))


def _relative(error: float, size: float) -> float:
    if not np.isfinite(error + size):
        return float("inf")
    return error / size if size > 0 else 0.0


def _times(error: float, allowed: float) -> str:
    return f"error {error:.1e}, {error / allowed:.1g} tolerances"


def _drawn(x: Any, generator: Any) -> Any:
    import torch

    return torch.randn(x.shape, dtype=x.dtype, generator=generator)


def _grad(ys: Tensors, xs: Tensors, vs: Tensors) -> tuple[Any, ...]:
    import torch

    grads = torch.autograd.grad(ys, xs, vs, allow_unused=True)
    return tuple(torch.zeros_like(x) if g is None else g for g, x in zip(grads, xs, strict=True))
