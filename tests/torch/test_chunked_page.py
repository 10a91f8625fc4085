"""Sentences of docs/chunked-reference.md on PyTorch that no other test holds, each tried."""

from __future__ import annotations

import collections
import copy
import dataclasses
import io
import itertools
from typing import Any

import pytest
import torch
from torch import nn

import gradtools.torch as gt


def mlp(*more):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(3, 4), *more, nn.Tanh(), nn.Linear(4, 2))


def batch(rows=4):
    return torch.linspace(-1.0, 1.0, 3 * rows).reshape(rows, 3)


def test_microbatched_per_example_grad_and_vmap_read_in_axes_as_chunked_does():
    w, x = torch.tensor([1.0, 2.0, 3.0]), batch()
    product = lambda w, x: (w * x).sum()
    mean = lambda w, x: (x @ w).mean()
    for axes in (None, {"x": 0}, (None, 0)):  # what is differentiated is shared
        rows = gt.per_example_grad(product, in_axes=axes)(w, x)
        torch.testing.assert_close(rows, x)
        torch.testing.assert_close(
            gt.microbatched_value_and_grad(mean, 3, in_axes=axes)(w, x)[1], x.mean(0)
        )
    for call in (lambda f: f(w, x), lambda f: f(w, x=x)):
        torch.testing.assert_close(call(gt.vmap(product, in_axes={"w": None})), x @ w)


@dataclasses.dataclass
class Out:
    """An output like a model's."""

    rows: torch.Tensor
    more: Any


Pair = collections.namedtuple("Pair", "x y")


def test_mappings_dataclasses_and_named_tuples_may_stand_in_each_other():
    def f(batch):
        more = collections.UserDict(pair=Pair(batch["pair"].y, None), name="n", flag=True)
        return {"out": Out(batch["pair"].x * 2, more)}

    x = batch(5)
    found = gt.chunked(f, 2)(collections.UserDict(pair=Pair(x, x + 1)))["out"]
    assert torch.equal(found.rows, x * 2)
    assert torch.equal(found.more["pair"].x, x + 1)
    assert (found.more["pair"].y, found.more["name"], found.more["flag"]) == (None, "n", True)


def test_a_module_is_saved_loaded_moved_and_copied_with_chunked_and_without():
    net, x = mlp(), batch()
    ours = gt.chunked(net, 2)
    other = mlp(nn.Identity())
    with pytest.raises(RuntimeError):
        other.load_state_dict(ours.state_dict())  # of another model
    mlp().load_state_dict(ours.state_dict())
    gt.chunked(mlp(), 2).load_state_dict(net.state_dict())
    file = io.BytesIO()
    torch.save(ours, file)
    file.seek(0)
    again = torch.load(file, weights_only=False)
    for copied in (again, copy.deepcopy(ours)):
        torch.testing.assert_close(copied(x), net(x))
    ours.double().eval()
    assert net[0].weight.dtype is torch.float64
    assert not net.training


def test_nothing_is_kept_inside_of_saved_tensors_hooks():
    runs, net = itertools.count(), mlp()
    f = lambda x: net(x) + 0 * next(runs)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t):
        z = gt.chunked(f, 2, verify=False)(batch())
    z.sum().backward()
    assert next(runs) == 4  # each chunk twice
