"""Formulas of operations at their odd ends: a single number, an exponent of zero, each padding.

PyTorch runs and differentiates each of them, so what fails is the formula's own fault.
"""

import math
from functools import partial

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import gradtools.torch as gt
from gradtools import GradtoolsError

NUMBER = torch.tensor(2.0)
VECTOR = torch.tensor([0.5, -1.0, 2.0, 0.25])
MATRIX = torch.tensor([[0.5, -1.0, 2.0], [1.5, 0.3, -0.7], [0.2, 0.9, -2.0]])
FIRST, ZERO = torch.tensor([0]), torch.tensor(0)

ALONG = {  # the only axis that a single number is given
    "sort": lambda x: torch.sort(x)[0],
    "topk": lambda x: torch.topk(x, 1)[0],
    "kthvalue": lambda x: torch.kthvalue(x, 1)[0],
    "median": lambda x: torch.median(x, 0)[0],
    "max": lambda x: torch.max(x, 0)[0],
    "amin": lambda x: torch.amin(x, 0),
    "cumsum": lambda x: torch.cumsum(x, 0),
    "cumprod": lambda x: torch.cumprod(x, 0),
    "cummax": lambda x: torch.cummax(x, 0)[0],
    "logcumsumexp": lambda x: torch.logcumsumexp(x, 0),
    "softmax": lambda x: torch.softmax(x, 0),
    "log_softmax": lambda x: torch.log_softmax(x, 0),
    "logsumexp": lambda x: torch.logsumexp(x, 0),
    "sum": lambda x: torch.sum(x, 0),
    "prod": lambda x: torch.prod(x, 0),
    "norm": lambda x: torch.linalg.vector_norm(x),
    "flip": lambda x: torch.flip(x, (0,)),
    "index_select": lambda x: torch.index_select(x, 0, ZERO),
    "gather": lambda x: torch.gather(x, 0, FIRST if x.ndim else ZERO),
    "take": lambda x: torch.take(x, ZERO),
    "scatter_add": lambda x: torch.scatter_add(
        x, 0, FIRST if x.ndim else ZERO, x[:1] if x.ndim else x
    ),
    "index_add": lambda x: torch.index_add(x, 0, ZERO, 3 * x[:1] if x.ndim else 3 * x),
    "index_fill": lambda x: torch.index_fill(x, 0, ZERO, 1.0),
    "ellipsis": lambda x: x[...],
    "mask": lambda x: x[torch.tensor(True)],
}
PADDED = {
    mode: lambda x, mode=mode: F.pad(x[None], (1, 1), mode=mode)
    for mode in ("constant", "circular", "reflect", "replicate")
}
ODD = {
    "copysign": lambda x: torch.copysign(x, -x.detach()),
    **{f"cdist {p}": lambda x, p=p: torch.cdist(x, x + 1, p=p) for p in (0.0, 1.0, 2.0, math.inf)},
    **PADDED,
    "pad by less": lambda x: F.pad(x, (-1, 0)),
    **{f"polygamma {n}": lambda x, n=n: torch.polygamma(n, x.abs() + 1) for n in (0, 1, 3)},
    "unfold": lambda x: x.unfold(0, 2, 1),
    "renorm": partial(torch.renorm, p=2, dim=0, maxnorm=1.0),
    "frexp": lambda x: torch.frexp(x)[0],
    "trace": torch.trace,
    "lstsq": lambda x: torch.linalg.lstsq(x, x + 1)[0],
    "pinv": torch.linalg.pinv,
    "real by its keyword": lambda x: torch.real(input=torch.complex(x, x * x)),
    "imag by its keyword": lambda x: torch.imag(input=torch.complex(x, x * x)),
    "detach as a function": lambda x: torch.detach(x) * x,
    "detach in place": lambda x: (2 * x).detach_() * x,
}


@pytest.mark.slow_at(("sort", "number"))
@pytest.mark.parametrize("x", [NUMBER, VECTOR], ids=["number", "vector"])
@pytest.mark.parametrize("name", ALONG)
def test_an_operation_along_an_axis_has_a_formula_of_one_number_too(name, x):
    assert gt.formula(ALONG[name], x).lines(1)  # compared with autograd before it is shown


@pytest.mark.parametrize("name", ODD)
def test_odd_arguments_are_no_fault_of_the_function(name):
    assert gt.formula(ODD[name], MATRIX).lines(1)


