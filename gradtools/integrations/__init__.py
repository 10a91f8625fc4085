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


def integration(library: str) -> Any:
    """The file of a library; None while the program has not imported the library."""
    return import_module(f"{__name__}.{_FILES[library]}") if library in modules else None
