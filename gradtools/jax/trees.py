"""Pytrees and dtypes in JAX, as the waist speaks of them."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp


def is_inexact(x: Any) -> bool:
    """Whether x has a floating or complex dtype."""
    return jnp.issubdtype(x.dtype, jnp.inexact)


def conj(x: Any) -> Any:
    """The complex conjugate; a real array as it is."""
    return jnp.conj(x) if jnp.issubdtype(x.dtype, jnp.complexfloating) else x
