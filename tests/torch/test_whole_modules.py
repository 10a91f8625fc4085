"""Compares operators on a torch.nn.Module with plain loops and `backward`."""

from __future__ import annotations

from collections import UserDict
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn

import gradtools.torch as gt
from gradtools import GradtoolsError

pytestmark = pytest.mark.torch
X = torch.randn(6, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


class Noisy(nn.Module):
    """A module with batch norm, dropout, a call counter and a buffer that is reassigned."""

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


def partly_frozen():
    net = mlp()
    net[0].requires_grad_(False)
    return net


def in_blocks():
    torch.manual_seed(0)
    block = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(), nn.Tanh())
    return nn.Sequential(gt.checkpoint(block), nn.Linear(4, 1)).double()


KINDS = {
    "a multilayer perceptron": mlp,
    "state that changes": lambda: Noisy().double(),
    "partly frozen": partly_frozen,
    "recomputed blocks": in_blocks,
}
kinds = pytest.mark.parametrize("make", KINDS.values(), ids=KINDS)


def loss(net, x):
    return net(x).square().mean()


def plain(net, x=X, create_graph=False):
    """Return the value and a dict of gradients, computed by plain PyTorch."""
    torch.manual_seed(3)
    value = loss(net, x)
    free = {name: p for name, p in net.named_parameters() if p.requires_grad}
    grads = torch.autograd.grad(value, list(free.values()), create_graph=create_graph)
    return value, dict(zip(free, grads, strict=True))


def same(found, wanted):
    assert list(found) == list(wanted)
    for name, x in wanted.items():
        torch.testing.assert_close(found[name].detach(), x.detach(), rtol=1e-12, atol=1e-14)


def test_forward_mode_leaves_the_buffers_of_one_plain_call():
    ours, theirs = Noisy().double(), Noisy().double()
    torch.manual_seed(3)
    gt.jvp(lambda net: loss(net, X), (ours,), (directions(ours),))
    plain(theirs)
    same(dict(ours.named_buffers()), dict(theirs.named_buffers()))
    assert ours.calls == theirs.calls == 1


@pytest.mark.slow_at("recomputed blocks")
@kinds
def test_microbatches_and_examples_are_a_loop(make):
    net = make().eval()
    _, wanted = plain(net)
    same_up_to = lambda found: [
        torch.testing.assert_close(found[k], g, rtol=1e-11, atol=1e-13) for k, g in wanted.items()
    ]
    same_up_to(gt.microbatched_value_and_grad(loss, 2)(net, X)[1])
    each = gt.per_example_grad(lambda net, x: loss(net, x[None]), chunk_size=1)(net, X)
    same_up_to({name: g.mean(0) for name, g in each.items()})


def test_a_module_whose_call_fails_is_as_after_a_plain_call():
    class Failing(Noisy):
        def forward(self, x):
            super().forward(x)
            raise ValueError("mine")

    net = Failing().double()
    with pytest.raises(ValueError, match="mine"):
        gt.grad(loss)(net, X)
    assert net.calls == 1 and float(net.seen) == 1


# --- modules inside of containers --------------------------------------------------------------


@dataclass
class Pair:
    enc: Any
    dec: Any


FORMS = {
    "dict": lambda e, d: {"enc": e, "dec": d},
    "dataclass": Pair,
    "mapping": lambda e, d: UserDict(enc=e, dec=d),
}


def taken(tree, name):
    return tree[name] if isinstance(tree, dict | UserDict) else getattr(tree, name)


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
    torch.testing.assert_close(gt.microbatched_value_and_grad(joint, 2)(tree, X)[0], value)


def test_a_parameter_in_two_modules_of_a_tree_is_refused_by_name():
    one, other = nn.Linear(3, 3), nn.Linear(3, 3)
    other.weight = one.weight
    with pytest.raises(GradtoolsError, match="grad: the parameter weight is in two of"):
        gt.grad(lambda t: t["a"](t["b"](X.float())).sum())({"a": one, "b": other})


