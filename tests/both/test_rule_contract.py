"""Tests requirements on custom rules in both backends; see also jax/test_rule_contract.py."""

from __future__ import annotations

import functools

import numpy as np
import pytest

from gradtools import GradtoolsError
from tests.support.native import NATIVE
from tests.support.numpy_trees import leaves, lower

X = np.array([0.5, 1.5, 2.0])


@pytest.fixture
def x(backend_name):
    return NATIVE[backend_name].array(X)


def same(found, expected):
    np.testing.assert_allclose(lower(found), expected, rtol=1e-12)


def test_static_arguments_stand_beside_any_number_of_others(gt, x):
    @gt.custom_rule(static_argnames="power")
    def f(power, x, *more):
        return x**power * sum(more)

    def bwd(power, kept, ct):
        x, more = kept
        slope = power * x ** (power - 1) * sum(more) * ct
        return (slope, *[x**power * ct] * len(more))

    f.defvjp(lambda power, x, *more: (f(power, x, *more), (x, more)), bwd)
    found = gt.grad(lambda x: f(3, x, x, x).sum())(x)
    same(found, 8 * X**3)


def test_fwd_is_told_of_each_argument_whether_it_is_differentiated(gt, x):
    def fwd(x, y):
        assert x.perturbed
        return x.value * y.value, (y.value, x.value if y.perturbed else None)

    def bwd(kept, ct):
        y, x = kept
        return ct * y, None if x is None else ct * x

    f = gt.custom_rule(lambda x, y: x * y)
    f.defvjp(fwd, bwd, symbolic_zeros=True, optimize_remat=True)
    same(gt.grad(lambda x, y: f(x, y).sum())(x, 2 * x), 2 * X)
    same(gt.grad(lambda x: f(x, x).sum())(x), 2 * X)


def test_a_static_array_is_refused_with_the_mend(gt, x):
    f = gt.custom_rule(lambda x, n: x, static_argnames="n")
    f.defvjp(lambda n, x: (x, None), lambda n, kept, ct: (ct,))
    with pytest.raises(GradtoolsError, match="bwd may return None for them"):
        f(x, X)
    own = gt.asarray(X)  # PyTorch tensors are hashable by identity
    for held in (own, (own,), [X]):
        with pytest.raises(GradtoolsError, match=r"'n' is .* contain no array"):
            f(x, held)


SINE = {
    "fun": lambda gt: lambda x: gt.xp.sin(x),
    "fwd": lambda gt: lambda x: (gt.xp.sin(x), x),
    "bwd": lambda gt: lambda x, ct: (gt.xp.cos(x) * ct,),
}
TWICE = {
    "fun": lambda gt: lambda x: 2 * gt.xp.sin(x),
    "fwd": lambda gt: lambda x: (gt.xp.sin(x), x + np.pi),
    "bwd": lambda gt: lambda x, ct: (2 * gt.xp.cos(x) * ct,),
    "jvp": lambda gt: lambda xs, dxs: (gt.xp.sin(*xs), 2 * gt.xp.cos(*xs) * dxs[0]),
}
SET = {"fun": 1, "fwd": -1, "bwd": 2, "jvp": 1}


@pytest.mark.parametrize("name", SET)
def test_a_part_of_a_rule_that_is_set_after_calls_counts(gt, x, name):
    f = gt.custom_rule(SINE["fun"](gt))
    f.defvjp(SINE["fwd"](gt), SINE["bwd"](gt))
    for _ in range(3):
        same(gt.grad(lambda x: f(x).sum())(x), np.cos(X))
    same(gt.jvp(f, (x,), (gt.xp.ones_like(x),))[1], np.cos(X))
    setattr(f, name, TWICE[name](gt))
    same(f(x), np.sin(X) * (2 if name == "fun" else 1))
    same(gt.grad(lambda x: f(x).sum())(x), np.cos(X) * SET[name])
    if name == "jvp":
        same(gt.jvp(f, (x,), (gt.xp.ones_like(x),))[1], 2 * np.cos(X))


