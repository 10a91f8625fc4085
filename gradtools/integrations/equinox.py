"""Supports equinox: the layer GradientReversal, transformed modules, and pure functions.

The layer is the identity in the forward pass and multiplies the cotangent by -scale in the backward
pass (Ganin and Lempitsky, ICML 2015, arXiv:1409.7495). The layers before GradientReversal maximize
the loss that the layers after it minimize.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import equinox as eqx
import jax

import gradtools.jax as gt
from gradtools.arguments.checks import check_kind
from gradtools.arguments.wording import with_article
from gradtools.edits import check_reversal
from gradtools.errors import GradtoolsError
from gradtools.jax.arrays import check_key
from gradtools.jax.known_errors import NEEDS_KEY, says
from gradtools.jax.modules import fresh, no_key


class GradientReversal(eqx.Module):
    """A layer that returns its input and multiplies the gradient by ``-scale``.

    Attributes:
        scale: A real number; it is static, not a leaf or a parameter. For a schedule under jit,
            pass ``scale`` in the call.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from gradtools.jax.equinox import GradientReversal
        >>> layer = GradientReversal(scale=0.5)
        >>> jax.grad(lambda x: layer(x).sum())(jnp.ones(2))
        Array([-0.5, -0.5], dtype=float32)
    """

    scale: float = eqx.field(static=True, default=1.0)

    def __check_init__(self) -> None:
        check_reversal("GradientReversal", self.scale)

    def __call__(self, x: Any, scale: Any = None, *, key: Any = None) -> Any:
        """Returns x (an array or a pytree). ``scale``, if given, replaces the layer's scale.

        ``key`` is unused; equinox's Sequential passes a key to each layer.
        """
        return gt.reverse_gradient(x, self.scale if scale is None else scale)


class Transformed(eqx.Module):
    """A module whose ``__call__`` calls the function `make(module)`.

    Instances are compared by identity, so the module can be jitted like a function.
    """

    module: Any
    make: Callable[[Any], Callable[..., Any]] = eqx.field(static=True, repr=False)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the function `make(module)` with the given arguments."""
        return self.make(self.module)(*args, **kwargs)

    @property
    def __signature__(self) -> inspect.Signature:  # `in_axes` names the module's parameters
        return inspect.signature(self.module)

    def __hash__(self) -> int:
        return id(self)

    def __eq__(self, other: object) -> bool:
        return self is other


def make_functional(
    module: Any, variables: Any, train: bool | None, rng_names: tuple[str, ...]
) -> tuple:
    """Returns ``(apply, params, state)``; params is the module with only its inexact arrays."""
    if variables is not None and not isinstance(variables, eqx.nn.State):
        raise GradtoolsError(
            "make_functional: for an equinox module variables is the eqx.nn.State of "
            f"eqx.nn.make_with_state, or None; got a {type(variables).__name__}."
        )
    if train is not None:
        module = eqx.nn.inference_mode(module, value=not train)
    params, static = eqx.partition(module, eqx.is_inexact_array)
    stateful = variables is not None
    parameters = inspect.signature(module.__call__).parameters
    takes_key = any(n == "key" or p.kind is p.VAR_KEYWORD for n, p in parameters.items())

    has_arrays = bool(jax.tree.leaves(params))
    bound = partial(apply, static, has_arrays, stateful, takes_key)
    return bound, params, variables if stateful else {}


def apply(
    static: Any,
    has_arrays: bool,
    stateful: bool,
    takes_key: bool,
    /,
    params: Any,
    state: Any,
    *args: Any,
    key: jax.Array | None = None,
    **kwargs: Any,
) -> tuple[Any, Any]:
    """Returns the module's output and its new state."""
    _check_call(static, has_arrays, stateful, params, state)
    if key is not None:
        check_key("apply", key)
    if takes_key:
        kwargs = {"key": key, **kwargs}
    model = eqx.combine(params, static)
    # equinox invalidates a State that is written to, so a copy is passed
    given = (*args, fresh(state)) if stateful else args
    try:
        out = model(*given, **kwargs)
    except RuntimeError as error:
        if kwargs.get("key", True) is None and says(error, NEEDS_KEY, package="equinox"):
            raise no_key(error) from error
        raise
    return out if stateful else (out, state)


def _check_call(static: Any, has_arrays: bool, stateful: bool, params: Any, state: Any) -> None:
    """Checks the classes of params and state; without an `eqx.nn.State`, state is unused."""
    kind = type(static)
    if params is not None or has_arrays:
        check_kind("params", params, kind, with_article(kind.__name__))
    if stateful:
        check_kind("state", state, eqx.nn.State, "an eqx.nn.State")
    else:
        accepted = Mapping, tuple, list, eqx.nn.State, type(None)
        check_kind("state", state, accepted, "an empty dictionary")
