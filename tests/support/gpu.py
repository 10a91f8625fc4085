"""Defines scenarios in PyTorch that need a GPU; tests/torch/test_cuda.py runs them.

A scenario is a function of a device. It raises AssertionError if a property is violated and
`Absent` if the machine lacks a requirement. If a CPU supports a scenario, the scenario also runs on
the CPU, so that its code is tested without a GPU.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import nullcontext
from copy import deepcopy
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.multiprocessing.spawn import spawn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.testing import assert_close

import gradtools.torch as gt
from gradtools.errors import GradtoolsError, GradtoolsWarning

Tensor = torch.Tensor
Edit = Callable[[Any], Any]


class Absent(Exception):
    """The machine does not meet a requirement of a scenario."""


class GpuScenario(NamedTuple):
    """A test of one property of gradtools on a device.

    Attributes:
        run: Takes the device and raises AssertionError if the property is violated.
        anywhere: Whether the scenario also runs on a CPU.
    """

    run: Callable[[torch.device], None]
    anywhere: bool = True


def _exactly(found: Any, expected: Any) -> None:
    assert_close(found, expected, rtol=0, atol=0)


# --- random streams ----------------------------------------------------------------------


def _noisy(x: Tensor) -> Tensor:
    """Multiply sin(x) by noise from dropout and the generators of all devices and the CPU."""
    count = torch.cuda.device_count() if x.is_cuda else 1
    others = [torch.rand((), device=torch.device(x.device.type, i)) for i in range(count)]
    noise = sum(draw.to(x.device) for draw in (*others, torch.rand((), device="cpu")))
    return nn.functional.dropout(torch.sin(x), 0.5) * torch.rand_like(x) * noise


def _drawn_again(edit: Edit) -> Callable[[torch.device], None]:
    def run(device: torch.device) -> None:
        x, result = torch.randn(4, device=device), []
        for f in (edit(_noisy), _noisy):
            torch.manual_seed(3)
            result.append((gt.grad(lambda x, f=f: f(x[:2]).sum())(x), torch.rand(2, device=device)))
        _exactly(*result)  # equal draws after the gradient imply equal random states

    return run


# --- precision and kernels ---------------------------------------------------------------


def _scaled(edit: Edit) -> Callable[[torch.device], None]:
    def run(device: torch.device) -> None:
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1)).to(device)
        x, result = torch.randn(4, 8, device=device), []
        for f in (edit(net), net):
            net.zero_grad()
            scaler = torch.amp.GradScaler(device.type)
            with torch.autocast(device.type, torch.float16):
                loss = f(x).float().square().mean()
            scaler.scale(loss).backward()
            grads = [p.grad for p in net.parameters() if p.grad is not None]
            result.append([g / scaler.get_scale() for g in grads])
        assert_close(*result, rtol=8e-3, atol=1e-4)

    return run


def _slope(f: Any, y: Tensor, z: Tensor, u: Tensor | None = None) -> Tensor:
    """Return d/dy of <u, d/dz f(y, z)>, or of |d/dz f|^2 if u is None, by double backward."""
    y, z = y.detach().requires_grad_(), z.detach().requires_grad_()
    (first,) = torch.autograd.grad(f(y, z), z, create_graph=True)
    return torch.autograd.grad((first * (first if u is None else u)).sum(), y)[0]


def _through(G: Callable[[Tensor], Tensor], z: Tensor) -> None:
    """Compare `mixed_partial` and `frozen` with double backward through G."""
    y, u = torch.randn_like(G(z)), torch.randn_like(z)
    f = lambda y, g: ((y * g) ** 2).sum()
    with warnings.catch_warnings():
        # ignore the warning that another attention kernel is used
        warnings.simplefilter("ignore", GradtoolsWarning)
        pushed = gt.mixed_partial(f, G, y, z, u)
        frozen = gt.frozen(G)
        twice = _slope(lambda y, z: f(y, frozen(z)), y, z)
    plain = torch.backends.cudnn.flags(enabled=False), torch.backends.mkldnn.flags(enabled=False)
    with sdpa_kernel(SDPBackend.MATH), plain[0], plain[1]:
        expected = [_slope(lambda y, z: f(y, G(z)), y, z, along) for along in (u, None)]
    assert_close([pushed, twice], expected, rtol=1e-3, atol=1e-3)


def _recurrent(kind: Any) -> Callable[[torch.device], None]:
    def run(device: torch.device) -> None:
        torch.manual_seed(0)
        layer = kind(3, 4).to(device).requires_grad_(False)
        _through(lambda z: layer(z)[0], torch.randn(5, 2, 3, device=device))

    return run


def _attention(device: torch.device) -> None:
    z = torch.randn(2, 2, 5, 8, device=device)
    _through(lambda z: nn.functional.scaled_dot_product_attention(z, z.sin(), z.cos()), z)


def _attention_twice(device: torch.device) -> None:
    xs = tuple(torch.randn(2, 2, 5, 8, device=device) for _ in range(3))
    loss = lambda *xs: nn.functional.scaled_dot_product_attention(*xs).square().sum()
    result = gt.hvp(loss, xs, xs)[1]
    with sdpa_kernel(SDPBackend.MATH):
        expected = gt.hvp(loss, xs, xs, mode="reverse_over_reverse")[1]
    assert_close(result, expected, rtol=1e-4, atol=1e-4)


# --- streams, memory, graphs -------------------------------------------------------------


def _side_stream(device: torch.device) -> None:
    x = torch.randn(1 << 20, device=device)
    gradient = gt.grad(lambda x: gt.chunked(torch.sin, 1 << 18)(x).sum())
    expected, side = gradient(x), torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        result = gradient(x)
    torch.cuda.current_stream().wait_stream(side)
    _exactly(result, expected)


def _peak(device: torch.device) -> None:
    """Compare the peak CUDA memory of a gradient with and without `chunked`."""
    x = torch.randn(1 << 20, device=device)
    deep = lambda x: x.sin().exp().sin().exp().sin().exp().sin().exp()
    measured = []
    for f in (deep, gt.chunked(deep, 1 << 17)):
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        gt.grad(lambda x, f=f: f(x).sum())(x)
        torch.cuda.synchronize()
        measured.append(torch.cuda.max_memory_allocated() - before)
    plain, chunked = measured
    if not chunked < 0.75 * plain:
        raise AssertionError(f"the peak is {chunked} bytes with chunked, {plain} without")


def _graph(device: torch.device) -> None:
    x = torch.randn(64, device=device)
    gradient = gt.grad(lambda x: gt.reverse_gradient(x.sin()).sum())
    for _ in range(3):
        gradient(x)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = gradient(x)
    x.fill_(0.0)
    graph.replay()
    _exactly(result, -torch.ones_like(x))


# --- two processes -----------------------------------------------------------------------

_ROWS, _SECONDS = 5, 60


def _two_processes(device: torch.device) -> None:
    """Compare `checkpoint` with a plain model in two processes: nccl on GPUs, gloo on CPUs."""
    if device.type == "cuda" and torch.cuda.device_count() < 2:
        raise Absent("needs two GPUs")
    with TemporaryDirectory() as folder:
        where = (Path(folder) / "meet").as_uri()
        spawn(_rank, (device.type, where), nprocs=2)  # type: ignore[no-untyped-call]


def _rank(rank: int, kind: str, where: str) -> None:
    """Run one of the two processes."""
    from datetime import timedelta

    device = torch.device(kind, rank if kind == "cuda" else 0)
    if kind == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group(
        "nccl" if kind == "cuda" else "gloo",
        init_method=where,
        rank=rank,
        world_size=2,
        timeout=timedelta(seconds=_SECONDS),
    )
    try:
        _one_step(device, rank)
    finally:
        dist.destroy_process_group()


def _one_step(device: torch.device, rank: int) -> None:
    torch.manual_seed(0)
    norm: Any = nn.SyncBatchNorm if device.type == "cuda" else nn.BatchNorm1d
    net = nn.Sequential(nn.Linear(4, 8), norm(8), nn.Tanh(), nn.Linear(8, 3)).to(device)
    mine = torch.randn(2 * _ROWS, 4)[rank * _ROWS :][:_ROWS].to(device)
    result = []
    for edit in (gt.checkpoint, lambda net: net):
        model = deepcopy(net)
        features = gt.all_gather(edit(model)(mine))
        loss = (features @ features.T).logsumexp(1).mean()
        grads = torch.autograd.grad(loss, list(model.parameters()))
        for g in grads:
            dist.all_reduce(g)
        result.append((list(grads), list(model.buffers())))
    assert_close(*result, rtol=1e-5, atol=1e-6)


_EDITS: dict[str, Edit] = {
    "chunked": lambda f: gt.chunked(f, 2),
    "checkpoint": gt.checkpoint,
    "frozen": gt.frozen,
}


def _bridged(device: torch.device) -> None:
    """The bridge shares memory and respects streams, or raises an error if JAX lacks the device."""
    try:
        import jax
        import jax.numpy as jnp

        from gradtools import bridge
    except ImportError as error:
        raise Absent("JAX is not installed") from error
    sin, x = bridge.to_torch(jnp.sin), torch.linspace(0, 1, 8, device=device)
    try:
        there = jax.devices("gpu" if device.type == "cuda" else device.type)
    except RuntimeError:
        there = []
    if not there:
        assert "and JAX has no such device here" in _refusal(lambda: sin(x))
        return
    assert_close(sin(x), x.sin())
    assert_close(torch.func.hessian(lambda x: sin(x).sum())(x), torch.diag(-x.sin()))
    result: list[int] = []

    def noted(a: Any) -> Any:
        result.append(a.unsafe_buffer_pointer() if hasattr(a, "devices") else a.data_ptr())
        return a + a

    bridge.to_torch(noted, jit=False)(x)
    assert result[-1] == x.data_ptr(), "a tensor was copied"
    a = jax.device_put(jnp.arange(8.0), there[device.index or 0])
    twice = bridge.to_jax(noted)
    assert twice(a).devices() == a.devices()  # the first call copies `a` to detect writes
    twice(a)
    assert result[-1] == a.unsafe_buffer_pointer(), "an array was copied"
    assert float(jax.grad(lambda a: (twice(a) * a).sum())(a)[3]) == 12.0
    _in_order(device, twice, a)


def _refusal(run: Callable[[], Any]) -> str:
    """Return the message of the error that `run` must raise."""
    try:
        return f"no error was raised; the result is {run()}"
    except GradtoolsError as error:
        return str(error)


def _in_order(device: torch.device, twice: Any, a: Any) -> None:
    """The bridge waits for pending computations of both frameworks on other streams."""
    import jax
    import jax.numpy as jnp

    from gradtools import bridge

    stream = torch.cuda.Stream(device) if device.type == "cuda" else None
    doubled = bridge.to_torch(lambda x: x + x)
    with torch.cuda.stream(stream) if stream is not None else nullcontext():
        x = torch.zeros(1 << 20, device=device)
        for _ in range(50):
            x = x + 1
        y = doubled(x)
        x.zero_()  # JAX has read x before this line
        assert float(y.min()) == float(y.max()) == 100.0
    late = jax.jit(
        lambda a: jax.lax.fori_loop(0, 50, lambda _, z: z + 1, jnp.zeros(1 << 20) * a[0])
    )
    for _ in range(3):
        b = twice(late(a))  # no other variable refers to the result of `late`
        assert float(jnp.min(b)) == float(jnp.max(b)) == 100.0


SCENARIOS: dict[str, GpuScenario] = {
    **{f"noise in {name}": GpuScenario(_drawn_again(edit)) for name, edit in _EDITS.items()},
    **{  # `frozen(net)` has no trainable parameters
        f"a scaled step in half precision, {name}": GpuScenario(_scaled(_EDITS[name]))
        for name in ("chunked", "checkpoint")
    },
    "LSTM, forward mode and second order": GpuScenario(_recurrent(nn.LSTM), anywhere=False),
    "GRU, forward mode and second order": GpuScenario(_recurrent(nn.GRU)),
    "attention, forward mode and double backward": GpuScenario(_attention),
    "attention, second order": GpuScenario(_attention_twice),
    "a side stream": GpuScenario(_side_stream, anywhere=False),
    "the allocator's peak": GpuScenario(_peak, anywhere=False),
    "a CUDA graph": GpuScenario(_graph, anywhere=False),
    "two processes": GpuScenario(_two_processes),
    "the bridge": GpuScenario(_bridged),
}
