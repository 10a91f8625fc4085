"""Defines `FlatFunction`, a program of one framework with values and derivatives as NumPy arrays.

A `FlatFunction` takes its floating and complex leaves as positional arguments and returns its
floating and complex outputs as a list. Derivatives of a `FlatFunction` are compositions of the
pushforward and the pullback. Points, tangents, cotangents and results are NumPy arrays. `Probe` is
a `FlatFunction` made from a user's function and its arguments.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from importlib import import_module
from typing import Any

import numpy as np

from gradtools.arguments.checks import check_function
from gradtools.code_origin import definition_of
from gradtools.errors import GradtoolsError, MissingRuleError, Refusal
from gradtools.testing.cross_checking import tolerances
from gradtools.testing.report import largest, widened

Arrays = list[np.ndarray]
FIRST = ("forward", "reverse")
SECOND = (
    "forward_over_reverse",
    "reverse_over_reverse",
    "reverse_over_forward",
    "forward_over_forward",
)
MODES = FIRST + SECOND

# Matches the error messages for a function that lacks a mode.
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
        gt: The namespace of the backend.
        waist: The namespace's `Backend`.
        program: The program as a function of its differentiated leaves.
        leaves: The NumPy arrays at which the program is checked.
        paths: The names of the leaves, such as "argument 0['w']".
        out: The floating and complex outputs at these leaves.
        out_paths: The names of the outputs in `out`.
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
        """Sets `leaves` and `paths`, and evaluates the program at these leaves."""
        self.leaves, self.paths = leaves, paths
        out = self.run(lambda xs: self.program(*xs), leaves)
        named = zip(self.waist.leaf_paths(out), self.waist.flatten(out)[0], strict=True)
        pairs = ((f"output{path}", self.own(y)) for path, y in named)
        found = [(path, y) for path, y in pairs if self.differentiable(y)]
        self.out_paths, self.out = [path for path, _ in found], self.numpy([y for _, y in found])

    @property
    def eps(self) -> float:
        """The largest machine epsilon of the leaves' and outputs' dtypes."""
        return max(tolerances.epsilon(x.dtype) for x in [*self.leaves, *self.out])

    def flat(self, *leaves: Any) -> list[Any]:
        """Returns the floating and complex outputs at the given leaves, as framework arrays."""
        outs = self.waist.flatten(self.program(*leaves))[0]
        return [*filter(self.differentiable, map(self.own, outs))]

    def own(self, x: Any) -> Any:
        """Converts a NumPy array or number to the framework's array; other values are unchanged."""
        return self.array(x) if isinstance(x, np.ndarray | np.generic | float | complex) else x

    # --- arrays

    def array(self, x: Any) -> Any:
        """Converts a NumPy array to an array of the framework."""
        return self.gt.asarray(np.asarray(x))

    def arrays(self, xs: Sequence[Any]) -> tuple[Any, ...]:
        """Converts NumPy arrays to arrays of the framework."""
        return tuple([self.array(x) for x in xs])

    def numpy(self, xs: Any) -> Arrays:
        """Converts the framework's arrays and numbers to NumPy arrays."""
        is_array = self.waist.is_array
        return [self.gt.to_numpy(x) if is_array(x) else np.asarray(x) for x in xs]

    def differentiable(self, x: Any) -> bool:
        """Returns whether x is a floating or complex array of the framework."""
        return bool(self.waist.is_array(x) and self.waist.is_inexact(x))

    # --- values and derivatives

    def value(self, xs: Arrays) -> Arrays:
        """Returns the floating and complex outputs at xs."""
        return self.numpy(self.run(lambda xs: self.flat(*xs), xs))

    def derivative(self, mode: str, xs: Arrays, *seeds: Arrays) -> Arrays:
        """Computes a derivative at xs in a mode, or in nested modes ("forward_over_reverse").

        Let u and w be tangents of the leaves, v a cotangent of the outputs, and H the Hessian of
        Re<v, f>. Forward mode returns J u, and reverse mode returns J^H v. Forward over forward
        returns D^2 f[u, w], and the other nested modes return H u.

        seeds: The tangents or cotangents of each mode, from the inner to the outer mode.
        """

        def differentiated(points: Any, *seeds: Any) -> Any:
            f = self.flat
            for step, seed in zip(reversed(mode.split("_over_")), seeds, strict=True):
                f = partial(self.pushed if step == "forward" else self.pulled, f, seed)
            return f(*points)

        return self.numpy(self.run(differentiated, xs, *seeds))

    def pushed(self, f: Callable[..., Any], us: Sequence[Any], *xs: Any) -> list[Any]:
        """Returns the tangents J u of f at xs, as arrays of the framework."""
        return list(self.gt.jvp(f, xs, tuple(us))[1])

    def pulled(self, f: Callable[..., Any], vs: Sequence[Any], *xs: Any) -> list[Any]:
        """Returns the cotangents J^H v of f at xs, as arrays of the framework."""
        outs, pullback = self.gt.vjp(f, *xs)
        return list(pullback(self.like(vs, outs)))

    def like(self, vs: Sequence[Any], outs: Sequence[Any]) -> list[Any]:
        """Converts cotangents to the outputs' dtypes."""
        return [self.waist.cast(v, y) for v, y in zip(vs, outs, strict=True)]

    def run(self, compute: Callable[..., Any], *groups: Arrays) -> Any:
        """Runs `compute(*groups)` with the groups converted to the framework's arrays."""
        return compute(*map(self.arrays, groups))


