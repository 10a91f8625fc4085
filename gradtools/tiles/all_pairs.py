"""Losses and attention over all pairs, on `pairwise_reduce`: no matrix of logits is made.

    contrastive    (1/2n) sum_i (log sum_j e^s_ij - s_ii) + (log sum_j e^s_ji - s_ii)
    sigmoid        (1/n) sum_ij log(1 + e^s_ij) - (1/n) sum_i s_ii
    cross entropy  log sum_v e^(h_i . w_v) - h_i . w_t(i)
    attention      sum_j softmax_j(q_i . k_j / sqrt(d)) v_j

What is left of each is work on rows alone.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from math import isqrt, prod
from typing import Any, Literal

from gradtools.arguments.checks import as_array
from gradtools.backend import Array, Backend, Operators
from gradtools.errors import GradtoolsError
from gradtools.tiles.tile_reductions import wide
from gradtools.tiles.tiling import Tiling

TileSize = int | tuple[int, int] | None
_PAIRS_AT_ONCE = 2**22  # of all heads of an attention together


class Pairs(Operators):
    """Ready functions of all pairs."""

    def contrastive_loss(
        self,
        x: Any,
        y: Any,
        logit_scale: Any = 1.0,
        logit_bias: Any = 0.0,
        negatives: Any = None,
        ids: Any = None,
        *,
        sigmoid: bool = False,
        symmetric: bool = True,
        label_smoothing: float = 0.0,
        gathered: bool = False,
        axis_name: Any = None,
        group: Any = None,
        tile_size: TileSize = None,
        memory_budget: int | None = None,
        progress: bool = False,
    ) -> Any:
        """The contrastive loss of n pairs (x_i, y_i) against all others, without their logits.

        With s_ij = logit_scale <x_i, y_j> + logit_bias it is the cross entropy of the rows of s,
        and if symmetric its mean with that of the columns, whose label is the diagonal (InfoNCE,
        as in CLIP); with `sigmoid=True` the sum over all pairs of the logistic loss, over n
        (SigLIP). One sweep gives rows and columns. A learned temperature is
        `logit_scale=exp(w)`.

        Args:
            x: Features, [n, d]; normalize them first.
            y: The same of the other side.
            logit_scale: 1 / temperature, a number or an array without axes.
            logit_bias: A number or an array without axes.
            negatives: Further features [k, d] that no x belongs to.
            ids: n integers; pairs i != j of equal ids are no negatives, and are left out.
            sigmoid: Whether pairs are classified one by one.
            symmetric: Whether columns count as well as rows.
            label_smoothing: The part of the label that is spread over all classes.
            gathered: Whether x and y are the local rows of a larger batch, whose other rows are
                gathered (see `all_gather`); the loss is that of the local rows, to be averaged over
                processes as gradients are. So too if axis_name or group is given.
            axis_name: JAX: the mapped axis of the batch.
            group: PyTorch: the process group; None is the default one.
            tile_size: As in `pairwise_reduce`, like what follows.
            memory_budget: Bytes for one tile.
            progress: Whether to show a progress bar.

        Returns:
            An array without axes, in float32 for features of 16 bits.

        Raises:
            GradtoolsError: Shapes that do not fit; a label_smoothing outside of 0 to 1; an option
                that `sigmoid=True` does not know.

        Example:
            >>> x = gt.asarray(np.eye(3, dtype=np.float32))
            >>> round(float(gt.contrastive_loss(x, x, logit_scale=2.0)), 5)
            0.23954

        Source: van den Oord, Li, Vinyals, Representation learning with contrastive predictive
        coding, 2018; Radford et al., CLIP, 2021; Zhai et al., Sigmoid loss for language image
        pre-training, 2023.
        """
        caller, backend = "contrastive_loss", self._backend
        x, y = (as_array(backend, caller, z, name) for z, name in ((x, "x"), (y, "y")))
        if len(x.shape) != 2 or tuple(x.shape) != tuple(y.shape):
            raise GradtoolsError(
                f"{caller}: x has the shape {tuple(x.shape)} and y {tuple(y.shape)}; expected two "
                "matrices of one shape, a pair in each row."
            )
        if sigmoid and label_smoothing:
            raise GradtoolsError(
                f"{caller}: label_smoothing is {label_smoothing} with sigmoid=True, whose labels "
                "are those of single pairs; leave one of them out."
            )
        _check_smoothing(caller, label_smoothing)
        y = backend.tiles.sharded_like(y, x)
        scale, bias = (
            float(z)  # of Python, exact beside any dtype
            if isinstance(z, int | float)
            else backend.cast(as_array(backend, caller, z, name, beside=x), x)
            for z, name in ((logit_scale, "logit_scale"), (logit_bias, "logit_bias"))
        )
        options = {"tile_size": tile_size, "memory_budget": memory_budget, "progress": progress}
        logits = _Logits(self._backend, scale, bias, label_smoothing, options)
        apart = gathered or axis_name is not None or group is not None
        own = None if ids is None else as_array(backend, caller, ids, "ids", beside=x)
        _check_shape(caller, "ids", own, (x.shape[0],), "one for each row of x")
        spread = lambda z: z
        if apart:
            gathered = partial(
                backend.compiler.uncompiled, backend.all_gather, axis_name=axis_name, group=group
            )
            spread = lambda z: None if z is None else gathered(z)
        # The logits of pairs are taken from the sweep, whose cotangent is then the only one of x.
        positive, mean = logits.positive(x, y) if apart else None, backend.xp.mean
        columns = logits.with_negatives(spread(y), spread(own), negatives)
        if sigmoid:
            return mean(logits.losses(x, own, columns, positive))
        both = symmetric and not apart
        losses = logits.entropies(x, own, columns, positive, both)
        if symmetric and apart:
            losses += logits.entropies(y, own, {"y": spread(x), "b": spread(own)}, positive)
        return sum(map(mean, losses[1:]), mean(losses[0])) / len(losses)

    def linear_cross_entropy(
        self,
        input: Any,
        weight: Any,
        target: Any,
        bias: Any = None,
        *,
        ignore_index: int = -100,
        label_smoothing: float = 0.0,
        reduction: Literal["mean", "sum", "none"] = "mean",
        tile_size: TileSize = None,
        memory_budget: int | None = None,
        progress: bool = False,
    ) -> Any:
        """The cross entropy of `input @ weight.T + bias`, without the matrix of logits.

        Args:
            input: Hidden states, [..., d].
            weight: One row for each class, [classes, d].
            target: The classes, integers of input's shape without its last axis.
            bias: One number for each class.
            ignore_index: The target of rows that do not count.
            label_smoothing: The part of the label that is spread over all classes.
            reduction: "mean" over the rows that count, "sum", or "none" for one loss a row, 0 for
                those that do not count.
            tile_size: As in `pairwise_reduce`, like what follows.
            memory_budget: Bytes for one tile.
            progress: Whether to show a progress bar.

        Returns:
            An array without axes, or of target's shape, in float32 for an input of 16 bits. A
            target that is no class gives NaN.

        Raises:
            GradtoolsError: Shapes that do not fit; a target of floats; an unknown reduction; a
                label_smoothing outside of 0 to 1.

        Example:
            >>> h, t = gt.asarray(np.eye(2, dtype=np.float32)), gt.asarray(np.int32([0, 0]))
            >>> round(float(gt.linear_cross_entropy(h, h, t)), 5)
            0.81326

        Source: Hsu et al., Liger kernel, 2024; Wijmans et al., Cut your losses in large-vocabulary
        language models, 2024.
        """
        caller, backend = "linear_cross_entropy", self._backend
        if reduction not in ("mean", "sum", "none"):
            raise GradtoolsError(
                f"{caller}: reduction is {reduction!r}; expected 'mean', 'sum' or 'none'."
            )
        h = as_array(backend, caller, input, "input")
        named = ((weight, "weight"), (target, "target"))
        w, t = (as_array(backend, caller, z, name, beside=h) for z, name in named)
        if len(w.shape) != 2 or tuple(h.shape) != (*t.shape, w.shape[1]):
            raise GradtoolsError(
                f"{caller}: input has the shape {tuple(h.shape)}, weight {tuple(w.shape)} and "
                f"target {tuple(t.shape)}; expected [..., d], [classes, d] and [...]."
            )
        if backend.is_inexact(t):
            raise GradtoolsError(
                f"{caller}: target has the dtype {backend.dtype_name(t)}; expected integers, the "
                "numbers of classes."
            )
        _check_smoothing(caller, label_smoothing)
        xp, shape, classes = backend.xp, tuple(t.shape), w.shape[0]
        h, t = xp.reshape(h, (-1, w.shape[1])), xp.reshape(t, (-1,))
        b = None if bias is None else as_array(backend, caller, bias, "bias", beside=h)
        _check_shape(caller, "bias", b, (classes,), "one for each class")
        entropy = _tiled(
            backend,
            partial(_class_scores, backend, bool(label_smoothing)),
            {"all": "logsumexp", "own": "take", **({"mean": "mean"} if label_smoothing else {})},
            rows=("h", "t"),
            columns=("w", *(() if b is None else ("b",))),
            tile_size=tile_size,
            memory_budget=memory_budget,
            progress=progress,
        )
        result = entropy(h=h, t=t, w=w, b=b)
        loss = result["all"] - (1 - label_smoothing) * result["own"]
        if label_smoothing:
            loss = loss - label_smoothing * result["mean"]
        t = backend.tiles.sharded_like(t, loss)
        counts, zero = t != ignore_index, backend.zeros_like(loss)
        loss = xp.where((t >= 0) & (t < classes), loss, zero + float("nan"))
        loss = xp.where(counts, loss, zero)
        if reduction == "none":
            return xp.reshape(loss, shape)
        total = xp.sum(loss)
        if reduction == "mean":
            total = total / xp.sum(backend.cast(counts, loss))
        return total

    def attention(
        self,
        query: Any,
        key: Any,
        value: Any,
        attn_mask: Any = None,
        *,
        is_causal: bool = False,
        scale: float | None = None,
        layout: Literal["heads_first", "heads_last"] | None = None,
        tile_size: TileSize = None,
    ) -> Any:
        """Attention with every derivative at memory linear in the sequence.

        Like `torch.nn.functional.scaled_dot_product_attention` and `jax.nn.dot_product_attention`,
        but with forward mode and derivatives of all orders, and without the matrix of scores.

        Args:
            query: [batch, heads, n, d] or [batch, n, heads, d], as `layout` says; in the first
                any number of leading axes, also none.
            key: The same with m in place of n. If it has fewer heads, each is shared by a group of
            query heads.
            value: The same as key, with its own last axis.
            attn_mask: What broadcasts to [..., heads, n, m], in either layout: bool (True takes
                part) or numbers that are added to the scores and differentiated.
            is_causal: Whether row i attends to columns j <= i only.
            scale: Of the scores; None is 1 / sqrt(d).
            layout: "heads_first" as in PyTorch or "heads_last" as in JAX; None is the
                framework's own.
            tile_size: As in `pairwise_reduce`, for each head; None makes it smaller for many.

        Returns:
            An array like query with value's last axis. A row without any column is 0.

        Raises:
            GradtoolsError: Shapes that do not fit; an unknown layout.

        Example:
            >>> q = gt.asarray(np.zeros((1, 1, 2, 4), np.float32))
            >>> v = gt.asarray(np.float32([[[[1.0], [3.0]]]]))
            >>> gt.to_numpy(gt.attention(q, q, v, layout="heads_first"))[0, 0, :, 0].tolist()
            [2.0, 2.0]

        Source: Rabe and Staats, Self-attention does not need O(n^2) memory, 2021; Dao et al.,
        FlashAttention, 2022.
        """
        caller, backend = "attention", self._backend
        xp = backend.xp
        layout = layout or ("heads_first" if backend.name == "torch" else "heads_last")
        if layout not in ("heads_first", "heads_last"):
            raise GradtoolsError(
                f"{caller}: layout is {layout!r}; expected 'heads_first' or 'heads_last'."
            )
        named = ((query, "query"), (key, "key"), (value, "value"))
        q, k, v = (as_array(backend, caller, z, name) for z, name in named)
        last = layout == "heads_last"
        if last and {len(z.shape) for z in (q, k, v)} != {4}:
            raise GradtoolsError(
                f"{caller}: with layout='heads_last' query, key and value have four axes, [batch, "
                f"n, heads, d]; these have {len(q.shape)}, {len(k.shape)}, {len(v.shape)}."
            )
        if last:
            q, k, v = (xp.permute_dims(z, (0, 2, 1, 3)) for z in (q, k, v))
        heads = _Heads.of(caller, q, k, v)
        mask = (
            None
            if attn_mask is None
            else as_array(backend, caller, attn_mask, "attn_mask", beside=q)
        )
        call = _Attention(self._backend, heads, is_causal, scale, tile_size)
        out = call.run(q, k, v, mask)
        return xp.permute_dims(out, (0, 2, 1, 3)) if last else out


def _check_smoothing(caller: str, label_smoothing: float) -> None:
    if not 0 <= label_smoothing <= 1:
        raise GradtoolsError(
            f"{caller}: label_smoothing is {label_smoothing}; expected a number from 0 to 1."
        )


def _check_shape(caller: str, name: str, x: Any, shape: tuple[int, ...], meaning: str) -> None:
    if x is not None and tuple(x.shape) != shape:
        raise GradtoolsError(
            f"{caller}: {name} has the shape {tuple(x.shape)}; expected {shape}, {meaning}."
        )


def _tiled(backend: Backend, f: Any, reduce: Any, **options: Any) -> Callable[..., Any]:
    """Of a function that stands here, which is known to be the same again."""
    return Tiling(backend).pairwise_reduce(f, reduce, verify=False, **options)


# --- contrastive -------------------------------------------------------------------------


class _Logits:
    """s_ij = scale <x_i, y_j> + bias, reduced.

    With ids a row's own pair is left out of the sweep with all that share its id, and added after.
    """

    def __init__(
        self, backend: Backend, scale: Any, bias: Any, smoothing: float, options: dict[str, Any]
    ) -> None:
        self.backend, self.xp = backend, backend.xp
        self.scale, self.bias, self.smoothing, self.options = scale, bias, smoothing, options

    def positive(self, x: Array, y: Array) -> Array:
        """The logits of the pairs themselves."""
        return self.scale * wide(self.backend, self.xp.sum(x * y, axis=1)) + self.bias

    def with_negatives(self, y: Array, ids: Any, negatives: Any) -> dict[str, Any]:
        """The columns: features, ids, and which have one."""
        if negatives is None:
            return {"y": y, "b": ids}
        more = as_array(self.backend, "contrastive_loss", negatives, "negatives", beside=y)
        wanted = (*more.shape[:1], y.shape[1])
        _check_shape("contrastive_loss", "negatives", more, wanted, "features like those of y")
        n, k = y.shape[0], more.shape[0]
        if ids is not None:
            ids = self.xp.concat([ids, self.xp.broadcast_to(ids[:1], (k,))])
        ours = self.backend.tiles.indices(n + k, y) < n
        return {"y": self.xp.concat([y, self.backend.cast(more, y)]), "b": ids, "ours": ours}

    def _sweep(
        self, f: Any, reduce: Any, over: Any, x: Array, ids: Any, columns: Any, positive: Any
    ) -> tuple[Any, Array]:
        """What f gives, reduced, and the logits of the pairs."""
        i = self.backend.tiles.indices(x.shape[0], x) if positive is None else None
        result = {"x": x, "a": ids, "i": i, **columns}
        named = {name: z for name, z in result.items() if z is not None}
        rows, others = (
            [name for name in names if name in named]
            for names in (("x", "a", "i"), ("y", "b", "ours"))
        )
        if positive is None:
            reduce, over = (reduce, "take"), (over, "columns")
        run = _tiled(self.backend, f, reduce, rows=rows, columns=others, over=over, **self.options)
        out = run(scale=self.scale, bias=self.bias, **named)
        return out if positive is None else (out, positive)

    def losses(self, x: Array, ids: Any, columns: Any, positive: Any) -> Array:
        """The sums of log(1 + e^s_ij) along rows, less the logits of the pairs."""
        f = partial(_pair_losses, self.backend)
        result, positive = self._sweep(f, "sum", "columns", x, ids, columns, positive)
        result = result if ids is None else result + _softplus(self.backend, positive)
        return result - positive

    def entropies(
        self, x: Array, ids: Any, columns: Any, positive: Any, both: bool = False
    ) -> list[Array]:
        """The cross entropy of each row and, if both are asked for, of each column."""
        sides = ["columns", "rows"] if both else ["columns"]
        scores = partial(_pair_scores, self.backend, bool(self.smoothing), len(sides))
        reduce = ["logsumexp", "sum", "sum"] if self.smoothing else ["logsumexp"]
        over = [[side] * len(reduce) for side in sides]
        reduces = [reduce] * len(sides)
        result, positive = self._sweep(scores, reduces, over, x, ids, columns, positive)
        return [self._entropy(positive, ids, *[z[: x.shape[0]] for z in each]) for each in result]

    def _entropy(
        self, positive: Array, ids: Any, total: Array, mass: Any = None, count: Any = None
    ) -> Array:
        if ids is not None:
            total = self.xp.logaddexp(total, positive)
        loss = total - (1 - self.smoothing) * positive
        if not self.smoothing:
            return loss
        if ids is not None:
            mass, count = mass + positive, count + 1
        return loss - self.smoothing * mass / count


# A sweep's function holds no arrays: what it closes over would be lifted out of a trace.


def _pair_scores(
    backend: Backend,
    smoothed: bool,
    sides: int,
    x: Any,
    y: Any,
    scale: Any,
    bias: Any,
    i: Any = None,
    **marks: Any,
) -> Any:
    s = scale * wide(backend, x @ y.T) + bias
    result = [_where_kept(backend, s, -float("inf"), **marks)]
    if smoothed:
        result += [_where_kept(backend, f, 0.0, **marks) for f in (s, s * 0 + 1)]
    return _with_own([result] * sides, s, i)


def _pair_losses(
    backend: Backend, x: Any, y: Any, scale: Any, bias: Any, i: Any = None, **marks: Any
) -> Any:
    s = scale * wide(backend, x @ y.T) + bias
    return _with_own(_where_kept(backend, _softplus(backend, s), 0.0, **marks), s, i)


def _with_own(found: Any, s: Array, i: Any) -> Any:
    """f's output, and what the logits of the pairs are taken from."""
    return found if i is None else (found, (s, i))


