"""Defines custom rules with one planted mistake each, and correct custom rules, for `check_rule`.

Each program returns a rule made by `gt.custom_rule` or `gt.host_function` and the arguments at
which it is checked. `says` lists words that the error message must contain, such as the mode and
the argument with the mistake.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from tests.support.scenarios import Table

_RNG = np.random.default_rng(3)
X, Y = _RNG.normal(size=(3, 4)), _RNG.normal(size=(3, 4))
V, W = np.array([0.7, -1.3, 0.4]), np.array([1.1, 0.6, -0.8])
A, Z = _RNG.normal(size=(3, 3)), _RNG.normal(size=3) + 1j * _RNG.normal(size=3)
POSITIVE, TIES = np.array([0.5, 1.5, 2.0]), np.array([2.0, 0.3, 2.0])


MISTAKES, RIGHT = Table(), Table()
right = RIGHT.add


def mistake(name: str, *says: str, only: str = "") -> Any:
    """Register a program whose check must raise an error that contains `says`.

    If only one backend allows the mistake, `only` is the name of that backend.
    """
    return MISTAKES.add(name, says, only)


def vjp(gt: Any, fun: Any, fwd: Any, bwd: Any, **options: Any) -> Any:
    rule = gt.custom_rule(fun, **options)
    rule.defvjp(fwd, bwd)
    return rule


def by_bwd(f: Any, bwd: Any, *args: Any, res: Any = None) -> Any:
    """Return a program for the function f(xp, *args) with rule bwd(xp, residuals, cotangent)."""

    def program(gt: Any) -> Any:
        fun = lambda *xs: f(gt.xp, *xs)
        fwd = lambda *xs: (fun(*xs), xs if res is None else res(gt, *xs))
        return vjp(gt, fun, fwd, lambda r, c: bwd(gt.xp, r, c)), args

    return program


def by_jvp(f: Any, tangent: Any, *args: Any) -> Any:
    """Return a program for f(xp, *args) with the forward rule tangent(gt, primals, tangents)."""

    def program(gt: Any) -> Any:
        rule = gt.custom_rule(lambda *xs: f(gt.xp, *xs))
        rule.defjvp(lambda p, t: (f(gt.xp, *p), tangent(gt, p, t)))
        return rule, args

    return program


nothing = lambda gt, *xs: None
square = lambda xp, x: x**2
product = lambda xp, x, y: x * y
sin = lambda xp, x: xp.sin(x)
matvec = lambda xp, a, x: a @ x
to_exp = lambda xp, x, y: x * xp.exp(y)


# --- wrong numbers, wrong order and missing terms ------------------------------------------------

BWD = {  # expected words of the error, f, bwd, arguments
    "a sign": (
        ("argument 0", "sign"),
        lambda xp, x: xp.cos(x), lambda xp, r, c: (xp.sin(r[0]) * c,), X,
    ),
    "a factor": (
        ("argument 0", "constant factor 0.5"), square, lambda xp, r, c: (r[0] * c,), X,
    ),
    "a small error": (
        ("argument 0", "constant factor 1.00001"), square,
        lambda xp, r, c: (2.00002 * r[0] * c,), X,
    ),
    "a matrix not transposed": (
        ("argument 1",), matvec,
        lambda xp, r, c: (c[:, None] * r[1][None, :], r[0] @ c), A, V,
    ),
    "a transposed outer product": (
        ("argument 0", "transposed"), matvec,
        lambda xp, r, c: (r[1][:, None] * c[None, :], xp.permute_dims(r[0], (1, 0)) @ c), A, V,
    ),
    "cotangents in the wrong order": (
        ("argument 0", "argument 1"), to_exp,
        lambda xp, r, c: (r[0] * xp.exp(r[1]) * c, xp.exp(r[1]) * c), X, Y,
    ),
    "a cotangent not summed over a broadcast axis": (
        ("array 1", "shape (3, 3)"), lambda xp, x, b: x + b, lambda xp, r, c: (c, c), A, V,
    ),
    "None for a nonzero cotangent": (
        ("argument 1", "None"), product, lambda xp, r, c: (r[1] * c, None), X, Y,
    ),
    "a bwd that ignores the cotangent": (
        ("argument 0", "not linear in the cotangent"), sin, lambda xp, r, c: (xp.cos(r[0]),), X,
    ),
    "a missing conjugate": (
        ("argument 0", "conjugate"), square, lambda xp, r, c: (2 * r[0] * c,), Z,
    ),
    "wrong only for negative numbers": (
        ("argument 0", "in some entries"), lambda xp, x: xp.where(x > 0, x, 0.1 * x),
        lambda xp, r, c: (xp.where(r[0] > 0, c, 0.0 * c),), X,
    ),
    "NaN where the formula divides by zero": (
        ("argument 0",),
        lambda xp, x: xp.where(x == 0, 1.0, xp.sin(x) / xp.where(x == 0, 1.0, x)),
        lambda xp, r, c: ((xp.cos(r[0]) / r[0] - xp.sin(r[0]) / r[0] ** 2) * c,),
        np.array([0.5, 0.0, -0.7]),
    ),
    "a tie counted twice": (
        ("argument 0",), lambda xp, x: xp.max(x),
        lambda xp, r, c: ((r[0] == xp.max(r[0])) * c,), TIES,
    ),
}  # fmt: skip
for _name, (_says, *_rest) in BWD.items():
    mistake(_name, "bwd", *_says)(by_bwd(*_rest))
mistake("the output saved instead of the input", "bwd", "argument 0")(
    by_bwd(sin, lambda xp, y, c: (xp.cos(y) * c,), X, res=lambda gt, x: gt.xp.sin(x))
)
mistake("a forward rule that returns None", "jvp", "argument 0", "None")(
    by_jvp(square, lambda gt, p, t: None, X)
)
mistake("affine in the tangent", "jvp", "not linear in the tangent")(
    by_jvp(square, lambda gt, p, t: 2 * p[0] * t[0] + 1, X)
)
mistake("a forward rule that ignores a tangent", "jvp", "argument 1")(
    by_jvp(product, lambda gt, p, t: t[0] * p[1], X, Y)
)


# --- a rule whose parts contradict each other --------------------------------------------------


@mistake("fwd returns another value", "fwd's value", "output")
def _(gt):
    f = lambda x: gt.xp.log1p(gt.xp.exp(x))
    fwd = lambda x: (gt.xp.log(1.001 + gt.xp.exp(x)), x)
    return vjp(gt, f, fwd, lambda x, c: (c / (1 + gt.xp.exp(-x)),)), (X,)


@mistake("fwd in another dtype", "fwd returned float32")
def _(gt):
    low = lambda x: gt._api._backend.cast(x, "float32")
    fwd = lambda x: (low(x * 0 + 1), x)
    return vjp(gt, lambda x: x * 0 + 1, fwd, lambda x, c: (0 * x,)), (X,)


@mistake("a cotangent in another dtype", "bwd", "array 0", "float32")
def _(gt):
    low = lambda x: gt._api._backend.cast(x, "float32")
    bwd = lambda _, c: (low(2 * c),)
    return vjp(gt, lambda x: 2 * x, lambda x: (2 * x, None), bwd), (X,)


@mistake("two rules that disagree", "jvp", "argument 1", "bwd | jvp")
def _(gt):
    f = lambda x, y: x * y
    rule = vjp(gt, f, lambda *xs: (f(*xs), xs), lambda r, c: (r[1] * c, r[0] * c))
    rule.defjvp(lambda p, t: (f(*p), t[0] * p[1] - t[1] * p[0]))
    return rule, (X, Y)


# --- second order ------------------------------------------------------------------------------

_by_cos = lambda xp, cos, c: (cos * c,)
mistake("a detached residual", "residual [0]", "argument 0", "second")(
    by_bwd(sin, _by_cos, X, res=lambda gt, x: gt.stop_gradient(gt.xp.cos(x)))
)
mistake("a residual that NumPy computes", "residual", "second", only="torch")(
    by_bwd(sin, _by_cos, X, res=lambda gt, x: gt.asarray(np.cos(gt.to_numpy(x))))
)
mistake(
    "the forward rule treats a primal as a constant", "jvp is correct at first order", "second"
)(by_jvp(sin, lambda gt, p, t: gt.xp.cos(gt.stop_gradient(p[0])) * t[0], X))


@mistake("bwd treats a residual as a constant", "bwd is correct at first order", "argument 0")
def _(gt):
    bwd = lambda xp, r, c: (3 * gt.stop_gradient(r[0]) ** 2 * c,)
    return by_bwd(lambda xp, x: x**3, bwd, X)(gt)


# --- arguments that are not floating-point -----------------------------------------------------


@mistake("a cotangent for a static argument", "bwd returned", "expected a tuple of 1")
def _(gt):
    rule = gt.custom_rule(lambda x, n: x**n, static_argnames="n")
    rule.defvjp(lambda n, x: (x**n, x), lambda n, x, c: (n * x ** (n - 1) * c, None))
    return rule, (POSITIVE, 3)


@mistake("one leaf of a dict", "bwd", "argument 0['b']")
def _(gt):
    f = lambda p: p["a"] * p["b"] ** 2
    bwd = lambda p, c: ({"a": p["b"] ** 2 * c, "b": p["a"] * p["b"] * c},)
    return vjp(gt, f, lambda p: (f(p), p), bwd), ({"a": X, "b": Y},)


# --- wrong under vmap only, and side effects ---------------------------------------------------


@mistake("wrong only in a batch", "batch", "argument 0")
def _(gt):
    def scaled(x, c):
        return 2 * x * c / max(1, x.ndim)  # This derivative is wrong under vmap.

    square = gt.host_function(lambda x: x**2, vectorized=True)
    back = gt.host_function(scaled, vectorized=True)
    square.defvjp(lambda x: (square(x), x), lambda x, c: (back(x, c),))
    return square, (V,)


@mistake("a kernel that sums over the batch", "batch", "output")
def _(gt):
    norm = gt.host_function(lambda x: x / np.sqrt((x**2).sum()), vectorized=True)

    def bwd(y_and_x, c):
        y, x = y_and_x
        size = gt.xp.sqrt((x**2).sum())
        return ((c - y * (y * c).sum()) / size,)

    norm.defvjp(lambda x: ((y := norm(x)), (y, x)), bwd)
    return norm, (V,)


mistake("a cotangent that is written in place", "bwd", "in place", "cotangent", only="torch")(
    by_bwd(lambda xp, x: 2 * x, lambda xp, r, c: (c.mul_(2),), X, res=nothing)
)
mistake("a residual that is written in place", "bwd", "in place", "residual", only="torch")(
    by_bwd(square, lambda xp, r, c: (r.mul_(c),), X, res=lambda gt, x: 2 * x)
)


@mistake("an argument that is written in place", "fwd writes argument 0 in place", only="torch")
def _(gt):
    def fwd(x):
        return x**2, x.mul_(2)

    return vjp(gt, lambda x: x**2, fwd, lambda r, c: (r * c,)), (X,)


@mistake(
    "state left over from the previous call", "bwd", "array 0", "another call of fwd", only="torch"
)
def _(gt):
    last = {}
    f = lambda x: x**2

    def fwd(x):
        last["x"] = x
        return f(x), None

    return vjp(gt, f, fwd, lambda _, c: (2 * last["x"] * c,)), (X,)


@mistake("a new random number in each call", "bwd", "two calls", only="torch")
def _(gt):
    import torch

    bwd = lambda xp, r, c: (2 * c * (1 + 0.1 * torch.rand_like(c)),)
    return by_bwd(lambda xp, x: 2 * x, bwd, X, res=nothing)(gt)


# --- correct rules -----------------------------------------------------------------------------

_by_cosine = lambda xp, r, c: (xp.cos(r[0]) * c,)


def _shared_tie(xp, r, c):
    hit = (r[0] == xp.max(r[0])) * xp.ones_like(r[0])
    return (hit / hit.sum() * c,)


def _first_of_ties(xp, r, c):
    return (xp.where(xp.arange(3) == xp.argmax(r[0]), c, 0.0 * r[0]),)


def _rows(xp, r, c):
    hit = xp.arange(3)[:, None, None] == r[1][None, :, None]
    return xp.where(hit, c[None], 0.0).sum(1), None


RIGHT_BWD = {  # f, bwd, the arguments
    "sin": (sin, _by_cosine, X),
    "an integer argument": (
        lambda xp, x, n: x**n,
        lambda xp, r, c: (r[1] * r[0] ** (r[1] - 1) * c, None), POSITIVE, np.int64(3),
    ),
    "a dict and two outputs": (
        lambda xp, p: {"y": p["a"] * p["b"], "z": p["a"].sum()},
        lambda xp, r, c: ({"a": r[0]["b"] * c["y"] + c["z"], "b": r[0]["a"] * c["y"]},),
        {"a": X, "b": Y},
    ),
    "complex numbers, holomorphic": (square, lambda xp, r, c: (2 * xp.conj(r[0]) * c,), Z),
    "kinks": (
        lambda xp, x: xp.abs(x), lambda xp, r, c: (xp.sign(r[0]) * c,), np.array([1.0, 0.0, -2.0]),
    ),
    "a tie whose gradient is split": (lambda xp, x: xp.max(x), _shared_tie, TIES),
    "a tie with the gradient at one entry": (lambda xp, x: xp.max(x), _first_of_ties, TIES),
    "numbers of very different magnitude": (
        product, lambda xp, r, c: (r[1] * c, r[0] * c), 1e8 * X, 1e-7 * Y,
    ),
    "float32": (sin, _by_cosine, X.astype(np.float32)),
    "a logarithm of small numbers": (
        lambda xp, x: xp.log(x), lambda xp, r, c: (c / r[0],), 1e-3 * POSITIVE,
    ),
    "rows of a matrix at given indices": (lambda xp, x, i: x[i], _rows, X, np.array([2, 0, 2])),
}  # fmt: skip
for _name, _of in RIGHT_BWD.items():
    right(_name)(by_bwd(*_of))
right("complex numbers, not holomorphic")(
    by_jvp(lambda xp, z: xp.conj(z) * 2, lambda gt, p, t: 2 * gt.xp.conj(t[0]), Z)
)


@right("both rules")
def _(gt):
    f = lambda x, y: x * gt.xp.exp(y)
    rule = vjp(
        gt,
        f,
        lambda *xs: (f(*xs), xs),
        lambda r, c: (gt.xp.exp(r[1]) * c, r[0] * gt.xp.exp(r[1]) * c),
    )
    rule.defjvp(lambda p, t: (f(*p), gt.xp.exp(p[1]) * (t[0] + p[0] * t[1])))
    return rule, (X, Y)


@right("a saved output")
def _(gt):
    exp = gt.xp.exp

    def fwd(x):
        y = exp(x)
        return y, y

    return vjp(gt, exp, fwd, lambda y, c: (y * c,)), (X,)


@right("a static argument")
def _(gt):
    rule = gt.custom_rule(lambda x, n: x**n, static_argnames="n")
    rule.defvjp(lambda n, x: (x**n, x), lambda n, x, c: (n * x ** (n - 1) * c,))
    return rule, (POSITIVE, 3)


@right("an implicit function")
def _(gt):
    def root(x):  # returns y with y^3 + y = x
        y = 0.0 * x
        for _ in range(60):
            y = y - (y**3 + y - x) / (3 * y**2 + 1)
        return y

    rule = gt.custom_rule(root)
    rule.defjvp(lambda p, t: ((y := rule(p[0])), t[0] / (3 * y**2 + 1)))
    return rule, (V,)


@right("a host function with a double backward")
def _(gt):
    cube, back = (gt.host_function(f) for f in (lambda x: x**3, lambda x, c: 3 * x**2 * c))
    twice = gt.host_function(
        lambda x, c, v: (6 * x * c * v, 3 * x**2 * v), out=lambda x, c, v: (x, c)
    )
    cube.defvjp(lambda x: (cube(x), x), lambda x, c: (back(x, c),))
    back.defvjp(lambda x, c: (back(x, c), (x, c)), lambda r, v: twice(*r, v))
    return cube, (V,)
