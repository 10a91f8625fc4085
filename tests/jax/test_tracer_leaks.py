"""No operator leaks a tracer. Each program of the table runs under `jax.check_tracer_leaks`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import gradtools.jax as gt
from tests.support.every_operator import JITTED, Use, World, healthy

V = jnp.arange(1.0, 5.0) / 5


def _with_a_rule_that_captures(w: World) -> Any:
    def run(v: Any) -> Any:
        scale = jax.lax.stop_gradient(v).sum()
        rule = gt.custom_rule(lambda x: x * scale)
        rule.defvjp(lambda x: (x * scale, ()), lambda _, c: (c * scale,))
        return rule(v)

    return run


def _on_the_host(w: World) -> Any:
    f = gt.host_function(np.sin)
    g = gt.host_function(lambda x, c: np.cos(x) * c)
    f.defvjp(lambda x: (f(x), x), lambda x, c: (g(x, c),))
    g.defvjp(lambda x, c: (g(x, c), (x, c)), lambda r, k: (-f(r[0]) * r[1] * k, g(r[0], k)))
    return f


def _frozen_over_a_tracer(w: World) -> Any:
    def run(v: Any) -> Any:
        scale = jax.lax.stop_gradient(v).sum()
        return gt.frozen(lambda z: jnp.tanh(z * scale).sum())(v) ** 2

    return run


# programs whose derivative does not depend on x
CONSTANT = ("custom_rule: value", "GradientAccumulator")
MINE = [
    *(u for u in JITTED if u.planted and u.public != "host_function" and u.name not in CONSTANT),
    Use("frozen over a tracer", _frozen_over_a_tracer),
    Use("custom_rule that captures", _with_a_rule_that_captures),
    # a host_function with a double-backward kernel, which the other programs do not have
    Use("host_function", _on_the_host),
]
REVERSE_ONLY = ("clip_gradient", "transform_gradient", "replace_gradient")

WAYS: dict[str, Callable[[Any], Any]] = {
    "grad": lambda f: gt.grad(f)(V),
    "jit of grad": lambda f: jax.jit(jax.grad(f))(V),
    "jit of vmap of grad": lambda f: jax.jit(jax.vmap(jax.grad(f)))(jnp.stack([V, V])),
    "jit of jvp of grad": lambda f: jax.jit(lambda v: jax.jvp(jax.grad(f), (v,), (v,)))(V),
    "scan": lambda f: jax.lax.scan(lambda c, _: (c + jax.grad(f)(c), None), V, None, length=2),
}


@pytest.mark.sampled(slow=14)
@pytest.mark.slow
@pytest.mark.sweep_at("frozen", "frozen over a tracer")
@pytest.mark.parametrize("use", MINE, ids=str)
def test_an_operator_leaks_no_tracer_in_any_transform(use: Use) -> None:
    f = use.make(World(gt, healthy(gt), V))
    total = lambda v: sum(jnp.sum(y * y) for y in jax.tree.leaves(f(v)))
    with jax.check_tracer_leaks():
        for way, run in WAYS.items():
            if way != "jit of jvp of grad" or use.public not in REVERSE_ONLY:
                run(total)


def test_a_leak_is_seen() -> None:
    kept: list[Any] = []
    with pytest.raises(Exception, match="Leaked"), jax.check_tracer_leaks():
        jax.jit(lambda v: kept.append(v) or v)(V)
