"""Integrations with other libraries; each module is imported once a program uses its library."""

from importlib import import_module
from sys import modules
from typing import Any


def refusal(caller: str, name: str, x: Any) -> Exception | None:
    """An error with advice, if x is a Keras model that was passed in place of arrays."""
    keras = integration("keras")
    return keras.refusal(caller, name, x) if keras is not None and keras.is_keras(x) else None


def integration(library: str) -> Any:
    """The integration module of a library; None if the program has not imported the library."""
    name = library.removeprefix("flax.")
    return import_module(f"{__name__}.{name}") if library in modules else None
