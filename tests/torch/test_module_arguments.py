"""For modules of every kind, gradtools and `loss.backward()` compute bitwise equal gradients."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, parametrize

import gradtools.torch as gt
from gradtools import DisconnectedInputError

pytestmark = pytest.mark.torch
X = torch.randn(6, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


def mlp():
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))


def squared(net):
    return net(X).square().mean()


class Marked(nn.Module):
    """A module whose weight decay depends on an attribute of each parameter."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 2)
        self.layer.bias.no_decay = True

    def forward(self, x):
        decayed = (p for p in self.parameters() if not getattr(p, "no_decay", False))
        return self.layer(x) + sum(p.square().sum() for p in decayed)


class ByClass(nn.Linear):
    """A module with a penalty on attributes that are instances of nn.Parameter."""

    def forward(self, x):
        return super().forward(x) + sum(
            p.square().sum() for p in (self.weight, self.bias) if isinstance(p, nn.Parameter)
        )


class Lambda(nn.Module):
    """A module with a lambda that closes over the module."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 3)
        self.gate = lambda x: torch.sigmoid(self.layer(x))

    def forward(self, x):
        return self.layer(x) * self.gate(x)


class Table(nn.Module):
    """A module with an attribute that is a dict whose keys are parameters."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(3, 3), nn.Linear(3, 3)])
        self.scales = {layer.weight: k + 1.0 for k, layer in enumerate(self.layers)}

    def forward(self, x):
        for layer in self.layers:
            x = layer(x) * self.scales[layer.weight]
        return x


class Listed(nn.Module):
    def __init__(self):
        super().__init__()
        self.weights = nn.ParameterList([nn.Parameter(torch.randn(3, 3)) for _ in range(3)])

    def forward(self, x):
        for w in self.weights:
            x = torch.tanh(x @ w)
        return x


def tied():
    net = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3))
    net[2].weight = net[0].weight
    return net


def hooked_forward():
    net = mlp()
    net.register_forward_hook(lambda module, args, out: out * net[0].weight.sum())
    return net


def hooked_parameter():
    net = mlp()
    net[0].weight.register_hook(lambda g: g * 0.5)
    return net


def hooked_module():
    net = mlp()
    net[2].register_full_backward_hook(lambda module, grads, cts: (grads[0] * 3.0,))
    return net


def parametrized():
    class Symmetric(nn.Module):
        def forward(self, w):
            return w.triu() + w.triu(1).transpose(-1, -2)

    net = nn.Linear(3, 3)
    parametrize.register_parametrization(net, "weight", Symmetric())
    return net


def stateful():
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Linear(4, 1))


def partly_frozen():
    net = mlp()
    net[0].requires_grad_(False)
    return net


def recomputed():
    return nn.Sequential(gt.checkpoint(nn.Sequential(nn.Linear(3, 4), nn.Dropout())), nn.Tanh())


NETS = {
    "attributes of parameters": Marked,
    "classes of parameters": lambda: ByClass(3, 2),
    "a lambda that closes over the module": Lambda,
    "a table keyed by parameters": Table,
    "a ParameterList": Listed,
    "tied parameters": tied,
    "a forward hook that closes over the module": hooked_forward,
    "a hook on a parameter": hooked_parameter,
    "a backward hook on a submodule": hooked_module,
    "a parametrization": parametrized,
    "weight_norm": lambda: parametrizations.weight_norm(nn.Linear(3, 2)),
    "spectral_norm": lambda: parametrizations.spectral_norm(nn.Linear(3, 2)),
    "the old weight_norm": lambda: nn.utils.weight_norm(nn.Linear(3, 2)),
    "the old spectral_norm": lambda: nn.utils.spectral_norm(nn.Linear(3, 2)),
    "batch normalization and dropout": stateful,
    "partly frozen": partly_frozen,
    "a checkpoint inside": recomputed,
    "a scripted module": lambda: torch.jit.script(mlp()),
    "a lazy module": lambda: nn.Sequential(nn.LazyLinear(3), nn.Tanh()),
}
nets = pytest.mark.parametrize("make", NETS.values(), ids=NETS)
OPERATORS = {
    "grad": lambda f, net: (None, gt.grad(f)(net)),
    "value_and_grad": lambda f, net: gt.value_and_grad(f)(net),
    "minimax": lambda f, net: gt.minimax_value_and_grad(f, 0, ())(net),
    "vjp": lambda f, net: _by_vjp(f, net),
    # The reduction is "sum", because a mean divides by the sum of the weights, which causes
    # rounding errors.
    "microbatched": lambda f, net: gt.microbatched_value_and_grad(
        lambda n, x: f(n), 6, reduction="sum"
    )(net, X),
}


