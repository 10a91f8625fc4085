"""`FlatFunction`: a program of one framework, with values and derivatives as NumPy arrays.

A `FlatFunction` takes its floating and complex leaves as positional arguments and returns its
floating and complex outputs as a list. It computes J u, J^H v, and Hessian products of Re<v, f> in
four mixes of modes. Points, tangents, cotangents and results are NumPy arrays.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from typing import Any

import numpy as np

from gradtools.errors import GradtoolsError, LostDerivativeError, MissingRuleError
from gradtools.testing.cross_checking import tolerances
from gradtools.testing.report import largest, widened

Arrays = list[np.ndarray]

# Messages of the frameworks and of gradtools for a function that lacks a mode.
_NO_SUCH_MODE = re.compile(
    r"forward[- ]mode|forward AD|jvp|reverse[- ]mode|reverse rule|forward rule|double backward"
    r"|derivative for .* not implemented|once_differentiable|not differentiable twice"
    r"|does not require grad|Pure callbacks",
    re.IGNORECASE,
)


class FlatFunction:
    """A program of one framework, as a function of flat arrays.

    Attributes:
        caller: The name of the check, for messages.
        name: "torch" or "jax".
        gt: The namespace of that backend.
        waist: The namespace's `Backend`.
        program: The program as a function of its differentiated leaves.
        leaves: The leaves at which it is checked, in NumPy.
        paths: Their names, such as "argument 0['w']".
        out: The floating and complex outputs at these leaves.
        out_paths: Their names.
    """

    program: Callable[..., Any]
    leaves: Arrays
    paths: list[str]
    out: Arrays
    out_paths: list[str]

    def __init__(self, caller: str, name: str) -> None:
        self.caller, self.name = caller, name
        self.gt = import_module(f"gradtools.{name}")
        self.waist = self.gt._api._backend

    def bind(self, leaves: Arrays, paths: list[str]) -> None:
        """Evaluates the program at these leaves, which have these names."""
        self.leaves, self.paths = leaves, paths
        out = self.run(lambda xs: self.program(*xs), leaves)
        named = zip(self.waist.leaf_paths(out), self.waist.flatten(out)[0], strict=True)
        pairs = ((f"output{path}", self.own(y)) for path, y in named)
        found = [(path, y) for path, y in pairs if self.differentiable(y)]
        self.out_paths, self.out = [path for path, _ in found], self.numpy([y for _, y in found])

    @property
    def eps(self) -> float:
        """The machine epsilon of the coarsest array."""
        return max(tolerances.epsilon(x.dtype) for x in [*self.leaves, *self.out])

    def flat(self, *leaves: Any) -> list[Any]:
        """The floating and complex outputs at these leaves, in the framework's arrays."""
        outs = self.waist.flatten(self.program(*leaves))[0]
        return [*filter(self.differentiable, map(self.own, outs))]

    def own(self, x: Any) -> Any:
        """Converts a NumPy array or number to the framework's array; other values are unchanged."""
        return self.array(x) if isinstance(x, np.ndarray | np.generic | float | complex) else x

    # --- arrays

    def array(self, x: Any) -> Any:
        """Converts a NumPy array to the framework's."""
        return self.gt.asarray(np.asarray(x))

    def arrays(self, xs: Sequence[Any]) -> tuple[Any, ...]:
        """Converts NumPy arrays to the framework's."""
        return tuple([self.array(x) for x in xs])

    def numpy(self, xs: Any) -> Arrays:
        """Converts the framework's arrays and numbers to NumPy arrays."""
        is_array = self.waist.is_array
        return [self.gt.to_numpy(x) if is_array(x) else np.asarray(x) for x in xs]

    def differentiable(self, x: Any) -> bool:
        """Whether x is a floating or complex array of the framework."""
        return bool(self.waist.is_array(x) and self.waist.is_inexact(x))

    # --- values and derivatives

    def value(self, xs: Arrays) -> Arrays:
        """The floating and complex outputs at xs."""
        return self.numpy(self.run(lambda xs: self.flat(*xs), xs))

    def forward(self, xs: Arrays, us: Arrays) -> Arrays:
        """J u at xs."""
        return self.numpy(self.run(lambda xs, us: self.gt.jvp(self.flat, xs, us)[1], xs, us))

    def reverse(self, xs: Arrays, vs: Arrays) -> Arrays:
        """J^H v at xs."""

        def pulled(xs: Any, vs: Any) -> Any:
            outs, pullback = self.gt.vjp(self.flat, *xs)
            return pullback(self._like(vs, outs))

        return self.numpy(self.run(pulled, xs, vs))

    def _like(self, vs: Sequence[Any], outs: Sequence[Any]) -> list[Any]:
        """Cotangents in the outputs' dtypes."""
        return [self.waist.cast(v, y) for v, y in zip(vs, outs, strict=True)]

    def run(self, compute: Callable[..., Any], *groups: Arrays) -> Any:
        """`compute(*groups)` with the groups converted to the framework's arrays."""
        return compute(*map(self.arrays, groups))

    # --- second order: H is the Hessian of Re<v, f>

    def product(self, mode: str, xs: Arrays, us: Arrays, vs: Arrays) -> Arrays:
        """H u at xs, by one mix of modes."""

        def multiplied(points: Any, tangents: Any, vs: Any) -> Any:
            if mode == "reverse_over_forward":
                value, pullback = self.gt.vjp(self._slope(tangents, vs), *points)
                return pullback(self.waist.ones_like(value))

            def gradient(*xs: Any) -> list[Any]:
                outs, pullback = self.gt.vjp(self.flat, *xs)
                return list(pullback(self._like(vs, outs)))

            if mode == "forward_over_reverse":
                return self.gt.jvp(gradient, points, tangents)[1]
            return self.gt.vjp(gradient, *points)[1](list(tangents))

        return self.numpy(self.run(multiplied, xs, us, vs))

    def curvature(self, xs: Arrays, us: Arrays, ws: Arrays, vs: Arrays) -> np.ndarray:
        """Re<w, H u> at xs, by forward over forward."""
        curved = lambda xs, us, ws, vs: self.gt.jvp(self._slope(us, vs), xs, ws)[1]
        return np.asarray(self.gt.to_numpy(self.run(curved, xs, us, ws, vs)))

    def _slope(self, us: Any, vs: Any) -> Any:
        """Re<v, J u> as a function of the leaves."""

        def along(*xs: Any) -> Any:
            pushed = self.gt.jvp(self.flat, xs, us)[1]
            return sum(map(self._inner, self._like(vs, pushed), pushed))

        return along

    def _inner(self, v: Any, y: Any) -> Any:
        """Re<v, y> of the framework's arrays."""
        if self.waist.is_complex(y):
            return (v.real * y.real + v.imag * y.imag).sum()
        return (v * y).sum()


