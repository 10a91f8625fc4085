"""Canonical form of a graph: equal for equal computations, however their arrays are laid out.

Each value gets a *form*: the expression that it is, and where on its axes the expression's own
axes lie. So a transpose, a reshape that only merges or adds axes, and a broadcast are no
operations, they say which axis is which; and it shows what they are for: X @ W and X @ W.T
contract another axis of W. An operation that is made of others (softmax, relu, addmm) is written
as them. Two expressions are the same if and only if their numbers are.

With `loosely` sums and products are sorted and flattened, and differences and quotients are
written as them: what two frameworks write differently.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Mapping, Sequence
from math import isnan, prod
from typing import Any

import numpy as np

from gradtools.seeing.differences.canonical_forms import (
    CanonicalExpression,
    Expressions,
    Form,
    Labels,
    NoForm,
    operand,
    widened,
)
from gradtools.seeing.differences.canonical_rules import attributes_of, rule_of
from gradtools.seeing.graphs.attributes import is_number
from gradtools.seeing.graphs.nodes import Node, PlainGraph

BRANCHING = frozenset(
    ["scan", "while", "while_loop", "cond", "switch", "for", "map", "custom_linear_solve"]
)
_MARKS = ("custom rule", "edited gradient", "frozen", "chunked")
_TOLD_BY_NAME = ("discrete", "integer_cast", "zero_derivative")
_TOLD_BY_ITSELF = ("stop",)
_DRAWS = frozenset(
    [
        "random",
        "bernoulli",
        "normal",
        "uniform",
        "dropout",
        "random_bits",
        "random_wrap",
        "randint",
        "exponential",
    ]
)
_OF_ONE_ITSELF = frozenset(["sum", "mean", "prod", "max", "min", "logsumexp"])
_LUMPED = frozenset(
    ["scatter", "index", "update", "random", "dropout", "max_pool", "avg_pool", "callback"]
)


Parts = tuple[tuple[int, int, int], ...]  # start, limit and step along each axis


class Canonical:
    """The forms of a graph's values.

    Args:
        graph: The graph.
        expressions: The numbers, shared by the graphs that are compared.
        names: How inputs and captured values are called, by their number.
        loosely: As above.
        crossing: Whether it is compared to a graph of another framework, so that the widths of
            integers do not count.
        wrapping: Whether it counts that a negative index does not count from the end.
        tokens: For some nodes, by ``id``: from there on their results are only called this.
        apart: Of these, those whose results have nothing in common with what they are compared to.
    """

    def __init__(
        self,
        graph: PlainGraph,
        expressions: Expressions,
        names: Mapping[int, str],
        loosely: bool,
        tokens: Mapping[int, int] | None = None,
        apart: frozenset[int] = frozenset(),
        crossing: bool = False,
        wrapping: bool = True,
    ) -> None:
        self.graph, self.expressions, self.loosely = graph, expressions, loosely
        self.crossing, self.wrapping, self._here = crossing, wrapping, graph
        self._tokens, self._apart = tokens or {}, apart
        self._draws = 0
        self.steps: dict[int, tuple[Form, ...]] = {}  # by the id of a node, before its token
        self.operands: dict[int, list[Form]] = {}
        self.said: dict[int, Mapping[str, Any]] = {}  # of some nodes, in place of the attributes
        self.opaque: set[int] = set()  # what has no form of its own
        self.parts: dict[int, tuple[int, Sequence[Form]]] = {}  # of what is joined: axis, arrays
        self.slices: dict[int, tuple[Form, Form, Parts]] = {}  # of what is written to in part
        env: dict[int, Form] = {}
        for v in (*graph.inputs, *graph.captured):
            value = graph.values[v]
            leaf = ("leaf", names.get(v, value.name), self.dtype(value.dtype))
            env[v] = self._leaf(value.shape, value.name, leaf)
        self._run(graph, env)
        self.outputs = tuple(env[v] for v in graph.outputs)
        self.forms = env

    # --- the walk

    def _run(self, graph: PlainGraph, env: dict[int, Form]) -> None:
        around, self._here = self._here, graph
        self._walk(graph, env)
        self._here = around

    def _walk(self, graph: PlainGraph, env: dict[int, Form]) -> None:
        for node in graph.nodes:
            for v in node.inputs:
                if v not in env:  # it is made in a later pass
                    env[v] = self._leaf(graph.values[v].shape, "", ("later", v))
            given = [env[v] for v in node.inputs]
            shapes = [graph.values[v].shape for v in node.outputs]
            made = self._node(graph, node, given, shapes)
            self.steps[id(node)] = tuple(made)
            self.operands.setdefault(id(node), given)
            if id(node) in self._tokens:
                made = [self._renamed(node, k, form) for k, form in enumerate(made)]
            env.update(zip(node.outputs, made, strict=True))

    def _renamed(self, node: Node, k: int, form: Form) -> Form:
        name = ("step", self._tokens[id(node)], k)
        if id(node) in self._apart:
            return self._fresh(form.shape, name)
        return Form(self.expressions.number(name), form.sizes, form.dims, form.shape)

    def _leaf(self, shape: tuple[int, ...], name: str, leaf: Any) -> Form:
        if not shape and is_number(name):
            return self.number(complex(name) if "j" in name else float(name))
        return self._fresh(shape, leaf)

    def _fresh(self, shape: Sequence[int], name: Any) -> Form:
        """A value of which nothing more is known: its axes are those of the array."""
        sizes = tuple(n for n in shape if n != 1)
        axes = iter(range(len(sizes)))
        dims = tuple(() if n == 1 else (next(axes),) for n in shape)
        lengths = () if self._tokens else shape  # of a pair of steps it is told by itself
        return Form(self.expressions.number((*name, tuple(lengths))), sizes, dims, tuple(shape))

    def number(self, value: complex | float, shape: Sequence[int] = ()) -> Form:
        """A number, to five digits; one without a fraction as it is."""
        if isinstance(value, float):
            value = value if value.is_integer() else float(f"{value:.5g}")
            value = "nan" if isnan(value) else value  # type: ignore[assignment]
        key = self.expressions.number(("number", value))
        return Form(key, (), ((),) * len(shape), tuple(shape))

    def _node(
        self, graph: PlainGraph, node: Node, given: list[Form], shapes: list[tuple[int, ...]]
    ) -> list[Form]:
        if node.bodies and node.operation not in BRANCHING:
            return self._call(node, given, shapes)
        if node.bodies:
            return self._opaque(node, given, shapes, self._bodies(node))
        rule = None if node.mark in _MARKS else rule_of(node.operation, self.loosely)
        try:
            if rule is not None:
                result = rule(self, node, given, shapes[0])
                made = result if isinstance(result, list) else [result]
                if [form.shape for form in made] == shapes[: len(made)]:
                    rest = [
                        self._part(node, given, shapes, k) for k in range(len(made), len(shapes))
                    ]
                    return [self._told(node, graph, form, given) for form in made] + rest
        except (NoForm, KeyError, IndexError, TypeError, ValueError, StopIteration):
            pass  # it stands for itself
        return self._opaque(node, given, shapes)

    def _told(self, node: Node, graph: PlainGraph, form: Form, given: Sequence[Form]) -> Form:
        """A result with what else is to be compared of it: why it carries no derivative."""
        if node.loss is None or node.loss in _TOLD_BY_NAME or node.operation in _TOLD_BY_ITSELF:
            return form
        number = self.expressions.number(("loss", node.loss, form.key))
        return Form(number, form.sizes, form.dims, form.shape)

    def _call(self, node: Node, given: list[Form], shapes: list[tuple[int, ...]]) -> list[Form]:
        (body,) = [b for b in node.bodies if not b.gate][:1]
        env = self._captured(body.graph)
        env |= {v: given[i] for v, i in zip(body.graph.inputs, body.inputs, strict=True)}
        self._run(body.graph, env)
        if any(id(inner) in self.opaque for inner in body.graph.nodes):
            self.opaque.add(id(node))
        made = [env[v] for v in body.graph.outputs][: len(shapes)]
        if node.mark not in _MARKS:
            return made
        return [
            Form(self.expressions.number(("mark", node.mark, f.key)), f.sizes, f.dims, f.shape)
            for f in made
        ]

    def _bodies(self, node: Node) -> list[int]:
        """The programs inside, each as what it makes of what enters."""
        result: list[int] = []
        for body in node.bodies:
            env = self._captured(body.graph)
            for place, v in enumerate(body.graph.inputs):
                env[v] = self._fresh(body.graph.values[v].shape, ("enters", place))
            self._run(body.graph, env)
            result += [self._whole(env[v]) for v in body.graph.outputs]
        return result

    def _captured(self, graph: PlainGraph) -> dict[int, Form]:
        held = {v: graph.values[v] for v in graph.captured}
        return {v: self._leaf(x.shape, x.name, ("leaf", x.name)) for v, x in held.items()}

    def _whole(self, form: Form) -> int:
        """A value with all that is known of its arrangement, as one number."""
        return self.expressions.number((form.key, form.dims, form.shape))

    def _opaque(
        self,
        node: Node,
        given: list[Form],
        shapes: list[tuple[int, ...]],
        bodies: Sequence[int] = (),
    ) -> list[Form]:
        self.opaque.add(id(node))
        if node.operation in _DRAWS:
            self._draws += 1
        draw = self._draws if node.operation in _DRAWS else 0
        named = node.operation if node.operation not in _LUMPED else node.native.strip("_")
        loss = None if node.loss in _TOLD_BY_NAME else node.loss
        more = (("bodies", tuple(bodies)), ("draw", draw), ("loss", loss), ("mark", node.mark))
        told = (*attributes_of(node), *((name, value) for name, value in more if value))
        keys = [self.of_whole(named, [*told, ("result", r)], given) for r in enumerate(shapes)]
        return [self.fresh_axes(key, shape) for key, shape in zip(keys, shapes, strict=True)]

    def _part(self, node: Node, given: list[Form], shapes: list[tuple[int, ...]], k: int) -> Form:
        """What comes out besides: that is opaque, the node is not."""
        result = self._opaque(node, given, shapes)[k]
        self.opaque.discard(id(node))
        return result

    # --- what the rules below write with

    def fresh_axes(self, key: int, shape: Sequence[int]) -> Form:
        """An expression whose axes are those of the array."""
        result = self._fresh(shape, ("axes",))
        return Form(key, result.sizes, result.dims, result.shape)

    def held(self, node: Node, shape: tuple[int, ...]) -> Form:
        """A small array of known numbers, as one that is captured is told."""
        return self._leaf(shape, "", ("leaf", node.attributes["value"], self.dtype_made(node)))

    def dtype(self, name: str) -> str:
        """A dtype's name; the widths of integers differ from framework to framework."""
        return "int" if self.crossing and name.startswith("int") else name

    def dtype_of(self, node: Node, place: int) -> str:
        """The dtype of an operand."""
        return self.dtype(self._here.values[node.inputs[place]].dtype)

    def dtype_made(self, node: Node) -> str:
        """The dtype of what a node makes first."""
        return self.dtype(self._here.values[node.outputs[0]].dtype)

    def tell(self, node: Node, operands: Sequence[Form], said: Mapping[str, Any]) -> None:
        """What a person is told of a node, where its own operands and attributes are another's."""
        self.operands[id(node)], self.said[id(node)] = [*operands], said

    def joined(self, axis: int, given: Sequence[Form], shape: Sequence[int]) -> Form:
        """Arrays one after the other."""
        key = self.of_whole("concatenate", [("axis", axis)], given)
        self.parts[key] = axis, given
        return self.fresh_axes(key, shape)

    def counting(self, shape: Sequence[int], axis: int, dtype: str = "int") -> Form:
        """0, 1, 2, .. along an axis."""
        n = shape[axis]
        told = (("length", n), *((("dtype", dtype),) if "int" not in dtype else ()))
        key = self.expressions.number(CanonicalExpression("iota", told, ()))
        dims = tuple((0,) if p == axis and n != 1 else () for p in range(len(shape)))
        return Form(key, (n,) if n != 1 else (), dims, tuple(shape))

    def written_at(self, x: Form, parts: Parts) -> Form | None:
        """What was written last to a slice, if it is just this one."""
        _, update, at = self.slices.get(x.key, (x, x, ()))
        plain = x.dims == self.fresh_axes(x.key, x.shape).dims
        return update if at == parts and plain else None

    def elementwise(
        self, operation: str, given: Sequence[Form], attributes: Any = (), commutes: bool = False
    ) -> Form:
        """An operation on each element; axes that lie on the same axis of the result are one."""
        shape = np.broadcast_shapes(*(form.shape for form in given))
        rank = len(shape)
        places = [range(rank - len(form.shape), rank) for form in given]
        pairs = [*zip(self.aligned(given, places), places, strict=True)]
        if commutes:
            pairs.sort(key=lambda pair: (pair[0].key, pair[0].dims))
        labels = Labels(pairs)
        expression = CanonicalExpression(operation, tuple(attributes), tuple(labels.operands))
        number = self.expressions.number(expression)
        return labels.form(number, range(len(labels.sizes)), range(rank), shape)

    def combined(self, operation: str, a: Form, b: Form) -> Form:
        """The sum, difference, product, maximum or minimum of two."""
        if operation == "subtract" and self.loosely:
            return self.flat("add", [a, self.flat("multiply", [b, self.number(-1.0)])])
        if operation in ("add", "multiply"):
            return self.flat(operation, [a, b])
        return self.elementwise(operation, [a, b], (), operation != "subtract")

    def flat(self, operation: str, given: Sequence[Form]) -> Form:
        """A sum or product; loosely, those inside are opened and numbers put together."""
        if not self.loosely:
            return self.elementwise(operation, given, (), True)
        shape = np.broadcast_shapes(*(form.shape for form in given))
        parts = [part for form in given for part in self._opened(operation, form)]
        values = [self.expressions.value(p.key) for p in parts]
        rest = [p for p, v in zip(parts, values, strict=True) if not isinstance(v, float)]
        rest = self._counted(rest) if operation == "multiply" else rest
        numbers = [v for v in values if isinstance(v, float)]
        neutral = 0.0 if operation == "add" else 1.0
        total = sum(numbers) if operation == "add" else prod(numbers)
        if total != neutral or not rest:
            rest.append(self.number(float(total)))
        (x, *others) = rest
        result = self.elementwise(operation, rest, (), True) if others else x
        return widened(result, shape)

    def _counted(self, factors: Sequence[Form]) -> list[Form]:
        """Factors that occur several times as powers."""
        counts = Counter(factors)
        power = lambda x, n: self.elementwise("power", [x, self.number(float(n))])
        return [x if n == 1 else power(x, n) for x, n in counts.items()]

    def _opened(self, operation: str, form: Form) -> list[Form]:
        """The terms of a sum, the factors of a product."""
        expression = self.expressions.known[form.key]
        if not isinstance(expression, CanonicalExpression) or expression.operation != operation:
            return [form]
        result = []
        for place, (_, labels) in enumerate(expression.operands):
            if any(0 < sum(a in labels for a in axes) < len(axes) for axes in form.dims):
                return [form]  # part of a merged axis
            result.append(operand(form, place, expression))
        return result

    def aligned(self, forms: Sequence[Form], names: Sequence[Sequence[Hashable]]) -> list[Form]:
        """What is merged in one operand is split in the others that share the axis, by name."""
        lengths: dict[Hashable, tuple[int, ...]] = {}
        for form, named in zip(forms, names, strict=True):
            for axes, name in zip(form.dims, named, strict=True):
                result = tuple(form.sizes[a] for a in axes)
                if len(result) > len(lengths.get(name, ())):
                    lengths[name] = result
        return [
            self.split(form, {p: lengths.get(name, ()) for p, name in enumerate(named)})
            for form, named in zip(forms, names, strict=True)
        ]

    def split(self, form: Form, lengths: Mapping[int, tuple[int, ...]]) -> Form:
        """A value with some of its axes split in parts of these lengths."""
        for p, parts in lengths.items():
            axes = form.dims[p]
            if not axes or len(parts) < 2 or tuple(form.sizes[a] for a in axes) == parts:
                continue
            if len(axes) > 1 or prod(parts) != form.sizes[axes[0]]:
                raise NoForm
            form = self._split_one(form, p, parts)
        return form

    def _split_one(self, form: Form, place: int, parts: tuple[int, ...]) -> Form:
        (axis,) = form.dims[place]
        key = self.expressions.number(
            CanonicalExpression("split", (("axis", axis), ("parts", parts)), ((form.key, ()),))
        )
        more = len(parts) - 1
        moved = lambda a: a if a < axis else a + more
        sizes = (*form.sizes[:axis], *parts, *form.sizes[axis + 1 :])
        dims = [tuple(map(moved, axes)) for axes in form.dims]
        dims[place] = tuple(range(axis, axis + len(parts)))
        return Form(key, sizes, tuple(dims), form.shape)

    def reduced(
        self, operation: str, x: Form, axes: Iterable[int], keep: bool = False, attributes: Any = ()
    ) -> Form:
        """An operation over some axes."""
        gone = {p % max(1, len(x.shape)) for p in axes} if x.shape else set()
        removed = {a for p in gone for a in x.dims[p]}
        repeats = prod(x.shape[p] for p in gone if not x.dims[p])
        left = [a for a in range(len(x.sizes)) if a not in removed]
        number = {a: i for i, a in enumerate(left)}
        told = (*attributes, ("axes", tuple(sorted(removed))))
        told += (("repeats", repeats),) if repeats != 1 else ()
        if not removed and repeats == 1 and operation in _OF_ONE_ITSELF:
            key = x.key
        else:
            key = self.expressions.number(CanonicalExpression(operation, told, ((x.key, ()),)))
        places = [p for p in range(len(x.shape)) if keep or p not in gone]
        dims = tuple(() if p in gone else tuple(number[a] for a in x.dims[p]) for p in places)
        shape = tuple(1 if p in gone else x.shape[p] for p in places)
        return Form(key, tuple(x.sizes[a] for a in left), dims, shape)

    def of_whole(self, operation: str, attributes: Any, given: Sequence[Form]) -> int:
        """The number of an operation on whole arrays, as they are arranged."""
        operands = tuple((self._whole(form), ()) for form in given)
        return self.expressions.number(CanonicalExpression(operation, tuple(attributes), operands))

    def along(self, operation: str, x: Form, axis: int, attributes: Any = ()) -> Form:
        """An operation along one axis that stays."""
        axes = x.dims[axis]
        if not axes and x.shape[axis] != 1:
            raise NoForm
        told = (*attributes, ("axes", axes))
        key = self.expressions.number(CanonicalExpression(operation, told, ((x.key, ()),)))
        return Form(key, x.sizes, x.dims, x.shape)

    def sliced(self, x: Form, place: int, start: int, limit: int, stride: int) -> Form:
        """Some entries along one axis; a slice of a slice is a slice."""
        count = len(range(start, limit, stride))
        shape = (*x.shape[:place], count, *x.shape[place + 1 :])
        if not x.dims[place]:
            return Form(x.key, x.sizes, x.dims, shape)
        (axis,) = x.dims[place]
        of, inner = x.key, self.expressions.known[x.key]
        if isinstance(inner, CanonicalExpression) and inner.operation == "slice":
            ((_, (along, first, length, step)),) = inner.attributes
            if along == axis and length != 1:
                start, stride, of = first + start * step, stride * step, inner.operands[0][0]
        at = (axis, start, count, stride if count > 1 else 1)
        key = self.expressions.number(CanonicalExpression("slice", (("at", at),), ((of, ()),)))
        left = [i for i in range(len(x.sizes)) if i != axis or count != 1]
        number = {i: k for k, i in enumerate(left)}
        sizes = tuple(count if i == axis else x.sizes[i] for i in left)
        dims = tuple(tuple(number[i] for i in axes if i in number) for axes in x.dims)
        return Form(key, sizes, dims, shape)

    def contracted(self, subscripts: str, *given: Form) -> Form:
        """A sum of products, as einsum says it."""
        inside, out = subscripts.split("->")
        names = inside.split(",")
        pairs = zip(self.aligned(given, names), names, strict=True)
        labels = Labels(sorted(pairs, key=lambda pair: pair[0].key))
        kept = [k for (name, _), k in labels.numbers.items() if name in out]
        shapes = {
            c: n
            for form, letters in zip(given, names, strict=True)
            for c, n in zip(letters, form.shape, strict=True)
            if n != 1
        }
        repeats = prod(n for c, n in shapes.items() if c not in out and not labels.of(c))
        told = (("out", tuple(kept)), *((("repeats", repeats),) if repeats != 1 else ()))
        expression = CanonicalExpression("matmul", told, tuple(labels.operands))
        shape = [shapes.get(c, 1) for c in out]
        return labels.form(self.expressions.number(expression), kept, out, shape)

    def reshaped(self, x: Form, shape: tuple[int, ...]) -> Form:
        """Axes merged, added and taken off; one that is split is a split expression."""
        if 0 in x.sizes or any(n != 1 and not x.dims[p] for p, n in enumerate(x.shape)):
            return self._reshaped_repeats(x, shape)
        order = [a for axes in x.dims for a in axes]
        dims: list[tuple[int, ...]] = []
        form, at = x, 0
        for n in shape:
            taken: list[int] = []
            while (size := prod(form.sizes[a] for a in taken)) < n:
                if form.sizes[order[at]] > n // size:
                    form, order = self._split_axis(form, order, at, n // size)
                taken.append(order[at])
                at += 1
            if size != n:
                raise NoForm
            dims.append(tuple(taken))
        return Form(form.key, form.sizes, tuple(dims), shape)

    def _split_axis(
        self, form: Form, order: list[int], at: int, first: int
    ) -> tuple[Form, list[int]]:
        axis = order[at]
        if first < 1 or form.sizes[axis] % first:
            raise NoForm
        parts = (first, form.sizes[axis] // first)
        flat = Form(form.key, form.sizes, tuple((a,) for a in range(len(form.sizes))), form.sizes)
        made = self._split_one(flat, axis, parts)
        moved = [a if a <= axis else a + 1 for a in order]
        return Form(made.key, made.sizes, (), ()), [*moved[: at + 1], axis + 1, *moved[at + 1 :]]

    def _reshaped_repeats(self, x: Form, shape: tuple[int, ...]) -> Form:
        """What repeats along some axes: those may be taken off, added and moved among ones."""
        if not x.sizes:
            return Form(x.key, (), ((),) * len(shape), shape)
        old = [(x.dims[p], n) for p, n in enumerate(x.shape) if n != 1]
        if [n for _, n in old] != [n for n in shape if n != 1]:
            raise NoForm
        left = iter(old)
        dims = tuple(() if n == 1 else next(left)[0] for n in shape)
        return Form(x.key, x.sizes, dims, shape)
