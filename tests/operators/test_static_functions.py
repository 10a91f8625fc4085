"""Tests static arguments of rules, which come first in fwd and may close over arrays."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import pytest

from gradtools import GradtoolsError


def solver(gt):
    """Return a rule that calls a static argument f and differentiates f with respect to x."""
    rule = gt.custom_rule(lambda f, x: f(x), static_argnames="f")
    rule.defvjp(lambda f, x: (f(x), x), lambda f, x, c: (gt.vjp(f, x)[1](c)[0],))
    return rule


class Times:
    def __init__(self, w):
        self.w = w

    def __call__(self, x):
        return self.w * x

    def method(self, x):
        return self.w * x


@dataclass(slots=True)  # nnx variables also have no __hash__ and no __dict__
class Scale:
    w: Any

    def __call__(self, x):
        return self.w * x


HOLDERS = {
    "a closure": lambda w: lambda x: w * x,
    "a partial": lambda w: partial(lambda w, x: w * x, w),
    "a bound method": lambda w: Times(w).method,
    "an object without a hash": Scale,
}


@pytest.mark.parametrize("holder", HOLDERS)
def test_what_a_static_function_closes_over_has_no_derivative_in_silence(gt, holder):
    rule, w, x = solver(gt), gt.asarray(np.float32(3)), gt.asarray(np.float32(2))
    f = lambda w: rule(HOLDERS[holder](w), x)
    for take in (
        lambda: gt.grad(f)(w),
        lambda: gt.jvp(f, (w,), (w,)),
        lambda: gt.jacobian(f, mode="forward")(w),
        lambda: gt.jacobian(f, mode="reverse")(w),
    ):
        with pytest.raises(GradtoolsError, match=r"closes over an? "):
            take()


@pytest.mark.parametrize("holder", HOLDERS)
def test_a_static_function_may_close_over_what_is_traced(gt, holder):
    rule, x = solver(gt), gt.asarray(np.float32(2))
    f = lambda w, x: rule(HOLDERS[holder](w), x) ** 2
    ws = gt.asarray(np.float32([1, 3]))
    np.testing.assert_allclose(gt.to_numpy(gt.vmap(f, (0, None))(ws, x)), [4, 36])
    slope = gt.vmap(lambda w, x: gt.grad(f, 1)(w, x), (0, None))
    if rule._backend.name == "torch":  # PyTorch has no closure conversion
        with pytest.raises(GradtoolsError, match="closes over an array"):
            slope(ws, x)
        return
    slopes = slope(ws, x)
    np.testing.assert_allclose(gt.to_numpy(slopes), [4, 36])
    curves = gt.vmap(lambda w, x: gt.grad(gt.grad(f, 1), 1)(w, x), (0, None))(ws, x)
    np.testing.assert_allclose(gt.to_numpy(curves), [2, 18])
    assert not rule._specializations  # the rule caches no tracer


@pytest.mark.parametrize(
    "fwd",
    [
        lambda n, x: (x**n, x),
        lambda k, z: (z**k, z),
        lambda *args: (args[1] ** args[0], args[1]),
        lambda n, x, more=1: (x**n, x),
    ],
)
def test_fwd_with_its_static_arguments_first_is_right(gt, fwd):
    power = gt.custom_rule(lambda x, n: x**n, static_argnames="n")
    power.defvjp(fwd, lambda n, x, c: (n * x ** (n - 1) * c,))
    assert float(gt.grad(power)(gt.asarray(np.float32(2)), 3)) == 12
