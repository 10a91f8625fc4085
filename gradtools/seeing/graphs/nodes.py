"""The graph data structure: one run of a program, the same for both frameworks.

A `Graph` is a list of `Node`s in the order in which they ran. Each node reads values and produces
values; a value is an abstract array, with only a shape and a dtype. A node has a framework-neutral
name (`operation`), the framework's own name (`native`), the line of the user's code, the module,
and the dependence of each of its outputs on each of its inputs::

    none < cut < zero_derivative < differentiable

A path is as strong as its weakest link; of several paths, the strongest counts. Loops, branches and
calls contain their programs as `Body`s, with separate graphs.

The backends' recorders build graphs; the other modules of this package analyse and print them.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import IntEnum
from functools import wraps
from itertools import takewhile
from typing import Any, TypeVar, TypeVarTuple
from weakref import WeakKeyDictionary

from gradtools.code_origin import Source

K = TypeVar("K")
T = TypeVar("T")
Ts = TypeVarTuple("Ts")


class Dependence(IntEnum):
    """How one array depends on another: the strength of a link or of a whole path."""

    NONE = 0  # no data flows
    CUT = 1  # data flows but no derivative: detached, compared, cast, outside of the framework
    ZERO_DERIVATIVE = 2  # connected by round, floor, sign: the derivative is zero everywhere
    DIFFERENTIABLE = 3


@dataclass(frozen=True)
class Value:
    """An array in the program.

    Attributes:
        shape: The shape.
        dtype: The name of the dtype.
        name: The path of an input or output leaf, the name of a captured parameter, or empty.
        base: For a view, the value whose storage is shared.
    """

    shape: tuple[int, ...]
    dtype: str
    name: str = ""
    base: int | None = None

    @property
    def is_inexact(self) -> bool:
        """Whether the dtype is floating or complex, so that the value may have a derivative."""
        return self.dtype.startswith(("float", "complex", "bfloat"))

    @property
    def bytes(self) -> int:
        """The size of its elements in bytes; an element of unknown dtype counts as one byte."""
        bits = re.match(r"[a-z]*?(\d+)", self.dtype)
        return math.prod(self.shape) * max(1, int(bits[1]) // 8 if bits else 1)


@dataclass(frozen=True)
class Body:
    """A program inside a node, and the mapping of its inputs and outputs to the node's.

    Attributes:
        graph: The program.
        inputs: ``inputs[i]`` is the position of the node's input that becomes input i.
        carries: Pairs (k, i): output k is input i of a loop's next iteration.
        gate: Whether the body is a loop condition. Output k of other bodies is the node's output k.
        skippable: Whether a loop may have zero iterations, and then returns its carries unchanged.
    """

    graph: PlainGraph
    inputs: tuple[int, ...]
    carries: tuple[tuple[int, int], ...] = ()
    gate: bool = False
    skippable: bool = False


Links = tuple[tuple[Dependence, ...], ...]


@dataclass(frozen=True, eq=False)
class Node:
    """One operation of the program.

    Attributes:
        operation: The neutral name, such as "matmul" or "add", or the native name if there is none.
        inputs: The numbers of the values that the operation reads, in the order of its arguments.
        outputs: The numbers of the values that the operation produces.
        native: The framework's own name.
        attributes: Static parameters: axes, a permutation, a subscript string.
        source: The innermost line of the user's own code that ran the operation.
        scope: The modules in which the operation ran, outermost first.
        phase: 0 forward, 1 backward, 2 backward of the backward.
        links: ``links[k][i]`` is the dependence of output k on input i. If None, it is derived from
            the bodies; without bodies, inexact arrays are differentiable and other pairs are cut.
        loss: The kind of loss, a key of `findings.KINDS`, if a link is weaker than differentiable.
        mark: "custom rule", "edited gradient", "chunked", "frozen", "checkpoint", or empty.
        bodies: The programs inside the node.
    """

    operation: str
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    native: str = ""
    attributes: Mapping[str, Any] = field(default_factory=dict)
    source: Source | None = None
    scope: tuple[str, ...] = ()
    phase: int = 0
    links: Links | None = None
    loss: str | None = None
    mark: str = ""
    bodies: tuple[Body, ...] = ()


def even_links(
    node: Node,
    values: Mapping[int, Value],
    strength: Dependence = Dependence.DIFFERENTIABLE,
    cut: Container[int] = (),
) -> Links:
    """Returns links of one strength between inexact arrays; cuts other links, and `cut` inputs."""

    def link(out: int, given: int) -> Dependence:
        both = values[out].is_inexact and values[given].is_inexact
        return strength if both and given not in cut else Dependence.CUT

    return tuple(tuple(link(out, given) for given in node.inputs) for out in node.outputs)


@dataclass(frozen=True)
class Edge:
    """A value with its producer and one of its readers.

    Attributes:
        source: The position of its producer; None for an input or a captured value.
        target: The position of its reader; None for an output of the graph.
        value: The number of the value.
        bytes: The size of the value.
        saved: Whether it is a residual: read by a later pass than the pass that produces it.
            `Graph.kept` lists residuals that use additional memory.
        strength: The dependence of the reader's outputs on the value.
        cut: The kind of loss, as in `why_zero`; None if a derivative flows or none is possible.
    """

    source: int | None
    target: int | None
    value: int
    bytes: int
    saved: bool = False
    strength: Dependence = Dependence.DIFFERENTIABLE
    cut: str | None = None


@dataclass(frozen=True, eq=False)
class PlainGraph:
    """One run of a program.

    Attributes:
        nodes: The operations, in the order in which they ran.
        values: All arrays by their numbers.
        inputs: The numbers of the arguments' leaves.
        outputs: The numbers of the result's leaves. A value may occur twice, or be an input.
        captured: Arrays that the program reads by closure: parameters, constants.
    """

    nodes: tuple[Node, ...]
    values: Mapping[int, Value]
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    captured: tuple[int, ...] = ()

    def walk(self) -> Iterator[tuple[PlainGraph, Node]]:
        """Yields every node with its graph; the nodes of bodies follow their own node."""
        for node in self.nodes:
            yield self, node
            for body in node.bodies:
                yield from body.graph.walk()

    def __repr__(self) -> str:
        counts = len(self.nodes), len(self.inputs), len(self.outputs)
        return "Graph({} nodes, {} inputs, {} outputs)".format(*counts)


def memoized(make: Callable[[K, *Ts], T]) -> Callable[[K, *Ts], T]:
    """Memoizes a function of a graph or node (and of hashable arguments), by weak reference."""
    known: WeakKeyDictionary[K, dict[Any, T]] = WeakKeyDictionary()

    @wraps(make)
    def call(of: K, *args: *Ts) -> T:
        results = known.setdefault(of, {})
        if args not in results:
            results[args] = make(of, *args)
        return results[args]

    return call


def needed(
    nodes: Sequence[Node],
    outputs: Iterable[int],
    anyhow: Callable[[Node], bool] = lambda node: False,
) -> list[int]:
    """Eliminates dead code: keeps nodes on which the outputs, or any `anyhow` node, depend."""
    read, kept = set(outputs), []
    for i in reversed(range(len(nodes))):
        if anyhow(nodes[i]) or not read.isdisjoint(nodes[i].outputs):
            read.update(nodes[i].inputs)
            kept.append(i)
    return kept[::-1]


def memory_of(values: Mapping[int, Value], value: int) -> int:
    """Returns the value that owns the storage: the base of a view, or the value itself."""
    base = values[value].base
    return value if base is None else base


def grouped(items: Iterable[T], key: Callable[[T], K]) -> dict[K, list[T]]:
    """Groups items by key, in the order in which the keys first occur."""
    groups: dict[K, list[T]] = {}
    for item in items:
        groups.setdefault(key(item), []).append(item)
    return groups


def shared_length(paths: Sequence[Sequence[str]]) -> int:
    """Returns the length of the longest common prefix of the given scopes, or names."""
    steps = zip(*paths, strict=False)
    return sum(1 for _ in takewhile(lambda step: len(set(step)) == 1, steps))


def node_in_phase(node: Node, phase: int) -> Node:
    """Moves the node and all nodes of its bodies to one pass."""
    moved = lambda graph: replace(graph, nodes=tuple(node_in_phase(n, phase) for n in graph.nodes))
    bodies = tuple(replace(body, graph=moved(body.graph)) for body in node.bodies)
    return replace(node, phase=phase, bodies=bodies)
