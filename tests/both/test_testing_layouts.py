"""match_parameters pairs the parameters of torch.nn models and of their flax or equinox ports."""

from __future__ import annotations

import operator

import numpy as np
import pytest

from gradtools import GradtoolsError
from gradtools.testing import Layout, cross_check, first_divergence, match_parameters

torch = pytest.importorskip("torch")
jax = pytest.importorskip("jax")
pytest.importorskip("flax")
eqx = pytest.importorskip("equinox")

import flax.linen as nn  # noqa: E402  only where flax is installed
import jax.numpy as jnp  # noqa: E402
from flax import nnx  # noqa: E402


def random_module(module):
    """Return the module with random parameters and running statistics in double precision."""
    module = module.double()
    generator = torch.Generator(torch.get_default_device()).manual_seed(0)
    with torch.no_grad():
        for name, x in module.state_dict().items():
            if x.is_floating_point():
                draw = torch.rand(x.shape, generator=generator, dtype=x.dtype)
                x.copy_(draw + 0.5 if name.endswith("var") else draw - 0.5)
    return module.eval()


def mapped(module, jax_params, **kwargs):
    """Return the mapping and the converted parameters after a check of their shapes."""
    mapping = match_parameters(module, jax_params, **kwargs)
    theirs = mapping.to_jax(module)
    like = jax_params if isinstance(jax_params, dict) else nnx.state(jax_params).to_pure_dict()
    shapes = jax.tree.map(lambda x: x.shape, theirs)
    assert shapes == jax.tree.map(lambda x: tuple(x.shape), like)
    return mapping, theirs


def agree(module, x, jax_out, move=lambda y: y):
    out = module(torch.as_tensor(x)).detach().numpy()
    np.testing.assert_allclose(move(out), np.asarray(jax_out), rtol=1e-12, atol=1e-13)


def conv(*args, **kwargs):
    return lambda: nn.Conv(*args, padding="VALID", **kwargs)


def conv_transpose(*args, **kwargs):
    return lambda: nn.ConvTranspose(*args, padding="VALID", **kwargs)


t = torch.nn
# name: PyTorch's layer, flax's layer, input shape, and whether the channel axis moves
LAYERS = {
    "linear": (lambda: t.Linear(3, 4), lambda: nn.Dense(4), (2, 3), False),
    "conv2d": (lambda: t.Conv2d(2, 5, (3, 2)), conv(5, (3, 2)), (2, 2, 7, 6), True),
    "grouped conv2d": (
        lambda: t.Conv2d(4, 6, 3, groups=2),
        conv(6, (3, 3), feature_group_count=2),
        (2, 4, 7, 6),
        True,
    ),
    "transposed conv2d": (
        lambda: t.ConvTranspose2d(2, 5, 3, 2),
        conv_transpose(5, (3, 3), (2, 2)),
        (2, 2, 4, 5),
        True,
    ),
    "layer norm": (lambda: t.LayerNorm(4), lambda: nn.LayerNorm(epsilon=1e-5), (3, 4), False),
    "group norm": (
        lambda: t.GroupNorm(2, 4),
        lambda: nn.GroupNorm(2, epsilon=1e-5),
        (3, 4, 5),
        True,
    ),
    "batch norm": (
        lambda: t.BatchNorm1d(4),
        lambda: nn.BatchNorm(use_running_average=True, epsilon=1e-5),
        (3, 4),
        False,
    ),
    "embedding": (lambda: t.Embedding(7, 4), lambda: nn.Embed(7, 4), None, False),
}


class One(nn.Module):
    """A port whose only layer is named `layer`, as in `TorchOne`."""

    make: object

    @nn.compact
    def __call__(self, x):
        return self.make().copy(name="layer")(x)


class TorchOne(torch.nn.Module):
    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, x):
        return self.layer(x)


@pytest.mark.slow_at("layer norm", "batch norm", "embedding")
@pytest.mark.whole_at("linear", "layer norm", "batch norm", "embedding")
@pytest.mark.parametrize("name", LAYERS)
def test_a_layer_of_linen_computes_the_same_with_the_mapped_parameters(name, rng):
    make, port, shape, channels = LAYERS[name]
    module = random_module(TorchOne(make()))
    x = np.array([[1, 2], [0, 6]]) if shape is None else rng.normal(size=shape)
    moved = np.moveaxis(x, 1, -1) if channels else x
    one = One(port)
    variables = jax.tree.map(lambda y: y, one.init(jax.random.key(0), moved))
    _, theirs = mapped(module, variables)
    agree(module, x, one.apply(theirs, moved), lambda y: np.moveaxis(y, 1, -1) if channels else y)


