"""Defines `asarray`, `to_numpy`, `xp`, `random_key` and `split_key`.

Conversions preserve the dtype of an array. Random functions take an explicit key. The backends'
``arrays.py`` implement the operators and call `as_numpy` and `as_seed`.
"""

from __future__ import annotations

import numbers
from typing import Any

import numpy as np

from gradtools.arguments.wording import shown, with_article
from gradtools.backend import Operators
from gradtools.errors import GradtoolsError

Array = Any


class ArraysAndKeys(Operators):
    """The operators on arrays and keys."""

    @property
    def xp(self) -> Any:
        """The backend's array-API namespace, for functions that run in both frameworks.

        The namespace is ``array_api_compat.torch`` (imported on first use) or ``jax.numpy``.

        Example:
            >>> gt.to_numpy(gt.xp.sum(gt.xp.ones((2, 3), dtype=gt.xp.float32), axis=0))
            array([2., 2., 2.], dtype=float32)
        """
        return self._backend.xp

    def asarray(self, x: Any) -> Array:
        """Converts x to an array of the framework, with the dtype of ``numpy.asarray(x)``.

        An array of the framework is returned unchanged; any other result does not share memory with
        x. Python numbers and lists of numbers get the framework's default dtype instead.

        Args:
            x: A NumPy array or scalar of any shape (including bfloat16 and float8 of ml_dtypes), a
                Python number, a nested list of these, or any object that ``numpy.asarray`` accepts.

        Returns:
            The array.

        Raises:
            GradtoolsError: The backend does not support the dtype: float64, int64 and complex128 in
                JAX without x64, and extended precision in both frameworks; or x cannot be converted
                to an array of numbers.

        Example:
            >>> gt.to_numpy(gt.asarray(np.array([1, 2], np.int16)))
            array([1, 2], dtype=int16)
        """
        return self._backend.asarray(x)

    def to_numpy(self, x: Array) -> np.ndarray:
        """Copies the values of an array to a NumPy array; the gradient is stopped.

        Args:
            x: An array of the backend, of any shape, dtype and device.

        Returns:
            A writable ``numpy.ndarray`` of the same shape and dtype. The dtypes bfloat16 and float8
            are defined by the package ml_dtypes; without this package (possible only in PyTorch),
            the result has dtype float32.

        Raises:
            GradtoolsError: x is traced or mapped (inside the framework's jit, vmap or grad), so it
                has no values.

        Example:
            >>> gt.to_numpy(gt.asarray(np.ones(2, np.float32)) * 3)
            array([3., 3.], dtype=float32)
        """
        return self._backend.to_numpy(x)

    def random_key(self, seed: int) -> Array:
        """Makes a random key from a seed.

        Args:
            seed: A signed 64-bit integer; in JAX without x64 a 32-bit integer.

        Returns:
            In JAX, a typed key; in PyTorch, an int64 tensor of shape (2,). The two frameworks draw
            different numbers from the same seed.

        Raises:
            GradtoolsError: The seed is not an integer, or does not fit into the allowed number of
                bits.

        Example:
            >>> a, b = gt.random_key(0), gt.random_key(0)
            >>> bool((gt.to_numpy(a) == gt.to_numpy(b)).all())
            True
        """
        return self._backend.random_key(seed)

    def split_key(self, key: Array, n: int = 2) -> Array:
        """Splits a key into independent keys; the original key must not be used again.

        In PyTorch child i is a hash of the key and i (splitmix64), so it does not depend on n.

        Args:
            key: A single key, from `random_key` or `split_key`.
            n: The number of keys.

        Returns:
            An array of n keys along axis 0, which can be unpacked and mapped by vmap.

        Raises:
            GradtoolsError: ``key`` is not one key, or n is not a positive integer.

        Example:
            >>> first, second, third = gt.split_key(gt.random_key(0), 3)
            >>> bool((gt.to_numpy(first) == gt.to_numpy(second)).all())
            False

        Source: Steele, Lea and Flood, Fast splittable pseudorandom number generators, 2014.
        """
        return self._backend.split_key(key, n)


def is_plain(x: Any) -> bool:
    """Returns whether x is a Python number, or a list or tuple of Python numbers."""
    if isinstance(x, (list, tuple)):
        return all(is_plain(item) for item in x)
    return isinstance(x, (bool, int, float, complex)) and not isinstance(x, np.generic)


def as_numpy(x: Any, caller: str = "asarray") -> np.ndarray:
    """Calls `numpy.asarray(x)`; raises an error if the result is not numeric."""
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
    """Converts a seed to a Python integer; raises an error if it does not fit into 64 bits."""
    if isinstance(seed, bool) or not isinstance(seed, numbers.Integral):
        raise GradtoolsError(f"random_key: seed must be an integer, got {shown(seed)}.")
    seed = int(seed)
    if not -(2**63) <= seed < 2**63:
        raise GradtoolsError(f"random_key: seed must fit into a signed 64-bit integer, got {seed}.")
    return seed
