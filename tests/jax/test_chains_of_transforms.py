"""Chains of transforms, gradtools' and JAX's own, around each operator, drawn with a fixed seed.

The expected values are those of JAX's transforms alone, without the operator, which changes no
derivative. A training step's gradient of a loss is taken through each chain.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from itertools import product
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import gradtools.jax as gt

pytestmark = [pytest.mark.jax, pytest.mark.slow]

Function = Callable[[jax.Array], jax.Array]
V, W = np.array([1.0, -2.0, 0.5]), np.array([0.2, 1.0, -0.4])
EXAMPLES = np.array([[1.0, 2.0, 0.5], [0.3, -1.0, 0.7]])


def total(f: Function) -> Function:
    return lambda x: jnp.sum(jnp.sin(f(x)) * W)


def rows(x: jax.Array) -> jax.Array:
    return jnp.stack([x, 2 * jnp.sin(x), 0.5 * x])


def examples(f: Function) -> Callable[[jax.Array, jax.Array], jax.Array]:
    return lambda x, batch: jax.vmap(lambda row: f(x * row))(batch)


class Transform(NamedTuple):
    """A map of functions from 3 numbers to 3: with gradtools, and with JAX alone."""

    ours: Callable[[Function], Function]
    plain: Callable[[Function], Function]


def _same(transform: Callable[[Function], Function]) -> Transform:
    return Transform(transform, transform)


def _pushed(f: Function) -> Function:
    return lambda x: jax.jvp(f, (x,), (V,))[1]


def _mixed(f: Function) -> Function:
    def partial(y: jax.Array, z: jax.Array) -> jax.Array:
        return jax.grad(lambda z: jnp.sum(jnp.sin(y * f(z))))(z) @ V

    return lambda x: jax.grad(partial)(x, x / 2)


def _outer(y: jax.Array, g: jax.Array) -> jax.Array:
    return jnp.sum(jnp.sin(y * g))


TRANSFORMS = {
    "grad": Transform(lambda f: gt.grad(total(f)), lambda f: jax.grad(total(f))),
    "jvp": Transform(lambda f: lambda x: gt.jvp(f, (x,), (V,))[1], _pushed),
    "vjp": Transform(
        lambda f: lambda x: gt.vjp(f, x)[1](W)[0], lambda f: lambda x: jax.vjp(f, x)[1](W)[0]
    ),
    "linearize": Transform(lambda f: lambda x: gt.linearize(f, x)[1](V), _pushed),
    "vmap": Transform(
        lambda f: lambda x: gt.vmap(f)(rows(x)).sum(0),
        lambda f: lambda x: jax.vmap(f)(rows(x)).sum(0),
    ),
    "hvp": Transform(
        lambda f: lambda x: gt.hvp(total(f), (x,), (V,))[1][0],
        lambda f: _pushed(jax.grad(total(f))),
    ),
    "jacobian": Transform(lambda f: lambda x: gt.jacobian(f)(x) @ V, _pushed),
    "forward Jacobian": Transform(
        lambda f: lambda x: gt.jacobian(f, mode="forward")(x) @ V, _pushed
    ),
    "reverse Jacobian": Transform(
        lambda f: lambda x: gt.jacobian(f, mode="reverse")(x) @ V, _pushed
    ),
    "hessian": Transform(
        lambda f: lambda x: gt.hessian(total(f))(x) @ V, lambda f: _pushed(jax.grad(total(f)))
    ),
    "mixed_partial": Transform(
        lambda f: lambda x: gt.mixed_partial(_outer, f, x, x / 2, V), _mixed
    ),
    "per_example_grad": Transform(
        lambda f: (
            lambda x: gt.per_example_grad(lambda w, row: total(f)(w * row))(x, EXAMPLES).sum(0)
        ),
        lambda f: jax.grad(lambda x: jnp.sum(jax.vmap(lambda row: total(f)(x * row))(EXAMPLES))),
    ),
    "chunked": Transform(
        lambda f: lambda x: gt.chunked(examples(f), 1, in_axes=(None, 0))(x, EXAMPLES).sum(0),
        lambda f: lambda x: examples(f)(x, EXAMPLES).sum(0),
    ),
    "microbatched": Transform(
        lambda f: (
            lambda x: gt.microbatched_value_and_grad(
                lambda w, rows: examples(total(f))(w, rows).mean(), 1
            )(x, EXAMPLES)[1]
        ),
        lambda f: jax.grad(lambda x: examples(total(f))(x, EXAMPLES).mean()),
    ),
    "compile": Transform(gt.compile, lambda f: f),
    "scan": _same(
        lambda f: lambda x: jax.lax.scan(lambda c, _: (0.5 * f(c), None), x, None, length=2)[0]
    ),
    "JAX's grad": _same(lambda f: jax.grad(total(f))),
    "JAX's vmap": _same(lambda f: lambda x: jax.vmap(f)(rows(x)).sum(0)),
    "JAX's jvp": _same(_pushed),
    "JAX's linearize": _same(lambda f: lambda x: jax.linearize(f, x)[1](V)),
    "JAX's checkpoint": Transform(jax.checkpoint, lambda f: f),
}


def by_rule(f: Function) -> Function:
    rule = gt.custom_rule(lambda x: f(x))
    rule.defvjp(lambda x: (f(x), x), lambda x, c: (gt.vjp(f, x)[1](c)[0],))
    return rule


def by_forward_rule(f: Function) -> Function:
    rule = gt.custom_rule(lambda x: f(x))
    rule.defjvp(lambda xs, dxs: (f(*xs), gt.jvp(f, xs, dxs)[1]))
    return rule


OPERATORS: dict[str, Callable[[Function], Function]] = {
    "checkpoint": gt.checkpoint,
    "frozen": gt.frozen,
    "rule": by_rule,
    "forward rule": by_forward_rule,
    "reversed twice": lambda f: lambda x: gt.reverse_gradient(gt.reverse_gradient(f(x))),
    "straight_through": lambda f: gt.straight_through(f, f),
}


def cubic(x: jax.Array) -> jax.Array:
    return jnp.sin(x) * x**2 + jnp.roll(x, 1)


def outcome(f: Function) -> list[jax.Array]:
    """The value, and the gradient of a loss of it."""

    def loss(x: jax.Array) -> tuple[jax.Array, jax.Array]:
        y = f(x)
        return jnp.sum(jnp.sin(y) * W + 0.01 * y * y), y

    (_, y), gradient = jax.jit(jax.value_and_grad(loss, has_aux=True))(
        jnp.asarray([0.3, -0.7, 1.1])
    )
    return [y, gradient]


def is_as_by_jax(chain: tuple[str, ...], operator: str) -> bool:
    ours, plain = OPERATORS[operator](cubic), cubic
    for name in reversed(chain):
        ours, plain = TRANSFORMS[name].ours(ours), TRANSFORMS[name].plain(plain)
    pairs = zip(outcome(ours), outcome(plain), strict=True)
    return all(np.allclose(a, b, rtol=1e-6, atol=1e-8, equal_nan=True) for a, b in pairs)


@pytest.mark.parametrize("operator", OPERATORS)
@pytest.mark.parametrize("length", [2, 3])
def test_chains_are_as_by_jax_alone(operator, length):
    chains = list(product(TRANSFORMS, repeat=length))
    drawn = random.Random(operator).sample(chains, 12 // length)
    assert [chain for chain in drawn if not is_as_by_jax(chain, operator)] == []
