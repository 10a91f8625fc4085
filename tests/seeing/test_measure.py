"""`gt.measure` in both backends: closed forms, held against counts that were written by hand."""

from __future__ import annotations

import dataclasses
import json
import math

import numpy as np
import pytest

import gradtools
from gradtools.seeing import measures as costs

F32 = np.float32


def arrays(gt, *shapes, dtype=F32):
    rng = np.random.default_rng(0)
    return [gt.asarray(rng.normal(size=shape).astype(dtype)) for shape in shapes]


def flops(gt, f, *args):
    found = gt.measure(f, *args)
    assert not [note for note in found.notes if not note.startswith("peak bytes leave out")]
    return found.flops


# --- operations ----------------------------------------------------------------------------


@pytest.mark.sweep_at("torch")
def test_products_count_two_for_each_pair_that_is_multiplied(gt):
    a, b, x = arrays(gt, (4, 5), (5, 7), (5,))
    assert flops(gt, lambda a, b: a @ b, a, b) == 2 * 4 * 5 * 7
    assert flops(gt, lambda a, x: a @ x, a, x) == 2 * 4 * 5
    assert flops(gt, lambda x: x @ x, x) == 2 * 5
    many = arrays(gt, (3, 4, 5), (3, 5, 7))
    assert flops(gt, lambda a, b: a @ b, *many) == 3 * 2 * 4 * 5 * 7


ELEMENTWISE = {
    "sum of two": (lambda xp, x, y: x + y, 12),
    "difference and quotient": (lambda xp, x, y: (x - y) / y, 24),
    "by a number": (lambda xp, x, y: 2 * x - 1, 24),
    "broadcast": (lambda xp, x, y: x[:1] * y[:, :1], 12),
    "minus": (lambda xp, x, y: -x, 12),
    "square": (lambda xp, x, y: x**2, 12),
    "cube": (lambda xp, x, y: x**3, 24),
    "fourth power": (lambda xp, x, y: x**4, 24),
    "by a square": (lambda xp, x, y: y / x**2, 24),
    "clip": (lambda xp, x, y: xp.clip(x, -1.0, 1.0), 24),
    "maximum": (lambda xp, x, y: xp.maximum(x, y), 12),
    "comparison, selection": (lambda xp, x, y: xp.where(x > y, x, y), 0),
    "views and copies": (lambda xp, x, y: xp.concat([x.T.reshape(3, 4), y])[1:4], 0),
    "argmax": (lambda xp, x, y: xp.argmax(x), 0),
    "sum": (lambda xp, x, y: xp.sum(x), 11),
    "sum of rows": (lambda xp, x, y: xp.sum(x, axis=1), 9),
    "mean": (lambda xp, x, y: xp.mean(x), 12),
    "largest of rows": (lambda xp, x, y: xp.max(x, axis=1), 9),
    "product": (lambda xp, x, y: xp.prod(x), 11),
}


@pytest.mark.slow_at("torch")
@pytest.mark.parametrize("name", ELEMENTWISE)
def test_elementwise_work_and_reductions(gt, name):
    f, expected = ELEMENTWISE[name]
    x, y = arrays(gt, (3, 4), (3, 4))
    assert flops(gt, lambda x, y: f(gt.xp, x, y), x, y) == expected


@pytest.mark.slow_at("torch")
def test_integers_and_random_bits_count_nothing(gt):
    n = gt.asarray(np.arange(6, dtype=np.int32))
    assert flops(gt, lambda n: (n * n + 1).sum(), n) == 0


@pytest.mark.sweep_at("torch")
def test_complex_numbers_count_what_their_parts_do(gt):
    a, b = arrays(gt, (3, 4), (3, 4), dtype=np.complex64)
    m, n = arrays(gt, (3, 4), (4, 5), dtype=np.complex64)
    assert flops(gt, lambda a, b: a * b, a, b) == 6 * 12
    assert flops(gt, lambda a, b: a + b, a, b) == 2 * 12
    assert flops(gt, lambda a, b: a - b, a, b) == 2 * 12
    assert flops(gt, lambda a: gt.xp.sum(a), a) == 2 * 11
    assert flops(gt, lambda m, n: m @ n, m, n) == 8 * 3 * 4 * 5


