"""Writes an expression as text.

Products of matrices are written by juxtaposition, the elementwise product as a circled dot, sums
over axes by their letters. Axes align by their letters, so a broadcast is not written. A product
that would be ambiguous as whole arrays (three or more axes, the same axis twice) raises
`NeedsIndices`: it gets a line of its own, for one entry (`Writer.indexed`).

A contraction is a chain of matrices if every summed label belongs to two factors, and following
the labels leads from one axis of the result to the other.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import partial
from math import prod
from typing import Any

from gradtools.seeing.formulas import typesetting as ts
from gradtools.seeing.formulas.algebra import (
    Entry,
    Labels,
    contracts,
    drop_axes,
    is_wrapper,
    opened,
    power,
    varying,
)
from gradtools.seeing.formulas.expressions import OPERATIONS, Expr, constant_of
from gradtools.seeing.formulas.typesetting import Written


class NeedsIndices(Exception):
    """The product is ambiguous without indices."""


class Writer:
    """Writes expressions; named ones by their names."""

    def __init__(self, axes: Axes) -> None:
        self.axes = axes
        self.names: dict[Expr, Written] = {}
        # The elementwise products with a name that earlier lines define, by first factor.
        self.defined: dict[Expr, list[Expr]] = {}
        self.notes: dict[str, None] = {}  # explanations of the notation that was used
        self.recognised: set[str] = set()  # the operations that were written by their name
        self._as_mean: set[Expr] = set()  # sums that are written as means

    def write(self, x: Expr) -> Written:
        """x as a whole array.

        Raises:
            NeedsIndices: A product in x, without a name, is ambiguous without indices.
        """
        if x in self.names:
            return self.names[x]
        if x in self._as_mean:
            return self._mean(x)
        if constant_of(x) is not None:
            return ts.number(constant_of(x))
        if x.op == "einsum":
            return self._product(x)
        self.recognised.add(x.op)
        form = OPERATIONS[x.op].form
        return form(self, x) if form else ts.function(x.op, [self.operand(a) for a in x.args])

    def is_named(self, x: Expr) -> bool:
        """Whether x has a name, maybe transposed or scaled."""
        return (x.args[0] if is_wrapper(x) else x) in self.names

    def operand(self, x: Expr) -> Written:
        """x as an operand of a function of whole arrays, where a repetition has to be written."""
        used = varying(x)
        kept = [a for a, n in enumerate(x.shape) if a in used or n == 1]
        if len(kept) == x.rank or constant_of(x) is not None:
            return self.write(x)
        self.note("repeat: repeated along the axes that the operand lacks")
        return ts.function("repeat", [self.write(drop_axes(x, kept))], "x".join(map(str, x.shape)))

    def note(self, text: str) -> None:
        """Adds an explanation of the notation."""
        self.notes[text] = None

    def indexed(self, x: Expr) -> tuple[str, Written]:
        """A product's letters, and its entry at these indices."""
        letters = self.axes.unique(x)
        f = Factors(x, self.names)
        own, summed = f.label_letters(self.axes), sorted(f.summed)
        fresh = primed([own[l] for l in summed], letters)
        names = dict(enumerate(letters)) | dict(zip(summed, fresh, strict=True))
        at = lambda a, ls: ts.subscript(self.write(a), "".join(names[l] for l in ls))
        top = _multiplied([at(a, ls) for a, ls in self._sorted(f.arrays)] or [ts.number(1.0)])
        if f.below:
            top = ts.over(top, _multiplied([at(a, ls).at(ts.POWER) for a, ls in f.below]))
        if summed:
            top = ts.total("".join(fresh), top.at(ts.PRODUCT))
        return "".join(letters), self._with_scalars(f, top)

    # Products.

    def _product(self, x: Expr) -> Written:
        """A product: its coefficient and scalars, and its factors with axes, over its divisors."""
        f = Factors(x, self.names, self.defined)
        # A factor that is a sum, times one over its length, is written as a mean.
        sums = (*f.scalars, *(a for a, _ in f.arrays))
        inverse = lambda a: (
            a not in self.names and _is_inverse(f.coefficient, summed_length(a, self.names))
        )
        means = {a for a in sums if inverse(a)}
        f.coefficient = f.coefficient if not means else 1.0 if f.coefficient > 0 else -1.0
        before, self._as_mean = self._as_mean, self._as_mean | means
        try:
            if not f.arrays and f.below and not f.summed:  # L̄ / x, and not L̄ 1 / x
                return self._with_scalars(f, None, [self._oriented(a, n, f) for a, n in f.below])
            return self._with_scalars(f, self._core(f))
        finally:
            self._as_mean = before

    def _core(self, f: Factors) -> Written | None:
        """The factors with axes, in the first unambiguous form; None if there are none.

        The forms: one array or its transpose in the last two axes, an inner product, a product
        of matrices and vectors, an elementwise product.
        """
        if not f.arrays and not f.below:
            return None
        if len(f.arrays) == 1 and not f.below and not f.summed:
            ((x, names),), n = f.arrays, f.target.rank
            if names == tuple(range(n)):
                return self.write(x)
            if n >= 2 and names == (*range(n - 2), n - 1, n - 2):
                return self.transposed(x)
        labels = {names for _, names in f.arrays}
        real = not any(a.is_complex for a, _ in f.arrays)
        if real and not f.out and not f.below and len(labels) == 1 and set(*labels) == f.summed:
            (x, *_), *others = self._sorted(f.arrays)
            if others:
                return ts.inner_product(
                    self.write(x), _hadamard([self.write(a) for a, _ in others])
                )
            if x not in self.names and x.op == "power" and x["exponent"] == 2:
                base = x.args[0].args[0] if x.args[0].op == "abs" else x.args[0]
                return Written(f"‖{self.write(base).text}‖²", ts.POWER)
        if f.arrays and not f.below and (links := chain(f)):
            return ts.join([self._link(*link) for link in links], " ", ts.PRODUCT)
        return self._aligned(f)

    def _mean(self, x: Expr) -> Written:
        """A sum of one array, without its factor of one over the length."""
        (inner,), (names,) = x.args, x["labels"]
        letters = self.axes.unique(inner)
        over = "".join(letters[k] for k, l in enumerate(names) if l >= x.rank)
        return ts.function("mean", [self.write(inner)], over if x.rank else "")

    def _link(self, group: list[Expr], flipped: bool) -> Written:
        if len(group) == 1:
            return self.transposed(group[0]) if flipped else self.write(group[0]).at(ts.PRODUCT)
        written = ts.bracket(_hadamard([self.write(g) for g in group]))
        return ts.superscript(written, "ᵀ") if flipped else written

    def transposed(self, x: Expr) -> Written:
        """The transpose, the conjugate transpose where x is a conjugate."""
        if x.op == "conj" and x not in self.names:
            return ts.superscript(self.write(x.args[0]), "ᴴ")
        return ts.superscript(self.write(x), "ᵀ")

    def _aligned(self, f: Factors) -> Written:
        """An elementwise product, summed over axes by their letters, unless that is ambiguous."""
        letters = f.label_letters(self.axes)
        clear = len(set(letters.values())) == len(letters)
        aligned = all(n == tuple(range(f.target.rank)) for _, n in (*f.arrays, *f.below))
        if not (clear or (aligned and not f.summed)):
            raise NeedsIndices
        if f.summed and not any(set(n) == set(f.size) for _, n in f.arrays):
            raise NeedsIndices
        up = [self._oriented(a, n, f) for a, n in self._sorted(f.arrays)]
        down = [self._oriented(a, n, f) for a, n in f.below]
        top = _hadamard(up) if up else ts.number(1.0)
        if down:
            top = ts.over(top.at(ts.PRODUCT), _hadamard(down))
        name = "".join(sorted(letters[l] for l in f.summed))
        return ts.total(name, top.at(ts.POWER)) if f.summed else top

    def _oriented(self, a: Expr, names: Sequence[int], f: Factors) -> Written:
        """A factor, transposed if its axes are not in the order of the others'."""
        alone = len(f.arrays) == 1 and not f.below
        places = [f.reference.index(l) for l in names if l in f.out or not alone]
        if places == sorted(places):
            return self.write(a)
        if a.rank == 2:
            return self.transposed(a)
        raise NeedsIndices

    def _sorted(self, arrays: Iterable[tuple[Expr, Any]]) -> list[tuple[Expr, Any]]:
        """Cotangents first, then other named values, then compositions."""

        def key(entry: tuple[Expr, Any]) -> tuple:
            written = self.names.get(entry[0])
            return (written is None, written is not None and not ts.has_bar(written))

        return sorted(arrays, key=key)

    def _with_scalars(
        self, f: Factors, core: Written | None, below: Sequence[Written] = ()
    ) -> Written:
        up = [self.write(s) for s, _ in self._sorted((s, ()) for s in f.scalars)]
        coefficient, number_below = _fraction(f.coefficient)
        down = [ts.number(number_below)] if number_below != 1 else []
        down += [self.write(s) for s in f.scalars_below]
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
        return ts.negative(top) if minus else top


