"""Steps that people run, beside the same by hand: paired in one process, one thread.

    python benchmarks/steps.py                    # writes results/steps.md and docs/measured.md
    python benchmarks/steps.py --only modules     # prints one part, and writes nothing

A figure is the median of processor seconds over interleaved runs, divided by that of the peer,
unless the row names another. "Before" is the same work before the work on speed began. Of each row
over its goal the operations and Python calls of one run are counted, ours and the peer's. The last
table is about growth: microseconds for each leaf, chunk and rule as their number grows.
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

_BIND = Primitive.bind.__code__  # by which JAX traces or runs an operation
RESULTS = pathlib.Path(__file__).parent / "results" / "steps.md"
FLOORS = {  # what ours does besides, by how a row begins
    "`value_and_grad(module)`": "a walk over the module, and a copy of each part with tensors, so "
    "that threads may share it; an alias of each parameter; a walk over f's graph for what it "
    "captures or loses; one of each gradient, which is differentiable again; and for "
    "`assign_gradients` a copy of each gradient, after all were checked",
    "the same by `make_functional`": "a copy of each module, an alias of each parameter, a walk "
    "over f's graph; `torch.func.functional_call`, the next row, costs nearly as much",
    "`minimax": "as `value_and_grad(module)`, of both players; buffers are saved",
    "microbatched": "as `value_and_grad(module)` for each chunk; sums apart from `.grad`, and "
    "their mean, which are new tensors",
    "`GradientAccumulator`": "as by `make_functional` for each chunk; sums apart from `.grad`, and "
    "their mean, which are new tensors",
    "`chunked`": "the first pass records each chunk's graph, and its leaves are found in it (by "
    "hand it runs under `no_grad`); random streams, buffers and modes are noted and put back",
    "the same, 16 chunks": "as above; what is done once for all chunks",
    "200 `straight": "structures, shapes and dtypes are compared; the node of a rule for both "
    "modes and all orders, in Python",
    "200 `clip_gradient` by norm": "a norm in float64, which cannot overflow; no division by zero; "
    "infinity is made NaN; the node of a rule for every transform, in Python",
    "200 `clip_gradient` by value": "the node of a rule for every transform, in Python",
    "`vmap(grad)`": "the batch's rule is made of one example's at each call; `gt.grad` watches "
    "each operation of f",
    "`host_function` in compiled": "an operator that has derivatives of any order and a vmap",
    "8 Hessian products": "one more backward pass, which transposes the gradient",
    "`hvp` of a module": "as `value_and_grad(module)`",
    "a Gauss-Newton": "f is evaluated for each of the two maps",
    "`mixed_partial`": "a dual number carries one tangent, so G runs with its tangent, 2 passes "
    "of work, for each of 4 directions, from the same state; no graph of G is kept",
    "forward Jacobian": "arguments and outputs are checked",
    "per-example": "the gradients of 64 examples are computed and held; norms alone need none",
    "`formula`": "f runs five times: to be recorded, and to be compared with the formula at three "
    "random points and at the given one",
    "JAX: trace of a `clip": "a norm that cannot overflow, NaN and zero kept",
    "JAX: trace of a rule": "fwd is traced on its own, then inlined; outputs and cotangents pass "
    "through primitives, whose derivatives are the rule at every order",
    "eager JAX: the gradient of a function": "arguments and the output are checked",
    "eager JAX: the gradient of a lambda": "arguments and the output are checked",
    "eager JAX: the gradient through": "an edit is a primitive for both modes and every order, or "
    "applied again at second order",
    "eager JAX: the gradient of a rule": "as the trace of a rule",
    "eager JAX: the gradient of 50": "each rule's maps are traced and compiled on their own",
    "JAX: trace and lowering": "rules and frozen functions are primitives, which are lowered one "
    "by one",
    "JAX: `chunked`": "the scan, traced by `jax.checkpoint`",
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
    """So that pages, which the system takes back and gives again as it likes, cost nothing."""
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
    """How many operations of PyTorch or JAX, and how many Python calls, one run takes."""
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
        f"Median processor time of {RUNS} interleaved runs (of the longest 5) over the peer's, in "
        f"one thread{_priority()}; the machine's load average was {os.getloadavg()[0]:.1f} on "
        f"{os.cpu_count()} cores at the end. Before: the work as it was when the goals were set.",
        "",
        "| work | peer | before | goal | now |",
        "|---|---|---|---|---|",
        *rows,
        "",
        "## Floors",
        "",
        "One run of each row over its goal: ours, the peer's (of `mixed_partial` one forward pass "
        "of G, of a trace that of `jax.custom_vjp`, else zero).",
        "",
        "| work | operations | Python calls | what ours are for |",
        "|---|---|---|---|",
        *floors,
        "",
        "## Growth: microseconds for each",
        "",
        "| | one | few | more | many |",
        "|---|---|---|---|---|",
        *growth,
    ]


if __name__ == "__main__":
    main()
