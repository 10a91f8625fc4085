"""Reads tables of functions for formulas: each row is an expression and its arguments.

    jnp.sum(a * b, 1) ; (3,4) p(3,4)

The arguments a, b, c, d are shapes in parentheses with an optional prefix: p (positive), u (between
-0.7 and 0.7), z (complex), s (symmetric positive definite), h (Hermitian positive definite) or i
and a number n (integers from 0 to n - 1). Without a prefix, the entries are normal random numbers
away from zero. An argument may also be i followed by the integers themselves.
"""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass

import numpy as np

KINDS = {
    "": lambda r, s: (lambda x: x + 0.2 * np.sign(x))(r.normal(size=s)),
    "p": lambda r, s: 0.5 + np.abs(r.normal(size=s)),
    "u": lambda r, s: r.uniform(0.1, 0.7, s) * r.choice([-1, 1], s),
    "z": lambda r, s: r.normal(size=s) + 1j * r.normal(size=s),
    "s": lambda r, s: (lambda m: m @ m.T + 3 * np.eye(s[0]))(r.normal(size=s)),
    "h": lambda r, s: (lambda m: m @ m.conj().T + 3 * np.eye(s[0]))(KINDS["z"](r, s)),
}


@dataclass(frozen=True)
class Row:
    """A function, given by an expression in a, b, c, d and a description of these arguments."""

    expression: str
    arguments: str

    def __str__(self) -> str:
        return f"{self.expression} of {self.arguments}"

    def arrays(self, rng: np.random.Generator) -> list[np.ndarray]:
        """Return the arguments as NumPy arrays."""
        return [_array(rng, part) for part in self.arguments.split()]


def rows(table: str) -> list[Row]:
    """Return the rows of a table; lines that begin with # are headings."""
    lines = [line for line in table.strip().splitlines() if not line.startswith("#")]
    return [Row(*map(str.strip, line.rsplit(";", 1))) for line in lines]


def _array(rng: np.random.Generator, said: str) -> np.ndarray:
    if re.fullmatch(r"i(\[.*\]|\d+)", said):
        return np.array(ast.literal_eval(said[1:]))
    kind, numbers = re.fullmatch(r"([a-z]?\d*)\((.*)\)", said).groups()
    shape = tuple(int(n) for n in numbers.split(",") if n)
    if kind.startswith("i"):
        return rng.integers(0, int(kind[1:]), shape)
    return np.asarray(KINDS[kind](rng, shape))
