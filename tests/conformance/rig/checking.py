"""The cells of the matrix judged one by one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from tests.conformance.rig.matrix import Cell
from tests.conformance.rig.trial import compared


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
