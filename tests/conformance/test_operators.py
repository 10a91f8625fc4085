"""Applies every operator to every program and compares results with `torch.func` or `jax`.

The programs are the records of `scenario_table.py`. Each program f becomes the loss

    L(x) = sum over outputs of Re<w, y> + |y|^2 / 2,    y = f(x)

of its floating-point leaves x, with fixed weights w. `Plain` computes derivatives of the loss with
the framework's own transforms in the complex convention of gradtools. For each operator, one
function of the case yields the computed and the expected values.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import lru_cache
from importlib import import_module
from typing import Any

import numpy as np
import pytest

from gradtools.testing.cross_checking.tolerances import tolerance
from tests.support.native import NATIVE
from tests.support.numpy_trees import leaves, lift, lower, tree_map
from tests.support.scenario_table import Scenario, program_of, smooth_programs

pytest_plugins = ["tests.support.compiled_programs"]
pytestmark = pytest.mark.usefixtures("compiled_programs_kept")

Pairs = Iterator[tuple[Any, Any]]
SCALE = 0.6
# Programs whose tangents PyTorch differentiates wrongly (torch#192540).
WRONG_TANGENTS = ("solve", "determinant", "log determinant")
UNMAPPED = ("a branch on values",)  # programs that support neither vmap nor jit


class Case:
    """A program in one backend with its floating-point leaves, tangents and loss."""

    def __init__(self, backend: str, program: Scenario, dtype: str | None = None) -> None:
        self.gt, self.backend, self.program = (
            import_module(f"gradtools.{backend}"),
            backend,
            program,
        )
        waist = self.gt._api._backend
        flat, self._tree = waist.flatten(lift(backend, tree_map(np.asarray, tuple(program.args))))
        self._waist, self._all = waist, flat
        if dtype is not None:
            self._all = [waist.cast(x, dtype) if waist.is_inexact(x) else x for x in flat]
        self._moving = [waist.is_inexact(x) for x in self._all]
        self.xs = [x for x, m in zip(self._all, self._moving, strict=True) if m]
        self.argnums = tuple(range(len(self.xs)))
        self.ts, self.us = ([self.draw(x, k) for x in self.xs] for k in (1, 2))
        self.ws = [self.draw(y, 3) for y in self.f(*self.xs)]

    def draw(self, like: Any, seed: int) -> Any:
        """Return independent normal random numbers with the shape and dtype of an array."""
        rng = np.random.default_rng([seed, *like.shape])
        drawn = rng.standard_normal(tuple(like.shape))
        if self._waist.is_complex(like):
            drawn = drawn + 1j * rng.standard_normal(tuple(like.shape))
        return self._waist.cast(self.gt.asarray(np.asarray(drawn)), like)

    def f(self, *xs: Any) -> list[Any]:
        """Return the floating-point outputs of the program at the given leaves."""
        left = iter(xs)
        full = [next(left) if m else x for x, m in zip(self._all, self._moving, strict=True)]
        out = self.program.bind(self.gt)(*self._waist.unflatten(self._tree, full))
        return [y for y in self._waist.flatten(out)[0] if self._waist.is_inexact(y)]

    def total(self, ys: list[Any]) -> Any:
        """Return the loss L as a function of the outputs ys."""
        xp, is_complex = self.gt.xp, self._waist.is_complex
        return sum(
            xp.sum(
                xp.real(xp.conj(w) * y) + xp.abs(y) ** 2 / 2 if is_complex(y) else w * y + y * y / 2
            )
            for y, w in zip(ys, self.ws, strict=True)
        )

    def loss(self, *xs: Any) -> Any:
        return self.total(self.f(*xs))


class Plain:
    """Derivatives of the loss and outputs of a case, computed by the framework itself."""

    def __init__(self, case: Case) -> None:
        self.case, self.native = case, NATIVE[case.backend]
        self.grads = self.gradient(case.loss, case.xs)
        self.value = case.loss(*case.xs)

    def _conj(self, xs: Any) -> list[Any]:
        return [self.case.gt.xp.conj(x) if "complex" in str(x.dtype) else x for x in xs]

    def gradient(self, loss: Any, xs: list[Any]) -> list[Any]:
        """Return df/dRe + i df/dIm, the conjugate of JAX's gradient."""
        out, pullback = self.native.vjp(loss, *xs)
        found = pullback(self.case.gt.xp.ones_like(out))
        return self._conj(found) if self.case.backend == "jax" else list(found)

    def pulled(self) -> list[Any]:
        c = self.case
        pullback = self.native.vjp(c.f, *c.xs)[1]
        if c.backend == "jax":
            return self._conj(pullback(self._conj(c.ws)))
        return list(pullback(list(c.ws)))

    def pushed(self) -> list[Any]:
        return self.native.jvp(self.case.f, tuple(self.case.xs), tuple(self.case.ts))[1]

    def product(self) -> list[Any]:
        """Return the Hessian times ts as the gradient of Re<gradient, ts>."""
        c, xp = self.case, self.case.gt.xp

        def along(*xs: Any) -> Any:
            pairs = zip(self.gradient(c.loss, list(xs)), c.ts, strict=True)
            return sum(
                xp.sum(xp.real(xp.conj(t) * g)) if "complex" in str(g.dtype) else xp.sum(t * g)
                for g, t in pairs
            )

        return self.gradient(along, c.xs)


