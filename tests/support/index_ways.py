"""Ways to read and to write at indices, each as one program in PyTorch's words and one in JAX's.

Each is a function of (framework, x, w, T, i, j, k): floating arrays of shapes (3, 4), (4, 4) and
(3, 4, 5), integer vectors of four entries below 3 and below 4, and an integer matrix of shape
(2, 4) with entries below 3. In JAX the framework is `jax` itself.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

Program = Callable[..., Any]


def equal() -> dict[str, tuple[Program, Program]]:
    """Those that compute the same in both frameworks."""
    return {**_read(), **_written(), **_made_of_places()}


def _read() -> dict[str, tuple[Program, Program]]:
    return {
        "rows": (lambda t, x, w, T, i, j, k: x[i], lambda p, x, w, T, i, j, k: x[i]),
        "columns": (lambda t, x, w, T, i, j, k: x[:, j], lambda p, x, w, T, i, j, k: x[:, j]),
        "entries": (lambda t, x, w, T, i, j, k: x[i, j], lambda p, x, w, T, i, j, k: x[i, j]),
        "rows by a matrix": (lambda t, x, w, T, i, j, k: x[k], lambda p, x, w, T, i, j, k: x[k]),
        "embedding": (
            lambda t, x, w, T, i, j, k: t.nn.functional.embedding(i, x),
            lambda p, x, w, T, i, j, k: p.numpy.take(x, i, axis=0),
        ),
        "embedding of a matrix": (
            lambda t, x, w, T, i, j, k: t.nn.functional.embedding(k, x),
            lambda p, x, w, T, i, j, k: x[k],
        ),
        "index_select": (
            lambda t, x, w, T, i, j, k: t.index_select(x, 1, j),
            lambda p, x, w, T, i, j, k: p.numpy.take(x, j, axis=1),
        ),
        "of all entries": (
            lambda t, x, w, T, i, j, k: t.take(x, i),
            lambda p, x, w, T, i, j, k: p.numpy.take(x, i),
        ),
        "of a flat array": (
            lambda t, x, w, T, i, j, k: x.reshape(-1)[i],
            lambda p, x, w, T, i, j, k: x.ravel()[i],
        ),
        "gather along 0": (
            lambda t, x, w, T, i, j, k: t.gather(x, 0, k),
            lambda p, x, w, T, i, j, k: p.numpy.take_along_axis(x, k, axis=0),
        ),
        "gather along 1": (
            lambda t, x, w, T, i, j, k: t.gather(w, 1, k),
            lambda p, x, w, T, i, j, k: p.numpy.take_along_axis(w[:2], k, axis=1),
        ),
        "modulo": (
            lambda t, x, w, T, i, j, k: t.take_along_dim(x, i[:3, None], 1),
            lambda p, x, w, T, i, j, k: p.numpy.take_along_axis(x, i[:3, None] % 4, axis=1),
        ),
        "likelihood": (
            lambda t, x, w, T, i, j, k: -t.log_softmax(x, 1)[t.arange(3), i[:3]].mean(),
            lambda p, x, w, T, i, j, k: (
                -p.nn.log_softmax(x, axis=1)[p.numpy.arange(3), i[:3]].mean()
            ),
        ),
        "cross-entropy": (
            lambda t, x, w, T, i, j, k: t.nn.functional.cross_entropy(x, i[:3]),
            lambda p, x, w, T, i, j, k: (
                -p.numpy.take_along_axis(p.nn.log_softmax(x), i[:3, None], axis=-1).mean()
            ),
        ),
        "in the middle": (lambda t, x, w, T, i, j, k: T[:, j], lambda p, x, w, T, i, j, k: T[:, j]),
        "last": (lambda t, x, w, T, i, j, k: T[..., j], lambda p, x, w, T, i, j, k: T[..., j]),
        "last by a matrix": (
            lambda t, x, w, T, i, j, k: T[:, :, k],
            lambda p, x, w, T, i, j, k: T[:, :, k],
        ),
        "apart": (lambda t, x, w, T, i, j, k: T[i, :, j], lambda p, x, w, T, i, j, k: T[i, :, j]),
        "adjacent": (
            lambda t, x, w, T, i, j, k: T[:, i, j],
            lambda p, x, w, T, i, j, k: T[:, i, j],
        ),
        "outer": (
            lambda t, x, w, T, i, j, k: x[i[:, None], j[None, :]],
            lambda p, x, w, T, i, j, k: x[i[:, None], j[None, :]],
        ),
        "beside a slice": (
            lambda t, x, w, T, i, j, k: T[i, 1:3],
            lambda p, x, w, T, i, j, k: T[i, 1:3],
        ),
        "beside a number": (
            lambda t, x, w, T, i, j, k: T[i, 2],
            lambda p, x, w, T, i, j, k: T[i, 2],
        ),
        "beside a new axis": (
            lambda t, x, w, T, i, j, k: x[i, None],
            lambda p, x, w, T, i, j, k: x[i, None],
        ),
        "known rows": (
            lambda t, x, w, T, i, j, k: x[t.tensor([0, 2, 1])],
            lambda p, x, w, T, i, j, k: x[p.numpy.array([0, 2, 1])],
        ),
        "listed rows": (
            lambda t, x, w, T, i, j, k: x[[0, 2]],
            lambda p, x, w, T, i, j, k: x[p.numpy.array([0, 2])],
        ),
        "from the end": (
            lambda t, x, w, T, i, j, k: x[t.tensor([-1, 0])],
            lambda p, x, w, T, i, j, k: x[p.numpy.array([-1, 0])],
        ),
        "known columns": (
            lambda t, x, w, T, i, j, k: x[:, t.tensor([3, 0])],
            lambda p, x, w, T, i, j, k: x[:, p.numpy.array([3, 0])],
        ),
        "rows of a known matrix": (
            lambda t, x, w, T, i, j, k: x[t.tensor([[0, 1], [2, 0]])],
            lambda p, x, w, T, i, j, k: x[p.numpy.array([[0, 1], [2, 0]])],
        ),
        "of the greatest": (
            lambda t, x, w, T, i, j, k: x[t.arange(3), x.argmax(1)],
            lambda p, x, w, T, i, j, k: x[p.numpy.arange(3), x.argmax(1)],
        ),
        "in order": (
            lambda t, x, w, T, i, j, k: t.gather(w, 1, t.argsort(w, 1)),
            lambda p, x, w, T, i, j, k: p.numpy.take_along_axis(
                w, p.numpy.argsort(w, axis=1), axis=1
            ),
        ),
        "greatest two": (
            lambda t, x, w, T, i, j, k: t.topk(x, 2, 1)[0],
            lambda p, x, w, T, i, j, k: p.lax.top_k(x, 2)[0],
        ),
        "inside a network": (
            lambda t, x, w, T, i, j, k: t.relu(x[i] @ w).sum(),
            lambda p, x, w, T, i, j, k: p.nn.relu(x[i] @ w).sum(),
        ),
        "places and words": (
            lambda t, x, w, T, i, j, k: x[i] + w[t.arange(4)],
            lambda p, x, w, T, i, j, k: x[i] + w[p.numpy.arange(4)],
        ),
        "of each": (
            lambda t, x, w, T, i, j, k: t.vmap(lambda a, b: a[b])(x.T[:3], i[:3, None]),
            lambda p, x, w, T, i, j, k: p.vmap(lambda a, b: a[b])(x.T[:3], i[:3, None]),
        ),
        "for each": (
            lambda t, x, w, T, i, j, k: t.vmap(lambda b: x[b])(k),
            lambda p, x, w, T, i, j, k: p.vmap(lambda b: x[b])(k),
        ),
        "computed indices": (
            lambda t, x, w, T, i, j, k: x[i[:, None] * 0 + k.T],
            lambda p, x, w, T, i, j, k: x[i[:, None] * 0 + k.T],
        ),
        "the next": (lambda t, x, w, T, i, j, k: w[i + 1], lambda p, x, w, T, i, j, k: w[i + 1]),
        "the rest": (lambda t, x, w, T, i, j, k: x[j % 3], lambda p, x, w, T, i, j, k: x[j % 3]),
        "the last": (lambda t, x, w, T, i, j, k: x[-1], lambda p, x, w, T, i, j, k: x[-1]),
        "the last column": (
            lambda t, x, w, T, i, j, k: x[..., -1],
            lambda p, x, w, T, i, j, k: x[..., -1],
        ),
        "every second": (
            lambda t, x, w, T, i, j, k: x[:, 1::2],
            lambda p, x, w, T, i, j, k: x[:, 1::2],
        ),
        "transposed": (
            lambda t, x, w, T, i, j, k: x.T[j].T,
            lambda p, x, w, T, i, j, k: x[:, j],
        ),
    }


def _written() -> dict[str, tuple[Program, Program]]:
    return {
        "set rows": (
            lambda t, x, w, T, i, j, k: w.index_put((j,), w * 2),
            lambda p, x, w, T, i, j, k: w.at[j].set(w * 2),
        ),
        "add to rows": (
            lambda t, x, w, T, i, j, k: w.index_put((j,), w * 2, accumulate=True),
            lambda p, x, w, T, i, j, k: w.at[j].add(w * 2),
        ),
        "set entries": (
            lambda t, x, w, T, i, j, k: w.index_put((i, j), x[0]),
            lambda p, x, w, T, i, j, k: w.at[i, j].set(x[0]),
        ),
        "add to entries": (
            lambda t, x, w, T, i, j, k: w.index_put((i, j), x[0], accumulate=True),
            lambda p, x, w, T, i, j, k: w.at[i, j].add(x[0]),
        ),
        "index_add": (
            lambda t, x, w, T, i, j, k: t.index_add(x, 0, i, w),
            lambda p, x, w, T, i, j, k: x.at[i].add(w),
        ),
        "index_add to columns": (
            lambda t, x, w, T, i, j, k: t.index_add(x, 1, i, w[:3]),
            lambda p, x, w, T, i, j, k: x.at[:, i].add(w[:3]),
        ),
        "index_copy": (
            lambda t, x, w, T, i, j, k: t.index_copy(w, 0, j, w * 2),
            lambda p, x, w, T, i, j, k: w.at[j].set(w * 2),
        ),
        "set to a number": (
            lambda t, x, w, T, i, j, k: w.index_put((j,), t.tensor(0.0)),
            lambda p, x, w, T, i, j, k: w.at[j].set(0.0),
        ),
        "in place": (
            lambda t, x, w, T, i, j, k: _set(w, j, w * 2),
            lambda p, x, w, T, i, j, k: w.at[j].set(w * 2),
        ),
        "set a row": (
            lambda t, x, w, T, i, j, k: _set(x, 1, w[0]),
            lambda p, x, w, T, i, j, k: x.at[1].set(w[0]),
        ),
        "set columns": (
            lambda t, x, w, T, i, j, k: _set(x, (slice(None), slice(1, 3)), w[:3, :2]),
            lambda p, x, w, T, i, j, k: x.at[:, 1:3].set(w[:3, :2]),
        ),
        "set every second": (
            lambda t, x, w, T, i, j, k: _set(x, (slice(None), slice(None, None, 2)), w[:3, :2]),
            lambda p, x, w, T, i, j, k: x.at[:, ::2].set(w[:3, :2]),
        ),
        "double some rows": (
            lambda t, x, w, T, i, j, k: _set(w, slice(1, 3), w[1:3] * 2.0),
            lambda p, x, w, T, i, j, k: w.at[1:3].multiply(2.0),
        ),
        "double in place": (
            lambda t, x, w, T, i, j, k: _doubled(w, 1, 3),
            lambda p, x, w, T, i, j, k: w.at[1:3].multiply(2.0),
        ),
        "add to an entry": (
            lambda t, x, w, T, i, j, k: _set(x, (1, 2), x[1, 2] + w[0, 0]),
            lambda p, x, w, T, i, j, k: x.at[1, 2].add(w[0, 0]),
        ),
        "a slice": (
            lambda t, x, w, T, i, j, k: t.slice_scatter(x, w[:2], 0, 1, 3),
            lambda p, x, w, T, i, j, k: p.lax.dynamic_update_slice(x, w[:2], (1, 0)),
        ),
        "a selected row": (
            lambda t, x, w, T, i, j, k: t.select_scatter(x, w[0], 0, 2),
            lambda p, x, w, T, i, j, k: x.at[2].set(w[0]),
        ),
        "segments": (
            lambda t, x, w, T, i, j, k: t.zeros(5, 4).index_add(0, i, w),
            lambda p, x, w, T, i, j, k: p.ops.segment_sum(w, i, num_segments=5),
        ),
        "scatter_add": (
            lambda t, x, w, T, i, j, k: t.zeros(3, 4).scatter_add(0, k, w[:2]),
            lambda p, x, w, T, i, j, k: (
                p.numpy.zeros((3, 4), x.dtype).at[k, p.numpy.arange(4)[None]].add(w[:2])
            ),
        ),
        "greatest of each place": (
            lambda t, x, w, T, i, j, k: t.scatter_reduce(x, 0, k, w[:2], "amax"),
            lambda p, x, w, T, i, j, k: x.at[k, p.numpy.arange(4)[None]].max(w[:2]),
        ),
        "one-hot": (
            lambda t, x, w, T, i, j, k: t.nn.functional.one_hot(i, 3).to(x.dtype) @ x,
            lambda p, x, w, T, i, j, k: p.nn.one_hot(i, 3, dtype=x.dtype) @ x,
        ),
    }


def _made_of_places() -> dict[str, tuple[Program, Program]]:
    return {
        "masked": (
            lambda t, x, w, T, i, j, k: t.where((i == 1)[:, None], w, 0.0),
            lambda p, x, w, T, i, j, k: p.numpy.where((i == 1)[:, None], w, 0.0),
        ),
        "causal": (
            lambda t, x, w, T, i, j, k: t.softmax(
                w.masked_fill(t.ones(4, 4).triu(1).bool(), -1e9), -1
            ),
            lambda p, x, w, T, i, j, k: p.nn.softmax(
                p.numpy.where(p.numpy.triu(p.numpy.ones((4, 4)), 1).astype(bool), -1e9, w), -1
            ),
        ),
        "diagonal matrix": (
            lambda t, x, w, T, i, j, k: t.diag(w[0]),
            lambda p, x, w, T, i, j, k: p.numpy.diag(w[0]),
        ),
        "trace": (
            lambda t, x, w, T, i, j, k: t.trace(w),
            lambda p, x, w, T, i, j, k: p.numpy.trace(w),
        ),
        "flipped": (
            lambda t, x, w, T, i, j, k: t.flip(w, (0,)),
            lambda p, x, w, T, i, j, k: w[::-1],
        ),
        "rolled": (
            lambda t, x, w, T, i, j, k: t.roll(w, 1, 0),
            lambda p, x, w, T, i, j, k: p.numpy.roll(w, 1, 0),
        ),
        "lower": (
            lambda t, x, w, T, i, j, k: t.tril(w),
            lambda p, x, w, T, i, j, k: p.numpy.tril(w),
        ),
        "strictly lower": (
            lambda t, x, w, T, i, j, k: t.tril(w, -1),
            lambda p, x, w, T, i, j, k: p.numpy.tril(w, -1),
        ),
        "strictly upper": (
            lambda t, x, w, T, i, j, k: t.triu(w, 1),
            lambda p, x, w, T, i, j, k: p.numpy.triu(w, 1),
        ),
        "repeated": (
            lambda t, x, w, T, i, j, k: t.repeat_interleave(x, 2, 0),
            lambda p, x, w, T, i, j, k: p.numpy.repeat(x, 2, axis=0),
        ),
        "tiled": (
            lambda t, x, w, T, i, j, k: x.repeat(2, 1),
            lambda p, x, w, T, i, j, k: p.numpy.tile(x, (2, 1)),
        ),
        "sorted": (
            lambda t, x, w, T, i, j, k: t.sort(x, 1)[0],
            lambda p, x, w, T, i, j, k: p.numpy.sort(x, axis=1),
        ),
    }


def differing() -> dict[str, tuple[Program, Program, str]]:
    """Those that look alike and are not, with words of one of the differences."""
    return {
        "beyond the end": (
            # PyTorch takes the index modulo the length, JAX gives NaN
            lambda t, x, w, T, i, j, k: t.take_along_dim(x, i[:3, None], 1),
            lambda p, x, w, T, i, j, k: p.numpy.take_along_axis(x, i[:3, None], axis=1),
            "another value",
        ),
        "read on the host": (
            lambda t, x, w, T, i, j, k: x[i[1]],
            lambda p, x, w, T, i, j, k: x[i[1]],
            "operands: 1 ≠ 3",
        ),
        "twice the same row": (
            # set to what was there plus one, and one added for each
            lambda t, x, w, T, i, j, k: _added(w, i),
            lambda p, x, w, T, i, j, k: w.at[i].add(1.0),
            "mode: none ≠ add",
        ),
        "other indices": (
            lambda t, x, w, T, i, j, k: w[i],
            lambda p, x, w, T, i, j, k: w[j],
            "reads something else",
        ),
        "another axis": (
            lambda t, x, w, T, i, j, k: w[i],
            lambda p, x, w, T, i, j, k: w[:, i],
            "axis: 0 ≠ 1",
        ),
        "other order of axes": (
            lambda t, x, w, T, i, j, k: w[i, j],
            lambda p, x, w, T, i, j, k: w[j, i],
            "another order",
        ),
        "clipped": (
            lambda t, x, w, T, i, j, k: x[i],
            lambda p, x, w, T, i, j, k: p.numpy.take(x, i, axis=0, mode="clip"),
            "out of bounds: none ≠ clip",
        ),
        "negative ones not wrapped": (
            lambda t, x, w, T, i, j, k: x[i],
            lambda p, x, w, T, i, j, k: x.at[i].get(wrap_negative_indices=False),
            "negative indices: none ≠ not wrapped",
        ),
        "wrapped elsewhere": (
            lambda t, x, w, T, i, j, k: x[i],
            lambda p, x, w, T, i, j, k: x.at[p.numpy.where(i < 0, i + 2, i)].get(
                wrap_negative_indices=False
            ),
            "not wrapped",
        ),
        "set or added": (
            lambda t, x, w, T, i, j, k: w.index_put((j,), w * 2),
            lambda p, x, w, T, i, j, k: w.at[j].add(w * 2),
            "mode: none ≠ add",
        ),
        "another row": (
            lambda t, x, w, T, i, j, k: _set(x, 1, w[0]),
            lambda p, x, w, T, i, j, k: x.at[2].set(w[0]),
            "another value",
        ),
        "another length": (
            lambda t, x, w, T, i, j, k: t.tril(w, 1),
            lambda p, x, w, T, i, j, k: p.numpy.tril(w, 2),
            "another value",
        ),
    }


def _set(x: Any, place: Any, value: Any) -> Any:
    y = x.clone()
    y[place] = value
    return y


def _doubled(x: Any, start: int, limit: int) -> Any:
    y = x.clone()
    y[start:limit] *= 2.0
    return y


def _added(x: Any, index: Any) -> Any:
    y = x.clone()
    y[index] += 1.0
    return y
