"""Compares common steps with hand-written code, in one process with one thread.

    python benchmarks/steps.py                    # writes results/steps.md and docs/measured.md
    python benchmarks/steps.py --only modules     # prints one part, and writes nothing

A figure is the median CPU time over interleaved runs, divided by the peer's time, unless the row
names another quantity. "Before" is the figure at the time when the goal was set. For each row whose
figure exceeds its goal, the operations and Python calls of one run of gradtools and of the peer are
counted. The last table shows microseconds per leaf, chunk, rule or call for programs of growing
size.
"""

from __future__ import annotations

import argparse
import ctypes
import datetime
import os
import pathlib
import platform
import sys
from collections.abc import Iterator
from types import FrameType

os.environ["XLA_FLAGS"] = "--xla_cpu_multi_thread_eigen=false " + os.environ.get("XLA_FLAGS", "")

import figures
import jax
import steps_jax
import steps_torch
import torch
from jax.extend.core import Primitive
from steps_rows import RUNS, Row, Run, seconds

_BIND = Primitive.bind.__code__  # the function by which JAX traces or runs an operation
RESULTS = pathlib.Path(__file__).parent / "results" / "steps.md"
FLOORS = {  # the additional work of gradtools, keyed by the beginning of the row's name
    "`value_and_grad(module)`": "a traversal of the module; a copy of each submodule with tensors, "
    "for thread safety; an alias of each parameter; a traversal of the graph of f for captured "
    "tensors; an alias of each gradient, which can be differentiated; and, for "
    "`assign_gradients`, checks and a copy of each gradient",
    "`make_functional`, MLP of 400 tensors": "a copy of each module, an alias of each parameter, "
    "and a traversal of the graph of f; `torch.func.functional_call` in the next row costs nearly "
    "as much",
    "`minimax": "the same as `value_and_grad(module)` for both players; buffers are saved",
    "microbatched": "the same as `value_and_grad(module)` for each chunk; sums outside of `.grad`, "
    "and their mean, which are new tensors",
    "`GradientAccumulator`": "the same as with `make_functional` for each chunk; sums outside of "
    "`.grad`, and their mean, which are new tensors",
    "`chunked`, MLP of 64, 16 chunks": "the same as for 256 chunks, and work that is done once for "
    "all chunks",
    "`chunked`": "the first pass records the graph of each chunk to find its leaves (the "
    "hand-written code runs under `no_grad`); random generators, buffers and modes are saved and "
    "restored",
    "200 `straight": "structures, shapes and dtypes are compared; the autograd node of a rule runs "
    "in Python, to support both modes and all orders",
    "200 `clip_gradient` by norm": "a norm in float64, which cannot overflow; no division by zero; "
    "infinity becomes NaN; the autograd node of a rule runs in Python, to support all transforms",
    "200 `clip_gradient` by value": "the autograd node of a rule runs in Python, to support all "
    "transforms",
    "`vmap(grad)`": "each call derives the batched rule from the rule of one example; `gt.grad` "
    "intercepts each operation of f",
    "`host_function` in compiled": "an operator with derivatives of any order and a vmap rule",
    "8 Hessian products": "one more backward pass, which transposes the pullback of the gradient",
    "`hvp` of a module": "the same as `value_and_grad(module)`",
    "a Gauss-Newton": "f is evaluated for each of the two linear maps",
    "`mixed_partial`": "a dual number has one tangent, so G is evaluated in forward mode for each "
    "of the 4 directions, at about twice the cost of G, from the same random state; no graph of G "
    "is stored",
    "forward Jacobian": "arguments and outputs are checked",
    "per-example": "the gradients of 64 examples are computed and stored; to compute only their "
    "norms, the gradients need not be stored",
    "`formula`": "f is evaluated five times: once to record it, and four times to compare it with "
    "the formula (at three random points and at the arguments)",
    "JAX: trace of a `clip": "a norm that cannot overflow, and that preserves NaN and zero",
    "JAX: trace of a rule": "fwd is traced separately and then inlined; outputs and cotangents "
    "pass through primitives, which define the derivatives of every order",
    "eager JAX: the gradient of a function": "arguments and the output are checked",
    "eager JAX: the gradient of a lambda": "arguments and the output are checked",
    "eager JAX: the gradient through": "an edit is a primitive that supports both modes and every "
    "order, or is applied again at second order",
    "eager JAX: the gradient of a rule": "the same as for the trace of a rule",
    "eager JAX: the gradient of 50": "the maps of each rule are traced and compiled separately",
    "JAX: trace and lowering": "rules and frozen functions are primitives, which are lowered "
    "separately",
    "JAX: `chunked`": "`jax.checkpoint` traces the scan",
}


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--only", help="the name of one part")
    given = options.parse_args()
    torch.set_num_threads(1)
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})  # JAX has one thread for each core
    _keep_freed_memory()
    rows, floors = [], []
    for part in (*steps_torch.PARTS, *steps_jax.PARTS):
        if given.only not in (None, part.__name__):
            continue
        torch.manual_seed(0)
        for row in part():
            figure = row.figure()
            print(f"{figure:6.2f}  {row.work} | {row.peer}", file=sys.stderr, flush=True)
            rows.append(_line(row, figure))
            if row.goal is not None and round(figure, 2) > row.goal:
                floors.append(_floor(row))
    text = "\n".join(_page(rows, floors, [] if given.only else [*_growth()])) + "\n"
    print(text)
    if given.only is None:
        RESULTS.write_text(text, encoding="utf-8")
        figures.write(figures.MEASURED)


