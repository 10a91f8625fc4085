"""Tests training through a Jacobian-vector product, as in MeanFlow, with common setups.

The expected values come from the same loss with the math kernel in float64, where finite
differences replace the tangent. The tests vary the kind of attention and the precision, with and
without `gt.checkpoint` and the compiler.
"""

from __future__ import annotations

from functools import cache, partial
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.parallel import DistributedDataParallel

import gradtools.torch as gt

Tensor = torch.Tensor
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
}
CHECKPOINTS = {
    "whole": lambda f, *xs: f(*xs),
    "gt": lambda f, *xs: gt.checkpoint(f)(*xs),
}
AXES = "kind", "way", "precision"
# precisions and their tolerances
PRECISIONS = {"float64": 1e-9, "float32": 2e-5, "bf16": 0.05, "compiled": 2e-5}
RARE = [(kind, "compiled") for kind in ATTENTION if kind != "causal"]


class Block(nn.Module):
    """A transformer layer whose normalized input is scaled by a function of the time t."""

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
        bias = options.get("attn_mask")
        if bias is not None and bias.is_floating_point():
            options["attn_mask"] = bias.to(q.dtype)
        y = _attend(q, k, v, dropout_p=0.0, **options)
        h = h + self.out(y.transpose(1, 2).flatten(2))
        return h + self.mlp(h)


class Velocity(nn.Module):
    """A network for the velocity u(x, t) of MeanFlow."""

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
    """Return the loss of MeanFlow plus a term that is differentiated through the tangent."""
    y, dy = jvp(u, (x, t), (v, torch.ones_like(t)))
    target = (v - t[:, None] * dy).detach()
    return (y - target).square().mean() + 0.1 * (dy * w).mean()


def by_differences(u: Any, primals: Any, tangents: Any) -> tuple[Tensor, Tensor]:
    """Return the value and the jvp of u by eighth-order central differences."""
    weights, h = ((1, 4 / 5), (2, -1 / 5), (3, 4 / 105), (4, -1 / 280)), 1e-3
    at = lambda e: u(*[x + e * dx for x, dx in zip(primals, tangents, strict=True)])
    return at(0.0), sum(a * (at(k * h) - at(-k * h)) for k, a in weights) / h


@cache
def truth(kind: str) -> tuple[float, Tensor]:
    model = Velocity(kind, "whole")
    with sdpa_kernel(SDPBackend.MATH):
        value = loss(by_differences, model, *batch(torch.float64))
    value.backward()
    return value.item(), gradient(model)


def gradient(model: nn.Module) -> Tensor:
    return torch.cat([p.grad.flatten().double() for p in model.parameters()])


def errors(kind: str, way: str, precision: str) -> list[float]:
    """Return the error of the gradient in each step, relative to the expected gradient's norm."""
    dtype = torch.float64 if precision == "float64" else torch.float32
    model = Velocity(kind, way).to(dtype)
    data = batch(dtype)
    step = partial(loss, gt.jvp, model)
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


@pytest.mark.sweep_at(("causal", "gt", "compiled"))
@pytest.mark.sampled(8, 12)
@pytest.mark.sweep_at(*RARE)
@pytest.mark.slow_at("compiled")
@pytest.mark.parametrize(AXES, [*product(ATTENTION, CHECKPOINTS, PRECISIONS)])
def test_a_gradient_through_a_jvp_is_that_of_the_math_kernel(kind, way, precision):
    assert max(errors(kind, way, precision)) < PRECISIONS[precision]


def test_the_module_of_ddp_is_differentiated_and_averaged():
    store = dist.HashStore()
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        model = DistributedDataParallel(Velocity("causal", "gt"))
        grads = gt.grad(partial(loss, gt.jvp))(model.module, *batch(torch.float64))
        steps = gt.GradientAccumulator()
        steps.add(grads, weight=BATCH)
        gt.assign_gradients(model.module, steps.mean(group=dist.group.WORLD))
        expected = truth("causal")[1]
        assert (gradient(model.module) - expected).norm() < 1e-9 * expected.norm()
    finally:
        dist.destroy_process_group()
