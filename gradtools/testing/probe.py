"""A function in one framework, asked for values and derivatives in NumPy.

A `Probe` makes of f and its arguments a function of a flat list of floating or complex arrays
(integers, booleans and everything else stay as they were given), and answers each question that a
check can ask: the value at another point, J u, J^H v, and for the real function Re<v, f> the four
ways to a product with its Hessian.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any

import numpy as np

from gradtools.calls import with_article
from gradtools.errors import GradtoolsError, LostDerivativeError, MissingRuleError
from gradtools.testing import tolerances

Arrays = list[np.ndarray]

FIRST = ("forward", "reverse")
SECOND = (
    "forward_over_reverse",
    "reverse_over_reverse",
    "reverse_over_forward",
    "forward_over_forward",
)
MODES = FIRST + SECOND

# What the frameworks, and gradtools, say where a function has no such mode.
_NO_SUCH_MODE = re.compile(
    r"forward[- ]mode|forward AD|jvp|reverse[- ]mode|reverse rule|forward rule|double backward"
    r"|derivative for .* not implemented|once_differentiable|not differentiable twice"
    r"|does not require grad|Pure callbacks",
    re.IGNORECASE,
)


class Probe:
    """f at args, in one backend.

    Attributes:
        gt: The backend's namespace.
        leaves: The differentiable leaves of the arguments, in NumPy.
        paths: Their names, such as "argument 0['w']".
        out_paths: The names of the differentiable outputs.
    """

    def __init__(self, caller: str, f: Callable[..., Any], args: Sequence[Any], backend: Any):
        self.caller, self.f, self.name = caller, f, backend_name(caller, backend)
        self.gt = import_module(f"gradtools.{self.name}")
        self.waist = self.gt._api._backend
        if not callable(f):
            raise GradtoolsError(
                f"{caller}: f must be a function, got {with_article(type(f).__name__)}."
            )
        if not isinstance(args, tuple | list) or not args:
            came = "an empty one" if isinstance(args, tuple | list) else f"a {type(args).__name__}"
            raise GradtoolsError(
                f"{caller}: args must be a tuple with one entry for each argument of f, got "
                f"{came}. For one argument write (x,)."
            )
        leaves, self._tree = self.waist.flatten(tuple(args))
        trees = enumerate(args)
        paths = [f"argument {i}{p}" for i, x in trees for p in self.waist.leaf_paths(x)]
        self._all = [self._array(x) for x in leaves]
        self._moving = [i for i, x in enumerate(self._all) if self._differentiable(x)]
        self.paths = [paths[i] for i in self._moving]
        self.leaves: Arrays = [self.gt.to_numpy(self._all[i]) for i in self._moving]
        if not self.leaves:
            raise GradtoolsError(
                f"{caller}: no argument holds a floating or complex array; there is no derivative "
                "to check. Pass NumPy arrays (Python numbers count as constants)."
            )
        self._out_paths: list[str] = []
        self.out = self.value(self.leaves)
        if not self.out:
            raise GradtoolsError(
                f"{caller}: f returned no floating or complex array; there is no derivative to "
                "check."
            )
        self.out_paths = self._out_paths

    def _array(self, x: Any) -> Any:
        """A NumPy array in the backend; anything else as it is."""
        return self.gt.asarray(x) if isinstance(x, np.ndarray | np.generic) else x

    def _differentiable(self, x: Any) -> bool:
        return self.waist.is_array(x) and self.waist.is_inexact(x)

    @property
    def eps(self) -> float:
        """The spacing at 1 of the coarsest numbers in and out."""
        return max(tolerances.epsilon(x.dtype) for x in [*self.leaves, *self.out])

    # --- f of flat lists

    def flat(self, *moving: Any) -> list[Any]:
        """f's differentiable outputs at other leaves, in the backend's arrays."""
        full = list(self._all)
        for i, x in zip(self._moving, moving, strict=True):
            full[i] = x
        out = self.f(*self.waist.unflatten(self._tree, full))
        leaves = self.waist.flatten(out)[0]
        kept = [self._differentiable(x) for x in leaves]
        names = (f"output{path}" for path in self.waist.leaf_paths(out))
        self._out_paths = [name for name, keep in zip(names, kept, strict=True) if keep]
        return [x for x, keep in zip(leaves, kept, strict=True) if keep]

    def value(self, xs: Arrays) -> Arrays:
        """f's differentiable outputs at xs."""
        return self._numpy(self.flat(*self._arrays(xs, self.leaves)))

    def _arrays(self, xs: Arrays, like: Arrays) -> tuple[Any, ...]:
        return tuple(
            self.gt.asarray(np.asarray(x).astype(y.dtype)) for x, y in zip(xs, like, strict=True)
        )

    def _numpy(self, xs: Any) -> Arrays:
        return [self.gt.to_numpy(x) for x in xs]

    # --- first order

    def forward(self, xs: Arrays, us: Arrays) -> Arrays:
        """J u at xs."""
        points, tangents = self._arrays(xs, self.leaves), self._arrays(us, self.leaves)
        return self._numpy(self.gt.jvp(self.flat, points, tangents)[1])

    def reverse(self, xs: Arrays, vs: Arrays) -> Arrays:
        """J^H v at xs."""
        _, pullback = self.gt.vjp(self.flat, *self._arrays(xs, self.leaves))
        return self._numpy(pullback(list(self._arrays(vs, self.out))))

    # --- second order: H is the Hessian of Re<v, f>

    def product(self, mode: str, xs: Arrays, us: Arrays, vs: Arrays) -> Arrays:
        """H u at xs, in one mix of modes that gives a vector."""
        points, tangents = self._arrays(xs, self.leaves), self._arrays(us, self.leaves)
        cotangents = list(self._arrays(vs, self.out))
        if mode == "reverse_over_forward":
            along = lambda *xs: self._inner(
                cotangents, self.gt.jvp(self.flat, xs, self._arrays(us, self.leaves))[1]
            )
            value, pullback = self.gt.vjp(along, *points)
            return self._numpy(pullback(self.waist.ones_like(value)))
        gradient = lambda *xs: list(self.gt.vjp(self.flat, *xs)[1](cotangents))
        if mode == "forward_over_reverse":
            return self._numpy(self.gt.jvp(gradient, points, tangents)[1])
        return self._numpy(self.gt.vjp(gradient, *points)[1](list(tangents)))

    def curvature(self, xs: Arrays, us: Arrays, ws: Arrays, vs: Arrays) -> np.ndarray:
        """Re<w, H u> at xs, forward over forward."""
        points, others = self._arrays(xs, self.leaves), self._arrays(ws, self.leaves)
        cotangents = list(self._arrays(vs, self.out))
        along = lambda *xs: self._inner(
            cotangents, self.gt.jvp(self.flat, xs, self._arrays(us, self.leaves))[1]
        )
        return self.gt.to_numpy(self.gt.jvp(along, points, others)[1])

    def _inner(self, vs: Sequence[Any], ys: Sequence[Any]) -> Any:
        """Re<v, y>, in the backend."""
        total: Any = None
        for v, y in zip(vs, ys, strict=True):
            if self.waist.is_complex(y):
                term = (v.real * y.real + v.imag * y.imag).sum()
            else:
                term = (v * y).sum()
            total = term if total is None else total + term
        return total


