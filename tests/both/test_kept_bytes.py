"""What a graph says is kept for backward, in bytes, against the frameworks' own.

PyTorch's own are the memories of what `saved_tensors_hooks` is handed, JAX's the outputs that XLA
says the forward half of `jax.vjp` has, each once and without those that came in.
"""

import importlib

import numpy as np
import pytest

from tests.support.costs import saved_bytes

# Functions of x, 6×4, and w, 4×4; p is torch or jax.numpy.
PROGRAMS = {
    "a sum": lambda p, x, w: (x @ w).sum(),
    "exp": lambda p, x, w: p.exp(x),
    "sin": lambda p, x, w: p.sin(x),
    "the square": lambda p, x, w: x * x,
    "a power": lambda p, x, w: x**3,
    "a product": lambda p, x, w: p.sin(x) * p.exp(x),
    "a quotient": lambda p, x, w: p.exp(x) / (1 + x),
    "a layer": lambda p, x, w: p.tanh(x @ w),
    "two layers": lambda p, x, w: p.tanh(p.tanh(x @ w) @ w),
    "five layers": lambda p, x, w: layers(p, x, w, 5),
    "a residual layer": lambda p, x, w: x + p.tanh(x @ w),
    "a transpose": lambda p, x, w: p.exp(x).T * p.sin(x).T,
    "a slice": lambda p, x, w: p.exp(x)[1:] ** 2,
    "rows": lambda p, x, w: p.exp(x[0]) * x[1],
    "parts put together": lambda p, x, w: p.concatenate([p.exp(x), p.sin(x)], 1) ** 2,
    "a reshape": lambda p, x, w: p.exp(x).reshape(3, 8) ** 2,
    "the same twice": lambda p, x, w: (lambda e: p.exp(e) * e)(p.exp(x)),
    "least squares": lambda p, x, w: ((x @ w - 1.0) ** 2).mean(),
    "a softmax": lambda p, x, w: weights(p, x),
    "a logarithm": lambda p, x, w: p.log(1 + p.exp(x @ w)).sum(),
    "a standard deviation": lambda p, x, w: p.sqrt(((x - x.mean(0)) ** 2).mean(0)),
    "attention": lambda p, x, w: weights(p, x @ w @ x.T) @ x,
    "a gate": lambda p, x, w: p.tanh(x @ w) * weights(p, x @ w),
    "a norm": lambda p, x, w: p.sqrt((x * x).sum()),
    "a product of sums": lambda p, x, w: x.sum(0) * p.exp(x).sum(0),
    "a maximum": lambda p, x, w: p.where(x > 0.7, p.exp(x), x * x),
}
# The same of PyTorch's own words; t is torch, F is torch.nn.functional.
OF_PYTORCH = {
    "rows of a list": lambda t, F, x: x[[0, 1]],
    "rows of a tensor": lambda t, F, x: x[t.tensor([0, 1])] * 2,
    "an embedding": lambda t, F, x: F.embedding(t.tensor([0, 1]) + 0, x),
    "a mask": lambda t, F, x: x[x > 0.7],
    "a limit": lambda t, F, x: x.exp().clamp(0, 2),
    "layer norm": lambda t, F, x: F.layer_norm(x, (4,)),
    "batch norm": lambda t, F, x: F.batch_norm(x, None, None, training=True),
    "attention": lambda t, F, x: F.scaled_dot_product_attention(*[x[None]] * 3),
    "cross entropy": lambda t, F, x: F.cross_entropy(x, t.tensor([0, 1, 2, 3, 0, 1])),
    "a pool": lambda t, F, x: F.max_pool1d(x[None], 2),
    "a convolution": lambda t, F, x: F.conv1d(x[None].exp(), t.ones(2, 6, 3)),
    "an inverse": lambda t, F, x: t.linalg.inv(x.T @ x + t.eye(4)),
    "singular values": lambda t, F, x: t.linalg.svdvals(x),
    "sorted": lambda t, F, x: x.sort(1)[0],
    "a running product": lambda t, F, x: x.cumprod(0),
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
    """The bytes of all values that the graph keeps along all arguments."""
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


@pytest.mark.slow_at("an embedding", "a pool", "sorted")
@pytest.mark.whole_at("an embedding", "a pool", "singular values", "sorted")
@pytest.mark.parametrize("name", OF_PYTORCH)
def test_what_pytorchs_own_functions_keep_is_what_its_hooks_are_handed(name):
    torch = pytest.importorskip("torch")
    gt = importlib.import_module("gradtools.torch")
    f = lambda x: OF_PYTORCH[name](torch, torch.nn.functional, x)
    assert told(gt, f, torch.tensor(X)) == saved_bytes(gt, f, torch.tensor(X))


@pytest.mark.quick_at("a sum")
@pytest.mark.sweep_at("attention", "a gate")
@pytest.mark.parametrize("name", PROGRAMS)
def test_what_jax_keeps_is_what_xla_says(name):
    jax = pytest.importorskip("jax")
    gt = importlib.import_module("gradtools.jax")
    f = lambda x, w: PROGRAMS[name](jax.numpy, x, w)
    args = jax.numpy.asarray(X), jax.numpy.asarray(W)
    assert told(gt, f, *args) == saved_bytes(gt, f, *args)


def test_there_are_twenty_five_programs():
    assert len(PROGRAMS) >= 25


def test_what_jax_keeps_of_a_running_product_is_no_number_that_stands_in_its_program():
    jax = pytest.importorskip("jax")
    gt = importlib.import_module("gradtools.jax")
    f = lambda x: jax.numpy.cumprod(x, 1)
    x = jax.numpy.asarray(X)
    kept = jax.tree.leaves(jax.vjp(f, x)[1])
    numbers = [y for y in kept if not y.ndim]
    assert len(numbers) == 4 and not any(numbers)  # the zero around a padded array
    arrays = sum(y.nbytes for y in kept if y.ndim)
    assert told(gt, f, x) == arrays
    forward = jax.jit(lambda x: jax.tree.leaves(jax.vjp(f, x)[1])).lower(x).compile()
    handed = forward.memory_analysis().output_size_in_bytes - 8 * len(kept)
    assert handed == arrays + sum(y.nbytes for y in numbers)
