"""Compares `frozen` and `mixed_partial` with plain double backward, in each backend."""

from __future__ import annotations

import numpy as np
import pytest

from gradtools import DisconnectedInputError
from tests.support.numpy_trees import leaves


def number(gt, x):
    return gt.asarray(np.asarray(x))


def close(gt, found, expected, tolerance=1e-10):
    found = [gt.to_numpy(x) for x in leaves(found)]
    expected = [gt.to_numpy(x) for x in leaves(expected)]
    size = max(float(np.abs(e).max(initial=0)) for e in expected)
    assert len(found) == len(expected) and size > 1e-6, "the expected derivative is zero"
    for a, b in zip(found, expected, strict=True):
        assert a.shape == b.shape and a.dtype == b.dtype
        np.testing.assert_allclose(a, b, rtol=0, atol=tolerance * size)


def staged(gt, fun):
    """Compile `fun` in JAX, because eager code compiles hundreds of programs."""
    return gt.compile(fun) if gt.__name__.endswith("jax") else fun


# --- functions G of all kinds -----------------------------------------------------------------


def arrays(gt, rng, *shapes):
    return [number(gt, rng.normal(size=shape)) for shape in shapes]


def layers(gt, rng):
    a, b = (number(gt, rng.normal(size=s) / 2) for s in ((4, 6), (6, 4)))
    return lambda z: gt.xp.sin(gt.xp.tanh(z @ a) @ b)


def tree(gt, rng):
    inner = layers(gt, rng)

    def G(z):
        w = inner(z["a"])
        both = (w * z["b"][0], {"k": gt.xp.exp(-w).sum(), "n": 3 + z["b"][1]})
        return {"out": both, "z": z["a"]}

    return G


CASES = {
    "a network": (layers, lambda gt, rng: arrays(gt, rng, (3, 4))[0], lambda o: o),
    "pytrees with an integer": (
        tree,
        lambda gt, rng: {
            "a": arrays(gt, rng, (3, 4))[0],
            "b": [arrays(gt, rng, (4,))[0], number(gt, np.array([1, 2]))],
        },
        lambda o: o["out"][0] * o["out"][1]["k"] + o["z"] * o["out"][1]["n"].sum(),
    ),
    "an additional empty output": (
        lambda gt, rng: lambda z: (z[:0], gt.xp.sin(z) * z.sum()),
        lambda gt, rng: arrays(gt, rng, (4,))[0],
        lambda o: o[1] + o[0].sum(),
    ),
    "complex": (
        lambda gt, rng: (lambda c: lambda z: z * z * c + 1j * z)(
            number(gt, rng.normal(size=4) + 1j * rng.normal(size=4))
        ),
        lambda gt, rng: number(gt, rng.normal(size=4) + 1j * rng.normal(size=4)),
        lambda o: (o * o).real + o.imag * o.real,
    ),
    "linear": (
        lambda gt, rng: lambda z: 3.0 * z,
        lambda gt, rng: arrays(gt, rng, (4,))[0],
        lambda o: o * o * o,
    ),
}


def floating(gt, z):
    """Return the floating-point leaves of z and a function that rebuilds z from them."""
    if not isinstance(z, dict):
        return z, lambda x: x
    return (z["a"], z["b"][0]), lambda x: {"a": x[0], "b": [x[1], z["b"][1]]}


@pytest.fixture(params=CASES)
def case(request, gt, rng):
    """Return G, the floating-point leaves of z, and functions that rebuild z and pick an output."""
    make, at, read = CASES[request.param]
    G = make(gt, rng)
    z, whole = floating(gt, at(gt, rng))
    return G, z, whole, read


def scalar(gt, out):
    return (gt.xp.sin(out.real) * (1 + out.real)).sum()


@pytest.mark.slow_at(("an additional empty output", "jax"))
@pytest.mark.sweep_at(("a network", "jax"), ("pytrees with an integer", "jax"), ("complex", "jax"))
def test_the_value_and_first_derivatives(gt, case):
    G, z, whole, read = case
    f = lambda G: lambda z: scalar(gt, read(G(whole(z))))
    close(gt, gt.frozen(G)(whole(z)), G(whole(z)), 1e-15)
    close(gt, gt.value_and_grad(f(gt.frozen(G)))(z), gt.value_and_grad(f(G))(z), 1e-14)
    close(gt, gt.jvp(f(gt.frozen(G)), (z,), (z,)), gt.jvp(f(G), (z,), (z,)), 1e-14)


@pytest.mark.slow_at("jax")
def test_the_derivative_of_a_gradient_along_what_f_holds(gt, case):
    G, z, whole, read = case

    def second(G):
        def by_y(y):
            g = gt.grad(lambda z: scalar(gt, y * read(G(whole(z)))))(z)
            return sum((x.real * x.real * (1 + k)).sum() for k, x in enumerate(leaves(g)))

        return gt.grad(by_y)(number(gt, 0.7))

    close(gt, second(gt.frozen(G)), second(G))


@pytest.mark.sampled(torch=(28, 28), jax=(1, 25))
@pytest.mark.parametrize("mode", ["forward_over_reverse", "reverse_over_reverse"])
def test_the_derivative_of_a_gradient_along_z(gt, case, mode):
    G, z, whole, read = case
    f = lambda G: lambda z: scalar(gt, read(G(whole(z))))
    found = gt.hvp(f(gt.frozen(G)), (z,), (z,), mode=mode)
    close(gt, found, gt.hvp(f(G), (z,), (z,), mode=mode))


