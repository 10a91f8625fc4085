"""Primitives whose parameters JAX's caches do not keep alive, and a memo on a rule.

JAX caches the output types of equations by their parameters (an LRU of 2048 entries). For our
primitives the cache would keep the rule alive, and with it everything that the user's functions
close over, long after the last use. JAX drops an entry as soon as a jaxpr among its parameters is
collected. So each equation has an empty jaxpr as the parameter `LIFE`, which only equations
reference.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar

import jax

from gradtools.jax._upstream import Primitive

T = TypeVar("T")
LIFE = "life"
MEMO_SIZE = 64
_EMPTY = jax.make_jaxpr(list)().jaxpr


class MortalPrimitive(Primitive):
    """A primitive whose cache entries die with its equations.

    Args:
        name: The primitive's name.
        owner: The parameter that must not be kept alive.

    Attributes:
        gradtools_flow: From an equation to the jaxpr of its data flow, or None; for `reachability`.
        gradtools_program: From an equation to the jaxpr that it evaluates, or None; for `checking`.
    """

    multiple_results = True
    gradtools_flow: Callable[[Any], Any] | None = None
    gradtools_program: Callable[[Any], Any] | None = None

    def __init__(self, name: str, owner: str) -> None:
        super().__init__(name)
        self.owner = owner

    def bind(self, *args: Any, **params: Any) -> Any:
        """Adds `LIFE` to the parameters, unless they come from an existing equation."""
        if LIFE not in params:
            params[LIFE] = ((_life_of(params[self.owner]),),)
        return super().bind(*args, **params)


def _life_of(owner: Any) -> Any:
    """The empty jaxpr that all living equations of this owner share, so that JAX's caches hit.

    The parameter is a tuple of tuples: JAX's caches find a jaxpr there, its transforms do not.
    """
    life = vars(owner).get("_life", lambda: None)()
    if life is None:
        life = _EMPTY.replace()
        vars(owner)["_life"] = weakref.ref(life)
    return life


def mortal(run: Callable[..., T]) -> Callable[..., T]:
    """Wraps a function of a primitive's parameters: drops `LIFE` from them."""

    @wraps(run)
    def without(*args: Any, **params: Any) -> T:
        params.pop(LIFE, None)
        return run(*args, **params)

    return without


def memoized(owner: Any, key: tuple[Any, ...], make: Callable[[], T]) -> T:
    """`make()`, memoized on the owner by key; the newest 64 entries are kept."""
    kept = vars(owner).setdefault("_memo", {})
    if key in kept:
        return kept[key]
    made = make()
    for old in list(kept)[: len(kept) - MEMO_SIZE + 1]:
        kept.pop(old, None)
    kept[key] = made
    return made
