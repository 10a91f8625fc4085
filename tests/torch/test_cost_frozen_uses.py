"""What a use of `frozen` leaves behind in PyTorch, beside what f and its caller keep."""

from __future__ import annotations

import gc
import tracemalloc

import pytest
import torch
from torch import nn

import gradtools.torch as gt
from tests.torch.test_cost_frozen import (
    ROWS,
    WIDTH,
    gradient,
    held,
    inputs,
    loss_of,
    network,
    per_use,
)

ONE = ROWS * WIDTH * 4  # bytes of a tensor such as z


def test_nothing_is_kept_for_a_further_z_but_what_f_and_the_caller_keep():
    """The value G(z), which f's graph saves, and the gradient itself."""
    own = per_use(network(0), 0)  # there the value is z, and the gradient is within f's graph
    assert per_use(gt.frozen(network(24)), 0) - own == 2 * ONE


@pytest.mark.slow
def test_raw_bytes_for_a_further_z_are_a_tenth_where_f_is_a_tenth():
    """Of 24 blocks f's own graph and the gradient are less than a tenth of two graphs of G."""
    blocks = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH), nn.GELU())] * 24
    G = nn.Sequential(*blocks).requires_grad_(False)
    for which in (0, 1):
        assert per_use(gt.frozen(G), which) <= per_use(G, which) / 10


class Stateful(nn.Module):
    """Evaluated batch normalisations, whose buffers are state, and a table of 256 kB."""

    def __init__(self, depth):
        super().__init__()
        self.parts = nn.ModuleList(nn.BatchNorm1d(WIDTH) for _ in range(depth)).eval()
        self.register_buffer("table", torch.rand(1000, WIDTH))

    def forward(self, z):
        for part in self.parts:
            z = torch.tanh(part(z)) + self.table[0]
        return z


def test_uses_share_the_copies_of_state_that_did_not_change():
    G = gt.frozen(Stateful(24).requires_grad_(False))
    held(G, 1)  # the first use copies
    assert per_use(G, 0) - per_use(network(0), 0) == 2 * ONE


def python_bytes(G):
    """Of python's objects, for each further use."""
    y, zs = inputs(16)
    gs, sizes = [gradient(loss_of, y, z, G) for z in zs[:4]], []
    tracemalloc.start()
    for some in (zs[4:8], zs[8:]):
        gs += [gradient(loss_of, y, z, G) for z in some]
        gc.collect()
        sizes.append(tracemalloc.get_traced_memory()[0])
    tracemalloc.stop()
    return (sizes[1] - sizes[0]) / 8


def test_what_python_keeps_for_a_further_z_does_not_grow_with_depth():
    few, many = (python_bytes(gt.frozen(network(depth))) for depth in (4, 48))
    assert many < few + 1000 and many < 16_000  # a dict of each layer's fields is 50 kB
