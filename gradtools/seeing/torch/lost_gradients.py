"""Locates where a cotangent becomes zero, NaN or vanishing in autograd's graph, at given values.

The gradient is computed once. If it is zero everywhere, it is computed again with hooks on the
nodes of autograd. The loss is at a node that receives a nonzero cotangent and passes only zeros
towards the leaf. Calling that node with a far greater cotangent distinguishes a zero factor from
underflow. If several nonzero cotangents add up to zero, they cancel; the reported call is where
their paths meet.

Rounding noise counts as zero (`seeing/diagnostics/bad_gradients.py`).
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

import numpy as np
import torch

from gradtools.errors import GradtoolsError, LostDerivativeError
from gradtools.seeing.diagnostics import bad_gradients
from gradtools.seeing.graphs.losing_operations import joined
from gradtools.seeing.graphs.nodes import Node
from gradtools.seeing.graphs.recording import Run, Vanished
from gradtools.seeing.torch.recording import operations
from gradtools.seeing.torch.recording.calls import CallRecorder, RecordedCall
from gradtools.seeing.torch.recording.observation import observed, recording_run, run_under
from gradtools.torch import _upstream as upstream
from gradtools.torch.compiling import nodes_of
from gradtools.torch.functorch_wrappers import is_inexact, tensors_in, unwrapped
from gradtools.torch.rerunning import Undo

Tensor = torch.Tensor
Cotangents = Sequence[Tensor | None]
T = TypeVar("T")


def vanishing(
    run: Run, leaves: Sequence[Any], index: int, held: Sequence[Tensor] = ()
) -> list[Vanished] | None:
    """Where the cotangent of a leaf becomes zero, NaN or vanishing; None if its gradient is sound.

    One run serves all leaves and is memoized for the lifetime of the program that `run` belongs to.
    Indices beyond the leaves count on in `held`, the captured tensors that require grad.
    """
    program = getattr(run, "__self__", None)
    if program is None:
        return _of_all(run, leaves, held)[index]
    if program not in _KNOWN:
        _KNOWN[program] = _of_all(run, leaves, held)
    return _KNOWN[program][index]


_KNOWN: weakref.WeakKeyDictionary[Any, list[list[Vanished] | None]] = weakref.WeakKeyDictionary()


def _of_all(run: Run, leaves: Sequence[Any], held: Sequence[Tensor]) -> list[list[Vanished] | None]:
    with observed(run, leaves, [""] * len(leaves)) as seen:
        outs = [y for y in seen.outs if isinstance(y, Tensor) and y.requires_grad]
        xs = [*seen.aliases, *held]
        floating = [k for k, x in enumerate(xs) if isinstance(x, Tensor) and is_inexact(x)]
        result: list[list[Vanished] | None] = [[] for _ in xs]
        if not (outs and floating):
            return result
        grads = _gradients_unless_lost(outs, [xs[k] for k in floating])
        if any(grad is not None and grad.is_meta for grad in grads):
            raise GradtoolsError(
                "why_zero: the gradient is on the meta device, which holds no numbers, so nobody "
                "can tell whether it is zero. Pass arrays that hold numbers, or ask dependence, "
                "which looks at none."
            )
        for k, grad in zip(floating, grads, strict=True):
            # None: a reentrant checkpoint, or lost by custom code, which has its own finding
            if grad is None or _moves(grad) or not grad.numel():
                result[k] = None
        zero = [k for k in floating if result[k] is not None]
        pairs = zip(floating, grads, strict=True)
        moving = {k: grad for k, grad in pairs if grad is not None and result[k] is None}
        noise = _noise(outs, xs, moving)
        sound = {k: grad for k, grad in moving.items() if k not in noise}
        result = _with_extremes(seen.recorder, outs, xs, sound, result)
        bad_output = any(not math.isfinite(_size(y)) for y in outs)
        if lost := sorted([*zero, *noise]):
            wanted = [xs[k] for k in lost]
            passed = _passed(outs, wanted, partial(_NodeCotangents.of, bool(noise)))
            if noise:
                passed = _without_noise(outs, wanted, passed)
            back = _Back.of(outs, passed)
            for k in lost:
                stops = _stops(seen.recorder, back, xs[k])
                result[k] = [replace(v, noise=v.cancelled and k in noise) for v in stops]
    if not bad_output:
        return result
    with recording_run("a run", run, leaves) as undo:
        recorder = _ValueRecorder(undo)
        seen = run_under(recorder, run, leaves, [""] * len(leaves))
        origins = recorder.origins.of(map(seen.output, seen.outs))
    return [bad_gradients.at_origins(places, origins) for places in result]


def _stops(recorder: CallRecorder, back: _Back, leaf: Tensor) -> list[Vanished]:
    """The nodes at which the cotangent of one leaf becomes zero, in program order."""
    leading = back.leading_to(leaf)
    result = _cancelled(recorder, leading, back)
    made = recorder.made
    for node in back.stopping:
        at = back.passed[node]
        path = [k for k, (to, _) in enumerate(node.next_functions) if to in leading]
        if path and not any(at.on[k] for k in path):
            product = _product(node, at.given, path)
            underflow = 0 < product < _least(at.given)
            empty = all(at.empty[k] for k in path)
            noise = any(at.noise[k] for k in path)
            sums = noise or _sums_of_softmax(node, at.given)
            cancelled = sums or product >= _least(at.given)
            vanished = Vanished(
                _named(recorder, node), underflow, tuple(path), cancelled, empty=empty
            )
            result.append((made.get(node, len(made)), vanished))
    return [vanished for _, vanished in sorted(result, key=lambda pair: pair[0])]


def _cancelled(
    recorder: CallRecorder, leading: Mapping[Any, None], back: _Back
) -> list[tuple[int, Vanished]]:
    """The calls, with their positions, at which the paths of cancelling cotangents meet."""
    made, result = recorder.made, []
    for (to, slot), nodes in back.summed.items():
        cancels = to not in back.passed or not back.passed[to].moves[slot]
        if to in leading and cancels:
            flows = [(node.inputs, node.outputs) for node in recorder.nodes]
            at = joined(flows, [made[node] for node in nodes if node in made])
            if at is not None:
                result.append((at, Vanished(recorder.nodes[at], cancelled=True)))
    return result


# --- rounding noise ----------------------------------------------------------------------


def _noise(outs: Sequence[Tensor], xs: Sequence[Any], grads: Mapping[int, Tensor]) -> set[int]:
    """The leaves whose gradients are rounding noise."""
    left = dict(grads)
    for draw in range(bad_gradients.DRAWS):
        if left:
            with _perturbed(outs, draw):
                again = _gradients(outs, [xs[k] for k in left])
            pairs = zip(left.items(), again, strict=True)
            left = {k: grad for (k, grad), other in pairs if _is_noise(grad, other)}
    return set(left)


def _without_noise(
    outs: Sequence[Tensor], leaves: Sequence[Tensor], passed: Mapping[Any, _NodeCotangents]
) -> dict[Any, _NodeCotangents]:
    """The records of the nodes, with rounding noise counted as zero."""

    def note(node: Any, handed: Cotangents, given: Cotangents) -> _NodeCotangents:
        at = passed[node]
        noise = [*map(_is_noise, at.handed, handed)]
        on = [moves and not lost for moves, lost in zip(at.on, noise, strict=True)]
        pairs = zip(at.moves, at.given, given, strict=True)
        moves = [moves and not _is_noise(ct, other) for moves, ct, other in pairs]
        return replace(at, moves=moves, on=on, noise=noise)

    with _perturbed(outs, 0):
        return {**passed, **_passed(outs, leaves, note)}


def _is_noise(ct: Any, other: Any) -> bool:
    """Whether a cotangent differs by its own size from that of a perturbed backward pass."""
    if not (_is_plain(ct) and _is_plain(other)) or ct.is_meta:
        return False
    return bad_gradients.is_noise(_size(ct), _size(other - ct), torch.finfo(ct.dtype).eps)


def _is_plain(ct: Any) -> bool:
    return isinstance(ct, Tensor) and is_inexact(ct) and ct.layout is torch.strided


@contextmanager
def _perturbed(outs: Sequence[Tensor], draw: int) -> Iterator[None]:
    """Inside, each node of autograd is given its cotangents with rounding errors."""
    generator = torch.Generator().manual_seed(draw)

    def one(ct: Any) -> Any:
        if not _is_plain(ct):
            return ct
        info = torch.finfo(ct.dtype)
        uniform = torch.rand(ct.shape, generator=generator, dtype=ct.real.dtype, device="cpu")
        return bad_gradients.shaken(ct, 2 * uniform.to(ct.device) - 1, info.eps)

    shake = lambda given: tuple(map(one, given))
    nodes = [node for node in nodes_of(outs) if node.next_functions]
    handles = [node.register_prehook(shake) for node in nodes]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


# --- NaN and vanishing gradients ---------------------------------------------------------


def _with_extremes(
    recorder: CallRecorder,
    outs: Sequence[Tensor],
    xs: Sequence[Any],
    grads: Mapping[int, Tensor],
    stopped: Sequence[list[Vanished] | None],
) -> list[list[Vanished] | None]:
    """`stopped`, with the places of NaN and vanishing gradients added."""
    output = max(_size(y) for y in outs)
    kinds = {
        k: bad_gradients.extreme(_size(grad), _size(xs[k]), output, torch.finfo(grad.dtype).eps)
        for k, grad in grads.items()
    }
    odd = {k: kind for k, kind in kinds.items() if kind}
    places = list(stopped)
    if not odd:
        return places
    note = lambda _, handed, given: (max(map(_size, given), default=0.0), [*map(_size, handed)])
    sizes = _passed(outs, [xs[k] for k in odd], note)
    back = _Back.of(outs, {})
    made = recorder.made
    for k, kind in odd.items():
        leading = back.leading_to(xs[k])
        handed = []
        for node in sorted(set(sizes) & set(leading), key=lambda node: made.get(node, len(made))):
            given, ons = sizes[node]
            edges = zip(node.next_functions, ons, strict=False)
            on = [size for (to, _), size in edges if to in leading]
            if on:
                handed.append(
                    bad_gradients.CotangentRange(_named(recorder, node), given, float(np.max(on)))
                )
        places[k] = bad_gradients.places(kind, handed)
    return places


class _ValueRecorder(CallRecorder):
    """A recorder that also notes where NaN and infinite values come from."""

    def __init__(self, undo: Undo) -> None:
        super().__init__(undo)
        self.origins = bad_gradients.ValueOrigins()
        self._entered: tuple[RecordedCall, list[Any]] | None = None

    def entering(self, fun: Any, args: Any, kwargs: Any) -> RecordedCall:
        call = super().entering(fun, args, kwargs)
        with self.silent():
            pairs = zip(call.numbers, call.tensors, strict=True)
            numbers = [
                x for x in upstream.pytree.tree_leaves((args, kwargs)) if isinstance(x, float)
            ]
            bad = [number for number, x in pairs if not math.isfinite(_size(x))]
            self._entered = call, bad + [x for x in numbers if not math.isfinite(x)]
        return call

    def write(self, call: RecordedCall, out: Any) -> None:
        count = len(self.nodes)
        super().write(call, out)
        if len(self.nodes) > count and self._entered is not None and self._entered[0] is call:
            results = tensors_in((out, call.tensors))
            outs = [y for y in results if not math.isfinite(_size(unwrapped(y)))]
            made = [n for n in map(self.of, outs) if n in self.nodes[count].outputs]
            self.origins.add(self.nodes[count], self._entered[1], made)


def _size(x: Any) -> float:
    """The greatest modulus of a tensor's entries; NaN if one is NaN."""
    if not isinstance(x, Tensor) or not is_inexact(x) or not x.numel():
        return 0.0
    if x.layout is not torch.strided:
        x = x.coalesce().values() if x.is_sparse else x.values()
    return float(x.detach().abs().max()) if x.numel() else 0.0


