"""Recomputes functions in the backward pass.

    first pass      y = f(x)               the leaves of f are collected from the graph, and the
                                           graph is freed
    backward pass   x' = pull(f)(x, y')    f runs again, from the state before its first pass

`pull(f)` is a program like f, so the derivative of a derivative is recomputed too: derivatives of
any order need memory for one chunk only. Each chunk is one node of autograd's graph, and autograd
adds the chunks' gradients of a leaf in place.

The state (`state.py`) consists of random streams, the autocast settings, the buffers of the modules
in f's closure, and f's own buffers if f is a module. Outputs are compared with the outputs of the
first pass, to detect changes of other state.

Inside of torch.func, captured tensors are not part of a graph, so a function mode finds these
tensors in the first pass. The captured tensors become inputs of the node, and the inputs replace
the captured tensors when f runs again.
"""

from __future__ import annotations

import inspect
import threading
import weakref
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from copy import copy
from itertools import compress
from typing import Any

import torch

from gradtools.errors import GradtoolsError, warn_once
from gradtools.torch import _upstream as upstream
from gradtools.torch.autograd_graph import is_spent, node_of, nodes_of, unspent
from gradtools.torch.captured_tensors import (
    Captured,
    Replaced,
    as_read_now,
    batched_as,
    replaced_now,
)
from gradtools.torch.compiling import left_to_python
from gradtools.torch.frozen_constants import constants_among, gate_of
from gradtools.torch.functorch_wrappers import (
    PLAIN,
    alive,
    is_dual,
    is_inexact,
    is_wrapped,
    unwrapped,
    with_batch_in_front,
)
from gradtools.torch.gradient_tensors import is_equal
from gradtools.torch.modes import batchings, by_new_vmap, unpacked
from gradtools.torch.operation_marks import CHUNK, detached, marked, running
from gradtools.torch.state import Held, RunState

Tensor = torch.Tensor
Tensors = list[Tensor]
Run = Callable[[Sequence[Tensor]], Tensors]
Pulled = list[tuple[Tensor, Tensor | None]]
left_to_python(__name__)


class _Thread(threading.local):
    recomputing = 0  # the depth of nested recomputations


_thread = _Thread()
_NOTHING = nullcontext()
_VMAP = upstream.TransformType.Vmap


def is_recomputing() -> bool:
    """Implements `gradtools.is_recomputing` for PyTorch."""
    return _thread.recomputing > 0


# --- programs that run again ---------------------------------------------------------------------


