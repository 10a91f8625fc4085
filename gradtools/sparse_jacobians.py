"""Computes sparse Jacobians and Hessians with a given sparsity pattern by graph coloring.

Each tangent is a sum of unit vectors, which selects columns that share no row (structurally
orthogonal columns); each cotangent selects rows that share no column. Each nonzero entry of the
Jacobian is therefore an entry of a product (Curtis, Powell and Reid, On the estimation of sparse
Jacobian matrices, 1974). NetworkX computes a greedy coloring. If the pattern omits a nonzero entry,
this entry is added to another entry of the result. To detect omitted entries, the products of the
Jacobian and of the result with a random vector are compared.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np

from gradtools.arguments.calls import Call
from gradtools.backend import Array, Fun
from gradtools.errors import GradtoolsError

Csr = Any
_EPS = {"float64": 2.0**-52, "float32": 2.0**-23, "float16": 2.0**-10, "bfloat16": 2.0**-7}
_EDGES = 2 * 10**7  # with more edges, every column gets its own color


def sparse_jacobian(
    call: Call,
    fun: Fun,
    sparsity: Any,
    mode: str,
    chunk_size: int | None,
    symmetric: bool = False,
) -> Any:
    """Computes the Jacobian of a call as the framework's sparse array.

    fun: The function to differentiate: the call, or its gradient for a Hessian.
    symmetric: Whether the result is a Hessian; the pattern may then omit (j, i) if it has (i, j).
    """
    backend = call.backend
    if any(map(backend.is_traced, backend.flatten(sparsity)[0])):
        raise GradtoolsError(
            f"{call.caller}: sparsity is a traced array, so its values are not known. Close over a "
            "concrete pattern instead of passing it through jit or vmap."
        )
    x = _only(call, call.leaves, "the argument")
    pattern = _pattern(call.caller, sparsity, tuple(x.shape))
    if symmetric and pattern.shape[0] != pattern.shape[1]:
        raise GradtoolsError(
            f"{call.caller}: sparsity has shape {pattern.shape}; expected a square matrix."
        )
    if symmetric:
        pattern = (pattern + pattern.T).tocsr()
    by_rows, colours = _coloured(pattern, mode)

    if by_rows:
        evaluation = backend.vjp(fun, call.leaves, groups=None, once=False)
        like = y = _only(call, evaluation.outs, "the output")

        def product(unit: Array) -> list[Array]:
            return backend.filled(evaluation.pullback([unit]), [x])
    else:
        like, y = x, None

        def product(unit: Array) -> list[Array]:
            restart()
            return backend.jvp(fun, [x], [unit])[2]

    if y is not None:
        _check_rows(call, pattern, y)
    count = max(1, int(colours.max(initial=0)) + 1)
    restart = backend.restarting(fun, [x], -(-(count + 1) // (chunk_size or count + 1)))
    units = (np.arange(count)[:, None] == colours).astype(np.float32)
    signs = np.random.default_rng(20).choice(np.array([-1.5, -1, 1, 1.5], np.float32), colours.size)
    units = np.concatenate([units, signs[None]])
    array = backend.asarray(units.reshape((count + 1, *like.shape)), like)
    # The zeros have the type of `like`, which may vary over the devices of a JAX shard_map.
    seeds = backend.xp.astype(array, like.dtype) + backend.zeros_like(like)
    products = backend.map_batches(product, [seeds], chunk_size, one_draw=not by_rows)
    if y is None:
        y = _only(call, [p[0] for p in products], "the output")
        _check_rows(call, pattern, y)

    entries = pattern.tocoo()
    rows, columns = entries.row.astype(np.int64), entries.col.astype(np.int64)
    of_entries, within = (colours[rows], columns) if by_rows else (colours[columns], rows)
    width = pattern.shape[1] if by_rows else pattern.shape[0]
    values = products[0].reshape((-1,))[of_entries * width + within]
    here, there = (columns, rows) if by_rows else (rows, columns)
    values = _verified(call, values, here, signs[there], products[0][-1].reshape((-1,)))
    shape = (*y.shape, *x.shape)
    index = np.zeros((0, rows.size), int)
    if shape:
        flat = np.ravel_multi_index((rows, columns), pattern.shape)
        index = np.stack(np.unravel_index(flat, shape))
    return backend.submodule("sparsity", call.caller).sparse_array(index, values, shape)


def _verified(
    call: Call, values: Array, places: np.ndarray, signs: np.ndarray, product: Array
) -> Array:
    """Returns `values` if the pattern omits no nonzero entry.

    The product of the sparse result with a random vector (the sums of `values * signs` over equal
    `places`) is compared with the true product. In a trace, where values cannot be read, all values
    are replaced by NaN if the products differ.

    Raises:
        GradtoolsError: The products differ.
    """
    backend, xp = call.backend, call.backend.xp
    summed = backend.submodule("sparsity", call.caller).summed
    plain, true = backend.stop_gradient(values), backend.stop_gradient(product)
    terms = plain * xp.astype(backend.asarray(signs, plain), plain.dtype)
    ours, sizes = (summed(places, t, true) for t in (terms, abs(terms)))
    sizes = xp.where(xp.isfinite(sizes + true), sizes + abs(true), xp.zeros_like(sizes))
    if not sizes.shape[0]:
        return values
    # The tolerance is relative to the largest entry, since large terms may cancel in small entries.
    off = abs(ours - true) > _EPS.get(backend.dtype_name(true), 2.0**-7) ** 0.75 * xp.max(sizes)
    if backend.is_traced(off):
        return xp.where(xp.any(off), plain * np.nan, values)
    if bool(xp.any(off)):
        k = int(np.argmax(backend.to_numpy(off)))
        raise GradtoolsError(
            f"{call.caller}: sparsity omits nonzero entries: the product with a "
            f"random vector is {float(true[k]):.6g} at index {k}, but {float(ours[k]):.6g} "
            "with the pattern. Pass a pattern with every entry that may be nonzero."
        )
    return values


def _only(call: Call, leaves: Sequence[Array], what: str) -> Array:
    if len(leaves) != 1 or call.backend.is_complex(leaves[0]) or call.opened is not None:
        came = "complex or a module" if len(leaves) == 1 else f"{len(leaves)} arrays"
        raise GradtoolsError(
            f"{call.caller}: with sparsity f must take and return one real array; {what} is "
            f"{came}. Concatenate the arrays, or leave sparsity out."
        )
    return leaves[0]


def _check_rows(call: Call, pattern: Csr, y: Array) -> None:
    """Raises an error if the pattern does not have one row for each entry of f's output."""
    if math.prod(y.shape) != pattern.shape[0]:
        raise GradtoolsError(
            f"{call.caller}: sparsity has {pattern.shape[0]} rows; expected {math.prod(y.shape)}, "
            f"one for each entry of f's output, of shape {tuple(y.shape)}."
        )


