"""Random compositions: programs drawn by hypothesis, held against dual numbers in NumPy.

`compositions()` draws functions from a small differentiable grammar (entry by entry, products,
sums, indexing, `where`, complex parts, trees, loops) and puts our operators and the framework's
own transforms into each other. What fails shrinks to a short program, which is printed as Python.

    @given(strategies.compositions())
    def test_any_program_has_the_same_numbers(program):
        program.check("torch")

`program` is a drawn program as data and as text, `reference` its meaning by the `numbers` of NumPy
alone, `limits` what the frameworks cannot put together. Another number of programs, drawn anew:
GRADTOOLS_TEST_EXAMPLES=5000.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import hypothesis
import hypothesis.strategies
import numpy as np

from gradtools.errors import GradtoolsError
from tests.support.strategies.program import (
    CALLS,
    REVERSE_ONLY,
    ArrayKind,
    Composition,
    DrawnFunction,
    DrawnLine,
)

__all__ = ["Composition", "OPERATORS", "compositions", "example"]

OPERATORS = tuple(CALLS)
SHAPES = ((3,), (2,), (2, 3), (), (3, 3))
_EDITS = ("reverse", "scale", "stop", "straight", "transform", *REVERSE_ONLY)
_OWN = ("rule, vjp", "rule, jvp", "rule, both", "host")
_REAL = ("tanh", "root", "log", "inverse", "turn", "log of sum", "straight", *_OWN)
_ANY = ("sin", "half", "exp", "square", "power", "sum", "mean", "reverse", "scale", "transform")
_ANY = (*_ANY, "stop", "clip norm", "clip value")
_ROWS = ("first", "rest", "flip", "take", "sum of rows", "cumulative sum", "broadcast")
_COMPLEX = ("real", "imag", "conj", "modulus")
_PAIRS = ("add", "subtract", "multiply", "divide", "stack", "concat", "where", "complex", "matmul")
_PAIRS = (*_PAIRS, "known", "clip pair")
# Simple things first: what fails shrinks towards the beginning.
_OPS = tuple(dict.fromkeys((*_ANY, *_REAL, *_PAIRS, *_ROWS, "transpose", "reshape", *_COMPLEX)))
_LARGEST = 12  # entries of an array
# How many derivatives an operator takes of its function; none is named that takes no derivative.
_ORDERS = {
    **dict.fromkeys(CALLS, 1),
    **dict.fromkeys(("gt.vmap", "native.vmap", "gt.chunked", "gt.checkpoint"), 0),
    **dict.fromkeys(("gt.frozen", "compiled", "loop", "gt.make_functional"), 0),
    **dict.fromkeys(("gt.hvp", "gt.hessian", "gt.mixed_partial"), 2),
}
_NUMBERS_OF = {
    **dict.fromkeys(("reverse", "scale"), (0.5, 2.0)),
    **dict.fromkeys(("clip norm", "clip value", "clip pair"), (0.45, 1.3)),
}
_MODES = ("reverse_over_reverse", "forward_over_reverse", "auto")


def compositions(
    *,
    operators: Collection[str] = OPERATORS,
    lines: int = 3,
    depth: int = 3,
    order: int = 2,
    complex: bool = True,
    edits: bool = True,
    compiled: bool = False,
) -> Any:
    """A hypothesis strategy of whole programs.

    Args:
        operators: Which may occur: names of `OPERATORS`, such as "gt.chunked" or "native.jvp".
        lines: At most so many in a function.
        depth: How deeply operators stand within operators.
        order: How many derivatives of derivatives.
        complex: Whether complex numbers occur.
        edits: Whether edited gradients, own rules and host functions occur.
        compiled: Whether the whole program is compiled.

    Returns:
        A strategy of `Composition`; its `check(backend)` raises with the program in its text.

    Raises:
        GradtoolsError: An operator is unknown.

    Example:
        >>> import strategies
        >>> smooth = strategies.compositions(operators=["gt.vmap", "native.grad"], order=1)
    """
    unknown = sorted(set(operators) - set(OPERATORS))
    if unknown:
        raise GradtoolsError(
            f"compositions: no operator {unknown[0]!r}; there are {', '.join(OPERATORS)}."
        )
    allowed = tuple(name for name in OPERATORS if name in set(operators))
    names = tuple(n for n in _OPS if _wanted(n, complex, edits))

    @hypothesis.strategies.composite
    def drawn(draw: Callable[[Any], Any]) -> Composition:
        made = _Drawing(draw, hypothesis.strategies, allowed, names, lines, complex)
        program = Composition(made.program(depth, order), made.below(50), compiled)
        hypothesis.assume(_well_placed(program))
        return program

    return drawn()


def example(seed: int = 0, **limits: Any) -> Composition:
    """One program, the same for the same seed; `limits` are those of `compositions`."""
    result: list[Composition] = []
    everything = list(hypothesis.HealthCheck)

    @hypothesis.seed(seed)
    @hypothesis.settings(
        max_examples=20, database=None, deadline=None, suppress_health_check=everything
    )
    @hypothesis.given(compositions(**limits))
    def collect(program: Composition) -> None:
        result.append(program)

    collect()
    return result[-1]


def _wanted(name: str, complex: bool, edits: bool) -> bool:
    if not complex and name in (*_COMPLEX, "complex", "turn"):
        return False
    return edits or name not in (*_EDITS, *_OWN)


def _well_placed(program: Composition) -> bool:
    """Numbers of ordinary size, and no switch so near that rounding might decide it."""
    from tests.support.strategies.reference import evaluated

    result, sight = evaluated(program)
    size = abs(result)[~np.isnan(result)].max(initial=0)
    return bool(sight.largest < 1e4 and sight.nearest > 1e-6 and size < 1e4)


Names = list[tuple[str, ArrayKind]]


@dataclass
class _Drawing:
    """Draws one program; `draw` decides everything, so that hypothesis can shrink it."""

    draw: Callable[[Any], Any]
    st: Any
    allowed: Sequence[str]
    names: Sequence[str]
    lines: int
    complex: bool
    numbers: Iterator[int] = field(default_factory=count)

    def below(self, n: int) -> int:
        return int(self.draw(self.st.integers(0, n - 1)))

    def one(self, among: Sequence[Any]) -> Any:
        return self.draw(self.st.sampled_from(among))

    def program(self, depth: int, order: int) -> DrawnFunction:
        """A function of one or two arrays that calls an operator at least once."""
        kinds = [ArrayKind(self.one(SHAPES)) for _ in range(1 + self.below(2))]
        if self.complex and self.below(6) == 5:
            kinds[0] = ArrayKind(kinds[0].shape, True)
        return self.function(kinds, [], depth, order, "program", forced=True)

    def function(
        self,
        kinds: Sequence[ArrayKind],
        outer: Names,
        depth: int,
        order: int,
        name: str = "",
        forced: bool = False,
    ) -> DrawnFunction:
        params = [(f"x{next(self.numbers)}", kind) for kind in kinds]
        seen, result = [*outer, *params], []
        for k in range(1 + self.below(self.lines)):
            line = None
            if depth and self.allowed and (forced if k == 0 else self.below(3) == 2):
                line = self.call(seen, depth, order)
            line = line or self.simple(seen, params if k == 0 else seen)
            result.append(line)
            seen.append((line.name, line.kind))
        out = result[-1].name
        name = name or f"f{next(self.numbers)}"
        return DrawnFunction(name, tuple(params), tuple(result), out).pruned()

    def recent(self, among: Names) -> tuple[str, ArrayKind]:
        """One of the names, the latest in three cases of four or more."""
        return among[-1] if self.below(4) < 3 else self.one(list(reversed(among)))

    # --- simple lines -----------------------------------------------------------------------

    def simple(self, seen: Names, first: Names) -> DrawnLine:
        """One operation on what is seen; the first operand is among `first`."""
        x, kind = self.recent(first)
        fitting = [op for op in self.names if _fits(op, kind)]
        op = self.one(fitting)
        args = (x,)
        if op in _PAIRS:
            result = self.pair(op, kind, seen)
            if result is None:
                op = "sin"
            else:
                args, kind = (x, result[0]), result[1]
        else:
            kind = _kind_of(op, kind)
        option = self.one(_NUMBERS_OF[op]) if op in _NUMBERS_OF else None
        return DrawnLine(self.fresh(), kind, op, args, option=option)

    def pair(self, op: str, kind: ArrayKind, seen: Names) -> tuple[str, ArrayKind] | None:
        """A second operand, and the kind of the result."""
        made = [(name, out) for name, k in seen if (out := _kind_of_pair(op, kind, k))]
        return self.one(list(reversed(made))) if made else None

    def fresh(self) -> str:
        return f"v{next(self.numbers)}"

    # --- operators ----------------------------------------------------------------------------

    def call(self, seen: Names, depth: int, order: int) -> DrawnLine | None:
        """A call of an operator, or None if none fits what is seen."""
        able = [op for op in self.allowed if _ORDERS[op] <= order]
        able = [op for op in able if any(_may(op, kind) for _, kind in seen)]
        if not able:
            return None
        op = self.one(able)
        x = self.recent([n for n in seen if _may(op, n[1])])
        inside = _OperandDraw(self, op, seen, depth - 1, order - _ORDERS[op])
        maker = _MAKERS.get(op, _OperandDraw.of_several)
        return maker(inside, x)


@dataclass
class _OperandDraw:
    """Draws the function and the operands of one operator's call."""

    drawing: _Drawing
    op: str
    seen: Names
    depth: int
    order: int

    def function(self, kinds: Sequence[ArrayKind], sealed: bool = False) -> DrawnFunction:
        outer = [] if sealed or self.drawing.below(3) else self.seen
        return self.drawing.function(kinds, outer, self.depth, self.order)

    def line(self, kind: ArrayKind, xs: Names, f: DrawnFunction, option: Any = None) -> DrawnLine:
        args = tuple(name for name, _ in xs)
        return DrawnLine(self.drawing.fresh(), kind, self.op, args, (f,), option)

    def others(self, among: Names, at_most: int = 1) -> Names:
        return [self.drawing.one(among)] if among and self.drawing.below(at_most + 1) else []

    def real(self) -> Names:
        return [n for n in self.seen if not n[1].complex]

    def like(self, kind: ArrayKind) -> tuple[str, ArrayKind]:
        return self.drawing.one([n for n in reversed(self.seen) if n[1] == kind])

    def of_several(self, x: tuple[str, ArrayKind]) -> DrawnLine:
        """Values and gradients of a function of one or two arrays."""
        same = self.op in ("gt.checkpoint", "gt.frozen", "gt.make_functional", "compiled")
        plain = self.op.startswith(("native", "gt.jacobian"))
        xs = [x, *self.others(self.real() if plain else self.seen)]
        f = self.function([kind for _, kind in xs], sealed=self.op == "gt.frozen")
        if plain and f.kind.complex:
            f = _real_part(self.drawing, f)
        k = 0 if same else self.drawing.below(len(xs))
        return self.line(f.kind if same else xs[k][1], xs, f, k)

    def of_directions(self, x: tuple[str, ArrayKind]) -> DrawnLine:
        xs = [x, *self.others(self.seen)]
        f = self.function([kind for _, kind in xs])
        return self.line(f.kind, [*xs, *(self.like(kind) for _, kind in xs)], f)

    def of_cotangents(self, x: tuple[str, ArrayKind]) -> DrawnLine | None:
        native = self.op.startswith("native")
        xs = [x, *self.others(self.real() if native else self.seen)]
        f = self.function([kind for _, kind in xs])
        given = [n for n in reversed(self.seen) if n[1] == f.kind]
        if not given or (native and f.kind.complex):
            return None
        k = self.drawing.below(len(xs))
        return self.line(xs[k][1], [*xs, self.drawing.one(given)], f, k)

    def of_second_order(self, x: tuple[str, ArrayKind]) -> DrawnLine:
        f = self.function([x[1]])
        xs = [x] if self.op == "gt.hessian" else [x, self.like(x[1])]
        mode = self.drawing.one(_MODES) if self.op == "gt.hvp" else None
        return self.line(x[1], xs, f, mode)

    def of_rows(self, x: tuple[str, ArrayKind]) -> DrawnLine:
        """A function of rows; what comes second is the same for all of them."""
        xs = [x, *self.others(self.seen)]
        sealed = self.op == "gt.chunked"
        f = self.function([_row(x[1]), *(kind for _, kind in xs[1:])], sealed)
        kind = ArrayKind((x[1].shape[0], *f.kind.shape), f.kind.complex)
        return self.line(kind, xs, f, 1 + self.drawing.below(2))

    def of_examples(self, x: tuple[str, ArrayKind]) -> DrawnLine:
        w = self.drawing.one(self.real())
        f = self.function([w[1], _row(x[1])], sealed=True)
        shape = (x[1].shape[0], *w[1].shape) if self.op == "gt.per_example_grad" else w[1].shape
        return self.line(ArrayKind(shape), [w, x], f, 1 + self.drawing.below(2))

    def of_players(self, x: tuple[str, ArrayKind]) -> DrawnLine:
        xs = [x, self.drawing.one(self.real())]
        f = self.function([kind for _, kind in xs])
        k = self.drawing.below(2)
        return self.line(xs[k][1], xs, f, k)

    def of_direction(self, z: tuple[str, ArrayKind]) -> DrawnLine:
        y = self.drawing.one(self.seen)
        f = self.function([y[1], z[1]])
        return self.line(y[1], [y, z, self.like(z[1])], f)

    def of_loop(self, x: tuple[str, ArrayKind]) -> DrawnLine | None:
        f = self.function([x[1]])
        if f.kind != x[1]:
            return None
        return self.line(x[1], [x], f, 2 + self.drawing.below(2))


