"""Ordinary training programs at the edges of PyTorch's derivatives, against plain PyTorch.

Each returns pairs of what comes out and what is right.
"""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")

import gradtools.torch as gt  # noqa: E402
from tests.stories.test_training_torch import compare  # noqa: E402
from tests.support.scenarios import Table  # noqa: E402

F, nn, D, Tensor = torch.nn.functional, torch.nn, torch.float64, torch.Tensor
PROGRAMS = Table()
X = torch.linspace(-1.0, 1.0, 15, dtype=D).reshape(5, 3).sin()
V, U = X[0] + 0.5, torch.tensor([0.5, 1.0, -0.2], dtype=D)


def network() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.Tanh(), nn.Linear(4, 1)).to(D)


def hessian(f: Any, x: Tensor) -> Tensor:
    """Central differences of PyTorch's own gradient."""

    def gradient(x: Tensor) -> Tensor:
        # Without a graph PyTorch's gradient of a determinant that is exactly 0 may be 0.
        x = x.detach().requires_grad_()
        return torch.autograd.grad(f(x), x, create_graph=True)[0].detach()

    h = 1e-5
    rows = torch.eye(len(x), dtype=x.dtype)
    return torch.stack([(gradient(x + h * e) - gradient(x - h * e)) / (2 * h) for e in rows])


def everywhere(f: Any, x: Tensor) -> list[tuple[Any, Any]]:
    """Second derivatives in all modes, frozen, in a checkpoint and under no_grad."""
    second = hessian(f, x)
    with torch.no_grad():
        product = gt.hvp(f, (x,), (U,))[1][0]
    along = lambda f: gt.grad(lambda x: gt.grad(f)(x) @ U)(x)
    return [
        (gt.hessian(f)(x), second),
        (gt.jacobian(gt.grad(f), mode="forward")(x), second),
        (gt.hvp(f, (x,), (U,), mode="forward_over_reverse")[1][0], second @ U),
        (along(gt.frozen(f)), second @ U),
        (along(gt.checkpoint(f)), second @ U),
        (product, second @ U),
    ]


@PROGRAMS.add()
def weighted_cross_entropy_with_smoothing():
    labels = torch.tensor([2])
    smooth = {"weight": U.abs(), "label_smoothing": 0.1}
    return everywhere(lambda x: F.cross_entropy(x[None] ** 2, labels, **smooth), V)


@PROGRAMS.add()
def determinant_of_a_matrix_that_is_singular_there():
    return everywhere(lambda x: torch.linalg.det(x.outer(x) + torch.diag(x - V)), V)


@PROGRAMS.add()
def scheduled_reversal_in_a_checkpoint():
    class Reversed(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("step", torch.zeros((), dtype=X.dtype))  # which is put back
            self.net = network()

        def forward(self, x):
            self.step = self.step + 1
            return self.net(gt.reverse_gradient(x, 0.1 * self.step))

    net, x = Reversed(), X.clone().requires_grad_()
    gt.checkpoint(net)(x).sum().backward()
    (slope,) = torch.autograd.grad(network()(y := X.clone().requires_grad_()).sum(), y)
    return [(x.grad, -0.1 * slope), (net.step, torch.ones(()))]


@pytest.mark.parametrize("attack", PROGRAMS.cases())
def test_an_attack_comes_out_right(attack):
    compare(attack.program(), rtol=1e-5, atol=1e-7)
