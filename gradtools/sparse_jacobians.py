"""Sparse Jacobians and Hessians of a given pattern, by colouring.

Structurally orthogonal columns (that share no row) are pushed as one tangent, structurally
orthogonal rows are pulled as one cotangent, and each entry is read from the product in which it is
the only term (Curtis, Powell and Reid, On the estimation of sparse Jacobian matrices, 1974). A few
dense rows would give each column a colour of its own, so they are pulled, and the columns of the
rest are pushed (Coleman and Verma, The efficient computation of sparse Jacobian matrices using
automatic differentiation, 1998). NetworkX computes a greedy colouring.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from gradtools.arguments.calls import Call
from gradtools.backend import Array, Fun
from gradtools.errors import GradtoolsError

Csr = Any
_EDGES = 2 * 10**7  # of the column graph; beyond, each column gets a colour of its own
_EPS = {"float64": 2.0**-52, "float32": 2.0**-23, "float16": 2.0**-10, "bfloat16": 2.0**-7}


def scipy_sparse(caller: str) -> Any:
    """`scipy.sparse`; raises with the name of the pip extra if it is missing."""
    try:
        import networkx as _  # noqa: F401 - is needed as well
        import scipy.sparse
    except ModuleNotFoundError as error:
        raise GradtoolsError(
            f"{caller}: sparsity needs SciPy and NetworkX; {error.name} is not installed. Fix: "
            'pip install "gradtools[sparse]".'
        ) from None
    return scipy.sparse


# --- the pattern and its colouring -----------------------------------------------------------


@dataclass(frozen=True)
class Colouring:
    """How a sparse matrix is recovered from a few products."""

    rows: np.ndarray  # the row of each nonzero entry, sorted by rows, then by columns
    columns: np.ndarray  # the column of each nonzero entry
    shape: tuple[int, int]
    row_colours: np.ndarray  # the index of each row's cotangent; -1 if tangents recover it
    column_colours: np.ndarray  # the index of each column's tangent; -1 if it needs none


def pattern_of(
    caller: str, sparsity: Any, ins: tuple[int, ...]
) -> tuple[Csr, tuple[int, ...] | None]:
    """A user's pattern as a boolean CSR matrix, and the output's shape if the pattern implies it.

    Args:
        caller: The operator's name, for errors.
        sparsity: A sparse matrix of SciPy, PyTorch or JAX (BCOO), or an array; its nonzero entries
            are the pattern. It has one column for each entry of the input, or the Jacobian's
            shape.
        ins: The shape of f's argument.

    Raises:
        GradtoolsError: It is none of these, or has another shape.
    """
    sparse = scipy_sparse(caller)
    if isinstance(sparsity, str) and sparsity == "detect":
        raise GradtoolsError(
            f"{caller}: sparsity='detect' was withdrawn. Give the pattern, a boolean matrix (also "
            "of SciPy); in JAX the package asdex detects one."
        )
    shape, flat = _nonzero(caller, sparsity)
    size, outs = math.prod(ins), None
    if shape[len(shape) - len(ins) :] == ins and len(shape) >= len(ins):
        outs = shape[: len(shape) - len(ins)]
    elif len(shape) != 2 or shape[1] != size:
        raise GradtoolsError(
            f"{caller}: sparsity has shape {shape}; expected one row for each entry of f's output "
            f"and {size} columns, one for each entry of its argument, or the Jacobian's shape."
        )
    rows = shape[0] if outs is None else math.prod(outs)
    places = np.ones(flat.size, bool), np.divmod(flat, max(size, 1))
    matrix = sparse.csr_matrix(places, (rows, size))
    matrix.sum_duplicates()
    return matrix, outs


def _nonzero(caller: str, sparsity: Any) -> tuple[tuple[int, ...], np.ndarray]:
    """The shape of a pattern, and the flat indices of its nonzero entries."""
    if hasattr(sparsity, "tocoo"):
        coo = sparsity.tocoo()
        shape, kept, index = coo.shape, np.asarray(coo.data) != 0, np.stack(coo.coords)
    elif hasattr(sparsity, "layout") and str(sparsity.layout) != "torch.strided":
        coo = sparsity.detach().to_sparse_coo().coalesce()
        shape, kept = coo.shape, (coo.values() != 0).cpu().numpy()
        index = coo.indices().cpu().numpy()
    elif type(sparsity).__name__ == "BCOO":
        shape, kept = sparsity.shape, np.asarray(sparsity.data) != 0
        index = np.asarray(sparsity.indices).T
    else:
        dense = np.asarray(sparsity.detach().cpu() if hasattr(sparsity, "detach") else sparsity)
        if dense.dtype.kind in "biuf":
            return dense.shape, np.flatnonzero(dense)
        shown = repr(sparsity) if isinstance(sparsity, str) else type(sparsity).__name__
        raise GradtoolsError(
            f"{caller}: sparsity is {shown}; expected a boolean array, or a sparse matrix of "
            "SciPy, PyTorch or JAX (BCOO)."
        )
    shape = tuple(shape)
    if not math.prod(shape):
        return shape, np.zeros(0, np.int64)
    return shape, np.ravel_multi_index(tuple(index[:, kept]), shape)


def coloured(pattern: Csr, mode: str, symmetric: bool = False) -> Colouring:
    """The colouring of a pattern, memoized.

    Args:
        pattern: A boolean CSR matrix.
        mode: "forward" colours columns, "reverse" rows; "auto" takes whichever needs the fewest
            products, and both if a few rows are dense.
        symmetric: Whether the matrix is symmetric, so that a pulled row is also its column.
    """
    pattern.sort_indices()
    starts, indices = (x.astype(np.int64).tobytes() for x in (pattern.indptr, pattern.indices))
    return _coloured(starts, indices, pattern.shape, mode, symmetric)


@lru_cache(maxsize=32)
def _coloured(
    starts: bytes, indices: bytes, shape: tuple[int, int], mode: str, symmetric: bool
) -> Colouring:
    at = np.frombuffer(indices, np.int64), np.frombuffer(starts, np.int64)
    pattern = scipy_sparse("jacobian").csr_matrix((np.ones(at[0].size, bool), *at), shape)
    dense = _rows_to_pull(pattern, mode, symmetric)
    row_colours, column_colours = np.full(shape[0], -1), np.full(shape[1], -1)
    if dense.any():
        row_colours[dense] = _greedy(pattern[dense].T.tocsr())
    if not dense.all() and shape[1]:
        rest = pattern[~dense]
        needed = np.asarray(rest.sum(0)).reshape(-1) > 0
        if symmetric:  # a pulled row is also its column
            needed &= ~dense
        if needed.any():
            column_colours[needed] = _greedy(rest[:, needed])
    coo = pattern.tocoo()
    return Colouring(coo.row, coo.col, shape, row_colours, column_colours)


def _rows_to_pull(pattern: Csr, mode: str, symmetric: bool) -> np.ndarray:
    """The rows to pull: the densest ones, as many as minimize a bound on the products."""
    rows = np.asarray(pattern.sum(1)).reshape(-1)
    if mode != "auto" or not rows.size:
        return np.full(rows.size, mode == "reverse")
    order = np.argsort(-rows, kind="stable")
    best, fewest = np.zeros(rows.size, bool), math.inf
    for count in sorted({0, rows.size, *(2**k for k in range(rows.size.bit_length()))}):
        dense = np.zeros(rows.size, bool)
        dense[order[:count]] = True
        left = pattern[~dense]
        if symmetric:
            left, pulled = left[:, ~dense], count
        else:
            pulled = int(np.asarray(pattern[dense].sum(0)).max(initial=0))
        total = pulled + int(np.asarray(left.sum(1)).max(initial=0))
        if total < fewest and not (symmetric and count == rows.size):
            best, fewest = dense, total
    return best


def _greedy(pattern: Csr) -> np.ndarray:
    """A colour for each column, such that no two columns of one colour share a row."""
    import networkx

    count = pattern.shape[1]
    per_row = np.diff(pattern.indptr).astype(np.int64)
    if (per_row**2).sum() > _EDGES:
        return np.arange(count)
    weights = pattern.astype(np.int32)
    graph = networkx.from_scipy_sparse_array(weights.T @ weights)
    graph.remove_edges_from([(i, i) for i in range(count)])
    colours = networkx.greedy_color(graph, "smallest_last")
    return np.array([colours[i] for i in range(count)], np.int64)


# --- the products ----------------------------------------------------------------------------


def sparse_jacobian(call: Call, fun: Fun, sparsity: Any, mode: str, chunk_size: int | None) -> Any:
    """The Jacobian of a call as the framework's sparse array."""
    plan = _Products(call, fun, sparsity, mode, chunk_size, symmetric=False)
    has_columns, pulled, pushed = (plan.column_colours >= 0).any(), None, None
    if (plan.row_colours >= 0).any():
        result = call.backend.vjp(fun, call.leaves, groups=None, once=False)
        plan.settle(result.outs)

        def pull(unit: Array) -> list[Array]:
            grads = result.pullback([unit])
            return call.backend.filled(grads, [plan.x])

        seeds = plan.seeds(plan.row_colours, not has_columns, result.outs[0])
        pulled = call.backend.map_batches(pull, [seeds], chunk_size)[0]
    if has_columns or pulled is None:
        pushed = plan.push(plan.seeds(plan.column_colours, True, plan.x))
    return plan.assembled(pulled, pushed)


