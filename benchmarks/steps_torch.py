"""Defines the PyTorch programs that steps.py measures."""

from __future__ import annotations

import copy
import importlib.util
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from typing import Any

import numpy as np
import torch
from frozen import CODES, Work, torch_f, torch_g, torch_model
from steps_rows import Row, Run
from torch import nn

import gradtools.torch as gt

Loss = Callable[..., torch.Tensor]


def mlp(layers: int, width: int = 16) -> nn.Sequential:
    parts = [part for _ in range(layers) for part in (nn.Linear(width, width), nn.Tanh())]
    return nn.Sequential(*parts)


def loss(net: Loss, x: torch.Tensor) -> torch.Tensor:
    return net(x).square().mean()


class Block(nn.Module):
    """A layer of a transformer."""

    def __init__(self, width: int, heads: int = 4) -> None:
        super().__init__()
        self.heads = heads
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Applies the layer to rows of tokens."""
        shape = (*x.shape[:-1], self.heads, -1)
        q, k, v = [y.reshape(shape).transpose(-3, -2) for y in self.qkv(self.first(x)).chunk(3, -1)]
        weights = (q @ k.transpose(-2, -1) / q.shape[-1] ** 0.5).softmax(-1)
        x = x + self.out((weights @ v).transpose(-3, -2).reshape(x.shape))
        return x + self.down(nn.functional.gelu(self.up(self.second(x))))


def transformer(layers: int, width: int) -> nn.Sequential:
    return nn.Sequential(*[Block(width) for _ in range(layers)])


class Residual(nn.Module):
    """A block of a ResNet."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        norm = partial(nn.BatchNorm2d, channels)
        convolve = partial(nn.Conv2d, channels, channels, 3, padding=1, bias=False)
        self.block = nn.Sequential(convolve(), norm(), nn.ReLU(), convolve(), norm())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Applies the block to images."""
        return torch.relu(x + self.block(x))


def resnet(channels: int = 32) -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(3, channels, 3, padding=1), *[Residual(channels)] * 1,
                         *[Residual(channels) for _ in range(7)])  # fmt: skip


# --- whole modules ---------------------------------------------------------------------------


def jacobians() -> Iterator[Row]:
    decoder = nn.Sequential(
        *(nn.Linear(16, 256), nn.ReLU(), nn.Linear(256, 512), nn.SiLU()),
        *(nn.Linear(512, 3072), nn.Sigmoid()),
    ).requires_grad_(False)
    z, zs, xs = torch.randn(16), torch.randn(4, 16), [torch.randn(3) for _ in range(64)]
    jacfwd = torch.func.jacfwd(decoder)
    calls: list[int] = []

    def joined(xs: list[torch.Tensor]) -> torch.Tensor:
        calls.append(1)
        return torch.stack([k * x.sin() for k, x in enumerate(xs)]).sum(0)

    def evaluations() -> float:
        calls.clear()
        gt.jacobian(joined, mode="forward")(xs)
        return len(calls)

    yield Row(
        "forward `jacobian` of a decoder 16 to 3,072", "`torch.func.jacfwd`", "173", 1.1,
        lambda: gt.jacobian(decoder, mode="forward")(z), lambda: jacfwd(z),
    )  # fmt: skip
    yield Row(
        "`vmap(jacobian)` of the decoder, 4 points", "`torch.vmap(jacfwd)`", "", 1.1,
        lambda: gt.vmap(gt.jacobian(decoder, mode="forward"))(zs), lambda: torch.vmap(jacfwd)(zs),
    )  # fmt: skip
    yield Row("forward Jacobian, 64 leaves: evaluations of f", "", "64", 1, evaluations)
    yield Row(
        "forward Jacobian, 64 leaves", "`torch.func.jacfwd`", "6.2", 1.1,
        lambda: gt.jacobian(joined, mode="forward")(xs), lambda: torch.func.jacfwd(joined)(xs),
    )  # fmt: skip


def modules() -> Iterator[Row]:
    net, x = mlp(200), torch.randn(32, 16)
    apply, params, state = gt.make_functional(net)

    def functional() -> object:
        return gt.value_and_grad(lambda p: loss(lambda x: apply(p, state, x)[0], x))(params)

    def backward() -> None:
        net.zero_grad()
        loss(net, x).backward()

    def by_call() -> object:
        own = {name: p.detach().requires_grad_() for name, p in net.named_parameters()}
        value = loss(lambda x: torch.func.functional_call(net, own, (x,)), x)
        return torch.autograd.grad(value, [*own.values()])

    of_net = gt.value_and_grad(lambda m: loss(m, x))
    peer = "`loss.backward()`"
    yield Row("`value_and_grad(module)`, MLP of 400 tensors", peer, "2.36", 1.15,
              lambda: of_net(net), backward)  # fmt: skip
    yield Row("`make_functional`, MLP of 400 tensors", peer, "1.23", 1.1, functional, backward)
    yield Row("`functional_call` and `torch.autograd.grad`, MLP of 400 tensors", peer, "", None,
              by_call, backward)  # fmt: skip
    yield Row("`value_and_grad(module)` and `assign_gradients`", peer, "2.7", 1.2,
              lambda: gt.assign_gradients(net, of_net(net)[1]), backward)  # fmt: skip
    yield from games()


def games() -> Iterator[Row]:
    tokens, images = torch.randn(8, 32, 256), torch.randn(16, 3, 16, 16)
    for name, one, other, x, before, goal, assigned in (
        ("and `assign_gradients`, MLPs of 200 tensors", mlp(100), mlp(100), torch.randn(32, 16),
         "2.8", 1.2, True),
        ("of a ResNet", resnet(), nn.Conv2d(32, 1, 3), images, "1.22", 1.05, False),
        ("of a transformer of 6 x 256", transformer(5, 256), Block(256), tokens, "1.07", 1.05,
         False),
    ):  # fmt: skip
        nets = one, other
        game = gt.minimax_value_and_grad(lambda a, b, x=x: loss(b, a(x)), 0, 1)
        yield Row(f"`minimax_value_and_grad` {name}", "by hand", before, goal,
                  partial(_played, game, nets, assigned),
                  partial(_by_hand, nets, x, assigned))  # fmt: skip


def _played(game: Any, nets: tuple[nn.Module, nn.Module], assigned: bool) -> object:
    value, grads = game(*nets)
    for net, own in zip(nets, grads, strict=True) if assigned else ():
        gt.assign_gradients(net, own)
    return value, grads


def _by_hand(nets: tuple[nn.Module, nn.Module], x: torch.Tensor, assigned: bool) -> object:
    one, other = nets
    if assigned:
        one.zero_grad()
        other.zero_grad()
        loss(other, one(x)).backward()
        for p in other.parameters():
            assert p.grad is not None
            p.grad.neg_()
        return None
    own, down = [*one.parameters()], [*other.parameters()]
    value = loss(other, one(x))
    grads = torch.autograd.grad(value, [*own, *down])
    return value, grads[: len(own)], [-g for g in grads[len(own) :]]


# --- chunks ----------------------------------------------------------------------------------


def chunks() -> Iterator[Row]:
    loop, four = "a loop of `backward()`", "`backward()` four times"
    for net, xs, name, before, goal in (
        (mlp(200), torch.randn(128, 16), "MLP of 400 tensors", ("3.6", "2.05"), 1.15),
        (transformer(6, 256), torch.randn(16, 32, 256), "transformer of 6 x 256",
         ("1.34", "1.2"), 1.05),
    ):  # fmt: skip
        size = len(xs) // 4
        apply, params, state = gt.make_functional(net)
        of_params = partial(_of_params, apply, state)
        backward = partial(_four_times, net, xs)
        split = gt.microbatched_value_and_grad(loss, size)
        yield Row(f"microbatched, 4 chunks, {name}", loop, before[0], goal,
                  partial(split, net, xs), backward)  # fmt: skip
        yield Row(f"`GradientAccumulator`, 4 chunks, {name}", four, before[1], goal,
                  partial(_accumulated, of_params, params, xs), backward)  # fmt: skip


def _of_params(apply: Any, state: Any, params: Any, x: torch.Tensor) -> torch.Tensor:
    return loss(lambda x: apply(params, state, x)[0], x)


def _four_times(net: nn.Module, xs: torch.Tensor) -> None:
    net.zero_grad()
    for x in xs.chunk(4):
        (loss(net, x) / 4).backward()


def _accumulated(f: Loss, params: Any, xs: torch.Tensor) -> object:
    total = gt.GradientAccumulator()
    for x in xs.chunk(4):
        total.add(gt.grad(f)(params, x), len(x))
    return total.mean()


def contrast(z: torch.Tensor) -> torch.Tensor:
    return (torch.logsumexp(z @ z.T, 1) - (z * z).sum(1)).mean()


def recomputed() -> Iterator[Row]:
    net = nn.Sequential(mlp(2, 64), nn.Linear(64, 32))
    xs, ids = torch.randn(256, 64), torch.randint(1000, (64, 16))
    peer = "two passes by hand"
    yield Row("`chunked`, MLP of 64, 256 chunks of 1", peer, "2.8", 1.3, *both(net, xs, 1))
    yield Row("`chunked`, MLP of 64, 16 chunks of 16", peer, "2.56", 1.3, *both(net, xs, 16))
    from transformers import BertConfig, BertModel  # a slow import

    config = BertConfig(
        vocab_size=1000, hidden_size=256, num_hidden_layers=4, num_attention_heads=4,
        intermediate_size=1024, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    bert = BertModel(config, add_pooling_layer=False)
    encode = lambda ids: bert(ids).last_hidden_state[:, 0]
    name = "`chunked`, BERT of 4 x 256, bfloat16 autocast"
    yield Row(f"{name}, 8 chunks of 8", peer, "1.12", 1.03,
              *both(bert, ids, 8, encode, True), count=3)  # fmt: skip
    yield Row(f"{name}, 64 chunks of 1", peer, "1.21", 1.1,
              *both(bert, ids, 1, encode, True), count=3)  # fmt: skip


def both(
    net: nn.Module, xs: torch.Tensor, size: int, f: Loss | None = None, narrow: bool = False
) -> tuple[Run, Run]:
    """Returns two implementations of a contrastive step: with `chunked`, and with two passes."""
    encode: Any = f or net
    chunked = gt.chunked(encode, size)
    around = partial(torch.autocast, "cpu", torch.bfloat16) if narrow else nullcontext

    def ours() -> None:
        net.zero_grad()
        with around():
            value = contrast(chunked(xs).float())
        value.backward()

    def two_passes() -> None:
        net.zero_grad()
        chunks, outs, states = xs.split(size), [], []
        with torch.no_grad(), around():
            for x in chunks:
                states.append(torch.get_rng_state())
                outs.append(encode(x))
        standing, z = torch.get_rng_state(), torch.cat(outs).requires_grad_()
        contrast(z.float()).backward()
        assert z.grad is not None
        for x, state, ct in zip(chunks, states, z.grad.split(size), strict=True):
            torch.set_rng_state(state)
            with around():
                out = encode(x)
            out.backward(ct)
        torch.set_rng_state(standing)

    return ours, two_passes


# --- edits and rules -------------------------------------------------------------------------


def edits() -> Iterator[Row]:
    w, x = torch.ones(64, requires_grad=True), torch.randn(64, 64)
    rounding = gt.straight_through(torch.round)

    def by_norm(x: torch.Tensor) -> torch.Tensor:
        x.register_hook(lambda g: g * (1.0 / g.norm().clamp(min=1.0)))
        return x

    def by_value(x: torch.Tensor) -> torch.Tensor:
        x.register_hook(lambda g: g.clamp(-0.1, 0.1))
        return x

    for name, peer, before, ours, theirs in (
        ("`straight_through`", "by hand", "2.0", rounding, lambda x: x + (x.round() - x).detach()),
        ("`clip_gradient` by norm", "hooks", "2.0",
         lambda x: gt.clip_gradient(x, max_norm=1.0), by_norm),
        ("`clip_gradient` by value", "hooks", "1.5",
         lambda x: gt.clip_gradient(x, max_value=0.1), by_value),
    ):  # fmt: skip
        yield Row(f"200 {name} in one step", peer, before, 1.1,
                  partial(_edited, ours, w, x), partial(_edited, theirs, w, x))  # fmt: skip
    for n, before in ((100, "3.4"), (400, "5.7"), (2000, "17")):
        leaves = {str(k): torch.randn(8, requires_grad=True) for k in range(n)}
        yield Row(f"`clip_gradient` of {n:,} leaves", "a Function by hand", before, 2.0,
                  partial(_clipped, partial(gt.clip_gradient, max_norm=1.0), leaves),
                  partial(_clipped, _clipped_by_hand, leaves))  # fmt: skip


def _edited(edit: Loss, w: torch.Tensor, x: torch.Tensor) -> None:
    w.grad = None
    y = x
    for _ in range(200):
        y = edit(y * w)
    y.sum().backward()


def _clipped(clip: Any, leaves: dict[str, torch.Tensor]) -> object:
    clipped = clip({name: x * 1.0 for name, x in leaves.items()})
    return torch.autograd.grad(torch.cat([*clipped.values()]).sum(), [*leaves.values()])


class _ClippedByHand(torch.autograd.Function):
    """The identity, with gradients clipped by their joint norm."""

    @staticmethod
    def forward(ctx: Any, *xs: torch.Tensor) -> Any:
        return tuple([x.view_as(x) for x in xs])

    @staticmethod
    def backward(ctx: Any, *cts: torch.Tensor) -> Any:
        norm = torch.stack([ct.square().sum() for ct in cts]).sum().sqrt()
        factor = 1.0 / norm.clamp(min=1.0)
        return tuple([ct * factor for ct in cts])


def _clipped_by_hand(tree: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return dict(zip(tree, _ClippedByHand.apply(*tree.values()), strict=True))


class _Sine(torch.autograd.Function):
    """Implements the sine with a generated vmap rule."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: torch.Tensor) -> Any:
        return x.sin()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, ct: torch.Tensor) -> Any:
        return ct * ctx.saved_tensors[0].cos()


