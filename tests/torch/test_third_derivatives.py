"""Tests third derivatives of normalizations, from which PyTorch omits a term.

The issues are torch#175754 and torch#186256. The reference is the same normalization, computed by
plain operations.
"""

import pytest
import torch
import torch.nn.functional as F

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


NORMS = {
    "layer_norm": (lambda x, w: F.layer_norm(x, (5,), w), _plain(-1)),
    "batch_norm": (lambda x, w: F.batch_norm(x, None, None, w, training=True), _plain(0)),
}


@pytest.fixture(params=NORMS)
def norms(request):
    return NORMS[request.param]


def test_maml_with_several_inner_steps_is_right_to_any_order(norms):
    """Each inner gradient step increases the order of the outer derivative by one."""

    def after(norm):
        def loss(x):
            for _ in range(3):
                x = x - 0.1 * gt.grad(lambda x: (norm(x, W) ** 3 * T).sum())(x)
            return (norm(x, W) * T).sum()

        return gt.grad(loss)(X)

    ours, plain = map(after, norms)
    torch.testing.assert_close(ours, plain)


@pytest.mark.parametrize("trained", [True, False])
@pytest.mark.parametrize("kind", ["layer", "batch"])
def test_frozen_gives_second_derivatives_whether_its_parameters_require_grad(trained, kind):
    module = torch.nn.LayerNorm(5) if kind == "layer" else torch.nn.BatchNorm1d(5)
    module = module.to(D)
    with torch.no_grad():
        module.weight.copy_(W)
    module.requires_grad_(trained)
    second = lambda f: gt.grad(lambda x: (gt.grad(f)(x) ** 2).sum())(X)
    norm = _plain(-1 if kind == "layer" else 0)
    want = second(lambda x: (norm(x, W) ** 3).sum())
    G = gt.frozen(lambda x: (module(x) ** 3).sum())
    torch.testing.assert_close(second(G), want)


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
    # derivatives of the tangent are wrong in plain PyTorch
    for second in (gt.grad, torch.func.grad):
        twice = lambda f, grad=second: grad(lambda x: grad(loss(f))(x).square().sum())(X)
        torch.testing.assert_close(twice(rule), twice(plain))


REMADE = {
    "frozen": gt.frozen,
    "checkpoint": gt.checkpoint,
    "chunked": lambda f: lambda x: gt.chunked(lambda rows: f(rows[0])[None], 1)(x[None])[0],
}


@pytest.mark.parametrize("remade", REMADE)
def test_a_gradient_inside_of_a_recomputed_function_uses_the_same_kernels_again(norms, remade):
    """The inner gradient is differentiated twice more, by gt.grad and by the backward pass."""

    def penalty(norm, remade):
        forces = remade(lambda x: gt.grad(lambda x: (norm(x, W) ** 3).sum())(x))
        x = X.clone().requires_grad_()
        (gt.grad(lambda x: (forces(x) * T).sum())(x) * T.flip(0)).sum().backward()
        return x.grad

    ours, plain = norms
    torch.testing.assert_close(penalty(ours, REMADE[remade]), penalty(plain, lambda f: f))