class Program:
    """A function of tensors that can run again from the random state and buffers of its first run.

    Attributes:
        caller: The name of the operator, for error messages.
        sources: The tensors that f captures and with respect to which f is differentiated.
        versions: The version counters of the sources.
        maps: The number of vmaps around the first run.
        known: The detached outputs of the first run, or None.
        tracked: Whether each output is differentiable, or None if unknown.
        verify: Whether the outputs are compared with the outputs of the next run.
        first: Pairs of an output of the first run and its version counter, for comparison.
        call: A function that evaluates f on a batch if the program is mapped by vmap, or None.
        captured: The tensors that are replaced by the first arguments when the program runs.
        gate: A list with one scalar that represents the constants of frozen functions in f, which
            precedes the arguments of f, or an empty list.
        inline: The number of captured tensors that were sources before `inlined` was called.
        inlines: Whether the sources can be replaced by arguments when the program runs again.
        otherwise: Whether later runs use other operations, whose results differ by rounding.
        pulls: The class of the program that computes the pullback, or None for `Pull`.
    """

    known: Tensors | None = None
    tracked: Sequence[bool] | None = None
    call: Run | None = None
    gate: Sequence[Tensor] = ()
    inline, inlines = 0, True
    verify = otherwise = False
    pulls: type[Pull] | None = None

    def __init__(self, caller: str, run: Run, held: Held, state: RunState) -> None:
        self.caller, self.run, self.held, self.state = caller, run, held, state
        self.sources, self.versions, self.captured = list[Tensor](), list[int](), list[Tensor]()
        self.outside = held.began  # the number of nodes before the first chunk
        self.first: list[tuple[Tensor | None, int]] = []
        self.verified: Callable[[], None] = lambda: None
        self.replaced = replaced_now()  # tensors that an outer recomputation replaces
        levels = upstream.get_interpreter_stack() or ()
        self.maps = sum([level.key() == _VMAP for level in levels])
        self.eager = not levels  # torch.func adds gradients in a different order
        self.depth = running.depth  # the number of derivatives around f, which selects the kernels

    def pullback(
        self, xs: Sequence[Tensor], cts: Sequence[Any], wants: Sequence[bool]
    ) -> tuple[Pull, Tensors]:
        """Returns the pullback of this program, and its arguments: xs and the cotangents."""
        there = [ct is not None for ct in cts]
        return (self.pulls or Pull)(self, len(xs), there, wants), [*xs, *compress(cts, there)]

    def wanted(self, ctx: Any, xs: Sequence[Tensor], wants: Sequence[bool]) -> Sequence[bool]:
        """Returns, for each source and argument, whether the backward pass needs the gradient.

        ctx: The context object of the autograd node.
        wants: Whether the backward pass may need the gradient of each input.
        """
        return wants

    def begin(self, xs: Sequence[Tensor], verify: bool, others: Tensors) -> tuple[Tensors, Any]:
        """Runs f for the first time, and returns the detached outputs and the state after the run.

        If f cannot be recomputed, because f changed an argument in place or read a tensor that has
        a graph and is not an argument, the outputs are not detached, and `known` remains None.

        others: Other tensors that f may write to.
        """
        inner = [_entering(x, True, False) for x in xs]
        written = [x for x in (*inner, *others) if not x.is_inference()]
        versions, began = [*map(upstream.version_of, written)], upstream.nodes_made()
        with unpacked() if upstream.saved_tensors_hooks_on(False) else _NOTHING:
            if self.state.casts.on:
                torch.clear_autocast_cache()  # cached casts belong to another graph
            ys = self.run_first(inner)
            if self.state.casts.on:
                torch.clear_autocast_cache()
        later = self.state.again()
        self.state = self.state.until(later)
        if upstream.forward_level() >= 0 and any(map(is_dual, ys)):  # f captures a tangent
            return ys, later
        changed = [*map(upstream.version_of, written)] != versions
        sources = None if changed else self._sources(ys, inner, began)
        if sources is None:
            what, fix = "reads a tensor that was computed outside of f", "Pass it as an argument."
            if changed:
                what, fix = "changes an argument in place", "Clone the argument."
            warn_once(
                (self.caller, what),
                f"{self.caller}: f {what}, so f is not recomputed, and its graph is kept "
                f"in memory. {fix}",
            )
            return ys, later
        tracked = [y.requires_grad for y in ys]
        if True not in tracked:
            return ys, later
        outs = [detached(y, CHUNK) for y in ys]
        for i, y in enumerate(ys):  # autograd does not track that y shares memory with an input
            views = upstream.is_view(y) or id(y) in map(id, inner)
            if views and any(upstream.is_alias_of(y, x) for x in (*inner, *sources)):
                outs[i] = outs[i].clone()
        alive = [*map(weakref.ref, sources)]
        del ys, y, sources  # frees the graph and the leaves that f created
        self.set_sources([x for ref in alive if (x := ref()) is not None])
        self.known, self.tracked, self.verify = outs, tracked, verify
        return outs, later

    def run_first(self, xs: Sequence[Tensor]) -> Tensors:
        """Runs f in the first pass. Subclasses may override this method."""
        return self.run(xs)

    def set_sources(self, sources: Tensors) -> None:
        """Sets the sources, and records their version counters."""
        self.sources, self.versions = sources, [*map(upstream.version_of, sources)]

    def inputs(self, xs: Sequence[Tensor], captured: Tensors) -> Tensors:
        """Sets `captured` after a run inside of torch.func, and returns the node's arguments."""
        self.captured = captured
        return [*captured, *xs]

    def attached(self, xs: Sequence[Tensor]) -> Tensors:
        """Attaches the known outputs to xs and the sources with one autograd node."""
        if {x.grad_fn for x in self.sources} <= {None}:
            return recomputed(self, [*self.gate, *xs])
        # Captured tensors with a graph become arguments, at which the graph of f ends.
        return recomputed(self.inlined(), [*self.sources, *self.gate, *xs])

    def remember(self, ys: Sequence[Tensor]) -> None:
        """Stores the outputs of the first run for later comparison."""
        tracked = zip(ys, self.tracked or map(is_inexact, ys), strict=True)
        # Batched copies of this program share the list `first`.
        self.first[:] = [(y if t else None, upstream.version_of(y)) for y, t in tracked]

    def _sources(self, ys: Tensors, inner: Tensors, began: int) -> Tensors | None:
        """Returns the leaves and captured tensors on which the outputs depend, except `inner`.

        Returns None if the outputs depend on another tensor that has a graph.
        """
        read = [*as_read_now(self.held.tensors), *[x for _, x in self.replaced.values()]]
        ends = {x.grad_fn: x for x in read if x.grad_fn is not None}
        given = {node_of(x) for x in inner if x.requires_grad}
        found: dict[int, Tensor] = {}
        nodes = nodes_of(ys, ends.keys() | given)
        fixed, constants = constants_among(nodes)
        if fixed:
            self.gate = gate_of("frozen", constants)
            nodes = nodes_of(ys, ends.keys() | given | {*fixed})
        for node in nodes:
            if node in given:
                continue
            if type(node) is upstream.AccumulateGrad:
                if not is_spent(node.variable):  # an alias of a derivative that f computed
                    found[id(node.variable)] = node.variable
            elif node in ends:
                found[id(ends[node])] = ends[node]
            elif upstream.sequence_of(node) < began:
                if upstream.sequence_of(node) < self.outside:
                    return None
                raise GradtoolsError(
                    f"{self.caller}: f keeps a tensor that requires grad from one chunk to the "
                    "next (a cached function of a weight, an attached tensor), so f cannot be "
                    "computed again. Compute the tensor in each call, or pass it as an argument."
                )
        return [*found.values()]

    def again(self, xs: Sequence[Tensor]) -> Tensors:
        """Runs f from the state of its first run, and restores the current state afterwards."""
        _thread.recomputing += 1
        before, running.depth = running.depth, self.depth
        try:
            ys = self.state.rerun(self._call, xs)
        finally:
            running.depth = before
            _thread.recomputing -= 1
        if self.first and not upstream.is_traced_by_make_fx():
            self._compare(ys, self.eager and upstream.peek_interpreter_stack() is None)
        return ys

    def _call(self, xs: Sequence[Tensor]) -> Tensors:
        """Calls f, and replaces captured tensors with the first arguments."""
        if self.call is not None:
            return self.call(xs)
        count = len(self.captured)
        if self.gate:
            xs = [*xs[:count], *xs[count + 1 :]]
        if not (count or self.replaced):
            return self.run(xs)
        with Replaced(self.captured, xs[:count], self.replaced) as mode:
            ys = self.run(xs[count:])
        ys = [mode.other(y) for y in ys]
        mode.check(self.caller)
        return ys

    def _compare(self, ys: Sequence[Tensor], exact: bool) -> None:
        every = [x for x, _ in self.first if x is not None]
        # A large scalar, such as a loss, is no scale for the entries of gradients.
        arrays = [x for x in every if x.ndim] or every
        for y, (first, version) in zip(ys, self.first, strict=True):
            if first is None or y.shape != first.shape or is_wrapped(y):
                continue  # under vmap, shapes differ and values cannot be read
            if type(first) not in PLAIN or first.device.type == "meta":
                continue  # fake tensors have no values
            written = upstream.version_of(first) != version
            scale = arrays if y.ndim else every
            exactly = exact and not self.otherwise
            if not (written or is_equal(y.detach(), first, exactly, scale, every)):
                raise GradtoolsError(
                    f"{self.caller}: f returns other values when it is computed again in the "
                    "backward pass, so its gradient would be wrong. f depends on state "
                    "other than its arguments, random streams and the buffers of modules: a loop "
                    "variable, an iterator, a counter, a cache, a file, draws in another thread. "
                    "Pass it as an argument, or make it a buffer. If train() or eval() was called, "
                    "or an argument was changed in place, call backward before."
                )
        self.first.clear()  # copies of this program share the list
        self.verified()

    def _copy(self, **changes: Any) -> Program:
        other = copy(self)
        other.__dict__.update(changes)
        return other

    def inlined(self) -> Program:
        """Returns a copy of the program that takes the sources as arguments."""
        own = self.sources
        return self._copy(captured=own + self.captured, sources=[], versions=[], inline=len(own))

    def expands(self, axes: Sequence[int | None]) -> bool:
        return all(axis is None for axis in axes)

    def batched(self, axes: Sequence[int | None], size: int, randomness: str) -> Program:
        one, dims = self._call, tuple(axes)
        call = lambda xs: torch.vmap(lambda *xs: tuple(one(xs)), dims, randomness=randomness)(*xs)
        return self._copy(call=lambda xs: list(call(xs)))


