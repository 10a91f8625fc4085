"""Public functions and the functions that they return support pickle and deepcopy."""

from __future__ import annotations

import copy
import io
import pickle

import numpy as np
import pytest
import torch

import gradtools.jax as gj
import gradtools.torch as gt_torch
from gradtools.torch.nn import GradientReversal

X = np.array([1.0, 2.0, 3.0])
AGAIN = {"pickle": lambda x: pickle.loads(pickle.dumps(x)), "deepcopy": copy.deepcopy}


def loss(w, x):
    return (w * x * x).sum()


def rows(w, x):
    return w * x


@pytest.fixture(params=AGAIN)
def again(request):
    return AGAIN[request.param]


@pytest.fixture
def at(gt):
    """Return the arguments (w, x)."""
    return gt.asarray(np.float64(2.0)), gt.asarray(X)


# Functions returned by operators, with the expected values at (w, x).
RETURNED = {
    "grad": (lambda gt: gt.grad(loss, argnums=1), 4 * X),
    "hessian": (lambda gt: gt.hessian(loss, 1), 4 * np.eye(3)),
    "per_example_grad": (lambda gt: gt.per_example_grad(loss), X**2),
    "microbatched_value_and_grad": (
        lambda gt: gt.microbatched_value_and_grad(loss, 2, reduction="sum"),
        (28.0, 14.0),
    ),
    "chunked": (lambda gt: gt.chunked(rows, 2, in_axes={"w": None}), 2 * X),
    "frozen": (lambda gt: gt.frozen(rows), 2 * X),
    "checkpoint": (lambda gt: gt.checkpoint(rows), 2 * X),
}


def close(gt, found, wanted):
    if isinstance(wanted, tuple):
        for a, b in zip(found, wanted, strict=True):
            close(gt, a, b)
    else:
        np.testing.assert_allclose(gt.to_numpy(found), wanted, rtol=1e-12)


@pytest.mark.parametrize("name", RETURNED)
def test_what_an_operator_returns_computes_the_same_after_it(gt, again, at, name):
    make, wanted = RETURNED[name]
    found = again(make(gt))
    if wanted is not None:
        close(gt, found(*at), wanted)
    assert found.__name__ == make(gt).__name__


# --- models -------------------------------------------------------------------------------


class Adversarial(torch.nn.Module):
    """A model that stores a gradient edit as an attribute."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.linear = torch.nn.Linear(3, 2).double()
        self.reverse = gt_torch.reverse_gradient

    def forward(self, x):
        return self.reverse(self.linear(x))


MODELS = {
    "GradientReversal": lambda: torch.nn.Sequential(Adversarial(), GradientReversal(0.5)),
    "chunked": lambda: gt_torch.chunked(Adversarial(), 2),
    "checkpoint": lambda: gt_torch.checkpoint(Adversarial()),
    "frozen": lambda: gt_torch.frozen(Adversarial()),
    "make_functional": lambda: gt_torch.make_functional(Adversarial())[0],
}


def saved(model):
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize("kind", MODELS)
def test_a_torch_model_is_saved_and_loaded(kind):
    x = torch.ones(5, 3, dtype=torch.float64, requires_grad=True)
    model = MODELS[kind]()
    given = (x,)
    if kind == "make_functional":
        given = (*gt_torch.make_functional(Adversarial())[1:], x)
    for other in (saved(model), copy.deepcopy(model)):
        found, wanted = (m(*given) for m in (other, model))
        if kind == "make_functional":
            found, wanted = found[0], wanted[0]
        torch.testing.assert_close(found, wanted)
        a, b = (torch.autograd.grad(y.sum(), x)[0] for y in (found, wanted))
        torch.testing.assert_close(a, b)


def test_jax_models_are_pickled():
    eqx, nnx = pytest.importorskip("equinox"), pytest.importorskip("flax.nnx")
    import jax

    x = jax.numpy.ones((5, 3))
    linear = nnx.Linear(3, 2, rngs=nnx.Rngs(0))
    for model in (linear, gj.chunked(linear, 2)):
        np.testing.assert_allclose(AGAIN["pickle"](model)(x), linear(x), rtol=1e-6)
    tree = eqx.nn.Linear(3, 2, key=jax.random.key(0))
    applies = gj.make_functional(linear), gj.make_functional(tree)
    for (apply, params, state), given in zip(applies, (x, x[0]), strict=True):
        other = AGAIN["pickle"](apply)
        np.testing.assert_allclose(other(params, state, given)[0], apply(params, state, given)[0])
