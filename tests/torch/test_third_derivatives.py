"""Third derivatives of normalisations, of which PyTorch leaves a term out.

(torch#175754, torch#186256)

The oracle is the normalisation by plain operations.
"""

import pytest
import torch
import torch.nn.functional as F

import gradtools
import gradtools.torch as gt

D = torch.float64
X = torch.randn(4, 5, dtype=D, generator=torch.Generator().manual_seed(0))
T = torch.randn(4, 5, dtype=D, generator=torch.Generator().manual_seed(1))
W = torch.linspace(0.5, 2.0, 5, dtype=D)


def _plain(axis):
    def norm(x, w):
        mean, var = x.mean(axis, keepdim=True), x.var(axis, unbiased=False, keepdim=True)
        return (x - mean) / torch.sqrt(var + 1e-5) * w

    return norm


RULES = {
    "jvp": lambda norm: lambda xs, dxs: gt.jvp(norm, xs, dxs),
    "linearize": lambda norm: lambda xs, dxs: (norm(*xs), gt.linearize(norm, *xs)[1](*dxs)),
}


@pytest.mark.parametrize("made", RULES)
def test_a_rule_whose_jvp_is_that_of_layer_norm_has_a_gradient(made):
    norm = lambda x: F.layer_norm(x, (5,), W)
    rule = gt.custom_rule(norm)
    rule.defjvp(RULES[made](norm))
    loss = lambda f: lambda x: (f(x) ** 3).sum()
    plain = lambda x: _plain(-1)(x, W)
    want = gt.grad(loss(plain))(X)
    torch.testing.assert_close(gt.grad(loss(rule))(X), want)
    torch.testing.assert_close(torch.func.grad(loss(rule))(X), want)
    torch.testing.assert_close(gt.jvp(rule, (X,), (T,))[1], gt.jvp(plain, (X,), (T,))[1])
    for second in (gt.grad, torch.func.grad):  # of its tangent, which PyTorch has wrong
        twice = lambda f, grad=second: grad(lambda x: grad(loss(f))(x).square().sum())(X)
        torch.testing.assert_close(twice(rule), twice(plain))


HELD = torch.tensor([2.0], dtype=D, requires_grad=True)


@pytest.mark.parametrize("made", RULES)
def test_a_forward_rule_that_reads_a_global_parameter_is_refused(made):
    """Also where it holds leaves of its own, those of a derivative within."""
    rule = gt.custom_rule(lambda x: F.layer_norm(x, (5,), W))
    inner = RULES[made](lambda x: F.layer_norm(x, (5,), W))

    @rule.defjvp
    def _(xs, dxs):
        y, dy = inner(xs, dxs)
        return y, dy * HELD

    with pytest.raises(gradtools.GradtoolsError, match="closes over a tensor"):
        gt.grad(lambda x: rule(x).sum())(X)