class _HostSine(torch.autograd.Function):
    """Implements the sine with NumPy and a vmap rule."""

    @staticmethod
    def forward(x: torch.Tensor) -> Any:
        return torch.from_numpy(np.sin(x.numpy()))

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, ct: torch.Tensor) -> Any:
        return ct * _HostCosine.apply(ctx.saved_tensors[0])

    @staticmethod
    def vmap(info: Any, in_dims: Any, x: torch.Tensor) -> Any:
        return _HostSine.apply(x), in_dims[0]


class _HostCosine(_HostSine):
    """Implements the derivative of `_HostSine` with NumPy."""

    @staticmethod
    def forward(x: torch.Tensor) -> Any:
        return torch.from_numpy(np.cos(x.numpy()))

    @staticmethod
    def vmap(info: Any, in_dims: Any, x: torch.Tensor) -> Any:
        return _HostCosine.apply(x), in_dims[0]


def rules() -> Iterator[Row]:
    xs = torch.randn(64, 32)
    rule = gt.custom_rule(torch.sin)
    rule.defvjp(lambda x: (torch.sin(x), x), lambda x, ct: (ct * torch.cos(x),))
    host = gt.host_function(np.sin, vectorized=True)
    slope = gt.host_function(np.cos, vectorized=True)
    host.defvjp(lambda x: (host(x), x), lambda x, ct: (ct * slope(x),))
    for name, before, goal, f, Peer in (
        ("a rule", "1.46", 1.15, rule, _Sine), ("a host function", "3.3", 1.5, host, _HostSine),
    ):  # fmt: skip
        ours = gt.vmap(gt.grad(lambda x, f=f: f(x).sum()))
        theirs = torch.vmap(torch.func.grad(lambda x, f=Peer: f.apply(x).sum()))
        yield Row(f"`vmap(grad)` of {name}", "a Function with a vmap rule", before, goal,
                  partial(ours, xs), partial(theirs, xs), count=25)  # fmt: skip
    w = torch.randn(64, 64, requires_grad=True)
    for of in (host, _sine_op()):
        of(xs)
    ours, theirs = (
        torch.compile(lambda w, f=f: f(xs @ w[:32]).square().sum()) for f in (host, _sine_op())
    )

    def step(f: Loss) -> object:
        return torch.autograd.grad(f(w), w)

    yield Row("`host_function` in compiled code", "`torch.library.custom_op`, compiled", "2.1", 1.3,
              partial(step, ours), partial(step, theirs), count=25)  # fmt: skip


