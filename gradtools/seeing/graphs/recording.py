"""`Recording`: one run of a function as a graph, and the error of the framework if it refused.

`record` runs or traces a function of flat leaves once and gives a `Recording`: the graph, and the
framework's own error if there was one. `vanishing` takes the gradient at these very values and
says at which operations a cotangent that was not zero became zero, NaN or vanishing. Both are
methods of the waist; what is made of them stands above, in `diagnosis.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from gradtools.code_origin import Source
from gradtools.seeing.graphs.nodes import Node, PlainGraph

Run = Callable[[Sequence[Any]], Sequence[Any]]


@dataclass(frozen=True)
class Refusal:
    """The framework's own error on the way: data may not leave it like this.

    Attributes:
        kind: A key of `findings.KINDS`.
        operation: What was tried, such as "numpy" or "float".
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
class Recording:
    """One run of a function of flat leaves.

    Attributes:
        graph: Its graph. ``graph.inputs`` are the leaves, ``graph.outputs`` what it returned,
            one value for each, a NumPy or Python number among them.
        refusal: The framework's own error that ended the run, if one did; the graph then has no
            outputs.
        host_outputs: Which outputs are no arrays of the framework, but NumPy or Python numbers.
        stand_ins: For each leaf the name of a captured array that is read in its place: the same
            array, reached by closure, global or attribute. Empty where there is none.
        wanted: The leaves that ask for a gradient themselves (PyTorch's requires_grad).
        parameters: What f holds that asks for one: its name, and the number of its value, or None
            if f never read it.
        held: The arrays that `parameters` name, in their order.
        reads: For what was there before the run, by id, the numbers of the values that carry its
            gradient: its own, and those of what was computed from it before.
    """

    graph: PlainGraph
    refusal: Refusal | None = None
    host_outputs: tuple[int, ...] = ()
    stand_ins: tuple[str, ...] = ()
    wanted: tuple[int, ...] = ()
    parameters: tuple[tuple[str, int | None], ...] = ()
    held: tuple[Any, ...] = ()
    reads: Mapping[int, Sequence[int]] = field(default_factory=dict)


@dataclass(frozen=True)
class Vanished:
    """An operation at which the cotangent of a connected leaf became zero at these values.

    Attributes:
        node: The operation; its ``operation`` is the neutral name.
        underflow: Whether the factor is not zero, but the product is.
        operands: The positions of its operands that got nothing; none where they are not known.
        cancelled: Whether what comes over several paths, which meet here, adds up to zero.
        noise: Whether that is a rounding error and not zero.
        empty: Whether what it handed nothing to has no entries: an index selected nothing.
        kind: "nan" or "vanishing" of a cotangent that became so, and not zero.
    """

    node: Node
    underflow: bool = False
    operands: tuple[int, ...] = ()
    cancelled: bool = False
    noise: bool = False
    empty: bool = False
    kind: str = ""
