"""Defines the commands `gradtools why-zero`, `gradtools graph` and `gradtools formula`."""

from __future__ import annotations

import argparse
from pathlib import Path

from gradtools.command_inputs import inputs_of
from gradtools.errors import GradtoolsError
from gradtools.seeing.graphs.gradient_graphs import FORMS


def print_why_zero(options: argparse.Namespace) -> int:
    """Prints the report of `why_zero`; returns exit status 1 if a gradient is lost, otherwise 0."""
    f, args, gt = inputs_of(options)
    report = gt.why_zero(f, *args, argnums=tuple(options.argnums))
    print(report.to_json() if options.json else report)
    return 1 if report else 0


def print_formula(options: argparse.Namespace) -> int:
    """Prints the formula of a function and its derivatives."""
    f, args, gt = inputs_of(options)
    print(gt.formula(f, *args, order=options.order, argnums=tuple(options.argnums)))
    return 0


def print_graph(options: argparse.Namespace) -> int:
    """Prints the gradient graph of a function, or saves the graph to the file given by `--out`."""
    out = options.out
    suffix = Path(out).suffix.lower() if out is not None else ""
    if out is not None and suffix not in FORMS:
        raise GradtoolsError(f"-o {out}: no format for {suffix!r}; expected {', '.join(FORMS)}.")
    f, args, gt = inputs_of(options)
    drawn = gt.gradient_graph(f, *args, order=options.order, argnums=tuple(options.argnums))
    if out is None:
        print(drawn)
        return 0
    try:
        drawn.save(out)
    except OSError as error:
        raise GradtoolsError(f"-o {out}: the file cannot be written: {error.strerror}.") from error
    print(f"wrote {out}")
    return 0
