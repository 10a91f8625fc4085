"""The sweep over JAX: every function of jax.lax, jax.numpy and their kin, through every operator.

A program is a case of `jax_programs`. All ways of differentiating it are traced into one function
and compiled once, together with what they are held against: JAX's own derivatives, and values
along a line, from which come finite differences,

    J t  =  d/ds f(x + s t)          H t  =  d/ds grad(x + s t)          Re<c, J t> = Re<J^H c, t>

Finite differences always decide at second order. A way that raises while it is traced is noted,
and the others go on.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import groupby, pairwise
from typing import Any
from zlib import crc32

import jax
import jax.numpy as jnp
import numpy as np

import gradtools.jax as gt
from gradtools.errors import (
    GradtoolsError,
    GradtoolsWarning,
    NotImplementedRefusal,
    ValueRefusal,
)
from gradtools.testing.checking.probe import inner, size
from gradtools.testing.cross_checking.tolerances import FINITE_DIFFERENCES
from tests.support.sweeps import (
    AGREES,
    DIFFERS,
    LEFT_OUT,
    RAISED,
    REFUSED,
    LedgerVerdict,
    SweepOutcome,
    jax_ledger,
    judged,
)
from tests.support.sweeps.jax_programs import Case, cases, takes_complex, unknown

Arrays = list[Any]

_STEPS = 0.03 * 0.5 ** np.arange(4)
_NATIVE = {1: 1e-11, 2: 1e-10}
_NUMERIC = FINITE_DIFFERENCES["float64"]
_NOTHING = 1e-13  # rounding, where all entries should be zero


def sweep(
    programs: Iterable[Case] | None = None, *, whole: bool = False, eager: bool = False
) -> list[SweepOutcome]:
    """What comes of every program in every way.

    Args:
        programs: Cases of the table; all by default.
        whole: Whether every sample of a program is tried, in complex numbers too and in every
            way; else the first sample in the principal ways.
        eager: Whether each way runs by itself, operation by operation, and not compiled.
    """
    result = cases() if programs is None else tuple(programs)
    outcomes = []
    if programs is None:
        new = f"new in JAX {jax.__version__}: it has no line in the table"
        outcomes = [SweepOutcome(n, "table", 0, "", LEFT_OUT, "", new) for n in unknown()]
    with jax.enable_x64(True), warnings.catch_warnings():
        warnings.simplefilter("ignore", np.exceptions.ComplexWarning)
        warnings.simplefilter("ignore", GradtoolsWarning)
        for case in result:
            for dtype in _dtypes(case, whole):
                if whole or not case.sample:
                    outcomes += ProgramTrial(case, dtype, whole, eager).outcomes()
    return outcomes


def verdict(outcomes: Iterable[SweepOutcome], whole: bool = False) -> LedgerVerdict:
    """The outcomes held against the ledger of this version of JAX."""
    return judged(outcomes, jax_ledger.lines(), whole)


def _dtypes(case: Case, whole: bool) -> Iterator[str]:
    if case.complex_only:
        yield "complex128"
        return
    yield "float64"
    if whole and takes_complex(case):
        yield "complex128"


# --- one program at one point ------------------------------------------------------------


@dataclass(frozen=True)
class ProgramAtPoint:
    """A program as a function from lists to lists, at a point, with directions.

    Attributes:
        f: The arrays to a list of the outputs that are floating or complex.
        xs: The arguments.
        ts: A tangent.
        cs: A cotangent.
        xp: The namespace of the arrays.
    """

    f: Callable[..., Arrays]
    xs: Arrays
    ts: Arrays
    cs: Arrays
    xp: Any = jnp

    def inner(self, a: Any, b: Any) -> Any:
        """Re<a, b>."""
        return self.xp.sum(self.xp.real(self.xp.conj(a) * b))

    def loss(self, outs: Sequence[Any]) -> Any:
        """Re<c, y> + |y|^2 / 2, which is curved where f is not."""
        pairs = zip(self.cs, outs, strict=True)
        return sum(self.inner(c, y) + 0.5 * self.inner(y, y) for c, y in pairs)

    def g(self, *xs: Any) -> Any:
        """The loss of f."""
        return self.loss(self.f(*xs))

    def gradient(self, g: Callable[..., Any], *xs: Any) -> Arrays:
        """JAX's own gradient of a real g, in gradtools' convention."""
        return [jnp.conj(x) for x in jax.grad(g, tuple(range(len(xs))))(*xs)]

    def pushed(self, *xs: Any) -> Arrays:
        """JAX's own tangent of f."""
        return jax.jvp(self.f, xs, tuple(self.ts))[1]


