"""Runs the sweep over all functions of jax.lax, jax.numpy and related modules.

A program is a case of `jax_programs`. All operators are traced into one function for each case,
which is compiled together with JAX's own derivatives. If an operator raises an error during
tracing, the error is recorded and the other operators are traced. An operator may raise an error
only if JAX's own derivative raises an error.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from typing import Any
from zlib import crc32

import jax
import jax.numpy as jnp
import numpy as np

import gradtools.jax as gt
from gradtools.errors import GradtoolsWarning
from tests.sweeps import AGREES, DIFFERS, LEFT_OUT, RAISED, Known, Outcome
from tests.sweeps.jax_programs import Case, cases, takes_complex

Arrays = list[Any]
_TOLERANCE = {1: 1e-11, 2: 1e-10}
_NOTHING = 1e-13  # errors up to this absolute value count as zero


def sweep(programs: Iterable[Case], whole: bool = False, eager: bool = False) -> list[Outcome]:
    """Return the outcome of every program for every operator.

    Args:
        programs: Cases of `jax_programs`.
        whole: Whether to run all samples, including complex arguments, with all operators.
            Otherwise the sweep runs only the first sample with the principal operators.
        eager: Whether each operator runs separately and without compilation.
    """
    with jax.enable_x64(True), warnings.catch_warnings():
        warnings.simplefilter("ignore", np.exceptions.ComplexWarning)
        warnings.simplefilter("ignore", GradtoolsWarning)
        return [
            outcome
            for case in programs
            if whole or not case.sample
            for dtype in _dtypes(case, whole)
            for outcome in _swept(case, dtype, whole, eager)
        ]


def _dtypes(case: Case, whole: bool) -> Iterator[str]:
    if not case.complex_only:
        yield "float64"
    if case.complex_only or (whole and takes_complex(case)):
        yield "complex128"


def groups(size: int) -> list[tuple[Case, ...]]:
    """Return all cases in groups of about `size`; the cases of a function are in one group."""
    result: list[tuple[Case, ...]] = [()]
    for _, same in groupby(cases(), key=lambda case: case.program):
        if len(result[-1]) >= size:
            result.append(())
        result[-1] += tuple(same)
    return result


# --- one program at one point ------------------------------------------------------------


@dataclass(frozen=True)
class Point:
    """A function of lists of arrays, with its primals, tangents and cotangents."""

    f: Callable[..., Arrays]
    xs: Arrays
    ts: Arrays
    cs: Arrays

    @property
    def every(self) -> tuple[int, ...]:
        """Return the argnums of all arguments."""
        return tuple(range(len(self.xs)))

    def inner(self, outs: Sequence[Any]) -> Any:
        """Return Re<c, y>."""
        return sum(jnp.sum(jnp.real(jnp.conj(c) * y)) for c, y in zip(self.cs, outs, strict=True))

    def loss(self, outs: Sequence[Any]) -> Any:
        """Return Re<c, y> + |y|^2 / 2, whose second derivative is nonzero even if f is linear."""
        return self.inner(outs) + 0.5 * sum(jnp.sum(jnp.abs(y) ** 2) for y in outs)

    def g(self, *xs: Any) -> Any:
        """Return the loss of the outputs of f."""
        return self.loss(self.f(*xs))

    def gradient(self, g: Callable[..., Any], *xs: Any) -> Arrays:
        """Return JAX's own gradient of a real g in the complex convention of gradtools."""
        return [jnp.conj(x) for x in jax.grad(g, self.every)(*xs)]

    def pushed(self, *xs: Any) -> Arrays:
        """Return JAX's own tangent of f."""
        return jax.jvp(self.f, xs, tuple(self.ts))[1]


def _pulled(p: Point) -> Arrays:
    pull = jax.vjp(p.f, *p.xs)[1]
    return [jnp.conj(x) for x in pull([jnp.conj(c) for c in p.cs])]


def _mixed(p: Point) -> Arrays:
    each = zip(p.cs, p.f(*p.xs), p.pushed(*p.xs), strict=True)
    return [jnp.real(jnp.conj(c + y) * dy) for c, y, dy in each]


NATIVE: dict[str, Callable[[Point], Arrays]] = {
    "pullback": _pulled,
    "pushforward": lambda p: p.pushed(*p.xs),
    "fr": lambda p: jax.jvp(partial(p.gradient, p.g), tuple(p.xs), tuple(p.ts))[1],
    "rr": lambda p: p.gradient(lambda *xs: _along(p, p.gradient(p.g, *xs)), *p.xs),
    "ff": lambda p: jax.jvp(p.pushed, tuple(p.xs), tuple(p.ts))[1],
    "rf": lambda p: p.gradient(lambda *xs: p.inner(p.pushed(*xs)), *p.xs),
    "mixed": _mixed,
}
"""JAX's own derivatives; names of second-order modes begin with the outermost mode."""


def _along(p: Point, slopes: Arrays) -> Any:
    return sum(jnp.sum(jnp.real(jnp.conj(t) * s)) for t, s in zip(p.ts, slopes, strict=True))


