"""`Probe`: a user's function and arguments as a `FlatFunction` of its differentiable leaves.

Floating and complex arrays are the leaves; integers, booleans and everything else are constants.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any

import numpy as np

from gradtools.arguments.checks import check_function
from gradtools.code_origin import definition_of
from gradtools.errors import GradtoolsError
from gradtools.testing.flat import FlatFunction, naming
from gradtools.testing.report import widened

FIRST = ("forward", "reverse")
SECOND = (
    "forward_over_reverse",
    "reverse_over_reverse",
    "reverse_over_forward",
    "forward_over_forward",
)
MODES = FIRST + SECOND


class Probe(FlatFunction):
    """f at args, in one backend."""

    def __init__(self, caller: str, f: Callable[..., Any], args: Sequence[Any], backend: Any):
        super().__init__(caller, backend_name(caller, backend))
        self.f = f
        check_function(caller, f, curried=False)
        if not isinstance(args, tuple | list) or not args:
            kind = "an empty one" if isinstance(args, tuple | list) else f"a {type(args).__name__}"
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
                f"{caller}: no argument holds a floating or complex array; there is no derivative "
                "to check. Pass NumPy arrays (Python numbers count as constants)."
            )
        self.bind([self.gt.to_numpy(self._all[i]) for i in moving], [paths[i] for i in moving])
        if not self.out:
            raise GradtoolsError(
                f"{caller}: f returned no floating or complex array; there is no derivative to "
                "check."
            )

    def rebuilt(self, moving: Sequence[Any]) -> tuple[Any, ...]:
        """The arguments with these differentiable leaves."""
        full = list(self._all)
        for i, x in zip(self._moving, moving, strict=True):
            full[i] = x
        return self.waist.unflatten(self._tree, full)

    def program(self, *leaves: Any) -> Any:
        """f at the arguments with these leaves."""
        with naming(self.caller, f"f, {described(self.f)}"):
            return self.f(*self.rebuilt(leaves))


def described(f: Any) -> str:
    """A function's name, and the line at which it is defined if that is known."""
    name, line = getattr(f, "__name__", type(f).__name__), definition_of(f)
    return f"{name} ({line})" if line else str(name)


def inner(us: Sequence[Any], ws: Sequence[Any]) -> float:
    """Re<u, w> in double precision; entries with u = 0 do not count, even if w is NaN."""
    pairs = ((u, w, np.not_equal(u, 0)) for u, w in zip(us, ws, strict=True))
    return float(sum(np.vdot(widened(u)[on], widened(w)[on]).real for u, w, on in pairs))


def size(us: Sequence[Any], ws: Sequence[Any]) -> float:
    """The sum of |u w|, the scale of an inner product's rounding error."""
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
    import_module(f"gradtools.{name}")  # its error says how to install the framework
    return name


def wants_64_bits(backend: str, args: Any) -> bool:
    """Whether some array in the arguments has a 64-bit dtype."""
    leaves = import_module(f"gradtools.{backend}")._api._backend.flatten(args)[0]
    names = [str(getattr(x, "dtype", "")).removeprefix("torch.") for x in leaves]
    return not {"float64", "complex128", "int64", "uint64"}.isdisjoint(names)
