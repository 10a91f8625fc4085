"""In-place sums of gradients, over the chunks of a node and over several nodes.

`torch.autograd.grad` returns all gradients at the end: a second full set in addition to the sum so
far. Here a hook on each large leaf adds its gradient to the sum as soon as it is complete, and
returns an expanded zero instead, so that only one set and one leaf's gradient are alive. A hook
takes longer than adding a small leaf's gradient; these are added together at the end.

Two towers that share an encoder are two nodes, and autograd adds their gradients of a leaf when
both have run: until then both sets are alive. Here a node passes its gradient of a leaf on to the
next node in the same backward pass, and the last one returns the sum to autograd, which waits for
all of them anyway.
"""

from __future__ import annotations

import threading
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from gradtools.torch import _upstream as upstream
from gradtools.torch.compiling import left_to_python
from gradtools.torch.functorch_wrappers import is_dual
from gradtools.torch.modes import batchings
from gradtools.torch.replaying.consistency import register_own_hook

Tensor = torch.Tensor
left_to_python(__name__)
_NARROW = (torch.float16, torch.bfloat16)
_PLAIN = (Tensor, torch.nn.Parameter)
_LARGE = 1 << 13  # entries of a leaf whose gradient a hook takes
Weigh = Callable[[Tensor, Tensor], Tensor]
_task = upstream.current_graph_task  # the id of the engine call that runs a hook


@dataclass(eq=False, repr=False)
class Sums:
    """Running sums, in float32 for 16-bit terms, in place where the memory is owned."""

    terms: list[Any] = field(default_factory=list)  # so far; empty before the first ones
    in_place: bool = False  # whether weighted terms are added in place
    _each = False  # whether the terms may be added by one call

    def begin(self, count: int) -> None:
        """Starts `count` empty sums, unless they were started before."""
        if not self.terms:
            self.terms = [None] * count
            self._dtypes: list[Any] = [None] * count
            self._owned = [False] * count
            self._each = upstream.peek_interpreter_stack() is None and not batchings()

    def add(self, terms: Sequence[Any]) -> None:
        """Adds one term to each sum; None is zero."""
        self.begin(len(terms))
        each, totals, more = self._each and not torch.is_grad_enabled(), list[Any](), list[Any]()
        for k, term in enumerate(terms):
            if term is None:
                continue
            if each and self._owned[k] and type(term) is Tensor and not term.is_sparse:
                totals.append(self.terms[k])
                more.append(term)
            else:
                self.add_one(k, term)
        if totals:
            upstream.add_each_(totals, more)

    def add_one(self, k: int, term: Tensor) -> None:
        total = self.terms[k]
        if total is None:
            self.terms[k], self._dtypes[k] = term, term.dtype
        elif self._owned[k] and not (total.requires_grad or term.requires_grad):
            total += term
        else:
            wide = total.float() if total.dtype in _NARROW else total
            self.terms[k], self._owned[k] = wide + term, True

    def add_weighted(self, terms: list[Tensor], weigh: Weigh) -> None:
        """Adds `[w, *xs]`: w to the first sum, w times x to the others.

        weigh: `weigh(w, x)` computes a term; on the CPU terms are added in place, without a copy.
        """
        w, *xs = terms
        plain = upstream.peek_interpreter_stack() is None and all(
            type(x) is Tensor
            and x.device.type == "cpu"
            and x.layout is torch.strided
            and not (x.requires_grad or upstream.is_wrapped(x) or is_dual(x))
            for x in terms
        )
        if not plain or not (self.in_place or not self.terms):
            self.in_place = False
            self.add([w, *[weigh(w, x) for x in xs]])
            return
        number = w.item()
        if not self.terms:
            # With weight zero, xs may be NaN: means over no examples.
            scaled = upstream.multiply_each(xs, number) if number else map(torch.zeros_like, xs)
            self.terms, self.in_place = [w, *scaled], True
            self._dtypes, self._owned = [x.dtype for x in terms], [False, *[True] * len(xs)]
            return
        self.terms[0] = self.terms[0] + w
        if number:
            upstream.add_each_(self.terms[1:], xs, alpha=number)

    def means(self) -> list[Any]:
        """The sum of the weights, and the other sums divided by it."""
        total, *sums = self.total()
        if not self.in_place:
            return [total, *[x / total.to(x.real.dtype) for x in sums]]
        upstream.divide_each_(sums, total.item())
        return [total, *sums]

    def total(self) -> list[Any]:
        """The sums, in the terms' dtypes."""
        if not self.terms:
            return []
        pairs = zip(self.terms, self._dtypes, strict=True)
        return [s if s is None or s.dtype == dtype else s.to(dtype) for s, dtype in pairs]


