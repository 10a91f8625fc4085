"""The ways of differentiating that the PyTorch sweep sends each program through.

A way computes J u, J^H v or H u by one operator of gradtools, or by one within another or within a
transform of PyTorch's, and has the oracles judge it. Ways of the quick tier are those that have
an engine of their own; the others are made of them, or cost more.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

from tests.support.sweeps import AGREES, DIFFERS, LEFT_OUT
from tests.support.sweeps.torch_oracles import Judgement, Oracles, apart, inner

Found = Judgement | None
_SMALL = 40  # entries of inputs and outputs, for whole matrices


@dataclass(frozen=True)
class TorchWay:
    """One way of differentiating.

    Attributes:
        name: Of the operator and its mode.
        judged: Computes and judges; None where the way is not for this program.
        order: How many derivatives are taken; 0 for what is told of a function.
        quick: Whether it belongs to the quick tier.
    """

    name: str
    judged: Callable[[Any, Oracles], Found]
    order: int = 1
    quick: bool = False


WAYS: list[TorchWay] = []


def _way(name: str, order: int = 1, quick: bool = False) -> Any:
    def register(judged: Callable[[Any, Oracles], Found]) -> Any:
        WAYS.append(TorchWay(name, judged, order, quick))
        return judged

    return register


def _matrices(o: Oracles) -> bool:
    """Whether whole Jacobians are asked for: real, and small."""
    real = not any(x.is_complex() for x in (*o.x, *o.y))
    return real and max(sum(x.numel() for x in xs) for xs in (o.x, o.y)) <= _SMALL


# --- first order --------------------------------------------------------------------------------


def _vjp(gt: Any, o: Oracles, f: Any = None) -> Judgement:
    return o.cotangent(gt.vjp(f or o.f, *o.x)[1](o.v))


def _jvp(gt: Any, o: Oracles, f: Any = None) -> Judgement:
    return o.tangent(gt.jvp(f or o.f, o.x, o.u)[1])


_way("vjp", quick=True)(_vjp)
_way("jvp", quick=True)(_jvp)


@_way("vjp, outputs one by one", quick=True)
def _vjp_of_each(gt: Any, o: Oracles) -> Found:
    """The other outputs then have no cotangent at all, where a zero would do."""
    if len(o.y) == 1:
        return None
    parts = [gt.vjp(_output(o.f, i), *o.x)[1](v) for i, v in enumerate(o.v)]
    return o.cotangent([sum(xs[1:], xs[0]) for xs in zip(*parts, strict=True)])


def _output(f: Any, i: int) -> Any:
    return lambda *xs: f(*xs)[i]


@_way("jvp, inputs one by one", quick=True)
def _jvp_of_each(gt: Any, o: Oracles) -> Found:
    """The other inputs then have no tangent at all, where a zero would do."""
    if len(o.x) == 1:
        return None
    parts = [gt.jvp(_input(o, i), (x,), (o.u[i],))[1] for i, x in enumerate(o.x)]
    return o.tangent([sum(ys[1:], ys[0]) for ys in zip(*parts, strict=True)])


def _input(o: Oracles, i: int) -> Any:
    return lambda x: o.f(*o.x[:i], x, *o.x[i + 1 :])


@_way("linearize", quick=True)
def _linearize(gt: Any, o: Oracles) -> Found:
    push = gt.linearize(o.f, *o.x)[1]
    result = push(*o.u)
    if apart(push(*o.u), result) > 0:
        return Judgement(DIFFERS, "itself", "a second call gives another tangent")
    return o.tangent(result)


def _jacobian(gt: Any, o: Oracles, mode: str) -> Found:
    if not _matrices(o):
        return None
    every = tuple(range(len(o.x)))
    rows = gt.jacobian(o.f, argnums=every, mode=mode)(*o.x)
    pulled = [sum(_times(v, row[i]) for v, row in zip(o.v, rows, strict=True)) for i in every]
    result = o.cotangent(pulled)
    return o.tangent([_pushed(row, o.u) for row in rows]) if result.result == AGREES else result


def _times(v: Any, block: Any) -> Any:
    """v^T J of one block, whose first axes are v's."""
    rows = block.reshape(v.numel(), -1).to(v.dtype)
    return (v.reshape(-1) @ rows).reshape(block.shape[v.dim() :])


def _pushed(row: Sequence[Any], u: Sequence[Any]) -> Any:
    """J u of one output's blocks."""
    parts = [
        (block.reshape(-1, t.numel()).to(t.dtype) @ t.reshape(-1)).reshape(
            block.shape[: block.dim() - t.dim()]
        )
        for block, t in zip(row, u, strict=True)
    ]
    return sum(parts[1:], parts[0])


