"""`gt.compile` in PyTorch: a compiled function with the derivatives that compiled code lacks.

Forward mode and double backward run the function eagerly.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any

import torch
from torch.autograd.graph import GradientEdge, get_gradient_edge

from gradtools.arguments.wording import name_of
from gradtools.errors import GradtoolsError, warn_once
from gradtools.torch import _upstream as upstream
from gradtools.torch import trees
from gradtools.torch.autograd_graph import leaves_of
from gradtools.torch.compiling import NO_DOUBLE_BACKWARD, is_compiling, runs_as_written
from gradtools.torch.known_errors import explain
from gradtools.torch.randomness import Randomness

Tensor = torch.Tensor


def compiled(f: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    """`torch.compile(f)`, which runs f eagerly in forward mode and for a double backward.

    PyTorch's compiled code supports neither, and silently drops tangents.
    """
    code = torch.compile(f, **options)
    if isinstance(f, torch.nn.Module):
        return code

    def run(*args: Any, **kwargs: Any) -> Any:
        try:
            return code(*args, **kwargs)
        except RuntimeError as error:
            explain("compile", error)
            raise

    @wraps(f)
    def call(*args: Any, **kwargs: Any) -> Any:
        if is_compiling():
            return run(*args, **kwargs)
        if upstream.forward_level() >= 0 or runs_as_written():
            return f(*args, **kwargs)
        transformed = upstream.peek_interpreter_stack() is not None
        if options.get("fullgraph") or not torch.is_grad_enabled() or transformed:
            return run(*args, **kwargs)
        given = [x for x in trees.flatten((args, kwargs))[0] if isinstance(x, Tensor)]
        before = Randomness.now(given)
        outs, treedef = trees.flatten(run(*args, **kwargs))
        tracked = [i for i, y in enumerate(outs) if isinstance(y, Tensor) and y.requires_grad]
        if not tracked:
            return trees.unflatten(treedef, outs)
        leaves = leaves_of([outs[i] for i in tracked])
        own = {id(x): x for x in [*given, *leaves] if x.requires_grad}

        def run_eagerly() -> list[Tensor]:
            if draws:
                raise GradtoolsError(
                    f"compile: {name_of(f)} draws random numbers, and outside of the compiled "
                    "graph it would draw others, so its double backward cannot be had by running "
                    "it again. Compile the derivative instead: " + NO_DOUBLE_BACKWARD
                )
            eager = trees.flatten(f(*args, **kwargs))[0]
            return [eager[i] for i in tracked]

        draws = before is not None and not before.is_unchanged()
        ys = [outs[i] for i in tracked]
        edges = [get_gradient_edge(y) for y in ys]
        twice = _Twice.apply(name_of(f), run_eagerly, edges, ys, *own.values())
        for i, y in zip(tracked, twice, strict=True):
            outs[i] = y
        return trees.unflatten(treedef, outs)

    return call


class _Twice(torch.autograd.Function):
    """A compiled function's outputs, whose backward runs f eagerly if it is differentiated."""

    @staticmethod
    def forward(
        ctx: Any,
        name: str,
        run_eagerly: Callable[[], list[Tensor]],
        edges: list[GradientEdge],
        outs: list[Tensor],
        *inputs: Tensor,
    ) -> Any:
        ctx.name, ctx.run_eagerly, ctx.edges = name, run_eagerly, edges  # where its graph ends
        ctx.save_for_backward(*inputs)
        return tuple([y.detach() for y in outs])

    @staticmethod
    def backward(ctx: Any, *cts: Tensor) -> Any:
        inputs, create = ctx.saved_tensors, torch.is_grad_enabled()
        keep = upstream.keeps_graph()
        if create:
            warn_once(
                ("compile", ctx.name),
                f"compile: {ctx.name} is run again outside of the compiled graph, because its "
                "derivative is taken with a graph of its own and PyTorch has no compiled double "
                "backward (pytorch#91469). The numbers are right; compiling the derivative instead "
                "is faster.",
            )
        outs: Sequence[Any] = ctx.run_eagerly() if create else ctx.edges
        if not keep:
            ctx.edges = []
        pairs = zip(outs, cts, strict=True)
        kept = [(y, ct) for y, ct in pairs if not isinstance(y, Tensor) or y.requires_grad]
        ends, seeds = [y for y, _ in kept], [ct for _, ct in kept]
        grad = torch.autograd.grad
        grads = grad(ends, inputs, seeds, create or keep, create, allow_unused=True)
        return None, None, None, None, *grads
