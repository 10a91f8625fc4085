"""The fast path of rules in plain eager mode: an inline cache for each signature of a call.

A signature is the shapes, dtypes and devices of a call's tensors. The first call goes through
`installing.py`, and leaves what is the same for all calls: the rule, its structures, whether its
functions passed the contract, what they close over. A later call runs the author's function,
compares the structure of its result with the cached one, and attaches the node.

Under a transform, a compiler, dual numbers with a graph, or a tensor subclass, and where a backward
pass is differentiated, `installing.py` handles the general case.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from operator import attrgetter
from typing import Any

import torch

from gradtools.custom_rules import CustomRule
from gradtools.custom_structure import Residuals, Specialization
from gradtools.errors import GradtoolsError
from gradtools.host_kernels import type_key
from gradtools.rules import Linearized
from gradtools.torch import _upstream as upstream
from gradtools.torch.functorch_wrappers import filled, is_dual, is_wrapped, like
from gradtools.torch.patches import WATCHING
from gradtools.torch.plain_programs.backward_nodes import corrected, wrong_nodes
from gradtools.torch.randomness import Randomness, restored
from gradtools.torch.rules import functions
from gradtools.torch.rules.captures import Closures, closed_over_error, other_leaves
from gradtools.torch.rules.checking import CheckedMap, check_linear
from gradtools.torch.rules.functions import (
    RuleApplication,
    attach,
    attach_recorded,
)
from gradtools.torch.rules.installing import as_duals
from gradtools.torch.rules.maps import pulled_back, unusual
from gradtools.torch.rules.transposing import EAGER, ONGOING, Transposing, unpacked

Tensor = torch.Tensor
_is_tracked = attrgetter("requires_grad")
_detach, _version = Tensor.detach, upstream.version_of
_is_compiling, _levels = torch.compiler.is_dynamo_compiling, upstream.peek_interpreter_stack
_forward_level, _graphs = upstream.forward_level, torch.is_grad_enabled
_PLAIN = (Tensor, torch.nn.Parameter)
_STRIDED = torch.strided
_CONSTANTS = (bool, int, float, complex, str, bytes, type(None), torch.dtype)


@dataclass(eq=False)
class _Signature:
    """The cache entry of calls with tensors of the same shapes, dtypes and devices.

    Attributes:
        specialized: The rule at this structure of its arguments.
        flat: Whether the arguments are tensors only.
        avals: The shape, dtype and device of each.
        contract_key: The key of the forward pass's check in the contract.
        ready: Whether the forward pass was checked.
        pulled: Whether the backward pass was.
        pushed: Whether the forward rule was.
        valued: Whether the structure of f's output is known.
    """

    specialized: Specialization
    flat: bool
    avals: tuple[Any, ...]
    contract_key: Any
    ready: bool = False
    pulled: bool = False
    pushed: bool = False
    valued: bool = False

    def __post_init__(self) -> None:
        self.count = len(self.avals)
        of, specialized, statics = self.specialized.of, self.specialized, self.specialized.statics
        self.fun: Any = of.fun
        self.fwd: Any = of.fwd
        self.bwd: Any = of.bwd
        self.jvp: Any = of.jvp
        if statics or not self.flat:
            self._of_trees(of, specialized, statics)
        self.nothing = (None,) * (2 + self.count)
        self.recorded: _Plan | None = None  # of a forward rule alone
        self.own = Transposing(self.specialized.rule, EAGER)
        self.likes = [x if x[1].is_floating_point or x[1].is_complex else None for x in self.avals]
        pairs = zip(self.avals, self.likes, strict=True)
        self.expected = [(tuple(x[0]), x[1], one is not None) for x, one in pairs]
        self.plan: Any = None  # of the latest forward pass
        self.plans: dict[Any, _Plan] = {}
        # The maps of kernels are rules themselves, evaluated at the arguments, which are residuals
        # of the forward rule as well.
        times = 0 if self.specialized.refined is None else 1 if self.jvp is None else 2
        self.again = tuple(range(self.count)) * times
        self.ready = self.pushed = self.specialized.contract.check == "never"
        opaque = hasattr(self.specialized.of, "kernel")  # a kernel leaves no graph
        self.pushes = not opaque and None not in self.likes
        self.records = self.pushes and self.bwd is None
        self.saves_no_extras = False
        if self.bwd is None:
            self.fwd, self.ready = self.fun, True  # its forward pass is f

    def _of_trees(self, of: Any, specialized: Specialization, statics: tuple[Any, ...]) -> None:
        """The author's functions as functions of flat tensors."""
        arguments = tuple if self.flat else specialized.arguments
        self.fun = lambda *xs: of._binding.call(of.fun, statics, arguments(xs))
        if of.bwd is not None:
            self.fwd = lambda *xs: of.fwd(*statics, *arguments(xs))
            self.bwd = partial(of.bwd, *statics)
        if of.jvp is not None:
            tangents = tuple if self.flat else specialized.tangents
            self.jvp = lambda xs, dxs: of.jvp(*statics, arguments(xs), tangents(dxs))

    def pulled_back(self, ctx: Any, cts: tuple[Any, ...]) -> Sequence[Any]:
        """The backward pass at any order, after setting the attributes that `ctx` lacks."""
        point, plan = ctx.point, ctx.point.plan
        ctx.like_ys = plan.likes or [None if ct is None else like(ct) for ct in cts]
        ctx.unusual = unusual(cts)
        ctx.pulling, ctx.avals, ctx.like_xs = plan.pulling, self.avals, self.likes
        if point.linearized is None:
            point.linearized = self._maps(point, ctx.like_ys)
        result = pulled_back(ctx, cts)
        if None not in self.likes:
            self.pulled = self.bwd is not None
        return tuple(result)

    def _maps(self, point: Any, like_ys: Sequence[Any]) -> Linearized:
        """The maps of one evaluation."""
        specialized, plan = self.specialized, point.plan
        if self.bwd is None:
            maps = specialized.rule.linearized_from([None] * self.count, [])
            given = point.randomness
            return maps if given is None else functions.drawing_again(maps, given)
        maps = specialized.maps([], [], plan.kept, plan.out_def, self.expected)
        if specialized.refined is None:
            return maps
        outs = [one and one[:2] for one in like_ys[: point.count]]
        return specialized.refined(maps, [one is not None for one in self.likes], outs)

    def cotangents(self, cotangents: Any) -> Sequence[Any]:
        """The checked cotangents that bwd returned, one for each argument."""
        if self.flat and type(cotangents) is tuple and len(cotangents) == self.count:
            pairs = zip(cotangents, self.avals, strict=True)
            if all(type(g) is Tensor and (g.shape, g.dtype) == aval[:2] for g, aval in pairs):
                return cotangents
        return filled(self.specialized.cotangents(cotangents, self.expected), self.likes)

    def out_def(self) -> Any:
        """The structure of f's latest output at these avals."""
        return self.specialized.outs[self.contract_key[1]]

    def is_sure(self) -> bool:
        """Whether fwd is known to save inputs and outputs only, so that it never runs again."""
        self.saves_no_extras = (
            self.bwd is not None and self.specialized.rule in functions.SAVES_NO_EXTRAS
        )
        return self.saves_no_extras

    def is_pushed(self) -> bool:
        """Whether the forward rule, if there is one, was checked."""
        if self.jvp is not None and not self.pushed:
            avals, tangents = self.contract_key[1], tuple([x[:2] for x in self.expected])
            keys = {("the forward rule", avals), ("zero", "tangent", (avals, tangents))}
            self.pushed = keys <= self.specialized.contract.passed
        return self.pushed or (self.jvp is None and _graphs())

    def is_ready(self) -> bool:
        """Whether the forward pass was checked, in an earlier call through `installing.py`."""
        self.ready = self.ready or self.contract_key in self.specialized.contract.passed
        return self.ready