class Net(nnx.Module):
    def __init__(self, rngs):
        self.conv = nnx.Conv(2, 4, (3, 3), padding="VALID", rngs=rngs)
        self.norm = nnx.BatchNorm(4, use_running_average=True, epsilon=1e-5, rngs=rngs)
        self.layers = nnx.List([nnx.Linear(4, 4, rngs=rngs), nnx.Linear(4, 4, rngs=rngs)])

    def __call__(self, x):
        x = self.norm(self.conv(x)).mean((1, 2))
        for layer in self.layers:
            x = jnp.tanh(layer(x))
        return x


class TorchNet(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = torch.nn.Conv2d(2, 4, 3)
        self.norm = torch.nn.BatchNorm2d(4)
        self.layers = torch.nn.ModuleList([torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)])

    def forward(self, x):
        x = self.norm(self.conv(x)).mean((2, 3))
        for layer in self.layers:
            x = layer(x).tanh()
        return x


def test_a_network_of_nnx_computes_the_same_with_the_mapped_parameters(rng):
    module, port = random_module(TorchNet()), Net(nnx.Rngs(0))
    mapping, theirs = mapped(module, port)
    graph, state = nnx.split(port)
    state.replace_by_pure_dict(jax.tree.map(jnp.asarray, theirs))
    x = rng.normal(size=(2, 2, 6, 6))
    agree(module, x, nnx.merge(graph, state)(np.moveaxis(x, 1, -1)))
    assert mapping.left_out == ("norm.num_batches_tracked (an integer buffer)",)


def test_attention_with_one_matrix_is_split_and_paired_by_order(rng):
    options = {"batch_first": True, "dtype": torch.float64}
    layers = [random_module(t.MultiheadAttention(6, 2, **options)) for _ in range(2)]
    x = rng.normal(size=(2, 5, 6))

    class Port(nn.Module):
        @nn.compact
        def __call__(self, x):
            for name in ("a", "b"):
                x = nn.MultiHeadDotProductAttention(2, name=name)(x)
            return x

    _, theirs = mapped(t.ModuleList(layers), Port().init(jax.random.key(0), x))
    y = torch.as_tensor(x)
    for layer in layers:
        y = layer(y, y, y)[0]
    np.testing.assert_allclose(y.detach(), Port().apply(theirs, x), rtol=1e-12, atol=1e-13)


def test_overrides_rename_modules_and_arrays_and_say_how_they_lie(rng):
    mine = {
        "a.x.weight": rng.normal(size=(2, 2)),
        "scale": rng.normal(size=(2, 3)),
        "b": np.ones(9),
    }
    theirs = {"q": {"x": {"kernel": np.ones((2, 2))}}, "gain": np.ones((3, 2))}
    overrides = {"a": "q", "scale": ("gain", (1, 0)), "b": None}
    mapping = match_parameters(mine, theirs, overrides)
    found = mapping.to_jax({name: mine[name] for name in ("a.x.weight", "scale")})
    np.testing.assert_array_equal(found["gain"], mine["scale"].T)
    np.testing.assert_array_equal(found["q"]["x"]["kernel"], mine["a.x.weight"].T)
    assert mapping.left_out == ("b (as in overrides)",)
    mirrored = Layout("mirrored", (1, 0), reversed_axes=(0,))
    found = match_parameters(mine, theirs, {**overrides, "scale": ("gain", mirrored)})
    np.testing.assert_array_equal(found.to_jax(mine)["gain"], mine["scale"].T[::-1])


def test_modules_are_paired_by_the_longest_common_end_of_their_names():
    names = {
        "bert.enc.0.fc": "model.enc_0.fc",
        "bert.enc.1.fc": "model.enc_1.fc",
        "bert.out.fc": "model.out.fc",
        "bert.pool.fc": "pooler.fc",
        "head": "model.head",
    }
    mine = {f"{name}.weight": np.ones((3, 3)) for name in names}
    theirs = {}
    # the alphabetical order of the names would pair the wrong modules
    for path in reversed(names.values()):
        place = theirs
        for key in path.split("."):
            place = place.setdefault(key, {})
        place["kernel"] = np.ones((3, 3))
    mapping = match_parameters(mine, theirs)
    found = {e.torch_name.removesuffix(".weight"): e.jax_path[:-1] for e in mapping.entries}
    assert found == {name: tuple(path.split(".")) for name, path in names.items()}
    assert not mapping.notes


