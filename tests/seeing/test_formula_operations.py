"""Every operation of the formula's vocabulary: its value, its adjoint, the adjoint of that."""

import re

import numpy as np
import pytest

from gradtools.seeing.formulas.derivation import derive
from gradtools.seeing.formulas.operation_record import OPERATIONS
from gradtools.seeing.formulas.typesetting import number
from tests.support.formula_builder import Builder
from tests.support.formula_table import CASES, cplx

DEFINITIONS = {name: o.definition for name, o in OPERATIONS.items() if o.definition}
RNG = np.random.default_rng(3)
STEPS = (1e-3, 3e-4)


def like(x):
    """A random direction of an array's shape and kind."""
    x = np.asarray(x)
    v = RNG.normal(size=x.shape)
    return v + 1j * RNG.normal(size=x.shape) if np.iscomplexobj(x) else v


def inner(a, b):
    """Re <a, b>, summed over a list."""
    return sum(np.vdot(x, y).real for x, y in zip(a, b, strict=True) if x is not None)


def is_inexact(x):
    return np.asarray(x).dtype.kind in "fc"


def graph_of(case):
    b = Builder()
    operands = [
        b.input(f"x{k}", np.shape(x), str(np.asarray(x).dtype)) for k, x in enumerate(case.operands)
    ]
    constants = [
        b.number(x) if isinstance(x, np.float64) else v
        for x, v in zip(case.operands, operands, strict=True)
    ]
    out = b(case.operation, *constants, **case.attributes)
    return b.graph(*(out if isinstance(out, list) else (out,)))


def outputs_of(formula, xs):
    return list(formula.evaluate(xs, None, *_directions(formula, xs)).outputs)


def _directions(formula, xs):
    return [[np.zeros_like(x) for x in xs if is_inexact(x)]] if formula.order == 2 else []


def stepped(xs, vs, step):
    vs = iter(vs)
    return [x + step * next(vs) if is_inexact(x) else x for x in map(np.asarray, xs)]


def slope(f, xs, vs):
    """The derivative of f along vs: central differences, extrapolated once (error h^4)."""
    wide, narrow = (
        [
            (a - b) / (2 * h)
            for a, b in zip(f(stepped(xs, vs, h)), f(stepped(xs, vs, -h)), strict=True)
        ]
        for h in STEPS
    )
    ratio = (STEPS[0] / STEPS[1]) ** 2
    return [(ratio * n - w) / (ratio - 1) for w, n in zip(wide, narrow, strict=True)]


def assert_close(a, b, tolerance):
    assert abs(a - b) <= tolerance * max(1.0, abs(a), abs(b)), (a, b)


def check_first_order(formula, xs):
    """<g, J v> = <J^H g, v>, J v by finite differences."""
    vs = [like(x) for x in xs if is_inexact(x)]
    moved = [o.dtype.kind in "fc" for o in outputs_of(formula, xs)]
    only = lambda at: [o for o, m in zip(outputs_of(formula, at), moved, strict=True) if m]
    gs = [like(o) for o in only(xs)]
    found = formula.evaluate(xs, gs, *_directions(formula, xs)).gradients
    pairs = [g for g, x in zip(found, xs, strict=True) if is_inexact(x)]
    for g, x in zip(pairs, [x for x in xs if is_inexact(x)], strict=True):
        assert g.shape == np.shape(x)
    assert_close(inner(slope(only, xs, vs), gs), inner(pairs, vs), 1e-7)
    return gs


def check_second_order(formula, xs, gs):
    """The derivative of <u, J^H g> along (v, w), by finite differences of the adjoint."""
    us = [like(x) for x in xs if is_inexact(x)]
    vs = [like(x) for x in xs if is_inexact(x)]
    ws = [like(g) for g in gs]

    def value(arguments):
        at, cotangents = arguments[: len(xs)], arguments[len(xs) :]
        found = formula.evaluate(at, cotangents, us).gradients
        return [np.array(inner([g for g in found if g is not None], us))]

    (expected,) = slope(value, [*xs, *gs], [*vs, *ws])
    second = formula.evaluate(xs, gs, us).second
    found = [s for s in second if s is not None]
    assert_close(float(expected), inner(found, [*vs, *ws]), 1e-6)


