"""Calls of custom rules: what is the same in all calls with tensors of the same shapes.

A signature is the shapes, dtypes and devices of a call's tensors, and the structure and constants
of the arguments. `Calls` makes one record for each, a `Signature`: the rule, the author's functions
of flat tensors, which checks they passed, and the applications that later calls share.

Where nothing but autograd's graph is active, the author's code runs here and its outputs get their
node (`attach`). Everywhere else `installing.py` decides how the rule is applied.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from gradtools.custom_rules import CustomRule
from gradtools.custom_structure import Specialization
from gradtools.errors import GradtoolsError
from gradtools.host_kernels import type_key
from gradtools.rules import ARRAY
from gradtools.torch import _upstream as upstream
from gradtools.torch.functorch_wrappers import filled, is_dual, is_wrapped
from gradtools.torch.modes import unpacked
from gradtools.torch.randomness import Randomness, restored
from gradtools.torch.rules import functions
from gradtools.torch.rules.captures import (
    closed_over_error,
    closures_of,
    is_captured,
    other_leaves,
)
from gradtools.torch.rules.checking import CheckedMap, check_linear
from gradtools.torch.rules.functions import RuleApplication, attach
from gradtools.torch.rules.installing import apply_rule, pushed
from gradtools.torch.rules.maps import pulled_back
from gradtools.torch.rules.transposing import (
    EAGER,
    ONGOING,
    Transposing,
    in_eager,
    other_layout,
    transposed_by_backward,
)
from gradtools.torch.trees import flatten

Tensor = torch.Tensor
_detach, _version = Tensor.detach, upstream.version_of
_is_compiling, _levels = torch.compiler.is_dynamo_compiling, upstream.peek_interpreter_stack
_modes = upstream.count_of_function_modes
_forward_level, _graphs = upstream.forward_level, torch.is_grad_enabled
_hooks = upstream.saved_tensors_hooks_on
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
        fun, fwd, bwd, jvp: The author's functions of flat tensors; fwd is f if there is no bwd.
        ready: Whether the forward pass was checked, in an earlier call by `installing.py`.
        single: Whether f is known to return one tensor, in no container.
        pushes: Whether forward mode alone runs the author's code without the maps around it.
        pushed: Whether it did, so that its checks have passed.
        records: Whether the forward rule is evaluated in the graph of the call (`_recorded`).
        repeats: Whether the forward pass may run again, so that the generators' states are kept.
        closed: What the author's functions close over.
        shared: The applications of calls that save arguments and outputs only.
        latest: The last one of them.
    """

    def __init__(self, specialized: Specialization, avals: tuple[Any, ...]) -> None:
        self.specialized, self.rule, self.avals = specialized, specialized.rule, avals
        self.fun, self.bwd, self.jvp = specialized.fun, specialized.bwd, specialized.jvp
        self.fwd = specialized.fun if self.bwd is None else specialized.fwd
        self.likes = [x if x[1].is_floating_point or x[1].is_complex else None for x in avals]
        self.expected = [
            (tuple(x[0]), x[1], one is not None) for x, one in zip(avals, self.likes, strict=True)
        ]
        self.key = tuple([(tuple(shape), dtype) for shape, dtype, _ in avals])
        self.ready = self.bwd is None or not specialized.contract.checked
        self.single, self.repeats = False, True
        opaque = hasattr(specialized.of, "kernel")  # a kernel leaves no graph
        self.pushes, self.pushed = not opaque and None not in self.likes, False
        self.records = self.bwd is None and self.pushes
        self.closed = closures_of(self.rule)
        self.recorded: RuleApplication | None = None
        self.own = Transposing(self.rule, EAGER)
        self.shared: dict[Any, RuleApplication] = {}
        self.latest: RuleApplication | None = None

    def out_def(self) -> Any:
        """The structure of f's output."""
        return self.specialized.outs.get(self.key, self.specialized.newest)

    def outputs(self, ys: Sequence[Tensor]) -> Any:
        """The output that f returns, of its tensors."""
        out_def = self.out_def()
        return ys[0] if out_def is _LEAF else self.specialized.backend.unflatten(out_def, list(ys))

    def application(self, res: Any, known: Sequence[Tensor]) -> RuleApplication | None:
        """The application that all calls share whose fwd saved these tensors of `known`.

        None if fwd saved anything but one tensor or a tuple of them, all in `known`.
        """
        form, leaves = (Tensor, (res,)) if type(res) is Tensor else (tuple, res)
        if type(leaves) is not tuple:
            return None
        at = {id(x): i for i, x in reversed([*enumerate(known)])}
        places = tuple([at.get(id(x), -1) for x in leaves])
        if -1 in places:
            return None
        point = self.shared.get((form, places))
        if point is None:
            linearized = self.specialized.linearized(known[:-1], (known[-1], res))
            point = self.shared[form, places] = self._shared(linearized)
            point.form = form if form is Tensor else len(places)
            self.repeats = self.rule.origin not in functions.SAVES_NO_EXTRAS
        self.latest = point
        return point

    def _shared(self, linearized: Any) -> RuleApplication:
        """An application for any tensors of these avals."""
        point = RuleApplication(self.rule, linearized.without_arrays(), 1, pull=self.pull)
        point.avals, point.like_xs = self.avals, self.likes
        point.pulling = linearized.saves[: len(linearized.saves) - linearized.tangent_only]
        return point

    def pull(self, ctx: Any, cts: Sequence[Any]) -> Sequence[Any]:
        """The backward pass of a shared application: bwd alone, once its checks have passed."""
        point, ct = ctx.point, cts[0]
        graphs = _graphs()
        plain = not graphs or (in_eager() and _forward_level() < 0)
        if self.bwd is None or type(ct) is not Tensor or not plain:
            ctx.layout = other_layout(cts)
            return pulled_back(ctx, cts)
        saved = ctx.saved_tensors
        cotangents = self.bwd(saved[0] if point.form is Tensor else saved[: point.form], ct)
        pulled = self.cotangents(cotangents)
        if graphs and other_leaves(pulled, (*saved, ct)):
            raise closed_over_error(self.rule)
        return pulled

    def pull_recorded(self, ctx: Any, cts: Sequence[Any]) -> Sequence[Any]:
        """The backward pass of a `_recorded` application, whose last input is a tangent."""
        if _graphs():
            ctx.layout = other_layout(cts)
            return *pulled_back(ctx, cts), None
        if _is_compiling():  # compiled autograd cannot add a tensor to None
            return *[torch.zeros_like(x) for x in ctx.saved_tensors], cts[0]
        return *(None,) * len(self.avals), cts[0]

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

    def pushforward(self, xs: Any, dxs: Any) -> Any:
        """Outputs and tangents, by the author's checked code alone; None if that does not fit."""
        specialized = self.specialized
        if self.jvp is not None:
            result = self.jvp(xs, dxs)
            if type(result) is tuple and len(result) == 2:
                y, dy = result
                if type(y) is type(dy) is Tensor and y.shape == dy.shape and y.dtype is dy.dtype:
                    return (y,), (dy,)
            return specialized.pushed(xs, result)
        out, res = specialized.pair(self.fwd(*xs), "fwd", "(out, residuals)")
        if type(out) is not Tensor or not out.dtype.is_floating_point:
            return None
        bwd = lambda _, cts: list(self.cotangents(self.bwd(res, *cts)))
        (dy,) = transposed_by_backward(self.rule, bwd, (), [torch.ones_like(out)], dxs)
        return (out,), (torch.zeros_like(out) if dy is None else dy,)

    def note_pushed(self, ys: Sequence[Tensor]) -> None:
        """Lets later calls in forward mode run the author's code alone: its checks have passed."""
        fits = self.jvp is not None or (self.out_def() is _LEAF and ys[0].is_floating_point())
        self.pushed = self.pushes and fits


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
        for x in args:
            if type(x) not in _PLAIN:
                structure = self._structure(args, statics)
                break
        else:
            if statics:
                structure = self._structure(args, statics)
        if structure is not None:
            args, key = structure
            if not args:
                return NotImplemented
        tracked, plain = False, _levels() is None
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
        if plain and _forward_level() < 0 and not (tracked and _graphs()):
            return self._value(signature, args, tracked)
        unknown = not plain or bool(ONGOING.running) or _modes() > 0  # a recorder's
        closed = signature.closed
        try:
            for cell, content in closed.cells:
                unknown = unknown or cell.cell_contents is not content
        except ValueError:  # emptied
            unknown = True
        unknown = unknown or (closed.unsure and closed.captures(_is_differentiated))
        if not unknown and _forward_level() >= 0:
            duals, unknown = None, True
            if signature.pushes and not (tracked and _graphs()):
                duals = pushed(signature.rule, args, signature)
            if duals is not None:
                return signature.outputs(duals)
        # A checkpoint would run its recomputation inside of the transposition of what was recorded.
        if signature.records and not unknown and _hooks(False) is None:
            out = _recorded(signature, args)
            if out is not None:
                return out
        if not signature.ready:
            signature.ready = ("fwd", signature.key) in signature.specialized.contract.passed
        if unknown or signature.bwd is None or not signature.ready:
            return signature.outputs(apply_rule(signature.rule, *args))
        before = Randomness.now(args) if signature.repeats else None
        plain_args = tuple(map(_detach, args))
        versions = [*map(_version, plain_args)]
        try:
            result = signature.fwd(*plain_args)
        finally:
            if not _graphs():  # fwd left it off
                upstream.set_grad_enabled(True)
        if versions != [*map(_version, plain_args)]:
            functions.refuse_written(signature.rule, args, versions)
        if type(result) is tuple and len(result) == 2:
            out, res = result
            if type(out) is Tensor and out.dtype.is_floating_point and not out.requires_grad:
                known, point = (*plain_args, out), signature.latest
                if point is None or (
                    res is not known[point.pulling[0]]
                    if point.form is Tensor
                    else not _fits(point, res, known)
                ):
                    point = signature.application(res, known)
                if point is not None:
                    return attach(point, (out.detach(),), *args)[0]
        # Any trees of outputs and residuals, with extras.
        point = RuleApplication(signature.rule)
        at = signature.specialized.linearized(plain_args, result)
        out = functions.recorded_at(point, plain_args, at, before)
        signature.repeats = signature.rule.origin not in functions.SAVES_NO_EXTRAS
        return signature.outputs(attach(point, tuple(out), *args)[: point.count])

    def _structure(self, args: Any, statics: tuple[Any, ...]) -> tuple[tuple[Any, ...], Any]:
        """The tensors of a call, and a key of its structure and constants; empty if unhashable."""
        xs, treedef, others = args, None, ()
        if any(type(x) not in _PLAIN for x in args):
            leaves, treedef = self.of._backend.flatten_static(args)
            xs = tuple([x for x in leaves if isinstance(x, Tensor)])
            others = tuple([ARRAY if isinstance(x, Tensor) else x for x in leaves])
            if any(type(x) not in _PLAIN for x in xs):
                return (), ()
        constants = (*statics, *others)
        if any(type(x) not in _CONSTANTS for x in constants):
            return (), ()
        return xs, (treedef, statics, others, type_key(constants))

    def _signature(self, key: Any, args: tuple[Any, ...], structure: Any) -> Signature | None:
        if torch.jit.is_tracing():  # type: ignore[attr-defined]
            return None  # sizes are tensors there
        of, backend = self.of, self.of._backend
        treedef, statics, others, _ = structure[1] if structure else (None, (), (), ())
        if treedef is None:
            treedef, others = backend.flatten_static(args)[1], (ARRAY,) * len(args)
        specialized = of._specialized(statics, treedef, others)
        avals = tuple([(x.shape, x.dtype, x.device) for x in args])
        result = self.signatures[key] = Signature(specialized, avals)
        if len(self.signatures) > _MOST:
            del self.signatures[next(iter(self.signatures))]
        return result

    def _value(self, signature: Signature, args: tuple[Any, ...], tracked: bool) -> Any:
        out = signature.fun(*args)
        if signature.single and type(out) is Tensor:
            ys = [out]
        else:
            ys = signature.specialized.outputs(args, out, "it")
            out = signature.outputs(ys)
            signature.single = type(out) is Tensor
        for y in ys:
            if y.requires_grad and not tracked:
                if any(map(is_captured, ys)):
                    raise closed_over_error(signature.rule)
                return signature.outputs([y.detach() for y in ys])
        return out


