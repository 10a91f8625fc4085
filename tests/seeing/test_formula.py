"""The formula of a program: what it says, what it computes, and what it is held against."""

import re

import numpy as np
import pytest

from gradtools import GradtoolsError
from gradtools.seeing.formulas.derivation import Formula as derive
from gradtools.seeing.formulas.expressions import OPERATIONS
from gradtools.seeing.formulas.formulating import compared
from gradtools.seeing.formulas.typesetting import latex as latex_of
from gradtools.seeing.formulas.typesetting import number
from tests.support.formula_builder import Builder
from tests.support.formula_programs import PROGRAMS


def lines(name, section=1, order=1):
    return derive(PROGRAMS[name](), order).lines(section)


# What it says.

SAID = {
    "linear": ["W̄ = ȳ xᵀ", "x̄ = Wᵀ ȳ", "b̄ = ȳ"],
    "layer": ["Z̄ = L̄ (1 - H^∘²)", "W̄ = Z̄ᵀ X", "X̄ = Z̄ W", "b̄ = Σᵢ Z̄"],
    "linear over time": [
        "Z̄ = Ȳ ⊙ 1[Z > 0]",
        "X̄ = Z̄ W",
        "W̄ₖₗ = Σᵢⱼ Z̄ᵢⱼₖ Xᵢⱼₗ",
        "b̄ = Σᵢⱼ Z̄",
    ],
    "cross entropy": ["Z̄ = L̄ (softmaxⱼ(Z) - onehot(y)) / 5"],
    "squared error": ["Z̄ = 2 L̄ Z / 15", "W̄ = Z̄ᵀ X", "X̄ = Z̄ W", "Ȳ = -2 L̄ Z / 15"],
    "complex affine": ["W̄ = ȳ Iᴴ", "Ī = Wᴴ ȳ", "b̄ = ȳ"],
    "modulus": ["z̄ = 2 L̄ z"],
    "square": ["x̄ = 2 ȳ ⊙ x"],
    "exp": ["x̄ = ȳ ⊙ y"],
    "sinh": ["x̄ = ȳ ⊙ cosh(x)"],
    "cube": ["x̄ = 3 ȳ ⊙ x²"],
    "layer norm": [
        "N̄ = Ȳ ⊙ γ",
        "X̄ = (N̄ - N ⊙ meanᵢ(N̄ ⊙ N) - meanᵢ(N̄)) / √(varᵢ(X) + 1e-05)",
        "γ̄ = Σⱼ (Ȳ ⊙ N)",
        "β̄ = Σⱼ Ȳ",
    ],
    "attention": [
        "P̄ = Ȳ Vᵀ",
        "Z̄ = P ⊙ (P̄ - Σⱼ (P̄ ⊙ P)) / 2",
        "Q̄ = Z̄ K",
        "K̄ = Z̄ᵀ Q",
        "V̄ = Pᵀ Ȳ",
    ],
    "attention of heads": [
        "P̄ = Ȳ Vᵀ",
        "Z̄ = P ⊙ (P̄ - Σₗ (P̄ ⊙ P)) / 2",
        "Q̄ = Z̄ K",
        "K̄ = Z̄ᵀ Q",
        "V̄ = Pᵀ Ȳ",
    ],
}


@pytest.mark.parametrize("name", sorted(SAID))
def test_the_adjoint_reads_as_one_would_write_it(name):
    assert lines(name) == SAID[name]


def test_the_program_reads_as_one_would_write_it():
    assert lines("linear", 0) == ["y = W x + b"]
    assert lines("layer", 0) == ["Z = X Wᵀ + b", "H = tanh(Z)", "L = Σᵢⱼ H"]
    assert lines("attention", 0) == ["Z = Q Kᵀ", "P = softmaxⱼ(Z / 2)", "Y = P V"]
    assert lines("cross entropy", 0) == ["L = -⟨onehot(y), Z - logsumexpⱼ(Z)⟩ / 5"]


def test_separate_real_and_imaginary_parts_give_the_same_rule_together():
    formula = derive(PROGRAMS["affine in parts"]())
    assert formula.lines(2) == ["W̄ = Ō Iᴴ", "Ī = Wᴴ Ō", "b̄ = Ō"]
    assert formula.lines(1)[2:4] == ["Īᵣₑ = Wᵢₘᵀ ȳ₂ + Wᵣₑᵀ ȳ₁", "Īᵢₘ = Wᵣₑᵀ ȳ₂ - Wᵢₘᵀ ȳ₁"]


