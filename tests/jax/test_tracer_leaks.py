"""No operator keeps a tracer of a trace that has ended: `jax.check_tracer_leaks` says nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import gradtools.jax as gt

V = jnp.arange(1.0, 4.0) / 5
X = jnp.arange(12.0).reshape(4, 3) / 7


def _with_a_forward_rule(v: Any) -> Any:
    rule = gt.custom_rule(lambda x: x * x)
    rule.defjvp(lambda primals, tangents: (primals[0] ** 2, 2 * primals[0] * tangents[0]))
    return rule(v)


def _with_a_reverse_rule(v: Any) -> Any:
    rule = gt.custom_rule(lambda x: x * x)
    rule.defvjp(lambda x: (x * x, x), lambda x, c: (2 * x * c,))
    return rule(v)


def _with_a_rule_that_captures(v: Any) -> Any:
    scale = jax.lax.stop_gradient(v).sum()
    rule = gt.custom_rule(lambda x: x * scale)
    rule.defvjp(lambda x: (x * scale, ()), lambda _, c: (c * scale,))
    return rule(v)


def _on_the_host(v: Any) -> Any:
    f = gt.host_function(np.sin)
    g = gt.host_function(lambda x, c: np.cos(x) * c)
    f.defvjp(lambda x: (f(x), x), lambda x, c: (g(x, c),))
    g.defvjp(lambda x, c: (g(x, c), (x, c)), lambda r, k: (-f(r[0]) * r[1] * k, g(r[0], k)))
    return f(v)


def _frozen(v: Any, **options: Any) -> Any:
    return gt.frozen(lambda z: jnp.tanh(z).sum(), **options)(v) ** 2


def _frozen_over_a_tracer(v: Any) -> Any:
    scale = jax.lax.stop_gradient(v).sum()
    return gt.frozen(lambda z: jnp.tanh(z * scale).sum())(v) ** 2


def _microbatched(v: Any, **options: Any) -> Any:
    mean = lambda w, x: ((w**3).sum() * x).mean()
    return gt.microbatched_value_and_grad(mean, 2, **options)(v, jnp.arange(5.0))[1]


OPERATORS: dict[str, Callable[[Any], Any]] = {
    "frozen": _frozen,
    "frozen over a tracer": _frozen_over_a_tracer,
    "the gradient of frozen": gt.grad(_frozen),
    "chunked": gt.chunked(jnp.sin, 2),
    "microbatched_value_and_grad": _microbatched,
    "microbatched_value_and_grad with weights": lambda v: _microbatched(
        v, weights=lambda w, x: x.sum()
    ),
    "checkpoint": gt.checkpoint(jnp.sin),
    "reverse_gradient": lambda v: gt.reverse_gradient(v) ** 2,
    "scale_gradient": lambda v: gt.scale_gradient(v, 2.0) ** 2,
    "clip_gradient": lambda v: gt.clip_gradient(v, max_norm=1.0) ** 2,
    "transform_gradient": lambda v: gt.transform_gradient(v, lambda c: 2 * c) ** 2,
    "replace_gradient": lambda v: gt.replace_gradient(v**2, v) ** 2,
    "straight_through": gt.straight_through(jnp.round, jnp.sin),
    "custom_rule forward": _with_a_forward_rule,
    "custom_rule reverse": _with_a_reverse_rule,
    "custom_rule that captures": _with_a_rule_that_captures,
    "host_function": _on_the_host,
    "per_example_grad": lambda v: gt.per_example_grad(lambda v, x: (v**3 * x).sum())(v, X),
    "mixed_partial": lambda v: gt.mixed_partial(
        lambda y, g: (y.sum() + g) ** 3, lambda z: jnp.exp(z.sum()), v, v, v
    ),
    "hvp": lambda v: gt.hvp(lambda v: (v**3).sum(), (v,), (v,))[1][0],
    "jacobian": gt.jacobian(jnp.sin),
    "minimax": lambda v: gt.minimax_value_and_grad(lambda a, b: (a**2 * b).sum(), 0, 1)(v, v)[1][0],
    "linearize": lambda v: gt.linearize(jnp.sin, v)[1](v),
    "accumulate_gradients": lambda v: gt.accumulate_gradients(None, v**2),
}
REVERSE_ONLY = ("clip_gradient", "transform_gradient", "replace_gradient")

WAYS: dict[str, Callable[[Any], Any]] = {
    "grad": lambda f: gt.grad(f)(V),
    "jit of grad": lambda f: jax.jit(jax.grad(f))(V),
    "jit of vmap of grad": lambda f: jax.jit(jax.vmap(jax.grad(f)))(jnp.stack([V, V])),
    "jit of jvp of grad": lambda f: jax.jit(lambda v: jax.jvp(jax.grad(f), (v,), (v,)))(V),
    "scan": lambda f: jax.lax.scan(lambda c, _: (c + jax.grad(f)(c), None), V, None, length=2),
}


QUICK = ("frozen", "frozen over a tracer", "transform_gradient", "custom_rule forward")


@pytest.mark.sampled(slow=14)
@pytest.mark.slow
@pytest.mark.sweep_at("frozen", "frozen over a tracer")
@pytest.mark.parametrize(
    "operator",
    [pytest.param(o, marks=[] if o in QUICK else [pytest.mark.slow]) for o in OPERATORS],
)
def test_an_operator_leaks_no_tracer_in_any_transform(operator: str) -> None:
    total = lambda v: jnp.sum(OPERATORS[operator](v))
    with jax.check_tracer_leaks():
        for way, run in WAYS.items():
            if way != "jit of jvp of grad" or operator not in REVERSE_ONLY:
                run(total)


def test_a_leak_is_seen() -> None:
    kept: list[Any] = []
    with pytest.raises(Exception, match="Leaked"), jax.check_tracer_leaks():
        jax.jit(lambda v: kept.append(v) or v)(V)
