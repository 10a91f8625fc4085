"""Ten thousand calls of each operator: what stays alive afterwards?

    python benchmarks/leaks.py --backend torch --calls 10000

Counted are Python's objects, the bytes of live arrays, and entries of caches (in JAX also the
compiled programs): after some calls that fill what is filled once, and again at the end. The
operators are used as in tests/support/every_operator.py. In PyTorch each call makes its operator of
new functions, which is the hardest for caches; in JAX it is made once, for eager JAX keeps what it
compiled for functions that are new in each call (see tests/house/test_leaks.py, which measures
that).

A run takes the operators in the order of their cost, each for --seconds at most, and keeps what it
found in out/leaks.jsonl, so one that was ended goes on where it was; a second process that begins
at the other end with --costly-first meets it in the middle. --report: writes
results/leaks.md of what there is so far.
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

from tests.support.every_operator import POINT, USES, Use, World, healthy  # noqa: E402, it is no package

CALLS = 10_000
FEW = 20  # calls that fill what is filled once
SERIES = 3
PARTS = HERE.parent / "out" / "leaks.jsonl"
RESULTS = HERE / "results" / "leaks.md"
ONCE = {"torch": False, "jax": True}
COUNTS = ("objects", "bytes of arrays", "entries of caches", "compiled programs")


@dataclass(frozen=True)
class Run:
    """Many calls of one operator: their cost, and what was alive before and after them."""

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
        """What grew by more than one in a hundred calls, and by more than comes and goes."""
        more = {k: self.after[k] - self.before[k] for k in self.after}
        return {k: n for k, n in more.items() if n > max(30, self.calls // 100)}


def calls_of(
    use: Use, gt: Any, x: Any, once: bool, part: Callable[[Any], Any] | None = None
) -> Callable[[], Any]:
    """One call of a use, of an operator that was made once or of a new one."""
    world = lambda: World(gt, part or healthy(gt), x)
    made = use.make(world())
    return (lambda: made(x)) if once else lambda: use.run(world())


def square(x: Any) -> Any:
    return x * x


def grown(run: Callable[[], Any], backend: str, calls: int, few: int = 5) -> dict[str, float]:
    """By how much each count grew a call at least, if it did so in each of three series of calls.

    The least of the three: what a test runner's own threads make meanwhile comes in one of them.
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
            break  # what grew before was filled once
    return more


def alive(backend: str) -> dict[str, int]:
    """What is alive now."""
    while gc.collect():  # what a cache forgets when something dies is freed only after that
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
    """Many calls of one use, or as many as fit into the seconds."""
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
    """The cheapest first."""
    spent = {}
    for use in uses:
        run = calls_of(use, gt, gt.asarray(POINT), ONCE[backend])
        run()
        start = process_time()
        run()
        spent[use.name] = process_time() - start
    return sorted(uses, key=lambda use: spent[use.name])


def kept() -> list[Run]:
    """The run of most calls of each use; of as many the last."""
    lines = PARTS.read_text(encoding="utf-8").splitlines() if PARTS.exists() else []
    runs = sorted([Run(**json.loads(line)) for line in lines], key=lambda r: r.calls)
    return list({(r.backend, r.use): r for r in runs if r.version == version(r.backend)}.values())


def keep(run: Run) -> None:
    PARTS.parent.mkdir(exist_ok=True)
    with PARTS.open("a", encoding="utf-8") as file:
        file.write(json.dumps(asdict(run)) + "\n")


# --- the report --------------------------------------------------------------------------


