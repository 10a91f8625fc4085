"""Tests gradients, memory, state, threads and errors when the backward pass recomputes f.

The reference is the plain call or the plain loop over chunks in float64.
"""

from __future__ import annotations

import itertools
import threading
import time

import pytest
import torch
from torch import nn

import gradtools.torch as gt
from gradtools import GradtoolsError


def _numbers(*shape, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def _in_a_checkpoint_inside(remade, x, h):
    outer = lambda x: remade(lambda q: torch.tanh(q @ h))(x.sin()) @ h
    return remade(outer)(x).sum()


def _given_to_a_checkpoint_inside(remade, x, h):
    outer = lambda x: remade(lambda q, h: q @ h)(x.sin(), h)
    return remade(outer)(x).cos().sum()


def _returned_as_it_is(remade, x, h):
    y, again = remade(lambda x: (x @ h, h))(x)
    return (y.cos() @ again).sum()


def _kept_in_a_list(remade, x, h):
    kept = []

    def f(x):
        y = torch.tanh(x @ h)
        kept.append((y * x).mean())
        return y

    return remade(f)(x).sum() + kept[0]


def _a_method_of_it_in_c(remade, x, h):
    times, add = h.matmul, h.T.add
    return remade(lambda x: add(times(x.T)))(x).cos().sum() + remade(h.matmul)(x.T).sin().sum()


CASES = (
    _a_method_of_it_in_c,
    _in_a_checkpoint_inside,
    _given_to_a_checkpoint_inside,
    _returned_as_it_is,
    _kept_in_a_list,
)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__.strip("_"))
@pytest.mark.filterwarnings("ignore:checkpoint. f reads a tensor")
def test_a_checkpoint_has_the_gradients_of_the_plain_call(case):
    found = []
    for remade in (lambda f: f, gt.checkpoint):
        x = _numbers(3, 3, seed=1).requires_grad_()
        w = _numbers(3, 3, seed=2).requires_grad_()
        case(remade, 2 * x, torch.sin(w)).backward()
        found.append((x.grad, w.grad))
    torch.testing.assert_close(found[1], found[0])


def test_what_chunks_keep_aside_has_its_gradient():
    kept = []

    def f(x):
        kept.append((x * x).sum())
        return x.sin()

    x = _numbers(4, 3).requires_grad_()
    (gt.chunked(f, 2)(x).sum() + sum(kept)).backward()
    torch.testing.assert_close(x.grad, x.detach().cos() + 2 * x.detach())


def _second_order(wrap, captures):
    w, x0 = _numbers(3, 3).requires_grad_(), _numbers(4, 3, seed=1)
    x, h = (x0 @ w).sin(), (w * 2).cos()
    f = (lambda x: torch.tanh(x @ w @ h)) if captures else (lambda x: torch.tanh(x @ w))
    (first,) = torch.autograd.grad((wrap(f)(x) ** 2).sum(), w, create_graph=True)
    (second,) = torch.autograd.grad((first**2).sum(), w, create_graph=True)
    return first, second, *torch.autograd.grad((second**2).sum(), w)


