"""One encoder for two towers under autocast: the loss and the gradients of the plain step.

The region is PyTorch's default: its cache of cast weights is on, and the encoder was called in it
before. The oracle for gradients is the plain step in float64, which knows neither autocast nor
chunks: chunks may be no farther from it than the plain step in the same precision is.
"""

from __future__ import annotations

import contextlib
import copy
from typing import Any

import pytest
import torch
from torch import nn

import gradtools.torch as gt

ROWS, CHUNK, WIDTH, SCALE = 24, 5, 16, 10.0
SCALER = 1024.0

DTYPES = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)


class Encoder(nn.Module):
    """Word numbers to unit vectors: a table, one transformer layer, the mean over words."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(50, WIDTH)
        self.layer = nn.TransformerEncoderLayer(WIDTH, 2, 2 * WIDTH, 0.0, batch_first=True)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        return nn.functional.normalize(self.layer(self.table(words)).float().mean(1))


def towers() -> tuple[torch.Tensor, torch.Tensor]:
    draw = torch.Generator().manual_seed(1)
    queries, documents = torch.randint(50, (2, ROWS, 4), generator=draw)
    documents[:, 0] = queries[:, 0]
    return queries, documents


def encoder() -> Encoder:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return Encoder()


def contrast(queries: Any, documents: Any) -> torch.Tensor:
    with torch.autocast("cpu", enabled=False):
        own = torch.arange(len(queries))
        logits = SCALE * queries @ documents.T
        return sum(nn.functional.cross_entropy(x, own) for x in (logits, logits.T)) / 2


def stepped(net: nn.Module, encode: Any, around: Any, inside: bool, called: Any) -> Any:
    """The loss, and the gradient of all parameters in one vector."""
    queries, documents = towers()
    with around:
        called(net, queries)
        loss = contrast(encode(queries), encode(documents))
        if inside:
            (loss * SCALER).backward()
    if not inside:
        (loss * SCALER).backward()
    grads = [p.grad.double().flatten() / SCALER for p in net.parameters()]
    return loss.detach(), torch.cat(grads)


def far(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a - b).norm() / b.norm())


CALLED = {
    "not called before": lambda net, x: None,
    "called before": lambda net, x: net(x),
    "called before without a graph": lambda net, x: torch.no_grad()(net)(x),
}


@pytest.mark.sampled(4, 24)
@DTYPES
@pytest.mark.parametrize("inside", [True, False], ids=["backward inside", "backward outside"])
@pytest.mark.parametrize("before", CALLED)
def test_two_towers_under_autocast_give_the_plain_step(dtype, inside, before):
    plain, chunked, exact = encoder(), encoder(), copy.deepcopy(encoder()).double()
    region = lambda: torch.autocast("cpu", dtype, cache_enabled=True)
    nothing = CALLED["not called before"]
    found = stepped(
        chunked,
        gt.chunked(chunked, CHUNK),
        region(),
        inside,
        CALLED[before],
    )
    expected = stepped(plain, plain, region(), inside, nothing)
    truth = stepped(exact, exact, contextlib.nullcontext(), inside, nothing)
    rounding = far(expected[1], truth[1])
    assert 1e-4 < rounding < 0.1  # the region is in force, and the step is still meaningful
    torch.testing.assert_close(found[0], expected[0], rtol=1e-3, atol=0)
    assert far(found[1], expected[1]) < 1.5 * rounding
    assert far(found[1], truth[1]) < 1.5 * rounding
    assert far(found[0], truth[0]) < 0.01
    assert torch.is_autocast_enabled("cpu") is False


@pytest.mark.slow_at("torch.float16")
@DTYPES
def test_two_steps_of_a_scaler_move_the_weights_as_the_plain_steps_do(dtype):
    def trained(wrap: Any) -> torch.Tensor:
        net = encoder()
        encode, sgd = wrap(net), torch.optim.SGD(net.parameters(), 0.5)
        scaler = torch.amp.GradScaler("cpu", init_scale=SCALER)
        start = torch.cat([p.detach().flatten() for p in net.parameters()])
        for _ in range(2):
            with torch.autocast("cpu", dtype):
                net(towers()[0])
                loss = contrast(*map(encode, towers()))
            sgd.zero_grad()
            scaler.scale(loss).backward()
            scaler.step(sgd)
            scaler.update()
        assert scaler.get_scale() == SCALER  # no step was left out
        return torch.cat([p.detach().flatten() for p in net.parameters()]) - start

    moved = trained(lambda net: net)
    assert moved.norm() > 0.05
    assert far(trained(lambda net: gt.chunked(net, CHUNK)), moved) < 0.05
