"""`attention`: sum_j softmax_j(q_i . k_j / sqrt(d)) v_j, without the matrix of scores."""

from __future__ import annotations

from collections.abc import Sequence
from math import isqrt, prod
from typing import Any, Literal

from gradtools.arguments.checks import as_array
from gradtools.backend import Array, Backend, Operators
from gradtools.errors import GradtoolsError
from gradtools.pairwise.pairwise_reduction import TileSize, tiled

_PAIRS_AT_ONCE = 2**22  # pairs of a tile, summed over all heads


class Attention(Operators):
    """Attention, bound to one backend."""

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
        """Attention whose derivatives of any order take memory linear in the sequence length.

        Like `torch.nn.functional.scaled_dot_product_attention` and `jax.nn.dot_product_attention`,
        but with forward mode and derivatives of all orders, and without the matrix of scores.

        Args:
            query: [batch, heads, n, d] or [batch, n, heads, d], depending on `layout`; the first
                may have any number of leading axes, also none.
            key: Likewise with m in place of n. If it has fewer heads, each is shared by a group of
                query heads.
            value: Like key, with its own last axis.
            attn_mask: An array that broadcasts to [..., heads, n, m], in either layout: bool (True
                takes part) or numbers that are added to the scores and differentiated.
            is_causal: Whether row i attends to columns j <= i only.
            scale: The factor of the scores; None is 1 / sqrt(d).
            layout: "heads_first" as in PyTorch or "heads_last" as in JAX; None is that of the
                framework.
            tile_size: As in `pairwise_reduce`, for each head; None chooses smaller tiles for many
                heads.

        Returns:
            An array like query with value's last axis. A row without any column is 0.

        Raises:
            GradtoolsError: Shapes do not fit; layout is unknown.

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
        mask = attn_mask
        if mask is not None:
            mask = as_array(backend, caller, mask, "attn_mask", device_of=q)
        out = _heads_first(backend, q, k, v, mask, is_causal, scale, tile_size)
        return xp.permute_dims(out, (0, 2, 1, 3)) if last else out


def tile_size_of(batch: Sequence[int]) -> int:
    """The rows and columns of a tile, with these leading axes."""
    known = [n for n in batch if hasattr(n, "__index__")]  # others are symbolic
    return max(64, min(512, isqrt(_PAIRS_AT_ONCE // max(prod(known), 1))))


def _heads_first(
    backend: Backend, q: Array, k: Array, v: Array, mask: Any, causal: bool, scale: Any, size: Any
) -> Array:
    """Attention with heads first; the query heads of a group become rows of one head."""
    # Pads vectors, which are then refused as a matrix without rows.
    (*qs, n, d), (*ks, m, e) = ((0,) * (2 - len(z.shape)) + tuple(z.shape) for z in (q, k))
    fits = tuple(v.shape[:-1]) == (*ks, m) and d == e and len(qs) == len(ks)
    groups = qs[-1] // ks[-1] if fits and qs and ks[-1] else 1
    if not fits or qs[:-1] != ks[:-1] or qs[-1:] != [groups * h for h in ks[-1:]]:
        raise GradtoolsError(
            f"attention: with heads first, query has the shape {tuple(q.shape)}, key "
            f"{tuple(k.shape)} and value {tuple(v.shape)}; expected [..., heads, n, d], "
            "[..., h, m, d] and [..., h, m, e], where h divides heads."
        )
    xp, shape = backend.xp, (*q.shape[:-1], v.shape[-1])
    scale, tiles = d**-0.5 if scale is None else scale, backend.tiles
    arrays, mask_role = {"q": xp.reshape(q, (*ks, groups * n, d)), "k": k, "v": v}, "rows"
    if causal:
        i = tiles.indices(n, q)
        arrays["i"] = xp.concat([i] * groups) if groups > 1 else i
    if mask is not None:
        mask_role, arrays["mask"] = _mask(backend, mask, ks, groups, n, m)
    if causal or mask_role == "pairs":
        arrays["j"] = tiles.indices(m, q)

    def scores(q: Any, k: Any, v: Any, mask: Any = None, i: Any = None, j: Any = None) -> Any:
        s = (scale * q) @ k.T
        where = lambda kept, s: xp.where(kept, s, backend.zeros_like(s[:1, :1]) - float("inf"))
        if mask is not None:
            if mask_role == "pairs":
                mask = xp.take(mask, j, axis=1)
            mask = {"rows": mask[:, None], "columns": mask[None]}.get(mask_role, mask)
            s = s + backend.cast(mask, s) if backend.is_inexact(mask) else where(mask, s)
        if causal:
            s = where(i[:, None] >= j[None], s)
        return s, v[None]

    scores.gives_new_scores = True  # type: ignore[attr-defined]
    columns = ("k", "v", "j", *(["mask"] if mask_role == "columns" else []))
    run = tiled(
        backend,
        scores,
        "softmax",
        tile_size=size or tile_size_of(ks),
        rows=[name for name in arrays if name not in columns],
        columns=[name for name in arrays if name in columns],
    )
    names, lead = list(arrays), len(ks)
    call = lambda *xs: run(**dict(zip(names, xs, strict=True)))
    mapped = ("q", "k", "v", "mask")
    for axis in reversed(range(lead)):
        if ks[axis] == 1:  # avoids needless vmap levels
            continue
        in_axes = [
            0 if name in mapped and (name != "mask" or x.shape[axis] > 1) else None
            for name, x in arrays.items()
        ]
        call = backend.vmap(call, in_axes=tuple(in_axes))
    xs = [
        xp.reshape(x, [n for n in x.shape[:lead] if n != 1] + [*x.shape[lead:]])
        if name in mapped
        else x
        for name, x in arrays.items()
    ]
    return xp.reshape(call(*xs), shape)


def _mask(
    backend: Backend, mask: Array, batch: Sequence[int], groups: int, rows: int, columns: int
) -> tuple[str, Array]:
    """The mask's role, "rows", "columns" or "pairs", and the mask with all leading axes."""
    xp, heads = backend.xp, [n * groups for n in batch[-1:]]
    wanted = (*batch[:-1], *heads, rows, columns)
    shape = (1,) * (len(wanted) - len(mask.shape)) + tuple(mask.shape)
    fits = len(shape) == len(wanted)
    if not fits or any(a not in (1, b) for a, b in zip(shape, wanted, strict=True)):
        raise GradtoolsError(
            f"attention: attn_mask has the shape {tuple(mask.shape)}, which does not broadcast "
            f"to the shape [..., heads, n, m] of the scores, {wanted}."
        )
    mask = xp.reshape(mask, shape)
    *lead, n, m = shape
    if groups > 1 and lead and (lead[-1] > 1 or n > 1):
        own = lead[-1] > 1
        mask = xp.broadcast_to(mask, (*lead[:-1], heads[0] if own else groups, rows, m))
        mask = xp.reshape(mask, (*lead[:-1], batch[-1] if own else 1, -1, m))
        *lead, n, m = mask.shape
    if n == 1:
        mask = xp.broadcast_to(mask, (*lead, 1, columns))
        return "columns", xp.reshape(mask, (*lead, columns))
    if m == 1:
        return "rows", xp.reshape(mask, (*lead, n))
    return "pairs", mask
