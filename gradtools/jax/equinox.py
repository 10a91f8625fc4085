"""Gradient reversal as a layer, for ``equinox`` models.

Forward it is the identity, backward it multiplies by -scale: what is behind it ascends the loss
that what is before it descends (Ganin and Lempitsky, ICML 2015, arXiv:1409.7495).
"""

from collections.abc import Callable
from typing import Any

import equinox as eqx

import gradtools.jax as gt


class GradientReversal(eqx.Module):
    """The identity, with the gradient times ``-scale``.

    Attributes:
        scale: A real number; it is static, no leaf and no parameter. For a schedule under jit
            give it at the call.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from gradtools.jax.equinox import GradientReversal
        >>> layer = GradientReversal(scale=0.5)
        >>> jax.grad(lambda x: layer(x).sum())(jnp.ones(2))
        Array([-0.5, -0.5], dtype=float32)
    """

    scale: float = eqx.field(static=True, default=1.0)

    def __call__(self, x: Any, scale: Any = None, *, key: Any = None) -> Any:
        """x itself (an array or a pytree). ``scale``, if given, replaces the layer's own.

        ``key`` is not used; ``eqx.nn.Sequential`` gives one to every layer.
        """
        return gt.reverse_gradient(x, self.scale if scale is None else scale)


class Transformed(eqx.Module):
    """A module with another call, which `make` makes of the module.

    It can be jitted as a function can: it is equal to itself alone.
    """

    module: Any
    make: Callable[[Any], Callable[..., Any]] = eqx.field(static=True)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.make(self.module)(*args, **kwargs)

    def __hash__(self) -> int:
        return id(self)

    def __eq__(self, other: object) -> bool:
        return self is other
