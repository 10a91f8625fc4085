"""The formula of a program: what it says, what it computes, and what it is held against."""

from dataclasses import replace

import numpy as np
import pytest

from gradtools import GradtoolsError
from gradtools.seeing.formulas.derivation import Check, derive
from gradtools.seeing.graphs.graph import Graph
from tests.support.formula_builder import Builder
from tests.support.formula_programs import PROGRAMS

RNG = np.random.default_rng(11)


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
    "solve": ["T₂ = A⁻ᵀ L̄ X", "Ā = L̄ A⁻ᵀ - T₂ T₁ᵀ", "X̄ = L̄ T₁ + T₂"],
    "powers": ["Ā = L̄ Zᵀ + 2 L̄ Aᵀ Aᵀ"],
    "cumulative": ["x̄ = cumsum←(2 L̄ T)"],
}


@pytest.mark.parametrize("name", sorted(SAID))
def test_the_adjoint_reads_as_one_would_write_it(name):
    assert lines(name) == SAID[name]


def test_the_program_reads_as_one_would_write_it():
    assert lines("linear", 0) == ["y = W x + b"]
    assert lines("layer", 0) == ["Z = X Wᵀ + b", "H = tanh(Z)", "L = Σᵢⱼ H"]
    assert lines("attention", 0) == ["Z = Q Kᵀ", "P = softmaxⱼ(Z / 2)", "Y = P V"]
    assert lines("cross entropy", 0) == ["L = -⟨onehot(y), log softmaxⱼ(Z)⟩ / 5"]


def test_a_convolution_and_its_adjoints_have_their_notes():
    b = Builder()
    x, w = b.input("X", (2, 3, 6, 6)), b.input("W", (4, 3, 3, 3))
    formula = derive(b.graph(b("convolution", x, w, padding=1, stride=2)))
    assert formula.lines(1) == ["X̄ = convᵀ(Ȳ, W)", "W̄ = corr(X, Ȳ)"]
    assert "with stride 2, padding 1" in str(formula) and "transposed convolution" in str(formula)


def test_separate_real_and_imaginary_parts_give_the_same_rule_together():
    formula = derive(PROGRAMS["affine in parts"]())
    assert formula.lines(2) == ["W̄ = Ō Iᴴ", "Ī = Wᴴ Ō", "b̄ = Ō"]
    assert formula.lines(1)[2:4] == ["Īᵣₑ = Wᵢₘᵀ ȳ₂ + Wᵣₑᵀ ȳ₁", "Īᵢₘ = Wᵣₑᵀ ȳ₂ - Wᵢₘᵀ ȳ₁"]


def test_parts_that_are_no_complex_function_stay_apart():
    b = Builder()
    w1, w2 = b.input("W_re", (3, 4)), b.input("W_im", (3, 4))
    x1, x2 = b.input("I_re", (4,)), b.input("I_im", (4,))
    out = b("matmul", w1, x1), b("sin", b("matmul", w2, x2))
    assert len(derive(b.graph(*out))._written()) == 2


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
        assert latex.count(r"\left") - latex.count(r"\leftarrow") == latex.count(r"\right"), name


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


# Loops, branches, rules, unknown operations.


def cell():
    b = Builder()
    w, u = b.input("W", (3, 3)), b.input("U", (3, 2))
    h, x = b.input("h", (3,)), b.input("x", (2,))
    new = b("tanh", b("add", b("matmul", w, h), b("matmul", u, x)))
    return b.graph(new, new)


def recurrent(reverse=False, every=True):
    b = Builder()
    w, u = b.input("W", (3, 3)), b.input("U", (3, 2))
    h, x = b.input("h0", (3,)), b.input("X", (4, 2))
    last, states = b.scan(cell(), [w, u], [h], [x], 4, reverse)
    return b.graph(b("sum", b("square", states)) if every else last)


def unrolled(w, u, h, x, reverse, every):
    states = [None] * 4
    for t in range(4)[:: -1 if reverse else 1]:
        h = np.tanh(w @ h + u @ x[t])
        states[t] = h
    return (np.stack(states) ** 2).sum() if every else h


