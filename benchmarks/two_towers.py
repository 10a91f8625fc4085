"""Compares `chunked` with sentence-transformers' cached loss in several precisions.

The step is the training step of example u06: MiniLM encodes queries and documents, and the loss is
the symmetric InfoNCE of the whole batch. In PyTorch the step runs under `torch.autocast` with its
default cache of cast weights, and float16 uses a GradScaler. In JAX the float32 parameters are cast
inside the encoder. In both frameworks the encoder runs without dropout, and the loss is computed
from the embeddings in float32.
"""

from __future__ import annotations

import datetime
import math
import os
import pathlib
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from importlib.util import find_spec
from typing import Any

import jax
import numpy as np
import torch
from chunked import compiled, one_thread, seconds, table

import gradtools.jax as gj
import gradtools.torch as gt
from tests.support.live_bytes import peak_bytes

one_thread()  # before the imported examples set XLA_FLAGS
HERE = pathlib.Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "examples"))

import minilm  # noqa: E402 - in examples/
from common import difference  # noqa: E402
from u06_contrastive_retrieval import LENGTH, SCALE, by_layer, contrastive, pairs  # noqa: E402

ROUNDS = 2
BATCH, CHUNK = 32, 4
PLAIN, OURS = "plain, the whole batch", "gt.chunked"
PEER = "sentence-transformers' cached loss"
AFTER = ", backward outside of autocast"
DTYPES = torch.float32, torch.bfloat16, torch.float16
SCALER = 1024.0  # the scale of the loss in float16; without a scale, small gradients would be 0

Layers = dict[str, np.ndarray]


@dataclass
class Step:
    """The results and costs of one step, and a function that repeats the step."""

    run: Callable[[], Any]
    loss: float
    gradient: Layers
    peak: int
    best: float = math.inf


def batch() -> list[np.ndarray]:
    """Returns ids and mask of the queries, and ids and mask of the documents."""
    texts = pairs()
    order = np.random.default_rng(0).permutation(len(texts))[:BATCH]
    towers = (minilm.tokenized(column, LENGTH) for column in zip(*texts, strict=True))
    return [x[order] for tower in towers for x in tower]


# --- PyTorch -----------------------------------------------------------------------------


class Towers:
    """The example's module, and a training step of this module with each method."""

    def __init__(self) -> None:
        self.model, self.encode = minilm.torch_encoder()
        self.model.eval()
        self.model[0].model.embeddings.requires_grad_(False)
        self.batch = [torch.from_numpy(x) for x in batch()]
        self.chunked = gt.chunked(self.encode, CHUNK)

    def exact(self) -> tuple[float, Layers]:
        """Returns the loss and the gradient of the plain step in float64."""
        self.model.double()
        loss = self.loss(self.encode)
        loss.backward()
        found = loss.item(), self.gradient()
        self.model.float()
        self.model.zero_grad()
        return found

    def loss(self, encode: Callable[..., torch.Tensor]) -> torch.Tensor:
        """Computes InfoNCE from the embeddings of both towers, outside of autocast."""
        queries, documents = encode(*self.batch[:2]), encode(*self.batch[2:])
        with torch.autocast("cpu", enabled=False):
            log_scale = torch.tensor(math.log(SCALE))
            return contrastive(gt, log_scale, at_least_single(queries), at_least_single(documents))

    def gradient(self) -> Layers:
        """Returns the gradients that are stored in `.grad`, by layer."""
        named = self.model[0].model.encoder.named_parameters()
        return by_layer({f"encoder.{name}": p.grad.numpy() for name, p in named})

    def step(self, loss: Callable[[], torch.Tensor], dtype: torch.dtype, after: bool) -> Any:
        """Runs one step, which writes the gradient to `.grad`."""
        half = dtype is not torch.float32
        self.model.zero_grad()
        trained = [p for p in self.model.parameters() if p.requires_grad]
        scaler = torch.amp.GradScaler("cpu", SCALER, enabled=dtype is torch.float16)
        with torch.autocast("cpu", dtype if half else None, enabled=half):
            value = loss()
            if not after:
                scaler.scale(value).backward()
        if after:
            scaler.scale(value).backward()
        scaler.unscale_(torch.optim.SGD(trained, 0.0))
        return value.detach()

    def ways(self) -> dict[str, Callable[[], torch.Tensor]]:
        """Returns the loss function of each method."""
        losses = {PLAIN: partial(self.loss, self.encode), OURS: partial(self.loss, self.chunked)}
        return losses | ({PEER: self.cached_loss()} if find_spec("sentence_transformers") else {})

    def cached_loss(self) -> Callable[[], torch.Tensor]:
        """Returns a function for the cached loss of sentence-transformers in both directions."""
        from sentence_transformers.sentence_transformer import losses

        cached = losses.CachedMultipleNegativesRankingLoss(
            self.model,
            SCALE,
            similarity,
            mini_batch_size=CHUNK,
            directions=("query_to_doc", "doc_to_query"),
            partition_mode="per_direction",
        )
        ids, masks = self.batch[::2], self.batch[1::2]
        towers = zip(ids, masks, strict=True)
        features = [{"input_ids": i, "attention_mask": m} for i, m in towers]
        return lambda: cached([dict(x) for x in features], None)

    def steps(self, dtype: torch.dtype) -> Iterator[tuple[str, Step]]:
        """Yields the name and the step of each method, after two warm-up runs."""
        for after in (False, True):
            for name, loss in self.ways().items():
                if not after or (name != PLAIN and dtype is not torch.float32):
                    run = partial(self.step, loss, dtype, after)
                    value = run().item()  # chunked verifies its first recomputation
                    gradient = self.gradient()
                    yield name + AFTER * after, Step(run, value, gradient, peak_bytes(run)[0])


