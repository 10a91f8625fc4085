"""Computes the exact gradient of a loss on the whole batch with the memory of one chunk.

For L = g(f(x_1), ..., f(x_n)), the gradient with respect to f's parameters w is

    dL/dw = sum_i J_i^H c_i        with J_i the Jacobian of f at chunk i, c_i = dL/df(x_i)

The gradient is a sum over chunks, and c_i depends only on the outputs of f. The first pass keeps
the outputs but no graph; the backward pass recomputes the graph of one chunk at a time and applies
its pullback to c_i (Gao et al., Scaling deep contrastive learning batch size under memory limited
setup, 2021, for contrastive losses). If a forward pass costs F and a backward pass costs 2F, the
gradient costs 4F.

This module reads the arguments of a call, and `arguments/chunks.py` splits the arguments into
chunks. The backends' `chunking.py` run and recompute the chunks, in PyTorch with
`recomputation.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from types import FunctionType
from typing import TYPE_CHECKING, Any, Concatenate, Literal, overload

from gradtools.arguments.batches import Batch
from gradtools.arguments.calls import GradientSpec
from gradtools.arguments.checks import as_array, normalized_argnums, refuse_arguments, refuse_axes
from gradtools.arguments.chunks import (
    ChunkOptions,
    Chunks,
    Partition,
    Verify,
    checked_size,
    checked_verify,
)
from gradtools.arguments.in_axes import Argument, accepts, arguments_of_call, takes
from gradtools.arguments.wording import describe, in_words, is_numeric
from gradtools.backend import Array, Backend, F, Operators, P, R, T
from gradtools.boundary import like_function, signature_of
from gradtools.derivatives import Argnums, Derivatives
from gradtools.errors import GradtoolsError
from gradtools.integrations.containers import is_same

if TYPE_CHECKING:
    from gradtools.gradient_types import ValueAndGradient

_MICROBATCHED = "microbatched_value_and_grad"


class Chunking(Operators):
    """The operators that process a batch chunk by chunk."""

    def chunked(
        self,
        f: F,
        chunk_size: int,
        in_axes: Any = 0,
        out_axes: Any = 0,
        key_argnums: Argnums = (),
        carry_argnums: Argnums = (),
        interleaved: bool = False,
        verify: Verify = "first",
        progress: bool = False,
    ) -> F:
        """Applies f to a batch in chunks, and keeps only the graph of one chunk in memory.

        The values and all derivatives equal the results of the loop `concat(f(chunk) for chunk in
        batch)`, for any loss. Each chunk is recomputed in the backward pass. The result equals
        `f(batch)` if f treats examples independently and deterministically. Batch normalization in
        training mode is an exception: each chunk is normalized by the chunk's own statistics, and a
        warning is issued once.

        PyTorch: f is a module, or a function that uses modules; parameters need not be passed.
        Before a chunk is recomputed, random generators and the buffers of f's modules (f itself, or
        modules in its closure) are reset to their state in the first pass; after the recomputation,
        the current state is restored. Grad mode and autocast are set as in the first pass. Other
        side effects of f happen twice, as in `torch.utils.checkpoint`; hooks and counters can call
        `is_recomputing`. Threads must not draw from the global generators, or update the buffers of
        one module, at the same time.

        JAX: the chunks run in a scan whose body is recomputed in the backward pass. The
        recomputation runs the same program, so `verify` has no effect. Results of `pure_callback`
        are saved and not recomputed. A second derivative (nested `grad`) keeps every chunk's graph,
        as with `jax.checkpoint`, unless f is wrapped in `checkpoint`. Pass random keys with
        `key_argnums` and changing state with `carry_argnums`; the state of flax.nnx modules is
        carried, not differentiated, and written back. Call the chunked function under jit:
        otherwise each call traces f again.

        Args:
            f: A function that takes chunks of the arguments and returns a pytree of arrays. Each
                array has one entry per example of the chunk, along its axis in `out_axes`. Each
                entry must be computed from its own example only; otherwise the result differs from
                `f(batch)`. If f compares all pairs of examples, only pairs within one chunk are
                compared.
            chunk_size: The number of examples per chunk; the last chunk may be smaller.
            in_axes: The batch axis, as in `vmap`: an integer, a tuple with an entry for each
                positional argument, or a dict from f's parameters to axes. None passes the whole
                argument to every chunk; a pytree argument may have a pytree of axes. Arguments
                without an entry, including keyword arguments, are split along axis 0; scalars and
                non-arrays are shared. A list is treated as a list of examples: f receives slices of
                the list.
            out_axes: The axis along which outputs are concatenated: an integer, or a tree of
                integers like f's output. If f maps a list to a list, the lists are concatenated.
            key_argnums: The arguments that are random keys; chunk i uses the key folded with i.
            carry_argnums: The arguments that are state, passed from chunk to chunk; f then returns
                `(out, new_carry)`, and the chunked function also returns such a pair. Several
                carries form a tuple. Carries are not differentiated.
            interleaved: Whether chunk i of n consists of the rows i::n instead of a block of rows;
                the order of outputs is restored. Set interleaved=True for a batch that is sharded
                over devices.
            verify: PyTorch: whether to compare the outputs of a recomputed chunk with the outputs
                of the first pass; a difference raises an error. "first": in the function's first
                backward pass; True: in every backward pass; False: never.
            progress: Whether to show a progress bar (of the package tqdm) over the chunks. A JAX
                program that is lowered for another platform shows no bar.

        Returns:
            A function of f's arguments. If f is a module, the result is also a module: in PyTorch,
            a `torch.nn.Module` that shares f's parameters, buffers, state_dict and attributes under
            the same names; for an `equinox` or `flax.nnx` module, a module with f as its attribute
            `module`.

        Raises:
            GradtoolsError: chunk_size is below 1. (When called) A list is empty; axes differ in
                length; in_axes or out_axes do not match; f is a DistributedDataParallel (wrap the
                module that calls chunked instead); f returns None; an output cannot be
                concatenated, such as batch statistics (the message explains how to omit it); a
                constant in the output, such as None, a string or a flag, differs between chunks.
                (When differentiated) f returns different values when it is recomputed.

        Example:
            >>> square = gt.chunked(lambda x: x ** 2, chunk_size=2)
            >>> loss = lambda x: square(x).sum() ** 2
            >>> gt.to_numpy(gt.grad(loss)(gt.asarray(np.float32([1.0, 2.0, 3.0])))).tolist()
            [56.0, 112.0, 168.0]

        Source: Gao, Zhang, Han, Callan, Scaling deep contrastive learning batch size under memory
        limited setup, 2021; recomputation: Griewank and Walther, Algorithm 799: revolve, 2000.
        """
        options = ChunkOptions(checked_verify("chunked", verify), bool(progress))
        chunk_size = checked_size("chunked", f, chunk_size)
        refuse_axes(self._backend, "chunked", in_axes, out_axes)
        axes, argnums = (in_axes, out_axes), (key_argnums, carry_argnums)
        make = partial(self._chunked_of, (chunk_size, axes, argnums, interleaved, options))
        if type(f) is FunctionType:  # the common case: f is not a module
            return make(f)
        return self._backend.like_module(f, make)

    def _chunked_of(self, rest: tuple[Any, ...], f: Callable[..., Any]) -> Any:
        uncompiled = self._backend.compiler.uncompiled
        run = partial(uncompiled, self._run_chunked, f, rest)
        return like_function("chunked_", f, run, "", "{}, applied to a batch in chunks.")

    def _run_chunked(self, f: Callable[..., Any], rest: Any, /, *args: Any, **kwargs: Any) -> Any:
        chunk_size, axes, argnums, interleaved, options = rest
        given = arguments_of_call("chunked", f, args, kwargs, axes[0])
        keys, carried = _keys_and_carries("chunked", args, given, *argnums)
        batch = Batch(self._backend, "chunked", given, lists=True)
        cut = Partition(batch.size, chunk_size, interleaved).checked("chunked")
        chunks = Chunks.of(f, batch, cut, options, axes[1], keys, carried)
        outs, carry = self._backend.run_chunks(chunks)
        return chunks.result(outs, carry)

    @overload
    def microbatched_value_and_grad(
        self,
        f: Callable[Concatenate[T, P], R],
        chunk_size: int,
        *,
        in_axes: Any = None,
        reduction: Literal["mean", "sum"] = "mean",
        weights: Any = None,
        has_aux: Literal[False] = False,
        key_argnums: Argnums = (),
    ) -> ValueAndGradient[T, P, R]: ...
    @overload
    def microbatched_value_and_grad(
        self,
        f: Callable[P, Any],
        chunk_size: int,
        argnums: Argnums = 0,
        in_axes: Any = None,
        reduction: Literal["mean", "sum"] = "mean",
        weights: Any = None,
        has_aux: bool = False,
        key_argnums: Argnums = (),
        carry_argnums: Argnums = (),
    ) -> Callable[P, Any]: ...
    def microbatched_value_and_grad(
        self,
        f: Callable[..., Any],
        chunk_size: int,
        argnums: Argnums = 0,
        in_axes: Any = None,
        reduction: Literal["mean", "sum"] = "mean",
        weights: Any = None,
        has_aux: bool = False,
        key_argnums: Argnums = (),
        carry_argnums: Argnums = (),
    ) -> Any:
        """Computes the value and the gradient of a mean or sum over examples, chunk by chunk.

        With W_c the weight of chunk c (by default its number of examples) and f_c the mean over
        chunk c, the function computes

            value = sum_c W_c f_c / sum_c W_c        grads = sum_c W_c df_c / sum_c W_c

        The value and the gradients equal the results on the full batch, even if the last chunk is
        smaller, unless f mixes examples, as batch normalization in training does. If f divides by
        a number of tokens or by the sum of a mask, pass this number as `weights`. Unlike in
        `chunked`, each chunk's backward pass runs immediately: nothing is recomputed.

        Args:
            f: A real scalar function of a chunk, as in `grad`: the (weighted) mean over the
                chunk's examples, or their sum.
            chunk_size: The number of examples per chunk; the last chunk may be smaller.
            argnums: The positional arguments to differentiate with respect to; all chunks share
                them.
            in_axes: As in `per_example_grad`. None means that the arguments in argnums are shared,
                and every array of the other arguments, positional or keyword, is split along axis
                0. A list is treated as a list of examples; pass the batch `[x, y]` of a DataLoader
                as `tuple(batch)`.
            reduction: Whether f returns the mean or the sum over the examples of a chunk. A loss
                that sums over the batch needs reduction="sum". A loss over all pairs of the batch,
                as in contrastive learning, is not a mean over chunks; use `chunked` for the
                network, and compute the loss from its outputs.
            weights: The weights of a mean in which examples have different weights: one weight per
                example (such as its number of tokens), split with the batch, or a function of a
                chunk's arguments that returns the chunk's weight (and receives the keyword
                arguments for which it has parameters). A chunk of weight 0 adds nothing, even if
                its mean is 0/0.
            has_aux: Whether f returns `(loss, aux)`. aux consists of arrays of numbers, such as
                metrics, which are reduced like the loss, so return no per-example outputs.
            key_argnums: The arguments that are random keys; chunk i uses the key folded with i.
            carry_argnums: The arguments that are state, passed from chunk to chunk, such as batch
                statistics; f then returns `(loss, new_carry)` (or `((loss, aux), new_carry)`),
                where several carries form a tuple. Carries are not differentiated.

        Returns:
            A function of f's arguments that returns `(value, grads)` or `((value, aux), grads)`
            like `value_and_grad`; with carries, a pair of this result and the new carry. 16-bit
            gradients are summed in float32 and rounded once.

        Raises:
            GradtoolsError: As for `chunked` and `value_and_grad`; also if weights are given for a
                sum, differ in length from the batch, or sum to 0 (under jit the result is NaN
                instead), or if a differentiated argument is split.

        Example:
            >>> loss = gt.microbatched_value_and_grad(lambda w, x: (w * x).mean(), chunk_size=2)
            >>> value, g = loss(gt.asarray(np.float32(1.0)), gt.asarray(np.float32([1, 2, 6])))
            >>> float(value), float(g)
            (3.0, 3.0)
        """
        chunk_size = checked_size(_MICROBATCHED, f, chunk_size)
        if reduction not in ("mean", "sum"):
            raise GradtoolsError(
                f"{_MICROBATCHED}: reduction is {reduction!r}; expected 'mean' or 'sum'."
            )
        if weights is not None and reduction == "sum":
            raise GradtoolsError(
                f"{_MICROBATCHED}: weights apply to reduction='mean' only, got reduction='sum'. "
                "To weight a sum, multiply by the weights inside f."
            )
        refuse_arguments(_MICROBATCHED, argnums)
        refuse_axes(self._backend, _MICROBATCHED, in_axes)
        options = _Microbatches(
            self._backend, chunk_size, argnums, in_axes, reduction, weights, has_aux, key_argnums,
            carry_argnums,
        )  # fmt: skip
        doc = "Value and gradient of {} over a batch, in chunks."
        return like_function("microbatched_", f, partial(options.value_and_grads, f), "", doc)

    def is_recomputing(self) -> bool:
        """Returns whether a function is being recomputed, for hooks with side effects.

        In JAX, which has no hooks, the result is always False.

        Returns:
            True inside a function f and the hooks of f's modules while `chunked`, `checkpoint` or
            `frozen` recomputes f.

        Example:
            >>> gt.is_recomputing()
            False
        """
        return self._backend.is_recomputing()


@dataclass(frozen=True)
class _Microbatches:
    """Stores the options of `microbatched_value_and_grad` and evaluates its calls."""

    backend: Backend
    chunk_size: int
    argnums: Argnums
    in_axes: Any
    reduction: str
    weights: Any
    has_aux: bool
    key_argnums: Argnums
    carry_argnums: Argnums

    def value_and_grads(self, f: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """Sums the terms of all chunks; for a mean, divides the sum by the sum of the weights."""
        backend, has_aux, is_mean = self.backend, self.has_aux, self.reduction == "mean"
        positions = normalized_argnums(_MICROBATCHED, self.argnums, len(args))
        opened: Any = backend.opened(_MICROBATCHED, f, args, kwargs, positions)
        repeat = partial(self.value_and_grads, f, *args, **kwargs)
        if opened is not None and opened.opens_once:
            f, args = opened, opened.args
        given = arguments_of_call(_MICROBATCHED, f, args, kwargs, self.in_axes, positions)
        special = self.key_argnums, self.carry_argnums
        keys, carried = _keys_and_carries(_MICROBATCHED, args, given, *special, positions)
        batch, count = self._batch(given, positions), len(args)
        run = like_function("", f, partial(_with_carry, f, has_aux)) if carried else f
        spec = GradientSpec(_MICROBATCHED, run, self.argnums, has_aux or bool(carried))
        if opened is not None and opened.opens_once:
            spec = replace(spec, opened=opened)
        layout: list[Any] = []  # The structures and dtypes of value, grads and aux.
        known: list[Any] = []  # The structure of aux, and the shapes of its leaves.

        def weighted(w: Array, x: Array) -> Array:
            """Returns w * x, or zero where w is zero, because the mean x of no examples is NaN."""
            w = backend.real_scalar(w, x)
            if self.weights is None:
                return w * x
            return w * backend.xp.where(w == 0, backend.zeros_like(x), x)

        def terms(*chunk: Any, **kwargs: Any) -> Any:
            value, aux, grads = Derivatives(backend)._scalar_gradient(spec, chunk[:count], kwargs)
            aux, carry = aux if carried else (aux, None)
            aux = self._metrics(aux, known) if has_aux else None
            parts = [backend.flatten(part) for part in (value, grads, aux)]
            flat = [x for leaves, _ in parts for x in leaves]
            names = [backend.dtype_name(x) for x in flat]
            layout[:] = [[(treedef, len(leaves)) for leaves, treedef in parts], names]
            # Uses at least 32 bits, so that sums of narrow dtypes are not rounded at each chunk.
            pairs, narrow = zip(flat, names, strict=True), ("float16", "bfloat16")
            wide = [backend.cast(x, "float32") if n in narrow else x for x, n in pairs]
            if is_mean:
                size = batch.size_of((*chunk, *kwargs.values()))
                w = backend.cast(self.weight(chunk[:count], kwargs, chunk[-1], size), wide[0])
                if not backend.weighs_sums:
                    wide = [weighted(w, x) for x in wide]
                wide = [w, *wide]
            return (wide, carry) if carried else wide

        cut = Partition(batch.size, self.chunk_size).checked(_MICROBATCHED)
        summand = like_function("", f, terms)
        chunks = Chunks.of(summand, batch, cut, ChunkOptions(), keys=keys, carried=carried)
        weigh = weighted if is_mean and backend.weighs_sums else None
        sums, carry = backend.sum_chunks(chunks, weigh)
        if opened is not None and opened.opens_once:
            opened.refuse_changes()
        if is_mean:
            total, *sums = sums
            self._check_total(total)
            if weigh is None:
                sums = [x / backend.real_scalar(total, x) for x in sums]
        parts, dtypes = layout
        left = iter([backend.cast(x, name) for x, name in zip(sums, dtypes, strict=True)])
        value, grads, aux = [backend.unflatten(treedef, [*islice(left, n)]) for treedef, n in parts]
        outcome: Any = ((value, aux) if has_aux else value), grads
        if carried:
            outcome = outcome, backend.unflatten(chunks.call.carry_def, carry)
        if opened is None:
            return outcome
        return backend.attaching(opened, _MICROBATCHED, repeat)(outcome)

    def _batch(self, given: list[Argument], positions: tuple[int, ...]) -> Batch:
        """Splits the arguments; example weights become an additional positional argument."""
        backend, every = self.backend, list(given)
        if self.weights is not None and not callable(self.weights):
            weights = as_array(backend, _MICROBATCHED, self.weights, "weights")
            if backend.is_complex(weights):
                raise GradtoolsError(f"{_MICROBATCHED}: weights is complex; expected real numbers.")
            if len(weights.shape) != 1:
                raise GradtoolsError(
                    f"{_MICROBATCHED}: weights has shape {tuple(weights.shape)}; "
                    "expected one number for each example, shape (n,), or a function of a chunk's "
                    "arguments."
                )
            count = sum(isinstance(a.key, int) for a in given)
            every.insert(count, Argument(count, weights, 0, named=True, label="weights"))
        for i in positions:
            if given[i].axes is not None:
                raise GradtoolsError(
                    f"{_MICROBATCHED}: argument {i} is differentiated, so all chunks "
                    f"share it; in_axes[{i}] is {given[i].axes!r}, expected None. For gradients "
                    "with respect to the batch use chunked."
                )
        return Batch(backend, _MICROBATCHED, every, lists=True)

    def _metrics(self, aux: Any, known: list[Any]) -> Any:
        """Checks that f's aux consists of numeric arrays, which are reduced like the loss.

        known: The structure and the shapes of aux in an earlier chunk; empty for the first chunk.
        """
        backend = self.backend
        leaves, treedef = backend.flatten_like(known[0], aux) if known else backend.flatten(aux)
        arrays, mean = list[Array](), self.reduction == "mean"
        before, shapes = known or (treedef, [])
        if not is_same(treedef, before):
            raise GradtoolsError(
                f"{_MICROBATCHED}: aux has the structure {in_words(before)} in one chunk and "
                f"{in_words(treedef)} in another. Return the same structure for every chunk."
            )
        paths = backend.leaf_paths(backend.unflatten(treedef, leaves))
        for x, path in zip(leaves, paths, strict=True):
            good, k = is_numeric(backend, x), len(arrays)
            x = x if backend.is_array(x) or not good else backend.asarray(x)
            if not good or (mean and not backend.is_inexact(x)):
                raise GradtoolsError(
                    f"{_MICROBATCHED}: aux{path} is {describe(backend, x)}; expected an array of "
                    "floating-point numbers, which is reduced over chunks like the loss. Use "
                    "reduction='sum' for counts, and carry_argnums for other state."
                )
            if shapes and shapes[k] != tuple(x.shape):
                raise GradtoolsError(
                    f"{_MICROBATCHED}: aux{path} has shape {shapes[k]} in one chunk and "
                    f"{tuple(x.shape)} in another. aux is reduced over chunks like the loss. "
                    "To concatenate the outputs of the examples, use chunked."
                )
            arrays.append(x)
        known[:] = treedef, [tuple(x.shape) for x in arrays]
        return backend.unflatten(treedef, arrays)

    def weight(self, args: tuple[Any, ...], kwargs: dict[str, Any], given: Any, size: int) -> Any:
        """Returns a chunk's weight: `size`, the sum of `given`, or the result of `self.weights`."""
        if not callable(self.weights):
            return size if self.weights is None else given.sum()
        backend, known = self.backend, takes(self.weights, kwargs)
        try:
            result = self.weights(*args, **known)
        except TypeError:
            if not accepts(self.weights, args, known):
                raise GradtoolsError(
                    f"{_MICROBATCHED}: weights is called with f's arguments, {len(args)} by "
                    f"position, which it does not accept; it takes {signature_of(self.weights)}."
                ) from None
            raise
        shape = tuple(getattr(result, "shape", ()))
        real = is_numeric(backend, result) and not backend.is_complex(backend.asarray(result))
        if shape != () or not real:
            came = describe(backend, result) if shape == () else f"shape {shape}"
            raise GradtoolsError(
                f"{_MICROBATCHED}: the weights function returned {came}; expected "
                "one real number, the weight of the chunk."
            )
        return result

    def _check_total(self, total: Array) -> None:
        """Raises an error if concrete weights sum to zero; traced weights give NaN instead."""
        if self.weights is None:
            return
        number = self.backend.as_number(total)
        if isinstance(number, (int, float)) and number == 0:
            raise GradtoolsError(
                f"{_MICROBATCHED}: the weights sum to 0, so there is no mean. Pass "
                "weights that do not sum to 0, or use reduction='sum'."
            )