def _softplus(backend: Backend, s: Array) -> Array:
    return backend.xp.logaddexp(s, backend.zeros_like(s))


def _where_kept(
    backend: Backend, s: Array, other: float, a: Any = None, b: Any = None, ours: Any = None
) -> Array:
    if a is None:
        return s
    kept = a[:, None] != b[None]
    kept = kept if ours is None else kept | ~ours[None]
    return backend.xp.where(kept, s, backend.zeros_like(s[:1, :1]) + other)


# --- cross entropy -----------------------------------------------------------------------


def _class_scores(backend: Backend, smoothed: bool, h: Any, t: Any, w: Any, b: Any) -> Any:
    s = wide(backend, h @ w.T)
    s = s if b is None else s + b[None]
    result = {"all": s, "own": (s, t)}
    return {**result, "mean": s} if smoothed else result


# --- attention ---------------------------------------------------------------------------


@dataclass(frozen=True)
class _Heads:
    """The shapes of an attention: leading axes, groups of queries to a head of keys, lengths."""

    batch: tuple[int, ...]
    groups: int
    rows: int
    columns: int
    size: int

    @classmethod
    def of(cls, caller: str, q: Array, k: Array, v: Array) -> _Heads:
        # A vector, which does not fit, is here a matrix without rows.
        (*qs, n, d), (*ks, m, e) = ((0,) * (2 - len(z.shape)) + tuple(z.shape) for z in (q, k))
        fits = tuple(v.shape[:-1]) == (*ks, m) and d == e and len(qs) == len(ks)
        groups = qs[-1] // ks[-1] if fits and qs and ks[-1] else 1
        if not fits or qs[:-1] != ks[:-1] or qs[-1:] != [groups * h for h in ks[-1:]]:
            raise GradtoolsError(
                f"{caller}: with heads first, query has the shape {tuple(q.shape)}, key "
                f"{tuple(k.shape)} and value {tuple(v.shape)}; expected [..., heads, n, d], "
                "[..., h, m, d] and [..., h, m, e], where h divides heads."
            )
        return cls(tuple(ks), groups, n, m, d)


