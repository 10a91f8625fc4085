"""Tests that eager operators reuse compiled programs, and that values that f reads may change."""

from __future__ import annotations

import gc
import types
import weakref
from contextlib import contextmanager

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.ode import odeint

import gradtools.jax as gt

X = jnp.arange(12.0).reshape(6, 2) / 10
COMPILED = [0]
jax.monitoring.register_event_duration_secs_listener(
    lambda event, *_, **__: COMPILED.__setitem__(0, COMPILED[0] + ("backend_compile" in event))
)


@contextmanager
def nothing_compiled():
    before = COMPILED[0]
    yield
    assert COMPILED[0] == before


BODIES = {
    "plain": jnp.sin,
    "relu": jax.nn.relu,
    "an edit": lambda x: gt.reverse_gradient(jnp.sin(x)),
    "a scan": lambda x: jax.lax.scan(lambda c, _: (jnp.sin(c), None), x, None, 3)[0],
    "a derivative": lambda x: gt.grad(lambda x: jnp.sin(x).sum())(x),
}
OPERATORS = {"chunked": lambda body: gt.chunked(body, 2), "checkpoint": gt.checkpoint}


@pytest.mark.sampled(5, 10)
@pytest.mark.parametrize("operator", OPERATORS)
@pytest.mark.parametrize("name", BODIES)
def test_a_function_that_was_seen_compiles_nothing(name, operator):
    f = OPERATORS[operator](BODIES[name])
    loss = lambda x: (f(x) ** 2).sum()
    for take in (gt.grad(loss), jax.grad(loss)):
        first = take(X)
        take(X)
        with nothing_compiled():
            np.testing.assert_array_equal(take(X), first)


config = types.ModuleType("config_of_the_test")
config.scale = 1.0
held = {"scale": 1.0, "list": [1.0]}
SCALE = 1.0


def _set_global(value):
    global SCALE
    SCALE = value


class Model:
    scale = 1.0

    def __call__(self, x):
        return x * self.scale


model = Model()


def _cell():
    scale = 1.0

    def put(value):
        nonlocal scale
        scale = value

    return (lambda x: x * scale), put


CELL, put_cell = _cell()
array = np.ones(())
READS = {
    "a global": (lambda x: x * SCALE, _set_global),
    "a module's attribute": (lambda x: x * config.scale, lambda v: setattr(config, "scale", v)),
    "a dict": (lambda x: x * held["scale"], lambda v: held.update(scale=v)),
    "a list": (lambda x: x * held["list"][0], lambda v: held["list"].__setitem__(0, v)),
    "a cell": (CELL, put_cell),
    "an object": (model, lambda v: setattr(model, "scale", v)),
    "a class": (lambda x: x * Model.scale, lambda v: setattr(Model, "scale", v)),
    "an array of NumPy": (lambda x: x * array, lambda v: array.__setitem__((), v)),
    "an array": (lambda x: x * held["array"], lambda v: held.update(array=jnp.asarray(v))),
}


@pytest.mark.sampled(9, 18)
@pytest.mark.parametrize("operator", OPERATORS)
@pytest.mark.parametrize("name", READS)
def test_what_a_function_reads_may_change(name, operator):
    body, put = READS[name]
    f = OPERATORS[operator](body)
    for value in (1.0, 3.0, 3.0, -2.0):
        put(value)
        np.testing.assert_allclose(f(X), body(X), rtol=1e-6)
        want = jax.grad(lambda x: body(x).sum())(X)
        np.testing.assert_allclose(gt.grad(lambda x: f(x).sum())(X), want, rtol=1e-5, atol=1e-6)
    put(1.0)


slope = [1.0]
sloped = gt.custom_rule(lambda x: x * 1.0)
sloped.defvjp(lambda x: (x, None), lambda _, c: (slope[0] * c,))


@jax.custom_vjp
def sloped_too(x):
    return x * 1.0


sloped_too.defvjp(lambda x: (x, None), lambda _, c: (slope[0] * c,))


by_module = jax.custom_vjp(lambda x: x * 1.0)
by_module.defvjp(lambda x: (x, None), lambda _, c: (config.factor * c,))

of_jax = jax.custom_jvp(jnp.abs)  # jnp.abs as a function with a custom_jvp rule
of_jax.defjvps(lambda dx, y, x: slope[0] * dx)
RULES = {
    "custom_rule": sloped,
    "custom_vjp": sloped_too,
    "reads a module": by_module,
    "of a function of JAX": of_jax,
}


@pytest.mark.parametrize("operator", ["chunked", "checkpoint"])
@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
def test_what_a_rule_reads_may_change(rule, operator):
    f = OPERATORS[operator](rule)
    for value in (1.0, 3.0, 5.0, 3.0):
        slope[0] = config.factor = value
        assert jax.grad(lambda x: f(x).sum())(X)[0, 0] == value


def test_a_batched_rule_of_jax_may_capture_arrays():
    times = jnp.array([0.0, 0.5])  # odeint captures the coefficients of its method
    solve = jax.vmap(lambda y: odeint(lambda y, t: -y, y, times)[-1])
    gradient = jax.grad(lambda x: gt.checkpoint(solve)(x).sum())(X[:3])
    np.testing.assert_allclose(gradient, np.full((3, 2), np.exp(-0.5)), rtol=1e-5)


def test_arrays_that_a_function_or_its_rule_closes_over_are_not_kept():
    w = jnp.full(2, 2.0)
    gone = weakref.ref(w)

    def run(w):
        rule = gt.custom_rule(lambda x: x * 1.0)
        rule.defvjp(lambda x: (x, None), lambda _, c: (c * w,))
        for _ in range(3):
            jax.grad(lambda x: gt.chunked(lambda x: x * w, 2)(x).sum())(X)
            jax.grad(lambda x: gt.chunked(rule, 2)(x).sum())(X)

    run(w)
    del w
    gc.collect()
    assert gone() is None


def test_numbers_are_told_apart_by_their_bits():
    for number in (0.0, -0.0, 0.0):
        f = gt.chunked(lambda x, n=number: jnp.arctan2(x * 0 + n, x - 2.0), 2)
        np.testing.assert_array_equal(f(X), jnp.arctan2(X * 0 + number, X - 2.0))
    for power in (2, 2.0, 3, 2):
        f = gt.chunked(lambda x, p=power: x**p, 2)
        np.testing.assert_allclose(f(X), X**power, rtol=1e-6)


VALUES = {
    "a branch": lambda x: 2.0 if x.sum() > 0 else 3.0,
    "a mask": lambda x: x[x > 0].sum(),
    "an index": lambda x: [1.0, 2.0, 3.0][x.astype(int)[0]],
    "np.asarray": lambda x: float(np.asarray(x).max()),
    "to_numpy": lambda x: float(gt.to_numpy(x).max()),
}


@pytest.mark.parametrize("read", VALUES)
def test_a_single_chunk_and_a_rule_may_read_a_value_in_any_way(read):
    x, w = jnp.array([1.0, -2.0, 3.0]), jnp.array(2.0)
    f = lambda w, x: w**2 * VALUES[read](x)
    expected = jax.grad(f)(w, x)
    assert gt.microbatched_value_and_grad(f, 5)(w, x)[1] == expected
    rows = gt.chunked(lambda x: f(w, x) * jnp.ones(len(x)), 5)
    assert jnp.array_equal(rows(x), f(w, x) * jnp.ones(3))
    rule = gt.custom_rule(f)
    rule.defvjp(lambda w, x: (f(w, x), (w, x)), lambda r, ct: (jax.grad(f)(*r) * ct, None))
    assert gt.grad(rule)(w, x) == expected
