"""Programs over chunks, each of them one node of autograd's graph.

`chunked` and `frozen` run programs: `replay.Forward` is f itself, with the state to recompute a
chunk; `Backward` and `Pushed` are the pullback and the pushforward of another program, and programs
themselves. A program is evaluated without a graph, and its node's derivative is the program derived
from it, so that derivatives of any order run at the memory of one chunk.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain, compress, islice
from operator import attrgetter
from typing import Any, NamedTuple

import torch

from gradtools.boundary import user_facing
from gradtools.errors import GradtoolsError
from gradtools.rules import Rule, reverse_only_text, spread
from gradtools.torch import _upstream as upstream
from gradtools.torch.autograd_graph import nodes_of, pulled
from gradtools.torch.compiling import left_to_python
from gradtools.torch.functorch_wrappers import alive, is_dual
from gradtools.torch.known_errors import SAVED_CHANGED, explain, says
from gradtools.torch.modes import NOTHING, batchings, by_new_vmap
from gradtools.torch.operation_marks import marked
from gradtools.torch.replaying.recomputing import (
    Entries,
    Rows,
    Tensor,
    alias_of,
    differentiating,
    first_pass_state,
    flattened,
    primal_of,
    steps,
    tensors_of,
    view_of,
    without_hooks,
)
from gradtools.torch.replaying.summing import (
    Joint,
    LeafHooks,
    Sums,
    adds_leaves,
    join,
    joint_of,
)
from gradtools.torch.rules.functions import BatchedRule, reverse_only_at
from gradtools.torch.rules.installing import apply_rule

left_to_python(__name__)
_requires_grad = attrgetter("requires_grad")


def applied(kind: Any, *args: Any) -> Any:
    """`kind.apply(*args)` of a Function without setup_context, outside of torch.func transforms.

    Skips the argument binding and checks of `Function.apply`. It is in a module that dynamo does
    not trace, since dynamo compiles no other `apply` than that of `torch.autograd.Function`.
    """
    wrapped = map(upstream.is_wrapped, [x for x in args if isinstance(x, Tensor)])
    if any(wrapped):  # by a transform that may have ended
        return kind.apply(*args)
    return super(torch.autograd.Function, kind).apply(*args)  # type: ignore[misc]


class Widths(NamedTuple):
    """The layout of a derived program's inputs: those of the other program, then vectors."""

    widths: list[int]  # the number of the other program's inputs at each chunk
    shared: int  # the number of its shared inputs
    # Which of the vectors are not None, chunk by chunk, then those of the shared inputs or sums.
    present: list[list[bool]]


class ChunkProgram:
    """A function of each chunk's tensors and of shared ones, which is run chunk by chunk."""

    caller: str  # the operator
    forward: Any  # the `Forward` from which it is derived, possibly itself
    leaves: list[Tensor]  # the captured leaves that it reaches
    attached: list[list[bool]] | None = None  # which outputs of each chunk have a derivative
    # How many of the last outputs are gradients of the leaves, or tangents of these, which are
    # summed over a batch as well.
    of_leaves = 0

    def one(self, i: int, xs: Entries, shared: Entries) -> tuple[list[Any], list[Any]]:
        """Chunk i's outputs, and terms that are summed over chunks; entries may be None."""
        raise NotImplementedError

    def evaluate(self, rows: Rows, shared: Entries) -> tuple[Rows, list[Any]]:
        """All chunks' outputs and the sums, without a graph."""
        raise NotImplementedError

    def advance(self, i: int, xs: Entries, shared: Entries) -> None:
        """Runs f on a chunk only for its effects on the state of later chunks."""
        raise NotImplementedError

    def pull(
        self, layout: Widths, rows: Rows, shared: Entries, joint: Joint | None = None
    ) -> list[Any]:
        """Cotangents of the inputs; rows and shared end with the cotangents."""
        return outputs_of(Backward(self, layout, joint), rows, shared)

    def push(self, layout: Widths, rows: Rows, shared: Entries) -> list[Any]:
        return outputs_of(Pushed(self, layout), rows, shared)

    def batched(self, size: int, on: list[list[bool]], randomness: str, whole: bool) -> Any:
        """The program under vmap, and which of its inputs then have a leading batch axis.

        on: Which of the inputs are batched, row by row, the shared ones last; at least one is.
        randomness: As in torch.vmap.
        whole: Whether all inputs must be batched.
        """
        raise NotImplementedError


