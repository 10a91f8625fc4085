"""Tests bridged models: state, random keys, train and eval mode, optimizers and gradient edits."""

import copy

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch
from torch import nn

import gradtools.jax as gj
import gradtools.torch as gt
from gradtools import GradtoolsError, bridge
from tests.both.test_bridge_calls import near

X = np.random.default_rng(0).standard_normal((8, 4))
KEY = jax.random.key(1)


def network(dropout=0.0):
    torch.manual_seed(0)
    layers = nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Dropout(dropout), nn.Linear(6, 2)
    return nn.Sequential(*layers).double()


# --- a module in JAX ---------------------------------------------------------------------


def test_a_module_trains_by_optax_as_by_torch_over_50_steps_with_its_batch_statistics():
    model = network()
    apply, params, state = bridge.to_jax(model, train=True)
    tx = optax.sgd(0.05, momentum=0.9)

    @jax.jit
    def step(params, state, opt):
        def loss(params):
            out, new = apply(params, state, jnp.asarray(X))
            return (out**2).mean(), new

        (value, state), grads = jax.value_and_grad(loss, has_aux=True)(params)
        updates, opt = tx.update(grads, opt)
        return optax.apply_updates(params, updates), state, opt, value

    opt, found = tx.init(params), []
    for _ in range(50):
        params, state, opt, value = step(params, state, opt)
        found.append(float(value))

    native, expected = copy.deepcopy(model).train(), []
    sgd = torch.optim.SGD(native.parameters(), lr=0.05, momentum=0.9)
    for _ in range(50):
        sgd.zero_grad()
        value = (native(torch.from_numpy(X)) ** 2).mean()
        value.backward()
        sgd.step()
        expected.append(value.item())
    near(found, expected)
    for name, p in native.named_parameters():
        near(params[name], p.detach(), 1e-11)
    for name, b in native.named_buffers():
        near(state[name], b, 1e-11)
    assert int(state["1.num_batches_tracked"]) == 50
    for name, p in network().state_dict().items():  # the PyTorch module itself is unchanged
        assert torch.equal(p, model.state_dict()[name])


def test_dropout_follows_the_key_and_its_gradient_is_that_of_the_same_mask():
    apply, params, state = bridge.to_jax(network(0.5), train=True)
    value = lambda p, key: (apply(p, state, jnp.asarray(X), key=key)[0] ** 2).sum()
    one, other = jax.random.split(KEY)
    assert float(value(params, one)) == float(jax.jit(value)(params, one))
    assert float(value(params, one)) != float(value(params, other))
    weight, eps = params["4.weight"], 1e-6
    slope = jax.jit(jax.grad(value))(params, one)["4.weight"][0, 0]
    at = lambda s: value({**params, "4.weight": weight.at[0, 0].add(s)}, one)
    near(slope, (at(eps) - at(-eps)) / (2 * eps), 1e-6)
    with pytest.raises(GradtoolsError, match=r"draws random numbers.*pass a key to apply"):
        apply(params, state, jnp.asarray(X))


# --- a model in PyTorch ------------------------------------------------------------------


def flax_network():
    linen = pytest.importorskip("flax.linen")

    class Network(linen.Module):
        @linen.compact
        def __call__(self, x, train=True):
            x = linen.Dense(6, param_dtype="float64")(x)
            x = linen.BatchNorm(use_running_average=not train, param_dtype="float64")(x)
            x = linen.Dropout(0.5, deterministic=not train)(jnp.tanh(x))
            return linen.Dense(2, param_dtype="float64")(x)

    model = Network()
    return model, model.init({"params": KEY, "dropout": KEY}, jnp.asarray(X))


@pytest.mark.slow
def test_a_flax_model_is_a_module_that_trains_keeps_statistics_and_saves():
    model, variables = flax_network()
    module = bridge.to_torch(model, variables=variables)
    assert "Dense_0.kernel" in dict(module.named_parameters())
    adam = torch.optim.Adam(module.parameters(), lr=0.01)
    x, losses = torch.from_numpy(X), []
    torch.manual_seed(0)
    for _ in range(30):
        adam.zero_grad()
        loss = (module.train()(x) ** 2).mean()
        loss.backward()
        adam.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0] / 2
    out = module.eval()(x)
    assert torch.equal(out, module(x))
    params = {
        layer: {
            k: v.detach().numpy()
            for k, v in dict(getattr(module, layer).named_parameters()).items()
        }
        for layer in ("Dense_0", "BatchNorm_0", "Dense_1")
    }
    stats = {
        "BatchNorm_0": {
            k: np.array(module.get_buffer(f"batch_stats.BatchNorm_0.{k}")) for k in ("mean", "var")
        }
    }
    near(out.detach(), model.apply({"params": params, "batch_stats": stats}, X, train=False))
    again = bridge.to_torch(model, variables=variables).eval()
    again.load_state_dict(module.state_dict())
    assert torch.equal(again(x), out)


