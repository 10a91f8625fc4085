"""Chunked gradients in PyTorch: each trap fails the usual way, and passes ours.

The usual way (`Cache`) is what gradient caches do: chunks forward under no_grad, the loss on the
outputs, then each chunk forward again with the CPU's random state put back, and its surrogate
<outputs, cotangents> backward. The truth is the plain loop over chunks with every graph kept.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch import nn

import gradtools.torch as gt

pytestmark = pytest.mark.filterwarnings("ignore:chunked. .* is a batch normalization")

# NumPy's stream of the process, which a new program would not use, but models do.
seed_numpy, draw_numpy, get_numpy_state = np.random.seed, np.random.randn, np.random.get_state

CHUNK = 3
X = torch.linspace(-1.0, 9.0, 33, dtype=torch.float64).sin().reshape(11, 3)  # 3, 3, 3, 2


@dataclass
class Cache:
    """A gradient cache, as it is written by hand."""

    f: Callable[[Any], torch.Tensor]
    chunk_size: int = CHUNK
    chunks: Any = ()
    states: list[torch.Tensor] = field(default_factory=list)

    def __call__(self, x):
        self.chunks = x.split(self.chunk_size)
        outs = []
        with torch.no_grad():
            for chunk in self.chunks:
                self.states.append(torch.get_rng_state())
                outs.append(self.f(chunk))
        self.y = torch.cat(outs).detach().requires_grad_()
        return self.y

    def backward(self, loss):
        loss.backward()
        cotangents = self.y.grad.split([len(c) for c in self.chunks])
        for chunk, state, ct in zip(self.chunks, self.states, cotangents, strict=True):
            torch.set_rng_state(state)
            (self.f(chunk) * ct).sum().backward()


class Plain:
    """The loop over chunks, every graph kept."""

    def __init__(self, f, chunk_size=CHUNK):
        self.f, self.chunk_size = f, chunk_size

    def __call__(self, x):
        return torch.cat([self.f(chunk) for chunk in x.split(self.chunk_size)])

    def backward(self, loss):
        loss.backward()


class Ours(Plain):
    options: ClassVar[dict[str, Any]] = {}

    def __call__(self, x):
        return gt.chunked(self.f, self.chunk_size, **self.options)(x)


class Verified(Ours):
    options: ClassVar = {"verify": True}


class Twice(Ours):
    def backward(self, loss):
        torch.autograd.backward(loss / 2, retain_graph=True)
        torch.autograd.backward(loss / 2)


OURS = [Ours, Verified, Twice]


def contrast(y):
    """A loss that needs the whole batch."""
    y = y.reshape(len(y), -1)
    return torch.logsumexp(y @ y.T, 1).sum() - (y * y.roll(1, 0)).sum()


@dataclass
class Record:
    """All that a training step leaves behind."""

    loss: float
    grads: dict[str, Any]
    state: dict[str, Any]
    streams: tuple[Any, ...]

    def agrees(self, other: Record) -> bool:
        return not self.differences(other)

    def differences(self, other: Record) -> list[str]:
        found = [] if self.loss == other.loss else [f"loss: {self.loss} {other.loss}"]
        found += [f"grad {k}" for k in self.grads if not same(self.grads[k], other.grads[k], 1e-12)]
        assert self.state.keys() == other.state.keys()
        found += [f"state {k}" for k in self.state if not same(self.state[k], other.state[k])]
        names = ("torch", "python", "numpy")
        pairs = zip(names, self.streams, other.streams, strict=True)
        return [*found, *(f"stream {name}" for name, a, b in pairs if a != b)]


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
    _, keys, *rest = get_numpy_state()
    numpy = (keys.tobytes(), *rest)
    return torch.get_rng_state().numpy().tobytes(), random.getstate(), numpy


def state_of(model):
    return {k: v.clone() for k, v in model.named_buffers()}


def step(way, make, loss=contrast, steps=1) -> Record:
    """Some training steps on a fresh model."""
    torch.manual_seed(3)
    random.seed(3)
    seed_numpy(3)
    model = make().double()
    for _ in range(steps):
        run = way(model)
        value = loss(run(X.clone()))
        run.backward(value)
    grads = {k: None if p.grad is None else p.grad.clone() for k, p in model.named_parameters()}
    return Record(value.item(), grads, state_of(model), streams())


# --- state --------------------------------------------------------------------------------


def linear():
    return nn.Linear(3, 3)


class Counter(nn.Module):
    """Its output depends on how often it was called, by a buffer."""

    def __init__(self):
        super().__init__()
        self.linear = linear()
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))

    def forward(self, x):
        self.steps += 1
        return self.linear(x) / self.steps.clone() + x * self.linear.bias


@pytest.mark.parametrize("way", OURS)
def test_batch_norm_counts_once(way):
    make = lambda: nn.Sequential(linear(), nn.BatchNorm1d(3, momentum=0.3), nn.Tanh())
    plain, naive = step(Plain, make), step(Cache, make)
    assert naive.state["1.num_batches_tracked"] == 8 and plain.state["1.num_batches_tracked"] == 4
    assert not torch.equal(naive.state["1.running_mean"], plain.state["1.running_mean"])
    assert step(way, make).differences(plain) == []


# --- randomness ---------------------------------------------------------------------------


@pytest.mark.parametrize("way", OURS)
def test_random_streams_end_where_the_plain_loop_leaves_them(way):
    """The loss draws too, so that putting back the last chunk's state is not enough."""
    make = lambda: nn.Sequential(linear(), nn.Dropout(0.5), nn.Linear(3, 3), nn.Dropout(0.3))
    loss = lambda y: contrast(nn.functional.dropout(y, 0.5)) * random.random()
    plain, naive = step(Plain, make, loss), step(Cache, make, loss)
    assert naive.differences(plain) == ["stream torch"]
    assert step(way, make, loss).differences(plain) == []


