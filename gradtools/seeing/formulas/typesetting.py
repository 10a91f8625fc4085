r"""Typesets mathematics as Unicode text, and translates the text to LaTeX.

A `Written` object contains a text and the precedence of its outermost operator, so parentheses
are added only where they are needed. `latex` translates the tokens of the text in order::

    z̄ = (exp(z) - y²) / 5       \bar{z} = (\operatorname{exp}(z) - y^{2}) / 5
"""

from __future__ import annotations

import math
import re
import unicodedata
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

SUM, BIG, PRODUCT, POWER, ATOM = 1, 2, 3, 4, 5

_RAISED = "0123456789-+", "⁰¹²³⁴⁵⁶⁷⁸⁹⁻⁺"
_LOWERED = "0123456789-+ijklmnoprstuvxaeh'", "₀₁₂₃₄₅₆₇₈₉₋₊ᵢⱼₖₗₘₙₒₚᵣₛₜᵤᵥₓₐₑₕ′"
_NAMES = """
alpha beta gamma delta epsilon zeta eta theta iota kappa lambda mu nu xi pi rho sigma tau phi chi
psi omega Gamma Delta Theta Lambda Xi Pi Sigma Phi Psi Omega
"""
_GREEK = dict(zip(_NAMES.split(), "αβγδεζηθικλμνξπρστφχψωΓΔΘΛΞΠΣΦΨΩ", strict=True))


@dataclass(frozen=True)
class Written:
    """A mathematical expression as Unicode text, with the precedence of its operator."""

    text: str
    level: int = ATOM  # the precedence: SUM, BIG (a sum sign), PRODUCT, POWER or ATOM

    def at(self, level: int) -> Written:
        """Adds parentheses if the precedence is below `level`."""
        return self if self.level >= level else bracket(self)


def bracket(x: Written) -> Written:
    """Encloses x in parentheses."""
    return Written(f"({x.text})")


def join(pieces: Iterable[Written], between: str, level: int) -> Written:
    """Joins `Written` pieces with a separator."""
    return Written(between.join(p.text for p in pieces), level)


def symbol(name: str) -> Written:
    """Formats a name: writes alpha as α, and trailing digits or text after _ as subscripts."""
    match = re.fullmatch(r"([^\W\d_]+)_?(\d+)", name) or re.fullmatch(r"([^\W\d_])_(\w+)", name)
    base, index = match.groups() if match else (name, "")
    return Written(_GREEK.get(base, base) + (below(index) if index else ""))


BAR, _OVERLINE = "\u0304", "\u0305"


def has_bar(x: Written) -> bool:
    """Returns whether a name has a bar, which marks the names of cotangents."""
    return BAR in unicodedata.normalize("NFD", x.text)


def bar(x: Written) -> Written:
    """Formats the cotangent of x as the name of x with a bar."""
    text = unicodedata.normalize("NFD", x.text)
    head = re.match(r"[A-Za-zα-ωΑ-Ω]+", text)
    base = head.group() if head else text[:1]
    marked = "".join(c + (_OVERLINE if len(base) > 1 else BAR) for c in base)
    return Written(unicodedata.normalize("NFC", marked + text[len(base) :]))


def below(text: str) -> str:
    """Formats a subscript in Unicode, or after an underscore if Unicode lacks a subscript."""
    small = text.translate(str.maketrans(*_LOWERED))
    return small if set(small) <= set(_LOWERED[1]) else f"_{text}"


def power(x: Written, exponent: Any, mark: str = "") -> Written:
    """Formats a power of x with a constant exponent, and the symbol `mark` before the exponent."""
    if exponent == 0.5:
        return Written(f"√{x.at(ATOM).text}", POWER)
    shown = number(exponent).text
    plain = re.fullmatch(r"[-\d]+", shown)
    high = mark + (shown.translate(str.maketrans(*_RAISED)) if plain else f"({shown})")
    return Written(f"{x.at(ATOM).text}{'' if plain and not mark else '^'}{high}", POWER)


def superscript(x: Written, mark: str) -> Written:
    """Adds the superscript `mark` to x, such as ᵀ for the transpose."""
    return Written(x.at(ATOM).text + mark, POWER)


def function(name: str, args: Iterable[Written], axes: str = "") -> Written:
    """Formats a function call, with the reduced axes as a subscript."""
    return Written(f"{name}{below(axes) if axes else ''}({join(args, ', ', SUM).text})")


def inner_product(a: Written, b: Written) -> Written:
    """Formats the inner product <a, b>."""
    return Written(f"⟨{a.text}, {b.text}⟩")


# --- numbers