@lru_cache(maxsize=4)
def posed(backend: str, name: str) -> tuple[Case, Plain]:
    case = Case(backend, program_of(name))
    return case, Plain(case)


# --- the operators ----------------------------------------------------------------------------


def _grad(c: Case, p: Plain) -> Pairs:
    yield c.gt.grad(c.loss, c.argnums)(*c.xs), p.grads
    value, grads = c.gt.value_and_grad(c.loss, c.argnums)(*c.xs)
    yield [value, *grads], [p.value, *p.grads]
    (value, aux), grads = c.gt.value_and_grad(lambda *xs: (c.loss(*xs), xs[0]), c.argnums, True)(
        *c.xs
    )
    yield [value, aux, *grads], [p.value, c.xs[0], *p.grads]


def _vjp(c: Case, p: Plain) -> Pairs:
    outs, pullback = c.gt.vjp(c.f, *c.xs)
    yield outs, c.f(*c.xs)
    yield pullback(c.ws), p.pulled()


def _forward(c: Case, p: Plain) -> Pairs:
    outs, pushed = c.gt.jvp(c.f, c.xs, c.ts)
    yield [*outs, *pushed], [*c.f(*c.xs), *p.pushed()]
    yield c.gt.linearize(c.f, *c.xs)[1](*c.ts), p.pushed()


def _second(c: Case, p: Plain) -> Pairs:
    expected = p.product()
    for mode in ("auto", "forward_over_reverse", "reverse_over_reverse"):
        grads, product = c.gt.hvp(c.loss, c.xs, c.ts, mode=mode)
        yield [*grads, *product], [*p.grads, *expected]
    if not (c.backend == "torch" and c.program.name in WRONG_TANGENTS):
        along = lambda *xs: c.gt.jvp(c.loss, xs, c.ts)[1]
        yield c.gt.grad(along, c.argnums, disconnected_inputs="zeros")(*c.xs), expected


def _matrices(c: Case, p: Plain) -> Pairs:
    """Yield the products J t and H t, computed from the full matrices, for real arguments."""
    if any("complex" in str(x.dtype) for x in c.xs) or c.program.name in UNMAPPED:
        return
    times = lambda row: sum(
        np.tensordot(b, lower(t), t.ndim) for b, t in zip(leaves(lower(row)), c.ts, strict=True)
    )
    for mode in ("auto", "forward", "reverse"):
        rows = c.gt.jacobian(c.f, c.argnums, mode)(*c.xs)
        yield [times(row) for row in rows], p.pushed()
    rows = c.gt.hessian(c.loss, c.argnums)(*c.xs)
    yield [times(row) for row in rows], p.product()


