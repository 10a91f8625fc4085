"""Lazy graphs for derivatives at modules: the graph is built in the backward pass, if there is one.

The graph of a derivative costs as much as the derivative, and a training step does not need it. So
an operator computes its results at the detached parameters p of a module, and one node attaches
them to p, as `torch.utils.checkpoint` does:

    results = g(p)        backward: evaluates g again with a graph, and pulls back

The second evaluation starts from the random state, buffers and modes of the first, and its side
effects are undone. It must reproduce f's values, so a change of other state raises.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
from torch import nn

from gradtools.errors import GradtoolsError
from gradtools.torch import _upstream as upstream
from gradtools.torch import trees
from gradtools.torch.compiling import is_compiling
from gradtools.torch.function_modes import PlainKernels
from gradtools.torch.functorch_wrappers import is_inexact, is_wrapped
from gradtools.torch.modes import Modes
from gradtools.torch.operation_marks import OWN_HOOKS
from gradtools.torch.randomness import Randomness
from gradtools.torch.replaying.recomputing import is_recorded
from gradtools.torch.rerunning import put_back
from gradtools.torch.rules.checking import value_of

Tensor = torch.Tensor
Start = tuple[Modes, Randomness | None]


class _Recomputing(threading.local):
    """The pending second evaluation of this thread, until the operator's call takes it."""

    pending: SecondEvaluation | None = None


_here = _Recomputing()


def current() -> DeferredGraph | SecondEvaluation | None:
    """How a call that begins here treats parameters; None if graphs are built eagerly.

    They are built eagerly inside of functorch's transforms and of forward mode, whose levels no
    longer exist when a backward pass runs, and where a recorder follows them.
    """
    if _here.pending is not None:
        pending, _here.pending = _here.pending, None
        return pending
    if not torch.is_grad_enabled() or is_compiling() or is_recorded():
        return None
    nested = upstream.peek_interpreter_stack() is not None or upstream.forward_level() >= 0
    return None if nested else DeferredGraph()


def started(xs: Sequence[Tensor]) -> Start:
    """The current modes and random state, for a function of these tensors."""
    devices = list({x.device: x for x in xs}.values())
    return Modes.now({x.device.type for x in devices}), Randomness.now(devices)


class DeferredGraph:
    """The first evaluation of a derivative at modules; records the state for a second one."""

    def __init__(self) -> None:
        self.parameters: list[Tensor] = []
        self.saved_buffers: dict[int, dict[str, Tensor]] = {}
        self.values: list[tuple[Tensor, int]] = []
        self._constants: list[Tensor] = []  # outputs of f that do not require grad
        self.start: Start | None = None

    def alias(self, p: Tensor) -> Tensor:
        """The detached alias of a parameter at which the first evaluation runs."""
        if not isinstance(p, nn.Parameter):  # an alias of an outer derivative
            return p
        self.parameters.append(p)
        return p.detach()

    def buffers(self, module: nn.Module, own: dict[str, Tensor]) -> dict[str, Tensor]:
        """The buffers for the copy of a module; those of a training module are saved."""
        if self.start is None:
            self.start = started(self.parameters)
        if module.training and id(module) not in self.saved_buffers:
            clones = upstream.clone_each([b.detach() for b in own.values()])
            self.saved_buffers[id(module)] = dict(zip(own, clones, strict=True))
        return own

    def note(self, output: Any) -> None:
        """Records f's outputs."""
        for y in _tensors(output):
            value = value_of(y)
            if value is not None:
                self.values.append((value, upstream.version_of(value)))
            if not (is_wrapped(y) or upstream.forward_level() >= 0 or y.requires_grad):
                self._constants.append(y)

    def attached(
        self,
        caller: str,
        again: Callable[[], Any],
        results: Any,
        select: Callable[[Any], Any] | None = None,
    ) -> Any:
        """The tree of results, differentiable with respect to the parameters.

        again: Computes them once more; `select(again())` is the same tree, or `again()`.
        """
        ps = self.parameters
        if not (ps and torch.is_grad_enabled()):
            return results
        # Part by part: most parts are single tensors, which flatten fast.
        parts = results if type(results) is tuple else (results,)
        flat = [trees.flatten(part) for part in parts]
        leaves = [x for xs, _ in flat for x in xs]
        constants = {id(x) for x in self._constants}
        inexact = [(k, x) for k, x in enumerate(leaves) if isinstance(x, Tensor) and is_inexact(x)]
        places = [k for k, x in inexact if id(x) not in constants]
        run = again if select is None else lambda: select(again())
        program = Recomputed(
            caller, self.start, lambda xs: self._evaluated(caller, run, xs, places), (run, ps)
        )
        outs = program.attach(ps, [leaves[k] for k in places])
        for k, y in zip(places, outs, strict=True):
            leaves[k] = y
        left = iter(leaves)
        rebuilt = [trees.unflatten(treedef, [*islice(left, len(xs))]) for xs, treedef in flat]
        return tuple(rebuilt) if parts is results else rebuilt[0]

    def _evaluated(
        self, caller: str, run: Callable[[], Any], aliases: Sequence[Tensor], places: list[int]
    ) -> list[Tensor]:
        """The results at these places, with a graph from aliases of the parameters."""
        _here.pending = SecondEvaluation(caller, self, aliases)
        try:
            with PlainKernels():  # a second derivative follows
                leaves = trees.flatten(run())[0]
        finally:
            _here.pending = None
        return [leaves[k] for k in places]


