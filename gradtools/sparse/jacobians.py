"""Sparse Jacobians and Hessians by colouring.

Structurally orthogonal columns (that share no row) are pushed as one tangent, structurally
orthogonal rows are pulled as one cotangent, and each entry is read from the product in which it is
the only term (Curtis, Powell and Reid, On the estimation of sparse Jacobian matrices, 1974). A few
dense rows would give each column a colour of its own, so they are pulled, and the columns of the
rest are pushed (Coleman and Verma, The efficient computation of sparse Jacobian matrices using
automatic differentiation, 1998). NetworkX computes a greedy colouring.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

import numpy as np

from gradtools.arguments.calls import Call
from gradtools.backend import Array, CannotPush, Evaluation, Fun
from gradtools.disconnected_inputs import refuse_cut
from gradtools.errors import GradtoolsError
from gradtools.sparse.entry_dependence import Csr, scipy_sparse

_EDGES = 2 * 10**7  # of the column graph; beyond, each column gets a colour of its own


@dataclass(frozen=True)
class Colouring:
    """A colouring of rows and columns: how a sparse matrix is recovered from a few products."""

    rows: np.ndarray  # the row of each nonzero entry, sorted by rows, then by columns
    columns: np.ndarray  # the column of each nonzero entry
    shape: tuple[int, int]
    # The colour of each row is the index of its cotangent; -1 if tangents recover it.
    row_colours: np.ndarray
    # The colour of each column is the index of its tangent; -1 if it needs none.
    column_colours: np.ndarray

    @property
    def pulled(self) -> int:
        """The number of cotangents."""
        return int(self.row_colours.max(initial=-1)) + 1

    @property
    def pushed(self) -> int:
        """The number of tangents."""
        return int(self.column_colours.max(initial=-1)) + 1


def pattern_of(
    caller: str, sparsity: Any, ins: tuple[int, ...]
) -> tuple[Csr, tuple[int, ...] | None]:
    """A user's sparsity pattern as a boolean CSR matrix, and the output's shape if it implies it.

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
    shown = repr(sparsity) if isinstance(sparsity, str) else type(sparsity).__name__
    none = GradtoolsError(
        f"{caller}: sparsity is {shown}; expected 'detect', a boolean array, or a sparse matrix of "
        "SciPy, PyTorch or JAX (BCOO)."
    )
    # The indices of the nonzero entries, one row for each axis.
    if hasattr(sparsity, "tocoo"):
        coo = sparsity.tocoo()
        axes = getattr(coo, "coords", None) or (coo.row, coo.col)  # SciPy before 1.13 has no coords
        shape, index = coo.shape, np.stack(axes)[:, np.asarray(coo.data) != 0]
    elif hasattr(sparsity, "layout") and str(sparsity.layout) != "torch.strided":
        coo = sparsity.detach().to_sparse_coo().coalesce()
        kept = (coo.values() != 0).cpu().numpy()
        shape, index = coo.shape, coo.indices().cpu().numpy()[:, kept]
    elif type(sparsity).__name__ == "BCOO":
        kept = np.asarray(sparsity.data) != 0
        shape, index = sparsity.shape, np.asarray(sparsity.indices)[kept].T
    else:
        try:
            dense = np.asarray(sparsity.detach().cpu() if hasattr(sparsity, "detach") else sparsity)
        except Exception as error:
            raise none from error
        if dense.dtype.kind not in "biuf":
            raise none
        shape = dense.shape
        index = np.stack(np.nonzero(dense)) if dense.ndim else np.zeros((0, 0), int)
    shape, size, outs = tuple(shape), math.prod(ins), None
    if shape[len(shape) - len(ins) :] == ins and len(shape) >= len(ins):
        outs = shape[: len(shape) - len(ins)]
    elif len(shape) != 2 or shape[1] != size:
        raise GradtoolsError(
            f"{caller}: sparsity has shape {shape}; expected one row for each entry of f's output "
            f"and {size} columns, one for each entry of its argument, or the Jacobian's shape."
        )
    rows = shape[0] if outs is None else math.prod(outs)
    flat = np.ravel_multi_index(tuple(index), shape) if math.prod(shape) else np.zeros(0, np.int64)
    matrix = sparse.csr_matrix(
        (np.ones(flat.size, bool), np.divmod(flat, max(size, 1))), (rows, size)
    )
    matrix.sum_duplicates()
    return matrix, outs