# --- recurrent layers and weight normalization


class Recurrent(torch.nn.Module):
    """A recurrent layer, or two stacked layers, that returns the outputs of the last layer."""

    def __init__(self, kind, **options):
        super().__init__()
        self.rnn = getattr(torch.nn, kind)(3, 4, batch_first=True, **options)

    def forward(self, x):
        return self.rnn(x)[0]


def linen_cells(cell, layers=1):
    class Port(nn.Module):
        @nn.compact
        def __call__(self, x):
            for i in range(layers):
                x = nn.RNN(cell(4, param_dtype=jnp.float64), name=f"rnn_{i}")(x)
            return x

    return Port()


def nnx_cells(cell):
    return nnx.RNN(cell(3, 4, param_dtype=jnp.float64, rngs=nnx.Rngs(0)), rngs=nnx.Rngs(0))


CELLS = {
    "linen LSTM": ("LSTM", {}, lambda: linen_cells(nn.LSTMCell)),
    "linen LSTM, two layers": ("LSTM", {"num_layers": 2}, lambda: linen_cells(nn.LSTMCell, 2)),
    "linen GRU": ("GRU", {}, lambda: linen_cells(nn.GRUCell)),
    "linen simple": ("RNN", {}, lambda: linen_cells(nn.SimpleCell)),
    "nnx LSTM": ("LSTM", {}, lambda: nnx_cells(nnx.LSTMCell)),
    "nnx GRU": ("GRU", {}, lambda: nnx_cells(nnx.GRUCell)),
}


@pytest.mark.slow_at("linen LSTM", "linen simple", "nnx LSTM", "linen LSTM, two layers")
@pytest.mark.parametrize("name", CELLS)
def test_a_recurrent_layer_computes_the_same_with_the_mapped_parameters(name, rng):
    kind, options, make = CELLS[name]
    module, port = random_module(Recurrent(kind, **options)), make()
    x = rng.normal(size=(2, 5, 3))
    if name == "nnx GRU":  # flax has no second bias for the gate n
        with torch.no_grad():
            module.rnn.bias_hh_l0[8:] = 0
    if name.startswith("linen"):
        blank = port.init(jax.random.key(0), x)
        mapping = match_parameters(module, blank)
        port, out = (port, mapping.to_jax(module)), port.apply(mapping.to_jax(module), x)
    else:
        mapping = match_parameters(module, port)
        port = mapping.into(port)
        out = port(x)
    agree(module, x, out)
    assert first_divergence(module, port, (x,), mapping)
    # the mapping sums the two biases and their tangents, but not their gradients
    if name in ("linen LSTM", "linen GRU"):
        assert cross_check(torch=module, jax=port, args=(x,), mapping=mapping, order=1)


def test_layers_of_one_size_are_paired_by_name_and_a_bias_may_be_left_out():
    gates = [side + gate for side in "ih" for gate in "rzn"]
    cell = {gate: {"kernel": np.ones((3, 3)), "bias": np.ones(3)} for gate in gates}
    theirs = {name: {"cell": cell} for name in ("first", "second")}
    module = t.ModuleDict({name: t.GRU(3, 3, bias=False) for name in ("second", "first")})
    mapping = match_parameters(module, theirs, partial=True)
    pairs = {(e.torch_name.split(".")[0], e.jax_path[0]) for e in mapping.entries}
    assert pairs == {("first", "first"), ("second", "second")} and len(mapping.entries) == 12
    assert len(mapping.left_out) == 12 and all("bias" in name for name in mapping.left_out)


def test_a_scalar_and_layers_named_like_gates_are_paired():
    mine = {"i.weight": np.ones((3, 2)), "h.weight": np.ones((4, 3)), "scale": np.array(0.5)}
    theirs = {
        "i": {"kernel": np.ones((2, 3))},
        "h": {"kernel": np.ones((3, 4))},
        "scale": np.ones(()),
    }
    found = match_parameters(mine, theirs).to_jax(mine)
    assert jax.tree.map(np.shape, found) == jax.tree.map(np.shape, theirs)


