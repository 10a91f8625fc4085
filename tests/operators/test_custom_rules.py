"""Tests signatures, residuals and errors of custom_rule and host_function.

The support matrix tests the derivatives of both functions in all transforms and orders.
"""

from __future__ import annotations

import gc
import weakref

import numpy as np
import pytest

from gradtools import GradtoolsError
from tests.support.native import NATIVE
from tests.support.numpy_trees import lower

X = np.array([0.3, -1.5, 2.0])
Y = np.array([2.0, 0.3, -0.7])


@pytest.fixture
def native(backend_name):
    return NATIVE[backend_name]


@pytest.fixture
def x(native):
    return native.array(X)


@pytest.fixture
def y(native):
    return native.array(Y)


def same(found, expected, rtol=1e-12):
    np.testing.assert_allclose(lower(found), expected, rtol=rtol, atol=1e-300)


def gradients(gt, f, *args):
    return gt.grad(lambda *a: f(*a).sum(), argnums=tuple(range(len(args))))(*args)


# --- calls and signatures ----------------------------------------------------------------


def powers(gt):
    """Return a rule with a static argument, a keyword-only argument, a default and pytrees."""
    xp = gt.xp

    @gt.custom_rule(static_argnames="n")
    def power(tree, n=2, shift=None, *, scale=1.0):
        """Its documentation."""
        assert isinstance(n, int)
        y = scale * tree["a"] ** n
        return {"y": y if shift is None else y + shift, "at": xp.argmax(tree["a"])}

    def fwd(n, tree, shift, scale):
        return power(tree, n, shift, scale=scale), (tree["a"], scale, "a label")

    def bwd(n, res, ct):
        a, scale, label = res
        assert label == "a label" and ct["at"] is None
        along = ct["y"] * n * a ** (n - 1)
        of_scale = None if isinstance(scale, float) else (ct["y"] * a**n).sum()
        return {"a": along * scale, "k": None}, ct["y"], of_scale

    power.defvjp(fwd, bwd)
    return power


@pytest.mark.sweep_at("jax")
def test_keywords_defaults_and_static_arguments_are_bound_to_the_signature(gt, native, x, y):
    power, k = powers(gt), native.array(np.array([1, 2]))
    for n in (2, 3):
        out = power({"a": x, "k": k}, n=n)
        same(out["y"], X**n)
        assert int(out["at"]) == 2

        def loss(a, shift, scale, n=n):
            return power({"a": a, "k": k}, shift=shift, scale=scale, n=n)["y"].sum()

        scale = native.array(np.array(2.0))
        ga, gs, gc = gt.grad(loss, argnums=(0, 1, 2))(x, y, scale)
        same(ga, 2 * n * X ** (n - 1))
        same(gs, np.ones(3))
        same(gc, (X**n).sum())
        pushed = gt.jvp(loss, (x, y, scale), (y, x, scale))[1]
        same(pushed, (2 * n * X ** (n - 1) * Y + X + 2 * X**n).sum())


def test_a_fwd_in_the_order_of_f_is_refused_where_static_arguments_lead(gt):
    power = gt.custom_rule(lambda x, n: x**n, static_argnames="n")
    bwd = lambda n, x, ct: (ct * n * x ** (n - 1),)
    with pytest.raises(GradtoolsError, match=r"static arguments come first.*fwd\(n, x\)"):
        power.defvjp(lambda x, n: (x**n, x), bwd)
    power.defvjp(lambda n, x: (x**n, x), bwd)
    power.defvjp(lambda k, z: (z**k, z), bwd)  # the parameters of fwd may have other names


def _square_with_a_ctx(ctx, x):
    ctx.save_for_backward(x)
    return x**2


def _sum_with_a_ctx(ctx, x, y=2.0):
    return x + y


