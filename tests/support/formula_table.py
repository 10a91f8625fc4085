"""Every operation of the neutral vocabulary with operands, and what NumPy says its value is.

A row is a `Case`: the operation, its operands (arrays drawn by shape, dtype and kind, or given),
its attributes, and a reference in NumPy that does not go through the formula's own code. An
operation of which the value has no short reference is checked by its derivatives alone, and
listed in `WITHOUT_REFERENCE`.
"""

import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np

RNG = np.random.default_rng(7)


@dataclass(frozen=True)
class Case:
    operation: str
    operands: tuple
    attributes: dict = field(default_factory=dict)
    reference: Any = None
    tolerance: float = 1e-12
    order: int = 2

    def __str__(self):
        said = ",".join(
            f"{o.dtype.kind}{list(o.shape)}" if isinstance(o, np.ndarray) else str(o)
            for o in self.operands
        )
        return f"{self.operation}({said}){self.attributes or ''}".replace(" ", "")


def real(*shape, low=None, high=None):
    """Normal entries, or even ones between low and high, away from kinks."""
    if low is None:
        x = RNG.normal(size=shape)
        return x + 0.1 * np.sign(x)
    return RNG.uniform(low, high, size=shape)


def cplx(*shape):
    return RNG.normal(size=shape) + 1j * RNG.normal(size=shape)


def definite(n, complex_=False):
    a = cplx(n, n) if complex_ else real(n, n)
    return a @ a.conj().T + n * np.eye(n)


def sound(*shape, of=real):
    """Square matrices that are far from singular: differences tell their derivatives to 1e-7."""
    return of(*shape) + 3 * np.eye(shape[-1])


def whole(*values):
    return np.array(values, np.int64)


def _both(operation, reference, **attributes):
    """On real and on complex operands."""
    return [
        Case(operation, (real(3, 2),), attributes, reference),
        Case(operation, (cplx(3, 2),), attributes, reference),
    ]


POSITIVE = real(3, 2, low=0.3, high=2.0)
INSIDE = real(3, 2, low=-0.8, high=0.8)
LABELS = whole(0, 2, 1, 1, 0)

UNARY = [
    *(
        c
        for name in ("exp", "sin", "cos", "sinh", "cosh", "tanh", "negate", "square")
        for c in _both(name, getattr(np, {"negate": "negative"}.get(name, name)))
    ),
    *_both("reciprocal", lambda x: 1 / x),
    *_both("exp2", lambda x: 2.0**x),
    *_both("expm1", lambda x: np.exp(x) - 1),
    *_both("identity", lambda x: x),
    *_both("abs", np.abs),
    *_both("real", np.real),
    *_both("imag", np.imag),
    *_both("conj", np.conj),
    *_both("sign", lambda x: x / np.abs(x)),
    *_both("angle", np.angle),
    *_both("sigmoid", lambda x: 1 / (1 + np.exp(-x))),
    *_both("silu", lambda x: x / (1 + np.exp(-x))),
    *_both("is_finite", np.isfinite),
    *_both("is_nan", np.isnan),
    *(
        Case(name, (POSITIVE,), {}, reference)
        for name, reference in {
            "log": np.log,
            "log2": np.log2,
            "log10": np.log10,
            "log1p": np.log1p,
            "sqrt": np.sqrt,
            "rsqrt": lambda x: x**-0.5,
        }.items()
    ),
    Case("log", (cplx(3),), {}, np.log),
    Case("sqrt", (cplx(3),), {}, np.sqrt),
    *(
        Case(name, (INSIDE,), {}, getattr(np, name))
        for name in ("tan", "arcsin", "arccos", "arctan", "arcsinh", "arctanh")
    ),
    Case("arccosh", (real(3, low=1.5, high=3),), {}, np.arccosh),
    Case("log_sigmoid", (real(3),), {}, lambda x: -np.log1p(np.exp(-x))),
    Case("softplus", (real(3),), {}, lambda x: np.log1p(np.exp(x))),
    Case("relu", (real(3, 2),), {}, lambda x: np.maximum(x, 0)),
    Case("erf", (real(3),), {}, np.vectorize(math.erf)),
    Case("erfc", (real(3),), {}, np.vectorize(math.erfc)),
    *(
        Case(name, (real(3, 2),), {}, getattr(np, name))
        for name in ("floor", "ceil", "round", "trunc")
    ),
    Case("logical_not", (np.array([True, False]),), {}, np.logical_not),
    Case("clip", (real(4, 3),), {"low": -0.7, "high": 0.9}, lambda x: np.clip(x, -0.7, 0.9)),
    Case("clip", (real(4, 3),), {"low": None, "high": 0.9}, lambda x: np.minimum(x, 0.9)),
    Case("cast", (real(3),), {"dtype": "int32"}, lambda x: x.astype(np.int32)),
    Case("cast", (real(3),), {"dtype": "complex64"}, lambda x: x),
    Case("cast", (cplx(3),), {"dtype": "float32"}, np.real),
    Case("cast", (whole(0, 3),), {"dtype": "bool"}, lambda x: x != 0),
    Case("stop", (real(3),), {}, lambda x: x),
]

