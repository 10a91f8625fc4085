"""What chunks give is joined only where it is rows of examples."""

from __future__ import annotations

from collections import namedtuple

import numpy as np
import pytest

from gradtools import GradtoolsError

X = np.random.default_rng(0).normal(size=(12, 8))
W = np.random.default_rng(1).normal(size=(8, 8))
Pair = namedtuple("Pair", "rows norms")


def programs(gt):
    xp, w = gt.xp, gt.asarray(W)
    return {
        "rows": lambda x: x @ w,
        "one number each": lambda x: xp.sum(x @ w, axis=1),
        "as many features as examples": lambda x: (x @ w)[:, :4],
        "a dict": lambda x: {"h": x @ w, "n": xp.sum(x, axis=1)},
        "a named tuple": lambda x: Pair(x @ w, xp.sum(x, axis=1)),
        "two rows each": lambda x: xp.concat([x, -x]),
        "half a row each": lambda x: xp.sum(xp.reshape(x, (-1, 2, 8)), axis=1),
        "a quarter of a row": lambda x: xp.sum(xp.reshape(x, (-1, 4, 8)), axis=1),
        "its own table for each": lambda x: x[:, :4, None] * x[:, None, :4],
        "no features": lambda x: x[:, :0],
        "flags": lambda x: (x, x > 0),
        "constants": lambda x: {"h": x, "c": None, "name": "rows", "flag": True},
        "only so many": lambda x: xp.reshape(x, (4, 8)),
    }


# Those that plain calls refuse for chunks of such sizes (the last of 12 rows in chunks of 5 has 2).
UNFIT = {
    "half a row each": (5, 1),
    "a quarter of a row": (5, 1),
    "only so many": (5, 1, 12),
}


# Programs whose outputs have more or fewer entries than examples.
PROPORTIONAL = ("two rows each", "half a row each", "a quarter of a row")


@pytest.mark.sampled(torch=(4, 4), jax=(2, 4))
@pytest.mark.parametrize("size", [4, 5, 1, 12])
def test_rows_of_examples_are_joined(gt, size):
    for name, f in programs(gt).items():
        parts = [gt.asarray(X[i : i + size]) for i in range(0, len(X), size)]
        if size in UNFIT.get(name, ()):
            with pytest.raises((RuntimeError, TypeError)):
                _ = [f(part) for part in parts]
            continue
        rows = [f(part) for part in parts]
        if name in PROPORTIONAL and size < len(X):
            with pytest.raises(GradtoolsError, match="only rows of examples can be joined"):
                gt.chunked(f, size)(gt.asarray(X))
            continue
        out = gt.chunked(f, size)(gt.asarray(X))
        if hasattr(out, "shape"):
            expected = np.concatenate([gt.to_numpy(row) for row in rows])
            np.testing.assert_allclose(gt.to_numpy(out), expected, rtol=1e-12, err_msg=name)


def no_rows(gt):
    xp, w = gt.xp, gt.asarray(W)
    mean = lambda x: xp.mean(x, axis=0)
    return {
        "batch statistics": (lambda x: (x @ w, mean(x)), r"output\[1\] has length 8 .*out\[0\]\."),
        "a scale": (
            lambda x: (x, xp.ones(1)),
            r"output\[1\] has length 1 .*wrap f so that it returns out\[0\]\.",
        ),
        "as long as a chunk": (lambda x: (x, xp.ones(4)), r"output\[1\] has length 4 "),
        "a weight": (
            lambda x: {"h": x, "w": w},
            r"output\['w'\] has length 8 .* returns out\['h'\]\.",
        ),
        "in a tree": (
            lambda x: {"h": x, "s": {"mean": mean(x), "x": x}},
            r"output\['s'\]\['mean'\] has .* returns \(out\['h'\], out\['s'\]\['x'\]\)\.",
        ),
        "a mean": (
            lambda x: mean(x)[None],
            "output has length 1 on axis 0 .* use microbatched_value_and_grad",
        ),
        "all pairs": (lambda x: x @ x.T, r"shape \(\d, \d\) for \d examples.* cannot be joined"),
        "between rows": (lambda x: (x, mean(x), x[:, 0]), r"returns \(out\[0\], out\[2\]\)\."),
        "a number": (lambda x: (x, x[:, 0], xp.mean(x)), r"shape \(\), .*returns out\[:2\]\."),
    }


@pytest.mark.parametrize("size", [4, 5, 3])
def test_what_is_no_row_of_examples_is_refused_by_name(gt, size):
    for name, (f, words) in no_rows(gt).items():
        by_chance = name == "all pairs" or (name == "as long as a chunk" and size == 4)
        if len(X) % size == 0 and by_chance:
            continue  # as many as examples in each chunk, as far as can be seen
        with pytest.raises(GradtoolsError, match=f"^chunked: .*{words}"):
            print(name, gt.chunked(f, size)(gt.asarray(X)))


@pytest.mark.parametrize("size", [4, 12])
def test_lists_of_examples_are_held_to_the_same(gt, size):
    stacked = lambda xs: gt.xp.stack([2 * x for x in xs])
    out = gt.chunked(stacked, size)(list(gt.asarray(X)))
    np.testing.assert_array_equal(gt.to_numpy(out), 2 * X)
    both = lambda xs: (stacked(xs), gt.xp.mean(stacked(xs), axis=0))
    if size < len(X):
        with pytest.raises(GradtoolsError, match=r"output\[1\] has length 8 "):
            gt.chunked(both, size)(list(gt.asarray(X)))


def test_one_chunk_may_return_anything_that_has_an_axis(gt):
    f = lambda x: (x, gt.xp.mean(x, axis=0))
    rows, mean = gt.chunked(f, 20)(gt.asarray(X))
    assert rows.shape == (12, 8) and mean.shape == (8,)


def test_out_axes_name_the_axis_that_follows(gt):
    time_first = lambda x: gt.xp.permute_dims(x[:, :4, None] * 2.0, (1, 0, 2))
    assert gt.chunked(time_first, 4, out_axes=1)(gt.asarray(X)).shape == (4, 12, 1)
    with pytest.raises(GradtoolsError, match=r"output has length 8 on axis 1 "):
        gt.chunked(lambda x: gt.xp.mean(x, axis=0)[None], 4, out_axes=1)(gt.asarray(X))


def test_rows_that_are_added_to_each_chunk_are_refused(gt):
    with pytest.raises(GradtoolsError, match=r"output has length 6 on axis 0 for 4 examples"):
        gt.chunked(lambda x: gt.xp.concat([x, gt.asarray(W)[:2]]), 4)(gt.asarray(X))
