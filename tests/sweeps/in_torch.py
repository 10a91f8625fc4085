"""Runs the sweep over PyTorch's tables of operators and modules with every operator.

Each operator must return PyTorch's own derivative of a program f at x, with a random tangent u and
a random cotangent v. Second derivatives use g = f + f^2 / 2s (elementwise, where s is the largest
absolute value of f, but at least 1), so that linear operators have nonzero second derivatives:

    J^H v    torch.autograd.grad            H u of Re<v, g>    double backward, or dual numbers
    J u      dual numbers, or the                              over autograd.grad
             transpose of the pullback

Each operator returns one of these derivatives. An operator may raise an error only if PyTorch
raises an error for the first derivative in `gives`.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch.autograd import forward_ad
from torch.nn.attention import SDPBackend, sdpa_kernel

import gradtools.torch as gt
from tests.sweeps import AGREES, DIFFERS, LEFT_OUT, RAISED, Known, Outcome
from tests.sweeps.torch_programs import (
    FUNCTION,
    IN_PLACE,
    ON_VIEW,
    TABLES,
    TableEntry,
    TableProgram,
    entries,
    programs,
)

Tensors = Sequence[torch.Tensor]
_SMALL = 40  # Maximum number of input and output entries for which full Jacobians are computed.
_TOLERANCE = {1: 1e-9, 2: 1e-7}  # Second derivatives of ill-conditioned operations lose digits.


@dataclass(eq=False)
class Point:
    """A program with random tangents and cotangents, and methods for PyTorch's own derivatives."""

    program: TableProgram

    def __post_init__(self) -> None:
        self.x, self.f = self.program.primals, self.program.f
        with torch.no_grad():
            self.y = tuple(y.detach().clone() for y in self.f(*self.x))
        generator = torch.Generator().manual_seed(7)
        drawn = lambda x: torch.randn(x.shape, dtype=x.dtype, generator=generator)
        self.u, self.v = tuple(map(drawn, self.x)), tuple(map(drawn, self.y))
        self.bends = [0.5 / max(1.0, float(y.abs().max())) for y in self.y]
        self.every = tuple(range(len(self.x)))

    def g(self, *xs: Any) -> tuple[Any, ...]:
        """Return f + f^2 / 2s elementwise."""
        return tuple(y + y * y * b for y, b in zip(self.f(*xs), self.bends, strict=True))

    def loss(self, *xs: Any) -> Any:
        """Return Re<v, g(x)>."""
        return inner(self.v, self.g(*xs))

    # --- by PyTorch

    def pulled(self, f: Any, xs: Tensors, v: Tensors, create_graph: bool = False) -> Tensors:
        ys = f(*(x.view_as(x) for x in xs))
        kept = [(y, c) for y, c in zip(ys, v, strict=True) if y.requires_grad]
        if not kept:
            return tuple(torch.zeros_like(x) for x in xs)
        ys, v = zip(*kept, strict=True)
        found = torch.autograd.grad(ys, xs, v, create_graph=create_graph, allow_unused=True)
        return tuple(_or_zero(g, x) for g, x in zip(found, xs, strict=True))

    @cached_property
    def live(self) -> Tensors:
        return tuple(x.detach().requires_grad_() for x in self.x)

    def cotangent(self) -> Tensors:
        """Return J^H v."""
        return self.pulled(self.f, self.live, self.v)

    def pushed(self) -> Tensors:
        """Return J u, computed in forward mode."""
        return self._dual(self.f, self.x)

    def transposed(self) -> Tensors:
        """Return J u as the pullback of the pullback, which is linear in v."""
        v = tuple(torch.zeros_like(y).requires_grad_() for y in self.y)
        pulled = self.pulled(self.f, self.live, v, create_graph=True)
        return self.pulled(lambda *_: pulled, v, self.u)

    def tangent_transposed(self) -> Tensors:
        """Return J^H v as the pullback of the tangent, which is linear in u."""
        us = tuple(torch.zeros_like(u).requires_grad_() for u in self.u)
        with forward_ad.dual_level():
            ys = self.f(*map(forward_ad.make_dual, self.x, us))
            tangents = [_or_zero(forward_ad.unpack_dual(y).tangent, y.detach()) for y in ys]
            return self.pulled(lambda *_: tangents, us, self.v)

    def double_backward(self) -> Tensors:
        """Return H u, computed in reverse over reverse mode."""
        slopes = self.pulled(self._losses, self.live, [_ONE], create_graph=True)
        return self.pulled(lambda *_: slopes, self.live, self.u)

    def forward_over_reverse(self) -> Tensors:
        """Return H u, computed in forward over reverse mode."""
        slopes = lambda *xs: self.pulled(self._losses, xs, [_ONE], create_graph=True)
        return self._dual(slopes, self.live)

    def reverse_over_forward(self) -> Tensors:
        """Return H u, computed in reverse over forward mode."""
        with forward_ad.dual_level():
            ys = self.g(*map(forward_ad.make_dual, self.live, self.u))
            tangents = [_or_zero(forward_ad.unpack_dual(y).tangent, y.detach()) for y in ys]
            return self.pulled(lambda *_: [inner(self.v, tangents)], self.live, [_ONE])

    def _losses(self, *xs: Any) -> Any:
        return (self.loss(*xs),)

    def _dual(self, f: Any, primals: Tensors) -> Tensors:
        with forward_ad.dual_level():
            ys = f(*map(forward_ad.make_dual, primals, self.u))
            return tuple(_or_zero(forward_ad.unpack_dual(y).tangent, y.detach()) for y in ys)


