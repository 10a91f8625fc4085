"""Finds where a gradient becomes zero, NaN or infinite at the given values.

Each framework records one forward and one backward pass as a list of steps, with the magnitude of
every value (`PassesAtValues`). Both frameworks share the analysis:

- A zero gradient is traced back towards the cotangents of the outputs. The gradient is lost at the
  steps that return zeros for a nonzero cotangent or without a cotangent. If nonzero cotangents sum
  to zero, the gradient is lost at the operation from which both were computed.
- A NaN is traced back from the outputs (otherwise from the gradient) to the steps whose result is
  NaN or infinite and whose operands are finite.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from gradtools.seeing.graphs.nodes import Node
from gradtools.seeing.graphs.passes import CUSTOM


@dataclass(frozen=True)
class PassStep:
    """An operation of one of the passes.

    Attributes:
        node: The operation, or the forward operation that it differentiates; None for internal
            steps such as stacking a loop's iterations, which are not reported.
        inputs: The numbers of the values that the step reads.
        outputs: The numbers of the values that the step produces.
    """

    node: Node | None
    inputs: Sequence[int]
    outputs: Sequence[int]


@dataclass(frozen=True)
class LossPlace:
    """A step at which a gradient becomes zero or NaN: the node, the kind and the zero operands."""

    node: Node
    kind: str
    zeros: tuple[int, ...] = ()


Onward = Callable[[PassStep], list[int]]  # the operands at which a walk continues
_UNKNOWN = Node("input", (), ())


@dataclass(frozen=True, eq=False)
class PassesAtValues:
    """A forward and a backward pass at given values.

    Attributes:
        steps: The operations, in the order in which they ran.
        sizes: The greatest modulus of each value's entries (NaN if any entry is NaN); None for an
            empty value.
        outputs: The numbers of the forward pass's outputs.
        seeds: The numbers of the cotangents of the outputs.
        gradients: Maps the number of a leaf in the program's graph to its number in these passes
            and the number of its gradient.
    """

    steps: Sequence[PassStep] = ()
    sizes: Mapping[int, float | None] = field(default_factory=dict)
    outputs: Sequence[int] = ()
    seeds: Sequence[int] = ()
    gradients: Mapping[int, tuple[int, int]] = field(default_factory=dict)

    def places(self, leaf: int | None) -> list[LossPlace] | None:
        """Returns where a leaf's gradient becomes zero or NaN; None if it does not."""
        if leaf is None:
            return None
        gradient = self.gradients[leaf][1]
        if bad := self._bad_outputs or [*filter(self._is_bad, [gradient])]:
            return [LossPlace(node, "nan") for node in self._origins(bad) or [_UNKNOWN]]
        if self.sizes.get(gradient) == 0:
            return self._losses(*self.gradients[leaf]) or [LossPlace(_UNKNOWN, "zero")]
        return None

    def starts_at_zero(self, place: LossPlace, leaf: int) -> bool:
        """Returns whether a zero operand depends on a leaf that gets a gradient, not on `leaf`."""
        own = self._reached([self.gradients[leaf][0]])
        others = [v for v, gradient in self.gradients.values() if self.sizes.get(gradient)]
        moving = self._reached(others)
        return any(v in moving and v not in own for v in place.zeros)

    @cached_property
    def _makers(self) -> dict[int, int]:
        """Maps each value to the position of the step that produces it."""
        return {v: at for at, step in enumerate(self.steps) for v in step.outputs}

    @cached_property
    def _cotangents(self) -> set[int]:
        return self._reached(self.seeds)

    @cached_property
    def _bad_outputs(self) -> list[int]:
        return [*filter(self._is_bad, self.outputs)]

    def _is_bad(self, value: int) -> bool:
        size = self.sizes.get(value)
        return size is not None and not math.isfinite(size)

    def _reached(self, values: Iterable[int]) -> set[int]:
        """Returns the given values and all values that are computed from them."""
        result = set(values)
        for step in self.steps:
            if not result.isdisjoint(step.inputs):
                result.update(step.outputs)
        return result

    def _losses(self, leaf: int, gradient: int) -> list[LossPlace]:
        seeds = set(self.seeds)
        first = next((k for k, s in enumerate(self.steps) if not seeds.isdisjoint(s.inputs)), 0)

        def onward(step: PassStep) -> list[int]:
            zeros = [v for v in step.inputs if self.sizes.get(v) == 0]
            entering = self._cotangents.intersection(step.inputs)
            if not entering:  # zeros made by a rule of the backward pass
                return [v for v in zeros if self._makers.get(v, -1) >= first]
            return [*entering] if entering.issubset(zeros) else []

        places = []
        for step in reversed(self._ends([gradient], onward)):  # in the order of the forward pass
            node = self._meeting(step).node
            if node is not None and node.source is None:  # zeros made for a rule's None
                node = self.last_rule(leaf) or node
            if node is not None:
                zeros = tuple(v for v in step.inputs if self.sizes.get(v) == 0)
                places.append(LossPlace(node, "rule" if node.mark == CUSTOM else "zero", zeros))
        return places

    def last_rule(self, leaf: int) -> Node | None:
        """Returns the last custom rule that reads a value computed from the leaf."""
        reached = self._reached([leaf])
        reading = (
            step.node for step in reversed(self.steps) if not reached.isdisjoint(step.inputs)
        )
        return next((node for node in reading if node is not None and node.mark == CUSTOM), None)

    def _meeting(self, step: PassStep) -> PassStep:
        """Returns the last common ancestor of a step's cotangents, or the step itself."""
        onward = lambda step: [*self._cotangents.intersection(step.inputs)]
        behind = [{*self._walk([value], onward)} for value in onward(step)]
        common = set.intersection(*behind) if len(behind) > 1 else set()
        return self.steps[max(common)] if common else step

    def _origins(self, values: Sequence[int]) -> list[Node]:
        bad = lambda step: [v for v in step.inputs if self._is_bad(v) and v in self._makers]
        ends = [step.node for step in self._ends(values, bad) if step.node is not None]
        return [*dict.fromkeys(ends)]

    def _ends(self, values: Sequence[int], onward: Onward) -> list[PassStep]:
        """Returns the steps at which a walk ends, in execution order."""
        ends = [at for at, further in self._walk(values, onward).items() if not further]
        return [self.steps[at] for at in sorted(ends)]

    def _walk(self, values: Sequence[int], onward: Onward) -> dict[int, list[int]]:
        """Maps the position of each visited step to the next values of the walk."""
        result, todo = dict[int, list[int]](), [*values]
        while todo:
            at = self._makers.get(todo.pop())
            if at is not None and at not in result:
                result[at] = onward(self.steps[at])
                todo += result[at]
        return result
