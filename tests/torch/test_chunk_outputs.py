"""In PyTorch f runs once more where chunks are equal, to tell what follows their size."""

from __future__ import annotations

import pytest

import gradtools.torch as gt
from gradtools import GradtoolsError

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.filterwarnings("ignore:.*batch normalization")
X = torch.randn(12, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


def test_f_runs_once_more_at_the_first_call_alone(monkeypatch):
    lengths = []
    monkeypatch.setattr(torch.Tensor, "seen", lambda x: lengths.append(len(x)), raising=False)

    def f(x):
        x.seen()  # outside of all that a snapshot holds
        return 2 * x[:, 0]

    chunked = gt.chunked(f, 4)
    chunked(X), chunked(X + 1)
    assert lengths == [4, 4, 4, 2, 4, 4, 4]
    gt.chunked(f, 4)(X)  # another function, by the same code
    assert lengths[7:] == [4, 4, 4]
    gt.chunked(lambda x: f(x), 4, verify=False)(X)
    assert lengths[10:] == [4, 4, 4]
    gt.chunked(lambda x: f(x), 5)(X)  # unequal chunks tell by themselves
    assert lengths[13:] == [5, 5, 2]
    gt.chunked(lambda x: (x.seen(), 2 * x)[1], 4)(X)  # and rows that can be nothing else
    assert lengths[16:] == [4, 4, 4]


def test_everything_stands_as_after_the_plain_loop():
    torch.manual_seed(0)
    net = torch.nn.Sequential(
        torch.nn.Linear(8, 8), torch.nn.BatchNorm1d(8), torch.nn.Dropout()
    ).double()
    log = []

    def f(x):
        log.append(len(x))
        return net(x), x[:, 0]

    state, stream = {k: v.clone() for k, v in net.state_dict().items()}, torch.get_rng_state()
    (out, _), after = gt.chunked(f, 4)(X), torch.get_rng_state()
    assert log == [4, 4, 4]
    kept = {k: v.clone() for k, v in net.state_dict().items()}
    net.load_state_dict(state)
    torch.set_rng_state(stream)
    assert torch.equal(out, torch.cat([net(x) for x in X.split(4)]))
    assert torch.equal(torch.get_rng_state(), after)
    assert all(torch.equal(kept[k], v) for k, v in net.state_dict().items())


def test_an_argument_that_f_changes_in_place_is_changed_once():
    x, total = X.clone(), torch.zeros(8, dtype=torch.float64)

    def f(x, total):
        x.add_(1)
        total.add_(x.sum(0))
        return 2 * x, x[:, 0]

    out, _ = gt.chunked(f, 4, in_axes=(0, None))(x, total)
    assert torch.equal(x, X + 1) and torch.equal(out, 2 * (X + 1))
    torch.testing.assert_close(total, (X + 1).sum(0))


def test_lengths_that_the_data_decide_are_joined():
    for size in (4, 5):
        out = gt.chunked(lambda x: x[x[:, 0] > 0], size)(X)
        assert torch.equal(out, X[X[:, 0] > 0])
    x = torch.tensor([0.0, 1.0, 0.0, 0.0, 0.0, 1.0])  # one of four, of the rest, of the first two
    assert torch.equal(gt.chunked(lambda x: x[x > 0.5], 4)(x), torch.ones(2))


@pytest.mark.parametrize("grad", [True, False])
def test_state_is_refused_without_gradients_as_with_them(grad):
    norm = torch.nn.BatchNorm1d(8).double()
    with torch.set_grad_enabled(grad), pytest.raises(GradtoolsError, match=r"output\[1\] has leng"):
        gt.chunked(lambda x: (norm(x), norm.running_mean.clone()), 4)(X)


def test_state_is_refused_beneath_functorch_where_chunks_differ():
    f = gt.chunked(lambda x: (x, x.mean(0)), 5)
    with pytest.raises(GradtoolsError, match=r"output\[1\] has length 8"):
        torch.func.grad(lambda x: f(x)[0].sum())(X)


def test_make_functional_s_state_is_refused():
    apply, params, state = gt.make_functional(torch.nn.BatchNorm1d(8).double())
    with pytest.raises(GradtoolsError, match=r"lambda out: out\[0\]"):
        gt.chunked(apply, 4, in_axes=(None, None, 0))(params, state, X)
    out, new = gt.chunked(apply, 4, in_axes=(None, None, 0), carry_argnums=1)(params, state, X)
    assert out.shape == X.shape and new["running_mean"].shape == (8,)


def test_a_checkpoint_does_not_count_the_tensors_of_the_run_at_another_size():
    layer, x = torch.nn.Linear(3, 2), torch.randn(6, 3)
    f = gt.chunked(layer, chunk_size=2)  # the outputs may be a table of pairs
    torch.utils.checkpoint.checkpoint(f, x, use_reentrant=False).sum().backward()
    torch.testing.assert_close(layer.weight.grad, x.sum(0).expand(2, 3))
