"""Forward mode through the wrappers of training frameworks: checkpoints, DDP, FSDP2.

`torch.utils.checkpoint` recomputes a layer in the backward pass, after the dual level was left:
f(x) has no tangent there, and saves other tensors than the first pass did. Here the checkpoint also
saves the tangents of its inputs, and recomputes f(x, dx) in a dual level of its own.
`gt.checkpoint` of f is there a checkpoint of (x, dx) -> (f(x), df(x, dx)).

DistributedDataParallel and FSDP2 pass activations through Functions that are identities and do
their bookkeeping in the backward pass. Primals and tangents go through one such call together,

    (y, dy) = identity(x, dx)

so that the bookkeeping waits for the gradients of both: FSDP2 frees and reduces a layer's
parameters there. It gathers them in a hook on the layer's output, which is registered on the
tangent as well.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from gradtools.errors import GradtoolsError
from gradtools.rules import captured_objects, replaced_at
from gradtools.torch import _upstream as upstream
from gradtools.torch.autograd_graph import surveyed
from gradtools.torch.forward_mode.no_grad import NoGradStopsTangents
from gradtools.torch.functorch_wrappers import is_inexact
from gradtools.torch.modes import NoForwardMode, dual_level
from gradtools.torch.patches import checkpoints_taken, flex_validated, functions_applied

Tensor = torch.Tensor


class _Pass(threading.local):
    """The pass of tangents with a graph in this thread.

    Attributes:
        caller: The operator that pushes them, or "".
        token: Of this pass alone.
    """

    caller = ""
    token: object = None

    def reset(self, caller: str, token: object) -> None:
        self.caller, self.token = caller, token


_pass = _Pass()


@contextmanager
def pushed_through(caller: str, keep: bool) -> Iterator[None]:
    """Context in which tangents pass through checkpoints and the Functions of DDP and FSDP2.

    Args:
        caller: The operator's name.
        keep: Whether the tangents have a graph.
    """
    before = _pass.caller, _pass.token
    _pass.caller, _pass.token = caller if keep else "", object()
    with ExitStack() as inside:
        inside.callback(_pass.reset, *before)
        if keep:
            inside.enter_context(checkpoints_taken(_Checkpoints(caller)))
            inside.enter_context(flex_validated(_validated))
        if upstream.bookkeeping():
            inside.enter_context(functions_applied(_applied, of_rules=False))
        yield


def _tangent_of(x: Any) -> Tensor | None:
    if not isinstance(x, Tensor) or upstream.is_wrapped(x) or not is_inexact(x):
        return None
    tangent: Tensor | None = upstream.unpack_dual(x, level=upstream.forward_level())[1]
    return tangent


def _captured_by(fun: Any) -> list[tuple[Tensor, Tensor]]:
    """The tensors with tangents that a function closes over, and their tangents."""
    moves = lambda x: _tangent_of(x) is not None
    tensors = captured_objects([fun], moves, Tensor, False)
    return [(x, tangent) for x in tensors if (tangent := _tangent_of(x)) is not None]


def _primal(x: Tensor) -> Tensor:
    primal: Tensor = upstream.unpack_dual(x, level=0)[0]
    return primal


def _dual(x: Tensor, tangent: Tensor) -> Tensor:
    return upstream.make_dual(x, tangent, level=upstream.forward_level())


# --- DDP and FSDP2 -------------------------------------------------------------------------------


def _applied(owner: Any, beneath: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Applies a bookkeeping Function (an identity) to primals and tangents together."""
    if owner not in upstream.bookkeeping() or upstream.forward_level() < 0:
        return beneath(*args, **kwargs)
    state, *xs = args
    tangents = [_tangent_of(x) for x in xs]
    moved = [i for i, tangent in enumerate(tangents) if tangent is not None]
    if not moved:
        return beneath(*args, **kwargs)
    primals = replaced_at(xs, moved, [_primal(xs[i]) for i in moved])
    result = beneath(state, *primals, *[tangents[i] for i in moved])
    outs = list(result[: len(xs)])
    for i, tangent in zip(moved, result[len(xs) :], strict=True):
        outs[i] = _dual(outs[i], tangent)
    return tuple(outs)


def _validated(query: Tensor, beneath: Callable[..., Any], args: Any, kwargs: Any) -> None:
    """Skips `flex_attention`'s device check if there is a tangent: its plain code runs then."""
    if upstream.forward_level() < 0 or all(_tangent_of(x) is None for x in (query, *args)):
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
        tangents = [_tangent_of(x) for x in leaves]
        moved = [i for i, tangent in enumerate(tangents) if tangent is not None]
        captured = _captured_by(fun)
        if not moved and not captured:
            return beneath(*args, **kwargs)
        count = len(leaves)

        def again(*saved: Any) -> None:
            with _level_of_tangents(self.caller):
                with upstream.disable_current_modes():  # such as a FLOP counter
                    pairs = zip(moved, saved[count:], strict=True)
                    duals = [_dual(saved[i], tangent) for i, tangent in pairs]
                xs, named = upstream.tree_unflatten(
                    replaced_at(saved[:count], moved, duals), treedef
                )
                with _Captured.at([(x, _dual(x, tangent)) for x, tangent in captured]):
                    fun(*xs, **named)

        primals = [_primal(leaves[i]) for i in moved]
        return passes(again, *replaced_at(leaves, moved, primals), *[tangents[i] for i in moved])


