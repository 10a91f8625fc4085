"""What why_zero says of gradients that are NaN, and of what selects nothing."""

from __future__ import annotations

import inspect

import numpy as np
import pytest

MARK = "# <- here"


def masked_root(gt, x):
    return gt.xp.sum(gt.xp.where(x > 0, gt.xp.sqrt(x), gt.xp.zeros_like(x)))  # <- here


def norm_at_zero(gt, x):
    return gt.xp.sqrt(gt.xp.sum((x * 0) ** 2))  # <- here


def overflowing(gt, x):
    return gt.xp.sum(gt.xp.log(1 + gt.xp.exp(400 * x)))  # <- here


def forty_sigmoids(gt, x):
    for _ in range(40):
        x = 1 / (1 + gt.xp.exp(-x))
    return gt.xp.sum(x)


def nothing_selected(gt, x):
    return gt.xp.sum(x[2:2] ** 2)  # <- here


def another_is_greater(gt, x):
    hundred = gt.asarray(np.float32([100.0]))
    return gt.xp.sort(gt.xp.concat([hundred, x]))[-1]  # <- here


def root_of_what_a_mask_leaves_out(gt, x):
    return gt.xp.sum(gt.xp.where(x < 1, x, gt.xp.sqrt(x)))  # <- here


def squared_norm_at_zero(gt, x):
    norm = gt.xp.sqrt(gt.xp.sum((0 * x) ** 2))  # <- here
    return norm**2


def infinite_factor_behind_a_mask(gt, x):
    return gt.xp.sum(gt.xp.where(x >= 0, gt.xp.zeros_like(x), x * np.inf))  # <- here


def head_of_zeros_before_a_normalisation(gt, x):
    y = gt.asarray(np.zeros((3, 2), np.float32)) @ x
    length = gt.xp.sqrt(gt.xp.sum(y**2))  # <- here
    return gt.xp.sum(y / (length + 1e-6))


def softmax_of_a_quotient(gt, x):
    shifted = x / (gt.xp.sum(x) - gt.xp.sum(x))  # <- here
    return gt.xp.sum(softmax(gt, shifted) * x)


def logarithm_of_data(gt, x):
    weights = gt.xp.log(gt.asarray(X))  # <- here
    return gt.xp.sum(0 * weights * x)


PLANTED = [
    (softmax_of_a_quotient, "nan"),
    (logarithm_of_data, "nan"),
    (root_of_what_a_mask_leaves_out, "nan"),
    (squared_norm_at_zero, "nan"),
    (infinite_factor_behind_a_mask, "nan"),
    (head_of_zeros_before_a_normalisation, "nan"),
    (another_is_greater, "zero"),
    (masked_root, "nan"),
    (norm_at_zero, "nan"),
    (overflowing, "nan"),
    (nothing_selected, "zero"),
]
X = np.array([0.0, 2.0], np.float32)


@pytest.mark.slow_at(
    ("jax", "another_is_greater"),
    ("jax", "masked_root"),
    ("jax", "overflowing"),
    ("jax", "nothing_selected"),
)
@pytest.mark.parametrize(("f", "kind"), PLANTED, ids=[f.__name__ for f, _ in PLANTED])
def test_a_gradient_of_no_use_is_told_with_its_line(gt, f, kind):
    report = gt.why_zero(lambda x: f(gt, x), gt.asarray(X))
    lines, first = inspect.getsourcelines(f)
    at = next(first + k for k, line in enumerate(lines) if MARK in line)
    assert {(found.kind, found.source.line) for found in report} == {(kind, at)}
    assert all(found.numerical and found.fix in str(report) for found in report)


def rows(gt, *shape):
    return gt.asarray(np.random.default_rng(1).normal(size=shape).astype(np.float32))


def softmax(gt, x):
    return gt.xp.exp(x) / gt.xp.sum(gt.xp.exp(x), axis=-1, keepdims=True)


def normalised(gt, x):
    spread = gt.xp.sqrt(gt.xp.mean((x - gt.xp.mean(x, axis=0)) ** 2, axis=0) + 1e-5)
    return (x - gt.xp.mean(x, axis=0)) / spread


def hilbert(gt, n):
    return gt.asarray(1 / (1 + np.add.outer(np.arange(n), np.arange(n))).astype(np.float32))


