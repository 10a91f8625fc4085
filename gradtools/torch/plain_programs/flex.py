"""`torch.nn.attention.flex_attention` by plain operations, in tiles for long sequences.

PyTorch differentiates its operator on CUDA devices alone, and in reverse mode.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from gradtools.torch import _upstream as upstream
from gradtools.torch.functorch_wrappers import is_dual, is_wrapped
from gradtools.torch.patches import Reads, Substituted
from gradtools.torch.plain_programs.programs import is_long, over_groups, softmax_and_log, value_of

Tensor = torch.Tensor


def flex_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    score_mod: Callable[..., Tensor],
    block_mask: tuple[Any, ...],
    scale: float,
    kernel_options: dict[str, Any],
    score_mod_other_buffers: tuple[Any, ...] = (),
    mask_mod_other_buffers: tuple[Any, ...] = (),
) -> tuple[Tensor, Tensor, Tensor]:
    """The operator of `torch.nn.attention.flex_attention`: softmax(score_mod(scale q k^T)) v.

    Returns:
        The output, and the logarithms to base 2 of the sums and maxima of each row.
    """
    times = query.shape[1] // key.shape[1]
    key, value = (over_groups(x, times).expand(len(query), -1, -1, -1) for x in (key, value))
    wide = torch.float64 if query.dtype == torch.float64 else torch.float32
    q, k, v = (x.to(wide) for x in (query, key, value))
    where = [torch.arange(n, device=q.device) for n in (*q.shape[:3], k.shape[2])]
    lifted = score_mod_other_buffers, mask_mod_other_buffers  # dynamo made them arguments
    of_one_head = is_long(q, k, v)

    def over_entries(fun: Callable[..., Any], arrays: int, shared: int) -> Callable[..., Any]:
        """Vectorizes a function of an entry and its four indices over all entries."""
        for axis in reversed(range(2 if of_one_head else 0, 4)):
            indices = [0 if k == axis else None for k in range(4)]
            fun = torch.vmap(fun, (*[0] * arrays, *indices, *[None] * shared))
        return fun

    def scores(q: Tensor, k: Tensor, where: Sequence[Tensor], lifted: Any) -> Tensor:
        """score_mod(scale q k^T), -inf where masked, at the indices `where` along b, h, n, m."""
        modified = over_entries(score_mod, 1, len(lifted[0]))
        is_allowed = over_entries(block_mask[-1], 0, len(lifted[1]))
        with _ByIndices():
            scores = modified(q @ k.mT * scale, *where, *lifted[0]).to(q.dtype)
            return scores.masked_fill(~is_allowed(*where, *lifted[1]), -math.inf)

    with torch.autocast(q.device.type, enabled=False):
        if of_one_head:
            out, total, most = _in_tiles(scores, q, k, v, where, lifted, kernel_options)
            out = out.to(query.dtype)
        else:
            weights, total, most = softmax_and_log(scores(q, k, where, lifted))
            out = weights.to(query.dtype) @ value.to(query.dtype)
    return out, total / math.log(2), most / math.log(2)


def _in_tiles(
    scores: Callable[..., Tensor],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    where: Sequence[Tensor],
    lifted: Any,
    kernel_options: dict[str, Any],
) -> tuple[Tensor, Tensor, Tensor]:
    """The output, log(sum(e^s)) and max(s), without the matrix of scores."""
    from gradtools.pairwise.tiled_attention import tile_size_of

    kinds = {"out": "softmax", "log": "logsumexp", "most": "max"}
    if not kernel_options.get("OUTPUT_LOGSUMEXP", True):
        del kinds["log"]
    if not kernel_options.get("OUTPUT_MAX", True):
        del kinds["most"]
    # The differentiated tensors that the functions capture, read at one entry: dynamo makes them
    # arguments, but does not run inside of torch.utils.checkpoint.
    is_differentiated = lambda x: not is_wrapped(x) and (x.requires_grad or is_dual(x))
    one = value_of(q)[0, 0, :1], value_of(k)[0, 0, :1]
    at = [x[0] for x in where[:2]] + [x[:1] for x in where[2:]]
    with torch.no_grad(), Reads(is_differentiated) as reads:
        scores(*one, at, lifted)
    given = {id(x) for x in upstream.tree_leaves(lifted)}
    captured = [x for x in reads.seen.values() if id(x) not in given]
    attend = import_module("gradtools.torch").pairwise_reduce(
        _Tile(scores, captured, kinds),
        kinds,
        rows=(0, 5),
        columns=(1, 2, 6),
        tile_size=tile_size_of(q.shape[:2]),
        verify=False,
    )
    attend = torch.vmap(attend, (0, 0, 0, None, 0, *[None] * 4))
    attend = torch.vmap(attend, (0, 0, 0, 0, *[None] * 5))
    result = attend(q, k, v, *where, lifted, captured)
    none = q.new_zeros(q.shape[:-1])
    return result["out"], result.get("log", none), result.get("most", none)


@dataclass(frozen=True)
class _Tile:
    """The scores and values of a tile of one head. Searches for captured tensors skip fields."""

    scores: Callable[..., Tensor]
    captured: list[Tensor]
    kinds: dict[str, str]

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        b: Tensor,
        h: Tensor,
        i: Tensor,
        j: Tensor,
        lifted: Any,
        others: list[Tensor],
    ) -> dict[str, Any]:
        with Substituted(self.captured, others):
            s = self.scores(q, k, (b, h, i, j), lifted)
        result: dict[str, Any] = {"out": (s, v[None])}
        if "log" in self.kinds:
            result["log"] = s
        if "most" in self.kinds:
            result["most"] = value_of(s)
        return result


class _ByIndices(TorchFunctionMode):
    """A mode in which `table[i]` accepts a batched index i, for which vmap would read a number."""

    def __torch_function__(self, fun: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if fun is Tensor.__getitem__:
            index = args[1] if isinstance(args[1], tuple) else (args[1],)
            if all(isinstance(i, Tensor) for i in index):
                return torch.ops.aten.index.Tensor(args[0], index)
        return fun(*args, **(kwargs or {}))
