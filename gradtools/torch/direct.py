"""A fast path for calls of a custom rule with tensors alone, in plain eager mode.

What `torch/rules.py` does for any call costs several times what a bare `torch.autograd.Function`
does. Most of it is the same for all calls with arguments of the same shapes and dtypes: the rule,
the structures, what is held to the contract. Here it is looked up. Whatever is out of the common,
be it a transform, a compiler, dual numbers, another class of tensor or the first call of its kind,
takes the long way, and so does the derivative of a backward pass.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from operator import attrgetter
from types import FunctionType
from typing import Any

import torch
from torch.autograd.graph import get_gradient_edge

from gradtools.custom import CustomRule
from gradtools.errors import GradtoolsError
from gradtools.rules import Linearized
from gradtools.shaped import Residuals, Shaped
from gradtools.torch import _upstream as upstream
from gradtools.torch import rules
from gradtools.torch.checking import Question, hold_linear
from gradtools.torch.compiling import is_compiling
from gradtools.torch.randomness import Randomness, restored
from gradtools.torch.transposing import EAGER, running, transposing
from gradtools.torch.wrappers import filled, is_inexact, is_wrapped, like

Tensor = torch.Tensor
_is_tracked = attrgetter("requires_grad")
_PLAIN = (Tensor, torch.nn.Parameter)
_STRIDED = torch.strided


@dataclass(eq=False)
class _Signature:
    """What is known of the calls with tensors of the same shapes, dtypes and devices.

    Attributes:
        shaped: The rule for so many tensors.
        looks: The shape, dtype and device of each.
        question: Under what the contract keeps that the forward pass was held to it.
        ready: Whether it was.
        pulled: Whether the backward pass was.
        valued: Whether it is known what f returns.
    """

    shaped: Shaped
    looks: tuple[Any, ...]
    question: Any
    ready: bool = False
    pulled: bool = False
    valued: bool = False

    def __post_init__(self) -> None:
        self.count = len(self.looks)
        self.fwd: Any = self.shaped.of.fwd
        self.bwd: Any = self.shaped.of.bwd
        self.jvp: Any = self.shaped.of.jvp
        self.apply = _apply_of(self)
        self.attach: Any = None
        self.likes = [x if x[1].is_floating_point or x[1].is_complex else None for x in self.looks]
        pairs = zip(self.looks, self.likes, strict=True)
        self.expected = [(tuple(x[0]), x[1], one is not None) for x, one in pairs]
        self.plan: _Saved | None = None  # of the last forward pass, and mostly of the next
        # The maps of kernels, to be differentiated again, are evaluated at the arguments; a forward
        # rule reads these as well.
        times = 0 if self.shaped.refined is None else 1 if self.jvp is None else 2
        self.again = tuple(range(self.count)) * times
        if self.shaped.contract.check == "never":
            self.ready = True
        opaque = hasattr(self.shaped.of, "kernel")  # what it does to tangents leaves no graph
        self.records = self.bwd is None and not opaque and None not in self.likes
        self.saves_no_extras = self.bwd is None
        if self.bwd is None:
            self.fwd, self.ready = self.shaped.of.fun, True  # its forward pass is f

    def out_def(self) -> Any:
        """The structure that came out of such arguments at last, whatever other threads call."""
        return self.shaped.outs[self.question[1]]

    def is_sure(self) -> bool:
        """Whether fwd is known to save nothing that it would have to be run again for."""
        sure = self.saves_no_extras or self.shaped.rule in rules.SAVES_NO_EXTRAS
        self.saves_no_extras = sure
        return sure

    def is_ready(self) -> bool:
        """Whether the long way was gone once, and the forward pass is held to f."""
        self.ready = self.ready or self.question in self.shaped.contract.asked
        return self.ready


class DirectCalls:
    """Calls of one `CustomRule` by position."""

    def __init__(self, of: CustomRule) -> None:
        self.of = of
        self.count = len(of._taken.names)  # 0 where it takes any
        self.signatures: dict[Any, _Signature] = {}
        self.closed = _Closed((of.fun, of.fwd, of.bwd, of.jvp))

    @staticmethod
    def fit(of: CustomRule) -> bool:
        """Whether the rule has calls that may go this way."""
        parameters = of._taken
        special = (*parameters.static, *parameters.keyword_only, parameters.star, of.symbolic)
        return of.check != "always" and bool(of.bwd or of.jvp) and not any(special)

    def __call__(self, args: tuple[Any, ...]) -> Any:
        """What the rule gives, or NotImplemented."""
        if len(args) != self.count and self.count:
            return NotImplemented
        tracked = False
        for x in args:
            if type(x) not in _PLAIN or x.layout is not _STRIDED or x.is_nested or is_wrapped(x):
                return NotImplemented
            tracked = tracked or x.requires_grad
        if (
            upstream.peek_interpreter_stack() is not None
            or upstream.forward_level() >= 0
            or running()
        ):
            return NotImplemented
        key = tuple([(x.shape, x.dtype, x.device) for x in args])
        signature = self.signatures.get(key) or self._signature(key, args)
        if signature is None:
            return NotImplemented
        if not tracked or not torch.is_grad_enabled():
            return self._value(signature, args, tracked)
        if not (signature.ready or signature.is_ready()) or not self.closed.untracked():
            return NotImplemented
        if signature.records:
            out = _recorded(signature, args)
            if out is not None:
                return out
        out = signature.apply(*args)
        if type(out) is Tensor and out.requires_grad and out.grad_fn.plan.single:  # type: ignore[union-attr]
            return out
        return _tree(signature, out)

    def _signature(self, key: Any, args: tuple[Any, ...]) -> _Signature | None:
        if torch.jit.is_tracing():  # type: ignore[attr-defined]
            return None  # where sizes are tensors
        of, backend = self.of, self.of._backend
        shaped = of._shape((), backend.sketch(args)[1], (True,) * len(args), ())
        who = "fwd" if of.bwd is not None else "the forward rule"
        looks = tuple([(tuple(shape), dtype) for shape, dtype, _ in key])
        found = self.signatures[key] = _Signature(shaped, key, (who, looks))
        if len(self.signatures) > _MOST:
            del self.signatures[next(iter(self.signatures))]
        return found

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
                raise rules.closed_over_error(signature.shaped.rule)
        return out


_MOST = 256


class _Closed:
    """What the functions of a rule's author close over, as far as it need not be searched again.

    Cells with the objects in them, and tensors. A list or dict may change without being seen.
    """

    def __init__(self, written: Sequence[Any]) -> None:
        self.cells: list[tuple[Any, Any]] = []
        self.tensors: list[Tensor] = []
        self.written = written
        self.known = self._search()

    def untracked(self) -> bool:
        """Whether nothing that is held requires grad; False where that is not known."""
        for cell, content in self.cells:
            if cell.cell_contents is not content:
                self.cells, self.tensors = [], []
                self.known = self._search()
                return False
        if not self.tensors:
            return self.known
        return self.known and not any(x.requires_grad for x in self.tensors)

    def _search(self) -> bool:
        todo, seen = list(self.written), set()
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
                    except ValueError:  # a name that is not bound yet
                        return False
                    todo.append(cell.cell_contents)
            elif hasattr(x, "func"):
                todo += [x.func, x.args, *x.keywords.values()] if _is_partial(x) else []
        return True


def _is_partial(x: Any) -> bool:
    return all(hasattr(x, name) for name in ("func", "args", "keywords"))


# --- one call ----------------------------------------------------------------------------


def _apply_of(signature: _Signature) -> Callable[..., Any]:
    """`apply` of the Function of calls of one signature, which need no more than this of autograd.

    It is that of the class above `Function`, which does not look for transforms of `torch.func`
    and what is left of them, as was done before.
    """

    class Direct(torch.autograd.Function):
        """A rule, for autograd alone."""

        @staticmethod
        def forward(ctx: Any, *xs: Tensor) -> Any:
            return _forward(signature, ctx, xs)

        @staticmethod
        def backward(ctx: Any, *cts: Any) -> Any:
            return _backward(signature, ctx, cts)

    return super(torch.autograd.Function, Direct).apply


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
        randomness: As in `rules.Point`.
    """

    kept: Any = tuple
    places: tuple[int, ...] = ()
    pulling: Sequence[int] = ()
    single: bool = True
    out_def: Any = None
    count: int = 1
    likes: Any = None
    randomness: Any = None

    def kept_so(self, res: Any, known: list[Tensor]) -> bool:
        """Whether what fwd saved stands where it stood when this was made."""
        if self.kept is Tensor:
            return res is known[self.places[0]]
        if type(res) is not tuple or len(res) != len(self.places):
            return False
        return all(x is known[i] for x, i in zip(res, self.places, strict=True))


