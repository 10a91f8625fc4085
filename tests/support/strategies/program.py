"""A random composition as data, and as the Python program that it stands for.

A function is a list of lines, each naming what it computes; a line that calls an operator holds
the function that the operator is given, which may see the names around it. What runs is the
printed text, so what a failure prints is what failed.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import count
from types import ModuleType
from typing import Any

import numpy as np

from gradtools.errors import GradtoolsError

_NUMBERS = count()
NATIVE = {
    "torch": "import torch\nfrom torch import func as native",
    "jax": "import jax as native",
}


@dataclass(frozen=True)
class ArrayKind:
    """The shape of an array in 64 bits, and whether it is complex."""

    shape: tuple[int, ...]
    complex: bool = False


@dataclass(frozen=True)
class DrawnLine:
    """``name = op(args)``; `inner` are the functions that an operator is given."""

    name: str
    kind: ArrayKind
    op: str
    args: tuple[str, ...] = ()
    inner: tuple[DrawnFunction, ...] = ()
    option: Any = None

    def names(self) -> set[str]:
        """Every name that it reads, those that its functions see around them too."""
        return {*self.args, *(n for f in self.inner for n in (f.out, *_read(f)))}


@dataclass(frozen=True)
class DrawnFunction:
    """Named parameters, lines, and the name that is returned."""

    name: str
    params: tuple[tuple[str, ArrayKind], ...]
    lines: tuple[DrawnLine, ...]
    out: str

    @property
    def kind(self) -> ArrayKind:
        """The kind of what it returns."""
        kinds = dict(self.params) | {line.name: line.kind for line in self.lines}
        return kinds[self.out]

    def pruned(self) -> DrawnFunction:
        """Without the lines that its result does not need."""
        needed, kept = {self.out}, []
        for line in reversed(self.lines):
            if line.name in needed:
                kept.append(line)
                needed |= line.names()
        return replace(self, lines=tuple(reversed(kept)))

    def walked(self) -> Iterator[DrawnLine]:
        """Every line, those of inner functions too."""
        for line in self.lines:
            yield line
            for f in line.inner:
                yield from f.walked()


def _read(f: DrawnFunction) -> Iterator[str]:
    for line in f.lines:
        yield from line.names()


def constant(kind: ArrayKind, seed: int) -> np.ndarray:
    """An array of a kind that looks drawn and is always the same."""
    count = int(np.prod(kind.shape))
    at = np.arange(count).reshape(kind.shape) + 1.0 + 0.37 * seed
    return np.asarray(
        np.sin(1.7 * at) + 1j * np.cos(2.3 * at) if kind.complex else np.sin(1.7 * at)
    )


@dataclass(frozen=True)
class Composition:
    """A program drawn from the grammar, at a point.

    Attributes:
        function: Of real or complex arrays to one array.
        seed: Of the point.
        compiled: Whether the whole program is compiled.

    Example:
        >>> import strategies
        >>> program = strategies.example(seed=3)
        >>> program.check("torch")
        >>> "def program(" in program.text("torch")
        True
    """

    function: DrawnFunction
    seed: int = 0
    compiled: bool = False

    def inputs(self) -> list[np.ndarray]:
        """The point: one array for each parameter of the program."""
        kinds = [kind for _, kind in self.function.params]
        return [0.8 * constant(kind, 3 * i + self.seed) for i, kind in enumerate(kinds)]

    def operators(self) -> frozenset[str]:
        """What occurs in the program, by name."""
        return frozenset(line.op for line in self.function.walked())

    def reference(self) -> np.ndarray:
        """The result in NumPy, which shares nothing with the operators.

        NaN stands where forward mode meets an edit of the cotangent alone: that has no result,
        and the program must be refused.
        """
        from tests.support.strategies.reference import evaluated

        return evaluated(self)[0]

    def tolerance(self) -> float:
        """Relative to the largest number that the reference came across."""
        from tests.support.strategies.reference import evaluated

        return 1e-11 * evaluated(self)[1].largest

    def text(self, backend: str) -> str:
        """The program as Python that runs by itself and ends in its own check."""
        width = "import jax\n\njax.config.update('jax_enable_x64', True)\n\n"
        head = (width if backend == "jax" else "") + self._text(backend)
        expected = self.reference()
        if np.isnan(expected).any():
            return head + f"raise AssertionError({_UNREFUSED!r})\n"
        return "".join(
            [
                head,
                f"expected = np.array({expected.tolist()!r})  # in NumPy alone\n",
                "np.testing.assert_allclose(found, expected, rtol=0, ",
                f"atol={self.tolerance():.1e})\n",
            ]
        )

    def run(self, backend: str) -> np.ndarray:
        """The result in a backend, of the printed text."""
        name = f"composition_{next(_NUMBERS)}"  # compilers remember a file's name and its lines
        module = sys.modules[name] = ModuleType(name)
        try:
            exec(compile(self._text(backend), f"<{name}>", "exec"), module.__dict__)
            return np.asarray(module.__dict__["found"])
        finally:
            del sys.modules[name]

    def check(self, backend: str) -> None:
        """Runs the program in a backend and holds it against the reference.

        Args:
            backend: "torch" or "jax"; JAX needs 64 bits to be on.

        Raises:
            GradtoolsError: It raises, its numbers are others, or it has numbers where there are
                none; the text ends in the program.
        """
        try:
            result = self.run(backend)
        except Exception as error:
            said = f"{type(error).__name__}: {error}"
            raise GradtoolsError(f"This program raises {said}\n\n{self.text(backend)}") from error
        expected = self.reference()
        if np.isnan(expected).any():
            raise GradtoolsError(f"This program is answered: {_UNREFUSED}\n\n{self.text(backend)}")
        if result.shape != expected.shape:
            what = f"gives the shape {result.shape}, not {expected.shape}"
            raise GradtoolsError(f"This program {what}.\n\n{self.text(backend)}")
        off = np.abs(result - expected).max(initial=0.0)
        if not off <= self.tolerance():
            what = f"is off by {off:.3g}: it gives {result.tolist()}"
            raise GradtoolsError(f"This program {what}.\n\n{self.text(backend)}")

    def _text(self, backend: str) -> str:
        if backend not in NATIVE:
            raise GradtoolsError(f"composition: no backend {backend!r}; there are {list(NATIVE)}.")
        run = "compiled(program)" if self.compiled else "program"
        names = self.operators() | ({"compiled"} if self.compiled else set())
        return "\n".join(
            [
                f"import numpy as np\n{NATIVE[backend]}\nimport gradtools.{backend} as gt\n",
                "xp = gt.xp",
                *(part for key, part in HELPERS[backend].items() if _needed(key, names)),
                *_function(self.function, 0),
                f"inputs = {[x.tolist() for x in self.inputs()]!r}",
                f"found = gt.to_numpy({run}(*(gt.asarray(np.array(x)) for x in inputs)))\n",
            ]
        )

    def __repr__(self) -> str:
        return f"<a composition of {', '.join(sorted(self.operators()))}>"

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        """How hypothesis prints it: briefly, since the error has the whole program."""
        printer.text(repr(self))


def _needed(key: str, names: frozenset[str] | set[str]) -> bool:
    return any(name.startswith(key) for name in names)


_RULES = {
    "rule, vjp": """
