"""The backward pass of a PyTorch run at given values, for `seeing/diagnostics/bad_gradients.py`.

The operations are autograd's nodes; hooks show the cotangents that each is given and passes on.
Calling a node with a far greater cotangent distinguishes a zero factor from underflow.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from gradtools.errors import GradtoolsError
from gradtools.seeing.diagnostics import bad_gradients
from gradtools.seeing.diagnostics.bad_gradients import Differentiated, PassedCotangents
from gradtools.seeing.graphs.nodes import Node
from gradtools.seeing.graphs.recording import Run, Vanished
from gradtools.seeing.torch.live_graph import in_order
from gradtools.seeing.torch.recording import operations
from gradtools.seeing.torch.recording.calls import CallRecorder
from gradtools.seeing.torch.recording.observation import observed
from gradtools.seeing.torch.recording.recorded_calls import RecordedCall
from gradtools.seeing.torch.undo import Undo
from gradtools.torch import _upstream as upstream
from gradtools.torch.autograd_graph import nodes_of
from gradtools.torch.functorch_wrappers import is_inexact, tensors_in, unwrapped

Tensor = torch.Tensor
Cotangents = Sequence[Tensor | None]
_Places = dict[int, list[Vanished] | None]


def vanishing(
    run: Run, leaves: Sequence[Any], index: int, held: Sequence[Tensor] = ()
) -> list[Vanished] | None:
    """Where the cotangent of a leaf becomes zero or NaN; None if its gradient is sound.

    One run serves all leaves and is memoized for the lifetime of the program that `run` belongs to.
    Indices beyond the leaves count on in `held`, the captured tensors that require grad.
    """
    program = getattr(run, "__self__", None)
    if program is None:
        return _of_all(run, leaves, held)[index]
    if program not in _KNOWN:
        _KNOWN[program] = _of_all(run, leaves, held)
    return _KNOWN[program][index]


_KNOWN: weakref.WeakKeyDictionary[Any, _Places] = weakref.WeakKeyDictionary()


def _of_all(run: Run, leaves: Sequence[Any], held: Sequence[Tensor]) -> _Places:
    with observed(run, leaves) as seen:
        outs = [y for y in seen.outs if isinstance(y, Tensor) and y.requires_grad]
        xs = [*seen.aliases, *held]
        floating = {k: x for k, x in enumerate(xs) if isinstance(x, Tensor) and is_inexact(x)}
        places: _Places = {k: [] for k in range(len(xs))}
        if not (outs and floating):
            return places
        places |= bad_gradients.examined(_Backward(seen.recorder, outs, floating))
    if all(math.isfinite(_size(y)) for y in outs):
        return places
    with observed(run, leaves, recorder_of=_ValueRecorder) as seen:
        assert isinstance(seen.recorder, _ValueRecorder)
        origins = seen.recorder.origins.of(seen.outputs)
    return {k: bad_gradients.at_origins(of, origins) for k, of in places.items()}


# --- the backward pass -------------------------------------------------------------------


class _Backward(Differentiated):
    """A recorded run with its backward pass."""

    def __init__(
        self, recorder: CallRecorder, outs: Sequence[Tensor], leaves: Mapping[int, Tensor]
    ) -> None:
        self._recorder, self.outs, self.leaves = recorder, outs, leaves
        positions: dict[Any, int] = {}  # of autograd's nodes, by the recorded calls that made them
        for node in in_order([y.grad_fn for y in outs]):
            before = (positions.get(of, 0) for of, _ in node.next_functions)
            positions[node] = max(recorder.made.get(node, 0), *before, 0)
        self._nodes = sorted(positions, key=positions.__getitem__)  # in program order
        ends = [node for node in nodes_of(outs) if type(node).__name__ == "AccumulateGrad"]
        self._ends = {id(node.variable): node for node in ends}

    def gradients(self, leaves: Sequence[int]) -> dict[int, Tensor]:
        """As in `Differentiated`; without those that do not reach."""
        grads = _gradients(self.outs, [self.leaves[k] for k in leaves])
        result = {k: grad for k, grad in zip(leaves, grads, strict=True) if grad is not None}
        if any(grad.is_meta for grad in result.values()):
            raise GradtoolsError(
                "why_zero: the gradient is on the meta device, which holds no numbers, so nobody "
                "can tell whether it is zero. Pass arrays that hold numbers."
            )
        return result

    def backward(self, leaves: Sequence[int]) -> list[PassedCotangents]:
        seen: dict[Any, tuple[Cotangents, Cotangents]] = {}  # by node: given, passed

        def hook(node: Any) -> Callable[[Any, Any], None]:
            return lambda passed, given: seen.update({node: (given, passed)})

        with ExitStack() as hooks:
            for node in self._nodes:
                hooks.callback(node.register_hook(hook(node)).remove)
            _gradients(self.outs, [self.leaves[k] for k in leaves])
        return [self._passed(node, *seen[node]) for node in self._nodes if node in seen]

    def _passed(self, node: Any, given: Cotangents, passed: Cotangents) -> PassedCotangents:
        def explained(path: Sequence[int]) -> tuple[Node, float]:
            named = _named(self._recorder, node)
            if not path:
                return named, 0.0
            sums = _sums_of_softmax(node, given)
            return named, math.inf if sums else _product(node, given, path)

        def least() -> float:
            infos = [torch.finfo(ct.dtype) for ct in given if ct is not None]
            return max((4 * info.smallest_normal for info in infos), default=0.0)

        results = [(node, k) for k in range(len(given))]
        operands = node.next_functions[: len(passed)]
        return PassedCotangents(node, results, operands, given, passed, explained, least)

    def key_of(self, leaf: int) -> Any:
        return self._ends.get(id(self.leaves[leaf])), 0

    def size(self, x: Any) -> float:
        return _size(x)


def _is_plain(ct: Any) -> bool:
    return isinstance(ct, Tensor) and is_inexact(ct) and ct.layout is torch.strided


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
            bad: list[Any] = [x.number for x in call.operands if not math.isfinite(_size(x.tensor))]
            for x in upstream.pytree.tree_leaves((args, kwargs)):
                if isinstance(x, float) and not math.isfinite(x):
                    bad.append(x)
            self._entered = call, bad
        return call

    def write(self, call: RecordedCall, out: Any) -> None:
        count = len(self.nodes)
        super().write(call, out)
        if len(self.nodes) > count and self._entered is not None and self._entered[0] is call:
            results = tensors_in((out, [x.tensor for x in call.operands]))
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


def _gradients(outs: Sequence[Tensor], leaves: Sequence[Tensor]) -> Sequence[Tensor | None]:
    """The gradients, for random cotangents from a generator of their own; 1 for a real number."""
    generator = torch.Generator().manual_seed(0)
    draw = partial(torch.randn, generator=generator, device="cpu")
    cts = [draw(y.shape, dtype=y.dtype).to(y.device) for y in outs]
    if len(outs) == 1 and outs[0].numel() == 1 and not outs[0].is_complex():
        cts = [torch.ones_like(outs[0])]
    return torch.autograd.grad(outs, leaves, cts, retain_graph=True, allow_unused=True)


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

    def enlarged(ct: Tensor) -> Tensor:
        """The cotangent scaled to near the square root of the dtype's greatest number."""
        own = ct.abs().max()
        return ct if own == 0 else ct / own * torch.finfo(ct.dtype).max ** 0.5

    with torch.no_grad():
        result = node(*[None if ct is None else enlarged(ct) for ct in given])
    result = result if isinstance(result, tuple) else (result,)
    scales = [torch.finfo(ct.dtype).max ** 0.5 for ct in given if ct is not None]
    large = max((_size(result[k]) for k in path), default=0.0)
    if not math.isfinite(large):
        return _TOO_SMALL
    return max(large / max(scales) * size, _TOO_SMALL) if large else 0.0


_TOO_SMALL = 5e-324  # for any dtype
