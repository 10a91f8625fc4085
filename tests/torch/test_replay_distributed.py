"""Tests FSDP and DDP wrappers around a model that calls gradtools operators, in two processes.

The reference is the same wrapper around the plain loop over chunks. The results of a program must
be correct, or gradtools must raise its own error in every process.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import gradtools.torch as gt
from gradtools import GradtoolsError
from tests.support.processes import found_in_processes

pytestmark = pytest.mark.skipif(not dist.is_gloo_available(), reason="needs gloo")
SECONDS, WORLD = 90, 2


def batch(rank: int) -> torch.Tensor:
    """Return a batch that differs by process."""
    return torch.linspace(0.3, 9.0, 12, dtype=torch.float64).add(rank).sin().reshape(4, 3)


def encoder(*more: nn.Module) -> nn.Sequential:
    """Return an encoder with the same weights in each process."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), *more, nn.Linear(4, 2)).double()


class Towers(nn.Module):
    """A module that encodes two batches with one encoder and returns their loss."""

    def __init__(self, encode: Callable[..., Any], net: nn.Module) -> None:
        super().__init__()
        self.encode, self.encoder = encode, net
        self.scale = nn.Parameter(torch.ones(1, dtype=torch.float64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        a, b = self.encode(self.encoded)(x), self.encode(self.encoded)(x.flip(0))
        return nn.functional.cross_entropy(
            self.scale * a.double() @ b.double().T, torch.arange(len(a))
        )

    def encoded(self, x: torch.Tensor) -> torch.Tensor:
        """Encode x; the operator wraps this bound method instead of the encoder."""
        return self.encoder(x)


class Critic(nn.Module):
    """A gradient penalty for a critic of the outputs of an untrained network G."""

    def __init__(self, encode: Callable[..., Any], net: nn.Module) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(2, 2), nn.Tanh()).double()
        # the list hides G from FSDP, so G is not sharded
        self.G = [encode(net.requires_grad_(False))]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        slopes = []
        for part in x.split(2):
            z = part.clone().requires_grad_()
            score = self.encoder(self.G[0](z)).sin().sum()
            slopes += torch.autograd.grad(score, z, create_graph=True)
        return torch.cat(slopes).square().mean().sqrt()


def sharded(whole: nn.Module) -> nn.Module:
    """Apply FSDP2 to the whole module."""
    return fully_shard(whole, mesh=init_device_mesh("cpu", (WORLD,)))


def sharded_layers(whole: Any) -> nn.Module:
    """Apply FSDP2 to each layer and to the whole module."""
    mesh = init_device_mesh("cpu", (WORLD,))
    for layer in whole.encoder:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh)
    return fully_shard(whole, mesh=mesh)


WRAPPERS: dict[str, tuple[Callable[[Any], nn.Module], tuple[Any, ...]]] = {
    "FSDP2": (sharded, ()),
    "FSDP2 around each layer": (sharded_layers, ()),
    "FSDP2 with dropout and batch norm": (sharded, (nn.Dropout, lambda: nn.BatchNorm1d(4))),
    "DDP with dropout and batch norm": (
        DistributedDataParallel,
        (nn.Dropout, lambda: nn.BatchNorm1d(4)),
    ),
    "DDP with find_unused_parameters": (
        lambda w: DistributedDataParallel(w, find_unused_parameters=True),
        (nn.Dropout,),
    ),
}
OPERATORS: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    # Each entry contains an operator of gradtools and its plain version.
    "chunked": (
        lambda f: gt.chunked(f, 2),
        lambda f: lambda x: torch.cat([f(part) for part in x.split(2)]),
    ),
    "checkpoint": (gt.checkpoint, lambda f: f),
}
AROUND = {"frozen": (gt.frozen, lambda f: f)}
CASES = [(wrapper, operator) for wrapper in WRAPPERS for operator in (*OPERATORS, "frozen")]


def trained(rank: int, model: Any, wrap: Any, layers: Any, encode: Any) -> list[torch.Tensor]:
    """Return the losses, gradients, buffers and random state of two training steps."""
    whole = wrap(model(encode, encoder(*(layer() for layer in layers))))
    optimizer = torch.optim.SGD(whole.parameters(), lr=0.1)
    torch.manual_seed(rank)
    found = []
    for _ in range(2):
        optimizer.zero_grad()
        loss = whole(batch(rank))
        loss.backward()
        found += [loss.detach(), *(local(p.grad) for p in whole.parameters())]
        optimizer.step()
    found += [local(b).double() for b in whole.buffers()]
    return [*found, torch.get_rng_state().double()]


def local(x: Any) -> torch.Tensor:
    """Return this process's shard of a tensor."""
    x = x.to_local() if hasattr(x, "to_local") else x
    return x.detach().clone()


def case(rank: int, wrapper: str, operator: str) -> Any:
    """Return the results of an operator and of its plain version, or gradtools' error."""
    (wrap, layers), (ours, plain) = WRAPPERS[wrapper], (OPERATORS | AROUND)[operator]
    model = Critic if operator == "frozen" else Towers
    try:
        found = trained(rank, model, wrap, layers, ours)
    except GradtoolsError as error:
        return f"refused: {error}"
    except RuntimeError as error:  # FSDP2 itself may not support second derivatives
        with pytest.raises(type(error), match="setStorage"):
            trained(rank, model, wrap, layers, plain)
        return [], []
    return found, trained(rank, model, wrap, layers, plain)


def run(rank: int, world: int, what: tuple[str, str]) -> Any:
    return case(rank, *what)


@pytest.fixture(scope="module")
def processes(tmp_path_factory):
    folder = tmp_path_factory.mktemp("processes")
    return found_in_processes(run, CASES, WORLD, folder, SECONDS)


@pytest.mark.slow
@pytest.mark.parametrize(("wrapper", "operator"), CASES)
def test_a_wrapper_around_is_as_around_the_plain_loop(wrapper, operator, processes):
    for process in processes:
        found = process.get((wrapper, operator), "it hangs")
        if isinstance(found, str):
            assert found.startswith(f"refused: {operator}"), found[-600:]
            continue
        for a, b in zip(*found, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)
