"""Tests the overhead of gradtools in PyTorch in numbers of operations and saved bytes."""

from __future__ import annotations

import torch
from torch.autograd.graph import saved_tensors_hooks

import gradtools.torch as gt
from tests.support.torch_counts import flops, operations


def saved(run):
    sizes = []
    with saved_tensors_hooks(lambda x: (sizes.append(x.nbytes), x)[1], lambda x: x):
        run()
    return sum(sizes)


A = torch.randn(8, 8)


def loss(x):
    return (torch.tanh(A @ x) ** 2).sum()


def by_hand(x):
    x = x.detach().requires_grad_()
    return torch.autograd.grad(loss(x), x)[0]


def test_a_gradient_does_the_operations_of_autograd_by_hand():
    x = torch.randn(8)
    assert operations(lambda: gt.grad(loss)(x)) == operations(lambda: by_hand(x))
    assert saved(lambda: gt.grad(loss)(x)) == saved(lambda: by_hand(x))


def test_frozen_layers_of_a_player_cost_no_gradient_work():
    layers = [torch.nn.Linear(6, 32), torch.nn.Tanh(), torch.nn.Linear(32, 32), torch.nn.Tanh()]
    net, x = torch.nn.Sequential(*layers, torch.nn.Linear(32, 1)), torch.randn(8, 6)

    def step():
        apply, params, state = gt.make_functional(net)
        loss = lambda p, q: (apply(p, state, x)[0] * q).mean()
        gt.minimax_value_and_grad(loss, 0, 1)(params, torch.tensor(2.0))

    forward = 2 * 8 * (6 * 32 + 32 * 32 + 32)
    assert flops(step) > 2.5 * forward
    net[:4].requires_grad_(False)
    # the backward pass computes only the gradient of the weight of the last layer
    assert flops(step) == forward + 2 * 8 * 32
