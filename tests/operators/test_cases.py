"""Tests each use case in both backends, at a size at which results can be derived by hand.

The expected values are closed forms in NumPy that do not use gradtools.
"""

from __future__ import annotations

import itertools
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

import gradtools

RTOL = 1e-12


def agree(gt, found, expected):
    """Compare an array with its expected values, dtype and shape."""
    expected = np.asarray(expected)
    found = gt.to_numpy(found)
    assert found.shape == expected.shape and found.dtype == expected.dtype
    np.testing.assert_allclose(found, expected, rtol=RTOL, atol=RTOL)


def number(gt, x):
    return gt.asarray(np.float64(x))


class Counter:
    """Count the evaluations of a function at run time, in JAX with a callback."""

    def __init__(self, backend_name):
        self.calls, self.jax = 0, backend_name == "jax"

    def note(self):
        self.calls += 1

    def __call__(self):
        if not self.jax:
            return self.note()
        import jax

        return jax.debug.callback(self.note)

    @property
    def total(self):
        if self.jax:
            import jax

            jax.effects_barrier()
        return self.calls


# --- U1: one evaluation for the gradients of two players ----------------------------------


def test_u1_one_evaluation_gives_both_players_gradients(gt, backend_name):
    count = Counter(backend_name)

    def f(x, y):
        count()
        return abs(x - y)

    w = number(gt, 1)
    reversed_on_x = gt.grad(lambda w: f(gt.reverse_gradient(w * 1), w * 2))(w)
    assert float(reversed_on_x) == 3 and count.total == 1


# --- U2: minimax gradients from one backward pass -----------------------------------------


@pytest.fixture
def players(rng):
    """Return x of shape (10, 1) and linear layers with weights of shapes (1, 2), (2, 3), (2, 3)."""
    x = rng.uniform(size=(10, 1))
    layer = lambda i, o: {"w": rng.normal(size=(i, o)), "b": rng.normal(size=o)}
    return x, layer(1, 2), layer(2, 3), layer(2, 3)


def minimax_cost(A, B, C, x):
    linear = lambda p, v: v @ p["w"] + p["b"]
    d = lambda y, x: abs(y) ** (x + 1)
    h = linear(A, x)
    return (d(linear(B, h), x) - d(linear(C, h), x)).sum()


def minimax_by_hand(A, B, C, x):
    """Return the gradients of the cost; the gradient with respect to C is negated."""
    h = x @ A["w"] + A["b"]
    slope = lambda y: (x + 1) * np.abs(y) ** x * np.sign(y)
    to_b, to_c = slope(h @ B["w"] + B["b"]), -slope(h @ C["w"] + C["b"])
    to_h = to_b @ B["w"].T + to_c @ C["w"].T
    pull = lambda v, ct: {"w": v.T @ ct, "b": ct.sum(axis=0)}
    return pull(x, to_h), pull(h, to_b), pull(h, -to_c)


@pytest.mark.sweep_at("jax")
def test_u2_every_player_descends_from_one_evaluation(gt, backend_name, players):
    x, *layers = players
    count = Counter(backend_name)

    def cost(*args):
        count()
        return minimax_cost(*args)

    arrays = [{name: gt.asarray(a) for name, a in layer.items()} for layer in layers]
    both = gt.minimax_value_and_grad(cost, minimize=(0, 1), maximize=2)
    value, grads = both(*arrays, gt.asarray(x))
    agree(gt, value, minimax_cost(*layers, x))
    for found, expected in zip(grads, minimax_by_hand(*layers, x), strict=True):
        for name in ("w", "b"):
            agree(gt, found[name], expected[name])
    assert count.total == 1


# --- U3, U4: second derivatives with a frozen G -------------------------------------------


def f(y, g):
    return ((y.sum(-1) + g) ** 3).sum()


def second_derivative(y, z, u):
    """For g = G(z) and h = sum_j y_ij + g, row i of d/dy <u, df/dz> is 6 h_i g_i sum_j u_ij."""
    g = np.exp(z.sum(axis=1))
    rows = 6 * (y.sum(axis=1) + g) * g * u.sum(axis=1)
    return np.repeat(rows[:, None], y.shape[1], axis=1)