def test_the_gradient_of_a_flax_model_with_a_key_is_flaxes_own():
    model, variables = flax_network()
    module = bridge.to_torch(model, variables=variables).train()
    key = torch.tensor([3, 4])
    (module(torch.from_numpy(X), key=key) ** 2).sum().backward()
    apply, params, state = gj.make_functional(model, variables=variables, train=True)
    own_key = jax.random.fold_in(jax.random.key(3), 4)
    of = lambda p: (apply(p, state, jnp.asarray(X), key=own_key)[0] ** 2).sum()
    expected = jax.grad(of)(params)
    for layer, tree in expected.items():
        for name, g in tree.items():
            near(module.get_parameter(f"{layer}.{name}").grad, g)


def test_an_equinox_model_is_a_module_under_vmap_and_compile():
    eqx = pytest.importorskip("equinox")
    model = eqx.nn.MLP(4, 2, 8, 1, key=KEY, dtype=jnp.float64)
    module = bridge.to_torch(model)
    near(torch.func.vmap(module)(torch.from_numpy(X)).detach(), jax.vmap(model)(jnp.asarray(X)))
    (module(torch.from_numpy(X[0])) ** 2).sum().backward()
    expected = eqx.filter_grad(lambda m: (m(jnp.asarray(X[0])) ** 2).sum())(model)
    near(module.layers.get_submodule("0").weight.grad, expected.layers[0].weight)


def test_other_tensors_stand_in_for_the_parameters_of_a_jax_model():
    eqx = pytest.importorskip("equinox")
    module = bridge.to_torch(eqx.nn.Linear(4, 2, key=KEY, dtype=jnp.float64)).eval()
    x, weight = torch.from_numpy(X[0]), module.weight.detach()
    loss = lambda ps: (torch.func.functional_call(module, ps, (x,)) ** 2).sum()
    expected = 2 * torch.outer(module(x), x).detach()
    near(
        torch.func.grad(loss)({"weight": weight, "bias": module.bias.detach()})["weight"], expected
    )
    apply, params, state = gt.make_functional(module)
    near(gt.grad(lambda ps: (apply(ps, state, x)[0] ** 2).sum())(params)["weight"], expected)
    torch.nn.utils.parametrizations.weight_norm(module)
    near(module(x).detach(), torch.nn.functional.linear(x, weight, module.bias).detach())


# --- gradtools' own operators through the bridge -----------------------------------------


def test_a_reversal_inside_a_torch_function_reverses_in_jax():
    f = bridge.to_jax(lambda x: (gt.reverse_gradient(x, 0.5) ** 2).sum())
    near(jax.jit(jax.grad(f))(jnp.ones(3)), -np.ones(3))
    near(jax.hessian(f)(jnp.ones(2)), 0.5 * np.eye(2))


def test_what_a_guest_refuses_is_refused_with_its_own_words():
    clip = bridge.to_jax(lambda x: gt.clip_gradient(x, 1.0).sum())
    near(jax.grad(clip)(jnp.ones(1)), np.ones(1))
    with pytest.raises(GradtoolsError, match="reverse rule only"):
        jax.jvp(clip, (jnp.ones(1),), (jnp.ones(1),))


def test_a_refused_evaluation_draws_no_key():
    model = eqx.nn.MLP(4, 2, 3, 1, key=KEY)
    module = bridge.to_torch(model).eval()
    state = torch.get_rng_state()
    with pytest.raises(GradtoolsError, match="was given a"):
        module(jnp.ones(4))
    assert torch.equal(state, torch.get_rng_state())


# --- mistakes ----------------------------------------------------------------------------


ROWS = jnp.ones((3, 2), "float32")


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (
            lambda p, s: (p, ROWS),
            "apply: state must be a dictionary .* got a ",
        ),
        (
            lambda p, s: (s, p, ROWS),
            r"apply: params must contain .* missing: \['weight'",
        ),
        (lambda p, s: ({"weight": p["weight"]}, s), r"apply: params .* missing: \['bias'\]"),
    ],
)
def test_apply_names_the_state_or_params_that_are_missing_or_swapped(given, words):
    apply, params, state = bridge.to_jax(nn.BatchNorm1d(2).eval())
    for run in (apply, jax.jit(apply)):
        with pytest.raises(GradtoolsError, match=words):
            run(*given(params, state))
        run(dict(reversed(params.items())), state, ROWS)


def test_a_model_of_the_framework_to_which_it_is_converted_is_refused_by_name():
    linen, nnx = pytest.importorskip("flax.linen"), pytest.importorskip("flax.nnx")
    models = nnx.Linear(2, 1, rngs=nnx.Rngs(0)), linen.Dense(1), eqx.nn.Linear(2, 1, key=KEY)
    for model in models:
        with pytest.raises(
            GradtoolsError, match=r"to_jax: got an? .* model of PyTorch. To convert"
        ):
            bridge.to_jax(model)
    with pytest.raises(
        GradtoolsError, match=r"to_torch: got a torch.* PyTorch to JAX, call to_jax"
    ):
        bridge.to_torch(nn.Linear(2, 1))