# --- ways of differentiating -------------------------------------------------------------


@dataclass(frozen=True)
class Way:
    """An operator of gradtools, and the name of the JAX derivative with which it is compared."""

    name: str
    run: Callable[[Point], Any]
    gives: str
    principal: bool = False
    complex: bool = True

    @property
    def order(self) -> int:
        """Return the order of the derivative."""
        return 2 if len(self.gives) == 2 else 1


def _vjp(p: Point, f: Any = None) -> Any:
    return gt.vjp(f or p.f, *p.xs)[1](p.cs)


def _jvp(p: Point, f: Any = None) -> Any:
    return gt.jvp(f or p.f, p.xs, p.ts)[1]


def _hvp(p: Point, mode: Any, f: Any = None) -> Any:
    g = p.g if f is None else lambda *xs: p.loss(f(*xs))
    return gt.hvp(g, p.xs, p.ts, mode=mode)[1]


def _contracted(blocks: Sequence[Any], ts: Sequence[Any]) -> Any:
    """Multiply the rows of a Jacobian by the tangents and add the results."""
    return sum(jnp.tensordot(b, t, axes=jnp.ndim(t)) for b, t in zip(blocks, ts, strict=True))


def _jacobian(p: Point, mode: Any, f: Any = None) -> Arrays:
    return [_contracted(row, p.ts) for row in gt.jacobian(f or p.f, p.every, mode=mode)(*p.xs)]


def _grad_of_jvp(p: Point) -> Any:
    g = lambda *xs: p.inner(gt.jvp(p.f, xs, p.ts)[1])
    return gt.grad(g, p.every, disconnected_inputs="zeros")(*p.xs)


def _mixed_partial(p: Point) -> Any:
    """Compute d/dy of <t, d/dx sum y (Re(conj(c) f) + |f|^2 / 2)> at y = 1."""

    def f(ys: Arrays, outs: Arrays) -> Any:
        each = zip(ys, p.cs, outs, strict=True)
        return sum(jnp.sum(y * jnp.real(jnp.conj(c + 0.5 * o) * o)) for y, c, o in each)

    ones = [jnp.ones(jnp.shape(c), jnp.float64) for c in p.cs]
    return gt.mixed_partial(f, lambda xs: p.f(*xs), ones, tuple(p.xs), tuple(p.ts))


def _chunked(p: Point) -> Any:
    """Return the pullback of `chunked` for three examples, of which the last is the point p."""
    rows = lambda x, t: jnp.stack([x + s * t for s in (0.02, 0.01, 0.0)])
    batch = [rows(x, t) for x, t in zip(p.xs, p.ts, strict=True)]
    cs = [jnp.stack([jnp.zeros_like(c), 2 * c, c]) for c in p.cs]
    return [x[2] for x in gt.vjp(gt.chunked(jax.vmap(p.f), 1), *batch)[1](cs)]


def _by_defvjp(f: Any) -> Any:
    rule = gt.custom_rule(f)

    def bwd(pull: Any, cts: Any) -> Any:
        return tuple(jnp.conj(x) for x in pull([jnp.conj(c) for c in cts]))

    rule.defvjp(lambda *xs: jax.vjp(f, *xs), bwd)
    return rule


def _by_defjvp(f: Any) -> Any:
    rule = gt.custom_rule(f)
    rule.defjvp(lambda primals, tangents: jax.jvp(f, primals, tangents))
    return rule


def _edited(f: Any) -> Any:
    """Return f with two gradient edits, which scale the derivative by -2 and by -1/2."""
    return lambda *xs: gt.reverse_gradient(f(*[gt.scale_gradient(x, -2.0) for x in xs]), 0.5)


FOR, ROR = "forward_over_reverse", "reverse_over_reverse"
WAYS = (
    Way("vjp", _vjp, "pullback", principal=True),
    Way("jvp", _jvp, "pushforward", principal=True),
    Way("linearize", lambda p: gt.linearize(p.f, *p.xs)[1](*p.ts), "pushforward", principal=True),
    Way("hvp, forward over reverse", lambda p: _hvp(p, FOR), "fr", principal=True),
    Way("hvp, reverse over reverse", lambda p: _hvp(p, ROR), "rr", principal=True),
    Way("frozen, second order", lambda p: _hvp(p, ROR, gt.frozen(p.f)), "fr", principal=True),
    Way("jacobian, forward", lambda p: _jacobian(p, "forward"), "pushforward", complex=False),
    Way("jacobian, reverse", lambda p: _jacobian(p, "reverse"), "pullback", complex=False),
    Way(
        "hessian",
        lambda p: [_contracted(row, p.ts) for row in gt.hessian(p.g, p.every)(*p.xs)],
        "fr",
        complex=False,
    ),
    Way("grad of jvp", _grad_of_jvp, "rf"),
    Way("mixed_partial", _mixed_partial, "mixed"),
    Way("checkpoint, second order", lambda p: _hvp(p, ROR, gt.checkpoint(p.f)), "rr"),
    Way("chunked", _chunked, "pullback"),
    Way("rule by defvjp, jvp", lambda p: _jvp(p, _by_defvjp(p.f)), "pushforward"),
    Way("rule by defvjp, second order", lambda p: _hvp(p, ROR, _by_defvjp(p.f)), "rr"),
    Way("rule by defjvp, vjp", lambda p: _vjp(p, _by_defjvp(p.f)), "pullback"),
    Way("rule by defjvp, second order", lambda p: _hvp(p, FOR, _by_defjvp(p.f)), "fr"),
    Way("edits, vjp", lambda p: _vjp(p, _edited(p.f)), "pullback"),
    Way("edits, jvp", lambda p: _jvp(p, _edited(p.f)), "pushforward"),
)


