"""Programs over chunks, each of them one node of autograd's graph.

What `chunked` and `frozen` run is a program: `replay.Forward` is f itself, with what a chunk needs
to be computed again; `Backward` and `Pushed` are the two linear maps of another program, and
programs in their turn. A program is evaluated without a graph, and its node differentiates it by
the program derived from it, so that derivatives of any order run at the memory of one chunk.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain, compress
from operator import attrgetter
from typing import Any

import torch

from gradtools.boundary import user_facing
from gradtools.errors import GradtoolsError
from gradtools.rules import Rule, reverse_only_text, spread
from gradtools.torch import _upstream as upstream
from gradtools.torch.compiling import left_to_python, nodes_of, refuse_lost
from gradtools.torch.double_backward import gate_graph
from gradtools.torch.engines import pulled
from gradtools.torch.functorch_wrappers import alive, is_dual
from gradtools.torch.hook_trials import gated_at_hooks
from gradtools.torch.known_errors import SAVED_CHANGED, explain, says
from gradtools.torch.modes import NOTHING
from gradtools.torch.plain_programs.backward_nodes import corrected, wrong_nodes
from gradtools.torch.replaying.again import as_it_began, check_storages, going_back, without_hooks
from gradtools.torch.replaying.guards import here, marked, steps
from gradtools.torch.replaying.slicing import (
    Entries,
    Rows,
    Tensor,
    alias_of,
    flattened,
    primal_of,
    tensors_of,
    view_of,
)
from gradtools.torch.replaying.summing import (
    Joint,
    LeafHooks,
    Sums,
    adds_leaves,
    join,
    joint_of,
)
from gradtools.torch.rules.installing import BatchedRule, apply_rule, reverse_only_at

left_to_python(__name__)
_requires_grad = attrgetter("requires_grad")


def applied(kind: Any, *args: Any) -> Any:
    """`kind.apply(*args)` of a Function without setup_context, where no transform is under way.

    Where `apply` itself binds defaults and looks into each argument. It stands in a room that
    dynamo leaves alone, for it compiles no `apply` but that of `torch.autograd.Function`.
    """
    wrapped = map(upstream.is_wrapped, [x for x in args if isinstance(x, Tensor)])
    if any(wrapped):  # it may have ended
        return kind.apply(*args)
    return super(torch.autograd.Function, kind).apply(*args)  # type: ignore[misc]


class ChunkProgram:
    """A function of each chunk's tensors and of shared ones, that is run chunk by chunk."""

    caller: str  # the operator
    leaves: list[Tensor]  # what it reaches by itself
    attached: list[list[bool]] | None = None  # which outputs of each chunk have a derivative

    def one(self, i: int, xs: Entries, shared: Entries) -> tuple[list[Any], list[Any]]:
        """Chunk i's outputs, and terms that are summed over chunks; entries may be None."""
        raise NotImplementedError

    def evaluate(self, rows: Rows, shared: Entries) -> tuple[Rows, list[Any]]:
        """All chunks' outputs and the sums, without a graph."""
        raise NotImplementedError

    def pass_by(self, i: int, xs: Entries, shared: Entries) -> None:
        """Runs f on a chunk only for what it does to the state of later ones."""
        raise NotImplementedError

    def pull(
        self, widths: Any, width: int, mask: Any, rows: Rows, shared: Entries, joint: Any = None
    ) -> list[Any]:
        """Cotangents of the inputs; rows and shared end in the vectors, as in `_Derived`."""
        return outputs_of(Backward(self, widths, width, mask, joint), rows, shared)

    def push(self, widths: Any, width: int, mask: Any, rows: Rows, shared: Entries) -> list[Any]:
        return outputs_of(Pushed(self, widths, width, mask), rows, shared)

    def batched(self, size: int, on: list[list[bool]], randomness: str, whole: bool) -> Any:
        """The same for a batch, and which of its inputs then have its axis in front.

        on: Which of the inputs have it, row by row, the shared ones last; at least one does.
        randomness: As in torch.vmap.
        whole: Whether all inputs are to have it.
        """
        raise NotImplementedError


