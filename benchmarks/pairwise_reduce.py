"""Losses of all pairs: `pairwise_reduce` beside the dense program, its peers and the fused kernels.

Run as `python -m benchmarks.pairwise_reduce [--quick] [--only contrastive,cross_entropy]`.
Seconds are those of the CPU, the least of some runs, taken in turns; bytes are the most that
tensors made inside held at once, beyond inputs and parameters.
"""

from __future__ import annotations

import argparse
import importlib.util
import time
from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional as F

import gradtools.torch as gt
from gradtools.torch.live_bytes import LiveBytes

Ways = dict[str, Callable[[], Any]]
RUNS = 3


def measured(ways: Ways) -> dict[str, tuple[float, float]]:
    """CPU seconds and megabytes of each way, in turns."""
    seconds = {name: float("inf") for name in ways}
    for _ in range(RUNS):
        for name, run in ways.items():
            start = time.process_time()
            run()
            seconds[name] = min(seconds[name], time.process_time() - start)
    found = {}
    for name, run in ways.items():
        with LiveBytes() as live:
            run()
        found[name] = (seconds[name], live.peak / 1e6)
    return found


# --- contrastive -------------------------------------------------------------------------


class InfCL(torch.autograd.Function):
    """Inf-CL written out: the logsumexp of rows of x y^T, tile by tile, first order alone."""

    @staticmethod
    def forward(ctx: Any, x: Any, y: Any, size: int) -> Any:
        """The logsumexp of each row."""
        total = torch.full((len(x),), -float("inf"))
        for i in range(0, len(x), size):
            for j in range(0, len(y), size):
                tile = (x[i : i + size] @ y[j : j + size].T).logsumexp(1)
                total[i : i + size] = torch.logaddexp(total[i : i + size], tile)
        ctx.save_for_backward(x, y, total)
        ctx.size = size
        return total

    @staticmethod
    def backward(ctx: Any, ct: Any) -> Any:
        """The tiles once more."""
        x, y, total = ctx.saved_tensors
        dx, dy, size = torch.zeros_like(x), torch.zeros_like(y), ctx.size
        for i in range(0, len(x), size):
            for j in range(0, len(y), size):
                rows, columns = x[i : i + size], y[j : j + size]
                p = (rows @ columns.T - total[i : i + size, None]).exp_()
                p *= ct[i : i + size, None]
                dx[i : i + size] += p @ columns
                dy[j : j + size] += p.T @ rows
        return dx, dy, None


class Normalized(torch.nn.Module):
    """Features of length one."""

    def forward(self, x: Any) -> Any:
        """The rows of x over their norms."""
        return F.normalize(x, dim=1)


def contrastive(batch: int, width: int, dense: bool) -> Ways:
    """A step of an encoder of six layers under a symmetric contrastive loss."""
    torch.manual_seed(0)
    layers = [m for _ in range(6) for m in (torch.nn.Linear(width, width), torch.nn.GELU())]
    encoder = torch.nn.Sequential(*layers, Normalized())
    a, b = torch.randn(2, batch, width)
    scale = torch.tensor(10.0, requires_grad=True)
    chunked = gt.chunked(encoder, 512, keep_graphs=0, verify=False)

    def step(encode: Any, loss: Any) -> Any:
        return torch.autograd.grad(loss(encode(a), encode(b)), [*encoder.parameters(), scale])

    def whole(x: Any, y: Any) -> Any:
        logits, labels = scale * x @ y.T, torch.arange(len(x))
        return (F.cross_entropy(logits, labels) + F.cross_entropy(logits.T, labels)) / 2

    def inf_cl(x: Any, y: Any) -> Any:
        x = x * scale
        both = InfCL.apply(x, y, 1024), InfCL.apply(y, x, 1024)
        return (sum(both) / 2 - (x * y).sum(1)).mean()

    ways: Ways = {
        "chunked encoder, contrastive_loss": lambda: step(
            chunked, lambda x, y: gt.contrastive_loss(x, y, scale)
        ),
        "plain encoder, contrastive_loss": lambda: step(
            encoder, lambda x, y: gt.contrastive_loss(x, y, scale)
        ),
        "chunked encoder, Inf-CL": lambda: step(chunked, inf_cl),
    }
    if importlib.util.find_spec("sentence_transformers"):
        ways["sentence-transformers, cached"] = cached(encoder, a, b)
    if dense:
        ways["plain encoder, dense loss"] = lambda: step(encoder, whole)
    return ways