@pytest.mark.parametrize("every", [True, False])
@pytest.mark.parametrize("reverse", [True, False])
def test_a_loop_and_its_adjoints_have_the_numbers_of_the_unrolled_loop(reverse, every):
    formula = derive(recurrent(reverse, every), order=2)
    xs, gs, us = formula.point(RNG)
    values = formula.evaluate(xs, gs, us)
    np.testing.assert_allclose(values.outputs[0], unrolled(*xs, reverse, every), rtol=1e-12)
    slope = lambda step: np.vdot(
        gs[0], unrolled(*(x + step * u for x, u in zip(xs, us, strict=True)), reverse, every)
    )
    along = (slope(1e-5) - slope(-1e-5)) / 2e-5
    first = sum(np.vdot(g, u) for g, u in zip(values.gradients, us, strict=True))
    np.testing.assert_allclose(first, along, rtol=1e-8)

    def gradient_along(step):
        at = [x + step * u for x, u in zip(xs, us, strict=True)]
        found = formula.evaluate(at, gs, us).gradients
        return sum(np.vdot(g, u) for g, u in zip(found, us, strict=True))

    second = sum(np.vdot(s, u) for s, u in zip(values.second[:4], us, strict=True))
    np.testing.assert_allclose(
        second, (gradient_along(1e-5) - gradient_along(-1e-5)) / 2e-5, rtol=1e-7
    )
    np.testing.assert_allclose(np.vdot(values.second[4], gs[0]), first, rtol=1e-10)


def test_a_loop_is_told_round_by_round_and_its_adjoint_runs_backward():
    formula = derive(recurrent(every=False))
    assert formula.lines(0) == ["for t = 1, …, 4:", "hₜ = tanh(W hₜ₋₁ + U Xₜ)", "y = h₄"]
    assert formula.lines(1) == [
        "h̄₄ = ȳ",
        "for t = 4, …, 1:",
        "T = h̄ₜ ⊙ (1 - hₜ²)",
        "h̄ₜ₋₁ = Wᵀ T",
        "W̄ₜ = T hₜ₋₁ᵀ",
        "Ūₜ = T Xₜᵀ",
        "X̄ₜ = Uᵀ T",
        "W̄ = Σₜ W̄ₜ",
        "Ū = Σₜ Ūₜ",
    ]


def branch(operation):
    b = Builder()
    return b.graph(b(operation, b.input("x", (3,))))


def test_branches_are_written_as_cases_and_computed_by_the_index():
    b = Builder()
    p, x = b.input("p", (), "bool"), b.input("x", (3,))
    (y,) = b.cond(p, x, branches=[branch("sin"), branch("square")])
    formula = derive(b.graph(y), order=2)
    assert formula.lines(0) == ["y = {x² if p; sin(x) otherwise}"]
    at, u = np.array([0.3, 1.0, -2.0]), np.ones(3)
    taken = formula.evaluate([True, at], [np.ones(3)], [u])
    other = formula.evaluate([False, at], [np.ones(3)], [u])
    np.testing.assert_allclose(taken.gradients[1], 2 * at)
    np.testing.assert_allclose(other.gradients[1], np.cos(at))
    np.testing.assert_allclose(taken.second[1], [2.0, 2.0, 2.0])
    np.testing.assert_allclose(other.second[1], -np.sin(at))


def ruled(factor):
    """Exp, whose own rule multiplies by ``factor`` too much."""
    f = Builder()
    y = f("exp", f.input("x", (4,)))
    g = Builder()
    r, c = g.input("r", (4,)), g.input("c", (4,))
    back = g("multiply", g("multiply", r, c), g.number(factor))
    b = Builder()
    (out,) = b.custom_rule(
        "exp", b.input("x", (4,)), forward=f.graph(y, y), backward=g.graph(back), residuals=1
    )
    return b.graph(out)


