"""What one framework writes out reads like what the other calls by one name."""

import numpy as np
import pytest

from gradtools.seeing.formulas.derivation import Formula as derive
from gradtools.seeing.formulas.elementwise import cast_to
from tests.support.formula_builder import Builder

RNG = np.random.default_rng(5)


def written_out(b, name, x):
    """As JAX writes it; the maximum that it subtracts is stopped."""
    n = lambda v: b.number(float(v))
    if name in ("softmax", "log_softmax", "logsumexp"):
        top = b("stop", b("max", x, axes=(1,), keep=True))
        moved = b("subtract", x, top)
        e = b("exp", moved)
        if name == "softmax":
            return b("divide", e, b("sum", e, axes=(1,), keep=True))
        if name == "log_softmax":
            return b("subtract", moved, b("log", b("sum", e, axes=(1,), keep=True)))
        low = b("log", b("sum", e, axes=(1,)))
        return b("add", low, b("reshape", top, shape=(4,)))
    if name == "sigmoid":
        return b("divide", n(1), b("add", n(1), b("exp", b("negate", x))))
    if name == "softplus":
        return b("log1p", b("exp", x))
    if name == "relu":
        return b("maximum", x, n(0))
    if name == "silu":
        return b("multiply", x, b("sigmoid", x))
    if name == "norm":
        return b("sqrt", b("sum", b("square", x), axes=(1,)))
    mean = b("mean", x, axes=(1,), keep=True)
    centred = b("subtract", x, mean)
    if name == "variance":
        return b("mean", b("square", centred), axes=(1,))
    if name == "variance_of_moments":
        return b(
            "subtract", b("mean", b("square", x), axes=(1,)), b("square", b("mean", x, axes=(1,)))
        )
    variance = b("mean", b("square", centred), axes=(1,), keep=True)
    width = b("rsqrt", b("add", variance, n(1e-5)))
    if name == "layer_norm":
        return b("multiply", centred, width)
    if name == "layer_norm_divided":
        return b("divide", centred, b("sqrt", b("add", variance, n(1e-5))))
    raise KeyError(name)


CALLED = {
    "softmax": ("softmax", {"axis": 1}),
    "log_softmax": ("log_softmax", {"axis": 1}),
    "logsumexp": ("logsumexp", {"axes": (1,)}),
    "sigmoid": ("sigmoid", {}),
    "softplus": ("softplus", {}),
    "relu": ("relu", {}),
    "silu": ("silu", {}),
    "norm": ("norm", {"axes": (1,)}),
    "variance": ("variance", {"axes": (1,)}),
    "variance_of_moments": ("variance", {"axes": (1,)}),
    "layer_norm": ("standardize", {"axes": (1,), "eps": 1e-5}),
    "layer_norm_divided": ("standardize", {"axes": (1,), "eps": 1e-5}),
}


def formulas(name, order):
    one = Builder()
    first = derive(one.graph(written_out(one, name, one.input("X", (4, 3)))), order)
    two = Builder()
    operation, attributes = CALLED[name]
    second = derive(two.graph(two(operation, two.input("X", (4, 3)), **attributes)), order)
    return first, second


@pytest.mark.parametrize("order", [1, 2])
@pytest.mark.parametrize("name", sorted(CALLED))
def test_what_is_written_out_reads_like_what_is_called(name, order):
    first, second = formulas(name, order)
    assert str(first) == str(second)


@pytest.mark.parametrize("name", sorted(CALLED))
def test_what_is_recognised_has_the_same_numbers(name):
    first, _ = formulas(name, 1)
    at = RNG.normal(size=(4, 3))
    plain = np.asarray(_numpy(name)(at))
    found = first.evaluate([at]).outputs[0]
    np.testing.assert_allclose(found, plain, rtol=1e-12, atol=1e-12)


def _numpy(name):
    e = lambda x: np.exp(x - x.max(1, keepdims=True))
    softmax = lambda x: e(x) / e(x).sum(1, keepdims=True)
    standard = lambda x: (x - x.mean(1, keepdims=True)) / np.sqrt(x.var(1, keepdims=True) + 1e-5)
    return {
        "softmax": softmax,
        "log_softmax": lambda x: np.log(softmax(x)),
        "logsumexp": lambda x: np.log(np.exp(x).sum(1)),
        "sigmoid": lambda x: 1 / (1 + np.exp(-x)),
        "softplus": lambda x: np.log1p(np.exp(x)),
        "relu": lambda x: np.maximum(x, 0),
        "silu": lambda x: x / (1 + np.exp(-x)),
        "norm": lambda x: np.linalg.norm(x, axis=1),
        "variance": lambda x: x.var(1),
        "variance_of_moments": lambda x: x.var(1),
        "layer_norm": standard,
        "layer_norm_divided": standard,
    }[name]


