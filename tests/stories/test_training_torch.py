"""Tests training programs from public reports about PyTorch, rewritten with gradtools.

Each story returns pairs of a computed and a correct value. The correct value comes from a closed
form, plain PyTorch or central differences. `source` is a repository and an issue number.
"""

from __future__ import annotations

import warnings
from itertools import pairwise
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import gradtools.torch as gt  # noqa: E402
from gradtools.errors import DerivativeError, DisconnectedInputWarning  # noqa: E402
from gradtools.testing import checked  # noqa: E402
from tests.support.scenarios import Table  # noqa: E402

F, nn, D, Tensor = torch.nn.functional, torch.nn, torch.float64, torch.Tensor
STORIES = Table()


def rand(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=D)


def mlp(*widths: int, act: Any = nn.Tanh) -> nn.Sequential:
    layers = [layer for a, b in pairwise(widths) for layer in (nn.Linear(a, b), act())]
    return nn.Sequential(*layers[:-1]).to(D)


def plain(f: Any, *xs: Tensor) -> tuple[Tensor, ...]:
    """Return differentiable gradients, computed by plain torch.autograd.grad."""
    return torch.autograd.grad(f(*xs), xs, create_graph=True)


def leaf(x: Tensor) -> Tensor:
    return x.detach().clone().requires_grad_()


def grads_of(net: nn.Module, loss: Any) -> list[Tensor]:
    """Return the gradients of the parameters after `loss().backward()`."""
    net.zero_grad()
    loss().backward()
    return [torch.zeros_like(p) if p.grad is None else p.grad.clone() for p in net.parameters()]


def same_training(net: nn.Module, ours: Any, theirs: Any) -> list[tuple[Any, Any]]:
    return [*zip(grads_of(net, ours), grads_of(net, theirs), strict=True)]


def slope(f: Any, x: Tensor, v: Tensor, h: float = 1e-5) -> Tensor:
    """Return the central difference of f at x along v."""
    with torch.no_grad():
        return (f(x + h * v) - f(x - h * v)) / (2 * h)


# --- penalties on gradients


def _critic_penalty(critic: Any, norm: Any) -> list[tuple[Any, Any]]:
    real, fake, eps = rand(4, 3), rand(4, 3), torch.rand(4, 1, dtype=D)
    mixed = eps * real + (1 - eps) * fake
    gap = lambda: critic(fake).mean() - critic(real).mean()

    def ours():
        g = gt.grad(lambda x: critic(x).sum())(mixed)
        return gap() + 10 * norm(g)

    def theirs():
        return gap() + 10 * norm(plain(lambda x: critic(x).sum(), leaf(mixed))[0])

    return same_training(critic, ours, theirs)


@STORIES.add(source="caogang/wgan-gp#4")
def wgan_gp_penalty_trains_the_critic():
    return _critic_penalty(mlp(3, 8, 1), lambda g: ((g.norm(dim=1) - 1) ** 2).mean())


def _distances(x: Tensor) -> Tensor:
    """Return pairwise distances like torch.pdist, whose backward PyTorch cannot differentiate."""
    gaps = x[:, None] - x[None]
    i, j = torch.triu_indices(len(x), len(x), 1)
    return gaps[i, j].square().sum(-1).sqrt()


# --- force fields


@STORIES.add(source="learningmatter-mit/NeuralForceField#15")
def force_constants_are_the_hessian_of_the_energy():
    x = rand(3, 3)
    energy = lambda x: (_distances(x) ** 3).sum()
    hessian = gt.hessian(energy)(x)
    # PyTorch itself does not support this derivative
    with pytest.raises(NotImplementedError, match="_pdist_backward"):
        gt.hessian(lambda x: (torch.pdist(x) ** 3).sum())(x)
    v = rand(3, 3)
    return [
        (torch.tensordot(hessian, v, 2), slope(lambda y: gt.grad(energy)(y), x, v)),
        (hessian.reshape(9, 9), hessian.reshape(9, 9).T),
    ]


# --- differential equations


