"""`pairwise_reduce` equals the dense program, in value and in derivatives to third order."""

from __future__ import annotations

import gc
import importlib
import itertools
import weakref
from functools import partial

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gradtools import GradtoolsError

MIXES = ["".join(m) for r in (1, 2, 3) for m in itertools.product("fr", repeat=r)]
TILE = (3, 2)


def arrays(gt, *shapes, seed=0):
    rng = np.random.default_rng(seed)
    return [gt.asarray(rng.normal(size=shape)) for shape in shapes]


def jitted(backend_name, f):
    if backend_name == "torch":
        return f
    import jax

    return jax.jit(f)


def close(gt, found, wanted, rtol=1e-12):
    found, wanted = gt.to_numpy(found), gt.to_numpy(wanted)
    np.testing.assert_allclose(found, wanted, rtol=rtol, atol=rtol * np.abs(wanted).max(initial=0))


def scores(xp, x, y, w):
    return w * (x @ y.T) + 0.3 * xp.sin(x @ y.T)


def logsumexp(xp, s, axis):
    m = xp.max(s, axis=axis, keepdims=True)
    return xp.log(xp.sum(xp.exp(s - m), axis=axis)) + xp.squeeze(m, axis=axis)


def softmax(xp, s):
    return xp.exp(s - logsumexp(xp, s, 1)[:, None])


OWN = lambda xp: (
    lambda s: {"z": xp.sum(xp.exp(s), axis=1)},
    lambda a, b: {"z": a["z"] + b["z"]},
    lambda state: xp.log(state["z"]),
)


def at(xp, x):
    """A column for each row, of some rows none; made of numbers that are differentiated."""
    return xp.astype(xp.floor(4 * x[:, 0] ** 2), xp.int32) % 7


DENSE = {
    "sum": lambda xp, s, v: xp.sum(s, axis=1),
    "mean": lambda xp, s, v: xp.mean(s, axis=1),
    "max": lambda xp, s, v: xp.max(s, axis=1),
    "logsumexp": lambda xp, s, v: logsumexp(xp, s, 1),
    "softmax": lambda xp, s, v: softmax(xp, s) @ v,
    "take": None,  # which is no function of the scores alone
    "own": lambda xp, s, v: logsumexp(xp, s, 1),
    "both sides": lambda xp, s, v: xp.concat([logsumexp(xp, s, 1), xp.sum(s, axis=0)]),
}


def programs(gt, reduce, tile=TILE):
    """A function of rows x, columns y, their values v and a shared w, tiled and dense."""
    xp = gt.xp

    def dense(x, y, v, w):
        s = scores(xp, x, y, w)
        if reduce == "take":
            here = at(xp, x)[:, None] == gt.asarray(np.arange(y.shape[0]))
            return xp.sum(xp.where(here, s, xp.zeros_like(s)), axis=1)
        return DENSE[reduce](xp, s, v)

    def f(x, y, v, w):
        s = scores(xp, x, y, w)
        pairs = {"softmax": (s, v[None]), "both sides": (s, s), "take": (s, at(xp, x))}
        return pairs.get(reduce, s)

    asked, over = {
        "own": (OWN(xp), "columns"),
        "both sides": (("logsumexp", "sum"), ("columns", "rows")),
    }.get(reduce, (reduce, "columns"))
    run = gt.pairwise_reduce(f, asked, tile, columns=(1, 2), over=over)
    if reduce == "both sides":
        return (lambda *args: xp.concat(list(run(*args)))), dense
    return run, dense


def loss(gt, f):
    def of(*args):
        y = f(*args)
        return gt.xp.sum(
            y**2
            * gt.asarray(
                np.cos(
                    np.arange(y.size if hasattr(y, "aval") else y.numel()).reshape(tuple(y.shape))
                )
            )
        )

    return of


