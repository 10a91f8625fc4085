"""Derivatives at modules that are differentiable again, by a graph that is built when it is used.

The graph of a derivative costs as much as the derivative, and a training step does not need it. So
an operator computes its results at the detached parameters p of a module, and one node attaches
them to p, as `torch.utils.checkpoint` would:

    results = g(p)        backward: g is evaluated again, with a graph, and that is pulled back

What is evaluated again starts from the random streams, buffers and modes of the first evaluation,
and leaves no effects. The values of f are compared, so other state of f is noticed.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn

from gradtools.errors import GradtoolsError
from gradtools.torch import _upstream as upstream
from gradtools.torch import trees
from gradtools.torch.compiling import is_compiling
from gradtools.torch.functorch_wrappers import is_inexact, is_wrapped
from gradtools.torch.modes import Modes
from gradtools.torch.randomness import Randomness
from gradtools.torch.rerunning import put_back
from gradtools.torch.rules.checking import value_of

Tensor = torch.Tensor


class _Recomputing(threading.local):
    """The recomputation in this thread that no call has taken up yet."""

    pending: RecomputedDerivative | None = None


_here = _Recomputing()


def current() -> DeferredGraph | RecomputedDerivative | None:
    """How a call that begins here treats parameters; None where graphs are built at once.

    So they are inside of functorch's transforms and of forward mode, whose levels are gone when a
    backward pass runs.
    """
    if _here.pending is not None:
        pending, _here.pending = _here.pending, None
        return pending
    if not torch.is_grad_enabled() or is_compiling():
        return None
    nested = upstream.peek_interpreter_stack() is not None or upstream.forward_level() >= 0
    return None if nested else DeferredGraph()


class DeferredGraph:
    """The first evaluation of a derivative at modules, and what a second one needs."""

    def __init__(self) -> None:
        self._parameters: list[Tensor] = []
        self._buffers: dict[int, dict[str, Tensor]] = {}
        self._values: list[tuple[Tensor, int]] = []
        self._constants: list[Tensor] = []  # outputs of f that depend on nothing
        self._start: tuple[Modes, Randomness | None] | None = None

    def alias(self, p: Tensor) -> Tensor:
        """A parameter as the first evaluation sees it."""
        if not isinstance(p, nn.Parameter):  # an alias of a derivative around this one
            return p
        self._parameters.append(p)
        return p.detach()

    def buffers(self, module: nn.Module, own: dict[str, Tensor]) -> dict[str, Tensor]:
        """The buffers that a copy of a module gets, before f is evaluated at it."""
        if self._start is None:
            devices = list({x.device: x for x in self._parameters}.values())
            kinds = {x.device.type for x in devices}
            self._start = Modes.now(kinds), Randomness.now(devices)
        if module.training and id(module) not in self._buffers:
            self._buffers[id(module)] = {name: b.detach().clone() for name, b in own.items()}
        return own

    def note(self, output: Any) -> None:
        """Notes what f returned."""
        for y in _tensors(output):
            value = value_of(y)
            if value is not None:
                self._values.append((value, upstream.version_of(value)))
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

        again: `select(again())` computes the same tree.
        """
        if not (self._parameters and torch.is_grad_enabled()):
            return results
        leaves, treedef = trees.flatten(results)
        constants = {id(x) for x in self._constants}
        places = [
            k
            for k, x in enumerate(leaves)
            if isinstance(x, Tensor) and is_inexact(x) and id(x) not in constants
        ]
        run = again if select is None else partial(_selected, select, again)
        program = RecomputedDerivative(caller, self, places, run)
        chosen = [leaves[k] for k in places]
        outs = _Deferred.apply(program, len(self._parameters), *self._parameters, *chosen)
        for k, y in zip(places, outs, strict=True):
            leaves[k] = y
        return trees.unflatten(treedef, leaves)


