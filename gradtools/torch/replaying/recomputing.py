"""The inputs and the state with which chunks are recomputed, and what is refused.

First the flags of a thread, by which other code knows what runs; then each chunk's part of every
argument, and tensors as leaves of a chunk's own graph; then the contexts that restore the first
pass's state for a recomputation, and the current state after it; then the checks of modules and of
captured tensors, whose state cannot be restored.
"""

from __future__ import annotations

import operator
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import chain
from types import MethodType
from typing import TYPE_CHECKING, Any

import torch
import torch.autograd.forward_ad as forward_ad
from torch.autograd.graph import increment_version
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.nn.utils.parametrize import ParametrizationList

from gradtools.arguments.chunks import Chunks, progress_bar, warn_of_batch_norm
from gradtools.errors import GradtoolsError
from gradtools.torch import _upstream as upstream
from gradtools.torch.compiling import left_to_python
from gradtools.torch.functorch_wrappers import is_dual, is_inexact, is_wrapped
from gradtools.torch.operation_marks import CHUNK, OWN_HOOKS, data_of, detached
from gradtools.torch.patches import Reads
from gradtools.torch.snapshots import Snapshot, is_other, put_back

if TYPE_CHECKING:
    from gradtools.torch.replaying.replay import Forward

Tensor = torch.Tensor
Entries = Sequence[Any]  # tensors, or None
Rows = list[list[Any]]  # one for each chunk
left_to_python(__name__)

REPLAYS = threading.RLock()  # recomputations set process-wide state: generators, leaves' hooks


class _ThreadState(threading.local):
    """Thread-local flags, with class attributes as defaults, which are read fastest."""

    replaying = False  # whether the thread recomputes a chunk
    was_queried = False  # whether user code called `is_recomputing` in this recomputation


thread_state = _ThreadState()
is_recomputing: Callable[[], bool] = partial(getattr, thread_state, "replaying")
was_queried: Callable[[], bool] = partial(getattr, thread_state, "was_queried")


def steps(count: int, progress: bool) -> Iterator[int]:
    """The numbers of chunks; with a progress bar if `progress` and if there are several."""
    if not progress or count <= 1:
        yield from range(count)
        return
    with progress_bar(count) as bar:
        for i in range(count):
            yield i
            bar.update()


# --- a chunk's part of the arguments, as leaves of its own graph --------------------------------


def flattened(rows: Sequence[Sequence[Any]]) -> list[Any]:
    return [*chain.from_iterable(rows)]


def pieces_of(chunks: Chunks, own_versions: bool = True) -> list[list[Any]]:
    """Each chunk's part of every array that is split, then its part of lists.

    own_versions: Whether the pieces have version counters of their own, so that in-place changes
        of one do not invalidate the graphs of others, if several live at a time.
    """

    def one(x: Any) -> Any:
        if not own_versions or upstream.is_exporting():  # which does not trace `.data`
            return x
        plain = isinstance(x, Tensor) and not (x.requires_grad or x.is_inference() or is_wrapped(x))
        return data_of(x, CHUNK) if plain and not is_dual(x) else x

    columns = [_parts(chunks, x, axis, one) for x, axis in chunks.splits]
    return [
        [*(column[i] for column in columns), *map(one, chunks.lists[i])]
        for i in range(chunks.cut.count)
    ]


def _parts(chunks: Chunks, x: Tensor, axis: int, one: Callable[[Any], Any]) -> Sequence[Tensor]:
    if x.layout is not torch.strided or x.is_nested:
        kind = "nested" if x.is_nested else f"sparse ({str(x.layout).removeprefix('torch.')})"
        raise GradtoolsError(
            f"{chunks.caller}: an argument that is split is a {kind} tensor, which has "
            "no axis to cut on. Give its dense form, or share it (None in in_axes)."
        )
    cut, tracked = chunks.cut, x.requires_grad or is_wrapped(x)
    if tracked and cut.interleaved:  # one node for all, whose backward pass is one scatter
        x = x.index_select(axis, torch.tensor(flattened(cut.rows), device=x.device))
    if tracked:
        return x.split(cut.sizes, axis)
    before = (slice(None),) * axis
    return [one(x[*before, rows.start : rows.stop : rows.step]) for rows in cut.rows]


