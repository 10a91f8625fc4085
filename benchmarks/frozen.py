"""Compares methods for second derivatives through a frozen network: work, peak bytes, time.

The programs compute dg/dy of a loss g(df/dz_1, ..., df/dz_N) for f(y, G(z_i)). G is a dense
network, a convolutional decoder or a transformer. For PyTorch, bytes are the peak of live storages;
for JAX, bytes are the temporaries of the compiled program, with the layers in a scan and the z_i in
`jax.lax.map`. Operations in loops are multiplied by the trip count. In these networks, even a few
layers take several milliseconds; frozen_sizes.py measures smaller networks.

Each pair of framework and model is one job. The jobs run in two processes, or in N processes with
--jobs=N. Measurements are stored in out/frozen.jsonl until all are complete, so an interrupted run
can be continued. With --report, the program writes the measurements so far, with a dash for a
missing cell. With --quick, the program uses small sizes and few rounds, and writes nothing. All
measurements take about 20 minutes on two cores. figures.py then writes the table of docs/frozen.md.
"""

from __future__ import annotations

import datetime
import json
import math
import os
import pathlib
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from importlib.metadata import version
from multiprocessing import get_context
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
import torch.autograd.forward_ad as forward_ad
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import flop_registry

import gradtools.jax as gj
import gradtools.torch as gt
from gradtools.jax.rules.primitives import primal_p, tangent_p, value_p

HERE = pathlib.Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

from tests.support.live_bytes import LiveBytes  # noqa: E402

QUICK = "--quick" in sys.argv
LEAST, MOST, SECONDS = (1, 1, 0) if QUICK else (5, 15, 10)  # limits on rounds and CPU seconds
JOBS = next((int(x.split("=")[1]) for x in sys.argv if x.startswith("--jobs=")), 2)
USES, DEPTH = ((1, 2), 3) if QUICK else ((1, 4, 16, 64), 8)
TIMED = USES[:3]  # with more uses, times are not measured
DEPTHS, FEW = ((2,), 2) if QUICK else ((4, 16, 64), 4)
PLAIN, BY_HAND = "double backward", "forward over reverse by hand"
OURS = "gt.frozen"
CHECKPOINT = {"PyTorch": "torch.utils.checkpoint", "JAX": "jax.checkpoint"}
MODELS = ("dense",) if QUICK else ("dense", "convolutional", "transformer")
CODES = {"dense": (32, 2048), "convolutional": (16, 16), "transformer": (4, 32, 128)}
if QUICK:
    CODES["dense"] = (8, 16)
CHANNELS, SIDE, HEADS = 32, 16, 4
# The lengths of y.
WIDTHS = {name: SIDE**2 if name == "convolutional" else x[-1] for name, x in CODES.items()}
SIZES = CODES, CHANNELS, SIDE, HEADS
PARTS = HERE.parent / "out" / "frozen.jsonl"


@dataclass(frozen=True)
class Way:
    """A computation of dg/dy: its function, its peak bytes, and its forward passes for each z_i."""

    run: Callable[[], Any]
    peak: int
    passes: Callable[[], float]


Ways = dict[str, Way]


def codes(model: str, count: int) -> np.ndarray:
    rng = np.random.default_rng(0)
    return rng.normal(size=(count, *CODES[model])).astype(np.float32)


def critic(model: str) -> np.ndarray:
    width = WIDTHS[model]
    return (np.random.default_rng(1).normal(size=(width, 8)) / width**0.5).astype(np.float32)


# --- PyTorch -----------------------------------------------------------------------------


class Decoder(torch.nn.Module):
    """Decodes codes to images with a dense layer and convolutions."""

    def __init__(self, depth: int) -> None:
        super().__init__()
        self.dense = torch.nn.Linear(CODES["convolutional"][1], CHANNELS * SIDE * SIDE)
        layer = partial(torch.nn.Conv2d, CHANNELS, CHANNELS, 3, padding=1)
        self.layers = torch.nn.ModuleList(layer() for _ in range(depth))
        self.image = torch.nn.Conv2d(CHANNELS, 1, 3, padding=1)

    def forward(self, z: torch.Tensor) -> torch.Tensor:
        """Returns the decoded images, which have one channel."""
        x = torch.tanh(self.dense(z)).reshape(-1, CHANNELS, SIDE, SIDE)
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return self.image(x)