@pytest.fixture
def yzu(rng):
    y, z = rng.normal(scale=0.5, size=(2, 3, 4))
    return y, z, np.ones((3, 4))


@pytest.mark.slow_at("jax")
def test_u4_mixed_partial_is_the_closed_form(gt, yzu):
    G = lambda z: gt.xp.exp(z.sum(-1))
    agree(gt, gt.mixed_partial(f, G, *map(gt.asarray, yzu)), second_derivative(*yzu))


@pytest.mark.slow_at("jax")
def test_u4_a_list_of_directions_gives_a_list(gt, yzu, rng):
    y, z, _ = yzu
    directions = list(rng.normal(size=(2, 3, 4)))
    G = lambda z: gt.xp.exp(z.sum(-1))
    found = gt.mixed_partial(
        f, G, gt.asarray(y), gt.asarray(z), [gt.asarray(u) for u in directions]
    )
    for each, u in zip(found, directions, strict=True):
        agree(gt, each, second_derivative(y, z, u))


def test_u3_a_further_function_of_the_slopes_is_differentiated(gt, yzu):
    """The loss g is the sum of (df/dz)^2, so dg/dy is a second derivative along 2 df/dz."""
    y, z, _ = yzu
    g = np.exp(z.sum(axis=1))
    u = np.repeat((2 * 3 * (y.sum(axis=1) + g) ** 2 * g)[:, None], 4, axis=1)
    G = lambda z: gt.xp.exp(z.sum(-1))
    slope = lambda y: gt.grad(lambda z: f(y, G(z)))(gt.asarray(z))
    agree(gt, gt.grad(lambda y: (slope(y) ** 2).sum())(gt.asarray(y)), second_derivative(y, z, u))


def test_u4_keeps_no_graph_of_g(gt, backend_name, yzu):
    y, z, u = map(gt.asarray, yzu)
    if backend_name == "jax":
        from jax import lax

        # Forward mode supports a while loop, but reverse mode does not.
        G = lambda z: gt.xp.exp(
            lax.while_loop(lambda s: s[0] < 1, lambda s: (s[0] + 1, s[1]), (0, z))[1].sum(-1)
        )
        agree(gt, gt.mixed_partial(f, G, y, z, u), second_derivative(*yzu))
        return
    import torch

    saved = []

    def G(z):
        with torch.autograd.graph.saved_tensors_hooks(saved.append, lambda x: x):
            return torch.exp(z.sum(-1))

    agree(gt, gt.mixed_partial(f, G, y, z, u), second_derivative(*yzu))
    assert saved == []


def test_u4_the_obvious_two_steps_are_refused_by_name(gt, yzu):
    y, z, _ = map(gt.asarray, yzu)
    G = lambda z: gt.stop_gradient(gt.xp.exp(z.sum(-1)))  # no gradient propagates through G
    with pytest.raises(gradtools.DisconnectedInputError, match="argument 0 does not reach"):
        gt.grad(lambda z: f(y, G(z)))(z)


# --- U7: pure and accumulated gradients ---------------------------------------------------


def y_of(x):
    return x["x1"] ** 2 + 5 * x["x2"]


def test_u7_grad_returns_and_writes_nothing(gt, backend_name):
    x = {"x1": number(gt, 3), "x2": number(gt, 1)}
    if backend_name == "torch":
        x = {name: leaf.requires_grad_() for name, leaf in x.items()}
    grads = gt.grad(y_of)(x)
    agree(gt, grads["x1"], np.float64(6))
    agree(gt, grads["x2"], np.float64(5))
    assert all(getattr(leaf, "grad", None) is None for leaf in x.values())


def test_u7_accumulating_adds_to_what_is_named(gt, backend_name):
    x = {"x1": number(gt, 3), "x2": number(gt, 1)}
    grads = gt.grad(y_of)(x)
    buffer = {name: 0 * leaf for name, leaf in x.items()}
    if backend_name == "torch":
        buffer = {name: leaf.requires_grad_() for name, leaf in x.items()}
    for _ in range(2):
        buffer = gt.accumulate_gradients(buffer, {"x1": grads["x1"]})
    if backend_name == "torch":
        assert float(x["x1"].grad) == 12 and x["x2"].grad is None
    else:
        assert float(buffer["x1"]) == 12 and float(buffer["x2"]) == 0


