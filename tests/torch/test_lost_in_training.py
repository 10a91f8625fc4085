"""Compares reports of lost gradients in PyTorch training with the effect of optimizer steps."""

from __future__ import annotations

import copy
import random

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import gradtools.torch as gt
from gradtools import GradtoolsError
from tests.support.lost_gradients import kinds_by_leaf
from tests.torch.training_losses import PLANTED, Loop, Net, X, Y, loop

pytestmark = [pytest.mark.torch, pytest.mark.filterwarnings("ignore::UserWarning")]


def still(given: Loop, steps: int):
    """Return the names of the parameters that plain optimizer steps do not change."""
    before = {name: x.detach().clone() for name, x in given.meant.items()}
    for _ in range(steps):
        given.optimizer.zero_grad()
        given.closure().backward(retain_graph=True)
        given.optimizer.step()
    return {name for name, x in given.meant.items() if torch.equal(x.detach(), before[name])}


@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_loss_is_found_and_nothing_else(name):
    PLANTED[name].check(gt, still)


def test_layers_in_a_plain_list_are_told_of_a_module_list_first():
    given = next(given for name, given in PLANTED.items() if "list" in name).make()
    report = gt.why_zero(given.closure, model=given.model)
    fixes = {f.fix for f in report if f.kind == "unregistered"}
    assert len(fixes) == 1 and fixes.pop().startswith("keep layers in an nn.ModuleList")


def test_a_learning_rate_of_zero_is_told_with_its_fix():
    given = PLANTED["learning rate of zero"].make()
    report = gt.why_zero(given.closure, model=given.model, optimizer=given.optimizer)
    assert "does not update the parameter: its learning rate is 0." in str(report)
    assert {f.fix.partition(";")[0] for f in report} == {
        "set lr of the parameter group to a positive number"
    }


def test_a_healthy_loop_has_nothing_to_tell():
    given = loop(Net())
    report = gt.why_zero(given.closure, model=given.model, optimizer=given.optimizer)
    assert not report and not report.notes and not still(given, 3)
    assert str(report).startswith(
        "Nothing is lost: the output's gradient reaches these 4 parameters: body.*"
    )


# --- in the middle of a training loop ----------------------------------------------------


def test_in_the_midst_of_a_loop_nothing_is_changed():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Linear(4, 2))
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)

    def train(ask):
        torch.manual_seed(1), random.seed(1)
        state, losses = {k: x.clone() for k, x in model.state_dict().items()}, []
        steps = torch.optim.Adam(model.parameters(), 1e-2)
        for batch, labels in zip(X.split(3), Y.split(3), strict=True):
            closure = lambda batch=batch, labels=labels: F.cross_entropy(model(batch), labels)
            if ask:
                assert not gt.why_zero(closure, model=model, optimizer=steps)
            loss = closure()
            steps.zero_grad()
            loss.backward()
            if ask:
                assert not gt.why_zero(closure, model=model, optimizer=steps)
            steps.step()
            losses.append(loss.detach())
        after = {k: x.clone() for k, x in model.state_dict().items()}
        model.load_state_dict(state)
        return losses, after

    del optimizer
    (plain, state), (asked, state_too) = train(False), train(True)
    assert all(map(torch.equal, plain, asked))
    assert all(torch.equal(x, state_too[k]) for k, x in state.items())


def test_after_backward_the_graph_tells_what_it_reached():
    given = PLANTED["forgotten layer"].make()
    loss = given.closure()
    loss.backward()
    report = gt.why_zero(lambda: loss, model=given.model, optimizer=given.optimizer)
    assert kinds_by_leaf(report) == {"spare.weight": "unread", "spare.bias": "unread"}


def test_a_graph_from_before_is_entered_only_if_f_reads_no_leaf():
    w = nn.Parameter(torch.ones(3))
    loss = torch.relu(w.exp() - 100).sum()
    assert kinds_by_leaf(gt.why_zero(lambda: loss, model={"w": w})) == {"w": "zero"}
    h = w.square().exp()
    h.sum().backward()  # this call of backward frees the graph of h
    report = gt.why_zero(lambda x: (torch.relu(x - 5) * h).sum(), torch.ones(3))
    assert kinds_by_leaf(report) == {"argument 0": "zero"}


def test_a_loss_that_is_no_closure_is_refused():
    model = Net()
    with pytest.raises(GradtoolsError, match=r"why_zero: f is .*Pass a closure that computes"):
        gt.why_zero(F.cross_entropy(model(X), Y), model=model)


# --- arguments of why_zero ---------------------------------------------------------------