_ONE = torch.ones((), dtype=torch.float64)


def inner(a: Tensors, b: Tensors) -> Any:
    """Return Re<a, b>."""
    return sum((x.conj() * y).real.sum().double() for x, y in zip(a, b, strict=True))


def _or_zero(x: Any, like: Any) -> Any:
    return torch.zeros_like(like) if x is None else x


# --- ways of differentiating --------------------------------------------------------------------


@dataclass(frozen=True)
class Way:
    """An operator of gradtools, and the derivatives of `Point` with which it is compared."""

    name: str
    run: Callable[[Point], Any]
    gives: tuple[str, ...]
    order: int = 1
    quick: bool = False


WAYS: list[Way] = []
PULLED, PUSHED, LINEAR = ("cotangent",), ("pushed",), ("transposed", "pushed")
TWICE, MIXED = ("double_backward", "forward_over_reverse"), ("forward_over_reverse",)
PUSHED_FIRST = ("reverse_over_forward", *TWICE)


def _way(name: str, gives: tuple[str, ...], order: int = 1, quick: bool = False) -> Any:
    def register(run: Callable[[Point], Any]) -> Any:
        WAYS.append(Way(name, run, gives, order, quick))
        return run

    return register


def _vjp(p: Point, f: Any) -> Any:
    return gt.vjp(f, *p.x)[1](p.v)


def _jvp(p: Point, f: Any) -> Any:
    return gt.jvp(f, p.x, p.u)[1]


def _hvp(p: Point, g: Any, mode: Any = "reverse_over_reverse") -> Any:
    return gt.hvp(lambda *xs: inner(p.v, g(*xs)), p.x, p.u, mode=mode)[1]


_way("vjp", PULLED, quick=True)(lambda p: _vjp(p, p.f))
_way("jvp", PUSHED, quick=True)(lambda p: _jvp(p, p.f))
_way("linearize", LINEAR, quick=True)(lambda p: gt.linearize(p.f, *p.x)[1](*p.u))
_way("hvp, reverse over reverse", TWICE[:1], 2, True)(lambda p: _hvp(p, p.g))
_way("hvp, forward over reverse", MIXED, 2, True)(lambda p: _hvp(p, p.g, "forward_over_reverse"))


@_way("vjp, outputs one by one", PULLED, quick=True)
def _vjp_of_each(p: Point) -> Any:
    """Differentiate one output at a time, so that the other outputs have no cotangent."""
    one = lambda i: lambda *xs: p.f(*xs)[i]
    parts = [gt.vjp(one(i), *p.x)[1](v) for i, v in enumerate(p.v)]
    return [sum(xs[1:], xs[0]) for xs in zip(*parts, strict=True)]


@_way("frozen, second order", TWICE, 2, True)
def _frozen(p: Point) -> Any:
    G = gt.frozen(p.g)
    gradient = gt.grad(lambda *xs: inner(p.v, G(*xs)), p.every, disconnected_inputs="zeros")
    return gt.vjp(gradient, *p.x)[1](p.u)


def _jacobian(p: Point, mode: Any) -> Any:
    """Return J u from the columns of a small real Jacobian, or J^T v from its rows."""
    real = not any(x.is_complex() for x in (*p.x, *p.y))
    if not real or max(sum(x.numel() for x in xs) for xs in (p.x, p.y)) > _SMALL:
        return None
    rows = gt.jacobian(p.f, p.every, mode=mode)(*p.x)
    if mode == "reverse":
        return [sum(_pulled(row[i], v) for row, v in zip(rows, p.v, strict=True)) for i in p.every]
    return [sum(_pushed(b, u) for b, u in zip(row, p.u, strict=True)) for row in rows]


