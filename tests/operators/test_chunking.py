"""Compares `chunked` with the function of the whole batch, up to second order."""

from __future__ import annotations

import numpy as np
import pytest

from gradtools import GradtoolsError
from tests.support.chunking_table import CASES, chunked, loss
from tests.support.numpy_trees import leaves, tree_map


def lifted(gt, tree):
    return tree_map(lambda x: gt.asarray(np.asarray(x)), tree)


def numbers(gt, tree):
    return [gt.to_numpy(x) for x in leaves(tree)]


def close(gt, found, expected, tolerance=1e-12):
    found, expected = numbers(gt, found), numbers(gt, expected)
    size = max(float(np.abs(e).max(initial=0)) for e in expected)
    assert len(found) == len(expected)
    for a, b in zip(found, expected, strict=True):
        assert a.shape == b.shape and a.dtype == b.dtype
        np.testing.assert_allclose(a, b, rtol=0, atol=tolerance * max(size, 1.0))


@pytest.fixture(params=CASES, ids=str)
def case(request):
    return request.param


@pytest.fixture
def problem(case, gt, rng):
    """Return the chunked function, the plain function, weight, batch and tangents of a case."""
    w, x = lifted(gt, case.weight(rng)), lifted(gt, case.batch(rng))
    dw, dx = lifted(gt, case.weight(rng)), lifted(gt, case.batch(rng))
    return chunked(gt, case), lambda w, x: case.f(gt, w, x), w, x, (dw, dx)


@pytest.mark.sampled(torch=(21, 21), jax=(3, 16))
def test_the_value_is_that_of_the_batch(gt, problem):
    ours, plain, w, x, _ = problem
    found, expected = ours(w, x), plain(w, x)
    if isinstance(expected, dict):  # an output contains row indices within each chunk
        expected["row"] = gt.asarray(np.concatenate([np.arange(4), np.arange(4), np.arange(2)]))
    close(gt, found, expected, 1e-14)


@pytest.mark.quick_at("torch", "one chunk", "larger than the batch")
@pytest.mark.sampled(slow=6)
def test_gradients_are_those_of_the_batch(gt, problem):
    ours, plain, w, x, _ = problem
    found = gt.value_and_grad(lambda w, x: loss(gt, ours(w, x)), (0, 1))(w, x)
    close(gt, found, gt.value_and_grad(lambda w, x: loss(gt, plain(w, x)), (0, 1))(w, x))


@pytest.mark.sampled(torch=(21, 21), jax=(2, 16))
def test_pushforwards_are_those_of_the_batch(gt, problem):
    ours, plain, w, x, directions = problem
    found = gt.jvp(lambda w, x: loss(gt, ours(w, x)), (w, x), directions)
    close(gt, found, gt.jvp(lambda w, x: loss(gt, plain(w, x)), (w, x), directions))


@pytest.mark.sampled(slow=21)
@pytest.mark.slow
@pytest.mark.parametrize("mode", ["forward_over_reverse", "reverse_over_reverse"])
def test_hessian_products_are_those_of_the_batch(gt, problem, mode):
    ours, plain, w, x, directions = problem
    found = gt.hvp(lambda w, x: loss(gt, ours(w, x)), (w, x), directions, mode=mode)
    close(gt, found, gt.hvp(lambda w, x: loss(gt, plain(w, x)), (w, x), directions))


@pytest.mark.sampled(slow=12)
@pytest.mark.slow
def test_under_vmap_and_compile(gt, problem):
    ours, plain, w, x, _ = problem
    quick = gt.__name__.endswith("torch") and not isinstance(w, dict)  # inductor compiles slowly
    options = {"backend": "aot_eager"} if quick else {}
    found = gt.compile(lambda w, x: loss(gt, ours(w, x)), **options)(w, x)
    close(gt, found, loss(gt, plain(w, x)))
    if isinstance(w, dict):
        return
    many = gt.xp.stack([w, 2 * w])
    found = gt.vmap(gt.grad(lambda w: loss(gt, ours(w, x))))(many)
    close(gt, found, gt.vmap(gt.grad(lambda w: loss(gt, plain(w, x))))(many))


# --- expected values derived by hand ------------------------------------------------------


@pytest.mark.slow_at("jax")
def test_u6_in_small(gt):
    x = gt.asarray(np.array([1.0, 2.0, 3.0]))
    square = gt.chunked(lambda w, x: w * x**2, 2, in_axes=(None, 0))
    total = lambda w: square(w, x).sum() ** 2  # The total is (14 w)^2.
    w = gt.asarray(np.array(3.0))
    assert float(gt.grad(total)(w)) == 2 * 14**2 * 3
    assert float(gt.grad(gt.grad(total))(w)) == 2 * 14**2


@pytest.mark.sweep_at("jax")
def test_carries_go_from_chunk_to_chunk_once(gt):
    def f(x, count):
        return x * count, count + x.sum()

    x = gt.asarray(np.array([1.0, 2.0, 3.0, 4.0, 5.0]))
    one = gt.asarray(np.array(1.0))
    out, count = gt.chunked(f, 2, carry_argnums=1)(x, one)
    assert gt.to_numpy(out).tolist() == [1, 2, 12, 16, 55] and float(count) == 16
    g = gt.grad(lambda x: (gt.chunked(f, 2, carry_argnums=1)(x, one)[0] * x).sum())(x)
    # the gradient is 2 x count, because no gradient propagates through the carry
    assert gt.to_numpy(g).tolist() == [2, 4, 24, 32, 110]


