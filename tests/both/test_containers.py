"""Tests arguments and outputs of models in mappings, dataclasses and other containers."""

from __future__ import annotations

import collections
import dataclasses

import numpy as np
import pytest
import torch

import gradtools.jax as gj
import gradtools.torch as gt_torch

X = np.random.default_rng(0).normal(size=(5, 2))
MASK = np.array([1.0, 0.0, 1.0, 1.0, 0.0])


@dataclasses.dataclass
class Output:
    x: object
    mask: object = None
    name: str = "encoder"


@dataclasses.dataclass(frozen=True, slots=True)
class Frozen:
    x: object
    mask: object


class Encoding(collections.UserDict):
    """A mapping like a tokenizer's BatchEncoding, with a second required constructor argument."""

    def __init__(self, data, encodings):
        super().__init__(data)
        self.encodings = encodings


class Own(dict):
    """A dict subclass with an attribute in addition to its items."""

    def __init__(self, data, label):
        super().__init__(data)
        self.label = label


class Record(collections.OrderedDict):
    """Like a ModelOutput, a dict whose items are attributes and whose `update` raises an error."""

    def __setitem__(self, key, value):
        super().__setitem__(key, value)
        setattr(self, key, value)

    def update(self, *args, **kwargs):
        raise Exception("You cannot use update.")


Pair = collections.namedtuple("Pair", "x mask")


KINDS = {
    "a dict": lambda x, m: {"x": x, "mask": m},
    "a UserDict": lambda x, m: Encoding({"x": x, "mask": m}, ["tokens"]),
    "a dict subclass": lambda x, m: Own({"x": x, "mask": m}, "train"),
    "a dict subclass without update": lambda x, m: Record({"x": x, "mask": m}),
    "a dataclass": Output,
    "a frozen dataclass with slots": Frozen,
    "a named tuple": Pair,
    "a dataclass in a UserDict in a list": lambda x, m: [Encoding({"y": Output(x, m)}, [])],
}


def inside(tree):
    """Return `x` and `mask` of a mapping or object; for a list, of entry "y" of its first dict."""
    if isinstance(tree, list):
        return inside(tree[0]["y"])
    if isinstance(tree, Record):
        assert tree["x"] is tree.x and tree["mask"] is tree.mask
    if isinstance(tree, collections.abc.Mapping):
        return tree["x"], tree["mask"]
    return tree.x, tree.mask


def lists_of(tree):
    """Convert a list to a tuple, because a list as an argument means a list of examples."""
    return tuple(tree) if type(tree) is list else tree


@pytest.mark.slow_at("jax")
@pytest.mark.sweep_at(("jax", "a dict"))
@pytest.mark.parametrize("kind", KINDS)
def test_a_container_of_arrays_is_split_and_joined(gt, kind):
    make = KINDS[kind]

    def f(w, batch):
        x, mask = inside(list(batch) if type(batch) is tuple and kind.endswith("list") else batch)
        return make(x * w, gt.xp.sin(mask * w))

    batch = lists_of(make(gt.asarray(X), gt.asarray(MASK)))
    w = gt.asarray(np.float64(2.0))
    out = gt.chunked(f, 2)(w, batch)
    assert type(out) is type(make(None, None))
    for found, wanted in zip(inside(out), (2 * X, np.sin(2 * MASK)), strict=True):
        np.testing.assert_allclose(gt.to_numpy(found), wanted, rtol=1e-14)

    def loss(w):
        x, mask = inside(gt.chunked(f, 2)(w, batch))
        return (x**2).sum() * (mask**2).sum()

    found = gt.to_numpy(gt.grad(loss)(w))
    a, b = (X**2).sum(), (np.sin(2 * MASK) ** 2).sum()
    np.testing.assert_allclose(found, 4 * a * b + 4 * a * (MASK * np.sin(4 * MASK)).sum())


@pytest.mark.parametrize(
    "kind", ["a UserDict", "a dict subclass without update", "a frozen dataclass with slots"]
)
def test_derivatives_come_in_the_container_that_the_argument_was(gt, kind):
    make = KINDS[kind]
    tree = make(gt.asarray(X), gt.asarray(MASK))
    f = lambda p: (inside(p)[0] ** 2).sum() + (inside(p)[1] ** 3).sum()
    found = gt.grad(f)(tree)
    assert type(found) is type(tree)
    x, mask = inside(found)
    np.testing.assert_allclose(gt.to_numpy(x), 2 * X)
    np.testing.assert_allclose(gt.to_numpy(mask), 3 * MASK**2)
    value, tangent = gt.jvp(lambda p: make(inside(p)[0] ** 2, inside(p)[1]), (tree,), (tree,))
    np.testing.assert_allclose(gt.to_numpy(inside(tangent)[0]), 2 * X**2)
    assert type(value) is type(tangent) is type(tree)


def test_what_checkpoint_computes_again_may_return_containers(gt):
    x = gt.asarray(X)
    f = gt.checkpoint(lambda x: {"out": Frozen(x**2, x.sum()), "none": None})
    out, pullback = gt.vjp(lambda x: (lambda y: y["out"].x * y["out"].mask)(f(x)), x)
    assert f(x)["none"] is None
    expected, plain = gt.vjp(lambda x: x**2 * x.sum(), x)
    np.testing.assert_allclose(gt.to_numpy(out), gt.to_numpy(expected))
    np.testing.assert_allclose(gt.to_numpy(pullback(out)[0]), gt.to_numpy(plain(expected)[0]))


