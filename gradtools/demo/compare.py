"""Trains all sides in lockstep on the same batches and notes what they say at every step."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from gradtools.demo.data import Array, Domains, StepData, batches, initial_weights
from gradtools.demo.settings import Settings
from gradtools.demo.training import FrameworkRun


@dataclass
class Record:
    """One training of every side, with or without reversal."""

    seed: int
    reverses: bool
    looks: list[int] = field(default_factory=list)  # the steps before which accuracy was taken
    accuracy: dict[str, list[float]] = field(default_factory=dict)  # by side, in percent
    predictions: dict[str, NDArray[np.int64]] = field(default_factory=dict)  # by side, at the end
    loss_differences: list[float] = field(default_factory=list)  # between sides, relative
    gradient_differences: list[float] = field(default_factory=list)
    plain_differences: list[float] = field(default_factory=list)  # to two plain evaluations
    steps: int = 0  # of all sides
    evaluations: int = 0  # of the cost, in those steps
    plain_steps: int = 0
    plain_evaluations: int = 0

    def final(self, side: str) -> float:
        """Target accuracy after the last step, in percent."""
        return self.accuracy[side][-1]


def train(
    sides: Sequence[FrameworkRun],
    domains: Domains,
    settings: Settings,
    record: Record,
    progress: Callable[[], object] = lambda: None,
) -> Record:
    """Trains each side from the same weights on the same batches; fills the record."""
    for side in sides:
        side.start(initial_weights(settings, record.seed))
    before = _evaluations(sides)
    for number, batch in enumerate(batches(domains, settings, record.seed)):
        scale = settings.scale(number) if record.reverses else 0.0
        looks = number % settings.look_every == 0
        if looks:
            _look(sides, domains, record, number)
        plain = [_plain(side, batch, scale, record) for side in sides] if looks else []
        results = [side.step(batch, scale) for side in sides]
        _note(record, results, plain)
        progress()
    _look(sides, domains, record, settings.steps)
    record.steps = settings.steps * len(sides)
    record.evaluations = _evaluations(sides) - before - record.plain_evaluations
    return record


def relative_difference(a: Sequence[Array], b: Sequence[Array]) -> float:
    """The norm of a - b over the norm of b, over all leaves jointly."""
    difference = sum(float(np.sum((x - y) ** 2)) for x, y in zip(a, b, strict=True))
    norm = sum(float(np.sum(y**2)) for y in b)
    return float(np.sqrt(difference / norm))


def _plain(side: FrameworkRun, batch: StepData, scale: float, record: Record) -> list[Array]:
    before = side.evaluations()
    grads = side.plain_gradients(batch, scale)
    record.plain_evaluations += side.evaluations() - before
    record.plain_steps += 1
    return grads


def _evaluations(sides: Sequence[FrameworkRun]) -> int:
    return sum(side.evaluations() for side in sides)


def _note(
    record: Record, results: list[tuple[float, list[Array]]], plain: list[list[Array]]
) -> None:
    (first_loss, first), (last_loss, last) = results[0], results[-1]
    if len(results) > 1:
        record.loss_differences.append(abs(first_loss - last_loss) / abs(last_loss))
        record.gradient_differences.append(relative_difference(first, last))
    for (_, grads), other in zip(results, plain, strict=False):
        record.plain_differences.append(relative_difference(grads, other))


def _look(sides: Sequence[FrameworkRun], domains: Domains, record: Record, number: int) -> None:
    record.looks.append(number)
    for side in sides:
        predicted = side.predict(domains.held_out)
        right = float(np.mean(predicted == domains.held_out_labels))
        record.accuracy.setdefault(side.name, []).append(100 * right)
        record.predictions[side.name] = predicted
