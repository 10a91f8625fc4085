"""`Recorded`: a graph of framework-neutral operations, with the arrays that its program captured.

A `Graph` knows shapes only. To compute a formula's numbers the values of what the program
captured are needed as well, and where a program holds parameters that ask for a gradient, as a
module of PyTorch does, they are differentiated like its arguments. A wing may return a plain
`Graph` where nothing is captured.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

from gradtools.seeing.graphs.nodes import Body, PlainGraph


@dataclass(frozen=True, eq=False)
class Recorded(PlainGraph):
    """One run of a program in the words of `operations/`, and what it holds.

    Attributes:
        held: The array of each captured value, by number.
        wanted: The captured values that ask for a gradient themselves, by number.
        run: The leaves of what f returns, of the leaves of its arguments, followed by one array
            for each value that is wanted. None: what the program runs, and nothing is wanted.
        narrow: The dtype in which the program computes some of it whatever it is given, if that
            has less than double precision; often empty.
    """

    held: Mapping[int, Any] = field(default_factory=dict)
    wanted: tuple[int, ...] = ()
    run: Callable[[Sequence[Any]], Sequence[Any]] | None = None
    narrow: str = ""

    @property
    def opened(self) -> PlainGraph:
        """The program with what is wanted as further inputs."""
        captured = tuple(v for v in self.captured if v not in self.wanted)
        return replace(self, inputs=(*self.inputs, *self.wanted), captured=captured)


def body_of(recorded: Recorded) -> Body:
    """A program as the body of a call, whose operands are its inputs and what it captured."""
    inputs = (*recorded.inputs, *recorded.captured)
    graph = PlainGraph(recorded.nodes, recorded.values, inputs, recorded.outputs)
    return Body(graph, tuple(range(len(inputs))))


def as_recorded(graph: PlainGraph) -> Recorded:
    """The same with what it holds; a plain graph holds nothing."""
    if isinstance(graph, Recorded):
        return graph
    return Recorded(**{f.name: getattr(graph, f.name) for f in fields(PlainGraph)})
