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


def _gauss(x):
    return (1 + np.vectorize(math.erf)(x / math.sqrt(2))) / 2


def _elu(x, alpha):
    return np.where(x > 0, x, alpha * np.expm1(x))


def _logit_of_the_middle(x):
    x = np.clip(x, 0.4, 0.6)
    return np.log(x / (1 - x))


POSITIVE = real(3, 2, low=0.3, high=2.0)
INSIDE = real(3, 2, low=-0.8, high=0.8)
HEAVY = real(2, 3)
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
            "cbrt": np.cbrt,
            "lgamma": np.vectorize(math.lgamma),
        }.items()
    ),
    Case("log", (cplx(3),), {}, np.log),
    Case("sqrt", (cplx(3),), {}, np.sqrt),
    Case("cbrt", (real(3),), {}, np.cbrt),
    *(
        Case(name, (INSIDE,), {}, getattr(np, name))
        for name in ("tan", "arcsin", "arccos", "arctan", "arcsinh", "arctanh")
    ),
    Case("arccosh", (real(3, low=1.5, high=3),), {}, np.arccosh),
    Case("log_sigmoid", (real(3),), {}, lambda x: -np.log1p(np.exp(-x))),
    Case("softplus", (real(3),), {}, lambda x: np.log1p(np.exp(x))),
    Case("softplus", (real(3),), {"beta": 2.0}, lambda x: np.log1p(np.exp(2 * x)) / 2),
    Case("relu", (real(3, 2),), {}, lambda x: np.maximum(x, 0)),
    Case(
        "leaky_relu",
        (real(3, 2),),
        {"negative_slope": 0.1},
        lambda x: np.where(x > 0, x, 0.1 * x),
    ),
    Case("elu", (real(3, 2),), {"alpha": 1.5}, lambda x: np.where(x > 0, x, 1.5 * (np.exp(x) - 1))),
    Case("gelu", (real(3, 2),), {}, lambda x: x * _gauss(x)),
    Case(
        "gelu",
        (real(3, 2),),
        {"approximate": "tanh"},
        lambda x: 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3))),
    ),
    Case("erf", (real(3),), {}, np.vectorize(math.erf)),
    Case("erfc", (real(3),), {}, np.vectorize(math.erfc)),
    Case("erfinv", (INSIDE,)),
    Case("digamma", (POSITIVE,)),
    Case("polygamma", (POSITIVE,), {"order": 1}),
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
    Case("remainder", (real(3), POSITIVE[:, 0]), {}, np.mod),
    Case("floor_divide", (real(3), POSITIVE[:, 0]), {}, np.floor_divide),
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
    Case(
        "pad", (real(2, 3),), {"low": (1, 0), "high": (0, 2)}, lambda x: np.pad(x, ((1, 0), (0, 2)))
    ),
    Case(
        "pad",
        (real(3),),
        {"low": (1,), "high": (2,), "interior": (1,), "value": 3.0},
        lambda x: np.array([3, x[0], 3, x[1], 3, x[2], 3, 3]),
    ),
    Case("pad", (real(4),), {"low": (-1,), "high": (1,)}, lambda x: np.array([*x[1:], 0])),
    Case("flip", (real(3, 2),), {"axes": (0,)}, lambda x: x[::-1]),
    Case(
        "roll",
        (real(4, 3),),
        {"shifts": (1, 2), "axes": (0, 1)},
        lambda x: np.roll(x, (1, 2), (0, 1)),
    ),
    Case("triangle", (real(3, 3),), {"upper": True}, np.triu),
    Case("triangle", (cplx(3, 4),), {"upper": False, "offset": -1}, lambda x: np.tril(x, -1)),
    Case("diagonal", (real(3, 4),), {"offset": 1}, lambda x: np.diagonal(x, 1)),
    Case("diagonal", (real(3, 2, 3),), {"axes": (0, 2)}, lambda x: np.diagonal(x, 0, 0, 2)),
    Case("diagonal_matrix", (real(3),), {}, np.diag),
    Case("diagonal_matrix", (real(3),), {"offset": -1}, lambda x: np.diag(x, -1)),
]

