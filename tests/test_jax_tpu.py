"""What TPU's own compiler makes of the operators, ahead of time: no TPU is needed.

`make tpu` installs the compiler and runs these. Programs are compiled for one v5e. Equal to the lines
by hand are XLA's floating point operations, and the bytes of temporaries, which are beyond
arguments and results. Small ones stand in the core's own memory and count as none.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import SingleDeviceSharding

import gradtools.jax as gt

pytestmark = [pytest.mark.tpu, pytest.mark.usefixtures("default_precision")]

DTYPES = (jnp.float32, jnp.bfloat16)


@pytest.fixture(scope="session")
def devices() -> Iterator[list[Any]]:
    """The devices of a v5e board of four, as the compiler knows them."""
    pytest.importorskip("libtpu", reason="needs TPU's compiler: make tpu")
    from jax.experimental import topologies

    kept = jax.config.jax_enable_compilation_cache
    jax.config.update("jax_enable_compilation_cache", False)  # which wants a device to load onto
    yield list(topologies.get_topology_desc("v5e:2x2", platform="tpu").devices)
    jax.config.update("jax_enable_compilation_cache", kept)


def compiled(f: Any, devices: list[Any], *shapes: Any) -> Any:
    """The program of f on one device. shapes: Pytrees of (shape, dtype) records."""
    here = SingleDeviceSharding(devices[0])
    placed = jax.tree.map(lambda s: jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=here), shapes)
    return jax.jit(f).lower(*placed).compile()


def cost(f: Any, devices: list[Any], *shapes: Any) -> tuple[float, float, int]:
    """Operations, transcendental ones, bytes of temporaries."""
    program = compiled(f, devices, *shapes)
    counts = program.cost_analysis()
    temporaries = program.memory_analysis().temp_size_in_bytes
    return counts.get("flops", 0.0), counts.get("transcendentals", 0.0), temporaries


def of(dtype: Any, *shapes: tuple[int, ...]) -> tuple[Any, ...]:
    return tuple(jax.ShapeDtypeStruct(shape, dtype) for shape in shapes)


# --- the operators beside the same lines by hand ----------------------------------------------


def layer(w, x):
    return jnp.tanh(w @ x)


def loss(w, x):
    return (layer(w, x) ** 2).sum()


def edited_by_hand(backward):
    @jax.custom_vjp
    def edit(x):
        return x

    edit.defvjp(lambda x: (x, None), lambda _, ct: (backward(ct),))
    return edit


def by_edit(edit):
    return jax.grad(lambda w, x: loss(w, edit(x)), 1)


@gt.custom_rule
def square(x):
    return x * x


square.defjvp(lambda p, t: (square(p[0]), 2 * p[0] * t[0]))


@jax.custom_jvp
def square_by_hand(x):
    return x * x


square_by_hand.defjvp(lambda p, t: (square_by_hand(p[0]), 2 * p[0] * t[0]))


@jax.custom_vjp
def rounded_by_hand(x):
    return jnp.round(x)


rounded_by_hand.defvjp(lambda x: (jnp.round(x), None), lambda _, ct: (ct,))


W, X, B = (128, 128), (128,), (16, 128)
BY_HAND = {
    "grad": (gt.grad(loss, 1), jax.grad(loss, 1), W, X),
    "value_and_grad": (gt.value_and_grad(loss), jax.value_and_grad(loss), W, X),
    "vjp": (
        lambda w, x: gt.vjp(partial(layer, w), x)[1](x),
        lambda w, x: jax.vjp(partial(layer, w), x)[1](x),
        W,
        X,
    ),
    "jvp": (
        lambda w, x, v: gt.jvp(partial(layer, w), (x,), (v,)),
        lambda w, x, v: jax.jvp(partial(layer, w), (x,), (v,)),
        W,
        X,
        X,
    ),
    "linearize": (
        lambda w, x, v: gt.linearize(partial(layer, w), x)[1](v),
        lambda w, x, v: jax.linearize(partial(layer, w), x)[1](v),
        W,
        X,
        X,
    ),
    "jacobian": (gt.jacobian(layer, 1, mode="reverse"), jax.jacrev(layer, 1), W, X),
    "hvp": (
        lambda w, x, v: gt.hvp(partial(loss, w), (x,), (v,)),
        lambda w, x, v: jax.jvp(jax.grad(partial(loss, w)), (x,), (v,)),
        W,
        X,
        X,
    ),
    "hessian": (gt.hessian(loss, 1), jax.jacfwd(jax.grad(loss, 1), 1), W, X),
    "per_example_grad": (
        gt.per_example_grad(loss),
        jax.vmap(jax.grad(loss), (None, 0)),
        W,
        B,
    ),
    "minimax_value_and_grad": (
        gt.minimax_value_and_grad(loss, 0, 1),
        lambda w, x: (lambda v, g: (v, (g[0], -g[1])))(*jax.value_and_grad(loss, (0, 1))(w, x)),
        W,
        X,
    ),
    "mixed_partial": (
        lambda w, y, z, u: gt.mixed_partial(
            lambda y, g: loss(w, y * g), lambda z: jnp.sin(z) * z, y, z, u
        ),
        lambda w, y, z, u: (
            lambda g, t: jax.jvp(lambda g: jax.grad(lambda y, g: loss(w, y * g))(y, g), (g,), (t,))[
                1
            ]
        )(*jax.jvp(lambda z: jnp.sin(z) * z, (z,), (u,))),
        W,
        X,
        X,
        X,
    ),
    "reverse_gradient": (
        by_edit(lambda x: gt.reverse_gradient(x, 0.5)),
        by_edit(edited_by_hand(lambda c: -0.5 * c)),
        W,
        X,
    ),
    "scale_gradient": (
        by_edit(lambda x: gt.scale_gradient(x, 3.0)),
        by_edit(edited_by_hand(lambda c: 3.0 * c)),
        W,
        X,
    ),
    "clip_gradient": (
        by_edit(lambda x: gt.clip_gradient(x, max_value=0.1)),
        by_edit(edited_by_hand(lambda c: jnp.minimum(jnp.maximum(c, -0.1), 0.1))),
        W,
        X,
    ),
    "transform_gradient": (
        by_edit(lambda x: gt.transform_gradient(x, lambda c: 2.0 * c)),
        by_edit(edited_by_hand(lambda c: 2.0 * c)),
        W,
        X,
    ),
    "known_gradient": (
        jax.grad(lambda w, x, v: loss(w, gt.known_gradient(x, v)), 1),
        lambda w, x, v: v,
        W,
        X,
        X,
    ),
    "stop_gradient": (
        jax.grad(lambda w, x: loss(w, x * gt.stop_gradient(x)), 1),
        jax.grad(lambda w, x: loss(w, x * jax.lax.stop_gradient(x)), 1),
        W,
        X,
    ),
    "straight_through": (
        jax.grad(lambda w, x: loss(w, gt.straight_through(jnp.round)(x)), 1),
        by_edit(rounded_by_hand),
        W,
        X,
    ),
    "custom_rule": (
        jax.grad(lambda w, x: loss(w, square(x)), 1),
        jax.grad(lambda w, x: loss(w, square_by_hand(x)), 1),
        W,
        X,
    ),
    "checkpoint": (
        jax.grad(lambda w, x: gt.checkpoint(loss)(w, x)),
        jax.grad(lambda w, x: jax.checkpoint(loss)(w, x)),
        W,
        X,
    ),
    "vmap": (gt.vmap(loss, (None, 0)), jax.vmap(loss, (None, 0)), W, B),
}


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: jnp.dtype(d).name)
@pytest.mark.parametrize("name", BY_HAND)
def test_an_operator_compiles_to_the_cost_of_the_lines_by_hand(name, dtype, devices):
    ours, by_hand, *shapes = BY_HAND[name]
    arguments = of(dtype, *shapes)
    assert cost(ours, devices, *arguments) == cost(by_hand, devices, *arguments)
