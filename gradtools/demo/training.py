"""The program, written once against the unified API, and a framework's run of it.

``gt`` is ``gradtools.torch`` or ``gradtools.jax``. The networks are lists of dense layers, the
optimiser is gradient descent with momentum: the same lines for both frameworks. What differs is
that PyTorch runs eagerly, on one thread, and JAX compiled, in double precision.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from types import ModuleType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gradtools.demo.data import Array, StepData, Weights
from gradtools.demo.settings import Settings

Params = dict[str, list[tuple[Any, Any]]]  # each network's layers: matrix (in, out) and bias


@dataclass(frozen=True)
class Networks:
    """The three networks in one backend, and the cost that ties them."""

    gt: ModuleType
    count: Callable[[], None]  # called once for each evaluation of the cost

    def gradients(self, params: Params, batch: tuple[Any, ...], scale: Any) -> tuple[Any, Params]:
        """The value and every gradient, from one evaluation and one reversed gradient."""

        def cost(params: Params) -> Any:
            return sum(self._losses(params, batch, lambda x: self.gt.reverse_gradient(x, scale)))

        value, grads = self.gt.value_and_grad(cost)(params)
        return value, grads

    def plain_gradients(self, params: Params, batch: tuple[Any, ...], scale: Any) -> Params:
        """The same from two evaluations: the heads descend on the sum, the features do not."""
        heads = {name: tree for name, tree in params.items() if name != "features"}

        def for_heads(heads: Params) -> Any:
            return sum(self._losses({**params, **heads}, batch, lambda x: x))

        def for_features(features: Any) -> Any:
            label, domain = self._losses({**params, "features": features}, batch, lambda x: x)
            return label - scale * domain

        grads: Params = self.gt.grad(for_heads)(heads)
        return {**grads, "features": self.gt.grad(for_features)(params["features"])}

    def logits(self, params: Params, images: Any) -> Any:
        """Class scores, shape (images, classes)."""
        return self._run(params["labels"], self._features(params, images))

    def _losses(
        self, params: Params, batch: tuple[Any, ...], edit: Callable[[Any], Any]
    ) -> tuple[Any, Any]:
        self.count()
        source, labels, target = batch
        size = source.shape[0]
        features = self._features(params, self.gt.xp.concat([source, target]))
        classes = self._run(params["labels"], features[:size])
        domains = self._run(params["domain"], edit(features))[:, 0]
        return self._label_loss(classes, labels), self._domain_loss(domains, size)

    def _features(self, params: Params, x: Any) -> Any:
        return self._relu(self._run(params["features"], x))

    def _run(self, layers: list[tuple[Any, Any]], x: Any) -> Any:
        """Dense layers with ReLU between them."""
        for i, (matrix, bias) in enumerate(layers):
            x = (self._relu(x) if i else x) @ matrix + bias
        return x

    def _relu(self, x: Any) -> Any:
        return self.gt.xp.where(x > 0, x, self.gt.xp.zeros_like(x))

    def _label_loss(self, logits: Any, labels: Any) -> Any:
        xp = self.gt.xp
        shifted = logits - self.gt.stop_gradient(xp.max(logits, axis=1, keepdims=True))
        log_total = xp.log(xp.sum(xp.exp(shifted), axis=1))
        return xp.mean(log_total - xp.sum(shifted * labels, axis=1))

    def _domain_loss(self, logits: Any, size: int) -> Any:
        """Cross-entropy of "is it a source image?", the first ``size`` of which are."""
        xp = self.gt.xp
        costs = xp.logaddexp(xp.zeros_like(logits), logits)
        return xp.mean(costs) - xp.sum(logits[:size]) / logits.shape[0]


class FrameworkRun:
    """One framework's run of the program: "torch" or "jax"; no other is imported."""

    def __init__(self, name: str, settings: Settings):
        self.name, self._settings, self._evaluations = name, settings, 0
        self._gt = gt = import_module(f"gradtools.{name}")
        if name == "jax":
            count: Callable[[], None] = partial(import_module("jax").debug.callback, self._count)
            run = gt.compile  # the scale is traced, so its schedule compiles nothing anew
        else:
            count, run = self._count, lambda f: f
        networks = Networks(gt, count)
        self._step, self._plain = run(self._descended(networks)), run(networks.plain_gradients)
        self._logits = run(networks.logits)

    def working(self) -> AbstractContextManager[Any]:
        """What has to hold while the side works; restored afterwards."""
        return _one_thread() if self.name == "torch" else import_module("jax").enable_x64(True)

    def start(self, weights: Weights) -> None:
        """Takes the weights, and a fresh optimiser."""
        self._params = _each(self._gt.asarray, weights)
        self._momenta = _each(self._gt.xp.zeros_like, self._params)

    def step(self, batch: StepData, scale: float) -> tuple[float, list[Array]]:
        """One training step; returns the loss and the gradients, in one order for both sides."""
        self._params, self._momenta, value, grads = self._step(
            self._params, self._momenta, *self._arrays(batch, scale)
        )
        return float(value), self._leaves(grads)

    def plain_gradients(self, batch: StepData, scale: float) -> list[Array]:
        """The same gradients the plain way: two evaluations, no reversal."""
        return self._leaves(self._plain(self._params, *self._arrays(batch, scale)))

    def predict(self, images: Array) -> NDArray[Any]:
        """The most likely class of each image."""
        logits = self._logits(self._params, self._gt.asarray(images))
        return np.asarray(self._gt.to_numpy(logits)).argmax(axis=1)

    def evaluations(self) -> int:
        """How often the cost was evaluated so far, counted at run time."""
        if self.name == "jax":
            import_module("jax").effects_barrier()
        return self._evaluations

    def _count(self) -> None:
        self._evaluations += 1

    def _descended(self, networks: Networks) -> Callable[..., Any]:
        rate, momentum = self._settings.learning_rate, self._settings.momentum

        def step(params: Params, momenta: Params, batch: Any, scale: Any) -> tuple[Any, ...]:
            value, grads = networks.gradients(params, batch, scale)
            momenta = _each(lambda v, g: momentum * v + g, momenta, grads)
            return _each(lambda p, v: p - rate * v, params, momenta), momenta, value, grads

        return step

    def _arrays(self, batch: StepData, scale: float) -> tuple[tuple[Any, ...], Any]:
        asarray = self._gt.asarray
        arrays = tuple(asarray(x) for x in (batch.source, batch.labels, batch.target))
        return arrays, asarray(np.asarray(scale))

    def _leaves(self, grads: Params) -> list[Array]:
        """Each layer's matrix, then its bias."""
        networks = (grads[name] for name in ("features", "labels", "domain"))
        return [self._gt.to_numpy(x) for layers in networks for layer in layers for x in layer]


def _each(f: Callable[..., Any], *trees: Any) -> Params:
    """f of each array of every network, and of its fellows in further trees."""
    return {
        name: [tuple(map(f, *layers)) for layers in zip(*(t[name] for t in trees), strict=True)]
        for name in trees[0]
    }


@contextmanager
def _one_thread() -> Iterator[None]:
    """PyTorch on one thread: so small a network gains by no more."""
    torch = import_module("torch")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
