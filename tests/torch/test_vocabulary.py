"""Formulas of PyTorch functions are correct for every function in the table.

Each formula is compared with PyTorch's own derivatives before it is returned. Each row of the table
is a function and its arguments (`tests/support/formula_rows.py`). `BY_NAME` lists the functions
that formulas show by name.
"""

from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import gradtools.torch as gt
from gradtools import GradtoolsError
from gradtools.seeing.formulas.algebra import apply
from gradtools.seeing.formulas.expressions import array
from gradtools.seeing.torch.translating import READINGS
from tests.support.formula_rows import rows

# The order, an expression in a, b, c and d, and the shapes of these arguments; see `formula_rows`.
TABLE = """
2 a @ b                                             ; z(3,4) z(4)
1 a @ b                                             ; (4) (2,4,3)
2 torch.addmm(c, a, b, beta=0.5, alpha=2)           ; (3,4) (4,2) (2)
1 torch.baddbmm(c, a, b)                            ; (2,3,4) (2,4,2) (2,3,2)
1 torch.linalg.inv(a)                               ; h(3,3)
2 torch.linalg.solve(a, b)                          ; s(3,3) (3,2)
2 torch.einsum("bij,bjk", a, b)                     ; (2,3,4) (2,4,2)
1 torch.einsum("...ii->...i", a)                    ; (2,3,3)
1 torch.einsum("ij,kj->ik", [a, a])                 ; (3,4)
2 F.linear(a, b, c)                                 ; (5,4) (3,4) (3)
1 F.linear(a, b)                                    ; (5,4) (4)
2 F.conv2d(a, b, padding=1)                         ; (2,3,5,5) (2,3,3,3)
1 a.sum(1, keepdim=True) - a.amax(0)                ; (3,4)
2 a.var(0) + a.std(0, correction=0)                 ; (3,4)
1 torch.var_mean(a, 1)[0] * torch.std_mean(a, 1)[1] ; (3,4)
2 torch.linalg.vector_norm(a, ord=3, dim=1)         ; (3,4)
1 a.norm()                                          ; z(3)
2 torch.logsumexp(a, 1)                             ; (3,4)
2 torch.softmax(a, 1)                               ; (3,4)
2 F.cross_entropy(a, b)                             ; (5,3) i3(5)
1 F.cross_entropy(a, b, reduction="sum")            ; (5,3,2) i3(5,2)
1 F.cross_entropy(a, b, label_smoothing=0.1)        ; (5,3) i3(5)
1 F.cross_entropy(a, b, ignore_index=1)             ; (5,3) i3(5)
2 F.binary_cross_entropy_with_logits(a, torch.sigmoid(b)) ; (5) (5)
1 F.gaussian_nll_loss(a, b, c)                      ; (5) (5) p(5)
2 F.layer_norm(a, (4,), b, c)                       ; (3,4) (4) (4)
2 F.batch_norm(a, None, None, b, c, training=True)  ; (5,3) (3) (3)
1 F.group_norm(a, 2, b, c)                          ; (2,4,3) (4) (4)
1 F.rms_norm(a, (4,), b, 1e-6)                      ; (3,4) (4)
2 F.scaled_dot_product_attention(a, b, c)           ; (2,3,4) (2,5,4) (2,5,4)
1 F.scaled_dot_product_attention(a, b, c, is_causal=True) ; (1,2,3,4) (1,2,3,4) (1,2,3,4)
2 a[1:, ::2] * a[0, -1]                             ; (3,4)
1 a[:, b] + a[b, c]                                 ; (3,3) i3(3) i3(3)
1 torch.take_along_dim(a, b, 1)                     ; (3,4) i4(3,1)
1 a[b % 3].square().sum()                           ; (4) i[5,-1,2]
1 a[a > 0]                                          ; (3,4)
1 torch.where(a > 0, a * b, b.exp())                ; (3,4) (4)
1 a.masked_fill(a < 0, 2.0) * a                     ; (3,4)
1 torch.triu(a) - torch.tril(a, -1)                 ; (3,3)
2 torch.cat([a, b * a[:, :1]], 1)                   ; (3,4) (3,2)
1 a.expand(3, 4) * a.T.squeeze(1)[None]             ; (1,4)
2 a.cumsum(0)                                       ; (3,4)
2 a.exp() + a.expm1() * a.exp2()                    ; (4)
2 a.sqrt() + a.rsqrt() + a.reciprocal()             ; p(4)
2 a ** 3 + a ** b + 2 ** a + a.pow(0.5)             ; p(4) (4)
1 a.erf() + a.erfc() * a.erfinv()                   ; u(4)
1 torch.logaddexp(a, b) + torch.xlogy(a, b.exp())   ; (4) (4)
1 a.clamp(-0.5, 0.5) + a.clamp(min=b) + a.clamp_max(0.3) ; (4) (4)
2 torch.sigmoid(a) + F.logsigmoid(a) + F.softplus(a) ; (4)
2 F.gelu(a) + F.gelu(a, approximate="tanh") + F.silu(a) ; (4)
1 F.relu(a) + F.leaky_relu(a) + F.relu6(a) + F.hardtanh(a) ; (4)
2 a.real * a.imag + a.angle()                       ; z(4)
2 a.conj() * b + a.abs()                            ; z(4) z(4)
1 a.exp() * a.log() + a.sin() / a.sqrt()            ; z(4)
1 torch.sgn(a) + a ** 2 + 1 / a                     ; z(4)
1 (a / 3).int() + a.double() + (a > 0) + a.bool()   ; (4)
# a single number
1 torch.sort(a)[0] + torch.softmax(a, 0)            ; ()
"""
LINES = [
    (int(row.expression[0]), replace(row, expression=row.expression[2:])) for row in rows(TABLE)
]
# Functions that a formula shows by name because they have no symbolic form.
BY_NAME = set(
    """
    angle arctan2 avg_pool binary_cross_entropy_with_logits cast cdist cholesky clip concatenate
    convolution cumsum det diagonal eigh embedding erf erfc erfinv exp2 gelu group_norm hardsigmoid
    hardtanh index inv is_nan log_sigmoid logaddexp bitwise_and bitwise_not maximum minimum
    nll_loss2d_forward norm pad power remainder rfft scatter scatter_add scatter_along solve sort
    take_along triangular_solve view_as_complex
    """.split()
)


