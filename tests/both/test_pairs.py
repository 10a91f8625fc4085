"""The ready functions of all pairs are the dense programs, by the frameworks' own derivatives."""

from __future__ import annotations

import importlib
import itertools
from functools import partial

import numpy as np
import pytest

from tests.support.tiers import in_turn

BACKENDS = ("torch", "jax")
TILE = (3, 4)


class World:
    """One backend, and the framework's own transforms to hold it to."""

    def __init__(self, name):
        self.name, self.gt = name, importlib.import_module(f"gradtools.{name}")
        self.xp = self.gt.xp
        self.native = importlib.import_module({"torch": "torch.func", "jax": "jax"}[name])

    def arrays(self, *shapes, seed=0):
        rng = np.random.default_rng(seed)
        return [self.gt.asarray(rng.normal(size=shape)) for shape in shapes]

    def ints(self, *values):
        return [self.gt.asarray(np.asarray(v, np.int32)) for v in values]

    def logsumexp(self, s, axis):
        m = self.constant(self.xp.max(s, axis=axis))
        m = self.xp.expand_dims(m, axis=axis)
        return self.xp.squeeze(
            m + self.xp.log(self.xp.sum(self.xp.exp(s - m), axis=axis, keepdims=True)), axis=axis
        )

    def constant(self, x):
        return x.detach() if self.name == "torch" else self.native.lax.stop_gradient(x)

    def where(self, kept, s, other):
        return self.xp.where(kept, s, self.xp.zeros_like(s) + other)

    def holds(self, found, wanted, args, rtol=1e-12):
        """Value, gradient and Hessian product of a scalar function of these arguments."""
        every, u = (
            tuple(range(len(args))),
            tuple(self.arrays(*(tuple(x.shape) for x in args), seed=9)),
        )

        def product(gradient, push):
            return push(lambda *a: gradient(*a), args, u)[1]

        gradient = self.native.grad(wanted, argnums=every)
        mine = self.gt.grad(found, argnums=every)
        jit = self.native.jit if self.name == "jax" else lambda f: f
        pairs = [
            ((jit(found)(*args),), (wanted(*args),)),
            (jit(mine)(*args), gradient(*args)),
            (
                jit(lambda *a: self.gt.hvp(found, a, u)[1])(*args),
                product(gradient, self.native.jvp),
            ),
        ]
        for ours, theirs in pairs:
            for a, b in zip(ours, theirs, strict=True):
                a, b = self.gt.to_numpy(a), self.gt.to_numpy(b)
                np.testing.assert_allclose(a, b, rtol=rtol, atol=rtol * max(1, np.abs(b).max()))


@pytest.fixture(params=BACKENDS)
def world(request):
    return World(request.param)


# --- contrastive -------------------------------------------------------------------------


def contrastive(w, x, y, scale, bias, negatives, ids, symmetric, smoothing, sigmoid):
    """The loss with its matrix of logits, written out."""
    n = x.shape[0]
    s = scale * (x @ y.T) + bias
    eye = w.gt.asarray(np.eye(n, dtype=bool))
    kept = eye if ids is None else eye | (ids[:, None] != ids[None, :])
    kept = kept if ids is not None else eye | ~eye
    own = scale * w.xp.sum(x * y, axis=1) + bias
    more = None if negatives is None else scale * (x @ negatives.T) + bias
    if sigmoid:
        softplus = lambda z: w.xp.log(1 + w.xp.exp(z))
        total = w.xp.sum(w.xp.where(kept, softplus(s), s * 0))
        total = total if more is None else total + w.xp.sum(softplus(more))
        return (total - w.xp.sum(own)) / n

    def entropy(s, kept, more):
        masked, count = w.where(kept, s, -np.inf), w.xp.sum(w.where(kept, s * 0 + 1, 0.0), axis=1)
        mass = w.xp.sum(w.xp.where(kept, s, s * 0), axis=1)
        if more is not None:
            masked = w.xp.concat([masked, more], axis=1)
            mass, count = mass + w.xp.sum(more, axis=1), count + more.shape[1]
        loss = w.logsumexp(masked, 1) - (1 - smoothing) * own
        return loss - smoothing * mass / count

    found = w.xp.mean(entropy(s, kept, more))
    if not symmetric:
        return found
    return (found + w.xp.mean(entropy(s.T, kept.T, None))) / 2


