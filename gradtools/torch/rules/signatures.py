"""What the first call of a rule at a signature leaves for the later ones.

A signature is the shapes, dtypes and devices of a call's tensors. All that is the same for its
calls is settled at the first one, which `installing.py` makes: the rule, its structures, whether
its functions pass the contract, what they close over. A later call in plain eager mode runs the
author's function, compares what it returned with what was seen, and attaches the node.

Where anything else looks on (a transform, a compiler, dual numbers beside a graph, another class of
tensor), and where a backward pass is differentiated, `installing.py` does the same in general.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from operator import attrgetter
from types import FunctionType
from typing import Any

import torch

from gradtools.custom_rules import CustomRule
from gradtools.custom_structure import Residuals, Shaped
from gradtools.errors import GradtoolsError
from gradtools.host_kernels import told_apart
from gradtools.rules import Linearized
from gradtools.torch import _upstream as upstream
from gradtools.torch.functorch_wrappers import filled, is_dual, is_wrapped, like
from gradtools.torch.patches import WATCHING
from gradtools.torch.plain_programs.backward_nodes import corrected, wrong_nodes
from gradtools.torch.randomness import Randomness, restored
from gradtools.torch.rules import installing
from gradtools.torch.rules.checking import Question, hold_linear
from gradtools.torch.rules.installing import (
    RuleApplication,
    attach,
    attach_recorded,
    is_alias_of,
)
from gradtools.torch.rules.transposing import EAGER, HERE, Transposing, unpacked

Tensor = torch.Tensor
_is_tracked = attrgetter("requires_grad")
_detach, _version = Tensor.detach, upstream.version_of
_is_compiling, _levels = torch.compiler.is_dynamo_compiling, upstream.peek_interpreter_stack
_forward_level, _graphs = upstream.forward_level, torch.is_grad_enabled
_PLAIN = (Tensor, torch.nn.Parameter)
_STRIDED = torch.strided
_CONSTANTS = (bool, int, float, complex, str, bytes, type(None), torch.dtype)


def _as_they_are(xs: Any) -> Any:
    return xs


@dataclass(eq=False)
class _Signature:
    """What is known of the calls with tensors of the same shapes, dtypes and devices.

    Attributes:
        shaped: The rule at this structure of its arguments.
        flat: Whether these are tensors alone.
        avals: The shape, dtype and device of each.
        question: Under what the contract keeps that the forward pass was held to it.
        ready: Whether it was.
        pulled: Whether the backward pass was.
        pushed: Whether the forward rule was.
        valued: Whether it is known what f returns.
    """

    shaped: Shaped
    flat: bool
    avals: tuple[Any, ...]
    question: Any
    ready: bool = False
    pulled: bool = False
    pushed: bool = False
    valued: bool = False

    def __post_init__(self) -> None:
        self.count = len(self.avals)
        of, shaped, statics = self.shaped.of, self.shaped, self.shaped.statics
        self.fun: Any = of.fun
        self.fwd: Any = of.fwd
        self.bwd: Any = of.bwd
        self.jvp: Any = of.jvp
        if statics or not self.flat:
            self._of_trees(of, shaped, statics)
        self.nothing = (None,) * (2 + self.count)
        self.recorded: _Plan | None = None  # of a forward rule alone
        self.own = Transposing(self.shaped.rule, EAGER)
        self.likes = [x if x[1].is_floating_point or x[1].is_complex else None for x in self.avals]
        pairs = zip(self.avals, self.likes, strict=True)
        self.expected = [(tuple(x[0]), x[1], one is not None) for x, one in pairs]
        self.plan: Any = None  # of the last forward pass, and mostly of the next
        self.plans: dict[Any, _Plan] = {}
        # The maps of kernels, to be differentiated again, are evaluated at the arguments; a forward
        # rule reads these as well.
        times = 0 if self.shaped.refined is None else 1 if self.jvp is None else 2
        self.again = tuple(range(self.count)) * times
        self.ready = self.pushed = self.shaped.contract.check == "never"
        opaque = hasattr(self.shaped.of, "kernel")  # what it does to tangents leaves no graph
        self.pushes = not opaque and None not in self.likes
        self.records = self.pushes and self.bwd is None
        self.saves_no_extras = False
        if self.bwd is None:
            self.fwd, self.ready = self.fun, True  # its forward pass is f

    def _of_trees(self, of: Any, shaped: Shaped, statics: tuple[Any, ...]) -> None:
        """The author's functions as functions of flat tensors."""
        arguments = _as_they_are if self.flat else shaped.arguments
        self.fun = lambda *xs: of._taken.call(of.fun, statics, arguments(xs))
        if of.bwd is not None:
            self.fwd = lambda *xs: of.fwd(*statics, *arguments(xs))
            self.bwd = partial(of.bwd, *statics)
        if of.jvp is not None:
            tangents = _as_they_are if self.flat else shaped.tangents
            self.jvp = lambda xs, dxs: of.jvp(*statics, arguments(xs), tangents(dxs))

    def pulled_back(self, ctx: Any, cts: tuple[Any, ...]) -> Sequence[Any]:
        """The backward pass of any order, with what `setup_context` left out."""
        point, plan = ctx.point, ctx.point.plan
        ctx.like_ys = plan.likes or [None if ct is None else like(ct) for ct in cts]
        ctx.unusual = installing.unusual(cts)
        ctx.pulling, ctx.avals, ctx.like_xs = plan.pulling, self.avals, self.likes
        if point.linearized is None:
            point.linearized = self._maps(point, ctx.like_ys)
        result = installing.pulled_back(ctx, cts)
        if None not in self.likes:
            self.pulled = self.bwd is not None
        return tuple(result)

    def _maps(self, point: Any, like_ys: Sequence[Any]) -> Linearized:
        """The maps of one evaluation."""
        shaped, plan = self.shaped, point.plan
        if self.bwd is None:
            maps = shaped.rule.linearized_from([None] * self.count, [])
            given = point.randomness
            return maps if given is None else installing.drawing_again(maps, given)
        maps = shaped.maps([], [], plan.kept, plan.out_def, self.expected)
        if shaped.refined is None:
            return maps
        outs = [one and one[:2] for one in like_ys[: point.count]]
        return shaped.refined(maps, [one is not None for one in self.likes], outs)

    def cotangents(self, cotangents: Any) -> Sequence[Any]:
        """What bwd returned, one for each argument."""
        if self.flat and type(cotangents) is tuple and len(cotangents) == self.count:
            pairs = zip(cotangents, self.avals, strict=True)
            if all(type(g) is Tensor and (g.shape, g.dtype) == aval[:2] for g, aval in pairs):
                return cotangents
        return filled(self.shaped.cotangents(cotangents, self.expected), self.likes)

    def out_def(self) -> Any:
        """The structure that came out of such arguments at last, whatever other threads call."""
        return self.shaped.outs[self.question[1]]

    def is_sure(self) -> bool:
        """Whether fwd is known to save nothing that it would have to be run again for."""
        self.saves_no_extras = (
            self.bwd is not None and self.shaped.rule in installing.SAVES_NO_EXTRAS
        )
        return self.saves_no_extras

    def is_pushed(self) -> bool:
        """Whether the forward rule was held to its contract, if there is one."""
        if self.jvp is not None and not self.pushed:
            answered, zero = self.shaped.contract.answered, tuple([x[:2] for x in self.expected])
            avals = self.question[1]
            self.pushed = {
                ("the forward rule", avals),
                ("zero", "tangent", (avals, zero)),
            } <= answered
        return self.pushed or (self.jvp is None and _graphs())

    def is_ready(self) -> bool:
        """Whether the long way was gone once, and the forward pass is held to f."""
        self.ready = self.ready or self.question in self.shaped.contract.answered
        return self.ready


