"""Training through a Jacobian-vector product, as MeanFlow does, in what models are trained with.

The truth is the same loss by the math kernel in float64, its derivative along the path by finite
differences. Around it: kinds of attention, checkpoints, DDP and FSDP2, precisions and compilers.
"""

from __future__ import annotations

import sys
from functools import cache, partial
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import gradtools.torch as gt
from gradtools import GradtoolsError
from gradtools.torch.live_bytes import LiveBytes
from tests.support.processes import found_in_processes, work

Tensor = torch.Tensor
WORLD, SECONDS = 2, 480
BATCH, LENGTH, WIDTH, HEADS = 2, 6, 16, 4
_attend = nn.functional.scaled_dot_product_attention
_i = torch.arange(LENGTH)
BIAS = -0.125 * (_i[:, None] - _i).square().double()
ATTENTION: dict[str, dict[str, Any]] = {
    "plain": {},
    "mask": {"attn_mask": _i[:, None] >= _i - 1},
    "bias": {"attn_mask": BIAS},
    "causal": {"is_causal": True},
    "grouped": {"is_causal": True, "enable_gqa": True},
    "flex": {"attn_mask": BIAS.masked_fill(_i[:, None] < _i, -torch.inf), "enable_gqa": True},
}
CHECKPOINTS = {
    "whole": lambda f, *xs: f(*xs),
    "torch": partial(checkpoint, use_reentrant=False),
    "gt": lambda f, *xs: gt.checkpoint(f)(*xs),
}
AXES = "kind", "way", "wrapper", "precision"
PRECISIONS = {"float64": 1e-9, "float32": 2e-5, "bf16": 0.05, "compiled": 2e-5}  # and tolerances
RARE = [(kind, "compiled") for kind in ATTENTION if kind not in ("causal", "flex")]
truth_by_math = [False]


