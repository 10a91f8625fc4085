"""The table of operations on whole arrays: value in NumPy, and pullback.

`PRIMITIVES` holds them. ``evaluate(y, *arrays)`` reads its attributes from the expression y; an
operation with several outputs returns a tuple, and its pullback gets tuples.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from gradtools.seeing.formula import kernels
from gradtools.seeing.formula.algebra import (
    reshape,
)
from gradtools.seeing.formula.making import (
    dynamic_pad,
    dynamic_slice,
    flip,
    fourier,
    half,
    index,
    index_add,
    pooled,
    put_along,
    roll,
    take_along,
    triangle,
)
from gradtools.seeing.formula.pullbacks import (
    along_set_pullback,
    cholesky_pullback,
    concatenate_pullback,
    convolution_input_pullback,
    convolution_pullback,
    convolution_weight_pullback,
    cumprod_pullback,
    det_pullback,
    deviation_pullback,
    dynamic_update_pullback,
    eigh_pullback,
    einsum_pullback,
    expm_pullback,
    extreme_pullback,
    gaps_pullback,
    index_set_pullback,
    inverse_pullback,
    linear,
    log_softmax_pullback,
    logabsdet_pullback,
    logcumsumexp_pullback,
    logsumexp_pullback,
    max_pick_pullback,
    max_pool_pullback,
    max_unpool_pullback,
    norm_pullback,
    pad_pullback,
    pooling_of,
    prod_pullback,
    pseudoinverse_pullback,
    qr_pullback,
    running_sum,
    sign_det_pullback,
    slice_pullback,
    softmax_pullback,
    solve_pullback,
    standardize_pullback,
    svd_pullback,
    variance_pullback,
)


@dataclass(frozen=True)
class Primitive:
    """An operation on whole arrays.

    Attributes:
        evaluate: The value in NumPy, of the expression and the arguments' values.
        pullback: The arguments' cotangents, of the expression (or its outputs), the cotangent
            (or cotangents) and the arguments; None where there is no derivative.
    """

    evaluate: Callable[..., Any]
    pullback: Callable[..., Any] | None = None


PRIMITIVES: dict[str, Primitive] = {
    "number": Primitive(lambda y: np.asarray(y["value"])),
    "array": Primitive(lambda y: y["value"].array),
    "identity": Primitive(lambda y: np.eye(y.shape[0])),
    "einsum": Primitive(kernels.einsum, einsum_pullback),
    "add": Primitive(lambda y, *xs: sum(xs[1:], xs[0] + 0.0), lambda y, g, *xs: [g] * len(xs)),
    "reshape": Primitive(
        lambda y, x: np.reshape(x, y.shape), lambda y, g, x: [reshape(g, x.shape)]
    ),
    "slice": Primitive(kernels.cut, slice_pullback),
    "pad": Primitive(kernels.pad, pad_pullback),
    "concatenate": Primitive(lambda y, *xs: np.concatenate(xs, y["axis"]), concatenate_pullback),
    "flip": Primitive(lambda y, x: np.flip(x, y["axes"]), lambda y, g, x: [flip(g, y["axes"])]),
    "roll": Primitive(
        lambda y, x: np.roll(x, y["shifts"], y["axes"]),
        lambda y, g, x: [roll(g, [-s for s in y["shifts"]], y["axes"])],
    ),
    "one_hot": Primitive(kernels.one_hot),
    "iota": Primitive(kernels.iota),
    "index": Primitive(
        kernels.index, linear(lambda y, g, x, *i: index_add(g, i, y["axes"], x.shape))
    ),
    "index_add": Primitive(kernels.index_add, linear(lambda y, g, u, *i: index(g, i, y["axes"]))),
    "index_set": Primitive(kernels.index_set, index_set_pullback),
    "take_along": Primitive(
        lambda y, x, i: np.take_along_axis(x, i.astype(np.int64, copy=False), y["axis"]),
        linear(lambda y, g, x, i: put_along(g, i, y["axis"], x.shape[y["axis"]])),
    ),
    "put_along": Primitive(
        kernels.put_along, linear(lambda y, g, u, i: take_along(g, i, y["axis"]))
    ),
    "along_set": Primitive(kernels.along_set, along_set_pullback),
    "dynamic_slice": Primitive(
        kernels.dynamic_slice, linear(lambda y, g, x, *s: dynamic_pad(g, s, x.shape))
    ),
    "dynamic_pad": Primitive(
        kernels.dynamic_pad, linear(lambda y, g, u, *s: dynamic_slice(g, s, u.shape))
    ),
    "dynamic_update": Primitive(kernels.dynamic_update, dynamic_update_pullback),
    "argsort": Primitive(kernels.argsort),
    "argmax": Primitive(lambda y, x: np.argmax(x, y["axis"])),
    "cumargmax": Primitive(kernels.cumargmax),
    "any": Primitive(lambda y, x: np.any(x, y["axes"])),
    "all": Primitive(lambda y, x: np.all(x, y["axes"])),
    "max": Primitive(lambda y, x: np.max(x, y["axes"]), extreme_pullback),
    "min": Primitive(lambda y, x: np.min(x, y["axes"]), extreme_pullback),
    "prod": Primitive(lambda y, x: np.prod(x, y["axes"]), prod_pullback),
    "logsumexp": Primitive(kernels.logsumexp, logsumexp_pullback),
    "softmax": Primitive(lambda y, x: kernels.softmax(x, y["axis"]), softmax_pullback),
    "log_softmax": Primitive(kernels.log_softmax, log_softmax_pullback),
    "standardize": Primitive(kernels.standardize, standardize_pullback),
    "deviation": Primitive(kernels.deviation, deviation_pullback),
    "variance": Primitive(
        lambda y, x: np.var(x, y["axes"], ddof=y["correction"]), variance_pullback
    ),
    "norm": Primitive(lambda y, x: np.sqrt((np.abs(x) ** 2).sum(y["axes"])), norm_pullback),
    "cumsum": Primitive(
        kernels.cumsum, lambda y, g, x: [running_sum(g, y["axis"], not y["reverse"])]
    ),
    "cumprod": Primitive(kernels.cumprod, cumprod_pullback),
    "logcumsumexp": Primitive(kernels.logcumsumexp, logcumsumexp_pullback),
    "convolution": Primitive(kernels.convolution, convolution_pullback),
    "convolution_input": Primitive(kernels.convolution_input, convolution_input_pullback),
    "convolution_weight": Primitive(kernels.convolution_weight, convolution_weight_pullback),
    "max_pool": Primitive(kernels.max_pool, max_pool_pullback),
    "max_unpool": Primitive(kernels.max_unpool, max_unpool_pullback),
    "max_pick": Primitive(kernels.max_pick, max_pick_pullback),
    "sum_pool": Primitive(
        kernels.sum_pool, lambda y, g, x: [pooled("sum_unpool", (g,), x.shape, pooling_of(y))]
    ),
    "sum_unpool": Primitive(
        kernels.sum_unpool, lambda y, u, g: [pooled("sum_pool", (u,), g.shape, pooling_of(y))]
    ),
    "triangle": Primitive(
        lambda y, x: (np.triu if y["upper"] else np.tril)(x, y["offset"]),
        lambda y, g, x: [triangle(g, y["upper"], y["offset"])],
    ),
    "half": Primitive(kernels.half, lambda y, g, x: [half(g)]),
    "gaps": Primitive(kernels.gaps, gaps_pullback),
    "det": Primitive(lambda y, a: np.linalg.det(a), det_pullback),
    "logabsdet": Primitive(lambda y, a: np.linalg.slogdet(a)[1], logabsdet_pullback),
    "sign_det": Primitive(lambda y, a: np.linalg.slogdet(a)[0], sign_det_pullback),
    "inverse": Primitive(lambda y, a: np.linalg.inv(a), inverse_pullback),
    "pinv": Primitive(lambda y, a: kernels.pseudoinverse(a), pseudoinverse_pullback),
    "solve": Primitive(lambda y, a, b: np.linalg.solve(a, b), solve_pullback),
    "cholesky": Primitive(kernels.cholesky, cholesky_pullback),
    "expm": Primitive(lambda y, a: kernels.expm(a), expm_pullback),
    "eigh": Primitive(lambda y, a: tuple(np.linalg.eigh(kernels.hermitian(a))), eigh_pullback),
    "svd": Primitive(lambda y, a: kernels.svd(a), svd_pullback),
    "qr": Primitive(lambda y, a: tuple(np.linalg.qr(a)), qr_pullback),
    "fourier": Primitive(kernels.fourier, lambda y, g, x: [fourier(g, y["axes"], -y["sign"])]),
}
