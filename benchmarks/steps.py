"""Steps that people run in PyTorch, beside the same by hand: paired in one process, one thread.

    python benchmarks/steps.py                       # writes results/steps.md
    python benchmarks/steps.py --save before.json    # the ratios alone, of another version
    python benchmarks/steps.py --before before.json  # with these in a column of their own

A figure is the median of processor seconds over interleaved runs, divided by that of the peer.
The second table is about growth: seconds for each leaf, chunk and rule as their number grows.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import pathlib
import platform
import statistics
import time
from collections.abc import Callable

import torch
from torch import nn

import gradtools.torch as gt

Run = Callable[[], object]
RUNS = 11
torch.set_num_threads(1)
make_functional = getattr(gt, "make_functional", None) or gt.functionalize
microbatched = getattr(gt, "microbatched_value_and_grad", None) or gt.microbatched


def seconds(*runs: Run, count: int = RUNS) -> list[float]:
    """The median processor time of each, run in turn."""
    for run in runs:
        run()
    times: list[list[float]] = [[] for _ in runs]
    for _ in range(count):
        for run, own in zip(runs, times, strict=True):
            start = time.process_time()
            run()
            own.append(time.process_time() - start)
    return [statistics.median(own) for own in times]


def mlp(layers: int, width: int = 16) -> nn.Module:
    parts = [part for _ in range(layers) for part in (nn.Linear(width, width), nn.Tanh())]
    return nn.Sequential(*parts)


def loss(net: Callable[..., torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    return net(x).square().mean()


def jacobians() -> dict[str, tuple[Run, ...]]:
    decoder = nn.Sequential(
        *(nn.Linear(16, 256), nn.ReLU(), nn.Linear(256, 512), nn.SiLU()),
        *(nn.Linear(512, 3072), nn.Sigmoid()),
    ).requires_grad_(False)
    z, zs, xs = torch.randn(16), torch.randn(4, 16), [torch.randn(3) for _ in range(64)]
    jacfwd = torch.func.jacfwd(decoder)
    joined = lambda xs: torch.stack([k * x.sin() for k, x in enumerate(xs)]).sum(0)
    return {
        "`jacobian` of a decoder 16 to 3,072 | `torch.func.jacfwd`": (
            lambda: gt.jacobian(decoder)(z),
            lambda: jacfwd(z),
        ),
        "`vmap(jacobian)` of the same, 4 points | `torch.vmap(jacfwd)`": (
            lambda: gt.vmap(gt.jacobian(decoder))(zs),
            lambda: torch.vmap(jacfwd)(zs),
        ),
        "forward Jacobian, 64 leaves of 3 | `torch.func.jacfwd`": (
            lambda: gt.jacobian(joined, mode="forward")(xs),
            lambda: torch.func.jacfwd(joined)(xs),
        ),
    }


def modules() -> dict[str, tuple[Run, ...]]:
    net, x = mlp(200), torch.randn(32, 16)
    apply, params, state = make_functional(net)
    one, other, wide = mlp(6, 256), mlp(6, 256), torch.randn(64, 256)
    both = [*one.parameters(), *other.parameters()]

    def functional() -> object:
        return gt.value_and_grad(lambda p: loss(lambda x: apply(p, state, x)[0], x))(params)

    def backward() -> None:
        net.zero_grad()
        loss(net, x).backward()

    def by_hand() -> None:
        grads = torch.autograd.grad(loss(other, one(wide)), both)
        _ = [-g for g in grads[12:]]

    of_net = gt.value_and_grad(lambda m: loss(m, x))
    game = gt.minimax_value_and_grad(lambda a, b: loss(b, a(wide)), 0, 1)
    return {
        "`value_and_grad(module)`, MLP of 400 tensors | `loss.backward()`": (
            lambda: of_net(net),
            backward,
        ),
        "the same by `make_functional` | `loss.backward()`": (functional, backward),
        "`value_and_grad(module)` and `assign_gradients` | `loss.backward()`": (
            lambda: gt.assign_gradients(net, of_net(net)[1]),
            backward,
        ),
        "`minimax_value_and_grad`, two MLPs of 6 x 256 | `autograd.grad`, signs by hand": (
            lambda: game(one, other),
            by_hand,
        ),
    }


def chunks() -> dict[str, tuple[Run, ...]]:
    net, xs = mlp(200), torch.randn(128, 16)
    apply, params, state = make_functional(net)
    of_params = lambda p, x: loss(lambda x: apply(p, state, x)[0], x)

    def backward() -> None:
        net.zero_grad()
        for x in xs.split(32):
            (loss(net, x) / 4).backward()

    def accumulated() -> object:
        total = gt.GradientAccumulator()
        for x in xs.split(32):
            total.add(gt.grad(of_params)(params, x), 32)
        return total.mean()

    return {
        "microbatched, module of 400 tensors, 4 chunks | a loop of `backward()`": (
            lambda: microbatched(loss, 32)(net, xs),
            backward,
        ),
        "the same by `make_functional` | a loop of `backward()`": (
            lambda: microbatched(of_params, 32)(params, xs),
            backward,
        ),
        "`GradientAccumulator`, 400 tensors, 4 chunks | a loop of `backward()`": (
            accumulated,
            backward,
        ),
    }


def recomputed() -> dict[str, tuple[Run, ...]]:
    net = nn.Sequential(mlp(2, 64), nn.Linear(64, 32))
    xs = torch.randn(256, 64)
    contrast = lambda z: (torch.logsumexp(z @ z.T, 1) - (z * z).sum(1)).mean()

    def two_passes(size: int) -> None:
        net.zero_grad()
        chunks, outs, states = xs.split(size), [], []
        with torch.no_grad():
            for x in chunks:
                states.append(torch.get_rng_state())
                outs.append(net(x))
        standing, z = torch.get_rng_state(), torch.cat(outs).requires_grad_()
        contrast(z).backward()
        assert z.grad is not None
        for x, state, ct in zip(chunks, states, z.grad.split(size), strict=True):
            torch.set_rng_state(state)
            net(x).backward(ct)
        torch.set_rng_state(standing)

    def rows(size: int) -> tuple[Run, Run]:
        f = gt.chunked(net, size)

        def ours() -> None:
            net.zero_grad()
            contrast(f(xs)).backward()

        return ours, lambda: two_passes(size)

    return {
        "`chunked`, MLP of 64, 256 chunks of 1 | two passes by hand": rows(1),
        "the same, 16 chunks of 16 | two passes by hand": rows(16),
    }


def second_order() -> dict[str, tuple[Run, ...]]:
    net, x = mlp(6, 256), torch.randn(64, 256)
    vs = [torch.randn_like(x) for _ in range(8)]
    f = lambda x: net(x).square().sum()
    pinn = nn.Sequential(nn.Linear(2, 128), nn.Tanh(), mlp(4, 128), nn.Linear(128, 1))
    points = torch.randn(1024, 2)
    u = lambda x: pinn(x).sum()

    def linearized() -> None:
        _, push = gt.linearize(gt.grad(f), x)
        _ = [push(v) for v in vs]

    def double_backward() -> None:
        y = x.clone().requires_grad_()
        (g,) = torch.autograd.grad(f(y), y, create_graph=True)
        _ = [torch.autograd.grad(g, y, v, retain_graph=True) for v in vs]

    def residual() -> None:
        along = [gt.grad(lambda x, i=i: gt.grad(u)(x)[:, i].sum())(points) for i in (0, 1)]
        (along[0][:, 0] + along[1][:, 1]).square().mean().backward()

    def residual_by_hand() -> None:
        total: torch.Tensor = torch.zeros(())
        for i in (0, 1):
            y = points.clone().requires_grad_()
            (g,) = torch.autograd.grad(u(y), y, create_graph=True)
            total = total + torch.autograd.grad(g[:, i].sum(), y, create_graph=True)[0][:, i]
        total.square().mean().backward()

    line, where = mlp(4, 128), torch.rand(1024, 1)
    line = nn.Sequential(nn.Linear(1, 128), nn.Tanh(), line, nn.Linear(128, 1))
    one, zero = torch.ones_like(where), torch.zeros_like(where)
    wave, at = nn.Sequential(nn.Linear(30, 128), nn.Tanh(), nn.Linear(128, 1)), torch.rand(256, 30)
    potential = lambda r: wave(r)[0]

    def fourth() -> None:
        gt.jet(line, (where,), ([one, zero, zero, zero],))[1][3].square().mean().backward()

    def fourth_by_hand() -> None:
        y = where.clone().requires_grad_()
        d = line(y)
        for _ in range(4):
            (d,) = torch.autograd.grad(d.sum(), y, create_graph=True)
        d.square().mean().backward()

    def laplacian() -> None:
        gt.vmap(gt.laplacian(potential))(at).square().mean().backward()

    def trace_of_the_hessian() -> None:
        hessians = torch.vmap(torch.func.hessian(potential))(at)
        hessians.diagonal(dim1=-2, dim2=-1).sum(-1).square().mean().backward()

    return {
        "u_xxxx by `jet`, 5 x 128, 1,024 points, a step | nested `autograd.grad`": (
            fourth,
            fourth_by_hand,
        ),
        "`laplacian`, 30 inputs, 256 points, a step | `torch.func.hessian`": (
            laplacian,
            trace_of_the_hessian,
        ),
        "`linearize(grad(f))`, 8 products | double backward, graph kept": (
            linearized,
            double_backward,
        ),
        "PINN residual, u_xx + u_yy, 5 x 128, 1,024 points | nested `autograd.grad`": (
            residual,
            residual_by_hand,
        ),
    }


def growth() -> list[str]:
    """Microseconds for each leaf, chunk and rule."""
    rule = gt.custom_rule(torch.sin)
    rule.defvjp(lambda x: (torch.sin(x), x), lambda x, ct: (ct * torch.cos(x),))
    x = torch.randn(512, 4)

    def of_leaves(n: int) -> Run:
        tree = {str(i): torch.randn(4) for i in range(n)}
        f = lambda tree: sum([(x * x).sum() for x in tree.values()])
        return lambda: gt.grad(f)(tree)

    def of_modules(n: int) -> Run:
        net = mlp(n // 2, 4)
        return lambda: gt.grad(lambda m: loss(m, x[:2]))(net)

    def of_chunks(n: int) -> Run:
        f = gt.chunked(lambda x: x.sin(), 512 // n)
        return lambda: gt.grad(lambda x: f(x).sum())(x)

    def of_microbatches(n: int) -> Run:
        w = torch.randn(4)
        f = microbatched(lambda w, x: (x @ w).square().mean(), 512 // n)
        return lambda: f(w, x)

    def of_rules(n: int) -> Run:
        def f(x: torch.Tensor) -> torch.Tensor:
            for _ in range(n):
                x = rule(x)
            return x.sum()

        return lambda: gt.grad(f)(x[0])

    lines = ["| | few | more | many |", "|---|---|---|---|"]
    for name, of, sizes in (
        ("leaves of a dictionary", of_leaves, (20, 200, 2000)),
        ("tensors of a module", of_modules, (20, 200, 800)),
        ("chunks", of_chunks, (4, 32, 256)),
        ("microbatches", of_microbatches, (4, 32, 256)),
        ("rules in one program", of_rules, (3, 30, 300)),
    ):
        each = [1e6 * seconds(of(n), count=5)[0] / n for n in sizes]
        cells = [f"{n:,}: {t:.0f}" for n, t in zip(sizes, each, strict=True)]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return lines


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--save")
    options.add_argument("--before")
    given = options.parse_args()
    ratios = {}
    for part in (jacobians, modules, chunks, recomputed, second_order):
        for name, runs in part().items():
            ours, peer = seconds(*runs)
            ratios[name] = ours / peer
            print(f"{ratios[name]:6.2f}  {name}", flush=True)
    if given.save:
        pathlib.Path(given.save).write_text(json.dumps(ratios))
        return
    before = json.loads(pathlib.Path(given.before).read_text()) if given.before else {}
    rows = [
        f"| {name} | {f'{before[name]:.2f} | ' if before else ''}{ratio:.2f} |"
        for name, ratio in ratios.items()
    ]
    note = " Before: an earlier version on the same machine." if before else ""
    lines = [
        f"# Steps, {datetime.date.today()}, Python {platform.python_version()}, "
        f"torch {torch.__version__}",
        "",
        f"Median processor time of {RUNS} interleaved runs beside the peer's, in one thread of a "
        f"machine that others use at the same time: its load average was {os.getloadavg()[0]:.0f} "
        f"on {os.cpu_count()} cores at the end.{note}",
        "",
        f"| work | peer | {'before | ' if before else ''}now |",
        f"|---|---|---|{'---|' if before else ''}",
        *rows,
        "",
        "## Growth: microseconds for each",
        "",
        *growth(),
    ]
    text = "\n".join(lines) + "\n"
    print(text)
    (pathlib.Path(__file__).parent / "results" / "steps.md").write_text(text)


if __name__ == "__main__":
    main()