def _forward_of(program: ChunkProgram) -> Any:
    """The `Forward` beneath a program, which may be itself."""
    return program.forward if isinstance(program, _Derived) else program


def cut_up(flat: Entries, widths: Sequence[int]) -> Rows:
    """Rows of these widths, then a row of what is left."""
    rows: Rows = []
    at = 0
    for width in widths:
        rows.append([*flat[at : at + width]])
        at += width
    rows.append([*flat[at:]])
    return rows


def _spread(values: Entries, mask: list[bool]) -> list[Any]:
    """The values where the mask says so, None elsewhere."""
    return list(values) if all(mask) else spread(values, mask)


class _Derived(ChunkProgram):
    """A program made of another, which it evaluates with a graph, chunk by chunk.

    Its inputs are the other's, followed by vectors: those for which `mask` says so.
    """

    transposes = False  # whether it differentiates the other's pullback along its cotangents

    def __init__(
        self, of: ChunkProgram, widths: list[int], width: int, mask: Any, joint: Joint | None = None
    ) -> None:
        self.of, self.leaves, self.joint, self.forward = of, of.leaves, joint, _forward_of(of)
        self.caller = of.caller
        self.widths, self.shared_width, self.mask = widths, width, mask
        # One entry for each batch of vmap, the outermost first: whether the vectors alone have
        # it. The other program then runs as it ran before, and a graph serves many vectors.
        self.vectors_only: tuple[bool, ...] = ()
        self.adding: LeafHooks | None = None  # while it is evaluated, chunk after chunk

    def batched(self, size: int, on: list[list[bool]], randomness: str, whole: bool) -> Any:
        result, widths = copy.copy(self), [*self.widths, self.shared_width]
        own = [row[:k] for row, k in zip(on, widths, strict=True)]
        alone = not whole and not any(map(any, own))
        result.vectors_only = (alone, *self.vectors_only)
        wanted = own
        if not alone:
            result.of, wanted = self.of.batched(size, own, randomness, True)
            result.forward = _forward_of(result.of)
        vectors = zip(wanted, on, widths, strict=True)
        return result, [[*row, *(True for _ in full[k:])] for row, full, k in vectors]

    def pulled(
        self, outs: Entries, inputs: Entries, cts: Entries, own: int, *how: bool
    ) -> list[Any]:
        """As `pulled_back`, for every batch that the vectors alone have.

        own: How many inputs there are before the leaves.
        """
        if not any(self.vectors_only):
            return pulled_back(outs, inputs, cts, *how)
        given, counts = [ct is not None for ct in cts], list[bool]()

        def pull(*cts: Tensor) -> Any:
            grads = pulled_back(outs, inputs, spread(cts, given), *how)
            counts[:] = [g is not None for g in grads]
            parts = grads[:own], grads[own:]
            return tuple([tuple([g for g in part if g is not None]) for part in parts])

        fun: Callable[..., Any] = pull
        for k in reversed(range(len(self.vectors_only))):
            if self.vectors_only[k]:
                axis = self.vectors_only[:k].count(False)  # a sum over a batch has lost its axis
                fun = torch.vmap(fun, axis, (axis, 0), randomness="same")
        result, sums = fun(*(ct for ct in cts if ct is not None))
        return spread([*result, *sums], counts)

    def explain(self, error: RuntimeError) -> None:
        """Raises PyTorch's errors in our words; frozen reads them, to go another way."""
        if self.caller != "frozen":
            explain(self.caller, error)

    def needs(self, i: int) -> bool:
        """Whether anything is asked of chunk i."""
        return True

    def split(self, i: int, xs: Entries, shared: Entries) -> tuple[Any, Any, list[Any], list[Any]]:
        """The inputs of the other program at chunk i, then the vectors, None where not there."""
        k, m = self.widths[i], self.shared_width
        vectors, of_shared = _spread(xs[k:], self.mask[i]), _spread(shared[m:], self.mask[-1])
        return xs[:k], shared[:m], vectors, of_shared

    def pass_by(self, i: int, xs: Entries, shared: Entries) -> None:
        self.of.pass_by(i, *self.split(i, xs, shared)[:2])

    def _drop_hooks_set_again(self, adding: LeafHooks | None) -> None:
        """Those that f set on leaves just now: it set them before, and they fire on the sum."""
        for k, x in enumerate(self.leaves):
            hooks = upstream.tensor_hooks(x)
            if hooks and not (adding is not None and adding.takes(k)):
                hooks.clear()

    def from_retained(self, rows: Rows, shared: Entries, found: Rows, sums: Sums) -> set[int]:
        """Which chunks were had from graphs that were kept."""
        return set()

    def evaluate(self, rows: Rows, shared: Entries) -> tuple[Rows, list[Any]]:
        count, sums = len(rows), self._begun()
        if upstream.forward_level() >= 0:
            rows, shared = [[*map(primal_of, xs)] for xs in rows], [*map(primal_of, shared)]
        result: Rows = [self.nothing(i) for i in range(count)]
        bare = without_hooks(self.forward.leaves) if self.forward.leaves else NOTHING
        with bare, torch.set_grad_enabled(False), self._adding(sums) as self.adding:
            had = self.from_retained(rows, shared, result, sums)
            again = [i for i in range(count) if self.needs(i) and i not in had]
            if again:
                with as_it_began(self.forward):
                    self._run(again, result, sums, rows, shared)
        self.adding = None
        if sums.terms:
            return result, sums.total()
        return result, [] if self.transposes else [None] * (self.shared_width + len(self.leaves))

    def _adding(self, sums: Sums) -> Any:
        """Where hooks add up what leaves get, chunk after chunk."""
        return NOTHING

    def _run(self, again: list[int], found: Rows, sums: Sums, rows: Rows, shared: Entries) -> None:
        """Those chunks of which something is asked; the others up to the last of them pass by."""
        count, shown, these = again[-1] + 1, self.forward.chunks.options.progress, {*again}
        for i in steps(count) if shown and count > 1 else range(count):
            if i not in these:
                self.pass_by(i, rows[i], shared)
                continue
            found[i], terms = self.one(i, rows[i], shared)
            if terms:
                sums.add(terms)
            del terms  # when the next chunk runs, nobody but the sums holds them

    def _begun(self) -> Sums:
        """What earlier nodes of this backward pass gave for the leaves; nobody else holds it."""
        sums = Sums()
        handed = self.joint.handed(self.leaves) if self.joint and self.joint.sums else []
        if any(x is not None for x in handed):
            sums.add([*[None] * self.shared_width, *handed])
        return sums

    def nothing(self, i: int) -> list[Any]:
        """The outputs of a chunk of which nothing is asked."""
        raise NotImplementedError

    def _within(self, i: int, xs: Entries, shared: Entries) -> tuple[list[Any], Any, Any]:
        """The other program's inputs, outputs and sums, with a graph between them."""
        create = torch.is_grad_enabled()
        enter = view_of if create else alias_of
        a, b = [*map(enter, xs)], [*map(enter, shared)]
        upstream.set_grad_enabled(True)
        try:
            ys, terms = self.of.one(i, a, b)
        finally:
            upstream.set_grad_enabled(create)
        if create:
            refuse_lost(self.caller, tensors_of((*ys, *terms)))
        # A pullback that is transposed gates what runs in it by itself.
        if create or (self.transposes and not isinstance(self.of, _Derived)):
            run, leaves = self.forward.to_try(i, a, b)
            gate_graph(self.caller, run, leaves, tensors_of((*ys, *terms)), [*a, *b])
        return [*a, *b, *self.leaves], ys, terms

    def _gated_at_hooks(
        self, i: int, inputs: Entries, xs: Entries, outs: Entries, cts: Entries, grads: Any
    ) -> list[Any]:
        """A gradient of chunk i, of whose hooks is asked what they lose."""
        run, leaves = self.forward.to_try(i, inputs[: len(xs)], inputs[len(xs) :])
        return gated_at_hooks(self.caller, run, leaves, inputs, outs, cts, grads, linear=True)


