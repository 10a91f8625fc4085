"""Every operator beside the same thing by hand, in both frameworks: work, peak bytes, seconds.

Flops and bytes are counted (`tests/support/costs.py`), so they are the same on every machine; the
tests assert them. Seconds are CPU seconds of one thread, in rounds in which each way runs once, in
an order that moves on.

    python benchmarks/cost.py                    # writes results/cost.md
    python benchmarks/cost.py --device cuda      # writes results/cost_cuda.md, by the clock
"""

from __future__ import annotations

import argparse
import datetime
import importlib.util
import pathlib
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from importlib.metadata import version
from typing import Any

import cost_jax
import cost_torch
import jax
import torch
from chunked import one_thread, table
from cost_torch import HAND, OURS
from tqdm import tqdm

import gradtools.jax as gj
import gradtools.torch as gt
from gradtools.errors import GradtoolsError

HERE = pathlib.Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

from tests.support.costs import cost  # noqa: E402, it is no package
from tests.support.devices import placed  # noqa: E402

ROWS, WIDTH, ROUNDS, LEAST = 64, 128, 9, 2e-3
PEERS = {
    "torch": ("pytorch-revgrad", "sentence-transformers", "torchjd"),
    "jax": ("equinox", "optax"),
}
ELSEWHERE = {
    "sentence-transformers' gradient cache": "in [chunked.md](chunked.md), whose step it needs",
    "all_gather": "needs several processes or devices; its tests count what it sends",
    "vmap, compile": "the framework's own under one name",
    "key, split": "draw random numbers, of which no operation is counted",
}


@dataclass
class Row:
    """One way of one operator: what was counted, and the seconds of each round."""

    backend: str
    operator: str
    way: str
    run: Callable[[], Any]
    flops: int
    peak: int
    seconds: list[float] = field(default_factory=list)


def counted(backend: str, operator: str, ways: dict[str, Any]) -> list[Row]:
    """The rows of an operator, not timed yet."""
    rows = []
    for way, run in ways.items():
        args = () if backend == "torch" else ARRAYS
        found = cost(gt if backend == "torch" else gj, run, *args)
        timed = run if backend == "torch" else partial(ready, jax.jit(run))
        rows.append(Row(backend, operator, way, timed, found.flops, found.peak_bytes))
    return rows


def ready(run: Callable[..., Any]) -> Any:
    return jax.block_until_ready(run(*ARRAYS))


def time_them(rows: list[Row]) -> None:
    """Rounds of paired runs, each of as many calls as take a little while by hand."""
    for row in rows:
        row.run()
    once = max(spent(rows[0].run, 3), 1e-6)
    calls = max(1, round(LEAST / once))
    for k in range(ROUNDS):
        first = k % len(rows)
        for row in rows[first:] + rows[:first]:
            row.seconds.append(spent(row.run, calls))


def spent(run: Callable[[], Any], calls: int) -> float:
    """Seconds of a call: the CPU's, so that other programs count little, or by the clock."""
    now = time.perf_counter if ON_GPU else time.process_time
    start = now()
    for _ in range(calls):
        run()
    if ON_GPU:  # JAX's results are waited for at each call
        torch.cuda.synchronize()
    return (now() - start) / calls


def ratio(row: Row, base: Row) -> float:
    """The median of the paired ratios."""
    pairs = zip(row.seconds, base.seconds, strict=True)
    return statistics.median(a / b for a, b in pairs)


def lines(rows: list[Row]) -> Iterator[str]:
    """An operator's line: ours and by hand side by side, then its peers."""
    ours, hand, *peers = rows
    others = ", ".join(
        f"{p.way}: {p.flops / 1e6:.2f} MFLOP, {p.peak / 1e3:.0f} kB, {ratio(p, hand):.2f}"
        for p in peers
    )
    medians = [1e3 * statistics.median(row.seconds) for row in (ours, hand)]
    yield (
        f"| {ours.operator} | {ours.backend} | {ours.flops / 1e6:.2f} | {hand.flops / 1e6:.2f} | "
        f"{ours.peak / 1e3:.0f} | {hand.peak / 1e3:.0f} | {medians[0]:.3f} | {medians[1]:.3f} | "
        f"{ratio(ours, hand):.2f} | {others} |"
    )


def absent() -> list[str]:
    """The peers that are not installed."""
    module = lambda name: name.replace("-", "_")
    names = [name for among in PEERS.values() for name in among]
    return [name for name in names if importlib.util.find_spec(module(name)) is None]


