"""Typesetting: mathematics as text for terminals and as LaTeX, built together.

A `Written` piece holds both forms and the precedence of its outermost operator, so that brackets
are only set where they are needed.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

SUM, BIG, PRODUCT, POWER, ATOM = 1, 2, 3, 4, 5

_SUPERSCRIPTS = str.maketrans("0123456789-+", "⁰¹²³⁴⁵⁶⁷⁸⁹⁻⁺")
_NAMES = """
alpha beta gamma delta epsilon zeta eta theta iota kappa lambda mu nu xi pi rho sigma tau phi chi
psi omega Gamma Delta Theta Lambda Xi Pi Sigma Phi Psi Omega
"""
_GREEK = dict(zip(_NAMES.split(), "αβγδεζηθικλμνξπρστφχψωΓΔΘΛΞΠΣΦΨΩ", strict=True))
_LOW = str.maketrans("0123456789-+ijklmnoprstuvxaeh'", "₀₁₂₃₄₅₆₇₈₉₋₊ᵢⱼₖₗₘₙₒₚᵣₛₜᵤᵥₓₐₑₕ′")
_SMALL = set("₀₁₂₃₄₅₆₇₈₉₋₊ᵢⱼₖₗₘₙₒₚᵣₛₜᵤᵥₓₐₑₕ′")
_TO_LATEX = {letter: "\\" + name for name, letter in _GREEK.items()} | {"ε": "\\varepsilon"}


@dataclass(frozen=True)
class Written:
    """A piece of mathematics.

    Attributes:
        text: For terminals.
        latex: For papers.
        level: The precedence: SUM, BIG (a sum sign), PRODUCT, POWER or ATOM.
    """

    text: str
    latex: str
    level: int = ATOM

    def at(self, level: int) -> Written:
        """In brackets, if its precedence is below this level."""
        return self if self.level >= level else bracket(self)


def bracket(x: Written) -> Written:
    """In round brackets."""
    return Written(f"({x.text})", rf"\left({x.latex}\right)")


def join(pieces: Sequence[Written], text: str, latex: str, level: int) -> Written:
    """Pieces with separators between."""
    return Written(text.join(p.text for p in pieces), latex.join(p.latex for p in pieces), level)


def symbol(name: str) -> Written:
    """A name: Greek words become letters; trailing digits, or text after _, become a subscript."""
    match = re.fullmatch(r"([^\W\d_]+)_?(\d+)", name) or re.fullmatch(r"([^\W\d_])_(\w+)", name)
    base, index = match.groups() if match else (name, "")
    letter = _GREEK.get(base, base)
    latex = _TO_LATEX.get(letter, letter)
    if len(letter) > 1:
        latex = r"\mathrm{" + letter.replace("_", r"\_") + "}"
    if not index:
        return Written(letter, latex)
    shown = index if index.isdigit() else r"\mathrm{" + index.replace("_", r"\_") + "}"
    return Written(letter + below(index), f"{latex}_{{{shown}}}")


BAR = "\u0304"


def has_bar(x: Written) -> bool:
    """Whether a name has a bar: the name of a cotangent."""
    return BAR in unicodedata.normalize("NFD", x.text)


def accent(x: Written, mark: str, command: str) -> Written:
    """A combining mark over the letters of a name."""
    text = unicodedata.normalize("NFD", x.text)
    head = re.match(r"[A-Za-zα-ωΑ-Ω]+", text)
    base = head.group() if head else text[:1]
    over = "\u0305" if len(base) > 1 and mark == BAR else mark
    marked = unicodedata.normalize("NFC", "".join(c + over for c in base) + text[len(base) :])
    split = re.fullmatch(r"(.*?)((?:_\{.*\})?)", x.latex)
    stem, rest = split.groups() if split else (x.latex, "")
    return Written(marked, f"{command}{{{stem}}}{rest}")


def bar(x: Written) -> Written:
    """The cotangent of x."""
    return accent(x, BAR, r"\bar" if len(x.latex.split("_")[0]) < 9 else r"\overline")


def below(text: str, otherwise: str = "_{}") -> str:
    """A subscript in Unicode, or `otherwise` where a letter has none."""
    small = text.translate(_LOW)
    return small if all(c in _SMALL for c in small) else otherwise.format(text)


def subscript(x: Written, text: str) -> Written:
    """An index below."""
    x = x.at(ATOM)
    there = re.search(r"_\{[^{}]*\}$", x.latex)
    latex = x.latex[:-1] + f",{text}}}" if there else f"{x.latex}_{{{text}}}"
    return Written(x.text + below(text, "[{}]"), latex)


def power(x: Written, exponent: Any) -> Written:
    """A constant power."""
    if exponent == 0.5:
        return Written(f"√{x.at(ATOM).text}", rf"\sqrt{{{x.latex}}}", POWER)
    base = x.at(ATOM)
    written = number(exponent)
    simple = re.fullmatch(r"[-\d]+", written.text)
    high = written.text.translate(_SUPERSCRIPTS) if simple else f"^({written.text})"
    return Written(base.text + high, f"{base.latex}^{{{written.latex}}}", POWER)


def superscript(x: Written, text: str, latex: str) -> Written:
    """A superscript mark such as that of the transpose."""
    base = x.at(ATOM)
    return Written(base.text + text, f"{base.latex}^{{{latex}}}", POWER)


def function(name: str, args: Sequence[Written], axes: str = "", latex: str = "") -> Written:
    """A function of arguments, with its axes as a subscript."""
    known = {"exp", "log", "sin", "cos", "tan", "sinh", "cosh", "tanh", "det", "max", "min"}
    command = latex or (f"\\{name}" if name in known else operator(name))
    under = f"_{{{axes}}}" if axes else ""
    inside = join(args, ", ", ", ", SUM)
    head = name + below(axes) if axes else name
    return Written(f"{head}({inside.text})", rf"{command}{under}\left({inside.latex}\right)")


def operator(name: str) -> str:
    """The LaTeX of an operation's name; a last ᵀ is its transpose."""
    plain = name.removesuffix("ᵀ").replace("_", r"\_")
    return rf"\operatorname{{{plain}}}" + (r"^{\top}" if name.endswith("ᵀ") else "")


