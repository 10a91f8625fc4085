"""Pytree classes whose `__init__` inspects its arrays are only constructed from arrays."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import gradtools.jax as gt

X, B = jnp.arange(1.0, 4.0), jnp.ones((4, 3))


def of_three(a):
    if a.shape[-1] != 3:
        raise ValueError(f"expected a field of 3 entries, got shape {a.shape}")
    return a


def an_array(a):
    if not isinstance(a, jax.Array | np.ndarray):
        raise TypeError(f"expected an array, got {type(a)}")
    return a


def floating(a):
    if not jnp.issubdtype(a.dtype, jnp.floating):
        raise TypeError(f"expected a floating-point array, got {a.dtype}")
    return a


INITS = {
    "casts": lambda a: a.astype(jnp.float32),
    "inspects the shape": of_three,
    "inspects the type": an_array,
    "inspects the dtype": floating,
    "computes": lambda a: a + 0 * jnp.sum(a),
}


def class_of(init):
    @jax.tree_util.register_pytree_node_class
    class Field:
        def __init__(self, a):
            self.a = init(a)

        def tree_flatten(self):
            return (self.a,), None

        @classmethod
        def tree_unflatten(cls, aux, children):
            return cls(*children)

    return Field


def gradient(of):
    """Return a function of a class F that computes the gradient of sum(of(F, c).a) at c = F(x)."""
    return lambda F, x=X: gt.grad(lambda c: of(F, c).a.sum())(F(x)).a


SQUARE = lambda F: lambda c: F(c.a**2)
CUBE = lambda F: lambda c: F(c.a**3)
PRODUCT = lambda c, x: (x.a * c.a).sum()


def squaring(F):
    rule = gt.custom_rule(SQUARE(F))
    rule.defvjp(lambda c: (F(c.a**2), c), lambda c, ct: (F(2 * c.a * ct.a),))
    return rule


OPERATORS = {
    "custom_rule": (gradient(lambda F, c: squaring(F)(c)), 2 * X),
    "jit of custom_rule": (lambda F: jax.jit(lambda c: squaring(F)(c).a)(F(X)), X**2),
    "jvp of custom_rule": (lambda F: gt.jvp(squaring(F), (F(X),), (F(X),))[1].a, 2 * X * X),
    "grad": (gradient(lambda F, c: SQUARE(F)(c)), 2 * X),
    "jit of grad": (lambda F: jax.jit(gt.grad(lambda c: (c.a**2).sum()))(F(X)).a, 2 * X),
    "vjp": (lambda F: gt.vjp(SQUARE(F), F(X))[1](F(X))[0].a, 2 * X * X),
    "jit of vjp": (
        lambda F: jax.jit(lambda c: gt.vjp(SQUARE(F), c)[1](c))(F(X))[0].a,
        2 * X * X,
    ),
    "jvp": (lambda F: gt.jvp(SQUARE(F), (F(X),), (F(X),))[1].a, 2 * X * X),
    "linearize": (lambda F: gt.linearize(SQUARE(F), F(X))[1](F(X)).a, 2 * X * X),
    "hvp": (lambda F: gt.hvp(lambda c: (c.a**3).sum(), (F(X),), (F(X),))[1][0].a, 6 * X * X),
    "minimax": (
        lambda F: (
            gt.minimax_value_and_grad(lambda c, d: (c.a * d.a).sum(), 0, 1)(F(X), F(X))[1][1].a
        ),
        -X,
    ),
    "reverse": (gradient(lambda F, c: gt.reverse_gradient(SQUARE(F)(c))), -2 * X),
    "transform": (gradient(lambda F, c: gt.transform_gradient(SQUARE(F)(c), lambda t: t)), 2 * X),
    "replace": (gradient(lambda F, c: gt.replace_gradient(SQUARE(F)(c), F(X))), 2 * X * X),
    "straight_through": (gradient(lambda F, c: gt.straight_through(CUBE(F))(c)), jnp.ones(3)),
    "checkpoint": (gradient(lambda F, c: gt.checkpoint(SQUARE(F))(c)), 2 * X),
    "frozen": (gradient(lambda F, c: gt.frozen(SQUARE(F))(c)), 2 * X),
    "hvp of frozen": (
        lambda F: gt.hvp(lambda c: gt.frozen(CUBE(F))(c).a.sum(), (F(X),), (F(X),))[1][0].a,
        6 * X * X,
    ),
    "chunked": (lambda F: gradient(lambda F, c: gt.chunked(SQUARE(F), 2)(c))(F, B), 2 * B),
    "microbatched": (
        lambda F: (
            gt.microbatched_value_and_grad(lambda c, x: PRODUCT(c, x) / len(x.a), 2)(F(X), F(B))[
                1
            ].a
        ),
        jnp.ones(3),
    ),
    "per_example": (lambda F: gt.per_example_grad(PRODUCT)(F(X), F(B)).a, B),
    "per_example, in chunks": (
        lambda F: gt.per_example_grad(PRODUCT, chunk_size=2)(F(X), F(B)).a,
        B,
    ),
    "mixed_partial": (
        lambda F: (
            gt.mixed_partial(lambda y, g: (y.a * g.a**2).sum(), SQUARE(F), F(X), F(X), F(X)).a
        ),
        4 * X**4,
    ),
}


@pytest.mark.parametrize("init", INITS.values(), ids=INITS)
@pytest.mark.parametrize("operator", OPERATORS)
def test_a_class_is_made_of_arrays_only(operator, init):
    run, expected = OPERATORS[operator]
    np.testing.assert_allclose(run(class_of(init)), expected, rtol=1e-6)


# the __init__ of "computes" calls jax.numpy
@pytest.mark.parametrize("name", [name for name in INITS if name != "computes"])
def test_a_kernel_gets_the_class_made_of_numpy_arrays(name):
    F = class_of(INITS[name])
    kernel = gt.host_function(lambda c: np.asarray(c.a) * 2, out=gt.ArraySpec((3,), "float32"))
    for run in (kernel, jax.jit(kernel)):
        np.testing.assert_allclose(run(F(X.astype("float32"))), 2 * X)
