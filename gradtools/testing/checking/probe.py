"""`Probe`: a user's function and arguments as a `FlatFunction` of its differentiable leaves.

Floating and complex arrays are the leaves; integers, booleans and everything else are constants.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any

import numpy as np

from gradtools.arguments.checks import check_function
from gradtools.code_origin import definition_of
from gradtools.errors import GradtoolsError, LostDerivativeError, MissingRuleError
from gradtools.testing.cross_checking import tolerances
from gradtools.testing.flat import Arrays, FlatFunction, naming
from gradtools.testing.report import widened

FIRST = ("forward", "reverse")
SECOND = (
    "forward_over_reverse",
    "reverse_over_reverse",
    "reverse_over_forward",
    "forward_over_forward",
)
MODES = FIRST + SECOND

# Messages of the frameworks and of gradtools for a function that lacks a mode.
_NO_SUCH_MODE = re.compile(
    r"forward[- ]mode|forward AD|jvp|reverse[- ]mode|reverse rule|forward rule|double backward"
    r"|derivative for .* not implemented|once_differentiable|not differentiable twice"
    r"|does not require grad|Pure callbacks",
    re.IGNORECASE,
)


class Probe(FlatFunction):
    """f at args, in one backend.

    Attributes:
        leaves: The differentiable leaves of the arguments, in NumPy.
        paths: Their names, such as "argument 0['w']".
        out_paths: The names of the differentiable outputs.
    """

    def __init__(self, caller: str, f: Callable[..., Any], args: Sequence[Any], backend: Any):
        super().__init__(backend_name(caller, backend))
        self.caller, self.f = caller, f
        check_function(caller, f, curried=False)
        if not isinstance(args, tuple | list) or not args:
            kind = "an empty one" if isinstance(args, tuple | list) else f"a {type(args).__name__}"
            raise GradtoolsError(
                f"{caller}: args must be a tuple with one entry for each argument of f, got "
                f"{kind}. For one argument write (x,)."
            )
        leaves, self._tree = self.waist.flatten(tuple(args))
        trees = enumerate(args)
        paths = [f"argument {i}{p}" for i, x in trees for p in self.waist.leaf_paths(x)]
        is_numpy = lambda x: isinstance(x, np.ndarray | np.generic)
        self._all = [self.array(x) if is_numpy(x) else x for x in leaves]
        self._moving = [i for i, x in enumerate(self._all) if self.differentiable(x)]
        self.paths = [paths[i] for i in self._moving]
        self.leaves: Arrays = [self.gt.to_numpy(self._all[i]) for i in self._moving]
        if not self.leaves:
            raise GradtoolsError(
                f"{caller}: no argument holds a floating or complex array; there is no derivative "
                "to check. Pass NumPy arrays (Python numbers count as constants)."
            )
        named = self._outputs(self.arrays(self.leaves))
        self.out_paths = [path for path, _ in named]
        self.out = self.numpy([y for _, y in named])
        if not self.out:
            raise GradtoolsError(
                f"{caller}: f returned no floating or complex array; there is no derivative to "
                "check."
            )
        self.eps = max(tolerances.epsilon(x.dtype) for x in [*self.leaves, *self.out])

    def rebuilt(self, moving: Sequence[Any]) -> tuple[Any, ...]:
        """The arguments with these differentiable leaves."""
        full = list(self._all)
        for i, x in zip(self._moving, moving, strict=True):
            full[i] = x
        return self.waist.unflatten(self._tree, full)

    def _outputs(self, leaves: Sequence[Any]) -> list[tuple[str, Any]]:
        """f's differentiable outputs at these leaves, with their names."""
        with naming(self.caller, f"f, {described(self.f)}"):
            out = self.f(*self.rebuilt(leaves))
        named = zip(self.waist.leaf_paths(out), self.waist.flatten(out)[0], strict=True)
        return [(f"output{path}", y) for path, y in named if self.differentiable(y)]

    def flat(self, *leaves: Any) -> list[Any]:
        """f's differentiable outputs at these leaves, as the backend's arrays."""
        return [y for _, y in self._outputs(leaves)]

    def value(self, xs: Arrays) -> Arrays:
        """f's differentiable outputs at xs, in NumPy."""
        return self.numpy(self.flat(*self.arrays(xs)))


def described(f: Any) -> str:
    """A function's name, and the line at which it is defined if that is known."""
    name, line = getattr(f, "__name__", type(f).__name__), definition_of(f)
    return f"{name} ({line})" if line else str(name)


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
