"""What gradtools knows of other libraries: one file each, opened once a program has imported it."""

from importlib import import_module
from sys import modules
from typing import Any

from gradtools.errors import GradtoolsError

_FILES = {
    "equinox": "equinox",
    "flax.linen": "linen",
    "flax.nnx": "nnx",
    "haiku": "haiku",
    "keras": "keras",
}


def refusal(caller: str, name: str, x: Any) -> Exception | None:
    """What a library says of an object of its own that was given in the place of arrays."""
    keras = integration("keras")
    if keras is not None and keras.is_keras(x):
        return keras.refusal(caller, name, x)
    linen = modules.get("flax.linen")
    if linen is not None and isinstance(x, linen.Module):
        return GradtoolsError(
            f"{caller}: {name} is the flax.linen module {type(x).__name__}, which holds no arrays; "
            "its parameters are what module.init(key, *args) returned. Differentiate these: give "
            "them an argument of their own, named by argnums, and let f close over the module."
        )
    return None


def integration(library: str) -> Any:
    """The file of a library; None while the program has not imported the library."""
    return import_module(f"{__name__}.{_FILES[library]}") if library in modules else None
