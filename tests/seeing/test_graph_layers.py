"""`graph_diff` of layers and losses that one framework has by name and the other writes out."""

import importlib
from itertools import product

import numpy as np
import pytest

import gradtools

pytestmark = pytest.mark.skipif(
    len(gradtools.available_backends()) < 2, reason="needs both frameworks"
)
rng = np.random.default_rng(0)
X, Y, W = (rng.uniform(0.5, 1.5, shape).astype(np.float32) for shape in ((3, 4), (3, 4), (4, 4)))
# By name: a function of (torch, F, x, y, w), one of (jax, jax.numpy, x, y, w), one that is like the
# first and is not it.
LAYERS = {
    "gelu, tanh": (
        lambda t, F, x, y, w: F.gelu(x, approximate="tanh"),
        lambda j, p, x, y, w: j.nn.gelu(x),
        lambda t, F, x, y, w: F.gelu(x),
    ),
    "gelu": (
        lambda t, F, x, y, w: F.gelu(x),
        lambda j, p, x, y, w: j.nn.gelu(x, approximate=False),
        lambda t, F, x, y, w: F.gelu(x, approximate="tanh"),
    ),
    "elu": (
        lambda t, F, x, y, w: F.elu(x, 0.5),
        lambda j, p, x, y, w: j.nn.elu(x, 0.5),
        lambda t, F, x, y, w: F.elu(x),
    ),
    "leaky relu": (
        lambda t, F, x, y, w: F.leaky_relu(x, 0.1),
        lambda j, p, x, y, w: j.nn.leaky_relu(x, 0.1),
        lambda t, F, x, y, w: F.leaky_relu(x, 0.2),
    ),
    "silu": (
        lambda t, F, x, y, w: F.silu(x),
        lambda j, p, x, y, w: j.nn.silu(x),
        lambda t, F, x, y, w: F.silu(y),
    ),
    "mean squared error": (
        lambda t, F, x, y, w: F.mse_loss(x, y),
        lambda j, p, x, y, w: ((x - y) ** 2).mean(),
        lambda t, F, x, y, w: F.mse_loss(x, y, reduction="sum"),
    ),
    "unit length": (
        lambda t, F, x, y, w: F.normalize(x, dim=1),
        lambda j, p, x, y, w: (
            x / p.maximum(p.linalg.norm(x, axis=1, keepdims=True), np.float32(1e-12))
        ),
        lambda t, F, x, y, w: F.normalize(x, dim=1, eps=1e-3),
    ),
    "norm": (
        lambda t, F, x, y, w: t.linalg.vector_norm(w, dim=0),
        lambda j, p, x, y, w: p.linalg.norm(w, axis=0),
        lambda t, F, x, y, w: t.linalg.vector_norm(w, dim=1),
    ),
    "deviation": (
        lambda t, F, x, y, w: x.std(0),
        lambda j, p, x, y, w: x.std(0, ddof=1),
        lambda t, F, x, y, w: x.std(0, correction=0),
    ),
    "rms norm": (
        lambda t, F, x, y, w: x * t.rsqrt((x * x).mean(-1, keepdim=True) + 1e-6) * w[0],
        lambda j, p, x, y, w: (
            x * j.lax.rsqrt(p.mean(x**2, -1, keepdims=True) + np.float32(1e-6)) * w[0]
        ),
        lambda t, F, x, y, w: x * t.rsqrt((x * x).mean(-1, keepdim=True) + 1e-6) * w[1],
    ),
    "between": (
        lambda t, F, x, y, w: t.lerp(x, y, 0.3),
        lambda j, p, x, y, w: x + 0.3 * (y - x),
        lambda t, F, x, y, w: t.lerp(y, x, 0.3),
    ),
    "added product": (
        lambda t, F, x, y, w: t.addcmul(x, x, y, value=0.5),
        lambda j, p, x, y, w: x + 0.5 * x * y,
        lambda t, F, x, y, w: t.addcmul(x, x, y, value=0.25),
    ),
    "added quotient": (
        lambda t, F, x, y, w: t.addcdiv(x, x, y),
        lambda j, p, x, y, w: x + x / y,
        lambda t, F, x, y, w: t.addcdiv(x, y, x),
    ),
    "attention": (
        lambda t, F, x, y, w: F.scaled_dot_product_attention(*(z[None, None] for z in (x, y, y))),
        lambda j, p, x, y, w: (j.nn.softmax(x @ y.T / 2.0, axis=-1) @ y)[None, None],
        lambda t, F, x, y, w: F.scaled_dot_product_attention(
            *(z[None, None] for z in (x, y, y)), scale=0.25
        ),
    ),
    "max pool": (
        lambda t, F, x, y, w: F.max_pool2d(w[None], 2),
        lambda j, p, x, y, w: j.lax.reduce_window(
            w[None], np.float32(-np.inf), j.lax.max, (1, 2, 2), (1, 2, 2), "VALID"
        ),
        lambda t, F, x, y, w: F.max_pool2d(w[None], 2, stride=2, padding=1),
    ),
    "mean pool": (
        lambda t, F, x, y, w: F.avg_pool2d(w[None], 2),
        lambda j, p, x, y, w: (
            j.lax.reduce_window(w[None], np.float32(0), j.lax.add, (1, 2, 2), (1, 2, 2), "VALID")
            / 4
        ),
        lambda t, F, x, y, w: F.avg_pool2d(w[None], (2, 1), (2, 2)),
    ),
    "from below": (
        lambda t, F, x, y, w: t.clamp_min(x, 0.7),
        lambda j, p, x, y, w: p.maximum(x, 0.7),
        lambda t, F, x, y, w: t.clamp_min(x, 0.5),
    ),
    "from above": (
        lambda t, F, x, y, w: t.clamp_max(x, 0.7),
        lambda j, p, x, y, w: p.minimum(x, 0.7),
        lambda t, F, x, y, w: t.clamp_min(x, 0.7),
    ),
    "a square": (
        lambda t, F, x, y, w: x * x * y,
        lambda j, p, x, y, w: y * x**2,
        lambda t, F, x, y, w: x * y * y,
    ),
}


def graph(backend, f):
    gt = importlib.import_module(f"gradtools.{backend}")
    framework = importlib.import_module(backend)
    words = importlib.import_module({"torch": "torch.nn.functional", "jax": "jax.numpy"}[backend])
    arrays = map(gt.asarray, (X, Y, W))
    return gt.gradient_graph(lambda *xs: f(framework, words, *xs), *arrays, wrt=(0, 1, 2))


def diff(one, two):
    return importlib.import_module("gradtools.torch").graph_diff(one, two)


@pytest.mark.parametrize("name", LAYERS)
def test_what_is_written_out_is_the_layer_and_no_other(name):
    one, written, other = LAYERS[name]
    first, second = graph("torch", one), graph("jax", written)
    for pair in ((first, second), (second, first)):
        found = diff(*pair)
        assert not found and not found.by_name, str(found)
    third = graph("torch", other)
    assert diff(third, second) and diff(first, third)


def test_no_layer_is_another():
    graphs = {name: (graph("torch", a), graph("jax", b)) for name, (a, b, _) in LAYERS.items()}
    pairs = [(a, b) for a, b in product(graphs, graphs) if a != b]
    assert not [(a, b) for a, b in pairs if not diff(graphs[a][0], graphs[b][1])]