class Pull(Program):
    """The pullback of a program, whose arguments are the program's arguments and the cotangents.

    size: The number of arguments of the program `of`.
    given: For each output of the program, whether it has a cotangent.
    wants: For each source and argument, whether its gradient is returned.
    rows: For each vmap over cotangents only, innermost first, the axes of the cotangents, the axis
        of the gradients, and the batch size.
    """

    def __init__(
        self,
        of: Program,
        size: int,
        given: list[bool],
        wants: Sequence[bool],
        rows: Sequence[tuple[tuple[Any, ...], int, int]] = (),
    ) -> None:
        self.of, self.size, self.given, self.wants, self.rows = of, size, given, wants, rows
        self.caller, self.maps = of.caller, of.maps
        self.sources, self.versions = of.sources, of.versions

    def again(self, xs: Sequence[Tensor]) -> Tensors:
        grads = []
        for x, g in self.pulled(xs):
            if g is None:
                g = torch.zeros_like(x)
                for _, axis, size in self.rows:
                    g = torch.stack([g] * size, axis)
            grads.append(g)
        return grads

    def pulled(self, xs: Sequence[Tensor]) -> Pulled:
        """Returns each wanted source or argument, paired with its gradient.

        The gradient is None if the outputs do not depend on the source or argument.
        """
        create, fixed = torch.is_grad_enabled(), len(self.sources)
        plain = not torch.is_inference_mode_enabled()  # inference mode records no graph
        with torch.enable_grad() if plain else torch.inference_mode(False):
            entered = zip(xs[: self.size], self.wants[fixed:], strict=True)
            inner = [_entering(x, create, wanted) for x, wanted in entered]
            with unspent(compress(self.sources, self.wants)):
                ys = self.of.again(inner)
        outs = [*compress(ys, self.given)]
        ends = [*compress((*self.sources, *inner), self.wants)]
        if True not in [y.requires_grad for y in outs]:
            return [(x, None) for x in ends]
        grads = self._pull(create, outs, ends, xs[self.size :])
        if not isinstance(self.of, Pull) and self.of.inlines:
            lost = [x for x, g in zip(ends, grads, strict=True) if g is None and x.requires_grad]
            known = {*map(id, inner[: self.of.inline] if self.of.inline else self.sources)}
            lost = [x for x in lost if id(x) in known]
            if lost and not {*map(node_of, lost)} <= {*nodes_of(ys)}:
                raise GradtoolsError(
                    f"{self.caller}: f depends on different tensors when it is computed again in "
                    "the backward pass: a parameter was replaced (by a cached parametrization, an "
                    "assignment), or a torch.autograd.Function takes a captured tensor. Pass the "
                    "tensor as an argument."
                )
        return [*zip(ends, grads, strict=True)]

    def _pull(
        self, create: bool, outs: Tensors, ends: Tensors, cts: Sequence[Tensor]
    ) -> list[Tensor | None]:
        if not self.rows:
            return gradients(outs, ends, cts, create)
        there: list[bool] = []

        def one(*cts: Tensor) -> tuple[Tensor, ...]:
            grads = gradients(outs, ends, cts, create)
            there[:] = [g is not None for g in grads]
            return tuple([g for g in grads if g is not None])

        for axes, axis, _ in self.rows:
            one = torch.vmap(one, axes, axis, randomness="same")
        found = iter(one(*cts))
        return [next(found) if t else None for t in there]

    def inlined(self) -> Pull:
        size = self.size + len(self.sources)
        return Pull(self.of.inlined(), size, self.given, self.wants, self.rows)

    def batched(self, axes: Sequence[int | None], size: int, randomness: str) -> Pull:
        if not self.expands(axes):
            rows = [*self.rows, (tuple(axes[self.size :]), 0, size)]
            return Pull(self.of, self.size, self.given, self.wants, rows)
        of = self.of.batched([0] * self.size, size, randomness)
        rows = [
            (tuple([a if a is None else a + 1 for a in inner]), axis + 1, count)
            for inner, axis, count in self.rows
        ]
        return Pull(of, self.size, self.given, self.wants, rows)

    def expands(self, axes: Sequence[int | None]) -> bool:
        return any(axis is not None for axis in axes[: self.size])


