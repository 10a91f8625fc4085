"""Sparsity propagation: the input entries that each entry of an array may depend on.

A dependence is a boolean matrix in SciPy's CSR format, with one row for each entry of the array and
one column for each entry of the input. There are four kinds of transfer functions for a framework's
operations: entrywise, moving entries, reducing groups of entries, and, conservatively, from every
entry to every entry. Each returns a superset of the true dependence, and none reads a value that
depends on the input.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from gradtools.errors import GradtoolsError

Csr = Any
_LARGEST = 5 * 10**7  # pairs that a matrix product may list; beyond, its operand counts as dense


class Entries(NamedTuple):
    """An array whose entries depend on the input."""

    shape: tuple[int, ...]  # the array's shape
    matrix: Csr  # the dependence, of shape (size of the array, size of the input)


class AbstractArray:
    """An array of a traced program: the dependence of its entries, its constant value, or neither.

    An array whose entries depend on nothing is constant, even if its value is not known.
    """

    def __init__(self, shape: Sequence[int], entries: Entries | None, value: Any = None) -> None:
        self.shape, self.entries, self.value = tuple(shape), entries, value

    def pattern(self, inputs: int) -> Csr:
        """The dependence of its entries on this number of inputs."""
        size = math.prod(self.shape), inputs
        return empty(size) if self.entries is None else self.entries.matrix


def scipy_sparse(caller: str) -> Any:
    """`scipy.sparse`; raises with the name of the pip extra if it is missing."""
    try:
        import networkx as _  # noqa: F401
        import scipy.sparse
    except ModuleNotFoundError as error:
        raise GradtoolsError(
            f"{caller}: sparsity needs SciPy and NetworkX; {error.name} is not installed. Fix: "
            'pip install "gradtools[sparse]".'
        ) from None
    return scipy.sparse


def _sparse() -> Any:
    import scipy.sparse

    return scipy.sparse


def identity(shape: Sequence[int]) -> Entries:
    """The dependence of the input itself."""
    return Entries(tuple(shape), _sparse().identity(math.prod(shape), bool, "csr"))


def empty(size: tuple[int, int]) -> Csr:
    """The dependence of a constant."""
    return _sparse().csr_matrix(size, dtype=bool)


def index_array(shape: Sequence[int], start: int = 0) -> np.ndarray:
    """The flat indices of an array's entries (from `start` on), in its shape."""
    return np.arange(start, start + math.prod(shape)).reshape(tuple(shape))


def entrywise(shape: Sequence[int], operands: Sequence[Entries]) -> Entries:
    """Entry i of the result depends on entry i of each operand, after broadcasting."""
    total = None
    for x in operands:
        at = np.broadcast_to(index_array(x.shape), tuple(shape)).reshape(-1)
        part = x.matrix if x.shape == tuple(shape) else x.matrix[at]
        total = part if total is None else total + part
    return Entries(tuple(shape), total)


def moved(operands: Sequence[Entries], index: np.ndarray) -> Entries:
    """Each entry of the result is one entry of the operands, or a constant (a gather).

    Args:
        operands: The arrays; their entries are numbered consecutively, in this order.
        index: For each entry of the result the number of its source; negative for a constant.
    """
    stack = [x.matrix for x in operands]
    empty = _sparse().csr_matrix((1, stack[0].shape[1]), dtype=bool)
    at = index.reshape(-1).astype(np.int64)
    total = sum(x.shape[0] for x in stack)
    rows = _sparse().vstack([*stack, empty], "csr")[np.where(at < 0, total, at)]
    return Entries(index.shape, rows)


def reduced(x: Entries, shape: Sequence[int], group: np.ndarray) -> Entries:
    """Each entry of the result depends on all entries of x in its group.

    group: For each entry of x the flat index of its entry of the result.
    """
    matrix = _summed(x, group.reshape(-1), np.arange(group.size), math.prod(shape))
    return Entries(tuple(shape), matrix)


def _summed(x: Entries, rows: np.ndarray, columns: np.ndarray, count: int) -> Csr:
    """A matrix of so many rows; of these `rows` each depends on the entry of x in `columns`."""
    places = np.ones(rows.size, bool), (rows, columns)
    return _sparse().csr_matrix(places, (count, x.matrix.shape[0])) @ x.matrix


