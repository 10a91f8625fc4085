"""Writes expressions as mathematical text.

Matrix products are written by juxtaposition. Elementwise products are written with a circled dot.
Sums over axes are written with Σ and the letters of the axes. Letters identify axes, so broadcasts
are not written. A product that is ambiguous in this notation, such as a product of arrays
with three axes, is written as an einsum.

A contraction is written as a matrix product if each summed label belongs to two factors and the
labels form a chain from one axis of the result to the other.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Sequence
from functools import partial
from math import prod
from typing import Any

from gradtools.seeing.formulas import algebra
from gradtools.seeing.formulas import typesetting as ts
from gradtools.seeing.formulas.algebra import Entry, Labels, contracts, opened, power, varying
from gradtools.seeing.formulas.expressions import OPERATIONS, Expr, constant_of
from gradtools.seeing.formulas.operations import DEFINITIONS
from gradtools.seeing.formulas.typesetting import Written


class Writer:
    """Writes expressions; a named expression is written as its name."""

    def __init__(self, axes: Axes) -> None:
        self.axes = axes
        self.names: dict[Expr, Written] = {}
        self.notes: dict[str, None] = {}  # explanations of the notation that the formula uses
        self.definitions: dict[str, None] = {}  # definitions of functions such as softmax

    def write(self, x: Expr) -> Written:
        """Writes the name of x, or the operation of x if x has no name."""
        return self.names[x] if x in self.names else self.composed(x)

    def composed(self, x: Expr) -> Written:
        """Writes the operation of x, even if x has a name."""
        if constant_of(x) is not None:
            return ts.number(constant_of(x))
        if x.op == "einsum":
            return self._product(x)
        if x.op in DEFINITIONS:
            self.definitions[DEFINITIONS[x.op]] = None
        form = OPERATIONS[x.op].form
        return form(self, x) if form else ts.function(x.op, [self.operand(a) for a in x.args])

    def is_named(self, x: Expr) -> bool:
        """Returns whether x is a transpose, broadcast or multiple of a named value, or is named."""
        return (x.args[0] if algebra.is_wrapper(x) else x) in self.names

    def operand(self, x: Expr) -> Written:
        """Writes an operand of a function call, with explicit broadcasts."""
        used = varying(x)
        kept = [a for a, n in enumerate(x.shape) if a in used or n == 1]
        if len(kept) == x.rank or constant_of(x) is not None:
            return self.write(x)
        self.note("repeat: broadcasts the operand along its missing axes")
        inner = self.write(algebra.drop_axes(x, kept))
        return ts.function("repeat", [inner], "x".join(map(str, x.shape)))

    def note(self, text: str) -> None:
        """Adds an explanation of the notation to the notes below the formula."""
        self.notes[text] = None

    def transposed(self, x: Expr) -> Written:
        """Writes the transpose of x, or the conjugate transpose of y if x is conj(y)."""
        if x.op == "conj" and x not in self.names:
            return ts.superscript(self.write(x.args[0]), "ᴴ")
        return ts.superscript(self.write(x), "ᵀ")

    def _product(self, x: Expr) -> Written:
        """Writes a product of a coefficient, scalars and arrays as a fraction."""
        f = _Factors(x, self.names)
        core, below = None, list[Written]()
        if not f.arrays and f.below and not f.summed:  # writes L̄ / x instead of L̄ 1 / x
            below = [self.write(a) for a, _ in f.below]
        elif f.arrays or f.below:
            core = self._matrices(f) or self._aligned(f) or self._einsum(f)
        up = [self._factor(s, f) for s, _ in self._sorted(f.scalars)]
        coefficient, number_below = f.coefficient, 1.0
        if not isinstance(coefficient, complex) and 0 < abs(coefficient) < 1:
            coefficient, number_below = ts.halves(coefficient)
        down = [ts.number(number_below)] if number_below != 1 else []
        down += [self.write(s) for s, _ in f.scalars_below]
        down += [_hadamard(below)] if below else []
        minus = not isinstance(coefficient, complex) and coefficient < 0
        coefficient = -coefficient if minus else coefficient
        alone = len(up) == 1 and core is None and coefficient == 1 and not down
        pieces = [ts.number(coefficient).at(ts.PRODUCT)] if coefficient != 1 else []
        pieces += up if alone else [u.at(ts.PRODUCT) for u in up]
        if core is not None:
            pieces.append(core.at(ts.PRODUCT) if pieces or down else core)
        top = _multiplied(pieces or [ts.number(1)])
        if down:
            bottom = down if len(down) == 1 else [d.at(ts.POWER) for d in down]
            top = ts.over(top, _multiplied(bottom))
        return Written(f"-{top.at(ts.BIG).text}", ts.SUM) if minus else top

    def _factor(self, x: Expr, f: _Factors) -> Written:
        """Writes a factor of a product; writes a sum of n terms with coefficient 1/n as a mean."""
        if x is not f.mean:
            return self.write(x)
        (inner,), (names,) = x.args, x["labels"]
        letters = self.axes.unique(inner)
        over = "".join(letters[k] for k, l in enumerate(names) if l >= x.rank)
        return ts.function("mean", [self.write(inner)], over if x.rank else "")

    def _matrices(self, f: _Factors) -> Written | None:
        """Writes arrays as an inner product or matrix product; returns None for other products."""
        if f.below:
            return None
        if len(f.arrays) == 1 and not f.summed:
            ((x, names),), n = f.arrays, f.target.rank
            if names == tuple(range(n)):
                return self._factor(x, f)
            if n >= 2 and names == (*range(n - 2), n - 1, n - 2):
                return self.transposed(x)
        labels = {names for _, names in f.arrays}
        is_real = not any(a.is_complex for a, _ in f.arrays)
        if is_real and not f.out and f.arrays and len(labels) == 1 and set(*labels) == f.summed:
            x, *others = [a for a, _ in self._sorted(f.arrays)]
            if others:
                return ts.inner_product(self.write(x), _hadamard([*map(self.write, others)]))
            if x not in self.names and x.op == "power" and x["exponent"] == 2:
                base = x.args[0].args[0] if x.args[0].op == "abs" else x.args[0]
                return Written(f"‖{self.write(base).text}‖²", ts.POWER)
        links = _chain(f)
        return ts.join([self._link(*link) for link in links], " ", ts.PRODUCT) if links else None

    def _link(self, group: list[Expr], flipped: bool) -> Written:
        if len(group) == 1:
            return self.transposed(group[0]) if flipped else self.write(group[0]).at(ts.PRODUCT)
        written = ts.bracket(_hadamard([*map(self.write, group)]))
        return ts.superscript(written, "ᵀ") if flipped else written

    def _aligned(self, f: _Factors) -> Written | None:
        """Writes an elementwise product, with a sum over axes; returns None if it is ambiguous."""
        letters, factors = f.letters(self.axes), [*f.arrays, *f.below]
        clear = len(set(letters.values())) == len(letters)
        in_place = all(names == tuple(range(f.target.rank)) for _, names in factors)
        spanned = any(set(names) == f.used for _, names in f.arrays)
        if not (spanned and clear if f.summed else clear or in_place):
            return None
        written: dict[Entry, Written] = {}
        for a, names in factors:  # transpose if the axis order differs
            places = [f.reference.index(l) for l in names if l in f.out or len(factors) > 1]
            straight = places == sorted(places)
            if not straight and a.rank != 2:
                return None
            written[a, names] = self._factor(a, f) if straight else self.transposed(a)
        up = [written[entry] for entry in self._sorted(f.arrays)]
        top = _hadamard(up) if up else ts.number(1.0)
        if f.below:
            top = ts.over(top.at(ts.PRODUCT), _hadamard([written[entry] for entry in f.below]))
        over = "".join(sorted(letters[l] for l in f.summed))
        return Written(f"Σ{ts.below(over)} {top.at(ts.POWER).text}", ts.BIG) if over else top

    def _einsum(self, f: _Factors) -> Written:
        """Writes a product as a call of einsum, with the letters of the axes."""
        letters = f.letters(self.axes)
        names = dict(zip(letters, primed([*letters.values()]), strict=True))
        of = lambda labels: "".join(names[l] for l in labels)
        operands = ",".join(of(labels) for _, labels in (*f.arrays, *f.below))
        pieces = [self._factor(a, f) for a, _ in f.arrays]
        pieces += [ts.over(ts.number(1.0), self.write(a)) for a, _ in f.below]
        return ts.function(f"einsum[{operands}→{of(f.out)}]", pieces)

    def _sorted(self, factors: Iterable[Entry]) -> list[Entry]:
        """Sorts factors: cotangents first, then other named values, then unnamed expressions."""

        def key(entry: Entry) -> tuple[bool, bool]:
            written = self.names.get(entry[0])
            return (written is None, written is not None and not ts.has_bar(written))

        return sorted(factors, key=key)


def _multiplied(pieces: Sequence[Written], sign: str = " ") -> Written:
    if len(pieces) == 1:
        return pieces[0]
    return ts.join([p.at(ts.PRODUCT) for p in pieces], sign, ts.PRODUCT)


_hadamard = partial(_multiplied, sign=" ⊙ ")


class _Factors:
    """The factors of a product, separated into numerator and denominator.

    A factor that is a product is flattened, unless the factor has a name, or is a sum over axes
    inside of an elementwise product. A sum that is divided by the number of its terms is written as
    a mean.
    """

    def __init__(self, x: Expr, named: Collection[Expr]) -> None:
        self.target, self.coefficient = x, x["coefficient"]
        self.mean: Expr | None = None
        queue: list[Entry] = list(zip(x.args, x["labels"], strict=True))
        self.entries: list[Entry] = []
        marks = itertools.count()
        while queue:
            factor, names = queue.pop(0)
            alone, is_mean = not self.entries and not queue, self._is_mean(factor, named)
            if is_mean:
                self.mean, self.coefficient = factor, 1.0 if self.coefficient > 0 else -1.0
            closed = is_mean or (contracts(factor) and not alone)
            if factor in named or factor.op != "einsum" or not factor.args or closed:
                self.entries.append((factor, names))
            else:
                self.coefficient *= factor["coefficient"]
                queue = opened(factor, names, next(marks)) + queue
        # Scalars in the numerator and denominator, and arrays in the numerator and denominator.
        groups: list[list[Entry]] = [[], [], [], []]
        self.scalars, self.scalars_below, self.arrays, self.below = groups
        for f, names in self.entries:
            exponent = f["exponent"] if f.op == "power" else 1
            shown = power(f.args[0], -exponent) if exponent < 0 else f
            groups[2 * bool(names) + (exponent < 0)].append((shown, names))
        self.used = {l for _, names in self.entries for l in names}
        self.out = [l for l in range(x.rank) if l in self.used]
        self.summed = self.used.difference(self.out)
        order = [self.out if len(self.out) > 1 else ()]
        order += [names for _, names in (*self.arrays, *self.below)]
        # Factors are written with their labels in this order, and transposed if necessary.
        self.reference = list(dict.fromkeys(l for names in order for l in names))

    def _is_mean(self, x: Expr, named: Collection[Expr]) -> bool:
        """Returns whether x is an unnamed sum of n terms with the coefficient 1/n or -1/n."""
        if x in named or not contracts(x) or len(x.args) != 1:
            return False
        (inner,), (labels,) = x.args, x["labels"]
        length = prod(n for l, n in zip(labels, inner.shape, strict=True) if l >= x.rank)
        whole = inner in named or not contracts(inner)
        is_real = not isinstance(self.coefficient, complex)
        return is_real and whole and length > 1 and abs(abs(self.coefficient) * length - 1) < 1e-12

    def letters(self, axes: Axes) -> dict[int, str]:
        """Maps each axis label to its letter."""
        result: dict[int, str] = {}
        for f, names in self.entries:
            for k, l in enumerate(names):
                result.setdefault(l, axes.letter(f, k))
        return result


Link = tuple[list[Expr], bool]  # factors, and whether their product is transposed


def _chain(f: _Factors) -> list[Link] | None:
    """Arranges factors as a product of two matrices or vectors; returns None if impossible."""
    groups: dict[Labels, list[Expr]] = {}
    for a, names in sorted(f.arrays, key=lambda e: -len(e[1])):
        groups.setdefault(names, []).append(a)
    batch: Sequence[int] = ()
    if max((len(n) for n in groups), default=0) > 2 or len(f.out) > 2:  # a batch of matrices
        batch = f.out[:-2] if len(f.out) == f.target.rank else ()
        leads = [n[:-2] for n in groups]
        if not batch or any(list(n) != batch[len(batch) - len(n) :] for n in leads):
            return None
    ends = {n[-2:]: factors for n, factors in groups.items()}
    out = [l for l in f.out if l not in batch]
    if len(groups) != 2 or len(ends) != 2 or not out or any(l in batch for n in ends for l in n):
        return None
    first, second = sorted(ends, key=lambda n: out[0] not in n)
    shared = set(first) & set(second)
    if shared != f.summed or {*first, *second} - shared != set(out) or len(shared) > 1:
        return None
    if not shared:  # an outer product
        return [(ends[first], False), (ends[second], True)] if len(first + second) == 2 else None
    (inner,) = shared
    turned = len(second) == 2 and second[0] != inner
    return [(ends[first], first[-1] != inner), (ends[second], turned)]


# --- letters of axes


Axis = tuple[Expr, int]
_LETTERS = "ijklmnprsuvaeh"  # letters that have subscripts in Unicode


class Axes:
    """Assigns letters to axes by union-find: axes that correspond get the same letter.

    Axes of the terms of a sum correspond by position. Axes of the factors of a product correspond
    if they have the same label (see `_labels`). Each class of corresponding axes is one dimension
    of the problem, such as the batch axis.

    taken: Letters that are already names of values.
    """

    def __init__(self, taken: Iterable[str]) -> None:
        self._parent: dict[Axis, Axis] = {}
        self._letters: dict[Axis, str] = {}
        self._taken = set(taken)

    def _root(self, axis: Axis) -> Axis:
        while axis in self._parent:
            axis = self._parent[axis]
        return axis

    def learn(self, values: Iterable[Expr]) -> None:
        """Merges the classes of axes with the same length and the same label in an operation."""
        for y in values:
            first: dict[Any, Axis] = {l: (y, l) for l in range(y.rank)}
            for x, labels in zip(y.args, _labels(y), strict=True):
                for k, label in enumerate(labels):
                    z, i = (x, k) if label is None else first.setdefault(label, (x, k))
                    new, old = self._root((z, i)), self._root((x, k))
                    if new != old and z.shape[i] == x.shape[k] != 1:
                        self._parent[new] = old

    def letter(self, x: Expr, axis: int) -> str:
        """Returns the letter of an axis of x."""
        root = self._root((x, axis))
        if root not in self._letters:
            more = (f"{c}{n}" for n in itertools.count(1) for c in "ijklmn")
            free = (c for c in itertools.chain(_LETTERS, more) if c not in self._taken)
            self._letters[root] = next(free)
            self._taken.add(self._letters[root])
        return self._letters[root]

    def letters(self, x: Expr) -> tuple[str, ...]:
        """Returns the letters of the axes of x; corresponding axes have equal letters."""
        return tuple(self.letter(x, a) for a in range(x.rank))

    def unique(self, x: Expr) -> tuple[str, ...]:
        """Returns the letters of the axes of x, with primes for repeated letters."""
        return primed(self.letters(x))


def _labels(y: Expr) -> Sequence[Sequence[int | None]]:
    """Returns the label of each axis of each argument: an axis of y, a summed label or None."""
    if y.op == "einsum":
        return y["labels"]
    kept, axes = iter(range(y.rank)), y.get("axes", ())
    place = {prod(y.shape[:k]): k for k, n in enumerate(y.shape) if n != 1}

    def of(x: Expr) -> Sequence[int | None]:
        if x.rank == y.rank and y.op != "reshape":
            return range(x.rank)
        if axes:  # a reduction
            return [None if a in axes else next(kept) for a in range(x.rank)]
        # In a reshape, axes correspond if the preceding axes have the same number of entries.
        return [place.get(prod(x.shape[:k])) for k in range(x.rank)]

    return [*map(of, y.args)]


def primed(letters: Sequence[str]) -> tuple[str, ...]:
    """Adds primes to repeated letters, such as i, i'."""
    result: list[str] = []
    for letter in letters:
        while letter in result:
            letter += "'"
        result.append(letter)
    return tuple(result)
