"""Describes arrays, structures and types in messages."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np

from gradtools.backend import Backend

NO_RETURN = "Is a return statement missing?"


def describe(backend: Backend, x: Any) -> str:
    """Returns a short description of x for messages."""
    if backend.is_array(x) or (hasattr(x, "shape") and hasattr(x, "dtype")):
        return f"an array of shape {tuple(x.shape)} and dtype {backend.dtype_name(x)}"
    if isinstance(x, (tuple, list, dict)):
        return f"a {type(x).__name__} of {len(x)}"
    return "a function" if isinstance(x, partial) else with_article(type(x).__name__)


def shown(x: Any) -> str:
    """Formats a value that was passed for an option; an array is formatted as its shape."""
    shape = getattr(x, "shape", None)
    return repr(x) if shape is None else f"an array of shape {tuple(shape)}"


def in_words(treedef: Any) -> str:
    """Formats a tree structure for messages, with * for each array."""
    head, *containers = " ".join(str(treedef).split()).partition(" with ")
    head = head.removeprefix("PyTreeDef(").removesuffix(")") if head[:9] == "PyTreeDef" else head
    text = "".join([head, *containers])
    return "one array" if text == "*" else text


def is_numeric(backend: Backend, x: Any) -> bool:
    """Returns whether x is a framework array, a number, or a NumPy array of numbers."""
    if backend.is_array(x) or isinstance(x, (bool, int, float, complex)):
        return True
    return isinstance(x, (np.ndarray, np.generic)) and x.dtype.kind in "fciub"


def type_in_words(x: Any) -> str:
    """Formats the type of x with an article and the module; if x is a class, formats its name."""
    if isinstance(x, type):
        return f"the class {x.__qualname__}, not an instance"
    kind = type(x)
    module = "" if kind.__module__ == "builtins" else f"{kind.__module__}."
    return with_article(f"{module}{kind.__qualname__}")


def name_of(f: Any) -> str:
    """Returns the name of a function, or the name of its type if it has no name."""
    return getattr(f, "__name__", None) or type(f).__name__


_NOT_CALLED = "function that was not called"  # a result of an operator, such as grad(f)
_NAMES = {
    "ArrayImpl": "jax.Array",
    "TransformedFunction": _NOT_CALLED,
    "gradtools.boundary.TransformedFunction": _NOT_CALLED,
}


def with_article(name: str) -> str:
    """Adds "a" or "an" before the name of a type; returns "None" for the type of None."""
    if name == "NoneType":
        return "None"
    name = _NAMES.get(name, name)
    return f"{'an' if name[0].lower() in 'aeio' or name == 'ndarray' else 'a'} {name}"
