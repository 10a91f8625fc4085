"""f over chunks: the first pass, which keeps no graph, and the recomputation of a chunk.

Chunks are recomputed in order from one snapshot of the state that f depends on, and so see the same
states as in the first pass; afterwards the current state is restored.
"""

from __future__ import annotations

import copy
import operator
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import get_gradient_edge

from gradtools.arguments.chunks import Chunks
from gradtools.errors import GradtoolsError
from gradtools.torch import _upstream as upstream
from gradtools.torch.autograd_graph import nodes_of
from gradtools.torch.compiling import left_to_python
from gradtools.torch.functorch_wrappers import is_dual, is_inexact, is_wrapped
from gradtools.torch.known_errors import LEAF_CHANGED, VIEW_CHANGED, says
from gradtools.torch.modes import NOTHING, Modes, default_device, without_cached_weights
from gradtools.torch.operation_marks import hooks_of_users, is_recorded
from gradtools.torch.patches import Substituted
from gradtools.torch.randomness import Randomness
from gradtools.torch.replaying.consistency import Verification, graph_of
from gradtools.torch.replaying.nodes import ChunkProgram, cut_up
from gradtools.torch.replaying.recomputing import (
    Entries,
    Originals,
    Rows,
    Tensor,
    alias_of,
    as_input,
    captured_error,
    captures_refused,
    check_cached,
    check_end,
    check_modules,
    edge_error,
    is_observed,
    parameters_of,
    pieces_of,
    primal_of,
    steps,
    tensors_of,
    untracked,
    without_sharded_calls,
)
from gradtools.torch.rules.functions import reverse_only_at
from gradtools.torch.snapshots import Snapshot

left_to_python(__name__)
_PLAIN: set[type] = set()  # PyTorch's own nodes, whose gradients are right
_grad_of, _is_leaf = operator.attrgetter("grad"), operator.attrgetter("is_leaf")
_kind_of = operator.attrgetter("device.type")


@dataclass(eq=False)
class Pass:
    """One run of the chunks in order: the first one, or a recomputation."""

    carry: list[Any]  # of the next chunk
    outer: Snapshot | None = None  # the state outside of a recomputation; None in the first pass
    drawn: Randomness | None = None  # in a recomputation: generators' states after the chunk before
    modes: Callable[[], Any] = nullcontext  # a context with the modes of the first pass
    is_bare: bool = False  # whether f runs in the current modes, without setting any


