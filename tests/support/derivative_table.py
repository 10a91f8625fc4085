"""Functions, written once, that every derivative operator is tried on.

A scenario is data: what to call, with which NumPy arguments, and which of them are active. What
stands here uses NumPy and the frameworks alone, never gradtools' own code: it is an oracle.

The oracle is the central difference of sixth order,

    f'(0) = sum_k c_k (f(k h) - f(-k h)) / h,    c = (3/4, -3/20, 1/60),

whose error at h = 3e-3 is near 1e-13 for functions that vary on a scale of one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

STENCIL = ((1, 3 / 4), (2, -3 / 20), (3, 1 / 60))


@dataclass(frozen=True)
class Scenario:
    """`f(gt, *args, **kwargs)`, differentiated in `active`; args are made from a generator."""

    name: str
    f: Callable[..., Any]
    args: Callable[[np.random.Generator], tuple[Any, ...]]
    active: tuple[int, ...] = (0,)
    kwargs: dict[str, Any] = field(default_factory=dict)
    compiled: bool = True  # whether it holds no branch on values

    def __str__(self) -> str:
        return self.name


# --- NumPy trees and the frameworks' plain arrays ----------------------------------------


def tree_map(fun: Callable[..., Any], tree: Any, *rest: Any) -> Any:
    if isinstance(tree, dict):
        return {k: tree_map(fun, tree[k], *(r[k] for r in rest)) for k in sorted(tree)}
    if isinstance(tree, tuple | list):
        return type(tree)(tree_map(fun, *items) for items in zip(tree, *rest, strict=True))
    return None if tree is None else fun(tree, *rest)


def leaves(tree: Any) -> list[Any]:
    """The leaves, those of a dict in the order of its keys, as in JAX."""
    if isinstance(tree, dict):
        return [leaf for k in sorted(tree) for leaf in leaves(tree[k])]
    if isinstance(tree, tuple | list):
        return [leaf for item in tree for leaf in leaves(item)]
    return [] if tree is None else [tree]


def lift(backend_name: str, tree: Any) -> Any:
    """NumPy arrays as the framework's own; other leaves as they are."""
    if backend_name == "torch":
        import torch

        make = lambda x: torch.tensor(x)
    else:
        import jax.numpy as jnp

        make = jnp.asarray
    return tree_map(lambda x: make(x) if isinstance(x, np.ndarray) else x, tree)


def lower(tree: Any) -> Any:
    """The framework's arrays as NumPy's."""
    return tree_map(lambda x: np.asarray(_plain(x)), tree)


def _plain(x: Any) -> Any:
    return x.detach().resolve_conj().resolve_neg() if hasattr(x, "detach") else x


def dot(u: Any, v: Any) -> float:
    """Re<u, v> over all leaves."""
    pairs = zip(leaves(u), leaves(v), strict=True)
    return float(sum(np.real(np.vdot(a, b)) for a, b in pairs))


def draw_like(tree: Any, rng: np.random.Generator) -> Any:
    def one(x: Any) -> Any:
        if np.iscomplexobj(x):
            return rng.normal(size=x.shape) + 1j * rng.normal(size=x.shape)
        return np.asarray(rng.normal(size=np.shape(x)))

    return tree_map(one, tree)


def moved(tree: Any, step: float, direction: Any) -> Any:
    return tree_map(lambda x, d: x + step * d, tree, direction)


def slope(at: Callable[[float], Any], h: float = 3e-3) -> Any:
    """The derivative of a tree-valued function of one number at 0."""
    total: Any = None
    for k, c in STENCIL:
        part = tree_map(lambda a, b, c=c: c * (a - b) / h, at(k * h), at(-k * h))
        total = part if total is None else tree_map(np.add, total, part)
    return total


# --- the table ---------------------------------------------------------------------------


def _normal(*shape: int) -> Callable[[np.random.Generator], np.ndarray]:
    return lambda rng: np.asarray(rng.normal(size=shape))


def _complex(*shape: int) -> Callable[[np.random.Generator], np.ndarray]:
    return lambda rng: np.asarray(rng.normal(size=shape) + 1j * rng.normal(size=shape))


def _off_zero(*shape: int) -> Callable[[np.random.Generator], np.ndarray]:
    """Numbers of both signs that no stencil carries across a kink at zero."""
    return lambda rng: rng.choice([-1.0, 1.0], size=shape) * rng.uniform(0.5, 1.5, size=shape)


def _args(*makers: Any) -> Callable[[np.random.Generator], tuple[Any, ...]]:
    return lambda rng: tuple(tree_map(lambda m: m(rng) if callable(m) else m, m) for m in makers)


def _softmax(gt: Any, x: Any) -> Any:
    e = gt.xp.exp(x - gt.xp.max(x))
    return e / gt.xp.sum(e)


def _mlp(gt: Any, p: Any, x: Any) -> Any:
    return gt.xp.tanh(x @ p["w1"] + p["b1"]) @ p["w2"]


