"""Gradients at intermediate values: `retain_gradient` and `retained_gradients`.

For f(x) = g(h(x)) with a mark at y = h(x) the retained gradient is dg/dy. It is the gradient of
g(h(x) + d) with respect to d at d = 0, so it takes no second pass, and is differentiable in turn.
`arguments/marks.py` explains the marks; `torch/marks.py` and `jax/marks.py` evaluate f with them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import islice
from typing import Any

import numpy as np

from gradtools.arguments.calls import Call
from gradtools.arguments.checks import normalized_argnums
from gradtools.arguments.marks import Mark, MarkedValues, here
from gradtools.arguments.wording import describe
from gradtools.backend import Array, Operators, P, T
from gradtools.derivatives import Argnums, derivative_function
from gradtools.errors import GradtoolsError


class MarkedCall(Call):
    """A call of f that marks values; after its leaves it takes the arrays of the tape."""

    tape: MarkedValues

    def __call__(self, *leaves: Array) -> tuple[list[Array], list[Array]]:
        """f at the leaves, as in `Call`, with the arrays of its marks after them."""
        count = len(self.leaves)
        self.tape.replace(leaves[count:] or self.tape.arrays)
        with here.moved(self.tape, ()):
            return super().__call__(*leaves[:count])


class RetainedGradients(Operators):
    """`retain_gradient` and `retained_gradients`."""

    def retain_gradient(self, x: T, name: str) -> T:
        """The identity, which marks a value of which `retained_gradients` returns the cotangent.

        Outside of `retained_gradients` it costs nothing: PyTorch returns x itself, and a compiled
        JAX program has no operation for it. Use the result in place of x: only what is computed
        from it counts for the retained gradient.

        Args:
            x: A pytree of arrays. Leaves that are not floating or complex pass through.
            name: The name of the value. It may occur several times.

        Returns:
            x, unchanged.

        Raises:
            GradtoolsError: name is no string, or x holds no floating or complex array.

        Example:
            >>> f = lambda x: gt.retain_gradient(x ** 2, "square") ** 3
            >>> value, g, retained = gt.retained_gradients(f)(gt.asarray(np.float32(2.0)))
            >>> float(retained["square"])
            48.0

        Source: perturb of flax.linen and ``Tensor.retain_grad`` of PyTorch.
        """
        backend = self._backend
        if not isinstance(name, str):
            raise GradtoolsError(f"retain_gradient: name is {name!r}; expected a string.")
        if here.tape is None:
            if backend.traces_marks:
                return self._marked(x, name)
            backend.check_arrays(x)
            return x
        return backend.compiler.uncompiled(self._marked, x, name)

    def retained_gradients(
        self, f: Callable[P, Any], argnums: Argnums = 0, has_aux: bool = False
    ) -> Callable[P, tuple[Any, Any, dict[str, Any]]]:
        """The value and gradient of a real scalar f, and the gradients at the values that it marks.

        One evaluation of f in eager PyTorch; inside of torch.func's transforms, where the shapes of
        marked values must be known first, f is evaluated twice. JAX: f is traced to a jaxpr, so it
        cannot branch on values, and marks in `jax.lax.while_loop`, which has no reverse mode, are
        refused.

        Args:
            f: As in `grad`; it calls `retain_gradient`, or a function that does.
            argnums: As in `grad`; with `()` grads is `()`, and only retained gradients are
                computed.
            has_aux: Whether f returns `(output, aux)`.

        Returns:
            A function of f's arguments that returns `(value, grads, retained)`, or
            `((value, aux), grads, retained)`. retained is a dict from name to a pytree like the
            marked value, with None at leaves that are not floating or complex. A name that occurs
            several times (in a loop, a scan, a shared layer) gives its gradients stacked in order,
            or as a list if their shapes differ. Under vmap the batch axis is in front. Gradients in
            the chunks of one `chunked` call are joined along axis 0. A value that does not reach
            the output gives zeros. All results are differentiable, as those of `grad`.

        Raises:
            GradtoolsError: (on call) The output is not a real scalar, or an argument in argnums
                holds something that is not a floating or complex array.

        Example:
            >>> def f(w, x):
            ...     for _ in range(2):
            ...         x = gt.retain_gradient(w * x, "state")
            ...     return x
            >>> two, three = gt.asarray(np.float32(2.0)), gt.asarray(np.float32(3.0))
            >>> value, g, retained = gt.retained_gradients(f)(two, three)
            >>> float(value), float(g), gt.to_numpy(retained["state"]).tolist()
            (12.0, 12.0, [2.0, 1.0])
        """
        call = partial(self._backend.compiler.uncompiled, self._retained, f, argnums, has_aux)
        return derivative_function("retained_gradients", f, argnums, call)

    def _marked(self, x: Any, name: str) -> Any:
        backend = self._backend
        leaves, treedef = backend.flatten(x)
        leaves = [backend.as_leaf(v) for v in leaves]
        places = [i for i, v in enumerate(leaves) if backend.is_array(v) and backend.is_inexact(v)]
        if not places:
            raise GradtoolsError(
                f"retain_gradient: x is {describe(backend, x)}, and holds no floating or complex "
                "array."
            )
        cuts, index = tuple([chunk[0] for chunk in here.chunks]), here.next_index()
        if here.tape is None and not cuts:
            index = 0  # a trace that is compiled outside of `retained_gradients`
        mark = Mark(name, treedef, tuple(places), len(leaves), cuts, index)
        for i, y in zip(places, backend.marked([leaves[i] for i in places], mark), strict=True):
            leaves[i] = y
        return backend.unflatten(treedef, leaves)

    def _retained(
        self, f: Any, argnums: Argnums, has_aux: bool, /, *args: Any, **kwargs: Any
    ) -> Any:
        backend, name = self._backend, "retained_gradients"
        several = isinstance(argnums, tuple | list)
        none = several and not len(argnums)  # type: ignore[arg-type]
        positions = () if none else normalized_argnums(name, argnums, len(args))
        call = MarkedCall(backend, name, f, args, kwargs, positions, has_aux)
        evaluation, marks, likes = backend.retaining(call)
        value = call.scalar(evaluation.outs, evaluation.extras)
        pulled = evaluation.pullback([backend.ones_like(value)])
        left = iter(backend.filled(pulled, [*call.leaves, *likes]))
        trees = call.to_trees([*islice(left, len(call.leaves))])
        retained = _joined(backend, [(m, [*islice(left, len(m.places))]) for m in marks])
        aux = call.output(evaluation.outs, evaluation.extras)[1]
        result = (value, aux) if has_aux else value, trees if several else trees[0], retained
        return call.attaching(self._retained, f, argnums, has_aux, *args, **kwargs)(result)


# --- several occurrences of a name ---------------------------------------------------------------

Entry = tuple[Mark, list[Array]]


def _joined(backend: Any, entries: list[Entry]) -> dict[str, Any]:
    """The pytree of each name: chunks joined along the batch, then occurrences stacked."""
    while depth := max((len(mark.chunks) for mark, _ in entries), default=0):
        entries = _without_chunks(backend.xp, entries, depth)
    retained = {}
    for name in dict.fromkeys(mark.name for mark, _ in entries):
        own = [entry for entry in entries if entry[0].name == name]
        first, shape = own[0][0], lambda mark, x: x.shape[len(mark.loops) :]
        kinds = {(m.treedef, m.places, *(tuple(shape(m, x)) for x in xs)) for m, xs in own}
        if len(own) == 1 and not first.loops:
            retained[name] = _tree(backend, *own[0])
        elif len(kinds) == 1:
            rows = [[x.reshape((-1, *shape(m, x))) for x in xs] for m, xs in own]
            columns = zip(*rows, strict=True)
            retained[name] = _tree(backend, first, [*map(backend.xp.concatenate, columns)])
        else:
            retained[name] = [
                _tree(backend, m, list(xs))
                for m, stacked in own
                for xs in zip(*[x.reshape((-1, *shape(m, x))) for x in stacked], strict=True)
            ]
    return retained


def _tree(backend: Any, mark: Mark, xs: list[Array]) -> Any:
    leaves = [None] * mark.size
    for i, x in zip(mark.places, xs, strict=True):
        leaves[i] = x
    return backend.unflatten(mark.treedef, leaves)


def _without_chunks(xp: Any, entries: list[Entry], depth: int) -> list[Entry]:
    """The entries, with those of the innermost chunks joined along axis 0 of the value."""
    result, unfinished = list[Any](), dict[Mark, list[tuple[int, list[Array]]]]()
    for mark, xs in entries:
        if len(mark.chunks) < depth:
            result.append((mark, None, xs))
            continue
        cut, loops, count = mark.chunks[-1], list(mark.loops), 1
        if True in loops:  # a traced loop over several chunks
            axis = len(loops) - 1 - loops[::-1].index(True)
            count = xs[0].shape[axis]
            del loops[axis]
            xs = [_with_rows(xp.moveaxis(x, axis, len(loops)), len(loops)) for x in xs]
        else:
            xs = [x[..., None] if x.ndim == len(loops) else x for x in xs]
        call = replace(mark, chunks=mark.chunks[:-1], loops=tuple(loops))
        if call not in unfinished:
            unfinished[call] = []
            result.append((call, cut, unfinished[call]))
        unfinished[call].append((count, xs))
        if sum(n for n, _ in unfinished[call]) == cut.count:
            del unfinished[call]
    return [(m, xs if cut is None else _concatenated(xp, m, cut, xs)) for m, cut, xs in result]


def _with_rows(x: Array, axis: int) -> Array:
    """x with this axis, over chunks, merged with the next one, the rows of each chunk."""
    shape = tuple(x.shape)
    return x.reshape((*shape[:axis], -1, *shape[axis + 2 :]))


def _concatenated(xp: Any, mark: Mark, cut: Any, parts: list[tuple[int, list[Array]]]) -> Any:
    axis = len(mark.loops)
    full = [xp.concatenate(xs, axis=axis) for xs in zip(*[xs for _, xs in parts], strict=True)]
    if not cut.interleaved:
        return full
    order = np.argsort([row for rows in cut.rows for row in rows])
    whole = (slice(None),) * axis
    return [x[(*whole, order)] if x.shape[axis] == cut.size else x for x in full]
