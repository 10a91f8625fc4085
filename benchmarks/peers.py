"""Compares gradtools with other packages on four tasks: operations, bytes and time.

    python benchmarks/peers.py                 # writes results/peers.md
    python benchmarks/peers.py sparse          # prints only the sections with this name

The tasks are training through a Jacobian-vector product, token means over ranks, sparse Jacobians,
and gradients through the steps of an inner optimization. `tests/support/costs.py` counts operations
and bytes. Time is the median CPU time of interleaved runs, divided by the time of the first
method of the task. Packages that are not installed are listed; CUDA kernels are not run.
"""

from __future__ import annotations

import datetime
import os
import pathlib
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import scipy.sparse
import torch
import torch.distributed as dist
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.parallel import DistributedDataParallel

import gradtools.jax as gj
import gradtools.torch as gt

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

from tests.support.costs import cost

Way = Callable[[], Any]
ROUNDS, LENGTH, PEERS = 5, 1024, ("asdex", "higher", "torchopt")
RANKS, STEPS = 2, ((0, 3), (3, 8), (8, 10))  # rows of each rank's steps
HEAD = "| framework | work | method | MFLOP | peak MB | time |\n|---|---|---|---|---|---|"
torch.set_num_threads(1)


def peer(name: str) -> Any:
    """Imports a package; returns None if it is not installed."""
    try:
        return import_module(name)
    except ImportError:
        return None


def seconds(runs: list[Way]) -> list[float]:
    times: list[list[float]] = [[] for _ in runs]
    for k in range(ROUNDS + 1):
        for run, own in zip(runs, times, strict=True):
            start = time.process_time()
            run()
            if k:
                own.append(time.process_time() - start)
    return [statistics.median(own) for own in times]


def rows(framework: str, work: str, ways: dict[str, Any], *args: Any) -> Iterator[str]:
    """Yields a row for each method; times are relative to the first method."""
    module, costs, runs = gj if framework == "JAX" else gt, {}, {}
    for name, way in ways.items():
        if way is None:
            costs[name] = "not installed"
            continue
        try:
            costs[name] = cost(module, way, *args)
        except NotImplementedError as error:
            costs[name] = str(error).strip().split(".")[0]
            continue
        run = jax.jit(way) if framework == "JAX" else way
        runs[name] = lambda run=run: jax.block_until_ready(run(*args))
    times = dict(zip(runs, seconds([*runs.values()]), strict=True))
    for name, spent in costs.items():
        if isinstance(spent, str):
            yield f"| {framework} | {work} | {name} | {spent} | | |"
            continue
        ratio = times[name] / next(iter(times.values()))
        cells = map(digits, (spent.flops / 1e6, spent.peak_bytes / 1e6, ratio))
        yield f"| {framework} | {work} | {name} | {' | '.join(cells)} |"


def digits(x: float) -> str:
    """Formats a number with three significant digits, or as an integer if it is at least 100."""
    return f"{x:,.0f}" if x >= 100 else f"{x:#.3g}"


# --- training through a Jacobian-vector product --------------------------------------------------


def jvps() -> Iterator[str]:
    yield HEAD
    work = f"a step through attention, 4 heads of 32, length {LENGTH:,}"
    yield from rows("PyTorch", work, jvps_in_torch())
    keys = jax.random.split(jax.random.key(0), 6)
    xs = [jax.random.normal(k, (1, LENGTH, 4, 32)) for k in keys]
    yield from rows("JAX", work, jvps_in_jax(), *xs)


def jvps_in_torch() -> dict[str, Any]:
    xs = [torch.randn(1, 4, LENGTH, 32, requires_grad=k < 3) for k in range(6)]
    attend = functional.scaled_dot_product_attention

    def step(jvp: Any, f: Any) -> None:
        y, dy = jvp(f, tuple(xs[:3]), tuple(xs[3:]))
        torch.autograd.grad((y * dy).sum(), xs[:3])

    def by_math() -> None:
        with sdpa_kernel(SDPBackend.MATH):
            step(torch.func.jvp, attend)

    return {
        "`torch.func.jvp`, math kernel": by_math,
        "`torch.func.jvp`": partial(step, torch.func.jvp, attend),
        "`gt.jvp`": partial(step, gt.jvp, attend),
    }