def _multiplied(pieces: Sequence[Written], sign: str = " ") -> Written:
    if len(pieces) == 1:
        return pieces[0]
    return ts.join([p.at(ts.PRODUCT) for p in pieces], sign, ts.PRODUCT)


_hadamard = partial(_multiplied, sign=" ⊙ ")


def _is_inverse(coefficient: Any, count: int) -> bool:
    """Whether a coefficient is one over a count, up to its sign."""
    is_real = not isinstance(coefficient, complex)
    return is_real and count > 1 and abs(abs(coefficient) * count - 1) < 1e-12


def _fraction(coefficient: Any) -> tuple[Any, float]:
    """A coefficient such as 2/5 or 1/√8 as numerator and denominator."""
    if isinstance(coefficient, complex) or not 0 < abs(coefficient) < 1:
        return coefficient, 1.0
    sign = 1.0 if coefficient > 0 else -1.0
    exact, square = ts.fraction(coefficient, 10**6), ts.fraction(coefficient**2, 10**6, 2e-14)
    if exact is not None and abs(exact.numerator) < 10:
        return float(exact.numerator), float(exact.denominator)
    if square is not None and square.numerator == 1:
        return sign, float(square.denominator) ** 0.5
    return coefficient, 1.0


# --- the factors of a product as they are written