def coloured(pattern: Csr, mode: str, symmetric: bool = False) -> Colouring:
    """The colouring of a pattern, memoized.

    Args:
        pattern: A boolean CSR matrix.
        mode: "forward" colours columns, "reverse" rows; "auto" takes whichever needs the fewest
            products, and both if a few rows are dense.
        symmetric: Whether the matrix is symmetric, so that a pulled row is also its column.
    """
    pattern = pattern.tocsr()
    pattern.sort_indices()
    key = pattern.indptr.tobytes(), pattern.indices.tobytes(), pattern.shape, mode, symmetric
    return _coloured(*key)


@lru_cache(maxsize=32)
def _coloured(
    starts: bytes, indices: bytes, shape: tuple[int, int], mode: str, symmetric: bool
) -> Colouring:
    sparse = scipy_sparse("jacobian")
    kind = np.int32 if len(starts) == 4 * (shape[0] + 1) else np.int64
    at = np.frombuffer(indices, kind), np.frombuffer(starts, kind)
    pattern = sparse.csr_matrix((np.ones(at[0].size, bool), *at), shape)
    dense = _rows_to_pull(pattern, mode, symmetric)
    row_colours = np.full(shape[0], -1)
    column_colours = np.full(shape[1], -1)
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
    none, all_rows = np.zeros(rows.size, bool), np.ones(rows.size, bool)
    if mode == "forward" or not rows.size:
        return none
    if mode == "reverse":
        return all_rows
    order = np.argsort(-rows, kind="stable")
    counts = sorted({0, rows.size, *(2**k for k in range(rows.size.bit_length()))})
    best, fewest = none, math.inf
    for count in counts:
        dense = none.copy()
        dense[order[:count]] = True
        left = pattern[~dense]
        if symmetric:
            left = left[:, ~dense]
            pulled = count
        else:
            pulled = int(np.asarray(pattern[dense].sum(0)).max(initial=0))
        total = pulled + int(np.asarray(left.sum(1)).max(initial=0))
        if total < fewest and not (symmetric and count == rows.size and count):
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


def random_signs(size: int) -> np.ndarray:
    """A vector of independent random entries of modulus between 1 and 2, by a fixed seed."""
    draw = np.random.default_rng(20)
    return (draw.choice([-1.0, 1.0], size) * draw.uniform(1.0, 2.0, size)).astype(np.float32)