@pytest.mark.parametrize(
    ("f", "fwd"),
    [(lambda x: x**2, _square_with_a_ctx), (lambda x, y=2.0: x + y, _sum_with_a_ctx)],
)
def test_a_fwd_with_the_ctx_of_an_autograd_function_is_refused(f, fwd, gt):
    words = r"without a ctx.* only the arguments of f, fwd\(x.*\), and returns \(output, resid"
    with pytest.raises(GradtoolsError, match=words):
        gt.custom_rule(f).defvjp(fwd, lambda ctx, g: g)
    with pytest.raises(GradtoolsError, match=words):
        gt.host_function(np.square).defvjp(_square_with_a_ctx, lambda ctx, g: g)


def test_static_arguments_of_equal_value_and_other_type_are_told_apart(gt, x):
    seen = []

    @gt.custom_rule(static_argnames=("n",))
    def f(x, n):
        return x * n

    f.defvjp(lambda n, x: (x * n, None), lambda n, res, ct: (seen.append(n) or ct * n,))
    for n in (1, 1.0, True, 0.0, -0.0):
        gt.grad(lambda x, n=n: f(x, n).sum())(x)
    assert list(dict.fromkeys(map(repr, seen))) == ["1", "1.0", "True", "0.0", "-0.0"]


def test_a_rule_sees_what_its_closure_holds_now(gt, x):
    factor = [2.0]
    f = gt.custom_rule(lambda x: x * factor[0])
    f.defvjp(lambda x: (x * factor[0], None), lambda _, ct: (ct * factor[0],))
    same(gradients(gt, f, x)[0], [2.0] * 3)
    factor[0] = 5.0
    same(f(x), 5 * X)
    same(gradients(gt, f, x)[0], [5.0] * 3)


def test_undifferentiated_calls_run_the_function_alone(gt, x):
    def never(*args):
        raise AssertionError("a call without differentiation ran a rule")

    f = gt.custom_rule(lambda x: 2 * x)
    f.defvjp(never, never)
    f.defjvp(never)
    same(f(x), 2 * X)


# --- residuals ---------------------------------------------------------------------------


def test_a_residual_that_is_a_function_is_evaluated_again_in_pytorch(torch_gt, torch_x):
    f = torch_gt.custom_rule(lambda x: torch_gt.xp.sinh(x))
    cosh = lambda x: (torch_gt.xp.exp(x) + torch_gt.xp.exp(-x)) / 2
    fwd = lambda x: (torch_gt.xp.sinh(x), lambda ct: (ct * cosh(x),))
    f.defvjp(fwd, lambda pull, ct: pull(ct))
    (g,), (h,) = torch_gt.hvp(lambda x: (f(x) ** 2).sum(), (torch_x,), (torch_x,))
    same(g, 2 * np.sinh(X) * np.cosh(X))
    same(h, 2 * np.cosh(2 * X) * X)


@pytest.fixture
def torch_gt(gt, backend_name):
    if backend_name != "torch":
        pytest.skip("a function is not a pytree; JAX raises its own error")
    return gt


@pytest.fixture
def torch_x(x):
    return x


def test_extras_are_freed_with_the_graph(torch_gt, torch_x):
    f = torch_gt.custom_rule(lambda x: torch_gt.xp.sinh(x))
    saved = []

    def fwd(x):
        e = torch_gt.xp.exp(x)
        saved.append(weakref.ref(e))
        return (e - 1 / e) / 2, e

    f.defvjp(fwd, lambda e, ct: (ct * (e + 1 / e) / 2,))
    gc.disable()
    try:
        y = f(torch_x.requires_grad_())
        y.sum().backward()
        del y
        assert [ref() for ref in saved] == [None]
    finally:
        gc.enable()


def test_what_fwd_draws_is_drawn_again_at_second_order(torch_gt, torch_x):
    import torch

    def masked(x):
        mask = (torch.rand(3) < 0.5).to(x.dtype)
        return mask * x**3, (x, mask * x)

    f = torch_gt.custom_rule(lambda x: masked(x)[0])
    f.defvjp(masked, lambda r, ct: (3 * r[0] * r[1] * ct,))
    for seed in range(8):
        torch.manual_seed(seed)
        mask = (torch.rand(3) < 0.5).numpy()
        after = torch.get_rng_state()
        torch.manual_seed(seed)
        _, (h,) = torch_gt.hvp(lambda x: f(x).sum(), (torch_x,), (torch_x,))
        same(h, mask * 6 * X * X)
        assert torch.equal(torch.get_rng_state(), after)