def jvps_in_jax() -> dict[str, Any]:
    def step(jvp: Any, f: Any, *xs: Any) -> Any:
        def loss(*qkv: Any) -> Any:
            y, dy = jvp(f, qkv, xs[3:])
            return (y * dy).sum()

        return jax.grad(loss, (0, 1, 2))(*xs[:3])

    return {
        "`jax.jvp`": partial(step, jax.jvp, jax.nn.dot_product_attention),
        "`gt.jvp`": partial(step, gj.jvp, jax.nn.dot_product_attention),
    }


# --- token means ---------------------------------------------------------------------------------


def batch() -> tuple[Any, Any]:
    """Returns ten sentences of five positions for each rank, and a mask that is 0 at padding."""
    rng = np.random.default_rng(0)
    lengths = rng.integers(0, 6, size=(RANKS, 10))
    lengths[1] //= 2
    there = np.arange(5) < lengths[..., None]
    return rng.normal(size=(RANKS, 10, 5, 3)), there.astype(float)


def token_mean(w: Any, x: Any, there: Any) -> Any:
    return (there * ((x @ w) ** 2 - x[..., 0]) ** 2).sum() / there.sum()


def means() -> Iterator[str]:
    x, there = batch()
    with jax.enable_x64():
        joined = [jnp.asarray(a.reshape(-1, *a.shape[2:])) for a in (x, there)]
        exact = np.asarray(jax.grad(token_mean)(jnp.ones(3), *joined))
        found = jax.vmap(means_in_jax, axis_name="rank")(jnp.asarray(x), jnp.asarray(there))
        found = {name: np.asarray(g)[0] for name, g in found.items()}
    off = lambda g: np.linalg.norm(g - exact) / np.linalg.norm(exact)
    yield "| framework | method, two ranks with three unequal steps each | off by |\n|---|---|---|"
    for name, g in means_in_torch().items():
        yield f"| PyTorch | {name} | {off(g):.1e} |"
    for name, g in found.items():
        yield f"| JAX | {name} | {off(g):.1e} |"


def means_in_jax(x: Any, there: Any) -> dict[str, Any]:
    w, total = jnp.ones(3), gj.GradientAccumulator()
    multi = optax.MultiSteps(optax.sgd(1.0), len(STEPS))
    state, moved = multi.init(w), w
    for a, b in STEPS:
        g = gj.grad(token_mean)(w, x[a:b], there[a:b])
        total.add(g, there[a:b].sum())
        updates, state = multi.update(g, state, w)
        moved = moved + updates
    return {
        "`optax.MultiSteps`, mean over ranks": jax.lax.pmean(w - moved, "rank"),
        "each rank's token mean, mean over ranks": jax.lax.pmean(total.mean(), "rank"),
        "`GradientAccumulator.mean(axis_name)`": total.mean(axis_name="rank"),
    }


def means_in_torch() -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.start_processes(rank_of_means, (folder,), RANKS)
        return torch.load(f"{folder}/found.pt", weights_only=False)


def rank_of_means(rank: int, folder: str) -> None:
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/init", rank=rank, world_size=RANKS
    )
    x, there = (torch.from_numpy(a[rank]) for a in batch())
    tokens = there.sum()

    def by_ddp(weigh: Callable[[Any], Any]) -> Any:
        net = torch.nn.Linear(3, 1, bias=False, dtype=torch.float64)
        torch.nn.init.ones_(net.weight)
        ddp = DistributedDataParallel(net)
        for k, (a, b) in enumerate(STEPS):
            y, on = ddp(x[a:b])[..., 0], there[a:b]
            with ddp.no_sync() if k + 1 < len(STEPS) else torch.enable_grad():
                mean = (on * (y**2 - x[a:b, :, 0]) ** 2).sum() / on.sum()
                (weigh(on) * mean).backward()
        return net.weight.grad[0].numpy().copy()

    total, w = gt.GradientAccumulator(), torch.ones(3, dtype=torch.float64)
    for a, b in STEPS:
        total.add(gt.grad(token_mean)(w, x[a:b], there[a:b]), there[a:b].sum())
    found = {
        "DDP, mean of the steps' means": by_ddp(lambda on: 1 / len(STEPS)),
        "DDP, each rank's token mean": by_ddp(lambda on: on.sum() / tokens),
        "`GradientAccumulator.mean(group)`": total.mean(group=dist.group.WORLD).numpy(),
    }
    if rank == 0:
        torch.save(found, f"{folder}/found.pt")
    dist.barrier()
    dist.destroy_process_group()


