"""A recorded run restores all state, records the correct operations and has a bounded cost."""

from __future__ import annotations

import itertools
import random
import threading
from contextlib import nullcontext

import numpy as np
import pytest
import torch
from torch import nn

import gradtools.torch as gt
from gradtools import GradtoolsError
from gradtools.seeing.formulas.expressions import order
from gradtools.seeing.graphs.derivative_flow import dependence_matrix
from gradtools.seeing.graphs.nodes import Dependence
from gradtools.seeing.graphs.program import LeafProgram
from gradtools.seeing.torch import translating
from gradtools.seeing.torch.recorded_run import record
from gradtools.torch.backend import TorchBackend

pytestmark = [pytest.mark.torch, pytest.mark.filterwarnings("ignore::UserWarning")]
X = torch.tensor([0.5, -0.3, 0.8], dtype=torch.float64)
BACKEND = TorchBackend()


def recorded(f, *args):
    program = LeafProgram(BACKEND, "test", f, args, {}, (0,))
    return record(program.run, program.leaves, program.names)


def operations(f, *args):
    return [node.operation for node in recorded(f, *args).graph.nodes]


# --- state after a recording -------------------------------------------------------------


class _Busy(nn.Module):
    """A module that changes its buffers, parameters and attributes."""

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
            raise ValueError("raised by f")
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
            raise ValueError("raised by f")
        return torch.softmax((x * w).abs(), 0).sum()

    with pytest.raises((ValueError, GradtoolsError)) if raises else nullcontext():
        getattr(gt, name)(f, x)
    assert w.tolist() == w.grad.tolist() == [1.0] * 3 and w.data_ptr() == memory


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


# --- recorded operations -----------------------------------------------------------------


@pytest.mark.parametrize("transform", [torch.func.vmap, torch.func.grad])
def test_inside_a_transform_it_is_refused(transform):
    def f(x):
        gt.why_zero(lambda z: z.sum(), x)
        return x.sum()

    with pytest.raises(GradtoolsError, match="inside of a transform"):
        transform(f)(X)


# --- number of runs ----------------------------------------------------------------------


def test_a_healthy_function_runs_once_however_many_leaves_it_has():
    calls = itertools.count()  # gradtools cannot restore the state of the counter

    def f(params):
        next(calls)
        return sum((p**2).sum() for p in params)

    assert not gt.why_zero(f, [X * k for k in range(1, 30)]).findings
    assert next(calls) == 1


# --- values that leave PyTorch -----------------------------------------------------------


def test_numbers_that_are_only_logged_cost_three_runs_of_each_line():
    calls, logged = itertools.count(), []

    def f(x):
        next(calls)
        for row in x:
            logged.append(row.item())
            logged.append(float(row**2))
        return (x**2).sum()

    assert not gt.why_zero(f, X)
    # one recorded run, one repeated run, and runs with changed numbers at two source lines
    assert next(calls) <= 2 + 2 * 3


# --- shared memory in all recordings -----------------------------------------------------


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
    """Return whether the output is independent of the argument, and whether it has a derivative."""
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
    if reached:
        with pytest.raises(GradtoolsError, match="reads it through another view"):
            translating.formula_graph(program)
    else:
        formula = translating.formula_graph(program)
        assert formula.inputs[1] not in order(formula.outputs)


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


@pytest.mark.parametrize("where", ["in vmap", "in another recording"])
def test_a_run_is_recorded_in_plain_eager_code_alone(where):
    look = lambda x: (gt.gradient_graph(torch.sin, X), x.sum())[1]
    with pytest.raises(GradtoolsError, match="can only be recorded in plain eager code"):
        torch.vmap(look)(X[None]) if where == "in vmap" else gt.why_zero(look, X)
