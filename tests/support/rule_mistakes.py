"""Rules with one planted mistake each, and rules without any, for `check_rule`.

Each program makes a rule of `gt.custom_rule` (or of `gt.host_function`) and the arguments at which
it is checked. `says` is what the message must hold: the mode, the argument, and what to look at.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from tests.support.scenarios import Table

_RNG = np.random.default_rng(3)
X, Y = _RNG.normal(size=(3, 4)), _RNG.normal(size=(3, 4))
V, W = np.array([0.7, -1.3, 0.4]), np.array([1.1, 0.6, -0.8])
A, Z = _RNG.normal(size=(3, 3)), _RNG.normal(size=3) + 1j * _RNG.normal(size=3)
POSITIVE = np.array([0.5, 1.5, 2.0])


MISTAKES, RIGHT = Table(), Table()
right = RIGHT.add


def mistake(name: str, *says: str, only: str = "") -> Any:
    """Adds a rule of which these words must be said; `only`: where such a mistake can be made."""
    return MISTAKES.add(name, says, only)


def vjp(gt: Any, fun: Any, fwd: Any, bwd: Any, **options: Any) -> Any:
    rule = gt.custom_rule(fun, **options)
    rule.defvjp(fwd, bwd)
    return rule


def jvp(gt: Any, fun: Any, tangent: Any) -> Any:
    """A forward rule that gives f's value and this tangent of primals and tangents."""
    rule = gt.custom_rule(fun)
    rule.defjvp(lambda p, t: (fun(*p), tangent(p, t)))
    return rule


def saving(fun: Any) -> Any:
    return lambda *args: (fun(*args), args)


def detached(gt: Any, f: Any) -> Any:
    return lambda x: gt.stop_gradient(f(x))


# --- numbers -----------------------------------------------------------------------------------


@mistake("a sign", "bwd", "argument 0", "sign")
def _(gt):
    cos = gt.xp.cos
    return vjp(gt, cos, saving(cos), lambda r, c: (gt.xp.sin(r[0]) * c,)), (X,)


@mistake("a factor", "bwd", "argument 0", "constant factor 0.5")
def _(gt):
    f = lambda x: x**2
    return vjp(gt, f, saving(f), lambda r, c: (r[0] * c,)), (X,)


@mistake("a small error", "bwd", "argument 0", "constant factor 1.00001")
def _(gt):
    f = lambda x: x**2
    return vjp(gt, f, saving(f), lambda r, c: (2.00002 * r[0] * c,)), (X,)


# --- places ------------------------------------------------------------------------------------


@mistake("an outer product the wrong way", "bwd", "argument 0", "transposed")
def _(gt):
    f = lambda a, x: a @ x
    bwd = lambda r, c: (r[1][:, None] * c[None, :], gt.xp.permute_dims(r[0], (1, 0)) @ c)
    return vjp(gt, f, saving(f), bwd), (A, V)


@mistake("cotangents in the wrong order", "bwd", "argument 0", "argument 1")
def _(gt):
    f = lambda x, y: x * gt.xp.exp(y)
    bwd = lambda r, c: (r[0] * gt.xp.exp(r[1]) * c, gt.xp.exp(r[1]) * c)
    return vjp(gt, f, saving(f), bwd), (X, Y)


@mistake("a broadcast that is not summed", "bwd", "array 1", "shape (3, 3)")
def _(gt):
    f = lambda x, b: x + b
    return vjp(gt, f, lambda x, b: (f(x, b), None), lambda _, c: (c, c)), (A, V)


# --- what is missing ---------------------------------------------------------------------------


@mistake("None where it is not zero", "bwd", "argument 1", "None")
def _(gt):
    f = lambda x, y: x * y
    return vjp(gt, f, saving(f), lambda r, c: (r[1] * c, None)), (X, Y)


@mistake("None in the forward rule", "jvp", "argument 0", "None")
def _(gt):
    return jvp(gt, lambda x: x**2, lambda p, t: None), (X,)


@mistake("the cotangent forgotten", "bwd", "argument 0", "not linear in the cotangent")
def _(gt):
    return vjp(gt, gt.xp.sin, saving(gt.xp.sin), lambda r, c: (gt.xp.cos(r[0]),)), (X,)


@mistake("affine in the tangent", "jvp", "not linear in the tangent")
def _(gt):
    return jvp(gt, lambda x: x**2, lambda p, t: 2 * p[0] * t[0] + 1), (X,)


@mistake("a tangent left out", "jvp", "argument 1")
def _(gt):
    return jvp(gt, lambda x, y: x * y, lambda p, t: t[0] * p[1]), (X, Y)


