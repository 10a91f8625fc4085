"""PyTorch's programs in the formula's vocabulary: each is held against autograd by itself.

`formula` compares what it returns with automatic differentiation, in float64; a table of functions
is therefore a table of checks, of those with algebra and of those that are written by name
(`BY_NAME`). Those with a 2 are differentiated twice.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import gradtools.torch as gt
from gradtools import GradtoolsError
from gradtools.seeing.formulas.algebra import apply
from gradtools.seeing.formulas.expressions import array
from gradtools.seeing.torch.translating.translations import READINGS
from tests.support.formula_rows import rows

# The order, an expression of a, b, c, d, and what these are: see `formula_rows`.
TABLE = """
2 a @ b                                             ; (3,4) (4,2)
2 a @ b                                             ; (2,3,4) (4)
1 a @ b                                             ; (4) (2,4,3)
2 a @ b                                             ; z(3,4) z(4)
1 torch.mm(a, b).T                                  ; (3,4) (4,2)
2 torch.bmm(a, b)                                   ; (2,3,4) (2,4,2)
2 torch.dot(a, b)                                   ; (4) (4)
1 torch.vdot(a, b)                                  ; z(4) z(4)
2 torch.outer(a, b)                                 ; (3) (4)
1 torch.mv(a, b)                                    ; (3,4) (4)
2 torch.addmm(c, a, b, beta=0.5, alpha=2)           ; (3,4) (4,2) (2)
1 torch.baddbmm(c, a, b)                            ; (2,3,4) (2,4,2) (2,3,2)
1 torch.addmv(c, a, b)                              ; (3,4) (4) (3)
1 torch.addr(c, a, b)                               ; (3) (4) (3,4)
2 torch.trace(a @ a)                                ; (3,3)
2 torch.linalg.inv(a)                               ; s(3,3)
1 torch.linalg.inv(a)                               ; h(3,3)
2 torch.det(a)                                      ; s(3,3)
1 torch.linalg.slogdet(a)[1]                        ; (3,3)
1 torch.logdet(a)                                   ; s(3,3)
2 torch.linalg.solve(a, b)                          ; s(3,3) (3,2)
2 torch.linalg.solve(a, b)                          ; s(3,3) (3)
1 torch.linalg.solve(a, b)                          ; h(3,3) z(3)
2 torch.linalg.cholesky(a)                          ; s(3,3)
2 torch.linalg.solve_triangular(a, b, upper=False)  ; s(3,3) (3,2)
1 torch.zeros(3, 4).double().scatter(1, a.argmax(1, keepdim=True), 1.0) * a ; (3,4)
1 a.half().float() * a.bfloat16()                   ; (4)
2 torch.linalg.eigvalsh(a)                          ; s(3,3)
2 torch.linalg.matrix_power(a, 3)                   ; (3,3)
1 torch.linalg.cross(a, b)                          ; (2,3) (2,3)
1 torch.kron(a, b)                                  ; (2,2) (2,3)
2 torch.einsum("ij,jk->ik", a, b)                   ; (3,4) (4,2)
2 torch.einsum("bij,bjk", a, b)                     ; (2,3,4) (2,4,2)
1 torch.einsum("...ii->...i", a)                    ; (2,3,3)
1 torch.einsum("bhqd,bhkd->bhqk", a, b)             ; (2,2,3,4) (2,2,3,4)
1 torch.einsum("ij,ij->", a, b.conj())              ; z(3,4) z(3,4)
1 torch.tensordot(a, b, dims=([1], [0]))            ; (3,4) (4,2)
2 F.linear(a, b, c)                                 ; (5,4) (3,4) (3)
2 F.conv1d(a, b, c, stride=2, padding=1)            ; (2,3,7) (4,3,3) (4)
2 F.conv2d(a, b, padding=1)                         ; (2,3,5,5) (2,3,3,3)
2 F.conv_transpose1d(a, b, stride=2)                ; (2,3,4) (3,2,3)
1 F.conv1d(a, b)                                    ; z(2,3,7) z(4,3,3)
2 a.sum(0) * a.mean((0, 1))                         ; (3,4)
1 a.sum(1, keepdim=True) - a.amax(0)                ; (3,4)
1 a.max(1).values + a.min(1)[0]                     ; (3,4)
1 a.max() * a.min()                                 ; (3,4)
2 a.prod(1)                                         ; (3,4)
1 a.prod()                                          ; p(3,4)
2 a.var(0) + a.std(0, correction=0)                 ; (3,4)
1 torch.var_mean(a, 1)[0] * torch.std_mean(a, 1)[1] ; (3,4)
2 a.norm()                                          ; (3,4)
2 torch.linalg.vector_norm(a, ord=3, dim=1)         ; (3,4)
1 torch.linalg.norm(a, ord=1, dim=1) + torch.linalg.norm(a, ord=float("inf"), dim=1) ; (3,4)
1 torch.linalg.matrix_norm(a)                       ; (2,3,4)
1 a.norm()                                          ; z(3)
2 torch.logsumexp(a, 1)                             ; (3,4)
2 torch.softmax(a, 1)                               ; (3,4)
2 F.log_softmax(a, 0)                               ; (3,4)
1 F.softmin(a, 1)                                   ; (3,4)
2 F.cross_entropy(a, b)                             ; (5,3) i3(5)
1 F.cross_entropy(a, b, reduction="sum")            ; (5,3,2) i3(5,2)
2 F.cross_entropy(a, torch.softmax(b, 1))           ; (5,3) (5,3)
1 F.cross_entropy(a, b, label_smoothing=0.1)        ; (5,3) i3(5)
1 F.cross_entropy(a, b, ignore_index=1)             ; (5,3) i3(5)
1 F.nll_loss(F.log_softmax(a, 1), b, torch.arange(1.0, 4).double()) ; (5,3) i3(5)
2 F.mse_loss(a, b)                                  ; (5,3) (5,3)
1 F.l1_loss(a, b) + F.smooth_l1_loss(a, b)          ; (5,3) (5,3)
1 F.huber_loss(a, b, delta=0.3)                     ; (5,3) (5,3)
1 F.binary_cross_entropy(torch.sigmoid(a), torch.sigmoid(b)) ; (5) (5)
2 F.binary_cross_entropy_with_logits(a, torch.sigmoid(b)) ; (5) (5)
1 F.kl_div(F.log_softmax(a, 1), torch.softmax(b, 1), reduction="batchmean") ; (5,3) (5,3)
1 F.gaussian_nll_loss(a, b, c)                      ; (5) (5) p(5)
1 F.cosine_similarity(a, b)                         ; (3,4) (3,4)
1 torch.cdist(a, b)                                 ; (3,4) (2,4)
2 F.layer_norm(a, (4,), b, c)                       ; (3,4) (4) (4)
1 F.layer_norm(a, (4,))                             ; (3,4)
2 F.batch_norm(a, None, None, b, c, training=True)  ; (5,3) (3) (3)
1 F.batch_norm(a, torch.ones(3), torch.ones(3), b)  ; (5,3) (3)
1 F.group_norm(a, 2, b, c)                          ; (2,4,3) (4) (4)
1 F.rms_norm(a, (4,), b, 1e-6)                      ; (3,4) (4)
1 F.normalize(a, dim=1)                             ; (3,4)
2 F.scaled_dot_product_attention(a, b, c)           ; (2,3,4) (2,5,4) (2,5,4)
1 F.scaled_dot_product_attention(a, b, c, is_causal=True) ; (1,2,3,4) (1,2,3,4) (1,2,3,4)
1 F.scaled_dot_product_attention(a, b, c, attn_mask=d) ; (2,3,4) (2,5,4) (2,5,4) (3,5)
2 a[1:, ::2] * a[0, -1]                             ; (3,4)
1 a[b]                                              ; (5,3) i5(4)
1 a[:, b] + a[b, c]                                 ; (3,3) i3(3) i3(3)
1 a[..., None, :] * a[:, None]                      ; (3,3)
2 torch.gather(a, 1, b)                             ; (3,4) i4(3,2)
2 a.index_select(1, b)                              ; (3,4) i4(5)
1 torch.take_along_dim(a, b, 1)                     ; (3,4) i4(3,1)
1 a[a > 0]                                          ; (3,4)
1 torch.where(a > 0, a * b, b.exp())                ; (3,4) (4)
1 a.masked_fill(a < 0, 2.0) * a                     ; (3,4)
2 a.index_put((b,), c)                              ; (4,3) i1(1) (1,3)
1 a.index_put((b,), c, accumulate=True)             ; (4,3) i4(5) (5,3)
2 a.scatter_add(1, b, c)                            ; (3,4) i4(3,4) (3,4)
1 a.scatter(1, b, c)                                ; (3,4) i1(3,1) (3,1)
1 a.index_add(0, b, c, alpha=2)                     ; (4,3) i4(5) (5,3)
2 F.embedding(b, a)                                 ; (5,3) i5(2,3)
1 a.take(b)                                         ; (3,4) i12(5)
1 a.diagonal() + torch.diag(a)                      ; (3,3)
1 torch.diag_embed(a) + torch.diag(b, 1)            ; (2,3) (2)
1 torch.triu(a) - torch.tril(a, -1)                 ; (3,3)
2 torch.cat([a, b * a[:, :1]], 1)                   ; (3,4) (3,2)
1 torch.stack([a, b], 1).flatten(1)                 ; (3,4) (3,4)
1 torch.cat(a.chunk(2, 1)[::-1], 0) + torch.cat(a.split([1, 3], 1)[:1] * 2, 1).repeat(2, 1) ; (3,4)
1 a.unbind(0)[1] * a.flip(0)[0] + a.roll(1, 0)[0]   ; (3,4)
1 a.repeat(2, 3) * a.tile(2, 3)                     ; (2,3)
1 a.repeat_interleave(2, 0)                         ; (2,3)
1 a.expand(3, 4) * a.T.squeeze(1)[None]             ; (1,4)
1 F.pad(a, (1, 2)) * F.pad(a, (1, 2), value=3.0)    ; (2,3)
2 a.cumsum(0)                                       ; (3,4)
2 a.cumprod(1)                                      ; p(3,4)
1 a.diff(dim=1)                                     ; (3,4)
1 a.sort(1)[0] * torch.arange(4.0)                  ; (3,4)
2 torch.fft.fft(a)                                  ; z(5)
2 torch.fft.rfft(a)                                 ; (3,6)
2 F.max_pool1d(a, 2)                                ; (1,2,6)
2 F.avg_pool2d(a, 2)                                ; (1,2,4,4)
2 a.exp() + a.expm1() * a.exp2()                    ; (4)
2 a.log() * a.log2() + a.log10() - a.log1p()        ; p(4)
2 a.sqrt() + a.rsqrt() + a.reciprocal()             ; p(4)
2 a.sin() * a.cos() + a.tan()                       ; u(4)
1 a.sinh() * a.cosh() + a.tanh()                    ; (4)
1 a.asin() + a.acos() * a.atan() + a.atanh()        ; u(4)
1 a.asinh() * (a + 1).acosh()                       ; p(4)
2 a ** 3 + a ** b + 2 ** a + a.pow(0.5)             ; p(4) (4)
1 a.erf() + a.erfc() * a.erfinv()                   ; u(4)
1 a.lgamma() + a.digamma() + torch.polygamma(1, a)  ; p(4)
1 torch.atan2(a, b) + torch.hypot(a, b)             ; (4) (4)
1 torch.maximum(a, b) * torch.minimum(a, b)         ; (4) (4)
1 torch.logaddexp(a, b) + torch.xlogy(a, b.exp())   ; (4) (4)
1 a.clamp(-0.5, 0.5) + a.clamp(min=b) + a.clamp_max(0.3) ; (4) (4)
1 a.abs() * a.sign() + a.frac() + a.floor() + a % 2 + torch.fmod(a, b) ; (4) p(4)
1 torch.lerp(a, b, 0.3) + torch.addcmul(a, a, b, value=2) + torch.addcdiv(a, a, b) ; (4) p(4)
1 torch.logit(a.abs(), 0.35)                        ; u(9)
2 torch.sigmoid(a) + F.logsigmoid(a) + F.softplus(a) ; (4)
2 F.gelu(a) + F.gelu(a, approximate="tanh") + F.silu(a) ; (4)
1 F.relu(a) + F.leaky_relu(a) + F.relu6(a) + F.hardtanh(a) ; (4)
1 F.elu(a) + F.selu(a) + F.celu(a, 0.5) + F.mish(a) ; (4)
1 F.glu(a) + F.softsign(a[:2]) + F.threshold(a[:2], 0.1, 2.0) ; (4)
1 F.prelu(a, b)                                     ; (3,4) (4)
2 a.real * a.imag                                   ; z(4)
2 a.conj() * b + a.abs()                            ; z(4) z(4)
1 torch.view_as_real(a * a)                         ; z(4)
1 torch.view_as_complex(a.exp())                    ; (4,2)
1 torch.complex(a, b).angle() + torch.polar(a, b).abs() ; p(4) (4)
1 a.exp() * a.log() + a.sin() / a.sqrt()            ; z(4)
1 torch.sgn(a) + a ** 2 + 1 / a                     ; z(4)
1 (a.mH @ a).det().real + a.T.conj().sum().imag     ; z(3,3)
1 (a / 3).int() + a.double() + (a > 0) + a.bool().float() ; (4)
1 torch.cosine_similarity(a, b, 0) + torch.dist(a, b) ; (4) (4)
"""
LINES = [
    (int(row.expression[0]), replace(row, expression=row.expression[2:])) for row in rows(TABLE)
]


# Of what the formula has no algebra.
BY_NAME = set(
    """
    inverse det slogdet solve cholesky triangular_solve cholesky_solve qr lstsq svd eigh expm pinv
    convolution convolution_transposed group_norm max_pool avg_pool grid_sampler_2d
    upsample_nearest2d upsample_bilinear2d fft ifft rfft irfft cumsum cumprod logcumsumexp
    cummax cummin sort argsort argmax topk
    median kthvalue scatter scatter_add scatter_along index take_along pad erfinv lgamma digamma
    polygamma remainder fmod renorm cdist cross trilinear polar norm tile flip roll
    prod embedding power exp2 log2 log10 arccos arcsinh arccosh arctanh arctan2 hypot
    angle tan arcsin arctan logical_not logical_and logical_or is_nan
    floor frac view_as_real view_as_complex
    """.split()
)


def program(expression, count):
    """The function of a, b, c, d."""
    return eval(f"lambda {', '.join('abcd'[:count])}: {expression}", {"torch": torch, "F": F})


@pytest.mark.sampled(90, 153)
@pytest.mark.parametrize(("order", "row"), LINES, ids=[str(row) for _, row in LINES])
def test_the_formula_is_what_autograd_computes(order, row):
    args = [torch.tensor(x) for x in row.arrays(np.random.default_rng(3))]
    moving = tuple(k for k, x in enumerate(args) if x.is_floating_point() or x.is_complex())
    found = gt.formula(program(row.expression, len(args)), *args, order=order, argnums=moving)
    assert set(found.marked) <= BY_NAME
    assert found.check.tolerance == 1e-8


def test_more_than_a_hundred_functions_stand_in_the_table():
    assert len(LINES) > 100
    assert len([row for order, row in LINES if order == 2]) > len(LINES) // 4
    assert len([row for _, row in LINES if "z(" in row.arguments or "h(" in row.arguments]) > 12


# What PyTorch's programs do besides calling functions.


def checked(f, *args, tolerance=1e-8, **more):
    """The formula, which was compared in double precision at three points."""
    found = gt.formula(f, *args, **more)
    assert (found.check.points, found.check.tolerance, found.check.note) == (3, tolerance, "")
    return found


X = torch.linspace(-1.0, 1.0, 4) + 0.1
ROWS = torch.sin(torch.arange(12.0)).reshape(3, 4)


def written_in_place(x):
    y = torch.zeros(4)
    y[1:3] = x[:2]
    y[0] += x[3] ** 2
    z = y.view(2, 2).t()
    z[0] *= x[:2]
    y.clamp_(-0.5, 0.5).add_(x.flip(0))
    return y * y


def written_through_a_view_of_what_was_read(x):
    y = x.clone()
    row, before = y.view(2, 2)[1], y * 2
    row.exp_()
    return y * before + row.sum()


def written_through_other_views(x):
    y = x * 2
    part, turned = y[1:], y.view(2, 2).t()
    y.mul_(x)
    turned.add_(torch.tensor([[1.0, 2.0], [3.0, 4.0]]) * x[0])
    return part.sum() * y + torch.cat([part, x[:1]])


def updated_without_a_derivative(x):
    y = x * 2
    with torch.no_grad():
        y.clamp_(min=0.3)
        scale = x.exp()
    return y * scale * x


def in_rounds(x):
    h = x
    for _ in range(3):
        h = torch.tanh(h * x)
    return h


def in_rounds_of_torch(x):
    from torch._higher_order_ops.while_loop import while_loop

    rounds = while_loop(lambda i, h: i < 3, lambda i, h: (i + 1, h * h), (torch.tensor(0), x.sin()))
    return torch.cond(x.sum() > 100, torch.sin, torch.exp, (rounds[1],))


def with_a_derivative_inside(x):
    return (gt.grad(lambda z: (torch.softmax(torch.tanh(z * z), 0) @ z).square())(x) ** 2).sum()


def with_the_derivative_of_torch_func(x):
    return torch.func.vmap(torch.func.grad(lambda z: (z**3).sin()))(x)


PROGRAMS = [
    written_in_place,
    written_through_a_view_of_what_was_read,
    written_through_other_views,
    updated_without_a_derivative,
    in_rounds,
    in_rounds_of_torch,
    with_a_derivative_inside,
    with_the_derivative_of_torch_func,
    lambda x: gt.reverse_gradient(x, 0.5) ** 2,
    lambda x: gt.scale_gradient(x.sin(), 0.5) ** 2,
    lambda x: gt.clip_gradient(x.sin(), max_norm=0.1) ** 2,
    lambda x: gt.replace_gradient(x.sin(), torch.ones(4)) * x,
    lambda x: gt.stop_gradient(x.sin()) * x + x.detach() ** 2 * x,
    lambda x: gt.straight_through(torch.round)(x) * x,
    lambda x: gt.checkpoint(lambda z: z.sin().exp())(x),
    lambda x: F.dropout(x, 0.5) * x + torch.randn(4) * x,
]


@pytest.mark.sampled(9, 32)
@pytest.mark.parametrize("f", PROGRAMS, ids=lambda f: f.__name__)
@pytest.mark.parametrize("order", [1, 2])
def test_a_program_is_made_functional_and_keeps_its_rules(f, order):
    checked(f, X, order=order)


def test_statistics_that_a_derivative_inside_reads_are_known():
    g = lambda x: F.layer_norm(x.reshape(2, 2), (2,), eps=0.1).exp().sum()
    checked(lambda x: gt.grad(g)(x) ** 2, X)
    h = lambda x: F.cross_entropy(F.batch_norm(x, None, None, training=True), torch.tensor([0, 1]))
    checked(lambda x: gt.grad(h)(x.reshape(2, 2)) ** 2, X)


class Cube(torch.autograd.Function):
    """A rule of PyTorch's own kind."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx, ct):
        (x,) = ctx.saved_tensors
        return 3 * ct * x**2


