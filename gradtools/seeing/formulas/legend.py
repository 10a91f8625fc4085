"""The legend of names that `recognition` gives, in text and in LaTeX.

A function that reads ``log(1 + exp(x))`` is written softplus(x), and differentiated as such; where
that would change values it is written as it was computed.
"""

from __future__ import annotations

from gradtools.seeing.formulas.typesetting import Written

_TABLE = r"""
softplus       | softplus(x) := log(1 + e^x)     | \operatorname{softplus}(x) := \log(1 + e^{x})
sigmoid        | sigmoid(x) := 1 / (1 + e^(-x))  | \operatorname{sigmoid}(x) := 1 / (1 + e^{-x})
relu           | relu(x) := max(x, 0)            | \operatorname{relu}(x) := \max(x, 0)
normal_cdf     | Φ(x) := (1 + erf(x / √2)) / 2   | \Phi(x) := (1 + \operatorname{erf}(x / \sqrt{2})) / 2
normal_density | φ(x) := e^(-x² / 2) / √(2π)     | \varphi(x) := e^{-x^{2} / 2} / \sqrt{2 \pi}
softmax        | softmaxᵢ(x) := e^x / Σᵢ e^x     | \operatorname{softmax}_{i}(x) := e^{x} / \sum_{i} e^{x}
log_softmax    | log softmaxᵢ(x) := x - log Σᵢ e^x | \log\operatorname{softmax}_{i}(x) := x - \log \sum_{i} e^{x}
logsumexp      | logsumexpᵢ(x) := log Σᵢ e^x     | \operatorname{logsumexp}_{i}(x) := \log \sum_{i} e^{x}
variance       | varᵢ(x) := meanᵢ |x - meanᵢ x|² | \operatorname{var}_{i}(x) := \operatorname{mean}_{i} |x - \operatorname{mean}_{i} x|^{2}
"""  # noqa: E501 (a table)

DEFINITIONS = {
    op: Written(text, latex)
    for op, text, latex in (
        [cell.strip() for cell in row.split(" | ")] for row in _TABLE.strip().splitlines()
    )
}
