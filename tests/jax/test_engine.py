"""The JAX engine evaluates f only once, on concrete values and inside of every transform."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import gradtools.jax as gt
from gradtools.errors import DisconnectedInputError, GradtoolsWarning

X = jnp.array([0.7, -1.3])
ONES = jnp.ones(2)
CUBE = lambda x: jnp.sum(x**3)


def _operators(f: Any) -> dict[str, Any]:
    return {
        "grad": lambda x: gt.grad(f)(x),
        "value_and_grad": lambda x: gt.value_and_grad(f)(x),
        "vjp": lambda x: gt.vjp(f, x)[1](jnp.ones(())),
        "jvp": lambda x: gt.jvp(f, (x,), (ONES,)),
        "linearize": lambda x: gt.linearize(f, x)[1](ONES),
        "jacobian": lambda x: gt.jacobian(f)(x),
        "hvp": lambda x: gt.hvp(f, (x,), (ONES,)),
        "hvp, reverse": lambda x: gt.hvp(f, (x,), (ONES,), "reverse_over_reverse"),
        "hessian": lambda x: gt.hessian(f)(x),
        "minimax": lambda x: gt.minimax_value_and_grad(lambda x, y: f(x * y), 0, 1)(x, x + 1),
        "per_example_grad": lambda x: gt.per_example_grad(lambda w, t: f(w * t))(x, x),
        "mixed_partial": lambda x: gt.mixed_partial(lambda y, g: f(y * g), jnp.sin, x, x, ONES),
    }


OPERATORS = tuple(_operators(None))
operators = pytest.mark.parametrize("operator", OPERATORS)


def _same(found: Any, expected: Any, rtol: float = 1e-13) -> None:
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_allclose(a, b, rtol=rtol, atol=rtol)


# --- one evaluation ----------------------------------------------------------------------


@pytest.mark.slow_at("per_example_grad")
@operators
def test_the_python_of_f_runs_once_a_call(operator):
    calls = []
    fun = _operators(lambda x: calls.append(1) or CUBE(x))[operator]
    for count in (1, 2):
        fun(X)
        assert len(calls) == count


@pytest.mark.parametrize(
    "operator", ["grad", "value_and_grad", "hvp", "jacobian", "hessian", "vjp", "jvp"]
)
def test_branches_on_values_fall_back_to_an_evaluation(operator):
    f = lambda x: CUBE(x) if x[0] > 0 else jnp.sum(x)
    _same(_operators(f)[operator](X), _operators(CUBE)[operator](X))


@pytest.mark.parametrize("policy", ["raise", "warn", "strict"])
@pytest.mark.parametrize(
    "f",
    [
        lambda x: jnp.sum(jax.lax.stop_gradient(x)) if x[0] > 0 else jnp.sum(x),
        lambda x: jnp.sum(x).item(),
    ],
    ids=["a branch on values", "item"],
)
def test_where_f_cannot_be_traced_a_zero_gradient_warns(f, policy):
    with pytest.warns(GradtoolsWarning, match="argument 0 is zero everywhere.*could not be traced"):
        g = gt.grad(f, disconnected_inputs=policy)(X)
    _same(g, 0 * X)


# --- the user's own rules inside f -------------------------------------------------------


@jax.custom_vjp
def _doubled(x):
    return jnp.sin(x)


_doubled.defvjp(lambda x: (jnp.sin(x), x), lambda x, ct: (2 * ct * jnp.cos(x),))


def test_forward_over_reverse_goes_through_a_custom_vjp_as_in_jax():
    found = gt.hvp(lambda x: jnp.sum(_doubled(x)), (X,), (ONES,), "forward_over_reverse")[1][0]
    _same(found, -2 * jnp.sin(X))


# --- gradient conventions of native and gradtools operators ------------------------------


def test_native_grad_through_an_edit_is_in_jaxs_convention():
    z = jnp.array([1.0 + 2.0j, -0.5j])
    f = lambda z: jnp.sum(jnp.abs(gt.reverse_gradient(z, 0.5)) ** 2)
    _same(jax.grad(f)(z), -0.5 * jax.grad(lambda z: jnp.sum(jnp.abs(z) ** 2))(z))
    _same(gt.grad(f)(z), jnp.conj(jax.grad(f)(z)))


# --- lost gradients ----------------------------------------------------------------------


def test_the_policy_holds_under_jit_and_costs_nothing_at_run_time():
    lost = gt.grad(lambda x: jnp.sum(jax.lax.stop_gradient(x)))
    with pytest.raises(DisconnectedInputError):
        jax.jit(lost)(X)
    mine = jax.jit(gt.grad(CUBE)).lower(X).compile().cost_analysis()
    plain = jax.jit(jax.grad(CUBE)).lower(X).compile().cost_analysis()
    assert mine["flops"] == plain["flops"]
    assert mine["bytes accessed"] == plain["bytes accessed"]


# --- libraries' pytrees ------------------------------------------------------------------


@jax.custom_vjp
def first_alone(x, y):
    return x**2


first_alone.defvjp(lambda x, y: (x**2, x), lambda x, ct: (2 * x * ct, jnp.zeros(2)))
DERIVATIVE = jax.jit(gt.grad(lambda x: x.sum()))
ITSELF = jax.jit(jax.vmap(gt.grad(lambda x: x)))
STOPPED_CARRY = lambda c, _: (2 * jax.lax.stop_gradient(c), None)


@pytest.mark.parametrize("way", [lambda f: f, jax.jit], ids=["eager", "jit"])
@pytest.mark.parametrize(
    ("f", "reaches"),
    [
        (lambda x: first_alone(x, x).sum(), True),
        # the rule's function ignores its second argument
        (lambda x: first_alone(ONES, x).sum(), False),
        (lambda x: jnp.round(x).sum(), True),  # the derivative of round is zero everywhere
        (lambda x: jax.lax.scan(STOPPED_CARRY, x, None, 3)[0].sum(), False),
        (lambda x: gt.stop_gradient(x).sum(), False),
        (lambda x: gt.scale_gradient(x, 0.0).sum(), True),
    ],
)
def test_what_reaches_the_output_is_the_same_in_a_trace(f, reaches, way):
    if not reaches:
        with pytest.raises(DisconnectedInputError):
            way(gt.grad(f))(X)
        return
    np.testing.assert_array_equal(way(gt.grad(f))(X), jax.grad(f)(X))


@pytest.mark.parametrize("inner", [DERIVATIVE, ITSELF])
def test_a_constant_derivative_in_a_jit_that_was_traced_before_warns(inner):
    inner(X)
    with pytest.warns(GradtoolsWarning, match="itself computes a derivative"):
        assert not gt.grad(lambda x: inner(x).sum())(X).any()
