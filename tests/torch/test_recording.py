"""A run that is recorded leaves nothing behind, sees what it should, and costs what it must."""

from __future__ import annotations

import itertools
import math
import random
import threading
from contextlib import nullcontext, suppress

import numpy as np
import pytest
import torch
from torch import nn

import gradtools.torch as gt
from gradtools import GradtoolsError
from gradtools.seeing.diagnostics.findings import KINDS
from gradtools.seeing.formulas.expressions import order
from gradtools.seeing.graphs.derivative_flow import dependence_matrix
from gradtools.seeing.graphs.nodes import Dependence
from gradtools.seeing.graphs.program import LeafProgram
from gradtools.seeing.torch.recorded_run import record
from gradtools.seeing.torch.recording.connections import REFUSALS
from gradtools.seeing.torch.translating import programs
from gradtools.torch.backend import TorchBackend
from tests.support.lost_gradients import losses
from tests.support.torch_lost_gradients import CASES

pytestmark = [pytest.mark.torch, pytest.mark.filterwarnings("ignore::UserWarning")]
X = torch.tensor([0.5, -0.3, 0.8], dtype=torch.float64)
BACKEND = TorchBackend()


def recorded(f, *args):
    program = LeafProgram(BACKEND, "test", f, args, {}, (0,))
    return record(program.run, program.leaves, program.names)


def operations(f, *args):
    return [node.operation for node in recorded(f, *args).graph.nodes]


# --- what is left behind -----------------------------------------------------------------


class _Busy(nn.Module):
    """Changes everything that it can."""

    def __init__(self, raises=False):
        super().__init__()
        self.norm = nn.BatchNorm1d(3).double()
        self.weight = nn.Parameter(torch.ones(3, dtype=torch.float64))
        self.other = nn.Parameter(torch.ones(3, dtype=torch.float64))
        self.calls, self.raises = 0, raises
        self.large = torch.zeros(1 << 18, dtype=torch.float64)

    def forward(self, x):
        self.calls += 1
        y = self.norm(torch.stack([x, x * self.weight, x + torch.rand(3)]))
        y.sum().backward(retain_graph=True)
        with torch.no_grad():
            self.other.mul_(2.0)
            self.other.data.add_(1.0)
            self.large.add_(random.random() + np.random.default_rng().random())
        self.last = y
        self.other.requires_grad_(False)
        if self.raises:
            raise ValueError("of its own")
        return y.square().sum()


def _state(net):
    tensors = [x.clone() for x in (*net.state_dict().values(), net.large)]
    flags = [p.requires_grad for p in net.parameters()]
    numbers = [
        flags,
        random.getstate(),
        torch.get_rng_state().tolist(),
        net.calls,
        hasattr(net, "last"),
    ]
    return tensors, numbers, net.weight.grad if net.weight.grad is None else net.weight.grad.clone()


def _same(a, b):
    assert all(map(torch.equal, a[0], b[0]))
    assert a[1] == b[1]
    assert (a[2] is None) == (b[2] is None) and (a[2] is None or torch.equal(a[2], b[2]))


@pytest.mark.parametrize("graded", [False, True], ids=["without grad", "with grad"])
def test_effects_of_f_are_undone(graded):
    net, x = _Busy(), X.clone()
    if graded:
        net.weight.grad = torch.full((3,), 7.0, dtype=torch.float64)
    grad, before = net.weight.grad, _state(net)
    gt.why_zero(net, x)
    _same(before, _state(net))
    assert net.weight.grad is grad and x.grad is None and torch.equal(x, X)


def _by_operation(w):
    with torch.no_grad():
        w.mul_(1.5)


def _by_optimizer(w):
    torch.optim.SGD([w], 0.5, foreach=False).step()


def _by_numpy(w):
    w.detach().numpy()[:] = 9.0


def _by_assignment(w):
    w.data = torch.zeros_like(w)


WRITES = (_by_operation, _by_optimizer, _by_numpy, _by_assignment)
LOOKS = [(write, name) for write in WRITES for name in ("why_zero", "formula", "gradient_graph")]


