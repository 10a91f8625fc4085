"""Programs over chunks, each of them one node of autograd's graph.

What `chunked` and `frozen` run is a program: `Forward` is f itself, with what a chunk needs to be
computed again; `Backward` and `Pushed` are the two linear maps of another program, and programs in
their turn. A program is evaluated without a graph, and its node differentiates it by the program
that is derived from it, so that derivatives of any order run at the memory of one chunk. Chunks run
in order from one snapshot of all that f's result depends on, which so goes through the same states
as in the first pass; afterwards everything is put back.
"""

from __future__ import annotations

import copy
import operator
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.autograd.forward_ad as forward_ad
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import get_gradient_edge, increment_version
from torch.utils.hooks import RemovableHandle

from gradtools.chunking import Chunks
from gradtools.errors import GradtoolsError
from gradtools.rules import Rule, spread
from gradtools.torch import _upstream as upstream
from gradtools.torch.compiling import is_compiling, left_to_python, nodes_of, refuse_lost
from gradtools.torch.customcode import gate_compiled, gated_calls
from gradtools.torch.joining import Joint, join, joint_of
from gradtools.torch.marks import CHUNK, data_of, detached
from gradtools.torch.modes import Modes, default_device, without_cached_weights
from gradtools.torch.randomness import Randomness
from gradtools.torch.refusals import explained, torch_says
from gradtools.torch.rules import apply_rule, reverse_only_at
from gradtools.torch.state import Snapshot
from gradtools.torch.summing import Sums, adding_leaves
from gradtools.torch.terms import guarded_gradients
from gradtools.torch.verifying import Verification, hook_count, kinds_of, register_own_hook
from gradtools.torch.watching import (
    REPLAYS,
    Captures,
    Substituted,
    bytes_saved,
    captured_error,
    check_cached,
    check_modules,
    edge_error,
    has_asked,
    is_recorded,
    is_replaying,
    is_wrapped,
    marked,
    parameters_of,
    set_replaying,
    steps,
)
from gradtools.torch.wrappers import alive, is_dual, is_inexact
from gradtools.torch.wrong_gradients import rightly, wrong_nodes

Tensor = torch.Tensor
left_to_python(__name__)
Entries = Sequence[Any]  # tensors, or None
Rows = list[list[Any]]  # one for each chunk


class Program:
    """A function of each chunk's tensors and of shared ones, that is run chunk by chunk."""

    leaves: list[Tensor]  # what it reaches by itself

    @property
    def forward(self) -> Forward:
        """What runs f. None holds itself: what is let go of is freed at once, and not by gc."""
        raise NotImplementedError

    def one(self, i: int, xs: Entries, shared: Entries) -> tuple[list[Any], list[Any]]:
        """Chunk i's outputs, and terms that are summed over chunks; entries may be None."""
        raise NotImplementedError

    def evaluate(self, rows: Rows, shared: Entries) -> tuple[Rows, list[Any]]:
        """All chunks' outputs and the sums, without a graph."""
        raise NotImplementedError

    def pass_by(self, i: int, xs: Entries, shared: Entries) -> None:
        """Runs f on a chunk only for what it does to the state of later ones."""
        raise NotImplementedError

    def attaches(self, i: int, k: int) -> bool:
        """Whether output k of chunk i has a derivative."""
        return True

    def pull(
        self,
        widths: Any,
        width: int,
        there: Any,
        rows: Rows,
        shared: Entries,
        joint: Joint | None = None,
    ) -> list[Any]:
        """Cotangents of the inputs; rows and shared end in the vectors, as in `_Derived`."""
        return outputs_of(Backward(self, widths, width, there, joint), rows, shared)

    def push(self, widths: Any, width: int, there: Any, rows: Rows, shared: Entries) -> list[Any]:
        """Tangents of the outputs."""
        return outputs_of(Pushed(self, widths, width, there), rows, shared)

    def batched(self, size: int, on: list[list[bool]], randomness: str, whole: bool) -> Any:
        """The same for a batch, and which of its inputs then have its axis in front.

        on: Which of the inputs have it, row by row, the shared ones last; at least one does.
        randomness: As in torch.vmap.
        whole: Whether all inputs are to have it.
        """
        raise NotImplementedError


