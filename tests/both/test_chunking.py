"""`chunked` in both backends: the same numbers to 1e-12."""

from __future__ import annotations

import numpy as np
import pytest

import gradtools.jax as gj
import gradtools.torch as gt
from tests.operators.test_chunking import lifted, numbers
from tests.support.chunking_table import CASES, chunked, loss


@pytest.mark.quick_at("larger than the batch", ("2", "one chunk"))
@pytest.mark.sampled(slow=6)
@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("order", [1, 2])
def test_both_backends_give_the_same_numbers(case, order, rng):
    w, x, dw, dx = case.weight(rng), case.batch(rng), case.weight(rng), case.batch(rng)
    found = []
    for g in (gt, gj):
        at, along = (lifted(g, w), lifted(g, x)), (lifted(g, dw), lifted(g, dx))
        ours = chunked(g, case)
        total = lambda w, x, g=g, ours=ours: loss(g, ours(w, x))
        if order == 1:
            found.append(numbers(g, g.value_and_grad(total, (0, 1))(*at)))
        else:
            found.append(numbers(g, g.hvp(total, at, along)))
    size = max(float(np.abs(a).max()) for a in found[0])
    for a, b in zip(*found, strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-12 * max(size, 1.0))
