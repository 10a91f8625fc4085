"""Defines programs that test recomputation in PyTorch with state, draws, hooks and transforms.

`chunked`, `frozen` and `checkpoint` recompute a part of a program. Each program must return the
same values and leave the same state as its plain version (a loop over chunks, double backward, or f
itself), or gradtools must raise its own error. A program makes a `World` for each run: a step that
computes numbers with an operator, and a function that reads the state afterwards.
`test_replay_programs` runs both versions and compares them.
"""

from __future__ import annotations

import contextlib
import copy
import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrizations
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.checkpoint import checkpoint as torch_checkpoint

import gradtools.torch as gt
from tests.support.scenarios import Table

D = torch.float64
CHUNKED, CHECKPOINT, FROZEN = "chunked", "checkpoint", "frozen"
MICROBATCHED = "microbatched_value_and_grad"
TRAINED, REPLAYED = (CHUNKED, CHECKPOINT), (CHUNKED, CHECKPOINT, FROZEN)
ALL = (*REPLAYED, MICROBATCHED)
RIGHT, REFUSED, EITHER = "right", "refused", "right or refused"
PROGRAMS = Table()


def program(name: str, kinds: Any = ALL, expect: str = RIGHT) -> Any:
    """Register a program for the operators `kinds`; the decorated function returns the `World`."""
    return PROGRAMS.add(name, expect, kinds=kinds)


@dataclass
class Run:
    """One run of a step with an operator of gradtools or with the operator's plain version."""

    kind: str
    plain: bool
    size: int = 2
    verify: Any = "first"

    def __call__(self, f: Callable[..., Any], in_axes: Any = 0) -> Callable[..., Any]:
        """Apply the operator, or the plain version of the operator, to f."""
        if self.kind != CHUNKED:
            operator = gt.frozen if self.kind == FROZEN else gt.checkpoint
            return f if self.plain else operator(f)
        if not self.plain:
            return gt.chunked(f, self.size, in_axes, verify=self.verify)
        axes = in_axes if isinstance(in_axes, tuple) else (in_axes,)

        def loop(*args: Any, **keywords: Any) -> Any:
            cut = lambda i: [
                a if axis is None else a[i : i + self.size]
                for a, axis in zip(args, axes, strict=True)
            ]
            outs = [f(*cut(i), **keywords) for i in range(0, len(args[0]), self.size)]
            join = lambda *ys: torch.cat(ys) if isinstance(ys[0], torch.Tensor) else ys[0]
            return tree_map(join, *outs)

        return loop


@dataclass
class World:
    """The step of a program and a function that reads its state.

    Attributes:
        step: Runs the operator and returns a dict of values, which are compared.
        state: Returns the state after the step, which is compared bitwise.
        tolerance: The tolerance for values, relative to the largest absolute value.
    """

    step: Callable[[Run], dict[str, Any]]
    state: Callable[[], Any] = lambda: None
    tolerance: float = 1e-9


# --- the usual step -------------------------------------------------------------------------


def batch(dtype: torch.dtype = D) -> torch.Tensor:
    """Return rows of numbers between -1 and 1."""
    return torch.linspace(0.3, 9.0, 18, dtype=dtype).sin().reshape(6, 3)


def weight(rows: int = 3, width: int = 3) -> torch.Tensor:
    """Return a leaf tensor of weights."""
    numbers = torch.linspace(0.1, 5.0, rows * width, dtype=D).cos()
    return numbers.reshape(rows, width).requires_grad_()


def score(out: Any, scale: Any = 1.0) -> torch.Tensor:
    """Return a scalar loss that depends on each entry of all outputs with a different factor."""
    total = torch.zeros((), dtype=D)
    for y in tree_leaves(out):
        if isinstance(y, torch.Tensor) and (y.is_floating_point() or y.is_complex()):
            y = torch.view_as_real(y.resolve_conj()) if y.is_complex() else y
            y = y.to_dense() if y.layout is not torch.strided else y
            coefficients = torch.linspace(0.5, 1.5, y.numel(), dtype=D).reshape(y.shape)
            total = total + ((scale * y.to(D)).sin() * coefficients).sum() + y.to(D).mean() ** 2
    return total