def cut_up(flat: Entries, widths: Sequence[int]) -> Rows:
    """Splits a flat list into rows of these widths, and a last row of the rest."""
    left = iter(flat)
    rows = [[*islice(left, width)] for width in widths]
    return [*rows, [*left]]


class _Derived(ChunkProgram):
    """A linear map of another program, which it evaluates with a graph, chunk by chunk."""

    transposes = False  # whether it transposes the other's pullback

    def __init__(self, of: ChunkProgram, layout: Widths, joint: Joint | None = None) -> None:
        self.of, self.leaves, self.joint, self.forward = of, of.leaves, joint, of.forward
        self.caller, self.layout = of.caller, layout
        # For each vmap, the outermost first: whether only the vectors are batched. The other
        # program then runs unbatched, and one graph serves all vectors.
        self.vectors_only: tuple[bool, ...] = ()
        self.adding: LeafHooks | None = None  # active during an evaluation

    def batched(self, size: int, on: list[list[bool]], randomness: str, whole: bool) -> Any:
        result, widths = copy.copy(self), [*self.layout.widths, self.layout.shared]
        own = wanted = [row[:k] for row, k in zip(on, widths, strict=True)]
        alone = not whole and not any(map(any, own))
        result.vectors_only = (alone, *self.vectors_only)
        if not alone:
            result.of, wanted = self.of.batched(size, own, randomness, True)
            result.forward = result.of.forward
        vectors = zip(wanted, on, widths, strict=True)
        return result, [[*row, *(True for _ in full[k:])] for row, full, k in vectors]

    def pulled(
        self, outs: Entries, inputs: Entries, cts: Entries, own: int, *how: bool
    ) -> list[Any]:
        """`pulled_back` under vmap over the batches of the vectors alone.

        own: The number of inputs before the leaves.
        """
        return self.by_vmap(lambda *cts: pulled_back(outs, inputs, cts, *how), own, cts)

    def by_vmap(
        self, pull: Callable[..., list[Any]], own: int, vectors: Entries, summed: bool = False
    ) -> list[Any]:
        """`pull(*vectors)` under vmap over the batches of the vectors alone.

        own: The number of results before those that have no axis of other batches, being sums.
        summed: Whether the latter are summed over these batches as well.
        """
        if not any(self.vectors_only):
            return pull(*vectors)
        given = [v is not None for v in vectors]
        there: list[bool] = []

        def parts(*vectors: Tensor) -> Any:
            grads = pull(*spread(vectors, given))
            there[:] = [g is not None for g in grads]
            each = grads[:own], grads[own:]
            return tuple([tuple([g for g in part if g is not None]) for part in each])

        fun: Callable[..., Any] = parts
        for k in reversed(range(len(self.vectors_only))):
            if self.vectors_only[k]:
                axis = self.vectors_only[:k].count(False)  # of the levels that batch all
                fun = torch.vmap(fun, axis, (axis, 0), randomness="same")
                fun = _summed(fun) if summed else fun
        return spread(flattened(fun(*compress(vectors, given))), there)

    def split(self, i: int, xs: Entries, shared: Entries) -> tuple[Any, Any, list[Any], list[Any]]:
        """The other program's inputs at chunk i, then the vectors, None for absent ones."""
        widths, m, present = self.layout
        k = widths[i]
        return xs[:k], shared[:m], spread(xs[k:], present[i]), spread(shared[m:], present[-1])

    def advance(self, i: int, xs: Entries, shared: Entries) -> None:
        self.of.advance(i, *self.split(i, xs, shared)[:2])

    def evaluate(self, rows: Rows, shared: Entries) -> tuple[Rows, list[Any]]:
        (widths, width, present), leaves, forward = self.layout, self.leaves, self.forward
        sums = Sums()
        if self.joint and self.joint.sums:
            begun = self.joint.take(leaves)  # the gradients of earlier nodes in this pass
            if any(x is not None for x in begun):
                sums.add([*[None] * width, *begun])
            del begun  # the first term that is added makes a new sum
        if upstream.forward_level() >= 0:
            rows, shared = [[*map(primal_of, xs)] for xs in rows], [*map(primal_of, shared)]
        result: Rows = [[] if self.transposes else [None] * widths[i] for i in range(len(rows))]
        # A chunk without cotangents contributes nothing to a pullback.
        needed = [self.transposes or any(row) or any(present[-1]) for row in present[:-1]]
        bare, adding = without_hooks(forward.leaves) if forward.leaves else NOTHING, NOTHING
        single = not (forward.batches or forward.in_functorch or any(self.vectors_only))
        if single and not self.transposes and adds_leaves(leaves):
            sums.begin(width + len(leaves))
            adding = LeafHooks(sums, width, leaves)
        with bare, torch.set_grad_enabled(False), adding as self.adding:
            done = self.from_retained(rows, shared, result, sums)
            rest = {i for i, t in enumerate(needed) if t and i not in done}
            with first_pass_state(forward) if rest else NOTHING:
                count = max(rest) + 1 if rest else 0
                for i in steps(count, forward.chunks.options.progress):
                    if i not in rest:  # only for its effects on the state of later chunks
                        self.advance(i, rows[i], shared)
                        continue
                    result[i], terms = self.one(i, rows[i], shared)
                    if terms:
                        sums.add(terms)
                    del terms  # frees memory before the next chunk
        self.adding = None
        if sums.terms:
            return result, sums.total()
        return result, [] if self.transposes else [None] * (width + len(leaves))

    def from_retained(self, rows: Rows, shared: Entries, results: Rows, sums: Sums) -> set[int]:
        """Fills `results` and `sums` for chunks with kept graphs; returns their indices."""
        return set()

    def _within(self, i: int, xs: Entries, shared: Entries) -> tuple[list[Any], Any, Any]:
        """The other program's inputs, outputs and sums, with a graph between them."""
        create = torch.is_grad_enabled()
        enter = view_of if create else alias_of
        a, b = [*map(enter, xs)], [*map(enter, shared)]
        with torch.enable_grad():
            ys, terms = self.of.one(i, a, b)
        return [*a, *b, *self.leaves], ys, terms


