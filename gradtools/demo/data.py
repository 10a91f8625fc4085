"""Real digits in two domains, the batches and the first weights, all as NumPy arrays.

Both frameworks get these very arrays, so that what differs later is theirs.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from gradtools.demo.settings import Settings

Array = NDArray[np.float64]
Layers = list[tuple[Array, Array]]
Weights = dict[str, Layers]

CLASSES = 10
PIXELS = 64
SOURCE_IMAGES = 750
TARGET_IMAGES = 750


@dataclass(frozen=True)
class Domains:
    """Three disjoint sets of images: no target image is a shifted source image."""

    source: Array
    source_labels: Array  # one-hot
    target: Array  # unlabelled
    held_out: Array  # of the target domain
    held_out_labels: NDArray[np.int64]


@dataclass(frozen=True)
class StepData:
    """What one step sees."""

    source: Array
    labels: Array
    target: Array


def load_domains(seed: int) -> Domains:
    """Splits scikit-learn's 1,797 digits and shifts all but the source images."""
    from sklearn.datasets import load_digits

    digits = load_digits()
    rng = np.random.default_rng(seed)
    source, target, held_out = np.split(
        rng.permutation(len(digits.images)), [SOURCE_IMAGES, SOURCE_IMAGES + TARGET_IMAGES]
    )
    images = digits.images / 16.0
    return Domains(
        source=_flat(images[source]),
        source_labels=np.eye(CLASSES)[digits.target[source]],
        target=_flat(shift(images[target], rng)),
        held_out=_flat(shift(images[held_out], rng)),
        held_out_labels=digits.target[held_out],
    )


def shift(images: Array, rng: np.random.Generator) -> Array:
    """The target domain: turned by 20 to 40 degrees, a tenth inverted (x to 0.8 x + 0.1), noised.

    Full inversion is too far: there reversal aligns the domains with the classes mixed up.
    """
    from scipy.ndimage import rotate

    turned = np.stack(
        [rotate(image, rng.uniform(20, 40), reshape=False, order=1) for image in images]
    )
    return np.clip(0.8 * turned + 0.1 + 0.1 * rng.standard_normal(turned.shape), 0.0, 1.0)


def batches(domains: Domains, settings: Settings, seed: int) -> Iterator[StepData]:
    """The same sequence of batches for every run of a seed."""
    rng = np.random.default_rng([seed, 1])
    for _ in range(settings.steps):
        source = rng.integers(0, len(domains.source), settings.batch)
        target = rng.integers(0, len(domains.target), settings.batch)
        yield StepData(
            domains.source[source], domains.source_labels[source], domains.target[target]
        )


def initial_weights(settings: Settings, seed: int) -> Weights:
    """He's initialisation; each network is a list of (matrix of shape (in, out), bias)."""
    rng = np.random.default_rng([seed, 2])
    sizes = {
        "features": (PIXELS, settings.hidden, settings.features),
        "labels": (settings.features, CLASSES),
        "domain": (settings.features, settings.domain_hidden, 1),
    }
    return {name: _layers(widths, rng) for name, widths in sizes.items()}


def _layers(widths: tuple[int, ...], rng: np.random.Generator) -> Layers:
    return [
        (rng.standard_normal((before, after)) * np.sqrt(2 / before), np.zeros(after))
        for before, after in pairwise(widths)
    ]


def _flat(images: Array) -> Array:
    return np.ascontiguousarray(images.reshape(len(images), PIXELS))