_OF_EXAMPLES = ("gt.per_example_grad", "gt.microbatched_value_and_grad", "gt.GradientAccumulator")
_MAKERS: dict[str, Callable[[_OperandDraw, Any], DrawnLine | None]] = {
    **dict.fromkeys(("gt.jvp", "gt.linearize", "native.jvp"), _OperandDraw.of_directions),
    **dict.fromkeys(("gt.vjp", "native.vjp"), _OperandDraw.of_cotangents),
    **dict.fromkeys(("gt.hvp", "gt.hessian"), _OperandDraw.of_second_order),
    **dict.fromkeys(("gt.vmap", "native.vmap", "gt.chunked"), _OperandDraw.of_rows),
    **dict.fromkeys(_OF_EXAMPLES, _OperandDraw.of_examples),
    "gt.minimax_value_and_grad": _OperandDraw.of_players,
    "gt.mixed_partial": _OperandDraw.of_direction,
    "loop": _OperandDraw.of_loop,
}
_BY_ROWS = ("gt.vmap", "native.vmap", "gt.chunked", *_OF_EXAMPLES)
_OF_REALS = ("gt.jacobian", "gt.jacobian, forward", "gt.hessian", "gt.minimax_value_and_grad")


def _may(op: str, kind: ArrayKind) -> bool:
    """Whether an operator takes an array of this kind first."""
    if op in _BY_ROWS and not kind.shape:
        return False
    if op in ("native.grad", "native.vjp", *_OF_REALS):
        return not kind.complex
    return not (op in _OF_EXAMPLES and kind.complex)


