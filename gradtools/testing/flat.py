"""`FlatFunction`: a function of flat arrays in one framework, whose derivatives are NumPy arrays.

A `FlatFunction` takes its floating and complex leaves one by one and gives its floating and complex
outputs as a list. It answers each question that a check can ask: J u, J^H v, and for the real
function Re<v, f> the four ways to a product with its Hessian. Points, tangents, cotangents and
answers are NumPy arrays.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from typing import Any

import numpy as np

Arrays = list[np.ndarray]


class FlatFunction:
    """A function of flat arrays in one framework.

    Attributes:
        name: "torch" or "jax".
        gt: The namespace of that backend.
        waist: Its implementation of `Backend`.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.gt = import_module(f"gradtools.{name}")
        self.waist = self.gt._api._backend

    def flat(self, *leaves: Any) -> list[Any]:
        """The floating and complex outputs at these leaves, in the framework's arrays."""
        raise NotImplementedError

    # --- arrays

    def array(self, x: Any) -> Any:
        """A NumPy array in the framework."""
        return self.gt.asarray(np.asarray(x))

    def arrays(self, xs: Sequence[Any]) -> tuple[Any, ...]:
        """NumPy arrays in the framework."""
        return tuple([self.array(x) for x in xs])

    def numpy(self, xs: Any) -> Arrays:
        """The framework's arrays, and numbers, in NumPy."""
        is_array = self.waist.is_array
        return [self.gt.to_numpy(x) if is_array(x) else np.asarray(x) for x in xs]

    def differentiable(self, x: Any) -> bool:
        """Whether x is a floating or complex array of the framework."""
        return bool(self.waist.is_array(x) and self.waist.is_inexact(x))

    # --- first order

    def forward(self, xs: Arrays, us: Arrays) -> Arrays:
        """J u at xs."""
        return self.numpy(self.gt.jvp(self.flat, self.arrays(xs), self.arrays(us))[1])

    def reverse(self, xs: Arrays, vs: Arrays) -> Arrays:
        """J^H v at xs."""
        outs, pullback = self.gt.vjp(self.flat, *self.arrays(xs))
        return self.numpy(pullback(self._like(vs, outs)))

    def _like(self, vs: Arrays, outs: Sequence[Any]) -> list[Any]:
        """Cotangents in the outputs' dtypes."""
        return [self.waist.cast(self.array(v), y) for v, y in zip(vs, outs, strict=True)]

    # --- second order: H is the Hessian of Re<v, f>

    def product(self, mode: str, xs: Arrays, us: Arrays, vs: Arrays) -> Arrays:
        """H u at xs, in one mix of modes that gives a vector."""
        points, tangents = self.arrays(xs), self.arrays(us)
        if mode == "reverse_over_forward":
            value, pullback = self.gt.vjp(self._slope(us, vs), *points)
            return self.numpy(pullback(self.waist.ones_like(value)))

        def gradient(*xs: Any) -> list[Any]:
            outs, pullback = self.gt.vjp(self.flat, *xs)
            return list(pullback(self._like(vs, outs)))

        if mode == "forward_over_reverse":
            return self.numpy(self.gt.jvp(gradient, points, tangents)[1])
        return self.numpy(self.gt.vjp(gradient, *points)[1](list(tangents)))

    def curvature(self, xs: Arrays, us: Arrays, ws: Arrays, vs: Arrays) -> np.ndarray:
        """Re<w, H u> at xs, forward over forward."""
        pushed = self.gt.jvp(self._slope(us, vs), self.arrays(xs), self.arrays(ws))[1]
        return np.asarray(self.gt.to_numpy(pushed))

    def _slope(self, us: Arrays, vs: Arrays) -> Any:
        """Re<v, J u> as a function of the leaves."""

        def along(*xs: Any) -> Any:
            pushed = self.gt.jvp(self.flat, xs, self.arrays(us))[1]
            return sum(map(self._inner, self._like(vs, pushed), pushed))

        return along

    def _inner(self, v: Any, y: Any) -> Any:
        """Re<v, y>, in the framework."""
        if self.waist.is_complex(y):
            return (v.real * y.real + v.imag * y.imag).sum()
        return (v * y).sum()
