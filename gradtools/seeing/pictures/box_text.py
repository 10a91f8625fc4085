"""Wraps and measures the text of a box, and computes the size of the box.

Text is set in a monospaced font. Common monospaced fonts differ by a few percent in width;
`_ADVANCE` is an upper bound. Long text is wrapped at separators such as spaces, dots and slashes.
"""

from __future__ import annotations

import re
import unicodedata
from dataclasses import dataclass
from functools import lru_cache

from gradtools.seeing.graphs.outline import Block, Box

TITLE, LINE = 13.0, 11.0
_ADVANCE = 0.615  # the width of a letter relative to the font size: 0.602 in DejaVu Sans Mono
_LONGEST = {"title": 30, "line": 34}
_MOST_LINES = 4  # maximum number of lines; longer text is shortened in the middle
_PAD_X, _PAD_Y = 12.0, 8.0
_HEIGHT = {"title": 17.0, "line": 14.5, "mark": 17.0, "alert": 15.5}
_CLOSED = "▸ "


@dataclass(frozen=True)
class Row:
    """A line of text with its style and the distance of its baseline from the top of the box."""

    text: str
    style: str
    y: float


@dataclass(frozen=True)
class Card:
    """The lines of text and the size of a box."""

    rows: tuple[Row, ...]
    width: float
    height: float


def card_of(item: Box | Block) -> Card:
    """Returns the lines of text and the size of a box or of a collapsed block."""
    titles = [*_lines(item.heading if isinstance(item, Box) else item.title, _LONGEST["title"])]
    titles[0] = titles[0] if isinstance(item, Box) else _CLOSED + titles[0]
    texts = [("title", line) for line in titles]
    signature = (item.signature,) if isinstance(item, Block) and (item.made or item.given) else ()
    for text in (*signature, *item.lines):
        alerts = [box.alert for box in item.boxes] if isinstance(item, Block) else []
        style = "alert" if text in alerts else "line"
        texts += [(style, line) for line in _lines(text, _LONGEST["line"])]
    texts += [("mark", item.mark)] if item.mark else []
    if isinstance(item, Box) and item.alert:
        texts += [("alert", line) for line in _lines(f"✕ {item.alert}", _LONGEST["line"])]
    rows, y = [], _PAD_Y
    for style, text in texts:
        rows.append(Row(text, style, y + _HEIGHT[style] - 4.5))
        y += _HEIGHT[style]
    width = max(text_width(text, size_of(style)) + 8 * (style == "mark") for style, text in texts)
    return Card(tuple(rows), max(64.0, round(width + 2 * _PAD_X, 1)), round(y + _PAD_Y - 1, 1))


def size_of(style: str) -> float:
    """Returns the font size of a style such as "title"."""
    return TITLE if style == "title" else LINE


@lru_cache(maxsize=10000)
def text_width(text: str, size: float) -> float:
    """Returns an upper bound on the width of a text in common monospaced fonts."""
    return size * (len(text) * _ADVANCE if text.isascii() else sum(map(_advance, text)))


def _advance(letter: str) -> float:
    if letter.isascii():
        return _ADVANCE
    if unicodedata.combining(letter):
        return 0.0
    wide = unicodedata.east_asian_width(letter) in "WFA" or ord(letter) > 0x2FFF
    return 1.3 if ord(letter) > 0xFFFF else 1.05 if wide else 0.8


@lru_cache(maxsize=10000)
def _lines(text: str, longest: int) -> tuple[str, ...]:
    """Wraps a text into lines of at most `longest` characters, at separators if possible."""
    text = shown(text)
    if len(text) > longest * _MOST_LINES:
        half = longest * _MOST_LINES // 2 - 2
        text = f"{text[:half]} … {text[-half:]}"
    lines = [""]
    for piece in re.findall(r"[^\s._/\[\],-]*[\s._/\[\],-]?", text):
        if lines[-1] and len(lines[-1]) + len(piece.rstrip()) > longest:
            lines.append("")
        lines[-1] += piece
        while len(lines[-1].rstrip()) > longest:
            lines[-1:] = [lines[-1][:longest], lines[-1][longest:]]
    return tuple(line.strip() for line in lines if line.strip()) or (" ",)


def short(text: str, longest: int = 60) -> str:
    """Formats a text on one line, shortened in the middle to `longest` characters."""
    text = shown(text)
    half = longest // 2
    return text if len(text) <= longest else f"{text[: half - 1]}…{text[-half:]}"


def shown(text: str) -> str:
    """Replaces control characters and surrogates, which cannot be drawn, with a dot."""
    if text.isascii() and text.isprintable():
        return text
    return "".join(
        letter if unicodedata.category(letter) not in ("Cc", "Cs", "Cf", "Co", "Cn") else "·"
        for letter in text
    )