# --- one part against another ------------------------------------------------------------------


@mistake("fwd computes something else", "fwd's value", "output")
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
    rule = vjp(gt, f, saving(f), lambda r, c: (r[1] * c, r[0] * c))
    rule.defjvp(lambda p, t: (f(*p), t[0] * p[1] - t[1] * p[0]))
    return rule, (X, Y)


# --- second order ------------------------------------------------------------------------------


@mistake("a residual that is detached", "residual [0]", "argument 0", "second")
def _(gt):
    sin = gt.xp.sin
    fwd = lambda x: (sin(x), gt.stop_gradient(gt.xp.cos(x)))
    return vjp(gt, sin, fwd, lambda cos, c: (cos * c,)), (X,)


@mistake("a residual read from outside", "residual", "second", only="torch")
def _(gt):
    sin = gt.xp.sin
    fwd = lambda x: (sin(x), gt.asarray(np.cos(gt.to_numpy(x))))
    return vjp(gt, sin, fwd, lambda cos, c: (cos * c,)), (X,)


@mistake(
    "bwd takes a residual as a constant",
    "bwd is right at first order, wrong at second",
    "argument 0",
)
def _(gt):
    f = lambda x: x**3
    return vjp(gt, f, saving(f), lambda r, c: (3 * gt.stop_gradient(r[0]) ** 2 * c,)), (X,)


@mistake(
    "the forward rule takes a primal as a constant", "jvp is right at first order, wrong at second"
)
def _(gt):
    return jvp(gt, gt.xp.sin, lambda p, t: gt.xp.cos(gt.stop_gradient(p[0])) * t[0]), (X,)


# --- complex numbers ---------------------------------------------------------------------------


@mistake("a missing conjugate", "bwd", "argument 0", "conjugate")
def _(gt):
    f = lambda z: z**2
    return vjp(gt, f, saving(f), lambda r, c: (2 * r[0] * c,)), (Z,)


# --- arguments that are no floats --------------------------------------------------------------


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


# --- at some points alone ----------------------------------------------------------------------


@mistake("wrong for negative numbers alone", "bwd", "argument 0", "in places")
def _(gt):
    f = lambda x: gt.xp.where(x > 0, x, 0.1 * x)
    bwd = lambda r, c: (gt.xp.where(r[0] > 0, c, 0.0 * c),)
    return vjp(gt, f, saving(f), bwd), (X,)


@mistake("NaN where the formula divides by zero", "bwd", "argument 0")
def _(gt):
    f = lambda x: gt.xp.where(x == 0, 1.0, gt.xp.sin(x) / gt.xp.where(x == 0, 1.0, x))
    bwd = lambda r, c: ((gt.xp.cos(r[0]) / r[0] - gt.xp.sin(r[0]) / r[0] ** 2) * c,)
    return vjp(gt, f, saving(f), bwd), (np.array([0.5, 0.0, -0.7]),)


@mistake("a tie counted twice", "bwd", "argument 0")
def _(gt):
    f = lambda x: gt.xp.max(x)
    return vjp(gt, f, saving(f), lambda r, c: ((r[0] == gt.xp.max(r[0])) * c,)), (
        np.array([2.0, 0.3, 2.0]),
    )


@mistake("wrong in a batch alone", "batch", "argument 0")
def _(gt):
    def scaled(x, c):
        return 2 * x * c / max(1, x.ndim)  # one axis by itself, two in a batch

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


# --- what is done besides ----------------------------------------------------------------------


@mistake("a cotangent that is written in place", "bwd", "in place", "cotangent", only="torch")
def _(gt):
    f = lambda x: 2 * x
    return vjp(gt, f, lambda x: (f(x), None), lambda _, c: (c.mul_(2),)), (X,)


@mistake("a residual that is written in place", "bwd", "in place", "residual", only="torch")
def _(gt):
    f = lambda x: x**2
    fwd = lambda x: (f(x), 2 * x)
    return vjp(gt, f, fwd, lambda r, c: (r.mul_(c),)), (X,)


@mistake("an argument that is written in place", "fwd writes argument 0 in place", only="torch")
def _(gt):
    def fwd(x):
        return x**2, x.mul_(2)

    return vjp(gt, lambda x: x**2, fwd, lambda r, c: (r * c,)), (X,)


@mistake("what the last call left behind", "bwd", "array 0", "another call of fwd", only="torch")
def _(gt):
    last = {}
    f = lambda x: x**2

    def fwd(x):
        last["x"] = x
        return f(x), None

    return vjp(gt, f, fwd, lambda _, c: (2 * last["x"] * c,)), (X,)