def _nested(f: Any, order: int) -> Any:
    for _ in range(order):
        f = (lambda g: lambda t: gt.grad(lambda s: g(s).sum())(t))(f)
    return f


@STORIES.add(source="skyblueao77/civil-engineering-python#18")
def a_beam_needs_the_fourth_derivative():
    t = rand(5)
    pairs = [(_nested(torch.sin, 4)(t), t.sin()), (_nested(lambda t: t**6, 4)(t), 360 * t**2)]
    net = mlp(1, 5, 1)
    u = lambda t: net(t[:, None])[:, 0]

    def theirs():
        s = leaf(t)
        y = u(s)
        for _ in range(4):
            (y,) = torch.autograd.grad(y.sum(), s, create_graph=True)
        return (y - 1).square().mean()

    ours = lambda: (_nested(u, 4)(t) - 1).square().mean()
    return pairs + same_training(net, ours, theirs)


# --- adjoints and implicit layers


class _Adjoint(torch.autograd.Function):
    """A Function like odeint_adjoint with Euler steps, whose backward pass runs under no_grad."""

    @staticmethod
    def forward(ctx, f, y, *params):
        with torch.no_grad():
            for _ in range(10):
                y = y + 0.1 * f(y)
        ctx.f = f
        ctx.save_for_backward(y, *params)
        return y

    @staticmethod
    def backward(ctx, ct):
        y, *params = ctx.saved_tensors
        total = [torch.zeros_like(p) for p in params]
        with torch.no_grad():
            for _ in range(10):
                with torch.enable_grad():
                    z = y.detach().requires_grad_()
                    dy = ctx.f(z)
                    dz, *dps = torch.autograd.grad(dy, (z, *params), ct, allow_unused=True)
                y = y - 0.1 * dy
                ct = ct + 0.1 * dz
                total = [t + 0.1 * d for t, d in zip(total, dps, strict=True)]
        return None, ct, *total


def _named(program: Any, match: str) -> bool:
    """Assert that a program raises no error by itself but raises an error under `checked`."""
    with warnings.catch_warnings():
        # ignore the warning about a gradient without a graph
        warnings.simplefilter("ignore", DisconnectedInputWarning)
        program()
    with checked(), pytest.raises(DerivativeError, match=match):
        program()
    return True


@STORIES.add(source="rtqichen/torchdiffeq#29")
def a_second_derivative_of_the_adjoint_is_named_by_checked():
    f, y = mlp(2, 2), rand(2)
    loss = lambda y: _Adjoint.apply(f, y, *f.parameters()).square().sum()
    first = gt.grad(loss)(y)
    twice = lambda y: gt.grad(loss)(y).square().sum()
    named = [
        _named(lambda: gt.hvp(loss, (y,), (y,)), "_Adjoint"),
        _named(lambda: gt.grad(twice)(y), "_Adjoint"),
    ]
    return [(first.shape, y.shape), (named, [True, True])]


class _Fixed(nn.Module):
    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(3, 3, dtype=D)
        self.lin.weight.data *= 0.3

    def cell(self, z, x):
        return torch.tanh(self.lin(z) + x)

    def solve(self, x):
        z = torch.zeros_like(x)
        for _ in range(50):
            z = self.cell(z, x)
        return z

    def forward(self, x):
        with torch.no_grad():
            z = self.solve(x)
        z = self.cell(z, x)
        z0 = z.clone().detach().requires_grad_()
        f0 = self.cell(z0, x)

        def hook(g):
            v = g
            for _ in range(50):
                v = torch.autograd.grad(f0, z0, v, retain_graph=True)[0] + g
            return v

        if z.requires_grad:
            z.register_hook(hook)
        return z


@STORIES.add(source="locuslab/deq#25")
def a_hook_of_an_equilibrium_is_right_once_and_named_twice():
    net, x = _Fixed(), rand(3)
    loss = lambda f: lambda x: f(x).square().sum()
    named = _named(lambda: gt.hessian(loss(net))(x), "hook")
    return [(gt.grad(loss(net))(x), gt.grad(loss(net.solve))(x)), (named, True)]