@dataclass(frozen=True)
class _Back:
    """Autograd's graph with the cotangents of one backward pass, for all leaves.

    Attributes:
        passed: The record of each node.
        stopping: The nodes at which a nonzero cotangent became zero.
        summed: For each input of a node that sums several nonzero cotangents, their nodes.
        readers: The reversed edges: for each node those that pass cotangents to it.
        ends: The AccumulateGrad node of each leaf, by the leaf's id.
    """

    passed: Mapping[Any, _NodeCotangents]
    stopping: list[Any]
    summed: dict[tuple[Any, int], list[Any]]
    readers: dict[Any, list[Any]]
    ends: dict[int, Any]

    @classmethod
    def of(cls, outs: Sequence[Tensor], passed: Mapping[Any, _NodeCotangents]) -> _Back:
        readers: dict[Any, list[Any]] = {}
        ends: dict[int, Any] = {}
        for node in nodes_of(outs):
            if type(node).__name__ == "AccumulateGrad":
                ends[id(node.variable)] = node
            for to, _ in node.next_functions:
                if to is not None:
                    readers.setdefault(to, []).append(node)
        given: dict[tuple[Any, int], list[Any]] = {}
        for node, at in passed.items():
            for edge, on in zip(node.next_functions, at.on, strict=False):
                if on and edge[0] is not None:
                    given.setdefault(edge, []).append(node)
        stopping = [node for node, at in passed.items() if any(at.moves)]
        summed = {edge: nodes for edge, nodes in given.items() if len(nodes) > 1}
        return cls(passed, stopping, summed, readers, ends)

    def leading_to(self, leaf: Tensor) -> dict[Any, None]:
        """The nodes whose cotangents reach the leaf, including its own AccumulateGrad."""
        result: dict[Any, None] = {}
        todo = [self.ends[id(leaf)]] if id(leaf) in self.ends else []
        while todo:
            node = todo.pop()
            if node not in result:
                result[node] = None
                todo += self.readers.get(node, [])
        return result


