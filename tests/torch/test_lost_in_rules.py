"""A second derivative that an own rule's bwd cuts is refused by name, and no healthy rule is."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import gradtools.torch as gt
from gradtools.errors import LostDerivativeError

X = torch.linspace(0.5, 2.0, 4, dtype=torch.float64)
V = X.flip(0)
W = torch.linspace(-1.0, 1.0, 16, dtype=torch.float64).reshape(4, 4)


def rule(f, fwd, bwd, **options):
    made = gt.custom_rule(f, **options)
    made.defvjp(fwd, bwd)
    return made


def sine(bwd, **options):
    return rule(lambda x: x.sin(), lambda x: (x.sin(), x), bwd, **options)


def without_graph(bwd):
    return torch.no_grad()(bwd)


LOSSY = {
    "no_grad": lambda x, ct: (without_graph(lambda: x.cos() * ct)(),),
    "no_grad around all": without_graph(lambda x, ct: (x.cos() * ct,)),
    "detached result": lambda x, ct: ((x.cos() * ct).detach(),),
    "numpy": lambda x, ct: (torch.from_numpy(np.cos(x.detach().numpy()) * ct.detach().numpy()),),
}
LOSSES = {
    "squared": lambda f: lambda x: (f(x) ** 2).sum(),
    "alone": lambda f: lambda x: f(x).sum(),
    "beside another term": lambda f: lambda x: (f(x) ** 2).sum() + (x**3).sum(),
}


def native(loss, x):
    x = x.clone().requires_grad_()
    (g,) = torch.autograd.grad(loss(x), x, create_graph=True)
    if not g.requires_grad:  # a constant
        return torch.zeros_like(g)
    return torch.autograd.grad((g * V).sum(), x)[0]


SECOND = {
    "reverse over reverse": lambda loss, x: gt.hvp(loss, (x,), (V,), mode="reverse_over_reverse")[
        1
    ][0],
    "grad of grad": lambda loss, x: gt.grad(lambda x: (gt.grad(loss)(x) * V).sum())(x),
    "hessian": lambda loss, x: gt.hessian(loss)(x) @ V,
    "autograd": native,
    "torch.func": lambda loss, x: torch.func.grad(lambda x: (torch.func.grad(loss)(x) * V).sum())(
        x
    ),
    "vmap": lambda loss, x: gt.vmap(lambda x: gt.grad(lambda x: (gt.grad(loss)(x) * V).sum())(x))(
        x[None]
    )[0],
}


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("lossy", LOSSY)
def test_a_bwd_without_a_graph_is_refused_at_second_order_alone(lossy, loss):
    made = LOSSES[loss](sine(LOSSY[lossy]))
    true = LOSSES[loss](torch.sin)
    for gradient in (gt.grad, torch.func.grad):
        if lossy != "numpy" or gradient is gt.grad:
            torch.testing.assert_close(gradient(made)(X), gradient(true)(X))
    for name, second in SECOND.items():
        if lossy == "numpy" and name in ("torch.func", "vmap"):
            continue  # NumPy reads no tensor of functorch
        for _ in range(2):
            with pytest.raises(LostDerivativeError, match=r"rule '<lambda>'.*no graph"):
                raise AssertionError(f"{name}: {second(made, X)}")


def test_a_cotangent_that_is_detached_beside_a_residual_with_a_graph_is_refused():
    f = sine(lambda x, ct: (x.cos() * ct.detach(),))
    for name in ("autograd", "torch.func", "vmap"):
        torch.testing.assert_close(SECOND[name](LOSSES["alone"](f), X), -X.sin() * V)
        with pytest.raises(LostDerivativeError, match="records no graph"):
            SECOND[name](LOSSES["squared"](f), X)


@pytest.mark.parametrize("lossy", ["no_grad", "detached result"])
def test_so_is_one_in_compiled_code(lossy):
    loss = LOSSES["squared"](sine(LOSSY[lossy]))
    compiled = torch.compile(lambda x: SECOND["grad of grad"](loss, x), backend="aot_eager")
    with pytest.raises(Exception, match="records no graph"):
        compiled(X)


@pytest.mark.parametrize("lossy", ["no_grad", "detached result"])
def test_so_is_that_of_a_host_function(lossy):
    f = gt.host_function(np.sin)
    f.defvjp(lambda x: (f(x), x), LOSSY[lossy])
    for loss in LOSSES.values():
        torch.testing.assert_close(gt.grad(loss(f))(X), gt.grad(loss(torch.sin))(X))
        for mode in ("reverse_over_reverse", "forward_over_reverse"):
            with pytest.raises(LostDerivativeError, match="rule 'sin'"):
                gt.hvp(loss(f), (X,), (V,), mode=mode)


def test_the_gate_refuses_no_derivative_along_anything_else():
    f, w = sine(LOSSY["no_grad"]), torch.tensor(3.0, dtype=torch.float64, requires_grad=True)
    x = X.clone().requires_grad_()
    (g,) = torch.autograd.grad(f(x).sum(), x, create_graph=True)
    (dw,) = torch.autograd.grad((g * w).sum(), w, retain_graph=True)
    torch.testing.assert_close(dw, X.cos().sum())
    with pytest.raises(LostDerivativeError):
        torch.autograd.grad((g * w).sum(), x)
    # Along a cotangent that depends on another parameter alone.
    (g,) = torch.autograd.grad((w * f(x)).sum(), x, create_graph=True)
    with pytest.raises(LostDerivativeError):
        torch.autograd.grad(g.sum(), w)


def test_a_linear_map_without_a_graph_is_constant_in_its_residuals():
    times = rule(lambda x: 3 * x, lambda x: (3 * x, x), without_graph(lambda x, ct: (3 * ct,)))
    torch.testing.assert_close(gt.hessian(LOSSES["alone"](times))(X), torch.zeros_like(W))
    with pytest.raises(LostDerivativeError):
        gt.hessian(LOSSES["squared"](times))(X)


def test_a_tensor_that_fwd_saves_or_returns_is_left_as_it_is():
    table = W.clone()
    f = rule(lambda x: table @ x, lambda x: (table @ x, table), lambda w, ct: (w.T @ ct,))
    g = rule(
        lambda x: 0 * x + table[0], lambda x: (table[0] + 0 * x, None), lambda _, ct: (0 * ct,)
    )
    held = torch.ones(4, dtype=torch.float64)
    h = rule(lambda x: held, lambda x: (held, None), lambda _, ct: (0 * ct,))
    x = X.clone().requires_grad_()
    for made in (f, g, h):
        for _ in range(3):
            made(x).sum().backward()
            assert not (table.requires_grad or held.requires_grad)
            with torch.no_grad():
                made(x)


def test_check_never_keeps_what_the_author_wrote():
    f = sine(LOSSY["no_grad"], check="never")
    x = X.clone().requires_grad_()
    (g,) = torch.autograd.grad((f(x) ** 2).sum(), x, create_graph=True)
    assert not g.requires_grad


def test_a_backward_pass_that_only_keeps_its_graph_is_not_refused():
    f, x = sine(LOSSY["no_grad"]), X.clone().requires_grad_()
    (f(x) ** 2).sum().backward(create_graph=True)
    torch.testing.assert_close(x.grad.detach(), (2 * X).sin())
    x.grad = None


# --- healthy rules ---------------------------------------------------------------------------

Z = torch.zeros(4, dtype=torch.float64)


def masked(x, ct):
    with torch.no_grad():
        mask = (x > 1.25).to(x.dtype)
    return (ct * mask,)


def from_an_own_derivative(x, ct):
    with torch.enable_grad():
        y = x.detach().requires_grad_()
        (slope,) = torch.autograd.grad(y.sin().sum(), y)
    return (slope * ct,)


relu = lambda x: x.clamp_min(1.25)

# Rules, the same function of PyTorch's operations with the rule's own second derivative, and the
# arguments. Each is linear in its cotangent, and right as it is written.
HEALTHY = {
    "residuals": (sine(lambda x, ct: (x.cos() * ct,)), torch.sin),
    "zeros_like": (
        rule(lambda x: x.detach() * 0, lambda x: (x * 0, x), lambda x, ct: (torch.zeros_like(x),)),
        lambda x: x * 0,
    ),
    "None": (rule(lambda x: x * 0, lambda x: (x * 0, x), lambda x, ct: (None,)), lambda x: x * 0),
    "ct * 0": (
        rule(lambda x: x * 0, lambda x: (x * 0, x), lambda x, ct: (ct * 0,)),
        lambda x: x * 0,
    ),
    "a detached cotangent times zero": (
        rule(lambda x: x * 0, lambda x: (x * 0, x), lambda x, ct: (ct.detach() * 0,)),
        lambda x: x * 0,
    ),
    "a constant factor": (
        rule(lambda x: 3 * x, lambda x: (3 * x, None), lambda _, ct: (3 * ct,)),
        lambda x: 3 * x,
    ),
    "a constant factor, saving x": (
        rule(lambda x: 3 * x, lambda x: (3 * x, x), lambda x, ct: (3 * ct,)),
        lambda x: 3 * x,
    ),
    "a matrix": (
        rule(lambda x: W @ x, lambda x: (W @ x, W), lambda w, ct: (w.T @ ct,)),
        lambda x: W @ x,
    ),
    "a mask without a graph": (
        rule(relu, lambda x: (relu(x), x), masked),
        relu,
    ),
    "the cotangent itself": (
        rule(lambda x: x.clone(), lambda x: (x.clone(), None), lambda _, ct: (ct,)),
        lambda x: x.clone(),
    ),
    "a straight-through estimator": (
        rule(torch.round, lambda x: (x.round(), None), lambda _, ct: (ct,)),
        lambda x: x + (x.round() - x).detach(),
    ),
    "a detached factor": (
        sine(lambda x, ct: (x.detach().cos() * ct,)),
        lambda x: x.sin().detach() + x.detach().cos() * (x - x.detach()),
    ),
    "a factor from a derivative of its own": (
        sine(from_an_own_derivative),
        lambda x: x.sin().detach() + x.detach().cos() * (x - x.detach()),
    ),
    "an output": (
        rule(torch.exp, lambda x: (y := x.exp(), y), lambda y, ct: (y * ct,)),
        torch.exp,
    ),
    "an intermediate": (
        rule(
            torch.sinh,
            lambda x: (x.sinh(), (x.exp(), (-x).exp())),
            lambda e, ct: ((e[0] + e[1]) / 2 * ct,),
        ),
        torch.sinh,
    ),
    "another rule": (
        sine(lambda x, ct, cos=None: (COS(x) * ct,)),
        torch.sin,
    ),
    "itself": (rule(torch.exp, lambda x: (EXP(x), x), lambda x, ct: (EXP(x) * ct,)), torch.exp),
    "an index": (
        rule(
            lambda x: x[::2],
            lambda x: (x[::2], x),
            lambda x, ct: (torch.zeros_like(x).index_add(0, torch.tensor([0, 2]), ct),),
        ),
        lambda x: x[::2],
    ),
    "written in place": (
        rule(
            lambda x: x[:2] ** 2,
            lambda x: (x[:2] ** 2, x),
            lambda x, ct: (torch.cat([2 * x[:2] * ct, torch.zeros_like(x[2:])]),),
        ),
        lambda x: x[:2] ** 2,
    ),
    "a branch on the values": (
        sine(lambda x, ct: (x.cos() * ct if x.sum() > 0 else ct,)),
        torch.sin,
    ),
    "checked at each call": (
        rule(lambda x: 3 * x, lambda x: (3 * x, x), lambda x, ct: (3 * ct,), check="always"),
        lambda x: 3 * x,
    ),
}
UNSUPPORTED = {  # by PyTorch under its transforms
    "a branch on the values": ("vmap",),
    "a factor from a derivative of its own": ("vmap", "torch.func", "hessian"),
}
COS = rule(torch.cos, lambda x: (x.cos(), x), lambda x, ct: (-x.sin() * ct,))
EXP = HEALTHY["itself"][0]


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("name", HEALTHY)
def test_a_healthy_rule_has_its_second_derivative(name, loss):
    f, plain = HEALTHY[name]
    true = native(lambda x: LOSSES[loss](plain)(x) + 0 * (x**3).sum(), X)
    for way, second in SECOND.items():
        if way in UNSUPPORTED.get(name, ()):
            continue
        for _ in range(2):
            torch.testing.assert_close(second(LOSSES[loss](f), X), true, msg=way)