def sparse_hessian(call: Call, gradient: Fun, sparsity: Any, mode: str) -> Any:
    """The Hessian of a call as a sparse array, by Hessian-vector products."""
    plan = _Products(call, gradient, sparsity, "auto", None, symmetric=True)
    rows = plan.seeds(plan.row_colours, False, plan.x)
    seeds = plan.seeds(plan.column_colours, True, plan.x)
    if count := rows.shape[0]:
        seeds = call.backend.xp.concat([rows, seeds])
    if mode == "forward":
        products = plan.push(seeds)
    else:
        result = call.backend.vjp(gradient, call.leaves, groups=None, once=False)
        plan.settle(result.outs)
        pulled = lambda unit: call.backend.filled(result.pullback([unit]), [plan.x])
        products = call.backend.map_batches(pulled, [seeds], None)[0]
    return plan.assembled(products[:count] if count else None, products[count:])


class _Products:
    """The products of one call, with one array as its leaf, and the matrix made of them.

    fun: The function to differentiate: the call, or its gradient for a symmetric Hessian.
    """

    def __init__(
        self,
        call: Call,
        fun: Fun,
        sparsity: Any,
        mode: str,
        chunk_size: int | None,
        symmetric: bool,
    ) -> None:
        self.backend, self.call, self.fun, self.chunk_size = call.backend, call, fun, chunk_size
        self.symmetric = symmetric
        self.x = self._only(call.leaves, "the argument")
        self.framework = self.backend.submodule("sparsity", call.caller)
        pattern, self.outs = pattern_of(call.caller, sparsity, tuple(self.x.shape))
        if symmetric and pattern.shape[0] != pattern.shape[1]:
            raise GradtoolsError(
                f"{call.caller}: sparsity has shape {pattern.shape}; expected a square matrix."
            )
        if symmetric:
            pattern = (pattern + pattern.T).tocsr()
        self.colouring = coloured(pattern, mode, symmetric)
        self.row_colours = self.colouring.row_colours
        self.column_colours = self.colouring.column_colours

    def _only(self, leaves: Sequence[Array], what: str) -> Array:
        if len(leaves) != 1 or self.backend.is_complex(leaves[0]) or self.call.opened is not None:
            raise GradtoolsError(
                f"{self.call.caller}: with sparsity f takes one real array and returns one, and "
                f"{what} is another. Join arrays to one, or leave sparsity out."
            )
        return leaves[0]

    def settle(self, outs: Sequence[Array]) -> None:
        """Records the output's shape, and checks it against the pattern."""
        self.outs = tuple(self._only(outs, "the output").shape)
        if math.prod(self.outs) != self.colouring.shape[0]:
            raise GradtoolsError(
                f"{self.call.caller}: sparsity has {self.colouring.shape[0]} rows; expected "
                f"{math.prod(self.outs)}, one for each entry of f's output, of shape {self.outs}."
            )

    def seeds(self, colours: np.ndarray, checking: bool, like: Array) -> Array:
        """A seed for each colour, and a random one for the check, of the shape of `like`."""
        count = int(colours.max(initial=-1)) + 1
        seeds = (np.arange(count)[:, None] == colours[None]).astype(np.float32)
        if checking:
            self.seed_dtype = like.dtype
            seeds = np.concatenate([seeds, _random_signs(colours.size)[None]])
        array = self.backend.asarray(seeds.reshape((len(seeds), *like.shape)), like)
        return self.backend.xp.astype(array, like.dtype)

    def push(self, seeds: Array) -> Array:
        """The products with tangents."""
        count = -(-seeds.shape[0] // self.chunk_size) if self.chunk_size else 1
        restart = self.backend.restarting(self.fun, [self.x], count)

        def pushed(unit: Array) -> list[Array]:
            restart()
            return self.backend.jvp(self.fun, [self.x], [unit])[2]

        products = self.backend.map_batches(pushed, [seeds], self.chunk_size, one_draw=True)
        self.settle([x[0] for x in products])
        return products[0]

    def assembled(self, pulled: Array | None, pushed: Array | None) -> Any:
        """The framework's sparse array, after the check of the pattern by the last product.

        pulled, pushed: The products, one row for each cotangent or tangent; None if there are none.
        """
        last = pulled if pushed is None else pushed
        assert last is not None and self.outs is not None
        rows, columns = self.colouring.rows, self.colouring.columns
        height, width = self.colouring.shape
        # The place of each entry among the products.
        by_row, by_column = self.row_colours[rows], self.column_colours[columns]
        first = 0 if pulled is None else pulled.shape[0] * width
        places = np.where(by_row >= 0, by_row * width + columns, first + by_column * height + rows)
        if self.symmetric:  # a pulled row is also its column
            of_column = self.row_colours[columns]
            places = np.where((by_row < 0) & (of_column >= 0), of_column * width + rows, places)
        flat = [x.reshape((-1,)) for x in (pulled, pushed) if x is not None]
        values = (flat[0] if len(flat) == 1 else self.backend.xp.concat(flat))[places]
        values = self._checked(values, last[-1].reshape((-1,)), along_rows=pushed is None)
        shape = (*self.outs, *self.x.shape)
        index = np.zeros((0, rows.size), int)
        if shape:
            flat_index = np.ravel_multi_index((rows, columns), self.colouring.shape)
            index = np.stack(np.unravel_index(flat_index, shape))
        return self.framework.sparse_array(index, values, shape)

    def _checked(self, values: Array, product: Array, along_rows: bool) -> Array:
        """Compares the values' product with a random vector to the true one, `product`.

        Raises if they differ; in a trace, where values cannot be read, returns NaN instead.
        """
        backend, xp = self.backend, self.backend.xp
        there, here = self.colouring.columns, self.colouring.rows
        if along_rows:
            there, here = here, there
        vector = backend.asarray(_random_signs(self.colouring.shape[not along_rows])[there], values)
        vector = xp.astype(vector, self.seed_dtype)  # rounded as in the product
        plain, wanted = backend.stop_gradient(values), backend.stop_gradient(product)
        terms = plain * xp.astype(vector, values.dtype)
        expected, scale = (self.framework.summed(here, t, product) for t in (terms, abs(terms)))
        if not wanted.shape[0]:
            return values
        sizes = scale + abs(wanted)
        finite = xp.isfinite(sizes)
        # Relative to the largest entry: a small one may be a difference of large terms.
        size = xp.max(xp.where(finite, sizes, xp.zeros_like(sizes)))
        names = map(backend.dtype_name, (values, product, self.x, vector))
        slack = max(_EPS.get(name, 2.0**-7) for name in names) ** 0.75
        off = ~(abs(expected - wanted) <= slack * size) & finite
        if backend.is_traced(off):
            return xp.where(xp.any(off), plain * np.nan, values)
        if not bool(xp.any(off)):
            return values
        k = int(np.argmax(backend.to_numpy(off)))
        raise GradtoolsError(
            f"{self.call.caller}: sparsity leaves out entries that are not zero: the product with "
            f"a random vector is {float(wanted[k]):.6g} in {'column' if along_rows else 'row'} "
            f"{k}, and {float(expected[k]):.6g} by the pattern. Give a pattern that holds every "
            "entry that may differ from zero."
        )


def _random_signs(size: int) -> np.ndarray:
    """A vector of independent random entries of modulus between 1 and 2, by a fixed seed."""
    draw = np.random.default_rng(20)
    return (draw.choice([-1.0, 1.0], size) * draw.uniform(1.0, 2.0, size)).astype(np.float32)