def _sine_op() -> Any:
    @torch.library.custom_op("steps::sine", mutates_args=())
    def sine(x: torch.Tensor) -> torch.Tensor:
        return torch.from_numpy(np.sin(x.numpy()))

    @torch.library.custom_op("steps::cosine", mutates_args=())
    def cosine(x: torch.Tensor) -> torch.Tensor:
        return torch.from_numpy(np.cos(x.numpy()))

    sine.register_fake(torch.empty_like)
    cosine.register_fake(torch.empty_like)
    sine.register_autograd(
        lambda ctx, ct: ct * cosine(ctx.saved_tensors[0]),
        setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
    )
    return sine


# --- second order ----------------------------------------------------------------------------


def second_order() -> Iterator[Row]:
    net, x = mlp(6, 256).requires_grad_(False), torch.randn(64, 256)
    vs = [torch.randn_like(x) for _ in range(8)]
    f = lambda x: net(x).square().sum()

    def linearized() -> object:
        _, push = gt.linearize(gt.grad(f), x)
        return [push(v) for v in vs]

    def double_backward() -> object:
        y = x.clone().requires_grad_()
        (g,) = torch.autograd.grad(f(y), y, create_graph=True)
        return [torch.autograd.grad(g, y, v, retain_graph=True) for v in vs]

    peer = "double backward, graph kept"
    yield Row("8 Hessian products at one point, by `linearize(grad(f))`", peer, "1.65 to 1.8", 1.1,
              linearized, double_backward)  # fmt: skip
    yield from of_modules()
    yield from frozen_rows()
    yield from mixed()


