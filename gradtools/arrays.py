"""What both wings' `arrays.py` share: NumPy's reading of what is to become an array, and seeds."""

from __future__ import annotations

import numbers
from typing import Any

import numpy as np

from gradtools.arguments.wording import with_article
from gradtools.errors import GradtoolsError


def is_plain(x: Any) -> bool:
    """Whether x is made of Python numbers alone, which have no dtype of their own."""
    if isinstance(x, (list, tuple)):
        return all(is_plain(item) for item in x)
    return isinstance(x, (bool, int, float, complex)) and not isinstance(x, np.generic)


def as_numpy(x: Any, framework: str, caller: str = "asarray") -> np.ndarray:
    """What NumPy reads x as, refused where that holds no numbers."""
    try:
        array = np.asarray(x)
    except Exception as error:
        kind = with_article(type(x).__name__)
        raise GradtoolsError(f"{caller}: {kind} is no array: {error}") from error
    if array.dtype.kind in "OSUMmT":
        kind = with_article(type(x).__name__)
        raise GradtoolsError(
            f"{caller}: {kind} (NumPy reads it as {array.dtype} of shape {array.shape}) holds no "
            f"numbers that {framework} could take. Give one array of numbers (for a tree of "
            f"arrays, call {caller} on each leaf)."
        )
    return array


def as_seed(seed: Any) -> int:
    """A seed of 64 bits as a Python integer, or an error."""
    if isinstance(seed, bool) or not isinstance(seed, numbers.Integral):
        shape = getattr(seed, "shape", None)
        came = repr(seed) if shape is None else f"an array of shape {tuple(shape)}"
        raise GradtoolsError(f"random_key: a seed is an integer, got {came}.")
    seed = int(seed)
    if not -(2**63) <= seed < 2**63:
        raise GradtoolsError(f"random_key: a seed fits into 64 bits with its sign, got {seed}.")
    return seed
