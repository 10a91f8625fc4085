"""Tests host kernels in PyTorch: devices, layouts, modes, tracing and copies."""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest
import torch

import gradtools.torch as gt
from gradtools.host_kernels import Kernel

BACKEND = gt.grad.__self__._backend


def host(fun, out=None, vectorized=False):
    kernel = Kernel(fun, out, vectorized)

    def call(*args):
        bound, xs = kernel.bind(BACKEND, args)
        keep.append(bound)
        return BACKEND.call_kernel(bound, xs)[0]

    keep = []
    return call


def test_the_result_goes_to_the_device_of_the_first_array(torch_device):
    x, y = torch.ones(3, device=torch_device), torch.ones(3)
    f = host(lambda x, y: x + y)
    assert f(x, y).device == x.device
    assert torch.vmap(f)(x, y).device == x.device
    # meta tensors have shapes but no values, as in a trace
    meta = f(torch.ones(3, device="meta"), y)
    assert (meta.device.type, meta.shape) == ("meta", (3,))


# --- plain calls, and calls that PyTorch's dispatcher must handle -------------------------


def _legacy(f):
    from torch._vmap_internals import _vmap

    return _vmap(f)


CALLED = {
    "plain": lambda f, x: f(x),
    "known": lambda f, x: (f(x), f(x))[1],
    "no_grad": lambda f, x: torch.no_grad()(f)(x.clone().requires_grad_()),
    "parameter": lambda f, x: torch.no_grad()(f)(torch.nn.Parameter(x)),
    "inference": lambda f, x: torch.inference_mode()(f)(x).clone(),
    "vmap": lambda f, x: torch.vmap(f)(x),
    "legacy vmap": lambda f, x: _legacy(f)(x),
    "traced": lambda f, x: torch.jit.trace(f, x + 1)(x),
    "fake first": lambda f, x: (_faked(f, x), f(x))[1],
}


def _faked(f, x):
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode() as mode:
        y = f(mode.from_tensor(x))
    assert y.shape == x.shape and type(y).__name__ == "FakeTensor"


INPUTS = {
    "plain": torch.linspace(0, 1, 6).reshape(2, 3),
    "transposed": torch.linspace(0, 1, 6).reshape(2, 3).T,
    "expanded": torch.ones(3, 1).expand(3, 2),
    "conjugate": torch.complex(torch.ones(2, 3), torch.ones(2, 3)).conj(),
    "negative": torch.complex(torch.ones(2, 3), torch.ones(2, 3)).conj().imag,
    "half": torch.ones(2, 3, dtype=torch.bfloat16),
    "empty": torch.ones(0, 3),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("way", CALLED)
@pytest.mark.parametrize("which", INPUTS)
def test_a_kernel_gives_the_same_however_it_is_called(way, which):
    x = INPUTS[which]
    if "vmap" in way and len(x) == 0:
        pytest.skip("torch.vmap does not support a batch of size 0")
    f = gt.host_function(lambda x: x * 2)
    torch.testing.assert_close(CALLED[way](f, x), (x * 2).resolve_conj())


def test_the_arrays_of_a_ufunc_are_not_copied_and_further_ones_not_written_to():
    f, x = gt.host_function(np.exp), torch.ones(1000, 100, dtype=torch.float64)
    f(x)
    tracemalloc.start()
    y = f(x)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 1.1 * y.nbytes
    assert f(x.T).is_contiguous()
    other = torch.zeros_like(x)
    with pytest.raises(ValueError, match="read-only"):
        f(x, other)
    assert not other.any()