def of_modules() -> Iterator[Row]:
    net, x = mlp(6, 256), torch.randn(64, 256)
    params = [*net.parameters()]
    names = [name for name, _ in net.named_parameters()]
    us = [torch.randn_like(p) for p in params]
    tangents = dict(zip(names, us, strict=True))

    def hvp_by_hand() -> object:
        grads = torch.autograd.grad(loss(net, x), params, create_graph=True)
        return grads, torch.autograd.grad(grads, params, us)

    yield Row("`hvp` of a module", "double backward", "1.22", 1.1,
              lambda: gt.hvp(lambda m: loss(m, x), (net,), (tangents,)), hvp_by_hand)  # fmt: skip
    apply, flat, state = gt.make_functional(net)
    out = lambda p: apply(p, state, x)[0]
    fixed = {name: u.clone() for name, u in tangents.items()}

    def gauss_newton() -> object:
        y, push = gt.linearize(out, flat)
        return gt.vjp(out, flat)[1](push(fixed) / y.numel())

    def by_hand() -> object:
        own = {name: p.detach().requires_grad_() for name, p in flat.items()}
        y = torch.func.functional_call(net, own, (x,))
        ct = torch.zeros_like(y, requires_grad=True)
        pulled = torch.autograd.grad(y, [*own.values()], ct, create_graph=True)
        (pushed,) = torch.autograd.grad(pulled, ct, us, retain_graph=True)
        return torch.autograd.grad(y, [*own.values()], pushed / y.numel())

    yield Row("a Gauss-Newton product by `linearize` and `vjp`", "by hand, one graph", "1.36", 1.15,
              gauss_newton, by_hand)  # fmt: skip


