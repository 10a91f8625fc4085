"""Tests operators on functions that map entries independently, with odd values and empty arrays.

If one entry is NaN, infinite, very large or very small, all other entries of the result must be
bitwise unchanged. Operators that do not split a batch must return an array of the same shape for an
empty or zero-dimensional array.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from gradtools import GradtoolsError
from tests.support.every_operator import POINT, USES, Use, World, healthy, leaves
from tests.testing.test_faults import outcome

ODD = {
    "NaN": np.nan,
    "infinity": np.inf,
    "minus infinity": -np.inf,
    "huge": 1e300,
    "the smallest": 5e-324,
    "minus zero": -0.0,
}
ROWS = [use for use in USES if use.rows]
BATCHED = ("per_example_grad", "chunked", "microbatched_value_and_grad", "vmap", "all_gather")


def used(use: Use, gt: Any, x: Any) -> list[np.ndarray]:
    with np.errstate(all="ignore"):  # NumPy's kernels warn about NaN
        return leaves(gt, use.run(World(gt, healthy(gt), x)))


def skip_elsewhere(use: Use, backend: str) -> None:
    if backend not in use.backends:
        pytest.skip(f"{use.name} runs only in {' and '.join(use.backends) or 'no backend'}")


# --- values ------------------------------------------------------------------------------


@pytest.mark.sampled(torch=(36, 41), jax=(8, 33))
@pytest.mark.parametrize("use", ROWS, ids=str)
def test_an_odd_value_in_one_entry_changes_no_other_and_is_not_swallowed(use, gt, backend_name):
    skip_elsewhere(use, backend_name)
    (expected,) = used(use, gt, gt.asarray(POINT))
    for name, value in ODD.items():
        x = POINT.copy()
        x[1] = value
        (found,) = used(use, gt, gt.asarray(x))
        others = [0, 2, 3]
        assert found[others].tobytes() == expected[others].tobytes(), name
        assert np.isnan(found[1]) or name != "NaN"
        assert found[1] != expected[1], name


EMPTY = {"(0,)": np.zeros(0), "(0, 3)": np.zeros((0, 3)), "()": np.array(0.3)}


@pytest.mark.sampled(torch=(100, 126), jax=(80, 126))
@pytest.mark.slow_at(
    ("jax", "frozen: second order"),
    ("jax", "hvp: reverse over reverse", "(0, 3)"),
    ("jax", "GradientAccumulator", "(0,)"),
    ("jax", "GradientAccumulator", "()"),
    ("jax", "all_gather", "(0,)"),
    ("jax", "all_gather", "(0, 3)"),
)
@pytest.mark.parametrize("shape", EMPTY)
@pytest.mark.parametrize("use", ROWS, ids=str)
def test_empty_and_zero_dimensional_arrays_give_their_own_shape(use, shape, gt, backend_name):
    skip_elsewhere(use, backend_name)
    if use.public in BATCHED or "vmap" in use.name:
        return refused_batches(use, shape, gt)
    (found,) = used(use, gt, gt.asarray(EMPTY[shape]))
    assert found.shape == EMPTY[shape].shape
    if shape == "()":
        (expected,) = used(use, gt, gt.asarray(POINT))
        np.testing.assert_allclose(found, expected[0], rtol=1e-15)


def refused_batches(use: Use, shape: str, gt: Any) -> None:
    """Operators that split a batch must raise an error for an empty or zero-dimensional array.

    vmap and all_gather may raise the framework's errors, and `chunked` returns an empty array for
    an empty batch.
    """
    found = outcome(use, World(gt, healthy(gt), gt.asarray(EMPTY[shape])))
    if use.public == "chunked" and shape != "()":
        assert tuple(found.shape) == EMPTY[shape].shape
        return
    if "vmap" in use.name or use.public == "all_gather":
        known = (ValueError, IndexError, ZeroDivisionError)
        assert isinstance(found, known) or tuple(found.shape) == EMPTY[shape].shape
        return
    wanted = "has no axis 0 to split on" if shape == "()" else "the batch is empty"
    assert isinstance(found, GradtoolsError)
    assert wanted in str(found)
