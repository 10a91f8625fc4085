"""Compares operators on whole equinox and flax.nnx modules with plain JAX.

Each test combines a kind of module with an operator. The expected values use no code of gradtools:
the module's library splits the module into a list of arrays, and `jax.grad`, `jax.jvp` or a plain
loop differentiates the loss of that list.
"""

from __future__ import annotations

import warnings
from collections import UserDict
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import gradtools.jax as gt
from gradtools import GradtoolsError, GradtoolsWarning

eqx = pytest.importorskip("equinox")
nnx = pytest.importorskip("flax.nnx")

X = jnp.asarray(np.random.default_rng(0).normal(size=(6, 3)))
F64 = jnp.float64


# --- kinds of modules --------------------------------------------------------------------


class Mixed(eqx.Module):
    """An equinox module with leaves of all kinds."""

    layer: Any
    activation: Any
    name: str
    count: int
    table: Any
    rate: float
    nothing: Any = None

    def __call__(self, x):
        return self.activation(self.layer(x)) * self.count + self.table[0] * self.rate


class Tied(eqx.Module):
    shared: Any

    def __init__(self):
        layer = eqx.nn.Linear(3, 3, key=jax.random.key(1), dtype=F64)
        pair = (layer, eqx.nn.Linear(3, 3, key=jax.random.key(2), dtype=F64))
        where = lambda pair: pair[1].weight
        self.shared = eqx.nn.Shared(pair, where, lambda pair: pair[0].weight)

    def __call__(self, x):
        first, second = self.shared()
        return second(jax.nn.tanh(first(x)))


def mixed():
    layer = eqx.nn.Linear(3, 2, key=jax.random.key(0), dtype=F64)
    return Mixed(layer, jax.nn.softplus, "net", 3, jnp.arange(2), 0.5)


def mlp():
    return eqx.nn.MLP(3, 1, 4, 1, key=jax.random.key(0), dtype=F64)


class Plain(nnx.Module):
    def __init__(self):
        rngs = nnx.Rngs(0)
        self.a = nnx.Linear(3, 4, rngs=rngs, param_dtype=F64)
        self.b = nnx.Linear(4, 1, rngs=rngs, param_dtype=F64)
        self.act, self.name = jax.nn.gelu, "plain"

    def __call__(self, x):
        return self.b(self.act(self.a(x)))


class Stateful(nnx.Module):
    def __init__(self):
        rngs = nnx.Rngs(0)
        self.a = nnx.Linear(3, 4, rngs=rngs, param_dtype=F64)
        self.norm = nnx.BatchNorm(4, rngs=rngs, param_dtype=F64, dtype=F64)
        self.drop = nnx.Dropout(0.5, rngs=rngs)
        self.calls = nnx.Variable(jnp.zeros((), jnp.int32))

    def __call__(self, x):
        self.calls[...] = self.calls[...] + 1
        return self.drop(jax.nn.tanh(self.norm(self.a(x))))


class TiedGraph(nnx.Module):
    def __init__(self):
        self.a = nnx.Linear(3, 3, rngs=nnx.Rngs(0), param_dtype=F64)
        self.b = nnx.Linear(3, 3, rngs=nnx.Rngs(1), param_dtype=F64)
        self.b.kernel = self.a.kernel

    def __call__(self, x):
        return self.b(jax.nn.tanh(self.a(x)))


class SharedState(nnx.Module):
    """A module in which two names refer to the same layer, statistics and dropout stream."""

    def __init__(self):
        rngs = nnx.Rngs(0)
        self.a = self.tied = nnx.Linear(3, 3, rngs=rngs, param_dtype=F64)
        self.norm = self.again = nnx.BatchNorm(3, rngs=rngs, param_dtype=F64, dtype=F64)
        self.drop = self.later = nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x):
        x = self.drop(self.norm(self.a(x)))
        return self.later(self.again(self.tied(x + 1)))