class Originals:
    """Copies of the pieces that f changes in place, from which they are recomputed.

    moving: For each chunk, which of its pieces are inputs of the node, of which f has aliases.
    recomputes: Whether chunks are recomputed; without it nothing is kept.
    """

    def __init__(
        self, chunks: Chunks, pieces: Rows, moving: list[list[int]], recomputes: bool
    ) -> None:
        self._chunks, self._pieces, self._moving = chunks, pieces if recomputes else [], moving
        self._copies: dict[int, dict[int, Tensor]] = {}
        count = len(chunks.splits)  # pieces of lists are arguments of their own
        every = [(i, k) for i, row in enumerate(self._pieces) for k in range(len(row))]
        fixed = [(i, k) for i, k in every if k not in moving[i] and (i == 0 or k >= count)]
        self._sources = [x for i, k in fixed if _may_change(x := self._source(i, k))]
        self._versions = [*map(upstream.version_of, self._sources)]

    def __bool__(self) -> bool:
        return bool(self._copies)

    def of(self, i: int) -> dict[int, Tensor]:
        """Fresh copies for chunk i, by the pieces' positions."""
        return {k: x.clone() for k, x in self._copies.get(i, {}).items()}

    @contextmanager
    def noted(self, i: int, checks: bool) -> Iterator[None]:
        """Context in which f runs at chunk i: stores the pieces that it changes in place.

        checks: Whether to raise if f changed one by another name, which changes no version.
        """
        pieces, moving = self._pieces[i] if self._pieces else (), self._moving[i]
        before = [
            (k, x, x.clone(), upstream.version_of(x))
            for k, x in enumerate(pieces)
            if k not in moving and _may_change(x)
        ]
        try:
            yield
        finally:
            for k, x, original, version in before:
                if upstream.version_of(x) != version:
                    self._copies.setdefault(i, {})[k] = original
        changed = self._copies.get(i, {})
        if checks and any(k not in changed and is_other(x, old) for k, x, old, _ in before):
            raise self._written_elsewhere()

    def put_back(self) -> None:
        """Restores the pieces that f changed, after it raised."""
        for i, changed in self._copies.items():
            for k, original in changed.items():
                put_back(self._pieces[i][k], original)

    def settle(self) -> None:
        """Raises if an argument was changed by another name; counts the changes of pieces."""
        if [*map(upstream.version_of, self._sources)] != self._versions:
            raise self._written_elsewhere()
        for i, changed in self._copies.items():
            increment_version([self._source(i, k) for k in changed])

    def _source(self, i: int, k: int) -> Any:
        """The argument of which piece k of chunk i is a slice."""
        splits = self._chunks.splits
        return splits[k][0] if k < len(splits) else self._chunks.lists[i][k - len(splits)]

    def _written_elsewhere(self) -> GradtoolsError:
        return GradtoolsError(
            f"{self._chunks.caller}: f changes in place, by another name, an argument that is "
            "split: a tensor that f closes over, a buffer of its module, or memory shared with "
            "NumPy. The gradient would be taken at the changed numbers. Clone the argument first."
        )


def _may_change(x: Any) -> bool:
    return isinstance(x, Tensor) and not x.is_inference()


def tensors_of(xs: Entries) -> list[Tensor]:
    return [x for x in xs if isinstance(x, Tensor)]


def primal_of(x: Any) -> Any:
    """A dual number's primal; anything else unchanged."""
    return forward_ad.unpack_dual(x).primal if is_dual(x) else x


def untracked(x: Any) -> Any:
    return detached(x, CHUNK) if isinstance(x, Tensor) else x


