"""Sums of chunks' gradients, each added as soon as autograd has computed it.

`torch.autograd.grad` hands all gradients over at the end: beside the sum so far a whole second set
of them. Here a hook on each leaf takes its gradient when it is complete, adds it to the sum, and
leaves a zero of no memory in its place, so that one set is alive and one leaf's gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from gradtools.torch import _upstream as upstream
from gradtools.torch.compiling import left_to_python
from gradtools.torch.verifying import register_own_hook

Tensor = torch.Tensor
left_to_python(__name__)
_NARROW = (torch.float16, torch.bfloat16)
_PLAIN = (Tensor, torch.nn.Parameter)
_task = upstream.current_graph_task  # which call of the engine runs a hook


class Sums:
    """Terms that add up, narrow ones in float32, in place where nobody else sees it."""

    def __init__(self) -> None:
        self._sums: list[Any] = []
        self._dtypes: list[Any] = []
        self._owned: list[bool] = []

    @property
    def has_any(self) -> bool:
        """Whether anything was added."""
        return bool(self._sums)

    def add(self, terms: Sequence[Any]) -> None:
        """One more of each; None is zero."""
        if not self._sums:
            self._sums, self._dtypes = [None] * len(terms), [None] * len(terms)
            self._owned = [False] * len(terms)
        for k, term in enumerate(terms):
            if term is not None:
                self.add_one(k, term)

    def add_one(self, k: int, term: Tensor) -> None:
        """One more of sum k."""
        total = self._sums[k]
        if total is None:
            self._sums[k], self._dtypes[k] = term, term.dtype
        elif self._owned[k] and not (total.requires_grad or term.requires_grad):
            total += term
        else:
            wide = total.float() if total.dtype in _NARROW else total
            self._sums[k], self._owned[k] = wide + term, True

    @property
    def total(self) -> list[Any]:
        """The sums, in the terms' dtypes."""
        pairs = zip(self._sums, self._dtypes, strict=True)
        return [s if s is None or s.dtype == dtype else s.to(dtype) for s, dtype in pairs]


@contextmanager
def adding_leaves(
    sums: Sums, at: int, leaves: Sequence[Tensor], outs: Sequence[Any]
) -> Iterator[tuple[list[Any], set[int]]]:
    """Inside, gradients of leaves are added to the sums from `at` on; autograd gives zeros.

    Yields outs for autograd to begin at, and the numbers of those leaves whose gradient is added.
    Another thread's backward pass through the same leaves has another task, and goes by.
    """
    tracked = [isinstance(y, Tensor) and y.requires_grad for y in outs]
    pairs = list(zip(outs, tracked, strict=True))
    plain = [x for x in leaves if type(x) in _PLAIN]
    if len(plain) < len(leaves) or any(t and y.layout is not torch.strided for y, t in pairs):
        yield list(outs), set()
        return
    begun, taken = set[int](), set[int]()
    with torch.enable_grad():
        roots = [y.view_as(y) if t else y for y, t in pairs]
    for y, t in zip(roots, tracked, strict=True):
        if t:
            register_own_hook(y, lambda ct: begun.add(_task()))

    def taker(k: int) -> Callable[[Tensor], Tensor | None]:
        def take(grad: Tensor) -> Tensor | None:
            if _task() not in begun or type(grad) is not Tensor or grad.is_sparse:
                return None
            sums.add_one(at + k, grad)
            taken.add(k)
            return grad.new_zeros(()).expand(grad.shape)

        return take

    bare = [x for x in leaves if upstream.tensor_hooks(x) is None]
    handles = [register_own_hook(x, taker(k)) for k, x in enumerate(leaves)]
    try:
        yield roots, taken
    finally:
        for handle in handles:
            handle.remove()
        for x in bare:
            upstream.set_tensor_hooks(x, None)
