"""How a rule enters PyTorch: one `torch.autograd.Function` with both modes and its own vmap.

Double backward differentiates the code of the cotangent map, so a rule is differentiated at any
order. Three things are not as PyTorch's manual has them:

- A `jvp` staticmethod runs with forward gradients switched off, so nested forward mode drops a
  term in silence (torch#197867). Ours reads the primal part of what was saved and switches them
  on again. `test_nested_forward_mode_of_a_plain_function_is_still_wrong` tells when that is over.
- Dynamo cannot trace a `Function` with a `jvp` and may drop a rule under `torch.func`
  (torch#192985, torch#193279). It sees one opaque call, which functorch's levels then enter.
- A missing map is the transpose of the other one. PyTorch transposes without asking whether the
  map is linear, so linearity is checked, once for each rule.
"""

from __future__ import annotations

import inspect
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.autograd.forward_ad as forward_ad
from torch._subclasses.fake_tensor import unset_fake_temporarily

from gradtools.errors import GradtoolsError
from gradtools.rules import Rule, batched, by_key, spread
from gradtools.torch.compiling import is_compiling, opaque_to_dynamo

Tensor = torch.Tensor


def apply_rule(rule: Rule, *xs: Tensor) -> list[Tensor]:
    """`rule.primal(*xs)`, differentiated by the rule in every mode, at every order."""
    # Dynamo does not say of an input whether it is differentiated; there it counts as if it were.
    if rule.reverse_only and _pushing() and any(is_compiling() or x.requires_grad for x in xs):
        raise GradtoolsError(
            f"{_pushing()[-1]}: f holds {rule.name}, which has a reverse rule only, so forward "
            "mode cannot enter it. Use vjp or grad, or for second derivatives "
            "mode='reverse_over_reverse'."
        )
    if is_compiling():
        return list(_apply_by_key(rule.key, *xs))
    return list(_apply(rule, xs))


_eager = threading.local()
_compiled: list[str] = []  # dynamo follows a plain list; it is empty before and after


def _pushing() -> list[str]:
    """The operators that transpose f's pullback right now, which a nonlinear rule cannot take."""
    return _compiled if is_compiling() else _eager.__dict__.setdefault("pushing", [])


def evaluated_to_push(asked: str, evaluate: Callable[..., Any], *args: Any) -> Any:
    """`evaluate(*args)`, refusing rules that have no forward mode."""
    pushing = _pushing()
    pushing.append(asked)
    try:
        return evaluate(*args)
    finally:
        pushing.pop()


def _apply(rule: Rule, xs: Sequence[Tensor]) -> tuple[Tensor, ...]:
    return (_ReverseOnly if rule.reverse_only else _BothModes).apply(rule, *_apart(xs))


def _apart(xs: Sequence[Tensor]) -> list[Tensor]:
    """The same, one tensor given twice under two names: a saved input may not be an output."""
    if len({id(x) for x in xs}) == len(xs):
        return list(xs)
    return [x.view_as(x) if any(x is o for o in xs[:i]) else x for i, x in enumerate(xs)]


class _ReverseOnly(torch.autograd.Function):
    """A rule whose cotangent map is not linear: it has no forward mode."""

    @staticmethod
    def forward(rule: Rule, *xs: Tensor) -> tuple[Tensor, ...]:
        ys = rule.primal(*xs)
        if forward_ad._current_level >= 0:
            # The tangent of an output that is an input, or a view, would have to be one too.
            ys = [y.clone() if rule.identity or y._is_view() else y for y in ys]
        return tuple(ys)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, outputs: Any) -> None:
        ctx.rule, ctx.count = inputs[0], len(inputs) - 1
        ctx.save_for_backward(*ctx.rule.read(inputs[1:]))

    @staticmethod
    def backward(ctx: Any, *cts: Tensor) -> Any:
        xs = ctx.rule.placed(ctx.saved_tensors, ctx.count)
        return (None, *_cotangent(ctx.rule, xs, cts))

    @staticmethod
    def vmap(info: Any, in_dims: Any, rule: Rule, *xs: Tensor) -> Any:
        out = apply_rule(*_batched(rule, info.batch_size, in_dims[1:], xs))
        return tuple(out), (0,) * len(out)


