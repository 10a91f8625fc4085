"""A PyTorch player of which some layers are frozen, in minimax and make_functional."""

from __future__ import annotations

import pytest
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


def test_frozen_parameters_are_state():
    net = player()
    apply, params, state = gt.make_functional(net)
    assert list(params) == ["4.weight", "4.bias"]
    assert list(state) == ["0.weight", "0.bias", "2.weight", "2.bias"]
    assert all(x.data_ptr() == net.get_parameter(k).data_ptr() for k, x in state.items())
    out, after = apply(params, state, X)
    assert torch.equal(out, net(X)) and all(after[k] is x for k, x in state.items())


def test_a_partly_frozen_player_descends_as_in_a_plain_loop():
    a, b = player(1), player(2)
    apply_a, params_a, state_a = gt.make_functional(a)
    apply_b, params_b, state_b = gt.make_functional(b)

    def cost(p, q):
        return (apply_a(p, state_a, X)[0] * apply_b(q, state_b, X)[0].square()).mean()

    value, (down, up) = gt.minimax_value_and_grad(cost, 0, 1)(params_a, params_b)
    gt.assign_gradients(a, down)
    gt.assign_gradients(dict(b.named_parameters()), up)
    found = [p.grad for net in (a, b) for p in net.parameters()]
    for net in (a, b):
        net.zero_grad()
    plain = (a(X) * b(X).square()).mean()
    plain.backward()
    assert float(value) == pytest.approx(float(plain), rel=1e-14)
    for net, sign, grads in ((a, 1, found[:6]), (b, -1, found[6:])):
        for p, g in zip(net.parameters(), grads, strict=True):
            assert (p.grad is None) == (g is None) == (not p.requires_grad)
            if g is not None:
                torch.testing.assert_close(g, sign * p.grad, rtol=1e-13, atol=0)


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
