"""Graphs of different shapes, made by hand: what the pictures are tried on.

`Builder` writes a graph as a program is written. Each shape is a function without arguments;
`SHAPES` has them by name.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

from gradtools.seeing.graphs.gradient_graphs import Graph
from gradtools.seeing.graphs.nodes import Body, Dependence, Node, Source, Value

_NONE, _CUT, _ZERO, _FULL = Dependence


class Builder:
    """A graph in the making."""

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

    def constant(self, name: str, *shape: int, dtype: str = "float32") -> int:
        self.captured.append(self.value(shape, dtype, name))
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
        return Graph(
            tuple(self.nodes),
            dict(self.values),
            tuple(self.inputs),
            tuple(outputs),
            tuple(self.captured),
        )


def square() -> Graph:
    b = Builder()
    x = b.input("x", 3)
    return b.graph(b.op("square", x, native="aten.square"), names=["output"])


def square_twice() -> Graph:
    """Forward, backward, and backward of the backward of x²."""
    b = Builder()
    x = b.input("x", 3)
    y = b.op("square", x, saved=(x,))
    dy = b.input("cotangent", 3)
    two_x = b.op("multiply", x, b.constant("2"), phase=1, saved=(x,))
    dx = b.op("multiply", two_x, dy, phase=1, saved=(two_x, dy))
    v = b.input("direction", 3)
    back = b.op("multiply", v, dy, phase=2)
    ddx = b.op("multiply", back, b.constant("2"), phase=2)
    ddy = b.op("multiply", v, two_x, phase=2)
    return b.graph(y, dx, ddx, ddy, names=["output", "gradient of x", "second x", "second dy"])


def linear_with_backward() -> Graph:
    b = Builder()
    x, w, bias = b.input("x", 8, 4), b.input("params['w']", 4, 2), b.input("params['b']", 2)
    z = b.op("matmul", x, w, shape=(8, 2), saved=(x, w), scope=("linear",))
    y = b.op("add", z, bias, scope=("linear",))
    a = b.op("tanh", y, saved=(y,))
    loss = b.op("sum", a, shape=())
    ct = b.input("cotangent")
    da = b.op("broadcast", ct, shape=(8, 2), phase=1)
    dy = b.op("tanh_backward", da, a, phase=1)
    db = b.op("sum", dy, shape=(2,), phase=1, scope=("linear",))
    xt = b.op("transpose", x, shape=(4, 8), phase=1, scope=("linear",))
    dw = b.op("matmul", xt, dy, shape=(4, 2), phase=1, scope=("linear",))
    names = ["loss", "gradient of params['w']", "gradient of params['b']"]
    return b.graph(loss, dw, db, names=names)


def attention(b: Builder, x: int, scope: tuple[str, ...], width: int = 384) -> tuple[int, ...]:
    scope = (*scope, "attention")
    heads = []
    for name in ("query", "key", "value"):
        w = b.constant(f"{'.'.join(scope)}.{name}.weight", width, width)
        bias = b.constant(f"{'.'.join(scope)}.{name}.bias", width)
        h = b.op("matmul", x, w, scope=(*scope, name), saved=(x, w))
        h = b.op("add", h, bias, scope=(*scope, name))
        heads.append(b.op("reshape", h, shape=(12, 128, width // 12), scope=scope))
    q, k, v = heads
    kt = b.op("transpose", k, shape=(12, width // 12, 128), scope=scope)
    scores = b.op("matmul", q, kt, shape=(12, 128, 128), scope=scope, saved=(q, kt))
    scaled = b.op("multiply", scores, b.constant("0.1767767"), scope=scope)
    p = b.op("softmax", scaled, scope=scope, saved=(scaled,))
    mixed = b.op("matmul", p, v, shape=(12, 128, width // 12), scope=scope, saved=(p, v))
    joined = b.op("reshape", mixed, shape=(128, width), scope=scope)
    wo = b.constant(f"{'.'.join(scope)}.output.weight", width, width)
    out = b.op("matmul", joined, wo, scope=(*scope, "output"), saved=(joined, wo))
    return out, x, q, kt, p, v, joined, wo


def transformer(layers: int = 12, backward: bool = True, width: int = 384) -> Graph:
    """An encoder with a head and a loss, and its backward pass with all residuals."""
    b = Builder()
    ids = b.input("ids", 128, dtype="int32")
    table = b.constant("embedding.weight", 30522, width)
    x = b.op("take", table, ids, shape=(128, width), scope=("embedding",))
    x = b.op("layer_norm", x, scope=("embedding",), saved=(x,))
    kept = []
    for i in range(layers):
        scope = ("encoder", f"layers.{i}")
        out, *residuals = attention(b, x, scope, width)
        one = b.op("add", out, x, scope=scope)
        one = b.op("layer_norm", one, scope=(*scope, "norm1"), saved=(one,))
        w1 = b.constant(f"layers.{i}.mlp.up", width, 4 * width)
        w2 = b.constant(f"layers.{i}.mlp.down", 4 * width, width)
        up = b.op("matmul", one, w1, shape=(128, 4 * width), scope=(*scope, "mlp"), saved=(one,))
        act = b.op("gelu", up, scope=(*scope, "mlp"), saved=(up,))
        down = b.op("matmul", act, w2, shape=(128, width), scope=(*scope, "mlp"), saved=(act,))
        two = b.op("add", down, one, scope=scope)
        x = b.op("layer_norm", two, scope=(*scope, "norm2"), saved=(two,))
        kept.append((residuals, one, up, act, two, w1, w2))
    pooled = b.op("mean", x, shape=(width,))
    logits = b.op(
        "matmul", pooled, b.constant("head.weight", width, 2), shape=(2,), scope=("head",)
    )
    loss = b.op("cross_entropy", logits, b.input("label", dtype="int32"), shape=())
    if not backward:
        return b.graph(loss, names=["loss"])
    grads = _transformer_backward(b, loss, logits, pooled, x, kept, width)
    return b.graph(loss, *grads, names=["loss", *(f"gradient {i}" for i in range(len(grads)))])


def _transformer_backward(b, loss, logits, pooled, x, kept, width) -> list[int]:
    grads = []
    ct = b.input("cotangent")
    d = b.op("cross_entropy_backward", ct, logits, shape=(2,), phase=1)
    dp = b.op("matmul", d, pooled, shape=(width,), phase=1, scope=("head",))
    d = b.op("broadcast", dp, shape=(128, width), phase=1)
    for i in reversed(range(len(kept))):
        (x_in, q, kt, p, v, _, wo), one, up, act, two, w1, w2 = kept[i]
        scope = ("encoder", f"layers.{i}")
        d = b.op("layer_norm_backward", d, two, phase=1, scope=(*scope, "norm2"))
        da = b.op("matmul", d, w2, shape=(128, 4 * width), phase=1, scope=(*scope, "mlp"))
        grads.append(
            b.op("matmul", act, d, phase=1, scope=(*scope, "mlp"), shape=(4 * width, width))
        )
        du = b.op("gelu_backward", da, up, phase=1, scope=(*scope, "mlp"))
        grads.append(
            b.op("matmul", one, du, phase=1, scope=(*scope, "mlp"), shape=(width, 4 * width))
        )
        dd = b.op("matmul", du, w1, shape=(128, width), phase=1, scope=(*scope, "mlp"))
        d = b.op("add", d, dd, phase=1, scope=scope)
        d = b.op("layer_norm_backward", d, one, phase=1, scope=(*scope, "norm1"))
        at = (*scope, "attention")
        dj = b.op("matmul", d, wo, phase=1, scope=at)
        dm = b.op("reshape", dj, shape=(12, 128, width // 12), phase=1, scope=at)
        dv = b.op("matmul", p, dm, shape=(12, 128, width // 12), phase=1, scope=at)
        ds = b.op("matmul", dm, v, shape=(12, 128, 128), phase=1, scope=at)
        ds = b.op("softmax_backward", ds, p, phase=1, scope=at)
        dq = b.op("matmul", ds, kt, shape=(12, 128, width // 12), phase=1, scope=at)
        dk = b.op("matmul", ds, q, shape=(12, 128, width // 12), phase=1, scope=at)
        dx = b.op("add", dq, dk, dv, shape=(128, width), phase=1, scope=at)
        grads.append(b.op("matmul", x_in, dx, shape=(width, width), phase=1, scope=at))
        d = b.op("add", d, dx, phase=1, scope=scope)
    return grads


def empty() -> Graph:
    return Builder().graph()


def ladder() -> Graph:
    """Skip connections of every length."""
    b = Builder()
    x = b.input("x", 8)
    stages = [x]
    for i in range(8):
        x = b.op("add", b.op(f"conv_{i}", x), stages[i // 2])
        stages.append(x)
    return b.graph(b.op("concatenate", *stages, shape=(72,)))


def cuts() -> Graph:
    """Every strength of a link, marks, and data that leaves the framework."""
    b = Builder()
    x = b.input("x", 4)
    stopped = b.op("stop_gradient", x, links=((_CUT,),), loss="detached")
    rounded = b.op("round", x, links=((_ZERO,),), loss="zero_derivative")
    y = b.op("multiply", stopped, rounded)
    best = b.op("argmax", y, shape=(), dtype="int64", loss="discrete")
    z = b.op("reverse_gradient", y, mark="edited gradient")
    z = b.op("cube", z, mark="custom rule")
    z = b.op("frozen", z, mark="frozen")
    host = b.op("host", z, links=((_CUT,),), loss="left_framework")
    total = b.op("sum", b.op("add", host, x), shape=())
    return b.graph(total, best, names=["loss", "best"])


def loop() -> Graph:
    """A scan whose body has three operations, and a branch."""
    b = Builder()
    x, w = b.input("carry", 8), b.input("w", 8, 8)
    xs = b.input("xs", 5, 8)
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


def repeated_without_scopes() -> Graph:
    """The same six steps, twenty times, in no module."""
    b = Builder()
    x = b.input("x", 32)
    for _ in range(20):
        h = b.op("matmul", x, b.constant("w", 32, 32))
        h = b.op("add", h, b.constant("b", 32))
        h = b.op("gelu", h)
        x = b.op("layer_norm", b.op("add", h, x))
    return b.graph(b.op("sum", x, shape=()))


def shared_module() -> Graph:
    """One module called three times, with others between."""
    b = Builder()
    x = b.input("x", 4)
    for _ in range(3):
        for name in ("matmul", "add"):
            x = b.op(name, x, scope=("net", "shared"))
        x = b.op("tanh", b.op("scale", x, scope=("net", "own")), scope=("net", "own"))
    return b.graph(x)


def random_graph(count: int = 60, seed: int = 0, reach: int = 12) -> Graph:
    random_ = random.Random(seed)
    b = Builder()
    values = [b.input(f"x{i}", 4) for i in range(4)]
    for _ in range(count):
        recent = values[-reach:]
        reads = random_.sample(recent, k=min(len(recent), random_.randint(1, 3)))
        name = random_.choice(("add", "multiply", "matmul", "sin", "layer_norm"))
        scope = (f"block{random_.randint(0, 2)}",) if random_.random() < 0.6 else ()
        values.append(b.op(name, *reads, scope=scope))
    return b.graph(values[-1])


SHAPES: dict[str, Callable[[], Graph]] = {
    f.__name__: f
    for f in (
        *(square, square_twice, linear_with_backward, transformer, empty),
        *(ladder, cuts, loop, hostile_names, repeated_without_scopes),
        *(shared_module, random_graph),
    )
}
