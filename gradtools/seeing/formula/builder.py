"""A small NumPy-like way to write a `Graph`: what a wing may use, and what the tests use.

Each method is an operation of the vocabulary (`operations.py`); it adds a node and returns the
number of its result, or a tuple of numbers::

    b = Builder()
    w, x = b.input("W", (3, 4)), b.input("x", (4,))
    y = b("matmul", w, x)
    graph = b.graph(y)

Numbers given as operands become nodes ``constant``. The shape and the dtype of each result come
from evaluating the node on samples, so the builder is for writing, not for speed.
"""

from __future__ import annotations
