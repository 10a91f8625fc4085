"""The program, written once against the unified API.

``gt`` is ``gradtools.torch`` or ``gradtools.jax``; nothing here knows which. The networks come
as pure functions from ``gt.functionalize``.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from types import ModuleType
from typing import Any, Protocol

from numpy.typing import NDArray

from gradtools.demo.data import Array, StepData, Weights

Params = dict[str, Any]
Apply = Callable[..., tuple[Any, Any]]


class FrameworkRun(Protocol):
    """One framework's run of the program."""

    name: str

    def working(self) -> AbstractContextManager[Any]:
        """What has to hold while the side works; restored afterwards."""

    def start(self, weights: Weights) -> None:
        """Builds the networks and a fresh optimiser."""

    def step(self, batch: StepData, scale: float) -> tuple[float, list[Array]]:
        """One training step; returns the loss and the gradients, in one order for both sides."""

    def plain_gradients(self, batch: StepData, scale: float) -> list[Array]:
        """The same gradients the plain way: two evaluations, no reversal."""

    def predict(self, images: Array) -> NDArray[Any]:
        """The most likely class of each image."""

    def evaluations(self) -> int:
        """How often the networks and the cost were evaluated so far, counted at run time."""


@dataclass(frozen=True)
class Networks:
    """The three networks of one backend and the cost that ties them."""

    gt: ModuleType
    networks: dict[str, Apply]
    states: dict[str, Any]
    count: Callable[[], None]

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
        return self._run("labels", params, self._run("features", params, images))

    def _losses(
        self, params: Params, batch: tuple[Any, ...], edit: Callable[[Any], Any]
    ) -> tuple[Any, Any]:
        self.count()
        source, labels, target = batch
        size = source.shape[0]
        features = self._run("features", params, self.gt.xp.concat([source, target]))
        classes = self._run("labels", params, features[:size])
        domains = self._run("domain", params, edit(features))[:, 0]
        return self._label_loss(classes, labels), self._domain_loss(domains, size)

    def _run(self, name: str, params: Params, x: Any) -> Any:
        out, _ = self.networks[name](params[name], self.states[name], x)
        return out

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
