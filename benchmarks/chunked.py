"""Compares `chunked` with other implementations of a contrastive step: work, peak bytes, time.

The encoder has four transformer layers with dropout; half of the batch consists of queries, and the
other half of documents. For PyTorch, bytes are the peak of live storages, including gradients; for
JAX, bytes are the temporaries of the compiled program. Operations in loops are multiplied by the
trip count.
"""

from __future__ import annotations

import datetime
import importlib.util
import math
import os
import pathlib
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from importlib.metadata import version
from typing import Any

import jax
import jax.numpy as jnp
import optax
import torch
from jax.flatten_util import ravel_pytree
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

import gradtools.jax as gj
import gradtools.torch as gt

HERE = pathlib.Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

from tests.support.live_bytes import peak_bytes  # noqa: E402, not installed

ROUNDS = 9
CHUNK, COUNT, COUNTS = 32, 8, (4, 8, 16, 32)
LENGTH, WIDTH, HEADS, LAYERS, DROPOUT, SCALE = 16, 256, 8, 4, 0.1, 20.0
PLAIN, BY_HAND = "plain, the whole batch", "two passes by hand"
OURS = "gt.chunked"
ACCUMULATED = "gradient accumulation by hand"
FLAT = (PLAIN, BY_HAND, OURS)
PEER = "sentence-transformers' gradient cache"


@dataclass(frozen=True)
class Way:
    """A training step: counted flops, peak bytes, and a function that runs the step."""

    run: Callable[[], Any]
    flops: int
    peak: int


@dataclass
class Measured:
    """The rows of a table: the methods, and the seconds of each method in each round."""

    ways: dict[str, Way]
    base: str
    rounds: list[dict[str, float]] = field(default_factory=list)

    def ratios(self, name: str) -> list[float]:
        """Returns the lower quartile, the median and the upper quartile of the paired ratios."""
        return statistics.quantiles((r[name] / r[self.base] for r in self.rounds), n=4)


# --- PyTorch -----------------------------------------------------------------------------