def torch_model(model: str, depth: int) -> torch.nn.Module:
    torch.manual_seed(0)
    if model == "dense":
        width = CODES[model][1]
        parts = [(torch.nn.Linear(width, width), torch.nn.Tanh()) for _ in range(depth)]
        net: torch.nn.Module = torch.nn.Sequential(*(part for pair in parts for part in pair))
    elif model == "convolutional":
        net = Decoder(depth)
    else:
        width = CODES[model][-1]
        layer = torch.nn.TransformerEncoderLayer(
            width, HEADS, 4 * width, 0.0, "gelu", batch_first=True, norm_first=True
        )
        net = torch.nn.TransformerEncoder(layer, depth, enable_nested_tensor=False)
    return net.requires_grad_(False)


def torch_f(y: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return torch.tanh(x.reshape(-1, len(y)) @ y).sum()


def torch_g(slopes: torch.Tensor) -> torch.Tensor:
    return slopes.square().mean().sqrt()


def through(G: Any, y: torch.Tensor, zs: torch.Tensor) -> torch.Tensor:
    y = y.clone().requires_grad_()

    def slope(z: torch.Tensor) -> torch.Tensor:
        z = z.clone().requires_grad_()
        return torch.autograd.grad(torch_f(y, G(z)), z, create_graph=True)[0]

    return torch.autograd.grad(torch_g(torch.stack([slope(z) for z in zs])), y)[0]


def torch_by_hand(G: Any, y: torch.Tensor, zs: torch.Tensor) -> torch.Tensor:
    """Computes first derivatives without a graph, then runs G once more per z_i in forward mode."""
    slopes = []
    for z in zs:
        z = z.clone().requires_grad_()
        slopes.append(torch.autograd.grad(torch_f(y, G(z)), z)[0])
    found = torch.stack(slopes).requires_grad_()
    (us,) = torch.autograd.grad(torch_g(found), found)
    total = torch.zeros_like(y)
    for z, u in zip(zs, us, strict=True):
        with forward_ad.dual_level(), torch.no_grad():
            x, w = forward_ad.unpack_dual(G(forward_ad.make_dual(z, u)))
        at, x = y.clone().requires_grad_(), x.clone().requires_grad_()
        (v,) = torch.autograd.grad(torch_f(at, x), x, create_graph=True)
        total += torch.autograd.grad((v * w).sum(), at)[0]
    return total


def torch_runs(model: str, depth: int, count: int) -> dict[str, Callable[[], Any]]:
    net = torch_model(model, depth)
    y, zs = torch.from_numpy(critic(model)), torch.from_numpy(codes(model, count))
    again = lambda z: checkpoint(net, z, use_reentrant=False)
    return {
        PLAIN: partial(through, net, y, zs),
        CHECKPOINT["PyTorch"]: partial(through, again, y, zs),
        BY_HAND: partial(torch_by_hand, net, y, zs),
        OURS: partial(through, gt.frozen(net), y, zs),
    }


class Work(TorchDispatchMode):
    """Counts flops with PyTorch's formulas; FlopCounterMode fails for `torch.autograd.grad`."""

    def __init__(self) -> None:
        super().__init__()
        self.flops = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        formula = flop_registry.get(func._overloadpacket)
        if formula is not None:
            self.flops += formula(*args, **(kwargs or {}), out_val=out)
        return out


def torch_ways(model: str, depth: int, count: int) -> Ways:
    ways, found = {}, {}
    with Work() as work, torch.no_grad():
        torch_model(model, depth)(torch.from_numpy(codes(model, 1))[0])
    once = work.flops
    for name, run in torch_runs(model, depth, count).items():
        with Work() as work, LiveBytes() as live:
            found[name] = run().numpy()
        passes = work.flops / once / count
        ways[name] = Way(run, live.peak, lambda passes=passes: passes)
    agree(found)
    return ways


# --- JAX ---------------------------------------------------------------------------------


def weights(model: str, depth: int) -> dict[str, jax.Array]:
    """Returns parameters; the parameters of the layers are stacked."""
    width = CODES[model][-1]
    shapes = {
        "dense": {"w": (depth, width, width)},
        "convolutional": {
            "dense": (width, CHANNELS * SIDE * SIDE),
            "w": (depth, 3, 3, CHANNELS, CHANNELS),
            "image": (3, 3, CHANNELS, 1),
        },
        "transformer": {
            "qkv": (depth, width, 3 * width),
            "out": (depth, width, width),
            "up": (depth, width, 4 * width),
            "down": (depth, 4 * width, width),
        },
    }[model]
    rng = np.random.default_rng(2)
    inputs = {n: math.prod(s[:-1]) / (depth if s[0] == depth else 1) for n, s in shapes.items()}
    draw = lambda name, shape: rng.normal(size=shape) / inputs[name] ** 0.5
    return {n: jnp.asarray(draw(n, s).astype(np.float32)) for n, s in shapes.items()}


def dense(p: Any, z: jax.Array) -> jax.Array:
    return jax.lax.scan(lambda z, w: (jnp.tanh(z @ w), None), z, p["w"])[0]


def convolve(x: jax.Array, kernel: jax.Array) -> jax.Array:
    layout = ("NHWC", "HWIO", "NHWC")
    return jax.lax.conv_general_dilated(x, kernel, (1, 1), "SAME", dimension_numbers=layout)


def convolutional(p: Any, z: jax.Array) -> jax.Array:
    x = jnp.tanh(z @ p["dense"]).reshape(-1, SIDE, SIDE, CHANNELS)
    x = jax.lax.scan(lambda x, w: (jnp.tanh(convolve(x, w)), None), x, p["w"])[0]
    return convolve(x, p["image"])


def transformer(p: Any, z: jax.Array) -> jax.Array:
    def layer(x: jax.Array, p: Any) -> tuple[jax.Array, None]:
        qkv = (jax.nn.standardize(x) @ p["qkv"]).reshape(*x.shape[:2], 3, HEADS, -1)
        q, k, v = (qkv[:, :, i] for i in range(3))
        x = x + jax.nn.dot_product_attention(q, k, v).reshape(x.shape) @ p["out"]
        return x + jax.nn.gelu(jax.nn.standardize(x) @ p["up"]) @ p["down"], None

    return jax.lax.scan(layer, z, p)[0]


JAX_MODELS = {"dense": dense, "convolutional": convolutional, "transformer": transformer}


def jax_f(y: jax.Array, x: jax.Array) -> jax.Array:
    return jnp.tanh(x.reshape(-1, len(y)) @ y).sum()


def jax_g(slopes: jax.Array) -> jax.Array:
    return jnp.sqrt((slopes**2).mean())


def jax_through(kind: Callable[..., Any], net: Any, y: Any, zs: Any, p: Any) -> jax.Array:
    G = kind(partial(net, p))
    slope = lambda y: lambda z: jax.grad(lambda z: jax_f(y, G(z)))(z)
    return jax.grad(lambda y: jax_g(jax.lax.map(slope(y), zs)))(y)


def jax_by_hand(net: Any, y: Any, zs: Any, p: Any) -> jax.Array:
    G = partial(net, p)
    us = jax.grad(jax_g)(jax.lax.map(jax.grad(lambda z: jax_f(y, G(z))), zs))

    def add(total: Any, inputs: Any) -> Any:
        z, u = inputs
        x, w = jax.jvp(G, (z,), (u,))
        return total + jax.grad(lambda y: jnp.vdot(jax.grad(jax_f, 1)(y, x), w))(y), None

    return jax.lax.scan(add, jnp.zeros_like(y), (zs, us))[0]


def jax_runs(model: str) -> dict[str, Callable[..., Any]]:
    net = JAX_MODELS[model]
    kinds = {
        PLAIN: lambda G: G,
        CHECKPOINT["JAX"]: jax.checkpoint,
        OURS: gj.frozen,
    }
    runs = {name: partial(jax_through, kind, net) for name, kind in kinds.items()}
    runs[BY_HAND] = partial(jax_by_hand, net)
    return {name: runs[name] for name in (PLAIN, CHECKPOINT["JAX"], BY_HAND, OURS)}


def jax_ways(model: str, depth: int, count: int) -> Ways:
    args = jnp.asarray(critic(model)), jnp.asarray(codes(model, count)), weights(model, depth)
    ways, found = {}, {}
    for name, fun in jax_runs(model).items():
        program = jax.jit(fun).lower(*args).compile()
        run = lambda program=program: jax.block_until_ready(program(*args))
        peak = program.memory_analysis().temp_size_in_bytes
        ways[name] = Way(run, peak, partial(jax_passes, fun, model, args))
        found[name] = np.asarray(run())
    agree(found)
    return ways


def jax_passes(fun: Callable[..., Any], model: str, args: Any) -> float:
    _, zs, p = args
    once = flops_of(jax.make_jaxpr(JAX_MODELS[model])(p, zs[0]))
    return flops_of(jax.make_jaxpr(fun)(*args)) / once / len(zs)


def flops_of(jaxpr: Any) -> int:
    """Counts flops of products and convolutions as PyTorch does; each loop iteration counts."""
    total = 0
    for eqn in getattr(jaxpr, "jaxpr", jaxpr).eqns:
        assert eqn.primitive.name != "while", "a loop with an unknown trip count"
        if eqn.primitive in (primal_p, value_p, tangent_p):
            avals = [v.aval for v in eqn.invars]
            total += flops_of(jax.make_jaxpr(partial(eqn.primitive.impl, **eqn.params))(*avals))
            continue
        total += own_flops(eqn)
        trips = eqn.params.get("length", 1) if eqn.primitive.name == "scan" else 1
        inside = jax.tree.leaves(list(eqn.params.values()), is_leaf=is_jaxpr)
        total += trips * sum(flops_of(x) for x in inside if is_jaxpr(x))
    return total


def own_flops(eqn: Any) -> int:
    shapes = [v.aval.shape for v in eqn.invars]
    if eqn.primitive.name == "dot_general":
        (contracted, _), _ = eqn.params["dimension_numbers"]
        return 2 * eqn.outvars[0].aval.size * math.prod(shapes[0][i] for i in contracted)
    if eqn.primitive.name == "conv_general_dilated":
        features = shapes[1][eqn.params["dimension_numbers"].rhs_spec[0]]
        return 2 * eqn.outvars[0].aval.size * math.prod(shapes[1]) // features
    return 0


def is_jaxpr(x: Any) -> bool:
    return hasattr(getattr(x, "jaxpr", x), "eqns")


# --- measuring ---------------------------------------------------------------------------


def agree(found: dict[str, np.ndarray]) -> None:
    plain = found[PLAIN]
    for name, x in found.items():
        off = np.linalg.norm(x - plain) / np.linalg.norm(plain)
        assert off < 1e-3, f"the relative error of {name} is {off}"


def ratios(ways: Ways) -> dict[str, float]:
    """Returns medians, over the rounds, of the times divided by the time of double backward."""
    names, rounds, spent = list(ways), [], 0.0
    while len(rounds) < LEAST or (spent < SECONDS and len(rounds) < MOST):
        first = len(rounds) % len(names)
        rounds.append({n: seconds(ways[n].run) for n in names[first:] + names[:first]})
        spent += sum(rounds[-1].values())
    return {n: statistics.median(r[n] / r[PLAIN] for r in rounds) for n in names}


def seconds(run: Callable[[], Any]) -> float:
    """Returns the CPU seconds of this process during a run."""
    start = time.process_time()
    run()
    return max(time.process_time() - start, 1e-9)


@dataclass(frozen=True)
class Cell:
    """The measurements of one framework, model and size, with numbers for each method.

    Attributes:
        over_uses: Whether the cell belongs to a table whose columns are numbers of z_i.
        peaks: Peak bytes.
        passes: The work for each z_i, in forward passes of G.
        times: Times relative to double backward, or {} if the times were not measured.
    """

    framework: str
    model: str
    depth: int
    uses: int
    over_uses: bool
    peaks: dict[str, int]
    passes: dict[str, float]
    times: dict[str, float]


def sizes() -> list[tuple[int, int, bool]]:
    """Returns each cell's depth and number of z_i, and whether it is in the table over z_i."""
    return [(DEPTH, n, True) for n in USES] + [(depth, FEW, False) for depth in DEPTHS]


def settings() -> str:
    """Returns the versions and settings as text; only cells with equal texts are combined."""
    return f"{version('torch')}, {version('jax')}, {LEAST, MOST, SECONDS, TIMED}, {SIZES}"


def measured(framework: str, model: str, chosen: Sequence[tuple[int, int, bool]]) -> list[Cell]:
    one_thread()
    found = []
    with sdpa_kernel(SDPBackend.MATH):  # the fused kernel has no second derivative
        for size in chosen:
            found.append(measured_at(framework, model, *size))
            if not QUICK:
                PARTS.parent.mkdir(exist_ok=True)
                with PARTS.open("a", encoding="utf-8") as file:
                    file.write(json.dumps({"settings": settings(), **asdict(found[-1])}) + "\n")
    return found


def kept() -> list[Cell]:
    """Returns the measurements of an interrupted earlier run."""
    if QUICK or not PARTS.exists():
        return []
    lines = [json.loads(line) for line in PARTS.read_text(encoding="utf-8").splitlines()]
    return [Cell(**line) for line in lines if line.pop("settings") == settings()]


def measured_at(framework: str, model: str, depth: int, uses: int, over_uses: bool) -> Cell:
    ways = {"PyTorch": torch_ways, "JAX": jax_ways}[framework](model, depth, uses)
    peaks = {name: way.peak for name, way in ways.items()}
    passes = {name: way.passes() for name, way in ways.items()}
    times = ratios(ways) if uses in TIMED else {}
    print(f"{framework}, {model}: {depth} layers, {uses} uses", file=sys.stderr)
    return Cell(framework, model, depth, uses, over_uses, peaks, passes, times)


# --- tables and the picture --------------------------------------------------------------


def table(cells: Sequence[Cell], value: Callable[[Cell, str], str]) -> Iterator[str]:
    """Yields the lines of a table: a row for each framework, model and method."""
    same = lambda a, b: (a.depth, a.uses) == (b.depth, b.uses)
    first = [c for c in cells if (c.framework, c.model) == (cells[0].framework, cells[0].model)]
    many = first[0].over_uses
    heads = [f"N = {c.uses}" if many else f"{c.depth} layers" for c in first]
    yield f"| framework | G | method | {' | '.join(heads)} |"
    yield "|---" * (3 + len(heads)) + "|"
    for framework in CHECKPOINT:
        for model in MODELS:
            own = [c for c in cells if (c.framework, c.model) == (framework, model)]
            row = [next((c for c in own if same(c, head)), None) for head in first]
            for name in own[0].peaks:
                values = ["–" if c is None else value(c, name) for c in row]
                yield f"| {framework} | {model} | {name} | {' | '.join(values)} |"


def flops(cell: Cell, name: str) -> str:
    return f"{cell.passes[name]:.2f}"


def megabytes(cell: Cell, name: str) -> str:
    return f"{cell.peaks[name] / 1e6:.2f}"


def times(cell: Cell, name: str) -> str:
    return f"{cell.times[name]:.2f}"


def report(cells: list[Cell]) -> str:
    over_uses = [c for c in cells if c.over_uses]
    over_depth = [c for c in cells if not c.over_uses]
    timed = [c for c in over_uses if c.uses in TIMED]
    sections = [
        (f"Work for each use, in forward passes of G ({DEPTH} layers)", over_uses, flops),
        (f"Peak MB by number of uses ({DEPTH} layers)", over_uses, megabytes),
        (f"Time relative to double backward ({DEPTH} layers)", timed, times),
        (f"Depth: work for each use, in forward passes of G ({FEW} uses)", over_depth, flops),
        (f"Depth: peak MB ({FEW} uses)", over_depth, megabytes),
        (f"Depth: time relative to double backward ({FEW} uses)", over_depth, times),
    ]
    lines = [
        f"# Second derivatives through a frozen network, {datetime.date.today()}, Python "
        f"{sys.version.split()[0]}, torch {version('torch')}, jax {version('jax')}",
        "",
        "The programs compute dg/dy for g(df/dz_1, ..., df/dz_N) and f(y, G(z_i)), with N uses of "
        "G, in float32 on one CPU thread. The batch of the dense network has "
        f"{CODES['dense'][0]} rows of width {CODES['dense'][1]}. The batch of the convolutional "
        f"network has {CODES['convolutional'][0]} images of {SIDE} x {SIDE} pixels and "
        f"{CHANNELS} channels. "
        f"The batch of the transformer has {CODES['transformer'][0]} x {CODES['transformer'][1]} "
        f"tokens of width {CODES['transformer'][2]}; attention consists of matrix products. The "
        "peak is the memory of live storages in PyTorch, and the temporaries of the compiled "
        "program in JAX. The work counts products and convolutions, including the work of f. Each "
        "round runs each method once, in an order that rotates. A time is the median, over the "
        "rounds, of the CPU seconds of a method divided by the CPU seconds of double backward in "
        f"the same round. There are {LEAST} to {MOST} rounds; after {LEAST} rounds, no round "
        f"begins if the rounds have taken {SECONDS} s. A dash marks a cell that was not measured.",
    ]
    for title, chosen, value in sections:
        lines += ["", f"## {title}", "", *table(chosen, value)]
    return "\n".join([*lines, "", "![memory](frozen.svg)", ""])


def picture(cells: list[Cell]) -> None:
    import matplotlib

    matplotlib.use("svg")
    import matplotlib.pyplot as plt

    plt.rcParams |= {"svg.hashsalt": "frozen", "font.size": 9}
    figure, axes = plt.subplots(2, len(MODELS), figsize=(12, 7.5), layout="constrained")
    for row, framework in zip(axes, CHECKPOINT, strict=True):
        for panel, model in zip(row, MODELS, strict=True):
            own = [c for c in cells if (c.framework, c.model) == (framework, model) and c.over_uses]
            for name, marker in zip(own[0].peaks, "osvDP", strict=True):
                sizes = [c.peaks[name] / 1e6 for c in own]
                colour = {OURS: "tab:red"}.get(name)
                panel.plot(
                    [c.uses for c in own], sizes, marker=marker, label=name, color=colour, alpha=0.8
                )
            panel.set(xscale="log", yscale="log", xlabel="uses of G", ylabel="peak, MB")
            panel.set_xticks(USES, map(str, USES))
            panel.set_xticks([], minor=True)
            panel.set_title(f"{framework}, {model}, {DEPTH} layers")
            panel.legend(fontsize=7)
    figure.savefig(HERE / "results" / "frozen.svg", metadata={"Date": None})


def one_thread() -> None:
    torch.set_num_threads(1)
    own = "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1"
    os.environ["XLA_FLAGS"] = (
        f"{os.environ.get('XLA_FLAGS', '')} {own}"  # JAX reads XLA_FLAGS at first use
    )


def main() -> None:
    cells = kept()
    had = {(c.framework, c.model, c.depth, c.uses, c.over_uses) for c in cells}
    jobs = {  # JAX runs first, since it takes longest
        (framework, model): [size for size in sizes() if (framework, model, *size) not in had]
        for framework in reversed(CHECKPOINT)
        for model in sorted(MODELS)
    }
    jobs = {} if "--report" in sys.argv else jobs
    with ProcessPoolExecutor(JOBS, get_context("spawn")) as pool:
        futures = [pool.submit(measured, *job, left) for job, left in jobs.items() if left]
        cells += [cell for future in futures for cell in future.result()]
    order = sizes()
    cells.sort(key=lambda c: order.index((c.depth, c.uses, c.over_uses)))
    text = report(cells)
    print(text)
    if QUICK:
        return
    (HERE / "results").mkdir(exist_ok=True)
    (HERE / "results" / "frozen.md").write_text(text, encoding="utf-8")
    picture(cells)
    if len(cells) == len(CHECKPOINT) * len(MODELS) * len(order):
        PARTS.unlink()


if __name__ == "__main__":
    main()
