"""The scenario matrix run on this machine, and its support table: `gradtools check`.

Each backend's cells are computed and judged one by one; a `CellVerdict` keeps what came of each.
The table has a row for each operator and says how many of its cells held, in which dtypes and
transforms, and the worst error in units of the tolerance. What is left out is listed with its
reason. The table of docs/support.md is `support_table()`: it depends on the cells alone, and not on
a machine.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from importlib.metadata import version
from tempfile import TemporaryDirectory
from typing import Any

import gradtools
from gradtools.conformance.matrix import (
    ARGUMENTS,
    DTYPES,
    OPERATORS,
    TRANSFORMS,
    Cell,
    cells,
    smooth_programs,
)
from gradtools.testing.cross_checking.devices import described, placed
from gradtools.testing.cross_checking.precision import described_precision, highest_precision
from gradtools.testing.cross_checking.sides import in_double_precision

BACKENDS = ("torch", "jax")
_QUICK, _QUICK_MORE = 9, 3  # of every ninth program each third cell
_KEPT = 250  # cells after which JAX forgets what it compiled


@dataclass(frozen=True)
class CellVerdict:
    """What came of one cell.

    Attributes:
        backend: Where it ran.
        cell: The cell; with a reason if it was left out.
        worst: The largest error in units of the tolerance; NaN where nothing was found.
        oracle: What that error was found by.
        failure: What went wrong, in words; empty where it held.
    """

    backend: str
    cell: Cell
    worst: float = 0.0
    oracle: str = ""
    failure: str = ""


def judged(cell: Cell, backend: str) -> CellVerdict:
    """Runs one cell, unless it is left out."""
    from gradtools.conformance.trial import compared

    if cell.reason:
        return CellVerdict(backend, cell)
    try:
        outcomes = compared(cell, backend)
    except Exception as error:  # a cell that raises is a result of the check
        return CellVerdict(backend, cell, float("nan"), "", f"{type(error).__name__}: {error}")
    if not outcomes:
        return CellVerdict(backend, cell, float("nan"), "", "nothing was compared")
    worst = max(outcomes, key=lambda o: float("inf") if o.error != o.error else o.error)
    failure = "" if worst else f"{worst.oracle}: {worst.error:.3g} tolerances {worst.remark}"
    return CellVerdict(backend, cell, worst.error, worst.oracle, failure.strip())


def chosen(backend: str, quick: bool = False, containing: str = "") -> list[Cell]:
    """The cells of a backend, those that are left out among them.

    Args:
        backend: "torch" or "jax".
        quick: A part of them, and none that is compiled.
        containing: A part of the cell's name, such as "hvp" or "vmap".
    """
    result = [cell for cell in cells(backend) if containing in str(cell)]
    if quick:
        few = {p.name for p in smooth_programs()[::_QUICK]}  # what JAX compiled serves again
        result = [c for c in result if c.program.name in few and c.transform != "compile"]
        result = result[::_QUICK_MORE]
    return sorted(result, key=lambda cell: cell.program.name)  # what JAX compiled serves again


# --- tables ------------------------------------------------------------------------------


def support_table() -> str:
    """What is tried, as Markdown: operator by backend, with the number of cells that run.

    Example:
        >>> from gradtools.conformance.checking import support_table
        >>> support_table().splitlines()[0]
        '| operator | order | dtypes | PyTorch | not in PyTorch | JAX | not in JAX |'
    """
    head = "| operator | order | dtypes | PyTorch | not in PyTorch | JAX | not in JAX |"
    every = {backend: list(cells(backend)) for backend in BACKENDS}
    met = dict.fromkeys(cell.operator for cell in every["torch"])
    names = dict.fromkeys([*(o for o in OPERATORS if o in met), *met])
    rows = [_support_row(operator, every) for operator in names]
    return "\n".join([head, "|---|---|---|---|---|---|---|", *rows])


def _support_row(operator: Any, every: dict[str, list[Cell]]) -> str:
    parts = [operator.name, str(operator.order)]
    for backend in BACKENDS:
        mine = [cell for cell in every[backend] if cell.operator == operator]
        run = [cell for cell in mine if not cell.reason]
        if backend == "torch":
            parts.append(_of_all([cell.dtype for cell in run], DTYPES))
        parts += [str(len(run)), _lacking(run, operator) if run else mine[0].reason]
    return "| " + " | ".join(parts) + " |"


def _of_all(found: Sequence[str], known: Sequence[str]) -> str:
    missing = [name for name in known if name not in found]
    if not missing:
        return "all"
    return ", ".join(name for name in known if name in found) or "–"


def _lacking(run: Sequence[Cell], operator: Any) -> str:
    """Transforms and ways of passing arguments in which no cell of the operator runs."""
    aux = () if operator.aux else ("aux",)
    columns = [*TRANSFORMS, *(a for a in ARGUMENTS if a not in aux)]
    met = {cell.transform for cell in run} | {cell.arguments for cell in run}
    return ", ".join(name for name in columns if name not in met) or "–"


_SHORT = {"checkpoint": "checkp.", "complex128": "c128", "complex64": "c64", "bfloat16": "bf16"}


def worst_table(verdicts: Sequence[CellVerdict]) -> str:
    """Operator and backend by transform and dtype: the worst error in units of the tolerance."""
    heads = "".join(f"{_SHORT.get(name, name):>9}" for name in (*TRANSFORMS, *DTYPES))
    lines = [f"{'operator':<27}{'backend':<8}{'order':>5}{'held':>10}{heads}"]
    groups: dict[tuple[str, str], list[CellVerdict]] = {}
    for verdict in verdicts:
        if not verdict.cell.reason:
            groups.setdefault((verdict.cell.operator.name, verdict.backend), []).append(verdict)
    return "\n".join([*lines, *(_worst_row(*key, groups[key]) for key in sorted(groups))])


def _worst_row(name: str, backend: str, group: Sequence[CellVerdict]) -> str:
    held = f"{sum(not v.failure for v in group)}/{len(group)}"
    by_transform = [_worst(v.worst for v in group if v.cell.transform == t) for t in TRANSFORMS]
    by_dtype = [_worst(v.worst for v in group if v.cell.dtype == d) for d in DTYPES]
    errors = "".join(f"{text:>9}" for text in (*by_transform, *by_dtype))
    return f"{name:<27}{backend:<8}{group[0].cell.operator.order:>5}{held:>10}{errors}"


def _worst(errors: Iterable[float]) -> str:
    """The largest; NaN, which is what a failure without a number has, is larger than all."""
    result = list(errors)
    if any(error != error for error in result):
        return "failed"
    return f"{max(result):.0e}" if result else "-"


def left_out(verdicts: Sequence[CellVerdict]) -> dict[tuple[str, str], int]:
    """How many cells each backend leaves out for each reason."""
    return dict(Counter((v.backend, v.cell.reason) for v in verdicts if v.cell.reason))


# --- the command -------------------------------------------------------------------------


def check(options: argparse.Namespace) -> int:
    """Runs the matrix: 0 if every cell held, 1 if one did not, 2 if it could not be run."""
    wanted = BACKENDS if options.backend == "both" else (options.backend,)
    here = [name for name in wanted if name in gradtools.available_backends()]
    cells = [(b, c) for b in here for c in chosen(b, options.quick, options.filter)]
    if all(cell.reason for _, cell in cells):
        what = f"no cell that runs has {options.filter!r} in its name" if here else "not installed"
        print(f"gradtools check: {' and '.join(wanted)}: {what}", file=sys.stderr)
        return 2
    if "torch" in here:
        _one_thread()
    if options.quick and "jax" in here:
        _compile_quickly()
    with ExitStack() as inside:
        if "jax" in here:
            inside.enter_context(in_double_precision(True))
            inside.enter_context(programs_kept(inside.enter_context(TemporaryDirectory())))
        for name in here:
            inside.enter_context(placed(name, options.device))
        inside.enter_context(highest_precision(here))
        verdicts = [_counted(i, *both) for i, both in enumerate(_progress(cells))]
        shown = _on_gpu(options, here)
        _print(options, here, verdicts, shown)
    return 1 if any(v.failure for v in verdicts) or any(map(_failed, shown.values())) else 0


def _on_gpu(options: argparse.Namespace, here: Sequence[str]) -> dict[str, str]:
    """What only a GPU shows, in PyTorch: by scenario what failed, or why it was left out."""
    if "torch" not in here or options.device.partition(":")[0] not in ("gpu", "cuda"):
        return {}
    from gradtools.conformance import gpu

    return gpu.failures()


def _failed(found: str) -> bool:
    return bool(found) and not found.startswith("left out: ")


def _one_thread() -> None:
    """The arrays are tiny: threads would wait for each other."""
    import torch

    torch.set_num_threads(1)


def _compile_quickly() -> None:
    """Most of JAX's time would go into optimising what runs once; XLA reads its flags once."""
    if "jax" not in sys.modules:
        flags = os.environ.get("XLA_FLAGS", "")
        quick = "--xla_backend_optimization_level=0"
        if version("jaxlib").startswith("0.10."):  # newer ones do not know the flag and would end
            quick += " --xla_cpu_use_fusion_emitters=false"
        os.environ["XLA_FLAGS"] = f"{quick} {flags}".strip()