def _keep_freed_memory() -> None:
    """Keeps freed memory in the process, so that page faults do not affect the times."""
    if sys.platform == "linux":
        trim, mapped = (-1, 1 << 30), (-3, 1 << 25)  # M_TRIM_THRESHOLD, M_MMAP_THRESHOLD
        for name, size in (trim, mapped):
            assert ctypes.CDLL(None).mallopt(name, size)


def _line(row: Row, figure: float) -> str:
    goal = "" if row.goal is None else f"{row.goal:g}"
    return f"| {row.work} | {row.peer} | {row.before} | {goal} | {figure:.2f} |"


def _floor(row: Row) -> str:
    runs = row.counted or (row.ours, row.theirs or (lambda: None))
    cells = [_counted(run) for run in runs]
    both = [", ".join(filter(None, pair)) for pair in zip(*cells, strict=True)]
    floor = next((text for start, text in FLOORS.items() if row.work.startswith(start)), "")
    return f"| {row.work} | {' | '.join(both)} | {floor} |"


def _counted(run: Run) -> tuple[str, str]:
    """Counts the operations of PyTorch or JAX and the Python calls of one run."""
    run()
    with torch.autograd.profiler.profile() as profile:
        run()
    own = [e for e in profile.function_events if e.name.startswith("aten::")]
    outer = [e for e in own if not (e.cpu_parent and e.cpu_parent.name.startswith("aten::"))]
    calls = bound = 0

    def count(frame: FrameType, event: str, arg: object) -> None:
        nonlocal calls, bound
        calls += event == "call"
        bound += event == "call" and frame.f_code is _BIND

    sys.setprofile(count)
    try:
        run()
    finally:
        sys.setprofile(None)
    return f"{len(outer) or bound:,}", f"{calls:,}"


def _growth() -> Iterator[str]:
    for name, of, sizes in steps_torch.growth():
        each = [1e6 * seconds(of(n), count=5)[0] / count for n, count in sizes.items()]
        cells = [f"{n:,}: {t:.0f}" for n, t in zip(sizes, each, strict=True)]
        yield f"| {name} | {' | '.join(cells)} |"


def _priority() -> str:
    ordinary = not hasattr(os, "SCHED_RR") or os.sched_getscheduler(0) != os.SCHED_RR
    return "" if ordinary else " of real-time priority"


def _page(rows: list[str], floors: list[str], growth: list[str]) -> list[str]:
    return [
        f"# Steps, {datetime.date.today()}, Python {platform.python_version()}, "
        f"torch {torch.__version__}, jax {jax.__version__}",
        "",
        f"Figures are median CPU times over {RUNS} interleaved runs (5 for the longest "
        f"rows), relative to the peer, in one thread{_priority()}. The load average was "
        f"{os.getloadavg()[0]:.1f} on {os.cpu_count()} cores at the end. The column *before* shows "
        "the figures at the time when the goals were set.",
        "",
        "| work | peer | before | goal | now |",
        "|---|---|---|---|---|",
        *rows,
        "",
        "## Floors",
        "",
        "For each row whose figure exceeds its goal, the table shows the numbers of operations and "
        "Python calls of one run, first for gradtools and then for the peer. The peer of "
        "`mixed_partial` is one forward pass of G, and the peer of a trace is the trace of "
        "`jax.custom_vjp`. In a row without a peer, the second number is 0.",
        "",
        "| work | operations | Python calls | additional work of gradtools |",
        "|---|---|---|---|",
        *floors,
        "",
        "## Growth: microseconds for each leaf, chunk, rule or call",
        "",
        "| | one | few | more | many |",
        "|---|---|---|---|---|",
        *growth,
    ]


if __name__ == "__main__":
    main()