class Wrong(Cube):
    """A rule that is not the derivative."""

    @staticmethod
    def backward(ctx, ct):
        return 7 * ct


def test_a_rule_is_written_as_it_stands_whether_right_or_wrong():
    assert checked(lambda x: Cube.apply(x), X).lines(1) == ["x̄ = vjp[Cube](x; ȳ)"]
    wrong = checked(lambda x: Wrong.apply(x), X)
    assert wrong.marked == ("Wrong",)
    np.testing.assert_allclose(wrong.evaluate([X.numpy()]).gradients[0], np.full(4, 7.0))
    checked(lambda x: Cube.apply(Wrong.apply(x).sin()), X, order=2)


def test_a_host_kernel_keeps_its_name_is_marked_and_still_compared():
    kernel = gt.host_function(np.sin)
    kernel.defvjp(lambda x: (kernel(x), x), lambda x, ct: (ct * torch.cos(x),))
    found = gt.formula(lambda x: kernel(x) * x, X)
    assert found.marked == ("sin",)
    assert found.check.points == 3


@pytest.mark.slow_at("Sequential1", "GRU", "TransformerEncoderLayer")
@pytest.mark.parametrize(
    "module",
    [
        torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.ReLU(), torch.nn.Linear(3, 2)),
        torch.nn.Sequential(torch.nn.BatchNorm1d(4), torch.nn.Dropout(0.5), torch.nn.Linear(4, 2)),
        torch.nn.GRU(4, 3),
        torch.nn.TransformerEncoderLayer(4, 2, 6, dropout=0.0, batch_first=True).eval(),
    ],
    ids=lambda m: type(m).__name__,
)
def test_parameters_of_a_module_are_differentiated_and_it_stays_as_it_was(module):
    before = {k: v.clone() for k, v in module.state_dict().items()}
    stream = torch.get_rng_state()
    found = checked(module, ROWS)
    names = [n for n, _ in module.named_parameters()]
    assert len(found.inputs) == 1 + len(names)
    assert all(torch.equal(v, before[k]) for k, v in module.state_dict().items())
    assert torch.equal(torch.get_rng_state(), stream)
    assert all(p.grad is None and p.dtype == torch.float32 for p in module.parameters())


