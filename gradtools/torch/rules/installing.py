"""Installs rules in PyTorch: one `torch.autograd.Function` with both modes and its own vmap.

Double backward differentiates the code of the cotangent map, so a rule is differentiated at any
order. Three things differ from PyTorch's manual:

- A `jvp` staticmethod runs with forward gradients switched off, so nested forward mode drops a
  term in silence (torch#197867). Ours reads the primal part of what was saved and switches them
  on again. `test_nested_forward_mode_of_a_plain_function_is_still_wrong` fails once it is fixed.
- Dynamo cannot trace a `Function` with a `jvp` and may drop a rule under `torch.func`
  (torch#192985, torch#193279). It sees one opaque call, which functorch's levels then enter.
- A missing map is the transpose of the other one. PyTorch transposes nonlinear maps as well, so
  linearity is checked, once for each rule.
"""

from __future__ import annotations

import inspect
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from itertools import repeat
from types import SimpleNamespace
from typing import Any

import torch
import torch.autograd.forward_ad as forward_ad
from torch.autograd.graph import get_gradient_edge

from gradtools.boundary import user_facing
from gradtools.errors import GradtoolsError, warn
from gradtools.rules import (
    JvpRule,
    Linearized,
    Rule,
    batched,
    by_key,
    closes_over,
    reverse_only_text,
    spread,
    total,
)
from gradtools.torch import _upstream as upstream
from gradtools.torch.autograd_graph import is_spent
from gradtools.torch.coefficients import HERE, note_edit
from gradtools.torch.compiling import is_compiling, opaque_to_dynamo
from gradtools.torch.functorch_wrappers import (
    alive,
    filled,
    is_dual,
    is_inexact,
    is_wrapped,
    like,
    may_be_dual,
    ones,
    unwrapped,
    zeros,
)
from gradtools.torch.operation_marks import RULE
from gradtools.torch.patches import are_watched
from gradtools.torch.plain_programs.backward_nodes import corrected_vjp
from gradtools.torch.randomness import Randomness, restored
from gradtools.torch.rules.checking import CheckedMap, check_linear, check_zero
from gradtools.torch.rules.transposing import in_eager, in_own_transpose, transposed

Tensor = torch.Tensor


def apply_rule(rule: Rule, *xs: Tensor) -> list[Tensor]:
    """`rule.primal(*xs)`, differentiated by the rule in every mode, at every order."""
    if is_compiling():
        return apply_rule_by_key(rule.key, *xs)
    if rule.reverse_only:
        pushing = _eager.__dict__.get("pushing")
        if pushing and any(x.requires_grad for x in xs):
            raise GradtoolsError(reverse_only_text(pushing[-1], rule.name))
    return list(_apply(rule, xs))


def apply_rule_by_key(key: str, *xs: Tensor) -> list[Tensor]:
    """`apply_rule` for compiled code, which holds the rule's key as a constant."""
    if not is_compiling():
        return apply_rule(by_key(key), *xs)
    # Dynamo does not show whether an input is differentiated, so it counts as differentiated.
    if _pushing() and _reverse_only(key):
        raise GradtoolsError(reverse_only_text(_pushing()[-1], _reverse_only(key)))
    return list(_apply_by_key(key, *xs))


@upstream.marked_constant
def _reverse_only(key: str) -> str:
    """The name of the rule, if it has no forward mode."""
    return by_key(key).name if by_key(key).reverse_only else ""


_eager = threading.local()
_compiled: list[str] = []  # dynamo follows a plain list; it is empty before and after


def _pushing() -> list[str]:
    """This thread's stack of operators that transpose f's pullback, where rules must be linear."""
    return _compiled if is_compiling() else _eager.__dict__.setdefault("pushing", [])


def evaluated_to_push(caller: str, evaluate: Callable[..., Any], *args: Any) -> Any:
    """`evaluate(*args)`, refusing rules that have no forward mode."""
    pushing = _pushing()
    pushing.append(caller)
    try:
        return evaluate(*args)
    finally:
        pushing.pop()


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class BatchedRule(Rule):
    """A rule with its own batching rule.

    Attributes:
        batching_rule: `batching_rule(size, axes, xs, randomness)` returns the rule of a batch, its
            inputs, and a function from its outputs to their axes.
    """

    batching_rule: Callable[..., Any]


@dataclass(eq=False, slots=True)
class RuleApplication:
    """One application of a rule: its maps and everything else that is no tensor.

    Tensors are saved by autograd.

    Attributes:
        rule: The rule.
        linearized: Its maps at this evaluation, without arrays.
        count: The number of outputs; extras follow them.
        randomness: The generators' states before the evaluation, if a second one draws from them.
        own: Whether outputs must not be views, because a torch.func transform is active.
        perturbed: Which inputs are differentiated, None if unknown.
        signature: The cache entry of the fast path (`signatures.py`), if any.
        plan: With a signature, how to rebuild the residuals. If these are arguments and outputs
            only, one application serves all calls.
    """

    rule: Rule
    linearized: Linearized | None = None
    count: int = 0
    randomness: Any = None
    own: bool = False
    perturbed: tuple[bool, ...] | None = None
    signature: Any = None
    plan: Any = None

    def record(self, linearized: Linearized) -> None:
        """Stores the maps without arrays."""
        self.count = len(linearized.ys)
        self.linearized = linearized.without_arrays()


