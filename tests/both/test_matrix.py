"""The third oracle of the scenario matrix: the other framework, entry by entry."""

from __future__ import annotations

import numpy as np
import pytest

from gradtools.testing.cross_checking.tolerances import tolerance
from tests.conformance.rig.matrix import OPERATORS, cells, families
from tests.conformance.rig.trial import answers

pytest_plugins = ["tests.support.compiled_programs"]
pytestmark = pytest.mark.usefixtures("compiled_programs_kept")

# Layer norm does not feel the scale of its argument, along which these two take a derivative: what
# is left is a rounding error. The finite differences of test_matrix.py judge it by its terms.
CANCELS = {("per_example_grad", "layer norm"), ("microbatched_value_and_grad", "layer norm")}


def compared():
    """Cells that run in both, every operator's first among them; under a transform more of them."""
    jax = {str(cell) for cell in cells("jax") if not cell.reason}
    both = [c for c in cells("torch") if not c.reason and str(c) in jax]
    both = [c for c in both if (c.operator.name, c.program.name) not in CANCELS]
    plain = [c for c in both if (c.transform, c.arguments) == ("eager", "plain")]
    more = [c for c in both if c not in plain and c.transform != "compile"]
    first = list({c.operator: c for c in reversed(plain + more)}.values())
    return list({str(c): c for c in first + plain[::18] + more[::9]}.values())


def error_of(cell, found, expected):
    """In units of the tolerance, relative to the array's own largest entry."""
    found, expected = (np.asarray(x).astype(complex) for x in (found, expected))
    assert found.shape == expected.shape, cell
    if not found.size:
        return 0.0
    largest = max(np.max(np.abs(found)), np.max(np.abs(expected)))
    return (
        0.0
        if largest == 0
        else float(np.max(np.abs(found - expected)) / largest)
        / tolerance(cell.dtype, cell.operator.order)
    )


@pytest.mark.quick_at("gradient", "mixed partial")
@pytest.mark.parametrize("family", families())
def test_both_frameworks_give_the_same_numbers(family):
    failed = []
    for cell in compared():
        if cell.operator.family == family:
            pairs = zip(answers(cell, "torch"), answers(cell, "jax"), strict=True)
            worst = [error_of(cell, found, expected) for found, expected in pairs]
            assert worst, cell
            failed += [f"{cell}: {error:.3g}" for error in worst if not error <= 1]
    assert not failed, "\n".join(failed)


@pytest.mark.slow
def test_a_hundred_cells_are_compared_of_every_operator():
    assert len(compared()) >= 100
    assert {cell.operator for cell in compared()} == set(OPERATORS)
