"""Records two runs, and finds the first pair of operations at which the runs diverge.

Values are compared first: the programs diverge at an operation between the common values of the
runs and the differing outputs. The first such operations of the two runs are paired by their common
operands. If all outputs agree, the cotangents of common values are compared: the last common
value with unequal cotangents is used by the operations whose derivatives differ.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from itertools import product, starmap

import numpy as np

from gradtools.errors import GradtoolsError
from gradtools.testing.cross_checking.quantities import CrossCheck
from gradtools.testing.cross_checking.sides import Side, tokens
from gradtools.testing.diverging.runs import (
    HALF,
    STRONG,
    Run,
    Step,
    accuracy_of,
    aligned,
    ancestors,
    layout_of,
    match,
    strength,
)
from gradtools.testing.matching_parameters.parameter_names import joined
from gradtools.testing.relations import (
    SIDES,
    expression_cause,
    expressions_of,
    related,
    relation,
    with_constant,
)
from gradtools.testing.report import compare_arrays, entry_errors, largest

_STOPS = ("detach", "stop_gradient")
_PRECISIONS = {1e-9: "float64", 1e-4: "float32", HALF: "16 bits"}
_LONGEST = 12  # maximum number of operations of one line that are compared
UNRELATED = "no simple relation"
Steps = list[Step]


@dataclass
class Blame:
    """Two diverging operations, the last common value, and the relation between the results."""

    torch: Step
    jax: Step
    last: tuple[Step, Step] | None
    relation: str


class RecordedRuns:
    """The recorded runs of a cross-check's two programs, at the point of the check.

    Attributes:
        torch: The run in PyTorch.
        jax: The run in JAX.
        outputs: The pairs of corresponding outputs of both runs.
        classes: Maps the index of each group (see `Step.entries`) to the group's steps in PyTorch
            and in JAX.
        comparisons: The comparisons of the outputs, and of the gradients if the outputs agree.
        notes: Notes for a report.
    """

    def __init__(self, check: CrossCheck) -> None:
        self.check, self.notes = check, list[str]()
        self.torch, self.jax = first, second = [*map(self._recorded, check.sides)]
        if len(first.outputs) != len(second.outputs):
            raise GradtoolsError(
                f"{check.caller}: the program returns {len(first.outputs)} arrays in PyTorch and "
                f"{len(second.outputs)} in JAX. Return the same arrays."
            )
        named = [(first.leaves[x], second.leaves[x]) for x in check.inputs.moving]
        for path, pair in zip(check.pairing.paths, check.pairing.pairs, strict=True):
            name = path.removeprefix("parameter ")
            named.append((first.leaves[pair.torch_name], second.leaves[name]))
        theirs = [*second.outputs]
        ours = theirs if {*theirs} == {*first.outputs} else [*first.outputs]
        self.outputs = [
            (first.outputs[p], second.outputs[q]) for p, q in zip(ours, theirs, strict=True)
        ]
        self.classes = match(first, second, named)
        self.comparisons, cotangents, moved = [], [], []
        for k, (x, y) in enumerate(self.outputs):
            layout = aligned(x.value, y.value, max(x.accuracy, y.accuracy))
            name, move = layout or ("", lambda a: a)
            if name:
                shapes = f"{x.value.shape} in PyTorch and {y.value.shape} in JAX"
                self.notes.append(f"output {k} is in a {name}: {shapes}")
            limit = accuracy_of(x, y)
            found = compare_arrays("value", f"output {k}", move(x.value), y.value, tolerance=limit)
            self.comparisons.append(found)
            rng = np.random.default_rng([check.seed, k])
            c = rng.normal(size=x.value.shape) if x.value.shape else np.ones(())
            cotangents.append(c + 1j * rng.normal(size=c.shape) if x.value.dtype == complex else c)
            moved.append(move(cotangents[-1]))
        self.limit, self.noise = max([1e-6, *(10 * accuracy_of(*p) for p in self.outputs)]), 0.0
        if all(c.agrees for c in self.comparisons):
            first.pull(dict(zip(ours, cotangents, strict=True)))
            second.pull(dict(zip(theirs, moved, strict=True)))
            self._compare_gradients()

    def _recorded(self, side: Side) -> Run:
        """Records the run of one side, in which all parameters are differentiated."""
        inputs = self.check.inputs
        leaves = {joined(tokens(path)): x for path, x in side.numbers.items()} | inputs.moving
        record = getattr(import_module(f"{__package__}.{side.name}_run"), f"run_in_{side.name}")
        with self.check.naming(side):
            run: Run = record(side, side.bound(inputs, side.numbers), leaves)
        return run

    def _compare_gradients(self) -> None:
        """Compares the gradients with respect to the arguments and parameters."""
        ours = self.torch.leaves.values()
        size = max((largest(s.gradient) for s in ours), default=0.0)
        self.noise = 1e-3 * max((s.accuracy for s in ours), default=0.0) * size
        gradients = []
        for side, run in zip(self.check.sides, (self.torch, self.jax), strict=True):
            names = *(joined(tokens(p)) for p in side.free_params), *self.check.inputs.moving
            gradients.append([run.leaves[n].gradient for n in names])
        mine = self.check.in_jax_layout(gradients[0], gradients=True)
        allowed = {"tolerance": self.limit, "noise": self.noise}
        for path, g, h in zip(self.check.paths, mine, gradients[1], strict=True):
            self.comparisons.append(compare_arrays("gradient", path, g, h, 1, **allowed))

    def blame(self) -> tuple[str, Blame | None]:
        """Returns the kind of divergence, and the operations at which the programs diverge."""
        wrong = [k for k, c in enumerate(self.comparisons) if not c.agrees]
        if not wrong:
            return "agrees", None
        if wrong[0] >= len(self.outputs):
            return "gradient", self._of_gradients()
        differs = [self.outputs[k] for k in wrong if self.comparisons[k].cause is None]
        return ("value", self._of_values(differs)) if differs else ("not finite", None)

    # --- values

    def _of_values(self, ends: Sequence[tuple[Step, Step]]) -> Blame:
        """Returns the operations at which the values of the given outputs diverge."""
        regions = [_differing(side) for side in zip(*ends, strict=True)]
        ours, theirs = (_first(r) or [end] for r, end in zip(regions, ends[0], strict=True))
        a, b = max(product(ours, theirs), key=_likeness)
        operands = product(common_operands(a), common_operands(b))
        pairs = [(x, y) for x, y in operands if x.entries == y.entries]
        last = max(pairs, key=lambda p: (p[0].number, p[1].number), default=None)
        if all(aligned(x.value, y.value, max(x.accuracy, y.accuracy)) for x, y in ends):
            first, second = (_PRECISIONS.get(end.accuracy, "less") for end in ends[0])
            words = f"{first} in torch and {second} in jax from here on"
            return Blame(a, b, last, f"{words}; the outputs agree to the coarser precision")
        site = lambda s: s.place.line or s.place.layer
        ours, theirs = (
            [s, *(t for t in region if site(t) == site(s) and t is not s)][:_LONGEST]
            for s, region in zip((a, b), regions, strict=True)
        )
        return Blame(a, b, last, self._relation(ours, theirs))

    def _relation(self, ours: Steps, theirs: Steps) -> str:
        """Describes in a few words how the values of two source lines are related."""
        a, b = ours[0], theirs[0]
        if a.entries == b.entries >= 0:
            return "the same entries in another order: reshaped where the other side transposes"
        steps = a, b, *ours[1:], *theirs[1:]
        entries = dict.fromkeys(p.entries for s in steps for p in _operands(s))
        letters = dict(zip(entries, "xyzuvw", strict=False))
        expressions, direct = [], []
        for k, line in enumerate((ours, theirs)):
            values = {letter: self.classes[n][k][-1].value for n, letter in letters.items()}
            for p in (p for s in reversed(line) for p in _operands(s) if p.entries in letters):
                values[letters[p.entries]] = p.value  # in the layout that this line of code uses
            expressions.append([expressions_of(s.value, values) for s in line])
            direct.append({letters.get(p.entries) for s in line for p in s.parents})
        sizes = self.check.sizes()
        if found := expression_cause(expressions[0], expressions[1], direct, sizes):
            return found
        if how := _simple(a, b, sizes) or _simple(ours[-1], theirs[-1], sizes):
            return how
        # One fused operation of PyTorch may correspond to several operations of a line in JAX.
        fused = [s for s in self.torch.steps if s.place is a.place]
        forms = lambda steps, x: [with_constant(s.value, x.value) for s in steps]
        causes = (expression_cause(forms(fused, x), forms(theirs, x)) for x in theirs)
        return next(filter(None, causes), UNRELATED)

    # --- cotangents

    def _of_gradients(self) -> Blame | None:
        """Returns the operations at which the cotangents diverge."""
        known = self.classes.values()
        tracked = [tuple([s for s in side if s.tracked] for side in c) for c in known]
        differing = [c for c in tracked if all(c) and self._differs(c)]
        if not differing:
            return None
        sides = max(differing, key=lambda c: c[0][0].number)
        x, y = (side[0] for side in sides)
        used = [[c for s in side for c in s.children] for side in sides]
        stops = [[c for c in of if c.place.operation in _STOPS and c.children] for of in used]
        uses = [[c for c in of if c.tracked and c.entries != x.entries] for of in used]
        chosen = [(u or side)[0] for u, side in zip(uses, sides, strict=True)]
        found = relation(*(_cotangents(x, y) or (x.gradient, y.gradient)))
        words = f"different derivatives; cotangents: {found or UNRELATED}"
        for k, name in enumerate(SIDES):
            # Report the stopped gradient, and the operation that uses the value on the other side.
            if stops[k] and not stops[1 - k]:
                chosen[k], words = stops[k][0], f"stopped gradient in {name}"
                after = {c.entries for c in chosen[k].children if c.entries >= 0}
                others = (c for c in uses[1 - k] if c.entries in after)
                chosen[1 - k] = next(others, chosen[1 - k])
        return Blame(chosen[0], chosen[1], (x, y), words)

    def _differs(self, sides: tuple[Steps, ...]) -> bool:
        """Returns whether all pairs of cotangents at a common value differ."""
        found = [*filter(None, starmap(_cotangents, product(*sides)))]
        agree = (
            (entry_errors(g, h, self.limit, self.noise) <= 1).all()
            and (n == 0 or (g.any() and h.any()))
            for n, (g, h) in enumerate(found)
        )
        return bool(found) and not any(agree)


def _cotangents(x: Step, y: Step) -> tuple[np.ndarray, np.ndarray] | None:
    """Returns the cotangents of two values in JAX's layout, or None if the values differ."""
    layout = layout_of(x, y)
    return None if layout is None else (layout[1](x.gradient), y.gradient)


