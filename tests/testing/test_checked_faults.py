"""Planted faults, each of which `checked` names: operator, argument, line, and what is wrong.

The faults come from programs that people wrote: autograd.Functions and rules whose derivative is
not that of their values, hooks, data that leave the framework, and wrong formulas of PyTorch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from gradtools.testing import DerivativeError, checked


@dataclass(frozen=True)
class Fault:
    """A program, and what the error says: the operator, the argument, and what is wrong."""

    name: str
    run: Callable[[], Any]
    operator: str
    argument: str = "argument 0"
    blamed: str = ""

    def __str__(self) -> str:
        return self.name


def _check(fault: Fault) -> None:
    with pytest.raises(DerivativeError) as caught, checked():
        fault.run()
    text = str(caught.value)
    assert text.startswith(f"{fault.operator}: the derivative with respect to {fault.argument} ")
    assert "differentiated at test_checked_faults.py:" in text
    assert "central differences" in text
    assert fault.blamed in text


# --- PyTorch -------------------------------------------------------------------------------------


def _torch_faults() -> list[Fault]:
    torch = pytest.importorskip("torch")
    import gradtools.torch as gt

    torch.manual_seed(0)
    x = torch.randn(4, 3, dtype=torch.float64)
    tracked = x.clone().requires_grad_()
    net = torch.nn.Linear(3, 2, dtype=torch.float64)
    net_of_two = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Tanh()).double()

    def function(forward: Any, backward: Any, name: str, jvp: Any = None) -> Any:
        """An autograd.Function that saves its argument."""

        class Made(torch.autograd.Function):
            @staticmethod
            def forward(x):
                return forward(x)

            @staticmethod
            def setup_context(ctx, inputs, output):
                ctx.save_for_backward(*inputs)
                ctx.save_for_forward(*inputs)

            @staticmethod
            def backward(ctx, g):
                return backward(ctx.saved_tensors[0], g)

        if jvp is not None:
            Made.jvp = staticmethod(lambda ctx, t: jvp(ctx.saved_tensors[0], t))
        Made.__name__ = name
        return Made.apply

    sin = function(torch.sin, lambda x, g: 1.01 * g * x.cos(), "Sine")
    cube = function(lambda x: x**3, lambda x, g: 3 * x**2 * g, "Cube", lambda x, t: 2 * x**2 * t)
    rounded = function(torch.round, lambda x, g: g, "Rounded")
    reversal = function(lambda x: x.view_as(x), lambda x, g: -g, "Reversal")
    relu = function(torch.relu, lambda x, g: g, "LeakyBackward")
    norm = function(lambda x: x / x.norm(), lambda x, g: g / x.norm(), "NormWithoutProjection")

    class Product(torch.autograd.Function):
        @staticmethod
        def forward(ctx, a, b):
            ctx.save_for_backward(a, b)
            return a * b

        @staticmethod
        def backward(ctx, g):
            _, b = ctx.saved_tensors
            return g * b, g * b

    class Adjoint(torch.autograd.Function):
        """dy/dt = -y^2 to time 1, whose adjoint is solved with a step too few."""

        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            for _ in range(100):
                x = x - 0.01 * x * x
            return x

        @staticmethod
        def backward(ctx, g):
            (x,) = ctx.saved_tensors
            ys = [x]
            for _ in range(98):
                ys.append(ys[-1] - 0.01 * ys[-1] ** 2)
            for y in reversed(ys):
                g = g * (1 - 0.02 * y)
            return g

    @gt.custom_rule
    def rule(x):
        return torch.sin(x)

    rule.defvjp(lambda x: (torch.sin(x), x), lambda x, ct: (1.01 * ct * x.cos(),))

    @gt.custom_rule
    def forward_rule(x):
        return x.exp()

    forward_rule.defjvp(lambda xs, ts: (xs[0].exp(), 0.9 * xs[0].exp() * ts[0]))
    kernel = gt.host_function(np.sin)
    kernel.defvjp(lambda x: (kernel(x), x), lambda x, ct: (ct * torch.sin(x),))

    @torch.library.custom_op(
        "gradtools_checked::square", mutates_args=(), schema="(Tensor x) -> Tensor"
    )
    def square(x):
        return x * x

    square.register_autograd(
        lambda ctx, g: g * ctx.saved_tensors[0],
        setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
    )

    def hooked(hook: Any) -> Any:
        def f(x):
            y = x * x
            y.register_hook(hook)
            return (y**2).sum()

        return f

    def module_hook(x):
        handle = net_of_two.register_full_backward_hook(lambda m, gi, go: (gi[0] * 2,))
        try:
            return net_of_two(x).square().sum()
        finally:
            handle.remove()

    total = lambda f: lambda x: f(x).sum()
    return [
        Fault("a factor", lambda: gt.grad(total(sin))(x), "grad", blamed="Function Sine"),
        Fault(
            "a leaf of a dictionary",
            lambda: gt.grad(lambda p: (p["a"] * sin(p["b"])).sum())({"a": x, "b": x + 1}),
            "grad",
            "argument 0['b']",
            "Function Sine",
        ),
        Fault(
            "a parameter of a module",
            lambda: gt.grad(lambda net: sin(net(x)).sum())(net),
            "grad",
            "argument 0['weight'], argument 0['bias']",
            "Function Sine",
        ),
        Fault(
            "cotangents of two arguments exchanged",
            lambda: gt.grad(lambda a, b: Product.apply(a, b).sum(), argnums=(0, 1))(x, x + 1),
            "grad",
            "argument 1",
            "Function Product",
        ),
        Fault(
            "a straight-through estimator by hand",
            lambda: gt.grad(lambda x: (rounded(x) ** 2).sum())(x),
            "grad",
            blamed="Function Rounded",
        ),
        Fault(
            "a reversal by hand",
            lambda: gt.grad(lambda x: (reversal(x) ** 2).sum())(x),
            "grad",
            blamed="Function Reversal",
        ),
        Fault(
            "a ReLU that passes all cotangents",
            lambda: gt.grad(lambda x: (relu(x) * x).sum())(x),
            "grad",
            blamed="Function LeakyBackward",
        ),
        Fault(
            "a normalization without its projection",
            lambda: gt.grad(lambda x: (norm(x) * x.sin()).sum())(x),
            "grad",
            blamed="Function NormWithoutProjection",
        ),
        Fault(
            "an adjoint with a step too few",
            lambda: gt.grad(total(Adjoint.apply))(x.abs()),
            "grad",
            blamed="Function Adjoint",
        ),
        Fault(
            "a custom operator",
            lambda: gt.grad(lambda x: square(x).sum())(x),
            "grad",
            blamed="square",
        ),
        Fault(
            "a hook that doubles",
            lambda: gt.grad(hooked(lambda g: 2 * g))(x),
            "grad",
            blamed="a hook (test_checked_faults.py:",
        ),
        Fault(
            "a hook that clips",
            lambda: gt.grad(hooked(lambda g: g.clamp(-0.1, 0.1)))(x),
            "grad",
            blamed="a hook",
        ),
        Fault(
            "a hook of a module", lambda: gt.grad(module_hook)(x), "grad", blamed="a backward hook"
        ),
        Fault(
            "data that left by float",
            lambda: gt.grad(lambda x: (x * 2).sum() * float((x**3).mean()))(x),
            "grad",
            blamed="data that leave PyTorch by float() (test_checked_faults.py:",
        ),
        Fault(
            "data that left by item",
            lambda: gt.grad(lambda x: (x / x.norm().item()).pow(3).sum())(x),
            "grad",
            blamed="by item()",
        ),
        Fault(
            "data that left by tolist",
            lambda: gt.grad(lambda x: (x * torch.tensor(x.tolist(), dtype=x.dtype)).sum())(x),
            "grad",
            blamed="by tolist()",
        ),
        Fault("a rule", lambda: gt.grad(total(rule))(x), "grad", blamed="the rule rule"),
        Fault(
            "a forward rule",
            lambda: gt.jvp(forward_rule, (x,), (x,)),
            "jvp",
            blamed="the rule forward_rule",
        ),
        Fault("a kernel", lambda: gt.grad(total(kernel))(x), "grad", blamed="the rule sin"),
        Fault("vjp", lambda: gt.vjp(rule, x)[1](x), "vjp", blamed="the rule rule"),
        Fault("jvp", lambda: gt.jvp(cube, (x,), (x,)), "jvp", blamed="Function Cube"),
        Fault("linearize", lambda: gt.linearize(sin, x)[1](x), "linearize"),
        Fault("jacobian in reverse", lambda: gt.jacobian(sin, mode="reverse")(x[0]), "jacobian"),
        Fault("jacobian forward", lambda: gt.jacobian(rule, mode="forward")(x[0]), "jacobian"),
        Fault(
            "jacobian of a wide function",
            lambda: gt.jacobian(lambda x: torch.stack([rule(x)] * 4))(x[0]),
            "jacobian",
        ),
        Fault("hvp", lambda: gt.hvp(total(rule), (x,), (x,)), "hvp", blamed="the rule rule"),
        Fault("hessian", lambda: gt.hessian(total(rule))(x[0]), "hessian", blamed="the rule rule"),
        Fault(
            "an example of a batch",
            lambda: gt.per_example_grad(lambda w, x: (rule(w) * x).sum())(x[0], x),
            "per_example_grad",
        ),
        Fault(
            "an example of a loop",
            lambda: gt.per_example_grad(lambda w, x: (sin(w) * x).sum(), chunk_size=1)(x[0], x),
            "per_example_grad",
        ),
        Fault(
            "a player",
            lambda: gt.minimax_value_and_grad(lambda a, b: (a * rule(b)).sum(), 0, 1)(x, x),
            "minimax_value_and_grad",
            "argument 1",
        ),
        Fault(
            "a mixed partial derivative",
            lambda: gt.mixed_partial(lambda y, g: (y * rule(g)).sum(), torch.exp, x[0], x[1], x[2]),
            "mixed_partial",
            "G(z)",
        ),
        Fault(
            "a mixed partial derivative, in G",
            lambda: gt.mixed_partial(
                lambda y, g: (y * g.sin()).sum(), forward_rule, x[0], x[1], x[2]
            ),
            "mixed_partial",
            "z",
            "the rule forward_rule",
        ),
        Fault(
            "a chunk of a batch",
            lambda: gt.microbatched_value_and_grad(lambda w, x: (rule(w) * x).mean(), 2)(x[0], x),
            "microbatched_value_and_grad",
        ),
        Fault(
            "backward through a rule",
            lambda: rule(tracked).sum().backward(),
            "rule",
            "leaf 0",
        ),
        Fault(
            "backward through chunks",
            lambda: gt.chunked(sin, 2)(tracked).sum().backward(),
            "chunked",
            "leaf 0",
            "Function Sine",
        ),
        Fault(
            "backward through chunks to parameters",
            lambda: gt.chunked(lambda x: sin(net(x)), 2)(x).sum().backward(),
            "chunked",
            "leaf 0, leaf 1",
            "Function Sine",
        ),
        Fault(
            "backward through a frozen function",
            lambda: gt.frozen(sin)(tracked).sum().backward(),
            "frozen",
            "leaf 0",
        ),
        Fault(
            "backward through a checkpoint",
            lambda: gt.checkpoint(sin)(tracked).sum().backward(),
            "checkpoint",
            "leaf 0",
        ),
        Fault(
            "an inner derivative",
            lambda: gt.grad(lambda x: gt.grad(total(sin))(x).square().sum())(x),
            "grad",
        ),
    ]


# --- PyTorch: what is lost at second order, and wrong formulas of its own ------------------------


def _torch_second_order() -> list[Fault]:
    torch = pytest.importorskip("torch")
    import gradtools.torch as gt

    torch.manual_seed(0)
    x = torch.randn(3, dtype=torch.float64)
    matrix = torch.randn(3, 3, dtype=torch.float64) + 3 * torch.eye(3, dtype=torch.float64)

    def function(forward: Any, backward: Any, name: str) -> Any:
        class Made(torch.autograd.Function):
            @staticmethod
            def forward(ctx, x):
                y, saved = forward(x)
                ctx.save_for_backward(*saved)
                return y

            @staticmethod
            def backward(ctx, g):
                return backward(g, *ctx.saved_tensors)

        Made.__name__ = name
        return Made.apply

    def under_no_grad(g, x):
        with torch.no_grad():
            return 3 * x**2 * g

    def adjoint(g, y):
        with torch.no_grad():
            return g * (1 - y) ** 2

    def nested(g, x):
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            return torch.autograd.grad(x**3, x, g.detach())[0]

    sinh = lambda x: ((x.exp() - (-x).exp()) / 2, (x.exp(), (-x).exp()))
    cube = lambda x: (x**3, (x,))
    by_numpy = lambda x: (torch.from_numpy(np.sin(x.numpy())), (x,))
    lossy = {
        "Intermediates": (sinh, lambda g, a, b: g * (a + b) / 2),
        "NoGrad": (cube, under_no_grad),
        "Detached": (cube, lambda g, x: 3 * x.detach() ** 2 * g),
        "ByNumpy": (by_numpy, lambda g, x: g * torch.from_numpy(np.cos(x.detach().numpy()))),
        "Nested": (cube, nested),
        "AdjointOfAnOde": (lambda x: (x / (1 + x), (x / (1 + x),)), adjoint),
        "CotangentStopped": (cube, lambda g, x: 3 * x**2 * g.detach()),
        "Penalty": (lambda x: (x.norm(), (x,)), lambda g, x: g * x / x.norm().detach()),
    }
    faults = []
    for name, (forward, backward) in lossy.items():
        made, at = function(forward, backward, name), x.abs()
        f = lambda x, made=made: (made(x) ** 2).sum()
        faults.append(
            Fault(
                f"grad of grad of {name}",
                lambda f=f, at=at: gt.grad(lambda x: gt.grad(f)(x).square().sum())(at),
                "grad",
                blamed=f"Function {name}",
            )
        )
    made = function(*lossy["NoGrad"], "NoGrad")
    f = lambda x: (made(x) ** 2).sum()
    ways = {
        "hvp": lambda: gt.hvp(f, (x,), (x,)),
        "hessian": lambda: gt.hessian(f)(x),
        "jacobian": lambda: gt.jacobian(gt.grad(f), mode="reverse")(x),
        "vjp": lambda: gt.vjp(gt.grad(f), x)[1](x),
        "linearize": lambda: gt.linearize(gt.grad(f), x)[1](x),
    }
    faults += [Fault(f"{n} of NoGrad", run, n, blamed="Function NoGrad") for n, run in ways.items()]

    def hooked(x):
        y = x * x
        y.register_hook(lambda g: g.detach() * 2)
        return (y**2).sum()

    def equilibrium(x):
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

    second = lambda f: lambda: gt.grad(lambda x: gt.grad(f)(x).square().sum())(x)
    tangent = lambda f: lambda A: gt.jvp(f, (A,), (torch.ones_like(A).tril(),))[1]
    reverse = lambda f: lambda: gt.grad(lambda A: tangent(f)(A).square().sum())(matrix)
    ones = torch.ones(3, 1, dtype=torch.float64)
    spd = matrix @ matrix.T
    return [
        *faults,
        Fault("a hook that detaches", second(hooked), "grad", blamed="a hook"),
        Fault("a hook that solves without a graph", second(equilibrium), "grad", blamed="a hook"),
        Fault(
            "the derivative of the tangent of solve, torch#192540",
            reverse(lambda A: torch.linalg.solve(A, A @ A)),
            "grad",
            blamed="reverse-over-forward derivative of linalg.solve",
        ),
        Fault(
            "the derivative of the tangent of logdet, torch#192540",
            reverse(lambda A: torch.logdet(A @ A.T)),
            "grad",
            blamed="reverse-over-forward derivative of logdet",
        ),
        Fault(
            "the derivative of the tangent of slogdet, torch#192540",
            reverse(lambda A: torch.linalg.slogdet(A)[1]),
            "grad",
            blamed="reverse-over-forward derivative of linalg.slogdet",
        ),
        Fault(
            "the tangent of cholesky_inverse, torch#196682",
            lambda: tangent(torch.cholesky_inverse)(torch.linalg.cholesky(spd)),
            "jvp",
            blamed="derivative of cholesky_inverse",
        ),
        Fault(
            "the tangent of triangular_solve, torch#196707",
            lambda: tangent(
                lambda A: torch.triangular_solve(ones, A.tril(), upper=False, unitriangular=True)[0]
            )(matrix),
            "jvp",
            blamed="triangular_solve",
        ),
    ]


# --- JAX -----------------------------------------------------------------------------------------


def _jax_faults() -> list[Fault]:
    jax = pytest.importorskip("jax")
    import jax.numpy as jnp

    import gradtools.jax as gt

    x = jnp.asarray(np.random.default_rng(0).standard_normal((4, 3)))

    def function(forward: Any, backward: Any, name: str) -> Any:
        def primal(x):
            return forward(x)

        primal.__name__ = name
        made = jax.custom_vjp(primal)
        made.defvjp(lambda x: (forward(x), x), lambda x, g: (backward(x, g),))
        return made

    sin = function(jnp.sin, lambda x, g: 1.01 * g * jnp.cos(x), "sine")
    rounded = function(jnp.round, lambda x, g: g, "rounded")
    reversal = function(lambda x: x, lambda x, g: -g, "reversal")
    norm = function(lambda x: x / jnp.linalg.norm(x), lambda x, g: g / jnp.linalg.norm(x), "norm")
    stopped = function(jnp.sinh, lambda x, g: jax.lax.stop_gradient(g) * 2, "stopped")

    @jax.custom_vjp
    def product(a, b):
        return a * b

    product.defvjp(lambda a, b: (a * b, (a, b)), lambda ab, g: (g * ab[1], g * ab[1]))

    @jax.custom_jvp
    def cube(x):
        return x**3

    cube.defjvp(lambda xs, ts: (xs[0] ** 3, 2 * xs[0] ** 2 * ts[0]))

    @jax.custom_vjp
    def adjoint(x):
        """dy/dt = -y^2 to time 1, whose adjoint is solved with a step too few."""
        return jax.lax.fori_loop(0, 100, lambda _, y: y - 0.01 * y * y, x)

    def solved_back(x, g):
        _, ys = jax.lax.scan(lambda y, _: (y - 0.01 * y * y, y), x, length=99)
        return (jax.lax.scan(lambda g, y: (g * (1 - 0.02 * y), None), g, ys[::-1])[0],)

    adjoint.defvjp(lambda x: (adjoint(x), x), solved_back)

    @gt.custom_rule
    def rule(x):
        return jnp.sin(x)

    rule.defvjp(lambda x: (jnp.sin(x), x), lambda x, ct: (1.01 * ct * jnp.cos(x),))

    @gt.custom_rule
    def forward_rule(x):
        return jnp.exp(x)

    forward_rule.defjvp(lambda xs, ts: (jnp.exp(xs[0]), 0.9 * jnp.exp(xs[0]) * ts[0]))
    kernel = gt.host_function(np.sin)
    kernel.defvjp(lambda x: (kernel(x), x), lambda x, ct: (ct * jnp.sin(x),))
    total = lambda f: lambda x: f(x).sum()
    return [
        Fault("a factor", lambda: gt.grad(total(sin))(x), "grad", blamed="derivative of sine"),
        Fault(
            "a leaf of a dictionary",
            lambda: gt.grad(lambda p: (p["a"] * sin(p["b"])).sum())({"a": x, "b": x + 1}),
            "grad",
            "argument 0['b']",
            "derivative of sine",
        ),
        Fault(
            "cotangents of two arguments exchanged",
            lambda: gt.grad(lambda a, b: product(a, b).sum(), argnums=(0, 1))(x, x + 1),
            "grad",
            "argument 1",
            "derivative of product",
        ),
        Fault(
            "a straight-through estimator by hand",
            lambda: gt.grad(lambda x: (rounded(x) ** 2).sum())(x),
            "grad",
            blamed="derivative of rounded",
        ),
        Fault(
            "a reversal by hand",
            lambda: gt.grad(lambda x: (reversal(x) ** 2).sum())(x),
            "grad",
            blamed="derivative of reversal",
        ),
        Fault(
            "a normalization without its projection",
            lambda: gt.grad(lambda x: (norm(x) * jnp.sin(x)).sum())(x),
            "grad",
            blamed="derivative of norm",
        ),
        Fault("a cotangent that is stopped", lambda: gt.grad(total(stopped))(x), "grad"),
        Fault(
            "an adjoint with a step too few",
            lambda: gt.grad(total(adjoint))(abs(x)),
            "grad",
            blamed="derivative of adjoint",
        ),
        Fault("a rule", lambda: gt.grad(total(rule))(x), "grad", blamed="derivative of rule"),
        Fault(
            "a forward rule",
            lambda: gt.jvp(forward_rule, (x,), (x,)),
            "jvp",
            blamed="derivative of forward_rule",
        ),
        Fault("a kernel", lambda: gt.grad(total(kernel))(x), "grad", blamed="derivative of sin"),
        Fault("vjp", lambda: gt.vjp(rule, x)[1](x), "vjp", blamed="derivative of rule"),
        Fault("jvp", lambda: gt.jvp(cube, (x,), (x,)), "jvp", blamed="derivative of cube"),
        Fault("linearize", lambda: gt.linearize(cube, x)[1](x), "linearize"),
        Fault("jacobian in reverse", lambda: gt.jacobian(sin, mode="reverse")(x[0]), "jacobian"),
        Fault("jacobian forward", lambda: gt.jacobian(cube, mode="forward")(x[0]), "jacobian"),
        Fault("hvp", lambda: gt.hvp(total(cube), (x,), (x,)), "hvp", blamed="derivative of cube"),
        Fault("hessian", lambda: gt.hessian(total(rule))(x[0]), "hessian"),
        Fault(
            "an example of a batch",
            lambda: gt.per_example_grad(lambda w, x: (rule(w) * x).sum())(x[0], x),
            "per_example_grad",
        ),
        Fault(
            "a player",
            lambda: gt.minimax_value_and_grad(lambda a, b: (a * rule(b)).sum(), 0, 1)(x, x),
            "minimax_value_and_grad",
            "argument 1",
        ),
        Fault(
            "a mixed partial derivative",
            lambda: gt.mixed_partial(lambda y, g: (y * rule(g)).sum(), jnp.exp, x[0], x[1], x[2]),
            "mixed_partial",
            "G(z)",
        ),
        Fault(
            "a mixed partial derivative, in G",
            lambda: gt.mixed_partial(
                lambda y, g: (y * jnp.sin(g)).sum(), forward_rule, x[0], x[1], x[2]
            ),
            "mixed_partial",
            "z",
            "derivative of forward_rule",
        ),
        Fault(
            "a chunk of a batch",
            lambda: gt.microbatched_value_and_grad(lambda w, x: (rule(w) * x).mean(), 2)(x[0], x),
            "microbatched_value_and_grad",
        ),
        Fault("in a compiled function", lambda: gt.grad(total(jax.jit(sin)))(x), "grad"),
        Fault(
            "in a loop",
            lambda: gt.grad(
                lambda x: jax.lax.scan(lambda c, x: (c + sin(x).sum(), None), 0.0, x)[0]
            )(x),
            "grad",
            blamed="derivative of scan",
        ),
        Fault("in a batch", lambda: gt.grad(total(jax.vmap(sin)))(x), "grad"),
        Fault("jax.grad through a rule", lambda: jax.grad(total(rule))(x), "rule", "leaf 0"),
        Fault(
            "jax.grad through chunks",
            lambda: jax.grad(total(gt.chunked(sin, 2)))(x),
            "chunked",
            "leaf 0",
        ),
        Fault(
            "jax.grad through a frozen function",
            lambda: jax.grad(total(gt.frozen(sin)))(x),
            "frozen",
            "leaf 0",
        ),
        Fault(
            "jax.grad through a checkpoint",
            lambda: jax.grad(total(gt.checkpoint(sin)))(x),
            "checkpoint",
            "leaf 0",
        ),
        Fault(
            "an inner derivative",
            lambda: gt.grad(lambda x: (gt.grad(total(cube))(x) ** 2).sum())(x),
            "grad",
            blamed="derivative of cube",
        ),
    ]


def _names(of: Callable[[], list[Fault]]) -> list[Fault]:
    try:
        return of()
    except pytest.skip.Exception:
        return []


@pytest.mark.parametrize("fault", _names(_torch_faults), ids=str)
def test_a_fault_in_pytorch_is_named(fault):
    _check(fault)


@pytest.mark.parametrize("fault", _names(_torch_second_order), ids=str)
def test_a_fault_of_second_order_in_pytorch_is_named(fault):
    _check(fault)


@pytest.mark.parametrize("fault", _names(_jax_faults), ids=str)
def test_a_fault_in_jax_is_named(fault):
    _check(fault)
