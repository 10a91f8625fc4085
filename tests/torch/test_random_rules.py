"""Derivatives of a rule that draws random numbers use the draws of the returned value.

The rule may run a second time, for a tangent or a second derivative, and must draw the same
numbers.
"""

from __future__ import annotations

import pytest
import torch

import gradtools.torch as gt

pytestmark = pytest.mark.torch

X = torch.tensor([[0.3, -0.7, 1.1], [1.0, 2.0, 3.0]], dtype=torch.float64)
ONES = torch.ones(3, dtype=torch.float64)


def noisy_square(with_fwd, with_jvp):
    def fwd(x):
        noise = torch.rand_like(x)
        return x**2 * noise, (x * noise,)

    def jvp(xs, dxs):
        noise = torch.rand_like(xs[0])
        return xs[0] ** 2 * noise, 2 * xs[0] * noise * dxs[0]

    f = gt.custom_rule(lambda x: x**2 * torch.rand_like(x))
    if with_fwd:
        f.defvjp(fwd, lambda residuals, ct: (2 * residuals[0] * ct,))
    if with_jvp:
        f.defjvp(jvp)
    return f


def value_and_vjp(f, x):
    y, pullback = gt.vjp(f, x)
    return y, pullback(ONES)[0]


def value_and_linearized(f, x):
    y, pushforward = gt.linearize(f, x)
    return y, pushforward(ONES)


FIRST = {  # the value is noise * x**2 and the derivative is 2 * noise * x
    "vjp": value_and_vjp,
    "linearize": value_and_linearized,
    "jvp": lambda f, x: gt.jvp(f, (x,), (ONES,)),
    "torch's jvp": lambda f, x: torch.func.jvp(f, (x,), (ONES,)),
}
SECOND = {  # the derivatives are 2 * noise * x and 2 * noise
    "jvp of grad": lambda f, x: gt.jvp(gt.grad(lambda x: f(x).sum()), (x,), (ONES,)),
    "hvp": lambda f, x: [y[0] for y in gt.hvp(lambda x: f(x).sum(), (x,), (ONES,))],
    "torch's jvp of grad": lambda f, x: torch.func.jvp(
        torch.func.grad(lambda x: f(x).sum()), (x,), (ONES,)
    ),
}


def in_two_batches(program, f):
    rows = torch.vmap(lambda x: program(f, x), randomness="different")
    outs = torch.vmap(rows, randomness="different")(X[None])
    return [y[0] for y in outs]


HOW = {
    "alone": lambda program, f: [torch.stack([y]) for y in program(f, X[0])],
    "different": lambda program, f: torch.vmap(lambda x: program(f, x), randomness="different")(X),
    "same": lambda program, f: torch.vmap(lambda x: program(f, x), randomness="same")(X),
    "in two batches": in_two_batches,
}


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("program", [*FIRST, *SECOND])
@pytest.mark.parametrize("rules", [(True, False), (False, True), (True, True)])
def test_a_derivative_is_that_of_the_value(rules, program, how):
    value, derivative = HOW[how](({**FIRST, **SECOND})[program], noisy_square(*rules))
    factor = 2 if program in FIRST else 1
    torch.testing.assert_close(derivative, factor * value / X[: len(value)])


def random_square(x):
    return x.sin() * x**2 * torch.rand_like(x)


def mapped(f):
    return torch.vmap(f, randomness="different")


SAVED_PULLBACK = {
    "jvp of vmap": lambda f: gt.jvp(mapped(f), (X,), (X.cos(),))[1],
    "vmap of jvp": lambda f: mapped(lambda x: gt.jvp(f, (x,), (x.cos(),))[1])(X),
    "grad of jvp of vmap": lambda f: gt.grad(
        lambda x: gt.jvp(mapped(f), (x,), (X.cos(),))[1].sum()
    )(X),
    "grad of torch.func.jvp": lambda f: gt.grad(
        lambda x: torch.func.jvp(f, (x,), (X.cos(),))[1].sum()
    )(X),
    "grad of a Jacobian": lambda f: gt.grad(
        lambda x: gt.jacobian(f, mode="forward")(x).sin().sum()
    )(X),
}


@pytest.mark.parametrize("way", SAVED_PULLBACK)
def test_a_pullback_that_is_saved_is_differentiated_in_forward_mode_too(way):
    """The residual is a closure, so the second derivative runs fwd again with the same draws."""
    rule = gt.custom_rule(random_square)
    rule.defvjp(lambda x: gt.vjp(random_square, x), lambda pullback, ct: pullback(ct))
    results = []
    for f in (rule, rule, random_square):
        torch.manual_seed(0)
        results.append(SAVED_PULLBACK[way](f))
    torch.testing.assert_close(results[0], results[2])
    torch.testing.assert_close(results[1], results[2])
