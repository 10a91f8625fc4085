"""Sums of gradients: of chunks, as soon as autograd has computed each, and of several nodes.

`torch.autograd.grad` hands all gradients over at the end: beside the sum so far a whole second set
of them. Here a hook on each large leaf takes its gradient when it is complete, adds it to the sum,
and leaves a zero of no memory in its place, so that one set is alive and one leaf's gradient. A
hook takes longer than the sum of a small leaf: those of the small ones are added together.

Two towers that share an encoder are two nodes, and autograd adds what they give for a leaf once
both have run: until then the gradients of each are alive. Here a node hands what it has for a leaf
on to the next one that runs in the same pass, and the last one gives the sum to autograd, which
waits for all of them either way.
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
from gradtools.torch.modes import batchings
from gradtools.torch.replaying.consistency import register_own_hook

Tensor = torch.Tensor
left_to_python(__name__)
_NARROW = (torch.float16, torch.bfloat16)
_PLAIN = (Tensor, torch.nn.Parameter)
_LARGE = 1 << 13  # entries of a leaf whose gradient a hook takes
Weigh = Callable[[Tensor, Tensor], Tensor]
_task = upstream.current_graph_task  # which call of the engine runs a hook


@dataclass(eq=False, repr=False)
class Sums:
    """Terms that add up, narrow ones in float32, in place where nobody else sees it.

    terms: The sums so far; none before the first terms.
    in_place: Whether weighted terms are added in place.
    """

    terms: list[Any] = field(default_factory=list)
    in_place: bool = False

    def begin(self, count: int) -> None:
        """So many sums, of nothing yet."""
        if not self.terms:
            self.terms = [None] * count
            self._dtypes: list[Any] = [None] * count
            self._owned = [False] * count
            self._each = upstream.peek_interpreter_stack() is None and not batchings()

    def add(self, terms: Sequence[Any]) -> None:
        """One more of each; None is zero."""
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
        """One more of each, times their weight, which stands before them and is added as well.

        weigh: Gives a term. Numbers on the CPU are added in place, without a copy of the terms.
        """
        w, *xs = terms
        if not _is_plain(terms) or not (self.in_place or not self.terms):
            self.in_place = False
            self.add([w, *[weigh(w, x) for x in xs]])
            return
        number = w.item()
        if not self.terms:
            # Where the weight is zero a mean over nothing, 0/0, does not count.
            scaled = (
                [*upstream.multiply_each(xs, number)] if number else [*map(torch.zeros_like, xs)]
            )
            self.terms, self.in_place = [w, *scaled], True
            self._dtypes, self._owned = [x.dtype for x in terms], [False, *[True] * len(xs)]
            return
        self.terms[0] = self.terms[0] + w
        if number:
            upstream.add_each_(self.terms[1:], xs, alpha=number)

    def means(self) -> list[Any]:
        """The sum of the weights, and the sums over that."""
        total, *sums = self.total()
        if self.in_place:
            upstream.divide_each_(sums, total.item())
            return [total, *sums]
        return [total, *[x / total.to(x.real.dtype) for x in sums]]

    def total(self) -> list[Any]:
        """The sums, in the terms' dtypes."""
        if not self.terms:
            return []
        pairs = zip(self.terms, self._dtypes, strict=True)
        return [s if s is None or s.dtype == dtype else s.to(dtype) for s, dtype in pairs]


def _is_plain(xs: Sequence[Any]) -> bool:
    """Whether these are numbers on the CPU, whose sum nobody differentiates or maps."""
    if upstream.peek_interpreter_stack() is not None or upstream.forward_level() >= 0:
        return False
    return all(
        type(x) is Tensor
        and x.device.type == "cpu"
        and x.layout is torch.strided
        and not (x.requires_grad or upstream.is_wrapped(x))
        for x in xs
    )


