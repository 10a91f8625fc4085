"""Hooks that G sets while it runs: those on forward passes edit no gradient."""

import warnings

import torch

import gradtools.torch as gt
from gradtools import GradtoolsWarning

X = torch.linspace(-1.0, 1.0, 4, dtype=torch.float64)


class _Sets(torch.nn.Module):
    """Sets hooks at its first call, and leaves them."""

    def __init__(self, gradient):
        super().__init__()
        self.inner, self.gradient, self.done = torch.nn.Tanh(), gradient, False

    def forward(self, x):
        if not self.done:
            self.done = True
            self.inner.register_forward_hook(lambda module, args, out: out * 2)
            self.inner.register_forward_pre_hook(lambda module, args: None)
        y = self.inner(x)
        if self.gradient and y.requires_grad:
            y.register_hook(lambda ct: ct * 0.5)
        return (y**2).sum()


def _second(f):
    return gt.grad(lambda x: (gt.grad(f)(x) ** 2).sum())(X)


def test_a_forward_hook_is_not_taken_for_a_hook_on_a_gradient():
    want = _second(lambda x: ((2 * x.tanh()) ** 2).sum())
    with warnings.catch_warnings():
        warnings.simplefilter("error", GradtoolsWarning)
        torch.testing.assert_close(_second(gt.frozen(_Sets(False))), want)


def test_a_linear_function_is_known_as_such_in_float32():
    class Cubed(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return x**3

        @staticmethod
        def backward(ctx, g):
            (x,) = ctx.saved_tensors
            return g * 3 * x**2

    G = gt.frozen(Cubed.apply)
    for seed in range(10):
        x = torch.randn(5, generator=torch.Generator().manual_seed(seed))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", GradtoolsWarning)  # it keeps a graph, and says so
            _, (product,) = gt.hvp(lambda x: G(x).sum(), (x,), (torch.ones(5),))
        torch.testing.assert_close(product, 6 * x)