_way("jacobian, forward")(lambda gt, o: _jacobian(gt, o, "forward"))
_way("jacobian, reverse")(lambda gt, o: _jacobian(gt, o, "reverse"))


@_way("mixed_partial, program as G")
def _mixed_as_G(gt: Any, o: Oracles) -> Found:
    v = tuple(v.clone() for v in o.v)
    result = gt.mixed_partial(inner, lambda z: o.f(*z), v, o.x, o.u)
    return o.tangent(result)


def _chunked(gt: Any, o: Oracles, f: Any) -> Any:
    return gt.chunked(f, chunk_size=max(1, (len(o.x[0]) + 1) // 2))


def _by_defvjp(gt: Any, o: Oracles) -> Any:
    """The program with torch.func's own vjp for its rule."""
    import torch

    rule = gt.custom_rule(lambda *xs: o.f(*xs))
    rule.defvjp(lambda *xs: (o.f(*xs), xs), lambda xs, cts: torch.func.vjp(o.f, *xs)[1](cts))
    return rule


def _by_defjvp(gt: Any, o: Oracles) -> Any:
    """The program with gradtools' jvp for its rule: torch.func's nests in no dual numbers."""
    rule = gt.custom_rule(lambda *xs: o.f(*xs))
    rule.defjvp(lambda xs, dxs: gt.jvp(o.f, tuple(xs), tuple(dxs)))
    return rule


def _reversed(gt: Any, f: Any) -> Any:
    return lambda *xs: f(*gt.reverse_gradient(xs, 0.5))


_way("checkpoint, vjp")(lambda gt, o: _vjp(gt, o, gt.checkpoint(o.f)))
_way("checkpoint, jvp")(lambda gt, o: _jvp(gt, o, gt.checkpoint(o.f)))
_way("chunked, vjp")(lambda gt, o: _vjp(gt, o, _chunked(gt, o, o.f)) if o.alone else None)
_way("chunked, jvp")(lambda gt, o: _jvp(gt, o, _chunked(gt, o, o.f)) if o.alone else None)
_way("custom_rule by defvjp, vjp")(lambda gt, o: _vjp(gt, o, _by_defvjp(gt, o)))
_way("custom_rule by defvjp, jvp")(lambda gt, o: _jvp(gt, o, _by_defvjp(gt, o)))
_way("custom_rule by defjvp, vjp")(lambda gt, o: _vjp(gt, o, _by_defjvp(gt, o)))
_way("custom_rule by defjvp, jvp")(lambda gt, o: _jvp(gt, o, _by_defjvp(gt, o)))
_way("reverse_gradient, vjp")(
    lambda gt, o: o.cotangent(gt.vjp(_reversed(gt, o.f), *o.x)[1](o.v), factor=-0.5)
)
_way("reverse_gradient, jvp")(
    lambda gt, o: o.tangent([-2 * t for t in gt.jvp(_reversed(gt, o.f), o.x, o.u)[1]])
)
_way("straight_through of itself, vjp")(
    lambda gt, o: _vjp(gt, o, gt.straight_through(o.f, surrogate=o.f))
)


@_way("make_functional, vjp")
def _functionalize(gt: Any, o: Oracles) -> Found:
    from gradtools.torch._upstream import pytree

    if o.program.module is None:
        return None
    module, names, own, moved, spec = o.program.module
    apply, params, state = gt.make_functional(module)
    if list(params) != names:
        return Judgement(DIFFERS, "the module", f"parameters {list(params)}, not {names}")

    def f(*xs: Any) -> Any:
        moving = iter(xs[len(names) :])
        full = [next(moving) if m else x for x, m in zip(own, moved, strict=True)]
        args, kwargs = pytree.tree_unflatten(full, spec)
        out, _ = apply(dict(zip(names, xs, strict=False)), state, *args, **kwargs)
        return tuple(y for y in pytree.tree_leaves(out) if y.is_floating_point() or y.is_complex())

    return _vjp(gt, o, f)


# --- second order -------------------------------------------------------------------------------


def _hvp(gt: Any, o: Oracles, loss: Any = None, factor: float = 1.0, **options: Any) -> Judgement:
    return o.product(gt.hvp(loss or o.loss, o.x, o.u, **options)[1], factor=factor)


_way("hvp, forward over reverse", order=2, quick=True)(partial(_hvp, mode="forward_over_reverse"))
_way("hvp, reverse over reverse", order=2, quick=True)(partial(_hvp, mode="reverse_over_reverse"))


@_way("frozen, second order", order=2, quick=True)
def _frozen(gt: Any, o: Oracles) -> Found:
    G = gt.frozen(o.g)
    gradient = gt.grad(lambda *xs: inner(o.v, G(*xs)), argnums=_all(o), disconnected_inputs="zeros")
    return o.product(gt.vjp(gradient, *o.x)[1](o.u))


def _all(o: Oracles) -> tuple[int, ...]:
    return tuple(range(len(o.x)))


@_way("hvp, inputs one by one", order=2, quick=True)
def _hvp_of_each(gt: Any, o: Oracles) -> Found:
    """Each input's own block of the Hessian, where the others have no tangent at all."""
    if len(o.x) == 1:
        return None
    forward, reverse = ([_block(gt, o, i, mode) for i in _all(o)] for mode in _MODES)
    error = apart(forward, reverse, o.usual_twice)
    if error <= _BOTH_MODES:
        return Judgement(AGREES, "both modes")
    return Judgement(DIFFERS, "both modes", f"they part by {error:.1e}")


def _block(gt: Any, o: Oracles, i: int, mode: str) -> Any:
    loss = lambda x: o.loss(*o.x[:i], x, *o.x[i + 1 :])
    return gt.hvp(loss, (o.x[i],), (o.u[i],), mode=mode)[1][0]


_BOTH_MODES = 1e-7  # their rounding is not the same
_MODES = ("forward_over_reverse", "reverse_over_reverse")


@_way("grad of jvp", order=2)
def _grad_of_jvp(gt: Any, o: Oracles) -> Found:
    pushed = lambda *xs: inner(o.v, gt.jvp(o.g, xs, o.u)[1])
    return o.product(gt.grad(pushed, argnums=_all(o), disconnected_inputs="zeros")(*o.x))


@_way("jvp of jvp", order=2)
def _jvp_of_jvp(gt: Any, o: Oracles) -> Found:
    pushed = lambda *xs: gt.jvp(o.g, xs, o.u)[1]
    result = inner(o.v, gt.jvp(pushed, o.x, o.u)[1])
    return o.curvature(result)


@_way("linearize of grad", order=2)
def _linearize_of_grad(gt: Any, o: Oracles) -> Found:
    gradient = gt.grad(o.loss, argnums=_all(o), disconnected_inputs="zeros")
    return o.product(gt.linearize(gradient, *o.x)[1](*o.u))


@_way("hessian", order=2)
def _hessian(gt: Any, o: Oracles) -> Found:
    if not _matrices(o):
        return None
    rows = gt.hessian(o.loss, argnums=_all(o))(*o.x)
    return o.product([_pushed(row, o.u) for row in rows])


@_way("jacobian, reverse over forward", order=2)
def _reverse_over_forward(gt: Any, o: Oracles) -> Found:
    if not _matrices(o):
        return None
    pushed = lambda *xs: gt.jvp(o.g, xs, o.u)[1]
    rows = gt.jacobian(pushed, argnums=_all(o), mode="reverse")(*o.x)
    return o.product(
        [sum(_times(v, row[i]) for v, row in zip(o.v, rows, strict=True)) for i in _all(o)]
    )


@_way("jacobian, forward over reverse", order=2)
def _forward_over_reverse(gt: Any, o: Oracles) -> Found:
    if not _matrices(o):
        return None
    gradient = gt.grad(o.loss, argnums=_all(o), disconnected_inputs="zeros")
    rows = gt.jacobian(gradient, argnums=_all(o), mode="forward")(*o.x)
    return o.product([_pushed(row, o.u) for row in rows])


@_way("mixed_partial, program as f", order=2)
def _mixed_as_f(gt: Any, o: Oracles) -> Found:
    import torch

    both = lambda y, g: o.loss(*(a + b for a, b in zip(y, g, strict=True)))
    zeros = tuple(torch.zeros_like(x) for x in o.x)
    same = lambda z: tuple(x * 1 for x in z)
    return o.product(gt.mixed_partial(both, same, o.x, zeros, o.u))


def _hvp_of(gt: Any, o: Oracles, g: Any) -> Judgement:
    return _hvp(gt, o, lambda *xs: inner(o.v, g(*xs)))


def _ruled(o: Oracles, rule: Any) -> Any:
    return lambda *xs: o.bent(rule(*xs))


_way("checkpoint, hvp", order=2)(lambda gt, o: _hvp_of(gt, o, gt.checkpoint(o.g)))
_way("chunked, hvp", order=2)(
    lambda gt, o: _hvp_of(gt, o, _chunked(gt, o, o.g)) if o.alone else None
)
_way("custom_rule by defvjp, hvp", order=2)(
    lambda gt, o: _hvp_of(gt, o, _ruled(o, _by_defvjp(gt, o)))
)
_way("custom_rule by defjvp, hvp", order=2)(
    lambda gt, o: _hvp_of(gt, o, _ruled(o, _by_defjvp(gt, o)))
)
_way("reverse_gradient, hvp", order=2)(
    lambda gt, o: _hvp(gt, o, _reversed(gt, o.loss), factor=0.25)
)


# --- what is told of a function -----------------------------------------------------------------


@_way("why_zero", order=0)
def _why_zero(gt: Any, o: Oracles) -> Found:
    moving = tuple(i for i, x in enumerate(o.pulled) if bool((x != 0).any()))
    if not moving:
        return None
    report = gt.why_zero(o.loss, *o.x, argnums=moving)
    if any(finding.kind == "cut" for finding in report.findings):
        return Judgement(DIFFERS, "reverse mode", str(report.findings[0])[:160])
    return Judgement(AGREES, "reverse mode")


def _connected(o: Oracles) -> list[bool]:
    """Which inputs have a gradient by reverse mode, be it zero."""
    import torch

    live = tuple(x.detach().requires_grad_() for x in o.x)
    with torch.enable_grad():
        ys = o.f(*(x.view_as(x) for x in live))
    return [g is not None for g in torch.autograd.grad(ys, live, o.v, allow_unused=True)]


# --- tensors of another class -------------------------------------------------------------------


def _marked(xs: Sequence[Any]) -> tuple[Any, ...]:
    """The same as tensors of a subclass that does nothing."""
    return tuple(x.as_subclass(_subclass()) for x in xs)


@cache
def _subclass() -> Any:
    import torch

    return type("Marked", (torch.Tensor,), {})


def _plain(xs: Sequence[Any]) -> tuple[Any, ...]:
    import torch

    return tuple(x.as_subclass(torch.Tensor) for x in xs)


_way("vjp, tensor subclass")(
    lambda gt, o: o.cotangent(_plain(gt.vjp(o.f, *_marked(o.x))[1](_marked(o.v))))
)
_way("jvp, tensor subclass")(
    lambda gt, o: o.tangent(_plain(gt.jvp(o.f, _marked(o.x), _marked(o.u))[1]))
)
_way("linearize, tensor subclass")(
    lambda gt, o: o.tangent(_plain(gt.linearize(o.f, *_marked(o.x))[1](*_marked(o.u))))
)
_way("hvp, tensor subclass", order=2)(
    lambda gt, o: o.product(_plain(gt.hvp(o.loss, _marked(o.x), _marked(o.u))[1]))
)


# --- within PyTorch's own transforms ------------------------------------------------------------


def _within(run: Callable[[Any], Any], gt: Any, judged: Callable[[Any], Found]) -> Found:
    """What gradtools gives inside of a transform, if torch.func's own gives anything there."""
    import torch

    try:
        run(torch.func)
    except Exception:
        return Judgement(LEFT_OUT, "torch.func", "torch.func raises as well")
    return judged(run(gt))


def _two(xs: Sequence[Any]) -> tuple[Any, ...]:
    """Two rows whose difference is x."""
    import torch

    return tuple(torch.stack((2 * x, x)) for x in xs)


@_way("vmap of jvp")
def _vmap_of_jvp(gt: Any, o: Oracles) -> Found:
    import torch

    run = lambda by: torch.func.vmap(lambda u: by.jvp(o.f, o.x, u)[1])(_two(o.u))
    return _within(run, gt, lambda found: o.tangent([y[0] - y[1] for y in found]))


@_way("vmap of vjp")
def _vmap_of_vjp(gt: Any, o: Oracles) -> Found:
    import torch

    run = lambda by: torch.func.vmap(lambda v: by.vjp(o.f, *o.x)[1](v))(_two(o.v))
    return _within(run, gt, lambda found: o.cotangent([x[0] - x[1] for x in found]))


@_way("torch.func.grad of jvp", order=2)
def _func_grad_of_jvp(gt: Any, o: Oracles) -> Found:
    import torch

    pushed = lambda by: lambda *xs: inner(o.v, by.jvp(o.g, xs, o.u)[1])
    return _within(lambda by: torch.func.grad(pushed(by), argnums=_all(o))(*o.x), gt, o.product)


@_way("torch.func.grad of vjp", order=2)
def _func_grad_of_vjp(gt: Any, o: Oracles) -> Found:
    import torch

    pulled = lambda by: lambda *xs: inner(o.u, by.vjp(o.g, *xs)[1](o.v))
    return _within(lambda by: torch.func.grad(pulled(by), argnums=_all(o))(*o.x), gt, o.product)