class LeafHooks:
    """Context with hooks that add the leaves' gradients to sums, and give autograd zeros instead.

    The hooks are set once for all chunks of a backward pass. They ignore other engine calls, such
    as another thread's backward pass through the same leaves.

    at: The index of the first leaf's sum.
    """

    def __init__(self, sums: Sums, at: int, leaves: Sequence[Tensor]) -> None:
        self.added: set[int] = set()  # the leaves whose gradient was added in the latest call
        self._sums, self._at = sums, at
        self._large = [(k, x) for k, x in enumerate(leaves) if _is_large(x)]
        self._calls = set[int]()  # the ids of engine calls that began at our roots
        self._zeros: dict[int, Tensor] = {}

    def __enter__(self) -> LeafHooks:
        self._bare = [x for _, x in self._large if upstream.tensor_hooks(x) is None]
        self._handles = [register_own_hook(x, partial(self._take, k)) for k, x in self._large]
        return self

    def __exit__(self, *error: Any) -> None:
        for handle in self._handles:
            handle.remove()
        for x in self._bare:
            upstream.set_tensor_hooks(x, None)

    def takes(self, k: int) -> bool:
        return any(k == place for place, _ in self._large)

    def roots(self, outs: Sequence[Any]) -> Sequence[Any]:
        """Views of the outputs, with hooks by which an engine call is recognized."""
        self.added.clear()
        tracked = [y for y in outs if isinstance(y, Tensor) and y.requires_grad]
        if any(y.layout is not torch.strided for y in tracked):
            return outs  # without hooks: gradients are added at the end
        with torch.enable_grad():
            views = {id(y): y.view_as(y) for y in tracked}
        for view in views.values():
            register_own_hook(view, lambda ct: self._calls.add(_task()))
        return [views.get(id(y), y) for y in outs]

    def _take(self, k: int, grad: Tensor) -> Tensor | None:
        if _task() not in self._calls or type(grad) is not Tensor or grad.is_sparse:
            return None
        self._sums.add_one(self._at + k, grad)
        self.added.add(k)
        zero = self._zeros.get(k)
        if zero is None:  # expanded from one entry
            zero = self._zeros[k] = grad.new_zeros(()).expand(grad.shape)
        return zero


def _is_large(x: Tensor) -> bool:
    return x.requires_grad and x.numel() >= _LARGE


def adds_leaves(leaves: Sequence[Tensor]) -> bool:
    """Whether hooks add up these leaves' gradients: if one is large, and none is a subclass."""
    return any(map(_is_large, leaves)) and all(type(x) in _PLAIN for x in leaves)


# --- one sum for several nodes --------------------------------------------------------------

_LOCK = threading.Lock()  # the engine has a thread for each device
_NODES: weakref.WeakSet[Any] = weakref.WeakSet()
_JOINTS: weakref.WeakValueDictionary[int, Joint] = weakref.WeakValueDictionary()


class Joint:
    """The partial sums that the nodes of one backward pass share, by the leaves' ids."""

    def __init__(self, nodes: Sequence[Any]) -> None:
        # How many nodes have yet to contribute to a leaf.
        self.left = Counter(id(x) for node in nodes for x in node.leaves)
        self.sums: dict[int, tuple[Tensor, Any]] = {}  # so far, and the stream that computes it

    def take(self, leaves: Sequence[Tensor]) -> list[Tensor | None]:
        """Removes and returns the sums of earlier nodes for these leaves."""
        if not self.sums:
            return [None] * len(leaves)
        with _LOCK:
            entries = [self.sums.pop(id(x), None) for x in leaves]
        for x, stream in filter(None, entries):
            current = _stream(x)
            if stream is not None and current != stream:  # the stream that computes x
                current.wait_stream(stream)
                x.record_stream(current)
        return [entry and entry[0] for entry in entries]

    def pass_on(self, leaves: Sequence[Tensor], grads: Sequence[Any]) -> list[Any]:
        """Adds a node's gradients; returns the completed sums, None for those passed on."""
        grads = [
            g if more is None else more if g is None else more + g
            for g, more in zip(grads, self.take(leaves), strict=True)
        ]
        with _LOCK:
            for k, x in enumerate(leaves):
                self.left[id(x)] -= 1
                if self.left[id(x)] > 0 and grads[k] is not None:
                    self.sums[id(x)] = grads[k], _stream(grads[k])
                    grads[k] = None
        return grads


def join(node: Any, leaves: Sequence[Tensor]) -> None:
    """Registers a node. Waiting nodes hold the joint, so that it dies with them.

    leaves: The node's last inputs.
    """
    node.leaves, node.joints = leaves, {}
    if leaves and all(x.requires_grad for x in leaves):  # else autograd ignores some gradients
        with _LOCK:
            _NODES.add(node)


def joint_of(node: Any) -> Joint | None:
    """The joint of this backward pass; None under transforms, vmap or create_graph=True."""
    task = _task()  # negative if a node is called directly
    if task < 0 or torch.is_grad_enabled() or node not in _NODES:
        return None
    if upstream.peek_interpreter_stack() is not None or batchings():
        return None
    with _LOCK:
        result = _JOINTS.get(task)
        if result is None:
            nodes = [other for other in _NODES if upstream.will_run(other)]
            result = Joint(nodes)
            for other in nodes:
                other.joints[task] = result
            _JOINTS[task] = result
        node.joints.pop(task, None)
        return result


def _stream(x: Tensor) -> Any:
    return None if x.device.type == "cpu" else torch.accelerator.current_stream(x.device)