class DirectCalls:
    """Calls of one `CustomRule`."""

    def __init__(self, of: Any) -> None:
        self.of = of
        self.count = (
            0 if of._needs_binding else len(of._binding.names)
        )  # 0 where any number may come
        self.signatures: dict[Any, _Signature] = {}
        self.closed = Closures((of.fun, of.fwd, of.bwd, of.jvp))

    @staticmethod
    def fit(of: CustomRule) -> bool:
        """Whether the rule has calls that the fast path covers."""
        return not of.symbolic_zeros and of.check != "always" and bool(of.bwd or of.jvp)

    def call(self, args: tuple[Any, ...], statics: tuple[Any, ...]) -> Any:
        """The rule's output, or NotImplemented if the fast path does not cover the call."""
        if _is_compiling() or (len(args) != self.count and self.count) or _levels() is not None:
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
        tracked = False
        try:
            for x in args:
                if x.layout is not _STRIDED or is_wrapped(x):
                    return NotImplemented
                key += x.shape, x.dtype, x.device
                tracked = tracked or x.requires_grad
        except RuntimeError:  # a nested tensor has no shape
            return NotImplemented
        signature = self.signatures.get(key) or self._signature(key, args, structure)
        if signature is None:
            return NotImplemented
        if not tracked or not _graphs():
            if _forward_level() >= 0:
                return self._push(signature, args)
            return self._value(signature, args, tracked)
        if _forward_level() >= 0 or ONGOING.running or WATCHING.count:
            return NotImplemented
        if not (signature.ready or signature.is_ready()):
            return NotImplemented
        for cell, content in self.closed.cells:
            if cell.cell_contents is not content:
                self.closed.search()
                return NotImplemented
        if self.closed.unsure and not self.closed.untracked():
            return NotImplemented
        if signature.records:
            out = _recorded(signature, args)
            if out is not None:
                return out
        # The value, by one run of fwd, with the node that pulls back.
        sure = signature.saves_no_extras or signature.is_sure()
        before = None if sure else Randomness.now(args)
        plain = tuple(map(_detach, args))
        versions = [*map(_version, plain)]
        try:
            result = signature.fwd(*plain)
        finally:
            if not _graphs():  # fwd left it off
                upstream.set_grad_enabled(True)
        if versions != [*map(_version, plain)]:
            _refuse_written(signature, args, versions)
        if signature.bwd is None:
            return _linearized(signature, args, plain, result, plain, before)
        if type(result) is not tuple or len(result) != 2:
            result = signature.specialized.pair(result, "fwd", "(out, residuals)")
        out, res = result
        if type(out) is Tensor and out.dtype.is_floating_point and not out.requires_grad:
            known = plain + (out,)
            plan = signature.plan
            if plan is None or (
                res is not known[plan.places[0]]
                if plan.form is Tensor
                else not plan.fits(res, known)
            ):
                plan = _plan_of(signature, res, known)
            if plan is not None:
                return attach(plan.point, (out,), *args)[0]
        return _linearized(signature, args, plain, out, res, before)

    def _push(self, signature: _Signature, args: tuple[Any, ...]) -> Any:
        if (
            ONGOING.running
            or WATCHING.count
            or upstream.count_of_function_modes()  # which may hide that gradients are off
            or not (signature.pushes and signature.is_pushed())
            or not self.closed.untracked()
            or any(map(is_dual, self.closed.tensors))
        ):
            return NotImplemented
        enabled = _graphs()
        try:
            return _pushed(signature, args)
        finally:
            if _graphs() is not enabled:  # the rule left it so
                upstream.set_grad_enabled(enabled)

    def _structure(self, args: Any, statics: tuple[Any, ...]) -> tuple[tuple[Any, ...], Any]:
        """The tensors of a call, and a key of its structure and constants; empty if unhashable."""
        xs, treedef, others, arrays = args, None, (), ()
        if any(type(x) not in _PLAIN for x in args):
            leaves, treedef = self.of._backend.flatten_static(args)
            arrays = tuple([isinstance(x, Tensor) for x in leaves])
            xs = tuple([x for x in leaves if isinstance(x, Tensor)])
            others = tuple([x for x in leaves if not isinstance(x, Tensor)])
            if any(type(x) not in _PLAIN for x in xs):
                return (), ()
        constants = (*statics, *others)
        if any(type(x) not in _CONSTANTS for x in constants):
            return (), ()
        return xs, (treedef, statics, others, arrays, type_key(constants))

    def _signature(self, key: Any, args: tuple[Any, ...], structure: Any) -> _Signature | None:
        if torch.jit.is_tracing():  # type: ignore[attr-defined]
            return None  # sizes are tensors there
        of, backend = self.of, self.of._backend
        treedef, statics, others, arrays, _ = structure[1] if structure else (None, (), (), (), ())
        flat = treedef is None
        if flat:
            treedef, arrays = backend.flatten_static(args)[1], (True,) * len(args)
        specialized = of._specialized(statics, treedef, arrays, others)
        who = "fwd" if of.bwd is not None else "the forward rule"
        avals = tuple([(x.shape, x.dtype, x.device) for x in args])
        contract_key = who, tuple([(tuple(shape), dtype) for shape, dtype, _ in avals])
        result = self.signatures[key] = _Signature(specialized, flat, avals, contract_key)
        if len(self.signatures) > _MOST:
            del self.signatures[next(iter(self.signatures))]
        return result

    def _value(self, signature: _Signature, args: tuple[Any, ...], tracked: bool) -> Any:
        out = signature.fun(*args)
        if signature.valued and type(out) is Tensor:
            ys = [out]
        else:
            specialized = signature.specialized
            ys = specialized.outputs(args, out, "it")
            out = self.of._backend.unflatten(signature.out_def(), ys)
            signature.valued = True
        for y in ys:
            if y.requires_grad and not tracked:
                raise closed_over_error(signature.specialized.rule)
        return out


