"""`Recording` holds one run of a function as a graph, or the error of the framework that ended it.

Each backend implements `record`. It runs or traces a function of flat leaves once, differentiates
it at the given values, and returns a `Recording`, which `diagnosis.py` interprets.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from gradtools.seeing.diagnostics.findings import Finding
from gradtools.seeing.diagnostics.gradients_at_values import PassesAtValues
from gradtools.seeing.graphs.nodes import PlainGraph

Run = Callable[[Sequence[Any]], Sequence[Any]]
Wanted = Callable[[Any], bool]  # whether a captured array is differentiated like a leaf


@dataclass(frozen=True)
class CapturedParameter:
    """A captured array that requires grad, and its numbers in `Recording.reads`."""

    name: str
    numbers: Sequence[int]
    array: Any


@dataclass(frozen=True)
class Recording:
    """One run of a function of flat leaves.

    Attributes:
        graph: Its graph. ``graph.inputs`` are the leaves, and ``graph.outputs`` the results, one
            value each, including NumPy arrays and Python numbers.
        refusal: The framework's error that ended the run, if any, without a leaf's name; the graph
            then has no outputs.
        parameters: The captured arrays that require grad.
        reads: Maps the id of a tensor that existed before the run to the numbers of the values that
            carry its gradient: its own, and the values of tensors computed from it before.
        passes: The run with its backward pass at these values. The keys are positions of leaves in
            JAX, and ids of tensors in PyTorch.
        aliases: In PyTorch, the ids of the copies of the leaves that are passed to f.
        spent: Whether a backward pass is impossible, because the graph was freed before.
    """

    graph: PlainGraph
    refusal: Finding | None = None
    parameters: tuple[tuple[str, Any], ...] = ()
    reads: Mapping[int, Sequence[int]] = field(default_factory=dict)
    passes: PassesAtValues = field(default_factory=PassesAtValues)
    spent: bool = False

    def numbers(self, array: Any) -> Sequence[int]:
        """The numbers of the values that carry the gradient of a captured array."""
        return self.reads.get(id(array), ())
