"""Under jit, a custom rule costs as much as jax.custom_vjp or jax.custom_jvp."""

from __future__ import annotations

import re
from functools import lru_cache
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import gradtools.jax as gt

X = jnp.asarray(np.random.default_rng(0).normal(size=64))
V = 0.3 * X + 1
XS = jnp.stack([X, V, X + V])
W = jnp.asarray(np.random.default_rng(1).normal(size=(32, 32))) / 32
BATCH = jnp.asarray(np.random.default_rng(2).normal(size=(16, 32)))


class Cost(NamedTuple):
    flops: float
    transcendentals: float
    bytes_accessed: float
    temporary: int
    output: int
    loops: int


# XLA's code optimization does not change these counts, so it is disabled to save time
QUICK = {"xla_backend_optimization_level": 0}


def cost(f, *args, options=QUICK):
    """Return XLA's counts of the operations and bytes of the compiled f."""
    program = jax.jit(f).lower(*args).compile(options)
    found, memory = program.cost_analysis(), program.memory_analysis()
    return Cost(
        *(found.get(key, 0.0) for key in ("flops", "transcendentals", "bytes accessed")),
        memory.temp_size_in_bytes,
        memory.output_size_in_bytes,
        len(re.findall(r" while\(", program.as_text())),
    )


COSTS: dict = {}


def by_hand(rule, program):
    """Return the cost of a program with a handwritten rule, cached by rule and program."""
    of, *args = program
    if (id(rule), id(program)) not in COSTS:
        COSTS[id(rule), id(program)] = rule, program, cost(of(rule), *args)
    return COSTS[id(rule), id(program)][-1]


def no_more(ours, by_hand):
    return all(a <= b for a, b in zip(ours, by_hand, strict=True))


# --- rules that save the input, the output, intermediates or the result of a loop ---------


class Given(NamedTuple):
    value: object
    fwd: object
    bwd: object
    jvp: object


def halves(x):
    return jnp.exp(x), jnp.exp(-x)


def sinh_fwd(x):
    e, i = halves(x)
    return (e - i) / 2, (e, i)


def sinh_jvp(primals, tangents):
    e, i = halves(*primals)
    return (e - i) / 2, tangents[0] * (e + i) / 2


def search(x):
    """Compute an expensive function with a while loop, which reverse mode does not support."""

    def step(state):
        i, z = state
        return i + 1, z - 0.1 * jnp.sin(z)

    return jax.lax.while_loop(lambda s: s[0] < 20 + (s[1][0] > 1e9), step, (0, x))[1]


def search_jvp(primals, tangents):
    y = search(primals[0])
    return y, tangents[0] / (1 + y * y)


RULES = {
    "square": Given(
        lambda x: x * x,
        lambda x: (x * x, x),
        lambda x, ct: (2 * x * ct,),
        lambda p, t: (p[0] * p[0], 2 * p[0] * t[0]),
    ),
    "sinh": Given(
        lambda x: sinh_fwd(x)[0], sinh_fwd, lambda r, ct: (ct * (r[0] + r[1]) / 2,), sinh_jvp
    ),
    "search": Given(
        search, lambda x: (search(x),) * 2, lambda y, ct: (ct / (1 + y * y),), search_jvp
    ),
}


def own(rule, given):
    f = gt.custom_rule(rule.value)
    if "vjp" in given:
        f.defvjp(rule.fwd, rule.bwd)
    if "jvp" in given:
        f.defjvp(rule.jvp)
    return f


@lru_cache
def with_vjp(rule):
    f = jax.custom_vjp(rule.value)
    f.defvjp(rule.fwd, rule.bwd)
    return f


@lru_cache
def with_jvp(rule):
    f = jax.custom_jvp(rule.value)
    f.defjvp(rule.jvp)
    return f


# --- programs ----------------------------------------------------------------------------


def total(f):
    return lambda x: (f(jnp.sin(x)) * V).sum()


def scanned(f):
    return lambda x: jax.lax.scan(lambda c, _: (f(0.5 * c), None), x, None, length=7)[0]


def forward(f):
    return lambda x, v: jax.jvp(f, (x,), (v,))


def slope(f):
    return lambda x: (jax.grad(f)(x) * V).sum()


VALUE = {
    "value": (lambda f: total(f), X),
    "value in scan": (lambda f: total(scanned(f)), X),
}
REVERSE = {
    "value_and_grad": (lambda f: jax.value_and_grad(total(f)), X),
    "vmap of grad": (lambda f: jax.vmap(jax.grad(total(f))), XS),
    "grad of scan": (lambda f: jax.value_and_grad(total(scanned(f))), X),
    "grad of remat": (lambda f: jax.grad(total(jax.checkpoint(f))), X),
}
FORWARD = {
    "jvp": (lambda f: forward(total(f)), X, V),
    "vmap of jvp": (lambda f: jax.vmap(forward(total(f)), (0, None)), XS, V),
    "jvp of scan": (lambda f: forward(total(scanned(f))), X, V),
}
OF_REVERSE = {
    "reverse over reverse": (lambda f: jax.grad(slope(total(f))), X),
    "forward over reverse": (lambda f: forward(jax.grad(total(f))), X, V),
    "reverse over reverse of scan": (lambda f: jax.grad(slope(total(scanned(f)))), X),
    "forward over reverse of scan": (lambda f: forward(jax.grad(total(scanned(f)))), X, V),
}