def _apply(rule: Rule, xs: Sequence[Tensor]) -> Sequence[Tensor]:
    if rule.reaches == "identity" and HERE.note is not None:
        note_edit(HERE.note, rule, xs)
    if rule.reaches == "identity" and not rule.user_functions and _is_plain_eager(xs):
        xs, run = _apart(xs), attach_reverse_only if rule.reverse_only else attach
        application = rule.__dict__.get(_APPLICATION)
        if application is None:
            application = rule.__dict__[_APPLICATION] = edit_application(rule, len(xs))
        return run(application, tuple(rule.primal(*xs)), *xs)
    for x in xs:
        if x.is_nested and _is_strided(x):
            raise GradtoolsError(
                f"rule {rule.name!r}: an argument is a nested tensor of the strided layout, of "
                "which PyTorch knows no shape. Make it with layout=torch.jagged, or pass its "
                "buffer (x.values()) and what says its lengths."
            )
    if upstream.is_exporting() and upstream.peek_interpreter_stack() is None:
        return _exported(rule, xs)
    plain = rule.reaches is None and not isinstance(rule, BatchedRule)
    if plain and not differentiated(xs):
        return _undifferentiated(rule, xs)
    if rule.user_functions:
        if in_own_transpose(rule, xs):
            return rule.primal(*xs)
        if _closes_over_tracked(rule):
            raise closed_over_error(rule)
    if not rule.reverse_only and _forward_mode_alone(xs) and not are_watched():
        return _pushed(rule, xs)
    point = _point(rule, xs)
    out = _apply_at(point, xs)
    return out[: point.count]


_APPLICATION = "_application"  # the attribute of an edit's rule that caches its application


def _is_plain_eager(xs: Sequence[Tensor]) -> bool:
    """Whether autograd alone is active: no transform, mode, recording or dual numbers."""
    if not in_eager() or upstream.forward_level() >= 0 or are_watched():
        return False
    if upstream.count_of_function_modes() or upstream.count_of_dispatch_modes():
        return False
    for x in xs:
        if x.layout is not torch.strided or x.is_nested or is_wrapped(x):
            return False
    return not upstream.is_exporting()


def _point(rule: Rule, xs: Sequence[Tensor]) -> RuleApplication:
    """A new application of a rule at xs."""
    point = RuleApplication(rule)
    if "cotangent" in rule.symbolic_zeros and in_eager():
        point.perturbed = tuple([is_inexact(x) and (x.requires_grad or is_dual(x)) for x in xs])
    return point


def _exported(rule: Rule, xs: Sequence[Tensor]) -> list[Tensor]:
    """The value alone, detached, with a warning: `torch.export` cannot keep a rule.

    PyTorch inlines a Function there, so that its gradient silently becomes that of its operations
    or, exported strictly, none. Exporting a program that takes derivatives fails earlier
    (torch#125984).
    """
    ys = rule.primal(*[x.detach() if x.requires_grad else x for x in xs])
    tracked = [x for x in (*xs, *ys) if x.requires_grad]
    if tracked and torch.is_grad_enabled():
        warn(
            f"torch.export: the program holds the values of {rule.name}, and no own derivative: "
            "to autograd its outputs are constants there. Train the model that is exported, and "
            "not what comes out; or say by torch.no_grad() around torch.export.export that the "
            "values are enough."
        )
    return [y.detach() if y.requires_grad else y for y in ys]


def _forward_mode_alone(xs: Sequence[Tensor]) -> bool:
    """Whether dual numbers are active, and no graph is recorded."""
    if upstream.forward_level() < 0 or not in_eager():
        return False
    return not (torch.is_grad_enabled() and any(x.requires_grad for x in xs))


def _pushed(rule: Rule, xs: Sequence[Tensor]) -> list[Tensor]:
    """Outputs with their tangents, without a graph and so without a Function."""
    point = _point(rule, xs)
    duals = [forward_ad.unpack_dual(x) if may_be_dual(x) else (x, None) for x in xs]
    dxs = [t for _, t in duals]
    if all(dx is None for dx in dxs) or any(dx is not None and dx.requires_grad for dx in dxs):
        return list(_apply_at(point, xs)[: point.count])  # no tangents, or tangents with a graph
    xs = [x for x, _ in duals]
    if isinstance(rule, JvpRule):
        likes = [like(x) for x in xs]
        if rule.fills("tangent"):
            dxs = filled(dxs, likes)
        check_zero(CheckedMap(rule, "tangent", lambda xs, dxs: rule.jvp(xs, dxs)[1], xs, likes))
        return as_duals(rule, xs, dxs, *rule.jvp(xs, dxs))
    out = _evaluate(point, xs)
    assert point.linearized is not None
    ctx = SimpleNamespace(point=point, unusual=unusual((*xs, *out)))
    _note_avals(ctx, xs, out)
    everything = (*xs, *out)
    moving = [None if i in rule.nondifferentiable else dx for i, dx in enumerate(dxs)]
    with torch.no_grad():
        dys = _tangent(ctx, [everything[i] for i in point.linearized.saves], moving)
    return as_duals(rule, xs, dxs, out[: point.count], filled(dys, ctx.like_ys[: point.count]))


