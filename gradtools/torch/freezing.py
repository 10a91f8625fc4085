"""Frozen functions in PyTorch: a program of one chunk with its own second derivative.

A use is a `Forward` of one chunk whose arguments are shared, so that it is recomputed as in
`chunked`. The graph of its first pass is kept until the pullback has used it, or the next use
begins. The pullback's pullback is the pushforward, in forward mode. Its part with respect to the
arguments is computed by a separate node, `_PullbackInputs`, which the engine runs only if that
derivative is needed.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from copy import copy
from functools import partial
from itertools import compress
from typing import Any

import torch

from gradtools.arguments.chunks import Chunks
from gradtools.boundary import user_facing
from gradtools.errors import GradtoolsError, warn_once
from gradtools.freezing import name_of_function
from gradtools.rules import spread
from gradtools.torch import _upstream as upstream
from gradtools.torch.autograd_graph import is_spent
from gradtools.torch.compiling import left_to_python
from gradtools.torch.functorch_wrappers import filled, is_dual, is_inexact, like
from gradtools.torch.known_errors import lacks_derivative
from gradtools.torch.modes import Modes, NoForwardMode, batchings, by_new_vmap
from gradtools.torch.nondifferentiable import gated
from gradtools.torch.operation_marks import is_plain, marked
from gradtools.torch.recomputed_tangents import pullback_tangents, tangents
from gradtools.torch.replaying.nodes import (
    Backward,
    Pushed,
    Widths,
    applied,
    node_of,
    outputs_of,
)
from gradtools.torch.replaying.recomputing import (
    Entries,
    Rows,
    flattened,
    primal_of,
)
from gradtools.torch.replaying.replay import Forward
from gradtools.torch.replaying.summing import Sums
from gradtools.torch.snapshots import Snapshot

Tensor = torch.Tensor
left_to_python(__name__)


class Uses:
    """The state that all uses of one frozen function share."""

    never_changes = True  # searches for mutable state that a function captures skip it

    def __init__(self) -> None:
        self.is_complex = False  # whether G's derivatives hold complex numbers
        self.state: Snapshot | None = None  # the state behind G in the latest use
        self.skipped: set[str] = set()  # quantities without forward mode, see `by_any_mode`
        self._latest: Callable[[], _Use | None] = lambda: None

    def __reduce__(self) -> Any:
        return Uses, ()

    def begin(self, use: _Use) -> None:
        """Registers a new use, and drops the graph of the one before."""
        before = self._latest()
        if before is not None:
            before.retained.clear()
        self._latest = weakref.ref(use)


def run_frozen(whole: Chunks, uses: Uses) -> list[Any]:
    """The outputs of one use."""
    in_functorch = upstream.peek_interpreter_stack() is not None
    with marked("frozen"):
        if is_plain():
            return whole.call(0, 0, [], whole.shared, [])[0]
        use = _Use(whole, in_functorch, uses)
        known = None if in_functorch else use.evaluate(use.xs, use.shared)
        rows, _ = node_of(use, use.xs, use.shared, known)
        return use.guarded(rows[0])


class _Use(Forward):
    """One evaluation of a frozen function."""

    fun = property(lambda self: name_of_function(self.caller))
    mark = "frozen"
    differentiates_leaves = saves_parameters = False  # they are constants
    compares_leaves = compares_bits = False  # a recomputation may use other kernels
    may_reach_sharded = False

    def __init__(self, whole: Chunks, in_functorch: bool, uses: Uses) -> None:
        self.uses, self.keeps = uses, False
        super().__init__(whole, in_functorch, None if in_functorch else uses.state)
        if not in_functorch:
            uses.state = self.start if self.start.reached.lasts else None

    # --- the first pass

    def _first_pass(self, rows: Rows, shared: Entries) -> Rows:
        self.uses.begin(self)
        packed = upstream.saved_tensors_hooks_on(False) is not None
        self.keeps = not packed and not self.in_functorch and self.modes.grad
        return super()._first_pass(rows, shared)

    def _kept(self) -> int:
        return int(self.keeps)

    def guarded(self, outs: Sequence[Any]) -> list[Any]:
        """The outputs, with a gate that raises if a parameter of G is differentiated."""
        constants = [x for x in self.reached_leaves if x.requires_grad]
        if not constants or not self.modes.grad:  # G's own outputs require grad likewise
            return list(outs)
        which = [isinstance(y, Tensor) and is_inexact(y) for y in outs]
        text = (
            f"{self.caller}: a derivative is needed with respect to a parameter that {self.fun} "
            "reads and does not take as an argument; such parameters are constants here. Pass "
            "them as arguments (make_functional), switch them off (module.requires_grad_(False)), "
            "ask for chosen inputs (torch.autograd.grad, or backward(inputs=...)), or "
            f"{_instead(self.caller)}."
        )
        left = iter(gated([*compress(outs, which)], constants, text) if any(which) else ())
        return [next(left) if w else y for y, w in zip(outs, which, strict=True)]

    # --- its derivatives

    def pull(self, layout: Widths, rows: Rows, shared: Entries, joint: Any = None) -> list[Any]:
        if _are_spent(shared[: layout.shared]):
            return [None] * layout.shared
        back = _FrozenBackward(self, layout)
        if upstream.peek_interpreter_stack() is not None:
            return self.guarded(outputs_of(back, rows, shared))
        known = back.evaluate(rows, shared)
        cts, zs = rows[0], list(shared)
        if not (torch.is_grad_enabled() or any(map(is_dual, (*cts, *zs)))):
            return [*flattened(known[0]), *known[1]]
        moving = [ct for ct in cts if ct is not None]
        back.arguments = zs
        back.constant = not any(
            ct.requires_grad or upstream.is_wrapped(ct) or is_dual(ct) for ct in moving
        )
        gated_inputs = applied(_PullbackInputs, back, tuple(cts), *zs)
        _, grads = node_of(back, rows, gated_inputs, known)
        return self.guarded(grads)

    def push(self, layout: Widths, rows: Rows, shared: Entries) -> list[Any]:
        width = layout.shared
        zs, dzs = list(shared[:width]), spread(shared[width:], layout.present[-1])
        fast = lambda use: tangents(use, zs, dzs)
        slow = lambda use: outputs_of(Pushed(use, layout), rows, shared)
        node = lambda dys: node_of(_Pushforward(self, layout), rows, shared, ([dys], []))[0][0]
        return self.as_outputs("values", fast, slow, node)

    def shows_numbers(self) -> bool:
        """Whether concrete values are available: no transform and no tracing."""
        batched = batchings() > 0  # of is_grads_batched
        in_functorch = upstream.peek_interpreter_stack() is not None
        return not (in_functorch or batched or self.batches or upstream.is_traced_by_make_fx())

    def as_outputs(self, quantity: str, fast: Any, slow: Any, node: Any) -> list[Any]:
        """The quantity by forward mode without a graph, then as outputs of a node.

        Where there are no numbers to compute with, double backward makes it differentiable.
        """
        if upstream.forward_level() >= 0 or not self.shows_numbers():
            return self.guarded(self.by_any_mode(quantity, None, slow))
        with torch.no_grad():
            values = self.by_any_mode(quantity, fast, slow)
        return self.guarded(node(values)) if torch.is_grad_enabled() else values

    def by_any_mode(self, quantity: str, fast: Any, slow: Callable[[_Use], list[Any]]) -> list[Any]:
        """Computes the quantity by forward mode, or else by double backward.

        The next use starts with the method that worked for this one.

        quantity: The name of the computed quantity, under which that method is stored.
        fast: Computes it by forward mode; None if that is impossible.
        slow: Computes it by double backward.
        """
        self.refuse_edit()
        if fast is not None and not (self.hooked or quantity in self.uses.skipped):
            try:
                return fast(self)
            except NoForwardMode:
                pass
            except (RuntimeError, NotImplementedError) as error:
                kernel = lacks_derivative(error)
                if kernel is None:
                    raise
                _warn_of_fallback(self.caller, kernel)
                self.uses.skipped.add(quantity)
        self.refuse_once("give it a jvp, or ")
        return slow(self)

    def refuse_edit(self) -> None:
        """Raises if G holds a reverse-only rule, since its pullback is differentiated forward."""
        if self.edit is not None:
            raise GradtoolsError(
                f"{self.caller}: {self.fun} holds {self.edit}, which has a reverse rule only, and "
                "its pullback is differentiated by forward mode. Edit gradients outside of "
                f"{self.fun}, or {_instead(self.caller)}."
            )

    def refuse_once(self, fix: str = "") -> None:
        """Raises for @once_differentiable in G, where PyTorch would silently drop a term."""
        if self.once is not None:
            raise GradtoolsError(
                f"{self.caller}: {self.fun} holds the autograd.Function {self.once}, whose "
                "backward is marked with "
                "@once_differentiable, and its derivative is needed. To have one, "
                f"{fix}write a backward of PyTorch's operations, without that mark."
            )

    def with_modes(self, modes: Modes) -> _Use:
        """A copy of the use that is recomputed in other modes."""
        use = copy(self)
        use.modes, use.retained = modes, {}
        return use


class _Pushforward(Pushed):
    """The node of a use's pushforward, whose values forward mode computed without a graph."""

    def pull(self, layout: Widths, rows: Rows, shared: Entries, joint: Any = None) -> list[Any]:
        use: Any = self.of

        def slow(use: _Use) -> list[Any]:
            back = Backward(Pushed(use, self.layout), layout, joint)
            return outputs_of(back, rows, shared)

        return use.by_any_mode("pushforward", None, slow)


