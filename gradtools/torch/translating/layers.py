"""Aten's products, linear algebra, transforms and layers, in the vocabulary of the formula."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from gradtools.torch.translating.writer import Ref, Writer, as_said

Translation = Callable[[Writer, Any], Any]
LAYERS: dict[str, Translation] = {}


def operation(*names: str) -> Callable[[Translation], Translation]:
    """Enters a translation under aten's names."""

    def enter(translation: Translation) -> Translation:
        LAYERS.update(dict.fromkeys(names, translation))
        return translation

    return enter


# These are said as the graph says them.
LAYERS |= dict.fromkeys(["mm", "bmm", "mv", "matmul", "dot"], as_said)
LAYERS |= dict.fromkeys(["_softmax", "softmax", "_log_softmax", "log_softmax"], as_said)


# --- products ----------------------------------------------------------------------------


@operation("vdot")
def _vdot(w: Writer, o: Any) -> Ref:
    return w.matmul(w("conj", o.self), o.other)


@operation("addmm", "baddbmm", "addmv", "addr", "addbmm")
def _plus_product(w: Writer, o: Any) -> Ref:
    """beta * self + alpha * product."""
    names = ("mat1", "mat2"), ("batch1", "batch2"), ("mat", "vec"), ("vec1", "vec2")
    a, b = next((vars(o)[m], vars(o)[n]) for m, n in names if m in vars(o) and n in vars(o))
    if a.ndim == b.ndim == 1:
        product = w("outer", a, b, shape=(*a.shape, *b.shape))
    else:
        product = w.matmul(a, b)
    if "addbmm" in w.native and "baddbmm" not in w.native:
        product = w.total(product, [0])
    scaled = w.times(o.alpha, product)
    return scaled if o.beta == 0 else w.add(scaled, w.times(o.beta, o.self))


@operation("outer", "ger")
def _outer(w: Writer, o: Any) -> Ref:
    return w("outer", o.self, o.vec2, shape=o.likes[0][0])


@operation("_cdist_forward", "_euclidean_dist", "cdist")
def _cdist(w: Writer, o: Any) -> Ref:
    """The norm of x1_i - x2_j."""
    a, b = o.x1, o.x2
    a = w.reshape(a, (*a.shape[:-1], 1, a.shape[-1]))
    b = w.reshape(b, (*b.shape[:-2], 1, *b.shape[-2:]))
    order = float(getattr(o, "p", 2.0))
    between = w.sub(a, b)
    return w.reduce("norm", between, [-1], ord=None if order == 2 else order)


@operation("trace")
def _trace(w: Writer, o: Any) -> Ref:
    return w("trace", o.self, shape=())


@operation("linalg_cross", "cross")
def _cross(w: Writer, o: Any) -> Ref:
    return w("cross", o.self, o.other, axis=o.dim % o.self.ndim)


# --- linear algebra ----------------------------------------------------------------------


@operation("linalg_inv_ex", "inverse", "linalg_inv")
def _inverse(w: Writer, o: Any) -> Any:
    a = getattr(o, "A", None) or o.self
    return [w("inverse", a, shape=a.shape), *_noted(w, o, 1)]


@operation("_linalg_solve_ex", "linalg_solve_ex")
def _solve(w: Writer, o: Any) -> Any:
    vector = o.B.ndim == o.A.ndim - 1 and o.likes[0][0] == o.B.shape and o.B.ndim == 1
    vector = vector or (o.B.ndim == o.A.ndim - 1 and o.B.shape == o.A.shape[:-1] and o.B.ndim > 1)
    b = w.reshape(o.B, (*o.B.shape, 1)) if vector else o.B
    if not o.left:
        return [w.swap(_solved(w, w.swap(o.A), w.swap(b))), *_noted(w, o, 1)]
    return [w.reshape(_solved(w, o.A, b), o.likes[0][0]), *_noted(w, o, 1)]


def _solved(w: Writer, a: Ref, b: Ref) -> Ref:
    lead = np.broadcast_shapes(a.shape[:-2], b.shape[:-2])
    return w("solve", a, b, shape=(*lead, a.shape[-1], b.shape[-1]))


