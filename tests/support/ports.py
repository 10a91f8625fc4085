"""Defines pairs of a PyTorch program and a correct JAX port with corresponding lines.

`NAME_torch` and `NAME_jax` are a program and its port. For the names in MODELS, `NAME_torch()`
returns a module and `NAME_jax(original)` returns its port. Lines with the same number, counted from
the `def`, compute the same values in both functions. `ARGUMENTS` contains the input arrays.
"""

from __future__ import annotations

import equinox as eqx
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import torch
from flax import nnx
from torch.nn import functional as F

from gradtools.testing import match_parameters

_RNG = np.random.default_rng(0)


def _normal(*shape):
    return _RNG.normal(size=shape)


MODELS = ("linen", "nnx", "equinox")
ARGUMENTS = {
    "mlp": (_normal(4, 3), _normal(3, 5), _normal(5), _normal(5, 2)),
    "attention": (_normal(2, 5, 6), _normal(6, 18), _normal(6, 6)),
    "convolution": (_normal(2, 3, 8, 8), _normal(4, 3, 3, 3), _normal(4), _normal(64, 5)),
    "lstm": (_normal(4, 2, 3), _normal(3, 16), _normal(4, 16), _normal(16)),
    "vae": (_normal(6, 5), _normal(5, 4), _normal(4, 5), _normal(6, 2)),
    "q_learning": (_normal(6, 3), _normal(3, 4), np.array([0, 1, 3, 2, 1, 0]), _normal(6)),
    "fourier": (_normal(3, 8) + 1j * _normal(3, 8), _normal(8) + 1j * _normal(8)),
    "contrastive": (_normal(6, 4), _normal(6, 4), _normal(4, 3), np.array(0.3)),
    "linen": (_normal(2, 4, 6),),
    "nnx": (_normal(2, 3, 6, 6),),
    "equinox": (_normal(5, 3),),
    "norm": (_normal(8, 5), _normal(5), np.abs(_normal(5)) + 0.5),
    "masked": (*(_normal(2, 5, 3) for _ in range(3)), _normal(5, 5) > 0.2),
}


def mlp_torch(x, w, b, v):
    h = x @ w + b
    h = F.gelu(h, approximate="tanh")
    y = h @ v
    y = F.softplus(y) * 0.5
    y = F.log_softmax(y, dim=-1)
    return -y[:, 0].mean()


def mlp_jax(x, w, b, v):
    h = x @ w + b
    h = jax.nn.gelu(h, approximate=True)
    y = h @ v
    y = jax.nn.softplus(y) * 0.5
    y = jax.nn.log_softmax(y, axis=-1)
    return -y[:, 0].mean()


def attention_torch(x, qkv, out):
    b, t, d = x.shape
    q, k, v = (x @ qkv).chunk(3, -1)
    q = q.view(b, t, 2, 3).transpose(1, 2)
    k = k.view(b, t, 2, 3).transpose(1, 2)
    v = v.view(b, t, 2, 3).transpose(1, 2)
    s = q @ k.transpose(-1, -2)
    s = s / 3**0.5
    s = s.masked_fill(~torch.ones(t, t, dtype=torch.bool).tril(), -1e9)
    p = torch.softmax(s, -1)
    y = (p @ v).transpose(1, 2)
    y = y.reshape(b, t, d)
    return x + y @ out


def attention_jax(x, qkv, out):
    b, t, d = x.shape
    q, k, v = jnp.split(x @ qkv, 3, -1)
    q = q.reshape(b, t, 2, 3)
    k = k.reshape(b, t, 2, 3)
    v = v.reshape(b, t, 2, 3)
    s = jnp.einsum("bqhd,bkhd->bhqk", q, k)
    s = s / 3**0.5
    s = jnp.where(jnp.tril(jnp.ones((t, t), bool)), s, -1e9)
    p = jax.nn.softmax(s, -1)
    y = jnp.einsum("bhqk,bkhd->bqhd", p, v)
    y = y.reshape(b, t, d)
    return x + y @ out


def convolution_torch(x, w, b, head):
    y = F.conv2d(x, w, stride=2, padding=1)
    y = y + b[:, None, None]
    m = y.mean((0, 2, 3), keepdim=True)
    s = y.var((0, 2, 3), keepdim=True, unbiased=False)
    y = (y - m) / torch.sqrt(s + 1e-5)
    y = F.relu(y)
    y = y.flatten(1)
    return y @ head


def convolution_jax(x, w, b, head):
    y = _convolved(x.transpose(0, 2, 3, 1), w.transpose(2, 3, 1, 0), (2, 2), [(1, 1)] * 2)
    y = y + b
    m = y.mean((0, 1, 2), keepdims=True)
    s = y.var((0, 1, 2), keepdims=True)
    y = (y - m) / jnp.sqrt(s + 1e-5)
    y = jax.nn.relu(y)
    y = y.transpose(0, 3, 1, 2).reshape(len(x), -1)
    return y @ head