@pytest.mark.sweep_at("jax")
def test_u7_eight_threads_take_gradients_at_shared_parameters(gt, backend_name):
    x = {"x1": number(gt, 3), "x2": number(gt, 1)}
    if backend_name == "torch":
        x = {name: leaf.requires_grad_() for name, leaf in x.items()}
    total = gt.GradientAccumulator()

    def work(i):
        found = []
        for _ in range(25):
            grads = gt.grad(lambda x: i * y_of(x))(x)
            total.add(grads)
            found.append([float(gt.to_numpy(grads[name])) for name in ("x1", "x2")])
        return found

    with ThreadPoolExecutor(8) as pool:
        results = list(pool.map(work, range(1, 9)))
    assert results == [[[6.0 * i, 5.0 * i]] * 25 for i in range(1, 9)]
    assert all(getattr(leaf, "grad", None) is None for leaf in x.values())
    agree(gt, total.sum()["x1"], np.float64(25 * 6 * 36))


# --- U8: a differential equation ----------------------------------------------------------

T = np.linspace(0, 2, 40)


def residual(gt, slope_by, c, t):
    """Return the residual r = u' + 2 t u for the polynomial u = 1 + sum_k c_k t^(k+1)."""
    u = lambda t: 1 + sum(c[k] * t ** (k + 1) for k in range(c.shape[0]))
    if slope_by == "jvp":
        value, slope = gt.jvp(u, (t,), (gt.xp.ones_like(t),))
    else:
        value, slope = u(t), gt.grad(lambda t: u(t).sum())(t)
    return slope + 2 * t * value


def columns(n):
    """Return the matrix `columns` of the residual r = 2 t + columns @ c, which is linear in c."""
    return np.stack([(k + 1) * T**k + 2 * T ** (k + 2) for k in range(n)], axis=1)


@pytest.mark.slow_at(("jax", "jvp"))
@pytest.mark.parametrize("slope_by", ["jvp", "grad"])
def test_u8_a_loss_that_contains_a_derivative_is_differentiated(gt, slope_by, rng):
    c = rng.normal(size=3)
    loss = lambda c: (residual(gt, slope_by, c, gt.asarray(T)) ** 2).mean()
    value, grad = gt.value_and_grad(loss)(gt.asarray(c))
    r = 2 * T + columns(3) @ c
    agree(gt, value, (r**2).mean())
    agree(gt, grad, 2 * columns(3).T @ r / len(T))


@pytest.mark.sweep_at("jax")
@pytest.mark.parametrize("slope_by", ["jvp", "grad"])
def test_u8_the_solution_is_found(gt, slope_by):
    """The residual is linear in c, so one Gauss-Newton step finds the least-squares solution."""
    c, t = gt.asarray(np.zeros(10)), gt.asarray(T)
    J = gt.to_numpy(gt.jacobian(lambda c: residual(gt, slope_by, c, t))(c))
    np.testing.assert_allclose(J, columns(10), rtol=RTOL, atol=RTOL)
    found = np.linalg.lstsq(J, -gt.to_numpy(residual(gt, slope_by, c, t)), rcond=None)[0]
    u = 1 + sum(found[k] * T ** (k + 1) for k in range(10))
    assert np.max(np.abs(u - np.exp(-(T**2)))) < 1e-3


# --- U9: a complex affine layer -----------------------------------------------------------


@pytest.fixture
def affine(rng):
    """Return complex W, I and b, and dL/dO = 4 |O|^2 O for L = sum |O|^4."""
    normal = lambda *shape: rng.normal(size=shape) + 1j * rng.normal(size=shape)
    W, I, b = normal(3, 4), normal(4, 5), normal(3, 1)
    O = W @ I + b
    return (W, I, b), 4 * np.abs(O) ** 2 * O


def affine_by_hand(W, I, b, gO):
    return gO @ I.conj().T, W.conj().T @ gO, gO.sum(axis=1, keepdims=True)


@pytest.mark.sweep_at("jax")
def test_u9_natively_complex(gt, affine):
    arrays, gO = affine
    loss = lambda W, I, b: (gt.xp.abs(W @ I + b) ** 4).sum()
    found = gt.grad(loss, argnums=(0, 1, 2))(*map(gt.asarray, arrays))
    for grad, expected in zip(found, affine_by_hand(*arrays, gO), strict=True):
        agree(gt, grad, expected)


