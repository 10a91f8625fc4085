"""Worlds in which what is computed again is compared with what was computed.

A program is a world that is made anew for each run: a step, which computes numbers by way of an
operator, and a reader of the state behind it. `test_replay_programs` runs the step by our
operator and by the plain way (a loop over chunks, double backward, or f itself), and judges.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils._pytree import tree_leaves, tree_map

import gradtools.torch as gt
from tests.support.scenarios import Scenario, Table

D = torch.float64
CHUNKED, CHECKPOINT, FROZEN, MICROBATCHED = (
    "chunked",
    "checkpoint",
    "frozen",
    "microbatched_value_and_grad",
)
ALL = (CHUNKED, CHECKPOINT, FROZEN, MICROBATCHED)
REPLAYED = (CHUNKED, CHECKPOINT, FROZEN)
TRAINED = (CHUNKED, CHECKPOINT)

RIGHT, REFUSED, EITHER = "right", "refused", "right or refused"


# --- ways through an operator ---------------------------------------------------------------


@dataclass(frozen=True)
class Way:
    """An operator with its options."""

    name: str
    kind: str
    options: tuple[tuple[str, Any], ...] = ()
    size: int = 2


WAYS = (
    Way("chunked", CHUNKED),
    Way("verify", CHUNKED, (("verify", True),)),
    Way("by four", CHUNKED, (), 4),
    Way("checkpoint", CHECKPOINT),
    Way("frozen", FROZEN),
    Way("microbatched_value_and_grad", MICROBATCHED),
)


@dataclass
class Run:
    """One run of a program's step: by gradtools, or plainly.

    Attributes:
        way: The operator.
        plain: Whether the oracle runs.
    """

    way: Way
    plain: bool

    @property
    def kind(self) -> str:
        """The operator's name."""
        return self.way.kind

    def __call__(self, f: Callable[..., Any], in_axes: Any = 0) -> Callable[..., Any]:
        """f by the operator, or as the operator promises to be."""
        if self.kind == CHUNKED:
            if self.plain:
                return lambda *args, **kw: _loop(f, self.way.size, in_axes, args, kw)
            return gt.chunked(f, self.way.size, in_axes, **dict(self.way.options))
        if self.plain:
            return f
        return gt.frozen(f) if self.kind == FROZEN else gt.checkpoint(f)


def _loop(f: Any, size: int, in_axes: Any, args: Any, keywords: Any) -> Any:
    """The plain loop over chunks."""
    axes = in_axes if isinstance(in_axes, tuple) else (in_axes,) * len(args)
    count = next(len(a) for a, axis in zip(args, axes, strict=True) if axis == 0)
    outs = [
        f(
            *(a if axis is None else a[i : i + size] for a, axis in zip(args, axes, strict=True)),
            **keywords,
        )
        for i in range(0, count, size)
    ]
    return tree_map(lambda *ys: torch.cat(ys) if isinstance(ys[0], torch.Tensor) else ys[0], *outs)


@dataclass
class World:
    """What a program runs in, made anew for each run.

    Attributes:
        step: Computes by way of the operator; returns what is compared, by name.
        state: Reads what stands afterwards.
        tolerance: Of numbers, relative to the largest; state is compared bit for bit.
    """

    step: Callable[[Run], dict[str, Any]]
    state: Callable[[], Any] = lambda: None
    tolerance: float = 1e-9


PROGRAMS = Table()


def program(
    name: str, kinds: Any = ALL, expect: str = RIGHT, says: str = "", without: Any = ()
) -> Any:
    """Adds a program whose world the function makes.

    name: What it does, as a sentence.
    kinds: The operators that it is for.
    expect: RIGHT, REFUSED or EITHER.
    says: What a refusal's message must hold.
    without: Ways that the oracle cannot follow.
    """
    return PROGRAMS.add(name, expect, kinds=kinds, says=says, without=without)


def ways(program: Scenario) -> list[Way]:
    """The ways that a program is tried by."""
    kinds, without = program.known["kinds"], program.known["without"]
    return [w for w in WAYS if w.kind in kinds and w.name not in without]


# --- the usual step -------------------------------------------------------------------------


def batch(dtype: torch.dtype = D, rows: int = 6, width: int = 3) -> torch.Tensor:
    """Rows of numbers between -1 and 1."""
    return torch.linspace(0.3, 9.0, rows * width, dtype=dtype).sin().reshape(rows, width)


def weight(rows: int = 3, width: int = 3, dtype: torch.dtype = D) -> torch.Tensor:
    """A leaf."""
    return (
        torch.linspace(0.1, 5.0, rows * width, dtype=dtype)
        .cos()
        .reshape(rows, width)
        .requires_grad_()
    )


def score(out: Any, scale: Any = 1.0) -> torch.Tensor:
    """A loss of all outputs at once, with no two entries alike."""
    total = torch.zeros((), dtype=D)
    for y in tree_leaves(out):
        if isinstance(y, torch.Tensor) and (y.is_floating_point() or y.is_complex()):
            y = torch.view_as_real(y.resolve_conj()) if y.is_complex() else y
            y = y.to_dense() if y.layout is not torch.strided else y
            coefficients = torch.linspace(0.5, 1.5, y.numel(), dtype=D).reshape(y.shape)
            total = total + ((scale * y.to(D)).sin() * coefficients).sum() + y.to(D).mean() ** 2
    return total


def contrast(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Every row of a against every row of b."""
    return F.cross_entropy(3 * a.to(D) @ b.to(D).T, torch.arange(len(a)))


def state_of(module: nn.Module) -> Any:
    """Parameters, buffers, and the plain attributes of a module and of those in it."""
    plain = (int, float, str, bool, list, tuple, type(None))
    return {
        "parameters": [p.detach().clone() for p in module.parameters()],
        "buffers": {k: b.detach().clone() for k, b in module.named_buffers()},
        "attributes": {
            f"{name}.{key}": copy.deepcopy(value)
            for name, part in module.named_modules()
            for key, value in vars(part).items()
            if isinstance(value, plain)
            and not key.startswith("_")
            and not any(isinstance(v, torch.Tensor) for v in tree_leaves(value))
        },
        "required": [p.requires_grad for p in module.parameters()],
    }


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
    """One forward pass, then one backward pass.

    f: Of a batch and shared arguments.
    module, leaves: What is trained besides the batch.
    between: Runs between the forward pass and the backward pass.
    around: What the forward pass and the loss stand in.
    tracked: Whether the batch is differentiated.
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
            inner = [score(G(z, *shared, **keywords), y) for z in zs]  # all uses, then pullbacks
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
                value, grad = gt.microbatched_value_and_grad(
                    mean, run.way.size, in_axes=(None, *axes)
                )(scale, data, *shared)
                return {"value": value, "grad": grad}
            found = []
            for part in data.split(run.way.size):
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
    """A module, called as it is."""
    return simple(module, x, module=module, **options)


def mlp(*more: nn.Module, dtype: torch.dtype = D) -> nn.Sequential:
    """A small network with more layers in its middle."""
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), *more, nn.Linear(4, 3)).to(dtype)