class Compressed:
    """One call, with one array as its leaf, whose Jacobian is computed from a few products.

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
        self.dtypes: list[Any] = []  # the dtypes of the seeds
        self.x = self._only(call.leaves, "the argument")
        self.framework = self.backend.submodule("sparsity", call.caller)
        self._fix = ", or sparsity='detect'"
        if isinstance(sparsity, str) and sparsity == "detect":
            scipy_sparse(call.caller)
            self._fix = ": a rule of f's has a derivative that its value does not show"
            only = partial(self._only, what="the output")
            pattern, self.outs = self.framework.detected(fun, self.x, only)
        else:
            pattern, self.outs = pattern_of(call.caller, sparsity, tuple(self.x.shape))
        if symmetric and pattern.shape[0] != pattern.shape[1]:
            raise GradtoolsError(
                f"{call.caller}: sparsity has shape {pattern.shape}; expected a square matrix."
            )
        if symmetric:
            pattern = (pattern + pattern.T).tocsr()
        self.colouring = coloured(pattern, mode, symmetric)

    def _only(self, leaves: Sequence[Array], what: str) -> Array:
        if len(leaves) != 1 or self.backend.is_complex(leaves[0]) or self.call.opened is not None:
            raise GradtoolsError(
                f"{self.call.caller}: with sparsity f takes one real array and returns one, and "
                f"{what} is another. Join arrays to one, or leave sparsity out."
            )
        return leaves[0]

    def seeds(
        self, colours: np.ndarray, checking: bool, shape: Sequence[int], like: Array | None = None
    ) -> Array:
        """The seed vectors: one for each colour, and a random one for the check of the pattern."""
        count = int(colours.max(initial=-1)) + 1
        seeds = (np.arange(count)[:, None] == colours[None]).astype(np.float32)
        if checking:
            seeds = np.concatenate([seeds, random_signs(colours.size)[None]])
        like = self.x if like is None else like
        array = self.backend.asarray(seeds.reshape((len(seeds), *shape)), like)
        self.dtypes.append(like.dtype)
        return self.backend.xp.astype(array, like.dtype)

    def push(self, seeds: Array, result: Evaluation | None = None) -> Array:
        """The products with tangents, by the transposed pullback if there is one, else by jvp."""
        push = None if result is None else result.transposed()
        if push is not None:
            with suppress(CannotPush):
                return self._mapped(lambda unit: push([unit]), seeds)
        count = -(-seeds.shape[0] // self.chunk_size) if self.chunk_size else 1
        restart = self.backend.restarting(self.fun, [self.x], count)

        def pushed(unit: Array) -> list[Array]:
            restart()
            return self.backend.jvp(self.fun, [self.x], [unit])[2]

        return self._mapped(pushed, seeds)

    def _mapped(self, push: Callable[[Array], list[Array]], seeds: Array) -> Array:
        products = self.backend.map_batches(push, [seeds], self.chunk_size, one_draw=True)
        self.settle([x[0] for x in products])
        return products[0]

    def settle(self, outs: Sequence[Array]) -> None:
        """Records the output's shape, and checks it against the pattern."""
        self.outs = tuple(self._only(outs, "the output").shape)
        if math.prod(self.outs) != self.colouring.shape[0]:
            raise GradtoolsError(
                f"{self.call.caller}: sparsity has {self.colouring.shape[0]} rows; expected "
                f"{math.prod(self.outs)}, one for each entry of f's output, of shape {self.outs}."
            )

    def assembled(self, pulled: Array | None, pushed: Array | None) -> Any:
        """The framework's sparse array, after the check of the pattern by the last product.

        pulled, pushed: The products, one row for each cotangent or tangent; None if there are none.
        """
        colouring, last = self.colouring, pulled if pushed is None else pushed
        assert last is not None and self.outs is not None
        rows, columns, (height, width) = colouring.rows, colouring.columns, colouring.shape
        # The place of each entry among the products.
        by_row, by_column = colouring.row_colours[rows], colouring.column_colours[columns]
        first = 0 if pulled is None else pulled.shape[0] * width
        places = first + by_column * height + rows
        places = np.where(by_row >= 0, by_row * width + columns, places)
        if self.symmetric:  # a pulled row is also its column
            of_column = colouring.row_colours[columns]
            places = np.where((by_row < 0) & (of_column >= 0), of_column * width + rows, places)
        flat = [x.reshape((-1,)) for x in (pulled, pushed) if x is not None]
        values = (flat[0] if len(flat) == 1 else self.backend.xp.concat(flat))[places]
        values = self._checked(values, last[-1].reshape((-1,)), along_rows=pushed is None)
        shape = (*self.outs, *self.x.shape)
        index = np.zeros((0, rows.size), int)
        if shape:
            flat_index = np.ravel_multi_index((rows, columns), colouring.shape)
            index = np.stack(np.unravel_index(flat_index, shape))
        return self.framework.sparse_array(index, values, shape)

    def _checked(self, values: Array, product: Array, along_rows: bool) -> Array:
        """Checks the pattern: compares the values' product with a random vector to the true one.

        Raises if they differ; in a trace, where values cannot be read, returns NaN instead.
        """
        backend, xp, colouring = self.backend, self.backend.xp, self.colouring
        there, here = colouring.columns, colouring.rows
        if along_rows:
            there, here = here, there
        vector = backend.asarray(random_signs(colouring.shape[not along_rows])[there], values)
        vector = xp.astype(vector, self.dtypes[-1])  # rounded as in the product
        plain = backend.stop_gradient(values)
        terms = plain * xp.astype(vector, values.dtype)
        wanted = backend.stop_gradient(product)
        expected, scale = (self.framework.summed(here, t, product) for t in (terms, abs(terms)))
        if not wanted.shape[0]:
            return values
        sizes = scale + abs(wanted)
        finite = xp.isfinite(sizes)
        # Relative to the largest entry: a small one may be a difference of large terms.
        size = xp.max(xp.where(finite, sizes, xp.zeros_like(sizes)))
        eps = {"float64": 2.0**-52, "float32": 2.0**-23, "float16": 2.0**-10}
        names = map(backend.dtype_name, (values, product, self.x, vector))
        slack = max(eps.get(name, 2.0**-7) for name in names) ** 0.75
        off = ~(abs(expected - wanted) <= slack * size)
        off = off & finite
        if backend.is_traced(off):
            return xp.where(xp.any(off), plain * np.nan, values)
        if not bool(xp.any(off)):
            return values
        k = int(np.argmax(backend.to_numpy(off)))
        where = f"{'column' if along_rows else 'row'} {k}"
        raise GradtoolsError(
            f"{self.call.caller}: sparsity leaves out entries that are not zero: the product with "
            f"a random vector is {float(wanted[k]):.6g} in {where}, "
            f"and {float(expected[k]):.6g} by the pattern. Give a pattern that holds every entry "
            f"that may differ from zero{self._fix}."
        )


