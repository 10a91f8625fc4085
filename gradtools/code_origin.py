"""Whose code a source line is: the user's, an installed package's, a framework's, gradtools'.

Told by the file's place, once for both frameworks. It finds the user's line for a message or a
picture and hides the lines beneath it; and PyTorch's operators that call f again look for what f
changes in the user's code alone.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Iterator
from functools import lru_cache
from types import CodeType, FrameType, ModuleType

USER, PACKAGE, LIBRARY = range(3)
ENGINES = ("torch", "jax", "jaxlib", "numpy", "gradtools")
_STANDARD = os.path.dirname(os.__file__) + os.sep
_HERE = os.path.dirname(__file__) + os.sep
_LIBRARIES = frozenset({*ENGINES, *sys.stdlib_module_names})
_TYPED_IN = ("<stdin>", "<string>", "<doctest", "<ipython")


@lru_cache(maxsize=4096)
def kind_of(file: str) -> int:
    """Whose the lines of a file are."""
    if file.startswith("<"):
        return USER if file.startswith(_TYPED_IN) else LIBRARY
    if is_in(ENGINES, file):
        return LIBRARY
    if "-packages" in file:
        return PACKAGE
    return LIBRARY if file.startswith(_STANDARD) else USER


def is_in(packages: Iterable[str], file: str) -> bool:
    """Whether a file belongs to one of these packages, as they are installed."""
    modules = (sys.modules.get(name) for name in packages)
    files = (getattr(module, "__file__", None) for module in modules)
    return any(file.startswith(os.path.dirname(f) + os.sep) for f in files if f)


def whose(x: CodeType | ModuleType | type) -> int:
    """Whose code, a module or a class is; what has no file is the user's."""
    if isinstance(x, CodeType):
        return kind_of(x.co_filename)
    name, module = (x.__module__, None) if isinstance(x, type) else (x.__name__, x)
    if str(name).partition(".")[0] in _LIBRARIES:
        return LIBRARY
    return kind_of(getattr(module or sys.modules.get(name), "__file__", None) or "")


def names_in(code: CodeType) -> Iterator[str]:
    """The globals and attributes that code names, and what its inner functions name."""
    yield from code.co_names
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            yield from names_in(inner)


def is_ours(file: str) -> bool:
    """Whether a file is of gradtools."""
    return file.startswith(_HERE)


def is_the_users(frame: FrameType) -> bool:
    """Whether code is neither gradtools', nor installed, nor Python's own.

    What Python makes of a text, as a dataclass its methods, has the name of the user's code; the
    module tells it apart.
    """
    file = frame.f_code.co_filename
    if file.startswith("<"):
        return frame.f_globals.get("__name__") == "__main__" or file.startswith("<doctest")
    return kind_of(file) == USER
