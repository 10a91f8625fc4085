"""Reductions of a matrix of scores along one axis, as mergeable states of tiles.

A tile of scores s[r, c] is lifted to one state for each row. States of two tiles are merged, and
the final state is converted to the results y:

    sum           y = sum_j s_j
    max           m = max_j s_j, with n entries at the maximum
    logsumexp     m = max_j s_j, z = sum_j exp(s_j - m),  y = m + log z
    softmax       the same with a = sum_j exp(s_j - m) v_j,  y = a / z
    take          s_t, of the row's own column t

logsumexp and softmax are the online softmax (Milakov and Gimelshein, Online normalizer calculation
for softmax, 2018): sums relative to a smaller m are rescaled when a larger one appears. The
derivative of each is a sum over tiles, with weights w_j that are computed from y:

    sum, max, logsumexp   dy = sum_j w_j ds_j               w = 1, (s = m) / n, exp(s - y)
    softmax               dy = sum_j w_j ((v_j - y) ds_j + dv_j)      w = exp(s - logsumexp)
    take                  dy = ds_t

`push` computes the terms of these sums, `pull` their adjoint: the cotangents of one tile's scores
from those of y. Both use the framework's operations, so they can be differentiated again. The
reduced axis of a tile is the second.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from gradtools.backend import Array, Backend
from gradtools.errors import GradtoolsError

Arrays = list[Any]
NARROW = ("float16", "bfloat16")


def wide(backend: Backend, x: Array) -> Array:
    """x in the dtype of accumulation: float32 for 16-bit dtypes."""
    return backend.cast(x, "float32") if backend.dtype_name(x) in NARROW else x


@dataclass(frozen=True)
class Reduction:
    """The sum, and base class of all reductions."""

    backend: Backend
    caller: str  # the operator, for messages
    count: int  # the number of entries of a whole row
    side: str  # the side of its results
    places: tuple[int, ...]  # its arrays in f's flat output
    names: list[str]  # their dtypes
    # Whether a tile's scores may be overwritten, as nothing else references them.
    owned: bool = False
    real = False  # whether scores must be real
    indexed = False  # whether a tile's last array is the index along the reduced axis
    more = 0  # additional results, which only the derivative reads
    empty: ClassVar[tuple[float, ...]] = ()  # the identity of merge; further leaves are 0

    @property
    def xp(self) -> Any:
        return self.backend.xp

    def check(self, tile: Arrays, shape: tuple[int, int]) -> None:
        """Raises if a tile has the wrong shape or dtype."""
        backend = self.backend
        for x in tile:
            if tuple(x.shape[:2]) != shape or not backend.is_inexact(x):
                raise GradtoolsError(
                    f"{self.caller}: f's scores are of shape {tuple(x.shape)} and dtype "
                    f"{backend.dtype_name(x)}; expected floating numbers of shape {shape}: one for "
                    "each row and column of the tile, then any further axes."
                )
            if self.real and backend.is_complex(x):
                raise GradtoolsError(
                    f"{self.caller}: f's scores are complex, which have no order; a maximum or "
                    "exponential weights need real ones. Take the real part in f."
                )

    @property
    def dtypes(self) -> list[str]:
        """The dtypes of the results."""
        return [*self.names, *self.names[:1] * self.more]

    def states(self, count: int) -> list[float]:
        """The identity of `merge`, for a state with this many leaves."""
        return [*self.empty, *[0.0] * (count - len(self.empty))]

    def lift(self, tile: Arrays) -> Arrays:
        """The state of one tile."""
        return [self.xp.sum(wide(self.backend, x), axis=1) for x in tile]

    def merge(self, a: Arrays, b: Arrays) -> Arrays:
        """The state of two tiles' union."""
        return [x + y for x, y in zip(a, b, strict=True)]

    def finish(self, state: Arrays) -> Arrays:
        """The results."""
        return state

    def stats(self, ys: Arrays) -> Arrays:
        """The results that `push` and `pull` read at each tile."""
        return []

    def push(self, tile: Arrays, moved: Arrays, stats: Arrays) -> Arrays:
        """A tile's terms of the sums that `pushed` converts to tangents."""
        return self.lift(moved)

    def pushed(self, sums: Arrays, ys: Arrays) -> Arrays:
        """The tangents of the results."""
        return sums

    def pulling(self, ys: Arrays, cts: Arrays) -> Arrays:
        """Converts the cotangents of the results to those that `pull` reads."""
        return cts

    def pull(self, tile: Arrays, stats: Arrays, cts: Arrays) -> Arrays:
        """The cotangents of a tile."""
        (x,), (ct,) = tile, cts
        return [
            self.backend.cast(self._behind(ct) + self.backend.zeros_like(wide(self.backend, x)), x)
        ]

    def _behind(self, x: Array) -> Array:
        """x with an axis of length 1 second, to broadcast along rows."""
        return self.xp.expand_dims(x, axis=1)


