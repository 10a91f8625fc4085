"""The check that a rule is linear allows for the large rounding errors of 16-bit dtypes."""

import pytest
import torch

import gradtools.torch as gt
from gradtools import GradtoolsError

N = 64
A = torch.randn(N, N, generator=torch.Generator().manual_seed(0))


def _push(pull, dtype):
    rule = gt.custom_rule(lambda x: 2 * x)
    rule.defvjp(lambda x: (2 * x, None), lambda _, ct: (pull(ct),))
    x = torch.linspace(0.5, 1.5, N).to(dtype)
    return gt.jvp(rule, (x,), (torch.ones_like(x),))[1]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_linear_rule_in_16_bits_is_transposed_whatever_cancels(dtype):
    B = A.to(dtype)
    pushed = _push(lambda ct: B @ (B.T @ ct) - B @ (B.T @ ct * 1.01), dtype)
    assert pushed.isfinite().all()
    assert _push(lambda ct: (ct * 300 + ct) - ct * 300, dtype).shape == (N,)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_rule_in_16_bits_that_is_not_linear_is_refused(dtype):
    for pull in (torch.relu, lambda ct: ct.clamp(-10, 10), lambda ct: ct + 0.01):
        with pytest.raises(GradtoolsError, match=r"not linear in (its|the) cotangents"):
            _push(pull, dtype)


def test_a_rule_that_computes_in_half_precision_is_linear():
    half = lambda ct: (ct.bfloat16() * A[0].bfloat16()).float()
    torch.testing.assert_close(_push(half, torch.float32), A[0].bfloat16().float())


@pytest.mark.parametrize("halved", [torch.abs, torch.relu], ids=["abs", "relu"])
@pytest.mark.parametrize("shape", [(), (1,), (2,), (5,)])
@pytest.mark.parametrize("mode", ["forward", "reverse"])
def test_a_map_that_is_linear_on_one_side_alone_is_refused(halved, shape, mode):
    f, x = gt.custom_rule(torch.sin), torch.full(shape, 0.5)
    if mode == "forward":
        f.defvjp(lambda x: (x.sin(), x), lambda x, c: (x.cos() * halved(c),))
        run = lambda: gt.jvp(f, (x,), (x,))
    else:
        f.defjvp(lambda p, t: (p[0].sin(), p[0].cos() * halved(t[0])))
        run = lambda: gt.grad(lambda x: f(x).sum())(x)
    with pytest.raises(GradtoolsError, match="not linear"):
        run()