def is_observed() -> bool:
    """Whether a mode may record a detach, which then needs a mark of its origin."""
    return bool(upstream.count_of_dispatch_modes() or upstream.count_of_function_modes())


def alias_of(x: Tensor) -> Tensor:
    """x as a new leaf that requires grad; integers unchanged."""
    if not is_inexact(x):
        return x
    if not (torch.is_inference_mode_enabled() or x.is_inference()):
        if upstream.forward_level() < 0 and not is_observed():
            return x.detach().requires_grad_()
        return detached(primal_of(x), CHUNK).requires_grad_()
    with torch.inference_mode(False):
        x = x.clone() if x.is_inference() else detached(primal_of(x), CHUNK)
        return x.requires_grad_()


def as_input(x: Tensor) -> Tensor:
    """As `view_of`, but dual and sparse tensors become leaves."""
    return view_of(x) if x.layout is torch.strided and not is_dual(x) else alias_of(x)


def view_of(x: Tensor) -> Tensor:
    """A view of x in its graph if x requires grad, else a new leaf."""
    return x[...] if x.requires_grad else alias_of(x)  # view_as changes strides


# --- the state of the first pass --------------------------------------------------------------


def check_storages(forward: Forward) -> None:
    """Raises if leaves have another storage, as after `.data = ...`, which changes no version."""
    moved = [x for x, storage in forward.storages if x.untyped_storage() is not storage]
    if moved:
        reached = any(x is moved[0] for x in forward.reached_leaves)
        kind = "a parameter" if reached else "an argument"
        name = forward.start.name_of(lambda x: x is moved[0]) or kind
        raise GradtoolsError(
            f"{forward.caller}: the data of {name} was replaced after the forward pass (by .data, "
            "vector_to_parameters, module.to or module.float), and the backward pass needs it "
            "as it was. Do it after the backward pass."
        )


@contextmanager
def first_pass_state(forward: Forward) -> Iterator[None]:
    """Restores the state of the first pass for the block, and the current state after it."""
    check_storages(forward)
    changed = forward.start.changed(parameters=not forward.saves_parameters)
    if any(upstream.version_of(x) != version for x, version in forward.versions):
        changed = ["an argument"]
    if changed:
        raise GradtoolsError(
            f"{forward.caller}: {changed[0]} was changed in place after the forward pass, and the "
            "backward pass needs it as it was. Clone it before you change it."
        )
    with REPLAYS:
        replaying, outer_pass, outer = thread_state.replaying, forward.running, forward.start.now()
        # If f itself calls backward(), it must not accumulate a second time. Otherwise .grad is
        # not touched, since another thread's backward pass may add to it.
        watched = forward.start.reached.watched if forward.accumulates else []
        grads = [(x, x.grad) for x, _ in watched if x.is_leaf] if watched else []
        running = forward.begin(outer)
        try:
            for x, _ in grads:
                x.grad = None
            if outer is not forward.start:
                forward.start.restore()
            thread_state.replaying, thread_state.was_queried = True, False
            yield
        finally:
            thread_state.replaying, forward.running = replaying, outer_pass
            (running.outer or outer).restore()
            for x, grad in grads:
                if x.grad is not grad:
                    x.grad = grad
    if forward.verification is not None:
        forward.verification.done()


@contextmanager
def differentiating(forward: Forward, again: bool = False) -> Iterator[None]:
    """Around the backward pass of a recomputed chunk: the effects of gradient hooks persist.

    again: Whether it is for a second derivative, when the hooks' effects are discarded.
    """
    running = forward.running
    if again or running.outer is None or not forward.hooked:
        reached = forward.start.reached
        before = reached.counted_versions() if forward.compares_bits else []
        yield
        if before and reached.counted_versions() != before and forward.verifies:
            raise GradtoolsError(
                f"{forward.caller}: a module's buffers change in the backward pass of a chunk: "
                "torch.utils.checkpoint inside of f computes it once more, and by itself would "
                "count twice. Use gradtools' checkpoint in its place, which counts once; so "
                "does verify=False here."
            )
        return
    state = forward.start.now()
    running.outer.restore()
    thread_state.replaying = False
    try:
        yield
    finally:
        thread_state.replaying, thread_state.was_queried = True, False
        running.outer = forward.start.now()
        state.restore()


