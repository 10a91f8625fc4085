"""Tests gradients with respect to the factor, bound or gradient that is passed to an edit.

At first order, an edit treats these arrays as constants, so a gradient with respect to them raises
an error. An edited gradient depends on these arrays, so second derivatives with respect to them
exist.
"""

from __future__ import annotations

import functools

import numpy as np
import pytest

from gradtools.errors import DisconnectedInputError, GradtoolsError

CUT = {
    "reverse_gradient": lambda gt, x, s: gt.reverse_gradient(x, s),
    "scale_gradient": lambda gt, x, s: gt.scale_gradient(x, s),
    "clip_gradient, max_norm": lambda gt, x, s: gt.clip_gradient(x, max_norm=s),
    "clip_gradient, max_value": lambda gt, x, s: gt.clip_gradient(x, max_value=s),
    "replace_gradient": lambda gt, x, s: gt.replace_gradient(
        x, s * gt.asarray(np.array([1.0, 2.0]))
    ),
    "transform_gradient": lambda gt, x, s: gt.transform_gradient(x, lambda c: s * c),
    "straight_through": lambda gt, x, s: gt.straight_through(lambda x: s * x)(x),
    "stop_gradient": lambda gt, x, s: x * gt.stop_gradient(s),
}


def at(gt):
    return gt.asarray(np.array([3.0, 4.0])), gt.asarray(np.array(0.5))


def loss(gt, edit):
    return lambda x, s: (CUT[edit](gt, x, s) ** 2).sum()


@pytest.mark.slow_at(("jax", "clip_gradient, max_norm"))
@pytest.mark.parametrize("edit", CUT)
def test_the_derivative_to_what_else_an_edit_is_given_is_refused(gt, edit):
    x, s = at(gt)
    with pytest.raises(DisconnectedInputError, match="argument 1 does not reach the output"):
        gt.grad(loss(gt, edit), 1)(x, s)


@pytest.mark.slow_at(("jax", "clip_gradient, max_norm"))
@pytest.mark.parametrize("edit", ["reverse_gradient", "scale_gradient", "clip_gradient, max_norm"])
def test_an_edited_gradient_is_differentiated_by_what_it_depends_on(gt, edit):
    """Compare with d/ds |dx|^2, where the edited gradient dx is -2 s x, 2 s x or s x / |x|."""
    x, s = at(gt)

    def squared(s):
        return (gt.grad(lambda x: loss(gt, edit)(x, s))(x) ** 2).sum()

    expected = {"clip_gradient, max_norm": 2 * 0.5}.get(edit, 8 * 0.5 * 25)
    assert float(gt.grad(squared)(s)) == pytest.approx(expected, rel=1e-12)


FORWARD = ("reverse_gradient", "scale_gradient", "straight_through", "stop_gradient")


@pytest.mark.parametrize("edit", FORWARD)
def test_a_tangent_of_what_else_an_edit_is_given_moves_nothing(gt, edit):
    x, s = at(gt)
    factor = {"reverse_gradient": -0.5, "straight_through": 1.0}.get(edit, 0.5)
    for dx in (2 * x, 0 * x):
        _, dy = gt.jvp(functools.partial(CUT[edit], gt), (x, s), (dx, s))
        np.testing.assert_array_equal(gt.to_numpy(dy), factor * gt.to_numpy(dx))


@pytest.mark.parametrize("scale", [-1, -0.5, np.float32(-1), np.int64(-2), float("-inf")])
def test_a_negative_number_is_no_scale_of_a_reversal(gt, scale):
    with pytest.raises(GradtoolsError, match=r"scale is -.*must not be negative.*scale_gradient"):
        gt.reverse_gradient(at(gt)[0], scale)
    gt.scale_gradient(at(gt)[0], scale)


BOUNDS = ("max_norm", "max_value")
Z = np.array([3.0 + 4.0j, 0.1])


def clipped(gt, bound):
    """Return the clipped gradient of sum |x|^2 as a function of x and the bound."""
    square = lambda x: (gt.xp.abs(x) ** 2).sum()
    loss = lambda x, s: square(gt.clip_gradient(x, **{bound: s}))
    return gt.grad(loss)