FEW = ("square", "sinh")


def cells(programs, rules, given):
    """Return test parameters for all combinations of programs, rules and variants."""
    return [
        pytest.param(programs[program], RULES[name], which, id=f"{name}-{program}-{which}")
        for name in rules
        for program in programs
        for which in given
    ]


@pytest.mark.slow_at(
    "sinh-value-vjp", "sinh-value in scan-vjp", "search-value-vjp", "search-value in scan-vjp"
)
@pytest.mark.parametrize(
    ("program", "rule", "given"), cells(VALUE, ("sinh", "search"), ("vjp", "jvp", "vjp and jvp"))
)
def test_the_value_costs_what_the_function_costs(program, rule, given):
    of, *args = program
    assert cost(of(own(rule, given)), *args) == by_hand(rule.value, program)


@pytest.mark.sampled(4, 12)
@pytest.mark.parametrize(
    ("program", "rule", "given"),
    cells(REVERSE, RULES, ("vjp", "vjp and jvp")),
)
def test_reverse_mode_costs_what_custom_vjp_costs(program, rule, given):
    of, *args = program
    assert cost(of(own(rule, given)), *args) == by_hand(with_vjp(rule), program)


@pytest.mark.quick_at("square-vmap of jvp-vjp and jvp")
@pytest.mark.sampled(slow=5)
@pytest.mark.parametrize(
    ("program", "rule", "given"), cells(FORWARD, RULES, ("jvp", "vjp and jvp"))
)
def test_forward_mode_costs_what_custom_jvp_costs(program, rule, given):
    of, *args = program
    assert cost(of(own(rule, given)), *args) == by_hand(with_jvp(rule), program)


@pytest.mark.sampled(1, 4)
@pytest.mark.parametrize(
    ("program", "rule", "given"),
    cells(OF_REVERSE, FEW, ("vjp", "vjp and jvp")),
)
def test_a_second_derivative_costs_no_more_than_with_custom_vjp(program, rule, given):
    of, *args = program
    assert no_more(cost(of(own(rule, given)), *args), by_hand(with_vjp(rule), program))


# --- residuals that do not depend on the batch or on the loop index ----------------------


def weighted_fwd(w, x):
    big = jnp.exp(w)
    y = jnp.tanh(big @ x)
    return y, (big, x, y)


def weighted_bwd(res, ct):
    big, x, y = res
    slope = ct * (1 - y * y)
    return jnp.outer(slope, x) * big, big.T @ slope


WEIGHTED = Given(lambda w, x: weighted_fwd(w, x)[0], weighted_fwd, weighted_bwd, None)


def residuals(f, *args):
    """Return the size in bytes of the residuals of the pullback."""
    kept = jax.tree.leaves(jax.vjp(f, *args)[1])
    return sum({id(a): a.nbytes for a in kept}.values())


def mapped(f):
    return lambda w, x: jax.vmap(f, (None, 0))(w, x).sum()


def each(f):
    return jax.vmap(jax.grad(lambda w, x: f(w, x).sum(), 1), (None, 0))


def recurrent(f):
    return lambda w, x: jax.lax.scan(lambda c, _: (f(w, c), None), x, None, length=5)[0].sum()


@pytest.mark.slow_at("vmap")
@pytest.mark.parametrize(
    "program",
    [
        pytest.param((mapped, W, BATCH), id="vmap"),
        pytest.param((recurrent, W, X[:32]), id="scan"),
    ],
)
def test_a_residual_that_is_the_same_for_all_is_kept_once(program):
    of, *args = program
    ours, other = own(WEIGHTED, "vjp"), with_vjp(WEIGHTED)
    assert residuals(of(ours), *args) <= residuals(of(other), *args)


@pytest.mark.slow_at("scan")
@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("loop", [False, True], ids=["once", "scan"])
def test_a_pullback_keeps_what_bwd_reads(name, loop):
    rule = RULES[name]
    of = scanned if loop else lambda f: f
    assert residuals(of(own(rule, "vjp")), X) == residuals(of(with_vjp(rule)), X)


# --- a forward rule that contains a linear loop, in reverse mode -------------------------


def relaxed(x):
    return 2 * jnp.exp(x)


def relaxed_jvp(primals, tangents):
    """Compute the tangent with a scan of a fixed number of linear iterations."""
    (x,), (dx,) = primals, tangents
    y = jnp.exp(x)

    def step(dy, _):
        return 0.5 * dy + y * dx, None

    return 2 * y, jax.lax.scan(step, jnp.zeros_like(dx), None, length=9)[0]


def test_a_forward_rule_with_a_loop_costs_the_same_in_reverse_mode():
    rule = Given(relaxed, None, None, relaxed_jvp)
    for program in (REVERSE["value_and_grad"], FORWARD["jvp"]):
        of, *args = program
        assert no_more(cost(of(own(rule, "jvp")), *args), by_hand(with_jvp(rule), program))