def _counted(number: int, backend: str, cell: Cell) -> CellVerdict:
    """The verdict on the cell of this number; now and then memory is given back."""
    if number % _KEPT == _KEPT - 1:
        forget_compiled(backend)
    return judged(cell, backend)


def forget_compiled(backend: str) -> None:
    """Lets JAX forget what it compiled: of a thousand cells it would be gigabytes."""
    if backend == "jax":
        import jax

        jax.clear_caches()


@contextmanager
def programs_kept(folder: str) -> Iterator[None]:
    """JAX keeps what it compiles in a folder, inside this block, if it does not so already.

    What is traced anew for each cell, such as a loop, often becomes a program that was there
    before, or that was forgotten. Programs that call back into Python are not kept.
    """
    import jax

    before = {name: getattr(jax.config, name) for name in _KEEP}
    if before["jax_compilation_cache_dir"]:
        yield
        return
    _configure({**_KEEP, "jax_compilation_cache_dir": folder})
    try:
        yield
    finally:
        _configure(before)


_KEEP: dict[str, Any] = {
    "jax_compilation_cache_dir": None,
    "jax_persistent_cache_min_compile_time_secs": 0.0,
    "jax_persistent_cache_min_entry_size_bytes": -1,
}


def _configure(values: dict[str, Any]) -> None:
    """Sets JAX's options; its cache is opened by the first program and must be told of others."""
    import jax
    from jax.experimental.compilation_cache import compilation_cache

    for name, value in values.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()


