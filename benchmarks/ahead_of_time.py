"""Compiles the JAX operators ahead of time for TPU and GPU, without a device.

    make tpu     # for a TPU v5e
    make cuda    # for an H100

XLA reports the bytes of temporaries and, on TPU, the peak memory including arguments and results.
For TPU, XLA also counts floating-point operations; the body of a loop is counted once. Temporaries
that fit into the fast memory of a TPU core are not counted.
"""

from __future__ import annotations

import datetime
import math
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cache, partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import topologies
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

sys.path.insert(0, str(Path(__file__).parents[1]))

import gradtools.jax as gt
from benchmarks.cost_jax import HAND, OURS, cases

RESULTS = Path(__file__).parent / "results"
TPU, CUDA = "tpu", "cuda"
DTYPES = (jnp.float32, jnp.bfloat16)
# The device description that XLA's CUDA compiler needs, for an H100 with 80 GB.
H100 = """
gpu_device_info {
  threads_per_block_limit: 1024 threads_per_warp: 32 shared_memory_per_block: 49152
  shared_memory_per_core: 233472 threads_per_core_limit: 2048 core_count: 132 fpus_per_core: 128
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  memory_bandwidth: 3352320000000 l2_cache_size: 52428800 clock_rate_ghz: 1.98
  device_memory_size: 84929347584 shared_memory_per_block_optin: 232448
  cuda_compute_capability { major: 9 } registers_per_core_limit: 65536
  registers_per_block_limit: 65536
}
platform_name: "CUDA" dnn_version_info { major: 9 minor: 7 }
runtime_version { major: 12 minor: 8 patch: 0 } device_description_str: "NVIDIA H100 80GB HBM3"
"""
NAMES = {TPU: "TPU v5e", CUDA: "H100"}


# --- programs, ahead of time -----------------------------------------------------------------


@dataclass(frozen=True)
class Cost:
    """The costs of one compiled program.

    Attributes:
        flops: Floating-point operations, and transcendental operations; None if XLA does not
            report them.
        temporaries: Bytes of temporaries, without arguments and results.
        peak: The peak memory in bytes; None if XLA does not report it.
        operations: The number of operations of each kind, without the bodies of loops and fusions.
        moves: The number of collectives of each kind, including the bodies of loops.
    """

    flops: tuple[float, float] | None
    temporaries: int
    peak: int | None
    operations: Counter[str]
    moves: Counter[str]


@cache
def devices(platform: str, board: str = "2x2") -> tuple[Any, ...]:
    """Returns the abstract devices of a topology such as "2x2", for which XLA compiles programs."""
    if platform == TPU:
        described = topologies.get_topology_desc(f"v5e:{board}", platform=TPU)
    else:
        count = math.prod(map(int, board.split("x")))
        described = topologies.get_topology_desc(
            platform=CUDA, target_config=H100, topology=f"1x1x{count}"
        )
    return tuple(described.devices)


@dataclass(frozen=True)
class Target:
    """The platform (TPU or CUDA) for which programs are compiled, and the arrays' dtype."""

    platform: str
    dtype: Any = jnp.float32

    def array(self, *shape: int, sharding: Any = None) -> jax.ShapeDtypeStruct:
        """Returns an abstract array with the given sharding, by default on the first device."""
        here = sharding or SingleDeviceSharding(devices(self.platform)[0])
        return jax.ShapeDtypeStruct(shape, self.dtype, sharding=here)

    def like(self, x: Any) -> jax.ShapeDtypeStruct:
        """Returns an abstract array with the shape and dtype of x."""
        here = SingleDeviceSharding(devices(self.platform)[0])
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=here)

    def mesh(self, kind: AxisType, board: str) -> Mesh:
        """Returns a mesh with one axis over the devices of a topology."""
        return Mesh(np.asarray(devices(self.platform, board)), ("d",), axis_types=(kind,))


def cost(f: Callable[..., Any], *shapes: Any) -> Cost:
    """Compiles f for the devices of its arguments, and returns the costs of the program."""
    program = jax.jit(f).lower(*shapes).compile()
    counts, memory = program.cost_analysis(), program.memory_analysis()
    text, operation = program.as_text(), r" ([a-z][a-z0-9-]*?)(?:-start)?\("
    between = {"all-gather", "all-to-all", "collective-permute", "all-reduce", "reduce-scatter"}
    return Cost(
        counts and (counts.get("flops", 0.0), counts.get("transcendentals", 0.0)),
        memory.temp_size_in_bytes,
        memory.peak_memory_in_bytes if counts else None,
        Counter(re.findall(operation, text.partition("\nENTRY")[2])),
        Counter(name for name in re.findall(operation, text) if name in between),
    )