class DirectCalls:
    """Calls of one `CustomRule`."""

    def __init__(self, of: Any) -> None:
        self.of = of
        self.count = 0 if of._binds else len(of._taken.names)  # 0 where any number may come
        self.signatures: dict[Any, _Signature] = {}
        self.closed = _Closed((of.fun, of.fwd, of.bwd, of.jvp))

    @staticmethod
    def fit(of: CustomRule) -> bool:
        """Whether the rule has calls that may go this way."""
        return not of.symbolic_zeros and of.check != "always" and bool(of.bwd or of.jvp)

    def call(self, args: tuple[Any, ...], statics: tuple[Any, ...]) -> Any:
        """What the rule gives, or NotImplemented."""
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
        if _forward_level() >= 0 or HERE.running or WATCHING.count:
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
            result = signature.shaped.pair(result, "fwd", "(out, residuals)")
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
                for x in plain:
                    if is_alias_of(x, out):
                        break
                else:
                    return attach(plan.point, (out,), *args)[0]
        return _linearized(signature, args, plain, out, res, before)

    def _push(self, signature: _Signature, args: tuple[Any, ...]) -> Any:
        if (
            HERE.running
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
        """The tensors of a call, and what tells its structure and constants; none of others."""
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
        return xs, (treedef, statics, others, arrays, told_apart(constants))

    def _signature(self, key: Any, args: tuple[Any, ...], structure: Any) -> _Signature | None:
        if torch.jit.is_tracing():  # type: ignore[attr-defined]
            return None  # where sizes are tensors
        of, backend = self.of, self.of._backend
        treedef, statics, others, arrays, _ = structure[1] if structure else (None, (), (), (), ())
        flat = treedef is None
        if flat:
            treedef, arrays = backend.flatten_static(args)[1], (True,) * len(args)
        shaped = of._shape(statics, treedef, arrays, others)
        who = "fwd" if of.bwd is not None else "the forward rule"
        avals = tuple([(x.shape, x.dtype, x.device) for x in args])
        question = who, tuple([(tuple(shape), dtype) for shape, dtype, _ in avals])
        result = self.signatures[key] = _Signature(shaped, flat, avals, question)
        if len(self.signatures) > _MOST:
            del self.signatures[next(iter(self.signatures))]
        return result

    def _value(self, signature: _Signature, args: tuple[Any, ...], tracked: bool) -> Any:
        out = signature.fun(*args)
        if signature.valued and type(out) is Tensor:
            ys = [out]
        else:
            shaped = signature.shaped
            ys = shaped.outputs(args, out, "it")
            out = self.of._backend.unflatten(signature.out_def(), ys)
            signature.valued = True
        for y in ys:
            if y.requires_grad and not tracked:
                raise installing.closed_over_error(signature.shaped.rule)
        return out


_MOST = 256


class _Closed:
    """What the functions of a rule's author close over, as far as it need not be searched again.

    Cells with the objects in them, and tensors. A list or dict may change without being seen.
    """

    def __init__(self, user_functions: Sequence[Any]) -> None:
        self.user_functions = user_functions
        self.search()

    def untracked(self) -> bool:
        """Whether nothing that is held requires grad; False where that is not known."""
        for cell, content in self.cells:
            if cell.cell_contents is not content:
                self.search()
                return False
        if self.unbound:
            self.search()
        return self.known and not any(x.requires_grad for x in self.tensors)

    def search(self) -> None:
        """Looks at what is held now."""
        self.known = self._search()
        self.unsure = bool(self.tensors) or not self.known  # whether the cells alone do not tell

    def _search(self) -> bool:
        self.cells: list[tuple[Any, Any]] = []
        self.tensors: list[Tensor] = []
        self.unbound = False  # whether a name is not bound yet
        todo, seen = list(self.user_functions), set()
        while todo:
            x = todo.pop()
            if id(x) in seen:
                continue
            seen.add(id(x))
            if isinstance(x, Tensor):
                self.tensors.append(x)
            elif isinstance(x, dict | list | set):
                return False
            elif isinstance(x, tuple | frozenset):
                todo += x
            elif isinstance(x, FunctionType):
                todo += [*(x.__defaults__ or ()), *(x.__kwdefaults__ or {}).values()]
                for cell in x.__closure__ or ():
                    try:
                        self.cells.append((cell, cell.cell_contents))
                    except ValueError:
                        self.unbound = True
                        return False
                    todo.append(cell.cell_contents)
            elif hasattr(x, "func"):
                todo += [x.func, x.args, *x.keywords.values()] if _is_partial(x) else []
        return True


def _is_partial(x: Any) -> bool:
    return all(hasattr(x, name) for name in ("func", "args", "keywords"))


# --- one call ----------------------------------------------------------------------------


@dataclass(eq=False)
class _Plan:
    """How what a forward pass saved is found again, besides tensors.

    Attributes:
        kept: What fwd saved.
        out_def: The structure of the output.
        pulling: What is kept, positions in `[*xs, *ys, *extras]`.
        form: Tensor or tuple, if a tensor or a tuple of tensors was saved, and nothing else.
        single: Whether f returned one tensor, and no tree.
        likes: What the outputs and extras look like; None: as their cotangents do.
        fresh: Whether no output may share memory with an input or another output.
        point: The application of all calls that leave this, if nothing else is of one call.
    """

    backend: Any
    kept: Residuals
    out_def: Any
    pulling: Sequence[int]
    form: Any = None
    single: bool = True
    likes: Any = None
    fresh: bool = True
    point: Any = None

    def __post_init__(self) -> None:
        self.places = self.kept.places

    def fits(self, res: Any, known: Sequence[Tensor]) -> bool:
        """Whether the tuple that fwd saved is of the same arrays as when this was made."""
        if type(res) is not tuple or len(res) != len(self.places):
            return False
        return False not in [x is known[i] for x, i in zip(res, self.places, strict=True)]

    def residuals(self, saved: Sequence[Tensor]) -> Any:
        """What fwd saved, from its arrays; of one tensor alone it is not asked."""
        saved = saved[: len(self.places)]
        return saved if self.form is tuple else self.kept.restored(self.backend, saved)


def _refuse_written(signature: _Signature, xs: Sequence[Tensor], versions: Sequence[int]) -> None:
    """Raises if one of xs that is differentiated has another version now."""
    pairs = zip(versions, xs, strict=True)
    if any(x.requires_grad and _version(x) != version for version, x in pairs):
        raise installing.written_error(signature.shaped.rule)


def _plan_of(signature: _Signature, res: Any, known: Sequence[Tensor]) -> _Plan | None:
    """Where fwd saved arguments and the output alone, in no tree."""
    form, leaves = (Tensor, (res,)) if type(res) is Tensor else (tuple, res)
    if type(leaves) is not tuple:
        return None
    at = {id(x): i for i, x in reversed([*enumerate(known)])}
    places = tuple([at.get(id(x), -1) for x in leaves])
    if -1 in places:
        return None
    plan = signature.plans.get((form, places))
    if plan is None:
        backend = signature.shaped.backend
        kept = Residuals.of_arrays(backend.flatten(res)[1], places)
        out_def, pulling = backend.flatten(known[-1])[1], (*places, *signature.again)
        plan = _Plan(backend, kept, out_def, pulling, form)
        plan.point = RuleApplication(signature.shaped.rule, count=1, signature=signature, plan=plan)
        signature.plans[form, places] = plan
    signature.plan = plan
    return plan


def _linearized(signature: _Signature, xs: Any, plain: Any, out: Any, res: Any, before: Any) -> Any:
    """With a tree of outputs, with views, extras, or what else fwd may save."""
    shaped, backend = signature.shaped, signature.shaped.backend
    single = type(out) is Tensor
    if single and signature.bwd is not None:
        ys, out_def = [out], backend.flatten(out)[1]
    else:  # what f returns is what the forward rule is held to
        ys = shaped.outputs(plain, out, "it" if signature.bwd is None else "fwd")
        out_def = signature.out_def()
    kept, extras = Residuals.of(backend, res, plain, ys)
    outs = (*ys, *extras)
    if True in map(_is_tracked, outs):
        raise installing.closed_over_error(shaped.rule)
    point = RuleApplication(shaped.rule, count=len(ys), signature=signature)
    if extras or kept.opaque_residuals or signature.bwd is None:
        if before is None and signature.bwd is not None:
            installing.SAVES_NO_EXTRAS.discard(shaped.rule)
            signature.saves_no_extras = False
            before = Randomness.now(xs)
            out, res = shaped.pair(signature.fwd(*plain), "fwd", "(out, residuals)")
            return _linearized(signature, xs, plain, out, res, before)
        point.randomness = None if before is None or before.stands() else before
    again = range(len(xs)) if extras or kept.opaque_residuals else ()
    pulling = (*kept.places, *signature.again)
    pulling = (*pulling, *(i for i in again if i not in pulling))
    point.plan = _Plan(
        backend, kept, out_def, pulling, single=single, likes=list(map(like, outs)), fresh=False
    )
    result = attach(point, outs, *xs)
    return result[0] if single else backend.unflatten(out_def, result[: point.count])


# --- a forward rule alone ----------------------------------------------------------------
#
# Its tangent map is transposed by autograd where it stands. It is linear, so the graph of T(x) dx
# is the same at any dx, and at dx = x it leads a cotangent on to x.


def _recorded(signature: _Signature, xs: tuple[Tensor, ...]) -> Any:
    """The value, by one evaluation of the forward rule; None where it has to go another way."""
    plain = tuple(map(_detach, xs))
    if signature.recorded is None and not _may_record(signature, plain):
        signature.records = False
        return None
    versions = [*map(_version, plain)]
    running, own = HERE.running, signature.own
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
        raise installing.closed_over_error(signature.shaped.rule)
    if not dy.requires_grad:
        return None
    plan = signature.recorded
    if plan is None:
        every = tuple(range(signature.count))
        backend, kept = signature.shaped.backend, Residuals.of_arrays(None, every)
        plan = signature.recorded = _Plan(backend, kept, None, every)
        plan.point = RuleApplication(signature.shaped.rule, count=1, signature=signature, plan=plan)
    point = plan.point
    for x in plain:
        if is_alias_of(x, y):
            point = replace(point, plan=replace(plan, likes=[like(y)], fresh=False))
    # Detached, for y itself may be held by the graph that it would hold.
    return attach_recorded(point, (y.detach(),), *xs, dy)[0]


def _may_record(signature: _Signature, xs: tuple[Tensor, ...]) -> bool:
    """Whether the tangent map may be transposed, and belongs to one tensor that f returns.

    Nothing is saved for a backward pass meanwhile, of which a checkpoint would keep count.
    """
    shaped, avals = signature.shaped, signature.question[1]
    question = (signature.likes, signature.avals)
    with unpacked():
        try:
            hold_linear(Question(shaped.rule, "tangent", shaped.tangent, xs, *question))
            if avals not in shaped.outs:
                with torch.no_grad(), restored(Randomness.now(xs)):
                    shaped.tangent(xs, [torch.zeros_like(x) for x in xs])
        except GradtoolsError:  # it will be said where a derivative is asked for
            return False
        single = signature.out_def() == shaped.backend.flatten(0)[1]
        return single and not _has_leaves(signature, xs)


def _has_leaves(signature: _Signature, xs: tuple[Tensor, ...]) -> bool:
    """Whether the tangent's graph ends in leaves of a derivative within the rule.

    Raises if two evaluations end in the same leaf: it is the caller's, whose derivative by it would
    be lost.
    """
    rule = signature.shaped.rule

    def leaves() -> list[Any]:
        dxs = [torch.ones_like(x, requires_grad=True) for x in xs]
        with restored(Randomness.now(xs)), Transposing(rule, EAGER):
            dys = signature.shaped.tangent(xs, dxs)
        return [node.variable for node in installing.other_leaves(dys, dxs)]

    first = leaves()
    if first and {*map(id, first)} & {*map(id, leaves())}:
        raise installing.closed_over_error(rule)
    return bool(first)


def _are_alike(y: Any, dy: Any) -> bool:
    return type(y) is type(dy) is Tensor and y.shape == dy.shape and y.dtype is dy.dtype


# --- forward mode alone ---------------------------------------------------------------------


def _pushed(signature: _Signature, args: tuple[Tensor, ...]) -> Any:
    """Outputs with their tangents, by one evaluation of the forward rule if there is one."""
    shaped, level = signature.shaped, upstream.forward_level()
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
        ys, dys = shaped.pushed(xs, result)
        out_def = signature.out_def()
    duals = installing.as_duals(shaped.rule, xs, dxs, ys, dys)
    return duals[0] if out_def is None else shaped.backend.unflatten(out_def, duals)


def _pushed_by_bwd(signature: _Signature, xs: tuple[Tensor, ...], dxs: Sequence[Tensor]) -> Any:
    """The same by transposing bwd, where it stands."""
    shaped = signature.shaped
    out, res = shaped.pair(signature.fwd(*xs), "fwd", "(out, residuals)")
    if not _graphs():  # for what transposes bwd
        upstream.set_grad_enabled(True)
    if type(out) is not Tensor or not out.dtype.is_floating_point:
        return NotImplemented
    if not signature.pushed:
        signature.pushed = _may_transpose(signature, xs, out, res)
    ct = torch.ones_like(out, requires_grad=True)
    with Transposing(shaped.rule, EAGER):
        pulled = signature.cotangents(signature.bwd(res, ct))
    pairs = [(g, dx) for g, dx in zip(pulled, dxs, strict=True) if g.requires_grad]
    dy = None
    if pairs:
        ends, seeds = zip(*pairs, strict=True)
        with corrected(wrong_nodes(ends), again=False):
            (dy,) = upstream.run_engine(
                ends, seeds, False, False, (ct,), allow_unreachable=True, accumulate_grad=False
            )
    (dual,) = installing.as_duals(shaped.rule, xs, dxs, [out], filled([dy], [like(out)]))
    return dual


def _may_transpose(signature: _Signature, xs: Any, out: Tensor, res: Any) -> bool:
    """True; raises if fwd or bwd is not what it must be."""
    shaped = signature.shaped
    ys = shaped.outputs(xs, out, "fwd")
    kept, extras = Residuals.of(shaped.backend, res, xs, ys)
    maps = shaped.maps(ys, extras, kept, signature.out_def(), signature.expected)
    at = maps.saved(xs)[: len(kept.places)]
    assert maps.cotangent is not None
    hold_linear(Question(shaped.rule, "cotangent", maps.cotangent, at, [like(out)]))
    return True