def test_a_padding_names_its_axes_as_the_array_has_them():
    assert "pad: low (0, 1), high (0, 2)" in str(
        gt.formula(lambda x: F.pad(x, (1, 2), value=3.0).square(), MATRIX)
    )


def test_an_index_beyond_its_axis_is_read_modulo_the_axis():
    beyond = torch.tensor([5, -1, 2])
    found = gt.formula(lambda x, i: x[i % 3].square().sum(), VECTOR, beyond)
    assert found.lines(1) and found.check is not None and found.check.error < 1e-6


@pytest.mark.parametrize("at", [lambda x: 1, lambda x: x[:, 0].argmax()], ids=["row", "argmax"])
def test_what_is_written_through_a_row_is_written(at):
    def f(x):
        y = x * 2
        row = y[at(x)]
        row.mul_(x[0])
        return (y * row).sum()

    assert gt.formula(f, MATRIX).check.given


def test_a_mask_in_brackets_is_explained():
    assert "  [c]: at the places that f selects" in str(gt.formula(lambda x: x[x > 0], MATRIX))


PRODUCTS = {
    "linear": lambda x: F.linear(x[None], torch.ones(2, 3), torch.ones(2)),
    "a vector": lambda x: F.linear(x[None], torch.ones(3)),
    "a batch": lambda x: x.expand(2, 3, 3) @ x,
    "a list": lambda x: torch.einsum("ij,kj->ik", [x, x]),
    "an ellipsis": lambda x: torch.einsum("...j,kj->...k", x, x),
    "a diagonal": lambda x: torch.einsum("ii->i", x),
    "no result": lambda x: torch.einsum("ij,jk", x, x),
    "numbers": lambda x: torch.einsum(x, [0, 1], x, [2, 1], [0, 2]),
    "switched off": lambda x: x @ torch.no_grad()(lambda: x @ x)(),
}


@pytest.mark.parametrize("name", PRODUCTS)
def test_a_product_of_matrices_merges_no_axes(name):
    found = gt.formula(PRODUCTS[name], MATRIX, order=2)
    assert found.check.given and not found.marked
    assert "reshape" not in str(found) or name == "an ellipsis"


def test_a_captured_array_that_requires_no_gradient_has_no_adjoint():
    c = VECTOR.clone()
    assert gt.formula(lambda x: (c * x).exp().sum(), VECTOR).lines(1) == ["x̄ = L̄ c ⊙ e"]


# --- what is written in place, and read again --------------------------------------------


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
    assert "set_at" not in str(found) and "window" not in str(found)


@pytest.mark.parametrize("name", ["svd", "pinv", "eigh"])
def test_linear_algebra_is_written_by_name_and_differentiated_twice(name):
    torch.manual_seed(0)
    loss = lambda A: sum(y.square().mul(1 + y.detach()).sum() for y in _parts(name, A))
    found = gt.formula(loss, torch.randn(3, 2) if name == "pinv" else torch.randn(3, 3), order=2)
    assert found.marked == (name,) and f"vjp[{name}](" in str(found)
    assert found.check is not None and found.check.error < 1e-6


def _parts(name, A):
    if name == "svd":
        return [torch.linalg.svdvals(A)]
    return [torch.linalg.eigh(A + A.mT)[0] if name == "eigh" else torch.linalg.pinv(A)]


def _halves(x):
    y = x.clone()
    y[:3] *= 2
    y[3:] = y[:3] + 1
    return (y[3:] * y[:3]).sum()


def _overlapping(x):
    y = x.sin()
    y[1:4] *= x[:3]
    y[2:5] += 1
    return (y[:3] * y[3:]).sum()


def _over_again(x):
    y = x.clone()
    y[1:3] = x[:2] ** 2
    y[1:3] = y[1:3].exp()
    return y[1:].sin().sum()


@pytest.mark.parametrize(
    ("f", "line"),
    [
        (lambda x: x.expand(2, 4).norm(), "L = ‖repeat₂ₓ₄(x)‖"),
        (lambda x: torch.logsumexp(x.expand(2, 4), (0, 1)), "L = logsumexp(repeat₂ₓ₄(x))"),
        (lambda x: x.var(), "L = 4/3 var(x)"),
    ],
    ids=["norm", "logsumexp", "variance"],
)
def test_a_line_says_what_is_computed(f, line):
    assert gt.formula(f, VECTOR, order=2).lines(0) == [line]


