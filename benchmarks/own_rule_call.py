"""Compares one eager call of a custom rule in PyTorch with a torch.autograd.Function.

The arrays are 8 x 8, so the time is mostly overhead. Times are minimum CPU times over short
interleaved rounds; other processes affect a minimum less than a median. `own_rules.py` also
measures larger arrays and JAX.
"""

from __future__ import annotations

import datetime
import pathlib
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.autograd.forward_ad as forward_ad
from own_rules import torch_functions

ROUNDS, CALLS = 150, 40


def minima(variants: dict[str, Callable[[], Any]]) -> dict[str, float]:
    """Returns the minimum time of each variant, in microseconds per call."""
    best = dict.fromkeys(variants, float("inf"))
    for run in variants.values():
        for _ in range(CALLS):
            run()
    for _ in range(ROUNDS):
        for name, run in variants.items():
            start = time.process_time()
            for _ in range(CALLS):
                run()
            best[name] = min(best[name], (time.process_time() - start) / CALLS * 1e6)
    return best


def tangent(f: Callable[..., Any], x: torch.Tensor, dx: torch.Tensor) -> Any:
    """Computes a jvp with dual tensors, including the entry into a dual level."""
    with forward_ad.dual_level():
        return forward_ad.unpack_dual(f(forward_ad.make_dual(x, dx)))


def main() -> None:
    torch.set_num_threads(1)
    x, ct = torch.randn(8, 8, requires_grad=True), torch.ones(8, 8)
    constant = x.detach()
    fs = torch_functions()
    what = {
        "value": {n: (lambda f=f: f(constant)) for n, f in fs.items()},
        "value, to be differentiated": {n: (lambda f=f: f(x)) for n, f in fs.items()},
        "value and gradient": {
            n: (lambda f=f: torch.autograd.grad(f(x), x, ct)) for n, f in fs.items()
        },
        "value and tangent": {
            n: (lambda f=f: tangent(f, constant, ct))
            for n, f in fs.items()
            if n not in ("by hand", "by hand, setup_context")
        },
    }
    lines = [
        f"# A call of a custom rule, {datetime.date.today()}, Python {sys.version.split()[0]}, "
        f"torch {torch.__version__}, one CPU thread",
        "",
        f"The rule defines exp and its derivative for 8 x 8 arrays in float32. Times are minimum "
        f"CPU times over {ROUNDS} interleaved rounds of {CALLS} calls. Ratios are relative "
        "to the first variant of each measurement; the first two variants have no forward mode.",
        "",
        "| measurement | variant | microseconds | relative to hand-written |",
        "|---|---|---|---|",
    ]
    for name, variants in what.items():
        found = minima(variants)
        for variant, us in found.items():
            hand = next(iter(found.values()))
            lines.append(f"| {name} | {variant} | {us:.1f} | {us / hand:.2f} |")
    text = "\n".join(lines) + "\n"
    print(text)
    (pathlib.Path(__file__).parent / "results" / "own_rule_call.md").write_text(
        text, encoding="utf-8"
    )


if __name__ == "__main__":
    main()