def _summed(fun: Callable[..., Any]) -> Callable[..., Any]:
    def run(*vectors: Tensor) -> Any:
        result, each = fun(*vectors)
        return result, tuple([x.sum(0) for x in each])

    return run


class Backward(_Derived):
    """The pullback: cotangents of each chunk's inputs, and sums for shared inputs and leaves."""

    of_leaves = property(lambda self: len(self.leaves))  # type: ignore[assignment]

    def one(self, i: int, xs: Entries, shared: Entries) -> tuple[list[Any], list[Any]]:
        """Cotangents of the chunk's inputs, then of shared inputs and leaves."""
        create, forward = torch.is_grad_enabled(), self.forward
        xs, shared, cts, shared_cts = self.split(i, xs, shared)
        inputs, ys, terms = self._within(i, xs, shared)
        own, outs = len(xs) + len(shared), [*ys, *terms] if terms else ys
        cts = [*cts, *shared_cts] if terms else cts
        how = create, create
        watched = forward.hooked or forward.counts
        with differentiating(forward, create) if watched else NOTHING:
            grads = self._pulled_adding(outs, inputs, cts, own, *how)
        return grads[: len(xs)], grads[len(xs) :]

    def _pulled_adding(
        self, outs: Entries, inputs: Entries, cts: Entries, own: int, *how: bool
    ) -> list[Any]:
        """As `pulled`, with None for gradients that hooks on leaves add to the sums."""
        adding, forward = None if torch.is_grad_enabled() else self.adding, self.forward
        roots = outs if adding is None else adding.roots(outs)
        for k, x in enumerate(self.leaves if forward.hooked else ()):
            hooks = upstream.tensor_hooks(x)  # which the recomputation of f set a second time
            if hooks and not (adding is not None and adding.takes(k)):
                hooks.clear()
        try:
            grads = self.pulled(roots, inputs, cts, own, *how)
        except RuntimeError as error:
            if forward.mark != "frozen":  # which falls back to other kernels
                explain(self.caller, error)
            raise
        for k in adding.added if adding is not None else ():
            grads[own + k] = None
        return grads


class Pushed(_Derived):
    """The pushforward, as the transpose of the pullback: dual levels do not nest."""

    transposes = True
    of_leaves = property(lambda self: self.of.of_leaves)  # type: ignore[assignment]

    def one(self, i: int, xs: Entries, shared: Entries) -> tuple[list[Any], list[Any]]:
        create = torch.is_grad_enabled()
        xs, shared, dxs, dshared = self.split(i, xs, shared)
        inputs, ys, terms = self._within(i, xs, shared)
        outs = [*ys, *terms]
        edits = map(reverse_only_at, nodes_of(tensors_of(outs)))
        if edit := next(filter(None, edits), None):  # whose pullback cannot be transposed
            raise GradtoolsError(reverse_only_text("chunked", edit))
        tracked = [isinstance(y, Tensor) and y.requires_grad for y in outs]
        dummies = spread(
            [torch.zeros_like(y, requires_grad=True) for y in compress(outs, tracked)], tracked
        )
        with torch.enable_grad():
            pulled = pulled_back(outs, inputs, dummies, True, True)
        wanted = [*compress(dummies, tracked)]
        own = sum(tracked[: len(tracked) - self.of_leaves])
        vectors = [*dxs, *dshared]
        pushed = spread(self.pulled(pulled, wanted, vectors, own, create, create), tracked)
        return pushed[: len(ys)], pushed[len(ys) :]


