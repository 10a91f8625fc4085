"""Snapshots that are taken from an earlier one: whatever changed in between is seen."""

from __future__ import annotations

import itertools
import random

import numpy as np
import pytest
import torch
from torch import nn

from gradtools.code_origin import LIBRARY, PACKAGE, USER, whose
from gradtools.torch import snapshots as state
from gradtools.torch.snapshots import Snapshot

seed_numpy, draw_numpy, get_numpy_state = np.random.seed, np.random.randn, np.random.get_state
SCALE = 1
LIST = [1]


def helper(z):
    return z * SCALE


class Plain:
    pass


class Model(nn.Module):
    count = 0

    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.ones(2))
        self.register_buffer("b", torch.zeros(2))
        self.plain, self.table, self.seen = 1.5, {"a": None, "b": None}, [1]
        self.array, self.object, self.inner = np.zeros(2), Plain(), nn.Linear(1, 1)
        self.generator = torch.Generator(torch.get_default_device())

    def forward(self, z):
        return helper(z) * self.b * type(self).count * len(LIST)


def renamed(model):
    model.table["c"] = model.table.pop("a")


def in_class(model):
    Model.count += 1


def in_globals(model):
    globals()["SCALE"] += 1


CHANGES = {
    "an attribute": lambda m: setattr(m, "plain", 2.5),
    "a new attribute": lambda m: setattr(m, "more", None),
    "a key": renamed,
    "a list": lambda m: m.seen.append(2),
    "a buffer": lambda m: m.b.add_(1),
    "a buffer, uncounted": lambda m: m.b.data.add_(1),
    "the sign of zero": lambda m: m.b.data.neg_(),
    "a buffer's shape": lambda m: m.b.resize_(3).fill_(1),
    "a parameter, by another": lambda m: setattr(m, "w", nn.Parameter(torch.zeros(2))),
    "an array": lambda m: m.array.__iadd__(1),
    "an object": lambda m: setattr(m.object, "x", 1),
    "a hook": lambda m: m.inner.register_forward_hook(lambda *_: None),
    "a generator": lambda m: torch.rand(1, generator=m.generator),
    "a class": in_class,
    "a global": in_globals,
    "a global list": lambda m: LIST.append(1),
    "the random stream": lambda m: torch.rand(1),
    "python's random stream": lambda m: random.random(),
    "NumPy's random stream": lambda m: draw_numpy(),
}


@pytest.fixture
def model():
    yield Model()
    Model.count, globals()["SCALE"], LIST[:] = 0, 1, [1]


def everything(model):
    """All that stands behind the model, in a form that can be compared."""
    state = lambda x: x.tobytes() if isinstance(x, np.ndarray) else x
    numpy = [state(x) for x in get_numpy_state()]
    buffers = [
        (k, tuple(x.shape), x.cpu().clone().numpy().tobytes()) for k, x in model.named_buffers()
    ]
    streams = [torch.get_rng_state(), model.generator.get_state()]
    return [
        *(model.plain, sorted(vars(model)), list(model.table), list(model.seen), buffers),
        *(id(model.w), model.array.tolist(), getattr(model.object, "x", None), Model.count),
        *(SCALE, list(LIST), [x.numpy().tobytes() for x in streams], random.getstate(), numpy),
    ]


@pytest.mark.slow_at("an attribute")
@pytest.mark.parametrize("change", CHANGES)
def test_a_snapshot_like_an_earlier_one_holds_what_changed(model, change):
    first = Snapshot.of([model], [])
    assert Snapshot.of([model], [], first).reached is first.reached
    CHANGES[change](model)
    then = everything(model)
    later = Snapshot.of([model], [], first)
    for other in ("an attribute", "a list", "a buffer", "an array", "a global"):
        CHANGES[other](model)
    random.random(), draw_numpy(), torch.rand(1), torch.rand(1, generator=model.generator)
    later.restore()
    assert everything(model) == then


@pytest.mark.parametrize("change", [c for c in CHANGES if c not in ("a new attribute", "a hook")])
def test_an_earlier_snapshot_puts_back_what_changed(model, change):
    model.object.x = 0
    before = everything(model)
    first = Snapshot.of([model], [])
    CHANGES[change](model)
    assert everything(model) != before
    now = first.now()
    changed = everything(model)
    first.restore()
    assert everything(model) == before
    now.restore()
    assert everything(model) == changed