def _tree(signature: _Signature, out: Any) -> Any:
    """What f returns, of the Function's outputs."""
    outs = (out,) if type(out) is Tensor else out
    node: Any = next((y.grad_fn for y in outs if y.grad_fn is not None), None)
    if node is None:  # integers, of which no node tells
        return signature.shaped.backend.unflatten(signature.out_def(), outs)
    if node.plan.single:
        return outs[0]
    return signature.shaped.backend.unflatten(node.plan.out_def, outs[: node.plan.count])


def _forward(signature: _Signature, ctx: Any, xs: Sequence[Tensor]) -> Any:
    before = None if signature.is_sure() else Randomness.now(xs)
    tracked = [x for x in xs if x.requires_grad]
    versions = [upstream.version_of(x) for x in tracked]
    plain = [x.detach() for x in xs]
    upstream.set_grad_enabled(True)  # the context manager takes three times as long
    try:
        found = signature.fwd(*plain)
    finally:
        upstream.set_grad_enabled(False)
    if signature.bwd is None:
        out, res = found, tuple(plain)
    elif type(found) is tuple and len(found) == 2:
        out, res = found
    else:
        out, res = signature.shaped.pair(found, "fwd", "(out, residuals)")
    if versions != [upstream.version_of(x) for x in tracked]:
        raise rules.written_error(signature.shaped.rule)
    if type(out) is Tensor and out.dtype.is_floating_point and not out.requires_grad:
        known = [*plain, out]
        plan = signature.plan
        if plan is None or not plan.kept_so(res, known):
            plan = _plan_of(signature, res, known)
        if plan is not None and True not in [rules.is_alias_of(x, out) for x in xs]:
            ctx.plan = plan
            known[: len(plain)] = xs
            ctx.save_for_backward(*[known[i] for i in plan.pulling])
            return out
    return _forward_of_any(ctx, signature, xs, plain, out, res, before)