class RecomputedDerivative:
    """Results of a derivative, computed once more with a graph."""

    def __init__(
        self, caller: str, first: DeferredGraph, places: list[int], again: Callable[[], Any]
    ) -> None:
        self.caller, self._first, self._places, self._again = caller, first, places, again
        self._aliases: dict[int, Tensor] = {}

    def pulled(
        self, parameters: Sequence[Tensor], cts: Sequence[Tensor | None]
    ) -> Sequence[Tensor | None]:
        """The pullback of the results at the parameters."""
        create = torch.is_grad_enabled()
        with self._from_the_start():
            aliases = [p.view_as(p) if create else p.detach().requires_grad_() for p in parameters]
            with upstream.temporarily_clear_interpreter_stack():
                ys = self._evaluated(aliases)
            pairs = [
                (y, ct) for y, ct in zip(ys, cts, strict=True) if ct is not None and y.requires_grad
            ]
            if not pairs:
                return [None] * len(aliases)
            outs, given = zip(*pairs, strict=True)
            return torch.autograd.grad(outs, aliases, given, create_graph=create, allow_unused=True)

    def _evaluated(self, aliases: Sequence[Tensor]) -> list[Tensor]:
        first = self._first
        pairs = zip(first._parameters, aliases, strict=True)
        self._aliases, self._left = {id(p): x for p, x in pairs}, list(first._values)
        _here.pending = self
        try:
            leaves = trees.flatten(self._again())[0]
        finally:
            _here.pending, self._aliases = None, {}
        return [leaves[k] for k in self._places]

    @contextmanager
    def _from_the_start(self) -> Iterator[None]:
        """Inside, f may be evaluated as the first time; its effects are undone."""
        with put_back(self._again, self._first._parameters), torch.inference_mode(False):
            if self._first._start is None:
                yield
                return
            modes, randomness = self._first._start
            if randomness is not None:
                randomness.restore()
            with modes.again():
                yield

    def alias(self, p: Tensor) -> Tensor:
        """The tensor in the place of a parameter."""
        return self._aliases.get(id(p), p)

    def buffers(self, module: nn.Module, own: dict[str, Tensor]) -> dict[str, Tensor]:
        """Copies of the buffers, as they were before the first evaluation."""
        before = self._first._buffers.get(id(module), own)
        return {name: before.get(name, b).clone() for name, b in own.items()}

    def note(self, output: Any) -> None:
        """Raises if f returns other values than the first time."""
        for y in _tensors(output):
            value = value_of(y)
            if value is None or not self._left:
                continue
            known, version = self._left.pop(0)
            if upstream.version_of(known) == version and not _agree(value, known):
                raise GradtoolsError(
                    f"{self.caller}: to differentiate its result with respect to the module's "
                    f"parameters f is evaluated again, and now returns another value. It depends "
                    "on something that has changed since the first call, or that does not repeat. "
                    "Pass that as an argument; or differentiate with respect to a dict of the "
                    "parameters that require grad (torch.func.functional_call takes one): then "
                    "the graph is built at once."
                )

    def attached(self, caller: str, again: Any, results: Any, select: Any = None) -> Any:
        """The results, which have their graph."""
        return results


def _selected(select: Callable[[Any], Any], again: Callable[[], Any]) -> Any:
    return select(again())


def _tensors(tree: Any) -> list[Tensor]:
    leaves = trees.flatten(tree)[0]
    return [x for x in leaves if isinstance(x, Tensor) and is_inexact(x)]


def _agree(a: Tensor, b: Tensor) -> bool:
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    slack = 0.0 if a.device.type == "cpu" else float(torch.finfo(a.dtype).eps ** (2 / 3))
    return torch.allclose(a, b, rtol=slack, atol=0.0, equal_nan=True)


class _Deferred(torch.autograd.Function):
    """The identity on results, whose graph leads to parameters as well."""

    @staticmethod
    def forward(ctx: Any, program: RecomputedDerivative, count: int, *tensors: Tensor) -> Any:
        ctx.program, ctx.count = program, count
        ctx.save_for_backward(*tensors[:count])
        ctx.set_materialize_grads(False)
        return tuple([x.detach() for x in tensors[count:]])

    @staticmethod
    def backward(ctx: Any, *cts: Tensor | None) -> Any:
        program = ctx.program
        try:
            parameters = ctx.saved_tensors
        except RuntimeError as error:
            raise GradtoolsError(
                f"{program.caller}: a parameter of the module was changed in place after "
                f"{program.caller} was called (by a step of an optimiser?), and its result is "
                "differentiated with respect to the parameters. Call backward() before the step."
            ) from error
        grads = program.pulled(parameters, cts)
        needs = ctx.needs_input_grad[2 + ctx.count :]
        own = [ct if needed else None for ct, needed in zip(cts, needs, strict=True)]
        return None, None, *grads, *own