def test_a_host_functions_rule_may_be_set_after_calls(gt, x):
    f = gt.host_function(np.sin)
    f.defvjp(lambda x: (f(x), x), lambda x, ct: (gt.xp.cos(x) * ct,))
    for _ in range(3):
        same(gt.grad(lambda x: f(x).sum())(x), np.cos(X))
    f.bwd = TWICE["bwd"](gt)
    same(gt.grad(lambda x: f(x).sum())(x), 2 * np.cos(X))


def test_a_rule_that_can_be_called_is_taken_whatever_its_signature_says(gt):
    """gradtools reads the signatures of rules without following the attribute `__wrapped__`."""

    def f(x):
        return x * x

    @functools.wraps(f)
    def bwd(*saved_and_cotangent):
        x, c = saved_and_cotangent
        return (2 * x * c,)

    @functools.wraps(f)
    def pushed(primals, tangents, scale=2):
        return f(*primals), scale * primals[0] * tangents[0]

    x = gt.asarray(np.float32(3.0))
    for give in (
        lambda rule: rule.defvjp(lambda x: (f(x), x), bwd),
        lambda rule: rule.defjvp(pushed),
        lambda rule: rule.defjvp(functools.partial(pushed, scale=2)),
    ):
        rule = gt.custom_rule(f)
        give(rule)
        assert float(gt.grad(rule)(x)) == 6


# --- return values of fwd, the forward rule and bwd ----------------------------------------

OTHER = {
    "shape": (lambda gt, x: x.sum(), lambda gt, x: x.sum()[None]),
    "dtype": (lambda gt, x: x * 2, lambda gt, x: gt.xp.astype(x * 2, gt.xp.float32)),
    "structure": (lambda gt, x: (x, x), lambda gt, x: [x, x]),
    "number": (lambda gt, x: (x, x * 1), lambda gt, x: (x, x * 1, x * 2)),
    "dtype at known values": (
        lambda gt, x: x * float(x.sum()),
        lambda gt, x: gt.xp.astype(x * float(x.sum()), gt.xp.float32),
    ),
}


@pytest.mark.sampled(torch=(30, 40), jax=(20, 40))
@pytest.mark.parametrize("way", ["gt.grad", "gt.jvp", "native grad", "native jvp"])
@pytest.mark.parametrize("given", ["fwd", "the forward rule"])
@pytest.mark.parametrize("name", OTHER)
def test_another_output_than_the_functions_is_refused(gt, backend_name, x, name, given, way):
    if name == "dtype at known values" and (backend_name == "jax" or "native" in way):
        pytest.skip("a traced or transformed array has no known value")
    f, other = (functools.partial(g, gt) for g in OTHER[name])
    rule = gt.custom_rule(f)
    if given == "fwd":
        rule.defvjp(lambda x: (other(x), None), lambda _, ct: (None,))
    else:
        rule.defjvp(lambda p, t: (other(p[0]), None))
    api = gt if way.startswith("gt") else NATIVE[backend_name]
    total = lambda x: sum(y.sum() for y in leaves([rule(x)]))
    run = api.grad(total) if way.endswith("grad") else lambda x: api.jvp(rule, (x,), (x,))
    with pytest.raises(GradtoolsError, match=f"{given} returned"):
        run(x)


WRONG = {
    "too few": lambda gt, ct: (),
    "too many": lambda gt, ct: (ct, ct),
    "no tuple": lambda gt, ct: ct,
    "shape": lambda gt, ct: (ct.sum(),),
    "dtype": lambda gt, ct: (gt.xp.astype(ct, gt.xp.float32),),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_bwd_returns_is_compared_with_the_arguments(gt, x, name):
    wrong = [False]
    rule = gt.custom_rule(lambda x: gt.xp.sin(x))
    rule.defvjp(
        lambda x: (gt.xp.sin(x), x),
        lambda x, ct: WRONG[name](gt, ct) if wrong[0] else (ct * x,),
    )
    run = lambda: gt.grad(lambda x: rule(x).sum())(x)
    for _ in range(3):  # the wrong result must also be reported after several correct calls
        run()
    wrong[0] = True
    with pytest.raises(GradtoolsError, match="bwd"):
        run()