def _loop(gt: Any, x: Any) -> Any:
    for k in range(4):
        x = gt.xp.sin(x) * 0.5 + x / (1 + k)
    return x


def _branch(gt: Any, x: Any) -> Any:
    if x[0] > 0:
        return x * x * x
    return gt.xp.exp(x)


def _covariance(gt: Any, a: Any) -> Any:
    return a @ a.T + 3.0 * gt.xp.eye(3, dtype=a.dtype)


def _labelled(gt: Any, w: Any, labels: Any) -> Any:
    picked = gt.xp.take(w, labels, axis=0)
    return gt.xp.exp(picked) * 0.5


def _holomorphic(gt: Any, z: Any) -> Any:
    return gt.xp.exp(1j * z) * z


def _not_holomorphic(gt: Any, z: Any) -> Any:
    return gt.xp.conj(z) * z * z + gt.xp.real(z)


def _complex_affine(gt: Any, w: Any, x: Any, b: Any) -> Any:
    return gt.xp.matmul(w, x) + b


def _mixed(gt: Any, p: Any) -> Any:
    xp = gt.xp
    return {"power": xp.abs(p["z"]) ** 2 * p["x"], "phase": p["z"] * xp.exp(1j * p["x"])}


SCENARIOS = (
    Scenario("cube of a number", lambda gt, x: x * x * x, _args(_normal())),
    Scenario("exp of a vector", lambda gt, x: gt.xp.exp(x), _args(_normal(3))),
    Scenario("sin times its shifted self", lambda gt, x: gt.xp.sin(x) * (x + 1), _args(_normal(4))),
    Scenario("softmax", _softmax, _args(_normal(4))),
    Scenario("power of a matrix", lambda gt, a: a @ a @ a, _args(_normal(3, 3))),
    Scenario("an empty array", lambda gt, x: gt.xp.exp(x) + x, _args(_normal(0))),
    Scenario(
        "an empty leaf beside a full one",
        lambda gt, p: gt.xp.sum(p["e"]) + gt.xp.sin(p["x"]),
        _args({"e": _normal(2, 0), "x": _normal(2)}),
    ),
    Scenario(
        "a zero-dim array in a list", lambda gt, p: [p[0] * p[1]], _args([_normal(), _normal(2)])
    ),
    Scenario(
        "a network over a pytree",
        _mlp,
        _args({"w1": _normal(2, 3), "b1": _normal(3), "w2": _normal(3, 1)}, _normal(4, 2)),
    ),
    Scenario(
        "a network in weights and data",
        _mlp,
        _args({"w1": _normal(2, 3), "b1": _normal(3), "w2": _normal(3, 1)}, _normal(2, 2)),
        active=(0, 1),
    ),
    Scenario(
        "active arguments out of order",
        lambda gt, x, y, z: gt.xp.sin(x) * y * y + z * x,
        _args(_normal(2), _normal(2), _normal(2)),
        active=(2, 0),
    ),
    Scenario(
        "a None leaf",
        lambda gt, p: gt.xp.tanh(p["a"]) + 0.0 * (p["none"] is None),
        _args({"a": _normal(2), "none": None}),
    ),
    Scenario(
        "integer labels elsewhere",
        _labelled,
        _args(_normal(3, 2), lambda rng: np.array([0, 2, 2])),
    ),
    Scenario(
        "a keyword argument",
        lambda gt, x, *, power: x**power,
        _args(_normal(3)),
        kwargs={"power": 3},
    ),
    Scenario(
        "several outputs in a tree",
        lambda gt, x: (gt.xp.sin(x), {"s": gt.xp.sum(x * x)}),
        _args(_normal(3)),
    ),
    Scenario("a loop", _loop, _args(_normal(2))),
    Scenario("a branch on values", _branch, _args(_off_zero(3)), compiled=False),
    Scenario("where", lambda gt, x: gt.xp.where(x > 0, x**3, gt.xp.exp(x)), _args(_off_zero(4))),
    Scenario(
        "a linear solve",
        lambda gt, a, b: gt.xp.linalg.solve(_covariance(gt, a), b),
        _args(_normal(3, 3), _normal(3, 1)),
        active=(0, 1),
    ),
    Scenario(
        "a log determinant",
        lambda gt, a: gt.xp.linalg.slogdet(_covariance(gt, a))[1],
        _args(_normal(3, 3)),
    ),
    Scenario(
        "a Cholesky factor",
        lambda gt, a: gt.xp.linalg.cholesky(_covariance(gt, a)),
        _args(_normal(3, 3)),
    ),
    Scenario(
        "an inverse", lambda gt, a: gt.xp.linalg.inv(_covariance(gt, a)), _args(_normal(3, 3))
    ),
    Scenario("linear: second derivative zero", lambda gt, x: 2.0 * x, _args(_normal(3))),
    Scenario(
        "reshaped and sliced",
        lambda gt, x: gt.xp.reshape(x**2, (3, 2))[1:, 0],
        _args(_normal(2, 3)),
    ),
    Scenario("holomorphic", _holomorphic, _args(_complex(3))),
    Scenario("not holomorphic", _not_holomorphic, _args(_complex(3))),
    Scenario(
        "a complex affine layer",
        _complex_affine,
        _args(_complex(2, 3), _complex(3, 2), _complex(2, 1)),
        active=(0, 1, 2),
    ),
    Scenario("real and complex leaves", _mixed, _args({"z": _complex(2), "x": _normal(2)})),
    Scenario("complex from real", lambda gt, x: gt.xp.exp(1j * x) * x, _args(_normal(3))),
)


