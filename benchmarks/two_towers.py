"""The step of example u06 in each precision: `chunked` beside sentence-transformers' cached loss.

MiniLM is called for two towers, queries and documents, and InfoNCE both ways compares the whole
batch; the network, the pairs and the loss are the example's. In PyTorch the step runs under
`torch.autocast` as it is by default, its cache of cast weights on, in float16 with a GradScaler; in
JAX the float32 parameters are cast inside of f. The loss is float32 in both, from the embeddings
on; dropout is off.
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

one_thread()  # before the examples choose XLA's flags
HERE = pathlib.Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "examples"))

import minilm  # noqa: E402 - the examples' own
from common import difference  # noqa: E402
from u06_contrastive_retrieval import LENGTH, SCALE, by_layer, contrastive, pairs  # noqa: E402

ROUNDS = 2
BATCH, CHUNK = 32, 4
PLAIN, OURS = "plain, the whole batch", "gt.chunked"
PEER = "sentence-transformers' cached loss"
AFTER = ", backward after the region"
DTYPES = torch.float32, torch.bfloat16, torch.float16
SCALER = 1024.0  # what the loss is multiplied by in float16, where small gradients would be 0

Layers = dict[str, np.ndarray]


@dataclass
class Step:
    """What one step gave, what it needed and how it is run again."""

    run: Callable[[], Any]
    loss: float
    gradient: Layers
    peak: int
    best: float = math.inf


def batch() -> list[np.ndarray]:
    """Ids and mask of the queries, ids and mask of the documents."""
    texts = pairs()
    order = np.random.default_rng(0).permutation(len(texts))[:BATCH]
    towers = (minilm.tokenized(column, LENGTH) for column in zip(*texts, strict=True))
    return [x[order] for tower in towers for x in tower]


# --- PyTorch -----------------------------------------------------------------------------


class Towers:
    """The example's module, and its step in the ways that are compared."""

    def __init__(self) -> None:
        self.model, self.encode = minilm.torch_encoder()
        self.model.eval()
        self.model[0].model.embeddings.requires_grad_(False)
        self.batch = [torch.from_numpy(x) for x in batch()]
        self.chunked = gt.chunked(self.encode, CHUNK)

    def exact(self) -> tuple[float, Layers]:
        """The loss and the gradient of the plain step in float64."""
        self.model.double()
        loss = self.loss(self.encode)
        loss.backward()
        found = loss.item(), self.gradient()
        self.model.float()
        self.model.zero_grad()
        return found

    def loss(self, encode: Callable[..., torch.Tensor]) -> torch.Tensor:
        """InfoNCE of both towers' embeddings, outside of any autocast."""
        queries, documents = encode(*self.batch[:2]), encode(*self.batch[2:])
        with torch.autocast("cpu", enabled=False):
            log_scale = torch.tensor(math.log(SCALE))
            return contrastive(gt, log_scale, at_least_single(queries), at_least_single(documents))

    def gradient(self) -> Layers:
        """What stands in `.grad`."""
        named = self.model[0].model.encoder.named_parameters()
        return by_layer({f"encoder.{name}": p.grad.numpy() for name, p in named})

    def step(self, loss: Callable[[], torch.Tensor], dtype: torch.dtype, after: bool) -> Any:
        """One step that leaves the gradient in `.grad`."""
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
        """Each way's loss."""
        losses = {PLAIN: partial(self.loss, self.encode), OURS: partial(self.loss, self.chunked)}
        return losses | ({PEER: self.cached_loss()} if find_spec("sentence_transformers") else {})

    def cached_loss(self) -> Callable[[], torch.Tensor]:
        """Theirs, in both directions as ours is."""
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
        """Each way's step, once it has run twice."""
        for after in (False, True):
            for name, loss in self.ways().items():
                if not after or (name != PLAIN and dtype is not torch.float32):
                    run = partial(self.step, loss, dtype, after)
                    value = run().item()  # here chunked verifies its replay
                    gradient = self.gradient()
                    yield name + AFTER * after, Step(run, value, gradient, peak_bytes(run)[0])


def at_least_single(x: torch.Tensor) -> torch.Tensor:
    return x if x.dtype is torch.float64 else x.float()


def similarity(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Of rows of length 1, in float32."""
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
    """The steps of each framework and precision; all take turns in each round."""
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
    heads = ["framework", "precision", "way", "loss", "gradient from the plain step's"]
    heads += ["from float64's", "peak, MB", "s"]
    lines = [
        f"# Two towers in each precision, {datetime.date.today()}, "
        f"Python {sys.version.split()[0]}, "
        + ", ".join(f"{name} {version(name)}" for name in packages),
        "",
        f"One step of examples/u06: MiniLM on {BATCH} queries and {BATCH} documents of {LENGTH} "
        f"tokens, chunks of {CHUNK}, dropout off, one CPU thread. In PyTorch the whole step is in "
        "one region of `torch.autocast`, backward pass and all, or where it says so the loss alone "
        "is; float16 has a GradScaler. In JAX the float32 parameters are cast inside of f. The "
        f"loss in float64 is {loss:.6f}.",
        "",
        *table(heads),
        *rows(found, exact),
        "",
        "Gradients: layer by layer the largest difference over the largest entry, of the layers "
        "the worst; beside the plain step of the same precision and framework, and beside the "
        "plain step in float64 in PyTorch. Peak: in PyTorch live storages, gradients among them; "
        "in JAX what the compiled program needs beside inputs and outputs. Seconds of this "
        f"process's CPU time, the best of {ROUNDS} rounds in which all rows take turns.",
    ]
    text = "\n".join(lines) + "\n"
    print(text)
    (HERE / "results").mkdir(exist_ok=True)
    (HERE / "results" / "two_towers.md").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