def test_leaves_are_called_as_f_calls_them():
    found = checked(
        lambda p, x: p["w"] @ x + p["b"][0], {"w": ROWS, "b": [X[:3]]}, X, argnums=(0, 1)
    )
    assert sorted(found.inputs) == ["b₀", "w", "x"]
    layers = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Linear(3, 2))
    assert found.gradients[0] != checked(layers, ROWS).inputs[1] == "weight₀"


def test_a_linear_layer_and_a_complex_one_read_as_in_a_book():
    w, b = torch.complex(ROWS, ROWS.flip(0)), torch.complex(X[:3], X[1:])
    found = checked(lambda W, x, b: W @ x + b, w, torch.complex(X, X), b, argnums=(0, 1, 2))
    assert found.lines(1) == ["W̄ = ȳ xᴴ", "x̄ = Wᴴ ȳ", "b̄ = ȳ"]
    found = checked(lambda z, t: F.cross_entropy(z, t), ROWS, torch.tensor([0, 3, 1]))
    assert found.lines(1) == ["z̄ = L̄ (softmaxⱼ(z) - onehot(t)) / 3"]


def test_a_derivation_in_pytorch_is_held_against_the_formula():
    found = checked(lambda W, x: torch.tanh(W @ x), ROWS, X, argnums=(0, 1))

    def right(W, x, ct):
        inner = ct * (1 - torch.tanh(W @ x) ** 2)
        return torch.outer(inner, x), W.T @ inner

    def wrong(W, x, ct):
        inner = ct * (1 - torch.tanh(W @ x))
        return torch.outer(inner, x), W.T @ inner

    assert found.agrees_with(right)
    answer = found.agrees_with(wrong)
    assert not answer
    assert answer.where.startswith("W̄[")


