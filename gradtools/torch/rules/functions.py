"""Defines the `torch.autograd.Function` of a rule, for reverse mode, forward mode and vmap.

Double backward differentiates the code of the cotangent map, so rules have derivatives of any
order. PyTorch disables forward mode while a `jvp` staticmethod runs, so nested forward mode
silently drops a term (pytorch#197867). The `jvp` in this module reads the primal parts of the saved
tensors and enables forward mode again.
`test_nested_forward_mode_of_a_plain_function_is_still_wrong` fails once PyTorch is fixed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.autograd.forward_ad as forward_ad

from gradtools.boundary import trimmed
from gradtools.rules import JvpRule, Linearized, Rule, batched, closed_over_error
from gradtools.torch import _upstream as upstream
from gradtools.torch.compiling import real_tensors_too
from gradtools.torch.functorch_wrappers import alive, filled, like, may_be_dual, unwrapped
from gradtools.torch.modes import batchings, by_new_vmap
from gradtools.torch.operation_marks import RULE
from gradtools.torch.rules.transposing import (
    extras_pushed,
    pulled_back,
    tangent_at,
)
from gradtools.torch.state import Randomness

Tensor = torch.Tensor


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class BatchedRule(Rule):
    """A rule with a custom batching rule.

    Attributes:
        batching_rule: Called as `batching_rule(size, axes, xs, randomness)`; returns the
            batched rule, the inputs of that rule, and a function that maps outputs of the rule to
            their batch axes.
    """

    batching_rule: Callable[..., Any]


@dataclass(eq=False, slots=True)
class Application:
    """One application of a rule: the linear maps, and all other state that is not a tensor.

    Autograd saves the tensors that the maps read. If the maps are the same in every call, all calls
    share one application.

    Attributes:
        rule: The rule.
        linearized: The linear maps of the rule at this evaluation, without their arrays.
        count: The number of outputs, not counting the extras, which follow the outputs.
        pull: The function that computes the backward pass; its results can be differentiated.
        pulling, pushing: The positions in `[*xs, *ys, *extras]` of the tensors saved for the
            backward pass and for forward mode.
        materializes: Whether undefined cotangents are replaced by zeros.
        randomness: The states of the random generators before the evaluation, or None if no second
            evaluation needs the states.
        perturbed: Whether each input is differentiated, or None if unknown.
        like_xs, like_ys: The shape, dtype and device of each input, and of each output and extra;
            an entry is None for an integer tensor.
        ones: For each map, "tangent" or "cotangent", the vectors of ones at which the map is
            transposed.
    """

    rule: Rule
    linearized: Linearized | None = None
    count: int = 0
    pull: Callable[[Any, Sequence[Any]], Sequence[Any]] = pulled_back
    pulling: Sequence[int] = ()
    pushing: Sequence[int] = ()
    materializes: bool = False
    randomness: Any = None
    perturbed: tuple[bool, ...] | None = None
    like_xs: Sequence[Any] = ()
    like_ys: Sequence[Any] = ()
    ones: dict[str, list[Tensor]] = field(default_factory=dict)

    def evaluate(self, xs: Sequence[Tensor]) -> list[Tensor]:
        """Evaluates the rule at detached inputs, and stores the maps."""
        rule, written = self.rule, self.rule.contract is not None
        before = Randomness.now(xs) if written else None
        with torch.set_grad_enabled(written):  # a captured tensor makes outputs require grad
            return self.record(rule.at(*[x.detach() for x in xs], perturbed=self.perturbed), before)

    def record(self, at: Linearized, before: Randomness | None = None) -> list[Tensor]:
        """Stores the linear maps without their arrays, and returns the outputs and extras.

        before: The states of the random generators before the evaluation of a user's rule, or None
            if the rule is evaluated only once.
        """
        self.count, self.linearized, out = len(at.ys), at.without_arrays(), [*at.ys, *at.extras]
        if self.rule.contract is not None and any(
            y.requires_grad or upstream.is_wrapped(y) for y in out
        ):
            raise closed_over_error(self.rule.name)
        # f computes the value and the forward rule computes the tangent, and both must draw the
        # same random numbers.
        repeats = isinstance(self.rule, JvpRule) or at.extras or at.opaque_residuals
        if before is not None and repeats and before.current() is not before:
            self.randomness = before
        # Autograd attaches the node to the returned tensors. The originals are not changed, because
        # the author of the rule may store them.
        return [y.detach() for y in out]

    def note(self, xs: Sequence[Tensor], ys: Sequence[Tensor]) -> None:
        """Stores the specs of inputs, outputs and extras, and the positions of tensors to save."""
        self.like_xs, self.like_ys = list(map(like, xs)), list(map(like, ys))
        maps = self.linearized
        assert maps is not None
        saves = (maps.saves[: len(maps.saves) - maps.tangent_only], maps.saves)
        if maps.opaque_residuals or len(ys) > self.count:  # the rule may be evaluated again
            saves = tuple((*s, *[i for i in range(len(xs)) if i not in s]) for s in saves)
        self.pulling, self.pushing = saves


def apart(xs: Sequence[Tensor]) -> Sequence[Tensor]:
    """Replaces repeated tensors in xs with views, since autograd tells inputs apart by identity."""
    if len(xs) == 1 or len(set(map(id, xs))) == len(xs):
        return xs
    first = {id(x): i for i, x in reversed([*enumerate(xs)])}
    return [x if first[id(x)] == i else x.view_as(x) for i, x in enumerate(xs)]


def apply_at(point: Application, xs: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Returns the outputs and extras of an application, attached to an autograd node."""
    inside = upstream.peek_interpreter_stack() is not None or any(map(upstream.is_wrapped, xs))
    # Outside of torch.func, this call skips the checks of `Function.apply`. `gradtools.seeing`
    # patches this call.
    kind: Any = RuleFunction if inside else super(torch.autograd.Function, RuleFunction)
    return kind.apply(point, *apart(xs))


