"""Compares bridged functions of the scenario table with the native functions."""

from collections import OrderedDict, UserDict

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

import gradtools.jax as gj
import gradtools.torch as gt
from gradtools import GradtoolsError, GradtoolsWarning, bridge
from gradtools.testing.cross_checking.tolerances import real_name, tolerance
from tests.support.scenario_table import scenarios

RECORDS = {s.name: s for s in scenarios()}
# Slow tests: programs of one vector without tags, except for the first two.
ALIKE = [name for name, s in RECORDS.items() if s.shape == "vector" and not s.tags][2:]
# The tag of programs for which the two frameworks define different derivatives.
CONVENTIONS = "kink"


class Native:
    """The `gt` namespace of one framework, with conversions of pytrees from and to NumPy arrays."""

    def __init__(self, gt):
        self.gt, self.waist = gt, gt._api._backend

    def arrays(self, tree):
        if isinstance(tree, dict):
            return {k: self.arrays(x) for k, x in tree.items()}
        if isinstance(tree, tuple | list):
            return type(tree)(map(self.arrays, tree))
        return self.gt.asarray(np.asarray(tree))

    def inexact(self, tree):
        return [y for y in self.waist.flatten(tree)[0] if self.waist.is_inexact(y)]

    def numpy(self, tree):
        return [np.asarray(self.gt.to_numpy(y)) for y in self.waist.flatten(tree)[0]]


TORCH, JAX = Native(gt), Native(gj)


def loss_of(native, f):
    """Return a real-valued loss: a weighted sum over the floating-point outputs of f."""
    xp = native.gt.xp

    def loss(*args):
        total = 0.0
        for k, y in enumerate(native.inexact(f(*args))):
            y = xp.real(y * xp.conj(y)) + xp.real(y) if native.waist.is_complex(y) else y * y + y
            total = total + (k + 1) * xp.sum(y)
        return total

    return loss


def active(native, args):
    """Return the positions of the arguments whose leaves are all floating-point."""
    leaves = [native.waist.flatten(arg)[0] for arg in args]
    return [i for i, xs in enumerate(leaves) if xs and all(map(native.waist.is_inexact, xs))]


def answers(native, f, scenario):
    """Return a dict of values and derivatives of f as NumPy arrays."""
    g, args = native.gt, native.arrays(scenario.args)
    found = {"value": native.numpy(f(*args))}
    loss, which = loss_of(native, f), active(native, args)
    if not scenario.order or not which or not native.inexact(f(*args)):
        return found
    at = [args[i] for i in which]
    doubled = tuple(
        native.waist.unflatten(d, [0.3 * x + 0.1 for x in xs])
        for xs, d in map(native.waist.flatten, at)
    )

    def of(*moving):
        full = list(args)
        for i, x in zip(which, moving, strict=True):
            full[i] = x
        return loss(*full)

    def derivatives(at, doubled):
        first = g.vjp(of, *at)[1](g.vjp(of, *at)[0] * 0 + 1)
        pushed = g.jvp(of, at, doubled)[1]
        if scenario.order < 2:
            return first, pushed
        twice = [g.hvp(of, at, doubled, mode=m)[1] for m in MODES]
        return first, pushed, *twice

    run = jax.jit(derivatives) if native is JAX else derivatives
    names = ("vjp", "jvp", *MODES)
    return found | dict(zip(names, map(native.numpy, run(tuple(at), doubled)), strict=False))


MODES = ("forward_over_reverse", "reverse_over_reverse")


@pytest.mark.sampled(jax=(1, 22), torch=(1, 16))
@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[pytest.mark.slow] * (n in ALIKE)) for n in RECORDS]
)
@pytest.mark.parametrize("host", ["jax", "torch"])
def test_a_bridged_function_is_the_native_one_in_value_and_both_orders(host, name):
    scenario = RECORDS[name]
    native, guest = (JAX, TORCH) if host == "jax" else (TORCH, JAX)
    cross = bridge.to_jax if host == "jax" else bridge.to_torch
    theirs = cross(lambda *args: scenario.function(guest.gt, *args))
    found = answers(native, theirs, scenario)
    by = guest if CONVENTIONS in scenario.tags else native
    expected = answers(by, lambda *args: scenario.function(by.gt, *args), scenario)
    assert found.keys() == expected.keys()
    for key, ys in found.items():
        order = 0 if key == "value" else 2 if key in MODES else 1
        for y, wanted in zip(ys, expected[key], strict=True):
            assert y.shape == wanted.shape and y.dtype == wanted.dtype
            scale = max(1.0, np.max(np.abs(wanted[np.isfinite(wanted)]), initial=0.0))
            allowed = tolerance(real_name(scenario.dtype), order) * scale
            np.testing.assert_allclose(y, wanted, rtol=0, atol=allowed, err_msg=key)


def test_an_input_that_reaches_nothing_has_zeros():
    f, g = (c(lambda a, b: (a**2).sum()) for c in (bridge.to_jax, bridge.to_torch))
    for native, each in ((JAX, f), (TORCH, g)):
        args = native.arrays((np.ones(3), 2 * np.ones(3)))
        at_a, at_b = native.numpy(list(native.gt.grad(each, (0, 1))(*args)))
        np.testing.assert_allclose(at_a, 2 * np.ones(3))
        np.testing.assert_array_equal(at_b, np.zeros(3))


