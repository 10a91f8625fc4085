"""Implements `frozen` in PyTorch with recomputed programs that have a custom second derivative.

    value       y = G(z)                 one pass; the graph is stored until the pullback runs or G
                                         is called again
    pullback    g = J(z)^H c             linear in c
    second      <u, g> along c: J(z) u   one pass in forward mode, which stores nothing
                <u, g> along z           one double backward, recomputed; its graph of G is also
                                         used by the pullback of y, which runs next

Only autograd's engine, while it runs, knows whether the second derivative along z is needed. Third
derivatives, and all derivatives inside of torch.func, use double backward of G, recomputed as in
`recomputation.py`. The parameters of G are constants: a derivative with respect to them raises an
error.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from itertools import compress
from typing import Any

import torch

from gradtools.arguments.chunks import Chunks
from gradtools.errors import GradtoolsError
from gradtools.freezing import edit_in_frozen, name_of_function
from gradtools.torch import _upstream as upstream
from gradtools.torch.autograd_graph import is_spent
from gradtools.torch.captured_tensors import Replaced, as_read_now
from gradtools.torch.chunking import Chunk, held_by, recomputes, verifies
from gradtools.torch.compiling import left_to_python
from gradtools.torch.frozen_constants import Constants, gate_of
from gradtools.torch.function_modes import OneTangent, PlainAttention, PlainKernels
from gradtools.torch.functorch_wrappers import is_dual, is_inexact, unshared
from gradtools.torch.modes import NoForwardMode, dual_level, dual_of
from gradtools.torch.operation_marks import CHUNK, detached, marked, running
from gradtools.torch.recomputation import (
    Program,
    Pull,
    Pulled,
    changed_error,
    first_in_functorch,
    gradients,
    recomputed,
)
from gradtools.torch.state import Held, RunState

Tensor = torch.Tensor
Tensors = list[Tensor]
left_to_python(__name__)
_NOTHING = nullcontext()


class Uses:
    """State that all calls of a frozen function share."""

    def __init__(self) -> None:
        self.state: RunState | None = None  # the random state after the latest call
        self.has_forward_mode = True
        self._latest: Callable[[], _Use | None] = lambda: None

    def __reduce__(self) -> Any:
        return Uses, ()

    def keep(self, use: _Use, inner: Tensors, ys: Tensors) -> None:
        """Stores the graph of the latest call and frees the graph of the call before it."""
        before = self._latest()
        if before is not None:
            before.retained.clear()
        use.retained.append((inner, ys))
        self._latest = weakref.ref(use)


def run_frozen(whole: Chunks, uses: Uses) -> list[Any]:
    """Evaluates the frozen function once and returns the outputs."""
    with marked("frozen"):
        chunk, held = Chunk(whole, 0, whole.lists[0], []), held_by(whole)
        if held is None or not torch.is_grad_enabled():
            return chunk.merged(chunk.run(chunk.xs))
        if not recomputes() or upstream.forward_level() >= 0:  # G's operations propagate tangents
            with _constant(whole.caller, held):
                return chunk.merged(chunk.run(chunk.xs))
        state = RunState.now(held, uses.state)
        use = _Use(uses, whole.caller, chunk.run, held, state)
        verify, xs = verifies(whole.options, use), as_read_now(chunk.xs)
        if upstream.peek_interpreter_stack() is not None:
            return chunk.merged(first_in_functorch(use, xs, verify))
        return chunk.merged(use.first_run(xs, verify))


class _Second(Pull):
    """Program that computes the pullback of `_Pullback`, a second derivative of G."""

    of: _Pullback

    def pulled(self, xs: Sequence[Tensor]) -> Pulled:
        use, size, given = self.of.of, self.of.size, self.of.given
        if use.edit and any(self.wants[:size]):
            raise edit_in_frozen(use.caller, use.edit)
        if torch.is_grad_enabled() or upstream.peek_interpreter_stack() is not None or self.rows:
            plain = Pull(use.by(PlainKernels()), size, given, self.of.wants)
            return Pull(plain, self.size, self.given, self.wants).pulled(xs)
        zs, cs, left = xs[:size], xs[size : self.size], iter(xs[self.size :])
        of_wanted = iter([next(left) if g else None for g in self.given])
        us = [next(of_wanted) if w else None for w in self.of.wants]
        if not any(self.wants[:size]) and use.uses.has_forward_mode and not use.hooked:
            try:
                ys = use.pushed(zs, us)
            except (NoForwardMode, RuntimeError, GradtoolsError) as error:
                # The level of forward mode is already active, or an operation does not support
                # forward mode. Double backward raises any other error again.
                use.uses.has_forward_mode = isinstance(error, NoForwardMode)
            else:
                pairs = zip(cs, compress(ys, given), self.wants[size:], strict=True)
                return [(c, y) for c, y, w in pairs if w]
        # Double backward of G. The graph of G is stored for the next pullback of G.
        with torch.enable_grad():
            inner = [z.detach().requires_grad_() if is_inexact(z) else z for z in zs]
            needs = zip(cs, self.wants[size:], strict=True)
            cts = [c.detach().requires_grad_(c.requires_grad or w) for c, w in needs]
            ys = use.by(PlainAttention()).again(inner)
            gs = gradients([*compress(ys, given)], inner, cts, True)
            pairs = [(g, u) for g, u in zip(gs, us, strict=True) if g is not None and u is not None]
            ends = [*compress([*inner, *cts], self.wants)]
            found = gradients([g for g, _ in pairs], ends, [u for _, u in pairs], False, True)
        use.uses.keep(use, inner, ys)
        return [*zip(ends, found, strict=True)]


class _Pullback(Pull):
    """Program that computes the pullback of a call of G."""

    of: _Use
    pulls = _Second
    leaves: Sequence[Tensor] = ()  # G's arguments; if empty, `wanted` omits no derivative

    def pulled(self, xs: Sequence[Tensor]) -> Pulled:
        if torch.is_grad_enabled() or self.rows or not self.of.retained:
            return super().pulled(xs)
        inner, ys = self.of.retained.pop()
        ends = [*compress(inner, self.wants)]
        grads = gradients([*compress(ys, self.given)], ends, xs[self.size :], False)
        return [*zip(ends, grads, strict=True)]

    def wanted(self, ctx: Any, xs: Sequence[Tensor], wants: Sequence[bool]) -> Sequence[bool]:
        if not self.leaves or upstream.current_graph_task() < 0:
            return wants
        nodes = [node for node, _ in ctx.next_functions]
        runs = [w and upstream.will_run(node) for w, node in zip(wants, nodes, strict=True)]
        for i, x in enumerate(self.leaves):
            runs[i] = runs[i] and not is_spent(x)
        return runs


class _Use(Program):
    """A recorded call of a frozen function, which can be evaluated again.

    Attributes:
        retained: An empty list, or a list with one pair: the arguments as leaf tensors, and the
            outputs with their graph.
        kernels: The context manager in which later evaluations run.
        changes: The sum of the parameters' version counters, or None if G changes parameters.
        edit: The name of an edit in G that does not support forward mode, or "" if there is none.
        hooked: Whether G registers gradient hooks, which do not run in forward mode.
    """

    edit, hooked, kernels = "", False, _NOTHING
    pulls = _Pullback

    def __init__(self, uses: Uses, *args: Any) -> None:
        super().__init__(*args)
        self.uses, self.outside = uses, upstream.nodes_made()
        self.changes: int | None = self.held.versions()
        self.retained: list[tuple[Tensors, Tensors]] = []

    def first_run(self, xs: Sequence[Tensor], verify: bool) -> Tensors:
        """Evaluates the frozen function as one autograd node and returns the outputs."""
        hooks = upstream.hooks_made()
        ys, self.uses.state = self.begin(xs, verify, [])
        self.hooked = upstream.hooks_made() != hooks
        if self.held.versions() != self.changes:
            self.changes = None  # G itself changes its parameters
        inner, graph = self.retained.pop()
        if self.known is None:
            return ys
        gate = self.gate = gate_of(self.caller, self.sources)
        self.set_sources([])
        if upstream.saved_tensors_hooks_on(False) is None:
            self.uses.keep(self, [*gate, *inner], graph)
        return recomputed(self, [*gate, *xs])

    def run_first(self, xs: Sequence[Tensor]) -> Tensors:
        edits = running.edits
        ys = self.run(xs)
        if running.edits != edits:
            self.edit = running.edit
        self.retained.append((list(xs), list(ys)))
        return ys

    def inputs(self, xs: Sequence[Tensor], captured: Tensors) -> Tensors:
        with upstream.temporarily_clear_interpreter_stack():
            fixed = [not upstream.is_wrapped(x) for x in captured]
            gate = self.gate = gate_of(self.caller, [*compress(captured, fixed)])
            every = [x.detach() if f else x for x, f in zip(captured, fixed, strict=True)]
        self.captured = captured
        self.retained.clear()
        return [*every, *gate, *xs]

    def again(self, xs: Sequence[Tensor]) -> Tensors:
        if self.changes not in (None, self.held.versions()):
            raise changed_error(self.caller, name_of_function(self.caller))
        return super().again(xs)

    def _call(self, xs: Sequence[Tensor]) -> Tensors:
        with self.kernels:
            return super()._call(xs)

    def _compare(self, ys: Sequence[Tensor], exact: bool) -> None:
        primals = [upstream.unpack_dual(y, level=0)[0] if is_dual(y) else y for y in ys]
        super()._compare(primals, exact and self.kernels is _NOTHING)

    def by(self, kernels: Any) -> _Use:
        """Returns a copy of this call that is recomputed with the given kernels."""
        return self._copy(kernels=kernels)  # type: ignore[return-value]

    # --- derivatives of a recorded call

    def wanted(self, ctx: Any, xs: Sequence[Tensor], wants: Sequence[bool]) -> Sequence[bool]:
        return [w and not is_spent(x) for w, x in zip(wants, xs, strict=True)]

    def pullback(
        self, xs: Sequence[Tensor], cts: Sequence[Any], wants: Sequence[bool]
    ) -> tuple[Pull, Tensors]:
        pull: Any
        pull, inputs = super().pullback(xs, cts, wants)
        if torch.is_grad_enabled() and upstream.peek_interpreter_stack() is None:
            # Pass views of the leaves, because the engine does not report whether the gradient of a
            # leaf is needed.
            pull.leaves = xs
            inputs = [x.view_as(x) if x.requires_grad else x for x in inputs]
        return pull, inputs

    def pushed(self, zs: Sequence[Tensor], us: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Computes the tangents of the outputs at `zs` along `us` in forward mode."""
        with dual_level():
            duals = [_dual(z, u) for z, u in zip(zs, us, strict=True)]
            with torch.enable_grad():
                ys = self.by(OneTangent()).again(duals)
            tangents = [upstream.unpack_dual(y, level=0)[1] if is_inexact(y) else None for y in ys]
            return [t if t is None else detached(t, CHUNK) for t in tangents]


def _dual(z: Tensor, u: Tensor | None) -> Tensor:
    z = detached(z, CHUNK)
    return z if u is None else dual_of(unshared(z), detached(u, CHUNK))


def _constant(caller: str, held: Held) -> Replaced:
    """Returns a context manager in which derivatives with respect to parameters raise errors."""
    with upstream.temporarily_clear_interpreter_stack():
        xs = [x for x in held.parameters if x.requires_grad and not is_dual(x)]
        return Replaced(xs, Constants.apply(caller, False, *xs) if xs else ())