class _FrozenBackward(Backward):
    """The pullback of a use, linear in the cotangents: its pullback is the pushforward."""

    # In eager mode the arguments themselves. As inputs of the node they pass through
    # `_PullbackInputs`, which gets the cotangents of the arguments and differentiates.
    arguments: list[Any] | None = None
    constant = False  # whether no cotangent has a derivative, such as the 1 of a gradient

    def batched(self, size: int, on: list[list[bool]], randomness: str, whole: bool) -> Any:
        result, wanted = super().batched(size, on, randomness, whole)
        result.constant = False
        return result, wanted

    def from_retained(self, rows: Rows, shared: Entries, results: Rows, sums: Sums) -> set[int]:
        use: Any = self.of
        if not isinstance(use, _Use) or 0 not in use.retained:
            return set()
        _, own, outs = use.retained.pop(0)
        cts = self.split(0, rows[0], shared)[2]
        sums.add(self.pulled(outs, own, cts, len(own), False, False))
        return {0}

    def pull(self, layout: Widths, rows: Rows, shared: Entries, joint: Any = None) -> list[Any]:
        if any(self.vectors_only):
            # A batch of vectors at the same arguments, whose gradients are summed.
            one, zs, n = copy(self), shared[: layout.shared], len(rows[0])
            one.vectors_only = tuple([alone for alone in self.vectors_only if not alone])
            pull = lambda *vs: one.pull(layout, [list(vs[:n])], [*zs, *vs[n:]])
            return self.by_vmap(pull, n, [*rows[0], *shared[layout.shared :]], summed=True)
        count = self.layout.shared
        zs = list(shared[:count]) if self.arguments is None else self.arguments
        us = spread(shared[layout.shared :], layout.present[-1])
        cts = rows[0]
        use: Any = self.of
        along: list[Any] = [None] * len(cts)
        if not self.constant:
            along_us = Widths([0], count, [[], [u is not None for u in us]])
            pushed = use.push(along_us, [[]], [*zs, *(u for u in us if u is not None)])
            along = [*compress(pushed, self.layout.present[0])]
        if self.arguments is not None:
            return [*along, *us]  # `_PullbackInputs` differentiates along us
        return [*along, *_along_arguments(self, zs, us, cts)]

    def push(self, layout: Widths, rows: Rows, shared: Entries) -> list[Any]:
        if self.arguments is not None:
            # Bypasses `_PullbackInputs`, which would take these for the pullback's cotangents.
            shared = [*map(primal_of, self.arguments), *shared[layout.shared :]]
        return super().push(layout, rows, shared)


