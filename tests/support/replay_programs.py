"""Programs that attack the promise of what is computed a second time, as data.

`chunked`, `frozen` and `checkpoint` compute a part of a program again. Each program here must give
what the plain one gives, and leave behind what the plain one leaves, or be refused in gradtools'
own words. `replay_worlds` says what a program is, `test_replay_programs` judges.
"""

from __future__ import annotations

import collections
import contextlib
import contextvars
import copy
import dataclasses
import functools
import gc
import itertools
import random
import tempfile
import threading
import time
import types
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
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
    python_module,
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


@program("two towers, an island of full precision inside of f", REPLAYED)
def _() -> World:
    def call(e: Any, x: Any) -> Any:
        y = e[:2](x)
        with half(enabled=False):
            return e[2](y.float())

    return towers(half, call=call, earlier=lambda e, a: e(a))


@program("two towers of attention and layer norm under autocast", REPLAYED)
def _() -> World:
    layer = nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, batch_first=True)
    encoder = nn.Sequential(nn.Linear(3, 4), nn.Unflatten(0, (-1, 1)), layer, nn.Flatten())

    def call(encoder: Any, x: Any) -> Any:
        with sdpa_kernel(SDPBackend.MATH):  # the others have no double backward to compare with
            return encoder(x)

    return towers(half, encoder, call, earlier=call, tolerance=0.06)


@program("f clears autocast's cache of weights", REPLAYED)
def _() -> World:
    def call(e: Any, x: Any) -> Any:
        torch.clear_autocast_cache()
        return e(x)

    return towers(half, call=call, earlier=lambda e, a: e(a))


# --- 2: arguments that f changes in place ---------------------------------------------------

IN_PLACE: dict[str, Callable[[], tuple[Any, Callable[[Any], Any], Callable[[Any], Any]]]] = {
    # what is made, how f changes it, and what f reads of it
    "a tensor": lambda: (torch.ones((), dtype=D), lambda t: t.add_(1), lambda t: t),
    "a tensor, by .data": lambda: (torch.ones((), dtype=D), lambda t: t.data.add_(1), lambda t: t),
    "a tensor, by NumPy": lambda: (
        torch.ones(1, dtype=D),
        lambda t: t.numpy().__iadd__(1),
        lambda t: t,
    ),
    "a tensor, by other memory": lambda: (
        torch.ones((), dtype=D),
        lambda t: t.set_(torch.tensor(float(t) + 1, dtype=D)),
        lambda t: t,
    ),
    "a tensor, by new .data": lambda: (
        torch.ones((), dtype=D),
        lambda t: setattr(t, "data", t.data + 1),
        lambda t: t,
    ),
    "a tensor's shape": lambda: (
        torch.ones(1, dtype=D),
        lambda t: t.resize_(len(t) + 1).fill_(1),
        lambda t: t.sum(),
    ),
    "a list": lambda: ([1.0], lambda t: t.append(1.0), lambda t: len(t)),
    "a dictionary": lambda: ({"n": 1}, lambda t: t.update(n=t["n"] + 1), lambda t: t["n"]),
    "a tensor in a dictionary": lambda: (
        {"n": torch.ones((), dtype=D)},
        lambda t: t["n"].add_(1),
        lambda t: t["n"],
    ),
    "a NumPy array": lambda: (np.ones(()), lambda t: t.__iadd__(1), lambda t: float(t)),
    "an object": lambda: (
        types.SimpleNamespace(n=1),
        lambda t: setattr(t, "n", t.n + 1),
        lambda t: t.n,
    ),
    "a generator of PyTorch's": lambda: (
        torch.Generator().manual_seed(0),
        lambda t: None,
        lambda t: torch.rand((), generator=t),
    ),
    "a generator of NumPy's": lambda: (
        np.random.default_rng(0),
        lambda t: None,
        lambda t: float(t.random()),
    ),
}


def _read(argument: Any) -> Any:
    if isinstance(argument, torch.Generator):
        return argument.get_state()
    if isinstance(argument, np.random.Generator):
        return repr(argument.bit_generator.state)
    return copy.deepcopy(
        vars(argument) if isinstance(argument, types.SimpleNamespace) else argument
    )


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
for _kind in (
    "a tensor",
    "a tensor, by .data",
    "a tensor, by other memory",
    "a list",
    "a NumPy array",
):
    _kinds = REPLAYED if isinstance(IN_PLACE[_kind]()[0], torch.Tensor) else (CHECKPOINT, FROZEN)
    program(f"f changes a shared argument in place: {_kind}", _kinds, expect=EITHER)(
        lambda kind=_kind: _changing(kind, False)
    )


@program("the loss needs a shared argument that f changed in place", TRAINED, EITHER)
def _() -> World:
    count, w = torch.ones((), dtype=D), weight()

    def f(x: Any, count: Any) -> Any:
        y = x @ w * count.clone()
        count.add_(1)
        return y

    def step(run: Run) -> dict[str, Any]:
        loss = score(run(f, (0, None))(batch(), count)) * (w.sum() * count)
        loss.backward()
        return {"loss": loss, "grads": [w.grad]}

    return World(step, lambda: count.clone())


@program("f changes a shared argument that requires a gradient, under no_grad", TRAINED, EITHER)
def _() -> World:
    w, scale = weight(), torch.ones((), dtype=D, requires_grad=True)

    def f(x: Any, scale: Any) -> Any:
        with torch.no_grad():
            scale.mul_(2)
        return x @ w

    return simple(f, leaves=[w], shared=(scale,))


for _how, _change in {
    "in place": lambda x: x.mul_(2),
    "by .data": lambda x: x.data.mul_(2),
    "by NumPy": lambda x: x.numpy().__imul__(2),
    "under inference mode": lambda x: torch.inference_mode()(x.mul_)(2),
}.items():

    @program(f"f changes its rows {_how}", (*TRAINED, MICROBATCHED), EITHER)
    def _(change: Any = _change) -> World:
        w = weight()

        def f(x: Any) -> Any:
            change(x)
            return x.clone() @ w

        return simple(f, leaves=[w], tracked=False)


