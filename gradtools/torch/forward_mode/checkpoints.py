"""Forward mode through checkpoints, and through the wrappers of training frameworks: DDP, FSDP2.

A checkpoint recomputes a layer in the backward pass, after the dual level was left: f(x) has no
tangent there, and saves other tensors than the first pass did. Here the tangents of its inputs are
inputs as well, and f(x, dx) is recomputed in a dual level of its own.

- `torch.utils.checkpoint` does so with the graph that it records in the first pass.
- `gt.checkpoint` becomes that of (x, dx) -> (f(x), df(x, dx)). The first pass records no graph:
  PyTorch frees one that holds tangents only when the dual level ends, since a saved result refers
  to its tangent, whose graph refers to the node that saved it. If a derivative is taken inside of
  the pass, by `torch.autograd.grad` or an operator in the function that is pushed, the cotangents
  are dual numbers of the same level.
- DistributedDataParallel and FSDP2 pass activations through Functions that are identities and do
  their bookkeeping in the backward pass. Primals and tangents go through one such call together,
  (y, dy) = identity(x, dx), so that the bookkeeping waits for the gradients of both: FSDP2 frees
  and reduces a layer's parameters there. It gathers them in a hook on the layer's output, which is
  registered on the tangent as well.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch

from gradtools.errors import GradtoolsError
from gradtools.rules import captured_objects, replaced_at
from gradtools.torch import _upstream as upstream
from gradtools.torch.forward_mode.no_grad import NoGradStopsTangents
from gradtools.torch.forward_mode.pushing import gated_at_custom_code
from gradtools.torch.functorch_wrappers import is_inexact
from gradtools.torch.hooks import NeedsGraph
from gradtools.torch.modes import NoForwardMode, dual_level
from gradtools.torch.patches import (
    Substituted,
    checkpoints_taken,
    functions_applied,
    scripts_called,
)

Tensor = torch.Tensor


class _Thread(threading.local):
    """The mode of the pass of tangents with a graph in this thread, or None."""

    mode: NoGradStopsTangents | None = None


_thread = _Thread()


@contextmanager
def pushed_through(mode: NoGradStopsTangents, caller: str, keep: bool) -> Iterator[None]:
    """Context in which tangents pass through checkpoints and the Functions of DDP and FSDP2.

    Args:
        mode: The pass's mode.
        caller: The operator's name.
        keep: Whether the tangents have a graph.
    """
    before = _thread.mode
    _thread.mode = mode if keep else None
    with ExitStack() as inside:
        inside.callback(setattr, _thread, "mode", before)
        if keep:
            inside.enter_context(checkpoints_taken(partial(_checkpointed, caller)))
        if upstream.bookkeeping():
            inside.enter_context(functions_applied(_applied, of_rules=False))
        yield


@contextmanager
def _level_of_tangents(caller: str) -> Iterator[Any]:
    """The mode of the current dual level, or of a new one, set up as in the first pass."""
    if upstream.forward_level() >= 0:
        yield _thread.mode
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


# --- dual numbers --------------------------------------------------------------------------------


def _tangent_of(x: Any) -> Tensor | None:
    if not isinstance(x, Tensor) or upstream.is_wrapped(x) or not is_inexact(x):
        return None
    tangent: Tensor | None = upstream.unpack_dual(x, level=upstream.forward_level())[1]
    return tangent


def _primal_of(x: Tensor) -> Tensor:
    primal: Tensor = upstream.unpack_dual(x, level=0)[0]
    return primal


def _dual(x: Tensor, tangent: Tensor) -> Tensor:
    return upstream.make_dual(x, tangent, level=upstream.forward_level())


def _unpacked(xs: Sequence[Any]) -> tuple[list[Any], list[int], list[Tensor]]:
    """The entries without tangents, which of them have one, and these tangents."""
    tangents = [_tangent_of(x) for x in xs]
    moved = [i for i, tangent in enumerate(tangents) if tangent is not None]
    primals = replaced_at(xs, moved, [_primal_of(xs[i]) for i in moved])
    return primals, moved, [tangent for tangent in tangents if tangent is not None]


def _captured(fun: Any) -> list[Tensor]:
    """The tensors with tangents that a function closes over."""
    return [*captured_objects([fun], lambda x: _tangent_of(x) is not None, Tensor, False)]


# --- what is called in a pass of tangents --------------------------------------------------------


def _applied(owner: Any, beneath: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Applies a bookkeeping Function (an identity) to primals and tangents together."""
    if owner not in upstream.bookkeeping() or upstream.forward_level() < 0:
        return beneath(*args, **kwargs)
    state, *xs = args
    primals, moved, tangents = _unpacked(xs)
    if not moved:
        return beneath(*args, **kwargs)
    result = beneath(state, *primals, *tangents)
    pairs = zip(moved, result[len(xs) :], strict=True)
    duals = [_dual(result[i], tangent) for i, tangent in pairs]
    return tuple(replaced_at(result[: len(xs)], moved, duals))


def _checkpointed(
    caller: str, fun: Any, beneath: Callable[..., Any], args: Any, kwargs: Any
) -> Any:
    """`torch.utils.checkpoint` with primals and tangents as inputs, if there are tangents."""
    if upstream.forward_level() < 0 or not torch.is_grad_enabled():
        return beneath(*args, **kwargs)
    *inputs, passes = upstream.checkpoint_call(args, kwargs)
    leaves, treedef = upstream.tree_flatten(tuple(inputs))
    primals, moved, tangents = _unpacked(leaves)
    captured = [(x, _tangent_of(x)) for x in _captured(fun)]
    if not moved and not captured:
        return beneath(*args, **kwargs)
    count = len(leaves)

    def again(*saved: Any) -> None:
        with _level_of_tangents(caller):
            with upstream.disable_current_modes():  # such as a FLOP counter
                duals = [_dual(saved[i], t) for i, t in zip(moved, saved[count:], strict=True)]
            xs, named = upstream.tree_unflatten(replaced_at(saved[:count], moved, duals), treedef)
            # Inside of the pass itself they still have their tangents.
            gone = [(x, tangent) for x, tangent in captured if _tangent_of(x) is None]
            others = [_dual(x, tangent) for x, tangent in gone if tangent is not None]
            with Substituted([x for x, _ in gone], others) if gone else nullcontext():
                fun(*xs, **named)

    return passes(again, *primals, *tangents)