def along(gt, f, mode, tangents):
    """The derivative of a scalar f along the tangents, as a function, in one mode."""
    if mode == "f":
        return lambda *args: gt.jvp(f, args, tuple(tangents))[1]
    every = tuple(range(len(tangents)))

    def of(*args):
        grads = gt.grad(f, argnums=every, disconnected_inputs="zeros")(*args)
        return sum(gt.xp.sum(g * t) for g, t in zip(grads, tangents, strict=True))

    return of


def derivative(gt, f, mix):
    for k, mode in enumerate(mix):
        f = along(gt, f, mode, arrays(gt, (7, 3), (5, 3), (5, 2), (), seed=k + 1))
    return f


ARGS = ((7, 3), (5, 3), (5, 2), ())
# Each mix of modes with each reduction in PyTorch. XLA compiles a mix of third order for seconds:
# in JAX the softmax takes all of them, most in a sweep, each other reduction one.
CELLS = [
    ("torch", reduce, mix) for reduce in DENSE for mix in MIXES if (reduce, len(mix)) != ("own", 3)
]
CELLS += [("jax", "softmax", mix) for mix in ("f", "r", "fr", "rr", "rf")]
CELLS += [("jax", reduce, "fr") for reduce in DENSE if reduce != "softmax"]
SLOW = [("jax", "softmax", "frf"), ("torch", "own", "rrr"), ("jax", "max", "rrr")]
SWEEP = [("jax", "softmax", mix) for mix in MIXES if len(mix) == 3] + [("jax", "own", "rrr")]
MARKED = [
    *CELLS,
    *[pytest.param(*cell, marks=pytest.mark.slow) for cell in SLOW if cell not in CELLS],
    *[pytest.param(*cell, marks=pytest.mark.sweep) for cell in SWEEP if cell not in SLOW],
]


@pytest.mark.sampled(torch=(3, 14), jax=(0, 1))
@pytest.mark.parametrize(("backend", "reduce", "mix"), MARKED)
def test_every_derivative_to_third_order_is_that_of_the_dense_program(backend, reduce, mix):
    gt = importlib.import_module(f"gradtools.{backend}")
    args = arrays(gt, *ARGS)
    found, wanted = (
        jitted(backend, derivative(gt, loss(gt, f), mix)) for f in programs(gt, reduce)
    )
    close(gt, found(*args), wanted(*args))


@settings(max_examples=12, deadline=None, derandomize=True)
@given(
    n=st.integers(1, 9),
    m=st.integers(1, 9),
    rows=st.integers(1, 10),
    columns=st.integers(1, 10),
    reduce=st.sampled_from(["sum", "max", "logsumexp", "softmax", "take", "both sides"]),
)
def test_any_number_of_rows_and_columns_in_any_tiles(n, m, rows, columns, reduce):
    import gradtools.torch as gt

    args = arrays(gt, (n, 3), (m, 3), (m, 2), ())
    tiled, dense = programs(gt, reduce, (rows, columns))
    tangents = arrays(gt, (n, 3), (m, 3), (m, 2), (), seed=5)
    close(gt, tiled(*args), dense(*args))
    for mix in ("r", "fr"):
        found, wanted = tiled, dense
        found, wanted = loss(gt, found), loss(gt, wanted)
        for mode in mix:
            found, wanted = (along(gt, f, mode, tangents) for f in (found, wanted))
        close(gt, found(*args), wanted(*args))


@pytest.mark.sweep_at("jax")
@pytest.mark.parametrize("shape", [(1, 1), (5, 4), (6, 4)])
def test_ragged_tiles_in_jax_hold_no_padding(shape, gt, backend_name):
    args = arrays(gt, *ARGS)
    tiled, dense = programs(gt, "logsumexp", shape)
    run = jitted(backend_name, gt.value_and_grad(loss(gt, tiled), argnums=(0, 1)))
    value, grads = run(*args)
    expected, wanted = gt.value_and_grad(loss(gt, dense), argnums=(0, 1))(*args)
    close(gt, value, expected)
    for g, h in zip(grads, wanted, strict=True):
        close(gt, g, h)


