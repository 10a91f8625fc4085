"""Gradient edits change derivatives but no bit of the values, in every transform."""

from __future__ import annotations

import math

import numpy as np
import pytest

from gradtools import DisconnectedInputError, GradtoolsError
from gradtools.errors import DisconnectedInputWarning
from tests.support.native import MIXES, NATIVE, second_order


@pytest.fixture
def native(backend_name):
    return NATIVE[backend_name]


def same(found, expected, rtol=1e-13):
    found, expected = np.asarray(found), np.asarray(expected)
    assert found.shape == expected.shape
    np.testing.assert_allclose(found, expected, rtol=rtol, atol=0)


def number(x):
    return float(x)


EDITS = {
    "reverse": lambda gt, x: gt.reverse_gradient(x, 0.5),
    "scale": lambda gt, x: gt.scale_gradient(x, 3.0),
    "stop": lambda gt, x: gt.stop_gradient(x),
    "clip_norm": lambda gt, x: gt.clip_gradient(x, max_norm=1.0),
    "clip_value": lambda gt, x: gt.clip_gradient(x, max_value=0.5),
    "transform": lambda gt, x: gt.transform_gradient(x, lambda c: c),
    "known": lambda gt, x: gt.replace_gradient(x, gt.stop_gradient(x)),
    "straight_through": lambda gt, x: gt.straight_through(lambda x: x)(x),
}
LINEAR = ("reverse", "scale", "straight_through")
REVERSE_ONLY = ("clip_norm", "clip_value", "transform", "known")


@pytest.fixture(params=EDITS)
def edit(request, gt):
    return lambda x: EDITS[request.param](gt, x)


# --- values --------------------------------------------------------------------------------


def _words(size, mantissa):
    """Return the bits of two NaNs, -0, 0, inf, -inf, the least denormal, 1 and the maximum."""
    sign, inf = 1 << 8 * size - 1, (1 << 8 * size - 1) - (1 << mantissa)
    one = (inf >> 1) & ~((1 << mantissa) - 1)
    quiet = inf | 1 << mantissa - 1 | 5
    return [quiet, inf | 1, sign, 0, inf, sign | inf, 1, one, inf - 1]


_WORDS = {
    "float16": _words(2, 10),
    "bfloat16": _words(2, 7),
    "float32": _words(4, 23),
    "float64": _words(8, 52),
}
_DTYPES = (*_WORDS, "complex64", "complex128")


def hard_numbers(native, dtype):
    """Return an array of the given dtype with the special numbers in `_WORDS`."""
    part = {"complex64": "float32", "complex128": "float64"}.get(dtype, dtype)
    size = {"float16": 2, "bfloat16": 2, "float32": 4, "float64": 8}[part]
    words = np.array(_WORDS[part], f"u{size}")
    if part != dtype:
        words = np.stack([words, words[::-1]], -1).reshape(-1)
    if native.name == "torch":
        import torch

        return torch.frombuffer(bytearray(words.tobytes()), dtype=getattr(torch, dtype)).clone()
    import jax.numpy as jnp

    return jnp.asarray(np.frombuffer(words.tobytes(), jnp.dtype(dtype)))


@pytest.mark.parametrize("dtype", _DTYPES)
def test_the_value_passes_through_bit_for_bit_while_it_is_differentiated(edit, gt, native, dtype):
    x = hard_numbers(native, dtype)
    y, _ = gt.vjp(edit, x)
    assert native.dtype(y) == dtype
    assert native.bits(y) == native.bits(x)


@pytest.mark.parametrize("name", LINEAR)
def test_the_value_passes_through_bit_for_bit_in_forward_mode(gt, native, name):
    x = hard_numbers(native, "float64")
    y, _ = gt.jvp(lambda x: EDITS[name](gt, x), (x,), (x,))
    assert native.bits(y) == native.bits(x)