@mistake("a number drawn anew", "bwd", "two calls", only="torch")
def _(gt):
    import torch

    f = lambda x: 2 * x
    bwd = lambda _, c: (2 * c * (1 + 0.1 * torch.rand_like(c)),)
    return vjp(gt, f, lambda x: (f(x), None), bwd), (X,)


# --- right ones --------------------------------------------------------------------------------


@right("both rules")
def _(gt):
    f = lambda x, y: x * gt.xp.exp(y)
    rule = vjp(gt, f, saving(f), lambda r, c: (gt.xp.exp(r[1]) * c, r[0] * gt.xp.exp(r[1]) * c))
    rule.defjvp(lambda p, t: (f(*p), gt.xp.exp(p[1]) * (t[0] + p[0] * t[1])))
    return rule, (X, Y)


@right("a saved output")
def _(gt):
    exp = gt.xp.exp

    def fwd(x):
        y = exp(x)
        return y, y

    return vjp(gt, exp, fwd, lambda y, c: (y * c,)), (X,)


@right("an integer argument")
def _(gt):
    f = lambda x, n: x**n
    bwd = lambda r, c: (r[1] * r[0] ** (r[1] - 1) * c, None)
    return vjp(gt, f, saving(f), bwd), (POSITIVE, np.int64(3))


@right("a static argument")
def _(gt):
    rule = gt.custom_rule(lambda x, n: x**n, static_argnames="n")
    rule.defvjp(lambda n, x: (x**n, x), lambda n, x, c: (n * x ** (n - 1) * c,))
    return rule, (POSITIVE, 3)


@right("a dict, and two outputs")
def _(gt):
    f = lambda p: {"y": p["a"] * p["b"], "z": p["a"].sum()}
    bwd = lambda p, c: ({"a": p["b"] * c["y"] + c["z"], "b": p["a"] * c["y"]},)
    return vjp(gt, f, lambda p: (f(p), p), bwd), ({"a": X, "b": Y},)


@right("complex numbers, holomorphic")
def _(gt):
    f = lambda z: z**2
    return vjp(gt, f, saving(f), lambda r, c: (2 * gt.xp.conj(r[0]) * c,)), (Z,)


@right("complex numbers, not holomorphic")
def _(gt):
    f = lambda z: gt.xp.conj(z) * 2
    return jvp(gt, f, lambda p, t: 2 * gt.xp.conj(t[0])), (Z,)


@right("kinks")
def _(gt):
    f = gt.xp.abs
    bwd = lambda r, c: (gt.xp.sign(r[0]) * c,)
    return vjp(gt, f, saving(f), bwd), (np.array([1.0, 0.0, -2.0]),)


@right("a tie that is shared")
def _(gt):
    def bwd(r, c):
        hit = (r[0] == gt.xp.max(r[0])) * gt.xp.ones_like(r[0])
        return (hit / hit.sum() * c,)

    f = lambda x: gt.xp.max(x)
    return vjp(gt, f, saving(f), bwd), (np.array([2.0, 0.3, 2.0]),)


@right("a tie that goes to the first")
def _(gt):
    def bwd(r, c):
        first = gt.xp.arange(3) == gt.xp.argmax(r[0])
        return (gt.xp.where(first, c, 0.0 * r[0]),)

    f = lambda x: gt.xp.max(x)
    return vjp(gt, f, saving(f), bwd), (np.array([2.0, 0.3, 2.0]),)


@right("numbers of very different size")
def _(gt):
    f = lambda x, y: x * y
    bwd = lambda r, c: (r[1] * c, r[0] * c)
    return vjp(gt, f, saving(f), bwd), (1e8 * X, 1e-7 * Y)


@right("float32")
def _(gt):
    bwd = lambda r, c: (gt.xp.cos(r[0]) * c,)
    return vjp(gt, gt.xp.sin, saving(gt.xp.sin), bwd), (X.astype(np.float32),)


@right("one domain alone")
def _(gt):
    log = gt.xp.log
    return vjp(gt, log, saving(log), lambda r, c: (c / r[0],)), (1e-3 * POSITIVE,)


@right("an implicit function")
def _(gt):
    def root(x):  # y with y^3 + y = x
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


@right("rows of a matrix by an index")
def _(gt):
    f = lambda x, i: x[i]

    def bwd(i, c):
        hit = gt.xp.arange(3)[:, None, None] == i[None, :, None]
        return gt.xp.where(hit, c[None], 0.0).sum(1), None

    return vjp(gt, f, lambda x, i: (f(x, i), i), bwd), (X, np.array([2, 0, 2]))
