"""The sweeps on this machine, with these versions of the frameworks.

    python -m tests.support.run_sweeps                     # takes minutes
    python -m tests.support.run_sweeps --whole             # tens of minutes
    python -m tests.support.run_sweeps --backend torch --filter linalg --json

Exit status: 0 if the ledgers hold all that they find, 1 if not, 2 if nothing was swept.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from importlib.metadata import version

import gradtools
from tests.support.sweeps import LedgerVerdict, SweepOutcome


def main(arguments: Sequence[str] | None = None) -> int:
    """Sweeps each framework, and their twins against each other; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--backend", choices=("both", "torch", "jax"), default="both")
    parser.add_argument("--whole", action="store_true", help="all samples, in all ways")
    parser.add_argument("--filter", default="", metavar="TEXT", help="only programs with this text")
    parser.add_argument("--json", action="store_true", help="print each verdict as JSON")
    options = parser.parse_args(arguments)
    wanted = ("torch", "jax") if options.backend == "both" else (options.backend,)
    here = [name for name in wanted if name in gradtools.available_backends()]
    if not here:
        print(f"sweeps: {' and '.join(wanted)}: not installed", file=sys.stderr)
        return 2
    both = ("twins",) if len(here) == 2 else ()
    verdicts = {name: _SWEEPS[name](options.whole, options.filter) for name in (*here, *both)}
    if options.filter and not any(v.counts for v in verdicts.values()):
        print(f"sweeps: no program's name holds {options.filter!r}", file=sys.stderr)
        return 2
    for name, verdict in verdicts.items():
        versions = " and ".join(version(part) for part in (here if name == "twins" else (name,)))
        if options.json:
            print(json.dumps({"backend": name, "version": versions, **asdict(verdict)}))
        else:
            print(f"{name} {versions}: {verdict}")
    return 0 if all(verdicts.values()) else 1


def _told(outcomes: Iterable[SweepOutcome]) -> Iterable[SweepOutcome]:
    """The same, with a line of progress where someone looks."""
    shown = sys.stderr.isatty()
    for count, outcome in enumerate(outcomes):
        if shown and count % 20 == 0:
            print(f"\r{count:7}  {outcome.program[:60]:60}", end="", file=sys.stderr, flush=True)
        yield outcome
    if shown:
        print("\r" + " " * 70 + "\r", end="", file=sys.stderr)


def _in_torch(whole: bool, containing: str) -> LedgerVerdict:
    import torch

    from tests.support.sweeps import in_torch, judged
    from tests.support.sweeps.torch_ledger import LEDGER

    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # the arrays are tiny: threads would wait for each other
    try:
        result = in_torch.sweep(whole, only=lambda name: containing in name)
        return judged(_told(result), LEDGER, whole and not containing)
    finally:
        torch.set_num_threads(threads)


def _in_jax(whole: bool, containing: str) -> LedgerVerdict:
    from tests.support.sweeps import in_jax
    from tests.support.sweeps.jax_programs import cases

    result = [case for case in cases() if containing in case.program]
    outcomes = (o for case in result for o in in_jax.sweep([case], whole=whole))
    return in_jax.verdict(_told(outcomes), whole and not containing)


def _twins(whole: bool, containing: str) -> LedgerVerdict:
    from tests.support.sweeps import twins

    result = [case for case in twins.pairs() if containing in case.program]
    outcomes = (o for case in result for o in twins.sweep([case], whole=whole))
    return twins.verdict(_told(outcomes), whole and not containing)


_SWEEPS = {"torch": _in_torch, "jax": _in_jax, "twins": _twins}


if __name__ == "__main__":
    sys.exit(main())
