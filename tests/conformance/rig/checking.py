"""The cells of the matrix judged one by one, and the table of docs/support.md.

python -m tests.conformance.rig.checking    # prints the table
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from tests.conformance.rig.matrix import (
    ARGUMENTS,
    DTYPES,
    OPERATORS,
    TRANSFORMS,
    Cell,
    cells,
)
from tests.conformance.rig.trial import compared

BACKENDS = ("torch", "jax")


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


def support_table() -> str:
    """What is tried, as Markdown: operator by backend, with the number of cells that run."""
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


if __name__ == "__main__":
    print(support_table())
