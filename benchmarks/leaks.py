"""Measures the memory that remains allocated after ten thousand calls of each operator.

    python benchmarks/leaks.py --backend torch --calls 10000

The program counts Python objects, bytes of live arrays and cache entries (in JAX also compiled
programs), after some warm-up calls and again at the end. The operators are used as in
tests/support/every_operator.py. In PyTorch each call creates the operator from new functions, which
is the worst case for caches. In JAX the operator is created once, because eager JAX keeps programs
that it compiled for new functions (measured by tests/house/test_leaks.py).

A run measures the operators in order of increasing cost, each for at most --seconds, and stores the
results in out/leaks.jsonl, so an interrupted run can be continued. A second process with
--costly-first can start with the most expensive operators. With --report, the program only writes
results/leaks.md.
"""

from __future__ import annotations

import argparse
import datetime
import functools
import gc
import importlib
import json
import pathlib
import platform
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from importlib.metadata import version
from time import process_time
from typing import Any

HERE = pathlib.Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

from tests.support.every_operator import POINT, USES, Use, World, healthy  # noqa: E402, not installed

CALLS = 10_000
FEW = 20  # warm-up calls, which fill caches
SERIES = 3
PARTS = HERE.parent / "out" / "leaks.jsonl"
RESULTS = HERE / "results" / "leaks.md"
ONCE = {"torch": False, "jax": True}
COUNTS = ("objects", "bytes of arrays", "entries of caches", "compiled programs")