def sparse_jacobian(call: Call, fun: Fun, sparsity: Any, mode: str, chunk_size: int | None) -> Any:
    """The Jacobian of a call as the framework's sparse array."""
    plan = Compressed(call, fun, sparsity, mode, chunk_size, symmetric=False)
    colouring, result, pulled, pushed = plan.colouring, None, None, None
    if colouring.pulled:
        result = call.backend.vjp(fun, call.leaves, groups=None, once=False)
        plan.settle(result.outs)

        def pull(unit: Array) -> list[Array]:
            grads = result.pullback([unit])
            if isinstance(fun, Call):
                refuse_cut(fun, result.cut(grads))
            return call.backend.filled(grads, [plan.x])

        assert plan.outs is not None
        checking, out = not colouring.pushed, result.outs[0]
        seeds = plan.seeds(colouring.row_colours, checking, plan.outs, out)
        pulled = call.backend.map_batches(pull, [seeds], chunk_size)[0]
    if colouring.pushed or pulled is None:
        seeds = plan.seeds(colouring.column_colours, True, plan.x.shape)
        pushed = plan.push(seeds, result)
    return plan.assembled(pulled, pushed)


def sparse_hessian(call: Call, gradient: Fun, sparsity: Any, mode: str) -> Any:
    """The Hessian of a call as a sparse array, by Hessian-vector products."""
    plan = Compressed(call, gradient, sparsity, "auto", None, symmetric=True)
    colours, shape = plan.colouring, plan.x.shape
    rows = plan.seeds(colours.row_colours, False, shape)
    columns = plan.seeds(colours.column_colours, True, shape)
    seeds = columns if not colours.pulled else call.backend.xp.concat([rows, columns])
    if mode == "forward":
        products = plan.push(seeds)
    else:
        result = call.backend.vjp(gradient, call.leaves, groups=None, once=False)
        plan.settle(result.outs)
        pulled = lambda unit: call.backend.filled(result.pullback([unit]), [plan.x])
        products = call.backend.map_batches(pulled, [seeds], None)[0]
    count = colours.pulled
    return plan.assembled(products[:count] if count else None, products[count:])