def _plan_of(signature: _Signature, res: Any, known: list[Tensor]) -> _Saved | None:
    """Where fwd saved arguments and the output alone, in no tree."""
    kept, leaves = (Tensor, (res,)) if type(res) is Tensor else (tuple, res)
    if type(leaves) is not tuple:
        return None
    places = tuple([_place(x, known) for x in leaves])
    if -1 in places:
        return None
    plan = signature.plan = _Saved(kept, places, (*places, *signature.again))
    return plan


def _place(x: Any, known: list[Tensor]) -> int:
    """Where x stands among these; -1 if it is not one of them."""
    return next((i for i, y in enumerate(known) if x is y), -1)


def _forward_of_any(
    ctx: Any, signature: _Signature, xs: Any, plain: Any, out: Any, res: Any, before: Any
) -> Any:
    """With a tree of outputs, with views, extras, or what else fwd may save."""
    shaped = signature.shaped
    plan = ctx.plan = _Saved(single=type(out) is Tensor)
    if plan.single:
        ys = [out]
    else:
        ys = shaped.outputs(plain, out, "it" if signature.bwd is None else "fwd")
        plan.out_def = signature.out_def()
    plan.kept, extras = Residuals.of(shaped.backend, res, plain, ys)
    for y in (*ys, *extras):
        if y.requires_grad:
            raise rules.closed_over_error(shaped.rule)
    if extras or plan.kept.rerun:
        if before is None and signature.bwd is not None:
            rules.SAVES_NO_EXTRAS.discard(shaped.rule)
            signature.saves_no_extras = False
            return _forward(signature, ctx, xs)
        plan.randomness = None if before is None or before.stands() else before
    out = (*rules.as_views(ys, xs), *extras)
    everything = (*xs, *out)
    plan.count, plan.places = len(ys), plan.kept.places
    again = range(len(xs)) if extras or plan.kept.rerun else ()
    pulling = (*plan.places, *signature.again)
    plan.pulling = [*pulling, *(i for i in again if i not in pulling)]
    ctx.save_for_backward(*[everything[i] for i in plan.pulling])
    plan.likes = [like(y) for y in out]
    if None in plan.likes:
        ctx.mark_non_differentiable(*[y for y in out if not is_inexact(y)])
    if len(out) == 1:
        return out[0]
    ctx.set_materialize_grads(False)
    return out


def _backward(signature: _Signature, ctx: Any, cts: tuple[Any, ...]) -> Any:
    plan, ct = ctx.plan, cts[0]
    kept = plan.kept
    if (
        kept is not Tensor
        and kept is not tuple
        and not (plan.single and all(other is None for other in cts[1:]))
    ) or not (signature.pulled and type(ct) is Tensor and not torch.is_grad_enabled()):
        return _the_long_way(ctx, signature, cts)
    saved = ctx.saved_tensors
    if kept is Tensor:
        res = saved[0]
    elif kept is tuple:
        res = saved[: len(plan.places)]
    else:
        res = kept.restored(signature.shaped.backend, saved[: len(plan.places)])
    found = signature.bwd(res, ct)
    if type(found) is tuple and len(found) == signature.count:
        for g, (shape, dtype, _) in zip(found, signature.looks, strict=True):
            if type(g) is not Tensor or g.dtype is not dtype or g.shape != shape:
                break
        else:
            return found
    return tuple(filled(signature.shaped.cotangents(found, signature.expected), signature.likes))


# --- a forward rule alone ----------------------------------------------------------------
#
# Its tangent map is transposed by autograd where it stands: dx = x - x is zero and has the
# derivative of x, so the graph of T(x) dx leads a cotangent of T(x) dx on to x.