OPTIONS = [
    {"symmetric": symmetric, "ids": ids, "negatives": negatives, **kind}
    for symmetric, ids, negatives, kind in itertools.product(
        (True, False), (True, False), (True, False),
        ({}, {"label_smoothing": 0.2}, {"sigmoid": True}),
    )
    if symmetric or "sigmoid" not in kind
]  # fmt: skip


@pytest.mark.sampled(torch=(17, 17), jax=(0, 1))
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_a_contrastive_loss_is_that_of_its_matrix(options, world):
    x, y, scale, bias, more = world.arrays((7, 3), (7, 3), (), (), (4, 3))
    (ids,) = world.ints([0, 1, 2, 1, 4, 0, 6])
    options = dict(options)
    ids = ids if options.pop("ids") else None
    with_more = options.pop("negatives")
    args = (x, y, scale, bias, more) if with_more else (x, y, scale, bias)

    def found(x, y, scale, bias, more=None):
        return world.gt.contrastive_loss(x, y, scale, bias, more, ids, tile_size=TILE, **options)

    def wanted(x, y, scale, bias, more=None):
        return contrastive(
            world, x, y, scale, bias, more, ids, options["symmetric"],
            options.get("label_smoothing", 0.0), options.get("sigmoid", False),
        )  # fmt: skip

    world.holds(found, wanted, args)


@pytest.mark.sweep_at("True")
@pytest.mark.parametrize("symmetric", [True, False])
def test_a_loss_over_the_devices_is_their_mean(symmetric):
    """Over the lanes of a vmap, which JAX takes for devices."""
    import jax

    import gradtools.jax as gj

    x, y = np.random.default_rng(0).normal(size=(2, 6, 3))
    loss = partial(gj.contrastive_loss, logit_scale=1.3, symmetric=symmetric, tile_size=TILE)
    lanes = jax.vmap(partial(loss, axis_name="d"), axis_name="d")
    found = lanes(x.reshape(2, 3, 3), y.reshape(2, 3, 3))
    np.testing.assert_allclose(found.mean(), loss(x, y), rtol=1e-12)


# --- cross entropy -----------------------------------------------------------------------


@pytest.mark.slow_at("0.1", "True", "mean", "none")
@pytest.mark.sweep_at("jax")
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("biased", [False, True])
def test_a_linear_cross_entropy_is_that_of_its_logits(smoothing, reduction, biased, world):
    h, weight, bias = world.arrays((2, 4, 3), (10, 3), (10,))
    (t,) = world.ints([[3, 9, -100, 0], [1, 1, -100, 7]])
    factor = world.gt.asarray(np.cos(np.arange(8.0)).reshape(2, 4))
    hot = world.gt.asarray(np.arange(10) == np.clip(world.gt.to_numpy(t), 0, 9)[..., None])
    args = (h, weight, bias) if biased else (h, weight)

    def found(h, weight, bias=None):
        loss = world.gt.linear_cross_entropy(
            h, weight, t, bias, label_smoothing=smoothing, reduction=reduction, tile_size=TILE
        )
        return world.xp.sum(factor * loss) if reduction == "none" else loss

    def wanted(h, weight, bias=None):
        s = h @ weight.T + (0 if bias is None else bias)
        loss = world.logsumexp(s, 2) - smoothing * world.xp.mean(s, axis=2)
        own = world.xp.sum(world.xp.where(hot, s, s * 0), axis=2)
        loss = loss - (1 - smoothing) * own
        counts = t != -100
        loss = world.xp.where(counts, loss, loss * 0)
        if reduction == "none":
            return world.xp.sum(factor * loss)
        return world.xp.sum(loss) / (6 if reduction == "mean" else 1)

    world.holds(found, wanted, args)


def test_pytorchs_own_cross_entropy_agrees():
    import torch

    import gradtools.torch as gt

    h, weight, bias = World("torch").arrays((8, 3), (10, 3), (10,))
    t = torch.tensor([3, 9, -100, 0, 1, 1, -100, 7])
    for smoothing in (0.0, 0.3):
        dense = torch.nn.functional.cross_entropy(h @ weight.T + bias, t, label_smoothing=smoothing)
        found = gt.linear_cross_entropy(
            h, weight, t, bias, label_smoothing=smoothing, tile_size=TILE
        )
        torch.testing.assert_close(found, dense, rtol=1e-12, atol=1e-12)


@pytest.mark.slow_at("jax")
def test_a_target_that_is_no_class_gives_nan(world):
    h, weight = world.arrays((2, 3), (4, 3))
    (t,) = world.ints([1, 4])
    loss = world.gt.to_numpy(world.gt.linear_cross_entropy(h, weight, t, reduction="none"))
    assert np.isfinite(loss[0]) and np.isnan(loss[1])


