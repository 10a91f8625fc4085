"""Maps native names of operations to the neutral names of `seeing/formulas/words.py`."""

from __future__ import annotations

from textwrap import dedent


def by_native(table: str) -> dict[str, str]:
    """Parses a table of names into a dict from native name to neutral name.

    table: Each line contains a neutral name and its native names. An indented line continues the
        previous line.
    """
    lines = dedent(table).strip().replace("\n    ", " ").splitlines()
    return {native: line.split()[0] for line in lines for native in line.split()[1:]}


# Maps the native names that PyTorch and JAX share to neutral names.
SHARED = by_native("""
    negate     neg
    subtract   sub
    multiply   mul
    divide     div
    power      pow
    arcsin     asin
    arccos     acos
    arctan     atan
    arcsinh    asinh
    arccosh    acosh
    arctanh    atanh
    arctan2    atan2
    clip       clamp
    compare    eq ne lt le gt ge
""")
RELATIONS = {"eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">="}
