"""On any machine, JAX lowers every program in `every_operator.py` for TPU and CUDA.

`make tpu` and `make cuda` also compile the lowered programs; see test_ahead_of_time.py.
"""

from __future__ import annotations

import jax
import numpy as np
import pytest

import gradtools.jax as gt
from tests.support.every_operator import JITTED, POINT, World, healthy

PLATFORMS = ("tpu", "cuda")


@pytest.mark.sampled(60, 104)
@pytest.mark.slow_at(("grad", "tpu"))
@pytest.mark.parametrize("platform", PLATFORMS)
@pytest.mark.parametrize("use", JITTED, ids=str)
def test_a_use_is_lowered_for_an_accelerator_or_refused_as_a_callback(use, platform):
    x = gt.asarray(POINT.astype(np.float32))
    f = use.make(World(gt, healthy(gt), x))
    lowered = lambda: jax.jit(f).trace(x).lower(lowering_platforms=(platform,)).as_text()
    if use.public == "host_function" and jax.default_backend() == "cpu":
        with pytest.raises(Exception, match="platform"):
            lowered()
        return
    assert "func.func public @main" in lowered()
