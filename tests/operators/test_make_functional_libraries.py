"""Compares make_functional for flax.linen, flax.nnx and equinox with torch.nn.

The layers are dense, batch norm, tanh and dense. Two conventions differ. The running mean is
(1 - m) old + m batch in PyTorch and m old + (1 - m) batch in flax and equinox. The running variance
in PyTorch is unbiased, so it is n / (n - 1) times the variance in flax and equinox.
"""

import numpy as np
import pytest

from gradtools import GradtoolsError

jax = pytest.importorskip("jax")
linen = pytest.importorskip("flax.linen")
nnx = pytest.importorskip("flax.nnx")
eqx = pytest.importorskip("equinox")
import jax.numpy as jnp  # noqa: E402  only where jax is installed

from gradtools.jax.modules import make_functional  # noqa: E402

IN, HIDDEN, OUT, BATCH = 4, 8, 3, 6
MOMENTUM = 0.9
KEY = jax.random.key(5)


pytestmark = pytest.mark.usefixtures("default_precision")


class Linen(linen.Module):
    rate: float = 0.0

    @linen.compact
    def __call__(self, x, train):
        x = linen.Dense(HIDDEN, param_dtype=x.dtype)(x)
        x = linen.BatchNorm(not train, momentum=MOMENTUM, param_dtype=x.dtype)(x)
        x = linen.Dropout(self.rate, deterministic=not train)(jnp.tanh(x))
        return linen.Dense(OUT, param_dtype=x.dtype)(x)


class Nnx(nnx.Module):
    def __init__(self, rate=0.0, dtype=jnp.float32):
        rngs = nnx.Rngs(0)
        self.first = nnx.Linear(IN, HIDDEN, rngs=rngs, param_dtype=dtype)
        self.norm = nnx.BatchNorm(HIDDEN, momentum=MOMENTUM, rngs=rngs, param_dtype=dtype)
        self.drop = nnx.Dropout(rate, rngs=rngs)
        self.again = nnx.Dropout(rate, rngs=rngs)
        self.last = nnx.Linear(HIDDEN, OUT, rngs=rngs, param_dtype=dtype)

    def __call__(self, x):
        return self.last(self.again(self.drop(jnp.tanh(self.norm(self.first(x))))))


class Equinox(eqx.Module):
    first: eqx.nn.Linear
    norm: eqx.nn.BatchNorm
    drop: eqx.nn.Dropout
    last: eqx.nn.Linear

    def __init__(self, rate=0.0, dtype=jnp.float32):
        self.first = eqx.nn.Linear(IN, HIDDEN, key=KEY, dtype=dtype)
        self.norm = eqx.nn.BatchNorm(HIDDEN, "batch", momentum=MOMENTUM, mode="batch", dtype=dtype)
        self.drop = eqx.nn.Dropout(rate)
        self.last = eqx.nn.Linear(HIDDEN, OUT, key=KEY, dtype=dtype)

    def __call__(self, x, state, *, key=None):
        x, state = self.norm(self.first(x), state)
        return self.last(self.drop(jnp.tanh(x), key=key)), state


def weights():
    rng = np.random.default_rng(0)
    shapes = {"w1": (HIDDEN, IN), "b1": HIDDEN, "w2": (OUT, HIDDEN), "b2": OUT, "g": HIDDEN}
    return {name: rng.standard_normal(shape) for name, shape in shapes.items()}


def inputs():
    return np.random.default_rng(1).standard_normal((BATCH, IN))


def run_torch(train):
    torch = pytest.importorskip("torch")
    from gradtools.torch.modules import make_functional

    norm = torch.nn.BatchNorm1d(HIDDEN, momentum=1 - MOMENTUM)
    net = torch.nn.Sequential(
        torch.nn.Linear(IN, HIDDEN), norm, torch.nn.Tanh(), torch.nn.Linear(HIDDEN, OUT)
    )
    apply, params, state = make_functional(net.double(), train=train)
    names = {"w1": "0.weight", "b1": "0.bias", "g": "1.weight", "w2": "3.weight", "b2": "3.bias"}
    given = {names[n]: torch.tensor(w).requires_grad_() for n, w in weights().items()}
    out, new = apply({**params, **given}, state, torch.tensor(inputs()))
    (gradient,) = torch.autograd.grad(out.square().sum(), given["0.weight"])
    unbiased = BATCH / (BATCH - 1) if train else 1.0
    variance = new["1.running_var"] - MOMENTUM if train else new["1.running_var"]
    variance = variance / unbiased + (MOMENTUM if train else 0.0)
    return out.detach().numpy(), new["1.running_mean"].numpy(), variance.numpy(), gradient.numpy()


def in_jax(apply, params, state, read, place):
    def loss(w1):
        out, new = apply(place(params, w1), state, jnp.asarray(inputs()))
        return jnp.sum(out**2), (out, read(new))

    grad, (out, (mean, variance)) = jax.grad(loss, has_aux=True)(jnp.asarray(weights()["w1"]))
    return tuple(map(np.asarray, (out, mean, variance, grad)))


