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


def test_an_equinox_module_takes_the_key_as_one_of_its_keyword_arguments():
    class Dropping(eqx.Module):
        drop: eqx.nn.Dropout

        def __call__(self, x, **kwargs):
            return self.drop(x, **kwargs)

    apply, params, state = make_functional(Dropping(eqx.nn.Dropout(0.5)))
    out, _ = apply(params, state, jnp.ones(64), key=KEY)
    assert np.array_equal(out, eqx.nn.Dropout(0.5)(jnp.ones(64), key=KEY))


# Calls of `apply` with wrong arguments and their errors, and valid calls that raise no error


def small_dense():
    net = eqx.nn.Linear(IN, OUT, key=KEY)
    return make_functional(net)


def small_stateful():
    net, memory = eqx.nn.make_with_state(Equinox)(0.0)
    return make_functional(net, variables=memory)


WRONG = {
    "nnx without state": (small_nnx, "px", r"state must be a dictionary .*got a jax.Array"),
    "nnx exchanged": (small_nnx, "spx", r"state .*missing: \['rngs', 'variables'\]"),
    "nnx without params": (small_nnx, "-sx", "params must be an nnx.State.*got None"),
    "nnx with state None": (small_nnx, "p-x", "state must be a dictionary .*got None"),
    "nnx with empty params": (small_nnx, "0sx", r"params .*missing: \['first', 'last'\]"),
    "nnx with empty state": (small_nnx, "p0x", r"state .*missing: \['rngs', 'variables'\]"),
    "linen without state": (small_linen, "px", r"state must be a dictionary .*got a jax.Array"),
    "linen exchanged": (small_linen, "spx", r"params .*unexpected: \['batch_stats'\]"),
    "linen without params": (small_linen, "-sx", "params must be a dictionary.*got None"),
    "linen with state None": (small_linen, "p-x", "state must be a dictionary .*got None"),
    "equinox without state": (small_dense, "px", "state must be an empty dict.*got a jax.Array"),
    "equinox exchanged": (small_dense, "spx", "params must be a Linear.*got a dict"),
    "equinox without params": (small_dense, "-sx", "params must be a Linear.*got None"),
    "equinox without its State": (small_stateful, "px", "state must be an eqx.nn.State"),
    "equinox exchanged State": (small_stateful, "spx", "params must be an Equinox.*got a State"),
    "equinox with State None": (small_stateful, "p-x", "state must be an eqx.nn.State.*got None"),
}


@pytest.mark.parametrize("case", WRONG)
def test_apply_names_the_argument_that_is_not_as_make_functional_returned_it(case):
    make, given, text = WRONG[case]
    apply, params, state = make()
    values_of = {"p": params, "s": state, "x": jnp.ones((BATCH, IN)), "-": None, "0": {}}
    with pytest.raises(
        GradtoolsError, match=rf"apply: {text}.*Call apply\(params, state, \*args\)"
    ):
        apply(*[values_of[letter] for letter in given])


def test_nnx_names_an_unexpected_attribute_of_params_and_a_part_of_state():
    apply, params, state = small_nnx()
    x = jnp.ones((BATCH, IN))
    with pytest.raises(GradtoolsError, match=r"params .*missing: none, unexpected: \['other'\]"):
        apply({**params, "other": params["last"]}, state, x)
    with pytest.raises(GradtoolsError, match=r"state .*missing: \['variables'\], unexpected: none"):
        apply(params, {"rngs": state["rngs"]}, x)
    with pytest.raises(GradtoolsError, match=r"state\['variables'\] must be an nnx.State"):
        apply(params, {**state, "variables": None}, x)


@pytest.mark.slow_at("small_linen")
@LIBRARIES
def test_apply_accepts_gradients_structs_and_batches_of_params_and_the_new_state(make):
    apply, params, state = make(0.0)
    x = jnp.asarray(inputs(), jnp.float32)
    out, new = apply(params, state, x, key=KEY)
    grads = jax.grad(lambda p: apply(p, state, x, key=KEY)[0].sum())(params)
    assert apply(grads, new, x, key=KEY)[0].shape == out.shape
    structs = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), (params, new))
    assert jax.eval_shape(lambda p, s: apply(p, s, x, key=KEY), *structs)[0].shape == out.shape
    batch = jax.tree.map(lambda a: jnp.stack([a, a]), params)
    outs = jax.vmap(lambda p: apply(p, state, x, key=KEY)[0])(batch)
    np.testing.assert_allclose(outs[1], out, rtol=1e-5, atol=1e-5)


def test_nnx_accepts_a_parameter_that_is_moved_to_the_state_to_freeze_it():
    apply, params, state = small_nnx(0.0)
    x = jnp.asarray(inputs(), jnp.float32)
    free = {name: part for name, part in params.items() if name != "first"}
    merged = nnx.merge_state(state["variables"], nnx.State({"first": params["first"]}))
    out, _ = apply(free, {**state, "variables": merged}, x)
    assert np.array_equal(out, apply(params, state, x)[0])


def test_nnx_accepts_plain_dicts_and_flat_states():
    apply, params, state = small_nnx(0.0)
    x = jnp.asarray(inputs(), jnp.float32)
    expected = apply(params, state, x)[0]
    plain = {name: dict(part) for name, part in params.items()}
    assert np.array_equal(apply(plain, state, x)[0], expected)
    flat = {name: nnx.to_flat_state(part) for name, part in state.items()}
    assert np.array_equal(apply(nnx.to_flat_state(params), flat, x)[0], expected)


class Sowing(linen.Module):
    @linen.compact
    def __call__(self, x):
        self.sow("intermediates", "x", x)
        return linen.Dense(OUT, name="dense")(x)

    @linen.compact
    def other(self, x):
        return linen.Dense(OUT, name="other")(x)


def test_linen_accepts_collections_and_parameters_that_the_first_call_did_not_have():
    x = jnp.ones((BATCH, IN))
    variables = {"params": Sowing().init(KEY, x)["params"]}
    apply, params, state = make_functional(Sowing(), variables=variables)
    out, new = apply(params, {**state, "intermediates": {}}, x)
    assert "x" in new["intermediates"]
    assert np.array_equal(apply(params, new, x)[0], out)
    assert np.array_equal(apply(params, {"dense": {}}, x)[0], out)  # named like a parameter
    other = {"other": params["dense"]}
    assert np.array_equal(apply(other, state, x, method="other")[0], out)
    without, *_ = make_functional(Sowing(), variables={})
    assert np.array_equal(without(params, state, x)[0], out)


@pytest.mark.parametrize("state", [{}, None, (), {"step": np.ones(())}], ids=str)
def test_equinox_without_a_state_returns_the_given_state(state):
    apply, params, _ = small_dense()
    assert apply(params, state, jnp.ones(IN))[1] is state
    apply, params, _ = make_functional(eqx.nn.Identity())
    assert apply(None, state, 1.0) == (1.0, state)
