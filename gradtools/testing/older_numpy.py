"""The array API names of the scenarios that NumPy before 2.1 lacks, for `gradtools check`."""

from __future__ import annotations

from typing import Any

import numpy as np


class _Linalg:
    """`numpy.linalg` with the names of the array API."""

    @staticmethod
    def vector_norm(x: Any) -> Any:
        return np.linalg.norm(np.ravel(x))

    @staticmethod
    def svdvals(x: Any) -> Any:
        return np.linalg.svd(x, compute_uv=False)

    @staticmethod
    def trace(x: Any) -> Any:
        return np.trace(x, axis1=-2, axis2=-1)

    def __getattr__(self, name: str) -> Any:
        return getattr(np.linalg, name)


_NAMES = {
    **{f"a{name}": f"arc{name}" for name in "cos cosh sin sinh tan tan2 tanh".split()},
    "concat": "concatenate",
    "cumulative_sum": "cumsum",
}


class OlderNumPy:
    """`numpy` with the names of the array API."""

    linalg = _Linalg()

    def __getattr__(self, name: str) -> Any:
        return getattr(np, _NAMES.get(name, name))
