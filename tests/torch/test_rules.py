"""Tests workarounds for upstream bugs in rules, and rules that contain derivatives."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
import torch.autograd.forward_ad as forward_ad

import gradtools.torch as gt
from gradtools.rules import Rule
from gradtools.torch.rules.installing import apply_rule
from tests.support.torch_functions import MappedCube

CUBE = Rule(
    "cube",
    lambda x: [x**3],
    tangent=lambda xs, dxs: [3 * xs[0] ** 2 * dxs[0]],
    cotangent=lambda xs, cts: [3 * xs[0] ** 2 * cts[0]],
)
FORWARD = Rule("cube", lambda x: [x**3], tangent=CUBE.tangent)
REVERSE = Rule("cube", lambda x: [x**3], cotangent=CUBE.cotangent)


def second_forward(f, x):
    one = torch.ones_like(x)
    inner = lambda x: torch.func.jvp(f, (x,), (one,))[1]
    return torch.func.jvp(inner, (x,), (one,))[1].item()


def test_nested_forward_mode_of_a_plain_function_is_still_wrong():
    """torch#197867: if this fails, `jvp` no longer needs its workaround for nested levels."""
    x = torch.tensor(2.0, dtype=torch.float64)
    assert second_forward(lambda x: x**3, x) == 12.0
    assert second_forward(MappedCube.apply, x) != 12.0
    for rule in (CUBE, FORWARD, REVERSE):
        assert second_forward(lambda x, rule=rule: apply_rule(rule, x)[0], x) == 12.0


def test_a_rule_is_not_dropped_by_compiled_torch_func():
    """torch#193279, torch#192985: without the rule, the compiled gradient would be positive."""
    x = torch.tensor(2.0)
    f = lambda x: gt.reverse_gradient(x, 0.5) ** 2
    torch._dynamo.reset()
    compiled = torch.compile(torch.func.grad(f), backend="aot_eager", fullgraph=True)
    assert compiled(x).item() == -2.0
    pushed = lambda x: torch.func.jvp(f, (x,), (torch.ones_like(x),))[1]
    assert torch.compile(pushed, backend="aot_eager", fullgraph=True)(x).item() == -2.0


def test_two_rules_in_one_compiled_function_are_not_mistaken_for_each_other():
    """Keys of rules are strings, because dynamo makes an integer symbolic when it changes."""
    torch._dynamo.reset()
    rules = [
        Rule(f"times {k}", lambda x, k=k: [k * x], tangent=lambda xs, dxs, k=k: [k * dxs[0]])
        for k in (2, 3, 5)
    ]
    x = torch.ones(2)
    for k, rule in zip((2, 3, 5), rules, strict=True):
        run = torch.compile(
            lambda x, rule=rule: apply_rule(rule, x)[0].sum(), backend="aot_eager", fullgraph=True
        )
        assert torch.func.grad(lambda x, rule=rule: apply_rule(rule, x)[0].sum())(x).tolist() == [
            k,
            k,
        ]
        assert run(x).item() == 2 * k


def _sine(kind):
    f = gt.custom_rule(torch.sin)
    if kind != "jvp":
        f.defvjp(lambda x: (x.sin(), x), lambda x, ct: (x.cos() * ct,))
    if kind != "vjp":
        f.defjvp(lambda p, t: (p[0].sin(), p[0].cos() * t[0]))
    return f


RULED = {
    "softmax": lambda x: torch.softmax(x, 0),
    "det": lambda x: torch.linalg.det(x.outer(x) + torch.eye(3, dtype=x.dtype)),
    "scale_gradient": lambda x: gt.scale_gradient(x.sin(), 2.0),
    "straight_through": gt.straight_through(torch.round, torch.sin),
    "frozen": gt.frozen(torch.sin),
    **{f"rule by {kind}": _sine(kind) for kind in ("vjp", "jvp", "both")},
}


@pytest.mark.parametrize("name", RULED)
def test_a_tangent_along_a_graph_keeps_it(name):
    """The gradient of <w, J v> with respect to v is J^T w, even after repeated calls."""
    f, x = RULED[name], torch.tensor([0.5, 1.5, 3.0], dtype=torch.float64)
    v = torch.tensor([1.0, -2.0, 0.5], dtype=torch.float64, requires_grad=True)
    for _ in range(3):
        y, dy = gt.jvp(f, (x,), (v,))
        w = torch.linspace(0.5, 2.0, y.numel(), dtype=torch.float64).reshape(y.shape)
        (found,) = torch.autograd.grad((w * dy).sum(), v)
        torch.testing.assert_close(found, gt.vjp(f, x)[1](w)[0])


