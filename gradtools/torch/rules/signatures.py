"""Calls of custom rules: what is the same in all calls with tensors of the same shapes.

A signature is the shapes, dtypes and devices of a call's tensors, and the structure and constants
of the arguments. `Calls` makes one record for each, a `Signature`: the rule, the author's functions
of flat tensors, and the applications that later calls share.

Where nothing but autograd's graph or forward mode is active, the author's code runs here and its
outputs get their node (`attach`) or tangents. Everywhere else `installing.py` applies the rule.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter
from typing import Any

import torch

from gradtools.custom_rules import CustomRule
from gradtools.custom_structure import Specialization
from gradtools.errors import GradtoolsError
from gradtools.host_kernels import type_key
from gradtools.rules import ARRAY
from gradtools.torch import _upstream as upstream
from gradtools.torch.autograd_graph import leaves_of
from gradtools.torch.functorch_wrappers import filled, is_dual, is_wrapped, like
from gradtools.torch.modes import unpacked
from gradtools.torch.operation_marks import running
from gradtools.torch.randomness import Randomness, restored
from gradtools.torch.rules.captures import closed_over_error, closures_of
from gradtools.torch.rules.checking import check_linear
from gradtools.torch.rules.functions import (
    RuleApplication,
    attach,
    recorded_at,
    without_aliases,
)
from gradtools.torch.rules.installing import apply_rule
from gradtools.torch.rules.maps import pulled_back
from gradtools.torch.rules.transposing import (
    EAGER,
    ONGOING,
    Transposing,
    in_eager,
    spent_ones,
    transposed,
    transposed_by_backward,
)
from gradtools.torch.trees import flatten

Tensor = torch.Tensor
_detach = Tensor.detach
_is_compiling, _levels = torch.compiler.is_dynamo_compiling, upstream.peek_interpreter_stack
_modes, _hooks = upstream.count_of_function_modes, upstream.saved_tensors_hooks_on
_forward_level, _graphs = upstream.forward_level, torch.is_grad_enabled
_PLAIN = (Tensor, torch.nn.Parameter)
_STRIDED = torch.strided
_LEAF = flatten(torch.empty(0))[1]
_CONSTANTS = (bool, int, float, complex, str, bytes, type(None), torch.dtype, type(ARRAY))


class Signature:
    """What all calls with tensors of the same shapes, dtypes and devices share.

    Attributes:
        specialized: The rule at this structure of its arguments.
        rule: Its `Rule`.
        avals: The shape, dtype and device of each tensor.
        likes: The same, None for integers.
        key: The shapes and dtypes, the key of the contract's checks.
        closed: What the author's functions close over.
        repeats: Whether the forward pass may run again, so that the generators' states are kept.
        shared: The applications that calls share, by the positions of what they save.
        smooth: Whether all tensors are floating or complex, and the author's code leaves a graph.
        records: Whether the forward rule is evaluated in the graph of the call (`recorded`).
        recording: The application of these calls.
        pushes: Whether calls in forward mode run the author's code without further checks.
        ones: The vectors at which bwd is transposed there.
    """

    def __init__(self, specialized: Specialization, avals: tuple[Any, ...]) -> None:
        self.specialized, self.rule, self.avals = specialized, specialized.rule, avals
        self.fun, self.bwd, self.jvp = specialized.fun, specialized.bwd, specialized.jvp
        self.fwd = specialized.fwd
        self.likes = [x if x[1].is_floating_point or x[1].is_complex else None for x in avals]
        self.expected = [
            (tuple(x[0]), x[1], one is not None) for x, one in zip(avals, self.likes, strict=True)
        ]
        self.key = tuple([(tuple(shape), dtype) for shape, dtype, _ in avals])
        self.closed, self.repeats = closures_of(self.rule), True
        self.smooth = None not in self.likes and not hasattr(specialized.of, "kernel")
        self.records = self.bwd is None and self.smooth
        self.shared: dict[Any, RuleApplication] = {}
        self.recording: RuleApplication | None = None
        self.pushes, self.ones = False, list[Tensor]()
        self.own = Transposing(self.rule, EAGER)

    def out_def(self) -> Any:
        """The structure of f's output."""
        return self.specialized.outs.get(self.key, self.specialized.newest)

    def outputs(self, ys: Sequence[Tensor]) -> Any:
        """The output that f returns, of its tensors."""
        out_def = self.out_def()
        return ys[0] if out_def is _LEAF else self.specialized.backend.unflatten(out_def, list(ys))

    # --- the value

    def value(self, args: tuple[Any, ...], tracked: bool) -> Any:
        """f alone, for arguments that are not differentiated."""
        out = self.fun(*args)
        if type(out) is not Tensor or self.key not in self.specialized.values:
            ys = self.specialized.outputs(args, out, "it")
            out = self.outputs(ys)
        else:
            ys = [out]
        for y in ys:
            if y.requires_grad and not tracked:
                raise closed_over_error(self.rule)
        return out

    # --- reverse mode

    def applied(self, args: tuple[Any, ...]) -> Any:
        """The outputs with their node, by one run of fwd."""
        before = Randomness.now(args) if self.repeats else None
        xs = tuple(map(_detach, args))
        try:
            result = self.fwd(*xs)
        finally:
            if not _graphs():  # fwd left it off
                upstream.set_grad_enabled(True)
        known = self._shared(xs, result)
        if known is not None:
            point, outs = known
            if len(outs) == 1:
                self.repeats = False
                return attach(point, (outs[0].detach(),), *args)[0]
            if before is not None and before.is_unchanged():
                return attach(point, tuple(map(_detach, outs)), *args)[0]
        at = self.specialized.linearized(xs, result)
        again = bool(at.extras or at.opaque_residuals)
        if again and before is None:  # another evaluation must draw the same numbers
            self.repeats = True
            return self.applied(args)
        self.repeats = again
        point = RuleApplication(self.rule)
        out = recorded_at(point, at, before)
        return self.outputs(attach(point, tuple(out), *args)[: point.count])

    def _shared(self, xs: tuple[Tensor, ...], result: Any) -> Any:
        """The application that calls share whose fwd saved the same, its output and extras.

        None if fwd returned or saved anything but one tensor or a tuple of them.
        """
        if type(result) is not tuple or len(result) != 2:
            return None
        out, res = result
        leaves = (res,) if type(res) is Tensor else res
        if type(out) is not Tensor or type(leaves) is not tuple:
            return None
        if not out.dtype.is_floating_point or out.requires_grad:
            return None
        everything, places = [*xs, out], []
        for r in leaves:
            if type(r) is not Tensor:
                return None
            for i, x in enumerate(everything):
                if r is x:
                    places.append(i)
                    break
            else:
                if r.requires_grad:
                    return None
                places.append(len(everything))
                everything.append(r)
        key = (type(res), *places)
        outs = everything[len(xs) :]
        point = self.shared.get(key)
        if point is None:
            point = RuleApplication(self.rule, count=1, pull=self.pull)
            point.linearized = self.specialized.linearized(xs, result).without_arrays()
            point.note(xs, outs)
            point.pushing, point.materializes = None, len(outs) == 1
            point.form = Tensor if type(res) is Tensor else len(places)
            self.shared[key] = point
        return point, outs

    def pull(self, ctx: Any, cts: Sequence[Any]) -> Sequence[Any]:
        """The backward pass of a shared application: bwd alone, once its checks have passed."""
        ct = cts[0]
        if type(ct) is not Tensor or (len(cts) > 1 and any(x is not None for x in cts[1:])):
            return pulled_back(ctx, cts)
        if _graphs() and not (_forward_level() < 0 and in_eager()):
            return pulled_back(ctx, cts)
        saved, form = ctx.saved_tensors, ctx.point.form
        return self.cotangents(self.bwd(saved[0] if form is Tensor else saved[:form], ct))

    def cotangents(self, cotangents: Any) -> Sequence[Any]:
        """The checked cotangents that bwd returned, one for each tensor."""
        if (
            self.specialized.is_flat
            and type(cotangents) is tuple
            and len(cotangents) == len(self.avals)
        ):
            for g, (shape, dtype, _) in zip(cotangents, self.avals, strict=True):
                if type(g) is not Tensor or g.dtype is not dtype or g.shape != shape:
                    break
            else:
                return cotangents
        return filled(self.specialized.cotangents(cotangents, self.expected), self.likes)

    # --- a forward rule alone in reverse mode
    #
    # Autograd transposes its tangent map T(x) in the graph of the call. T(x) is linear in dx, so
    # its graph is the same at any dx; at dx = x the graph leads a cotangent to x.

    def recorded(self, args: tuple[Any, ...]) -> Any:
        """The value, by one evaluation of the forward rule; None if that does not cover it."""
        xs, point = tuple(map(_detach, args)), self.recording
        if point is None:
            self.records = self._may_record(xs)
            if not self.records:
                return None
            maps = self.rule.linearized_from([None] * len(xs), []).without_arrays()
            point = RuleApplication(self.rule, maps, 1, avals=self.avals, like_xs=self.likes)
            point.pulling, point.pull, point.checked = maps.saves, self.pull_recorded, {"tangent"}
            point.materializes, self.recording = True, point
        running = ONGOING.running
        running.append(self.own)
        try:
            result = self.jvp(xs, args)
        except GradtoolsError as error:
            self.own.explain(error)
            raise
        finally:
            running.pop()
            if not _graphs():  # the rule left it off
                upstream.set_grad_enabled(True)
        if not _is_pair(result) or not result[1].requires_grad:
            return None
        y, dy = result
        if y.requires_grad:
            raise closed_over_error(self.rule)
        # Detached: the graph may hold y itself, which would be a reference cycle.
        return attach(point, (y.detach(),), *args, dy)[0]

    def _may_record(self, xs: tuple[Tensor, ...]) -> bool:
        """Whether f returns one tensor, and its tangent map may be transposed in the call's graph.

        That graph may end in no other leaf, which would get a gradient.
        """
        tangent = self.specialized.tangent
        with unpacked(), restored(Randomness.now(xs)):  # no checkpoint counts what runs once
            try:
                check_linear(self.rule, "tangent", tangent, xs, self.likes, self.avals)
                dxs = spent_ones(self.likes)
                with Transposing(self.rule, EAGER):
                    dys = tangent(xs, dxs)
            except GradtoolsError:  # raised again when a derivative is taken
                return False
        own = {*map(id, dxs)}
        leaves = leaves_of([dy for dy in dys if dy is not None])
        return self.out_def() is _LEAF and all(id(leaf) in own for leaf in leaves)

    def pull_recorded(self, ctx: Any, cts: Sequence[Any]) -> Sequence[Any]:
        """Hands the cotangent on to the tangent, the last input; at second order, transposes."""
        if not _graphs():
            if _is_compiling():  # compiled autograd cannot add a tensor to None
                return *[torch.zeros_like(x) for x in ctx.saved_tensors], cts[0]
            return *(None,) * len(self.avals), cts[0]
        if cts[0] is None or _forward_level() >= 0 or not in_eager():
            return *pulled_back(ctx, cts), None

        def run(at: Any, dxs: Any) -> Any:
            result = self.jvp(tuple(at), tuple(dxs))
            return result[1:] if _is_pair(result) else self.specialized.pushed(at, result)[1]

        return *transposed(self.rule, run, ctx.saved_tensors, self.likes, cts), None

    # --- forward mode alone

    def pushed(self, args: tuple[Any, ...]) -> Any:
        """The output with its tangent, by one run of the author's code, without a node.

        None if that does not cover the call.
        """
        level = _forward_level()
        pairs = [upstream.unpack_dual(x, level) for x in args]
        xs, dxs = tuple([x for x, _ in pairs]), tuple([dx for _, dx in pairs])
        there = [dx for dx in dxs if dx is not None]
        if not there:
            return None
        if len(there) < len(dxs):
            dxs = tuple(filled(dxs, self.likes))
        if self.jvp is not None:
            result = self.jvp(xs, dxs)
        elif self.specialized.outs.get(self.key) is _LEAF and not any(map(_graph_of, there)):
            result = self._pushed_by_bwd(xs, dxs)
        else:
            return None  # also where the transpose would have to be differentiated
        if self.pushes and _is_pair(result):
            ys, dys = result[:1], result[1:]
        else:
            ys, dys = self.specialized.pushed(xs, result)
            self.pushes = self.out_def() is _LEAF
        for y, dy in zip(ys, dys, strict=True):
            moves = dy is not None and upstream.unpack_dual(y, level)[1] is not None
            if moves or y.requires_grad:
                raise closed_over_error(self.rule)
        if self.pushes and dy is not None:
            fresh = not upstream.is_alias_of(y, dy)
            for x in (*xs, *there):
                fresh = fresh and not (upstream.is_alias_of(x, y) or upstream.is_alias_of(x, dy))
            if fresh:
                return upstream.make_dual(y, dy, level=level)
        apart = without_aliases((*ys, *dys), xs, there)
        both = zip(apart, apart[len(ys) :], strict=False)
        duals = [y if dy is None else upstream.make_dual(y, dy, level=level) for y, dy in both]
        return self.outputs(duals)

    def _pushed_by_bwd(self, xs: Any, dxs: Any) -> Any:
        """The output and its tangent, by the transpose of bwd."""
        result = self.fwd(*xs)
        y, res = self.specialized.pair(result, "fwd", "(out, residuals)")
        if not self.pushes:
            maps = self.specialized.linearized(xs, result)
            at, likes = maps.saved(xs), [like(y) for y in maps.ys]
            check_linear(self.rule, "cotangent", maps.cotangent, at, likes, self.avals)
            self.pushes, self.ones = True, spent_ones([like for like in likes if like])
        if not self.ones:
            return y, None
        bwd = lambda ct: self.cotangents(self.bwd(res, ct))
        (dy,) = transposed_by_backward(self.rule, bwd, self.ones, dxs)
        return y, torch.zeros_like(y) if dy is None else dy


