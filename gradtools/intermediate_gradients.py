"""Implements `retain_gradient` and `retained_gradients`, for gradients of intermediate values.

For f(x) = g(h(x)) with a mark at y = h(x), the retained gradient is dg/dy. The retained gradient is
the gradient of g(h(x) + d) with respect to d at d = 0, so the backward pass of f also computes the
retained gradient, which is differentiable. `arguments/marks.py` explains the marks;
`torch/marks.py` and `jax/marks.py` evaluate functions that contain marks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import islice
from typing import Any

from gradtools.arguments.calls import Call
from gradtools.arguments.checks import normalized_argnums
from gradtools.arguments.marks import Mark, MarkedValues, here, not_retained
from gradtools.arguments.wording import describe, shown
from gradtools.backend import Array, Operators, P, R, T
from gradtools.derivatives import Argnums, derivative_function
from gradtools.errors import GradtoolsError


class MarkedCall(Call):
    """A call of a function that marks values; takes the leaves and then the arrays of `tape`."""

    tape: MarkedValues

    def __call__(self, *leaves: Array) -> tuple[list[Array], list[Array]]:
        """Evaluates f as in `Call`; the arrays of the marks follow the leaves of the arguments."""
        count = len(self.leaves)
        self.tape.replace(leaves[count:] or self.tape.arrays)
        with here.moved(self.tape, ()):
            return super().__call__(*leaves[:count])


class RetainedGradients(Operators):
    """The operators `retain_gradient` and `retained_gradients`."""

    def retain_gradient(self, x: T, name: str) -> T:
        """Marks x, so that `retained_gradients` returns the gradient with respect to x.

        Outside of `retained_gradients` a mark has no cost: in PyTorch the result is x itself, and a
        compiled JAX program contains no operation for the mark. Use the result in place of x: only
        values computed from the result contribute to the retained gradient.

        Args:
            x: A pytree of arrays. Leaves that are not floating or complex are returned unchanged.
            name: The name of the value. Several values may have the same name.

        Returns:
            x, unchanged.

        Raises:
            GradtoolsError: name is not a string, or x contains no floating or complex array.

        Example:
            >>> f = lambda x: gt.retain_gradient(x ** 2, "square") ** 3
            >>> value, g, retained = gt.retained_gradients(f)(gt.asarray(np.float32(2.0)))
            >>> float(retained["square"])
            48.0

        Source: flax.linen.Module.perturb and torch.Tensor.retain_grad.
        """
        backend = self._backend
        if not isinstance(name, str):
            raise GradtoolsError(
                f"retain_gradient: name is {shown(name)}; expected a string: retain_gradient(x, "
                "name)."
            )
        if here.tape is None:
            if backend.traces_marks:
                return self._marked(x, name)
            backend.check_arrays(x)
            return x
        return backend.compiler.uncompiled(self._marked, x, name)

    def retained_gradients(
        self, f: Callable[P, R], argnums: Argnums = 0, has_aux: bool = False
    ) -> Callable[P, tuple[R, Any, dict[str, Any]]]:
        """Computes the value of f, and its gradients with respect to arguments and marked values.

        In eager PyTorch f is evaluated once; inside of torch.func's transforms, f is evaluated
        twice, first to determine the shapes of marked values. In JAX f is traced to a jaxpr, so
        it cannot branch on values.

        A mark raises an error where its gradient cannot be retained: inside of `frozen`, of
        mode="forward_over_reverse", of F and solve of `implicit_solution`, and of
        `jax.lax.while_loop`, which has no reverse mode. A mark inside of a function with a custom
        rule is not retained, or raises an error, because the rule replaces the derivative.

        Args:
            f: As in `grad`; f, or a function that f calls, calls `retain_gradient`.
            argnums: As in `grad`; with `()` only retained gradients are computed, and grads is
                `()`.
            has_aux: Whether f returns `(output, aux)`.

        Returns:
            A function of f's arguments that returns `(value, grads, retained)`, or `((value, aux),
            grads, retained)`. retained is a dict from names to pytrees like the marked values, with
            None at leaves that are not floating or complex. If a name occurs several times (in a
            loop, a scan, the chunks of `chunked`, a shared layer), its gradients are stacked in
            order, or listed if their shapes differ; in JAX, the gradients of one mark for all steps
            of a traced loop precede the gradients of the next mark. Under vmap, the batch axis is
            the first axis of each retained gradient. The gradient with respect to a value on which
            the output does not depend is zero. All results are differentiable, like the results of
            `grad`.

        Raises:
            GradtoolsError: (When called) the output is not a real scalar, or an argument in argnums
                contains a leaf that is not a floating or complex array.

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
        if here.tape is not None and here.tape.within:
            raise not_retained(name, here.tape.within)
        leaves, treedef = backend.flatten(x)
        leaves = [backend.as_leaf(v) for v in leaves]
        places = [i for i, v in enumerate(leaves) if backend.is_array(v) and backend.is_inexact(v)]
        if not places:
            raise GradtoolsError(
                f"retain_gradient: x is {describe(backend, x)}, which contains no floating or "
                "complex array."
            )
        mark = Mark(name, treedef, tuple(places), len(leaves))
        for i, y in zip(places, backend.marked([leaves[i] for i in places], mark), strict=True):
            leaves[i] = y
        return backend.unflatten(treedef, leaves)

    def _retained(
        self, f: Any, argnums: Argnums, has_aux: bool, /, *args: Any, **kwargs: Any
    ) -> Any:
        backend, name = self._backend, "retained_gradients"
        several = isinstance(argnums, (tuple, list))
        none = several and not len(argnums)  # type: ignore[arg-type]
        positions = () if none else normalized_argnums(name, argnums, len(args))
        call = MarkedCall(backend, name, f, args, kwargs, positions, has_aux)
        evaluation, marks, likes = backend.retaining(call)
        value = call.scalar(evaluation.outs, evaluation.extras)
        pulled = evaluation.pullback([backend.ones_like(value)])
        left = iter(backend.filled(pulled, [*call.leaves, *likes]))
        trees = call.to_trees([*islice(left, len(call.leaves))])
        retained = _by_name(backend, [(m, [*islice(left, len(m.places))]) for m in marks])
        aux = call.output(evaluation.outs, evaluation.extras)[1]
        result = (value, aux) if has_aux else value, trees if several else trees[0], retained
        return call.attaching(self._retained, f, argnums, has_aux, *args, **kwargs)(result)


# --- several occurrences of one name -------------------------------------------------------------


def _by_name(backend: Any, entries: list[tuple[Mark, list[Array]]]) -> dict[str, Any]:
    """Returns the gradients by name; gradients with the same name are stacked or listed."""
    retained = {}
    for name in dict.fromkeys(mark.name for mark, _ in entries):
        own = [
            (m, xs, [tuple(x.shape[m.loops :]) for x in xs]) for m, xs in entries if m.name == name
        ]
        first, xs, _ = own[0]
        if len(own) == 1 and not first.loops:
            retained[name] = _tree(backend, first, xs)
            continue
        steps = [
            (m, [x.reshape((-1, *shape)) for x, shape in zip(xs, shapes, strict=True)])
            for m, xs, shapes in own
        ]
        if len({(m.treedef, m.places, *shapes) for m, _, shapes in own}) == 1:
            columns = zip(*[xs for _, xs in steps], strict=True)
            retained[name] = _tree(backend, first, [*map(backend.xp.concatenate, columns)])
        else:
            retained[name] = [
                _tree(backend, m, x) for m, xs in steps for x in zip(*xs, strict=True)
            ]
    return retained


def _tree(backend: Any, mark: Mark, xs: Sequence[Array]) -> Any:
    leaves = [None] * mark.size
    for i, x in zip(mark.places, xs, strict=True):
        leaves[i] = x
    return backend.unflatten(mark.treedef, leaves)