BINARY = [
    *(
        Case(name, (a, b), {}, reference)
        for name, reference in {
            "add": np.add,
            "subtract": np.subtract,
            "multiply": np.multiply,
            "divide": np.divide,
        }.items()
        for a, b in (
            (real(3, 2), real(3, 2)),
            (real(3, 1), real(2)),
            (cplx(3, 2), real(2)),
            (real(2, 1), cplx(2, 3)),
            (real(), real(3)),
        )
    ),
    Case("multiply", (whole(1, 2, 3), whole(2, 2, 2)), {}, np.multiply),
    Case("power", (POSITIVE, real(3, 2)), {}, np.power),
    Case("power", (POSITIVE, np.float64(2.5)), {}, np.power),
    Case("power", (real(3), np.float64(3.0)), {}, np.power),
    Case("power", (np.float64(2.0), real(3)), {}, np.power),
    Case("power", (cplx(3), np.float64(3.0)), {}, np.power),
    Case("maximum", (real(3, 2), real(3, 2)), {}, np.maximum),
    Case("maximum", (real(3, 2), np.float64(0.0)), {}, np.maximum),
    Case("minimum", (real(3, 2), real(2)), {}, np.minimum),
    Case("arctan2", (real(3), real(3)), {}, np.arctan2),
    Case("logaddexp", (real(3), real(3)), {}, np.logaddexp),
    Case("complex", (real(3, 2), real(3, 2)), {}, lambda a, b: a + 1j * b),
    *(
        Case("compare", (real(4), real(4)), {"relation": r}, f)
        for r, f in {
            "<": np.less,
            "<=": np.less_equal,
            ">": np.greater,
            ">=": np.greater_equal,
            "==": np.equal,
            "!=": np.not_equal,
        }.items()
    ),
    *(
        Case(
            f"logical_{n}",
            (np.array([True, True, False]), np.array([True, False, False])),
            {},
            getattr(np, f"logical_{n}"),
        )
        for n in ("and", "or", "xor")
    ),
    Case("where", (np.array([True, False, True]), real(2, 3), real(3)), {}, np.where),
    Case("where", (np.array([True, False, True]), cplx(2, 3), real(3)), {}, np.where),
]