def _likeness(pair: tuple[Step, Step]) -> tuple[bool, int, float, int]:
    """Returns a sort key, which is largest for early operations with common operands."""
    ours, theirs = ({p.entries for p in common_operands(s)} for s in pair)
    share = len(ours & theirs) / len(ours | theirs) if ours | theirs else 0.25
    return share > 0, -pair[0].number, share, -pair[1].number


def _differing(ends: Sequence[Step]) -> Steps:
    """Returns, in order, the steps between the common values of both runs and `ends`."""
    behind = ancestors(ends, stop=lambda s: _is_known(s) and s not in ends)
    chosen = [s for s in behind if not (s.leaf or s.is_common)]
    chosen = [s for s in chosen if strength(s.value) or s in ends]
    chosen = [s for s in chosen if s.moving] or chosen
    return sorted(chosen, key=lambda s: s.number)


def _first(steps: Steps) -> Steps:
    """Returns the steps that do not depend on any other of the given steps."""
    inside = {id(s) for s in steps}
    above = lambda s: ancestors(s.parents, stop=_is_known)
    return [s for s in steps if not any(id(p) in inside for p in above(s))]


def _is_known(s: Step) -> bool:
    return s.is_common and (bool(s.leaf) or strength(s.value) == STRONG)


def _simple(x: Step, y: Step, sizes: dict[str, int]) -> str | None:
    """Returns a relation between two values, such as a layout, a sign or a factor, or None."""
    a, b = x.value, y.value
    is_weak = a.size > 1 and a.dtype.kind != "b" and STRONG not in (strength(a), strength(b))
    if a.size != b.size or is_weak:
        return None
    found = related(a, b, near=10 * accuracy_of(x, y), sizes=sizes, single=a.size > 1)
    return None if found is None or found.name.startswith("zero") else found.name


def _operands(s: Step) -> Steps:
    return [s] * (s.entries >= 0) + common_operands(s)


def common_operands(s: Step) -> Steps:
    """Returns the nearest ancestors of a step whose values occur in both runs."""
    every = ancestors(s.parents, stop=lambda p: p.entries >= 0)
    return [p for p in every if p.entries >= 0]