def frozen_rows() -> Iterator[Row]:
    net = torch_model("convolutional", 4)
    y = (torch.randn(256, 8) / 16).requires_grad_()
    zs = torch.randn(64, *CODES["convolutional"])
    frozen = gt.frozen(net)

    def ours() -> None:
        y.grad = None
        slopes = [gt.grad(lambda z: torch_f(y, frozen(z)))(z) for z in zs]
        torch_g(torch.stack(slopes)).backward()

    def theirs() -> None:
        y.grad = None
        slopes = []
        for z in zs:
            z = z.clone().requires_grad_()
            slopes += torch.autograd.grad(torch_f(y, net(z)), z, create_graph=True)
        torch_g(torch.stack(slopes)).backward()

    yield Row("`frozen`, convolutional decoder, N = 64, then `loss.backward()`", "double backward",
              "2.54", 0.95, ours, theirs, count=3)  # fmt: skip


def mixed() -> Iterator[Row]:
    G = mlp(6, 128).requires_grad_(False)
    y, z = torch.randn(128), torch.randn(64, 128)
    us = [torch.randn_like(z) for _ in range(4)]
    f = lambda y, g: (torch.tanh(g) @ y).square().sum()

    def flops(run: Run) -> int:
        with Work() as work:
            run()
        return work.flops

    def along_four() -> object:
        return gt.mixed_partial(f, G, y, z, us)

    yield Row("`mixed_partial`, four directions: forward passes of work", "6 by `torch.vmap`", "12",
              5, lambda: flops(along_four) / flops(lambda: G(z)),
              counted=(along_four, lambda: G(z)))  # fmt: skip


