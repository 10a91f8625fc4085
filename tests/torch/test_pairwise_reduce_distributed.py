"""A contrastive loss over the rows of several processes, against one that has all rows."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import gradtools.torch as gt
from tests.support.processes import found_in_processes

pytestmark = pytest.mark.skipif(not dist.is_gloo_available(), reason="needs gloo")
ROWS, SECONDS = 5, 100
OPTIONS = (
    {},
    {"symmetric": False, "label_smoothing": 0.1},
    {"sigmoid": True},
)


class Towers(nn.Module):
    """Two towers in chunks, and a learned temperature."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.one, self.other = (nn.Linear(3, 4).double() for _ in range(2))
        self.scale = nn.Parameter(torch.tensor(0.5, dtype=torch.float64))

    def forward(self, x, y, ids, **options):
        x, y = (gt.chunked(f, 2)(z) for f, z in ((self.one, x), (self.other, y)))
        return gt.contrastive_loss(x, y, self.scale.exp(), ids=ids, tile_size=3, **options)


def batch(world):
    torch.manual_seed(1)
    return (*torch.randn(2, world * ROWS, 3, dtype=torch.float64), torch.arange(world * ROWS) % 7)


def gradients(model):
    found = {name.removeprefix("module."): p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    return found


def averaged(rank, world, k):
    model = DistributedDataParallel(Towers())
    local = [z[rank * ROWS : (rank + 1) * ROWS] for z in batch(world)]
    model(*local, gathered=True, **OPTIONS[k]).backward()
    return gradients(model)


@pytest.mark.slow
@pytest.mark.parametrize("world", [2, 4])
def test_the_averaged_gradients_are_those_of_the_whole_batch(world, tmp_path):
    processes = found_in_processes(averaged, range(len(OPTIONS)), world, tmp_path, SECONDS)
    model = Towers()
    for k, options in enumerate(OPTIONS):
        model(*batch(world), **options).backward()
        expected = gradients(model)
        for found in processes:
            assert not isinstance(found[k], str), found[k]
            for name, g in expected.items():
                torch.testing.assert_close(found[k][name], g, rtol=1e-12, atol=1e-14)