def _is_pair(result: Any) -> bool:
    """Whether a forward rule returned a tensor and its tangent, of the same shape and dtype."""
    if type(result) is not tuple or len(result) != 2:
        return False
    y, dy = result
    return type(y) is type(dy) is Tensor and y.shape == dy.shape and y.dtype is dy.dtype


_graph_of = attrgetter("requires_grad")


def _is_differentiated(x: Tensor) -> bool:
    return x.requires_grad or is_dual(x)


class Calls:
    """Calls of one `CustomRule`."""

    def __init__(self, of: Any) -> None:
        self.of = of
        # 0: any number of arguments may come.
        self.count = 0 if of._needs_binding else len(of._binding.names)
        self.signatures: dict[Any, Signature] = {}

    @staticmethod
    def fit(of: CustomRule) -> bool:
        """Whether the rule's calls may share anything."""
        return not of.symbolic_zeros and bool(of.bwd or of.jvp)

    def call(self, args: tuple[Any, ...], statics: tuple[Any, ...]) -> Any:
        """The rule's output; NotImplemented for arguments that have no signature."""
        if _is_compiling() or (len(args) != self.count and self.count):
            return NotImplemented
        structure, key = None, ()
        tracked, plain = False, _levels() is None
        for x in args:
            if statics or type(x) not in _PLAIN:
                structure = self._structure(args, statics)
                args, key = structure
                break
        if not args:
            return NotImplemented
        try:
            for x in args:
                if x.layout is not _STRIDED:
                    return NotImplemented
                if is_wrapped(x):
                    plain = False
                key += x.shape, x.dtype, x.device
                tracked = tracked or x.requires_grad
            signature = self.signatures.get(key) or self._signature(key, args, structure)
        except (RuntimeError, TypeError):  # a nested tensor has no shape, a SymInt no hash
            return NotImplemented
        if signature is None:
            return NotImplemented
        graphs, pushes = tracked and _graphs(), _forward_level() >= 0
        if plain and not graphs and not pushes:
            return signature.value(args, tracked)
        plain = plain and not (ONGOING.running or running.recorded or _modes())
        closed = signature.closed
        if plain and (closed.empty or not closed.captures(_is_differentiated)):
            if not pushes and signature.bwd is not None:
                return signature.applied(args)
            # A checkpoint would run its recomputation inside of what is recorded.
            if not pushes and signature.records and _hooks(False) is None:
                out = signature.recorded(args)
                if out is not None:
                    return out
            if pushes and not graphs and signature.smooth:
                out = signature.pushed(args)
                if out is not None:
                    return out
        return signature.outputs(apply_rule(signature.rule, *args))

    def _structure(self, args: Any, statics: tuple[Any, ...]) -> tuple[tuple[Any, ...], Any]:
        """The tensors of a call, and a key of its structure and constants; empty if unhashable."""
        xs, treedef, others = args, None, ()
        if any(type(x) not in _PLAIN for x in args):
            leaves, treedef = self.of._backend.flatten_static(args)
            xs = tuple([x for x in leaves if isinstance(x, Tensor)])
            others = tuple([ARRAY if isinstance(x, Tensor) else x for x in leaves])
        constants = (*statics, *others)
        if any(type(x) not in _CONSTANTS for x in constants) or any(
            type(x) not in _PLAIN for x in xs
        ):
            return (), ()
        return xs, (treedef, statics, others, type_key(constants))

    def _signature(self, key: Any, args: tuple[Any, ...], structure: Any) -> Signature | None:
        if torch.jit.is_tracing():  # type: ignore[attr-defined]
            return None  # sizes are tensors there
        treedef, statics, others, _ = structure[1] if structure else (None, (), (), ())
        if treedef is None:
            treedef, others = self.of._backend.flatten_static(args)[1], (ARRAY,) * len(args)
        specialized = self.of._specialized(statics, treedef, others)
        avals = tuple([(x.shape, x.dtype, x.device) for x in args])
        result = self.signatures[key] = Signature(specialized, avals)
        if len(self.signatures) > _MOST:
            del self.signatures[next(iter(self.signatures))]
        return result


_MOST = 256