@dataclass(frozen=True)
class _NodeCotangents:
    """What a node of autograd was given, which of that and of what it gave on is not zero or empty.

    The cotangents are kept where some of it became zero, or all of them if asked for.
    """

    given: Cotangents
    handed: Cotangents
    moves: list[bool]
    on: list[bool]
    empty: list[bool]
    noise: Sequence[bool]

    @classmethod
    def of(cls, keep: bool, _: Any, handed: Cotangents, given: Cotangents) -> _NodeCotangents:
        on, moves = [_moves(ct) for ct in handed], [_moves(ct) for ct in given]
        kept = given if keep or (any(moves) and not all(on)) else ()
        empty = [isinstance(ct, Tensor) and not ct.numel() for ct in handed]
        return cls(kept, handed if keep else (), moves, on, empty, [False] * len(on))


def _cotangents(outs: Sequence[Tensor]) -> list[Tensor]:
    """Random cotangents from a generator of their own; 1 for a real scalar output."""
    if len(outs) == 1 and outs[0].numel() == 1 and not outs[0].is_complex():
        return [torch.ones_like(outs[0])]
    generator = torch.Generator().manual_seed(0)
    return [
        torch.randn(y.shape, dtype=y.dtype, generator=generator, device="cpu").to(y.device)
        for y in outs
    ]