class Forward(Program):
    """f itself, with what a chunk needs to be computed again.

    Beneath functorch's levels all tensors are inputs, since the levels' own are gone when the
    backward pass runs, the carry among the shared ones; it comes out where sums stand.
    """

    saves_parameters = True  # so that autograd itself tells of those that are changed
    compares_leaves = compares_bits = True  # where f is computed again

    def __init__(self, chunks: Chunks, beneath: bool, like: Snapshot | None = None) -> None:
        self.chunks, self.beneath = chunks, beneath
        self.asked = chunks.batch.asked
        self.pieces, self.count = pieces_of(chunks), chunks.cut.count
        self.tensors = _tensors([*chunks.shared, *chunks.carry, *self.pieces[0]])
        self.modes = Modes.now({x.device.type for x in self.tensors})
        self.roots = [chunks.f, *(x for x in chunks.shared if not isinstance(x, Tensor))]
        self.start = self._snapshot(like)
        self._check_modules()
        self.moving = [self._moving(piece) for piece in self.pieces]
        self.moving_shared = self._moving(chunks.shared)
        self.xs = [[p[k] for k in m] for p, m in zip(self.pieces, self.moving, strict=True)]
        self.shared = [chunks.shared[k] for k in self.moving_shared]
        self.first_carry = self.carry = [untracked(x) for x in chunks.carry]
        self.leaves: list[Tensor] = []
        self.attached: list[list[bool]] = []
        self.captured = self._captured() if chunks.batch.asked == "checkpoint" else []
        self.begun: set[Any] = set()  # nodes at which the first pass's graph begins
        self.shared += self.captured
        if beneath:
            self.shared += self.carry
            self.leaves = parameters_of(self.start)
        self.retained: dict[int, tuple[list[Tensor], list[Tensor], list[Any]]] = {}
        self.reading = [False]  # whether a graph that was kept is differentiated here
        self.originals: dict[int, dict[int, Tensor]] = {}  # of pieces that f changes in place
        self.verification = Verification.of(self, chunks.options.verify)
        self.is_again = False  # whether chunks are computed again
        self.standing = self.start  # then: what stands for everyone else
        self.ends: dict[int, tuple[dict[str, int], list[int]]] = {}  # see `_check_end`
        self.hooked = False  # whether hooks on gradients were set in f
        self.accumulates = False  # whether f itself adds to its leaves' .grad
        self.versions: list[tuple[Tensor, int, str]] = []
        self.storages: list[tuple[Tensor, Any]] = []  # where the leaves' entries lie
        self.drawn: Randomness | None = None
        self.once: str | None = None  # a Function in f's graph that has no second derivative
        self.edit: str | None = None  # a rule there that has a reverse rule only
        self.functions: set[Any] = set()  # the autograd.Functions there
        self.batches: tuple[tuple[int, str], ...] = ()  # of vmap: size, randomness; outermost first

    @property
    def forward(self) -> Forward:
        """Itself."""
        return self

    def _check_modules(self) -> None:
        check_modules(self.asked, self.start, self.chunks.f)

    def batched(self, size: int, on: list[list[bool]], randomness: str, whole: bool) -> Any:
        """The same for a batch of all its tensors."""
        found = copy.copy(self)
        # What was drawn before there was a batch is drawn again once for all of it.
        randomness = randomness if any(map(any, on)) else "same"
        found.batches = ((size, randomness), *self.batches)
        return found, [[True for _ in row] for row in on]

    def _snapshot(self, like: Snapshot | None) -> Snapshot:
        try:
            return Snapshot.of(self.roots, self.tensors, like)
        except GradtoolsError as error:
            raise GradtoolsError(f"{self.asked}: {error}") from None

    def _captured(self) -> list[Tensor]:
        """What f closes over that is computed, or a transform's: arguments that have no name."""
        found = [x for x, _ in self.start.reached.watched]
        if self.beneath:
            return [x for x in found if is_wrapped(x)]
        with upstream.DisableTorchFunction():  # what another program stands for is asked itself
            return [x for x in found if is_dual(x) or (self.modes.grad and not x.is_leaf)]

    def _given(self) -> list[Tensor]:
        """The tensors that all chunks see as they are: what f does to them stays."""
        own = [x for k, x in enumerate(self.chunks.shared) if k not in self.moving_shared]
        return [x for x in (*own, *self.first_carry) if isinstance(x, Tensor)]

    def _moving(self, xs: Entries) -> list[int]:
        """Which of xs are inputs of the node."""
        tensors = [(k, x) for k, x in enumerate(xs) if isinstance(x, Tensor)]
        if self.beneath:
            return [k for k, _ in tensors]
        if not self.modes.grad:
            return []
        return [k for k, x in tensors if x.requires_grad or is_dual(x)]

    def attaches(self, i: int, k: int) -> bool:
        """As the first pass saw it."""
        return self.attached[i][k]

    def one(self, i: int, xs: Entries, shared: Entries) -> tuple[list[Any], list[Any]]:
        """f at one chunk, whose carry stays for the next one."""
        if self.drawn is not None:
            self.drawn.restore()  # to where the streams stood when the chunk before had run
        if self.beneath and i == 0:
            carry_at = len(self.moving_shared) + len(self.captured)
            self.carry = [untracked(x) for x in shared[carry_at:]]
        pieces, own = list(self.pieces[i]), list(self.chunks.shared)
        for k, original in self.originals.get(i, {}).items():
            pieces[k] = original.clone()
        for k, x in zip(self.moving[i], xs, strict=True):
            pieces[k] = x if is_inexact(x) or not self.beneath else x.clone()
        for k, x in zip(self.moving_shared, shared, strict=False):
            own[k] = x
        own += shared[len(self.moving_shared) :][: len(self.captured)]
        again = self.modes.outside_of_batchings() if self.is_again else nullcontext()
        check = self.verification
        watched = check.watching(i) if check else nullcontext()
        with again, without_cached_weights() as weights, watched as seen:
            hooks = RemovableHandle.next_id, hook_count()
            outs, carry = self._called(i, pieces, own)
            check_cached(self.asked, self.start, weights)
            if not self.is_again:
                self.hooked |= self._sets_hooks(*hooks)
        if check is not None and self.is_again:
            inputs = [*xs, *shared] if self.compares_leaves else None
            check.compare(i, outs, seen, inputs, self.batches)
        elif check is not None:
            check.keep(i, outs, seen, self.batches)
        self.carry = [untracked(x) for x in carry]
        if self.is_again:
            self._check_end(i + 1)
        if self.is_again and i + 1 < self.count:
            self.drawn = self.start.streams.again()
        return outs, []

    def _sets_hooks(self, first: int, before: int) -> bool:
        """Whether f set hooks on gradients, of those with numbers from `first` on."""
        count = hook_count() - before
        if not count:
            return False
        held = [module for module, _ in self.start.reached.modules.values()]
        keys = [key for m in held for key in upstream.forward_hook_numbers(m)]
        return count != sum(key >= first for key in keys)

    def _called(self, i: int, pieces: list[Any], own: list[Any]) -> tuple[list[Any], list[Any]]:
        """f at one chunk, under vmap once for each of `batches`."""
        if not self.batches:
            return self._on(i, pieces, own, self.carry)
        flat = [*pieces, *own, *self.carry]
        there = [isinstance(x, Tensor) for x in flat]
        axes = [0 if self.beneath or k in self.moving[i] else None for k in range(len(pieces))]
        moving = {*self.moving_shared, *range(len(own) - len(self.captured), len(own))}
        axes += [0 if self.beneath or k in moving else None for k in range(len(own))]
        axes += [0 if self.beneath or i > 0 else None for _ in self.carry]
        counts: list[int] = []

        def one(*xs: Tensor) -> tuple[Tensor, ...]:
            left = iter(xs)
            full = [next(left) if t else x for x, t in zip(flat, there, strict=True)]
            parts = _cut_up(full, [len(pieces), len(own)])
            outs, carry = self._on(i, *parts)
            counts[:] = [len(outs)]
            return (*outs, *carry)

        fun: Callable[..., Any] = one
        in_dims = tuple([axis for axis, t in zip(axes, there, strict=True) if t])
        for _, randomness in reversed(self.batches):
            fun = torch.vmap(fun, in_dims, randomness=randomness)
        found = list(fun(*(x for x, t in zip(flat, there, strict=True) if t)))
        return found[: counts[0]], found[counts[0] :]

    def _on(self, i: int, pieces: Any, own: Any, carry: Any) -> tuple[list[Any], list[Any]]:
        """f at one chunk. own: What is shared, then what stands for what f captured."""
        if not self.captured:
            return self.chunks.call(i, i, pieces, own, carry)
        count = len(self.chunks.shared)
        with Substituted(self.captured, own[count:]) as substituted:
            outs, carry = self.chunks.call(i, i, pieces, own[:count], carry)
            return substituted.within(outs), carry

    def pass_by(self, i: int, xs: Entries, shared: Entries) -> None:
        """f once more, for what it does to streams, buffers and the carry."""
        self.one(i, _aliases(xs), _aliases(shared))

    # --- the first pass

    def evaluate(self, rows: Rows, shared: Entries) -> tuple[Rows, list[Any]]:
        """The first pass. Notes leaves, and keeps the last chunks' graphs."""
        before = self._grads()
        try:
            with torch.set_grad_enabled(self.modes.grad):
                found = self._first_pass(rows, shared)
        except BaseException:
            self.start.restore()
            raise
        self.accumulates = self._grads() != before
        return found, self.carry if self.beneath else []

    def _grads(self) -> list[tuple[int, int]]:
        """Which `.grad` each leaf has, and in which version."""
        grads = [x.grad for x, _ in self.start.reached.watched if x.is_leaf]
        return [(id(g), 0 if g is None else upstream.version_of(g)) for g in grads]

    def _first_pass(self, rows: Rows, shared: Entries) -> Rows:
        grad, budget = self.modes.grad, self.chunks.options.memory_budget
        kept = self._kept()
        given = [x for x in (*flattened(rows), *shared, *self._given()) if not x.is_inference()]
        versions = [upstream.version_of(x) for x in given]
        # What f keeps aside may reach the loss, through a graph that is used for nothing else.
        apart = kept or self.beneath or is_recorded()
        enter = _entered if grad and not apart else _aliases if grad else list
        own, found = enter(shared), []
        leaves: dict[int, Tensor] = {}
        began: list[int] = []
        for i in steps(self.chunks, self.count):
            began.append(upstream.nodes_made())
            if i and i == self.count - kept:
                self._note_end(i)
            xs = enter(rows[i])
            if grad and kept and self.asked == "chunked":
                _refuse_others(self.reading, *xs, *(own if i == 0 else ()))
            measured = i == 0 and kept > 0 and budget is not None
            with bytes_saved(self) if measured else nullcontext([0]) as size:
                outs = self._one_keeping_originals(i, xs, own)
            self._check_modes()
            if measured and budget is not None:
                kept = min(budget // max(size[0], 1), self.count)
            if grad:
                reached = self._find_leaves(i, outs, began, [*xs, *own])
                leaves.update(reached)
                if self.verification is not None:
                    self.verification.leaves[i] = reached
                if i >= self.count - kept:
                    self.retained[i] = (xs, own, outs)
            self.attached.append([isinstance(y, Tensor) and y.requires_grad for y in outs])
            found.append([_cut(y) for y in outs])
            del xs, outs  # and with them the graph, before the next one grows
        if any(map(any, self.attached)) and [upstream.version_of(x) for x in given] != versions:
            raise self._in_place("")
        self._note_leaves(list(leaves.values()))
        self._note_versions()
        self._let_go_of_kept()
        if grad and self.captured:
            self._let_go_of_unused(own[len(self.moving_shared) :])
        self.start = self.start.without_unused_streams()
        self._note_end(self.count)
        if self.verification is not None and not self.start.reached.stands():
            self.verification.held = self.start.watched_now()
        return found

    def _check_modes(self) -> None:
        """Raises if f leaves a mode switched, in which the next chunk would run."""
        grad, device = torch.is_grad_enabled() != self.modes.grad, default_device()
        grad = grad and self.asked != "frozen"  # whose use is one call
        if grad or device != self.modes.device:
            what = "whether gradients are taken" if grad else f"the default device (to {device})"
            how = "torch.no_grad()" if grad else "torch.device(...)"
            raise GradtoolsError(
                f"{self.asked}: f switches {what} and leaves it so. Switch it before the call, or "
                f"inside of f by `with {how}:`."
            )

    def _note_end(self, count: int) -> None:
        """Where streams and buffers stand when so many chunks have run first."""
        if self._verifies and not self.beneath:
            self.ends[count] = self.start.streams.marks(), self.start.reached.contents_versions()

    @property
    def _verifies(self) -> bool:
        return self.chunks.options.verify is not False

    def _check_end(self, count: int) -> None:
        """Raises if they stand elsewhere when so many chunks have run again.

        f then draws more or less than it did, or another thread draws, or calls f's modules.
        """
        if count not in self.ends or self.batches:
            return
        marks, versions = self.ends[count]
        streams = self.start.streams.marks()
        moved = [stream for stream, stands in streams.items() if stands != marks[stream]]
        if moved:
            raise GradtoolsError(
                f"{self.asked}: {moved[0]} stands elsewhere after f was computed again than after "
                "it was computed first. f draws from it only once (what it keeps in a cache, say), "
                "or another thread draws from it meanwhile, whose numbers would come twice: give "
                "that thread a generator of its own."
            )
        now = self.start.reached.contents_versions()
        # What f leaves out when it is computed again, by `is_replaying`, is its own affair.
        off = operator.gt if has_asked() else operator.ne
        moved_too = [k for k, pair in enumerate(zip(now, versions, strict=True)) if off(*pair)]
        if self.compares_bits and moved_too:
            k = moved_too[0]
            name = self.start.name_of(lambda x: x is self.start.reached.owned[k]) or "a buffer"
            raise GradtoolsError(
                f"{self.asked}: {name} is not changed as often when f is computed again as when it "
                "was computed first. f changes it by a way of its own each time, or another "
                "thread calls the same module meanwhile, whose changes would be lost: let one "
                "wait for the other."
            )

    def _let_go_of_kept(self) -> None:
        """Computes again what f keeps a part of: a graph that the loss may reach is used once."""
        if self.retained and not self.start.reached.stands():
            nodes = {n for _, _, outs in self.retained.values() for n in nodes_of(_tensors(outs))}
            held = [x for x, _ in self.start.watched_now() if x.grad_fn is not None]
            if not nodes.isdisjoint(nodes_of(held)):
                self.retained.clear()

    def _let_go_of_unused(self, entered: list[Tensor]) -> None:
        """Of what f captured only what its outputs reach is an input: a loss that is kept is none.

        entered: What stood for it.
        """
        pairs = zip(self.captured, entered, strict=True)
        self.captured = [
            x for x, alias in pairs if is_dual(x) or get_gradient_edge(alias).node in self.begun
        ]
        self.shared[len(self.moving_shared) :] = self.captured
        self.begun.clear()

    def _kept(self) -> int:
        """How many of the last chunks keep their graph."""
        packed = upstream.saved_tensors_hooks_on(False) is not None
        if packed or self.beneath or not self.modes.grad:
            return 0  # what a checkpoint or an offload packs is unpacked once, in its own way
        return self.chunks.options.retain if self.chunks.options.memory_budget is None else 1

    def _one_keeping_originals(self, i: int, xs: Entries, own: Entries) -> list[Any]:
        """One chunk; copies of the pieces that it changes in place stay."""
        fixed = {
            k: x
            for k, x in enumerate(self.pieces[i])
            if isinstance(x, Tensor) and k not in self.moving[i] and not x.is_inference()
        }
        keep = self.modes.grad
        before = {k: (x.clone(), upstream.version_of(x)) for k, x in fixed.items()} if keep else {}
        try:
            with Captures(self) if self.beneath else nullcontext():
                outs, _ = self.one(i, xs, own)
        except RuntimeError as error:
            if "leaf Variable that requires grad" not in torch_says(error):
                raise
            raise self._in_place(f" PyTorch says: {error}") from error
        changed = {
            k: x for k, (x, version) in before.items() if upstream.version_of(fixed[k]) != version
        }
        if changed:
            self.originals[i] = changed
            for k in changed:
                increment_version(self._source(i, k))
        return outs

    def _in_place(self, more: str) -> GradtoolsError:
        return GradtoolsError(
            f"{self.asked}: f changes an argument in place that is differentiated or not split, or "
            f"a parameter, and it cannot be put back. Clone it in f first.{more}"
        )

    def _source(self, i: int, k: int) -> Tensor:
        """The argument that piece k of chunk i is a part of."""
        splits = self.chunks.splits
        return splits[k][0] if k < len(splits) else self.chunks.lists[i][k - len(splits)]

    def _find_leaves(
        self, i: int, outs: Entries, began: list[int], own: list[Tensor]
    ) -> dict[int, Tensor]:
        """The leaves that chunk i's graph reaches; refuses what belongs to another computation.

        began: Autograd's count of nodes when each chunk began.
        own: Where the graph begins.
        """
        leaves: dict[int, Tensor] = {}
        for y in outs:
            if isinstance(y, Tensor) and ((is_wrapped(y) and self.beneath) or is_dual(y)):
                raise captured_error(self, None)
        ends, stop = {id(x) for x in own}, {x.grad_fn for x in own if x.grad_fn is not None}
        nodes = list(nodes_of(_tensors(outs), stop))
        if self.captured:
            self.begun |= {parent for node in nodes for parent, _ in node.next_functions}
            self.begun |= {y.grad_fn for y in _tensors(outs)}
        if self.verification is not None:
            self.verification.kinds[i] = kinds_of(nodes)
        for node in nodes:
            kind: Any = type(node)
            if kind.__name__ == "AccumulateGrad":
                if id(node.variable) not in ends:
                    leaves[id(node.variable)] = node.variable
                continue
            if upstream.sequence_of(node) < began[-1] and not _is_cast_of_leaf(node):
                of_pass = upstream.sequence_of(node) >= began[0]
                raise edge_error(self, i, node) if of_pass else captured_error(self, node)
            if issubclass(kind, BackwardCFunction):
                if upstream.is_once_differentiable(kind):
                    self.once = kind.__name__.removesuffix("Backward")
                self.edit = reverse_only_at(node) or self.edit
                self.functions.add(upstream.forward_class(kind))
        return leaves

    def _note_leaves(self, found: list[Tensor]) -> None:
        if not self.beneath:
            self.leaves = found
            return
        known = {id(x) for x in self.leaves}
        for leaf in found:
            if id(leaf) not in known:
                raise captured_error(self, leaf)

    def _note_versions(self) -> None:
        """What the backward pass reads must be then what it is now."""
        if not any(map(any, self.attached)):
            return
        moved = self.start.changed(parameters=True)
        if moved:
            carry = ", or pass it in an argument that carry_argnums names"
            raise GradtoolsError(
                f"{self.asked}: f changes {moved[0]} in place, which it captured, and it cannot be "
                "put back for the backward pass, being a parameter (which an embedding with "
                "max_norm changes, too), or large and outside of modules. Change it outside of f, "
                f"or make it a buffer of a module{carry if self.asked == 'chunked' else ''}."
            )
        given = self._given()
        for x in (*(x for x, _ in self.chunks.splits), *flattened(self.chunks.lists), *given):
            if isinstance(x, Tensor) and not (x.requires_grad or x.is_inference()):
                self.versions.append((x, upstream.version_of(x), "an argument"))
        split = [x for x, _ in self.chunks.splits if getattr(x, "requires_grad", False)]
        own = [] if self.beneath else [*self.shared, *given, *split]  # other rows are views by now
        found = (*self._reached(), *(x for x in own if isinstance(x, Tensor) and x.is_leaf))
        plain = [x for x in found if type(x) in (Tensor, torch.nn.Parameter) and not is_wrapped(x)]
        self.storages = [(x, x.untyped_storage()) for x in plain if x.layout is torch.strided]

    def _reached(self) -> list[Tensor]:
        """The leaves that f reaches by itself, differentiated or not."""
        return self.leaves

    # --- and again

    def check_storages(self) -> None:
        """Raises if leaves have other entries by `.data`, of which no version tells."""
        moved = [x for x, storage in self.storages if x.untyped_storage() is not storage]
        if moved:
            kind = "a parameter" if any(x is moved[0] for x in self._reached()) else "an argument"
            name = self.start.name_of(lambda x: x is moved[0]) or kind
            raise GradtoolsError(
                f"{self.asked}: the data of {name} was replaced after the forward pass (by .data, "
                "vector_to_parameters, module.to or module.float), and the backward pass needs it "
                "as it was. Do it after the backward pass."
            )

    @contextmanager
    def replaying(self) -> Iterator[None]:
        """Inside, f runs from where it began; outside, everything is as it stands now."""
        self.check_storages()
        changed = [name for x, version, name in self.versions if upstream.version_of(x) != version]
        changed += self.start.changed(parameters=not self.saves_parameters)
        if changed:
            raise GradtoolsError(
                f"{self.asked}: {changed[0]} was changed in place after the forward pass, and the "
                "backward pass needs it as it was. Clone it before you change it."
            )
        with REPLAYS:
            outer = is_replaying(), self.is_again, self.carry, self.drawn
            before = self.standing if self.is_again else None
            self.standing = self.start.now()
            # Where f goes backward itself, what it adds was added before. Elsewhere .grad is left
            # alone: another thread's backward pass may add to it meanwhile.
            watched = self.start.reached.watched if self.accumulates else []
            grads = [(x, x.grad) for x, _ in watched if x.is_leaf]
            try:
                for x, grad in grads:
                    if grad is not None:
                        x.grad = None
                if self.standing is not self.start:
                    self.start.restore()
                self.carry, self.drawn, self.is_again = self.first_carry, None, True
                set_replaying(True)
                yield
            finally:
                set_replaying(outer[0])
                _, self.is_again, self.carry, self.drawn = outer
                self.standing.restore()
                self.standing = before or self.standing
                for x, grad in grads:
                    if x.grad is not grad:
                        x.grad = grad
        if self.verification is not None:
            self.verification.done()

    @contextmanager
    def going_back(self, again: bool = False) -> Iterator[None]:
        """Inside, a chunk that was computed again is differentiated.

        What hooks on gradients do then stays. again: For a second derivative; they did it before.
        """
        if again or not (self.is_again and self.hooked):
            reached = self.start.reached
            before = reached.contents_versions() if self.compares_bits else []
            yield
            if before and reached.contents_versions() != before and self._verifies:
                raise GradtoolsError(
                    f"{self.asked}: a module's buffers change in the backward pass of a chunk: "
                    "torch.utils.checkpoint inside of f computes it once more, and by itself would "
                    "count twice. Use gradtools' checkpoint in its place, which counts once; so "
                    "does verify=False here."
                )
            return
        state = self.start.now()
        self.standing.restore()
        set_replaying(False)
        try:
            yield
        finally:
            set_replaying(True)
            self.standing = self.start.now()
            state.restore()

    def without_hooks(self) -> AbstractContextManager[None]:
        """The leaves' hooks fire once, on the sum, and not for each chunk."""
        return self._without_hooks() if self.leaves else nullcontext()

    @contextmanager
    def _without_hooks(self) -> Iterator[None]:
        with REPLAYS:
            held = [hooks for x in self.leaves if (hooks := upstream.tensor_hooks(x))]
            kept = [dict(hooks) for hooks in held]
            try:
                for hooks in held:
                    hooks.clear()
                yield
            finally:
                for hooks, those in zip(held, kept, strict=True):
                    hooks.update(those)


def _is_cast_of_leaf(node: Any) -> bool:
    """Whether a node is a weight in another dtype, which autocast keeps: it may be of any call."""
    parents = [parent for parent, _ in node.next_functions]
    leaf = len(parents) == 1 and type(parents[0]).__name__ == "AccumulateGrad"
    return leaf and type(node).__name__ == "ToCopyBackward0"


class _Derived(Program):
    """A program made of another, which it evaluates with a graph, chunk by chunk.

    Its inputs are the other's, followed by vectors: those for which `there` says so.
    """

    transposes = False  # whether it differentiates the other's pullback along its cotangents

    def __init__(
        self,
        of: Program,
        widths: list[int],
        shared_width: int,
        there: list[list[bool]],
        joint: Joint | None = None,
    ) -> None:
        self.of, self.leaves, self.joint = of, of.leaves, joint
        self.widths, self.shared_width, self.there = widths, shared_width, there
        # One entry for each batch of vmap, the outermost first: whether the vectors alone have
        # it. The other program then runs as it ran before, and a graph serves many vectors.
        self.vectors_only: tuple[bool, ...] = ()
        self.sums: Sums | None = None  # while it is evaluated, chunk after chunk

    @property
    def forward(self) -> Forward:
        return self.of.forward

    def batched(self, size: int, on: list[list[bool]], randomness: str, whole: bool) -> Any:
        found, widths = copy.copy(self), [*self.widths, self.shared_width]
        own = [row[:k] for row, k in zip(on, widths, strict=True)]
        alone = not whole and not any(map(any, own))
        found.vectors_only = (alone, *self.vectors_only)
        wanted = own
        if not alone:
            found.of, wanted = self.of.batched(size, own, randomness, True)
        vectors = zip(wanted, on, widths, strict=True)
        return found, [[*row, *(True for _ in full[k:])] for row, full, k in vectors]

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
        found, sums = fun(*(ct for ct in cts if ct is not None))
        return spread([*found, *sums], counts)

    def explained(self) -> AbstractContextManager[None]:
        """PyTorch's errors in our words; frozen reads them, to go another way."""
        asked = self.forward.asked
        return explained(asked) if asked != "frozen" else nullcontext()

    def needs(self, i: int) -> bool:
        """Whether anything is asked of chunk i."""
        return True

    def split(self, i: int, xs: Entries, shared: Entries) -> tuple[Any, Any, list[Any], list[Any]]:
        """The inputs of the other program at chunk i, then the vectors, None where not there."""
        k, m = self.widths[i], self.shared_width
        return xs[:k], shared[:m], spread(xs[k:], self.there[i]), spread(shared[m:], self.there[-1])

    def pass_by(self, i: int, xs: Entries, shared: Entries) -> None:
        self.of.pass_by(i, *self.split(i, xs, shared)[:2])

    def from_retained(self, rows: Rows, shared: Entries, found: Rows, sums: Sums) -> set[int]:
        """Which chunks were had from graphs that were kept."""
        return set()

    def evaluate(self, rows: Rows, shared: Entries) -> tuple[Rows, list[Any]]:
        count, sums = len(rows), self._begun()
        rows, shared = [[_primal(x) for x in xs] for xs in rows], [_primal(x) for x in shared]
        found: Rows = [self.nothing(i) for i in range(count)]
        self.forward.check_storages()
        with self.forward.without_hooks(), torch.no_grad():
            had = self.from_retained(rows, shared, found, sums)
            again = [i for i in range(count) if self.needs(i) and i not in had]
            if again:
                self.sums = None if self.forward.beneath else sums
                with self._summing(), self.forward.replaying():
                    for i in steps(self.forward.chunks, again[-1] + 1):
                        if i in again:
                            self._add(found, sums, i, rows[i], shared)
                        else:
                            self.pass_by(i, rows[i], shared)
        return found, sums.total or self.nothing_summed()

    def _begun(self) -> Sums:
        """What earlier nodes of this backward pass gave for the leaves; nobody else holds it."""
        sums = Sums()
        handed = self.joint.handed(self.leaves) if self.joint is not None else []
        if any(x is not None for x in handed):
            sums.add([*[None] * self.shared_width, *handed])
        return sums

    @contextmanager
    def _summing(self) -> Iterator[None]:
        try:
            yield
        finally:
            self.sums = None

    def _add(self, found: Rows, sums: Sums, i: int, xs: Entries, shared: Entries) -> None:
        found[i], terms = self.one(i, xs, shared)
        sums.add(terms)

    def nothing(self, i: int) -> list[Any]:
        """The outputs of a chunk of which nothing is asked."""
        raise NotImplementedError

    def nothing_summed(self) -> list[Any]:
        """The sums of no chunk."""
        raise NotImplementedError

    def _within(self, i: int, xs: Entries, shared: Entries) -> tuple[list[Any], Any, Any]:
        """The other program's inputs, outputs and sums, with a graph between them."""
        create = torch.is_grad_enabled()
        a, b = (_views(xs), _views(shared)) if create else (_aliases(xs), _aliases(shared))
        # A pullback that is transposed gates what runs in it by itself.
        twice = create or (self.transposes and not isinstance(self.of, _Derived))
        gates = gated_calls(self.forward.asked, [*a, *b]) if twice else nullcontext()
        with torch.enable_grad(), gates:
            ys, terms = self.of.one(i, a, b)
        if create:
            outs = _tensors((*ys, *terms))
            refuse_lost(self.forward.asked, outs)
            gate_compiled(self.forward.asked, outs, [*a, *b])
        return [*a, *b, *self.leaves], ys, terms


class Backward(_Derived):
    """The pullback: of cotangents, to cotangents of each chunk's inputs; the others are summed."""

    def needs(self, i: int) -> bool:
        """Whether a cotangent comes in, at the chunk or at what is summed."""
        return any(self.there[i]) or any(self.there[-1])

    def nothing(self, i: int) -> list[Any]:
        """A zero for each input."""
        return [None] * self.widths[i]

    def nothing_summed(self) -> list[Any]:
        """A zero for each shared input and each leaf."""
        return [None] * (self.shared_width + len(self.leaves))

    def one(self, i: int, xs: Entries, shared: Entries) -> tuple[list[Any], list[Any]]:
        """Cotangents of the chunk's inputs, then of what all chunks share."""
        create = torch.is_grad_enabled()
        xs, shared, cts, shared_cts = self.split(i, xs, shared)
        inputs, ys, terms = self._within(i, xs, shared)
        cts += shared_cts if terms else []
        own, outs = len(xs) + len(shared), [*ys, *terms]
        sums = None if create else self.sums
        with self.forward.going_back(create), self.explained():
            grads = self._pulled_adding(sums, outs, inputs, cts, own, create, create)
        return grads[: len(xs)], grads[len(xs) :]

    def _pulled_adding(
        self, sums: Sums | None, outs: Entries, inputs: Entries, cts: Entries, own: int, *how: bool
    ) -> list[Any]:
        """As `pulled`, but what leaves get is added to sums that are there, and None."""
        single = not (self.forward.batches or any(self.vectors_only))
        if not single or sums is None or not sums.has_any:
            return self.pulled(outs, inputs, cts, own, *how)
        with adding_leaves(sums, self.shared_width, self.leaves, outs) as (roots, taken):
            grads = self.pulled(roots, inputs, cts, own, *how)
        for k in taken:
            grads[own + k] = None
        return grads

    def from_retained(self, rows: Rows, shared: Entries, found: Rows, sums: Sums) -> set[int]:
        """All chunks whose graphs were kept, in one pass."""
        retained = self.of.retained if isinstance(self.of, Forward) else {}
        if not retained:
            return set()
        keep = upstream.keeps_graph()
        own = next(iter(retained.values()))[1]
        inputs = [x for xs, _, _ in retained.values() for x in xs]
        outs = [y for _, _, ys in retained.values() for y in ys]
        cts = [ct for i in retained for ct in self.split(i, rows[i], shared)[2]]
        # In one pass, for what they share (a cast weight, a cached parametrization) stands once.
        inputs += own
        forward = self.forward
        reading = forward.reading
        reading[0] = True
        once = nullcontext() if forward.hooked else forward.going_back()
        inputs, width = [*inputs, *self.leaves], len(inputs)
        try:
            with self.explained(), once:
                grads = self._pulled_adding(sums, outs, inputs, cts, width, keep, False)
        finally:
            reading[0] = False
        had, left = set(retained), iter(grads)
        for i in retained:
            found[i] = [next(left) for _ in range(self.widths[i])]
        sums.add(list(left))
        if not keep:
            retained.clear()
        return had


def _refuse_edits(outs: Entries) -> None:
    """An edited cotangent is no linear map, whose transposed would be the pushforward."""
    for node in nodes_of(_tensors(outs)):
        edit = reverse_only_at(node)
        if edit is not None:
            raise GradtoolsError(
                f"chunked: f holds {edit}, which has a reverse rule only, so forward mode cannot "
                "enter it. Use vjp or grad, or for second derivatives "
                "mode='reverse_over_reverse'."
            )


class Pushed(_Derived):
    """The pushforward, as the transpose of the pullback: dual levels do not nest."""

    transposes = True

    def nothing(self, i: int) -> list[Any]:
        """Outputs with no tangent have no place."""
        return []

    def nothing_summed(self) -> list[Any]:
        """As many of sums."""
        return []

    def one(self, i: int, xs: Entries, shared: Entries) -> tuple[list[Any], list[Any]]:
        """Tangents of the chunk's outputs and of its terms."""
        create = torch.is_grad_enabled()
        xs, shared, dxs, dshared = self.split(i, xs, shared)
        inputs, ys, terms = self._within(i, xs, shared)
        outs = [*ys, *terms]
        _refuse_edits(outs)
        with torch.enable_grad():
            dummies = [_dummy(y) for y in outs]
            pulled = pulled_back(outs, inputs, dummies, True, True)
        there = [d is not None for d in dummies]
        wanted = [d for d in dummies if d is not None]
        pushed = self.pulled(pulled, wanted, [*dxs, *dshared], len(wanted), create, create)
        pushed = spread(pushed, there)
        return pushed[: len(ys)], pushed[len(ys) :]


def pulled_back(
    outs: Entries, inputs: Entries, cts: Entries, keep: bool, create: bool
) -> list[Any]:
    """Cotangents of outs to cotangents of inputs, where there is a way."""
    pairs = [
        (y, ct)
        for y, ct in zip(outs, cts, strict=True)
        if ct is not None and isinstance(y, Tensor) and y.requires_grad
    ]
    asked = [isinstance(x, Tensor) and x.requires_grad for x in inputs]
    if not pairs or not any(asked):
        return [None] * len(inputs)
    with rightly(wrong_nodes([y for y, _ in pairs])):
        grads = torch.autograd.grad(
            [y for y, _ in pairs],
            [x for x, a in zip(inputs, asked, strict=True) if a],
            [ct for _, ct in pairs],
            retain_graph=keep,
            create_graph=create,
            allow_unused=True,
        )
    if create:
        grads = guarded_gradients("chunked or frozen", [y for y, _ in pairs], grads)
    return spread(grads, asked)


def _dummy(y: Any) -> Tensor | None:
    tracked = isinstance(y, Tensor) and y.requires_grad
    return torch.zeros_like(y, requires_grad=True) if tracked else None


# --- a program as one node of autograd's graph --------------------------------------------


def node_of(
    program: Program, rows: Rows, shared: Entries, known: tuple[Rows, list[Any]] | None = None
) -> tuple[Rows, list[Any]]:
    """The outputs and sums of a program, differentiable with respect to its inputs and leaves.

    known: The outputs and sums, if they were evaluated already. Beneath functorch they cannot
    be, since there the evaluation stands under the transforms' levels.
    """
    inputs = [*flattened(rows), *shared, *program.leaves]
    shape: list[Any] = []
    eager = False
    outs = [] if known is None else _chosen(program, known, shape, True)
    if known is not None:
        tracked = torch.is_grad_enabled() and any(x.requires_grad for x in inputs)
        dual = upstream.forward_level() >= 0 and any(map(is_dual, inputs))
        if not outs or not (tracked or dual):
            return known
        eager = not dual and not is_compiling()
    maps = _Maps(program, [len(xs) for xs in rows], len(shared), shape)
    if eager:
        results = list(_Node.apply(maps, outs, *inputs))
    else:
        results = apply_rule(_rule(maps, known and outs), *inputs)
    counts, there = shape
    flat = spread(results, there)
    if known is not None:
        everything = [*flattened(known[0]), *known[1]]
        flat = [y if t else e for y, t, e in zip(flat, there, everything, strict=True)]
    parts = _cut_up(flat, counts)
    return parts[:-1], parts[-1]


def _chosen(program: Program, found: Any, shape: list[Any], known: bool) -> list[Tensor]:
    """The outputs and sums that are the node's outputs; shape tells afterwards which."""
    outs = [
        (y, isinstance(y, Tensor) and (not known or program.attaches(i, k)))
        for i, ys in enumerate([*found[0], found[1]])
        for k, y in enumerate(ys)
    ]
    shape[:] = [[len(ys) for ys in found[0]], [there for _, there in outs]]
    return [y for y, there in outs if there]


@dataclass(frozen=True)
class _Maps:
    """The two linear maps of a program on its inputs, rows of `widths` and `width` shared."""

    program: Program
    widths: list[int]
    width: int
    shape: list[Any]  # as `_chosen` says it

    def cotangent(self, saved: Entries, cts: Entries, joint: Joint | None = None) -> list[Any]:
        """One for each input and leaf."""
        counts, there = self.shape
        full = spread(cts, there)
        if self.program is self.program.forward:  # its sums are carries
            full = full[: sum(counts)]
        found = self._vectors(saved, full, counts)
        with marked(self.program.forward.asked):
            return self.program.pull(self.widths, self.width, found[2], *found[:2], joint)

    def tangent(self, saved: Entries, dxs: Entries) -> list[Any]:
        """One for each output."""
        found = self._vectors(saved, dxs, self.widths)
        with marked(self.program.forward.asked):
            pushed = self.program.push(self.widths, self.width, found[2], *found[:2])
        there = self.shape[1]
        pushed += [None] * (len(there) - len(pushed))  # of carries
        return [dy for dy, t in zip(pushed, there, strict=True) if t]

    def _vectors(self, saved: Entries, given: Entries, counts: list[int]) -> tuple[Any, Any, Any]:
        parts, vs = _cut_up(saved, self.widths), _cut_up(given, counts)
        there = [[v is not None for v in row] for row in vs]
        both = [
            [*xs, *(v for v in row if v is not None)]
            for xs, row in zip([*parts[:-1], parts[-1][: self.width]], vs, strict=True)
        ]
        return both[:-1], both[-1], there


class _Node(torch.autograd.Function):
    """A program where the engine alone differentiates: no transform, and no dual number yet.

    A rule's node is for those as well, and takes longer than a small network.
    """

    recorded_as = "chunked"

    @staticmethod
    def forward(ctx: Any, maps: _Maps, outs: list[Tensor], *inputs: Tensor) -> Any:
        ctx.maps = maps
        join(ctx, maps.program.leaves)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*inputs)
        ctx.mark_non_differentiable(*[y for y in outs if not is_inexact(y)])
        return tuple([y.view_as(y) if any(y is x for x in inputs) else y for y in outs])

    @staticmethod
    def backward(ctx: Any, *cts: Tensor | None) -> Any:
        there, joint = [None if ct is None else alive(ct) for ct in cts], joint_of(ctx)
        with upstream.EnableTorchFunction():  # which backward() of a subclass switches off
            found = ctx.maps.cotangent(_unchanged(ctx), there, joint)
        if joint is not None:
            own = len(found) - len(ctx.leaves)
            found[own:] = joint.handed_on(ctx.leaves, found[own:])
        return None, None, *found


