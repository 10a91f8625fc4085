"""`jax.export` with a symbolic batch: exported where all chunks are equal, else refused."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export

import gradtools.jax as gt


def exported(f, *shapes: str):
    scope = export.SymbolicScope()
    symbolic = [export.symbolic_shape(s, scope=scope) for s in shapes]
    return export.export(jax.jit(f))(*[jax.ShapeDtypeStruct(s, float) for s in symbolic])


def numbers(shapes, n: int):
    rng = np.random.default_rng(n)
    sizes = [[n if "b" in part else int(part) for part in s.split(",")] for s in shapes]
    return [jnp.asarray(rng.normal(size=size)) for size in sizes]


def step(x, carry):
    return jnp.sin(x) + carry, carry + x.sum()


def noisy(x, key):
    return x * jax.random.normal(key, x.shape)


def squares(w, x):
    return ((x @ w) ** 2).mean()


ROWS, SEQUENCE = "2*b,3", "2,2*b,2,3"
PROGRAMS = {
    "chunked": (lambda x: gt.chunked(jnp.sin, 2)(x), ROWS),
    "chunks of one": (lambda x: gt.chunked(jnp.sin, 1)(x), "b,3"),
    "another axis": (lambda x: gt.chunked(jnp.sin, 2, in_axes=1, out_axes=1)(x), "3,2*b"),
    "gradient": (gt.grad(lambda x: (gt.chunked(jnp.sin, 2)(x) ** 2).sum()), ROWS),
    "carry": (lambda x: gt.chunked(step, 2, carry_argnums=1)(x, jnp.zeros(())), ROWS),
    "keys": (lambda x: gt.chunked(noisy, 2, key_argnums=1)(x, jax.random.key(0)), ROWS),
    "microbatched": (
        lambda w, x: gt.microbatched_value_and_grad(squares, 2)(w, x), "3", ROWS,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_symbolic_size_that_chunks_divide_is_exported(name):
    f, *shapes = PROGRAMS[name]
    program = exported(f, *shapes)
    for n in (2, 6):
        xs = numbers(shapes, n)
        result, expected = jax.tree.leaves(program.call(*xs)), jax.tree.leaves(f(*xs))
        for a, b in zip(result, expected, strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-12, atol=1e-12)