# --- numerically hard rows ---------------------------------------------------------------

HARD = np.array(
    [
        [1.0, 2.0, 3.0, 4.0, 5.0],
        [-np.inf, 2.0, -np.inf, 1.0, -np.inf],
        [1e4, 0.0, 1.0, -1e4, 2.0],
        [-1e300, 1e300, 0.0, 1.0, 2.0],
        [3.0, 1.0, 3.0, 3.0, 0.0],
        [np.nan, 1.0, 2.0, 3.0, 4.0],
    ]
)


def frameworks_own(gt, backend_name, reduce, s):
    if backend_name == "torch":
        return s.logsumexp(1) if reduce == "logsumexp" else s.amax(1)
    import jax

    return jax.nn.logsumexp(s, axis=1) if reduce == "logsumexp" else s.max(axis=1)


@pytest.mark.sweep_at("jax")
@pytest.mark.parametrize("reduce", ["logsumexp", "max"])
def test_hard_rows_have_the_values_and_derivatives_of_the_framework(reduce, gt, backend_name):
    s = gt.asarray(HARD)
    j = gt.asarray(np.arange(5))
    take = gt.pairwise_reduce(lambda s, j: gt.xp.take(s, j, axis=1), reduce, TILE)
    own = partial(frameworks_own, gt, backend_name, reduce)
    for f, g in [(lambda s: take(s, j), own), (lambda s: take(s, j) * 2, lambda s: own(s) * 2)]:
        value, pull = gt.vjp(f, s)
        expected, wanted = gt.vjp(g, s)
        np.testing.assert_allclose(gt.to_numpy(value), gt.to_numpy(expected), rtol=1e-13)
        ct = gt.asarray(np.arange(1.0, 7.0))
        found, wanted = (gt.to_numpy(p(ct)[0]) for p in (pull, wanted))
        np.testing.assert_allclose(found[:5], wanted[:5], rtol=1e-13, atol=1e-300)
        assert np.isnan(found[5]).all() == np.isnan(wanted[5]).all()


@pytest.mark.sweep_at(("jax", "-1.0"))
@pytest.mark.parametrize("reduce", ["max", "logsumexp", "softmax"])
@pytest.mark.parametrize("most", [-1.0, -1000.0, -np.inf])
def test_rows_whose_scores_are_all_negative(most, reduce, gt, backend_name):
    """Of no entry the maximum is no number that a row may have."""
    table = np.arange(6.0)[:, None] * np.arange(5.0) / 10
    table = table + most if np.isfinite(most) else np.full((6, 5), most)
    j, (v,) = gt.asarray(np.arange(5)), arrays(gt, (5, 2))
    pair = lambda s, j, v: (gt.xp.take(s, j, axis=1), v[None])
    f = pair if reduce == "softmax" else lambda *xs: pair(*xs)[0]
    run = gt.pairwise_reduce(f, reduce, TILE, columns=(1, 2))
    own = softmax(gt.xp, gt.asarray(table)) @ v if reduce == "softmax" else None
    if reduce != "softmax":
        own = frameworks_own(gt, backend_name, reduce, gt.asarray(table))
    elif not np.isfinite(most):
        own = gt.xp.zeros_like(own)
    np.testing.assert_allclose(gt.to_numpy(run(gt.asarray(table), j, v)), gt.to_numpy(own), 1e-12)