class _Mean(Reduction):
    """The sum over the number of entries."""

    def finish(self, state: Arrays) -> Arrays:
        return [x / self.count for x in state]

    def pushed(self, sums: Arrays, ys: Arrays) -> Arrays:
        return self.finish(sums)

    def pulling(self, ys: Arrays, cts: Arrays) -> Arrays:
        return self.finish(cts)


class _Weighted(Reduction):
    """Reductions of one array of scores whose derivative has weights."""

    real = True

    def weights(self, scores: Array, stats: Arrays, *index: Array) -> Array:
        raise NotImplementedError

    def push(self, tile: Arrays, moved: Arrays, stats: Arrays) -> Arrays:
        w = self.weights(tile[0], stats, *tile[1:])
        return [self.xp.sum(w * wide(self.backend, moved[0]), axis=1)]

    def pull(self, tile: Arrays, stats: Arrays, cts: Arrays) -> Arrays:
        w = self.weights(tile[0], stats, *tile[1:])
        return [self.backend.cast(w * self._behind(cts[0]), tile[0])]


class _Max(_Weighted):
    """The maximum; equal entries share the derivative.

    A single maximum is identified by its index, because a recomputed tile may be rounded
    differently. Ties are entries within rounding of the maximum.
    """

    more = 2
    indexed = True
    empty = (-float("inf"),)

    def lift(self, tile: Arrays) -> Arrays:
        xp, x = self.xp, wide(self.backend, tile[0])
        m = xp.max(x, axis=1)
        count = xp.sum(self.backend.cast(x == self._behind(m), x), axis=1)
        return [m, count, tile[1][xp.argmax(x, axis=1)]]

    def merge(self, a: Arrays, b: Arrays) -> Arrays:
        m = self.xp.maximum(a[0], b[0])
        count = a[1] * self.backend.cast(a[0] == m, m) + b[1] * self.backend.cast(b[0] == m, m)
        return [m, count, self.xp.where(a[0] >= b[0], a[2], b[2])]

    def finish(self, state: Arrays) -> Arrays:
        m, count, first = state
        one = self.backend.ones_like(count)
        count = self.xp.where(m == m, self.xp.maximum(count, one), count * 0)
        return [m, count, first]  # the count is 0 for NaN, which no entry equals: 0 / 0 below

    def stats(self, ys: Arrays) -> Arrays:
        return [*map(self.backend.stop_gradient, ys[:2]), ys[2]]

    def weights(self, scores: Array, stats: Arrays, index: Any = None) -> Array:
        xp, x = self.xp, self.backend.stop_gradient(wide(self.backend, scores))
        m, count, first = map(self._behind, stats)
        index = xp.reshape(index, (1, -1) + (1,) * (len(x.shape) - 2))
        near = (x == m) | (xp.abs(x - m) <= 8 * xp.finfo(x.dtype).eps * xp.abs(m))
        alone = self.backend.cast((index == first) & (x == x), x)
        shared = self.backend.cast(near, x) / count
        return xp.where(count == 1, alone, shared)

    def pushed(self, sums: Arrays, ys: Arrays) -> Arrays:
        return [sums[0], None, None]

    def pulling(self, ys: Arrays, cts: Arrays) -> Arrays:
        return self.backend.filled(cts[:1], ys[:1])


