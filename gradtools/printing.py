"""Text for a terminal that lacks mathematical characters, as one of ASCII or cp1252 does."""

import codecs
import sys
import unicodedata

SPELLED = "gradtools.spelled"
"""The error handler that spells what an encoding lacks, for example ``x ∈ ℝ³`` as ``x in R^3``."""

_WORDS = {"∈": "in", "√": "sqrt", "∂": "d", "Σ": "sum", "∞": "inf", "×": "x", "·": "*", "∘": "o"}
_WORDS |= {"→": "->", "≠": "!=", "≤": "<=", "≥": ">=", "‖": "||", "⟨": "<", "⟩": ">", "−": "-"}
_WORDS |= {"⊙": "*", "⊕": "+", "∧": "and", "∨": "or", "′": "'", "…": "...", "–": "-", "✕": "x"}
_WORDS |= {"\N{COMBINING MACRON}": "bar"}


def printable(text: str) -> str:
    """The text as `print` can write it: what the encoding of `sys.stdout` lacks is spelled."""
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