def over_axes(x: Entries, axes: Sequence[int], keepdims: bool = False) -> Entries:
    """The dependence of a reduction over axes."""
    axes = tuple([a % max(len(x.shape), 1) for a in axes])
    kept = tuple([1 if i in axes else n for i, n in enumerate(x.shape)])
    group = np.broadcast_to(index_array(kept), x.shape)
    shape = kept if keepdims else tuple([n for i, n in enumerate(x.shape) if i not in axes])
    return reduced(x, shape, group)


def along(x: Entries, axes: Sequence[int]) -> Entries:
    """Each entry depends on all entries of its line along the axes: a cumulative sum, a softmax."""
    return entrywise(x.shape, [over_axes(x, axes, keepdims=True)])


def everything(shape: Sequence[int], operands: Sequence[Entries]) -> Entries:
    """Every entry of the result depends on every entry of the operands."""
    size = math.prod(shape)
    rows = [reduced(x, (1,), np.zeros(x.matrix.shape[0], np.int64)) for x in operands]
    row = entrywise((1,), rows)
    return Entries(tuple(shape), row.matrix[np.zeros(size, np.int64)])


def product(
    operands: Sequence[AbstractArray],
    indices: Sequence[np.ndarray],
    nonzero: Callable[[Any], np.ndarray],
) -> Csr | None:
    """The dependence of a batch of matrix products, of shape (batch, i, j).

    Args:
        operands: The two arrays.
        indices: For each the indices of its entries, of shapes (batch, i, k) and (batch, j, k).
        nonzero: Where a constant is not zero, in its shape.

    Returns:
        A matrix with batch * i * j rows; None if both are constant.
    """
    (batch, i, k), (_, j, _) = (at.shape for at in indices)
    pairs = list(zip(operands, indices, strict=True))
    a, b = (None if x.entries is None else moved([x.entries], at) for x, at in pairs)
    masks = [
        nonzero(x.value).reshape(-1)[at] if x.entries is None and x.value is not None else None
        for x, at in pairs
    ]
    out = index_array((batch, i, j))
    total = None
    for x, where, n, m in ((a, masks[1], i, j), (b, masks[0], j, i)):
        if x is None:
            continue
        if where is not None and int(where.sum()) * n <= _LARGEST:
            at, to, of = np.nonzero(where)  # batch, the constant's own row, the sum's index
            rows = (out[at, :, to] if x is a else out[at, to, :]).reshape(-1)
            cols = index_array((batch, n, k))[at, :, of].reshape(-1)
            part = _summed(x, rows, cols, out.size)
        else:
            line = over_axes(Entries((batch, n, k), x.matrix), (2,))
            at = np.broadcast_to(index_array((batch, n))[:, :, None], (batch, n, m))
            part = line.matrix[(at if x is a else at.swapaxes(1, 2)).reshape(-1)]
        total = part if total is None else total + part
    return total


def windows(
    x: Entries, patches: np.ndarray, kernel: np.ndarray | None, out_channels: int
) -> Entries:
    """A convolution with a constant kernel.

    Args:
        x: The operand.
        patches: The indices of the entries of x, of shape (n, groups, inputs of a window,
            positions); negative for padding.
        kernel: Where the kernel is nonzero, of shape (out_channels, inputs of a window); None if
            it is not known.
        out_channels: The number of output channels of all groups.

    Returns:
        Entries of shape (n, out_channels, positions).
    """
    n, groups, width, positions = patches.shape
    per = out_channels // groups
    out = index_array((n, out_channels, positions))
    rows, cols = list[np.ndarray](), list[np.ndarray]()
    for o in range(out_channels):
        used = np.arange(width) if kernel is None else np.flatnonzero(kernel[o])
        taken = patches[:, o // per, used, :]
        where = taken >= 0
        rows.append(np.broadcast_to(out[:, o, None, :], taken.shape)[where])
        cols.append(taken[where])
    columns = np.concatenate(cols).astype(np.int64)
    return Entries(out.shape, _summed(x, np.concatenate(rows), columns, out.size))
