"""Comparisons of derivatives run in full float32 precision and restore the settings afterwards.

On a CPU with bfloat16 support, the tests use oneDNN's bfloat16 products in place of the TF32
products of a GPU.
"""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import pytest
import torch

from gradtools.testing import check_derivatives, cross_check
from gradtools.testing.cross_checking.precision import highest_precision, settings_of_torch

NEWER = hasattr(torch.backends, "fp32_precision")  # requires PyTorch 2.9
STATES = {
    "PyTorch's defaults": "pass",
    "older: high": "torch.set_float32_matmul_precision('high')",
    "older: medium, no TF32 in cuDNN": "torch.set_float32_matmul_precision('medium'); "
    "torch.backends.cudnn.allow_tf32 = False",
    "newer: everything": "torch.backends.fp32_precision = 'tf32'",
    "newer: CUDA matrix products": "torch.backends.cuda.matmul.fp32_precision = 'tf32'",
    "newer: oneDNN convolutions": "torch.backends.mkldnn.conv.fp32_precision = 'bf16'",
    "newer: no TF32 in recurrent layers": "torch.backends.cudnn.rnn.fp32_precision = 'ieee'",
}


def settings() -> Any:
    found = {name: get() for name, (get, _) in settings_of_torch().items()}
    return found, jax.config.jax_default_matmul_precision


@pytest.fixture(params=[name for name in STATES if NEWER or not name.startswith("newer")])
def state(request):
    """Change one precision setting of the process, and restore all settings after the test."""
    before, _ = settings()
    exec(STATES[request.param])
    yield request.param
    if NEWER:
        torch.backends.fp32_precision = "none"
    for name, (get, put) in settings_of_torch().items():
        if get() != before[name]:
            put(before[name])


def test_inside_no_library_loses_bits_and_the_settings_are_as_before(state):
    before = settings()
    with highest_precision(["torch", "jax"]):
        inside, _ = settings()
    assert NEWER or inside["float32_matmul_precision"] == "highest"
    assert {x for name, x in inside.items() if name.endswith("fp32_precision")} <= {"none", "ieee"}
    assert settings() == before
    with pytest.raises(ZeroDivisionError), highest_precision(["torch", "jax"]):
        raise ZeroDivisionError
    assert settings() == before


@pytest.mark.parametrize("operator", ["chunked", "frozen", "checkpoint"])
def test_an_operator_that_evaluates_again_reads_any_setting(state, operator):
    """PyTorch raises an error if an old setting that contradicts the new settings is read."""
    import gradtools.torch as gt

    f = gt.chunked(torch.sin, 2) if operator == "chunked" else getattr(gt, operator)(torch.sin)
    before = settings()
    found = gt.grad(lambda x: f(x).sum())(torch.zeros(4))
    assert found.tolist() == [1.0] * 4
    assert settings() == before


@pytest.mark.skipif(not NEWER, reason="the setting of oneDNN requires PyTorch 2.9")
def test_the_checks_compare_at_the_highest_precision():
    seen, matmul, args = [], torch.backends.mkldnn.matmul, (np.ones(2),)

    def f(x: Any) -> Any:
        seen.append((matmul.fp32_precision, jax.config.jax_default_matmul_precision))
        return (x * x).sum()

    before, matmul.fp32_precision = matmul.fp32_precision, "bf16"
    try:
        with jax.default_matmul_precision("bfloat16"):
            cross_check(torch=f, jax=f, args=args, order=1)
            assert set(seen) == {("ieee", "highest")}
            seen.clear()
            check_derivatives(f, args, "torch", order=1)
            check_derivatives(f, args, "jax", order=1)
            assert {("ieee", "bfloat16"), ("bf16", "highest")} == set(seen)
    finally:
        matmul.fp32_precision = before
