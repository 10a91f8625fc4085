"""A torch.nn.Module where a pytree of arrays is taken, against plain loops with `backward`."""

from __future__ import annotations

from collections import UserDict
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

import gradtools.torch as gt
from gradtools import GradtoolsError

pytestmark = pytest.mark.torch
X = torch.randn(6, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


class Noisy(nn.Module):
    """Batch norm, dropout, a counter, and a buffer that is assigned anew."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.a, self.norm, self.b = nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1)
        self.drop, self.calls = nn.Dropout(0.5), 0
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x):
        self.calls += 1
        self.seen = self.seen + 1
        return self.b(self.drop(torch.tanh(self.norm(self.a(x)))))


def mlp():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)).double()


def tied():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3)).double()
    net[2].weight = net[0].weight
    return net


def partly_frozen():
    net = mlp()
    net[0].requires_grad_(False)
    return net


def recurrent():
    class Last(nn.Module):
        def __init__(self):
            super().__init__()
            self.rnn = nn.GRU(3, 4, batch_first=True)

        def forward(self, x):
            return self.rnn(x[:, None])[0][:, -1]

    torch.manual_seed(0)
    return Last().double()


def in_blocks():
    torch.manual_seed(0)
    block = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(), nn.Tanh())
    return nn.Sequential(gt.checkpoint(block), nn.Linear(4, 1)).double()


KINDS = {
    "a multilayer perceptron": mlp,
    "state that changes": lambda: Noisy().double(),
    "tied": tied,
    "partly frozen": partly_frozen,
    "recurrent": recurrent,
    "blocks that are computed again": in_blocks,
}
kinds = pytest.mark.parametrize("make", KINDS.values(), ids=KINDS)


def loss(net, x):
    return net(x).square().mean()


def plain(net, x=X, create_graph=False):
    """The value and the gradients by name, and what the call leaves behind."""
    torch.manual_seed(3)
    value = loss(net, x)
    free = {name: p for name, p in net.named_parameters() if p.requires_grad}
    grads = torch.autograd.grad(value, list(free.values()), create_graph=create_graph)
    return value, dict(zip(free, grads, strict=True))


def same(found, wanted):
    assert list(found) == list(wanted)
    for name, x in wanted.items():
        torch.testing.assert_close(found[name], x.detach(), rtol=1e-12, atol=1e-14)


@kinds
def test_the_gradient_is_that_of_a_plain_loop_and_so_is_what_stands_afterwards(make):
    ours, theirs = make(), make()
    torch.manual_seed(3)
    value, grads = gt.value_and_grad(loss)(ours, X)
    after = torch.get_rng_state()
    wanted, wanted_grads = plain(theirs)
    same({"value": value}, {"value": wanted})
    same(grads, wanted_grads)
    assert torch.equal(after, torch.get_rng_state())
    same(dict(ours.named_buffers()), dict(theirs.named_buffers()))
    assert vars(ours).get("calls") == vars(theirs).get("calls")
    assert all(p.grad is None for p in ours.parameters())
    assert not any(g.requires_grad for g in grads.values())


@kinds
def test_second_order_is_double_backward(make):
    net = make().eval()
    free = {name: p for name, p in net.named_parameters() if p.requires_grad}
    ones = {name: torch.ones_like(p) for name, p in free.items()}
    _, (found,) = gt.hvp(lambda net: loss(net, X), (net,), (ones,))
    _, grads = plain(net, create_graph=True)
    total = sum(g.sum() for g in grads.values())
    same(found, dict(zip(free, torch.autograd.grad(total, list(free.values())), strict=True)))


@kinds
def test_forward_mode_is_the_inner_product_with_the_gradient(make):
    net = make().eval()
    _, grads = plain(net)
    along = {name: torch.randn_like(g) for name, g in grads.items()}
    _, tangent = gt.jvp(lambda net: loss(net, X), (net,), (along,))
    wanted = sum((g * along[name]).sum() for name, g in grads.items())
    torch.testing.assert_close(tangent, wanted, rtol=1e-11, atol=1e-14)


@kinds
def test_microbatches_and_examples_are_a_loop(make):
    net = make().eval()
    _, wanted = plain(net)
    same_up_to = lambda found: [
        torch.testing.assert_close(found[k], g, rtol=1e-11, atol=1e-13) for k, g in wanted.items()
    ]
    same_up_to(gt.microbatched(loss, 2)(net, X)[1])
    each = gt.per_example_grad(lambda net, x: loss(net, x[None]), chunk_size=1)(net, X)
    same_up_to({name: g.mean(0) for name, g in each.items()})


def test_two_modules_play_and_each_is_given_its_own_gradients():
    a, b = mlp(), partly_frozen()
    f = lambda a, b, x: loss(a, x) - 2 * loss(b, x)
    _, (down, up) = gt.minimax_value_and_grad(f, 0, 1)(a, b, X)
    gt.assign_gradients(a, down)
    gt.assign_gradients(b, up)
    same({k: p.grad for k, p in a.named_parameters()}, plain(a)[1])
    assert b[0].weight.grad is None
    same({"g": b[2].weight.grad}, {"g": 2 * plain(b)[1]["2.weight"]})


def test_a_derivative_inside_of_a_derivative_of_the_same_module():
    net = mlp()
    steep = lambda net: sum(g.square().sum() for g in gt.grad(loss)(net, X).values())
    found = gt.grad(steep)(net)
    _, grads = plain(net, create_graph=True)
    total = sum(g.square().sum() for g in grads.values())
    free = dict(net.named_parameters())
    same(found, dict(zip(free, torch.autograd.grad(total, list(free.values())), strict=True)))


def test_a_module_whose_call_fails_is_as_after_a_plain_call():
    class Failing(Noisy):
        def forward(self, x):
            super().forward(x)
            raise ValueError("mine")

    net = Failing().double()
    with pytest.raises(ValueError, match="mine"):
        gt.grad(loss)(net, X)
    assert net.calls == 1 and float(net.seen) == 1


def test_a_lost_gradient_of_a_module_that_is_an_argument():
    report = gt.why_zero(lambda net, x: net[2](net[1](net[0](x)).detach()).sum(), mlp(), X)
    assert {f.argument: f.kind for f in report} == {
        "argument 0['0.weight']": "detached",
        "argument 0['0.bias']": "detached",
    }


def test_a_module_is_refused_by_name_in_compiled_code():
    net, x = nn.Linear(3, 2), torch.ones(4, 3)
    step = torch.compile(lambda x: gt.grad(lambda net: net(x).sum())(net), backend="eager")
    with pytest.raises(
        GradtoolsError, match="grad: argument 0 is a module, Linear, which compiled"
    ):
        step(x)


def test_a_module_that_cannot_be_copied_is_refused_by_name():
    net = nn.LazyLinear(2)
    with pytest.raises(GradtoolsError, match=r"grad: .* has no shape yet"):
        gt.grad(loss)(net, X)


# --- modules inside of trees -------------------------------------------------------------------


@dataclass
class Pair:
    enc: Any
    dec: Any


class Named(NamedTuple):
    enc: Any
    dec: Any


FORMS = {
    "dict": lambda e, d: {"enc": e, "dec": d},
    "nested list": lambda e, d: {"enc": [e], "dec": (d,)},
    "dataclass": Pair,
    "named tuple": Named,
    "mapping": lambda e, d: UserDict(enc=e, dec=d),
}


def taken(tree, name):
    found = tree[name] if isinstance(tree, dict | UserDict) else getattr(tree, name)
    return found[0] if isinstance(found, list | tuple) else found


def joint(tree, x):
    return taken(tree, "dec")(taken(tree, "enc")(x)).square().mean()


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_modules_inside_of_a_tree_are_differentiated_each_by_its_parameters(form):
    encoder, decoder = Noisy().double().eval(), nn.Linear(1, 2).double()
    decoder.bias.requires_grad_(False)
    tree = form(encoder, decoder)
    value, grads = gt.value_and_grad(joint)(tree, X)
    wanted = joint(tree, X)
    wanted.backward()
    torch.testing.assert_close(value, wanted.detach())
    assert encoder.seen == 2
    for name, module in (("enc", encoder), ("dec", decoder)):
        free = {k: p.grad for k, p in module.named_parameters() if p.requires_grad}
        same(taken(grads, name), free)
        module.zero_grad()
    gt.assign_gradients(tree, grads)
    same({"w": decoder.weight.grad}, {"w": taken(grads, "dec")["weight"]})
    tangent = gt.jvp(lambda tree: joint(tree, X), (tree,), (grads,))[1]
    total = sum(g.square().sum() for n in ("enc", "dec") for g in taken(grads, n).values())
    torch.testing.assert_close(tangent, total)
    torch.testing.assert_close(gt.microbatched(joint, 2)(tree, X)[0], value)


def test_a_parameter_in_two_modules_of_a_tree_is_refused_by_name():
    one, other = nn.Linear(3, 3), nn.Linear(3, 3)
    other.weight = one.weight
    with pytest.raises(GradtoolsError, match="grad: the parameter weight stands in two of"):
        gt.grad(lambda t: t["a"](t["b"](X.float())).sum())({"a": one, "b": other})