def _unchanged(ctx: Any) -> Any:
    """What was saved; autograd tells of a tensor that was changed since, in words of its own."""
    try:
        return ctx.saved_tensors
    except RuntimeError as error:
        if "modified" not in torch_says(error):
            raise
        asked = ctx.maps.program.forward.asked
        raise GradtoolsError(
            f"{asked}: an argument or a parameter was changed in place after the forward pass, and "
            "the backward pass needs it as it was. Clone it before you change it."
        ) from error


def _rule(maps: _Maps, known: list[Tensor] | None = None) -> Rule:
    """A program as a rule on its inputs and leaves."""
    program, widths, width, shape = maps.program, maps.widths, maps.width, maps.shape

    def primal(*xs: Tensor) -> list[Tensor]:
        ys = known
        if ys is None:
            parts = _cut_up(xs, widths)
            found = program.evaluate(parts[:-1], parts[-1][:width])
            ys = _chosen(program, found, shape, False)
        return [y.view_as(y) if any(y is x for x in xs) else y for y in ys]  # an input is saved

    def mapped(size: int, axes: Any, xs: Entries, randomness: str) -> Any:
        count = sum(widths) + width
        on = _cut_up([d is not None for d in axes[:count]], widths)
        found, wanted = program.batched(size, on, randomness, False)
        front = [
            x if not w else x.expand(size, *x.shape) if d is None else x.movedim(d, 0)
            for x, d, w in zip(xs[:count], axes[:count], flattened(wanted), strict=True)
        ]

        def axes_of(out: Entries) -> tuple[int | None, ...]:
            batched = [True] * len(shape[1])
            if isinstance(found, Backward) and not found.vectors_only[0]:
                # the sums of leaves are sums over the batch, too
                batched[len(batched) - len(found.leaves) :] = [False] * len(found.leaves)
            pairs = zip(batched, shape[1], strict=True)
            return tuple([0 if b else None for b, there in pairs if there])

        batch = _rule(_Maps(found, widths, width, shape))
        return batch, [*front, *xs[count:]], axes_of

    asked = program.forward.asked
    return Rule(asked, primal, maps.tangent, maps.cotangent, captures=False, mapped=mapped)


