"""What a program computes, whatever its arrays look like on the way: a canonical form of a graph.

Each value gets a *form*: the expression that it is, and where on its axes the expression's own
axes lie. So a transpose, a reshape that only merges or adds axes, and a broadcast are no
operations, they say which axis is which; and it shows what they are for: X @ W and X @ W.T
contract another axis of W. An operation that is made of others (softmax, relu, addmm) is written
as them. Two expressions are the same if and only if their numbers are.

With `loosely` sums and products are sorted and flattened, and differences and quotients are
written as them: what two frameworks write differently.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import inf, isnan, prod
from operator import eq, le, lt, ne
from string import ascii_letters
from typing import Any

from gradtools.seeing.attributes import is_number
from gradtools.seeing.graph import Body, Graph, Node

Dims = tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class Form:
    """A value: an expression, by number, and which of its axes lie on each axis of the array.

    Attributes:
        key: The expression's number.
        sizes: The lengths of the expression's axes.
        dims: For each axis of the array the axes of the expression that are merged in it, in
            order; none where the array only repeats.
        shape: The array's shape.
    """

    key: int
    sizes: tuple[int, ...]
    dims: Dims
    shape: tuple[int, ...]


@dataclass(frozen=True)
class CanonicalExpression:
    """An expression: an operation, what makes it what it is, and its operands.

    Each operand is a number with the labels of its axes: the same label, the same axis.
    """

    operation: str
    attributes: tuple[tuple[str, Any], ...]
    operands: tuple[tuple[int, tuple[int, ...]], ...]


class Expressions:
    """Numbers for expressions: equal ones have the same."""

    def __init__(self) -> None:
        self._numbers: dict[Any, int] = {}
        self.known: list[Any] = []

    def number(self, expression: Any) -> int:
        """The number of an expression."""
        if expression not in self._numbers:
            self._numbers[expression] = len(self.known)
            self.known.append(expression)
        return self._numbers[expression]

    def value(self, key: int) -> complex | float | None:
        """The number that an expression is, if it is one."""
        expression = self.known[key]
        is_number = isinstance(expression, tuple) and expression[0] == "number"
        return expression[1] if is_number else None


class _NoForm(Exception):
    """An operation on axes that only a whole array has."""


class Canonical:
    """The forms of a graph's values.

    Args:
        graph: The graph.
        expressions: The numbers, shared by the graphs that are compared.
        names: How inputs and captured values are called, by their number.
        loosely: As above.
        tokens: For some nodes, by ``id``: from there on their results are only called this.
        apart: Of these, those whose results have nothing in common with what they are compared to.
    """

    def __init__(
        self,
        graph: Graph,
        expressions: Expressions,
        names: Mapping[int, str],
        loosely: bool,
        tokens: Mapping[int, int] | None = None,
        apart: frozenset[int] = frozenset(),
    ) -> None:
        self.graph, self.expressions, self.loosely = graph, expressions, loosely
        self._tokens, self._apart = tokens or {}, apart
        self._draws = 0
        self.steps: dict[int, tuple[Form, ...]] = {}  # by the id of a node, before its token
        self.operands: dict[int, list[Form]] = {}
        self.opaque: set[int] = set()  # what has no form of its own
        env: dict[int, Form] = {}
        for v in (*graph.inputs, *graph.captured):
            value = graph.values[v]
            leaf = ("leaf", names.get(v, value.name), value.dtype)
            env[v] = self._leaf(value.shape, value.name, leaf)
        self._run(graph, env)
        self.outputs = tuple(env[v] for v in graph.outputs)
        self.forms = env

    # --- the walk

    def _run(self, graph: Graph, env: dict[int, Form]) -> None:
        for node in graph.nodes:
            for v in node.inputs:
                if v not in env:  # it is made in a later pass
                    env[v] = self._leaf(graph.values[v].shape, "", ("later", v))
            given = [env[v] for v in node.inputs]
            shapes = [graph.values[v].shape for v in node.outputs]
            made = self._node(graph, node, given, shapes)
            self.steps[id(node)], self.operands[id(node)] = tuple(made), given
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
            return self._number(complex(name) if "j" in name else float(name))
        return self._fresh(shape, leaf)

    def _fresh(self, shape: Sequence[int], name: Any) -> Form:
        """A value of which nothing more is known: its axes are those of the array."""
        sizes = tuple(n for n in shape if n != 1)
        axes = iter(range(len(sizes)))
        dims = tuple(() if n == 1 else (next(axes),) for n in shape)
        lengths = () if self._tokens else shape  # of a pair of steps it is told by itself
        return Form(self.expressions.number((*name, tuple(lengths))), sizes, dims, tuple(shape))

    def _number(self, value: complex | float, shape: Sequence[int] = ()) -> Form:
        if isinstance(value, float):
            value = float(f"{value:.5g}")
            value = "nan" if isnan(value) else value  # type: ignore[assignment]
        key = self.expressions.number(("number", value))
        return Form(key, (), ((),) * len(shape), tuple(shape))

    def _node(
        self, graph: Graph, node: Node, given: list[Form], shapes: list[tuple[int, ...]]
    ) -> list[Form]:
        if node.bodies and node.operation not in BRANCHING:
            return self._call(node, given, shapes)
        if node.bodies:
            return self._opaque(node, given, shapes, self._bodies(node))
        rule = None if node.mark in _MARKS else _RULES.get(node.operation)
        try:
            if rule is not None:
                made = rule(self, node, given, shapes[0])
                if [form.shape for form in made] == shapes[: len(made)]:
                    rest = [
                        self._part(node, given, shapes, k) for k in range(len(made), len(shapes))
                    ]
                    return [self._told(node, graph, form, given) for form in made] + rest
        except (_NoForm, KeyError, IndexError, TypeError, ValueError, StopIteration):
            pass  # it stands for itself
        return self._opaque(node, given, shapes)

    def _told(self, node: Node, graph: Graph, form: Form, given: Sequence[Form]) -> Form:
        """A result with what else is to be compared of it: why it carries no derivative."""
        if node.loss is None or node.loss in _TOLD_BY_NAME or node.operation in _TOLD_BY_ITSELF:
            return form
        number = self.expressions.number(("loss", node.loss, form.key))
        return Form(number, form.sizes, form.dims, form.shape)

    def _call(self, node: Node, given: list[Form], shapes: list[tuple[int, ...]]) -> list[Form]:
        (body,) = [b for b in node.bodies if not b.gate][:1]
        env = {v: given[i] for v, i in zip(body.graph.inputs, body.inputs, strict=True)}
        for v in body.graph.captured:
            value = body.graph.values[v]
            env.setdefault(v, self._leaf(value.shape, value.name, ("leaf", value.name)))
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
        found: list[int] = []
        for body in node.bodies:
            env = self._entering(body)
            self._run(body.graph, env)
            found += [self._whole(env[v]) for v in body.graph.outputs]
        return found

    def _entering(self, body: Body) -> dict[int, Form]:
        env = {}
        for place, v in enumerate(body.graph.inputs):
            env[v] = self._fresh(body.graph.values[v].shape, ("enters", place))
        for v in body.graph.captured:
            value = body.graph.values[v]
            env[v] = self._leaf(value.shape, value.name, ("leaf", value.name))
        return env

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
        more = (("bodies", tuple(bodies)), ("draw", draw), ("loss", node.loss), ("mark", node.mark))
        told = (*attributes_of(node), *((name, value) for name, value in more if value))
        operands = tuple((self._whole(form), ()) for form in given)
        made = []
        for k, shape in enumerate(shapes):
            fresh = self._fresh(shape, ("fresh", k))
            key = self.expressions.number(
                CanonicalExpression(named, (*told, ("result", (k, shape))), operands)
            )
            made.append(Form(key, fresh.sizes, fresh.dims, fresh.shape))
        return made

    def _part(self, node: Node, given: list[Form], shapes: list[tuple[int, ...]], k: int) -> Form:
        return self._opaque(node, given, shapes)[k]

    # --- what the rules below write with

    def fresh_axes(self, key: int, shape: Sequence[int]) -> Form:
        """An expression whose axes are those of the array."""
        found = self._fresh(shape, ("axes",))
        return Form(key, found.sizes, found.dims, found.shape)

    def joined(self, axis: int, given: Sequence[Form], shape: Sequence[int]) -> Form:
        """Arrays one after the other."""
        operands = tuple((self._whole(form), ()) for form in given)
        key = self.expressions.number(
            CanonicalExpression("concatenate", (("axis", axis),), operands)
        )
        return self.fresh_axes(key, shape)

    def elementwise(
        self, operation: str, given: Sequence[Form], attributes: Any = (), commutes: bool = False
    ) -> Form:
        """An operation on each element; axes that lie on the same axis of the result are one."""
        rank = max(len(form.shape) for form in given)
        shape = [1] * rank
        for form in given:
            for p, n in enumerate(form.shape, rank - len(form.shape)):
                shape[p] = n if shape[p] == 1 else shape[p]
        given = self._aligned(given, rank)
        if commutes:
            given = sorted(given, key=lambda form: (form.key, form.dims))
        labels: dict[tuple[int, int], int] = {}
        sizes: list[int] = []
        operands = []
        for form in given:
            where = self._where(form, rank)
            for axis in range(len(form.sizes)):
                if where[axis] not in labels:
                    labels[where[axis]] = len(labels)
                    sizes.append(form.sizes[axis])
            operands.append((form.key, tuple(labels[where[a]] for a in range(len(form.sizes)))))
        dims = tuple(tuple(labels[q, j] for q, j in sorted(labels) if q == p) for p in range(rank))
        expression = CanonicalExpression(operation, tuple(attributes), tuple(operands))
        key = self.expressions.number(expression)
        return Form(key, tuple(sizes), dims, tuple(shape))

    def _where(self, form: Form, rank: int) -> dict[int, tuple[int, int]]:
        """For each axis of an expression the axis of the result, and the place in it."""
        shift = rank - len(form.shape)
        return {a: (p + shift, j) for p, axes in enumerate(form.dims) for j, a in enumerate(axes)}

    def _aligned(self, given: Sequence[Form], rank: int) -> list[Form]:
        """What is merged in one operand is split in the others."""
        lengths: dict[int, tuple[int, ...]] = {}
        for form in given:
            for p, axes in enumerate(form.dims, rank - len(form.shape)):
                parts = tuple(form.sizes[a] for a in axes)
                if len(parts) > len(lengths.get(p, ())):
                    lengths[p] = parts
        return [self.split(form, lengths, rank - len(form.shape)) for form in given]

    def split(self, form: Form, lengths: Mapping[int, tuple[int, ...]], shift: int = 0) -> Form:
        """A value with some of its axes split in parts of these lengths."""
        for p in range(len(form.dims)):
            axes, parts = form.dims[p], lengths.get(p + shift, ())
            if not axes or len(parts) < 2 or tuple(form.sizes[a] for a in axes) == parts:
                continue
            if len(axes) > 1 or prod(parts) != form.sizes[axes[0]]:
                raise _NoForm
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
        if not removed and repeats == 1:
            key = x.key
        else:
            key = self.expressions.number(CanonicalExpression(operation, told, ((x.key, ()),)))
        places = [p for p in range(len(x.shape)) if keep or p not in gone]
        dims = tuple(() if p in gone else tuple(number[a] for a in x.dims[p]) for p in places)
        shape = tuple(1 if p in gone else x.shape[p] for p in places)
        return Form(key, tuple(x.sizes[a] for a in left), dims, shape)

    def along(self, operation: str, x: Form, axis: int, attributes: Any = ()) -> Form:
        """An operation along one axis that stays."""
        axes = x.dims[axis]
        if not axes and x.shape[axis] != 1:
            raise _NoForm
        told = (*attributes, ("axes", axes))
        key = self.expressions.number(CanonicalExpression(operation, told, ((x.key, ()),)))
        return Form(key, x.sizes, x.dims, x.shape)

    def contracted(self, subscripts: str, *given: Form) -> Form:
        """A sum of products, as einsum says it."""
        inside, out = subscripts.split("->")
        parts = inside.split(",")
        lengths: dict[str, tuple[int, ...]] = {}
        for letters, form in zip(parts, given, strict=True):
            for letter, axes in zip(letters, form.dims, strict=True):
                found = tuple(form.sizes[a] for a in axes)
                if len(found) > len(lengths.get(letter, ())):
                    lengths[letter] = found
        split = [
            self.split(form, {p: lengths.get(c, ()) for p, c in enumerate(letters)})
            for letters, form in zip(parts, given, strict=True)
        ]
        pairs = sorted(zip(split, parts, strict=True), key=lambda pair: pair[0].key)
        labels: dict[tuple[str, int], int] = {}
        sizes: list[int] = []
        operands = []
        for form, letters in pairs:
            where = {
                a: (c, j)
                for c, axes in zip(letters, form.dims, strict=True)
                for j, a in enumerate(axes)
            }
            for a in range(len(form.sizes)):
                if where[a] not in labels:
                    labels[where[a]] = len(labels)
                    sizes.append(form.sizes[a])
            operands.append((form.key, tuple(labels[where[a]] for a in range(len(form.sizes)))))
        kept = [labels[name] for name in labels if name[0] in out]
        number = {label: i for i, label in enumerate(kept)}
        shapes = {
            c: n
            for form, letters in zip(given, parts, strict=True)
            for c, n in zip(letters, form.shape, strict=True)
            if n != 1
        }
        repeats = prod(n for c, n in shapes.items() if c not in out and not lengths.get(c))
        told = (("out", tuple(kept)), *((("repeats", repeats),) if repeats != 1 else ()))
        key = self.expressions.number(CanonicalExpression("matmul", told, tuple(operands)))
        dims = tuple(
            tuple(number[labels[c, j]] for j in range(len(lengths.get(c, ())))) for c in out
        )
        return Form(key, tuple(sizes[a] for a in kept), dims, tuple(shapes.get(c, 1) for c in out))

    def reshaped(self, x: Form, shape: tuple[int, ...]) -> Form:
        """Axes merged, added and taken off; one that is split is a split expression."""
        atoms: list[tuple[int, ...]] = []  # the expression's axes in order; of what repeats none
        for p, n in enumerate(x.shape):
            if n != 1 and not x.dims[p]:
                atoms.append(())
            atoms += [(a,) for a in x.dims[p]]
        lengths = [prod(x.sizes[a] for a in atom) if atom else 0 for atom in atoms]
        if 0 in lengths:
            return self._reshaped_repeats(x, shape)
        dims: list[tuple[int, ...]] = []
        rest, at = [*shape], 0
        form = x
        order = [atom[0] for atom in atoms]
        while rest:
            n = rest.pop(0)
            taken: list[int] = []
            while prod(form.sizes[a] for a in taken) < n:
                axis = order[at]
                size, need = form.sizes[axis], n // prod(form.sizes[a] for a in taken)
                if size > need:
                    form, order = self._split_axis(form, order, at, need)
                taken.append(order[at])
                at += 1
            if prod(form.sizes[a] for a in taken) != n:
                raise _NoForm
            dims.append(tuple(taken))
        return Form(form.key, form.sizes, tuple(dims), shape)

    def _split_axis(
        self, form: Form, order: list[int], at: int, first: int
    ) -> tuple[Form, list[int]]:
        axis = order[at]
        if first < 1 or form.sizes[axis] % first:
            raise _NoForm
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
            raise _NoForm
        left = iter(old)
        dims = tuple(() if n == 1 else next(left)[0] for n in shape)
        return Form(x.key, x.sizes, dims, shape)


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
_LUMPED = frozenset(
    ["scatter", "index", "update", "random", "dropout", "max_pool", "avg_pool", "callback"]
)
WRITTEN_OUT = frozenset(
    ["mean", "variance", "softmax", "log_softmax", "logsumexp", "layer_norm", "relu", "silu"]
    + ["clip", "addmm", "baddbmm", "addmv", "matmul", "einsum", "reciprocal", "rsqrt", "square"]
)  # operations that are written, loosely, as those that they are made of
_RULES: dict[str, Callable[..., list[Form]]] = {}


def attributes_of(node: Node) -> tuple[tuple[str, Any], ...]:
    """What makes an operation what it is besides its operands, so that it can be compared."""
    return tuple(
        sorted((k, repr(v)) for k, v in node.attributes.items() if k not in ("name", "rule"))
    )


def _rule(names: str) -> Callable[[Any], Any]:
    def register(function: Any) -> Any:
        _RULES.update(dict.fromkeys(names.split(), function))
        return function

    return register


# --- what only arranges ------------------------------------------------------------------


@_rule("identity copy optimization_barrier clone checkpoint_name sharding_constraint")
def _same(c: Canonical, node: Node, given: list[Form], shape: Any) -> list[Form]:
    return [given[0]]


@_rule("transpose")
def _transposed(c: Canonical, node: Node, given: list[Form], shape: Any) -> list[Form]:
    return [_in_order(given[0], node.attributes["permutation"])]


def _in_order(x: Form, order: Sequence[int]) -> Form:
    return Form(x.key, x.sizes, tuple(x.dims[p] for p in order), tuple(x.shape[p] for p in order))


@_rule("reshape squeeze expand_dims unsqueeze")
def _reshape(c: Canonical, node: Node, given: list[Form], shape: Any) -> list[Form]:
    order = node.attributes.get("permutation", range(len(given[0].shape)))
    return [c.reshaped(_in_order(given[0], order), shape)]


@_rule("broadcast expand")
def _broadcast(c: Canonical, node: Node, given: list[Form], shape: Any) -> list[Form]:
    x, axes = given[0], node.attributes.get("axes")
    axes = axes or range(len(shape) - len(x.shape), len(shape))
    dims: list[tuple[int, ...]] = [()] * len(shape)
    for p, axis in enumerate(axes):
        dims[axis] = x.dims[p]
    return [Form(x.key, x.sizes, tuple(dims), shape)]


@_rule("constant full")
def _constant(c: Canonical, node: Node, given: list[Form], shape: Any) -> list[Form]:
    if given and not given[0].sizes:
        return [Form(given[0].key, (), ((),) * len(shape), shape)]
    return [c._number(float(node.attributes["value"]), shape)]


@_rule("slice")
def _slice(c: Canonical, node: Node, given: list[Form], shape: Any) -> list[Form]:
    """One axis after the other: so a slice of a slice is a slice."""
    x, a = given[0], node.attributes
    strides = a.get("stride", (1,) * len(x.shape))
    for p, part in enumerate(zip(a["start"], a["limit"], strides, strict=True)):
        if part != (0, x.shape[p], 1):
            x = _sliced(c, x, p, *part)
    left = [p for p in range(len(x.shape)) if p not in a.get("drop", ())]
    return [Form(x.key, x.sizes, tuple(x.dims[p] for p in left), tuple(x.shape[p] for p in left))]


def _sliced(c: Canonical, x: Form, place: int, start: int, limit: int, stride: int) -> Form:
    count = len(range(start, limit, stride))
    shape = (*x.shape[:place], count, *x.shape[place + 1 :])
    if not x.dims[place]:
        return Form(x.key, x.sizes, x.dims, shape)
    (axis,) = x.dims[place]
    of, inner = x.key, c.expressions.known[x.key]
    if isinstance(inner, CanonicalExpression) and inner.operation == "slice":
        ((_, (along, first, length, step)),) = inner.attributes
        if along == axis and length != 1:
            start, stride, of = first + start * step, stride * step, inner.operands[0][0]
    at = (axis, start, count, stride if count > 1 else 1)
    key = c.expressions.number(CanonicalExpression("slice", (("at", at),), ((of, ()),)))
    left = [i for i in range(len(x.sizes)) if i != axis or count != 1]
    number = {i: k for k, i in enumerate(left)}
    sizes = tuple(count if i == axis else x.sizes[i] for i in left)
    dims = tuple(tuple(number[i] for i in axes if i in number) for axes in x.dims)
    return Form(key, sizes, dims, shape)


@_rule("pad slice_backward select_backward")
def _placed(c: Canonical, node: Node, given: list[Form], shape: Any) -> list[Form]:
    """Something between zeros; what is placed twice is placed once. A negative pad is a slice."""
    x, a = given[0], node.attributes
    value = c.expressions.value(given[1].key) if len(given) > 1 else float(a.get("value", 0))
    axis = a.get("axis", 0)
    strides = [1] * len(shape)
    if node.operation == "pad":
        starts = a["low"]
        if any(a.get("interior", ())):
            raise _NoForm
        if max(*a["low"], *a["high"], 0) == 0:
            for p, low in enumerate(starts):
                x = _sliced(c, x, p, -low, shape[p] - low, 1) if x.shape[p] != shape[p] else x
            return [x]
        if min(*a["low"], *a["high"]) < 0:
            raise _NoForm
    else:
        starts = [0] * len(shape)
        starts[axis] = a["index"] % shape[axis] if "index" in a else a.get("start", 0)
        strides[axis] = a.get("step", 1)
    if node.operation == "select_backward":
        dims = (*x.dims[:axis], (), *x.dims[axis:])
        x = Form(x.key, x.sizes, dims, (*x.shape[:axis], 1, *x.shape[axis:]))
    if all(x.shape[p] == shape[p] for p in range(len(shape))):
        return [x]
    at = tuple((x.dims[p] or (-1,), starts[p], strides[p], n) for p, n in enumerate(shape))
    inner = c.expressions.known[x.key]
    plain = c.fresh_axes(x.key, x.shape).dims == x.dims and 1 not in x.shape
    if isinstance(inner, CanonicalExpression) and inner.operation == "place" and plain:
        (_, before), (_, around) = inner.attributes
        if around == value and all(stride == 1 for *_, stride, _ in (*at, *before)):
            at = tuple(
                (dims, first + start, 1, n)
                for (dims, first, *_), (_, start, _, n) in zip(before, at, strict=True)
            )
            x = Form(inner.operands[0][0], (), (), ())
    key = c.expressions.number(
        CanonicalExpression("place", (("at", at), ("value", value)), ((x.key, ()),))
    )
    return [c.fresh_axes(key, shape)]


@_rule("stack")
def _stacked(c: Canonical, node: Node, given: list[Form], shape: Any) -> list[Form]:
    axis = node.attributes.get("axis", 0)
    wide = [
        Form(
            x.key,
            x.sizes,
            (*x.dims[:axis], (), *x.dims[axis:]),
            (*x.shape[:axis], 1, *x.shape[axis:]),
        )
        for x in given
    ]
    return [c.joined(axis, wide, shape)]


@_rule("concatenate")
def _concatenated(c: Canonical, node: Node, given: list[Form], shape: Any) -> list[Form]:
    return [c.joined(node.attributes["axis"], given, shape)]


# --- element by element ------------------------------------------------------------------

_UNARY = """
exp exp2 expm1 log log2 log10 log1p sin cos tan sinh cosh tanh arcsin arccos arctan arcsinh arccosh
arctanh sigmoid log_sigmoid erf erfc erfinv lgamma digamma abs sign floor ceil round trunc real
imag conj angle is_finite is_nan logical_not cbrt softplus leaky_relu elu gelu polygamma
stop remainder floor_divide fmod arctan2 logaddexp complex logical_and logical_or logical_xor
where threshold_backward tanh_backward sigmoid_backward gelu_backward silu_backward elu_backward
leaky_relu_backward nextafter heaviside hypot softplus_backward
"""
_COMMUTING = ("add", "multiply", "maximum", "minimum", "logical_and", "logical_or", "logical_xor")


@_rule(_UNARY)
def _elementwise(c: Canonical, node: Node, given: list[Form], shape: Any) -> list[Form]:
    if c.loosely and node.operation == "abs" and _is_positive(c, given[0].key):
        return [given[0]]
    if c.loosely and node.operation == "where":
        known = c.expressions.value(given[0].key)
        if known is not None:
            return [_widened(given[1] if known else given[2], shape)]
    commutes = node.operation in _COMMUTING
    return [c.elementwise(node.operation, given, attributes_of(node), commutes)]


@_rule("cast")
def _cast(c: Canonical, node: Node, given: list[Form], shape: Any) -> list[Form]:
    if c.loosely and c.expressions.value(given[0].key) is not None:
        return given
    return [c.elementwise("cast", given, (("dtype", node.attributes.get("dtype", "")),))]


@_rule("compare")
def _compare(c: Canonical, node: Node, given: list[Form], shape: Any) -> list[Form]:
    relation = node.attributes["relation"]
    if relation in (">", ">="):
        given, relation = given[::-1], relation.replace(">", "<")
    symmetric = relation in ("==", "!=")
    values = [c.expressions.value(form.key) for form in given]
    if c.loosely and all(isinstance(value, float) for value in values):
        return [c._number(float(_RELATIONS[relation](*values)), shape)]
    return [c.elementwise("compare", given, (("relation", relation),), symmetric)]


_RELATIONS: dict[str, Callable[[Any, Any], bool]] = {"<": lt, "<=": le, "==": eq, "!=": ne}


def _is_positive(c: Canonical, key: int) -> bool:
    """Whether it is a power of e, or a sum of such."""
    expression = c.expressions.known[key]
    if not isinstance(expression, CanonicalExpression):
        return False
    if expression.operation == "sum":
        return _is_positive(c, expression.operands[0][0])
    return expression.operation == "exp"


def _widened(x: Form, shape: Sequence[int]) -> Form:
    """A value that repeats along new axes."""
    more = len(shape) - len(x.shape)
    return Form(x.key, x.sizes, (*((),) * more, *x.dims), tuple(shape))


@_rule("maximum minimum")
def _extreme(c: Canonical, node: Node, given: list[Form], shape: Any) -> list[Form]:
    least = -inf if node.operation == "maximum" else inf
    left = [form for form in given if c.expressions.value(form.key) != least]
    return [left[0] if len(left) == 1 else c.elementwise(node.operation, given, (), True)]


@_rule("relu")
def _relu(c: Canonical, node: Node, given: list[Form], shape: Any) -> list[Form]:
    return [c.elementwise("maximum", [given[0], c._number(0.0)], (), True)]


@_rule("silu")
def _silu(c: Canonical, node: Node, given: list[Form], shape: Any) -> list[Form]:
    return [_times(c, given[0], c.elementwise("sigmoid", given))]


@_rule("clip")
def _clip(c: Canonical, node: Node, given: list[Form], shape: Any) -> list[Form]:
    x, *ends = given
    for name, operation, at in (("low", "maximum", 0), ("high", "minimum", 1)):
        limit = node.attributes.get(name)
        end = ends[at] if len(ends) == 2 else None if limit is None else c._number(float(limit))
        x = x if end is None else c.elementwise(operation, [x, end], (), True)
    return [x]


@_rule("add subtract")
def _add(c: Canonical, node: Node, given: list[Form], shape: Any) -> list[Form]:
    a, b = given
    if "alpha" in node.attributes:
        b = _times(c, b, c._number(float(node.attributes["alpha"])))
    if node.operation == "add":
        return [_plus(c, a, b)]
    return [
        _plus(c, a, _times(c, b, c._number(-1.0)))
        if c.loosely
        else c.elementwise("subtract", [a, b])
    ]


@_rule("multiply")
def _multiply(c: Canonical, node: Node, given: list[Form], shape: Any) -> list[Form]:
    return [_times(c, *given)]


@_rule("negate")
def _negate(c: Canonical, node: Node, given: list[Form], shape: Any) -> list[Form]:
    return [_times(c, given[0], c._number(-1.0)) if c.loosely else c.elementwise("negate", given)]


@_rule("divide")
def _divide(c: Canonical, node: Node, given: list[Form], shape: Any) -> list[Form]:
    a, b = given
    if not c.loosely or node.attributes:
        return [c.elementwise("divide", given, attributes_of(node))]
    return [_times(c, a, _power(c, b, -1.0))]


@_rule("power square cube reciprocal sqrt rsqrt")
def _powers(c: Canonical, node: Node, given: list[Form], shape: Any) -> list[Form]:
    exponents = {"square": 2.0, "cube": 3.0, "reciprocal": -1.0, "sqrt": 0.5, "rsqrt": -0.5}
    if node.operation == "power" and len(given) == 2:
        exponent = c.expressions.value(given[1].key)
        if isinstance(exponent, float) and not given[1].sizes:
            return [_power(c, given[0], exponent)]
        return [c.elementwise("power", given)]
    if node.operation == "power":
        return [c.elementwise("power", given, attributes_of(node))]
    return [_power(c, given[0], exponents[node.operation])]


def _power(c: Canonical, x: Form, exponent: float) -> Form:
    value = c.expressions.value(x.key)
    if c.loosely and isinstance(value, float) and (value > 0 or (exponent == -1 and value)):
        return c._number(value**exponent, x.shape)
    inner = c.expressions.known[x.key]
    if c.loosely and isinstance(inner, CanonicalExpression) and inner.operation == "power":
        (base, _), (power, _) = inner.operands
        known = c.expressions.value(power)
        if isinstance(known, float) and exponent == -1:
            x = Form(base, x.sizes, x.dims, x.shape)
            exponent *= known
    return c.elementwise("power", [x, c._number(exponent)])


def _plus(c: Canonical, *terms: Form) -> Form:
    return _flat(c, "add", terms)


def _times(c: Canonical, *factors: Form) -> Form:
    return _flat(c, "multiply", factors)


def _flat(c: Canonical, operation: str, given: Sequence[Form]) -> Form:
    """A sum or product; loosely, those inside are opened and numbers put together."""
    if not c.loosely:
        return c.elementwise(operation, given, (), True)
    shape = c.elementwise("shape", given).shape
    parts = [part for form in given for part in _parts(c, operation, form)]
    values = [c.expressions.value(p.key) for p in parts]
    rest = [p for p, v in zip(parts, values, strict=True) if not isinstance(v, float)]
    numbers = [v for v in values if isinstance(v, float)]
    neutral = 0.0 if operation == "add" else 1.0
    total = sum(numbers) if operation == "add" else prod(numbers)
    if total != neutral or not rest:
        rest.append(c._number(float(total)))
    if len(rest) == 1:
        (x,) = rest
        return _widened(x, shape)
    return _widened(c.elementwise(operation, rest, (), True), shape)


def _parts(c: Canonical, operation: str, form: Form) -> list[Form]:
    expression = c.expressions.known[form.key]
    if not isinstance(expression, CanonicalExpression) or expression.operation != operation:
        return [form]
    found = []
    for key, labels in expression.operands:
        number = {label: i for i, label in enumerate(labels)}
        if any(a in number for axes in form.dims if len(axes) > 1 for a in axes) and any(
            0 < sum(a in number for a in axes) < len(axes) for axes in form.dims
        ):
            return [form]  # part of a merged axis
        dims = tuple(tuple(number[a] for a in axes if a in number) for axes in form.dims)
        shape = tuple(n if axes else 1 for n, axes in zip(form.shape, dims, strict=True))
        found.append(Form(key, tuple(form.sizes[label] for label in labels), dims, shape))
    return found


# --- over axes ---------------------------------------------------------------------------


def _axes(node: Node, x: Form) -> Sequence[int]:
    if "axis" in node.attributes:
        return (node.attributes["axis"],)
    return node.attributes.get("axes") or range(len(x.shape))


def _rest_of(node: Node) -> tuple[tuple[str, Any], ...]:
    return tuple(p for p in attributes_of(node) if p[0] not in ("axes", "axis", "keep"))


@_rule("sum prod max min any all")
def _reduce(c: Canonical, node: Node, given: list[Form], shape: Any) -> list[Form]:
    x, keep = given[0], bool(node.attributes.get("keep"))
    rest = [] if "window" in node.attributes else _rest_of(node)
    return [c.reduced(node.operation, x, _axes(node, x), keep, rest)]


@_rule("mean")
def _mean_rule(c: Canonical, node: Node, given: list[Form], shape: Any) -> list[Form]:
    x, keep = given[0], bool(node.attributes.get("keep"))
    if not c.loosely:
        return [c.reduced("mean", x, _axes(node, x), keep, _rest_of(node))]
    return [_mean(c, x, _axes(node, x), keep)]


def _mean(c: Canonical, x: Form, axes: Sequence[int], keep: bool, less: float = 0.0) -> Form:
    count = prod(x.shape[p] for p in axes) - less
    if count <= 0:  # the variance of one number, which is NaN
        raise _NoForm
    return _times(c, c.reduced("sum", x, axes, keep), c._number(1.0 / count))


@_rule("variance")
def _variance(c: Canonical, node: Node, given: list[Form], shape: Any) -> list[Form]:
    x, axes, keep = given[0], _axes(node, given[0]), bool(node.attributes.get("keep"))
    if not c.loosely:
        return [c.reduced("variance", x, axes, keep, _rest_of(node))]
    less = float(node.attributes.get("correction", 0))
    return [_mean(c, _power(c, _centred(c, x, axes), 2.0), axes, keep, less)]


def _centred(c: Canonical, x: Form, axes: Sequence[int]) -> Form:
    return _plus(c, x, _times(c, _mean(c, x, axes, True), c._number(-1.0)))


@_rule("layer_norm")
def _layer_norm(c: Canonical, node: Node, given: list[Form], shape: Any) -> list[Form]:
    if not c.loosely:
        raise _NoForm
    x, axes = given[0], node.attributes["axes"]
    spread = _mean(c, _power(c, _centred(c, x, axes), 2.0), axes, True)
    spread = _plus(c, spread, c._number(float(node.attributes["eps"])))
    found = _times(c, _centred(c, x, axes), _power(c, spread, -0.5))
    found = _times(c, found, given[1]) if len(given) > 1 else found
    return [_plus(c, found, given[2]) if len(given) > 2 else found]


def _minus(c: Canonical, a: Form, b: Form) -> Form:
    if c.loosely:
        return _plus(c, a, _times(c, b, c._number(-1.0)))
    return c.elementwise("subtract", [a, b])


@_rule("softmax log_softmax")
def _softmax(c: Canonical, node: Node, given: list[Form], shape: Any) -> list[Form]:
    x, axes = given[0], _axes(node, given[0])
    if not c.loosely:
        return [c.along(node.operation, x, axes[0], _rest_of(node))]
    highest = c.elementwise("stop", [c.reduced("max", x, axes, True)])
    shifted = _minus(c, x, highest)
    e = c.elementwise("exp", [shifted])
    total = c.reduced("sum", e, axes, True)
    if node.operation == "softmax":
        return [_times(c, e, _power(c, total, -1.0))]
    return [_minus(c, shifted, c.elementwise("log", [total]))]


@_rule("logsumexp")
def _logsumexp(c: Canonical, node: Node, given: list[Form], shape: Any) -> list[Form]:
    x, axes, keep = given[0], _axes(node, given[0]), bool(node.attributes.get("keep"))
    if not c.loosely:
        return [c.reduced("logsumexp", x, axes, keep, _rest_of(node))]
    highest = c.reduced("max", x, axes, True)
    finite = c.elementwise("is_finite", [highest])
    highest = c.elementwise("where", [finite, highest, c._number(0.0)])
    highest = c.elementwise("stop", [highest])
    total = c.reduced("sum", c.elementwise("exp", [_minus(c, x, highest)]), axes, True)
    found = _plus(c, c.elementwise("log", [total]), highest)
    return [found if keep else c.reshaped(found, shape)]


@_rule("cumsum cumprod cummax cummin logcumsumexp sort flip roll argsort")
def _along(c: Canonical, node: Node, given: list[Form], shape: Any) -> list[Form]:
    axes = _axes(node, given[0])
    if len(axes) != 1:
        raise _NoForm
    return [c.along(node.operation, given[0], axes[0], _rest_of(node))]


@_rule("argmax argmin")
def _argument(c: Canonical, node: Node, given: list[Form], shape: Any) -> list[Form]:
    x = given[0]
    return [c.reduced(node.operation, x, _axes(node, x), bool(node.attributes.get("keep")))]


# --- products of arrays ------------------------------------------------------------------


@_rule("einsum dot_general")
def _einsum(c: Canonical, node: Node, given: list[Form], shape: Any) -> list[Form]:
    if "subscripts" not in node.attributes:
        return _matmul(c, node, given, shape)
    return [c.contracted(node.attributes["subscripts"], *given)]


@_rule("matmul")
def _matmul(c: Canonical, node: Node, given: list[Form], shape: Any) -> list[Form]:
    a, b = given
    return [c.contracted(_subscripts(len(a.shape), len(b.shape)), a, b)]


@_rule("addmm baddbmm addmv")
def _added(c: Canonical, node: Node, given: list[Form], shape: Any) -> list[Form]:
    if node.attributes:
        raise _NoForm
    bias, a, b = given
    return [_plus(c, bias, c.contracted(_subscripts(len(a.shape), len(b.shape)), a, b))]


def _subscripts(a: int, b: int) -> str:
    """NumPy's matmul of two arrays of so many axes, in the words of einsum."""
    if not (a and b):
        raise _NoForm
    batch = ascii_letters[: max(a, b, 2) - 2]
    first = batch[len(batch) - max(0, a - 2) :] + ("YZ" if a > 1 else "Z")
    second = batch[len(batch) - max(0, b - 2) :] + ("ZX" if b > 1 else "Z")
    return f"{first},{second}->{batch}{'Y' if a > 1 else ''}{'X' if b > 1 else ''}"


__all__ = [
    "BRANCHING",
    "WRITTEN_OUT",
    "Canonical",
    "Expressions",
    "Form",
    "CanonicalExpression",
    "attributes_of",
]