def as_duals(rule: Rule, xs: Any, dxs: Any, ys: Any, dys: Any) -> list[Tensor]:
    """The outputs ys with the tangents dys as dual numbers."""
    if any(map(_is_captured, ys)):
        raise closed_over_error(rule)
    pairs = zip(_without_aliases(ys, xs), _without_aliases(dys, dxs, xs, ys), strict=True)
    level = upstream.forward_level()
    return [y if dy is None else upstream.make_dual(y, dy, level=level) for y, dy in pairs]


def _closes_over_tracked(rule: Rule) -> bool:
    """Whether a rule captures a differentiated tensor, whose derivative would be lost."""
    if _is_derived(rule):
        return False
    if closes_over(rule, lambda x: isinstance(x, Tensor) and x.requires_grad, Tensor, False):
        return True
    if upstream.peek_interpreter_stack() is not None:
        return closes_over(rule, lambda x: isinstance(x, Tensor) and is_wrapped(x), Tensor)
    return upstream.forward_level() >= 0 and closes_over(rule, is_dual, Tensor)


def _is_derived(rule: Rule) -> bool:
    """Whether gradtools computes the rule's value, as a derivative whose graph is not wanted."""
    return rule.contract is None and rule.linearize is None


def _undifferentiated(rule: Rule, xs: Sequence[Tensor]) -> list[Tensor]:
    """The value alone, for inputs that are not differentiated, where a recursive rule ends."""
    if _is_derived(rule):
        with torch.no_grad():
            return [y.detach() if y.requires_grad else y for y in rule.primal(*xs)]
    ys = rule.primal(*xs)
    if any(_is_tracked(y) for y in ys) and not any(_is_tracked(x) for x in xs):
        raise closed_over_error(rule)
    return list(ys)


def _apply_at(point: RuleApplication, xs: Sequence[Tensor]) -> tuple[Tensor, ...]:
    function = _ReverseOnly if point.rule.reverse_only else _BothModes
    if upstream.peek_interpreter_stack() is not None:
        point.own = True
    elif not any(map(is_wrapped, xs)):
        # `Function.apply` without building its signature in each call, which is half the time.
        return super(torch.autograd.Function, function).apply(point, None, *_apart(xs))
    return function.apply(point, None, *_apart(xs))


def _apart(xs: Sequence[Tensor]) -> list[Tensor]:
    """xs with a view for each repeated tensor, since autograd tells inputs apart by identity."""
    if len(xs) == 1 or len(set(map(id, xs))) == len(xs):
        return list(xs)
    first = {id(x): i for i, x in reversed([*enumerate(xs)])}
    return [x if first[id(x)] == i else x.view_as(x) for i, x in enumerate(xs)]


def _evaluate(point: RuleApplication, xs: Sequence[Tensor]) -> list[Tensor]:
    """Outputs and extras at detached inputs; an output that requires grad shows a capture."""
    rule = point.rule
    if not rule.user_functions:
        result = rule.at(*xs)
    elif _is_derived(rule):
        result = rule.linearized_from(xs, _undifferentiated(rule, xs))
    else:
        twice = isinstance(rule, JvpRule)  # f for the value, the forward rule for a tangent
        unsure = twice or (rule.linearize and rule not in SAVES_NO_EXTRAS)
        before = Randomness.now(xs) if unsure else None
        versions = versions_of(xs)
        try:
            with torch.enable_grad():
                result = rule.at(*[x.detach() for x in xs], perturbed=point.perturbed)
        except GradtoolsError:  # an in-place write may be the cause, and is reported below
            if versions == versions_of(xs):
                raise
        if versions != versions_of(xs):
            raise written_error(rule)
        if (result.extras or result.opaque_residuals) and rule in SAVES_NO_EXTRAS:
            SAVES_NO_EXTRAS.discard(rule)
            return _evaluate(point, xs)
        if not result.extras and not result.opaque_residuals:
            SAVES_NO_EXTRAS.add(rule)
            before = before if twice else None
        if any(_is_captured(y) for y in (*result.ys, *result.extras)):
            raise closed_over_error(rule)
        if before is not None and not before.is_unchanged():
            point.randomness = before
            result = drawing_again(result, before) if twice else result
    point.record(result)
    return [*result.ys, *result.extras]


def drawing_again(linearized: Linearized, randomness: Randomness) -> Linearized:
    """The maps with a tangent map that draws f's random numbers again."""
    tangent = linearized.tangent
    assert tangent is not None

    def drawn(saved: Sequence[Tensor], dxs: Sequence[Any]) -> list[Any]:
        with restored(randomness):
            return list(tangent(saved, dxs))

    return replace(linearized, tangent=drawn)