_MOST = 256


def _is_differentiated(x: Tensor) -> bool:
    return x.requires_grad or is_dual(x)


# --- one evaluation in the graph of the call -------------------------------------------------


def _fits(point: RuleApplication, res: Any, known: Sequence[Tensor]) -> bool:
    """Whether the tuple `res` holds the tensors of `known` that this application saves."""
    if type(res) is not tuple or len(res) != point.form:
        return False
    return False not in [x is known[i] for x, i in zip(res, point.pulling, strict=False)]


# --- a forward rule alone ----------------------------------------------------------------
#
# Autograd transposes its tangent map T(x) in the graph of the call. T(x) is linear in dx, so its
# graph is the same at any dx; at dx = x the graph leads a cotangent to x.


def _recorded(signature: Signature, xs: tuple[Tensor, ...]) -> Any:
    """The value, by one evaluation of the forward rule; None if that does not cover the call."""
    plain = tuple(map(_detach, xs))
    if signature.recorded is None and not _may_record(signature, plain):
        signature.records = False
        return None
    versions = [*map(_version, plain)]
    running, own = ONGOING.running, signature.own
    running.append(own)
    try:
        result = signature.jvp(plain, xs)
    except GradtoolsError as error:
        own.explain(error)
        raise
    finally:
        running.pop()
        if not _graphs():  # the rule left it off
            upstream.set_grad_enabled(True)
    if versions != [*map(_version, plain)]:
        functions.refuse_written(signature.rule, xs, versions)
    if type(result) is not tuple or len(result) != 2:
        return None
    y, dy = result
    if not (type(y) is type(dy) is Tensor and y.shape == dy.shape and y.dtype is dy.dtype):
        return None
    if is_captured(y):
        raise closed_over_error(signature.rule)
    if not dy.requires_grad:
        return None
    point = signature.recorded
    if point is None:
        maps = signature.rule.linearized_from([None] * len(xs), [])
        point = signature.recorded = signature._shared(maps)
        point.pull = signature.pull_recorded
    # Detached: the graph may hold y itself, which would be a reference cycle.
    return attach(point, (y.detach(),), *xs, dy)[0]