# --- pytrees -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("reverse", ([-1.0, -1.0], -1.5)),
        ("scale", ([6.0, 6.0], 9.0)),
        ("stop", ([0.0, 0.0], 0.0)),
        ("clip_value", ([0.5, 0.5], 0.5)),
        ("clip_norm", ([2 / math.sqrt(17), 2 / math.sqrt(17)], 3 / math.sqrt(17))),
        ("transform", ([2.0, 2.0], 3.0)),
        ("known", ([5.0, 6.0], 7.0)),
    ],
)
def test_every_leaf_of_a_tree_is_edited(gt, native, name, expected):
    tree = {"a": native.array([5.0, 6.0]), "b": native.array(7.0), "n": native.array(1)}

    def f(a, b):
        out = EDITS[name](gt, {"a": a, "b": b, "n": tree["n"], "nothing": None})
        return 2 * out["a"].sum() + 3 * out["b"]

    a, b = gt.grad(f, (0, 1), disconnected_inputs="zeros")(tree["a"], tree["b"])
    same(gt.to_numpy(a), expected[0])
    same(gt.to_numpy(b), expected[1])


# --- scales --------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "complex64", "complex128"])
def test_a_scale_does_not_change_the_dtype_of_value_or_gradient(gt, native, dtype):
    x = native.array([1.0, 2.0], dtype)
    for scale in (0.5, np.float64(0.5), gt.asarray(np.float64(0.5)), gt.asarray(2)):
        y, pullback = gt.vjp(lambda x, scale=scale: gt.scale_gradient(x, scale), x)
        (g,) = pullback(x)
        assert native.dtype(y) == native.dtype(g) == dtype


@pytest.mark.slow_at("jax")
def test_a_scale_may_be_an_array_that_broadcasts(gt, rng):
    x = gt.asarray(rng.normal(size=(2, 3)))
    ct = rng.normal(size=(2, 3))
    for shape in [(), (1,), (3,), (2, 1), (1, 3), (2, 3)]:
        scale = rng.normal(size=shape)
        _, pullback = gt.vjp(lambda x, s=scale: gt.reverse_gradient(x, gt.asarray(s)), x)
        same(gt.to_numpy(pullback(gt.asarray(ct))[0]), -scale * ct)
        _, pushed = gt.jvp(
            lambda x, s=scale: gt.reverse_gradient(x, gt.asarray(s)), (x,), (gt.asarray(ct),)
        )
        same(gt.to_numpy(pushed), -scale * ct)


@pytest.mark.sweep_at("torch")
def test_a_scale_may_be_traced_and_scheduled_without_a_second_trace(gt, native):
    traces = []

    def counting(graph, inputs):
        traces.append(graph)
        return graph.forward

    def step(x, i):
        if native.name == "jax":
            traces.append(i)
        scale = i / 10.0
        return gt.grad(lambda x: (gt.reverse_gradient(x, scale) ** 2).sum())(x)

    options = {} if native.name == "jax" else {"backend": counting, "fullgraph": True}
    compiled = gt.compile(step, **options)
    x = native.array([1.0, 2.0])
    for i in range(1, 6):
        found = compiled(x, native.array(float(i)))
        same(gt.to_numpy(found), np.array([-2.0, -4.0]) * i / 10)
    assert len(traces) == 1


# --- second and third order of the linear edits -----------------------------------------------


@pytest.mark.slow_at(("jax", "1.0", "rr"))
@pytest.mark.parametrize("mix", MIXES)
@pytest.mark.parametrize("scale", [1.0, 0.5, 3.0])
def test_the_hessian_of_a_reversed_function_is_the_squared_scale_times_its_own(gt, rng, mix, scale):
    x, v, w = (rng.normal(size=4) for _ in range(3))
    a = rng.normal(size=(4, 4))
    f = lambda y: ((gt.asarray(a) @ y) ** 3).sum()
    hessian = a.T @ np.diag(6 * (a @ x)) @ a
    args = [gt.asarray(z) for z in (x, v, w)]
    found = second_order(gt, mix, lambda x: f(gt.reverse_gradient(x, scale)), *args)
    same(number(found), scale**2 * (w @ hessian @ v), rtol=1e-12)