def _same(c: Case, p: Plain) -> Pairs:
    """Yield results of the operators that change neither the values nor the derivatives of f."""
    if c.backend == "jax" and c.program.name in UNMAPPED:
        return
    wraps = {
        "checkpoint": c.gt.checkpoint,
        "frozen": c.gt.frozen,
        "straight_through": lambda f: c.gt.straight_through(lambda xs: f(*xs), lambda xs: f(*xs)),
    }
    expected = p.product()
    for name, wrap in wraps.items():
        wrapped = wrap(c.f)
        call = (lambda *xs, w=wrapped: w(xs)) if name == "straight_through" else wrapped
        loss = lambda *xs, call=call: c.total(list(call(*xs)))
        yield c.gt.grad(loss, c.argnums, disconnected_inputs="zeros")(*c.xs), p.grads
        yield c.gt.hvp(loss, c.xs, c.ts, mode="reverse_over_reverse")[1], expected


def _edits(c: Case, p: Plain) -> Pairs:
    """Yield results of gradient edits of the arguments, which scale or replace the gradient."""
    gt, product = c.gt, p.product()
    edits: dict[str, tuple[Any, float]] = {
        "reverse": (lambda x: gt.reverse_gradient(x, SCALE), -SCALE),
        "scale": (lambda x: gt.scale_gradient(x, SCALE), SCALE),
        "clip": (lambda x: gt.clip_gradient(x, max_norm=1e9, max_value=1e9), 1.0),
        "transform": (lambda x: gt.transform_gradient(x, lambda ct: 2.5 * ct), 2.5),
    }
    for edit, s in edits.values():
        loss = lambda *xs, edit=edit: c.loss(*map(edit, xs))
        yield gt.grad(loss, c.argnums)(*c.xs), [s * g for g in p.grads]
        found = gt.hvp(loss, c.xs, c.ts, mode="reverse_over_reverse")[1]
        yield found, [s * s * h for h in product]
    known = lambda *xs: c.loss(*[gt.replace_gradient(x, u) for x, u in zip(xs, c.us, strict=True)])
    yield gt.grad(known, c.argnums)(*c.xs), c.us
    stopped = lambda *xs: c.loss(*xs) + c.loss(*map(gt.stop_gradient, xs))
    yield gt.grad(stopped, c.argnums)(*c.xs), p.grads


def _players(c: Case, p: Plain) -> Pairs:
    """Yield the minimax gradients of L(x) s with respect to x and s, and a mixed partial."""
    one, n = c.gt.asarray(np.asarray(1.5)), len(c.xs)
    game = c.gt.minimax_value_and_grad(lambda *a: c.loss(*a[:-1]) * a[-1], c.argnums, n)
    value, grads = game(*c.xs, one)
    yield [value, *grads], [1.5 * p.value, *[1.5 * g for g in p.grads], -p.value]
    G = lambda x: c.f(x, *c.xs[1:])
    mixed = c.gt.mixed_partial(lambda y, out: y**2 * c.total(out), G, one, c.xs[0], c.ts[0])
    xp = c.gt.xp
    slope = xp.sum(
        xp.real(xp.conj(c.ts[0]) * p.grads[0])
        if "complex" in str(c.xs[0].dtype)
        else c.ts[0] * p.grads[0]
    )
    yield [mixed], [3.0 * slope]


def _batches(c: Case, p: Plain) -> Pairs:
    """Yield results for a batch of x and 0.9 x: in chunks, one by one, and with vmap."""
    if c.program.name in UNMAPPED:
        return
    gt, xp = c.gt, c.gt.xp
    rows = [xp.stack([x, 0.9 * x]) for x in c.xs]
    each = [
        p.gradient(c.loss, [0 * x + r[k] for x, r in zip(c.xs, rows, strict=True)]) for k in (0, 1)
    ]
    stacked = [xp.stack([*pair]) for pair in zip(*each, strict=True)]
    yield gt.per_example_grad(c.loss, c.argnums, in_axes=0)(*rows), stacked
    chunked = gt.chunked(lambda *rows: gt.vmap(c.loss)(*rows), 1)
    yield gt.grad(lambda *rows: xp.sum(chunked(*rows)), c.argnums)(*rows), stacked
    scale = gt.asarray(np.asarray(1.0))
    mean = lambda s, *rows: s * xp.mean(gt.vmap(c.loss)(*rows))
    value, found = gt.microbatched_value_and_grad(mean, 1)(scale, *rows)
    values = [c.loss(*[r[k] for r in rows]) for k in (0, 1)]
    yield [value, found], [sum(values) / 2] * 2
    total = gt.GradientAccumulator()
    total.add(tuple(each[0]), 3)
    total.add(tuple(each[1]))
    yield total.mean(), [(3 * a + b) / 4 for a, b in zip(*each, strict=True)]