def test_parameters_take_part_in_a_derivation():
    layer = torch.nn.Linear(4, 3, bias=False)
    found = checked(layer, X)
    assert found.agrees_with(lambda x, w, ct: (w.T @ ct, torch.outer(ct, x)))
    assert not found.agrees_with(lambda x, w, ct: (w.T @ ct, torch.outer(ct, 2 * x)))


# What is refused, and what is said.


@pytest.mark.parametrize(
    ("f", "said"),
    [
        (lambda x: torch.from_numpy(np.sin(x.detach().numpy())) * x, "compared at the given"),
        (lambda x: x * x.max().item(), "compared at the given"),
        (lambda x: x * 2 if x[0].item() == X[0].item() else x * 3, "compared at the given"),
    ],
    ids=["numpy", "item", "branch"],
)
def test_what_depends_on_the_values_holds_for_these_alone(f, said):
    check = gt.formula(f, X).check
    assert check.points == 1
    assert said in check.note


def test_a_formula_that_differs_from_autograd_is_not_shown(monkeypatch):
    monkeypatch.setitem(READINGS, "sin", lambda call: apply("cos", call.own.self))
    with pytest.raises(GradtoolsError, match=r"by the formula and .* by automatic"):
        gt.formula(lambda x: x.sin(), X)


