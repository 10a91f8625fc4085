"""Runs the chunks of `chunked`, `checkpoint` and `microbatched_value_and_grad`.

Each chunk is a program of `recomputation.py`, which is computed again in the backward pass. In
forward mode, and where no graph is recorded, the chunks run as a plain loop.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from functools import cache
from typing import Any

import torch

from gradtools.arguments.batches import Batch
from gradtools.arguments.chunks import (
    ChunkOptions,
    Chunks,
    Partition,
    progress_bar,
    warn_of_batch_norm,
)
from gradtools.errors import GradtoolsError
from gradtools.torch import _upstream as upstream
from gradtools.torch.accumulate import is_distributed
from gradtools.torch.captured_tensors import as_read_now
from gradtools.torch.compiling import left_to_python
from gradtools.torch.functorch_wrappers import alive, is_dual, is_wrapped
from gradtools.torch.operation_marks import is_plain, marked
from gradtools.torch.recomputation import Program, first_in_functorch
from gradtools.torch.state import Held, RunState

Tensor = torch.Tensor
Tensors = list[Tensor]
left_to_python(__name__)
_NOTHING = nullcontext()
_JVP = upstream.TransformType.Jvp


def run_chunks(chunks: Chunks) -> tuple[list[Any], list[Any]]:
    """Returns the concatenated output leaves, which are differentiable, and the last carry."""
    with marked(chunks.caller):
        rows, carry = [], [_bare(x) for x in chunks.carry]
        held = held_by(chunks) if recomputes() else None
        state: Any = held and RunState.now(held)
        for i, pieces in _counted(chunks):
            chunk = Chunk(chunks, i, pieces, carry)
            if held is None:
                outs = chunk.run(chunk.xs)
            else:
                outs, state = chunk.recomputed(held, state)
            carry = chunk.after
            rows.append(chunk.merged(outs))
        return _joined(chunks, rows), carry


def held_by(chunks: Chunks) -> Held | None:
    """Returns the objects that contain f's state, or None if chunks are not recomputed.

    Raises an error if f contains a data-parallel wrapper, and warns if f contains batch
    normalization in training mode.
    """
    if upstream.is_exporting() or is_plain():
        return None
    given = [*chunks.shared, *[x for x, _ in chunks.splits]]
    tensors = [x for x in given if isinstance(x, Tensor)]
    others = [x for x in chunks.shared if not isinstance(x, Tensor)]
    held = Held([chunks.call.f, *others], {x.device.type for x in tensors})
    for module in held.modules:
        kind = _wrapper(type(module))  # type: ignore[arg-type]
        # Inside of FSDP2's own forward, the parameters have already been gathered.
        if kind and (kind != "FSDPModule" or any(map(is_distributed, module.parameters()))):
            raise GradtoolsError(
                f"{chunks.caller}: f is or contains a {kind}, which gathers parameters or reduces "
                "gradients around each call, but here f is called several times. "
                "Reverse the nesting: DistributedDataParallel around a module whose forward "
                f"calls {chunks.caller} on the plain module, or fully_shard around a module whose "
                f"forward calls {chunks.caller} on its layers or on one of its methods."
            )
        if chunks.cut.count > 1 and module.training and isinstance(module, upstream.BatchNorm):
            name = getattr(chunks.call.f, "__name__", type(chunks.call.f).__name__)
            warn_of_batch_norm(("torch", name), f"chunked: {type(module).__name__} is")
    return held


_WRAPPERS = ("DistributedDataParallel", "DataParallel", "FullyShardedDataParallel", "FSDPModule")


@cache
def _wrapper(kind: type) -> str | None:
    """Returns the name of the distributed wrapper class in the MRO of `kind`, or None."""
    names = [k.__name__ for k in kind.__mro__ if k.__module__.startswith("torch.")]
    return next((name for name in names if name in _WRAPPERS), None)


def recomputes() -> bool:
    """Returns whether chunks are recomputed: a graph must be recorded, and no jvp may be active."""
    if upstream.is_exporting() or is_plain() or not torch.is_grad_enabled():
        return False
    levels = upstream.get_interpreter_stack() or ()
    pushed = levels and upstream.forward_level() >= 0  # torch.func hides the tangents
    return not pushed and all(level.key() != _JVP for level in levels)


def verifies(options: ChunkOptions, program: Program) -> bool:
    """Returns whether to compare the outputs of `program` with the outputs of its recomputation.

    By default, outputs are compared only until one comparison has succeeded.
    """
    if options.verify is None:
        program.verified = lambda: options.latest.update(verified=True)
    return options.verify is not False and "verified" not in options.latest


class Chunk:
    """Evaluates f on one chunk.

    The method `run` is a function of xs, the tensors among the arguments.

    Attributes:
        after: The carry that f returned for this chunk.
        others: The outputs that are not tensors, as a dictionary from positions to outputs.
    """

    def __init__(self, chunks: Chunks, i: int, pieces: list[Any], carry: list[Any]) -> None:
        self._chunks, self._i, self._carry, self._count = chunks, i, carry, len(pieces)
        self._flat = [*pieces, *chunks.shared]
        self._places = [k for k, x in enumerate(self._flat) if isinstance(x, Tensor)]
        self.xs = [self._flat[k] for k in self._places]
        self.after, self.others = list[Any](), dict[int, Any]()

    def run(self, xs: Sequence[Tensor]) -> Tensors:
        full = list(self._flat)
        for k, x in zip(self._places, xs, strict=True):
            full[k] = x
        i, count = self._i, self._count
        outs, after = self._chunks.call(i, i, full[:count], full[count:], self._carry)
        self.after = [_bare(x) for x in after]
        self.others = {k: y for k, y in enumerate(outs) if not isinstance(y, Tensor)}
        return [y for y in outs if isinstance(y, Tensor)] if self.others else outs

    def merged(self, ys: Tensors) -> list[Any]:
        """Returns all outputs of the chunk: the tensors `ys` and the non-tensors in `others`."""
        if not self.others:
            return ys
        left, count = iter(ys), len(ys) + len(self.others)
        return [self.others[k] if k in self.others else next(left) for k in range(count)]

    def recomputed(self, held: Held, state: RunState) -> tuple[Tensors, RunState]:
        """Returns the outputs and the state after the run.

        The backward pass recomputes the outputs.
        """
        program, xs = Program(self._chunks.caller, self.run, held, state), as_read_now(self.xs)
        verify = verifies(self._chunks.options, program)
        if upstream.peek_interpreter_stack() is not None:
            ys = first_in_functorch(program, xs, verify)
            self.after = [alive(x) if isinstance(x, Tensor) else x for x in self.after]
            return ys, state.again()
        pushed = upstream.forward_level() >= 0  # tangents propagate through f's own operations
        if pushed and any(map(is_dual, (*xs, *held.tensors, *held.parameters))):
            return self.run(xs), state.again()
        outs, state = program.begin(xs, verify, [x for x in self._carry if isinstance(x, Tensor)])
        return (outs if program.known is None else program.attached(xs)), state


def _joined(chunks: Chunks, rows: list[list[Any]]) -> list[Any]:
    """Concatenates the outputs of all chunks.

    Outputs that are lists are concatenated into a single list.
    """
    axes = chunks.outputs.axes
    if axes is None:
        return [y for row in rows for y in row]
    pairs = zip(zip(*rows, strict=True), axes, strict=True)
    outs: list[Any] = [
        torch.cat(column, axis) if len(column) > 1 else column[0] for column, axis in pairs
    ]
    if chunks.cut.interleaved:
        order = torch.tensor([r for rows in chunks.cut.rows for r in rows]).argsort()
        joined: Any = zip(outs, axes, strict=True)
        outs = [y.index_select(axis, order.to(y.device)) for y, axis in joined]
    return outs


def _bare(x: Any) -> Any:
    return x.detach() if isinstance(x, Tensor) else x


def _counted(chunks: Chunks) -> Iterator[tuple[int, list[Any]]]:
    """Yields the index of each chunk and the chunk's slices of the split arrays and lists."""
    columns, lists = [_parts(chunks, x, axis) for x, axis in chunks.splits], chunks.lists
    bar = chunks.options.progress and chunks.cut.count > 1
    with progress_bar(chunks.cut.count) if bar else _NOTHING as shown:
        for i in range(chunks.cut.count):
            yield i, [*(column[i] for column in columns), *lists[i]]
            if shown is not None:
                shown.update()


