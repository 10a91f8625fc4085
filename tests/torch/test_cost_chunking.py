"""Tests costs of `chunked` in PyTorch: floating-point operations and live bytes."""

from __future__ import annotations

import pytest
import torch

import gradtools.torch as gt
from tests.support.live_bytes import peak_bytes
from tests.support.torch_counts import flops

CHUNK = 8

pytestmark = pytest.mark.filterwarnings("ignore:chunked. .* is a batch normalization")


def network():
    torch.manual_seed(0)
    layers = [torch.nn.Linear(32, 64), torch.nn.Tanh()]
    for _ in range(6):
        layers += [torch.nn.Linear(64, 64), torch.nn.BatchNorm1d(64), torch.nn.Tanh()]
    return torch.nn.Sequential(*layers, torch.nn.Dropout(0.1), torch.nn.Linear(64, 16))


def loss(z):
    return (z @ z.T).logsumexp(1).sum()


def bytes_of(tensors):
    return sum(x.nbytes for x in tensors)


def step(net, x, **options):
    for p in net.parameters():
        p.grad = None
    loss(gt.chunked(net, CHUNK, **options)(x)).backward()


def two_passes(net, x):
    """Run the forward pass without a graph, then run each chunk again with its cotangent."""
    for p in net.parameters():
        p.grad = None
    chunks = x.split(CHUNK)
    with torch.no_grad():
        z = torch.cat([net(chunk) for chunk in chunks])
    z.requires_grad_()
    loss(z).backward()
    for chunk, ct in zip(chunks, z.grad.split(CHUNK), strict=True):
        net(chunk).backward(ct)


def test_the_flops_are_four_forwards():
    net, x = network(), torch.randn(8 * CHUNK, 32)
    with torch.no_grad():
        forward = flops(lambda: net(x))
    of_loss = flops(lambda: loss(torch.zeros(len(x), 16, requires_grad=True)).backward())
    # x does not require grad, so the first layer computes no input gradient
    first = flops(lambda: net[0](x[:CHUNK]))
    expected = 4 * forward + of_loss - 8 * first
    assert flops(lambda: step(net, x)) == expected


def test_frozen_parameters_and_inputs_cost_no_backward_pass():
    net, x = network(), torch.randn(4 * CHUNK, 32)
    for p in net[:-1].parameters():
        p.requires_grad_(False)
    with torch.no_grad():
        forward = flops(lambda: net(x))
    of_loss = flops(lambda: loss(torch.zeros(len(x), 16, requires_grad=True)).backward())
    last = flops(lambda: net[-1](torch.zeros(len(x), 64)))
    assert flops(lambda: step(net, x)) == 2 * forward + last + of_loss


@pytest.mark.slow_at("network", "16")
@pytest.mark.sweep_at(("16", "network"))
@pytest.mark.parametrize("make", [network])
@pytest.mark.parametrize("count", [4, 16])
def test_the_peak_is_that_of_two_passes_by_hand(make, count):
    net, x = make(), torch.randn(count * CHUNK, 32)
    step(net, x), two_passes(net, x)
    ours, by_hand = (peak_bytes(lambda run=run: run(net, x))[0] for run in (step, two_passes))
    state = bytes_of(net.buffers())
    # the handwritten loop accumulates into .grad layer by layer
    gradients = bytes_of(net.parameters())
    assert ours <= by_hand + 2 * state + gradients


@pytest.mark.slow
def test_double_backward_runs_at_the_memory_of_one_chunk():
    net = network().double()

    def peak(count, run):
        x = torch.randn(count * CHUNK, 32, dtype=torch.float64, requires_grad=True)

        def second():
            for p in net.parameters():
                p.grad = None
            (g,) = torch.autograd.grad(run(x).pow(2).sum(), x, create_graph=True)
            g.pow(2).sum().backward()

        second()
        return peak_bytes(second)[0]

    chunked = gt.chunked(net, CHUNK)
    plain = lambda x: torch.cat([net(c) for c in x.split(CHUNK)])
    assert peak(16, chunked) < peak(16, plain) / 3


@pytest.mark.sweep_at("3")
@pytest.mark.parametrize("order", [2, 3])
def test_what_a_further_chunk_takes_of_higher_derivatives_does_not_grow_with_depth(order):
    def for_a_chunk(depth):
        torch.manual_seed(0)
        net = torch.nn.Sequential(*[torch.nn.Linear(32, 32), torch.nn.Tanh()] * depth)
        f = gt.chunked(net, CHUNK)

        def peak(count):
            x = torch.randn(count * CHUNK, 32, requires_grad=True)

            def run():
                y = f(x)
                for k in range(order):
                    (y,) = torch.autograd.grad(y.pow(2).sum(), x, create_graph=k + 1 < order)

            run()
            return peak_bytes(run)[0]

        return peak(12) - peak(4)

    assert for_a_chunk(8) == for_a_chunk(2)


def test_two_towers_hold_one_set_of_gradients_each():
    torch.manual_seed(0)
    net = torch.nn.Sequential(*[torch.nn.Linear(128, 128) for _ in range(8)])
    size, x = sum(p.nbytes for p in net.parameters()), torch.randn(16, 128)
    encode = gt.chunked(net, 2)

    def run():
        net.zero_grad()
        loss(encode(x) @ encode(2 * x).T).backward()

    run()
    # with separate gradients for each chunk, the peak is above 3 * size
    assert peak_bytes(run)[0] < 2.6 * size
    assert {p._backward_hooks for p in net.parameters()} == {None}