@program("f changes one row of an expanded batch", TRAINED, EITHER)
def _() -> World:
    w, row = weight(), torch.ones(1, 3, dtype=D)
    return simple(lambda x: x @ w, row.expand(6, 3), leaves=[w], state=lambda: row)


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


@program("a module keeps a detached mean for its next call")
def _() -> World:
    module = Keeps(lambda y: y.mean().detach())
    return of_module(module, state=lambda: module.last)


@program("a module keeps a list of attached outputs, and the loss reads them", TRAINED, EITHER)
def _() -> World:
    class Router(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w, self.penalties = nn.Parameter(weight().detach()), []

        def forward(self, x: Any) -> Any:
            y = (x @ self.w).softmax(-1)
            self.penalties.append(y.mean(0).square().sum())
            return y

    module, x = Router(), batch()

    def step(run: Run) -> dict[str, Any]:
        out = run(module)(x)
        loss = score(out) + sum(module.penalties)
        loss.backward()
        return {"loss": loss, "grads": [module.w.grad]}

    return World(step)


def _cached(store: Callable[[Any], Any]) -> World:
    """A function of a weight that is computed in the first call, and kept."""
    w = weight()
    cached = store(w)
    return simple(lambda x: x @ cached(), leaves=[w])


def _in_attribute(w: Any) -> Any:
    holder = types.SimpleNamespace(value=None)

    def read() -> Any:
        if holder.value is None:
            holder.value = w.exp()
        return holder.value

    return read


def _in_dictionary(w: Any) -> Any:
    known: dict[int, Any] = {}
    return lambda: known.setdefault(0, w.exp()) if not known else known[0]


def _in_lru(w: Any) -> Any:
    return functools.lru_cache(lambda: w.exp())


for _where, _store in {
    "an attribute": _in_attribute,
    "a dictionary": _in_dictionary,
    "lru_cache": _in_lru,
}.items():
    program(f"a function of a weight is cached in {_where} by the first chunk", REPLAYED, EITHER)(
        lambda store=_store: _cached(store)
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


@program("parametrize.cached() around", REPLAYED, EITHER)
def _() -> World:
    return of_module(parametrized(), around=parametrize.cached)


@program("parametrize.cached() around, backward inside", TRAINED, EITHER)
def _() -> World:
    net = parametrized()

    def step(run: Run) -> dict[str, Any]:
        with parametrize.cached():
            loss = score(run(net)(batch())) + score(run(net)(batch().flip(0)))
            loss.backward()
        return {"loss": loss, "grads": [p.grad for p in net.parameters()]}

    return World(step, lambda: state_of(net))


for _how, _wrap in {
    "weight_norm": lambda m: parametrizations.weight_norm(m),
    "spectral_norm": lambda m: parametrizations.spectral_norm(m),
    "orthogonal": lambda m: parametrizations.orthogonal(m),
    "the old spectral_norm": lambda m: nn.utils.spectral_norm(m),
}.items():

    @program(f"a layer under {_how}")
    def _(wrap: Any = _wrap) -> World:
        return of_module(nn.Sequential(wrap(nn.Linear(3, 3).double()), nn.Tanh()))


@program("a layer under the old weight_norm", expect=EITHER)
def _() -> World:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        net = nn.utils.weight_norm(nn.Linear(3, 3).double())
    return of_module(net)


# --- 4: state in every kind of holder -------------------------------------------------------

COUNTERS: dict[str, tuple[Callable[[], tuple[Callable[[], Any], Callable[[], Any]]], str]] = {}


def counter(name: str, expect: str = EITHER) -> Any:
    """A holder of state: how f moves it on and gets a number, and how it is read afterwards."""

    def add(make: Any) -> Any:
        COUNTERS[name] = (make, expect)
        return make

    return add


def _ticking(make: Any) -> World:
    tick, read = make()
    w = weight()
    return simple(lambda x: (x * tick()) @ w, leaves=[w], state=read)


def _appended(seen: Any) -> Any:
    return lambda: seen.append(1) or len(seen), lambda: list(seen)


def _item(holder: Any, key: Any, read: Callable[[Any], Any]) -> Any:
    """Counts in an entry of a container, of which `read` makes a copy."""

    def tick() -> Any:
        holder[key] += 1
        return holder[key]

    return tick, lambda: read(holder)


def _attribute(holder: Any, name: str = "n") -> Any:
    def tick() -> Any:
        setattr(holder, name, getattr(holder, name) + 1)
        return getattr(holder, name)

    return tick, lambda: getattr(holder, name)


def _with_zero(holder: Any, name: str = "n") -> Any:
    setattr(holder, name, 0)
    return holder


counter("a list", RIGHT)(lambda: _appended([]))
counter("a dictionary", RIGHT)(lambda: _item({"n": 0}, "n", dict))


@counter("a variable of a closure", RIGHT)
def _() -> Any:
    n = 0

    def tick() -> int:
        nonlocal n
        n += 1
        return n

    return tick, lambda: n


@counter("a set", RIGHT)
def _() -> Any:
    seen: set[int] = set()
    return lambda: seen.add(len(seen)) or len(seen), lambda: sorted(seen)


@counter("a deque with a length", RIGHT)
def _() -> Any:
    seen = collections.deque([1, 1], maxlen=2)
    return lambda: seen.append(sum(seen)) or seen[-1], lambda: list(seen)


@counter("a Counter", RIGHT)
def _() -> Any:
    seen: Any = collections.Counter()
    return lambda: seen.update("a") or seen["a"], lambda: dict(seen)


@counter("the order of an OrderedDict", RIGHT)
def _() -> Any:
    seen = collections.OrderedDict(a=1, b=2, c=3)

    def tick() -> int:
        seen.move_to_end(next(iter(seen)))
        return next(iter(seen.values()))

    return tick, lambda: list(seen)


counter("a ChainMap")(lambda: _item(collections.ChainMap({"n": 0}), "n", dict))


@counter("an iterator of itertools.count")
def _() -> Any:
    ticks = itertools.count(1)
    return lambda: next(ticks), lambda: repr(ticks)


@counter("a file")
def _() -> Any:
    file = tempfile.TemporaryFile("w+")  # noqa: SIM115 - f writes on

    def tick() -> int:
        file.write(".")
        file.flush()
        return file.tell()

    return tick, file.tell


@counter("a NumPy array", RIGHT)
def _() -> Any:
    seen = np.zeros(2)

    def tick() -> float:
        seen[0] += 1
        return float(seen[0])

    return tick, lambda: seen.copy()


counter("a NumPy array of objects")(lambda: _item(np.array([0, None], dtype=object), 0, list))


@counter("a tensor of more than a megabyte")
def _() -> Any:
    seen = torch.zeros(200_000, dtype=D)
    return lambda: float(seen[0].add_(1)), lambda: float(seen[0])


@counter("a module of Python's that another one imports")
def _() -> Any:
    inner = python_module("step = 0")
    helpers = python_module("def tick():\n    inner.step += 1\n    return inner.step")
    helpers.inner = inner
    return lambda: helpers.tick(), lambda: inner.step


for _name, _generator, _number, _state in (
    (
        "a torch.Generator",
        lambda: torch.Generator().manual_seed(0),
        lambda g: float(torch.rand((), generator=g)),
        lambda g: g.get_state(),
    ),
    ("a random.Random", lambda: random.Random(0), lambda g: g.random(), lambda g: g.getstate()),
    (
        "a NumPy Generator",
        lambda: np.random.default_rng(0),
        lambda g: float(g.normal()),
        lambda g: repr(g.bit_generator.state),
    ),
    (
        "a NumPy RandomState",
        lambda: np.random.RandomState(0),
        lambda g: float(g.randn()),
        lambda g: repr(g.get_state(legacy=False)),
    ),
    (
        "the seeds that a NumPy Generator spawns",
        lambda: np.random.default_rng(0),
        lambda g: float(g.spawn(1)[0].random()),
        lambda g: g.bit_generator.seed_seq.n_children_spawned,
    ),
):

    @counter(_name, EITHER if "spawns" in _name else RIGHT)
    def _(make: Any = _generator, number: Any = _number, state: Any = _state) -> Any:
        generator = make()
        return lambda: number(generator), lambda: state(generator)


STEP, SEEN = 0, []  # globals of this module


def _tick_global() -> int:
    global STEP
    STEP += 1
    return STEP


def _tick_global_list() -> int:
    SEEN.append(1)
    return len(SEEN)


@counter("a global", RIGHT)
def _() -> Any:
    global STEP
    STEP = 0
    return lambda: _tick_global(), lambda: STEP


@counter("a list in a global", RIGHT)
def _() -> Any:
    SEEN.clear()
    return lambda: _tick_global_list(), lambda: len(SEEN)


@counter("a class method that counts")
def _() -> Any:
    class Config:
        step = 0

        @classmethod
        def tick(cls) -> int:
            cls.step += 1
            return cls.step

    return Config.tick, lambda: Config.step


@counter("a bound method of a plain object", RIGHT)
def _() -> Any:
    class Counts:
        def __init__(self) -> None:
            self.n = 0

        def tick(self) -> int:
            self.n += 1
            return self.n

    counts = Counts()
    return counts.tick, lambda: counts.n


@counter("a ContextVar")
def _() -> Any:
    step: Any = contextvars.ContextVar("step", default=0)

    def tick() -> int:
        step.set(step.get() + 1)
        return step.get()

    return tick, step.get


counter("threading.local")(lambda: _attribute(_with_zero(threading.local())))


@counter("an attribute of a function")
def _() -> Any:
    def tick() -> int:
        tick.n += 1  # type: ignore[attr-defined]
        return tick.n  # type: ignore[attr-defined]

    tick.n = 0  # type: ignore[attr-defined]
    return tick, lambda: tick.n  # type: ignore[attr-defined]


@counter("a mutable default of a function", RIGHT)
def _() -> Any:
    def tick(seen: Any = []) -> int:  # noqa: B006 - that it is shared is the point
        seen.append(1)
        return len(seen)

    return tick, lambda: len(tick.__defaults__[0])  # type: ignore[index]


@counter("slots")
def _() -> Any:
    class Counts:
        __slots__ = ("n",)

        def __call__(self) -> int:
            self.n += 1
            return self.n

    counts = Counts()
    counts.n = 0
    return counts, lambda: counts.n


counter("a dataclass", RIGHT)(
    lambda: _attribute(dataclasses.make_dataclass("Counts", [("n", int)])(0))
)


@counter("a list inside of a named tuple", RIGHT)
def _() -> Any:
    held = collections.namedtuple("Held", "seen")([])
    return lambda: held.seen.append(1) or len(held.seen), lambda: len(held.seen)


@counter("the code of a function that is replaced", EITHER)
def _() -> Any:
    def inner() -> int:
        return 1

    def other() -> int:
        return 2

    def tick() -> int:
        n = inner()
        inner.__code__ = other.__code__
        return n

    return tick, inner


@counter("the clock")
def _() -> Any:
    return lambda: time.perf_counter_ns() % 1_000_003, lambda: None


def _sharing_memory() -> Any:
    seen = torch.zeros(1, dtype=D)
    numbers = seen.numpy()

    def tick() -> float:
        numbers[0] += 1
        return float(seen[0])

    return tick, lambda: seen.clone()


counter("a tensor that shares memory with an array", RIGHT)(_sharing_memory)

_NOT_REPLAYED = ("by four",)
_NEVER_RIGHT = ("the clock",)
for _name, (_make, _expect) in COUNTERS.items():
    if _name in _NEVER_RIGHT:
        program(f"f's result depends on {_name}", REPLAYED, REFUSED, "again", _NOT_REPLAYED)(
            lambda make=_make: _ticking(make)
        )
    else:
        _kinds = REPLAYED if _expect == EITHER else ALL
        program(f"f counts in {_name}", _kinds, _expect, without=_NOT_REPLAYED)(
            lambda make=_make: _ticking(make)
        )


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
    @program(f"a module counts in {name}", expect=expect, unsaid="no module")
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


def _tick_first(self: Any) -> Any:
    if not self.ready:
        self.n.fill_(3.0)
        self.ready = True
        return 2.0
    return self.n.clone()


def _tick_new(self: Any) -> Any:
    if not hasattr(self, "late"):
        self.register_buffer("late", torch.ones((), dtype=D))
        return 5.0
    self.late.add_(1)
    return self.late.clone()


def _tick_list(self: Any) -> Any:
    with torch.no_grad():
        self.ps[0].add_(1)
    return float(self.ps[0].detach())


def _tick_frozen_parameter(self: Any) -> Any:
    self.p.data += 1
    return float(self.p)


_zero = lambda: torch.zeros((), dtype=D)
_module_counter("a buffer", lambda: {"n": _zero()}, _tick_buffer)
_module_counter("a buffer that is replaced", lambda: {"n": _zero()}, _tick_replaced)
_module_counter("a buffer, by .data", lambda: {"n": _zero()}, _tick_data)
_module_counter("what its first call sets up", lambda: {"n": _zero(), "ready": False}, _tick_first)
_module_counter("a buffer that its first call registers", dict, _tick_new)
_module_counter(
    "a frozen parameter, by .data",
    lambda: {"p": nn.Parameter(_zero(), requires_grad=False)},
    _tick_frozen_parameter,
    EITHER,
)
_module_counter(
    "a frozen parameter of a ParameterList",
    lambda: {"ps": nn.ParameterList([nn.Parameter(_zero(), requires_grad=False)])},
    _tick_list,
    EITHER,
)
_module_counter(
    "an attribute of a module in it",
    lambda: {"inner": nn.Identity(), "n": 0},
    lambda self: setattr(self.inner, "n", getattr(self.inner, "n", 0) + 1) or self.inner.n,
)


def _kept(
    name: str, net: Callable[[], nn.Module], expect: Any = RIGHT, kinds: Any = ALL, **how: Any
) -> None:
    program(name, kinds, expect, unsaid="no module")(lambda: of_module(net(), **how))


_kept("batch norm in training", lambda: mlp(nn.BatchNorm1d(4)))
_kept("batch norm without momentum", lambda: mlp(nn.BatchNorm1d(4, momentum=None)))
_kept("batch norm in evaluation", lambda: mlp(nn.BatchNorm1d(4)).eval())
_kept(
    "a lazy layer that has not run",
    lambda: nn.LazyLinear(2, dtype=D),
    {CHUNKED: EITHER, CHECKPOINT: EITHER, FROZEN: EITHER, MICROBATCHED: EITHER},
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


def _counts_in_tensor_hooks(net: Any, seen: Any) -> None:
    def hook(m: Any, a: Any, out: Any) -> None:
        if out.requires_grad:
            out.register_hook(lambda g: seen.append(1))

    net[0].register_forward_hook(hook)


def _counts_parameter_hooks(net: Any, seen: Any) -> None:
    net[0].weight.register_hook(lambda g: seen.append(1))


def _counts_accumulations(net: Any, seen: Any) -> None:
    net[0].weight.register_post_accumulate_grad_hook(lambda p: seen.append(1))


program("a forward hook counts and multiplies")(_hooked(_adds_forward))
program("a full backward hook counts", TRAINED)(_hooked(_counts_full_backward))
program("a hook on a tensor inside of f counts", TRAINED)(_hooked(_counts_in_tensor_hooks))
program("a parameter's hook counts", (CHECKPOINT,))(_hooked(_counts_parameter_hooks))
program("a hook after a parameter's gradient counts", TRAINED)(_hooked(_counts_accumulations))


@program("a hook removes itself in its first call", expect=EITHER)
def _() -> World:
    net, handles = mlp(), []

    def hook(m: Any, args: Any, out: Any) -> Any:
        handles[0].remove()
        return out * 3

    handles.append(net[0].register_forward_hook(hook))
    return of_module(net, state=lambda: len(net[0]._forward_hooks))


@program("saved tensors' hooks inside of f count", TRAINED)
def _() -> World:
    net, packed = mlp(), []

    def f(x: Any) -> Any:
        with torch.autograd.graph.saved_tensors_hooks(lambda t: packed.append(1) or t, lambda t: t):
            return net(x)

    return simple(f, module=net, state=lambda: len(packed))


@program("saved tensors' hooks stand around", TRAINED)
def _() -> World:
    hooks = lambda: torch.autograd.graph.saved_tensors_hooks(lambda t: t.clone(), lambda t: t)
    return of_module(mlp(nn.Dropout(0.5), nn.BatchNorm1d(4)), around=hooks)


# --- 5: randomness --------------------------------------------------------------------------

DRAWS: dict[str, Callable[[Any], Any]] = {
    "F.dropout": lambda x: F.dropout(x, 0.5),
    "torch.bernoulli": lambda x: x * torch.bernoulli(x.sigmoid().detach()),
    "torch.multinomial": lambda x: x * (1 + torch.multinomial(x.detach().softmax(-1), 1)),
    "torch.randn_like": lambda x: x + x * torch.randn_like(x),
    "torch.distributions": lambda x: x * torch.distributions.Gamma(2.0, 1.0).sample(),
    "random.random": lambda x: x * random.random(),
    "random.gauss, which keeps one back": lambda x: x * random.gauss(0, 1),
    "NumPy's own stream": lambda x: x * _draw_numpy(),
    "all streams at once": lambda x: F.dropout(x) * random.random() * _draw_numpy(),
    "torch.random.fork_rng": lambda x: _forked(x),
    "torch.manual_seed inside of f": lambda x: _seeded(x),
    "random.seed inside of f": lambda x: x * (random.seed(3) or random.random()),
    "attention's dropout": lambda x: F.scaled_dot_product_attention(
        x[None], x[None], x[None], dropout_p=0.5
    )[0],
}
_numpy_normal = np.random.randn  # the process's own stream
_draw_numpy = lambda: float(_numpy_normal())


def _forked(x: Any) -> Any:
    with torch.random.fork_rng():
        torch.manual_seed(7)
        x = F.dropout(x, 0.5)
    return F.dropout(x, 0.5)


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
_kept(
    "AlphaDropout, Dropout2d and RReLU together",
    lambda: nn.Sequential(
        nn.Linear(3, 8),
        nn.AlphaDropout(),
        nn.RReLU(),
        nn.Unflatten(1, (2, 2, 2)),
        nn.Dropout2d(),
        nn.Flatten(),
    ).double(),
)


@program("f draws from a generator that a module holds")
def _() -> World:
    net = Counting(generator=torch.Generator().manual_seed(0))
    net.tick = lambda: torch.rand((), generator=net.generator)  # type: ignore[assignment]
    return of_module(net, state=lambda: net.generator.get_state())


@program("f draws from a clone of the process's generator", expect=EITHER)
def _() -> World:
    w = weight()
    generator = torch.default_generator
    return simple(lambda x: x @ w * torch.rand((), generator=generator), leaves=[w])


# --- 6: between forward and backward --------------------------------------------------------


def _between(change: Callable[[Any, Any], Any], *more: nn.Module) -> World:
    net = mlp(*more)
    x = batch()
    return simple(net, x, module=net, between=lambda: change(net, x))


def _to_vector(net: Any, x: Any) -> None:
    vector = nn.utils.parameters_to_vector(net.parameters())
    nn.utils.vector_to_parameters(vector.detach() * 2, net.parameters())


def _new_parameter(net: Any, x: Any) -> None:
    net[0].weight = nn.Parameter(net[0].weight.detach() * 2)


def _shift_statistics(net: Any, x: Any) -> None:
    for b in net.buffers():
        b.data.add_(1)


def _state_dict(net: Any, x: Any) -> None:
    net.load_state_dict({k: v * 2 for k, v in net.state_dict().items()})


def _scaled(net: Any, x: Any) -> None:
    with torch.no_grad():
        for p in net.parameters():
            p.mul_(2)


_norm = lambda: nn.BatchNorm1d(4)
_BETWEEN: dict[str, tuple[Any, Any, Any]] = {
    "vector_to_parameters writes the parameters": (_to_vector, (), EITHER),
    "the parameters are changed in place by .data": (
        lambda net, x: [p.data.mul_(2) for p in net.parameters()],
        (),
        EITHER,
    ),
    "the parameters are changed in place under no_grad": (_scaled, (), REFUSED),
    "a state_dict is loaded": (_state_dict, (_norm,), EITHER),
    "a parameter is replaced by another": (_new_parameter, (), EITHER),
    "the module is put to evaluation": (lambda net, x: net.eval(), (_norm, nn.Dropout), RIGHT),
    "all parameters are frozen": (lambda net, x: net.requires_grad_(False), (), EITHER),
    "running statistics are moved": (_shift_statistics, (_norm,), RIGHT),
    "a hook is added": (
        lambda net, x: net[0].register_forward_hook(lambda m, a, out: out * 2),
        (),
        RIGHT,
    ),
    "dropout's p is changed": (lambda net, x: setattr(net[2], "p", 0.1), (nn.Dropout,), RIGHT),
    "numbers are drawn": (
        lambda net, x: (torch.rand(3), random.random(), _draw_numpy()),
        (nn.Dropout,),
        RIGHT,
    ),
    "gradients are set to None": (lambda net, x: net.zero_grad(), (), RIGHT),
    "deterministic algorithms are switched on": (
        lambda net, x: torch.use_deterministic_algorithms(True),
        (nn.Dropout,),
        RIGHT,
    ),
    "the module is called again": (lambda net, x: net(batch()), (_norm, nn.Dropout), RIGHT),
    "a buffer is replaced": (
        lambda net, x: setattr(net[2], "running_mean", torch.ones(4, dtype=D)),
        (_norm,),
        RIGHT,
    ),
}
for _name, (_change, _more, _expect) in _BETWEEN.items():
    _kinds = REPLAYED if "frozen" not in _name else TRAINED
    program(f"between forward and backward {_name}", _kinds, _expect)(
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
    "a captured number": (lambda h: h.update(v=5.0), lambda: 2.0, lambda v: v),
    "a captured small tensor": (
        lambda h: h["v"].mul_(3),
        lambda: torch.ones(3, dtype=D),
        lambda v: v.clone(),
    ),
    "a captured array": (
        lambda h: h["v"].__imul__(3),
        lambda: np.ones(3),
        lambda v: torch.tensor(v),
    ),
    "a captured list": (lambda h: h["v"].clear(), lambda: [2.0], lambda v: v[0]),
    "a captured large tensor, by .data": (
        lambda h: h["v"].data.mul_(3),
        lambda: torch.ones(200_000, dtype=D),
        lambda v: v[:3].clone(),
    ),
    "a captured large array": (
        lambda h: h["v"].__imul__(3),
        lambda: np.ones(200_000),
        lambda v: torch.tensor(v[:3]),
    ),
}.items():
    program(f"between forward and backward {_name} is changed", REPLAYED, EITHER)(
        lambda args=_args: _captured_between(*args)
    )


for _how, _change in {
    "in place": lambda x: x.mul_(2),
    "by .data": lambda x: x.data.mul_(2),
    "by new .data": lambda x: setattr(x, "data", x.data * 2),
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


@program("an embedding with max_norm", (*TRAINED, MICROBATCHED), EITHER, unsaid="no module")
def _() -> World:
    net = nn.Embedding(5, 3, max_norm=0.5).double()
    return of_module(net, torch.tensor([0, 1, 2, 3, 4, 0]), tracked=False)


@program("an embedding with sparse gradients", TRAINED)
def _() -> World:
    return of_module(nn.Embedding(5, 3, sparse=True).double(), torch.tensor([0, 1, 2, 3, 4, 0]))


@program("an embedding that counts by frequency", TRAINED, EITHER)
def _() -> World:
    net = nn.Embedding(5, 3, scale_grad_by_freq=True).double()
    return of_module(net, torch.tensor([0, 1, 2, 3, 4, 0]))


@program("a captured sparse matrix")
def _() -> World:
    w, s = weight(), torch.eye(3, dtype=D).to_sparse()
    return simple(lambda x: torch.sparse.mm(s, (x @ w).T).T, leaves=[w])


@program("a sparse buffer that f changes in place", expect=EITHER)
def _() -> World:
    net = Counting(s=torch.eye(3, dtype=D).to_sparse())

    def tick() -> Any:
        net.s.mul_(2)
        return net.s.to_dense()[0, 0]

    net.tick = tick  # type: ignore[assignment]
    return of_module(net, state=lambda: net.s.to_dense())


@program("a sparse CSR matrix that is captured", expect=EITHER)
def _() -> World:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        s = torch.eye(3, dtype=D).to_sparse_csr()
    w = weight()
    return simple(lambda x: (s @ (x @ w).T).T, leaves=[w])


@program("nested tensors inside of f", TRAINED)
def _() -> World:
    w = weight()

    def f(x: Any) -> Any:
        parts = torch.nested.nested_tensor([x[0], x[-1]], layout=torch.jagged)
        return x @ w * parts.values().sum()

    return simple(f, leaves=[w], tracked=False)


@program("f gives a lazy conjugate", (CHUNKED, CHECKPOINT))
def _() -> World:
    w = torch.complex(weight().detach(), weight().detach().sin()).requires_grad_()
    return simple(lambda x: torch.complex(x, x.cos()).conj() @ w.conj(), leaves=[w])


@program("f gives a lazily negated imaginary part", (CHUNKED, CHECKPOINT))
def _() -> World:
    w = torch.complex(weight().detach(), weight().detach().sin()).requires_grad_()
    return simple(lambda x: (torch.complex(x, x.cos()) @ w).conj().imag, leaves=[w])


@program("the batch is a lazy conjugate", TRAINED)
def _() -> World:
    w = torch.complex(weight().detach(), weight().detach().sin()).requires_grad_()
    x = torch.complex(batch(), batch().cos()).conj()
    return simple(lambda x: x @ w, x, leaves=[w], tracked=False)


for _reentrant in (True, False):

    @program(
        f"torch.utils.checkpoint inside of f, reentrant {_reentrant}",
        TRAINED,
        EITHER if _reentrant else RIGHT,
    )
    def _(reentrant: bool = _reentrant) -> World:
        net = mlp(nn.Dropout(0.5))
        f = lambda x: torch_checkpoint(net, x, use_reentrant=reentrant)
        return simple(f, module=net)


@program("gt.checkpoint inside of f")
def _() -> World:
    net = mlp(nn.Dropout(0.5), nn.BatchNorm1d(4))
    return simple(gt.checkpoint(net), module=net)


@program("gt.chunked inside of f")
def _() -> World:
    net = mlp(nn.Dropout(0.5))
    return simple(gt.chunked(net, 1), module=net)


@program("gt.chunked inside of f, with state", expect=EITHER)
def _() -> World:
    net = Keeps(lambda y: y.mean().detach())
    return simple(gt.chunked(net, 1), module=net, state=lambda: net.last)


@program("a gradient is taken inside of f")
def _() -> World:
    w = weight()

    def f(x: Any) -> Any:
        with torch.enable_grad():
            z = x.detach().requires_grad_()
            slope = torch.autograd.grad(F.dropout(z @ w).sin().sum(), z, create_graph=True)[0]
        return slope + x

    return simple(f, leaves=[w])


@program("f calls backward() itself, into .grad of a leaf of its own", REPLAYED, EITHER)
def _() -> World:
    w, p = weight(), weight()

    def f(x: Any) -> Any:
        with torch.enable_grad():
            (p * x.detach().sum()).sum().backward()
        return x @ w

    return simple(f, leaves=[w], state=lambda: p.grad.clone())


@program("backward() through a frozen module at a plain z", (FROZEN,), REFUSED, "parameter")
def _() -> World:
    net, z = mlp(), batch()

    def step(run: Run) -> dict[str, Any]:
        if not run.plain:
            (run(net)(z) * 2).sum().backward()
        return {"grads": [p.grad for p in net.parameters()]}

    return World(step)


@program("backward() through a frozen module at a z that is differentiated", (FROZEN,), EITHER)
def _() -> World:
    net, z = mlp(nn.BatchNorm1d(4)), batch().requires_grad_()

    def step(run: Run) -> dict[str, Any]:
        loss = score(run(net)(z))
        loss.backward(inputs=[z])
        return {"loss": loss, "grads": [z.grad]}

    return World(step, lambda: state_of(net))


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


def _switching(switch: Callable[[], Any], depends: Callable[[], float]) -> World:
    """f's result depends on a switch that f itself throws."""
    w = weight()

    def f(x: Any) -> Any:
        y = x @ w * depends()
        switch()
        return y

    return simple(f, leaves=[w])


SWITCHES: dict[str, tuple[Callable[[], Any], Callable[[], float]]] = {
    "the default dtype": (
        lambda: torch.set_default_dtype(torch.float64),
        lambda: 1.0 + (torch.get_default_dtype() == torch.float64),
    ),
    "deterministic algorithms": (
        lambda: torch.use_deterministic_algorithms(True),
        lambda: 1.0 + torch.are_deterministic_algorithms_enabled(),
    ),
    "the number of threads": (
        lambda: torch.set_num_threads(2),
        lambda: float(torch.get_num_threads()),
    ),
    "the precision of products": (
        lambda: torch.set_float32_matmul_precision("medium"),
        lambda: 1.0 + (torch.get_float32_matmul_precision() == "medium"),
    ),
    "the default device": (
        lambda: torch.set_default_device("cpu:0"),
        lambda: 1.0 + (torch.get_default_device().index == 0),
    ),
    "the dtype of autocast": (
        lambda: torch.set_autocast_dtype("cpu", torch.float16),
        lambda: 1.0 + (torch.get_autocast_dtype("cpu") == torch.float16),
    ),
    "mkldnn": (
        lambda: torch._C._set_mkldnn_enabled(False),
        lambda: 1.0 + torch._C._get_mkldnn_enabled(),
    ),
    "the filters of warnings": (
        lambda: warnings.simplefilter("ignore", ResourceWarning),
        lambda: float(len(warnings.filters)),
    ),
    "NumPy's errors": (
        lambda: np.seterr(divide="raise"),
        lambda: 1.0 + (np.geterr()["divide"] == "raise"),
    ),
    "python's garbage collection": (gc.disable, lambda: 1.0 + gc.isenabled()),
    "the checks of distributions": (
        lambda: torch.distributions.Distribution.set_default_validate_args(False),
        lambda: 1.0 + torch.distributions.Distribution._validate_args,
    ),
    "grad mode": (lambda: torch.set_grad_enabled(True), lambda: 1.0 + torch.is_grad_enabled()),
}
for _name, _pair in SWITCHES.items():
    program(f"f switches {_name}, and computes by it", expect=EITHER)(
        lambda pair=_pair: _switching(*pair)
    )


@program("f switches gradients off and leaves them off", (CHUNKED, CHECKPOINT), EITHER)
def _() -> World:
    w = weight()

    def f(x: Any) -> Any:
        y = x @ w
        torch.set_grad_enabled(False)
        return y

    def step(run: Run) -> dict[str, Any]:
        out = run(f)(batch())
        return {"out": out, "on": torch.is_grad_enabled()}

    return World(step)


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


class Rich(nn.Module):
    """State of many kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.drop = nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(0.5)
        self.last, self.seen, self.n = nn.Linear(4, 3), [], 0
        self.double()

    def forward(self, x: Any) -> Any:
        self.n += 1
        self.seen.append(self.n)
        return self.last(self.drop(self.norm(self.first(x)))) * (1 + random.random())


def _interrupted(at: int, exception: type[BaseException]) -> World:
    """f raises at its call number `at`; then a step that succeeds."""
    net, calls, armed = Rich(), itertools.count(1), [True]
    x = batch()

    def f(x: Any) -> Any:
        y = net(x)
        if next(calls) == at and armed[0]:
            raise exception("on purpose")
        return y

    def forward(run: Run) -> Any:
        if run.kind != FROZEN:
            return score(run(f)(x))
        G = run(f)
        zs = [part.detach().requires_grad_() for part in (x[:3], x[3:])]
        y = torch.tensor(1.3, dtype=D, requires_grad=True)
        return [score(G(z), y) for z in zs], zs, y

    def backward(run: Run, found: Any) -> Any:
        if run.kind != FROZEN:
            found.backward()
            return [p.grad for p in net.parameters()]
        inner, zs, y = found
        slopes = [
            torch.autograd.grad(v, z, create_graph=True)[0] for v, z in zip(inner, zs, strict=True)
        ]
        return list(torch.autograd.grad(sum(s.sin().sum() for s in slopes), [y, *zs]))

    def step(run: Run) -> dict[str, Any]:
        where = "nowhere"
        if run.plain:
            armed[0], where = False, run.notes["where"]
            if where != "forward":
                found = forward(run)
            if where == "nowhere":
                backward(run, found)
        else:
            try:
                where = "forward"
                found = forward(run)
                where = "backward"
                backward(run, found)
                where = "nowhere"
            except exception:
                pass
            run.notes["where"] = where
        grads = [None if p.grad is None else p.grad.clone() for p in net.parameters()]
        stood = state_of(net), torch.get_rng_state(), random.getstate()
        armed[0] = False
        net.zero_grad()
        second = backward(run, forward(run))
        return {"grads": second, "grads after the exception": grads, "state after it": stood}

    return World(step, lambda: state_of(net))


for _exception in (ValueError, KeyboardInterrupt):
    for _at in (1, 2, 3, 5):
        # A use of frozen runs for itself, so after an exception in the second the first has run.
        program(f"f raises {_exception.__name__} at call {_at}", TRAINED if _at == 2 else REPLAYED)(
            lambda at=_at, exception=_exception: _interrupted(at, exception)
        )


# threads


@program("the backward pass runs in another thread", TRAINED)
def _() -> World:
    net, x = Rich(), batch()

    def step(run: Run) -> dict[str, Any]:
        loss = score(run(net)(x))
        thread = threading.Thread(target=loss.backward)
        thread.start()
        thread.join()
        return {"loss": loss, "grads": [p.grad for p in net.parameters()]}

    return World(step, lambda: state_of(net))


# compiled code, transforms, wrappers, outputs


@program("a compiled module inside of f", (CHUNKED, CHECKPOINT), EITHER)
def _() -> World:
    torch._dynamo.reset()
    net = mlp(nn.BatchNorm1d(4))
    return simple(torch.compile(net, backend="eager"), module=net)


@program("a compiled module with dropout inside of f", (CHUNKED, CHECKPOINT), EITHER)
def _() -> World:
    torch._dynamo.reset()
    net = mlp(nn.Dropout(0.5))
    return simple(torch.compile(net, backend="aot_eager"), module=net)


@program("a compiled function with a counter inside of f", (CHUNKED, CHECKPOINT), EITHER)
def _() -> World:
    torch._dynamo.reset()
    net = Counting(n=torch.zeros((), dtype=D))
    net.tick = lambda: net.n.add_(1).clone()  # type: ignore[assignment]
    g = torch.compile(lambda x: net(x) * 2, backend="eager")
    return simple(g, module=net)


@program("torch.func.grad inside of f")
def _() -> World:
    w = weight()
    return simple(lambda x: torch.func.grad(lambda z: (z @ w).sin().sum())(x), leaves=[w])


@program("torch.func.jvp inside of f, with dropout before", TRAINED)
def _() -> World:
    w = weight()
    return simple(
        lambda x: torch.func.jvp(lambda z: (z @ w).sin(), (F.dropout(x),), (x,))[1], leaves=[w]
    )


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


@program("tied weights")
def _() -> World:
    net = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3)).double()
    net[2].weight = net[0].weight
    return of_module(net)


@program("an adapter that merges itself into the frozen layer for the call", expect=EITHER)
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


@program("a batch of a subclass of Tensor", TRAINED)
def _() -> World:
    w = weight()
    return simple(
        lambda x: x.as_subclass(torch.Tensor) @ w,
        batch().as_subclass(Named),
        leaves=[w],
        tracked=False,
    )


@program("outputs in a dictionary, with an integer among them", TRAINED)
def _() -> World:
    net = mlp(nn.Dropout(0.5))

    def f(x: Any) -> Any:
        y = net(x)
        return {"logits": y, "which": y.argmax(1)}

    return simple(f, module=net)


@program("an output that is no tensor", TRAINED, EITHER)
def _() -> World:
    net = mlp()
    return simple(lambda x: (net(x), "a word"), module=net)


@program("an output that is a dataclass", TRAINED, EITHER)
def _() -> World:
    net = mlp()
    kind = dataclasses.make_dataclass("Output", ["y"])

    def step(run: Run) -> dict[str, Any]:
        if run.plain:
            loss = score(run(net)(batch()))
        else:
            loss = score(run(lambda x: kind(net(x)))(batch()).y)
        loss.backward()
        return {"loss": loss, "grads": [p.grad for p in net.parameters()]}

    return World(step)


@program("an output that a module keeps and changes in place later", REPLAYED, EITHER)
def _() -> World:
    w, kept = weight(), []

    def f(x: Any) -> Any:
        for y in kept:
            y.detach().zero_()
        kept.clear()
        y = x @ w
        kept.append(y)
        return y * 1

    return simple(f, leaves=[w])


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


@program("a parameter that only the second chunk uses", TRAINED)
def _() -> World:
    w, extra, seen = weight(), weight(), []

    def f(x: Any) -> Any:
        seen.append(1)
        return x @ w + (x @ extra if len(seen) == 2 else 0)

    return simple(f, leaves=[w, extra], state=lambda: len(seen))


@program("a layer is trained that was frozen before", TRAINED)
def _() -> World:
    net = mlp(nn.Dropout(0.5))

    def step(run: Run) -> dict[str, Any]:
        found = []
        for on in (False, True, False):
            net[0].requires_grad_(on)
            net.zero_grad()
            loss = score(run(net)(batch()))
            loss.backward()
            found.append([p.grad for p in net.parameters()])
        return {"grads": found}

    return World(step)


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


@program("f deletes an attribute that the next call makes anew")
def _() -> World:
    holder = types.SimpleNamespace(n=1)
    w = weight()

    def f(x: Any) -> Any:
        n = getattr(holder, "n", 5)
        if n == 5:
            holder.n = 2
        else:
            del holder.n
        return x @ w * n

    return simple(f, leaves=[w], state=lambda: vars(holder).copy())


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
program("an output that the loss ignores is zero of either sign", TRAINED)(
    _ignoring(lambda y: -torch.zeros_like(y))
)
program("an output that the loss ignores is of truth values", TRAINED)(_ignoring(lambda y: y > 0))


@program("f gives only the rows that it chooses, of some chunks none", TRAINED)
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
program("a chunk computed again has the same values and a part of the graph less", TRAINED, EITHER)(
    _by_turns(lambda ws, turn: ws[0] * (ws[0] if turn else ws[0].detach()), 1, 1, 1, 0)
)


@program("state out of reach counts only in training, after a step in evaluation", TRAINED, EITHER)
def _() -> World:
    net, ticks = mlp(), itertools.count(1)

    def step(run: Run) -> dict[str, Any]:
        f = lambda x: net(x) * (next(ticks) if net.training else 1)
        operator, found = run(f), []
        for training in (False, True):
            net.train(training).zero_grad()
            loss = score(operator(batch()))
            loss.backward()
            found.append([p.grad for p in net.parameters()])
        return {"grads": found}

    return World(step)


@program("state out of reach counts only for batches of another shape", TRAINED, EITHER)
def _() -> World:
    w, ticks = weight(), itertools.count(1)

    def step(run: Run) -> dict[str, Any]:
        f = lambda x: x @ w * (next(ticks) if x.ndim == 3 else 1)
        operator, found = run(f), []
        for x in (batch(), batch()[:, None]):
            w.grad = None
            loss = score(operator(x))
            loss.backward()
            found.append(w.grad)
        return {"grads": found}

    return World(step)
