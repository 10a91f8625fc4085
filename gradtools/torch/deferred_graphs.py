"""Lazy graphs for derivatives at modules: the graph is built in the backward pass, if there is one.

The graph of a derivative costs as much as the derivative, and a training step does not need it. So
an operator computes its results at the detached parameters p of a module, and one node attaches
them to p, as `torch.utils.checkpoint` does:

    results = g(p)        backward: evaluates g again with a graph, and pulls back

The second evaluation starts from the random state, buffers and modes of the first, and its side
effects are undone. It must reproduce f's values, so a change of other state raises.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from gradtools.errors import GradtoolsError
from gradtools.torch import _upstream as upstream
from gradtools.torch.functorch_wrappers import is_wrapped
from gradtools.torch.modes import Modes
from gradtools.torch.operation_marks import OWN_HOOKS
from gradtools.torch.randomness import Randomness
from gradtools.torch.rerunning import put_back

Tensor = torch.Tensor
Start = tuple[Modes, Randomness | None]


def started(xs: Sequence[Tensor]) -> Start:
    """The current modes and random state, for a function of these tensors."""
    devices = list({x.device: x for x in xs}.values())
    return Modes.now({x.device.type for x in devices}), Randomness.now(devices)


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
