"""Formats texts and tables of reports for a terminal, and as HTML for a notebook.

A report is a text, optionally with ANSI colors; `coloured` converts the escape sequences to HTML
spans, so that a notebook shows the same text as a terminal. Mathematical characters that a
terminal's encoding (ASCII, cp1252) lacks are spelled out.
"""

from __future__ import annotations

import codecs
import html
import re
import sys
import unicodedata
from collections.abc import Sequence

SPELLED = "gradtools.spelled"
"""The name of the codec error handler that spells out characters.

For example, ``x ∈ ℝ³`` is printed as ``x in R^3``.
"""

_WORDS = {"∈": "in", "√": "sqrt", "∂": "d", "Σ": "sum", "∞": "inf", "×": "x", "·": "*", "∘": "o"}
_WORDS |= {"→": "->", "≠": "!=", "≤": "<=", "≥": ">=", "‖": "||", "⟨": "<", "⟩": ">", "−": "-"}
_WORDS |= {"⊙": "*", "⊕": "+", "∧": "and", "∨": "or", "′": "'", "…": "...", "–": "-", "✕": "x"}
_WORDS |= {"\N{COMBINING MACRON}": "bar"}


def printable(text: str) -> str:
    """Spells out characters of a text that the encoding of `sys.stdout` lacks."""
    encoding = getattr(sys.stdout, "encoding", None)
    if not encoding or getattr(sys.stdout, "errors", None) != "strict":
        return text
    return text.encode(encoding, SPELLED).decode(encoding)


def _spelled(error: UnicodeError) -> tuple[str, int]:
    if not isinstance(error, UnicodeEncodeError):
        raise error
    return "".join(map(_word, error.object[error.start : error.end])), error.end


def _word(character: str) -> str:
    if character in _WORDS:
        return _WORDS[character]
    name = unicodedata.name(character, "")
    if name.startswith("GREEK"):
        letter = name.partition(" WITH ")[0].rpartition(" ")[2].lower()
        return letter.title() if "CAPITAL" in name else letter
    mark = "_" if "SUBSCRIPT" in name else "^" if "SUPERSCRIPT" in name else ""
    mark = mark or ("^" if name.startswith("MODIFIER LETTER") else "")
    parts = unicodedata.normalize("NFKD", character)
    return mark + "".join(_WORDS.get(c, c if c.isascii() else "") for c in parts) or "?"


codecs.register_error(SPELLED, _spelled)


# --- tables and HTML

_STYLES = {
    "1": "font-weight: bold",
    "2": "opacity: 0.7",
    "31": "color: #c62828",
    "32": "color: #2e7d32",
    "33": "color: #b26a00",
}
_CELL = "text-align: left; padding: 0.1em 1em 0.1em 0"


def coloured(text: str) -> str:
    """Converts text with ANSI colors to a block of HTML."""
    shown = html.escape(text, quote=False)
    shown = re.sub(r"\x1b\[0m", "</span>", shown)
    shown = re.sub(r"\x1b\[(\d+)m", lambda code: f'<span style="{_STYLES[code[1]]}">', shown)
    return f'<pre style="overflow-x: auto; font-family: monospace">{shown}</pre>'


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Formats rows of text as lines, with each column as wide as its widest cell."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]


def table(rows: Sequence[Sequence[str]], notes: Sequence[str] = ()) -> str:
    """Formats rows of text as an HTML table, with the first cell of each row as its header."""
    lines = ["<table>"]
    for head, *cells in rows:
        shown = "".join(f'<td style="{_CELL}">{html.escape(cell)}</td>' for cell in cells)
        lines.append(f'<tr><th style="{_CELL}">{html.escape(head)}</th>{shown}</tr>')
    lines.append("</table>")
    return "\n".join([*lines, *(f"<p>note: {html.escape(note)}</p>" for note in notes)])