@pytest.mark.parametrize("module", [torch.nn.BatchNorm1d(4), torch.nn.LayerNorm(4)], ids=str)
def test_a_normalization_of_a_layer_is_standardization(module):
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(3, 4), module)
    assert "  N = standardize" in str(gt.formula(net, torch.randn(5, 3)))


def _unseen_by_autograd(x):
    y, z = x * 2, x.sin()
    with torch.no_grad():
        y[0] = 7.0
        y[1] *= 3
    z.detach()[1:3] *= 3
    return (y * x).sum() + (z * z).sum()


def _filled(x):
    y = x * 2
    with torch.no_grad():
        y.fill_(7.0)
    return (y * x).sum()


@pytest.mark.parametrize("f", [_unseen_by_autograd, _filled])
def test_what_is_written_without_autograd_keeps_its_derivative(f):
    found = gt.formula(f, VECTOR)
    assert found.check.given and found.check.points == 3


def test_an_entry_that_is_taken_twice_has_both_cotangents():
    at = torch.tensor([0, 2, 0])
    assert gt.formula(lambda x: x[at] ** 2, VECTOR).check.given


def _mask(x):
    kept = torch.zeros(6, dtype=torch.bool)
    kept[1:] = x[1:] > 0.5
    return torch.where(kept, x.exp(), x)


def test_a_mask_that_is_written_in_part_is_recorded():
    found = gt.formula(_mask, torch.linspace(0.2, 1.3, 6, dtype=torch.float64), order=2)
    assert found.marked == ("set_at[1:]",) and found.check is not None and found.check.error < 1e-8


@pytest.mark.parametrize("order", [1, 2])
@pytest.mark.parametrize("f", [_halves, _overlapping, _over_again])
def test_a_write_into_a_part_is_an_operation_of_the_whole_and_the_part(f, order):
    x = torch.linspace(0.2, 1.3, 6, dtype=torch.float64)
    found = gt.formula(f, x, order=order)
    assert {name.partition("[")[0] for name in found.marked} == {"set_at"}
    assert found.check is not None and found.check.given and found.check.error < 1e-8


# --- where f is defined, and in which numbers ---------------------------------------------


@pytest.mark.parametrize(
    ("f", "x"),
    [
        (torch.asin, np.linspace(-0.99, 0.99, 40)),
        (torch.atanh, np.linspace(-0.999, 0.999, 40)),
        (torch.erfinv, np.linspace(-0.99, 0.99, 40)),
        (lambda p: F.binary_cross_entropy(p, torch.ones_like(p)), np.linspace(0.01, 0.999, 40)),
    ],
    ids=["asin", "atanh", "erfinv", "binary_cross_entropy"],
)
def test_a_function_of_few_numbers_is_compared_as_near_as_it_is_defined(f, x):
    assert "3 random points" in str(gt.formula(f, torch.tensor(x)))


def test_where_nothing_nearby_is_defined_the_arguments_alone_are_compared():
    def f(x):
        if not torch.equal(x.detach(), torch.ones(3)):
            raise ValueError("another x")
        return (x**2).sum()

    said = str(gt.formula(f, torch.ones(3)))
    assert "nearby f is not defined" in said and "compared at the given arguments alone" in said


@pytest.mark.parametrize(
    ("f", "line"),
    [
        (lambda x: x.to(torch.complex128).sqrt(), "  y = √(x + 0i)"),
        (lambda x: torch.log(x + 0j), "  y = log(x + 0i)"),
        (lambda x: x.cfloat() * 2, "  y = 2 x + 0i"),
        (lambda x: torch.fft.fft(x.to(torch.complex128)), "  y = fft(x + 0i)"),
        (lambda x: (x + 0j).abs(), "  y = |x|"),
        (lambda x: x.to(torch.complex128) * (1 + 2j), "  y = (1 + 2i) x"),
    ],
)
def test_real_numbers_as_complex_ones_are_told_where_it_matters(f, line):
    assert line in str(gt.formula(f, torch.tensor([0.3, 1.7, -2.5]))).splitlines()


def test_what_is_drawn_from_a_distribution_of_the_values_is_compared_at_these_alone():
    said = str(gt.formula(lambda m: torch.distributions.Normal(m, 1.0).sample() * m, torch.ones(3)))
    assert "compared at the given arguments alone" in said