def test_a_custom_rule_is_what_it_says_and_its_residuals_are_differentiated():
    formula = derive(ruled(3.0), order=2)
    x, g, u = RNG.normal(size=(3, 4))
    values = formula.evaluate([x], [g], [u])
    np.testing.assert_allclose(values.gradients[0], 3 * g * np.exp(x))
    np.testing.assert_allclose(values.second[0], 3 * u * g * np.exp(x))
    assert formula.lines(1) == ["x̄ = 3 ȳ ⊙ y"]


def test_an_operation_without_translation_keeps_its_name_and_is_marked():
    b = Builder()
    x = b.input("x", (4,))
    formula = derive(b.graph(b("multiply", b.unknown("aten.bessel_j0", x, shape=(4,)), x)))
    assert formula.marked == ("aten.bessel_j0",)
    assert "⚠ aten.bessel_j0, no translation" in str(formula)
    assert "⚠aten.bessel_j0^*(x, ȳ ⊙ x)" in str(formula)
    with pytest.raises(GradtoolsError, match=r"aten\.bessel_j0 has no translation"):
        formula.evaluate([np.ones(4)])


@pytest.mark.parametrize("name", ["my_op", "exp"])  # a kernel may be called like a word
def test_a_marked_operation_with_functions_of_its_own_is_computed(name):
    b = Builder()
    x = b.input("x", (4,))
    y = b.unknown(name, x, shape=(4,), function=lambda x: x**3, adjoint=lambda x, g: 3 * x**2 * g)
    formula = derive(b.graph(y))
    assert formula.marked == (name,)
    values = formula.evaluate([np.arange(4.0)])
    np.testing.assert_array_equal(values.outputs[0], np.arange(4.0) ** 3)
    np.testing.assert_array_equal(values.gradients[0], 3 * np.arange(4.0) ** 2)


def test_a_draw_is_a_named_constant():
    b = Builder()
    x, e = b.input("x", (3,)), b.draw("ε", (3,), np.array([1.0, 2.0, 3.0]))
    formula = derive(b.graph(b("multiply", x, e)))
    assert formula.lines(1) == ["x̄ = ȳ ⊙ ε"]
    np.testing.assert_array_equal(formula.evaluate([np.ones(3)]).gradients[0], [1.0, 2.0, 3.0])


def decomposed(name, shape=(3, 3)):
    b = Builder()
    outs = b(name, b.input("A", shape))
    return derive(b.graph(*(outs if isinstance(outs, list | tuple) else [outs])))


def test_the_adjoint_of_a_decomposition_is_one_of_matrices():
    assert decomposed("eigh").lines(1) == [
        "T = y₂ (y₂ ⊙ ȳ₁)ᵀ + y₂ gaps(y₂ᵀ ȳ₂; y₁) y₂ᵀ",
        "Ā = (T + Tᵀ) / 2",
    ]
    assert decomposed("cholesky").lines(1) == [
        "T = half(Yᵀ Ȳ)",
        "Ā = (Y⁻ᵀ (Y⁻ᵀ (T + Tᵀ) / 2)ᵀ)ᵀ",
    ]
    for name in ("eigh", "svd", "cholesky", "qr"):
        found = decomposed(name)
        assert "ⱼ" not in "".join(found.lines(1)) and "c:" not in str(found)
        assert "(Giles 2008" in str(found) or "(Murray 2016" in str(found)


def test_captured_values_are_constants_that_must_be_given():
    b = Builder()
    x, w = b.input("x", (3,)), b.captured("weight", (2, 3))
    formula = derive(b.graph(b("matmul", w, x)))
    given = RNG.normal(size=(2, 3))
    values = formula.evaluate([np.ones(3)], [np.ones(2)], captured={w: given})
    np.testing.assert_allclose(values.gradients[0], given.sum(0))
    with pytest.raises(GradtoolsError, match="1 captured are needed"):
        formula.evaluate([np.ones(3)])


def test_what_another_formula_has_made_does_not_move_a_factor():
    def factor():
        b = Builder()
        return derive(b.graph(b("sum", b("cholesky", b.input("A", (3, 3))))))

    first = factor()
    assert "half(T₃)" in str(first) and "T₃ⱼⱼ′ = L̄ (Σᵢ T₁ᵢⱼ)" in first.lines(
        1
    )  # no axis is guessed
    assert str(factor()) == str(first)