@pytest.mark.sweep_at("jax")
def test_a_row_without_any_column_is_minus_infinity_or_zero_and_has_no_derivative(gt):
    s, v, j = gt.asarray(np.full((2, 5), -np.inf)), *arrays(gt, (5, 2)), gt.asarray(np.arange(5))
    take = lambda s, j, v: (gt.xp.take(s, j, axis=1), v[None])
    mean = lambda s, v: gt.pairwise_reduce(take, "softmax", TILE, columns=(1, 2))(s, j, v)
    lse = gt.pairwise_reduce(lambda s, j: gt.xp.take(s, j, axis=1), "logsumexp", TILE)
    assert gt.to_numpy(lse(s, j)).tolist() == [-np.inf] * 2
    assert not gt.to_numpy(mean(s, v)).any()
    for g in gt.grad(lambda s, v: gt.xp.sum(mean(s, v)), argnums=(0, 1))(s, v):
        assert not gt.to_numpy(g).any()


# --- what it stands in -------------------------------------------------------------------


@pytest.mark.sampled(torch=(4, 4), jax=(2, 4))
@pytest.mark.parametrize("named", [(0, 1), (-3, -2), ("x", "y"), (-3, "y")])
def test_arguments_are_named_by_position_from_either_end_or_by_name(gt, named):
    x, y, w = arrays(gt, (5, 4), (4, 4), ())
    f = partial(scores, gt.xp)
    run = gt.pairwise_reduce(
        lambda x, y, w: f(x, y, w), "sum", TILE, rows=named[0], columns=named[1]
    )
    close(gt, run(x, y, w), gt.xp.sum(f(x, y, w), axis=1))


@pytest.mark.sweep_at("jax")
def test_trees_of_rows_and_of_results(gt):
    x, y, w = arrays(gt, (7, 3), (5, 3), ())
    f = lambda rows, y, w: {
        "a": {"s": rows["x"] @ y.T},
        "b": (rows["x"][:, None] * y, w * rows["x"] @ y.T),
    }
    found = gt.pairwise_reduce(f, {"a": "max", "b": "mean"}, TILE)({"x": x}, y, w)
    close(gt, found["a"]["s"], gt.xp.max(x @ y.T, axis=1))
    close(gt, found["b"][0], gt.xp.mean(x[:, None] * y, axis=1))
    close(gt, found["b"][1], gt.xp.mean(w * x @ y.T, axis=1))


@pytest.mark.sweep_at("jax")
def test_vmap_maps_heads_and_shares_what_has_none(gt, backend_name):
    x, y, v, w = arrays(gt, (4, 7, 3), (5, 3), (4, 5, 2), ())
    for reduce in ("softmax", "take", "own"):
        tiled, dense = programs(gt, reduce)
        found, wanted = (gt.vmap(f, in_axes=(0, None, 0, None)) for f in (tiled, dense))
        close(gt, found(x, y, v, w), wanted(x, y, v, w))
        if reduce != "own":
            every = (0, 1, 2, 3) if reduce == "softmax" else (0, 1, 3)
            grads = [
                jitted(backend_name, gt.grad(loss(gt, f), argnums=every))(x, y, v, w)
                for f in (found, wanted)
            ]
            for g, h in zip(*grads, strict=True):
                close(gt, g, h)


@pytest.mark.sweep_at("jax")
def test_complex_scores_are_summed(gt):
    rng = np.random.default_rng(0)
    x, y = (gt.asarray(rng.normal(size=(n, 3)) + 1j * rng.normal(size=(n, 3))) for n in (7, 5))
    f = lambda x, y: (x @ y.T) ** 2
    pairs = [gt.pairwise_reduce(f, "mean", TILE), lambda x, y: gt.xp.mean(f(x, y), axis=1)]
    grads = [
        gt.grad(lambda x, y: gt.xp.sum(abs(g(x, y)) ** 2), argnums=(0, 1))(x, y) for g in pairs
    ]
    for g, h in zip(*grads, strict=True):
        close(gt, g, h)
    with pytest.raises(
        GradtoolsError, match="pairwise_reduce: f's scores are complex, which have no order"
    ):
        gt.pairwise_reduce(f, "logsumexp")(x, y)


