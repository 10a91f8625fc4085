"""What automatic differentiation does, made visible: why a gradient is zero, what a call costs.

One form for both frameworks, the `Graph` of `graph.py`, is filled by each wing's ``seeing``.
Everything here is read from it: how outputs depend on inputs (`derivative_flow.py`), where a
gradient is lost and how to mend it (`diagnosis.py`).
"""
