"""Chunks in PyTorch: a first pass that keeps no graph, and one backward pass for each chunk.

The first pass runs in the caller's grad mode, since without one some modules compute otherwise;
each chunk's graph tells which leaves it reached and is dropped. Then one autograd node takes all
pieces, shared arguments and leaves in, and gives all outputs out: so gradients arrive once, as
one sum, and an exception in a chunk leaves none behind. `programs` computes all of that.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from gradtools.arguments.batches import Batch
from gradtools.arguments.chunks import ChunkOptions, Chunks, Partition, unlike_outputs
from gradtools.torch import _upstream as upstream
from gradtools.torch.compiling import left_to_python
from gradtools.torch.functorch_wrappers import is_dual, unwrapped
from gradtools.torch.replaying.guards import here, is_plain, is_replaying, marked
from gradtools.torch.replaying.nodes import node_of
from gradtools.torch.replaying.replay import Forward
from gradtools.torch.replaying.slicing import Rows, flattened, pieces_of, untracked
from gradtools.torch.replaying.summing import Sums

Tensor = torch.Tensor
left_to_python(__name__)


def run_chunks(chunks: Chunks) -> tuple[list[Tensor], list[Tensor]]:
    before, here.mark = here.mark, here.mark or chunks.caller
    try:
        exporting = torch.compiler.is_exporting()  # a program in which nothing is run again
        return plain_loop(chunks) if exporting or is_plain() else _run(chunks)
    finally:
        here.mark = before


def plain_loop(chunks: Chunks) -> tuple[list[Tensor], list[Tensor]]:
    """The same by the loop whose graphs are all kept."""
    rows, carry = [], [untracked(x) for x in chunks.carry]
    for i, piece in enumerate(pieces_of(chunks)):
        outs, carry = chunks.call(i, i, piece, chunks.shared, carry)
        rows.append(outs)
    return _joined(chunks, rows), carry


def _run(chunks: Chunks) -> tuple[list[Tensor], list[Tensor]]:
    beneath = upstream.peek_interpreter_stack() is not None
    forward = Forward(chunks, beneath, chunks.options.latest.get("start"))
    if not beneath:
        chunks.options.latest["start"] = forward.start if forward.start.reached.lasts else None
    known = None if beneath else forward.evaluate(forward.xs, forward.shared)
    rows, carry = node_of(forward, forward.xs, forward.shared, known)
    return _joined(chunks, rows), [*map(untracked, carry)] if beneath else forward.carry


def checkpointed(
    backend: Any, f: Callable[..., Any], args: Any, kwargs: dict[str, Any], options: ChunkOptions
) -> Any:
    """f as a program of one chunk, which is computed again in the backward pass."""
    batch = Batch.whole(backend, "checkpoint", args, kwargs)
    leaves = [x for xs in batch.leaves for x in xs if isinstance(x, Tensor)]
    if torch.compiler.is_exporting() or not _is_differentiated(leaves):
        return f(*args, **kwargs)
    whole = Chunks.of(f, batch, Partition(1, 1), options)
    return whole.result(run_chunks(whole)[0], [])


def _is_differentiated(leaves: list[Tensor]) -> bool:
    """Whether reverse mode may ask for a derivative, at a level of functorch or beneath."""
    levels = upstream.get_interpreter_stack() or ()
    if any(level.key() == upstream.TransformType.Grad for level in levels):
        return True
    if not torch.is_grad_enabled():
        return False
    pushed = any(map(is_dual, leaves))  # forward mode alone keeps nothing
    both = any(unwrapped(x).requires_grad for x in leaves) and not is_replaying()
    return not pushed or both


def sum_chunks(chunks: Chunks) -> list[Tensor]:
    sums = Sums()
    with marked("chunked"):
        for i, piece in enumerate(pieces_of(chunks)):
            sums.add(chunks.call(i, i, piece, chunks.shared, [])[0])
    return sums.total()


def _joined(chunks: Chunks, rows: Rows) -> list[Tensor]:
    """The outputs of all chunks, joined; those of lists one after the other."""
    axes = chunks.outputs.axes
    if axes is None:
        return flattened(rows)
    columns = zip(zip(*rows, strict=True), axes, strict=True)
    result = [_concatenated(chunks, column, axis) for column, axis in columns]
    if not chunks.cut.interleaved:
        return result
    order = torch.tensor(flattened(chunks.cut.rows)).argsort()
    pairs = zip(result, axes, strict=True)
    return [y.index_select(axis, order.to(y.device)) for y, axis in pairs]


def _concatenated(chunks: Chunks, column: tuple[Tensor, ...], axis: int) -> Tensor:
    first = list(column[0].shape)
    for i, x in enumerate(column):
        first[axis] = x.shape[axis] if len(x.shape) == len(first) else -1
        if list(x.shape) != first:
            raise unlike_outputs(chunks.cut, axis, i, x.shape, column[0].shape)
    return torch.cat(column, axis)