# --- sparse Jacobians and Hessians ---------------------------------------------------------------


def residual(u: Any) -> Any:
    return u[2:] - 2 * u[1:-1] + u[:-2] + 0.1 * u[1:-1] ** 3


def energy(u: Any) -> Any:
    return ((u[1:] - u[:-1]) ** 2).sum() + (u**4).sum()


def sparse() -> Iterator[str]:
    yield HEAD
    n, asdex = 3_000, peer("asdex")
    pattern = scipy.sparse.diags([1, 1, 1], [0, 1, 2], shape=(n - 2, n))
    band = scipy.sparse.diags([1, 1, 1], [-1, 0, 1], shape=(n, n))
    x, y = torch.linspace(0, 1, n), jnp.linspace(0, 1, n)
    works = f"Jacobian of {n:,} columns, three bands", f"Hessian of {n:,} columns, three bands"
    of_torch = {
        "`torch.func.jacrev`, dense": torch.func.jacrev(residual),
        "`sparsity=pattern`": gt.jacobian(residual, sparsity=pattern),
    }
    yield from rows("PyTorch", works[0], of_torch, x)
    of_torch = {
        "`torch.func.hessian`, dense": torch.func.hessian(energy),
        "`sparsity=band`": gt.hessian(energy, sparsity=band),
    }
    yield from rows("PyTorch", works[1], of_torch, x)
    of_jax = {
        "`jax.jacrev`, dense": jax.jacrev(residual),
        "asdex": asdex and asdex.jacobian(residual, y),
        "`sparsity=pattern`": gj.jacobian(residual, sparsity=pattern),
    }
    yield from rows("JAX", works[0], of_jax, y)
    of_jax = {
        "`jax.hessian`, dense": jax.hessian(energy),
        "asdex": asdex and asdex.hessian(energy, y),
        "`sparsity=band`": gj.hessian(energy, sparsity=band),
    }
    yield from rows("JAX", works[1], of_jax, y)


# --- through the steps of an inner optimization --------------------------------------------------

DEPTH, BATCH, WIDTH, INNER, RATE = 8, 512, 64, 6, 0.1


def unrolled() -> Iterator[str]:
    yield HEAD
    work = f"weights of {BATCH} examples, {DEPTH} layers of {WIDTH}, {INNER} inner steps"
    yield from rows("PyTorch", work, unrolled_in_torch())
    keys = jax.random.split(jax.random.key(0), 3)
    layers = [*jax.random.normal(keys[0], (DEPTH, WIDTH, WIDTH)) / WIDTH**0.5]
    x, weights = jax.random.normal(keys[1], (BATCH, WIDTH)), jax.random.uniform(keys[2], BATCH)
    yield from rows("JAX", work, unrolled_in_jax(), weights, layers, x)


def inner_loss(xp: Any, layers: Any, weights: Any, x: Any) -> Any:
    h = x
    for w in layers:
        h = xp.tanh(h @ w)
    return (weights * ((h - x) ** 2).mean(1)).mean()