def _gradients(outs: Sequence[Tensor], leaves: Sequence[Tensor]) -> Sequence[Tensor | None]:
    cts = _cotangents(outs)
    return torch.autograd.grad(outs, leaves, cts, retain_graph=True, allow_unused=True)


def _gradients_unless_lost(
    outs: Sequence[Tensor], leaves: Sequence[Tensor]
) -> Sequence[Tensor | None]:
    """The gradients; None for those of which custom code in f loses a part."""
    try:
        return _gradients(outs, leaves)
    except LostDerivativeError:
        if len(leaves) == 1:
            return [None]
        return [g for leaf in leaves for g in _gradients_unless_lost(outs, [leaf])]


def _passed(
    outs: Sequence[Tensor],
    leaves: Sequence[Tensor],
    note: Callable[[Any, Cotangents, Cotangents], T],
) -> dict[Any, T]:
    """`note(node, handed, given)` of each node of autograd, from the hooks of one backward pass."""
    result: dict[Any, T] = {}

    def hook(node: Any) -> Callable[[Any, Any], None]:
        def noted(handed: Any, given: Any) -> None:
            result[node] = note(node, handed, given)

        return noted

    handles = [node.register_hook(hook(node)) for node in nodes_of(outs) if node.next_functions]
    try:
        _gradients(outs, leaves)
    finally:
        for handle in handles:
            handle.remove()
    return result