def state_of(module: nn.Module) -> Any:
    """Return copies of the module's parameters and buffers."""
    return [{k: x.detach().clone() for k, x in module.state_dict(keep_vars=True).items()}]


def simple(
    f: Callable[..., Any],
    x: Any = None,
    *,
    module: nn.Module | None = None,
    leaves: Any = (),
    shared: Any = (),
    keywords: Any = None,
    state: Callable[[], Any] = lambda: None,
    between: Callable[[], Any] = lambda: None,
    around: Callable[[], Any] = contextlib.nullcontext,
    tracked: bool = True,
    tolerance: float = 1e-9,
) -> World:
    """Return a world whose step is one forward pass and one backward pass of f.

    f: A function of a batch and shared arguments. module, leaves: The parameters with respect to
    which the loss is also differentiated. between: A function that runs between the forward pass
    and the backward pass. around: A context manager around the forward pass and the loss. tracked:
    Whether the loss is differentiated with respect to the batch.
    """
    x = batch() if x is None else x
    keywords, leaves = keywords or {}, list(leaves)
    if module is not None:
        leaves += [p for p in module.parameters() if p.requires_grad]
    x = x.detach().requires_grad_() if tracked and x.is_floating_point() else x
    own = [t for t in (x, *tree_leaves((shared, keywords))) if isinstance(t, torch.Tensor)]
    axes = (0, *(None for _ in shared))

    def trained(run: Run) -> dict[str, Any]:
        with around():
            out = run(f, axes)(x, *shared, **keywords)
            loss = score(out)
        between()
        if loss.requires_grad:
            loss.backward()
        return {"loss": loss, "grads": [t.grad for t in (x, *leaves)]}

    def twice(run: Run) -> dict[str, Any]:
        zs = [part.detach().requires_grad_() for part in (x[:3], x[3:])]
        y = torch.tensor(1.3, dtype=D, requires_grad=True)
        with around():
            G = run(f)
            # compute all values G(z) before the first pullback runs
            inner = [score(G(z, *shared, **keywords), y) for z in zs]
        between()
        slopes = [
            torch.autograd.grad(v, z, create_graph=True)[0] for v, z in zip(inner, zs, strict=True)
        ]
        loss = sum(s.to(D).sin().sum() for s in slopes)
        grads = torch.autograd.grad(loss, [y, *zs], allow_unused=True)
        return {"loss": loss, "grads": list(grads)}

    def micro(run: Run) -> dict[str, Any]:
        scale = torch.tensor(1.3, dtype=D, requires_grad=not run.plain)
        data = x.detach()
        mean = lambda s, x, *shared: score(f(x, *shared, **keywords), s)
        with around():
            if not run.plain:
                value, grad = gt.microbatched_value_and_grad(mean, run.size, in_axes=(None, *axes))(
                    scale, data, *shared
                )
                return {"value": value, "grad": grad}
            found = []
            for part in data.split(run.size):
                s = scale.clone().requires_grad_()
                v = mean(s, part, *shared)
                found.append((v.detach(), *torch.autograd.grad(v, s)))
        value, grad = (sum(column) / len(found) for column in zip(*found, strict=True))
        return {"value": value, "grad": grad}

    def step(run: Run) -> dict[str, Any]:
        return {FROZEN: twice, MICROBATCHED: micro}.get(run.kind, trained)(run)

    def read() -> Any:
        held = [t.detach().clone() for t in own]
        return {"arguments": held, "module": module and state_of(module), "more": state()}

    return World(step, read, tolerance)


def of_module(module: nn.Module, x: Any = None, **options: Any) -> World:
    """Return a world that calls a module directly."""
    return simple(module, x, module=module, **options)


def mlp(*more: nn.Module, dtype: torch.dtype = D) -> nn.Sequential:
    """Return a small network with additional layers in its middle."""
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), *more, nn.Linear(4, 3)).to(dtype)


def of_weight(name: str, make: Any, kinds: Any = ALL, expect: str = RIGHT, **how: Any) -> None:
    """Register a program f(x) that captures a weight w; `make(w)` returns f."""

    @program(name, kinds, expect)
    def _() -> World:
        w = weight()
        return simple(make(w), leaves=[w], **how)