@pytest.mark.sweep_at("jax")
def test_bfloat16_is_summed_in_float32_and_rounded_once(gt, backend_name):
    rng = np.random.default_rng(0)
    x, y = (np.asarray(rng.normal(size=(n, 8)), np.float32) for n in (40, 3000))
    half = lambda z: (
        gt.asarray(z).bfloat16() if backend_name == "torch" else gt.asarray(z).astype("bfloat16")
    )
    x, y = half(x), half(y)
    f = lambda x, y: x @ y.T
    found = gt.pairwise_reduce(f, "sum", 16)(x, y)
    assert str(found.dtype).endswith("bfloat16")
    wide = lambda z: np.asarray(gt.to_numpy(z), np.float64)
    exact = wide(f(x, y)).sum(1)
    assert np.abs(wide(found) - exact).max() <= 2**-8 * np.abs(exact).max()
    g = gt.grad(lambda x, y: gt.xp.sum(gt.pairwise_reduce(f, "logsumexp", 16)(x, y)))(x, y)
    assert str(g.dtype).endswith("bfloat16")


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_losses_of_16_bits_are_made_and_returned_in_float32(gt, backend_name, dtype):
    framework = importlib.import_module("torch" if backend_name == "torch" else "jax.numpy")
    cast = lambda z: gt.xp.astype(gt.asarray(np.float32(z)), getattr(framework, dtype))
    first, other = cast([[1.0]]), cast([[60.0], [59.5]])  # logits that all 16 bits can hold
    exact = np.log1p(np.exp(-0.5))
    entropy = gt.linear_cross_entropy(first, other, gt.asarray(np.int32([0])))
    negative = gt.contrastive_loss(first, other[:1], negatives=other[1:], symmetric=False)
    for loss in (entropy, negative):
        assert str(loss.dtype).endswith("float32")
        assert np.isclose(float(loss), exact, rtol=1e-5)
    many = gt.linear_cross_entropy(
        cast(np.ones((8000, 1))), cast([[0.0], [10.0]]), gt.asarray(np.zeros(8000, np.int32))
    )
    exact = np.log1p(np.exp(10.0))  # of which the sum is no number of float16
    assert np.isclose(float(many), exact, rtol=1e-6)


@pytest.mark.sweep_at("jax")
def test_second_derivatives_of_attention_by_finite_differences(gt):
    q, k, v, u = arrays(gt, (5, 3), (6, 3), (6, 2), (5, 3))
    f = lambda q: gt.xp.sum(gt.attention(q, k, v, layout="heads_first", tile_size=(2, 4)) ** 3)
    product = gt.hvp(f, (q,), (u,))[1][0]
    h = 1e-5
    ahead, behind = (gt.to_numpy(gt.grad(f)(q + s * h * u)) for s in (1, -1))
    np.testing.assert_allclose(
        gt.to_numpy(product), (ahead - behind) / (2 * h), rtol=1e-7, atol=1e-7
    )


@pytest.mark.sweep_at("jax")
@pytest.mark.parametrize("mix", ["r", "fr", "rr"])
def test_f_closes_over_an_array_of_a_running_trace(mix, gt, backend_name):
    """A temperature that is computed within the same jitted function, say."""
    x, y, w = arrays(gt, (7, 3), (5, 3), ())
    u = arrays(gt, (7, 3), seed=3)

    def at(reduced):
        def of(x, y, w):
            f = lambda x: gt.xp.sum(gt.xp.sin(reduced(lambda x, y: w * (x @ y.T))(x, y)))
            for mode in mix:
                f = along(gt, f, mode, u)
            return f(x)

        return jitted(backend_name, of)

    dense = lambda f: lambda x, y: logsumexp(gt.xp, f(x, y), 1)
    close(gt, at(lambda f: gt.pairwise_reduce(f, "logsumexp", TILE))(x, y, w), at(dense)(x, y, w))