def pulled_back(
    outs: Entries, inputs: Entries, cts: Entries, keep: bool, create: bool
) -> list[Any]:
    """Pulls cotangents of outs back to inputs; None for an input without a path."""
    ys, seeds = list[Tensor](), list[Any]()
    for y, ct in zip(outs, cts, strict=True):
        if ct is not None and isinstance(y, Tensor) and y.requires_grad:
            ys.append(y)
            seeds.append(ct)
    needs_grad = [isinstance(x, Tensor) and x.requires_grad for x in inputs]
    if not ys or not any(needs_grad):
        return [None] * len(inputs)
    xs = inputs if all(needs_grad) else [*compress(inputs, needs_grad)]
    grads: Any = pulled(ys, xs, seeds, keep, create)
    return list(grads) if xs is inputs else spread(grads, needs_grad)


# --- a program as one node of autograd's graph --------------------------------------------


def node_of(
    program: ChunkProgram, rows: Rows, shared: Entries, known: tuple[Rows, list[Any]] | None = None
) -> tuple[Rows, list[Any]]:
    """The outputs and sums of a program, differentiable with respect to its inputs and leaves.

    known: The outputs and sums, if they were evaluated already. Under torch.func they cannot be,
        since there the evaluation runs below the transforms' levels.
    """
    inputs = [*chain(*rows), *shared, *program.leaves]
    maps = _Maps(program, [*map(len, rows)], len(shared), [])
    if known is None:
        results = apply_rule(_rule(maps), *inputs)
    else:
        outs = _chosen(program, known, maps.shape, True)
        tracked = torch.is_grad_enabled() and any(map(_requires_grad, inputs))
        dual = upstream.forward_level() >= 0 and any(map(is_dual, inputs))
        if not outs or not (tracked or dual):
            return known
        if dual or torch.compiler.is_dynamo_compiling():
            results = apply_rule(_rule(maps, outs), *inputs)
        else:
            results = applied(_ProgramNode, maps, outs, *inputs)
    counts, mask = maps.shape
    flat = spread(results, mask)
    if known is not None and not all(mask):
        every = zip(flat, mask, [*chain(*known[0]), *known[1]], strict=True)
        flat = [y if is_output else value for y, is_output, value in every]
    parts = cut_up(flat, counts)
    return parts[:-1], parts[-1]


def _chosen(program: ChunkProgram, results: Any, shape: list[Any], known: bool) -> list[Tensor]:
    """The outputs and sums that are the node's outputs; stores their layout in `shape`."""
    flat = [*chain(*results[0]), *results[1]]
    mask = [isinstance(y, Tensor) for y in flat]
    if known and program.attached is not None:  # sums, which are carries, have none
        attached = chain(*program.attached, [False] * len(results[1]))
        mask = [t and a for t, a in zip(mask, attached, strict=True)]
    shape[:] = [list(map(len, results[0])), mask]
    return [*compress(flat, mask)]


@dataclass(frozen=True)
class _Maps:
    """The two linear maps of a program on its inputs, rows of `widths` and `width` shared."""

    program: ChunkProgram
    widths: list[int]
    width: int
    shape: list[Any]  # the rows' lengths and the mask of the node's outputs, see `_chosen`

    def cotangent(self, saved: Entries, cts: Entries, joint: Joint | None = None) -> list[Any]:
        counts, mask = self.shape
        full = spread(cts, mask)
        if not isinstance(self.program, _Derived):  # the sums of `Forward` are carries
            full = full[: sum(counts)]
        with marked(self.program.forward.mark):
            return self.program.pull(*self._with_vectors(saved, full, counts), joint)

    def tangent(self, saved: Entries, dxs: Entries) -> list[Any]:
        with marked(self.program.forward.mark):
            pushed = self.program.push(*self._with_vectors(saved, dxs, self.widths))
        mask = self.shape[1]
        pushed += [None] * (len(mask) - len(pushed))  # of carries
        return [*compress(pushed, mask)]

    def _with_vectors(
        self, saved: Entries, vectors: Entries, counts: list[int]
    ) -> tuple[Widths, Rows, list[Any]]:
        """The layout, the rows and the shared inputs of the derived program."""
        parts, vs = cut_up(saved, self.widths), cut_up(vectors, counts)
        parts[-1] = parts[-1][: self.width]
        present = [[v is not None for v in row] for row in vs]
        triples = zip(parts, vs, present, strict=True)
        both = [[*xs, *compress(row, mask)] for xs, row, mask in triples]
        return Widths(self.widths, self.width, present), both[:-1], both[-1]