@contextmanager
def without_hooks(leaves: list[torch.Tensor]) -> Iterator[None]:
    """Removes the leaves' hooks for the block, so that they run once on the sum of all chunks."""
    with REPLAYS:
        every = [(x, upstream.tensor_hooks(x)) for x in leaves]
        kept = [(x, hooks, dict(hooks or ())) for x, hooks in every]
        try:
            for _, hooks, _ in kept:
                if hooks:
                    hooks.clear()
            yield
        finally:
            for x, hooks, before in kept:
                if hooks is not None:  # the recomputation sets f's hooks a second time
                    hooks.clear()
                    hooks.update(before)
                elif upstream.tensor_hooks(x) is not None:
                    upstream.set_tensor_hooks(x, None)


def check_end(forward: Forward, count: int) -> None:
    """Raises if generators or buffers differ from the first pass after `count` recomputed chunks.

    f then draws more or fewer numbers, or another thread draws from them, or calls f's modules.
    """
    (versions, expected), (now, streams) = forward.ends[count], forward.end()
    if moved := [stream for stream, state in streams.items() if state != expected[stream]]:
        raise GradtoolsError(
            f"{forward.caller}: {moved[0]} is elsewhere after f was computed again than after "
            "it was computed first. f draws from it only once (what it keeps in a cache, say), "
            "or another thread draws from it meanwhile, whose numbers would come twice: give "
            "that thread a generator of its own."
        )
    # An f that asks `is_recomputing` may skip updates of buffers.
    off, counted = operator.gt if was_queried() else operator.ne, forward.start.reached.counted
    others = [x for x, a, b in zip(counted, now, versions, strict=True) if off(a, b)]
    if forward.compares_bits and others:
        name = forward.start.name_of(lambda x: x is others[0]) or "a buffer"
        raise GradtoolsError(
            f"{forward.caller}: {name} is not changed as often when f is computed again as when "
            "it was computed first. f changes it by a way of its own each time, or another "
            "thread calls the same module meanwhile, whose changes would be lost: let one "
            "wait for the other."
        )


# --- errors ------------------------------------------------------------------------------

_WRAPPERS = "DistributedDataParallel", "FullyShardedDataParallel", "FSDPModule", "DataParallel"


def own_wrapper(module: Any) -> str | None:
    """The class name of a PyTorch wrapper that manages parameters itself (DDP, FSDP, ...)."""
    of_torch = [k.__name__ for k in type(module).__mro__ if k.__module__.startswith("torch.")]
    return next((name for name in of_torch if name in _WRAPPERS), None)


def wrapper_error(caller: str, name: str, kind: str) -> GradtoolsError:
    return GradtoolsError(
        f"{caller}: {name} is a {kind}, which gathers parameters or reduces gradients around each "
        "call, and here a call is computed several times. Wrap the other way round: "
        "DistributedDataParallel around a module whose forward calls "
        f"{caller} on the plain module (such as ddp.module), or fully_shard around a "
        f"module whose forward calls {caller} on its layers or on a method of its own, not on the "
        "sharded module itself. In place of gt.checkpoint, "
        "torch.utils.checkpoint.checkpoint with use_reentrant=False may be inside."
    )


@contextmanager
def without_sharded_calls(caller: str) -> Iterator[None]:
    """Context in which calls of FSDP2 modules raise.

    Inside of the module's own forward its parameters are gathered, and autograd's hooks gather them
    again before the backward pass needs them. A call would gather and free them in each
    recomputation, where FSDP2 does not expect it, and gradients would be lost.
    """
    thread = threading.get_ident()

    def refuse(module: Any, _: Any) -> None:
        if own_wrapper(module) == "FSDPModule" and threading.get_ident() == thread:
            raise wrapper_error(caller, f"{type(module).__name__}, which f calls,", "FSDPModule")

    hook = register_module_forward_pre_hook(refuse)
    OWN_HOOKS[0] += 1
    try:
        yield
    finally:
        hook.remove()