def of_net(name: str, make: Any, kinds: Any = ALL, expect: str = RIGHT, **how: Any) -> None:
    """Register a program that calls the module `make()`."""
    program(name, kinds, expect)(lambda: of_module(make(), **how))


# --- autocast, and arguments that f changes in place -----------------------------------------

half = lambda: torch.autocast("cpu", dtype=torch.bfloat16)


def narrow(around: Any, inside: Any) -> World:
    """Return a world with a network under autocast.

    around, inside: Context managers around the step and around the body of f.
    """
    net = mlp(dtype=torch.float32)

    def f(x: Any) -> Any:
        with inside():
            return net(x)

    return simple(f, batch(torch.float32), module=net, around=around, tolerance=0.03)


nothing = contextlib.nullcontext
program("a network under autocast", REPLAYED)(lambda: narrow(half, nothing))
program("autocast is entered inside of f", REPLAYED)(lambda: narrow(nothing, half))


def _changing(argument: Any, change: Callable[[Any], Any], **how: Any) -> World:
    w = weight()

    def f(x: Any, argument: Any) -> Any:
        y = x @ w * len(argument)
        change(argument)
        return y * (argument.sum() if isinstance(argument, torch.Tensor) else 1)

    given = {"keywords": {"argument": argument}} if how else {"shared": (argument,)}
    return simple(f, leaves=[w], state=lambda: copy.deepcopy(argument), **given)


program("f changes a shared tensor in place", REPLAYED, EITHER)(
    lambda: _changing(torch.ones(2, dtype=D), lambda t: t.add_(1))
)
program("f changes a keyword argument that is a list", expect=EITHER)(
    lambda: _changing([1.0], lambda t: t.append(1.0), keyword=True)
)
of_weight(
    "f changes its rows in place",
    lambda w: lambda x: (x.mul_(2), x.clone() @ w)[1],
    (*TRAINED, MICROBATCHED),
    EITHER,
    tracked=False,
)

# --- graph edges between consecutive chunks -------------------------------------------------


class Keeps(nn.Module):
    """A module that adds a stored mean, which has a graph, to the output of the next call."""

    def __init__(self) -> None:
        super().__init__()
        self.w, self.last = nn.Parameter(weight().detach()), None

    def forward(self, x: Any) -> Any:
        y = x @ self.w + (0 if self.last is None else self.last)
        self.last = y.mean()
        return y


of_net("a module keeps an attached mean for its next call", Keeps, REPLAYED, EITHER)


for _name in ("weight_norm", "spectral_norm"):
    of_net(
        f"a layer under {_name}",
        lambda name=_name: nn.Sequential(
            getattr(parametrizations, name)(nn.Linear(3, 3).double()), nn.Tanh()
        ),
    )

# --- state in objects of every kind ---------------------------------------------------------


def _counts_in_a_list(w: Any) -> Any:
    seen: list[int] = []
    return lambda x: (x * (seen.append(1) or len(seen))) @ w


def _draws_from_a_generator(w: Any) -> Any:
    generator = torch.Generator().manual_seed(0)
    return lambda x: (x * torch.rand((), generator=generator)) @ w


of_weight("f counts in a list", _counts_in_a_list, REPLAYED, EITHER)
of_weight("f draws from a generator that it captures", _draws_from_a_generator, REPLAYED)
program("f's result depends on the clock", REPLAYED, REFUSED)(
    lambda: simple(lambda x: x * (time.perf_counter_ns() % 1_000_003))
)


class Counting(nn.Module):
    """A module with buffers and attributes whose state changes in each call.

    tick: A function that changes the state and returns a factor.
    """

    def __init__(self, tick: Callable[[Any], Any], **parts: Any) -> None:
        super().__init__()
        self.w, self.tick = nn.Parameter(weight().detach()), tick
        for name, part in parts.items():
            if isinstance(part, torch.Tensor):
                self.register_buffer(name, part)
            else:
                setattr(self, name, part)

    def forward(self, x: Any) -> Any:
        return x @ self.w * self.tick(self)


def _replaced(self: Any) -> Any:
    self.n = self.n + 1
    return self.n


