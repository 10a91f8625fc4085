"""The label of an operation: its operands in their places, and its attributes.

    subtract(1, a)    sum(b, axis=0)    power(a, 2)    slice(c, [1:3, :])    compare(a > 0)

A shape is not told here, for what comes out has its own beside it.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from gradtools.seeing.graphs.nodes import Node

_BESIDE = ("shape", "name", "size", "rule")  # told elsewhere
_PLAIN = ("dtype", "subscripts", "permutation")  # told without their names
_LONGEST = 48


def call_text(node: Node, operands: Sequence[str], shape: Sequence[int] = ()) -> str:
    """An operation with its operands, as one writes it in a program; `shape`: of the first."""
    result = node.attributes
    if "relation" in result and len(operands) == 2:
        return f"{node.operation}({operands[0]} {result['relation']} {operands[1]})"
    return f"{node.operation}({', '.join([*operands, *told(node, shape)])})"


def told(node: Node, shape: Sequence[int] = ()) -> list[str]:
    """The attributes, each as a piece of text."""
    result = {key: value for key, value in node.attributes.items() if key not in _BESIDE}
    sliced = [f"[{_slices(result, shape)}]"] if "start" in result and "limit" in result else []
    if sliced:
        result = {k: v for k, v in result.items() if k not in ("start", "limit", "stride", "drop")}
    return [*sliced, *filter(None, (_piece(key, value) for key, value in result.items()))]


def mark_text(node: Node) -> str:
    """What a node is marked with; a rule has its name."""
    return " ".join(filter(None, (node.mark, node.mark and str(node.attributes.get("rule", "")))))


def _piece(key: str, value: Any) -> str:
    if key == "axes" and isinstance(value, tuple) and len(value) == 1:
        key, value = "axis", value[0]
    if key == "permutation":
        return "" if value == (1, 0) else text_of(value)
    return text_of(value) if key in _PLAIN else f"{key}={text_of(value)}"


def text_of(value: Any) -> str:
    """A value of an attribute, short."""
    if isinstance(value, tuple):
        inner = ", ".join(map(text_of, value))
        text = f"({inner},)" if len(value) == 1 else f"({inner})"
    elif isinstance(value, float):
        text = f"{value:.6g}"
    else:
        text = str(value)
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 1]}…"


def _slices(found: Mapping[str, Any], shape: Sequence[int]) -> str:
    """What is taken of each axis."""
    rank = len(found["start"])
    ends = shape if len(shape) == rank else (None,) * rank
    stride, dropped = found.get("stride", (1,) * rank), found.get("drop", ())
    pieces = []
    for axis, (start, limit, step, end) in enumerate(
        zip(found["start"], found["limit"], stride, ends, strict=True)
    ):
        whole = f"{start or ''}:{limit if limit != end else ''}"
        whole += f":{step}" if step != 1 else ""
        pieces.append(str(start) if axis in dropped else whole)
    return ", ".join(pieces)


_NUMBER = re.compile(r"[-+0-9.a-z]+j?")


def is_number(text: str) -> bool:
    """Whether a captured value's name is a number, told in its place."""
    if not text or not _NUMBER.fullmatch(text):
        return False
    try:
        complex(text)
    except ValueError:
        return False
    return True


_MOST_NUMBERS = 64


def numbers_text(shape: Sequence[int], listed: Callable[[], Any]) -> str:
    """What a small array holds, in place of a name: "2.5", "[0, 2]"; of a large one nothing.

    Args:
        shape: Its shape.
        listed: Gives its numbers as nested lists.
    """
    count = math.prod(shape)
    return _listed(listed()) if 0 < count <= _MOST_NUMBERS else ""


def _listed(values: Any) -> str:
    if isinstance(values, list):
        return f"[{', '.join(map(_listed, values))}]"
    return number_text(values)


def number_text(value: complex | float) -> str:
    """A number, short; an integer in full."""
    return f"{value:d}" if isinstance(value, int) else f"{value:.6g}"


def are_numbers(text: str) -> bool:
    """Whether a captured value's name is what it holds."""
    return text.startswith("[") or is_number(text)
