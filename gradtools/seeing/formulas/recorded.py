"""What a translator makes of a run: a `Recorded`, in operations of the vocabulary where it can.

`in_vocabulary` gives an operation of the vocabulary that computes what the framework's did.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from gradtools.seeing.formulas.algebra import apply, broadcast
from gradtools.seeing.formulas.expressions import (
    BOOLEAN,
    COMPLEX,
    INTEGER,
    ArrayValue,
    Expr,
    constant_of,
    order,
)
from gradtools.seeing.formulas.operation_record import made
from gradtools.seeing.formulas.recognition import named


@dataclass(frozen=True, eq=False)
class Recorded:
    """One run of a program.

    Attributes:
        inputs: The placeholder of each leaf of the arguments.
        outputs: The expressions of its results.
        held: The array of each captured value, by its placeholder.
        wanted: The captured values that require grad; differentiated like arguments.
        run: Maps the leaves of f's arguments, followed by one array for each of `wanted`, to the
            leaves of what f returns. None: `wanted` is empty, and f itself is run.
        narrow: The dtype below double precision in which a part of the program computes for any
            input; often empty.
    """

    inputs: tuple[Expr, ...]
    outputs: tuple[Expr, ...]
    held: dict[Expr, Any] = field(default_factory=dict)
    wanted: tuple[Expr, ...] = ()
    run: Callable[[Sequence[Any]], Sequence[Any]] | None = None
    narrow: str = ""

    @property
    def opened(self) -> tuple[Expr, ...]:
        """The inputs, and the captured values that are wanted."""
        return (*self.inputs, *self.wanted)

    def fingerprint(self) -> list[Any]:
        """The operations in order; equal for two runs that computed the same expressions."""
        place: dict[Expr, int] = {}
        result = []
        for x in order(self.outputs):
            place[x] = len(place)
            known = [(k, v) for k, v in x.attributes if k not in ("kernel", "number", "of")]
            plain = [(k, v if isinstance(v, ArrayValue) else repr(v)) for k, v in known]
            result.append((x.op, x.shape, tuple(place[a] for a in x.args), tuple(plain)))
        return result


Like = tuple[Sequence[int], str]  # shape and kind


def in_vocabulary(
    name: str, operands: Sequence[Expr], attributes: Mapping[str, Any], likes: Sequence[Like]
) -> list[Expr] | None:
    """The results of an operation of this name; None if it is not of the vocabulary."""
    if name in _LINEAR:
        operands = [x.args[0] if x.op == "cast" and x.is_complex else x for x in operands]
    result = made(name, operands, dict(attributes))
    if result is None:
        return None
    results = list(result) if isinstance(result, list | tuple) else [result]
    if len(results) != len(likes):
        return None
    if any(r.shape != tuple(shape) for r, (shape, _) in zip(results, likes, strict=True)):
        return None
    return [fitted(r, like) for r, like in zip(results, likes, strict=True)]


def fitted(x: Expr, like: Like) -> Expr:
    """X by its name, of this shape, and of the kind of the framework's result."""
    shape, kind = like
    x = named(x)
    if x.is_inexact and kind in (INTEGER, BOOLEAN) and constant_of(x) is None:
        x = apply("cast", x, to=kind)
    x = x if x.shape == tuple(shape) else broadcast(x, tuple(shape))
    plain = x.is_complex or constant_of(x) is not None
    return x if kind != COMPLEX or plain else apply("cast", x, to=COMPLEX)


_LINEAR = """
add subtract multiply negate einsum matmul outer sum mean trace reshape transpose broadcast
concatenate stack split slice flip real imag conj abs identity
""".split()  # commute with a cast from real to complex


def has_opaque_part(results: Sequence[Expr], operands: Sequence[Expr]) -> bool:
    """Whether some part of what makes the results of the operands is an opaque operation."""
    before = set(order(operands))
    return any(x.op == "by_name" and x not in before for x in order(results))


def in_words(attributes: Mapping[str, Any], rank: int) -> str:
    """The parameters of an operation by name, those that are numbers or words."""

    def short(value: Any) -> Any:
        """A tuple of equal numbers as one number: (2, 2) is 2."""
        if isinstance(value, tuple | list) and value:
            parts = [short(v) for v in value]
            return parts[0] if all(p == parts[0] for p in parts) else tuple(parts)
        return value

    plain = {k: short(v) for k, v in attributes.items() if rank > 1 or k not in ("axis", "axes")}
    return ", ".join(f"{k} {v}" for k, v in plain.items() if len(str(v)) <= 30)