# PyTorch asks for this signature at every call, and building it costs as much as the call.
_ReverseOnly.forward.__signature__ = inspect.signature(_ReverseOnly.forward)  # type: ignore[attr-defined]


class _BothModes(_ReverseOnly):
    @staticmethod
    def setup_context(ctx: Any, inputs: Any, outputs: Any) -> None:
        ctx.rule, ctx.count = inputs[0], len(inputs) - 1
        read = ctx.rule.read(inputs[1:])
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*read)
        ctx.save_for_forward(*read)
        ctx.like = [(y.shape, y.dtype, y.device) if is_inexact(y) else None for y in outputs]

    @staticmethod
    def backward(ctx: Any, *cts: Tensor | None) -> Any:
        if all(ct is None for ct in cts):
            return (None,) * (1 + ctx.count)
        xs = ctx.rule.placed(ctx.saved_tensors, ctx.count)
        return (None, *_cotangent(ctx.rule, xs, cts))

    @staticmethod
    def jvp(ctx: Any, _: None, *dxs: Tensor | None) -> Any:
        with forward_ad._set_fwd_grad_enabled(True):
            read = [forward_ad.unpack_dual(x, level=0).primal for x in ctx.saved_tensors]
            xs = ctx.rule.placed(read, ctx.count)
            moving = [None if i in ctx.rule.passive else dx for i, dx in enumerate(dxs)]
            dys = zip(_tangent(ctx.rule, xs, moving), ctx.like, strict=True)
            return tuple([_zeros(*like) if dy is None and like else dy for dy, like in dys])


def _zeros(shape: Any, dtype: Any, device: Any) -> Tensor:
    return torch.zeros(shape, dtype=dtype, device=device)


# --- the maps, and the one that was not given --------------------------------------------


def _tangent(rule: Rule, xs: Sequence[Any], dxs: Sequence[Any]) -> list[Any]:
    if rule.tangent is not None:
        return rule.tangent(xs, dxs)
    outs = rule.primal(*xs)
    present = [i for i, dx in enumerate(dxs) if dx is not None]

    def run(at: Any, cts: Any) -> list[Any]:
        found = rule.cotangent(at, cts)
        return [found[i] for i in present]

    _check_linear(rule, "cotangent", run, xs, outs)
    return _transpose(lambda *cts: run(xs, cts), outs, [dxs[i] for i in present])


def _cotangent(rule: Rule, xs: Sequence[Any], cts: Sequence[Any]) -> list[Any]:
    if rule.cotangent is not None:
        return rule.cotangent(xs, cts)
    carried = [i for i, x in enumerate(xs) if is_inexact(x) and i not in rule.passive]
    examples = [xs[i].new_zeros(rule.dx_shape(i, tuple(xs[i].shape))) for i in carried]

    mask = [i in carried for i in range(len(xs))]

    def run(at: Any, moving: Any) -> list[Any]:
        return rule.tangent(at, spread(moving, mask))

    _check_linear(rule, "tangent", run, xs, examples)
    return spread(_transpose(lambda *dxs: run(xs, dxs), examples, list(cts)), mask)


def _transpose(linear: Callable[..., list[Any]], examples: Any, values: Any) -> list[Any]:
    """The transpose of `linear` (shaped like `examples` to `values`), applied to `values`."""
    came_out: list[int] = []

    def dense(*vs: Tensor) -> tuple[Tensor, ...]:
        out = linear(*vs)
        came_out[:] = [i for i, o in enumerate(out) if o is not None]
        return tuple(out[i] for i in came_out)

    outs, pullback = torch.func.vjp(dense, *(torch.zeros_like(e) for e in examples))
    given = [values[i] for i in came_out]
    filled = [torch.zeros_like(o) if v is None else v for o, v in zip(outs, given, strict=True)]
    return list(pullback(tuple(filled)))