class SecondEvaluation:
    """The evaluation of a derivative at modules that builds the graph; it has the same methods."""

    def __init__(self, caller: str, first: DeferredGraph, aliases: Sequence[Tensor]) -> None:
        self._caller, self._first, self._left = caller, first, list(first.values)
        pairs = zip(first.parameters, aliases, strict=True)
        self._aliases = {id(p): x for p, x in pairs}

    def alias(self, p: Tensor) -> Tensor:
        """The alias of a parameter in this evaluation."""
        return self._aliases.get(id(p), p)

    def buffers(self, module: nn.Module, own: dict[str, Tensor]) -> dict[str, Tensor]:
        """Copies of the buffers, with their values before the first evaluation."""
        before = self._first.saved_buffers.get(id(module), own)
        return {name: before.get(name, b).clone() for name, b in own.items()}

    def note(self, output: Any) -> None:
        """Raises if f returns other values than in the first evaluation."""
        for y in _tensors(output):
            value = value_of(y)
            if value is None or not self._left:
                continue
            known, version = self._left.pop(0)
            # Under vmap, what is tracked may take another kernel, which rounds differently.
            same = upstream.version_of(known) != version or agree(value, known, True)
            if not same:
                raise GradtoolsError(
                    f"{self._caller}: {ANOTHER_VALUE} Pass that as an argument; or differentiate "
                    "with respect to a dict of the parameters that require grad "
                    "(torch.func.functional_call takes one): then the graph is built at once."
                )

    def attached(self, caller: str, again: Any, results: Any, select: Any = None) -> Any:
        """The results, which have a graph already."""
        return results


def _tensors(tree: Any) -> list[Tensor]:
    leaves = trees.flatten(tree)[0]
    return [x for x in leaves if isinstance(x, Tensor) and is_inexact(x)]


# --- results whose graph is built in the backward pass ---------------------------------------


