"""Finds the first pair of operations at which two recorded runs part, and what relates them.

Values first: among the operations that lead to a differing output and to no value that both runs
have, the earliest on each side are taken, and paired by the common values that they are made from.
If all outputs agree, cotangents are compared at the values that both runs have: the last such
value whose cotangents differ is used by the operations that differentiate differently.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import numpy as np

from gradtools.testing.diverging.runs import HALF, Run, Step
from gradtools.testing.diverging.value_matching import STRONG, accuracy_of, aligned, match, strength
from gradtools.testing.relations import (
    SIDES,
    Expressions,
    expression_cause,
    expressions_of,
    factor_name,
    related,
    relation,
)
from gradtools.testing.report import entry_errors

_STOPS = ("detach", "stop_gradient")
_PRODUCTS = ("mm", "bmm", "addmm", "baddbmm", "dot", "mv", "dot_general")
_PARTS = ("split", "slice", "select", "unbind", "row", "split_with_sizes", "narrow", "index")
# Operations that may return equal values for operands that differ.
_LOSSY = ("abs", "pow", "integer_pow", "square", "cos", "cosh", "relu", "max")
_PRECISIONS = {1e-9: "float64", 1e-4: "float32", HALF: "16 bits"}
_NEAR = 12  # operations behind a differing one that may belong to the same formula
Steps = list[Step]


@dataclass
class Blame:
    """A pair of operations that part, the last values on which both agree, and the relation."""

    torch: Step
    jax: Step
    last: tuple[Step, Step] | None
    relation: str


class Blaming:
    """The comparison of two runs whose values are matched.

    Attributes:
        pairs: The layout of each pair of equal values, by their numbers.
        accuracy: The relative error that rounding may cause in cotangents.
    """

    def __init__(self, torch: Run, jax: Run, named: Sequence[tuple[Step, Step]]) -> None:
        self.torch, self.jax, self.runs = torch, jax, (torch, jax)
        self.pairs = match(torch, jax, named)
        coarsest = [max((s.accuracy for s in r.outputs.values()), default=0.0) for r in self.runs]
        self.accuracy = max(min(coarsest), 1e-9)

    # --- values

    def of_values(self, ends: Sequence[tuple[Step, Step]]) -> Blame:
        """The operations at which the values of these outputs part."""
        tails = [self._tail(list(side)) for side in zip(*ends, strict=True)]
        roots = [self._roots(tail) for tail in tails]
        if not all(roots):  # one side stops short of what the other computes
            a, b = (r[0][0] if r else end for r, end in zip(roots, ends[0], strict=True))
        else:
            candidates = []
            for (x, ours), (y, theirs) in product(*roots):
                common = len(ours & theirs) / len(ours | theirs) if ours | theirs else 0.25
                candidates.append((common, -x.number - y.number, x, y))
            candidates = [c for c in candidates if c[0] > 0] or candidates
            first = min(x.number for *_, x, _ in candidates)
            _, _, a, b = max((c for c in candidates if c[2].number == first), key=lambda c: c[:2])
        last = self._last_common(a, b)
        if all(aligned(x.value, y.value, max(x.accuracy, y.accuracy)) for x, y in ends):
            return self._coarse(a, b, ends[0], last)
        if moved := self._other_order(a, b):
            words = "the same entries in another order: reshaped where the other side transposes"
            return Blame(*moved, last, words)
        lines = [
            [r for r, _ in found if r.site == s.site]
            for found, s in zip(roots, (a, b), strict=True)
        ]
        exchanged = all(lines) and len(lines[0]) == len(lines[1])
        if exchanged and lines[0].index(a) != lines[1].index(b) and not self._other_parts(a, b):
            return Blame(a, b, last, "no simple relation")  # operands of one line are exchanged
        how = self._relation(a, b, tails)
        if last and a.op != b.op:  # an operation that only one side has, between a and its operand
            x, y = last
            copied = any(s.group == x.group and not s.inside for s in self.torch.steps[: a.number])
            inside = x.inside and not copied and x.site == a.site and y.site != b.site
            if inside and y.place.lines:
                return Blame(a, y, None, self._simple(a, y) or how)
            reduced = y.site == b.site and y.op.startswith("reduce")
            if x.site != a.site and reduced and x.place.lines:
                return Blame(x, b, None, self._simple(x, b) or how)
        return Blame(a, b, last, how)

    def _coarse(self, a: Step, b: Step, ends: tuple[Step, Step], last: Any) -> Blame:
        """The blame where one side only computes in a coarser precision."""
        k = int(ends[1].accuracy > ends[0].accuracy)
        chosen = [a, b]
        before = sorted(ancestors([ends[k]]), key=lambda s: s.number)
        coarse = (s for s in before if s.accuracy == ends[k].accuracy and not s.leaf)
        chosen[k] = next(coarse, chosen[k])
        first, second = (_PRECISIONS.get(end.accuracy, "less") for end in ends)
        words = f"{first} in torch and {second} in jax from here on"
        words += "; the outputs agree to the coarser precision"
        return Blame(chosen[0], chosen[1], last, words)

    def _tail(self, ends: Steps) -> Steps:
        """The steps that lead to differing outputs and to no value that both runs have."""
        known = sorted(ancestors(ends), key=lambda s: s.number)
        moving: set[int] = set()
        for s in known:
            if s.leaf or any(id(p) in moving for p in s.parents):
                moving.add(id(s))
        right: set[int] = set()
        for s in reversed(known):
            sure = strength(s.value) == STRONG or s.leaf or id(s) not in moving
            uses = [c for c in s.children if id(c) in right and c.op not in _LOSSY]
            if (s.group >= 0 and sure) or uses:
                right.add(id(s))
        chosen = [s for s in known if id(s) not in right and not s.leaf and s.group < 0]
        chosen = [s for s in chosen if strength(s.value) or s in ends]
        return [s for s in chosen if id(s) in moving] or chosen

    def _roots(self, tail: Steps) -> list[tuple[Step, set[int]]]:
        """The steps that depend on no other of the tail, with the common values they stand on."""
        inside = {id(s) for s in tail}
        is_known = lambda p: p.group >= 0 and strength(p.value) == STRONG
        above = lambda s: ancestors(s.parents, stop=is_known)
        first = [s for s in tail if not any(id(p) in inside for p in above(s))]
        return [(s, {p.group for p in common_operands(s)}) for s in first]

    def _other_order(self, a: Step, b: Step) -> tuple[Step, Step] | None:
        """Operands with equal entries in layouts that no permutation of axes relates."""
        same_shape = lambda x, y: sorted(x.value.shape) == sorted(y.value.shape)
        source = lambda x: next((y for y in x.parents if y.group == x.group), None)
        for p, q in product(a.parents, b.parents):
            if p.group < 0 or p.group != q.group:
                continue
            while not same_shape(p, q) and (before := source(p)):
                p = before
            if not same_shape(p, q) or (p.number, q.number) in self.pairs:
                continue
            while p.site == a.site and (before := source(p)):
                p = before
            return p, q
        return None

    def _last_common(self, a: Step, b: Step) -> tuple[Step, Step] | None:
        """The last pair of equal values that both steps are made from."""
        common = {p.group for p in common_operands(a)} & {p.group for p in common_operands(b)}
        pairs = [
            (self.torch.steps[i], self.jax.steps[k])
            for i, k in self.pairs
            if i < a.number and k < b.number and self.torch.steps[i].group in common
        ]
        return max(pairs, key=lambda p: (p[0].number, p[1].number), default=None)

    # --- the relation of two values

    def _relation(self, a: Step, b: Step, tails: list[Steps]) -> str:
        """How two values are related, or values that the same lines compute."""
        kinds = a.value.dtype.kind + b.value.dtype.kind
        if kinds in ("ff", "cc") and a.value.dtype != b.value.dtype:
            return f"{a.value.dtype} in torch and {b.value.dtype} in jax"
        if self._other_parts(a, b):
            return "parts of a value in another order: gates, heads, or channels"
        sides = [_formula(s, tail) for s, tail in ((a, tails[0]), (b, tails[1]))]
        letters = _letters(*sides)
        texts = [[self._expressions(s, letters, k) for s in side] for k, side in enumerate(sides)]
        ends = [_whole(*each, letters) for each in zip(sides, texts, tails, strict=True)]
        found = expression_cause(texts[0], texts[1], ends)
        if "complement" in found or "epsilon" in found:
            return found
        if how := self._simple(a, b) or found or self._left_out(sides, letters, texts):
            return how
        ours = [a, *[s for s in tails[0] if s.site == a.site][:6]]
        theirs = [b, *b.parents, *[s for s in tails[1] if s.site == b.site][:6]]
        for x, y in [*product(ours, theirs), *((x, b) for x in a.parents)]:
            how = self._simple(x, y) if x.value.size > 1 else None
            if how and not how.startswith("zero"):
                return f"{x.op} in torch is {y.op} in jax: {how}"
        return "no simple relation"

    def _simple(self, x: Step, y: Step) -> str | None:
        """A relation of two values alone: a layout, a conjugate, a sign, a factor, a mask."""
        a, b = x.value, y.value
        kinds = {a.dtype.kind, b.dtype.kind}
        if a.size != b.size or not (kinds <= {"f", "c"} or kinds == {"b"}):
            return None
        if a.size > 1 and kinds != {"b"} and STRONG not in (strength(a), strength(b)):
            return None
        near, sizes = 10 * accuracy_of(x, y), _sizes(x) | _sizes(y)
        found = related(a, b, near=near, sizes=sizes, single=a.size > 1)
        return found and found.name

    def _expressions(self, s: Step, letters: dict[int, str], k: int) -> Expressions:
        """The expressions of a value in common values."""
        own = {id(p) for p in ancestors([s])}
        steps = [p for p in self.runs[k].steps if p.group in letters and id(p) in own]
        steps += [p for p in (*s.parents, s) if p.group in letters]  # in the nearest layout
        return expressions_of(s.value, {letters[p.group]: p.value for p in steps})

    def _left_out(self, sides: list[Steps], letters: dict[int, str], texts: Any) -> str | None:
        """A line that is a function of a common value, which the other side's line takes itself."""
        lines = [[s for s in side if s.site == side[0].site] for side in sides]
        for k, line in enumerate(lines):
            taken = {letters.get(p.group, "") for s in lines[1 - k] for p in s.parents}
            for e in texts[k][len(line) - 1]:
                if len(e.letters) != 1 or e.form in e.letters or not e.letters < taken - {""}:
                    continue  # a line of this value alone is another function of it
                first, second = [str(e), *e.letters][:: -1 if k else 1]
                is_factor = e.c and e.form.startswith("c ")
                known = factor_name(e.c, _sizes(line[-1])) if is_factor else ""
                return f"{first} in torch, {second} in jax" + (f": {known}" if known else "")
        return None

    def _other_parts(self, a: Step, b: Step) -> bool:
        """Whether two parts of one common value (gates, heads) are used in each other's place."""
        theirs = {q.group: q.value for q in common_operands(b)}
        for p in common_operands(a):
            parts = [c for s in p.parents for c in s.children if c.op == p.op and c is not p]
            if p.op in _PARTS and p.group in theirs:
                formulas = {*expressions_of(b.value, {"x": theirs[p.group]})}
                uses = [(q.value, c.value) for q in parts for c in q.children]
                if any(formulas & {*expressions_of(y, {"x": x})} for x, y in uses):
                    return True
        return False

    # --- cotangents

    def of_gradients(self, noise: float) -> Blame | None:
        """The operations at which the cotangents part. noise: The size of rounding errors."""
        groups: dict[int, tuple[Steps, Steps]] = {}
        for k, run in enumerate(self.runs):
            for s in run.steps:
                if s.group >= 0 and not s.inside and s.value.dtype.kind in "fc":
                    groups.setdefault(s.group, ([], []))[k].append(s)
        differing = {n for n, group in groups.items() if self._differs(group, noise)}
        if not differing:
            return None
        reached = lambda n: {s.group for s in descendants(groups[n][0])} & differing - {n}
        last = [n for n in differing if not reached(n)] or [*differing]
        n = max(last, key=lambda n: groups[n][0][0].number)
        sides = groups[n]
        uses = [[c for s in side for c in s.children if not c.inside] for side in sides]
        stops = [
            [s for s in (*side, *used) if s.op in _STOPS and s.children]
            for side, used in zip(sides, uses, strict=True)
        ]
        used_on = [[c for c in used if c.group != n] for used in uses]
        chosen = [next(iter(u), side[0]) for u, side in zip(used_on, sides, strict=True)]
        x, y = sides[0][0], sides[1][0]
        g, h = (np.zeros(s.value.shape) if s.cotangent is None else s.cotangent for s in (x, y))
        move = self.pairs.get((x.number, y.number), ("", lambda v: v))[1]
        g = move(g) if g.size == h.size else g
        words = (relation(g, h) if g.shape == h.shape else None) or "no simple relation"
        words = f"another derivative; cotangents: {words}"
        for k, name in enumerate(SIDES):
            if stops[k] and not stops[1 - k]:  # blame the stop, and the other side's use
                chosen[k], words = stops[k][0], f"stopped gradient in {name}"
                after = {c.group for c in chosen[k].children if c.group >= 0}
                others = (c for c in used_on[1 - k] if c.group in after)
                chosen[1 - k] = next(others, chosen[1 - k])
        return Blame(chosen[0], chosen[1], (x, y), words)

    def _differs(self, group: tuple[Steps, Steps], noise: float) -> bool:
        """Whether the cotangents at a common value differ."""
        every = [(x, y) for x, y in product(*group) if (x.number, y.number) in self.pairs]
        if not every or all(s.cotangent is None for side in group for s in side):
            return False

        def agree(x: Step, y: Step) -> bool:
            move, g, h = self.pairs[x.number, y.number][1], x.cotangent, y.cotangent
            if g is None and h is None:
                return True
            g = np.zeros(np.shape(h)) if g is None else move(np.asarray(g))
            h = np.zeros(g.shape) if h is None else np.asarray(h)
            return bool((entry_errors(g, h, max(1e-6, 10 * self.accuracy), noise) <= 1).all())

        if agree(*every[0]):
            return False
        stops = [any(s.op in _STOPS and s.children for s in side) for side in group]
        if stops[0] != stops[1]:
            return True
        both = [(x, y) for x, y in every if x.cotangent is not None and y.cotangent is not None]
        return not any(agree(x, y) for x, y in both if np.any(x.cotangent))