@STORIES.add(source="locuslab/deq#11")
def an_implicit_rule_has_second_derivatives():
    net, x = _Fixed(), rand(3)
    w, b = net.lin.weight.detach(), net.lin.bias.detach()
    cell = lambda z, x: torch.tanh(w @ z + b + x)

    @gt.custom_rule
    def equilibrium(x):
        z = torch.zeros_like(x)
        for _ in range(80):
            z = cell(z, x)
        return z

    def bwd(saved, ct):
        x, z = saved
        along_z = gt.jacobian(cell, argnums=0)(z, x)
        u = torch.linalg.solve(torch.eye(3, dtype=D) - along_z.T, ct)
        return (gt.vjp(lambda x: cell(z, x), x)[1](u)[0],)

    equilibrium.defvjp(lambda x: ((z := equilibrium(x)), (x, z)), bwd)
    loss, unrolled = lambda x: equilibrium(x).square().sum(), lambda x: net.solve(x).square().sum()
    v = rand(3)
    z = leaf(x)
    (g,) = plain(unrolled, z)
    return [
        (gt.grad(loss)(x), g),
        (gt.hvp(loss, (x,), (v,))[1][0], torch.autograd.grad(g @ v, z)[0]),
    ]


# --- learning to learn


def _inner(net: nn.Module, x: Tensor, y: Tensor, steps: int, update: Any, grad: Any) -> Any:
    params = dict(net.named_parameters())
    loss = lambda p: F.mse_loss(torch.func.functional_call(net, p, (x,)), y)
    for k in range(steps):
        params = update(params, grad(loss, params), k)
    return params


def _plain_grad(loss: Any, params: Any) -> Any:
    names = [*params]
    return dict(
        zip(
            names,
            torch.autograd.grad(loss(params), [*params.values()], create_graph=True),
            strict=True,
        )
    )


def _maml(net: nn.Module, steps: int, update: Any) -> list[tuple[Any, Any]]:
    x, y, xq, yq = rand(6, 3), rand(6, 1), rand(6, 3), rand(6, 1)

    def outer(grad):
        params = _inner(net, x, y, steps, update, grad)
        return F.mse_loss(torch.func.functional_call(net, params, (xq,)), yq)

    ours = lambda: outer(lambda loss, p: gt.grad(loss)(p))
    return same_training(net, ours, lambda: outer(_plain_grad))


def _sgd(params, grads, k):
    return {n: p - 0.1 * grads[n] for n, p in params.items()}


@STORIES.add(source="pytorch/functorch#534")
def maml_with_a_layer_norm():
    net = nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.Tanh(), nn.Linear(4, 1)).to(D)
    return _maml(net, 3, _sgd)


# --- influence and curvature


@STORIES.add(source="aai-institute/pyDVL#344")
def the_hessian_at_a_module_is_that_of_its_parameters():
    net, x, y = mlp(2, 3, 1), rand(6, 2), rand(6, 1)
    loss = lambda net: F.mse_loss(net(x), y)
    v = {n: torch.randn_like(p) for n, p in net.named_parameters()}
    (found,) = gt.hvp(loss, (net,), (v,))[1]
    params = [*net.parameters()]
    grads = torch.autograd.grad(loss(net), params, create_graph=True)
    total = sum((g * v[n]).sum() for g, n in zip(grads, v, strict=True))
    expected = torch.autograd.grad(total, params)
    return [(found[n], e) for n, e in zip(v, expected, strict=True)]


# --- per-example gradients


def _norms(net: nn.Module, x: Tensor, y: Tensor) -> Any:
    loss = lambda net, x, y: F.mse_loss(net(x), y)
    return gt.per_example_grad(loss)(net, x, y)


@STORIES.add(source="f-dangel/backpack#258")
def the_variance_of_examples_gradients_trains():
    net = nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.Tanh(), nn.Linear(4, 1)).to(D)
    x, y = rand(4, 3), rand(4, 1)

    def ours():
        return sum(g.var(0).sum() for g in _norms(net, x, y).values())

    def theirs():
        rows = [
            torch.autograd.grad(F.mse_loss(net(a), b), [*net.parameters()], create_graph=True)
            for a, b in zip(x, y, strict=True)
        ]
        return sum(torch.stack(g).var(0).sum() for g in zip(*rows, strict=True))

    return same_training(net, ours, theirs)