HEALTHY = {
    "a Hilbert matrix": lambda gt, x: gt.xp.sum((hilbert(gt, 2) @ (x - 1)) ** 2),
    "a deep network": lambda gt, x: gt.xp.sum(_deep(gt, x)),
    "a difference of what is near": lambda gt, x: gt.xp.sum((x + 1.001) ** 3 - (x + 1) ** 3),
    "almost a softmax's sum": lambda gt, x: gt.xp.sum(
        softmax(gt, x) * gt.asarray(np.float32([1, 1.001]))
    ),
    "small because the output is small": lambda gt, x: gt.xp.sum(1e-30 * x),
    "a root behind where, inside and outside": lambda gt, x: gt.xp.sum(
        gt.xp.where(x > 0, gt.xp.sqrt(gt.xp.where(x > 0, x, gt.xp.ones_like(x))), 0 * x)
    ),
    "three sigmoids": lambda gt, x: gt.xp.sum(1 / (1 + gt.xp.exp(-1 / (1 + gt.xp.exp(-x))))),
    "a shift of a softmax": lambda gt, x: gt.xp.sum(
        x * gt.xp.exp(x + x[1]) / gt.xp.sum(gt.xp.exp(x + x[1]))
    ),
    "forty sigmoids": forty_sigmoids,
    "a bias before a normalization": lambda gt, x: gt.xp.sum(
        gt.xp.tanh(normalised(gt, rows(gt, 16, 2) + x)) * rows(gt, 16, 2)
    ),
    "a mean of many": lambda gt, x: gt.xp.mean(gt.xp.stack([x**2] * 500)),
}


@pytest.mark.slow_at(
    "a deep network",
    ("jax", "a difference of what is near"),
    ("jax", "almost a softmax's sum"),
    ("jax", "a shift of a softmax"),
)
@pytest.mark.sweep_at(("jax", "a deep network"), ("jax", "a mean of many"))
@pytest.mark.parametrize("name", HEALTHY)
def test_an_ordinary_gradient_is_no_finding(gt, name):
    report = gt.why_zero(lambda x: HEALTHY[name](gt, x), gt.asarray(X))
    assert not report, str(report)


def _deep(gt, x):
    for _ in range(60):
        x = x + 0.1 * gt.xp.tanh(rows(gt, 2, 2) @ x)
    return x


# --- a factor that starts at zero ---------------------------------------------------------


def adapted(gt, params, x):
    """LoRA: the second matrix starts at zero."""
    return gt.xp.mean((x @ params["w"] + x @ params["A"] @ params["B"]) ** 2)


def gated(gt, params, x):
    """ReZero: the branch starts at zero."""
    return gt.xp.mean((x + params["gate"] * gt.xp.tanh(x @ params["w"])) ** 2)


def closed(gt, params, x):
    """Neither factor has a gradient: the gate's is zero as well."""
    return gt.xp.sum((params["gate"] * (x @ params["w"])) ** 2)


@pytest.mark.slow_at(("jax", "ReZero"))
@pytest.mark.sweep_at(("jax", "LoRA"))
@pytest.mark.parametrize(
    ("f", "lost"),
    [(adapted, "A"), (gated, "w"), (closed, ["w", "gate"])],
    ids=["LoRA", "ReZero", "closed"],
)
def test_a_factor_that_starts_at_zero_is_a_note_if_it_moves(gt, f, lost):
    numbers = np.random.default_rng(0).normal(size=(3, 3)).astype(np.float32)
    zero = np.zeros((2, 3) if f is adapted else (), np.float32)
    params = {
        "w": numbers,
        **({"A": numbers[:, :2], "B": zero} if f is adapted else {"gate": zero}),
    }
    params = {name: gt.asarray(x) for name, x in params.items()}
    report = gt.why_zero(lambda params, x: f(gt, params, x), params, gt.asarray(numbers))
    names = {f"argument 0['{name}']" for name in lost}
    if f is closed:  # neither factor moves
        assert {(f.argument, f.kind) for f in report} == {(n, "zero") for n in names}
    else:
        ((text, noted),) = report.notes
        assert not report and set(noted) == names and "LoRA" in text


# --- derivatives inside of f ---------------------------------------------------------------


# The inner derivative of order 2 is constant, which a warning says.


def test_what_concerns_most_comes_first(gt):
    f = lambda p: sum(gt.xp.sum(gt.stop_gradient(p[k])) for k in "xyz") + gt.xp.sum(p["w"])
    params = {name: gt.asarray(X) for name in ("spare", "w", "x", "y", "z")}
    report = gt.why_zero(f, params)
    assert [finding.kind for finding in report] == ["detached"] * 3 + ["unused"]
    assert str(report).index("detached") < str(report).index("unused")