def outputs_of(program: _Derived, rows: Rows, shared: Entries) -> list[Any]:
    """What a program derived from another gives, differentiable where that is asked."""
    known = None
    if upstream.peek_interpreter_stack() is None:
        known = program.evaluate(rows, shared)
    rows, sums = node_of(program, rows, shared, known)
    return [*flattened(rows), *sums]


def flattened(rows: Sequence[Sequence[Any]]) -> list[Any]:
    """The entries of all rows."""
    return [x for row in rows for x in row]


def _cut_up(flat: Entries, widths: Sequence[int]) -> Rows:
    """Rows of these widths, then a row of what is left."""
    left = iter(flat)
    rows = [[next(left) for _ in range(width)] for width in widths]
    return [*rows, list(left)]


# --- tensors -----------------------------------------------------------------------------


def _tensors(xs: Entries) -> list[Tensor]:
    return [x for x in xs if isinstance(x, Tensor)]


def _primal(x: Any) -> Any:
    return forward_ad.unpack_dual(x).primal if is_dual(x) else x


def untracked(x: Any) -> Any:
    """The same numbers, in no graph."""
    return detached(x, CHUNK) if isinstance(x, Tensor) else x


def _cut(y: Any) -> Any:
    return detached(y, CHUNK) if isinstance(y, Tensor) and y.requires_grad else y


