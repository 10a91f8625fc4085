"""Programs that attack the promise of what is computed a second time, as data.

`chunked`, `frozen` and `checkpoint` compute a part of a program again. Each program here must give
what the plain one gives, and leave behind what the plain one leaves, or be refused in gradtools'
own words. `replay_worlds` says what a program is, `test_replay_programs` judges.
"""

from __future__ import annotations

import contextlib
import copy
import random
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrizations, parametrize
from torch.utils.checkpoint import checkpoint as torch_checkpoint

import gradtools.torch as gt
from tests.support.replay_worlds import (
    ALL,
    CHECKPOINT,
    CHUNKED,
    EITHER,
    FROZEN,
    MICROBATCHED,
    REFUSED,
    REPLAYED,
    RIGHT,
    TRAINED,
    D,
    Run,
    World,
    batch,
    contrast,
    mlp,
    of_module,
    program,
    score,
    simple,
    state_of,
    weight,
)

# --- 1: two towers under autocast -----------------------------------------------------------

half = lambda dtype=torch.bfloat16, **more: torch.autocast("cpu", dtype=dtype, **more)


def towers(
    around: Any, encoder: Any = None, call: Any = None, wrap: Any = None, **how: Any
) -> World:
    """One encoder for two batches, whose rows are compared with each other.

    call: How f calls the encoder.
    wrap: What the whole training step does with run, encoder and batches, in its own way.
    """
    encoder = mlp(dtype=torch.float32) if encoder is None else encoder
    a, b = batch(torch.float32), batch(torch.float32).flip(0)
    f = encoder if call is None else lambda x: call(encoder, x)

    def step(run: Run) -> dict[str, Any]:
        if run.kind == FROZEN:
            return _frozen_towers(run, f, a, b, around)
        with around():
            if how.get("earlier"):
                how["earlier"](encoder, a)
            u, v = run(f)(a), run(f)(b)
            loss = contrast(u, v)
            if how.get("more"):
                loss = loss + how["more"](encoder, a)
        loss.backward()
        return {"loss": loss, "grads": [p.grad for p in encoder.parameters()]}

    return World(step, lambda: state_of(encoder), how.get("tolerance", 0.03))


def _frozen_towers(run: Run, f: Any, a: Any, b: Any, around: Any) -> dict[str, Any]:
    zs, y = [x.detach().requires_grad_() for x in (a, b)], torch.tensor(1.3, requires_grad=True)
    with around():
        G = run(f)
        outs = [G(z) for z in zs]
        loss = contrast((y * outs[0]).sin(), outs[1])
    slopes = torch.autograd.grad(loss, zs, create_graph=True)
    total = sum(s.to(D).sin().sum() for s in slopes)
    return {"loss": total, "grads": list(torch.autograd.grad(total, [y, *zs]))}


for _dtype, _cached in ((torch.bfloat16, True), (torch.float16, False)):
    program(f"two towers share an encoder under autocast to {_dtype}, cache {_cached}", REPLAYED)(
        lambda dtype=_dtype, cached=_cached: towers(lambda: half(dtype, cache_enabled=cached))
    )


@program("two towers under autocast, and the encoder once more plainly in the loss", TRAINED)
def _() -> World:
    return towers(half, more=lambda e, a: score(e(a)))


@program("two towers, the autocast region entered inside of f", REPLAYED)
def _() -> World:
    def call(e: Any, x: Any) -> Any:
        with half():
            return e(x)

    return towers(contextlib.nullcontext, call=call)


# --- 2: arguments that f changes in place ---------------------------------------------------

IN_PLACE: dict[str, Callable[[], tuple[Any, Callable[[Any], Any], Callable[[Any], Any]]]] = {
    # what is made, how f changes it, and what f reads of it
    "a tensor": lambda: (torch.ones((), dtype=D), lambda t: t.add_(1), lambda t: t),
    "a tensor, by .data": lambda: (torch.ones((), dtype=D), lambda t: t.data.add_(1), lambda t: t),
    "a list": lambda: ([1.0], lambda t: t.append(1.0), lambda t: len(t)),
    "a NumPy array": lambda: (np.ones(()), lambda t: t.__iadd__(1), lambda t: float(t)),
    "a generator of PyTorch's": lambda: (
        torch.Generator().manual_seed(0),
        lambda t: None,
        lambda t: torch.rand((), generator=t),
    ),
}