class Block(nn.Module):
    """A layer of a transformer that is modulated by the time."""

    def __init__(self, kind: str, way: str) -> None:
        super().__init__()
        self.kind, self.way = kind, way
        heads = HEADS // 2 if ATTENTION[kind].get("enable_gqa") else HEADS
        sizes = [WIDTH, *[WIDTH // HEADS * heads] * 2]
        self.norm = nn.LayerNorm(WIDTH)
        self.qkv = nn.ModuleList([nn.Linear(WIDTH, n) for n in sizes])
        self.out = nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 24), nn.GELU(), nn.Linear(24, WIDTH))

    def forward(self, h: Tensor, c: Tensor) -> Tensor:
        return CHECKPOINTS[self.way](self.evaluated, h, c)

    def evaluated(self, h: Tensor, c: Tensor) -> Tensor:
        x = self.norm(h) * (1 + c)
        q, k, v = (f(x).unflatten(2, (-1, WIDTH // HEADS)).transpose(1, 2) for f in self.qkv)
        options = dict(ATTENTION[self.kind])
        if self.kind == "flex" and not truth_by_math[0]:
            score = lambda s, b, h, i, j: s - 0.125 * (i - j) ** 2
            causal = lambda b, h, i, j: i >= j
            mask = create_block_mask(causal, None, None, LENGTH, LENGTH, device=q.device)
            y = flex_attention(q, k, v, score, mask, enable_gqa=True)
        else:
            bias = options.get("attn_mask")
            if bias is not None and bias.is_floating_point():
                options["attn_mask"] = bias.to(q.dtype)
            y = _attend(q, k, v, dropout_p=0.0, **options)
        h = h + self.out(y.transpose(1, 2).flatten(2))
        return h + self.mlp(h)


class Velocity(nn.Module):
    """u(x, t), the velocity of MeanFlow."""

    def __init__(self, kind: str, way: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.into, self.time = nn.Linear(3, WIDTH), nn.Linear(1, WIDTH)
        self.blocks = nn.ModuleList([Block(kind, way) for _ in range(2)])
        self.out = nn.Linear(WIDTH, 3)
        self.double()

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        h, c = self.into(x), self.time(t)[:, None]
        for block in self.blocks:
            h = block(h, c)
        return self.out(h)


def batch(dtype: torch.dtype) -> list[Tensor]:
    random = torch.Generator().manual_seed(1)
    shapes = [(BATCH, LENGTH, 3), (BATCH, 1), (BATCH, LENGTH, 3), (BATCH, LENGTH, 3)]
    return [torch.randn(s, generator=random, dtype=torch.float64).to(dtype) for s in shapes]


def loss(jvp: Any, u: Any, x: Tensor, t: Tensor, v: Tensor, w: Tensor) -> Tensor:
    """MeanFlow's, and a term in which the tangent itself is trained."""
    y, dy = jvp(u, (x, t), (v, torch.ones_like(t)))
    target = (v - t[:, None] * dy).detach()
    return (y - target).square().mean() + 0.1 * (dy * w).mean()


def by_differences(u: Any, primals: Any, tangents: Any) -> tuple[Tensor, Tensor]:
    """Central differences of eighth order."""
    weights, h = ((1, 4 / 5), (2, -1 / 5), (3, 4 / 105), (4, -1 / 280)), 1e-3
    at = lambda e: u(*[x + e * dx for x, dx in zip(primals, tangents, strict=True)])
    return at(0.0), sum(a * (at(k * h) - at(-k * h)) for k, a in weights) / h


@cache
def truth(kind: str) -> tuple[float, Tensor]:
    model = Velocity(kind, "whole")
    truth_by_math[0] = True
    try:
        with sdpa_kernel(SDPBackend.MATH):
            value = loss(by_differences, model, *batch(torch.float64))
    finally:
        truth_by_math[0] = False
    value.backward()
    return value.item(), gradient(model)


def gradient(model: nn.Module) -> Tensor:
    whole = lambda g: g.full_tensor() if hasattr(g, "full_tensor") else g
    return torch.cat([whole(p.grad).flatten().double() for p in model.parameters()])


def wrapped(model: Velocity, wrapper: str) -> nn.Module:
    if wrapper == "DDP":
        return DistributedDataParallel(model)
    if wrapper == "static":
        return DistributedDataParallel(model, static_graph=True)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def errors(kind: str, way: str, wrapper: str, precision: str) -> list[float]:
    """Of two steps, how far their gradients are from the truth, over its norm."""
    dtype = torch.float64 if precision == "float64" else torch.float32
    model = Velocity(kind, way).to(dtype)
    whole = model if wrapper == "alone" else wrapped(model, wrapper)
    rows, rank = (dist.get_world_size(), dist.get_rank()) if wrapper != "alone" else (1, 0)
    data = [x.chunk(rows)[rank] for x in batch(dtype)]
    step = partial(loss, gt.jvp, whole)
    if precision == "compiled":
        torch._dynamo.reset()
        step = torch.compile(step, backend="aot_eager")
    result = []
    for _ in range(1 if precision == "compiled" else 2):
        model.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16"):
            value = step(*data)
        value.backward()
        expected = truth(kind)[1]
        result.append(float((gradient(model) - expected).norm() / expected.norm()))
    return result


def check(found: Any, *cell: str) -> None:
    assert isinstance(found, list), found
    assert max(found) < PRECISIONS[cell[3]]


def outcome(*cell: str) -> Any:
    """The errors of one cell, or what is said where it is refused."""
    try:
        return errors(*cell)
    except GradtoolsError as error:
        return str(error)


def cells(*wrappers: str) -> list[tuple[str, ...]]:
    """The matrix; what a sample leaves out is run by the sweep."""
    return [*product(ATTENTION, CHECKPOINTS, wrappers, PRECISIONS)]


@pytest.mark.sweep_at(("causal", "gt", "compiled"), ("flex", "whole", "compiled"))
@pytest.mark.sampled(8, 12)
@pytest.mark.sweep_at(*RARE)
@pytest.mark.slow_at("compiled")
@pytest.mark.parametrize(AXES, cells("alone"))
def test_a_gradient_through_a_jvp_is_that_of_the_math_kernel(kind, way, wrapper, precision):
    cell = kind, way, wrapper, precision
    check(outcome(*cell), *cell)


# --- in two processes ----------------------------------------------------------------------------

WRAPPERS = ("DDP", "static", "FSDP2")


def in_a_process(rank: int, world: int, cell: tuple[str, ...]) -> Any:
    return outcome(*cell)


@pytest.fixture(scope="module")
def found(tmp_path_factory, request):
    """What both processes found in the cells that are selected."""
    mine = [i for i in request.session.items if i.module is request.module]
    mine = [i for i in mine if "found" in i.fixturenames]
    run = [tuple(i.callspec.params[axis] for axis in AXES) for i in mine]
    folder = tmp_path_factory.mktemp("processes")
    return found_in_processes(in_a_process, run, WORLD, folder, SECONDS)


@pytest.mark.sweep_at(*RARE)
@pytest.mark.sampled(0, 22)
@pytest.mark.parametrize(AXES, cells(*WRAPPERS))
def test_a_gradient_through_a_jvp_in_two_processes(kind, way, wrapper, precision, found):
    cell = kind, way, wrapper, precision
    for process in found:
        check(process.get(cell, "it hangs"), *cell)


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_wrappers_of_training_are_pushed_through_in_one_process(wrapper, tmp_path):
    """The quick half of the matrix of two processes."""
    quick = [("causal", "whole", wrapper, "float64"), ("grouped", "torch", wrapper, "float32")]
    work(0, in_a_process, quick, 1, str(tmp_path))
    for cell, found in torch.load(tmp_path / "0.pt").items():
        check(found, *cell)


# --- costs ---------------------------------------------------------------------------------------


def flex(q: Tensor, k: Tensor, v: Tensor, slopes: Tensor | None = None) -> Tensor:
    """Causal attention with a bias that depends on the head."""

    def score(s: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return s - (0.01 * h if slopes is None else slopes[h]) * (i - j)

    n = q.shape[2]
    mask = create_block_mask(lambda b, h, i, j: i >= j, None, None, n, n, device="cpu")
    return flex_attention(q, k, v, score, mask)


LONG = {
    "alone": (_attend, "whole"),
    "torch's checkpoint": (_attend, "torch"),
    "gt.checkpoint": (_attend, "gt"),
    "flex_attention": (flex, "whole"),
    "flex_attention in torch's checkpoint": (flex, "torch"),
    "flex_attention in gt.checkpoint": (flex, "gt"),
}


def attended_bytes(attend: Any, way: str, length: int) -> int:
    """The most bytes of a training step through the attention alone."""
    xs = [torch.randn(1, 4, length, 8, requires_grad=k < 3) for k in range(6)]
    with LiveBytes() as live:
        y, dy = gt.jvp(partial(CHECKPOINTS[way], attend), tuple(xs[:3]), tuple(xs[3:]))
        torch.autograd.grad((y * dy).sum(), xs[:3])
    return int(live.peak)


@pytest.mark.slow_at(*[name for name in LONG if name != "torch's checkpoint"])
@pytest.mark.parametrize("name", LONG)
def test_memory_of_long_sequences_is_linear_in_the_length(name, monkeypatch):
    """Of twice the length it takes less than one matrix of scores more."""
    switch = "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG"  # dynamo traces no mode that counts
    monkeypatch.setattr(sys.modules[flex_attention.__module__], switch, True)
    short, long = (attended_bytes(*LONG[name], n) for n in (512, 1024))
    assert long - short < 4 * 1024 * 1024 * 4 / 2


@pytest.mark.slow_at("gt.checkpoint")
@pytest.mark.parametrize("name", [name for name in LONG if name != "alone"])
def test_long_attention_has_the_gradient_of_the_whole(name):
    torch.manual_seed(0)
    attend, way = LONG[name]
    xs = [torch.randn(1, 4, 512, 2, requires_grad=k < 3, dtype=torch.float64) for k in range(6)]
    slopes = torch.rand(4, dtype=torch.float64, requires_grad=True)
    given = [*xs[:3], slopes] if attend is flex else xs[:3]

    def by_hand(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if attend is not flex:
            return _attend(q, k, v)
        gap = torch.arange(512)[:, None] - torch.arange(512)
        bias = (-slopes[:, None, None] * gap).masked_fill(gap < 0, -torch.inf)
        return torch.softmax(q @ k.mT / 2**0.5 + bias, -1) @ v

    f = partial(flex, slopes=slopes) if attend is flex else attend

    def results(f: Any) -> Any:
        y, dy = gt.jvp(f, tuple(xs[:3]), tuple(xs[3:]))
        return y, dy, torch.autograd.grad((y * dy).sum(), given)

    torch.testing.assert_close(results(partial(CHECKPOINTS[way], f)), results(by_hand))


@pytest.mark.parametrize(
    "options", [{"is_causal": True}, {"attn_mask": True}], ids=["causal", "mask"]
)
def test_long_attention_has_the_tangent_of_the_math_kernel(options):
    torch.manual_seed(0)
    xs = [torch.randn(2, 2, 520, 4, dtype=torch.float64) for _ in range(6)]
    if "attn_mask" in options:
        options = {"attn_mask": torch.rand(520, 520) > 0.3}
    attend = partial(_attend, **options)
    found = gt.jvp(attend, tuple(xs[:3]), tuple(xs[3:]))
    with sdpa_kernel(SDPBackend.MATH):
        expected = torch.func.jvp(attend, tuple(xs[:3]), tuple(xs[3:]))
    torch.testing.assert_close(found, expected, rtol=1e-11, atol=1e-11)


class CountsProducts(TorchDispatchMode):
    """The operations of matrix products."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, fun: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if fun in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default):
            self.count += args[-2].numel() * args[-1].shape[-1]
        return fun(*args, **(kwargs or {}))


def test_fixed_weights_cost_no_products_with_zero_where_nothing_has_a_graph():
    net, (x, v) = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)), torch.randn(2, 4, 8)
    with torch.no_grad(), CountsProducts() as plain:
        net(x)
    with torch.no_grad(), CountsProducts() as pushed:
        gt.jvp(net, (x,), (v,))
    assert pushed.count == 2 * plain.count
    with torch.no_grad():
        sparse = torch.eye(4).to_sparse()  # has a way of its own
        torch.testing.assert_close(gt.jvp(lambda x: sparse @ x, (x,), (v,)), (x, v))


class Same(torch.autograd.Function):
    """x itself."""

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, ct: Tensor) -> Tensor:
        return ct

    @staticmethod
    def jvp(ctx: Any, dx: Tensor) -> Tensor:
        return dx


WAYS_IN = {
    "a captured tensor of a Function": lambda f, x: (
        lambda c: checkpoint(lambda h: f(h) * Same.apply(c), x, use_reentrant=False)
    )(x.sin()),
    "a captured tensor": lambda f, x: (
        lambda c: checkpoint(lambda h: f(h) * c, x, use_reentrant=False)
    )(x.sin()),
    "a keyword": lambda f, x: checkpoint(lambda h, c: f(h) * c, x, c=x.sin(), use_reentrant=False),
    "a container": lambda f, x: checkpoint(
        lambda d: f(d["h"]) * d["c"][0], {"h": x, "c": [x.sin()]}, use_reentrant=False
    ),
    "a checkpoint around": lambda f, x: checkpoint(
        lambda x: checkpoint(f, x, use_reentrant=False) * x.sin(), x, use_reentrant=False
    ),
    "a mask of dropout": lambda f, x: checkpoint(
        lambda h: nn.functional.dropout(f(h)) * h.sin(), x, use_reentrant=False
    ),
}


@pytest.mark.parametrize("way", WAYS_IN)
def test_a_checkpoint_pushes_again_what_came_in(way):
    torch.manual_seed(0)
    layer = nn.Linear(3, 3).double()
    x, v = torch.randn(2, 4, 3, dtype=torch.float64)
    f = lambda h: layer(h).tanh()

    def gradients(way: Any) -> Any:
        torch.manual_seed(1)
        y, dy = gt.jvp(partial(way, f), (x,), (v,))
        first = torch.autograd.grad((y * dy).sum(), [*layer.parameters()], create_graph=True)
        penalty = sum(g.square().sum() for g in first)
        return first, torch.autograd.grad(penalty, [*layer.parameters()])

    def plain(f: Any, x: Tensor) -> Tensor:
        y = f(x)
        return (nn.functional.dropout(y) if way == "a mask of dropout" else y) * x.sin()

    torch.testing.assert_close(gradients(WAYS_IN[way]), gradients(plain))


@pytest.mark.parametrize("way", [way for way in WAYS_IN if way != "a mask of dropout"])
def test_a_checkpoint_is_computed_again_inside_of_a_pass_of_tangents(way):
    torch.manual_seed(0)
    layer = nn.Linear(3, 3).double()
    x, v = torch.randn(2, 4, 3, dtype=torch.float64)
    f = lambda h: layer(h).tanh()
    found, expected = (
        gt.hvp(lambda x, g=g: g(x).square().sum(), (x,), (v,), mode="forward_over_reverse")
        for g in (partial(WAYS_IN[way], f), lambda x: f(x) * x.sin())
    )
    torch.testing.assert_close(found, expected)
