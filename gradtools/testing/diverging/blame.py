"""Finds the first pair of operations at which two recorded runs diverge, and their relation.

Values first: a walk from the differing outputs back to the values that both runs have visits the
operations that may be wrong. The first of them on each side are paired by the common values that
they are made from. If all outputs agree, cotangents are compared at the values that both runs have:
the last such value whose cotangents differ is used by the operations that differentiate
differently.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product, starmap

import numpy as np

from gradtools.testing.diverging.runs import HALF, Run, Step, ancestors
from gradtools.testing.diverging.value_matching import (
    STRONG,
    accuracy_of,
    aligned,
    layout_of,
    match,
    strength,
)
from gradtools.testing.relations import (
    SIDES,
    Expressions,
    expression_cause,
    expressions_of,
    related,
    relation,
    with_constant,
)
from gradtools.testing.report import entry_errors

_STOPS = ("detach", "stop_gradient")
_PRODUCTS = ("mm", "bmm", "addmm", "baddbmm", "dot", "mv", "dot_general")
_PRECISIONS = {1e-9: "float64", 1e-4: "float32", HALF: "16 bits"}
_LONGEST = 12  # operations of one line that are compared
UNRELATED = "no simple relation"
Steps = list[Step]


@dataclass
class Blame:
    """A pair of operations that diverge, the last values on which both agree, and the relation."""

    torch: Step
    jax: Step
    last: tuple[Step, Step] | None
    relation: str


class Blaming:
    """Compares two runs: matches their values, and finds the operations at which they diverge.

    Attributes:
        classes: The values that both runs have, by their entries.
        accuracy: The relative error that rounding may cause in cotangents.
    """

    def __init__(self, torch: Run, jax: Run, named: Sequence[tuple[Step, Step]]) -> None:
        self.torch, self.jax = torch, jax
        self.classes = match(torch, jax, named)
        coarsest = (max((s.accuracy for s in r.outputs.values()), default=0) for r in (torch, jax))
        self.accuracy = max(min(coarsest), 1e-9)

    # --- values

    def of_values(self, ends: Sequence[tuple[Step, Step]]) -> Blame:
        """The operations at which the values of these outputs diverge."""
        regions = [_differing(side) for side in zip(*ends, strict=True)]
        firsts = [_first(region) or [end] for region, end in zip(regions, ends[0], strict=True)]
        a, b = max(product(*firsts), key=_likeness)
        operands = product(common_operands(a), common_operands(b))
        pairs = [(x, y) for x, y in operands if x.entries == y.entries]
        last = max(pairs, key=lambda p: (p[0].number, p[1].number), default=None)
        known = [[p for s in region for p in common_operands(s)] for region in regions]
        coarsest = lambda steps: max((s.accuracy for s in steps), default=0.0)
        is_coarser = any(coarsest(x) > coarsest(y) for x, y in zip(regions, known, strict=True))
        agree = (aligned(x.value, y.value, max(x.accuracy, y.accuracy)) for x, y in ends)
        if is_coarser and all(agree):
            first, second = (_PRECISIONS.get(end.accuracy, "less") for end in ends[0])
            words = f"{first} in torch and {second} in jax from here on"
            return Blame(a, b, last, f"{words}; the outputs agree to the coarser precision")
        ours, theirs = (
            [s, *(t for t in region if t.site == s.site and t is not s)][:_LONGEST]
            for s, region in zip((a, b), regions, strict=True)
        )
        return Blame(a, b, last, self._relation(ours, theirs))

    def _relation(self, ours: Steps, theirs: Steps) -> str:
        """How the values that two lines compute are related, in a few words."""
        a, b = ours[0], theirs[0]
        if a.entries == b.entries >= 0:
            return "the same entries in another order: reshaped where the other side transposes"
        (first, second), direct = self._expressions(ours, theirs)
        found = expression_cause(first, second, direct, _sizes(ours[-1]) | _sizes(theirs[-1]))
        if any(words in found for words in ("complement", "epsilon", "another order")):
            return found
        if how := _simple(a, b) or found or _simple(ours[-1], theirs[-1]):
            return how
        fused = [s for s in self.torch.steps if s.place is a.place]
        for x in theirs:  # a fused operation of PyTorch is a function of a value in JAX's line
            first, second = (
                [with_constant(s.value, x.value) for s in steps] for steps in (fused, theirs)
            )
            if found := expression_cause(first, second):
                return found
        return UNRELATED

    def _expressions(self, *lines: Steps) -> tuple[list[list[Expressions]], list[set[str | None]]]:
        """The expressions of both lines in common values, and the letters of their operands."""
        ordered = *(line[0] for line in lines), *(s for line in lines for s in line[1:])
        entries = dict.fromkeys(p.entries for s in ordered for p in _operands(s))
        letters = dict(zip(entries, "xyzuvw", strict=False))
        texts = []
        for k, line in enumerate(lines):
            values = {letter: self.classes[n][k][-1].value for n, letter in letters.items()}
            for p in (p for s in reversed(line) for p in _operands(s) if p.entries in letters):
                values[letters[p.entries]] = p.value  # in the layout that the line uses
            texts.append([expressions_of(s.value, values) for s in line])
        return texts, [{letters.get(p.entries) for s in line for p in s.parents} for line in lines]

    # --- cotangents

    def of_gradients(self, noise: float) -> Blame | None:
        """The operations at which the cotangents diverge. noise: The size of rounding errors."""
        tracked = [tuple([s for s in side if s.tracked] for side in c) for c in self.classes]
        differing = [c for c in tracked if all(c) and self._differs(c, noise)]
        if not differing:
            return None
        sides = max(differing, key=lambda c: c[0][0].number)
        x, y = (side[0] for side in sides)
        used = [[c for s in side for c in s.children] for side in sides]
        stops = [[c for c in of if c.place.operation in _STOPS and c.children] for of in used]
        uses = [[c for c in of if c.tracked and c.entries != x.entries] for of in used]
        chosen = [(u or side)[0] for u, side in zip(uses, sides, strict=True)]
        found = relation(*(_cotangents(x, y) or (x.gradient, y.gradient)))
        words = f"another derivative; cotangents: {found or UNRELATED}"
        for k, name in enumerate(SIDES):
            # Reports the stop, and the use of the value on the other side.
            if stops[k] and not stops[1 - k]:
                chosen[k], words = stops[k][0], f"stopped gradient in {name}"
                after = {c.entries for c in chosen[k].children if c.entries >= 0}
                others = (c for c in uses[1 - k] if c.entries in after)
                chosen[1 - k] = next(others, chosen[1 - k])
        return Blame(chosen[0], chosen[1], (x, y), words)

    def _differs(self, sides: tuple[Steps, ...], noise: float) -> bool:
        """Whether no two cotangents at a common value agree."""
        limit = max(1e-6, 10 * self.accuracy)
        found = [*filter(None, starmap(_cotangents, product(*sides)))]
        agree = (
            (entry_errors(g, h, limit, noise) <= 1).all() and (n == 0 or (g.any() and h.any()))
            for n, (g, h) in enumerate(found)
        )
        return bool(found) and not any(agree)


def _cotangents(x: Step, y: Step) -> tuple[np.ndarray, np.ndarray] | None:
    """The cotangents of two equal values, in JAX's layout."""
    layout = layout_of(x, y)
    return None if layout is None else (layout[1](x.gradient), y.gradient)


