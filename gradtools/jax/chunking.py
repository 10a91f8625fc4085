"""Runs chunks as a `jax.lax.scan`, whose body is rematerialized in the backward pass.

    first pass   y_i, s_{i+1} = f(x_i, s_i)        stores no residuals
    backward     dw += J_i^H c_i                   with J_i recomputed from x_i and s_i

Consecutive chunks of equal shapes form a run, which is evaluated by one scan. f is traced once for
each shape of a chunk. The body slices the batch at the index of the chunk, so a scan does not copy
the batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import groupby
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from gradtools.arguments.chunks import Chunks, progress_bar
from gradtools.backend import Array
from gradtools.errors import GradtoolsError
from gradtools.jax import jaxprs, reachability, shardings
from gradtools.jax.arrays import asarray
from gradtools.jax.compiled_once import run_compiled
from gradtools.jax.jaxprs import marked_as_chunk
from gradtools.jax.recomputing import refuse_to_repeat, rematerialized, stateful
from gradtools.jax.shardings import varies, varying
from gradtools.jax.slicing import Split, joined, routed


def run_chunks(chunks: Chunks) -> tuple[list[Array], list[Array]]:
    """Returns the output leaves (concatenated, or separate for each chunk) and the final carry."""
    return _compiled_steps(chunks, _run_steps)


def sum_chunks(chunks: Chunks, weigh: None = None) -> tuple[list[Array], list[Array]]:
    """Returns the sums of the output leaves over chunks, and the carry.

    The chunks are not rematerialized in the backward pass.
    """
    return _compiled_steps(chunks, _sum_steps)


def _compiled_steps(chunks: Chunks, program: Callable[..., Any]) -> tuple[list[Array], list[Array]]:
    """Compiles and calls `program(steps, carry)`, and writes the new state to the modules of f."""
    steps, carry = _Steps(chunks), [asarray(x) for x in chunks.carry]
    carry += [] if steps.modules is None else map(jnp.asarray, steps.modules.leaves)
    outs, carry = run_compiled(partial(program, steps), [_constant(x) for x in carry])
    if steps.modules is not None:
        steps.modules.write(carry[len(chunks.carry) :])
    return outs, carry[: len(chunks.carry)]


def _run_steps(steps: _Steps, carry: list[Array]) -> tuple[list[Array], list[Array]]:
    """Runs all chunks, and returns the concatenated outputs and the last carry."""
    chunks = steps.chunks
    steps.refuse_shared_draws(carry)
    advance, parts = _progress(chunks), []
    for run in steps.runs():
        many: Any = steps.of(0)
        if chunks.cut.count != 1:  # recomputation of a single chunk saves no memory
            step = steps.traced(run.kind, carry)
            refuse_to_repeat("chunked", step.program.jaxpr)
            # XLA does not merge the bodies of two loops, so only code outside of loops needs a CSE
            # barrier.
            many = rematerialized(step.summing_widely(), prevent_cse=run.count == 1)
            carry = step.widened(carry)

        @marked_as_chunk
        def body(carry: list[Array], inputs: Any, many: Any = many) -> Any:
            outs, carry = many(advance(inputs[0]), *inputs[1:], carry)
            return carry, outs

        carry, outs = steps.over(run, body, carry)
        if not chunks.cut.is_symbolic:
            chunks.outputs.same_as(
                steps.kinds.index(run.kind), range(run.first, run.first + run.count)
            )
        parts.append((run, outs))
    axes = chunks.outputs.axes
    if axes is None:
        return [x[i] for run, outs in parts for i in range(run.count) for x in outs], carry

    columns = [[outs[k] for _, outs in parts] for k in range(len(axes))]
    entry = next((s.entry for s in steps.splits if s.entry is not None), None)
    pairs = zip(axes, columns, strict=True)
    return [joined(chunks.cut, axis, column, entry) for axis, column in pairs], carry


def _sum_steps(steps: _Steps, state: list[Array]) -> tuple[list[Array], list[Array]]:
    """Returns the sums of the outputs and the carry after all chunks."""
    steps.refuse_shared_draws(state)
    if steps.chunks.cut.count == 1:
        outs, state = steps.of(0)(*steps.inputs(0), state)
        return [*map(jnp.asarray, outs)], state
    sums: list[Array] = []
    for run in steps.runs():
        step = steps.traced(run.kind, state)
        avals = step.program.avals[: step.outs]
        sums = sums or [jnp.zeros(aval.shape, aval.dtype) for aval in avals]
        before = [_promoted(x, aval) for x, aval in zip(sums, avals, strict=True)]

        @marked_as_chunk
        def add_step(carry: Any, inputs: Any, step: _ChunkProgram = step) -> Any:
            sums, state = carry
            outs, state = step(*inputs, state)
            pairs = zip(sums, outs, strict=True)
            return ([_strong(x + shardings.like(y, x)) for x, y in pairs], state), []

        (sums, state), _ = steps.over(run, add_step, (before, step.widened(state)))
    return sums, state


# --- one chunk


class _ChunkRun(NamedTuple):
    """Consecutive chunks of equal structure and shapes. The number of chunks may be symbolic."""

    kind: int
    first: int
    count: Any


@dataclass(frozen=True, eq=False)
class _ChunkProgram:
    """Applies f to chunks of one shape. f is traced once, and its jaxpr is evaluated."""

    program: jaxprs.TracedProgram
    consts: list[Any]
    slots: list[Any]  # for each 16-bit constant, a float32 array to which the cotangent is routed
    outs: int  # the number of output leaves, which precede the carry's leaves

    def __call__(self, *args: Any) -> Any:
        *inputs, carry = args
        pairs = zip(self.consts, self.slots, strict=True)
        consts = [x if slot is None else routed(x, slot) for x, slot in pairs]
        return self.program(consts, inputs, self.widened(carry))

    def summing_widely(self) -> _ChunkProgram:
        """Returns a copy with float32 slots, so that a scan sums 16-bit cotangents in float32."""
        narrow = lambda x: isinstance(x, jax.core.Tracer) and x.dtype in (jnp.float16, jnp.bfloat16)
        # Concrete constants are not differentiated.
        slots = [x.astype("float32") if narrow(x) else None for x in self.consts]
        return replace(self, slots=slots)

    def widened(self, carry: list[Array]) -> list[Array]:
        """Casts a carry to the varying axes and shardings that a step returns, as scans require."""
        pairs = zip(carry, self.program.avals[self.outs :], strict=True)
        return [_promoted(x, aval) for x, aval in pairs]


class _Steps:
    """Represents the chunks of a call as functions `(index, slots, lists, carry) -> (outs, carry)`.

    slots: One array for each inexact split array, to which the cotangents of the chunk are routed.
    lists: The arrays in the chunk's slices of the lists of examples.

    Attributes:
        kinds: An integer for each chunk, equal for chunks of equal structure and shapes.
    """

    def __init__(self, chunks: Chunks) -> None:
        f = chunks.call.f
        self.modules = stateful(chunks.caller, f, chunks.arguments)
        self.chunks, self.call = chunks, replace(chunks.call, f=self.modules or f)
        self.splits = [Split(x, axis, chunks.cut) for x, axis in chunks.splits]
        self.lists = [
            [asarray(x) if isinstance(x, np.ndarray) else x for x in leaves]
            for leaves in chunks.lists
        ]
        known, self.kinds = list[Any](), list[int]()
        for size, plan, leaves in zip(chunks.cut.sizes, chunks.call.plans, self.lists, strict=True):
            each = [jax.typeof(x) if _is_array(x) else (type(x), x) for x in leaves]
            signature = size, [treedef for treedef, _ in plan], each
            known += [] if signature in known else [signature]
            self.kinds.append(known.index(signature))
        self._traced: dict[Any, _ChunkProgram] = {}

    def runs(self) -> Iterator[_ChunkRun]:
        """Yields groups of consecutive chunks of the same kind.

        If the batch size is symbolic, all chunks form one group.
        """
        if self.chunks.cut.is_symbolic:
            yield _ChunkRun(0, 0, self.chunks.cut.count)
            return
        for kind, members in groupby(range(len(self.kinds)), self.kinds.__getitem__):
            first, *others = members
            yield _ChunkRun(kind, first, 1 + len(others))

    def over(self, run: _ChunkRun, body: Any, carry: Any) -> tuple[Any, list[Array]]:
        """Runs `body(carry, inputs)` for the chunks of a run.

        Returns the carry and stacked outputs.
        """
        if run.count != 1:
            return jax.lax.scan(body, carry, self.stacked(run))
        # `eval_jaxpr` returns constants as Python numbers
        carry, outs = jax.tree.map(jnp.asarray, body(carry, self.inputs(run.first)))
        return carry, [x[None] for x in outs]

    def traced(self, kind: int, carry: list[Array]) -> _ChunkProgram:
        """Returns the program that a scan evaluates for the chunks of the given kind."""
        key = kind, *map(varies, carry)
        if key not in self._traced:
            number = self.kinds.index(kind)
            inputs, _ = jaxprs.traced(lambda: self.inputs(number))
            shapes = jax.tree.unflatten(inputs.treedef, inputs.avals)  # avals with shardings
            program, consts = jaxprs.traced(self.of(number), *shapes, carry)
            outs = len(program.avals) - len(carry)
            step = _ChunkProgram(program, consts, [None] * len(consts), outs)
            new = step.widened(carry)
            wider = any(varies(a) - varies(x) for a, x in zip(new, carry, strict=True))
            self._traced[key] = self.traced(kind, new) if wider else step
        return self._traced[key]

    def refuse_shared_draws(self, carry: list[Array]) -> None:
        """Raises an error if f draws random numbers per example with a key that chunks share.

        Draws count as per example if their shapes change with the chunk size. Other draws, such as
        a mask of weights, are allowed.
        """
        chunks = self.chunks
        if chunks.cut.count == 1 or not (drawn := self._shared_draws(carry)):
            return
        other = chunks.recut(chunks.cut.with_chunks_of(chunks.cut.sizes[0] + 1))
        if _Steps(other)._shared_draws(carry) != drawn:
            raise GradtoolsError(
                f"{chunks.caller}: f draws random numbers with a key that chunks share, so each "
                "chunk would draw the same numbers (one dropout mask for all). Pass the key as an "
                "argument by position and name it in key_argnums: chunk i receives the key folded "
                "with i."
            )

    def _shared_draws(self, carry: list[Array]) -> set[Any]:
        """Returns a chunk's random draws whose keys do not depend on the chunk or on the carry."""
        return reachability.draws(self.traced(self.kinds[0], carry).program.jaxpr)

    def inputs(self, number: int) -> tuple[Any, ...]:
        size = len(self.chunks.cut.rows[number])
        slots = [s.at(number, size) for s in self.splits if s.inexact]
        return np.int32(number), slots, [x for x in self.lists[number] if _is_array(x)]

    def stacked(self, run: _ChunkRun) -> tuple[Any, ...]:
        size = len(self.chunks.cut.rows[run.first])
        slots = [s.stacked(run.first, run.count, size) for s in self.splits if s.inexact]
        if self.chunks.cut.is_symbolic:
            return jnp.arange(run.count, dtype=np.int32), slots, []
        numbers = np.arange(run.first, run.first + run.count, dtype=np.int32)
        rows = zip(*(self.lists[i] for i in numbers), strict=True)
        return numbers, slots, [jnp.stack(row) for row in rows if _is_array(row[0])]

    def of(self, number: int) -> Callable[..., Any]:
        chunks = self.chunks
        size, own = len(chunks.cut.rows[number]), len(chunks.carry)

        def step(index: Any, slots: list[Array], lists: list[Array], carry: list[Array]) -> Any:
            left, given = iter(slots), iter(lists)
            pieces = [s.piece(index, size, next(left) if s.inexact else None) for s in self.splits]
            pieces += [next(given) if _is_array(x) else x for x in self.lists[number]]
            before = [jax.lax.stop_gradient(x) for x in carry]
            if self.modules is not None:
                self.modules.now = before[own:]
            outs, after = self.call(number, index, pieces, chunks.shared, before[:own])
            if self.modules is not None:
                after = [*after, *self.modules.after]
            pairs = zip(after, carry, strict=True)
            return outs, [_next_carry(chunks, k, *pair) for k, pair in enumerate(pairs)]

        return jaxprs.named_after(chunks.call.f, step)


