"""Patterns: what one framework calls by one name and the other writes out gets that name."""

from __future__ import annotations

from gradtools.seeing.formula.expressions import Program


def recognise(program: Program) -> Program:
    """The program with the patterns that are known written as what they are."""
    return program