def _noted(w: Writer, o: Any, first: int) -> list[Any]:
    """What a factorisation gives besides: held as it was, for it has no derivative."""
    return [
        None if y.is_floating_point() or y.is_complex() else o.recorder.constant(y)
        for y in o.outs[first:]
    ]


@operation("_linalg_det")
def _det(w: Writer, o: Any) -> Any:
    return [w("det", o.A, shape=o.likes[0][0]), *_noted(w, o, 1)]


@operation("_linalg_slogdet")
def _slogdet(w: Writer, o: Any) -> Any:
    return [*w.node("slogdet", [o.A], o.likes[:2]), *_noted(w, o, 2)]


@operation("linalg_cholesky_ex", "cholesky")
def _cholesky(w: Writer, o: Any) -> Any:
    result = w("cholesky", o.self, upper=True if o.upper else None)
    return [result, *_noted(w, o, 1)]


@operation("linalg_solve_triangular")
def _solve_triangular(w: Writer, o: Any) -> Ref:
    flags: dict[str, Any] = {"lower": not o.upper, "unit": o.unitriangular or None, "left": o.left}
    lead = np.broadcast_shapes(o.self.shape[:-2], o.B.shape[:-2])
    return w("triangular_solve", o.self, o.B, shape=(*lead, *o.B.shape[-2:]), **flags)


@operation("triangular_solve")
def _old_triangular(w: Writer, o: Any) -> Any:
    flags: dict[str, Any] = {"lower": not o.upper, "unit": o.unitriangular or None}
    flags["transpose"] = True if o.transpose else None
    return [w("triangular_solve", o.A, o.self, shape=o.likes[0][0], **flags), o.A]


@operation("cholesky_solve", "_cholesky_solve_helper")
def _cholesky_solve(w: Writer, o: Any) -> Ref:
    factor = getattr(o, "input2", None) or o.A
    h = w.swap(w("conj", factor))
    square = w.matmul(h, factor) if o.upper else w.matmul(factor, h)
    return _solved(w, square, o.self)


@operation("cholesky_inverse")
def _cholesky_inverse(w: Writer, o: Any) -> Ref:
    h = w.swap(w("conj", o.self))
    square = w.matmul(h, o.self) if o.upper else w.matmul(o.self, h)
    return w("inverse", square, shape=square.shape)


@operation("linalg_qr")
def _qr(w: Writer, o: Any) -> Any:
    reduced = o.mode == "reduced" or o.A.shape[-1] == o.A.shape[-2]
    if not reduced or o.A.shape[-2] < o.A.shape[-1]:
        return None
    return w.node("qr", [o.A], o.likes)


@operation("_linalg_svd")
def _svd(w: Writer, o: Any) -> Any:
    rows, columns = o.A.shape[-2:]
    k = min(rows, columns)
    if o.full_matrices and rows != columns and o.compute_uv:
        return None
    lead, real = o.A.shape[:-2], o.likes[1][1]
    outs = [((*lead, rows, k), o.A.dtype), ((*lead, k), real), ((*lead, k, columns), o.A.dtype)]
    u, s, vh = w.node("svd", [o.A], outs)
    return [u, s, vh] if o.compute_uv else [None, s, None]


@operation("_linalg_eigh")
def _eigh(w: Writer, o: Any) -> Any:
    values = o.likes[0]
    result = w.node("eigh", [o.A], [values, (o.A.shape, o.A.dtype)])
    return result if o.compute_v else [result[0], None]


@operation("linalg_matrix_exp", "matrix_exp")
def _expm(w: Writer, o: Any) -> Ref:
    return w("expm", o.self)


@operation("linalg_pinv")
def _pinv(w: Writer, o: Any) -> Ref:
    return w("pinv", o.self, shape=o.likes[0][0])


@operation("linalg_lstsq")
def _lstsq(w: Writer, o: Any) -> Any:
    """The pseudo-inverse times b, where that is all that is asked for."""
    if o.self.ndim != 2 or o.b.ndim != 2:
        return None
    inverse = w("pinv", o.self, shape=(o.self.shape[1], o.self.shape[0]))
    return [w.matmul(inverse, o.b), *[None] * (len(o.outs) - 1)]


# --- Fourier transforms ------------------------------------------------------------------