@pytest.mark.sweep_at("fr", "rr", "rfr")
@pytest.mark.parametrize("mix", ["r", "fr", "rr", "rfr"])
def test_f_closes_over_an_array_of_a_trace_that_has_ended(mix):
    """The maps run after the scan's body was traced, of which `w` is."""
    import jax

    import gradtools.jax as gt

    x, y, ws, u = arrays(gt, (7, 3), (5, 3), (2,), (7, 3))

    def at(reduced):
        def f(x):
            def body(carry, w):
                found = reduced(lambda x, y: w * (x @ y.T))(x, y)
                return carry + gt.xp.sum(gt.xp.sin(found)), None

            return jax.lax.scan(body, 0.0, ws)[0]

        for mode in mix:
            f = along(gt, f, mode, (u,))
        return f(x)

    dense = lambda f: lambda x, y: logsumexp(gt.xp, f(x, y), 1)
    close(gt, at(lambda f: gt.pairwise_reduce(f, "logsumexp", TILE)), at(dense))


def test_a_reduction_that_closes_over_an_array_of_a_running_trace_is_refused():
    import jax

    import gradtools.jax as gt

    init, combine, finish = OWN(gt.xp)

    def run(x, y, w):
        own = init, combine, lambda state: w * finish(state)
        return gt.pairwise_reduce(lambda x, y: x @ y.T, own, TILE)(x, y)

    with pytest.raises(GradtoolsError, match="a function of reduce closes over an array"):
        jax.jit(run)(*arrays(gt, (7, 3), (5, 3), ()))


def test_an_array_that_f_closes_over_is_not_differentiated_in_silence(gt):
    x, y, w = arrays(gt, (7, 3), (5, 3), ())
    with pytest.raises(GradtoolsError, match="'pairwise_reduce' closes over"):
        gt.grad(
            lambda w: gt.xp.sum(gt.pairwise_reduce(lambda x, y: w * (x @ y.T), "max", TILE)(x, y))
        )(w)


@pytest.mark.slow_at("jax")
def test_a_memory_budget_chooses_the_tile(gt):
    x, y = arrays(gt, (7, 3), (5, 3))
    f = lambda x, y: x @ y.T
    close(gt, gt.pairwise_reduce(f, memory_budget=10**6)(x, y), gt.xp.sum(x @ y.T, axis=1))
    with pytest.raises(GradtoolsError, match="the derivative of a single pair takes about"):
        gt.pairwise_reduce(f, memory_budget=1)(x, y)


def test_a_call_leaves_no_cycle_that_would_keep_what_f_holds():
    import gradtools.torch as gt

    class Held:
        pass

    held, (x, y) = Held(), arrays(gt, (5, 2), (4, 2))
    gone = weakref.ref(held)
    gc.collect()
    gc.disable()
    try:
        gt.pairwise_reduce(lambda x, y, held=held: x @ y.T, "logsumexp", 2)(x, y)
        del held
        assert gone() is None
    finally:
        gc.enable()


@pytest.mark.slow_at("complex128", "of pairs")
@pytest.mark.sweep_at("jax")
@pytest.mark.parametrize("shared", [True, False], ids=["of columns", "of pairs"])
@pytest.mark.parametrize("dtype", ["complex128", "float32"])
def test_values_may_be_complex_or_of_another_width_than_scores(dtype, shared, gt):
    x, y, v, *along = arrays(gt, (4, 3), (5, 3), (5, 2), (4, 3), (5, 3), (5, 2))
    number = 1 - 2j if dtype == "complex128" else 1.0
    cast = lambda v: gt.asarray((gt.to_numpy(v) * number).astype(dtype))
    primals, tangents = (x, y, cast(v)), (*along[:2], cast(along[2]))
    value = lambda x, v: v[None] if shared else v[None] * gt.xp.cos(x.sum(1))[:, None, None]
    f = gt.pairwise_reduce(lambda x, y, v: (x @ y.T, value(x, v)), "softmax", TILE, columns=(1, 2))
    dense = lambda x, y, v: (softmax(gt.xp, x @ y.T)[:, :, None] * value(x, v)).sum(1)
    square = lambda f: lambda *xs: (gt.xp.abs(f(*xs)) ** 2).sum()
    tolerance = 1e-10 if dtype == "complex128" else 1e-5
    for mode in ("forward_over_reverse", "reverse_over_reverse"):
        found, wanted = (gt.hvp(square(h), primals, tangents, mode=mode) for h in (f, dense))
        for a, b in zip((*found[0], *found[1]), (*wanted[0], *wanted[1]), strict=True):
            close(gt, a, b, tolerance)


