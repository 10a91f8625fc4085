"""Finds the first pair of operations at which two recorded runs part.

Values first: among the operations that lead to a differing output and to no value that both runs
have, the earliest on each side are taken, and paired by the common values that they are made from.
If all outputs agree, cotangents are compared at the values that both runs have: the last such
value whose cotangents differ is used by the operations that differentiate differently.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

from gradtools.testing.diverging.recorded_steps import HALF, Run, Step
from gradtools.testing.diverging.value_matching import (
    STRONG,
    accuracy_of,
    aligned,
    match,
    related,
    strength,
)
from gradtools.testing.relations import relation

_STOPS = ("detach", "stop_gradient")
# Operations that may return equal values for operands that differ.
_LOSSY = ("abs", "pow", "integer_pow", "square", "cos", "cosh", "relu", "max")
_PRECISIONS = {1e-9: "float64", 1e-4: "float32", HALF: "16 bits"}
_SIDES = ("torch", "jax")
Steps = list[Step]


@dataclass
class Blame:
    """A pair of operations that part, the last values on which both agree, and the relation."""

    torch: Step
    jax: Step
    last: tuple[Step, Step] | None
    relation: str


class Blaming:
    """The comparison of two runs whose values are matched."""

    def __init__(self, torch: Run, jax: Run, named: list[tuple[Step, Step]]) -> None:
        self.torch, self.jax = torch, jax
        self.pairs = match(torch, jax, named)
        coarsest = [max((s.accuracy for s in run.outputs), default=0.0) for run in (torch, jax)]
        self.accuracy = max(min(coarsest), 1e-9)  # of cotangents

    # --- values

    def of_values(self, outputs: list[int]) -> Blame:
        """The operations at which the values of these outputs part."""
        tails = [self._tail([run.outputs[k] for k in outputs]) for run in (self.torch, self.jax)]
        roots = [self._roots(tail) for tail in tails]
        if not all(roots):  # one side stops short of what the other computes
            ends = self.torch.outputs[outputs[0]], self.jax.outputs[outputs[0]]
            a, b = (r[0][0] if r else end for r, end in zip(roots, ends, strict=True))
        else:
            candidates = []
            for x, ours in roots[0]:
                for y, theirs in roots[1]:
                    common = len(ours & theirs) / len(ours | theirs) if ours | theirs else 0.25
                    candidates.append((common, -x.number - y.number, x, y))
            candidates = [c for c in candidates if c[0] > 0] or candidates
            first = min(x.number for *_, x, _ in candidates)
            _, _, a, b = max((c for c in candidates if c[2].number == first), key=lambda c: c[:2])
        how, last = self._relation(a, b, tails), self._last_common(a, b)
        ends = [(self.torch.outputs[k], self.jax.outputs[k]) for k in outputs]
        if all(aligned(x.value, y.value, max(x.accuracy, y.accuracy)) for x, y in ends):
            return self._coarse(a, b, ends[0], last)
        if moved := self._other_order(a, b):
            words = "the same entries in another order: reshaped where the other side transposes"
            return Blame(*moved, last, words)
        if last and a.op != b.op:  # an operation that only one side has, between a and its operand
            x, y = last
            copied = any(s.group == x.group and not s.inside for s in self.torch.steps[: a.number])
            if x.inside and not copied and x.site == a.site and y.site != b.site and y.lines:
                b, how, last = y, related(a.value, y.value, accuracy_of(a, y)) or how, None
            elif x.site != a.site and y.site == b.site and y.op.startswith("reduce") and x.lines:
                a, how, last = x, related(x.value, b.value, accuracy_of(x, b)) or how, None
        return Blame(a, b, last, how)

    def _coarse(self, a: Step, b: Step, ends: tuple[Step, Step], last: Any) -> Blame:
        """The blame where one side only computes in a coarser precision."""
        k = int(ends[1].accuracy > ends[0].accuracy)
        chosen = [a, b]
        for s in sorted(_ancestors([ends[k]]), key=lambda s: s.number):
            if s.accuracy == ends[k].accuracy and not s.leaf:
                chosen[k] = s
                break
        first, second = (_PRECISIONS.get(end.accuracy, "less") for end in ends)
        words = f"{first} in PyTorch and {second} in JAX from here on"
        return Blame(
            chosen[0], chosen[1], last, f"{words}; the outputs agree to the coarser precision"
        )

    def _tail(self, ends: Steps) -> Steps:
        """The steps that lead to differing outputs and to no value that both runs have."""
        above = {id(s): s for s in _ancestors(ends)}
        known = sorted(above.values(), key=lambda s: s.number)
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
        first = [
            s
            for s in tail
            if not any(id(p) in inside for p in _ancestors(s.parents, stop=is_known))
        ]
        return [(s, self._support(s)) for s in first]

    def _support(self, s: Step) -> set[int]:
        """The classes of common values that a step is directly made from."""
        every = _ancestors(s.parents, stop=lambda p: p.group >= 0, with_stops=True)
        return {p.group for p in every if p.group >= 0}

    def _other_order(self, a: Step, b: Step) -> tuple[Step, Step] | None:
        """Operands with equal entries in layouts that no permutation of axes relates."""
        same_shape = lambda x, y: sorted(x.value.shape) == sorted(y.value.shape)
        for p, q in ((p, q) for p in a.parents for q in b.parents):
            if p.group < 0 or p.group != q.group:
                continue
            source = lambda x: next((y for y in x.parents if y.group == x.group), None)
            while not same_shape(p, q) and (before := source(p)):
                p = before
            if not same_shape(p, q) or (p.number, q.number) in self.pairs:
                continue
            while p.site == a.site and (before := source(p)):
                p = before
            return p, q
        return None

    def _relation(self, a: Step, b: Step, tails: list[Steps]) -> str:
        """How two values are related, or values that the same lines compute."""
        kinds = a.value.dtype.kind + b.value.dtype.kind
        if kinds in ("ff", "cc") and a.value.dtype != b.value.dtype:
            return f"{a.value.dtype} in PyTorch and {b.value.dtype} in JAX"
        ours = [a, *[s for s in tails[0] if s.site == a.site][:6]]
        theirs = [b, *b.parents, *[s for s in tails[1] if s.site == b.site][:6]]
        for x, y in [*((x, y) for x in ours for y in theirs), *((x, b) for x in a.parents)]:
            if x.value.size > 1 and (how := related(x.value, y.value, accuracy_of(x, y))):
                same = (x, y) == (a, b)
                return how if same else f"PyTorch's {_name(x)} is JAX's {_name(y)}: {how}"
        if a.value.size == b.value.size:
            how = related(a.value, b.value, accuracy_of(a, b))
            return how or relation(a.value, b.value, _SIDES, 0) or "no simple relation"
        return f"shapes {a.value.shape} and {b.value.shape}"

    def _last_common(self, a: Step, b: Step) -> tuple[Step, Step] | None:
        """The last pair of equal values that both steps are made from."""
        common = self._support(a) & self._support(b)
        pairs = [
            (self.torch.steps[i], self.jax.steps[k])
            for i, k in self.pairs
            if i < a.number and k < b.number and self.torch.steps[i].group in common
        ]
        return max(pairs, key=lambda p: (p[0].number, p[1].number), default=None)

    # --- cotangents

    def of_gradients(self, noise: float) -> Blame | None:
        """The operations at which the cotangents part. noise: The size of rounding errors."""
        groups: dict[int, tuple[Steps, Steps]] = {}
        for k, run in enumerate((self.torch, self.jax)):
            for s in run.steps:
                if s.group >= 0 and not s.inside and s.value.dtype.kind in "fc":
                    groups.setdefault(s.group, ([], []))[k].append(s)
        differing = {n for n, group in groups.items() if self._differs(group, noise)}
        if not differing:
            return None
        later = {n: self._reached(groups[n][0], differing) - {n} for n in differing}
        last = [n for n in differing if not later[n]] or [*differing]
        n = max(last, key=lambda n: groups[n][0][0].number)
        sides = groups[n]
        uses = [[c for s in side for c in s.children if not c.inside] for side in sides]
        stops = [
            [s for s in (*side, *used) if s.op in _STOPS and s.children]
            for side, used in zip(sides, uses, strict=True)
        ]
        chosen = [
            next((c for c in used if c.group != n), side[0])
            for side, used in zip(sides, uses, strict=True)
        ]
        words = "another derivative"
        for k, name in enumerate(("PyTorch", "JAX")):
            if stops[k] and not stops[1 - k]:  # blame the stop, and the other side's use
                chosen[k], words = stops[k][0], f"stopped in {name}"
                after = {c.group for c in chosen[k].children if c.group >= 0}
                others = [c for c in uses[1 - k] if c.group != n]
                chosen[1 - k] = next((c for c in others if c.group in after), chosen[1 - k])
        x, y = sides[0][0], sides[1][0]
        g, h = (np.zeros(s.value.shape) if s.cotangent is None else s.cotangent for s in (x, y))
        move = self.pairs.get((x.number, y.number), ("", lambda v: v))[1]
        g = move(g) if g.size == h.size else g
        how = relation(g, h, _SIDES, 1) if g.shape == h.shape else None
        words += f"; cotangents: {how or 'no simple relation'}"
        return Blame(chosen[0], chosen[1], (x, y), words)

    def _differs(self, group: tuple[Steps, Steps], noise: float) -> bool:
        """Whether the cotangents at a common value differ."""
        ours, theirs = group
        every = [(x, y) for x in ours for y in theirs if (x.number, y.number) in self.pairs]
        if not every or all(s.cotangent is None for s in (*ours, *theirs)):
            return False
        agree = lambda x, y: same_gradient(
            x.cotangent, y.cotangent, self.pairs[x.number, y.number][1], self.accuracy, noise
        )
        if agree(*every[0]):
            return False
        stops = [any(s.op in _STOPS and s.children for s in side) for side in group]
        if stops[0] != stops[1]:
            return True
        both = [(x, y) for x, y in every if x.cotangent is not None and y.cotangent is not None]
        return not any(agree(x, y) for x, y in both if np.any(x.cotangent))

    def _reached(self, steps: Steps, groups: set[int]) -> set[int]:
        pending, seen, reached = [c for s in steps for c in s.children], set[int](), set[int]()
        while pending:
            s = pending.pop()
            if id(s) not in seen:
                seen.add(id(s))
                reached |= {s.group} & groups
                pending += s.children
        return reached


def same_gradient(g: Any, h: Any, move: Any, accuracy: float, noise: float) -> bool:
    """Whether PyTorch's g, moved to JAX's layout, equals h; None is zero."""
    if g is None and h is None:
        return True
    g = np.zeros(1) if g is None else move(np.asarray(g))
    h = np.zeros(1) if h is None else np.asarray(h)
    finite = np.isfinite(g) & np.isfinite(h)
    if (np.isfinite(g) != np.isfinite(h)).any():
        return False
    with np.errstate(all="ignore"):
        sizes = [np.abs(np.where(finite, x, 0)).max(initial=0.0) for x in (g, h)]
        error = np.abs(np.where(finite, g - h, 0)).max(initial=0.0)
    return bool(error <= max(1e-6, 10 * accuracy) * max(sizes) + noise)


def _ancestors(steps: Iterable[Step], stop: Any = None, with_stops: bool = False) -> Steps:
    """The steps and all that they depend on, not beyond steps for which `stop` is true."""
    pending, seen, result = list(steps), set[int](), []
    while pending:
        s = pending.pop()
        if id(s) in seen:
            continue
        seen.add(id(s))
        stopped = stop is not None and stop(s)
        if not stopped or with_stops:
            result.append(s)
        if not stopped:
            pending += s.parents
    return result


def _name(s: Step) -> str:
    return s.leaf or s.op
