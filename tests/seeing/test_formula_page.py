"""What stands on the page is what is computed: the written lines are parsed and evaluated."""

import sys
from dataclasses import replace

import numpy as np
import pytest

from gradtools.seeing.formulas.derivation import Formula as derive
from tests.support.formula_programs import LARGER, PROGRAMS, READING, block
from tests.support.formula_reading import check_page, undefined


# In "mixing" an operand lacks one of two axes with the same letter, which the reader does not read.
@pytest.mark.parametrize("order", [1, 2])
@pytest.mark.parametrize("name", sorted(PROGRAMS.keys() - {"mixing"}))
def test_every_written_line_has_the_value_of_what_it_stands_for(name, order):
    formula = derive(PROGRAMS[name](), order)
    point = formula.point(np.random.default_rng(1))
    assert check_page(formula, point, **READING.get(name, {})) >= 2


@pytest.mark.slow_at("two blocks", ("block", "2"))
@pytest.mark.parametrize("order", [1, 2])
@pytest.mark.parametrize("name", sorted({**PROGRAMS, **LARGER}))
def test_no_name_is_read_before_it_is_said_what_it_is(name, order):
    assert undefined(derive({**PROGRAMS, **LARGER}[name](), order)) == []


@pytest.mark.parametrize("name", sorted(LARGER))
def test_larger_programs_have_the_gradient_of_finite_differences(name):
    formula = derive(LARGER[name]())
    xs, gs, _ = formula.point(np.random.default_rng(2))
    xs = [0.3 * x if x.dtype.kind == "f" else x for x in xs]
    us = [np.random.default_rng(k).normal(size=x.shape) for k, x in enumerate(xs)]
    moved = lambda h: [x + h * u if x.dtype.kind == "f" else x for x, u in zip(xs, us, strict=True)]
    value = lambda h: formula.evaluate(moved(h), gs).outputs[0]
    along = (value(1e-5) - value(-1e-5)) / 2e-5 * gs[0]
    found = formula.evaluate(xs, gs).gradients
    inner = sum(np.vdot(g, u) for g, u in zip(found, us, strict=True) if g is not None)
    np.testing.assert_allclose(inner, along, rtol=1e-6)


@pytest.mark.slow
def test_the_work_of_writing_grows_as_the_number_of_blocks():
    (few, _), (many, text) = calls_to_write(3), calls_to_write(12)
    assert few > 10_000
    assert many < 4.5 * few
    assert text.count("softmax") == 12 + 1  # which is its definition


def calls_to_write(blocks: int) -> tuple[int, str]:
    """How many functions are called until these blocks are written, and the text."""
    calls = 0

    def see(frame, event, arg):
        nonlocal calls
        calls += event == "call"

    before = sys.getprofile()
    sys.setprofile(see)
    try:
        text = str(derive(block(blocks)))
    finally:
        sys.setprofile(before)
    return calls, text


def test_the_reader_finds_a_line_that_is_missing_and_one_that_is_wrong():
    formula = derive(PROGRAMS["attention"]())
    point = formula.point(np.random.default_rng(1))
    lines = formula._statements.sections[1].lines
    first = lines.pop(0)
    assert undefined(formula) != []
    lines.insert(0, first)
    left, right = lines[0]
    lines[0] = left, replace(right, text=right.text.replace("Vᵀ", "Kᵀ"))
    with pytest.raises(AssertionError):
        check_page(formula, point)