@contextmanager
def _level_of_tangents(caller: str) -> Iterator[None]:
    """The current dual level, or a new one, set up as in the first pass."""
    if upstream.forward_level() >= 0:
        yield
        return
    try:
        with dual_level(), NoGradStopsTangents(False, True, caller), pushed_through(caller, True):
            yield
    except NoForwardMode:
        raise GradtoolsError(
            f"{caller}: f holds a checkpoint, which pushes tangents again in the backward pass, "
            "and another thread is in forward mode now. Run these backward passes one after the "
            "other."
        ) from None


class _Captured(TorchFunctionMode):
    """A function mode that replaces captured tensors by their dual numbers."""

    def __init__(self, duals: dict[int, Tensor]) -> None:
        super().__init__()
        self._duals = duals

    @classmethod
    def at(cls, captured: Iterable[tuple[Tensor, Tensor]]) -> Any:
        """The mode for captured tensors and their dual numbers; a null context without any."""
        duals = {id(x): dual for x, dual in captured}
        return cls(duals) if duals else nullcontext()

    def __torch_function__(self, fun: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = upstream.tree_map_only(
            Tensor, lambda x: self._duals.get(id(x), x), (args, kwargs or {})
        )
        return fun(*args, **kwargs)


# --- gt.checkpoint -------------------------------------------------------------------------------


class Pushforward:
    """(x, dx) -> (f(x), df(x, dx)): a function of primals and tangents."""

    __gradtools_holds__ = ("f",)

    def __init__(self, f: Callable[..., Any], moved: list[int], captured: list[Tensor]) -> None:
        self.f, self._caller, self._token = f, _pass.caller, _pass.token
        self._moved, self.captured = moved, captured
        self._pushed: list[int] = []  # the outputs with tangents

    def is_pushed_now(self) -> bool:
        """Whether the pass that called it has not ended: f is differentiated inside of it."""
        return self._token is _pass.token

    def __call__(self, tangents: list[Tensor], captured: list[Tensor], *given: Any) -> Any:
        leaves, treedef = upstream.tree_flatten(given)
        primals = [*(leaves[i] for i in self._moved), *captured]

        def run(*duals: Tensor) -> Any:
            count = len(self._moved)
            args, kwargs = upstream.tree_unflatten(
                replaced_at(leaves, self._moved, duals[:count]), treedef
            )
            with _Captured.at(zip(self.captured, duals[count:], strict=True)):
                return self.f(*args, **kwargs)

        if upstream.peek_interpreter_stack() is not None:  # recomputed inside of torch.func
            y, dy = torch.func.jvp(run, tuple(primals), tuple(tangents))
            pushed = upstream.tree_flatten(dy)[0]
            return y, [pushed[i] for i in self._pushed]
        with _level_of_tangents(self._caller):
            ys, treedef = upstream.tree_flatten(run(*map(_dual, primals, tangents)))
            self._pushed = [i for i, y in enumerate(ys) if _tangent_of(y) is not None]
            pushed = [_tangent_of(ys[i]) for i in self._pushed]
            primals = [_primal(ys[i]) for i in self._pushed]
        if any(y.requires_grad for y in primals) and surveyed(primals).custom:
            raise _CustomCode
        return upstream.tree_unflatten(replaced_at(ys, self._pushed, primals), treedef), pushed

    def outputs(self, y: Any, pushed: list[Tensor]) -> Any:
        """f's outputs as dual numbers."""
        ys, treedef = upstream.tree_flatten(y)
        duals = [_dual(ys[i], t) for i, t in zip(self._pushed, pushed, strict=True)]
        return upstream.tree_unflatten(replaced_at(ys, self._pushed, duals), treedef)


class _CustomCode(Exception):
    """f holds a Function: its second derivative is seen in a graph of f alone."""


def checkpoint_pushed(
    passes: Callable[..., Any], f: Callable[..., Any], args: Any, kwargs: Any
) -> Any:
    """The checkpoint of f at dual numbers; NotImplemented if none are pushed with a graph.

    passes: A checkpoint, called as passes(f, args, kwargs).
    """
    if not _pass.caller or upstream.forward_level() < 0 or not torch.is_grad_enabled():
        return NotImplemented
    if isinstance(f, Pushforward):
        return NotImplemented
    leaves, treedef = upstream.tree_flatten((args, kwargs))
    moved, captured = (
        [i for i, x in enumerate(leaves) if _tangent_of(x) is not None],
        _captured_by(f),
    )
    if not moved and not captured:
        return NotImplemented
    tangents = [*(_tangent_of(leaves[i]) for i in moved), *(t for _, t in captured)]
    args, kwargs = upstream.tree_unflatten(
        replaced_at(leaves, moved, [_primal(leaves[i]) for i in moved]), treedef
    )
    both = Pushforward(f, moved, [x for x, _ in captured])
    try:
        given = tangents, [_primal(x) for x, _ in captured], args, kwargs
        return both.outputs(*passes(both, given, {}))
    except _CustomCode:
        return NotImplemented
