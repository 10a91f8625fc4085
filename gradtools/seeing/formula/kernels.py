"""NumPy's value of each operation on whole arrays: plain loops over windows, in float64.

Every kernel gets the expression, for its attributes, and the values of its arguments.
"""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np


def einsum(y: Any, *arrays: np.ndarray) -> np.ndarray:
    """Coefficient times factors, summed and broadcast."""
    coefficient = y["coefficient"]
    labels = y["labels"]
    if not arrays:
        return np.full(y.shape, coefficient)
    kept = tuple(l for l in range(len(y.shape)) if any(l in names for names in labels))
    operands: list[Any] = []
    for a, names in zip(arrays, labels, strict=True):
        operands += [a + 0.0 if a.dtype.kind in "bui" else a, list(names)]
    if len(arrays) > 1 and not any(l >= len(y.shape) for names in labels for l in names):
        value = _aligned_product(arrays, labels, kept)
    else:
        value = np.einsum(*operands, list(kept), optimize=len(arrays) > 2)
    place = tuple(slice(None) if l in kept else None for l in range(len(y.shape)))
    return np.broadcast_to(np.asarray(coefficient * value)[place], y.shape)


def _aligned_product(arrays, labels, kept):
    """Products without sums keep NumPy's own rules for infinities, and its speed."""
    result: Any = 1.0
    for a, names in zip(arrays, labels, strict=True):
        result = (
            result
            * np.einsum(a + 0.0, list(names), _present(names, kept))[
                tuple(slice(None) if l in names else None for l in kept)
            ]
        )
    return result


def _present(names, kept):
    return [l for l in kept if l in names]


def iota(y):
    """Counting along an axis."""
    shape = [1] * len(y.shape)
    shape[y["axis"]] = y.shape[y["axis"]]
    return np.broadcast_to(np.arange(y.shape[y["axis"]]).reshape(shape), y.shape)


def one_hot(y, i):
    """A last axis with 1 at i."""
    i = np.asarray(i)
    if y.get("from_the_end"):
        return np.eye(y["size"])[i.astype(np.int64)]
    return (i[..., None] == np.arange(y["size"])) * 1.0


def cut(y, x):
    """A slice."""
    slices = zip(y["start"], y["limit"], y["stride"], strict=True)
    return x[tuple(slice(a, b, s) for a, b, s in slices)]


def pad(y, x):
    """Zeros around and between."""
    out = np.zeros(y.shape, x.dtype)
    place = tuple(
        slice(a, a + n + max(n - 1, 0) * i, i + 1)
        for a, n, i in zip(y["low"], x.shape, y["interior"], strict=True)
    )
    out[place] = x
    return out


def _places(rank, axes, indices):
    """The index that has the integer arrays at axes; the axes that are left come last."""
    order = [*axes, *(a for a in range(rank) if a not in axes)]
    return order, tuple(np.asarray(i).astype(np.int64, copy=False) for i in indices)


def index(y, x, *indices):
    """X at integer arrays."""
    order, at = _places(x.ndim, y["axes"], indices)
    return np.transpose(x, order)[at]


def index_add(y, u, *indices):
    """Zeros with u added."""
    order, at = _places(len(y.shape), y["axes"], indices)
    out = np.zeros(y.shape, u.dtype)
    np.add.at(np.transpose(out, order), at, u)
    return out


def index_set(y, x, u, *indices):
    """X with u put in."""
    order, at = _places(x.ndim, y["axes"], indices)
    out = np.array(x, np.result_type(x, u))
    np.transpose(out, order)[at] = u
    return out


def put_along(y, u, i):
    """Zeros with u added along an axis."""
    out = np.zeros(y.shape, u.dtype)
    at = list(np.indices(i.shape, sparse=True))
    at[y["axis"]] = np.asarray(i).astype(np.int64, copy=False)
    np.add.at(out, tuple(at), np.broadcast_to(u, i.shape))
    return out


def along_set(y, x, i, u):
    """X with u put in along an axis."""
    out = np.array(x, np.result_type(x, u))
    np.put_along_axis(out, np.asarray(i).astype(np.int64, copy=False), u, y["axis"])
    return out


def _window(starts, sizes, shape):
    """JAX's and XLA's rule: a window is moved inside."""
    begins = [min(max(int(s), 0), n - k) for s, k, n in zip(starts, sizes, shape, strict=True)]
    return tuple(slice(b, b + k) for b, k in zip(begins, sizes, strict=True))


def dynamic_slice(y, x, *starts):
    """A window."""
    return x[_window(starts, y.shape, x.shape)]


def dynamic_pad(y, u, *starts):
    """Zeros with a window."""
    out = np.zeros(y.shape, u.dtype)
    out[_window(starts, u.shape, y.shape)] = u
    return out


def dynamic_update(y, x, u, *starts):
    """X with a window."""
    out = np.array(x, np.result_type(x, u))
    out[_window(starts, u.shape, x.shape)] = u
    return out


