"""The `torch.autograd.Function` of a rule, with both modes and its own vmap.

Double backward differentiates the code of the cotangent map, so a rule is differentiated at any
order. A `jvp` staticmethod runs with forward gradients switched off, so nested forward mode drops a
term in silence (torch#197867). Ours reads the primal part of what was saved and switches them on
again. `test_nested_forward_mode_of_a_plain_function_is_still_wrong` fails once it is fixed.
"""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import compress, repeat
from typing import Any

import torch
import torch.autograd.forward_ad as forward_ad

from gradtools.boundary import trimmed
from gradtools.errors import GradtoolsError
from gradtools.rules import JvpRule, Linearized, Rule, batched
from gradtools.torch import _upstream as upstream
from gradtools.torch.functorch_wrappers import (
    alive,
    filled,
    is_dual,
    is_inexact,
    is_wrapped,
    like,
    may_be_dual,
    unwrapped,
)
from gradtools.torch.modes import batchings, by_new_vmap
from gradtools.torch.operation_marks import RULE
from gradtools.torch.randomness import Randomness
from gradtools.torch.rules.captures import closed_over_error, is_captured, is_derived
from gradtools.torch.rules.maps import (
    drawing_again,
    extras_pushed,
    inputs_of,
    pulled_back,
    real_tensors_too,
    tangent_at,
)
from gradtools.torch.rules.transposing import other_layout

