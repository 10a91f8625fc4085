"""Tangents along many directions: forward mode without a graph, for `mixed_partial`.

Under eager reverse mode one node attaches the results to their sources and evaluates the function
again in its backward pass (see `deferred_graphs`), so no graph is kept.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch

from gradtools.backend import Fun
from gradtools.errors import GradtoolsError
from gradtools.torch import _upstream as upstream
from gradtools.torch.autograd_graph import is_spent
from gradtools.torch.compiling import is_compiling
from gradtools.torch.deferred_graphs import ANOTHER_VALUE, Recomputed, agree, started
from gradtools.torch.engines import caller_of, jvp
from gradtools.torch.function_modes import OneTangent
from gradtools.torch.patches import Reads
from gradtools.torch.snapshots import Snapshot

Tensor = torch.Tensor
Tensors = list[Tensor]


def jvps(
    fun: Fun, leaves: Tensors, many: Sequence[Tensors]
) -> tuple[Tensors, Tensors, list[Tensors]]:
    """`jvp` along many tangents.

    A dual number has one tangent, so each takes an evaluation of its own; all start from the state
    before the first.
    """
    nested = upstream.peek_interpreter_stack() is not None or upstream.forward_level() >= 0
    if is_compiling() or nested or not torch.is_grad_enabled():
        return _pushed(fun, leaves, many)
    points = [leaves, *many]
    given = [x for xs in points for x in xs]
    start = started(given)
    reads = Reads(lambda x: x.requires_grad)
    with torch.no_grad():
        outs, extras, pushed = _pushed(fun, leaves, many, reads)
    own = {id(x) for x in given}
    # Without aliases of derivatives that the function took itself.
    others = [x for i, x in reads.seen.items() if i not in own and not is_spent(x)]
    sources = [x for x in given if x.requires_grad]
    if not (sources or others):
        return outs, extras, pushed
    values = [x.detach() for xs in (outs, *pushed) for x in xs]
    versions = [*map(upstream.version_of, values)]

    def evaluated(aliases: Sequence[Tensor]) -> list[Tensor]:
        left = iter(aliases)
        again = [[next(left) if x.requires_grad else x for x in xs] for xs in points]
        with torch.enable_grad():
            outs, _, pushed = _pushed(fun, again[0], again[1:])
        result = [x for xs in (outs, *pushed) for x in xs]
        for x, value, version in zip(result, values, versions, strict=True):
            unchanged = upstream.version_of(value) == version
            if unchanged and not agree(x.detach(), value, True):
                raise GradtoolsError(f"{program.caller}: {ANOTHER_VALUE}")
        return result

    program = Recomputed(caller_of(fun), start, evaluated, (fun, leaves), others)
    flat = program.attach([*sources, *others], values)
    rows = [flat[k : k + len(outs)] for k in range(0, len(flat), len(outs))] if outs else []
    return (rows[0], extras, rows[1:]) if outs else (outs, extras, pushed)


def _pushed(fun: Fun, leaves: Tensors, many: Sequence[Tensors], reads: Any = None) -> Any:
    restart = restarting(fun, leaves, len(many))
    result: list[Any] = []
    for tangents in many:
        restart()
        with nullcontext() if reads is None else reads:
            result.append(_stopping_at_no_grad(fun, leaves, tangents))
    outs, extras, _ = result[0]
    return outs, extras, [pushed for _, _, pushed in result]


def _stopping_at_no_grad(fun: Fun, leaves: Tensors, tangents: Tensors) -> Any:
    """`jvp`, in which what f computes under `no_grad` is a constant, as in reverse mode."""
    in_functorch = is_compiling() or upstream.peek_interpreter_stack() is not None
    if in_functorch or torch.is_grad_enabled():
        return jvp(fun, leaves, tangents)

    def run(*xs: Tensor) -> Any:
        if upstream.forward_level() < 0:
            return fun(*xs)
        with torch.enable_grad(), OneTangent():
            return fun(*xs)

    run.caller = caller_of(fun)  # type: ignore[attr-defined]
    return jvp(run, leaves, tangents)


def restarting(fun: Fun, leaves: Sequence[Tensor], count: int) -> Callable[[], None]:
    """Returns a function to call before each of `count` evaluations: restores the state of now."""
    if count < 2 or is_compiling():
        return lambda: None
    given = getattr(fun, "args", ()), getattr(fun, "kwargs", {})
    return Snapshot.of([*given, getattr(fun, "f", fun)], leaves).restore