def another(kind):
    """A factor that is another one at each call, or a tensor and how it changes."""
    import random

    import torch

    table = torch.ones(())
    draw = {
        "a generator": partial(torch.rand, (), generator=torch.Generator()),
        "NumPy's stream": np.random.rand,
        "Python's stream": random.random,
        "a counter": itertools.count(1).__next__,
        "a tensor that is written later": lambda: table,
    }[kind]
    return draw, lambda: table.add_(1)


@pytest.mark.parametrize("own", [False, True], ids=["sum", "own reduction"])
@pytest.mark.parametrize(
    "kind",
    [
        "a generator",
        "NumPy's stream",
        "Python's stream",
        "a counter",
        "a tensor that is written later",
    ],
)
def test_a_tile_that_is_another_when_it_is_computed_again_is_refused(kind, own):
    torch = pytest.importorskip("torch")
    import gradtools.torch as gt

    factor, change = another(kind)
    reduce = (lambda s: s.sum(1), lambda a, b: a + b, lambda s: s) if own else "sum"
    x = torch.ones(4, 3, requires_grad=True)
    found = gt.pairwise_reduce(lambda x, y: x @ y.T * factor(), reduce, 2)(
        x, torch.ones(5, 3)
    ).sum()
    change()
    said = "changed in place" if kind == "a tensor that is written later" else "gives other numbers"
    with pytest.raises(GradtoolsError, match=f"{said}.* a tile .* computed again"):
        found.backward()


def test_an_argument_that_f_writes_is_refused_and_stays():
    torch = pytest.importorskip("torch")
    import gradtools.torch as gt

    x, y = torch.ones(4, 3), torch.ones(5, 3)
    for write in (lambda x, y: x.mul_(2), lambda x, y: y.add_(1)):
        with torch.no_grad(), pytest.raises(GradtoolsError, match="f changes an argument in place"):
            gt.pairwise_reduce(lambda x, y: (write(x, y), x @ y.T)[1], "sum", 2)(x, y)
    assert x.sum() == 12 and y.sum() == 15
    with torch.inference_mode():
        assert gt.pairwise_reduce(lambda x, y: x @ y.T, "sum", 2)(x, y).sum() == 60


@pytest.mark.slow_at("jax")
def test_the_size_of_a_tile_is_a_whole_number_of_any_kind(gt):
    x, y = arrays(gt, (4, 3), (5, 3))
    f = lambda x, y: x @ y.T
    close(
        gt,
        gt.pairwise_reduce(f, "sum", np.int64(2))(x, y),
        gt.pairwise_reduce(f, "sum", [2, 3])(x, y),
    )
    for size in (True, np.True_, 2.0, "2", (2,), (2, 0)):
        with pytest.raises(GradtoolsError, match="tile_size is"):
            gt.pairwise_reduce(f, "sum", size)


@pytest.mark.slow_at("keys", "numbers for a row")
@pytest.mark.parametrize("many", ["numbers", "keys", "numbers for a row"])
def test_random_numbers_that_each_tile_would_get_are_refused_in_jax(many):
    import jax

    import gradtools.jax as gt

    key = jax.random.key(0)
    draw = {
        "numbers": lambda x, y: jax.random.normal(key, (len(x), len(y))),
        "keys": lambda x, y: jax.vmap(jax.random.normal)(jax.random.split(key, len(x)))[:, None],
        "numbers for a row": lambda x, y: jax.random.uniform(key, (len(y),)),
    }[many]
    x, y = arrays(gt, (7, 3), (5, 3))
    run = gt.pairwise_reduce(lambda x, y: x @ y.T + draw(x, y), "sum", TILE)
    for call in (run, jax.jit(run), jax.grad(lambda x, y: run(x, y).sum())):
        with pytest.raises(GradtoolsError, match="f draws random numbers for a whole tile"):
            call(x, y)