def _may_record(signature: Signature, xs: tuple[Tensor, ...]) -> bool:
    """Whether f returns one tensor, and its tangent map passes the checks for transposition.

    Runs under identity saved-tensors hooks, so that no checkpoint counts its tensors. Raises if two
    evaluations of the tangent end in the same leaf, a captured tensor.
    """
    rule, tangent = signature.rule, signature.specialized.tangent
    types = signature.likes, signature.avals

    def leaves() -> list[Any]:
        dxs = [torch.ones_like(x, requires_grad=True) for x in xs]
        with restored(Randomness.now(xs)), Transposing(rule, EAGER):
            dys = tangent(xs, dxs)
        return other_leaves(dys, dxs)

    with unpacked():
        try:
            check_linear(CheckedMap(rule, "tangent", tangent, xs, *types))
            if signature.key not in signature.specialized.outs:
                with torch.no_grad(), restored(Randomness.now(xs)):
                    tangent(xs, [torch.zeros_like(x) for x in xs])
        except GradtoolsError:  # raised again when a derivative is taken
            return False
        if signature.out_def() is not _LEAF:
            return False
        first = leaves()
        if first and {*map(id, first)} & {*map(id, leaves())}:
            raise closed_over_error(rule)
        return not first  # else the graph ends in leaves that the rule itself made
