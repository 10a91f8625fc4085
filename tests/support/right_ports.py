"""Defines correct ports that differ from the original in layout, formula, loop or library."""

from __future__ import annotations

import equinox as eqx
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import torch
from torch.nn import functional as F

from gradtools.testing import match_parameters

_RNG = np.random.default_rng(1)


def normal(*shape):
    return _RNG.normal(size=shape)


def arrays_of(module):
    return {name: p.detach().numpy() for name, p in module.named_parameters()}


def attention_layer():
    layer = torch.nn.MultiheadAttention(8, 2, batch_first=True).double()
    p = arrays_of(layer)

    def port(x):
        w = p["in_proj_weight"].reshape(3, 2, 4, 8)
        b = p["in_proj_bias"].reshape(3, 1, 2, 1, 4)
        q, k, v = jnp.einsum("btd,nhed->nbhte", x, w) + b
        a = jax.nn.softmax(jnp.einsum("bhqe,bhke->bqkh", q / 2.0, k), axis=2)
        y = jnp.einsum("bqkh,bhke->bqhe", a, v).reshape(x.shape)
        return y @ p["out_proj.weight"].T + p["out_proj.bias"]

    return lambda x: layer(x, x, x, need_weights=False)[0], port, (normal(2, 5, 8),)


def convolutions():
    layers = torch.nn
    module = layers.Sequential(
        layers.Conv2d(2, 4, 3, padding=1), layers.BatchNorm2d(4), layers.ReLU(),
        layers.Conv2d(4, 3, 3), layers.Flatten(), layers.Linear(48, 5),
    ).double()  # fmt: skip
    p = list(arrays_of(module).values())
    names = ("NHWC", "HWIO", "NHWC")
    conv = lambda y, w, padding: jax.lax.conv_general_dilated(
        y, w.transpose(2, 3, 1, 0), (1, 1), padding, dimension_numbers=names
    )

    def port(x):
        y = conv(jnp.transpose(x, (0, 2, 3, 1)), p[0], "SAME") + p[1]
        mean = y.mean((0, 1, 2))
        scale = p[2] / jnp.sqrt((y * y).mean((0, 1, 2)) - mean**2 + 1e-5)
        y = conv(jax.nn.relu(y * scale + (p[3] - mean * scale)), p[4], "VALID") + p[5]
        y = jnp.transpose(y, (0, 3, 1, 2)).reshape(x.shape[0], -1)
        return jnp.dot(p[6], y.T).T + p[7]

    return module, port, (normal(2, 2, 6, 6),)


def gru():
    layer = torch.nn.GRU(3, 4).double()
    p = arrays_of(layer)

    def port(x):
        every = jnp.einsum("tbi,gi->tbg", x, p["weight_ih_l0"]) + p["bias_ih_l0"]

        def step(h, gi):
            gh = h @ p["weight_hh_l0"].T + p["bias_hh_l0"]
            ir, iz, ic = jnp.split(gi, 3, -1)
            hr, hz, hc = jnp.split(gh, 3, -1)
            r, z = jax.nn.sigmoid(ir + hr), jax.nn.sigmoid(iz + hz)
            c = jnp.tanh(ic + r * hc)
            h = c + z * (h - c)
            return h, h

        return jax.lax.scan(step, jnp.zeros((2, 4)), every)[1]

    return lambda x: layer(x)[0], port, (normal(5, 2, 3),)


def losses():
    def f(x, w, y):
        logits = x @ w
        t = logits.detach()
        kl = F.kl_div(F.log_softmax(logits / 2, -1), F.softmax(t, -1), reduction="batchmean")
        return F.cross_entropy(logits, y) + 0.1 * w.norm() ** 2 + kl

    def g(x, w, y):
        logits = (w.T @ x.T).T
        ce = (jax.nn.logsumexp(logits, axis=1) - logits[jnp.arange(6), y]).mean()
        q = jax.nn.log_softmax(logits * 0.5)
        p = jax.nn.softmax(jax.lax.stop_gradient(logits))
        return (p * (jnp.log(p) - q)).sum() / 6 + ce + jnp.sum(w * w) / 10

    return f, g, (normal(6, 3), normal(3, 4), _RNG.integers(0, 4, 6))


def complex_rows():
    def f(z, w):
        y = torch.fft.ifft(torch.fft.fft(z, dim=-1) * w, dim=-1)
        return (y.abs() ** 2).sum(-1).log().mean()

    def g(z, w):
        def one(row):
            y = jnp.fft.ifft(w * jnp.fft.fft(row))
            return jnp.log(jnp.vdot(y, y).real)

        return jnp.sum(jax.vmap(one)(z)) / z.shape[0]

    return f, g, (normal(3, 8) + 1j * normal(3, 8), normal(8) + 1j * normal(8))


def complex_parameters():
    module = torch.nn.Linear(3, 2, dtype=torch.complex64)
    p = arrays_of(module)
    port = lambda z: jnp.asarray(p["weight"], "complex128") @ z + jnp.asarray(p["bias"])
    return module, port, (normal(3) + 1j * normal(3),)


def written_in_place():
    def f(d):
        y = d["b"] * 2
        y += d["a"]
        y[0] = y[1] * 3
        return {"y": y.relu_(), "n": (y > 0).sum()}

    def g(d):
        y = d["a"] + 2 * d["b"]
        y = y.at[0].set(3 * y[1])
        return {"n": (y > 0).sum(), "y": jax.nn.relu(y)}

    return f, g, ({"b": normal(3, 4), "a": normal(3, 4)},)


