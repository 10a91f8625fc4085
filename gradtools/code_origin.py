"""Whose code a source line is, and the user's line: of a stack, of an error, of a function.

The user's, an installed package's, a framework's or gradtools': told by the file's place, once for
both frameworks. Frames of the stack and of tracebacks are looked at here alone. They tell a line
for a message or a picture, hide the lines beneath it, and tell a framework's error from one that
the user raised; PyTorch's operators that call f again look for what f changes in the user's code
alone.
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
    """A line of the user's code."""

    file: str
    line: int
    function: str = ""

    def __str__(self) -> str:
        return f"{os.path.basename(self.file)}:{self.line}"

    @property
    def text(self) -> str:
        """The line itself, stripped; empty where the file cannot be read."""
        return linecache.getline(self.file, self.line).strip()


# --- whose it is -------------------------------------------------------------------------


@lru_cache(maxsize=4096)
def kind_of(file: str) -> int:
    """Whose the lines of a file are."""
    if file.startswith("<"):
        return USER if file.startswith(_TYPED_IN) else LIBRARY
    if is_in(ENGINES, file):
        return LIBRARY
    if any(folder in file for folder in _INSTALLED):
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


def is_ours(file: str, folder: str = "") -> bool:
    """Whether a file is of gradtools, or of this folder of it."""
    return file.startswith(os.path.join(_HERE, folder))


# --- frames and their lines --------------------------------------------------------------

Lines = Iterable[tuple[FrameType, int]]


def lines_above(depth: int, end: Any = None) -> Iterator[tuple[FrameType, int]]:
    """The frames of the running stack and their lines, from so many above the caller outwards.

    end: The function whose frame ends them.
    """
    last = getattr(end, "__code__", None)
    lines = traceback.walk_stack(sys._getframe(depth + 1))
    return takewhile(lambda entry: entry[0].f_code is not last, lines)


def lines_of(error: BaseException) -> list[tuple[FrameType, int]]:
    """The frames that an error went through and their lines, innermost first."""
    return list(traceback.walk_tb(error.__traceback__))[::-1]


def functions_in(error: BaseException) -> list[tuple[str, str]]:
    """The qualified names and files of what an error went through, outermost first."""
    codes = [frame.f_code for frame, _ in reversed(lines_of(error))]
    return [(code.co_qualname, code.co_filename) for code in codes]


def innermost(lines: Lines, stand_in: int = USER) -> Source | None:
    """The innermost line of the user's.

    stand_in: PACKAGE: where no line is the user's, the innermost of an installed package.
    """
    result, kind = None, stand_in + 1
    for frame, line in lines:
        of = whose_frame(frame)
        if of < kind:
            result, kind = _source(frame.f_code, line), of
        if of == USER:
            break
    return result


def whose_frame(frame: FrameType) -> int:
    """Whose code runs in a frame.

    What Python makes of a text, as a dataclass its methods, has the name of the user's code; the
    module tells it apart.
    """
    file = frame.f_code.co_filename
    if not file.startswith("<") or file.startswith("<doctest"):
        return kind_of(file)
    return USER if module_of(frame) == "__main__" else LIBRARY


def module_of(frame: FrameType) -> str:
    """The name of the module whose code runs in a frame."""
    return str(frame.f_globals.get("__name__", ""))


def is_our_frame(frame: FrameType) -> bool:
    """Whether gradtools' code runs in a frame; those that JAX makes up have no module."""
    return module_of(frame).partition(".")[0] == __package__ or is_ours(frame.f_code.co_filename)


def depth_of_the_user() -> int:
    """How far above its caller the user's innermost line is, as `warnings.warn` counts.

    Where no frame is the user's: the first outside of gradtools.
    """
    outside = depth = 0
    for depth, (frame, _) in enumerate(lines_above(1), 1):
        if whose_frame(frame) == USER:
            return depth
        if not outside and not is_ours(frame.f_code.co_filename):
            outside = depth
    return outside or depth


def place_of(error: BaseException) -> str:
    """The innermost line of the user's that an error went through, in brackets."""
    line = innermost(lines_of(error))
    return f" ({line})" if line else ""


def raised_by(package: str, error: BaseException) -> bool:
    """Whether a framework or gradtools raised an error, rather than the user.

    A framework has no types for its refusals, only texts, and the user's errors may hold the same
    words. The user's are those that a `raise` statement made outside of the framework's modules;
    what its compiled half raises comes out of a call. The package itself raises what it is asked
    to (`torch._check`).
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
    """The line at which a function of Python's is defined."""
    code = getattr(f, "__code__", None)
    return None if code is None else _source(code, code.co_firstlineno)


def _source(code: CodeType, line: int) -> Source:
    return Source(code.co_filename, line, code.co_name)
