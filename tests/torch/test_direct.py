"""Tests eager custom rules on the fast path: results and numbers of Python calls.

The first calls of a rule use the slow path, so each test first calls the rule several times.
"""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.autograd.forward_ad as forward_ad

import gradtools
import gradtools.torch as gt
from gradtools import GradtoolsError

HOUSE = str(Path(gradtools.__file__).parent)
KINDS = ("vjp", "jvp", "both")


def sine(kind, *, forward=lambda p, t: (p[0].sin(), p[0].cos() * t[0])):
    f = gt.custom_rule(lambda x: x.sin())
    if kind != "jvp":
        f.defvjp(lambda x: (x.sin(), x), lambda x, ct: (x.cos() * ct,))
    if kind != "vjp":
        f.defjvp(forward)
    return f


def numbers(requires_grad=False):
    return torch.linspace(0.5, 2.0, 4, dtype=torch.float64, requires_grad=requires_grad)


def pushed(f, x, dx):
    with forward_ad.dual_level():
        return forward_ad.unpack_dual(f(forward_ad.make_dual(x, dx)))


def called(f):
    """Call the rule twice in each mode of the tests, so that later calls use the fast path."""
    x = numbers(requires_grad=True)
    for _ in range(2):
        torch.autograd.grad(f(x).sum(), x)
        pushed(f, x.detach(), x.detach())
    return f


def test_a_reverse_rule_that_is_not_linear_is_refused_in_forward_mode_at_each_shape():
    f = gt.custom_rule(lambda x: x.sin())
    f.defvjp(lambda x: (x.sin(), x), lambda x, ct: (x.cos() * ct + (len(x) == 3),))
    x = numbers()
    torch.testing.assert_close(pushed(f, x, x).tangent, x.cos() * x)
    for _ in range(3):
        with pytest.raises(GradtoolsError, match="not linear in its cotangents"):
            pushed(f, x[:3], x[:3])


def test_a_forward_rule_of_another_dtype_is_refused_in_forward_mode_alone():
    f = gt.custom_rule(lambda x: 2 * x)
    f.defjvp(lambda p, t: ((2 * p[0]).float(), (2 * t[0]).float()))
    with pytest.raises(GradtoolsError, match="the forward rule returned"):
        pushed(f, numbers(), numbers())


def test_a_captured_dual_number_is_refused_in_forward_mode_alone():
    x, held = numbers(), SimpleNamespace()
    f = gt.custom_rule(lambda x: x * held.w)
    f.defjvp(lambda p, t: (p[0] * held.w, t[0] * held.w))
    with forward_ad.dual_level():
        held.w = forward_ad.make_dual(x, x)
        with pytest.raises(GradtoolsError, match="closes over an array"):
            f(forward_ad.make_dual(x, x))


# --- number of Python calls ----------------------------------------------------------------


def calls_of_ours(run):
    """Count the calls of gradtools functions in one run."""
    count = [0]

    def watch(frame, event, arg):
        count[0] += event == "call" and frame.f_code.co_filename.startswith(HOUSE)

    run()
    sys.setprofile(watch)
    try:
        run()
    finally:
        sys.setprofile(None)
    return count[0]


def value(f, x):
    return lambda: f(x.detach())


def attached(f, x):
    return lambda: f(x)


def gradient(f, x):
    return lambda: torch.autograd.grad(f(x), x, torch.ones_like(x))


def tangent(f, x):
    x = x.detach()
    return lambda: pushed(f, x, x)


# The maximum number of Python calls for each quantity and kind of rule. A plain Function makes two
# calls in the forward pass and one in the backward pass.