@pytest.mark.parametrize("raises", [False, True])
@pytest.mark.parametrize(("write", "name"), LOOKS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.complex128])
def test_parameters_that_f_writes_are_put_back_by_every_run(write, name, raises, dtype):
    w, x = nn.Parameter(torch.ones(3, dtype=dtype)), torch.ones(3, dtype=dtype)
    w.grad, memory = torch.ones_like(w), w.data_ptr()

    def f(x):
        write(w)
        if raises:
            raise ValueError("of its own")
        return torch.softmax((x * w).abs(), 0).sum()

    with pytest.raises((ValueError, GradtoolsError)) if raises else nullcontext():
        getattr(gt, name)(f, x)
    assert w.tolist() == w.grad.tolist() == [1.0] * 3 and w.data_ptr() == memory


def _adds(w):
    (w * 2.0).sum().backward()


def _replaces(w):
    w.grad = None


def _halves(w):
    w.grad.mul_(0.5)


@pytest.mark.parametrize("name", ["why_zero", "formula", "gradient_graph"])
@pytest.mark.parametrize("write", [_adds, _replaces, _halves])
def test_gradients_that_f_changes_are_put_back_by_every_run(write, name):
    w = nn.Parameter(torch.ones(3, dtype=torch.float64))
    grad = w.grad = torch.full_like(w, 5.0)

    def f(x):
        write(w)
        return (x * w.detach()).sum()

    with suppress(GradtoolsError):  # a formula is held against f at other weights, with no gradient
        getattr(gt, name)(f, torch.ones(3))
    assert w.grad is grad and grad.tolist() == [5.0] * 3


