"""Measures the figures in docs/grad-or-backward.md: backward passes, zero gradients, data races.

The counted work and the optimizer steps are the same in each run. The results of races vary, so the
table shows the minimum and the maximum of several runs.
"""

from __future__ import annotations

import datetime
import pathlib
import platform
import threading
from collections.abc import Callable

import torch
from torch.utils.flop_counter import FlopCounterMode

import gradtools.torch as gt

THREADS, EACH, RUNS = 8, 100, 8
SUM = EACH * sum(range(1, THREADS + 1))  # thread i adds the gradient i
SIZES = (256, 100_000)
Work = Callable[[torch.nn.Parameter, float], int]


def backward_work() -> tuple[float, float]:
    """Returns the MFLOP of a backward pass for the first of two layers, and for both layers."""
    first, second = torch.nn.Linear(64, 64), torch.nn.Linear(64, 64)
    named, every = list(first.parameters()), [*first.parameters(), *second.parameters()]
    found = []
    for parameters in (named, every):
        loss = second(torch.relu(first(torch.ones(32, 64)))).sum()
        with FlopCounterMode(display=False) as counter:
            torch.autograd.grad(loss, parameters)
        found.append(counter.get_total_flops() / 1e6)
    return found[0], found[1]


def moved_by_zeros(optimizer: type[torch.optim.Optimizer], **options: float) -> float:
    """Returns the change of a weight in a step with gradient 0, after a step with gradient 1."""
    w = torch.nn.Parameter(torch.ones(1))
    steps = optimizer([w], lr=0.1, **options)
    w.grad = torch.ones(1)
    steps.step()
    before, w.grad = w.item(), torch.zeros(1)
    steps.step()
    return w.item() - before


def bfloat16_sum(dtype: str | None) -> float:
    """Returns the sum of 600 bfloat16 gradients of 1, accumulated in `dtype`."""
    total = gt.GradientAccumulator(dtype=dtype)
    for _ in range(600):
        total.add(torch.ones((), dtype=torch.bfloat16))
    return float(total.sum())


# --- threads, which share one parameter; each thread counts wrong results -----------------------


def read_beside_others(w: torch.nn.Parameter, i: float) -> int:
    wrong = 0
    for _ in range(EACH):
        before = w.grad.clone()
        (i * w).sum().backward()
        wrong += not bool((w.grad - before == i).all())
    return wrong


def pure(w: torch.nn.Parameter, i: float) -> int:
    found = (gt.grad(lambda w: (i * w).sum())(w) for _ in range(EACH))
    return sum(not bool((g == i).all()) for g in found)


def rebind(w: torch.nn.Parameter, i: float) -> int:
    for _ in range(EACH):
        w.grad = w.grad + torch.full_like(w, i)
    return 0


def add_in_place(w: torch.nn.Parameter, i: float) -> int:
    for _ in range(EACH):
        w.grad += torch.full_like(w, i)
    return 0


def backward(w: torch.nn.Parameter, i: float) -> int:
    for _ in range(EACH):
        (i * w).sum().backward()
    return 0


def accumulate(w: torch.nn.Parameter, i: float) -> int:
    for _ in range(EACH):
        gt.accumulate_gradients({"w": w}, {"w": torch.full_like(w, i)})
    return 0


def at_once(work: Work, size: int) -> tuple[int, torch.Tensor]:
    """Runs `work` in several threads; returns the number of wrong gradients, and `.grad`."""
    w = torch.nn.Parameter(torch.ones(size))
    w.grad = torch.zeros(size)
    wrong = [0] * THREADS
    start = threading.Barrier(THREADS)

    def run(k: int) -> None:
        start.wait()
        wrong[k] = work(w, float(k + 1))

    threads = [threading.Thread(target=run, args=(k,)) for k in range(THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return sum(wrong), w.grad


def span(found: list[float]) -> str:
    least, most = round(min(found)), round(max(found))
    return f"{least}" if least == most else f"{least} to {most}"


def wrong_row(what: str, work: Work) -> str:
    cells = [
        span([at_once(work, size)[0] for _ in range(RUNS)]) + f" of {THREADS * EACH} wrong"
        for size in SIZES
    ]
    return f"| {what} | {' | '.join(cells)} |"


def sum_row(what: str, work: Work) -> str:
    cells = []
    for size in SIZES:
        sums = [at_once(work, size)[1] for _ in range(RUNS)]
        cells.append(span([float(x) for s in sums for x in (s.min(), s.max())]))
    return f"| {what} | {' | '.join(cells)} |"


def figures() -> list[str]:
    named, every = backward_work()
    sgd = moved_by_zeros(torch.optim.SGD, momentum=0.9)
    adam, adamw = moved_by_zeros(torch.optim.Adam), moved_by_zeros(torch.optim.AdamW)
    narrow, wide = bfloat16_sum(None), bfloat16_sum("float32")
    return [
        f"- Backward pass of two layers: {named:.2f} MFLOP for the first, {every:.2f} for both.",
        f"- A zero gradient changes a weight: SGD {sgd:.2f}, Adam {adam:.3f}, AdamW {adamw:.3f}.",
        f"- The sum of 600 gradients of 1 is {narrow:.0f} in bfloat16 and {wide:.0f} in float32.",
    ]


def races() -> list[str]:
    return [
        "| operation of each thread | 256 entries | 100,000 entries |",
        "|---|---|---|",
        wrong_row("`.grad` after `backward()` minus `.grad` before", read_beside_others),
        sum_row("`w.grad = w.grad + g` in Python", rebind),
        sum_row("`w.grad += g`", add_in_place),
        sum_row("only `backward()`; the sum is read at the end", backward),
        wrong_row("pure gradients", pure),
        sum_row("`accumulate_gradients`", accumulate),
    ]


def main() -> None:
    python = platform.python_version()
    today = datetime.date.today()
    lines = [
        f"# grad or backward, {today}, Python {python}, torch {torch.__version__}",
        "",
        *figures(),
        "",
        f"{THREADS} threads start together and compute {EACH} gradients each. The cells show the "
        f"minimum and the maximum of {RUNS} runs; the correct sum is {SUM}.",
        "",
        *races(),
    ]
    text = "\n".join(lines) + "\n"
    print(text)
    (pathlib.Path(__file__).parent / "results" / "grad_or_backward.md").write_text(
        text, encoding="utf-8"
    )


if __name__ == "__main__":
    main()
