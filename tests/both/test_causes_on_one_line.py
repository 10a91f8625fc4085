"""On a line with several operations, why_zero names each cause of lost gradients, but no mask."""

from __future__ import annotations

import numpy as np
import pytest

X = np.float32([[0.2, -0.3, 1.0], [0.5, 0.1, -0.4]])


MASKED = {  # functions of gt.xp and x on one line each
    "argmax": lambda xp, x: xp.where(xp.all(xp.isfinite(x), axis=-1), xp.argmax(x, axis=-1), -1),
    "otherwise": lambda xp, x: xp.where(xp.any(xp.isnan(x), axis=-1), -1, xp.argmax(x, axis=-1)),
    "two masks": lambda xp, x: xp.where(
        x[0, 0] > 0, xp.where(xp.all(xp.isfinite(x)), xp.argmax(x), -1), 7
    ),
    "one-hot": lambda xp, x: xp.where(xp.isnan(x), 0, xp.eye(3)[xp.argmax(x, axis=-1)]),
}


@pytest.mark.parametrize("name", MASKED)
def test_a_mask_does_not_hide_the_cause(gt, name):
    f = MASKED[name]
    assert causes(gt, lambda x: gt.xp.sum(f(gt.xp, x)) * 1.0) == [("discrete", "argmax")]


def test_a_mask_on_its_own_line_is_no_cause(gt):
    def sample(x):
        ok = gt.xp.all(gt.xp.isfinite(x), axis=-1)
        best = gt.xp.argmax(x, axis=-1)
        return gt.xp.sum(gt.xp.where(ok, best, -1)) * 1.0

    assert causes(gt, sample) == [("discrete", "argmax")]


def test_the_kind_of_the_data_is_reported(gt):
    where, xp = gt.xp.where, gt.xp
    rounded = lambda x: xp.sum(where(xp.isnan(x), 0.0, xp.round(x)))
    stopped = lambda x: xp.sum(where(xp.isfinite(x), gt.stop_gradient(x), 0.0))
    cast = lambda x: xp.sum(where(x > 0, xp.astype(x, xp.int32), 0)) * 1.0
    ordered = lambda x: xp.sum(where(xp.isfinite(x), xp.argsort(x), 0)) * 1.0
    kinds = [[kind for kind, _ in causes(gt, f)] for f in (rounded, stopped, cast, ordered)]
    assert kinds == [["zero_derivative"], ["detached"], ["integer_cast"], ["discrete"]]


def test_a_term_of_the_loss_loses_its_gradient_in_the_data(gt):
    term = MASKED["argmax"]
    report = gt.why_zero(lambda x: gt.xp.sum(x**2) + 1.0 * gt.xp.sum(term(gt.xp, x)), gt.asarray(X))
    assert [(f.operation, f.whole) for f in report] == [("argmax", False)]


def test_a_condition_alone_is_the_cause(gt):
    where = gt.xp.where
    assert causes(gt, lambda x: gt.xp.sum(where(x > 0, 1.0, 0.0))) == [("discrete", "gt")]

    def counted(x):
        count = gt.asarray(np.float32(0))
        for k in range(3):
            count = where(x[0, k] > 0, count + 1, count)
        return count

    assert causes(gt, counted) == [("discrete", "gt")]


@pytest.mark.jax
def test_a_condition_in_a_loop_is_the_cause_although_the_loop_carries_the_data():
    lax = pytest.importorskip("jax.lax")
    import gradtools.jax as gt

    step = lambda count, x: (gt.xp.where(x > 0, count + 1, count), None)
    assert causes(gt, lambda x: lax.scan(step, 0.0, x[0])[0]) == [("discrete", "gt")]


def test_all_causes_on_one_line_are_reported(gt):
    xp = gt.xp
    added = lambda x: xp.sum(xp.argmax(x, axis=-1) + xp.sum(x > 0, axis=-1)) * 1.0
    turned = lambda x: xp.sum(xp.sum(x > 0, axis=-1) + xp.argmax(x, axis=-1)) * 1.0
    assert causes(gt, added) == [("discrete", "argmax"), ("discrete", "gt")]
    assert causes(gt, turned) == [("discrete", "gt"), ("discrete", "argmax")]
    assert "discrete (argmax, gt)" in str(gt.why_zero(added, gt.asarray(X)))


def test_a_later_cause_behind_a_mask_is_reported(gt):
    xp = gt.xp
    f = lambda x: xp.sum(xp.where(xp.any(xp.isnan(r := xp.round(x))), 0, xp.argmax(r))) * 1.0
    assert [kind for kind, _ in causes(gt, f)] == ["zero_derivative", "discrete"]


EDITS = {  # functions of gt, an array w and an argument s of an edit
    "scale": lambda gt, w, s: gt.scale_gradient(w, s),
    "bound": lambda gt, w, s: gt.clip_gradient(w, max_norm=s),
    "replacement": lambda gt, w, s: gt.replace_gradient(w, s * w),
}


@pytest.mark.parametrize("name", EDITS)
def test_an_edit_has_no_derivative_for_its_own_arguments(gt, name):
    f = lambda s: gt.xp.sum(EDITS[name](gt, gt.asarray(X), s) ** 2)
    (finding,) = gt.why_zero(f, gt.asarray(np.float32(0.5))).findings
    assert finding.kind == "edit" and finding.whole


@pytest.mark.jax
def test_an_integer_that_selects_does_not_hide_the_cause():
    jnp = pytest.importorskip("jax.numpy")
    lax = pytest.importorskip("jax.lax")
    import gradtools.jax as gt

    count = lambda x: jnp.minimum(jnp.sum(x > 0, dtype=jnp.int32), 2)
    f = lambda x: lax.select_n(count(x), jnp.argmax(x), *jnp.asarray([3, 4])) * 1.0
    assert causes(gt, f) == [("discrete", "argmax")]


@pytest.mark.torch
def test_the_mask_of_masked_fill_does_not_hide_the_cause():
    pytest.importorskip("torch")
    import gradtools.torch as gt

    filled = lambda x: x.argmax(-1).masked_fill(x.isnan().any(-1), -1).sum() * 1.0
    assert causes(gt, filled) == [("discrete", "argmax")]
    of_booleans = lambda x: (x.argmax(-1) > 1).masked_fill(x.isnan().any(-1), False).sum() * 1.0
    assert ("discrete", "argmax") in causes(gt, of_booleans)


def causes(gt, f):
    """Return the kind and operation of each finding; the whole gradient must be lost at each."""
    report = gt.why_zero(f, gt.asarray(X))
    assert all(finding.whole for finding in report)
    return [(finding.kind, finding.operation) for finding in report]