COMPILED = {
    "a reversed dataclass": lambda gt, x, m: gt.reverse_gradient(Output(x**2)).x.sum(),
    "a clipped dataclass": lambda gt, x, m: gt.clip_gradient(Output(x**2), 0.1).x.sum(),
    "a gradient in a dataclass": lambda gt, x, m: gt.grad(lambda out: (out.x**3).sum())(
        Frozen(x, None)
    ).x.sum(),
    "gradients of examples in a dataclass": lambda gt, x, m: gt.per_example_grad(
        lambda w, out: (w**2 * out.x).sum()
    )(x, Output(m)).sum(),
}


@pytest.mark.quick_at("a clipped dataclass")
@pytest.mark.sweep_at("a reversed dataclass")
@pytest.mark.sweep_at("gradients of examples in a dataclass")
@pytest.mark.parametrize("name", COMPILED)
def test_compiled_pytorch_opens_containers_as_eager_does(name):
    x, m = torch.arange(1.0, 4.0), torch.arange(6.0).reshape(2, 3)
    program = lambda x: COMPILED[name](gt_torch, x, m)
    torch._dynamo.reset()
    compiled = torch.compile(program, backend="eager")
    mine, plain = (x.clone().requires_grad_() for _ in range(2))
    compiled(mine).backward()
    program(plain).backward()
    torch.testing.assert_close(mine.grad, plain.grad)


def test_nan_is_the_same_constant_in_all_chunks(gt):
    out, limit = gt.chunked(lambda x: (x * 2, float("nan")), 2)(gt.asarray(X))
    np.testing.assert_allclose(gt.to_numpy(out), 2 * X)
    assert np.isnan(limit)


# --- modules ------------------------------------------------------------------------------


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(2, 3)
        self.norm = torch.nn.BatchNorm1d(3)
        self.register_buffer("scale", torch.tensor(2.0))
        self.gain = 3.0

    def forward(self, x, shift=None):
        y = self.norm(self.linear(x)) * self.scale * self.gain
        return y if shift is None else y + shift

    def describe(self):
        return "a net"


def net():
    torch.manual_seed(0)
    return Net().double()


@pytest.mark.filterwarnings("ignore:chunked. .* batch normalization")
def test_a_chunked_torch_module_has_what_the_module_has():
    own = net()
    ours = gt_torch.chunked(own, 2)
    assert isinstance(ours, torch.nn.Module) and ours.describe() == "a net" and ours.gain == 3.0
    pairs = zip(ours.named_parameters(), own.named_parameters(), strict=True)
    assert all(a == b and p is q for (a, p), (b, q) in pairs)
    assert [n for n, _ in ours.named_buffers()] == [n for n, _ in own.named_buffers()]
    assert ours.state_dict().keys() == own.state_dict().keys()
    assert "Net(" in repr(ours)
    ours.eval()
    assert not own.training and not own.norm.training and not ours.training
    own.train()
    assert ours.training
    assert ours.float() is ours and own.linear.weight.dtype == torch.float32
    ours.requires_grad_(False)
    assert not own.linear.weight.requires_grad
    ours.gain = 5.0
    assert own.gain == 5.0
    with pytest.raises(AttributeError):
        _ = ours.nothing


@pytest.mark.filterwarnings("ignore:chunked. .* batch normalization")
def test_a_chunked_torch_module_trains_as_a_submodule():
    x = torch.tensor(X)
    grads = []
    for wrap in (lambda m: m, lambda m: gt_torch.chunked(m, 2)):
        model = torch.nn.Sequential(wrap(net().eval()), torch.nn.Tanh())
        model[0].linear.bias.data.fill_(0.1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        out = model(x)
        torch.logsumexp(out @ out.T, 1).sum().backward()
        optimizer.step()
        grads.append({k: v.clone() for k, v in model.state_dict().items()})
    assert grads[0].keys() == grads[1].keys()
    for k, v in grads[0].items():
        torch.testing.assert_close(grads[1][k], v, rtol=1e-12, atol=1e-12)


def test_a_chunked_equinox_module_is_a_tree_with_its_arrays():
    eqx = pytest.importorskip("equinox")
    import jax

    class Two(eqx.Module):
        encode: eqx.Module

        def __call__(self, x):
            return jax.numpy.tanh(self.encode(x))

    linear = eqx.nn.Linear(2, 3, key=jax.random.key(0))
    rows = eqx.filter_vmap

    class Rows(eqx.Module):
        linear: eqx.Module

        def __call__(self, x):
            return jax.vmap(self.linear)(x)

    loss = lambda m, x: jax.numpy.sum(m(x) @ m(x).T) ** 2
    x = jax.numpy.asarray(X)
    model = Two(gj.chunked(Rows(linear), 2))
    found = eqx.filter_jit(eqx.filter_grad(loss))(model, x)
    wanted = eqx.filter_grad(loss)(Two(Rows(linear)), x)
    pairs = zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True)
    for a, b in pairs:
        np.testing.assert_allclose(a, b, rtol=1e-10)
    np.testing.assert_allclose(jax.jit(gj.chunked(Rows(linear), 2))(x), Rows(linear)(x))
    assert rows is not None
