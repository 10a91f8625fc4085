"""Lazy graphs: the graph of a derivative at a module is built in its backward pass, if any.

    results = g(p)        backward: evaluates g again with a graph, and pulls back

The graph of a derivative costs as much as the derivative, and a training step does not need it. So
an operator computes its results without one, and a single node attaches them to the leaves that f
reached, as `torch.utils.checkpoint` does. The second evaluation starts from the random streams,
autocast and buffers of the first; afterwards these are as before. Nothing else is restored.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from itertools import islice
from typing import Any

import torch
from torch import nn

from gradtools.errors import GradtoolsError
from gradtools.torch import _upstream as upstream
from gradtools.torch import trees
from gradtools.torch.autograd_graph import is_spent, nodes_of
from gradtools.torch.compiling import is_compiling
from gradtools.torch.function_modes import PlainKernels
from gradtools.torch.functorch_wrappers import is_inexact
from gradtools.torch.operation_marks import is_recorded
from gradtools.torch.state import Casts, Held, RunState

Tensor = torch.Tensor


class _Pending(threading.local):
    """The lazy graph whose second evaluation this thread begins, until the operator takes it."""

    first: LazyGraph | None = None


_here = _Pending()


def current_graph(f: Any, modules: Iterable[nn.Module]) -> LazyGraph | SecondEvaluation | None:
    """The graph of a call of f that begins here; None if it is built at once.

    It is built at once under a recorder, and inside of torch.func and of forward mode, whose levels
    no longer exist when a backward pass runs.
    """
    if _here.first is not None:
        first, _here.first = _here.first, None
        return SecondEvaluation(first)
    if not torch.is_grad_enabled() or is_compiling() or is_recorded():
        return None
    return None if is_nested() else LazyGraph(f, modules)


def is_nested() -> bool:
    """Whether the call is inside of torch.func or of forward mode."""
    return upstream.peek_interpreter_stack() is not None or upstream.forward_level() >= 0


class LazyGraph:
    """The first evaluation of a derivative at modules, which a backward pass may repeat."""

    def __init__(self, f: Any, modules: Iterable[nn.Module]) -> None:
        self.deferred = True  # whether the engine frees the graph
        self._nested = False  # whether f ran inside of vmap or of forward mode
        self._made = upstream.nodes_made()
        self.leaves: dict[int, Tensor] = {}  # that f reached, by id
        self.values: list[tuple[Tensor, int]] = []  # f's outputs and their versions
        self._constants: set[int] = set()  # the ids of outputs of f that require no grad
        held = Held([f, *modules])
        self._state, self._casts = RunState.now(held), Casts(held.kinds)

    def note(self, caller: str, output: Any, own: set[int]) -> None:
        """Records f's outputs, and the leaves behind them but for those with an id in `own`."""
        if is_nested():
            self._nested = True
            return
        every = [x for x in trees.flatten(output)[0] if isinstance(x, Tensor)]
        self._constants |= {id(x) for x in every if not x.requires_grad}
        self.values += [(x.detach(), upstream.version_of(x)) for x in every if is_inexact(x)]
        nodes, accumulates = nodes_of(every), upstream.AccumulateGrad
        for node in nodes:
            if type(node) is accumulates:
                x = node.variable
                if id(x) not in self.leaves and id(x) not in own and not is_spent(x):
                    self.leaves[id(x)] = x
        # A second evaluation would meet a graph that f captures, and that the first one has freed.
        if min(map(upstream.sequence_of, nodes), default=self._made) < self._made:
            self.deferred = False

    def attached(
        self, caller: str, again: Callable[[], Any], results: Any, select: Any = None
    ) -> Any:
        """The tree of results, differentiable with respect to the leaves.

        again: Computes them once more; `select(again())` is the same tree, or `again()`.
        """
        leaves = list(self.leaves.values())
        if not (self.deferred and leaves and torch.is_grad_enabled()):
            return results
        # Part by part: most parts are single tensors, which flatten fast.
        parts = results if type(results) is tuple else (results,)
        flat = [trees.flatten(part) for part in parts]
        every = [x for xs, _ in flat for x in xs]
        places = [
            k
            for k, x in enumerate(every)
            if isinstance(x, Tensor)
            and is_inexact(x)
            and id(x) not in self._constants
            # A pullback of a cotangent that requires grad has its graph.
            and (self._nested or not x.requires_grad)
        ]
        run = again if select is None else lambda: select(again())
        program = _Program(caller, self, run, places, leaves)
        xs = [every[k] for k in places]
        # What vmap and forward mode return has a graph to captured tensors.
        graphs = xs if self._nested else ()
        apply = _Lazy.apply if self._nested else _apply
        for k, y in zip(places, apply(program, xs, *leaves, *graphs), strict=True):
            every[k] = y
        left = iter(every)
        rebuilt = [trees.unflatten(treedef, [*islice(left, len(xs))]) for xs, treedef in flat]
        return tuple(rebuilt) if parts is results else rebuilt[0]

    @contextmanager
    def again(self) -> Iterator[None]:
        """Context of the second evaluation, which starts from the state of the first."""
        now = self._state.again()
        with ExitStack() as inside:
            inside.enter_context(self._casts.again())
            for context in (torch.inference_mode(False), torch.enable_grad(), PlainKernels()):
                inside.enter_context(context)
            try:
                self._state.restore()
                _here.first = self
                yield
            finally:
                _here.first = None
                now.restore()