def summed_length(x: Expr, named: Collection[Expr]) -> int:
    """The number of terms of each sum, if x sums one array over axes; else 0."""
    if not contracts(x) or len(x.args) != 1 or (contracts(x.args[0]) and x.args[0] not in named):
        return 0
    return prod(n for l, n in zip(x["labels"][0], x.args[0].shape, strict=True) if l >= x.rank)


class Factors:
    """A product's factors, sorted to those in the numerator and those in the denominator.

    Products among the factors are flattened, but not named ones, nor sums inside of elementwise
    products. Factors that are together a product which an earlier line defines become that.
    """

    def __init__(
        self,
        x: Expr,
        named: Collection[Expr],
        defined: Mapping[Expr, Sequence[Expr]] | None = None,
    ) -> None:
        self.target, self.coefficient = x, x["coefficient"]
        fresh = itertools.count(x.rank + 1000)
        queue: list[Entry] = list(zip(x.args, x["labels"], strict=True))
        self._entries: list[Entry] = []
        while queue:
            factor, names = queue.pop(0)
            alone = not self._entries and not queue
            mean = _is_inverse(self.coefficient, summed_length(factor, named))
            closed = contracts(factor) and (mean or not alone)
            if factor in named or factor.op != "einsum" or not factor.args or closed:
                self._entries.append((factor, names))
            else:
                self.coefficient *= factor["coefficient"]
                queue = opened(factor, names, lambda n: next(fresh)) + queue
        for p in (p for f, _ in self._entries[:-1] for p in (defined or {}).get(f, ())):
            if p is not x:
                self._entries = _with_product(self._entries, p)
        self.scalars: list[Expr] = []  # the factors without axes in the numerator
        self.scalars_below: list[Expr] = []  # those in the denominator
        self.arrays: list[Entry] = []  # the factors with axes in the numerator
        self.below: list[Entry] = []  # those in the denominator
        self.size: dict[int, int] = {}  # the length of each label's axis
        for f, names in self._entries:
            self.size.update(zip(names, f.shape, strict=True))
            exponent = f["exponent"] if f.op == "power" else 1
            negative = not isinstance(exponent, complex) and exponent < 0
            shown = power(f.args[0], -exponent) if negative else f
            if f.rank:
                (self.below if negative else self.arrays).append((shown, names))
            else:
                (self.scalars_below if negative else self.scalars).append(shown)
        self.out = [l for l in range(x.rank) if l in self.size]
        self.summed = self.size.keys() - set(self.out)
        axes = [self.out if len(self.out) > 1 else ()]
        axes += [names for _, names in (*self.arrays, *self.below)]
        # The order of labels in which factors are written; others are transposed.
        self.reference = list(dict.fromkeys(l for names in axes for l in names))

    def label_letters(self, axes: Axes) -> dict[int, str]:
        """The letter of each label."""
        result: dict[int, str] = {}
        for f, names in self._entries:
            for k, l in enumerate(names):
                result.setdefault(l, axes.letter(f, k))
        return result