@dataclass(eq=False, repr=False)
class Recomputed:
    """Results of a derivative, recomputed with a graph in the backward pass."""

    caller: str  # the operator's name
    start: Start | None  # of the first evaluation
    evaluated: Callable[[Sequence[Tensor]], list[Tensor]]  # the results at aliases of the sources
    # The function and the tensors that reach all state which an evaluation may change.
    roots: tuple[Callable[..., Any], Sequence[Tensor]]
    captured: Sequence[Tensor] = ()  # the last sources, which f closes over; no aliases of them

    def attach(self, sources: Sequence[Tensor], results: Sequence[Tensor]) -> list[Tensor]:
        """The results, attached to the sources by one node, which recomputes them."""
        self.sources = list(sources)  # plain references, not saved tensors of autograd
        self._source_versions = [*map(upstream.version_of, sources)]
        apply: Any = _apply if not any(map(is_wrapped, (*sources, *results))) else _Deferred.apply
        if not any(x.requires_grad for x in results):
            return list(apply(self, results, *sources))
        return list(apply(self, (), *sources, *results))

    def pulled(self, cts: Sequence[Tensor | None]) -> Sequence[Tensor | None]:
        """The pullback of the results at the sources."""
        if [*map(upstream.version_of, self.sources)] != self._source_versions:
            raise GradtoolsError(
                f"{self.caller}: a parameter or an argument was changed in place after "
                f"{self.caller} was called (by a step of an optimizer?), and its result is "
                "differentiated with respect to it. Call backward() before that."
            )
        create = torch.is_grad_enabled()
        given = self.sources[: len(self.sources) - len(self.captured)]
        # The cotangents may be batched by vmap; f must not run under it.
        with self._from_the_start():
            with upstream.temporarily_clear_interpreter_stack():
                aliases = [p.view_as(p) if create else p.detach().requires_grad_() for p in given]
                ys = self.evaluated(aliases)
            every = zip(ys, cts, strict=True)
            pairs = [(y, ct) for y, ct in every if ct is not None and y.requires_grad]
            if not pairs:
                return [None] * len(self.sources)
            outs, grads = zip(*pairs, strict=True)
            ends = (*aliases, *self.captured)
            # The pass stops at the ends, whose own graphs belong to others.
            nodes = {x.grad_fn for x in ends if x.grad_fn is not None}
            handles = [node.register_prehook(lambda cts: (None,) * len(cts)) for node in nodes]
            OWN_HOOKS[0] += len(handles)
            try:
                return torch.autograd.grad(outs, ends, grads, True, create, allow_unused=True)
            finally:
                for handle in handles:
                    handle.remove()

    @contextmanager
    def _from_the_start(self) -> Iterator[None]:
        """Context that restores the state of the first evaluation, and undoes side effects.

        It is entered and exited beneath functorch's transforms; the body runs under them.
        """
        inside = ExitStack()
        try:
            with upstream.temporarily_clear_interpreter_stack():
                inside.enter_context(put_back(*self.roots))
                inside.enter_context(torch.inference_mode(False))
                modes, randomness = self.start or (None, None)
                if randomness is not None:
                    randomness.restore()
                if modes is not None:
                    inside.enter_context(modes.restored())
            yield
        finally:
            with upstream.temporarily_clear_interpreter_stack():
                inside.close()


ANOTHER_VALUE = (
    "to differentiate its result f is evaluated again, and now returns another value. It depends "
    "on something that has changed since the first call, or that does not repeat."
)


def agree(a: Tensor, b: Tensor, rounding: bool = False) -> bool:
    """Whether values are equal; up to rounding on accelerators, or if `rounding` allows it."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    if a.device.type == "cpu" and not rounding:
        return torch.allclose(a, b, rtol=0.0, atol=0.0, equal_nan=True)
    slack = float(torch.finfo(a.dtype).eps ** (2 / 3))
    size = float(b.abs().amax()) if b.numel() else 0.0
    return torch.allclose(a, b, rtol=slack, atol=slack * size, equal_nan=True)


class _Deferred(torch.autograd.Function):
    """The identity on results, with further edges to the sources.

    `constants` are the results if they have no graph of their own.
    """

    @staticmethod
    def forward(ctx: Any, program: Recomputed, constants: Any, *tensors: Tensor) -> Any:
        ctx.program = program
        ctx.set_materialize_grads(False)
        return tuple([x.detach() for x in constants or tensors[len(program.sources) :]])

    @staticmethod
    def backward(ctx: Any, *cts: Tensor | None) -> Any:
        grads = ctx.program.pulled(cts)
        needs = ctx.needs_input_grad[2 + len(grads) :]
        own = [ct if needed else None for ct, needed in zip(cts, needs, strict=False)]
        return None, None, *grads, *own


_apply: Any = super(torch.autograd.Function, _Deferred).apply
"""`_Deferred.apply` of tensors that are no wrappers of an ended transform, which it looks for."""