Tensor = torch.Tensor


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

    Tensors are saved by autograd. If the maps are the same in every call, one application serves
    all of them.

    Attributes:
        rule: The rule.
        linearized: Its maps at this evaluation, without arrays.
        count: The number of outputs; extras follow them.
        randomness: The generators' states before the evaluation, if a second one draws from them.
        own: Whether outputs must not be views, because a torch.func transform is active.
        perturbed: Which inputs are differentiated, None if unknown.
        avals: The shape, dtype and device of each input.
        like_xs: The avals of the inputs, None for integers.
        like_ys: Those of the outputs and extras; None: those of the cotangents.
        pulling: The tensors to save for the cotangent map, as positions in `[*xs, *ys, *extras]`.
        pushing: Those for the tangent map; None in an application that all calls share.
        pull: `pull(ctx, cts)`, the backward pass at any order.
        form: Of residuals that are one tensor: Tensor; of a tuple of tensors: their number.
    """

    rule: Rule
    linearized: Linearized | None = None
    count: int = 0
    randomness: Any = None
    own: bool = False
    perturbed: tuple[bool, ...] | None = None
    avals: Sequence[Any] | None = None
    like_xs: Sequence[Any] = ()
    like_ys: Sequence[Any] | None = None
    pulling: Sequence[int] = ()
    pushing: Sequence[int] | None = None
    pull: Callable[[Any, Sequence[Any]], Sequence[Any]] = pulled_back
    form: Any = None

    def record(self, linearized: Linearized) -> None:
        """Stores the maps without arrays."""
        self.count = len(linearized.ys)
        self.linearized = linearized.without_arrays()

    def note(self, xs: Sequence[Tensor], ys: Sequence[Tensor]) -> None:
        """Stores the avals of inputs, outputs and extras, and which of them the maps need."""
        self.avals = [(x.shape, x.dtype, x.device) for x in xs]
        self.like_xs, self.like_ys = list(map(like, xs)), list(map(like, ys))
        maps = self.linearized
        assert maps is not None
        self.pushing = maps.saves
        self.pulling = maps.saves[: len(maps.saves) - maps.tangent_only]
        if maps.opaque_residuals or len(ys) > self.count:  # the rule may be evaluated again
            self.pushing, self.pulling = (
                [*saves, *(i for i in range(len(xs)) if i not in saves)]
                for saves in (self.pushing, self.pulling)
            )


def apply_at(point: RuleApplication, xs: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """The outputs and extras of an application, with their node."""
    if upstream.peek_interpreter_stack() is not None:
        point.own = True
    elif not any(map(is_wrapped, xs)):  # as `attach`; looked up here, since recordings patch it
        return super(torch.autograd.Function, RuleFunction).apply(point, None, *apart(xs))
    return RuleFunction.apply(point, None, *apart(xs))


def apart(xs: Sequence[Tensor]) -> list[Tensor]:
    """xs with a view for each repeated tensor, since autograd tells inputs apart by identity."""
    if len(xs) == 1 or len(set(map(id, xs))) == len(xs):
        return list(xs)
    first = {id(x): i for i, x in reversed([*enumerate(xs)])}
    return [x if first[id(x)] == i else x.view_as(x) for i, x in enumerate(xs)]


_NO_TENSORS = (None, None)


_graphs = torch.is_grad_enabled


class RuleFunction(torch.autograd.Function):
    """One application of a rule, in every mode."""

    recorded_as = RULE

    @staticmethod
    def forward(point: RuleApplication, evaluated: Any, *xs: Tensor) -> tuple[Tensor, ...]:
        if evaluated is not None:  # outputs and extras, which the caller computed
            if len(evaluated) == 1:  # most are a new tensor; see `in_own_memory`
                for x in xs:
                    if upstream.is_alias_of(x, evaluated[0]):
                        return (evaluated[0].clone(),)
                return evaluated
            return (*in_own_memory(evaluated[: point.count], xs), *evaluated[point.count :])
        out = evaluate(point, xs)
        assert point.linearized is not None
        if point.own or upstream.forward_level() >= 0:
            out = without_aliases(out, xs)
            for i, y in enumerate(out):
                if upstream.is_view(y):  # PyTorch requires that its tangent is a view as well
                    y = y.clone()
                    # Cloning a tensor subclass gives a view.
                    out[i] = upstream.make_subclass(type(y), y) if upstream.is_view(y) else y
        else:
            out[: point.count] = in_own_memory(out[: point.count], xs)
        # torch.func may unwrap two inputs to one tensor; see `apart`.
        saved = {id(xs[i]) for i in point.linearized.saves if i < len(xs)}
        return tuple([y.view_as(y) if id(y) in saved else y for y in out])

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, outputs: Any) -> None:
        ctx.point = point = inputs[0]
        ctx.set_materialize_grads(point.rule.reverse_only)
        xs = inputs[2:]
        if point.avals is None:
            point.note(xs, outputs)
        everything = xs + outputs
        if point.pulling:
            ctx.save_for_backward(*map(everything.__getitem__, point.pulling))
        if point.pushing is not None:
            ctx.save_for_forward(*map(everything.__getitem__, point.pushing))
            ctx.layout = other_layout((*compress(xs, ctx.needs_input_grad[2:]), *outputs))
            if None in point.like_ys:
                ctx.mark_non_differentiable(*[y for y in outputs if not is_inexact(y)])

    @staticmethod
    def backward(ctx: Any, *cts: Any) -> Any:
        point = ctx.point
        try:
            if (_graphs() or point.rule.reverse_only) and batchings():
                pulled = by_new_vmap(lambda *cts: point.pull(ctx, cts), cts)
            else:
                pulled = point.pull(ctx, cts)
        except Exception as error:
            trimmed(error)
            raise
        return *_NO_TENSORS, *pulled

    @staticmethod
    def jvp(ctx: Any, _: None, __: None, *dxs: Tensor | None) -> Any:
        point = ctx.point
        if point.rule.reverse_only:  # PyTorch's own error
            return torch.autograd.Function.jvp(ctx, *dxs)
        with upstream.forward_mode_enabled(True), real_tensors_too(ctx.saved_tensors):
            kept = [alive(x) for x in ctx.saved_tensors]
            tensors = [
                forward_ad.unpack_dual(x, level=0).primal if may_be_dual(x) else x for x in kept
            ]
            moving = [None if i in point.rule.nondifferentiable else dx for i, dx in enumerate(dxs)]
            dys = tangent_at(ctx, tensors, moving)
            if len(point.like_ys) > point.count:
                dys += extras_pushed(ctx, inputs_of(point, point.pushing, tensors), moving)
            return tuple(filled(without_aliases(dys, dxs, tensors), point.like_ys))

    @staticmethod
    def vmap(info: Any, in_dims: Any, point: RuleApplication, _: None, *xs: Tensor) -> Any:
        """Applies the rule of a batch, made from the maps of one example, at the level below."""
        one = point.rule
        if one.linearize is None:
            point.linearized = one.linearized_from(xs, [])
        if isinstance(one, BatchedRule):
            rule, xs, axes_of = one.batching_rule(info.batch_size, in_dims[2:], xs, info.randomness)
            out = apply_at(replace(point, rule=rule, linearized=None), xs)
            point.count = len(out)
            return tuple(out), axes_of(out)
        axes = tuple([None if d is None else 0 for d in in_dims[2:]])
        front = [x if d is None else x.movedim(d, 0) for x, d in zip(xs, in_dims[2:], strict=True)]
        rule = batched(one, _Lists(info.randomness == "same"), axes, None, info.batch_size)
        batch = replace(point, rule=rule, linearized=None)
        out = apply_at(batch, front)
        point.count, point.randomness = batch.count, batch.randomness
        if one.linearize is not None:
            assert batch.linearized is not None
            point.linearized = batch.linearized.example
        if batch.randomness is not None:
            assert point.linearized is not None
            if isinstance(one, JvpRule) or point.linearized.opaque_residuals:
                point.linearized = drawing_again(point.linearized, batch.randomness)
        return tuple(out), (0,) * len(out)


# PyTorch reads this signature in every call; building it takes as long as the call.
RuleFunction.forward.__signature__ = inspect.signature(RuleFunction.forward)  # type: ignore[attr-defined]
# Saves the lookup of `backward` or `vjp` in each call.
upstream.backward_class(RuleFunction).apply = RuleFunction.backward
# `Function.apply` without its check for torch.func transforms, for plain eager mode.
attach: Callable[..., tuple[Tensor, ...]] = super(torch.autograd.Function, RuleFunction).apply


def edit_application(rule: Rule, inputs: int) -> RuleApplication:
    """The application that all calls of an edit share."""
    cotangent = rule.cotangent
    assert cotangent is not None

    def pulled(ctx: Any, cts: Sequence[Any]) -> Sequence[Any]:
        if cts[0] is None:
            return (None,) * inputs
        return cotangent(ctx.saved_tensors, [alive(cts[0])])

    maps = rule.linearized_from([None] * inputs, []).without_arrays()
    if rule.reverse_only:
        pull, count = pulled_back, inputs - len(rule.nondifferentiable)
    else:  # an edit that saves nothing does not read its first argument
        pull, count = pulled if maps.saves else cotangent, 1
    return RuleApplication(rule, maps, count, avals=(), pulling=maps.saves, pull=pull)


# --- one evaluation ----------------------------------------------------------------------


def evaluate(point: RuleApplication, xs: Sequence[Tensor]) -> list[Tensor]:
    """Outputs and extras at detached inputs; an output that requires grad shows a capture."""
    rule = point.rule
    if not rule.user_functions or is_derived(rule):
        derived = rule.user_functions
        at = rule.linearized_from(xs, undifferentiated(rule, xs)) if derived else rule.at(*xs)
        point.record(at)
        return [*at.ys, *at.extras]
    unsure = isinstance(rule, JvpRule) or (rule.linearize and rule.origin not in SAVES_NO_EXTRAS)
    before = Randomness.now(xs) if unsure else None
    watched = [x for x in xs if x.requires_grad and not is_wrapped(x)]
    versions = [*map(upstream.version_of, watched)]
    try:
        with torch.enable_grad():
            at = rule.at(*[x.detach() for x in xs], perturbed=point.perturbed)
    except GradtoolsError:  # which an in-place write may cause
        refuse_written(rule, watched, versions)
        raise
    refuse_written(rule, watched, versions)
    return recorded_at(point, xs, at, before)


def recorded_at(
    point: RuleApplication, xs: Sequence[Tensor], at: Linearized, before: Randomness | None
) -> list[Tensor]:
    """Outputs and extras of an evaluation of the author's code, whose maps `point` gets.

    before: The generators' states before it; None if no second evaluation was expected.
    """
    rule, again = point.rule, bool(at.extras or at.opaque_residuals)
    twice = isinstance(rule, JvpRule)  # f for the value, the forward rule for a tangent
    twice = twice or (at.example is not None and at.opaque_residuals)
    if again and before is None and Randomness.now(xs) is not None:  # None while compiling
        SAVES_NO_EXTRAS.discard(rule.origin)
        return evaluate(point, xs)
    if not again:
        if rule.linearize is not None:
            SAVES_NO_EXTRAS.add(rule.origin)
        before = before if twice else None
    if any(is_captured(y) for y in (*at.ys, *at.extras)):
        raise closed_over_error(rule)
    if before is not None and not before.is_unchanged():
        point.randomness = before
        at = drawing_again(at, before) if twice else at
    point.record(at)
    # Autograd attaches the node to the very tensors, which the author may hold.
    return [y.detach() for y in (*at.ys, *at.extras)]


# The origins of rules that need no second evaluation, so that no generator state is saved.
SAVES_NO_EXTRAS: weakref.WeakSet[Any] = weakref.WeakSet()


def undifferentiated(rule: Rule, xs: Sequence[Tensor]) -> list[Tensor]:
    """The value alone, for inputs that are not differentiated, where a recursive rule ends."""
    if is_derived(rule):
        with torch.no_grad():
            return [y.detach() if y.requires_grad else y for y in rule.primal(*xs)]
    ys = rule.primal(*xs)
    tracked = lambda x: x.requires_grad or upstream.is_gradtrackingtensor(x) or is_dual(x)
    if any(map(tracked, ys)) and not any(map(tracked, xs)):
        raise closed_over_error(rule)
    return list(ys)


def refuse_written(rule: Rule, xs: Sequence[Tensor], versions: Sequence[int]) -> None:
    """Raises if the rule wrote in an x that is differentiated, which has another version now."""
    for x, version in zip(xs, versions, strict=True):
        if x.requires_grad and upstream.version_of(x) != version:
            raise GradtoolsError(
                f"rule {rule.name!r} writes in place in an argument that is differentiated, of "
                "which autograd would not know: a rule has no mark_dirty. Return a new tensor, "
                "and write it into the old one where the rule is called."
            )


# --- outputs that share memory -----------------------------------------------------------


def in_own_memory(ys: Sequence[Tensor], xs: Sequence[Tensor]) -> list[Tensor]:
    """The outputs, copied where they share memory with an input or each other.

    Autograd would not know of an in-place write to one of them that changes another.
    """
    known = {*map(upstream.storage_key, xs)}
    result = list(ys)
    for i, y in enumerate(ys):
        key = upstream.storage_key(y)
        if key in known:
            result[i] = y.clone()
        known.add(key)
    return result


def without_aliases(ys: Sequence[Any], *others: Sequence[Any]) -> list[Any]:
    """ys, cloned where they share memory with each other or with `others`.

    Dual numbers may be written in place.
    """
    known: list[Tensor] = []
    for xs in others:
        known += [unwrapped(x) for x in xs if x is not None and x.layout is torch.strided]
    cloned = list(ys)
    keys: set[int] | None = None  # a few tensors are compared faster in pairs
    for i, y in enumerate(cloned):
        if y is None or y.layout is not torch.strided:
            continue
        inner = unwrapped(y)
        if len(known) > _FEW:
            keys = set(map(upstream.storage_key, known)) if keys is None else keys
            shares = (key := upstream.storage_key(inner)) in keys
            keys.add(key)
        else:
            shares = any(map(upstream.is_alias_of, known, repeat(inner)))
        if shares:
            cloned[i] = y.clone()
        else:
            known.append(inner)
    return cloned


_FEW = 8


# --- vmap --------------------------------------------------------------------------------


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
