"""Sentences of docs/chunked-reference.md on PyTorch that no other test holds, each tried."""

from __future__ import annotations

import collections
import copy
import dataclasses
import functools
import io
import itertools
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import gradtools.torch as gt
from gradtools import GradtoolsError
from gradtools.torch.replaying import consistency


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


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (lambda x: object(), r"output\[1\] is an object.*wrap f so that it returns out\[0\]"),
        (lambda x: x.mean(), r"output\[1\] has shape \(\)"),
        (lambda x: x @ x.T, "cannot be joined on axis 0"),
        (lambda x: str(float(x.sum())), r"output\[1\] is .* the same for all chunks"),
    ],
    ids=["a cache", "a loss", "a table of pairs", "a string that differs"],
)
def test_what_cannot_be_joined_is_refused_by_name(more, said):
    with pytest.raises(GradtoolsError, match=said):
        gt.chunked(lambda x: (x, more(x)), 2)(batch(5))


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


def test_a_hook_at_an_intermediate_value_sees_the_parts_of_a_second_derivative():
    seen, w = [], torch.tensor(2.0, dtype=torch.float64, requires_grad=True)

    def note(ct):
        if not gt.is_recomputing():
            seen.append(ct.detach().clone())

    def f(x):
        h = x * w
        h.register_hook(note)
        return h.sin()

    found = []
    for encode in (f, gt.chunked(f, 2)):
        x = torch.tensor([0.3, 0.4], dtype=torch.float64, requires_grad=True)
        y = encode(x)
        (slope,) = torch.autograd.grad(y.sum(), x, create_graph=True)
        seen.clear()
        (mixed,) = torch.autograd.grad(slope.square().sum() + y.sum(), w)
        found.append((mixed, [*seen]))
    (plain, one), (ours, parts) = found
    torch.testing.assert_close(ours, plain)
    assert (len(one), len(parts)) == (1, 2)
    torch.testing.assert_close(sum(parts), one[0])


def test_hooks_on_gradients_run_in_the_order_of_the_chunks():
    w, seen = torch.ones((), requires_grad=True), []

    def f(x):
        y = x * w
        y.register_hook(lambda ct: seen.append(int(x[0])))
        return y.sin()

    gt.chunked(f, 1)(torch.arange(3.0)).sum().backward()
    assert seen == [0, 1, 2]


class Casts(TorchDispatchMode):
    """Counts what is cast to bfloat16 of one shape."""

    def __init__(self, shape):
        super().__init__()
        self.shape, self.count = shape, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten._to_copy.default and args[0].shape == self.shape:
            self.count += (kwargs or {}).get("dtype") is torch.bfloat16
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(("within", "casts"), [(True, 1), (False, 1 + 4)])
def test_a_weight_is_cast_once_for_all_chunks_of_a_region(within, casts):
    net, x = nn.Linear(3, 5), batch(8)
    with Casts(net.weight.shape) as count:
        with torch.autocast("cpu", torch.bfloat16):
            value = gt.chunked(net, 2)(x).float().sum()
            if within:
                value.backward()
        if not within:
            value.backward()
    assert count.count == casts


def test_a_cache_of_random_numbers_out_of_reach_is_refused_while_it_is_filled():
    w = torch.ones(3, requires_grad=True)
    noise = functools.lru_cache(torch.rand)
    f = lambda x: x * w * noise(3)
    step = lambda: gt.chunked(f, 2)(batch()).sum().backward()
    with pytest.raises(GradtoolsError, match="draws from it only once"):
        step()
    noise.cache_clear()
    f(batch())
    step()


def test_what_is_verified_again():
    net, compared = mlp(nn.Dropout(0.5)), []
    f = gt.chunked(net, 2)
    compare = consistency.Verification.compare

    def step(x):
        compared.clear()
        f(x).float().sum().backward()
        return len(compared)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            consistency.Verification,
            "compare",
            lambda self, i, *rest: (compared.append(i), compare(self, i, *rest)),
        )
        x = batch()
        assert [step(x), step(x), step(batch(6)), step(x)] == [2, 0, 3, 0]
        assert [step(x.clone().requires_grad_()), step(x.clone().requires_grad_())] == [2, 0]
        net.eval()
        assert [step(x), step(x)] == [2, 0]
        with torch.autocast("cpu", torch.bfloat16):
            assert [step(x), step(x)] == [2, 0]
        net.double()
        assert [step(x.double()), step(x.double())] == [2, 0]


def test_a_checksum_is_kept_for_each_output_and_no_output():
    kept = []
    keep = consistency.Verification.keep

    def noted(self, i, *rest):
        keep(self, i, *rest)
        kept.append(self)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(consistency.Verification, "keep", noted)
        gt.chunked(mlp(), 2)(batch(6)).sum().backward()
    verification = kept[0]
    checksums = [f for record in verification.first.values() for f in record.figures]
    assert len(verification.first) == len(checksums) == 3
    assert all(isinstance(f[2], int) for f in checksums)


@pytest.mark.parametrize("switch", [torch.set_grad_enabled, torch.set_default_device])
def test_a_mode_that_f_leaves_switched_is_refused_at_once(switch):
    w = torch.ones(3, requires_grad=True)

    def f(x):
        y = x * w
        switch(False if switch is torch.set_grad_enabled else "meta")
        return y

    try:
        with pytest.raises(GradtoolsError, match="leaves it so"):
            gt.chunked(f, 2)(batch())
    finally:
        torch.set_grad_enabled(True)
        torch.set_default_device(None)
