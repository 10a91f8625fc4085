"""Compares chunked functions in PyTorch that use modules, hooks or transforms with plain loops."""

from __future__ import annotations

import functools
import itertools
import sys
import warnings

import pytest
import torch
from torch import nn

import gradtools.torch as gt
from tests.torch.test_chunking_traps import (
    CHUNK,
    X,
    contrast,
    same,
    state_of,
    streams,
)

pytestmark = pytest.mark.filterwarnings("ignore:chunked. .* is a batch normalization")


def numbers(*shape, seed=0, dtype=torch.float64):
    generator = torch.Generator(torch.get_default_device()).manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=dtype)


def network(*more):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), *more, nn.Linear(4, 2)).double()


def plain(f, x=X, chunk_size=CHUNK):
    return torch.cat([f(c) for c in x.split(chunk_size)])


def gradients(loss, parameters):
    found = torch.autograd.grad(loss, tuple(parameters), allow_unused=True)
    return list(found)


def all_same(a, b, tolerance=1e-12):
    return len(a) == len(b) and all(same(p, q, tolerance) for p, q in zip(a, b, strict=True))


# --- parameters are found ------------------------------------------------------------------


W = numbers(3, 3).requires_grad_()
GLOBAL = {"w": W}


class Holder:
    def __init__(self, w):
        self.w = w

    def method(self, c):
        return (c @ self.w).tanh()

    def __call__(self, c):
        return self.method(c).exp()


def closure(w):
    def outer(c):
        def inner():
            return (c @ w).sin()

        return inner()

    return outer


CAPTURES = {
    "closure": lambda w: closure(w),
    "global": lambda w: lambda c: (c @ GLOBAL["w"]).tanh(),
    "partial": lambda w: functools.partial(lambda w, c: (c @ w).tanh(), w),
    "bound method": lambda w: Holder(w).method,
    "callable object": Holder,
    "dict": lambda w: lambda c, d={"w": [(w,)]}: (c @ d["w"][0][0]).tanh(),
    "default": lambda w: lambda c, *, w=w: (c @ w).tanh(),
    "iterator's": lambda w: (lambda get: lambda c: (c @ get()).tanh())(
        itertools.repeat(w).__next__
    ),
}


def test_chunked_in_chunked_with_dropout_and_state():
    def run(inner, outer):
        torch.manual_seed(1)
        model = network(nn.Dropout(0.5), nn.BatchNorm1d(4))
        out = outer(lambda c: inner(model, 3)(c) + inner(model, 5)(c.flip(0)), 5)(X[:10])
        found = gradients(contrast(out), model.parameters())
        return [out, *found, *state_of(model).values()], streams()

    loop = lambda f, n: lambda x: plain(f, x, n)
    expected, stood = run(loop, loop)
    ours = gt.chunked
    for inner, outer in ((ours, ours), (ours, loop), (loop, ours)):
        found, stands = run(inner, outer)
        assert all_same(found, expected) and stands == stood


# --- .grad and hooks -----------------------------------------------------------------------


class Raising(torch.autograd.Function):
    """A Function that raises an error in the backward pass of call number `at`."""

    calls = itertools.count()
    at = -1

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, ct):
        if next(Raising.calls) == Raising.at:
            raise ZeroDivisionError("in backward")
        return ct


@pytest.mark.parametrize("at", range(4))
def test_an_exception_in_a_chunks_backward_leaves_no_gradient(at):
    model = network(nn.Dropout(0.5), nn.BatchNorm1d(4))
    for p in model.parameters():
        p.grad = torch.full_like(p, 0.25)
    Raising.calls, Raising.at = itertools.count(), at
    x = X.clone().requires_grad_()
    out = gt.chunked(lambda c: model[1:](Raising.apply(model[0](c))), CHUNK)(x)
    before = state_of(model), streams()
    with pytest.raises(ZeroDivisionError):
        contrast(out).backward(retain_graph=True)
    assert state_of(model).keys() == before[0].keys()
    assert all(same(v, before[0][k]) for k, v in state_of(model).items())
    assert streams() == before[1]
    assert all((p.grad == 0.25).all() for p in model.parameters()) and x.grad is None
    assert not gt.is_recomputing() and all(not p._backward_hooks for p in model.parameters())
    contrast(out).backward()  # backward can be retried after the error
    assert x.grad is not None


