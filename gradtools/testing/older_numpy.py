"""Array API names that NumPy before 2.1 lacks, for the scenarios of `gradtools check`."""

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
    "bitwise_invert": "invert",
    "concat": "concatenate",
    "cumulative_prod": "cumprod",
    "cumulative_sum": "cumsum",
    "permute_dims": "transpose",
    "pow": "power",
}


class OlderNumPy:
    """`numpy` with the names of the array API."""

    linalg = _Linalg()

    @staticmethod
    def matrix_transpose(x: Any) -> Any:
        """The last two axes exchanged."""
        return np.swapaxes(x, -1, -2)

    @staticmethod
    def vecdot(x: Any, y: Any, axis: int = -1) -> Any:
        """The sum of conj(x) y along an axis."""
        return np.sum(np.conj(x) * y, axis)

    def __getattr__(self, name: str) -> Any:
        return getattr(np, _NAMES.get(name, name))
