"""`Recording`: one run of a function as a graph, or the framework's error that ended it.

Each backend implements two functions. `record` runs or traces a function of flat leaves once and
returns a `Recording`. `vanishing` computes the gradient at given values and returns the operations
at which a nonzero cotangent became zero or NaN. `diagnosis.py` interprets both.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from gradtools.code_origin import Source
from gradtools.seeing.graphs.nodes import Node, PlainGraph

Run = Callable[[Sequence[Any]], Sequence[Any]]


@dataclass(frozen=True)
class RefusedCall:
    """The framework's error when data may not leave it in this way.

    Attributes:
        kind: A key of `findings.KINDS`.
        operation: The conversion that failed, such as "numpy" or "float".
        message: The first line of the framework's own message.
        source: The innermost line of the user's own code.
        scope: The modules it ran in, outermost first.
    """

    kind: str
    operation: str
    message: str
    source: Source | None = None
    scope: tuple[str, ...] = ()


@dataclass(frozen=True)
class CapturedParameter:
    """A captured array with requires_grad, and its numbers in `Recording.reads`."""

    name: str
    numbers: Sequence[int]
    array: Any


@dataclass(frozen=True)
class Recording:
    """One run of a function of flat leaves.

    Attributes:
        graph: Its graph. ``graph.inputs`` are the leaves, ``graph.outputs`` the results, with one
            value for each, also for NumPy arrays and Python numbers.
        refusal: The framework's error that ended the run, if any; the graph then has no outputs.
        host_outputs: The indices of outputs that are NumPy arrays or Python numbers.
        stand_ins: For each leaf the name of a captured array that f reads instead: the same
            array, reached by closure, global or attribute. Empty if there is none.
        wanted: The leaves with PyTorch's requires_grad.
        parameters: The captured arrays with requires_grad.
        reads: For tensors that existed before the run, by id, the numbers of the values that carry
            their gradient: their own, and those of tensors computed from them before.
    """

    graph: PlainGraph
    refusal: RefusedCall | None = None
    host_outputs: tuple[int, ...] = ()
    stand_ins: tuple[str, ...] = ()
    wanted: tuple[int, ...] = ()
    parameters: tuple[CapturedParameter, ...] = ()
    reads: Mapping[int, Sequence[int]] = field(default_factory=dict)


@dataclass(frozen=True)
class Vanished:
    """An operation at which the cotangent of a connected leaf became zero at the given values.

    Attributes:
        node: The operation; its ``operation`` is the neutral name.
        underflow: Whether the factors are nonzero, but their product underflowed.
        operands: The positions of the operands whose cotangent is zero, if known.
        cancelled: Whether the cotangents of several paths, which meet here, cancel.
        empty: Whether the operand has no entries: an index selected nothing.
        kind: "nan" if the cotangent became that rather than zero; "nan_value" if the
            operation's result is NaN or infinite already.
    """

    node: Node
    underflow: bool = False
    operands: tuple[int, ...] = ()
    cancelled: bool = False
    empty: bool = False
    kind: str = ""