def _aliases(xs: Entries) -> list[Any]:
    """The same numbers as leaves of a graph of their own."""
    return [alias_of(x) for x in xs]


def alias_of(x: Tensor) -> Tensor:
    """The same numbers as a leaf of a graph of its own; integers as they are."""
    if not is_inexact(x):
        return x
    if not (torch.is_inference_mode_enabled() or x.is_inference()):
        return detached(_primal(x), CHUNK).requires_grad_()
    with torch.inference_mode(False):
        x = x.clone() if x.is_inference() else detached(_primal(x), CHUNK)
        return x.requires_grad_()


def _entered(xs: Entries) -> list[Any]:
    """The same numbers, in the graph that they are in, or as leaves of a graph of their own."""
    plain = lambda x: x.requires_grad and x.layout is torch.strided and not is_dual(x)
    return [x[...] if plain(x) else alias_of(x) for x in xs]  # view_as has other strides


def _refuse_others(reading: list[bool], *xs: Any) -> None:
    """Has whoever else differentiates a graph that begins at xs be told that it ends there."""

    def refuse(ct: Tensor) -> None:
        if not reading[0]:
            raise GradtoolsError(
                "chunked: what f kept aside (in an attribute, a list, a hook) is differentiated, "
                "and of its gradient the part of an argument would be lost. Return it from f, "
                "detach it, or use retain=0."
            )

    for x in xs:
        if isinstance(x, Tensor) and x.requires_grad:
            register_own_hook(x, refuse)