def test_what_is_written_through_a_conjugate_is_refused():
    def f(z):
        y = z * 2
        y.conj().mul_(1j)
        return y.abs().sum()

    with pytest.raises(GradtoolsError, match="through a view of another dtype, or of a conjugate"):
        gt.formula(f, torch.tensor([1.0 + 2.0j, 3.0 - 1.0j]))


def test_an_operation_that_writes_and_returns_something_else_is_read():
    mean, var = torch.zeros(2), torch.ones(2)
    f = lambda x: torch.ops.aten._native_batch_norm_legit(x, None, None, mean, var, True, 0.1, 0)[0]
    assert "standardize" in str(gt.formula(f, torch.randn(3, 2, 4)))


class _OneWay(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.exp()

    @staticmethod
    def backward(ctx, ct):
        raise NotImplementedError("there is no way back")


def test_a_missing_derivative_of_the_framework_is_no_fault_of_the_formula():
    said = r"f runs, and automatic differentiation of it does not \(.*there is no way back"
    with pytest.raises(GradtoolsError, match=said):
        gt.formula(_OneWay.apply, torch.ones(3))


@pytest.mark.parametrize("order", [1, 2])
def test_only_operands_that_are_asked_for_are_differentiated(order):
    """PyTorch has no derivative of pinv with respect to its tolerances."""
    found = gt.formula(torch.pinverse, torch.randn(3, 4), order=order)
    assert found.marked == ("pinv",)
    assert found.lines(1) == ["x̄ = vjp₁[pinv](x, 0, 1e-15; Ȳ)"]


def test_slopes_that_are_drawn_below_zero_are_draws():
    x = torch.tensor([-1.0, 2.0, -3.0])
    for f in (F.rrelu, F.rrelu_):
        found = gt.formula(lambda x, f=f: f(x * 1, training=True), x)
        assert found.lines(1) == ["x̄ = ȳ ⊙ c"] and not found.marked


def test_a_backward_kernel_that_rounds_to_single_precision_is_written_by_name():
    found = gt.formula(F.hardsigmoid, torch.tensor([-1.0, 0.5, 4.0], dtype=torch.float64))
    assert found.marked == ("hardsigmoid",) and found.check.error < 1e-8


def test_a_sparse_tensor_is_refused_in_words():
    with pytest.raises(GradtoolsError, match=r"f makes a sparse tensor \(.*\); a formula is of"):
        gt.formula(lambda x: x.to_sparse(), torch.ones(3))


@pytest.mark.parametrize(
    "write",
    [
        torch.no_grad()(lambda y: torch._foreach_add_(y, 1.0)),
        lambda y: torch._foreach_mul_(y, [1.0, 2.0]),
        lambda y: torch._foreach_addcmul_(y, [z + 1 for z in y], [z * 2 for z in y], 3.0),
    ],
    ids=["add", "mul", "addcmul"],
)
def test_an_operation_that_writes_into_lists_is_written_by_name(write):
    def f(x):
        y = [x * 3, x * 2]
        write(y)
        return y[0] * y[1]

    found = gt.formula(f, torch.rand(3) + 1)
    assert found.marked and found.check is not None and found.check.given


# --- what was a fault of ours ------------------------------------------------------------


class _WithBuffer(torch.autograd.Function):
    """Its backward writes into a buffer, so that it has no derivative."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx, g):
        (x,) = ctx.saved_tensors
        out = torch.empty_like(x)
        torch.mul(x, x, out=out)
        return 3 * g * out


def test_a_rule_whose_backward_writes_into_a_buffer_has_a_formula_of_first_order():
    x = torch.tensor([0.5, -2.0])
    found = gt.formula(lambda x: _WithBuffer.apply(x), x)
    assert found.lines(1) == ["x̄ = vjp[_WithBuffer](x; ȳ)"] and found.check is not None
    with pytest.raises(GradtoolsError):
        gt.formula(lambda x: _WithBuffer.apply(x).sum(), x, order=2)


def test_what_a_backward_raises_itself_ends_the_search_for_neighbours():
    class Refusing(_WithBuffer):
        @staticmethod
        def backward(ctx, g):
            calls.append(1)
            raise RuntimeError("not today")

    calls = []
    with pytest.raises(GradtoolsError, match="not today"):
        gt.formula(Refusing.apply, torch.ones(2))
    assert len(calls) <= 4  # near and at the arguments, for the formula and by autograd
