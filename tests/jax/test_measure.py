"""`measure` in JAX: jaxprs counted against XLA's own analysis, loops against their trips."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import gradtools
import gradtools.jax as gt
from gradtools.seeing.jax.measures import _libraries

RNG = np.random.default_rng(0)


def draw(*shape):
    return jnp.asarray(RNG.normal(size=shape).astype(np.float32))


def flops(f, *args):
    found = gt.measure(f, *args)
    assert not [note for note in found.notes if not note.startswith("peak bytes leave out")]
    return found.flops


def of_xla(f, *args):
    """What XLA says of a program without loops: it keeps transcendental functions apart."""
    found = jax.jit(f).lower(*args).compile().cost_analysis()
    return found.get("flops", 0) + found.get("transcendentals", 0)


W, X = draw(8, 8), draw(5, 8)
AGREE = {
    "product": lambda w, x: x @ w,
    "vector": lambda w, x: w @ x[0],
    "batch": lambda w, x: jnp.einsum("ij,kij->kj", w, x[:, :, None] * w),
    "layer": lambda w, x: jnp.tanh(x @ w + w[0]),
    "softmax by hand": lambda w, x: (lambda e: e / e.sum(1, keepdims=True))(jnp.exp(x @ w)),
    "gradient": lambda w, x: jax.grad(lambda w: jnp.sin(x @ w).sum())(w),
    "second derivative": lambda w, x: jax.jvp(
        jax.grad(lambda x: (jnp.sin(x @ w) * x).sum()), (x,), (jnp.cos(x),)
    ),
    "sums": lambda w, x: (w.sum(), x.max(1), w.prod()),
    "powers": lambda w, x: (w**2, x**5),
}


def test_a_window_is_reduced_with_one_operation_less_than_it_has_entries():
    f = lambda x: lax.reduce_window(x, 0.0, lax.add, (2, 3), (1, 1), "valid")
    assert flops(f, draw(4, 5)) == 3 * 3 * (2 * 3 - 1)


@pytest.mark.quick_at("product")
@pytest.mark.sweep_at("second derivative")
@pytest.mark.parametrize("name", AGREE)
def test_without_loops_it_agrees_with_xla(name):
    """To some per cent: XLA also counts the adding of a reduction's first element."""
    ours, theirs = flops(AGREE[name], W, X), of_xla(AGREE[name], W, X)
    assert ours > 0
    assert abs(ours - theirs) <= 0.1 * theirs


@pytest.mark.sweep_at("1-SAME", "2-SAME", "3-SAME")
@pytest.mark.parametrize(
    ("stride", "padding"), [(1, "VALID"), (1, "SAME"), (2, "SAME"), (3, "SAME")]
)
def test_a_convolution_agrees_with_xla_and_its_gradients_cost_as_much(stride, padding):
    x, w = draw(2, 4, 7, 9), draw(6, 4, 3, 3)
    f = lambda x, w: lax.conv_general_dilated(x, w, (stride, stride), padding)
    once = flops(f, x, w)
    assert abs(once - of_xla(f, x, w)) <= 0.01 * once
    ct = draw(*f(x, w).shape)
    pulled = lambda x, w: jax.vjp(f, x, w)[1](ct)
    assert flops(pulled, x, w) == 2 * once


# --- loops and branches --------------------------------------------------------------------


def halve(x):
    """Halves until small: its trips are known only when it runs."""
    return lax.while_loop(lambda c: jnp.sum(c) > 1, lambda c: c * 0.5, x)


def test_a_while_is_run_to_count_its_trips():
    x = jnp.full(4, 8.0)  # sum 32: six halvings, and seven sums for the condition
    found = gt.measure(halve, x)
    trips = int(np.ceil(np.log2(32)))
    assert trips == 5
    assert found.flops == trips * 4 + (trips + 1) * 3
    assert found.saved_bytes is None and "while_loop" in found.notes[0]


def test_a_while_inside_of_a_scan_inside_of_a_rule_and_jit():
    rule = gt.custom_rule(lambda x: lax.scan(lambda c, s: (halve(c * s), None), x, S)[0])
    rule.defvjp(lambda x: (rule(x), None), lambda r, ct: (ct,))
    S = jnp.asarray([4.0, 8.0, 0.5])
    # from sum 1: 4 to 1 by two, 8 to 1 by three, then nothing
    trips = 2 + 3 + 0
    expected = 3 * 4 + trips * 4 + (trips + 3) * 3
    found = gt.measure(jax.jit(jax.checkpoint(rule)), jnp.full(4, 0.25))
    assert found.flops == expected
    assert found.saved_bytes == 0


def test_under_vmap_a_while_goes_on_for_all():
    x = jnp.stack([jnp.full(4, 8.0), jnp.full(4, 1.0)])
    assert gt.measure(jax.vmap(halve), x).flops == 5 * 8 + 6 * 6


def test_only_the_branch_that_runs_counts():
    f = lambda p, x: lax.cond(p, lambda x: x @ x, lambda x: x + 1, x)
    x = draw(6, 6)
    assert flops(f, jnp.asarray(True), x) == 2 * 6**3
    assert flops(f, jnp.asarray(False), x) == 36


def test_branches_in_a_scan_count_as_often_as_each_runs():
    def step(c, i):
        return lax.switch(i, [lambda c: c, lambda c: c + 1, lambda c: c @ c], c), None

    f = lambda x, which: lax.scan(step, x, which)[0]
    which = jnp.asarray([2, 0, 1, 1, 2, 2])
    assert flops(f, draw(6, 6) / 6, which) == 3 * 2 * 6**3 + 2 * 36