@pytest.mark.slow_at("jax")
def test_u9_as_pairs_of_real_arrays(gt, affine):
    arrays, gO = affine

    def loss(W, I, b):  # (a + ib)(c + id) = (ac - bd) + i(ad + bc)
        re = W[0] @ I[0] - W[1] @ I[1] + b[0]
        im = W[0] @ I[1] + W[1] @ I[0] + b[1]
        return ((re**2 + im**2) ** 2).sum()

    pairs = [(gt.asarray(z.real), gt.asarray(z.imag)) for z in arrays]
    found = gt.grad(loss, argnums=(0, 1, 2))(*pairs)
    for (re, im), expected in zip(found, affine_by_hand(*arrays, gO), strict=True):
        agree(gt, re, expected.real)
        agree(gt, im, expected.imag)


def test_u9_the_pullback_is_the_adjoint(gt, affine):
    (W, I, b), gO = affine
    _, pullback = gt.vjp(lambda W, I, b: W @ I + b, *map(gt.asarray, (W, I, b)))
    found = pullback(gt.asarray(gO))
    for grad, expected in zip(found, affine_by_hand(W, I, b, gO), strict=True):
        agree(gt, grad, expected)


# --- U10: a lost gradient and its fix -----------------------------------------------------

TARGET = 0.3


def through_numpy(gt, backend_name, image):
    """Return mean(image > 0.5), computed by NumPy."""
    fraction = lambda image: np.mean(np.asarray(image) > 0.5)
    if backend_name == "torch":
        return gt.asarray(fraction(gt.to_numpy(image)))
    import jax

    wanted = jax.ShapeDtypeStruct((), np.float64)
    return jax.pure_callback(fraction, wanted, jax.lax.stop_gradient(image))


def test_u10_through_numpy_the_gradient_is_lost_and_it_is_said(gt, backend_name, rng):
    image = gt.asarray(rng.uniform(size=(16, 16)))
    loss = lambda image: (through_numpy(gt, backend_name, image) - TARGET) ** 2
    with pytest.raises(gradtools.DisconnectedInputError, match="argument 0 does not reach"):
        gt.grad(loss)(image)


@pytest.mark.sweep_at("jax")
def test_u10_straight_through_has_the_surrogates_gradient_and_reaches_the_target(gt, rng):
    sigmoid = lambda x: 1 / (1 + gt.xp.exp(-(x - 0.5) / 0.1))
    binarise = gt.straight_through(lambda x: x > 0.5, surrogate=sigmoid)
    loss = gt.value_and_grad(lambda image: (binarise(image).mean() - TARGET) ** 2)
    image = rng.uniform(size=(16, 16))

    value, grad = loss(gt.asarray(image))
    fraction, s = np.mean(image > 0.5), 1 / (1 + np.exp(-(image - 0.5) / 0.1))
    agree(gt, value, (fraction - TARGET) ** 2)
    agree(gt, grad, 2 * (fraction - TARGET) / 256 * s * (1 - s) / 0.1)

    assert abs(fraction - TARGET) > 0.1
    for _ in range(200):
        _, grad = loss(gt.asarray(image))
        image = image - 20 * gt.to_numpy(grad)
    assert abs(np.mean(image > 0.5) - TARGET) < 0.01  # The error is at most two pixels.


# --- U11: several losses and unequal chunks -----------------------------------------------


def test_u11_one_loss_after_the_other_is_their_sum(gt, rng):
    w = rng.normal(size=4)
    losses = [lambda w: (w**3).sum(), lambda w: (w * w).sum()]
    total = gt.GradientAccumulator()
    for loss in losses:
        total.add(gt.grad(loss)(gt.asarray(w)))
    agree(gt, total.sum(), 3 * w**2 + 2 * w)


def test_u11_into_one_buffer(gt, backend_name, rng):
    w = rng.normal(size=4)
    x = gt.asarray(w)
    buffer = x.requires_grad_() if backend_name == "torch" else gt.asarray(np.zeros(4))
    for loss in (lambda w: (w**3).sum(), lambda w: (w * w).sum()):
        buffer = gt.accumulate_gradients(buffer, gt.grad(loss)(gt.asarray(w)))
    agree(gt, buffer.grad if backend_name == "torch" else buffer, 3 * w**2 + 2 * w)