def unrolled_in_torch() -> dict[str, Any]:
    torch.manual_seed(0)
    layers, x = [*torch.randn(DEPTH, WIDTH, WIDTH) / WIDTH**0.5], torch.randn(BATCH, WIDTH)
    weights, loss = torch.rand(BATCH), partial(inner_loss, torch)
    higher, torchopt = peer("higher"), peer("torchopt")

    def after(gradient: Any, weights: Any) -> Any:
        trained = layers
        for _ in range(INNER):
            grads = gradient(trained, weights, x)
            trained = [w - RATE * g for w, g in zip(trained, grads, strict=True)]
        return loss(trained, torch.ones(BATCH), x)

    def double_backward() -> Any:
        def gradient(ws: Any, *data: Any) -> Any:
            ws = [w if w.requires_grad else w.clone().requires_grad_() for w in ws]
            return torch.autograd.grad(loss(ws, *data), ws, create_graph=True)

        outer = weights.clone().requires_grad_()
        return torch.autograd.grad(after(gradient, outer), outer)

    class Net(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = torch.nn.ParameterList([w.clone() for w in layers])

        def forward(self, weights: Any, x: Any) -> Any:
            return loss(list(self.layers), weights, x)

    def by_higher() -> Any:
        net, outer = Net(), weights.clone().requires_grad_()
        sgd = torch.optim.SGD(net.parameters(), RATE)
        with higher.innerloop_ctx(net, sgd) as (inner, steps):
            for _ in range(INNER):
                steps.step(inner(outer, x))
            return torch.autograd.grad(inner(torch.ones(BATCH), x), outer)

    def by_torchopt() -> Any:
        net, outer = Net(), weights.clone().requires_grad_()
        steps = torchopt.MetaSGD(net, lr=RATE)
        for _ in range(INNER):
            steps.step(net(outer, x))
        return torch.autograd.grad(net(torch.ones(BATCH), x), outer)

    outer = gt.grad(partial(after, gt.grad(loss, mode="forward_over_reverse")))
    return {
        "double backward": double_backward,
        "higher": by_higher if higher else None,
        "torchopt": by_torchopt if torchopt else None,
        '`grad(mode="forward_over_reverse")`': lambda: outer(weights),
    }


def unrolled_in_jax() -> dict[str, Any]:
    loss = partial(inner_loss, jnp)

    def by(gradient: Any) -> Any:
        def after(weights: Any, layers: Any, x: Any) -> Any:
            moved = lambda w, g: w - RATE * g
            step = lambda ws, _: (jax.tree.map(moved, ws, gradient(ws, weights, x)), None)
            return loss(jax.lax.scan(step, layers, length=INNER)[0], jnp.ones(BATCH), x)

        return jax.grad(after)

    return {
        "`jax.grad` under `scan`": by(jax.grad(loss)),
        "`jax.checkpoint` of each gradient": by(jax.checkpoint(jax.grad(loss))),
        '`grad(mode="forward_over_reverse")`': by(gj.grad(loss, mode="forward_over_reverse")),
    }


SECTIONS = {
    "Training through a JVP": jvps,
    "Token means over steps and ranks": means,
    "Sparse Jacobians and Hessians": sparse,
    "Unrolled optimization": unrolled,
}


def versions() -> str:
    found = []
    for name in ("torch", "jax", "optax", *PEERS):
        try:
            found.append(f"{name} {version(name)}")
        except PackageNotFoundError:
            found.append(f"{name} not installed")
    return ", ".join(found)


def main() -> None:
    warnings.simplefilter("ignore")
    wanted = sys.argv[1:]
    named = {n: f for n, f in SECTIONS.items() if not wanted or f.__name__ in wanted}
    lines = [
        f"# Comparison with other packages, {datetime.date.today()}, {versions()}",
        "",
        "Flops and peak bytes are counted for each operation in PyTorch, and are taken from XLA's "
        "analysis in JAX. "
        f"Times are median CPU times of {ROUNDS} interleaved runs relative to the first "
        "method, with one thread in PyTorch and JAX's default threads. CUDA kernels "
        "(jvp_flash_attention) are not run.",
    ]
    for name, section in named.items():
        lines += ["", f"## {name}", "", *section()]
    text = "\n".join(lines) + "\n"
    print(text)
    if not wanted:
        (pathlib.Path(__file__).parent / "results" / "peers.md").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
