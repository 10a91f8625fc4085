"""A graph as an SVG document, drawn by the scripts of the HTML page, `layout.js` and `markup.js`.

There is one layout, in JavaScript, because the page runs it again whenever a block opens or closes.
Here QuickJS runs it. The picture contains its style sheet and follows the reader's light or dark
setting.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

from gradtools.errors import GradtoolsError
from gradtools.seeing.graphs.nodes import PlainGraph
from gradtools.seeing.graphs.outlining import outline_of
from gradtools.seeing.pictures.page_data import data_of, script
from gradtools.seeing.pictures.palette import style_sheet

_THEMES = ("auto", "light", "dark")
_STACK = 64 << 20  # bytes, enough for blocks nested a thousand deep
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
    expand: str | Iterable[str] = (),
    theme: str = "auto",
    title: str = "",
) -> str:
    """A graph as a picture.

    Args:
        graph: The graph.
        depth: The number of open levels of blocks; None opens as many as fit one screen.
        expand: Names of blocks to open in any case, such as "layers.3.attention" or "*.attention".
        theme: "light", "dark", or "auto", the setting of the reader's system.
        title: The picture's title.

    Returns:
        An SVG document.

    Raises:
        GradtoolsError: an unknown theme; quickjs-ng is not installed.
    """
    if theme not in _THEMES:
        raise GradtoolsError(f"to_svg: theme={theme!r} is not known; expected one of {_THEMES}.")
    outline = outline_of(graph, title=title)
    data = json.dumps(data_of(outline, depth, expand))
    document: str = json.loads(interpreter().eval(_FILE)(data, style_sheet(theme)))
    return document


def interpreter() -> Any:
    """A JavaScript context with the layout and markup scripts; bound to the current thread."""
    try:
        import quickjs
    except ModuleNotFoundError:
        raise GradtoolsError(
            "to_svg: a picture in a file needs quickjs-ng, which is not installed. Fix: "
            'pip install "gradtools[svg]", or write a page, .html, which draws itself.'
        ) from None
    context = quickjs.Context()
    context.set_max_stack_size(_STACK)
    context.eval(script("layout.js") + script("markup.js"))
    return context
