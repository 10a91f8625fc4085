"""The picture as an SVG document, drawn by the scripts of the page, `layout.js` and `markup.js`.

There is one layout, in the language of the page that lays a graph out again whenever a block opens
or closes. QuickJS, a small interpreter, runs it here. Colours come from a style sheet in the
picture itself, so it follows the reader's light or dark setting.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

from gradtools.errors import GradtoolsError
from gradtools.seeing.graphs.collapse import outline_of
from gradtools.seeing.graphs.nodes import PlainGraph
from gradtools.seeing.pictures.page_data import data_of, script
from gradtools.seeing.pictures.palette import style_sheet

_STACK = 64 << 20  # bytes: blocks may lie a thousand deep in one another
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
    fold: bool | None = None,
    theme: str = "auto",
    engine: str = "gradtools",
    title: str = "",
) -> str:
    """A graph as a picture.

    Args:
        graph: The graph.
        depth: How many levels of blocks are open; None: as many as fit one screen.
        expand: Names of blocks to open in any case, such as "layers.3.attention" or "*.attention".
        fold: Whether repeated blocks are drawn once with their count; None: in large graphs.
        theme: "light", "dark", or "auto": as the reader's system is set.
        engine: "gradtools", or "graphviz" for the layout of an installed `dot`.
        title: What stands above the picture.

    Returns:
        An SVG document.

    Raises:
        GradtoolsError: an unknown theme or engine; quickjs-ng, or the `dot` that is asked for, is
            not installed.
    """
    _choice("theme", theme, ("auto", "light", "dark"))
    _choice("engine", engine, ("gradtools", "graphviz"))
    if engine == "graphviz":
        from gradtools.seeing.pictures.dot import drawn_by_graphviz

        return drawn_by_graphviz(graph, depth=depth, expand=expand, fold=fold, title=title)
    outline = outline_of(graph, fold=fold, expand=expand, title=title)
    data = json.dumps(data_of(outline, depth, expand))
    document: str = json.loads(interpreter().eval(_FILE)(data, style_sheet(theme)))
    return document


def _choice(name: str, given: str, known: tuple[str, ...]) -> None:
    if given not in known:
        raise GradtoolsError(f"to_svg: {name}={given!r} is not known; expected one of {known}.")


def interpreter() -> Any:
    """A JavaScript context that knows the layout and the markup; it stays in its thread."""
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