# --- number of calls of f -----------------------------------------------------------------------


@pytest.mark.parametrize("count_only", [True, False])
def test_each_backward_pass_computes_each_chunk_again(count_only):
    model, log = network(nn.Dropout(0.5)), list[bool]()
    model.register_forward_hook(lambda m, a, y: log.append(gt.is_recomputing()))
    torch.manual_seed(1)
    out = gt.chunked(model, CHUNK)(X)
    stands = streams()
    parameters = list(model.parameters())
    loss = contrast(out)
    first = torch.autograd.grad(loss, parameters, retain_graph=not count_only)
    assert log == [False] * 4 + [True] * 4
    if not count_only:
        second = torch.autograd.grad(loss, parameters)
        assert log == [False] * 4 + [True] * 8
        assert all_same(first, second, 1e-14)
    assert streams() == stands
    torch.manual_seed(1)
    expected = plain(model)
    assert torch.equal(out, expected)
    assert all_same(first, gradients(contrast(expected), parameters))


# --- higher orders -------------------------------------------------------------------------


def stateful(norm=nn.BatchNorm1d):
    return network(nn.Dropout(0.4), norm(4), nn.Softplus())


class PlainBatchNorm(nn.BatchNorm1d):
    """Batch norm, computed by plain operations, so that PyTorch's third derivatives are correct."""

    def forward(self, x):
        mean, var = x.mean(0), x.var(0, unbiased=False)
        with torch.no_grad():
            self.num_batches_tracked += 1
            self.running_mean.lerp_(mean, self.momentum)
            self.running_var.lerp_(x.var(0), self.momentum)
        return (x - mean) / (var + self.eps).sqrt() * self.weight + self.bias


def first_to_third(call, model, x, order):
    """Return derivatives of orders 1 to `order` with respect to all parameters and the batch."""
    leaves = [*model.parameters(), x]
    found, value = [], contrast(call(x)) * 0.1
    for k in range(order):
        grads = torch.autograd.grad(value, leaves, create_graph=k + 1 < order, allow_unused=True)
        found += grads
        value = sum((g.sin() * (j + 1)).sum() for j, g in enumerate(grads) if g is not None)
    return found


@pytest.mark.slow_at("3-PlainBatchNorm")
@pytest.mark.parametrize(("order", "norm"), [(2, nn.BatchNorm1d), (3, PlainBatchNorm)])
def test_double_and_third_backward_through_dropout_and_batch_norm(order, norm):
    found = []
    for call in (plain, lambda f, x: gt.chunked(f, CHUNK)(x)):
        model, x = stateful(norm), X.clone().requires_grad_()
        torch.manual_seed(1)
        grads = first_to_third(lambda x, m=model, c=call: c(m, x), model, x, order)
        found.append(([*grads, *state_of(model).values()], streams()))
    assert len(found[0][0]) >= 8 * order
    assert all_same(found[1][0], found[0][0], 1e-11) and found[1][1] == found[0][1]


# --- torch.func and gradtools --------------------------------------------------------------

F = lambda c, w: (c @ w).tanh() * c.exp()


def ours_of(w, x, **options):
    return contrast(gt.chunked(F, CHUNK, in_axes=(0, None), **options)(x, w))


def plain_of(w, x):
    return contrast(plain(lambda c: F(c, w), x))


TRANSFORMS = {
    "torch.func.grad": lambda f: torch.func.grad(f, argnums=(0, 1)),
    "torch.func.jvp": lambda f: lambda w, x: torch.func.jvp(f, (w, x), (w.cos(), x.sin())),
    "grad of grad": lambda f: torch.func.grad(lambda w, x: torch.func.grad(f)(w, x).sin().sum()),
    "torch.func.vmap": lambda f: lambda w, x: torch.vmap(f, (0, None))(torch.stack([w, w * 2]), x),
    "vmap of grad": lambda f: (
        lambda w, x: torch.vmap(torch.func.grad(f), (None, 0))(w, torch.stack([x, x.sin()]))
    ),
    "grad of vmap": lambda f: torch.func.grad(
        lambda w, x: torch.vmap(f, (None, 0))(w, torch.stack([x, x.sin()])).prod()
    ),
    "gt.jacobian forward": lambda f: gt.jacobian(f, mode="forward"),
    "gt.hessian": gt.hessian,
    "gt.per_example_grad": lambda f: (
        lambda w, x: gt.per_example_grad(f)(w, torch.stack([x, x.sin()]))
    ),
}


