"""What ``gradtools demo`` does: trains, compares, prints and draws."""

import sys
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from time import perf_counter

import numpy as np
from tqdm import tqdm

from gradtools.demo.compare import Record, train
from gradtools.demo.data import Domains, load_domains
from gradtools.demo.settings import QUICK, Settings
from gradtools.demo.training import FrameworkRun


def run_demo(
    backends: Sequence[str], seeds: int = 5, out: Path = Path("out"), quick: bool = False
) -> int:
    """Runs the whole demo and returns an exit status.

    Args:
        backends: "torch", "jax" or both; with both, each step is compared.
        seeds: how many times everything is drawn anew.
        out: the folder for the picture.
        quick: few steps, to see that it runs; the accuracies then mean nothing.
    """
    started = perf_counter()
    settings = QUICK if quick else Settings()
    sides = [FrameworkRun(name, settings) for name in backends]
    print(_opening(backends, settings))
    records = train_all(sides, settings, range(seeds))
    print(report(records, backends))
    from gradtools.demo.picture import draw

    path = draw(records, load_domains(0), backends, out)
    print(f"picture: {path}")
    print(f"took {perf_counter() - started:.0f} s")
    return 0


def train_all(
    sides: Sequence[FrameworkRun], settings: Settings, seeds: Sequence[int]
) -> list[Record]:
    """For every seed one training without reversal and one with, in that order."""
    with ExitStack() as stack:
        for side in sides:
            stack.enter_context(side.working())
        bar = stack.enter_context(tqdm(total=2 * len(seeds) * settings.steps, unit="step"))
        return [
            _train(sides, load_domains(seed), settings, Record(seed, reverses), bar)
            for seed in seeds
            for reverses in (False, True)
        ]


def _train(
    sides: Sequence[FrameworkRun],
    domains: Domains,
    settings: Settings,
    record: Record,
    bar: "tqdm[None]",
) -> Record:
    bar.set_description(f"seed {record.seed}, {'with' if record.reverses else 'without'} reversal")
    return train(sides, domains, settings, record, bar.update)


def report(records: Sequence[Record], backends: Sequence[str]) -> str:
    """Accuracies, differences and counts, as text."""
    return "\n".join([*_accuracies(records, backends), *_differences(records), *_counts(records)])


def _opening(backends: Sequence[str], settings: Settings) -> str:
    return (
        "Domain-adversarial training on 1,797 real digits: 750 clean ones with labels,\n"
        "750 others turned, noised and faintly inverted without labels, 297 like those held out.\n"
        f"One program on {' and '.join(backends)}, float64: same weights, batches, "
        f"{settings.steps} steps, learning rate.\n"
        f"With reversal its scale rises from 0 to {settings.max_scale}; without, it stays 0.\n"
    )


def _accuracies(records: Sequence[Record], backends: Sequence[str]) -> list[str]:
    lines = ["", "accuracy on held-out target images, in %"]
    lines.append("  seed" + "".join(f"{name:>9} without   with   gain" for name in backends))
    pairs = list(zip(records[::2], records[1::2], strict=True))
    for without, with_ in pairs:
        columns = "".join(_column(without.final(b), with_.final(b)) for b in backends)
        lines.append(f"  {without.seed:>4}{columns}")
    means = [
        _column(*(float(np.mean([pair[i].final(b) for pair in pairs])) for i in (0, 1)))
        for b in backends
    ]
    return [*lines, "  mean" + "".join(means)]


def _column(without: float, with_: float) -> str:
    return f"{without:>17.1f} {with_:>6.1f} {with_ - without:>+6.1f}"


def _differences(records: Sequence[Record]) -> list[str]:
    if not records[0].loss_differences:
        return []
    losses = max(max(record.loss_differences) for record in records)
    gradients = max(max(record.gradient_differences) for record in records)
    return [
        "",
        f"largest difference between the frameworks over {_total(records, 'steps') // 2:,} steps"
        " (relative):",
        f"  losses {losses:.1e}, gradients {gradients:.1e}",
    ]


def _counts(records: Sequence[Record]) -> list[str]:
    steps, evaluations = _total(records, "steps"), _total(records, "evaluations")
    plain, plain_evaluations = _total(records, "plain_steps"), _total(records, "plain_evaluations")
    difference = max(max(record.plain_differences) for record in records)
    return [
        "",
        "evaluations of f, counted while it ran:",
        f"  with reverse_gradient {evaluations:,} in {steps:,} steps: "
        f"{evaluations / steps:g} a step",
        f"  the plain way         {plain_evaluations:,} in {plain:,} steps: "
        f"{plain_evaluations / plain:g} a step; gradients differ by {difference:.1e}",
    ]


def _total(records: Sequence[Record], name: str) -> int:
    return sum(int(getattr(record, name)) for record in records)


if __name__ == "__main__":
    sys.exit(run_demo(("torch", "jax")))