rule_vjp = gt.custom_rule(lambda x: x * x * x / 3)
rule_vjp.defvjp(lambda x: (rule_vjp(x), x), lambda x, c: (x * x * c,))""",
    "rule, jvp": """
rule_jvp = gt.custom_rule(lambda x: x * x * x / 3)
rule_jvp.defjvp(lambda xs, ts: (rule_jvp(*xs), xs[0] * xs[0] * ts[0]))""",
    "rule, both": """
rule_both = gt.custom_rule(lambda x: x * x * x / 3)
rule_both.defvjp(lambda x: (rule_both(x), x), lambda x, c: (x * x * c,))
rule_both.defjvp(lambda xs, ts: (rule_both(*xs), xs[0] * xs[0] * ts[0]))""",
    "host": """
host = gt.host_function(np.sin)
host.defvjp(lambda x: (host(x), x), lambda x, c: (xp.cos(x) * c,))""",
}
_ACCUMULATED = """
def accumulated(gradient, w, rows):
    mean = gt.GradientAccumulator()
    for i in range(len(rows)):
        mean.add(gradient(w, rows[i]), weight=i + 1)
    return mean.mean()
"""
HELPERS: dict[str, dict[str, str]] = {
    "torch": {
        **_RULES,
        "gt.GradientAccumulator": _ACCUMULATED,
        "gt.make_functional": """
class Layer(torch.nn.Module):
    def __init__(self, f, w):
        super().__init__()
        self.f, self.w = f, torch.nn.Parameter(torch.zeros(w.shape, dtype=w.dtype))

    def forward(self, *xs):
        return self.f(self.w, *xs)

def functionalized(f, w, *xs):
    apply, params, state = gt.make_functional(Layer(f, w))
    return apply({**params, "w": w}, state, *xs)[0]