def _pushed(block: Any, u: Any) -> Any:
    shape = block.shape[: block.dim() - u.dim()]
    return (block.reshape(-1, u.numel()).to(u.dtype) @ u.reshape(-1)).reshape(shape)


def _pulled(block: Any, v: Any) -> Any:
    rows = block.reshape(v.numel(), -1).to(v.dtype)
    return (v.reshape(-1) @ rows).reshape(block.shape[v.dim() :])


_way("jacobian, forward", PUSHED)(lambda p: _jacobian(p, "forward"))
_way("jacobian, reverse", PULLED)(lambda p: _jacobian(p, "reverse"))


def _chunked(p: Point) -> Any:
    """Return the pullback of f in two chunks if f is elementwise and draws no random numbers."""
    if not p.program.alone or p.program.random or len(p.x[0]) < 2:
        return None
    return _vjp(p, gt.chunked(p.f, (len(p.x[0]) + 1) // 2))


def _by_defvjp(f: Any) -> Any:
    rule = gt.custom_rule(lambda *xs: f(*xs))
    rule.defvjp(lambda *xs: (f(*xs), xs), lambda xs, cts: torch.func.vjp(f, *xs)[1](cts))
    return rule


def _by_defjvp(f: Any) -> Any:
    """Return f with a rule that calls gradtools' jvp; torch.func.jvp fails in dual levels."""
    rule = gt.custom_rule(lambda *xs: f(*xs))
    rule.defjvp(lambda xs, dxs: gt.jvp(f, tuple(xs), tuple(dxs)))
    return rule


def _reversed(f: Any) -> Any:
    """Return f with two gradient edits, which scale the derivative by -2 and by -1/2."""
    return lambda *xs: f(*gt.reverse_gradient(gt.scale_gradient(xs, -2.0), 0.5))


_way("chunked, vjp", PULLED)(_chunked)
for _name, _made, _back, _along, _twice in (
    ("checkpoint", gt.checkpoint, PULLED, PUSHED, TWICE),
    ("edits", _reversed, PULLED, PUSHED, TWICE),
    ("custom_rule by defvjp", _by_defvjp, PULLED, LINEAR, TWICE),
    ("custom_rule by defjvp", _by_defjvp, ("tangent_transposed",), LINEAR[::-1], PUSHED_FIRST),
):
    _way(f"{_name}, vjp", _back)(lambda p, made=_made: _vjp(p, made(p.f)))
    _way(f"{_name}, jvp", _along)(lambda p, made=_made: _jvp(p, made(p.f)))
    _way(f"{_name}, hvp", _twice, 2)(lambda p, made=_made: _hvp(p, made(p.g)))


@_way("grad of jvp", PUSHED_FIRST, 2)
def _grad_of_jvp(p: Point) -> Any:
    pushed = lambda *xs: inner(p.v, gt.jvp(p.g, xs, p.u)[1])
    return gt.grad(pushed, p.every, disconnected_inputs="zeros")(*p.x)


@_way("mixed_partial", TWICE, 2)
def _mixed_partial(p: Point) -> Any:
    both = lambda y, g: p.loss(*(a + b for a, b in zip(y, g, strict=True)))
    zeros = tuple(torch.zeros_like(x) for x in p.x)
    return gt.mixed_partial(both, lambda z: tuple(x * 1 for x in z), p.x, zeros, p.u)


# --- the sweep ----------------------------------------------------------------------------------


def sweep(
    whole: bool = False, tables: Iterable[str] = tuple(TABLES), part: tuple[int, int] = (0, 1)
) -> Iterator[Outcome]:
    """Yield the outcome of every program for every operator.

    Args:
        whole: Whether to run all operators of gradtools on several samples and in-place variants.
            Otherwise the sweep runs some quick operators, in turn, on one sample of each table
            entry.
        tables: Names of the tables in `TABLES`.
        part: `(i, n)` runs the i-th of n parts of the sweep.
    """
    variants = (FUNCTION, IN_PLACE, ON_VIEW) if whole else (FUNCTION,)
    i, n = part
    for k, entry in enumerate(entries(tables, variants)[i::n]):
        quick = [way for way in WAYS if way.quick]
        every = 3 if entry.table == "op_db" else 1
        ways = WAYS if whole and entry.variant == FUNCTION else quick
        yield from _swept_entry(entry, ways if whole else ways[k % every :: every], whole)


def _swept_entry(entry: TableEntry, ways: Sequence[Way], whole: bool) -> Iterator[Outcome]:
    for dtype in ("float64", "complex128"):
        found, why = programs(entry, dtype, 4 if whole and entry.variant == FUNCTION else 1)
        for program in found:
            yield from swept(program, ways)
        if not found and dtype == "float64":
            yield Outcome(entry.name, "every way", 0, dtype, LEFT_OUT, why)


def swept(program: TableProgram, ways: Iterable[Way] = tuple(WAYS)) -> Iterator[Outcome]:
    """Yield the outcomes of one program for the given operators."""
    about = lambda way, *told: Outcome(program.name, way, program.sample, program.dtype, *told)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            point = Point(program)
            finite = all(x.isfinite().all() for x in (*point.y, *point.cotangent()))
        except Exception as error:  # PyTorch itself may raise an error.
            yield about("every way", LEFT_OUT, f"PyTorch raises {error}"[:200])
            return
        if not finite:
            yield about("every way", LEFT_OUT, "the value or gradient is not finite at the sample")
            return
        for way in ways:
            told = _judged(point, way)
            if told is not None:
                yield about(way.name, *told)


def _judged(point: Point, way: Way) -> tuple[str, str] | None:
    expected, reasons = {}, {}
    for name in way.gives:
        try:
            # gradtools also uses the math kernel, because other kernels have no second derivatives
            with sdpa_kernel(SDPBackend.MATH):
                expected[name] = getattr(point, name)()
        except Exception as error:  # PyTorch itself may raise an error.
            reasons[name] = str(error)[:100]
    try:
        found = way.run(point)
    except Exception as error:
        told = f"{type(error).__name__}: {error}"[:250]
        return (RAISED if way.gives[0] in expected else AGREES), told
    if found is None:
        return None
    errors = {name: distance(found, e) for name, e in expected.items()}
    agrees = any(error <= _TOLERANCE[way.order] for error in errors.values())
    return (AGREES if agrees else DIFFERS), f"{errors} {reasons}"


def distance(found: Tensors, expected: Tensors) -> float:
    """Return the largest difference divided by max(1, largest entry), where NaN equals NaN."""
    if [x.shape for x in found] != [x.shape for x in expected]:
        return float("inf")
    a, b = (
        torch.cat([x.detach().resolve_neg().reshape(-1) for x in xs]) for xs in (found, expected)
    )
    same = (a == b) | (a.isnan() & b.isnan())
    if bool(same.all()):
        return 0.0
    scale = max(float(b[b.isfinite()].abs().max()) if b.isfinite().any() else 0.0, 1.0)
    return float(torch.where(same, 0.0, (a - b).abs()).max()) / scale


KNOWN: Known = {
    (
        "*CustomOp; *AutogradFunction; *linear_cross_entropy.chunked*",
        "custom_rule*; grad of jvp; jacobian*",
    ): "PyTorch drops the tangents of operators with only a reverse rule",
    ("linalg.eig*; nn.BCELoss; nn.functional.binary_cross_entropy", "custom_rule by defjvp*"): (
        "the derivative of PyTorch's tangent differs from reverse mode"
    ),
    ("*dropout*; nn.functional.rrelu*", "jacobian*; chunked*"): (
        "each chunk and each vmapped call has its own seed and mask"
    ),
    (
        "*float*; *half; cov",
        "jacobian*",
    ): "a cast to lower precision rounds random cotangents, but not unit vectors",
    ("native_group_norm", "vjp, outputs one by one"): "torch#183980",
    (
        "cdist",
        "jvp; hvp*; hessian*",
    ): "PyTorch has no forward mode for cdist; gradtools replaces the operation",
    (
        "chalf",
        "checkpoint*; chunked*",
    ): "torch.equal, which compares outputs, does not support complex32",
    (
        "linalg.lstsq",
        "checkpoint*",
    ): "the compared outputs differ in their last digits from run to run",
    ("logcumsumexp", "linearize; custom_rule*"): "rounding errors or NaN at large numbers",
    ("native_layer_norm", "hvp, reverse over reverse"): "autograd.grad requires every cotangent",
    (
        "as_strided_scatter; nn.RNN*; to_sparse",
        "jacobian*",
    ): "PyTorch has no batching rule for the operation",
    (
        "nn.Transformer*; *hardsigmoid*; cdist; *pdist; native_layer_norm; tensor_split; "
        "*eig*; nn.CTC*",
        "custom_rule*",
    ): "torch.func.vjp, which the rule calls, fails at second order",
}