@pytest.mark.sweep_at("jax")
def test_u11_token_counts_weight_unequal_chunks(gt, rng):
    tokens = rng.integers(1, 9, size=10)
    per_token = [rng.normal(size=(n, 3)) for n in tokens]  # the loss of a token is (w . x)^2
    w = rng.normal(size=3)
    chunks = gt.GradientAccumulator()
    for start, stop in ((0, 4), (4, 8), (8, 10)):
        x = gt.asarray(np.concatenate(per_token[start:stop]))
        grad = gt.grad(lambda w, x=x: ((x @ w) ** 2).mean())(gt.asarray(w))
        chunks.add(grad, weight=int(tokens[start:stop].sum()))
    every = np.concatenate(per_token)
    agree(gt, chunks.mean(), 2 * every.T @ (every @ w) / len(every))


# --- U12: the gradient at an intermediate value -------------------------------------------


@pytest.fixture
def two_layers(rng):
    """Return x, w, a, dL/dh of L = mean_i sum_j a_j h_ij^2, and the pullback of w -> tanh(x w)."""
    x, w, a = rng.normal(size=(5, 2)), rng.normal(size=(2, 3)), rng.normal(size=3)
    h = np.tanh(x @ w)
    at_h = 2 * a * h / len(x)
    to_w = lambda cotangent: x.T @ (cotangent * (1 - h**2))
    return x, w, a, at_h, to_w


def layers(gt, x, a):
    h = lambda w: gt.xp.tanh(gt.asarray(x) @ w)
    return h, lambda h: (gt.asarray(a) * h**2).sum(-1).mean()


@pytest.mark.slow_at("jax")
def test_u12_a_sampler_between_the_stages(gt, two_layers, rng):
    x, w, a, at_h, to_w = two_layers
    h, g = layers(gt, x, a)
    mask = rng.integers(0, 2, size=(5, 3)) / 0.5
    sampled = lambda ct: ct * gt.asarray(mask)
    grad = gt.grad(lambda w: g(gt.transform_gradient(h(w), sampled)))(gt.asarray(w))
    agree(gt, grad, to_w(at_h * mask))


def test_u12_a_known_gradient_replaces_what_arrives(gt, two_layers, rng):
    x, w, a, _, to_w = two_layers
    h, g = layers(gt, x, a)
    known = rng.normal(size=(5, 3))
    grad = gt.grad(lambda w: g(gt.replace_gradient(h(w), gt.asarray(known))))(gt.asarray(w))
    agree(gt, grad, to_w(known))


@pytest.mark.slow_at("jax")
def test_u12_the_mean_over_all_masks_is_the_plain_gradient(gt, two_layers):
    """The exact expectation is a sum over all masks of three entries, weighted by probability."""
    x, w, a, at_h, to_w = two_layers
    h, g = layers(gt, x, a)
    rate, total = 0.25, gt.GradientAccumulator()
    for bits in itertools.product((0.0, 1.0), repeat=3):
        mask = gt.asarray(np.array(bits) / rate)
        sampled = lambda ct, mask=mask: ct * mask
        grad = gt.grad(lambda w: g(gt.transform_gradient(h(w), sampled)))(gt.asarray(w))
        total.add(grad, weight=rate ** sum(bits) * (1 - rate) ** (3 - sum(bits)))
    agree(gt, total.sum(), to_w(at_h))


@pytest.mark.slow_at("jax")
def test_u12_examples_sampled_apart_pool_to_the_batchs_gradient(gt, two_layers, rng):
    x, w, a, at_h, to_w = two_layers
    mask = rng.integers(0, 2, size=(5, 3)) / 0.5

    def one(w, x, known):
        h = gt.replace_gradient(gt.xp.tanh(x @ w), known)
        return (gt.asarray(a) * h**2).sum()

    known = gt.asarray(2 * a * np.tanh(x @ w) * mask)
    each = gt.per_example_grad(one)(gt.asarray(w), gt.asarray(x), known)
    assert tuple(each.shape) == (5, 2, 3)
    agree(gt, each.mean(0), to_w(at_h * mask))