def gradients(
    ys: Sequence[Tensor],
    xs: Sequence[Tensor],
    cts: Sequence[Tensor],
    create: bool,
    retain: bool = False,
) -> list[Tensor | None]:
    """Calls autograd's engine to compute the gradients with respect to xs.

    The gradient of an unused tensor is None.
    """
    pairs = [(y, c) for y, c in zip(ys, cts, strict=True) if y.requires_grad]
    ends = tuple([x for x in xs if x.requires_grad])
    if not pairs or not ends:
        return [None] * len(xs)
    outs, seeds = zip(*pairs, strict=True)
    found = upstream.engine(
        outs, seeds, retain or create, create, ends, allow_unreachable=True, accumulate_grad=False
    )
    if len(ends) == len(xs):
        return list(found)
    left = iter(found)
    return [next(left) if x.requires_grad else None for x in xs]


def _entering(x: Tensor, create: bool, wanted: bool) -> Tensor:
    """Returns the tensor to pass to f for x: x detached, a view of x, or a view of a new leaf."""
    if not (x.requires_grad or wanted):
        return x.detach()
    x = x if create and x.requires_grad else x.detach().requires_grad_()
    return x[...] if x.layout is torch.strided else x


# --- autograd nodes of programs ------------------------------------------------------------------


def recomputed(program: Program, xs: Sequence[Tensor]) -> Tensors:
    """Returns the outputs of a program at xs.

    The pullback of the outputs runs the program again.
    """
    if upstream.forward_level() >= 0 and any(map(is_dual, xs)):
        return program.again(xs)
    apply: Any = _Node.apply
    if upstream.peek_interpreter_stack() is None:
        # `gradtools.seeing` patches this method.
        apply = super(torch.autograd.Function, _Node).apply
    known, program.known = program.known or [], None
    return list(apply(program, len(known), *known, *program.sources, *xs))


