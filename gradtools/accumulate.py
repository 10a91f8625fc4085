"""Accumulates gradients in the parameters' buffers or in a `GradientAccumulator`.

`grad` changes no state, so many threads may call it on shared parameters. `accumulate_gradients`,
`assign_gradients` and `GradientAccumulator` write to a buffer:

    accumulate_gradients   buffer += g                    assign_gradients   buffer = g
    GradientAccumulator    sum_i w_i g_i    and    (sum_i w_i g_i) / (sum_i w_i)

With several ranks (processes in PyTorch, devices along a mapped axis in JAX), the numerator and the
denominator of the mean are also summed over the ranks, so the mean over all tokens is exact for any
distribution of the tokens over the ranks.

The buffer is `.grad` in PyTorch and a pytree in JAX; the backends' `accumulate.py` updates the
buffer. Compensated sums store the rounding error of each addition (Knuth's exact two-term sum, The
Art of Computer Programming, vol. 2, 4.2.2) and add the stored error to the sum; the rounding error
of this second addition is stored (Dekker's sum, Numerische Mathematik 18, 1971).
"""

from __future__ import annotations

import numbers
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from threading import Lock
from typing import Any

from gradtools.arguments.wording import describe, in_words, with_article
from gradtools.backend import Operators
from gradtools.boundary import user_facing_methods
from gradtools.errors import GradtoolsError
from gradtools.integrations.containers import is_same

_WIDE = {"float16": "float32", "bfloat16": "float32", "complex32": "complex64"}
PRECISIONS = ("float16", "bfloat16", "float32", "float64")


class Accumulation(Operators):
    """The operators that write gradients, bound to a backend."""

    def GradientAccumulator(
        self, dtype: Any = None, compensated: bool = False
    ) -> GradientAccumulator:
        """Creates a thread-safe running weighted sum of gradients.

        After n calls of `add(g_i, w_i)`, `sum()` is w_1 g_1 + ... + w_n g_n, and `mean()` is the
        sum divided by w_1 + ... + w_n (the attribute `weight`). For chunks of unequal size, pass
        the number of examples (or tokens) of a chunk as the weight of its mean gradient.
        `mean(group=...)` and `mean(axis_name=...)` average over all ranks. See
        `gradtools.accumulate.GradientAccumulator` for the methods.

        Args:
            dtype: The precision of the sums and of the results, such as "float64"; complex leaves
                use the complex dtype of that precision. If None, the gradients' own dtype is used;
                16-bit gradients are added in float32 and rounded when the sum or mean is read.
            compensated: Whether to keep the rounding errors of the additions in a second buffer
                (Kahan summation). The result is about as accurate as a sum in twice the precision,
                at the cost of nine more additions per array element.

        Returns:
            An empty `GradientAccumulator`.

        Raises:
            GradtoolsError: dtype is not one of the supported floating dtypes.

        Example:
            >>> chunks = gt.GradientAccumulator()
            >>> chunks.add({"w": gt.asarray([3.0, 0.0])}, weight=4)
            >>> chunks.add({"w": gt.asarray([0.0, 9.0])}, weight=2)
            >>> gt.to_numpy(chunks.mean()["w"]).tolist()
            [2.0, 3.0]
        """
        return GradientAccumulator(self._backend, dtype, compensated)

    def accumulate_gradients(self, target: Any, grads: Any) -> Any:
        """Adds gradients to a buffer.

        PyTorch: target contains the parameters. As in `backward()`, gradients are added to each
        `.grad` in place if possible, and a `.grad` that is None is created. Calls from many threads
        are serialized by one lock, which does not guard against a simultaneous `backward()` or
        optimizer step. Gradients are copied and detached; hooks do not run, and
        DistributedDataParallel does not all-reduce the gradients. If the shape, dtype or path of
        any gradient does not match, an error is raised and no `.grad` is changed.

        JAX: target is the buffer; the function writes nothing and returns the new buffer. The
        function works under jit. A program that uses the return value runs in both frameworks.

        Only the buffers with a gradient in `grads` are changed: a dict in `grads` may contain some
        of the target's keys, and None leaves the corresponding subtree unchanged.

        Args:
            target: PyTorch: a pytree of leaf tensors that require grad, or a `torch.nn.Module`,
                which is treated as the dict of its `named_parameters()`. JAX: a pytree of floating
                or complex arrays; None represents a buffer of zeros.
            grads: The gradients, with the target's structure, shapes and dtypes.

        Returns:
            target in PyTorch, the new buffer in JAX.

        Raises:
            GradtoolsError: A structure, shape, dtype or device does not match; the message names
                the leaf path. In PyTorch, a target is not a leaf or does not require grad.

        Example:
            >>> def f(x1, x2): return x1**2 + 5 * x2
            >>> x1, x2 = gt.asarray(3.0), gt.asarray(1.0)
            >>> if hasattr(x1, "requires_grad_"): # in PyTorch the parameters are their own buffers
            ...     buffer = {"x1": x1.requires_grad_(), "x2": x2.requires_grad_()}
            ... else:
            ...     buffer = {"x1": gt.asarray(0.0), "x2": gt.asarray(0.0)}
            >>> g1, g2 = gt.grad(f, argnums=(0, 1))(x1, x2)
            >>> buffer = gt.accumulate_gradients(buffer, {"x1": g1})
            >>> buffer = gt.accumulate_gradients(buffer, {"x1": g1})
            >>> float(getattr(buffer["x1"], "grad", buffer["x1"]))
            12.0
        """
        accumulate = self._backend.submodule("accumulate", "accumulate_gradients")
        return accumulate.write_gradients(target, grads, add=True)

    def assign_gradients(self, target: Any, grads: Any) -> Any:
        """Replaces the values in a buffer with gradients.

        Works like `accumulate_gradients`, but replaces the old values instead of adding to them.
        Entries that are missing in `grads` or are None keep their old values. In PyTorch a shared
        parameter accepts only one gradient, and `.grad` is the given tensor itself, without its
        graph: an optimizer or gradient clipping that changes `.grad` in place also changes this
        tensor.

        Args:
            target: See `accumulate_gradients`.
            grads: See `accumulate_gradients`.

        Returns:
            target in PyTorch, the new buffer in JAX.

        Raises:
            GradtoolsError: As in `accumulate_gradients`.

        Example:
            >>> x = gt.asarray(3.0)
            >>> if hasattr(x, "requires_grad_"):
            ...     x = x.requires_grad_()
            >>> buffer = gt.assign_gradients({"x": x}, {"x": gt.asarray(7.0)})
            >>> buffer = gt.assign_gradients(buffer, {"x": gt.asarray(8.0)})
            >>> float(getattr(buffer["x"], "grad", buffer["x"]))
            8.0
        """
        accumulate = self._backend.submodule("accumulate", "assign_gradients")
        return accumulate.write_gradients(target, grads, add=False)


