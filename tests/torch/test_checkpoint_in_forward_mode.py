"""`gt.checkpoint` in forward mode is f, in every derivative: each program runs with and without it.

In a pass of tangents with a graph it is a checkpoint of (x, dx) -> (f(x), df(x, dx)). A derivative
taken inside of the pass goes through the recomputation, and so do the transforms of torch.func.
"""

from __future__ import annotations

from functools import reduce

import pytest
import torch
from torch import nn

import gradtools.torch as gt
from tests.support.live_bytes import LiveBytes

Tensor = torch.Tensor
X = torch.linspace(-1.5, 2.0, 12, dtype=torch.float64).reshape(4, 3).sin()
V = torch.linspace(2.0, -1.0, 12, dtype=torch.float64).reshape(4, 3).cos()


class Square(torch.autograd.Function):
    """x squared, with rules of both modes."""

    @staticmethod
    def forward(x):
        return x**2

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(inputs[0])
        ctx.save_for_forward(inputs[0])

    @staticmethod
    def backward(ctx, ct):
        return 2 * ctx.saved_tensors[0] * ct

    @staticmethod
    def jvp(ctx, dx):
        return 2 * ctx.saved_tensors[0] * dx


def captured(n, k):
    def f(x):
        c = (x * n.scale).sin()
        return k(lambda h: n(h) * c)(x.exp())

    return f


def captured_by_a_function(n, k):
    def f(x):
        c = (x * n.scale).sin()
        return k(lambda h: n(h) * Square.apply(c))(x.exp())

    return f


def nothing_given(n, k):
    def f(x):
        c = x.sin()
        return k(lambda: n(c) * c)()

    return f


def containers(n, k):
    def g(d, *, s, name="a"):
        return {"y": n(d["a"]) * s[0], "z": (d["b"][0] ** 2, None, 3, d["a"].argmax(1), d["a"])}

    def f(x):
        y = k(g)({"a": x, "b": [x.cos(), 2]}, s=(x.sin(),), name="b")
        return y["y"] * y["z"][0] * y["z"][3][:, None] + y["z"][4]

    return f


def stopped(n, k):
    def g(h):
        with torch.no_grad():
            a = n(h)
        return n(h) * a, n(h).detach()

    return lambda x: torch.mul(*k(g)(x))


def changed_in_place(n, k):
    return k(lambda h: n(h).clone().mul_(h).add_(1))


def derivative_by_autograd(n, k):
    def f(x):
        x = x if x.requires_grad else x.requires_grad_()
        y = k(n)(x)
        return torch.autograd.grad(y.sin().sum(), x, create_graph=True)[0] * y

    return f


def derivative_to_parameters(n, k):
    def f(x):
        grads = torch.autograd.grad(k(n)(x).sin().sum(), [*n[0].parameters()], create_graph=True)
        return sum(g.square().sum() for g in grads)

    return f


PROGRAMS = {
    "a module": lambda n, k: k(n),
    "captured tensors": captured,
    "captured tensors of a Function": captured_by_a_function,
    "nothing but captured tensors": nothing_given,
    "containers, integers and an input": containers,
    "no_grad inside": stopped,
    "in place": changed_in_place,
    "twice": lambda n, k: lambda x: k(n)(k(n)(x)) * k(n)(x),
    "nested": lambda n, k: k(lambda x: k(n)(x.sin()) * k(lambda h: k(n)(h).cos())(x)),
    "a Function": lambda n, k: k(lambda x: n(Square.apply(x))),
    "chunked inside": lambda n, k: k(lambda x: gt.chunked(n[1:], 2)(n[0](x)).sin()),
    "frozen inside": lambda n, k: k(lambda x: n[2](gt.frozen(FIXED)(x))),
    "a gradient inside": lambda n, k: k(gt.grad(lambda y: n(y).sin().sum())),
    "a gradient around": lambda n, k: gt.grad(lambda y: k(n)(y).sin().sum()),
    "gradients of both": lambda n, k: k(gt.grad(lambda y: k(n)(y).sin().sum())),
    "a tangent inside": lambda n, k: k(lambda x: gt.jvp(n, (x,), (V,))[1]),
    "a tangent around": lambda n, k: lambda x: gt.jvp(k(n), (x,), (V,))[1],
    "a Jacobian around": lambda n, k: gt.jacobian(k(n), mode="reverse"),
    "a Hessian around": lambda n, k: gt.hessian(lambda x: k(n)(x).sin().sum()),
    "autograd.grad around": derivative_by_autograd,
    "autograd.grad to parameters": derivative_to_parameters,
    "per-example gradients": lambda n, k: gt.per_example_grad(lambda r: k(n)(r).sin().sum()),
    "vmap of a gradient": lambda n, k: gt.vmap(gt.grad(lambda r: k(n)(r).sin().sum())),
    "vmap inside": lambda n, k: k(gt.vmap(lambda r: n(r).sin())),
}
FIXED = nn.Sequential(nn.Linear(3, 5), nn.Tanh()).double().requires_grad_(False)


