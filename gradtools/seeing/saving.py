"""A graph written to a file, in the form that its suffix names."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from gradtools.errors import GradtoolsError

SUFFIXES = (".svg", ".html", ".htm", ".dot", ".gv", ".mmd", ".md", ".txt")


def save(graph: Any, path: str | os.PathLike[str], **view: Any) -> None:
    """Writes what has ``to_svg``, ``to_html``, ``to_dot`` and ``to_mermaid`` to a file.

    Raises:
        GradtoolsError: the suffix names no form.
    """
    Path(path).write_text(rendered(graph, Path(path).suffix.lower(), **view), encoding="utf-8")


def rendered(graph: Any, suffix: str, **view: Any) -> str:
    """The form that a suffix names."""
    if suffix == ".svg":
        return str(graph.to_svg(**view))
    if suffix in (".html", ".htm"):
        return str(graph.to_html(**view))
    if suffix in (".dot", ".gv"):
        return str(graph.to_dot(**view))
    if suffix == ".mmd":
        return str(graph.to_mermaid(**view))
    if suffix == ".md":
        return f"```mermaid\n{graph.to_mermaid(**view)}```\n"
    if suffix == ".txt":
        return f"{graph.to_text(**view)}\n"
    raise GradtoolsError(
        f"save: no form is known for the suffix {suffix!r}; expected one of {', '.join(SUFFIXES)}."
    )
