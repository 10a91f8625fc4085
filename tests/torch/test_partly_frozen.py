"""A PyTorch player of which some layers are frozen, in minimax and make_functional."""

from __future__ import annotations

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

import gradtools.torch as gt

X = torch.randn(8, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


def player(seed=0, width=32):
    torch.manual_seed(seed)
    layers = [nn.Linear(6, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh()]
    net = nn.Sequential(*layers, nn.Linear(width, 1)).double()
    net[0].requires_grad_(False)
    net[2].requires_grad_(False)
    return net


def test_frozen_layers_cost_no_gradient_work():
    def flops(net):
        apply, params, state = gt.make_functional(net)
        loss = lambda p, q: (apply(p, state, X)[0] * q).mean()
        with FlopCounterMode(display=False) as counter:
            gt.minimax_value_and_grad(loss, 0, 1)(params, torch.tensor(2.0, dtype=X.dtype))
        return counter.get_total_flops()

    forward = 2 * 8 * (6 * 32 + 32 * 32 + 32)
    last = 2 * 8 * 32  # of the last layer's weight, and nothing behind it
    assert flops(player()) == forward + last
    assert flops(player().requires_grad_(True)) > 2.5 * forward