@pytest.mark.sampled(50, 90)
@pytest.mark.parametrize(("order", "row"), LINES, ids=[str(row) for _, row in LINES])
def test_the_formula_is_what_autograd_computes(order, row):
    args = [torch.tensor(x) for x in row.arrays(np.random.default_rng(3))]
    moving = tuple(k for k, x in enumerate(args) if x.is_floating_point() or x.is_complex())
    f = eval(f"lambda {', '.join('abcd'[: len(args)])}: {row.expression}", {"torch": torch, "F": F})
    found = gt.formula(f, *args, order=order, argnums=moving)
    assert set(found.marked) <= BY_NAME
    assert found.check.error <= 1e-8


# --- programs that do more than call functions -------------------------------------------


def checked(f, *args, **more):
    """Return the formula of f, and assert that gradtools checked the formula."""
    found = gt.formula(f, *args, **more)
    assert "at the arguments and 3 random points" in str(found.check)
    return found


X = torch.linspace(-1.0, 1.0, 4, dtype=torch.float64) + 0.1
ROWS = torch.sin(torch.arange(12.0)).reshape(3, 4)


def updated_without_a_derivative(x):
    y = x * 2
    with torch.no_grad():
        y.clamp_(min=0.3)
        scale = x.exp()
    return y * scale * x


def in_rounds_of_torch(x):
    from torch._higher_order_ops.while_loop import while_loop

    rounds = while_loop(lambda i, h: i < 3, lambda i, h: (i + 1, h * h), (torch.tensor(0), x.sin()))
    return torch.cond(x.sum() > 100, torch.sin, torch.exp, (rounds[1],))


def with_a_derivative_inside(x):
    return (gt.grad(lambda z: (torch.softmax(torch.tanh(z * z), 0) @ z).square())(x) ** 2).sum()


def with_the_derivative_of_torch_func(x):
    return torch.func.vmap(torch.func.grad(lambda z: (z**3).sin()))(x)


def of_statistics(x):
    g = lambda x: F.layer_norm(x.reshape(2, 2), (2,), eps=0.1).exp().sum()
    return gt.grad(g)(x) ** 2