def branch_and_loop():
    def f(x):
        y = torch.sin(x) if x.sum() > 0 else torch.cos(x)
        while y.sum() < 50:
            y = y * 1.5 + 0.3 * x.abs()
        return y

    def g(x):
        y = jax.lax.cond(x.sum() > 0, jnp.sin, jnp.cos, x)
        return jax.lax.while_loop(lambda y: y.sum() < 50, lambda y: y * 1.5 + 0.3 * jnp.abs(x), y)

    return f, g, (np.abs(normal(4)),)


def reversed_scan():
    def f(xs):
        y = torch.zeros(2, dtype=xs.dtype)
        for x in xs.flip(0):
            y = torch.tanh(y + x)
        return y

    def g(xs):
        step = lambda y, x: (jnp.tanh(y + x), None)
        return jax.lax.scan(step, jnp.zeros(2), xs, reverse=True)[0]

    return f, g, (normal(4, 2),)


def branch_of_python():
    f = lambda x: torch.sin(x) if x.sum() > 0 else torch.cos(x)
    g = lambda x: jnp.sin(x) if x.sum() > 0 else jnp.cos(x)
    return f, g, (np.abs(normal(4)),)


def half_precision_inside():
    f = lambda x: (x.bfloat16() @ x.bfloat16().T).float().tanh()
    g = lambda x: jnp.tanh((x.astype("bfloat16") @ x.astype("bfloat16").T).astype("float32"))
    return f, g, (normal(3, 4).astype("float32"),)


def single_precision():
    f = lambda x, w: F.softmax(x @ w, -1).std(0)
    g = lambda x, w: jax.nn.softmax(x @ w).std(0, ddof=1)
    return f, g, (normal(5, 3).astype("float32"), normal(3, 4).astype("float32"))


def masked_attention():
    def f(x, mask):
        s = (x @ x.T).masked_fill(mask == 0, -torch.inf)
        return torch.softmax(s, -1) @ x

    def g(x, mask):
        e = jnp.exp(x @ x.T - jnp.max(x @ x.T)) * (mask != 0)
        return e / e.sum(-1, keepdims=True) @ x

    return f, g, (normal(5, 3), np.tril(np.ones((5, 5), int)))


def own_rules():
    class Cube(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return x**3

        @staticmethod
        def backward(ctx, c):
            return 3 * ctx.saved_tensors[0] ** 2 * c

    cube = jax.custom_vjp(lambda x: x * x * x)
    cube.defvjp(lambda x: (x**3, x), lambda x, c: (3 * x * x * c,))
    return lambda x: Cube.apply(x).sin(), lambda x: jnp.sin(cube(x)), (normal(4),)


def gradient_inside():
    def f(x, w):
        u = torch.tanh(x @ w).sum()
        (g,) = torch.autograd.grad(u, x, create_graph=True)
        return (g**2).sum() + u

    def g(x, w):
        u = lambda x: jnp.tanh(x @ w).sum()
        return (jax.grad(u)(x) ** 2).sum() + u(x)

    return f, g, (normal(4, 3), normal(3, 2))


def unrolled_against_scanned():
    def f(xs, decay):
        y, rows = torch.zeros(2, dtype=xs.dtype), []
        for x in xs:
            y = y * torch.sigmoid(decay) + x
            rows.append(y)
        return torch.stack(rows)

    def g(xs, decay):
        rate = jax.nn.sigmoid(decay)
        powers = rate ** (jnp.arange(6)[:, None] - jnp.arange(6))
        return jnp.tril(powers) @ xs

    return f, g, (normal(6, 2), np.array(0.4))


def vmapped_layer():
    module = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 2))
    keys = jax.random.split(jax.random.key(0))
    layers = eqx.nn.Linear(3, 4, key=keys[0]), eqx.nn.Linear(4, 2, key=keys[1])
    net = eqx.nn.Sequential([layers[0], eqx.nn.Lambda(jnp.tanh), layers[1]])
    port = jax.vmap(match_parameters(module, net).into(net))
    return module, port, (normal(5, 3),)


def loss_in_linen():
    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.out = torch.nn.Embedding(7, 4), torch.nn.Linear(4, 7, bias=False)

        def forward(self, ids):
            logits = self.out(self.embed(ids[:, :-1]))
            return F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())

    class Port(nn.Module):
        @nn.compact
        def __call__(self, ids):
            logits = nn.Dense(7, use_bias=False, name="out")(nn.Embed(7, 4, name="embed")(ids))
            each = jnp.take_along_axis(nn.log_softmax(logits[:, :-1]), ids[:, 1:, None], -1)
            return -each.mean()

    module, ids = Model(), _RNG.integers(0, 7, (3, 6))
    blank = Port().init(jax.random.key(0), ids)
    return module, (Port(), match_parameters(module, blank).to_jax(module)), (ids,)


def detached_output():
    def f(x, w):
        h = torch.tanh(x @ w)
        return h.detach(), h.sum()

    def g(x, w):
        h = jnp.tanh(x @ w)
        return jax.lax.stop_gradient(h), h.sum()

    return f, g, (normal(4, 3), normal(3, 2))


RIGHT_PORTS = [
    *(attention_layer, convolutions, gru, losses, complex_rows, complex_parameters),
    *(written_in_place, branch_and_loop, half_precision_inside, single_precision),
    *(masked_attention, own_rules, gradient_inside, unrolled_against_scanned, vmapped_layer),
    *(loss_in_linen, detached_output, branch_of_python, reversed_scan),
]