# --- what JAX says -----------------------------------------------------------------------


def _native_pullback(p: ProgramAtPoint) -> Arrays:
    pull = jax.vjp(p.f, *p.xs)[1]
    return [jnp.conj(x) for x in pull([jnp.conj(c) for c in p.cs])]


def _native_product(p: ProgramAtPoint) -> Arrays:
    return jax.jvp(partial(p.gradient, p.g), tuple(p.xs), tuple(p.ts))[1]


def _native_second(p: ProgramAtPoint) -> Arrays:
    return jax.jvp(p.pushed, tuple(p.xs), tuple(p.ts))[1]


def _slope_of_tangent(p: ProgramAtPoint, pushed: Callable[..., Arrays], *xs: Any) -> Any:
    return sum(p.inner(c, y) for c, y in zip(p.cs, pushed(*xs), strict=True))


NATIVE: dict[str, Callable[[ProgramAtPoint], Arrays]] = {
    "value": lambda p: p.f(*p.xs),
    "pullback": _native_pullback,
    "pushforward": lambda p: p.pushed(*p.xs),
    "product": _native_product,
    "second": _native_second,
    "slope": lambda p: p.gradient(partial(_slope_of_tangent, p, p.pushed), *p.xs),
}
LINES: dict[str, tuple[str, Callable[..., Any]]] = {
    "pushforward": ("value", lambda p, *xs: p.f(*xs)),
    "product": ("product", lambda p, *xs: p.gradient(p.g, *xs)),
    "second": ("second", lambda p, *xs: p.pushed(*xs)),
}
"""For a derivative along the tangent: what must work for it, and what it is the slope of."""


def _along(p: ProgramAtPoint, functions: dict[str, Callable[..., Any]]) -> dict[str, Arrays]:
    """Functions at both sides of each step, of shape (steps, 2, ...)."""

    def at(s: Any) -> dict[str, Arrays]:
        xs = [x + s * t for x, t in zip(p.xs, p.ts, strict=True)]
        return {name: list(f(p, *xs)) for name, f in functions.items()}

    steps = jnp.asarray(np.stack([_STEPS, -_STEPS], 1).reshape(-1))
    result = jax.lax.map(at, steps)
    return jax.tree.map(lambda x: x.reshape(len(_STEPS), 2, *x.shape[1:]), result)


def _slopes(values: np.ndarray) -> np.ndarray:
    """Central differences extrapolated to step zero (Richardson, 1911)."""
    steps = _STEPS.reshape(-1, *([1] * (values.ndim - 2)))
    rows = list((values[:, 0] - values[:, 1]) / (2 * steps))
    for power in range(1, len(rows)):
        rows = [b + (b - a) / (4.0**power - 1) for a, b in pairwise(rows)]
    return rows[0]


# --- the ways ----------------------------------------------------------------------------


@dataclass(frozen=True)
class JaxWay:
    """An operator of gradtools, and which derivative it gives.

    Attributes:
        name: What the ledger calls it.
        run: Its result at a point.
        gives: The derivative, a key of `NATIVE`, or "mixed".
        order: How many derivatives are taken.
        principal: Whether the quick tier has it.
        complex: Whether it takes complex arguments.
    """

    name: str
    run: Callable[[ProgramAtPoint], Arrays]
    gives: str
    order: int = 1
    principal: bool = False
    complex: bool = True


def _vjp(p: ProgramAtPoint, f: Callable[..., Any] | None = None) -> Arrays:
    return list(gt.vjp(f or p.f, *p.xs)[1](p.cs))


def _jvp(p: ProgramAtPoint, f: Callable[..., Any] | None = None) -> Arrays:
    return list(gt.jvp(f or p.f, p.xs, p.ts)[1])


def _hvp(p: ProgramAtPoint, mode: str, f: Callable[..., Any] | None = None) -> Arrays:
    g = p.g if f is None else lambda *xs: p.loss(f(*xs))
    return list(gt.hvp(g, p.xs, p.ts, mode=mode)[1])  # type: ignore[arg-type]


def _contracted(blocks: Sequence[Any], ts: Sequence[Any]) -> Any:
    """Rows of a Jacobian times the tangents."""
    return sum(jnp.tensordot(b, t, axes=jnp.ndim(t)) for b, t in zip(blocks, ts, strict=True))