class _Node(torch.autograd.Function):
    """Autograd node whose inputs are the sources and arguments of a program.

    count: The number of known outputs, which precede the inputs so that torch.func unwraps them.
    """

    recorded_as = "chunked"

    @staticmethod
    def forward(program: Any, count: int, *inputs: Tensor) -> Any:
        if count:
            if program.verify:
                program.remember(inputs[:count])
            return tuple(map(Tensor.detach, inputs[:count]))
        with torch.no_grad():
            return tuple(map(Tensor.detach, program.again(inputs[len(program.sources) :])))

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, outputs: Any) -> None:
        ctx.program, ctx.count, *xs = inputs
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*xs[ctx.count + len(ctx.program.sources) :])
        tracked = ctx.program.tracked or map(is_inexact, outputs)
        fixed = [not t for t in tracked]
        if any(fixed):
            ctx.mark_non_differentiable(*compress(outputs, fixed))

    @staticmethod
    def backward(ctx: Any, *cts: Any) -> Any:
        xs, modes = [*map(alive, ctx.saved_tensors)], _NOTHING
        cts = tuple([ct if ct is None else alive(ct) for ct in cts])
        if not {*map(type, xs)} <= PLAIN:
            modes = upstream.EnableTorchFunction()  # `backward` of a subclass disables modes
        with marked(ctx.program.caller), modes:
            if batchings():
                grads = by_new_vmap(lambda *cts: _pulled(ctx, xs, cts), cts)
            else:
                grads = _pulled(ctx, xs, cts)
        return None, None, *[None] * ctx.count, *grads

    @staticmethod
    def vmap(info: Any, in_dims: Any, program: Any, count: int, *inputs: Tensor) -> Any:
        size, xs, axes = info.batch_size, inputs[count:], in_dims[2 + count :]
        if program.sources:
            program = program.inlined()
        if program.expands(axes):
            xs, axes = tuple(with_batch_in_front(xs, axes, size)), (0,) * len(xs)
        outer = sum(v.key() == _VMAP for v in upstream.get_interpreter_stack() or ())
        # Under a later vmap, such as over the rows of a Jacobian, all examples use the random
        # numbers of the first run.
        randomness = info.randomness if outer < program.maps else "same"
        batch = program.batched(axes, size, randomness)
        batch.known = with_batch_in_front(inputs[:count], in_dims[2 : 2 + count], size)
        ys = recomputed(batch, xs)
        return tuple(ys), (0,) * len(ys)


