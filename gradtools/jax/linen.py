"""Gradient reversal as a layer, for ``flax.linen`` models.

Forward it is the identity, backward it multiplies by -scale: what is behind it ascends the loss
that what is before it descends (Ganin and Lempitsky, ICML 2015, arXiv:1409.7495).
"""

from typing import Any

from flax import linen

import gradtools.jax as gt


class GradientReversal(linen.Module):
    """The identity, with the gradient times ``-scale``.

    Attributes:
        scale: A real number; it is no parameter. For a schedule under jit give it at the call.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from gradtools.jax.linen import GradientReversal
        >>> layer = GradientReversal(scale=0.5)
        >>> jax.grad(lambda x: layer.apply({}, x).sum())(jnp.ones(2))
        Array([-0.5, -0.5], dtype=float32)
    """

    scale: float = 1.0

    def __call__(self, x: Any, scale: Any = None) -> Any:
        """x itself (an array or a pytree). ``scale``, if given, replaces the layer's own."""
        return gt.reverse_gradient(x, self.scale if scale is None else scale)
