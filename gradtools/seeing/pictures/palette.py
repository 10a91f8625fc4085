"""Defines the colors of the pictures, for light and for dark backgrounds.

The passes are blue, orange and purple with different lightness, based on Okabe and Ito (2008), so
that readers with any type of color vision can distinguish the passes. No information is shown by
color alone: each pass is a column with a title, edges that lose a gradient have a cross and a
reason, residuals are dashed, and marks are words.
"""

from __future__ import annotations

from dataclasses import dataclass
from string import Template

from gradtools.seeing.pictures.page_data import script


@dataclass(frozen=True)
class Colours:
    """The colors of a theme; each pass has an edge color and a fill color."""

    paper: str
    ink: str
    faint: str
    frame: str
    line: str
    cut: str
    passes: tuple[tuple[str, str], ...]


LIGHT = Colours(
    paper="#ffffff",
    ink="#1b1f24",
    faint="#57606a",
    frame="#c9d1d9",
    line="#8a949e",
    cut="#c4001a",
    passes=(("#0f69c4", "#e6f0fa"), ("#b35900", "#fff0dc"), ("#551a5b", "#f4e7f5")),
)
DARK = Colours(
    paper="#0e1116",
    ink="#e8edf2",
    faint="#a3adb8",
    frame="#3a434d",
    line="#76818c",
    cut="#ff5c63",
    passes=(("#4a95ff", "#10263f"), ("#f59a23", "#38260d"), ("#f7cdf0", "#382037")),
)
THEMES = {"light": LIGHT, "dark": DARK}
FONT = (
    "ui-monospace, SFMono-Regular, Menlo, Consolas, 'DejaVu Sans Mono', 'Liberation Mono', "
    "monospace"
)


def style_sheet(theme: str = "auto") -> str:
    """Returns the CSS of an SVG picture for the theme "light", "dark" or "auto"."""
    shapes = Template(script("shapes.css")).substitute(font=FONT)
    if theme in THEMES:
        return shapes + _coloured(THEMES[theme])
    dark = f"@media (prefers-color-scheme: dark) {{\n{_coloured(DARK)}}}\n"
    return f"{shapes}{_coloured(LIGHT)}{dark}"


def page_style(css: str) -> str:
    """Returns the CSS of an HTML page; ``data-theme`` overrides the setting of the system.

    css: The style sheet of the page, which uses the colors as CSS variables.
    """
    light, dark = (
        f"--ink: {c.ink}; --paper: {c.paper}; --frame: {c.frame}; --faint: {c.faint}; "
        f"--focus: {c.passes[0][0]};"
        for c in THEMES.values()
    )
    chosen = [
        _coloured(colours).replace(".gt", f":root[data-theme={name}] .gt")
        for name, colours in THEMES.items()
    ]
    return (
        f":root {{ color-scheme: light dark; {light} }}\n"
        f"@media (prefers-color-scheme: dark) {{ :root {{ {dark} }} }}\n"
        f":root[data-theme=light] {{ color-scheme: light; {light} }}\n"
        f":root[data-theme=dark] {{ color-scheme: dark; {dark} }}\n"
        f"{css}{style_sheet()}{''.join(chosen)}"
    )


def _coloured(c: Colours) -> str:
    passes = {
        f"{use}{k}": c.passes[k][i] for k in range(3) for i, use in enumerate(("edge", "fill"))
    }
    return Template(script("colours.css")).substitute(vars(c), **passes)