class Backward(_Derived):
    """The pullback: of cotangents, to cotangents of each chunk's inputs; the others are summed."""

    def needs(self, i: int) -> bool:
        """Whether a cotangent comes in, at the chunk or at what is summed."""
        return any(self.mask[i]) or any(self.mask[-1])

    def nothing(self, i: int) -> list[Any]:
        return [None] * self.widths[i]

    def one(self, i: int, xs: Entries, shared: Entries) -> tuple[list[Any], list[Any]]:
        """Cotangents of the chunk's inputs, then of what all chunks share."""
        create = torch.is_grad_enabled()
        xs, shared, cts, shared_cts = self.split(i, xs, shared)
        inputs, ys, terms = self._within(i, xs, shared)
        own, outs = len(xs) + len(shared), [*ys, *terms] if terms else ys
        cts = [*cts, *shared_cts] if terms else cts
        adding, forward = None if create else self.adding, self.forward
        # The graph is that of the first pass, of which it is known.
        same = self.of is self.forward and forward.compares_leaves and not forward.batches
        how = create, create, same and forward.is_right
        if forward.hooked or forward.counts:
            with going_back(forward, create):
                grads = self._pulled_adding(adding, outs, inputs, cts, own, *how)
        else:
            grads = self._pulled_adding(adding, outs, inputs, cts, own, *how)
        if create and forward.hooked:
            grads = self._gated_at_hooks(i, inputs[:own], xs, outs, cts, grads)
        return grads[: len(xs)], grads[len(xs) :]

    def _adding(self, sums: Sums) -> Any:
        single = not (self.forward.batches or self.forward.beneath or any(self.vectors_only))
        if not (single and adds_leaves(self.leaves)):
            return NOTHING
        sums.begin(self.shared_width + len(self.leaves))
        return LeafHooks(sums, self.shared_width, self.leaves)

    def _pulled_adding(
        self,
        adding: LeafHooks | None,
        outs: Entries,
        inputs: Entries,
        cts: Entries,
        own: int,
        *how: bool,
    ) -> list[Any]:
        """As `pulled`; what hooks on leaves add to the sums is None."""
        roots = outs if adding is None else adding.roots(outs)
        if self.forward.hooked:
            self._drop_hooks_set_again(adding)
        try:
            grads = self.pulled(roots, inputs, cts, own, *how)
        except RuntimeError as error:
            self.explain(error)
            raise
        for k in adding.added if adding is not None else ():
            grads[own + k] = None
        return grads

    def from_retained(self, rows: Rows, shared: Entries, found: Rows, sums: Sums) -> set[int]:
        forward = self.forward
        retained = forward.retained if self.of is self.forward else {}
        if not retained:
            return set()
        keep = upstream.keeps_graph()
        # In one pass, for what they share (a cast weight, a cached parametrization) stands once.
        xs, own, ys = zip(*retained.values(), strict=True)
        inputs, outs = [*chain(*xs), *own[0]], [*chain(*ys)]
        inputs, width = [*inputs, *self.leaves], len(inputs)
        cts = [ct for i in retained for ct in self.split(i, rows[i], shared)[2]]
        check_storages(forward)
        forward.reading[0] = True
        try:
            with going_back(forward) if forward.counts and not forward.hooked else NOTHING:
                how = keep, False, forward.is_right
                grads = self._pulled_adding(self.adding, outs, inputs, cts, width, *how)
        finally:
            forward.reading[0] = False
        had, left = set(retained), iter(grads)
        for i in retained:
            found[i] = [next(left) for _ in range(self.widths[i])]
        if rest := list(left):
            sums.add(rest)
        if not keep:
            retained.clear()
        return had