@pytest.mark.sweep_at("jax")
def test_each_chunk_has_a_key_of_its_own(gt):
    seen = gt.chunked(lambda x, k: x * 0 + gt.xp.sum(_words(gt, k)), 2, key_argnums=1)
    found = gt.to_numpy(seen(gt.asarray(np.ones(6)), gt.random_key(0)))
    assert found[0] == found[1] != found[2] == found[3] != found[4] == found[5]
    assert len(set(found.tolist())) == 3


def _words(gt, key):
    if gt.__name__.endswith("torch"):
        return (key % 1000003).double()
    import jax

    return jax.random.key_data(key) % 1000003


@pytest.mark.slow_at("jax")
def test_token_counts_weigh(gt, rng):
    tokens = np.array([1, 5, 2, 2, 7, 1, 1, 3, 4, 4])
    mask = np.arange(8) < tokens[:, None]
    x, m = gt.asarray(rng.normal(size=(10, 8))), gt.asarray(mask.astype(float))
    w = gt.asarray(np.array(0.5))
    f = lambda w, x, m: (gt.xp.tanh(w * x) * m).sum() / m.sum()
    expected = gt.value_and_grad(f)(w, x, m)
    for weights in (gt.asarray(tokens.astype(float)), lambda w, x, m: m.sum()):
        close(gt, gt.microbatched_value_and_grad(f, 4, weights=weights)(w, x, m), expected)
    wrong = gt.microbatched_value_and_grad(f, 4)(w, x, m)
    # without weights, all examples have the same weight
    assert abs(float(wrong[0]) - float(expected[0])) > 1e-4


# --- weights that sum to zero ---------------------------------------------------------------


@pytest.mark.parametrize("given", ["an array", "a function"])
def test_a_chunk_of_weight_zero_adds_nothing_even_if_its_mean_is_no_number(gt, given):
    mean = lambda w, x, m: (w * x * m).sum() / m.sum()  # 0/0 in the chunk whose mask is zero
    m = np.array([1.0, 1, 0, 0, 1, 0])
    x, w = gt.asarray(np.arange(1.0, 7.0)), gt.asarray(np.float64(2))
    weights = m if given == "an array" else lambda w, x, m: m.sum()
    run = gt.microbatched_value_and_grad(mean, 2, in_axes=(None, 0, 0), weights=weights)
    value, slope = run(w, x, gt.asarray(m))
    np.testing.assert_allclose((float(value), float(slope)), (16 / 3, 8 / 3))


@pytest.mark.slow_at("jax")
def test_weights_that_sum_to_zero_are_refused_in_microbatched(gt):
    mean = lambda w, x: (w * x).mean()
    x, w = gt.asarray(np.arange(6.0)), gt.asarray(np.float64(2))
    for weights in (np.zeros(6), np.array([1.0, -1, 2, -2, 0, 0]), lambda w, x: x.sum() * 0):
        with pytest.raises(GradtoolsError, match="the weights sum to 0, so there is no mean"):
            gt.microbatched_value_and_grad(mean, 2, weights=weights)(w, x)


def test_the_fields_of_a_batch_are_not_taken_for_examples(gt):
    """torch.utils.data.DataLoader returns a batch as the list [x, y]."""
    x, y = (gt.asarray(a.astype(np.float32)) for a in (np.arange(8.0).reshape(4, 2), np.arange(4)))
    rows = gt.chunked(lambda batch: batch[0].sum(1) * batch[1], 2)
    assert gt.to_numpy(rows((x, y))).tolist() == [0, 5, 18, 39]
    step = gt.microbatched_value_and_grad(lambda w, batch: (w * rows(batch)).mean(), 2)
    assert float(step(x[0, 1], (x, y))[1]) == 15.5
    for call in (lambda: rows([x, y]), lambda: step(x[0, 1], [x, y])):
        with pytest.raises(GradtoolsError, match=r"a batch \[x, y\] of a DataLoader.*tuple"):
            call()
    examples = [x, x[:, :1], x]  # arrays of different widths, such as images
    count = gt.chunked(lambda xs: gt.xp.stack([x.sum() for x in xs]), 2)
    assert gt.to_numpy(count(examples)).tolist() == [28, 12, 28]
    with pytest.raises(IndexError) as caught:
        gt.microbatched_value_and_grad(lambda w, xs: (w * xs[1]).mean(), 1)(x[0, 1], [x, x])
    assert "A list is treated as a list of examples" in caught.value.__notes__[0]


@pytest.mark.jax
def test_a_note_names_key_argnums_if_a_key_was_split():
    jax, gt = pytest.importorskip("jax"), pytest.importorskip("gradtools.jax")
    noisy = gt.chunked(lambda x, key: x + jax.random.normal(key, x.shape), 1)
    with pytest.raises(TypeError) as caught:
        noisy(jax.numpy.ones((2, 3)), jax.random.PRNGKey(0))  # a key of two words, two examples
    assert "random key, name it in key_argnums" in caught.value.__notes__[0]


def test_an_output_of_size_0_is_stacked_from_chunks(gt):
    w = {"full": gt.asarray(np.arange(3.0)), "empty": gt.asarray(np.zeros((0, 2)))}
    x = gt.asarray(np.arange(9.0).reshape(3, 3))
    f = lambda w, x: (w["full"] * x).sum() + w["empty"].sum()
    close(gt, gt.per_example_grad(f, chunk_size=2)(w, x), gt.per_example_grad(f)(w, x))
    g = lambda w: {"doubled": 2 * w["full"], "none": w["empty"]}
    jacobian = lambda **options: gt.jacobian(g, mode="forward", **options)(w)
    close(gt, jacobian(chunk_size=2), jacobian())
