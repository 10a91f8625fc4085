"""Planted faults, each of which `checked` names: operator, argument, line, and what is wrong.

The faults come from programs that people wrote: autograd.Functions and rules whose derivative is
not that of their values, hooks, data that leave the framework, and wrong formulas of PyTorch. The
first tables are written once for both frameworks, the next ones for one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from gradtools.testing import DerivativeError, checked
from tests.support.scenarios import Table

X = np.random.default_rng(0).standard_normal((4, 3))
OPERATORS, FUNCTIONS, TORCH = (Table() for _ in range(3))


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


# --- every operator, with a rule whose derivative is wrong; in both frameworks


class Rules:
    """Wrong rules of one framework: reverse, forward, and of a kernel."""

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


for _name, (_operator, _argument, _run) in {
    "grad": ("grad", "argument 0", lambda gt, r, x: gt.grad(total(r.rule))(x)),
    "a forward rule": ("jvp", "argument 0", lambda gt, r, x: gt.jvp(r.forward, (x,), (x,))),
    "a kernel": ("grad", "argument 0", lambda gt, r, x: gt.grad(total(r.kernel))(x)),
    "vjp": ("vjp", "argument 0", lambda gt, r, x: gt.vjp(r.rule, x)[1](x)),
    "linearize": ("linearize", "argument 0", lambda gt, r, x: gt.linearize(r.rule, x)[1](x)),
    "jacobian in reverse": (
        "jacobian",
        "argument 0",
        lambda gt, r, x: gt.jacobian(r.rule, mode="reverse")(x[0]),
    ),
    "jacobian forward": (
        "jacobian",
        "argument 0",
        lambda gt, r, x: gt.jacobian(r.rule, mode="forward")(x[0]),
    ),
    "a wide jacobian": (
        "jacobian",
        "argument 0",
        lambda gt, r, x: gt.jacobian(lambda x: gt.xp.stack([r.rule(x)] * 4))(x[0]),
    ),
    "hvp": ("hvp", "argument 0", lambda gt, r, x: gt.hvp(total(r.rule), (x,), (x,))),
    "hessian": ("hessian", "argument 0", lambda gt, r, x: gt.hessian(total(r.rule))(x[0])),
    "an example of a batch": (
        "per_example_grad",
        "argument 0",
        lambda gt, r, x: gt.per_example_grad(lambda w, x: (r.rule(w) * x).sum())(x[0], x),
    ),
    "a player": (
        "minimax_value_and_grad",
        "argument 1",
        lambda gt, r, x: gt.minimax_value_and_grad(lambda a, b: (a * r.rule(b)).sum(), 0, 1)(x, x),
    ),
    "a mixed partial derivative": (
        "mixed_partial",
        "G(z)",
        lambda gt, r, x: gt.mixed_partial(lambda y, g: (y * r.rule(g)).sum(), gt.xp.exp, *x[:3]),
    ),
    "a mixed partial derivative, in G": (
        "mixed_partial",
        "z",
        lambda gt, r, x: gt.mixed_partial(lambda y, g: (y * gt.xp.sin(g)).sum(), r.forward, *x[:3]),
    ),
    "a chunk of a batch": (
        "microbatched_value_and_grad",
        "argument 0",
        lambda gt, r, x: gt.microbatched_value_and_grad(lambda w, x: (r.rule(w) * x).mean(), 2)(
            x[0], x
        ),
    ),
    "an inner derivative": (
        "grad",
        "argument 0",
        lambda gt, r, x: gt.grad(lambda x: (gt.grad(total(r.rule))(x) ** 2).sum())(x),
    ),
    "a leaf of a dictionary": (
        "grad",
        "argument 0['b']",
        lambda gt, r, x: gt.grad(lambda p: (p["a"] * r.rule(p["b"])).sum())({"a": x, "b": x + 1}),
    ),
}.items():
    OPERATORS.add(_name, (_operator, _argument))(_run)


@pytest.mark.parametrize("case", OPERATORS.cases())
def test_each_operator_names_a_wrong_rule(case, gt):
    run = lambda: case.program(gt, Rules(gt), gt.asarray(X))
    blamed = "The derivative of" if case.expected[0] in ("grad", "vjp", "jvp") else ""
    _check(run, *case.expected, blamed)


@pytest.mark.parametrize("part", ["rule", "chunked", "frozen", "checkpoint"])
def test_a_derivative_of_the_frameworks_own_names_the_part(part, gt, backend_name):
    rules, x = Rules(gt), gt.asarray(X)
    f = {
        "rule": rules.rule,
        "chunked": gt.chunked(rules.rule, 2),
        "frozen": gt.frozen(rules.rule),
        "checkpoint": gt.checkpoint(rules.rule),
    }[part]

    def run():
        if backend_name == "jax":
            import jax

            return jax.grad(total(f))(x)
        return f(x.requires_grad_()).sum().backward()

    _check(run, part, "leaf 0", "")


# --- functions with a wrong derivative, as people write them in either framework


def native(backend: str, forward: Any, backward: Any, name: str) -> Any:
    """A torch.autograd.Function or jax.custom_vjp of several arrays, which it saves."""
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


def _solved(xp: Any, x: Any, steps: int) -> list[Any]:
    """dy/dt = -y^2 to time 1, by Euler's method."""
    ys = [x]
    for _ in range(steps):
        ys.append(ys[-1] - 0.01 * ys[-1] ** 2)
    return ys