# --- errors ------------------------------------------------------------------------------


@pytest.mark.slow_at("jax")
def test_a_cotangent_map_that_is_not_linear_works_in_reverse_mode_alone(gt, x, y):
    f = gt.custom_rule(lambda x: x * x)
    f.defvjp(lambda x: (x * x, x), lambda x, ct: (gt.xp.clip(2 * x * ct, -1.0, 1.0),))
    x = x + 0.1  # avoid points at which rounding decides whether `clip` changes the value
    same(gradients(gt, f, x)[0], np.clip(2 * X + 0.2, -1, 1))
    inner = np.abs(2 * X + 0.2) < 1
    _, (h,) = gt.hvp(lambda x: f(x).sum(), (x,), (y,), mode="reverse_over_reverse")
    same(h, np.where(inner, 2 * Y, 0))
    with pytest.raises(GradtoolsError, match=r"must be linear|not linear in its cotangents"):
        gt.jvp(f, (x,), (y,))


def closing(gt, w, x):
    f = gt.custom_rule(lambda x: w * x)
    f.defvjp(lambda x: (w * x, None), lambda _, ct: (w * ct,))
    return f(x)


@pytest.mark.slow_at("jax")
def test_a_rule_that_closes_over_an_array_works(gt, native, x):
    w = native.array(np.array(3.0))
    same(gt.grad(lambda x: closing(gt, w, x).sum())(x), [3.0] * 3)
    same(native.grad(lambda x: closing(gt, w, x).sum())(x), [3.0] * 3)
    if native.name == "jax":
        jitted = native.jit(lambda w, x: native.grad(lambda x: closing(gt, w, x).sum())(x))
        same(jitted(w, x), [3.0] * 3)


@pytest.mark.parametrize("how", ["gt.grad", "native grad", "gt.jvp", "native jvp"])
def test_differentiating_what_a_rule_closes_over_raises(gt, native, x, how):
    def f(w):
        return closing(gt, w, x).sum()

    w = native.array(np.array(3.0))
    ways = {
        "gt.grad": lambda: gt.grad(f)(w),
        "native grad": lambda: native.grad(f)(w),
        "gt.jvp": lambda: gt.jvp(f, (w,), (w,)),
        "native jvp": lambda: native.jvp(f, (w,), (w,)),
    }
    with pytest.raises(GradtoolsError, match=r"closes over .* as an argument|as an argument"):
        ways[how]()


def test_a_backward_pass_alone_that_closes_over_a_differentiated_array_raises(gt, native, x):
    def f(w, x):
        g = gt.custom_rule(lambda x: x * x)
        g.defvjp(lambda x: (x * x, x), lambda x, ct: (2 * w * x * ct,))
        return g(x)

    def second(w):
        return gt.grad(lambda x: f(w, x).sum())(x).sum()

    with pytest.raises(GradtoolsError, match="closes over"):
        gt.grad(second)(native.array(np.array(3.0)))


# --- host functions ----------------------------------------------------------------------


@pytest.mark.slow_at("jax")
def test_a_host_function_without_a_rule_names_itself_when_differentiated(gt, x):
    def opaque(x):
        return np.sin(x)

    f = gt.host_function(opaque)
    same(f(x), np.sin(X))
    assert repr(f) == "<host function opaque, rules: none>"
    for derivative in (
        lambda: gradients(gt, f, x),
        lambda: gt.jvp(f, (x,), (x,)),
        lambda: gt.linearize(f, x)[1](x),
    ):
        with pytest.raises(GradtoolsError, match="host function 'opaque' has no rule"):
            derivative()
    same(f(gt.stop_gradient(x)), np.sin(X))


