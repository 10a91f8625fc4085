"""The neutral vocabulary: what every operation of a recorded program is called, and what it means.

A wing records a program as a `Graph` whose nodes carry these names, operands and attributes; from
there on no framework is needed. The tables of this folder are the contract. Each line names the
operands in order, the attributes, and the meaning; ``?`` marks what may be left out, ``*`` what
repeats. Beside it stands how the word is written in the operations of the algebra.

Conventions that hold everywhere:

- Axes are counted from 0 and never negative. ``axes`` is a tuple, ``axis`` one number.
- ``axes`` that may be left out are then all axes.
- ``keep`` (default False) keeps a reduced axis with length 1.
- Elementwise operations broadcast as in NumPy; a number is a node ``constant``.
- Numbers are exact: everything is evaluated in float64 and complex128, integers in int64.
- Indices are not negative and within bounds.
- An operation that is not in a table keeps its native name. It is shown with a mark, and
  evaluated only if its attributes hold a NumPy ``function`` (and ``adjoint``, see ``opaque``).
- Attributes that are not in its line, or needed ones that are missing, are refused.
- The residuals of a ``custom_rule`` are differentiated through its forward program.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Operation:
    """An operation of the vocabulary.

    Attributes:
        name: What a node's ``operation`` says.
        operands: The node's inputs, in order.
        attributes: The names of the node's attributes; those with a ``?`` may be left out.
        meaning: The result, in mathematics or in NumPy's words.
        outputs: What comes out, where it is more than one array.
        lower: The result as expressions, of the operands and the attributes; None where it takes
            more than these, such as a program inside (`../lowering.py`).
    """

    name: str
    operands: str
    attributes: tuple[str, ...]
    meaning: str
    outputs: str = ""
    lower: Callable[..., Any] | None = None

    def takes(self, operands: int, attributes: Collection[str]) -> bool:
        """Whether an operation with so many operands and these attributes is this word."""
        names = self.operands.split()
        most = len(names) if "*" not in self.operands else operands
        least = sum(not name.endswith("?") and not name.startswith("*") for name in names)
        return least <= operands <= most and self.has(attributes)

    def has(self, attributes: Collection[str]) -> bool:
        """Whether these are attributes of it, and none that it needs is missing."""
        known = {name.rstrip("?") for name in self.attributes}
        needed = {name for name in self.attributes if not name.endswith("?")}
        return needed <= set(attributes) <= known


def words(text: str, lower: Mapping[str, Callable[..., Any]]) -> dict[str, Operation]:
    """The words of a table, each with its lowering.

    Lines are ``name | operands | attributes | meaning | outputs?``; indented ones go on.
    """
    table = {}
    for line in text.strip().replace("\n    ", " ").splitlines():
        name, operands, attributes, meaning, *rest = (part.strip() for part in line.split("|"))
        table[name] = Operation(
            name,
            operands,
            tuple(attributes.split()),
            meaning,
            rest[0] if rest else "",
            lower.get(name),
        )
    return table