def as_views(ys: list[Tensor], xs: Sequence[Tensor]) -> list[Tensor]:
    """The outputs, as views where they share memory with an input or each other.

    Autograd cannot track in-place writes to such outputs; it refuses them if they are marked as
    views of a custom Function.
    """
    if len(ys) == 1:
        y = ys[0]
        x = next((x for x in xs if _shares(x, y)), y)
        return ys if x is y or upstream.is_view(y) else [_view_like(x, y)]
    known = {id(x): upstream.storage_key(x) for x in xs}
    first = {known[id(x)]: x for x in reversed(xs)}
    keys = [known.get(id(y)) or upstream.storage_key(y) for y in ys]
    times = Counter(keys)
    result = list(ys)
    for i, (y, key) in enumerate(zip(ys, keys, strict=True)):
        x = first.get(key)
        if x is not None and y is not x and not upstream.is_view(y):
            result[i] = _view_like(x, y)
        elif times[key] > 1:
            result[i] = y.view_as(y)
    return result


is_alias_of: Callable[[Tensor, Tensor], bool] = upstream.is_alias_of


def _without_aliases(ys: Sequence[Any], *others: Sequence[Any]) -> list[Any]:
    """ys, cloned where they share memory with each other or with `others`.

    Dual numbers may be written in place.
    """
    known: list[Tensor] = []
    for xs in others:
        known += [unwrapped(x) for x in xs if x is not None and _is_strided(x)]
    cloned = list(ys)
    keys: set[int] | None = None  # a few tensors are compared faster in pairs
    for i, y in enumerate(cloned):
        if y is None or not _is_strided(y):
            continue
        inner = unwrapped(y)
        if len(known) > _FEW:
            keys = set(map(upstream.storage_key, known)) if keys is None else keys
            shares = (key := upstream.storage_key(inner)) in keys
            keys.add(key)
        else:
            shares = any(map(is_alias_of, known, repeat(inner)))
        if shares:
            cloned[i] = y.clone()
        else:
            known.append(inner)
    return cloned


_FEW = 8


def _is_strided(x: Tensor) -> bool:
    """Whether x has strides, and so one storage that views can share."""
    return x.layout is torch.strided


def _note_avals(ctx: Any, xs: Sequence[Tensor], ys: Sequence[Tensor]) -> None:
    """Stores the shapes, dtypes and devices of inputs and outputs in ctx."""
    ctx.avals = [(x.shape, x.dtype, x.device) for x in xs]
    ctx.like_xs, ctx.like_ys = list(map(like, xs)), list(map(like, ys))


def _unusual(ctx: Any, xs: Sequence[Tensor], ys: Sequence[Tensor]) -> torch.layout | None:
    """The first layout without a transpose among differentiated inputs and outputs."""
    needed = [x for x, need in zip(xs, ctx.needs_input_grad[2:], strict=True) if need]
    return unusual((*needed, *ys))


def unusual(xs: Sequence[Any]) -> torch.layout | None:
    """The first layout that is neither strided nor sparse_coo; maps cannot be transposed in it."""
    for x in xs:
        if x is not None and x.layout is not torch.strided and x.layout is not torch.sparse_coo:
            return x.layout
    return None


def _refuse_layout(ctx: Any, which: str) -> None:
    """Raises if a map must be transposed at a tensor of an unsupported layout."""
    if ctx.unusual is not None:
        name = str(ctx.unusual).removeprefix("torch.").lstrip("_")
        raise GradtoolsError(
            f"rule {ctx.point.rule.name!r}: the other mode follows by transposing its {which} "
            f"map, which takes strided tensors, and one is {name}. Give the missing map as well, "
            "or pass the tensor's values as an argument."
        )


def _cloned(y: Tensor) -> Tensor:
    """A copy that is not a view. Cloning a tensor subclass gives a view."""
    copied = y.clone()
    return upstream.make_subclass(type(y), copied) if upstream.is_view(copied) else copied


def _shares(x: Tensor, y: Tensor) -> bool:
    return x is y or (is_alias_of(x, y) and not (is_wrapped(x) or is_wrapped(y)))


def _view_like(x: Tensor, y: Tensor) -> Tensor:
    """y as a view of x, or a copy of y if the dtypes differ."""
    if x.dtype != y.dtype:
        return y.clone()
    return x.as_strided(y.shape, y.stride(), y.storage_offset())


# Rules that need no second evaluation, so that generator states need not be saved.
SAVES_NO_EXTRAS: weakref.WeakSet[Rule] = weakref.WeakSet()


def _is_captured(y: Tensor) -> bool:
    return y.requires_grad or is_wrapped(y)


def _is_tracked(y: Tensor) -> bool:
    return y.requires_grad or upstream.is_gradtrackingtensor(y) or is_dual(y)


def differentiated(xs: Sequence[Tensor]) -> bool:
    """Whether any of xs may be differentiated, in any mode or transform."""
    levels = upstream.get_interpreter_stack() or ()
    if any(level.key() in _DERIVATIVES for level in levels):
        return True
    plain = [unwrapped(x) for x in xs] if levels else xs
    if torch.is_grad_enabled() and any(x.requires_grad for x in plain):
        return True
    return upstream.forward_level() >= 0 and any(map(is_dual, plain))


_DERIVATIVES = (upstream.TransformType.Grad, upstream.TransformType.Jvp)


def versions_of(xs: Sequence[Tensor]) -> list[int]:
    """The version counters of the tensors that require grad."""
    return [upstream.version_of(x) for x in xs if x.requires_grad and not is_wrapped(x)]


