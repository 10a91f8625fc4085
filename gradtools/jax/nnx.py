"""Gradient reversal as a layer, for ``flax.nnx`` models.

Forward it is the identity, backward it multiplies by -scale: what is behind it ascends the loss
that what is before it descends (Ganin and Lempitsky, ICML 2015, arXiv:1409.7495).
"""

from collections.abc import Callable
from typing import Any

from flax import nnx

import gradtools.jax as gt


class GradientReversal(nnx.Module):
    """The identity, with the gradient times ``-scale``.

    Args:
        scale: A real number; it is no parameter. For a schedule under jit give it at the call.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from gradtools.jax.nnx import GradientReversal
        >>> layer = GradientReversal(scale=0.5)
        >>> jax.grad(lambda x: layer(x).sum())(jnp.ones(2))
        Array([-0.5, -0.5], dtype=float32)
    """

    def __init__(self, scale: float = 1.0) -> None:
        self.scale = scale

    def __call__(self, x: Any, scale: Any = None) -> Any:
        """x itself (an array or a pytree). ``scale``, if given, replaces the layer's own."""
        return gt.reverse_gradient(x, self.scale if scale is None else scale)


class Transformed(nnx.Module):
    """A module with another call, which `make` makes of the module."""

    def __init__(self, module: Any, make: Callable[[Any], Callable[..., Any]]) -> None:
        self.module, self.make = module, make

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.make(self.module)(*args, **kwargs)