@dataclass(frozen=True)
class Run:
    """The time per call of one operator, and the counts before and after many calls."""

    backend: str
    version: str
    use: str
    calls: int
    milliseconds: float
    before: dict[str, int]
    after: dict[str, int]
    date: str

    @property
    def grown(self) -> dict[str, int]:
        """Returns the counts that grew by more than 30 and by more than one per hundred calls."""
        more = {k: self.after[k] - self.before[k] for k in self.after}
        return {k: n for k, n in more.items() if n > max(30, self.calls // 100)}


def calls_of(
    use: Use, gt: Any, x: Any, once: bool, part: Callable[[Any], Any] | None = None
) -> Callable[[], Any]:
    """Returns a function that calls an operator, which is created once or in each call."""
    world = lambda: World(gt, part or healthy(gt), x)
    made = use.make(world())
    return (lambda: made(x)) if once else lambda: use.run(world())


def square(x: Any) -> Any:
    return x * x


def grown(run: Callable[[], Any], backend: str, calls: int, few: int = 5) -> dict[str, float]:
    """Returns the growth of each count per call: the minimum over three series of calls.

    The minimum excludes objects that other threads of a test runner create during one series.
    """
    for _ in range(few):
        run()
    more: dict[str, float] = dict.fromkeys(alive(backend), float("inf"))
    for _ in range(SERIES):
        before = alive(backend)
        for _ in range(calls):
            run()
        after = alive(backend)
        new = {k: after[k] - before[k] for k in more}
        more = {k: min(n, new[k] / calls) for k, n in more.items() if new[k] >= 3}
        if not more:
            break  # the growth in earlier series was caused by warm-up
    return more


def alive(backend: str) -> dict[str, int]:
    """Counts live objects, bytes and cache entries."""
    while gc.collect():  # cache entries of dead objects are freed after a first collection
        pass
    objects = gc.get_objects()
    caches = [x for x in objects if type(x) is functools._lru_cache_wrapper]
    found = {"objects": len(objects)}
    del objects
    entries = sum(x.cache_info().currsize for x in caches)
    more = _alive_in_torch() if backend == "torch" else _alive_in_jax()
    return found | more | {"entries of caches": entries + more.get("entries of caches", 0)}


def _alive_in_torch() -> dict[str, int]:
    import torch

    arrays = [x for x in gc.get_objects() if type(x) in (torch.Tensor, torch.nn.Parameter)]
    storages = {x.untyped_storage()._cdata: x.untyped_storage().nbytes() for x in arrays}
    return {"bytes of arrays": sum(storages.values())}


def _alive_in_jax() -> dict[str, int]:
    import jax

    weak = [x for x in gc.get_objects() if type(x).__name__ == "WeakrefLRUCache"]
    return {
        "bytes of arrays": sum(x.nbytes for x in jax.live_arrays()),
        "entries of caches": sum(x.cache_info().currsize for x in weak),
        "compiled programs": len(jax.devices()[0].client.live_executables()),
    }


def measured(use: Use, backend: str, gt: Any, calls: int, seconds: float, part: Any = None) -> Run:
    """Calls an operator `calls` times, or fewer times if the time limit is reached."""
    run, done = calls_of(use, gt, gt.asarray(POINT), ONCE[backend], part), 0
    for _ in range(FEW):
        run()
    before, start = alive(backend), process_time()
    while done < calls and process_time() - start < seconds:
        run()
        done += 1
    spent = (process_time() - start) * 1e3 / done
    today = str(datetime.date.today())
    return Run(backend, version(backend), use.name, done, spent, before, alive(backend), today)


def by_cost(uses: list[Use], gt: Any, backend: str) -> list[Use]:
    """Sorts uses of operators by the time of one call, in ascending order."""
    spent = {}
    for use in uses:
        run = calls_of(use, gt, gt.asarray(POINT), ONCE[backend])
        run()
        start = process_time()
        run()
        spent[use.name] = process_time() - start
    return sorted(uses, key=lambda use: spent[use.name])


def kept() -> list[Run]:
    """Returns, for each use of an operator, the last of the runs with the most calls."""
    lines = PARTS.read_text(encoding="utf-8").splitlines() if PARTS.exists() else []
    runs = sorted([Run(**json.loads(line)) for line in lines], key=lambda r: r.calls)
    return list({(r.backend, r.use): r for r in runs if r.version == version(r.backend)}.values())


def keep(run: Run) -> None:
    PARTS.parent.mkdir(exist_ok=True)
    with PARTS.open("a", encoding="utf-8") as file:
        file.write(json.dumps(asdict(run)) + "\n")


# --- the report --------------------------------------------------------------------------


def report(runs: list[Run]) -> Iterator[str]:
    """Yields the lines of the page of results."""
    yield f"# Leaks, {datetime.date.today()}, Python {platform.python_version()}"
    yield ""
    yield (
        "The table shows the counts before many calls of an operator, and the growth in these "
        "calls. In PyTorch each call creates the operator from new functions; in JAX the operator "
        "is created once. In JAX, `mixed_partial`, `straight_through`, a jvp rule and a second "
        "derivative of `frozen` leave one object per call: a dead weak reference in JAX's caches, "
        "which JAX clears from time to time. Hand-written gradients leave the same reference "
        "(tests/house/test_leaks.py measures both). Some rows in JAX use x * x (--square) instead "
        "of sin(x) + x * x."
    )
    for backend in ONCE:
        found = [r for r in runs if r.backend == backend]
        if found:
            yield from table(backend, found)


def table(backend: str, runs: list[Run]) -> Iterator[str]:
    """Yields the lines of a table with one row for each operator, in order."""
    heads = [c for c in COUNTS if c in runs[0].after]
    order = [use.name for use in USES]
    lost = [use.name for use in USES if backend in use.backends]
    lost = [name for name in lost if name not in {r.use for r in runs}]
    grew = sum(bool(r.grown) for r in runs)
    yield from ("", f"## {backend} {runs[0].version}", "")
    full = sum(r.calls >= CALLS for r in runs)
    yield (
        f"{len(runs)} uses were measured, {full} of them with at least {CALLS:,} calls; the table "
        f"shows the number of calls. A count grew in {grew} of these uses."
    )
    if lost:
        yield f"These uses were not measured: {', '.join(lost)}."
    yield from ("", f"| use | calls | date | ms per call | {' | '.join(heads)} | grew |")
    yield "|---" * (len(heads) + 5) + "|"
    for run in sorted(runs, key=lambda r: order.index(r.use)):
        pairs = [f"{run.before[c]:,} {run.after[c] - run.before[c]:+,}" for c in heads]
        grew_by = ", ".join(run.grown) or "nothing"
        cells = [run.use, f"{run.calls:,}", run.date, f"{run.milliseconds:.2f}", *pairs, grew_by]
        yield f"| {' | '.join(cells)} |"


def main() -> None:
    """Runs the missing measurements, and writes results/leaks.md."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--backend", choices=tuple(ONCE), default="torch")
    parser.add_argument("--calls", type=int, default=CALLS)
    parser.add_argument(
        "--filter", default="", help="measure only uses with this text in their name"
    )
    parser.add_argument("--seconds", type=float, default=1e9, help="maximum seconds for each use")
    parser.add_argument(
        "--costly-first", action="store_true", help="start with the most expensive use"
    )
    parser.add_argument("--square", action="store_true", help="use the cheaper function x * x")
    parser.add_argument(
        "--name-once", action="store_true", help="measure one use of each public name"
    )
    parser.add_argument("--report", action="store_true", help="only write the page")
    options = parser.parse_args()
    if not options.report:
        measure_all(options)
    RESULTS.write_text("\n".join(report(kept())) + "\n", encoding="utf-8")


def measure_all(options: argparse.Namespace) -> None:
    """Measures the uses of operators that were not yet measured with this number of calls."""
    backend, calls = options.backend, options.calls
    gt = importlib.import_module(f"gradtools.{backend}")
    if backend == "jax":
        import jax

        jax.config.update("jax_enable_x64", True)
    uses = [u for u in USES if backend in u.backends and options.filter in u.name]
    uses = by_cost([u for u in uses if not measured_already(u, backend, calls)], gt, backend)
    for use in reversed(uses) if options.costly_first else uses:
        if measured_already(use, backend, calls, options.name_once):
            continue  # measured by a second process
        part = square if options.square else None
        run = measured(use, backend, gt, calls, options.seconds, part)
        print(f"{use.name:<36}{run.milliseconds:>10.2f} ms  {run.grown or 'flat'}", flush=True)
        keep(run)


def measured_already(use: Use, backend: str, calls: int, name_once: bool = False) -> bool:
    """Returns whether this use or, with name_once, a use of the same operator was measured."""
    full = {r.use for r in kept() if r.backend == backend and r.calls >= calls}
    alike = [u.name for u in USES if u.public == use.public] if name_once else [use.name]
    return not full.isdisjoint(alike)


if __name__ == "__main__":
    main()
