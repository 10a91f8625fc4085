"""Writes call trees into docs/architecture.md: the modules that run in a call of an operator.

python -m tests.support.walks            # writes the trees into the page
python -m tests.support.walks --counts   # prints the numbers of calls and files in each tree
"""

from __future__ import annotations

import ast
import importlib
import os
import re
import sys
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import gradtools

HOUSE = Path(gradtools.__file__).parent
PAGE = HOUSE.parent / "docs" / "architecture.md"


def _square(x: Any) -> Any:
    return x * x


def _loss(x: Any) -> Any:
    return (x * x).sum()


WALKS: dict[str, Callable[[Any, Any], Any]] = {
    "grad": lambda gt, x: gt.grad(_loss)(x),
    "reverse_gradient": lambda gt, x: gt.grad(lambda x: gt.reverse_gradient(x).sum())(x),
    "chunked": lambda gt, x: gt.grad(lambda x: gt.chunked(_square, 2)(x).sum())(x),
}
ALL = [(name, backend) for name in WALKS for backend in ("torch", "jax")]
SHOWN = [("chunked", "torch")]  # the longest call tree, which contains the call tree of a gradient


class Count(NamedTuple):
    """The size of a call tree.

    Attributes:
        calls: The number of calls of gradtools functions, including each resumption of a generator.
        files: The number of files that define these functions.
        changes: The number of calls whose file differs from the file of the previous call.
    """

    calls: int
    files: int
    changes: int


def walked(name: str, backend: str) -> str:
    """Return the module tree of one call; each module is below the module that first called it."""
    seen: dict[str, str] = {}  # maps each module to the module that first called it

    def note(room: str, frame: Any) -> None:
        if room in seen:
            return
        before, outer = frame.f_back, ""
        while before is not None and (not outer or outer == room):
            outer, before = _room(before) or outer, before.f_back
        seen[room] = outer

    _walk(name, backend, note)
    return "\n".join(_branch(seen, "", 0))


def counted(name: str, backend: str) -> Count:
    """Count the calls, the files and the calls into another file in one operator's call tree."""
    rooms: list[str] = []
    _walk(name, backend, lambda room, frame: rooms.append(room))
    changes = sum(a != b for a, b in pairwise(rooms))
    return Count(len(rooms), len(set(rooms)), changes)


def _walk(name: str, backend: str, note: Callable[[str, Any], None]) -> None:
    """Run one program and call `note` with the module and frame of each call in gradtools."""
    gt = importlib.import_module(f"gradtools.{backend}")
    x = gt.xp.ones((4, 4))
    for _ in range(2):  # the first call fills caches
        WALKS[name](gt, x)

    def watch(frame: Any, event: str, arg: Any) -> None:
        if event == "call" and (room := _room(frame)) is not None:
            note(room, frame)

    sys.setprofile(watch)
    try:
        WALKS[name](gt, x)
    finally:
        sys.setprofile(None)


def _room(frame: Any) -> str | None:
    path = Path(frame.f_code.co_filename)
    return path.relative_to(HOUSE).as_posix() if path.is_relative_to(HOUSE) else None


def _branch(seen: dict[str, str], room: str, depth: int) -> list[str]:
    lines = []
    for inner in [inner for inner, outer in seen.items() if outer == room]:
        lines.append(f"{'   ' * depth}{inner:{36 - 3 * depth}} {_said(inner)}")
        lines += _branch(seen, inner, depth + 1)
    return lines


def _said(room: str) -> str:
    """Return the first line of a module's docstring."""
    text = ast.get_docstring(ast.parse((HOUSE / room).read_text(encoding="utf-8"))) or ""
    return text.partition("\n")[0].rstrip(".")


def environment() -> dict[str, str]:
    """Return environment variables for a subprocess that imports this source tree."""
    return {**os.environ, "PYTHONPATH": str(HOUSE.parent)}


def blocks() -> dict[str, str]:
    """Return a dict from the title of each block on the page to its module tree."""
    return {f"{name}, {backend}": walked(name, backend) for name, backend in SHOWN}


def counts() -> dict[str, Count]:
    """Return a dict from the name of each operator and backend to the size of the call tree."""
    return {f"{name}, {backend}": counted(name, backend) for name, backend in ALL}


def written(page: str, trees: dict[str, str]) -> str:
    """Return the page with the new trees."""
    for title, tree in trees.items():
        page, count = re.subn(
            rf'(```text title="{title}"\n).*?(```)',
            lambda m, tree=tree: f"{m[1]}{tree}\n{m[2]}",
            page,
            flags=re.DOTALL,
        )
        assert count == 1, title
    return page


def main() -> None:
    if "--counts" in sys.argv[1:]:
        for title, count in counts().items():
            print(f"{title}: {count.calls} calls, {count.files} files, {count.changes} changes")
        return
    PAGE.write_text(written(PAGE.read_text(encoding="utf-8"), blocks()), encoding="utf-8")


if __name__ == "__main__":
    main()
