"""Programs as those of `replay_programs`, of models: adapters, codebooks, caches, teachers.

Each is what one finds in a model's repository, and keeps state in a way of its own.
"""

from __future__ import annotations

import functools
import random
import types
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.utils import parametrizations, parametrize
from torch.utils.checkpoint import checkpoint as torch_checkpoint

import gradtools.torch as gt
from tests.support.replay_worlds import (
    CHECKPOINT,
    CHUNKED,
    EITHER,
    REFUSED,
    REPLAYED,
    TRAINED,
    D,
    Run,
    World,
    batch,
    mlp,
    of_module,
    program,
    score,
    simple,
    state_of,
    weight,
)


class Block(nn.Module):
    """A linear layer in double precision, and what a subclass does around it."""

    def __init__(self, width: int = 3) -> None:
        super().__init__()
        self.linear = nn.Linear(3, width, dtype=D)
        self.more()

    def more(self) -> None:
        """What else it holds."""

    def forward(self, x: Any) -> Any:
        return self.linear(x)


def block(more: Callable[[Any], Any], forward: Callable[[Any, Any], Any]) -> Block:
    """A Block of these two."""
    return type("Block", (Block,), {"more": more, "forward": forward})()


def nothing(module: Any) -> None:
    """No more state."""


# --- weights --------------------------------------------------------------------------------


@program("a weight is tied anew in each forward pass")
def _() -> World:
    def tied(self: Any, x: Any) -> Any:
        self.head.weight = self.linear.weight
        return self.head(torch.tanh(self.linear(x)))

    return of_module(block(lambda m: setattr(m, "head", nn.Linear(3, 3, dtype=D)), tied))


@program("a weight with noise of its own parametrization", expect=EITHER)
def _() -> World:
    class Noise(nn.Module):
        def forward(self, w: Any) -> Any:
            return w + 0.1 * torch.randn_like(w)

    net = mlp()
    parametrize.register_parametrization(net[0], "weight", Noise())
    return of_module(net)


@program("spectral norm, in evaluation first and then in training", TRAINED)
def _() -> World:
    net = parametrizations.spectral_norm(nn.Linear(3, 3, dtype=D))

    def step(run: Run) -> dict[str, Any]:
        found = []
        for training in (False, True):
            net.train(training).zero_grad()
            loss = score(run(net)(batch()))
            loss.backward()
            found.append([p.grad for p in net.parameters()])
        return {"grads": found}

    return World(step, lambda: state_of(net))


@program("a hook swaps the layers of a list before each call")
def _() -> World:
    net = nn.ModuleDict(
        {"layers": nn.ModuleList([nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 3)])}
    ).double()

    def turn(m: Any, args: Any) -> None:
        m["layers"] = nn.ModuleList([*m["layers"][1:], m["layers"][0]])

    def forward(x: Any) -> Any:
        for layer in net["layers"]:
            x = torch.tanh(layer(x))
        return x

    net.register_forward_pre_hook(turn)
    net.forward = forward  # type: ignore[assignment]
    return of_module(net)


@program("a layer is taken out and put back in each call")
def _() -> World:
    def forward(self: Any, x: Any) -> Any:
        layer = self.linear
        del self.linear
        y = layer(x)
        self.linear = layer
        return y

    return of_module(block(nothing, forward))


# --- averages and teachers ------------------------------------------------------------------


@program("an average of the weights is kept in a buffer and read")
def _() -> World:
    def more(self: Any) -> None:
        self.register_buffer("average", self.linear.weight.detach().clone())

    def forward(self: Any, x: Any) -> Any:
        with torch.no_grad():
            self.average.lerp_(self.linear.weight, 0.3)
        return self.linear(x) + x @ self.average.clone().T

    return of_module(block(more, forward))


# --- randomness -----------------------------------------------------------------------------


def _depth(draw: Callable[[Any], float], more: Callable[[Any], Any] = nothing) -> World:
    """Stochastic depth: a layer is left out by chance."""

    def made(self: Any) -> None:
        self.layers = nn.ModuleList([nn.Linear(3, 3, dtype=D) for _ in range(4)])
        more(self)

    def forward(self: Any, x: Any) -> Any:
        for layer in self.layers:
            if draw(self) > 0.4:
                x = x + torch.tanh(layer(x))
        return self.linear(x)

    return of_module(block(made, forward))