def _refuse_edits(outs: Entries) -> None:
    """An edited cotangent is no linear map, whose transposed would be the pushforward."""
    for node in nodes_of(tensors_of(outs)):
        edit = reverse_only_at(node)
        if edit is not None:
            raise GradtoolsError(reverse_only_text("chunked", edit))


class Pushed(_Derived):
    """The pushforward, as the transpose of the pullback: dual levels do not nest."""

    transposes = True

    def nothing(self, i: int) -> list[Any]:
        """Outputs with no tangent have no place."""
        return []

    def one(self, i: int, xs: Entries, shared: Entries) -> tuple[list[Any], list[Any]]:
        create = torch.is_grad_enabled()
        xs, shared, dxs, dshared = self.split(i, xs, shared)
        inputs, ys, terms = self._within(i, xs, shared)
        outs = [*ys, *terms]
        _refuse_edits(outs)
        with torch.enable_grad():
            dummies = [_dummy(y) for y in outs]
            pulled = pulled_back(outs, inputs, dummies, True, True)
            if self.forward.hooked:
                own = inputs[: len(xs) + len(shared)]
                pulled = self._gated_at_hooks(i, own, xs, outs, dummies, pulled)
        mask = [d is not None for d in dummies]
        wanted = [d for d in dummies if d is not None]
        pushed = self.pulled(pulled, wanted, [*dxs, *dshared], len(wanted), create, create)
        pushed = spread(pushed, mask)
        return pushed[: len(ys)], pushed[len(ys) :]