def _jacobian(p: ProgramAtPoint, mode: str, f: Callable[..., Any] | None = None) -> Arrays:
    argnums = tuple(range(len(p.xs)))
    rows = gt.jacobian(f or p.f, argnums, mode=mode)(*p.xs)  # type: ignore[arg-type]
    return [_contracted(row, p.ts) for row in rows]


def _mixed_jacobian(p: ProgramAtPoint) -> Arrays:
    def forward(*xs: Any) -> Arrays:
        argnums = tuple(range(len(xs)))
        return [_contracted(row, p.ts) for row in gt.jacobian(p.f, argnums, mode="forward")(*xs)]

    return _jacobian(p, "reverse", forward)


def _hessian(p: ProgramAtPoint) -> Arrays:
    argnums = tuple(range(len(p.xs)))
    return [_contracted(row, p.ts) for row in gt.hessian(p.g, argnums)(*p.xs)]


def _grad_of_jvp(p: ProgramAtPoint) -> Arrays:
    pushed = lambda *xs: gt.jvp(p.f, xs, p.ts)[1]
    g = partial(_slope_of_tangent, p, pushed)
    return list(gt.grad(g, tuple(range(len(p.xs))), disconnected_inputs="zeros")(*p.xs))


def _mixed_partial(p: ProgramAtPoint) -> Arrays:
    """(d/dy) of <t, (d/dx) sum y (Re(conj(c) f) + |f|^2 / 2)>, at y = 1."""

    def f(ys: Arrays, outs: Arrays) -> Any:
        each = zip(ys, p.cs, outs, strict=True)
        return sum(jnp.sum(y * jnp.real(jnp.conj(c + 0.5 * o) * o)) for y, c, o in each)

    ones = [jnp.ones(jnp.shape(c), jnp.float64) for c in p.cs]
    return gt.mixed_partial(f, lambda xs: p.f(*xs), ones, tuple(p.xs), tuple(p.ts))


def _frozen(p: ProgramAtPoint) -> Arrays:
    return _hvp(p, "reverse_over_reverse", gt.frozen(p.f))


def _checkpointed(p: ProgramAtPoint) -> Arrays:
    return _hvp(p, "reverse_over_reverse", gt.checkpoint(p.f))


def _chunked(p: ProgramAtPoint) -> Arrays:
    """f of three examples, of which the last is the point itself."""
    batch = [
        jnp.stack([x + s * t for s in (0.02, 0.01, 0.0)]) for x, t in zip(p.xs, p.ts, strict=True)
    ]
    cs = [jnp.stack([jnp.zeros_like(c), 2 * c, c]) for c in p.cs]
    pull = gt.vjp(gt.chunked(jax.vmap(p.f), 1), *batch)[1]
    return [x[2] for x in pull(cs)]


def _ruled(p: ProgramAtPoint, forward: bool) -> Any:
    rule = gt.custom_rule(p.f)
    if forward:
        rule.defjvp(lambda primals, tangents: jax.jvp(p.f, primals, tangents))
        return rule

    def bwd(pull: Any, cts: Any) -> Any:
        return tuple(jnp.conj(x) for x in pull([jnp.conj(c) for c in cts]))

    rule.defvjp(lambda *xs: jax.vjp(p.f, *xs), bwd)
    return rule


def _edited(p: ProgramAtPoint) -> Callable[..., Any]:
    """f with its first derivatives times -2 and times -1/2."""
    return lambda *xs: gt.reverse_gradient(p.f(*[gt.scale_gradient(x, -2.0) for x in xs]), 0.5)


def refuses(error: Exception) -> bool:
    """Whether gradtools refuses, rather than says in its words what plain JAX raises as well."""
    native = isinstance(error, NotImplementedRefusal | ValueRefusal) and "JAX says" in str(error)
    return isinstance(error, GradtoolsError) and not native