class Encoder(torch.nn.Module):
    """Encodes each row of tokens as one vector."""

    def __init__(self) -> None:
        super().__init__()
        layer = torch.nn.TransformerEncoderLayer(WIDTH, HEADS, 4 * WIDTH, DROPOUT, batch_first=True)
        self.layers = torch.nn.TransformerEncoder(layer, LAYERS, enable_nested_tensor=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Returns the output of the last layer, averaged over the tokens."""
        return self.layers(x).mean(1)


def contrast(z: torch.Tensor) -> torch.Tensor:
    queries, documents = torch.nn.functional.normalize(z).chunk(2)
    right = torch.arange(len(queries))
    return torch.nn.functional.cross_entropy(SCALE * queries @ documents.T, right)


def with_checkpoints(net: Any, x: torch.Tensor) -> None:
    outs = [checkpoint(net, chunk, use_reentrant=False) for chunk in x.split(CHUNK)]
    contrast(torch.cat(outs)).backward()


def two_passes(net: Any, x: torch.Tensor) -> None:
    """Encodes the batch without a graph, then recomputes and differentiates each chunk."""
    chunks, outs, states = x.split(CHUNK), [], []
    with torch.no_grad():
        for chunk in chunks:
            states.append(torch.get_rng_state())
            outs.append(net(chunk))
    standing = torch.get_rng_state()
    z = torch.cat(outs).requires_grad_()
    contrast(z).backward()
    for chunk, state, ct in zip(chunks, states, z.grad.split(CHUNK), strict=True):
        torch.set_rng_state(state)
        net(chunk).backward(ct)
    torch.set_rng_state(standing)


def gradient_cache(net: Any) -> Callable[[torch.Tensor], None]:
    """Wraps the encoder for the gradient cache of sentence-transformers."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    from sentence_transformers import SentenceTransformer, losses

    class Embed(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = net

        def forward(self, features: dict[str, Any]) -> dict[str, Any]:
            return {**features, "sentence_embedding": self.net(features["x"])}

    model = SentenceTransformer(modules=[Embed()], device="cpu").train()
    loss = losses.CachedMultipleNegativesRankingLoss(model, SCALE, mini_batch_size=CHUNK)

    def step(x: torch.Tensor) -> None:
        queries, documents = x.chunk(2)
        loss([{"x": queries}, {"x": documents}], None).backward()

    return step


def in_torch(net: Any) -> dict[str, Callable[[torch.Tensor], None]]:
    """Returns steps that write the gradient to `.grad`."""
    steps = {
        PLAIN: lambda x: contrast(net(x)).backward(),
        "torch.utils.checkpoint, each chunk": partial(with_checkpoints, net),
        BY_HAND: partial(two_passes, net),
    }
    if importlib.util.find_spec("sentence_transformers"):
        steps[PEER] = gradient_cache(net)
    chunked = gt.chunked(net, CHUNK)
    return steps | {OURS: lambda x: contrast(chunked(x)).backward()}


def batch(count: int) -> torch.Tensor:
    return torch.randn(count * CHUNK, LENGTH, WIDTH, generator=torch.Generator().manual_seed(0))


def stepping(net: Any, step: Callable[[torch.Tensor], None], x: torch.Tensor) -> Callable[[], None]:
    def run() -> None:
        net.zero_grad()
        torch.manual_seed(1)
        step(x)

    return run


def torch_ways(net: Any) -> dict[str, Way]:
    """Returns the methods, and checks that methods with equal dropout masks agree."""
    ways, found = {}, {}
    for name, step in in_torch(net).items():
        run = stepping(net, step, batch(COUNT))
        with FlopCounterMode(display=False) as count:
            run()
        found[name] = torch.cat([p.grad.flatten() for p in net.parameters()])
        ways[name] = Way(run, count.get_total_flops(), peak_bytes(run)[0])
    for name, g in found.items():
        off = (g - found[BY_HAND]).norm() / g.norm()
        assert name.startswith("plain") or off < 1e-4, f"{name}: {off}"
    return ways


# --- JAX ---------------------------------------------------------------------------------


def parameters() -> dict[str, jax.Array]:
    shapes = {"qkv": (WIDTH, 3 * WIDTH), "out": (WIDTH, WIDTH)}
    shapes |= {"up": (WIDTH, 4 * WIDTH), "down": (4 * WIDTH, WIDTH)}
    biases = {name + "_bias": shape[1:] for name, shape in shapes.items()}
    norms = dict.fromkeys(("gain", "shift", "gain_2", "shift_2"), (WIDTH,))
    names = sorted(shapes | biases | norms)
    sizes = shapes | biases | norms
    keys = jax.random.split(jax.random.key(0), len(names))
    draw = lambda k, s: jax.random.normal(k, (LAYERS, *s)) / s[0] ** 0.5
    return {name: draw(key, sizes[name]) for key, name in zip(keys, names, strict=True)}


def dropout(key: Any, x: jax.Array) -> jax.Array:
    return jnp.where(jax.random.bernoulli(key, 1 - DROPOUT, x.shape), x / (1 - DROPOUT), 0)


def norm(x: jax.Array, gain: jax.Array, shift: jax.Array) -> jax.Array:
    return jax.nn.standardize(x, epsilon=1e-5) * (1 + gain) + shift


def attention(p: dict[str, jax.Array], key: Any, x: jax.Array) -> jax.Array:
    qkv = (x @ p["qkv"] + p["qkv_bias"]).reshape(*x.shape[:2], 3, HEADS, -1)
    q, k, v = (qkv[:, :, i] for i in range(3))
    weights = jax.nn.softmax(jnp.einsum("bqhd,bkhd->bhqk", q, k) / (WIDTH / HEADS) ** 0.5)
    mixed = jnp.einsum("bhqk,bkhd->bqhd", dropout(key, weights), v)
    return mixed.reshape(x.shape) @ p["out"] + p["out_bias"]


def encode(params: Any, key: Any, x: jax.Array) -> jax.Array:
    def layer(x: jax.Array, inputs: Any) -> tuple[jax.Array, None]:
        p, keys = inputs
        x = norm(x + dropout(keys[0], attention(p, keys[1], x)), p["gain"], p["shift"])
        hidden = dropout(keys[2], jax.nn.relu(x @ p["up"] + p["up_bias"]))
        x = x + dropout(keys[3], hidden @ p["down"] + p["down_bias"])
        return norm(x, p["gain_2"], p["shift_2"]), None

    return jax.lax.scan(layer, x, (params, jax.random.split(key, (LAYERS, 4))))[0].mean(1)


def jax_contrast(z: jax.Array) -> jax.Array:
    queries, documents = jnp.split(z / jnp.linalg.norm(z, axis=1, keepdims=True), 2)
    return -jnp.diagonal(jax.nn.log_softmax(SCALE * queries @ documents.T)).mean()


def jax_separable(z: jax.Array) -> jax.Array:
    return (z**2).mean()


def numbered(key: Any, x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns the key and the rows of each chunk."""
    chunks = x.reshape(-1, CHUNK, *x.shape[1:])
    return jax.vmap(lambda i: jax.random.fold_in(key, i))(jnp.arange(len(chunks))), chunks


def with_map(params: Any, key: Any, x: jax.Array) -> jax.Array:
    again = jax.checkpoint(encode)
    z = jax.lax.map(lambda chunk: again(params, *chunk), numbered(key, x))
    return z.reshape(-1, WIDTH)


def two_scans(params: Any, key: Any, x: jax.Array) -> Any:
    chunks = numbered(key, x)
    z = jax.lax.map(lambda chunk: encode(params, *chunk), chunks)
    value, cts = jax.value_and_grad(lambda z: jax_contrast(z.reshape(-1, WIDTH)))(z)

    def back(total: Any, inputs: Any) -> Any:
        chunk, ct = inputs
        (grads,) = jax.vjp(lambda p: encode(p, *chunk), params)[1](ct)
        return jax.tree.map(jnp.add, total, grads), None

    return value, jax.lax.scan(back, jax.tree.map(jnp.zeros_like, params), (chunks, cts))[0]


def with_optax(f: Callable[..., Any], params: Any, key: Any, x: jax.Array) -> jax.Array:
    """Evaluates f with `optax.microbatch`, in which chunk i of n contains the rows i::n."""
    once = lambda params, rows, x: f(params, jax.random.fold_in(key, rows[0]), x)
    joined = optax.microbatching.AccumulationType.CONCAT
    return optax.microbatch(once, (1, 2), CHUNK, joined)(params, jnp.arange(len(x)), x)


def in_jax() -> dict[str, Callable[..., Any]]:
    """Returns functions that map parameters, key and batch to the value and the gradient."""

    def of(f: Callable[..., Any]) -> Callable[..., Any]:
        return jax.value_and_grad(lambda *args: jax_contrast(f(*args)))

    axes = (None, None, 0)
    return {
        PLAIN: of(encode),
        "lax.map of jax.checkpoint": of(with_map),
        BY_HAND: two_scans,
        "optax.microbatch, outputs joined": of(partial(with_optax, encode)),
        "optax.microbatch of jax.checkpoint": of(partial(with_optax, jax.checkpoint(encode))),
        OURS: of(gj.chunked(encode, CHUNK, in_axes=axes, key_argnums=1)),
    }


def separable_in_jax() -> dict[str, Callable[..., Any]]:
    both = jax.value_and_grad(lambda *args: jax_separable(encode(*args)))

    def by_hand(params: Any, key: Any, x: jax.Array) -> Any:
        chunks = numbered(key, x)

        def add(total: Any, chunk: Any) -> Any:
            return jax.tree.map(jnp.add, total, both(params, *chunk)), None

        zero = jnp.zeros(()), jax.tree.map(jnp.zeros_like, params)
        total, _ = jax.lax.scan(add, zero, chunks)
        return jax.tree.map(lambda x: x / len(chunks[1]), total)

    def with_optax(params: Any, key: Any, x: jax.Array) -> Any:
        once = lambda params, rows, x: both(params, jax.random.fold_in(key, rows[0]), x)
        mean = optax.microbatching.AccumulationType.MEAN
        return optax.microbatch(once, (1, 2), CHUNK, mean)(params, jnp.arange(len(x)), x)

    def ours(params: Any, key: Any, x: jax.Array) -> Any:
        loss = lambda p, rows, x: jax_separable(encode(p, jax.random.fold_in(key, rows[0]), x))
        numbers = jnp.arange(len(x)) // CHUNK
        return gj.microbatched_value_and_grad(loss, CHUNK)(params, numbers, x)

    return {
        ACCUMULATED: by_hand,
        "optax.microbatch": with_optax,
        "gt.microbatched_value_and_grad": ours,
    }


def arguments(count: int) -> tuple[Any, Any, jax.Array]:
    return parameters(), jax.random.key(1, impl="rbg"), jnp.asarray(batch(count).numpy())


def compiled(fun: Callable[..., Any], args: Any) -> tuple[Any, int]:
    program = jax.jit(fun).lower(*args).compile()
    return program, program.memory_analysis().temp_size_in_bytes


def jax_ways(funs: dict[str, Any], base: str) -> dict[str, Way]:
    """Returns the methods, and checks that methods with equal dropout masks agree."""
    args, ways, found = arguments(COUNT), {}, {}
    for name, fun in funs.items():
        program, peak = compiled(fun, args)
        run = lambda program=program: jax.block_until_ready(program(*args))
        ways[name] = Way(run, flops_of(jax.make_jaxpr(fun)(*args).jaxpr), peak)
        found[name] = ravel_pytree(run())[0]
    for name, g in found.items():
        off = jnp.linalg.norm(g - found[base]) / jnp.linalg.norm(g)
        assert name.startswith(("plain", "optax")) or off < 1e-4, f"{name}: {off}"
    return ways


def flops_of(jaxpr: Any) -> int:
    """Counts flops of matrix products as PyTorch does; loop bodies count once per iteration."""
    total = 0
    for eqn in jaxpr.eqns:
        assert eqn.primitive.name != "while", "a loop with an unknown trip count"
        if eqn.primitive.name == "dot_general":
            (contracted, _), _ = eqn.params["dimension_numbers"]
            shape = eqn.invars[0].aval.shape
            total += 2 * eqn.outvars[0].aval.size * math.prod(shape[i] for i in contracted)
        trips = eqn.params.get("length", 1) if eqn.primitive.name == "scan" else 1
        for inner in jax.tree.leaves(list(eqn.params.values()), is_leaf=is_jaxpr):
            if is_jaxpr(inner):
                total += trips * flops_of(getattr(inner, "jaxpr", inner))
    return total


def is_jaxpr(x: Any) -> bool:
    return hasattr(getattr(x, "jaxpr", x), "eqns")


# --- time, tables and the picture --------------------------------------------------------


def timed(ways: dict[str, Way], base: str) -> Measured:
    """Runs every method once per round, in an order that rotates between rounds."""
    names, found = list(ways), Measured(ways, base)
    for k in range(ROUNDS):
        first = k % len(names)
        found.rounds.append({n: seconds(ways[n].run) for n in names[first:] + names[:first]})
    return found


def seconds(run: Callable[[], Any]) -> float:
    """Returns the CPU seconds of this process during a run."""
    start = time.process_time()
    run()
    return time.process_time() - start


def rows(framework: str, measured: Measured) -> Iterator[str]:
    for name, way in measured.ways.items():
        low, middle, high = measured.ratios(name)
        median = statistics.median(r[name] for r in measured.rounds)
        yield (
            f"| {framework} | {name} | {way.flops / 1e9:.1f} | {way.peak / 1e6:.1f} | "
            f"{median:.2f} | {middle:.3f} | {low:.3f} to {high:.3f} |"
        )
    if framework == "PyTorch" and measured.base == BY_HAND and PEER not in measured.ways:
        yield f"| {framework} | {PEER} | not installed | | | | |"


def peaks(net: Any, measured: dict[str, Measured]) -> dict[str, list[int]]:
    """Returns the peak bytes of some methods for each number of chunks in COUNTS."""
    steps, funs = in_torch(net), in_jax()
    peak = {
        "PyTorch": lambda name, n: peak_bytes(stepping(net, steps[name], batch(n)))[0],
        "JAX": lambda name, n: compiled(funs[name], arguments(n))[1],
    }
    return {
        f"{framework}, {name}": [
            found.ways[name].peak if n == COUNT else peak[framework](name, n) for n in COUNTS
        ]
        for framework, found in measured.items()
        for name in FLAT
    }


def picture(over: dict[str, list[int]], measured: dict[str, Measured]) -> None:
    import matplotlib

    matplotlib.use("svg")
    import matplotlib.pyplot as plt

    plt.rcParams |= {"svg.hashsalt": "chunked", "font.size": 9}
    figure, axes = plt.subplots(2, 2, figsize=(11, 8.5), layout="constrained")
    for (left, right), (framework, found) in zip(axes, measured.items(), strict=True):
        shapes = iter("osvDP^X*p")
        colours = iter(["tab:blue", "tab:orange", "tab:green", "tab:purple", "tab:brown"])
        for name, way in found.ways.items():
            colour = "tab:red" if name in OURS else next(colours)
            style = {"marker": next(shapes), "color": colour}
            if f"{framework}, {name}" in over:
                megabytes = [x / 1e6 for x in over[f"{framework}, {name}"]]
                left.plot(COUNTS, megabytes, label=name, alpha=0.8, **style)
            low, middle, high = found.ratios(name)
            bars = [[middle - low], [high - middle]]
            right.errorbar(way.peak / 1e6, middle, bars, label=name, linestyle="", **style)
        left.set(xscale="log", yscale="log", xlabel=f"chunks of {CHUNK}", ylabel="peak, MB")
        left.set_xticks(COUNTS, map(str, COUNTS))
        left.set_xticks([], minor=True)
        left.set_title(f"{framework}: memory over the number of chunks")
        right.set(xscale="log", xlabel="peak, MB", ylabel=f"time over {BY_HAND}")
        right.axhline(1, color="grey", linewidth=0.5)
        right.set_title(f"{framework}: time against memory, {COUNT} chunks")
        left.legend(fontsize=7)
        right.legend(fontsize=7)
    figure.savefig(HERE / "results" / "chunked.svg", metadata={"Date": None})


def table(heads: Sequence[str]) -> list[str]:
    return [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]


def one_thread() -> None:
    torch.set_num_threads(1)
    flags = "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1"
    os.environ["XLA_FLAGS"] = (
        f"{os.environ.get('XLA_FLAGS', '')} {flags}"  # JAX reads XLA_FLAGS at first use
    )


def main() -> None:
    one_thread()
    torch.manual_seed(0)
    net = Encoder()
    measured = {
        "PyTorch": timed(torch_ways(net), BY_HAND),
        "JAX": timed(jax_ways(in_jax(), BY_HAND), BY_HAND),
    }
    alone = timed(jax_ways(separable_in_jax(), ACCUMULATED), ACCUMULATED)
    over = peaks(net, measured)
    packages = ["torch", "jax", "optax"]
    packages += ["sentence-transformers"] * (PEER in measured["PyTorch"].ways)
    heads = ["framework", "method", "GFLOP", "peak, MB", "s", f"times {BY_HAND}", "quartiles"]
    lines = [
        f"# Chunked gradients, {datetime.date.today()}, Python {sys.version.split()[0]}, "
        + ", ".join(f"{name} {version(name)}" for name in packages),
        "",
        f"One step of contrastive learning runs {LAYERS} transformer layers with dropout "
        f"{DROPOUT} on arrays of {COUNT * CHUNK} x {LENGTH} x {WIDTH} in float32, in chunks of "
        f"{CHUNK}, on one CPU thread. Times are medians of CPU seconds over {ROUNDS} rounds. Each "
        "round runs each method once, in an order that rotates, and ratios are computed within a "
        "round. The peak is the memory of live storages in PyTorch, including gradients, and the "
        "temporaries of the compiled program in JAX.",
        "",
        *table(heads),
        *(line for name, found in measured.items() for line in rows(name, found)),
        "",
        "optax.microbatch does not recompute f: with joined outputs (CONCAT) it keeps every graph, "
        "unless f is wrapped in `jax.checkpoint`. Chunk i of optax contains the rows i::n.",
        "",
        "## A loss that is a mean over examples",
        "",
        *table([*heads[:5], f"times {ACCUMULATED}", heads[6]]),
        *rows("JAX", alone),
        "",
        "## Peak MB by number of chunks",
        "",
        *table(["method", *(str(count) for count in COUNTS)]),
        *(f"| {name} | {' | '.join(f'{x / 1e6:.1f}' for x in xs)} |" for name, xs in over.items()),
        "",
        "![memory and time](chunked.svg)",
    ]
    text = "\n".join(lines) + "\n"
    print(text)
    (HERE / "results").mkdir(exist_ok=True)
    (HERE / "results" / "chunked.md").write_text(text, encoding="utf-8")
    picture(over, measured)


if __name__ == "__main__":
    main()