def _read(argument: Any) -> Any:
    if isinstance(argument, torch.Generator):
        return argument.get_state()
    return copy.deepcopy(argument)


def _changing(kind: str, keyword: bool) -> World:
    argument, change, read = IN_PLACE[kind]()
    w = weight()

    def f(x: Any, argument: Any) -> Any:
        y = x @ w * (read(argument) + 0.0)
        change(argument)
        return y

    how: Any = {"keywords": {"argument": argument}} if keyword else {"shared": (argument,)}
    return simple(f, leaves=[w], state=lambda: _read(argument), **how)


for _kind in IN_PLACE:
    program(f"f changes a keyword argument in place: {_kind}", expect=EITHER)(
        lambda kind=_kind: _changing(kind, True)
    )
for _kind in ("a tensor", "a tensor, by .data", "a list", "a NumPy array"):
    _kinds = REPLAYED if isinstance(IN_PLACE[_kind]()[0], torch.Tensor) else (CHECKPOINT, FROZEN)
    program(f"f changes a shared argument in place: {_kind}", _kinds, expect=EITHER)(
        lambda kind=_kind: _changing(kind, False)
    )


for _how, _change in {
    "in place": lambda x: x.mul_(2),
    "by .data": lambda x: x.data.mul_(2),
}.items():

    @program(f"f changes its rows {_how}", (*TRAINED, MICROBATCHED), EITHER)
    def _(change: Any = _change) -> World:
        w = weight()

        def f(x: Any) -> Any:
            change(x)
            return x.clone() @ w

        return simple(f, leaves=[w], tracked=False)


# --- 3: edges of the graph from one chunk to the next ---------------------------------------


class Keeps(nn.Module):
    """Keeps something between calls, which the next call adds to its result."""

    def __init__(self, keep: Callable[[Any], Any]) -> None:
        super().__init__()
        self.w, self.last, self.keep = nn.Parameter(weight().detach()), None, keep

    def forward(self, x: Any) -> Any:
        y = x @ self.w + (0 if self.last is None else self.last)
        self.last = self.keep(y)
        return y


@program("a module keeps an attached mean for its next call", REPLAYED, EITHER)
def _() -> World:
    return of_module(Keeps(lambda y: y.mean()))


def _cached(store: Callable[[Any], Any]) -> World:
    """A function of a weight that is computed in the first call, and kept."""
    w = weight()
    cached = store(w)
    return simple(lambda x: x @ cached(), leaves=[w])


def _in_dictionary(w: Any) -> Any:
    known: dict[int, Any] = {}
    return lambda: known.setdefault(0, w.exp()) if not known else known[0]


program("a function of a weight is cached by the first chunk", REPLAYED, EITHER)(
    lambda: _cached(_in_dictionary)
)


@program("a function of a weight was cached before the forward pass", REPLAYED, EITHER)
def _() -> World:
    w = weight()
    cached = _in_dictionary(w)
    cached()
    return simple(lambda x: x @ cached(), leaves=[w])


class Exponential(nn.Module):
    """A parametrization that counts how often it is computed."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))

    def forward(self, w: Any) -> Any:
        self.count += 1
        return w.exp() * 0.5


def parametrized() -> nn.Module:
    """A network with a parametrized weight."""
    net = mlp()
    parametrize.register_parametrization(net[0], "weight", Exponential())
    return net


@program("a parametrized weight counts its computations")
def _() -> World:
    return of_module(parametrized())


for _how, _wrap in {
    "weight_norm": lambda m: parametrizations.weight_norm(m),
    "spectral_norm": lambda m: parametrizations.spectral_norm(m),
}.items():

    @program(f"a layer under {_how}")
    def _(wrap: Any = _wrap) -> World:
        return of_module(nn.Sequential(wrap(nn.Linear(3, 3).double()), nn.Tanh()))


# --- 4: state in every kind of holder -------------------------------------------------------


def _ticking(make: Callable[[], Any], number: Any, state: Any) -> World:
    """f's result depends on a holder of state that no recomputation puts back."""
    holder, w = make(), weight()
    return simple(lambda x: (x * number(holder)) @ w, leaves=[w], state=lambda: state(holder))