def cached(encoder: Any, a: Any, b: Any) -> Callable[[], Any]:
    """The same step by sentence-transformers' CachedMultipleNegativesRankingLoss, both ways."""
    from sentence_transformers import SentenceTransformer, losses

    class Encoder(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encoder = encoder

        def forward(self, features: Any) -> Any:
            return {"sentence_embedding": self.encoder(features["input_ids"])}

    model = SentenceTransformer(modules=[Encoder()], device="cpu")
    loss = losses.CachedMultipleNegativesRankingLoss(model, scale=10.0, mini_batch_size=512)

    def run() -> None:
        loss([{"input_ids": a}, {"input_ids": b}], None).backward()
        encoder.zero_grad()

    return run


# --- cross entropy -----------------------------------------------------------------------


def cross_entropy(tokens: int, width: int, classes: int) -> Ways:
    """Tokens against a vocabulary."""
    torch.manual_seed(0)
    h = torch.randn(tokens, width, requires_grad=True)
    w = (torch.randn(classes, width) / width**0.5).requires_grad_()
    t = torch.randint(classes, (tokens,))

    def rows(h: Any, w: Any) -> Any:  # Liger's way: the gradient of a chunk of rows at once
        total, dh, dw = 0.0, torch.empty_like(h), torch.zeros_like(w)
        for i in range(0, tokens, 512):
            part = h[i : i + 512].detach().requires_grad_()
            loss = F.cross_entropy(part @ w.T, t[i : i + 512], reduction="sum") / tokens
            dh[i : i + 512], g = torch.autograd.grad(loss, (part, w))
            dw += g
            total += loss.detach()
        return dh, dw

    slope = lambda f: lambda: torch.autograd.grad(f(h, w), (h, w))
    ways = {
        "linear_cross_entropy": slope(lambda h, w: gt.linear_cross_entropy(h, w, t)),
        "Liger's chunks of rows": lambda: rows(h, w),
        "dense": slope(lambda h, w: F.cross_entropy(h @ w.T, t)),
    }
    if hasattr(F, "linear_cross_entropy"):
        from torch.nn import LinearCrossEntropyOptions

        options = LinearCrossEntropyOptions()
        ways["F.linear_cross_entropy"] = slope(
            lambda h, w: F.linear_cross_entropy(h, w, t, options=options)
        )
    return ways


# --- attention ---------------------------------------------------------------------------


def attention(n: int, heads: int, width: int) -> dict[str, Ways]:
    """One layer's attention: gradient, jvp and Hessian product."""
    torch.manual_seed(0)
    q, k, v, u = torch.randn(4, 1, heads, n, width)
    from torch.nn.attention import SDPBackend, sdpa_kernel

    def math(q: Any) -> Any:
        with sdpa_kernel(SDPBackend.MATH):
            return F.scaled_dot_product_attention(q, k, v)

    ours = lambda q: gt.attention(q, k, v)
    fused = lambda q: F.scaled_dot_product_attention(q, k, v)

    def slope(f: Any) -> Any:
        def run() -> Any:
            xs = [z.clone().requires_grad_() for z in (q, k, v)]
            return torch.autograd.grad(f(*xs).sum(), xs)

        return run

    push = lambda f: lambda: gt.jvp(f, (q,), (u,))
    product = lambda f: lambda: gt.hvp(lambda q: (f(q) ** 2).sum(), (q,), (u,))
    return {
        "gradient": {
            "attention": slope(gt.attention),
            "fused kernel": slope(F.scaled_dot_product_attention),
        },
        "jvp": {"attention": push(ours), "math kernel": push(math)},
        "Hessian product": {"attention": product(ours), "math kernel": product(math)},
        "value": {"attention": lambda: ours(q), "fused kernel": lambda: fused(q)},
    }


def table(title: str, ways: Ways) -> None:
    """One part of the table, printed as it is measured."""
    for name, (seconds, megabytes) in measured(ways).items():
        print(f"| {title} | {name} | {seconds:.2f} | {megabytes:.0f} |", flush=True)


def main() -> None:
    """Measures and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="small sizes")
    parser.add_argument("--only", default="contrastive,cross_entropy,attention")
    args = parser.parse_args()
    parts = args.only.split(",")
    print("| program | way | CPU s | MB |\n|---|---|---|---|")
    if "contrastive" in parts:
        for batch, dense in ((1024, True),) if args.quick else ((4096, True), (16384, False)):
            table(f"contrastive step, B = {batch}", contrastive(batch, 256, dense))
    if "cross_entropy" in parts:
        sizes = (512, 128, 4096) if args.quick else (4096, 512, 32768)
        table("cross entropy, {} tokens, {} wide, {} classes".format(*sizes), cross_entropy(*sizes))
    if "attention" in parts:
        n = 512 if args.quick else 4096
        for what, ways in attention(n, 4, 64).items():
            table(f"attention, n = {n}: {what}", ways)


if __name__ == "__main__":
    main()