@pytest.mark.parametrize("create_graph", [False, True])
@pytest.mark.parametrize("kind", ["vjp", "jvp", "both"])
def test_a_pullback_at_dual_numbers_keeps_their_tangents(kind, create_graph):
    x = torch.tensor([0.3, 0.7], dtype=torch.float64)
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(x.clone().requires_grad_(), x.exp())
        y = _sine(kind)(dual).sum()
        (g,) = torch.autograd.grad(y, dual, create_graph=create_graph)
        torch.testing.assert_close(forward_ad.unpack_dual(g).tangent, -x.sin() * x.exp())


def test_a_first_derivative_runs_fwd_once_whatever_it_saves():
    """A residual that is not a tensor may depend on x, so second derivatives run fwd again."""
    runs = []

    def fwd(x):
        runs.append(1)
        return x**3, SimpleNamespace(x=x)

    cube = gt.custom_rule(lambda x: x**3)
    cube.defvjp(fwd, lambda saved, ct: (3 * saved.x**2 * ct,))
    gt.grad(lambda x: cube(x).sum())(torch.ones(2))
    assert len(runs) == 1


# --- a bwd that calls gradtools' derivatives, as in an implicit layer


def _layer(x, w):
    return torch.tanh(x @ w) * x


def _by_jacobian(saved, ct):
    by_x, by_w = gt.jacobian(_layer, (0, 1))(*saved)
    return ct @ by_x, torch.einsum("i,ijk->jk", ct, by_w)


_BACKWARDS = {
    "vjp": lambda saved, ct: tuple(gt.vjp(_layer, *saved)[1](ct)),
    "grad": lambda saved, ct: gt.grad(lambda *a: (_layer(*a) * ct).sum(), (0, 1))(*saved),
    "jacobian": _by_jacobian,
    "vjp of a checkpoint": lambda saved, ct: tuple(gt.vjp(gt.checkpoint(_layer), *saved)[1](ct)),
}
_SECOND_ORDER = {
    "grad of grad": lambda f, x: gt.grad(lambda x: gt.grad(f)(x).sin().sum())(x),
    "hessian": lambda f, x: gt.hessian(f)(x),
    "reverse jacobian of grad": lambda f, x: gt.jacobian(gt.grad(f), mode="reverse")(x),
    "jvp of grad of grad": lambda f, x: gt.jvp(
        gt.grad(lambda x: gt.grad(f)(x).sin().sum()), (x,), (x.cos(),)
    )[1],
    "third order": lambda f, x: gt.grad(lambda x: gt.hessian(f)(x).sin().sum())(x),
    "vmap of hessian": lambda f, x: gt.vmap(gt.hessian(f))(torch.stack([x, 2 * x])),
}


@pytest.mark.sampled(24, 48)
@pytest.mark.parametrize("bwd", _BACKWARDS.values(), ids=_BACKWARDS)
@pytest.mark.parametrize("derivative", _SECOND_ORDER.values(), ids=_SECOND_ORDER)
@pytest.mark.parametrize("which", [0, 1])
def test_a_bwd_that_takes_a_derivative_is_differentiated_in_one_argument(bwd, derivative, which):
    rule = gt.custom_rule(_layer)
    rule.defvjp(lambda x, w: (_layer(x, w), (x, w)), bwd)
    generator = torch.Generator().manual_seed(0)
    args = [torch.randn(shape, dtype=torch.float64, generator=generator) for shape in (3, (3, 3))]

    def of(layer):
        def f(v):
            return layer(*[v if i == which else a for i, a in enumerate(args)]).sin().sum()

        return f

    found = derivative(of(rule), args[which])
    torch.testing.assert_close(found, derivative(of(_layer), args[which]), rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("count", [1, 2])
def test_a_forward_rule_over_an_inner_derivative_is_differentiated(count):
    f = lambda x: torch.sin(x).sum() * x[0]
    own = lambda x: (gt.grad(f)(x), x * 2)[: count - 2 or None]
    rule = gt.custom_rule(own)
    rule.defjvp(lambda primals, tangents: gt.jvp(own, primals, tangents))
    x = torch.tensor([0.3, 0.5, 0.9], dtype=torch.float64)
    loss = lambda g: lambda x: sum((y**2).sum() for y in g(x))
    for derivative in (lambda f: gt.grad(f)(x), lambda f: gt.hvp(f, (x,), (x,))[1][0]):
        torch.testing.assert_close(derivative(loss(rule)), derivative(loss(own)))
