"""The sweep over twins: functions that both frameworks have, the same arguments, the same numbers.

Where JAX and PyTorch have a function each by one name, or by two that `SPELLED` tells, each is an
oracle for the other that shares nothing with it but mathematics,

    y,   grad g,   J t,   H t   of   g(x) = Re<c, f(x)> + |f(x)|^2 / 2,

all by gradtools, whose convention for complex numbers is the same on both sides. Arguments and
directions are those of the sweep over JAX. A pair whose values differ is taken no further: it is
one name for two functions, and its line in the ledger says how they differ.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, partial
from operator import attrgetter
from typing import Any

import jax
import numpy as np
import torch
from torch.nn import functional as F

import gradtools.jax as gj
import gradtools.torch as gt
from tests.support.sweeps import (
    AGREES,
    DIFFERS,
    LEFT_OUT,
    RAISED,
    REFUSED,
    LedgerLine,
    LedgerVerdict,
    SweepOutcome,
    judged,
)
from tests.support.sweeps.in_jax import (
    ProgramAtPoint,
    ProgramTrial,
    distance,
    refuses,
    said,
)
from tests.support.sweeps.jax_programs import NAMESPACES, Case, cases, takes_complex

Arrays = list[Any]

# --- the pairs ---------------------------------------------------------------------------

_PLACES = {
    "lax": ("", "special.", "nn.functional.", "linalg."),
    "numpy": ("", "special."),
    "lax.linalg": ("linalg.",),
    "numpy.linalg": ("linalg.",),
    "numpy.fft": ("fft.",),
    "scipy.special": ("special.", ""),
    "nn": ("nn.functional.", ""),
}
"""Where in torch a function of a namespace of JAX is looked for, by its own name."""

_RENAMED = """
    lax.logistic special.expit, lax.bessel_i0e special.i0e, lax.bessel_i1e special.i1e,
    lax.erf_inv erfinv, lax.rem fmod, numpy.conjugate conj, numpy.degrees rad2deg, numpy.fabs abs,
    numpy.radians deg2rad, numpy.around round, numpy.rint round, numpy.mod remainder,
    numpy.power pow, scipy.special.loggamma lgamma, nn.hard_sigmoid nn.functional.hardsigmoid,
    nn.hard_silu nn.functional.hardswish, nn.hard_swish nn.functional.hardswish,
    nn.hard_tanh nn.functional.hardtanh, nn.log_sigmoid nn.functional.logsigmoid,
    nn.soft_sign nn.functional.softsign, nn.swish nn.functional.silu, lax.batch_matmul matmul,
    numpy.copy clone, numpy.array clone, numpy.vecdot linalg.vecdot, numpy.linalg.outer outer,
    numpy.linalg.trace trace, numpy.nanmax amax, numpy.nanmin amin, numpy.nancumsum cumsum,
    numpy.nanprod prod, numpy.unstack unbind, numpy.matvec mv, lax.dot matmul
