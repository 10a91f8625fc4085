"""`Writer`: the formula's graph under construction, with shapes and dtypes of its values.

A `Ref` stands for a value: its number, shape and dtype. `Writer` adds nodes; shapes and dtypes of
what lies between are worked out here, those of results are what PyTorch says. Programs inside of
nodes are written into frames of their own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np

from gradtools.seeing.formulas.operation_record import of_vocabulary
from gradtools.seeing.graphs.nodes import Body, Node, PlainGraph, Value
from gradtools.seeing.torch.recording.values import Like as Like
from gradtools.seeing.torch.recording.values import like as like

Shape = tuple[int, ...]
_KINDS = ("bool", "int64", "float64", "complex128")


@dataclass(frozen=True)
class Ref:
    """A value of the program that is written."""

    number: int
    shape: Shape
    dtype: str

    @property
    def ndim(self) -> int:
        """How many axes it has."""
        return len(self.shape)

    @property
    def size(self) -> int:
        """How many entries it has."""
        return prod(self.shape)

    @property
    def kind(self) -> int:
        """0 boolean, 1 integer, 2 real, 3 complex."""
        if self.dtype.startswith(("float", "bfloat")):
            return 2
        return 3 if self.dtype.startswith("complex") else int(self.dtype != "bool")


class Writer:
    """A program that is being written; values: of all that is recorded, by number."""

    def __init__(self, values: dict[int, Value]) -> None:
        self.values = values
        self.frames: list[list[Node]] = [[]]
        self.native = ""

    # --- values and nodes

    def value(self, of: Like, name: str = "") -> Ref:
        """A new value."""
        number = len(self.values)
        self.values[number] = Value(of[0], of[1], name)
        return Ref(number, *of)

    def node(
        self,
        operation: str,
        given: Sequence[Ref],
        outs: Sequence[Like],
        bodies: Sequence[Body] = (),
        root: bool = False,
        **attributes: Any,
    ) -> list[Ref]:
        """An operation with all its results; attributes that are None are left out."""
        made = [self.value(out) for out in outs]
        said = {k.rstrip("_"): v for k, v in attributes.items() if v is not None}
        numbers = tuple(x.number for x in given), tuple(y.number for y in made)
        frame = self.frames[0 if root else -1]
        frame.append(Node(operation, *numbers, self.native, attributes=said, bodies=tuple(bodies)))
        return made

    def __call__(
        self,
        operation: str,
        *given: Ref,
        shape: Sequence[int] | None = None,
        dtype: str | None = None,
        **attributes: Any,
    ) -> Ref:
        """An operation with one result; by default elementwise."""
        if shape is None:
            shape = np.broadcast_shapes(*(x.shape for x in given))
        if dtype is None:
            dtype = _KINDS[max((x.kind for x in given), default=2)]
        return self.node(operation, given, [(tuple(shape), dtype)], **attributes)[0]

    def constant(self, value: Any, root: bool = False) -> Ref:
        """A number, or an array that the program holds."""
        array = np.asarray(value)
        kind = {"b": 0, "i": 1, "u": 1, "f": 2, "c": 3}[array.dtype.kind]
        return self.node("constant", [], [(array.shape, _KINDS[kind])], root=root, value=array)[0]

    def ref(self, x: Any) -> Ref:
        """A number as a constant."""
        return x if isinstance(x, Ref) else self.constant(x)

    @contextmanager
    def frame(self) -> Iterator[list[Node]]:
        """Inside, nodes are written into a program of their own."""
        self.frames.append([])
        try:
            yield self.frames[-1]
        finally:
            self.frames.pop()

    def graph(
        self, nodes: Sequence[Node], inputs: Sequence[Ref], outputs: Sequence[Ref]
    ) -> PlainGraph:
        """A frame as a program."""
        numbers = lambda refs: tuple(x.number for x in refs)
        return PlainGraph(tuple(nodes), self.values, numbers(inputs), numbers(outputs))

    # --- words that are used often

    def add(self, a: Any, b: Any) -> Ref:
        """A sum."""
        return self("add", self.ref(a), self.ref(b))

    def sub(self, a: Any, b: Any) -> Ref:
        """A difference."""
        return self("subtract", self.ref(a), self.ref(b))

    def mul(self, a: Any, b: Any) -> Ref:
        """An elementwise product."""
        return self("multiply", self.ref(a), self.ref(b))

    def div(self, a: Any, b: Any) -> Ref:
        """A quotient, of integers as well."""
        a, b = self.ref(a), self.ref(b)
        return self("divide", a, b, dtype=_KINDS[max(a.kind, b.kind, 2)])

    def compare(self, a: Any, relation: str, b: Any) -> Ref:
        """A boolean."""
        return self("compare", self.ref(a), self.ref(b), dtype="bool", relation=relation)

    def where(self, c: Ref, a: Any, b: Any) -> Ref:
        """One or the other."""
        a, b = self.ref(a), self.ref(b)
        return self("where", c, a, b, dtype=_KINDS[max(a.kind, b.kind)])

    def times(self, factor: Any, x: Ref) -> Ref:
        """A product with a number; with one nothing."""
        return x if isinstance(factor, int | float) and factor == 1 else self.mul(factor, x)

    def reshape(self, x: Ref, shape: Sequence[int]) -> Ref:
        """In another shape, row by row."""
        shape = tuple(shape)
        return x if shape == x.shape else self("reshape", x, shape=shape, shape_=shape)

    def permute(self, x: Ref, order: Sequence[int]) -> Ref:
        """With its axes in this order."""
        order = tuple(a % x.ndim for a in order)
        if order == tuple(range(x.ndim)):
            return x
        return self("transpose", x, shape=[x.shape[a] for a in order], permutation=order)

    def swap(self, x: Ref) -> Ref:
        """The last two axes exchanged."""
        return self.permute(x, (*range(x.ndim - 2), x.ndim - 1, x.ndim - 2))

    def broadcast(self, x: Ref, shape: Sequence[int]) -> Ref:
        """Repeated along axes."""
        shape = tuple(shape)
        return x if shape == x.shape else self("broadcast", x, shape=shape, shape_=shape)

    def cast(self, x: Ref, dtype: str) -> Ref:
        """In another dtype; from one precision to another nothing happens."""
        made = Ref(x.number, x.shape, dtype)
        return x if made.kind == x.kind else self("cast", x, dtype=dtype, dtype_=dtype)

    def matmul(self, a: Ref, b: Ref) -> Ref:
        """A matrix product, as NumPy has it."""
        left, right = a.shape[:-1], b.shape[-1:]
        if b.ndim == 1:
            shape: Sequence[int] = left
        elif a.ndim == 1:
            shape = (*b.shape[:-2], *right)
        else:
            shape = (*np.broadcast_shapes(a.shape[:-2], b.shape[:-2]), left[-1], *right)
        return self("matmul", a, b, shape=shape)

    def reduce(self, operation: str, x: Ref, axes: Any, keep: bool = False, **more: Any) -> Ref:
        """A reduction over axes; none means all."""
        axes = axes_of(x, axes)
        left = [(1 if a in axes else n) for a, n in enumerate(x.shape) if keep or a not in axes]
        dtype = "bool" if operation in ("any", "all") else None
        if x.kind == 3 and operation in ("norm", "variance", "deviation"):
            dtype = "float64"
        return self(operation, x, shape=left, dtype=dtype, axes=axes, keep=keep or None, **more)

    def total(self, x: Ref, axes: Any = None, keep: bool = False) -> Ref:
        """A sum over axes."""
        return self.reduce("sum", x, axes, keep)

    def mean(self, x: Ref, axes: Any = None, keep: bool = False) -> Ref:
        """A mean over axes."""
        return self.reduce("mean", x, axes, keep)

    def cut(self, x: Ref, axis: int, start: int, limit: int, stride: int = 1) -> Ref:
        """A part of one axis."""
        starts, limits, strides = [0] * x.ndim, list(x.shape), [1] * x.ndim
        starts[axis], limits[axis], strides[axis] = start, limit, stride
        return self.window(x, starts, limits, strides)

    def window(self, x: Ref, starts: Any, limits: Any, strides: Any) -> Ref:
        """A part of all axes."""
        shape = [max(0, -(-(b - a) // s)) for a, b, s in zip(starts, limits, strides, strict=True)]
        if tuple(shape) == x.shape:
            return x
        step = None if all(s == 1 for s in strides) else tuple(strides)
        bounds: dict[str, Any] = {"start": tuple(starts), "limit": tuple(limits), "stride": step}
        return self("slice", x, shape=shape, **bounds)

    def pad(self, x: Ref, low: Sequence[int], high: Sequence[int], value: Any = None) -> Ref:
        """Longer at the ends of its axes."""
        shape = [n + a + b for n, a, b in zip(x.shape, low, high, strict=True)]
        given: dict[str, Any] = {"low": tuple(low), "high": tuple(high), "value": value or None}
        return self("pad", x, shape=shape, **given)

    def take(self, x: Ref, *indices: Ref, axes: Sequence[int]) -> Ref:
        """Integer arrays at axes; their axes lead, the others follow."""
        lead = np.broadcast_shapes(*(i.shape for i in indices))
        rest = [n for a, n in enumerate(x.shape) if a not in axes]
        return self("index", x, *indices, shape=(*lead, *rest), dtype=x.dtype, axes=tuple(axes))


Translation = Callable[[Writer, Any], Any]


def enters(table: dict[str, Translation]) -> Callable[..., Callable[[Translation], Translation]]:
    """A decorator that enters a translation in a table under aten's names."""

    def operation(*names: str) -> Callable[[Translation], Translation]:
        def enter(translation: Translation) -> Translation:
            table.update(dict.fromkeys(names, translation))
            return translation

        return enter

    return operation


