"""Compares every operator with hand-written code, in both frameworks: work, peak bytes, seconds.

Flops and bytes are counted (`tests/support/costs.py`), so the counts are the same on every machine,
and tests check the counts. Seconds are CPU seconds of one thread. Each round runs each method once,
in an order that rotates.

    python benchmarks/cost.py                    # writes results/cost.md
    python benchmarks/cost.py --device cuda      # writes results/cost_cuda.md, with wall-clock time
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

from tests.support.costs import cost  # noqa: E402, not installed
from tests.support.devices import placed  # noqa: E402

ROWS, WIDTH, ROUNDS, LEAST = 64, 128, 9, 2e-3
PEERS = {
    "torch": ("pytorch-revgrad", "sentence-transformers", "torchjd"),
    "jax": ("equinox", "optax"),
}
ELSEWHERE = {
    "sentence-transformers' gradient cache": "see [chunked.md](chunked.md)",
    "all_gather": "needs several processes or devices; tests count its communication",
    "vmap, compile": "the same as the framework's functions",
    "key, split": "random numbers, without counted operations",
}


@dataclass
class Row:
    """An implementation of an operator, with its counted costs and its seconds in each round."""

    backend: str
    operator: str
    way: str
    run: Callable[[], Any]
    flops: int
    peak: int
    seconds: list[float] = field(default_factory=list)


def counted(backend: str, operator: str, ways: dict[str, Any]) -> list[Row]:
    """Returns the rows of an operator, without times."""
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
    """Times the rows in turn; the first row's time determines the number of calls per round."""
    for row in rows:
        row.run()
    once = max(spent(rows[0].run, 3), 1e-6)
    calls = max(1, round(LEAST / once))
    for k in range(ROUNDS):
        first = k % len(rows)
        for row in rows[first:] + rows[:first]:
            row.seconds.append(spent(row.run, calls))


def spent(run: Callable[[], Any], calls: int) -> float:
    """Returns the seconds of a call: CPU time, or wall-clock time on a GPU."""
    now = time.perf_counter if ON_GPU else time.process_time
    start = now()
    for _ in range(calls):
        run()
    if ON_GPU:  # a call in JAX already waits for its results
        torch.cuda.synchronize()
    return (now() - start) / calls


def ratio(row: Row, base: Row) -> float:
    """Returns the median of the paired ratios of two rows' times."""
    pairs = zip(row.seconds, base.seconds, strict=True)
    return statistics.median(a / b for a, b in pairs)


def lines(rows: list[Row]) -> Iterator[str]:
    """Yields an operator's table row: gradtools, hand-written code, then other packages."""
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
    """Returns the peer packages that are not installed."""
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
    """Plots the ratios of gradtools to hand-written code for each operator: work, bytes, time."""
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
        axis.set_title(f"{title}, gradtools relative to hand-written code")
        axis.set_yticks(range(len(names)), names)
        axis.grid(axis="y", linewidth=0.2)
    axes[0].legend()
    figure.savefig(HERE / "results" / f"{name}.svg", metadata={"Date": None})


def written(found: list[list[Row]], where: str, name: str) -> str:
    packages = ["torch", "jax", *sorted(name for among in PEERS.values() for name in among)]
    versions = [f"{name} {version(name)}" for name in packages if name not in absent()]
    heads = ["operator", "backend", "MFLOP", "by hand", "peak, kB", "by hand", "ms", "by hand"]
    left = [f"{name} ({why})" for name, why in ELSEWHERE.items()]
    left += [f"{name} (not installed)" for name in absent()]
    left += [] if ARRAYS else ["JAX (no such device is available)"]
    text = [
        f"# The cost of every operator, {datetime.date.today()}, Python {sys.version.split()[0]}, "
        + ", ".join(versions),
        "",
        f"The function is a layer tanh(x w) with {ROWS} rows and width {WIDTH}, in float32 on "
        f"{where}. Flops and peak bytes are counted for each operation in PyTorch, and are taken "
        f"from XLA's analysis in JAX; JAX runs under jit. Times are medians over {ROUNDS} rounds, "
        "each of which runs each method once, and ratios are computed within a round. The column "
        "*peers* shows flops, peak bytes and the time relative to hand-written code.",
        "",
        *table([*heads, "time relative to hand-written", "peers"]),
        *(line for rows in found for line in lines(rows)),
        "",
        "Some operators do more than the hand-written code: `frozen` computes the inner function "
        "once more and does not keep its graph; `clip_gradient` first divides by the largest "
        "entry, so that the norm cannot overflow; `hvp` with forward over reverse "
        "and `chunked` use one more buffer in PyTorch.",
        "",
        "The table does not contain: " + "; ".join(left) + ".",
        "",
        f"![costs relative to hand-written code]({name}.svg)",
    ]
    return "\n".join(text) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description="Compare every operator with hand-written code.")
    parser.add_argument("--device", default="cpu", help="cpu or cuda, for both frameworks")
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
        except GradtoolsError as error:  # JAX may be a CPU-only build
            print(error)
        found = everything()
        where = torch.cuda.get_device_name() if ON_GPU else "one CPU thread"
    text = written(found, where, name)
    print(text)
    (HERE / "results").mkdir(exist_ok=True)
    (HERE / "results" / f"{name}.md").write_text(text, encoding="utf-8")
    picture(found, name)


ARRAYS: tuple[Any, ...] = ()  # empty if JAX is not available
ON_GPU = False

if __name__ == "__main__":
    main()