COUNTERS: dict[str, tuple[Callable[[], Any], Callable[[Any], Any], Callable[[Any], Any]]] = {
    # what is made, the next number from it, and its state
    "a list": (list, lambda seen: seen.append(1) or len(seen), list),
    "a torch.Generator": (
        lambda: torch.Generator().manual_seed(0),
        lambda g: float(torch.rand((), generator=g)),
        lambda g: g.get_state(),
    ),
}
for _name, _three in COUNTERS.items():
    program(f"f counts in {_name}", REPLAYED, EITHER)(lambda three=_three: _ticking(*three))


@program("f's result depends on the clock", REPLAYED, REFUSED, "again", ("by four",))
def _() -> World:
    w = weight()
    return simple(lambda x: (x * (time.perf_counter_ns() % 1_000_003)) @ w, leaves=[w])


class Counting(nn.Module):
    """A module whose state is somewhere in it."""

    def __init__(self, **parts: Any) -> None:
        super().__init__()
        self.w = nn.Parameter(weight().detach())
        for name, part in parts.items():
            if isinstance(part, torch.Tensor) and not isinstance(part, nn.Parameter):
                self.register_buffer(name, part, persistent=name != "fleeting")
            else:
                setattr(self, name, part)

    def forward(self, x: Any) -> Any:
        return x @ self.w * self.tick()


def _module_counter(name: str, parts: Any, tick: Any, expect: str = RIGHT) -> None:
    @program(f"a module counts in {name}", expect=expect)
    def _() -> World:
        kind = type("Counts", (Counting,), {"tick": tick, "__module__": __name__})
        return of_module(kind(**parts()))


def _tick_buffer(self: Any) -> Any:
    self.n += 1
    return self.n.clone()


def _tick_replaced(self: Any) -> Any:
    self.n = self.n + 1
    return self.n


def _tick_data(self: Any) -> Any:
    self.n.data.add_(1)
    return self.n.clone()


_zero = lambda: torch.zeros((), dtype=D)
_module_counter("a buffer", lambda: {"n": _zero()}, _tick_buffer)
_module_counter("a buffer that is replaced", lambda: {"n": _zero()}, _tick_replaced)
_module_counter("a buffer, by .data", lambda: {"n": _zero()}, _tick_data)


def _kept(
    name: str, net: Callable[[], nn.Module], expect: Any = RIGHT, kinds: Any = ALL, **how: Any
) -> None:
    program(name, kinds, expect)(lambda: of_module(net(), **how))


_kept("batch norm in training", lambda: mlp(nn.BatchNorm1d(4)))
_kept(
    "a lazy layer that has not run",
    lambda: nn.LazyLinear(2, dtype=D),
    EITHER,
)


# hooks


def _hooked(attach: Callable[[nn.Module, Any], Any], kinds: Any = ALL, expect: str = RIGHT) -> Any:
    def make() -> World:
        net, seen = mlp(), []
        attach(net, seen)
        return of_module(net, state=lambda: len(seen))

    return make


def _adds_forward(net: Any, seen: Any) -> None:
    net[0].register_forward_hook(lambda m, a, out: seen.append(1) or out * len(seen))


def _counts_full_backward(net: Any, seen: Any) -> None:
    net[0].register_full_backward_hook(lambda m, a, b: seen.append(1))


program("a forward hook counts and multiplies", expect=EITHER)(_hooked(_adds_forward))
program("a full backward hook counts", TRAINED)(_hooked(_counts_full_backward))


