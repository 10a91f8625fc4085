"""What automatic differentiation does, made visible: why a gradient is zero, what a call costs.

One form for both frameworks, the `Graph` of `graphs/gradient_graphs.py`, is filled by `torch/` and
`jax/`. Everything here is read from it: how outputs depend on inputs (`graphs/derivative_flow.py`),
where a gradient is lost (`graphs/lost_terms.py`) and how to fix it (`diagnostics/diagnosis.py`).
"""