# What is refused.


def test_a_record_that_breaks_the_vocabulary_is_refused():
    b = Builder()
    y = b("sum", b.input("x", (3, 4)), axes=(0,))
    good = b.graph(y)
    wrong = Graph(good.nodes, {**good.values, y: good.values[good.inputs[0]]}, good.inputs, (y,))
    with pytest.raises(GradtoolsError, match="does not follow the vocabulary"):
        derive(wrong)


def test_a_third_order_is_refused():
    with pytest.raises(GradtoolsError, match="order is 1 or 2, not 3"):
        derive(PROGRAMS["linear"](), 3)


def test_a_part_that_a_formula_has_not_is_told_by_its_number():
    with pytest.raises(
        GradtoolsError, match=r"formula\.lines: part is 2; expected one of 0 to 1\."
    ):
        lines("square", section=2)


def test_a_derivation_is_a_function():
    with pytest.raises(GradtoolsError, match="the derivation must be a function, got an int"):
        derive(PROGRAMS["square"](), 1).agrees_with(3)


def test_the_wrong_number_of_inputs_is_refused():
    with pytest.raises(GradtoolsError, match="3 inputs are needed"):
        derive(PROGRAMS["linear"]()).evaluate([np.ones(3)])


def test_an_input_of_another_shape_is_refused():
    with pytest.raises(GradtoolsError, match=r"W has shape \(3, 4\)"):
        derive(PROGRAMS["linear"]()).evaluate([np.ones((4, 3)), np.ones(4), np.ones(3)])


# What it is held against.


def test_a_derivation_that_is_right_agrees():
    formula = derive(PROGRAMS["linear"]())
    answer = formula.agrees_with(lambda w, x, b, g: (np.outer(g, x), w.T @ g, g))
    assert answer and answer.error < 1e-14 and str(answer).startswith("yes")


def test_the_first_difference_is_named_with_both_values():
    formula = derive(PROGRAMS["linear"]())

    def forgets_one(w, x, b, g):
        dw = np.outer(g, x)
        dw[1, 2] += 1.0
        return dw, w.T @ g, g

    answer = formula.agrees_with(forgets_one)
    assert not answer and answer.where == "W̄[1, 2]"
    assert answer.derivation - answer.formula == pytest.approx(1.0)
    assert str(answer).startswith("no: W̄[1, 2] is ")

    def is_off_before(w, x, b, g):
        dw, *others = forgets_one(w, x, b, g)
        dw[0, 1] += 1e-4
        dw[0, 0] += 1e-15
        return dw, *others

    assert formula.agrees_with(is_off_before).where == "W̄[0, 1]"


def test_a_forgotten_conjugate_is_found():
    formula = derive(PROGRAMS["complex affine"]())
    right = lambda w, i, b, g: (np.outer(g, i.conj()), w.conj().T @ g, g)
    wrong = lambda w, i, b, g: (np.outer(g, i.conj()), w.T @ g, g)
    assert formula.agrees_with(right) and formula.agrees_with(wrong).where == "Ī[0]"


def test_one_gradient_need_not_be_a_tuple_and_none_is_zero():
    formula = derive(PROGRAMS["square"]())
    assert formula.agrees_with(lambda x, g: 2 * x * g)
    assert not formula.agrees_with(lambda x, g: None)


def test_a_gradient_of_another_shape_does_not_agree():
    answer = derive(PROGRAMS["square"]()).agrees_with(lambda x, g: (2 * x * g)[None])
    assert not answer and "has shape (4,), the derivation gives (1, 4)" in str(answer)


def test_inputs_without_a_derivative_may_be_left_out():
    formula = derive(PROGRAMS["cross entropy"]())

    def by_hand(z, y, g):
        p = np.exp(z) / np.exp(z).sum(1, keepdims=True)
        return g * (p - np.eye(3)[y]) / 5

    assert formula.agrees_with(by_hand)
    assert formula.agrees_with(lambda z, y, g: (by_hand(z, y, g), None))


