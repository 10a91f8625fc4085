"""Tests derivative operators on the scenario table and on functions derived by hand."""

from __future__ import annotations

from importlib import import_module
from typing import Any, NamedTuple

import numpy as np
import pytest

from gradtools.errors import GradtoolsError
from gradtools.testing import check_derivatives
from tests.support.numpy_trees import close, leaves, lift, lower, slope, tree_map
from tests.support.scenario_table import forms, program_of, smooth_programs

# tolerance for sixth-order finite differences of functions that vary on a scale of one
DIFFERENCE = 1e-9
EXACT = 1e-12
PROGRAMS = [program.name for program in smooth_programs()]
# Programs whose tangents PyTorch differentiates wrongly (torch#192540), or that vmap does not
# support.
FIRST_ORDER = ("solve", "determinant", "log determinant", "a branch on values")


@pytest.mark.sampled(torch=(20, 30), jax=(6, 20))
@pytest.mark.parametrize("name", PROGRAMS)
def test_derivatives_are_those_of_differences(backend_name, name):
    """Compare with finite differences; `test_operators.py` compares with the framework itself."""
    program = program_of(name)
    order = 1 if name in FIRST_ORDER else 2
    f = lambda *args: program.function(import_module(f"gradtools.{backend_name}"), *args)
    args = tree_map(np.asarray, tuple(program.args))
    check_derivatives(f, args, backend_name, order=order)


# --- first order -------------------------------------------------------------------------


def test_gradients_have_the_tree_shapes_and_dtypes_of_the_arguments(gt, backend_name):
    p = {"b": np.ones((2, 0)), "a": [np.ones(2, np.float32), None, np.ones(3) + 1j]}
    f = lambda p: gt.xp.sum(p["a"][0] ** 2) + gt.xp.sum(gt.xp.abs(p["a"][2]) ** 2)
    found = gt.grad(lambda p: f(p) + gt.xp.sum(p["b"]))(lift(backend_name, p))
    expected = {"b": p["b"], "a": [2 * p["a"][0], None, 2 * p["a"][2]]}
    close(lower(found), expected, 0)
    assert [x.dtype for x in leaves(lower(found))] == [x.dtype for x in leaves(expected)]


def test_gradients_come_in_the_order_of_argnums(gt, backend_name, rng):
    x, y, z = (rng.normal(size=2) for _ in range(3))
    f = lambda x, y, z, *, power: gt.xp.sum(gt.xp.sin(x) * y**power + z * x)
    found = gt.grad(f, argnums=(2, 0))(*lift(backend_name, (x, y, z)), power=2)
    close(lower(found), (x, np.cos(x) * y**2 + z), EXACT)


def test_the_pullback_is_linear_over_the_reals_and_may_be_called_again(gt, backend_name, rng):
    z, a, b = (rng.normal(size=3) + 1j * rng.normal(size=3) for _ in range(3))
    _, pullback = gt.vjp(lambda z: gt.xp.conj(z) * z * z, lift(backend_name, z))
    pulled = lambda c: lower(pullback(lift(backend_name, c))[0])
    close(pulled(a - 2.5 * b), pulled(a) - 2.5 * pulled(b), EXACT)


# --- Jacobians ---------------------------------------------------------------------------

IN_CHUNKS = (
    "output of a tree",
    "network of two layers",
    "complex from real",
    *[f.name for f in [*forms()][2:5]],
)


@pytest.mark.sampled(torch=(36, 36), jax=(9, 36))
@pytest.mark.parametrize("chunk_size", [1, 2])
@pytest.mark.parametrize("mode", ["auto", "forward", "reverse"])
@pytest.mark.parametrize("name", IN_CHUNKS)
def test_a_jacobian_in_chunks_is_the_whole_one(gt, backend_name, name, mode, chunk_size):
    if (backend_name, name) == ("jax", "a branch on values") and mode == "forward":
        pytest.skip("JAX traces the loop over chunks, so f cannot branch on values")
    program = program_of(name)
    f, args = program.bind(gt), lift(backend_name, program.args)
    argnums = tuple(range(len(args)))
    whole = lower(gt.jacobian(f, argnums, "reverse" if mode == "forward" else "forward")(*args))
    close(lower(gt.jacobian(f, argnums, mode, chunk_size)(*args)), whole, EXACT)


