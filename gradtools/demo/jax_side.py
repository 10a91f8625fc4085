"""The JAX side of the demo: ``flax.linen`` layers and ``optax.sgd``, one jitted step.

The demo compares in float64. The switch is on only while this side works, and then as before.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any

import flax.linen as nn
import jax
import numpy as np
import optax
from numpy.typing import NDArray

import gradtools.jax as gt
from gradtools.demo.data import Array, Layers, StepData, Weights
from gradtools.demo.settings import Settings
from gradtools.demo.training import Networks, Params


class Network(nn.Module):
    """Dense layers with ReLU between; features end in one, heads do not."""

    widths: tuple[int, ...]
    ends_in_relu: bool

    @nn.compact
    def __call__(self, x: Any) -> Any:
        """Scores or features, shape (images, last width)."""
        for i, width in enumerate(self.widths):
            x = nn.Dense(width, param_dtype=np.float64)(x)
            if self.ends_in_relu or i + 1 < len(self.widths):
                x = nn.relu(x)
        return x


class JaxSide:
    """Runs the program compiled."""

    name = "jax"

    def __init__(self, settings: Settings):
        self._optimizer = optax.sgd(settings.learning_rate, momentum=settings.momentum)
        self._evaluations = 0
        self._compiled: tuple[Any, ...] | None = None

    def working(self) -> AbstractContextManager[Any]:
        """Double precision, for as long as the side works."""
        return jax.enable_x64(True)

    def start(self, weights: Weights) -> None:
        """Builds the networks from NumPy weights, and a fresh optimiser."""
        pure = {name: _functional(name, layers) for name, layers in weights.items()}
        self._params: Params = {name: params for name, (_, params, _) in pure.items()}
        self._optimizer_state = self._optimizer.init(self._params)
        if self._compiled is None:  # the networks' shapes are the same for every seed
            self._compiled = self._compile(pure)

    def step(self, batch: StepData, scale: float) -> tuple[float, list[Array]]:
        """One jitted step; the scale is traced, so its schedule compiles nothing anew."""
        step, _, _ = self._functions()
        self._params, self._optimizer_state, value, grads = step(
            self._params, self._optimizer_state, *_arrays(batch, scale)
        )
        return float(value), list(_leaves(grads))

    def plain_gradients(self, batch: StepData, scale: float) -> list[Array]:
        """The gradients by two evaluations."""
        _, plain, _ = self._functions()
        return list(_leaves(plain(self._params, *_arrays(batch, scale))))

    def predict(self, images: Array) -> NDArray[Any]:
        """The most likely class of each image."""
        _, _, logits = self._functions()
        return np.asarray(gt.to_numpy(logits(self._params, images))).argmax(axis=1)

    def evaluations(self) -> int:
        """How often the compiled program evaluated the cost, reported by a callback from it."""
        jax.effects_barrier()
        return self._evaluations

    def _compile(self, pure: dict[str, tuple[Any, Any, Any]]) -> tuple[Any, ...]:
        program = Networks(
            gt,
            networks={name: apply for name, (apply, _, _) in pure.items()},
            states={name: state for name, (_, _, state) in pure.items()},
            count=lambda: jax.debug.callback(self._count),
        )

        def step(params: Params, state: Any, batch: Any, scale: Any) -> tuple[Any, ...]:
            value, grads = program.gradients(params, batch, scale)
            updates, state = self._optimizer.update(grads, state)
            return optax.apply_updates(params, updates), state, value, grads

        return gt.compile(step), gt.compile(program.plain_gradients), gt.compile(program.logits)

    def _functions(self) -> tuple[Any, ...]:
        assert self._compiled is not None, "start() comes first"
        return self._compiled

    def _count(self) -> None:
        self._evaluations += 1


def _functional(name: str, layers: Layers) -> tuple[Any, Any, Any]:
    module = Network(tuple(len(bias) for _, bias in layers), ends_in_relu=name == "features")
    dense = {
        f"Dense_{i}": {"kernel": gt.asarray(matrix), "bias": gt.asarray(bias)}
        for i, (matrix, bias) in enumerate(layers)
    }
    apply, params, state = gt.functionalize(module, variables={"params": dense})
    return apply, params, state


def _arrays(batch: StepData, scale: float) -> tuple[tuple[Any, ...], Any]:
    return (batch.source, batch.labels, batch.target), np.asarray(scale)


def _leaves(grads: Params) -> Iterator[Array]:
    """Each layer's matrix as (in, out), then its bias."""
    for network in ("features", "labels", "domain"):
        for _, layer in sorted(_dense(grads[network]).items()):
            yield np.asarray(layer["kernel"])
            yield np.asarray(layer["bias"])


def _dense(tree: Any) -> dict[str, Any]:
    return dict(tree.get("params", tree))