def _row(kind: ArrayKind) -> ArrayKind:
    return ArrayKind(kind.shape[1:], kind.complex)


def _real_part(drawing: _Drawing, f: DrawnFunction) -> DrawnFunction:
    line = DrawnLine(drawing.fresh(), ArrayKind(f.kind.shape), "real", (f.out,))
    return DrawnFunction(f.name, f.params, (*f.lines, line), line.name)


def _fits(op: str, kind: ArrayKind) -> bool:
    """Whether an operation takes an array of this kind first."""
    if op in _ROWS and not _has_rows(op, kind):
        return False
    if op == "transpose":
        return len(kind.shape) == 2
    if op in ("matmul", "concat"):
        return bool(kind.shape) and len(kind.shape) < 3
    if op in _COMPLEX:
        return kind.complex
    return not (kind.complex and (op in _REAL or op in ("where", "complex")))


def _has_rows(op: str, kind: ArrayKind) -> bool:
    if op == "broadcast":
        return 2 * _entries(kind) <= _LARGEST and len(kind.shape) < 3
    least = {"rest": 2, "take": 2}.get(op, 1)
    if op == "take" and _entries(kind) // max(1, kind.shape[0] if kind.shape else 1) > 4:
        return False
    return bool(kind.shape) and kind.shape[0] >= least


