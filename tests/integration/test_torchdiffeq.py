"""Tests a neural differential equation in torchdiffeq with direct and adjoint differentiation."""

from __future__ import annotations

import pytest
import torch

import gradtools.torch as gt
from gradtools.testing import DerivativeError, checked

torchdiffeq = pytest.importorskip("torchdiffeq", reason="torchdiffeq is not installed")
from tests.support.integration_models import agree, gradients

pytestmark = [pytest.mark.integration, pytest.mark.torch]
TIMES = torch.linspace(0, 1, 5, dtype=torch.float64)
STARTS = torch.randn(
    6, 2, generator=torch.Generator().manual_seed(1), dtype=torch.float64
)  # Points on spirals.
FIXED = {"method": "rk4"}  # The solver rk4 takes the same steps for each example.


class Field(torch.nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.net = torch.nn.Sequential(
            torch.nn.Linear(2, 8), torch.nn.Tanh(), torch.nn.Linear(8, 2)
        ).double()

    def forward(self, t, y):
        return self.net(y)


SOLVERS = {"solver": torchdiffeq.odeint, "adjoint": torchdiffeq.odeint_adjoint}


def misfit(solve, field, starts):
    return (solve(field, starts, TIMES, **FIXED)[-1] - 1).square().sum(1)


@pytest.mark.parametrize("solver", SOLVERS)
def test_starts_in_chunks_have_the_loss_and_the_gradients_of_the_loop(solver):
    field, found = Field(), []
    solve = SOLVERS[solver]
    in_chunks = gt.chunked(lambda y: misfit(solve, field, y), 4)
    for run in (in_chunks, lambda y: torch.cat([misfit(solve, field, c) for c in y.split(4)])):
        field.zero_grad()
        loss = run(STARTS).mean()
        loss.backward()
        found.append({**gradients(field), "loss": loss.detach()})
    agree(*found, rtol=1e-9, atol=1e-12)


def test_its_derivatives_in_every_mode_agree():
    field = Field().requires_grad_(False)
    f = lambda y: misfit(torchdiffeq.odeint, field, y).sum()
    along = STARTS.flip(0)
    slope = lambda h: (gt.grad(f)(STARTS + h * along) * along).sum()
    twice = (slope(1e-5) - slope(-1e-5)) / 2e-5
    once = (f(STARTS + 1e-6 * along) - f(STARTS - 1e-6 * along)) / 2e-6
    torch.testing.assert_close(gt.jvp(f, (STARTS,), (along,))[1], once, rtol=1e-7, atol=1e-9)
    for mode in ("reverse_over_reverse", "forward_over_reverse"):
        (product,) = gt.hvp(f, (STARTS,), (along,), mode=mode)[1]
        torch.testing.assert_close((product * along).sum(), twice, rtol=1e-6, atol=1e-8)


def test_a_second_derivative_through_the_adjoint_is_named_by_checked():
    """The backward pass of the adjoint method runs the solver without recording it for autograd."""
    field = Field().requires_grad_(False)
    f = lambda y: misfit(torchdiffeq.odeint_adjoint, field, y).sum()
    with checked(), pytest.raises(DerivativeError, match="OdeintAdjointMethod"):
        gt.hvp(f, (STARTS,), (STARTS.flip(0),))
