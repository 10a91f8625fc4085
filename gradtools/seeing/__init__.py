"""Inspects automatic differentiation: finds lost gradients, draws graphs and writes formulas.

`torch/` and `jax/` record PyTorch and JAX programs as a `Graph` (`graphs/gradient_graphs.py`),
which has one format for both frameworks. Analyses of the graph compute how outputs depend on inputs
(`graphs/derivative_flow.py`) and where a gradient is lost (`diagnostics/diagnosis.py`).
"""
