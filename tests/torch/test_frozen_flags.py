"""Flags of torch.backends that were frozen, as torch.testing._internal does when it is imported."""

import subprocess
import sys

import pytest

PROGRAM = """
import warnings
import torch
import torch.nn.functional as F
import gradtools.torch as gt

x = torch.linspace(-1, 1, 32, dtype=torch.float64).reshape(1, 2, 4, 4)
attend = lambda q: (F.scaled_dot_product_attention(q, q, q) ** 2).sum()
second = lambda f: gt.grad(lambda q: (gt.grad(f)(q) ** 2).sum())(x)
flags = lambda: (
    torch.backends.cudnn.enabled, torch.backends.cudnn.benchmark, torch.backends.mkldnn.enabled,
    torch.backends.cuda.flash_sdp_enabled(), torch.backends.cuda.mem_efficient_sdp_enabled(),
)
with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
    want = second(attend)
torch.backends.disable_global_flags()
before = flags()
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    torch.testing.assert_close(second(gt.frozen(attend)), want)
    found = gt.mixed_partial(lambda y, g: y * g, attend, torch.ones(()).to(x), x, x)
    torch.testing.assert_close(found, (gt.grad(attend)(x) * x).sum())
    assert gt.gradient_graph(attend, x, order=2).nodes
assert flags() == before
assert torch.backends.flags_frozen()
"""


@pytest.mark.slow
def test_kernels_are_chosen_where_the_flags_are_frozen_and_flags_stand_as_before():
    run = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stderr
