"""`gt.checkpoint` in a pass of tangents with a graph.

The checkpoint of f is one of (x, dx) -> (f(x), df(x, dx)). The first pass records no graph: PyTorch
frees one that holds tangents only when the dual level ends, since a saved result refers to its
tangent, whose graph refers to the node that saved it. The backward pass computes f(x, dx) again in
a dual level of its own. If a derivative is taken inside of the pass, by `torch.autograd.grad` or an
operator in the function that is pushed, the cotangents are dual numbers of the same level.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch

from gradtools.rules import replaced_at
from gradtools.torch import _upstream as upstream
from gradtools.torch.forward_mode.pushing import gated_at_custom_code
from gradtools.torch.forward_mode.training_machinery import (
    captured_by,
    dual_at,
    level_of_tangents,
    mode_of_pass,
    primal_of,
    tangent_of,
)
from gradtools.torch.hooks import NeedsGraph
from gradtools.torch.patches import Substituted, scripts_called

Tensor = torch.Tensor


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
    """

    __gradtools_holds__ = ("f",)

    def __init__(self, f: Callable[..., Any], moved: list[int], captured: list[Tensor]) -> None:
        self.f, self.captured, self._moved = f, captured, moved
        self._mode: Any = mode_of_pass()
        self._first = _FirstPass()

    def is_pushed_now(self) -> bool:
        """Whether the pass that called it has not ended: f is differentiated inside of it."""
        return self._mode is mode_of_pass()

    def __call__(self, tangents: list[Tensor], captured: list[Tensor], *given: Any) -> Any:
        leaves, treedef = upstream.tree_flatten(given)
        primals = [*(leaves[i] for i in self._moved), *captured]

        def run(*duals: Tensor) -> Any:
            count = len(self._moved)
            args, kwargs = upstream.tree_unflatten(
                replaced_at(leaves, self._moved, duals[:count]), treedef
            )
            captured = Substituted(self.captured, duals[count:]) if self.captured else nullcontext()
            with captured:
                return self.f(*args, **kwargs)

        in_functorch = upstream.peek_interpreter_stack() is not None
        if in_functorch and upstream.forward_level() < 0:  # computed again, inside of torch.func
            both: Any = torch.func.jvp(run, tuple(primals), tuple(tangents))
            pushed = upstream.tree_flatten(both[1])[0]
            return both[0], [pushed[i] for i in self._first.moved]
        with level_of_tangents(self._mode.operator) as mode:
            duals = [*map(dual_at, primals, tangents)]
            ys, treedef = upstream.tree_flatten(
                self._without_graph(mode, run, duals) if self._first.is_now else run(*duals)
            )
            if self._first.is_now:
                self._first.moved = [i for i, y in enumerate(ys) if tangent_of(y) is not None]
            moved = self._first.moved
            outs, pushed = [primal_of(ys[i]) for i in moved], [tangent_of(ys[i]) for i in moved]
            pushed = [
                torch.zeros_like(y) if t is None else t.view_as(t)  # f may return an input
                for y, t in zip(outs, pushed, strict=True)
            ]
            if not (self._first.is_now or self.is_pushed_now()):  # the pass has gates of its own
                pushed = self._gated(run, (primals, duals, tangents), outs, pushed)
        return upstream.tree_unflatten(replaced_at(ys, moved, outs), treedef), pushed

    def _without_graph(self, mode: Any, run: Any, duals: list[Tensor]) -> Any:
        def refuse(*_: Any) -> None:  # no mode sees a scripted function, which records a graph
            raise NeedsGraph(f"{mode.operator}: f holds a function of TorchScript.")

        with scripts_called(refuse), mode.without_graph():
            return run(*duals)

    @contextmanager
    def as_first(self) -> Iterator[None]:
        """Context in which f is evaluated as in the first pass."""
        self._first.is_now = True
        try:
            yield
        finally:
            self._first.is_now = False

    def _gated(self, run: Any, points: Any, outs: Any, pushed: list[Tensor]) -> list[Tensor]:
        """The tangents, with gates where custom code loses a derivative of them."""
        moved = self._first.moved

        def fun(*xs: Tensor) -> Any:
            ys = upstream.tree_flatten(run(*xs))[0]
            return [ys[i] for i in moved], []

        fun.caller = self._mode.operator  # type: ignore[attr-defined]
        xs, entered, tangents = points
        return gated_at_custom_code(fun, xs, entered, tangents, outs, pushed)

    def outputs(self, y: Any, pushed: list[Tensor]) -> Any:
        """f's outputs as dual numbers."""
        ys, treedef = upstream.tree_flatten(y)
        moved = self._first.moved
        duals = [dual_at(ys[i], t) for i, t in zip(moved, pushed, strict=True)]
        return upstream.tree_unflatten(replaced_at(ys, moved, duals), treedef)


def checkpoint_pushed(
    passes: Callable[..., Any], f: Callable[..., Any], args: Any, kwargs: Any
) -> Any:
    """The checkpoint of f at dual numbers; NotImplemented if none are pushed with a graph.

    Also where f cannot be pushed without one; its tangent is then the transpose of its pullback.

    passes: A checkpoint, called as passes(f, args, kwargs).
    """
    if mode_of_pass() is None or upstream.forward_level() < 0 or not torch.is_grad_enabled():
        return NotImplemented
    if isinstance(f, Pushforward) or upstream.peek_interpreter_stack() is not None:
        return NotImplemented
    leaves, treedef = upstream.tree_flatten((args, kwargs))
    captured = captured_by(f)
    moved = [i for i, x in enumerate(leaves) if tangent_of(x) is not None]
    if not moved and not captured:
        return NotImplemented
    tangents = [*(tangent_of(leaves[i]) for i in moved), *(t for _, t in captured)]
    args, kwargs = upstream.tree_unflatten(
        replaced_at(leaves, moved, [primal_of(leaves[i]) for i in moved]), treedef
    )
    both = Pushforward(f, moved, [x for x, _ in captured])
    given = tangents, [primal_of(x) for x, _ in captured], args, kwargs
    try:
        with both.as_first():
            results = passes(both, given, {})
    except NeedsGraph:
        return NotImplemented
    return both.outputs(*results)