TAKES = {
    value: {"vjp": 3, "jvp": 3, "both": 3},
    attached: {"vjp": 6, "jvp": 7, "both": 6},
    gradient: {"vjp": 9, "jvp": 9, "both": 9},
    tangent: {"vjp": 44, "jvp": 19, "both": 19},
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("what", TAKES, ids=lambda what: what.__name__)
def test_a_call_of_a_rule_takes_no_more_calls_than_these(what, kind):
    x = numbers(requires_grad=True)
    assert calls_of_ours(what(called(sine(kind)), x)) <= TAKES[what][kind]


def host_sine():
    f = gt.host_function(np.sin)
    # `back` is defined below and looked up at the first call
    f.defvjp(lambda x: (f(x), x), lambda x, ct: (back(x, ct),))
    back = gt.host_function(lambda x, ct: np.cos(x) * ct)
    return f


@pytest.mark.parametrize(("what", "most"), [(value, 3), (gradient, 20)])
def test_a_call_of_a_host_function_takes_no_more_calls_than_these(what, most):
    f, x = host_sine(), numbers(requires_grad=True)
    for _ in range(2):
        what(f, x)()
    assert calls_of_ours(what(f, x)) <= most


@pytest.mark.parametrize(
    ("run", "most"),
    [
        (lambda: gt.grad(lambda x: (x * x).sum())(numbers()), 28),
        (lambda: gt.reverse_gradient(numbers(requires_grad=True)), 6),
        (lambda: gt.clip_gradient(numbers(requires_grad=True), max_value=1.0), 24),
    ],
    ids=["grad", "reverse_gradient", "clip_gradient"],
)
def test_an_operator_takes_no_more_calls_than_these(run, most):
    assert calls_of_ours(run) <= most


# --- information from earlier calls ----------------------------------------------------------


def test_residuals_saved_for_the_first_time_draw_the_same_numbers_at_second_order():
    drawing = False

    def fwd(x):
        noise = torch.rand_like(x) if drawing else None
        return x * x, {"x": x, "e": x * x * noise} if drawing else {"x": x}

    def bwd(res, ct):
        e = res.get("e", 0.0 * res["x"])
        return (2 * ct * res["x"] + ct * (e - e.detach()),)

    f = gt.custom_rule(lambda x: x * x)
    f.defvjp(fwd, bwd)
    x, other = numbers(True), torch.ones(3, dtype=torch.float64, requires_grad=True)
    for _ in range(2):
        f(x).sum().backward()
    drawing = True
    f(other).sum().backward()  # call f with another shape
    y = f(x)
    (slope,) = torch.autograd.grad(y.sum(), x, create_graph=True)
    second = [torch.autograd.grad(slope.sum(), x, retain_graph=True)[0] for _ in range(2)]
    torch.testing.assert_close(*second)


# --- linear maps without a graph -------------------------------------------------------------


def gradient_in_eager(f):
    x = numbers(True)
    return torch.autograd.grad(f(x).sum(), x)[0]


def without_graph(map_):
    return torch.no_grad()(map_)


def of_detached(map_):
    return lambda at, v: map_(at, (v[0].detach(),) if isinstance(v, tuple) else v.detach())


@pytest.mark.parametrize("cut", [without_graph, of_detached])
def test_a_map_without_a_graph_is_not_transposed_to_zero(cut):
    x = numbers()
    reverse = gt.custom_rule(lambda x: x.sin())
    reverse.defvjp(lambda x: (x.sin(), x), cut(lambda x, ct: (x.cos() * ct,)))
    forward = sine("jvp", forward=cut(lambda p, t: (p[0].sin(), p[0].cos() * t[0])))
    both = sine("both", forward=cut(lambda p, t: (p[0].sin(), p[0].cos() * t[0])))
    torch.testing.assert_close(gradient_in_eager(reverse), x.cos())
    torch.testing.assert_close(gradient_in_eager(both), x.cos())
    torch.testing.assert_close(torch.func.jvp(forward, (x,), (x,))[1], x.cos() * x)
    for run in (
        lambda: pushed(reverse, x, x),
        lambda: gt.jvp(reverse, (x,), (x,)),
        lambda: torch.func.jvp(reverse, (x,), (x,)),
        lambda: torch.vmap(lambda x: torch.func.jvp(reverse, (x,), (x,))[1])(x),
        lambda: gradient_in_eager(forward),
        lambda: gt.grad(lambda x: forward(x).sum())(x),
        lambda: torch.func.grad(lambda x: forward(x).sum())(x),
        lambda: torch.vmap(torch.func.grad(lambda x: forward(x).sum()))(x),
    ):
        for _ in range(2):
            with pytest.raises(GradtoolsError, match="no graph"):
                run()
