"""The formulas of a function in PyTorch and in JAX are equal strings.

Each function is written once, with ``gt.xp``.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

RNG = np.random.default_rng(8)


def real(*shape):
    """Return normal random numbers away from the kinks at 0, with no two entries equal."""
    x = RNG.normal(size=shape)
    return x + 0.1 * np.sign(x)


def positive(*shape):
    return RNG.uniform(0.5, 2.0, size=shape)


def cplx(*shape):
    return RNG.normal(size=shape) + 1j * RNG.normal(size=shape)


def definite(n):
    a = real(n, n)
    return a @ a.T + n * np.eye(n)


LABELS = np.array([2, 0, 1, 1])


@dataclass(frozen=True)
class Written:
    """A function of ``gt`` and arrays, and its arguments, for both backends."""

    f: Callable[..., Any]
    args: tuple[np.ndarray, ...]

    def formula(self, backend: str, order: int = 1) -> Any:
        gt = importlib.import_module(f"gradtools.{backend}")
        argnums = tuple(k for k, x in enumerate(self.args) if x.dtype.kind in "fc")
        names = self.f.__code__.co_varnames[1 : self.f.__code__.co_argcount]
        scope: dict[str, Any] = {"f": self.f, "gt": gt}
        called = eval(f"lambda {', '.join(names)}: f(gt, {', '.join(names)})", scope)
        return gt.formula(called, *map(gt.asarray, self.args), order=order, argnums=argnums)


def softmax(gt, z):
    e = gt.xp.exp(z - gt.xp.max(z, axis=-1, keepdims=True))
    return e / gt.xp.sum(e, axis=-1, keepdims=True)


def cross_entropy(gt, Z, y):
    shifted = Z - gt.xp.max(Z, axis=1, keepdims=True)
    logs = shifted - gt.xp.log(gt.xp.sum(gt.xp.exp(shifted), axis=1, keepdims=True))
    return -gt.xp.mean(gt.xp.take_along_axis(logs, y[:, None], axis=1))


def attention(gt, Q, K, V):
    return softmax(gt, Q @ gt.xp.matrix_transpose(K) / 2.0) @ V


def layer_norm(gt, X, gamma, beta):
    mean = gt.xp.mean(X, axis=-1, keepdims=True)
    variance = gt.xp.mean((X - mean) ** 2, axis=-1, keepdims=True)
    return (X - mean) / gt.xp.sqrt(variance + 1e-5) * gamma + beta


def perceptron(gt, X, W, b, v):
    return gt.xp.mean((gt.xp.tanh(X @ W + b) @ v) ** 2)


def in_parts(gt, W_re, W_im, I_re, I_im):
    return W_re @ I_re - W_im @ I_im, W_re @ I_im + W_im @ I_re


def ridge(gt, X, w, y):
    r = X @ w - y
    return gt.xp.sum(r * r) / 5 + 0.1 * gt.xp.sum(w * w)


def sigmoid(gt, x):
    return 1 / (1 + gt.xp.exp(-x))


def gru_cell(gt, x, h, W_z, W_n, U_z, U_n):
    z = sigmoid(gt, W_z @ x + U_z @ h)
    return (1 - z) * gt.xp.tanh(W_n @ x + U_n @ h) + z * h


def lstm_cell(gt, x, h, c, W, U):
    a = W @ x + U @ h
    k = h.shape[0]
    kept = sigmoid(gt, a[k : 2 * k]) * c + sigmoid(gt, a[:k]) * gt.xp.tanh(a[2 * k : 3 * k])
    return sigmoid(gt, a[3 * k :]) * gt.xp.tanh(kept), kept


def gaussian(gt, mu, s, x):
    return gt.xp.sum(gt.xp.log(s) + ((x - mu) / s) ** 2 / 2)


FUNCTIONS: dict[str, Written] = {
    "linear": Written(lambda gt, W, x, b: W @ x + b, (real(3, 4), real(4), real(3))),
    "hidden layer": Written(lambda gt, W, x: gt.xp.tanh(W @ x), (real(3, 4), real(4))),
    "layer": Written(
        lambda gt, X, W, b: X @ gt.xp.matrix_transpose(W) + b, (real(5, 4), real(3, 4), real(3))
    ),
    "perceptron": Written(perceptron, (real(5, 4), real(4, 3), real(3), real(3))),
    "ridge": Written(ridge, (real(5, 3), real(3), real(5))),
    "quadratic form": Written(lambda gt, A, x: x @ (A @ x) / 2, (real(4, 4), real(4))),
    "softmax": Written(lambda gt, z: softmax(gt, z), (real(4, 3),)),
    "cross entropy": Written(cross_entropy, (real(4, 3), LABELS)),
    "classifier": Written(
        lambda gt, X, W, b, y: cross_entropy(gt, X @ gt.xp.matrix_transpose(W) + b, y),
        (real(4, 5), real(3, 5), real(3), LABELS),
    ),
    "logsumexp": Written(
        lambda gt, x: gt.xp.log(gt.xp.sum(gt.xp.exp(x - gt.xp.max(x)))) + gt.xp.max(x), (real(4),)
    ),
    "complex affine": Written(lambda gt, W, I, b: W @ I + b, (cplx(3, 4), cplx(4), cplx(3))),
    "complex in parts": Written(in_parts, (real(3, 4), real(3, 4), real(4), real(4))),
    "modulus": Written(lambda gt, z: gt.xp.sum(gt.xp.abs(z) ** 2), (cplx(4),)),
    "conjugate": Written(lambda gt, z, w: gt.xp.conj(z) * w, (cplx(4), cplx(4))),
    "real part": Written(lambda gt, z: gt.xp.real(z * z), (cplx(4),)),
    "layer norm": Written(layer_norm, (real(5, 4), real(4), real(4))),
    "attention": Written(attention, (real(5, 4), real(5, 4), real(5, 4))),
    "where": Written(lambda gt, x: gt.xp.where(x > 0, gt.xp.exp(x), x * x), (real(5),)),
    "picked": Written(
        lambda gt, Z, y: gt.xp.sum(gt.xp.take_along_axis(Z, y[:, None], axis=1)),
        (real(4, 3), LABELS),
    ),
    "solve": Written(lambda gt, A, B: gt.xp.linalg.solve(A, B), (definite(3), real(3, 2))),
    "norm": Written(lambda gt, x: gt.xp.linalg.vector_norm(x), (real(4),)),
    "normalised": Written(lambda gt, x: x / gt.xp.sqrt(gt.xp.sum(x * x)), (real(4),)),
    "gru cell": Written(
        gru_cell,
        (real(4), real(3), real(3, 4), real(3, 4), real(3, 3), real(3, 3)),
    ),
    "lstm cell": Written(lstm_cell, (real(4), real(3), real(3), real(12, 4), real(12, 3))),
    "gaussian": Written(gaussian, (real(4), positive(4), real(4))),
    "reciprocal": Written(lambda gt, x, y: x / y, (real(4), positive(4))),
    "attention of a batch": Written(attention, (real(2, 5, 4), real(2, 5, 4), real(2, 5, 4))),
}

# Operations that a formula shows by name because they have no symbolic form.
BY_NAME = {
    "solve": ("solve",),
}


def lines(formula: Any) -> list[str]:
    """Return the lines of the formula without the line that reports the accuracy of its check."""
    return [line for line in str(formula).splitlines() if not line.startswith("agrees with")]


@pytest.fixture(scope="module")
def formulas() -> dict[str, tuple[Any, Any]]:
    """Return an empty cache, which maps function names to formulas in PyTorch and JAX."""
    return {}


def both(formulas: dict[str, tuple[Any, Any]], name: str) -> tuple[Any, Any]:
    if name not in formulas:
        formulas[name] = tuple(FUNCTIONS[name].formula(backend) for backend in ("torch", "jax"))
    return formulas[name]


@pytest.mark.sampled(4, 24)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_function_reads_alike_in_both_frameworks(name, formulas):
    of_torch, of_jax = both(formulas, name)
    assert (of_torch.marked, of_jax.marked) == (BY_NAME.get(name, ()),) * 2
    assert of_torch.check is not None and of_jax.check is not None
    assert lines(of_torch) == lines(of_jax)


# The adjoints of the programs, derived by hand.
TEXTBOOK = {
    "linear": ["W̄ = ȳ xᵀ", "x̄ = Wᵀ ȳ", "b̄ = ȳ"],
    "hidden layer": ["z̄ = ȳ ⊙ (1 - y²)", "W̄ = z̄ xᵀ", "x̄ = Wᵀ z̄"],
    "layer": ["X̄ = Ȳ W", "W̄ = Ȳᵀ X", "b̄ = Σᵢ Ȳ"],
    "perceptron": [
        "Z̄ = 2 L̄ v ⊙ z ⊙ (1 - H^∘²) / 5",
        "X̄ = Z̄ Wᵀ",
        "W̄ = Xᵀ Z̄",
        "b̄ = Σᵢ Z̄",
        "v̄ = 2 L̄ Hᵀ z / 5",
    ],
    "ridge": ["z̄ = 2 L̄ z / 5", "X̄ = z̄ wᵀ", "w̄ = L̄ w / 5 + Xᵀ z̄", "ȳ = -2 L̄ z / 5"],
    "quadratic form": ["Ā = L̄ x xᵀ / 2", "x̄ = L̄ (Aᵀ x + z) / 2"],
    "softmax": ["z̄ = Y ⊙ (Ȳ - Σⱼ (Ȳ ⊙ Y))"],
    "cross entropy": ["Z̄ = L̄ (softmaxⱼ(Z) - onehot(y)) / 4"],
    "classifier": [
        *("Z̄ = L̄ (softmaxⱼ(Z) - onehot(y)) / 4", "X̄ = Z̄ W", "W̄ = Z̄ᵀ X", "b̄ = Σᵢ Z̄"),
    ],
    "logsumexp": ["x̄ = L̄ softmax(x)"],
    "complex affine": ["W̄ = ȳ Iᴴ", "Ī = Wᴴ ȳ", "b̄ = ȳ"],
    "complex in parts": [
        "W̄ᵣₑ = ȳ₂ Iᵢₘᵀ + ȳ₁ Iᵣₑᵀ",
        "W̄ᵢₘ = ȳ₂ Iᵣₑᵀ - ȳ₁ Iᵢₘᵀ",
        "Īᵣₑ = Wᵢₘᵀ ȳ₂ + Wᵣₑᵀ ȳ₁",
        "Īᵢₘ = Wᵣₑᵀ ȳ₂ - Wᵢₘᵀ ȳ₁",
    ],
    "modulus": ["z̄ = 2 L̄ z"],
    "conjugate": ["z̄ = w ⊙ ȳ*", "w̄ = ȳ ⊙ z"],
    "real part": ["z̄ = 2 ȳ ⊙ z*"],
    "layer norm": [
        "N̄ = Ȳ ⊙ γ",
        "X̄ = (N̄ - N ⊙ meanᵢ(Ȳ ⊙ γ ⊙ N) - meanᵢ(N̄)) / √(varᵢ(X) + 1e-05)",
        "γ̄ = Σⱼ (Ȳ ⊙ N)",
        "β̄ = Σⱼ Ȳ",
    ],
    "attention": ["P̄ = Ȳ Vᵀ", "Z̄ = P ⊙ (P̄ - Σⱼ (P̄ ⊙ P)) / 2", "Q̄ = Z̄ K", "K̄ = Z̄ᵀ Q", "V̄ = Pᵀ Ȳ"],
    "where": ["x̄ = ȳ ⊙ (2 x ⊙ 1[x ≤ 0] + e ⊙ 1[x > 0])"],
    "picked": ["Z̄ = L̄ onehot(y)"],
    "solve": ["Ā = vjp₁[solve](A, B; Ȳ)", "B̄ = vjp₂[solve](A, B; Ȳ)"],
    "norm": ["x̄ = L̄ x / L"],
    "normalised": ["x̄ = ȳ / r - ⟨ȳ, x⟩ x / r³"],
    "gru cell": [
        "z̄₂ = ȳ ⊙ (1 - s) ⊙ (1 - h₁²)",
        "z̄₁ = ȳ ⊙ s ⊙ (1 - s) ⊙ (h - h₁)",
        "x̄ = Wₙᵀ z̄₂ + W_zᵀ z̄₁",
        "h̄ = ȳ ⊙ s + Uₙᵀ z̄₂ + U_zᵀ z̄₁",
        "W̄_z = z̄₁ xᵀ",
        "W̄ₙ = z̄₂ xᵀ",
        "Ū_z = z̄₁ hᵀ",
        "Ūₙ = z̄₂ hᵀ",
    ],
    "lstm cell": [
        "T₁ = ȳ₁ ⊙ s₁ ⊙ (1 - h₂²) + ȳ₂",
        "z̄ = into[6:9](s₃ ⊙ T₁ ⊙ (1 - h₁²)) + into[:3](s₃ ⊙ h₁ ⊙ T₁ ⊙ (1 - s₃))"
        " + into[3:6](c ⊙ s₂ ⊙ T₁ ⊙ (1 - s₂)) + into[9:](ȳ₁ ⊙ s₁ ⊙ h₂ ⊙ (1 - s₁))",
        "x̄ = Wᵀ z̄",
        "h̄ = Uᵀ z̄",
        "c̄ = s₂ ⊙ T₁",
        "W̄ = z̄ xᵀ",
        "Ū = z̄ hᵀ",
    ],
    "gaussian": ["μ̄ = -L̄ (x - μ) / s²", "s̄ = L̄ (1 / s - (x - μ)² / s³)", "x̄ = L̄ (x - μ) / s²"],
    "reciprocal": ["x̄ = f̄ / y", "ȳ = -f̄ ⊙ x / y²"],
    "attention of a batch": [
        "P̄ = Ȳ Vᵀ",
        "Z̄ = P ⊙ (P̄ - Σₖ (P̄ ⊙ P)) / 2",
        "Q̄ = Z̄ K",
        "K̄ = Z̄ᵀ Q",
        "V̄ = Pᵀ Ȳ",
    ],
}


@pytest.mark.parametrize("name", TEXTBOOK)
def test_the_rules_of_the_textbooks_stand_there_word_for_word(name, formulas):
    assert [f.lines(1) for f in both(formulas, name)] == [TEXTBOOK[name]] * 2


def test_a_name_is_defined_before_it_is_read(formulas):
    for name in FUNCTIONS:
        of_torch, _ = both(formulas, name)
        pairs = [line.split(" = ", 1) for line in of_torch.lines(0)]
        for k, (left, _) in enumerate(pairs):
            assert not any(left in re.findall(r"\w+", right) for _, right in pairs[:k]), name
        pairs += [line.split(" = ", 1) for line in of_torch.lines(1)]
        generated = [left for left, _ in pairs if re.fullmatch("T[₀-₉]*", left)]
        assert all(any(left in right for _, right in pairs) for left in generated), name


def test_separate_parts_are_put_together_to_the_same_rule(formulas):
    for found in both(formulas, "complex in parts"):
        assert found.lines(2) == ["W̄ = Ō Iᴴ", "Ī = Wᴴ Ō"]


PROGRAMS = {
    "layer": ["Y = X Wᵀ + b"],
    "perceptron": ["Z = X W + b", "H = tanh(Z)", "z = H v", "L = mean(z²)"],
    "cross entropy": ["L = -⟨Z - logsumexpⱼ(Z), onehot(y)⟩ / 4"],
    "classifier": ["Z = X Wᵀ + b", "L = -⟨Z - logsumexpⱼ(Z), onehot(y)⟩ / 4"],
    "ridge": ["z = X w - y", "L = mean(z²) + ‖w‖² / 10"],
    "layer norm": ["N = standardizeᵢ(X)", "Y = γ ⊙ N + β"],
    "attention": ["Z = Q Kᵀ", "P = softmaxⱼ(Z / 2)", "Y = P V"],
    "lstm cell": [
        *("z = W x + U h", "s₁ = sigmoid(z[9:])", "s₂ = sigmoid(z[3:6])", "s₃ = sigmoid(z[:3])"),
        *("h₁ = tanh(z[6:9])", "y₂ = c ⊙ s₂ + s₃ ⊙ h₁", "h₂ = tanh(y₂)", "y₁ = s₁ ⊙ h₂"),
    ],
    "gaussian": ["L = Σᵢ (log(s) + (x - μ)² / s² / 2)"],
    "where": ["e = exp(x)", "y = {e if x > 0; x² otherwise}"],
}
TWICE = {
    "hidden layer": [
        "T = W u_x + u_W x",
        "∂s/∂W = (ȳ ⊙ (1 - y²)) u_xᵀ - 2 (y ⊙ ȳ ⊙ (1 - y²) ⊙ T) xᵀ",
        "∂s/∂x = u_Wᵀ z̄ - 2 Wᵀ (y ⊙ ȳ ⊙ (1 - y²) ⊙ T)",
        "∂s/∂ȳ = T ⊙ (1 - y²)",
    ],
    "complex affine": [
        *("∂s/∂W = ȳ u_Iᴴ", "∂s/∂I = u_Wᴴ ȳ", "∂s/∂b = 0", "∂s/∂ȳ = W u_I + u_W I + u_b")
    ],
    "logsumexp": ["∂s/∂x = p ⊙ (L̄ u - L̄ ⟨p, u⟩)", "∂s/∂L̄ = ⟨p, u⟩"],
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_the_program_reads_as_one_would_write_it(name, formulas):
    assert [f.lines(0) for f in both(formulas, name)] == [PROGRAMS[name]] * 2


@pytest.mark.parametrize("name", TWICE)
def test_the_double_backward_reads_as_derived_by_hand(name):
    assert FUNCTIONS[name].formula("torch", 2).lines(2) == TWICE[name]


def test_what_only_looks_like_softmax_is_left():
    def f(gt, X):
        e = gt.xp.exp(X)
        return e / gt.xp.sum(e, axis=1)[None, :]

    assert "softmax" not in str(Written(f, (real(3, 3),)).formula("torch"))


@pytest.mark.slow_at("jax")
@pytest.mark.parametrize("backend", ["torch", "jax"])
def test_what_second_derivatives_are_of_shares_its_name_with_no_value(backend):
    loss = lambda gt, X, w: gt.xp.mean(gt.xp.log(1 + gt.xp.exp(X @ w)))
    found = str(Written(loss, (real(4, 6), real(6))).formula(backend, 2))
    assert "s₁ = sigmoid(" in found and "∂s/∂w = " in found