# --- attention ---------------------------------------------------------------------------

MASKS = {
    "none": None, "pairs": (2, 4, 5, 6), "shared pairs": (5, 6), "columns": (2, 1, 1, 6),
    "rows": (4, 5, 1), "heads": (4, 1, 1),
}  # fmt: skip


def dense_attention(w, q, k, v, mask, causal, boolean):
    groups = q.shape[1] // k.shape[1]
    k, v = (w.xp.repeat(z, groups, axis=1) for z in (k, v))
    s = q @ w.xp.permute_dims(k, (0, 1, 3, 2)) / np.sqrt(q.shape[-1])
    if mask is not None:
        s = w.where(mask, s, -np.inf) if boolean else s + mask
    if causal:
        s = w.where(w.gt.asarray(np.tri(*s.shape[-2:], dtype=bool)), s, -np.inf)
    return w.xp.exp(s - w.xp.expand_dims(w.logsumexp(s, 3), axis=3)) @ v


def attentions():
    """Each two of the choices meet in a case; of three, half of the cases are a sweep."""
    every = itertools.product((4, 2), enumerate(MASKS), (False, True), (False, True))
    for heads, (k, name), boolean, causal in every:
        if name != "none" or not boolean:
            marks = in_turn(heads // 2 + k + boolean + causal, 2)
            case = (heads, name, boolean, causal)
            yield pytest.param(*case, id="-".join(map(str, case)), marks=marks)


@pytest.mark.quick_at(("torch", "4-rows-True-True"))
@pytest.mark.sweep_at("jax")
@pytest.mark.parametrize(("heads", "name", "boolean", "causal"), [*attentions()])
def test_attention_is_that_of_its_scores(heads, name, boolean, causal, world):
    q, k, v, factor = world.arrays((2, 4, 5, 3), (2, heads, 6, 3), (2, heads, 6, 2), (2, 4, 5, 2))
    masks = ()
    if name != "none":
        (mask,) = world.arrays(MASKS[name], seed=3)
        if boolean:  # of every row a column is left: the first, which causal attention has, too
            first = np.zeros(MASKS[name], bool)
            first[..., 0] = True
            mask = world.gt.asarray((world.gt.to_numpy(mask) > 0) | first)
        masks = (mask,)
    closed = masks if boolean else ()
    args = (q, k, v, *(() if boolean else masks))

    def found(q, k, v, *mask):
        mask = (*mask, *closed, None)[0]
        out = world.gt.attention(
            q, k, v, mask, is_causal=causal, layout="heads_first", tile_size=TILE
        )
        return world.xp.sum(factor * out**2)

    def wanted(q, k, v, *mask):
        mask = (*mask, *closed, None)[0]
        return world.xp.sum(factor * dense_attention(world, q, k, v, mask, causal, boolean) ** 2)

    world.holds(found, wanted, args, rtol=1e-11)


def test_the_frameworks_own_layouts_and_numbers():
    import jax
    import jax.numpy as jnp
    import torch

    import gradtools.jax
    import gradtools.torch

    q, k, v = (np.random.default_rng(n).normal(size=(2, 6, 4, 3)) for n in range(3))
    ts, js = ([of(z) for z in (q, k, v)] for of in (torch.tensor, jnp.asarray))
    np.testing.assert_allclose(
        gradtools.torch.attention(*ts, is_causal=True, tile_size=TILE),
        torch.nn.functional.scaled_dot_product_attention(*ts, is_causal=True),
        rtol=1e-12, atol=1e-12,
    )  # fmt: skip
    np.testing.assert_allclose(
        gradtools.jax.attention(*js, is_causal=True, tile_size=TILE),
        jax.nn.dot_product_attention(*js, is_causal=True),
        rtol=1e-6, atol=1e-6,  # whose softmax is taken in float32
    )  # fmt: skip


@pytest.mark.slow_at("jax")
def test_a_scale_and_a_bias_of_python_are_exact(gt):
    x = gt.asarray(np.random.default_rng(0).normal(size=(6, 3)))
    loss = lambda scale, bias: float(gt.contrastive_loss(x, x * 2, scale, bias, sigmoid=True))
    exact = loss(gt.asarray(np.float64(0.1)), gt.asarray(np.float64(0.3)))
    for scale, bias in ((0.1, 0.3), (np.float64(0.1), np.float64(0.3))):
        assert abs(loss(scale, bias) - exact) <= 1e-15 * abs(exact)
