"""Finds the objects that a function captures, with their names.

The search visits closure variables, globals that the code reads, default arguments and bound
methods, and then the items and attributes of these objects. Captured arrays get names such as
``net.layers[0].weight``.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any

from gradtools.function_variables import cells_of, globals_of

_PLAIN = (str, bytes, int, float, complex, type, ModuleType, CodeType, type(None))
_MOST = 20_000
Named = tuple[Any, str]


def named_objects(
    roots: Sequence[Named],
    is_array: Callable[[Any], bool],
    parts: Callable[[Any, str], Iterable[Named] | None] = lambda x, name: None,
) -> Iterator[Named]:
    """Yields (object, name) for every object reachable from `roots`, breadth first.

    Args:
        roots: Pairs of an object and its name. The name of a function is empty.
        is_array: A function that returns whether an object is an array; arrays are not searched.
        parts: A function that returns the named parts of a framework object, or None if the object
            does not belong to a framework.
    """
    seen: dict[int, Any] = {}
    todo = deque(roots)
    while todo and len(seen) < _MOST:
        x, name = todo.popleft()
        if is_array(x):
            yield x, name
        elif id(x) not in seen and not isinstance(x, _PLAIN):
            seen[id(x)] = x
            yield x, name
            own = parts(x, name)
            todo += _parts(x, name) if own is None else own


def _parts(x: Any, name: str) -> Iterable[Named]:
    if isinstance(x, FunctionType):  # variables read by x and its inner functions
        read = [*cells_of(x).items(), *globals_of(x).items()]
        wrapped = getattr(x, "__wrapped__", None)
        defaults = [(x.__defaults__, "default"), (x.__kwdefaults__, "default"), (wrapped, "")]
        return [*((v, k) for k, v in read), *(pair for pair in defaults if pair[0] is not None)]
    if isinstance(x, partial):
        return [(x.func, name), *_items(x.args, name), *((v, k) for k, v in x.keywords.items())]
    if isinstance(x, MethodType):
        return [(x.__func__, name), (x.__self__, "self")]
    if isinstance(x, dict):
        return [(value, f"{name}[{key!r}]") for key, value in list(x.items())]
    if isinstance(x, list | tuple):
        return _items(x, name)
    before = f"{name or 'self'}."
    attributes = [(value, before + key) for key, value in list(getattr(x, "__dict__", {}).items())]
    try:
        wrapped = getattr(x, "__wrapped__", None)
    except Exception:  # a lazily imported module that is not installed
        wrapped = None
    return [*attributes, (wrapped, name)]


def _items(xs: Sequence[Any], name: str) -> list[Named]:
    return [(x, f"{name}[{i}]") for i, x in enumerate(xs)]
