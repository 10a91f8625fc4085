"""In the sweep over JAX, gradtools agrees with JAX; planted errors are detected."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

from tests.sweeps import AGREES, DIFFERS, LEFT_OUT, faults, in_jax
from tests.sweeps.jax_programs import WRITTEN_FOR, Case, cases, names, unknown

GROUPS = in_jax.groups(25)


@pytest.fixture(autouse=True)
def compiled_programs_are_let_go():
    yield
    jax.clear_caches()


@pytest.mark.slow
@pytest.mark.whole_at("16")
@pytest.mark.parametrize("group", range(len(GROUPS)))
def test_every_function_is_as_by_jax(group):
    assert faults(in_jax.sweep(GROUPS[group]), in_jax.KNOWN, whole=False) == []


@pytest.mark.sweep
@pytest.mark.parametrize("group", range(len(GROUPS)))
def test_every_sample_is_as_by_jax_in_every_way(group):
    assert faults(in_jax.sweep(GROUPS[group], whole=True), in_jax.KNOWN, whole=False) == []


def test_every_public_function_stands_in_the_table():
    new = unknown()
    later = jax.__version_info__ > WRITTEN_FOR
    assert later or not new, f"neither in the table nor excluded with a reason: {new}"
    assert len({case.program for case in cases()}) > 420
    assert {"lax.sin", "numpy.einsum", "numpy.linalg.svd", "nn.gelu"} <= set(names())


# --- tests of the sweep itself -----------------------------------------------------------


def results(f, draws, **options):
    found = in_jax.sweep([Case(f, draws, program="planted")], **options)
    return {o.way: o.result for o in found}


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
    found = results(jnp.sin, "a3")
    assert {w for w, result in found.items() if result != AGREES} == {way}
    assert found[way] == DIFFERS


def test_a_number_where_jax_raises_is_found_and_an_error_of_both_agrees():
    def f(x):
        step = lambda s: (s[0] + 1, jnp.sin(s[1]))
        return jax.lax.while_loop(lambda s: s[0] < 3, step, (0, x))[1]

    assert set(results(f, "p2").values()) == {AGREES}
    assert results(lambda x: x > 0, "a3") == {"every way": LEFT_OUT}


def test_the_sweep_agrees_operation_by_operation_too():
    assert set(results(jnp.sin, "a3", eager=True).values()) == {AGREES}


@pytest.mark.slow
def test_a_complex_program_agrees_in_every_way_that_takes_one():
    case = Case(lambda x, y: jnp.exp(x) * y, "a2 a2", program="planted")
    found = in_jax.sweep([case], whole=True)
    assert {o.dtype for o in found} == {"float64", "complex128"}
    assert {o.result for o in found} == {AGREES}