def _letters(ours: Steps, theirs: Steps) -> dict[int, str]:
    """A letter for each class of common values that the sides' formulas are made from."""
    nearest = [s for side in (ours, theirs) for s in (side[0], *common_operands(side[0]))]
    others = [p for side in (ours, theirs) for s in side[1:] for p in common_operands(s)]
    groups = dict.fromkeys(s.group for s in (*nearest, *others) if s.group >= 0)
    return dict(zip(groups, "xyzuvw", strict=False))


def _whole(
    side: Steps, texts: list[Expressions], tail: Steps, letters: dict[int, str]
) -> Expressions:
    """The last expressions in a line of values that the line uses for nothing else."""
    line = [s for s in tail if s.site == side[0].site]
    for s, found in reversed([*zip(side, texts, strict=True)]):
        own = {id(p) for p in ancestors([s])}
        others = {letters.get(p.group) for t in line if id(t) not in own for p in t.parents}
        whole = [e for e in found if not others & e.letters]
        if whole and s.site == side[0].site:
            return whole
    return []


def _sizes(s: Step) -> dict[str, float]:
    """The lengths that may explain a factor of a step: what it reduces, and products before it."""
    sizes: dict[str, float] = {}
    for p in s.parents:
        if s.value.size and p.value.size % s.value.size == 0:
            sizes["the number of reduced entries"] = p.value.size // s.value.size
    near = ancestors([s])[:_NEAR]
    for p in (p for t in near if t.op in _PRODUCTS for p in t.parents):
        for k, n in enumerate(p.value.shape):
            sizes[f"the root of axis {k} of a matrix product"] = math.sqrt(n)
    return sizes