class _LogSumExp(_Weighted):
    """The logarithm of the sum of exponentials; -inf if all entries are -inf."""

    empty = (-float("inf"),)

    def lift(self, tile: Arrays) -> Arrays:
        m, e = self._shifted(tile[0])
        return [m, self.xp.sum(e, axis=1)]

    def _shifted(self, scores: Array) -> tuple[Array, Array]:
        """The maxima of the rows, and the exponentials relative to them."""
        xp, x = self.xp, wide(self.backend, scores)
        m = xp.max(x, axis=1)
        return m, self._exponentials(x, self._finite(m))

    def _exponentials(self, x: Array, base: Array) -> Array:
        """exp(x - base), with one base for each row."""
        own, behind = self.backend.tiles.of_own, self._behind(base)
        return own("exp", own("subtract", x, behind) if self.owned else x - behind)

    def _finite(self, m: Array) -> Array:
        """m, or 0 where it is not finite."""
        return self.xp.where(self.xp.isfinite(m), m, self.backend.zeros_like(m))

    def merge(self, a: Arrays, b: Arrays) -> Arrays:
        m = self.xp.maximum(a[0], b[0])
        base = self._finite(m)
        ours, theirs = self._factor(a[0], base), self._factor(b[0], base)
        pairs = zip(a[1:], b[1:], strict=True)
        return [m, *[x * _like_rank(ours, x) + y * _like_rank(theirs, y) for x, y in pairs]]

    def _factor(self, old: Array, base: Array) -> Array:
        xp = self.xp
        return xp.exp(xp.where(xp.isfinite(old), old - base, self.backend.zeros_like(old)))

    def finish(self, state: Arrays) -> Arrays:
        return [self._finite(state[0]) + self.xp.log(state[1])]

    def stats(self, ys: Arrays) -> Arrays:
        none = ys[0] == -float("inf")  # a row of -inf has weights 0
        return [self.xp.where(none, self.backend.zeros_like(ys[0]), ys[0])]

    def weights(self, scores: Array, stats: Arrays, *index: Array) -> Array:
        return self._exponentials(wide(self.backend, scores), stats[0])


class _Softmax(_LogSumExp):
    """The softmax-weighted mean of values; 0 where all scores are -inf.

    Values have the shape [rows, columns, ...] of a tile, or [1, columns, ...].
    """

    def check(self, tile: Arrays, shape: tuple[int, int]) -> None:
        if len(tile) < 2:
            raise GradtoolsError(
                f"{self.caller}: for reduce='softmax' f must return a pair (scores, values); got "
                "scores alone."
            )
        super().check(tile[:1], shape)
        if len(tile[0].shape) != 2:
            raise GradtoolsError(
                f"{self.caller}: f's scores have the shape {tuple(tile[0].shape)}; with "
                "reduce='softmax' they are a matrix. Take further axes by vmap."
            )
        for v in tile[1:]:
            if tuple(v.shape[:2]) not in (shape, (1, shape[1])) or not self.backend.is_inexact(v):
                raise GradtoolsError(
                    f"{self.caller}: f's values are of shape {tuple(v.shape)} and dtype "
                    f"{self.backend.dtype_name(v)}; expected floating numbers of shape "
                    f"({shape[0]} or 1, {shape[1]}, ...). Of values that belong to columns alone "
                    "return v[None]."
                )

    def lift(self, tile: Arrays) -> Arrays:
        m, e = self._shifted(tile[0])
        return [m, self.xp.sum(e, axis=1), *[self._weighted(e, v) for v in tile[1:]]]

    def _weighted(self, w: Array, v: Array) -> Array:
        """sum_j w_ij v_ij."""
        flat, w = self._alike(self._flat(v), w)
        if self._shared(w, v):
            result = w @ flat[0]
        else:
            result = self.xp.squeeze(self._behind(w) @ flat, axis=1)
        return self.xp.reshape(result, (w.shape[0], *v.shape[2:]))

    def _shared(self, w: Array, v: Array) -> bool:
        return v.shape[0] == 1 and w.shape[0] != 1

    def _flat(self, v: Array) -> Array:
        return self.xp.reshape(wide(self.backend, v), (*v.shape[:2], -1))

    def _alike(self, a: Array, b: Array) -> tuple[Array, Array]:
        """Both in their common dtype: values may be complex, or wider than scores."""
        if a.dtype == b.dtype:
            return a, b
        dtype = self.xp.result_type(a, b)
        return self.xp.astype(a, dtype), self.xp.astype(b, dtype)

    def _dual(self, ct: Array) -> Array:
        """The conjugate of a cotangent: <c, v> is the real part of conj(c) v."""
        return self.xp.conj(ct) if self.backend.is_complex(ct) else ct

    def _real(self, x: Array) -> Array:
        return self.xp.real(x) if self.backend.is_complex(x) else x

    def _along(self, ct: Array, v: Array) -> Array:
        """The inner products <c_i, v_ij> of a row's cotangent with its values."""
        g = self.xp.reshape(self._dual(ct), (ct.shape[0], -1))
        flat, g = self._alike(self._flat(v), g)
        if self._shared(g, v):
            return self._real(g @ flat[0].T)
        return self._real(self.xp.squeeze(flat @ self.xp.expand_dims(g, axis=2), axis=2))

    def _spread(self, w: Array, ct: Array, v: Array) -> Array:
        """The cotangents of the values, w_ij ct_i."""
        xp = self.xp
        w, g = self._alike(w, xp.reshape(ct, (ct.shape[0], -1)))
        result = w.T @ g if self._shared(w, v) else xp.expand_dims(w, axis=2) * self._behind(g)
        return self.backend.cast(xp.reshape(result, v.shape), v)

    def finish(self, state: Arrays) -> Arrays:
        z = state[1]
        z = self.xp.where(z == 0, z + 1, z)
        return [*super().finish(state), *[a / _like_rank(z, a) for a in state[2:]]]

    def push(self, tile: Arrays, moved: Arrays, stats: Arrays) -> Arrays:
        w = self.weights(tile[0], stats)
        moving = w * wide(self.backend, moved[0])
        pairs = zip(tile[1:], moved[1:], strict=True)
        sums = [self._weighted(moving, v) + self._weighted(w, dv) for v, dv in pairs]
        return [self.xp.sum(moving, axis=1), *sums]

    def pushed(self, sums: Arrays, ys: Arrays) -> Arrays:
        first, *others = sums
        pairs = zip(others, ys[1:], strict=True)
        return [first, *[s - _like_rank(first, y) * y for s, y in pairs]]

    def pulling(self, ys: Arrays, cts: Arrays) -> Arrays:
        """The cotangent of the scores' normaliser, followed by those of the values."""
        norm, outs = cts[0], ys[1:]
        full = self.backend.filled(cts[1:], outs)
        for g, y in zip(full, outs, strict=True):
            product = self._real(self._dual(g) * y)
            term = self.xp.sum(self.xp.reshape(product, (y.shape[0], -1)), axis=1)
            norm = -term if norm is None else norm - term
        return [norm, *full]

    def pull(self, tile: Arrays, stats: Arrays, cts: Arrays) -> Arrays:
        w = self.weights(tile[0], stats)
        slope, own = self._behind(cts[0]), self.backend.tiles.of_own
        for v, g in zip(tile[1:], cts[1:], strict=True):
            slope = own("add", self._along(g, v), slope)
        values = [self._spread(w, g, v) for v, g in zip(tile[1:], cts[1:], strict=True)]
        return [self.backend.cast(own("multiply", slope, w), tile[0]), *values]


