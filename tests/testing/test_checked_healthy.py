"""`checked` raises no error for correct programs with edits, kinks or random draws.

The first table contains programs for both frameworks; each later table contains programs for one
framework. The last test runs the programs in test_jax.py.
"""

from __future__ import annotations

import importlib
from functools import partial
from itertools import product
from typing import Any

import numpy as np
import pytest

import gradtools
from gradtools.testing import checked
from tests.support.scenarios import Table

BOTH = Table()
_RNG = np.random.default_rng(0)
X = _RNG.standard_normal((4, 3))
MASK = np.array([0.0, 0.0, -1e9])


def square(gt: Any, f: Any) -> Any:
    return lambda x: (f(x) ** 2).sum()


def both(name: str, program: Any) -> None:
    BOTH.add(name)(program)


# --- derivatives of plain mathematics

_FUNCTIONS = {
    "sin": lambda gt, x: gt.xp.sin(x) * x,
    "a softmax": lambda gt, x: gt.xp.exp(x) / gt.xp.exp(x).sum(),
    "a variance": lambda gt, x: (x - x.mean()) ** 2,
    "an absolute value": lambda gt, x: abs(x) * x,
    "a ReLU at zeros": lambda gt, x: gt.xp.where(x * 0 + x > 0, x, 0 * x) + x**2,
    "large values": lambda gt, x: (1000 * x + 1e4) ** 2,
    "a mask of -1e9": lambda gt, x: _FUNCTIONS["a softmax"](gt, x + gt.asarray(MASK)),
}
_OPERATORS = {
    "grad": lambda gt, f, x: gt.grad(square(gt, f))(x),
    "hvp": lambda gt, f, x: gt.hvp(square(gt, f), (x,), (x + 1,)),
    "jvp": lambda gt, f, x: gt.jvp(f, (x,), (x + 1,)),
}
for (_name, _f), (_operator, _run) in product(_FUNCTIONS.items(), _OPERATORS.items()):
    both(
        f"{_operator} of {_name}",
        lambda gt, f=_f, run=_run: run(gt, partial(f, gt), gt.asarray(X)),
    )

_WAYS = {
    "vjp": lambda gt, x, f: gt.vjp(f, x)[1](x),
    "linearize": lambda gt, x, f: gt.linearize(f, x)[1](x),
    "jacobian forward": lambda gt, x, f: gt.jacobian(f, mode="forward")(x[0]),
    "jacobian in reverse": lambda gt, x, f: gt.jacobian(f, mode="reverse")(x[0]),
    "a wide jacobian": lambda gt, x, f: gt.jacobian(lambda x: gt.xp.stack([f(x)] * 5))(x[0]),
    "hessian": lambda gt, x, f: gt.hessian(square(gt, f))(x[0]),
    "grad of grad": lambda gt, x, f: gt.grad(square(gt, gt.grad(square(gt, f))))(x),
    "per example": lambda gt, x, f: gt.per_example_grad(lambda w, x: (f(w) * x).sum())(x[0], x),
    "players": lambda gt, x, f: gt.minimax_value_and_grad(lambda a, b: (f(a) * b).sum(), 0, 1)(
        x, x
    ),
    "a mixed partial derivative": lambda gt, x, f: gt.mixed_partial(
        lambda y, g: (y * g).sum() ** 2, f, x[0], x[1], x[2]
    ),
    "chunks of a batch": lambda gt, x, f: gt.microbatched_value_and_grad(
        lambda w, x: (f(w) * x).mean(), 2
    )(x[0], x),
    "chunked": lambda gt, x, f: gt.grad(square(gt, gt.chunked(f, 2)))(x),
    "checkpoint": lambda gt, x, f: gt.grad(square(gt, gt.checkpoint(f)))(x),
    "frozen": lambda gt, x, f: gt.grad(square(gt, gt.grad(square(gt, gt.frozen(f)))))(x),
    "zeros": lambda gt, x, f: gt.grad(lambda x, y: f(x).sum(), 1, disconnected_inputs="zeros")(
        x, x
    ),
}
for _name, _way in _WAYS.items():
    both(_name, lambda gt, way=_way: way(gt, gt.asarray(X), lambda x: gt.xp.sin(x) * x))


# --- derivatives that deliberately differ from finite differences


def _rule(gt: Any) -> Any:
    @gt.custom_rule
    def cube(x):
        return x**3

    cube.defvjp(lambda x: (x**3, x), lambda x, ct: (3 * ct * x**2,))
    return cube


