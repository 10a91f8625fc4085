"""`Recorded`: one run of a program as expressions, with the arrays that it captured."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from gradtools.seeing.formulas.expressions import ArrayValue, Expr, order


@dataclass(frozen=True, eq=False)
class Recorded:
    """One run of a program.

    Attributes:
        inputs: The placeholder of each leaf of the arguments.
        outputs: What it computes.
        held: The array of each captured value, by its placeholder.
        wanted: The captured values that require grad themselves; differentiated like arguments.
        draws: What each random draw gave, by its placeholder.
        run: The leaves of what f returns, of the leaves of its arguments, followed by one array
            for each value that is wanted. None: what the program runs, and nothing is wanted.
        narrow: The dtype in which the program computes some of it whatever it is given, if that
            has less than double precision; often empty.
    """

    inputs: tuple[Expr, ...]
    outputs: tuple[Expr, ...]
    held: dict[Expr, Any] = field(default_factory=dict)
    wanted: tuple[Expr, ...] = ()
    draws: dict[Expr, np.ndarray] = field(default_factory=dict)
    run: Callable[[Sequence[Any]], Sequence[Any]] | None = None
    narrow: str = ""

    @property
    def opened(self) -> tuple[Expr, ...]:
        """The inputs, and what is wanted besides."""
        return (*self.inputs, *self.wanted)

    def fingerprint(self) -> list[Any]:
        """What it computes, by which two runs are told apart."""
        place: dict[Expr, int] = {}
        result = []
        for x in order(self.outputs):
            place[x] = len(place)
            said = [(k, v) for k, v in x.attributes if k not in ("kernel", "number", "of")]
            plain = [(k, v if isinstance(v, ArrayValue) else repr(v)) for k, v in said]
            result.append((x.op, x.shape, tuple(place[a] for a in x.args), tuple(plain)))
        return result