# --- one trial ---------------------------------------------------------------------------


def _swept(case: Case, dtype: str, whole: bool, eager: bool) -> Iterator[Outcome]:
    about = lambda way, *told: Outcome(case.program, way, case.sample, dtype, *told)
    ways = [w for w in WAYS if (whole or w.principal) and (dtype == "float64" or w.complex)]

    def f(*xs: Any) -> Arrays:
        leaves = [jnp.asarray(y) for y in jax.tree.leaves(case.f(*xs))]
        return [y for y in leaves if jnp.issubdtype(y.dtype, jnp.inexact)]

    point = _point(case, f, dtype)
    if not point.cs:
        yield about("every way", LEFT_OUT, "no output is floating or complex")
        return
    numbers, errors = _computed(point, ways, eager)
    for way in ways:
        if way.name in errors:
            yield about(way.name, RAISED if way.gives in numbers else AGREES, errors[way.name])
        elif way.gives not in numbers:
            yield about(way.name, DIFFERS, f"returns numbers, but JAX raises {errors[way.gives]}")
        else:
            expected = numbers[way.gives]
            if way.name == "jacobian, reverse":  # Re<c, J t> = Re<J^H c, t>
                expected = numbers.get("pushforward", numbers[way.name])
            error = distance(numbers[way.name], expected)
            result = AGREES if error <= _TOLERANCE[way.order] else DIFFERS
            yield about(way.name, result, f"{error:.1e}")


def _point(case: Case, f: Any, dtype: str) -> Point:
    rng = np.random.default_rng(crc32(f"{case.program} directions".encode()))

    def drawn(like: Any) -> Any:
        result = rng.uniform(0.3, 1.0, like.shape) * rng.choice([-1.0, 1.0], like.shape)
        if np.issubdtype(like.dtype, np.complexfloating):
            result = result + 1j * rng.uniform(0.2, 0.8, like.shape)
        return jnp.asarray(result, like.dtype)

    xs = [np.asarray(x) for x in case.arguments(dtype)]
    outs = jax.eval_shape(f, *xs)
    return Point(f, [jnp.asarray(x) for x in xs], [*map(drawn, xs)], [*map(drawn, outs)])


def _computed(point: Point, ways: Sequence[Way], eager: bool) -> tuple[dict, dict[str, str]]:
    """Return the results of JAX and of each operator, and the errors that operators raised."""
    errors: dict[str, str] = {}
    needed = {way.gives for way in ways} | {"pushforward"}
    tasks = [(n, run) for n, run in NATIVE.items() if n in needed]
    tasks += [(way.name, way.run) for way in ways]

    def everything(xs: Arrays, ts: Arrays, cs: Arrays) -> dict[str, Arrays]:
        numbers = {}
        for name, run in tasks:
            try:
                numbers[name] = [jnp.asarray(x) for x in run(Point(point.f, xs, ts, cs))]
                if eager:
                    jax.block_until_ready(numbers[name])
            except Exception as error:
                errors[name] = f"{type(error).__name__}: {error}".split("\n")[0][:250]
        return numbers

    arrays = (point.xs, point.ts, point.cs)
    try:
        found = jax.device_get((everything if eager else jax.jit(everything))(*arrays))
    except Exception:
        # one operator fails to compile in XLA, so all operators run without compilation
        if eager:
            raise
        return _computed(point, ways, eager=True)
    return {name: [np.asarray(x) for x in values] for name, values in found.items()}, errors


def distance(found: Sequence[np.ndarray], expected: Sequence[np.ndarray]) -> float:
    """Return the largest difference relative to the largest entry, where NaN equals NaN."""
    if [x.shape for x in found] != [x.shape for x in expected]:
        return np.inf
    a, b = (np.concatenate([np.ravel(x) for x in xs]) for xs in (found, expected))
    off = np.abs(a - b)[~((a == b) | (np.isnan(a) & np.isnan(b)))]
    if not off.size or off.max() <= _NOTHING:
        return 0.0
    return float(off.max() / np.abs(b).max())


KNOWN: Known = {
    (
        "nn.dot_product_attention",
        "*",
    ): "the function computes in float32 for every input dtype (jax#37422)",
    ("lax.while_loop; scipy.special.hyp?f1", "rule by defvjp, *"): "the rule's fwd calls jax.vjp",
}