# --- gt.checkpoint -------------------------------------------------------------------------------


def checkpoint_pushed(
    passes: Callable[..., Any], f: Callable[..., Any], args: Any, kwargs: Any
) -> Any:
    """The checkpoint of f at dual numbers; NotImplemented if none are pushed with a graph.

    Also where f cannot be pushed without one; its tangent is then the transpose of its pullback.

    passes: A checkpoint, called as passes(f, args, kwargs).
    """
    if _thread.mode is None or upstream.forward_level() < 0 or not torch.is_grad_enabled():
        return NotImplemented
    if isinstance(f, Pushforward) or upstream.peek_interpreter_stack() is not None:
        return NotImplemented
    leaves, treedef = upstream.tree_flatten((args, kwargs))
    captured = _captured(f)
    primals, moved, tangents = _unpacked(leaves)
    if not moved and not captured:
        return NotImplemented
    args, kwargs = upstream.tree_unflatten(primals, treedef)
    others, _, tangents_of_others = _unpacked(captured)
    both = Pushforward(f, moved, captured)
    try:
        with both.as_first():
            y, pushed = passes(both, ([*tangents, *tangents_of_others], others, args, kwargs), {})
    except NeedsGraph:
        return NotImplemented
    ys, treedef = upstream.tree_flatten(y)
    duals = [_dual(ys[i], t) for i, t in zip(both.first.moved, pushed, strict=True)]
    return upstream.tree_unflatten(replaced_at(ys, both.first.moved, duals), treedef)


class _FirstPass:
    """Whether this is the first pass, and which outputs have tangents in it."""

    never_changes = True  # no state of the user's, so no recomputation restores it

    def __init__(self) -> None:
        self.is_now, self.moved = False, list[int]()


class Pushforward:
    """(x, dx) -> (f(x), df(x, dx)): a function of primals and tangents.

    Attributes:
        f: The function.
        captured: The tensors with tangents that it closes over, which are arguments here.
        first: What is known of the first pass.

    Args:
        places: The positions of the arguments with tangents.
    """

    __gradtools_holds__ = ("f",)

    def __init__(self, f: Callable[..., Any], places: list[int], captured: list[Tensor]) -> None:
        self.f, self.captured, self._places = f, captured, places
        self._mode: Any = _thread.mode
        self.first = _FirstPass()

    def is_pushed_now(self) -> bool:
        """Whether the pass that called it has not ended: f is differentiated inside of it."""
        return self._mode is _thread.mode

    def __call__(self, tangents: list[Tensor], captured: list[Tensor], *given: Any) -> Any:
        leaves, treedef = upstream.tree_flatten(given)
        primals = [*(leaves[i] for i in self._places), *captured]

        def run(*duals: Tensor) -> Any:
            count = len(self._places)
            args, kwargs = upstream.tree_unflatten(
                replaced_at(leaves, self._places, duals[:count]), treedef
            )
            captured = Substituted(self.captured, duals[count:]) if self.captured else nullcontext()
            with captured:
                return self.f(*args, **kwargs)

        in_functorch = upstream.peek_interpreter_stack() is not None
        if in_functorch and upstream.forward_level() < 0:  # computed again, inside of torch.func
            both: Any = torch.func.jvp(run, tuple(primals), tuple(tangents))
            pushed = upstream.tree_flatten(both[1])[0]
            return both[0], [pushed[i] for i in self.first.moved]
        with _level_of_tangents(self._mode.operator) as mode:
            duals = [*map(_dual, primals, tangents)]
            if self.first.is_now:
                with scripts_called(self._refuse_script), mode.without_graph():
                    y = run(*duals)
            else:
                y = run(*duals)
            ys, treedef = upstream.tree_flatten(y)
            if self.first.is_now:
                self.first.moved = [i for i, y in enumerate(ys) if _tangent_of(y) is not None]
            moved = self.first.moved
            outs, pushed = [_primal_of(ys[i]) for i in moved], [_tangent_of(ys[i]) for i in moved]
            pushed = [
                torch.zeros_like(y) if t is None else t.view_as(t)  # f may return an input
                for y, t in zip(outs, pushed, strict=True)
            ]
            if not (self.first.is_now or self.is_pushed_now()):  # the pass has gates of its own

                def fun(*xs: Tensor) -> Any:
                    ys = upstream.tree_leaves(run(*xs))
                    return [ys[i] for i in moved], []

                fun.caller = self._mode.operator  # type: ignore[attr-defined]
                pushed = gated_at_custom_code(fun, primals, duals, tangents, outs, pushed)
        return upstream.tree_unflatten(replaced_at(ys, moved, outs), treedef), pushed

    def _refuse_script(self, *_: Any) -> None:
        """No mode sees a scripted function, which records a graph."""
        raise NeedsGraph(f"{self._mode.operator}: f holds a function of TorchScript.")

    @contextmanager
    def as_first(self) -> Iterator[None]:
        """Context in which f is evaluated as in the first pass."""
        self.first.is_now = True
        try:
            yield
        finally:
            self.first.is_now = False