"""

_STACKS = "column_stack concat concatenate dstack hstack stack vstack"
_SCANS = {"cumsum": torch.cumsum, "cumprod": torch.cumprod, "cumlogsumexp": torch.logcumsumexp}
_SHAPES = torch.tensor([0.7, 1.3, 2.1], dtype=torch.float64)
_AT, _TWICE = torch.tensor([2, 0]), torch.tensor([2, 2])
_MASK = torch.tensor([True, False, True])


def _reversed_scan(scan: Callable[..., Any]) -> Callable[..., Any]:
    return lambda x: scan(x.flip(1), 1).flip(1)


def _attention(q: Any, k: Any, v: Any, b: Any = None) -> Any:
    """JAX has the heads behind the positions."""
    if b is not None:
        b = b.masked_fill(torch.ones(b.shape[-2:], dtype=torch.bool).triu(1), -torch.inf)
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, attn_mask=b).transpose(1, 2)


SPELLED: dict[str, Callable[..., Any]] = {
    **{
        name: attrgetter(twin)(torch)
        for name, twin in (pair.split() for pair in _RENAMED.split(","))
    },
    **{f"numpy.{n}": lambda x, y, n=n: getattr(torch, n)([x, y]) for n in _STACKS.split()},
    **{f"lax.{n}": partial(scan, dim=0) for n, scan in _SCANS.items()},
    **{f"lax.{n} 1": _reversed_scan(scan) for n, scan in _SCANS.items()},
    **{f"numpy.{n}": partial(getattr(torch, n), dim=0) for n in ("cumsum", "cumprod")},
    **{f"numpy.{n} 1": partial(getattr(torch, n), dim=1) for n in ("sum", "prod", "mean")},
    **{f"numpy.{n}": partial(getattr(torch, n), correction=0) for n in ("std", "var")},
    **{f"numpy.{n} 1": partial(getattr(torch, n), dim=1, correction=0) for n in ("std", "var")},
    "lax.cummax": lambda x: x.cummax(0).values,
    "lax.cummin": lambda x: x.cummin(0).values,
    "lax.pow 1": lambda x: x**3,
    "lax.integer_pow": lambda x: x**3,
    "lax.integer_pow 1": lambda x: x**-2,
    "lax.polygamma": partial(torch.polygamma, 1),
    "lax.igamma": lambda x: torch.igamma(_SHAPES, x),
    "lax.igammac": lambda x: torch.igammac(_SHAPES, x),
    "lax.reduce_sum": lambda x: x.sum(0),
    "lax.reduce_prod": lambda x: x.prod(1),
    "lax.reduce_max": lambda x: x.amax(1),
    "lax.reduce_min": lambda x: x.amin(1),
    "lax.top_k": lambda x: x.topk(2).values,
    "lax.sort 1": lambda x: x.sort(0).values,
    "lax.gather": lambda x: x[_TWICE],
    "lax.scatter": lambda x, u: x.index_copy(0, _AT, u),
    "lax.scatter_add": lambda x, u: x.index_add(0, _AT, u),
    "lax.scatter_add 1": lambda x, u: x.index_add(0, _TWICE, u),
    "lax.scatter_mul": lambda x, u: x.scatter_reduce(0, _AT, u, "prod"),
    "lax.scatter_max": lambda x, u: x.scatter_reduce(0, _AT, u, "amax"),
    "lax.scatter_max 1": lambda x, u: x.scatter_reduce(0, _TWICE, u, "amax"),
    "lax.scatter_min 1": lambda x, u: x.scatter_reduce(0, _TWICE, u, "amin"),
    "lax.select": lambda x, y: torch.where(_MASK, x, y),
    "lax.conv": lambda x, k: F.conv1d(F.pad(x, (0, 1)), k),
    "lax.conv_general_dilated": lambda x, k: F.conv1d(F.pad(x, (1, 0)), k, stride=2, dilation=2),
    "lax.dot_general": torch.bmm,
    "lax.reduce_window 1": lambda x: F.max_pool2d(
        F.pad(x, (0, 1, 0, 1), value=-torch.inf)[None], 2, 1
    )[0],
    "lax.fft": torch.fft.fft,
    "lax.fft 1": torch.fft.rfft,
    "lax.fft 2": torch.fft.rfft,
    "lax.fft 3": torch.fft.irfft,
    "numpy.power 1": lambda x: x**3,
    "numpy.dot 1": torch.matmul,
    "numpy.pow 1": lambda x: x**2,
    "numpy.ldexp": lambda x: torch.ldexp(x, torch.tensor([1, 2, -1])),
    "numpy.max": torch.amax,
    "numpy.min": torch.amin,
    "numpy.max 1": partial(torch.amax, dim=0),
    "numpy.quantile": partial(torch.quantile, q=0.37),
    "numpy.percentile": partial(torch.quantile, q=0.37),
    "numpy.nanquantile": partial(torch.nanquantile, q=0.37),
    "numpy.trapezoid 1": lambda y, x: torch.trapezoid(y, x.cumsum(0)),
    "numpy.cumulative_sum": partial(torch.cumsum, dim=0),
    "numpy.cumulative_prod": partial(torch.cumprod, dim=0),
    "numpy.nancumsum": partial(torch.cumsum, dim=0),
    "numpy.matrix_transpose": lambda x: x.mT,
    "numpy.linalg.matrix_transpose": lambda x: x.mT,
    "numpy.permute_dims": lambda x: x.permute(1, 0),
    "numpy.transpose": lambda x: x.mT,
    "numpy.flip": lambda x: x.flip(0, 1),
    "numpy.where": lambda x, y: torch.where(_MASK, x, y),
    "numpy.take": lambda x: x.take(torch.tensor([2, 0, 2])),
    "numpy.take_along_axis": lambda x: x.take_along_dim(torch.tensor([2, 0, 2]), 0),
    "numpy.roll": lambda x: x.roll(1),
    "numpy.tile": lambda x: x.tile(2),
    "numpy.repeat": lambda x: x.repeat_interleave(2),
    "numpy.einsum": partial(torch.einsum, "ij,jk->ik"),
    "numpy.einsum 1": partial(torch.einsum, "ii->i"),
    "numpy.tensordot": lambda x, y: torch.tensordot(x, y, dims=2),
    "numpy.linalg.tensordot": lambda x, y: torch.tensordot(x, y, dims=2),
    "numpy.linspace": lambda a, b: torch.stack([a + (b - a) * i / 3 for i in range(4)]),
    "numpy.bincount": lambda w: torch.bincount(torch.tensor([0, 2, 0]), w, 3),
    "lax.linalg.eigh": lambda x: torch.linalg.eigh(x)[::-1],
    "lax.linalg.lu": torch.linalg.lu_factor,
    "lax.linalg.qr": torch.linalg.qr,
    "lax.linalg.svd": torch.linalg.svdvals,
    "lax.linalg.triangular_solve": partial(torch.linalg.solve_triangular, upper=False),
    "numpy.linalg.svd": torch.linalg.svdvals,
    "numpy.linalg.svd 1": partial(torch.linalg.svd, full_matrices=False),
    "numpy.linalg.lstsq": lambda a, b: torch.linalg.lstsq(a, b[:, None]).solution[:, 0],
    "numpy.linalg.matrix_power": partial(torch.linalg.matrix_power, n=3),
    "numpy.linalg.matrix_power 1": partial(torch.linalg.matrix_power, n=-2),
    "numpy.linalg.norm 2": partial(torch.linalg.norm, ord=1),
    "numpy.linalg.norm 3": partial(torch.linalg.norm, ord=3),
    "numpy.linalg.norm 4": partial(torch.linalg.norm, ord=torch.inf),
    "numpy.linalg.matrix_norm 1": partial(torch.linalg.matrix_norm, ord=2),
    "numpy.linalg.matrix_norm 2": partial(torch.linalg.matrix_norm, ord="nuc"),
    "numpy.linalg.multi_dot": lambda *xs: torch.linalg.multi_dot(xs),
    "numpy.linalg.tensorinv": lambda x: torch.linalg.tensorinv(x.reshape(2, 2, 4)),
    "numpy.linalg.tensorsolve": lambda a, b: torch.linalg.tensorsolve(a.reshape(4, 2, 2), b),
    "numpy.fft.fft 1": lambda x: torch.fft.fft(x, 3, norm="ortho"),
    "scipy.special.gamma": lambda x: torch.lgamma(x).exp(),
    "scipy.special.betaln": lambda x, y: x.lgamma() + y.lgamma() - (x + y).lgamma(),
    "scipy.special.betaln 1": lambda x: x.lgamma() - (x + 1).lgamma(),
    "scipy.special.kl_div": lambda x, y: x * (x / y).log() - x + y,
    "scipy.special.rel_entr": lambda x, y: x * (x / y).log(),
    "scipy.special.gammainc 1": lambda x: torch.special.gammainc(torch.full_like(x, 1.3), x),
    "scipy.special.gammaincc 1": lambda x: torch.special.gammaincc(torch.full_like(x, 1.3), x),
    "scipy.special.multigammaln": partial(torch.special.multigammaln, p=2),
    "scipy.special.polygamma": partial(torch.polygamma, 1),
    "scipy.special.zeta": lambda x: torch.special.zeta(torch.full_like(x, 2.5), x),
    "scipy.special.softmax": lambda x: x.flatten().softmax(0).view_as(x),
    "scipy.special.log_softmax": lambda x: x.flatten().log_softmax(0).view_as(x),
    "scipy.special.logsumexp": partial(torch.logsumexp, dim=(0, 1)),
    "scipy.special.logsumexp 1": lambda x, b: (b * x.exp()).sum(0).log(),
    "nn.softmax": partial(F.softmax, dim=-1),
    "nn.log_softmax": partial(F.log_softmax, dim=-1),
    "nn.logsumexp": partial(torch.logsumexp, dim=(0, 1)),
    "nn.gelu": partial(F.gelu, approximate="tanh"),
    "nn.gelu 1": F.gelu,
    "nn.standardize": lambda x: F.layer_norm(x, x.shape[-1:]),
    "nn.dot_product_attention": _attention,
    "nn.dot_product_attention 1": _attention,
}
"""Twins by another name, or with arguments that JAX has by default or its case has fixed."""


def twin(case: Case) -> Callable[..., Any] | None:
    """PyTorch's function for a case of the sweep over JAX; None where it has none."""
    space, _, name = case.program.rpartition(".")
    spelled = SPELLED.get(f"{case.program} {case.sample}" if case.sample else case.program)
    if spelled or case.f is not getattr(NAMESPACES[space], name):
        return spelled
    for place in _PLACES[space]:
        try:
            return attrgetter(place + name)(torch)  # type: ignore[no-any-return]
        except AttributeError:
            continue
    return None