def test_a_closure_alone_is_asked_about_what_it_holds():
    given = PLANTED["detached features"].make()
    report = gt.why_zero(given.closure)
    lost = {name.rpartition("model.")[2] for name in kinds_by_leaf(report)}
    assert lost == {"body.weight", "body.bias"}


def test_several_models_and_optimizers():
    a, b, c = Net(), Net(), nn.Parameter(torch.ones(()))
    loss = lambda: F.cross_entropy(a(X) + b(X) * c, Y)
    optimizers = [torch.optim.SGD(a.parameters(), 0.1), torch.optim.SGD([c], 0.1)]
    report = gt.why_zero(loss, model={"a": a, "b": b, "c": c}, optimizer=optimizers)
    assert {f.kind for f in report} == {"not_optimized"}
    assert {f.argument for f in report} == {f"b.{name}" for name, _ in b.named_parameters()}
    pair = gt.why_zero(loss, model=(a, b), optimizer=optimizers)
    assert {f.argument for f in pair if f.kind == "other_model"} == {
        "optimizer.param_groups[1]['params'][0]"
    }


# --- texts of reports --------------------------------------------------------------------


@pytest.mark.parametrize("operator", ["grad", "per_example_grad", "microbatched"])
def test_a_loss_of_gradients_at_the_model_loses_nothing(operator):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))
    x, size = torch.randn(4, 3), lambda model, x: model(x).square().mean()
    gradients = {
        "grad": gt.grad(size),
        "per_example_grad": gt.per_example_grad(size),
        "microbatched": lambda *args: gt.microbatched_value_and_grad(size, 2)(*args)[1],
    }[operator]
    penalty = lambda: sum(g.square().sum() for g in gradients(model, x).values())
    for loss in (penalty, lambda: size(model, x) + penalty()):
        report = gt.why_zero(loss, model=model)
        assert not report, str(report)


def two_layers():
    return nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))


def test_parameters_that_are_passed_as_arguments_are_read():
    net, x = two_layers(), torch.ones(1, 2)
    by_name = dict(net.named_parameters())
    call = lambda p: torch.func.functional_call(net, p, x).sum()
    assert not gt.why_zero(call, by_name, model=net)
    assert not gt.why_zero(call, by_name, model=net, optimizer=torch.optim.SGD(net.parameters()))
    assert not gt.why_zero(lambda p: net(x).sum() + call(p), by_name, model=net)
    stopped = lambda p: {k: v.detach() if k[0] == "0" else v for k, v in p.items()}
    report = gt.why_zero(lambda p: call(stopped(p)), by_name, model=net)
    assert kinds_by_leaf(report) == dict.fromkeys(("0.weight", "0.bias"), "detached")
    report = gt.why_zero(lambda p: p["0.weight"].sum(), by_name, model=net)
    assert kinds_by_leaf(report) == dict.fromkeys(("0.bias", "1.weight", "1.bias"), "unread")


def test_another_copy_of_the_model_is_named():
    net, x = two_layers(), torch.ones(1, 2)
    for other in (copy.deepcopy(net), {"net": copy.deepcopy(net)}):
        report = gt.why_zero(lambda: net(x).sum(), model=other)
        assert {(f.kind, f.operation) for f in report} == {("unread", "other arrays")}
        assert "it reads other arrays of the same shapes." in str(report)
        assert "Fix: pass the model whose arrays the loss reads as model=" in str(report)
    report = gt.why_zero(lambda: net(x).sum(), model=nn.Linear(5, 3))
    assert {(f.kind, f.operation) for f in report} == {("unread", "argument")}


@pytest.mark.parametrize("frozen", [False, True])
def test_an_unread_parameter_beside_one_that_is_read_is_in_no_other_copy(frozen):
    data = torch.ones(2, 2)  # has the shape of the parameters
    read, unread = (nn.Parameter(torch.ones(2, 2)) for _ in range(2))
    read.requires_grad_(not frozen)
    loss = lambda: (read @ (torch.ones(2, 1) if frozen else data)).sum()
    report = gt.why_zero(loss, model={"read": read, "unread": unread})
    assert [(f.argument, f.operation) for f in report] == [("unread", "argument")]


def test_a_parameter_that_a_host_kernel_reads_is_not_called_unused():
    layer = nn.Linear(2, 2, bias=False)
    kernel = gt.host_function(lambda x: x @ layer.weight.detach().numpy().T)
    report = gt.why_zero(lambda: kernel(torch.ones(3, 2)).sum(), model=layer)
    assert "No recorded operation of the loss uses the parameter." in str(report)
    assert "pass a parameter that a host kernel reads to the host function" in str(report)
