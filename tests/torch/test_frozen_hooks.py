"""Hooks that G sets while it runs: those on forward passes edit no gradient."""

import sys
import warnings

import pytest
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


def test_a_hook_on_a_gradient_beside_a_forward_hook_is_seen(monkeypatch):
    monkeypatch.setattr(sys.modules["gradtools.torch.freezing"], "_TOLD", set())
    with pytest.warns(GradtoolsWarning, match="a hook on a gradient in G"):
        _second(gt.frozen(_Sets(True)))