SHAPES = [
    Case(
        "transpose",
        (real(2, 3, 4),),
        {"permutation": (2, 0, 1)},
        lambda x: np.transpose(x, (2, 0, 1)),
    ),
    Case("reshape", (real(2, 6),), {"shape": (3, 4)}, lambda x: x.reshape(3, 4)),
    Case("reshape", (real(2, 3, 4),), {"shape": (6, 1, 4)}, lambda x: x.reshape(6, 1, 4)),
    Case("reshape", (real(1, 3, 1),), {"shape": (3,)}, lambda x: x.reshape(3)),
    Case("reshape", (cplx(4),), {"shape": (2, 2)}, lambda x: x.reshape(2, 2)),
    Case("broadcast", (real(3),), {"shape": (2, 3)}, lambda x: np.broadcast_to(x, (2, 3))),
    Case(
        "broadcast",
        (real(2),),
        {"shape": (2, 3), "axes": (0,)},
        lambda x: np.broadcast_to(x[:, None], (2, 3)),
    ),
    Case("broadcast", (real(2, 1),), {"shape": (2, 3)}, lambda x: np.broadcast_to(x, (2, 3))),
    Case("concatenate", (real(2, 3), real(1, 3)), {"axis": 0}, lambda *xs: np.concatenate(xs, 0)),
    Case("concatenate", (cplx(2, 3), real(2, 1)), {"axis": 1}, lambda *xs: np.concatenate(xs, 1)),
    Case("stack", (real(2, 3), real(2, 3)), {"axis": 1}, lambda *xs: np.stack(xs, 1)),
    Case("split", (real(5, 2),), {"sizes": (2, 3), "axis": 0}, lambda x: (x[:2], x[2:])),
    Case(
        "slice",
        (real(5, 4),),
        {"start": (1, 0), "limit": (5, 3), "stride": (2, 1)},
        lambda x: x[1:5:2, 0:3],
    ),
    Case("flip", (real(3, 2),), {"axes": (0,)}, lambda x: x[::-1]),
]

INDEXING = [
    Case("one_hot", (LABELS,), {"size": 3}, lambda i: np.eye(3)[i]),
    Case("embedding", (real(4, 3), whole([0, 2], [2, 3])), {}, lambda t, i: t[i]),
]


def _lse(x, axis):
    return np.log(np.exp(x).sum(axis))


REDUCTIONS = [
    Case("sum", (real(2, 3, 4),), {"axes": (0, 2)}, lambda x: x.sum((0, 2))),
    Case("sum", (cplx(2, 3),), {}, np.sum),
    Case("sum", (real(2, 3),), {"axes": (1,), "keep": True}, lambda x: x.sum(1, keepdims=True)),
    Case("sum", (np.array([True, False, True]),), {}, np.sum),
    Case("mean", (cplx(2, 3),), {"axes": (0,)}, lambda x: x.mean(0)),
    Case("prod", (real(2, 3),), {"axes": (1,)}, lambda x: x.prod(1)),
    Case("prod", (cplx(3),), {}, np.prod),
    Case("max", (real(3, 4),), {"axes": (1,)}, lambda x: x.max(1)),
    Case("min", (real(3, 4),), {}, np.min),
    Case("logsumexp", (real(3, 4),), {"axes": (1,)}, lambda x: _lse(x, 1)),
    Case("logsumexp", (real(3, 4),), {}, lambda x: _lse(x, None)),
    Case("logsumexp", (cplx(3, 4),), {"axes": (1,)}, lambda x: _lse(x, 1)),
    Case("variance", (real(3, 4),), {"axes": (1,)}, lambda x: x.var(1)),
    Case("variance", (cplx(3, 4),), {"axes": (0,), "correction": 1}, lambda x: x.var(0, ddof=1)),
    Case("deviation", (real(3, 4),), {"axes": (1,), "eps": 0.1}, lambda x: np.sqrt(x.var(1) + 0.1)),
    Case(
        "deviation",
        (real(3, 4),),
        {"axes": (0,), "correction": 1, "keep": True},
        lambda x: x.std(0, ddof=1, keepdims=True),
    ),
    Case("norm", (real(3, 4),), {}, np.linalg.norm),
    Case("norm", (cplx(3, 4),), {"axes": (1,)}, lambda x: np.linalg.norm(x, axis=1)),
    Case("norm", (real(3, 4),), {"axes": (1,), "ord": 1}, lambda x: np.abs(x).sum(1)),
    Case("norm", (real(5),), {"axes": (0,), "ord": np.inf}, lambda x: np.abs(x).max()),
    Case("norm", (real(5),), {"axes": (0,), "ord": 3}, lambda x: (np.abs(x) ** 3).sum() ** (1 / 3)),
]