@dataclass(frozen=True)
class Kind:
    make: Any
    library: str
    batched: bool = False  # Whether the module accepts a batch of examples.
    changes: bool = False  # Whether a call changes the module.

    def loss(self, module, x):
        out = module(x) if self.batched else jax.vmap(module)(x)
        return (out**2).mean()

    def split(self, module):
        """Return the module's arrays and a function that rebuilds the module from arrays."""
        if self.library == "equinox":
            part, rest = eqx.partition(module, eqx.is_inexact_array)
            leaves, tree = jax.tree.flatten(part)
            return leaves, lambda xs: eqx.combine(jax.tree.unflatten(tree, xs), rest)
        graph, params, rest = nnx.split(module, nnx.Param, ...)
        leaves, tree = jax.tree.flatten(params)
        return leaves, lambda xs: nnx.merge(graph, jax.tree.unflatten(tree, xs), rest, copy=True)

    def flat_loss(self, module, x=X):
        leaves, rebuild = self.split(module)
        return leaves, lambda xs: self.loss(rebuild(xs), x)


KINDS = {
    "an equinox MLP": Kind(mlp, "equinox"),
    "equinox with leaves of all kinds": Kind(mixed, "equinox"),
    "equinox, tied": Kind(Tied, "equinox"),
    "nnx": Kind(Plain, "nnx", True),
    "nnx with batch norm, dropout, a counter": Kind(Stateful, "nnx", True, True),
    "nnx, tied": Kind(TiedGraph, "nnx", True),
    "nnx, shared layers with state": Kind(SharedState, "nnx", True, True),
}


def arrays(tree):
    return jax.tree.leaves(tree)


def same(found, wanted, tolerance=1e-12):
    found, wanted = arrays(found), arrays(wanted)
    assert len(found) == len(wanted)
    for a, b in zip(found, wanted, strict=True):
        np.testing.assert_allclose(a, b, rtol=tolerance, atol=1e-14)


def directions(leaves, seed=1):
    rng = np.random.default_rng(seed)
    return [jnp.asarray(rng.normal(size=x.shape)) for x in leaves]


def tangent_of(kind, module, leaves):
    """Return the module with `leaves` in place of its parameters, for use as a tangent."""
    _, rebuild = kind.split(module)
    return rebuild(leaves)


# --- operators: each returns the results of gradtools and the expected values ------------


def rows(kind, m):
    return m if kind.batched else jax.vmap(m)


def of_rows(kind, run):
    return gt.grad(lambda m, x: (run(m, x) ** 2).mean())


GRADIENTS = {
    "grad": lambda kind, m: gt.grad(kind.loss)(m, X),
    "vjp": lambda kind, m: gt.vjp(lambda m: kind.loss(m, X), m)[1](jnp.ones(())),
    "jit": lambda kind, m: (eqx.filter_jit if kind.library == "equinox" else nnx.jit)(
        gt.grad(kind.loss)
    )(m, X),
    "checkpoint": lambda kind, m: gt.grad(gt.checkpoint(kind.loss))(m, X),
    "microbatched": lambda kind, m: gt.microbatched_value_and_grad(kind.loss, 4)(m, X)[1],
    "chunked": lambda kind, m: of_rows(
        kind, gt.chunked(lambda m, x: rows(kind, m)(x), 4, in_axes=(None, 0))
    )(m, X),
    "chunked module": lambda kind, m: of_rows(kind, lambda m, x: gt.chunked(rows(kind, m), 4)(x))(
        m, X
    ),
}


def gradient(kind, m):
    leaves, loss = kind.flat_loss(m)
    return jax.grad(loss)(leaves)


def with_gradient(f, kind, m):
    wanted = gradient(kind, m)  # Computed first, because f may change m.
    return f(kind, m), wanted


def by_jvp(kind, m):
    leaves, loss = kind.flat_loss(m)
    ts = directions(leaves)
    wanted = jax.jvp(loss, (leaves,), (ts,))
    return gt.jvp(lambda m: kind.loss(m, X), (m,), (tangent_of(kind, m, ts),)), wanted