def _adjoint(xp: Any, g: Any, x: Any) -> Any:
    """Its adjoint, with too few steps."""
    for y in reversed(_solved(xp, x, 80)):
        g = g * (1 - 0.02 * y)
    return (g,)


def norm(xp: Any, x: Any) -> Any:
    return xp.sqrt((x * x).sum())


for _name, (_forward, _backward, _argument) in {
    "Factor": (lambda xp, x: xp.sin(x), lambda xp, g, x: (1.5 * g * xp.cos(x),), "argument 0"),
    "Exchanged": (lambda xp, a, b: a * b, lambda xp, g, a, b: (g * b, g * b), "argument 1"),
    "Rounded": (lambda xp, x: xp.round(x), lambda xp, g, x: (g,), "argument 0"),
    "Reversal": (lambda xp, x: x * 1, lambda xp, g, x: (-g,), "argument 0"),
    "LeakyBackward": (lambda xp, x: xp.clip(x, 0), lambda xp, g, x: (g,), "argument 0"),
    "NormWithoutProjection": (
        lambda xp, x: x / norm(xp, x),
        lambda xp, g, x: (g / norm(xp, x),),
        "argument 0",
    ),
    "Adjoint": (lambda xp, x: _solved(xp, x, 100)[-1], _adjoint, "argument 0"),
}.items():
    FUNCTIONS.add(_name, _argument)((_forward, _backward))


@pytest.mark.parametrize("case", FUNCTIONS.cases())
def test_a_function_with_a_wrong_derivative_is_named(case, gt, backend_name, request):
    name, xp = request.node.callspec.id.split("-", 1)[1], gt.xp
    forward, backward = (lambda *xs, f=f: f(xp, *xs) for f in case.program)
    f = native(backend_name, forward, backward, name)
    x = gt.asarray(np.abs(X) if name == "Adjoint" else X)
    args = (x, x + 1) if name == "Exchanged" else (x,)
    loss = lambda *xs: (f(*xs) * xs[0]).sum()
    kind = "Function " if backend_name == "torch" else "derivative of "
    run = lambda: gt.grad(loss, tuple(range(len(args))))(*args)
    _check(run, "grad", case.expected, f"{kind}{name}")


# --- PyTorch: hooks, and data that leave the framework


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


for _name, (_blamed, _f) in {
    "a hook that doubles": (
        "a hook (test_checked_faults.py:",
        lambda torch: _hooked(lambda g: 2 * g),
    ),
    "a hook that clips": ("a hook", lambda torch: _hooked(lambda g: g.clamp(-0.1, 0.1))),
    "a hook of a module": ("a backward hook", _module_hook),
    "data that left by float": (
        "data that leave PyTorch by float() (test_checked_faults.py:",
        lambda torch: lambda x: (x * 2).sum() * float((x**3).mean()),
    ),
    "data that left by item": (
        "by item()",
        lambda torch: lambda x: (x * 2).sum() * (x**3).mean().item(),
    ),
    "data that left by tolist": (
        "by tolist()",
        lambda torch: lambda x: (x * torch.tensor(x.tolist(), dtype=x.dtype)).sum(),
    ),
}.items():
    TORCH.add(_name, _blamed)(_f)