# --- derivatives with respect to inputs ------------------------------------------------------


def residuals() -> Iterator[Row]:
    pinn = nn.Sequential(nn.Linear(2, 128), nn.Tanh(), mlp(4, 128), nn.Linear(128, 1))
    points = torch.randn(1024, 2)
    u = lambda x: pinn(x).sum()

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

    yield Row("PINN residual, u_xx + u_yy, 5 x 128, 1,024 points", "nested `autograd.grad`", "1.35",
              1.05, residual, residual_by_hand)  # fmt: skip


# --- per-example gradients, operators that read programs -------------------------------------


def private() -> Iterator[Row]:
    """Yields rows for the clipped sum of the gradients of 256 examples, compared with Opacus."""
    from tests.support.live_bytes import LiveBytes

    net, xs = transformer(2, 128), torch.randn(256, 32, 128)
    apply, params, state = gt.make_functional(net)
    each = gt.per_example_grad(lambda p, x: loss(lambda x: apply(p, state, x)[0], x))

    def of_chunk(x: torch.Tensor) -> dict[str, torch.Tensor]:  # frees the gradients on return
        grads = each(params, x)
        norms = torch.stack([g.flatten(1).norm(dim=1) for g in grads.values()]).norm(dim=0)
        factors = 1.0 / norms.clamp(min=1.0)
        return {name: torch.tensordot(factors, g, 1) for name, g in grads.items()}

    def ours() -> object:
        total, *others = map(of_chunk, xs.split(64))
        return {name: g + sum(own[name] for own in others) for name, g in total.items()}

    def peak() -> float:
        with LiveBytes() as live:
            ours()
        return live.peak / 1e6

    name = "per-example clipped sum, transformer, 256 examples, 4 chunks"
    if importlib.util.find_spec("opacus") is None:
        return
    opacus: Any = importlib.import_module("opacus.grad_sample")
    own = copy.deepcopy(net)
    ghost = opacus.GradSampleModuleFastGradientClipping(
        own, loss_reduction="sum", max_grad_norm=1.0
    )

    def theirs() -> object:
        own.zero_grad()
        ghost.enable_hooks()
        losses = ghost(xs).square().mean((1, 2))
        losses.sum().backward(retain_graph=True)
        factors = ghost.get_clipping_coef()
        own.zero_grad()
        ghost.disable_hooks()
        (losses * factors.detach()).sum().backward()
        return [p.grad for p in own.parameters()]

    found = ours()
    for p, g in zip(found.values(), theirs(), strict=True):  # type: ignore[attr-defined, call-overload]
        torch.testing.assert_close(p, g, rtol=1e-3, atol=1e-4)
    yield Row(name, "Opacus, ghost clipping", "0.73", 0.6, ours, theirs, count=5)
    yield Row(f"{name}: MB", "", "400", 170, peak)


def reading() -> Iterator[Row]:
    net, x, y = transformer(12, 64), torch.randn(2, 16, 64), torch.ones(())
    apply, params, state = gt.make_functional(net)
    f = lambda p, x: loss(lambda x: apply(p, state, x)[0], x)

    def timed(run: Run, small: Run) -> float:
        small()  # imports modules
        start = time.process_time()
        run()
        return time.process_time() - start

    yield Row("`formula` of a transformer of 12 layers: seconds", "", "3.5", 1.0,
              lambda: timed(lambda: str(gt.formula(f, params, x)),
                            lambda: gt.formula(torch.sin, y)),
              counted=(lambda: str(gt.formula(f, params, x)), lambda: f(params, x)))  # fmt: skip


