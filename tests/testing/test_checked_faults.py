"""Tests that `checked` reports the operator, argument, line and cause of wrong derivatives.

The faults come from public programs: autograd.Functions and rules with a wrong derivative, hooks,
data that leaves the framework, and wrong formulas of PyTorch. The first tables contain programs for
both frameworks, and the later tables contain programs for one framework.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from gradtools.testing import DerivativeError, checked

X = np.random.default_rng(0).standard_normal((4, 3))


def _check(run: Callable[[], Any], operator: str, argument: str, blamed: str) -> None:
    with pytest.raises(DerivativeError) as caught, checked():
        run()
    text = str(caught.value)
    assert text.startswith(f"{operator}: the derivative with respect to {argument} ")
    assert "differentiated at test_checked_faults.py:" in text
    assert "central differences" in text
    assert blamed in text


def total(f: Any) -> Any:
    return lambda x: f(x).sum()


@pytest.fixture
def torch_and_gt():
    torch = pytest.importorskip("torch")
    import gradtools.torch as gt

    return torch, gt


# --- every operator with a wrong custom rule, in both frameworks


class Rules:
    """A wrong reverse rule, a wrong forward rule and a host kernel with a wrong rule."""

    def __init__(self, gt: Any) -> None:
        xp = gt.xp
        self.rule = gt.custom_rule(xp.sin)
        self.rule.__name__ = "rule"
        self.rule.defvjp(lambda x: (xp.sin(x), x), lambda x, ct: (1.01 * ct * xp.cos(x),))
        self.forward = gt.custom_rule(xp.exp)
        self.forward.__name__ = "forward_rule"
        self.forward.defjvp(lambda xs, ts: (xp.exp(xs[0]), 0.9 * xp.exp(xs[0]) * ts[0]))
        self.kernel = gt.host_function(np.sin)
        self.kernel.defvjp(lambda x: (self.kernel(x), x), lambda x, ct: (ct * xp.sin(x),))


OPERATORS = {  # keys start with the operator and name the argument after "at"
    "grad": lambda gt, r, x: gt.grad(total(r.rule))(x),
    "jvp": lambda gt, r, x: gt.jvp(r.forward, (x,), (x,)),
    "grad of a kernel": lambda gt, r, x: gt.grad(total(r.kernel))(x),
    "vjp": lambda gt, r, x: gt.vjp(r.rule, x)[1](x),
    "linearize": lambda gt, r, x: gt.linearize(r.rule, x)[1](x),
    "jacobian in reverse": lambda gt, r, x: gt.jacobian(r.rule, mode="reverse")(x[0]),
    "jacobian forward": lambda gt, r, x: gt.jacobian(r.rule, mode="forward")(x[0]),
    "jacobian (wide)": lambda gt, r, x: gt.jacobian(lambda x: gt.xp.stack([r.rule(x)] * 4))(x[0]),
    "hvp": lambda gt, r, x: gt.hvp(total(r.rule), (x,), (x,)),
    "hessian": lambda gt, r, x: gt.hessian(total(r.rule))(x[0]),
    "per_example_grad": lambda gt, r, x: gt.per_example_grad(lambda w, x: (r.rule(w) * x).sum())(
        x[0], x
    ),
    "minimax_value_and_grad at argument 1": lambda gt, r, x: gt.minimax_value_and_grad(
        lambda a, b: (a * r.rule(b)).sum(), 0, 1
    )(x, x),
    "mixed_partial at G(z)": lambda gt, r, x: gt.mixed_partial(
        lambda y, g: (y * r.rule(g)).sum(), gt.xp.exp, *x[:3]
    ),
    "mixed_partial at z": lambda gt, r, x: gt.mixed_partial(
        lambda y, g: (y * gt.xp.sin(g)).sum(), r.forward, *x[:3]
    ),
    "microbatched_value_and_grad": lambda gt, r, x: gt.microbatched_value_and_grad(
        lambda w, x: (r.rule(w) * x).mean(), 2
    )(x[0], x),
    "grad of a derivative": lambda gt, r, x: gt.grad(
        lambda x: (gt.grad(total(r.rule))(x) ** 2).sum()
    )(x),
    "grad at argument 0['b']": lambda gt, r, x: gt.grad(lambda p: (p["a"] * r.rule(p["b"])).sum())(
        {"a": x, "b": x + 1}
    ),
}


@pytest.mark.parametrize("case", OPERATORS)
def test_each_operator_names_a_wrong_rule(case, gt):
    operator, argument = case.split()[0], case.partition(" at ")[2] or "argument 0"
    blamed = "The derivative of" if operator in ("grad", "vjp", "jvp") else ""
    _check(lambda: OPERATORS[case](gt, Rules(gt), gt.asarray(X)), operator, argument, blamed)


@pytest.mark.parametrize("part", ["rule", "chunked", "frozen", "checkpoint"])
def test_a_derivative_of_the_frameworks_own_names_the_part(part, gt, backend_name):
    rule, x = Rules(gt).rule, gt.asarray(X)
    f = gt.chunked(rule, 2) if part == "chunked" else getattr(gt, part, lambda f: f)(rule)

    def run():
        if backend_name == "jax":
            import jax

            return jax.grad(total(f))(x)
        return f(x.requires_grad_()).sum().backward()

    _check(run, part, "leaf 0", "")


# --- functions with a wrong derivative, as written in either framework


def native(backend: str, forward: Any, backward: Any, name: str) -> Any:
    """Return a torch.autograd.Function or a jax.custom_vjp function that saves its arguments."""
    if backend == "jax":
        import jax

        primal = lambda *xs: forward(*xs)
        primal.__name__ = name
        made = jax.custom_vjp(primal)
        made.defvjp(lambda *xs: (forward(*xs), xs), lambda xs, g: tuple(backward(g, *xs)))
        return made
    import torch

    class Made(torch.autograd.Function):
        @staticmethod
        def forward(ctx, *xs):
            ctx.save_for_backward(*xs)
            return forward(*xs)

        @staticmethod
        def backward(ctx, g):
            return tuple(backward(g, *ctx.saved_tensors))

    Made.__name__ = name
    return Made.apply


def _solved(x: Any, steps: int) -> list[Any]:
    """Solve dy/dt = -y^2 with `steps` Euler steps of length 0.01; return all states."""
    ys = [x]
    for _ in range(steps):
        ys.append(ys[-1] - 0.01 * ys[-1] ** 2)
    return ys


def _adjoint(xp: Any, g: Any, x: Any) -> Any:
    """Return the gradient, computed by the adjoint method with too few steps."""
    for y in reversed(_solved(x, 80)):
        g = g * (1 - 0.02 * y)
    return (g,)


def norm(xp: Any, x: Any) -> Any:
    return xp.sqrt((x * x).sum())


FUNCTIONS = {  # Each entry contains a forward function and a backward function.
    "Factor": (lambda xp, x: xp.sin(x), lambda xp, g, x: (1.5 * g * xp.cos(x),)),
    "Exchanged": (lambda xp, a, b: a * b, lambda xp, g, a, b: (g * b, g * b)),
    "Rounded": (lambda xp, x: xp.round(x), lambda xp, g, x: (g,)),
    "Reversal": (lambda xp, x: x * 1, lambda xp, g, x: (-g,)),
    "LeakyBackward": (lambda xp, x: xp.clip(x, 0), lambda xp, g, x: (g,)),
    "Unprojected": (lambda xp, x: x / norm(xp, x), lambda xp, g, x: (g / norm(xp, x),)),
    "Adjoint": (lambda xp, x: _solved(x, 100)[-1], _adjoint),
    "Squared": (lambda xp, x, stopped: stopped**2, lambda xp, g, x, s: (3 * x * g, 0 * s)),
}


@pytest.mark.slow_at(("jax", "Adjoint"))
@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_function_with_a_wrong_derivative_is_named(name, gt, backend_name):
    forward, backward = (lambda *xs, f=f: f(gt.xp, *xs) for f in FUNCTIONS[name])
    f = made = native(backend_name, forward, backward, name)
    if name == "Squared":
        f = lambda x: made(x, gt.stop_gradient(x))
    x = gt.asarray(np.abs(X) if name == "Adjoint" else X)
    args, argument = ((x, x + 1), "argument 1") if name == "Exchanged" else ((x,), "argument 0")
    loss = lambda *xs: (f(*xs) * xs[0]).sum()
    kind = "Function " if backend_name == "torch" else "derivative of "
    run = lambda: gt.grad(loss, tuple(range(len(args))))(*args)
    _check(run, "grad", argument, f"{kind}{name}")


# --- PyTorch: hooks, and data that leaves the framework


def _hooked(hook: Any) -> Any:
    def f(x):
        y = x * x
        y.register_hook(hook)
        return (y**2).sum()

    return f


def _module_hook(torch: Any) -> Any:
    net = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Tanh()).double()
    net.register_full_backward_hook(lambda m, gi, go: (gi[0] * 2,))
    return lambda x: net(x).square().sum()


TORCH = {  # the keys are parts of the error messages
    "a hook (test_checked_faults.py:": lambda torch: _hooked(lambda g: 2 * g),
    "a hook": lambda torch: _hooked(lambda g: g.clamp(-0.1, 0.1)),
    "a backward hook": _module_hook,
    "the value that leaves PyTorch via float() (test_checked_faults.py:": lambda torch: (
        lambda x: (x * 2).sum() * float((x**3).mean())
    ),
    "via item()": lambda torch: lambda x: (x * 2).sum() * (x**3).mean().item(),
    "torch.autograd.grad without create_graph=True (test_checked_faults.py:": lambda torch: (
        lambda x: x.sum() + torch.autograd.grad((x**3).sum(), x)[0].sum()
    ),
    "via tolist()": lambda torch: lambda x: (x * torch.tensor(x.tolist(), dtype=x.dtype)).sum(),
}


@pytest.mark.parametrize("blamed", TORCH)
def test_a_hook_or_data_that_leave_pytorch_are_named(blamed, torch_and_gt):
    torch, gt = torch_and_gt
    f = TORCH[blamed](torch)
    _check(lambda: gt.grad(f)(torch.from_numpy(X)), "grad", "argument 0", blamed)


def test_parameters_of_a_module_are_named(torch_and_gt):
    torch, gt = torch_and_gt
    x, net = torch.from_numpy(X), torch.nn.Linear(3, 2, dtype=torch.float64)
    sine = native("torch", torch.sin, lambda g, x: (1.01 * g * x.cos(),), "Sine")
    run = lambda: gt.grad(lambda net: sine(net(x)).sum())(net)
    _check(run, "grad", "argument 0['weight'], argument 0['bias']", "Function Sine")
    run = lambda: gt.chunked(lambda x: sine(net(x)), 2)(x).sum().backward()
    _check(run, "chunked", "leaf 0, leaf 1", "Function Sine")


def test_a_function_is_named_beside_logged_values(torch_and_gt):
    torch, gt = torch_and_gt
    x, log = torch.from_numpy(X), []
    sine = native("torch", torch.sin, lambda g, x: (1.01 * g * x.cos(),), "Sine")

    def loss(x):
        log.append(x.norm().item())
        (slope,) = torch.autograd.grad((x**3).sum(), x)
        log.append(slope.norm())
        return sine(x).sum()

    _check(
        lambda: gt.grad(loss)(x), "grad", "argument 0", "derivative of the autograd.Function Sine"
    )


@pytest.mark.parametrize("seed", range(3))
def test_a_function_in_a_network_of_float32_is_named(seed, torch_and_gt):
    torch, gt = torch_and_gt
    torch.manual_seed(seed)
    x = torch.randn(8, 6)
    net = torch.nn.Sequential(torch.nn.Linear(6, 16), torch.nn.ReLU(), torch.nn.Linear(16, 3))
    rule = lambda g, x: (0.5 * g * (1 - x.tanh() ** 2),)
    part = native("torch", torch.tanh, rule, "Part")
    run = lambda: gt.grad(lambda x: part(net(x)).square().mean())(x)
    _check(run, "grad", "argument 0", "derivative of the autograd.Function Part")


def test_a_hook_of_a_parameter_is_named(torch_and_gt):
    torch, gt = torch_and_gt
    x, net = torch.from_numpy(X), torch.nn.Linear(3, 2, dtype=torch.float64)
    net.bias.register_hook(lambda g: g / 2)
    run = lambda: gt.grad(lambda net: net(x).square().sum())(net)
    _check(run, "grad", "argument 0['bias']", "A parameter has a hook (test_checked_faults.py:")


# --- PyTorch: lost second derivatives and wrong formulas of PyTorch itself


def _under_no_grad(torch: Any, g: Any, x: Any) -> Any:
    with torch.no_grad():
        return 3 * x**2 * g


def _equilibrium(torch: Any) -> Any:
    matrix = torch.from_numpy(X[:3])

    def loss(x):
        cell = lambda z: torch.tanh(0.3 * matrix @ z + x)
        with torch.no_grad():
            z = torch.zeros_like(x)
            for _ in range(60):
                z = cell(z)
        z = cell(z)
        z0 = z.detach().clone().requires_grad_()
        f0 = cell(z0)

        def solve(g):
            v = g
            for _ in range(60):
                v = torch.autograd.grad(f0, z0, v, retain_graph=True)[0] + g
            return v

        z.register_hook(solve)
        return z.square().sum()

    return loss


def _lossy(forward: Any, backward: Any) -> Any:
    def made(torch: Any, name: str) -> Any:
        back = lambda g, x: (backward(torch, g, x),)
        f = native("torch", lambda x: forward(torch, x), back, name)
        return lambda x: (f(x) ** 2).sum()

    return made


LOST = {  # keys are the cause in the error: the name of a Function, or a hook
    "NoGrad": _lossy(lambda torch, x: x**3, _under_no_grad),
    "Detached": _lossy(lambda torch, x: x**3, lambda torch, g, x: 3 * x.detach() ** 2 * g),
    "ByNumpy": _lossy(
        lambda torch, x: torch.from_numpy(np.sin(x.detach().numpy())),
        lambda torch, g, x: g * torch.from_numpy(np.cos(x.detach().numpy())),
    ),
    "a hook that detaches": lambda torch, name: _hooked(lambda g: g.detach() * 2),
    "a hook that solves without a graph": lambda torch, name: _equilibrium(torch),
}


@pytest.mark.slow_at("a hook that solves without a graph")
@pytest.mark.parametrize("name", LOST)
def test_what_is_lost_at_second_order_is_named(name, torch_and_gt):
    torch, gt = torch_and_gt
    f, x = LOST[name](torch, name), torch.from_numpy(X[0] if "hook" in name else np.abs(X[0]))
    twice = lambda: gt.grad(lambda x: gt.grad(f)(x).square().sum())(x)
    _check(twice, "grad", "argument 0", "a hook" if "hook" in name else f"Function {name}")


FORMULAS = {  # matrix functions with a wrong derivative in PyTorch
    "linalg.solve, torch#192540": lambda torch, A: torch.linalg.solve(A, A @ A),
    "logdet, torch#192540": lambda torch, A: torch.logdet(A @ A.T),
    "cholesky_inverse, torch#196682": lambda torch, A: torch.cholesky_inverse(A),
}


@pytest.mark.parametrize("name", FORMULAS)
def test_a_wrong_formula_of_pytorch_is_named(name, torch_and_gt):
    torch, gt = torch_and_gt
    operation = name.partition(",")[0]
    A = torch.from_numpy(X[:3]) + 3 * torch.eye(3, dtype=torch.float64)
    A = torch.linalg.cholesky(A @ A.T) if operation == "cholesky_inverse" else A
    f = lambda A: FORMULAS[name](torch, A)
    tangent = lambda A: gt.jvp(f, (A,), (torch.ones_like(A).tril(),))[1]
    if operation == "cholesky_inverse":
        _check(lambda: tangent(A), "jvp", "argument 0", operation)
    else:
        run = lambda: gt.grad(lambda A: tangent(A).square().sum())(A)
        _check(run, "grad", "argument 0", f"reverse-over-forward derivative of {operation}")


# --- JAX's transformations


@pytest.mark.parametrize("inside", ["jit", "scan", "vmap"])
def test_a_fault_inside_of_a_transformation_of_jax_is_named(inside):
    jax = pytest.importorskip("jax")
    import gradtools.jax as gt

    jnp = jax.numpy
    sine = native("jax", jnp.sin, lambda g, x: (1.01 * g * jnp.cos(x),), "sine")
    f = {
        "jit": total(jax.jit(sine)),
        "scan": lambda x: jax.lax.scan(lambda c, x: (c + sine(x).sum(), None), 0.0, x)[0],
        "vmap": total(jax.vmap(sine)),
    }[inside]
    blamed = "derivative of scan" if inside == "scan" else ""
    _check(lambda: gt.grad(f)(jnp.asarray(X)), "grad", "argument 0", blamed)
