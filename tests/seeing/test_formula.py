"""Tests formulas of PyTorch programs: text, LaTeX and numerical checks."""

import re

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import gradtools.torch as gt
from gradtools.seeing.formulas.expressions import evaluate, full
from gradtools.seeing.formulas.formulating import compared
from gradtools.seeing.formulas.operations import DEFINITIONS
from gradtools.seeing.formulas.typesetting import latex as latex_of
from gradtools.seeing.formulas.typesetting import number


def array(*shape, dtype=torch.float64):
    return torch.randn(shape, generator=torch.Generator().manual_seed(0), dtype=dtype)


def linear(W, x, b):
    return W @ x + b


LINEAR = (array(3, 4), array(4), array(3))


@pytest.mark.parametrize(
    ("f", "args", "said"),
    [
        (lambda x: x**2, (array(4),), ["∂s/∂x = 2 ȳ ⊙ u", "∂s/∂ȳ = 2 x ⊙ u"]),
        (lambda x: x.exp(), (array(4),), ["∂s/∂x = ȳ ⊙ y ⊙ u", "∂s/∂ȳ = y ⊙ u"]),
        (lambda x: x**3, (array(4),), ["∂s/∂x = 6 ȳ ⊙ x ⊙ u", "∂s/∂ȳ = 3 u ⊙ x²"]),
        (
            linear,
            LINEAR,
            [
                "∂s/∂W = ȳ u_xᵀ",
                "∂s/∂x = u_Wᵀ ȳ",
                "∂s/∂b = 0",
                "∂s/∂ȳ = W u_x + u_W x + u_b",
            ],
        ),
    ],
    ids=["square", "exp", "cube", "linear"],
)
def test_order_two_shows_the_double_backward(f, args, said):
    assert gt.formula(f, *args, order=2, argnums=tuple(range(len(args)))).lines(2) == said


def affine(W_re, W_im, I_re, I_im, b_re, b_im):
    return W_re @ I_re - W_im @ I_im + b_re, W_re @ I_im + W_im @ I_re + b_im


PARTS = (array(3, 4), array(3, 4), array(4), array(4), array(3), array(3))


def test_separate_real_and_imaginary_parts_give_the_same_rule_together():
    found = gt.formula(affine, *PARTS, argnums=tuple(range(6)))
    assert found.lines(2) == ["W̄ = Ō Iᴴ", "Ī = Wᴴ Ō", "b̄ = Ō"]
    assert found.lines(1)[2:4] == ["Īᵣₑ = Wᵢₘᵀ ȳ₂ + Wᵣₑᵀ ȳ₁", "Īᵢₘ = Wᵣₑᵀ ȳ₂ - Wᵢₘᵀ ȳ₁"]
    assert gt.formula(affine, *PARTS, argnums=(0, 1, 2, 3)).lines(2) == ["W̄ = Ō Iᴴ", "Ī = Wᴴ Ō"]


LOSSES = {
    "linear": (linear, LINEAR),
    "affine in parts": (affine, PARTS),
    "cross entropy": (lambda Z: F.cross_entropy(Z, torch.tensor([0, 2, 1])), (array(3, 4),)),
    "logistic": (lambda w: F.softplus(w).sum() + torch.sigmoid(w).sum(), (array(4),)),
    "normalized": (lambda X: F.layer_norm(X.relu(), (4,)), (array(3, 4),)),
    "complex": (lambda z: (z * (1 + 2j)).abs().sum(), (array(4, dtype=torch.complex128),)),
}
NAMES = {  # maps each function name to a pattern that finds the name in a formula
    "softplus": r"softplus\(",
    "sigmoid": r"sigmoid\(",
    "relu": r"relu\(",
    "softmax": r"softmax[^ (]*\(",
    "logsumexp": r"logsumexp[^ (]*\(",
    "var": r"\bvar[^ (]*\(",
}


@pytest.mark.parametrize("name", LOSSES)
def test_each_name_is_defined_below_and_latex_is_well_formed(name):
    assert set(NAMES) == set(DEFINITIONS)
    f, args = LOSSES[name]
    found = gt.formula(f, *args, order=2, argnums=tuple(range(len(args))))
    text, latex = str(found), found.latex()
    lines = text.partition("\nwhere\n")[0]
    named = {name for name, pattern in NAMES.items() if re.search(pattern, lines)}
    assert {name for name, told in DEFINITIONS.items() if told in text} == named
    assert {name for name, told in DEFINITIONS.items() if latex_of(told) in latex} == named
    assert latex.count("{") == latex.count("}") and not re.search("[^\x00-\x7f]", latex)


def test_latex_of_a_linear_layer():
    found = gt.formula(linear, *LINEAR, argnums=(0, 1, 2))
    assert r"\bar{W} = \bar{y} x^{\top}" in found.latex()
    assert r"\bar{x} = W^{\top} \bar{y}" in found.latex()
    assert found._repr_latex_().startswith("$$")


def test_an_array_that_the_program_holds_is_a_named_constant():
    found = gt.formula(lambda x: x * torch.tensor([1.0, 2.0, 3.0]), array(3))
    assert found.lines(1) == ["x̄ = ȳ ⊙ c"]
    assert found.agrees_with(lambda x, ct: ct * torch.tensor([1.0, 2.0, 3.0]))


@pytest.mark.parametrize(
    ("value", "text"),
    [
        *((1j, "i"), (-1j, "-i"), (-2j, "-2i"), (1 - 1j, "1 - 1i"), (1 + 2j, "1 + 2i")),
        *((1 / 3, "1/3"), (0.1, "0.1"), (2**0.5, "√2"), (-(8**-0.5), "-1/√8")),
    ],
)
def test_a_number_is_written_short_and_with_its_sign(value, text):
    assert number(value).text == text


def test_the_first_entry_that_differs_is_named():
    ours = np.array([1.0, 2.0, 3.0])
    found = compared(["x̄"], [ours], [ours + [0.0, 1e-3, 1.0]], 1e-6)
    assert (found.where, found.framework, found.derivation) == ("x̄[1]", 2.0, 2.001)


def test_the_transpose_of_a_batch_of_matrices_is_written_as_of_one():
    found = gt.formula(lambda X: X.mT, array(2, 3, 4))
    assert (found.lines(0), found.lines(1)) == (["Y = Xᵀ"], ["X̄ = Ȳᵀ"])


def test_one_over_a_zero_stays_in_the_formula():
    (value,) = evaluate([full(0.0, ()) ** -1.0], {})
    assert np.isinf(value)
