"""Inspection of automatic differentiation: lost gradients, graphs, formulas, costs of a call.

`torch/` and `jax/` record programs as a `Graph` (`graphs/gradient_graphs.py`), the same for both
frameworks. Analyses read it: how outputs depend on inputs (`graphs/derivative_flow.py`), where a
gradient is lost and how to fix it (`diagnostics/diagnosis.py`).
"""