def test_a_wrong_gradient_of_right_values_is_not_shown(monkeypatch):
    monkeypatch.setitem(READINGS, "sin", lambda call: apply("stop", apply("sin", call.own.self)))
    with pytest.raises(GradtoolsError, match=r"x̄\[0\] is 0.0 by the formula"):
        gt.formula(lambda x: x.sin(), X)


def test_a_formula_that_is_right_at_one_point_alone_is_not_shown(monkeypatch):
    at = X.double().numpy()
    tangent = lambda call: array(np.sin(at)) + array(np.cos(at)) * (call.own.self - array(at))
    monkeypatch.setitem(READINGS, "sin", tangent)
    with pytest.raises(GradtoolsError, match="by the formula and"):
        gt.formula(lambda x: x.sin(), X)


def test_where_f_is_not_defined_nothing_is_compared_and_that_is_said():
    with pytest.raises(GradtoolsError, match="none of 1 points are all values finite"):
        gt.formula(lambda x: x.log(), -torch.ones(3))


def test_a_marked_operation_with_several_results_is_compared_as_well():
    a = ROWS[:, :3] + 3 * torch.eye(3)
    found = gt.formula(lambda a: torch.linalg.lu_factor(a)[0], a)
    assert found.marked == ("lu_factor_ex",)
    assert found.check.points == 3


