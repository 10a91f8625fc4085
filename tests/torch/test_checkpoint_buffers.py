"""Operations whose backward pass reads what the forward pass has drawn or chosen, in a checkpoint.

PyTorch saves the noise of rrelu before it is drawn, and ends the second computation as soon as all
is saved: its gradient then is uninitialised memory (torch#193671). The oracle is the plain call.
"""

from __future__ import annotations

import itertools

import pytest
import torch
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import gradtools.torch as gt

D = torch.float64
SHAPES = {"rows": (5, 4), "signals": (2, 3, 6), "images": (2, 3, 6, 6), "volumes": (2, 3, 6, 6, 6)}

OPERATIONS = {
    "rrelu": (lambda x: functional.rrelu(x, training=True), "rows"),
    "rrelu, then linear": (lambda x: 2 * torch.rrelu(x, 0.1, 0.3, True), "rows"),
    "RReLU": (torch.nn.RReLU(), "images"),
    "noise that f holds": (
        lambda x: torch._C._nn.rrelu_with_noise(x, torch.empty_like(x), 0.1, 0.3, True),
        "rows",
    ),
    "dropout": (lambda x: functional.dropout(x, 0.5, True), "rows"),
    "native_dropout": (lambda x: torch.native_dropout(x, 0.5, True)[0], "rows"),
    "alpha_dropout": (lambda x: functional.alpha_dropout(x, 0.5, True), "rows"),
    "feature_alpha_dropout": (lambda x: functional.feature_alpha_dropout(x, 0.5, True), "images"),
    "dropout1d": (lambda x: functional.dropout1d(x, 0.5, True), "signals"),
    "dropout2d": (lambda x: functional.dropout2d(x, 0.5, True), "images"),
    "dropout3d": (lambda x: functional.dropout3d(x, 0.5, True), "volumes"),
    "fractional_max_pool2d": (lambda x: functional.fractional_max_pool2d(x, 2, 3), "images"),
    "fractional_max_pool3d": (lambda x: functional.fractional_max_pool3d(x, 2, 3), "volumes"),
    "max_pool2d": (lambda x: functional.max_pool2d(x, 2), "images"),
    "attention": (
        lambda x: functional.scaled_dot_product_attention(x, x, x, dropout_p=0.3),
        "signals",
    ),
    "gumbel_softmax": (lambda x: functional.gumbel_softmax(x), "rows"),
    "gamma": (lambda x: torch.distributions.Gamma(x.abs() + 1, 1.0).rsample(), "rows"),
    "dirichlet": (lambda x: torch.distributions.Dirichlet(x.abs() + 1).rsample(), "rows"),
    "lstm": (torch.nn.LSTM(6, 6, 2, dropout=0.5, dtype=D), "signals"),
}


def gradient(f, shape):
    """With memory that was in use before, so that what is not written shows."""
    x = torch.linspace(-1, 1, torch.Size(shape).numel(), dtype=D).reshape(shape).cos() - 0.8
    x.requires_grad_()
    torch.manual_seed(3)
    used = [torch.full_like(x, 7e7) for _ in range(20)]
    del used
    y = f(x)
    y = y[0] if isinstance(y, tuple) else y
    return torch.autograd.grad((y * torch.arange(y.numel()).reshape(y.shape)).sum(), x)[0]


@pytest.mark.slow_at("rrelu")
@pytest.mark.parametrize("name", OPERATIONS)
def test_a_checkpoint_has_the_gradient_of_the_plain_call(name):
    f, shape = OPERATIONS[name]
    for _ in range(3):
        expected = gradient(f, SHAPES[shape])
        assert torch.equal(gradient(gt.checkpoint(f), SHAPES[shape]), expected)


def test_what_is_computed_again_is_computed_to_its_end():
    """torch.utils.checkpoint does where it is told so."""
    calls = itertools.count(1)

    def f(x):
        y = functional.rrelu(x, training=True)
        next(calls)
        return y

    gradient(gt.checkpoint(f), (5, 4))
    assert next(calls) == 3


def test_plain_checkpoints_still_end_before_the_noise_is_drawn():
    """When this fails, torch#193671 is mended, and gradtools need not go to the end."""
    calls = []

    def f(x):
        y = functional.rrelu(x, training=True)
        calls.append(1)
        return y

    gradient(lambda x: checkpoint(f, x, use_reentrant=False), (5, 4))
    assert len(calls) == 1
