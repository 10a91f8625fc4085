"""Classifies code by origin, and finds the user's line in a stack, an error or a function.

The file of a code object determines its origin: the user, an installed package, or a library (the
frameworks, the standard library, gradtools). Other modules inspect frames and tracebacks
with these functions. The results are used to name the user's line in messages and graphs, to filter
tracebacks, to distinguish errors of a framework from errors of the user's code, and to restrict the
search for mutable state to the user's code.
"""

from __future__ import annotations

import dis
import linecache
import os
import sys
import traceback
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import takewhile
from types import CodeType, FrameType, ModuleType
from typing import Any

USER, PACKAGE, LIBRARY = range(3)
ENGINES = ("torch", "jax", "jaxlib", "numpy", "gradtools")
_INSTALLED = [f"{os.sep}{name}{os.sep}" for name in ("site-packages", "dist-packages")]
_STANDARD = os.path.dirname(os.__file__) + os.sep
_HERE = os.path.dirname(__file__) + os.sep
_LIBRARIES = frozenset({*ENGINES, *sys.stdlib_module_names})
_TYPED_IN = ("<stdin>", "<string>", "<doctest", "<ipython")


@dataclass(frozen=True, order=True)
class Source:
    """The file, line number and function of a line of the user's code."""

    file: str
    line: int
    function: str = ""

    def __str__(self) -> str:
        return f"{os.path.basename(self.file)}:{self.line}"

    @property
    def text(self) -> str:
        """The text of the line, stripped; empty if the file cannot be read."""
        return linecache.getline(self.file, self.line).strip()


# --- the origin of code ------------------------------------------------------------------


@lru_cache(maxsize=4096)
def kind_of(file: str) -> int:
    """Returns the origin of a file: USER, PACKAGE or LIBRARY."""
    if file.startswith("<"):
        return USER if file.startswith(_TYPED_IN) else LIBRARY
    if is_in(ENGINES, file):
        return LIBRARY
    if any(folder in file for folder in _INSTALLED):
        return PACKAGE
    return LIBRARY if file.startswith(_STANDARD) else USER


def is_in(packages: Iterable[str], file: str) -> bool:
    """Returns whether a file is in the installation folder of any of the given packages."""
    modules = (sys.modules.get(name) for name in packages)
    files = (getattr(module, "__file__", None) for module in modules)
    return any(file.startswith(os.path.dirname(f) + os.sep) for f in files if f)


def whose(x: CodeType | ModuleType | type) -> int:
    """Returns the origin of a code object, module or class; returns USER if x has no file."""
    if isinstance(x, CodeType):
        return kind_of(x.co_filename)
    name, module = (x.__module__, None) if isinstance(x, type) else (x.__name__, x)
    if str(name).partition(".")[0] in _LIBRARIES:
        return LIBRARY
    return kind_of(getattr(module or sys.modules.get(name), "__file__", None) or "")


def is_ours(file: str, folder: str = "") -> bool:
    """Returns whether a file belongs to gradtools, or to the given folder of gradtools."""
    return file.startswith(os.path.join(_HERE, folder))


# --- frames and their lines --------------------------------------------------------------

Lines = Iterable[tuple[FrameType, int]]


def lines_above(depth: int, end: Any = None) -> Iterator[tuple[FrameType, int]]:
    """Yields stack frames with line numbers, innermost first; skips the first `depth` frames.

    end: A function; the iteration stops at the frame of this function.
    """
    last = getattr(end, "__code__", None)
    lines = traceback.walk_stack(sys._getframe(depth + 1))
    return takewhile(lambda entry: entry[0].f_code is not last, lines)


def lines_of(error: BaseException) -> list[tuple[FrameType, int]]:
    """Returns the frames of an error's traceback with their lines, innermost first."""
    return list(traceback.walk_tb(error.__traceback__))[::-1]


