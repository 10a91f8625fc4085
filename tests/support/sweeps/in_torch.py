"""The sweep over all that PyTorch can differentiate.

    judged(sweep(), LEDGER)            # the quick tier: one sample of each operator
    judged(sweep(whole=True), LEDGER)  # everything

Programs come from `torch_programs.py`, ways from `torch_ways.py`, what they are held against from
`torch_oracles.py`, and what is known not to agree stands in `torch_ledger.py`. PyTorch's tables
need the package expecttest.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from gradtools.errors import GradtoolsError
from tests.support.sweeps import RAISED, REFUSED, SweepOutcome
from tests.support.sweeps.torch_ledger import LEDGER
from tests.support.sweeps.torch_oracles import Judgement, Oracles
from tests.support.sweeps.torch_programs import (
    BEYOND,
    EVERY_WAY,
    FUNCTION,
    IN_PLACE,
    INTEGERS,
    ON_VIEW,
    TABLES,
    UNCLAIMED,
    TableEntry,
    TableProgram,
    entries,
    programs,
)
from tests.support.sweeps.torch_ways import WAYS, TorchWay

__all__ = ["LEDGER", "WAYS", "sweep", "swept"]

REVERSE_MODE = "PyTorch's own reverse mode"
FINE, COARSE = ("float64", "complex128"), ("float32", "complex64")
_SAMPLES = 4  # of an operator, in the whole sweep


def sweep(
    whole: bool = False,
    only: Callable[[str], bool] = lambda name: True,
    part: tuple[int, int] = (0, 1),
    tables: Iterable[str] = tuple(TABLES),
    every: int = 1,
) -> Iterator[SweepOutcome]:
    """What comes of every program in every way.

    Args:
        whole: All ways, several samples, single precision at first order, the in-place variants
            and what the tables do not claim, in place of one sample of each operator in the
            principal ways.
        only: Which programs, by name.
        part: `(i, n)` for the i-th of n parts, for those who share the work.
        tables: Of `TABLES`.
        every: Each program goes through one of so many of its ways, in turn.

    Yields:
        Outcomes, in the order of the tables.

    Raises:
        GradtoolsError: The package expecttest is missing.
    """
    variants = (FUNCTION, IN_PLACE, ON_VIEW, INTEGERS, BEYOND) if whole else (FUNCTION,)
    i, n = part
    for k, entry in enumerate(entries(tables, variants)[i::n]):
        if only(entry.name):
            yield from _swept_entry(entry, whole, slice(k % every, None, every))


def _swept_entry(entry: TableEntry, whole: bool, turn: slice) -> Iterator[SweepOutcome]:
    plain = entry.variant == FUNCTION
    for dtype in (*FINE, *COARSE) if whole and plain else FINE:
        ways = [way for way in WAYS if way.quick or (whole and plain)]
        if dtype in COARSE or entry.variant in UNCLAIMED:
            ways = [way for way in ways if way.quick and way.order == 1]
        for program in programs(entry, dtype, _SAMPLES if whole and plain else 1):
            if isinstance(program, TableProgram):
                yield from swept(program, ways[turn])
            elif dtype == "float64":
                yield program


def swept(program: TableProgram, ways: Iterable[TorchWay] = WAYS) -> Iterator[SweepOutcome]:
    """What comes of one program in these ways, and of PyTorch's own reverse mode first."""
    import gradtools.torch as gt

    try:
        with _quiet():
            oracles = Oracles(program)
            result = oracles.reverse_mode() if oracles.fine else None
    except Exception as error:  # the framework's own
        yield program.left_out(EVERY_WAY, f"PyTorch raises {_told(error)}")
        return
    if not oracles.finite:
        yield program.left_out(EVERY_WAY, "its value or gradient is not a number at the sample")
        return
    if result is not None:
        yield _outcome(program, REVERSE_MODE, result)
    for way in ways:
        try:
            with _quiet():
                judgement = way.judged(gt, oracles)
        except GradtoolsError as error:
            judgement = Judgement(REFUSED, "", _told(error))
        except Exception as error:
            judgement = Judgement(RAISED, "", _told(error))
        if judgement is not None:
            yield _outcome(program, way.name, judgement)


def _outcome(program: TableProgram, way: str, found: Judgement) -> SweepOutcome:
    return SweepOutcome(
        program.name,
        way,
        program.sample,
        program.dtype,
        found.result,
        found.oracle,
        found.detail,
    )


def _told(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".replace("\n", " ")[:300]


class _quiet(warnings.catch_warnings):
    """PyTorch's warnings are left out, ours too: they are tested where they are made."""

    def __enter__(self) -> Any:
        result = super().__enter__()
        warnings.simplefilter("ignore")
        return result
