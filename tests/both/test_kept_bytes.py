"""The bytes that a gradient graph reports as saved for backward equal the frameworks' own numbers.

For PyTorch, the numbers are the sizes of the distinct storages that `saved_tensors_hooks` receives.
For JAX, the numbers are the sizes of the distinct outputs of the compiled forward half of
`jax.vjp` that are not inputs.
"""

import importlib

import numpy as np
import pytest

from tests.support.costs import saved_bytes

# Functions of x (6×4) and w (4×4); p is torch or jax.numpy.
PROGRAMS = {
    "the square": lambda p, x, w: x * x,
    "a product": lambda p, x, w: p.sin(x) * p.exp(x),
    "a layer": lambda p, x, w: p.tanh(x @ w),
    "five layers": lambda p, x, w: layers(p, x, w, 5),
    "a transpose": lambda p, x, w: p.exp(x).T * p.sin(x).T,
    "a concatenation": lambda p, x, w: p.concatenate([p.exp(x), p.sin(x)], 1) ** 2,
    "a softmax": lambda p, x, w: weights(p, x),
    "attention": lambda p, x, w: weights(p, x @ w @ x.T) @ x,
    "a norm": lambda p, x, w: p.sqrt((x * x).sum()),
    "a maximum": lambda p, x, w: p.where(x > 0.7, p.exp(x), x * x),
}
# Functions that use PyTorch's own operations; t is torch, F is torch.nn.functional.
OF_PYTORCH = {
    "rows of a tensor": lambda t, F, x: x[t.tensor([0, 1])] * 2,
    "layer norm": lambda t, F, x: F.layer_norm(x, (4,)),
    "batch norm": lambda t, F, x: F.batch_norm(x, None, None, training=True),
    "attention": lambda t, F, x: F.scaled_dot_product_attention(*[x[None]] * 3),
    "cross entropy": lambda t, F, x: F.cross_entropy(x, t.tensor([0, 1, 2, 3, 0, 1])),
    "a convolution": lambda t, F, x: F.conv1d(x[None].exp(), t.ones(2, 6, 3)),
}
RNG = np.random.default_rng(0)
X, W = RNG.uniform(0.5, 1.0, (6, 4)).astype(np.float32), RNG.normal(size=(4, 4)).astype(np.float32)


def layers(p, x, w, depth):
    for _ in range(depth):
        x = p.tanh(x @ w)
    return x


def weights(p, x):
    e = p.exp(x)
    return e / e.sum(1)[:, None]


def told(gt, f, *args):
    """Return the number of bytes that the gradient graph of f reports as saved for backward."""
    graph = gt.gradient_graph(f, *args, argnums=tuple(range(len(args))))
    return sum(graph.kept.values())


@pytest.mark.quick_at("a transpose")
@pytest.mark.sampled(slow=6)
@pytest.mark.parametrize("name", PROGRAMS)
def test_what_pytorch_keeps_is_what_its_hooks_are_handed(name):
    torch = pytest.importorskip("torch")
    gt = importlib.import_module("gradtools.torch")
    f = lambda x, w: PROGRAMS[name](torch, x, w)
    args = torch.tensor(X), torch.tensor(W)
    assert told(gt, f, *args) == saved_bytes(gt, f, *args)


@pytest.mark.sweep_at("rows of a tensor", "cross entropy")
@pytest.mark.parametrize("name", OF_PYTORCH)
def test_what_pytorchs_own_functions_keep_is_what_its_hooks_are_handed(name):
    torch = pytest.importorskip("torch")
    gt = importlib.import_module("gradtools.torch")
    f = lambda x: OF_PYTORCH[name](torch, torch.nn.functional, x)
    assert told(gt, f, torch.tensor(X)) == saved_bytes(gt, f, torch.tensor(X))


@pytest.mark.quick_at("a layer")
@pytest.mark.sweep_at("attention")
@pytest.mark.parametrize("name", PROGRAMS)
def test_what_jax_keeps_is_what_xla_says(name):
    jax = pytest.importorskip("jax")
    gt = importlib.import_module("gradtools.jax")
    f = lambda x, w: PROGRAMS[name](jax.numpy, x, w)
    args = jax.numpy.asarray(X), jax.numpy.asarray(W)
    assert told(gt, f, *args) == saved_bytes(gt, f, *args)