@cache
def pairs() -> tuple[Case, ...]:
    """The cases that have a twin."""
    return tuple(case for case in cases() if twin(case))


# --- the ways ----------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class TwinSide(ProgramAtPoint):
    """One framework's function at the point, and gradtools' wing for it."""

    gt: Any


def _grad(side: TwinSide) -> Arrays:
    argnums = tuple(range(len(side.xs)))
    return list(side.gt.grad(side.g, argnums, disconnected_inputs="zeros")(*side.xs))


def _hvp(side: TwinSide, mode: str) -> Arrays:
    return list(side.gt.hvp(side.g, tuple(side.xs), tuple(side.ts), mode=mode)[1])


WAYS: dict[str, tuple[Callable[[TwinSide], Arrays], float]] = {
    "value": (lambda s: s.f(*s.xs), 1e-11),
    "grad": (_grad, 1e-10),
    "jvp": (lambda s: list(s.gt.jvp(s.f, tuple(s.xs), tuple(s.ts))[1]), 1e-10),
    "hvp, forward over reverse": (partial(_hvp, mode="forward_over_reverse"), 1e-9),
    "hvp, reverse over reverse": (partial(_hvp, mode="reverse_over_reverse"), 1e-9),
}
"""What is compared, and how closely: of special functions some digits are lost on either side."""


