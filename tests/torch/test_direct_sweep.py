"""The short way of a rule's call, held against the long one: rules of many kinds, in many ways.

Host functions likewise. A rule whose `_direct` is None takes the long way alone. What comes out
must be the same to the last digit: numbers, errors, flags, and the state that a call leaves behind.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.autograd.forward_ad as fw
from torch.utils.checkpoint import checkpoint

import gradtools.torch as gt

sin, cos, exp, F64 = torch.sin, torch.cos, torch.exp, torch.float64


def _no_grad(value):
    with torch.no_grad():
        return value()


def _grad_off(value):
    torch.set_grad_enabled(False)
    return value()


def _inner(x):
    with torch.enable_grad():
        z = x.detach().requires_grad_()
        return torch.autograd.grad(sin(z).sum(), z)[0]


def _mask(x):
    return torch.rand_like(x) > 0.5


def _by_mask(p, t, mask):
    return p * mask, t * mask


# By name: f, (fwd, bwd) or None, the forward rule or None, how many arguments.
SINE = lambda x: sin(x)
PULL = lambda x, ct: (cos(x) * ct,)
RULES = {
    "saves its input": (SINE, (lambda x: (sin(x), x), PULL), None, 1),
    "saves a tuple": (SINE, (lambda x: (sin(x), (cos(x),)), lambda r, ct: (r[0] * ct,)), None, 1),
    "saves its output": (exp, (lambda x: ((y := exp(x)), y), lambda y, ct: (y * ct,)), None, 1),
    "saves a dict": (
        exp,
        (lambda x: ((y := exp(x)), {"y": y, "x": x, "k": 3}), lambda r, ct: (r["y"] * ct,)),
        None,
        1,
    ),
    "saves nothing": (lambda x: 3 * x, (lambda x: (3 * x, None), lambda r, ct: (3 * ct,)), None, 1),
    "forward": (SINE, None, lambda p, t: (sin(p[0]), cos(p[0]) * t[0]), 1),
    "both": (
        SINE,
        (lambda x: (sin(x), x), PULL),
        lambda p, t: (sin(p[0]), cos(p[0]) * t[0]),
        1,
    ),
    "both, unequal": (
        SINE,
        (lambda x: (sin(x), x), lambda x, ct: (2 * cos(x) * ct,)),
        lambda p, t: (sin(p[0]), 3 * cos(p[0]) * t[0]),
        1,
    ),
    "product": (
        lambda x, y: x * y,
        (lambda x, y: (x * y, (x, y)), lambda r, ct: (ct * r[1], ct * r[0])),
        None,
        2,
    ),
    "product, forward": (
        lambda x, y: x * y,
        None,
        lambda p, t: (p[0] * p[1], t[0] * p[1] + p[0] * t[1]),
        2,
    ),
    "one cotangent": (
        lambda x, y: x * y,
        (lambda x, y: (x * y, (x, y)), lambda r, ct: (ct * r[1], None)),
        None,
        2,
    ),
    "two outputs": (
        lambda x: (sin(x), cos(x)),
        (lambda x: ((sin(x), cos(x)), x), lambda x, ct: (cos(x) * ct[0] - sin(x) * ct[1],)),
        None,
        1,
    ),
    "a dict of outputs, forward": (
        lambda x: {"a": sin(x), "b": x * 2},
        None,
        lambda p, t: ({"a": sin(p[0]), "b": p[0] * 2}, {"a": cos(p[0]) * t[0], "b": 2 * t[0]}),
        1,
    ),
    "an integer output": (
        lambda x: (sin(x), x.argsort(-1)),
        (lambda x: ((sin(x), x.argsort(-1)), x), lambda x, ct: (cos(x) * ct[0],)),
        None,
        1,
    ),
    "a number as output": (
        lambda x: (sin(x), 3.0),
        (lambda x: ((sin(x), 3.0), x), lambda x, ct: (cos(x) * ct[0],)),
        None,
        1,
    ),
    "identity": (lambda x: x, (lambda x: (x, None), lambda r, ct: (-ct,)), None, 1),
    "identity, forward": (lambda x: x, None, lambda p, t: (p[0], -t[0]), 1),
    "a view": (
        lambda x: x.reshape(-1),
        (lambda x: (x.reshape(-1), x), lambda x, ct: (3 * ct.reshape(x.shape),)),
        None,
        1,
    ),
    "a view, forward": (lambda x: x.T, None, lambda p, t: (p[0].T, t[0].T), 1),
    "a constant": (
        lambda x: torch.ones(3, dtype=F64),
        (lambda x: (torch.ones(3, dtype=F64), x), lambda x, ct: (torch.zeros_like(x),)),
        None,
        1,
    ),
    "draws": (
        lambda x: x * _mask(x),
        (lambda x: (x * (m := _mask(x)), m), lambda m, ct: (ct * m,)),
        None,
        1,
    ),
    "draws, forward": (
        lambda x: x * _mask(x),
        None,
        lambda p, t: _by_mask(p[0], t[0], _mask(p[0])),
        1,
    ),
    "fwd leaves gradients off": (SINE, (lambda x: _grad_off(lambda: (sin(x), x)), PULL), None, 1),
    "bwd leaves gradients off": (
        SINE,
        (lambda x: (sin(x), x), lambda x, ct: _grad_off(lambda: PULL(x, ct))),
        None,
        1,
    ),
    "fwd without gradients": (SINE, (lambda x: _no_grad(lambda: (sin(x), x)), PULL), None, 1),
    "bwd without gradients": (
        SINE,
        (lambda x: (sin(x), x), lambda x, ct: _no_grad(lambda: PULL(x, ct))),
        None,
        1,
    ),
    "bwd detaches": (SINE, (lambda x: (sin(x), x), lambda x, ct: PULL(x, ct.detach())), None, 1),
    "bwd detaches a part": (
        SINE,
        (
            lambda x: (sin(x), x),
            lambda x, ct: (0.5 * cos(x) * ct.detach() + 0.5 * cos(x) * ct,),
        ),
        None,
        1,
    ),
    "forward without gradients": (
        SINE,
        None,
        lambda p, t: _no_grad(lambda: (sin(p[0]), cos(p[0]) * t[0])),
        1,
    ),
    "fwd writes its input": (SINE, (lambda x: (sin(x.mul_(1)), x), PULL), None, 1),
    "bwd writes its cotangent": (
        SINE,
        (lambda x: (sin(x), x), lambda x, ct: (ct.mul_(cos(x)),)),
        None,
        1,
    ),
    "bwd writes what was saved": (
        exp,
        (lambda x: ((y := exp(x)), y), lambda y, ct: (y.mul_(ct),)),
        None,
        1,
    ),
    "a derivative within": (
        SINE,
        (lambda x: (sin(x), x), lambda x, ct: (_inner(x) * ct,)),
        None,
        1,
    ),
    "a derivative within, forward": (
        SINE,
        None,
        lambda p, t: (sin(p[0]), _inner(p[0]) * t[0]),
        1,
    ),
    "another dtype": (
        SINE,
        (lambda x: (sin(x), x), lambda x, ct: ((cos(x) * ct).float(),)),
        None,
        1,
    ),
    "another shape": (SINE, (lambda x: (sin(x), x), lambda x, ct: (ct.sum(),)), None, 1),
    "another output": (SINE, (lambda x: (sin(x).sum(), x), PULL), None, 1),
    "affine": (SINE, (lambda x: (sin(x), x), lambda x, ct: (cos(x),)), None, 1),
    "affine, forward": (SINE, None, lambda p, t: (sin(p[0]), cos(p[0])), 1),
    "not linear, forward": (SINE, None, lambda p, t: (sin(p[0]), cos(p[0]) * t[0] ** 2), 1),
    "writes its tangent": (SINE, None, lambda p, t: (sin(p[0]), t[0].mul_(cos(p[0]))), 1),
    "gives its tangent": (lambda x: x + 1, None, lambda p, t: (p[0] + 1, t[0]), 1),
    "skips a tangent of zeros": (
        SINE,
        None,
        lambda p, t: (sin(p[0]), cos(p[0]) * t[0] if t[0].any() else t[0] * 0),
        1,
    ),
    "skips a cotangent of zeros": (
        SINE,
        (lambda x: (sin(x), x), lambda x, ct: (cos(x) * ct if ct.any() else ct * 0,)),
        None,
        1,
    ),
    "a fill in the tangent": (
        SINE,
        None,
        lambda p, t: (sin(p[0]), torch.where(p[0] > 0.5, t[0] * cos(p[0]), 0.0)),
        1,
    ),
    "raises": (SINE, (lambda x: (sin(x), x), lambda x, ct: 1 / 0), None, 1),
}


def _sine(save=lambda x, y: x, restore=lambda r: r, kernel=np.sin, out=None, **how):
    """sin with its first and second derivative from kernels."""
    f, back = gt.host_function(kernel, out, **how), gt.host_function(lambda x, c: np.cos(x) * c)
    twice = gt.host_function(
        lambda x, c, v: (-np.sin(x) * c * v, np.cos(x) * v), lambda x, c, v: (x, c)
    )
    f.defvjp(lambda x: ((y := f(x)), save(x, y)), lambda r, ct: (back(restore(r), ct),))
    back.defvjp(lambda x, c: (back(x, c), (x, c)), lambda r, v: twice(*r, v))
    return [back, twice, f], 1


def _exponential():
    f, back = gt.host_function(np.exp), gt.host_function(np.multiply)
    f.defvjp(lambda x: ((y := f(x)), y), lambda y, ct: (back(y, ct),))
    back.defvjp(lambda y, c: (back(y, c), (y, c)), lambda r, v: (back(r[1], v), back(r[0], v)))
    return [back, f], 1


def _product(one=False):
    f, back = gt.host_function(np.multiply), gt.host_function(lambda x, c: x * c)
    f.defvjp(
        lambda x, y: (f(x, y), (x, y)),
        lambda r, c: (back(r[1], c), None if one else back(r[0], c)),
    )
    back.defvjp(lambda x, c: (back(x, c), (x, c)), lambda r, v: (back(r[1], v), back(r[0], v)))
    return [back, f], 2


def _pair(integer=False):
    pair = lambda x: (np.sin(x), np.argsort(x) if integer else np.cos(x))
    f = gt.host_function(pair, lambda x: (x, gt.ArraySpec(x.shape, "int64") if integer else x))
    f.defvjp(
        lambda x: (f(x), x),
        lambda x, c: (cos(x) * c[0] - (0 if integer else sin(x) * c[1]),),
    )
    return [f], 1


def _forward(kernel=np.sin, push=lambda x, t: np.cos(x) * t):
    f, back = gt.host_function(kernel), gt.host_function(push)
    f.defjvp(lambda p, t: (f(p[0]), back(p[0], t[0])))
    back.defjvp(lambda p, t: (back(*p), back(p[0], t[1]) - f(p[0]) * p[1] * t[0]))
    return [back, f], 1


def _in_torch(both=False):
    """The derivative in tensors, which autograd differentiates again."""
    f = gt.host_function(np.sin)
    f.defvjp(lambda x: (f(x), x), PULL)
    if both:
        f.defjvp(lambda p, t: (f(p[0]), cos(p[0]) * t[0]))
    return [f], 1


def _pulled_by(bwd):
    f = gt.host_function(np.sin)
    f.defvjp(lambda x: (f(x), x), bwd)
    return [f], 1


WORKSPACE = np.empty((3, 3))


def _raised(x):
    raise ZeroDivisionError("the kernel's")


# By name: what makes the host functions, the one that is called last, and how many arguments.
HOST = {
    "host": _sine,
    "host, vectorized": lambda: _sine(vectorized=True),
    "host, always held": lambda: _sine(check="always"),
    "host, never held": lambda: _sine(check="never"),
    "host, saves a tuple": lambda: _sine(lambda x, y: (x,), lambda r: r[0]),
    "host, saves a dict": lambda: _sine(lambda x, y: {"x": x, "k": 3}, lambda r: r["x"]),
    "host, saves another": lambda: _sine(lambda x, y: 2 * x, lambda r: r / 2),
    "host, saves its output": _exponential,
    "host, product": _product,
    "host, one cotangent": lambda: _product(True),
    "host, two outputs": _pair,
    "host, an integer output": lambda: _pair(True),
    "host, forward": _forward,
    "host, bwd in tensors": _in_torch,
    "host, both in tensors": lambda: _in_torch(True),
    "host, no rule": lambda: ([gt.host_function(np.sin)], 1),
    "host, its argument": lambda: _sine(kernel=lambda x: x),
    "host, a view": lambda: _sine(kernel=lambda x: np.sin(x).T),
    "host, its workspace": lambda: _sine(kernel=lambda x: np.sin(x, out=WORKSPACE[: len(x)])),
    "host, in another order": lambda: _sine(kernel=lambda x: np.asfortranarray(np.sin(x))),
    "host, in a subclass": lambda: _sine(kernel=lambda x: np.sin(x).view(np.matrix)),
    "host, numbers": lambda: _sine(kernel=np.sum, out=lambda x: gt.ArraySpec((), x.dtype)),
    "host, another dtype": lambda: _sine(kernel=lambda x: np.sin(x).astype(np.float32)),
    "host, another shape": lambda: _sine(kernel=lambda x: np.sin(x)[:1]),
    "host, a list": lambda: _sine(kernel=lambda x: [np.sin(x)]),
    "host, a tensor": lambda: _sine(kernel=lambda x: torch.from_numpy(np.sin(x))),
    "host, writes its argument": lambda: _sine(kernel=lambda x: np.sin(x, out=x)),
    "host, raises": lambda: _sine(kernel=_raised),
    "host, affine": lambda: _pulled_by(lambda x, ct: (cos(x),)),
    "host, another cotangent": lambda: _pulled_by(lambda x, ct: (ct.sum(),)),
    "host, another dtype of cotangent": lambda: _pulled_by(lambda x, ct: ((cos(x) * ct).float(),)),
    "host, bwd raises": lambda: _pulled_by(lambda x, ct: 1 / 0),
    "host, bwd writes its cotangent": lambda: _pulled_by(lambda x, ct: (ct.mul_(cos(x)),)),
    "host, a derivative within": lambda: _pulled_by(lambda x, ct: (_inner(x) * ct,)),
}


def leaves(out):
    if isinstance(out, torch.Tensor):
        return [out]
    if isinstance(out, dict | list | tuple):
        return [x for one in (out.values() if isinstance(out, dict) else out) for x in leaves(one)]
    return []


def number(out):
    return sum((k + 1) * x.sum() for k, x in enumerate(leaves(out)) if x.is_floating_point())


def tracked(xs):
    return [x.requires_grad_() for x in xs]


def grads(out, xs, **how):
    return torch.autograd.grad(number(out), xs, allow_unused=True, **how)


def squared(found):
    return sum((g**2).sum() for g in found if g is not None)


def pushed(f, xs, which=None):
    with fw.dual_level():
        given = [fw.make_dual(x, cos(x)) if which in (None, k) else x for k, x in enumerate(xs)]
        return [tuple(fw.unpack_dual(x)) for x in leaves(f(*given))]


def _third(f, xs):
    found = [f(*tracked(xs))]
    for _ in range(3):
        found = grads([squared(found)], xs, create_graph=True)
    return found


def _kept(f, xs):
    out = f(*tracked(xs))
    return grads(out, xs, retain_graph=True), grads(out, xs)


def _freed(f, xs):
    out = f(*tracked(xs))
    return grads(out, xs), grads(out, xs)


def _hooked(f, xs):
    out, seen = f(*tracked(xs)), []
    for y in leaves(out):
        if y.requires_grad:
            y.register_hook(lambda g: (seen.append(g.clone()), 2 * g)[1])
    return grads(out, xs), seen


def _accumulated(f, xs):
    out = f(*tracked(xs))
    for y in leaves(out):
        if y.requires_grad:
            y.retain_grad()
    number(out).backward()
    return [y.grad for y in leaves(out)], [x.grad for x in xs]


def _over_reverse(f, xs):
    with fw.dual_level():
        found = grads(
            f(*[fw.make_dual(x, cos(x.detach())) for x in tracked(xs)]), xs, create_graph=True
        )
        return [g if g is None else tuple(fw.unpack_dual(g)) for g in found]


def _reverse_over(f, xs):
    with fw.dual_level():
        out = leaves(f(*[fw.make_dual(x, cos(x)) for x in tracked(xs)]))
        tangents = [t for y in out if (t := fw.unpack_dual(y).tangent) is not None]
        return grads(tangents, xs)


def _along_a_graph(f, xs):
    with fw.dual_level():
        ts = tracked([cos(x) for x in xs])
        out = leaves(f(*map(fw.make_dual, xs, ts)))
        tangents = [t for y in out if (t := fw.unpack_dual(y).tangent) is not None]
        return tangents, grads(tangents, ts)


def _one_tracked(f, xs):
    """The first is differentiated in reverse mode, the last in forward mode."""
    with fw.dual_level():
        first = xs[0].requires_grad_()
        out = leaves(f(*[first, fw.make_dual(xs[-1], cos(xs[-1]).detach())][-len(xs) :]))
        tangents = [t for y in out if (t := fw.unpack_dual(y).tangent) is not None]
        return grads(out, [first], retain_graph=True), grads(tangents, [first])


def _within(wrap):
    """The second derivative of f in another operator of gradtools, to the first argument."""

    def way(f, xs):
        inner = wrap(lambda x: number(f(x, *xs[1:])))
        return gt.hvp(inner, (xs[0],), (cos(xs[0]),))

    return way


def _batched(f, xs):
    y = leaves(f(*tracked(xs)))[0]
    cts = torch.stack([torch.ones_like(y), torch.full_like(y, 0.5)])
    return torch.autograd.grad(y, xs, cts, is_grads_batched=True, allow_unused=True)


def _quietly(f, xs):
    with torch.inference_mode():
        return f(*xs)


WAYS = {
    "value": lambda f, xs: f(*xs),
    "value of another class": lambda f, xs: f(*[x.as_subclass(Plain) for x in xs]),
    "value, one of another class": lambda f, xs: f(*tracked(xs)[:-1], xs[-1].as_subclass(Plain)),
    "value, a number": lambda f, xs: f(*tracked(xs)[:-1], 0.5),
    "value of a view": lambda f, xs: f(*[x.T for x in xs]),
    "value of one number": lambda f, xs: f(*[x[0, 0] for x in xs]),
    "value of bfloat16": lambda f, xs: f(*[x.bfloat16() for x in xs]),
    "value of complex numbers": lambda f, xs: f(*[torch.complex(x, x).conj() for x in xs]),
    "gradient at a view": lambda f, xs: grads(f(*[x.T for x in tracked(xs)]), xs),
    "value without gradients": lambda f, xs: _no_grad(lambda: f(*tracked(xs))),
    "inference": _quietly,
    "gradient": lambda f, xs: grads(f(*tracked(xs)), xs),
    "of what is no leaf": lambda f, xs: grads(f(*[1.5 * x for x in tracked(xs)]), xs),
    "the first": lambda f, xs: grads(f(xs[0].requires_grad_(), *xs[1:]), xs[:1]),
    "the last": lambda f, xs: grads(f(*xs[:-1], xs[-1].requires_grad_()), xs[-1:]),
    "second order": lambda f, xs: grads(
        [squared(grads(f(*tracked(xs)), xs, create_graph=True))], xs
    ),
    "third order": _third,
    "a kept graph": _kept,
    "a freed graph": _freed,
    "hooks": _hooked,
    "accumulated": _accumulated,
    "forward mode": pushed,
    "forward mode in one": lambda f, xs: pushed(f, xs, 0),
    "forward over reverse": _over_reverse,
    "reverse over forward": _reverse_over,
    "along a graph": _along_a_graph,
    "one of each mode": _one_tracked,
    "a batch of cotangents": _batched,
    "hvp": _within(lambda f: f),
    "hvp of checkpoint": _within(gt.checkpoint),
    "hvp of frozen": _within(gt.frozen),
    "jvp of grad": lambda f, xs: gt.jvp(
        gt.grad(lambda x: number(f(x, *xs[1:]))), (xs[0],), (cos(xs[0]),)
    ),
    "linearize": lambda f, xs: gt.linearize(lambda x: number(f(x, *xs[1:])), xs[0])[1](cos(xs[0])),
    "checkpoint": lambda f, xs: grads(checkpoint(f, *tracked(xs), use_reentrant=False), xs),
    "torch.func.hessian": lambda f, xs: torch.func.hessian(lambda x: number(f(x, *xs[1:])))(xs[0]),
    "torch.func.jvp": lambda f, xs: torch.func.jvp(f, tuple(xs), tuple(map(cos, xs))),
    "torch.func.vmap": lambda f, xs: torch.func.vmap(f)(*xs),
    "flags": lambda f, xs: [(y.requires_grad, y.is_leaf) for y in leaves(f(*tracked(xs)))],
}


class Plain(torch.Tensor):
    """A class of tensors of somebody else."""


def told(found):
    """What came out, in what compares."""
    if isinstance(found, torch.Tensor):
        return tuple(found.shape), found.dtype, found.detach().tolist(), found.requires_grad
    if isinstance(found, dict):
        return {name: told(x) for name, x in found.items()}
    return [told(x) for x in found] if isinstance(found, list | tuple) else found


def written(name):
    """The rules of this name, the one that is called last, and how many arguments it takes."""
    f, reverse, forward, count = RULES[name]
    rule = gt.custom_rule(f)
    if reverse:
        rule.defvjp(*reverse)
    if forward:
        rule.defjvp(forward)
    return [rule], count


def outcomes(name, way, short):
    """Of the same call three times, of which the first makes what the others use."""
    rules, count = HOST[name]() if name in HOST else written(name)
    rule, found = rules[-1], []
    for one in rules:
        if not short:
            one._direct = None
    torch.manual_seed(0)
    for _ in range(3):
        draw = torch.Generator().manual_seed(5)
        xs = [torch.rand(3, 3, dtype=F64, generator=draw) + 0.2 for _ in range(count)]
        try:
            found.append((told(WAYS[way](rule, xs)), torch.is_grad_enabled()))
        except Exception as error:  # every kind is compared
            found.append((type(error).__name__, str(error)[:60]))
        torch.set_grad_enabled(True)
    return found


FREE = ("identity, forward", "a view, forward", "gives its tangent")
# The short way's graph holds nothing that could be freed.
MORE = {(name, "a freed graph") for name in FREE}


@pytest.mark.whole_at("fwd writes its input")
@pytest.mark.parametrize("name", [*RULES, *HOST])
def test_the_short_way_gives_what_the_long_way_gives(name):
    for way in WAYS:
        if (name, way) not in MORE:
            assert outcomes(name, way, True) == outcomes(name, way, False), way


def test_the_short_way_is_taken():
    """Without it the other test says nothing."""
    rule = gt.custom_rule(SINE)
    rule.defvjp(*RULES["saves its input"][1])
    assert rule._direct is not None


DRAWN = {  # each gives f(x) = x m of one draw m of zeros and ones, and its derivative along ones, m
    "jvp": lambda f, x: gt.jvp(f, (x,), (x,)),
    "linearize": lambda f, x: (lambda y, push: (y, push(x)))(*gt.linearize(f, x)),
    "vjp": lambda f, x: (lambda y, pull: (y, pull(x)[0]))(*gt.vjp(f, x)),
    "torch.func.jvp": lambda f, x: torch.func.jvp(f, (x,), (x,)),
    "torch.func.vjp": lambda f, x: (lambda y, pull: (y, pull(x)[0]))(*torch.func.vjp(f, x)),
    "autograd": lambda f, x: (lambda z: (y := f(z), *torch.autograd.grad(y.sum(), z)))(
        x.requires_grad_()
    ),
    "forward mode along a graph": lambda f, x: _along_ones(f, x),
}


def _along_ones(f, x):
    with fw.dual_level():
        return tuple(fw.unpack_dual(f(fw.make_dual(x, torch.ones_like(x, requires_grad=True)))))


@pytest.mark.parametrize("short", [True, False])
@pytest.mark.parametrize("way", DRAWN)
def test_a_forward_rule_draws_what_its_function_drew(way, short):
    f, _, forward, _ = RULES["draws, forward"]
    rule = gt.custom_rule(f)
    rule.defjvp(forward)
    if not short:
        rule._direct = None
    torch.manual_seed(0)
    for _ in range(3):
        value, derivative = DRAWN[way](rule, torch.ones(64, dtype=F64))
        assert 0 < value.sum() < 64
        assert torch.equal(value, derivative)