FOR, ROR = "forward_over_reverse", "reverse_over_reverse"
WAYS = (
    JaxWay("vjp", _vjp, "pullback", principal=True),
    JaxWay("jvp", _jvp, "pushforward", principal=True),
    JaxWay(
        "linearize",
        lambda p: gt.linearize(p.f, *p.xs)[1](*p.ts),
        "pushforward",
        principal=True,
    ),
    JaxWay("hvp, forward over reverse", lambda p: _hvp(p, FOR), "product", 2, principal=True),
    JaxWay("hvp, reverse over reverse", lambda p: _hvp(p, ROR), "product", 2, principal=True),
    JaxWay("frozen, second order", _frozen, "product", 2, principal=True),
    JaxWay("jacobian, forward", lambda p: _jacobian(p, "forward"), "pushforward", complex=False),
    JaxWay("jacobian, reverse", lambda p: _jacobian(p, "reverse"), "pushforward", complex=False),
    JaxWay("jacobian, reverse over forward", _mixed_jacobian, "second", 2, complex=False),
    JaxWay("hessian", _hessian, "product", 2, complex=False),
    JaxWay("grad of jvp", _grad_of_jvp, "slope", 2),
    JaxWay("mixed_partial", _mixed_partial, "mixed", 2),
    JaxWay("checkpoint, second order", _checkpointed, "product", 2),
    JaxWay("chunked", _chunked, "pullback"),
    JaxWay("rule by vjp, jvp", lambda p: _jvp(p, _ruled(p, False)), "pushforward"),
    JaxWay("rule by vjp, second order", lambda p: _hvp(p, ROR, _ruled(p, False)), "product", 2),
    JaxWay("rule by jvp, vjp", lambda p: _vjp(p, _ruled(p, True)), "pullback"),
    JaxWay("rule by jvp, second order", lambda p: _hvp(p, FOR, _ruled(p, True)), "product", 2),
    JaxWay("edits, vjp", lambda p: _vjp(p, _edited(p)), "pullback"),
    JaxWay("edits, jvp", lambda p: _jvp(p, _edited(p)), "pushforward"),
)


# --- a trial -----------------------------------------------------------------------------


