"""The sweep over JAX: what it finds is told by its ledger, and what the ledger tells is found."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

from tests.support.sweeps import (
    AGREES,
    DIFFERS,
    LEFT_OUT,
    RAISED,
    LedgerLine,
    in_jax,
    jax_ledger,
)
from tests.support.sweeps.jax_programs import (
    WRITTEN_FOR,
    Case,
    any_,
    cases,
    names,
    pos,
    unknown,
)

GROUPS = in_jax.groups(25)


@pytest.fixture(autouse=True)
def compiled_programs_are_let_go():
    yield
    jax.clear_caches()


@pytest.mark.slow
@pytest.mark.whole_at("16")
@pytest.mark.parametrize("group", range(len(GROUPS)))
def test_every_function_agrees_or_is_explained(group):
    found = in_jax.verdict(in_jax.sweep(GROUPS[group]))
    assert found, f"\n{found}"


@pytest.mark.sweep
@pytest.mark.parametrize("group", range(len(GROUPS)))
def test_every_sample_agrees_in_every_way_or_is_explained(group):
    found = in_jax.verdict(in_jax.sweep(GROUPS[group], whole=True), whole=True)
    assert found, f"\n{found}"


@pytest.mark.sweep
@pytest.mark.parametrize("group", range(len(GROUPS)))
def test_every_function_agrees_operation_by_operation(group):
    found = in_jax.verdict(in_jax.sweep(GROUPS[group], eager=True))
    assert found, f"\n{found}"


def test_every_public_function_stands_in_the_table():
    new = unknown()
    later = jax.__version_info__ > WRITTEN_FOR
    assert later or not new, f"neither in the table nor among the names without: {new}"
    assert len({case.program for case in cases()}) > 480
    assert {"lax.sin", "numpy.einsum", "numpy.linalg.svd", "nn.gelu"} <= set(names())


# --- the sweep itself --------------------------------------------------------------------


def outcomes(f, *draws, **options):
    return in_jax.sweep([Case(f, draws, program="planted")], **options)


def results(f, *draws, **options):
    return {o.way: (o.result, o.oracle) for o in outcomes(f, *draws, **options)}


@jax.custom_jvp
def wrong(x):
    return jnp.sin(x)


wrong.defjvp(lambda primals, tangents: (wrong(*primals), 1.001 * jnp.cos(*primals) * tangents[0]))


@jax.custom_jvp
def flat(x):
    return jnp.sin(x)


@flat.defjvp
def _(primals, tangents):
    slope = jax.lax.stop_gradient(jnp.cos(*primals))  # right at first order, lost at second
    return flat(*primals), slope * tangents[0]


def test_a_wrong_derivative_of_the_framework_is_found_by_finite_differences():
    found = results(wrong, any_(3))
    assert found["jvp"] == (DIFFERS, "finite differences")
    assert found["vjp"] == (DIFFERS, "dot product")


def test_a_derivative_that_is_wrong_at_second_order_only_is_found():
    found = results(flat, any_(3))
    assert found["vjp"][0] == found["jvp"][0] == AGREES
    assert found["hvp, reverse over reverse"] == (DIFFERS, "finite differences")
    assert found["frozen, second order"] == (DIFFERS, "finite differences")


@pytest.mark.slow_at("vjp-vjp", "linearize-linearize", "frozen-frozen, second order")
@pytest.mark.parametrize(
    ("name", "way"),
    [*zip(*[("vjp", "jvp", "linearize")] * 2, strict=True), ("frozen", "frozen, second order")],
)
def test_a_wrong_operator_of_gradtools_is_found(monkeypatch, name, way):
    import gradtools.jax as gt

    plain = getattr(gt, name)
    scaled = lambda ys: jax.tree.map(lambda y: y * (1 + 1e-6), ys)

    def planted(*args):
        if name == "frozen":
            return lambda *xs: scaled(plain(*args)(*xs))
        if name == "jvp":
            return scaled(plain(*args))
        out, linear = plain(*args)
        return out, lambda *v: scaled(linear(*v))

    monkeypatch.setattr(gt, name, planted)
    found = results(jnp.sin, any_(3))
    assert found[way][0] == DIFFERS
    assert {w for w, (result, _) in found.items() if result != AGREES} == {way}


def test_what_raises_is_told_and_the_other_ways_go_on():
    def f(x):
        return jax.lax.while_loop(lambda s: s[0] < 3, lambda s: (s[0] + 1, jnp.sin(s[1])), (0, x))[
            1
        ]

    found = results(f, pos(2))
    assert found["vjp"][0] == RAISED
    assert found["jvp"][0] == AGREES


def test_a_function_of_integers_is_left_out():
    assert {o.result for o in outcomes(lambda x: x > 0, any_(3))} == {LEFT_OUT}


def test_the_sweep_agrees_operation_by_operation_too():
    assert {result for result, _ in results(jnp.sin, any_(3), eager=True).values()} == {AGREES}


@pytest.mark.slow
def test_a_complex_program_agrees_in_every_way_that_takes_one():
    found = outcomes(lambda x, y: jnp.exp(x) * y, any_(2), any_(2), whole=True)
    assert {o.dtype for o in found} == {"float64", "complex128"}
    assert {o.result for o in found} == {AGREES}


def test_a_line_that_tells_nothing_any_more_fails_the_sweep(monkeypatch):
    line = LedgerLine("planted", "vjp", DIFFERS, "it was wrong once")
    monkeypatch.setattr(jax_ledger, "LEDGER", (line,))
    found = in_jax.verdict(outcomes(jnp.sin, any_(3)))
    assert not found and found.outdated == (line,)


def test_every_line_of_the_ledger_names_a_function_that_the_table_has():
    from fnmatch import fnmatchcase

    programs = {case.program for case in cases()}
    for line in jax_ledger.LEDGER:
        assert any(fnmatchcase(p, line.program) for p in programs), line