@pytest.mark.parametrize("name", TRANSFORMS)
def test_transforms(name):
    w = W.detach()
    found = TRANSFORMS[name](functools.partial(ours_of))(w, X)
    expected = TRANSFORMS[name](plain_of)(w, X)
    flat = torch.utils._pytree.tree_leaves
    assert all(x.abs().max() > 1e-6 for x in flat(expected))
    assert all_same(flat(found), flat(expected), 1e-11)


@pytest.mark.parametrize("transform", ["grad", "jacrev", "jacfwd", "vmap"])
@pytest.mark.parametrize("name", CAPTURES)
def test_captured_tensors_of_a_transform_are_inputs(name, transform, monkeypatch):
    def loss(w, chunked):
        if name == "global":
            monkeypatch.setitem(GLOBAL, "w", w)
        f = CAPTURES[name](w)
        return contrast(gt.chunked(f, CHUNK)(X) if chunked else plain(f))

    found, expected = (
        getattr(torch.func, transform)(functools.partial(loss, chunked=chunked))(W.detach())
        for chunked in (True, False)
    )
    assert same(found, expected, 1e-12)


@pytest.mark.parametrize("name", [n for n in CAPTURES if n != "iterator's"])
def test_captured_tensors_with_a_graph_have_their_gradient(name, monkeypatch):
    """Tensors in closures become inputs. For other captured tensors, f's graph is saved."""

    def loss(chunked):
        h = (W * 2).sin()
        monkeypatch.setitem(GLOBAL, "w", h)
        f = CAPTURES[name](h)
        found = contrast(gt.chunked(f, CHUNK)(X) if chunked else plain(f))
        return torch.autograd.grad(found + h.sum(), W)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert all_same(list(loss(True)), list(loss(False)))


@pytest.mark.parametrize("transform", ["grad", "jacrev", "vmap"])
def test_what_a_transform_swaps_into_a_module_is_captured(transform):
    model = network()
    values = {k: p.detach() for k, p in model.named_parameters()}
    if transform == "vmap":
        values = {k: torch.stack([v, 2 * v]) for k, v in values.items()}

    class Loss(nn.Module):
        def __init__(self, call):
            super().__init__()
            self.model, self.call = model, call

        def forward(self, x):
            return contrast(self.call(self.model)(x))

    found = []
    for call in (lambda f: gt.chunked(f, CHUNK), lambda f: functools.partial(plain, f)):
        loss = lambda values, call=call: torch.func.functional_call(Loss(call), values, (X,))
        given = {f"model.{k}": v for k, v in values.items()}
        result = getattr(torch.func, transform)(loss)(given)
        found.append([*result.values()] if isinstance(result, dict) else [result])
    assert all_same(*found)


def test_jacobians_through_dropout_have_one_mask():
    drop = nn.Dropout(0.5)
    model = network(drop)
    f = lambda c, w: drop(c @ w).tanh()
    w = W.detach()

    ours = lambda w: gt.chunked(f, CHUNK, in_axes=(0, None))(X, w)
    looped = lambda w: plain(lambda c: f(c, w))
    for jacobian in (torch.func.jacrev, functools.partial(torch.func.jacfwd, randomness="same")):
        torch.manual_seed(1)
        expected = jacobian(looped)(w)
        torch.manual_seed(1)
        assert same(jacobian(ours)(w), expected, 1e-12)
        torch.manual_seed(1)
        assert same(gt.jacobian(ours, mode="reverse")(w), expected, 1e-12)
    torch.manual_seed(1)
    expected = torch.autograd.functional.hessian(lambda w: (looped(w) ** 2).sum(), w)
    torch.manual_seed(1)
    assert same(gt.hessian(lambda w: (ours(w) ** 2).sum())(w), expected, 1e-12)
    # Pull back a batch of cotangents through batch norm to the captured parameters.
    model.append(nn.BatchNorm1d(2, dtype=torch.float64))
    vectors, parameters = numbers(5, 11, 2), list(model.parameters())
    found = []
    for call in (
        lambda: plain(model),
        lambda: gt.chunked(model, CHUNK)(X),
    ):
        torch.manual_seed(1)
        found.append(torch.autograd.grad(call(), parameters, vectors, is_grads_batched=True))
    assert all_same(*found)