_LINEAR: weakref.WeakSet[Rule] = weakref.WeakSet()


def _check_linear(rule: Rule, which: str, run: Callable[..., Any], xs: Any, examples: Any) -> None:
    """Transposes at two dummy points must agree, else the map is not linear.

    Asked once of each rule, at plain values of its own: so it works inside functorch's levels
    and draws no random numbers.
    """
    if rule in _LINEAR:
        return
    with unset_fake_temporarily(), torch.no_grad():
        at = [_plain_like(x, 0.5) for x in xs]
        v = [_plain_like(e, 1.0) for e in examples]
        w = [_plain_like(e, 2.0) for e in examples]
        one, other = run(at, v), run(at, w)
        both = run(at, [a + b for a, b in zip(v, w, strict=True)])
        same = _close([_plus(a, b) for a, b in zip(one, other, strict=True)], both)
        for factor in (1e-4, 1e4):
            scaled = run(at, [factor * a for a in v])
            same = same and _close([_times(factor, a) for a in one], scaled)
    if not same:
        raise GradtoolsError(
            f"rule {rule.name!r}: the other mode was to follow by transposing its {which} map, "
            f"but that map is not linear in its {which}s. Give the missing map as well, or make "
            "this one linear."
        )
    _LINEAR.add(rule)


def _plain_like(x: Any, shift: float) -> Any:
    if x is None:
        return None
    if not is_inexact(x):
        return torch.zeros(x.shape, dtype=x.dtype, device=x.device)
    wave = torch.sin(torch.arange(1, x.numel() + 1, device=x.device) * shift)
    return wave.reshape(x.shape).to(x.dtype)


def _plus(a: Any, b: Any) -> Any:
    return b if a is None else a if b is None else a + b


def _times(factor: float, a: Any) -> Any:
    return None if a is None else factor * a


def _close(found: Sequence[Any], expected: Sequence[Any]) -> bool:
    pairs = [
        (a, b) for a, b in zip(found, expected, strict=True) if a is not None and b is not None
    ]
    return all(_near(a, b) for a, b in pairs)


def _near(a: Tensor, b: Tensor) -> bool:
    slack = torch.finfo(a.dtype).eps ** 0.5
    bound = slack * torch.maximum(a.abs().max(), b.abs().max()) if a.numel() else 0.0
    return bool(((a - b).abs() <= bound).all())


# --- vmap and torch.compile --------------------------------------------------------------


class _Lists:
    """The two things that `rules.batched` asks of a framework."""

    @staticmethod
    def vmap_list(fun: Callable[..., Any], axes: tuple[Any, ...], size: int) -> Any:
        if all(a is None for a in axes):
            return lambda *xs: [y.expand(size, *y.shape) for y in fun(*xs)]
        return torch.vmap(lambda *xs: tuple(fun(*xs)), in_dims=axes, randomness="different")

    @staticmethod
    def sum_leading(x: Tensor) -> Tensor:
        return x.sum(0)


def _batched(rule: Rule, size: int, dims: Sequence[int | None], xs: Sequence[Tensor]) -> Any:
    """The rule of a batch, and its inputs with the batch in front."""
    axes = tuple(None if d is None else 0 for d in dims)
    front = [x if d is None else x.movedim(d, 0) for x, d in zip(xs, dims, strict=True)]
    return (batched(rule, _Lists, axes, axes, size), *front)


@opaque_to_dynamo
def _apply_by_key(key: str, *xs: Tensor) -> tuple[Tensor, ...]:
    """`apply_rule` as one node of dynamo's graph, which holds no Python objects."""
    return _apply(by_key(key), xs)


def is_inexact(x: Any) -> bool:
    """Whether x has a floating or complex dtype."""
    return x.is_floating_point() or x.is_complex()
