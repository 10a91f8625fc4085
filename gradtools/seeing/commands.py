"""What `gradtools why-zero` does: one function, looked at from the command line."""

from __future__ import annotations

import argparse
import os
import sys
import traceback

from gradtools.errors import GradtoolsError
from gradtools.inputs import Given
from gradtools.seeing.report import Report


def why_zero(options: argparse.Namespace) -> int:
    """Prints where gradients are lost; 0 if nowhere, 1 if somewhere, 2 if it cannot be told."""
    try:
        report = _reported(options)
    except GradtoolsError as error:
        print(f"gradtools why-zero: {error}", file=sys.stderr)
        return 2
    except Exception:  # a program's own: its place is worth more than a sentence
        traceback.print_exc()
        return 2
    print(report.to_json() if options.json else report.text(colour=in_colour()))
    return 1 if report else 0


def _reported(options: argparse.Namespace) -> Report:
    given = Given.by(options)
    found: Report = given.gt.why_zero(given.f, *given.args, wrt=tuple(options.wrt))
    return found


def in_colour() -> bool:
    """Whether to print in colour: on a terminal, unless NO_COLOR is set."""
    return sys.stdout.isatty() and not os.environ.get("NO_COLOR")
