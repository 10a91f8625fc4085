"""Recorded runs: a `Step` for each intermediate value, a `Run` for one side of a comparison."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from gradtools.code_origin import Source

HALF = 3e-2
_ACCURACIES = {
    **dict.fromkeys(("float64", "complex128"), 1e-9),
    **dict.fromkeys(("float32", "complex64"), 1e-4),
    **dict.fromkeys(("float16", "bfloat16"), HALF),
}


@dataclass(frozen=True)
class Place:
    """An operation of a program.

    Attributes:
        operation: The framework's name of the operation; for a leaf the name of the argument or
            parameter.
        lines: The user's call chain at the operation, innermost first: each with `file`, `line`,
            `function` and `text`.
        layer: The path of the module that ran; empty if unknown.
        iteration: The iterations of the enclosing loops, outermost first.
    """

    operation: str
    lines: tuple[Source, ...] = ()
    layer: str = ""
    iteration: tuple[int, ...] = ()

    @property
    def line(self) -> Source | None:
        """The user's innermost line; None for an operation of a library."""
        return self.lines[0] if self.lines else None

    def __str__(self) -> str:
        text = self.operation + (f" in {self.layer}" if self.layer else "")
        if self.iteration:
            text += f", iteration {', '.join(map(str, self.iteration))}"
        if self.lines:
            text += " at " + ", called at ".join(map(str, self.lines))
            text += f": {self.lines[0].text}"
        return text


@dataclass(eq=False)
class Step:
    """A recorded value.

    Attributes:
        place: The operation that returned the value.
        value: The value in NumPy; floating types of 16 bits are widened.
        parents: The steps of the operation's operands, and `children` the steps that use the value.
        leaf: The name of an argument or parameter, or "captured".
        tracked: Whether the cotangent of the value is recorded.
        cotangent: The gradient of Re<c, outputs> at the value; None if it is zero or not tracked.
        number: The position in the run.
        accuracy: The relative error that rounding may cause at the coarsest dtype so far.
        moving: Whether the value depends on a leaf.
        entries: The number of the class of values with these entries, which contains values of both
            sides; -1 if the other side has no such value.
        is_common: Whether the other side has an equal value, up to a permutation of the axes.
    """

    place: Place
    value: Any
    parents: list[Step] = field(default_factory=list)
    leaf: str = ""
    tracked: bool = False
    cotangent: Any = None
    number: int = 0
    children: list[Step] = field(default_factory=list)
    accuracy: float = 0.0
    moving: bool = False
    entries: int = -1
    is_common: bool = False

    @property
    def gradient(self) -> Any:
        """The cotangent, as an array."""
        return np.zeros(self.value.shape) if self.cotangent is None else self.cotangent


@dataclass
class Run:
    """The record of one side.

    Attributes:
        steps: The steps in order.
        outputs: The steps of the outputs by path.
        pull: Sets the cotangents of the steps, from NumPy arrays for the outputs by path.
    """

    steps: list[Step]
    outputs: dict[str, Step]
    pull: Callable[[dict[str, Any]], None]

    def __post_init__(self) -> None:
        for n, step in enumerate(self.steps):
            own = _ACCURACIES.get(step.value.dtype.name, 0.0)
            step.value = step.value.astype(np.float32) if own == HALF else step.value
            step.accuracy = max([own, *(p.accuracy for p in step.parents)])
            step.number, step.moving = n, bool(step.leaf) or any(p.moving for p in step.parents)
            for parent in step.parents:
                parent.children.append(step)

    @property
    def leaves(self) -> dict[str, Step]:
        """The arguments and parameters by name."""
        return {s.leaf: s for s in self.steps if s.leaf not in ("", "captured")}


def ancestors(steps: Iterable[Step], stop: Callable[[Step], bool]) -> list[Step]:
    """Returns the steps and their ancestors, up to steps for which `stop` is true."""
    seen: dict[int, Step] = {}
    pending = [*steps]
    while pending:
        s = pending.pop()
        if id(s) not in seen:
            seen[id(s)] = s
            pending += [] if stop(s) else s.parents
    return [*seen.values()]