# A perceptron: x (M, I) to hidden (M, H) by relu, to (M, O), and the sum of squares.
M, I, H, O = 6, 5, 8, 3


@pytest.mark.slow_at("torch")
def test_a_loop_counts_its_trips(gt, backend_name):
    (x,) = arrays(gt, (6, 6))

    def powers(x):
        if backend_name == "jax":
            from jax import lax

            return lax.scan(lambda c, _: (c @ c, None), x, None, length=9)[0]
        for _ in range(9):
            x = x @ x
        return x

    assert flops(gt, powers, x) == 9 * 2 * 6**3


@pytest.mark.sweep_at("torch")
def test_a_function_written_once_costs_the_same_in_both(gt):
    """Softmax attention by hand, with its gradient along the values."""
    q, k, v = arrays(gt, (4, 8), (5, 8), (5, 3))

    def attend(v, q, k):
        scores = q @ k.T / math.sqrt(8)
        e = gt.xp.exp(scores - gt.stop_gradient(gt.xp.max(scores, axis=1)[:, None]))
        return ((e / gt.xp.sum(e, axis=1)[:, None]) @ v).sum()

    scores = 2 * 4 * 5 * 8 + 20 + 4 * 4 + 20 + 20 + 4 * 4 + 20
    forward = scores + 2 * 4 * 5 * 3 + 11
    assert flops(gt, attend, v, q, k) == forward
    assert flops(gt, gt.value_and_grad(attend), v, q, k) == forward + 2 * 4 * 5 * 3


@pytest.mark.sweep_at("torch")
def test_a_custom_rule_counts_what_runs(gt):
    xp = gt.xp
    f = gt.custom_rule(lambda x: xp.sin(x))
    f.defvjp(lambda x: (xp.sin(x), x), lambda x, ct: (ct * xp.cos(x) * 3.0,))
    (x,) = arrays(gt, (10,))
    assert flops(gt, lambda x: f(x).sum(), x) == 10 + 9
    assert flops(gt, gt.value_and_grad(lambda x: f(x).sum()), x) == 10 + 9 + 3 * 10


@pytest.mark.slow_at("torch")
def test_a_host_function_is_named_and_not_counted(gt):
    kernel = gt.host_function(lambda x: np.sin(x))
    (x,) = arrays(gt, (10,))
    found = gt.measure(lambda x: kernel(x) * 2, x)
    assert found.flops == 10
    assert any("kernel" in note and "not in flops" in note for note in found.notes)


# --- bytes ---------------------------------------------------------------------------------


def saved(gt, f, *args):
    found = gt.measure(f, *args)
    assert found.saved_bytes is not None, found.notes
    return found.saved_bytes


@pytest.mark.sweep_at("torch")
def test_a_product_keeps_its_operands_once_and_no_arguments(gt):
    a, b = arrays(gt, (10, 20), (20, 30))
    assert saved(gt, lambda a, b: a @ b, a, b) == 0
    assert saved(gt, lambda a, b: gt.xp.exp(a) @ gt.xp.exp(b), a, b) == 4 * (200 + 600)


@pytest.mark.sweep_at("torch")
def test_linear_functions_and_integers_keep_nothing(gt):
    (x,) = arrays(gt, (100,))
    assert saved(gt, lambda x: (2 * x).reshape(10, 10).T, x) == 0
    assert saved(gt, lambda n: n + 1, gt.asarray(np.arange(3, dtype=np.int32))) == 0


@pytest.mark.slow_at("12")
@pytest.mark.sweep_at("torch")
@pytest.mark.parametrize("depth", [1, 12])
def test_a_chain_keeps_an_array_for_each_layer_and_its_checkpoint_none(gt, depth):
    def chain(x):
        for _ in range(depth):
            x = gt.xp.exp(-x)
        return x

    (x,) = arrays(gt, (100,))
    assert saved(gt, chain, x) == depth * 400
    assert saved(gt, gt.checkpoint(chain), x) == 0