@pytest.mark.parametrize("mix", MIXES)
def test_a_scale_given_as_an_array_enters_the_hessian_from_both_sides(gt, rng, mix):
    x, v, w, s = (rng.normal(size=3) for _ in range(4))
    a = rng.normal(size=(3, 3))
    hessian = a.T @ np.diag(6 * (a @ x)) @ a
    f = lambda x: ((gt.asarray(a) @ gt.scale_gradient(x, gt.asarray(s))) ** 3).sum()
    found = second_order(gt, mix, f, *(gt.asarray(z) for z in (x, v, w)))
    same(number(found), (s * w) @ hessian @ (s * v), rtol=1e-12)


# --- clip_gradient -------------------------------------------------------------------------


def clipped(gt, cts, **bounds):
    """Return the input cotangents of clip_gradient for the given output cotangents."""
    arrays = [
        c if hasattr(c, "requires_grad") or hasattr(c, "aval") else gt.asarray(c) for c in cts
    ]
    _, pullback = gt.vjp(lambda *xs: gt.clip_gradient(xs, **bounds), *arrays)
    return pullback(tuple(arrays))


_INF, _NAN, _HALF = math.inf, math.nan, 1 / math.sqrt(2)
# Cotangents (and dtype), bounds, expected result, relative error.
CLIPPED = {
    # The division by the norm adds no epsilon.
    "a norm at the bound": ([[3.0, 4.0]], {"max_norm": 5.0}, [[3.0, 4.0]], 0),
    "all leaves": ([[3.0, 0.0], [4.0]], {"max_norm": 0.5}, [[0.3, 0.0], [0.4]], 1e-13),
    "values first": ([[3.0, -100.0]], {"max_norm": 2.5, "max_value": 4.0}, [[1.5, -2.0]], 0),
    "moduli": ([[3 + 4j, 0.3j, 0j, -5j]], {"max_value": 1.0}, [[0.6 + 0.8j, 0.3j, 0j, -1j]], 1e-13),
    "a complex norm": ([[3 + 4j, 12j]], {"max_norm": 1.3}, [[0.3 + 0.4j, 1.2j]], 1e-13),
    "other dtypes": (
        [([3.0], "float32"), ([4j], "complex128"), ([12.0], "float64")],
        {"max_norm": 1.3},
        [[0.3], [0.4j], [1.2]],
        1e-7,
    ),
    "zeros, norm": ([[0.0, 0.0], [0j]], {"max_norm": 1.0}, [[0.0, 0.0], [0j]], 0),
    "zeros, max_norm=0": ([[0.0], [0j]], {"max_norm": 0.0}, [[0.0], [0j]], 0),
    "max_norm=0": ([[1.0, -2.0]], {"max_norm": 0.0}, [[0.0, 0.0]], 0),
    "max_value=0": ([[1.0, -2.0, 0.0]], {"max_value": 0.0}, [[0.0, 0.0, 0.0]], 0),
    "max_norm=inf": ([[1.0], [1 + 2j]], {"max_norm": _INF}, [[1.0], [1 + 2j]], 0),
    "NaN, value": ([[_NAN, 2.0, -3.0]], {"max_value": 1.0}, [[_NAN, 1.0, -1.0]], 0),
    "NaN, modulus": ([[_NAN + 1j, 2j]], {"max_value": 1.0}, [[complex(_NAN, _NAN), 1j]], 0),
    "infinity": ([[_INF, -_INF, 1.0]], {"max_value": 2.0}, [[2.0, -2.0, 1.0]], 0),
    **{
        f"{size} in float32": (
            [([size, size], "float32")],
            {"max_norm": np.float32(size / 2)},
            [[size * _HALF / 2, size * _HALF / 2]],
            5e-7,
        )
        for size in (1e30, 1e-30, 3e38, 1e-36)
    },
    **{
        f"complex64, {bound}": (
            [([1e30 + 1e30j], "complex64")],
            {bound: 1.0},
            [[(1 + 1j) * _HALF]],
            5e-7,
        )
        for bound in ("max_norm", "max_value")
    },
    "float16": ([([6e4, 6e4], "float16")], {"max_norm": 1.0}, [[_HALF, _HALF]], 4e-3),
    "bfloat16": ([([3e38, 3e38], "bfloat16")], {"max_norm": 1.0}, [[_HALF, _HALF]], 4e-3),
    # The unscaled sum of 65536 ones stops at 256 in bfloat16 and overflows in float16.
    "a long float16": ([([1.0] * 65536, "float16")], {"max_norm": 128.0}, [[0.5] * 65536], 0),
    "an empty leaf": (
        [np.zeros((0, 3)), [3.0, 4.0]],
        {"max_norm": 1.0, "max_value": 10.0},
        [np.zeros((0, 3)), [0.6, 0.8]],
        1e-13,
    ),
}