def test_the_wrong_number_of_gradients_is_refused():
    with pytest.raises(GradtoolsError, match="one is expected for each of W̄, x̄, b̄"):
        derive(PROGRAMS["linear"]()).agrees_with(lambda w, x, b, g: (g, g))


def test_a_double_backward_by_hand_agrees():
    formula = derive(PROGRAMS["cube"](), order=2)
    assert formula.agrees_with(lambda x, g, u: (6 * g * x * u, 3 * x**2 * u))
    assert not formula.agrees_with(lambda x, g, u: (6 * g * x, 3 * x**2 * u))


def test_a_formula_says_that_it_was_compared():
    formula = derive(PROGRAMS["square"]())
    reference = lambda xs, gs, us: ([xs[0] ** 2], [2 * xs[0] * gs[0]])
    checked = formula.verified(reference, points=4)
    assert checked.check.points == 4 and checked.check.error < 1e-14
    assert "agrees with automatic differentiation at 4 random points" in str(checked)


def test_a_formula_that_differs_from_the_framework_is_not_shown():
    formula = derive(PROGRAMS["square"]())
    wrong = lambda xs, gs, us: ([xs[0] ** 2], [2.001 * xs[0] * gs[0]])
    with pytest.raises(GradtoolsError, match=r"x̄\[0\] is .* by automatic differentiation"):
        formula.verified(wrong)


def counted():
    """As JAX writes a loop with an index: the counter goes round, and reads a slice."""
    b = Builder()
    xs, i, a = b.input("xs", (4, 2)), b.input("i", (), "int64"), b.input("a", (2,))
    x = b("reshape", b("dynamic_slice", xs, i, b.number(0), sizes=(1, 2)), shape=(2,))
    return b.graph(b("add", i, b.number(1)), b("sin", b("multiply", a, x)))


def test_a_counter_goes_round_in_a_loop_without_a_derivative():
    b = Builder()
    xs, a = b.input("X", (4, 2)), b.input("a0", (2,))
    start = b("constant", value=np.int64(0))
    _, last = b.scan(counted(), [xs], [start, a], [], 4)
    formula = derive(b.graph(b("sum", last)), order=2)
    values, a0 = RNG.normal(size=(4, 2)), RNG.normal(size=2)

    def run(xv):
        h = a0
        for t in range(4):
            h = np.sin(h * xv[t])
        return h.sum()

    u = [RNG.normal(size=(4, 2)), np.zeros(2)]
    found = formula.evaluate([values, a0], [1.0], u)
    np.testing.assert_allclose(found.outputs[0], run(values), rtol=1e-12)
    slope = (run(values + 1e-5 * u[0]) - run(values - 1e-5 * u[0])) / 2e-5
    np.testing.assert_allclose(np.vdot(found.gradients[0], u[0]), slope, rtol=1e-7)
    assert "for t = 4, …, 1:" in str(formula)


def test_a_loop_inside_of_a_loop_is_told_and_computed():
    inner = cell()
    o = Builder()
    w, u = o.input("W", (3, 3)), o.input("U", (3, 2))
    h, x = o.input("h", (3,)), o.input("X", (4, 2))
    last, _ = o.scan(inner, [w, u], [h], [x], 4)
    outer = o.graph(last)
    b = Builder()
    w, u = b.input("W", (3, 3)), b.input("U", (3, 2))
    h, x = b.input("h0", (3,)), b.input("X", (2, 4, 2))
    (last,) = b.scan(outer, [w, u], [h], [x], 2)
    formula = derive(b.graph(last))
    xs, gs, _ = formula.point(RNG)

    def run(w, u, h, x):
        for t in range(8):
            h = np.tanh(w @ h + u @ x.reshape(8, 2)[t])
        return h

    us = [RNG.normal(size=v.shape) for v in xs]
    moved = lambda s: run(*(v + s * d for v, d in zip(xs, us, strict=True)))
    along = np.vdot(gs[0], (moved(1e-5) - moved(-1e-5)) / 2e-5)
    found = formula.evaluate(xs, gs).gradients
    np.testing.assert_allclose(
        sum(np.vdot(g, d) for g, d in zip(found, us, strict=True)), along, rtol=1e-7
    )
    assert str(formula).count("for t =") == 2 and str(formula).count("for s =") >= 2