@pytest.mark.slow_at("1")
@pytest.mark.sweep_at("7")
@pytest.mark.parametrize("length", [0, 1, 7])
def test_a_scan_and_its_gradient_count_its_trips(length):
    xs = draw(length, 6, 6)
    f = lambda xs: lax.scan(lambda c, x: (c @ x, None), jnp.eye(6), xs)[0].sum()
    once = 2 * 6**3
    assert flops(f, xs) == length * once + 35
    grad = jax.grad(lambda c: lax.scan(lambda c, x: (c @ x, None), c, xs)[0].sum())
    assert flops(grad, draw(6, 6)) == length * once  # nothing needs the value


# --- what is left out, what is captured ----------------------------------------------------


def test_a_captured_array_is_an_argument_of_the_program():
    big = draw(1000, 1000)
    found = gt.measure(lambda x: big @ x, draw(1000))
    assert found.flops == 2 * 1000 * 1000
    assert found.peak_bytes < 10_000


def test_the_peak_is_xlas_temporary_and_output_bytes():
    f = lambda x: jnp.sin(x @ W) @ W
    memory = jax.jit(f).lower(X).compile().memory_analysis()
    expected = memory.temp_size_in_bytes + memory.output_size_in_bytes
    assert gt.measure(f, X).peak_bytes == expected > X.nbytes


def test_memory_that_xla_does_not_know_of_is_said():
    f = lambda w, x: jnp.exp(jnp.exp(x @ w) @ w).sum()
    hidden = '"kind":"__' in jax.jit(f).lower(W, X).compile().as_text()
    notes = gt.measure(f, W, X).notes
    assert any("library kernels" in note for note in notes) == hidden
    text = 'backend_config={"fusion_config":{"kind":"__ynn_fusion"}}'
    assert "(ynn, chosen by XLA)" in _libraries(text)[0]


def test_what_a_rule_hands_on_is_saved_once():
    """Its argument and a captured array are alive anyway, by whatever name they come back."""
    rule = gt.custom_rule(lambda x: jnp.exp(W * x))
    rule.defvjp(lambda x: ((y := jnp.exp(W * x)), (x, y, W, y)), lambda r, ct: (ct * r[2] * r[1],))
    assert gt.measure(rule, draw(8, 8)).saved_bytes == 8 * 8 * 4
    assert gt.measure(jax.jit(rule), draw(8, 8)).saved_bytes == 8 * 8 * 4


def test_keys_and_random_bits_cost_nothing():
    f = lambda key, x: x * (jax.random.bits(key, x.shape) % 2)
    assert gt.measure(f, jax.random.key(0), draw(6)).flops == 6
    found = gt.measure(lambda key: jax.random.split(key), jax.random.key(0))
    assert (found.flops, found.saved_bytes) == (0, 0)


def test_double_precision_is_counted_in_its_bytes():
    with jax.enable_x64(True):
        x = jnp.zeros(100, jnp.float64)
        found = gt.measure(jnp.exp, x)
    assert (found.saved_bytes, found.peak_bytes) == (800, 800)


def test_a_callback_is_named():
    shape = jax.ShapeDtypeStruct((3,), np.float32)
    f = lambda x: jax.pure_callback(np.sin, shape, x) + 1
    found = gt.measure(f, draw(3))
    assert found.flops == 3
    assert found.notes[0] == "not in flops: pure_callback, which no rule counts"


def test_what_jit_cannot_trace_is_refused_with_the_mend():
    f = lambda x, n: x * 2 if n > 1 else x
    with pytest.raises(gradtools.GradtoolsError, match=r"cannot be traced by jax\.jit.*partial"):
        gt.measure(f, draw(3), jnp.asarray(2))
    assert flops(f, draw(3), 2) == 3
    assert flops(partial(f, n=2), draw(3)) == 3


def test_inside_of_jit_it_is_refused():
    with pytest.raises(gradtools.GradtoolsError, match="inside of a transform"):
        jax.jit(lambda x: gt.measure(jnp.exp, x).flops)(draw(3))


def test_factorisations_and_transforms_are_counted():
    a = W @ W.T + jnp.eye(8)
    assert flops(lambda a: jnp.linalg.cholesky(a, symmetrize_input=False), a) >= 8**3 // 3
    assert flops(jnp.fft.fft, draw(16).astype(jnp.complex64)) == 5 * 16 * 4
    named = gt.measure(lambda a: jnp.linalg.eigh(a)[0], a).notes
    assert "eigh" in named[0]


@pytest.mark.slow_at("unstack")
@pytest.mark.parametrize(
    "f", [jnp.unstack, lambda x: jax.lax.approx_max_k(x, 2)[0]], ids=["unstack", "k"]
)
def test_what_costs_nothing_is_not_noted_as_uncounted(f):
    found = gt.measure(f, jnp.eye(3))
    assert (found.flops, found.notes) == (0, ())


def test_a_function_with_its_own_batching_rule_is_counted_by_what_it_runs():
    @jax.custom_batching.custom_vmap
    def f(x):
        return 2 * x

    f.def_vmap(lambda size, batched, x: (2 * x, True))
    assert gt.measure(f, jnp.ones(5)).flops == 5