def test_runs_in_several_threads_wait_for_each_other():
    found = {}

    def look(k):
        found[k] = [f.kind for f in gt.why_zero(lambda x: x.detach().sum() * k, X).findings]

    threads = [threading.Thread(target=look, args=(k,)) for k in range(1, 5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {k: ["detached"] for k in range(1, 5)}


def test_other_threads_are_not_seen():
    def f(x):
        other = threading.Thread(target=lambda: nn.Linear(2, 2)(torch.ones(2)).detach())
        other.start()
        other.join()
        return x.sin()

    assert operations(f, X) == ["sin"]


# --- what is seen ------------------------------------------------------------------------


class _Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.ModuleList([nn.Linear(3, 3).double(), nn.Tanh()])

    def forward(self, x):
        return self.inner[1](self.inner[0](x))


def test_scopes_are_paths_of_modules():
    net = nn.Sequential(_Block(), _Block())
    graph = recorded(lambda x: net(x) * 2, X).graph
    assert [scope for scope, _ in itertools.groupby(".".join(n.scope) for n in graph.nodes)] == [
        "Sequential.0.inner.0",
        "Sequential.0.inner.1",
        "Sequential.1.inner.0",
        "Sequential.1.inner.1",
        "",
    ]


def test_compiled_functions_are_run_as_they_are():
    @torch.compile(backend="eager")
    def f(x):
        return (x.detach() ** 2).sum()

    assert [found.kind for found in gt.why_zero(f, X).findings] == ["detached"]
    healthy = torch.compile(lambda x: (x**2).sum(), backend="eager")
    assert not gt.why_zero(healthy, X).findings


def test_scripted_modules_are_joined_by_their_graph():
    net = torch.jit.script(nn.Sequential(nn.Linear(3, 2), nn.Tanh()).double())
    assert not gt.why_zero(lambda x: net(x + 3).sum(), X).findings


@pytest.mark.parametrize("transform", [torch.func.vmap, torch.func.grad])
def test_inside_a_transform_it_is_refused(transform):
    def f(x):
        gt.why_zero(lambda z: z.sum(), x)
        return x.sum()

    with pytest.raises(GradtoolsError, match="inside of a transform"):
        transform(f)(X)


def test_recording_inside_of_a_recording_is_refused():
    with pytest.raises(GradtoolsError, match="while another run is recorded"):
        gt.why_zero(lambda x: gt.why_zero(lambda z: z.sum(), x) and x.sum(), X)


def test_f_that_gives_something_else_each_time_is_not_followed():
    calls = []

    def f(x):
        calls.append(float(x[0]))
        return x.sum() * len(np.random.default_rng().random(3)) + np.random.default_rng().random()

    assert not gt.why_zero(f, X).findings


def test_the_corpus_covers_every_kind():
    every = [loss for cause in CASES.causes.values() for loss in losses(cause)]
    covered = {loss.kind for loss in every}
    of_a_line = {name for name, kind in KINDS.items() if kind.has_place}  # others are of a model
    assert of_a_line - covered == {"nan"}  # in test_gradients_of_no_use
    partial = {loss.kind for loss in every if not loss.whole}
    assert partial >= {"detached", "left_framework", "discrete", "zero_derivative"}


def test_every_refusal_of_pytorch_is_in_the_corpus():
    texts = set()
    for cause in CASES.causes.values():
        program = LeafProgram(BACKEND, "test", cause.program, cause.known["args"], {}, (0,))
        found = record(program.run, program.leaves, program.names).refusal
        texts |= {part for part in REFUSALS if found and part in found.message}
    assert texts == set(REFUSALS)


def test_a_number_as_the_result_is_a_finding():
    report = gt.why_zero(lambda x: float((x**2).sum()), X)
    assert [found.kind for found in report.findings] == ["left_framework"]


# --- what it costs -----------------------------------------------------------------------


def test_a_healthy_function_runs_once_however_many_leaves_it_has():
    calls = itertools.count()  # which no snapshot puts back

    def f(params):
        next(calls)
        return sum((p**2).sum() for p in params)

    assert not gt.why_zero(f, [X * k for k in range(1, 30)]).findings
    assert next(calls) == 1


# --- the error of a disconnected argument ------------------------------------------------


# --- what leaves PyTorch -----------------------------------------------------------------


def test_numbers_that_are_only_logged_cost_three_runs_of_each_line():
    calls, logged = itertools.count(), []

    def f(x):
        next(calls)
        for row in x:
            logged.append(row.item())
            logged.append(float(row**2))
        return (x**2).sum()

    assert not gt.why_zero(f, X)
    assert next(calls) <= 2 + 2 * 3  # recorded, again, and at two lines with other numbers


@pytest.mark.parametrize("bound", [min, max])
def test_a_number_that_python_clips_is_followed(bound):
    f = lambda x: (x**2).sum() + bound(0.5, {min: 3.0, max: -3.0}[bound] + 0 * x[0].item())
    report = gt.why_zero(f, torch.tensor([0.1, 0.2]))
    assert not report  # times zero: it does not come back
    f = lambda x: (x**2).sum() + bound(0.0, {min: 3.0, max: -3.0}[bound] + 2 * x[0].item())
    (finding,) = gt.why_zero(f, torch.tensor([0.1, 0.2]))
    assert (finding.kind, finding.whole) == ("left_framework", False)


def test_the_line_is_named_of_an_image_that_is_binarised_through_numpy():
    def volume(image):
        solid = image.detach().numpy() > 0.5
        return (torch.from_numpy(solid.astype(np.float64)).mean() - 0.6) ** 2

    for f, whole in ((volume, True), (lambda x: x.square().sum() + volume(x), False)):
        report = gt.why_zero(f, torch.rand(4, 4, dtype=torch.float64))
        found = {(finding.kind, finding.whole) for finding in report}
        assert found == {("detached", whole), ("left_framework", whole)}
        assert "numpy() > 0.5" in report.findings[0].source.text


def test_what_left_for_an_f_that_refuses_other_numbers_is_not_unused():
    def f(x):
        value = x.sum().item()
        if abs(value - 0.7) > 1e-6:
            raise ValueError("only 0.7")
        return torch.tensor(math.sin(value))

    (finding,) = gt.why_zero(f, torch.tensor([0.5, 0.2]))
    assert (finding.kind, finding.operation) == ("left_framework", "item")


# --- memory that is shared, the same in all recordings -----------------------------------


def _whole_then_view(x, z):
    y = x * 1
    seen = y.view(-1)
    y.mul_(z)
    return seen.sum()


def _view_then_whole(x, z):
    y = x * 1
    y[:1].mul_(z[:1])
    return (y * y).sum()


def _one_piece_then_the_other(x, z):
    y = x * 1
    one, other = y[:2], y[2:]
    one.mul_(z[:2])
    return (other * other).sum()


def _piece_that_overlaps(x, z):
    y = x * 1
    low, high = y[:2], y[1:]
    low.mul_(z[:2])
    return (high * high).sum()


def _even_then_odd(x, z):
    y = x * 1
    even, odd = y[::2], y[1::2]
    even.mul_(z[:2])
    return odd.exp().sum()


def _twice(x, z):
    y = x * 1
    low, high = y[:2], y[1:]
    low.mul_(2.0)
    high.add_(z[1:])
    return low.sum()


def _twice_and_overwritten(x, z):
    y = x * 1
    y.mul_(z)
    y.copy_(x)
    return y.sum()


SHARED = {
    _whole_then_view: True,
    _view_then_whole: True,
    _one_piece_then_the_other: False,
    _piece_that_overlaps: True,
    _even_then_odd: False,
    _twice: True,
    _twice_and_overwritten: False,
}


def _reached_in(graph):
    """Whether the output is reached from the second argument, and whether a derivative is."""
    return [dependence_matrix(graph)[0][1] == level for level in (Dependence.NONE, _FULL)]


_FULL = Dependence.DIFFERENTIABLE


@pytest.mark.parametrize("f", SHARED)
def test_every_recording_knows_alike_what_is_written_through_shared_memory(f):
    z = torch.tensor([2.0, -1.0, 3.0], dtype=torch.float64)
    reached = not torch.equal(f(X, z), f(X, z + 1))
    assert reached == SHARED[f]
    program = LeafProgram(BACKEND, "test", f, (X, z), {}, (0, 1))
    calls = record(program.run, program.leaves, program.names).graph
    graph = gt.gradient_graph(f, X, z, argnums=(0, 1), order=0)
    for recording in (calls, graph):
        assert _reached_in(recording) == [not reached, reached], recording
    formula = programs.formula_graph(program)
    assert (formula.inputs[1] in order(formula.outputs)) == reached


# --- derivatives inside of f ---------------------------------------------------------------


def inner_gradient(y, z):
    g = torch.exp(z.sum(1))
    (of_g,) = torch.autograd.grad(((y.sum(1) + g) ** 3).sum(), g, create_graph=True)
    (of_z,) = torch.autograd.grad(g, z, of_g)
    return of_z.sum()


def test_a_gradient_without_create_graph_is_no_stop_on_purpose():
    (finding,) = gt.why_zero(inner_gradient, torch.randn(3, 4), torch.randn(3, 4))
    assert finding.kind == "inner_gradient" and "of_g)" in finding.source.text
    assert "create_graph=True" in finding.fix and "frozen" in finding.fix
    w = torch.nn.Parameter(torch.ones(3))

    def through_grad():
        x = torch.ones(3, requires_grad=True)
        (w * x**2).sum().backward(inputs=[x])
        return x.grad.square().sum()

    (finding,) = gt.why_zero(through_grad, model={"w": w})
    assert finding.kind == "inner_gradient"


def test_a_relu_network_of_second_order_loses_all_gradients():
    layer = torch.nn.Linear
    net = torch.nn.Sequential(layer(1, 8), torch.nn.ReLU(), layer(8, 1))
    x, u = torch.rand(6), lambda x: net(x[None])[0]

    def by_autograd():
        t = x.clone().requires_grad_()
        (d,) = torch.autograd.grad(net(t[:, None]).sum(), t, create_graph=True)
        (d,) = torch.autograd.grad(d.sum(), t, create_graph=True)
        return (d - 1).square().mean()

    for loss in (
        by_autograd,
        lambda: (gt.vmap(gt.grad(gt.grad(u)))(x) - 1).square().mean(),
        lambda: (gt.hessian(u)(x[0]) - 1).square(),
    ):
        found = {f.argument for f in gt.why_zero(loss, model=net)}
        assert found == {name for name, _ in net.named_parameters()}