def _kernel(gt: Any) -> Any:
    sin = gt.host_function(np.sin)
    cos = gt.host_function(np.cos)
    sin.defvjp(lambda x: (sin(x), x), lambda x, ct: (ct * cos(x),))
    cos.defvjp(lambda x: (cos(x), x), lambda x, ct: (-ct * sin(x),))
    return sin


def _squared_by_rule(gt: Any) -> Any:
    """Return x**2, computed from a stopped value, with the derivative in a custom rule."""
    square = gt.custom_rule(lambda x, stopped: stopped**2)
    square.defvjp(lambda x, stopped: (stopped**2, x), lambda x, g: (2 * x * g, None))
    return lambda x: square(x, gt.stop_gradient(x))


def _solution_and_a_rule_of_a_constant(gt: Any, x: Any) -> Any:
    """Return the product of an implicit solution z and a custom rule with a fixed argument.

    z is recomputed at each point, and the stopped value keeps its value.
    """
    times = gt.custom_rule(lambda x, fixed: x * fixed)
    times.defvjp(lambda x, fixed: (x * fixed, (x, fixed)), lambda s, g: (g * s[1], g * s[0]))
    z = gt.implicit_solution(lambda z, x: 2 * z - x**2, lambda x: x**2 / 2, "cg")(x)
    return z * times(x, gt.stop_gradient(x))


_MEANT = {
    "a reversal": lambda gt, x: gt.reverse_gradient(x, 0.5),
    "a stop": lambda gt, x: gt.stop_gradient(x) * x,
    "a clipped norm": lambda gt, x: gt.clip_gradient(x, max_norm=0.1),
    "a transformed gradient": lambda gt, x: gt.transform_gradient(x, lambda g: g * g),
    "a replaced gradient": lambda gt, x: gt.replace_gradient(x * x, x),
    "a straight-through estimator": lambda gt, x: gt.straight_through(gt.xp.round)(x) * x,
    "a surrogate": lambda gt, x: gt.straight_through(gt.xp.sign, gt.xp.tanh)(x) * x,
    "a target": lambda gt, x: x * 2 - gt.stop_gradient(x * 3),
    "a straight-through estimator by stop_gradient": lambda gt, x: (
        (x + gt.stop_gradient(gt.xp.round(x) - x)) * x
    ),
    "first-order MAML": lambda gt, x: x - gt.stop_gradient(gt.grad(square(gt, gt.xp.sin))(x)),
    "MAML": lambda gt, x: x - 0.1 * gt.grad(square(gt, gt.xp.sin))(x),
    "an implicit solution and a rule of a constant": _solution_and_a_rule_of_a_constant,
    "a rule": lambda gt, x: _rule(gt)(x),
    "a kernel": lambda gt, x: _kernel(gt)(x),
    "a rule of a stopped value": lambda gt, x: _squared_by_rule(gt)(x),
    "a rule of a stopped value, and a target": lambda gt, x: (
        _squared_by_rule(gt)(x) - gt.stop_gradient(x * 3)
    ),
}
for _name, _f in _MEANT.items():
    both(_name, lambda gt, f=_f: gt.grad(square(gt, lambda x: f(gt, x)))(gt.asarray(X)))
    if "gradient" not in _name and "clipped" not in _name:
        both(
            f"{_name}, twice",
            lambda gt, f=_f: gt.grad(
                lambda x: (gt.grad(square(gt, lambda x: f(gt, x)))(x) ** 2).sum()
            )(gt.asarray(X)),
        )

# --- precision: no error if the values are too coarse for a decision

for _dtype in ("float32", "float16", "bfloat16"):
    for _name in ("sin", "a softmax", "a variance", "an absolute value", "large values"):

        def _narrow(gt: Any, f: Any = _FUNCTIONS[_name], dtype: str = _dtype) -> Any:
            x = gt._api._backend.cast(gt.asarray(X), dtype)
            return gt.grad(lambda x: f(gt, x).sum())(x)

        both(f"{_name} in {_dtype}", _narrow)


def _in_checked(program: Any, *args: Any) -> Any:
    with checked() as report:
        program(*args)
    assert report.compared + sum(report.skipped.values()) > 0
    return report


@pytest.mark.sampled(80, 400)
@pytest.mark.parametrize("program", BOTH.cases())
def test_a_program_passes(program, gt):
    _in_checked(program.program, gt)


# --- idioms of one framework


def _no_grad_block(gt, torch, x):
    def f(x):
        with torch.no_grad():
            target = (x * 3).sin()
        return ((x * 2 - target) ** 2).sum()

    gt.grad(f)(x)


