"""`jacobian(mode="auto")` of a function with much more output than input, in PyTorch."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

import gradtools.torch as gt

F64 = torch.float64


def decoder() -> nn.Module:
    torch.manual_seed(0)
    parts = nn.Linear(4, 32), nn.SiLU(), nn.LayerNorm(32), nn.Linear(32, 96), nn.Sigmoid()
    return nn.Sequential(*parts).to(F64)


def latent(*shape: int) -> torch.Tensor:
    return torch.randn(*(shape or (4,)), generator=torch.Generator().manual_seed(1), dtype=F64)


def products_in(call) -> int:
    with FlopCounterMode(display=False) as counter:
        call()
    return counter.get_total_flops()


W, V = latent(32, 4), latent(96, 32)


def plain(z):
    """Without a module: the counter's own hooks on modules fail inside of `autograd.grad`."""
    return torch.sigmoid(V @ F.silu(W @ z))


@pytest.mark.parametrize("attached", [False, True])
def test_columns_are_pushed_and_the_numbers_are_those_of_reverse_mode(attached):
    f = decoder().requires_grad_(attached)
    z = latent()
    auto, reverse = gt.jacobian(f)(z), gt.jacobian(f, mode="reverse")(z)
    assert torch.allclose(auto, reverse, rtol=1e-12, atol=1e-14)
    assert auto.requires_grad is reverse.requires_grad is attached
    reverse = products_in(lambda: gt.jacobian(plain, mode="reverse")(z))
    assert products_in(lambda: gt.jacobian(plain)(z)) < 0.2 * reverse


@pytest.mark.parametrize("chunk_size", [1, 3])
def test_the_columns_may_be_pushed_in_chunks(chunk_size):
    f, z = decoder(), latent()
    expected = gt.jacobian(f, mode="reverse")(z)
    assert torch.allclose(
        gt.jacobian(f, chunk_size=chunk_size)(z), expected, rtol=1e-12, atol=1e-14
    )


class Sines(TorchDispatchMode):
    """Counts calls of sin; a list in f would be put back before each evaluation."""

    count = 0

    def __torch_dispatch__(self, fun, types, args=(), kwargs=None):
        self.count += fun is torch.ops.aten.sin.default
        return fun(*args, **(kwargs or {}))


@pytest.mark.parametrize("mode", ["auto", "forward"])
def test_f_is_evaluated_once_however_many_leaves_it_has(mode):
    f = lambda xs: torch.cat([k * x.sin() for k, x in enumerate(xs)] * 3)
    xs = [latent(2) + k for k in range(8)]
    expected = gt.jacobian(f, mode="reverse")(xs)
    with Sines() as sines:
        result = gt.jacobian(f, mode=mode)(xs)
    assert sines.count == len(xs)
    for a, b in zip(result, expected, strict=True):
        assert torch.allclose(a, b, rtol=1e-12, atol=0)


def test_a_wide_jacobian_is_differentiated_again():
    f, z = decoder(), latent()

    def size(mode):
        return lambda z, f=f: gt.jacobian(f, mode=mode)(z).square().sum()

    expected = torch.func.grad(lambda z: torch.func.jacrev(f)(z).square().sum())(z)
    for got in (gt.grad(size("auto"))(z), torch.func.grad(size("auto"))(z)):
        assert torch.allclose(got, expected, rtol=1e-10, atol=1e-12)
    auto, reverse = (
        gt.value_and_grad(lambda f, m=m: size(m)(z, f))(f)[1] for m in ("auto", "reverse")
    )
    for name, g in auto.items():
        assert torch.allclose(g, reverse[name], rtol=1e-10, atol=1e-12)


def hooked(x):
    y = 2 * x
    if y.requires_grad:
        y.register_hook(lambda g: g.clamp(max=0.5))
    return (y**2).repeat(8)


def hooked_node(x):
    y = 2 * x
    if y.requires_grad:
        y.grad_fn.register_prehook(lambda gs: (gs[0].clamp(max=0.5),))
    return (y**2).repeat(8)


@pytest.mark.parametrize(
    "f",
    [
        hooked,
        hooked_node,
        lambda x: (gt.clip_gradient(x, max_value=0.5) ** 2).repeat(8),
        lambda x: (gt.straight_through(torch.round)(x) ** 2).repeat(8),
        lambda x: checkpoint(lambda x: x.sin().repeat(8), x, use_reentrant=False),
        # backward passes without a derivative
        lambda x: F.scaled_dot_product_attention(*[x.reshape(1, 1, 2, 2).repeat(1, 1, 8, 1)] * 3),
        lambda x: F.grid_sample(
            torch.arange(75, dtype=F64).reshape(1, 3, 5, 5).sin(),
            x.reshape(1, 2, 1, 2).repeat(1, 4, 1, 1).tanh(),
            align_corners=False,
        ),
        lambda x: torch.cdist(x.reshape(2, 2).repeat(4, 1), x.reshape(2, 2) + 1).repeat(2, 1),
        lambda x: torch.cat([torch.exp(1j * x)] * 4),
        lambda x: torch.ones(40, dtype=F64),
    ],
    ids=["hook", "node", "clip", "surrogate", "checkpoint"]
    + ["attention", "grid_sample", "cdist", "complex", "constant"],
)
def test_what_cannot_be_pushed_is_pulled(f):
    x = latent()
    expected = gt.jacobian(f, mode="reverse")(x)
    assert torch.allclose(gt.jacobian(f)(x), expected, rtol=1e-12, atol=1e-14)
    tracked = x.clone().requires_grad_()
    results = [gt.jacobian(f, mode=mode)(tracked) for mode in ("auto", "reverse")]
    assert results[0].requires_grad is results[1].requires_grad


@pytest.mark.parametrize("sizes", [(2, 5), (5, 2), (3, 3)])
def test_the_dtype_depends_on_no_size_where_f_changes_the_precision(sizes):
    weight = torch.randn(sizes[1], sizes[0])
    f = lambda x: weight @ x.float()
    found = gt.jacobian(f)(torch.ones(sizes[0], dtype=F64))
    torch.testing.assert_close(found, weight.to(F64))
    turned = gt.jacobian(lambda x: torch.complex(f(x), f(x)))(torch.ones(sizes[0], dtype=F64))
    torch.testing.assert_close(turned, torch.complex(weight, weight).to(torch.complex128))


@pytest.mark.parametrize("p", [1.0, 2.0, 3.0, float("inf")])
def test_distances_are_mapped_right(p):
    """The batching rule of cdist's backward kernel is wrong: `jacrev` is off by 0.7 to 2."""
    torch.manual_seed(0)
    x, y = torch.randn(3, 2, dtype=torch.float64), torch.randn(4, 2, dtype=torch.float64)
    f = lambda x: torch.cdist(x, y, p)
    expected = torch.stack([gt.grad(lambda x, k=k: f(x).ravel()[k])(x) for k in range(12)])
    torch.testing.assert_close(gt.jacobian(f)(x).reshape(12, 3, 2), expected)
    plain = lambda x: torch.linalg.vector_norm(x[:, None] - y, p, -1)
    torch.testing.assert_close(
        gt.hessian(lambda x: f(x).sum())(x), gt.hessian(lambda x: plain(x).sum())(x)
    )
