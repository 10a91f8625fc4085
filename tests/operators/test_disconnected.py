"""Tests warnings and errors for arguments that are not connected to the output."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from gradtools.errors import DisconnectedInputError, DisconnectedInputWarning, GradtoolsWarning
from tests.support.numpy_trees import close, lift, lower

X = np.array([0.7, -1.3, 2.0])


@dataclass(frozen=True)
class Path:
    """A scalar function of x, and whether its value is connected to x."""

    name: str
    f: Callable[[Any, Any], Any]
    connected: bool

    def __str__(self) -> str:
        return self.name


def _cast(gt: Any, x: Any) -> Any:
    whole = gt.xp.astype(x, gt.xp.int64)
    return gt.xp.sum(gt.xp.astype(whole, gt.xp.float64))


def _loop(gt: Any, x: Any, stop: bool) -> Any:
    total = gt.asarray(np.array(1.0))
    for k in range(3):
        total = total * 0.5 + gt.xp.sum(gt.stop_gradient(x) if stop else x * k)
    return total


PATHS = (
    Path("plain use", lambda gt, x: gt.xp.sum(x * x), True),
    Path("times zero", lambda gt, x: gt.xp.sum(0.0 * x), True),
    Path("rounded", lambda gt, x: gt.xp.sum(gt.xp.round(x)), True),
    Path("picked by where", lambda gt, x: gt.xp.sum(gt.xp.where(x > 0, x, x * x)), True),
    Path("in one branch of where", lambda gt, x: gt.xp.sum(gt.xp.where(x > 9, x, 1.0)), True),
    Path("the largest", lambda gt, x: gt.xp.max(x), True),
    Path("in a loop", lambda gt, x: _loop(gt, x, False), True),
    Path("stopped, with a second path", lambda gt, x: gt.xp.sum(gt.stop_gradient(x) * x), True),
    Path("clipped and saturated", lambda gt, x: gt.xp.sum(gt.xp.clip(x, 5.0, 6.0)), True),
    Path("reversed at scale zero", lambda gt, x: gt.xp.sum(gt.reverse_gradient(x, 0.0)), True),
    Path("unused", lambda gt, x: gt.asarray(np.array(1.0)) * 2, False),
    Path("stopped", lambda gt, x: gt.xp.sum(gt.stop_gradient(x) ** 2), False),
    Path("stopped in a loop", lambda gt, x: _loop(gt, x, True), False),
    Path("cast to an integer", _cast, False),
    Path("compared", lambda gt, x: gt.xp.sum(gt.xp.astype(x > 0, gt.xp.float64)), False),
    Path("argmax", lambda gt, x: gt.xp.astype(gt.xp.argmax(x), gt.xp.float64), False),
    Path("only the shape is used", lambda gt, x: gt.xp.sum(gt.xp.ones_like(x)), False),
)
CONNECTED = [p for p in PATHS if p.connected]
LOST = [p for p in PATHS if not p.connected]


def _f(gt: Any, path: Path) -> Any:
    return lambda x: path.f(gt, x)


@pytest.mark.sweep_at(("jax", "plain use", "raise"))
@pytest.mark.parametrize("policy", ["raise", "warn", "zeros", "strict"])
@pytest.mark.parametrize("path", CONNECTED, ids=str)
def test_what_is_connected_passes_every_policy(gt, backend_name, path, policy):
    g = gt.grad(_f(gt, path), disconnected_inputs=policy)(lift(backend_name, X))
    assert lower(g).shape == X.shape


@pytest.mark.parametrize("policy", ["raise", "strict"])
@pytest.mark.parametrize("path", LOST, ids=str)
def test_what_is_cut_raises_and_names_the_argument(gt, backend_name, path, policy):
    with pytest.raises(DisconnectedInputError, match=r"^grad: argument 0 does not reach"):
        gt.grad(_f(gt, path), disconnected_inputs=policy)(lift(backend_name, X))


@pytest.mark.parametrize("path", LOST, ids=str)
def test_what_is_cut_warns_once_and_gives_zeros(gt, backend_name, path):
    with pytest.warns(GradtoolsWarning, match="argument 0 does not reach") as caught:
        value, g = gt.value_and_grad(_f(gt, path), disconnected_inputs="warn")(
            lift(backend_name, X)
        )
    assert len(caught) == 1
    close(lower(g), np.zeros(3), 0)
    close(lower(value), lower(path.f(gt, lift(backend_name, X))), 1e-15)


@pytest.mark.sampled(torch=(22, 22), jax=(4, 17))
@pytest.mark.parametrize("path", PATHS, ids=str)
def test_every_other_derivative_gives_zeros(gt, backend_name, path):
    f, x = _f(gt, path), lift(backend_name, X)
    found = {
        "vjp": gt.vjp(f, x)[1](1.0)[0],
        "jacobian": gt.jacobian(f, mode="reverse")(x),
        "forward jacobian": gt.jacobian(f, mode="forward")(x),
        "jvp": gt.jvp(f, (x,), (x,))[1],
        "linearize": gt.linearize(f, x)[1](x),
        "hvp": gt.hvp(f, (x,), (x,))[1][0],
        "hessian": gt.hessian(f)(x),
    }
    for name, value in found.items():
        assert np.isfinite(lower(value)).all(), name
        if not path.connected:
            assert not lower(value).any(), name


# --- arguments and leaves ----------------------------------------------------------------


def test_an_argument_with_one_connected_leaf_is_connected(gt, backend_name):
    p = lift(backend_name, {"used": X, "spare": X})
    g = gt.grad(lambda p: gt.xp.sum(p["used"] ** 2))(p)
    close(lower(g), {"used": 2 * X, "spare": 0 * X}, 1e-15)


def test_strict_names_the_leaf_that_is_lost(gt, backend_name):
    p = lift(backend_name, {"used": X, "spare": [X, X]})
    f = lambda p: gt.xp.sum(p["used"] * p["spare"][0])
    with pytest.raises(DisconnectedInputError, match=r"argument 0\['spare'\]\[1\] does not reach"):
        gt.grad(f, disconnected_inputs="strict")(p)


def test_every_lost_argument_is_named_and_no_other(gt, backend_name):
    x = lift(backend_name, X)
    with pytest.raises(DisconnectedInputError, match=r"^grad: argument 0, argument 2 do not"):
        gt.grad(lambda a, b, c: gt.xp.sum(b), argnums=(0, 1, 2))(x, x, x)


def test_aux_does_not_connect(gt, backend_name):
    x = lift(backend_name, X)
    with pytest.raises(DisconnectedInputError):
        gt.grad(lambda x: (gt.asarray(np.array(1.0)) * 2, x * x), has_aux=True)(x)


@pytest.mark.parametrize("operator", ["per_example_grad", "minimax_value_and_grad"])
def test_per_example_grad_and_minimax_raise_too(gt, backend_name, operator):
    x = lift(backend_name, X)
    run = {
        "per_example_grad": gt.per_example_grad(lambda w, x: x * x),
        "minimax_value_and_grad": gt.minimax_value_and_grad(lambda x, y: gt.xp.sum(y), 0, 1),
    }[operator]
    with pytest.raises(DisconnectedInputError, match=rf"^{operator}: argument 0 does not reach"):
        run(x, x)


# --- nested ------------------------------------------------------------------------------


def test_a_derivative_of_a_linear_functions_derivative_is_an_honest_zero(gt, backend_name):
    x = lift(backend_name, X)
    with pytest.warns(DisconnectedInputWarning, match="argument 0"):
        g = gt.grad(lambda x: gt.xp.sum(gt.grad(lambda x: gt.xp.sum(3.0 * x))(x)))(x)
    close(lower(g), np.zeros(3), 0)


def test_the_inner_derivative_still_raises(gt, backend_name):
    x = lift(backend_name, X)
    inner = gt.grad(lambda y: gt.xp.sum(gt.stop_gradient(y)))
    with pytest.raises(DisconnectedInputError):
        gt.grad(lambda x: gt.xp.sum(inner(x) * x))(x)


# --- transforms --------------------------------------------------------------------------


@pytest.mark.slow_at(("jax", "cast to an integer"))
@pytest.mark.parametrize("path", LOST, ids=str)
def test_what_is_cut_raises_under_vmap(gt, backend_name, path):
    xs = lift(backend_name, np.stack([X, X + 1]))
    with pytest.raises(DisconnectedInputError):
        gt.vmap(gt.grad(_f(gt, path)))(xs)
    both = gt.grad(lambda x, y: (x**2).sum() + _f(gt, path)(y), (0, 1))
    with pytest.raises(DisconnectedInputError, match="argument 1"):
        gt.vmap(both)(xs, xs)