def pulled_back(
    outs: Entries, inputs: Entries, cts: Entries, keep: bool, create: bool, is_right: bool = False
) -> list[Any]:
    """Cotangents of outs to cotangents of inputs, where there is a way.

    is_right: Whether PyTorch is known to have all gradients right there.
    """
    ys, seeds = list[Tensor](), list[Any]()
    for y, ct in zip(outs, cts, strict=True):
        if ct is not None and isinstance(y, Tensor) and y.requires_grad:
            ys.append(y)
            seeds.append(ct)
    needs_grad = [isinstance(x, Tensor) and x.requires_grad for x in inputs]
    if not ys or not any(needs_grad):
        return [None] * len(inputs)
    xs = inputs if all(needs_grad) else [*compress(inputs, needs_grad)]
    wrong = [] if is_right else wrong_nodes(ys)
    with corrected(wrong, create) if wrong else NOTHING:
        grads: Any = pulled(ys, xs, seeds, keep, create)
    return list(grads) if xs is inputs else spread(grads, needs_grad)


def _dummy(y: Any) -> Tensor | None:
    tracked = isinstance(y, Tensor) and y.requires_grad
    return torch.zeros_like(y, requires_grad=True) if tracked else None


# --- a program as one node of autograd's graph --------------------------------------------


def node_of(
    program: ChunkProgram, rows: Rows, shared: Entries, known: tuple[Rows, list[Any]] | None = None
) -> tuple[Rows, list[Any]]:
    """The outputs and sums of a program, differentiable with respect to its inputs and leaves.

    known: The outputs and sums, if they were evaluated already. Beneath functorch they cannot
    be, since there the evaluation stands under the transforms' levels.
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
    flat = _spread(results, mask)
    if known is not None and not all(mask):
        everything = [*chain(*known[0]), *known[1]]
        flat = [y if t else e for y, t, e in zip(flat, mask, everything, strict=True)]
    parts = cut_up(flat, counts)
    return parts[:-1], parts[-1]


def _chosen(program: ChunkProgram, found: Any, shape: list[Any], known: bool) -> list[Tensor]:
    """The outputs and sums that are the node's outputs; shape tells afterwards which."""
    outs: list[Tensor] = []
    mask: list[bool] = []
    for i, ys in enumerate([*found[0], found[1]]):
        for k, y in enumerate(ys):
            has_way = not known or program.attached is None or program.attached[i][k]
            mask.append(isinstance(y, Tensor) and has_way)
            if mask[-1]:
                outs.append(y)
    shape[:] = [list(map(len, found[0])), mask]
    return outs