# --- the sweep ---------------------------------------------------------------------------


def sweep(programs: Iterable[Case] | None = None, *, whole: bool = False) -> list[SweepOutcome]:
    """What comes of every pair in every way.

    Args:
        programs: Cases of the sweep over JAX that have a twin; all by default.
        whole: Whether every sample is tried, and in complex numbers too where both take them;
            else the first sample in real ones.
    """
    result: list[SweepOutcome] = []
    with jax.enable_x64(True), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for case in pairs() if programs is None else programs:
            if whole or not case.sample:
                result += _TwinPair(
                    case, "complex128" if case.complex_only else "float64"
                ).outcomes()
            if whole and takes_complex(case) and _takes_complex(case):
                result += _TwinPair(case, "complex128").outcomes()
    return result


def verdict(outcomes: Iterable[SweepOutcome], whole: bool = False) -> LedgerVerdict:
    """The outcomes held against the ledger of twins."""
    return judged(outcomes, LEDGER, whole)


def _called(case: Case, *xs: Any) -> Any:
    """The twin of these tensors."""
    f = twin(case)
    assert f is not None
    return f(*xs)


def _takes_complex(case: Case) -> bool:
    try:
        _called(case, *(torch.from_numpy(np.asarray(x)) for x in case.arguments("complex128")))
    except (RuntimeError, TypeError, NotImplementedError):
        return False
    return True


