"""Tests costs of second derivatives through `frozen` in PyTorch: operations and live bytes."""

from __future__ import annotations

import sys

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import gradtools.torch as gt
from tests.support.live_bytes import LiveBytes
from tests.torch.test_direct import calls_of_ours

ROWS, WIDTH = 8, 64


def network(depth):
    torch.manual_seed(0)
    layers = [part for _ in range(depth) for part in (nn.Linear(WIDTH, WIDTH), nn.Tanh())]
    return nn.Sequential(*layers).requires_grad_(False)


class Matmuls(TorchDispatchMode):
    """Count the operations of matrix products, including products of tangents."""

    def __init__(self):
        super().__init__()
        self.flops = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func._schema.name
        if name in ("aten::mm", "aten::addmm", "aten::bmm", "aten::matmul"):
            a, b = [x for x in args if isinstance(x, torch.Tensor)][-2:]
            self.flops += 2 * a.numel() * b.shape[-1]
        return func(*args, **(kwargs or {}))


def flops(run):
    with Matmuls() as count:
        run()
    return count.flops


def gradient(f, y, z, G):
    return torch.autograd.grad(f(y, G(z)), z, create_graph=True)[0]


def loss_of(y, g):
    return (torch.tanh(g * y) * y).sum()


def by_use(G, count, y, zs):
    """Compute the gradient with respect to each z before the next call of G."""
    total = sum(gradient(loss_of, y, zs[i], G).pow(2).sum() for i in range(count))
    return torch.autograd.grad(total, y)[0]


def all_forwards_first(G, count, y, zs):
    values = [loss_of(y, G(zs[i])) for i in range(count)]
    gs = [
        torch.autograd.grad(v, z, create_graph=True)[0]
        for v, z in zip(values, zs[:count], strict=True)
    ]
    return torch.autograd.grad(sum(g.pow(2).sum() for g in gs), y)[0]


def inputs(count):
    torch.manual_seed(1)
    y = torch.randn(WIDTH, requires_grad=True)
    return y, [torch.randn(ROWS, WIDTH, requires_grad=True) for _ in range(count)]


DEPTH, COUNT = 6, 4
FORWARD = 2 * ROWS * WIDTH * WIDTH * DEPTH * COUNT


@pytest.mark.parametrize(
    ("run", "make", "passes"),
    [
        (by_use, lambda G: G, 3),
        (by_use, gt.frozen, 4),
        (all_forwards_first, gt.frozen, 5),
    ],
)
def test_forward_passes_that_a_second_derivative_costs(run, make, passes):
    G = make(network(DEPTH))
    # the last call of G is not repeated, because its graph still exists
    spare = 1 if run is all_forwards_first and passes == 5 else 0
    expected = passes * FORWARD - spare * FORWARD // COUNT
    assert flops(lambda: run(G, COUNT, *inputs(COUNT))) == expected


def test_parameters_that_require_a_gradient_cost_no_more():
    G = gt.frozen(network(DEPTH).requires_grad_())
    assert flops(lambda: by_use(G, COUNT, *inputs(COUNT))) == 4 * FORWARD


def test_the_term_along_z_is_computed_only_when_asked():
    y, zs = inputs(1)
    G = gt.frozen(network(DEPTH))
    once = FORWARD // COUNT

    def second(wanted):
        g = gradient(loss_of, y, zs[0], G)
        torch.autograd.grad(g.pow(2).sum(), wanted)

    assert flops(lambda: second([y])) == 4 * once
    # Double backward needs four passes. The pullback through the value of G uses the same graph.
    assert flops(lambda: second([y, zs[0]])) == 7 * once
    fixed = zs[0].detach().requires_grad_()
    alone = lambda: torch.autograd.grad(G(fixed).sum(), fixed)
    assert flops(alone) == 2 * once


# --- live bytes -------------------------------------------------------------------------------


def held(G, count):
    """Return the live bytes after the first derivatives, and the peak of live bytes."""
    y, zs = inputs(count)
    with LiveBytes() as live:
        gs = [gradient(loss_of, y, z, G) for z in zs]
        now = live.now
        torch.autograd.grad(sum(g.pow(2).sum() for g in gs), y)
    return now, live.peak


def per_use(G, which):
    few, many = held(G, 4)[which], held(G, 12)[which]
    return (many - few) / 8


ONE = ROWS * WIDTH * 4  # the size in bytes of a tensor with the shape of z


def test_nothing_is_kept_for_a_further_z_but_what_f_and_the_caller_keep():
    """For each additional z, only G(z), which the graph of f saves, and the gradient are saved."""
    # if a network has no layers, G(z) is z, and the gradient is part of the graph of f
    own = per_use(network(0), 0)
    assert per_use(gt.frozen(network(24)), 0) - own == 2 * ONE


@pytest.mark.slow_at("64")
@pytest.mark.sweep_at("256")
@pytest.mark.parametrize("depth", [4, 16, 64, 256])
@pytest.mark.parametrize("trained", [False, True])
def test_mixed_partial_takes_the_same_memory_at_every_depth(depth, trained):
    y, (z, u) = inputs(2)

    def peak(G):
        with LiveBytes() as live:
            gt.mixed_partial(loss_of, G, y, z.detach(), u.detach())
        return live.peak

    assert peak(network(depth).requires_grad_(trained)) == peak(network(2).requires_grad_(trained))


@pytest.mark.skipif(sys.version_info >= (3, 12), reason="the limits apply to Python 3.11")
def test_what_a_use_costs_besides_its_work_is_held():
    """Python overhead, which dominates small networks, is limited per call and per layer."""

    def use(depth):
        G, z = gt.frozen(network(depth)), torch.randn(ROWS, WIDTH, requires_grad=True)
        y = torch.randn(WIDTH, requires_grad=True)

        def run():
            (slope,) = torch.autograd.grad((G(z) * y).sum(), z, create_graph=True)
            torch.autograd.grad(slope.square().sum(), y)

        run(), run()
        return calls_of_ours(run)

    short, long = use(1), use(5)
    assert short <= 276
    assert long - short <= 4 * 16  # a thread-local mode intercepts each operation in forward mode
    x = torch.randn(3)
    assert calls_of_ours(lambda: gt.grad(lambda x: x.square().sum())(x)) <= 40
