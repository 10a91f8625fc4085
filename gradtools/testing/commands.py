"""Defines the commands `gradtools checked` and `gradtools cross-check`."""

from __future__ import annotations

import argparse
import runpy
import sys
from pathlib import Path

import gradtools
from gradtools.command_inputs import arrays_given, named
from gradtools.errors import GradtoolsError


def cross_check(options: argparse.Namespace) -> int:
    """Compares two programs; returns exit status 0 if they agree and 1 if they disagree."""
    for name in ("torch", "jax"):
        if name not in gradtools.available_backends():
            raise GradtoolsError(
                f"needs both frameworks; {name} is not installed. Fix: "
                f'pip install "gradtools[{name}]"'
            )
    from gradtools.testing.cross_checking import compare

    report = compare.cross_check(
        torch=named(options.torch),
        jax=named(options.jax),
        args=arrays_given(options.args, options.shapes, options.seed),
        order=options.order,
        dtype=options.dtype,
        seed=options.seed,
        raises=False,
    )
    report.title = f"{options.torch} and {options.jax}"
    print(report.table(colour=sys.stdout.isatty()))
    return 0 if report else 1


def checked_script(options: argparse.Namespace) -> int:
    """Runs a script in a `checked` context and prints the report."""
    from gradtools.testing.checked_mode import checked

    if not Path(options.script).exists():
        print(f"gradtools checked: {options.script}: no such file", file=sys.stderr)
        return 2
    before = sys.argv, sys.path
    sys.argv = [options.script, *options.arguments]
    sys.path = [str(Path(options.script).resolve().parent), *sys.path]
    try:
        with checked() as report:
            runpy.run_path(options.script, run_name="__main__")
    finally:
        sys.argv, sys.path = before
        print(report, file=sys.stderr)
    return 0