@pytest.mark.parametrize("case", [c for c in CASES if c.reference], ids=str)
def test_the_value_is_numpys(case):
    formula = derive(graph_of(case))
    found = outputs_of(formula, case.operands)
    wanted = case.reference(*case.operands)
    wanted = wanted if isinstance(wanted, tuple) else (wanted,)
    for a, b in zip(found, wanted, strict=True):
        assert a.shape == np.shape(b)
        np.testing.assert_allclose(a, b, rtol=case.tolerance, atol=case.tolerance)


DIFFERENTIABLE = [c for c in CASES if c.order and any(is_inexact(x) for x in c.operands)]


@pytest.mark.parametrize("case", DIFFERENTIABLE, ids=str)
def test_the_adjoint_and_its_adjoint_are_those_of_finite_differences(case):
    if case.operation == "stop":
        formula = derive(graph_of(case))
        assert not formula.evaluate(case.operands).gradients[0].any()
        return
    formula = derive(graph_of(case), order=2)
    xs = [np.asarray(x) for x in case.operands]
    gs = check_first_order(formula, xs)
    if formula.order == 2 and gs:
        check_second_order(formula, xs, gs)
    assert str(formula) and formula.latex() and not formula.marked


NAMES = {  # of each definition, as a line has it
    "softplus": r"softplus\(",
    "sigmoid": r"sigmoid\(",
    "relu": r"relu\(",
    "normal_cdf": r"Φ\(",
    "normal_density": r"φ\(",
    "softmax": r"(?<!log )softmax[^ (]*\(",
    "log_softmax": r"log softmax[^ (]*\(",
    "logsumexp": r"logsumexp[^ (]*\(",
    "variance": r"\bvar[^ (]*\(",
}


@pytest.mark.parametrize("case", CASES, ids=str)
def test_each_name_in_a_formula_and_no_other_is_defined_below_it(case):
    is_moving = case.order and any(is_inexact(x) for x in case.operands)
    formula = derive(graph_of(case), order=2 if is_moving else 1)
    lines = "\n".join(line for k in range(formula.order + 1) for line in formula.lines(k))
    named = {name for name, pattern in NAMES.items() if re.search(pattern, lines)}
    below = str(formula).partition("\nwhere\n")[2]
    assert {name for name, told in DEFINITIONS.items() if told.text in below} == named
    assert {name for name, told in DEFINITIONS.items() if told.latex in formula.latex()} == named


def test_every_definition_is_met():
    assert set(NAMES) == set(DEFINITIONS)


def test_every_operation_of_the_vocabulary_is_checked():
    assert {c.operation for c in CASES} == {name for name, o in OPERATIONS.items() if o.make}


def test_scale_gradient_scales_each_time_it_is_passed():
    b = Builder()
    x = b.input("x", (3,))
    formula = derive(b.graph(b("power", b("scale_gradient", x, scale=-2.0), b.number(3.0))), 2)
    at, u = np.array([1.0, 2.0, -1.0]), np.array([1.0, -1.0, 2.0])
    values = formula.evaluate([at], None, [u])
    np.testing.assert_allclose(values.gradients[0], -6 * at**2)
    np.testing.assert_allclose(values.second[0], 24 * at * u)


def test_complex_directions_are_conjugated_as_gradtools_says():
    b = Builder()
    w, x = b.input("W", (2, 3), "complex128"), b.input("I", (3,), "complex128")
    formula = derive(b.graph(b("matmul", w, x)))
    wv, xv, g = cplx(2, 3), cplx(3), cplx(2)
    dw, dx = formula.evaluate([wv, xv], [g]).gradients
    np.testing.assert_allclose(dx, wv.conj().T @ g)
    np.testing.assert_allclose(dw, np.outer(g, xv.conj()))


@pytest.mark.parametrize(
    ("value", "text"),
    [(1j, "i"), (-1j, "-i"), (-2j, "-2i"), (1 - 1j, "1 - 1i"), (1 + 2j, "1 + 2i")],
)
def test_a_complex_number_is_written_with_its_sign(value, text):
    assert number(value).text == text


def test_one_over_a_zero_stays_in_the_formula():
    b = Builder()
    x = b.input("x", (3,))
    formula = derive(b.graph(b("multiply", x, b("power", b.number(0.0), b.number(-1.0)))))
    with np.errstate(divide="ignore"):
        assert np.isinf(formula.evaluate([np.ones(3)]).outputs[0]).all()
