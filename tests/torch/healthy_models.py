"""Defines losses of PyTorch modules without lost gradients, and losses with planted bugs.

A healthy function returns two values: a closure that computes the loss, and the model. An entry for
a planted bug contains a loss term of the logits, the expected kinds of findings, and a flag that is
True if the whole gradient is lost.
"""

from __future__ import annotations

import copy
import math
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributions import Categorical, Normal
from torch.utils.checkpoint import checkpoint

import gradtools.torch as gt
from tests.support.scenarios import Table

HEALTHY, PLANTED = Table(), Table()
healthy = HEALTHY.add
X = torch.randn(6, 4, generator=torch.Generator().manual_seed(0))
Y = torch.tensor([0, 1, 2, 0, 1, 2])


def mlp(*sizes, act=nn.Tanh):
    layers = []
    for a, b in pairwise(sizes):
        layers += [nn.Linear(a, b), act()]
    return nn.Sequential(*layers[:-1])


def classifier(name, make):
    @healthy(name=name)
    def program():
        model = make()
        return lambda: F.cross_entropy(model(X), Y), model


for _name, _make in {
    "the old weight_norm": lambda: nn.Sequential(nn.utils.weight_norm(nn.Linear(4, 3))),
    "weight_norm by a parametrization": lambda: nn.utils.parametrizations.weight_norm(
        nn.Linear(4, 3)
    ),
    "the old spectral_norm": lambda: nn.utils.spectral_norm(nn.Linear(4, 3)),
    "spectral_norm by a parametrization": lambda: nn.utils.parametrizations.spectral_norm(
        nn.Linear(4, 3)
    ),
    "orthogonal weights": lambda: nn.utils.parametrizations.orthogonal(nn.Linear(4, 3)),
    "batch normalization": lambda: nn.Sequential(mlp(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)),
    "an activation with a parameter": lambda: mlp(4, 16, 3, act=nn.PReLU),
}.items():
    classifier(_name, _make)


class Stateful(nn.Module):
    """A module that stores state between calls in an attribute, a buffer, a list or a dict."""

    def __init__(self, place, detaches):
        super().__init__()
        self.cell, self.out = nn.Linear(7, 3), nn.Linear(3, 3)
        self.place, self.detaches = place, detaches
        if place == "buffer":
            self.register_buffer("h", torch.zeros(3))
        self.kept = {} if place == "dict" else []

    def forward(self, x):
        before = self.read()
        h = torch.tanh(self.cell(torch.cat([x, before.expand(len(x), 3)], 1)))
        after = h.mean(0).detach() if self.detaches else h.mean(0)
        if self.place in ("attribute", "buffer"):
            self.h = after
        else:
            self.kept = {"h": after} if self.place == "dict" else [after]
        return self.out(h)

    def read(self):
        if self.place == "list":
            return self.kept[0].detach() if self.kept else torch.zeros(3)
        if self.place == "dict":
            return self.kept["h"].detach() if self.kept else torch.zeros(3)
        h = getattr(self, "h", None)
        return torch.zeros(3) if h is None else h.detach()


for _place in ("attribute", "buffer", "list", "dict"):
    for _detaches in (False, True):

        def _make(place=_place, detaches=_detaches):
            model = Stateful(place, detaches)
            model(X)  # This forward pass stores a state.
            return model

        classifier(f"a state in a {_place}{', detached' * _detaches}", _make)


@healthy()
def activations_kept_by_a_hook():
    model, kept = mlp(4, 8, 3), {}
    model[0].register_forward_hook(lambda module, args, out: kept.update(first=out))
    return lambda: F.cross_entropy(model(X), Y) + 0.1 * kept["first"].square().mean(), model


class Spike(torch.autograd.Function):
    @staticmethod
    def forward(ctx, v):
        ctx.save_for_backward(v)
        return (v > 0).to(v.dtype)

    @staticmethod
    def backward(ctx, ct):
        (v,) = ctx.saved_tensors
        return ct / (1 + (math.pi * v) ** 2)


