"""`linear_cross_entropy`: the loss of a linear classifier, without the matrix of logits.

log sum_v e^(h_i . w_v) - h_i . w_t(i)
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Literal

from gradtools.arguments.checks import as_array
from gradtools.backend import Backend, Operators
from gradtools.errors import GradtoolsError
from gradtools.pairwise.pairwise_reduction import Tiling
from gradtools.pairwise.tile_reductions import wide

TileSize = int | tuple[int, int] | None


class LinearCrossEntropy(Operators):
    """The cross entropy of a linear layer, bound to one backend."""

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
        check_smoothing(caller, label_smoothing)
        xp, shape, classes = backend.xp, tuple(t.shape), w.shape[0]
        h, t = xp.reshape(h, (-1, w.shape[1])), xp.reshape(t, (-1,))
        b = None if bias is None else as_array(backend, caller, bias, "bias", device_of=h)
        check_shape(caller, "bias", b, (classes,), "one for each class")
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
        loss = xp.where((t >= 0) & (t < classes), loss, zero + float("nan"))
        loss = xp.where(counts, loss, zero)
        if reduction == "none":
            return xp.reshape(loss, shape)
        total = xp.sum(loss)
        if reduction == "mean":
            total = total / xp.sum(backend.cast(counts, loss))
        return total


def _class_scores(backend: Backend, smoothed: bool, h: Any, t: Any, w: Any, b: Any) -> Any:
    s = wide(backend, h @ w.T)
    s = s if b is None else s + b[None]
    result = {"all": s, "own": (s, t)}
    return {**result, "mean": s} if smoothed else result


def check_smoothing(caller: str, label_smoothing: float) -> None:
    if not 0 <= label_smoothing <= 1:
        raise GradtoolsError(
            f"{caller}: label_smoothing is {label_smoothing}; expected a number from 0 to 1."
        )


def check_shape(caller: str, name: str, x: Any, shape: tuple[int, ...], meaning: str) -> None:
    if x is not None and tuple(x.shape) != shape:
        raise GradtoolsError(
            f"{caller}: {name} has the shape {tuple(x.shape)}; expected {shape}, {meaning}."
        )


def tiled(backend: Backend, f: Any, reduce: Any, **options: Any) -> Callable[..., Any]:
    """`pairwise_reduce` without verification, for functions that are known to be deterministic."""
    return Tiling(backend).pairwise_reduce(f, reduce, verify=False, **options)