def at_least_single(x: torch.Tensor) -> torch.Tensor:
    return x if x.dtype is torch.float64 else x.float()


def similarity(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Returns the scores a b^T in float32, outside of autocast."""
    with torch.autocast("cpu", enabled=False):
        return a.float() @ b.float().T


# --- JAX ---------------------------------------------------------------------------------


def in_jax(dtype: str) -> Iterator[tuple[str, Step]]:
    params = jax.tree.map(gj.asarray, minilm.as_params(minilm.arrays()))
    embeddings, trained = params["embeddings"], {"layers": params["layers"]}
    apply, _, state = gj.make_functional(
        minilm.flax_encoder(), variables={"params": params}, train=False
    )

    def encode(trained: Any, ids: Any, mask: Any) -> jax.Array:
        cast = jax.tree.map(lambda x: x.astype(dtype), {"embeddings": embeddings, **trained})
        return apply(cast, state, ids, mask)[0].astype("float32")

    def loss(encode: Any, trained: Any, batch: list[Any]) -> jax.Array:
        towers = encode(trained, *batch[:2]), encode(trained, *batch[2:])
        return contrastive(gj, np.float32(math.log(SCALE)), *towers)

    ways = {PLAIN: encode, OURS: gj.chunked(encode, CHUNK, (None, 0, 0))}
    args = trained, [gj.asarray(x) for x in batch()]
    for name, way in ways.items():
        program, peak = compiled(jax.value_and_grad(partial(loss, way)), args)
        run = lambda program=program: jax.block_until_ready(program(*args))
        value, grads = run()
        yield name, Step(run, float(value), by_layer(minilm.as_arrays(grads)), peak)


# --- the table ---------------------------------------------------------------------------


def measured(towers: Towers) -> dict[tuple[str, str], dict[str, Step]]:
    """Measures the steps of each framework and precision; each round runs each step once."""
    found = {}
    for dtype in DTYPES:
        name = str(dtype).removeprefix("torch.")
        found["PyTorch", name] = dict(towers.steps(dtype))
        if dtype is not torch.float16:
            found["JAX", name] = dict(in_jax(name))
    steps = [step for group in found.values() for step in group.values()]
    for k in range(ROUNDS):
        for step in steps[k:] + steps[:k]:
            step.best = min(step.best, seconds(step.run))
    return found


def apart(a: Layers, b: Layers) -> float:
    return max(difference(x, b[layer]) for layer, x in a.items())


def rows(found: dict[tuple[str, str], dict[str, Step]], exact: Layers) -> Iterator[str]:
    for (framework, dtype), group in found.items():
        plain = group[PLAIN]
        for name, step in group.items():
            yield (
                f"| {framework} | {dtype} | {name} | {step.loss:.6f} "
                f"| {apart(step.gradient, plain.gradient):.1e} "
                f"| {apart(step.gradient, exact):.1e} "
                f"| {step.peak / 1e6:.0f} | {step.best:.2f} |"
            )


def main() -> None:
    absent = {name for backend in ("torch", "jax") for name in minilm.missing(backend)}
    if absent:
        print(f"left out: {', '.join(sorted(absent))} not installed")
        return
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    towers = Towers()
    loss, exact = towers.exact()
    found = measured(towers)
    packages = ("torch", "jax", "flax", "sentence-transformers")
    heads = ["framework", "precision", "method", "loss", "gradient error against the plain step"]
    heads += ["against float64", "peak, MB", "s"]
    lines = [
        f"# Two towers in each precision, {datetime.date.today()}, "
        f"Python {sys.version.split()[0]}, "
        + ", ".join(f"{name} {version(name)}" for name in packages),
        "",
        f"One step of examples/u06 runs MiniLM on {BATCH} queries and {BATCH} documents of "
        f"{LENGTH} tokens in chunks of {CHUNK}, without dropout, on one CPU thread. In PyTorch the "
        "whole step, including the backward pass, runs under `torch.autocast`; in some rows, only "
        "the forward pass runs under `torch.autocast`. float16 uses a GradScaler. In JAX the "
        "float32 parameters are cast in the encoder. "
        f"The loss in float64 is {loss:.6f}.",
        "",
        *table(heads),
        *rows(found, exact),
        "",
        "The error of a gradient is the largest difference divided by the largest entry of a "
        "layer, for the layer with the largest error. Gradients are compared with the gradients of "
        "two plain steps: in the same precision and framework, and in float64 in PyTorch. The "
        "peak is the memory of live storages in PyTorch, including gradients, and the temporaries "
        "of the compiled program in JAX. Times are minimum CPU seconds over "
        f"{ROUNDS} interleaved rounds.",
    ]
    text = "\n".join(lines) + "\n"
    print(text)
    (HERE / "results").mkdir(exist_ok=True)
    (HERE / "results" / "two_towers.md").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