def check_modules(forward: Forward) -> bool:
    """Raises for unsupported modules, and warns of batch norm, which sees each chunk alone.

    Returns:
        Whether f reaches modules of FSDP2, which it may not call.
    """
    caller, f, sharded = forward.caller, forward.chunks.call.f, False
    for module, name in forward.start.reached.modules.values():
        kind = own_wrapper(module)
        if kind is not None:
            sharded = kind == "FSDPModule" and forward.may_reach_sharded
            # register_fsdp_forward_method stores methods in the instance, which gather parameters
            # as the module's forward does.
            if not sharded or any(isinstance(x, MethodType) for x in vars(module).values()):
                raise wrapper_error(caller, name, kind)
        normalises = isinstance(module, upstream.BatchNorm)
        if caller == "chunked" and normalises and module.training:
            warn_of_batch_norm(
                ("torch", getattr(f, "__name__", type(f).__name__)), f"chunked: {name} is"
            )
    return sharded


def check_cached(caller: str, start: Snapshot) -> None:
    """Raises if `parametrize.cached` is active for a parametrization that updates buffers."""
    for module, name in start.reached.modules.values():
        if isinstance(module, ParametrizationList) and [*module.buffers()]:
            raise GradtoolsError(
                f"{caller}: {name} computes a weight by a parametrization with buffers, inside of "
                "parametrize.cached, which computes it once; here it is computed for each chunk, "
                "and its buffers would change each time. Leave parametrize.cached out."
            )


def captures_refused(forward: Forward) -> Reads:
    """Mode that raises if f uses a captured functorch wrapper, whose derivative would be lost."""
    # Under vmap, or transforms within f, there are wrappers that are not captured.
    captured = {id(x) for x, _ in forward.start.reached.watched if is_wrapped(x)}

    def refuse(x: Tensor) -> bool:
        if is_wrapped(x) and (upstream.peek_interpreter_stack() is None or id(x) in captured):
            raise captured_error(forward, x)
        return False

    return Reads(refuse)


def captured_error(forward: Forward, what: Any) -> GradtoolsError:
    """The error of a captured tensor.

    what: The tensor, or the node that made it; None for a functorch wrapper.
    """
    name = forward.start.name_of(
        lambda x: x is what or (x.grad_fn is what if what is not None else is_dual(x))
    )
    shared = ", with None in in_axes" if forward.caller == "chunked" else ""
    return GradtoolsError(
        f"{forward.caller}: f captured {'a tensor' if name is None else name!r} that is computed "
        "from others, or belongs to a transform of torch.func, and is no argument; its derivative "
        f"would be lost or counted twice. Pass it to f as an argument{shared}."
    )


def edge_error(forward: Forward, i: int, node: Any) -> GradtoolsError:
    """The error of a graph edge from chunk i to a node of an earlier chunk."""
    names = [name for x, name in forward.start.watched_now() if x.grad_fn is node]
    name = repr(names[0]) if names else "something"
    return GradtoolsError(
        f"{forward.caller}: chunk {i} goes on from {name} that an earlier chunk computed and kept "
        "attached to its graph, and one chunk's graph is all that there is at a time: a gradient "
        "would be lost. Detach what is kept between calls; compute a function of weights in each "
        "call, or before and pass it as an argument, with None in in_axes."
    )


def parameters_of(start: Snapshot) -> list[Tensor]:
    """The leaves that require grad among the tensors that f can reach."""
    tensors = [x for x in start.reached.tensors if not is_wrapped(x)]
    return [x for x in tensors if x.requires_grad and x.is_leaf]