_FORWARD = ("backward", "ortho", "forward")  # by aten's number: nothing, 1/sqrt(n), 1/n


def _norm(o: Any, forward: bool) -> str | None:
    name = _FORWARD[o.normalization if forward else 2 - o.normalization]
    return None if name == "backward" else name


def _along(o: Any) -> tuple[int, ...]:
    return tuple(a % o.self.ndim for a in o.dim)


@operation("_fft_c2c")
def _fft(w: Writer, o: Any) -> Ref:
    word = "fft" if o.forward else "ifft"
    return w(word, o.self, axes=_along(o), norm=_norm(o, o.forward))


@operation("_fft_r2c")
def _rfft(w: Writer, o: Any) -> Ref:
    word = "rfft" if o.onesided else "fft"
    given = {"axes": _along(o), "norm": _norm(o, True)}
    return w(word, o.self, shape=o.likes[0][0], dtype="complex128", **given)


@operation("_fft_c2r")
def _irfft(w: Writer, o: Any) -> Ref:
    given = {"axes": _along(o), "norm": _norm(o, False), "length": o.last_dim_size}
    return w("irfft", o.self, shape=o.likes[0][0], dtype="float64", **given)


# --- convolutions and pooling ------------------------------------------------------------


@operation("convolution", "_convolution", "convolution_overrideable", "mkldnn_convolution")
def _convolution(w: Writer, o: Any) -> Ref:
    shape = o.likes[0][0]
    given: dict[str, Any] = {"stride": _said(o.stride, 1), "dilation": _said(o.dilation, 1)}
    given["groups"] = o.groups if o.groups != 1 else None
    pads = _each(o.padding, len(shape) - 2)
    if getattr(o, "transposed", False):
        given["padding"] = _said(pads, 0)
        given["output_padding"] = _said(o.output_padding, 0)
        result = w("convolution_transposed", o.input, o.weight, shape=shape, **given)
    else:
        given["padding"] = tuple((p, p) for p in pads) if any(pads) else None
        result = w("convolution", o.input, o.weight, shape=shape, **given)
    if o.bias is None:
        return result
    return w.add(result, w.reshape(o.bias, (o.bias.size, *(1,) * (len(shape) - 2))))


def _each(value: Any, count: int) -> tuple[int, ...]:
    """One number for each spatial axis."""
    result = (value,) if isinstance(value, int) else tuple(value)
    return result * count if len(result) == 1 else result


def _said(values: Any, default: int) -> tuple[int, ...] | None:
    """None where all are what they are by default."""
    return tuple(values) if any(v != default for v in values) else None


def _window(o: Any, count: int) -> dict[str, Any]:
    size = _each(o.kernel_size, count)
    stride = _each(o.stride, count) if o.stride else size
    pads = _each(o.padding, count)
    padding = tuple((p, p) for p in pads) if any(pads) else None
    return {"window": size, "stride": stride, "padding": padding}


def _max_pool(count: int) -> Translation:
    def translated(w: Writer, o: Any) -> Any:
        x, shape = o.self, o.likes[0][0]
        given = _window(o, count)
        dilation = _each(o.dilation, count)
        given["dilation"] = _said(dilation, 1)
        if o.ceil_mode:
            given["padding"] = _to_the_end(x.shape[-count:], shape[-count:], given, dilation)
        result = w("max_pool", x, shape=shape, **given)
        return [result, *_noted(w, o, 1)]

    return translated


def _to_the_end(sizes: Any, wanted: Any, given: Any, dilation: Any) -> tuple[Any, ...]:
    """Padding behind, so that the last window fits."""
    before = given["padding"] or ((0, 0),) * len(sizes)
    every = zip(sizes, wanted, given["window"], given["stride"], before, dilation, strict=True)
    return tuple(
        (low, max(high, (m - 1) * s + d * (k - 1) + 1 - n - low))
        for n, m, k, s, (low, high), d in every
    )


def _avg_pool(count: int) -> Translation:
    def translated(w: Writer, o: Any) -> Ref | None:
        if o.ceil_mode:
            return None
        given = _window(o, count)
        divisor = getattr(o, "divisor_override", None)
        if divisor:
            result = w("sum_pool", o.self, shape=o.likes[0][0], **given)
            return w.div(result, float(divisor))
        given["count_padding"] = None if o.count_include_pad else False
        return w("avg_pool", o.self, shape=o.likes[0][0], **given)

    return translated


