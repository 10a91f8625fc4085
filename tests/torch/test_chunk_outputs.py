"""What chunks return is joined only if it is rows of examples; f runs once for each chunk."""

from __future__ import annotations

import pytest

import gradtools
import gradtools.torch as gt
from gradtools import GradtoolsError

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.filterwarnings("ignore:.*batch normalization")
X = torch.randn(12, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


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


def test_an_argument_that_f_changes_in_place_is_changed_once(monkeypatch):
    monkeypatch.setattr(gradtools.errors, "WARNED", set())
    x, total = X.clone(), torch.zeros(8, dtype=torch.float64)

    def f(x, total):
        x.add_(1)
        total.add_(x.sum(0))
        return 2 * x, x[:, 0]

    with pytest.warns(gradtools.GradtoolsWarning, match="changes an argument in place"):
        out, _ = gt.chunked(f, 4, in_axes=(0, None))(x, total)
    assert torch.equal(x, X + 1) and torch.equal(out, 2 * (X + 1))
    torch.testing.assert_close(total, (X + 1).sum(0))


def test_lengths_that_the_data_decide_are_refused():
    with pytest.raises(GradtoolsError, match="only rows of examples can be joined"):
        gt.chunked(lambda x: x[x[:, 0] > 0], 4)(X)


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
    with pytest.raises(GradtoolsError, match=r"wrap f so that it returns out\[0\]"):
        gt.chunked(apply, 4, in_axes=(None, None, 0))(params, state, X)
    out, new = gt.chunked(apply, 4, in_axes=(None, None, 0), carry_argnums=1)(params, state, X)
    assert out.shape == X.shape and new["running_mean"].shape == (8,)


def test_a_checkpoint_does_not_count_the_tensors_of_the_run_at_another_size():
    layer, x = torch.nn.Linear(3, 2), torch.randn(6, 3)
    f = gt.chunked(layer, chunk_size=2)  # the outputs may be a table of pairs
    torch.utils.checkpoint.checkpoint(f, x, use_reentrant=False).sum().backward()
    torch.testing.assert_close(layer.weight.grad, x.sum(0).expand(2, 3))