# --- estimators and edited gradients


@STORIES.add(source="lucidrains/vector-quantize-pytorch#40")
def a_codebook_by_moving_averages_stands_where_one_pass_leaves_it():
    class Quantizer(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("codes", rand(3, 2))

        def forward(self, z):
            index = torch.cdist(z, self.codes).argmin(1)
            q = self.codes[index]
            with torch.no_grad():
                hot = F.one_hot(index, 3).to(D)
                mean = hot.T @ z / hot.sum(0)[:, None].clamp(min=1)
                self.codes = torch.where(
                    hot.sum(0)[:, None] > 0, 0.9 * self.codes + 0.1 * mean, self.codes
                )
            return z + (q - z).detach()

    one, two, z = Quantizer(), Quantizer(), rand(6, 2)
    two.codes = one.codes.clone()
    found = gt.grad(lambda z: (one(z) ** 3).sum())(z)
    again = leaf(z)
    (two(again) ** 3).sum().backward()
    return [(found, again.grad), (one.codes, two.codes)]


# --- gradient caching


def _cached(encoder: nn.Module, chunk: int) -> list[tuple[Any, Any]]:
    x = rand(6, 3)
    target = torch.arange(6)

    def loss(f):
        a = f(x)
        return F.cross_entropy(a @ a.T.detach() * 2, target)

    torch.manual_seed(5)
    found = grads_of(encoder, lambda: loss(gt.chunked(encoder, chunk)))
    after = torch.get_rng_state()
    torch.manual_seed(5)
    loop = lambda x: torch.cat([encoder(x[i : i + chunk]) for i in range(0, 6, chunk)])
    expected = grads_of(encoder, lambda: loss(loop))
    return [*zip(found, expected, strict=True), (after, torch.get_rng_state())]


@STORIES.add(source="luyug/GC-DPR#12")
def a_cached_loss_draws_the_same_dropout():
    return _cached(nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.5), nn.Linear(4, 2)).to(D), 2)


# --- flows and models trained through a tangent


@STORIES.add(source="pytorch/pytorch#165530")
def mean_flow_trains_through_a_tangent_with_attention():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.qkv = nn.Linear(4, 12)

        def forward(self, x, t):
            q, k, v = (self.qkv(x) * (1 + t)).chunk(3, -1)
            return F.scaled_dot_product_attention(q[None], k[None], v[None])[0]

    def attention(x, t, net):
        q, k, v = (net.qkv(x) * (1 + t)).chunk(3, -1)
        return (q @ k.mT / 2).softmax(-1) @ v

    net, x, v = Net().to(D), rand(3, 4), rand(3, 4)
    t, one = torch.tensor(0.3, dtype=D), torch.tensor(1.0, dtype=D)

    def ours():
        u, du = gt.jvp(net, (x, t), (v, one))
        return (u - (v - 0.2 * du)).square().mean()

    def theirs():
        f = lambda x, t: attention(x, t, net)
        u, du = torch.func.jvp(f, (x, t), (v, one))
        return (u - (v - 0.2 * du)).square().mean()

    return same_training(net, ours, theirs)


# --- wrong results of PyTorch itself


@pytest.mark.slow_at(
    "a hook of an equilibrium is right once and named twice",
    "a second derivative of the adjoint is named by checked",
)
@pytest.mark.parametrize("story", STORIES.cases())
def test_a_story_comes_out_right(story):
    torch.manual_seed(0)
    compare(story.program(), rtol=1e-8, atol=1e-10)


def compare(pairs, rtol, atol):
    """Assert that there are pairs of computed and correct values, and that each pair agrees."""
    assert pairs
    for found, right in pairs:
        found, right = (x.detach() if isinstance(x, Tensor) else x for x in (found, right))
        torch.testing.assert_close(found, right, rtol=rtol, atol=atol, check_dtype=False)
