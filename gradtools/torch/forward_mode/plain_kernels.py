"""Fused kernels without forward mode: a fallback to PyTorch's plain ones.

Fused attention, and recurrent layers on the CPU, have no forward mode. Backend flags select their
kernels. So if one raises, that single operation is repeated with the flags off, from the random
state before it; the surrounding function runs once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from gradtools.backend import Fun
from gradtools.errors import GradtoolsError, is_of, warn_once
from gradtools.torch import _upstream as upstream
from gradtools.torch.compiling import is_compiling
from gradtools.torch.deferred_graphs import ANOTHER_VALUE, Recomputed, agree, started
from gradtools.torch.engines import jvp
from gradtools.torch.known_errors import NO_FORWARD_MODE, kernel_without
from gradtools.torch.modes import Modes
from gradtools.torch.open_derivatives import caller_of, is_spent
from gradtools.torch.patches import Reads
from gradtools.torch.randomness import Randomness
from gradtools.torch.state import Snapshot

Tensor = torch.Tensor
Tensors = list[Tensor]

_CHOSEN_BY_SWITCHES = frozenset(
    ("scaled_dot_product_attention", "multi_head_attention_forward")
    + ("lstm", "gru", "rnn_tanh", "rnn_relu")
)


def jvps(
    fun: Fun, leaves: Tensors, many: Sequence[Tensors]
) -> tuple[Tensors, Tensors, list[Tensors]]:
    """`jvp` along many tangents, with the fallback to plain kernels.

    A dual number has one tangent, so each tangent takes an evaluation of its own; all start from
    the state before the first. Under eager reverse mode no graph is recorded: one node attaches the
    results to their sources and evaluates the function again in its backward (see
    `deferred_graphs`).
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
    with nullcontext() if is_compiling() else _ByAnyKernel(caller_of(fun)):
        for tangents in many:
            restart()
            with nullcontext() if reads is None else reads:
                result.append(jvp(fun, leaves, tangents))
    outs, extras, _ = result[0]
    return outs, extras, [pushed for _, _, pushed in result]


def restarting(fun: Fun, leaves: Sequence[Tensor], count: int) -> Callable[[], None]:
    """Returns a function to call before each of `count` evaluations: restores the state of now."""
    if count < 2 or is_compiling():
        return lambda: None
    given = getattr(fun, "args", ()), getattr(fun, "kwargs", {})
    return Snapshot.of([*given, getattr(fun, "f", fun)], leaves).restore


class _ByAnyKernel(TorchFunctionMode):
    """A mode in which an operation without forward mode falls back to another kernel, warning."""

    def __init__(self, caller: str) -> None:
        super().__init__()
        self.caller = caller

    def __torch_function__(self, fun: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if getattr(fun, "__name__", "") not in _CHOSEN_BY_SWITCHES:
            return fun(*args, **kwargs)
        kinds = {
            x.device.type for x in upstream.tree_leaves((args, kwargs)) if isinstance(x, Tensor)
        }
        streams = Randomness.everywhere(kinds)
        try:
            return fun(*args, **kwargs)
        except NotImplementedError as error:
            if not is_of("torch", error):
                raise
            kernel = kernel_without(NO_FORWARD_MODE, error) or fun.__name__
        streams.restore()
        with Modes.now(kinds).by_other_kernels().restored():
            result = fun(*args, **kwargs)
        warn_once(
            (self.caller, kernel),
            f"{self.caller}: {kernel} has no forward mode; there PyTorch's own alternative takes "
            "its place.",
        )
        return result
