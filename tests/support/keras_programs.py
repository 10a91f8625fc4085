"""Checks Keras models with make_functional on the backend that KERAS_BACKEND names.

`tests/integration/test_keras.py` runs this file as a program, because Keras has one backend per
process. The program prints the name of each check and its error, which is empty on success.
"""

from __future__ import annotations

import json
import sys
import traceback
from importlib import import_module

import keras
import numpy as np
import pytest

from gradtools import GradtoolsError

BACKEND = keras.backend.backend()
gt = import_module(f"gradtools.{BACKEND}")
X = np.random.default_rng(0).normal(size=(6, 3)).astype(np.float32)


def asarray(x):
    return gt.asarray(x)


def model(dropout=0.0):
    keras.utils.set_random_seed(0)
    parts = [keras.layers.Input((3,)), keras.layers.Dense(4, activation="tanh")]
    parts += [keras.layers.BatchNormalization(), keras.layers.Dropout(dropout)]
    return keras.Sequential([*parts, keras.layers.Dense(2)])


def numbers(arrays):
    return [gt.to_numpy(x) for x in arrays]


def listed(tree, like):
    """Return the arrays in `tree` in the key order of `like`, because JAX sorts keys."""
    return [gt.to_numpy(tree[path]) for path in like]


def same(found, wanted, tolerance=1e-5, least=1e-6):
    for a, b in zip(found, wanted, strict=True):
        np.testing.assert_allclose(a, b, rtol=tolerance, atol=least)


def theirs(net, training):
    """Return a model's value, gradients and updated state, computed without gradtools."""
    if BACKEND == "torch":
        out = (net(asarray(X), training=training) ** 2).mean()
        free = [v.value for v in net.trainable_variables]
        import torch

        grads = torch.autograd.grad(out, free)
        return out, numbers(grads), numbers([v.value for v in net.non_trainable_variables])
    import jax

    free = [v.value for v in net.trainable_variables]
    rest = [v.value for v in net.non_trainable_variables]

    def loss(free):
        out, after = net.stateless_call(free, rest, asarray(X), training=training)
        return (out**2).mean(), after

    (value, after), grads = jax.value_and_grad(loss, has_aux=True)(free)
    return value, numbers(grads), numbers(after)


def loss_of(apply, state):
    def loss(params, x=None):
        out, after = apply(params, state, asarray(X) if x is None else x)
        return (out**2).mean(), after

    return loss


def gradients_and_state_in_training():
    net = model()
    apply, params, state = gt.make_functional(net, train=True)
    (value, after), grads = gt.value_and_grad(loss_of(apply, state), has_aux=True)(params)
    before = numbers([v.value for v in net.non_trainable_variables])
    assert all(map(np.array_equal, before, numbers(state.values()))), "the model was changed"
    wanted, wanted_grads, rest = theirs(net, True)
    same([gt.to_numpy(value)], [gt.to_numpy(wanted)])
    same(listed(grads, params), wanted_grads)
    same(listed(after, state), rest)
    assert not any(getattr(x, "requires_grad", False) for x in after.values())


def evaluation_mode():
    net = model(dropout=0.5)
    apply, params, state = gt.make_functional(net, train=False)
    grads = gt.grad(loss_of(apply, state), has_aux=True)(params)[0]
    same(listed(grads, params), theirs(net, False)[1])


def a_key_says_what_is_drawn():
    apply, params, state = gt.make_functional(model(dropout=0.5), train=True)
    run = lambda key: gt.to_numpy(apply(params, state, asarray(X), key=key)[0])
    one, again, other = run(gt.random_key(1)), run(gt.random_key(1)), run(gt.random_key(2))
    assert np.array_equal(one, again) and not np.array_equal(one, other)
    _, after = apply(params, state, asarray(X), key=gt.random_key(1))
    (seed,) = [path for path in state if "seed" in path]
    assert np.array_equal(gt.to_numpy(after[seed]), gt.to_numpy(state[seed]))
    _, counted = apply(params, state, asarray(X))
    # with the PyTorch backend, Keras dropout uses PyTorch's random generator
    if BACKEND == "torch":
        return
    assert not np.array_equal(gt.to_numpy(counted[seed]), gt.to_numpy(state[seed]))


def frozen_layers_are_state():
    net = model()
    net.layers[0].trainable = False
    apply, params, state = gt.make_functional(net, train=False)
    assert not any("dense/" in path for path in params), list(params)
    grads = gt.grad(loss_of(apply, state), has_aux=True)(params)[0]
    same(listed(grads, params), theirs(net, False)[1])


def second_order():
    apply, params, state = gt.make_functional(model(), train=False)
    loss = lambda p: loss_of(apply, state)(p)[0]
    ones = {path: x * 0 + 1 for path, x in params.items()}
    _, (found,) = gt.hvp(loss, (params,), (ones,))
    h = 5e-3
    moved = lambda s: gt.grad(loss)({path: x + s for path, x in params.items()})
    up, down = listed(moved(h), params), listed(moved(-h), params)
    same(
        listed(found, params),
        [(a - b) / (2 * h) for a, b in zip(up, down, strict=True)],
        2e-2,
        5e-3,
    )


