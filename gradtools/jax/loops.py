"""`jax.lax.map` over a batch, with one compilation for equal bodies.

A body such as a pullback is a new function at each call, for which JAX would compile a new loop.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from gradtools.backend import Array
from gradtools.jax import shardings
from gradtools.jax.compiled_once import run_compiled
from gradtools.jax.slicing import merged, parted


def map_batch(f: Callable[..., Any], batch: Sequence[Array], size: int | None) -> Any:
    """`jax.lax.map` of f over the rows of some arrays, `size` of them at once (None: one)."""
    if any(shardings.entries(x)[0] is not None for x in batch):
        return _map_sharded(f, batch, size or 1)
    mapped = lambda batch: jax.lax.map(lambda xs: f(*xs), batch, batch_size=size)
    return run_compiled(f, mapped, list(batch))


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
        even = batch if not least else [x[: size * count] for x in rows]
        tables = [parted(x, 0, size, count, (0, name)) for x in even]
        result = jax.lax.map(lambda xs: jax.vmap(f)(*xs), [jnp.moveaxis(x, 1, 0) for x in tables])
        parts.append(jax.tree.map(lambda y: merged(jnp.moveaxis(y, 0, 1), 0), result))
    if least:
        parts.append(jax.vmap(f)(*[x[size * count :] for x in rows]))

    def joined(*ys: Array) -> Array:
        ys = ys if len(ys) == 1 else tuple([shardings.whole(y, 0) for y in ys])
        return shardings.placed(ys[0] if len(ys) == 1 else jnp.concatenate(ys), 0, name)

    return jax.tree.map(joined, *parts)