def _is_array(x: Any) -> bool:
    return isinstance(x, jax.Array)


# --- carries


def _next_carry(chunks: Chunks, k: int, new: Any, old: Array) -> Array:
    """Returns the new carry leaf.

    Raises an error if the shape or dtype of `new` differs from the shape or dtype of `old`.
    """
    new = jnp.asarray(new)
    if jax.typeof(new).weak_type and jnp.result_type(new, old) == old.dtype:
        new = jax.lax.convert_element_type(new, old.dtype)
    if new.shape != old.shape or new.dtype != old.dtype:
        users = k < len(chunks.carry)
        name = f"carry for {chunks.carry_names[k]}" if users else "state of a flax.nnx module"
        fix = "Reshape the new value" if new.shape != old.shape else "Return new.astype(old.dtype)"
        fix += ", or pass a first carry with the new shape and dtype." if users else "."
        raise GradtoolsError(
            f"{chunks.caller}: f's new {name} is {new.dtype} of shape "
            f"{new.shape}; expected {old.dtype} of shape {old.shape}, as before the chunk. A carry "
            f"must have the same shape and dtype in all chunks. {fix}"
        )
    return _constant(shardings.like(new, old))


def _constant(x: Array) -> Array:
    """Stops the gradient of x and removes the weak type, since the type of a carry is fixed."""
    return jax.lax.stop_gradient(_strong(x))


def _strong(x: Array) -> Array:
    return jax.lax.convert_element_type(x, x.dtype) if jax.typeof(x).weak_type else x


def _promoted(x: Array, aval: Any) -> Array:
    """Casts x to the varying mesh axes and the sharding of `aval`."""
    return shardings.like(varying(x, varies(aval)), aval)


# --- the progress bar


def _progress(chunks: Chunks) -> Callable[[Any], Any]:
    """Returns an identity function of the chunk index that also advances the progress bar."""
    count = chunks.cut.count
    if not chunks.options.progress:
        return lambda index: index
    shown = [progress_bar(count)]  # raises an error immediately if tqdm is missing

    def move(index: Any) -> None:
        if not shown:
            shown.append(progress_bar(count))
        shown[0].update()
        if shown[0].n >= count:
            shown.pop().close()

    @marked_as_chunk
    def advanced(index: Any) -> Any:
        jax.debug.callback(move, index)
        return index

    return advanced
