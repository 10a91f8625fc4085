"""make_functional turns a module of any library into a pure function with the same outputs."""

import copy
from functools import partial

import pytest

from gradtools import GradtoolsError

torch = pytest.importorskip("torch")
from torch import nn  # noqa: E402  only where torch is installed

import gradtools.torch as gt  # noqa: E402
from gradtools.torch.arrays import random_key  # noqa: E402
from gradtools.torch.modules import make_functional  # noqa: E402


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 3))


def batch(*shape):
    return torch.randn(*shape, generator=torch.Generator(torch.get_default_device()).manual_seed(1))


def contents(module):
    return {name: tensor.detach().clone() for name, tensor in module.state_dict().items()}


def same(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


# PyTorch: params and state


def test_params_are_detached_aliases_and_state_is_a_copy():
    net = network()
    _, params, state = make_functional(net)
    assert list(params) == [name for name, _ in net.named_parameters()]
    for name, p in net.named_parameters():
        assert params[name].data_ptr() == p.data_ptr() and not params[name].requires_grad
    for name, b in net.named_buffers():
        assert torch.equal(state[name], b) and state[name].data_ptr() != b.data_ptr()


def test_output_and_new_state_are_those_of_one_plain_call():
    net, x = network(), batch(6, 4)
    apply, params, state = make_functional(net)
    plain = copy.deepcopy(net)
    torch.manual_seed(3)
    expected = plain(x)
    torch.manual_seed(3)
    out, new_state = apply(params, state, x)
    assert torch.equal(out, expected)
    assert same(new_state, dict(plain.named_buffers()))
    assert not torch.equal(new_state["1.running_mean"], state["1.running_mean"])


def test_gradients_are_those_of_the_plain_module():
    net, x = network(), batch(6, 4)
    apply, params, state = make_functional(net, train=False)
    (expected,) = torch.autograd.grad(net.eval()(x).square().sum(), [net[0].weight])
    leaf = params["0.weight"].clone().requires_grad_()
    out, _ = apply({**params, "0.weight": leaf}, state, x)
    (found,) = torch.autograd.grad(out.square().sum(), [leaf])
    assert torch.equal(found, expected)
    assert net[0].weight.grad is None


# PyTorch: randomness


def test_the_same_key_gives_the_same_mask_and_another_key_another():
    apply, params, state = make_functional(nn.Dropout(0.5))
    ones = torch.ones(200)
    first, second = (apply(params, state, ones, key=random_key(0))[0] for _ in range(2))
    assert torch.equal(first, second)
    assert not torch.equal(first, apply(params, state, ones, key=random_key(1))[0])


def test_with_a_key_the_global_stream_is_untouched_and_without_one_it_advances():
    apply, params, state = make_functional(nn.Dropout(0.5))
    before = torch.get_rng_state()
    apply(params, state, torch.ones(9), key=random_key(0))
    assert torch.equal(before, torch.get_rng_state())
    apply(params, state, torch.ones(9))
    assert not torch.equal(before, torch.get_rng_state())


# PyTorch: unusual modules


def reparametrised(kind):
    return lambda: getattr(nn.utils.parametrizations, kind)(nn.Linear(4, 4))


TREES = {
    "lstm": lambda: nn.LSTM(4, 5, num_layers=2, bidirectional=True, dropout=0.3),
    "attention": lambda: nn.TransformerEncoderLayer(4, 2, 8),
    "weight_norm": reparametrised("weight_norm"),
    "old_spectral_norm": lambda: nn.utils.spectral_norm(nn.Linear(4, 4)),
}


@pytest.mark.parametrize("name", TREES)
def test_new_parameters_reach_every_part_of_the_tree(name):
    torch.manual_seed(0)
    net, x = TREES[name](), batch(3, 2, 4) if name != "embedding_bag" else batch(2, 3, 4)
    apply, params, state = make_functional(net)
    before = contents(net)
    moved = {name: p + 0.1 * torch.randn_like(p) for name, p in params.items()}
    torch.manual_seed(1)
    out, new_state = apply(moved, state, x)
    assert same(before, contents(net))
    with torch.no_grad():
        for name, p in net.named_parameters():
            p.copy_(moved[name])
    torch.manual_seed(1)
    expected = net(x)
    leaves = (out, expected) if isinstance(out, torch.Tensor) else (out[0], expected[0])
    assert torch.equal(*leaves)
    assert same(new_state, dict(net.named_buffers()))


def test_tied_parameters_and_shared_submodules_stay_tied():
    shared = nn.Linear(4, 4)
    net = nn.Sequential(shared, nn.Linear(4, 4), shared)
    net[1].weight = shared.weight
    apply, params, state = make_functional(net)
    assert list(params) == ["0.weight", "0.bias", "1.bias"]
    doubled = {name: 2 * p for name, p in params.items()}
    out, _ = apply(doubled, state, batch(2, 4))
    with torch.no_grad():
        [p.mul_(2) for p in net.parameters()]
    assert torch.equal(out, net(batch(2, 4)))


class Selfish(nn.Module):
    """A module whose attributes refer back to it through a method, a list, a partial and vmap."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.parents = [self]
        self.route = self.twice
        self.late = partial(Selfish.once, self)
        self.mapped = gt.vmap(self.inner)

    def once(self, x):
        return self.inner(x)

    def twice(self, x):
        return self.parents[0].inner(self.late(x)) + self.mapped(x)

    def forward(self, x):
        return self.route(x)


def test_what_the_tree_refers_to_inside_itself_is_the_copy():
    net = Selfish()
    apply, params, state = make_functional(net)
    zeros = {name: torch.zeros_like(p) for name, p in params.items()}
    assert not apply(zeros, state, batch(2, 4))[0].any()
    assert net(batch(2, 4)).any()


class Counting(nn.Module):
    """A module that counts its calls in a Python number and assigns a new buffer in each call."""

    def __init__(self):
        super().__init__()
        self.register_buffer("total", torch.zeros(()))
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        self.total = self.total + x.sum()
        return x * self.calls


def test_a_buffer_assigned_anew_is_in_the_new_state_and_numbers_stay_on_the_copy():
    net = Counting()
    apply, params, state = make_functional(net)
    for _ in range(2):
        out, new_state = apply(params, state, torch.ones(3))
        assert new_state["total"] == 3 and out.sum() == 3
    assert net.total == 0 and net.calls == 0 and state["total"] == 0


def test_it_runs_under_vmap_over_examples_and_over_models():
    net, x = network(), batch(6, 4)
    apply, params, state = make_functional(net, train=False)
    rows = torch.func.vmap(lambda row: apply(params, state, row[None])[0][0])(x)
    torch.testing.assert_close(rows, apply(params, state, x)[0])
    stacked = {name: torch.stack([p, 2 * p]) for name, p in params.items()}
    both = torch.func.vmap(lambda p: apply(p, state, x)[0])(stacked)
    torch.testing.assert_close(both[0], apply(params, state, x)[0])


# PyTorch: transforms


def test_it_compiles_without_a_graph_break_and_stays_pure():
    net, x = network(), batch(6, 4)
    apply, params, state = make_functional(net)
    before, given = contents(net), {name: b.clone() for name, b in state.items()}
    compiled = torch.compile(apply, backend="eager", fullgraph=True)
    torch.manual_seed(0)
    expected = apply(params, state, x)
    torch.manual_seed(0)
    out, new_state = compiled(params, state, x)
    torch.testing.assert_close(out, expected[0])
    assert same(new_state, expected[1]) and same(before, contents(net)) and same(given, state)
    keyed = torch.compile(apply, backend="eager")(params, state, x, key=random_key(0))
    assert torch.equal(keyed[0], apply(params, state, x, key=random_key(0))[0])


# PyTorch: errors


def test_wrong_names_and_shapes_are_named():
    apply, params, state = make_functional(network())
    x = batch(6, 4)
    rest = {name: p for name, p in params.items() if name != "0.bias"}
    with pytest.raises(GradtoolsError, match=r"params .*missing: \['0.bias'\]"):
        apply(rest, state, x)
    with pytest.raises(GradtoolsError, match=r"unexpected: \['extra'\]"):
        apply({**params, "extra": x}, state, x)
    with pytest.raises(GradtoolsError, match=r"'0.bias'\] has shape \(3,\).*\(8,\)"):
        apply({**params, "0.bias": torch.zeros(3)}, state, x)
    with pytest.raises(GradtoolsError, match=r"state .*missing: \['1.running_mean'"):
        apply(params, {}, x)
    with pytest.raises(GradtoolsError, match="must be a tensor"):
        apply({**params, "0.bias": None}, state, x)
    with pytest.raises(GradtoolsError, match="dictionary"):
        apply(list(params), state, x)