_zero = lambda: torch.zeros((), dtype=D)
_add = lambda self: self.n.add_(1).clone()
of_net("a module counts its calls in a buffer", lambda: Counting(_add, n=_zero()))
of_net("a module replaces a buffer in each call", lambda: Counting(_replaced, n=_zero()))


class Scheduled(nn.Module):
    """A gradient reversal whose scale depends on a step counter in a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.net = mlp()
        self.register_buffer("step", _zero())

    def forward(self, x: Any) -> Any:
        self.step = self.step + 1
        return self.net(gt.reverse_gradient(x, 0.1 * self.step))


of_net("a reversal with a scale from a buffer", Scheduled, TRAINED)
of_net("batch norm in training", lambda: mlp(nn.BatchNorm1d(4)))
of_net("an uninitialized lazy layer", lambda: nn.LazyLinear(2, dtype=D), expect=EITHER)


@program("a full backward hook counts its calls", TRAINED)
def _() -> World:
    net, seen = mlp(), list[int]()
    net[0].register_full_backward_hook(lambda m, a, b: seen.append(1))
    return of_module(net, state=lambda: len(seen))


# --- randomness -----------------------------------------------------------------------------

_draw_numpy = np.random.randn  # NumPy's global random state


def _seeded(x: Any) -> Any:
    y = F.dropout(x, 0.5)
    torch.manual_seed(5)
    return y * torch.rand(())


DRAWS: dict[str, Callable[[Any], Any]] = {
    "F.dropout": lambda x: F.dropout(x, 0.5),
    "random.gauss with a cached second number": lambda x: x * random.gauss(0, 1),
    "NumPy's global random stream": lambda x: x * float(_draw_numpy()),
    "torch.manual_seed inside of f": _seeded,
}
for _name, _draw in DRAWS.items():
    of_weight(f"f draws numbers: {_name}", lambda w, draw=_draw: lambda x: draw(x @ w))


# --- between forward and backward -----------------------------------------------------------


def _between(change: Callable[[Any], Any], *more: nn.Module) -> World:
    net = mlp(*more)
    return simple(net, module=net, between=lambda: change(net))


_norm = lambda: nn.BatchNorm1d(4)
_double = lambda net: net.load_state_dict({k: v * 2 for k, v in net.state_dict().items()})
_BETWEEN: dict[str, tuple[Any, Any, Any]] = {
    "the parameters are changed in place through .data": (
        lambda net: [p.data.mul_(2) for p in net.parameters()],
        (),
        EITHER,
    ),
    "a state_dict is loaded": (_double, (_norm,), EITHER),
    "the module is switched to eval mode": (lambda net: net.eval(), (_norm, nn.Dropout), EITHER),
    "running statistics are updated": (
        lambda net: [b.data.add_(1) for b in net.buffers()],
        (_norm,),
        RIGHT,
    ),
    "random numbers are drawn": (
        lambda net: (torch.rand(3), random.random(), _draw_numpy()),
        (nn.Dropout,),
        RIGHT,
    ),
}
for _name, (_change, _more, _expect) in _BETWEEN.items():
    program(f"between forward and backward {_name}", REPLAYED, _expect)(
        lambda change=_change, more=_more: _between(change, *(m() for m in more))
    )


@program("between forward and backward a captured small tensor is changed", REPLAYED, EITHER)
def _() -> World:
    held, w = torch.ones(3, dtype=D), weight()
    return simple(lambda x: x @ w * held.clone(), leaves=[w], between=lambda: held.mul_(3))


@program("an unrelated graph saved a buffer before a replay", TRAINED)
def _() -> World:
    net, p = mlp(nn.BatchNorm1d(4), nn.BatchNorm1d(4)), weight(1, 4)
    counts = Counting(_add, n=torch.ones((), dtype=D))

    def step(run: Run) -> dict[str, Any]:
        first = score(run(lambda x: counts(net(x)))(batch()))
        other = (net[2].running_mean * p).sum() + (counts.n * p).sum()
        first.backward()
        other.backward()
        return {"loss": [first, other], "grads": [p.grad, *(q.grad for q in net.parameters())]}

    return World(step, lambda: (state_of(net), state_of(counts)))


# --- layouts, programs and transforms inside of f -------------------------------------------

of_net(
    "an embedding with sparse gradients",
    lambda: nn.Embedding(5, 3, sparse=True).double(),
    TRAINED,
    x=torch.tensor([0, 1, 2, 3, 4, 0]),
)
of_weight(
    "torch.func.grad inside of f",
    lambda w: lambda x: torch.func.grad(lambda z: (z @ w).sin().sum())(x),
)
of_weight(
    "torch.vmap inside of f, with randomness",
    lambda w: lambda x: torch.vmap(lambda r: F.dropout(r @ w), randomness="different")(x),
)


def _in_mode(mode: Any) -> Any:
    def make(w: Any) -> Any:
        def f(x: Any) -> Any:
            with mode():
                scale = F.dropout((x @ w).exp()).mean()
            return x @ w * scale.clone()

        return f

    return make


of_weight("a part of f runs in inference mode", _in_mode(torch.inference_mode), tracked=False)
of_weight("a part of f runs under no_grad, with dropout", _in_mode(torch.no_grad))


def _wrapped(name: str, wrap: Any, kinds: Any = ALL, expect: str = RIGHT) -> None:
    """Register a program that runs `wrap(net)` as f."""

    @program(name, kinds, expect)
    def _() -> World:
        torch._dynamo.reset()
        net = mlp(nn.Dropout(0.5), nn.BatchNorm1d(4)) if kinds is ALL else mlp(nn.Dropout(0.5))
        return simple(wrap(net), module=net)


_call = torch.func.functional_call
_wrapped(
    "torch.utils.checkpoint inside of f",
    lambda net: lambda x: torch_checkpoint(net, x, use_reentrant=False),
    TRAINED,
)
_wrapped("gt.checkpoint inside of f", gt.checkpoint)
_wrapped("gt.chunked inside of f", lambda net: gt.chunked(net, 1), (*TRAINED, FROZEN))
_wrapped(
    "a compiled module inside of f",
    lambda n: torch.compile(n, backend="aot_eager"),
    TRAINED,
    EITHER,
)
_wrapped(
    "torch.func.functional_call with parameters computed in f",
    lambda net: lambda x: _call(net, {k: p * 2 for k, p in net.named_parameters()}, (x,)),
)


@program("gt.frozen inside of f, with batch statistics", TRAINED)
def _() -> World:
    inner, w = mlp(nn.BatchNorm1d(4)).requires_grad_(False), weight()
    G = gt.frozen(inner)
    return simple(lambda x: G(x @ w), leaves=[w], state=lambda: state_of(inner))


# --- outputs --------------------------------------------------------------------------------


def _by_turns(use: Callable[[Any, Any], Any], *turns: int) -> Callable[[], World]:
    """Return a program in which f reads an iterator, whose state gradtools cannot restore."""

    def make() -> World:
        w, other, left = weight(), weight(), iter([*turns, *[turns[-1]] * 30])
        return simple(lambda x: x @ use((w, other), next(left)), leaves=[w, other])

    return make


program("only the third chunk differs in the recomputation", TRAINED, EITHER)(
    _by_turns(lambda ws, turn: ws[0] * turn, 1, 1, 2, 1)
)
program("a recomputed chunk has the same values but no path to a weight", TRAINED, EITHER)(
    _by_turns(lambda ws, turn: ws[0] if turn else ws[0].detach(), 1, 1, 1, 0)
)

# --- models from public repositories --------------------------------------------------------


class Codebook(nn.Module):
    """A codebook that replaces rarely selected codes with random numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3, dtype=D)
        self.register_buffer("codes", torch.randn(4, 3, dtype=D))
        self.register_buffer("counts", torch.ones(4, dtype=D))

    def forward(self, x: Any) -> Any:
        y = self.linear(x)
        which = torch.cdist(y.detach(), self.codes).argmin(1)
        quantized = y + (self.codes[which] - y).detach()
        self.counts.mul_(0.8).add_(torch.bincount(which, minlength=4), alpha=0.2)
        dead = self.counts < 0.7
        self.codes[dead] = torch.randn(int(dead.sum()), 3, dtype=D)
        return quantized * self.counts[which].clone()[:, None]


of_net("a codebook that resamples unused codes", Codebook, tracked=False)
