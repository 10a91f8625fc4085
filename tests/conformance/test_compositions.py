"""Tests compositions of operators that used to fail or return wrong numbers."""

from __future__ import annotations

import numpy as np
import pytest

from gradtools import GradtoolsError

pytestmark = pytest.mark.filterwarnings("ignore::gradtools.errors.GradtoolsWarning")


def array(gt, *shape):
    return gt.asarray(np.sin(1.0 + np.arange(float(np.prod(shape)))).reshape(shape))


@pytest.mark.slow_at("jax")
def test_a_forward_jacobian_is_taken_where_entries_share_memory(gt):
    x = gt.xp.broadcast_to(array(gt, 2), (3, 2))
    cube = lambda x: x**3
    forward, reverse = (gt.jacobian(cube, mode=mode)(x) for mode in ("forward", "reverse"))
    assert forward.shape == (3, 2, 3, 2)
    np.testing.assert_allclose(gt.to_numpy(forward), gt.to_numpy(reverse), rtol=1e-12)


def test_a_tangent_is_pushed_where_entries_share_memory(gt):
    """The gradient of a sum is an expanded array whose entries share memory."""
    x = gt.grad(gt.xp.sum)(array(gt, 2, 3))
    _, pushed = gt.jvp(lambda x: x**3, (x,), (array(gt, 2, 3),))
    np.testing.assert_allclose(gt.to_numpy(pushed), 3 * gt.to_numpy(array(gt, 2, 3)), rtol=1e-12)


def test_a_forward_jacobian_is_pushed_along(gt):
    x = array(gt, 3)
    slopes = lambda x: gt.xp.sum(gt.jacobian(lambda x: x**3, mode="forward")(x), axis=0)
    _, pushed = gt.jvp(slopes, (x,), (x,))
    np.testing.assert_allclose(gt.to_numpy(pushed), 6 * gt.to_numpy(x) ** 2, rtol=1e-12)


@pytest.mark.slow_at("jax")
def test_a_frozen_function_that_edits_a_cotangent_refuses_a_second_derivative(gt):
    """A second derivative raises an error, because it would edit two summands separately."""
    x, y = array(gt, 3), array(gt, 3) + 1
    for edit in (
        lambda x: gt.clip_gradient(x, max_norm=0.45),
        lambda x: gt.transform_gradient(x, lambda c: 2 * c + c**2 / 9),
        lambda x: gt.replace_gradient(x, y),
    ):
        G = gt.frozen(lambda x, edit=edit: edit(x) ** 2)
        loss = lambda x, G=G: gt.xp.sum(G(x) ** 2)
        assert np.isfinite(gt.to_numpy(gt.grad(loss)(x))).all()
        for mode in ("forward_over_reverse", "reverse_over_reverse"):
            with pytest.raises(
                (GradtoolsError, TypeError), match=r"reverse rule only|forward-mode"
            ):
                gt.hvp(loss, (x,), (x,), mode)
        slopes = lambda x, loss=loss: gt.xp.sum(gt.grad(loss)(x) * x)
        with pytest.raises(GradtoolsError, match=r"contains (clip|transform|replace)_gradient"):
            gt.grad(slopes)(x)


def test_in_pytorch_an_edit_in_a_frozen_function_is_differentiated_along_its_cotangents():
    gt = pytest.importorskip("gradtools.torch")
    z, y, u = array(gt, 3), array(gt, 3) + 1, array(gt, 3) * 2
    plain = lambda z: gt.transform_gradient(z, lambda c: 2 * c + c**2 / 9) ** 2
    slope = lambda G: lambda y: (u * gt.grad(lambda z: (y * G(z) ** 2).sum())(z)).sum()
    found, expected = (gt.to_numpy(gt.grad(slope(G))(y)) for G in (gt.frozen(plain), plain))
    np.testing.assert_allclose(found, expected, rtol=1e-12)


def test_a_known_gradient_may_be_the_array_itself_under_native_transforms(gt, backend_name):
    """torch.func unwraps both arguments of the edit to one tensor, which PyTorch cannot save."""
    x = array(gt, 3)
    f = lambda y: gt.xp.sum(gt.replace_gradient(y, x) ** 2)
    if backend_name == "torch":
        from torch import func as native
    else:
        import jax as native
    for grad in (gt.grad, native.grad):
        np.testing.assert_array_equal(gt.to_numpy(grad(f)(x)), gt.to_numpy(x))


@pytest.mark.sweep_at("jax")
def test_forward_mode_does_not_enter_a_chunked_function_that_edits_a_cotangent(gt):
    """The PyTorch backend used to transpose the pullback of `chunked` without an error."""
    x = array(gt, 3)
    f = gt.chunked(lambda x: gt.clip_gradient(x, max_norm=0.45) ** 2, 2)
    loss = lambda x: 100.0 * gt.xp.sum(f(x) ** 2)
    edit = r"reverse rule only|forward-mode"
    with pytest.raises((GradtoolsError, TypeError), match=edit):
        gt.jvp(f, (x,), (x,))
    with pytest.raises((GradtoolsError, TypeError), match=edit):
        gt.hvp(loss, (x,), (x,), "forward_over_reverse")
    gradient, _ = gt.hvp(loss, (x,), (x,), "reverse_over_reverse")
    sizes = np.split(gt.to_numpy(gradient[0]), [2])
    np.testing.assert_allclose([np.linalg.norm(part) for part in sizes], 0.45, rtol=1e-12)


def test_a_frozen_host_function_has_a_second_derivative(gt):
    """The jvp of a frozen host function is computed by transposing its vjp."""
    sin = gt.host_function(np.sin)
    sin.defvjp(lambda x: (sin(x), x), lambda x, c: (gt.xp.cos(x) * c,))
    x = array(gt, 3)
    G = gt.frozen(sin)
    _, (found,) = gt.hvp(lambda x: gt.xp.sum(G(x)), (x,), (x,), "reverse_over_reverse")
    at = gt.to_numpy(x)
    np.testing.assert_allclose(gt.to_numpy(found), -np.sin(at) * at, rtol=1e-12)


@pytest.mark.parametrize("mode", ["reverse_over_reverse", "forward_over_reverse"])
def test_a_second_derivative_inside_a_checkpoint_is_right(gt, mode):
    """torch.utils.checkpoint recomputes f while f is differentiated, and loses the tangent."""
    x = array(gt, 3)
    power = lambda x: gt.xp.sum((x * x) * (x * x))
    found = gt.checkpoint(lambda x: gt.hvp(power, (x,), (x,), mode)[1][0])(x)
    np.testing.assert_allclose(gt.to_numpy(found), 12 * gt.to_numpy(x) ** 3, rtol=1e-12)


@pytest.mark.sweep_at("jax")
def test_what_rows_share_is_clipped_once_and_their_own_is_clipped_each(gt):
    """vmap clips the gradient of an unbatched value once; per_example_grad clips each gradient."""
    w, rows = array(gt, 2), array(gt, 3, 2)
    by_clip = lambda w: gt.clip_gradient(w, max_norm=1e-3)
    outside = gt.grad(lambda w: gt.xp.sum(gt.vmap(lambda x: by_clip(w) * x)(rows)))(w)
    each = gt.per_example_grad(lambda w, x: gt.xp.sum(by_clip(w) * x))(w, rows)
    norm = lambda x: float(gt.xp.linalg.vector_norm(x))
    np.testing.assert_allclose(norm(outside), 1e-3, rtol=1e-12)
    np.testing.assert_allclose([norm(row) for row in each], 1e-3, rtol=1e-12)
