"""`Recording` is one run of a function as a graph, or the framework's error that ended the run.

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


@dataclass(frozen=True)
class Recording:
    """One run of a function of flat leaves.

    Attributes:
        graph: The graph of the run. ``graph.inputs`` are the leaves, ``graph.outputs`` the results,
            with one value for each, also for NumPy arrays and Python numbers.
        refusal: The finding for the framework's error that ended the run, if any, without a leaf's
            name; the graph then has no outputs.
        parameters: The captured arrays with requires_grad, with their names.
        reads: Maps the id of a tensor that existed before the run to the values through which its
            gradient flows: its own value, and values of tensors computed from it earlier.
        passes: The run with its backward pass at these values; None if the graph was freed before.
    """

    graph: PlainGraph
    refusal: Finding | None = None
    parameters: tuple[tuple[str, Any], ...] = ()
    reads: Mapping[int, Sequence[int]] = field(default_factory=dict)
    passes: PassesAtValues | None = field(default_factory=PassesAtValues)

    def numbers(self, array: Any) -> Sequence[int]:
        """Returns the values through which the gradient of a captured array flows."""
        return self.reads.get(id(array), ())