def by_hvp(kind, m):
    leaves, loss = kind.flat_loss(m)
    ts = directions(leaves)
    wanted = jax.jvp(jax.grad(loss), (leaves,), (ts,))
    return gt.hvp(lambda m: kind.loss(m, X), (m,), (tangent_of(kind, m, ts),)), wanted


def by_argument(kind, m):
    """Pass the module as a constant argument, by position and by keyword."""
    leaves, _ = kind.flat_loss(m)
    _, rebuild = kind.split(m)
    wanted = jax.grad(lambda x: kind.loss(rebuild(leaves), x))(X)
    by_position = gt.grad(kind.loss, argnums=1)(kind.make(), X)
    by_keyword = gt.grad(lambda x, net: kind.loss(net, x))(X, net=m)
    return (by_position, by_keyword), (wanted, wanted)


def by_minimax(kind, m):
    own, rebuild = kind.split(m)
    other = rebuild([1.5 * x for x in own])
    wanted = gradient(kind, m), [2 * x for x in gradient(kind, other)]
    f = lambda a, b, x: kind.loss(a, x) - 2 * kind.loss(b, x)
    return gt.minimax_value_and_grad(f, 0, 1)(m, other, X)[1], wanted


def by_tree(kind, m):
    """Differentiate a dict that contains a module and an array."""
    leaves, loss = kind.flat_loss(m)
    wanted = jax.grad(lambda xs, t: loss(xs) * t**2, argnums=(0, 1))(leaves, 3.0)
    g = gt.grad(lambda p, x: kind.loss(p["net"], x) * p["t"] ** 2)({"net": m, "t": 3.0}, X)
    return (g["net"], g["t"]), wanted


def by_assign(kind, m):
    wanted, g = gradient(kind, m), gt.grad(kind.loss)(m, X)
    total = gt.accumulate_gradients(gt.accumulate_gradients(None, g), g)
    return (gt.assign_gradients(m, g), total), (wanted, [2 * x for x in wanted])


def by_mixed_partial(kind, m):
    leaves, rebuild = kind.split(m)
    f = lambda m, g: kind.loss(m, g) if kind.library == "equinox" else (m(g) ** 2).mean()
    u, G = X + 1, jnp.sin
    along = lambda xs: jax.jvp(lambda z: f(rebuild(xs), G(z)), (X,), (u,))[1]
    return gt.mixed_partial(f, G, m, X, u), jax.grad(along)(leaves)


def by_per_example(kind, m):
    leaves, rebuild = kind.split(m)
    loss = lambda xs, x: kind.loss(rebuild(xs), x[None])
    wanted = [jax.grad(loss)(leaves, x) for x in X]
    stacked = [jnp.stack(gs) for gs in zip(*wanted, strict=True)]
    return gt.per_example_grad(lambda m, x: kind.loss(m, x[None]))(m, X), stacked


def by_frozen(kind, m):
    leaves, rebuild = kind.split(m)
    wanted = jax.grad(lambda x: (jax.grad(kind.loss, 1)(rebuild(leaves), x) ** 2).sum())(X)
    slope = gt.grad(lambda x: (gt.frozen(rows(kind, m))(x) ** 2).mean())
    return gt.grad(lambda x: (slope(x) ** 2).sum())(X), wanted


def by_jacobian(kind, m):
    leaves, rebuild = kind.split(m)
    out = lambda m, x: rows(kind, m)(x)
    wanted = jax.jacrev(lambda xs: out(rebuild(xs), X))(leaves)
    found = [gt.jacobian(out, mode=mode)(m, X) for mode in ("reverse", "forward")]
    return found, [wanted, wanted]