def argsort(y, x):
    """The stable order."""
    if y["descending"]:
        x = np.negative(x)
    return np.argsort(x, y["axis"], kind="stable")


def _along(axis, reverse, run, x):
    flipped = np.flip(x, axis) if reverse else x
    result = run(flipped)
    return np.flip(result, axis) if reverse else result


def cumargmax(y, x):
    """Where the running maximum stands."""
    axis, n = y["axis"], x.shape[y["axis"]]
    x = np.moveaxis(x, axis, 0)
    steps = range(n - 1, -1, -1) if y["reverse"] else range(n)
    out = np.zeros(x.shape, np.int64)
    best, at = None, None
    for t in steps:
        if best is None:
            best, at = x[t].copy(), np.full(x[t].shape, t)
        else:
            better = x[t] >= best
            best, at = np.where(better, x[t], best), np.where(better, t, at)
        out[t] = at
    return np.moveaxis(out, 0, axis)


def cumsum(y, x):
    """Running sum."""
    return _along(y["axis"], y["reverse"], lambda v: np.cumsum(v, y["axis"]), x)


def cumprod(y, x):
    """Running product."""
    return _along(y["axis"], y["reverse"], lambda v: np.cumprod(v, y["axis"]), x)


def logcumsumexp(y, x):
    """Running logsumexp."""
    run = lambda v: np.logaddexp.accumulate(v, y["axis"])
    return _along(y["axis"], y["reverse"], run, x)


def logsumexp(y, x):
    """Log of the sum of exponentials."""
    axes = y["axes"]
    top = np.max(x.real, axes, keepdims=True)
    top = np.where(np.isfinite(top), top, 0)
    return np.log(np.exp(x - top).sum(axes)) + top.reshape(y.shape)


def softmax(x, axis):
    """Exponentials over their sum."""
    top = np.max(x.real, axis, keepdims=True)
    e = np.exp(x - np.where(np.isfinite(top), top, 0))
    return e / e.sum(axis, keepdims=True)


def log_softmax(y, x):
    """The logarithm of softmax."""
    axis = y["axis"]
    x = x - np.max(x.real, axis, keepdims=True)
    return x - np.log(np.exp(x).sum(axis, keepdims=True))


def standardize(y, x):
    """Mean 0 and variance 1."""
    axes = y["axes"]
    return (x - x.mean(axes, keepdims=True)) / np.sqrt(x.var(axes, keepdims=True) + y["eps"])


def deviation(y, x):
    """The square root of variance plus eps."""
    return np.sqrt(np.var(x, y["axes"], ddof=y["correction"]) + y["eps"])


def hermitian(a):
    """(a + a^H) / 2."""
    return (a + np.conj(np.swapaxes(a, -1, -2))) / 2


def cholesky(y, a):
    """The lower factor."""
    return np.linalg.cholesky(hermitian(a))


def pseudoinverse(a):
    """The Moore-Penrose inverse; singular values at rounding are zero, as in the frameworks."""
    return np.linalg.pinv(a, rcond=max(a.shape[-2:]) * np.finfo(a.dtype).eps)


def half(y, x):
    """The lower triangle with half of the diagonal."""
    return np.tril(x) - x * np.eye(x.shape[-1]) / 2


def gaps(y, x, w):
    """Off the diagonal x_ij / (w_j - w_i)."""
    eye = np.eye(w.shape[-1])
    distance = w[..., None, :] - w[..., :, None]
    return x * (1 - eye) / (distance + eye)


def expm(a):
    """The matrix exponential: a Taylor series of the scaled matrix, squared back."""
    size = np.abs(a).sum(-1).max() if a.size else 0.0
    halvings = max(0, int(np.ceil(np.log2(size))) + 3) if size > 0 else 0
    small = a / 2**halvings
    term = np.broadcast_to(np.eye(a.shape[-1]), a.shape).astype(a.dtype)
    result = term.copy()
    for k in range(1, 20):
        term = term @ small / k
        result = result + term
    for _ in range(halvings):
        result = result @ result
    return result


def fourier(y, x):
    """The sum of x e**(sign 2 pi i jk/n)."""
    axes = y["axes"]
    if y["sign"] < 0:
        return np.fft.fftn(x, axes=axes)
    return np.fft.ifftn(x, axes=axes, norm="forward")


# Convolution: one tap of the weight at a time.


def _taps(y, w_space, out_space):
    """For each tap: the window of the padded input that meets the output."""
    stride, dilation = y["stride"], y["dilation"]
    for tap in itertools.product(*map(range, w_space)):
        yield (
            tap,
            tuple(
                slice(t * d, t * d + (n - 1) * s + 1, s)
                for t, d, s, n in zip(tap, dilation, stride, out_space, strict=True)
            ),
        )


def _padded(y, x):
    return np.pad(x, [(0, 0), (0, 0), *y["padding"]])