@pytest.mark.parametrize("bound", BOUNDS)
@pytest.mark.parametrize(
    "number", [-1, -0.5, np.float32(-1), np.int64(-2), np.array(-1.0), float("-inf")]
)
def test_a_negative_number_is_no_bound_of_a_clip(gt, bound, number):
    with pytest.raises(GradtoolsError, match=rf"{bound} is -.*it must not be negative"):
        clipped(gt, bound)(at(gt)[0], number)


@pytest.mark.parametrize("bound", BOUNDS)
def test_a_negative_array_on_the_host_is_no_bound_of_a_clip(gt, bound):
    for number in (np.array(-1.0), np.array(-1), np.array(-1, np.float32)):
        with pytest.raises(GradtoolsError, match=rf"{bound} is -1.*it must not be negative"):
            clipped(gt, bound)(at(gt)[0], gt.asarray(number))


@pytest.mark.slow
@pytest.mark.parametrize("x", [np.array([3.0, 4.0]), Z], ids=["real", "complex"])
@pytest.mark.parametrize("bound", BOUNDS)
@pytest.mark.parametrize("way", ["vmap", "compile"])
def test_a_traced_negative_bound_gives_nan(gt, way, bound, x):
    g, x = clipped(gt, bound), gt.asarray(x)
    at_bound = {
        "vmap": lambda s: gt.vmap(lambda s: g(x, s))(s[None])[0],
        "compile": gt.compile(lambda s: g(x, s)),
    }[way]
    for number in (-1.0, -1e-3, 0.0, 1.0):
        found = at_bound(gt.asarray(np.array(number)))
        if number < 0:
            assert np.isnan(gt.to_numpy(found)).all()
        else:
            np.testing.assert_allclose(gt.to_numpy(found), gt.to_numpy(g(x, number)), rtol=1e-12)


def test_a_zero_and_an_array_of_any_sign_are(gt):
    x, s = at(gt)
    for scale, factor in ((0, 0.0), (-0.0, 0.0), (-s, 0.5), (2**70, -(2.0**70))):
        found = gt.grad(lambda x, scale=scale: gt.reverse_gradient(x, scale).sum())(x)
        assert gt.to_numpy(found).tolist() == [factor] * 2


@pytest.mark.parametrize(
    "edit",
    [
        lambda gt, x, n: gt.reverse_gradient(x, n),
        lambda gt, x, n: gt.scale_gradient(x, -n),
        lambda gt, x, n: gt.clip_gradient(x, max_norm=n),
        lambda gt, x, n: gt.clip_gradient(x, max_value=n),
    ],
)
def test_an_integer_that_no_float_holds_is_refused_in_a_sentence(gt, edit):
    with pytest.raises(GradtoolsError, match=r"is an integer of 3322 bits, .* too large"):
        edit(gt, at(gt)[0], 10**1000)


LEAVES = (np.zeros((0, 3)), np.arange(3), np.array([True]), 3, 2.5, "a", None, [], {})


@pytest.mark.parametrize("edit", [*CUT][:6])
def test_leaves_without_a_gradient_pass(gt, edit):
    x, s = at(gt)
    as_leaf = lambda leaf: gt.asarray(leaf) if isinstance(leaf, np.ndarray) else leaf
    for leaf in map(as_leaf, LEAVES):
        tree = {"x": x, "other": leaf}
        apply = {
            "replace_gradient": lambda t: gt.replace_gradient(t, {**t, "x": s * t["x"]}),
            "transform_gradient": lambda t: gt.transform_gradient(
                t, lambda c: {**c, "x": 2 * c["x"]}
            ),
        }.get(edit, lambda t: CUT[edit](gt, t, s))
        same = apply(tree)["other"]
        assert type(same) is type(leaf)
        assert np.shape(same) == np.shape(leaf)
        value, pull = gt.vjp(lambda x, leaf=leaf: apply({"x": x, "other": leaf})["x"], x)
        assert gt.to_numpy(pull(value)[0]).shape == (2,)
