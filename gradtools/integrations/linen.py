"""Supports flax.linen: the layer GradientReversal, and conversion of modules to pure functions.

The layer is the identity in the forward pass and multiplies the cotangent by -scale in the backward
pass (Ganin and Lempitsky, ICML 2015, arXiv:1409.7495). The layers before GradientReversal maximize
the loss that the layers after it minimize.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import jax
from flax import linen
from flax.errors import (
    ApplyScopeInvalidVariablesTypeError,
    InvalidRngError,
    ScopeCollectionNotFound,
)

import gradtools.jax as gt
from gradtools.arguments.checks import check_kind, wrong_names
from gradtools.edits import check_reversal
from gradtools.errors import GradtoolsError
from gradtools.jax.modules import keys, mode_of, no_key


class GradientReversal(linen.Module):
    """A layer that returns its input and multiplies the gradient by ``-scale``.

    Attributes:
        scale: A real number; it is not a parameter. For a schedule under jit, pass ``scale`` in the
            call.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from gradtools.jax.linen import GradientReversal
        >>> layer = GradientReversal(scale=0.5)
        >>> jax.grad(lambda x: layer.apply({}, x).sum())(jnp.ones(2))
        Array([-0.5, -0.5], dtype=float32)
    """

    scale: float = 1.0

    def __post_init__(self) -> None:
        check_reversal("GradientReversal", self.scale)
        super().__post_init__()

    def __call__(self, x: Any, scale: Any = None) -> Any:
        """Returns x (an array or a pytree). ``scale``, if given, replaces the layer's scale."""
        return gt.reverse_gradient(x, self.scale if scale is None else scale)


def make_functional(
    module: linen.Module, variables: Any, train: bool | None, rng_names: tuple[str, ...]
) -> tuple:
    """Returns ``(apply, params, state)``; state contains all collections except the parameters."""
    if variables is None:
        raise GradtoolsError(
            "make_functional: a flax.linen module does not contain its arrays; pass "
            "variables=module.init(key, *args)."
        )
    params = variables.get("params", {})
    state = {name: tree for name, tree in variables.items() if name != "params"}
    mode = mode_of(f"{type(module).__name__}.__call__", type(module).__call__, train)

    names = tuple(params) if isinstance(params, Mapping) else ()
    return partial(apply, module, mode, rng_names, names), params, state


def apply(
    module: Any,
    mode: dict[str, bool],
    rng_names: tuple[str, ...],
    names: tuple[str, ...],
    /,
    params: Any,
    state: Any,
    *args: Any,
    key: jax.Array | None = None,
    **kwargs: Any,
) -> tuple[Any, Any]:
    """Returns the module's output and its new state."""
    _check_call(names, params, state)
    rngs = None
    if key is not None:
        rngs = dict(zip(rng_names, keys(key, len(rng_names)), strict=True))
    call = {"rngs": rngs, "mutable": list(state), **mode, **kwargs}
    try:
        out, updates = module.apply({"params": params, **state}, *args, **call)
    except InvalidRngError as error:
        advice = "pass key= to apply"
        if call["rngs"] is not None:
            advice = f"name the stream in make_functional's rng_names, which are {rng_names}"
        raise no_key(error, advice) from error
    except (ScopeCollectionNotFound, ApplyScopeInvalidVariablesTypeError) as error:
        if not params:
            error.add_note(
                "make_functional: variables has no collection 'params'; pass the whole result of "
                "module.init(key, *args)."
            )
        raise
    return out, {**state, **updates}


def _check_call(names: tuple[str, ...], params: Any, state: Any) -> None:
    """Raises an error if params and state are not dictionaries, or are swapped.

    Other names are accepted, since a method of the module may read other parameters and
    collections.
    """
    check_kind("params", params, Mapping, "a dictionary from names to arrays")
    check_kind("state", state, Mapping, "a dictionary from collections to variables")
    if state and set(state) <= set(names) and not any(name in params for name in names):
        raise wrong_names("params", list(names), list(params))