def report(runs: list[Run]) -> Iterator[str]:
    """The page of results."""
    yield f"# Leaks, {datetime.date.today()}, Python {platform.python_version()}"
    yield ""
    yield (
        "Live before many calls of an operator, and how much more after them. In PyTorch each call "
        "makes its operator of new functions; in JAX it is made once. The object a call of "
        "`mixed_partial`, `straight_through`, a jvp rule and a second "
        "derivative of `frozen` in JAX is a dead weak reference in JAX's own caches, which are "
        "emptied at times, as gradients written by hand leave one (tests/house/test_leaks.py "
        "measures both). One use of each public name is called 20,000 times; "
        "some in JAX of x * x alone (--square), in place of sin(x) + x * x."
    )
    for backend in ONCE:
        found = [r for r in runs if r.backend == backend]
        if found:
            yield from table(backend, found)


def table(backend: str, runs: list[Run]) -> Iterator[str]:
    """One row for each operator, in their order."""
    heads = [c for c in COUNTS if c in runs[0].after]
    order = [use.name for use in USES]
    lost = [use.name for use in USES if backend in use.backends]
    lost = [name for name in lost if name not in {r.use for r in runs}]
    grew = sum(bool(r.grown) for r in runs)
    yield from ("", f"## {backend} {runs[0].version}", "")
    full = sum(r.calls >= CALLS for r in runs)
    yield (
        f"{len(runs)} uses, {full} of them with {CALLS:,} calls or more, the others with as many "
        f"as are told; {grew or 'none'} grew."
    )
    if lost:
        yield f"Not measured: {', '.join(lost)}."
    yield from ("", f"| use | calls | on | ms a call | {' | '.join(heads)} | grew |")
    yield "|---" * (len(heads) + 5) + "|"
    for run in sorted(runs, key=lambda r: order.index(r.use)):
        pairs = [f"{run.before[c]:,} {run.after[c] - run.before[c]:+,}" for c in heads]
        grew_by = ", ".join(run.grown) or "nothing"
        cells = [run.use, f"{run.calls:,}", run.date, f"{run.milliseconds:.2f}", *pairs, grew_by]
        yield f"| {' | '.join(cells)} |"


def main() -> None:
    """Measures what is not measured yet, and writes the page."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--backend", choices=tuple(ONCE), default="torch")
    parser.add_argument("--calls", type=int, default=CALLS)
    parser.add_argument("--filter", default="", help="only uses with this text in their name")
    parser.add_argument("--seconds", type=float, default=1e9, help="at most these for each use")
    parser.add_argument("--costly-first", action="store_true", help="the costliest use first")
    parser.add_argument("--square", action="store_true", help="of x * x alone, which is cheaper")
    parser.add_argument("--name-once", action="store_true", help="one use of each public name")
    parser.add_argument("--report", action="store_true", help="only write the page")
    options = parser.parse_args()
    if not options.report:
        measure_all(options)
    RESULTS.write_text("\n".join(report(kept())) + "\n", encoding="utf-8")


def measure_all(options: argparse.Namespace) -> None:
    """Every use that was not measured with as many calls yet."""
    backend, calls = options.backend, options.calls
    gt = importlib.import_module(f"gradtools.{backend}")
    if backend == "jax":
        import jax

        jax.config.update("jax_enable_x64", True)
    uses = [u for u in USES if backend in u.backends and options.filter in u.name]
    uses = by_cost([u for u in uses if not measured_already(u, backend, calls)], gt, backend)
    for use in reversed(uses) if options.costly_first else uses:
        if measured_already(use, backend, calls, options.name_once):
            continue  # by the process that came from the other end
        part = square if options.square else None
        run = measured(use, backend, gt, calls, options.seconds, part)
        print(f"{use.name:<36}{run.milliseconds:>10.2f} ms  {run.grown or 'flat'}", flush=True)
        keep(run)


def measured_already(use: Use, backend: str, calls: int, name_once: bool = False) -> bool:
    """Whether this use was, or, name_once, another of its public name."""
    full = {r.use for r in kept() if r.backend == backend and r.calls >= calls}
    alike = [u.name for u in USES if u.public == use.public] if name_once else [use.name]
    return not full.isdisjoint(alike)


if __name__ == "__main__":
    main()
