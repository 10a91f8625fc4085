"""A graph as a self-contained HTML page, in which blocks open and close.

The page contains the arrangement of every block as data (`page_data.py`). `layout.js` and
`markup.js` redraw it whenever a block opens or closes; `page.js` handles events.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from html import escape
from typing import Any

from gradtools.seeing.graphs.nodes import PlainGraph
from gradtools.seeing.graphs.outlining import outline_of
from gradtools.seeing.pictures.box_text import short
from gradtools.seeing.pictures.page_data import data_of, script
from gradtools.seeing.pictures.palette import DARK, LIGHT, Colours, shapes_and_colours

_POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'"
_PAGE = """\
<!doctype html>
<html lang="en"{theme}>
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<style>
{style}</style>
</head>
<body>
<header>
<h1>{title}</h1>
<input id="search" type="search" placeholder="Search   /" aria-label="Search the graph">
<button id="open" type="button">Open all</button>
<button id="close" type="button">Close all</button>
<button id="smaller" type="button" aria-label="Zoom out">−</button>
<button id="larger" type="button" aria-label="Zoom in">+</button>
<button id="fit" type="button">Fit</button>
<button id="theme" type="button" aria-label="Light or dark">◐</button>
</header>
<main id="stage"><noscript>This page draws its graph with a script.</noscript></main>
<div id="key"></div>
<div id="status" role="status" aria-live="polite"></div>
<script type="application/json" id="graph">{data}</script>
<script>
{script}</script>
</body>
</html>
"""


def to_html(
    graph: PlainGraph,
    *,
    depth: int | None = None,
    expand: str | Iterable[str] = (),
    theme: str = "auto",
    title: str = "",
) -> str:
    """A graph as a self-contained HTML page; the options are those of `drawing.to_svg`."""
    outline = outline_of(graph, title=title)
    names = " and ".join(column.title for column in outline.columns)
    return _PAGE.format(
        theme=f' data-theme="{theme}"' if theme in ("light", "dark") else "",
        policy=_POLICY,
        title=escape(short(outline.title, 120) or f"Gradient graph: {names or 'empty'}"),
        style=_style(),
        data=_embedded(data_of(outline, depth, expand)),
        script="".join(map(script, ("layout.js", "markup.js", "page.js"))),
    )


def framed(page: str, height: int = 640) -> str:
    """A page in a sandboxed iframe, for notebooks."""
    look = f"width:100%;height:{height}px;border:1px solid #8884;border-radius:8px"
    return f'<iframe sandbox="allow-scripts" style="{look}" srcdoc="{escape(page)}"></iframe>'


def _style() -> str:
    css = script("page.css")
    light, dark = _variables(LIGHT), _variables(DARK)
    return (
        f":root {{ color-scheme: light dark; {light} }}\n"
        f"@media (prefers-color-scheme: dark) {{ :root {{ {dark} }} }}\n"
        f":root[data-theme=light] {{ color-scheme: light; {light} }}\n"
        f":root[data-theme=dark] {{ color-scheme: dark; {dark} }}\n"
        f"{css}{shapes_and_colours()}"
    )


def _variables(c: Colours) -> str:
    pairs = {"ink": c.ink, "paper": c.paper, "frame": c.frame, "faint": c.faint}
    pairs["focus"] = c.passes[0][0]
    return " ".join(f"--{name}: {value};" for name, value in pairs.items())


def _embedded(data: Any) -> str:
    """JSON for a script element: the characters that could end the element are escaped."""
    text = json.dumps(data, ensure_ascii=True, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")