class Forward(ChunkProgram):
    """f itself, with the state that is needed to recompute a chunk.

    Under torch.func all tensors are inputs, since wrappers of its levels are dead when the backward
    pass runs. The carry then is among the shared inputs, and is returned in the place of sums.
    """

    differentiates_leaves = True  # those that f reaches besides its arguments
    saves_parameters = True  # so that autograd detects in-place changes of them
    compares_leaves = compares_bits = True  # in the verification
    attaches: Callable[[Tensor], bool] = operator.attrgetter("requires_grad")  # a derivative
    may_reach_sharded = True  # whether f may reach modules of FSDP2, without calling them
    mark = property(lambda self: self.caller)  # of its operations in graphs
    forward = property(lambda self: self)
    within: Callable[[], Any] | None = None  # a context manager in which f runs

    def __init__(self, chunks: Chunks, in_functorch: bool, like: Snapshot | None = None) -> None:
        self.chunks, self.in_functorch = chunks, in_functorch
        self.caller, self.count = chunks.caller, chunks.cut.count
        self.roots = [chunks.call.f, *(x for x in chunks.shared if not isinstance(x, Tensor))]
        self.pieces = pieces_of(chunks)
        self.tensors = tensors_of([*chunks.shared, *chunks.carry, *self.pieces[0]])
        self.modes, self.device = Modes.now({*map(_kind_of, self.tensors)}), upstream.device_set()
        self.first_modes = self.modes
        self.nodes_of_comparison = [0]  # nodes of autograd's, by `_with_first_kernels`
        try:
            self.start = Snapshot.of(self.roots, self.tensors, like)
        except GradtoolsError as error:
            raise GradtoolsError(f"{self.caller}: {error}") from None
        self.verifies = chunks.options.verify is not False
        self.verification: Verification | None = None
        reached = self.start.reached
        if reached.is_sharded is None:  # else the same modules were checked before
            reached.is_sharded = check_modules(self)
        if reached.is_sharded:
            self.within = partial(without_sharded_calls, self.caller)
        one = self._moving(self.pieces[0])  # the same in all chunks, except for lists
        listed = any(chunks.lists)
        self.moving = [self._moving(p) if listed else one for p in self.pieces]
        self.moving_shared = self._moving(chunks.shared)
        self.xs = [[p[k] for k in m] for p, m in zip(self.pieces, self.moving, strict=True)]
        self.shared = [chunks.shared[k] for k in self.moving_shared]
        self.first_carry = [untracked(x) for x in chunks.carry]
        self.running = Pass(self.first_carry)
        self.reached_leaves: list[Tensor] = parameters_of(self.start) if in_functorch else []
        self.leaves = self.reached_leaves if self.differentiates_leaves else []
        self.attached: list[list[bool]] = []
        self.captured = self._captured() if chunks.caller == "checkpoint" else []
        self.begun: set[Any] = set()  # the nodes of the inputs that the first pass's graph reaches
        self.shared += self.captured
        if in_functorch:
            self.shared += self.first_carry
        self.retained: dict[int, tuple[list[Tensor], list[Tensor], list[Any]]] = {}
        self.originals = Originals(chunks, self.pieces, self.moving, self.modes.grad)
        # Buffer versions and generator states after so many chunks, see `check_end`.
        self.ends: dict[int, tuple[list[int], dict[str, int]]] = {}
        self.hooked = False  # whether f sets gradient hooks
        self.counts = self.compares_bits and bool(self.start.reached.counted)
        self.accumulates = False  # whether f itself accumulates into its leaves' .grad
        self.versions: list[tuple[Tensor, int]] = []  # of the arguments
        self.storages: list[tuple[Tensor, Any]] = []  # the leaves' storages
        # What f's graph holds:
        self.once: str | None = None  # the name of a once_differentiable Function
        self.edit: str | None = None  # the name of a reverse-only rule
        self.functions: set[Any] = set()  # the autograd.Functions
        self.batches: tuple[tuple[int, str], ...] = ()  # vmap's (size, randomness), outermost first
        self.as_batch: dict[tuple[int, str], Forward] = {}  # recomputed by the backward pass

    def batched(self, size: int, on: list[list[bool]], randomness: str, whole: bool) -> Any:
        # A recomputation of an unbatched first pass draws once for all examples.
        batch = size, randomness if any(map(any, on)) else "same"
        result = self.as_batch.get(batch)
        if result is None:
            result = self.as_batch[batch] = copy.copy(self)
            result.batches, result.as_batch = (batch, *self.batches), {}
        return result, [[True for _ in row] for row in on]

    def _captured(self) -> list[Tensor]:
        """The computed tensors, or functorch wrappers, that f closes over: implicit arguments."""
        tensors = self.start.reached.tensors
        if self.in_functorch:
            return [x for x in tensors if is_wrapped(x)]
        with upstream.DisableTorchFunction():  # an outer `Substituted` would replace them
            return [x for x in tensors if is_dual(x) or (self.modes.grad and not x.is_leaf)]

    def _given(self) -> list[Tensor]:
        """The tensors that are passed to all chunks uncopied: in-place changes persist."""
        own = [x for k, x in enumerate(self.chunks.shared) if k not in self.moving_shared]
        return tensors_of([*own, *self.first_carry])

    def _moving(self, xs: Entries) -> list[int]:
        """The indices of those of xs that are inputs of the node."""
        every = [(k, x) for k, x in enumerate(xs) if isinstance(x, Tensor)]
        if self.in_functorch:
            return [k for k, _ in every]
        return [k for k, x in every if self.modes.grad and (x.requires_grad or is_dual(x))]

    def one(self, i: int, xs: Entries, shared: Entries) -> tuple[list[Any], list[Any]]:
        """f at one chunk; its carry is stored for the next one."""
        now = self.running
        if now.drawn is not None:
            now.drawn.restore()
        if self.in_functorch and i == 0:
            carry_at = len(self.moving_shared) + len(self.captured)
            now.carry = [untracked(x) for x in shared[carry_at:]]
        call, check = self._function(), self.verification
        pieces, own = self._arguments(i, xs, shared)
        if now.is_bare and check is None:
            outs, carry = call(i, i, pieces, own, now.carry)
        else:  # in the modes of the first pass, and verified
            cached = without_cached_weights() if upstream.caches_weights() else NOTHING
            watched: Any = check.watching(i) if check else NOTHING
            inside = self.within() if self.within else NOTHING
            with now.modes(), cached as weights, watched as seen, inside:
                outs, carry = call(i, i, pieces, own, now.carry)
                if weights:
                    check_cached(self.caller, self.start)
            given = [*xs, *shared]
            if check is not None and now.outer is not None:
                inputs = given if self.compares_leaves else None
                again = None if self.compares_bits else partial(self._with_first_kernels, i, given)
                check.compare(i, outs, seen, inputs, self.batches, again)
            elif check is not None:
                check.keep(i, outs, seen, self.batches)
        now.carry = [untracked(x) for x in carry] if carry else carry
        if now.outer is not None:
            if i + 1 in self.ends and not self.batches:
                check_end(self, i + 1)
            if self.start.streams and i + 1 < self.count:
                now.drawn = self.start.streams.current()
        return outs, []

    def _with_first_kernels(self, i: int, given: list[Any]) -> list[Any]:
        """The outputs of the only chunk, computed once more as in the first pass."""
        self.start.restore()
        modes, before = self.first_modes, upstream.nodes_made()
        with modes.restored():
            count = len(self.moving[i])
            inputs = [alias_of(primal_of(x)) for x in given]
            pieces, own = self._arguments(i, inputs[:count], inputs[count:])
            outs = self._function()(i, i, pieces, own, self.first_carry)[0]
        self.nodes_of_comparison[0] += upstream.nodes_made() - before
        return outs

    def begin(self, outer: Snapshot | None = None) -> Pass:
        """Begins a pass in the current modes."""
        modes: Callable[[], Any] = nullcontext
        is_bare = self.within is None and not upstream.caches_weights()
        if outer is not None:
            in_modes = self.modes.are_current()
            same = partial(torch.set_grad_enabled, self.modes.grad)
            modes, is_bare = same if in_modes else self.modes.restored, is_bare and in_modes
        self.running = Pass(self.first_carry, outer, None, modes, is_bare)
        return self.running

    def _arguments(self, i: int, xs: Entries, shared: Entries) -> tuple[list[Any], list[Any]]:
        """f's arguments at chunk i: its pieces, then shared and captured tensors."""
        pieces, own = self.pieces[i], self.chunks.shared
        if not (xs or shared or self.originals):
            return pieces, own
        pieces, own = list(pieces), list(own)
        for k, original in self.originals.of(i).items() if self.originals else ():
            pieces[k] = original
        for k, x in zip(self.moving[i], xs, strict=True):
            pieces[k] = x if not self.in_functorch or is_inexact(x) else x.clone()
        for k, x in zip(self.moving_shared, shared, strict=False):
            own[k] = x
        own += shared[len(self.moving_shared) :][: len(self.captured)]
        return pieces, own

    def _function(self) -> Callable[..., tuple[list[Any], list[Any]]]:
        """f at one chunk, like `ChunkFunction`, with captured tensors after the shared leaves."""
        call, count = self.chunks.call, len(self.chunks.shared)

        def substituted(i: int, index: int, pieces: Any, own: Any, carry: Any) -> Any:
            with Substituted(self.captured, own[count:]) as others:
                outs, carry = call(i, index, pieces, own[:count], carry)
                return others.within(outs), carry

        fun = substituted if self.captured else call
        return partial(self._batched_call, fun) if self.batches else fun

    def _batched_call(self, call: Any, i: int, at: int, pieces: Any, own: Any, carry: Any) -> Any:
        """f at one chunk, under one vmap for each of `batches`."""
        flat = [*pieces, *own, *carry]
        there = [isinstance(x, Tensor) for x in flat]
        moving = {*self.moving_shared, *range(len(own) - len(self.captured), len(own))}
        mapped = [k in self.moving[i] for k in range(len(pieces))]
        mapped += [k in moving for k in range(len(own))] + [i > 0] * len(carry)
        axes = [0 if self.in_functorch or m else None for m in mapped]
        counts: list[int] = []

        def one(*xs: Tensor) -> tuple[Tensor, ...]:
            left = iter(xs)
            full = [next(left) if t else x for x, t in zip(flat, there, strict=True)]
            outs, after = call(i, at, *cut_up(full, [len(pieces), len(own)]))
            counts[:] = [len(outs)]
            return (*outs, *after)

        fun: Callable[..., Any] = one
        in_dims = tuple([axis for axis, t in zip(axes, there, strict=True) if t])
        for _, randomness in reversed(self.batches):
            fun = torch.vmap(fun, in_dims, randomness=randomness)
        flat_outs = list(fun(*(x for x, t in zip(flat, there, strict=True) if t)))
        return flat_outs[: counts[0]], flat_outs[counts[0] :]

    def advance(self, i: int, xs: Entries, shared: Entries) -> None:
        """Runs f for its effects on random generators, buffers and the carry."""
        with torch.set_grad_enabled(self.modes.grad):
            self.one(i, [*map(alias_of, xs)], [*map(alias_of, shared)])

    # --- the first pass

    def evaluate(self, rows: Rows, shared: Entries) -> tuple[Rows, list[Any]]:
        """The first pass. Records the leaves, and keeps the last chunks' graphs."""
        before = self._grads()
        try:
            with torch.set_grad_enabled(self.modes.grad):
                result = self._first_pass(rows, shared)
        except BaseException:
            self.start.restore()
            self.originals.put_back()
            raise
        self.accumulates = self._grads() != before
        return result, self.running.carry

    def _grads(self) -> list[tuple[int, int]]:
        """The ids and versions of the leaves' `.grad`."""
        grads = map(_grad_of, filter(_is_leaf, self.start.reached.tensors))
        return [(id(g), upstream.version_of(g)) for g in grads if g is not None]

    def _first_pass(self, rows: Rows, shared: Entries) -> Rows:
        grad = self.modes.grad
        kept, result = self._kept(), list[list[Any]]()
        given = [x for x in (*chain(*rows), *shared, *self._given()) if not x.is_inference()]
        versions = [upstream.version_of(x) for x in given]
        # An intermediate that f stores elsewhere may reach the loss: then it needs its own graph.
        apart = kept or self.in_functorch or is_recorded()
        enter = alias_of if apart else as_input
        leaves, began = dict[int, Tensor](), [upstream.nodes_made()]
        own, *inputs = [[*map(enter, xs)] if grad else list(xs) for xs in (shared, *rows)]
        detach = untracked if is_observed() else Tensor.detach
        if self.verification is None:  # else that of the unbatched program
            self.verification = Verification.of(self, self.chunks.options.verify)
        first_hook, before = upstream.hooks_made(), hooks_of_users()
        self.begin()
        for i in steps(self.count, self.chunks.options.progress):
            if i:
                began.append(upstream.nodes_made())
            xs = inputs[i]
            originals = self.originals.noted(i, self.verification is not None)
            captures = captures_refused(self) if self.in_functorch else NOTHING
            try:
                with originals, captures:
                    outs, _ = self.one(i, xs, own)
            except RuntimeError as error:
                if not (says(error, LEAF_CHANGED) or says(error, VIEW_CHANGED)):
                    raise
                raise self._in_place(f" PyTorch says: {error}") from error
            self._check_modes()
            if grad:
                leaves.update(self._find_leaves(i, outs, began, [*xs, *own]))
                if kept:
                    self.retained[i] = (xs, own, outs)
            self.attached.append([isinstance(y, Tensor) and self.attaches(y) for y in outs])
            pairs = zip(outs, self.attached[i], strict=True)
            result.append([detach(y) if a else y for y, a in pairs])
            del outs  # frees the graph before the next chunk
        if any(map(any, self.attached)) and [upstream.version_of(x) for x in given] != versions:
            raise self._in_place("")
        self.originals.settle()
        # Whether f set gradient hooks, which share a counter with hooks of modules.
        count = hooks_of_users() - before
        modules = [m for m, _ in self.start.reached.modules.values()] if count else []
        numbers = [key for m in modules for key in upstream.forward_hooks_of(m)]
        self.hooked |= count != sum(key >= first_hook for key in numbers)
        self._settle([*leaves.values()], own[len(self.moving_shared) :] if grad else [])
        return result

    def _settle(self, leaves: list[Tensor], substituted: list[Tensor]) -> None:
        """Records the state that the backward pass requires.

        leaves: The leaves that the graph reaches.
        substituted: The tensors that f saw instead of captured ones.
        """
        if not self.in_functorch:
            self.reached_leaves = leaves
            self.leaves = leaves if self.differentiates_leaves else []
        else:  # they are those of the node, which is made before f is evaluated
            known = {*map(id, self.reached_leaves)}
            for leaf in leaves:
                if id(leaf) not in known:
                    raise captured_error(self, leaf)
        reached = self.start.reached
        changed, unchanged = self.start.changed(parameters=True), reached.is_unchanged()
        self.start = self.start.without_unused_streams()
        is_attached = any(map(any, self.attached))
        if changed and is_attached:
            carry = ", or pass it in an argument that carry_argnums names"
            raise GradtoolsError(
                f"{self.caller}: f changes {changed[0]} in place, which it captured, and it cannot "
                "be put back for the backward pass, being a parameter (which an embedding with "
                "max_norm changes, too), or large and outside of modules. Change it outside of f, "
                f"or make it a buffer of a module{carry if self.caller == 'chunked' else ''}."
            )
        if is_attached:  # versions and storages must be the same in the backward pass
            given, split = self._given(), tensors_of([x for x, _ in self.chunks.splits])
            constants = [*split, *tensors_of([*chain(*self.chunks.lists)]), *given]
            constants = [x for x in constants if not (x.requires_grad or x.is_inference())]
            self.versions = [(x, upstream.version_of(x)) for x in constants]
            own = tensors_of(
                [*self.shared, *given, *[x for x in split if x.requires_grad]]
            )  # other rows are views
            own = [*self.reached_leaves, *filter(_is_leaf, [] if self.in_functorch else own)]
            plain = [x for x in own if type(x) in (Tensor, torch.nn.Parameter)]
            plain = [x for x in plain if x.layout is torch.strided and not is_wrapped(x)]
            self.storages = [(x, x.untyped_storage()) for x in plain]
        if self.retained and not unchanged:
            # f may have stored an intermediate of a kept graph, which the loss may reach too.
            outs = [y for _, _, ys in self.retained.values() for y in tensors_of(ys)]
            stored = [x for x, _ in self.start.watched_now() if x.grad_fn is not None]
            if not set(nodes_of(outs)).isdisjoint(nodes_of(stored)):
                self.retained.clear()
        if substituted and self.captured:  # only those that f's outputs depend on
            self.captured = [
                x
                for x, alias in zip(self.captured, substituted, strict=True)
                if is_dual(x) or get_gradient_edge(alias).node in self.begun
            ]
            self.shared[len(self.moving_shared) :] = self.captured
            self.begun.clear()
        self._note_end(self.count)
        if self.start.streams is None and not reached.counted:
            self.ends.clear()  # there is nothing to compare
        if self.verification is not None and not unchanged:
            self.verification.later = self.start.watched_now()

    def _check_modes(self) -> None:
        """Raises if f changes a global mode, in which the next chunk would run."""
        grad, device = torch.is_grad_enabled() != self.modes.grad, self.modes.device
        if upstream.device_set() is not self.device or upstream.count_of_function_modes():
            device = default_device()
        grad = grad and self.compares_bits  # frozen has a single chunk
        if grad or device != self.modes.device:
            what = "whether gradients are taken" if grad else f"the default device (to {device})"
            how = "torch.no_grad()" if grad else "torch.device(...)"
            raise GradtoolsError(
                f"{self.caller}: f switches {what} and leaves it so. Switch it before the call, or "
                f"inside of f by `with {how}:`."
            )

    def _note_end(self, count: int) -> None:
        """Records the first pass's end of `count` chunks, for `check_end`."""
        if self.verifies and not self.in_functorch:
            self.ends[count] = self.end()

    def end(self) -> tuple[list[int], dict[str, int]]:
        """The current versions of buffers, and fingerprints of the generators' states."""
        versions = [*map(upstream.version_of, self.start.reached.counted)]
        return versions, self.start.streams.fingerprints() if self.start.streams else {}

    def _kept(self) -> int:
        """How many chunks keep their graph; one in the first derivative of a frozen function."""
        return 0

    def _in_place(self, more: str) -> GradtoolsError:
        return GradtoolsError(
            f"{self.caller}: f changes an argument in place that is differentiated or not split, "
            f"or a parameter, and it cannot be put back. Clone it in f first.{more}"
        )

    def _find_leaves(
        self, i: int, outs: Entries, began: list[int], own: list[Tensor]
    ) -> dict[int, Tensor]:
        """The leaves that chunk i's graph reaches; raises for nodes of another computation.

        began: Autograd's sequence number at the beginning of each chunk.
        own: The chunk's inputs, where the graph begins.
        """
        pushed = upstream.forward_level() >= 0
        for y in tensors_of(outs) if pushed or self.in_functorch else ():
            if (is_wrapped(y) and self.in_functorch) or (pushed and is_dual(y)):
                raise captured_error(self, None)
        (nodes, leaves), begin, number_of = graph_of(outs, own), began[-1], upstream.sequence_of
        for node in nodes:
            kind: Any = type(node)
            if kind is upstream.AccumulateGrad:
                continue
            if number_of(node) < begin:
                # Any call may have made autocast's cached cast of a weight.
                parents = [type(parent).__name__ for parent, _ in node.next_functions]
                if kind.__name__ != "ToCopyBackward0" or parents != ["AccumulateGrad"]:
                    of_pass = number_of(node) >= began[0]
                    raise edge_error(self, i, node) if of_pass else captured_error(self, node)
            # What the class implies for derivatives of the pullback:
            if kind in _PLAIN:
                continue
            if not issubclass(kind, BackwardCFunction):
                _PLAIN.add(kind)
            else:
                if upstream.is_once_differentiable(kind):
                    self.once = kind.__name__.removesuffix("Backward")
                self.edit = reverse_only_at(node) or self.edit
                self.functions.add(upstream.forward_class(kind))
        if self.captured:
            self.begun |= {parent for node in nodes for parent, _ in node.next_functions}
            self.begun |= {y.grad_fn for y in tensors_of(outs)}
        if self.verification is not None:
            is_packed = not self._kept() and upstream.saved_tensors_hooks_on(False) is not None
            self.verification.first[i].note_graph(nodes, leaves, is_packed)
        return leaves
