"""The graphs in docs/gallery.md evaluate to the numbers that their programs compute."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import gradtools.torch as gt
from tests.support.costs import saved_bytes
from tests.support.drawn_graphs import computed, differing
from tests.support.gallery import PICTURES, Picture

BY_NAME = {picture.name: picture for picture in PICTURES}


def by_autograd(picture: Picture) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return two dicts, which map names in the graph to inputs and to PyTorch's own results."""
    torch.manual_seed(0)
    graph = picture.graph()
    named = [graph.values[v].name for v in graph.inputs[: len(picture.args)]]
    xs = [x.clone().requires_grad_() for x in picture.args]
    args = dict(zip(named, xs, strict=True))
    held = {name: x.detach().clone() for name, x in picture.held.items()}
    leaves = {**args, **picture.parameters}
    y = picture.f(*args.values())
    ct = torch.randn_like(y).requires_grad_()
    found = torch.autograd.grad(
        y, leaves.values(), ct, create_graph=picture.order == 2, allow_unused=True
    )
    grads = dict(zip(leaves, found, strict=True))
    given = {**args, **held, "cotangent of output": ct}
    out = {"output": y, **{f"gradient of {name}": g for name, g in grads.items()}}
    if picture.order == 2:
        (g,) = found
        v = torch.randn_like(g)
        given[f"cotangent of gradient of {named[0]}"] = v
        ends = {**args, "cotangent of output": ct}
        second = torch.autograd.grad(g, ends.values(), v, allow_unused=True)
        out |= {f"second gradient of {n}": s for n, s in zip(ends, second, strict=True)}
    return given, {name: x for name, x in out.items() if x is not None}


@pytest.mark.parametrize("name", BY_NAME)
def test_a_graph_computes_what_autograd_computes(name):
    given, expected = by_autograd(BY_NAME[name])
    assert not differing(computed(BY_NAME[name].graph(), given), expected)


@pytest.mark.slow_at("transformer_block", "resnet_block")
@pytest.mark.sweep_at("chunked_loss", "frozen_network")
@pytest.mark.parametrize("name", [p.name for p in PICTURES if p.order == 1])
def test_what_is_kept_is_what_pytorch_keeps(name):
    picture = BY_NAME[name]
    kept = sum(picture.graph().kept.values())
    assert kept == saved_bytes(gt, picture.f, *picture.args)


def test_the_second_gradient_that_is_lost_has_no_output():
    for name, is_there in (("sinh_lost", False), ("sinh", True)):
        graph = BY_NAME[name].graph()
        named = {graph.values[v].name for v in graph.outputs}
        assert ("second gradient of x" in named) == is_there
