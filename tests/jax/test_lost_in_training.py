"""Tests reports of lost gradients in JAX training, and compares them with plain optimizer steps."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import gradtools.jax as gt
from tests.support.lost_gradients import Planted, kinds_by_leaf

eqx = pytest.importorskip("equinox")
nnx = pytest.importorskip("flax.nnx")
optax = pytest.importorskip("optax")

pytestmark = pytest.mark.jax
X = jnp.asarray(np.random.default_rng(0).normal(size=(5, 3)))
F64 = jnp.float64


@dataclass(frozen=True)
class Loop:
    """A model and its training loss: `loss(model)` is differentiated.

    tx: The optax transformation of the plain training steps.
    given: The optimizer that is passed to why_zero; defaults to tx.
    """

    model: Any
    loss: Any
    tx: Any = None
    given: Any = None

    @property
    def optimizer(self):
        return self.tx if self.given is None else self.given

    @property
    def closure(self):
        loss, model = self.loss, self.model
        return lambda: loss(model)


# --- models ------------------------------------------------------------------------------


class Graph(nnx.Module):
    def __init__(self):
        rngs = nnx.Rngs(0)
        self.body = nnx.Linear(3, 4, rngs=rngs, param_dtype=F64)
        self.head = nnx.Linear(4, 2, rngs=rngs, param_dtype=F64)

    def __call__(self, x):
        return self.head(jnp.tanh(self.body(x)))


class Spare(Graph):
    def __init__(self):
        super().__init__()
        self.spare = nnx.Linear(2, 2, rngs=nnx.Rngs(1), param_dtype=F64)


class Stopped(Graph):
    def __call__(self, x):
        return self.head(jax.lax.stop_gradient(jnp.tanh(self.body(x))))


class Noisy(Graph):
    """A model with batch norm and dropout, whose state changes with each call."""

    def __init__(self):
        super().__init__()
        self.norm = nnx.BatchNorm(4, rngs=nnx.Rngs(2), param_dtype=F64, dtype=F64)
        self.drop = nnx.Dropout(0.5, rngs=nnx.Rngs(3))

    def __call__(self, x):
        return self.head(self.drop(jax.lax.stop_gradient(self.norm(self.body(x)))))


class Table(Graph):
    def __init__(self):
        super().__init__()
        self.scale = nnx.Variable(jnp.ones(3))

    def __call__(self, x):
        return super().__call__(x * self.scale[...])


class Tree(eqx.Module):
    body: Any
    head: Any
    act: Any

    def __init__(self):
        keys = jax.random.split(jax.random.key(0))
        self.body = eqx.nn.Linear(3, 4, key=keys[0], dtype=F64)
        self.head = eqx.nn.Linear(4, 2, key=keys[1], dtype=F64)
        self.act = jnp.tanh

    def __call__(self, x):
        return self.head(self.act(self.body(x)))


class Gated(Tree):
    gate: Any

    def __init__(self):
        super().__init__()
        self.gate = jnp.ones(3)

    def __call__(self, x):
        return super().__call__(x * (self.gate > 0))


class Rounded(Gated):
    def __call__(self, x):
        return Tree.__call__(self, x * jnp.round(self.gate))


def of_graph(model, tx=None, optimizer=None):
    return Loop(model, lambda m: (m(X) ** 2).mean(), tx, optimizer)


def of_tree(model, tx=None, optimizer=None):
    return Loop(model, lambda m: (jax.vmap(m)(X) ** 2).mean(), tx, optimizer)


def plain():
    params = {"a": {"w": jnp.ones((3, 2)), "b": jnp.zeros(2)}, "log_t": jnp.asarray(0.5)}
    loss = lambda p: ((X @ p["a"]["w"] + 1) ** 2).mean() * jnp.exp(p["log_t"])
    return Loop(params, loss, optax.sgd(0.1))


def part(model):
    return eqx.filter(model, eqx.is_inexact_array)


def labels(model, frozen):
    every = jax.tree.map(lambda _: "train", part(model))
    return eqx.tree_at(lambda m: [m.body.weight], every, [frozen])


def labelled():
    model = Tree()
    txs = {"train": optax.sgd(0.1), "freeze": optax.set_to_zero()}
    return of_tree(model, optax.multi_transform(txs, lambda _: labels(model, "freeze")))


def masked():
    model = Tree()
    mask = lambda _: jax.tree.map(lambda s: s == "train", labels(model, "no"))
    return of_tree(model, optax.masked(optax.sgd(0.1), mask))


def masked_adam():
    model = Tree()
    mask = lambda _: jax.tree.map(lambda s: s == "train", labels(model, "no"))
    zero = lambda _: jax.tree.map(lambda s: s == "no", labels(model, "no"))
    tx = optax.chain(optax.masked(optax.adam(0.1), mask), optax.masked(optax.set_to_zero(), zero))
    return of_tree(model, tx)


def filtered_optimizer():
    model = Graph()
    only = nnx.All(nnx.Param, nnx.PathContains("head"))
    return of_graph(model, None, nnx.Optimizer(model, optax.adam(0.1), wrt=only))


def filtered_optimizer_of_nothing():
    model = Graph()
    only = nnx.All(nnx.Param, nnx.PathContains("heads"))  # a typo
    return of_graph(model, None, nnx.Optimizer(model, optax.adam(0.1), wrt=only))


NAMES = ("kernel", "bias")


def nothing(kind):
    return {f"body.{name}": kind for name in NAMES}


PLANTED = {
    "nnx: a layer that is not used": Planted(
        lambda: of_graph(Spare(), optax.sgd(0.1)),
        {"spare.kernel": "unread", "spare.bias": "unread"},
    ),
    "nnx: stopped features": Planted(lambda: of_graph(Stopped()), nothing("detached")),
    "nnx: stopped, and a call changes the model": Planted(
        lambda: of_graph(Noisy()),
        {**nothing("detached"), "norm.scale": "detached", "norm.bias": "detached"},
    ),
    "nnx: a variable that is not a parameter": Planted(
        lambda: of_graph(Table(), optax.sgd(0.1)), {}
    ),
    "nnx: an optimizer whose filter omits a parameter": Planted(
        filtered_optimizer, nothing("not_optimized"), oracle=False
    ),
    "equinox: a gate by comparison": Planted(
        lambda: of_tree(Gated(), optax.sgd(0.1)), {"gate": "discrete"}
    ),
    "equinox: a gate that is rounded": Planted(
        lambda: of_tree(Rounded(), optax.sgd(0.1)), {"gate": "zero_derivative"}
    ),
    "equinox: a label for frozen parameters": Planted(labelled, {"body.weight": "not_optimized"}),
    "equinox: a mask that passes gradients through": Planted(
        masked, {"body.weight": "raw_update"}, oracle=False
    ),
    "nnx: an optimizer whose filter contains no parameter": Planted(
        filtered_optimizer_of_nothing,
        {f"{layer}.{name}": "not_optimized" for layer in ("body", "head") for name in NAMES},
        oracle=False,
    ),
    "equinox: a mask of zero updates": Planted(masked_adam, {"body.weight": "not_optimized"}),
    "a dict with an entry that is not used": Planted(plain, {"a.b": "unread"}),
}


def still(loop, steps):
    """Return the names of the parameters that plain training steps with optax do not change."""
    tx = loop.tx or optax.sgd(0.1)
    if isinstance(loop.model, nnx.Module):
        graph, params, rest = nnx.split(loop.model, nnx.Param, ...)
        f = lambda p: loop.loss(nnx.merge(graph, p, rest, copy=True))
        params = nnx.to_pure_dict(params)
        merged = lambda p: f(_state_like(loop.model, p))
    else:
        params, static = eqx.partition(loop.model, eqx.is_inexact_array)
        merged = lambda p: loop.loss(eqx.combine(p, static))
    state, now = tx.init(params), params
    for _ in range(steps):
        updates, state = tx.update(jax.grad(merged)(now), state, now)
        now = optax.apply_updates(now, updates)
    pairs = zip(jax.tree.leaves_with_path(params), jax.tree.leaves_with_path(now), strict=True)
    name = lambda path: jax.tree_util.keystr(path, simple=True, separator=".")
    return {name(path) for (path, a), (_, b) in pairs if bool((a == b).all())}


def _state_like(model, pure):
    state = nnx.state(model, nnx.Param)
    state = jax.tree.map(lambda x: x, state)
    nnx.replace_by_pure_dict(state, pure)
    return state


@pytest.mark.quick_at(
    "equinox: a label for frozen parameters",
    "equinox: a mask that passes gradients through",
)
@pytest.mark.sampled(slow=1)
@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_loss_is_found_and_nothing_else(name):
    PLANTED[name].check(gt, still)


# --- optimizers of the parameters a and b ------------------------------------------------


def by_label(a, b, train=None, freeze=None):
    transforms = {"train": train or optax.sgd(0.1), "freeze": freeze or optax.set_to_zero()}
    return optax.multi_transform(transforms, {"a": a, "b": b})


def by_mask(tx, a, b):
    return optax.masked(tx, {"a": a, "b": b})


def warmup():
    return optax.linear_schedule(0.0, 0.1, 10)


# Each value contains a function that returns an optimizer, and the findings for a and for b.
OPTIMIZERS = {
    "all labels frozen": (lambda: by_label("freeze", "freeze"), "not_optimized", "not_optimized"),
    "all labels frozen, adam": (
        lambda: by_label("freeze", "freeze", optax.adam(0.1)),
        "not_optimized",
        "not_optimized",
    ),
    "one label frozen": (lambda: by_label("train", "freeze"), None, "not_optimized"),
    "one label frozen, and a warmup from zero": (
        lambda: by_label("train", "freeze", optax.sgd(warmup())),
        None,
        "not_optimized",
    ),
    "a label with a warmup from zero": (
        lambda: by_label("train", "freeze", freeze=optax.sgd(warmup())),
        None,
        None,
    ),
    "a warmup from zero": (lambda: optax.adamw(warmup()), None, None),
    "accumulated gradients": (lambda: optax.MultiSteps(optax.adam(0.1), 8), None, None),
    "a learning rate of zero": (lambda: optax.adam(0.0), "not_optimized", "not_optimized"),
    "a mask": (lambda: by_mask(optax.adam(0.1), True, False), None, "raw_update"),
    "a mask without a parameter": (
        lambda: by_mask(optax.sgd(0.1), False, False),
        "raw_update",
        "raw_update",
    ),
    "a mask after clipping": (
        lambda: optax.chain(optax.clip_by_global_norm(0.1), by_mask(optax.sgd(0.1), True, False)),
        None,
        "raw_update",
    ),
    "a label of the identity": (
        lambda: by_label("train", "freeze", freeze=optax.identity()),
        None,
        "raw_update",
    ),
    "a mask and its inverse": (
        lambda: optax.chain(
            by_mask(optax.sgd(0.1), True, False), by_mask(optax.set_to_zero(), False, True)
        ),
        None,
        "not_optimized",
    ),
    "a mask of weight decay": (
        lambda: optax.chain(by_mask(optax.add_decayed_weights(0.1), True, False), optax.sgd(0.1)),
        None,
        None,
    ),
    "ascent": (lambda: by_label("train", "freeze", freeze=optax.sgd(-0.1)), None, None),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_parameters_are_reported_by_the_updates_of_the_optimizer(name):
    make, *expected = OPTIMIZERS[name]
    params = {"a": jnp.ones(2), "b": jnp.ones(2)}
    loss = lambda p: (p["a"] * p["b"]).sum()
    report = gt.why_zero(loss, params, optimizer=make())
    kinds = kinds_by_leaf(report)
    assert [kinds.pop(leaf, None) for leaf in ("a", "b")] == expected and not kinds
    tx, moves = make(), {"a": [], "b": []}
    state, grads = tx.init(params), jax.grad(loss)(params)
    for _ in range(8):
        updates, state = tx.update(grads, state, params)
        for leaf, u in updates.items():
            moves[leaf].append(u[0].item())
    for leaf, kind in zip("ab", expected, strict=True):
        assert any(moves[leaf]) == (kind != "not_optimized")
        assert (moves[leaf][0] > 0 and name != "ascent") == (kind == "raw_update")


def test_a_mask_is_told_to_add_the_gradient_to_the_parameter():
    loss = lambda p: (p["a"] * p["b"]).sum()
    params = {"a": jnp.ones(2), "b": jnp.ones(2)}
    text = str(gt.why_zero(loss, params, optimizer=by_mask(optax.sgd(0.1), True, False)))
    assert text.startswith("b moves in the direction of its gradient:")
    assert "optax.apply_updates then adds the gradient to the parameter" in text
    assert "optax.set_to_zero()" in text


@pytest.mark.slow
@pytest.mark.parametrize("name", ["sgd", "lbfgs", "polyak_sgd"])
def test_an_optimizer_that_needs_the_value_is_evaluated(name):
    optimizer = {"sgd": lambda: optax.sgd(0.1)}.get(name, getattr(optax, name))()
    loss = lambda w: jnp.sum(w["used"] ** 2) + jnp.sum(jnp.round(w["rounded"]))
    params = {"used": jnp.ones(3), "rounded": jnp.ones(2)}
    report = gt.why_zero(loss, params, optimizer=optimizer)
    assert [(f.argument, f.kind) for f in report] == [("rounded", "zero_derivative")]
    assert gt.why_zero(jnp.sum, jnp.ones(3), optimizer=optimizer).arguments == ("model",)


@pytest.mark.slow
def test_in_the_midst_of_a_loop_nothing_is_changed():
    def train(ask):
        net = Graph()
        net.norm = nnx.BatchNorm(4, rngs=nnx.Rngs(2), param_dtype=F64)
        net.drop = nnx.Dropout(0.5, rngs=nnx.Rngs(3))
        run = lambda net, x: net.head(net.drop(net.norm(net.body(x))))
        optimizer = nnx.Optimizer(net, optax.adam(0.1), wrt=nnx.Param)
        for x in (X[:3], X[3:]):
            loss = lambda net, x=x: (run(net, x) ** 2).mean()
            if ask:
                assert not kinds_by_leaf(
                    gt.why_zero(lambda: loss(net), model=net, optimizer=optimizer)
                )
            optimizer.update(net, nnx.grad(loss)(net))
        return nnx.state(net, nnx.Any(nnx.Param, nnx.BatchStat, nnx.RngCount))

    plain, asked = train(False), train(True)
    assert all(map(np.array_equal, jax.tree.leaves(plain), jax.tree.leaves(asked)))


def test_another_copy_of_the_model_is_named():
    net, other = (eqx.nn.Linear(3, 2, key=jax.random.key(k)) for k in (0, 1))
    report = gt.why_zero(lambda: net(X[0]).sum(), model=other)
    assert {(f.kind, f.operation) for f in report} == {("unread", "other arrays")}
    assert "it reads other arrays of the same shapes." in str(report)
    assert not gt.why_zero(lambda: (net(X[0]) + other(X[0])).sum(), model=other)
    report = gt.why_zero(lambda: net(X[0]).sum(), model=eqx.nn.Linear(5, 4, key=jax.random.key(0)))
    assert {(f.kind, f.operation) for f in report} == {("unread", "argument")}


@pytest.mark.parametrize("is_stopped", [False, True])
def test_a_model_that_a_jitted_function_captures_is_found(is_stopped):
    stop = jax.lax.stop_gradient if is_stopped else lambda y: y
    params = {"w": jnp.ones((3, 2)), "b": jnp.ones(2)}
    inner = jax.jit(lambda x: stop(x @ params["w"]))
    forward = jax.jit(lambda x: inner(x) + params["b"])
    report = gt.why_zero(lambda: (forward(X) ** 2).sum(), model=params)
    assert kinds_by_leaf(report) == ({"w": "detached"} if is_stopped else {})
    assert all(f.source.text.startswith("inner =") for f in report)