@pytest.mark.slow_at("jax")
def test_jacobian_puts_the_arguments_tree_at_each_leaf_of_the_output(gt, backend_name, rng):
    p = lift(backend_name, {"a": rng.normal(size=2), "b": [rng.normal(size=(3, 1))]})
    f = lambda p, s: {"y": p["a"] * s, "z": (gt.xp.sum(p["b"][0]),)}
    found = lower(gt.jacobian(f)(p, 2.0))
    assert set(found) == {"y", "z"} and set(found["y"]) == {"a", "b"}
    assert found["y"]["b"][0].shape == (2, 3, 1)
    close(found["y"]["a"], 2 * np.eye(2), 0)
    close(found["z"][0]["b"][0], np.ones((3, 1)), 0)


@pytest.mark.parametrize(
    "options",
    [{"mode": "forward"}, {"mode": "reverse"}, {"chunk_size": 1}, {"sparsity": np.eye(2)}],
    ids=lambda options: "".join(options),
)
def test_jacobian_names_an_output_that_has_no_derivative(gt, backend_name, options):
    pytest.importorskip("scipy")
    x = lift(backend_name, np.array([1.0, 2.0]))
    with pytest.raises(GradtoolsError, match=r"got None\. Is a return statement missing\?"):
        gt.jacobian(lambda x: None, **options)(x)
    with pytest.raises(GradtoolsError, match=r"got a tuple of 2\. Return a floating-point number"):
        gt.jacobian(lambda x: (gt.xp.argmax(x), x > 1), **options)(x)


def test_jacobian_of_an_integer_output_leaf_is_none(gt, backend_name):
    x = lift(backend_name, np.array([1.0, 2.0]))
    found = gt.jacobian(lambda x: {"y": x * 3, "n": gt.xp.argmax(x)}, mode="reverse")(x)
    assert found["n"] is None
    close(lower(found["y"]), 3 * np.eye(2), 0)


# --- second order ------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["auto", "forward_over_reverse", "reverse_over_reverse"])
def test_hessian_of_one_argument_is_a_tree_of_trees_and_of_a_tuple_a_tuple_of_tuples(
    gt, backend_name, mode
):
    p = lift(backend_name, {"a": np.array([1.0, 2.0]), "b": np.array(3.0)})
    f = lambda p: gt.xp.sum(p["a"] ** 2) * p["b"]
    one = lower(gt.hessian(f, mode=mode)(p))
    close(one["a"]["a"], 6 * np.eye(2), EXACT)
    close(one["a"]["b"], np.array([2.0, 4.0]), EXACT)
    close(one["b"]["b"], np.array(0.0), 0)
    several = lower(gt.hessian(f, (0,), mode)(p))
    assert isinstance(several, tuple) and isinstance(several[0]["a"], tuple)
    close(several[0]["a"][0]["b"], one["a"]["b"], 0)


# --- third order -------------------------------------------------------------------------


def _forward(gt: Any, f: Any) -> Any:
    return lambda x: gt.jvp(f, (x,), (gt.xp.ones_like(x),))[1]


def _reverse(gt: Any, f: Any) -> Any:
    return lambda x: gt.vjp(f, x)[1](gt.xp.ones_like(x))[0]


def _linearized(gt: Any, f: Any) -> Any:
    return lambda x: gt.linearize(f, x)[1](gt.xp.ones_like(x))


WAYS = {"forward": _forward, "reverse": _reverse, "linearized": _linearized}


@pytest.mark.sampled(torch=(27, 27), jax=(4, 27))
@pytest.mark.parametrize("third", WAYS)
@pytest.mark.parametrize("second", WAYS)
@pytest.mark.parametrize("first", WAYS)
def test_the_third_derivative_is_right_in_every_mix_of_modes(
    gt, backend_name, first, second, third
):
    f = lambda x: gt.xp.sin(x) * x**3
    for way in (first, second, third):
        f = WAYS[way](gt, f)
    x = np.array(0.7)
    sin, cos = np.sin(x), np.cos(x)
    expected = -(x**3) * cos - 9 * x**2 * sin + 18 * x * cos + 6 * sin
    close(lower(f(lift(backend_name, x))), np.asarray(expected), EXACT)