class _ProgramNode(torch.autograd.Function):
    """The node of a program in plain eager mode, without transforms and dual numbers.

    A rule's node handles these as well, but takes longer than a small network.
    """

    recorded_as = "chunked"

    @staticmethod
    def forward(ctx: Any, maps: _Maps, outs: list[Tensor], *inputs: Tensor) -> Any:
        ctx.maps = maps
        ctx.leaves = maps.program.leaves
        if ctx.leaves:
            join(ctx, ctx.leaves)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*inputs)
        exact = [y for y in outs if not (y.is_floating_point() or y.is_complex())]
        ctx.mark_non_differentiable(*exact)
        saved = {*map(id, inputs)}
        return tuple([y.view_as(y) if id(y) in saved else y for y in outs])

    @staticmethod
    @user_facing
    def backward(ctx: Any, *cts: Tensor | None) -> Any:
        joint = joint_of(ctx) if ctx.leaves else None
        living = [ct if ct is None else alive(ct) for ct in cts]
        try:
            saved, run = ctx.saved_tensors, ctx.maps.cotangent
        except RuntimeError as error:
            if not says(error, SAVED_CHANGED):
                raise
            raise GradtoolsError(
                f"{ctx.maps.program.caller}: an argument or a parameter was changed in place after "
                "the forward pass, and the backward pass needs it as it was. Clone it before you "
                "change it."
            ) from error
        with upstream.EnableTorchFunction():  # which backward() of a subclass switches off
            if torch.is_grad_enabled() and batchings():
                grads = by_new_vmap(lambda *cts: run(saved, cts, joint), living)
            else:
                grads = run(saved, living, joint)
        if joint is not None:
            own = len(grads) - len(ctx.leaves)
            grads[own:] = joint.pass_on(ctx.leaves, grads[own:])
        return None, None, *grads


def _rule(maps: _Maps, known: list[Tensor] | None = None) -> Rule:
    """A program as a rule on its inputs and leaves."""
    program, widths, width, shape = maps.program, maps.widths, maps.width, maps.shape

    def primal(*xs: Tensor) -> list[Tensor]:
        ys = known
        if ys is None:
            parts = cut_up(xs, widths)
            result = program.evaluate(parts[:-1], parts[-1][:width])
            ys = _chosen(program, result, shape, False)
        return [y.view_as(y) if any(y is x for x in xs) else y for y in ys]  # an input is saved

    def batching_rule(size: int, axes: Any, xs: Entries, randomness: str) -> Any:
        count = sum(widths) + width
        on = cut_up([d is not None for d in axes[:count]], widths)
        result, wanted = program.batched(size, on, randomness, False)
        front = [
            x if not w else x.expand(size, *x.shape) if d is None else x.movedim(d, 0)
            for x, d, w in zip(xs[:count], axes[:count], flattened(wanted), strict=True)
        ]

        def axes_of(out: Entries) -> tuple[int | None, ...]:
            are_sums = isinstance(result, _Derived) and not result.vectors_only[0]
            count = len(shape[1]) - (result.of_leaves if are_sums else 0)
            return tuple([0 if k < count else None for k, m in enumerate(shape[1]) if m])

        batch = _rule(_Maps(result, widths, width, shape))
        return batch, [*front, *xs[count:]], axes_of

    caller = program.caller
    return BatchedRule(caller, primal, maps.tangent, maps.cotangent, batching_rule=batching_rule)


def outputs_of(program: _Derived, rows: Rows, shared: Entries) -> list[Any]:
    """The outputs and sums of a derived program, differentiable if gradients are enabled."""
    known = None
    if upstream.peek_interpreter_stack() is None:
        known = program.evaluate(rows, shared)
        if not torch.is_grad_enabled() and upstream.forward_level() < 0:
            return [*chain(*known[0]), *known[1]]
    rows, sums = node_of(program, rows, shared, known)
    return [*chain(*rows), *sums]
