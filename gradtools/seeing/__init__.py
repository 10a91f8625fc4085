"""Inspection of automatic differentiation: lost gradients, graphs, formulas.

`torch/` and `jax/` record programs as a `Graph` (`graphs/gradient_graphs.py`), common to both
frameworks. Analyses compute how outputs depend on inputs (`graphs/derivative_flow.py`), where a
gradient is lost and how to fix it (`diagnostics/diagnosis.py`).
"""