def as_said(w: Writer, o: Any) -> list[Ref | None] | None:
    """As the graph says it (`../operands.py`), where that is a word of the vocabulary.

    What comes out besides is held as it was if it is whole numbers; a word says all the rest.
    """
    operation, said = o.said()
    word = of_vocabulary(operation)
    operands = [w.ref(x) for x in o.operands()]
    if word is None or word.lower is None or not o.likes:
        return None
    known = {name.rstrip("?") for name in word.attributes}
    attributes = {key: x for key, x in o.usual().items() if key in known} | dict(said)
    if "dtype" not in known:
        attributes.pop("dtype", None)  # that of the result
    if not word.takes(len(operands), attributes):
        return None
    count = len(o.likes) if "*" in word.outputs else len(word.outputs.split()) or 1
    attributes = {f"{key}_": value for key, value in attributes.items()}
    made = w.node(operation, operands, o.likes[:count], **attributes)
    return [*made, *o.recorder.noted(o.outs[count:])]


def drawn(w: Writer, o: Any) -> Any:
    """A draw, with the value that was drawn."""
    held = o.recorder.constant(o.outs[0])
    value = o.recorder.writer.frames[0].pop().attributes["value"]
    shape, dtype = held.shape, o.likes[0][1]
    name = "m" if "bernoulli" in w.native else "ε"
    return w("random", shape=shape, dtype=dtype, name=name, value=value)


def axes_of(x: Ref, axes: Any) -> tuple[int, ...]:
    """Axes as the vocabulary counts them; None or none at all are all."""
    if axes is None or axes == [] or axes == ():
        return tuple(range(x.ndim))
    if isinstance(axes, int):
        axes = [axes]
    return tuple(sorted({a % max(1, x.ndim) for a in axes})) if x.ndim else ()