def no_such_mode(error: Exception) -> bool:
    """Whether an error means that a function lacks a mode, rather than that a rule is wrong."""
    if isinstance(error, LostDerivativeError):
        return False
    if isinstance(error, NotImplementedError | MissingRuleError):
        return True
    expected = isinstance(error, RuntimeError | TypeError | ValueError | GradtoolsError)
    return expected and _NO_SUCH_MODE.search(str(error)) is not None


def first_line(error: Exception) -> str:
    """An error's type and the first line of its message."""
    return f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0][:200]}"


@contextmanager
def naming(caller: str, name: str) -> Iterator[None]:
    """A context that adds a note to an exception: whose code raised it."""
    try:
        yield
    except Exception as error:
        note = f"{caller}: raised by {name}."
        if note not in getattr(error, "__notes__", ()):
            error.add_note(note)
        raise


def is_rounding(
    off: np.ndarray, compute: Callable[[Arrays], Any], xs: Arrays, eps: float, bound: float
) -> bool:
    """Whether differences are rounding error of larger numbers that cancel.

    They are if they are small relative to the largest numbers, and if the results change by as much
    when the last digits of the arguments change. Otherwise they are real, however small.

    Args:
        off: The differences.
        compute: A function of the arguments that returns the results, a sequence of arrays.
        xs: The arguments.
        eps: The machine epsilon of the computation.
        bound: The largest difference that rounding of the numbers at hand can make.
    """
    if not np.max(off) <= bound:
        return False
    here, changes = compute(xs), [0.0]
    for draw in range(4):
        rng = np.random.default_rng(draw)
        factors = [1 + 2 * eps * rng.uniform(-1, 1, x.shape) for x in xs]
        near = compute([(x * f).astype(x.dtype) for x, f in zip(xs, factors, strict=True)])
        changes += [largest(widened(x) - widened(y)) for x, y in zip(near, here, strict=True)]
    return bool(np.max(off) <= 1e3 * max(changes))
