"""Recorded runs: a `Step` for each intermediate value, a `Run` for one side of a comparison."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from gradtools.code_origin import Source

LIMIT = 5_000  # values of one side; longer loops are one operation
HALF = 3e-2  # the accuracy of a value that was widened from 16 bits
_ACCURACIES = {"float64": 1e-9, "complex128": 1e-9, "float32": 1e-4, "complex64": 1e-4}


@dataclass(frozen=True)
class Place:
    """An operation of a program.

    Attributes:
        operation: The framework's name of the operation; for a leaf the name of the argument or
            parameter.
        lines: The user's call chain at the operation, innermost first: each with `file`, `line`,
            `function` and `text`.
        layer: The path of the module that ran; empty if it is not known.
        iteration: The iterations of the enclosing loops, outermost first.
    """

    operation: str
    lines: tuple[Source, ...] = ()
    layer: str = ""
    iteration: tuple[int, ...] = ()

    @property
    def line(self) -> Source | None:
        """The user's innermost line; None if the operation is a library's own."""
        return self.lines[0] if self.lines else None

    @property
    def site(self) -> Any:
        """Equal for operations of one line, or of one layer if no line is the user's."""
        return (self.lines[0].file, self.lines[0].line) if self.lines else self.layer

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
        number: The position in the run; -1 for a literal.
        accuracy: The relative error that rounding may cause at the coarsest dtype so far.
        cotangent: The gradient of Re<c, outputs> at the value; None if there is none.
        inside: Whether the value is a part of a fused operation, which has no cotangent.
        leaf: The name of an argument or parameter, or "captured".
        group: The number of the class of equal values, on both sides; -1 if there is none.
    """

    place: Place
    value: Any
    parents: list[Step] = field(default_factory=list)
    number: int = -1
    accuracy: float = 0.0
    cotangent: Any = None
    inside: bool = False
    leaf: str = ""
    children: list[Step] = field(default_factory=list)
    group: int = -1

    @property
    def op(self) -> str:
        """The name of the operation."""
        return self.place.operation

    @property
    def site(self) -> Any:
        """The site of the operation."""
        return self.place.site


@dataclass
class Run:
    """One side's steps in order, its differentiated leaves in order, and its outputs by path."""

    steps: list[Step]
    leaves: list[Step]
    outputs: dict[str, Step]

    def __post_init__(self) -> None:
        for step in self.steps:
            own = _ACCURACIES.get(step.value.dtype.name, 0.0)
            step.accuracy = max([step.accuracy, own, *(p.accuracy for p in step.parents)])
            for parent in step.parents:
                parent.children.append(step)


Draw = Callable[[dict[str, Step]], dict[str, Any]]  # cotangents in NumPy for the outputs by path