@pytest.mark.parametrize("randomness", ["same", "different"])
def test_vmap_draws_as_it_is_told_in_both_passes(randomness):
    drop, xs = nn.Dropout(0.5), torch.stack([X, X])
    f = lambda w, x: contrast(gt.chunked(lambda c, w: drop(c @ w), CHUNK, in_axes=(0, None))(x, w))
    torch.manual_seed(1)
    found = torch.vmap(torch.func.grad(f), (None, 0), randomness=randomness)(W.detach(), xs)
    torch.manual_seed(1)
    looped = lambda w, x: contrast(plain(lambda c: drop(c @ w), x))
    expected = torch.vmap(torch.func.grad(looped), (None, 0), randomness=randomness)(W.detach(), xs)
    assert all_same([found], [expected]) and torch.equal(*found) == (randomness == "same")
    with pytest.raises(RuntimeError, match="randomness"):
        torch.vmap(f, (None, 0))(W.detach(), xs)


@pytest.mark.parametrize(
    "transform", [functools.partial(gt.chunked, chunk_size=CHUNK), gt.checkpoint]
)
def test_a_transformed_part_of_a_functionalized_model_has_the_tensors_it_is_given(transform):
    part = network(nn.BatchNorm1d(4))
    model, counted = nn.Sequential(transform(part)).eval(), dict(part.named_buffers())
    for train in (False, True):
        apply, params, state = gt.make_functional(model, train=train)
        zeros = {name: torch.zeros_like(p) for name, p in params.items()}
        out, after = apply(zeros, state, X[:CHUNK], key=gt.random_key(0))
        assert out.abs().max() == 0
        assert any(not same(after[name], state[name], 1e-12) for name in state) is train
    assert not part.training and all(b is counted[k] for k, b in part.named_buffers())
    found = gt.grad(lambda params: contrast(apply(params, state, X, key=gt.random_key(0))[0]))(
        params
    )
    assert all(g.abs().max() > 0 for name, g in found.items() if not name.endswith("0.bias"))


# --- verify, progress, warnings ------------------------------------------------------------


def test_a_progress_bar_is_shown_when_asked_in_a_terminal_and_only_then(capfd, monkeypatch):
    for progress, terminal in ((False, True), (True, False), (True, True)):
        monkeypatch.setattr(sys.stderr, "isatty", lambda: terminal)
        shown = progress and terminal
        out = gt.chunked(network(), 2, progress=progress)(X)
        forward = capfd.readouterr()
        contrast(out).backward()
        backward = capfd.readouterr()
        assert forward.out == backward.out == ""
        assert ("chunk" in forward.err, "chunk" in backward.err) == (shown, False)
    gt.chunked(network(), 20, progress=True)(X)
    assert capfd.readouterr().err == ""


# --- microbatched_value_and_grad -----------------------------------------------------------


@pytest.mark.sampled(1, 1)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_microbatched_sums_narrow_numbers_in_float32(dtype):
    w, x = torch.ones((), dtype=dtype), torch.ones(1000, dtype=dtype)
    x[0] = x[-1] = 2048.0
    value, grad = gt.microbatched_value_and_grad(lambda w, x: (w * x).sum(), 1, reduction="sum")(
        w, x
    )
    assert value.dtype is dtype and grad.dtype is dtype
    assert abs(grad.item() - 5094) <= 16 and abs(value.item() - 5094) <= 16