def network():
    torch.manual_seed(1)
    net = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 3)).double()
    net.scale = nn.Parameter(torch.tensor([0.5, 1.0, 2.0], dtype=torch.float64))
    return net


def results(program, k, tracked):
    net, x, v = network(), X.clone().requires_grad_(tracked), V.clone().requires_grad_(tracked)
    y, dy = gt.jvp(PROGRAMS[program](net, k), (x,), (v,))
    loss = (dy * dy.sin()).sum() + y.square().sum()
    wanted = [*net.parameters(), *([x, v] if tracked else [])]
    options = {"allow_unused": True, "materialize_grads": True}
    grads = torch.autograd.grad(loss, wanted, create_graph=tracked, **options)
    if not tracked:
        return [y, dy, *grads]
    return [*grads, *torch.autograd.grad(sum(g.sin().sum() for g in grads), wanted, **options)]


@pytest.mark.parametrize("tracked", [False, True], ids=["parameters", "second order"])
@pytest.mark.parametrize("program", PROGRAMS)
def test_it_is_as_without(program, tracked):
    expected = results(program, lambda f: f, tracked)
    torch.testing.assert_close(results(program, gt.checkpoint, tracked), expected)


@pytest.mark.parametrize("program", [name for name in PROGRAMS if "captured" in name])
def test_a_product_with_the_hessian_is_as_without(program):
    found, expected = (
        gt.hvp(
            lambda x, k=k: PROGRAMS[program](network(), k)(x).sin().sum(),
            (X,),
            (V,),
            mode="forward_over_reverse",
        )
        for k in (gt.checkpoint, lambda f: f)
    )
    torch.testing.assert_close(found, expected)


def test_state_is_as_without():
    found = []
    for k in (gt.checkpoint, lambda f: f):
        net = nn.Sequential(network(), nn.Dropout(0.5), nn.BatchNorm1d(3)).double()
        torch.manual_seed(7)
        y, dy = gt.jvp(lambda x, net=net, k=k: k(net)(k(net)(x)), (X,), (V,))
        (dy.square().sum() + y.sum()).backward()
        grads = [x.grad for x in net[0][0].parameters()]
        found.append([*grads, *net.buffers(), torch.get_rng_state()])
    torch.testing.assert_close(*found)


def test_a_layer_is_kept_by_its_inputs():
    """Of each layer x and dx are kept, of a tenth of the size of what its graph keeps."""

    def most(k, depth):
        layers = [nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 8))] * depth
        with LiveBytes() as live:
            y, dy = gt.jvp(
                nn.Sequential(*map(k, layers)), (torch.ones(64, 8),), (torch.ones(64, 8),)
            )
            (y.sum() + dy.square().sum()).backward()
        return live.peak

    more = [most(k, 8) - most(k, 4) for k in (gt.checkpoint, lambda f: f)]
    assert more[0] < more[1] / 4


TRANSFORMS = {
    "jvp": lambda f: lambda x: gt.jvp(f, (x,), (V[0],))[1],
    "torch's jvp": lambda f: lambda x: torch.func.jvp(f, (x,), (V[0],))[1],
    "grad": lambda f: gt.grad(lambda x: f(x).sum()),
    "torch's grad": lambda f: torch.func.grad(lambda x: f(x).sum()),
    "checkpoint": gt.checkpoint,
}
CHAINS = [
    ("torch's grad", "grad", "checkpoint"),
    ("torch's grad", "jvp", "checkpoint"),
    ("torch's grad", "checkpoint", "grad"),
    ("torch's grad", "checkpoint", "jvp"),
    ("torch's jvp", "checkpoint", "grad"),
    ("jvp", "checkpoint", "torch's grad"),
    ("jvp", "grad", "checkpoint"),
]


@pytest.mark.parametrize("chain", CHAINS, ids=" of ".join)
@pytest.mark.parametrize("operator", [gt.checkpoint, gt.frozen], ids=["checkpoint", "frozen"])
def test_transforms_of_both_kinds_nest(chain, operator):
    g = lambda x: (x.sin() * x**2).sum()
    found, expected = (
        reduce(lambda f, name: TRANSFORMS[name](f), reversed(chain), f)(X[0])
        for f in (operator(g), g)
    )
    torch.testing.assert_close(found, expected)


def test_a_checkpoint_of_dual_numbers_alone_saves_nothing():
    saved, x = [], torch.ones(2, 3, dtype=torch.float64)
    hooks = torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t)
    with torch.autograd.forward_ad.dual_level(), hooks:
        dual = torch.autograd.forward_ad.make_dual(x, x)
        pushed = torch.autograd.forward_ad.unpack_dual(gt.checkpoint(torch.sin)(dual)).tangent
    assert not saved
    torch.testing.assert_close(pushed, x * x.cos())
