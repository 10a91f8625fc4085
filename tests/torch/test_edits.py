"""Tests gradient edits in PyTorch: compiled code, in-place writes and checkpoints."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

import gradtools.torch as gt


@dataclass
class Flags:
    """A dataclass without tensors, used as a configuration argument."""

    train: bool = True


def test_a_compiled_loss_goes_backward_through_the_edits():
    def loss(x):
        y = gt.reverse_gradient(x, 0.5)
        return (gt.clip_gradient(y, max_value=2.0) ** 2).sum()

    torch._dynamo.reset()
    x = torch.tensor([3.0, 0.5], requires_grad=True)
    torch.compile(loss, backend="aot_eager", fullgraph=True)(x).backward()
    assert x.grad.tolist() == [-1.0, -0.5]


@pytest.mark.slow_at("3", "mode")
@pytest.mark.parametrize("constant", [3, "mode", Flags()])
def test_a_compiled_edit_of_a_tree_with_constants_breaks_no_graph(constant):
    def loss(x):
        return (gt.reverse_gradient({"x": x, "constant": constant}, 0.5)["x"] ** 2).sum()

    torch._dynamo.reset()
    x = torch.tensor([3.0, 0.5], requires_grad=True)
    torch.compile(loss, backend="aot_eager", fullgraph=True)(x).backward()
    assert x.grad.tolist() == [-3.0, -0.5]


def transformed(x):
    return (gt.transform_gradient(x, lambda c: 3 * c) ** 2).sum()


def test_transform_gradient_under_fullgraph_is_refused_by_its_reason():
    torch._dynamo.reset()
    with pytest.raises(torch._dynamo.exc.Unsupported, match="transform_gradient takes a Python"):
        torch.compile(gt.grad(transformed), backend="aot_eager", fullgraph=True)(torch.ones(2))


# --- edits by a number use a plain Function unless a mode is active ------------------------


EDITS = {
    "reverse": gt.reverse_gradient,
    "scale": lambda x: gt.scale_gradient(x, torch.tensor(-1.0)),
    "clip": lambda x: gt.clip_gradient(x, max_norm=1.0),
    "transform": lambda x: gt.transform_gradient(x, lambda c: -c),
    "replace": lambda x: gt.replace_gradient(x, torch.full_like(x, 5.0)),
    "straight_through": gt.straight_through(lambda x: x),
}


@pytest.mark.parametrize("name", EDITS)
@pytest.mark.parametrize("attached", [True, False])
def test_a_write_behind_an_edit_leaves_its_argument_alone(name, attached):
    x = torch.tensor([1.0, -2.0], requires_grad=True)
    run = torch.enable_grad if attached else torch.no_grad
    with run():
        y = EDITS[name](x)
        z = torch.nn.ReLU(inplace=True)(y)
        z += 1
    assert x.tolist() == [1.0, -2.0]
    assert y.tolist() == [2.0, 1.0]
    assert y.requires_grad is attached
    constant = EDITS[name](x.detach())
    constant += 1
    assert x.tolist() == [1.0, -2.0]


@pytest.mark.parametrize("name", EDITS)
def test_a_write_behind_an_edit_is_differentiated(name):
    x = torch.tensor([3.0, -4.0], requires_grad=True)
    h = x * 1
    y = EDITS[name](h)
    y.mul_(3)
    h.mul_(5)
    (found,) = torch.autograd.grad((y**2).sum() + (h**3).sum(), x)
    x = x.detach()
    through = {"clip": 18 * x / (18 * x).norm(), "replace": torch.full_like(x, 5.0)}
    sign = 1 if name == "straight_through" else -1
    torch.testing.assert_close(found, through.get(name, sign * 18 * x) + 375 * x**2)


@pytest.mark.parametrize("name", EDITS)
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_an_edit_without_gradients_gives_no_leaf_that_requires_them(name, mode):
    with mode():
        y = EDITS[name](torch.nn.Parameter(torch.ones(3)))
    assert not y.requires_grad
    assert y.grad_fn is None


def test_a_checkpoint_computes_an_edit_again_where_another_mode_looks_on():
    """The checkpoint counts saved tensors, so no implementation of an edit may save a tensor."""
    x = torch.tensor([3.0, 4.0], requires_grad=True)
    f = lambda x: gt.reverse_gradient(x.sin(), 2.0) ** 2
    with torch.device("cpu"):
        y = torch.utils.checkpoint.checkpoint(f, x, use_reentrant=False)
    (found,) = torch.autograd.grad(y.sum(), x)
    assert torch.equal(found, torch.autograd.grad(f(x).sum(), x)[0])


def test_a_joint_edit_of_leaves_that_share_memory_copies_them():
    base = torch.ones(4, requires_grad=True)
    xs = [base[:2], base[1:], torch.ones(2, requires_grad=True)]
    ys = gt.clip_gradient(xs, max_norm=1.0)
    grads = torch.autograd.grad(sum(y.sum() for y in ys), base, retain_graph=True)
    torch.testing.assert_close(grads[0], torch.tensor([1.0, 2.0, 1.0, 1.0]) / 7**0.5)
    ys[0].mul_(2)
    assert torch.equal(ys[1], torch.ones(3))


def test_writing_in_place_behind_straight_through_leaves_a_tensor_that_f_keeps():
    table = torch.zeros(3)
    x = torch.ones(3, requires_grad=True)
    y = gt.straight_through(lambda x: table)(x * 1.0)
    y += 1.0
    y.sum().backward()
    assert table.tolist() == [0.0] * 3 and x.grad.tolist() == [1.0] * 3