# --- whose gradient it is -----------------------------------------------------------------


# --- edges --------------------------------------------------------------------------------


def test_an_empty_batch_gives_empty_rows():
    with pytest.raises(AttributeError):  # nothing has a gradient
        Cache(lambda c: c.sum(1)).backward(torch.zeros((), requires_grad=True))
    f = linear()
    out = gt.chunked(f, CHUNK)(torch.zeros(0, 3))
    assert out.shape == (0, 3)
    out.sum().backward()
    assert not any(p.grad.any() for p in f.parameters())


class SometimesFrozen(nn.Module):
    """No parameter has a part in the chunks with this sign."""

    def __init__(self, frozen=lambda x: x[0, 0] < 0):
        super().__init__()
        self.linear, self.frozen = linear(), frozen

    def forward(self, x):
        return x * 2.0 if self.frozen(x) else self.linear(x)


@pytest.mark.parametrize("way", OURS)
def test_a_chunk_without_parameters(way):
    for frozen in (lambda x: x[0, 0] < 0, lambda x: x[0, 0] > 0):
        make = lambda frozen=frozen: SometimesFrozen(frozen)
        with pytest.raises(RuntimeError, match="does not require grad"):
            step(Cache, make)
        assert step(way, make).differences(step(Plain, make)) == []


# --- hooks and exceptions -----------------------------------------------------------------


@pytest.mark.parametrize("way", OURS)
@pytest.mark.parametrize("hook", ["tensor", "post-accumulate"])
def test_hooks_of_parameters_fire_once_on_the_sum(way, hook):
    def run(way, halve=True):
        torch.manual_seed(0)
        model, seen = linear().double(), []

        def tensor_hook(grad):
            seen.append(grad.clone())
            return grad.clamp(-1, 1)

        if hook == "tensor":
            model.weight.register_hook(tensor_hook)
        else:
            model.weight.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.clone()))
        call = way(model)
        call.backward(contrast(call(X)))
        return seen, model.weight.grad

    plain, naive, ours = run(Plain), run(Cache), run(way)
    times = 2 if way is Twice else 1
    assert len(plain[0]) == 1 and len(naive[0]) == 4 and len(ours[0]) == times
    if way is not Twice:
        assert same(ours[0][0], plain[0][0], 1e-12) and same(ours[1], plain[1], 1e-12)
    if hook == "tensor":
        assert not same(naive[1], plain[1], 1e-12)


# --- order --------------------------------------------------------------------------------


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
    """view_as gives axes of length one other strides, by which PyTorch chooses kernels."""
    x = torch.randn(7, 3, 4, 4).to(memory_format=torch.channels_last)
    found, expected = x.clone().requires_grad_(), x.clone().requires_grad_()
    pool = torch.nn.AdaptiveAvgPool2d(1)
    gt.chunked(pool, 3)(found).pow(2).sum().backward()
    pool(expected).pow(2).sum().backward()
    torch.testing.assert_close(found.grad, expected.grad)