class SecondEvaluation:
    """The evaluation in the backward pass, which builds the graph; it has the same methods."""

    deferred = False

    def __init__(self, first: LazyGraph) -> None:
        self.leaves: dict[int, Tensor] = {}
        self._left = list(first.values)

    def note(self, caller: str, output: Any, own: set[int]) -> None:
        """Raises if f returns other values than in the first evaluation."""
        every = [x for x in trees.flatten(output)[0] if isinstance(x, Tensor) and is_inexact(x)]
        for x in every if not is_nested() else ():
            known, version = self._left.pop(0) if self._left else (x, upstream.version_of(x))
            if upstream.version_of(known) == version and not _agree(x.detach(), known):
                raise GradtoolsError(
                    f"{caller}: f returns other values when it is computed again, to differentiate "
                    "a gradient. It depends on something that has changed since the first call, "
                    "or that it changes itself; pass that as an argument."
                )

    def attached(self, caller: str, again: Any, results: Any, select: Any = None) -> Any:
        """The results, which have a graph already."""
        return results


def _agree(a: Tensor, b: Tensor) -> bool:
    """Whether values are equal up to rounding: other kernels may have computed them."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    slack = float(torch.finfo(a.dtype).eps ** (2 / 3))
    size = float(b.abs().amax()) if b.numel() else 0.0
    return torch.allclose(a, b, rtol=slack, atol=slack * size, equal_nan=True)


class _Program:
    """The results of a derivative, which are computed again with a graph."""

    def __init__(
        self,
        caller: str,
        graph: LazyGraph,
        run: Callable[[], Any],
        places: list[int],
        leaves: list[Tensor],
    ) -> None:
        self._caller, self._graph, self._run, self._places = caller, graph, run, places
        self.leaves = leaves  # plain references, not saved tensors of autograd
        self._versions = [upstream.version_of(x) for x in leaves]

    def pulled(self, cts: Sequence[Tensor | None]) -> Sequence[Tensor | None]:
        """The pullback of the results at the leaves."""
        if [upstream.version_of(x) for x in self.leaves] != self._versions:
            raise GradtoolsError(
                f"{self._caller}: a parameter or an argument was changed in place after "
                f"{self._caller} was called (by a step of an optimizer?), and its result is "
                "differentiated with respect to it. Call backward() before that."
            )
        create = torch.is_grad_enabled()
        # The cotangents may be batched by vmap; f must not run under it.
        with upstream.temporarily_clear_interpreter_stack(), self._graph.again():
            every = trees.flatten(self._run())[0]
        outs = [every[k] for k in self._places]
        pairs = [(y, ct) for y, ct in zip(outs, cts, strict=True) if ct is not None]
        pairs = [(y, ct) for y, ct in pairs if y.requires_grad]
        if not pairs:
            return [None] * len(self.leaves)
        ys, seeds = zip(*pairs, strict=True)
        with _without_hooks(self.leaves):
            return torch.autograd.grad(ys, self.leaves, seeds, True, create, allow_unused=True)


@contextmanager
def _without_hooks(leaves: Sequence[Tensor]) -> Iterator[None]:
    """Empties the leaves' hooks, which the enclosing backward pass runs on the same gradients."""
    hooks = [h for x in leaves if (h := upstream.tensor_hooks(x))]
    held = [dict(h) for h in hooks]
    try:
        for h in hooks:
            h.clear()
        yield
    finally:
        for h, before in zip(hooks, held, strict=True):
            h.update(before)


class _Lazy(torch.autograd.Function):
    """The identity on results, with further edges to the leaves."""

    @staticmethod
    def forward(ctx: Any, program: _Program, results: list[Tensor], *inputs: Tensor) -> Any:
        ctx.program = program
        ctx.set_materialize_grads(False)
        return tuple([x.detach() for x in results])

    @staticmethod
    def backward(ctx: Any, *cts: Tensor | None) -> Any:
        grads = ctx.program.pulled(cts)
        needed = ctx.needs_input_grad[2 + len(grads) :]  # of results that have a graph
        own = [ct if n else None for ct, n in zip(cts, needed, strict=False)]
        return None, None, *grads, *own


_apply: Any = super(torch.autograd.Function, _Lazy).apply
"""`_Lazy.apply` of tensors that are no wrappers of an ended transform, which it looks for."""