def _inner_derivative_of_pytorch(gt, torch, x):
    inner = lambda x: torch.autograd.grad((x**3).sum(), x, create_graph=True)[0]
    gt.grad(lambda x: (inner(x) ** 2).sum())(x)


def _dropout_and_batch_normalization(gt, torch, x):
    nn = torch.nn
    net = nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.GELU())
    gt.grad(lambda net: net(x.float()).square().mean())(net)
    gt.grad(lambda x: net(x).square().mean())(x.float())


def _masked_attention(gt, torch, x):
    mask = torch.zeros(4, 4).index_fill_(1, torch.tensor([2]), -1e9)
    attention = torch.nn.functional.scaled_dot_product_attention
    gt.grad(lambda x: attention(x, x, x, mask).square().sum())(x.float())


def _squared_relu_of_ones_own(gt, torch, x):
    class Squared(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return x.clamp(min=0) ** 2

        @staticmethod
        def backward(ctx, g):
            return 2 * g * ctx.saved_tensors[0].clamp(min=0)

    f = lambda x: Squared.apply(x.relu()).sum()
    gt.grad(f)(x)
    gt.hvp(f, (x.relu(),), (x,))


def _hook_that_logs(gt, torch, x):
    norms = []

    def f(x):
        y = x * x
        y.register_hook(lambda g: norms.append(g.norm()))
        return (y**2).sum()

    gt.grad(f)(x)
    gt.hvp(f, (x,), (x,))


def _function_that_detaches_with_gradients_enabled(gt, torch, x):
    class Sine(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            with torch.enable_grad():
                return x.detach().sin().detach()

        @staticmethod
        def backward(ctx, g):
            return g * ctx.saved_tensors[0].cos()

    gt.grad(lambda x: (Sine.apply(x) * x.detach()).sum())(x)


def _complex_numbers(gt, torch, x):
    z = torch.complex(x, x + 1)
    gt.grad(lambda z: (z * z.conj() * z.abs()).real.sum())(z)
    gt.hvp(lambda z: (z**2).abs().pow(2).sum(), (z,), (z,))


def _functions_of_a_stopped_value(gt, torch, x):
    class Squared(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, stopped):
            ctx.save_for_backward(x)
            return stopped**2

        @staticmethod
        def backward(ctx, g):
            return 2 * ctx.saved_tensors[0] * g, None

    def under_no_grad(x):
        with torch.no_grad():
            return (x * 2) / 2

    for stop in (torch.Tensor.detach, under_no_grad, lambda x: x.data * 1):
        gt.grad(lambda x, stop=stop: (Squared.apply(x, stop(x)) * x).sum())(x)
        gt.grad(lambda x, stop=stop: ((Squared.apply(x, stop(x)) - x.detach()) ** 2).sum())(x)


def _equilibrium_by_a_hook(gt, torch, x):
    def loss(x):
        with torch.no_grad():
            z = torch.zeros_like(x)
            for _ in range(60):
                z = torch.tanh(0.3 * z + x)
        z = torch.tanh(0.3 * z + x)
        slope = 0.3 * (1 - z.detach() ** 2)
        z.register_hook(lambda g: g / (1 - slope))
        return z.square().sum()

    gt.grad(loss)(x)


def _backward_through_parts(gt, torch, x):
    x, net = x.clone().requires_grad_(), torch.nn.Linear(3, 3).double()
    f = lambda x: net(x).tanh()
    (gt.chunked(f, 2)(x) + gt.checkpoint(f)(x) + gt.frozen(torch.tanh)(x)).sum().backward()
    (_rule(gt)(x) + _kernel(gt)(x)).sum().backward()


def _scan(gt, jax, x):
    step = lambda c, x: (jax.numpy.tanh(c * x).sum(), c)
    gt.grad(lambda x: jax.lax.scan(step, 1.0, x)[0])(x)


def _stop_in_a_scan(gt, jax, x):
    step = lambda c, x: ((jax.lax.stop_gradient(c) * x).sum(), c)
    gt.grad(lambda x: jax.lax.scan(step, 1.0, x)[0])(x)


def _linear_solvers(gt, jax, x):
    # The factors of the stopped matrix are operands of `custom_linear_solve`.
    jnp, stop, eye = jax.numpy, jax.lax.stop_gradient, 4 * jax.numpy.eye(3)
    a, b = x[:3] + eye, x[3]
    solve, positive = jnp.linalg.solve, jax.scipy.linalg.solve
    functions = (
        lambda a: solve(a, b).sum(),
        lambda a: jax.jit(solve)(a, b).sum(),
        lambda a: jnp.linalg.inv(a)[0].sum(),
        lambda a: positive(a @ a.T, b, assume_a="pos").sum(),
        lambda a: solve(stop(a), a @ b).sum(),
        lambda a: ((solve(a, b) - stop(a @ b)) ** 2).sum(),
        lambda a: (jnp.logaddexp(a, stop(3 * a)) + solve(a, b)).sum(),
    )
    for f in functions:
        gt.grad(f)(a)
        gt.hvp(f, (a,), (x[1:],))


def _a_rule_of_a_stopped_value(gt, jax, x):
    square = jax.custom_jvp(lambda x, stopped: stopped**2)
    square.defjvp(lambda xs, ts: (square(*xs), 2 * xs[0] * ts[0]))
    gt.grad(lambda x: (square(x, jax.lax.stop_gradient(x)) * x).sum())(x)
    sums = lambda x, s: jax.lax.scan(lambda c, x: (c + square(x, s).sum(), None), 0.0, x)[0]
    gt.grad(lambda x: sums(x[None], jax.lax.stop_gradient(x)))(x)


def _compiled_edits_and_stops(gt, jax, x):
    f = jax.jit(lambda x: gt.clip_gradient(gt.reverse_gradient(x), max_value=0.1) ** 2)
    gt.grad(lambda x: f(x).sum())(x)
    expected = -jax.numpy.clip(2 * x, -0.1, 0.1)
    assert jax.numpy.allclose(jax.grad(lambda x: f(x).sum())(x), expected)
    gt.grad(lambda x: jax.jit(jax.nn.softmax)(x).max())(x)


def _differential_equation(gt, jax, x):
    from jax.experimental.ode import odeint  # its bwd indexes the time points, which are constants

    times = jax.numpy.array([0.0, 0.5, 1.0])
    solve = lambda x: odeint(lambda y, t: -y * x.mean(), x.sum(0), times)[-1]
    gt.grad(lambda x: (solve(x) ** 2).sum())(x)


def _jax_grad_through_parts(gt, jax, x):
    tanh, sin = jax.numpy.tanh, jax.numpy.sin
    f = lambda x: gt.chunked(tanh, 2)(x) + gt.checkpoint(tanh)(x) + gt.frozen(sin)(x)
    jax.grad(lambda x: f(x).sum())(x)
    jax.grad(lambda x: (_rule(gt)(x) + _kernel(gt)(x)).sum())(x)


def _straight_through_of_pytorch(gt, torch, x):
    sampled = lambda x: torch.nn.functional.gumbel_softmax(x, hard=True)
    gt.grad(lambda x: (sampled(x) * torch.arange(3.0)).sum())(x)


OWN = {
    "torch": (
        *(_no_grad_block, _inner_derivative_of_pytorch, _dropout_and_batch_normalization),
        *(_masked_attention, _squared_relu_of_ones_own, _hook_that_logs, _complex_numbers),
        *(_functions_of_a_stopped_value, _equilibrium_by_a_hook, _backward_through_parts),
        *(_straight_through_of_pytorch, _function_that_detaches_with_gradients_enabled),
    ),
    "jax": (
        *(_scan, _stop_in_a_scan, _linear_solvers, _a_rule_of_a_stopped_value),
        *(_compiled_edits_and_stops, _differential_equation, _jax_grad_through_parts),
    ),
}


AGREEING = (
    *(_functions_of_a_stopped_value, _equilibrium_by_a_hook),
    *(_linear_solvers, _a_rule_of_a_stopped_value, _differential_equation),
)


@pytest.mark.parametrize(("name", "program"), [(n, p) for n, own in OWN.items() for p in own])
def test_a_program_of_one_framework_passes(name, program):
    framework = pytest.importorskip(name)
    gt = importlib.import_module(f"gradtools.{name}")
    if name == "torch":
        framework.manual_seed(0)
    report = _in_checked(program, gt, framework, gt.asarray(X))
    if program in AGREEING:
        assert not report.skipped and not report.notes


# --- stories from public programs


OF_NAN = (
    "where hides a value and not a slope",
    "distances of charges to themselves",
    "the logarithm of the branch not taken",
    "the squared norm at equal points",
    "a scale before and after the norm",
)


def _stories() -> list[Any]:
    """Return the programs in test_jax.py, except for programs about NaN gradients."""
    if "jax" not in gradtools.available_backends():
        return []
    from tests.stories.test_jax import STORIES

    found = Table(STORIES)
    for name in OF_NAN:
        del found[name]
    return found.cases()


@pytest.mark.sampled(12, 100)
@pytest.mark.parametrize("story", _stories())
def test_a_story_passes(story):
    with checked():
        story.program()