class _Attention:
    """One call, heads first; the queries of a group are rows of one head."""

    def __init__(
        self,
        backend: Backend,
        heads: _Heads,
        causal: bool,
        scale: float | None,
        tile_size: TileSize,
    ) -> None:
        self.backend, self.xp = backend, backend.xp
        self.heads, self.causal = heads, causal
        self.scale = heads.size**-0.5 if scale is None else scale
        known = [n for n in heads.batch if hasattr(n, "__index__")]  # others are symbolic
        together = isqrt(_PAIRS_AT_ONCE // max(prod(known), 1))
        self.tile_size = tile_size or max(64, min(512, together))

    def run(self, q: Array, k: Array, v: Array, mask: Any) -> Array:
        """The output, of query's shape but for the last axis."""
        heads, shape = self.heads, (*q.shape[:-1], v.shape[-1])
        q = self.xp.reshape(q, (*heads.batch, heads.groups * heads.rows, heads.size))
        arrays = {"q": q, "k": k, "v": v}
        if self.causal:
            i = self.backend.tiles.indices(heads.rows, q)
            arrays["i"] = self.xp.concat([i] * heads.groups) if heads.groups > 1 else i
        if mask is not None:
            name, arrays["mask"] = self._mask(mask)
        else:
            name = "rows"
        if self.causal or name == "pairs":
            arrays["j"] = self.backend.tiles.indices(heads.columns, q)
        columns = ["k", "v", "j", *(["mask"] if name == "columns" else [])]
        rows = ["q", "i", *(["mask"] if name != "columns" else [])]
        scores = partial(self._scores, name)
        scores.gives_new_scores = True  # type: ignore[attr-defined]
        run = _tiled(
            self.backend,
            scores,
            "softmax",
            tile_size=self.tile_size,
            rows=[n for n in rows if n in arrays],
            columns=[n for n in columns if n in arrays],
        )
        names = list(arrays)
        call = lambda *xs: run(**dict(zip(names, xs, strict=True)))
        lead = [axis for axis, n in enumerate(heads.batch) if n != 1]  # a level of vmap costs
        for axis in reversed(lead):
            in_axes = []
            for name_, x in arrays.items():
                own = name_ in ("q", "k", "v") or (name_ == "mask" and x.shape[axis] > 1)
                in_axes.append(0 if own else None)
            call = self.backend.vmap(call, in_axes=tuple(in_axes))
        xs = [
            self._without_ones(x, len(heads.batch)) if name_ in ("q", "k", "v", "mask") else x
            for name_, x in arrays.items()
        ]
        return self.xp.reshape(call(*xs), shape)

    def _without_ones(self, x: Array, lead: int) -> Array:
        """x without leading axes of length 1."""
        return self.xp.reshape(x, [n for n in x.shape[:lead] if n != 1] + [*x.shape[lead:]])

    def _mask(self, mask: Array) -> tuple[str, Array]:
        """Whose argument the mask is, and the mask with all leading axes, of length 1 or whole."""
        heads, xp = self.heads, self.xp
        full = (*heads.batch[:-1], heads.batch[-1] * heads.groups) if heads.batch else ()
        wanted = (*full, heads.rows, heads.columns)
        shape = (1,) * (len(wanted) - len(mask.shape)) + tuple(mask.shape)
        fits = len(shape) == len(wanted)
        if not fits or any(a not in (1, b) for a, b in zip(shape, wanted, strict=True)):
            raise GradtoolsError(
                f"attention: attn_mask has the shape {tuple(mask.shape)}, which does not broadcast "
                f"to {wanted}, [..., heads, n, m]."
            )
        mask = xp.reshape(mask, shape)
        *lead, n, m = shape
        if heads.groups > 1 and lead and (lead[-1] > 1 or n > 1):
            own = lead[-1] > 1
            most = heads.batch[-1] * heads.groups if own else heads.groups
            mask = xp.broadcast_to(mask, (*lead[:-1], most, heads.rows, m))
            mask = xp.reshape(mask, (*lead[:-1], heads.batch[-1] if own else 1, -1, m))
            *lead, n, m = mask.shape
        if n == 1:
            mask = xp.broadcast_to(mask, (*lead, 1, heads.columns))
            return "columns", xp.reshape(mask, (*lead, heads.columns))
        if m == 1:
            return "rows", xp.reshape(mask, (*lead, n))
        return "pairs", mask

    def _scores(
        self, name: str, q: Any, k: Any, v: Any, mask: Any = None, i: Any = None, j: Any = None
    ) -> Any:
        xp, s = self.xp, (self.scale * q) @ k.T
        if mask is not None:
            if name == "pairs":
                mask = xp.take(mask, j, axis=1)
            mask = {"rows": mask[:, None], "columns": mask[None]}.get(name, mask)
            if self.backend.is_inexact(mask):
                s = s + self.backend.cast(mask, s)
            else:
                s = self._where(mask, s)
        if self.causal:
            s = self._where(i[:, None] >= j[None], s)
        return s, v[None]

    def _where(self, kept: Any, s: Any) -> Any:
        """The scores of pairs that take part, -inf elsewhere."""
        return self.xp.where(kept, s, self.backend.zeros_like(s[:1, :1]) - float("inf"))