def inner_product(a: Written, b: Written) -> Written:
    """The inner product <a, b>."""
    return Written(f"⟨{a.text}, {b.text}⟩", rf"\left\langle {a.latex}, {b.latex} \right\rangle")


def number(value: Any) -> Written:
    """A number, as a short fraction or a root where it equals one."""
    if isinstance(value, complex):
        return _complex_number(value)
    value = float(value)
    if value != value or value in (float("inf"), float("-inf")):
        text = {"inf": "∞", "-inf": "-∞"}.get(str(value), "NaN")
        return Written(text, text.replace("∞", r"\infty"), ATOM if value > 0 else SUM)
    level = ATOM if value >= 0 else SUM
    if value.is_integer() and abs(value) < 1e15:
        return Written(str(int(value)), str(int(value)), level)
    result = None if abs(value) >= 1e15 else _as_fraction(value) or _as_root(value)
    if result is not None:
        return result
    text = f"{value:.6g}"
    latex = re.sub(r"e([+-])0*(\d+)", lambda m: rf" \cdot 10^{{{m[1].strip('+')}{m[2]}}}", text)
    latex = latex.removeprefix(r"1 \cdot ")
    return Written(text, latex, level)


def _complex_number(value: complex) -> Written:
    if not value.real:
        if abs(value.imag) == 1:
            text = "i" if value.imag > 0 else "-i"
            return Written(text, text, ATOM if value.imag > 0 else SUM)
        size = number(value.imag)
        return Written(size.text + "i", size.latex + "i", min(size.level, PRODUCT))
    re_, im = number(value.real), number(abs(value.imag))
    sign = "+" if value.imag > 0 else "-"
    return Written(f"{re_.text} {sign} {im.text}i", f"{re_.latex} {sign} {im.latex}i", SUM)


_LONGEST = 1000  # denominators up to here are written as fractions


def _as_fraction(value: float) -> Written | None:
    near = Fraction(value).limit_denominator(_LONGEST)
    if near == 0 or abs(float(near) - value) > 1e-14 * abs(value):
        return None
    if near.denominator in (5, 10, 20, 100, 1000) and len(f"{value:g}") <= 5:
        return Written(f"{value:g}", f"{value:g}", ATOM if value > 0 else SUM)
    sign, top, bottom = "-" * (near < 0), abs(near.numerator), near.denominator
    level = PRODUCT if near > 0 else SUM
    return Written(f"{sign}{top}/{bottom}", rf"{sign}\tfrac{{{top}}}{{{bottom}}}", level)


def _as_root(value: float) -> Written | None:
    """The square root of a small fraction, or its reciprocal."""
    near = Fraction(value * value).limit_denominator(_LONGEST)
    if near == 0 or abs(float(near) ** 0.5 - abs(value)) > 1e-14 * abs(value):
        return None
    sign = "-" * (value < 0)
    if near.denominator == 1:
        n = near.numerator
        return Written(f"{sign}√{n}", rf"{sign}\sqrt{{{n}}}", POWER if value > 0 else SUM)
    if near.numerator == 1:
        n = near.denominator
        return Written(f"{sign}1/√{n}", rf"{sign}1/\sqrt{{{n}}}", PRODUCT if value > 0 else SUM)
    return None


def negative(x: Written) -> Written:
    """Minus x."""
    body = x.at(BIG)
    return Written(f"-{body.text}", f"-{body.latex}", SUM)


def summed(terms: Sequence[Written]) -> Written:
    """A sum; terms that begin with a minus are subtracted."""
    text, latex = terms[0].text, terms[0].latex
    for term in terms[1:]:
        minus = term.text.startswith("-")
        low = term.latex.startswith("-")
        text += f" - {term.text[1:]}" if minus else f" + {term.text}"
        latex += f" - {term.latex[1:]}" if low else f" + {term.latex}"
    return Written(text, latex, SUM if len(terms) > 1 else terms[0].level)


def over(top: Written, bottom: Written) -> Written:
    """A fraction; in LaTeX its line makes brackets around numerator and denominator needless."""
    up, down = top.at(PRODUCT), bottom.at(POWER)
    high, deep = _bare(top), _bare(bottom)
    return Written(f"{up.text} / {down.text}", rf"\frac{{{high}}}{{{deep}}}", PRODUCT)


def _bare(x: Written) -> str:
    """LaTeX without a pair of brackets around the whole."""
    inner = x.latex.removeprefix(r"\left(").removesuffix(r"\right)")
    whole = len(inner) == len(x.latex) - len(r"\left(") - len(r"\right)")
    return inner if whole and _balanced(inner) else x.latex


def _balanced(latex: str) -> bool:
    depth = 0
    for bracket_command in re.findall(r"\\left(?![a-z])|\\right(?![a-z])", latex):
        depth += 1 if bracket_command == r"\left" else -1
        if depth < 0:
            return False
    return depth == 0