def test_what_did_not_change_is_shared():
    model = Model()
    first = Snapshot.of([model], []).without_unused_streams()
    del model.generator, model.array  # whose states are read out each time
    first = Snapshot.of([model], []).without_unused_streams()
    assert first.now() is first
    model.b.add_(1)
    later = first.now()
    assert later is not first and later.reached is first.reached


def test_a_container_that_was_empty_is_walked_once_it_is_not(model):
    first = Snapshot.of([model], [])
    state = nn.Parameter(torch.zeros(1))
    model.inner.register_forward_hook(lambda *_: state.add_(0))
    later = Snapshot.of([model], [], first)
    assert any(x is state for x, _ in later.reached.watched)


@pytest.mark.parametrize("transform", ["frozen", "checkpoint", "chunked", "grad", "custom_rule"])
def test_what_gradtools_knows_of_a_function_is_no_state_of_the_user(transform: str) -> None:
    """A snapshot that stands in it holds whole modules' globals, which would be walked."""
    import gradtools.torch as gt

    model = nn.Linear(2, 2).requires_grad_(False)
    loss, each = lambda x: (model(x) ** 2).sum() * SCALE, lambda x: model(x) * SCALE
    inner = loss if transform == "grad" else each
    more = {"chunk_size": 1} if transform == "chunked" else {}
    f = getattr(gt, transform)(inner, **more)
    if transform == "custom_rule":
        f.defvjp(lambda x: (each(x), x), lambda x, c: (c @ model.weight * SCALE,))
    x = torch.ones(2, 2, requires_grad=True)
    (f(x) ** 2).sum().backward()
    reached = Snapshot.of([f], []).reached
    assert len(reached.maps) < 40
    assert not any(items is globals() for items, _ in reached.maps)


def test_a_class_is_of_who_wrote_its_module():
    assert [whose(kind) for kind in (Snapshot, nn.Linear, random.Random)] == [LIBRARY] * 3
    assert whose(pytest.Item) == PACKAGE
    assert whose(type("Mine", (), {"__module__": __name__})) == USER


class Shared:
    def __init__(self):
        self.first = [0]


def _object():
    return Shared(), lambda x, k: setattr(x, f"new {k}", [k])


def _dictionary():
    return {"a": [0]}, lambda x, k: x.update({f"new {k}": [k]})


def _class():
    kind = type("Own", (), {"first": [0], "__module__": __name__})
    return kind, lambda x, k: setattr(x, f"new_{k}", [k])


def _module():
    return nn.Linear(1, 1), lambda x, k: x.register_buffer(f"new_{k}", torch.zeros(1))


@pytest.mark.parametrize("made", [_object, _dictionary, _class, _module])
def test_what_another_thread_writes_while_a_snapshot_is_taken_or_put_back_is_no_error(
    made, monkeypatch
):
    """Threads of JAX's call what is bridged; what they write is as if each step met one."""
    held, write = made()
    visit, same, count = state._Search.visit, state._same, iter(range(1000))

    def meanwhile(plain):
        def call(*args):
            write(held, next(count))
            return plain(*args)

        return call

    monkeypatch.setattr(state._Search, "visit", meanwhile(visit))
    snapshot = Snapshot.of([lambda: held], [])
    assert next(count) > 3
    monkeypatch.setattr(state._Search, "visit", visit)
    monkeypatch.setattr(state, "_same", meanwhile(same))
    snapshot.now()
    snapshot.restore()


class Key:
    """A key at whose every look another thread writes."""

    write = staticmethod(lambda: None)

    def __hash__(self):
        self.write()
        return id(self)


def test_a_dictionary_is_put_back_while_another_thread_writes_to_it(monkeypatch):
    first, others = Key(), itertools.count()
    held = {first: 1}
    snapshot = Snapshot.of([lambda: held], [])
    held.update({Key(): 2, Key(): 3})
    monkeypatch.setattr(Key, "write", staticmethod(lambda: held.update({next(others): 0})))
    snapshot.restore()
    monkeypatch.undo()
    assert [key for key in held if isinstance(key, Key)] == [first] and held[first] == 1
