"""The PyTorch side of the demo: ``torch.nn`` layers and ``torch.optim.SGD``."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

import gradtools.torch as gt
from gradtools.demo.data import Array, Layers, StepData, Weights
from gradtools.demo.settings import Settings
from gradtools.demo.training import Networks, Params


class TorchSide:
    """Runs the program eagerly."""

    name = "torch"

    def __init__(self, settings: Settings):
        self._settings = settings
        self._evaluations = 0

    @contextmanager
    def working(self) -> Iterator[None]:
        """One thread, for as long as the side works: so small a network gains by no more."""
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            yield
        finally:
            torch.set_num_threads(threads)

    def start(self, weights: Weights) -> None:
        """Builds the networks from NumPy weights, and a fresh optimiser."""
        modules = {name: _network(layers, name) for name, layers in weights.items()}
        pure = {name: gt.functionalize(module) for name, module in modules.items()}
        self._params: Params = {name: params for name, (_, params, _) in pure.items()}
        self._program = Networks(
            gt,
            networks={name: apply for name, (apply, _, _) in pure.items()},
            states={name: state for name, (_, _, state) in pure.items()},
            count=self._count,
        )
        self._trained = {name: dict(module.named_parameters()) for name, module in modules.items()}
        self._optimizer = torch.optim.SGD(
            [p for module in modules.values() for p in module.parameters()],
            lr=self._settings.learning_rate,
            momentum=self._settings.momentum,
        )

    def step(self, batch: StepData, scale: float) -> tuple[float, list[Array]]:
        """One step; the parameters are updated in place, and so are their aliases."""
        value, grads = self._program.gradients(self._params, *_arrays(batch, scale))
        gt.assign_gradients(self._trained, grads)
        self._optimizer.step()
        return float(value), list(_leaves(grads))

    def plain_gradients(self, batch: StepData, scale: float) -> list[Array]:
        """The gradients by two evaluations."""
        grads = self._program.plain_gradients(self._params, *_arrays(batch, scale))
        return list(_leaves(grads))

    def predict(self, images: Array) -> NDArray[Any]:
        """The most likely class of each image."""
        with torch.no_grad():
            logits = self._program.logits(self._params, gt.asarray(images))
        return np.asarray(gt.to_numpy(logits)).argmax(axis=1)

    def evaluations(self) -> int:
        """How often the cost was evaluated."""
        return self._evaluations

    def _count(self) -> None:
        self._evaluations += 1


def _network(layers: Layers, name: str) -> nn.Sequential:
    """Linear layers with ReLU between; features end in one, heads do not."""
    modules: list[nn.Module] = []
    for matrix, bias in layers:
        width_in, width_out = matrix.shape
        linear = nn.Linear(width_in, width_out, dtype=torch.float64)
        linear.load_state_dict({"weight": torch.tensor(matrix.T), "bias": torch.tensor(bias)})
        modules += [linear, nn.ReLU()]
    return nn.Sequential(*(modules if name == "features" else modules[:-1]))


def _arrays(batch: StepData, scale: float) -> tuple[tuple[Any, ...], Any]:
    arrays = tuple(gt.asarray(x) for x in (batch.source, batch.labels, batch.target))
    return arrays, gt.asarray(np.asarray(scale))


def _leaves(grads: Params) -> Iterator[Array]:
    """Each layer's matrix as (in, out), then its bias."""
    for network in ("features", "labels", "domain"):
        for leaf in grads[network].values():
            yield gt.to_numpy(leaf.T if leaf.ndim == 2 else leaf)