""",
        "loop": """
def loop(f, x, trips):
    for _ in range(trips):
        x = xp.sin(f(x))
    return x
""",
        "compiled": "compiled = lambda f: gt.compile(f, backend='aot_eager')",
    },
    "jax": {
        **_RULES,
        "gt.GradientAccumulator": _ACCUMULATED,
        "gt.make_functional": """
import equinox

class Layer(equinox.Module):
    w: native.Array
    f: object = equinox.field(static=True)

    def __call__(self, *xs):
        return self.f(self.w, *xs)

def functionalized(f, w, *xs):
    apply, params, state = gt.make_functional(Layer(xp.zeros(w.shape, w.dtype), f))
    return apply(native.tree.map(lambda _: w, params), state, *xs)[0]
""",
        "loop": """
def loop(f, x, trips):
    return native.lax.scan(lambda x, _: (xp.sin(f(x)), None), x, None, length=trips)[0]
""",
        "compiled": "compiled = gt.compile",
    },
}

SIMPLE = {
    "sin": "xp.sin({0})",
    "half": "-0.5 * {0}",
    "add": "{0} + {1}",
    "multiply": "{0} * {1}",
    "subtract": "{0} - {1}",
    "divide": "{0} / ({1} * {1} + 2.0)",
    "tanh": "xp.tanh({0})",
    "exp": "xp.exp(0.5 * {0})",
    "square": "{0} * {0}",
    "power": "{0} ** 3",
    "root": "xp.sqrt({0} * {0} + 1.0)",
    "log": "xp.log({0} * {0} + 1.5)",
    "inverse": "1.0 / ({0} * {0} + 2.0)",
    "matmul": "{0} @ {1}",
    "sum": "xp.sum({0})",
    "mean": "xp.mean({0})",
    "sum of rows": "xp.sum({0}, axis=0)",
    "cumulative sum": "xp.cumulative_sum({0}, axis=0)",
    "log of sum": "xp.log(xp.sum(xp.exp(0.5 * {0})))",
    "first": "{0}[0]",
    "rest": "{0}[1:]",
    "flip": "xp.flip({0}, axis=0)",
    "take": "xp.take({0}, gt.asarray(np.array([1, 0, 1])), axis=0)",
    "transpose": "{0}.T",
    "reshape": "xp.reshape({0}, (-1,))",
    "stack": "xp.stack([{0}, {1}])",
    "concat": "xp.concat([{0}, {1}])",
    "broadcast": "xp.broadcast_to({0}, (2, *{0}.shape))",
    "where": "xp.where({0} > 0.1234, {1}, xp.sin({0}))",
    "complex": "{0} + 1j * xp.sin({1})",
    "turn": "xp.exp(1j * {0})",
    "real": "xp.real({0})",
    "imag": "xp.imag({0})",
    "conj": "xp.conj({0})",
    "modulus": "xp.real({0} * xp.conj({0}))",
    "reverse": "gt.reverse_gradient({0}, {option})",
    "scale": "gt.scale_gradient({0}, {option})",
    "transform": "gt.transform_gradient({0}, lambda c: 2.0 * c)",
    "stop": "gt.stop_gradient({0})",
    "straight": "gt.straight_through(lambda x: 0.9 * x + 0.01, surrogate=xp.sin)({0})",
    "rule, vjp": "rule_vjp({0})",
    "rule, jvp": "rule_jvp({0})",
    "rule, both": "rule_both({0})",
    "host": "host({0})",
    "clip norm": "gt.clip_gradient({0}, max_norm={option})",
    "clip value": "gt.clip_gradient({0}, max_value={option})",
    "clip pair": "xp.multiply(*gt.clip_gradient(({0}, {1}), max_norm={option}, max_value=1.1))",
    "known": "gt.replace_gradient({0}, {1})",
    "constant": "gt.asarray(np.array({values}))",
}
# Edits of the cotangent alone, which have no forward mode.
REVERSE_ONLY = ("clip norm", "clip value", "clip pair", "known")
_UNREFUSED = "forward mode meets an edit of the cotangent alone, which it must refuse."
CALLS = {
    "gt.grad": "gt.grad({loss}, {option}, disconnected_inputs='zeros')({xs})",
    "gt.jvp": "gt.jvp({f}, ({half},), ({rest},))[1]",
    "gt.vjp": "gt.vjp({f}, {but_last})[1]({last})[{option}]",
    "gt.vmap": "gt.vmap({f}, in_axes={axes})({xs})",
    "gt.chunked": "gt.chunked(gt.vmap({f}, in_axes={axes}), {option}, in_axes={axes})({xs})",
    "gt.hvp": "gt.hvp({loss}, ({0},), ({1},), mode='{option}')[1][0]",
    "gt.checkpoint": "gt.checkpoint({f})({xs})",
    "gt.frozen": "gt.frozen({f})({xs})",
    "compiled": "compiled({f})({xs})",
    "loop": "loop({f}, {0}, {option})",
    "gt.linearize": "gt.linearize({f}, {half})[1]({rest})",
    "gt.value_and_grad": (
        "gt.value_and_grad({loss}, {option}, disconnected_inputs='zeros')({xs})[1]"
    ),
    "gt.grad of a tree": (
        "gt.grad(lambda t: ({loss})(t['a'], *t['b']), disconnected_inputs='zeros')"
        "(dict(a={0}, b=[{tail}]))[{key}]"
    ),
    "gt.jacobian": "gt.jacobian({f}, {option}, mode='reverse')({xs}){over_out}",
    "gt.jacobian, forward": "gt.jacobian({f}, {option}, mode='forward')({xs}){over_out}",
    "gt.hessian": "gt.hessian({loss})({0}){over_x}",
    "gt.per_example_grad": "gt.per_example_grad({touched})({xs})",
    "gt.microbatched_value_and_grad": (
        "gt.microbatched_value_and_grad(lambda w, x: xp.mean(gt.vmap({touched}, in_axes=(None, "
        "0))(w, x)), {option})({xs})[1]"
    ),
    "gt.GradientAccumulator": "accumulated(gt.grad({touched}), {xs})",
    "gt.make_functional": "functionalized({f}, {xs})",
    "gt.minimax_value_and_grad": "gt.minimax_value_and_grad({both}, 0, 1)({xs})[1][{option}]",
    "gt.mixed_partial": ("gt.mixed_partial({loss}, lambda z: xp.sin(z) * z, {0}, {1}, {2})"),
    "native.grad": "native.grad({loss}, {option})({xs})",
    "native.jvp": "native.jvp({f}, ({half},), ({rest},))[1]",
    "native.vjp": "native.vjp({f}, {but_last})[1]({last})[{option}]",
    "native.vmap": "native.vmap({f}, {axes})({xs})",
}


def _function(f: DrawnFunction, depth: int) -> Iterator[str]:
    pad = "    " * depth
    yield f"{pad}def {f.name}({', '.join(name for name, _ in f.params)}):"
    for line in f.lines:
        for inner in line.inner:
            yield from _function(inner, depth + 1)
        yield f"{pad}    {line.name} = {_line(line)}"
    yield f"{pad}    return {f.out}" + ("" if depth else "\n\n")


def _line(line: DrawnLine) -> str:
    if line.op == "constant":
        return SIMPLE["constant"].format(values=constant(line.kind, line.option).tolist())
    if line.op in SIMPLE:
        return SIMPLE[line.op].format(*line.args, option=line.option)
    return CALLS[line.op].format(*line.args, **_parts(line))


def _parts(line: DrawnLine) -> dict[str, Any]:
    """What the text of an operator's call may name."""
    f, args = line.inner[0], list(line.args)
    names = ", ".join(name for name, _ in f.params)
    called = f"{f.name}({names})"
    total = f"xp.sum({called})"
    if f.kind.complex:
        total = f"(lambda y: xp.sum(xp.real(y)) + 0.5 * xp.sum(xp.imag(y)))({called})"
    first = f.params[0]
    xs, half = ", ".join(args), len(args) // 2
    return {
        "f": f.name,
        "loss": f"lambda {names}: {total}",
        "touched": f"lambda {names}: {total} + 0.0 * xp.sum({first[0]})",
        "both": f"lambda {names}: {total} + " + " + ".join(f"xp.sum({p})" for p, _ in f.params),
        "xs": xs,
        "half": ", ".join(args[:half]),
        "rest": ", ".join(args[half:]),
        "tail": ", ".join(args[1:]),
        "but_last": ", ".join(args[:-1]),
        "last": args[-1],
        "key": "'b'][0" if line.option == 1 else "'a'",
        "axes": (0, *[None] * (len(f.params) - 1)) if len(f.params) > 1 else 0,
        "over_out": _summed(f.kind),
        "over_x": _summed(first[1]),
        "option": line.option,
    }


def _summed(kind: ArrayKind) -> str:
    """A sum over the first axes, as many as the kind has."""
    return f".sum({tuple(range(len(kind.shape)))})" if kind.shape else ""