def written_error(rule: Rule) -> GradtoolsError:
    """The error of a rule whose forward pass writes in its arguments."""
    return GradtoolsError(
        f"rule {rule.name!r} writes in place in an argument that is differentiated, of which "
        "autograd would not know: a rule has no mark_dirty. Return a new tensor, and write it "
        "into the old one where the rule is called."
    )


def closed_over_error(rule: Rule) -> GradtoolsError:
    """The error of a rule that closes over a tensor that is differentiated."""
    return GradtoolsError(
        f"rule {rule.name!r} closes over a tensor that is differentiated, or mapped by vmap, "
        "outside of it; its derivative would be lost. Pass the tensor to the function as an "
        "argument."
    )


class _ReverseOnly(torch.autograd.Function):
    """A rule whose cotangent map is not linear: it has no forward mode."""

    recorded_as = RULE

    @staticmethod
    def forward(point: RuleApplication, evaluated: Any, *xs: Tensor) -> tuple[Tensor, ...]:
        if evaluated is not None:  # outputs and extras, computed by `signatures.py`
            if point.plan.fresh:
                return evaluated
            return (*as_views(evaluated[: point.count], xs), *evaluated[point.count :])
        out = _evaluate(point, xs)
        assert point.linearized is not None
        if point.own or upstream.forward_level() >= 0:
            # PyTorch requires that the tangent of a view is a view as well.
            out = [_cloned(y) if upstream.is_view(y) else y for y in _without_aliases(out, xs)]
        else:
            out[: point.count] = as_views(out[: point.count], xs)
        # torch.func may unwrap two inputs to one tensor; see `_apart`.
        saved = {id(xs[i]) for i in point.linearized.saves if i < len(xs)}
        return tuple([y.view_as(y) if id(y) in saved else y for y in out])

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, outputs: Any) -> None:
        ctx.point = point = inputs[0]
        xs, result = inputs[2:], point.linearized
        ctx.count = len(xs)
        ctx.save_for_backward(*[xs[i] for i in result.saves])

    @staticmethod
    def backward(ctx: Any, *cts: Tensor) -> Any:
        return (None, None, *ctx.point.linearized.cotangent(ctx.saved_tensors, cts))

    @staticmethod
    def vmap(info: Any, in_dims: Any, point: RuleApplication, _: None, *xs: Tensor) -> Any:
        """Applies the rule of a batch, made from the maps of one example, at the level below."""
        one = point.rule
        if one.linearize is None:
            point.linearized = one.linearized_from(xs, [])
        else:
            linearize = one.linearize

            def recorded(*xs: Tensor, **kwargs: Any) -> Linearized:
                linearized = linearize(*xs, **kwargs)
                point.record(linearized)
                return linearized

            one = replace(one, linearize=recorded)
        if isinstance(one, BatchedRule):
            rule, xs, axes_of = one.batching_rule(info.batch_size, in_dims[2:], xs, info.randomness)
            out = _apply_at(replace(point, rule=rule, linearized=None), xs)
            point.count = len(out)
            return tuple(out), axes_of(out)
        axes = tuple([None if d is None else 0 for d in in_dims[2:]])
        front = [x if d is None else x.movedim(d, 0) for x, d in zip(xs, in_dims[2:], strict=True)]
        rule = batched(one, _Lists(info.randomness == "same"), axes, None, info.batch_size)
        if point.rule in SAVES_NO_EXTRAS:
            SAVES_NO_EXTRAS.add(rule)
        batch = replace(point, rule=rule, linearized=None)
        out = _apply_at(batch, front)
        if rule in SAVES_NO_EXTRAS:
            SAVES_NO_EXTRAS.add(point.rule)
        point.count = batch.count
        return tuple(out), (0,) * len(out)


# PyTorch reads this signature in every call; building it takes as long as the call.
_ReverseOnly.forward.__signature__ = inspect.signature(_ReverseOnly.forward)  # type: ignore[attr-defined]


def reverse_only_at(node: Any) -> str | None:
    """The name of the reverse-only rule that recorded this node, if one did."""
    is_one = type(node) is upstream.backward_class(_ReverseOnly)
    return node.point.rule.name if is_one else None