def _with_product(entries: list[Entry], p: Expr) -> list[Entry]:
    """The factors with a product in place of its own factors, if these are among them."""
    place: dict[int, int] = {}
    left = list(entries)
    for f, names in zip(p.args, p["labels"], strict=True):
        fits = lambda at, own=names: all(place.get(l, t) == t for l, t in zip(own, at, strict=True))
        match = next((e for e in left if e[0] is f and fits(e[1])), None)
        if match is None:
            return entries
        place.update(zip(names, match[1], strict=True))
        left.remove(match)
    if len(set(place.values())) < p.rank:
        return entries
    return [(p, tuple(place[l] for l in range(p.rank))), *left]


# --- products of matrices


Link = tuple[list[Expr], bool]  # factors that are multiplied, and whether they are transposed


def chain(f: Factors) -> list[Link] | None:
    """The factors as two matrices or vectors side by side, in which equal labels are one link."""
    groups: dict[Labels, list[Expr]] = {}
    for a, names in sorted(f.arrays, key=lambda e: -len(e[1])):
        groups.setdefault(names, []).append(a)
    batch: Sequence[int] = ()
    if max((len(n) for n in groups), default=0) > 2 or len(f.out) > 2:  # of matrices
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
    """Letters for axes, by union-find: axes that correspond get the same letter.

    Every operation labels the axes of its arguments: those of a sum one by one, those of a product
    by their labels (`Operation.labels`). A class of axes that correspond is one dimension of the
    problem, such as the batch or the classes, and gets one letter.

    taken: Letters that have another meaning.
    """

    def __init__(self, taken: Iterable[str]) -> None:
        self._parent: dict[Axis, Axis] = {}
        self._letters: dict[Axis, str] = {}
        self._taken = set(taken)

    def _root(self, axis: Axis) -> Axis:
        while (up := self._parent.get(axis, axis)) != axis:
            above = self._parent[axis] = self._parent.get(up, up)  # path halving
            axis = above
        return axis

    def learn(self, values: Iterable[Expr]) -> None:
        """Unites axes of equal length to which the values' operations give one label."""
        for y in values:
            first: dict[Any, Axis] = {l: (y, l) for l in range(y.rank)}
            for x, labels in zip(y.args, OPERATIONS[y.op].labels(y) if y.args else (), strict=True):
                for k, label in enumerate(labels):
                    z, i = (x, k) if label is None else first.setdefault(label, (x, k))
                    if z.shape[i] == x.shape[k] != 1:
                        one, other = self._root((z, i)), self._root((x, k))
                        if one != other:
                            self._parent[other] = one

    def letter(self, x: Expr, axis: int) -> str:
        """The letter of an axis."""
        root = self._root((x, axis))
        if root not in self._letters:
            more = (f"{c}{n}" for n in itertools.count(1) for c in "ijklmn")
            free = (c for c in itertools.chain(_LETTERS, more) if c not in self._taken)
            self._letters[root] = next(free)
            self._taken.add(self._letters[root])
        return self._letters[root]

    def letters(self, x: Expr) -> tuple[str, ...]:
        """The letters of all axes; axes of one array that correspond share a letter."""
        return tuple(self.letter(x, a) for a in range(x.rank))

    def unique(self, x: Expr) -> tuple[str, ...]:
        """The letters of all axes, with primes for repeated ones."""
        return primed(self.letters(x))


def primed(letters: Sequence[str], taken: Iterable[str] = ()) -> tuple[str, ...]:
    """The letters, with primes to distinguish them from each other and from those taken."""
    seen, result = set(taken), []
    for letter in letters:
        while letter in seen:
            letter += "'"
        seen.add(letter)
        result.append(letter)
    return tuple(result)
