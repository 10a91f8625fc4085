"""A rule that returns None for every argument has zero derivatives in every mode."""

import numpy as np
import pytest

X = np.array([1.0, 2.0, 3.0])


def _of_bwd(gt):
    f = gt.custom_rule(lambda x, y: x * y)
    f.defvjp(lambda x, y: (x * y, None), lambda _, ct: (None, None))
    return lambda x: f(x, x)


def _of_jvp(gt):
    f = gt.custom_rule(lambda x: x * x)
    f.defjvp(lambda xs, dxs: (xs[0] * xs[0], None))
    return f


@pytest.mark.slow_at("jax")
@pytest.mark.parametrize("made", [_of_bwd, _of_jvp], ids=["bwd", "jvp"])
def test_its_derivatives_are_zero_in_both_modes_at_both_orders(gt, made):
    f, x = made(gt), gt.asarray(X)
    loss = lambda x: f(x).sum() + (x**3).sum()
    zero = lambda got: np.testing.assert_array_equal(gt.to_numpy(got), 0 * gt.to_numpy(got))
    value, pushed = gt.jvp(f, (x,), (x,))
    np.testing.assert_array_equal(gt.to_numpy(value), X * X)
    zero(pushed)
    zero(gt.vjp(f, x)[1](x)[0])
    zero(gt.linearize(f, x)[1](x))
    zero(gt.jacobian(f, mode="forward")(x))
    zero(gt.jvp(gt.vmap(f), (x,), (x,))[1])
    for mode in ("forward_over_reverse", "reverse_over_reverse"):
        gradient, product = gt.hvp(loss, (x,), (x,), mode=mode)
        np.testing.assert_allclose(gt.to_numpy(gradient[0]), 3 * X**2, rtol=1e-12)
        np.testing.assert_allclose(gt.to_numpy(product[0]), 6 * X**2, rtol=1e-12)
    second = gt.grad(lambda x: gt.grad(gt.frozen(loss))(x).sum())(x)
    np.testing.assert_allclose(gt.to_numpy(second), 6 * X, rtol=1e-12)
