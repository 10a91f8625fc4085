"""Defines recorded runs, and finds the values that two runs have in common.

A `Run` is one side of a comparison, with a `Step` for each intermediate value. Two values
count as equal if they agree after a permutation of axes or a reshape. Candidates for equal values
are found by comparing sums of powers of the absolute values, which do not depend on the order of
the entries.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from gradtools.code_origin import Source
from gradtools.testing.relations import MASKED, Move, equal, layouts

NONE, WEAK, STRONG = range(3)
_SAMPLE = 4096  # number of entries that are compared to recognize a mask
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
        operation: The framework's name of the operation; for a leaf, the name of the argument or
            parameter.
        lines: The source lines of the user's call chain, innermost first; each line has the
            attributes `file`, `line`, `function` and `text`.
        layer: The path of the module that ran, or "" if it is unknown.
        iteration: The iteration indices of the enclosing loops, outermost first.
    """

    operation: str
    lines: tuple[Source, ...] = ()
    layer: str = ""
    iteration: tuple[int, ...] = ()

    @property
    def line(self) -> Source | None:
        """The innermost line of the user's code, or None if there is no such line."""
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
        value: The value as a NumPy array; 16-bit floating dtypes are widened.
        parents: The steps of the operation's operands.
        children: The steps of the operations that take the value as an operand.
        leaf: The name of an argument or parameter, "captured" for a captured array, or ""
            otherwise.
        tracked: Whether the cotangent of the value is recorded.
        cotangent: The gradient of Re<c, outputs> with respect to the value, or None if the gradient
            is zero or not tracked.
        number: The index of the step in the run.
        accuracy: The relative error that rounding may cause, given the coarsest dtype of the value
            and its ancestors.
        moving: Whether the value depends on a leaf.
        entries: The index of the group of values with the same entries in both runs; -1 if the
            other run has no value with these entries.
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
        """The cotangent as an array, with zeros in place of None."""
        return np.zeros(self.value.shape) if self.cotangent is None else self.cotangent


@dataclass
class Run:
    """The recorded run of one program.

    Attributes:
        steps: The steps in the order of execution.
        outputs: The steps of the outputs, keyed by path.
        pull: A function that sets the cotangents of all steps, given NumPy cotangents of the
            outputs, keyed by path.
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
        """The steps of the arguments and parameters, keyed by name."""
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


# --- equal values


def strength(x: np.ndarray) -> int:
    """Rates how unlikely it is that another value equals x by chance: NONE, WEAK or STRONG."""
    if x.size == 0 or (x.size > 1 and bool((x == x.flat[0]).all())):
        return NONE
    if x.dtype.kind not in "fc":
        return WEAK if x.size > 1 else NONE
    if x.size == 1:
        value = complex(x.flat[0])
        is_round = abs(value * 64 - round(value.real * 64)) < 1e-12 if np.isfinite(value) else True
        return NONE if is_round else STRONG
    return WEAK if len(np.unique(x.ravel()[:_SAMPLE])) < 3 else STRONG


def aligned(a: np.ndarray, b: np.ndarray, accuracy: float) -> tuple[str, Move] | None:
    """Returns the name and the conversion of a layout in which a equals b, or None."""
    every = layouts(a, b.shape)
    return next(((how, move) for how, move in every if _close(move(a), b, accuracy)), None)


def _close(a: np.ndarray, b: np.ndarray, accuracy: float) -> bool:
    """Returns whether two arrays agree within an error relative to the largest entry.

    The constants of a mask (-1e4, -1e9) are compared separately.
    """
    is_large = np.abs(b) >= MASKED
    return all(equal(a[part], b[part], accuracy) for part in (is_large, ~is_large))


def layout_of(a: Step, b: Step) -> tuple[str, Move] | None:
    """Returns the layout in which two steps have equal values, or None."""
    alike = (a.value.dtype.kind in "fc") == (b.value.dtype.kind in "fc")
    return aligned(a.value, b.value, accuracy_of(a, b)) if alike else None


def accuracy_of(a: Step, b: Step) -> float:
    """Returns the accuracy of the finer dtype, so that a coarser dtype counts as a difference."""
    return max(min(a.accuracy, b.accuracy), 1e-9)


def match(
    torch: Run, jax: Run, named: Sequence[tuple[Step, Step]]
) -> dict[int, tuple[list[Step], list[Step]]]:
    """Finds the values that occur in both runs, and sets `Step.entries` and `Step.is_common`.

    If one side reshapes where the other side transposes, the reshaped array has the entries of a
    common value in a different order. The reshaped array equals a value of another shape, but
    differs from the values of its own shape, and is therefore not marked as common.

    Args:
        torch: The run in PyTorch.
        jax: The run in JAX.
        named: Pairs of corresponding leaves, which are compared even if all entries are equal.

    Returns:
        A dictionary from the index of each group (see `Step.entries`) to the group's steps in
        PyTorch and in JAX.
    """
    prints = np.array([_fingerprint(s.value) for s in jax.steps]).reshape(-1, 5)
    strengths = np.array([strength(s.value) for s in jax.steps])
    accuracies = np.array([s.accuracy for s in jax.steps])
    pairs = [p for p in named if layout_of(*p)]
    for a in torch.steps:
        if own := strength(a.value):
            fingerprint = _fingerprint(a.value)
            allowed = 10 * np.maximum(np.minimum(accuracies, a.accuracy), 1e-9)[:, None]
            near = (np.abs(prints - fingerprint) <= allowed * np.abs(fingerprint) + 1e-300).all(1)
            alike = (jax.steps[k] for k in np.flatnonzero(near & (strengths == own)))
            pairs += [(a, b) for b in alike if layout_of(a, b)]
    for a, b in pairs:
        a.entries = b.entries = a.number
    while any(a.entries != b.entries for a, b in pairs):  # equality in a layout is not transitive
        for a, b in pairs:
            a.entries = b.entries = min(a.entries, b.entries)
    classes: dict[int, tuple[list[Step], list[Step]]] = {}
    for k, run in enumerate((torch, jax)):
        for s in (s for s in run.steps if s.entries >= 0):
            classes.setdefault(s.entries, ([], []))[k].append(s)
    for sides in classes.values():
        for s, others in ((s, sides[1 - k]) for k in (0, 1) for s in sides[k]):
            mates = [m for m in others if _axes(m) == _axes(s)]
            before = [p for p in s.parents if p.entries == s.entries]
            s.is_common = any(layout_of(s, m) for m in mates) or (
                not mates and all(p.is_common for p in before)
            )
    return classes


def _axes(s: Step) -> list[int]:
    return sorted(n for n in s.value.shape if n != 1)


def _fingerprint(x: np.ndarray) -> list[float]:
    finite = np.isfinite(x) if x.dtype.kind in "fc" else np.ones(x.shape, bool)
    y = np.abs(np.where(finite, x, 0)).astype(float).ravel()
    with np.errstate(over="ignore"):
        powers = [float(y.sum()), math.sqrt(float((y**2).sum())), float((y**4).sum()) ** 0.25]
    return [float(y.size), float(y.size - finite.sum()), *powers]