@pytest.mark.parametrize("name", CLIPPED)
def test_what_clip_gradient_makes_of_a_cotangent(gt, native, name):
    given, bounds, expected, rtol = CLIPPED[name]
    cts = [native.array(*c) if isinstance(c, tuple) else native.array(c) for c in given]
    for found, ct, wanted in zip(clipped(gt, cts, **bounds), cts, expected, strict=True):
        assert native.dtype(found) == native.dtype(ct)
        found = gt.to_numpy(found)
        assert found.shape == np.shape(wanted)
        found = found.astype(complex if np.iscomplexobj(found) else float)
        np.testing.assert_allclose(found, wanted, rtol=rtol, atol=0)


# --- transform_gradient --------------------------------------------------------------------


def test_transform_replaces_the_cotangent_of_the_whole_tree(gt):
    x = {"a": gt.asarray(np.array([1.0, 2.0])), "b": gt.asarray(np.array(3.0))}

    def swap_sizes(c):
        return {"a": c["a"] * c["b"], "b": c["b"] + c["a"].sum()}

    def f(x):
        y = gt.transform_gradient(x, swap_sizes)
        return (5 * y["a"]).sum() + 7 * y["b"]

    g = gt.grad(f)(x)
    assert gt.to_numpy(g["a"]).tolist() == [35.0, 35.0] and number(g["b"]) == 17.0


class _Holder:
    """An object that is not a pytree."""

    def __init__(self, x):
        self.x = x


@pytest.mark.parametrize("name", [n for n in EDITS if n != "straight_through"])
def test_an_object_in_which_no_array_is_found_is_refused_and_not_left_unedited(gt, name):
    x = gt.asarray(np.ones(2))
    for held in (_Holder(x), {"a": x}.values(), lambda x: x):
        with pytest.raises(GradtoolsError, match=r"which contains no array; expected an array"):
            EDITS[name](gt, held)
    for plain in (None, [], "mode", 3, 2.0, np.ones(2), [_Holder(x), "mode"]):
        assert repr(EDITS[name](gt, plain)) == repr(plain)


@pytest.mark.slow_at("jax")
def test_transform_and_clip_see_the_cotangent_in_the_convention_of_gradtools(gt, native):
    """The gradient of Re(conj(w) z) is w; outside of edits, JAX represents it by its conjugate."""
    z, w = native.array(1 + 2j), native.array(3 - 4j)
    seen = []

    def turn(c):
        seen.append(c)
        return c * 1j

    def f(z):
        y = gt.transform_gradient(z, turn)
        return y.real * w.real + y.imag * w.imag

    assert complex(gt.grad(f)(z)) == (3 - 4j) * 1j
    outside = complex(native.grad(f)(z))
    assert outside == ((3 - 4j) * 1j if native.name == "torch" else ((3 - 4j) * 1j).conjugate())


