"""Tests gradients of parameters to which f also refers without its module argument."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import gradtools.torch as gt


class Equilibrium(nn.Module):
    """A layer that passes bound methods as equation and solver to implicit_solution."""

    def __init__(self):
        super().__init__()
        self.a, self.out = nn.Linear(2, 2), nn.Linear(2, 1)
        self.fixed = gt.implicit_solution(self.residual, self.solve, "dense")

    def step(self, z, x):
        return torch.tanh(0.3 * self.a(z) + x)

    def residual(self, z, x):
        return self.step(z, x) - z

    def solve(self, x):
        z = 0 * x
        for _ in range(60):
            z = self.step(z, x)
        return z

    def forward(self, x):
        return self.out(self.fixed(x)).sum()


class Rounded(nn.Module):
    """A module with an attribute `straight_through(f, g)`, where f and g are bound methods."""

    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.tensor([0.3, 1.7]))
        self.q = gt.straight_through(self.hard, self.soft)

    def hard(self, x):
        return (x * self.w).round()

    def soft(self, x):
        return x * self.w

    def forward(self, x):
        return (self.q(x) ** 2).sum()


class Hooked(nn.Module):
    """A module with a forward hook and an attribute that close over the module."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(2, 2), nn.Linear(2, 2)
        self.b.register_forward_hook(lambda module, inputs, out: torch.tanh(self.a(out)))
        self.scale = lambda y: y * self.a.bias.exp()

    def forward(self, x):
        return (self.scale(self.b(x)) ** 2).sum()


class Beside(nn.Module):
    """A module with a submodule to which a closure of the module also refers."""

    def __init__(self):
        super().__init__()
        self.net, self.s = nn.Linear(2, 1), nn.Parameter(torch.ones(()))
        part = [self.net]
        self.read = lambda x: (self.s * part[0](x)) ** 2

    def forward(self, x):
        return self.read(x).sum()


OPERATORS = {
    "per_example_grad": lambda m, x: gt.per_example_grad(lambda m, x: m(x))(m, x),
    "vmap of grad": lambda m, x: gt.vmap(lambda x: gt.grad(lambda m: m(x))(m))(x),
    "jacobian": lambda m, x: gt.jacobian(lambda m: m(x), mode="forward")(m),
    "hvp": lambda m, x: gt.hvp(lambda m: m(x), (m,), (ones(m),), "forward_over_reverse")[0],
    "make_functional": lambda m, x: of_functional(m, x),
}


def ones(m):
    return {name: torch.ones_like(p) for name, p in m.named_parameters()}


def of_functional(m, x):
    apply, params, state = gt.make_functional(m)
    return gt.grad(lambda p: apply(p, state, x)[0])(params)


@pytest.mark.parametrize("kind", [Equilibrium, Rounded, Hooked, Beside])
@pytest.mark.parametrize("name", OPERATORS)
def test_a_derivative_by_replaced_parameters_is_that_of_backward(kind, name):
    torch.manual_seed(0)
    m, x = kind().double(), torch.randn(3, 2, dtype=torch.float64)
    m(x).backward()
    found = OPERATORS[name](m, x)
    found = found[0] if isinstance(found, tuple) else found
    for key, p in m.named_parameters():
        g = found[key].detach()
        summed = g.sum(0) if g.shape != p.shape else g
        torch.testing.assert_close(summed, p.grad, rtol=1e-6, atol=1e-9)