# --- the pattern and its coloring ------------------------------------------------------------


def _scipy_sparse(caller: str) -> Any:
    """Imports `scipy.sparse`; raises an error if SciPy or NetworkX is not installed."""
    try:
        import networkx as _  # noqa: F401 - `_greedy` uses it
        import scipy.sparse
    except ModuleNotFoundError as error:
        raise GradtoolsError(
            f"{caller}: sparsity needs SciPy and NetworkX; {error.name} is not installed. Fix: "
            'pip install "gradtools[sparse]".'
        ) from None
    return scipy.sparse


def _pattern(caller: str, sparsity: Any, ins: tuple[int, ...]) -> Csr:
    """Converts a user's pattern to a boolean CSR matrix.

    Args:
        caller: The operator's name, for error messages.
        sparsity: A sparse matrix of SciPy, PyTorch or JAX (BCOO), or an array; its nonzero entries
            are the pattern. The pattern has one column per input entry, or the Jacobian's shape.
        ins: The shape of f's argument.

    Raises:
        GradtoolsError: The pattern has an unsupported type or a wrong shape.
    """
    sparse = _scipy_sparse(caller)
    shape, flat = _nonzero(caller, sparsity)
    size = math.prod(ins)
    outs = len(shape) - len(ins)
    if outs >= 0 and shape[outs:] == ins:
        rows = math.prod(shape[:outs])
    elif len(shape) == 2 and shape[1] == size:
        rows = shape[0]
    else:
        raise GradtoolsError(
            f"{caller}: sparsity has shape {shape}; expected one row for each entry of f's output "
            f"and {size} columns, one for each entry of f's argument, or the Jacobian's shape."
        )
    entries = np.ones(flat.size, bool), np.divmod(flat, max(size, 1))
    matrix = sparse.csr_matrix(entries, (rows, size))
    matrix.sum_duplicates()
    return matrix


