"""What the whole sweep over PyTorch found: derivatives that were wrong, lost or refused in vain.

Numbers are held against central differences, taken twice and extrapolated, in float64.
"""

from __future__ import annotations

import pytest
import torch

import gradtools.torch as gt
from gradtools import GradtoolsError

F = torch.nn.functional
X = torch.tensor([[0.7, -1.2, 2.0], [0.3, 0.9, -0.4]], dtype=torch.float64)
T = torch.tensor([[1.0, 0.5, -2.0], [0.2, -0.7, 1.1]], dtype=torch.float64)
W = torch.tensor([[0.5, 1.5, -0.3], [2.0, -1.0, 0.4]], dtype=torch.float64)
SQUARE = X.mT @ X + torch.eye(3, dtype=torch.float64)
ALONG = T.mT @ W


class Marked(torch.Tensor):
    """A subclass that changes nothing."""


def slope(f, x, t, h=1e-3):
    """df along t."""
    first, second = ((f(x + s * t) - f(x - s * t)) / (2 * s) for s in (h, 2 * h))
    return (4 * first - second) / 3


def close(found, expected, rtol=1e-8):
    torch.testing.assert_close(found, expected, rtol=rtol, atol=1e-9)


def in_every_mixed_mode(f, x, t, w):
    """H t of f's product with w, by reverse and forward mode over each other."""
    product = lambda x: (f(x) * w).sum()
    forward, reverse = "forward_over_reverse", "reverse_over_reverse"
    return {
        "forward over reverse": gt.hvp(product, (x,), (t,), mode=forward)[1][0],
        "reverse over reverse": gt.hvp(product, (x,), (t,), mode=reverse)[1][0],
        "grad of jvp": gt.grad(lambda x: (gt.jvp(f, (x,), (t,))[1] * w).sum())(x),
        "linearize of grad": gt.linearize(gt.grad(product), x)[1](t),
    }


# --- logcumsumexp ---------------------------------------------------------------------------------


def test_a_complex_logcumsumexp_keeps_its_value_in_forward_mode():
    z = torch.complex(X, 3 * W + 4).reshape(-1)
    f = lambda z: torch.logcumsumexp(z, 0)
    principal = torch.log(torch.cumsum(torch.exp(z), 0))
    assert ((f(z) - principal).abs() > 6).any()  # PyTorch's own is another branch
    close(gt.jvp(f, (z,), (torch.ones_like(z),))[0], f(z))


def test_a_complex_logcumsumexp_has_its_second_derivative():
    z, t = torch.complex(X, 3 * W).reshape(-1), torch.complex(T, X).reshape(-1)
    loss = lambda z: (torch.logcumsumexp(z, 0) ** 2).real.sum()
    expected = slope(lambda z: torch.autograd.functional.vjp(loss, z)[1], z, t, 1e-4)
    for mode in ("forward_over_reverse", "reverse_over_reverse"):
        close(gt.hvp(loss, (z,), (t,), mode=mode)[1][0], expected, 1e-7)


# --- layer norm with a bias alone -----------------------------------------------------------------


def bias_alone(x, bias):
    y = F.layer_norm(x, (3,), None, bias, 0.5)
    return (torch.sin(y) * W).sum()


def test_the_hessian_of_a_layer_norm_with_a_bias_alone_is_symmetric():
    bias = torch.tensor([0.1, -0.4, 0.8], dtype=torch.float64)
    (_, xb), (bx, bb) = gt.hessian(bias_alone, argnums=(0, 1))(X, bias)
    assert (bx.abs() > 0.01).any()
    close(bx, xb.permute(2, 0, 1))
    v = torch.tensor([1.0, -2.0, 0.5], dtype=torch.float64)
    of_bias = lambda b: gt.grad(bias_alone, argnums=1)(X, b)
    close(bb @ v, slope(of_bias, bias, v))
    close((bx * T).sum((1, 2)), slope(lambda x: gt.grad(bias_alone, argnums=1)(x, bias), X, T))


def test_both_second_derivatives_of_a_layer_norm_with_a_bias_alone_are_had_at_once():
    bias = torch.tensor([0.1, -0.4, 0.8], dtype=torch.float64)
    v = torch.tensor([1.0, -2.0, 0.5], dtype=torch.float64)
    live = X.clone().requires_grad_(), bias.clone().requires_grad_()
    first = torch.autograd.grad(bias_alone(*live), live, create_graph=True)
    with pytest.raises(RuntimeError):  # PyTorch's own
        torch.autograd.grad(first, live, (T, v))
    found = gt.hvp(bias_alone, (X, bias), (T, v), mode="reverse_over_reverse")[1]
    whole = gt.hvp(bias_alone, (X, bias), (T, v), mode="forward_over_reverse")[1]
    close(found[0], whole[0])
    close(found[1], whole[1])
    both = lambda s: gt.grad(bias_alone, argnums=1)(X + s * T, bias + s * v)
    close(found[1], slope(both, torch.zeros((), dtype=torch.float64), 1.0))


