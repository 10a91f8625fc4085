"""`frozen(module)` is a module: its parameters, `state_dict`, `to` and printing work."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import gradtools.torch as gt
from tests.torch.test_cost_frozen import DEPTH, ROWS, WIDTH, flops, loss_of, network


def encoder():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.BatchNorm1d(4)).double()


def test_it_is_a_module_with_the_parameters_of_its_own():
    net = encoder()
    frozen = gt.frozen(net)
    model = nn.Sequential(frozen, nn.Linear(4, 1).double())
    assert isinstance(frozen, nn.Module) and repr(frozen).startswith("frozen(Sequential(")
    assert [*frozen.state_dict()] == [*net.state_dict()]
    assert "0.0.weight" in model.state_dict()
    assert all(p is q for p, q in zip(frozen.parameters(), net.parameters(), strict=True))
    model.to(torch.float32)
    assert net[0].weight.dtype is torch.float32
    assert model(torch.zeros(2, 3)).dtype is torch.float32
    assert not frozen.eval().training and not net[2].training


def slope(inner, G, y, z):
    if inner == "gt.grad":
        g = gt.grad(lambda z: loss_of(y, G(z)))(z)
    else:
        g = torch.autograd.grad(loss_of(y, G(z)), z, create_graph=True)[0]
    return g.pow(2).sum()


@pytest.mark.parametrize("inner", ["gt.grad", "autograd.grad"])
def test_a_second_derivative_that_may_be_differentiated_costs_four_forward_passes(inner):
    """The result of gt.grad has a graph if y or z requires grad, so third derivatives exist."""
    torch.manual_seed(1)
    net = network(DEPTH)
    G, z = gt.frozen(net), torch.randn(ROWS, WIDTH, requires_grad=True)
    y = torch.randn(WIDTH, requires_grad=True)
    run = lambda: gt.grad(lambda y: slope(inner, G, y, z))(y)
    run()  # the first call also verifies the gradient
    assert flops(run) == 4 * 2 * ROWS * WIDTH * WIDTH * DEPTH
    third, expected = (
        torch.autograd.grad(gt.grad(lambda y: slope(inner, f, y, z))(y).sin().sum(), [y, z])
        for f in (G, net)
    )
    for a, b in zip(third, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
