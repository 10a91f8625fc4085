"""A fast path for calls of a custom rule with tensors alone, in plain eager mode.

What `installing.py` does for any call costs several times what a bare `torch.autograd.Function`
does. Most of it is the same for all calls with arguments of the same shapes and dtypes: the rule,
the structures, what is held to the contract. Here it is looked up. Whatever is out of the common,
be it a transform, a compiler, dual numbers, another class of tensor or the first call of its kind,
takes the long way, and so does the derivative of a backward pass.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import attrgetter
from types import FunctionType
from typing import Any

import torch

from gradtools.custom_rules import CustomRule
from gradtools.custom_structure import Residuals, Shaped
from gradtools.errors import GradtoolsError
from gradtools.rules import Linearized
from gradtools.torch import _upstream as upstream
from gradtools.torch.functorch_wrappers import filled, is_dual, is_inexact, is_wrapped, like
from gradtools.torch.patches import WATCHING
from gradtools.torch.plain_programs.backward_nodes import corrected, wrong_nodes
from gradtools.torch.randomness import Randomness, restored
from gradtools.torch.rules import installing
from gradtools.torch.rules.checking import Question, hold_linear
from gradtools.torch.rules.installing import is_alias_of
from gradtools.torch.rules.transposing import EAGER, HERE, Transposing, unpacked

Tensor = torch.Tensor
_is_tracked = attrgetter("requires_grad")
_detach, _version = Tensor.detach, upstream.version_of
_is_compiling, _levels = torch.compiler.is_dynamo_compiling, upstream.peek_interpreter_stack
_forward_level, _graphs = upstream.forward_level, torch.is_grad_enabled
_PLAIN = (Tensor, torch.nn.Parameter)
_STRIDED = torch.strided
_NO = (None,)


@dataclass(eq=False)
class _Signature:
    """What is known of the calls with tensors of the same shapes, dtypes and devices.

    Attributes:
        shaped: The rule for so many tensors.
        avals: The shape, dtype and device of each.
        question: Under what the contract keeps that the forward pass was held to it.
        ready: Whether it was.
        pulled: Whether the backward pass was.
        pushed: Whether the forward rule was.
        valued: Whether it is known what f returns.
    """

    shaped: Shaped
    avals: tuple[Any, ...]
    question: Any
    ready: bool = False
    pulled: bool = False
    pushed: bool = False
    valued: bool = False

    def __post_init__(self) -> None:
        self.count = len(self.avals)
        self.fwd: Any = self.shaped.of.fwd
        self.bwd: Any = self.shaped.of.bwd
        self.jvp: Any = self.shaped.of.jvp
        self.apply = _apply_to_any(self)
        self.attach: Any = None
        self.attached: Any = None  # what that leaves
        self.own = Transposing(self.shaped.rule, EAGER)
        self.likes = [x if x[1].is_floating_point or x[1].is_complex else None for x in self.avals]
        pairs = zip(self.avals, self.likes, strict=True)
        self.expected = [(tuple(x[0]), x[1], one is not None) for x, one in pairs]
        self.plan: Any = None  # of the last forward pass, and mostly of the next
        self.plans: dict[Any, _Saved] = {}
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
            self.fwd, self.ready = self.shaped.of.fun, True  # its forward pass is f

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
    """Calls of one `CustomRule` by position."""

    def __init__(self, of: Any) -> None:
        self.of = of
        self.count = len(of._taken.names)  # 0 where it takes any
        self.signatures: dict[Any, _Signature] = {}
        self.closed = _Closed((of.fun, of.fwd, of.bwd, of.jvp))

    @staticmethod
    def fit(of: CustomRule) -> bool:
        """Whether the rule has calls that may go this way."""
        parameters = of._taken
        if any((*parameters.static, *parameters.keyword_only, parameters.star, of.symbolic_zeros)):
            return False
        return of.check != "always" and bool(of.bwd or of.jvp)

    def call(self, args: tuple[Any, ...]) -> Any:
        """What the rule gives, or NotImplemented."""
        if _is_compiling() or (len(args) != self.count and self.count) or _levels() is not None:
            return NotImplemented
        key: tuple[Any, ...] = ()
        tracked = False
        try:
            for x in args:
                if type(x) not in _PLAIN or x.layout is not _STRIDED or is_wrapped(x):
                    return NotImplemented
                key += x.shape, x.dtype, x.device
                tracked = tracked or x.requires_grad
        except RuntimeError:  # a nested tensor has no shape
            return NotImplemented
        signature = self.signatures.get(key) or self._signature(key, args)
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
        return _linearized(signature, args)

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

    def _signature(self, key: Any, args: tuple[Any, ...]) -> _Signature | None:
        if torch.jit.is_tracing():  # type: ignore[attr-defined]
            return None  # where sizes are tensors
        of, backend = self.of, self.of._backend
        shaped = of._shape((), backend.flatten_static(args)[1], (True,) * len(args), ())
        who = "fwd" if of.bwd is not None else "the forward rule"
        avals = tuple([(x.shape, x.dtype, x.device) for x in args])
        question = who, tuple([(tuple(shape), dtype) for shape, dtype, _ in avals])
        result = self.signatures[key] = _Signature(shaped, avals, question)
        if len(self.signatures) > _MOST:
            del self.signatures[next(iter(self.signatures))]
        return result

    def _value(self, signature: _Signature, args: tuple[Any, ...], tracked: bool) -> Any:
        out = self.of.fun(*args)
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


# `apply` is here that of the class above `Function`, which does not look for transforms of
# `torch.func` and what is left of them, as was done before.


def _apply_of(run: Callable[..., Any], pull: Callable[..., Any]) -> Callable[..., Any]:
    """`apply` of a Function with this forward and this backward pass."""

    class Direct(torch.autograd.Function):
        """A rule, for autograd alone."""

        forward, backward = staticmethod(run), staticmethod(pull)

    upstream.backward_class(Direct).apply = pull
    return super(torch.autograd.Function, Direct).apply


def _apply_to_any(signature: _Signature) -> Callable[..., Any]:
    """`apply(plan, outs, *inputs)`, of calls of one signature."""

    def backward(ctx: Any, *cts: Any) -> Any:
        return None, None, *_backward(signature, ctx, cts)

    return _apply_of(_attached, backward)


def _apply_at(signature: _Signature, plan: _Saved) -> Callable[..., Any]:
    """`apply(outs, *inputs)`, where one output comes and arrays alone are saved."""
    pulling, alone = plan.pulling, plan.kept is Tensor
    bwd, saves = signature.bwd, len(plan.places)
    avals = signature.avals

    def forward(ctx: Any, outs: tuple[Tensor, ...], *inputs: Tensor) -> Tensor:
        ctx.save_for_backward(*map((inputs + outs).__getitem__, pulling))
        return outs[0]

    def backward(ctx: Any, ct: Any) -> Any:
        if not signature.pulled or _graphs() or type(ct) is not Tensor:
            ctx.plan = plan
            return None, *_the_long_way(ctx, signature, (ct,))
        saved = ctx.saved_tensors
        cotangents = bwd(saved[0] if alone else saved[:saves], ct)
        if type(cotangents) is tuple and len(cotangents) == len(avals):
            left = iter(avals)
            for g in cotangents:
                shape, dtype, _ = next(left)
                if type(g) is not Tensor or g.dtype is not dtype or g.shape != shape:
                    break
            else:
                return _NO + cotangents
        return None, *_checked(signature, cotangents)

    return _apply_of(forward, backward)


@dataclass(slots=True)
class _Saved:
    """What a forward pass leaves for the backward pass, besides tensors.

    Attributes:
        kept: How what was saved is put together again: a tensor, a tuple, or as `Residuals` say.
        places: Where it came from, in `[*xs, *ys, *extras]`.
        pulling: What is kept, positions likewise.
        single: Whether f returned one tensor, and no tree.
        out_def: The structure otherwise.
        count: How many outputs there are; extras follow.
        likes: What the outputs and extras look like; None: as their cotangents do.
        randomness: As in `installing.Point`.
        apply: That of `_apply_at`.
    """

    kept: Any = tuple
    places: tuple[int, ...] = ()
    pulling: Sequence[int] = ()
    single: bool = True
    out_def: Any = None
    count: int = 1
    likes: Any = None
    randomness: Any = None
    apply: Any = None

    def kept_so(self, res: Any, known: Sequence[Tensor]) -> bool:
        """Whether what fwd saved stands where it stood when this was made."""
        if type(res) is not tuple or len(res) != len(self.places):
            return False
        return False not in [x is known[i] for x, i in zip(res, self.places, strict=True)]


def _linearized(signature: _Signature, xs: tuple[Tensor, ...]) -> Any:
    """The value, by one run of fwd, with the node that pulls back."""
    sure = signature.saves_no_extras or signature.is_sure()
    before = None if sure else Randomness.now(xs)
    plain = tuple(map(_detach, xs))
    versions = [*map(_version, plain)]
    result = signature.fwd(*plain)
    if versions != [*map(_version, plain)]:
        _refuse_written(signature, xs, versions)
    if not _graphs():  # fwd left it off
        upstream.set_grad_enabled(True)
    if signature.bwd is None:
        return _linearized_any(signature, xs, plain, result, plain, before)
    if type(result) is not tuple or len(result) != 2:
        result = signature.shaped.pair(result, "fwd", "(out, residuals)")
    out, res = result
    if type(out) is Tensor and out.dtype.is_floating_point and not out.requires_grad:
        known = plain + (out,)
        plan = signature.plan
        if plan is None or (
            res is not known[plan.places[0]]
            if plan.kept is Tensor
            else not plan.kept_so(res, known)
        ):
            plan = _plan_of(signature, res, known)
        if plan is not None:
            for x in plain:
                if is_alias_of(x, out):
                    break
            else:
                return plan.apply((out,), *xs)
    return _linearized_any(signature, xs, plain, out, res, before)


def _refuse_written(signature: _Signature, xs: Sequence[Tensor], versions: Sequence[int]) -> None:
    """Raises if one of xs that is differentiated has another version now."""
    pairs = zip(versions, xs, strict=True)
    if any(x.requires_grad and _version(x) != version for version, x in pairs):
        raise installing.written_error(signature.shaped.rule)


def _attached(ctx: Any, plan: _Saved, outs: Sequence[Tensor], *inputs: Tensor) -> Any:
    """The forward pass of the Functions here: it is done, and gets its node."""
    if plan.likes is not None:
        outs = _outputs(ctx, plan, outs, inputs)
    ctx.plan = plan
    known = (*inputs, *outs)
    ctx.save_for_backward(*[known[i] for i in plan.pulling])
    return outs[0] if len(outs) == 1 else outs


def _outputs(ctx: Any, plan: _Saved, outs: Any, xs: Any) -> tuple[Tensor, ...]:
    """The same where some are integers or share memory, or come with extras."""
    result = (*installing.as_views(outs[: plan.count], xs), *outs[plan.count :])
    if None in plan.likes:
        ctx.mark_non_differentiable(*[y for y in result if not is_inexact(y)])
    if len(result) > 1:
        ctx.set_materialize_grads(False)
    return result


def _plan_of(signature: _Signature, res: Any, known: Sequence[Tensor]) -> _Saved | None:
    """Where fwd saved arguments and the output alone, in no tree."""
    kept, leaves = (Tensor, (res,)) if type(res) is Tensor else (tuple, res)
    if type(leaves) is not tuple:
        return None
    places = tuple([_place(x, known) for x in leaves])
    if -1 in places:
        return None
    plan = signature.plans.get((kept, places))
    if plan is None:
        plan = signature.plans[kept, places] = _Saved(kept, places, (*places, *signature.again))
        plan.apply = _apply_at(signature, plan)
    signature.plan = plan
    return plan


def _place(x: Any, known: Sequence[Tensor]) -> int:
    """Where x stands among these; -1 if it is not one of them."""
    return next((i for i, y in enumerate(known) if x is y), -1)


def _linearized_any(
    signature: _Signature, xs: Any, plain: Any, out: Any, res: Any, before: Any
) -> Any:
    """With a tree of outputs, with views, extras, or what else fwd may save."""
    shaped = signature.shaped
    plan = _Saved(single=type(out) is Tensor)
    if plan.single and signature.bwd is not None:
        ys = [out]
    else:  # what f returns is what the forward rule is held to
        ys = shaped.outputs(plain, out, "it" if signature.bwd is None else "fwd")
        plan.out_def = signature.out_def()
    plan.kept, extras = Residuals.of(shaped.backend, res, plain, ys)
    outs = (*ys, *extras)
    if True in map(_is_tracked, outs):
        raise installing.closed_over_error(shaped.rule)
    if extras or plan.kept.opaque_residuals or signature.bwd is None:
        if before is None and signature.bwd is not None:
            installing.SAVES_NO_EXTRAS.discard(shaped.rule)
            signature.saves_no_extras = False
            return _linearized(signature, xs)
        plan.randomness = None if before is None or before.stands() else before
    plan.count, plan.places = len(ys), plan.kept.places
    again = range(len(xs)) if extras or plan.kept.opaque_residuals else ()
    pulling = (*plan.places, *signature.again)
    plan.pulling = [*pulling, *(i for i in again if i not in pulling)]
    plan.likes = list(map(like, outs))
    result = signature.apply(plan, outs, *xs)
    result = (result,) if type(result) is Tensor else result
    return (
        result[0] if plan.single else shaped.backend.unflatten(plan.out_def, result[: plan.count])
    )


def _backward(signature: _Signature, ctx: Any, cts: tuple[Any, ...]) -> Sequence[Any]:
    plan, kept = ctx.plan, ctx.plan.kept
    if (
        not (signature.pulled and plan.single and type(cts[0]) is Tensor)
        or _graphs()
        or any(ct is not None for ct in cts[1:])
    ):
        return _the_long_way(ctx, signature, cts)
    res = kept.restored(signature.shaped.backend, ctx.saved_tensors[: len(plan.places)])
    return _checked(signature, signature.bwd(res, cts[0]))


def _checked(signature: _Signature, cotangents: Any) -> Sequence[Any]:
    """What bwd returned, one for each argument."""
    if type(cotangents) is tuple and len(cotangents) == signature.count:
        pairs = zip(cotangents, signature.avals, strict=True)
        if all(type(g) is Tensor and (g.shape, g.dtype) == aval[:2] for g, aval in pairs):
            return cotangents
    return filled(signature.shaped.cotangents(cotangents, signature.expected), signature.likes)


# --- a forward rule alone ----------------------------------------------------------------
#
# Its tangent map is transposed by autograd where it stands. It is linear, so the graph of T(x) dx
# is the same at any dx, and at dx = x it leads a cotangent on to x.


def _recorded(signature: _Signature, xs: tuple[Tensor, ...]) -> Any:
    """The value, by one evaluation of the forward rule; None where it has to go another way."""
    plain = tuple(map(_detach, xs))
    if signature.attach is None and not _may_record(signature, plain):
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
    if versions != [*map(_version, plain)]:
        _refuse_written(signature, xs, versions)
    if not _graphs():  # the rule left it off
        upstream.set_grad_enabled(True)
    if type(result) is not tuple or len(result) != 2:
        return None
    y, dy = result
    if not (type(y) is type(dy) is Tensor and y.shape == dy.shape and y.dtype is dy.dtype):
        return None
    if y.requires_grad:
        raise installing.closed_over_error(signature.shaped.rule)
    if not dy.requires_grad:
        return None
    if signature.attach is None:
        signature.attach, signature.attached = _attach_of(signature)
    plan = signature.attached
    for x in plain:
        if is_alias_of(x, y):
            plan = _Saved(places=plan.places, pulling=plan.pulling, likes=[like(y)])
    # Detached, for y itself may be held by the graph that it would hold.
    return signature.attach(plan, (y.detach(),), *xs, dy)


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


def _attach_of(signature: _Signature) -> tuple[Callable[..., Any], _Saved]:
    """`apply` of the Function that gives a value its tangent's graph, and what it leaves."""
    plan = _Saved(places=(every := tuple(range(signature.count))), pulling=every)

    nothing = (None,) * (2 + signature.count)

    class Attached(torch.autograd.Function):
        """y, of which dy is the tangent. A derivative of its backward pass is the rule's."""

        forward = staticmethod(_attached)

        @staticmethod
        def backward(ctx: Any, ct: Tensor) -> Any:
            if _graphs():
                return None, None, *_the_long_way(ctx, signature, (ct,)), None
            if _is_compiling():  # compiled autograd cannot add a tensor to None
                return None, None, *[torch.zeros_like(x) for x in ctx.saved_tensors], ct
            return *nothing, ct

    upstream.backward_class(Attached).apply = Attached.backward
    return super(torch.autograd.Function, Attached).apply, plan


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
        pulled = _checked(signature, signature.bwd(res, ct))
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


