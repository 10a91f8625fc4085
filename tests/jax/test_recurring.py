"""Programs that come again, and what tells two programs apart."""

from __future__ import annotations

import gc
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import gradtools.jax as gt
from gradtools import DisconnectedInputError
from gradtools.jax import jaxpr_equality, kept_linearizations

X = np.linspace(0.5, 2.0, 6).reshape(2, 3)

# JAX 0.12.0.1 holds small arrays that f closes over in programs within; such a program is
# linearized each time, as all are in jax.grad.
CLOSES_OVER = 1 if jax.__version_info__ < (0, 11) else 0


@pytest.fixture(autouse=True)
def kept(monkeypatch):
    """Each test begins with nothing that was met; it sees what was linearized."""
    jaxpr_equality._derived.cache_clear()
    made, linearize = [], kept_linearizations.LinearizedProgram.of

    def of(*args):
        made.append(linearize(*args))
        return made[-1]

    monkeypatch.setattr(kept_linearizations.LinearizedProgram, "of", of)
    yield made
    jaxpr_equality._derived.cache_clear()


def agree(f, *args, times=3, **options):
    """Each time ours is JAX's own."""
    for _ in range(times):
        for x, y in zip(
            jax.tree.leaves(gt.value_and_grad(f, **options)(*args)),
            jax.tree.leaves(jax.value_and_grad(f, **options)(*args)),
            strict=True,
        ):
            assert x.dtype == y.dtype and x.weak_type == y.weak_type
            np.testing.assert_allclose(x, y, rtol=1e-6)


PROGRAMS = {
    "products": lambda x: (jnp.tanh(x @ x.T) ** 2).sum(),
    "a loop": lambda x: jax.lax.fori_loop(0, 3, lambda i, y: jnp.sin(y) + x, x).sum(),
    "a scan": lambda x: jax.lax.scan(lambda c, r: (c * r, c), x[0], x)[1].sum(),
    "a branch": lambda x: jax.lax.cond(x[0, 0] > 0, jnp.sin, jnp.cos, x).sum(),
    "jit within": lambda x: jax.jit(lambda x: jnp.exp(x) * 2)(x).mean(),
    "a checkpoint": lambda x: jax.checkpoint(lambda x: jnp.sin(jnp.sin(x)))(x).sum(),
    "indices": lambda x: x[jnp.array([0, 1, 1]), 1].prod(),
    "an input handed on": lambda x: x[0, 0],
    "integers": lambda x: (x * jnp.arange(3)).sum(),
    "a Python number": lambda x: jnp.sum(x) * 2.5,
}


@pytest.mark.slow_at("a loop", "a branch", "jit within", "a checkpoint")
@pytest.mark.sweep_at("products", "a scan", "indices")
@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_that_comes_again_has_jaxs_gradients(name, kept):
    agree(PROGRAMS[name], jnp.asarray(X, jnp.float32))
    assert len(kept) == (CLOSES_OVER if name == "indices" else 1)


WITH_CODE = {
    "a rule of JAX's": lambda x: jax.nn.relu(x).sum(),
    "random numbers": lambda x: (x * jax.random.normal(jax.random.key(0), x.shape)).sum(),
    "a callback": lambda x: (
        x * jax.pure_callback(np.sin, jax.typeof(x), jax.lax.stop_gradient(x))
    ).sum(),
}


@pytest.mark.slow_at("random numbers")
@pytest.mark.parametrize("name", WITH_CODE)
def test_a_program_that_holds_functions_has_them_and_is_not_kept(name, kept):
    agree(WITH_CODE[name], jnp.asarray(X, jnp.float32))
    assert not kept


def test_a_program_with_several_arguments_and_auxiliary_results(kept):
    f = lambda x, y: (jnp.sum(x["a"] * y), {"sum": y.sum(), "kept": 3})
    x, y = {"a": jnp.full(3, 2.0)}, jnp.arange(3.0)
    for _ in range(3):
        (value, aux), grads = gt.value_and_grad(f, (0, 1), has_aux=True)(x, y)
        assert float(value) == 6.0 and float(aux["sum"]) == 3.0 and aux["kept"] == 3
        assert grads[0]["a"].tolist() == y.tolist() and grads[1].tolist() == [2.0] * 3
    assert len(kept) == 1


def test_complex_numbers_keep_their_convention(kept):
    z = jnp.array([1 + 2j, -0.5j], jnp.complex64)
    for _ in range(3):
        np.testing.assert_allclose(gt.grad(lambda z: (jnp.abs(z) ** 2).sum())(z), 2 * z, rtol=1e-6)
    assert len(kept) == 1