def _recorded(signature: _Signature, xs: tuple[Tensor, ...]) -> Any:
    """The value, by one evaluation of the forward rule; None where it has to go another way."""
    shaped, plain = signature.shaped, tuple(map(Tensor.detach, xs))
    if signature.attach is None and not _may_record(signature, plain):
        signature.records = False
        return None
    tracked = list(filter(_is_tracked, xs))
    versions = list(map(upstream.version_of, tracked))
    dxs = tuple(map(torch.sub, xs, plain))
    with transposing(shaped.rule, EAGER):
        found = signature.jvp(plain, dxs)
    if versions != list(map(upstream.version_of, tracked)):
        raise rules.written_error(shaped.rule)
    if type(found) is not tuple or len(found) != 2 or not _are_alike(*found):
        return None
    y, dy = found
    if y.requires_grad:
        raise rules.closed_over_error(shaped.rule)
    if not dy.requires_grad:
        return None
    if signature.attach is None:
        leaves = [*rules.other_leaves([dy], dxs)]
        if any(sys.getrefcount(node.variable) > _held_by_a_graph() for node in leaves):
            raise rules.closed_over_error(shaped.rule)
        if leaves:  # of a derivative within the rule, which its graph alone holds
            signature.records = False
            return None
        signature.attach = _attach_of(signature)
    return signature.attach([y], dy, *xs)


@cache
def _held_by_a_graph() -> int:
    """How often Python counts a leaf that a graph alone holds; asked where gradients are on."""
    sine = get_gradient_edge(torch.empty(1, requires_grad=True).sin()).node
    node: Any = sine.next_functions[0][0]
    return sys.getrefcount(node.variable)


def _may_record(signature: _Signature, xs: tuple[Tensor, ...]) -> bool:
    """Whether the tangent map may be transposed, and belongs to one tensor that f returns.

    Nothing is saved for a backward pass meanwhile, of which a checkpoint would keep count.
    """
    shaped, looks = signature.shaped, signature.question[1]
    question = (signature.likes, signature.looks)
    try:
        hold_linear(Question(shaped.rule, "tangent", shaped.tangent, xs, *question))
        if looks not in shaped.outs:
            with torch.no_grad(), restored(Randomness.now(xs)):
                shaped.tangent(xs, [torch.zeros_like(x) for x in xs])
    except GradtoolsError:  # it will be said where a derivative is asked for
        return False
    return signature.out_def() == shaped.backend.flatten(0)[1]


def _are_alike(y: Any, dy: Any) -> bool:
    return type(y) is type(dy) is Tensor and y.shape == dy.shape and y.dtype is dy.dtype


def _attach_of(signature: _Signature) -> Callable[..., Any]:
    """`apply` of the Function that gives a value its tangent's graph."""
    plan = _Saved(places=(every := tuple(range(signature.count))), pulling=every)

    class Attached(torch.autograd.Function):
        """y, of which dy is the tangent. A derivative of its backward pass is the rule's."""

        @staticmethod
        def forward(ctx: Any, value: list[Tensor], dy: Tensor, *xs: Tensor) -> Tensor:
            ctx.plan = plan
            ctx.save_for_backward(*xs)
            y = value.pop()
            if True not in [rules.is_alias_of(x, y) for x in xs]:
                return y.detach()  # y itself may be held by the graph that it would hold
            (view,) = rules.as_views([y], xs)
            return y.view_as(y) if view is y else view

        @staticmethod
        def backward(ctx: Any, ct: Tensor) -> Any:
            if torch.is_grad_enabled():
                return None, None, *_the_long_way(ctx, signature, (ct,))
            if is_compiling():  # compiled autograd cannot add a tensor to None
                return None, ct, *[torch.zeros_like(x) for x in ctx.saved_tensors]
            return None, ct, *(None,) * signature.count

    return super(torch.autograd.Function, Attached).apply


# --- the long way ------------------------------------------------------------------------


def _the_long_way(ctx: Any, signature: _Signature, cts: tuple[Any, ...]) -> Any:
    """The backward pass of `torch/rules.py`, of this call."""
    plan, shaped = ctx.plan, signature.shaped
    ctx.like_ys = plan.likes or [like(ct) for ct in cts]
    maps = _maps(plan, signature, ctx.like_ys)
    ctx.point = rules.RuleApplication(
        shaped.rule, maps, count=plan.count, randomness=plan.randomness
    )
    ctx.unusual = rules.unusual(cts)
    ctx.pulling, ctx.looks, ctx.like_xs = plan.pulling, signature.looks, signature.likes
    found = rules.pulled_back(ctx, cts)
    easy = None not in signature.likes
    if easy and not torch.is_grad_enabled():
        signature.pulled = signature.bwd is not None
    return tuple(found)


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
