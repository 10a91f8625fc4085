"""Walks through the house: which rooms a call passes, as trees for `docs/architecture.md`.

python tests/support/walks.py        # writes the trees into the page
"""

from __future__ import annotations

import ast
import importlib
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

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


def walked(name: str, backend: str) -> str:
    """The rooms of one walk: each stands below the room that it was first called from."""
    gt = importlib.import_module(f"gradtools.{backend}")
    x = gt.xp.ones((4, 4))
    for _ in range(2):  # what is made once is made
        WALKS[name](gt, x)
    seen: dict[str, str] = {}  # room: the room that it was first called from

    def watch(frame: Any, event: str, arg: Any) -> None:
        if event != "call" or (room := _room(frame)) is None or room in seen:
            return
        before, outer = frame.f_back, ""
        while before is not None and (not outer or outer == room):
            outer, before = _room(before) or outer, before.f_back
        seen[room] = outer

    sys.setprofile(watch)
    try:
        WALKS[name](gt, x)
    finally:
        sys.setprofile(None)
    return "\n".join(_branch(seen, "", 0))


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
    """The first line of a room's docstring."""
    text = ast.get_docstring(ast.parse((HOUSE / room).read_text(encoding="utf-8"))) or ""
    return text.partition("\n")[0].rstrip(".")


def environment() -> dict[str, str]:
    """For a process that imports this tree."""
    return {**os.environ, "PYTHONPATH": str(HOUSE.parent)}


def blocks() -> dict[str, str]:
    """Each walk's tree, by the title of its block on the page."""
    return {
        f"{name}, {backend}": walked(name, backend)
        for name in WALKS
        for backend in ("torch", "jax")
    }


def written(page: str, trees: dict[str, str]) -> str:
    """The page with these trees."""
    for title, tree in trees.items():
        page, count = re.subn(
            rf'(```text title="{title}"\n).*?(```)',
            lambda m, tree=tree: f"{m[1]}{tree}\n{m[2]}",
            page,
            flags=re.DOTALL,
        )
        assert count == 1, title
    return page


if __name__ == "__main__":
    PAGE.write_text(written(PAGE.read_text(encoding="utf-8"), blocks()), encoding="utf-8")