OPERATORS = {
    **{n: partial(with_gradient, f) for n, f in GRADIENTS.items()},
    "jvp": by_jvp, "hvp": by_hvp, "argument": by_argument, "minimax": by_minimax,
    "tree": by_tree, "assign": by_assign, "per_example": by_per_example, "frozen": by_frozen,
    "jacobian": by_jacobian, "mixed_partial": by_mixed_partial,
}  # fmt: skip
WITHOUT_STATE = [
    "per_example", "microbatched", "chunked", "chunked module", "frozen", "jacobian",
    "mixed_partial",
]  # fmt: skip
EVERYWHERE = [name for name in OPERATORS if name not in WITHOUT_STATE]


QUICK = ("equinox with leaves of all kinds", "nnx with batch norm, dropout, a counter")


def kinds(names):
    """Mark all kinds that are not in `QUICK` as sweep tests."""
    return [n if n in QUICK else pytest.param(n, marks=pytest.mark.sweep) for n in names]


@pytest.mark.quick_at(
    ("vjp", "equinox with leaves of all kinds"),
    ("argument", "equinox with leaves of all kinds"),
    ("tree", "equinox with leaves of all kinds"),
)
@pytest.mark.parametrize("name", kinds(KINDS))
@pytest.mark.parametrize("operator", EVERYWHERE)
def test_an_operator_gives_plain_jax_numbers(operator, name):
    found, wanted = OPERATORS[operator](KINDS[name], KINDS[name].make())
    same(found, wanted)


@pytest.mark.slow_at("mixed_partial")
@pytest.mark.sweep_at("per_example", "microbatched", "chunked", "frozen", "jacobian")
@pytest.mark.parametrize("name", kinds([n for n, kind in KINDS.items() if not kind.changes]))
@pytest.mark.parametrize("operator", WITHOUT_STATE)
def test_an_operator_that_runs_a_module_often_gives_plain_jax_numbers(operator, name):
    found, wanted = OPERATORS[operator](KINDS[name], KINDS[name].make())
    same(found, wanted, 1e-11)


# --- results, and the state of modules afterwards ----------------------------------------


def test_the_gradient_of_an_nnx_module_is_what_nnx_grad_gives_and_its_optimizer_takes():
    optax = pytest.importorskip("optax")
    kind = KINDS["nnx with batch norm, dropout, a counter"]
    a, b = kind.make(), kind.make()
    found, wanted = gt.grad(kind.loss)(a, X), nnx.grad(kind.loss)(b, X)
    assert jax.tree.structure(found) == jax.tree.structure(wanted)
    for net, g in ((a, found), (b, wanted)):
        nnx.Optimizer(net, optax.sgd(0.1), wrt=nnx.Param).update(net, g)
    same(nnx.state(a, nnx.Param), nnx.state(b, nnx.Param))


@pytest.mark.slow_at("vjp", "hvp", "checkpoint", "jit")
@pytest.mark.parametrize("operator", ["grad", "vjp", "jvp", "hvp", "checkpoint", "jit"])
def test_an_nnx_module_stands_afterwards_as_after_one_plain_call(operator):
    kind = KINDS["nnx with batch norm, dropout, a counter"]
    ours, plain = kind.make(), kind.make()
    OPERATORS[operator](kind, ours)
    kind.loss(plain, X)
    rest = lambda m: jax.tree.leaves(nnx.state(m, nnx.Not(nnx.Param)))
    for a, b in zip(rest(ours), rest(plain), strict=True):
        if jnp.issubdtype(a.dtype, jax.dtypes.prng_key):
            a, b = jax.random.key_data(a), jax.random.key_data(b)
        np.testing.assert_allclose(a, b, rtol=1e-6)


def test_microbatches_change_an_nnx_module_as_a_loop_does():
    kind = KINDS["nnx with batch norm, dropout, a counter"]
    ours, plain = kind.make(), kind.make()
    with warnings.catch_warnings():
        # batch norm uses the statistics of each chunk
        warnings.simplefilter("ignore", GradtoolsWarning)
        gt.microbatched_value_and_grad(kind.loss, 2)(ours, X)
    for x in (X[:2], X[2:4], X[4:]):
        kind.loss(plain, x)
    assert int(ours.calls[...]) == 3
    same(nnx.state(ours, nnx.BatchStat), nnx.state(plain, nnx.BatchStat), 1e-6)


