"""One encoder for two towers under autocast: the loss and the gradients of the plain step.

The region is PyTorch's default: its cache of cast weights is on, and the encoder was called in it
before. The oracle for gradients is the plain step in float64, which knows neither autocast nor
chunks: chunks may be no farther from it than the plain step in the same precision is.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

ROWS, CHUNK, WIDTH, SCALE = 24, 5, 16, 10.0

DTYPES = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
RETAIN = pytest.mark.parametrize("keep_graphs", [0, 1], ids="keep_graphs {}".format)


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


def far(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a - b).norm() / b.norm())


CALLED = {
    "not called before": lambda net, x: None,
    "called before": lambda net, x: net(x),
    "called before without a graph": lambda net, x: torch.no_grad()(net)(x),
}
