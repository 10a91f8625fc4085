"""Containers of the user's own classes: what they store counts, and no method of theirs is run.

transformers keeps its classes in an OrderedDict whose every method imports them; a cache may count
how often it was read. A snapshot reads what the base class stores, and puts that back.
"""

from __future__ import annotations

from collections import OrderedDict, deque

import pytest
import torch
from torch.utils import _pytree as pytree

import gradtools.torch as gt
from gradtools import GradtoolsError

X = torch.arange(6.0)[:, None] + 1


def refusing(kind):
    """A subclass none of whose own methods may be called."""

    def refused(name):
        def method(self, *args, **kwargs):
            raise ValueError(f"{name} was called")

        return method

    names = [
        "__iter__", "__len__", "__getitem__", "__setitem__", "__delitem__", "__contains__",
        "__bool__", "keys", "values", "items", "get", "clear", "update", "extend", "append", "add",
        "pop", "popitem",
    ]  # fmt: skip
    return type("Refusing", (kind,), {n: refused(n) for n in names if hasattr(kind, n)})


KINDS = [dict, OrderedDict, list, deque, set, tuple, frozenset]


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_no_method_of_a_container_is_run(kind):
    w = torch.tensor(2.0, requires_grad=True)
    given = () if kind in (dict, OrderedDict, deque) else ((object(),),)
    held = refusing(kind)(*given)
    if kind is deque:
        deque.append(held, object())
    elif not given:
        kind.__setitem__(held, "a", object())
    f = lambda x, w: (w * x, held)[0]
    for _ in range(2):
        gt.chunked(f, 2, in_axes=(0, None))(X, w).sum().backward()
    assert w.grad == 2 * X.sum()


class Counting(dict):
    """Counts how often it is read."""

    def __init__(self):
        super().__init__(scale=3.0)
        self.reads = 0

    def __getitem__(self, key):
        self.reads += 1
        return super().__getitem__(key)


class Ring(list):
    """A list that knows which of its entries is next."""

    def __init__(self, entries):
        super().__init__(entries)
        self.at = 0

    def following(self):
        self.at += 1
        return self[self.at % len(self)]


def test_state_in_a_container_that_changes_the_values_is_refused():
    w, reads, ring = torch.tensor(2.0, requires_grad=True), Counting(), Ring([1.0, 5.0])
    f = lambda x: w * x * reads["scale"] * reads.reads * ring.following()
    z = gt.chunked(f, 2)(X)
    with pytest.raises(GradtoolsError, match="f returns other values when it is computed again"):
        (z.sum() ** 2).backward()


def test_who_exchanges_the_forward_of_a_chunked_module_exchanges_that_call():
    """As accelerate and other packages do, which take a module's forward and put theirs around."""
    inner = torch.nn.Linear(3, 2)
    module = gt.chunked(inner, 2)
    own, calls = module.forward, []

    def around(x):
        calls.append(len(x))
        return own(x)

    module.forward, module._original_forward = around, own
    x = torch.ones(5, 3)
    torch.testing.assert_close(module(x), inner(x))
    assert calls == [5] and "forward" not in inner.__dict__
    module.forward = module.__dict__.pop("_original_forward")
    torch.testing.assert_close(module(x), inner(x))
    assert calls == [5]


class Output:
    """What a model returns, of a library that registers it without names for its parts."""

    def __init__(self, rows, **others):
        self.parts = {"rows": rows, **others}


pytree.register_pytree_node(
    Output,
    lambda out: (list(out.parts.values()), list(out.parts)),
    lambda parts, names: Output(**dict(zip(names, parts, strict=True))),
)


def test_in_a_container_without_names_the_place_is_named_and_how_to_take_a_part():
    with pytest.raises(
        GradtoolsError, match=r"output\['rows'\] is .*object.*returns what the loss needs"
    ):
        gt.chunked(lambda x: Output(object()), 2)(X)
    with pytest.raises(GradtoolsError, match=r"output\['pair'\]\[1\]"):
        gt.vjp(lambda x: Output(x, pair=(x, object())), X)