def _parts(chunks: Chunks, x: Tensor, axis: int) -> Sequence[Tensor]:
    if chunks.cut.interleaved:  # one gather operation; its backward pass is one scatter operation
        rows = [r for rows in chunks.cut.rows for r in rows]
        x = x.index_select(axis, torch.tensor(rows, device=x.device))
    return x.split(chunks.cut.sizes, axis)


def checkpointed(
    backend: Any, f: Callable[..., Any], args: Any, kwargs: dict[str, Any], options: ChunkOptions
) -> Any:
    """Evaluates f as a single chunk, which is recomputed in the backward pass."""
    if not recomputes():
        return f(*args, **kwargs)
    batch = Batch.whole(backend, "checkpoint", args, kwargs)
    whole = Chunks.of(f, batch, Partition(1, 1), options)
    return whole.result(backend.run_chunks(whole)[0], [])


# --- sums over chunks ----------------------------------------------------------------------------


def sum_chunks(chunks: Chunks, weigh: Any = None) -> tuple[list[Any], list[Any]]:
    """Returns the sums of the output leaves over chunks, and the last carry.

    weigh: See `Backend.sum_chunks`.
    """
    sums, carry = _Sums(weigh), chunks.carry
    for i, pieces in _counted(chunks):
        outs, carry = chunks.call(i, i, pieces, chunks.shared, carry)
        carry = [_bare(x) for x in carry]
        sums.add(outs)
        del outs  # frees memory before the next chunk
    return sums.total(), carry