@pytest.mark.sweep_at("torch")
def test_of_a_gradient_it_is_what_the_second_derivative_keeps(gt, backend_name):
    (x,) = arrays(gt, (100,))
    f = gt.grad(lambda x: (gt.xp.exp(x)).sum())
    # exp(x), and the cotangent that multiplies it: one number in PyTorch, ones in JAX.
    assert saved(gt, f, x) == {"torch": 404, "jax": 800}[backend_name]
    assert saved(gt, gt.grad(lambda x: (3 * x).sum()), x) == 0


@pytest.mark.sweep_at("torch")
def test_the_peak_is_what_was_alive_at_once(gt, backend_name):
    (x,) = arrays(gt, (1000,))
    found = gt.measure(lambda x: gt.xp.exp(x), x)
    assert found.peak_bytes == 4000
    assert gt.measure(lambda x: (x, 2), x).peak_bytes == {"torch": 0, "jax": 4000}[backend_name]


def network(gt, layers=6, width=16):
    ws = arrays(gt, *[(width, width)] * layers)

    def net(x, *ws):
        for w in ws:
            x = gt.xp.tanh(x @ w)
        return x

    return net, ws


@pytest.mark.sweep_at("torch", "1", "3")
@pytest.mark.parametrize("keep_graphs", [0, 1, 3])
def test_chunked_costs_four_forwards_less_what_it_retains(gt, keep_graphs):
    """Counted in products; the elementwise work is left out by measuring with and without it."""
    ws = arrays(gt, *[(64, 64)] * 3)
    (x,) = arrays(gt, (32, 64))

    def net(x, *ws):
        for w in ws:
            x = x @ w
        return x

    chunked = gt.chunked(
        net, 8, in_axes=(0, None, None, None), keep_graphs=keep_graphs, verify=False
    )
    loss = lambda *all: (chunked(*all) ** 2).sum()
    forward = flops(gt, net, x, *ws)
    assert forward == 3 * 2 * 32 * 64 * 64
    found = flops(gt, gt.value_and_grad(loss, argnums=(0, 1, 2, 3)), x, *ws)
    extra = 4 * 3 * 64 * 64 + 4 * 32 * 64  # chunks' gradients are added up; the loss
    least = 4 * forward - keep_graphs * forward // 4
    if gt.__name__ == "gradtools.jax":  # there the compiler decides: never more than two passes
        least, extra = 3 * forward, extra + forward
    assert least <= found <= least + extra


@pytest.mark.slow
@pytest.mark.sweep_at("jax")
def test_chunked_keeps_no_more_when_there_are_more_chunks(gt):
    net, ws = network(gt, layers=7)
    chunked = gt.chunked(net, 8, in_axes=(0, *[None] * 7))
    loss = lambda f: gt.value_and_grad(lambda *a: (f(*a) ** 2).sum(), argnums=tuple(range(1, 8)))

    def peak(f, rows):
        (x,) = arrays(gt, (rows, 16))
        return gt.measure(loss(f), x, *ws).peak_bytes

    growth = peak(chunked, 8 * 24) - peak(chunked, 8 * 8)
    plain = peak(net, 8 * 24) - peak(net, 8 * 8)
    rows = 8 * 16 * 16 * 4
    assert growth <= 5 * rows  # outputs and cotangents, before and after joining; the squares
    assert plain >= 7 * rows


@pytest.mark.sweep_at("torch")
def test_what_frozen_keeps_does_not_grow_with_depth(gt):
    def kept(G_of, layers):
        net, ws = network(gt, layers)
        y, z = arrays(gt, (16,), (64, 16))
        G = G_of(lambda z: net(z, *ws))
        return saved(gt, lambda y: gt.grad(lambda z: ((y * G(z)) ** 2).sum())(z), y)

    layer, weights = 64 * 16 * 4, 16 * 16 * 4  # PyTorch keeps copies of small captured arrays
    assert 0 <= kept(gt.frozen, 12) - kept(gt.frozen, 2) <= 10 * weights
    assert kept(lambda G: G, 12) - kept(lambda G: G, 2) >= 10 * layer


# --- the record, and what is refused -------------------------------------------------------


