"""Each operator returns the same result in many concurrent threads as in one thread."""

from __future__ import annotations

import sys
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from tests.support.every_operator import POINT, USES, Use, World, healthy, leaves
from tests.support.state_of_process import changes, everything
from tests.testing.test_faults import here

THREADS = {"torch": 8, "jax": 3}  # In JAX, each call compiles a program.
LONG = (
    "frozen",
    "frozen: second order",
    "gradient_graph: twice",
    "formula",
)
SHARED = [use for use in USES if use.name not in LONG]


@pytest.mark.sampled(torch=(20, 50), jax=(8, 50))
@pytest.mark.parametrize("use", SHARED, ids=str)
def test_many_threads_at_once_each_get_what_they_would_alone(use: Use, gt, backend_name):
    here(use, backend_name)
    threads = THREADS[backend_name]
    points = [gt.asarray(POINT * (1 + i / 10)) for i in range(threads)]
    run = lambda x: leaves(gt, use.run(World(gt, healthy(gt), x)))
    alone = [run(x) for x in points]
    before, interval = everything(), sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        with ThreadPoolExecutor(threads) as pool:
            together = list(pool.map(run, points))
    finally:
        sys.setswitchinterval(interval)
    assert changes(before, everything()) == []
    for found, expected in zip(together, alone, strict=True):
        assert_near(found, expected)


def assert_near(found: list[np.ndarray], expected: list[np.ndarray]) -> None:
    """Compare up to rounding, because the rounding of PyTorch's kernels depends on alignment."""
    assert len(found) == len(expected)
    for a, b in zip(found, expected, strict=True):
        if a.dtype.kind in "US":
            assert a.tolist() == b.tolist()
        else:
            np.testing.assert_allclose(a, b, rtol=1e-14, atol=0)
