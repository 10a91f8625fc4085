"""Tests custom rules in methods, closures and containers, with arguments of every kind.

The rule's derivative is a multiple of the true derivative, so that a test fails if the rule is
dropped. Each program runs three times, because signatures are cached after the first call.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import pytest

from tests.support.native import NATIVE

X = np.array([0.3, 0.7])
COS = np.cos(X)


def forward_sine(gt, times=2.0):
    f = gt.custom_rule(lambda x: gt.xp.sin(x))
    f.defjvp(lambda p, t: (gt.xp.sin(*p), times * gt.xp.cos(*p) * t[0]))
    return f


class Topic(NamedTuple):
    """make(gt) returns a function of an array; `slope` is the derivative of that function at X."""

    make: Any
    slope: Any = 2 * COS


# --- places where a rule may be defined --------------------------------------------------


def as_method(gt):
    class Scaled:
        def __init__(self, k):
            self.k = k

        @gt.custom_rule
        def f(self, x):
            return gt.xp.sin(x) * self.k

        f.defvjp(
            lambda self, x: (gt.xp.sin(x) * self.k, (self, x)),
            lambda kept, ct: (None, 2 * kept[0].k * gt.xp.cos(kept[1]) * ct),
        )

    Scaled(7.0).f(gt.asarray(X))  # This calls the rule of another object.
    return Scaled(3.0).f


def as_method_of_a_static_self(gt):
    class Scaled:
        def __init__(self, k):
            self.k = k

        @gt.custom_rule(static_argnames="self")
        def f(self, x):
            return gt.xp.sin(x) * self.k

        f.defvjp(
            lambda self, x: (gt.xp.sin(x) * self.k, x),
            lambda self, x, ct: (2 * self.k * gt.xp.cos(x) * ct,),
        )

    return Scaled(3.0).f


# --- arguments of the function -----------------------------------------------------------


def of_any_number(gt):
    f = gt.custom_rule(lambda *xs: sum(xs))
    f.defvjp(lambda *xs: (sum(xs), len(xs)), lambda n, ct: (2 * n * ct,) * n)
    return lambda x: f(x) + f(x, gt.asarray(X), x)


def of_one_array_twice(gt):
    f = gt.custom_rule(lambda x, y: x * y)
    f.defvjp(lambda x, y: (x * y, (x, y)), lambda r, ct: (2 * r[1] * ct, 3 * r[0] * ct))
    return lambda x: f(x, x)


def of_a_tree_with_none(gt):
    def f(tree):
        return {"a": 2 * tree["x"], "b": None, "c": (None, tree["x"])}

    rule = gt.custom_rule(f)
    rule.defvjp(
        lambda tree: (f(tree), None), lambda _, ct: ({"x": 5 * ct["a"] + ct["c"][1], "n": None},)
    )

    def run(x):
        out = rule({"x": x, "n": None})
        assert out["b"] is None and out["c"][0] is None
        return out["a"] + out["c"][1]

    return run


# --- outputs of the function -------------------------------------------------------------


def of_many_kinds(gt):
    def f(x):
        return 2 * x, gt.xp.argmax(x), x > 0.5, x * (1 + 1j)

    rule = gt.custom_rule(f)
    rule.defvjp(lambda x: (f(x), None), lambda _, ct: (5 * ct[0] + ct[3].real + ct[3].imag,))

    def run(x):
        a, i, b, z = rule(x)
        assert "int" in str(i.dtype) and "bool" in str(b.dtype)
        return a + z.real + z.imag

    return run


def of_its_input(gt):
    f = gt.custom_rule(lambda x, y: (x, 2 * y))
    f.defvjp(lambda x, y: ((x, 2 * y), None), lambda _, ct: (5 * ct[0], 3 * ct[1]))
    return lambda x: sum(f(x, 1 * x))


def of_views(gt):
    f = gt.custom_rule(lambda x: (x[:1], x[1:]))
    f.defvjp(
        lambda x: ((x[:1], x[1:]), None),
        lambda _, ct: (gt.xp.concat([2 * ct[0], 3 * ct[1]]),),
    )
    return lambda x: f(x)[0] + f(x)[1]


def of_one_output_unused(gt):
    f = gt.custom_rule(lambda x: (gt.xp.sin(x), gt.xp.exp(x)))
    f.defvjp(
        lambda x: ((gt.xp.sin(x), gt.xp.exp(x)), x),
        lambda x, ct: (2 * gt.xp.cos(x) * ct[0] + 5 * gt.xp.exp(x) * ct[1],),
    )
    return lambda x: f(x)[0]


def that_saves_what_is_no_array(gt):
    f = gt.custom_rule(lambda x: 3 * x)
    f.defvjp(lambda x: (3 * x, {"k": 5.0, "word": "so", "f": abs}), lambda r, ct: (r["k"] * ct,))
    return f


TOPICS = {
    "a method": Topic(as_method, 6 * COS),
    "a method with a static self": Topic(as_method_of_a_static_self, 6 * COS),
    "a forward rule": Topic(forward_sine),
    "any number of arguments": Topic(of_any_number, [2 + 12, 2 + 12]),
    "one array twice": Topic(of_one_array_twice, 5 * X),
    "None in trees": Topic(of_a_tree_with_none, [6, 6]),
    "outputs of many kinds": Topic(of_many_kinds, [7, 7]),
    "an input returned": Topic(of_its_input, [8, 8]),
    "views": Topic(of_views, [2, 3]),
    "an output unused": Topic(of_one_output_unused),
    "words saved": Topic(that_saves_what_is_no_array, [5, 5]),
}


@pytest.mark.sampled(torch=(44, 44), jax=(16, 44))
@pytest.mark.parametrize("way", ["gt.grad", "native grad", "vmap", "gt.jvp"])
@pytest.mark.parametrize("name", TOPICS)
def test_a_rule_holds_wherever_a_function_may_stand(name, way, gt, backend_name):
    native, topic = NATIVE[backend_name], TOPICS[name]
    f, x = topic.make(gt), native.array(X)
    total = lambda x: f(x).sum()
    ways = {
        "gt.grad": lambda: gt.grad(total)(x),
        "native grad": lambda: native.grad(total)(x),
        "vmap": lambda: gt.vmap(gt.grad(total))(gt.xp.stack([x, x]))[1],
        "gt.jvp": lambda: gt.jvp(total, (x,), (gt.xp.ones_like(x),))[1],
    }
    expected = np.sum(topic.slope) if way == "gt.jvp" else topic.slope
    for _ in range(3):
        found = ways[way]()
        found = found.detach().numpy() if hasattr(found, "detach") else np.asarray(found)
        np.testing.assert_allclose(found, expected, rtol=1e-12)


DTYPES = ["float16", "bfloat16", "float32", "float64", "complex64", "complex128"]


@pytest.mark.slow_at(
    ("jax", "bfloat16"),
    ("jax", "complex64"),
    ("jax", "float16", "vjp"),
    ("jax", "float32", "vjp"),
    ("jax", "complex128", "vjp"),
)
@pytest.mark.parametrize("given", ["vjp", "jvp"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_rule_keeps_its_arguments_dtype_in_both_modes(dtype, given, gt, backend_name):
    if given == "vjp":
        f = gt.custom_rule(lambda x: x * x)
        f.defvjp(lambda x: (x * x, x), lambda x, ct: (3 * gt.xp.conj(x) * ct,))
    else:
        f = gt.custom_rule(lambda x: x * x)
        f.defjvp(lambda p, t: (p[0] * p[0], 3 * p[0] * t[0]))
    x = gt.xp.asarray(gt.asarray(np.float32([0.5, -2.0, 4.0])), dtype=getattr(gt.xp, dtype, None))
    if backend_name == "torch" and dtype == "bfloat16":
        import torch

        x = gt.asarray(np.float32([0.5, -2.0, 4.0])).to(torch.bfloat16)
    ones = gt.xp.ones_like(x)
    for _ in range(3):
        y, pullback = gt.vjp(f, x)
        (ct,) = pullback(ones)
        dy = gt.jvp(f, (x,), (ones,))[1]
        assert dtype in str(y.dtype) and ct.dtype == dy.dtype == x.dtype
        for found in (ct, dy):
            real = gt.xp.asarray(found.real, dtype=gt.xp.float32)
            np.testing.assert_array_equal(np.asarray(real), [1.5, -6.0, 12.0])
