"""dependence, why_zero and guard_gradients, alike in both backends."""

from __future__ import annotations

import itertools
import json
import warnings

import numpy as np
import pytest

from gradtools import DisconnectedInputError, GradtoolsError, GradtoolsWarning

X = np.array([0.3, -0.8, 1.4], np.float32)


@pytest.fixture
def x(gt):
    return gt.asarray(X)


def kinds(report):
    return [finding.kind for finding in report]


def lines(report):
    return [finding.source.text for finding in report]


# --- dependence --------------------------------------------------------------------------


def test_dependence_knows_all_four(gt, x):
    def f(p, stopped):
        return {"a": gt.xp.sin(p["w"]), "b": gt.xp.round(p["w"]) + gt.stop_gradient(stopped)}

    table = gt.dependence(f, {"w": x}, x)
    assert str(table["output['a']", "argument 0['w']"]) == "differentiable"
    assert str(table["output['b']", "argument 0['w']"]) == "zero_derivative"
    assert str(table["output['b']", "argument 1"]) == "cut"
    assert str(table["output['a']", "argument 1"]) == "none"


def test_dependence_sees_integers_and_keywords(gt, x):
    rows = gt.asarray(np.array([0, 2]))
    table = gt.dependence(lambda x, n, *, by: gt.xp.take(x, n) * by, x, rows, by=x[:2])
    assert [str(table["output", name]) for name in table.inputs] == [
        "differentiable",
        "cut",
        "differentiable",
    ]


def test_dependence_of_an_unknown_leaf_says_which_there_are(gt, x):
    with pytest.raises(KeyError, match="argument 0"):
        gt.dependence(lambda x: x, x)["output", "argument 7"]


def test_dependence_is_printed_as_a_table(gt, x):
    text = str(gt.dependence(lambda x, y: x * gt.stop_gradient(y), x, x))
    assert text.splitlines()[1].split() == ["argument", "0", "differentiable"]
    assert text.splitlines()[2].split() == ["argument", "1", "cut"]


# --- why_zero ----------------------------------------------------------------------------


def test_a_stopped_gradient_is_named_with_its_line(gt, x):
    def f(x):
        y = gt.stop_gradient(x * 2)  # here
        return (y**2).sum()

    report = gt.why_zero(f, x)
    assert kinds(report) == ["detached"]
    assert lines(report)[0].endswith("# here")
    assert report.findings[0].source.function == "f"
    assert report.findings[0].whole


def test_a_lost_term_is_told_from_a_whole_loss(gt, x):
    def f(x):
        smooth = (x**2).sum()
        lost = gt.stop_gradient(gt.xp.sin(x)).sum()  # here
        return smooth + lost

    (finding,) = gt.why_zero(f, x)
    assert (finding.kind, finding.whole) == ("detached", False)
    assert finding.source.text.endswith("# here")
    assert "one part" in str(gt.why_zero(f, x))


def test_each_leaf_has_its_own_findings(gt, x):
    def f(p):
        return (p["good"] * gt.xp.round(p["bad"])).sum() + 0 * gt.stop_gradient(p["worse"]).sum()

    p = {"good": x, "bad": x, "worse": x}
    report = gt.why_zero(f, p)
    found = {(finding.argument, finding.kind) for finding in report}
    assert found == {
        ("argument 0['bad']", "zero_derivative"),
        ("argument 0['worse']", "detached"),
    }


def test_several_arguments_may_be_asked_about(gt, x):
    report = gt.why_zero(lambda x, y, z: (x * gt.stop_gradient(y)).sum(), x, x, x, argnums=(1, 2))
    assert [(f.argument, f.kind) for f in report] == [
        ("argument 1", "detached"),
        ("argument 2", "unused"),
    ]


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("clip", "dead"),
        ("relu", "dead"),
        ("times zero", "multiplied_by_zero"),
        ("tanh", "saturated"),
        ("underflow", "underflow"),
    ],
)
def test_a_gradient_that_is_zero_at_these_values_is_numerical(gt, x, name, kind):
    xp = gt.xp
    f = {
        "clip": lambda x: xp.clip(x, 10.0, 11.0).sum(),
        "relu": lambda x: xp.maximum(x - 100, xp.zeros_like(x)).sum(),
        "times zero": lambda x: (x * (0 * x + 1 - 1)).sum(),
        "tanh": lambda x: xp.tanh(x + 1000).sum(),
        "underflow": lambda x: ((x * 1e-30) * 1e-30).sum(),
    }[name]
    report = gt.why_zero(f, x)
    assert kinds(report) == [kind]
    assert report.findings[0].numerical
    assert "zero at these values" in str(report)


def test_what_cancels_is_told_where_it_comes_together(gt, x):
    def f(x):
        there = gt.xp.sin(x)
        back = -there
        return (there + back).sum()  # here

    report = gt.why_zero(f, x)
    assert kinds(report) == ["cancelled"]
    assert lines(report)[0].endswith("# here")


def overwritten(gt, x):
    y = gt.xp.sin(x)
    if hasattr(y, "at"):
        return y.at[:].set(1.0)  # here
    y[:] = 1.0  # here
    return y


def test_what_is_overwritten_is_no_data_flow_and_has_a_mend_of_its_own(gt, x):
    f = lambda x: overwritten(gt, x).sum()
    report = gt.why_zero(f, x)
    assert kinds(report) == ["overwritten"]
    assert lines(report)[0].endswith("# here")
    assert "set before what is to be differentiated" in str(report)
    assert str(gt.dependence(f, x)["output", "argument 0"]) == "none"


def test_what_is_overwritten_is_no_lost_term(gt, x):
    assert not gt.why_zero(lambda x: (overwritten(gt, x) + x).sum(), x)