@dataclass(frozen=True)
class _Maps:
    """The two linear maps of a program on its inputs, rows of `widths` and `width` shared."""

    program: ChunkProgram
    widths: list[int]
    width: int
    shape: list[Any]  # as `_chosen` says it

    def cotangent(self, saved: Entries, cts: Entries, joint: Joint | None = None) -> list[Any]:
        counts, mask = self.shape
        full = _spread(cts, mask)
        if not isinstance(self.program, _Derived):  # its sums are carries
            full = full[: sum(counts)]
        rows, shared, those = self._vectors(saved, full, counts)
        before, here.mark = here.mark, here.mark or self.program.caller
        try:
            return self.program.pull(self.widths, self.width, those, rows, shared, joint)
        finally:
            here.mark = before

    def tangent(self, saved: Entries, dxs: Entries) -> list[Any]:
        result = self._vectors(saved, dxs, self.widths)
        with marked(self.program.caller):
            pushed = self.program.push(self.widths, self.width, result[2], *result[:2])
        mask = self.shape[1]
        pushed += [None] * (len(mask) - len(pushed))  # of carries
        return [dy for dy, t in zip(pushed, mask, strict=True) if t]

    def _vectors(self, saved: Entries, given: Entries, counts: list[int]) -> tuple[Any, Any, Any]:
        parts, vs = cut_up(saved, self.widths), cut_up(given, counts)
        masks = [[v is not None for v in row] for row in vs]
        parts[-1] = parts[-1][: self.width]
        triples = zip(parts, vs, masks, strict=True)
        both = [[*xs, *compress(row, mask)] for xs, row, mask in triples]
        return both[:-1], both[-1], masks


class _ProgramNode(torch.autograd.Function):
    """A program where the engine alone differentiates: no transform, and no dual number yet.

    A rule's node is for those as well, and takes longer than a small network.
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
        living, joint = list(cts), joint_of(ctx) if ctx.leaves else None
        for k, ct in enumerate(cts):
            if ct is not None and upstream.is_wrapped(ct):
                living[k] = alive(ct)
        with upstream.EnableTorchFunction():  # which backward() of a subclass switches off
            result = ctx.maps.cotangent(_unchanged(ctx), living, joint)
        if joint is not None:
            own = len(result) - len(ctx.leaves)
            result[own:] = joint.handed_on(ctx.leaves, result[own:])
        return None, None, *result


def _unchanged(ctx: Any) -> Any:
    """What was saved; autograd tells of a tensor that was changed since, in words of its own."""
    try:
        return ctx.saved_tensors
    except RuntimeError as error:
        if not says(error, SAVED_CHANGED):
            raise
        caller = ctx.maps.program.caller
        raise GradtoolsError(
            f"{caller}: an argument or a parameter was changed in place after the forward pass, "
            "and the backward pass needs it as it was. Clone it before you change it."
        ) from error


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
            batched = [True] * len(shape[1])
            if isinstance(result, Backward) and not result.vectors_only[0]:
                # the sums of leaves are sums over the batch, too
                batched[len(batched) - len(result.leaves) :] = [False] * len(result.leaves)
            pairs = zip(batched, shape[1], strict=True)
            return tuple([0 if b else None for b, m in pairs if m])

        batch = _rule(_Maps(result, widths, width, shape))
        return batch, [*front, *xs[count:]], axes_of

    caller = program.caller
    return BatchedRule(caller, primal, maps.tangent, maps.cotangent, batching_rule=batching_rule)


def outputs_of(program: _Derived, rows: Rows, shared: Entries) -> list[Any]:
    """What a program derived from another gives, differentiable where that is asked."""
    known = None
    if upstream.peek_interpreter_stack() is None:
        known = program.evaluate(rows, shared)
        if not torch.is_grad_enabled() and upstream.forward_level() < 0:
            return [*chain(*known[0]), *known[1]]
    rows, sums = node_of(program, rows, shared, known)
    return [*chain(*rows), *sums]