class Leaky(nn.Module):
    """A leaky integrate-and-fire neuron that stores its membrane potential."""

    def __init__(self, resets_by):
        super().__init__()
        self.beta, self.mem, self.resets_by = nn.Parameter(torch.tensor(0.9)), None, resets_by

    def forward(self, current):
        mem = torch.zeros_like(current) if self.mem is None else self.mem
        reset = Spike.apply(mem - 1).detach()
        if self.resets_by == "subtraction":
            self.mem = self.beta * mem + current - reset
        else:
            self.mem = (self.beta * mem + current) * (1 - reset)
        return Spike.apply(self.mem - 1)


for _resets in ("subtraction", "zero"):

    @healthy(name=f"a spiking network that resets by {_resets}")
    def spiking(resets=_resets):
        model = nn.Sequential(nn.Linear(4, 8), Leaky(resets), nn.Linear(8, 3))

        def loss():
            model[1].mem = None
            return F.cross_entropy(sum(model(2 * X) for _ in range(4)), Y)

        return loss, model


@healthy()
def gradient_penalty():
    critic = mlp(4, 8, 1)

    def loss():
        x = X.clone().requires_grad_()
        (g,) = torch.autograd.grad(critic(x).sum(), x, create_graph=True)
        return critic(X).mean() + 10 * ((g.norm(dim=1) - 1) ** 2).mean()

    return loss, critic


for _named in ("online", "target"):

    @healthy(name=f"byol, f closes over the model named {_named}")
    def byol_alone(named=_named):
        online = mlp(4, 8, 3)
        target = copy.deepcopy(online)

        def loss():
            with torch.no_grad():
                goal = F.normalize(target(X + 0.1), dim=-1)
            return 2 - 2 * (F.normalize(online(X), dim=-1) * goal).sum(-1).mean()

        return loss, None


@healthy()
def ema_of_weights():
    net = mlp(4, 8, 3)
    average = copy.deepcopy(net).requires_grad_(False)

    def loss():
        with torch.no_grad():
            for a, b in zip(average.parameters(), net.parameters(), strict=True):
                a.lerp_(b, 0.01)
        return F.cross_entropy(net(X), Y)

    return loss, net


class Quantizer(nn.Module):
    """A VQ codebook that is updated by a moving average in buffers."""

    def __init__(self):
        super().__init__()
        self.register_buffer("codes", torch.randn(5, 3, generator=torch.Generator().manual_seed(3)))
        self.register_buffer("counts", torch.ones(5))

    def forward(self, z):
        index = torch.cdist(z, self.codes).argmin(1)
        hot = F.one_hot(index, 5).to(z.dtype)
        q = hot @ self.codes
        if self.training:
            with torch.no_grad():
                self.counts.mul_(0.9).add_(hot.sum(0), alpha=0.1)
                self.codes.lerp_(hot.T @ z / self.counts[:, None].clamp(min=1e-3), 0.1)
        return z + (q - z).detach(), 0.25 * F.mse_loss(z, q.detach())


@healthy()
def vq_vae_with_ema():
    model = nn.ModuleDict({"enc": mlp(4, 8, 3), "vq": Quantizer(), "dec": mlp(3, 8, 4)})

    def loss():
        q, commitment = model["vq"](model["enc"](X))
        return F.mse_loss(model["dec"](q), X) + commitment

    return loss, model


@healthy()
def one_hot_categorical_straight_through():
    gate, out = nn.Linear(4, 5), nn.Linear(5, 3)
    draw = torch.distributions.OneHotCategoricalStraightThrough
    return lambda: F.cross_entropy(out(draw(logits=gate(X)).rsample()), Y), {"g": gate, "o": out}


@healthy()
def normalizing_constant():
    energy = mlp(4, 8, 1)

    def loss():
        e = energy(X)[:, 0]
        weights = (-e).detach().softmax(0)
        return e.mean() - (weights * e).sum()

    return loss, {k: v for k, v in energy.named_parameters() if k != "2.bias"}


