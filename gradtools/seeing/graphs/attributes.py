"""Formats the label of an operation from its operands and attributes.

    subtract(1, a)    sum(b, axis=0)    power(a, 2)    slice(c, [1:3, :])    compare(a > 0)

The label omits the shape attribute, because graphs print the shapes of outputs.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from gradtools.seeing.graphs.nodes import Node

_LEFT_OUT = ("shape", "name", "size", "rule", "bridged")  # not part of the label
_WITHOUT_NAMES = ("dtype", "subscripts", "permutation")
_LONGEST = 48


def call_text(node: Node, operands: Sequence[str], shape: Sequence[int] = ()) -> str:
    """Formats a node as ``name(operands, attributes)``; the first operand has shape `shape`."""
    attributes = node.attributes
    if "relation" in attributes and len(operands) == 2:
        return f"{node.operation}({operands[0]} {attributes['relation']} {operands[1]})"
    pieces, is_slice = list(operands), "start" in attributes and "limit" in attributes
    if is_slice:
        pieces.append(f"[{_slices(attributes, shape)}]")
    for key, value in attributes.items():
        if key in _LEFT_OUT or (is_slice and key in ("start", "limit", "stride", "drop")):
            continue
        if key == "axes" and isinstance(value, tuple) and len(value) == 1:
            pieces.append(f"axis={text_of(value[0])}")
        elif key in _WITHOUT_NAMES:
            is_plain_transpose = key == "permutation" and value == (1, 0)
            pieces.append("" if is_plain_transpose else text_of(value))
        else:
            pieces.append(f"{key}={text_of(value)}")
    return f"{node.operation}({', '.join(filter(None, pieces))})"


def text_of(value: Any) -> str:
    """Formats the value of a node attribute, truncated to `_LONGEST` characters."""
    if isinstance(value, tuple):
        inner = ", ".join(map(text_of, value))
        text = f"({inner},)" if len(value) == 1 else f"({inner})"
    elif isinstance(value, float):
        text = f"{value:.6g}"
    else:
        text = str(value)
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 1]}…"


def _slices(bounds: Mapping[str, Any], shape: Sequence[int]) -> str:
    """Formats a slice, such as ``1:3, :``; a dropped axis is written as an index."""
    rank = len(bounds["start"])
    ends = shape if len(shape) == rank else (None,) * rank
    strides, dropped = bounds.get("stride", (1,) * rank), bounds.get("drop", ())
    pieces = []
    for axis, start in enumerate(bounds["start"]):
        limit, stride = bounds["limit"][axis], strides[axis]
        whole = f"{start or ''}:{limit if limit != ends[axis] else ''}"
        whole += f":{stride}" if stride != 1 else ""
        pieces.append(str(start) if axis in dropped else whole)
    return ", ".join(pieces)


# --- numbers as the names of captured values ---------------------------------------------

_MOST_NUMBERS = 64


def numbers_text(shape: Sequence[int], listed: Callable[[], Any]) -> str:
    """Formats the contents of a small array, such as "[0, 2]"; returns "" for large arrays.

    Args:
        shape: The shape of the array.
        listed: A function that returns the array's numbers as nested lists.
    """
    return number_text(listed()) if 0 < math.prod(shape) <= _MOST_NUMBERS else ""


def number_text(value: Any) -> str:
    """Formats a float with six significant digits, an integer with all digits, or a nested list."""
    if isinstance(value, list):
        return f"[{', '.join(map(number_text, value))}]"
    return f"{value:d}" if isinstance(value, int) else f"{value:.6g}"


def is_number(text: str) -> bool:
    """Returns whether `text`, the name of a captured value, is a number."""
    try:
        complex(text)
    except ValueError:
        return False
    return re.fullmatch(r"[-+0-9.a-z]+j?", text) is not None


def are_numbers(text: str) -> bool:
    """Returns whether `text`, the name of a captured value, is a result of `numbers_text`."""
    return text.startswith("[") or is_number(text)
