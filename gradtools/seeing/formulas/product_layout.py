"""The layout of a product: the order of its factors, and whether it is a matrix chain.

A contraction is a chain of matrices if every summed label belongs to two factors, and following
the labels leads from one axis of the result to the other.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from math import prod
from typing import Any

from gradtools.seeing.formulas.algebra import contracts, power
from gradtools.seeing.formulas.axes import Axes
from gradtools.seeing.formulas.expressions import Expr

Entry = tuple[Expr, tuple[int, ...]]


def display_factors(
    x: Expr,
    named: Collection[Expr],
    entries: bool,
    defined: Defined,
) -> tuple[Any, list[Expr], list[tuple[int, ...]]]:
    """Coefficient, factors and labels of x, with products among the factors flattened.

    Named products are not flattened, nor are sums inside of elementwise products unless single
    entries are written. Products that are defined already replace their factors.
    """
    coefficient = x["coefficient"]
    fresh = x.rank + 1000
    queue = list(zip(x.args, x["labels"], strict=True))
    result: list[Entry] = []
    while queue:
        factor, names = queue.pop(0)
        single = not result and not queue
        if factor in named or factor.op != "einsum" or not factor.args:
            result.append((factor, names))
            continue
        if contracts(factor) and not (single or entries):
            result.append((factor, names))
            continue
        coefficient *= factor["coefficient"]
        inner = dict(enumerate(names))
        opened = []
        for f, ls in zip(factor.args, factor["labels"], strict=True):
            for l in ls:
                if l not in inner:
                    inner[l], fresh = fresh, fresh + 1
            opened.append((f, tuple(inner[l] for l in ls)))
        queue = opened + queue
    result = _with_named(result, defined, x)
    return coefficient, [f for f, _ in result], [n for _, n in result]


class Defined:
    """The elementwise products with a name that an earlier line defines, by their factors."""

    def __init__(self) -> None:
        self._by_factor: dict[Expr, list[Expr]] = {}

    def add(self, p: Expr) -> None:
        """Add p, if it is an elementwise product."""
        if p.op == "einsum" and len(p.args) > 1 and p["coefficient"] == 1 and not contracts(p):
            self._by_factor.setdefault(p.args[0], []).append(p)

    def within(self, factors: set[Expr]) -> list[Expr]:
        """The products whose factors are all among these."""
        result = [p for f in factors for p in self._by_factor.get(f, ())]
        return sorted((p for p in result if factors >= set(p.args)), key=lambda p: p.serial)


def _with_named(entries: list[Entry], defined: Defined, x: Expr) -> list[Entry]:
    """Several factors that are a product with a name are written by the name."""
    if len(entries) < 2:
        return entries
    for p in defined.within({f for f, _ in entries}):
        if p is not x:
            entries = _replaced(entries, p) or entries
    return entries


def _replaced(entries: list[Entry], p: Expr) -> list[Entry] | None:
    place: dict[int, int] = {}
    left = list(entries)
    for f, names in zip(p.args, p["labels"], strict=True):
        fits = lambda there, own=names: all(
            place.get(l, t) == t for l, t in zip(own, there, strict=True)
        )
        match = next((e for e in left if e[0] is f and fits(e[1])), None)
        if match is None:
            return None
        place.update(zip(names, match[1], strict=True))
        left.remove(match)
    if len(place) < p.rank or len(set(place.values())) < len(place):
        return None
    return [(p, tuple(place[l] for l in range(p.rank))), *left]


def summed_length(x: Expr) -> int:
    """The number of terms of each sum, if x sums one array over axes; else 0."""
    if not contracts(x) or len(x.args) != 1:
        return 0
    return prod(n for l, n in zip(x["labels"][0], x.args[0].shape, strict=True) if l >= x.rank)


class Factors:
    """A product's factors, sorted to those in the numerator and those in the denominator.

    Attributes:
        coefficient: The numeric factor.
        scalars: The factors without axes in the numerator.
        scalars_below: Those in the denominator.
        arrays: The factors with axes in the numerator, and their labels.
        below: Those in the denominator.
        out: The labels of the result that a factor has.
        summed: The labels that are summed over.
        size: The length of each label's axis.
    """

    def __init__(self, coefficient: Any, factors: Sequence[Expr], labels: Sequence, x: Expr):
        self.coefficient = coefficient
        self._entries: list[Entry] = list(zip(factors, labels, strict=True))
        self.target = x
        self.scalars: list[Expr] = []
        self.scalars_below: list[Expr] = []
        self.arrays: list[Entry] = []
        self.below: list[Entry] = []
        used = {l for names in labels for l in names}
        self.out = [l for l in range(x.rank) if l in used]
        self.summed = used - set(self.out)
        core = x.args[0] if len(x.args) == 1 and contracts(x.args[0]) else x
        self.is_plain_sum = summed_length(core) > 0
        self.size = {
            l: n for f, names in self._entries for l, n in zip(names, f.shape, strict=True)
        }

    def apart(self) -> None:
        """Put negative powers below the line, and what has no axes in front."""
        for f, names in self._entries:
            exponent = f["exponent"] if f.op == "power" else 1
            negative = not isinstance(exponent, complex) and exponent < 0
            shown = power(f.args[0], -f["exponent"]) if negative else f
            if not f.rank:
                (self.scalars_below if negative else self.scalars).append(shown)
            else:
                (self.below if negative else self.arrays).append((shown, names))

    def label_letters(self, axes: Axes) -> dict[int, str]:
        """The letter of each label."""
        result: dict[int, str] = {}
        for f, names in self._entries:
            for k, l in enumerate(names):
                result.setdefault(l, axes.letter(f, k))
        return result

    def reference(self) -> list[int]:
        """The order of labels in which factors are written; a factor in another is transposed."""
        order = list(self.out) if len(self.out) > 1 else []
        for _, names in sorted((*self.arrays, *self.below), key=lambda e: -len(e[1])):
            order += [l for l in names if l not in order]
        return order


Link = tuple[list[Expr], bool]


def chain(f: Factors) -> list[Link] | None:
    """The factors as a matrix chain: groups of factors, and whether each is transposed."""
    entries = _without_batch(f)
    if entries is None or any(len(n) > 2 for _, n in entries):
        return None
    out = [l for l in f.out if any(l in n for _, n in entries)]
    groups = _groups(entries)
    if len(out) > 2 or (not f.summed and (len(out) < 2 or len(groups) < 2)):
        return None
    return _walk(groups, out) if _is_chain(groups, out) else None


def _without_batch(f: Factors) -> list[Entry] | None:
    """The factors without the leading batch axes; None if these differ."""
    out, entries = list(f.out), list(f.arrays)
    if max((len(n) for _, n in entries), default=0) <= 2 and len(out) <= 2:
        return entries
    if len(out) != f.target.rank or len(out) < 3:
        return None
    batch = out[:-2]
    stripped = []
    for a, names in entries:
        lead = tuple(l for l in names if l in batch)
        if names[: len(lead)] != lead or list(lead) != batch[len(batch) - len(lead) :]:
            return None
        if len(names) - len(lead) != 2:
            return None
        stripped.append((a, names[len(lead) :]))
    return stripped


def _groups(entries: Sequence[Entry]) -> list[tuple[list[Expr], tuple[int, ...]]]:
    """Groups of factors with equal labels."""
    groups: dict[tuple[int, ...], list[Expr]] = {}
    for a, names in sorted(entries, key=lambda e: -len(e[1])):
        groups.setdefault(names, []).append(a)
    return [(group, names) for names, group in groups.items()]


def _is_chain(groups: Sequence, out: Sequence[int]) -> bool:
    count: dict[int, int] = {}
    for _, names in groups:
        for l in names:
            count[l] = count.get(l, 0) + 1
    return all(n == (1 if l in out else 2) for l, n in count.items())


def _walk(groups: list, out: list[int]) -> list[Link] | None:
    """The groups in the order of the chain, from the result's first axis."""
    left = list(groups)
    if out:
        links = _follow(left, out[0])
        if len(out) == 2 and left:
            other = _follow(left, out[1])
            links += [(g, not t) for g, t in reversed(other)]
    else:
        start = next((g for g in left if len(g[1]) == 1), None)
        if start is None:
            return None
        left.remove(start)
        links = [(start[0], True), *_follow(left, start[1][0])]
    return links if not left else None


def _follow(left: list, label: int) -> list[Link]:
    links: list[Link] = []
    while True:
        group = next((g for g in left if label in g[1]), None)
        if group is None:
            return links
        left.remove(group)
        names = group[1]
        links.append((group[0], len(names) == 2 and names[0] != label))
        if len(names) == 1:
            return links
        label = names[1] if names[0] == label else names[0]
