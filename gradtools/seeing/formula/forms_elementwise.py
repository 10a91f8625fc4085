"""Notation of elementwise functions: powers, conditions, cases, and plain names.

Each form gets the expression, its arguments as they are written, and whether it is a matrix that
is written whole, where a power must not be mistaken for a product of matrices.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from gradtools.seeing.formula import typesetting as ts
from gradtools.seeing.formula.expressions import Expr
from gradtools.seeing.formula.typesetting import (
    ATOM,
    POWER,
    PRODUCT,
    SUM,
    Written,
    function,
    join,
    number,
    over,
    summed,
    superscript,
)

_Form = Callable[[Expr, list[Written], bool], Written]


def _power(x: Expr, args: list[Written], matrix: bool) -> Written:
    (base,) = args
    exponent = x["exponent"]
    if isinstance(exponent, complex) or exponent >= 0:
        return _raised(base, exponent, matrix)
    return over(number(1.0), _raised(base, -exponent, matrix))


def _raised(base: Written, exponent: Any, matrix: bool) -> Written:
    if exponent == 1:
        return base
    if matrix and exponent != 0.5:
        shown = number(exponent)
        plain = ts.power(Written("", ""), exponent).text
        return superscript(base, "^∘" + plain.lstrip("^"), rf"\circ {shown.latex}")
    return ts.power(base, exponent)


_SIGNS = {"<=": ("≤", r"\le"), ">=": ("≥", r"\ge"), "==": ("=", "="), "!=": ("≠", r"\ne")}


def _condition(x: Expr, args: list[Written]) -> Written:
    text, latex = _SIGNS.get(x["relation"], (x["relation"],) * 2)
    a, b = (arg.at(PRODUCT) for arg in args)
    return Written(f"{a.text} {text} {b.text}", f"{a.latex} {latex} {b.latex}", SUM)


def _compare(x: Expr, args: list[Written], matrix: bool) -> Written:
    inner = _condition(x, args)
    return Written(f"1[{inner.text}]", rf"\mathbf{{1}}\left[{inner.latex}\right]")


def _where(x: Expr, args: list[Written], matrix: bool) -> Written:
    c, a, b = args
    bare = x.args[0].op == "compare" and c.text.startswith("1[")
    condition = c.text[2:-1] if bare else c.text
    low = c.latex.removeprefix(r"\mathbf{1}\left[").removesuffix(r"\right]") if bare else c.latex
    return Written(
        f"{{{a.text} if {condition}; {b.text} otherwise}}",
        rf"\begin{{cases}} {a.latex} & {low} \\ {b.latex} & \text{{otherwise}} \end{{cases}}",
    )


def _modulus(x: Expr, args: list[Written], matrix: bool) -> Written:
    return Written(f"|{args[0].text}|", rf"\left|{args[0].latex}\right|")


def _clip(x: Expr, args: list[Written], matrix: bool) -> Written:
    low, high = (
        number(default if x[n] is None else x[n])
        for n, default in (("low", float("-inf")), ("high", float("inf")))
    )
    below = f"[{low.text}, {high.text}]"
    return function("clip", args, below)


def _polygamma(x: Expr, args: list[Written], matrix: bool) -> Written:
    order = x["order"]
    name = "ψ" + "′" * order if order < 4 else f"ψ^({order})"
    return function(name, args, latex=r"\psi" + (f"^{{({order})}}" if order else ""))


def _pow(x: Expr, args: list[Written], matrix: bool) -> Written:
    base = args[0].at(ATOM)
    return Written(f"{base.text}^({args[1].text})", f"{base.latex}^{{{args[1].latex}}}", POWER)


def _floor(left: str, right: str, name: str) -> _Form:
    return lambda x, args, matrix: Written(
        f"{left}{args[0].text}{right}", rf"\left\l{name} {args[0].latex} \right\r{name}"
    )


def _logical(text: str, latex: str) -> _Form:
    def form(x: Expr, args: list[Written], matrix: bool) -> Written:
        return join([a.at(POWER) for a in args], f" {text} ", f" {latex} ", PRODUCT)

    return form


def _named(text: str, latex: str = "") -> _Form:
    return lambda x, args, matrix: function(text, args, latex=latex)


def _cast(x: Expr, args: list[Written], matrix: bool) -> Written:
    """Real numbers as complex ones are told: √x and √(x + 0i) differ below zero."""
    return summed([args[0], Written("0i", "0i")]) if x.is_complex else args[0]


ELEMENTWISE_FORMS: dict[str, _Form] = {
    "power": _power,
    "pow": _pow,
    "compare": _compare,
    "where": _where,
    "abs": _modulus,
    "clip": _clip,
    "polygamma": _polygamma,
    "floor": _floor("⌊", "⌋", "floor"),
    "ceil": _floor("⌈", "⌉", "ceil"),
    "conj": lambda x, args, matrix: superscript(args[0], "*", "*"),
    "real": _named("Re"),
    "imag": _named("Im"),
    "angle": _named("arg", r"\arg"),
    "sign": _named("sgn"),
    "lgamma": _named("log Γ", r"\log\Gamma"),
    "normal_cdf": _named("Φ", r"\Phi"),
    "normal_density": _named("φ", r"\varphi"),
    "arctan2": _named("atan2"),
    "maximum": _named("max", r"\max"),
    "minimum": _named("min", r"\min"),
    "cast": _cast,
    "scale_gradient": lambda x, args, matrix: args[0],
    "logical_and": _logical("∧", r"\land"),
    "logical_or": _logical("∨", r"\lor"),
    "logical_xor": _logical("⊕", r"\oplus"),
    "logical_not": lambda x, args, matrix: Written(
        f"1[not {args[0].text}]", rf"\mathbf{{1}}[\lnot {args[0].latex}]"
    ),
}
