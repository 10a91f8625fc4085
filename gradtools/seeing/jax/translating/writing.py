"""`Writer`: the formula's graph while a jaxpr is translated, and what is known of its values.

A value is either the number of a node's result or `Known`. Numbers have a form in mathematics
from the start (`Builder`), so what they are at the program's leaves can be computed in NumPy
whenever it is asked: whether an index lies within bounds, what a random key is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from gradtools.seeing.formulas.evaluation import evaluate
from gradtools.seeing.formulas.expressions import Expr, kind_of, order, placeholder
from gradtools.seeing.formulas.graph_builder import Builder
from gradtools.seeing.graphs.nodes import Node, PlainGraph, Value, needed
from gradtools.seeing.jax import source_lines
from gradtools.seeing.jax.translating.folding import function_of, pullback_of


@dataclass(frozen=True, eq=False)
class Known:
    """A value that no argument has part in.

    Attributes:
        value: An array of NumPy's, or of JAX's for random keys.
        drawn: What a random draw is called; empty for a constant.
    """

    value: Any
    drawn: str = ""


Entry = int | Known


class Writer(Builder):
    """A graph that is being written, that of a body too."""

    def __init__(
        self, depth: int = 0, inside: bool = False, narrow: list[str] | None = None
    ) -> None:
        super().__init__()
        self.depth = depth  # how many backward programs of rules are around
        self.narrow = [] if narrow is None else narrow  # dtypes computed in, short of double
        self._inside = inside  # of a node, where nothing can be captured
        self._held: dict[int, Entry] = {}
        self.arrays: dict[int, Any] = {}
        self._constants: dict[int, np.ndarray] = {}
        self._read_as: dict[Known, int] = {}
        self._given: dict[Expr, Any] = {}
        self._makers: dict[int, Node] = {}

    @property
    def narrowest(self) -> str:
        """The dtype of least precision that something is computed in, if less than double."""
        return min(self.narrow, key=lambda name: jnp.finfo(name).bits, default="")

    # --- leaves

    def leaf(self, name: str, x: Any) -> Entry:
        """An argument's leaf. A random key is an input too, but is read as the key that it is."""
        if is_key(x):
            self._inputs.append(self._leaf(name, jax.random.key_data(x).shape, "uint32"))
            return Known(x)
        number = self.input(name, x.shape, str(x.dtype))
        self._given[self._known[number]] = x
        return number

    def _leaf(self, name: str, shape: Sequence[int], dtype: str) -> int:
        number = super()._leaf(name, shape, dtype)
        self._values[number] = Value(tuple(shape), dtype, name)
        return number

    def held(self, x: Any, name: str = "") -> Entry:
        """An array that the program holds; one that is no number to differentiate is known."""
        if id(x) not in self._held:
            self._held[id(x)] = self.new(x, name)
        return self._held[id(x)]

    def new(self, x: Any, name: str = "") -> Entry:
        """An array that the program is seen to hold for the first time."""
        if is_key(x) or x.dtype == np.uint32:
            return Known(x)
        if self._inside or not (name or jnp.issubdtype(x.dtype, jnp.inexact)):
            return Known(np.asarray(x))
        number = self.captured(name, x.shape, str(x.dtype))
        self.arrays[number] = x
        self._given[self._known[number]] = x
        return number

    def number(self, entry: Entry) -> int:
        """The value's number; what is known becomes a node."""
        if isinstance(entry, int):
            return entry
        if entry not in self._read_as:
            self._read_as[entry] = self._drawn(entry) if entry.drawn else self.constant(entry.value)
        return self._read_as[entry]

    def constant(self, value: Any) -> int:
        """A node ``constant``."""
        value = np.asarray(value)
        if jnp.issubdtype(value.dtype, jnp.floating):
            value = value.astype(np.float64)
        number = self("constant", value=value)
        self._constants[number] = value
        return number

    def _drawn(self, entry: Known) -> int:
        value = np.asarray(entry.value)
        draw = placeholder(entry.drawn, value.shape, kind_of(value.dtype))
        self._given[draw] = value
        return self._node("random", (), draw, {"name": entry.drawn, "value": value})

    # --- what is asked of values

    def value(self, number: int) -> np.ndarray | None:
        """The array, if it is a constant."""
        return self._constants.get(number)

    def scalar(self, number: int) -> Any:
        """The number that a constant is in each place, or None."""
        value = self.value(number)
        if value is None or not value.size or not np.all(value == value.flat[0]):
            return None
        return value.flat[0].item()

    def concrete(self, number: int) -> np.ndarray | None:
        """What the value is at the program's leaves; None where that is not known, as in loops."""
        if number in self._constants:
            return self._constants[number]
        x = self._known[number]
        if any(e.op == "placeholder" and e not in self._given for e in order([x])):
            return None
        leaves = {e: self._given[e] for e in order([x]) if e.op == "placeholder"}
        return evaluate([x], leaves)[0]

    def is_boolean(self, number: int) -> bool:
        """Whether its entries are truth values."""
        return self._values[number].dtype == "bool"

    def is_inexact(self, number: int) -> bool:
        """Whether it is floating or complex."""
        return self._values[number].is_inexact

    def is_zero(self, number: int) -> bool:
        """Whether it is a constant of zeros."""
        return self.scalar(number) == 0

    def kind_is(self, number: int, dtype: str) -> bool:
        """Whether it is an array of this kind already: real, complex, integer, boolean."""
        return kind_of(self._values[number].dtype) == kind_of(dtype)

    def itemsize(self, number: int) -> int:
        """How many bytes an entry takes in the program."""
        return jnp.dtype(self._values[number].dtype).itemsize

    def made_by(self, number: int) -> str:
        """The operation that made it."""
        node = self._makers.get(number)
        return node.operation if node is not None else ""

    def counts_along(self, number: int, axis: int) -> bool:
        """Whether it is 0, 1, 2, ... along an axis."""
        value = self.value(number)
        if value is None:
            return False
        lie = [n if a == axis else 1 for a, n in enumerate(value.shape)]
        return bool(
            np.array_equal(
                value, np.broadcast_to(np.arange(value.shape[axis]).reshape(lie), value.shape)
            )
        )

    def is_wrapped_index(self, negative: int, i: int, wrapped: int) -> bool:
        """Whether it is the i of ``where(i < 0, i + n, i)``, and not negative."""
        test, add = self._makers.get(negative), self._makers.get(wrapped)
        if test is None or add is None or add.operation != "add" or self.is_inexact(i):
            return False
        caller = test.operation == "compare" and test.attributes["relation"] == "<"
        if (
            not caller
            or test.inputs[0] != i
            or i not in add.inputs
            or not self.is_zero(test.inputs[1])
        ):
            return False
        known = self.concrete(i)
        return known is None or bool(np.all(known >= 0))

    def within(self, i: int, most: int) -> int:
        """An index as JAX reads it: cut to what is there. Where it lies inside it stays itself."""
        known = self.concrete(i)
        if known is None or bool(np.all((known >= 0) & (known <= most))):
            return i
        if i in self._constants:
            return self.constant(np.clip(known, 0, most))
        return self("clip", i, low=0, high=most)

    def parts_of(self, number: int) -> tuple[int, ...] | None:
        """The parts of a value that was put together along its last axis."""
        node = self._makers.get(number)
        if node is None or node.operation != "concatenate":
            return None
        last = len(self.shape(number)) - 1
        single = all(self.shape(v)[last] == 1 for v in node.inputs)
        return node.inputs if node.attributes["axis"] == last and single else None

    def folded(self, operation: str, *xs: int) -> int:
        """An operation, of constants a constant."""
        result = self(operation, *xs)
        if all(x in self._constants for x in xs):
            return self.constant(evaluate([self._known[result]], {})[0])
        return result

    def before_symmetrizing(self, number: int) -> int:
        """The a of (a + a^H) / 2, or the value itself."""
        half = self._makers.get(number)
        if half is None or half.operation != "divide" or self.scalar(half.inputs[1]) != 2:
            return number
        both = self._makers.get(half.inputs[0])
        return both.inputs[0] if both is not None and both.operation == "add" else number

    # --- nodes

    def _node(
        self, operation: Any, inputs: Any, results: Any, attributes: Any, bodies: Any = ()
    ) -> Any:
        result = super()._node(operation, inputs, results, attributes, bodies)
        node = self._nodes[-1]
        self._makers.update(dict.fromkeys(node.outputs, node))
        return result

    def marked(self, eqn: Any, name: str, xs: Sequence[int]) -> list[int]:
        """An equation without a translation: its name, and how JAX computes it."""
        outs = [placeholder("", v.aval.shape, kind_of(v.aval.dtype)) for v in eqn.outvars]
        attributes = {"function": function_of(eqn), "adjoint": pullback_of(eqn)}
        result = list(self._node(name, tuple(xs), outs, attributes))
        self._nodes[-1] = replace(self._nodes[-1], native=name)
        return result

    def tell(self, eqn: Any, first: int, results: Sequence[int]) -> None:
        """The new nodes' native name and line, and the dtypes of their results."""
        native, line = eqn.primitive.name, source_lines.source(eqn)
        for k in range(first, len(self._nodes)):
            node = self._nodes[k]
            self._nodes[k] = replace(node, native=node.native or native, source=line)
            self._makers.update(dict.fromkeys(node.outputs, self._nodes[k]))
        made = {v for node in self._nodes[first:] for v in node.outputs}
        for number, var in zip(results, eqn.outvars, strict=True):
            self._check(eqn, number, var.aval)
            if var.aval.dtype in _NARROW and native not in _EXACT:
                self.narrow.append(str(var.aval.dtype))
            if number in made:
                self._values[number] = Value(tuple(var.aval.shape), str(var.aval.dtype))

    def _check(self, eqn: Any, number: int, aval: Any) -> None:
        if self.shape(number) != tuple(aval.shape):
            raise AssertionError(
                f"{eqn.primitive.name} was translated to shape {self.shape(number)}, not {aval}"
            )

    def graph(self, *outputs: int) -> PlainGraph:
        """The program, without what no output reads."""
        result = super().graph(*outputs)
        nodes = tuple(result.nodes[i] for i in needed(result.nodes, outputs))
        used = {v for node in nodes for v in node.inputs}.union(outputs)
        captured = tuple(v for v in result.captured if v in used)
        self.arrays = {v: self.arrays[v] for v in captured}
        return replace(result, nodes=nodes, captured=captured)


_NARROW = (jnp.float32, jnp.complex64, jnp.float16, jnp.bfloat16)
_EXACT = (
    *("transpose", "reshape", "squeeze", "broadcast_in_dim", "slice", "concatenate", "stack"),
    *("gather", "rev", "pad", "neg", "copy", "stop_gradient", "dynamic_slice", "split"),
)


def is_key(x: Any) -> bool:
    """Whether it is an array of random keys."""
    return jnp.issubdtype(x.dtype, jax.dtypes.prng_key)


__all__ = ["Entry", "Known", "Writer", "is_key"]