LAYERS |= {f"max_pool{n}d_with_indices": _max_pool(n) for n in (1, 2, 3)}
LAYERS |= {f"avg_pool{n}d": _avg_pool(n) for n in (1, 2, 3)}


def _adaptive(word: str, count: int) -> Translation:
    """Windows of equal size, where the sizes divide; else it is taken apart."""

    def translated(w: Writer, o: Any) -> Any:
        shape = o.likes[0][0]
        sizes = list(zip(o.self.shape[-count:], shape[-count:], strict=True))
        if any(n % m for n, m in sizes):
            return None
        window = tuple(n // m for n, m in sizes)
        if all(m == 1 for _, m in sizes) and word == "avg_pool":
            return w.mean(o.self, list(range(o.self.ndim - count, o.self.ndim)), True)
        result = w(word, o.self, shape=shape, window=window)
        return result if len(o.outs) == 1 else [result, *_noted(w, o, 1)]

    return translated


LAYERS |= {f"_adaptive_avg_pool{n}d": _adaptive("avg_pool", n) for n in (2, 3)}
LAYERS |= {f"adaptive_max_pool{n}d": _adaptive("max_pool", n) for n in (2, 3)}


# --- normalisation -----------------------------------------------------------------------


@operation("native_layer_norm")
def _layer_norm(w: Writer, o: Any) -> Any:
    axes = tuple(range(o.input.ndim - len(o.normalized_shape), o.input.ndim))
    given = _affine(w, o, o.normalized_shape)
    result = w("layer_norm", o.input, *given, shape=o.input.shape, axes=axes, eps=o.eps)
    return [result, *_statistics(w, o.input, axes, o.eps, o.likes)]


def _statistics(w: Writer, x: Ref, axes: Any, eps: float, likes: Any) -> list[Ref]:
    """The mean and 1 / sqrt(variance + eps), which a backward pass inside of f reads."""
    width = w("rsqrt", w.add(w.reduce("variance", x, axes, True), eps))
    both = w.mean(x, axes, True), width
    return [w.reshape(y, shape) for y, (shape, _) in zip(both, likes[1:], strict=True)]


def _affine(w: Writer, o: Any, shape: Sequence[int]) -> list[Ref]:
    """Scale and shift; a shift alone has a scale of one."""
    if o.weight is None and o.bias is None:
        return []
    scale = w.constant(np.ones(tuple(shape))) if o.weight is None else o.weight
    return [scale] if o.bias is None else [scale, o.bias]


@operation("native_group_norm")
def _group_norm(w: Writer, o: Any) -> Any:
    given = _affine(w, o, [o.input.shape[1]])
    result = w("group_norm", o.input, *given, shape=o.input.shape, groups=o.group, eps=o.eps)
    lead = o.input.shape[0], o.group
    parts = w.reshape(o.input, (*lead, o.input.size // max(1, lead[0] * lead[1])))
    return [result, *_statistics(w, parts, [2], o.eps, o.likes)]


@operation("native_batch_norm", "_native_batch_norm_legit", "cudnn_batch_norm")
@operation("_batch_norm_with_update", "_native_batch_norm_legit_no_training")
def _batch_norm(w: Writer, o: Any) -> Any:
    training = getattr(o, "training", None)
    training = w.native == "aten._batch_norm_with_update" if training is None else bool(training)
    given = _affine(w, o, [o.input.shape[1]])
    if not training:
        given += [o.running_mean, o.running_var]
    eps = float(getattr(o, "eps", getattr(o, "epsilon", 0.0)))
    result = w("batch_norm", o.input, *given, shape=o.input.shape, training=training, eps=eps)
    if not training or len(o.outs) < 3:
        return [result, *[None] * (len(o.outs) - 1)]
    others = [a for a in range(o.input.ndim) if a != 1]
    more = _statistics(w, o.input, others, eps, o.likes[:3])
    return [result, *more, *[None] * (len(o.outs) - 3)]


@operation("_fused_rms_norm")
def _rms_norm(w: Writer, o: Any) -> Any:
    axes = tuple(range(o.input.ndim - len(o.normalized_shape), o.input.ndim))
    given = [] if o.weight is None else [o.weight]
    result = w("rms_norm", o.input, *given, shape=o.input.shape, axes=axes, eps=o.eps)
    squares = w.mean(w("square", o.input), axes, True)
    return [result, w("rsqrt", w.add(squares, o.eps))]


# --- softmax, losses, attention ----------------------------------------------------------


@operation("_safe_softmax")
def _safe_softmax(w: Writer, o: Any) -> Ref:
    """Zero where all is masked."""
    axis = o.dim % max(1, o.self.ndim)
    masked = w.compare(w.reduce("max", o.self, [axis], True), "==", -np.inf)
    masked = w.broadcast(masked, o.self.shape)
    result = w("softmax", w.where(masked, 0.0, o.self), axis=axis)
    return w.where(masked, 0.0, result)


@operation("_softmax_backward_data")
def _softmax_backward(w: Writer, o: Any) -> Ref:
    weighed = w.mul(o.grad_output, o.output)
    return w.sub(weighed, w.mul(o.output, w.total(weighed, [o.dim], True)))


@operation("_log_softmax_backward_data")
def _log_softmax_backward(w: Writer, o: Any) -> Ref:
    summed = w.total(o.grad_output, [o.dim], True)
    return w.sub(o.grad_output, w.mul(w("exp", o.output), summed))


def _reduced(w: Writer, losses: Ref, reduction: int) -> Ref:
    """By aten's number: 0 none, 1 mean, 2 sum."""
    return (losses, w.mean(losses), w.total(losses))[reduction] if reduction else losses


@operation("mse_loss")
def _mse(w: Writer, o: Any) -> Ref:
    return _reduced(w, w("square", w.sub(o.self, o.target)), o.reduction)


@operation("binary_cross_entropy")
def _bce(w: Writer, o: Any) -> Ref:
    p, t = o.self, o.target
    floor = lambda x: w("maximum", w("log", x), w.constant(-100.0))
    gain = w.add(w.mul(t, floor(p)), w.mul(w.sub(1.0, t), floor(w.sub(1.0, p))))
    losses = w("negate", gain)
    return _reduced(w, losses if o.weight is None else w.mul(losses, o.weight), o.reduction)


@operation("nll_loss_forward", "nll_loss2d_forward")
def _nll(w: Writer, o: Any) -> Any:
    """-x[t] of each row; the class axis follows that of the batch."""
    axis = 0 if o.self.ndim == 1 else 1
    target = o.recorder.value_of(o.target)
    kept = target != o.ignore_index
    safe = w.constant(np.where(kept, target, 0))
    at = w.reshape(safe, (*o.target.shape[:axis], 1, *o.target.shape[axis:]))
    taken = w("take_along", o.self, at, shape=at.shape, dtype=o.self.dtype, axis=axis)
    losses = w("negate", w.reshape(taken, o.target.shape))
    weights = None if o.weight is None else w.take(o.weight, safe, axes=(0,))
    if not kept.all():
        there = w.constant(kept.astype(float))
        weights = there if weights is None else w.mul(weights, there)
    if weights is None:
        return [_reduced(w, losses, o.reduction), o.recorder.constant(o.outs[1])]
    losses = w.mul(losses, weights)
    if o.reduction == 1:
        return [w.div(w.total(losses), w.total(weights)), None]
    return [_reduced(w, losses, o.reduction), None]


@operation("_scaled_dot_product_flash_attention_for_cpu")
@operation("_scaled_dot_product_efficient_attention", "_scaled_dot_product_flash_attention")
def _attention(w: Writer, o: Any) -> Any:
    if o.dropout_p:
        return None
    mask = getattr(o, "attn_mask", getattr(o, "attn_bias", None))
    given = [o.query, o.key, o.value, *([] if mask is None else [mask])]
    said = {"causal": True if o.is_causal else None, "scale": o.scale}
    result = w("attention", *given, shape=o.likes[0][0], dtype=o.likes[0][1], **said)
    return [result, *[None] * (len(o.outs) - 1)]