def _convolved(x, kernel, strides, padding):
    names = ("NHWC", "HWIO", "NHWC")
    return jax.lax.conv_general_dilated(x, kernel, strides, padding, dimension_numbers=names)


def lstm_torch(xs, w, u, b):
    h = c = torch.zeros(2, 4, dtype=xs.dtype)
    for x in xs:
        z = x @ w + h @ u + b
        i, g, f, o = z.chunk(4, -1)
        c = torch.sigmoid(f + 1.0) * c + torch.sigmoid(i) * torch.tanh(g)
        h = torch.sigmoid(o) * torch.tanh(c)
    return h


def lstm_jax(xs, w, u, b):
    def step(carry, x):
        h, c = carry
        z = x @ w + h @ u + b
        i, g, f, o = jnp.split(z, 4, -1)
        c = jax.nn.sigmoid(f + 1.0) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
        h = jax.nn.sigmoid(o) * jnp.tanh(c)
        return (h, c), None

    return jax.lax.scan(step, (jnp.zeros((2, 4)), jnp.zeros((2, 4))), xs)[0][0]


def vae_torch(x, enc, dec, noise):
    m, v = (x @ enc).chunk(2, -1)
    z = m + torch.exp(0.5 * v) * noise
    z = torch.cat([z, m], -1)
    y = torch.sigmoid(z @ dec)
    rec = F.mse_loss(y, x)
    kl = -0.5 * (1 + v - m**2 - v.exp())
    kl = kl.sum(-1).mean()
    return rec + 0.1 * kl


def vae_jax(x, enc, dec, noise):
    m, v = jnp.split(x @ enc, 2, -1)
    z = m + jnp.exp(0.5 * v) * noise
    z = jnp.concatenate([z, m], -1)
    y = jax.nn.sigmoid(z @ dec)
    rec = jnp.mean((y - x) ** 2)
    kl = -0.5 * (1 + v - m**2 - jnp.exp(v))
    kl = kl.sum(-1).mean()
    return rec + 0.1 * kl


def q_learning_torch(x, w, action, reward):
    q = torch.tanh(x @ w)
    q = q.gather(1, action[:, None])[:, 0]
    n = torch.tanh((x + 1) @ w)
    best = n.amax(-1)
    target = reward + 0.9 * best
    target = target.detach()
    gate = torch.sigmoid(q)
    loss = F.huber_loss(q * gate.detach(), target, reduction="none")
    return loss.mean()


def q_learning_jax(x, w, action, reward):
    q = jnp.tanh(x @ w)
    q = jnp.take_along_axis(q, action[:, None], 1)[:, 0]
    n = jnp.tanh((x + 1) @ w)
    best = n.max(-1)
    target = reward + 0.9 * best
    target = jax.lax.stop_gradient(target)
    gate = jax.nn.sigmoid(q)
    loss = optax_huber(q * jax.lax.stop_gradient(gate), target)
    return loss.mean()


def optax_huber(x, y):
    size = jnp.abs(x - y)
    small = jnp.minimum(size, 1.0)
    return 0.5 * small**2 + (size - small)


def fourier_torch(z, w):
    a = torch.fft.fft(z, dim=-1)
    a = a * w
    a = a * torch.exp(-0.1 * a.abs())
    y = torch.fft.ifft(a, dim=-1)
    c = y * z.conj()
    p = c.real**2 + 2 * c.imag
    return p.sum(-1)


def fourier_jax(z, w):
    a = jnp.fft.fft(z, axis=-1)
    a = a * w
    a = a * jnp.exp(-0.1 * jnp.abs(a))
    y = jnp.fft.ifft(a, axis=-1)
    c = y * z.conj()
    p = c.real**2 + 2 * c.imag
    return p.sum(-1)


def contrastive_torch(a, b, w, temperature):
    a = F.normalize(torch.tanh(a @ w), dim=-1)
    b = F.normalize(torch.tanh(b @ w), dim=-1)
    s = a @ b.T
    s = s * temperature.exp()
    rows = F.cross_entropy(s, torch.arange(6))
    columns = F.cross_entropy(s.T, torch.arange(6))
    return (rows + columns) / 2


def contrastive_jax(a, b, w, temperature):
    a = _normalized(jnp.tanh(a @ w))
    b = _normalized(jnp.tanh(b @ w))
    s = a @ b.T
    s = s * jnp.exp(temperature)
    rows = -jnp.diag(jax.nn.log_softmax(s, -1)).mean()
    columns = -jnp.diag(jax.nn.log_softmax(s.T, -1)).mean()
    return (rows + columns) / 2


def _normalized(x):
    return x / jnp.maximum(jnp.linalg.norm(x, axis=-1, keepdims=True), 1e-12)


