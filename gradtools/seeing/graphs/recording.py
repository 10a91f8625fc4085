"""`Recording`: one run of a function as a graph, or the framework's error that ended it.

Each backend implements `record`. It runs or traces a function of flat leaves once, differentiates
it at the given values, and returns a `Recording`, which `diagnosis.py` interprets.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from gradtools.code_origin import Source
from gradtools.seeing.graphs.nodes import Node, PlainGraph

Run = Callable[[Sequence[Any]], Sequence[Any]]
Wanted = Callable[[Any], bool]  # whether a captured array is differentiated like a leaf


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
class Vanished:
    """An operation at which the cotangent of a connected leaf became zero or NaN.

    Attributes:
        node: The operation; its ``operation`` is the neutral name.
        kind: "cancelled" if nonzero cotangents of several paths, which meet here, add up to zero;
            "empty" if the operand has no entries, since an index selected nothing; "nan" if the
            cotangent became NaN or infinite, "nan_value" if the operation's result is that; else
            empty.
        operands: The positions of the operands whose cotangent is zero, if known.
    """

    node: Node
    kind: str = ""
    operands: tuple[int, ...] = ()


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
        parameters: The captured arrays with requires_grad.
        reads: For tensors that existed before the run, by id, the numbers of the values that carry
            their gradient: their own, and those of tensors computed from them before.
        vanished: For each leaf where its gradient becomes zero or NaN; None if it is sound or does
            not reach. Empty if no gradient was computed.
        vanished_captured: The same of captured arrays, by id, without those that are sound.
        spent: Whether no backward pass is possible, because the graph was freed before.
    """

    graph: PlainGraph
    refusal: RefusedCall | None = None
    host_outputs: tuple[int, ...] = ()
    stand_ins: tuple[str, ...] = ()
    parameters: tuple[CapturedParameter, ...] = ()
    reads: Mapping[int, Sequence[int]] = field(default_factory=dict)
    vanished: tuple[Sequence[Vanished] | None, ...] = ()
    vanished_captured: Mapping[int, Sequence[Vanished]] = field(default_factory=dict)
    spent: bool = False