@pytest.mark.parametrize("kind", ["LSTM", "GRU"])
def test_a_cell_of_equinox_gets_its_numbers_in_one_call(kind, rng):
    module = random_module(getattr(torch.nn, f"{kind}Cell")(3, 4))
    cell = getattr(eqx.nn, f"{kind}Cell")(3, 4, key=jax.random.key(0))
    cell = match_parameters(module, cell).into(cell)
    x, h, c = rng.normal(size=3), rng.normal(size=4), rng.normal(size=4)
    tensors = [torch.as_tensor(a)[None] for a in (x, h, c)]
    state = (tensors[1], tensors[2]) if kind == "LSTM" else tensors[1]
    out = module(tensors[0], state)
    theirs = cell(x, (h, c) if kind == "LSTM" else h)
    for a, b in zip(jax.tree.leaves(out), jax.tree.leaves(theirs), strict=True):
        np.testing.assert_allclose(a[0].detach(), b, rtol=1e-6)


@pytest.mark.parametrize("wrapper", ["weight_norm", "parametrizations.weight_norm"])
@pytest.mark.parametrize("library", ["linen", "equinox"])
def test_a_normalized_weight_is_paired_with_its_norm_and_direction(wrapper, library, rng):
    wrap = operator.attrgetter(wrapper)(torch.nn.utils)
    module, x = TorchOne(random_module(torch.nn.Linear(3, 4))), rng.normal(size=(2, 3))
    module.layer = wrap(module.layer)
    with torch.no_grad():
        next(p for p in module.parameters() if p.shape == (4, 1)).mul_(1.5)

    class Port(nn.Module):
        @nn.compact
        def __call__(self, x):
            return nn.WeightNorm(nn.Dense(4, name="layer"))(x)

    if library == "linen":
        port, blank = Port(), Port().init(jax.random.key(0), x)
        mapping = match_parameters(module, blank)
        out = module(torch.as_tensor(x)).detach()  # flax adds an epsilon to the norm
        np.testing.assert_allclose(out, port.apply(mapping.to_jax(module), x), rtol=1e-9)
    else:
        port = Holder(eqx.nn.WeightNorm(eqx.nn.Linear(3, 4, key=jax.random.key(0))))
        port = match_parameters(module, port).into(port)
        out = module(torch.as_tensor(x)).detach().numpy()
        np.testing.assert_allclose(out, jax.vmap(port.layer)(x), rtol=1e-5)


class Holder(eqx.Module):
    layer: eqx.nn.WeightNorm


def linear_pair(width=3):
    port = eqx.nn.Linear(width, 2, key=jax.random.key(0))
    return torch.nn.Linear(3, 2), port


def linear_mapping():
    return match_parameters(*linear_pair())


def without(arrays, name, **more):
    return {k: x for k, x in arrays.items() if k != name} | more


def gru_mapping(change):
    module, cell = torch.nn.GRU(3, 2), nnx.RNN(nnx.GRUCell(3, 2, rngs=nnx.Rngs(0)))
    return match_parameters(module, cell).to_jax(change(module.state_dict()))


