"""Builds the graph of a derivative with respect to modules in the backward pass (a lazy graph).

    results = g(p)        backward: evaluates g again with a graph, and computes the pullback

Building the graph of a derivative takes as long as computing the derivative, and training steps do
not need the graph. An operator therefore computes results without a graph, and a node of
`recomputation.py` attaches the results to the leaves on which f depends. The second evaluation also
builds the graph for higher derivatives.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import compress
from typing import Any

import torch
from torch import nn

from gradtools.torch import _upstream as upstream
from gradtools.torch import trees
from gradtools.torch.autograd_graph import is_spent, nodes_of
from gradtools.torch.compiling import is_compiling
from gradtools.torch.function_modes import PlainKernels, holds
from gradtools.torch.functorch_wrappers import is_inexact
from gradtools.torch.operation_marks import is_recorded
from gradtools.torch.recomputation import Program, Pull, Pulled, recomputed
from gradtools.torch.state import Held, RunState

Tensor = torch.Tensor
Tensors = list[Tensor]


class _ThreadFlags(threading.local):
    again = False  # whether this thread is about to evaluate f a second time


_thread = _ThreadFlags()


def current_graph(f: Any, modules: Iterable[nn.Module]) -> LazyGraph | None:
    """Returns the lazy graph of a call of f, or None if the graph is built immediately.

    The graph is built immediately in the second evaluation and while a recorder is active. The
    graph is also built immediately inside of torch.func and forward mode, because their levels no
    longer exist when a backward pass runs.
    """
    again, _thread.again = _thread.again, False
    if again or not torch.is_grad_enabled() or is_compiling() or is_recorded() or is_nested():
        return None
    return LazyGraph(f, modules)


def is_nested() -> bool:
    """Returns whether a torch.func transform or forward mode is active."""
    return upstream.peek_interpreter_stack() is not None or upstream.forward_level() >= 0


class _LazyPull(Pull):
    def pulled(self, xs: Sequence[Tensor]) -> Pulled:
        count = len(self.sources)
        pairs, left = super().pulled(xs)[: sum(self.wants[:count])], iter(xs[self.size :])
        cts = [next(left) if given else None for given in self.given]
        # A result that already has a graph is an argument of the program, and its cotangent is
        # returned unchanged.
        own = compress(zip(xs, cts, strict=False), self.wants[count:])
        return [*pairs, *own]

    def _pull(self, *args: Any) -> list[Tensor | None]:
        with _without_hooks(self.sources):
            return super()._pull(*args)


class LazyGraph(Program):
    """Program that recomputes the results of a derivative with respect to modules.

    The arguments of the program are the results that already have a graph; f does not read these
    arguments.
    """

    inlines = False  # derivatives are with respect to the leaves, not aliases
    otherwise, pulls = True, _LazyPull

    def __init__(self, f: Any, modules: Iterable[nn.Module]) -> None:
        held = Held([f, *modules])
        super().__init__("", list, held, RunState.now(held))
        self._required = [x.requires_grad for x in held.parameters]
        self.deferred = True  # whether the backward pass builds the graph
        self._nested = False  # whether f ran inside of vmap or forward mode
        self.leaves: dict[int, Tensor] = {}  # the leaves on which f depends, by id
        # The outputs of f that do not require grad, by id.
        self._constants: dict[int, weakref.ref[Tensor]] = {}

    def note(self, output: Any, own: set[int]) -> None:
        """Records the leaves on which f's outputs depend, except tensors with ids in `own`."""
        if is_nested():
            self._nested = True
            return
        every = [x for x in trees.flatten(output)[0] if isinstance(x, Tensor)]
        self._constants |= {id(x): weakref.ref(x) for x in every if not x.requires_grad}
        nodes = nodes_of(every)
        for x in [n.variable for n in nodes if type(n) is upstream.AccumulateGrad]:
            if id(x) not in own and not is_spent(x):
                self.leaves.setdefault(id(x), x)
        # If f captures tensors with a graph, the first evaluation frees the graph, so f cannot be
        # evaluated again.
        if min(map(upstream.sequence_of, nodes), default=self.outside) < self.outside:
            self.deferred = False

    def results(
        self, caller: str, again: Callable[[], Any], results: Any, select: Any = None
    ) -> Any:
        """Returns a tree of results that are differentiable with respect to the leaves.

        again: A function that recomputes the results as `select(again())`, or as `again()` if
            select is None.
        """
        if not (self.deferred and self.leaves and torch.is_grad_enabled()):
            return results
        every, treedef = trees.flatten(results)
        tensors = [(k, x) for k, x in enumerate(every) if isinstance(x, Tensor) and is_inexact(x)]
        # If a cotangent requires grad, the results of the pullback already have a graph.
        without = [(k, x) for k, x in tensors if self._nested or not x.requires_grad]
        places = [k for k, x in without if not holds(self._constants, x)]

        def run(_: Sequence[Tensor]) -> Tensors:
            # The cotangents may be batched by vmap, but f must run outside of vmap.
            outside = upstream.temporarily_clear_interpreter_stack(), torch.inference_mode(False)
            with outside[0], outside[1], torch.enable_grad(), PlainKernels(), self._as_required():
                _thread.again = True
                try:
                    tree = again() if select is None else select(again())
                finally:
                    _thread.again = False
            return [*map(trees.flatten(tree)[0].__getitem__, places)]

        ys = [every[k] for k in places]
        program = self._copy(caller=caller, run=run, first=[], verify=True)
        program.set_sources([*self.leaves.values()])
        program.known = [y.detach() if y.requires_grad else y for y in ys]
        # Results of vmap and forward mode have a graph that ends at captured tensors.
        for k, y in zip(places, recomputed(program, ys if self._nested else []), strict=True):
            every[k] = y
        return trees.unflatten(treedef, every)

    @contextmanager
    def _as_required(self) -> Iterator[None]:
        """Context manager in which parameters require grad as in the first evaluation."""
        pairs = zip(self.held.parameters, self._required, strict=True)
        changed = [(x, was) for x, was in pairs if x.requires_grad != was]
        try:
            for x, was in changed:
                x.requires_grad_(was)
            yield
        finally:
            for x, was in changed:
                x.requires_grad_(not was)


@contextmanager
def _without_hooks(leaves: Sequence[Tensor]) -> Iterator[None]:
    """Removes the hooks of the leaves. The enclosing backward pass runs the hooks."""
    hooks = [h for x in leaves if (h := upstream.tensor_hooks(x))]
    held = [dict(h) for h in hooks]
    try:
        for h in hooks:
            h.clear()
        yield
    finally:
        for h, before in zip(hooks, held, strict=True):
            h.update(before)
