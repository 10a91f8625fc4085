"""Tests gradients through inner optimization steps with `grad(mode="forward_over_reverse")`."""

from __future__ import annotations

import numpy as np
import pytest

from gradtools import GradtoolsError

ROWS, WIDTH = 200, 12
MODE = "forward_over_reverse"


def repeated(gt, step, count, w):
    """Apply `step` to the state `count` times.

    JAX runs the steps in a scan, because XLA would merge the repeated computations of a Python
    loop.
    """
    if gt.__name__.endswith("torch"):
        for _ in range(count):
            w = step(w)
        return w
    import jax

    return jax.lax.scan(lambda w, _: (step(w), None), w, length=count)[0]


def problem(gt, depth, rows=ROWS, dtype=np.float64):
    rng = np.random.default_rng(0)
    draw = lambda *shape: gt.asarray(rng.normal(size=shape).astype(dtype))
    return [0.5 * draw(WIDTH, WIDTH) for _ in range(depth)], draw(rows, WIDTH)


def loss(gt, w, outer, x):
    h = x
    for layer in w:
        h = gt.xp.tanh(h @ layer)
    return gt.xp.mean((h - 1) ** 2 * outer["data"]) + outer["decay"] * sum((v**2).sum() for v in w)


def unrolled(gt, mode, steps, w, x):
    """Return the outer loss as a function of data weights, weight decay and the initial scale."""
    inner = gt.grad(lambda w, outer, x: loss(gt, w, outer, x), mode=mode)

    def f(outer):
        step = lambda w: [p - 0.3 * g for p, g in zip(w, inner(w, outer, x), strict=True)]
        trained = repeated(gt, step, steps, [p * outer["scale"] for p in w])
        return loss(gt, trained, {"data": 1.0, "decay": 0.0}, x)

    return f


def at(gt, rows=ROWS, dtype=np.float64):
    number = lambda x: gt.asarray(np.asarray(x, dtype))
    return {"data": number(np.ones((rows, 1))), "decay": number(0.01), "scale": number(1.0)}


def leaves(gt, tree):
    return [gt.to_numpy(tree[name]) for name in sorted(tree)]


@pytest.mark.slow_at("jax-float32")
@pytest.mark.parametrize(("dtype", "tolerance"), [(np.float64, 1e-12), (np.float32, 2e-5)])
def test_first_and_second_derivatives_through_inner_steps_are_those_of_double_backward(
    gt, dtype, tolerance
):
    w, x = problem(gt, 2, 5, dtype)
    outer = at(gt, 5, dtype)
    f, plain = (unrolled(gt, mode, 2, w, x) for mode in (MODE, "auto"))
    for found, expected in (
        (gt.grad(f)(outer), gt.grad(plain)(outer)),
        (gt.hvp(f, (outer,), (outer,))[1][0], gt.hvp(plain, (outer,), (outer,))[1][0]),
    ):
        for a, b in zip(leaves(gt, found), leaves(gt, expected), strict=True):
            np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance)


def peak(gt, mode, depth, steps, rows):
    """Return the peak memory in bytes of a gradient through the given number of steps."""
    f, outer = unrolled(gt, mode, steps, *problem(gt, depth, rows)), at(gt, rows)
    if gt.__name__.endswith("torch"):
        from tests.support.live_bytes import peak_bytes

        return peak_bytes(lambda: gt.grad(f)(outer))[0]
    import jax

    compiled = jax.jit(gt.grad(f)).lower(outer).compile()
    return compiled.memory_analysis().temp_size_in_bytes


@pytest.mark.slow_at("jax")
@pytest.mark.parametrize(("depth", "rows"), [(1, 200), (4, 100)])
def test_one_more_step_takes_the_bytes_of_the_parameters_whatever_the_depth_and_batch(
    gt, depth, rows
):
    per_step = {
        mode: (peak(gt, mode, depth, 6, rows) - peak(gt, mode, depth, 2, rows)) / 4
        for mode in (MODE, "auto")
    }
    assert per_step[MODE] <= 2 * 8 * depth * WIDTH**2
    assert per_step["auto"] > 8 * depth * rows * WIDTH


def test_the_value_and_what_f_returns_with_it_are_differentiated_too(gt):
    x = gt.asarray(np.array([1.0, 2.0]))

    def of(mode):
        def total(x):
            f = lambda w, x: ((w**3 * x).sum(), w * x**2)
            inner = gt.value_and_grad(f, has_aux=True, mode=mode)
            (value, aux), g = inner(x + 1, x)
            return value + (aux**2).sum() + (g**2).sum()

        return gt.to_numpy(gt.grad(total)(x))

    np.testing.assert_allclose(of(MODE), of("auto"), rtol=1e-13)


def test_what_the_inner_loss_captures_is_to_be_an_argument(gt):
    x = gt.asarray(np.array([1.0, 2.0]))

    def outer(x):
        return (gt.grad(lambda w: (w**2 * x).sum(), mode=MODE)(x + 1) ** 2).sum()

    with pytest.raises(GradtoolsError, match=r"[Pp]ass (that array|it) (to the function )?as a"):
        gt.grad(outer)(x)


def test_an_error_of_the_mode_speaks_of_f(gt):
    def outer(x):
        inner = gt.grad(lambda w: (gt.clip_gradient(w, 1.0) ** 2).sum(), mode=MODE)
        return (inner(x + 1) ** 2).sum()

    said = r"^grad\(mode='forward_over_reverse'\): f contains .* or leave out the mode"
    with pytest.raises(GradtoolsError, match=said):
        gt.grad(outer)(gt.asarray(np.array([1.0, 2.0])))
