"""Losses over all pairs of two sides, without the matrix of logits.

    contrastive           (1/2n) sum_i (log sum_j e^s_ij - s_ii) + (log sum_j e^s_ji - s_ii)
    sigmoid               (1/n) sum_ij log(1 + e^s_ij) - (1/n) sum_i s_ii
    linear classifier     log sum_v e^(h_i . w_v) - h_i . w_t(i)

What is left of each is work on rows alone.
"""

from __future__ import annotations

from functools import partial
from typing import Any, Literal

from gradtools.arguments.checks import as_array
from gradtools.backend import Array, Backend, Operators
from gradtools.errors import GradtoolsError
from gradtools.pairwise.pairwise_reduction import TileSize, tiled
from gradtools.pairwise.tile_reductions import wide


class PairLosses(Operators):
    """The losses, bound to one backend."""

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

        With s_ij = logit_scale <x_i, y_j> + logit_bias it is the cross entropy of the rows of s
        with the diagonal as labels, and if symmetric its mean with that of the columns (InfoNCE, as
        in CLIP). With `sigmoid=True` it is the sum over all pairs of the logistic loss, divided by
        n (SigLIP). One sweep computes rows and columns. For a learned temperature pass
        `logit_scale=exp(w)`.

        Args:
            x: Features, [n, d]; normalize them first.
            y: Features of the other side, [n, d].
            logit_scale: 1 / temperature, a number or an array without axes.
            logit_bias: A number or an array without axes.
            negatives: Further features [k, d] that no x belongs to.
            ids: n integers; pairs i != j with equal ids are not negatives and are left out.
            sigmoid: Whether pairs are classified independently.
            symmetric: Whether columns count as well as rows.
            label_smoothing: The fraction of the label that is spread over all classes.
            gathered: Whether x and y are the local rows of a larger batch, whose other rows are
                gathered (see `all_gather`). The loss is that of the local rows, to be averaged over
                processes like gradients. Implied by axis_name or group.
            axis_name: JAX: the mapped axis of the batch.
            group: PyTorch: the process group; None is the default one.
            tile_size: As in `pairwise_reduce`.
            memory_budget: Bytes for one tile.
            progress: Whether to show a progress bar.

        Returns:
            An array without axes, in float32 for features of 16 bits.

        Raises:
            GradtoolsError: Shapes do not fit; label_smoothing is outside of 0 to 1, or is combined
                with `sigmoid=True`.

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
                "matrices of the same shape, [n, d], whose i-th rows form a pair."
            )
        if sigmoid and label_smoothing:
            raise GradtoolsError(
                f"{caller}: label_smoothing is {label_smoothing} with sigmoid=True, a loss that "
                "has no label smoothing; leave one of them out."
            )
        _check_smoothing(caller, label_smoothing)
        y = backend.tiles.sharded_like(y, x)
        scale, bias = (
            float(z)  # a Python float keeps the dtype of the arrays
            if isinstance(z, int | float)
            else backend.cast(as_array(backend, caller, z, name, device_of=x), x)
            for z, name in ((logit_scale, "logit_scale"), (logit_bias, "logit_bias"))
        )
        options = {"tile_size": tile_size, "memory_budget": memory_budget, "progress": progress}
        logits = _Logits(self._backend, scale, bias, label_smoothing, options)
        apart = gathered or axis_name is not None or group is not None
        own = None if ids is None else as_array(backend, caller, ids, "ids", device_of=x)
        _check_shape(caller, "ids", own, (x.shape[0],), "one for each row of x")
        spread = lambda z: z
        if apart:
            gathered = partial(
                backend.compiler.uncompiled, backend.all_gather, axis_name=axis_name, group=group
            )
            spread = lambda z: None if z is None else gathered(z)
        # Taking the positive logits from the sweep makes its cotangent the only one of x.
        xp, mean = backend.xp, backend.xp.mean
        positive = scale * wide(backend, xp.sum(x * y, axis=1)) + bias if apart else None
        columns: dict[str, Any] = {"y": spread(y), "b": spread(own)}
        if negatives is not None:
            z, b = columns.values()
            more = as_array(backend, caller, negatives, "negatives", device_of=y)
            expected = "rows of as many features as y has"
            _check_shape(caller, "negatives", more, (*more.shape[:1], y.shape[1]), expected)
            n, k = z.shape[0], more.shape[0]
            b = None if b is None else xp.concat([b, xp.broadcast_to(b[:1], (k,))])
            ours = backend.tiles.indices(n + k, z) < n  # the columns that have an id
            columns = {"y": xp.concat([z, backend.cast(more, z)]), "b": b, "ours": ours}
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
            target: Integer classes, of input's shape without its last axis.
            bias: One number for each class.
            ignore_index: The target of rows that are ignored.
            label_smoothing: The fraction of the label that is spread over all classes.
            reduction: "mean" over the rows that are not ignored, "sum", or "none" for one loss per
                row, 0 for ignored ones.
            tile_size: As in `pairwise_reduce`.
            memory_budget: Bytes for one tile.
            progress: Whether to show a progress bar.

        Returns:
            An array without axes, or of target's shape, in float32 for an input of 16 bits. A
            target outside of the classes gives NaN.

        Raises:
            GradtoolsError: Shapes do not fit; target is floating; reduction is unknown;
                label_smoothing is outside of 0 to 1.

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
        w, t = (as_array(backend, caller, z, name, device_of=h) for z, name in named)
        if len(w.shape) != 2 or tuple(h.shape) != (*t.shape, w.shape[1]):
            raise GradtoolsError(
                f"{caller}: input has the shape {tuple(h.shape)}, weight {tuple(w.shape)} and "
                f"target {tuple(t.shape)}; expected [..., d], [classes, d] and [...]."
            )
        if backend.is_inexact(t):
            raise GradtoolsError(
                f"{caller}: target has the dtype {backend.dtype_name(t)}; expected integer "
                "class indices."
            )
        _check_smoothing(caller, label_smoothing)
        xp, shape, classes = backend.xp, tuple(t.shape), w.shape[0]
        h, t = xp.reshape(h, (-1, w.shape[1])), xp.reshape(t, (-1,))
        b = None if bias is None else as_array(backend, caller, bias, "bias", device_of=h)
        _check_shape(caller, "bias", b, (classes,), "one for each class")
        entropy = tiled(
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
        loss = xp.where(counts, loss, zero)
        valid = ((t >= 0) & (t < classes)) | ~counts
        # 0 / 0 at a target outside of the classes, and no NaN anywhere else: jax_debug_nans sees it
        loss = xp.where(valid, loss, zero) + zero / backend.cast(valid, loss)
        if reduction == "none":
            return xp.reshape(loss, shape)
        total = xp.sum(loss)
        if reduction == "mean":
            total = total / xp.sum(backend.cast(counts, loss))
        return total


class _Logits:
    """Reductions of s_ij = scale <x_i, y_j> + bias.

    With ids, the sweep leaves out all pairs with equal ids, including the positive pair, which is
    added afterwards.
    """

    def __init__(
        self, backend: Backend, scale: Any, bias: Any, smoothing: float, options: dict[str, Any]
    ) -> None:
        self.backend, self.xp = backend, backend.xp
        self.scale, self.bias, self.smoothing, self.options = scale, bias, smoothing, options

    def _sweep(
        self, f: Any, reduce: Any, over: Any, x: Array, ids: Any, columns: Any, positive: Any
    ) -> tuple[Any, Array]:
        """f reduced over the sweep, and the logits of the positive pairs."""
        i = self.backend.tiles.indices(x.shape[0], x) if positive is None else None
        rows = {name: z for name, z in (("x", x), ("a", ids), ("i", i)) if z is not None}
        columns = {name: z for name, z in columns.items() if z is not None}
        if positive is None:
            reduce, over = (reduce, "take"), (over, "columns")
        sides = {"rows": [*rows], "columns": [*columns]}
        run = tiled(self.backend, f, reduce, over=over, **sides, **self.options)
        out = run(scale=self.scale, bias=self.bias, **rows, **columns)
        return out if positive is None else (out, positive)

    def losses(self, x: Array, ids: Any, columns: Any, positive: Any) -> Array:
        """The row sums of log(1 + e^s_ij), minus the logits of the positive pairs."""
        f = partial(_pair_losses, self.backend)
        result, positive = self._sweep(f, "sum", "columns", x, ids, columns, positive)
        result = result if ids is None else result + _softplus(self.backend, positive)
        return result - positive

    def entropies(
        self, x: Array, ids: Any, columns: Any, positive: Any, both: bool = False
    ) -> list[Array]:
        """The cross entropy of each row and, if `both`, of each column."""
        sides = ["columns", "rows"] if both else ["columns"]
        scores = partial(_pair_scores, self.backend, bool(self.smoothing), len(sides))
        reduce = ["logsumexp", "sum", "sum"] if self.smoothing else ["logsumexp"]
        over = [[side] * len(reduce) for side in sides]
        reduces = [reduce] * len(sides)
        result, positive = self._sweep(scores, reduces, over, x, ids, columns, positive)
        losses = []
        for each in result:
            total, *rest = (z[: x.shape[0]] for z in each)
            if ids is not None:
                total = self.xp.logaddexp(total, positive)
            loss = total - (1 - self.smoothing) * positive
            if self.smoothing:
                mass, count = rest
                if ids is not None:
                    mass, count = mass + positive, count + 1
                loss = loss - self.smoothing * mass / count
            losses.append(loss)
        return losses


# The functions of a sweep capture no arrays, which would be lifted out of a trace. With the indices
# i of the rows they also return the input of the "take" reduction, for the positive pairs.


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
    return [result] * sides if i is None else ([result] * sides, (s, i))


def _pair_losses(
    backend: Backend, x: Any, y: Any, scale: Any, bias: Any, i: Any = None, **marks: Any
) -> Any:
    s = scale * wide(backend, x @ y.T) + bias
    result = _where_kept(backend, _softplus(backend, s), 0.0, **marks)
    return result if i is None else (result, (s, i))


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


def _class_scores(backend: Backend, smoothed: bool, h: Any, t: Any, w: Any, b: Any) -> Any:
    s = wide(backend, h @ w.T)
    s = s if b is None else s + b[None]
    result = {"all": s, "own": (s, t)}
    return {**result, "mean": s} if smoothed else result


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