def cube(gt, calls=None):
    """Return x^3 with host kernels for the forward, backward and double-backward passes."""

    def noted(name, fun):
        def kernel(*args):
            if calls is not None:
                calls.append(name)
            return fun(*args)

        kernel.__name__ = name
        return kernel

    f = gt.host_function(noted("cube", lambda x: x**3))
    back = gt.host_function(noted("cube_backward", lambda x, c: 3 * x**2 * c))
    twice = gt.host_function(
        noted("cube_double_backward", lambda x, c, v: (6 * x * c * v, 3 * x**2 * v)),
        out=lambda x, c, v: (x, c),
    )
    f.defvjp(lambda x: (f(x), x), lambda x, c: (back(x, c),))
    back.defvjp(lambda x, c: (back(x, c), (x, c)), lambda res, v: twice(*res, v))
    return f


def test_each_kernel_runs_once_in_a_gradient(gt, x):
    calls = []
    f = cube(gt, calls)
    same(gradients(gt, f, x)[0], 3 * X**2)
    assert calls == ["cube", "cube_backward"]
    calls.clear()
    same(gradients(gt, f, x)[0], 3 * X**2)
    assert calls == ["cube", "cube_backward"]


@pytest.mark.slow_at("jax")
def test_a_symmetric_hessian_stands_in_for_a_missing_forward_rule_only_where_needed(gt, x, y):
    """A known derivative of bwd takes precedence over the assumption of a symmetric Hessian."""
    f = gt.host_function(lambda x: x * 1.0)
    matrix = np.array([[0.0, 1.0, 0.0], [0.0, 0.0, 0.0], [0.0, 0.0, 0.0]])

    def bwd(x, ct):
        return (gt.asarray(matrix) @ (x * x) * ct,)

    f.defvjp(lambda x: (f(x), x), bwd)
    jacobian = matrix @ np.diag(2 * X)
    assert not np.allclose(jacobian, jacobian.T)
    found = gt.jvp(lambda x: gt.grad(lambda x: f(x).sum())(x), (x,), (y,))[1]
    same(found, jacobian @ Y)


MATRIX = np.array([[1.0, 2.0, -1.0], [0.5, -3.0, 2.0], [4.0, 1.0, 0.25]])
OF_ITS_OWN_RULE = {  # f(x) = M x, whose forward rule calls f itself
    "grad": (lambda gt, f, x: gt.grad(lambda x: f(x).sum())(x), MATRIX.sum(0)),
    "reverse jacobian": (lambda gt, f, x: gt.jacobian(f, mode="reverse")(x), MATRIX),
    "hessian": (
        lambda gt, f, x: gt.hessian(lambda x: (f(x) ** 2).sum())(x),
        2 * MATRIX.T @ MATRIX,
    ),
    "grad of vmap": (
        lambda gt, f, x: gt.grad(lambda x: gt.vmap(f)(gt.xp.stack([x, x])).sum())(x),
        2 * MATRIX.sum(0),
    ),
    "hessian of vmap": (
        lambda gt, f, x: gt.hessian(lambda x: (gt.vmap(f)(gt.xp.stack([x, 2 * x])) ** 2).sum())(x),
        10 * MATRIX.T @ MATRIX,
    ),
}


@pytest.mark.slow_at(("jax", "hessian of vmap"))
@pytest.mark.parametrize("name", OF_ITS_OWN_RULE)
def test_a_linear_function_that_is_its_own_forward_rule_is_transposed_by_its_code(gt, name):
    matrix = gt.asarray(MATRIX)
    f = gt.custom_rule(lambda x: matrix @ x)
    f.defjvp(lambda p, t: (f(p[0]), f(t[0])))
    run, expected = OF_ITS_OWN_RULE[name]
    found = gt.to_numpy(run(gt, f, gt.asarray(np.array([1.0, -2.0, 0.5]))))
    np.testing.assert_allclose(found, expected, rtol=1e-12, atol=1e-12)
