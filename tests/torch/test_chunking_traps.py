"""Compares chunked gradients with the plain loop over chunks for common pitfalls in PyTorch.

`tests/torch/replay_programs.py` contains programs with state and random numbers.
"""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from torch import nn

import gradtools.torch as gt

pytestmark = pytest.mark.filterwarnings("ignore:chunked. .* is a batch normalization")

CHUNK = 3
# chunks of 3, 3, 3 and 2 rows
X = torch.linspace(-1.0, 9.0, 33, dtype=torch.float64).sin().reshape(11, 3)


def contrast(y):
    """Return a loss that couples all rows of the batch."""
    y = y.reshape(len(y), -1)
    return torch.logsumexp(y @ y.T, 1).sum() - (y * y.roll(1, 0)).sum()


def same(a, b, tolerance=0.0):
    if a is None or b is None:
        return a is b
    if isinstance(a, torch.Tensor):
        if a.shape != b.shape or a.dtype != b.dtype:
            return False
        if not tolerance:
            return torch.equal(a, b)
        return bool((a - b).abs().max() <= tolerance * (1 + b.abs().max()))
    return a == b


def streams():
    _, keys, *rest = np.random.get_state()  # noqa: NPY002 - the stream of the process
    numpy = (keys.tobytes(), *rest)
    return torch.get_rng_state().numpy().tobytes(), random.getstate(), numpy


def state_of(model):
    return {k: v.clone() for k, v in model.named_buffers()}


def linear():
    return nn.Linear(3, 3)


class Counter(nn.Module):
    """A module that counts its calls in a buffer and whose output depends on the count."""

    def __init__(self):
        super().__init__()
        self.linear = linear()
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))

    def forward(self, x):
        self.steps += 1
        return self.linear(x) / self.steps.clone() + x * self.linear.bias


def test_an_empty_batch_gives_empty_rows():
    f = linear()
    out = gt.chunked(f, CHUNK)(torch.zeros(0, 3))
    assert out.shape == (0, 3)
    out.sum().backward()
    assert not any(p.grad.any() for p in f.parameters())


@pytest.mark.parametrize("hook", ["tensor", "post-accumulate"])
def test_hooks_of_parameters_fire_once_on_the_sum(hook):
    def run(f):
        torch.manual_seed(0)
        model, seen = linear().double(), []

        def tensor_hook(grad):
            seen.append(grad.clone())
            return grad.clamp(-1, 1)

        if hook == "tensor":
            model.weight.register_hook(tensor_hook)
        else:
            model.weight.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.clone()))
        contrast(f(model)(X)).backward()
        return seen, model.weight.grad

    plain = run(lambda model: lambda x: torch.cat([model(c) for c in x.split(CHUNK)]))
    ours = run(lambda model: gt.chunked(model, CHUNK))
    assert len(plain[0]) == len(ours[0]) == 1
    assert same(ours[0][0], plain[0][0], 1e-12) and same(ours[1], plain[1], 1e-12)


@pytest.mark.parametrize("size", [11, 12, 1, 2, 7])
def test_interleaved_chunks_come_out_in_the_order_of_the_batch(size):
    torch.manual_seed(0)
    model, x = Counter().double(), X[torch.arange(size) % 11] + torch.arange(size)[:, None]
    count = -(-size // CHUNK)
    y = torch.cat([model(x[i::count]) for i in range(count)])
    order = torch.tensor([k for i in range(count) for k in range(i, size, count)])
    plain = torch.empty_like(y).index_copy(0, order, y)
    weights = torch.linspace(1, 2, size, dtype=torch.float64)[:, None]
    (contrast(plain) + (plain * weights).sum()).backward()
    expected = model.linear.weight.grad.clone()
    model.zero_grad()
    model.steps.zero_()
    out = gt.chunked(model, CHUNK, interleaved=True)(x)
    (contrast(out) + (out * weights).sum()).backward()
    assert torch.equal(out, plain) and same(model.linear.weight.grad, expected, 1e-12)
    if size > 3:
        assert not torch.equal(y, plain)


def test_a_last_chunk_of_one_image_keeps_the_layout_of_its_channels():
    """view_as changes strides of axes of length 1, and PyTorch selects kernels by the strides."""
    x = torch.randn(7, 3, 4, 4).to(memory_format=torch.channels_last)
    found, expected = x.clone().requires_grad_(), x.clone().requires_grad_()
    pool = torch.nn.AdaptiveAvgPool2d(1)
    gt.chunked(pool, 3)(found).pow(2).sum().backward()
    pool(expected).pow(2).sum().backward()
    torch.testing.assert_close(found.grad, expected.grad)
