"""Reports the coefficients of edited gradients, on which derivatives depend and no output does.

A recomputation compares them with those of the first pass (`replaying/consistency.py`).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from types import FunctionType
from typing import Any

from gradtools.rules import Rule
from gradtools.torch.snapshots import contents_of

Note = Callable[[str, Any, Any], None]
"""`note(name, coefficient, variable)`, with the variable of a function that holds it, or None."""

_DEPTH = 4  # of functions that functions close over


class _Coefficients(threading.local):
    """The innermost block of this thread. A class attribute is read fastest."""

    note: Note | None = None


HERE = _Coefficients()


@contextmanager
def coefficients_noted(note: Note | None) -> Iterator[None]:
    """Reports the coefficients of edits in the block to `note`, and to the blocks around it.

    note: None to report them to no block.
    """
    outer = HERE.note

    def both(name: str, coefficient: Any, variable: Any) -> None:
        assert note is not None
        note(name, coefficient, variable)
        if outer is not None:
            outer(name, coefficient, variable)

    HERE.note = None if note is None else both
    try:
        yield
    finally:
        HERE.note = outer


def note_edit(note: Note, rule: Rule, xs: Sequence[Any]) -> None:
    """Reports the coefficients of an edit: inputs after those that it returns, and variables."""
    for x in xs[len(rule.primal(*xs)) :]:
        note(rule.name, x, None)
    for x, variable in closed_over(rule.cotangent):
        note(rule.name, x, variable)


def closed_over(f: Any, depth: int = _DEPTH) -> Iterator[tuple[Any, Any]]:
    """The variables and bound arguments of a function, and those of functions among them."""
    held: list[tuple[Any, Any]]
    if isinstance(f, partial):
        held = [(x, None) for x in (f.func, *f.args, *f.keywords.values())]
    elif isinstance(f, FunctionType):
        cells = f.__closure__ or ()
        held = [(contents_of(cell), cell) for cell in cells]
        held += [(x, None) for x in (*(f.__defaults__ or ()), *(f.__kwdefaults__ or {}).values())]
    else:
        return
    for x, variable in held:
        if isinstance(x, FunctionType | partial):
            yield from closed_over(x, depth - 1) if depth else ()
        else:
            yield x, variable