@pytest.mark.parametrize("case", TORCH.cases())
def test_a_hook_or_data_that_leave_pytorch_are_named(case):
    torch = pytest.importorskip("torch")
    import gradtools.torch as gt

    f = case.program(torch)
    _check(lambda: gt.grad(f)(torch.from_numpy(X)), "grad", "argument 0", case.expected)


def test_parameters_of_a_module_are_named():
    torch = pytest.importorskip("torch")
    import gradtools.torch as gt

    x, net = torch.from_numpy(X), torch.nn.Linear(3, 2, dtype=torch.float64)
    sine = native("torch", torch.sin, lambda g, x: (1.01 * g * x.cos(),), "Sine")
    run = lambda: gt.grad(lambda net: sine(net(x)).sum())(net)
    _check(run, "grad", "argument 0['weight'], argument 0['bias']", "Function Sine")
    run = lambda: gt.chunked(lambda x: sine(net(x)), 2)(x).sum().backward()
    _check(run, "chunked", "leaf 0, leaf 1", "Function Sine")


# --- PyTorch: what is lost at second order, and wrong formulas of its own


def _under_no_grad(torch: Any, g: Any, x: Any) -> Any:
    with torch.no_grad():
        return 3 * x**2 * g


LOSSY = {  # forward, backward of the saved argument
    "NoGrad": (lambda torch, x: x**3, _under_no_grad),
    "Detached": (lambda torch, x: x**3, lambda torch, g, x: 3 * x.detach() ** 2 * g),
    "ByNumpy": (
        lambda torch, x: torch.from_numpy(np.sin(x.detach().numpy())),
        lambda torch, g, x: g * torch.from_numpy(np.cos(x.detach().numpy())),
    ),
}


def _lossy(torch: Any, name: str) -> Any:
    forward, backward = (lambda *xs, f=f: f(torch, *xs) for f in LOSSY[name])
    made = native("torch", forward, lambda g, x: (backward(g, x),), name)
    return lambda x: (made(x) ** 2).sum()


def _twice(gt: Any, f: Any, x: Any) -> Any:
    return gt.grad(lambda x: gt.grad(f)(x).square().sum())(x)


@pytest.mark.parametrize("name", LOSSY)
def test_what_is_lost_at_second_order_is_named(name):
    torch = pytest.importorskip("torch")
    import gradtools.torch as gt

    f, x = _lossy(torch, name), torch.from_numpy(np.abs(X[0]))
    _check(lambda: _twice(gt, f, x), "grad", "argument 0", f"Function {name}")


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


@pytest.mark.parametrize("name", ["detaches", "solves without a graph"])
def test_a_hook_that_is_not_differentiated_is_named(name):
    torch = pytest.importorskip("torch")
    import gradtools.torch as gt

    f = _hooked(lambda g: g.detach() * 2) if name == "detaches" else _equilibrium(torch)
    _check(lambda: _twice(gt, f, torch.from_numpy(X[0])), "grad", "argument 0", "a hook")


FORMULAS = {  # wrong formulas of PyTorch: the operation, the operator, and the function
    "linalg.solve, torch#192540": ("grad", lambda torch, A: torch.linalg.solve(A, A @ A)),
    "logdet, torch#192540": ("grad", lambda torch, A: torch.logdet(A @ A.T)),
    "cholesky_inverse, torch#196682": ("jvp", lambda torch, A: torch.cholesky_inverse(A)),
}


@pytest.mark.parametrize("name", FORMULAS)
def test_a_wrong_formula_of_pytorch_is_named(name):
    torch = pytest.importorskip("torch")
    import gradtools.torch as gt

    (operator, f), operation = FORMULAS[name], name.partition(",")[0]
    A = torch.from_numpy(X[:3]) + 3 * torch.eye(3, dtype=torch.float64)
    A = torch.linalg.cholesky(A @ A.T) if operation == "cholesky_inverse" else A
    tangent = lambda A: gt.jvp(lambda A: f(torch, A), (A,), (torch.ones_like(A).tril(),))[1]
    if operator == "jvp":
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
