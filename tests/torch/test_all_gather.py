"""Tests `all_gather` in one process; test_distributed.py tests several processes."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

import gradtools.torch as gt

Z = torch.complex(torch.arange(6.0), 1 - torch.arange(6.0)).to(torch.complex128).reshape(3, 2)


@pytest.fixture(autouse=True)
def _a_group():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("x", [Z.conj(), Z.conj().imag, Z.mT.conj(), Z.mH[1:]])
def test_a_conjugate_that_is_yet_to_be_taken_is_sent_as_what_it_is(x):
    assert torch.equal(gt.all_gather(x), x.resolve_conj().resolve_neg())


def test_a_cotangent_that_is_such_a_conjugate_comes_back_as_what_it_is():
    x = Z.clone().requires_grad_()
    (g,) = torch.autograd.grad(gt.all_gather(x), x, Z.conj())
    assert torch.equal(g, Z.conj().resolve_conj())