class _Take(Reduction):
    """Each row's score at the column of its index; 0 if the index is out of range."""

    indexed = True

    @property
    def dtypes(self) -> list[str]:
        return self.names[:1]

    def check(self, tile: Arrays, shape: tuple[int, int]) -> None:
        whole = len(tile) == 2 and "int" in self.backend.dtype_name(tile[1])
        if not whole or len(tile[0].shape) != 2 or tuple(tile[1].shape) != shape[:1]:
            came = [f"{self.backend.dtype_name(x)} of shape {tuple(x.shape)}" for x in tile]
            raise GradtoolsError(
                f"{self.caller}: for reduce='take' f must return a pair (scores, index), a matrix "
                f"of shape {shape} and an integer array of shape {shape[:1]}; got "
                f"{' and '.join(came)}."
            )
        super().check(tile[:1], shape)

    def lift(self, tile: Arrays) -> Arrays:
        x, at, index = tile
        return [self.backend.tiles.taken(wide(self.backend, x), at, index)]

    def push(self, tile: Arrays, moved: Arrays, stats: Arrays) -> Arrays:
        return self.lift([moved[0], *tile[1:]])

    def pull(self, tile: Arrays, stats: Arrays, cts: Arrays) -> Arrays:
        x, at, index = tile
        return [self.backend.cast(self.backend.tiles.put(cts[0], at, index), x), None]


KINDS: dict[str, type[Reduction]] = {
    "sum": Reduction,
    "mean": _Mean,
    "max": _Max,
    "logsumexp": _LogSumExp,
    "softmax": _Softmax,
    "take": _Take,
}


def _like_rank(x: Array, like: Array) -> Array:
    """x with trailing axes of length 1, to broadcast over `like`."""
    return x.reshape(tuple(x.shape) + (1,) * (len(like.shape) - len(x.shape)))
