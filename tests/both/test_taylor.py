"""Taylor mode: nested derivatives are its oracle, and the numbers agree in both frameworks."""

from __future__ import annotations

import math

import numpy as np
import pytest

from gradtools import GradtoolsError

RNG = np.random.default_rng(0)
A, B = RNG.normal(size=(3, 4)), RNG.normal(size=(4, 4)) / 2
X = np.array([0.3, 0.5, 0.9])
TERMS = [*RNG.normal(size=(3, 3))]


def softmax(xp, z):
    z = xp.exp(z - xp.max(z))
    return z / xp.sum(z)


PROGRAMS = {
    "polynomial": lambda gt, xp, x: xp.sum(x**3 * x[0]) + x[1] ** 0 + x[2],
    "network": lambda gt, xp, x: xp.tanh(xp.tanh(x @ gt.asarray(A)) @ gt.asarray(B)),
    "softmax": lambda gt, xp, x: xp.log(softmax(xp, x @ gt.asarray(A))),
    "normalisation": lambda gt, xp, x: (x - xp.mean(x)) / xp.sqrt(xp.mean(x * x) + 0.1),
    "quotients": lambda gt, xp, x: 2 / x[0] + x[1] / (1 + x[2] ** 2) - x / x[0] + x**2.5,
    "circular": lambda gt, xp, x: xp.sin(x) * xp.cos(2 * x) + xp.sinh(x) + xp.arctan(x),
    "branches": lambda gt, xp, x: xp.where(x > 0.4, x**3, xp.exp(x)) * xp.abs(x - 0.6),
    "entries": lambda gt, xp, x: xp.stack([x[2], x[0] * x[1]])[1:] * xp.max(x) + xp.prod(x),
    "attention": lambda gt, xp, x: softmax(xp, x[:, None] * x[None, :]) @ x,
    "complex": lambda gt, xp, x: xp.abs(xp.exp(1j * x) ** 2 + 0.3 * x),
    "a gradient": lambda gt, xp, x: gt.grad(lambda y: xp.sum(xp.sin(y) * x))(x) * x[0],
    "a product of broadcast": lambda gt, xp, x: xp.sum(x * (x[:, None] + gt.asarray(A[:, :3]))),
}
CASES = [pytest.param(f, id=name) for name, f in PROGRAMS.items()]


def along(gt, f, order):
    """The derivatives along the curve, by forward mode in forward mode."""

    def g(t):
        return f(sum(gt.asarray(u) * t**k / math.factorial(k) for k, u in enumerate([X, *TERMS])))

    one, zero, results = gt.asarray(1.0), gt.asarray(0.0), []
    for _ in range(order):
        g = (lambda g: lambda t: gt.jvp(g, (t,), (one,))[1])(g)
        results.append(gt.to_numpy(g(zero)))
    return results


def trace(gt, f):
    twice = gt.jacobian(gt.jacobian(f))
    return lambda x: gt.xp.sum(twice(x) * gt.asarray(np.eye(3)), axis=(-2, -1))


@pytest.mark.sampled(torch=(9, 12), jax=(5, 12))
@pytest.mark.parametrize("program", CASES)
def test_a_jet_is_nested_derivatives(gt, program):
    f = lambda x: program(gt, gt.xp, x)
    terms = [gt.asarray(t) for t in TERMS]
    value, series = gt.jet(f, (gt.asarray(X),), (terms,))
    np.testing.assert_allclose(gt.to_numpy(value), gt.to_numpy(f(gt.asarray(X))), rtol=1e-12)
    for got, wanted in zip(series, along(gt, f, 3), strict=True):
        np.testing.assert_allclose(gt.to_numpy(got), wanted, rtol=1e-9, atol=1e-11)


@pytest.mark.sampled(torch=(12, 12), jax=(5, 12))
@pytest.mark.parametrize("program", CASES)
def test_a_laplacian_is_the_trace_of_the_hessian_and_is_differentiated_again(gt, program):
    f = lambda x: gt.xp.sum(program(gt, gt.xp, x))
    x = gt.asarray(X)
    close = lambda a, b: np.testing.assert_allclose(
        gt.to_numpy(a), gt.to_numpy(b), rtol=1e-9, atol=1e-10
    )
    wanted = trace(gt, f)
    close(gt.laplacian(f)(x), wanted(x))
    if program not in (PROGRAMS["network"], PROGRAMS["quotients"]):
        return
    zeros = {"disconnected_inputs": "zeros"}
    close(gt.grad(gt.laplacian(f), **zeros)(x), gt.grad(wanted, **zeros)(x))
    mapped = gt.vmap(gt.laplacian(f))(gt.xp.stack([x, x * 1.5]))
    close(mapped, gt.xp.stack([wanted(x), wanted(x * 1.5)]))


def test_trees_and_arguments(gt):
    f = lambda d, b: {"y": gt.xp.sin(d["a"] * b), "n": gt.xp.argmax(b)}
    d, b = {"a": gt.asarray(X)}, gt.asarray(X + 1)
    wanted = -np.sin(X * (X + 1)) * (X**2 + (X + 1) ** 2)
    result = gt.laplacian(f, argnums=(0, 1))(d, b)
    np.testing.assert_allclose(gt.to_numpy(result["y"]), wanted, rtol=1e-12)
    assert result["n"] is None
    value, series = gt.jet(f, (d, b), ([{"a": gt.asarray(X)}], [b]))
    assert int(value["n"]) == 2 and series["n"] is None and len(series["y"]) == 1


def test_a_rule_is_followed_where_forward_mode_can(gt):
    x = gt.asarray(X)
    f = gt.custom_rule(lambda x: x**3)
    f.defjvp(lambda primals, tangents: (primals[0] ** 3, 3 * primals[0] ** 2 * tangents[0]))
    result = gt.laplacian(lambda x: gt.xp.sum(f(x)))(x)
    np.testing.assert_allclose(gt.to_numpy(result), 6 * X.sum(), rtol=1e-12)


def test_mistakes_are_refused_in_words(gt):
    x, f = gt.asarray(X), lambda x: gt.xp.sum(x)
    for call, words in (
        (lambda: gt.jet(f, (x,), ([],)), "lengths"),
        (lambda: gt.jet(f, (x,), ([x], [x])), "1 primals and 2 lists"),
        (lambda: gt.jet(f, (x,), ([x[:2]],)), "shape"),
        (lambda: gt.laplacian(f)(x * 1j), "complex"),
        (lambda: gt.laplacian(None), "f must be a function, got None"),
    ):
        with pytest.raises(GradtoolsError, match=words):
            call()