for _name, _draw, _more in (
    ("PyTorch", lambda m: float(torch.rand(())), nothing),
    ("Python", lambda m: random.random(), nothing),
    (
        "NumPy",
        lambda m: float(m.rng.random()),
        lambda m: setattr(m, "rng", np.random.default_rng(0)),
    ),
    (
        "a generator of PyTorch's on the module",
        lambda m: float(torch.rand((), generator=m.rng)),
        lambda m: setattr(m, "rng", torch.Generator().manual_seed(1)),
    ),
    (
        "a random.Random of a class of its own",
        lambda m: m.rng.counted(),
        lambda m: setattr(m, "rng", Counted(3)),
    ),
    (
        "a seed that counts",
        lambda m: (setattr(m, "n", m.n + 1), float(np.random.default_rng(m.n).random()))[1],
        lambda m: setattr(m, "n", 0),
    ),
    (
        "a generator that is seeded by a counter",
        lambda m: (
            m.step.add_(1),
            m.rng.manual_seed(int(m.step)),
            float(torch.rand((), generator=m.rng)),
        )[2],
        lambda m: (
            m.register_buffer("step", torch.zeros((), dtype=torch.int64)),
            setattr(m, "rng", torch.Generator()),
        ),
    ),
):
    program(f"stochastic depth by {_name}")(
        lambda draw=_draw, more=_more: _depth(draw, more)  # type: ignore[misc]
    )