class _BothModes(_ReverseOnly):
    @staticmethod
    def setup_context(ctx: Any, inputs: Any, outputs: Any) -> None:
        ctx.point = point = inputs[0]
        ctx.set_materialize_grads(False)
        plan = point.plan
        if plan is not None and not plan.pulling:
            return
        xs, result = inputs[2:], point.linearized
        everything = xs + outputs
        if plan is not None:
            ctx.save_for_backward(*map(everything.__getitem__, plan.pulling))
            if plan.likes is not None and None in plan.likes:
                ctx.mark_non_differentiable(*[y for y in outputs if not is_inexact(y)])
            return
        ctx.count = len(xs)
        ctx.pushing, ctx.pulling = (
            result.saves,
            result.saves[: len(result.saves) - result.tangent_only],
        )
        if result.opaque_residuals or len(outputs) > point.count:
            ctx.pushing, ctx.pulling = (
                [*saves, *(i for i in range(len(xs)) if i not in saves)]
                for saves in (ctx.pushing, ctx.pulling)
            )
        ctx.save_for_backward(*[everything[i] for i in ctx.pulling])
        ctx.save_for_forward(*[everything[i] for i in ctx.pushing])
        ctx.unusual = _unusual(ctx, xs, outputs)
        _note_avals(ctx, xs, outputs)
        if None in ctx.like_ys:
            ctx.mark_non_differentiable(*[y for y in outputs if not is_inexact(y)])

    @staticmethod
    @user_facing
    def backward(ctx: Any, *cts: Any) -> Any:
        point = ctx.point
        signature, plan = point.signature, point.plan
        if signature is None:
            return *_NO_TENSORS, *pulled_back(ctx, cts)
        ct = cts[0]
        if not (signature.pulled and plan.single and type(ct) is Tensor) or _graphs():
            return *_NO_TENSORS, *signature.pulled_back(ctx, cts)
        if len(cts) > 1 and any(ct is not None for ct in cts[1:]):  # of extras
            return *_NO_TENSORS, *signature.pulled_back(ctx, cts)
        # The fast path of all but the first backward pass of a signature.
        saved = ctx.saved_tensors
        residuals = saved[0] if plan.form is Tensor else plan.residuals(saved)
        cotangents = signature.bwd(residuals, ct)
        avals = signature.avals
        if signature.flat and type(cotangents) is tuple and len(cotangents) == len(avals):
            for g, aval in zip(cotangents, avals, strict=True):
                if type(g) is not Tensor or g.dtype is not aval[1] or g.shape != aval[0]:
                    break
            else:
                return _NO_TENSORS + cotangents
        return *_NO_TENSORS, *signature.cotangents(cotangents)

    @staticmethod
    def jvp(ctx: Any, _: None, __: None, *dxs: Tensor | None) -> Any:
        point = ctx.point
        with upstream.forward_mode_enabled(True), _real_tensors_too(ctx.saved_tensors):
            kept = [alive(x) for x in ctx.saved_tensors]
            tensors = [
                forward_ad.unpack_dual(x, level=0).primal if may_be_dual(x) else x for x in kept
            ]
            moving = [None if i in point.rule.nondifferentiable else dx for i, dx in enumerate(dxs)]
            dys = _tangent(ctx, tensors, moving)
            if len(ctx.like_ys) > point.count:
                dys += _extras_pushed(ctx, _xs(ctx, ctx.pushing, tensors), moving)
            return tuple(filled(_without_aliases(dys, dxs, tensors), ctx.like_ys))


@dataclass(eq=False, slots=True)
class _EditPlan:
    """The signature and plan of an edit's application, for any shapes; its maps need no checks."""

    pulled_back: Callable[[Any, Sequence[Any]], Sequence[Any]]
    pulling: tuple[int, ...] = ()
    likes: Any = None
    fresh: bool = True
    pulled: bool = False


def edit_application(rule: Rule, inputs: int) -> RuleApplication:
    """The application that all calls of an edit share."""
    cotangent = rule.cotangent
    assert cotangent is not None

    def pulled_back(ctx: Any, cts: Sequence[Any]) -> Sequence[Any]:
        if cts[0] is None:
            return (None,) * inputs
        return cotangent(ctx.saved_tensors, [alive(cts[0])])

    maps = rule.linearized_from([None] * inputs, []).without_arrays()
    count = inputs - len(rule.nondifferentiable) if rule.reverse_only else 1
    # An edit that saves nothing does not read its first argument.
    plan = _EditPlan(pulled_back if maps.saves else cotangent, maps.saves, fresh=count == 1)
    return RuleApplication(rule, maps, count, signature=plan, plan=plan)


class _Recorded(_BothModes):
    """A forward rule's value; its tangent at dx = x is the last input.

    The tangent is linear in dx, so its graph is the same at any dx, and at dx = x leads a cotangent
    to x.
    """

    @staticmethod
    @user_facing
    def backward(ctx: Any, *cts: Any) -> Any:
        (ct,), signature = cts, ctx.point.signature
        if _graphs():
            return *_NO_TENSORS, *signature.pulled_back(ctx, (ct,)), None
        if _is_compiling():  # compiled autograd cannot add a tensor to None
            return *_NO_TENSORS, *[torch.zeros_like(x) for x in ctx.saved_tensors], ct
        return *signature.nothing, ct


for _function in (_ReverseOnly, _BothModes, _Recorded):
    # Saves the lookup of `backward` or `vjp` in each call.
    upstream.backward_class(_function).apply = _function.backward

# `Function.apply` without its check for torch.func transforms, for plain eager mode.
attach: Callable[..., tuple[Tensor, ...]] = super(torch.autograd.Function, _BothModes).apply
attach_reverse_only: Callable[..., tuple[Tensor, ...]] = super(
    torch.autograd.Function, _ReverseOnly
).apply
attach_recorded: Callable[..., tuple[Tensor, ...]] = super(torch.autograd.Function, _Recorded).apply


