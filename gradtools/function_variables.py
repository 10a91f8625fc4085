"""Finds the objects to which functions and containers refer, and replaces them in copies."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator
from functools import partial
from types import CellType, CodeType, FunctionType, MethodType
from typing import Any
from weakref import ref


def cells_of(f: Any) -> dict[str, Any]:
    """Returns the values of the variables that a function closes over, by name."""
    names = getattr(getattr(f, "__code__", None), "co_freevars", ())
    cells = zip(names, getattr(f, "__closure__", None) or (), strict=True)
    return {name: cell.cell_contents for name, cell in cells if cell != CellType()}


def globals_of(f: Any) -> dict[str, Any]:
    """Returns the globals that a function and its inner functions read."""
    code, space = getattr(f, "__code__", None), getattr(f, "__globals__", {})
    return {name: space[name] for name in names_in(code) if name in space}


def names_in(code: CodeType | None) -> Iterator[str]:
    """Yields the names of globals and attributes in a code object and its inner functions."""
    if code is None:
        return
    yield from code.co_names
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            yield from names_in(inner)


def parts_of(x: Any) -> list[Any]:
    """Returns the objects in a list, tuple, dict, bound method, partial or weak reference."""
    kind = type(x)
    if kind in (list, tuple):
        return list(x)
    if kind in (dict, OrderedDict):
        return list(x.values())
    if kind is MethodType:
        return [x.__self__]
    if isinstance(x, partial):
        return [x.func, *x.args, *x.keywords.values()]
    return [x()] if kind is ref and x() is not None else []


def with_parts(x: Any, of: Callable[[Any], Any]) -> Any:
    """Replaces each object of `parts_of(x)` with `of(object)`; returns x if no object changes."""
    old = parts_of(x)
    new = list(map(of, old))
    if all(a is b for a, b in zip(old, new, strict=True)):
        return x
    kind = type(x)
    if kind in (list, tuple):
        return kind(new)
    if kind in (dict, OrderedDict):
        return kind(zip(x, new, strict=True))
    if kind is MethodType:
        return MethodType(x.__func__, *new)
    if isinstance(x, partial):
        count = 1 + len(x.args)
        return kind(*new[:count], **dict(zip(x.keywords, new[count:], strict=True)))
    return ref(*new)


def held_in(x: Any, kinds: tuple[type, ...]) -> list[Any]:
    """Returns the objects of the given classes to which a function or container refers."""
    found: dict[int, Any] = {}
    seen: set[int] = set()
    todo = [x]
    while todo:
        x = todo.pop()
        if id(x) in seen:
            continue
        seen.add(id(x))
        if isinstance(x, kinds):
            found[id(x)] = x
        else:
            todo += _referents(x)
    return list(found.values())


def _referents(x: Any) -> list[Any]:
    if not isinstance(x, FunctionType):
        return parts_of(x)
    if is_of_framework(x):
        return []
    wrapped = [x.__wrapped__] if hasattr(x, "__wrapped__") else []
    return [*cells_of(x).values(), *globals_of(x).values(), *(x.__defaults__ or ()), *wrapped]


def is_of_framework(f: FunctionType) -> bool:
    """Returns whether a function belongs to JAX or flax."""
    return (f.__module__ or "").partition(".")[0] in ("jax", "flax")
