"""`Recording` contains the graph of one run of a function, or the error that ended the run.

Each backend implements `record`. The function `record` runs or traces a function of flat leaves
once, computes its gradients at the given values, and returns a `Recording` for `diagnosis.py`.
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
    """The graph and captured parameters of one run of a function of flat leaves.

    Attributes:
        graph: The graph of the run. ``graph.inputs`` are the leaves and ``graph.outputs`` are the
            results, including NumPy arrays and Python numbers.
        refusal: The finding for a framework error that ended the run, or None if there was no
            error. The finding contains no leaf name. After an error, the graph has no outputs.
        parameters: The (name, tensor) pairs of the captured tensors that require grad.
        reads: Maps the id of a tensor that existed before the run to the graph values of this
            tensor and of all tensors that were computed from this tensor before the run.
        passes: The forward and backward passes at the given values; None if the backward pass
            failed because the graph was freed or contains a reentrant checkpoint.
    """

    graph: PlainGraph
    refusal: Finding | None = None
    parameters: tuple[tuple[str, Any], ...] = ()
    reads: Mapping[int, Sequence[int]] = field(default_factory=dict)
    passes: PassesAtValues | None = field(default_factory=PassesAtValues)

    def numbers(self, array: Any) -> Sequence[int]:
        """Returns the graph values through which the gradient of a captured array is computed."""
        return self.reads.get(id(array), ())
