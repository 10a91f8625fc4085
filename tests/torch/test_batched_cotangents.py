"""Tests derivatives of Jacobians that are computed from a batch of cotangents.

`torch.autograd.grad(is_grads_batched=True, create_graph=True)` uses the legacy vmap, which loses
the graph of a `torch.autograd.Function`; gt.jacobian uses torch.vmap. Each program computes a
Jacobian J, the gradient of a function of J, the Jacobian H of that gradient, and the gradient of a
function of H.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

import gradtools.torch as gt

pytestmark = pytest.mark.torch

X = torch.tensor([0.3, -0.7, 1.1], dtype=torch.float64)


def cubic(x):
    return x.sin() * x**2


def slope(x):
    return x.cos() * x**2 + 2 * x * x.sin()


def curvature(x):
    return 4 * x * x.cos() - x.sin() * x**2 + 2 * x.sin()


def rule_of_rules():
    """Return a rule whose bwd calls another rule."""
    product = gt.custom_rule(torch.mul)
    product.defvjp(lambda a, b: (a * b, (a, b)), lambda res, ct: (ct * res[1], ct * res[0]))
    f = gt.custom_rule(cubic)
    f.defvjp(lambda x: (cubic(x), x), lambda x, ct: (product(slope(x), ct),))
    return f


def kernels():
    f = gt.host_function(lambda x: np.sin(x) * x**2)
    bwd = gt.host_function(lambda x, ct: (np.cos(x) * x**2 + 2 * x * np.sin(x)) * ct)
    f.defvjp(lambda x: (f(x), x), lambda x, ct: (bwd(x, ct),))
    bwd.defvjp(
        lambda x, ct: (bwd(x, ct), (x, ct)),
        lambda res, u: (curvature(res[0]) * res[1] * u, slope(res[0]) * u),
    )
    return f


PROGRAMS = {
    "checkpoint": lambda: gt.checkpoint(cubic),
    "chunked": lambda: gt.chunked(cubic, 1),
    "frozen": lambda: gt.frozen(cubic),
    "frozen in frozen": lambda: gt.frozen(gt.frozen(cubic)),
    "frozen in checkpoint": lambda: gt.checkpoint(gt.frozen(cubic)),
    "a rule of rules": rule_of_rules,
    "kernels": kernels,
    "a clip": lambda: lambda x: gt.clip_gradient(cubic(x), 100.0),
    "edits": lambda: lambda x: gt.reverse_gradient(gt.reverse_gradient(cubic(x))),
    "straight_through": lambda: gt.straight_through(cubic, cubic),
}


def by_autograd(y, x):
    rows = torch.eye(3, dtype=y.dtype)
    return torch.autograd.grad(y, x, rows, is_grads_batched=True, create_graph=True)[0]


def total(y):
    return (y * y.sin()).sum()


def derivatives(f):
    x = X.clone().requires_grad_()
    rows = by_autograd(f(x), x)
    (slope,) = torch.autograd.grad(total(rows), x, create_graph=True)
    again = by_autograd(slope, x)
    return [rows, slope, again, *torch.autograd.grad(total(again), x)]


@pytest.mark.parametrize("program", PROGRAMS)
def test_rows_by_autograd(program):
    torch.testing.assert_close(derivatives(PROGRAMS[program]()), derivatives(cubic))


def jacobians(f):
    x = X.clone().requires_grad_()
    rows = gt.jacobian(f, mode="reverse")
    twice = gt.jacobian(rows, mode="reverse")(x)
    mapped = gt.jacobian(lambda x: gt.vmap(f)(torch.stack([x, 2 * x.sin()])), mode="reverse")(x)
    shifted = gt.jacobian(lambda x: f(x * 1.5), mode="reverse")(x)
    tangent = gt.jvp(rows, (x,), (X,))[1]
    results = [rows(x), twice, mapped, shifted, tangent]
    grads = [torch.autograd.grad(total(y), x, retain_graph=True)[0] for y in results]
    return [*results, *grads]


# clip_gradient does not support forward mode
@pytest.mark.parametrize("program", [p for p in PROGRAMS if p != "a clip"])
def test_rows_by_jacobian(program):
    torch.testing.assert_close(jacobians(PROGRAMS[program]()), jacobians(cubic))


def test_rows_to_the_parameters_of_a_checkpoint():
    net = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Tanh()).double()
    results = []
    for f in (net, gt.checkpoint(net), lambda x: gt.chunked(net, 1)(x[None])[0]):
        x = X.clone().requires_grad_()
        loss = total(by_autograd(f(x), x))
        results.append(torch.autograd.grad(loss, [x, *net.parameters()]))
    torch.testing.assert_close(results[1], results[0])
    torch.testing.assert_close(results[2], results[0])