_MOST = 256


# --- one call ----------------------------------------------------------------------------


@dataclass(eq=False)
class _Plan:
    """How to rebuild the residuals of a forward pass from saved tensors.

    Attributes:
        kept: The structure of the residuals.
        out_def: The structure of the output.
        pulling: The tensors to save, as positions in `[*xs, *ys, *extras]`.
        form: Tensor or tuple, if the residuals are a single tensor or a tuple of tensors.
        single: Whether f returned a single tensor in no tree.
        likes: The shapes, dtypes and devices of outputs and extras; None: those of the cotangents.
        point: A `RuleApplication` shared by all calls with this plan, if it has no state of one.
    """

    backend: Any
    kept: Residuals
    out_def: Any
    pulling: Sequence[int]
    form: Any = None
    single: bool = True
    likes: Any = None
    point: Any = None

    def __post_init__(self) -> None:
        self.places = self.kept.places

    def fits(self, res: Any, known: Sequence[Tensor]) -> bool:
        """Whether the tuple `res` holds the same inputs and outputs as this plan."""
        if type(res) is not tuple or len(res) != len(self.places):
            return False
        return False not in [x is known[i] for x, i in zip(res, self.places, strict=True)]

    def residuals(self, saved: Sequence[Tensor]) -> Any:
        """The residuals, rebuilt from saved tensors; not called if they are a single tensor."""
        saved = saved[: len(self.places)]
        return saved if self.form is tuple else self.kept.restored(self.backend, saved)