# PyTorch reads this signature in every call, and constructing it takes as long as the call.
_Node.forward.__signature__ = inspect.signature(_Node.forward)  # type: ignore[attr-defined]


def changed_error(caller: str, fun: str) -> RuntimeError:
    """Returns the error for a parameter that was changed before the backward pass."""
    return RuntimeError(
        "one of the variables needed for gradient computation has been modified by an inplace "
        f"operation: {caller} computes {fun} again in the backward pass, and a parameter of {fun} "
        "was changed after the forward pass. Call backward before the optimizer's step."
    )


def _pulled(ctx: Any, xs: Sequence[Tensor], cts: Sequence[Tensor | None]) -> list[Tensor | None]:
    """Computes the gradients with respect to the program's sources and its arguments xs."""
    program = ctx.program
    wants = program.wanted(ctx, xs, ctx.needs_input_grad[2 + ctx.count :])
    if not any(wants) or all(ct is None for ct in cts):
        return [None] * len(wants)
    if [*map(upstream.version_of, program.sources)] != program.versions:
        raise changed_error(program.caller, "f")
    if program.inlines and any(map(upstream.tensor_hooks, program.sources)):
        # The hooks of the sources must run once, on the sum of the gradients.
        xs, program = [*program.sources, *xs], program.inlined()
    pull, inputs = program.pullback(xs, cts, wants)
    higher = torch.is_grad_enabled() or upstream.peek_interpreter_stack() is not None
    if higher and program.inlines:
        grads: Any = iter(recomputed(pull, inputs))
    else:
        grads = (g for _, g in pull.pulled(inputs))
    return [next(grads) if wanted else None for wanted in wants]


# --- inside of torch.func -----------------------------------------------------------------------


def first_in_functorch(program: Program, xs: Sequence[Tensor], verify: bool) -> Tensors:
    """Runs a program for the first time inside of torch.func and attaches its outputs."""
    moving, found = [is_inexact(x) for x in xs], dict[int, tuple[Tensor, Tensor]]()

    def fun(*inner: Tensor) -> tuple[Tensor, ...]:
        left = iter(inner)
        full = [next(left) if m else x for x, m in zip(xs, moving, strict=True)]
        fixed = [x for x, m in zip(xs, moving, strict=True) if not m]
        with Captured(upstream.peek_interpreter_stack().level(), fixed) as mode:
            ys = program.run_first(full)
        found.update(mode.found)
        return tuple(ys)

    given = [*compress(xs, moving)] or [torch.zeros(())]
    ys, *_ = torch.func.vjp(fun, *given)
    program.state = program.state.until(program.state.again())
    inputs = [*map(alive, as_read_now(program.inputs(xs, [x for x, _ in found.values()])))]
    if not any(map(is_inexact, inputs)):
        return list(ys)
    plain = [*map(unwrapped, inputs)]
    shared = [any(upstream.is_alias_of(unwrapped(y), x) for x in plain) for y in ys]
    # Autograd does not track that an output shares memory with an input, so this output is cloned.
    outs = [y.detach().clone() if s else y.detach() for y, s in zip(ys, shared, strict=True)]
    program.known, program.verify = outs, verify
    return recomputed(program, batched_as(inputs, ys))
