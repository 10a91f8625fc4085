"""What `gradtools crosscheck` and `gradtools conventions` do."""

from __future__ import annotations

import argparse
import sys
import traceback

import gradtools
from gradtools.errors import GradtoolsError
from gradtools.inputs import arrays, named
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

    return cross_check(
        torch=named(options.torch),
        jax=named(options.jax),
        args=arrays(options.args, options.shapes, options.seed),
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
