"""Ten thousand calls of each operator: what stays alive afterwards?

    python benchmarks/leaks.py --backend torch --calls 10000

Counted are Python's objects, the bytes of live arrays, and entries of caches of compiled functions:
after some calls that fill what is filled once, then after each of up to three series. What grows
in each of them leaks. Operators are used as in tests/every_operator.py, each call with new
functions, which is the hardest for caches.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from time import perf_counter
from typing import Any

FEW = 5  # calls that fill what is filled once
SERIES = 3


def grown(run: Callable[[], Any], backend: str, calls: int) -> dict[str, int]:
    """By how much each count grew in `calls` calls, if it did so in each of three series."""
    for _ in range(FEW + calls):
        run()
    more: dict[str, int] = {}
    for _ in range(SERIES):
        before = alive(backend)
        for _ in range(calls):
            run()
        after = alive(backend)
        more = {k: after[k] - before[k] for k in after if after[k] - before[k] >= _noise(calls)}
        if not more:
            break  # what grew before was filled once
    return more


def _noise(calls: int) -> int:
    return max(3, calls // 10)


def alive(backend: str) -> dict[str, int]:
    """What is alive now."""
    gc.collect()
    found = {"objects": len(gc.get_objects())}
    return found | (_alive_in_torch() if backend == "torch" else _alive_in_jax())


def _alive_in_torch() -> dict[str, int]:
    import torch

    arrays = [x for x in gc.get_objects() if type(x) in (torch.Tensor, torch.nn.Parameter)]
    storages = {x.untyped_storage()._cdata: x.untyped_storage().nbytes() for x in arrays}
    return {"bytes of arrays": sum(storages.values())}


def _alive_in_jax() -> dict[str, int]:
    import jax

    return {"bytes of arrays": sum(x.nbytes for x in jax.live_arrays())}


def main() -> None:
    """Prints a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--backend", choices=("torch", "jax"), default="torch")
    parser.add_argument("--calls", type=int, default=10_000)
    parser.add_argument("--filter", default="", help="only uses with this text in their name")
    options = parser.parse_args()
    sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
    from every_operator import POINT, USES, World, healthy

    gt = importlib.import_module(f"gradtools.{options.backend}")
    if options.backend == "jax":
        import jax

        jax.config.update("jax_enable_x64", True)
    x = gt.asarray(POINT)
    print(f"{'use':<36}{'ms a call':>10}  grew in {options.calls} calls")
    for use in USES:
        if options.filter in use.name and options.backend in use.backends:
            ran, start = [0], perf_counter()

            def run(use: Any = use, ran: list[int] = ran) -> None:
                ran[0] += 1
                use.run(World(gt, healthy(gt), x))

            more = grown(run, options.backend, options.calls)
            spent = (perf_counter() - start) * 1e3 / ran[0]
            print(f"{use.name:<36}{spent:>10.2f}  {more or 'nothing'}", flush=True)


if __name__ == "__main__":
    main()