# --- the long way ------------------------------------------------------------------------


def _the_long_way(ctx: Any, signature: _Signature, cts: tuple[Any, ...]) -> Any:
    """The backward pass of `torch/rules/installing.py`, of this call."""
    plan, shaped = ctx.plan, signature.shaped
    ctx.like_ys = plan.likes or [like(ct) for ct in cts]
    maps = _maps(plan, signature, ctx.like_ys)
    if plan.randomness is not None and signature.bwd is None:
        maps = installing.drawing_again(maps, plan.randomness)
    ctx.point = installing.RuleApplication(
        shaped.rule, maps, count=plan.count, randomness=plan.randomness
    )
    ctx.unusual = installing.unusual(cts)
    ctx.pulling, ctx.avals, ctx.like_xs = plan.pulling, signature.avals, signature.likes
    result = installing.pulled_back(ctx, cts)
    easy = None not in signature.likes
    if easy and not _graphs():
        signature.pulled = signature.bwd is not None
    return tuple(result)


def _maps(plan: _Saved, signature: _Signature, like_ys: Sequence[Any]) -> Linearized:
    shaped, kept = signature.shaped, plan.kept
    if shaped.of.bwd is None:
        return shaped.rule.reading([None] * signature.count, [])
    backend = shaped.backend
    if kept is Tensor or kept is tuple:
        tree = 0 if kept is Tensor else (0,) * len(plan.places)
        kept = Residuals.of_arrays(backend.flatten(tree)[1], plan.places)
    out_def = backend.flatten(0)[1] if plan.single else plan.out_def
    maps = shaped.maps([], [], kept, out_def, signature.expected)
    if shaped.refined is None:
        return maps
    outs = [one and one[:2] for one in like_ys[: plan.count]]
    return shaped.refined(maps, [one is not None for one in signature.likes], outs)