PROGRAMS = [
    updated_without_a_derivative,
    in_rounds_of_torch,
    with_a_derivative_inside,
    with_the_derivative_of_torch_func,
    of_statistics,
    lambda x: gt.reverse_gradient(x, 0.5) ** 2,
    lambda x: gt.clip_gradient(x.sin(), max_norm=0.1) ** 2,
    lambda x: gt.replace_gradient(x.sin(), torch.ones_like(x)) * x,
    lambda x: gt.stop_gradient(x.sin()) * x + x.detach() ** 2 * x + (2 * x).detach_() * x,
    lambda x: gt.straight_through(torch.round)(x) * x,
    lambda x: gt.checkpoint(lambda z: z.sin().exp())(x),
    lambda x: F.dropout(x, 0.5) * x + torch.randn(4) * x,
    lambda x: torch.ops.aten.native_dropout(x, 0.5, True)[0] * x,
    lambda x: torch.fill(x, True) * x,
]


@pytest.mark.sampled(20, 34)
@pytest.mark.parametrize("f", PROGRAMS, ids=lambda f: f.__name__)
@pytest.mark.parametrize("order", [1, 2])
def test_a_program_is_made_functional_and_keeps_its_rules(f, order):
    checked(f, X, order=order)


class Cube(torch.autograd.Function):
    """A torch.autograd.Function for x^3."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx, ct):
        (x,) = ctx.saved_tensors
        return 3 * ct * x**2


class Wrong(Cube):
    """A Function whose backward does not compute the derivative."""

    @staticmethod
    def backward(ctx, ct):
        return 7 * ct


def test_a_rule_is_written_as_it_stands_whether_right_or_wrong():
    assert checked(lambda x: Cube.apply(x), X).lines(1) == ["x̄ = vjp[Cube](x; ȳ)"]
    wrong = checked(lambda x: Wrong.apply(x), X)
    assert wrong.marked == ("Wrong",)
    assert wrong.agrees_with(lambda x, ct: 7 * ct)
    twice = checked(lambda x: Cube.apply(Wrong.apply(x).sin()), X, order=2)
    assert "[vjp of Cube](" in str(twice)


@pytest.mark.slow_at("Sequential1", "GRU", "TransformerEncoderLayer")
@pytest.mark.parametrize(
    "module",
    [
        torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.ReLU(inplace=True)),
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
    assert len(found.inputs) == 1 + len([*module.parameters()])
    assert all(torch.equal(v, before[k]) for k, v in module.state_dict().items())
    assert torch.equal(torch.get_rng_state(), stream)
    assert all(p.grad is None for p in module.parameters())


def test_parameters_take_part_in_a_derivation():
    layer = torch.nn.Linear(4, 3, bias=False)
    found = checked(layer, ROWS[0])
    assert found.agrees_with(lambda x, w, ct: (w.T @ ct, torch.outer(ct, x)))
    assert not found.agrees_with(lambda x, w, ct: (w.T @ ct, torch.outer(ct, 2 * x)))


def test_captured_tensors_without_requires_grad_are_not_differentiated():
    scale = torch.linspace(1.0, 2.0, 4, dtype=torch.float64)
    found = checked(lambda x: x * scale, X)
    assert found.inputs == ("x",) and found.lines(1) == ["x̄ = ȳ ⊙ scale"]


def test_arithmetic_of_integer_arguments_is_written_out():
    f = lambda x, y: x[:3] * (y + 1) + x[1:] * y.double()
    found = checked(f, X, torch.tensor([2, 0, 1]))
    assert found.lines(0) == ["f = x[:3] ⊙ (y + 1) + y ⊙ x[1:]"]


def test_gates_that_a_cell_writes_in_place_read_as_by_hand():
    torch.manual_seed(0)
    found = gt.formula(torch.nn.GRUCell(3, 4), torch.randn(2, 3), torch.randn(2, 4))
    assert found.lines(0) == [
        "Z₁ = input weight_ihᵀ + bias_ih",
        "Z₂ = hx weight_hhᵀ + bias_hh",
        "S₁ = sigmoid(Z₁[:, :4] + Z₂[:, :4])",
        "H = tanh(Z₁[:, 8:] + S₁ ⊙ Z₂[:, 8:])",
        "S₂ = sigmoid(Z₁[:, 4:8] + Z₂[:, 4:8])",
        "Y = S₂ ⊙ (hx - H) + H",
    ]


@pytest.mark.parametrize(
    ("f", "line"),
    [
        (lambda x: x.to(torch.complex128).sqrt(), "  y = √(x + 0i)"),
        (lambda x: x.to(torch.complex128) * 2, "  y = 2 x + 0i"),
        (lambda x: (x + 0j).abs(), "  y = |x|"),
        (lambda x: x.to(torch.complex128) * (1 + 2j), "  y = (1 + 2i) x"),
        (lambda x: x.expand(2, 4).norm(), "  L = ‖repeat₂ₓ₄(x)‖"),
        (lambda x: x.var(), "  L = 4/3 var(x)"),
        (lambda x: F.pad(x[None], (1, 2), value=3.0), "  Y = pad(x)"),
        (lambda x: torch.where(x > 0, x, x.exp()), "  y = {x if x > 0; e otherwise}"),
        (lambda x: F.cross_entropy(x, torch.tensor(1)), "  L = -⟨x - logsumexp(x), onehot(1)⟩"),
    ],
)
def test_a_line_says_what_is_computed(f, line):
    assert line in str(gt.formula(f, X)).splitlines()


# --- domains of f, and errors ------------------------------------------------------------


def _tangent(recorder, call, about, x):
    at = X.numpy()
    return [array(np.sin(at)) + array(np.cos(at)) * (x - array(at))]


@pytest.mark.parametrize(
    "wrong",
    [
        lambda recorder, call, about, x: [apply("cos", x)],
        lambda recorder, call, about, x: [apply("stop", apply("sin", x))],
        _tangent,
    ],
    ids=["value", "gradient", "right at one point"],
)
def test_a_formula_that_differs_from_autograd_is_not_shown(wrong, monkeypatch):
    monkeypatch.setitem(READINGS, "sin", wrong)
    with pytest.raises(GradtoolsError, match=r"automatic differentiation, .* by the formula"):
        gt.formula(lambda x: x.sin(), X)


def test_points_at_which_another_branch_runs_are_left_out():
    f = lambda x: x * 2 if x.sum() > 0.3999 else x * 3
    found = gt.formula(f, X)
    assert found.lines(0) == ["y = 2 x"] and "at the arguments and" in str(found.check)


def test_what_cannot_be_compared_is_refused():
    with pytest.raises(GradtoolsError, match="no value of f is finite"):
        gt.formula(lambda x: x.log(), -torch.ones(3))


def written_in_part(x):
    y = x * 2
    y[1:3] = x[:2]
    return y * y


def written_whole_and_read_in_part(x):
    y = x * 2
    part = y[1:]
    y.exp_()
    return part * 3


REFUSED = {
    "a part": (
        written_in_part,
        r"and then reads it through another view \(test_",
    ),
    "the whole": (written_whole_and_read_in_part, "reads it through another view"),
    "sparse": (
        lambda x: torch.sparse.mm(x.diag().to_sparse(), x[:, None]),
        "support only dense tensors",
    ),
    "random": (lambda x: F.rrelu(x, training=True), "rrelu_with_noise draws random numbers"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_program_without_a_formula_is_refused_in_words(name):
    f, message = REFUSED[name]
    with pytest.raises(GradtoolsError, match=message):
        gt.formula(f, X)


def test_only_operands_that_are_asked_for_are_differentiated():
    """PyTorch has no derivative of pinv with respect to its tolerances."""
    found = gt.formula(torch.pinverse, torch.randn(3, 4), order=2)
    assert found.lines(1) == ["x̄ = vjp₁[pinv](x, 0, 1e-15; Ȳ)"]


def test_an_operation_without_algebra_is_written_by_its_name_and_differentiated_twice():
    again = gt.formula(lambda x: torch.special.i1(x) * x, X.exp())
    assert again.lines(1)[-1] == "x̄ = ȳ ⊙ z + vjp[special_i1](x; ȳ ⊙ x)"
    twice = gt.formula(lambda x: torch.special.erfcx(x) * x, X, order=2)
    assert "vjp₁[vjp of special_erfcx](" in str(twice)
