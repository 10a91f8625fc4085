"""Computes jvps along many tangents in forward mode without a graph, for `mixed_partial`.

In eager code, one autograd node attaches the results to the tensors on which they depend. If the
results are differentiated, the tangents are recomputed by double backward, as in
`recomputation.py`, so no graph is stored.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from gradtools.backend import Fun
from gradtools.errors import GradtoolsError
from gradtools.torch import _upstream as upstream
from gradtools.torch.autograd_graph import is_spent, leaves_of
from gradtools.torch.captured_tensors import as_read_now
from gradtools.torch.compiling import is_compiling
from gradtools.torch.engines import caller_of, jvp, linearize, pushed
from gradtools.torch.function_modes import OneTangent
from gradtools.torch.modes import NoForwardMode, has_checkpoint, unpacked
from gradtools.torch.recomputation import Program
from gradtools.torch.state import Held, RunState

Tensor = torch.Tensor
Tensors = list[Tensor]


def jvps(
    fun: Fun, leaves: Tensors, many: Sequence[Tensors]
) -> tuple[Tensors, Tensors, list[Tensors]]:
    """Computes `jvp` along each element of `many`.

    A dual number has one tangent, so each direction needs a separate evaluation; all evaluations
    start from the same random state and the same buffers.
    """
    nested = upstream.peek_interpreter_stack() is not None or upstream.forward_level() >= 0
    if is_compiling() or nested:
        return _by_engine(fun, leaves, many)
    held = _held(fun, leaves)
    state, mode, rows = RunState.now(held), OneTangent(), list[Any]()
    points = [x.detach() for x in leaves]
    try:
        with unpacked() as hooks, torch.enable_grad():  # grad mode is on, but no graph is recorded
            if has_checkpoint(hooks):  # a checkpoint would rerun all evaluations
                raise NoForwardMode
            for k, tangents in enumerate(many):
                if k:
                    state.restore()
                rows.append(pushed(fun, points, [t.detach() for t in tangents], mode))
    except NoForwardMode:  # forward mode is already active, or fun uses autograd's engine
        state.restore()
        return _by_engine(fun, leaves, many)
    except NotImplementedError as error:
        raise GradtoolsError(
            f"{caller_of(fun)}: G has no forward mode in PyTorch. PyTorch says: {error} "
            "Take the derivative with gt.grad through gt.frozen(G), which needs no forward mode."
        ) from error
    outs, extras, _ = rows[0]
    every, size = [y for ys in (outs, *[pushed for *_, pushed in rows]) for y in ys], len(outs)
    if torch.is_grad_enabled():
        program = _Pushed(caller_of(fun), fun, len(leaves), held, state)
        every = program.results([*leaves, *[t for ts in many for t in ts]], every, mode)
    found = [every[k : k + size] for k in range(0, len(every), max(size, 1))]
    return (found[0], extras, found[1:]) if size else ([], extras, [[] for _ in many])


class _Pushed(Program):
    """Program that returns outputs and tangents. Later runs compute tangents by double backward."""

    otherwise = True

    def __init__(self, caller: str, fun: Fun, count: int, held: Held, state: RunState) -> None:
        super().__init__(caller, partial(_by_pulling, fun, count), held, state.until(state.again()))

    def results(self, given: Tensors, known: Tensors, mode: OneTangent) -> Tensors:
        """Returns results that are differentiable with respect to `given` and `mode.read`."""
        xs = as_read_now(given)
        own = set(map(id, xs))
        # Tensors that the function created are excluded, such as aliases of a derivative inside of
        # the function.
        made = lambda x: x.grad_fn is not None and upstream.sequence_of(x.grad_fn) >= self.outside
        alive = as_read_now([x for ref in mode.read.values() if (x := ref()) is not None])
        # Function modes do not intercept the arguments of `Function.apply`, but the recorded graph
        # contains these arguments.
        seen = {id(x): x for x in (*alive, *leaves_of(known))}.values()
        read = [x for x in seen if not (id(x) in own or is_spent(x) or made(x))]
        if not (read or any(x.requires_grad for x in xs)):
            return known
        self.set_sources(read)
        self.known, self.verify = [y.detach() for y in known], True
        return self.attached(xs)


def _by_pulling(fun: Fun, size: int, xs: Sequence[Tensor]) -> Tensors:
    """Computes the outputs and, by transposing the pullback, the tangents."""
    xs = list(xs)
    with torch.enable_grad():
        outs, _, push = linearize(fun, xs[:size])
        rows = [push(xs[k : k + size]) for k in range(size, len(xs), size)]
    return [y for row in (outs, *rows) for y in row]


def _by_engine(fun: Fun, leaves: Tensors, many: Sequence[Tensors]) -> Any:
    restart, rows = restarting(fun, leaves, len(many)), []
    for tangents in many:
        restart()
        rows.append(jvp(fun, leaves, tangents))
    outs, extras, _ = rows[0]
    return outs, extras, [pushed for _, _, pushed in rows]


def restarting(fun: Fun, leaves: Sequence[Tensor], count: int) -> Callable[[], None]:
    """Returns a function that restores the state, to call before each of `count` evaluations."""
    if count < 2 or is_compiling():
        return lambda: None
    return RunState.now(_held(fun, leaves)).restore


def _held(fun: Fun, leaves: Sequence[Tensor]) -> Held:
    """Returns the `Held` of `fun`, of the user's function that it wraps, and of their arguments."""
    f = getattr(fun, "f", fun)
    given = [f, getattr(f, "f", None), *getattr(f, "opened_modules", ())]
    given += [*getattr(fun, "args", ()), getattr(fun, "kwargs", {})]
    return Held(given, {x.device.type for x in leaves})
