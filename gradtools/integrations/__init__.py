"""Supports other libraries; each module is imported when a program uses its library."""

from importlib import import_module
from sys import modules
from typing import Any

from gradtools.errors import GradtoolsError


def refusal(caller: str, name: str, x: Any) -> Exception | None:
    """Returns an error if x is a Keras or flax.linen model, and None otherwise."""
    keras = integration("keras")
    if keras is not None and keras.is_keras(x):
        return keras.refusal(caller, name, x)
    linen = modules.get("flax.linen")
    if linen is not None and isinstance(x, linen.Module):
        return GradtoolsError(
            f"{caller}: {name} is the flax.linen module {type(x).__name__}, which contains no "
            "arrays; its parameters are the result of module.init(key, *args). Pass the parameters "
            "as a differentiated argument, and let f close over the module."
        )
    return None


def kind_of_module(x: Any) -> tuple[str, str] | None:
    """Returns the framework and library of a module or module class, or None if x is neither."""
    for wing, library in (("torch", "torch.nn"), ("jax", "flax.nnx"), ("jax", "equinox")):
        kind = getattr(modules.get(library), "Module", ())
        if isinstance(x, kind) or (isinstance(x, type) and issubclass(x, kind)):
            return wing, library
    return None


def integration(library: str) -> Any:
    """Returns a library's integration module, or None if the program has not imported it."""
    name = library.removeprefix("flax.")
    return import_module(f"{__name__}.{name}") if library in modules else None