# --- results that are differentiable with respect to the module


def directions(net):
    return {name: torch.ones_like(p) for name, p in net.named_parameters() if p.requires_grad}


def output(net):
    return net(X)


def at_ones(pull):
    out, pullback = pull
    return out, pullback(out)


AT_A_MODULE = {
    "grad": lambda net, of: gt.grad(of(loss))(net, X),
    "value_and_grad": lambda net, of: gt.value_and_grad(of(loss))(net, X),
    "aux": lambda net, of: gt.value_and_grad(of(lambda n, x: (loss(n, x), n(x))), has_aux=True)(
        net, X
    ),
    "vjp": lambda net, of: at_ones(gt.vjp(of(output), net)),
    "jvp": lambda net, of: gt.jvp(of(output), (net,), (of.ones,)),
    "linearize": lambda net, of: [f(of.ones) for f in gt.linearize(of(output), net)[1:]],
    "hvp": lambda net, of: gt.hvp(of(lambda n: loss(n, X)), (net,), (of.ones,)),
    "hvp, forward over reverse": lambda net, of: gt.hvp(
        of(lambda n: loss(n, X)), (net,), (of.ones,), mode="forward_over_reverse"
    ),
    "jacobian": lambda net, of: gt.jacobian(of(output))(net),
    "forward jacobian": lambda net, of: gt.jacobian(of(output), mode="forward")(net),
    "hessian": lambda net, of: gt.hessian(of(lambda n: loss(n, X)))(net),
    "per_example_grad": lambda net, of: gt.per_example_grad(of(loss))(net, X),
    "minimax": lambda net, of: gt.minimax_value_and_grad(
        of(lambda n, a: (n(X) * a).square().mean()), 0, 1
    )(net, torch.ones((), dtype=X.dtype)),
    "microbatched_value_and_grad": lambda net, of: gt.microbatched_value_and_grad(of(loss), 2)(
        net, X
    ),
}


class AtItself:
    """A callable that returns `f` unchanged, as a function of the module."""

    def __init__(self, net):
        self.ones = directions(net)

    def __call__(self, f):
        return f


class AtItsParameters(AtItself):
    """A callable that returns `f` as a function of a dict of the parameters that require grad."""

    def __init__(self, net):
        super().__init__(net)
        self.net = net

    def __call__(self, f):
        return lambda params, *rest: f(
            lambda x: torch.func.functional_call(self.net, params, (x,)), *rest
        )


def size(tree):
    leaves = torch.utils._pytree.tree_leaves(tree)
    return sum(x.square().sum() + x.sin().sum() for x in leaves)


@pytest.mark.parametrize("operator", AT_A_MODULE.values(), ids=AT_A_MODULE)
def test_a_loss_made_of_a_derivative_at_a_module_trains_it(operator):
    net, twin = mlp(), mlp()
    total = size(operator(net, AtItself(net)))
    total.backward()
    params = dict(twin.named_parameters())
    wanted = size(operator(params, AtItsParameters(twin)))
    wanted.backward()
    torch.testing.assert_close(total, wanted, rtol=1e-12, atol=1e-12)
    assert any(p.grad.abs().sum() > 1e-3 for p in params.values() if p.grad is not None)
    for name, p in net.named_parameters():
        expected = params[name].grad
        found = torch.zeros_like(p) if p.grad is None else p.grad
        expected = torch.zeros_like(p) if expected is None else expected
        torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("operator", AT_A_MODULE.values(), ids=AT_A_MODULE)