class _Sums:
    """Accumulates the outputs of chunks, in place if all outputs are plain tensors on the CPU.

    weigh: If given, each term is `weigh(w, x)`, where w is a chunk's first output.
    """

    def __init__(self, weigh: Any) -> None:
        self._weigh, self._sums, self._in_place = weigh, list[Tensor](), True

    def add(self, terms: Tensors) -> None:
        self._in_place = self._in_place and all(map(_is_plain, terms))
        # `alpha` of an addition must be an int for integer tensors.
        number = terms[0].item() if self._in_place and self._weigh else 1
        if self._in_place and self._sums:  # avoids a copy of the weighted terms
            sums = self._sums
            if self._weigh is not None:
                sums[0].add_(terms[0])
                sums, terms = sums[1:], terms[1:]
            if number and terms:  # with weight zero, terms may be NaN
                upstream.add_each_(sums, terms, alpha=number)
            return
        if self._weigh is not None:
            w, *xs = terms
            terms = [w.clone(), *[self._weigh(w, x) for x in xs]]
        elif self._in_place:
            terms = [x.clone() for x in terms]
        if not self._sums:
            self._sums = terms
        else:
            self._sums = [s + x for s, x in zip(self._sums, terms, strict=True)]

    def total(self) -> Tensors:
        """Returns the sums or, if `weigh` is given, the sum of weights and the weighted means."""
        if self._weigh is None or not self._sums:
            return self._sums
        total, *rest = self._sums
        if self._in_place:
            upstream.divide_each_(rest, total.item())
            return [total, *rest]
        return [total, *[x / total.to(x.real.dtype) for x in rest]]


def _is_plain(x: Tensor) -> bool:
    plain = type(x) is Tensor and x.device.type == "cpu" and x.layout is torch.strided
    return plain and not (x.requires_grad or is_wrapped(x) or is_dual(x))
