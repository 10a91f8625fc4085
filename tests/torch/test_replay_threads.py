"""Who may run beside a backward pass that computes chunks again: each row of the docs' table."""

from __future__ import annotations

import copy
import random
import threading

import numpy as np
import pytest
import torch
from torch import nn

import gradtools.torch as gt
from gradtools import GradtoolsError
from gradtools.torch.replaying import recomputing

ROWS, CHUNK, WAIT = 8, 4, 20.0
pytestmark = pytest.mark.filterwarnings("ignore:chunked. .* is a batch normalization")
draws_numpy, seed_numpy = np.random.rand, np.random.seed


def net(*more):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(3, 3), *more, nn.Linear(3, 2))


def batch():
    return torch.arange(3.0 * ROWS).reshape(ROWS, 3).sin()


def gradients(model):
    return [p.grad for p in model.parameters()]


def by_the_plain_loop(model):
    model = copy.deepcopy(model)
    torch.manual_seed(0)
    torch.cat([model(x) for x in batch().split(CHUNK)]).square().sum().backward()
    return gradients(model)


class Beside:
    """Has `work` run in a thread of its own while a chunk is computed again."""

    never_changes = True  # so that what it notes is not put back with the state of f

    def __init__(self, work, waits=True):
        self.work, self.waits, self.found, self.error = work, waits, None, None
        self.thread = threading.Thread(target=self._run)

    def _run(self):
        try:
            self.found = self.work()
        except Exception as error:
            self.error = error

    def __call__(self, *_):
        if recomputing.is_recomputing() and self.thread.ident is None:
            self.thread.start()
            self.thread.join(WAIT if self.waits else 0.2)
            self.finished = not self.thread.is_alive()

    def step(self, model, layer=0):
        """The gradients of a chunked step, beside which the work is done."""
        model[layer].register_forward_hook(self)
        torch.manual_seed(0)
        gt.chunked(model, CHUNK)(batch()).square().sum().backward()
        self.thread.join(WAIT)
        assert self.error is None and not self.thread.is_alive()
        return gradients(model)


def assert_same(found, expected):
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)


def trained(model, chunked=lambda f: f):
    chunked(model)(batch()).exp().sum().backward()
    return gradients(model)


def test_another_model_runs_forward_and_backward_beside_a_replay():
    model, other = net(nn.Dropout(0.5), nn.BatchNorm1d(3)), net(nn.BatchNorm1d(3))
    expected, alone = by_the_plain_loop(model), trained(copy.deepcopy(other))
    beside = Beside(lambda: trained(other))
    assert_same(beside.step(model), expected)
    assert beside.finished
    assert_same(beside.found, alone)


def test_another_backward_pass_through_gradtools_waits():
    model, other = net(nn.Dropout(0.5)), net(nn.Tanh())
    expected, alone = by_the_plain_loop(model), trained(copy.deepcopy(other))
    beside = Beside(lambda: trained(other, lambda f: gt.chunked(f, CHUNK)), waits=False)
    assert_same(beside.step(model), expected)
    assert not beside.finished
    assert_same(beside.found, alone)


def test_the_same_model_may_be_called_where_that_changes_no_buffer():
    model = net(nn.Dropout(0.5), nn.BatchNorm1d(3).eval())
    expected = by_the_plain_loop(model)
    alone = copy.deepcopy(model)[0](batch())
    beside = Beside(lambda: nn.Sequential(model[0], model[2])(batch()))
    assert_same(beside.step(model), expected)
    assert beside.finished
    assert_same([beside.found], [model[2](alone)])


def test_what_another_threads_backward_pass_adds_to_the_same_model_stays():
    model = net(nn.Tanh())
    expected = by_the_plain_loop(model)
    both = [2 * g for g in expected]
    beside = Beside(lambda: model(batch()).square().sum().backward())
    assert_same(beside.step(model), both)
    assert beside.finished


def test_the_gradient_that_f_adds_itself_is_added_once():
    model, w = net(nn.Tanh()), torch.ones((), requires_grad=True)
    w.grad = torch.tensor(5.0)

    def f(x):
        with torch.enable_grad():
            (3 * w).backward()
        return model(x)

    gt.chunked(f, CHUNK)(batch()).square().sum().backward()
    assert w.grad == 5 + 3 * ROWS / CHUNK
    assert_same(gradients(model), by_the_plain_loop(model))


@pytest.mark.parametrize("asks", [False, True], ids=["f does not ask", "f asks is_recomputing"])
def test_a_call_that_changes_buffers_of_the_same_model_is_refused(asks):
    model = net(nn.BatchNorm1d(3))
    if asks:
        model[0].register_forward_hook(lambda *_: (gt.is_recomputing(), None)[1])
    with pytest.raises(GradtoolsError, match=r"not changed as often .* another thread"):
        Beside(lambda: model[1](batch())).step(model)
    assert all(p.grad is None for p in model.parameters())


STREAMS = {"PyTorch": lambda: torch.rand(()), "Python": random.random, "NumPy": draws_numpy}


class Noise(nn.Module):
    """Noise of a stream."""

    def __init__(self, draw):
        super().__init__()
        self.draw = draw

    def forward(self, x):
        return x * (1.0 + float(self.draw()))


@pytest.mark.parametrize("stream", STREAMS)
@pytest.mark.parametrize("layer", [0, 2], ids=["before f draws", "after f drew"])
def test_a_thread_that_draws_from_a_stream_of_f_is_refused(stream, layer):
    draw = STREAMS[stream]
    model = net(Noise(draw))
    with pytest.raises(GradtoolsError, match="another thread draws"):
        Beside(draw).step(model, layer)
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize("stream", ["Python", "NumPy"])
def test_a_thread_may_draw_from_streams_that_f_does_not_draw_from(stream):
    model, draw = net(nn.Dropout(0.5)), STREAMS[stream]
    expected = by_the_plain_loop(model)
    random.seed(0), seed_numpy(0)
    numbers = [float(draw()) for _ in range(2)]
    random.seed(0), seed_numpy(0)
    beside = Beside(draw)
    assert_same(beside.step(model), expected)
    assert beside.finished
    assert [float(beside.found), float(draw())] == numbers  # none comes twice


def test_a_thread_may_draw_from_a_generator_of_its_own():
    model, own = net(nn.Dropout(0.5)), torch.Generator().manual_seed(3)
    expected = by_the_plain_loop(model)
    beside = Beside(lambda: torch.rand(2, generator=own))
    assert_same(beside.step(model), expected)
    assert torch.equal(beside.found, torch.rand(2, generator=torch.Generator().manual_seed(3)))


def test_an_f_that_computes_in_threads_of_its_own_is_refused():
    model = net(nn.Tanh())

    def f(x):
        found = []
        thread = threading.Thread(target=lambda: found.append(model(x)))
        thread.start()
        thread.join()
        return torch.cat(found)

    with pytest.raises(GradtoolsError, match="chunked"):
        gt.chunked(f, CHUNK)(batch()).square().sum().backward()