def run_linen(train):
    w = weights()
    variables = Linen().init(KEY, jnp.asarray(inputs()), train=False)
    apply, params, state = make_functional(Linen(), variables=variables, train=train)
    params = {
        "Dense_0": {"kernel": w["w1"].T, "bias": w["b1"]},
        "BatchNorm_0": {"scale": w["g"], "bias": np.zeros(HIDDEN)},
        "Dense_1": {"kernel": w["w2"].T, "bias": w["b2"]},
    }
    state = jax.tree.map(lambda x: x.astype(jnp.float64), state)
    return in_jax(
        apply,
        params,
        state,
        lambda new: (
            new["batch_stats"]["BatchNorm_0"]["mean"],
            new["batch_stats"]["BatchNorm_0"]["var"],
        ),
        lambda p, w1: {**p, "Dense_0": {**p["Dense_0"], "kernel": w1.T}},
    )


def run_nnx(train):
    w, net = weights(), Nnx(dtype=jnp.float64)
    net.first.kernel[...], net.first.bias[...] = w["w1"].T, w["b1"]
    net.last.kernel[...], net.last.bias[...] = w["w2"].T, w["b2"]
    net.norm.scale[...] = w["g"]
    apply, params, state = make_functional(net, train=train)
    wide = jax.tree.map(lambda x: x.astype(jnp.float64), state["variables"])
    state = {**state, "variables": wide}

    def place(params, w1):
        params = jax.tree.map(lambda x: x, params)
        params["first"]["kernel"] = nnx.Param(w1.T)
        return params

    def read(new):
        return new["variables"]["norm"]["mean"].get_value(), new["variables"]["norm"][
            "var"
        ].get_value()

    return in_jax(apply, params, state, read, place)


@pytest.fixture
def x64():
    with jax.enable_x64(True):
        yield


@pytest.mark.sweep_at("linen", "True")
@pytest.mark.parametrize("train", [True, False])
@pytest.mark.parametrize("run", [run_linen, run_nnx], ids=["linen", "nnx"])
def test_the_same_weights_give_pytorchs_numbers_and_batch_statistics(x64, run, train):
    for found, expected in zip(run(train), run_torch(train), strict=True):
        assert found.dtype == np.float64
        np.testing.assert_allclose(found, expected, rtol=1e-12, atol=1e-13)


# One call in each library


def small_linen(rate=0.5, train=True):
    variables = Linen(rate).init(KEY, jnp.ones((BATCH, IN)), train=False)
    return make_functional(Linen(rate), variables=variables, train=train)


def small_nnx(rate=0.5, train=True):
    return make_functional(Nnx(rate), train=train)


def small_equinox(rate=0.5, train=True):
    net, memory = eqx.nn.make_with_state(Equinox)(rate)
    apply, params, state = make_functional(net, variables=memory, train=train)

    def batched(params, state, x, key=None):
        keys = None if key is None else jax.random.split(key, len(x))
        one = jax.vmap(
            lambda row, key: apply(params, state, row, key=key),
            in_axes=(0, None if key is None else 0),
            axis_name="batch",
            out_axes=(0, None),
        )
        return one(x, keys)

    return batched, params, state


LIBRARIES = pytest.mark.parametrize("make", [small_linen, small_nnx, small_equinox])


def values(tree):
    leaves = jax.tree.leaves(tree)
    return [
        np.asarray(
            jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x
        ).copy()
        for x in leaves
    ]


def equal(a, b):
    return len(a) == len(b) and all(np.array_equal(x, y) for x, y in zip(a, b, strict=True))


@pytest.mark.sweep_at("small_nnx", "small_equinox")
@LIBRARIES
def test_the_same_key_gives_the_same_numbers_and_another_key_others(make):
    apply, params, state = make()
    x = jnp.asarray(inputs(), jnp.float32)
    first, second, other = (apply(params, state, x, key=jax.random.key(i))[0] for i in (0, 0, 1))
    assert np.array_equal(first, second) and not np.array_equal(first, other)


@pytest.mark.sweep_at("small_linen", "small_nnx")
@LIBRARIES
def test_state_goes_in_and_comes_out_in_one_structure_also_through_scan(make):
    apply, params, state = make()
    x = jnp.asarray(inputs(), jnp.float32)

    def step(state, key):
        out, state = apply(params, state, x, key=key)
        return state, out

    last, outs = jax.lax.scan(step, state, jax.random.split(KEY, 3))
    assert outs.shape == (3, BATCH, OUT)
    assert jax.tree.structure(last) == jax.tree.structure(state)
    assert not equal(values(last), values(state))


@pytest.mark.parametrize("make", [small_linen, small_equinox])
def test_randomness_without_a_key_is_refused_by_name(make):
    apply, params, state = make()
    with pytest.raises(GradtoolsError, match=r"pass key= to apply"):
        apply(params, state, jnp.ones((BATCH, IN)))


def test_nnx_without_a_key_counts_its_own_streams_on():
    apply, params, state = small_nnx()
    x = jnp.ones((BATCH, IN))
    out, new = apply(params, state, x)
    again, _ = apply(params, new, x)
    assert not np.array_equal(out, again)
    _, keyed = apply(params, state, x, key=KEY)
    assert equal(values(keyed["rngs"]), values(state["rngs"]))
