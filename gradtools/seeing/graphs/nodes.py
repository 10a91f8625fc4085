"""Defines the graph of one run of a PyTorch or JAX program.

A `Graph` is a list of `Node`s in the order in which they ran. Each node reads values and produces
values; a value is an abstract array: a shape and a dtype without data. A node has a
framework-neutral name (`operation`), the framework's own name (`native`), the line of the user's
code, the module, and the dependence of each output on each input::

    none < cut < zero_derivative < differentiable

The strength of a path is the minimum strength of its links; the strength of several paths is the
maximum of their strengths. Nodes of loops, branches and calls contain `Body` objects with separate
graphs.

Each backend records graphs; the other modules of this package analyze and print graphs.
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
    """The strength with which one array depends on another, in one operation or along a path."""

    NONE = 0  # no data flows
    CUT = 1  # data flows without a derivative: detached, compared, cast to integers
    ZERO_DERIVATIVE = 2  # round, floor, sign: the derivative is zero everywhere
    DIFFERENTIABLE = 3


@dataclass(frozen=True)
class Value:
    """An abstract array that a program reads or computes.

    Attributes:
        shape: The shape of the array.
        dtype: The name of the dtype, such as "float32".
        name: The path of an input or output leaf, the name of a captured parameter, or empty.
        base: For a view, the index of the value that owns the storage; None for other values.
    """

    shape: tuple[int, ...]
    dtype: str
    name: str = ""
    base: int | None = None

    @property
    def is_inexact(self) -> bool:
        """Returns whether the dtype is floating or complex, so the value can have a derivative."""
        return self.dtype.startswith(("float", "complex", "bfloat"))

    @property
    def bytes(self) -> int:
        """Returns the size of the array in bytes; elements of unknown dtype count as one byte."""
        bits = re.match(r"[a-z]*?(\d+)", self.dtype)
        return math.prod(self.shape) * max(1, int(bits[1]) // 8 if bits else 1)


@dataclass(frozen=True)
class Body:
    """The body of a loop, branch or call, with the mapping to the node's inputs and outputs.

    Attributes:
        graph: The graph of the body.
        inputs: ``inputs[i]`` is the position of the node's input that is passed as input i of the
            body.
        carries: Pairs (k, i): output k of a loop body is input i of the next iteration.
        gate: Whether the body is a loop condition. If False, output k of the body is output k of
            the node.
        skippable: Whether a loop may have zero iterations, in which case it returns the initial
            carries.
    """

    graph: PlainGraph
    inputs: tuple[int, ...]
    carries: tuple[tuple[int, int], ...] = ()
    gate: bool = False
    skippable: bool = False


Links = tuple[tuple[Dependence, ...], ...]


@dataclass(frozen=True, eq=False)
class Node:
    """An operation of a graph.

    Attributes:
        operation: The neutral name, such as "matmul", or the native name if there is no neutral
            name.
        inputs: The indices of the values that the operation reads, in the order of its arguments.
        outputs: The indices of the values that the operation computes.
        native: The framework's own name of the operation.
        attributes: Static parameters of the operation, such as axes or a permutation.
        source: The innermost line of the user's own code that ran the operation.
        scope: The modules in which the operation ran, outermost first.
        phase: The pass: 0 is forward, 1 is backward, and 2 is the backward of the backward.
        links: ``links[k][i]`` is the dependence of output k on input i. If None, the links are
            computed from the bodies. If there are no bodies, links between inexact arrays are
            differentiable and other links are cut.
        loss: The kind of lost gradient, a key of `findings.KINDS`, if a link is not differentiable.
        mark: "custom rule", "edited gradient", "chunked", "frozen", "checkpoint",
            "inner derivative" (computed by the program), or empty.
        bodies: The bodies of a loop, branch or call; empty for other operations.
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
    """Returns links of `strength` between inexact arrays; all other links are CUT.

    cut: The inputs whose links are CUT even if the arrays are inexact.
    """

    def link(out: int, given: int) -> Dependence:
        both = values[out].is_inexact and values[given].is_inexact
        return strength if both and given not in cut else Dependence.CUT

    return tuple(tuple(link(out, given) for given in node.inputs) for out in node.outputs)


@dataclass(frozen=True)
class Edge:
    """A value, with the node that computes it and a node that reads it.

    Attributes:
        source: The position of the node that computes the value; None for an input or a captured
            value.
        target: The position of the node that reads the value; None for an output of the graph.
        value: The index of the value.
        bytes: The size of the value in bytes.
        saved: Whether the value is a residual, which a later pass reads. `Graph.kept` lists
            residuals that use additional memory.
        strength: The strongest dependence of the reader's outputs on the value.
        cut: The kind of lost gradient, as in `why_zero`; None if no derivative is lost.
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
    """The operations and values of one run of a program.

    Attributes:
        nodes: The operations, in the order in which they ran.
        values: Maps the index of each value to its shape, dtype and name.
        inputs: The indices of the leaves of the arguments.
        outputs: The indices of the leaves of the result; an index may occur twice, or be an input.
        captured: The indices of arrays that the program captures, such as parameters and constants.
    """

    nodes: tuple[Node, ...]
    values: Mapping[int, Value]
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    captured: tuple[int, ...] = ()

    def walk(self) -> Iterator[tuple[PlainGraph, Node]]:
        """Yields (graph, node) for all nodes, including the nodes of bodies."""
        for node in self.nodes:
            yield self, node
            for body in node.bodies:
                yield from body.graph.walk()

    def __repr__(self) -> str:
        counts = len(self.nodes), len(self.inputs), len(self.outputs)
        return "Graph({} nodes, {} inputs, {} outputs)".format(*counts)


def memoized(make: Callable[[K, *Ts], T]) -> Callable[[K, *Ts], T]:
    """Memoizes a function of a graph or node, with weak references to the first argument."""
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
    """Returns the positions of the nodes on which the outputs depend.

    Nodes that satisfy `anyhow`, and the nodes on which they depend, are included.
    """
    read, kept = set(outputs), []
    for i in reversed(range(len(nodes))):
        if anyhow(nodes[i]) or not read.isdisjoint(nodes[i].outputs):
            read.update(nodes[i].inputs)
            kept.append(i)
    return kept[::-1]


def memory_of(values: Mapping[int, Value], value: int) -> int:
    """Returns the value that owns the storage of `value`: the base of a view, or `value`."""
    base = values[value].base
    return value if base is None else base


def grouped(items: Iterable[T], key: Callable[[T], K]) -> dict[K, list[T]]:
    """Groups items by key, in the order in which the keys first occur."""
    groups: dict[K, list[T]] = {}
    for item in items:
        groups.setdefault(key(item), []).append(item)
    return groups


def shared_length(paths: Sequence[Sequence[str]]) -> int:
    """Returns the length of the longest common prefix of the given paths."""
    steps = zip(*paths, strict=False)
    return sum(1 for _ in takewhile(lambda step: len(set(step)) == 1, steps))


def node_in_phase(node: Node, phase: int) -> Node:
    """Returns a copy of the node; the copy and its bodies belong to the pass `phase`."""
    moved = lambda graph: replace(graph, nodes=tuple(node_in_phase(n, phase) for n in graph.nodes))
    bodies = tuple(replace(body, graph=moved(body.graph)) for body in node.bodies)
    return replace(node, phase=phase, bodies=bodies)