def _refuse_written(signature: _Signature, xs: Sequence[Tensor], versions: Sequence[int]) -> None:
    """Raises if one of xs that is differentiated has another version now."""
    pairs = zip(versions, xs, strict=True)
    if any(x.requires_grad and _version(x) != version for version, x in pairs):
        raise functions.written_error(signature.specialized.rule)


def _plan_of(signature: _Signature, res: Any, known: Sequence[Tensor]) -> _Plan | None:
    """The plan if fwd saved only arguments and the output, as a tensor or a tuple; else None."""
    form, leaves = (Tensor, (res,)) if type(res) is Tensor else (tuple, res)
    if type(leaves) is not tuple:
        return None
    at = {id(x): i for i, x in reversed([*enumerate(known)])}
    places = tuple([at.get(id(x), -1) for x in leaves])
    if -1 in places:
        return None
    plan = signature.plans.get((form, places))
    if plan is None:
        backend = signature.specialized.backend
        kept = Residuals.of_arrays(backend.flatten(res)[1], places)
        out_def, pulling = backend.flatten(known[-1])[1], (*places, *signature.again)
        plan = _Plan(backend, kept, out_def, pulling, form)
        plan.point = RuleApplication(
            signature.specialized.rule, count=1, signature=signature, plan=plan
        )
        signature.plans[form, places] = plan
    signature.plan = plan
    return plan