# --- every operator --------------------------------------------------------------------------

ROWS, WIDTH = 1024, 512


NOT_COMPILED = {CUDA: ("host_function",), TPU: ()}
"""CUDA's lowering of a callback requires a device (jax#23971)."""


def operators(platform: str) -> list[str]:
    return [name for name in cases() if name not in NOT_COMPILED[platform]]


def operator(target: Target, name: str) -> dict[str, Cost]:
    """Returns the costs of the operator and of the hand-written code."""
    shapes = ((WIDTH, WIDTH), (WIDTH, WIDTH), (ROWS, WIDTH), (ROWS, WIDTH), (WIDTH,))
    arrays = [target.array(*shape) for shape in shapes]
    return {way: cost(cases()[name][way], *arrays) for way in (OURS, HAND)}


# --- batches, depths, all pairs --------------------------------------------------------------

LAYERS, FEATURES, CHUNK = 16, 256, 512


def encode(layers: Any, x: Any) -> Any:
    return jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, layers)[0]


def batch_loss(encode: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a loss that is not a sum over examples, as a function of layers and batch."""

    def loss(layers: Any, x: Any) -> Any:
        z = encode(layers, x)
        return ((z**2).sum(0) * z).mean()

    return loss


def chunks(target: Target, count: int) -> dict[str, Cost]:
    """Returns the costs of a step for one chunk, and of two methods for `count` chunks."""
    layers = target.array(LAYERS, FEATURES, FEATURES)
    x, one = (target.array(n * CHUNK, FEATURES) for n in (count, 1))
    in_chunks = gt.chunked(encode, CHUNK, in_axes=(None, 0))
    return {
        "one chunk alone": cost(jax.grad(batch_loss(encode)), layers, one),
        "chunked": cost(jax.grad(batch_loss(in_chunks)), layers, x),
        "at once": cost(jax.grad(batch_loss(encode)), layers, x),
    }


def depth(target: Target, layers: int) -> dict[str, Cost]:
    """Returns the costs of `mixed_partial` and of double backward through `layers` layers."""
    f = lambda y, g: ((y * g) ** 2).sum()
    w = target.array(layers, FEATURES, FEATURES)
    rows = [target.array(CHUNK, FEATURES) for _ in range(3)]

    def double_backward(w: Any, y: Any, z: Any, u: Any) -> Any:
        first = lambda y: jax.grad(lambda z: f(y, encode(w, z)))(z)
        return jax.grad(lambda y: (first(y) * u).sum())(y)

    def mixed(w: Any, y: Any, z: Any, u: Any) -> Any:
        return gt.mixed_partial(f, partial(encode, w), y, z, u)

    return {
        "mixed_partial": cost(mixed, w, *rows),
        "double backward": cost(double_backward, w, *rows),
    }


USES = 64


def uses(target: Target, layers: int) -> dict[str, Cost]:
    """Returns the costs of two methods that differentiate 64 df/dz_i with respect to y."""
    w = target.array(layers, FEATURES, FEATURES)
    y, zs = target.array(FEATURES), target.array(USES, 128, FEATURES)

    def step(freeze: Callable[..., Any]) -> Callable[..., Any]:
        def run(w: Any, y: Any, zs: Any) -> Any:
            G = freeze(partial(encode, w))
            slope = lambda y: lambda z: gt.grad(lambda z: jnp.tanh(G(z) @ y).sum())(z)
            return gt.grad(lambda y: (jax.lax.map(slope(y), zs) ** 2).mean())(y)

        return run

    plain = step(lambda G: G)
    return {"frozen": cost(step(gt.frozen), w, y, zs), "double backward": cost(plain, w, y, zs)}


def contrastive(
    a: Any, b: Any, size: int = CHUNK, gather: Callable[[Any], Any] | None = None
) -> Any:
    """Computes the symmetric contrastive loss in chunks of rows of the scores.

    size: The number of rows in a chunk. gather: Replicates the rows of a sharded array on every
    device, so that each chunk contains rows of every device.
    """

    def losses(rows: Any, own: Any, others: Any) -> Any:
        scores = (rows @ others.T).astype(jnp.float32)
        return jax.nn.logsumexp(scores, 1) - (rows * own).sum(1).astype(jnp.float32)

    each = gt.chunked(losses, size, in_axes=(0, 0, None), interleaved=gather is not None)
    every = gather or (lambda rows: rows)
    return (each(a, b, every(b)) + each(b, a, every(a))).mean() / 2


def contrast(target: Target, batch: int) -> dict[str, Cost]:
    """Returns the costs of three methods for a contrastive step with an encoder of 16 layers."""

    def dense(a: Any, b: Any) -> Any:
        scores = (a @ b.T).astype(jnp.float32)
        rows, columns = (jax.nn.logsumexp(scores, axis) for axis in (1, 0))
        return (rows / 2 + columns / 2 - jnp.diag(scores)).mean()

    def step(encode: Callable[..., Any], compare: Callable[..., Any]) -> Callable[..., Any]:
        return jax.grad(lambda w, x, y: compare(encode(w, x), encode(w, y)))

    in_chunks = gt.chunked(encode, CHUNK, in_axes=(None, 0))
    ways = {
        "at once": step(encode, dense),
        "encoder chunked": step(in_chunks, dense),
        "encoder and loss chunked": step(in_chunks, contrastive),
    }
    w = target.array(LAYERS, FEATURES, FEATURES)
    rows = [target.array(batch, FEATURES) for _ in range(2)]
    return {way: cost(f, w, *rows) for way, f in ways.items()}


# --- a mesh ----------------------------------------------------------------------------------


def by_hand(f: Callable[..., Any], size: int, **_: Any) -> Callable[..., Any]:
    """Returns a hand-written `chunked(f, size, in_axes=(None, 0))` for use inside of shard_map."""

    def forward(w: Any, x: Any) -> Any:
        outs = jax.lax.map(partial(f, w), x.reshape(-1, size, *x.shape[1:]))
        return outs.reshape(x.shape), (w, x)

    def backward(saved: Any, ct: Any) -> Any:
        w, x = saved

        def add(total: Any, chunk: Any) -> Any:
            of_w, of_x = jax.vjp(f, w, chunk[0])[1](chunk[1])
            return total + of_w, of_x

        pairs = tuple(z.reshape(-1, size, *z.shape[1:]) for z in (x, ct))
        total, of_x = jax.lax.scan(add, jnp.zeros_like(w), pairs)
        return total, of_x.reshape(x.shape)

    chunked = jax.custom_vjp(lambda w, x: forward(w, x)[0])
    chunked.defvjp(forward, backward)
    return chunked


def meshes(target: Target, kind: str, board: str, chunked: Callable[..., Any] = gt.chunked) -> Cost:
    """Returns the cost on one device of a contrastive step with 2,048 rows on each device.

    kind: ``shard_map`` (features are gathered over a named axis), or ``Explicit`` or ``Auto`` axes.
    chunked: The function that applies the encoder in chunks.
    """
    grid = target.mesh(AxisType.Explicit if kind == "Explicit" else AxisType.Auto, board)
    rows = 4 * CHUNK * grid.size
    shared, split = (NamedSharding(grid, PartitionSpec(*axes)) for axes in ((), ("d",)))
    w = target.array(LAYERS, FEATURES, FEATURES, sharding=shared)
    x, y = (target.array(rows, FEATURES, sharding=split) for _ in range(2))
    size = CHUNK if kind == "shard_map" else CHUNK * grid.size
    in_chunks = chunked(encode, size, in_axes=(None, 0), interleaved=True)

    gather = jax.sharding.reshard if kind == "Explicit" else jax.lax.with_sharding_constraint

    def loss(w: Any, x: Any, y: Any) -> Any:
        features = in_chunks(w, x), in_chunks(w, y)
        return contrastive(*features, size, lambda rows: gather(rows, PartitionSpec()))

    def on_each(w: Any, x: Any, y: Any) -> Any:
        gathered = lambda w: contrastive(*(gt.all_gather(in_chunks(w, z), "d") for z in (x, y)))
        return jax.lax.pmean(jax.grad(gathered)(jax.lax.pcast(w, ("d",), to="varying")), "d")

    if kind == "shard_map":
        specs = (PartitionSpec(), PartitionSpec("d"), PartitionSpec("d"))
        f = jax.shard_map(on_each, mesh=grid, in_specs=specs, out_specs=PartitionSpec())
        return cost(f, w, x, y)
    with jax.set_mesh(grid):
        return cost(jax.grad(loss), w, x, y)


# --- the tables ------------------------------------------------------------------------------

COUNTS, DEPTHS, BATCHES, BOARDS = (4, 8, 16, 32), (8, 32, 128), (4096, 16384), ("2x2", "4x4")
KINDS = ("shard_map", "Explicit", "Auto")


def main(platform: str) -> None:
    target = Target(platform)
    where = "jaxlib, libtpu" if platform == TPU else "jaxlib, jax-cuda12-plugin"
    versions = ", ".join(f"{name} {version(name)}" for name in where.split(", "))
    text = "\n".join(
        [
            f"# Compiled for {NAMES[platform]} ahead of time, {datetime.date.today()}, {versions}",
            "",
            "Memory is the size of temporaries in MB, without arguments and results"
            + ("; the peak memory is in parentheses." if platform == TPU else "."),
            *_operators(platform),
            *_section(
                f"A gradient over chunks of {CHUNK} rows, {LAYERS} layers of width {FEATURES}",
                "chunks",
                ((count, chunks(target, count)) for count in COUNTS),
            ),
            *_section(
                "A mixed partial through G", "layers", ((n, depth(target, n)) for n in DEPTHS)
            ),
            *_section(
                f"The derivative with respect to y of df/dz at {USES} z_i",
                "layers of G",
                ((n, uses(target, n)) for n in DEPTHS),
            ),
            *_section(
                f"A contrastive gradient, encoder of {LAYERS} layers of width {FEATURES}",
                "batch",
                ((n, contrast(target, n)) for n in BATCHES),
            ),
            *_meshes(target),
        ]
    )
    print(text)
    (RESULTS / f"ahead_of_time_{platform}.md").write_text(text + "\n", encoding="utf-8")


def _size(cost: Cost) -> str:
    peak = "" if cost.peak is None else f" ({cost.peak / 1e6:.1f})"
    return f"{cost.temporaries / 1e6:.1f}{peak}"


def _section(title: str, by: str, rows: Iterable[tuple[int, dict[str, Cost]]]) -> Iterator[str]:
    for k, (count, ways) in enumerate(rows):
        if not k:
            yield from ("", f"## {title}, float32", "", f"| {by} | {' | '.join(ways)} |")
            yield "|" + "---|" * (1 + len(ways))
        yield f"| {count} | {' | '.join(map(_size, ways.values()))} |"


def _operators(platform: str) -> Iterator[str]:
    yield from ("", f"## Operators and hand-written code, {ROWS} x {WIDTH}", "")
    yield "| | " + " | ".join(f"{jnp.dtype(d).name}" for d in DTYPES) + " |"
    yield "|" + "---|" * (1 + len(DTYPES))
    for name in operators(platform):
        cells = []
        for dtype in DTYPES:
            ways = operator(Target(platform, dtype), name)
            ours, hand = (_counted(ways[way]) for way in (OURS, HAND))
            cells.append(f"{ours}; {'the same by hand' if ours == hand else f'by hand {hand}'}")
        yield f"| {name} | {' | '.join(cells)} |"


def _counted(cost: Cost) -> str:
    if cost.flops is None:
        return f"{cost.operations.total()} operations, {_size(cost)}"
    return f"{cost.flops[0] / 1e6:.1f} Mflop, {_size(cost)}"


def _meshes(target: Target) -> Iterator[str]:
    yield from ("", "## A contrastive gradient over devices, 2,048 rows on each, float32", "")
    yield from ("| devices | axes | memory of one device, MB | collectives |", "|---|---|---|---|")
    for board in BOARDS:
        count = len(devices(target.platform, board))
        for kind in KINDS:
            found = meshes(target, kind, board)
            moves = ", ".join(f"{n} {name}" for name, n in sorted(found.moves.items()))
            yield f"| {count} | {kind} | {_size(found)} | {moves} |"


if __name__ == "__main__":
    main(*sys.argv[1:])