@program("saved tensors' hooks stand around", TRAINED)
def _() -> World:
    hooks = lambda: torch.autograd.graph.saved_tensors_hooks(lambda t: t.clone(), lambda t: t)
    return of_module(mlp(nn.Dropout(0.5), nn.BatchNorm1d(4)), around=hooks)


# --- 5: randomness --------------------------------------------------------------------------

DRAWS: dict[str, Callable[[Any], Any]] = {
    "F.dropout": lambda x: F.dropout(x, 0.5),
    "torch.distributions": lambda x: x * torch.distributions.Gamma(2.0, 1.0).sample(),
    "random.gauss, which keeps one back": lambda x: x * random.gauss(0, 1),
    "NumPy's own stream": lambda x: x * _draw_numpy(),
    "torch.manual_seed inside of f": lambda x: _seeded(x),
    "attention's dropout": lambda x: F.scaled_dot_product_attention(
        x[None], x[None], x[None], dropout_p=0.5
    )[0],
}
_numpy_normal = np.random.randn  # the process's own stream
_draw_numpy = lambda: float(_numpy_normal())


def _seeded(x: Any) -> Any:
    y = F.dropout(x, 0.5)
    torch.manual_seed(5)
    return y * torch.rand(())


for _name, _draw in DRAWS.items():
    _kinds = tuple(k for k in ALL if not (k == FROZEN and _name == "attention's dropout"))

    @program(f"f draws by {_name}", _kinds)
    def _(draw: Any = _draw) -> World:
        w = weight()
        return simple(lambda x: draw(x @ w), leaves=[w])


