"""Forward mode through the wrappers of training frameworks: checkpoints, DDP, FSDP2.

`torch.utils.checkpoint` recomputes a layer in the backward pass, after the dual level was left:
f(x) has no tangent there, and saves other tensors than the first pass did. Here the checkpoint also
saves the tangents of its inputs, and recomputes f(x, dx) in a dual level of its own. See
`checkpoints.py` for `gt.checkpoint`.

DistributedDataParallel and FSDP2 pass activations through Functions that are identities and do
their bookkeeping in the backward pass. Primals and tangents go through one such call together,

    (y, dy) = identity(x, dx)

so that the bookkeeping waits for the gradients of both: FSDP2 frees and reduces a layer's
parameters there. It gathers them in a hook on the layer's output, which is registered on the
tangent as well.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from gradtools.errors import GradtoolsError
from gradtools.rules import captured_objects, replaced_at
from gradtools.torch import _upstream as upstream
from gradtools.torch.forward_mode.no_grad import NoGradStopsTangents
from gradtools.torch.functorch_wrappers import is_inexact
from gradtools.torch.modes import NoForwardMode, dual_level
from gradtools.torch.patches import (
    Substituted,
    checkpoints_taken,
    flex_validated,
    functions_applied,
)

Tensor = torch.Tensor


class _Thread(threading.local):
    """The mode of the pass of tangents with a graph in this thread, or None."""

    mode: NoGradStopsTangents | None = None


_thread = _Thread()


def mode_of_pass() -> NoGradStopsTangents | None:
    """The mode of the pass of tangents with a graph in this thread; None without any."""
    return _thread.mode


@contextmanager
def pushed_through(mode: TorchFunctionMode, caller: str, keep: bool) -> Iterator[None]:
    """Context in which tangents pass through checkpoints and the Functions of DDP and FSDP2.

    Args:
        mode: The pass's mode.
        caller: The operator's name.
        keep: Whether the tangents have a graph.
    """
    before, _thread.mode = (
        _thread.mode,
        mode if isinstance(mode, NoGradStopsTangents) and keep else None,
    )
    with ExitStack() as inside:
        inside.callback(setattr, _thread, "mode", before)
        if keep:
            inside.enter_context(checkpoints_taken(_Checkpoints(caller)))
            inside.enter_context(flex_validated(_validated))
        if upstream.bookkeeping():
            inside.enter_context(functions_applied(_applied, of_rules=False))
        yield


def tangent_of(x: Any) -> Tensor | None:
    if not isinstance(x, Tensor) or upstream.is_wrapped(x) or not is_inexact(x):
        return None
    tangent: Tensor | None = upstream.unpack_dual(x, level=upstream.forward_level())[1]
    return tangent


def captured_by(fun: Any) -> list[tuple[Tensor, Tensor]]:
    """The tensors with tangents that a function closes over, and their tangents."""
    moves = lambda x: tangent_of(x) is not None
    tensors = captured_objects([fun], moves, Tensor, False)
    return [(x, tangent) for x in tensors if (tangent := tangent_of(x)) is not None]


def primal_of(x: Tensor) -> Tensor:
    primal: Tensor = upstream.unpack_dual(x, level=0)[0]
    return primal


def dual_at(x: Tensor, tangent: Tensor) -> Tensor:
    return upstream.make_dual(x, tangent, level=upstream.forward_level())


# --- DDP and FSDP2 -------------------------------------------------------------------------------


def _applied(owner: Any, beneath: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Applies a bookkeeping Function (an identity) to primals and tangents together."""
    if owner not in upstream.bookkeeping() or upstream.forward_level() < 0:
        return beneath(*args, **kwargs)
    state, *xs = args
    tangents = [tangent_of(x) for x in xs]
    moved = [i for i, tangent in enumerate(tangents) if tangent is not None]
    if not moved:
        return beneath(*args, **kwargs)
    primals = replaced_at(xs, moved, [primal_of(xs[i]) for i in moved])
    result = beneath(state, *primals, *[tangents[i] for i in moved])
    outs = list(result[: len(xs)])
    for i, tangent in zip(moved, result[len(xs) :], strict=True):
        outs[i] = dual_at(outs[i], tangent)
    return tuple(outs)


def _validated(query: Tensor, beneath: Callable[..., Any], args: Any, kwargs: Any) -> None:
    """Skips `flex_attention`'s device check if there is a tangent: its plain code runs then."""
    if upstream.forward_level() < 0 or all(tangent_of(x) is None for x in (query, *args)):
        beneath(*args, **kwargs)


# --- torch.utils.checkpoint ----------------------------------------------------------------------


class _Checkpoints:
    """Replaces calls of `torch.utils.checkpoint` inside of one call of an operator."""

    def __init__(self, caller: str) -> None:
        self.caller = caller

    def __call__(self, fun: Any, beneath: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Calls the checkpoint with primals and tangents as inputs, if there are tangents."""
        if upstream.forward_level() < 0 or not torch.is_grad_enabled():
            return beneath(*args, **kwargs)
        *inputs, passes = upstream.checkpoint_call(args, kwargs)
        leaves, treedef = upstream.tree_flatten(tuple(inputs))
        tangents = [tangent_of(x) for x in leaves]
        moved = [i for i, tangent in enumerate(tangents) if tangent is not None]
        captured = captured_by(fun)
        if not moved and not captured:
            return beneath(*args, **kwargs)
        count = len(leaves)

        def again(*saved: Any) -> None:
            with level_of_tangents(self.caller):
                with upstream.disable_current_modes():  # such as a FLOP counter
                    pairs = zip(moved, saved[count:], strict=True)
                    duals = [dual_at(saved[i], tangent) for i, tangent in pairs]
                xs, named = upstream.tree_unflatten(
                    replaced_at(saved[:count], moved, duals), treedef
                )
                # Inside of the pass itself they still have their tangents.
                gone = [(x, tangent) for x, tangent in captured if tangent_of(x) is None]
                others = [dual_at(x, tangent) for x, tangent in gone]
                with Substituted([x for x, _ in gone], others) if gone else nullcontext():
                    fun(*xs, **named)

        primals = [primal_of(leaves[i]) for i in moved]
        return passes(again, *replaced_at(leaves, moved, primals), *[tangents[i] for i in moved])


@contextmanager
def level_of_tangents(caller: str) -> Iterator[Any]:
    """The mode of the current dual level, or of a new one, set up as in the first pass."""
    if upstream.forward_level() >= 0:
        yield mode_of_pass()
        return
    try:
        with (
            dual_level(),
            NoGradStopsTangents(False, True, caller) as mode,
            pushed_through(mode, caller, True),
        ):
            yield mode
    except NoForwardMode:
        raise GradtoolsError(
            f"{caller}: f holds a checkpoint, which pushes tangents again in the backward pass, "
            "and another thread is in forward mode now. Run these backward passes one after the "
            "other."
        ) from None