def everything() -> list[list[Row]]:
    cases = [("torch", *item) for item in cost_torch.cases(ROWS, WIDTH).items()]
    cases += [("jax", *item) for item in cost_jax.cases().items() if ARRAYS]
    found = []
    with tqdm(cases, unit="operator", disable=None) as progress:
        for backend, operator, ways in progress:
            progress.set_description(f"{backend} {operator}")
            found.append(counted(backend, operator, ways))
            time_them(found[-1])
            check(found[-1])
    return sorted(found, key=lambda rows: rows[0].operator)


def check(rows: list[Row]) -> None:
    assert [row.way for row in rows[:2]] == [OURS, HAND], rows[0].operator


def picture(found: list[list[Row]], name: str) -> None:
    """Ours over by hand, for each operator: work, bytes, time."""
    import matplotlib

    matplotlib.use("svg")
    import matplotlib.pyplot as plt

    plt.rcParams |= {"svg.hashsalt": "cost", "font.size": 8}
    figure, axes = plt.subplots(1, 3, figsize=(12, 8), sharey=True, layout="constrained")
    names = sorted({rows[0].operator for rows in found}, reverse=True)
    measures = {
        "flops": lambda ours, hand: ours.flops / hand.flops,
        "peak bytes": lambda ours, hand: ours.peak / hand.peak,
        "time": ratio,
    }
    for axis, (title, of) in zip(axes, measures.items(), strict=True):
        for backend, marker, colour in (("torch", "o", "tab:red"), ("jax", "s", "tab:blue")):
            mine = [rows for rows in found if rows[0].backend == backend]
            heights = [names.index(rows[0].operator) for rows in mine]
            label = {"torch": "PyTorch", "jax": "JAX, jit"}[backend]
            axis.plot(
                [of(*rows[:2]) for rows in mine],
                heights,
                marker,
                color=colour,
                label=label,
                alpha=0.8,
            )
        axis.axvline(1, color="grey", linewidth=0.5)
        axis.set_title(f"{title}, gradtools over by hand")
        axis.set_yticks(range(len(names)), names)
        axis.grid(axis="y", linewidth=0.2)
    axes[0].legend()
    figure.savefig(HERE / "results" / f"{name}.svg", metadata={"Date": None})


def written(found: list[list[Row]], where: str, name: str) -> str:
    packages = ["torch", "jax", *sorted(name for among in PEERS.values() for name in among)]
    versions = [f"{name} {version(name)}" for name in packages if name not in absent()]
    heads = ["operator", "backend", "MFLOP", "by hand", "peak, kB", "by hand", "ms", "by hand"]
    left = [f"{name}: {why}" for name, why in ELSEWHERE.items()]
    left += [f"{name}: not installed" for name in absent()]
    left += [] if ARRAYS else ["JAX: it has no such device here"]
    text = [
        f"# What every operator costs, {datetime.date.today()}, Python {sys.version.split()[0]}, "
        + ", ".join(versions),
        "",
        f"A layer tanh(x w) of {ROWS} rows and width {WIDTH}, float32, {where}. Flops and "
        "peak bytes are those of PyTorch's operations and of XLA's analysis; JAX is jitted. "
        "Milliseconds are "
        f"medians of {ROUNDS} rounds in which each way runs once; ratios are of the same round. "
        "Peers: flops, peak bytes, time over by hand.",
        "",
        *table([*heads, "time over by hand", "peers"]),
        *(line for rows in found for line in lines(rows)),
        "",
        "Where ours does more: `frozen` computes the inner function once more and keeps no graph "
        "of it; `clip_gradient` divides by the largest entry first, so that the norm cannot "
        "overflow; `hvp` forward over reverse and `chunked` in PyTorch hold one buffer more.",
        "",
        "Not in the table: " + "; ".join(left) + ".",
        "",
        f"![ours over by hand]({name}.svg)",
    ]
    return "\n".join(text) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description="Every operator beside the same thing by hand.")
    parser.add_argument("--device", default="cpu", help="cpu, or cuda: of both frameworks")
    device = parser.parse_args().device
    global ARRAYS, ON_GPU
    ON_GPU = device != "cpu"
    name = f"cost_{device.replace(':', '_')}" if ON_GPU else "cost"
    one_thread()
    with ExitStack() as inside:
        inside.enter_context(placed("torch", device))
        try:
            inside.enter_context(placed("jax", device))
            ARRAYS = cost_jax.arrays(ROWS, WIDTH)
        except GradtoolsError as error:  # JAX's build may be for the CPU alone
            print(error)
        found = everything()
        where = torch.cuda.get_device_name() if ON_GPU else "one CPU thread"
    text = written(found, where, name)
    print(text)
    (HERE / "results").mkdir(exist_ok=True)
    (HERE / "results" / f"{name}.md").write_text(text, encoding="utf-8")
    picture(found, name)


ARRAYS: tuple[Any, ...] = ()  # empty: without JAX
ON_GPU = False

if __name__ == "__main__":
    main()