def test_the_same_function_may_be_transformed_with_other_closures(gt):
    """A call must not reuse the closure that an earlier call passed to transform_gradient."""
    x = gt.asarray(1.0)
    for k in range(5):
        found = gt.grad(lambda x, k=k: gt.transform_gradient(x, lambda c: c * k))(x)
        assert number(found) == k


# --- replace_gradient ----------------------------------------------------------------------


def test_known_gradient_is_what_was_given_whatever_comes_in(gt):
    x, dx = gt.asarray(np.array([1.0, 2.0])), gt.asarray(np.array([5.0, -7.0]))
    for after in (lambda y: (y**2).sum(), lambda y: (0 * y).sum(), lambda y: -y.sum() * 1e9):
        found = gt.grad(lambda x, after=after: after(gt.replace_gradient(x, dx)))(x)
        assert gt.to_numpy(found).tolist() == [5.0, -7.0]


def test_known_gradient_of_what_does_not_reach_the_output_is_not_delivered(gt):
    x, dx = gt.asarray(2.0), gt.asarray(5.0)

    def f(x):
        gt.replace_gradient(x, dx)
        return x * 3

    assert number(gt.grad(f)(x)) == 3.0
    with pytest.raises(DisconnectedInputError):
        gt.grad(lambda x: gt.stop_gradient(gt.replace_gradient(x, dx)))(x)


def test_known_gradient_is_differentiated_with_respect_to_what_was_given(gt):
    x, dx = gt.asarray(2.0), gt.asarray(5.0)
    gradient = lambda dx: gt.grad(lambda x: gt.replace_gradient(x**2, dx**2) ** 3)(x)
    assert number(gradient(dx)) == 100.0
    assert number(gt.grad(gradient)(dx)) == 40.0


def test_what_is_edited_may_be_its_own_scale_or_its_own_known_gradient(gt):
    x = gt.asarray(3.0)
    assert number(gt.grad(lambda x: gt.replace_gradient(x, x) * 7)(x)) == 3.0
    assert number(gt.grad(lambda x: gt.scale_gradient(x, x) * 7)(x)) == 21.0
    assert number(gt.grad(gt.grad(lambda x: gt.scale_gradient(x, x) * 7))(x)) == 7.0


def test_known_gradient_of_complex_arrays_is_in_the_convention_of_gradtools(gt, native):
    z, dz = native.array(1 + 2j), native.array(3 - 4j)
    f = lambda z: abs(gt.replace_gradient(z, dz)) ** 2
    assert complex(gt.grad(f)(z)) == 3 - 4j


# --- edits without forward mode ----------------------------------------------------------------


@pytest.mark.parametrize("name", REVERSE_ONLY)
def test_forward_mode_in_another_argument_passes_a_reverse_only_edit(gt, name):
    x = gt.asarray(np.ones(2))
    _, pushed = gt.jvp(lambda y: EDITS[name](gt, x) * y, (x,), (x,))
    assert gt.to_numpy(pushed).tolist() == [1.0, 1.0]


def clip_jacobian(c, bound):
    """Return the Jacobian of c -> bound c / |c| for |c| > bound."""
    norm = np.linalg.norm(c)
    return bound * (np.eye(len(c)) - np.outer(c, c) / norm**2) / norm


@pytest.mark.slow_at("jax")
@pytest.mark.sweep_at(("jax", "1.0"))
@pytest.mark.parametrize("size", [1.0, 100.0])
def test_a_clip_is_met_again_at_second_order(gt, size):
    """At second order, pull back through c -> c / |c| at 2x and x -> 2x, and clip the result."""
    x, v = np.array([3.0, 4.0]), size * np.array([1.0, 2.0])
    product = 2 * clip_jacobian(2 * x, 1.0) @ v
    product *= min(1, 1 / np.linalg.norm(product))
    assert (np.linalg.norm(product) == pytest.approx(1.0)) == (size > 1)
    f = lambda x: (gt.clip_gradient(x, max_norm=1.0) ** 2).sum()
    at, along = gt.asarray(x), gt.asarray(v)
    found = gt.grad(lambda x: (gt.grad(f)(x) * along).sum())(at)
    same(gt.to_numpy(found), product, rtol=1e-12)
    for mode in ("auto", "reverse_over_reverse"):
        (g,), (h,) = gt.hvp(f, (at,), (along,), mode=mode)
        same(gt.to_numpy(g), [0.6, 0.8])
        same(gt.to_numpy(h), product, rtol=1e-12)


