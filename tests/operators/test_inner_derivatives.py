"""An outer derivative is zero if the inner derivative is constant or its gradient is stopped."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from gradtools.errors import DisconnectedInputWarning
from tests.support.numpy_trees import close, lift, lower

X = np.array(1.2)
Z = np.array(1.5)


@dataclass(frozen=True)
class Inner:
    """A function that computes an inner derivative; `slope` is None if no gradient propagates."""

    name: str
    f: Callable[[Any, Any, Any], Any]
    slope: float | None

    def __str__(self) -> str:
        return self.name


def _z(gt: Any) -> Any:
    return gt.asarray(Z)


def _stopped(gt: Any, f: Any) -> Any:
    return lambda x: gt.stop_gradient(gt.grad(f)(x))


def _penalty(gt: Any, y: Any, z: Any) -> Any:
    return gt.xp.sin(y * z**2)


def _two_step(gt: Any, y: Any, cut: bool) -> Any:
    dz = gt.grad(lambda z: _penalty(gt, y, z))(_z(gt))
    return 2.0 * (gt.stop_gradient(dz) if cut else dz)


def _pulled(gt: Any, y: Any) -> Any:
    pullback = gt.vjp(lambda z: _penalty(gt, y, z), _z(gt))[1]
    return gt.stop_gradient(pullback(_z(gt))[0])


def _mixed(y: float, z: float) -> float:
    """Return d^2/dydz sin(y z^2)."""
    return 2 * z * np.cos(y * z**2) - 2 * y * z**3 * np.sin(y * z**2)


DERIVATIVES = {  # derivative operators for a scalar f at a scalar x
    "jacobian": lambda gt, f, x: gt.jacobian(f)(x),
    "jacobian, reverse": lambda gt, f, x: gt.jacobian(f, mode="reverse")(x),
    "jacobian, forward": lambda gt, f, x: gt.jacobian(f, mode="forward")(x),
    "hessian": lambda gt, f, x: gt.hessian(lambda z: f(z) * z)(x),
    "per_example_grad": lambda gt, f, x: gt.xp.sum(
        gt.per_example_grad(lambda w, z: f(w) * z)(x, gt.xp.ones_like(gt.xp.stack([x, x])))
    ),
}

INNER = (
    *[
        Inner(f"{name} of 3 z", lambda gt, x, xp, d=d: d(gt, lambda z: 3 * z, x), 0.0)
        for name, d in DERIVATIVES.items()
    ],
    *[
        Inner(
            f"{name} of exp, stopped",
            lambda gt, x, xp, d=d: gt.stop_gradient(d(gt, xp.exp, x)),
            None,
        )
        for name, d in DERIVATIVES.items()
    ],
    Inner("of a linear function", lambda gt, x, xp: gt.grad(lambda z: 3 * z)(x), 0.0),
    Inner("of the identity", lambda gt, x, xp: gt.grad(lambda z: z)(x), 0.0),
    Inner("of a square", lambda gt, x, xp: gt.grad(lambda z: z**2)(x), 2.0),
    Inner("second, of a square", lambda gt, x, xp: gt.grad(gt.grad(lambda z: z**2))(x), 0.0),
    Inner("of where", lambda gt, x, xp: gt.grad(lambda z: xp.where(z > 0, z, 0 * z))(x), 0.0),
    Inner("of z times stopped z", lambda gt, x, xp: gt.grad(lambda z: z * _s(gt, z))(x), 0.0),
    Inner("two-step", lambda gt, y, xp: _two_step(gt, y, False), 2 * _mixed(1.2, 1.5)),
    Inner(
        "two-step, separable",
        lambda gt, y, xp: gt.grad(lambda z: y + z**2)(_z(gt)),
        0.0,
    ),
    Inner(
        "stopped, with a second path", lambda gt, x, xp: x * _stopped(gt, lambda z: z**2)(x), 2.4
    ),
    Inner("hessian of a square", lambda gt, x, xp: gt.hessian(lambda z: z**2)(x), 0.0),
    Inner(
        "jvp of a linear function", lambda gt, x, xp: gt.jvp(lambda z: 3 * z, (x,), (x,))[1], 3.0
    ),
    Inner("stopped", lambda gt, x, xp: _stopped(gt, lambda z: z**2)(x), None),
    Inner("two-step, stopped", lambda gt, y, xp: _two_step(gt, y, True), None),
    Inner("two-step by a pullback, stopped", lambda gt, y, xp: _pulled(gt, y), None),
    Inner(
        "a jvp, stopped",
        lambda gt, x, xp: gt.stop_gradient(gt.jvp(lambda z: z**3, (x,), (x * 0 + 1,))[1]),
        None,
    ),
)
HONEST = [p for p in INNER if p.slope is not None]
CUT = [p for p in INNER if p.slope is None]


def _s(gt: Any, x: Any) -> Any:
    return gt.stop_gradient(x)


def _f(gt: Any, inner: Inner) -> Any:
    return lambda x: inner.f(gt, x, gt.xp)


def _ways(gt: Any, f: Any, x: Any) -> dict[str, Callable[[], Any]]:
    return {
        "grad": lambda: gt.grad(f)(x),
        "strict": lambda: gt.grad(f, disconnected_inputs="strict")(x),
        "value_and_grad": lambda: gt.value_and_grad(f)(x)[1],
        "vjp": lambda: gt.vjp(f, x)[1](x * 0 + 1)[0],
        "jvp": lambda: gt.jvp(f, (x,), (x * 0 + 1,))[1],
        "linearize": lambda: gt.linearize(f, x)[1](x * 0 + 1),
        "jacobian reverse": lambda: gt.jacobian(f, mode="reverse")(x),
        "jacobian forward": lambda: gt.jacobian(f, mode="forward")(x),
    }


_WARNS = ("grad", "strict", "value_and_grad")


@pytest.mark.quick_at("torch", "of z times stopped z", "two-step, separable")
@pytest.mark.filterwarnings("ignore::gradtools.errors.DisconnectedInputWarning")
@pytest.mark.parametrize("inner", HONEST, ids=str)
def test_an_inner_derivative_has_its_own_derivative_in_every_operator(gt, backend_name, inner):
    x = lift(backend_name, X)
    for name, way in _ways(gt, _f(gt, inner), x).items():
        close(_number(way()), inner.slope, 1e-12), name


@pytest.mark.slow_at("jax")
@pytest.mark.parametrize("inner", CUT, ids=str)
def test_what_is_cut_after_an_inner_derivative_is_zero_in_every_operator(gt, backend_name, inner):
    x = lift(backend_name, X)
    f = _f(gt, inner)
    ways = _ways(gt, f, x)
    ways["hvp"] = lambda: gt.hvp(f, (x,), (x,))[0][0]
    ways["hessian"] = lambda: gt.hessian(f)(x)
    for name, way in ways.items():
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always", DisconnectedInputWarning)
            assert _number(way()) == 0, name
        texts = [str(w.message) for w in caught if w.category is DisconnectedInputWarning]
        assert len(texts) == (name in _WARNS), name
        assert all("argument 0 does not reach" in text for text in texts)


@pytest.mark.filterwarnings("ignore::gradtools.errors.DisconnectedInputWarning")
@pytest.mark.parametrize("inner", INNER, ids=str)
def test_it_is_the_same_under_vmap(gt, backend_name, inner):
    xs = lift(backend_name, np.stack([X, X]))
    slope = 0.0 if inner.slope is None else inner.slope
    close(lower(gt.vmap(gt.grad(_f(gt, inner)))(xs)), np.full(2, slope), 1e-12)


INNER_OF_A_TREE = {
    "grad": lambda gt, cube, x: gt.grad(cube)(x),
    "vjp": lambda gt, cube, x: gt.vjp(cube, x)[1](x["a"] * 0 + 1)[0],
    "hvp": lambda gt, cube, x: gt.hvp(cube, (x,), (x,))[0][0],
    "linearize": lambda gt, cube, x: gt.linearize(lambda x: x, x)[1](gt.grad(cube)(x)),
}


@pytest.mark.parametrize("name", INNER_OF_A_TREE)
def test_a_part_of_an_inner_derivative_that_f_leaves_unused_is_no_cut(gt, backend_name, name):
    x = lift(backend_name, {"a": np.array(1.2), "u": np.array(1.5)})
    v = lift(backend_name, {"a": np.array(0.5), "u": np.array(2.0)})
    cube = lambda x: x["a"] ** 3 + x["u"] ** 3
    part = lambda x: INNER_OF_A_TREE[name](gt, cube, x)["a"]  # The derivative is 3 a^2.
    gradient, product = (t[0] for t in gt.hvp(part, (x,), (v,)))
    for row in (gradient, gt.jacobian(part, mode="reverse")(x), gt.vjp(part, x)[1](v["u"] / 2)[0]):
        close(_number(row["a"]), 7.2, 1e-12)
        assert _number(row["u"]) == 0
    close(_number(product["a"]), 3.0, 1e-12)
    assert _number(product["u"]) == 0


@pytest.mark.filterwarnings("ignore::gradtools.errors.DisconnectedInputWarning")
def test_no_grad_around_the_inner_derivative_is_a_cut():
    torch = pytest.importorskip("torch")
    import gradtools.torch as gt

    y = torch.tensor(1.2, dtype=torch.float64)

    def f(y: Any) -> Any:
        with torch.no_grad():
            return gt.grad(lambda z: torch.sin(y * z**2))(torch.tensor(1.5, dtype=torch.float64))

    for name, way in _ways(gt, f, y).items():
        if name not in ("jvp", "jacobian forward"):  # PyTorch's forward mode ignores no_grad
            assert float(way()) == 0, name


def test_a_jitted_inner_derivative_is_read_as_well():
    jax = pytest.importorskip("jax")
    import gradtools.jax as gt

    inner = jax.jit(gt.grad(lambda z: z**2))
    close(lower(gt.grad(inner)(lift("jax", X))), 2.0, 1e-12)
    with pytest.warns(DisconnectedInputWarning):
        gt.grad(lambda x: jax.lax.stop_gradient(inner(x)))(lift("jax", X))
    with pytest.warns(DisconnectedInputWarning):
        jax.jit(gt.grad(lambda x: jax.lax.stop_gradient(inner(x))))(lift("jax", X))


def _number(x: Any) -> float:
    return float(lower(x.detach() if hasattr(x, "detach") else x))
