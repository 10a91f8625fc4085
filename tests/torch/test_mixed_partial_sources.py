"""`mixed_partial` is differentiable by everything that G reads, by operations or by Functions."""

from __future__ import annotations

import pytest
import torch

import gradtools.torch as gt

D = torch.float64


class _Product(torch.autograd.Function):
    """x w, whose jvp reads a copy of w that requires no grad."""

    @staticmethod
    def forward(x, w):
        return x * w

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs)
        ctx.copied = inputs[1].detach().clone()

    @staticmethod
    def backward(ctx, g):
        x, w = ctx.saved_tensors
        return g * w, g * x

    @staticmethod
    def jvp(ctx, dx, dw):
        return dx * ctx.copied


def _drawn(seed):
    return torch.randn(3, dtype=D, generator=torch.Generator().manual_seed(seed))


W, V = _drawn(0).requires_grad_(), _drawn(1).requires_grad_()
READS = {
    "an operation": lambda z: z.sin() * W,
    "a Function alone": lambda z: _Product.apply(z.sin(), W),
    "a Function, then an operation": lambda z: _Product.apply(z.sin(), W) * V,
    "an operation, then a Function": lambda z: _Product.apply(z * V, W).sin(),
    "both of one": lambda z: _Product.apply(z * V, W).sin() + W,
}


@pytest.mark.parametrize("name", READS)
def test_each_tensor_that_g_reads_gets_its_derivative(name):
    G, (y, z, u) = READS[name], map(_drawn, (2, 3, 4))
    f = lambda y, g: (y * g**3).sum()

    def plain():
        at_y, at_z = y.clone().requires_grad_(), z.clone().requires_grad_()
        (inner,) = torch.autograd.grad(f(at_y, G(at_z)), at_z, create_graph=True)
        return torch.autograd.grad((inner * u).sum(), at_y, create_graph=True)[0]

    found, expected = gt.mixed_partial(f, G, y, z, u), plain()
    torch.testing.assert_close(found, expected)
    grads = (
        torch.autograd.grad(x.sin().sum(), (W, V), allow_unused=True) for x in (found, expected)
    )
    for a, b in zip(*grads, strict=True):
        assert (a is None) == (b is None)
        if a is not None:
            torch.testing.assert_close(a, b)
