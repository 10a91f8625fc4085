"""Draws a graph as a self-contained HTML page, or as an SVG document.

The layout is in JavaScript, because the page computes a new layout whenever a block is expanded or
collapsed: `layout.js` and `markup.js` draw the data of `page_data.py`, and `page.js` handles
events. For an SVG file, QuickJS runs the same scripts. The SVG and HTML output use the light or
dark setting of the reader's system.
"""

from __future__ import annotations

import json
from html import escape
from typing import Any

from gradtools.arguments.checks import check_choice
from gradtools.errors import GradtoolsError
from gradtools.seeing.graphs.nodes import PlainGraph
from gradtools.seeing.graphs.outlining import outline_of
from gradtools.seeing.pictures.box_text import short
from gradtools.seeing.pictures.page_data import data_of, script
from gradtools.seeing.pictures.palette import THEMES, page_style, style_sheet

_THEMES = ("auto", *THEMES)
_STACK = 64 << 20  # stack size in bytes, for 1000 levels of nested blocks
_FILE = """
(data, style) => {
  const G = JSON.parse(data);
  return JSON.stringify(markup.file(G, layout.fitted(G).picture, style));
}
"""


def to_svg(
    graph: PlainGraph,
    *,
    depth: int | None = None,
    theme: str = "auto",
    title: str = "",
) -> str:
    """Draws a graph as SVG; requires ``gradtools[svg]``.

    Args:
        graph: The gradient graph to draw.
        depth: The number of expanded levels of blocks; None expands as many levels as fit on a
            screen.
        theme: "light", "dark", or "auto" for the setting of the reader's system.
        title: The title of the picture.

    Returns:
        An SVG document.

    Raises:
        GradtoolsError: theme is unknown, or quickjs-ng is not installed.
    """
    check_choice("to_svg", "theme", theme, _THEMES)
    data = json.dumps(data_of(outline_of(graph, title=title), depth))
    document: str = json.loads(interpreter().eval(_FILE)(data, style_sheet(theme)))
    return document


def interpreter() -> Any:
    """Returns a JavaScript context with the layout and markup scripts, for use in this thread."""
    try:
        import quickjs
    except ModuleNotFoundError:
        raise GradtoolsError(
            "to_svg: an SVG file needs quickjs-ng, which is not installed. Fix: "
            'pip install "gradtools[svg]", or write an .html page, which needs no interpreter.'
        ) from None
    context = quickjs.Context()
    context.set_max_stack_size(_STACK)
    context.eval(script("layout.js") + script("markup.js"))
    return context


# --- pages -------------------------------------------------------------------------------


def to_html(
    graph: PlainGraph,
    *,
    depth: int | None = None,
    theme: str = "auto",
    title: str = "",
) -> str:
    """Draws a graph as a self-contained HTML page with collapsible blocks; see `to_svg`."""
    check_choice("to_html", "theme", theme, _THEMES)
    outline = outline_of(graph, title=title)
    names = " and ".join(column.title for column in outline.columns)
    data = json.dumps(data_of(outline, depth), separators=(",", ":"))
    for letter in "<>&":  # these characters could end the script element
        data = data.replace(letter, f"\\u{ord(letter):04x}")
    return script("page.html").format(
        theme=f' data-theme="{theme}"' if theme in THEMES else "",
        title=escape(short(outline.title, 120) or f"Gradient graph: {names or 'empty'}"),
        style=page_style(script("page.css")),
        data=data,
        script="".join(map(script, ("layout.js", "markup.js", "page.js"))),
    )


def framed(page: str, height: int = 640) -> str:
    """Wraps a page in a sandboxed iframe, for notebooks."""
    look = f"width:100%;height:{height}px;border:1px solid #8884;border-radius:8px"
    return f'<iframe sandbox="allow-scripts" style="{look}" srcdoc="{escape(page)}"></iframe>'
