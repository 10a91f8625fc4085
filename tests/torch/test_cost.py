"""What gradtools adds in PyTorch, counted: operations and saved bytes."""

from __future__ import annotations

import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks

import gradtools.torch as gt
from tests.support.torch_counts import flops, operations


def saved(run):
    sizes = []
    with saved_tensors_hooks(lambda x: (sizes.append(x.nbytes), x)[1], lambda x: x):
        run()
    return sum(sizes)


class Reversal(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(x, s):
        return x.view_as(x)

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(inputs[1])
        ctx.save_for_forward(inputs[1])

    @staticmethod
    def backward(ctx, ct):
        return ctx.saved_tensors[0] * ct, None

    @staticmethod
    def jvp(ctx, dx, _):
        return ctx.saved_tensors[0] * dx


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


def test_a_reversal_does_what_a_hand_written_function_does_and_keeps_less():
    x, s = torch.randn(1000, requires_grad=True), torch.tensor(-0.5)
    ours = lambda: torch.autograd.grad(gt.reverse_gradient(x, 0.5).sum(), x)
    other = lambda: torch.autograd.grad(Reversal.apply(x, s).sum(), x)
    assert operations(ours) == ["aten.clone.default", *operations(other)]
    assert (saved(ours), saved(other)) == (0, s.nbytes)


@pytest.mark.parametrize("depth", [4, 16, 64])
def test_a_mixed_partial_keeps_the_same_whatever_the_depth_of_g(depth):
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        *(m for _ in range(depth) for m in (torch.nn.Linear(16, 16), torch.nn.Tanh()))
    )
    y, z, u = torch.randn(3, 1, 16)
    f = lambda y, g: ((y * g) ** 3).sum()
    kept = saved(lambda: gt.mixed_partial(f, model, y, z, u))
    assert kept == saved(lambda: gt.mixed_partial(f, model[:2], y, z, u)) > 0
    model.requires_grad_(False)
    kept = saved(lambda: gt.mixed_partial(f, model, y, z, u))
    assert kept == saved(lambda: gt.mixed_partial(f, torch.nn.Identity(), y, z, u)) > 0


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
    assert flops(step) == forward + 2 * 8 * 32  # the last layer's weight, and nothing behind it