def _with_carry(f: Callable[..., Any], has_aux: bool, *args: Any, **kwargs: Any) -> Any:
    """Converts f's `((loss, aux), carry)` to `(loss, (aux, carry))`, the form for has_aux=True."""
    result = f(*args, **kwargs)
    out = result[0] if isinstance(result, tuple) and len(result) == 2 else None
    if out is None or (has_aux and not (isinstance(out, tuple) and len(out) == 2)):
        expected = "((loss, aux), new_carry)" if has_aux else "(loss, new_carry)"
        raise GradtoolsError(f"{_MICROBATCHED}: with carry_argnums f must return {expected}.")
    loss, aux = out if has_aux else (out, None)
    return loss, (aux, result[1])


def _keys_and_carries(
    caller: str,
    args: Sequence[Any],
    given: list[Argument],
    key_argnums: Argnums,
    carry_argnums: Argnums,
    differentiated: tuple[int, ...] = (),
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Returns the positions of keys and carries; marks their entries of `given` as shared."""
    keys, carried = [
        () if argnums in ((), []) else normalized_argnums(caller, argnums, len(args), what)
        for what, argnums in (("key_argnums", key_argnums), ("carry_argnums", carry_argnums))
    ]
    for i in {*keys} & {*carried} | {*keys, *carried} & {*differentiated}:
        named = ("argnums, " if differentiated else "") + "key_argnums and carry_argnums"
        kinds = ("differentiated, " if differentiated else "") + "a key or a carry"
        raise GradtoolsError(
            f"{caller}: argument {i} is named more than once in {named}; an argument can be only "
            f"one of these: {kinds}."
        )
    for i in (*keys, *carried):
        given[i] = Argument(i, args[i])
    return keys, carried
