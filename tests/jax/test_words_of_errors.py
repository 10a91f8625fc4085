"""Errors of the user's code are not changed; errors of JAX get an explanation."""

import jax
import jax.numpy as jnp
import pytest

import gradtools.jax as gt
from gradtools import GradtoolsError

X = jnp.arange(1.0, 4.0)
PHRASES = [
    "x forward-mode autodiff (jvp) to a custom_vjp",
    "and was passed to custom_linear_solve",
    "no_execution config option",
    "plain",
]
WAYS = {
    "grad": lambda f: gt.grad(f)(X),
    "jvp": lambda f: gt.jvp(f, (X,), (X,)),
    "linearize": lambda f: gt.linearize(f, X)[1](X),
    "frozen": lambda f: gt.grad(gt.frozen(f))(X),
    "host_function": lambda f: gt.host_function(f)(X),
}


def _raised(way, f):
    with pytest.raises(BaseException) as caught:
        way(f)
    return caught.value


@pytest.mark.slow_at(("TypeError", "grad"))
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", [TypeError, RuntimeError])
def test_an_error_of_f_with_jaxs_words_is_the_same_error(way, kind):
    for phrase in PHRASES:
        own = kind(phrase)

        def f(x):
            raise own

        assert _raised(WAYS[way], f) is own


@pytest.mark.slow_at("AssertionError")
@pytest.mark.parametrize("kind", [TypeError, ValueError, NotImplementedError, AssertionError])
def test_an_error_of_a_rule_is_not_taken_for_one_of_transposing_it(kind):
    own = kind("my own")

    def raises(*args):
        raise own

    forward = gt.custom_rule(lambda x: jnp.sin(x))
    forward.defjvp(raises)
    assert _raised(WAYS["grad"], lambda x: forward(x).sum()) is own
    reverse = gt.custom_rule(lambda x: jnp.sin(x))
    reverse.defvjp(lambda x: (jnp.sin(x), x), raises)
    assert _raised(WAYS["jvp"], lambda x: reverse(x).sum()) is own


def test_jaxs_refusal_keeps_its_type_and_is_ours_too():
    @jax.custom_vjp
    def reverse_only(x):
        return x

    reverse_only.defvjp(lambda x: (x, None), lambda _, ct: (ct,))
    for way in ("jvp", "linearize"):
        error = _raised(WAYS[way], lambda x: reverse_only(x).sum())
        assert isinstance(error, GradtoolsError) and isinstance(error, TypeError)


def _branching(x):
    return x * 2.0 if x > 0 else x


def _ruled(f):
    rule = gt.custom_rule(f)
    rule.defjvp(lambda primals, tangents: (rule(*primals), tangents[0]))
    return rule


OPERATORS = {
    "grad": gt.grad,
    "value_and_grad": gt.value_and_grad,
    "jacobian": gt.jacobian,
    "checkpoint": gt.checkpoint,
    "frozen": gt.frozen,
    "grad of grad": lambda f: gt.grad(gt.grad(f)),
    "chunked": lambda f: gt.chunked(f, 1),
    "custom_rule": _ruled,
}


@pytest.mark.parametrize("operator", OPERATORS)
def test_an_error_of_a_trace_names_the_line_of_the_users_function(operator):
    """The error of JAX must show the line of the user's function, not a line in gradtools."""
    with pytest.raises(jax.errors.TracerBoolConversionError) as caught:
        jax.jit(OPERATORS[operator](_branching))(X[:1] if operator == "chunked" else 1.0)
    line = _branching.__code__.co_firstlineno
    assert f"function _branching at {__file__}:{line} for jit" in str(caught.value)