def test_an_operation_without_algebra_is_written_by_its_name_and_differentiated_twice():
    found = gt.formula(lambda x: torch.special.i0e(x) * x, X)
    assert found.marked == ("special_i0e",) and found.check.points == 3
    again = gt.formula(lambda x: torch.special.i1(x) * x, X.exp())
    assert again.lines(1)[-1] == "x̄ = ȳ ⊙ z + vjp[special_i1](x; ȳ ⊙ x)"
    twice = gt.formula(lambda x: torch.special.erfcx(x) * x, X, order=2)
    assert "vjp₁[vjp of special_erfcx](" in str(twice) and twice.check.error < 1e-8


def test_inside_of_a_transform_it_is_refused():
    with pytest.raises(GradtoolsError, match="inside of a transform"):
        torch.func.vmap(lambda x: gt.formula(torch.exp, x).check)(ROWS)


ONE = torch.tensor([0])
OF_SCALARS = {
    "index_select": lambda x: x.sum().index_select(0, ONE).sum(),
    "index_add": lambda x: x.sum().index_add(0, ONE, x[0]).sum(),
    "index_fill": lambda x: (x.sum().index_fill(0, ONE, 1.0) * x).sum(),
    "scatter": lambda x: x.sum().scatter(0, torch.tensor(0), x[0]),
    "copysign": lambda x: torch.copysign(x, -2 * x).sum(),
    "cdist with p = 0": lambda x: (torch.cdist(x[:, None], 2 * x[:, None], p=0.0) * x).sum(),
}


@pytest.mark.parametrize("name", OF_SCALARS)
def test_operations_at_the_edge_of_their_shapes_have_formulas(name):
    found = gt.formula(OF_SCALARS[name], torch.tensor([0.5, 1.0, 2.0]))
    assert found.check is not None and found.check.given


def test_few_operations_have_a_translation_of_their_own():
    assert len(READINGS) < 60  # all others are said as the graph says them