def mean_of_rows(m, x):
    return (m(x) ** 2).mean()


def mean_of_chunks(m, x):
    return (mean_of_rows(m, x[:2]) + mean_of_rows(m, x[2:4])) / 2


def in_chunks(m, x):
    run = gt.chunked(lambda m, x: m(x), 2, in_axes=(None, 0))
    return (run(m, x) ** 2).mean()


def in_a_mapping(m, x):
    run = gt.chunked(lambda tree, x: tree["net"](x), 2, in_axes=(None, 0))
    return (run(UserDict(net=m), x) ** 2).mean()


RECOMPUTED = {
    "microbatched": (gt.microbatched_value_and_grad(mean_of_rows, 2), mean_of_chunks),
    "chunked": (gt.value_and_grad(in_chunks), mean_of_chunks),
    "chunked, in a mapping": (gt.value_and_grad(in_a_mapping), mean_of_chunks),
    "checkpoint": (gt.value_and_grad(gt.checkpoint(mean_of_rows)), mean_of_rows),
    "frozen": (gt.value_and_grad(gt.frozen(mean_of_rows)), mean_of_rows),
}


def same_with_state(found, wanted, ours, plain):
    same(found, wanted, 1e-10)
    assert arrays(nnx.state(ours, nnx.RngCount)) == arrays(nnx.state(plain, nnx.RngCount))
    same(nnx.state(ours, nnx.BatchStat), nnx.state(plain, nnx.BatchStat), 1e-6)


@pytest.mark.filterwarnings("ignore::gradtools.errors.GradtoolsWarning")
@pytest.mark.parametrize("operator", RECOMPUTED)
def test_an_nnx_module_with_shared_state_gives_the_numbers_and_state_of_a_plain_loop(operator):
    run, plain_loss = RECOMPUTED[operator]
    ours, plain = SharedState(), SharedState()
    found = run(ours, X[:4])
    same_with_state(found, nnx.value_and_grad(plain_loss)(plain, X[:4]), ours, plain)


def test_an_accumulator_adds_the_gradients_of_an_nnx_module_with_shared_state():
    ours, plain = SharedState(), SharedState()
    total = gt.GradientAccumulator()
    for x in (X[:2], X[2:4]):
        total.add(gt.grad(mean_of_rows)(ours, x))
    same_with_state(total.mean(), nnx.grad(mean_of_chunks)(plain, X[:4]), ours, plain)


@pytest.mark.parametrize("recomputed", [gt.checkpoint, gt.frozen])
@pytest.mark.parametrize("form", ["twice", "keywords"])
def test_modules_in_several_arguments_are_updated_as_by_a_plain_call(form, recomputed):
    """A module is passed twice, or keyword arguments are not in alphabetical order."""
    norm = lambda n: nnx.BatchNorm(n, rngs=nnx.Rngs(0), param_dtype=F64, dtype=F64)
    ours, plain = [(norm(3), norm(6)) for _ in range(2)]
    if form == "twice":
        loss = lambda last, a, b: (last(jnp.hstack([a(X), b(X + 1)])) ** 3).mean()
        call = lambda f, pair: f(pair[1], pair[0], pair[0])
    else:
        loss = lambda b, a: (a(jnp.hstack([b(X), b(X + 1)])) ** 3).mean()
        call = lambda f, pair: f(b=pair[0], a=pair[1])
    found = gt.value_and_grad(lambda pair: call(recomputed(loss), pair))(ours)
    same_with_state(found, nnx.value_and_grad(partial(call, loss))(plain), ours, plain)


def test_a_list_of_nnx_modules_is_split_into_chunks():
    nets = [TiedGraph() for _ in range(4)]
    each = lambda nets, x: jnp.stack([net(row) for net, row in zip(nets, x, strict=True)])
    same(gt.chunked(each, 2, in_axes=(0, 0))(nets, X[:4]), each(nets, X[:4]))