def number(value: Any) -> Written:
    """Formats a number, if possible as a short fraction or a root."""
    if isinstance(value, complex):
        size, sign = number(abs(value.imag)).text, "-" if value.imag < 0 else "+"
        if value.real:
            return Written(f"{number(value.real).text} {sign} {size}i", SUM)
        sign, size = "-" * (value.imag < 0), "" if size == "1" else size
        return Written(f"{sign}{size}i", SUM if sign else PRODUCT if size else ATOM)
    value = float(value)
    level = SUM if value < 0 or value != value else ATOM
    if not math.isfinite(value):
        return Written({"inf": "∞", "-inf": "-∞"}.get(str(value), "NaN"), level)
    if value.is_integer() or abs(value) >= 1e15:
        return Written(f"{value:.6g}" if abs(value) >= 1e15 else str(int(value)), level)
    square = round(value * value)
    if value > 0 and math.isclose(square**0.5, value, rel_tol=1e-14):
        return Written(f"√{square}", POWER)
    top, bottom = halves(value)
    if not 1 < bottom <= 1000 or (bottom in _DECIMAL and len(f"{value:g}") <= 5):
        return Written(f"{value:.6g}", level)
    return Written(f"{number(top).text}/{number(bottom).text}", min(level, PRODUCT))


_DECIMAL = (5, 10, 20, 100, 1000)  # denominators of numbers that are written as decimals


def halves(value: float) -> tuple[float, float]:
    """Returns the numerator and denominator of a short fraction or 1/√n, else (value, 1)."""
    near, square = Fraction(value).limit_denominator(10**6), round(value**-2)
    if 0 < abs(near.numerator) < 10 and math.isclose(near, value, rel_tol=1e-14):
        return float(near.numerator), float(near.denominator)
    if math.isclose(square**-0.5 if square else 0.0, abs(value), rel_tol=1e-14):
        return math.copysign(1.0, value), square**0.5
    return value, 1.0


# --- arithmetic


def summed(terms: Sequence[Written]) -> Written:
    """Formats a sum; terms that begin with a minus sign come last and are subtracted."""
    terms = sorted(terms, key=lambda t: t.text.startswith("-"))
    signed = [f" - {t.text[1:]}" if t.text.startswith("-") else f" + {t.text}" for t in terms[1:]]
    return Written("".join([terms[0].text, *signed]), SUM if signed else terms[0].level)


def over(top: Written, bottom: Written) -> Written:
    """Formats a fraction."""
    return Written(f"{top.at(PRODUCT).text} / {bottom.at(POWER).text}", PRODUCT)


# --- LaTeX

_LETTERS = "A-Za-zα-ρς-ωΑ-ΡΤ-Ωϕ"
_NESTED = r"\((?:[^()]|\((?:[^()]|\([^()]*\))*\))*\)"
_TOKEN = re.compile(
    rf"(?P<open>√|\^∘?)(?P<operand>{_NESTED}|[^\s()\[\],⟩‖|]+)"
    rf"|(?P<name>[{_LETTERS}][{_LETTERS}0-9_{BAR}{_OVERLINE}]*)"
    rf"|(?P<low>[{_LOWERED[1]}]+)|(?P<high>[{_RAISED[1]}]+)|(?P<sign>.)"
)
_COMMANDS = r"""
\odot \langle \rangle \| \infty \le \ge \ne
\partial \sum \times \to \xi ^{\top} ^{H} ^{*}
""".split()
_SIGNS = dict(zip("⊙⟨⟩‖∞≤≥≠∂Σ×→ξᵀᴴ*", _COMMANDS, strict=True))
_SIGNS |= {sign: rf"\{sign}" for sign in "#%&$_{}"}


def latex(text: str) -> str:
    """Converts formula text to LaTeX."""

    def of_token(token: re.Match[str]) -> str:
        if token["open"]:  # a root or an exponent
            inner = token["operand"]
            inner = inner[1:-1] if inner.startswith("(") else inner
            raised = inner[0] in _RAISED[1]
            inner = inner.translate(str.maketrans(*_RAISED[::-1])) if raised else inner
            head = {"√": r"\sqrt{", "^": "^{", "^∘": r"^{\circ "}[token["open"]]
            return head + latex(inner) + "}"
        if token["low"]:
            return "_{" + token["low"].translate(str.maketrans(*_LOWERED[::-1])) + "}"
        if token["high"]:
            return "^{" + token["high"].translate(str.maketrans(*_RAISED[::-1])) + "}"
        if token["sign"]:
            sign = _SIGNS.get(token["sign"], token["sign"])
            return sign + " " * (sign[-1].isalpha() and sign.startswith("\\"))
        base, _, index = token["name"].partition("_")
        plain = base.replace(BAR, "").replace(_OVERLINE, "")
        greek = next((f"\\{word} " for word, letter in _GREEK.items() if letter == plain), "")
        shown = greek or (plain if len(plain) == 1 else rf"\operatorname{{{plain}}}")
        if plain != base:
            shown = ("\\bar" if BAR in base else r"\overline") + f"{{{shown}}}"
        return shown + ("_{" + latex(index) + "}" if index else "")

    return _TOKEN.sub(of_token, unicodedata.normalize("NFD", text))