@pytest.mark.slow_at(("jax", "None"))
@pytest.mark.parametrize("chunk_size", [None, 1, 2])
def test_the_jacobian_of_what_is_empty_is_empty(gt, backend_name, chunk_size):
    x = lift(backend_name, np.ones(3))
    jacobian = gt.jacobian(lambda x: (x[:0] * 2, x * 2), mode="reverse", chunk_size=chunk_size)
    empty, full = lower(jacobian(x))
    assert empty.shape == (0, 3)
    alone = gt.jacobian(lambda x: x[:0] * 2, mode="reverse", chunk_size=chunk_size)(x)
    assert lower(alone).shape == (0, 3)
    close(full, 2 * np.eye(3), 0)


@pytest.mark.slow_at("jax")
def test_a_closed_over_variable_of_an_outer_derivative_is_not_confused_with_the_inner_one(
    gt, backend_name
):
    for outer in WAYS.values():
        for inner in WAYS.values():
            f = lambda x: x * inner(gt, lambda y: x * y)(gt.xp.ones_like(x))
            found = outer(gt, f)(lift(backend_name, np.array(3.0)))
            close(lower(found), np.asarray(6.0), 0)


# --- per-example derivatives -------------------------------------------------------------


def _square_error(gt: Any) -> Any:
    return lambda p, x, y: (gt.xp.sum(p["w"] * x) + p["b"] - y) ** 2


@pytest.fixture
def regression(rng) -> Any:
    p = {"w": rng.normal(size=3), "b": np.asarray(rng.normal())}
    return p, rng.normal(size=(5, 3)), rng.normal(size=5)


@pytest.mark.slow_at(("jax", "1"), ("jax", "2"))
@pytest.mark.parametrize("chunk_size", [None, 1, 2, 5, 7])
def test_per_example_grad_is_the_closed_form_of_each_example(
    gt, backend_name, regression, chunk_size
):
    p, x, y = regression
    found = gt.per_example_grad(_square_error(gt), chunk_size=chunk_size)(
        *lift(backend_name, (p, x, y))
    )
    r = 2 * (x @ p["w"] + p["b"] - y)
    close(lower(found), {"w": r[:, None] * x, "b": r}, EXACT)


def test_per_example_grad_takes_axes_and_argnums(gt, backend_name, regression):
    p, x, y = regression
    fun = gt.per_example_grad(_square_error(gt), argnums=(1, 0), in_axes=(None, 1, -1))
    found = fun(*lift(backend_name, (p, x.T.copy(), y)))
    r = 2 * (x @ p["w"] + p["b"] - y)
    close(lower(found), (r[:, None] * p["w"], {"w": r[:, None] * x, "b": r}), EXACT)


def test_per_example_grad_shares_what_is_no_array(gt, backend_name):
    f = lambda w, x, name, k: w * x**k * (1.0 if name == "a" else 0.0)
    args = (*lift(backend_name, (np.array(2.0), np.array([1.0, 3.0]))), "a", 2)
    close(lower(gt.per_example_grad(f)(*args)), np.array([1.0, 9.0]), 0)


# --- minimizing and maximizing players ---------------------------------------------------


def test_minimax_negates_the_maximising_players_and_orders_by_argument(gt, backend_name):
    f = lambda a, b, c, d: a * a * b + b * c**3 + 0 * d
    args = lift(backend_name, tuple(np.array(v) for v in (2.0, 3.0, 5.0, 7.0)))
    value, grads = gt.minimax_value_and_grad(f, minimize=(2, -4), maximize=1)(*args)
    close(lower(value), np.array(12.0 + 375.0), 0)
    close(lower(grads), (np.array(12.0), np.array(-129.0), np.array(225.0)), 0)


# --- mixed partials ----------------------------------------------------------------------


@pytest.mark.slow_at("jax")
def test_mixed_partial_over_trees_equals_double_backward(gt, backend_name, rng):
    xp = gt.xp
    G = lambda z: {"s": xp.sin(z["a"]) * z["b"], "t": [xp.exp(z["b"])]}
    f = lambda y, g: xp.sum(y["p"] * g["s"] ** 2) + xp.sum(y["q"][0] ** 3 * g["t"][0])
    y = lift(backend_name, {"p": rng.normal(size=2), "q": (rng.normal(size=2),)})
    z, u = (lift(backend_name, {k: rng.normal(size=2) for k in "ab"}) for _ in range(2))
    found = gt.mixed_partial(f, G, y, z, u)
    inner = lambda y: gt.grad(lambda z: f(y, G(z)))(z)
    twice = gt.grad(lambda y: sum(xp.sum(u[k] * inner(y)[k]) for k in "ab"))(y)
    close(lower(found), lower(twice), EXACT)