def no_such_mode(error: Exception) -> bool:
    """Whether an error says that a function lacks a mode, rather than that a rule is broken."""
    if isinstance(error, LostDerivativeError):
        return False
    if isinstance(error, NotImplementedError | MissingRuleError):
        return True
    told = isinstance(error, RuntimeError | TypeError | ValueError | GradtoolsError)
    return told and _NO_SUCH_MODE.search(str(error)) is not None


def inner(us: Sequence[Any], ws: Sequence[Any]) -> float:
    """Re<u, w> in double precision; where u is 0, w does not count, be it NaN."""
    pairs = ((u, w, np.not_equal(u, 0)) for u, w in zip(us, ws, strict=True))
    return float(sum(np.vdot(wide(u)[on], wide(w)[on]).real for u, w, on in pairs))


def size(us: Sequence[Any], ws: Sequence[Any]) -> float:
    """The sum of |u w|: how large the numbers are that an inner product adds up."""
    pairs = ((u, w, np.not_equal(u, 0)) for u, w in zip(us, ws, strict=True))
    return float(sum(np.sum(np.abs(wide(u)[on] * wide(w)[on])) for u, w, on in pairs))


def wide(x: Any) -> np.ndarray:
    """x in float64 or complex128."""
    x = np.asarray(x)
    return x.astype(np.complex128 if x.dtype.kind == "c" else np.float64)


def backend_name(caller: str, backend: Any) -> str:
    """The name "torch" or "jax" from it or from the namespace module."""
    name = backend if isinstance(backend, str) else getattr(backend, "__name__", "")
    name = name.removeprefix("gradtools.")
    if name not in ("torch", "jax"):
        raise GradtoolsError(
            f'{caller}: backend is {backend!r}; expected "torch", "jax", or one of the modules '
            "gradtools.torch and gradtools.jax."
        )
    return name


def wants_64_bits(args: Any) -> bool:
    """Whether an array somewhere in the arguments has 64-bit entries."""
    if isinstance(args, dict):
        return any(wants_64_bits(x) for x in args.values())
    if isinstance(args, tuple | list):
        return any(wants_64_bits(x) for x in args)
    name = str(getattr(args, "dtype", "")).removeprefix("torch.")
    return name in ("float64", "complex128", "int64", "uint64")