def test_a_transform_is_met_again_at_second_order(gt):
    """For c -> 3c + 1 the gradient is 3 f' + 1, and its pullback of v is 3 (3 f'' v) + 1."""
    x, v = gt.asarray(2.0), gt.asarray(5.0)
    f = lambda x: gt.transform_gradient(x, lambda c: 3 * c + 1) ** 3
    (g,), (h,) = gt.hvp(f, (x,), (v,))
    assert number(g) == 3 * 12 + 1
    assert number(h) == 3 * (12 * 3 * 5) + 1


def test_the_second_derivative_of_a_known_gradient_is_zero(gt):
    x, dx = gt.asarray(2.0), gt.asarray(5.0)
    f = lambda x: gt.replace_gradient(x, dx) ** 3
    with pytest.warns(DisconnectedInputWarning):
        assert number(gt.grad(gt.grad(f))(x)) == 0.0
    (g,), (h,) = gt.hvp(f, (x,), (x,))
    assert (number(g), number(h)) == (5.0, 0.0)


def test_two_edits_of_one_path_act_in_the_order_of_the_backward_pass(gt):
    x = gt.asarray(np.array([3.0, 4.0]))
    late = lambda x: (gt.reverse_gradient(gt.clip_gradient(x, max_norm=1.0), 5.0) ** 2).sum()
    early = lambda x: (gt.clip_gradient(gt.reverse_gradient(x, 5.0), max_norm=1.0) ** 2).sum()
    same(gt.to_numpy(gt.grad(late)(x)), [-0.6, -0.8])
    same(gt.to_numpy(gt.grad(early)(x)), [-3.0, -4.0])


# --- straight_through ------------------------------------------------------------------------


def test_straight_through_has_the_value_of_f_and_the_derivative_of_the_identity(gt):
    x = gt.asarray(np.array([0.2, 1.7, -0.5]))
    rounded = gt.straight_through(lambda x: gt.xp.round(x))
    value, pullback = gt.vjp(rounded, x)
    assert gt.to_numpy(value).tolist() == [0.0, 2.0, -0.0]
    assert gt.to_numpy(pullback(x)[0]).tolist() == [0.2, 1.7, -0.5]
    assert gt.to_numpy(gt.jvp(rounded, (x,), (x,))[1]).tolist() == [0.2, 1.7, -0.5]


def test_straight_through_is_exact_for_large_numbers(gt, native):
    """For large x, x + stop_gradient(f(x) - x) loses digits of f(x); straight_through does not."""
    for dtype in ("float32", "float64"):
        x = native.array([1e30, -1e25, 1.0, np.nan, np.inf], dtype)
        tiny = native.array([1e-20, 3e-7, 0.1, -0.0, 1e-40], dtype)
        y, _ = gt.vjp(gt.straight_through(lambda x, tiny=tiny: tiny), x)
        assert native.bits(y) == native.bits(tiny)


@pytest.mark.slow_at("jax")
def test_a_boolean_or_integer_result_is_cast_to_the_surrogates_dtype(gt, native):
    x = native.array([0.2, 1.7], "float32")
    xp = gt.xp
    for f, expected in [
        (lambda x: x > 0.5, [0.0, 1.0]),
        (lambda x: xp.astype(x, xp.int32), [0.0, 1.0]),
    ]:
        y, pullback = gt.vjp(gt.straight_through(f, lambda x: x * 3), x)
        assert native.dtype(y) == "float32" and gt.to_numpy(y).tolist() == expected
        assert gt.to_numpy(pullback(y)[0]).tolist() == [3 * e for e in expected]


