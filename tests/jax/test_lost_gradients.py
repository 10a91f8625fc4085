"""why_zero reports the line and the kind of each cause of a lost gradient, and no other causes."""

import pytest

jax = pytest.importorskip("jax")
pytest.importorskip("flax")
pytest.importorskip("equinox")

import gradtools.jax as gt  # noqa: E402  (only where JAX is installed)
from tests.jax.lost_gradients import CASES  # noqa: E402
from tests.support.lost_gradients import losses  # noqa: E402


@pytest.mark.sampled(36, 54)
@pytest.mark.parametrize("cause", CASES.causes.cases())
def test_a_cause_is_found_at_its_line_with_its_kind(cause):
    report = gt.why_zero(cause.program, *cause.known["args"])
    found = {(f.kind, f.source.line if f.source else None, f.whole) for f in report.findings}
    assert found == {*losses(cause)}
    if cause.known.get("scope"):
        assert {f.scope for f in report.findings} == {cause.known["scope"]}


@pytest.mark.sampled(12, 28)
@pytest.mark.parametrize("case", CASES.healthy_ones.cases())
def test_nothing_is_found_where_nothing_is_lost(case):
    report = gt.why_zero(case.program, *case.known["args"])
    assert not report, str(report)


@jax.custom_vjp
def squared(x):
    return x**2


squared.defvjp(lambda x: (x**2, x), lambda saved, ct: (None,))


@pytest.mark.parametrize("name", ["relu", "relu6"])
def test_a_function_of_jax_is_called_by_its_name(name):
    (found,) = gt.why_zero(lambda x: getattr(jax.nn, name)(x).sum(), -jax.numpy.ones(2))
    assert (found.kind, found.operation) == ("zero", name)


def test_a_rule_is_called_by_the_name_of_its_function():
    (found,) = gt.why_zero(lambda x: squared(x).sum(), jax.numpy.ones(2))
    assert (found.kind, found.operation) == ("rule", "squared")