@pytest.mark.parametrize("captures", [False, True])
@pytest.mark.parametrize("wrap", [gt.checkpoint, lambda f: gt.chunked(f, 2)])
def test_a_weight_behind_an_argument_and_inside_of_f_counts_once(wrap, captures):
    expected = _second_order(lambda f: f, captures)
    torch.testing.assert_close(_second_order(wrap, captures), expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("verify", ["first", True, False])
def test_how_often_outputs_are_compared(verify):
    w, late = torch.ones(3).requires_grad_(), [0]
    f = gt.chunked(lambda x: x * w * (1 + late[0]), 2, verify=verify)

    def step(change):
        loss = f(torch.ones(4, 3)).sum()
        late[0] += change
        loss.backward()

    step(0)
    if verify is True:
        with pytest.raises(GradtoolsError, match="returns other values"):
            step(1)
    else:
        step(1)  # `verify` compares values only in the first backward pass, or never


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_gradient_at_a_module_is_compared_on_its_own_scale(dtype):
    """The large constant part of the loss must not hide that f reads another batch."""
    module, batch = nn.Linear(3, 1).to(dtype), [_numbers(4, 3).to(dtype)]

    def step(change):
        value, _ = gt.value_and_grad(lambda m: m(batch[0]).square().mean() + 1e5)(module)
        batch[0] = batch[0] + change
        return torch.autograd.grad(value, module.weight)[0]

    expected = torch.autograd.grad(module(batch[0]).square().mean(), module.weight)[0]
    torch.testing.assert_close(step(0), expected)
    with pytest.raises(GradtoolsError, match="returns other values"):
        step(1)


@pytest.mark.filterwarnings("ignore:.*batch normalization")
def test_a_function_that_raises_leaves_what_the_plain_call_leaves():
    def after(wrap):
        torch.manual_seed(0)
        norm, calls = nn.BatchNorm1d(3).double(), itertools.count()

        def f(x):
            if next(calls) == 1:
                raise ValueError
            return norm(x) * torch.rand(())

        with pytest.raises(ValueError):
            wrap(f)(_numbers(4, 3))
        return norm.running_mean, torch.get_rng_state()

    plain = after(lambda f: lambda x: [f(c) for c in x.split(2)])
    torch.testing.assert_close(after(lambda f: gt.chunked(f, 2)), plain)


def test_a_tensor_that_is_written_between_the_passes_is_pytorchs_own_error():
    net, x = nn.Linear(3, 2).double(), _numbers(4, 3)
    for written in (x, net.weight):
        loss = gt.chunked(net, 2)(x).sum()
        with torch.no_grad():
            written.mul_(2)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


def test_nested_in_itself_thirty_deep():
    f = torch.sin
    for _ in range(30):
        f = gt.checkpoint(f)
    x = _numbers(3).requires_grad_()
    f(x).sum().backward()
    torch.testing.assert_close(x.grad, x.detach().cos())


@pytest.mark.parametrize("hooked", [False, True])
def test_a_checkpoint_inside_is_recomputed_when_parameters_are_arguments(hooked, recwarn):
    """With hooks, and in a Jacobian, the parameters of the outer checkpoint become arguments."""
    net, x = nn.Linear(3, 3).double(), _numbers(2, 3)
    runs = []
    f = gt.checkpoint(gt.checkpoint(lambda x: (runs.append(0), net(x).sin())[1]))
    if hooked:
        net.weight.register_hook(lambda g: g)
        f(x).sum().backward()
    else:
        torch.testing.assert_close(gt.jacobian(f)(x), gt.jacobian(lambda x: net(x).sin())(x))
    assert len(runs) == 3
    assert not [w for w in recwarn if "not recomputed" in str(w.message)]


def test_no_lock_is_held_while_f_runs():
    """f acquires a lock that another thread may hold during its own backward pass."""
    lock, net, x = threading.RLock(), nn.Linear(3, 1).double(), _numbers(4, 3)

    def f(x):
        time.sleep(0.002)
        with lock:
            return net(x)

    def pass_(outer):
        given = x.clone().requires_grad_()
        with outer:
            torch.autograd.grad(gt.chunked(f, 2)(given).sum(), given)

    free = threading.RLock()
    threads = [
        threading.Thread(target=lambda o=o: [pass_(o) for _ in range(20)], daemon=True)
        for o in (lock, free)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert not any(thread.is_alive() for thread in threads)


@pytest.mark.parametrize("wrap", [gt.checkpoint, lambda f: gt.chunked(f, 2)])
def test_a_penalty_on_the_gradient_of_a_module_inside_of_f(wrap):
    net, x = nn.Linear(3, 1).double(), _numbers(4, 3)

    def f(x):
        grads = gt.grad(lambda net: net(x).square().sum())(net)
        return x * sum((g**2).sum() for g in grads.values())

    plain = f if wrap is gt.checkpoint else lambda x: torch.cat([f(c) for c in x.split(2)])
    found = []
    for call in (wrap(f), plain):
        given = x.clone().requires_grad_()
        found.append(torch.autograd.grad(call(given).sum(), [given, *net.parameters()]))
    torch.testing.assert_close(*found)


@pytest.mark.parametrize("wrap", [gt.checkpoint, lambda f: gt.chunked(f, 2)])
def test_third_derivatives_of_a_derivative_inside_of_f(wrap):
    w, v, x = _numbers(3, 3), _numbers(3, seed=1), _numbers(4, 3, seed=2)

    def third(wrap):
        def f(w, v):
            slope = gt.grad(lambda x: (x @ w).sin().sum())
            return wrap(lambda x: slope(x).square() * v + (x @ w).square())(x).sum()

        return gt.grad(lambda v: gt.grad(f)(w, v).square().sum())(v)

    torch.testing.assert_close(third(wrap), third(lambda f: f))


def test_second_derivatives_of_a_mixed_partial_inside_of_f():
    w, x = _numbers(3, 3), _numbers(4, 3, seed=2)

    def second(wrap):
        def f(w):
            G = lambda z: (z @ w).sin()
            mixed = lambda x: gt.mixed_partial(lambda y, g: (y * g).square().sum(), G, x, x, x)
            return wrap(lambda x: mixed(x).sum() + (x @ w).sum())(x)

        return gt.grad(lambda w: gt.grad(f)(w).square().sum())(w)

    torch.testing.assert_close(second(gt.checkpoint), second(lambda f: f))


def test_a_derivative_of_a_solution_whose_equation_closes_over_the_argument():
    w, v = _numbers(3).square() + 1, _numbers(3, seed=1)

    def slope(v):
        def total(w):
            root = gt.implicit_solution(lambda z, v: z * w - v, lambda v: v / w.detach(), "dense")
            return root(v).square().sum()

        return gt.grad(total)(w).square().sum()

    torch.testing.assert_close(gt.grad(gt.checkpoint(slope))(v), gt.grad(slope)(v))


def test_f_is_computed_again_to_its_end():
    """PyTorch saves rrelu's noise before drawing it, so f must run to its end (torch#193671)."""
    found = []
    for wrap in (lambda f: f, gt.checkpoint):
        torch.manual_seed(0)
        x = torch.linspace(-1, 1, 20, dtype=torch.float64).requires_grad_()
        y = wrap(lambda x: nn.functional.rrelu(x, training=True))(x)
        found.append(torch.autograd.grad((y * torch.arange(20)).sum(), x)[0])
    assert torch.equal(*found)


def test_an_output_that_is_a_view_of_a_parameter_has_memory_of_its_own():
    w, x = _numbers(3, 2).requires_grad_(), _numbers(4, 3)
    y, view = gt.checkpoint(lambda x: (x @ w, w.T))(x)
    view.mul_(2)
    assert torch.equal(w, _numbers(3, 2))
    (y.sum() + view.square().sum()).backward()
    torch.testing.assert_close(w.grad, x.sum(0)[:, None] + 8 * _numbers(3, 2))


def test_a_tensor_that_f_keeps_from_chunk_to_chunk_is_refused():
    w, kept = _numbers(3).requires_grad_(), []

    def f(x):
        if not kept:
            kept.append(w.exp())
        return x * kept[0]

    with pytest.raises(GradtoolsError, match="keeps a tensor that requires grad from one"):
        gt.chunked(f, 2)(_numbers(4, 3))