def _formula(s: Step, tail: Steps) -> Steps:
    """A step, and the next operations of the tail that depend on it: its line's ones first."""
    after = {id(c) for c in (s, *descendants([s]))}
    chosen = [s, *(t for t in tail if id(t) in after and t is not s)]
    own = [t for t in chosen if t.site == s.site][:_NEAR]
    return [*own, *[t for t in chosen if t.site != s.site][:_NEAR]]


def common_operands(s: Step) -> Steps:
    """The common values that a step is directly made from."""
    every = ancestors(s.parents, stop=lambda p: p.group >= 0, with_stops=True)
    return [p for p in every if p.group >= 0]


def descendants(steps: Iterable[Step]) -> Steps:
    """The steps that depend on these."""
    return _walked([c for s in steps for c in s.children], lambda s: s.children)


def ancestors(steps: Iterable[Step], stop: Any = None, with_stops: bool = False) -> Steps:
    """The steps and all that they depend on, not beyond steps for which `stop` is true."""
    stopped = stop or (lambda s: False)
    found = _walked([*steps], lambda s: [] if stopped(s) else s.parents)
    return [s for s in found if with_stops or not stopped(s)]


def _walked(pending: Steps, following: Callable[[Step], Steps]) -> Steps:
    """The steps that a walk from `pending` reaches."""
    seen: dict[int, Step] = {}
    while pending:
        s = pending.pop()
        if id(s) not in seen:
            seen[id(s)] = s
            pending += following(s)
    return [*seen.values()]