def _grouped(y, x, axis=1):
    """The channel axis as groups and channels of a group."""
    groups = y["groups"]
    return x.reshape(*x.shape[:axis], groups, x.shape[axis] // groups, *x.shape[axis + 1 :])


def convolution(y, x, w):
    """Sum over taps."""
    space = y.shape[2:]
    xs, ws = _grouped(y, _padded(y, x)), _grouped(y, w, 0)
    groups = y["groups"]
    out = np.zeros((x.shape[0], groups, w.shape[0] // groups, *space), np.result_type(x, w))
    for tap, window in _taps(y, w.shape[2:], space):
        part = xs[(slice(None),) * 3 + window]
        out += np.einsum("ngc...,goc->ngo...", part, ws[(slice(None),) * 3 + tap])
    return out.reshape(y.shape)


def convolution_input(y, g, w):
    """Every tap sends the cotangent back to where it read."""
    groups = y["groups"]
    padded = [n + a + b for n, (a, b) in zip(y.shape[2:], y["padding"], strict=True)]
    out = np.zeros((y.shape[0], groups, y.shape[1] // groups, *padded), np.result_type(g, w))
    gs, ws = _grouped(y, g), _grouped(y, w, 0)
    for tap, window in _taps(y, w.shape[2:], g.shape[2:]):
        out[(slice(None),) * 3 + window] += np.einsum(
            "ngo...,goc->ngc...", gs, ws[(slice(None),) * 3 + tap]
        )
    inner = tuple(slice(a, a + n) for n, (a, _) in zip(y.shape[2:], y["padding"], strict=True))
    return out.reshape(y.shape[0], y.shape[1], *padded)[(slice(None),) * 2 + inner]


def convolution_weight(y, x, g):
    """Every tap meets the cotangent with what it read."""
    groups = y["groups"]
    shape = (groups, y.shape[0] // groups, *y.shape[1:])
    out = np.zeros(shape, np.result_type(x, g))
    xs, gs = _grouped(y, _padded(y, x)), _grouped(y, g)
    for tap, window in _taps(y, y.shape[2:], g.shape[2:]):
        part = xs[(slice(None),) * 3 + window]
        flat = (*part.shape[:3], -1)
        out[(slice(None),) * 3 + tap] = np.einsum(
            "ngcs,ngos->goc", part.reshape(flat), gs.reshape(*gs.shape[:3], -1)
        )
    return out.reshape(y.shape)


# Pooling over the last axes.


def _pool_windows(y, x, fill, space):
    """The values that meet each place of the output: one array for each tap, stacked."""
    window, lead = y["window"], x.ndim - len(y["window"])
    padded = np.pad(x, [(0, 0)] * lead + list(y["padding"]), constant_values=fill)
    return [(at, padded[(slice(None),) * lead + at]) for _, at in _taps(y, window, space)]


def _unpad(y, out, lead, shape):
    inner = tuple(slice(a, a + n) for n, (a, _) in zip(shape[lead:], y["padding"], strict=True))
    return out[(slice(None),) * lead + inner]


def _pool_space(y, shape):
    return shape[len(shape) - len(y["window"]) :]


def _arg_of_windows(y, x, space):
    parts = _pool_windows(y, x, -np.inf, space)
    return np.argmax(np.stack([p for _, p in parts]), 0), [at for at, _ in parts]


def max_pool(y, x):
    """The greatest of each window."""
    parts = _pool_windows(y, x, -np.inf, _pool_space(y, y.shape))
    return np.max(np.stack([p for _, p in parts]), 0)


def max_pick(y, u, x):
    """U where x is greatest in each window."""
    space = _pool_space(y, y.shape)
    best, _ = _arg_of_windows(y, x, space)
    parts = np.stack([p for _, p in _pool_windows(y, u, 0, space)])
    return np.take_along_axis(parts, best[None], 0)[0]


def _scatter_windows(y, shape, places, values, dtype):
    lead = len(shape) - len(y["window"])
    padded = [n + a + b for n, (a, b) in zip(shape[lead:], y["padding"], strict=True)]
    out = np.zeros((*shape[:lead], *padded), dtype)
    for at, value in zip(places, values, strict=True):
        out[(slice(None),) * lead + at] += value
    return _unpad(y, out, lead, shape)


def max_unpool(y, g, x):
    """G added where x is greatest in each window."""
    best, places = _arg_of_windows(y, x, _pool_space(y, g.shape))
    values = [np.where(best == k, g, 0) for k in range(len(places))]
    return _scatter_windows(y, y.shape, places, values, g.dtype)


def sum_pool(y, x):
    """The sum of each window."""
    return sum(p for _, p in _pool_windows(y, x, 0, _pool_space(y, y.shape)))


def sum_unpool(y, g):
    """G added all over each window."""
    space = _pool_space(y, g.shape)
    places = [at for _, at in _taps(y, y["window"], space)]
    return _scatter_windows(y, y.shape, places, [g] * len(places), g.dtype)


def svd(a):
    """The thin factors u, s and v, so that a = u diag(s) v^H."""
    u, s, vh = np.linalg.svd(a, full_matrices=False)
    return u, s, vh.conj().swapaxes(-1, -2)
