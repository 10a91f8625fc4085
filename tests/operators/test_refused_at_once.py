"""Operators that return a function raise an error if they get f's arguments as options."""

from __future__ import annotations

import numpy as np
import pytest

from gradtools import GradtoolsError


def module_of(gt):
    if gt.__name__.endswith("torch"):
        return pytest.importorskip("torch").nn.Linear(3, 1)
    return pytest.importorskip("equinox").nn.Linear(3, 1, key=gt.random_key(0))


DATA = {
    "an array": lambda gt, x: x,
    "a NumPy array": lambda gt, x: np.ones((4, 3)),
    "a scalar": lambda gt, x: x.sum(),
    "a dict": lambda gt, x: {"w": x},
    "a list": lambda gt, x: [x],
    "a module": lambda gt, x: module_of(gt),
}


def f(w, x):
    return (w * x).sum()


# PLACES contains the option to which the array is passed by mistake, and the call.
PLACES = {
    "vmap": ("in_axes", lambda gt, x: gt.vmap(f, x)),
    "vmap of two arguments": ("in_axes", lambda gt, x: gt.vmap(f, (x, x))),
    "vmap after in_axes": ("out_axes", lambda gt, x: gt.vmap(f, 0, x)),
    "minimax_value_and_grad": (
        "minimize or maximize",
        lambda gt, x: gt.minimax_value_and_grad(f, x, x),
    ),
    "grad": ("argnums", lambda gt, x: gt.grad(f, x)),
    "value_and_grad": ("argnums", lambda gt, x: gt.value_and_grad(f, x)),
    "jacobian": ("argnums", lambda gt, x: gt.jacobian(f, x)),
    "hessian": ("argnums", lambda gt, x: gt.hessian(f, x)),
    "retained_gradients": ("argnums", lambda gt, x: gt.retained_gradients(f, x)),
    "per_example_grad": ("argnums", lambda gt, x: gt.per_example_grad(f, x)),
    "per_example_grad after argnums": ("in_axes", lambda gt, x: gt.per_example_grad(f, 0, x)),
    "chunked": ("chunk_size", lambda gt, x: gt.chunked(f, x, 2)),
    "chunked after chunk_size": ("in_axes", lambda gt, x: gt.chunked(f, 2, x)),
    "chunked after in_axes": ("out_axes", lambda gt, x: gt.chunked(f, 2, 0, x)),
    "microbatched_value_and_grad": (
        "chunk_size",
        lambda gt, x: gt.microbatched_value_and_grad(f, x, 2),
    ),
    "microbatched_value_and_grad after chunk_size": (
        "argnums",
        lambda gt, x: gt.microbatched_value_and_grad(f, 2, x),
    ),
    "microbatched_value_and_grad after argnums": (
        "in_axes",
        lambda gt, x: gt.microbatched_value_and_grad(f, 2, 0, x),
    ),
}
OPTIONS = {
    "chunked": ", chunk_size",
    "microbatched_value_and_grad": ", chunk_size",
    "minimax_value_and_grad": ", minimize, maximize",
}


@pytest.mark.parametrize("data", DATA)
@pytest.mark.parametrize("place", PLACES)
def test_the_arguments_of_f_are_refused_before_the_call(gt, place, data):
    option, call = PLACES[place]
    operator = place.partition(" ")[0]
    x = DATA[data](gt, gt.asarray(np.ones((4, 3), np.float32)))
    with pytest.raises(GradtoolsError) as raised:
        call(gt, x)
    said = str(raised.value)
    assert option in said
    form = f"{operator}(f{OPTIONS.get(operator, '')})(x)"
    assert said.endswith(f" {operator} returns a function, which takes f's arguments: {form}.")
    assert len(said) < 300


def test_positions_and_axes_of_every_kind_are_accepted(gt):
    x = gt.asarray(np.float32([1.0, 2.0]))
    one = gt.asarray(np.int32(1))
    for argnums in (1, np.int64(1), one, [0, 1], (np.int32(0), one)):
        grads = gt.grad(f, argnums)(x, x)
        grad = grads[1] if isinstance(argnums, (tuple, list)) else grads
        np.testing.assert_array_equal(gt.to_numpy(grad), [1.0, 2.0])
    for axes in (0, -1, (0, 0), (0, None), {"w": 0}):
        assert gt.vmap(lambda w, x: w * x.sum(), axes)(x, x).shape == (2,)
        assert gt.chunked(lambda w, x: w * x.sum(), 1, axes)(x, x).shape == (2,)
    tree = gt.vmap(lambda p, x: p["a"][0] * x, ({"a": [0]}, None))
    assert tree({"a": [x]}, x).shape == (2, 2)


def test_a_module_of_axes_is_accepted():
    eqx, gt = pytest.importorskip("equinox"), pytest.importorskip("gradtools.jax")
    layers = eqx.filter_vmap(lambda key: eqx.nn.Linear(3, 1, key=key))(
        gt.split_key(gt.random_key(0), 4)
    )
    axes = eqx.tree_at(lambda layer: (layer.weight, layer.bias), layers, (0, 0))
    ours = gt.vmap(lambda layer, x: layer(x), (axes, None))
    x = gt.asarray(np.ones(3, np.float32))
    wanted = gt.to_numpy(layers.weight).sum(2) + gt.to_numpy(layers.bias)
    np.testing.assert_allclose(gt.to_numpy(ours(layers, x)), wanted, rtol=1e-5)


@pytest.mark.parametrize("write", ["assign_gradients", "accumulate_gradients"])
def test_a_gradient_function_in_place_of_gradients_was_not_called(gt, write):
    x = gt.asarray(np.float32([1.0, 2.0]))
    if hasattr(x, "requires_grad_"):
        x.requires_grad_()
    grads = gt.grad(lambda x: (x["w"] ** 2).sum())
    for target, given, path in (
        ({"w": x}, grads, ""),
        ([x], grads, ""),
        (x, grads, ""),
        ({"w": x}, {"w": grads}, r"\['w'\]"),
    ):
        words = f"^{write}: grads{path} is a function that was not called; expected "
        with pytest.raises(GradtoolsError, match=words):
            getattr(gt, write)(target, given)
    with pytest.raises(GradtoolsError, match="grads is a function that was not called; expected"):
        gt.GradientAccumulator().add(grads)


def test_frozen_takes_a_function_or_a_module(gt):
    words = "^frozen: G must be a function or a module, got a .*For a constant array, use stop_grad"
    with pytest.raises(GradtoolsError, match=words):
        gt.frozen(gt.asarray(np.float32([1.0, 2.0])))
