"""Computes Jacobians, Hessians, and Hessian-vector products without forming the Hessian.

With g the gradient of a real-valued f, and H = dg/dx,

    hvp    H t, by a jvp or a vjp of g

A Jacobian or Hessian is computed from products with all unit vectors (`blocks`), or with a few sums
of unit vectors if the matrix is sparse (`sparse_jacobians`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from itertools import accumulate, compress, pairwise
from typing import Any, Literal, get_args

from gradtools.arguments.batches import axis_moved
from gradtools.arguments.calls import Call, call_of_primals
from gradtools.arguments.checks import (
    check_choice,
    normalized_argnums,
    same_length,
    whole_or_none,
)
from gradtools.backend import Array, Backend, Evaluation, Fun, Operators, P
from gradtools.derivatives import Argnums, derivative_function
from gradtools.errors import GradtoolsError

JacobianMode = Literal["auto", "forward", "reverse"]
HvpMode = Literal["auto", "forward_over_reverse", "reverse_over_reverse"]

Push = Callable[[list[Array]], list[Array]]


class Jacobians(Operators):
    """The operators that compute Jacobians, Hessians and Hessian-vector products."""

    def jacobian(
        self,
        f: Callable[P, Any],
        argnums: Argnums = 0,
        mode: JacobianMode = "auto",
        chunk_size: int | None = None,
        sparsity: Any = None,
    ) -> Callable[P, Any]:
        """Computes the Jacobian of f: the derivatives of all outputs with respect to all inputs.

        Args:
            f: A function that takes pytrees of real arrays and returns a pytree of arrays.
            argnums: The positional arguments to differentiate with respect to.
            mode: "reverse" applies the pullback to one unit cotangent per output entry; "forward"
                applies the pushforward to one unit tangent per input entry. "auto" is "reverse" in
                PyTorch, and the mode with fewer passes in JAX, where the size of the output is
                known beforehand. If the precisions of f's output and input differ, "forward"
                returns the output's precision and the other modes return the input's precision.
            chunk_size: The number of unit vectors per chunk; by default, all unit vectors. If 1, a
                loop without vmap is run: a Python loop in PyTorch, which supports any eager code,
                or `lax.map` in JAX.
            sparsity: For an f that maps one array to one array: the pattern of entries that may be
                nonzero, a sparse matrix of SciPy, PyTorch or JAX (BCOO) or a boolean array. The
                pattern has one row per output entry and one column per input entry, or the
                Jacobian's shape. Columns or rows are colored, so a banded Jacobian requires as many
                products as the Jacobian has nonzero diagonals. An additional product detects
                entries missing from the pattern. Requires `pip install "gradtools[sparse]"`.

        Returns:
            A function of f's arguments. For an output leaf of shape s and an input leaf of shape t,
            the function returns an array of shape s + t. The arrays form a pytree like the output,
            with a pytree like the argument (a tuple of pytrees if argnums is a tuple) at each leaf
            that is floating or complex, and None at each other leaf. With sparsity, the function
            returns one sparse array of shape s + t: `torch.sparse_coo`, or
            `jax.experimental.sparse.BCOO`.

        Raises:
            GradtoolsError: An input is complex (the Jacobian is then not a complex matrix: use
                pairs of real arrays, or `hvp`, `jvp` and `vjp`, which are real-linear); the mode is
                unknown; the chunk size is below 1; f returns no floating or complex array; the
                pattern has a wrong shape or omits a nonzero entry.

        Example:
            >>> x = gt.asarray(np.float32([1.0, 2.0]))
            >>> gt.to_numpy(gt.jacobian(lambda x: x ** 2)(x)).tolist()
            [[2.0, 0.0], [0.0, 4.0]]
        """
        check_choice("jacobian", "mode", mode, get_args(JacobianMode))
        chunk_size = whole_or_none("jacobian", "chunk_size", chunk_size, 1, "unit vectors")

        call = partial(self._jacobian_at, f, argnums, mode, chunk_size, sparsity)
        return derivative_function("jacobian", f, argnums, call)

    def _jacobian_at(
        self,
        f: Any,
        argnums: Argnums,
        mode: str,
        chunk_size: int | None,
        sparsity: Any,
        /,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        backend = self._backend
        positions = normalized_argnums("jacobian", argnums, len(args))
        call = Call(backend, "jacobian", f, args, kwargs, positions)
        call.needs_floats = True
        if sparsity is not None:
            from gradtools.sparse_jacobians import sparse_jacobian

            run = backend.stage(call, call.leaves).run
            uncompiled = backend.compiler.uncompiled
            return uncompiled(sparse_jacobian, call, run, sparsity, mode, chunk_size)
        _refuse_complex(backend, call)
        fun: Fun = call
        call.plain_kernels = True
        if is_auto := mode == "auto":
            staged = backend.stage(call, call.leaves)
            mode, fun = staged.jacobian_mode, staged.run
        rows = blocks(backend, fun, call.leaves, mode, chunk_size)
        if is_auto:  # the dtype must not depend on the selected mode
            for row in rows:
                row[:] = [
                    _of_precision(backend, block, x)
                    for block, x in zip(row, call.leaves, strict=True)
                ]
        call.refuse_changes()
        trees = [call.to_trees(row) for row in rows]
        if not isinstance(argnums, (tuple, list)):
            trees = [tree[0] for tree in trees]
        again = (f, argnums, mode, chunk_size, None, *args)
        attach = call.attaching(self._jacobian_at, *again, **kwargs)
        return attach(call.tangent_output(trees))

    def hvp(
        self,
        f: Callable[P, Any],
        primals: Sequence[Any],
        tangents: Sequence[Any],
        mode: HvpMode = "auto",
    ) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        """Computes the gradient of a scalar f and a Hessian-vector product in one evaluation.

        For products with several vectors at one point, call `linearize(grad(f), x)` once.

        For complex arguments the Hessian is with respect to real and imaginary parts: the product
        is real-linear in the tangent, and the Hessian is symmetric under Re<u, v>.

        Args:
            f: See `grad`.
            primals: One pytree of floating or complex arrays for each argument.
            tangents: Pytrees with the structure, shapes and dtypes of the primals.
            mode: "forward_over_reverse" (a jvp of the gradient), "reverse_over_reverse" (a vjp of
                the gradient), or "auto": "reverse_over_reverse" in PyTorch; in JAX
                "forward_over_reverse" unless f contains a reverse-only edit.

        Returns:
            `(gradient, product)`, each a tuple with one pytree for each primal.

        Raises:
            GradtoolsError: As in `grad` and `jvp`.

        Example:
            >>> x, t = gt.asarray(np.float32(3.0)), gt.asarray(np.float32(1.0))
            >>> (g,), (h,) = gt.hvp(lambda x: x ** 3, (x,), (t,))
            >>> float(g), float(h)
            (27.0, 18.0)

        Source: Pearlmutter, Fast exact multiplication by the Hessian, 1994.
        """
        check_choice("hvp", "mode", mode, get_args(HvpMode))
        primals, tangents = same_length("hvp", primals, tangents)
        call = call_of_primals(self._backend, "hvp", f, primals)
        flat_tangents = call.from_trees(tangents, "tangent")
        mode, fun = second_order_mode(call, mode)
        gradient = self._flat_gradient(call, fun)
        if mode.startswith("forward"):
            grads, extras, products = self._backend.jvp(gradient, call.leaves, flat_tangents)
        else:
            evaluation = self._backend.vjp(gradient, call.leaves, groups=None, once=True)
            grads, extras = evaluation.outs, evaluation.extras
            products = self._backend.filled(evaluation.pullback(flat_tangents), call.leaves)
        call.settle(extras)
        pair = call.to_trees(grads), call.to_trees(products)
        return call.attaching(self.hvp, f, primals, tangents, mode)(pair)

    def hessian(
        self,
        f: Callable[P, Any],
        argnums: Argnums = 0,
        mode: HvpMode = "auto",
        sparsity: Any = None,
    ) -> Callable[P, Any]:
        """Computes the Hessian of a real scalar-valued f with real arguments.

        Args:
            f: See `grad`.
            argnums: The positional arguments to differentiate with respect to.
            mode: See `hvp`.
            sparsity: The pattern of the Hessian, as in `jacobian`; if the entry (i, j) is given,
                the entry (j, i) may be omitted.

        Returns:
            A function of f's arguments. For argument leaves of shapes s and t, the function returns
            an array of shape s + t. The arrays form a pytree like the argument, with another pytree
            like the argument at each leaf. For a tuple of argnums, the function returns a tuple of
            tuples. With sparsity, the result is one sparse array.

        Raises:
            GradtoolsError: An input is complex; also as in `grad`.

        Example:
            >>> x = gt.asarray(np.float32([1.0, 2.0]))
            >>> gt.to_numpy(gt.hessian(lambda x: (x ** 3).sum())(x)).tolist()
            [[6.0, 0.0], [0.0, 12.0]]
        """
        check_choice("hessian", "mode", mode, get_args(HvpMode))
        return derivative_function(
            "hessian", f, argnums, partial(self._hessian_at, f, argnums, mode, sparsity)
        )

    def _hessian_at(
        self, f: Any, argnums: Argnums, mode: str, sparsity: Any, /, *args: Any, **kwargs: Any
    ) -> Any:
        positions = normalized_argnums("hessian", argnums, len(args))
        call = Call(self._backend, "hessian", f, args, kwargs, positions)
        _refuse_complex(self._backend, call)
        chosen, fun = second_order_mode(call, mode)
        gradient = self._flat_gradient(call, fun)
        if sparsity is not None:
            from gradtools.sparse_jacobians import sparse_jacobian

            of = call, gradient, sparsity, chosen.split("_")[0], None, True
            return self._backend.compiler.uncompiled(sparse_jacobian, *of)
        row_blocks = blocks(self._backend, gradient, call.leaves, chosen.split("_")[0], None)
        call.refuse_changes()
        rows = [call.to_trees(row) for row in row_blocks]
        if isinstance(argnums, (tuple, list)):
            hessian = call.to_trees(rows)
        else:
            hessian = call.to_trees([row[0] for row in rows])[0]
        return call.attaching(self._hessian_at, f, argnums, mode, None, *args, **kwargs)(hessian)

    def _flat_gradient(self, call: Call, fun: Fun) -> Fun:
        """Returns the gradient of a call as a function of flat arrays; `fun` evaluates the call."""

        def gradient(*leaves: Array) -> tuple[list[Array], list[Array]]:
            grads, extras = gradient_at(call, fun, leaves, call.leaves)
            return grads, extras if call.opened is not None else []

        flat: Any = gradient
        flat.caller, flat.call, flat.plain_kernels = call.caller, call, True
        flat.own, flat.is_deferred = call.own, call.is_deferred
        call.is_deferred = bool  # bool() returns False, so the graph is kept
        return flat


def second_order_mode(call: Call, mode: str) -> tuple[str, Fun]:
    """Resolves mode="auto"; returns the mode and the function that evaluates the call."""
    backend = call.backend
    if mode != "auto" or backend.hvp_mode == "reverse_over_reverse":
        return (backend.hvp_mode if mode == "auto" else mode), call
    staged = backend.stage(call, call.leaves)
    return ("reverse_over_reverse" if staged.reverse_only else backend.hvp_mode), staged.run


def gradient_at(
    call: Call, fun: Fun, leaves: Sequence[Array], likes: Sequence[Array]
) -> tuple[list[Array], list[Array]]:
    """Computes the gradient of the scalar that fun returns, and fun's extras, at the given leaves.

    likes: Arrays with the leaves' shapes and dtypes.
    """
    evaluation = call.backend.vjp(fun, list(leaves), groups=None, once=True)
    out = call.scalar(evaluation.outs, evaluation.extras)
    grads = evaluation.pullback([call.backend.ones_like(out)])
    return call.backend.filled(grads, likes), evaluation.extras


def _refuse_complex(backend: Backend, call: Call) -> None:
    for x, path in zip(call.leaves, call.paths, strict=True):
        if backend.is_complex(x):
            raise GradtoolsError(
                f"{call.caller}: {path} is complex ({backend.dtype_name(x)}). The Jacobian of a "
                "function that is not holomorphic is not a complex matrix. Pass the real and "
                "imaginary parts as two real arrays, or use hvp, jvp or vjp, which are real-linear."
            )


# --- the blocks of a Jacobian: one for each output leaf and each input leaf


def blocks(
    backend: Backend, fun: Fun, leaves: list[Array], mode: str, chunk_size: int | None
) -> list[list[Array]]:
    """Computes the Jacobian's blocks, of shape s + t for output and input leaves of shapes s and t.

    mode: "forward", "reverse" or "auto", which is treated as "reverse".
    """
    if mode == "forward":
        passes = -(-_size(leaves) // chunk_size) if chunk_size else 1
        restart = backend.restarting(fun, leaves, passes)

        def pushed(tangents: list[Array]) -> list[Array]:
            restart()
            return backend.jvp(fun, leaves, tangents)[2]

        return _columns(backend, pushed, leaves, chunk_size)
    evaluation = backend.vjp(fun, leaves, groups=None, once=False)
    return _rows(backend, evaluation, leaves, chunk_size)


def _rows(
    backend: Backend, evaluation: Evaluation, leaves: list[Array], chunk_size: int | None
) -> list[list[Array]]:
    """Computes the blocks by applying the pullback to one batch of all unit cotangents."""
    outs = evaluation.outs
    bases, parts = _unit_vectors(backend, outs)
    full = [0 not in x.shape for x in leaves]  # jax.lax.map rejects empty batched results

    def pull(*units: Array) -> list[Array]:
        return [*compress(backend.filled(evaluation.pullback([*units]), leaves), full)]

    def columns(units: list[Array]) -> list[Sequence[Array]]:
        """Returns the blocks of each leaf, with one block per output."""
        mapped = iter(backend.map_batches(pull, units, chunk_size) if any(full) else [])
        return [
            backend.split(next(mapped), parts) if f else [backend.zeros_like(x)] * len(outs)
            for x, f in zip(leaves, full, strict=True)
        ]

    are_complex = [*map(backend.is_complex, outs)]
    real = imaginary = columns(bases)
    if any(are_complex):  # real and imaginary parts need separate pullbacks: the inputs are real
        pairs = zip(bases, are_complex, strict=True)
        imaginary = columns([1j * b if c else backend.zeros_like(b) for b, c in pairs])
    table = []
    for k, (y, is_complex) in enumerate(zip(outs, are_complex, strict=True)):
        row = [column[k] for column in real]
        if is_complex:
            row = [re + 1j * column[k] for re, column in zip(row, imaginary, strict=True)]
        shapes = [(*y.shape, *x.shape) for x in leaves]
        pairs = zip(row, shapes, strict=True)
        table.append([b if b.shape == shape else b.reshape(shape) for b, shape in pairs])
    return table


def _columns(
    backend: Backend, push: Push, leaves: list[Array], chunk_size: int | None
) -> list[list[Array]]:
    """Computes the blocks by applying the pushforward to one batch of all unit tangents."""
    bases, parts = _unit_vectors(backend, leaves)
    mapped = backend.map_batches(lambda *units: push([*units]), bases, chunk_size, one_draw=True)
    last = [axis_moved(backend, column[: _size(leaves)], 0, -1) for column in mapped]
    return [
        [
            column[..., part].reshape((*column.shape[:-1], *x.shape))
            for x, part in zip(leaves, parts, strict=True)
        ]
        for column in last
    ]


def _unit_vectors(backend: Backend, xs: list[Array]) -> tuple[list[Array], list[slice]]:
    """Returns a batch of all unit vectors of the concatenated xs, and the slice of each array.

    If the xs have no entries, the batch has one row, which no array's slice includes; the
    row only determines the shapes of the results.
    """
    ends = [*accumulate([math.prod(x.shape) for x in xs], initial=0)]
    count, parts = ends[-1], [slice(*pair) for pair in pairwise(ends)]
    if not count:
        return [x.reshape((1, *x.shape)) for x in xs], parts
    pairs = zip(xs, parts, strict=True)
    return [backend.unit_basis(x, p.start, count - p.stop) for x, p in pairs], parts


def _of_precision(backend: Backend, block: Array, x: Array) -> Array:
    """Casts a real or complex block to the precision of a real x."""
    if not backend.is_complex(block):
        return backend.cast(block, x)
    real = backend.cast(block.real, x)
    return block if real.dtype == block.real.dtype else real + 1j * backend.cast(block.imag, x)


def _size(xs: list[Array]) -> int:
    return sum([math.prod(x.shape) for x in xs])