def hard(x):
    """Return a step function of x, computed by NumPy."""
    return np.where(np.asarray(x) > 0.5, 1.0, 0.0)


def test_f_may_be_a_numpy_function_eagerly_differentiated_and_in_both_modes(gt, native):
    x = native.array([0.2, 1.7])
    g = gt.straight_through(hard, lambda x: x**2)
    assert gt.to_numpy(g(x)).tolist() == [0.0, 1.0]
    value, pullback = gt.vjp(g, x)
    assert gt.to_numpy(value).tolist() == [0.0, 1.0]
    same(gt.to_numpy(pullback(native.array([1.0, 1.0]))[0]), [0.4, 3.4])
    value, pushed = gt.jvp(g, (x,), (native.array([1.0, 1.0]),))
    assert gt.to_numpy(value).tolist() == [0.0, 1.0]
    same(gt.to_numpy(pushed), [0.4, 3.4])


@pytest.mark.parametrize("mix", MIXES)
def test_the_surrogate_is_right_at_second_order_in_all_mixes(gt, rng, mix):
    x, v, w = (rng.normal(size=3) for _ in range(3))
    a = rng.normal(size=(3, 3))
    surrogate = lambda x: ((gt.asarray(a) @ x) ** 3).sum()
    f = gt.straight_through(lambda x: x.sum() * 0 + 1, surrogate)
    found = second_order(gt, mix, f, *(gt.asarray(z) for z in (x, v, w)))
    same(number(found), w @ (a.T @ np.diag(6 * (a @ x)) @ a) @ v, rtol=1e-12)


@pytest.mark.slow_at("jax")
def test_straight_through_takes_several_arguments_and_keywords_and_trees(gt):
    def f(x, y, *, shift):
        return {"hard": (x > y), "sum": x + y + shift}

    def soft(x, y, *, shift):
        return {"hard": x * y, "sum": x**2 + y + 0 * shift}

    g = gt.straight_through(f, soft)
    x, y = gt.asarray(3.0), gt.asarray(2.0)
    out, pullback = gt.vjp(lambda x, y: g(x, y, shift=10.0), x, y)
    assert (number(out["hard"]), number(out["sum"])) == (1.0, 15.0)
    one = gt.asarray(1.0)
    dx, dy = pullback({"hard": one, "sum": one})
    assert (number(dx), number(dy)) == (2.0 + 6.0, 3.0 + 1.0)


def test_f_is_called_once_and_sees_arguments_without_a_derivative(gt, backend_name):
    seen = []

    def f(x):
        seen.append(x)
        return x * 2

    assert number(gt.grad(gt.straight_through(f, lambda x: x**2))(gt.asarray(3.0))) == 6.0
    assert len(seen) == 1
    if backend_name == "torch":
        assert not seen[0].requires_grad


# --- inside and outside of the frameworks' own transforms ----------------------------------------

# Maps the name of an edit to the gradient of sum(edit(x)^3).
CASES = {
    "reverse": lambda x: -0.5 * 3 * x**2,
    "scale": lambda x: 3.0 * 3 * x**2,
    "clip_norm": lambda x: 3 * x**2 / max(1, np.linalg.norm(3 * x**2)),
    "clip_value": lambda x: np.clip(3 * x**2, -0.5, 0.5),
    "transform": lambda x: 3 * x**2,
    "known": lambda x: x,
    "straight_through": lambda x: 3 * x**2,
}


@pytest.fixture(params=CASES)
def case(request, gt):
    """Return the name of an edit, a scalar function with the edit, and the expected gradient."""
    name = request.param
    return name, lambda x: (EDITS[name](gt, x) ** 3).sum(), CASES[name]


X = np.array([0.3, -1.2, 0.7])
XS = np.array([[0.3, -1.2, 0.7], [0.1, 0.2, -0.1], [2.0, 1.0, -3.0]])