class _TwinPair:
    """One case and its twin at one point."""

    def __init__(self, case: Case, dtype: str) -> None:
        self.case, self.dtype = case, dtype
        self.errors: dict[str, list[Exception]] = {}

    def outcomes(self) -> list[SweepOutcome]:
        """What came of each way."""
        try:
            point = ProgramTrial(self.case, self.dtype, False, False).point
        except Exception as error:
            return [self._outcome("value", RAISED, said(error))]
        if not point.cs:
            return [self._outcome("value", LEFT_OUT, "no output is floating or complex")]
        theirs = self._in_torch(point, ("value",))
        ours = self._in_jax(point)
        first = self._judge("value", ours, theirs)
        if first.result != AGREES:
            return [first]
        theirs |= self._in_torch(point, tuple(WAYS)[1:])
        return [first, *(self._judge(way, ours, theirs) for way in tuple(WAYS)[1:])]

    def _in_jax(self, point: ProgramAtPoint) -> dict[str, list[np.ndarray]]:
        def everything(xs: Arrays, ts: Arrays, cs: Arrays) -> dict[str, Arrays]:
            return self._run(TwinSide(point.f, xs, ts, cs, gt=gj), tuple(WAYS))

        return _numbers(jax.device_get(jax.jit(everything)(point.xs, point.ts, point.cs)))

    def _in_torch(self, point: ProgramAtPoint, ways: Sequence[str]) -> dict[str, list[np.ndarray]]:
        xs, ts, cs = (
            [torch.from_numpy(np.array(x)) for x in arrays]
            for arrays in (point.xs, point.ts, point.cs)
        )
        f = lambda *xs: list(_inexact(_called(self.case, *xs)))
        side = TwinSide(f, xs, ts, cs, torch, gt=gt)
        result = self._run(side, ways)
        return _numbers({w: [y.detach().resolve_conj() for y in ys] for w, ys in result.items()})

    def _run(self, side: TwinSide, ways: Sequence[str]) -> dict[str, Arrays]:
        result = {}
        for way in ways:
            try:
                result[way] = WAYS[way][0](side)
            except Exception as error:
                self.errors.setdefault(way, []).append(error)
        return result

    def _judge(self, way: str, ours: dict[str, Any], theirs: dict[str, Any]) -> SweepOutcome:
        if way in self.errors:
            errors = self.errors[way]
            refused = all(map(refuses, errors))
            return self._outcome(way, REFUSED if refused else RAISED, "; ".join(map(said, errors)))
        off = distance(ours[way], theirs[way]) / WAYS[way][1]
        return self._outcome(way, AGREES if off <= 1 else DIFFERS, f"{off:.3g}")

    def _outcome(self, way: str, result: str, detail: str) -> SweepOutcome:
        case = self.case
        return SweepOutcome(case.program, way, case.sample, self.dtype, result, "torch", detail)


def _numbers(found: dict[str, Arrays]) -> dict[str, list[np.ndarray]]:
    return {way: [np.asarray(y) for y in ys] for way, ys in found.items()}


def _inexact(out: Any) -> Iterator[Any]:
    """The floating and complex tensors of what a function returned, in order."""
    if isinstance(out, tuple | list):
        for item in out:
            yield from _inexact(item)
    elif out.is_floating_point() or out.is_complex():
        yield out


def groups(size: int) -> list[tuple[Case, ...]]:
    """All pairs in groups of so many."""
    result = pairs()
    return [result[i : i + size] for i in range(0, len(result), size)]


# --- what is known not to agree ----------------------------------------------------------