class RuleFunction(torch.autograd.Function):
    """The autograd function that applies a rule, in reverse mode, forward mode and vmap."""

    recorded_as = RULE

    @staticmethod
    def forward(point: Application, *xs: Tensor) -> tuple[Tensor, ...]:
        return tuple(without_aliases(point.evaluate(xs), xs))

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, outputs: Any) -> None:
        ctx.point = point = inputs[0]
        everything = inputs[1:] + outputs
        if not point.like_xs:
            point.note(inputs[1:], outputs)
        ctx.set_materialize_grads(point.materializes)
        ctx.save_for_backward(*map(everything.__getitem__, point.pulling))
        ctx.save_for_forward(*map(everything.__getitem__, point.pushing))
        ctx.mark_non_differentiable(*[y for y in outputs if like(y) is None])

    @staticmethod
    def backward(ctx: Any, *cts: Any) -> Any:
        point = ctx.point
        try:
            if (torch.is_grad_enabled() or point.rule.reverse_only) and batchings():
                return None, *by_new_vmap(lambda *cts: point.pull(ctx, cts), cts)
            return None, *point.pull(ctx, cts)
        except Exception as error:
            trimmed(error)
            raise

    @staticmethod
    def jvp(ctx: Any, _: None, *dxs: Tensor | None) -> Any:
        point = ctx.point
        if point.rule.reverse_only:  # raises PyTorch's error
            return torch.autograd.Function.jvp(ctx, *dxs)
        with upstream.forward_mode_enabled(True), real_tensors_too(ctx.saved_tensors):
            kept = [alive(x) for x in ctx.saved_tensors]
            at = [forward_ad.unpack_dual(x, level=0).primal if may_be_dual(x) else x for x in kept]
            dys = tangent_at(point, at, dxs)
            if len(point.like_ys) > point.count:
                dys += extras_pushed(point, at, dxs)
            return tuple(filled(without_aliases(dys, dxs, at), point.like_ys))

    @staticmethod
    def vmap(info: Any, in_dims: Any, point: Application, *xs: Tensor) -> Any:
        """Applies a batched version of the rule, outside of the level of vmap."""
        one, in_dims = point.rule, in_dims[1:]
        if one.linearize is None:
            point.linearized = one.linearized_from(xs, [])
        if isinstance(one, BatchedRule):
            rule, xs, axes_of = one.batching_rule(info.batch_size, in_dims, xs, info.randomness)
            out = apply_at(Application(rule), xs)
            point.count = len(out)
            return tuple(out), axes_of(out)
        axes = tuple([None if d is None else 0 for d in in_dims])
        front = [x if d is None else x.movedim(d, 0) for x, d in zip(xs, in_dims, strict=True)]
        rule = batched(one, _Lists(info.randomness == "same"), axes, None, info.batch_size)
        batch = Application(rule, perturbed=point.perturbed)
        out = apply_at(batch, front)
        point.count, point.randomness = batch.count, batch.randomness
        if one.linearize is not None:
            assert batch.linearized is not None
            point.linearized = batch.linearized.example
        return tuple(out), (0,) * len(out)