@pytest.mark.slow_at("torch")
def test_the_record_says_how_it_was_timed(gt, backend_name):
    (x,) = arrays(gt, (10,))
    found = gt.measure(gt.xp.exp, x)
    assert 0 < found.fastest <= found.seconds <= found.slowest
    assert 3 <= found.runs <= 25
    assert found.backend == backend_name
    assert json.loads(found.to_json()) == found.to_dict()
    assert found.to_dict().keys() == {f.name for f in dataclasses.fields(found)}


@pytest.mark.sweep_at("torch")
def test_what_is_no_array_passes_through(gt):
    (x,) = arrays(gt, (3,))
    found = gt.measure(
        lambda x, n, *, name: {"y": n * x, "name": name, "none": None}, x, 3, name="a"
    )
    assert (found.flops, found.saved_bytes) == (3, 0)
    assert gt.measure(lambda: "nothing").flops == 0
    assert gt.measure(lambda n: n + 1, 2).peak_bytes == 0


def test_what_f_raises_comes_through(gt):
    def broken(x):
        raise RuntimeError("on purpose")

    with pytest.raises(RuntimeError, match="on purpose"):
        gt.measure(broken, *arrays(gt, (3,)))


def test_f_must_be_a_function(gt):
    with pytest.raises(gradtools.GradtoolsError, match="measure: f must be a function, got 3"):
        gt.measure(3)


def test_inside_of_a_transform_it_is_refused(gt):
    (x,) = arrays(gt, (3,))
    with pytest.raises(gradtools.GradtoolsError, match="inside of a transform"):
        gt.vmap(lambda x: x * gt.measure(gt.xp.exp, x).flops)(x)


@pytest.mark.slow_at("torch")
def test_a_function_without_a_derivative_has_no_saved_bytes_and_says_why(gt):
    rule = gt.custom_rule(lambda x: x)
    rule.defvjp(lambda x: 1 / 0, lambda r, ct: (ct,))
    found = gt.measure(rule, *arrays(gt, (3,)))
    assert found.saved_bytes is None
    assert "division by zero" in found.notes[0]
    assert "saved bytes  unknown" in str(found)


# --- the formulas --------------------------------------------------------------------------


@pytest.mark.parametrize("n", range(-6, 20))
def test_a_whole_power_is_its_multiplications_by_squaring(n):
    def by_squaring(n):
        times, result, base = 0, None, 1
        while n:
            if n & 1:
                times += result is not None
                result = base
            n >>= 1
            times += n > 0
        return times

    assert costs.whole_power(n, False) == by_squaring(abs(n)) + (n < 0)


@pytest.mark.parametrize("stride", [1, 2, 3])
@pytest.mark.parametrize("low", [0, 1, 2])
@pytest.mark.parametrize(("in_step", "tap_step"), [(1, 1), (2, 1), (1, 2)])
def test_meetings_are_those_of_a_naive_convolution(stride, low, in_step, tap_step):
    ins, taps, outs = 7, 3, 4
    line = {i * in_step for i in range(ins)}
    naive = sum(o * stride + t * tap_step - low in line for o in range(outs) for t in range(taps))
    assert costs.meetings(outs, taps, ins, stride, low, in_step, tap_step) == naive


@pytest.mark.parametrize(
    ("number", "text"),
    [(0, "0 B"), (999, "999 B"), (999.6, "1 kB"), (12345, "12.3 kB"), (2.5e9, "2.5 GB")],
)
def test_numbers_are_shown_with_three_digits(number, text):
    assert costs.scaled(number, "B") == text


def test_the_text_shows_each_number_with_its_unit():
    found = costs.measurement(
        [0.001, 0.002, 0.004],
        flops=1_500_000_000,
        peak_bytes=45_000_000,
        saved_bytes=None,
        backend="torch",
        notes=("something is not counted",),
    )
    assert str(found).splitlines() == [
        "flops        1.5 GFLOP",
        "peak bytes   45 MB",
        "saved bytes  unknown",
        "seconds      2 ms (median of 3, 1 ms to 4 ms)",
        "note: something is not counted",
    ]
    assert "\033[1m" in found.text(colour=True)