class Probe(FlatFunction):
    """The `FlatFunction` of a user's function f at its arguments, in one backend.

    Floating and complex arrays are the leaves of a probe; other values, such as integers, are
    constants.
    """

    def __init__(self, caller: str, f: Callable[..., Any], args: Sequence[Any], backend: Any):
        super().__init__(caller, backend_name(caller, backend))
        self.f = f
        check_function(caller, f, curried=False)
        if not isinstance(args, tuple | list) or not args:
            name = type(args).__name__
            kind = f"an empty {name}" if isinstance(args, tuple | list) else f"a {name}"
            raise GradtoolsError(
                f"{caller}: args must be a tuple with one entry for each argument of f, got "
                f"{kind}. For one argument write (x,)."
            )
        leaves, self._tree = self.waist.flatten(tuple(args))
        paths = [f"argument {i}{p}" for i, x in enumerate(args) for p in self.waist.leaf_paths(x)]
        is_numpy = lambda x: isinstance(x, np.ndarray | np.generic)
        self._all = [self.array(x) if is_numpy(x) else x for x in leaves]
        moving = [i for i, x in enumerate(self._all) if self.differentiable(x)]
        self._moving = moving
        if not moving:
            raise GradtoolsError(
                f"{caller}: no argument contains a floating or complex array; there is no "
                "derivative to check. Pass NumPy arrays (Python numbers count as constants)."
            )
        self.bind([self.gt.to_numpy(self._all[i]) for i in moving], [paths[i] for i in moving])
        if not self.out:
            raise GradtoolsError(
                f"{caller}: f returned no floating or complex array; there is no derivative to "
                "check."
            )

    def rebuilt(self, moving: Sequence[Any]) -> tuple[Any, ...]:
        """Returns the arguments with their differentiable leaves replaced by the given leaves."""
        full = list(self._all)
        for i, x in zip(self._moving, moving, strict=True):
            full[i] = x
        return self.waist.unflatten(self._tree, full)

    def program(self, *leaves: Any) -> Any:
        """Evaluates f at the arguments with the given leaves."""
        with naming(self.caller, f"f, {described(self.f)}; backend is {self.name!r}"):
            return self.f(*self.rebuilt(leaves))


def no_such_mode(error: Exception) -> bool:
    """Returns whether an error means that f lacks a mode, rather than that a rule is wrong."""
    if isinstance(error, NotImplementedError | MissingRuleError):
        return True
    expected = isinstance(error, RuntimeError | TypeError | ValueError | GradtoolsError)
    return expected and _NO_SUCH_MODE.search(str(error)) is not None


def first_line(error: Exception) -> str:
    """Returns an error's public type and the first line of its text, at most 400 characters."""
    kind = GradtoolsError if isinstance(error, Refusal) else type(error)
    line = (str(error).strip().splitlines() or [""])[0]
    if len(line) > 400:
        line = line[:400].rpartition(". ")[0] + "." if ". " in line[:400] else line[:397] + "..."
    return f"{kind.__name__}: {line}"


@contextmanager
def naming(
    caller: str, name: str, hint: Callable[[Exception], str] = lambda error: ""
) -> Iterator[None]:
    """Context manager that adds a note with the name of the failing code to exceptions.

    hint: A function that returns a further sentence for an exception, or an empty string.
    """
    try:
        yield
    except Exception as error:
        note = f"{caller}: raised by {name}.{hint(error)}"
        if note not in getattr(error, "__notes__", ()):
            error.add_note(note)
        raise


def is_rounding(
    off: np.ndarray, compute: Callable[[Arrays], Any], xs: Arrays, eps: float, bound: float
) -> bool:
    """Returns whether differences are rounding error of larger numbers that cancel.

    Differences count as rounding error if they are at most `bound` and at most 1000 times the
    change of the results when the last digits of the arguments change. Otherwise, the results
    disagree.

    Args:
        off: The absolute differences.
        compute: A function of the arguments that returns the results, a sequence of arrays.
        xs: The arguments.
        eps: The machine epsilon of the computation.
        bound: The largest difference that rounding can cause.
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


def described(f: Any) -> str:
    """Describes a function by its name and, if known, the line of its definition."""
    name, line = getattr(f, "__name__", type(f).__name__), definition_of(f)
    return f"{name} ({line})" if line else str(name)


def inner(us: Sequence[Any], ws: Sequence[Any]) -> float:
    """Returns Re<us, ws> in double precision; entries with us = 0 are skipped (ws may be NaN)."""
    pairs = ((u, w, np.not_equal(u, 0)) for u, w in zip(us, ws, strict=True))
    return float(sum(np.vdot(widened(u)[on], widened(w)[on]).real for u, w, on in pairs))


def size(us: Sequence[Any], ws: Sequence[Any]) -> float:
    """Returns the sum of |u w|, the scale of an inner product's rounding error."""
    return inner([np.abs(u) for u in us], [np.abs(w) for w in ws])


def backend_name(caller: str, backend: Any) -> str:
    """Normalizes a backend's name or namespace module to "torch" or "jax"."""
    name = backend if isinstance(backend, str) else getattr(backend, "__name__", "")
    name = name.removeprefix("gradtools.")
    if name not in ("torch", "jax"):
        raise GradtoolsError(
            f'{caller}: backend is {backend!r}; expected "torch", "jax", or one of the modules '
            "gradtools.torch and gradtools.jax."
        )
    import_module(f"gradtools.{name}")  # raises an error with advice if not installed
    return name


def wants_64_bits(backend: str, args: Any) -> bool:
    """Returns whether some array in the arguments has a 64-bit dtype."""
    leaves = import_module(f"gradtools.{backend}")._api._backend.flatten(args)[0]
    names = [str(getattr(x, "dtype", "")).removeprefix("torch.") for x in leaves]
    return not {"float64", "complex128", "int64", "uint64"}.isdisjoint(names)