SWAPPED = "Are the arguments swapped? Call match_parameters(torch_model, jax_model)."
BAD_MAPPINGS = {
    "into a torch module": (
        lambda: linear_mapping().into(torch.nn.Linear(3, 2)),
        "into: expected JAX's parameters, the variables of flax.linen, an nnx.Module or State, an "
        "equinox.Module, or nested dictionaries of arrays; got the torch.nn module Linear.",
    ),
    "into a linen module": (
        lambda: linear_mapping().into(nn.Dense(2)),
        "got the flax.linen module Dense.",
    ),
    "into a model with other layers": (
        lambda: linear_mapping().into(eqx.nn.MLP(3, 2, 4, 1, key=jax.random.key(0))),
        "into: weight has shape (2, 3) in the mapping; this model has no such array. Make the "
        "mapping from this model.",
    ),
    "into an nnx model with other layers": (
        lambda: linear_mapping().into(nnx.Linear(3, 2, rngs=nnx.Rngs(0))),
        "into: weight has shape (2, 3) in the mapping; this model has no such array.",
    ),
    "into a model of another size": (
        lambda: linear_mapping().into(linear_pair(4)[1]),
        "into: weight has shape (2, 3) in the mapping; this model has (2, 4).",
    ),
    "swapped arguments": (
        lambda: match_parameters(*linear_pair()[::-1]),
        "match_parameters: expected PyTorch's parameters, a torch.nn.Module or a dictionary from "
        f"names to arrays; got the equinox module Linear. {SWAPPED}",
    ),
    "swapped dictionaries and modules": (
        lambda: match_parameters({"params": {"kernel": np.ones((3, 2))}}, torch.nn.Linear(3, 2)),
        f"got the torch.nn module Linear. {SWAPPED}",
    ),
    "a linen module without its variables": (
        lambda: match_parameters(torch.nn.Linear(3, 2), nn.Dense(2)),
        "dictionaries of arrays; got the flax.linen module Dense.",
    ),
    "other sizes": (
        lambda: match_parameters(*linear_pair(4)),
        "The shapes of weight (2, 3) and weight (2, 4) do not correspond. Pair",
    ),
    "to_jax of the JAX model": (
        lambda: linear_mapping().to_jax(linear_pair()[1]),
        "to_jax: expected PyTorch's parameters, a torch.nn.Module or a dictionary from names to "
        "arrays; got the equinox module Linear.",
    ),
    "to_jax of gradients that are None": (
        lambda: linear_mapping().to_jax({"weight": None}),
        "to_jax: weight is None; expected an array of shape (2, 3) for weight -> weight (as "
        "it is). Names without arrays may be omitted.",
    ),
    "to_jax of another shape": (
        lambda: linear_mapping().to_jax({"weight": np.ones((3, 2))}),
        "to_jax: weight has shape (3, 2); expected an array of shape (2, 3) for",
    ),
    "to_jax of one of two biases": (
        lambda: gru_mapping(lambda arrays: without(arrays, "bias_hh_l0")),
        "to_jax: bias_hh_l0 is None; expected an array of shape (6,) for bias_ih_l0 + "
        "bias_hh_l0 -> cell/dense_i/bias (recurrent). Names",
    ),
    "to_jax of one bias that is None": (
        lambda: gru_mapping(lambda arrays: without(arrays, "bias_hh_l0", bias_hh_l0=None)),
        "to_jax: bias_hh_l0 is None;",
    ),
    "a layout of another rank": (
        lambda: Layout("linear", axes=(2, 0, 1)).to_jax(np.ones((2, 3))),
        "Layout.to_jax: Layout(name='linear', axes=(2, 0, 1), reversed_axes=(), shape=None, "
        "rows=None) does not fit an array of shape (2, 3): axes don't match array.",
    ),
    "an override of another rank": (
        lambda: match_parameters(*linear_pair(), {"weight": ("weight", (0, 1, 2))}),
        "axes=(0, 1, 2), reversed_axes=(), shape=None, rows=None) does not fit an array of shape",
    ),
}


@pytest.mark.parametrize("name", BAD_MAPPINGS)
def test_a_wrong_use_of_a_mapping_is_refused_with_its_reason(name):
    call, text = BAD_MAPPINGS[name]
    with pytest.raises(GradtoolsError) as caught:
        call()
    assert text in str(caught.value)


def test_into_takes_parts_and_shapes_of_the_model(rng):
    mine, port = linear_pair()
    mapping = match_parameters(mine, port)
    for like in (port, eqx.filter(port, eqx.is_array), eqx.filter_eval_shape(lambda: port)):
        assert (mapping.into(like).bias == mine.bias.detach().numpy()).all()
    mine = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.BatchNorm1d(2))
    rngs = nnx.Rngs(0)
    port = nnx.Sequential(nnx.Linear(3, 2, rngs=rngs), nnx.BatchNorm(2, rngs=rngs))
    mapping = match_parameters(mine, port)
    for like in (nnx.state(port), nnx.state(port, nnx.Param)):  # the latter without statistics
        bias = jax.tree.leaves(mapping.into(like)["layers"][0]["bias"])[0]
        assert (bias == mine[0].bias.detach().numpy()).all()
    variables = nn.Dense(2).init(jax.random.key(0), np.ones((1, 3)))
    mapping = match_parameters(mine[0], variables["params"])
    assert mapping.into(variables)["params"]["kernel"].shape == (3, 2)


def test_a_layout_converts_the_tensors_of_both_frameworks():
    layout = Layout("linear", axes=(-1, 0))
    for x in (torch.ones(2, 3, requires_grad=True), jnp.ones((2, 3)), np.ones((2, 3))):
        assert layout.to_jax(x).shape == (3, 2)
