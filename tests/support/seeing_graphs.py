"""Defines graphs of different shapes by hand, for tests that draw graphs.

`Builder` builds a graph with one method call for each operation. Each graph is built by a function
that is called without arguments; `SHAPES` maps names to these functions.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

from gradtools.seeing.graphs.gradient_graphs import Graph
from gradtools.seeing.graphs.nodes import Body, Dependence, Node, Source, Value

_NONE, _CUT, _ZERO, _FULL = Dependence


class Builder:
    """Builds a graph with one method call for each operation."""

    def __init__(self) -> None:
        self.nodes: list[Node] = []
        self.values: dict[int, Value] = {}
        self.inputs: list[int] = []
        self.captured: list[int] = []

    def value(self, shape: Sequence[int], dtype: str = "float32", name: str = "") -> int:
        number = len(self.values)
        self.values[number] = Value(tuple(shape), dtype, name)
        return number

    def input(self, name: str, *shape: int, dtype: str = "float32") -> int:
        self.inputs.append(self.value(shape, dtype, name))
        return self.inputs[-1]

    def constant(self, name: str, *shape: int) -> int:
        self.captured.append(self.value(shape, "float32", name))
        return self.captured[-1]

    def op(self, operation: str, *inputs: int, shape=None, dtype=None, outputs=1, **node) -> int:
        like = self.values[inputs[0]] if inputs else Value((), "float32")
        shape = like.shape if shape is None else shape
        made = [self.value(shape, dtype or like.dtype) for _ in range(outputs)]
        self.nodes.append(Node(operation, tuple(inputs), tuple(made), **node))
        return made[0] if outputs == 1 else made

    def graph(self, *outputs: int, names: Sequence[str] = ()) -> Graph:
        for value, name in zip(outputs, names, strict=False):
            old = self.values[value]
            self.values[value] = Value(old.shape, old.dtype, name)
        ends = tuple(self.inputs), tuple(outputs), tuple(self.captured)
        return Graph(tuple(self.nodes), dict(self.values), *ends)


def square() -> Graph:
    b = Builder()
    return b.graph(b.op("square", b.input("x", 3), native="aten.square"), names=["output"])


def square_twice() -> Graph:
    """Return the graph of the forward pass, backward pass and double-backward pass of x²."""
    b = Builder()
    x = b.input("x", 3)
    y = b.op("square", x)
    dy = b.input("cotangent", 3)
    two_x = b.op("multiply", x, b.constant("2"), phase=1)
    dx = b.op("multiply", two_x, dy, phase=1)
    v = b.input("direction", 3)
    back = b.op("multiply", v, dy, phase=2)
    ddx = b.op("multiply", back, b.constant("2"), phase=2)
    ddy = b.op("multiply", v, two_x, phase=2)
    return b.graph(y, dx, ddx, ddy, names=["output", "gradient of x", "second x", "second dy"])


def linear_with_backward() -> Graph:
    b = Builder()
    x, w, bias = b.input("x", 8, 4), b.input("params['w']", 4, 2), b.input("params['b']", 2)
    z = b.op("matmul", x, w, shape=(8, 2), scope=("linear",))
    a = b.op("tanh", b.op("add", z, bias, scope=("linear",)))
    loss = b.op("sum", a, shape=())
    da = b.op("broadcast", b.input("cotangent"), shape=(8, 2), phase=1)
    dy = b.op("tanh_backward", da, a, phase=1)
    db = b.op("sum", dy, shape=(2,), phase=1, scope=("linear",))
    xt = b.op("transpose", x, shape=(4, 8), phase=1, scope=("linear",))
    dw = b.op("matmul", xt, dy, shape=(4, 2), phase=1, scope=("linear",))
    names = ["loss", "gradient of params['w']", "gradient of params['b']"]
    return b.graph(loss, dw, db, names=names)


def transformer(layers: int = 12, width: int = 384) -> Graph:
    """Return a graph of an encoder with a head and a loss, and of its backward pass."""
    b = Builder()

    def linear(x, scope, wide=width):
        name, rows = ".".join(scope), b.values[x].shape[:-1]
        w = b.constant(f"{name}.weight", b.values[x].shape[-1], wide)
        y = b.op("matmul", x, w, shape=(*rows, wide), scope=scope)
        return b.op("add", y, b.constant(f"{name}.bias", wide), scope=scope)

    table, ids = b.constant("embedding.weight", 30522, width), b.input("ids", 128, dtype="int32")
    x = b.op("take", table, ids, shape=(128, width), scope=("embedding",))
    for i in range(layers):
        scope = ("encoder", f"layers.{i}")
        at, heads = (*scope, "attention"), (12, 128, width // 12)
        q, k, v = (
            b.op("reshape", linear(x, (*at, name)), shape=heads, scope=at)
            for name in ("query", "key", "value")
        )
        scores = b.op("softmax", b.op("matmul", q, k, shape=(12, 128, 128), scope=at), scope=at)
        mixed = b.op("matmul", scores, v, shape=heads, scope=at)
        out = linear(b.op("reshape", mixed, shape=(128, width), scope=at), (*at, "output"))
        x = b.op("layer_norm", b.op("add", out, x, scope=scope), scope=(*scope, "norm1"))
        up = b.op("gelu", linear(x, (*scope, "mlp", "up"), 4 * width), scope=(*scope, "mlp"))
        out = linear(up, (*scope, "mlp", "down"))
        x = b.op("layer_norm", b.op("add", out, x, scope=scope), scope=(*scope, "norm2"))
    logits = linear(b.op("mean", x, shape=(width,)), ("head",), 2)
    loss = b.op("cross_entropy", logits, b.input("label", dtype="int32"), shape=())
    forward, d, grads = [*b.nodes], b.input("cotangent"), []
    for node in reversed(forward):
        x, *others = node.inputs
        about = {"phase": 1, "scope": node.scope}
        grads += [
            b.op("sum", d, x, shape=b.values[w].shape, **about) for w in others if w in b.captured
        ]
        d = b.op(f"{node.operation}_backward", d, x, shape=b.values[x].shape, **about)
    return b.graph(
        loss, *grads, names=["loss", *(f"gradient of w[{i}]" for i in range(len(grads)))]
    )


def empty() -> Graph:
    return Builder().graph()


def ladder() -> Graph:
    """Return a graph with skip connections of every length."""
    b = Builder()
    x = b.input("x", 8)
    stages = [x]
    for i in range(8):
        x = b.op("add", b.op(f"conv_{i}", x), stages[i // 2])
        stages.append(x)
    return b.graph(b.op("concatenate", *stages, shape=(72,)))


def cuts() -> Graph:
    """Return a graph with lost gradients, marks, and an operation outside of the framework."""
    b = Builder()
    x = b.input("x", 4)
    stopped = b.op("stop_gradient", x, links=((_CUT,),), loss="detached")
    rounded = b.op("round", x, links=((_ZERO,),), loss="zero_derivative")
    y = b.op("multiply", stopped, rounded)
    best = b.op("argmax", y, shape=(), dtype="int64", loss="discrete")
    z = b.op("reverse_gradient", y, mark="edited gradient")
    z = b.op("frozen", b.op("cube", z, mark="custom rule"), mark="frozen")
    host = b.op("host", z, links=((_CUT,),), loss="left_framework")
    total = b.op("sum", b.op("add", host, x), shape=())
    return b.graph(total, best, names=["loss", "best"])


def loop() -> Graph:
    """Return a graph of a scan whose body has three operations, and of a branch."""
    b = Builder()
    x, w, xs = b.input("carry", 8), b.input("w", 8, 8), b.input("xs", 5, 8)
    inner = Builder()
    c, iw, xi = inner.input("c", 8), inner.input("w", 8, 8), inner.input("x", 8)
    h = inner.op("tanh", inner.op("add", inner.op("matmul", c, iw, shape=(8,)), xi))
    body = Body(inner.graph(h, h), (0, 1, 2), ((0, 0),))
    last, every = b.op("scan", x, w, xs, outputs=2, bodies=(body,), mark="checkpoint")
    flag = b.input("flag", dtype="bool")
    sides = []
    for name in ("sin", "cos"):
        side = Builder()
        sides.append(Body(side.graph(side.op(name, side.input("x", 8))), (1,)))
    chosen = b.op("cond", flag, last, shape=(8,), dtype="float32", bodies=tuple(sides))
    return b.graph(chosen, every)


def hostile_names() -> Graph:
    b = Builder()
    x = b.input('a"b<c>&amp;--\\ ;{}[]|`$\n\t%% end', 3)
    y = b.op('</text><script>alert("1")</script>', x, scope=('sub"graph end', "]]>"))
    z = b.op("end", y, scope=('sub"graph end', "]]>"))
    z = b.op("subgraph", z, scope=("漢字" * 30, "m" * 300))
    z = b.op("graph \u202e \x00 \ud800 x", z, scope=("漢字" * 30, "m" * 300))
    source = Source("/no/<such>&file.py", 3)
    return b.graph(b.op("style", z, b.constant("名前" * 40, 2), source=source), names=["-->"])


def shared_module() -> Graph:
    """Return a graph of a module that is called three times, and of thirty other operations."""
    b = Builder()
    x = b.input("x", 4)
    for _ in range(3):
        for name, of in (
            ("matmul", "shared"),
            ("add", "shared"),
            ("scale", "own"),
            ("tanh", "own"),
        ):
            x = b.op(name, x, scope=("net", of))
    for _ in range(30):
        x = b.op("add", b.op("gelu", b.op("matmul", x, b.constant("w", 4, 4))), x)
    return b.graph(x)


def random_graph(count: int = 60, seed: int = 0, reach: int = 12) -> Graph:
    draw, b = random.Random(seed), Builder()
    values = [b.input(f"x{i}", 4) for i in range(4)]
    for _ in range(count):
        recent = values[-reach:]
        reads = draw.sample(recent, k=min(len(recent), draw.randint(1, 3)))
        name = draw.choice(("add", "multiply", "matmul", "sin", "layer_norm"))
        scope = (f"block{draw.randint(0, 2)}",) if draw.random() < 0.6 else ()
        values.append(b.op(name, *reads, scope=scope))
    return b.graph(values[-1])


SHAPES: dict[str, Callable[[], Graph]] = {
    f.__name__: f
    for f in (
        *(square, square_twice, linear_with_backward, transformer, empty, ladder, cuts, loop),
        *(hostile_names, shared_module, random_graph),
    )
}
