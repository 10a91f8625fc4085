"""Finds where a gradient becomes zero, NaN or infinite at the given values.

Each backend records one forward and one backward pass as a list of steps, with the magnitude of
every value (`PassesAtValues`). The analysis is the same for both frameworks:

- A zero gradient is traced back towards the cotangents of the outputs. The gradient is lost at
  backward steps that return zeros for a nonzero cotangent, or that create zeros without reading a
  cotangent. If nonzero cotangents sum to zero, the gradient is lost at the last operation on which
  all of these cotangents depend.
- A NaN is traced back from the outputs, or from the gradient if the outputs are finite, to the
  steps with finite operands whose result is NaN or infinite.
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
    """An operation of the recorded forward or backward pass.

    Attributes:
        node: The graph node of the forward operation that this step computes or differentiates;
            None if the step is internal, such as the stacking of the results of a loop's
            iterations. Internal steps are not reported.
        inputs: The indices of the values that the step reads.
        outputs: The indices of the values that the step produces.
    """

    node: Node | None
    inputs: Sequence[int]
    outputs: Sequence[int]


@dataclass(frozen=True)
class LossPlace:
    """A node at which a gradient becomes zero or NaN, with the indices of zero operands."""

    node: Node
    kind: str
    zeros: tuple[int, ...] = ()


Onward = Callable[[PassStep], list[int]]  # returns the operands to visit next
_UNKNOWN = Node("input", (), ())


@dataclass(frozen=True, eq=False)
class PassesAtValues:
    """A recorded forward and backward pass at given input values.

    Attributes:
        steps: The operations of both passes in execution order.
        sizes: Maps the index of each value to the largest absolute value of its entries. The size
            is NaN if any entry is NaN, and None for empty and integer arrays.
        outputs: The indices of the outputs of the forward pass.
        seeds: The indices of the output cotangents, with which the backward pass starts.
        gradients: Maps the index of a leaf in the program's graph to a pair of indices in these
            passes: the index of the leaf and the index of its gradient.
    """

    steps: Sequence[PassStep] = ()
    sizes: Mapping[int, float | None] = field(default_factory=dict)
    outputs: Sequence[int] = ()
    seeds: Sequence[int] = ()
    gradients: Mapping[int, tuple[int, int]] = field(default_factory=dict)

    def places(self, leaf: int | None) -> list[LossPlace] | None:
        """Returns the nodes at which the gradient of a leaf becomes zero or NaN.

        Returns None if `leaf` is None, or if the outputs are finite and the gradient is finite and
        not zero.
        """
        if leaf is None:
            return None
        gradient = self.gradients[leaf][1]
        if bad := self._bad_outputs or [*filter(self._is_bad, [gradient])]:
            return [LossPlace(node, "nan") for node in self._origins(bad) or [_UNKNOWN]]
        if self.sizes.get(gradient) == 0:
            return self._losses(*self.gradients[leaf]) or [LossPlace(_UNKNOWN, "zero")]
        return None

    def starts_at_zero(self, place: LossPlace, leaf: int) -> bool:
        """Returns whether training other leaves can change a zero operand at `place`.

        The zero operand must not depend on `leaf`, and must depend on a leaf whose gradient is not
        zero.
        """
        own = self._reached([self.gradients[leaf][0]])
        others = [v for v, gradient in self.gradients.values() if self.sizes.get(gradient)]
        moving = self._reached(others)
        return any(v in moving and v not in own for v in place.zeros)

    @cached_property
    def _makers(self) -> dict[int, int]:
        """Maps each value to the index of the step that produces the value."""
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
        """Returns `values` and all values that later steps compute from `values`."""
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
            if not entering:  # the backward pass created the zeros
                return [v for v in zeros if self._makers.get(v, -1) >= first]
            return [*entering] if entering.issubset(zeros) else []

        places = []
        for step in reversed(self._ends([gradient], onward)):  # in the order of the forward pass
            node = self._meeting(step).node
            if node is not None and node.source is None:  # the rule returned None
                node = self.last_rule(leaf) or node
            if node is not None:
                zeros = tuple(v for v in step.inputs if self.sizes.get(v) == 0)
                places.append(LossPlace(node, "rule" if node.mark == CUSTOM else "zero", zeros))
        return places

    def last_rule(self, leaf: int, mark: str = CUSTOM) -> Node | None:
        """Returns the last custom rule, or operation with `mark`, that depends on the leaf."""
        reached = self._reached([leaf])
        reading = (
            step.node for step in reversed(self.steps) if not reached.isdisjoint(step.inputs)
        )
        return next(
            (node for node in reading if node is not None and node.mark in (CUSTOM, mark)), None
        )

    def _meeting(self, step: PassStep) -> PassStep:
        """Returns the last step on which all cotangents read by `step` depend, or `step` itself."""
        onward = lambda step: [*self._cotangents.intersection(step.inputs)]
        behind = [{*self._walk([value], onward)} for value in onward(step)]
        common = set.intersection(*behind) if len(behind) > 1 else set()
        return self.steps[max(common)] if common else step

    def _origins(self, values: Sequence[int]) -> list[Node]:
        bad = lambda step: [v for v in step.inputs if self._is_bad(v) and v in self._makers]
        ends = [step.node for step in self._ends(values, bad) if step.node is not None]
        return [*dict.fromkeys(ends)]

    def _ends(self, values: Sequence[int], onward: Onward) -> list[PassStep]:
        """Returns the steps at which a backward traversal from `values` ends, in program order."""
        ends = [at for at, further in self._walk(values, onward).items() if not further]
        return [self.steps[at] for at in sorted(ends)]

    def _walk(self, values: Sequence[int], onward: Onward) -> dict[int, list[int]]:
        """Maps each visited step's index to the operands from which the traversal continues."""
        result, todo = dict[int, list[int]](), [*values]
        while todo:
            at = self._makers.get(todo.pop())
            if at is not None and at not in result:
                result[at] = onward(self.steps[at])
                todo += result[at]
        return result
