"""Every derivative operator on the table of functions, against differences and closed forms."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.support.derivative_table import (
    SCENARIOS,
    close,
    dot,
    draw_like,
    leaves,
    lift,
    lower,
    make_problem,
    moved,
    slope,
    tree_map,
)

DIFFERENCE = 1e-9  # what a difference of sixth order leaves of a function of scale one
SECOND_DIFFERENCE = 1e-7
EXACT = 1e-12

REAL = [s for s in SCENARIOS if "complex" not in s.name and "holomorphic" not in s.name]
REAL.append(next(s for s in SCENARIOS if s.name == "complex from real"))
HVP_MODES = ("auto", "forward_over_reverse", "reverse_over_reverse")


@pytest.fixture(params=SCENARIOS, ids=str)
def problem(request: Any, gt: Any, backend_name: str) -> Any:
    return make_problem(request.param, gt, backend_name)


@pytest.fixture(params=REAL, ids=str)
def real_problem(request: Any, gt: Any, backend_name: str) -> Any:
    return make_problem(request.param, gt, backend_name)


def _gradient(problem: Any, operator: Any = None) -> Any:
    """The NumPy gradient of the loss in the active arguments."""
    operator = operator or problem.gt.grad
    fun = operator(problem.loss, argnums=problem.scenario.active)
    return lower(fun(*problem.framework_args(), **problem.scenario.kwargs))


def test_there_are_at_least_twenty_functions():
    assert len(SCENARIOS) >= 20
    assert len({s.name for s in SCENARIOS}) == len(SCENARIOS)


# --- first order -------------------------------------------------------------------------


@pytest.mark.sampled(torch=(29, 29), jax=(4, 15))
def test_grad_is_the_slope_of_the_loss_along_every_direction(problem):
    gradient = _gradient(problem)
    for t in problem.draws(1, 2):
        expected = float(problem.push("loss", t))
        assert abs(dot(gradient, t) - expected) <= DIFFERENCE * max(1, abs(expected))


def test_grad_has_the_tree_shapes_and_dtypes_of_the_arguments(problem):
    close(tree_map(np.zeros_like, _gradient(problem)), tree_map(np.zeros_like, problem.primals), 0)


def test_value_and_grad_returns_the_plain_value_and_the_gradient(problem):
    fun = problem.gt.value_and_grad(problem.loss, argnums=problem.scenario.active)
    value, grads = fun(*problem.framework_args(), **problem.scenario.kwargs)
    close(lower(value), problem.value("loss", problem.primals), 1e-15)
    close(lower(grads), _gradient(problem), 1e-15)


@pytest.mark.sampled(torch=(29, 29), jax=(11, 29))
def test_jvp_is_the_difference_along_its_tangent(problem):
    (t,) = problem.draws(2, 1)
    f, primals = problem.of_primals(), problem.lifted(problem.primals)
    out, pushed = problem.gt.jvp(f, primals, problem.lifted(t))
    close(lower(out), problem.value("f", problem.primals), 1e-15)
    close(lower(pushed), problem.push("f", t), DIFFERENCE)


@pytest.mark.slow_at(
    ("softmax", "jax"),
    ("a network over a pytree", "jax"),
    ("a linear solve", "jax"),
    ("a log determinant", "jax"),
)
def test_linearize_pushes_as_jvp_does_and_may_be_called_again(problem):
    t, other = problem.draws(3, 2)
    f, primals = problem.of_primals(), problem.lifted(problem.primals)
    out, push = problem.gt.linearize(f, *primals)
    close(lower(out), problem.value("f", problem.primals), 1e-15)
    for direction in (t, other, t):
        expected = problem.gt.jvp(f, primals, problem.lifted(direction))[1]
        close(lower(push(*problem.lifted(direction))), lower(expected), EXACT)


@pytest.mark.slow_at(("a linear solve", "jax"))
def test_the_pullback_is_adjoint_to_the_pushforward_under_the_real_inner_product(problem):
    (t,) = problem.draws(4, 1)
    f, primals = problem.of_primals(), problem.lifted(problem.primals)
    out, pullback = problem.gt.vjp(f, *primals)
    rng = np.random.default_rng(5)
    pushed = problem.push("f", t)
    for _ in range(2):
        c = draw_like(lower(out), rng)
        pulled = lower(pullback(problem.lifted(c)))
        expected = dot(c, pushed)
        assert abs(dot(pulled, t) - expected) <= DIFFERENCE * max(1, abs(expected))
        exact = dot(c, lower(problem.gt.jvp(f, primals, problem.lifted(t))[1]))
        assert abs(dot(pulled, t) - exact) <= EXACT * max(1, abs(exact), abs(dot(c, c)))


def test_the_pullback_is_linear_over_the_reals(problem):
    f, primals = problem.of_primals(), problem.lifted(problem.primals)
    out, pullback = problem.gt.vjp(f, *primals)
    rng = np.random.default_rng(6)
    a, b = draw_like(lower(out), rng), draw_like(lower(out), rng)
    both = pullback(problem.lifted(moved(a, -2.5, b)))
    apart = moved(lower(pullback(problem.lifted(a))), -2.5, lower(pullback(problem.lifted(b))))
    close(lower(both), apart, EXACT)


# --- Jacobians ---------------------------------------------------------------------------


_JACOBIANS: dict[tuple[str, str], Any] = {}


def _jacobian_by_differences(problem: Any) -> Any:
    """For each output leaf, for each active leaf, an array of both shapes; taken once."""
    key = (problem.scenario.name, problem.backend_name)
    if key not in _JACOBIANS:
        _JACOBIANS[key] = _jacobian_in_each_coordinate(problem)
    return _JACOBIANS[key]


def _jacobian_in_each_coordinate(problem: Any) -> Any:
    template = problem.value("f", problem.primals)
    flat = leaves(problem.primals)

    def block(k: int, x: np.ndarray, out: int) -> np.ndarray:
        columns = []
        for j in range(x.size):
            unit = np.zeros(x.size)
            unit[j] = 1
            mine = iter(range(len(flat)))
            t = tree_map(
                lambda y: unit.reshape(x.shape) if next(mine) == k else np.zeros_like(y),
                problem.primals,
            )
            columns.append(leaves(problem.push("f", t))[out])
        shape = leaves(template)[out].shape
        if not columns:
            return np.zeros((*shape, *x.shape))
        return np.stack(columns, -1).reshape((*shape, *x.shape))

    return [block(k, x, out) for out in range(len(leaves(template))) for k, x in enumerate(flat)]


@pytest.mark.sampled(torch=(120, 225), jax=(45, 140))
@pytest.mark.parametrize("chunk_size", [None, 1, 2])
@pytest.mark.parametrize("mode", ["auto", "forward", "reverse"])
def test_jacobian_is_the_differences_in_all_coordinates(real_problem, mode, chunk_size):
    problem = real_problem
    looped = problem.backend_name == "jax" and mode == "forward" and chunk_size is not None
    if looped and not problem.scenario.compiled:
        pytest.skip("JAX's loop over chunks is traced, so f cannot branch on values")
    fun = problem.gt.jacobian(problem.f, problem.scenario.active, mode, chunk_size)
    found = fun(*problem.framework_args(), **problem.scenario.kwargs)
    flat = leaves(lower(found))
    expected = _jacobian_by_differences(problem)
    close(flat, [e.astype(f.dtype) for e, f in zip(expected, flat, strict=True)], DIFFERENCE)
    assert [np.iscomplexobj(f) for f in flat] == [
        np.iscomplexobj(y)
        for y in leaves(problem.value("f", problem.primals))
        for _ in leaves(problem.primals)
    ]


@pytest.mark.slow_at("jax")
def test_jacobian_puts_the_arguments_tree_at_each_leaf_of_the_output(gt, backend_name, rng):
    p = lift(backend_name, {"a": rng.normal(size=2), "b": [rng.normal(size=(3, 1))]})
    f = lambda p, s: {"y": p["a"] * s, "z": (gt.xp.sum(p["b"][0]),)}
    found = lower(gt.jacobian(f)(p, 2.0))
    assert set(found) == {"y", "z"} and set(found["y"]) == {"a", "b"}
    assert found["y"]["b"][0].shape == (2, 3, 1)
    close(found["y"]["a"], 2 * np.eye(2), 0)
    close(found["z"][0]["b"][0], np.ones((3, 1)), 0)


def test_jacobian_of_an_integer_output_leaf_is_none(gt, backend_name):
    x = lift(backend_name, np.array([1.0, 2.0]))
    found = gt.jacobian(lambda x: {"y": x * 3, "n": gt.xp.argmax(x)}, mode="reverse")(x)
    assert found["n"] is None
    close(lower(found["y"]), 3 * np.eye(2), 0)


# --- second order ------------------------------------------------------------------------


_SECOND: dict[tuple[str, str], Any] = {}


def _gradient_and_second_difference(problem: Any, u: Any, v: Any) -> Any:
    """What the modes of hvp are held to, taken once for all."""
    key = (problem.scenario.name, problem.backend_name)
    if key not in _SECOND:
        _SECOND[key] = _gradient(problem), problem.second(u, v)
    return _SECOND[key]


@pytest.mark.sampled(torch=(87, 87), jax=(13, 65))
@pytest.mark.parametrize("mode", HVP_MODES)
def test_hvp_is_the_second_difference_and_the_gradient(problem, mode):
    u, v = problem.draws(8, 2)
    loss, primals = problem.of_primals("loss"), problem.lifted(problem.primals)
    grads, products = problem.gt.hvp(loss, primals, problem.lifted(v), mode)
    gradient, expected = _gradient_and_second_difference(problem, u, v)
    close(lower(grads), gradient, EXACT)
    scale = max(1, abs(expected), dot(u, u), dot(v, v))
    assert abs(dot(lower(products), u) - expected) <= SECOND_DIFFERENCE * scale


@pytest.mark.slow_at(("real and complex leaves", "jax"))
def test_hvp_is_symmetric_under_the_real_inner_product(problem):
    u, v = problem.draws(9, 2)
    loss, primals = problem.of_primals("loss"), problem.lifted(problem.primals)
    _, hu = problem.gt.hvp(loss, primals, problem.lifted(u))
    _, hv = problem.gt.hvp(loss, primals, problem.lifted(v))
    one, other = dot(lower(hu), v), dot(lower(hv), u)
    assert abs(one - other) <= EXACT * max(1, abs(one), dot(lower(hu), lower(hu)))


@pytest.mark.sampled(torch=(29, 29), jax=(15, 29))
@pytest.mark.slow_at(("not holomorphic", "jax"), ("real and complex leaves", "jax"))
def test_hvp_modes_agree(problem):
    (v,) = problem.draws(10, 1)
    loss, primals = problem.of_primals("loss"), problem.lifted(problem.primals)
    found = [lower(problem.gt.hvp(loss, primals, problem.lifted(v), m)[1]) for m in HVP_MODES]
    close(found[1], found[0], EXACT)
    close(found[2], found[0], EXACT)


@pytest.mark.sampled(torch=(25, 25), jax=(2, 12))
def test_hessian_times_a_vector_is_hvp(real_problem):
    problem = real_problem
    (v,) = problem.draws(11, 1)
    loss, primals = problem.of_primals("loss"), problem.lifted(problem.primals)
    fun = problem.gt.hessian(problem.loss, problem.scenario.active)
    blocks = leaves(lower(fun(*problem.framework_args(), **problem.scenario.kwargs)))
    xs, vs = leaves(problem.primals), leaves(v)
    products = leaves(lower(problem.gt.hvp(loss, primals, problem.lifted(v))[1]))
    for i, x in enumerate(xs):
        row = blocks[i * len(xs) : (i + 1) * len(xs)]
        assert [b.shape for b in row] == [(*x.shape, *y.shape) for y in xs]
        total = sum(np.tensordot(b, w, axes=w.ndim) for b, w in zip(row, vs, strict=True))
        close(np.asarray(total), products[i], EXACT)


def test_hessian_of_one_argument_is_a_tree_of_trees_and_of_a_tuple_a_tuple_of_tuples(
    gt, backend_name
):
    p = lift(backend_name, {"a": np.array([1.0, 2.0]), "b": np.array(3.0)})
    f = lambda p: gt.xp.sum(p["a"] ** 2) * p["b"]
    one = lower(gt.hessian(f)(p))
    close(one["a"]["a"], 6 * np.eye(2), EXACT)
    close(one["a"]["b"], np.array([2.0, 4.0]), EXACT)
    close(one["b"]["b"], np.array(0.0), 0)
    several = lower(gt.hessian(f, (0,))(p))
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
    close(full, 2 * np.eye(3), 0)


@pytest.mark.parametrize("inner", ["forward_over_reverse", "reverse_over_reverse"])
@pytest.mark.parametrize("outer", ["grad", "jvp"])
def test_the_derivative_of_an_hvp_is_the_third_derivative(gt, backend_name, outer, inner):
    one = lift(backend_name, np.array(1.0))
    second = lambda x: gt.hvp(lambda x: gt.xp.exp(2 * x), (x,), (one,), inner)[1][0]
    x = lift(backend_name, np.array(0.3))
    found = gt.grad(second)(x) if outer == "grad" else gt.jvp(second, (x,), (one,))[1]
    close(lower(found), np.asarray(8 * np.exp(0.6)), EXACT)


@pytest.mark.slow_at("jax")
def test_a_closed_over_variable_of_an_outer_derivative_is_not_confused_with_the_inner_one(
    gt, backend_name
):
    for outer in WAYS.values():
        for inner in WAYS.values():
            f = lambda x: x * inner(gt, lambda y: x * y)(gt.xp.ones_like(x))
            found = outer(gt, f)(lift(backend_name, np.array(3.0)))
            close(lower(found), np.asarray(6.0), 0)


# --- examples one by one -----------------------------------------------------------------


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


def test_per_example_grad_takes_a_tree_of_axes(gt, backend_name, regression):
    p, x, y = regression
    w = np.stack([p["w"]] * 5)
    fun = gt.per_example_grad(_square_error(gt), in_axes=({"w": 0, "b": None}, 0, 0))
    found = fun(*lift(backend_name, ({"w": w, "b": p["b"]}, x, y)))
    r = 2 * (x @ p["w"] + p["b"] - y)
    close(lower(found), {"w": r[:, None] * x, "b": r}, EXACT)


@pytest.mark.slow_at(("jax", "1"), ("jax", "2"))
@pytest.mark.parametrize("chunk_size", [None, 1, 2])
def test_per_example_grad_shares_a_keyword_that_in_axes_names(
    gt, backend_name, regression, chunk_size
):
    p, x, y = regression
    f = lambda p, x, y, *, scale: _square_error(gt)(p, x, y) * gt.xp.sum(scale)
    fun = gt.per_example_grad(f, in_axes={"scale": None}, chunk_size=chunk_size)
    found = fun(*lift(backend_name, (p, x, y)), scale=lift(backend_name, np.array([1.0, 2.0])))
    r = 6 * (x @ p["w"] + p["b"] - y)
    close(lower(found), {"w": r[:, None] * x, "b": r}, EXACT)


def test_per_example_grad_splits_numpy_arrays_too(gt, backend_name, regression):
    p, x, y = regression
    found = gt.per_example_grad(_square_error(gt))(lift(backend_name, p), lift(backend_name, x), y)
    r = 2 * (x @ p["w"] + p["b"] - y)
    close(lower(found), {"w": r[:, None] * x, "b": r}, EXACT)


def test_per_example_grad_shares_what_is_no_array(gt, backend_name):
    f = lambda w, x, name, k: w * x**k * (1.0 if name == "a" else 0.0)
    args = (*lift(backend_name, (np.array(2.0), np.array([1.0, 3.0]))), "a", 2)
    close(lower(gt.per_example_grad(f)(*args)), np.array([1.0, 9.0]), 0)


def test_the_mean_of_per_example_gradients_is_the_gradient_of_the_mean(
    gt, backend_name, regression
):
    args = lift(backend_name, regression)
    each = lower(gt.per_example_grad(_square_error(gt))(*args))
    whole = gt.grad(lambda p, x, y: gt.xp.mean((x @ p["w"] + p["b"] - y) ** 2))(*args)
    close(tree_map(lambda g: g.mean(0), each), lower(whole), EXACT)


# --- players -----------------------------------------------------------------------------


def test_minimax_negates_the_maximising_players_and_orders_by_argument(gt, backend_name):
    f = lambda a, b, c, d: a * a * b + b * c**3 + 0 * d
    args = lift(backend_name, tuple(np.array(v) for v in (2.0, 3.0, 5.0, 7.0)))
    value, grads = gt.minimax_value_and_grad(f, minimize=(2, -4), maximize=1)(*args)
    close(lower(value), np.array(12.0 + 375.0), 0)
    close(lower(grads), (np.array(12.0), np.array(-129.0), np.array(225.0)), 0)


def test_minimax_negates_whole_trees(gt, backend_name, rng):
    p, q = {"w": rng.normal(size=2), "n": None}, [rng.normal(size=2)]
    f = lambda p, q, *, s: gt.xp.sum(p["w"] * q[0]) * s
    _, grads = gt.minimax_value_and_grad(f, 0, 1)(*lift(backend_name, (p, q)), s=2.0)
    close(lower(grads), ({"w": 2 * q[0], "n": None}, [-2 * p["w"]]), EXACT)


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


def test_mixed_partial_of_what_y_does_not_reach_is_zero(gt, backend_name):
    y, z, u = lift(backend_name, (np.array([1.0, 2.0]), np.array(3.0), np.array(1.0)))
    found = gt.mixed_partial(lambda y, g: gt.xp.sum(y) + g * g, lambda z: z * z, y, z, u)
    close(lower(found), np.zeros(2), 0)


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


def test_a_tuple_of_argnums_gives_a_tuple_also_of_one(gt, backend_name):
    x = lift(backend_name, np.array(3.0))
    found = gt.grad(lambda a, b: a * a * b, argnums=(0,))(x, x)
    assert isinstance(found, tuple) and len(found) == 1 and float(found[0]) == 18.0


def test_negative_argnums_count_from_the_end(gt, backend_name):
    a, b = lift(backend_name, (np.array(2.0), np.array(3.0)))
    assert float(gt.grad(lambda a, b: a * a * b, argnums=-1)(a, b)) == 4.0


def test_python_and_numpy_floats_are_arguments(gt):
    assert float(gt.grad(lambda x: x * x)(3.0)) == 6.0
    assert float(gt.grad(lambda x: x * x)(np.float64(3.0))) == 6.0
    assert float(gt.grad(lambda x: gt.xp.sum(x * x))(np.array([3.0]))[0]) == 6.0


def test_the_same_array_in_two_arguments_gets_two_gradients(gt, backend_name):
    x = lift(backend_name, np.array(3.0))
    found = gt.grad(lambda a, b: a * a * b, argnums=(0, 1))(x, x)
    assert [float(g) for g in found] == [18.0, 9.0]


def test_an_argument_that_is_returned_untouched_has_gradient_one(gt, backend_name):
    x = lift(backend_name, np.array(3.0))
    value, g = gt.value_and_grad(lambda x: x)(x)
    assert (float(value), float(g)) == (3.0, 1.0)
    out, pullback = gt.vjp(lambda x: (x, x, 2 * x), x)
    assert float(pullback(out)[0]) == 3 + 3 + 2 * 6


def test_arguments_are_not_changed_by_an_operator(gt, backend_name, rng):
    x = rng.normal(size=3)
    lifted = lift(backend_name, x.copy())
    gt.hvp(lambda x: gt.xp.sum(x**3), (lifted,), (lifted,))
    close(lower(lifted), x, 0)


# --- inside other transforms -------------------------------------------------------------

SOME = [s for s in SCENARIOS if s.name in {"softmax", "a network over a pytree", "a loop"}]
SOME += [s for s in SCENARIOS if s.name in {"not holomorphic", "a linear solve"}]


@pytest.fixture(params=SOME, ids=str)
def some_problem(request: Any, gt: Any, backend_name: str) -> Any:
    return make_problem(request.param, gt, backend_name)


def _operators(problem: Any) -> dict[str, Any]:
    """Operators as functions of the active arguments and a tangent."""
    gt, loss, f = problem.gt, problem.of_primals("loss"), problem.of_primals()
    count = len(problem.primals)
    return {
        "grad": lambda xs, ts: gt.grad(loss, tuple(range(count)))(*xs),
        "value_and_grad": lambda xs, ts: gt.value_and_grad(loss)(*xs),
        "vjp": lambda xs, ts: gt.vjp(loss, *xs)[1](gt.xp.ones_like(loss(*xs))),
        "jvp": lambda xs, ts: gt.jvp(f, xs, ts),
        "linearize": lambda xs, ts: gt.linearize(f, *xs)[1](*ts),
        "hvp": lambda xs, ts: gt.hvp(loss, xs, ts),
    }


OPERATORS = ("grad", "value_and_grad", "vjp", "jvp", "linearize", "hvp")


def _options(backend_name: str) -> dict[str, Any]:
    return {"backend": "aot_eager", "fullgraph": True} if backend_name == "torch" else {}


@pytest.mark.slow
@pytest.mark.sampled(slow=15)
@pytest.mark.parametrize("operator", OPERATORS)
def test_compiled_operators_give_the_eager_numbers(some_problem, operator, backend_name):
    problem = some_problem
    if backend_name == "torch":
        import torch

        torch._dynamo.reset()
    (t,) = problem.draws(12, 1)
    xs, ts = problem.lifted((problem.primals, t))
    fun = _operators(problem)[operator]
    compiled = problem.gt.compile(fun, **_options(backend_name))
    close(lower(compiled(xs, ts)), lower(fun(xs, ts)), EXACT)


@pytest.mark.slow_at(
    ("jax", "jvp"),
    ("jax", "hvp"),
    ("jax", "grad"),
    ("a linear solve", "jax"),
    ("jax", "vjp"),
    ("a loop", "jax", "linearize"),
)
@pytest.mark.sweep_at(
    ("softmax", "jax", "vjp"),
    ("a network over a pytree", "jax", "grad"),
    ("a network over a pytree", "jax", "vjp"),
    ("a linear solve", "jax", "grad"),
    ("a linear solve", "jax", "vjp"),
    ("a linear solve", "jax", "hvp"),
)
@pytest.mark.parametrize("operator", OPERATORS)
def test_mapped_operators_give_each_examples_numbers(some_problem, operator, backend_name):
    problem = some_problem
    xs_draws, ts_draws = problem.draws(13, 3), problem.draws(14, 3)
    fun = _operators(problem)[operator]
    stacked = [tree_map(lambda *a: np.stack(a), *draws) for draws in (xs_draws, ts_draws)]
    mapped = lower(problem.gt.vmap(fun)(*problem.lifted(tuple(stacked))))
    for i, (xs, ts) in enumerate(zip(xs_draws, ts_draws, strict=True)):
        one = lower(fun(*problem.lifted((xs, ts))))
        close(tree_map(lambda y: y[i], mapped), one, EXACT)


def test_a_derivative_inside_a_checkpoint_is_differentiated(gt, backend_name):
    x = lift(backend_name, np.array([0.3, -1.2]))
    inner = gt.checkpoint(lambda x: gt.grad(lambda x: gt.xp.sum(gt.xp.sin(x)))(x))
    found = gt.grad(lambda x: gt.xp.sum(inner(x) ** 2))(x)
    close(lower(found), -2 * np.cos(lower(x)) * np.sin(lower(x)), EXACT)


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


def test_the_gradient_of_the_square_modulus_is_twice_the_number(gt, backend_name, z):
    f = lambda z: gt.xp.sum(gt.xp.real(gt.xp.conj(z) * z))
    close(lower(gt.grad(f)(lift(backend_name, z))), 2 * z, EXACT)


def test_the_complex_gradient_is_the_real_slope_plus_i_times_the_imaginary_one(gt, backend_name, z):
    f = lambda z: gt.xp.sum(gt.xp.imag(z * z * z) + gt.xp.real(z))
    found = lower(gt.grad(f)(lift(backend_name, z)))
    at = lambda dz: lower(f(lift(backend_name, z + dz)))
    for i in range(3):
        unit = np.eye(3)[i]
        re, im = slope(lambda s: at(s * unit)), slope(lambda s: at(1j * s * unit))
        assert abs(found[i] - (re + 1j * im)) < DIFFERENCE


@pytest.mark.sweep_at("jax")
def test_a_complex_gradient_step_descends(gt, backend_name, z):
    target = 1.0 - 2.0j
    f = lambda z: gt.xp.sum(gt.xp.abs(z - target) ** 2)
    x = lift(backend_name, z)
    for _ in range(200):
        x = x - 0.1 * gt.grad(f)(x)
    close(lower(x), np.full(3, target), EXACT)


def test_the_vjp_of_a_linear_map_is_its_conjugate_transpose(gt, backend_name, rng, z):
    w, c = rng.normal(size=(2, 3)) + 1j * rng.normal(size=(2, 3)), np.array([1 + 2j, -0.5j])
    lw = lift(backend_name, w)
    _, pullback = gt.vjp(lambda z: lw @ z, lift(backend_name, z))
    close(lower(pullback(lift(backend_name, c))[0]), w.conj().T @ c, EXACT)


def test_a_real_leaf_of_a_complex_function_has_a_real_gradient(gt, backend_name):
    x = lift(backend_name, np.array([0.3, 0.7]))
    f = lambda x: gt.xp.sum(gt.xp.imag(gt.xp.exp(1j * x) * x))
    found = lower(gt.grad(f)(x))
    expected = np.sin(lower(x)) + lower(x) * np.cos(lower(x))
    close(found, expected, EXACT)


@pytest.mark.slow_at("jax")
@pytest.mark.sweep_at(("jax", "reverse"))
@pytest.mark.parametrize("mode", ["forward", "reverse"])
def test_the_jacobian_of_a_complex_function_of_reals_is_complex(gt, backend_name, mode):
    x = np.array([0.3, 0.7])
    found = gt.jacobian(lambda x: gt.xp.exp(1j * x) * x, mode=mode)(lift(backend_name, x))
    close(lower(found), np.diag(np.exp(1j * x) * (1 + 1j * x)), EXACT)


@pytest.mark.slow_at(("jax", "0.5"))
@pytest.mark.parametrize("scale", [0.5, -2.0])
def test_an_edited_complex_gradient_is_scaled(gt, backend_name, z, scale):
    f = lambda z: gt.xp.sum(gt.xp.abs(gt.reverse_gradient(z, scale)) ** 2)
    close(lower(gt.grad(f)(lift(backend_name, z))), -2 * scale * z, EXACT)


def test_a_transform_sees_the_gradient_in_gradtools_convention(gt, backend_name, z):
    seen = []
    f = lambda z: gt.xp.sum(
        gt.xp.abs(gt.transform_gradient(z, lambda c: seen.append(c) or c * 1j)) ** 2
    )
    found = gt.grad(f, disconnected_inputs="zeros")(lift(backend_name, z))
    close(lower(found), 2j * z, EXACT)
    close(lower(seen[-1]), 2 * z, EXACT)


def _with_methods(gt: Any) -> Any:
    """An object of a class whose methods the operators made, as they may be plain functions."""
    power = lambda self, x: x**self.exponent
    methods = {
        "slope": gt.grad(lambda self, x: power(self, x).sum(), argnums=1),
        "again": gt.checkpoint(power),
        "still": gt.frozen(power),
        "in chunks": gt.chunked(power, 2, in_axes=(None, 0)),
        "each": gt.vmap(power, in_axes=(None, 0)),
    }
    return type("Power", (), {"exponent": 3, **methods})()


@pytest.mark.slow_at(("jax", "in chunks"))
@pytest.mark.parametrize("method", ["slope", "again", "still", "in chunks", "each"])
def test_what_an_operator_returns_may_be_a_method(gt, backend_name, method):
    x = np.array([0.5, -1.0, 2.0])
    found = getattr(_with_methods(gt), method)(lift(backend_name, x))
    close(lower(found), 3 * x**2 if method == "slope" else x**3, EXACT)