def _linearized(signature: _Signature, xs: Any, plain: Any, out: Any, res: Any, before: Any) -> Any:
    """The outputs with their node, for any tree of outputs and residuals, views and extras."""
    specialized, backend = signature.specialized, signature.specialized.backend
    single = type(out) is Tensor
    if single and signature.bwd is not None:
        ys, out_def = [out], backend.flatten(out)[1]
    else:  # f's output is the reference for the forward rule
        ys = specialized.outputs(plain, out, "it" if signature.bwd is None else "fwd")
        out_def = signature.out_def()
    kept, extras = Residuals.of(backend, res, plain, ys)
    outs = (*ys, *extras)
    if True in map(_is_tracked, outs):
        raise closed_over_error(specialized.rule)
    point = RuleApplication(specialized.rule, count=len(ys), signature=signature)
    if extras or kept.opaque_residuals or signature.bwd is None:
        if before is None and signature.bwd is not None:
            functions.SAVES_NO_EXTRAS.discard(specialized.rule)
            signature.saves_no_extras = False
            before = Randomness.now(xs)
            out, res = specialized.pair(signature.fwd(*plain), "fwd", "(out, residuals)")
            return _linearized(signature, xs, plain, out, res, before)
        point.randomness = None if before is None or before.is_unchanged() else before
    again = range(len(xs)) if extras or kept.opaque_residuals else ()
    pulling = (*kept.places, *signature.again)
    pulling = (*pulling, *(i for i in again if i not in pulling))
    point.plan = _Plan(backend, kept, out_def, pulling, single=single, likes=list(map(like, outs)))
    result = attach(point, outs, *xs)
    return result[0] if single else backend.unflatten(out_def, result[: point.count])


# --- a forward rule alone ----------------------------------------------------------------
#
# Autograd transposes its tangent map T(x) in the graph of the call. T(x) is linear in dx, so its
# graph is the same at any dx; at dx = x the graph leads a cotangent to x.


def _recorded(signature: _Signature, xs: tuple[Tensor, ...]) -> Any:
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
        _refuse_written(signature, xs, versions)
    if type(result) is not tuple or len(result) != 2:
        return None
    y, dy = result
    if not (type(y) is type(dy) is Tensor and y.shape == dy.shape and y.dtype is dy.dtype):
        return None
    if y.requires_grad:
        raise closed_over_error(signature.specialized.rule)
    if not dy.requires_grad:
        return None
    plan = signature.recorded
    if plan is None:
        every = tuple(range(signature.count))
        backend, kept = signature.specialized.backend, Residuals.of_arrays(None, every)
        plan = signature.recorded = _Plan(backend, kept, None, every)
        plan.point = RuleApplication(
            signature.specialized.rule, count=1, signature=signature, plan=plan
        )
    # Detached: the graph may hold y itself, which would be a reference cycle.
    return attach_recorded(plan.point, (y.detach(),), *xs, dy)[0]


def _may_record(signature: _Signature, xs: tuple[Tensor, ...]) -> bool:
    """Whether f returns one tensor, and its tangent map passes the checks for transposition.

    Runs under identity saved-tensors hooks, so that no checkpoint counts its tensors.
    """
    specialized, avals = signature.specialized, signature.contract_key[1]
    types = signature.likes, signature.avals
    with unpacked():
        try:
            check_linear(CheckedMap(specialized.rule, "tangent", specialized.tangent, xs, *types))
            if avals not in specialized.outs:
                with torch.no_grad(), restored(Randomness.now(xs)):
                    specialized.tangent(xs, [torch.zeros_like(x) for x in xs])
        except GradtoolsError:  # raised again when a derivative is taken
            return False
        single = signature.out_def() == specialized.backend.flatten(0)[1]
        return single and not _has_leaves(signature, xs)