# --- aux, keywords, argnums --------------------------------------------------------------


def test_aux_may_hold_anything(gt, backend_name):
    x = lift(backend_name, np.array([1.0, 2.0]))
    f = lambda x: (gt.xp.sum(x * x), {"name": "loss", "twice": 2 * x, "n": 3, "none": None})
    grads, aux = gt.grad(f, has_aux=True)(x)
    close(lower(grads), np.array([2.0, 4.0]), 0)
    assert (aux["name"], aux["n"], aux["none"]) == ("loss", 3, None)
    close(lower(aux["twice"]), np.array([2.0, 4.0]), 0)
    (value, aux), grads = gt.value_and_grad(f, has_aux=True)(x)
    assert float(value) == 5.0 and aux["name"] == "loss"
    out, pullback, aux = gt.vjp(f, x, has_aux=True)
    assert aux["name"] == "loss"
    close(lower(pullback(out))[0], np.array([10.0, 20.0]), 0)
    out, pushed, aux = gt.jvp(f, (x,), (x,), has_aux=True)
    assert aux["name"] == "loss" and float(pushed) == 10.0


def test_the_aux_of_vjp_and_jvp_carries_no_derivative(gt, backend_name):
    x = lift(backend_name, np.array(3.0))
    _, _, aux = gt.jvp(lambda x: (x * x, x**3), (x,), (x,), has_aux=True)
    assert float(aux) == 27.0
    if backend_name == "torch":
        import torch.autograd.forward_ad as forward_ad

        with forward_ad.dual_level():
            assert forward_ad.unpack_dual(aux).tangent is None


def test_the_order_of_keys_in_a_dict_does_not_matter(gt, backend_name):
    p, t = lift(backend_name, ({"b": np.array(2.0), "a": np.array(3.0)}, {"a": 1.0, "b": 0.0}))
    f = lambda p: {"y": p["a"] * p["b"], "x": p["a"]}
    assert float(gt.jvp(f, (p,), (t,))[1]["y"]) == 2.0
    _, pullback = gt.vjp(f, p)
    (g,) = pullback(lift(backend_name, {"x": np.array(0.0), "y": np.array(1.0)}))
    assert (float(g["a"]), float(g["b"])) == (2.0, 3.0)


# --- inside other transforms -------------------------------------------------------------


def test_a_derivative_inside_a_checkpoint_may_close_over_the_outer_variable(gt, backend_name):
    a, y = lift(backend_name, (np.array(0.5), np.array(3.0)))

    def f(a):
        inner = gt.checkpoint(lambda y: gt.grad(lambda z: gt.xp.sin(a * z) * z)(y))
        return inner(y) ** 2

    g = lambda a: np.sin(3 * a) + 3 * a * np.cos(3 * a)
    expected = 2 * g(0.5) * slope(lambda s: np.asarray(g(0.5 + s)))
    close(lower(gt.grad(f)(a)), np.asarray(expected), DIFFERENCE)


@pytest.mark.parametrize("operator", ["grad", "jacobian", "hessian", "per_example_grad"])
def test_operators_name_themselves_and_their_function(gt, operator):
    def energy(x):
        return x

    assert getattr(gt, operator)(energy).__name__ == f"{operator}(energy)"


# --- complex numbers ---------------------------------------------------------------------


@pytest.fixture
def z(rng) -> Any:
    return rng.normal(size=3) + 1j * rng.normal(size=3)


def test_the_complex_gradient_is_the_real_slope_plus_i_times_the_imaginary_one(gt, backend_name, z):
    f = lambda z: gt.xp.sum(gt.xp.imag(z * z * z) + gt.xp.real(z))
    found = lower(gt.grad(f)(lift(backend_name, z)))
    at = lambda dz: lower(f(lift(backend_name, z + dz)))
    for i in range(3):
        unit = np.eye(3)[i]
        re, im = slope(lambda s: at(s * unit)), slope(lambda s: at(1j * s * unit))
        assert abs(found[i] - (re + 1j * im)) < DIFFERENCE


@pytest.mark.slow_at("jax")
@pytest.mark.sweep_at(("jax", "reverse"))
@pytest.mark.parametrize("mode", ["forward", "reverse"])
def test_the_jacobian_of_a_complex_function_of_reals_is_complex(gt, backend_name, mode):
    x = np.array([0.3, 0.7])
    found = gt.jacobian(lambda x: gt.xp.exp(1j * x) * x, mode=mode)(lift(backend_name, x))
    close(lower(found), np.diag(np.exp(1j * x) * (1 + 1j * x)), EXACT)


