"""The blocks of a Jacobian: one for each output leaf and each input leaf.

Reverse mode pulls back a unit cotangent for each output entry, a row; forward mode pushes a unit
tangent for each input entry, a column.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import suppress
from itertools import accumulate, pairwise

from gradtools.arguments.batches import axis_moved
from gradtools.arguments.calls import Call
from gradtools.backend import Array, Backend, CannotPush, Evaluation, Fun
from gradtools.disconnected_inputs import refuse_cut

Push = Callable[[list[Array]], list[Array]]


def blocks(
    backend: Backend, fun: Fun, leaves: list[Array], mode: str, chunk_size: int | None
) -> list[list[Array]]:
    """For each output leaf and each input leaf, of shapes s and t, an array of shape s + t.

    mode: "forward", "reverse" or "auto". "auto" evaluates fun once for its pullback; if the output
        is much larger than the input, and the pullback can be transposed, it pushes tangents
        through the transposed pullback.
    """
    if mode == "forward":
        return _forward(backend, fun, leaves, chunk_size)
    evaluation = backend.vjp(fun, leaves, groups=None, once=False)
    push = None
    if mode == "auto":
        parts = [y for y in evaluation.outs if backend.is_complex(y)]  # two cotangents an entry
        if _size(evaluation.outs) + _size(parts) > 2 * _size(leaves):
            push = evaluation.transposed()
    if push is not None:
        with suppress(CannotPush):
            return _columns(backend, push, leaves, chunk_size)
    return _rows(backend, fun, leaves, evaluation, chunk_size)


def _size(xs: list[Array]) -> int:
    return sum([math.prod(x.shape) for x in xs])


def _rows(
    backend: Backend, fun: Fun, leaves: list[Array], evaluation: Evaluation, chunk_size: int | None
) -> list[list[Array]]:
    """The blocks in reverse mode: the pullback of a batch of unit cotangents per output leaf."""
    full = [x for x in leaves if not _is_empty(x)]

    def rows_of(k: int, basis: Array) -> list[Array]:
        def pull(unit: Array) -> list[Array]:
            cts = [unit if i == k else None for i in range(len(evaluation.outs))]
            pulled = evaluation.pullback(cts)
            if isinstance(fun, Call):  # for a gradient function the caller checks
                refuse_cut(fun, evaluation.cut(pulled))
            return [g for g in backend.filled(pulled, leaves) if not _is_empty(g)]

        return backend.map_batches(pull, [basis], chunk_size)

    def block_row(k: int, y: Array) -> list[Array]:
        if _is_empty(y) or not full:
            return [_empty_block(backend, y, x) for x in leaves]
        rows = rows_of(k, backend.unit_basis(y))
        if backend.is_complex(y):  # the inputs are real, so each part needs its own pullback
            imaginary = rows_of(k, 1j * backend.unit_basis(y))
            rows = [re + 1j * im for re, im in zip(rows, imaginary, strict=True)]
        left = iter(rows)
        return [
            _empty_block(backend, y, x)
            if _is_empty(x)
            else next(left).reshape((*y.shape, *x.shape))
            for x in leaves
        ]

    return [block_row(k, y) for k, y in enumerate(evaluation.outs)]


def _forward(
    backend: Backend, fun: Fun, leaves: list[Array], chunk_size: int | None
) -> list[list[Array]]:
    restart = backend.restarting(fun, leaves, -(-_size(leaves) // chunk_size) if chunk_size else 1)

    def push(tangents: list[Array]) -> list[Array]:
        restart()
        return backend.jvp(fun, leaves, tangents)[2]

    return _columns(backend, push, leaves, chunk_size)


def _columns(
    backend: Backend, push: Push, leaves: list[Array], chunk_size: int | None
) -> list[list[Array]]:
    """The blocks by pushing the unit tangents of all leaves as one batch."""
    ends = [*accumulate([math.prod(x.shape) for x in leaves], initial=0)]
    count = ends[-1]
    if count:
        pairs = zip(leaves, pairwise(ends), strict=True)
        bases = [backend.unit_basis(x, start, count - end) for x, (start, end) in pairs]
    else:  # one empty tangent, for the outputs' shapes
        bases = [x.reshape((1, *x.shape)) for x in leaves]
    mapped = backend.map_batches(lambda *units: push([*units]), bases, chunk_size, one_draw=True)
    last = [axis_moved(backend, column[:count], 0, -1) for column in mapped]
    return [
        [
            column[..., start:end].reshape((*column.shape[:-1], *x.shape))
            for x, (start, end) in zip(leaves, pairwise(ends), strict=True)
        ]
        for column in last
    ]


def in_precision_of(backend: Backend, x: Array, block: Array) -> Array:
    """A block cast to the precision of the input leaf x, which reverse mode gives."""
    if not backend.is_complex(block):
        return block if block.dtype == x.dtype else backend.cast(block, x)
    real, imaginary = backend.cast(block.real, x), backend.cast(block.imag, x)
    return block if real.dtype == block.real.dtype else real + 1j * imaginary


def _is_empty(x: Array) -> bool:
    return 0 in x.shape


def _empty_block(backend: Backend, y: Array, x: Array) -> Array:
    """The Jacobian of an empty y, or in an empty x."""
    empty = y if _is_empty(y) else x
    return backend.zeros_like(empty).reshape((*y.shape, *x.shape))
