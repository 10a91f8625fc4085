"""The demo's picture: accuracy while training, agreement of the frameworks, sample images."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from gradtools.demo.compare import Record
from gradtools.demo.data import CLASSES, Domains

_LABELS = {False: "without reversal", True: "with reversal"}
_COLOURS = {False: "#b8542c", True: "#22688c"}
_RIGHT, _WRONG = "#2a7d2a", "#c02020"


def draw(records: Sequence[Record], domains: Domains, backends: Sequence[str], out: Path) -> Path:
    """Writes demo.png into the folder and returns its path; records[0:2] are of seed 0."""
    figure = Figure(figsize=(11, 8), layout="constrained")
    FigureCanvasAgg(figure)  # no window, whatever the user's settings
    parts: Any = figure.subfigures(2, 1, height_ratios=(1.2, 1))
    top, bottom = parts
    left, right = top.subplots(1, 2)
    _draw_accuracy(left, records, backends)
    _draw_differences(right, records)
    _draw_samples(bottom, records, domains, backends[0])
    out.mkdir(parents=True, exist_ok=True)
    path = out / "demo.png"
    figure.savefig(path, dpi=110)
    return path


def _draw_accuracy(axes: Any, records: Sequence[Record], backends: Sequence[str]) -> None:
    styles = dict(zip(backends, ("-", ":"), strict=False))
    for reverses, label in _LABELS.items():
        chosen = [record for record in records if record.reverses is reverses]
        for name, style in styles.items():
            curves = np.array([record.accuracy[name] for record in chosen])
            axes.plot(
                chosen[0].looks,
                curves.mean(axis=0),
                style,
                color=_COLOURS[reverses],
                linewidth=1.5 if style == "-" else 3.5,
                label=f"{label}, {name}",
            )
        axes.fill_between(
            chosen[0].looks,
            curves.min(axis=0),
            curves.max(axis=0),
            color=_COLOURS[reverses],
            alpha=0.12,
            linewidth=0,
        )
    axes.set(xlabel="step", ylabel="accuracy on held-out target images, %")
    axes.set_title("mean over the seeds; the band is their range")
    axes.legend()


def _draw_differences(axes: Any, records: Sequence[Record]) -> None:
    if not records[0].gradient_differences:
        axes.text(0.5, 0.5, "one framework only: nothing to compare", ha="center")
        axes.set_axis_off()
        return
    for reverses, label in _LABELS.items():
        chosen = [record.gradient_differences for record in records if record.reverses is reverses]
        axes.semilogy(np.max(chosen, axis=0), color=_COLOURS[reverses], linewidth=0.8, label=label)
    axes.set(xlabel="step", ylabel="relative difference, worst seed")
    axes.set_title("gradients in PyTorch and in JAX")
    axes.legend()


def _draw_samples(figure: Any, records: Sequence[Record], domains: Domains, backend: str) -> None:
    figure.suptitle(
        "clean source images (top); held-out target images of seed 0, read without (middle) "
        "and with reversal (bottom)"
    )
    rows = figure.subplots(3, CLASSES)
    labels = np.argmax(domains.source_labels, axis=1)
    _draw_row(rows[0], domains.source, labels, labels)
    for row, record in zip(rows[1:], records[:2], strict=True):
        _draw_row(row, domains.held_out, domains.held_out_labels, record.predictions[backend])


def _draw_row(row: Any, images: Any, labels: Any, predictions: Any) -> None:
    """The first image of each class, headed by what was read in it."""
    for label, axes in enumerate(row):
        index = int(np.flatnonzero(labels == label)[0])
        axes.imshow(images[index].reshape(8, 8), cmap="gray_r", vmin=0, vmax=1)
        colour = _RIGHT if predictions[index] == label else _WRONG
        axes.set_title(str(predictions[index]), color=colour, fontsize=11)
        axes.set_axis_off()
