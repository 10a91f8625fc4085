"""If gradtools derives the other mode of a rule by transposition, the rule must be linear.

A nonlinear map raises an error in the derived mode. In the mode of the rule, a nonlinear map runs
without an error, but `check_rule` reports it. Rounding errors must not be reported as nonlinearity.
"""

from __future__ import annotations

import numpy as np
import pytest

from gradtools import GradtoolsError
from tests.support.native import NATIVE

N = 64
X = np.linspace(0.5, 1.5, N)
V = np.linspace(-20.0, 20.0, N)
BIG = {np.float64: 3.3e13, np.float32: 3.3e5}
LINEAR = {
    "cancels": lambda x, big: (x * big + x) - x * big,
    "sums cancel": lambda x, big: (x * big + x).sum() - (x * big).sum() + 0 * x,
    "shifted": lambda x, big: (x + big * x.mean()) - big * x.mean(),
    "rounds to half precision": lambda x, big: x.astype(np.float16) * np.float16(1.1),
}


def _norm(xp, v):
    return xp.sqrt(xp.sum(v * v))


FORGOTTEN = {  # maps that are nonzero at zero
    "a map that ignores the vector": lambda xp, x, v: xp.cos(x) + 0 * v,
    "an added constant": lambda xp, x, v: xp.cos(x) * v + 0.01,
    "a sum in place of a product": lambda xp, x, v: xp.cos(x) + v,
    "a constant in one branch": lambda xp, x, v: xp.where(x > 1, x, v),
}
NOT_LINEAR = {
    "a square": lambda xp, x, v: v * v,
    "abs": lambda xp, x, v: xp.abs(v),
    "relu": lambda xp, x, v: xp.where(v > 0, v, 0 * v),
    "clip": lambda xp, x, v: xp.clip(v, -10.0, 10.0),
    "sort": lambda xp, x, v: xp.sort(v),
    "a norm": lambda xp, x, v: _norm(xp, v) + 0 * v,
    "a quotient": lambda xp, x, v: v / (1 + v),
    "a clipped norm": lambda xp, x, v: v / xp.maximum(_norm(xp, v), 1 + 0 * _norm(xp, v)),
    "a square hidden by cancellation": lambda xp, x, v: (v * 1e3 + v * v) - v * 1e3,
}
MAPS = {**FORGOTTEN, **NOT_LINEAR}
GIVEN = ("tangent", "cotangent")
WAYS = ("gt", "native", "compiled", "mapped", "in a loop", "in a checkpoint")


def _rule(gt, name, given, kernel=False):
    """Return sin with the map `name`, optionally a host kernel, as its forward or reverse rule."""
    change = gt.host_function(lambda x, v: MAPS[name](np, x, v).astype(x.dtype))
    run = change if kernel else lambda x, v: MAPS[name](gt.xp, x, v)
    rule = gt.custom_rule(lambda x: gt.xp.sin(x))
    if given == "tangent":
        rule.defjvp(lambda p, t: (gt.xp.sin(p[0]), run(p[0], t[0])))
    else:
        rule.defvjp(lambda x: (gt.xp.sin(x), x), lambda x, ct: (run(x, ct),))
    return rule


def _in_the_other_mode(gt, native, f, given, way, x, v):
    """Compute the derivative of f in the mode for which f has no rule."""
    if way == "in a loop":
        return _in_the_other_mode(gt, native, lambda x: native.loop(f, x, 1), given, "gt", x, v)
    if way == "in a checkpoint":
        remade = native.checkpoint(f) if native.name == "jax" else gt.checkpoint(f)
        return _in_the_other_mode(gt, native, remade, given, "gt", x, v)
    api = gt if way == "gt" else native
    if given == "tangent":
        run = api.grad(lambda x: f(x).sum())
    else:
        run = lambda x: api.jvp(f, (x,), (v,))[1]
    wrap = {"compiled": native.jit, "mapped": lambda run: lambda x: native.vmap(run)(x[None])}
    return wrap.get(way, lambda run: run)(run)(x)


@pytest.mark.sampled(torch=(36, 80), jax=(24, 60))
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kernel", [False, True], ids=["code", "kernel"])
@pytest.mark.parametrize("given", GIVEN)
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("name", MAPS)
def test_a_map_that_is_not_linear_is_refused_in_the_other_mode(
    gt, backend_name, name, dtype, given, kernel, way
):
    native, rule = NATIVE[backend_name], _rule(gt, name, given, kernel)
    x, v = (native.array(a, dtype) for a in (X, V))
    words = f"not linear in its {given}s"
    if backend_name == "jax" and not kernel:
        words = f"multiply by the {given}" if name in FORGOTTEN else f"linear in its {given}s"
    elif backend_name == "jax":
        words = "not linear"
    for _ in range(2):  # the same nonlinear map must raise an error twice
        with pytest.raises(Exception, match=words) as raised:
            np.asarray(_in_the_other_mode(gt, native, rule, given, way, x, v))
        assert isinstance(raised.value, GradtoolsError) or way == "compiled"


@pytest.mark.slow_at(("jax", "sort"))
@pytest.mark.parametrize("given", GIVEN)
@pytest.mark.parametrize("name", MAPS)
def test_a_map_stays_as_its_author_wrote_it_in_its_own_mode(gt, name, given):
    rule, x, v = _rule(gt, name, given), gt.asarray(X), gt.asarray(V)
    push = lambda x: gt.jvp(rule, (x,), (v,))[1] if given == "tangent" else gt.vjp(rule, x)[1](v)[0]
    np.testing.assert_allclose(gt.to_numpy(push(x)), MAPS[name](np, X, V), rtol=1e-12)


def _gradient(gt, kernel, dtype):
    """Return the gradient of a rule with the tangent kernel(dx), whose vjp is the identity."""
    host = gt.host_function(lambda x: kernel(x, dtype(BIG[dtype])).astype(dtype))
    host.defvjp(lambda x: (host(x), None), lambda _, ct: (ct,))
    rule = gt.custom_rule(lambda x: 2 * x)
    rule.defjvp(lambda xs, dxs: (2 * xs[0], host(dxs[0])))
    return gt.to_numpy(gt.grad(lambda x: rule(x).sum())(gt.asarray(X.astype(dtype))))


@pytest.mark.sweep_at(("jax", "cancels"))
@pytest.mark.parametrize("dtype", BIG)
@pytest.mark.parametrize("name", LINEAR)
def test_a_linear_kernel_whose_terms_cancel_is_transposed(gt, dtype, name):
    np.testing.assert_array_equal(_gradient(gt, LINEAR[name], dtype), np.ones(N))