@pytest.mark.slow_at("jax")
@pytest.mark.sweep_at(
    ("a network", "jax"),
    ("pytrees with an integer", "jax"),
    ("an additional empty output", "jax"),
    ("complex", "jax"),
)
def test_the_derivative_along_z_of_what_is_taken_along_y(gt, case):
    """Differentiate the square of d/dy |df/dz|^2 with respect to z."""
    G, z, whole, read = case

    def third(G):
        def size(y, z):
            g = gt.grad(lambda z: scalar(gt, y * read(G(whole(z)))))(z)
            return sum((x.real * x.real * (1 + k)).sum() for k, x in enumerate(leaves(g)))

        y = number(gt, 0.7)
        return gt.grad(lambda z: gt.grad(lambda y: size(y, z))(y) ** 2)(z)

    close(gt, third(gt.frozen(G)), third(G))


# --- inside other operators -------------------------------------------------------------------


@pytest.fixture
def problem(gt, rng):
    """Return the function G, the array y and the batch zs of arguments of G."""
    G = layers(gt, rng)
    y, zs = arrays(gt, rng, (4,), (6, 4))
    return G, y, zs


def inner(gt, G):
    """Return df/dz as a function of y and z."""
    return lambda y, z: gt.grad(lambda z: (gt.xp.tanh(y * G(z)) * y).sum())(z)


def outer(gt, gradients, y):
    return (gt.xp.sin((gradients * gradients).sum(0)) * y).sum() + (gradients**3).prod(0).sum()


def expected_by_y(gt, G, y, zs):
    stacked = lambda y: gt.xp.stack([inner(gt, G)(y, zs[i]) for i in range(6)])
    return staged(gt, gt.grad(lambda y: outer(gt, stacked(y), y)))(y)


def under_vmap(gt, G, zs):
    return lambda y: gt.vmap(lambda z: inner(gt, G)(y, z))(zs)


def by_examples(gt, G, zs):
    f = lambda z, y: (gt.xp.tanh(y * G(z)) * y).sum()
    return lambda y: gt.per_example_grad(f, in_axes=(0, None))(zs, y)


def in_chunks(gt, G, zs):
    one = lambda y, z: gt.grad(lambda z: (gt.xp.tanh(y * G(z)) * y).sum())(z)
    return lambda y: gt.chunked(one, 4, in_axes=(None, 0))(y, zs)


def pushed(gt, G, zs):
    """Return df/dz at all zs as a function of y, computed in forward mode along unit vectors."""

    def one(y, z):
        f = lambda z: (gt.xp.tanh(y * G(z)) * y).sum()
        units = gt.asarray(np.eye(4))
        return gt.xp.stack([gt.jvp(f, (z,), (units[k],))[1] for k in range(4)])

    return lambda y: gt.xp.stack([one(y, zs[i]) for i in range(6)])


PLACES = [
    *(under_vmap, by_examples, in_chunks),
    pushed,
]


@pytest.mark.sweep_at("jax", "pushed")
@pytest.mark.parametrize("place", PLACES)
def test_inside_other_operators(gt, problem, place):
    G, y, zs = problem
    gradients = place(gt, gt.frozen(G), zs)
    found = staged(gt, gt.grad(lambda y: outer(gt, gradients(y), y)))(y)
    close(gt, found, expected_by_y(gt, G, y, zs))


@pytest.mark.slow_at("jax")
def test_keyword_arguments_and_several_arguments(gt, problem):
    _, y, zs = problem
    G = lambda a, b, *, power=2, c=None: gt.xp.sin(a * b) ** power + (0 if c is None else c)
    ours = gt.frozen(G)
    f = lambda G: lambda a, b: (G(a, b, power=3, c=y) ** 2).sum()
    v = (zs[0], zs[1])
    close(gt, gt.hvp(f(ours), v, v), gt.hvp(f(G), v, v))
    along_b = lambda G: gt.grad(lambda b: (gt.grad(lambda a: f(G)(a, b))(zs[0]) ** 2).sum())(zs[1])
    close(gt, along_b(ours), along_b(G))


# --- connectedness of outputs -----------------------------------------------------------------


def of_two(gt, freeze, G):
    return lambda a, b: freeze(lambda a, b: G(gt, a, b))(a, b).sum()


def mapped(gt, freeze, G):
    return lambda a, b: gt.vmap(freeze(lambda a, b: G(gt, a, b)))(a, b).sum()


UNUSED = lambda gt, a, b: gt.xp.sin(a) ** 2
STOPPED = lambda gt, a, b: gt.xp.sin(a) ** 2 * gt.stop_gradient(b)
COMPARED = lambda gt, a, b: gt.xp.where(b > 0, a**2, a)
ROUNDED = lambda gt, a, b: a**2 * gt.xp.round(b)
USED = lambda gt, a, b: a**2 * b
DISCONNECTED = [
    *((place, G) for place in (of_two, mapped) for G in (UNUSED, STOPPED, COMPARED)),
]
CONNECTED = [(of_two, ROUNDED), (of_two, USED), (mapped, USED)]


@pytest.mark.sampled(torch=(18, 18), jax=(8, 18))
@pytest.mark.parametrize("freeze", ["G itself", "frozen"])
@pytest.mark.parametrize(("place", "G"), DISCONNECTED + CONNECTED)
def test_an_argument_reaches_the_output_through_frozen_as_through_g(gt, rng, freeze, place, G):
    freeze = {"G itself": lambda G: G, "frozen": gt.frozen}[freeze]
    a, b = arrays(gt, rng, (3,), (3,))
    f = place(gt, freeze, G)
    if (place, G) in CONNECTED:
        gt.grad(f, (0, 1))(a, b)
        return
    with pytest.raises(DisconnectedInputError, match="argument 1 does not reach"):
        gt.grad(f, (0, 1))(a, b)
    zeros = gt.grad(f, (0, 1), disconnected_inputs="zeros")(a, b)[1]
    assert not gt.to_numpy(zeros).any()
