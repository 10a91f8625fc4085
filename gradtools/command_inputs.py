"""Loads the functions and arrays that the arguments of a command specify.

A function is specified as ``package.module:name``, and is imported from the working directory.
Arrays are read from a file, or drawn at random with given shapes.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
from importlib import import_module
from inspect import isfunction, ismethod, signature
from types import ModuleType
from typing import Any

import numpy as np

import gradtools
from gradtools.errors import GradtoolsError

_OF = {"torch": "torch", **dict.fromkeys(("jax", "jaxlib", "flax", "equinox", "optax"), "jax")}


def inputs_of(options: argparse.Namespace) -> tuple[Any, tuple[Any, ...], ModuleType]:
    """Returns a command's function, its arguments, and `gradtools.torch` or `gradtools.jax`."""
    f = named(options.function)
    gt = import_module(f"gradtools.{options.backend or _framework_of(f, options.function)}")
    arrays = arrays_given(options.args, options.shapes, options.seed, "float32")
    called = getattr(f, "forward", f)
    if not arrays and (isfunction(called) or ismethod(called)):
        try:
            signature(called, follow_wrapped=False).bind()
        except TypeError as error:
            raise GradtoolsError(f"{options.function}: {error}; pass --shapes.") from error
    return f, tuple(gt.asarray(x) for x in arrays), gt


def named(path: str) -> Any:
    """Imports the object at the path ``package.module:name``."""
    module, _, name = path.partition(":")
    if not module or not name:
        raise GradtoolsError(f"{path!r} is not the path of a program; write package.module:name.")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        value = import_module(module)
    except ImportError as error:
        fix = f"; write {module[:-3].replace('/', '.')}:{name}" if module.endswith(".py") else ""
        raise GradtoolsError(f"{path}: {module} cannot be imported: {error}{fix}.") from error
    for part in name.split("."):
        if not hasattr(value, part):
            raise GradtoolsError(f"{path}: {module} has no attribute {name}.")
        value = getattr(value, part)
    return value


def _framework_of(f: Any, path: str) -> str:
    """Determines a function's framework from its class or else from the imports of its module."""
    values = vars(sys.modules[path.partition(":")[0]]).values()
    modules = (x.__name__ if isinstance(x, ModuleType) else _module_of(x) for x in values)
    for names in (map(_module_of, type(f).__mro__), modules):
        parts = (name.removeprefix("gradtools.").partition(".")[0] for name in names)
        backends = {_OF[part] for part in parts if part in _OF}
        if backends:
            break
    installed = gradtools.available_backends()
    if len(backends or installed) == 1:
        return (*backends, *installed)[0]
    came = "both PyTorch and JAX" if backends else "neither PyTorch nor JAX"
    raise GradtoolsError(
        f"{path}: its module imports {came}, so the framework is not clear; "
        "pass --backend torch or --backend jax."
    )


def _module_of(x: Any) -> str:
    return str(getattr(x, "__module__", ""))


def arrays_given(
    file: str | None, shapes: str | None, seed: int, dtype: str = "float64"
) -> tuple[np.ndarray, ...]:
    """Returns the arrays in a file, or random arrays; returns () if both file and shapes are None.

    Args:
        file: A .npz file, whose arrays are used in order, or a .npy file.
        shapes: For example ``"3x4,5:float32,()"``. Floating and complex entries are drawn from a
            normal distribution; integers are 0, 1 or 2.
        seed: The seed of the random arrays.
        dtype: The dtype of arrays for which `shapes` specifies no dtype.
    """
    if file:
        try:
            result = np.load(file)
            return (result,) if isinstance(result, np.ndarray) else tuple(dict(result).values())
        except (OSError, ValueError, EOFError) as error:
            why = getattr(error, "strerror", None) or "it contains no arrays of numbers"
            raise GradtoolsError(f"--args {file}: {why}. Pass a .npy or .npz file.") from error
    rng = np.random.default_rng(seed)
    texts = shapes.split(",") if shapes else []
    return tuple([_drawn(rng, text.strip(), dtype) for text in texts])


def _drawn(rng: np.random.Generator, text: str, default: str) -> np.ndarray:
    shape_text, _, dtype = text.partition(":")
    if not re.fullmatch(r"\(\)|\d+(x\d+)*", shape_text) or (dtype and dtype not in np.sctypeDict):
        raise GradtoolsError(
            f"--shapes: {text!r} is not a shape; write 3x4 for a matrix, 5 for a vector, () "
            f"for a number, and append :int32 for a dtype other than {default}."
        )
    shape = () if shape_text == "()" else tuple(map(int, shape_text.split("x")))
    kind = np.dtype(dtype or default)
    if kind.kind in "iub":
        return rng.integers(0, 3, shape).astype(kind)
    imaginary = 1j * rng.standard_normal(shape) if kind.kind == "c" else 0
    return np.asarray(rng.standard_normal(shape) + imaginary).astype(kind)
