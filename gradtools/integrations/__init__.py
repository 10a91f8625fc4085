"""What gradtools knows of other libraries: one file each, opened once a program has imported it."""

from importlib import import_module
from sys import modules
from typing import Any

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
    return None if keras is None or not keras.is_keras(x) else keras.refusal(caller, name, x)


def integration(library: str) -> Any:
    """The file of a library; None while the program has not imported the library."""
    return import_module(f"{__name__}.{_FILES[library]}") if library in modules else None