def _views(xs: Entries) -> list[Any]:
    """The same numbers, in the graph that they are in, under names of their own."""
    return [x[...] if x.requires_grad else alias_of(x) for x in xs]


def pieces_of(chunks: Chunks) -> list[list[Any]]:
    """Each chunk's part of every array that is split, then its part of lists."""
    columns = [_parts(chunks, x, axis) for x, axis in chunks.splits]
    return [
        [*(column[i] for column in columns), *map(_apart, chunks.lists[i])]
        for i in range(chunks.cut.count)
    ]


def _apart(x: Any) -> Any:
    """The same memory, whose changes are counted apart: a graph of another piece is untouched."""
    plain = isinstance(x, Tensor) and not (x.requires_grad or x.is_inference() or is_wrapped(x))
    return data_of(x, CHUNK) if plain and not is_dual(x) else x


def _parts(chunks: Chunks, x: Tensor, axis: int) -> Sequence[Tensor]:
    if x.layout is not torch.strided or x.is_nested:
        raise GradtoolsError(
            f"{chunks.batch.asked}: an argument that is split is a {_layout(x)} tensor, which has "
            "no axis to cut on. Give its dense form, or share it (None in in_axes)."
        )
    cut, tracked = chunks.cut, x.requires_grad or is_wrapped(x)
    if tracked and cut.interleaved:  # one node for all, whose backward pass is one scatter
        x = x.index_select(axis, torch.tensor(flattened(cut.rows), device=x.device))
    if tracked:
        return x.split(cut.sizes, axis)
    before = (slice(None),) * axis
    return [_apart(x[*before, rows.start : rows.stop : rows.step]) for rows in cut.rows]


def _layout(x: Tensor) -> str:
    return "nested" if x.is_nested else f"sparse ({str(x.layout).removeprefix('torch.')})"
