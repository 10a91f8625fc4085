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
from typing import Any

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
        results = _gradients_unless_lost(outs, [xs[k] for k in floating])
        # None: a reentrant checkpoint, or lost by custom code, which has its own finding
        grads = {k: grad for k, grad in zip(floating, results, strict=True) if grad is not None}
        if any(grad.is_meta for grad in grads.values()):
            raise GradtoolsError(
                "why_zero: the gradient is on the meta device, which holds no numbers, so nobody "
                "can tell whether it is zero. Pass arrays that hold numbers, or ask dependence, "
                "which looks at none."
            )
        lost = [k for k, grad in grads.items() if grad.numel() and not _size(grad)]
        noise = _noise(outs, xs, {k: grad for k, grad in grads.items() if k not in lost})
        output = max(map(_size, outs))
        kinds = {
            k: bad_gradients.extreme(_size(grad), _size(xs[k]), output, torch.finfo(grad.dtype).eps)
            for k, grad in grads.items()
            if k not in lost and k not in noise
        }
        kinds = {k: kind for k, kind in kinds.items() if kind}
        for k in floating:
            result[k] = None
        if lost or noise or kinds:
            wanted = [xs[k] for k in (*lost, *noise, *kinds)]
            back = _Back.of(seen.recorder, outs, wanted, bool(noise))
            for k in (*lost, *noise):
                stops = back.stops(xs[k])
                result[k] = [replace(v, noise=v.cancelled and k in noise) for v in stops]
            for k, kind in kinds.items():
                result[k] = bad_gradients.places(kind, back.ranges(xs[k]))
    if all(math.isfinite(_size(y)) for y in outs):
        return result
    with recording_run("a run", run, leaves) as undo:
        recorder = _ValueRecorder(undo)
        seen = run_under(recorder, run, leaves, [""] * len(leaves))
        origins = recorder.origins.of(map(seen.output, seen.outs))
    return [bad_gradients.at_origins(places, origins) for places in result]


# --- one backward pass -------------------------------------------------------------------


@dataclass(frozen=True)
class _NodeCotangents:
    """The cotangents of a node of autograd; rounding noise counts as zero.

    Attributes:
        given: What it was given.
        handed: What it passed on.
        moves: Which of those that it was given are not zero.
        on: Which of those that it passed on are not zero.
        noise: Which of those that it passed on are rounding noise.
    """

    given: Cotangents
    handed: Cotangents
    moves: list[bool]
    on: list[bool]
    noise: list[bool]

    @classmethod
    def of(cls, plain: _Pair, perturbed: _Pair | None) -> _NodeCotangents:
        noisy = [[False] * len(cts) for cts in plain]
        if perturbed is not None:
            noisy = [[*map(_is_noise, *both)] for both in zip(plain, perturbed, strict=True)]
        moves, on = (
            [bool(_size(ct)) and not noise for ct, noise in zip(cts, of, strict=True)]
            for cts, of in zip(plain, noisy, strict=True)
        )
        return cls(*plain, moves, on, noisy[1])


_Pair = tuple[Cotangents, Cotangents]  # what a node was given, and what it passed on


@dataclass(frozen=True)
class _Back:
    """Autograd's graph with the cotangents of one backward pass, for all leaves.

    Attributes:
        recorder: The record of the run.
        passed: The cotangents of each node.
        summed: For each input of a node that sums several nonzero cotangents, their nodes.
        readers: The reversed edges: for each node those that pass cotangents to it.
        ends: The AccumulateGrad node of each leaf, by the leaf's id.
    """

    recorder: CallRecorder
    passed: Mapping[Any, _NodeCotangents]
    summed: dict[tuple[Any, int], list[Any]]
    readers: dict[Any, list[Any]]
    ends: dict[int, Any]

    @classmethod
    def of(
        cls, recorder: CallRecorder, outs: Sequence[Tensor], wanted: Sequence[Tensor], noisy: bool
    ) -> _Back:
        plain, perturbed = _passed(outs, wanted), dict[Any, _Pair]()
        if noisy:
            with _perturbed(outs, 0):
                perturbed = _passed(outs, wanted)
        passed = {node: _NodeCotangents.of(at, perturbed.get(node)) for node, at in plain.items()}
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
        summed = {edge: nodes for edge, nodes in given.items() if len(nodes) > 1}
        return cls(recorder, passed, summed, readers, ends)

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

    def position(self, node: Any) -> int:
        """The position of the recorded call that made a node."""
        return self.recorder.made.get(node, len(self.recorder.made))

    def stops(self, leaf: Tensor) -> list[Vanished]:
        """The nodes at which the cotangent of one leaf becomes zero, in program order."""
        leading = self.leading_to(leaf)
        result = self._cancelled(leading)
        for node, at in self.passed.items():
            path = [k for k, (to, _) in enumerate(node.next_functions) if to in leading]
            if any(at.moves) and path and not any(at.on[k] for k in path):
                product = _product(node, at.given, path)
                underflow = 0 < product < _least(at.given)
                empty = all(x is not None and not x.numel() for x in (at.handed[k] for k in path))
                sums = any(at.noise[k] for k in path) or _sums_of_softmax(node, at.given)
                cancelled = sums or product >= _least(at.given)
                named = _named(self.recorder, node)
                vanished = Vanished(named, underflow, tuple(path), cancelled, empty=empty)
                result.append((self.position(node), vanished))
        return [vanished for _, vanished in sorted(result, key=lambda pair: pair[0])]

    def _cancelled(self, leading: Mapping[Any, None]) -> list[tuple[int, Vanished]]:
        """The calls, with their positions, at which the paths of cancelling cotangents meet."""
        recorder, result = self.recorder, []
        for (to, slot), nodes in self.summed.items():
            cancels = to not in self.passed or not self.passed[to].moves[slot]
            if to in leading and cancels:
                flows = [(node.inputs, node.outputs) for node in recorder.nodes]
                made = [recorder.made[node] for node in nodes if node in recorder.made]
                at = joined(flows, made)
                if at is not None:
                    result.append((at, Vanished(recorder.nodes[at], cancelled=True)))
        return result

    def ranges(self, leaf: Tensor) -> Iterator[bad_gradients.CotangentRange]:
        """The sizes of the cotangents along the leaf's paths, in program order."""
        leading = self.leading_to(leaf)
        for node in sorted(set(self.passed) & set(leading), key=self.position):
            at = self.passed[node]
            edges = zip(node.next_functions, at.handed, strict=False)
            on = [_size(ct) for (to, _), ct in edges if to in leading]
            if on:
                given = max(map(_size, at.given), default=0.0)
                named = _named(self.recorder, node)
                yield bad_gradients.CotangentRange(named, given, float(np.max(on)))


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


# --- NaN and infinite values -------------------------------------------------------------


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


def _passed(outs: Sequence[Tensor], leaves: Sequence[Tensor]) -> dict[Any, _Pair]:
    """What each node of autograd was given and passed on, from hooks in one backward pass."""
    result: dict[Any, _Pair] = {}

    def hook(node: Any) -> Callable[[Any, Any], None]:
        return lambda handed, given: result.update({node: (given, handed)})

    handles = [node.register_hook(hook(node)) for node in nodes_of(outs) if node.next_functions]
    try:
        _gradients(outs, leaves)
    finally:
        for handle in handles:
            handle.remove()
    return result


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