def functions_in(error: BaseException) -> list[tuple[str, str]]:
    """Returns names and files of the functions in an error's traceback, outermost first."""
    codes = [frame.f_code for frame, _ in reversed(lines_of(error))]
    return [(code.co_qualname, code.co_filename) for code in codes]


def innermost(lines: Lines, stand_in: int = USER) -> Source | None:
    """Returns the innermost line of the user's code on the stack.

    stand_in: If PACKAGE and there is no line of the user's code, returns the innermost line of an
        installed package.
    """
    source, kind = None, stand_in + 1
    for frame, line in lines:
        of = whose_frame(frame)
        if of < kind:
            source, kind = _source(frame.f_code, line), of
        if of == USER:
            break
    return source


def users_lines(lines: Lines) -> tuple[Source, ...]:
    """Returns all lines of the user's code, innermost first."""
    return tuple(_source(frame.f_code, n) for frame, n in lines if whose_frame(frame) == USER)


def whose_frame(frame: FrameType) -> int:
    """Returns the origin of the code that runs in a frame.

    Generated code, such as a dataclass's methods, has a file name like a user's interactive code,
    so its origin is determined by the module.
    """
    file = frame.f_code.co_filename
    if not file.startswith("<") or file.startswith("<doctest"):
        return kind_of(file)
    return USER if module_of(frame) == "__main__" else LIBRARY


def module_of(frame: FrameType) -> str:
    """Returns the name of the module whose code runs in a frame."""
    return str(frame.f_globals.get("__name__", ""))


def calls_below_the_user(lines: Lines) -> Iterator[tuple[str, str, Any]]:
    """Yields module, function name and `self` of each call below the user's innermost line."""
    for frame, _ in lines:
        if whose_frame(frame) == USER:
            return
        yield module_of(frame), frame.f_code.co_name, frame.f_locals.get("self")


def is_our_frame(frame: FrameType) -> bool:
    """Returns whether a frame runs gradtools' code; JAX's synthetic frames have only file names."""
    return module_of(frame).partition(".")[0] == __package__ or is_ours(frame.f_code.co_filename)


def depth_of_the_user() -> int:
    """Returns the `stacklevel` of the user's innermost line for `warnings.warn` in the caller.

    If no frame runs the user's code, returns the stacklevel of the first frame outside of
    gradtools.
    """
    outside = depth = 0
    for depth, (frame, _) in enumerate(lines_above(1), 1):
        if whose_frame(frame) == USER:
            return depth
        if not outside and not is_ours(frame.f_code.co_filename):
            outside = depth
    return outside or depth


def place_of(error: BaseException) -> str:
    """Returns the user's innermost line in an error's traceback, in parentheses, or "" if none."""
    line = innermost(lines_of(error))
    return f" ({line})" if line else ""


def raised_by(package: str, error: BaseException) -> bool:
    """Returns whether a framework or gradtools, not the user's code, raised an error.

    Frameworks raise built-in error types, and errors of the user's code may have the same type and
    text. An error belongs to the user if it was raised by a `raise` statement outside of the
    framework's modules. An error of compiled framework code is raised at a call instruction
    instead. The framework's top-level module counts as the user's code, since it raises on behalf
    of the user (`torch._check`).
    """
    origin = error.__traceback__
    if origin is None:
        return True
    while origin.tb_next is not None:
        origin = origin.tb_next
    code = origin.tb_frame.f_code.co_code
    own = module_of(origin.tb_frame).startswith((f"{package}.", f"{__package__}."))
    return own or code[origin.tb_lasti] != dis.opmap["RAISE_VARARGS"]


# --- functions ---------------------------------------------------------------------------


def definition_of(f: Any) -> Source | None:
    """Returns the line on which a Python function is defined, or None if f has no Python code."""
    code = getattr(f, "__code__", None)
    return None if code is None else _source(code, code.co_firstlineno)


def _source(code: CodeType, line: int) -> Source:
    return Source(code.co_filename, line, code.co_name)
