"""The graph of a program, with what is computed of it and every form that it is shown in."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

from gradtools.seeing.graphs import text
from gradtools.seeing.graphs.edges import edges_of, kept_anew
from gradtools.seeing.graphs.nodes import Edge, PlainGraph
from gradtools.seeing.pictures import dot, drawing, mermaid, page, saving


@dataclass(frozen=True, eq=False, repr=False)
class Graph(PlainGraph):
    """One run of a program: its nodes and values, which can be looked at."""

    @property
    def edges(self) -> tuple[Edge, ...]:
        """Every value on its way from its maker to each of its readers, outputs last."""
        return edges_of(self)

    @property
    def kept(self) -> dict[int, int]:
        """What the first pass keeps for later ones and was not alive anyway, with its bytes.

        Arguments and captured arrays were; a view is what it is a view of.
        """
        return kept_anew(self)

    def __str__(self) -> str:
        return self.to_text()

    def to_text(self, **view: Any) -> str:
        """The graph as text for a terminal; `view` as in `to_svg`."""
        return text.to_text(self, **view)

    def to_dot(self, **view: Any) -> str:
        """The graph in Graphviz' language; `view` as in `to_svg`."""
        return dot.to_dot(self, **view)

    def to_mermaid(self, **view: Any) -> str:
        """The graph as a Mermaid flowchart, for Markdown; `view` as in `to_svg`."""
        return mermaid.to_mermaid(self, **view)

    def to_svg(self, **view: Any) -> str:
        """The graph as a picture, which needs `gradtools[svg]`; options as in `drawing.to_svg`."""
        return drawing.to_svg(self, **view)

    def to_html(self, **view: Any) -> str:
        """The graph as a page of its own, in which blocks open and close; see `page.to_html`."""
        return page.to_html(self, **view)

    def save(self, path: str | os.PathLike[str], **view: Any) -> None:
        """Writes the form that the suffix names: .svg, .html, .dot, .gv, .mmd, .md or .txt."""
        saving.save(self, FORMS, path, **view)

    def _repr_html_(self) -> str:
        return page.framed(self.to_html())


FORMS: saving.Forms = {
    ".svg": Graph.to_svg,
    ".html": Graph.to_html,
    ".htm": Graph.to_html,
    ".dot": Graph.to_dot,
    ".gv": Graph.to_dot,
    ".mmd": Graph.to_mermaid,
    ".md": lambda graph, **view: f"```mermaid\n{graph.to_mermaid(**view)}```\n",
    ".txt": lambda graph, **view: f"{graph.to_text(**view)}\n",
}
