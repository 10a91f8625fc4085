"""Loops over a batch that are compiled once for all calls that do the same.

JAX compiles an eager loop for its body, a function or a jaxpr, and knows it again only if it is
the same object. A body like the pullback of one evaluation is new in each call: each would be
compiled anew, and kept. So outside of any trace the body is written as a jaxpr of which what it
closes over is an argument, and the last loops are kept with their jaxprs. One that is equal,
equation by equation, serves again.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Literal

from gradtools.backend import Array
from gradtools.jax import shardings
from gradtools.jax.tracing import open_jaxpr, within_a_trace

KEPT = 64
_lock = threading.Lock()
_loops: list[tuple[Any, Callable[..., Any]]] = []  # the latest use last


def map_batch(f: Callable[..., Any], batch: Sequence[Array], size: int | None) -> Any:
    """`jax.lax.map` of f over the rows of some arrays, `size` of them at once (None: one)."""
    if any(shardings.entries(x)[0] is not None for x in batch):
        return _map_sharded(f, batch, size or 1)
    if within_a_trace():
        return jax.lax.map(lambda xs: f(*xs), tuple(batch), batch_size=size)
    row = [shardings.without_axis(jax.typeof(x), 0) for x in batch]
    closed, shapes = jax.make_jaxpr(f, return_shape=True)(*row)
    flat = _loop(closed, size)(list(closed.consts), tuple(batch))
    return jax.tree.unflatten(jax.tree.structure(shapes), flat)


def _map_sharded(f: Callable[..., Any], batch: Sequence[Array], size: int) -> Any:
    """The same where rows are sharded over a mesh of Explicit axes.

    A chunk holds the rows i::n, so that every device works on each; rows that are left over, and
    chunks that do not divide by the devices, every device computes.
    """
    name = next(e for e in (shardings.entries(x)[0] for x in batch) if e is not None)
    count, least = divmod(batch[0].shape[0], size)
    rows = [shardings.whole(x, 0) for x in batch]
    parts = []
    if count:
        tables = [_in_two(x, size, count, name) for x in batch]
        found = jax.lax.map(lambda xs: jax.vmap(f)(*xs), [jnp.moveaxis(x, 1, 0) for x in tables])
        parts.append(jax.tree.map(lambda y: _in_one(jnp.moveaxis(y, 0, 1), name), found))
    if least:
        parts.append(jax.vmap(f)(*[x[size * count :] for x in rows]))

    def joined(*ys: Array) -> Array:
        ys = ys if len(ys) == 1 else tuple([shardings.whole(y, 0) for y in ys])
        return shardings.placed(ys[0] if len(ys) == 1 else jnp.concatenate(ys), 0, name)

    return jax.tree.map(joined, *parts)


def _in_two(x: Array, size: int, count: int, name: Any) -> Array:
    """The first rows as a table with a chunk in each column."""
    if x.shape[0] != size * count:
        x = shardings.whole(x, 0)[: size * count]
    return shardings.reshaped(x, (size, count, *x.shape[1:]), 0, 2, (0, name))


def _in_one(x: Array, name: Any) -> Array:
    return shardings.reshaped(x, (x.shape[0] * x.shape[1], *x.shape[2:]), 0, 1, (0, name))


def _loop(closed: Any, size: int | None) -> Callable[..., Any]:
    """The compiled loop over an equal body that there is, or a new one."""
    key = (size, _written(closed))
    with _lock:
        found = next((loop for loop in _loops if loop[0] == key), None)
        if found is not None:
            _loops.remove(found)
        loop = found or (key, _compiled(open_jaxpr(closed), size))
        _loops.append(loop)
        del _loops[:-KEPT]
    return loop[1]


def _compiled(jaxpr: Any, size: int | None) -> Callable[..., Any]:
    def run(consts: list[Array], batch: tuple[Array, ...]) -> list[Array]:
        body = lambda xs: jax.core.eval_jaxpr(jaxpr, consts, *xs)
        return jax.lax.map(body, batch, batch_size=size)

    return jax.jit(run)


# --- a jaxpr as something that can be compared -------------------------------------------


def _written(jaxpr: Any) -> tuple[Any, ...]:
    """All that a jaxpr computes: equal for two that do the same, name for name."""
    jaxpr = open_jaxpr(jaxpr)
    numbers: dict[Any, int] = {}

    def named(v: Any) -> Any:
        if isinstance(v, Literal):
            return (v.aval, _value(v.val))
        return (numbers.setdefault(v, len(numbers)), v.aval)

    heads = tuple([tuple(map(named, vs)) for vs in (jaxpr.constvars, jaxpr.invars)])
    eqns = [
        (
            *(eqn.primitive, tuple(map(named, eqn.invars)), tuple(map(named, eqn.outvars))),
            *(_value(eqn.params), eqn.ctx, frozenset(eqn.effects)),
        )
        for eqn in jaxpr.eqns
    ]
    return (*heads, tuple(eqns), tuple(map(named, jaxpr.outvars)))


def _value(x: Any) -> Any:
    """A parameter: numbers by their bits, containers by their entries, other things as they are.

    An array is the same object or another one; the loop that is kept keeps it, and its identity.
    """
    if isinstance(x, dict):
        return tuple([(name, _value(item)) for name, item in x.items()])
    if isinstance(x, list | tuple):
        return (type(x), tuple(map(_value, x)))
    if isinstance(x, np.ndarray | np.generic | float | complex):
        array = np.asarray(x)
        return (type(x), array.shape, array.dtype, array.tobytes())
    if hasattr(open_jaxpr(x), "eqns"):
        return (_written(x), tuple(map(id, getattr(x, "consts", ()))))
    return (type(x), id(x) if isinstance(x, jax.Array) else x)
