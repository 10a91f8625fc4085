"""Tests each operator on each public function of PyTorch that computes attention.

The reference is softmax(q k^T / sqrt(d) + mask) v written out in double precision.
"""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F
from torch.utils._pytree import tree_leaves

import gradtools.torch as gt

pytestmark = pytest.mark.torch
KIND = torch.float64


def randn(*shape, seed):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=KIND)


X = tuple(randn(2, 2, n, 6, seed=n) for n in (4, 5, 5))
T = tuple(randn(2, 2, n, 6, seed=10 + n) for n in (4, 5, 5))
BIAS = randn(4, 5, seed=20)
ALLOWED = torch.ones(2, 1, 4, 5, dtype=torch.bool)
ALLOWED[0, :, :, 3:], ALLOWED[1, :, 1, 0] = False, False


def by_hand(q, k, v, attn_mask=None, is_causal=False, scale=None, enable_gqa=False):
    if enable_gqa:
        k, v = (x.repeat_interleave(q.shape[-3] // x.shape[-3], -3) for x in (k, v))
    scores = q @ k.mT * (q.shape[-1] ** -0.5 if scale is None else scale)
    if is_causal:
        attn_mask = torch.ones(scores.shape[-2:], dtype=torch.bool).tril()
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        scores = torch.where(attn_mask, scores, -1e30)
    elif attn_mask is not None:
        scores = scores + attn_mask
    terms = torch.exp(scores - scores.detach().amax(-1, keepdim=True))
    return terms / terms.sum(-1, keepdim=True) @ v


CALLS = {
    "plain": lambda attend, q, k, v: attend(q, k, v),
    "causal": lambda attend, q, k, v: attend(q, k, v, is_causal=True),
    "of booleans": lambda attend, q, k, v: attend(q, k, v, attn_mask=ALLOWED),
    "biased": lambda attend, q, k, v: attend(q, k, v, attn_mask=BIAS),
    "scaled": lambda attend, q, k, v: attend(q, k, v, scale=0.3),
    "grouped": lambda attend, q, k, v: attend(torch.cat((q, q.sin()), 1), k, v, enable_gqa=True),
    "of three axes": lambda attend, q, k, v: attend(q[0], k[0], v[0]),
    "to itself": lambda attend, q, k, v: attend(q, q, q.cos()) + k.sum() * v.sum(),
}


def dot(us, vs):
    return sum((u * v).sum() for u, v in zip(us, vs, strict=True))


def _of_gradient(taken):
    return lambda f: taken(lambda *xs: dot(gt.grad(f, (0, 1, 2))(*xs), T), (0, 1, 2))(*X)


def _along(f):
    """Return a function of a vector whose entries scale the arrays in X before f is applied."""
    return lambda s: f(*[s[i] * x for i, x in enumerate(X)])


ONES = torch.ones(3, dtype=KIND)
OPERATORS = {
    "grad": lambda f: gt.grad(f, (0, 1, 2))(*X),
    "jvp": lambda f: gt.jvp(f, X, T),
    "linearize": lambda f: gt.linearize(f, *X)[1](*T),
    "hvp, reverse over reverse": lambda f: gt.hvp(f, X, T, mode="reverse_over_reverse"),
    "hvp, forward over reverse": lambda f: gt.hvp(f, X, T, mode="forward_over_reverse"),
    "hessian": lambda f: gt.hessian(_along(f))(ONES),
    "jacobian, forward": lambda f: gt.jacobian(_along(f), mode="forward")(ONES),
    "grad of grad": _of_gradient(gt.grad),
    "torch.func.grad of grad": _of_gradient(torch.func.grad),
    "torch.func.jvp of grad": lambda f: torch.func.jvp(gt.grad(f, (0, 1, 2)), X, T),
    "grad of jvp": lambda f: gt.grad(lambda *xs: gt.jvp(f, xs, T)[1], (0, 1, 2))(*X),
    "grad of hvp": lambda f: gt.grad(lambda *xs: dot(gt.hvp(f, xs, T)[1], T), (0, 1, 2))(*X),
    "vmap of hvp": lambda f: torch.vmap(lambda *xs: gt.hvp(f, xs, T)[1])(
        *[torch.stack((x, 2 * x)) for x in X]
    ),
    "hvp of a checkpoint": lambda f: gt.hvp(gt.checkpoint(f), X, T),
}


@pytest.mark.sampled(60, 120)
@pytest.mark.parametrize("operator", OPERATORS)
@pytest.mark.parametrize("call", CALLS)
def test_attention_has_every_derivative(call, operator):
    f, g = (
        lambda *xs, attend=attend: torch.sin(CALLS[call](attend, *xs) ** 2).sum()
        for attend in (F.scaled_dot_product_attention, by_hand)
    )
    found, expected = (tree_leaves(OPERATORS[operator](each)) for each in (f, g))
    for y, like in zip(found, expected, strict=True):
        torch.testing.assert_close(y, like, rtol=1e-10, atol=1e-11)


LIVE = {
    "grad": lambda f, *xs: gt.grad(f, (0, 1, 2))(*xs),
    "vjp": lambda f, *xs: gt.vjp(f, *xs)[1](torch.ones((), dtype=KIND)),
    "jacobian": lambda f, *xs: gt.jacobian(lambda s: f(*[s * x for x in xs]), mode="reverse")(ONE),
    "checkpoint": lambda f, *xs: gt.grad(gt.checkpoint(f), (0, 1, 2))(*xs),
}
ONE = torch.ones((), dtype=KIND)


@pytest.mark.sweep_at("grad", "jacobian", "checkpoint")
@pytest.mark.parametrize("operator", LIVE)
def test_compiled_attention_whose_gradient_has_a_graph_is_differentiated_again(operator):
    f, g = (
        lambda *xs, attend=attend: torch.sin(attend(*xs, is_causal=True) ** 2).sum()
        for attend in (F.scaled_dot_product_attention, by_hand)
    )
    found = []
    for fun, make in ((f, lambda run: gt.compile(run, backend="aot_eager")), (g, lambda run: run)):
        torch.compiler.reset()
        xs = [x.clone().requires_grad_() for x in X]
        grads = tree_leaves(make(lambda *xs, fun=fun: LIVE[operator](fun, *xs))(*xs))
        found.append([*grads, *torch.autograd.grad(sum(y.sin().sum() for y in grads), xs)])
    for y, like in zip(*found, strict=True):
        torch.testing.assert_close(y, like, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("mode", ["reverse_over_reverse", "forward_over_reverse"])
def test_half_precision_is_as_right_as_its_numbers(mode):
    f = lambda *xs: torch.sin(F.scaled_dot_product_attention(*xs)).sum()
    low = [tuple(x.bfloat16() for x in xs) for xs in (X, T)]
    g = lambda *xs: torch.sin(by_hand(*xs)).sum()
    exact = gt.hvp(g, *[tuple(x.double() for x in xs) for xs in low])[1]
    for y, like in zip(gt.hvp(f, *low, mode=mode)[1], exact, strict=True):
        assert y.dtype is torch.bfloat16
        assert (y.double() - like).abs().max() < 0.03 * like.abs().max()


def test_a_row_that_may_attend_to_nothing_has_no_derivative():
    allowed = ALLOWED.clone()
    allowed[0, :, 2] = False
    f = lambda *xs: F.scaled_dot_product_attention(*xs, attn_mask=allowed).sin().sum()
    found = gt.hvp(f, X, T)[1]
    assert all(torch.isfinite(y).all() for y in found)
    assert not found[0][0, :, 2].any() and found[0][0, :, 1].any()


def test_dropout_draws_once():
    f = lambda *xs: F.scaled_dot_product_attention(*xs, dropout_p=0.3).sin().sum()
    torch.manual_seed(1)
    found = gt.hvp(f, X, T)[1]
    stood = torch.get_rng_state()
    torch.manual_seed(1)
    keep = (torch.dropout(torch.ones(2, 2, 4, 5, dtype=KIND), 0.3, True) > 0) / 0.7

    def g(q, k, v):
        weights = by_hand(q, k, torch.eye(5, dtype=KIND).expand(2, 2, 5, 5))
        return ((weights * keep) @ v).sin().sum()

    torch.testing.assert_close(found, gt.hvp(g, X, T)[1])
    assert torch.equal(torch.get_rng_state(), stood)


def test_one_gradient_is_the_kernels_own():
    """The forward pass and a differentiable gradient must not save the matrix of scores."""
    length = 64
    q, k, v = (randn(1, 1, length, 2, seed=n) for n in range(3))
    weight = torch.ones((), dtype=KIND, requires_grad=True)
    sizes = []

    def pack(x):
        sizes.append(x.numel())
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        f = lambda q: F.scaled_dot_product_attention(q * weight, k, v).sin().sum()
        attached = gt.grad(f)(q)
    assert attached.requires_grad and 0 < max(sizes) < length**2
