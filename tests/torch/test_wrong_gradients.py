"""Gradients that PyTorch has wrong are right in gradtools, against closed forms, in every operator.

Each program is held against the same function by plain operations, in which PyTorch is right.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

import gradtools.torch as gt
from gradtools import GradtoolsError

pytestmark = pytest.mark.torch
F = torch.nn.functional
X = torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64)
T = torch.tensor([0.3, -0.2, 0.5], dtype=torch.float64)
Z, S = torch.complex(X, 1 - X), torch.complex(T, 2 * T)
EXPONENTS = torch.tensor([1, -1, -2])
ONES = torch.ones(2, dtype=torch.float64)


def _scaled(x):
    return ((x * 2.0 ** EXPONENTS.double()) ** 2).sum()


def _turned(z):
    return (z * torch.sigmoid(z) * (1 + 2j)).real.sum()


def _weighed(x):
    """At X a cotangent is zero."""
    rows = [torch.log(torch.exp(x[: i + 1]).sum()) for i in range(3)]
    return ((x - 2) * torch.stack(rows)).sum()


POINTS = torch.tensor([[1.0, 2.0, 3.0], [0.5, -1.0, 2.0]], dtype=torch.float64)
TURNED = torch.tensor([[0.3, -0.2, 0.5], [1.0, 0.4, -0.7]], dtype=torch.float64)
SCALE, VARIANCE = torch.tensor([[1.0, 0.5], [2.0, 1.5], [3.0, 0.7]], dtype=torch.float64).T


def _normalised(x):
    """By running statistics of which the scale is every other number in memory."""
    mean = torch.zeros(3, dtype=torch.float64)
    return (F.batch_norm(x**2, mean, VARIANCE, SCALE, eps=0.0) * x).sum()


def _standardised(x):
    return (F.batch_norm(x**2, None, None, SCALE, training=True, eps=0.25) * x).sum()


def _standardised_by_hand(x):
    y = x**2
    return ((y - y.mean(0)) / (y.var(0, correction=0) + 0.25).sqrt() * SCALE * x).sum()


# By name: what PyTorch has wrong, the same by plain operations, a point and a direction.
PROGRAMS = {
    "ldexp": (lambda x: (torch.ldexp(x, EXPONENTS) ** 2).sum(), _scaled, X, T),
    "ldexp_": (lambda x: ((x * 1).ldexp_(EXPONENTS) ** 2).sum(), _scaled, X, T),
    "silu_": (lambda z: (F.silu(z * 1, inplace=True) * (1 + 2j)).real.sum(), _turned, Z, S),
    "logcumsumexp": (
        lambda x: ((x - 2) * torch.logcumsumexp(x, -1)).sum(),
        _weighed,
        X,
        T,
    ),
    "batch_norm": (
        _normalised,
        lambda x: (x**3 / VARIANCE.sqrt() * SCALE).sum(),
        POINTS,
        TURNED,
    ),
    "batch_norm in training": (_standardised, _standardised_by_hand, POINTS, TURNED),
}


def _along(gradient, t):
    return float((gradient.conj() * t).real.sum())


def _by_backward(f, x, t):
    x = x.clone().requires_grad_()
    gt.checkpoint(f)(x).backward()
    return _along(x.grad, t)


WAYS = {
    "grad": lambda f, x, t: _along(gt.grad(f)(x), t),
    "vjp": lambda f, x, t: _along(gt.vjp(f, x)[1](ONES[0])[0], t),
    "jvp": lambda f, x, t: float(gt.jvp(f, (x,), (t,))[1]),
    "linearize": lambda f, x, t: float(gt.linearize(f, x)[1](t)),
    "vmap": lambda f, x, t: _along(torch.vmap(gt.grad(f))(x[None])[0], t),
    "per_example_grad": lambda f, x, t: _along(
        gt.per_example_grad(lambda x, k: f(x) * k)(x, ONES)[1], t
    ),
    "hvp, reverse over reverse": lambda f, x, t: _along(
        gt.hvp(f, (x,), (t,), mode="reverse_over_reverse")[1][0], t
    ),
    "hvp, forward over reverse": lambda f, x, t: _along(
        gt.hvp(f, (x,), (t,), mode="forward_over_reverse")[1][0], t
    ),
    "grad of jvp": lambda f, x, t: _along(gt.grad(lambda x: gt.jvp(f, (x,), (t,))[1])(x), t),
    "checkpoint": lambda f, x, t: _along(gt.grad(gt.checkpoint(f))(x), t),
    "backward of checkpoint": _by_backward,
    "hvp of checkpoint": lambda f, x, t: _along(gt.hvp(gt.checkpoint(f), (x,), (t,))[1][0], t),
    "chunked": lambda f, x, t: _along(
        gt.grad(lambda x: gt.chunked(lambda c: f(c[0])[None], 1)(x[None]).sum())(x), t
    ),
    "chunked, computed again": lambda f, x, t: _along(
        gt.grad(lambda x: gt.chunked(lambda c: f(c[0])[None], 1, keep_graphs=0)(x[None]).sum())(x),
        t,
    ),
    "frozen": lambda f, x, t: _along(gt.hvp(gt.frozen(f), (x,), (t,))[1][0], t),
    "microbatched_value_and_grad": lambda f, x, t: _along(
        gt.microbatched_value_and_grad(lambda x, k: f(x) * k.mean(), 1)(x, ONES)[1], t
    ),
    "minimax": lambda f, x, t: _along(
        gt.minimax_value_and_grad(lambda a, b: f(a) + b, 0, 1)(x, ONES[0])[1][0], t
    ),
    "straight_through": lambda f, x, t: _along(gt.grad(gt.straight_through(f, f))(x), t),
    "mixed_partial": lambda f, x, t: _along(
        gt.mixed_partial(lambda y, g: f(y * g), lambda z: z, x, torch.ones_like(x), t), t
    ),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", PROGRAMS)
def test_a_gradient_that_pytorch_has_wrong_is_right(name, way):
    f, plain, x, t = PROGRAMS[name]
    assert WAYS[way](f, x, t) == pytest.approx(WAYS[way](plain, x, t), rel=1e-9)


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_gradient_that_pytorch_has_wrong_is_what_differences_say(name):
    f, _, x, t = PROGRAMS[name]
    h = 1e-5
    slope = float(f(x + h * t) - f(x - h * t)) / (2 * h)
    assert WAYS["grad"](f, x, t) == pytest.approx(slope, rel=1e-8)


@pytest.mark.slow
@pytest.mark.parametrize("way", ["grad", "hvp, reverse over reverse"])
@pytest.mark.parametrize("name", ["ldexp", "silu_", "logcumsumexp"])
def test_it_is_right_in_compiled_code(name, way):
    f, plain, x, t = PROGRAMS[name]
    derivative = {
        "grad": lambda f: gt.grad(f),
        "hvp, reverse over reverse": lambda f: lambda x: gt.hvp(f, (x,), (t,))[1][0],
    }[way]
    found = torch.compile(derivative(f), backend="eager")(x)
    assert torch.allclose(found, derivative(plain)(x))


def test_nothing_stays_at_the_nodes_of_a_graph_of_the_users():
    x = X.clone().requires_grad_()
    y = torch.ldexp(x, EXPONENTS)
    found = gt.grad(lambda w: (w * y).sum())(T)  # which holds y's graph
    assert torch.equal(found, y)
    (plain,) = torch.autograd.grad(y.sum(), x, retain_graph=True)
    f = lambda w: (w * y).sum()
    (mixed,) = torch.autograd.grad(gt.grad(f)(T.clone().requires_grad_()).sum(), x)
    assert torch.equal(mixed, plain)  # PyTorch's own pullback, PyTorch's own number


@pytest.mark.sweep_at("compiled")
@pytest.mark.parametrize("way", ["jvp", "linearize", "compiled"])
def test_a_logical_operation_in_place_has_no_derivative_where_it_is_seen(way):
    def f(x):
        y = 2 * x
        y.logical_not_()
        return (y * x).sum()

    x = torch.tensor([1.5, 0.0, 2.0], dtype=torch.float64)
    expected = torch.tensor([0.0, 1.0, 0.0], dtype=torch.float64)
    if way == "compiled":
        assert torch.equal(torch.compile(gt.grad(f), backend="eager")(x), expected)
    else:
        push = {
            "jvp": lambda t: gt.jvp(f, (x,), (t,))[1],
            "linearize": gt.linearize(f, x)[1],
        }[way]
        for t, e in zip(torch.eye(3, dtype=torch.float64), expected, strict=True):
            assert float(push(t)) == float(e)


def test_plain_pytorch_still_passes_a_gradient_through_logical_not_in_place():
    """When this fails PyTorch has mended it: take it off docs/upstream-bugs.md and its table."""
    x = X.clone().requires_grad_()
    (found,) = torch.autograd.grad((1 * x).logical_not_().sum(), x)
    assert torch.equal(found, torch.ones_like(x))


INDICES = torch.tensor([[0, 1, 2, 0], [1, 0, 2, 1]])  # one place comes twice


def _sparse(values):
    return torch.sparse_coo_tensor(INDICES, values, (3, 3))


def _dense(values):
    return torch.zeros(3, 3, dtype=values.dtype).index_put(tuple(INDICES), values, accumulate=True)


def _four(x):
    return torch.cat((x**2, x[:1]))


SPARSE = {
    "to_dense": lambda m, x: (m.to_dense() if m.is_sparse else m).pow(2).sum(),
    "a product with a dense matrix": lambda m, x: ((m @ torch.outer(x, x)) ** 2).sum(),
    "a sum of two": lambda m, x: ((m + m) @ x[:, None] ** 2).sum(),
    "values": lambda m, x: (m.coalesce().values() if m.is_sparse else m[m != 0]).pow(2).sum(),
}
TWICE = {
    "hvp": lambda f: _along(gt.hvp(f, (X,), (T,), mode="reverse_over_reverse")[1][0], T),
    "grad of grad": lambda f: _along(gt.grad(lambda x: (gt.grad(f)(x) * T).sum())(X), T),
    "hvp of checkpoint": lambda f: _along(gt.hvp(gt.checkpoint(f), (X,), (T,))[1][0], T),
}


@pytest.mark.parametrize("way", TWICE)
@pytest.mark.parametrize("name", SPARSE)
def test_the_second_derivative_through_a_sparse_tensor_that_is_made_is_right(name, way):
    """PyTorch looks the entries of the cotangent up without a graph."""
    use = SPARSE[name]
    found = TWICE[way](lambda x: use(_sparse(_four(x)), x))
    assert found == pytest.approx(TWICE[way](lambda x: use(_dense(_four(x)), x)), rel=1e-9)


def test_linearize_of_a_sparse_tensor_that_is_made_is_right():
    f = lambda x: SPARSE["a product with a dense matrix"](_sparse(_four(x)), x)
    assert float(gt.linearize(f, X)[1](T)) == pytest.approx(_along(gt.grad(f)(X), T), rel=1e-9)


def test_entries_that_a_sparse_cotangent_lacks_are_zero():
    """Of rows of numbers, one of which is not looked at."""

    def f(x):
        values = torch.stack((x, x**2))
        m = torch.sparse_coo_tensor(torch.tensor([[0, 2]]), values, (4, 3))
        return (m.coalesce().values()[:1] ** 3).sum()

    found = gt.hvp(f, (X,), (T,), mode="reverse_over_reverse")[1][0]
    assert torch.allclose(found, 6 * X * T)


# --- straight_through of a NumPy function under functorch


def test_straight_through_refuses_another_structure_under_functorch_too():
    rounded = lambda x: torch.from_numpy(np.round(x.numpy()))
    x = torch.tensor([1.2, 2.7])
    right = gt.straight_through(rounded, lambda x: 2 * x)
    assert torch.equal(torch.func.grad(lambda x: right(x).sum())(x), torch.full((2,), 2.0))
    wrong = gt.straight_through(lambda x: [rounded(x)], lambda x: 2 * x)
    with pytest.raises(GradtoolsError, match="the function returned the structure"):
        torch.func.grad(lambda x: wrong(x)[0].sum())(x)