def test_torch_export_warns_that_the_derivative_is_lost():
    f = bridge.to_torch(lambda x: jnp.sin(x))

    class Model(torch.nn.Module):
        def forward(self, x):
            return f(x)

    with pytest.warns(GradtoolsWarning, match=r"torch\.export: the program contains the values"):
        program = torch.export.export(Model(), (torch.ones(3, requires_grad=True),)).module()
    np.testing.assert_allclose(
        program(torch.zeros(3) + 0.5).detach(), np.sin(np.full(3, 0.5)), rtol=1e-6
    )


class Record(OrderedDict):
    """Like a ModelOutput, a dict whose items are attributes and whose `update` raises an error."""

    def __setitem__(self, key, value):
        super().__setitem__(key, value)
        setattr(self, key, value)

    def update(self, *args, **kwargs):
        raise Exception("You cannot use update.")


torch.utils._pytree.register_pytree_node(
    Record,
    lambda r: (list(r.values()), list(r)),
    lambda xs, keys: Record(zip(keys, xs, strict=True)),
)


class Encoder(torch.nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.layer, self.kind = torch.nn.Linear(2, 2), kind

    def forward(self, x):
        y = self.layer(x)
        states = self.kind({"sin": y.sin(), "cos": y.cos()})
        return self.kind({"z": y, "states": (states, x)})


TRACED = {
    "a call": lambda f: f,
    "jit": lambda f: jax.jit(f),
    "vmap": lambda f: jax.vmap(f),
    "scan": lambda f: lambda xs: jax.lax.scan(lambda _, x: (None, f(x)), None, xs)[1],
}


@pytest.mark.parametrize("traced", TRACED)
@pytest.mark.parametrize("kind", [Record, type("Own", (dict,), {}), UserDict])
def test_the_output_of_a_model_becomes_a_dict(kind, traced):
    model, x = Encoder(kind), np.random.default_rng(0).normal(size=(3, 2)).astype("float32")
    apply, params, state = bridge.to_jax(model)
    run = TRACED[traced](lambda x: apply(params, state, x)[0])
    found, y = run(jnp.asarray(x)), model.layer(torch.as_tensor(x)).detach()
    assert type(found) is type(found["states"][0]) is dict
    assert jax.tree.structure(found) == jax.tree.structure(
        {"z": 0, "states": ({"sin": 0, "cos": 0}, 0)}
    )
    for array, wanted in (
        (found["z"], y),
        (found["states"][0]["sin"], y.sin()),
        (found["states"][0]["cos"], y.cos()),
        (found["states"][1], x),
    ):
        np.testing.assert_allclose(array, wanted, rtol=1e-5)
    slope = jax.grad(lambda x: (run(x)["states"][0]["cos"]).sum())(jnp.asarray(x))
    np.testing.assert_allclose(slope, -y.sin() @ model.layer.weight.detach(), rtol=1e-5)


@pytest.mark.parametrize("kind", [dict, Record])
def test_the_declared_output_of_a_model_has_the_order_of_its_dict(kind):
    """JAX sorts the keys of a dict, but not the keys of an OrderedDict."""
    spec = gj.ArraySpec((), "float32")
    for run in (jax.jit, lambda f: f):
        f = bridge.to_jax(lambda x: Record(b=x, a=2 * x), out=kind(b=spec, a=spec))
        found = run(f)(jnp.float32(1.0))
        assert type(found) is dict and (float(found["a"]), float(found["b"])) == (2.0, 1.0)


def test_a_dict_of_a_jax_function_becomes_a_dict_in_pytorch():
    f = bridge.to_torch(lambda x: {"pair": type("Own", (dict,), {})(b=x, a=2 * x)})
    x = torch.ones((), requires_grad=True)
    found = f(x)["pair"]
    assert type(found) is dict and (found["a"].item(), found["b"].item()) == (2.0, 1.0)
    assert torch.autograd.grad(found["a"], x)[0] == 2


def test_containers_that_the_host_does_not_know_become_tuples_or_are_refused():
    f = bridge.to_jax(lambda t: {"most": torch.max(t, 0), "sorted": [torch.sort(t, 0)]})
    x = jnp.asarray([[1.0, 5.0], [4.0, 2.0]])
    for run in (f, jax.jit(lambda x: f(x))):
        found = run(x)
        assert type(found["most"]) is tuple
        np.testing.assert_array_equal(found["most"][0], [4.0, 5.0])
        np.testing.assert_array_equal(found["sorted"][0][1], [[0, 1], [1, 0]])
    slope = jax.grad(lambda x: f(x)["most"][0].sum())(x)
    np.testing.assert_array_equal(slope, [[0.0, 1.0], [1.0, 0.0]])

    @jax.tree_util.register_pytree_node_class
    class Pair:
        def __init__(self, *parts):
            self.parts = parts

        def tree_flatten(self):
            return self.parts, None

        @classmethod
        def tree_unflatten(cls, _, parts):
            return cls(*parts)

    g = bridge.to_torch(lambda x: Pair(x, 2 * x))
    with pytest.raises(GradtoolsError, match=r"to_torch: .*Pair, which is not a pytree in PyTorch"):
        g(torch.ones(2))
