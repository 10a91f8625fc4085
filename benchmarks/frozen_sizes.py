"""Measures the time of `frozen` in PyTorch for networks G of different sizes.

Each evaluation of G has a Python overhead, and forward mode adds an overhead for each layer. The
table therefore contains the time relative to double backward and the time of one forward pass, for
networks from tiny to large, and also the time of hand-written forward over reverse. The derivative
dg/dy is the same as in frozen.py. With --quick, the program measures one network in few rounds and
writes nothing.
"""

from __future__ import annotations

import datetime
import statistics
import sys
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import frozen
import torch
from frozen import BY_HAND, OURS, PLAIN, seconds, through, torch_by_hand
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import gradtools.torch as gt

USES = 4
ROUNDS = 3 if frozen.QUICK else 15


class Network(NamedTuple):
    """A frozen network.

    Attributes:
        name: The name in the table.
        make: Creates the network.
        code: The shape of one z.
        width: The size of the last axis of the output.
    """

    name: str
    make: Callable[[], nn.Module]
    code: tuple[int, ...]
    width: int


def dense(depth: int, width: int, rows: int = 64) -> Network:
    def make() -> nn.Module:
        pairs = [(nn.Linear(width, width), nn.Tanh()) for _ in range(depth)]
        return nn.Sequential(*(part for pair in pairs for part in pair))

    name = f"{depth} dense layer{'s' * (depth > 1)} of {width}, {rows} rows"
    return Network(name, make, (rows, width), width)


class Decoder(nn.Module):
    """Decodes codes to images with a dense layer and convolutions."""

    def __init__(self, depth: int, channels: int, side: int) -> None:
        super().__init__()
        self.shape = (-1, channels, side, side)
        self.dense = nn.Linear(16, channels * side * side)
        layer = partial(nn.Conv2d, channels, channels, 3, padding=1)
        self.layers = nn.ModuleList(layer() for _ in range(depth))
        self.image = nn.Conv2d(channels, 1, 3, padding=1)

    def forward(self, z: torch.Tensor) -> torch.Tensor:
        """Returns the decoded images, which have one channel."""
        x = torch.tanh(self.dense(z)).reshape(self.shape)
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return self.image(x)


def decoder(depth: int, channels: int, side: int, images: int = 16) -> Network:
    name = f"{depth} convolutions, {channels} channels of {side} x {side}, {images} images"
    return Network(name, partial(Decoder, depth, channels, side), (images, 16), side * side)


def encoder(depth: int, width: int, rows: int, tokens: int) -> Network:
    def make() -> nn.Module:
        layer = nn.TransformerEncoderLayer(
            width, 4, 4 * width, 0.0, "gelu", batch_first=True, norm_first=True
        )
        return nn.TransformerEncoder(layer, depth, enable_nested_tensor=False)

    name = f"{depth} encoder layer{'s' * (depth > 1)} of {width}, {rows} x {tokens} tokens"
    return Network(name, make, (rows, tokens, width), width)


NETWORKS = [
    dense(1, 8, rows=8),
    dense(8, 64),
    dense(24, 64),
    dense(8, 256),
    dense(24, 256),
    dense(4, 1024),
    dense(8, 1024),
    decoder(8, 16, 8),
    decoder(24, 16, 8),
    decoder(8, 32, 16),
    encoder(1, 64, 4, 16),
    encoder(8, 64, 4, 16),
    encoder(24, 64, 4, 16),
    encoder(4, 256, 4, 32),
]


def row(network: Network) -> str:
    torch.manual_seed(0)
    G = network.make().requires_grad_(False)
    y, zs = torch.randn(network.width, 8) / network.width**0.5, torch.randn(USES, *network.code)
    ways: dict[str, Callable[[], Any]] = {
        PLAIN: partial(through, G, y, zs),
        OURS: partial(through, gt.frozen(G), y, zs),
        BY_HAND: partial(torch_by_hand, G, y, zs),
    }
    frozen.agree({name: run().numpy() for name, run in ways.items()})
    names, rounds = list(ways), []
    for k in range(ROUNDS):
        first = k % len(names)
        rounds.append({n: seconds(ways[n]) for n in names[first:] + names[:first]})
    with torch.no_grad():
        once = min(seconds(lambda: G(zs[0])) for _ in range(ROUNDS))
    times = {n: statistics.median(r[n] / r[PLAIN] for r in rounds) for n in names}
    plain = statistics.median(r[PLAIN] for r in rounds) / USES
    besides = statistics.median(r[OURS] - r[PLAIN] for r in rounds) / USES
    cells = [f"{once * 1e3:.1f}", f"{plain * 1e3:.1f}", f"{besides * 1e3:.1f}"]
    return f"| {network.name} | {' | '.join(cells)} | {times[OURS]:.2f} | {times[BY_HAND]:.2f} |"


def report() -> str:
    lines = [
        f"# The time of frozen for several sizes of G, {datetime.date.today()}, Python "
        f"{sys.version.split()[0]}, torch {torch.__version__}",
        "",
        f"The program computes dg/dy of g(df/dz_1, ..., df/dz_{USES}), with {USES} uses of G, in "
        f"float32 on one thread. Times are medians of CPU seconds over {ROUNDS} rounds. Each round "
        "runs each method once, in an order that rotates. The time of a forward pass is the "
        "minimum over the rounds.",
        "",
        "| G | a forward pass, ms | double backward, ms per use | `frozen`, additional ms "
        "| `frozen`, relative to double backward | by hand, relative to double backward |",
        "|---|---|---|---|---|---|",
    ]
    with sdpa_kernel(SDPBackend.MATH):  # the fused kernel has no second derivative
        for network in NETWORKS[1:2] if frozen.QUICK else NETWORKS:
            lines.append(row(network))
            print(network.name, file=sys.stderr)
    return "\n".join([*lines, ""])


def main() -> None:
    torch.set_num_threads(1)
    text = report()
    print(text)
    if not frozen.QUICK:
        (frozen.HERE / "results" / "frozen_sizes.md").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