def test_what_a_function_closes_over_may_change(kept):
    held = {"w": jnp.ones(3), "n": 2}
    f = lambda x: (x * held["w"] * held["n"]).sum()
    x = jnp.ones(3)
    for w, n in [(1.0, 2), (3.0, 2), (5.0, 2), (5.0, 4), (5.0, 2)]:
        held.update(w=jnp.full(3, w), n=n)
        assert gt.grad(f)(x).tolist() == [w * n] * 3
    assert len(kept) == CLOSES_OVER


def test_a_function_runs_once_each_time():
    ran = []

    def f(x):
        ran.append(1)
        return (x * x).sum()

    for n in range(1, 5):
        gt.grad(f)(jnp.ones(2))
        assert len(ran) == n


def test_numbers_that_are_equal_and_not_the_same_are_told_apart():
    for number in (0.0, -0.0, 0.0, -0.0):
        f = lambda x, number=number: jnp.arctan2(x * 0 + number, x - 2.0).sum()
        agree(f, jnp.ones(2, jnp.float32), times=2)
    for power in (2, 2.0, 3, 2):
        agree(lambda x, power=power: (x**power).sum(), jnp.ones(2, jnp.float32) * 3, times=2)


def test_types_are_told_apart(kept):
    f = lambda x: (x * x).sum()
    for x in (jnp.ones(2), jnp.ones(3), jnp.ones(2, jnp.bfloat16), jnp.asarray(1.0)):
        agree(f, x, times=2)
    assert len(kept) == 4


def test_an_argument_that_is_not_reached_is_refused_each_time():
    for _ in range(4):
        with pytest.raises(DisconnectedInputError, match="argument 1"):
            gt.grad(lambda x, y: x.sum() + jax.lax.stop_gradient(y).sum(), (0, 1))(
                jnp.ones(2), jnp.ones(2)
            )


def test_a_rule_of_ours_goes_the_usual_way(kept):
    for _ in range(3):
        assert gt.grad(lambda x: gt.reverse_gradient(x).sum())(jnp.ones(2)).tolist() == [-1, -1]
    assert not kept


def test_what_is_differentiated_or_compiled_around_is_not_kept(kept):
    inner = gt.grad(lambda x: (x**3).sum())
    for _ in range(3):
        assert gt.grad(lambda x: inner(x).sum())(jnp.ones(2)).tolist() == [6.0, 6.0]
        assert jax.jit(inner)(jnp.ones(2)).tolist() == [3.0, 3.0]
    assert len(kept) == 1  # of the outer gradient


def test_arrays_that_a_function_holds_are_not_kept():
    w = jnp.full(3, 2.0)
    gone = weakref.ref(w)
    for _ in range(3):
        gt.grad(lambda x, w=w: (x * w).sum())(jnp.ones(3))
    del w
    gc.collect()
    assert gone() is None


@pytest.mark.sweep_at("within a loop")
@pytest.mark.parametrize("name", ["by itself", "within a loop"])
def test_a_number_that_changes_at_each_call_is_compared_with_few_programs(name, monkeypatch):
    compared, alike_ = [], jaxpr_equality._alike
    monkeypatch.setattr(jaxpr_equality, "_alike", lambda a, b: compared.append(1) or alike_(a, b))
    for n in range(40):
        f = lambda x, rate=n / 7: x * rate
        if name == "within a loop":
            f = lambda x, rate=n / 7: jax.lax.fori_loop(0, 2, lambda _, y: y * rate, x)
        gt.grad(lambda x, f=f: f(x).sum())(jnp.ones(2))
    assert len(compared) < 20


def test_where_errors_name_lines_nothing_is_kept(kept):
    with jax.debug_nans(True):
        for _ in range(3):
            gt.grad(lambda x: (x * x).sum())(jnp.ones(2))
    assert not kept


def test_programs_whose_equations_read_more_are_two():
    def first(which, a, b):
        return jax.lax.select_n(which, a), b

    def both(which, a, b):
        return jax.lax.select_n(which, a, b), b

    args = jnp.zeros(3, bool), jnp.ones(3), jnp.zeros(3)
    one, other = (jax.make_jaxpr(f)(*args).jaxpr for f in (first, both))
    assert [e.primitive for e in one.eqns] == [e.primitive for e in other.eqns]
    assert jaxpr_equality._alike(one, one)
    assert not jaxpr_equality._alike(one, other)
    assert not jaxpr_equality._alike(other, one)