INDEXING = [
    Case("index", (real(4, 3), whole(0, 2, 2)), {"axes": (0,)}, lambda x, i: x[i]),
    Case("index", (real(4, 3), whole(0, 2, 2)), {"axes": (1,)}, lambda x, i: x[:, i].T),
    Case("index", (real(5, 3), np.arange(5), LABELS), {"axes": (0, 1)}, lambda x, i, j: x[i, j]),
    Case(
        "index",
        (cplx(4, 2, 3), whole(1, 1), whole(0, 2)),
        {"axes": (0, 2)},
        lambda x, i, j: x[i, :, j],
    ),
    Case(
        "take_along",
        (real(5, 3), LABELS[:, None]),
        {"axis": 1},
        lambda x, i: np.take_along_axis(x, i, 1),
    ),
    Case(
        "take_along",
        (real(3, 2), whole([0, 1], [2, 2]).reshape(2, 2)),
        {"axis": 0},
        lambda x, i: np.take_along_axis(x, i, 0),
    ),
    Case(
        "scatter",
        (real(4, 2), real(3, 2), whole(1, 1, 3)),
        {"axes": (0,), "mode": "add"},
        lambda x, u, i: _added(x, u, i),
    ),
    Case(
        "scatter",
        (real(4, 2), real(2, 2), whole(1, 3)),
        {"axes": (0,), "mode": "set"},
        lambda x, u, i: _put(x, u, i),
    ),
    Case(
        "scatter_along", (real(3, 2), whole([0, 1], [0, 2]), real(2, 2)), {"axis": 0, "mode": "add"}
    ),
    Case("scatter_along", (real(3, 2), whole([0, 2]), real(1, 2)), {"axis": 0, "mode": "set"}),
    Case(
        "dynamic_slice",
        (real(5, 3), np.int64(2), np.int64(0)),
        {"sizes": (2, 3)},
        lambda x, a, b: x[2:4],
    ),
    Case("dynamic_slice", (real(5), np.int64(4)), {"sizes": (3,)}, lambda x, a: x[2:5]),
    Case(
        "dynamic_update",
        (real(5), real(2), np.int64(1)),
        {},
        lambda x, u, a: np.array([x[0], *u, *x[3:]]),
    ),
    Case("one_hot", (LABELS,), {"size": 3}, lambda i: np.eye(3)[i]),
    Case("sort", (real(4, 3),), {"axis": 0}, lambda x: (np.sort(x, 0), np.argsort(x, 0))),
    Case(
        "sort",
        (real(5),),
        {"axis": 0, "descending": True},
        lambda x: (-np.sort(-x), np.argsort(-x)),
    ),
    Case("argsort", (real(5),), {"axis": 0}, np.argsort),
    Case(
        "topk",
        (real(2, 5),),
        {"k": 2, "axis": 1},
        lambda x: (-np.sort(-x, 1)[:, :2], np.argsort(-x, 1)[:, :2]),
    ),
    Case("embedding", (real(4, 3), whole([0, 2], [2, 3])), {}, lambda t, i: t[i]),
]


def _added(x, u, i):
    out = x.copy()
    np.add.at(out, i, u)
    return out


def _put_along(x, i, u, f):
    """For a single row of indices along axis 0."""
    out = x.copy()
    for k, place in enumerate(i[0]):
        out[place, k] = f(out[place, k], u[0, k])
    return out


def _put(x, u, i):
    out = x.copy()
    out[i] = u
    return out


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
    Case("argmax", (real(3, 4),), {"axis": 1}, lambda x: x.argmax(1)),
    Case("argmin", (real(3, 4),), {"axis": 0, "keep": True}, lambda x: x.argmin(0, keepdims=True)),
    Case("any", (np.array([[True, False], [False, False]]),), {"axes": (1,)}, lambda x: x.any(1)),
    Case("all", (np.array([[True, False], [True, True]]),), {}, np.all),
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
    *_both("cumsum", lambda x: np.cumsum(x, 0), axis=0),
    Case(
        "cumsum", (real(4, 2),), {"axis": 0, "reverse": True}, lambda x: np.cumsum(x[::-1], 0)[::-1]
    ),
    *_both("cumprod", lambda x: np.cumprod(x, 0), axis=0),
    Case("cummax", (real(6),), {"axis": 0}, np.maximum.accumulate),
    Case("cummin", (real(6),), {"axis": 0}, np.minimum.accumulate),
    Case("logcumsumexp", (real(4, 2),), {"axis": 0}, lambda x: np.log(np.cumsum(np.exp(x), 0))),
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
    Case("cross", (real(2, 3), real(2, 3)), {"axis": 1}, np.cross),
]