class Graph(NamedTuple):
    """A container of float features and integer counts, like jraph's GraphsTuple."""

    x: Any
    n: Any


CONTAINERS = {
    "dict": lambda x, n: {"x": x, "n": n},
    "named tuple": Graph,
}


@pytest.mark.parametrize("container", CONTAINERS.values(), ids=CONTAINERS)
def test_integers_in_an_argument_are_constants_or_are_refused_by_name(gt, backend_name, container):
    x, n = (lift(backend_name, a) for a in (np.array([1.0, 2.0]), np.array([3, 4])))
    tree, tangent = container(x, n), container(x, None)
    parts = lambda p: (p["x"], p["n"]) if isinstance(p, dict) else p
    f = lambda p: container(*(lambda x, n: (x * n, 2 * n))(*parts(p)))

    def check(tree, expected):
        moved, none = parts(tree)
        close(lower(moved), expected, EXACT)
        if backend_name == "torch":
            assert none is None
        else:
            assert none.dtype.names == ("float0",) or none.dtype == [("float0", "V")]
            assert none.shape == (2,)

    product = np.array([3.0, 8.0])
    check(gt.vjp(f, tree)[1](container(x, None))[0], product)
    for dx in (tangent, gt.vjp(f, tree)[1](tangent)[0]):
        moved = product if dx is tangent else np.array([3.0, 4.0]) * product
        check(gt.jvp(f, (tree,), (dx,))[1], moved)
        check(gt.linearize(f, tree)[1](dx), moved)
    with pytest.raises(
        GradtoolsError, match=r"jvp: tangent 0.* its primal is an integer.*Pass None"
    ):
        gt.jvp(f, (tree,), (tree,))
    for operator in (gt.grad, gt.value_and_grad, gt.hessian, gt.jacobian):
        with pytest.raises(GradtoolsError, match=r"argument 0.* is an array of dtype int"):
            operator(lambda p: (lambda x, n: (x * n).sum())(*parts(p)))(tree)


@pytest.mark.parametrize("inner", ["grad", "vjp", "jvp", "jacobian", "hvp"])
def test_a_pushed_derivative_is_differentiated_by_its_tangent(gt, inner):
    """The jvp is differentiable with respect to the tangent even if x requires no gradient."""
    xp = gt.xp
    f = lambda x: xp.sum(xp.sin(x) * x) * xp.sum(x)
    x, t = (gt.asarray(np.sin(np.arange(3.0) + k)) for k in (1, 2))
    ones = gt.asarray(np.ones(3))
    derivatives = {
        "grad": lambda x: gt.grad(f)(x),
        "vjp": lambda x: gt.vjp(f, x)[1](f(x))[0],
        "jvp": lambda x: gt.jvp(lambda x: x * f(x), (x,), (ones,))[1],
        "jacobian": lambda x: gt.jacobian(lambda x: x * f(x))(x) @ x,
        "hvp": lambda x: gt.hvp(f, (x,), (ones,), mode="forward_over_reverse")[1][0],
    }
    pushed = lambda t: xp.sum(xp.sin(gt.jvp(derivatives[inner], (x,), (t,))[1]))
    jacobian = gt.to_numpy(gt.jacobian(derivatives[inner], mode="reverse")(x))
    expected = np.cos(jacobian @ gt.to_numpy(t)) @ jacobian
    np.testing.assert_allclose(gt.to_numpy(gt.grad(pushed)(t)), expected, rtol=1e-10)


def test_a_pullback_and_a_pushforward_are_called_many_times(gt):
    x, dx = gt.asarray(np.array([0.5, 2.0])), gt.asarray(np.array([1.0, -1.0]))
    f = lambda x: gt.xp.sin(x) * gt.xp.sum(x**2)
    _, pull = gt.vjp(f, x)
    _, push = gt.linearize(f, x)
    for scale in (1.0, 2.0, -3.0):
        close(gt.to_numpy(pull(scale * dx)[0]), gt.to_numpy(gt.vjp(f, x)[1](scale * dx)[0]), EXACT)
        close(gt.to_numpy(push(scale * dx)), gt.to_numpy(gt.jvp(f, (x,), (scale * dx,))[1]), EXACT)
