"""`chunked` concatenates outputs of chunks only if the rows of an output belong to examples."""

from __future__ import annotations

from collections import namedtuple

import numpy as np
import pytest

from gradtools import GradtoolsError

X = np.random.default_rng(0).normal(size=(12, 8))
W = np.random.default_rng(1).normal(size=(8, 8))
Pair = namedtuple("Pair", "rows norms")


def leaves(gt, tree):
    if isinstance(tree, dict):
        return [x for key in sorted(tree) for x in leaves(gt, tree[key])]
    if isinstance(tree, tuple):
        return [x for part in tree for x in leaves(gt, part)]
    return [tree if tree is None or isinstance(tree, str | bool) else gt.to_numpy(tree)]


@pytest.mark.sampled(torch=(4, 4), jax=(2, 4))
@pytest.mark.parametrize("size", [4, 5, 1, 12])
def test_rows_of_examples_are_joined(gt, size):
    xp, w = gt.xp, gt.asarray(W)
    programs = [
        lambda x: x @ w,
        lambda x: {"h": x @ w, "n": xp.sum(x, axis=1)},
        lambda x: Pair(x @ w, xp.sum(x, axis=1)),
        lambda x: x[:, :4, None] * x[:, None, :4],
        lambda x: x[:, :0],
        lambda x: {"h": x, "c": None, "name": "rows", "flag": True, "positive": x > 0},
    ]
    for f in programs:
        x = gt.asarray(X)
        found, expected = leaves(gt, gt.chunked(f, size)(x)), leaves(gt, f(x))
        for a, b in zip(found, expected, strict=True):
            if isinstance(b, np.ndarray):
                np.testing.assert_allclose(a, b, rtol=1e-14)
            else:
                assert a == b


NO_ROWS = {
    "a statistic": (lambda gt, x: (x, gt.xp.mean(x, axis=0)), r"output\[1\] has length 8 "),
    "a mean": (
        lambda gt, x: gt.xp.mean(x, axis=0)[None],
        "output has length 1 on axis 0 .* use microbatched_value_and_grad",
    ),
    "all pairs": (
        lambda gt, x: x @ x.T,
        r"shape \(\d, \d\) for \d examples.* cannot be concatenated",
    ),
    "a number": (lambda gt, x: (x, gt.xp.mean(x)), r"output\[1\] has shape \(\) "),
    "an object": (
        lambda gt, x: (x, object()),
        r"output\[1\] is <object .* must be the same for all",
    ),
    "a string that differs": (
        lambda gt, x: (x, str(float(gt.xp.sum(x)))),
        r"output\[1\] is .* the same for all chunks",
    ),
    "a count": (lambda gt, x: (x, len(x)), r"output\[1\] is the number of the chunk's examples"),
}


@pytest.mark.parametrize("name", NO_ROWS)
def test_what_is_no_row_of_examples_is_refused_by_name(gt, name):
    if name == "a string that differs" and gt.__name__.endswith("jax"):
        pytest.skip("under tracing, f cannot read the value of an array")
    f, words = NO_ROWS[name]
    with pytest.raises(GradtoolsError, match=f"^chunked: .*{words}"):
        gt.chunked(lambda x: f(gt, x), 5)(gt.asarray(X))


@pytest.mark.parametrize("size", [4, 12])
def test_a_list_of_examples_gives_rows_and_no_others(gt, size):
    stacked = lambda xs: gt.xp.stack([2 * x for x in xs])
    out = gt.chunked(stacked, size)(list(gt.asarray(X)))
    np.testing.assert_array_equal(gt.to_numpy(out), 2 * X)
    both = lambda xs: (stacked(xs), gt.xp.mean(stacked(xs), axis=0))
    if size < len(X):
        with pytest.raises(GradtoolsError, match=r"output\[1\] has length 8 "):
            gt.chunked(both, size)(list(gt.asarray(X)))


def test_out_axes_name_the_axis_that_follows(gt):
    time_first = lambda x: gt.xp.permute_dims(x[:, :4, None] * 2.0, (1, 0, 2))
    assert gt.chunked(time_first, 4, out_axes=1)(gt.asarray(X)).shape == (4, 12, 1)
    with pytest.raises(GradtoolsError, match=r"output has length 8 on axis 1 "):
        gt.chunked(lambda x: gt.xp.mean(x, axis=0)[None], 4, out_axes=1)(gt.asarray(X))


def test_an_output_of_none_is_kept_beside_a_carry_and_without_chunks(gt):
    x = gt.asarray(X)
    assert gt.frozen(lambda x: None)(x) is None
    assert gt.checkpoint(lambda x: None)(x) is None
    total = gt.chunked(lambda x, s: (None, s + x.sum()), 2, carry_argnums=1)
    out, carry = total(x, gt.asarray(0.0))
    assert out is None
    np.testing.assert_allclose(gt.to_numpy(carry), X.sum())