def _are_spent(zs: Entries) -> bool:
    """Whether all are aliases of a finished `gt.grad`, whose gradients are not used.

    A later plain backward() reaches them as well.
    """
    tracked = [z for z in zs if z.requires_grad and not upstream.is_wrapped(z)]
    return len(tracked) == len(zs) > 0 and all(z.is_leaf and is_spent(z) for z in tracked)


def _along_arguments(back: _FrozenBackward, zs: Entries, us: Entries, cts: Entries) -> list[Any]:
    """The pullback's pullback with respect to the arguments: the pullback's tangent along us."""
    use: Any = back.of
    if all(u is None for u in us):
        return [None] * len(zs)
    use.refuse_once()
    use.refuse_edit()
    full = spread(cts, back.layout.present[0])
    given = [*zs, *(u for u in us if u is not None)]
    present = [[False] * len(cts), [u is not None for u in us]]

    def pushed(use: _Use) -> Pushed:
        pullback = _FrozenBackward(use, back.layout)
        return Pushed(pullback, Widths([len(cts)], len(zs), present))

    fast = lambda use: pullback_tangents(use, zs, us, full)
    slow = lambda use: outputs_of(pushed(use), [list(cts)], given)
    node = lambda grads: node_of(pushed(use), [list(cts)], given, ([[]], grads))[1]
    return use.as_outputs("along", fast, slow, node)