@dataclass(frozen=True)
class Problem:
    """A scenario in one backend: `of` takes NumPy arguments, `f` the framework's."""

    scenario: Scenario
    gt: Any
    backend_name: str
    args: tuple[Any, ...]
    loss_weights: Any

    def f(self, *args: Any, **kwargs: Any) -> Any:
        return self.scenario.f(self.gt, *args, **kwargs)

    def loss(self, *args: Any, **kwargs: Any) -> Any:
        """A real scalar of f's output: sum |y|^2 / 2 + Re<w, y>."""
        xp, total = self.gt.xp, 0.0
        pairs = zip(leaves(self.f(*args, **kwargs)), self.loss_weights, strict=True)
        for y, w in pairs:
            if "complex" in str(y.dtype):
                total = total + xp.sum(xp.real(xp.conj(y) * y) / 2 + xp.real(xp.conj(w) * y))
            else:
                total = total + xp.sum(y * y / 2 + w * y)
        return total

    @property
    def primals(self) -> tuple[Any, ...]:
        """The active arguments, in NumPy."""
        return tuple(self.args[i] for i in self.scenario.active)

    def framework_args(self, primals: Any = None) -> list[Any]:
        args = list(self.args)
        if primals is not None:
            for i, p in zip(self.scenario.active, primals, strict=True):
                args[i] = p
        return [lift(self.backend_name, a) for a in args]

    def of_primals(self, which: str = "f") -> Callable[..., Any]:
        """f or the loss as a function of its active arguments alone."""
        fixed = self.framework_args()

        def call(*active: Any) -> Any:
            args = list(fixed)
            for i, a in zip(self.scenario.active, active, strict=True):
                args[i] = a
            return getattr(self, which)(*args, **self.scenario.kwargs)

        return call

    def value(self, which: str, primals: Any) -> Any:
        """f or the loss at NumPy primals, in NumPy."""
        return lower(getattr(self, which)(*self.framework_args(primals), **self.scenario.kwargs))

    def push(self, which: str, direction: Any) -> Any:
        """J t by differences."""
        return slope(lambda s: self.value(which, moved(self.primals, s, direction)))

    def second(self, u: Any, v: Any) -> float:
        """d/ds d/dt loss(x + s u + t v) by differences."""

        def inner(s: float) -> Any:
            return slope(lambda t: self.value("loss", moved(moved(self.primals, s, u), t, v)), 1e-2)

        return float(slope(inner, 1e-2))

    def lifted(self, tree: Any) -> Any:
        return lift(self.backend_name, tree)

    def draws(self, seed: int, count: int) -> list[Any]:
        rng = np.random.default_rng(seed)
        return [draw_like(self.primals, rng) for _ in range(count)]


_PROBLEMS: dict[tuple[str, str], Problem] = {}


def make_problem(scenario: Scenario, gt: Any, backend_name: str) -> Problem:
    """The problem of a scenario, which is the same for every test."""
    key = (scenario.name, backend_name)
    if key not in _PROBLEMS:
        _PROBLEMS[key] = _problem(scenario, gt, backend_name)
    return _PROBLEMS[key]


def _problem(scenario: Scenario, gt: Any, backend_name: str) -> Problem:
    rng = np.random.default_rng(7)
    args = scenario.args(rng)
    bare = Problem(scenario, gt, backend_name, args, None)
    weights = draw_like(bare.value("f", bare.primals), rng)
    return Problem(scenario, gt, backend_name, args, lift(backend_name, leaves(weights)))


def close(found: Any, expected: Any, rtol: float, floor: float = 1.0) -> None:
    """Leaf by leaf: same shape and kind, near within rtol of the larger of norm and floor."""
    found, expected = leaves(found), leaves(expected)
    assert len(found) == len(expected)
    for a, b in zip(found, expected, strict=True):
        a, b = np.asarray(a), np.asarray(b)
        assert a.shape == b.shape
        assert np.iscomplexobj(a) == np.iscomplexobj(b), (a.dtype, b.dtype)
        assert np.isfinite(a).all()
        if a.size:
            assert np.abs(a - b).max() <= rtol * max(floor, np.abs(b).max()), (a, b)
