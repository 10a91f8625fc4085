"""Converts a JAX module to a pure function of its parameters and state.

flax.linen, flax.nnx and equinox separate modules from arrays in different ways. This module
converts modules of all libraries to ``apply(params, state, *args, key=None) -> (out, new_state)``.
Only libraries that the program has imported are considered, since modules of other libraries cannot
exist. ``gradtools.models`` documents the public name.
"""

import inspect
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import jax

from gradtools.arguments.checks import note_of_apply
from gradtools.arguments.wording import type_in_words
from gradtools.errors import GradtoolsError
from gradtools.integrations import integration
from gradtools.jax import trees
from gradtools.jax.arrays import check_key

Apply = Callable[..., tuple[Any, Any]]
MODES = {
    "train": True,
    "training": True,
    "is_training": True,
    "deterministic": False,
    "use_running_average": False,
}  # values of the keywords in training mode


def make_functional(
    module: Any,
    *,
    variables: Any = None,
    train: bool | None = None,
    rng_names: tuple[str, ...] = ("dropout",),
) -> tuple[Apply, Any, Any]:
    """Splits a module into ``(apply, params, state)``. See ``gradtools.models``."""
    for library in ("flax.linen", "flax.nnx", "equinox"):
        loaded = sys.modules.get(library)
        if loaded is not None and isinstance(module, loaded.Module):
            apply, params, state = integration(library).make_functional(
                module, variables, train, rng_names
            )
            return partial(_applied, apply), params, state
    keras = integration("keras")
    if keras is not None and keras.is_keras(module):
        backend = keras.KerasBackend("jax", lambda x: x, lambda x: x, _keras_seeds)
        apply, params, state = keras.make_functional(module, variables, train, backend)
        return partial(_applied, apply), params, state
    raise GradtoolsError(
        f"make_functional: got {type_in_words(module)}; the JAX backend accepts a flax.linen, "
        "flax.nnx or equinox Module, or a Keras model. For a flax.linen module, also pass its "
        "variables: make_functional(module, variables=variables)."
    )


def _applied(apply: Apply, /, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
    trees.flatten((args, kwargs))  # rejects PyTorch tensors, which a library would convert
    try:
        return apply(*args, **kwargs)
    except TypeError as error:
        note_of_apply(error)
        raise


def _keras_seeds(key: jax.Array, count: int) -> list[jax.Array]:
    return [jax.random.bits(k, (2,), "uint32") for k in keys(key, count)]


# --- shared by the integrations


def mode_of(name: str, call: Callable[..., Any], train: bool | None) -> dict[str, bool]:
    """Returns the keyword arguments of `call` that set training or evaluation mode."""
    if train is None:
        return {}
    names = inspect.signature(call).parameters
    mode = {name: train == sense for name, sense in MODES.items() if name in names}
    if not mode:
        raise GradtoolsError(
            f"make_functional: {name} has none of the arguments "
            f"{', '.join(MODES)}, so train={train} cannot be passed on. Leave train=None and "
            "pass apply the keyword that your module accepts."
        )
    return mode


def fresh(tree: Any) -> Any:
    """Copies the tree's containers, but not the arrays."""
    return jax.tree.map(lambda leaf: leaf, tree)


def keys(key: jax.Array, count: int) -> list[jax.Array]:
    check_key("apply", key)
    return list(jax.random.split(key, max(count, 1)))[:count]


def no_key(error: Exception, advice: str = "pass key= to apply") -> GradtoolsError:
    return GradtoolsError(f"apply: the module needs randomness; {advice}. ({error})")