def small() -> Iterator[Row]:
    """Yields rows with the overhead of gradtools for a function of four operations."""
    x = torch.randn(5, dtype=torch.float64)
    f = lambda x: (x.sin() * x).sum()
    g = gt.grad(f)
    twice = gt.grad(lambda x: g(x).square().sum())

    def by_hand() -> torch.Tensor:
        y = x.detach().requires_grad_()
        return torch.autograd.grad(f(y), y)[0]

    def twice_by_hand() -> torch.Tensor:
        y = x.detach().requires_grad_()
        (slope,) = torch.autograd.grad(f(y), y, create_graph=True)
        return torch.autograd.grad(slope.square().sum(), y)[0]

    def often(run: Run) -> Run:
        return lambda: [run() for _ in range(500)]

    hand = "`torch.autograd.grad`"
    yield Row("`grad` of four operations", hand, "", 1.35, often(lambda: g(x)), often(by_hand))
    yield Row("`grad` of `grad` of four operations", hand, "", 1.6, often(lambda: twice(x)),
              often(twice_by_hand))  # fmt: skip
    yield Row("`jvp` of four operations", "`torch.func.jvp`", "", 1.3,
              often(lambda: gt.jvp(f, (x,), (x,))),
              often(lambda: torch.func.jvp(f, (x,), (x,))))  # fmt: skip
    for count in (64, 160):
        xs = {str(k): torch.randn(2, dtype=torch.float64) for k in range(count)}
        cubes = lambda xs: sum((v**3).sum() for v in xs.values()) + (xs["0"] * xs["1"]).sum()
        yield Row(f"`hessian` over {count} leaves", "`torch.func.hessian`", "", 1.0,
                  partial(gt.hessian(cubes), xs), partial(torch.func.hessian(cubes), xs),
                  count=5)  # fmt: skip


PARTS = (small, jacobians, modules, chunks, recomputed, edits, rules, second_order, residuals,
         private, reading)  # fmt: skip


# --- growth ----------------------------------------------------------------------------------


def growth() -> Iterator[tuple[str, Callable[[int], Run], dict[int, int]]]:
    """Yields a name, a function from n to a program, and each n's number of leaves or calls."""
    rule = gt.custom_rule(torch.sin)
    rule.defvjp(lambda x: (torch.sin(x), x), lambda x, ct: (ct * torch.cos(x),))
    x = torch.randn(512, 4)

    def of_leaves(n: int) -> Run:
        tree = {str(i): torch.randn(4) for i in range(n)}
        f = lambda tree: torch.cat([*tree.values()]).square().sum()
        return lambda: gt.grad(f)(tree)

    def of_modules(n: int) -> Run:
        net = mlp(n // 2, 4)
        return lambda: gt.grad(lambda m: loss(m, x[:2]))(net)

    def of_chunks(n: int) -> Run:
        f = gt.chunked(lambda x: x.sin(), 512 // n)
        return lambda: gt.grad(lambda x: f(x).sum())(x)

    def of_microbatches(n: int) -> Run:
        w = torch.randn(4)
        f = gt.microbatched_value_and_grad(lambda w, x: (x @ w).square().mean(), 512 // n)
        return lambda: f(w, x)

    def of_rules(n: int) -> Run:
        def f(x: torch.Tensor) -> torch.Tensor:
            for _ in range(n):
                x = rule(x)
            return x.sum()

        return lambda: gt.grad(f)(x[0])

    def nested(n: int) -> Run:
        f: Any = lambda x: x.sin()
        for _ in range(n):
            f = gt.checkpoint(lambda x, f=f: f(x) * 2.0)
        return lambda: gt.grad(lambda x: f(x).sum())(x)

    def inside(n: int) -> Run:
        f: Any = lambda x: x.sin().sum()
        for _ in range(n - 1):
            f = lambda x, f=f: x.sin().sum() + gt.grad(f)(x.detach()).sum()
        return lambda: gt.grad(f)(x)

    def mapped(n: int) -> Run:
        f: Any = torch.sin
        for _ in range(n):
            f = gt.vmap(f)
        return lambda: f(x.reshape(2, 2, 2, 2, -1))

    for name, of, counts in (
        ("leaves of a dictionary", of_leaves, (1, 20, 200, 2000)),
        ("tensors of a module", of_modules, (2, 20, 200, 2000)),
        ("chunks", of_chunks, (1, 8, 64, 512)),
        ("microbatches", of_microbatches, (1, 8, 64, 512)),
        ("rules in one program", of_rules, (1, 3, 30, 300)),
    ):
        yield name, of, dict(zip(counts, counts, strict=True))
    # Level k of n runs 1 + k times: once, and once more for level k and each enclosing level.
    runs = {n: n + n * (n + 1) // 2 for n in range(1, 5)}
    yield "runs of `checkpoint` in `checkpoint`, by depth", nested, runs
    for name, of in (("`grad` in `grad`", inside), ("`vmap` in `vmap`", mapped)):
        yield f"calls of {name}, by depth", of, {n: n for n in range(1, 5)}