def test_the_guard_says_where_a_leaf_is_overwritten(gt, x):
    guarded = gt.guard_gradients(lambda p: (overwritten(gt, p["a"]) + p["b"]).sum())
    with pytest.warns(GradtoolsWarning, match=r"argument 0\['a'\]: overwritten at test_seeing"):
        guarded({"a": x, "b": x})


def test_what_has_no_derivative_at_all_is_not_told_again_at_these_values(gt, x):
    f = lambda x: gt.xp.round(x).sum() + (x * 0).sum()
    assert kinds(gt.why_zero(f, x)) == ["zero_derivative", "multiplied_by_zero"]


def test_an_error_of_fs_own_is_told_with_its_line(gt, x):
    line = _raises.__code__.co_firstlineno + 1
    with pytest.raises(GradtoolsError, match=rf"my own.* \(test_seeing.py:{line}\)"):
        gt.why_zero(_raises, x)


def test_nothing_lost_is_false_and_says_so(gt, x):
    report = gt.why_zero(lambda x: (x**2).sum(), x)
    assert not report
    assert len(report) == 0
    assert str(report).startswith("Nothing is lost")


def test_the_report_is_json(gt, x):
    report = gt.why_zero(lambda x: gt.xp.round(x).sum(), x)
    found = json.loads(report.to_json())
    assert found["findings"][0]["kind"] == "zero_derivative"
    assert found["findings"][0]["source"]["file"].endswith("test_seeing.py")
    assert "straight_through" in found["findings"][0]["fix"]


def test_in_colour_the_words_are_the_same(gt, x):
    import re

    report = gt.why_zero(lambda x: gt.xp.round(x).sum(), x)
    coloured = report.text(colour=True)
    assert coloured != report.text()
    assert re.sub(r"\033\[\d+m", "", coloured) == report.text()


# --- wrong input -------------------------------------------------------------------------


def _raises(x):
    raise ValueError("my own")


def test_the_users_own_error_stays_reachable(gt, x):
    with pytest.raises(GradtoolsError) as caught:
        gt.why_zero(_raises, x)
    assert isinstance(caught.value.__cause__, ValueError)


# --- errors that it feeds ----------------------------------------------------------------


def test_a_disconnected_input_names_the_line(gt, x):
    def f(x):
        return (gt.stop_gradient(x) ** 2).sum()

    with pytest.raises(DisconnectedInputError, match=r"test_seeing\.py:\d+"):
        gt.grad(f)(x)


# --- guard_gradients ---------------------------------------------------------------------


def test_the_guard_names_what_does_not_reach_once(gt, x):
    def f(p):
        return (p["w"] ** 2).sum() + gt.stop_gradient(p["b"]).sum()

    p = {"w": x, "b": x, "c": x}
    guarded = gt.guard_gradients(f)
    with pytest.warns(GradtoolsWarning) as caught:
        value = guarded(p)
    assert float(value) == float(f(p))
    text = str(caught[0].message)
    assert "2 of 3 leaves do not reach" in text
    assert "argument 0['b']: detached at test_seeing.py:" in text
    assert "argument 0['c']: unused" in text
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        guarded(p)


def test_the_guard_is_silent_where_all_reaches(gt, x):
    guarded = gt.guard_gradients(lambda p, y: ((p["w"] - y) ** 2).sum())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        grads = gt.grad(guarded)({"w": x}, x)
    assert set(grads) == {"w"}


def test_the_guard_looks_inside_a_derivative(gt, x):
    guarded = gt.guard_gradients(lambda p: (p["w"] ** 2).sum())
    with pytest.warns(GradtoolsWarning, match=r"argument 0\['b'\]: unused"):
        grads = gt.grad(guarded)({"w": x, "b": x})
    np.testing.assert_allclose(gt.to_numpy(grads["w"]), 2 * X, rtol=1e-6)
    assert not gt.to_numpy(grads["b"]).any()


def test_the_guard_looks_at_the_arguments_it_is_given(gt, x):
    guarded = gt.guard_gradients(lambda x, y: (x**2).sum(), argnums=1)
    with pytest.warns(GradtoolsWarning, match="argument 1: unused"):
        guarded(x, x)


def test_the_guard_refuses_a_position_that_is_not_there(gt, x):
    with pytest.raises(GradtoolsError, match="guard_gradients: argnums holds 4"):
        gt.guard_gradients(lambda x: x, argnums=4)(x)


def test_dependence_runs_on_numbers_where_they_decide(gt, x, backend_name):
    """PyTorch tries the other branch and sees the output change; JAX follows the one taken."""
    f = lambda x, y: y if x[0] > 0 else x
    table = gt.dependence(f, x, x * 2)
    deciding = {"torch": "cut", "jax": "none"}[backend_name]
    assert [str(table["output", name]) for name in table.inputs] == [deciding, "differentiable"]


def test_guard_gradients_leaves_an_error_of_f_as_it_is(gt, x):
    own = ValueError("my own")

    def f(x):
        raise own

    guarded = gt.guard_gradients(f)
    for _ in range(2):  # with the check, and without it
        with pytest.raises(ValueError) as caught:
            guarded(x)
        assert caught.value is own


def test_guard_gradients_says_where_f_could_not_be_looked_at(gt, x):
    calls = itertools.count()  # which no snapshot puts back

    def f(x):
        if next(calls) == 0:
            raise ValueError("the first time")
        return (x * x).sum()

    with pytest.warns(GradtoolsWarning, match="nothing was checked.*the first time"):
        value = gt.guard_gradients(f)(x)
    assert abs(float(value) - float((X * X).sum())) < 1e-6
