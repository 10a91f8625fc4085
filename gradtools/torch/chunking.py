"""Chunks in PyTorch: a first pass that keeps no graph, and one backward pass for each chunk.

The first pass runs in the user's grad mode, since some modules compute otherwise without it. Each
chunk's graph is read for the leaves that it reaches, and dropped. One autograd node has all pieces,
shared arguments and leaves as inputs, and all outputs as outputs. So gradients reach each leaf
once, as one sum, and an exception in a chunk leaves no partial ones. See `replaying/nodes.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import repeat
from typing import Any

import torch

from gradtools.arguments.batches import Batch
from gradtools.arguments.chunks import ChunkOptions, Chunks, Partition
from gradtools.torch import _upstream as upstream
from gradtools.torch.compiling import left_to_python
from gradtools.torch.functorch_wrappers import is_dual, unwrapped
from gradtools.torch.modes import NOTHING, unpacked, without_cached_weights
from gradtools.torch.replaying.consistency import RunKey, is_compiled, is_readable, run_key
from gradtools.torch.replaying.nodes import node_of
from gradtools.torch.replaying.recomputing import (
    Rows,
    first_pass_state,
    flattened,
    is_plain,
    is_recomputing,
    is_recorded,
    marked,
    pieces_of,
    untracked,
)
from gradtools.torch.replaying.replay import Forward
from gradtools.torch.replaying.summing import Sums, Weigh

Tensor = torch.Tensor
left_to_python(__name__)


def run_chunks(chunks: Chunks) -> tuple[list[Tensor], list[Tensor]]:
    with marked(chunks.caller):
        if upstream.is_exporting() or is_plain():  # exported programs cannot recompute
            rows, carry = [], [untracked(x) for x in chunks.carry]
            for i, piece in enumerate(pieces_of(chunks)):
                outs, carry = chunks.call(i, i, piece, chunks.shared, carry)
                rows.append(outs)
            _check_rows(chunks, rows)
            return _joined(chunks, rows), carry
        in_functorch = upstream.peek_interpreter_stack() is not None
        forward = Forward(chunks, in_functorch, chunks.options.latest.get("start"))
        if not in_functorch:
            chunks.options.latest["start"] = forward.start if forward.start.reached.lasts else None
        versions = [] if in_functorch else _versions(chunks)
        known = None if in_functorch else forward.evaluate(forward.xs, forward.shared)
        rows, carry = node_of(forward, forward.xs, forward.shared, known)
        _check_rows(chunks, rows, None if in_functorch else forward, versions)
        return _joined(chunks, rows), [*map(untracked, carry)]


def _versions(chunks: Chunks) -> list[int]:
    return [upstream.version_of(x) for x in chunks.shared if isinstance(x, Tensor)]


def _check_rows(
    chunks: Chunks, rows: Rows, forward: Forward | None = None, versions: Sequence[int] = ()
) -> None:
    """Raises unless the outputs of all chunks can be joined, as rows of examples.

    If they may be none, f is evaluated at another chunk size for the shapes of its outputs, and all
    state is restored. It is not if this was checked before, under modes that count or record
    operations, if f would be compiled for another size, or would wait for processes that do not run
    it.

    versions: Those of the shared arguments before the first pass.
    """
    if chunks.outputs.axes is None:
        return
    size, runs = chunks.cut.sizes[0], list[tuple[RunKey, int]]()  # each with its examples
    axes = chunks.outputs.axes
    doubtful = len(rows) < 2 or any(map(_is_doubtful, repeat(size), axes, *rows[:2]))

    def again(other: Chunks) -> list[torch.Size] | None:
        assert forward is not None
        if not forward.verifies or forward.accumulates or is_recorded() or is_compiled(forward):
            return None
        if upstream.count_of_dispatch_modes() or torch.distributed.is_initialized():
            return None
        if versions != _versions(chunks):
            return None  # f changes its arguments in place
        key = run_key(forward).for_aspect("rows")
        if key.is_verified():
            return None
        size, done = other.cut.sizes[0], sum(n for _, n in runs)
        pieces = []
        for x, axis in other.splits:
            start = min(done, x.shape[axis] - size)
            pieces.append(_copied(x.narrow(axis, start, size)))
        pieces += [_copied(x) for x in other.lists[0]]
        carry = [_copied(x) for x in forward.first_carry]
        cached = without_cached_weights() if upstream.caches_weights() else NOTHING
        with unpacked(), first_pass_state(forward), cached:  # no checkpoint counts its tensors
            outs, _ = other.call(0, 0, pieces, other.shared, carry)
        runs.append((key, size))
        return [y.shape for y in outs]

    # few examples are cheap, but f may not accept a single one
    sizes = size // 2 or 2, size + 1
    shapes = [[x.shape for x in row] for row in rows]
    pairs = [*zip(chunks.cut.sizes, shapes, strict=True)]
    rerun = again if doubtful and forward is not None else None
    chunks.outputs.check_rows(chunks, pairs, rerun, sizes, by_data=True)
    for key, _ in runs[-1:]:
        key.mark_verified()  # so that f is not run again for it


def _is_doubtful(size: int, axis: int, y: Tensor, of_next: Tensor) -> bool:
    """Whether an output of equally large chunks may not consist of rows of examples.

    It may be state (one number for each feature, or the same memory for every chunk), or a table of
    pairs. If not, f need not run again at another size.
    """
    rest = list(y.shape)
    length = rest.pop(axis)
    single = size == length == 1  # f may be a function of one example
    if not single and (length != size or size == 1 or not rest or size in rest):
        return True
    return is_readable(y) and y.data_ptr() == of_next.data_ptr()


def _copied(x: Any) -> Any:
    """A copy, which f may change in place."""
    if not isinstance(x, Tensor):
        return x
    return x.detach().clone().requires_grad_(x.requires_grad)


def checkpointed(
    backend: Any, f: Callable[..., Any], args: Any, kwargs: dict[str, Any], options: ChunkOptions
) -> Any:
    """f as one chunk, which is recomputed in the backward pass."""
    batch = Batch.whole(backend, "checkpoint", args, kwargs)
    every = [leaf.value for flat in batch.arguments for leaf in flat.leaves]
    leaves = [x for x in every if isinstance(x, Tensor)]
    levels = upstream.get_interpreter_stack() or ()
    is_differentiated = any(level.key() == upstream.TransformType.Grad for level in levels)
    if not is_differentiated and torch.is_grad_enabled():
        pushed = any(map(is_dual, leaves))  # forward mode alone saves nothing
        both = any(unwrapped(x).requires_grad for x in leaves) and not is_recomputing()
        is_differentiated = not pushed or both
    if upstream.is_exporting() or not is_differentiated:
        return f(*args, **kwargs)
    whole = Chunks.of(f, batch, Partition(1, 1), options)
    return whole.result(backend.run_chunks(whole)[0], [])


def sum_chunks(chunks: Chunks, weigh: Weigh | None = None) -> tuple[list[Tensor], list[Tensor]]:
    sums, carry = Sums(), chunks.carry
    with marked("chunked"):
        for i, piece in enumerate(pieces_of(chunks, own_versions=False)):
            outs, carry = chunks.call(i, i, piece, chunks.shared, carry)
            carry = [x.detach() if isinstance(x, Tensor) else x for x in carry]
            if weigh is None:
                sums.add(outs)
            else:
                sums.add_weighted(outs, weigh)
            del outs  # frees memory before the next chunk
    return (sums.total() if weigh is None else sums.means()), carry


def _joined(chunks: Chunks, rows: Rows) -> list[Tensor]:
    """The outputs of all chunks, concatenated; those of lists as one flat list."""
    axes = chunks.outputs.axes
    if axes is None:
        return flattened(rows)
    columns = zip(zip(*rows, strict=True), axes, strict=True)
    result = [torch.cat(column, axis) for column, axis in columns]
    if not chunks.cut.interleaved:
        return result
    order = torch.tensor(flattened(chunks.cut.rows)).argsort()
    pairs = zip(result, axes, strict=True)
    return [y.index_select(axis, order.to(y.device)) for y, axis in pairs]