# --- the accumulator ---------------------------------------------------------------------


@dataclass(frozen=True)
class State:
    """The state of an accumulator, or one weighted gradient (a term) in the same form."""

    treedef: Any  # The tree structure of the gradients.
    paths: tuple[str, ...]  # The leaf paths of the gradients; empty in a term.
    specs: tuple[Any, ...]  # The dtype, shape and device of each added leaf.
    # The weighted sums, which a backend may update in place; in a term, the detached gradients.
    totals: tuple[Any, ...]
    errors: tuple[Any, ...]  # The rounding errors of the sums, if they are compensated.
    dtypes: tuple[str, ...]  # The names of the results' dtypes.
    weight: Any  # The sum of the weights.
    # For each leaf, the JAX mesh axes over which the types of all added gradients vary.
    varies: tuple[frozenset[Any], ...]


@user_facing_methods
class GradientAccumulator:
    """A running weighted sum of gradients, created by `gt.GradientAccumulator`.

    All methods may be called from many threads: a lock serializes them. The accumulator stores
    detached copies of the gradients and returns copies of the sums. In JAX, an accumulator must be
    created, filled and read outside of all transformations, or inside one traced function; in
    PyTorch, the same applies to `torch.func` transforms. Using an accumulator across
    transformations raises an error, because the accumulator would leak a tracer, or would add
    gradients only while a function is traced.
    """

    def __init__(self, backend: Any, dtype: Any = None, compensated: bool = False) -> None:
        self._backend = backend
        self._precision = _precision(dtype)
        self._compensated = compensated
        self._state: State | None = None
        self._arrays: Any = backend.submodule("accumulate", "GradientAccumulator")
        self._trace, self._lock = self._arrays.current_trace(), Lock()

    def __repr__(self) -> str:
        with self._lock:
            state = self._state
        if state is None:
            return "<GradientAccumulator, empty>"
        leaves = ", ".join(
            [f"{d}{list(x.shape)}" for x, d in zip(state.totals, state.dtypes, strict=True)]
        )
        return f"<GradientAccumulator, weight {state.weight}, {leaves}>"

    def add(self, grads: Any, weight: Any = 1) -> None:
        """Adds weight * grads to the sum. If an error is raised, the accumulator is unchanged.

        Args:
            grads: A pytree of floating or complex arrays, of the same structure, shapes, dtypes
                and device at every call. An entry of None stays None.
            weight: A real number, or a real array of shape (). A concrete array is read
                immediately, which synchronizes with its device. Gradients with weight 0 are
                ignored, even if they are NaN (the gradient of a mean over no examples is NaN).

        Raises:
            GradtoolsError: grads differs from earlier additions in structure, or contains a leaf
                that is not a gradient; weight is not a real scalar; the accumulator was created in
                another transformation.
        """
        self._check_trace("add")
        w = self._weight(weight)
        with self._lock:  # `_term` reads the state, to order dict keys as in the first term
            term = self._term(grads, w)
            self._state = self._first(term) if self._state is None else self._after(term)

    @property
    def weight(self) -> Any:
        """The sum of the weights of this rank: a number, or an array if a weight was traced."""
        with self._lock:
            return 0 if self._state is None else self._state.weight

    def sum(self) -> Any:
        """Returns the weighted sum of the gradients, in the precision given by `dtype`.

        Raises:
            GradtoolsError: No gradients have been added.
        """
        state, sums = self._read("sum", lambda state: [*map(self._arrays.copied, state.totals)])
        return self._result(state.treedef, sums, state.dtypes)

    def mean(self, group: Any = None, axis_name: Any = None) -> Any:
        """Returns the weighted mean of the gradients of this rank or of all ranks.

        With a group or an axis, the mean is sum_r sum_i w_ri g_ri / sum_r sum_i w_ri, and is equal
        on all ranks r. A rank without examples must add zeros with weight 0.

        Args:
            group: PyTorch: a process group (`torch.distributed.group.WORLD` for all processes) or
                a DeviceMesh. Every process of the group must call `mean`. Before
                `init_process_group` WORLD is None, for which `mean` returns the mean of this rank.
                A DTensor, which FSDP2 stores in `.grad`, is one gradient of all processes of its
                mesh: add it with the same weight on each process.
            axis_name: JAX: the mapped axis or axes (of `shard_map`, `vmap` or `pmap`). Under
                `shard_map` with check_vma=True, differentiate with respect to parameters that vary
                (`jax.lax.pcast(w, axis, to="varying")`); otherwise `jax.grad` itself sums the
                gradients over the axis, without their weights.

        Raises:
            GradtoolsError: No gradients have been added, or the weights sum to zero. (A traced
                total weight of zero gives NaN or infinity instead.) The ranks added gradients of
                different structures, shapes or dtypes; the group or axis does not exist; a gradient
                has already been summed over the ranks.
        """
        if group is not None or axis_name is not None:
            uncompiled = self._backend.compiler.uncompiled
            return uncompiled(self._mean_of_ranks, group, axis_name)
        state, means = self._read("mean", lambda state: self._over(state.totals, state.weight))
        return self._result(state.treedef, means, state.dtypes)

    def _mean_of_ranks(self, group: Any, axis_name: Any) -> Any:
        self._check_trace("mean")
        with self._lock:
            own = self._state
            if own is not None:
                own = replace(own, totals=tuple(map(self._arrays.copied, own.totals)))
        treedef, sums, weight, dtypes = self._arrays.sums_over_ranks(own, group, axis_name)
        self._check_total(weight)
        return self._result(treedef, self._over(sums, weight), dtypes)

    def _result(self, treedef: Any, values: Sequence[Any], dtypes: Sequence[str]) -> Any:
        """Casts the values to the dtypes of the results and unflattens the values to a pytree."""
        pairs = zip(values, dtypes, strict=True)
        cast = [x if self._name(x) == name else self._backend.cast(x, name) for x, name in pairs]
        return self._backend.unflatten(treedef, cast)

    def reset(self) -> None:
        """Empties the accumulator; the next gradients may have a different structure."""
        self._check_trace("reset")
        with self._lock:
            self._state = None

    # --- one addition

    def _term(self, grads: Any, weight: Any) -> State:
        leaves, treedef = self._backend.flatten(grads)
        state = self._state
        if state is not None and not is_same(treedef, state.treedef):
            leaves, treedef = self._backend.flatten_like(state.treedef, grads)
        arrays, words = [self._arrays.detached(x) for x in leaves], self._arrays.spec_in_words
        for k, array in enumerate(arrays):
            if array is None or not self._backend.is_inexact(array):
                came = with_article(type(leaves[k]).__name__)
                such = " (p.grad)" if array is None and hasattr(leaves[k], "grad") else ""
                if hasattr(leaves[k], "named_parameters"):
                    such = ", such as {n: p.grad for n, p in module.named_parameters()}"
                raise GradtoolsError(
                    f"GradientAccumulator.add: grads{self._backend.leaf_paths(grads)[k]} is "
                    f"{came if array is None else words(self._arrays.spec(array))}; expected a "
                    f"floating or complex array. Pass gradients{such}, or None for a missing "
                    "gradient."
                )
        specs = tuple(map(self._arrays.spec, arrays))
        varies = tuple(map(self._arrays.varies, arrays))
        return State(treedef, (), specs, tuple(arrays), (), (), weight, varies)

    def _first(self, term: State) -> State:
        """Returns the state after the first `add`."""
        paths = self._paths(term)
        weighted, copied = self._weighted(paths, term), self._arrays.copied
        pairs = zip(term.totals, weighted, strict=True)
        totals = tuple([copied(y) if y is x else y for x, y in pairs])
        errors = tuple(map(self._backend.zeros_like, totals)) if self._compensated else ()
        read = term.totals if self._precision is None else totals
        dtypes = tuple(map(self._name, read))
        return replace(term, paths=paths, totals=totals, errors=errors, dtypes=dtypes)

    def _paths(self, term: State) -> tuple[str, ...]:
        whole = self._backend.unflatten(term.treedef, term.totals)
        return tuple(self._backend.leaf_paths(whole))

    def _weighted(self, paths: Sequence[str], term: State) -> list[Any]:
        """Multiplies the gradients of a term by the weight, in the accumulator's dtype."""
        cast, zeros_like = list[Any](), self._backend.zeros_like
        for path, x in zip(paths, term.totals, strict=True):
            name = self._precision or _WIDE.get(self._name(x))
            if name is not None:
                if self._name(x).startswith("complex"):
                    name = "complex128" if name == "float64" else "complex64"
                x = self._backend.cast(x, name)
                if self._name(x) != name:
                    raise GradtoolsError(
                        f"GradientAccumulator.add: grads{path} must be added in {name}, but is "
                        f"{self._name(x)} after the cast. Enable 64-bit numbers first (in JAX: "
                        "jax_enable_x64), or pass a smaller dtype."
                    )
            cast.append(x)
        weight = term.weight
        if not isinstance(weight, (int, float)):  # x may be NaN if w is 0
            pairs = [(self._factor(weight, x), x) for x in cast]
            return [w * self._backend.xp.where(w == 0, zeros_like(x), x) for w, x in pairs]
        if weight == 0:
            return [*map(zeros_like, cast)]
        return cast if weight == 1 else self._arrays.times(cast, float(weight))

    def _over(self, totals: Sequence[Any], weight: Any) -> list[Any]:
        if isinstance(weight, (int, float)):
            return self._arrays.over(totals, float(weight))
        return [total / self._factor(weight, total) for total in totals]

    def _factor(self, weight: Any, x: Any) -> Any:
        """Casts the weight to a real dtype for which `weight * x` has the dtype of x."""
        real = {"complex64": "float32", "complex128": "float64"}
        return self._backend.cast(weight, real.get(self._name(x), self._name(x)))

    def _after(self, term: State) -> State:
        """Returns the accumulator's state after the term is added."""
        state = self._state
        assert state is not None
        self._check_alike(state, term)
        if isinstance(term.weight, (int, float)) and term.weight == 0:
            return state
        weight = state.weight + term.weight
        if term.varies != state.varies:
            both = zip(state.varies, term.varies, strict=True)
            state = replace(state, varies=tuple(a & b for a, b in both))
        if not self._compensated and self._arrays.added(state.totals, term.totals, term.weight):
            return replace(state, weight=weight)
        totals, errors = list[Any](), list[Any]()
        missing = state.errors or (None,) * len(state.totals)
        terms = self._weighted(state.paths, term)
        for a, error, b in zip(state.totals, missing, terms, strict=True):
            total = s = a + b
            if self._compensated:
                share, xp = s - a, self._backend.xp
                error = error + ((a - (s - share)) + (b - share))  # The rounding error of s.
                total = xp.where(xp.isfinite(s), s + error, s)  # The error is NaN for infinite s.
                errors.append(error - (total - s))
            totals.append(total)
        return replace(state, totals=tuple(totals), errors=tuple(errors), weight=weight)

    # --- helpers

    def _read(self, caller: str, of: Callable[[State], list[Any]]) -> tuple[State, list[Any]]:
        """Returns the state and `of(state)`. The lock is held while `of` copies the sums."""
        self._check_trace(caller)
        with self._lock:
            state = self._state
            if state is None:
                raise GradtoolsError(
                    f"GradientAccumulator.{caller}: nothing has been added, so there is no "
                    f"{caller}. Call add(grads) first."
                )
            if caller == "mean":
                self._check_total(state.weight)
            return state, of(state)

    def _check_total(self, weight: Any) -> None:
        if isinstance(weight, (int, float)) and weight == 0:
            raise GradtoolsError(
                "GradientAccumulator.mean: the weights sum to 0, so there is no mean. Pass "
                "weights that do not sum to 0, or use sum()."
            )

    def _weight(self, weight: Any) -> Any:
        self._backend.check_array(weight, "weight")
        number = self._backend.as_number(weight)
        real = isinstance(number, numbers.Real) or (
            number is not None
            and getattr(number, "shape", None) == ()
            and not self._name(number).startswith("complex")
        )
        if not real:
            raise GradtoolsError(
                f"GradientAccumulator.add: weight is {describe(self._backend, weight)}; expected a "
                "real number or a real array of shape (). The order is add(grads, weight). Apply "
                "the weights of single examples inside the loss, before the gradient is taken."
            )
        return number

    def _check_trace(self, caller: str) -> None:
        if self._trace == self._arrays.current_trace():
            return
        raise GradtoolsError(
            f"GradientAccumulator.{caller}: the accumulator was created outside of the "
            "transformation (jit, vmap, grad, scan, ...) in which it is used, or inside of a "
            "transformation that has ended. A traced function cannot contain the accumulator's "
            "state. Create, fill and read the accumulator in one place, or pass a buffer through "
            "the function with buffer = accumulate_gradients(buffer, grads)."
        )

    def _check_alike(self, state: State, term: State) -> None:
        """Raises an error if the term differs from earlier terms in structure or in array types."""
        if not is_same(state.treedef, term.treedef):
            paths = self._paths(term)
            new = [f"grads{path} is new" for path in paths if path not in state.paths]
            lost = [f"grads{path} is missing" for path in state.paths if path not in paths]
            what = [*new, *lost, "grads has containers of other types"][0]
            raise GradtoolsError(
                f"GradientAccumulator.add: {what}; got {in_words(term.treedef)}, expected "
                f"{in_words(state.treedef)}, as in the first add. Use one accumulator for each "
                "model, or call reset() first."
            )
        if state.specs == term.specs:
            return
        words = self._arrays.spec_in_words
        for path, expected, came in zip(state.paths, state.specs, term.specs, strict=True):
            if expected != came:
                raise GradtoolsError(
                    f"GradientAccumulator.add: grads{path} is {words(came)}; expected "
                    f"{words(expected)}, as in the first add. Use one accumulator for each model, "
                    "or call reset() first."
                )

    def _name(self, x: Any) -> str:
        return self._backend.dtype_name(x)


def _precision(dtype: Any) -> str | None:
    """Returns the name of a floating dtype of NumPy, PyTorch or JAX; returns None for None."""
    if dtype is None:
        return None
    name = getattr(dtype, "name", None) or getattr(dtype, "__name__", None) or str(dtype)
    name = dtype if isinstance(dtype, str) else name.removeprefix("torch.")
    if name not in PRECISIONS:
        raise GradtoolsError(
            f"GradientAccumulator: dtype is {dtype!r}; expected one of {', '.join(PRECISIONS)} or "
            "None. Complex gradients are added in the complex dtype of that precision."
        )
    return name
