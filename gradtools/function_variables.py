"""What a function of Python's reads from outside: the cells that it closes over, and globals."""

from __future__ import annotations

from collections.abc import Iterator
from types import CellType, CodeType
from typing import Any


def cells_of(f: Any) -> dict[str, Any]:
    """The variables that a function closes over, those alone that are bound."""
    names = getattr(getattr(f, "__code__", None), "co_freevars", ())
    cells = zip(names, getattr(f, "__closure__", None) or (), strict=True)
    return {name: cell.cell_contents for name, cell in cells if cell != CellType()}


def globals_of(f: Any) -> dict[str, Any]:
    """The globals that a function and the functions in it name."""
    code, space = getattr(f, "__code__", None), getattr(f, "__globals__", {})
    return {name: space[name] for name in names_in(code) if name in space}


def names_in(code: CodeType | None) -> Iterator[str]:
    """The globals and attributes that code names, and what its inner functions name."""
    if code is None:
        return
    yield from code.co_names
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            yield from names_in(inner)
