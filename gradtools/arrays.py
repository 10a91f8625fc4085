"""Conversions that both backends' `arrays.py` share: to NumPy arrays, and of seeds."""

from __future__ import annotations

import numbers
from typing import Any

import numpy as np

from gradtools.arguments.wording import with_article
from gradtools.errors import GradtoolsError


def is_plain(x: Any) -> bool:
    """Whether x consists of Python numbers, which are weakly typed."""
    if isinstance(x, (list, tuple)):
        return all(is_plain(item) for item in x)
    return isinstance(x, (bool, int, float, complex)) and not isinstance(x, np.generic)


def as_numpy(x: Any, caller: str = "asarray") -> np.ndarray:
    """`numpy.asarray(x)`, or an error if that does not hold numbers."""
    try:
        array = np.asarray(x)
    except Exception as error:
        kind = with_article(type(x).__name__)
        raise GradtoolsError(
            f"{caller}: {kind} cannot be converted to an array: {error}"
        ) from error
    if array.dtype.kind in "OSUMmT":
        kind = with_article(type(x).__name__)
        raise GradtoolsError(
            f"{caller}: {kind} cannot be converted to an array of numbers (NumPy reads it as dtype "
            f"{array.dtype} and shape {array.shape}). For a pytree call {caller} on each leaf."
        )
    return array


def as_seed(seed: Any) -> int:
    """A seed of 64 bits as a Python integer, or an error."""
    if isinstance(seed, bool) or not isinstance(seed, numbers.Integral):
        shape = getattr(seed, "shape", None)
        came = repr(seed) if shape is None else f"an array of shape {tuple(shape)}"
        raise GradtoolsError(f"random_key: seed must be an integer, got {came}.")
    seed = int(seed)
    if not -(2**63) <= seed < 2**63:
        raise GradtoolsError(f"random_key: seed must fit into a signed 64-bit integer, got {seed}.")
    return seed
