"""Primitives whose equations JAX's caches forget once the rule that they hold is out of use.

JAX remembers what an equation of a primitive returns, by its parameters, for the last 2048 of
them. Of a `custom_vjp` it holds nothing there; of a primitive like ours it would hold the rule,
and with it what the user's functions close over, long after the last use. It forgets an equation
as soon as a jaxpr among its parameters dies. So ours have an empty one, `LIFE`, which the
equations hold and nobody else does.
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
MOST = 64
_EMPTY = jax.make_jaxpr(list)().jaxpr


class MortalPrimitive(Primitive):
    """A primitive that is forgotten with the equations that it stands in.

    Args:
        name: Its name.
        owner: Which of its parameters must not be kept alive.

    Attributes:
        gradtools_flow: Of an equation, the jaxpr of its data flow, or None; for `reachability`.
        gradtools_program: Of an equation, the jaxpr of what it computes; for `linearity`.
    """

    multiple_results = True
    gradtools_flow: Callable[[Any], Any]
    gradtools_program: Callable[[Any], Any]

    def __init__(self, name: str, owner: str) -> None:
        super().__init__(name)
        self.owner = owner

    def bind(self, *args: Any, **params: Any) -> Any:
        """As any primitive's; one that is bound again, from an equation, has its life already."""
        if LIFE not in params:
            params[LIFE] = ((_life_of(params[self.owner]),),)
        return super().bind(*args, **params)


def _life_of(owner: Any) -> Any:
    """The jaxpr of all equations of this owner that are alive now: so they have equal parameters.

    It stands in a tuple of tuples, where JAX's caches look for jaxprs and its transforms do not.
    """
    life = vars(owner).get("_life", lambda: None)()
    if life is None:
        life = _EMPTY.replace()
        vars(owner)["_life"] = weakref.ref(life)
    return life


def owned_by(owner: Any, name: str) -> dict[str, Any]:
    """The parameters of an equation that is given another owner, called `name`."""
    return {name: owner, LIFE: ((_life_of(owner),),)}


def mortal(run: Callable[..., T]) -> Callable[..., T]:
    """A function of a primitive's parameters, without the one that is there for its lifetime."""

    @wraps(run)
    def without(*args: Any, **params: Any) -> T:
        params.pop(LIFE, None)
        return run(*args, **params)

    return without


def remembered(owner: Any, key: tuple[Any, ...], make: Callable[[], T]) -> T:
    """`make()`, made once for each key while the owner lives; the last 64 of them."""
    result = recalled(owner, key)
    if result is not None:
        return result
    made = make()
    kept = vars(owner).setdefault("_remembered", {})
    for old in list(kept)[: len(kept) - MOST + 1]:
        kept.pop(old, None)
    kept[key] = made
    return made


def recalled(owner: Any, key: tuple[Any, ...]) -> Any:
    """What `remembered` made for this key; None if nothing, or no more."""
    return vars(owner).get("_remembered", {}).get(key)
