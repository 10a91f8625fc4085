"""Tests accelerate: accumulated gradients, mixed precision, and a WGAN-GP critic."""

from __future__ import annotations

import pytest
import torch

import gradtools.torch as gt

accelerate = pytest.importorskip("accelerate", reason="accelerate is not installed")
from tests.support.integration_models import agree, contrastive, gradients

pytestmark = [pytest.mark.integration, pytest.mark.torch]


@pytest.fixture(autouse=True)
def one_accelerator():
    """Reset the global state of accelerate before and after each test."""
    _forget()
    yield
    _forget()


def _forget():
    accelerate.state.AcceleratorState._reset_state(True)
    accelerate.state.GradientState._reset_state()


def tower():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Dropout(0.2))


@pytest.mark.parametrize("precision", ["no", "bf16"])
def test_chunks_inside_of_accumulated_steps(precision):
    """Train with two batches per step, each in chunks of four rows."""
    data = torch.randn(40, 2, 8, generator=torch.Generator().manual_seed(1))
    found = []
    for in_chunks in (True, False):
        accelerator = accelerate.Accelerator(
            gradient_accumulation_steps=2, mixed_precision=precision, cpu=True
        )
        plain = tower()
        model = gt.chunked(plain, 4) if in_chunks else plain
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        loader = torch.utils.data.DataLoader(data, batch_size=10)
        model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
        encode = model if in_chunks else lambda x, m=model: torch.cat([m(c) for c in x.split(4)])
        torch.manual_seed(4)
        losses = []
        for batch in loader:
            with accelerator.accumulate(model):
                loss = contrastive(encode(batch[:, 0]), encode(batch[:, 1]), torch.tensor(5.0))
                accelerator.backward(loss)
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
            losses.append(loss.detach())
        weights = accelerator.unwrap_model(model).state_dict()
        found.append({"losses": torch.stack(losses), **weights})
    agree(*found, **({"rtol": 0.02, "atol": 5e-3} if precision == "bf16" else {}))


def wasserstein(critic, penalty, weight=10.0):
    """Return the loss of a WGAN-GP critic, which penalizes gradient norms other than one."""

    def loss(real, made, between):
        x = between * real + (1 - between) * made
        norms = penalty(critic, x).flatten(1).norm(dim=1)
        return (critic(made) - critic(real)).mean() + weight * (norms - 1).square().mean()

    return loss


def test_wgan_gp_trains_as_with_torch_autograd_grad():
    """Compare critic steps whose gradient penalty uses `gt.grad` or `torch.autograd.grad`."""
    draws = torch.Generator().manual_seed(2)
    real, made = torch.randn(2, 16, 4, generator=draws)
    between = torch.rand(16, 1, generator=draws)

    def ours(critic, x):
        return gt.grad(lambda x: critic(x).sum())(x)

    def plain(critic, x):
        x = x.detach().requires_grad_()
        return torch.autograd.grad(critic(x).sum(), x, create_graph=True)[0]

    def looped(critic, x):
        return torch.cat([ours(critic, row[None]) for row in x])

    found = []
    for penalty in (ours, plain, looped):
        accelerator = accelerate.Accelerator(cpu=True)
        torch.manual_seed(0)
        net = torch.nn.Sequential(
            torch.nn.Linear(4, 16), torch.nn.SiLU(), torch.nn.LayerNorm(16), torch.nn.Linear(16, 1)
        )
        critic, optimizer = accelerator.prepare(net, torch.optim.Adam(net.parameters(), 1e-2))
        losses = []
        for _ in range(5):
            loss = wasserstein(critic, penalty)(real, made, between)
            optimizer.zero_grad()
            accelerator.backward(loss)
            last = {k: g.clone() for k, g in gradients(critic).items()}
            optimizer.step()
            losses.append(loss.detach())
        found.append({"losses": torch.stack(losses), **last})
    agree(found[0], found[1])
    agree(found[0], found[2])