def _by_vjp(f, net):
    value, pullback = gt.vjp(f, net)
    return value, pullback(torch.ones_like(value))[0]


def seeded(make):
    torch.manual_seed(1)
    net = make().double()
    torch.manual_seed(2)
    return net


@pytest.mark.filterwarnings("ignore:.*weight_norm.*deprecated", "ignore:.*jit.script")
@pytest.mark.parametrize("operator", OPERATORS.values(), ids=OPERATORS)
@nets
def test_a_gradient_at_a_module_is_that_of_backward(make, operator):
    theirs = seeded(make)
    wanted = squared(theirs)
    wanted.backward()
    state = torch.get_rng_state()
    ours = seeded(make)
    value, grads = operator(squared, ours)
    grads = grads[0] if isinstance(grads, tuple) else grads
    assert value is None or torch.equal(value, wanted)
    assert torch.equal(torch.get_rng_state(), state)
    free = {name: p.grad for name, p in theirs.named_parameters() if p.requires_grad}
    assert list(grads) == list(free)
    for name, g in free.items():
        assert torch.equal(grads[name], g), name
    buffers = dict(theirs.named_buffers())
    assert all(torch.equal(b, buffers[name]) for name, b in ours.named_buffers())
    assert all(p.grad is None for p in ours.parameters())


@pytest.mark.filterwarnings("ignore:.*weight_norm.*deprecated", "ignore:.*jit.script")
@nets
def test_a_penalty_on_the_gradient_at_a_module_is_double_backward(make):
    theirs = seeded(make)
    value = squared(theirs)
    ps = [p for p in theirs.parameters() if p.requires_grad]
    grads = torch.autograd.grad(value, ps, create_graph=True)
    (value + sum(g.square().sum() for g in grads)).backward()
    ours = seeded(make)
    value, grads = gt.value_and_grad(squared)(ours)
    torch.rand(3)  # the recomputation must restore the random state of the first evaluation
    state = torch.get_rng_state()
    (value + sum(g.square().sum() for g in grads.values())).backward()
    assert torch.equal(torch.get_rng_state(), state)
    for p, q in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert (p.grad is None) == (q.grad is None)
        if q.grad is not None:
            torch.testing.assert_close(p.grad, q.grad, rtol=1e-9, atol=1e-12)
    buffers = dict(theirs.named_buffers())
    assert all(torch.equal(b, buffers[name]) for name, b in ours.named_buffers())


def test_sparse_gradients_are_those_of_backward():
    net = nn.EmbeddingBag(5, 2, mode="sum", sparse=True).double()
    f = lambda net: net(torch.tensor([[0, 2], [2, 4]])).square().sum()
    f(net).backward()
    grads = gt.grad(f)(net)
    assert grads["weight"].is_sparse
    assert torch.equal(grads["weight"].to_dense(), net.weight.grad.to_dense())


@pytest.mark.parametrize("options", [{}, {"disconnected_inputs": "strict"}])
def test_a_module_in_which_nothing_requires_grad_is_refused(options):
    net = nn.Linear(3, 1).requires_grad_(False).double()
    for derivative in (gt.grad, gt.value_and_grad):
        with pytest.raises(DisconnectedInputError, match="no parameter of argument 0, Linear"):
            derivative(squared, **options)(net)
    for derivative in (
        lambda: gt.vjp(squared, net),
        lambda: gt.hvp(squared, (net,), ({},)),
        lambda: gt.microbatched_value_and_grad(lambda net, x: net(x).mean(), 2)(net, X),
    ):
        with pytest.raises(DisconnectedInputError, match="no parameter of argument 0, Linear"):
            derivative()


def test_a_gradient_that_is_kept_keeps_no_activations():
    net = nn.Sequential(*[nn.Linear(64, 64) for _ in range(4)]).double()
    saved = []
    pack = lambda x: saved.append(x.numel()) or x
    grads = gt.grad(lambda net: net(torch.ones(1000, 64, dtype=X.dtype)).square().mean())(net)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        total = sum(g.sum() for g in grads.values())
    assert total.requires_grad and sum(saved) == 0