def _progress(cells: Sequence[Any]) -> Iterator[Any]:
    """A bar of tqdm on standard error; a dot for each hundredth where tqdm is not installed."""
    try:
        from tqdm import tqdm
    except ImportError:
        return _dots(cells)
    return iter(tqdm(cells, desc="cells", file=sys.stderr))


def _dots(cells: Sequence[Any]) -> Iterator[Any]:
    each = max(1, len(cells) // 100)
    for i, item in enumerate(cells):
        yield item
        if i % each == 0:
            print(".", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)


def _print(
    options: argparse.Namespace,
    here: Sequence[str],
    verdicts: Sequence[CellVerdict],
    shown: dict[str, str],
) -> None:
    if options.json:
        print(
            json.dumps({**_record(here, verdicts), **({"gpu": shown} if shown else {})}, indent=1)
        )
        return
    print("\n".join(_devices(here)))
    print(f"\n{worst_table(verdicts)}\n\nleft out:")
    for (backend, reason), number in left_out(verdicts).items():
        print(f"{number:>5}  {backend:<6} {reason}")
    failed = [v for v in verdicts if v.failure]
    for v in failed:
        print(f"FAILED {v.backend}: {v.cell}\n       {v.failure}")
    run = [v for v in verdicts if not v.cell.reason]
    over = len({v.cell.program.name for v in run})
    print(f"\n{len(run)} cells run over {over} programs; {len(failed)} failed")
    if not shown:
        return
    for name, result in shown.items():
        if result:
            print(f"{'FAILED on the GPU: ' if _failed(result) else ''}{name}: {result}")
    tried = [result for result in shown.values() if not result.startswith("left out: ")]
    print(f"on the GPU: {tried.count('')} of {len(tried)} held")


def _record(here: Sequence[str], verdicts: Sequence[CellVerdict]) -> dict[str, Any]:
    """The result as JSON's types; NaN, which JSON has not, as null."""
    number = lambda x: x if x == x and abs(x) != float("inf") else None
    each = [
        {
            "backend": v.backend,
            "operator": v.cell.operator.name,
            "program": v.cell.program.name,
            "order": v.cell.operator.order,
            "dtype": v.cell.dtype,
            "transform": v.cell.transform,
            "arguments": v.cell.arguments,
            "left_out": v.cell.reason,
            "worst": number(v.worst),
            "oracle": v.oracle,
            "failure": v.failure,
        }
        for v in verdicts
    ]
    return {"devices": _devices(here), "held": not any(v.failure for v in verdicts), "cells": each}


def _devices(here: Sequence[str]) -> list[str]:
    """What each framework has here, with peaks of memory, and what is absent."""
    lines = [f"{name}: {described(name)}; {described_precision(name)}" for name in here]
    return lines + [f"{name}: not run" for name in BACKENDS if name not in here]


if __name__ == "__main__":
    print(support_table())