def _has_leaves(signature: _Signature, xs: tuple[Tensor, ...]) -> bool:
    """Whether the tangent's graph ends in leaves that the rule itself created.

    Raises if two evaluations end in the same leaf, which is a captured tensor whose derivative
    would be lost.
    """
    rule = signature.specialized.rule

    def leaves() -> list[Any]:
        dxs = [torch.ones_like(x, requires_grad=True) for x in xs]
        with restored(Randomness.now(xs)), Transposing(rule, EAGER):
            dys = signature.specialized.tangent(xs, dxs)
        return [node.variable for node in other_leaves(dys, dxs)]

    first = leaves()
    if first and {*map(id, first)} & {*map(id, leaves())}:
        raise closed_over_error(rule)
    return bool(first)


def _are_alike(y: Any, dy: Any) -> bool:
    return type(y) is type(dy) is Tensor and y.shape == dy.shape and y.dtype is dy.dtype


# --- forward mode alone ---------------------------------------------------------------------


def _pushed(signature: _Signature, args: tuple[Tensor, ...]) -> Any:
    """Outputs with their tangents, by one evaluation of the forward rule if there is one."""
    specialized, level = signature.specialized, upstream.forward_level()
    xs, dxs = zip(*[upstream.unpack_dual(x, level) for x in args], strict=True)
    if None in dxs:
        if not any(t is not None for t in dxs):
            return NotImplemented
        dxs = tuple(filled(dxs, signature.likes))
    if signature.jvp is None:
        for dx in dxs:
            if dx.requires_grad:
                return NotImplemented
        return _pushed_by_bwd(signature, xs, dxs)
    result = signature.jvp(xs, dxs)
    if type(result) is tuple and len(result) == 2 and _are_alike(*result):
        ys, dys, out_def = [result[0]], [result[1]], None
    else:
        ys, dys = specialized.pushed(xs, result)
        out_def = signature.out_def()
    duals = as_duals(specialized.rule, xs, dxs, ys, dys)
    return duals[0] if out_def is None else specialized.backend.unflatten(out_def, duals)


def _pushed_by_bwd(signature: _Signature, xs: tuple[Tensor, ...], dxs: Sequence[Tensor]) -> Any:
    """Output and tangent without a forward rule, by transposing bwd with autograd."""
    specialized = signature.specialized
    out, res = specialized.pair(signature.fwd(*xs), "fwd", "(out, residuals)")
    if not _graphs():  # transposing needs a graph
        upstream.set_grad_enabled(True)
    if type(out) is not Tensor or not out.dtype.is_floating_point:
        return NotImplemented
    if not signature.pushed:
        signature.pushed = _may_transpose(signature, xs, out, res)
    ct = torch.ones_like(out, requires_grad=True)
    with Transposing(specialized.rule, EAGER):
        pulled = signature.cotangents(signature.bwd(res, ct))
    pairs = [(g, dx) for g, dx in zip(pulled, dxs, strict=True) if g.requires_grad]
    dy = None
    if pairs:
        ends, seeds = zip(*pairs, strict=True)
        with corrected(wrong_nodes(ends), again=False):
            (dy,) = upstream.run_engine(
                ends, seeds, False, False, (ct,), allow_unreachable=True, accumulate_grad=False
            )
    (dual,) = as_duals(specialized.rule, xs, dxs, [out], filled([dy], [like(out)]))
    return dual


def _may_transpose(signature: _Signature, xs: Any, out: Tensor, res: Any) -> bool:
    """True; raises if fwd or bwd violates the contract."""
    specialized = signature.specialized
    ys = specialized.outputs(xs, out, "fwd")
    kept, extras = Residuals.of(specialized.backend, res, xs, ys)
    maps = specialized.maps(ys, extras, kept, signature.out_def(), signature.expected)
    at = maps.saved(xs)[: len(kept.places)]
    assert maps.cotangent is not None
    check_linear(CheckedMap(specialized.rule, "cotangent", maps.cotangent, at, [like(out)]))
    return True
