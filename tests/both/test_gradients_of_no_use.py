"""Tests reports of why_zero for gradients that are NaN or are zero because of the values."""

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


def softmax(gt, x):
    return gt.xp.exp(x) / gt.xp.sum(gt.xp.exp(x), axis=-1, keepdims=True)


# --- a factor that starts at zero ---------------------------------------------------------


def adapted(gt, params, x):
    """Return a loss with a low-rank adapter (LoRA) whose second factor is zero."""
    return gt.xp.mean((x @ params["w"] + x @ params["A"] @ params["B"]) ** 2)


def gated(gt, params, x):
    """Return a loss with a ReZero block, whose gate is zero."""
    return gt.xp.mean((x + params["gate"] * gt.xp.tanh(x @ params["w"])) ** 2)


def closed(gt, params, x):
    """Return a loss whose gradients are both zero, because the gate and x @ w are zero."""
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
    if f is closed:  # neither parameter has a nonzero gradient
        assert {(f.argument, f.kind) for f in report} == {(n, "zero") for n in names}
    else:
        ((text, noted),) = report.notes
        assert not report and set(noted) == names and "LoRA" in text
