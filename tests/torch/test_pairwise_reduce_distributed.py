"""A contrastive loss over the rows of several processes, against one that has all rows."""

from __future__ import annotations

import os

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import gradtools.torch as gt

pytestmark = pytest.mark.skipif(not dist.is_gloo_available(), reason="needs gloo")
ROWS = 5  # in each process
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


def work(rank, world, folder):
    torch.set_num_threads(1)
    init = f"file://{folder}/init"
    dist.init_process_group("gloo", init_method=init, rank=rank, world_size=world)
    model, found = DistributedDataParallel(Towers()), []
    local = [z[rank * ROWS : (rank + 1) * ROWS] for z in batch(world)]
    for options in OPTIONS:
        model(*local, gathered=True, **options).backward()
        found.append(gradients(model))
    torch.save(found, f"{folder}/{rank}.pt")
    dist.destroy_process_group()


@pytest.mark.slow
@pytest.mark.parametrize("world", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_the_averaged_gradients_are_those_of_the_whole_batch(world, tmp_path):
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    mp.start_processes(work, (world, str(tmp_path)), world)
    model = Towers()
    for k, options in enumerate(OPTIONS):
        model(*batch(world), **options).backward()
        expected = gradients(model)
        for rank in range(world):
            found = torch.load(tmp_path / f"{rank}.pt")[k]
            for name, g in expected.items():
                torch.testing.assert_close(found[name], g, rtol=1e-12, atol=1e-14)
