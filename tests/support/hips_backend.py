"""Defines a backend for HIPS autograd that uses the default methods of `Backend`.

This backend supports only NumPy arrays and reverse mode. The pullback of autograd is the transpose,
while gradtools' pullback is the adjoint.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import autograd.numpy as anp
import numpy as np
from autograd import builtins
from autograd.core import make_vjp
from autograd.extend import defvjp_argnums, primitive
from autograd.tracer import getval, isbox

from gradtools import GradtoolsError
from gradtools.api import Api
from gradtools.backend import Backend, Evaluation


@dataclass(frozen=True)
class Treedef:
    """The treedef of a pytree of tuples, lists and dicts, in which None has no leaves."""

    kind: type | None = None  # None for a leaf
    keys: tuple[Any, ...] = ()
    parts: tuple[Treedef, ...] = ()

    @classmethod
    def of(cls, tree: Any) -> Treedef:
        if tree is not None and type(tree) not in (tuple, list, dict):
            return cls()
        keys = tuple(sorted(tree) if type(tree) is dict else range(len(tree or ())))
        return cls(type(tree), keys, tuple([cls.of(tree[key]) for key in keys]))

    def flatten_up_to(self, tree: Any) -> list[Any]:
        """Return the subtrees of `tree` at the positions of the leaves of this structure."""
        if self.kind is None:
            return [tree]
        if type(tree) is not self.kind or len(tree or ()) != len(self.keys):
            raise ValueError(f"{tree!r} is not a {self.kind.__name__} of length {len(self.keys)}")
        pairs = zip(self.keys, self.parts, strict=True)
        return [x for key, part in pairs for x in part.flatten_up_to(tree[key])]

    def built(self, leaves: Iterator[Any]) -> Any:
        if self.kind is None:
            return next(leaves)
        values = [part.built(leaves) for part in self.parts]
        if self.kind is dict:
            return dict(zip(self.keys, values, strict=True))
        return self.kind(values) if self.keys else None if self.kind is type(None) else self.kind()

    def paths(self) -> list[str]:
        if self.kind is None:
            return [""]
        pairs = zip(self.keys, self.parts, strict=True)
        return [f"[{key!r}]{path}" for key, part in pairs for path in part.paths()]


class HipsBackend(Backend):
    """The abstract methods of `Backend`, implemented with autograd."""

    name = __name__
    xp = anp

    # --- pytrees

    def flatten(self, tree: Any) -> tuple[list[Any], Any]:
        treedef = Treedef.of(tree)
        return treedef.flatten_up_to(tree), treedef

    def unflatten(self, treedef: Any, leaves: Any) -> Any:
        return treedef.built(iter(leaves))

    def leaf_paths(self, tree: Any) -> list[str]:
        return Treedef.of(tree).paths()

    # --- arrays

    def is_array(self, x: Any) -> bool:
        return isinstance(getval(x), np.ndarray | np.generic)

    def asarray(self, x: Any, device_of: Any = None) -> Any:
        return x if isbox(x) else np.asarray(x)

    def to_numpy(self, x: Any) -> Any:
        return np.asarray(getval(x))

    def stop_gradient(self, x: Any) -> Any:
        return getval(x)

    # --- derivatives

    def vjp(self, fun: Any, leaves: list[Any], *, groups: Any, once: bool) -> Evaluation:
        counts: list[int] = []

        def whole(xs: Any) -> Any:
            outs, extras = fun(*_listed(xs))
            counts[:] = [len(outs)]
            return builtins.tuple([*map(self.asarray, outs), *map(self.asarray, extras)])

        pull, result = make_vjp(whole, tuple(map(self.asarray, leaves)))
        values = _listed(result)
        outs, extras = values[: counts[0]], values[counts[0] :]

        def pullback(cts: Any) -> list[Any]:
            filled = self.filled([*cts, *[None] * len(extras)], values)
            found = pull(builtins.tuple(list(map(anp.conj, filled))))
            return list(map(anp.conj, _listed(found)))

        return Evaluation(outs, extras, pullback, checked=False)

    def with_pullback(self, fun: Any, pullback: Any, xs: Any) -> list[Any]:
        @primitive
        def called(*xs: Any) -> Any:
            ys = fun(*xs)
            if any(map(isbox, ys)):
                raise GradtoolsError(
                    "f closes over an array that is being differentiated; make it an argument of f."
                )
            return tuple(map(np.asarray, ys))

        def vjps(argnums: Any, ys: Any, args: Any, kwargs: Any) -> Any:
            def pulled(cts: Any) -> list[Any]:
                found = pullback(args, _listed(ys), list(map(anp.conj, _listed(cts))))
                return [anp.conj(self.filled(found, args)[i]) for i in argnums]

            return pulled

        defvjp_argnums(called, vjps)
        return _listed(called(*xs))


def _listed(xs: Any) -> list[Any]:
    """Convert a sequence to a list by indexing; autograd cannot iterate over traced sequences."""
    return [xs[i] for i in range(len(xs))]


_api = Api(HipsBackend())


def __getattr__(name: str) -> Any:
    return getattr(_api, name)
