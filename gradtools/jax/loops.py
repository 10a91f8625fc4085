"""`jax.lax.map` over a batch, with one compilation for equal bodies.

A body such as a pullback is a new function at each call, for which JAX would compile a new loop.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp

from gradtools.backend import Array
from gradtools.jax import shardings
from gradtools.jax.compiled_once import compiled


def map_batch(f: Callable[..., Any], batch: Sequence[Array], size: int | None) -> Any:
    """`jax.lax.map` of f over the rows of some arrays, `size` of them at once (None: one)."""
    if any(shardings.entries(x)[0] is not None for x in batch):
        return _map_sharded(f, batch, size or 1)
    row = [shardings.without_axis(jax.typeof(x), 0) for x in batch]
    closed, shapes = jax.make_jaxpr(f, return_shape=True)(*row)
    flat = compiled(f, closed, _mapped(size))(list(closed.consts), tuple(batch))
    return jax.tree.unflatten(jax.tree.structure(shapes), flat)


def _map_sharded(f: Callable[..., Any], batch: Sequence[Array], size: int) -> Any:
    """`map_batch` where rows are sharded over a mesh of Explicit axes.

    A chunk is the rows i::n, so that all devices work on each chunk. The remaining rows, and chunks
    that do not divide by the number of devices, are computed on every device.
    """
    name = next(e for e in (shardings.entries(x)[0] for x in batch) if e is not None)
    count, least = divmod(batch[0].shape[0], size)
    rows = [shardings.whole(x, 0) for x in batch]
    parts = []
    if count:
        tables = [_in_two(x, size, count, name) for x in batch]
        result = jax.lax.map(lambda xs: jax.vmap(f)(*xs), [jnp.moveaxis(x, 1, 0) for x in tables])
        parts.append(jax.tree.map(lambda y: _in_one(jnp.moveaxis(y, 0, 1), name), result))
    if least:
        parts.append(jax.vmap(f)(*[x[size * count :] for x in rows]))

    def joined(*ys: Array) -> Array:
        ys = ys if len(ys) == 1 else tuple([shardings.whole(y, 0) for y in ys])
        return shardings.placed(ys[0] if len(ys) == 1 else jnp.concatenate(ys), 0, name)

    return jax.tree.map(joined, *parts)


def _in_two(x: Array, size: int, count: int, name: Any) -> Array:
    """The first `size * count` rows as a table with one chunk in each column."""
    if x.shape[0] != size * count:
        x = shardings.whole(x, 0)[: size * count]
    return shardings.reshaped(x, (size, count, *x.shape[1:]), 0, 2, (0, name))


def _in_one(x: Array, name: Any) -> Array:
    return shardings.reshaped(x, (x.shape[0] * x.shape[1], *x.shape[2:]), 0, 1, (0, name))


@cache
def _mapped(size: int | None) -> Callable[..., Any]:
    """A transform (for `compiled`) of a program to a jitted loop over the rows of its arguments."""

    def derive(run: Callable[..., Any]) -> Callable[..., Any]:
        def over(consts: list[Array], batch: tuple[Array, ...]) -> list[Array]:
            return jax.lax.map(lambda xs: run(consts, xs), batch, batch_size=size)

        return jax.jit(over)

    return derive