@pytest.mark.sweep_at("hessian", "per_example_grad")
@pytest.mark.parametrize("operator", ["hessian", "jacobian", "per_example_grad"])
def test_a_change_that_cannot_be_handed_on_is_refused_by_name(operator):
    kind = KINDS["nnx with batch norm, dropout, a counter"]
    f = kind.loss
    if operator == "per_example_grad":
        f = lambda m, x: kind.loss(m, x[None])
    with pytest.raises(GradtoolsError, match=f"{operator}: f changes a module.*module.eval"):
        getattr(gt, operator)(f)(kind.make(), X)


def test_a_parameter_in_two_differentiated_arguments_is_refused_by_name():
    a, b = Plain(), Plain()
    b.a.kernel = a.a.kernel
    f = lambda a, b: (a(X) - b(X)).sum()
    with pytest.raises(GradtoolsError, match=r"grad: the parameter a\.kernel is in two of"):
        gt.grad(f, argnums=(0, 1))(a, b)
    both = gt.grad(lambda both: f(*both))((a, b))
    wanted = nnx.grad(lambda both: f(*both))((a, b))
    same(both, wanted)


# --- modules in containers that are not pytrees in JAX -----------------------------------------


@dataclass
class Pair:
    enc: Any
    dec: Any


FORMS = {"dataclass": Pair, "mapping": lambda e, d: UserDict(enc=e, dec=d)}


def taken(tree, name):
    return tree[name] if isinstance(tree, UserDict) else getattr(tree, name)


def joint(tree, x):
    return (taken(tree, "dec")(jnp.tanh(taken(tree, "enc")(x))) ** 2).mean()


@pytest.mark.sweep_at("mapping")
@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_nnx_modules_inside_of_a_container_are_differentiated_and_change(form):
    nnx = pytest.importorskip("flax.nnx")
    x = jnp.linspace(0.0, 1.0, 15).reshape(5, 3)

    def made():
        rngs = nnx.Rngs(0)
        return nnx.Sequential(nnx.Linear(3, 4, rngs=rngs), nnx.BatchNorm(4, rngs=rngs)), nnx.Linear(
            4, 1, rngs=rngs
        )

    ours, theirs = form(*made()), form(*made())
    grads = gt.grad(joint)(ours, x)
    wanted = nnx.grad(lambda e, d: joint(form(e, d), x), argnums=(0, 1))(
        taken(theirs, "enc"), taken(theirs, "dec")
    )
    for name, like in zip(("enc", "dec"), wanted, strict=True):
        jax.tree.map(np.testing.assert_array_equal, taken(grads, name), like)
        now, then = (nnx.state(taken(tree, name), nnx.BatchStat) for tree in (ours, theirs))
        jax.tree.map(np.testing.assert_array_equal, now, then)
    again = gt.assign_gradients(None, grads)
    jax.tree.map(np.testing.assert_array_equal, taken(again, "dec"), taken(grads, "dec"))


def test_a_frozen_module_is_a_module():
    eqx, nnx = pytest.importorskip("equinox"), pytest.importorskip("flax.nnx")
    net = eqx.nn.MLP(3, 2, 4, 1, key=jax.random.key(0))
    frozen, x = gt.frozen(net), jnp.ones(3)
    assert isinstance(frozen, eqx.Module) and frozen.module is net
    assert len(jax.tree.leaves(frozen)) == len(jax.tree.leaves(net))
    np.testing.assert_array_equal(eqx.filter_jit(frozen)(x), net(x))
    with pytest.raises(GradtoolsError, match="that G reads and does not take"):
        gt.grad(lambda f: f(x).sum())(frozen)
    layer = nnx.Linear(3, 2, rngs=nnx.Rngs(0))
    assert isinstance(gt.frozen(layer), nnx.Module)
    np.testing.assert_allclose(gt.frozen(layer)(x), layer(x))