@pytest.mark.slow_at(("reverse", "jax"), ("clip_value", "jax"))
@pytest.mark.sweep_at(("clip_norm", "jax"))
def test_a_batch_is_edited_example_by_example(case, gt, native):
    _, f, gradient = case
    expected = np.stack([gradient(x) for x in XS])
    for found in (
        gt.vmap(gt.grad(f))(native.array(XS)),
        native.vmap(native.grad(f))(native.array(XS)),
        gt.vmap(native.grad(f))(native.array(XS)),
        gt.grad(lambda xs: gt.vmap(f)(xs).sum())(native.array(XS)),
    ):
        same(np.asarray(found), expected, rtol=1e-12)


@pytest.mark.slow_at("jax")
@pytest.mark.sweep_at(
    ("torch", "reverse"), ("torch", "scale"), ("torch", "clip_value"), ("torch", "clip_norm")
)
@pytest.mark.parametrize("name", ["reverse", "scale", "clip_value", "clip_norm", "transform"])
def test_an_edit_in_a_loop_is_met_at_every_turn(gt, native, name):
    """The loop runs x -> 2 edit(x) three times; the expected pullback is computed by hand."""
    cotangent = {
        "reverse": lambda c: -0.5 * c,
        "scale": lambda c: 3.0 * c,
        "clip_value": lambda c: np.clip(c, -0.5, 0.5),
        "clip_norm": lambda c: c / max(1, np.linalg.norm(c)),
        "transform": lambda c: c,
    }[name]
    c = np.array([1.0, -2.0, 0.1])
    expected = c
    for _ in range(3):
        expected = cotangent(2 * expected)
    weights = native.array(c)
    f = lambda x: (native.loop(lambda x: 2 * EDITS[name](gt, x), x, 3) * weights).sum()
    same(gt.to_numpy(gt.grad(f)(native.array(X))), expected)
    if native.name == "jax" or name != "transform":
        compiled = gt.compile(gt.grad(f), **native.compile_options)
        same(gt.to_numpy(compiled(native.array(X))), expected)


@pytest.mark.parametrize("tree", [False, True])
def test_a_transform_may_depend_on_an_outer_argument(gt, tree):
    """The gradient with respect to x is 2 x k, which is differentiated with respect to k."""
    x = gt.asarray(np.array([1.0, 2.0, 3.0]))

    def gradient(k):
        scaled = k * 1  # in PyTorch `scaled` is not a leaf tensor
        if tree:
            edit = lambda x: gt.transform_gradient({"a": x}, lambda g: {"a": g["a"] * scaled})["a"]
        else:
            edit = lambda x: gt.transform_gradient(x, lambda g: g * scaled)
        return gt.grad(lambda x: (edit(x) ** 2).sum())(x)

    np.testing.assert_allclose(gt.to_numpy(gradient(x)), [2, 8, 18])
    jacobian = gt.jacobian(gradient)(x)
    np.testing.assert_allclose(gt.to_numpy(jacobian), np.diag([2.0, 4.0, 6.0]))
    second = gt.grad(lambda k: (gradient(k) ** 2).sum())(x)
    np.testing.assert_allclose(gt.to_numpy(second), [8, 64, 216])


def test_a_captured_leaf_of_a_transform_gets_no_gradient_of_first_order(gt, backend_name):
    if backend_name != "torch":
        pytest.skip("JAX has no leaf tensors")
    x, w = (gt.asarray(np.ones(3)).requires_grad_() for _ in range(2))
    captured = w * 2
    y = gt.transform_gradient(x * 1, lambda g: g * captured)
    y += 1  # write to the output of the edit in place
    y.sum().backward()
    assert w.grad is None and x.grad.tolist() == [2, 2, 2]
    captured.sum().backward()  # the graph of `captured` has not been freed
    assert w.grad.tolist() == [2, 2, 2]
