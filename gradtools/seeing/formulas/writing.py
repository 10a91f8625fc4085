"""Writes an expression as text.

Whole arrays are written where that is unambiguous: products of matrices by juxtaposition, the
elementwise product as a circled dot, sums over axes by their letters. Axes align by their letters,
so a broadcast is not written. Where whole arrays would be ambiguous (three or more axes, the same
axis twice), `ExpressionWriter.whole` raises `NeedsIndices`, and the equation is written for one
entry by `ExpressionWriter.entry`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from math import prod
from typing import Any

from gradtools.seeing.formulas import typesetting as ts
from gradtools.seeing.formulas.algebra import constant_of, contracts, drop_axes, parts
from gradtools.seeing.formulas.axes import Axes, primed
from gradtools.seeing.formulas.expressions import Expr
from gradtools.seeing.formulas.operation_record import OPERATIONS, is_elementwise
from gradtools.seeing.formulas.product_layout import (
    Defined,
    Factors,
    chain,
    display_factors,
    summed_length,
)
from gradtools.seeing.formulas.typesetting import Written


class NeedsIndices(Exception):
    """The expression is ambiguous without indices."""


class ExpressionWriter:
    """Writes expressions.

    Attributes:
        axes: The letters of axes.
        names: The named values.
        defined: The named products that earlier lines define.
        notes: Explanations of the notation that was used.
        recognised: The operations that were written by their name.
    """

    def __init__(self, axes: Axes) -> None:
        self.axes = axes
        self.names: dict[Expr, Written] = {}
        self.defined = Defined()
        self.notes: dict[str, None] = {}
        self.recognised: set[str] = set()
        self._as_mean: set[Expr] = set()

    # Whole arrays.

    def whole(self, x: Expr) -> Written:
        """X as a whole array; a scalar, which can always be written, by its entry.

        Raises:
            NeedsIndices: It is ambiguous without indices.
        """
        try:
            return self._whole(x)
        except NeedsIndices:
            if x.rank:
                raise
            return self.entry(x, ())

    def _whole(self, x: Expr) -> Written:
        if x in self.names:
            return self.names[x]
        constant = constant_of(x)
        if constant is not None:
            return ts.number(constant)
        if x.op == "einsum":
            return self._product(x)
        if x.op == "add":
            self._must_align(x)
            return self.sum_of([self.whole(t) for t in self._in_order(x.args)])
        if is_elementwise(x):
            self._must_align(x)
            return self._function(x, [self.whole(a) for a in x.args], x.rank > 1)
        operation = OPERATIONS.get(x.op)
        if operation and operation.form:
            self.recognised.add(x.op)
            return operation.form(self, x)
        return ts.function(x.op, [self.operand(a) for a in x.args])

    def operand(self, x: Expr) -> Written:
        """X as an operand of a function of whole arrays, where a repetition has to be written."""
        used = {l for names in parts(x)[2] for l in names}
        kept = [a for a, n in enumerate(x.shape) if a in used or n == 1]
        if len(kept) == x.rank or constant_of(x) is not None:
            return self.whole(x)
        self.note("repeat: repeated along the axes that the operand lacks")
        return ts.function("repeat", [self.whole(drop_axes(x, kept))], "x".join(map(str, x.shape)))

    def sum_of(self, terms: list[Written]) -> Written:
        """A sum; the terms without a minus come first."""
        terms = sorted(terms, key=lambda t: t.text.startswith("-"))
        return ts.summed(terms)

    def _in_order(self, terms: Sequence[Expr]) -> list[Expr]:
        """Compositions first, then named values, then numbers."""

        def key(x: Expr) -> int:
            if constant_of(x) is not None:
                return 2
            plain = x.op == "einsum" and len(x.args) == 1 and not contracts(x)
            return int((x.args[0] if plain else x) in self.names)

        return sorted(terms, key=key)

    def _must_align(self, x: Expr) -> None:
        """Check that operands with fewer axes align by distinct letters, else by all their axes.

        Raises:
            NeedsIndices: Two axes have the same letter, and a product lacks one of the axes.
        """
        letters = self.axes.letters(x)
        if len(set(letters)) == len(letters):
            return
        for a in x.args:
            if a.op == "einsum" and constant_of(a) is None and a not in self.names:
                self._must_cover(a, x.rank)

    def _must_cover(self, x: Expr, rank: int) -> None:
        _, _, labels = display_factors(x, self.names, False, self.defined)
        if not {l for names in labels for l in names} >= set(range(rank)):
            raise NeedsIndices

    # Elementwise functions.

    def _function(self, x: Expr, args: list[Written], matrix: bool) -> Written:
        self.recognised.add(x.op)
        entry = OPERATIONS[x.op].entry
        return entry(x, args, matrix) if entry else ts.function(x.op, args)

    # Products.

    def _product(self, x: Expr) -> Written:
        coefficient, factors, labels = display_factors(x, self.names, False, self.defined)
        f = Factors(coefficient, factors, labels, x)
        f.apart()
        if not f.arrays and f.below and not f.summed:  # L̄ / x, and not L̄ 1 / x
            return self._with_scalars(f, None, [self._oriented(a, n, f) for a, n in f.below])
        with self._mean_inside(f):
            return self._with_scalars(f, self._core(f))

    @contextmanager
    def _mean_inside(self, f: Factors) -> Iterator[None]:
        """Writes a factor that is a sum, times one over its length, as a mean."""
        added = None
        for a, _ in f.arrays:
            count = summed_length(a)
            if a in self.names or count < 2 or added or isinstance(f.coefficient, complex):
                continue
            if abs(abs(f.coefficient) * count - 1) < 1e-12:
                added = a
        if added is None:
            yield
            return
        f.coefficient = 1.0 if f.coefficient > 0 else -1.0
        self._as_mean.add(added)
        try:
            yield
        finally:
            self._as_mean.discard(added)

    def _core(self, f: Factors) -> Written | None:
        """The factors with axes; None if there are none."""
        if not f.arrays and not f.below:
            return None
        turned = self._as_transpose(f)
        if turned is not None:
            return turned
        for attempt in (self._inner_product, self._as_chain, self._aligned):
            result = attempt(f)
            if result is not None:
                return result
        raise NeedsIndices

    def _as_transpose(self, f: Factors) -> Written | None:
        """One array, or its transpose in the last two axes; None for other products."""
        if len(f.arrays) != 1 or f.below or f.summed:
            return None
        ((x, names),) = f.arrays
        n = f.target.rank
        if names == tuple(range(n)):
            return self.whole(x)
        if n >= 2 and names == (*range(n - 2), n - 1, n - 2):
            return self.transposed(x)
        return None

    def _inner_product(self, f: Factors) -> Written | None:
        """A sum over all axes of two factors, or of one squared; None for other products."""
        if f.out or f.below or not f.summed:
            return None
        if any(set(n) != f.summed for _, n in f.arrays):
            return None
        if any(n != f.arrays[0][1] for _, n in f.arrays):
            return None
        if len(f.arrays) == 1:
            return self._full_sum(f)
        if any(a.is_complex for a, _ in f.arrays) or self._is_mean(f):
            return None
        first, *rest = [self.whole(a) for a, _ in self._sorted(f.arrays)]
        second = rest[0] if len(rest) == 1 else self._hadamard(rest)
        return ts.inner_product(first, second)

    def _full_sum(self, f: Factors) -> Written | None:
        ((x, _),) = f.arrays
        if self._is_mean(f) or x in self.names:
            return None
        squared = x.op == "power" and x["exponent"] == 2
        if not squared or x.is_complex:
            return None
        base = self.whole(x.args[0].args[0] if x.args[0].op == "abs" else x.args[0])
        return Written(f"‖{base.text}‖²", ts.POWER)

    def _is_mean(self, f: Factors) -> bool:
        """Whether a sum of one array is written as its mean."""
        if f.target in self._as_mean:
            return True
        if not f.is_plain_sum or isinstance(f.coefficient, complex):
            return False
        count = prod(f.size[l] for l in f.summed)
        return count > 1 and abs(abs(f.coefficient) * count - 1) < 1e-12

    def _as_chain(self, f: Factors) -> Written | None:
        """A product of matrices and vectors; None for other products."""
        if not f.arrays or (self._is_mean(f) and len(f.out) < 2):
            return None
        links = None if f.below else chain(f)
        return ts.join([self._link(*link) for link in links], " ", ts.PRODUCT) if links else None

    def _link(self, group: list[Expr], flipped: bool) -> Written:
        if len(group) == 1:
            return self.transposed(group[0]) if flipped else self.whole(group[0]).at(ts.PRODUCT)
        written = ts.bracket(self._hadamard([self.whole(g) for g in group]))
        return ts.superscript(written, "ᵀ") if flipped else written

    def transposed(self, x: Expr) -> Written:
        """The transpose, the conjugate transpose where x is a conjugate."""
        if x.op == "conj" and x not in self.names:
            return ts.superscript(self.whole(x.args[0]), "ᴴ")
        return ts.superscript(self.whole(x), "ᵀ")

    def _aligned(self, f: Factors) -> Written | None:
        """An elementwise product, summed over axes by their letters; None if that is ambiguous."""
        letters = f.label_letters(self.axes)
        clear = len(set(letters.values())) == len(letters)
        aligned = all(n == tuple(range(f.target.rank)) for _, n in (*f.arrays, *f.below))
        if not (clear or (aligned and not f.summed)):
            return None
        if f.summed and not any(set(n) == set(f.size) for _, n in f.arrays):
            return None
        up = [self._oriented(a, n, f) for a, n in self._sorted(f.arrays)]
        down = [self._oriented(a, n, f) for a, n in f.below]
        top = self._hadamard(up) if up else ts.number(1.0)
        if down:
            top = ts.over(top.at(ts.PRODUCT), self._hadamard(down))
        if not f.summed:
            return top
        name = "".join(letters[l] for l in sorted(f.summed, key=lambda l: letters[l]))
        if self._is_mean(f):
            if f.target not in self._as_mean:
                f.coefficient = 1.0 if f.coefficient > 0 else -1.0
            whole = not f.out
            return ts.function("mean", [top], "" if whole else name)
        inner = top.at(ts.POWER)
        return ts.total(name, inner)

    def _oriented(self, a: Expr, names: Sequence[int], f: Factors) -> Written:
        reference = f.reference()
        alone = len(f.arrays) == 1 and not f.below
        places = [reference.index(l) for l in names if l in f.out or not alone]
        if places == sorted(places):
            return self.whole(a)
        if a.rank == 2:
            return self.transposed(a)
        raise NeedsIndices

    def _sorted(self, arrays: Iterable[tuple[Expr, Any]]) -> list[tuple[Expr, Any]]:
        """Cotangents first, then other named values, then compositions."""

        def key(entry: tuple[Expr, Any]) -> tuple:
            written = self.names.get(entry[0])
            return (written is None, written is not None and not ts.has_bar(written))

        return sorted(arrays, key=key)

    def _hadamard(self, pieces: list[Written]) -> Written:
        if len(pieces) == 1:
            return pieces[0]
        return ts.join([p.at(ts.PRODUCT) for p in pieces], " ⊙ ", ts.PRODUCT)

    def _with_scalars(
        self, f: Factors, core: Written | None, below: Sequence[Written] = ()
    ) -> Written:
        up = [self.whole(s) for s, _ in self._sorted((s, ()) for s in f.scalars)]
        down = [self.whole(s) for s in f.scalars_below]
        coefficient, number_below = _fraction(f.coefficient)
        if number_below is not None:
            down = [number_below, *down]
        down += [self._hadamard([*below])] if below else []
        minus = not isinstance(coefficient, complex) and coefficient < 0
        coefficient = -coefficient if minus else coefficient
        alone = len(up) == 1 and core is None and coefficient == 1 and not down
        pieces = [ts.number(coefficient).at(ts.PRODUCT)] if coefficient != 1 else []
        pieces += up if alone else [u.at(ts.PRODUCT) for u in up]
        if core is not None:
            pieces.append(core.at(ts.PRODUCT) if pieces or down else core)
        top = _side_by_side(pieces or [ts.number(1)])
        if down:
            top = ts.over(
                top, _side_by_side(down if len(down) == 1 else [d.at(ts.POWER) for d in down])
            )
        return ts.negative(top) if minus else top

    # Entries.

    def entry(self, x: Expr, letters: Sequence[str]) -> Written:
        """The entry of x at these indices."""
        if x in self.names:
            return self._indexed(self.names[x], letters)
        constant = constant_of(x)
        if constant is not None:
            return ts.number(constant)
        if x.op == "einsum":
            return self._entry_of_product(x, letters)
        if x.op == "add":
            return self.sum_of([self.entry(t, letters) for t in self._in_order(x.args)])
        if is_elementwise(x):
            return self._function(x, [self.entry(a, letters) for a in x.args], False)
        return self._indexed(self.whole(x), letters)

    def _indexed(self, x: Written, letters: Sequence[str]) -> Written:
        if not letters:
            return x
        return ts.subscript(x, "".join(letters))

    def _entry_of_product(self, x: Expr, letters: Sequence[str]) -> Written:
        coefficient, factors, labels = display_factors(x, self.names, True, self.defined)
        f = Factors(coefficient, factors, labels, x)
        f.apart()
        names = dict(enumerate(letters))
        extra = sorted(f.summed)
        own = f.label_letters(self.axes)
        fresh = primed([own[l] for l in extra], letters)
        names.update(zip(extra, fresh, strict=True))
        at = lambda a, ls: self.entry(a, [names[l] for l in ls])
        up = [at(a, ls).at(ts.PRODUCT) for a, ls in self._sorted(f.arrays)]
        down = [at(a, ls).at(ts.POWER) for a, ls in f.below]
        top = _side_by_side(up or [ts.number(1.0)])
        top = ts.over(top, _side_by_side(down)) if down else top
        if not f.arrays and not f.below:
            return self._with_scalars(f, None)
        if extra:
            top = ts.total("".join(fresh), top.at(ts.PRODUCT))
        return self._with_scalars(f, top)

    def axis_names(self, x: Expr, axes: Iterable[int]) -> str:
        """The letters of some axes of x."""
        letters = self.axes.unique(x)
        chosen = tuple(axes)
        return "".join(letters[a] for a in chosen)

    def note(self, text: str) -> None:
        """Add an explanation of the notation."""
        self.notes[text] = None


def _side_by_side(pieces: Sequence[Written]) -> Written:
    return ts.join(pieces, " ", ts.PRODUCT) if len(pieces) > 1 else pieces[0]


def _fraction(coefficient: Any) -> tuple[Any, Written | None]:
    """A coefficient such as 1/5 or 1/√8 as a number below."""
    if isinstance(coefficient, complex) or coefficient == 0 or abs(coefficient) >= 1:
        return coefficient, None
    inverse = 1 / abs(coefficient)
    sign = 1.0 if coefficient > 0 else -1.0
    for n in (inverse, inverse * inverse):
        if inverse < 1e6 and abs(n - round(n)) < 1e-12 * n:
            below = round(n) if n == inverse else round(n) ** 0.5
            return sign, ts.number(float(below))
    for up in range(2, 10):
        if abs(inverse * up - round(inverse * up)) < 1e-12 * inverse:
            return sign * up, ts.number(float(round(inverse * up)))
    return coefficient, None
