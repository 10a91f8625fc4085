"""Recomputation restores random states, buffers and exchanged parameters, and no other state."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from torch import nn

from gradtools.code_origin import LIBRARY, PACKAGE, USER, whose
from gradtools.torch.state import Held, RunState


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.ones(2))
        self.register_buffer("b", torch.zeros(2))
        self.inner, self.seen = nn.BatchNorm1d(2), [1]
        self.generator = torch.Generator(torch.get_default_device())


def no_buffer(model):
    model.b = None


CHANGES = {
    "a buffer": lambda m: m.b.add_(1),
    "a buffer changed through .data": lambda m: m.b.data.add_(1),
    "running statistics": lambda m: m.inner(torch.randn(3, 2)),
    "a deleted buffer": no_buffer,
    "a new buffer": lambda m: m.register_buffer("c", torch.ones(1)),
    "a generator": lambda m: torch.rand(1, generator=m.generator),
    "the random stream": lambda m: torch.rand(1),
    "python's random stream": lambda m: random.random(),
    "NumPy's random stream": lambda m: np.random.rand(),  # noqa: NPY002
    "the cached second number of random.gauss": lambda m: random.gauss(0, 1),
    "the cached second number of np.random.randn": lambda m: np.random.randn(),  # noqa: NPY002
}


def everything(model):
    """Return all restored state in a form that can be compared."""
    buffers = [(k, x.tolist(), x._version) for k, x in model.named_buffers()]
    state = np.random.get_state()  # noqa: NPY002
    streams = [torch.get_rng_state(), model.generator.get_state()]
    numpy = [x.tobytes() if isinstance(x, np.ndarray) else x for x in state]
    return [buffers, [x.numpy().tobytes() for x in streams], random.getstate(), numpy]


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
@pytest.mark.parametrize("reach", [lambda m: m, lambda m: lambda z: m(z), lambda m: [{"m": m}]])
def test_what_changes_is_put_back(change, reach):
    model = Model()
    random.gauss(0, 1), np.random.randn()  # noqa: NPY002 - each keeps a second number
    first, before = RunState.now(Held([reach(model)])), everything(model)
    change(model)
    later, after = first.again(), everything(model)
    assert after != before
    first.until(later).restore()
    assert everything(model) == before
    later.restore()
    assert everything(model) == after


def test_what_did_not_change_is_shared_and_a_list_is_not_put_back():
    model = Model()
    first = RunState.now(Held([model]))
    model.seen.append(2)
    again = first.again()
    assert all(a[1] is b[1] for a, b in zip(first.copies, again.copies, strict=True))
    first.restore()
    assert model.seen == [1, 2]


def test_exchanged_parameters_are_put_back_for_a_recomputation():
    model = Model()
    held, first = Held([model]), model.inner.weight
    model.inner.weight = other = nn.Parameter(torch.ones(2))
    changed = held.reset_parameters()
    assert model.inner.weight is first
    for own, before in changed:
        own.update(before)
    assert model.inner.weight is other


def test_a_class_is_of_who_wrote_its_module():
    assert [whose(kind) for kind in (RunState, nn.Linear, random.Random)] == [LIBRARY] * 3
    assert whose(pytest.Item) == PACKAGE
    assert whose(type("Mine", (), {"__module__": __name__})) == USER