class ProgramTrial:
    """One program at one point, in every way."""

    def __init__(self, case: Case, dtype: str, whole: bool, eager: bool) -> None:
        self.case, self.dtype, self.whole, self.eager = case, dtype, whole, eager
        real = dtype == "float64"
        self.ways = [w for w in WAYS if (whole or w.principal) and (real or w.complex)]
        self.errors: dict[str, Exception] = {}
        self.numbers: dict[str, list[np.ndarray]] = {}
        self.lines: dict[str, list[np.ndarray]] = {}

    def f(self, *xs: Any) -> Arrays:
        """The outputs that are floating or complex."""
        leaves = [jnp.asarray(y) for y in jax.tree.leaves(self.case.f(*xs))]
        return [y for y in leaves if jnp.issubdtype(y.dtype, jnp.inexact)]

    @cached_property
    def point(self) -> ProgramAtPoint:
        """The arguments and directions, the same in each run."""
        rng = np.random.default_rng(crc32(f"{self.case.program} directions".encode()))

        def drawn(shape: Any, dtype: Any) -> np.ndarray:
            result = rng.uniform(0.3, 1.0, shape) * rng.choice([-1.0, 1.0], shape)
            if np.issubdtype(dtype, np.complexfloating):
                result = result + 1j * rng.uniform(0.2, 0.8, shape)
            return np.asarray(result, dtype)

        xs = [np.asarray(x) for x in self.case.arguments(self.dtype)]
        outs = jax.eval_shape(self.f, *xs)
        ts, cs = ([drawn(y.shape, y.dtype) for y in ys] for ys in (xs, outs))
        place = lambda ys: [jnp.asarray(y) for y in ys]
        return ProgramAtPoint(self.f, place(xs), place(ts), place(cs))

    def outcomes(self) -> list[SweepOutcome]:
        """What came of each way."""
        try:
            point = self.point
        except Exception as error:
            return [self._outcome(w.name, RAISED, "the program", said(error)) for w in self.ways]
        if not point.cs:
            return [self._outcome("program", LEFT_OUT, "", "no output is floating or complex")]
        self._compute(point)
        result = [self._judge(way) for way in self.ways]
        if self.whole and "pullback" in self.numbers:
            result.append(self._why_zero(point))
        return result

    # --- numbers

    def _compute(self, point: ProgramAtPoint) -> None:
        arrays = (point.xs, point.ts, point.cs)
        try:
            run = self._everything if self.eager else jax.jit(self._everything)
            result = run(*arrays)
            numbers, lines = jax.device_get(result)
        except Exception as error:  # what is found when XLA compiles spoils all of them
            if self.eager:
                raise
            self.errors["compiled"] = error
            self.eager = True
            return self._compute(point)
        self.numbers = {k: [np.asarray(x) for x in v] for k, v in numbers.items()}
        self.lines = {k: [_slopes(np.asarray(x)) for x in v] for k, v in lines.items()}

    def _everything(self, xs: Arrays, ts: Arrays, cs: Arrays) -> Any:
        point = ProgramAtPoint(self.f, xs, ts, cs)
        numbers = {}
        needed = {way.gives for way in self.ways} | {"value"}
        tasks = {name: run for name, run in NATIVE.items() if name in needed}
        for name, run in (*tasks.items(), *((way.name, way.run) for way in self.ways)):
            try:
                numbers[name] = [jnp.asarray(x) for x in run(point)]
                if self.eager:
                    jax.block_until_ready(numbers[name])
            except Exception as error:
                self.errors[name] = error
        lines = {
            name: f
            for name, (needs, f) in LINES.items()
            if needs in numbers and (name in needed or name == "pushforward" or self.whole)
        }
        return numbers, _along(point, lines)

    # --- judging

    def _judge(self, way: JaxWay) -> SweepOutcome:
        error = self.errors.get(way.name)
        if error is not None:
            result = REFUSED if refuses(error) else RAISED
            return self._outcome(way.name, result, "", said(error))
        found = self.numbers[way.name]
        held = list(self._held(way, found))
        if not held:
            return self._outcome(way.name, LEFT_OUT, "", "nothing to hold it against")
        worst = max(held, key=lambda h: h[1] if h[1] == h[1] else np.inf)
        result = AGREES if worst[1] <= 1 else DIFFERS
        oracles = worst[0] if result == DIFFERS else ", ".join(name for name, _ in held)
        return self._outcome(way.name, result, oracles, f"{worst[1]:.3g}")

    def _held(self, way: JaxWay, found: list[np.ndarray]) -> Iterator[tuple[str, float]]:
        """The oracles, and the error in units of the tolerance."""
        if way.gives in self.numbers:
            error = distance(found, self.numbers[way.gives]) / _NATIVE[way.order]
            yield "jax", error
        p = self.point
        if way.gives in self.lines:
            yield "finite differences", distance(found, self.lines[way.gives]) / _NUMERIC
        elif way.gives == "mixed":
            each = zip(p.cs, self.numbers["value"], self.lines["pushforward"], strict=True)
            expected = [np.real(np.conj(c + y) * dy) for c, y, dy in each]
            yield "finite differences", distance(found, expected) / _NUMERIC
        elif way.gives in ("pullback", "slope"):
            line = self.lines.get({"pullback": "pushforward", "slope": "second"}[way.gives])
            if line is not None:
                dots = inner(found, p.ts), inner(p.cs, line)
                most = max(size(found, p.ts), size(p.cs, line), _NOTHING)
                yield "dot product", float(abs(dots[0] - dots[1])) / most / _NUMERIC

    def _why_zero(self, point: ProgramAtPoint) -> SweepOutcome:
        """Where every entry has a derivative that is not zero, nothing is reported."""
        if not all(np.all(x) for x in self.numbers["pullback"]):
            return self._outcome("why_zero", AGREES, "", "nothing is expected")
        try:
            report = gt.why_zero(point.g, *point.xs, argnums=tuple(range(len(point.xs))))
        except Exception as error:
            return self._outcome("why_zero", RAISED, "", said(error))
        if report:
            return self._outcome("why_zero", DIFFERS, "jax", str(report.findings[0])[:200])
        return self._outcome("why_zero", AGREES, "jax")

    def _outcome(self, way: str, result: str, oracle: str = "", detail: str = "") -> SweepOutcome:
        case = self.case
        return SweepOutcome(case.program, way, case.sample, self.dtype, result, oracle, detail)


def said(error: Exception) -> str:
    """The first line of an error."""
    return f"{type(error).__name__}: {error}".split("\n")[0][:300]


def distance(found: Sequence[np.ndarray], expected: Sequence[np.ndarray]) -> float:
    """The largest difference, relative to the largest entry; NaN where one is NaN."""
    if [x.shape for x in found] != [x.shape for x in expected]:
        return np.inf
    a, b = (np.concatenate([np.ravel(x) for x in xs] or [np.zeros(0)]) for xs in (found, expected))
    if not a.size:
        return 0.0
    scale = max(np.abs(a).max(), np.abs(b).max())
    off = np.abs(a - b).max()
    return 0.0 if off <= _NOTHING else float(off / scale)


def groups(size: int) -> list[tuple[Case, ...]]:
    """All cases in groups of about so many, each function's together."""
    result: list[tuple[Case, ...]] = [()]
    for _, same in groupby(cases(), key=lambda case: case.program):
        if len(result[-1]) >= size:
            result.append(())
        result[-1] += tuple(same)
    return result