_SECOND = ("hvp*",)
_REVERSE = ("grad", "hvp*")
_DERIVATIVES = ("grad", "jvp", "hvp*")
_DIGITS = "PyTorch's trigamma keeps nine digits"
_SINGLE = "PyTorch's slope is one sixth in single precision"
_STAIRS = "a staircase: JAX says zero, PyTorch has no derivative"
_COMPLEX = "PyTorch has no derivative in complex numbers"
_SHAPE = "PyTorch has no derivative to the shape a, JAX no second one"
_EIGVECS = "JAX has none of eigenvectors, and PyTorch's needs a loss that no phase changes"
_SYMMETRIC = "a tangent that is not symmetric: JAX symmetrises it, PyTorch does not"
_HERMITIAN = "a matrix that is not Hermitian: JAX symmetrises it, PyTorch reads its lower half"
_PHASE = "a singular vector is free up to its phase, and the loss knows it"
_VANDER = "PyTorch's own powers are changed in place, which its backward pass refuses"


def _lines(
    programs: str,
    ways: Sequence[str],
    result: str,
    reason: str,
    upstream: str = "",
    dtype: str = "*",
    whole: bool = False,
) -> tuple[LedgerLine, ...]:
    return tuple(
        LedgerLine(program, way, result, reason, upstream, dtype, whole or dtype == "complex128")
        for program in programs.split()
        for way in ways
    )


LEDGER: tuple[LedgerLine, ...] = (
    *_lines("*.digamma", ("grad", "jvp"), DIFFERS, _DIGITS),
    *_lines("*.polygamma", ("value",), DIFFERS, _DIGITS),
    *_lines("nn.hard_sigmoid", ("grad", "jvp", "hvp, reverse*"), DIFFERS, _SINGLE),
    *_lines("nn.dot_product_attention", ("value",), DIFFERS, "in float32 in JAX", "jax#37422"),
    *_lines("numpy.heaviside numpy.floor_divide", _DERIVATIVES, REFUSED, _STAIRS),
    *_lines("numpy.bincount", _DERIVATIVES, REFUSED, "PyTorch has no derivative to the weights"),
    *_lines("numpy.bincount", ("value",), DIFFERS, "PyTorch's is real", dtype="complex128"),
    *_lines("numpy.vander", _REVERSE, REFUSED, _VANDER),
    *_lines("*.igamma* *.gammainc*", ("grad", "jvp"), REFUSED, _SHAPE, whole=True),
    *_lines("*.igamma* *.gammainc*", _SECOND, RAISED, _SHAPE, "jax#7922", whole=True),
    *_lines("scipy.special.betaln", _SECOND, DIFFERS, "equal arguments", "jax#34353", whole=True),
    *_lines("lax.linalg.householder_product", _DERIVATIVES, RAISED, "JAX has no derivative"),
    *_lines("numpy.linalg.eig", _DERIVATIVES, RAISED, _EIGVECS, "jax#2748"),
    *_lines("numpy.linalg.eigvals", _SECOND, RAISED, _EIGVECS, "jax#2748"),
    *_lines("*.linalg.cholesky", ("jvp", "hvp, forward*"), DIFFERS, _SYMMETRIC),
    *_lines("*.linalg.eigh", ("jvp",), DIFFERS, _SYMMETRIC),
    *_lines("numpy.linalg.eigvalsh", ("hvp, forward*",), DIFFERS, _SYMMETRIC),
    *_lines(
        "*.linalg.cholesky *.linalg.eigh numpy.linalg.eigvalsh",
        *(("value",), DIFFERS, _HERMITIAN),
        dtype="complex128",
    ),
    *_lines("numpy.linalg.svd", _REVERSE, REFUSED, _PHASE, dtype="complex128"),
    *_lines("numpy.linalg.svd", ("jvp",), DIFFERS, _PHASE, dtype="complex128"),
    *_lines(
        "lax.scatter_mul numpy.nan_to_num nn.silu nn.swish",
        *(_REVERSE, RAISED, _COMPLEX),
        dtype="complex128",
    ),
    *_lines("lax.scatter_mul", ("jvp", "hvp, f*"), REFUSED, _COMPLEX, dtype="complex128"),
)
"""Each difference, with its reason; the numbers are the frameworks' own."""