def test_a_maximum_that_is_not_stopped_cancels_all_the_same():
    b = Builder()
    x = b.input("X", (4, 3))
    e = b("exp", b("subtract", x, b("max", x, axes=(1,), keep=True)))
    formula = derive(b.graph(b("divide", e, b("sum", e, axes=(1,), keep=True))))
    assert "softmax" in formula.lines(0)[0] and "max(" not in str(formula).replace("softmax", "")


def test_what_only_looks_like_softmax_is_left():
    b = Builder()
    x = b.input("X", (3, 3))
    e = b("exp", x)
    across = b("transpose", b("sum", e, axes=(1,), keep=True), permutation=(1, 0))
    formula = derive(b.graph(b("divide", e, across)))
    assert "softmax" not in str(formula)
    at = RNG.normal(size=(3, 3))
    np.testing.assert_allclose(
        formula.evaluate([at]).outputs[0], np.exp(at) / np.exp(at).sum(1), rtol=1e-12
    )


def test_what_only_looks_like_a_standardisation_is_left():
    b = Builder()
    x, z = b.input("X", (4, 3)), b.input("Z", (4, 3))
    centred = b("subtract", x, b("mean", x, axes=(1,), keep=True))
    variance = b("variance", z, axes=(1,), keep=True)
    formula = derive(b.graph(b("divide", centred, b("sqrt", variance))))
    assert "standardize" not in str(formula)


def test_what_only_looks_like_log_softmax_is_left():
    b = Builder()
    x, c, d = b.input("X", (4, 3)), b.input("c", (4, 1)), b.input("d", (4, 1))
    low = b("logsumexp", b("subtract", x, d), axes=(1,), keep=True)
    formula = derive(b.graph(b("subtract", b("subtract", x, c), low)))
    assert "softmax" not in formula.lines(0)[-1]
    at, cv, dv = RNG.normal(size=(4, 3)), RNG.normal(size=(4, 1)), RNG.normal(size=(4, 1))
    wanted = at - cv - np.log(np.exp(at - dv).sum(1, keepdims=True))
    np.testing.assert_allclose(formula.evaluate([at, cv, dv]).outputs[0], wanted, rtol=1e-12)


def test_the_modulus_of_a_sum_of_exponentials_is_the_sum():
    b = Builder()
    x = b.input("X", (4, 3))
    top = b("maximum", b.number(-np.inf), b("max", x, axes=(1,), keep=True))
    e = b("exp", b("subtract", x, b("stop", top)))
    low = b("log", b("abs", b("sum", e, axes=(1,), keep=True)))
    whole = derive(b.graph(b("sum", b("add", low, b("stop", top)))))
    assert whole.lines(1) == ["X̄ = L̄ softmaxⱼ(X)"]
    b = Builder()
    x = b.input("x", (3,))
    assert "|" in str(derive(b.graph(b("abs", b("subtract", b("exp", x), b.number(1.0))))))


@pytest.mark.parametrize(("mask", "line"), [(True, "y = exp(x)"), (False, "y = sin(x)")])
def test_a_constant_mask_selects_one_case(mask, line):
    b = Builder()
    x = b.input("x", (3,))
    whole = b.number(np.full(3, mask))
    assert derive(b.graph(b("where", whole, b("exp", x), b("sin", x)))).lines(0) == [line]
    part = b.number(np.array([mask, False, True]))
    chosen = derive(b.graph(b("where", part, b("exp", x), b("sin", x))))
    assert "if c; sin(x) otherwise" in chosen.lines(0)[-1]


def test_a_pattern_that_is_seen_as_complex_keeps_its_derivative():
    b = Builder()
    x = b.input("x", (3,))
    soft = b("log", b("add", b.number(1.0), b("exp", x)))
    seen = cast_to(soft, "complex")
    formula = derive(b.graph(b("real", b("exp", seen))))
    assert formula.lines(0) == ["y = Re(exp(softplus(x) + 0i))"]
    assert formula.lines(1)[-1] == "x̄ = ȳ ⊙ y ⊙ sigmoid(x)"
    value = np.array([0.1, 0.2, -0.3])
    np.testing.assert_allclose(formula.evaluate([value]).gradients[0], np.exp(value))
