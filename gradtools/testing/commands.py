"""What `gradtools crosscheck` and `gradtools conventions` do."""

from __future__ import annotations

import argparse
import os
import re
import sys
import traceback
from importlib import import_module
from typing import Any

import numpy as np

import gradtools
from gradtools.errors import GradtoolsError
from gradtools.testing.report import Report


def crosscheck(options: argparse.Namespace) -> int:
    """Compares two programs; 0 if they agree, 1 if not, 2 if they could not be compared."""
    try:
        report = _compared(options)
    except GradtoolsError as error:
        print(f"gradtools crosscheck: {error}", file=sys.stderr)
        return 2
    except Exception:  # a program's own: its place is worth more than a sentence
        traceback.print_exc()
        return 2
    if options.json:
        print(report.to_json())
    else:
        report.print()
    return 0 if report else 1


def _compared(options: argparse.Namespace) -> Report:
    """The report on the programs, found from the working directory."""
    from gradtools.testing.compare import cross_check

    sys.path.insert(0, os.getcwd())
    args = _read(options.args) if options.args else _draw(options.shapes, options.seed)
    return cross_check(
        torch=_named(options.torch),
        jax=_named(options.jax),
        args=args,
        order=options.order,
        dtype=options.dtype,
        seed=options.seed,
        conventions=options.conventions,
        raises=False,
        name=f"{options.torch} and {options.jax}",
    )


def conventions(options: argparse.Namespace) -> int:
    """Prints the table of conventions, measured here and now."""
    from gradtools.testing.kinks import convention_table
    from gradtools.testing.kinks import conventions as measure

    if not gradtools.available_backends():
        raise GradtoolsError('no framework is installed: pip install "gradtools[torch,jax]"')
    rows = measure(options.containing)
    if not rows:
        raise GradtoolsError(f"no row of the table contains {options.containing!r}")
    print(convention_table(rows, colour=sys.stdout.isatty()))
    return 0


def _named(path: str) -> Any:
    """What `package.module:name` names."""
    module, _, name = path.partition(":")
    if not module or not name:
        raise GradtoolsError(f"{path!r} names no program; write package.module:name.")
    try:
        found = import_module(module)
    except ImportError as error:
        raise GradtoolsError(f"{path}: the module {module} cannot be imported: {error}") from error
    for part in name.split("."):
        if not hasattr(found, part):
            raise GradtoolsError(f"{path}: {module} has no {name}.")
        found = getattr(found, part)
    return found


def _read(path: str) -> tuple[Any, ...]:
    """The arrays of a .npz file, in their order, or the one array of a .npy file."""
    try:
        found = np.load(path)
        if isinstance(found, np.ndarray):
            return (found,)
        return tuple(found[name] for name in found.files)
    except (OSError, ValueError) as error:
        raise GradtoolsError(f"--args {path}: {error}") from error


def _draw(shapes: str, seed: int) -> tuple[Any, ...]:
    """Normal draws of shapes such as "3x4,5:float32,()"; integers are drawn from 0, 1, 2."""
    rng = np.random.default_rng(seed)
    return tuple(_drawn(rng, text) for text in shapes.split(","))


def _drawn(rng: np.random.Generator, text: str) -> Any:
    shape_text, _, dtype = text.strip().partition(":")
    if not re.fullmatch(r"\(\)|\d+(x\d+)*", shape_text):
        raise GradtoolsError(
            f"--shapes: {text.strip()!r} is no shape; write 3x4 for a matrix, 5 for a vector, () "
            "for a number, with :float32 after it for another dtype than float64."
        )
    shape = () if shape_text == "()" else tuple(int(n) for n in shape_text.split("x"))
    try:
        kind = np.dtype(dtype or "float64")
    except TypeError as error:
        raise GradtoolsError(f"--shapes: {dtype!r} is no NumPy dtype.") from error
    if kind.kind in "iub":
        return rng.integers(0, 3, shape).astype(kind)
    drawn = rng.standard_normal(shape)
    return np.asarray(
        drawn + 1j * rng.standard_normal(shape) if kind.kind == "c" else drawn
    ).astype(kind)