OPERATORS: dict[str, Callable[[Case, Plain], Pairs]] = {
    "gradient": _grad,
    "pullback": _vjp,
    "forward": _forward,
    "second order": _second,
    "matrices": _matrices,
    "recomputed": _same,
    "edits": _edits,
    "players": _players,
    "batches": _batches,
}
ORDERS = {"second order": 2, "matrices": 2, "recomputed": 2, "edits": 2, "players": 2}


def near(found: Any, expected: Any, allowed: float) -> None:
    """Compare each leaf, relative to max(1, the largest entry of all expected leaves)."""
    found, expected = (leaves(lower(list(x))) for x in (found, expected))
    assert len(found) == len(expected)
    size = max([1.0, *(float(np.abs(y).max(initial=0)) for y in expected)])
    for a, b in zip(found, expected, strict=True):
        assert a.shape == b.shape and np.isfinite(a).all()
        assert np.abs(a - b).max(initial=0) <= allowed * size


@pytest.mark.sampled(torch=(120, 600), jax=(40, 220))
@pytest.mark.parametrize("operator", OPERATORS)
@pytest.mark.parametrize("name", [p.name for p in smooth_programs()])
def test_an_operator_gives_the_plain_frameworks_numbers(backend_name, name, operator):
    pairs = [*OPERATORS[operator](*posed(backend_name, name))]
    for found, expected in pairs:
        near(found, expected, 10 * tolerance("float64", ORDERS.get(operator, 1)))


@pytest.mark.sampled(torch=(6, 12), jax=(3, 12))
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "complex64"])
@pytest.mark.parametrize("operator", ["gradient", "pullback", "forward", "second order", "edits"])
def test_an_operator_keeps_the_dtype_and_its_precision(backend_name, operator, dtype):
    is_complex = dtype.startswith("complex")
    name = "modulus and phase" if is_complex else "differences"
    case = Case(backend_name, program_of(name), dtype)
    wide = Case(backend_name, program_of(name), "complex128" if is_complex else "float64")
    pairs = zip(
        OPERATORS[operator](case, Plain(case)), OPERATORS[operator](wide, Plain(wide)), strict=True
    )
    widen = "complex128" if is_complex else "float64"
    for (found, _), (_, expected) in pairs:
        assert all(dtype in str(x.dtype) or "float" in str(x.dtype) for x in leaves(list(found)))
        cast = lambda xs: [
            case._waist.cast(x, widen) if "complex" in str(x.dtype) or not is_complex else x
            for x in leaves(list(xs))
        ]
        near(cast(found), cast(expected), 10 * tolerance(dtype, 2))


@pytest.mark.slow
@pytest.mark.parametrize("operator", ["gradient", "pullback", "forward", "second order"])
@pytest.mark.parametrize("name", ["softmax of rows", "recurrence", "complex conjugate"])
def test_an_operator_is_compiled_and_mapped(backend_name, name, operator):
    case, plain = posed(backend_name, name)
    run = lambda *xs: [y for found, _ in OPERATORS[operator](at(case, xs), plain) for y in found]
    expected = run(*case.xs)
    near(case.gt.vmap(run)(*[x[None] for x in case.xs]), [y[None] for y in leaves(expected)], 1e-11)
    options = {"backend": "aot_eager"} if backend_name == "torch" else {}
    near(case.gt.compile(run, **options)(*case.xs), expected, 1e-11)


def at(case: Case, xs: Any) -> Case:
    """Return a copy of the case with other leaves, which may be tracers."""
    other = object.__new__(Case)
    vars(other).update(vars(case), xs=list(xs))
    return other


def test_a_wrong_number_is_seen(backend_name, monkeypatch):
    case, plain = posed(backend_name, "softmax of rows")
    whole = case.gt.grad
    off = lambda *a, **k: lambda *xs: tuple(g * (1 + 1e-9) for g in whole(*a, **k)(*xs))
    monkeypatch.setattr(case.gt, "grad", off)
    ((found, expected),) = [*_grad(case, plain)][:1]
    with pytest.raises(AssertionError):
        near(found, expected, 10 * tolerance("float64", 1))