class Attached(torch.autograd.Function):
    """Attaches an autograd node to known outputs, if no transform or mode is active.

    The method `forward` also sets up the context object, so PyTorch does not call `setup_context`.
    """

    recorded_as = RULE
    backward = RuleFunction.backward

    @staticmethod
    def forward(ctx: Any, known: tuple[Application, Sequence[Tensor]], *xs: Tensor) -> Any:
        point, outs = known
        ctx.point = point
        if not point.materializes:
            ctx.set_materialize_grads(False)
        if point.count > 1:
            outs = (*without_aliases(outs[: point.count], xs), *outs[point.count :])
        else:  # fast path: most outputs are new tensors
            for x in xs:
                if upstream.is_alias_of(x, outs[0]):
                    outs = (outs[0].clone(), *outs[1:])
                    break
        if point.pulling:
            everything = (*xs, *outs)
            ctx.save_for_backward(*map(everything.__getitem__, point.pulling))
        return outs


# `Function.apply` without the check for torch.func transforms: `attach((application, outs), *xs)`.
attach: Callable[..., tuple[Tensor, ...]] = super(torch.autograd.Function, Attached).apply
# Set `apply` on the backward classes, so that PyTorch does not look up `backward` in each call.
for _kind in (RuleFunction, Attached):
    upstream.backward_class(_kind).apply = RuleFunction.backward


def without_aliases(ys: Sequence[Any], *others: Sequence[Any]) -> list[Any]:
    """Clones each tensor in ys that shares memory with an earlier tensor in ys or with `others`.

    Autograd does not track that an in-place write to one tensor changes another tensor.
    """
    key = lambda x: upstream.storage_key(unwrapped(x))
    known = {key(x) for xs in others for x in xs if x is not None}
    cloned = list(ys)
    for i, y in enumerate(ys):
        if y is not None:
            if key(y) in known:
                cloned[i] = y.clone()
            known.add(key(y))
    return cloned


@dataclass(frozen=True)
class _Lists:
    """Vectorizes functions that return lists of tensors, as the `backend` of `rules.batched`.

    one_draw: Whether all examples share random numbers.
    """

    one_draw: bool

    def vmap_list(self, fun: Callable[..., Any], axes: tuple[Any, ...], size: int) -> Any:
        if all(a is None for a in axes):
            return lambda *xs: [y.expand(size, *y.shape) for y in fun(*xs)]
        randomness = "same" if self.one_draw else "different"
        return torch.vmap(lambda *xs: tuple(fun(*xs)), in_dims=axes, randomness=randomness)

    def vmap_extras(self, fun: Callable[..., Any], axes: Any, size: int, extras: Any) -> Any:
        run = self.vmap_list(fun, axes, size)
        return lambda *xs: (out := run(*xs), [0] * len(out))
