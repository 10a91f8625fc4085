"""float32's products keep all bits while derivatives are compared; then the settings are as before.

What a GPU multiplies in TF32 is multiplied here in bfloat16, by oneDNN, where the CPU can.
"""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import pytest
import torch

from gradtools.testing import check_derivatives, cross_check
from gradtools.testing.cross_checking.precision import (
    described_precision,
    highest_precision,
    lowered,
)

NEWER = hasattr(torch.backends, "fp32_precision")  # from PyTorch 2.9 on


def older() -> Any:
    """The settings for matrices and cuDNN, or that they contradict the newer ones."""
    found = []
    for read in (torch.get_float32_matmul_precision, lambda: torch.backends.cudnn.allow_tf32,
                 lambda: torch.backends.cuda.matmul.allow_tf32):  # fmt: skip
        try:
            found.append(read())
        except RuntimeError as error:
            found.append(str(error))
    return found


def settings() -> Any:
    backends = torch.backends
    holders = [] if not NEWER else [
        backends, backends.cuda.matmul, backends.cudnn, backends.cudnn.conv, backends.cudnn.rnn,
        backends.mkldnn, backends.mkldnn.matmul, backends.mkldnn.conv, backends.mkldnn.rnn,
    ]  # fmt: skip
    return older(), [x.fp32_precision for x in holders], jax.config.jax_default_matmul_precision


STATES = {
    "as PyTorch comes": "pass",
    "older: high": "torch.set_float32_matmul_precision('high')",
    "older: medium, no TF32 in cuDNN": "torch.set_float32_matmul_precision('medium'); "
    "torch.backends.cudnn.allow_tf32 = False",
    "newer: everything": "torch.backends.fp32_precision = 'tf32'",
    "newer: matrices of CUDA": "torch.backends.cuda.matmul.fp32_precision = 'tf32'",
    "newer: convolutions of oneDNN": "torch.backends.mkldnn.conv.fp32_precision = 'bf16'",
    "newer: no TF32 in recurrent layers": "torch.backends.cudnn.rnn.fp32_precision = 'ieee'",
}


@pytest.fixture(params=[name for name in STATES if NEWER or not name.startswith("newer")])
def state(request):
    """A setting of the process, put back by what reads and sets all of them."""
    from gradtools.torch.modes import PRECISIONS

    before = {name: get() for name, (get, _) in PRECISIONS.items()}
    exec(STATES[request.param])
    yield request.param
    if NEWER:
        torch.backends.fp32_precision = "none"
    for name, (get, put) in PRECISIONS.items():
        if get() != before[name]:
            put(before[name])


def test_the_settings_are_as_before_after_an_exception(state):
    before = settings()
    with pytest.raises(ZeroDivisionError), highest_precision(["torch", "jax"]):
        raise ZeroDivisionError
    assert settings() == before


def test_inside_no_library_may_lose_bits(state):
    with highest_precision(["torch", "jax"]):
        assert NEWER or torch.get_float32_matmul_precision() == "highest"
        reads = [x.fp32_precision for x in leaves_of_settings()]
    assert set(reads) <= {"none", "ieee"}


def leaves_of_settings() -> list[Any]:
    if not NEWER:
        return []
    cuda, cudnn, mkldnn = torch.backends.cuda, torch.backends.cudnn, torch.backends.mkldnn
    return [cuda.matmul, cudnn.conv, cudnn.rnn, mkldnn.matmul, mkldnn.conv, mkldnn.rnn]


@pytest.mark.parametrize("operator", ["chunked", "frozen", "checkpoint"])
def test_an_operator_that_evaluates_again_reads_any_setting(state, operator):
    """Where the newer settings contradict an older one, PyTorch refuses to read that."""
    import gradtools.torch as gt

    f = gt.chunked(torch.sin, 2) if operator == "chunked" else getattr(gt, operator)(torch.sin)
    before = settings()
    found = gt.grad(lambda x: f(x).sum())(torch.zeros(4))
    assert found.tolist() == [1.0] * 4
    assert settings() == before


def seen_in(check: Any) -> tuple[Any, Any]:
    """What f finds set in a check, and the report."""
    seen = []

    def f(x: Any) -> Any:
        seen.append(lowered("torch"))
        return (x * x).sum()

    report = check(f)
    return seen[0], report


CHECKS = {
    "check_derivatives": lambda f, **how: check_derivatives(f, (np.ones(2),), "torch", **how),
    "cross_check": lambda f, **how: cross_check(
        torch=f, jax=lambda x: (x * x).sum(), args=(np.ones(2),), **how
    ),
}


@pytest.mark.slow_at("check_derivatives")
@pytest.mark.parametrize("name", CHECKS)
def test_a_check_compares_at_the_highest_precision_and_says_what_is_set(name):
    matmul = torch.backends.mkldnn.matmul
    before, matmul.fp32_precision = matmul.fp32_precision, "bf16"
    try:
        seen, report = seen_in(CHECKS[name])
        assert seen == {}
        assert "highest precision; set is mkldnn.matmul.fp32_precision bf16" in "".join(
            report.notes
        )
        seen, report = seen_in(lambda f: CHECKS[name](f, precision="as set"))
        assert seen == {"mkldnn.matmul.fp32_precision": "bf16"}
        assert "float32's products: set is mkldnn.matmul" in "".join(report.notes)
    finally:
        matmul.fp32_precision = before


def test_a_setting_of_jax_is_lifted_and_told():
    seen = []

    def f(x: Any) -> Any:
        seen.append(jax.config.jax_default_matmul_precision)
        return (x * x).sum()

    with jax.default_matmul_precision("bfloat16"):
        assert described_precision("jax").endswith("jax_default_matmul_precision is bfloat16")
        report = check_derivatives(f, (np.ones(2),), "jax")
        assert jax.config.jax_default_matmul_precision == "bfloat16"
    assert set(seen) == {"highest"}
    assert "jax_default_matmul_precision bfloat16" in "".join(report.notes)


def test_an_unknown_precision_is_refused():
    from gradtools import GradtoolsError

    with pytest.raises(GradtoolsError, match="precision is 'low'; expected 'highest' or 'as set'"):
        check_derivatives(lambda x: x.sum(), (np.ones(2),), "torch", precision="low")