# --- nodes ------------------------------------------------------------------------------------


class _PullbackInputs(torch.autograd.Function):
    """Identity on a pullback's arguments, whose backward is the derivative along them.

    So that derivative is computed only if it is needed. The cotangents are no tensor inputs:
    otherwise the engine would run this for a derivative with respect to the cotangents alone. The
    pullback's own node saves them and checks their versions.
    """

    recorded_as = "frozen"

    @staticmethod
    def forward(ctx: Any, back: Any, cts: tuple[Tensor, ...], *zs: Tensor) -> Any:
        ctx.back, ctx.cts = back, cts
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*zs)
        ctx.likes = [like(z) for z in zs] if upstream.forward_level() >= 0 else []
        result = [x.view_as(x) for x in zs]
        ctx.mark_non_differentiable(
            *[x for x in result if not x.is_floating_point() and not x.is_complex()]
        )
        return tuple(result)

    @staticmethod
    @user_facing
    def backward(ctx: Any, *us: Tensor | None) -> Any:
        zs = ctx.saved_tensors
        if _are_spent(zs):
            return (None,) * (2 + len(zs))
        run = partial(_along_arguments, ctx.back, zs)
        with marked("frozen"):
            if torch.is_grad_enabled() and batchings():
                return None, None, *by_new_vmap(lambda *us: run(us, ctx.cts), us)
            return None, None, *run(us, ctx.cts)

    @staticmethod
    def jvp(ctx: Any, _: None, cts: None, *tangents: Tensor | None) -> Any:
        # PyTorch requires a tangent for each view if another output has one.
        return tuple([None if t is None else t.view_as(t) for t in filled(tangents, ctx.likes)])


def _instead(caller: str) -> str:
    return "use G itself" if caller == "frozen" else "leave out the mode"


def _warn_of_fallback(caller: str, kernel: str) -> None:
    """Warns once for each kernel."""
    warn_once(
        ("frozen", kernel),
        f"{caller}: {kernel} lacks the derivative that forward over reverse needs; that pass takes "
        f"double backward, and keeps a graph of {name_of_function(caller)} while it runs.",
    )