def _nonzero(caller: str, sparsity: Any) -> tuple[tuple[int, ...], np.ndarray]:
    """Returns the shape of a pattern and the flat indices of its nonzero entries."""
    if hasattr(sparsity, "tocoo"):
        coo = sparsity.tocoo()
        kept, index = np.asarray(coo.data) != 0, np.stack(coo.coords)
    elif hasattr(sparsity, "layout") and str(sparsity.layout) != "torch.strided":
        coo = sparsity.detach().to_sparse_coo().coalesce()
        kept, index = (coo.values() != 0).cpu().numpy(), coo.indices().cpu().numpy()
    elif type(sparsity).__name__ == "BCOO":
        kept, index = np.asarray(sparsity.data) != 0, np.asarray(sparsity.indices).T
    else:
        dense = np.asarray(sparsity.detach().cpu() if hasattr(sparsity, "detach") else sparsity)
        if dense.dtype.kind in "biuf":
            return dense.shape, np.flatnonzero(dense)
        shown = repr(sparsity) if isinstance(sparsity, str) else type(sparsity).__name__
        raise GradtoolsError(
            f"{caller}: sparsity is {shown}; expected a boolean array, or a sparse matrix of "
            "SciPy, PyTorch or JAX (BCOO)."
        )
    shape = tuple(sparsity.shape)
    if not math.prod(shape):
        return shape, np.zeros(0, np.int64)
    return shape, np.ravel_multi_index(tuple(index[:, kept]), shape)


def _coloured(pattern: Csr, mode: str) -> tuple[bool, np.ndarray]:
    """Returns whether sums of rows are computed, and the colors of the rows or of the columns.

    mode: "forward" (for columns), "reverse" (for rows), or "auto", which selects the mode with
        fewer products, estimated from the largest number of entries in a row and in a column.
    """
    pattern.sort_indices()
    widest, highest = (int(np.asarray(pattern.sum(k)).max(initial=0)) for k in (1, 0))
    by_rows = highest < widest if mode == "auto" else mode == "reverse"
    matrix = pattern.T.tocsr() if by_rows else pattern
    matrix.sort_indices()
    starts, indices = (x.astype(np.int64).tobytes() for x in (matrix.indptr, matrix.indices))
    return by_rows, _greedy(starts, indices, matrix.shape)


@lru_cache(maxsize=32)
def _greedy(starts: bytes, indices: bytes, shape: tuple[int, int]) -> np.ndarray:
    """Returns the colors of a CSR matrix's columns; columns of equal color share no row."""
    import networkx

    at = np.frombuffer(indices, np.int64), np.frombuffer(starts, np.int64)
    matrix = _scipy_sparse("jacobian").csr_matrix((np.ones(at[0].size, np.int32), *at), shape)
    if (np.diff(at[1]) ** 2).sum() > _EDGES:
        return np.arange(shape[1])
    graph = networkx.from_scipy_sparse_array(matrix.T @ matrix)
    graph.remove_edges_from([(i, i) for i in range(shape[1])])
    colours = networkx.greedy_color(graph, "smallest_last")
    return np.array([colours[i] for i in range(shape[1])], np.int64)