def _likeness(pair: tuple[Step, Step]) -> tuple[bool, int, float, int]:
    """A sort key: common operands first, then early steps of PyTorch, then the shared part."""
    ours, theirs = ({p.entries for p in common_operands(s)} for s in pair)
    share = len(ours & theirs) / len(ours | theirs) if ours | theirs else 0.25
    return share > 0, -pair[0].number, share, -pair[1].number


def _differing(ends: Sequence[Step]) -> Steps:
    """The steps between the values that both runs have and differing outputs, in order."""
    behind = ancestors(ends, stop=lambda s: _is_known(s) and s not in ends)
    chosen = [s for s in behind if not (s.leaf or s.is_common)]
    chosen = [s for s in chosen if strength(s.value) or s in ends]
    chosen = [s for s in chosen if s.moving] or chosen
    return sorted(chosen, key=lambda s: s.number)


def _first(steps: Steps) -> Steps:
    """The steps that depend on no other of these steps."""
    inside = {id(s) for s in steps}
    above = lambda s: ancestors(s.parents, stop=_is_known)
    return [s for s in steps if not any(id(p) in inside for p in above(s))]


def _is_known(s: Step) -> bool:
    return s.is_common and (bool(s.leaf) or strength(s.value) == STRONG)


def _simple(x: Step, y: Step) -> str | None:
    """A relation of two values alone: a layout, a conjugate, a sign, a factor, a mask."""
    a, b = x.value, y.value
    kinds = {a.dtype.kind, b.dtype.kind}
    if a.size != b.size or not (kinds <= {"f", "c"} or kinds == {"b"}):
        return None
    if a.size > 1 and kinds != {"b"} and STRONG not in (strength(a), strength(b)):
        return None
    sizes = _sizes(x) | _sizes(y)
    found = related(a, b, near=10 * accuracy_of(x, y), sizes=sizes, single=a.size > 1)
    return None if found is None or found.name.startswith("zero") else found.name


def _sizes(s: Step) -> dict[str, float]:
    """The lengths that may explain a factor of a step: of reduced axes and of earlier products."""
    sizes: dict[str, float] = {}
    for p in s.parents:
        if s.value.size and p.value.size % s.value.size == 0:
            sizes["the number of reduced entries"] = p.value.size // s.value.size
    near = ancestors([s])[:_LONGEST]
    for p in (p for t in near if t.place.operation in _PRODUCTS for p in t.parents):
        for k, n in enumerate(p.value.shape):
            sizes[f"the root of axis {k} of a matrix product"] = math.sqrt(n)
    return sizes


def _operands(s: Step) -> Steps:
    return [s] * (s.entries >= 0) + common_operands(s)


def common_operands(s: Step) -> Steps:
    """The common values that a step is directly made from."""
    every = ancestors(s.parents, stop=lambda p: p.entries >= 0)
    return [p for p in every if p.entries >= 0]