def _moves(ct: Any) -> bool:
    if ct is None:
        return False
    if ct.layout is not torch.strided:
        ct = ct.coalesce().values() if ct.is_sparse else ct.values()
    return bool(ct.ne(0).any())


def _named(recorder: CallRecorder, node: Any) -> Node:
    """The recorded node of an autograd node, with the neutral name of the latter."""
    operation = operations.neutral_of_node(node)
    at = recorder.made.get(node)
    if at is None:
        return Node(operation, (), (), type(node).__name__)
    recorded = recorder.nodes[at]
    if recorded.operation == "scale_gradient":
        return replace(recorded, operation="multiply")
    if recorded.mark in ("custom rule", "edited gradient"):
        return replace(recorded, loss="rule")
    return recorded if operation == recorded.operation else replace(recorded, operation=operation)


def _sums_of_softmax(node: Any, given: Cotangents) -> bool:
    """Whether a softmax receives the cotangent of its sum, which is constantly 1.

    Such a cotangent is constant along the axis; for log_softmax it is proportional to the softmax,
    up to rounding.
    """
    name = type(node).__name__
    logarithm = name.startswith("LogSoftmaxBackward")
    if not logarithm and not name.startswith(("SoftmaxBackward", "SafeSoftmaxBackward")):
        return False
    dim = upstream.saved(node, "dim")
    signed = dim - 2**64 if dim >= 2**63 else dim
    for ct in given:
        if ct is not None:
            weights = ct / upstream.saved(node, "result").exp() if logarithm else ct
            high, low = weights.amax(signed), weights.amin(signed)
            slack = 8 * torch.finfo(ct.dtype).eps * high.abs() if logarithm else 0
            if not bool((high - low <= slack).all()):
                return False
    return True


# --- underflow ---------------------------------------------------------------------------


def _product(node: Any, given: Cotangents, path: Sequence[int]) -> float:
    """The size of a node's cotangents along `path`, computed without underflow.

    Zero means that the factor is zero. Below the dtype's least number the product underflows. A
    greater size means that terms cancelled, up to rounding.
    """
    name = type(node).__name__
    if name.startswith(("ExpBackward", "Exp2Backward")):
        return _TOO_SMALL  # no exponential is zero
    if name.startswith("PowBackward0"):
        return _TOO_SMALL if bool(upstream.saved(node, "self").ne(0).any()) else 0.0
    if not callable(node) or not all(ct is None or _is_plain(ct) for ct in given):
        return 0.0
    size = max(map(_size, given), default=0.0)
    with torch.no_grad():
        result = node(*[None if ct is None else _large(ct) for ct in given])
    result = result if isinstance(result, tuple) else (result,)
    scales = [torch.finfo(ct.dtype).max ** 0.5 for ct in given if ct is not None]
    large = max((_size(result[k]) for k in path), default=0.0)
    if not math.isfinite(large):
        return _TOO_SMALL
    return max(large / max(scales) * size, _TOO_SMALL) if large else 0.0


_TOO_SMALL = 5e-324  # for any dtype


def _least(given: Cotangents) -> float:
    """The least normal number of the dtype, with room for rounding."""
    infos = [torch.finfo(ct.dtype) for ct in given if ct is not None]
    return max((4 * info.smallest_normal for info in infos), default=0.0)


def _large(ct: Tensor) -> Tensor:
    """The cotangent scaled to near the square root of the dtype's greatest number."""
    size = ct.abs().max()
    return ct if size == 0 else ct / size * torch.finfo(ct.dtype).max ** 0.5