CONTRACTIONS = [
    *(
        Case(
            "einsum",
            tuple(make(*s) for s in shapes),
            {"subscripts": subscripts},
            lambda *xs, subscripts=subscripts: np.einsum(subscripts, *xs),
        )
        for make in (real, cplx)
        for subscripts, shapes in {
            "ij,jk->ik": ((2, 3), (3, 4)),
            "bij,bjk->bik": ((2, 3, 4), (2, 4, 2)),
            "ij,j,j->i": ((2, 3), (3,), (3,)),
            "ii->i": ((3, 3),),
            "ii->": ((3, 3),),
            "ij->": ((2, 3),),
            "ij,kl->jlik": ((2, 3), (2, 2)),
            "iij,j->i": ((2, 2, 3), (3,)),
        }.items()
    ),
    *(
        Case("matmul", (real(*a), real(*b)), {}, np.matmul)
        for a, b in (
            ((3,), (3,)),
            ((2, 3), (3,)),
            ((3,), (3, 2)),
            ((2, 3), (3, 4)),
            ((5, 2, 3), (3, 4)),
            ((2, 1, 2, 3), (4, 3, 2)),
        )
    ),
    Case("matmul", (cplx(2, 3), real(3, 4)), {}, np.matmul),
    Case("outer", (real(2), cplx(3)), {}, np.outer),
    Case("trace", (real(2, 3, 3),), {}, lambda x: np.trace(x, 0, 1, 2)),
]


def _softmax(x, axis):
    e = np.exp(x)
    return e / e.sum(axis, keepdims=True)


def _standard(x, axes, eps):
    return (x - x.mean(axes, keepdims=True)) / np.sqrt(x.var(axes, keepdims=True) + eps)


LAYERS = [
    Case("softmax", (real(3, 4),), {"axis": 1}, lambda x: _softmax(x, 1)),
    Case("softmax", (real(3, 4),), {"axis": 0}, lambda x: _softmax(x, 0)),
    Case("softmax", (cplx(3, 4),), {"axis": 1}, lambda x: _softmax(x, 1)),
    Case("log_softmax", (0.3 * cplx(3, 4),), {"axis": 1}, lambda x: np.log(_softmax(x, 1))),
    Case("log_softmax", (real(3, 4),), {"axis": 1}, lambda x: np.log(_softmax(x, 1))),
    Case(
        "standardize", (real(3, 4),), {"axes": (1,), "eps": 0.1}, lambda x: _standard(x, (1,), 0.1)
    ),
    Case("standardize", (cplx(3, 4),), {"axes": (1,)}, lambda x: _standard(x, (1,), 0)),
]


LEAVES = [
    Case("constant", (), {"value": np.arange(4.0)}, lambda: np.arange(4.0)),
    Case("scale_gradient", (real(3),), {"scale": -2.0}, lambda x: x, order=0),
]

CASES = [
    *UNARY,
    *BINARY,
    *SHAPES,
    *INDEXING,
    *REDUCTIONS,
    *CONTRACTIONS,
    *LAYERS,
    *LEAVES,
    Case("silu", (real(3),), {}, lambda x: x / (1 + np.exp(-x))),
    Case("hypot", (real(3), real(3)), {}, np.hypot),
    Case("xlogy", (POSITIVE, POSITIVE), {}, lambda a, b: a * np.log(b)),
    Case("addcmul", (real(3), real(3), real(3)), {"value": 2}, lambda x, a, b: x + 2 * a * b),
    Case("addcdiv", (real(3), real(3), POSITIVE[:, 0]), {}, lambda x, a, b: x + a / b),
    Case("vdot", (cplx(3), cplx(3)), {}, np.vdot),
    Case("tile", (real(2, 3),), {"reps": (2, 1, 2)}, lambda x: np.tile(x, (2, 1, 2))),
    Case("unbind", (real(2, 3),), {"axis": 0}, lambda x: (x[0], x[1])),
    Case("normal_cdf", (real(3),), {}, lambda x: (1 + np.vectorize(math.erf)(x / 2**0.5)) / 2),
    Case("normal_density", (real(3),), {}, lambda x: np.exp(-x * x / 2) / (2 * math.pi) ** 0.5),
    Case("pow", (POSITIVE, real(3, 2)), {}, np.power),
    Case("lerp", (real(3), real(3), real(3)), {}, lambda a, b, t: a + t * (b - a)),
    Case("view_as_real", (cplx(3),), {}, lambda z: np.stack([z.real, z.imag], -1)),
    Case("view_as_complex", (real(3, 2),), {}, lambda x: x[:, 0] + 1j * x[:, 1]),
]
