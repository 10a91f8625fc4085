"""A tile that PyTorch computes again is the same: what is looked at, when, and what it costs."""

from __future__ import annotations

import itertools

import pytest
import torch

import gradtools.torch as gt
from gradtools import GradtoolsError
from gradtools.torch import tiling
from gradtools.torch.live_bytes import LiveBytes

Tensor = torch.Tensor


def numbers(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def scores(x: Tensor, y: Tensor, w: Tensor) -> Tensor:
    return x @ (w @ y.T)


def step(run, n: int = 6) -> None:
    x = numbers(n, 3).requires_grad_()
    run(x, numbers(5, 3), numbers(3, 3)).sum().backward()


@pytest.fixture
def compared(monkeypatch):
    """How often a tensor's numbers were read."""
    seen: list[Tensor] = []
    known = tiling.figures

    def noted(x, sample):
        seen.append(x)
        return known(x, sample)

    monkeypatch.setattr(tiling, "figures", noted)
    return seen


def made(f, **options):
    """The same function, made anew in each step as a lambda in a loop is."""
    return lambda *xs: gt.pairwise_reduce(lambda *tile: f(*tile), "sum", 2, **options)(*xs)


def test_a_tile_is_compared_once_for_each_function_and_each_shape(compared):
    run = made(scores)
    step(run)
    assert len(compared) == 2
    step(run)
    assert len(compared) == 2
    step(run, n=7)
    assert len(compared) == 4


def test_with_verify_each_tile_of_each_derivative_is_compared_or_none(compared):
    for _ in range(2):
        step(made(scores, verify=True))
    assert len(compared) == 2 * 2 * 15  # of three blocks of rows, five of columns
    compared.clear()
    step(made(scores, verify=False))
    assert not compared


def test_an_unknown_time_of_verification_is_refused():
    with pytest.raises(GradtoolsError, match="verify is 'always'; expected 'first'"):
        gt.pairwise_reduce(scores, verify="always")


def test_a_change_after_the_first_derivative_is_seen_if_it_is_to_be():
    on, ticks = [0], itertools.count(1)

    def f(x, y, w):
        return scores(x, y, w) * (next(ticks) if on[0] else 1)

    for verify in (None, True):
        run = gt.pairwise_reduce(f, "sum", 2, verify=verify)
        step(run)
        on[0] = 1
        if verify:
            with pytest.raises(GradtoolsError, match="gives other numbers"):
                step(run)
        else:
            step(run)
        on[0] = 0


def test_a_difference_in_a_later_tile_is_seen_with_verify():
    ticks = itertools.count()
    f = lambda x, y, w: scores(x, y, w) * (2.0 if next(ticks) == 4 else 1.0)
    with pytest.raises(GradtoolsError, match="gives other numbers"):
        step(gt.pairwise_reduce(f, "sum", 2, verify=True))


def test_what_was_wrong_is_looked_at_again():
    ticks = itertools.count(1)
    run = gt.pairwise_reduce(lambda x, y, w: scores(x, y, w) * next(ticks), "sum", 2)
    for _ in range(2):
        with pytest.raises(GradtoolsError, match="gives other numbers"):
            step(run)


def test_shared_arrays_are_copied_for_the_first_tile_of_the_first_call_alone():
    w = torch.zeros(512, 512)
    run = gt.pairwise_reduce(lambda x, y, w: (x @ w) @ y.T, "sum", 2)
    x, y = torch.ones(4, 512), torch.ones(4, 512)

    def peak() -> int:
        with LiveBytes() as live:
            run(x, y, w)
        return live.peak

    assert peak() > w.nbytes
    assert peak() < w.nbytes // 8


def test_an_argument_that_is_written_in_a_later_call_is_refused():
    writes = [False]

    def f(x, y, w):
        if writes[0]:
            x.add_(1)
        return scores(x, y, w)

    run = gt.pairwise_reduce(f, "sum", 2)
    with torch.no_grad():
        run(numbers(4, 3), numbers(5, 3), numbers(3, 3))
        writes[0] = True
        with pytest.raises(GradtoolsError, match="f changes an argument in place"):
            run(numbers(4, 3), numbers(5, 3), numbers(3, 3))


@pytest.mark.parametrize("holds", ["a closure", "a module", "a list"])
def test_what_f_closes_over_and_is_changed_is_refused_in_each_call(holds):
    table, module = numbers(3), torch.nn.BatchNorm1d(3).double().eval()
    listed = [numbers(3)]
    held = {"a closure": table, "a module": module.running_mean, "a list": listed[0]}[holds]
    f = {
        "a closure": lambda x, y: (x * table) @ y.T,
        "a module": lambda x, y: module(x) @ y.T,
        "a list": lambda x, y: (x * listed[0]) @ y.T,
    }[holds]
    for p in module.parameters():
        p.requires_grad_(False)
    run = gt.pairwise_reduce(f, "sum", 2)
    for change in (False, True, True):
        out = run(numbers(4, 3).requires_grad_(), numbers(5, 3)).sum()
        if not change:
            out.backward()
            continue
        held.add_(1)
        with pytest.raises(GradtoolsError, match="f closes over was changed in place"):
            out.backward()


def test_a_module_that_counts_its_calls_is_refused():
    norm = torch.nn.BatchNorm1d(3).double().requires_grad_(False)
    with pytest.raises(GradtoolsError, match="changed in place, by f"):
        gt.pairwise_reduce(lambda x, y: norm(x) @ y.T, "sum", 2)(numbers(4, 3), numbers(5, 3))


@pytest.mark.parametrize("nested", [False, True])
def test_under_vmap_tiles_are_compared_as_well(nested):
    ticks = itertools.count(1)

    def loss(f):
        mapped = gt.vmap(gt.pairwise_reduce(f, "sum", 2), in_axes=(0, None))
        if nested:
            one = mapped
            mapped = lambda x, y: gt.vmap(one, in_axes=(1, 0), out_axes=1)(
                torch.stack([x, 2 * x], 1), torch.stack([y, 3 * y])
            )
        x = numbers(2, 4, 3).requires_grad_()
        mapped(x, numbers(5, 3)).sin().sum().backward()
        return x.grad

    f = lambda x, y: (x @ y.T).cos()
    x = numbers(2, 4, 3).requires_grad_()
    expected = (x @ numbers(5, 3).T).cos().sum(-1).sin().sum()
    if nested:
        expected = expected + (2 * x @ (3 * numbers(5, 3)).T).cos().sum(-1).sin().sum()
    (wanted,) = torch.autograd.grad(expected, x)
    torch.testing.assert_close(loss(f), wanted)
    with pytest.raises(GradtoolsError, match="gives other numbers"):
        loss(lambda x, y: f(x, y) * next(ticks))


def test_random_numbers_under_vmap_are_refused():
    noisy = lambda x, y: x @ y.T + torch.rand(())
    with pytest.raises(GradtoolsError, match="f draws random numbers"):
        torch.vmap(gt.pairwise_reduce(noisy, "sum", 2), in_dims=(0, None), randomness="same")(
            numbers(2, 4, 3), numbers(5, 3)
        )


@pytest.mark.parametrize("reduce", ["logsumexp", "own"])
def test_the_autocast_of_the_call_holds_for_its_derivatives(reduce):
    x, y = (numbers(n, 8).float() for n in (20, 30))
    own = (lambda s: s.exp().sum(1), torch.add, torch.log)

    def slope(f):
        at = x.clone().requires_grad_()
        with torch.autocast("cpu", torch.bfloat16):
            out = f(at, y)
        (out.float() ** 2).sum().backward()  # outside, as training loops have it
        return out, at.grad

    dtypes = []

    def f(x, y):
        s = x @ y.T
        dtypes.append(s.dtype)
        return s

    found, grad = slope(gt.pairwise_reduce(f, own if reduce == "own" else reduce, 8))
    assert set(dtypes) == {torch.bfloat16}
    assert found.dtype == torch.float32
    wanted, slope_of_it = slope(lambda x, y: (x @ y.T).float().logsumexp(1))
    torch.testing.assert_close(found, wanted)
    torch.testing.assert_close(grad, slope_of_it, rtol=0.02, atol=0.02)


def test_an_autocast_around_the_backward_pass_alone_changes_nothing():
    x, y = (numbers(n, 8).float().requires_grad_() for n in (20, 30))
    loss = gt.pairwise_reduce(lambda x, y: x @ y.T, "logsumexp", 8)
    (wanted,) = torch.autograd.grad(loss(x, y).sum(), x)
    out = loss(x, y).sum()
    with torch.autocast("cpu", torch.bfloat16):
        (found,) = torch.autograd.grad(out, x)
    assert torch.equal(found, wanted)


@pytest.mark.parametrize("reduce", ["sum", "max", "logsumexp"])
def test_many_cotangents_at_once_by_the_vmap_of_autograd_itself(reduce):
    x, y, units = numbers(6, 3).requires_grad_(), numbers(5, 3), torch.eye(6, dtype=torch.float64)
    dense = {"sum": torch.sum, "max": torch.amax, "logsumexp": torch.logsumexp}[reduce]
    found, wanted = (
        torch.autograd.grad(f(x, y), x, units, is_grads_batched=True)[0]
        for f in (
            gt.pairwise_reduce(lambda x, y: x @ y.T, reduce, 2),
            lambda x, y: dense(x @ y.T, 1),
        )
    )
    torch.testing.assert_close(found, wanted)


def test_a_second_derivative_keeps_nothing_of_a_tile():
    def peak(n: int) -> int:
        q, k, v, u = numbers(4, n, 2)
        f = lambda q: (gt.attention(q, k, v, tile_size=128) ** 2).sum()
        with LiveBytes() as live:
            gt.hvp(f, (q,), (u,))
        return live.peak

    assert peak(512) < peak(256) + 128 * 128 * 8


@pytest.mark.parametrize(
    ("x", "y", "own"),
    [
        (numbers(3, 4), numbers(3, 4), True),
        (numbers(3, 4), numbers(3, 1), True),
        (numbers(3, 1), numbers(3, 4), False),
        (numbers(3, 4).float(), numbers(3, 4), False),
    ],
)
def test_a_product_takes_the_memory_of_its_first_factor_where_it_fits(x, y, own):
    wanted, x = x * y, x.clone()
    found = tiling.of_own("multiply", x, y)
    assert torch.equal(found, wanted) and found.dtype == wanted.dtype
    assert (found is x) == own


@pytest.mark.parametrize("axes", [(None, 0), (0, None), (0, 0)])
def test_a_product_in_own_memory_under_vmap(axes):
    owns = []

    def f(x, y):
        x = x + 1
        found = tiling.of_own("multiply", x, y)
        owns.append(found is x)
        return found

    x, y = (numbers(2, 3) if axis == 0 else numbers(3) for axis in axes)
    torch.testing.assert_close(torch.vmap(f, axes)(x, y), (x + 1) * y)
    assert owns == [axes[0] == 0]


def test_a_product_in_own_memory_whose_tangents_have_other_batches():
    x, y, units = numbers(3), numbers(3, seed=1), torch.eye(3, dtype=torch.float64)
    f = lambda x, y: tiling.of_own("multiply", x + 1, y)
    push = lambda dx, dy: torch.func.jvp(f, (x, y), (dx, dy))[1]
    found = torch.vmap(push, (None, 0))(x, units)
    torch.testing.assert_close(found, x * y + (x + 1) * units)