@pytest.mark.slow
def test_random_numbers_of_a_pair_or_of_all_pairs_are_those_of_the_dense_program():
    import jax

    import gradtools.jax as gt

    key = jax.random.key(0)
    of_pair = lambda i, j: jax.random.normal(jax.random.fold_in(jax.random.fold_in(key, i), j))
    of_tile = jax.vmap(jax.vmap(of_pair, (None, 0)), (0, None))

    def f(x, i, y, j):
        return x @ jax.random.normal(key, (3, 3)) @ y.T * of_tile(i, j)

    x, y = arrays(gt, (7, 3), (5, 3))
    i, j = (gt.asarray(np.arange(n)) for n in (7, 5))
    run = gt.pairwise_reduce(f, "logsumexp", TILE, rows=(0, 1), columns=(2, 3))
    close(gt, run(x, i, y, j), logsumexp(gt.xp, f(x, i, y, j), 1))


COUNTS = {
    "chunked": lambda gt, n: gt.chunked(lambda x: x**2, n, keep_graphs=n, memory_budget=n),
    "microbatched_value_and_grad": lambda gt, n: (
        lambda x: gt.microbatched_value_and_grad(lambda w, x: (w * x).sum(), n)(x[0], x)
    ),
    "frozen": lambda gt, n: gt.frozen(lambda x: x**2, memory_budget=n),
    "jacobian": lambda gt, n: gt.jacobian(lambda x: x**2, chunk_size=n),
    "per_example_grad": lambda gt, n: (
        lambda x: gt.per_example_grad(lambda w, x: w * x, chunk_size=n)(x[0], x)
    ),
    "pairwise_reduce": lambda gt, n: (
        lambda x: gt.pairwise_reduce(lambda x, y: x[:, None] * y, tile_size=n)(x, x)
    ),
    "memory_budget": lambda gt, n: (
        lambda x: gt.pairwise_reduce(lambda x, y: x[:, None] * y, memory_budget=n * 1000)(x, x)
    ),
    "split_key": lambda gt, n: lambda x: gt.split_key(gt.random_key(0), n),
    "order": lambda gt, n: lambda x: str(gt.formula(lambda x: (x**2).sum(), x, order=n)),
    "graph": lambda gt, n: lambda x: str(gt.gradient_graph(lambda x: (x**2).sum(), x, order=n)),
}


class Two:
    """A whole number, as a class of the user's."""

    def __index__(self) -> int:
        return 2

    def __mul__(self, other):
        return 2 * other

    def __eq__(self, other):
        return other == 2

    def __hash__(self):
        return 2


@pytest.mark.slow_at(
    ("jax", "chunked"),
    ("jax", "microbatched_value_and_grad"),
    ("jax", "pairwise_reduce"),
    ("jax", "memory_budget"),
    ("jax", "graph"),
)
@pytest.mark.sweep_at("order")
@pytest.mark.parametrize("name", COUNTS)
def test_a_count_is_a_whole_number_of_any_kind(name, gt, backend_name):
    x = gt.asarray(np.float32([1.0, 2.0, 3.0]))
    leaves = lambda tree: [str(gt.to_numpy(x) if hasattr(x, "shape") else x) for x in tree]
    found = []
    for n in (2, np.int64(2), np.array(2), Two(), gt.asarray(np.int32(2))):
        out = COUNTS[name](gt, n)(x)
        found.append(leaves(out if isinstance(out, tuple) else (out,)))
    assert all(f == found[0] for f in found)