def _entries(kind: ArrayKind) -> int:
    result = 1
    for n in kind.shape:
        result *= n
    return result


def _kind_of(op: str, kind: ArrayKind) -> ArrayKind:
    """The kind of an operation's result on one array."""
    shape = kind.shape
    shapes = {
        "sum": (),
        "mean": (),
        "log of sum": (),
        "reshape": (_entries(kind),),
        "transpose": shape[::-1],
        "broadcast": (2, *shape),
    }
    if shape:
        shapes |= {"first": shape[1:], "sum of rows": shape[1:]}
        shapes |= {"rest": (shape[0] - 1, *shape[1:]), "take": (3, *shape[1:])}
    is_complex = op == "turn" or (kind.complex and op not in ("real", "imag", "modulus"))
    return ArrayKind(shapes.get(op, shape), is_complex)


def _kind_of_pair(op: str, a: ArrayKind, b: ArrayKind) -> ArrayKind | None:
    """The kind of an operation's result on two arrays, or None if it does not take them."""
    either = a.complex or b.complex
    if op == "matmul":
        return _kind_of_product(a, b)
    if op == "stack":
        return (
            ArrayKind((2, *a.shape), a.complex) if a == b and 2 * _entries(a) <= _LARGEST else None
        )
    if op == "concat":
        fits = a.shape[1:] == b.shape[1:] and b.shape and a.complex == b.complex
        if not fits or _entries(a) + _entries(b) > _LARGEST:
            return None
        return ArrayKind((a.shape[0] + b.shape[0], *a.shape[1:]), a.complex)
    if op in ("where", "known", "clip pair"):
        return a if a == b else None
    if op == "complex":
        return ArrayKind(a.shape, True) if a.shape == b.shape and not b.complex else None
    if op == "divide" and b.complex:
        return None
    if a.shape == b.shape or not b.shape:
        return ArrayKind(a.shape, either)
    return ArrayKind(b.shape, either) if not a.shape else None


def _kind_of_product(a: ArrayKind, b: ArrayKind) -> ArrayKind | None:
    fits = a.complex == b.complex and b.shape and len(b.shape) < 3 and a.shape[-1] == b.shape[0]
    return ArrayKind((*a.shape[:-1], *b.shape[1:]), a.complex) if fits else None