class Experts(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(4, 2)
        self.experts = nn.ModuleList([mlp(4, 8, 3), mlp(4, 8, 3)])

    def forward(self, x):
        weights = self.gate(x).softmax(-1)
        best, index = weights.topk(1)
        out = x.new_zeros(len(x), 3)
        for k, expert in enumerate(self.experts):
            (rows,) = torch.where(index[:, 0] == k)
            out[rows] += best[rows] * expert(x[rows])
        counts = F.one_hot(index[:, 0], 2).float().mean(0)
        return out, 2 * (counts * weights.mean(0)).sum()


@healthy()
def mixture_of_experts():
    model = Experts()

    def loss():
        out, balance = model(torch.cat([X, -X]))
        return F.cross_entropy(out, Y.repeat(2)) + 0.01 * balance

    return loss, model


for _reentrant in (False, True):

    @healthy(name=f"checkpointed, use_reentrant={_reentrant}")
    def checkpointed(reentrant=_reentrant):
        first, second, out = nn.Linear(4, 8), nn.Linear(8, 8), nn.Linear(8, 3)

        def loss():
            h = first(X)
            return F.cross_entropy(out(checkpoint(second, h, use_reentrant=reentrant)), Y)

        return loss, {"first": first, "second": second, "out": out}


classifier("a head of zeros", lambda: _zeroed(mlp(4, 8, 3)))


def _zeroed(model):
    nn.init.zeros_(model[-1].weight)
    return model


@healthy()
def recurrent_layers():
    lstm, head = nn.LSTM(4, 5, batch_first=True), nn.Linear(5, 3)

    def loss():
        state, total = None, 0.0
        for part in torch.stack([X, X.flip(0)]).split(3, dim=1):
            out, state = lstm(part, state)
            state = tuple(s.detach() for s in state)
            total = total + F.cross_entropy(head(out[:, -1]), Y[:2])
        return total

    return loss, {"lstm": lstm, "head": head}


@healthy()
def frozen_backbone():
    backbone, head = mlp(4, 8, 8).requires_grad_(False), nn.Linear(8, 3)

    def loss():
        with torch.no_grad():
            h = backbone(X)
        return F.cross_entropy(head(h), Y)

    return loss, {"backbone": backbone, "head": head}


@healthy()
def sharpness_aware():
    net = mlp(4, 8, 3)

    def loss():
        w = dict(net.named_parameters())
        plain = torch.func.functional_call(net, w, X)
        g = torch.autograd.grad(F.cross_entropy(plain, Y), [*w.values()])
        there = {k: p + 0.05 * d for (k, p), d in zip(w.items(), g, strict=True)}
        return F.cross_entropy(torch.func.functional_call(net, there, X), Y)

    return loss, net


# --- losses with planted bugs ------------------------------------------------------------


def _through_numpy(out):
    array = out.detach().cpu().numpy()
    return (array > 0).mean()


def _draw(out):
    return Normal(out[:, 0], out[:, 1].exp()).sample()


for _name, _kinds, _term in (
    ("accuracy", "discrete", lambda out: (out.argmax(1) == Y).float().mean()),
    ("a number", "left_framework", lambda out: out.norm().item()),
    ("NumPy", "detached left_framework", _through_numpy),
    ("rounded", "zero_derivative", lambda out: (torch.round(out).mean() - 0.5) ** 2),
    ("a histogram", "discrete", lambda out: F.mse_loss(torch.histc(out, 5), torch.ones(5))),
    ("an action", "discrete", lambda out: Categorical(logits=out).sample().float().mean()),
    ("reversed", "detached", lambda out: gt.reverse_gradient(out.detach()).mean()),
):
    PLANTED.add(name=f"{_name} as a term", expected=(_kinds, False))(
        lambda out, term=_term: F.cross_entropy(out, Y) + 0.1 * term(out)
    )
for _name, _kinds, _loss in (
    ("accuracy", "discrete", lambda out: 1 - (out.argmax(1) == Y).float().mean()),
    ("a number", "left_framework", lambda out: torch.tensor(out.mean().item()) * 1.0),
    ("losses in a list", "left_framework", lambda out: torch.tensor([x.mean() for x in out]).sum()),
    ("data", "detached", lambda out: F.mse_loss(out.data, torch.ones(6, 3))),
    ("a draw", "no_grad", lambda out: _draw(out).pow(2).mean()),
    ("nan", "nan", lambda out: torch.log(out - 100).mean()),
    ("dead", "zero", lambda out: F.relu(out - 100).mean()),
):
    PLANTED.add(name=f"{_name} as the loss", expected=(_kinds, True))(_loss)