@pytest.mark.parametrize("frozen", [False, True])
def test_parameters_may_be_frozen_or_trained_before_a_derivative_is_used(operator, frozen):
    net, twin = mlp(), mlp()
    for one in (net, twin):
        one[0].weight.requires_grad_(not frozen)
    total = size(operator(net, AtItself(net)))
    net[0].weight.requires_grad_(frozen)
    total.backward()
    assert net[0].weight.requires_grad is frozen and net[0].weight.grad is None
    size(operator(twin, AtItself(twin))).backward()
    for p, q in zip(list(net.parameters())[1:], list(twin.parameters())[1:], strict=True):
        torch.testing.assert_close(p.grad, q.grad, rtol=0, atol=0)


def test_a_third_derivative_goes_through_a_gradient_at_a_module():
    net = mlp()
    params = list(net.parameters())

    def third(grads):
        second = torch.autograd.grad(size(grads), params, create_graph=True)
        return torch.autograd.grad(size(second), params)

    found = third(gt.grad(loss)(net, X))
    for x, y in zip(found, third(plain(net, create_graph=True)[1]), strict=True):
        torch.testing.assert_close(x, y, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("net", [mlp(), partly_frozen()])
def test_forward_mode_goes_through_a_gradient_at_a_module(net):
    """In an outer forward-mode derivative, the module's parameters have tangents but no graph."""
    free = {name: p for name, p in net.named_parameters() if p.requires_grad}
    tangent = {name: torch.full_like(p, 0.5) for name, p in free.items()}
    inner = lambda net: net(X).square().mean()
    along = lambda grads: sum((grads[name] * t).sum() for name, t in tangent.items())
    by_name = lambda grads: dict(zip(free, grads, strict=True))
    values = by_name(torch.autograd.grad(inner(net), free.values(), create_graph=True))
    second = by_name(torch.autograd.grad(along(values), free.values()))
    found, pushed = gt.jvp(gt.grad(inner), (net,), (tangent,))
    rows = gt.jacobian(lambda net: along(gt.grad(inner)(net)), mode="forward")(net)
    (product,), _ = gt.hvp(lambda net: along(gt.grad(inner)(net)), (net,), (tangent,))
    torch.testing.assert_close(found, values, rtol=1e-12, atol=1e-12)
    for result in (pushed, rows, product):
        torch.testing.assert_close(result, second, rtol=1e-12, atol=1e-12)


def test_a_module_in_forward_mode_keeps_its_tangents_under_vmap():
    net = partly_frozen()
    free = {name: p for name, p in net.named_parameters() if p.requires_grad}
    tangent = {name: torch.full_like(p, 0.5) for name, p in free.items()}
    one = lambda net, x: net(x).square().sum()
    rows = lambda net: gt.vmap(lambda x: gt.grad(one)(net, x))(X)
    found, pushed = gt.jvp(rows, (net,), (tangent,))
    for k, x in enumerate(X):
        values, along = gt.jvp(lambda net, x=x: gt.grad(one)(net, x), (net,), (tangent,))
        assert found.keys() == pushed.keys() == free.keys()
        torch.testing.assert_close({n: y[k] for n, y in found.items()}, values)
        torch.testing.assert_close({n: y[k] for n, y in pushed.items()}, along)


def test_a_graph_that_f_captures_counts_as_in_backward_and_stays():
    net, w = mlp(), torch.ones(6, 1, dtype=X.dtype, requires_grad=True)
    features = net[0](X)  # f captures this result, which depends on the parameters
    f = lambda net: (net(X) * w * net[2](features.tanh())).square().mean()
    sources = [w, *net.parameters()]
    grads = gt.grad(f)(net)
    wanted = torch.autograd.grad(f(net), list(net.parameters()), create_graph=True)
    same(grads, dict(zip(grads, wanted, strict=True)))
    found = torch.autograd.grad(size(grads), sources, retain_graph=True)
    for x, y in zip(found, torch.autograd.grad(size(wanted), sources), strict=True):
        torch.testing.assert_close(x, y, rtol=1e-10, atol=1e-12)


def test_a_step_between_a_gradient_at_a_module_and_its_use_is_refused():
    net = mlp()
    grads = gt.grad(loss)(net, X)
    with torch.no_grad():
        net[0].weight -= 0.1
    with pytest.raises(RuntimeError, match="modified by an inplace operation: grad computes f"):
        size(grads).backward()


def test_gradients_at_a_module_may_be_changed_in_place_and_written_to_grad():
    net = mlp()
    optimizer = torch.optim.Adam(net.parameters())
    grads = gt.grad(loss)(net, X)
    for name, p in net.named_parameters():
        p.grad = grads[name]
    nn.utils.clip_grad_norm_(net.parameters(), 0.1)
    optimizer.step()
    optimizer.zero_grad(set_to_none=False)
    loss(net, X).backward()
    assert all(p.grad.grad_fn is None for p in net.parameters())


class Likelihood(nn.Module):
    """A module that contains a model and computes a loss of the model's output, as in GPyTorch."""

    def __init__(self, model):
        super().__init__()
        self.model, self.noise = model, nn.Parameter(torch.ones((), dtype=torch.float64))

    def forward(self, out):
        return out.square().sum() * self.noise


READERS = {
    "grad": lambda f, m: gt.grad(f)(m),
    "vjp": lambda f, m: gt.vjp(f, m)[1](torch.ones((), dtype=X.dtype))[0],
    "hvp": lambda f, m: gt.hvp(f, (m,), (directions(m),))[0][0],
    "linearize": lambda f, m: gt.grad(lambda m: gt.linearize(f, m)[0])(m),
    "microbatched": lambda f, m: gt.microbatched_value_and_grad(lambda m, x: f(m), 3)(m, X)[1],
    "jacobian": lambda f, m: gt.jacobian(f, mode="reverse")(m),
}


@pytest.mark.parametrize("derivative", READERS.values(), ids=READERS)
def test_a_parameter_that_f_reads_by_another_reference_is_differentiated(derivative):
    net = mlp()
    likelihood = Likelihood(net)
    f = lambda m: m(net(X))  # f captures `net` instead of reading `m.model`
    names, ps = zip(*likelihood.named_parameters(), strict=True)
    wanted = torch.autograd.grad(f(likelihood), ps)
    same(derivative(f, likelihood), dict(zip(names, wanted, strict=True)))


@pytest.mark.parametrize("seed", range(4))
# PyTorch warns about attention under vmap
@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_the_norms_of_a_transformers_gradients_are_differentiated(seed):
    torch.manual_seed(seed)
    net = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).double().eval()
    xs = torch.randn(4, 5, 8, dtype=torch.float64)
    each = gt.per_example_grad(lambda net, x: (net(x) ** 2).mean())(net, xs)
    sum((g**2).sum() for g in each.values()).backward()
    found = [p.grad for p in net.parameters()]
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        ps = [*net.parameters()]
        rows = [torch.autograd.grad((net(x) ** 2).mean(), ps, create_graph=True) for x in xs]
        expected = torch.autograd.grad(sum((g**2).sum() for row in rows for g in row), ps)
    torch.testing.assert_close(found, [*expected])


@pytest.mark.parametrize("order", [1, 2])
def test_a_module_whose_gradient_is_differentiated_forward_over_reverse(order):
    """In forward-over-reverse mode, the gradient is correct and f has its usual side effects."""
    found = []
    for mode in ("auto", "forward_over_reverse"):
        net = Noisy().double()
        torch.manual_seed(1)
        grads = gt.grad(lambda net: (net(X) ** 2).mean(), mode=mode)(net)
        if order == 2:
            sum((g**2).sum() for g in grads.values()).backward()
            grads = {name: p.grad for name, p in net.named_parameters()}
        found.append((grads, net.calls, dict(net.named_buffers()), torch.get_rng_state()))
    (plain, *effects), (frozen, *others) = found
    same(frozen, plain)
    if order == 1:
        torch.testing.assert_close(effects, others, rtol=0, atol=0)