class LeafHooks:
    """Inside, what autograd computes for leaves is added to sums; autograd itself gets zeros.

    The hooks are set once for all chunks of a backward pass. Another thread's backward pass through
    the same leaves is another call of the engine, and goes by.

    Args:
        at: From which of the sums on those of the leaves are.
    """

    def __init__(self, sums: Sums, at: int, leaves: Sequence[Tensor]) -> None:
        self.added: set[int] = set()  # the leaves whose gradient was added in the latest call
        self._sums, self._at = sums, at
        self._large = [(k, x) for k, x in enumerate(leaves) if _is_large(x)]
        self._calls = set[int]()  # of the engine, that began at our roots
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
        """Whether a hook takes the gradient of leaf k, before any other hook on it."""
        return any(k == place for place, _ in self._large)

    def roots(self, outs: Sequence[Any]) -> Sequence[Any]:
        """The outputs, for autograd to begin at."""
        self.added.clear()
        tracked = [isinstance(y, Tensor) and y.requires_grad for y in outs]
        if any(t and y.layout is not torch.strided for y, t in zip(outs, tracked, strict=True)):
            return outs  # whose gradients are handed over at the end
        with torch.enable_grad():
            roots = [y.view_as(y) if t else y for y, t in zip(outs, tracked, strict=True)]
        for y, t in zip(roots, tracked, strict=True):
            if t:
                register_own_hook(y, self._begin)
        return roots

    def _begin(self, ct: Tensor) -> None:
        self._calls.add(_task())

    def _take(self, k: int, grad: Tensor) -> Tensor | None:
        if _task() not in self._calls or type(grad) is not Tensor or grad.is_sparse:
            return None
        self._sums.add_one(self._at + k, grad)
        self.added.add(k)
        zero = self._zeros.get(k)
        if zero is None:  # of no memory
            zero = self._zeros[k] = grad.new_zeros(()).expand(grad.shape)
        return zero


def _is_large(x: Tensor) -> bool:
    return x.requires_grad and x.numel() >= _LARGE


def adds_leaves(leaves: Sequence[Tensor]) -> bool:
    """Whether hooks are to add up what these get: on a subclass they are other code's."""
    return any(map(_is_large, leaves)) and all(type(x) in _PLAIN for x in leaves)


# --- one sum for several nodes --------------------------------------------------------------

_will_run = upstream.will_run  # in that call
_LOCK = threading.Lock()  # devices have threads of their own
_NODES: weakref.WeakSet[Any] = weakref.WeakSet()
_JOINTS: weakref.WeakValueDictionary[int, Joint]


class Joint:
    """What is handed on between the nodes of one backward pass.

    left: How many nodes are yet to give their part of a leaf, by the leaf's id.
    sums: What those that have run gave, and the stream on which it is computed.
    """

    def __init__(self, nodes: Sequence[Any]) -> None:
        self.left = Counter(id(x) for node in nodes for x in node.leaves)
        self.sums: dict[int, tuple[Tensor, Any]] = {}

    def handed(self, leaves: Sequence[Tensor]) -> list[Tensor | None]:
        """What earlier nodes gave for these leaves, which is the caller's from now on."""
        if not self.sums:
            return [None] * len(leaves)
        with _LOCK:
            result = [self.sums.pop(id(x), None) for x in leaves]
        return [None if entry is None else _here(*entry) for entry in result]

    def handed_on(self, leaves: Sequence[Tensor], grads: Sequence[Any]) -> list[Any]:
        """Of gradients those that nobody adds to any more, for autograd; a node calls it once."""
        grads = [
            g if more is None else more if g is None else more + g
            for g, more in zip(grads, self.handed(leaves), strict=True)
        ]
        with _LOCK:
            for k, x in enumerate(leaves):
                self.left[id(x)] -= 1
                if self.left[id(x)] > 0 and grads[k] is not None:
                    self.sums[id(x)] = grads[k], _stream(grads[k])
                    grads[k] = None
        return grads


_JOINTS = weakref.WeakValueDictionary()


def join(node: Any, leaves: Sequence[Tensor]) -> None:
    """Has a node take part. The nodes that wait hold what they share, so that it goes with them.

    leaves: Its last inputs.
    """
    node.leaves, node.joints = leaves, {}
    if leaves and all(x.requires_grad for x in leaves):  # else autograd takes nothing for some
        with _LOCK:
            _NODES.add(node)


def joint_of(node: Any) -> Joint | None:
    """What the nodes of this backward pass share; None where gradients are differentiated, say."""
    task = _task()  # none where a node is called by hand
    if task < 0 or torch.is_grad_enabled() or node not in _NODES:
        return None
    if upstream.peek_interpreter_stack() is not None or batchings():
        return None
    with _LOCK:
        result = _JOINTS.get(task)
        if result is None:
            nodes = [other for other in _NODES if _will_run(other)]
            result = Joint(nodes)
            for other in nodes:
                other.joints[task] = result
            _JOINTS[task] = result
        node.joints.pop(task, None)
        return result


def _stream(x: Tensor) -> Any:
    return None if x.device.type == "cpu" else torch.accelerator.current_stream(x.device)


def _here(x: Tensor, stream: Any) -> Tensor:
    """A tensor that another stream computes, once it is there."""
    here = _stream(x)
    if stream is not None and here != stream:
        here.wait_stream(stream)
        x.record_stream(here)
    return x
