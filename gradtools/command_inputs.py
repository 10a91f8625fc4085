"""The functions and arrays that a command line names, for all commands.

A program is ``package.module:name``, imported from the working directory. Arrays are read from a
file or drawn at random by shape. `CommandInputs` converts them to the program's framework: by
default the one that its module imports.
"""

from __future__ import annotations

import argparse
import inspect
import os
import re
import sys
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from types import ModuleType
from typing import Any

import numpy as np

import gradtools
from gradtools.arguments.wording import with_article
from gradtools.code_origin import place_of
from gradtools.errors import GradtoolsError

_BACKENDS = ("torch", "jax")
_OF_JAX = ("jax", "jaxlib", "flax", "equinox", "optax")


@dataclass(frozen=True)
class CommandInputs:
    """The function and arguments of a command.

    Attributes:
        f: The function.
        args: Its arguments, arrays of the framework.
        gt: The namespace, `gradtools.torch` or `gradtools.jax`.
    """

    f: Callable[..., Any]
    args: tuple[Any, ...]
    gt: ModuleType

    @classmethod
    def of(cls, options: argparse.Namespace) -> CommandInputs:
        """The function ``options.function`` at ``options.args`` or ``options.shapes``.

        Random arrays are float32 by default.
        """
        f = named(options.function)
        if not callable(f):
            raise GradtoolsError(
                f"{options.function} is {with_article(type(f).__name__)}; expected a function or "
                "a module."
            )
        backend = options.backend or _framework_of(f, options.function)
        if backend not in gradtools.available_backends():
            raise GradtoolsError(
                f'{backend} is not installed. Fix: pip install "gradtools[{backend}]"'
            )
        gt = import_module(f"gradtools.{backend}")
        arrays = arrays_given(options.args, options.shapes, options.seed, "float32")
        _check_count(f, options.function, arrays)
        return cls(f, tuple(gt.asarray(x) for x in arrays), gt)


# --- programs ----------------------------------------------------------------------------


def named(path: str) -> Any:
    """The object that ``package.module:name`` names."""
    module, _, name = path.partition(":")
    if not module or not name:
        raise GradtoolsError(f"{path!r} names no program; write package.module:name.")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        value = import_module(module)
    except ImportError as error:
        raise GradtoolsError(f"{path}: the module {module} cannot be imported: {error}") from error
    except Exception as error:  # what the module's own code raises
        said = f"{type(error).__name__}: {str(error).rstrip('.')}{place_of(error)}"
        raise GradtoolsError(f"{path}: importing the module {module} raised {said}.") from error
    for part in name.split("."):
        if not hasattr(value, part):
            raise GradtoolsError(f"{path}: {module} has no {name}.")
        value = getattr(value, part)
    return value


def _check_count(f: Any, path: str, given: tuple[np.ndarray, ...]) -> None:
    """Raises if the function does not take this number of arrays, before anything runs."""
    try:
        signature = inspect.signature(f)
    except (TypeError, ValueError):
        return  # a builtin need not have one
    try:
        signature.bind(*given)
    except TypeError as error:
        count = f"{len(given)} array{'s' * (len(given) != 1)}" if given else "no arrays"
        raise GradtoolsError(
            f"{path}{signature} was given {count}: {error}. Give one array for each argument: "
            '--shapes "3x4,5", or --args file.npz.'
        ) from error


def _framework_of(f: Any, path: str) -> str:
    """The framework that a function is written in, by its class or else its module's imports."""
    backends = {_backend_of(kind.__module__) for kind in type(f).__mro__} - {None}
    if not backends:
        values = vars(sys.modules[path.partition(":")[0]]).values()
        modules = (
            x.__name__ if isinstance(x, ModuleType) else str(getattr(x, "__module__", ""))
            for x in values
        )
        backends = set(map(_backend_of, modules)) - {None}
    if len(backends) == 1:
        return str(backends.pop())
    installed = gradtools.available_backends()
    if not backends and len(installed) == 1:
        return installed[0]
    came = "both PyTorch and JAX" if backends else "neither PyTorch nor JAX"
    raise GradtoolsError(
        f"{path}: its module imports {came}, so the framework is not clear; "
        "say --backend torch or --backend jax."
    )


def _backend_of(module: str) -> str | None:
    if module.startswith("gradtools."):
        second = module.split(".")[1]
        return second if second in _BACKENDS else None
    top = module.partition(".")[0]
    return "jax" if top in _OF_JAX else "torch" if top == "torch" else None


# --- arrays ------------------------------------------------------------------------------


def arrays_given(
    file: str | None, shapes: str | None, seed: int, dtype: str = "float64"
) -> tuple[np.ndarray, ...]:
    """The arrays of a file, or draws of shapes; none where neither is given.

    Args:
        file: A .npz file, whose arrays come in their order, or a .npy file.
        shapes: Such as ``"3x4,5:float32,()"``. Floats are normal draws, integers are 0, 1 or 2.
        seed: Of the draws.
        dtype: Of a shape that names none.
    """
    if not file:
        rng = np.random.default_rng(seed)
        texts = shapes.split(",") if shapes else []
        return tuple(_drawn(rng, text.strip(), dtype) for text in texts)
    try:
        result = np.load(file)
        if isinstance(result, np.ndarray):
            return (result,)
        return tuple(result[name] for name in result.files)
    except FileNotFoundError as error:
        raise GradtoolsError(f"--args {file}: there is no such file.") from error
    except (OSError, ValueError, EOFError, zipfile.BadZipFile) as error:
        raise GradtoolsError(
            f"--args {file}: NumPy cannot read it as arrays of numbers; write it with numpy.savez. "
            f"NumPy says: {error}"
        ) from error


def _drawn(rng: np.random.Generator, text: str, default: str) -> np.ndarray:
    shape_text, _, dtype = text.partition(":")
    if not re.fullmatch(r"\(\)|\d+(x\d+)*", shape_text):
        raise GradtoolsError(
            f"--shapes: {text!r} is no shape; write 3x4 for a matrix, 5 for a vector, () "
            f"for a number, with :int32 after it for another dtype than {default}."
        )
    shape = () if shape_text == "()" else tuple(int(n) for n in shape_text.split("x"))
    try:
        kind = np.dtype(dtype or default)
    except TypeError as error:
        raise GradtoolsError(
            f"--shapes: {dtype!r} is no NumPy dtype; write for example float32, complex64 or int32."
        ) from error
    if kind.kind not in "fciub":
        raise GradtoolsError(f"--shapes: {dtype!r} holds no numbers; write for example float32.")
    try:
        if kind.kind in "iub":
            return rng.integers(0, 3, shape).astype(kind)
        drawn = np.asarray(rng.standard_normal(shape))
        if kind.kind == "c":
            drawn = drawn + 1j * rng.standard_normal(shape)
        return np.asarray(drawn).astype(kind)
    except (MemoryError, ValueError) as error:
        raise GradtoolsError(f"--shapes: {text!r} is too large here: {error}.") from error