def test_parts_that_are_no_complex_function_stay_apart():
    b = Builder()
    w1, w2 = b.input("W_re", (3, 4)), b.input("W_im", (3, 4))
    x1, x2 = b.input("I_re", (4,)), b.input("I_im", (4,))
    out = b("matmul", w1, x1), b("sin", b("matmul", w2, x2))
    assert len(derive(b.graph(*out))._statements.sections) == 2


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("square", ["∂s/∂x = 2 ȳ ⊙ u", "∂s/∂ȳ = 2 x ⊙ u"]),
        ("exp", ["∂s/∂x = x̄ ⊙ u", "∂s/∂ȳ = y ⊙ u"]),
        ("cube", ["∂s/∂x = 6 ȳ ⊙ x ⊙ u", "∂s/∂ȳ = 3 u ⊙ x²"]),
        (
            "linear",
            [
                "∂s/∂W = ȳ u_xᵀ",
                "∂s/∂x = u_Wᵀ ȳ",
                "∂s/∂b = 0",
                "∂s/∂ȳ = W u_x + u_W x + u_b",
            ],
        ),
    ],
)
def test_order_two_shows_the_double_backward(name, said):
    assert lines(name, 2, order=2) == said


def test_latex_has_as_many_opening_as_closing_braces():
    for name, program in PROGRAMS.items():
        latex = derive(program(), 2).latex()
        assert latex.count("{") == latex.count("}"), name
        assert not re.search("[^\x00-\x7f]", latex), name


def test_latex_of_a_linear_layer():
    latex = derive(PROGRAMS["linear"]()).latex()
    assert r"\bar{W} = \bar{y} x^{\top}" in latex and r"\bar{x} = W^{\top} \bar{y}" in latex
    assert derive(PROGRAMS["linear"]())._repr_latex_().startswith("$$")


def test_names_are_the_shortest_ends_of_paths_that_differ():
    b = Builder()
    one = b.input("argument 0['layers'][0].weight", (3,))
    two = b.input("argument 0['layers'][1].weight", (3,))
    x = b.input("argument 1", (3,))
    formula = derive(b.graph(b("multiply", b("multiply", one, two), x)))
    assert len(set(formula.inputs)) == 3


def test_an_array_that_the_program_holds_is_a_named_constant():
    b = Builder()
    x, e = b.input("x", (3,)), b.number(np.array([1.0, 2.0, 3.0]))
    formula = derive(b.graph(b("multiply", x, e)))
    assert formula.lines(1) == ["x̄ = ȳ ⊙ c"]
    np.testing.assert_array_equal(formula.evaluate([np.ones(3)]).gradients[0], [1.0, 2.0, 3.0])


NAMES = {  # of each definition, as a line has it
    "softplus": r"softplus\(",
    "sigmoid": r"sigmoid\(",
    "relu": r"relu\(",
    "softmax": r"softmax[^ (]*\(",
    "logsumexp": r"logsumexp[^ (]*\(",
    "variance": r"\bvar[^ (]*\(",
}


@pytest.mark.parametrize("name", sorted(PROGRAMS))
def test_each_name_in_a_formula_and_no_other_is_defined_below_it(name):
    definitions = {n: o.definition for n, o in OPERATIONS.items() if o.definition}
    assert set(NAMES) == set(definitions)
    formula = derive(PROGRAMS[name](), order=2)
    lines = "\n".join(line for k in range(3) for line in formula.lines(k))
    named = {name for name, pattern in NAMES.items() if re.search(pattern, lines)}
    below = str(formula).partition("\nwhere\n")[2]
    assert {name for name, told in definitions.items() if told in below} == named
    assert {
        name for name, told in definitions.items() if latex_of(told) in formula.latex()
    } == named


@pytest.mark.parametrize(
    ("value", "text"),
    [(1j, "i"), (-1j, "-i"), (-2j, "-2i"), (1 - 1j, "1 - 1i"), (1 + 2j, "1 + 2i")],
)
def test_a_complex_number_is_written_with_its_sign(value, text):
    assert number(value).text == text


def test_the_first_entry_that_differs_is_named():
    ours = np.array([1.0, 2.0, 3.0])
    found = compared(["x̄"], [ours], [ours + [0.0, 1e-3, 1.0]], 1e-6)
    assert (found.where, found.framework, found.derivation) == ("x̄[1]", 2.0, 2.001)


def test_one_over_a_zero_stays_in_the_formula():
    b = Builder()
    x = b.input("x", (3,))
    formula = derive(b.graph(b("multiply", x, b("power", b.number(0.0), b.number(-1.0)))))
    with np.errstate(divide="ignore"):
        assert np.isinf(formula.evaluate([np.ones(3)]).outputs[0]).all()


# What is refused.


def test_a_part_that_a_formula_has_not_is_told_by_its_number():
    with pytest.raises(
        GradtoolsError, match=r"formula\.lines: part is 2; expected one of 0 to 1\."
    ):
        lines("square", section=2)


def test_the_wrong_number_of_inputs_is_refused():
    with pytest.raises(GradtoolsError, match="3 inputs are needed"):
        derive(PROGRAMS["linear"]()).evaluate([np.ones(3)])


def test_an_input_of_another_shape_is_refused():
    with pytest.raises(GradtoolsError, match=r"W has shape \(3, 4\)"):
        derive(PROGRAMS["linear"]()).evaluate([np.ones((4, 3)), np.ones(4), np.ones(3)])