# --- what is transposed ---------------------------------------------------------------------------


GRID = torch.tensor([[[[0.5, -1.0], [2.0, 0.7]]]], dtype=torch.float64)


def test_what_no_cotangent_reaches_has_a_transpose_of_zeros():
    f = lambda x: torch.linalg.norm(x, 0)  # how many are not zero
    rows = gt.jacobian(gt.grad(lambda x: f(x) + (x**3).sum()), mode="forward")(X[0])
    close(rows, torch.diag(6 * X[0]))


# --- tangents that may be differentiated ----------------------------------------------------------


ATTENTION = {
    "plain": {},
    "causal": {"is_causal": True},
    "scaled": {"scale": 0.3},
    "masked": {"attn_mask": torch.tensor([[True, False], [False, False]])},
    "biased": {"attn_mask": torch.tensor([[0.5, -1.0], [2.0, 0.0]], dtype=torch.float64)},
}


@pytest.mark.parametrize("options", ATTENTION.values(), ids=ATTENTION.keys())
def test_the_tangent_of_attention_may_be_differentiated(options):
    f = lambda x: F.scaled_dot_product_attention(x, 2 * x, torch.sin(x), **options)
    close(gt.jvp(f, (X,), (T,))[0], f(X))
    expected = slope(gt.grad(lambda x: (f(x) * W).sum()), X, T)
    for way, found in in_every_mixed_mode(f, X, T, W).items():
        torch.testing.assert_close(found, expected, rtol=1e-7, atol=1e-9, msg=way)


def test_the_tangent_of_attention_to_shared_heads_may_be_differentiated():
    q, kv = X.reshape(1, 2, 3, 1), W.reshape(1, 1, 6, 1)[:, :, :3]
    f = lambda q: F.scaled_dot_product_attention(q, kv, kv**2, enable_gqa=True)
    close(gt.jvp(f, (q,), (T.reshape(q.shape),))[0], f(q))
    pushed = lambda q: (gt.jvp(f, (q,), (T.reshape(q.shape),))[1] * W.reshape(q.shape)).sum()
    product = gt.grad(lambda q: (f(q) * W.reshape(q.shape)).sum())
    close(gt.grad(pushed)(q), slope(product, q, T.reshape(q.shape)))


# --- what is refused by name ----------------------------------------------------------------------


def no_vmap():
    f = lambda x: torch.as_strided_scatter(x, x[0] * 2, (3,), (1,), 0)
    gt.jacobian(f, mode="forward")(X)


def sparse():
    f = lambda x: x.to_sparse().to_dense()
    close(gt.jacobian(f, mode="reverse", chunk_size=1)(X[0]), torch.eye(3, dtype=X.dtype))
    gt.jacobian(f, mode="reverse")(X[0])


def compressed():
    gt.hessian(lambda x: (x.to_sparse_csr().to_dense() ** 3).sum())(torch.ones(2, 2))


def negated_view():
    gt.per_example_grad(lambda x: torch._neg_view(x).mul(x).sum())(torch.ones(2, 2))


@pytest.mark.parametrize(
    ("run", "words"),
    [
        (compressed, r"hessian: f holds an operation .*cannot enter.*gt.grad\(f\), chunk_size=1"),
        (negated_view, r"per_example_grad: f holds an operation that PyTorch's vmap.*cannot enter"),
        (no_vmap, r"jacobian: f holds an operation that PyTorch's vmap.*take chunk_size=1"),
        (sparse, r"jacobian: f holds an operation that PyTorch's vmap.*take chunk_size=1"),
    ],
    ids=["csr", "_neg_view", "as_strided_scatter", "to_sparse"],
)
def test_a_limit_of_pytorch_is_refused_in_words_that_say_what_to_do(run, words):
    with pytest.raises(GradtoolsError, match=words):
        run()


def test_rounding_at_zero_is_no_constant_part_of_a_forward_rule():
    x, w, b = (torch.randn(*s, dtype=torch.float64) for s in ((2, 4, 3), (4,), (4,)))
    f = lambda x, w, b: torch.native_group_norm(x, w, b, 2, 4, 3, 2, 1e-5)[0]
    rule = gt.custom_rule(lambda x, w, b: torch.native_group_norm(x, w, b, 2, 4, 3, 2, 1e-5))
    rule.defjvp(lambda p, t: gt.jvp(lambda *a: torch.native_group_norm(*a, 2, 4, 3, 2, 1e-5), p, t))
    loss = lambda f: lambda x: (f(x, w, b) ** 2 * x).sum()
    found = gt.grad(loss(lambda *a: rule(*a)[0]))(x)
    torch.testing.assert_close(found, gt.grad(loss(f))(x), rtol=1e-9, atol=1e-12)
