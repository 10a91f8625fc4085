"""guard_gradients finds the parameters of the modules that a loss holds, or is given."""

from __future__ import annotations

import warnings

import pytest
import torch

import gradtools.torch as gt
from gradtools import GradtoolsWarning


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.head = torch.nn.Linear(3, 3), torch.nn.Linear(3, 1)
        self.forgotten = torch.nn.Linear(1, 1, bias=False)

    def forward(self, x):
        return self.head(self.body(x).detach())


X = torch.ones(2, 3)
LOST = ["body.bias", "body.weight", "forgotten.weight"]


def told(call):
    with pytest.warns(GradtoolsWarning) as caught:
        call()
    (message,) = [str(w.message) for w in caught if "guard_gradients" in str(w.message)]
    return [line.strip() for line in message.splitlines()[1:]]


def test_parameters_of_a_module_that_is_an_argument():
    lines = told(lambda: gt.guard_gradients(lambda net, x: net(x).sum())(Net(), X))
    assert sorted(line.partition(":")[0] for line in lines) == [f"argument 0['{n}']" for n in LOST]


def test_parameters_of_a_functionalized_module():
    apply, params, state = gt.make_functional(Net())
    loss = gt.guard_gradients(lambda p: apply(p, state, X)[0].sum())
    lines = told(lambda: gt.grad(loss, disconnected_inputs="zeros")(params))
    assert sorted(line.partition(":")[0] for line in lines) == [f"argument 0['{n}']" for n in LOST]


def test_integers_as_the_first_argument_are_no_error():
    table = torch.ones(4, 2, requires_grad=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        gt.guard_gradients(lambda rows, table: table[rows].sum())(torch.arange(3), table)


def test_the_state_of_the_modules_is_as_after_one_call():
    norm = torch.nn.BatchNorm1d(3)
    gt.guard_gradients(norm)(torch.randn(4, 3))
    assert int(norm.num_batches_tracked) == 1


@pytest.mark.parametrize("of", [lambda net: net, lambda net: lambda **batch: net(**batch)])
def test_a_batch_may_come_by_keyword_alone(of):
    net = Net()
    with pytest.warns(GradtoolsWarning, match=r"3 of 5 parameters are not trained") as caught:
        gt.guard_gradients(of(net))(x=X)
    assert all(name in str(caught[0].message) for name in LOST)


def test_inside_a_transform_it_waits():
    guarded = gt.guard_gradients(lambda p: (p["w"] ** 2).sum())
    p = {"w": torch.ones(2), "unused": torch.ones(2)}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        torch.func.grad(guarded)(p)
    assert told(lambda: guarded(p)) == ["argument 0['unused']: unused"]


def test_the_warning_points_at_the_call():
    with pytest.warns(GradtoolsWarning) as caught:
        gt.guard_gradients(Net())(X)
    assert caught[0].filename == __file__


def test_the_first_call_reads_the_graph_once_for_all_leaves(monkeypatch):
    from gradtools.seeing.graphs import derivative_flow, lost_terms

    passes = []
    for module, name in ((derivative_flow, "backward"), (lost_terms, "forward")):
        plain = getattr(module, name)
        counted = lambda *given, plain=plain: passes.append(None) or plain(*given)
        monkeypatch.setattr(module, name, counted)
    tree = {str(k): torch.ones(2) for k in range(20)}
    gt.guard_gradients(lambda tree: sum((x * x).sum() for x in tree.values()))(tree)
    assert len(passes) == 1


def test_a_parameter_of_which_the_loss_reads_a_result_that_was_there_before_is_used():
    class Prepared(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = torch.nn.Parameter(torch.ones(3))
            self.bias = torch.nn.Parameter(torch.ones(3))
            self.doubled = 2 * self.weight

        def forward(self, x):
            return (x * self.doubled + self.bias).sum()

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        gt.guard_gradients(Prepared())(X)