def condition():
    b = Builder()
    n, x = b.input("n", (), "int64"), b.input("x", (2,))
    return b.graph(b("compare", n, b.number(3), relation="<")), b.graph(
        b("add", n, b.number(1)), b("multiply", x, b.number(2.0))
    )


def test_a_loop_whose_rounds_depend_on_values_is_computed_but_has_no_adjoint():
    test, body = condition()
    b = Builder()
    x = b.input("x", (2,))
    _, last = b.loop(test, body, [], [], [b("constant", value=np.int64(0)), x])
    with pytest.raises(GradtoolsError, match="has no adjoint program"):
        derive(b.graph(last))
    formula = derive(b.graph(last), wrt=())
    np.testing.assert_allclose(formula.evaluate([np.ones(2)]).outputs[0], [8.0, 8.0])


def test_a_call_is_written_out():
    i = Builder()
    inner = i.graph(i("sin", i.input("x", (3,))))
    b = Builder()
    (y,) = b.call(inner, b.input("z", (3,)))
    assert derive(b.graph(y)).lines(0) == ["y = sin(z)"]


def test_an_attribute_that_is_not_in_the_vocabulary_is_refused():
    b = Builder()
    good = b.graph(b("sum", b.input("x", (3, 4)), axes=(0,)))
    (node,) = good.nodes
    wrong = replace(good, nodes=(replace(node, attributes={"dim": (0,)}),))
    with pytest.raises(GradtoolsError, match=r"sum has the attributes axes\?, keep\?.* gives dim"):
        derive(wrong)


def test_a_formula_that_cannot_be_computed_says_that_it_was_not_compared():
    b = Builder()
    x = b.input("x", (4,))
    formula = derive(b.graph(b.unknown("aten.bessel_j0", x, shape=(4,))))
    never = lambda xs, gs, us: pytest.fail("nothing to compare with")
    assert "not compared with automatic differentiation" in str(formula.verified(never))


def logarithm():
    b = Builder()
    return derive(b.graph(b("log", b.input("x", (20,)))))


def test_a_comparison_of_nan_with_nan_is_refused():
    with pytest.raises(GradtoolsError, match="at none of 3 points are all values finite"):
        logarithm().agrees_with(lambda x, g: np.where(x > 0, g / x, g / x))


def test_points_are_drawn_near_inputs_at_which_the_function_is_defined():
    formula = logarithm()
    answer = formula.agrees_with(lambda x, g: g / x, sample=formula.near([np.full(20, 2.0)]))
    assert answer
    assert not formula.agrees_with(lambda x, g: g, sample=formula.near([np.full(20, 2.0)]))


def test_the_greatest_relative_error_of_all_points_is_told():
    found = derive(PROGRAMS["square"](), 1)
    calls = []

    def off_at_the_first_point(x, ct):
        calls.append(x)
        return 2 * x * ct * (1 + 1e-10 * (len(calls) == 1))

    assert 5e-11 < found.agrees_with(off_at_the_first_point, points=3).error < 2e-10
    framework = lambda xs, cts, us: ([None], [2 * xs[0] * cts[0] * (1 + 1e-10)])
    assert 5e-11 < found.verified(framework, points=1).check.error < 2e-10


def test_one_point_is_called_so():
    found = derive(PROGRAMS["square"](), 1)
    right = lambda x, ct: 2 * x * ct
    assert found.agrees_with(right, points=1).message.startswith("yes: agrees at 1 point (")
    assert found.agrees_with(right, points=2).message.startswith("yes: agrees at 2 random points (")
    assert " at 1 point (" in str(Check(1, 0.0, 1e-9))