class Counted(random.Random):
    """It counts besides."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.n = 0

    def counted(self) -> float:
        """A number between 0 and 1."""
        self.n += 1
        return (self.random() + self.n * 0.37) % 1.0


@program("a mask is drawn once for each shape and kept", (CHUNKED, CHECKPOINT), EITHER)
def _() -> World:
    def forward(self: Any, x: Any) -> Any:
        if x.shape not in self.masks:
            self.masks[x.shape] = torch.rand_like(x) > 0.5
        return self.linear(x * self.masks[x.shape])

    return of_module(block(lambda m: setattr(m, "masks", {}), forward))


# --- caches ---------------------------------------------------------------------------------


@program("a table of angles that grows with the longest sequence")
def _() -> World:
    def more(self: Any) -> None:
        self.register_buffer("angles", torch.zeros(0, dtype=D), persistent=False)

    def forward(self: Any, x: Any) -> Any:
        if len(self.angles) < x.shape[1]:
            self.angles = torch.arange(x.shape[1], dtype=D) / 7
        return self.linear(x) * self.angles[: x.shape[1]].cos()

    return of_module(block(more, forward))


# --- statistics -----------------------------------------------------------------------------


@program("a codebook of averages, whose dead codes are drawn anew")
def _() -> World:
    def more(self: Any) -> None:
        self.register_buffer("codes", torch.randn(4, 3, dtype=D))
        self.register_buffer("counts", torch.ones(4, dtype=D))

    def forward(self: Any, x: Any) -> Any:
        y = self.linear(x)
        which = torch.cdist(y.detach(), self.codes).argmin(1)
        quantized = y + (self.codes[which] - y).detach()
        self.counts.mul_(0.8).add_(torch.bincount(which, minlength=4), alpha=0.2)
        dead = self.counts < 0.7
        self.codes[dead] = torch.randn(int(dead.sum()), 3, dtype=D)
        return quantized * self.counts[which].clone()[:, None]

    return of_module(block(more, forward), tracked=False)


@program("PyTorch's FakeQuantize with an observer that averages", TRAINED)
def _() -> World:
    quantize = torch.ao.quantization.FakeQuantize(
        torch.ao.quantization.MovingAverageMinMaxObserver, quant_min=0, quant_max=255
    )
    net = nn.Sequential(nn.Linear(3, 3), quantize)
    return of_module(net, batch(torch.float32), tolerance=1e-5)


# --- python ---------------------------------------------------------------------------------


@program("a child that reads its parent's counter by a weak reference", expect=EITHER)
def _() -> World:
    parent = types.SimpleNamespace(n=0)
    holder, w = [parent], weight()
    seen = weakref.ref(parent)

    def f(x: Any) -> Any:
        holder[0].n += 1
        return x @ w * seen().n  # type: ignore[union-attr]

    return simple(f, leaves=[w], state=lambda: parent.n)


@program("a module that hands on what it does not have to one that counts")
def _() -> World:
    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.n = nn.Linear(3, 3, dtype=D), 0

        def __getattr__(self, name: str) -> Any:
            try:
                return super().__getattr__(name)
            except AttributeError:
                return getattr(super().__getattr__("inner"), name)

        def forward(self, x: Any) -> Any:
            self.inner.seen = getattr(self, "seen", 0) + 1
            return self.inner(x) * self.seen

    return of_module(Outer())


@program("a tensor of a class that counts the functions called on it", expect=EITHER)
def _() -> World:
    class Tallied(torch.Tensor):
        calls = 0

        @classmethod
        def __torch_function__(
            cls, fun: Any, kinds: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            Tallied.calls += 1
            return super().__torch_function__(fun, kinds, args, kwargs or {})

    w = weight().detach()

    def f(x: Any) -> Any:
        y = x.as_subclass(Tallied) @ w
        return y.as_subclass(torch.Tensor) * (1 + Tallied.calls % 3)

    return simple(f)


def _in_two_steps(f: Any, net: nn.Module, change: Callable[[], Any], state: Any) -> World:
    """A step, a change of what f is, and a step."""

    def step(run: Run) -> dict[str, Any]:
        operator, found = run(f), []
        for turn in (0, 1):
            if turn:
                change()
            net.zero_grad()
            score(operator(batch())).backward()
            found.append([p.grad for p in net.parameters()])
        return {"grads": found}

    return World(step, state)


SEEN = [0]


@program("the code of a function is replaced between two steps, as a reload does", TRAINED, EITHER)
def _() -> World:
    net, SEEN[0] = Block(), 0

    def counts(x: Any, net: Any = net) -> Any:
        SEEN[0] += 1
        return net(x) * SEEN[0]

    def f(x: Any, net: Any = net) -> Any:
        return net(x)

    change = functools.partial(setattr, f, "__code__", counts.__code__)
    return _in_two_steps(f, net, change, lambda: SEEN[0])


class Scripted(nn.Module):
    """A number, a list and a tensor, for TorchScript."""

    n: int
    seen: list[int]

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3, dtype=torch.float64)
        self.n, self.seen = 0, [1]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.n += 1
        self.seen.append(self.n)
        return self.linear(x) * float(self.n + len(self.seen))


Scripted.__annotations__ = {"n": int, "seen": list[int]}  # TorchScript reads no strings


@program(
    "a scripted module with a number and a list that count",
    TRAINED,
    expect=REFUSED,
)
def _() -> World:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        net = torch.jit.script(Scripted())
    return simple(net, module=net, state=lambda: (net.n, net.seen))


# --- operators in each other ----------------------------------------------------------------


@program("blocks that checkpoint themselves as transformers' do")
def _() -> World:
    class Layers(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList([mlp(nn.Dropout(0.5)) for _ in range(2)])
            self.gradient_checkpointing = True

        def forward(self, x: Any) -> Any:
            for layer in self.layers:
                if self.gradient_checkpointing and self.training:
                    x = x + torch_checkpoint(layer.__call__, x, use_reentrant=False)
                else:
                    x = x + layer(x)
            return x

    return of_module(Layers())


@program("gt.frozen inside of f, with batch statistics", TRAINED)
def _() -> World:
    inner, w = mlp(nn.BatchNorm1d(4)).requires_grad_(False), weight()
    G = gt.frozen(inner)
    return simple(lambda x: G(x @ w), leaves=[w], state=lambda: state_of(inner))


@program("a compiled layer in a module that counts", TRAINED, EITHER)
def _() -> World:
    torch._dynamo.reset()

    def more(self: Any) -> None:
        self.fast, self.n = torch.compile(mlp(nn.Dropout(0.5)), backend="aot_eager"), 0

    def forward(self: Any, x: Any) -> Any:
        self.n += 1
        return self.linear(self.fast(x)) * self.n

    return of_module(block(more, forward))


@program("a ragged batch that is packed, through a GRU that keeps its state", TRAINED)
def _() -> World:
    gru, head = nn.GRU(1, 3, batch_first=True, dtype=D), nn.Linear(3, 3, dtype=D)
    net = nn.ModuleDict({"gru": gru, "head": head})
    net.state = None  # type: ignore[assignment]

    def f(x: Any) -> Any:
        lengths = 1 + (x[:, 0] > 0).to(torch.int64) + (x[:, 1] > 0).to(torch.int64)
        packed = nn.utils.rnn.pack_padded_sequence(
            x[..., None], lengths, batch_first=True, enforce_sorted=False
        )
        _, h = gru(packed, net.state)
        net.state = h.detach()
        return head(h[0])

    return simple(f, module=net)


@program("rows that give NaN, the same each time", (*REPLAYED,))
def _() -> World:
    net = mlp(nn.Dropout(0.5))
    return simple(lambda x: net(x) * torch.where(x > 2, x.log(), torch.ones_like(x)), module=net)