class Recurrent(nn.Module):
    """An LSTM of two layers with dropout between."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(3, 3, 2, dropout=0.5, batch_first=True).double()

    def forward(self, x: Any) -> Any:
        return self.lstm(x[:, None])[0][:, 0]


_kept("an LSTM with dropout between its layers", Recurrent)
_kept(
    "an encoder layer in training",
    lambda: nn.Sequential(
        nn.Unflatten(0, (-1, 1)),
        nn.TransformerEncoderLayer(3, 1, 4, batch_first=True),
        nn.Flatten(),
    ).double(),
    kinds=TRAINED,
)


@program("f draws from a generator that a module holds")
def _() -> World:
    net = Counting(generator=torch.Generator().manual_seed(0))
    net.tick = lambda: torch.rand((), generator=net.generator)  # type: ignore[assignment]
    return of_module(net, state=lambda: net.generator.get_state())


# --- 6: between forward and backward --------------------------------------------------------


def _between(change: Callable[[Any, Any], Any], *more: nn.Module) -> World:
    net = mlp(*more)
    x = batch()
    return simple(net, x, module=net, between=lambda: change(net, x))


def _shift_statistics(net: Any, x: Any) -> None:
    for b in net.buffers():
        b.data.add_(1)


def _state_dict(net: Any, x: Any) -> None:
    net.load_state_dict({k: v * 2 for k, v in net.state_dict().items()})


_norm = lambda: nn.BatchNorm1d(4)
_BETWEEN: dict[str, tuple[Any, Any, Any]] = {
    "the parameters are changed in place by .data": (
        lambda net, x: [p.data.mul_(2) for p in net.parameters()],
        (),
        EITHER,
    ),
    "a state_dict is loaded": (_state_dict, (_norm,), EITHER),
    "the module is put to evaluation": (lambda net, x: net.eval(), (_norm, nn.Dropout), EITHER),
    "running statistics are moved": (_shift_statistics, (_norm,), RIGHT),
    "numbers are drawn": (
        lambda net, x: (torch.rand(3), random.random(), _draw_numpy()),
        (nn.Dropout,),
        RIGHT,
    ),
    "gradients are set to None": (lambda net, x: net.zero_grad(), (), RIGHT),
    "the module is called again": (lambda net, x: net(batch()), (_norm, nn.Dropout), RIGHT),
    "a buffer is replaced": (
        lambda net, x: setattr(net[2], "running_mean", torch.ones(4, dtype=D)),
        (_norm,),
        RIGHT,
    ),
}
for _name, (_change, _more, _expect) in _BETWEEN.items():
    program(f"between forward and backward {_name}", REPLAYED, _expect)(
        lambda change=_change, more=_more: _between(change, *(m() for m in more))
    )


def _captured_between(change: Callable[[Any], Any], value: Callable[[], Any], use: Any) -> World:
    held = {"v": value()}
    w = weight()
    return simple(
        lambda x: x @ w * use(held["v"]),
        leaves=[w],
        between=lambda: change(held),
        state=lambda: copy.deepcopy(held["v"]),
    )


for _name, _args in {
    "a captured small tensor": (
        lambda h: h["v"].mul_(3),
        lambda: torch.ones(3, dtype=D),
        lambda v: v.clone(),
    ),
}.items():
    program(f"between forward and backward {_name} is changed", REPLAYED, EITHER)(
        lambda args=_args: _captured_between(*args)
    )


for _how, _change in {
    "by .data": lambda x: x.data.mul_(2),
}.items():

    @program(f"between forward and backward the batch is changed {_how}", TRAINED, EITHER)
    def _(change: Any = _change) -> World:
        w, x = weight(), batch()
        return simple(
            lambda x: x.sin() @ w, x, leaves=[w], between=lambda: change(x), tracked=False
        )


@program("the optimizer takes a step between two towers' backward passes", TRAINED, EITHER)
def _() -> World:
    net = mlp()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)

    def step(run: Run) -> dict[str, Any]:
        u, v = run(net)(batch()), run(net)(batch().flip(0))
        score(u).backward()
        first = [p.grad.clone() for p in net.parameters()]
        optimizer.step()
        score(v).backward()
        return {"first": first, "second": [p.grad for p in net.parameters()]}

    return World(step)


@program("an unrelated graph saved a buffer before a replay", TRAINED)
def _() -> World:
    net, p = mlp(nn.BatchNorm1d(4), nn.BatchNorm1d(4)), weight(1, 4)
    counts = Counting(n=torch.ones((), dtype=D))
    counts.tick = lambda: counts.n.add_(1).clone()  # type: ignore[assignment]

    def step(run: Run) -> dict[str, Any]:
        first = score(run(lambda x: counts(net(x)))(batch()))
        other = (net[2].running_mean * p).sum() + (counts.n * p).sum()
        first.backward()
        other.backward()
        return {"loss": [first, other], "grads": [p.grad, *(q.grad for q in net.parameters())]}

    return World(step, lambda: (state_of(net), state_of(counts)))


@program("an embedding with sparse gradients", TRAINED)
def _() -> World:
    return of_module(nn.Embedding(5, 3, sparse=True).double(), torch.tensor([0, 1, 2, 3, 4, 0]))


@program("f gives a lazy conjugate", (CHUNKED, CHECKPOINT))
def _() -> World:
    w = torch.complex(weight().detach(), weight().detach().sin()).requires_grad_()
    return simple(lambda x: torch.complex(x, x.cos()).conj() @ w.conj(), leaves=[w])


@program("torch.utils.checkpoint inside of f", TRAINED)
def _() -> World:
    net = mlp(nn.Dropout(0.5))
    return simple(lambda x: torch_checkpoint(net, x, use_reentrant=False), module=net)


@program("gt.checkpoint inside of f")
def _() -> World:
    net = mlp(nn.Dropout(0.5), nn.BatchNorm1d(4))
    return simple(gt.checkpoint(net), module=net)


@program("gt.chunked inside of f")
def _() -> World:
    net = mlp(nn.Dropout(0.5))
    return simple(gt.chunked(net, 1), module=net)


@program("a gradient is taken inside of f")
def _() -> World:
    w = weight()

    def f(x: Any) -> Any:
        with torch.enable_grad():
            z = x.detach().requires_grad_()
            slope = torch.autograd.grad(F.dropout(z @ w).sin().sum(), z, create_graph=True)[0]
        return slope + x

    return simple(f, leaves=[w])


@program("two backward passes through one graph, retain_graph=True", TRAINED)
def _() -> World:
    net, x = mlp(nn.Dropout(0.5), nn.BatchNorm1d(4)), batch().requires_grad_()

    def step(run: Run) -> dict[str, Any]:
        loss = score(run(net)(x))
        loss.backward(retain_graph=True)
        loss.backward()
        return {"loss": loss, "grads": [x.grad, *(p.grad for p in net.parameters())]}

    return World(step, lambda: state_of(net))


@program("a step of training between the towers' forward passes", TRAINED)
def _() -> World:
    net = mlp(nn.Dropout(0.5), nn.BatchNorm1d(4))
    optimizer = torch.optim.Adam(net.parameters(), lr=0.1)

    def step(run: Run) -> dict[str, Any]:
        losses = []
        for k in range(3):
            optimizer.zero_grad()
            loss = contrast(run(net)(batch() * k), run(net)(batch().flip(0)))
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
        return {"losses": losses, "weights": list(net.parameters())}

    return World(
        step, lambda: [b.clone() for b in net.buffers() if not b.is_floating_point()], 1e-7
    )


# --- 8: flags, threads, exceptions and the rest ---------------------------------------------


@program("a part of f runs in inference mode")
def _() -> World:
    w = weight()

    def f(x: Any) -> Any:
        with torch.inference_mode():
            scale = F.dropout((x @ w).exp()).mean()
        return x @ w * scale.clone()

    return simple(f, leaves=[w], tracked=False)


@program("a part of f runs under no_grad, with dropout")
def _() -> World:
    w = weight()

    def f(x: Any) -> Any:
        with torch.no_grad():
            scale = F.dropout((x @ w).exp()).mean()
        return x @ w * scale

    return simple(f, leaves=[w])


# exceptions


# threads


# compiled code, transforms, wrappers, outputs


@program("a compiled module with dropout inside of f", (CHUNKED, CHECKPOINT), EITHER)
def _() -> World:
    torch._dynamo.reset()
    net = mlp(nn.Dropout(0.5))
    return simple(torch.compile(net, backend="aot_eager"), module=net)


@program("torch.func.grad inside of f")
def _() -> World:
    w = weight()
    return simple(lambda x: torch.func.grad(lambda z: (z @ w).sin().sum())(x), leaves=[w])


@program("torch.vmap inside of f, with randomness")
def _() -> World:
    w = weight()
    f = lambda x: torch.vmap(lambda r: F.dropout(r @ w), randomness="different")(x)
    return simple(f, leaves=[w])


@program("torch.func.functional_call inside of f, with batch norm")
def _() -> World:
    net = mlp(nn.BatchNorm1d(4))
    parameters = dict(net.named_parameters())
    f = lambda x: torch.func.functional_call(net, parameters, (x,))
    return simple(f, module=net)


@program("torch.func.functional_call with parameters computed in f")
def _() -> World:
    net = mlp()
    f = lambda x: torch.func.functional_call(
        net, {k: p * 2 for k, p in net.named_parameters()}, (x,)
    )
    return simple(f, module=net)


@program("an adapter that merges itself into the frozen layer for the call", TRAINED, EITHER)
def _() -> World:
    base, a = nn.Linear(3, 3).double().requires_grad_(False), weight()

    def f(x: Any) -> Any:
        base.weight.data += a.detach()
        try:
            return base(x).clone() + (x @ a.T)
        finally:
            base.weight.data -= a.detach()

    return simple(f, leaves=[a], tracked=False)


class Named(torch.Tensor):
    """A subclass that does nothing but be one."""


@program("a parameter of a subclass of Tensor")
def _() -> World:
    w = weight().detach().as_subclass(Named).requires_grad_()
    return simple(lambda x: (x @ w).as_subclass(torch.Tensor), leaves=[w])


@program("an output that is no tensor", TRAINED, EITHER)
def _() -> World:
    net = mlp()
    return simple(lambda x: (net(x), "a word"), module=net)


@program("an output is changed in place by the caller", TRAINED, EITHER)
def _() -> World:
    net = mlp()

    def step(run: Run) -> dict[str, Any]:
        out = run(net)(batch())
        out.mul_(2)
        loss = score(out)
        loss.backward()
        return {"loss": loss, "grads": [p.grad for p in net.parameters()]}

    return World(step)


@program("f gives its rows back as they are", TRAINED)
def _() -> World:
    w = weight()
    return simple(lambda x: (x, x @ w), leaves=[w])


@program("f is given parameters that are swapped in for the call", TRAINED, EITHER)
def _() -> World:
    net, w = mlp(), weight(4, 3)

    def f(x: Any) -> Any:
        was = net[0].weight
        del net[0].weight
        net[0].weight = w * 2
        try:
            return net(x)
        finally:
            del net[0].weight
            net[0].weight = was

    return simple(f, module=net, leaves=[w])


# what is to be noticed when a chunk is computed again, and what is no difference


def _ignoring(extra: Callable[[Any], Any]) -> Callable[[], World]:
    """The loss reads the first output alone."""

    def make() -> World:
        net = mlp(nn.Dropout(0.5))

        def step(run: Run) -> dict[str, Any]:
            f = lambda x: (lambda y: (y, extra(y)))(net(x))
            loss = score(run(f)(batch())[0])
            loss.backward()
            return {"loss": loss, "grads": [p.grad for p in net.parameters()]}

        return World(step)

    return make


program("an output that the loss ignores holds NaN", TRAINED)(
    _ignoring(lambda y: y.detach() * np.nan)
)


@program("f gives only the rows that it chooses, of some chunks none", TRAINED, EITHER)
def _() -> World:
    w = weight()
    return simple(lambda x: x[x[:, 0] > 0.5] @ w, leaves=[w])


@program("f keeps a log of the first pass alone, by is_recomputing")
def _() -> World:
    w, log = weight(), []

    def f(x: Any) -> Any:
        if not gt.is_recomputing():
            log.append(float(x.sum()))
        return x @ w

    return simple(f, leaves=[w], state=lambda: list(log))


def _by_turns(use: Callable[[Any, Any], Any], *turns: int) -> Callable[[], World]:
    """f does what an iterator, which cannot be put back, says for each call."""

    def make() -> World:
        w, other, left = weight(), weight(), iter([*turns, *[turns[-1]] * 30])
        return simple(lambda x: x @ use((w, other), next(left)), leaves=[w, other])

    return make


program("the third chunk alone differs when it is computed again", TRAINED, EITHER)(
    _by_turns(lambda ws, turn: ws[0] * turn, 1, 1, 2, 1)
)
program("a chunk computed again has the same values and a weight less", TRAINED, EITHER)(
    _by_turns(lambda ws, turn: ws[0] if turn else ws[0].detach(), 1, 1, 1, 0)
)
program("a chunk computed again has the same values by another weight", TRAINED, EITHER)(
    _by_turns(lambda ws, turn: ws[turn], 0, 0, 0, 1)
)


# --- 9: models, as they are found in repositories ---------------------------------------------


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


# --- weights of models -----------------------------------------------------------------------


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
    ("Python", lambda m: random.random(), nothing),
    (
        "a generator of PyTorch's on the module",
        lambda m: float(torch.rand((), generator=m.rng)),
        lambda m: setattr(m, "rng", torch.Generator().manual_seed(1)),
    ),
):
    program(f"stochastic depth by {_name}")(
        lambda draw=_draw, more=_more: _depth(draw, more)  # type: ignore[misc]
    )


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


# --- operators in each other ----------------------------------------------------------------


@program("gt.frozen inside of f, with batch statistics", TRAINED)
def _() -> World:
    inner, w = mlp(nn.BatchNorm1d(4)).requires_grad_(False), weight()
    G = gt.frozen(inner)
    return simple(lambda x: G(x @ w), leaves=[w], state=lambda: state_of(inner))


@program("rows that give NaN, the same each time", (*REPLAYED,))
def _() -> World:
    net = mlp(nn.Dropout(0.5))
    return simple(lambda x: net(x) * torch.where(x > 2, x.log(), torch.ones_like(x)), module=net)