def _conv(x, w, stride=1, padding=0):
    """The definition, for two spatial axes."""
    x = np.pad(x, ((0, 0), (0, 0), (padding, padding), (padding, padding)))
    n, m = ((s - k) // stride + 1 for s, k in zip(x.shape[2:], w.shape[2:], strict=True))
    out = np.zeros((x.shape[0], w.shape[0], n, m), np.result_type(x, w))
    for i in range(n):
        for j in range(m):
            part = x[
                :, :, i * stride : i * stride + w.shape[2], j * stride : j * stride + w.shape[3]
            ]
            out[:, :, i, j] = np.einsum("ncab,ocab->no", part, w)
    return out


def _softmax(x, axis):
    e = np.exp(x)
    return e / e.sum(axis, keepdims=True)


def _standard(x, axes, eps):
    return (x - x.mean(axes, keepdims=True)) / np.sqrt(x.var(axes, keepdims=True) + eps)


def _pool2(x, f):
    return f(f(x.reshape(*x.shape[:2], x.shape[2] // 2, 2, x.shape[3] // 2, 2), 5), 3)


LAYERS = [
    Case("convolution", (real(2, 2, 5, 6), real(3, 2, 3, 2)), {}, _conv),
    Case(
        "convolution",
        (real(2, 2, 5, 6), real(3, 2, 3, 3)),
        {"stride": 2, "padding": 1},
        lambda x, w: _conv(x, w, 2, 1),
    ),
    Case("convolution", (cplx(1, 2, 4, 4), cplx(2, 2, 2, 2)), {}, _conv),
    Case(
        "convolution",
        (real(1, 4, 7), real(6, 2, 2)),
        {"groups": 2, "dilation": 2, "padding": ((1, 0),)},
    ),
    Case(
        "convolution", (real(1, 2, 4), real(2, 2, 3)), {"input_dilation": 2, "padding": ((-1, 2),)}
    ),
    Case(
        "convolution_transposed",
        (real(1, 2, 3), real(2, 3, 3)),
        {"stride": 2, "padding": 1, "output_padding": 1},
    ),
    Case("convolution_transposed", (real(1, 4, 3, 2), real(4, 3, 2, 3)), {"groups": 2}),
    Case("max_pool", (real(2, 2, 4, 6),), {"window": (2, 2)}, lambda x: _pool2(x, np.max)),
    Case("max_pool", (real(1, 7),), {"window": (3,), "stride": (2,), "padding": ((1, 1),)}),
    Case("avg_pool", (real(2, 2, 4, 6),), {"window": (2, 2)}, lambda x: _pool2(x, np.mean)),
    Case(
        "avg_pool",
        (real(1, 5),),
        {"window": (3,), "stride": (2,), "padding": ((1, 1),), "count_include_pad": False},
        lambda x: np.array([[x[0, :2].mean(), x[0, 1:4].mean(), x[0, 3:].mean()]]),
    ),
    Case("sum_pool", (real(2, 2, 4, 6),), {"window": (2, 2)}, lambda x: _pool2(x, np.sum)),
    Case("softmax", (real(3, 4),), {"axis": 1}, lambda x: _softmax(x, 1)),
    Case("softmax", (real(3, 4),), {"axis": 0}, lambda x: _softmax(x, 0)),
    Case("softmax", (cplx(3, 4),), {"axis": 1}, lambda x: _softmax(x, 1)),
    Case("log_softmax", (0.3 * cplx(3, 4),), {"axis": 1}, lambda x: np.log(_softmax(x, 1))),
    Case("log_softmax", (real(3, 4),), {"axis": 1}, lambda x: np.log(_softmax(x, 1))),
    Case(
        "cross_entropy",
        (real(5, 3), LABELS),
        {"axis": 1},
        lambda z, t: -np.log(_softmax(z, 1))[np.arange(5), t].mean(),
    ),
    Case(
        "cross_entropy",
        (real(5, 3), LABELS),
        {"axis": 1, "reduction": "none"},
        lambda z, t: -np.log(_softmax(z, 1))[np.arange(5), t],
    ),
    Case(
        "cross_entropy",
        (real(2, 3), _softmax(real(2, 3), 1)),
        {"axis": 1, "reduction": "sum"},
        lambda z, t: -(t * np.log(_softmax(z, 1))).sum(),
    ),
    Case("cross_entropy", (real(2, 3, 4), whole([0, 1, 2, 2], [1, 1, 0, 2])), {"axis": 1}),
    Case(
        "standardize", (real(3, 4),), {"axes": (1,), "eps": 0.1}, lambda x: _standard(x, (1,), 0.1)
    ),
    Case("standardize", (cplx(3, 4),), {"axes": (1,)}, lambda x: _standard(x, (1,), 0)),
    Case(
        "layer_norm",
        (HEAVY, real(3), real(3)),
        {"axes": (1,), "eps": 1e-5},
        lambda x, g, b: _standard(x, (1,), 1e-5) * g + b,
    ),
    Case(
        "layer_norm",
        (real(2, 3, 2), real(3, 2)),
        {"axes": (1, 2), "eps": 1e-5},
        lambda x, g: _standard(x, (1, 2), 1e-5) * g,
    ),
    Case(
        "batch_norm",
        (real(4, 2, 3), real(2), real(2)),
        {"training": True, "eps": 1e-5},
        lambda x, g, b: _standard(x, (0, 2), 1e-5) * g[:, None] + b[:, None],
    ),
    Case(
        "batch_norm",
        (real(4, 2), real(2), real(2), real(2), real(2, low=1, high=2)),
        {"training": False, "eps": 1e-5},
        lambda x, g, b, m, v: (x - m) / np.sqrt(v + 1e-5) * g + b,
    ),
    Case(
        "group_norm",
        (real(2, 4, 3), real(4), real(4)),
        {"groups": 2, "eps": 1e-5},
        lambda x, g, b: (
            _standard(x.reshape(2, 2, 2, 3), (2, 3), 1e-5).reshape(2, 4, 3) * g[:, None]
            + b[:, None]
        ),
    ),
    Case(
        "rms_norm",
        (real(2, 4), real(4)),
        {"axes": (1,), "eps": 1e-5},
        lambda x, g: x / np.sqrt((x**2).mean(1, keepdims=True) + 1e-5) * g,
    ),
    Case(
        "attention",
        (real(3, 2), real(4, 2), real(4, 5)),
        {},
        lambda q, k, v: _softmax(q @ k.T / np.sqrt(2), 1) @ v,
    ),
    Case(
        "attention",
        (real(2, 3, 2), real(2, 3, 2), real(2, 3, 2)),
        {"is_causal": True, "scale": 0.3},
        lambda q, k, v: _causal(q, k, v, 0.3),
    ),
    Case(
        "attention",
        (real(3, 2), real(3, 2), real(3, 2), real(3, 3)),
        {},
        lambda q, k, v, m: _softmax(q @ k.T / np.sqrt(2) + m, 1) @ v,
    ),
    Case(
        "dropout",
        (real(3, 2), np.array([[True, False], [True, True], [False, True]])),
        {"rate": 0.25},
        lambda x, m: x * m / 0.75,
    ),
]


def _causal(q, k, v, scale):
    s = scale * np.einsum("bik,bjk->bij", q, k)
    s = np.where(np.tril(np.ones(s.shape[-2:])) > 0, s, -np.inf)
    return _softmax(s, 2) @ v


def _expm(a):
    w, v = np.linalg.eig(a)
    return (v * np.exp(w)) @ np.linalg.inv(v)


LINALG = [
    *(
        Case(name, (make,), {}, reference)
        for name, reference in {"det": np.linalg.det, "inverse": np.linalg.inv}.items()
        for make in (sound(3, 3), sound(3, 3, of=cplx), sound(2, 2, 2))
    ),
    Case("slogdet", (sound(3, 3),), {}, lambda a: tuple(np.linalg.slogdet(a))),
    Case("slogdet", (sound(3, 3, of=cplx),), {}, lambda a: tuple(np.linalg.slogdet(a))),
    Case("logdet", (definite(3),), {}, lambda a: np.linalg.slogdet(a)[1]),
    Case("solve", (sound(3, 3), real(3, 2)), {}, np.linalg.solve),
    Case("solve", (sound(3, 3, of=cplx), real(3, 2)), {}, np.linalg.solve),
    Case("solve", (sound(2, 3, 3), real(2, 3, 1)), {}, np.linalg.solve),
    Case(
        "triangular_solve",
        (sound(3, 3), real(3, 2)),
        {},
        lambda a, b: np.linalg.solve(np.tril(a), b),
    ),
    Case(
        "triangular_solve",
        (cplx(3, 3) + 3 * np.eye(3), real(2, 3)),
        {"lower": False, "unit": True, "transpose": True, "conjugate": True, "left": False},
        lambda a, b: b @ np.linalg.inv((np.triu(a, 1) + np.eye(3)).conj().T),
    ),
    Case("cholesky", (definite(3),), {}, np.linalg.cholesky, 1e-12),
    Case(
        "cholesky",
        (definite(3, True),),
        {"upper": True},
        lambda a: np.linalg.cholesky(a).conj().T,
        1e-12,
    ),
    Case("matrix_power", (real(3, 3),), {"exponent": 3}, lambda a: a @ a @ a),
    Case(
        "matrix_power",
        (real(2, 2) + 2 * np.eye(2),),
        {"exponent": -2},
        lambda a: np.linalg.inv(a @ a),
    ),
    Case("matrix_power", (real(2, 2),), {"exponent": 0}, lambda a: np.eye(2)),
    Case("expm", (real(3, 3),), {}, lambda a: _expm(a).real, 1e-11),
    Case("expm", (cplx(2, 2),), {}, _expm, 1e-11),
    Case("pinv", (real(4, 2),), {}, np.linalg.pinv, 1e-11),
    Case("pinv", (cplx(2, 4),), {}, np.linalg.pinv, 1e-11),
    *(
        Case(
            name,
            (make,),
            {"axes": (0,), "norm": norm},
            lambda x, name=name, norm=norm: getattr(np.fft, name)(x, axis=0, norm=norm),
        )
        for name in ("fft", "ifft")
        for make in (real(4, 2), cplx(5))
        for norm in ("backward", "ortho", "forward")
    ),
    Case("fft", (real(3, 4),), {}, np.fft.fft2),
    Case("rfft", (real(5, 4),), {"axes": (0, 1)}, np.fft.rfft2),
    Case("rfft", (real(5),), {"norm": "ortho"}, lambda x: np.fft.rfft(x, norm="ortho")),
    Case("irfft", (cplx(3),), {"length": 4}, lambda x: np.fft.irfft(x, 4)),
    Case(
        "irfft",
        (cplx(3),),
        {"length": 5, "norm": "ortho"},
        lambda x: np.fft.irfft(x, 5, norm="ortho"),
    ),
    Case("irfft", (cplx(4, 3),), {"axes": (0, 1), "length": 4}, lambda x: np.fft.irfft2(x, (4, 4))),
]

LEAVES = [
    Case("iota", (), {"shape": (2, 3), "axis": 1}, lambda: np.broadcast_to(np.arange(3), (2, 3))),
    Case("constant", (), {"value": np.arange(4.0)}, lambda: np.arange(4.0)),
    Case("scale_gradient", (real(3),), {"scale": -2.0}, lambda x: x, order=0),
]

SHORTER = [
    Case(
        "take_along",
        (real(4, 3), whole([0, 3])),
        {"axis": 0},
        lambda x, i: np.take_along_axis(x[:, :2], i, 0),
    ),
    Case(
        "scatter_along",
        (real(4, 3), whole([0, 3]), real(1, 2)),
        {"axis": 0, "mode": "add"},
        lambda x, i, u: _put_along(x, i, u, np.add),
    ),
    Case(
        "scatter_along",
        (real(4, 3), whole([0, 3]), real(1, 2)),
        {"axis": 0, "mode": "set"},
        lambda x, i, u: _put_along(x, i, u, lambda old, new: new),
    ),
]


def _added_product(x, a, b):
    return 0.5 * x + 2 * a @ b


def _shifted_convolution(x, w, b):
    parts = np.stack([x[..., k : k + 2] for k in range(4)], -2)
    return np.einsum("nitk,oik->not", parts, w) + b[:, None]


# Words of one framework.
FURTHER = [
    *(
        Case(name, (real(4, 3),), attributes, reference)
        for name, attributes, reference in (
            ("softplus", {"threshold": 0.5}, lambda x: np.where(x > 0.5, x, np.log1p(np.exp(x)))),
            ("elu", {"scale": 2.0, "input_scale": 3.0}, lambda x: 2 * _elu(3 * x, 1)),
            ("celu", {"alpha": 0.5}, lambda x: np.where(x > 0, x, 0.5 * np.expm1(x / 0.5))),
            ("mish", {}, lambda x: x * np.tanh(np.log1p(np.exp(x)))),
            ("hardsigmoid", {}, lambda x: np.clip(x + 3, 0, 6) / 6),
            ("hardswish", {}, lambda x: x * np.clip(x + 3, 0, 6) / 6),
            ("softshrink", {"lambd": 0.3}, lambda x: x - np.clip(x, -0.3, 0.3)),
            ("hardshrink", {"lambd": 0.3}, lambda x: np.where(np.abs(x) > 0.3, x, 0)),
            ("nan_to_num", {"nan": 2.0}, lambda x: x),
            ("deg2rad", {}, np.deg2rad),
            ("rad2deg", {}, np.rad2deg),
            ("sinc", {}, np.sinc),
            ("frac", {}, lambda x: x - np.trunc(x)),
        )
    ),
    Case("glu", (real(4, 3),), {"axis": 0}, lambda x: x[:2] / (1 + np.exp(-x[2:]))),
    Case("logit", (real(3, low=0.1, high=0.9),), {}, lambda x: np.log(x / (1 - x))),
    Case("logit", (real(3, low=0.1, high=0.9),), {"eps": 0.4}, _logit_of_the_middle),
    *(
        Case(name, [real(3, 2) for _ in range(count)], attributes, reference)
        for name, count, attributes, reference in (
            ("add", 2, {"alpha": 0.3}, lambda a, b: a + 0.3 * b),
            ("subtract", 2, {"alpha": 0.3}, lambda a, b: a - 0.3 * b),
            ("divide", 2, {"rounding_mode": "floor"}, lambda a, b: np.floor(a / b)),
            ("divide", 2, {"rounding_mode": "trunc"}, lambda a, b: np.trunc(a / b)),
            ("fmod", 2, {}, np.fmod),
            ("addcmul", 3, {"value": 0.3}, lambda x, a, b: x + 0.3 * a * b),
            ("addcdiv", 3, {"value": 0.3}, lambda x, a, b: x + 0.3 * a / b),
            ("lerp", 3, {}, lambda a, b, t: a + t * (b - a)),
            ("hypot", 2, {}, np.hypot),
            ("heaviside", 2, {}, np.heaviside),
            ("logaddexp2", 2, {}, np.logaddexp2),
            ("polar", 2, {}, lambda r, phi: r * np.exp(1j * phi)),
            ("threshold", 3, {}, lambda x, t, v: np.where(x > t, x, v)),
            ("prelu", 2, {}, lambda x, w: np.where(x > 0, x, w * x)),
            ("tanh_backward", 2, {}, lambda g, y: g * (1 - y**2)),
            ("sigmoid_backward", 2, {}, lambda g, y: g * (1 - y) * y),
            ("threshold_backward", 3, {}, lambda g, x, t: np.where(x <= t, 0, g)),
            ("clip", 3, {}, lambda x, low, high: np.minimum(np.maximum(x, low), high)),
        )
    ),
    Case("xlogy", (real(3, 2), POSITIVE), {}, lambda a, b: a * np.log(b)),
    *(
        Case(name, tuple(real(*shape) for shape in shapes), attributes, reference)
        for name, shapes, attributes, reference in (
            ("unbind", [(3, 2)], {"axis": 1}, lambda x: (x[:, 0], x[:, 1])),
            ("tile", [(3, 2)], {"reps": (2, 1, 3)}, lambda x: np.tile(x, (2, 1, 3))),
            ("roll", [(3, 2)], {"shifts": (1,), "axes": ()}, lambda x: np.roll(x, 1)),
            ("flip", [(3, 2)], {}, lambda x: x),
            (
                "slice",
                [(3, 2)],
                {"start": (1, 0), "limit": (2, 2), "drop": (0,)},
                lambda x: x[1],
            ),
            ("pad", [(2,), ()], {"low": (1,), "high": (0,)}, lambda x, v: np.array([v, *x])),
            (
                "diagonal_matrix",
                [(2, 3)],
                {"axes": (0, 1)},
                lambda x: np.stack([np.diag(row) for row in x], -1),
            ),
            (
                "reflection_pad",
                [(4, 3)],
                {"padding": (1, 2, -1, 1)},
                lambda x: np.pad(x, ((0, 1), (1, 2)), "reflect")[1:],
            ),
            (
                "replication_pad",
                [(4, 3)],
                {"padding": (1, 2)},
                lambda x: np.pad(x, ((0, 0), (1, 2)), "edge"),
            ),
            ("view_as_complex", [(3, 2)], {}, lambda x: x[:, 0] + 1j * x[:, 1]),
            (
                "kthvalue",
                [(4, 3)],
                {"k": 2, "axis": 0},
                lambda x: (np.sort(x, 0)[1], np.argsort(x, 0)[1]),
            ),
            (
                "kthvalue",
                [(4, 3)],
                {"k": 2, "axis": 0, "keep": True},
                lambda x: (np.sort(x, 0)[1:2], np.argsort(x, 0)[1:2]),
            ),
            ("median", [(4, 3)], {}, lambda x: (np.sort(x, None)[5],)),
            (
                "median",
                [(4, 3)],
                {"axis": 0},
                lambda x: (np.sort(x, 0)[1], np.argsort(x, 0)[1]),
            ),
            ("argmax", [(4, 3)], {}, np.argmax),
            ("argmax", [(4, 3)], {"keep": True}, lambda x: np.argmax(x, keepdims=True)),
            ("norm", [(4, 3)], {"ord": -np.inf, "axes": (0,)}, lambda x: np.abs(x).min(0)),
            ("norm", [(4, 3)], {"ord": 0, "axes": (0,)}, lambda x: np.full(3, 4.0)),
            ("count_nonzero", [(4, 3)], {"axis": 1}, lambda x: np.full(4, 3)),
            ("addmm", [(2,), (3, 4), (4, 2)], {"beta": 0.5, "alpha": 2}, _added_product),
            ("addmm", [(2,), (3, 4), (4, 2)], {"beta": 0}, lambda x, a, b: a @ b),
            ("baddbmm", [(2,), (2, 3, 4), (2, 4, 2)], {}, lambda x, a, b: x + a @ b),
            ("addmv", [(3,), (3, 4), (4,)], {}, lambda x, a, b: x + a @ b),
            ("addbmm", [(2,), (2, 3, 4), (2, 4, 2)], {}, lambda x, a, b: x + (a @ b).sum(0)),
            ("addr", [(3, 2), (3,), (2,)], {}, lambda x, a, b: x + np.outer(a, b)),
            ("cdist", [(3, 2), (4, 2)], {}, lambda a, b: np.linalg.norm(a[:, None] - b, axis=-1)),
            ("cdist", [(3, 2), (4, 2)], {"p": 1.0}, lambda a, b: np.abs(a[:, None] - b).sum(-1)),
            ("safe_softmax", [(3, 2)], {"axis": 1}, lambda x: _softmax(x, 1)),
            (
                "softmax_backward_data",
                [(3, 2), (3, 2)],
                {"axis": 1},
                lambda g, y: y * (g - (g * y).sum(1, keepdims=True)),
            ),
            (
                "log_softmax_backward_data",
                [(3, 2), (3, 2)],
                {"axis": 1},
                lambda g, y: g - np.exp(y) * g.sum(1, keepdims=True),
            ),
            ("mse_loss", [(3, 2), (3, 2)], {}, lambda x, t: np.mean((x - t) ** 2)),
            ("mse_loss", [(3, 2), (3, 2)], {"reduction": 2}, lambda x, t: np.sum((x - t) ** 2)),
            ("convolution", [(1, 2, 5), (3, 2, 2), (3,)], {}, _shifted_convolution),
            (
                "convolution",
                [(1, 5, 2), (2, 2, 3)],
                {"layout": ((0, 2, 1), (2, 1, 0), (0, 2, 1))},
                lambda x, w: np.stack(
                    [np.einsum("nti,tio->no", x[:, k : k + 2], w) for k in range(4)], 1
                ),
            ),
            ("polynomial", [(3,), (), (), ()], {}, lambda x, a, b, c: a + b * x + c * x**2),
            ("one_minus_square", [(3, 2)], {}, lambda x: 1 - x**2),
            ("min_pool", [(1, 6)], {"window": (2,)}, lambda x: x.reshape(1, 3, 2).min(-1)),
            (
                "sum_pool",
                [(1, 2)],
                {"window": (2,), "stride": (1,), "input_dilation": (3,)},
                lambda x: np.stack([x[:, 0], 0 * x[:, 0], x[:, 1]], 1),
            ),
        )
    ),
    Case("vdot", (cplx(3), cplx(3)), {}, np.vdot),
    Case("round", (real(4, 3),), {"decimals": 1}, lambda x: np.round(x, 1), order=0),
    Case(
        "round",
        (np.array([0.5, -0.5, 1.5, 0.2]),),
        {"rounding_method": "away_from_zero"},
        lambda x: np.array([1.0, -1.0, 2.0, 0.0]),
        order=0,
    ),
    Case("view_as_real", (cplx(3),), {}, lambda x: np.stack([x.real, x.imag], -1)),
    Case(
        "binary_cross_entropy",
        (real(3, low=0.1, high=0.9), real(3, low=0.1, high=0.9), POSITIVE[:, 0]),
        {"reduction": 2},
        lambda p, t, w: -np.sum(w * (t * np.log(p) + (1 - t) * np.log(1 - p))),
    ),
    Case("solve", (sound(3, 3), real(3)), {}, np.linalg.solve),
    Case("solve", (sound(3, 3), real(2, 3)), {"left": False}, lambda a, b: b @ np.linalg.inv(a)),
    *(
        Case("cholesky_solve", (real(3, 2), sound(3, 3)), {"upper": upper}, reference)
        for upper, reference in (
            (False, lambda b, f: np.linalg.solve(f @ f.T, b)),
            (True, lambda b, f: np.linalg.solve(f.T @ f, b)),
        )
    ),
    Case("cholesky_inverse", (sound(3, 3),), {}, lambda f: np.linalg.inv(f @ f.T), 1e-10),
    Case(
        "max_pool",
        (real(1, 1, 6),),
        {"window": (3,), "stride": (2,), "ceil_mode": True},
        lambda x: np.stack([x[..., k : k + 3].max(-1) for k in (0, 2, 4)], -1),
    ),
    Case(
        "avg_pool",
        (real(1, 1, 6),),
        {"window": (3,), "divisor_override": 2},
        lambda x: x.reshape(1, 1, 2, 3).sum(-1) / 2,
    ),
]

CASES = [
    *SHORTER,
    *UNARY,
    *BINARY,
    *SHAPES,
    *INDEXING,
    *REDUCTIONS,
    *CONTRACTIONS,
    *LAYERS,
    *LINALG,
    *LEAVES,
    *FURTHER,
]

# Decompositions have phases and signs that are nobody's choice; they are checked in test_formula_
# operations.py through what does not depend on them. Control flow has tests of its own.
ELSEWHERE = {
    "eigh",
    "svd",
    "qr",
    "scan",
    "while",
    "cond",
    "call",
    "custom_rule",
    "opaque",
    "random",
}