def pulled_back(ctx: Any, cts: Sequence[Any]) -> Any:
    """The backward pass, at any order."""
    point, tensors = ctx.point, [alive(x) for x in ctx.saved_tensors]
    cts = tuple([None if ct is None else alive(ct) for ct in cts])
    inner, hidden = cts[: point.count], cts[point.count :]
    parts = []
    with _real_tensors_too(tensors):
        if any(ct is not None for ct in inner):
            parts.append(_cotangent(ctx, tensors, inner))
        if any(ct is not None for ct in hidden):
            parts.append(_extras_pullback(ctx, _xs(ctx, ctx.pulling, tensors), hidden))
    if not parts:
        return (None,) * len(ctx.like_xs)
    return parts[0] if len(parts) == 1 else [*map(total, zip(*parts, strict=True))]


def _xs(ctx: Any, kept: list[int], tensors: Sequence[Tensor]) -> list[Tensor]:
    """The inputs, which were saved for a second evaluation."""
    return [tensors[kept.index(i)] for i in range(len(ctx.like_xs))]


# --- the maps, and the transpose of one for the other -------------------------------------


def _saved(ctx: Any, tensors: Sequence[Tensor]) -> Sequence[Tensor]:
    return tensors[: len(ctx.point.linearized.saves)]


def _linear_map(ctx: Any, which: str, run: Any, at: Sequence[Any], likes: Any) -> CheckedMap:
    """A map to check; with avals, so that compiled code can evaluate the rule at made-up inputs."""
    return CheckedMap(ctx.point.rule, which, run, at, likes, ctx.avals)


def _tangent(ctx: Any, tensors: Sequence[Tensor], dxs: Sequence[Any]) -> list[Any]:
    rule, result, saved = ctx.point.rule, ctx.point.linearized, _saved(ctx, tensors)
    if rule.fills("tangent"):
        dxs = filled(dxs, ctx.like_xs)
    if result.tangent is not None:
        if rule.contract is not None:
            check_zero(_linear_map(ctx, "tangent", result.tangent, saved, ctx.like_xs))
        return list(result.tangent(saved, dxs))
    likes = ctx.like_ys[: ctx.point.count]
    mask = [like is not None for like in likes]
    present = [i for i, dx in enumerate(dxs) if dx is not None]

    def run(at: Any, cts: Any) -> list[Any]:
        pulled = result.cotangent(at, spread(cts, mask))
        return [pulled[i] for i in present]

    _refuse_layout(ctx, "cotangent")
    check_linear(_linear_map(ctx, "cotangent", result.cotangent, saved, likes))
    examples = [ones(*like) for like in likes if like]
    return spread(transposed(rule, run, saved, examples, [dxs[i] for i in present]), mask)


def _cotangent(ctx: Any, tensors: Sequence[Tensor], cts: Sequence[Any]) -> list[Any]:
    rule, result, saved = ctx.point.rule, ctx.point.linearized, _saved(ctx, tensors)
    likes = ctx.like_ys[: ctx.point.count]
    is_checked = ctx.point.signature is not None and ctx.point.signature.pulled
    if result.cotangent is not None and rule.contract is not None and not is_checked:
        check_zero(_linear_map(ctx, "cotangent", result.cotangent, saved, likes))
    if result.opaque_residuals and torch.is_grad_enabled():
        xs = _xs(ctx, ctx.pulling, tensors)
        with restored(ctx.point.randomness):
            result = rule.at(*xs, perturbed=ctx.point.perturbed)
        saved = result.saved(xs)
    if rule.fills("cotangent"):
        cts = filled(cts, likes)
    if result.cotangent is not None:
        pulled = list(result.cotangent(saved, cts))
        if rule.contract is not None:
            pulled = filled(pulled, ctx.like_xs)
        if rule.user_functions and torch.is_grad_enabled() and in_eager():
            refuse_captured(rule, pulled, (*tensors, *saved, *cts))
        return pulled
    mask = [
        like is not None and i not in rule.nondifferentiable for i, like in enumerate(ctx.like_xs)
    ]

    def run(at: Any, moving: Any) -> list[Any]:
        dxs = spread(moving, mask)
        return list(result.tangent(at, dxs if rule.contract is None else filled(dxs, ctx.like_xs)))

    kept = [like if m else None for like, m in zip(ctx.like_xs, mask, strict=True)]
    _refuse_layout(ctx, "tangent")
    check_linear(_linear_map(ctx, "tangent", result.tangent, saved, kept))
    examples = [ones(*like) for like in kept if like]
    return spread(transposed(rule, run, saved, examples, list(cts)), mask)


def refuse_captured(rule: Rule, results: Sequence[Any], known: Sequence[Any]) -> None:
    """Raises if the results depend on a leaf that none of the map's arguments depends on."""
    if any(True for _ in other_leaves(results, known)):
        raise closed_over_error(rule)


def other_leaves(results: Sequence[Any], known: Sequence[Any]) -> Iterator[Any]:
    """The nodes of leaves in the results' graph that `known` tensors do not reach.

    The aliases of a derivative that the map itself took are skipped.
    """
    if any(x is not None and is_wrapped(x) for x in (*results, *known)):
        return  # functorch wrappers hide the graph
    known = [x for x in known if x is not None and x.requires_grad]
    seen = {x.grad_fn or get_gradient_edge(x).node for x in known}
    todo = [x for x in results if x is not None and x.requires_grad]
    nodes = [x.grad_fn or get_gradient_edge(x).node for x in todo]
    while nodes:
        node = nodes.pop()
        if node in seen:
            continue
        seen.add(node)
        if not node.next_functions and hasattr(node, "variable") and not is_spent(node.variable):
            yield node
        nodes += [parent for parent, _ in node.next_functions if parent is not None]