def linen_torch():
    class Block(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.norm = torch.nn.LayerNorm(6)
            self.up = torch.nn.Linear(6, 12)
            self.down = torch.nn.Linear(12, 6)

        def forward(self, x):
            y = self.norm(x)
            y = self.up(y)
            y = F.gelu(y)
            y = self.down(y)
            x = x + y
            return x.mean(1)

    return Block()


def linen_jax(original):
    class Block(nn.Module):
        def setup(self):
            self.norm = nn.LayerNorm(epsilon=1e-5)
            self.up = nn.Dense(12)
            self.down = nn.Dense(6)
            # the PyTorch version has one more line here

        def __call__(self, x):
            y = self.norm(x)
            y = self.up(y)
            y = nn.gelu(y, approximate=False)
            y = self.down(y)
            x = x + y
            return x.mean(1)

    port = Block()
    variables = port.init(jax.random.key(0), jnp.ones((2, 4, 6), jnp.float32))
    return port, match_parameters(original, variables).to_jax(original)


def nnx_torch():
    class Net(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = torch.nn.Conv2d(3, 4, 3)
            self.norm = torch.nn.GroupNorm(2, 4)
            self.head = torch.nn.Linear(16, 3)

        def forward(self, x):
            y = self.conv(x)
            y = self.norm(y)
            y = F.silu(y)
            y = F.max_pool2d(y, 2)
            y = y.permute(0, 2, 3, 1).flatten(1)
            return self.head(y).square().mean()

    return Net()


def nnx_jax(original):
    class Net(nnx.Module):
        def __init__(self, rngs):
            self.conv = nnx.Conv(3, 4, (3, 3), padding="VALID", rngs=rngs)
            self.norm = nnx.GroupNorm(4, num_groups=2, epsilon=1e-5, rngs=rngs)
            self.head = nnx.Linear(16, 3, rngs=rngs)
            # the PyTorch version has one more line here

        def __call__(self, x):
            y = self.conv(x.transpose(0, 2, 3, 1))
            y = self.norm(y)
            y = nnx.silu(y)
            y = nnx.max_pool(y, (2, 2), (2, 2))
            y = y.reshape(len(x), -1)
            return jnp.square(self.head(y)).mean()

    port = Net(nnx.Rngs(0))
    return match_parameters(original, port).into(port)


def equinox_torch():
    class Net(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.first = torch.nn.Linear(3, 6)
            self.norm = torch.nn.LayerNorm(6)
            self.last = torch.nn.Linear(6, 2)

        def forward(self, x):
            h = self.first(x)
            h = F.elu(h)
            h = self.norm(h)
            y = self.last(h)
            return torch.tanh(y) * y

    return Net()


def equinox_jax(original):
    class Net(eqx.Module):
        first: eqx.nn.Linear = eqx.nn.Linear(3, 6, key=jax.random.key(0))
        norm: eqx.nn.LayerNorm = eqx.nn.LayerNorm(6)
        last: eqx.nn.Linear = eqx.nn.Linear(6, 2, key=jax.random.key(1))

        #
        #
        def __call__(self, x):
            h = self.first(x)
            h = jax.nn.elu(h)
            h = self.norm(h)
            y = self.last(h)
            return jnp.tanh(y) * y

    port = Net()
    return jax.vmap(match_parameters(original, port).into(port))


def norm_torch(x, mean, scale):
    m = x.mean(0)
    mean = 0.9 * mean + 0.1 * m
    v = x.var(0, correction=0)
    y = (x - m) / torch.sqrt(v + 1e-5)
    y = y * scale
    y = y / torch.sqrt((y**2).mean(-1, keepdim=True) + 1e-6)
    return y.exp(), mean


def norm_jax(x, mean, scale):
    m = x.mean(0)
    mean = 0.9 * mean + 0.1 * m
    v = x.var(0, ddof=0)
    y = (x - m) / jnp.sqrt(v + 1e-5)
    y = y * scale
    y = y / jnp.sqrt((y**2).mean(-1, keepdims=True) + 1e-6)
    return jnp.exp(y), mean


def masked_torch(q, k, v, mask):
    mask = mask | torch.eye(5, dtype=torch.bool)
    s = q @ k.transpose(-1, -2)
    s = s / 3**0.5
    s = torch.where(mask, s, -1e9)
    p = torch.softmax(s, -1)
    y = p @ v
    y = F.gelu(y)
    return y + q


def masked_jax(q, k, v, mask):
    mask = mask | jnp.eye(5, dtype=bool)
    s = q @ k.swapaxes(-1, -2)
    s = s / 3**0.5
    s = jnp.where(mask, s, -1e9)
    p = jax.nn.softmax(s, -1)
    y = p @ v
    y = jax.nn.gelu(y, approximate=False)
    return y + q
