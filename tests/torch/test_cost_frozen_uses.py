"""What a use of `frozen` leaves behind in PyTorch, beside what f and its caller keep."""

from __future__ import annotations

import torch
from torch import nn

import gradtools.torch as gt
from tests.torch.test_cost_frozen import (
    ROWS,
    WIDTH,
    held,
    network,
    per_use,
)

ONE = ROWS * WIDTH * 4  # bytes of a tensor such as z


def test_nothing_is_kept_for_a_further_z_but_what_f_and_the_caller_keep():
    """The value G(z), which f's graph saves, and the gradient itself."""
    own = per_use(network(0), 0)  # there the value is z, and the gradient is within f's graph
    assert per_use(gt.frozen(network(24)), 0) - own == 2 * ONE


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