def transpose(
    rule: Rule, which: str, linear: Any, at: Sequence[Any], examples: Any, values: Any
) -> list[Any]:
    """The transpose of `vs -> linear(at, *vs)`, of tensors like `examples`, at `values`."""
    run = lambda at, vs: linear(at, *vs)
    check_linear(CheckedMap(rule, which, run, at, [like(e) for e in examples]))
    return transposed(rule, run, at, examples, values)


# --- extras: differentiated through the code that computed them ---------------------------


def _extras_vjp(ctx: Any, xs: Sequence[Tensor], wanted: Sequence[bool]) -> Any:
    """The pullback from the wanted extras to the inputs, by evaluating the rule again."""
    point, mask = ctx.point, [like is not None for like in ctx.like_xs]
    moving = [x for x, m in zip(xs, mask, strict=True) if m]
    extras: list[Tensor] = []

    def run(*changed: Tensor) -> tuple[Tensor, ...]:
        new = iter(changed)
        full = [next(new) if m else x for x, m in zip(xs, mask, strict=True)]
        result = point.rule.at(*full, perturbed=point.perturbed)
        extras[:] = result.extras
        return tuple([e for e, w in zip(result.extras, wanted, strict=True) if w])

    with restored(point.randomness):
        _, pullback = corrected_vjp(run, *moving)
    return pullback, mask


def _extras_pullback(ctx: Any, xs: Sequence[Tensor], cts: Sequence[Any]) -> list[Any]:
    pullback, mask = _extras_vjp(ctx, xs, [ct is not None for ct in cts])
    return spread(pullback(tuple([ct for ct in cts if ct is not None])), mask)


def _extras_pushed(ctx: Any, xs: Sequence[Tensor], dxs: Sequence[Any]) -> list[Any]:
    """Tangents of the extras, by the transposed pullback, since dual levels do not nest."""
    likes = ctx.like_ys[ctx.point.count :]
    wanted = [like is not None for like in likes]
    if not any(wanted) or _first_order(xs):
        return [None] * len(likes)
    pullback, mask = _extras_vjp(ctx, xs, wanted)
    nothing = tuple([zeros(*like) for like in likes if like])
    pulled, push = torch.func.vjp(lambda *cts: pullback(cts), *nothing)[:2]
    moving = [dx for dx, m in zip(dxs, mask, strict=True) if m]
    pairs = zip(pulled, moving, strict=True)
    dense = [torch.zeros_like(p) if dx is None else dx for p, dx in pairs]
    return spread(push(tuple(dense)), wanted)


def _first_order(xs: Sequence[Tensor]) -> bool:
    """Whether only forward mode is active, so that the tangents of extras are not needed."""
    return in_eager() and not any(x.requires_grad for x in xs)


# --- vmap and torch.compile --------------------------------------------------------------


@dataclass(frozen=True)
class _Lists:
    """The `backend` argument of `rules.batched`.

    one_draw: Whether all examples share random numbers.
    """

    one_draw: bool

    def vmap_list(self, fun: Callable[..., Any], axes: tuple[Any, ...], size: int) -> Any:
        if all(a is None for a in axes):
            return lambda *xs: [y.expand(size, *y.shape) for y in fun(*xs)]
        randomness = "same" if self.one_draw else "different"
        return torch.vmap(lambda *xs: tuple(fun(*xs)), in_dims=axes, randomness=randomness)

    def vmap_extras(self, fun: Callable[..., Any], axes: Any, size: int, extras: Any) -> Any:
        def run(*xs: Tensor) -> tuple[list[Tensor], list[int]]:
            out = self.vmap_list(fun, axes, size)(*xs)
            return out, [0] * len(out)

        return run

    @staticmethod
    def sum_leading(x: Tensor) -> Tensor:
        return x.sum(0)


@opaque_to_dynamo
def _apply_by_key(key: str, *xs: Tensor) -> tuple[Tensor, ...]:
    """`apply_rule` as one opaque node of dynamo's graph, which cannot hold Python objects."""
    with _real_tensors_too(xs):
        return tuple(_apply(by_key(key), xs))


def _real_tensors_too(xs: Sequence[Tensor]) -> AbstractContextManager[None]:
    """Lets a compiled graph embed the tensors that a rule closes over as constants."""
    return _NOTHING if upstream.TracingContext.try_get() is None else _real_tensors(xs)


_NOTHING = nullcontext()
_NO_TENSORS = (None, None)
_graphs, _is_compiling = torch.is_grad_enabled, torch.compiler.is_dynamo_compiling


@contextmanager
def _real_tensors(xs: Sequence[Tensor]) -> Iterator[None]:
    mode = upstream.detect_fake_mode([unwrapped(x) for x in xs])
    if mode is None:
        yield
        return
    before, mode.allow_non_fake_inputs = mode.allow_non_fake_inputs, True
    try:
        yield
    finally:
        mode.allow_non_fake_inputs = before
