"""Rounding is not taken for a map that is not linear; what is not linear is refused as ever."""

import numpy as np
import pytest

from gradtools import GradtoolsError

N = 64
BIG = {np.float64: 3.3e13, np.float32: 3.3e5}
LINEAR = {
    "cancels": lambda x, big: (x * big + x) - x * big,
    "sums cancel": lambda x, big: (x * big + x).sum() - (x * big).sum() + 0 * x,
    "shifted": lambda x, big: (x + big * x.mean()) - big * x.mean(),
    "rounds to half precision": lambda x, big: x.astype(np.float16) * np.float16(1.1),
}
NOT_LINEAR = {
    "affine": lambda x, big: x + 0.01,
    "square": lambda x, big: x * x,
    "abs": lambda x, big: np.abs(x),
    "clip": lambda x, big: np.clip(x, -10, 10),
    "sort": lambda x, big: np.sort(x),
    "norm": lambda x, big: np.linalg.norm(x) + 0 * x,
    "clipped norm": lambda x, big: x / max(1.0, float(np.linalg.norm(x))),
    "square beneath what cancels": lambda x, big: (x * 1e3 + x * x) - x * 1e3,
}


def _gradient(gt, kernel, dtype):
    """Of 2 x, whose tangent is said to be kernel(dx), with the identity for its transpose."""
    host = gt.host_function(lambda x: kernel(x, dtype(BIG[dtype])).astype(dtype))
    host.defvjp(lambda x: (host(x), None), lambda _, ct: (ct,))
    rule = gt.custom_rule(lambda x: 2 * x)
    rule.defjvp(lambda xs, dxs: (2 * xs[0], host(dxs[0])))
    x = gt.asarray(np.linspace(0.5, 1.5, N).astype(dtype))
    return gt.to_numpy(gt.grad(lambda x: rule(x).sum())(x))


@pytest.mark.sweep_at(("jax", "cancels"))
@pytest.mark.parametrize("dtype", BIG)
@pytest.mark.parametrize("name", LINEAR)
def test_a_linear_kernel_whose_terms_cancel_is_transposed(gt, dtype, name):
    np.testing.assert_array_equal(_gradient(gt, LINEAR[name], dtype), np.ones(N))


@pytest.mark.slow_at(("jax", "square", "float32"))
@pytest.mark.parametrize("dtype", BIG)
@pytest.mark.parametrize("name", NOT_LINEAR)
def test_a_kernel_that_is_not_linear_is_refused(gt, dtype, name):
    with pytest.raises(GradtoolsError, match=r"not linear|must be linear"):
        _gradient(gt, NOT_LINEAR[name], dtype)
