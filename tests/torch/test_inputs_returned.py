"""Tests rules and edits that return their input, followed by in-place writes.

The output has its own memory. Therefore each program must return the same number as PyTorch's
reverse mode for the identity `x.clone()`. Only a rule that has saved its input may raise an error,
because the saved input is changed before the backward pass.
"""

from __future__ import annotations

import pytest
import torch

import gradtools.torch as gt
from gradtools import GradtoolsError

D = torch.float64
X = torch.tensor([0.5, -1.2, 0.7, 2.0], dtype=D)
T = torch.tensor([0.3, -0.4, 0.9, 0.1], dtype=D)


def with_vjp(f):
    rule = gt.custom_rule(f)
    rule.defvjp(lambda x: (f(x), None), lambda r, c: (c,))
    return rule


def with_jvp(f):
    rule = gt.custom_rule(f)
    rule.defjvp(lambda xs, ts: (f(xs[0]), ts[0]))
    return rule


def with_both(f):
    rule = with_vjp(f)
    rule.defjvp(lambda xs, ts: (f(xs[0]), ts[0]))
    return rule


def on_host():
    kernel = gt.host_function(lambda x: x)
    kernel.defvjp(lambda x: (kernel(x), None), lambda r, c: (c,))
    return kernel


same = lambda x: x
IDENTITIES = {
    "transform_gradient": lambda x: gt.transform_gradient(x, same),
    "scale_gradient": lambda x: gt.scale_gradient(x, 1.0),
    "scale_gradient, array": lambda x: gt.scale_gradient(x, torch.ones((), dtype=D)),
    "clip_gradient": lambda x: gt.clip_gradient({"x": x}, max_norm=1e9)["x"],
    "straight_through": gt.straight_through(same),
    "straight_through, surrogate": gt.straight_through(same, surrogate=torch.clone),
    "frozen": gt.frozen(same),
    "chunked": gt.chunked(same, 2),
    "checkpoint": gt.checkpoint(same),
    "host_function": on_host(),
    "vjp": with_vjp(same),
    "jvp": with_jvp(same),
    "both": with_both(same),
    "vjp of a view": with_vjp(lambda x: x[:]),
    "vjp of a detached view": with_vjp(lambda x: x.detach()[:]),
    "jvp of data": with_jvp(lambda x: x.data),
}


def output(identity, x):
    y = identity(x)
    y.mul_(2)
    return (y**2).sum() + (x**3).sum()


def part_of_output(identity, x):
    y = identity(x)
    y[0].mul_(2)
    return (y**2).sum() + (x**3).sum()


def input_after(identity, x):
    y = identity(x)
    x.mul_(2)
    return (y**2).sum() + (x**3).sum()


def view_before(identity, x):
    v = x[:2]
    y = identity(x)
    v.mul_(2)
    return (y**2).sum() + (x**3).sum() + (v**2).sum()


def output_of_a_view(identity, x):
    y = identity(x[:2])
    y.mul_(2)
    return (y**2).sum() + (x**3).sum()


def input_of_a_view(identity, x):
    y = identity(x[:2])
    x.mul_(2)
    return (y**2).sum() + (x**3).sum()


def output_of_two(identity, x):
    y = identity(x)
    z = identity(y)
    z.mul_(2)
    return (y**2).sum() + (x**3).sum() + (z**4).sum()


PROGRAMS = (output, part_of_output, input_after, view_before)
PROGRAMS += (output_of_a_view, input_of_a_view, output_of_two)


def reverse(f):
    x = X.clone().requires_grad_()
    value = f(x * 1)
    return value.detach(), torch.autograd.grad(value, x)[0] @ T


def pulled(f):
    value, gradient = gt.value_and_grad(lambda x: f(x * 1))(X)
    return value, gradient @ T


def pulled_by_functorch(f):
    gradient, value = torch.func.grad_and_value(lambda x: f(x * 1))(X)
    return value, gradient @ T


ROUTES = {
    "autograd": reverse,
    "grad": pulled,
    "jvp": lambda f: gt.jvp(lambda x: f(x * 1), (X,), (T,)),
    "functorch grad": pulled_by_functorch,
    "functorch jvp": lambda f: torch.func.jvp(lambda x: f(x * 1), (X,), (T,)),
}
RAISED = (RuntimeError, NotImplementedError, GradtoolsError)
EDITS = [*IDENTITIES][:6]
# in forward mode, these operators call f, which may return a view
MAY_VIEW = ("chunked", "checkpoint", "frozen")


@pytest.mark.sampled(40, 80)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("name", IDENTITIES)
def test_what_is_written_in_place_after_an_identity_is_right_or_refused(name, route):
    wrong = []
    for program in PROGRAMS:
        right = [reverse(lambda x: program(torch.clone, x))]
        if name in MAY_VIEW:
            right.append(reverse(lambda x: program(lambda x: x.view_as(x), x)))
        try:
            found = ROUTES[route](lambda x, program=program: program(IDENTITIES[name], x))
        except RAISED as error:
            if name in EDITS and "forward" not in str(error):
                wrong.append((program.__name__, error))
            continue
        if not any(torch.allclose(torch.stack(found), torch.stack(r)) for r in right):
            wrong.append((program.__name__, found, right))
    assert not wrong


# --- outputs that share memory ---------------------------------------------------------------


PAIRS = {
    "an input twice": lambda x: (x, x),
    "an input and a view": lambda x: (x, x[:]),
    "one result twice": lambda x: (lambda y: (y, y))(3 * x),
    "a result and a view": lambda x: (lambda y: (y, y[:]))(3 * x),
    "a result and its detached copy": lambda x: (lambda y: (y, y.detach()))(3 * x),
}


def weighed(pair):
    """Return a rule for `pair` whose bwd is c[0] + 2 c[1] and not the derivative of `pair`."""
    rule = gt.custom_rule(pair)
    rule.defvjp(lambda x: (pair(x), None), lambda r, c: (c[0] + 2 * c[1],))
    return rule


@pytest.mark.parametrize("pair", PAIRS)
@pytest.mark.parametrize("route", ROUTES)
def test_outputs_that_share_memory_have_each_their_own_cotangent(pair, route):
    rule = weighed(PAIRS[pair])
    for weights, slope in (((3, 0), 3), ((0, 5), 10), ((3, 5), 13)):
        f = lambda x, w=weights: sum(k * y.sum() for k, y in zip(w, rule(x), strict=True))
        assert ROUTES[route](f)[1].item() == pytest.approx(slope * T.sum().item())
