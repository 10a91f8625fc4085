"""The blocks of a Jacobian: one for each output leaf and each input leaf.

Reverse mode pulls back a unit cotangent for each output entry, a row; forward mode pushes a unit
tangent for each input entry, a column.
"""

from __future__ import annotations

import math

from gradtools.arguments.batches import axis_moved
from gradtools.arguments.calls import Call
from gradtools.backend import Array, Backend, Fun
from gradtools.disconnected_inputs import refuse_cut


def blocks(
    backend: Backend, fun: Fun, leaves: list[Array], mode: str, chunk_size: int | None
) -> list[list[Array]]:
    """For each output leaf, for each input leaf, an array of shape s + t."""
    return (_columns if mode == "forward" else _rows)(backend, fun, leaves, chunk_size)


def _rows(
    backend: Backend, fun: Fun, leaves: list[Array], chunk_size: int | None
) -> list[list[Array]]:
    result = backend.vjp(fun, leaves, groups=None, once=False)
    full = [x for x in leaves if not _is_empty(x)]

    def rows_of(k: int, basis: Array) -> list[Array]:
        def pull(unit: Array) -> list[Array]:
            cts = [unit if i == k else None for i in range(len(result.outs))]
            pulled = result.pullback(cts)
            if isinstance(fun, Call):  # and no gradient, which is a derivative itself
                refuse_cut(fun, result.cut(pulled))
            pairs = zip(leaves, pulled, strict=True)
            filled = [backend.zeros_like(x) if g is None else g for x, g in pairs]
            return [g for g in filled if not _is_empty(g)]

        return backend.map_batches(pull, [basis], chunk_size)

    def block_row(k: int, y: Array) -> list[Array]:
        if _is_empty(y) or not full:
            return [_empty_block(backend, y, x) for x in leaves]
        rows = rows_of(k, backend.unit_basis(y))
        if backend.is_complex(y):  # of real inputs: a pullback sees one part at a time
            imaginary = rows_of(k, 1j * backend.unit_basis(y))
            rows = [re + 1j * im for re, im in zip(rows, imaginary, strict=True)]
        left = iter(rows)
        return [
            _empty_block(backend, y, x)
            if _is_empty(x)
            else next(left).reshape((*y.shape, *x.shape))
            for x in leaves
        ]

    return [block_row(k, y) for k, y in enumerate(result.outs)]


def _columns(
    backend: Backend, fun: Fun, leaves: list[Array], chunk_size: int | None
) -> list[list[Array]]:
    count = sum([-(-math.prod(x.shape) // chunk_size) if chunk_size else 1 for x in leaves])
    restart = backend.restarting(fun, leaves, count)
    columns = []
    for k, x in enumerate(leaves):
        # An empty leaf has no unit tangents; one empty tangent tells the outputs' shapes.
        basis = x.reshape((1, *x.shape)) if _is_empty(x) else backend.unit_basis(x)

        def push(unit: Array, k: int = k) -> list[Array]:
            restart()
            zeros = backend.zeros_like
            moving = [unit if i == k else zeros(leaf) for i, leaf in enumerate(leaves)]
            return backend.jvp(fun, leaves, moving)[2]

        mapped = backend.map_batches(push, [basis], chunk_size, one_draw=True)
        pushed = [c[: math.prod(x.shape)] for c in mapped]
        last = [axis_moved(backend, column, 0, -1) for column in pushed]
        columns.append([c.reshape((*c.shape[:-1], *x.shape)) for c in last])
    return [list(row) for row in zip(*columns, strict=True)]


def _is_empty(x: Array) -> bool:
    return 0 in x.shape


def _empty_block(backend: Backend, y: Array, x: Array) -> Array:
    """The Jacobian of an empty y, or in an empty x."""
    empty = y if _is_empty(y) else x
    return backend.zeros_like(empty).reshape((*y.shape, *x.shape))