def memory_operators():
    apply, params, state = gt.make_functional(model(), train=False)
    loss = lambda p, x: (apply(p, state, x)[0] ** 2).mean()
    wanted = listed(gt.grad(loss)(params, asarray(X)), params)
    found = gt.microbatched_value_and_grad(loss, 2)(params, asarray(X))[1]
    same(listed(found, params), wanted)
    run = gt.chunked(lambda p, x: apply(p, state, x)[0], 2, in_axes=(None, 0))
    found = gt.grad(lambda p: (run(p, asarray(X)) ** 2).mean())(params)
    same(listed(found, params), wanted)
    each = gt.per_example_grad(lambda p, x: loss(p, x[None]))(params, asarray(X))
    same([g.mean(0) for g in listed(each, params)], wanted)


def a_recomputation_restores_the_statistics_and_seeds_of_layers():
    if BACKEND != "torch":  # with JAX, stateful layers are called only through make_functional
        return
    import torch

    for wrap in (gt.checkpoint, lambda f: gt.chunked(f, 3)):
        for noise in (keras.layers.Dropout(0.5, seed=3), keras.layers.GaussianNoise(0.5)):
            x = asarray(X).requires_grad_()
            y = wrap(noise)(x, training=True)
            [g] = torch.autograd.grad((y**2).sum(), x)
            drawn = 2 * y * y / x if isinstance(noise, keras.layers.Dropout) else 2 * y
            torch.testing.assert_close(g, drawn)
        norms = [keras.layers.BatchNormalization(momentum=0.5) for _ in range(2)]
        for norm, run in zip(norms, (wrap(norms[0]), norms[1]), strict=True):
            norm.build((None, 3))
            for rows in (X,) if wrap is gt.checkpoint or run is norms[0] else (X[:3], X[3:]):
                (run(asarray(rows), training=True) ** 2).sum().backward()
        same(*([v.value.detach() for v in norm.non_trainable_variables] for norm in norms))


def a_lost_layer_is_named():
    apply, params, state = gt.make_functional(model(), train=False)
    loss = lambda p: (gt.stop_gradient(apply(p, state, asarray(X))[0]) ** 2).mean()
    report = gt.why_zero(loss, params)
    assert {f.kind for f in report} == {"detached"} and len(report) == len(params)


def errors_say_what_to_do():
    asked = [
        (lambda: gt.make_functional(keras.layers.Dense(3)), "has no variables yet"),
        (lambda: gt.make_functional(model(), variables={}), "leave variables=None"),
        (lambda: _apply_with({}), "apply: params must contain the names"),
        (
            lambda: gt.grad(lambda m: m(asarray(X)).sum())(model()),
            "is a Keras model .*make_functional",
        ),
    ]
    for ask, said in asked:
        with pytest.raises(GradtoolsError, match=said):
            ask()


def fit_trains_through_an_edited_gradient():
    """With gradient reversal, the SGD step of the preceding layer is -0.1 times the plain step."""

    class Reversal(keras.layers.Layer):
        def call(self, x):
            return gt.reverse_gradient(x, 0.1)

    def moves(edit):
        x = keras.Input((3,))
        net = keras.Model(x, keras.layers.Dense(1)(edit(keras.layers.Dense(2)(x))))
        net.set_weights([np.ones(v.shape) for v in net.get_weights()])
        net.compile("sgd", "mse")
        net.fit(X, np.zeros((6, 1)), batch_size=6, verbose=0)
        return [v - 1 for v in net.get_weights()]

    found, plain = moves(Reversal()), moves(lambda x: x)
    same(found, [-0.1 * plain[0], -0.1 * plain[1], *plain[2:]], 1e-4)


def chunks_inside_fit_have_the_weights_of_a_plain_fit():
    class Towers(keras.Model):
        def __init__(self, size):
            super().__init__()
            self.tower = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)])
            self.tower.set_weights([np.ones((3, 2)), np.zeros(2)])
            self.size = size

        def build(self, shape):
            self.built = True

        def call(self, x):
            return (gt.chunked(self.tower, self.size) if self.size else self.tower)(x)

    def weights(size):
        net = Towers(size)
        net.compile("sgd", "mse")
        net.fit(X, np.zeros((6, 2)), batch_size=6, verbose=0)
        return net.get_weights()

    same(weights(2), weights(0))


def _apply_with(params):
    apply, _, state = gt.make_functional(model())
    apply(params, state, asarray(X))


PROGRAMS = [
    gradients_and_state_in_training, evaluation_mode, a_key_says_what_is_drawn,
    frozen_layers_are_state, second_order, memory_operators,
    a_recomputation_restores_the_statistics_and_seeds_of_layers, a_lost_layer_is_named,
    errors_say_what_to_do, fit_trains_through_an_edited_gradient,
    chunks_inside_fit_have_the_weights_of_a_plain_fit,
]  # fmt: skip


def main() -> None:
    found = {}
    for program in PROGRAMS:
        try:
            program()
            found[program.__name__] = ""
        except Exception:
            found[program.__name__] = traceback.format_exc()
    json.dump(found, sys.stdout)


if __name__ == "__main__":
    main()
