"""Compares `implicit_solution` with closed forms and differentiated iterations."""

from __future__ import annotations

import numpy as np
import pytest

from gradtools import DisconnectedInputError, GradtoolsError

SHIFT = 3.0


def agree(gt, found, expected, rtol=1e-9):
    np.testing.assert_allclose(gt.to_numpy(found), gt.to_numpy(expected), rtol, 1e-11)


def fast(gt, backend_name, f):
    """Return f, which is compiled in JAX, because eager code compiles the solver in each call."""
    return gt.compile(f) if backend_name == "jax" else f


def equation(z, w, x):
    """Return the residual of a monotone system whose Jacobian is not symmetric."""
    return z**3 + SHIFT * z + w @ z - x


def newton(gt, steps=12):
    def solve(w, x):
        z, eye = 0 * x, gt.asarray(np.eye(len(x)))
        for _ in range(steps):
            A = w + SHIFT * eye + 3 * z[:, None] ** 2 * eye
            z = z - gt.xp.linalg.solve(A, equation(z, w, x)[:, None])[:, 0]
        return z

    return solve


@pytest.fixture
def wx(gt, rng):
    return gt.asarray(0.3 * rng.normal(size=(3, 3))), gt.asarray(rng.normal(size=3))


def solvers(gt):
    def neumann(matvec, b):  # the iteration x = (b - (A - s) x) / s
        x = b / 6
        for _ in range(60):
            x = (b - matvec(x) + 6 * x) / 6
        return x

    return {"gmres": "gmres", "dense": "dense", "a function": neumann}


def derivatives(gt, f, w, x):
    """Return all derivatives of a loss of f up to third order, in both modes."""
    loss = lambda w, x: (f(w, x) ** 3).sum()
    product = lambda mode: gt.hvp(loss, (w, x), (w, x), mode)[1]
    return {
        "gradient": gt.grad(loss, (0, 1))(w, x),
        "tangent": gt.jvp(f, (w, x), (w, x))[1],
        "reverse over reverse": product("reverse_over_reverse"),
        "forward over reverse": product("forward_over_reverse"),
        "reverse over forward": gt.grad(lambda w: gt.jvp(loss, (w, x), (w, x))[1])(w),
        "forward over forward": gt.jvp(
            lambda x: gt.jvp(lambda x: f(w, x), (x,), (x,))[1], (x,), (x,)
        )[1],
        "jacobian": gt.jacobian(f, 1)(w, x),
        "third": gt.grad(lambda x: (gt.hvp(lambda x: loss(w, x), (x,), (x,))[1][0] ** 2).sum())(x),
    }


@pytest.mark.parametrize("solver", ["gmres", "dense", "a function"])
@pytest.mark.slow_at(("jax", "gmres"), ("jax", "a function"), ("jax", "dense"))
def test_derivatives_of_every_order_are_those_of_the_iteration(gt, backend_name, wx, solver):
    root = gt.implicit_solution(equation, newton(gt), solvers(gt)[solver])
    both = [
        fast(gt, backend_name, lambda w, x, f=f: derivatives(gt, f, w, x))(*wx)
        for f in (root, newton(gt))
    ]
    for name, found in both[0].items():
        as_tuple = lambda v: v if isinstance(v, tuple) else (v,)
        for a, b in zip(as_tuple(found), as_tuple(both[1][name]), strict=True):
            agree(gt, a, b, 1e-8)


@pytest.mark.slow_at("jax")
def test_it_is_mapped_and_transformed(gt, backend_name, wx, rng):
    w, _ = wx
    xs = gt.asarray(rng.normal(size=(2, 3)))
    root = gt.implicit_solution(equation, newton(gt), "dense")
    of = lambda f: lambda w, x: (f(w, x) ** 2).sum()
    gradient = gt.grad(of(root), (0, 1))
    mapped = fast(gt, backend_name, gt.vmap(gradient, in_axes=(None, 0)))(w, xs)
    summed = fast(gt, backend_name, gt.grad(lambda w: gt.vmap(root, (None, 0))(w, xs).sum()))(w)
    plain = [gt.grad(of(newton(gt)), (0, 1))(w, x) for x in xs]
    for k in (0, 1):
        agree(gt, mapped[k], gt.xp.stack([p[k] for p in plain]))
    agree(gt, summed, sum(gt.grad(lambda w, x: newton(gt)(w, x).sum())(w, x) for x in xs))
    if backend_name == "torch":
        import torch

        agree(gt, torch.func.grad(of(root))(w, xs[0]), plain[0][0])
        leaf = w.clone().requires_grad_()
        of(root)(leaf, xs[0]).backward()
        agree(gt, leaf.grad, plain[0][0])
        with torch.no_grad():
            agree(gt, gradient(w, xs[0])[0], plain[0][0])


@pytest.mark.parametrize("solver", ["gmres", "cg"])
@pytest.mark.slow_at(("jax", "gmres"))
def test_the_solvers_are_mapped(gt, backend_name, rng, solver):
    """The solver must not branch on values, because vmap does not support such branches."""
    root = gt.implicit_solution(lambda z, a: z**3 + z - a, lambda a: _cubic(gt, a), solver)
    a = gt.asarray(rng.normal(size=(2, 3)))
    found = fast(gt, backend_name, gt.vmap(gt.grad(lambda a: root(a).sum())))(a)
    agree(gt, found, 1 / (3 * _cubic(gt, a) ** 2 + 1))


def _cubic(gt, a):
    z = 0 * a
    for _ in range(30):
        z = z - (z**3 + z - a) / (3 * z**2 + 1)
    return z


@pytest.mark.slow_at("jax")
def test_trees_complex_numbers_and_arguments_without_derivatives(gt, rng):
    p = {"p": gt.asarray(rng.uniform(1, 2, size=3))}
    F = lambda z, t, n, scale=1: {"a": z["a"] ** n - t["p"], "b": [z["b"][0] - scale * z["a"]]}
    solve = lambda t, n, scale=1: ({"a": t["p"] ** 0.5, "b": [scale * t["p"] ** 0.5]}, "steps: 3")
    root = gt.implicit_solution(F, solve, "dense", has_aux=True)
    assert root(p, 2)[1] == "steps: 3"
    for n in (2, gt.asarray(np.int64(2))):
        found = gt.grad(lambda t, n=n: root(t, n, scale=3)[0]["b"][0].sum())(p)["p"]
        agree(gt, found, 1.5 * p["p"] ** -0.5)

    c = gt.asarray(np.array([1 + 2j, 2 - 1j]))
    loss = lambda f: lambda c: (f(c).real ** 2 + 3 * f(c).imag).sum()
    solutions = {
        "holomorphic": (lambda z, c: z * z - c, lambda c: gt.xp.sqrt(c)),
        "real-linear": (
            lambda z, c: 2 * z + gt.xp.conj(z) - c,
            lambda c: gt.xp.real(c) / 3 + 1j * gt.xp.imag(c),
        ),
    }
    for F, solve in solutions.values():
        root = gt.implicit_solution(F, solve, "dense")
        agree(gt, gt.grad(loss(root))(c), gt.grad(loss(solve))(c))


def product_root(gt, a, b):
    """Return the square root of a b as the solution of an equation that closes over b."""
    return gt.implicit_solution(lambda z, a: z * z - a * b, lambda a: (a * b) ** 0.5, "dense")(a)


CLOSURES = {
    "gradients": lambda gt, f, a, b: gt.grad(f, (0, 1))(a, b),
    "a captured array used twice": lambda gt, f, a, b: gt.grad(lambda b: f(a, b) + b)(b),
    "tangents": lambda gt, f, a, b: gt.jvp(f, (a, b), (a, b))[1],
    "the tangent of a captured array": lambda gt, f, a, b: gt.jvp(lambda b: f(a, b), (b,), (b,))[1],
    "hessian": lambda gt, f, a, b: gt.hessian(f, (0, 1))(a, b),
    "forward over forward": lambda gt, f, a, b: gt.jvp(
        lambda b: gt.jvp(lambda b: f(a, b), (b,), (b,))[1], (b,), (b,)
    )[1],
    "forward over reverse": lambda gt, f, a, b: gt.hvp(f, (a, b), (b, a), "forward_over_reverse"),
    "third": lambda gt, f, a, b: gt.grad(gt.grad(gt.grad(lambda b: f(a, b))))(b),
    "mapped": lambda gt, f, a, b: gt.vmap(gt.grad(f, (0, 1)), (None, 0))(a, gt.xp.stack([b, a])),
    "a loss of a map": lambda gt, f, a, b: gt.grad(
        lambda b: gt.vmap(f, (0, None))(gt.xp.stack([a, b]), b).sum()
    )(b),
    "checkpoint": lambda gt, f, a, b: gt.grad(
        gt.grad(lambda b: gt.checkpoint(lambda a: f(a, b) * b)(a))
    )(b),
}


@pytest.mark.parametrize("name", CLOSURES)
def test_what_the_equation_closes_over_is_differentiated(gt, backend_name, name):
    a, b = gt.asarray(np.float64(2)), gt.asarray(np.float64(3))
    plain = lambda a, b: (a * b) ** 0.5
    found, expected = (
        fast(gt, backend_name, lambda a, b, f=f: CLOSURES[name](gt, f, a, b))(a, b)
        for f in (lambda a, b: product_root(gt, a, b), plain)
    )
    for x, y in zip(gt_leaves(found), gt_leaves(expected), strict=True):
        agree(gt, x, y)


def gt_leaves(tree):
    return [y for x in tree for y in gt_leaves(x)] if isinstance(tree, tuple | list) else [tree]


def test_a_layer_trains_the_module_that_it_closes_over(gt, backend_name):
    """Compare gradients of closed-over parameters with gradients through the iterations."""
    if backend_name == "jax":
        pytest.skip("needs a PyTorch module")
    import torch

    torch.manual_seed(0)
    net = torch.nn.Linear(3, 3, dtype=torch.float64)
    with torch.no_grad():
        net.weight *= 0.3
    step = lambda z, a: torch.tanh(gt.scale_gradient(net(z), 1.0) + a)
    rest = torch.ones(3, dtype=torch.float64)

    def iterated(a):
        z = 0 * a
        for _ in range(80):
            z = step(z, a)
        return z

    layer = gt.implicit_solution(lambda z, a: step(z, a) - z, iterated)
    both = []
    for f in (layer, iterated):
        a = rest.clone().requires_grad_()
        inputs = [a, *net.parameters()]
        first = torch.autograd.grad((f(a) ** 3).sum(), inputs, create_graph=True)
        both.append([*first, *torch.autograd.grad(sum((g**2).sum() for g in first), inputs)])
    for x, y in zip(*both, strict=True):
        agree(gt, x.detach(), y.detach(), 1e-8)


def test_a_captured_tensor_that_only_a_function_takes_is_refused(backend_name):
    if backend_name == "jax":
        pytest.skip("needs a torch.autograd.Function")
    import torch

    import gradtools.torch as gt

    class Product(torch.autograd.Function):
        @staticmethod
        def forward(ctx, z, w):
            ctx.save_for_backward(z, w)
            return z * w

        @staticmethod
        def backward(ctx, ct):
            z, w = ctx.saved_tensors
            return ct * w, ct * z

    a = torch.ones(3, dtype=torch.float64)
    leaf = torch.rand(3, dtype=torch.float64, requires_grad=True)
    for w in (leaf, leaf.exp()):
        F = lambda z, a, w=w: 0.1 * torch.tanh(Product.apply(z, w)) + a - z
        solve = lambda a, w=w: _iterated(lambda z: 0.1 * torch.tanh(z * w) + a, a)
        with pytest.raises(GradtoolsError, match=r"only to an autograd\.Function"):
            gt.implicit_solution(F, solve)(a)


def _iterated(step, z):
    for _ in range(60):
        z = step(z)
    return z


def test_a_call_keeps_nothing_that_the_equation_closes_over(gt, backend_name):
    """The rules that a call with captured arrays creates must be freed after the call."""
    import gc
    import weakref

    a, held, kept = gt.asarray(np.ones(3)), [], []
    root = gt.implicit_solution(lambda z, a: z * held[0] - a, lambda a: a / held[0], "dense")

    def loss(b):
        held[:] = [2 * b]
        kept.append(weakref.ref(held[0]))
        return root(a).sum()

    gt.grad(loss)(gt.asarray(np.ones(3)))
    held.clear()
    gc.collect()
    assert not any(one() is not None for one in kept)


def test_float32_is_solved_to_its_precision(gt):
    a = gt.asarray(np.float32([4.0, 9.0]))
    root = gt.implicit_solution(lambda z, a: z * z - a, lambda a: a**0.5, "cg")
    g = gt.grad(lambda a: root(a).sum())(a)
    assert str(g.dtype).endswith("float32")
    np.testing.assert_allclose(gt.to_numpy(g), [0.25, 1 / 6], rtol=1e-5)


def test_solve_may_be_scipy(gt, backend_name):
    import scipy.optimize

    def scipy_root(a):
        return scipy.optimize.root(lambda z: z**3 + z - np.asarray(a), np.ones(2), tol=1e-13).x

    F, a = lambda z, a: z**3 + z - a, gt.asarray(np.array([2.0, 0.7]))
    ways = [lambda a: gt.asarray(scipy_root(gt.to_numpy(a))), gt.host_function(scipy_root)]
    expected = gt.grad(lambda a: _cubic(gt, a).sum())(a)
    for k, solve in enumerate(ways):
        gradient = gt.grad(lambda a, s=solve: gt.implicit_solution(F, s, "dense")(a).sum())
        agree(gt, (fast(gt, backend_name, gradient) if k else gradient)(a), expected)


@pytest.mark.slow_at("jax")
def test_solve_may_be_an_optimizer_and_the_minimum_is_differentiated(gt, backend_name, rng):
    """Compare the gradient and Hessian of a validation loss with the closed-form ridge solution."""
    X, V = (gt.asarray(rng.normal(size=(n, 3))) for n in (20, 9))
    y, v = X @ gt.asarray(np.ones(3)), gt.asarray(rng.normal(size=9))
    cost = lambda b, s: ((X @ b - y) ** 2).mean() + gt.xp.exp(s) * (b**2).sum()
    calls = []

    def minimum(s):
        calls.append(0)
        if backend_name == "torch":
            import torch

            b = torch.zeros(3, dtype=torch.float64, requires_grad=True)
            optimizer = torch.optim.SGD([b], lr=0.2)
            for _ in range(400):
                optimizer.zero_grad()
                cost(b, s).backward()
                optimizer.step()
            return b
        import jax

        step = lambda _, b: b - 0.2 * jax.grad(cost)(b, s)
        return jax.lax.fori_loop(0, 400, step, jax.numpy.zeros(3))

    closed = lambda s: gt.xp.linalg.solve(
        X.T @ X / 20 + gt.xp.exp(s) * gt.asarray(np.eye(3)), (X.T @ y / 20)[:, None]
    )[:, 0]
    ridge, s = gt.implicit_solution(gt.grad(cost), minimum, "cg"), gt.asarray(np.float64(-1))
    loss = lambda f: lambda s: ((V @ f(s) - v) ** 2).mean()
    if backend_name == "torch":
        gt.grad(loss(ridge))(s)
        assert len(calls) == 1
    of = lambda f: fast(gt, backend_name, lambda s: (gt.grad(loss(f))(s), gt.hessian(loss(f))(s)))
    for a, b in zip(of(ridge)(s), of(closed)(s), strict=True):
        agree(gt, a, b, 1e-8)


def test_what_is_no_solution_is_refused_and_nan_in_a_trace(gt, backend_name):
    a = gt.asarray(np.array([2.0, 0.7]))
    F = lambda z, a: z**3 + z - a
    wrong = gt.implicit_solution(F, lambda a: a)
    with pytest.raises(GradtoolsError, match=r"^implicit_solution: F is not near zero"):
        wrong(a)
    mapped = gt.vmap(wrong)(a[None])
    assert np.isnan(gt.to_numpy(mapped)).all()
    near = gt.implicit_solution(F, lambda a: _cubic(gt, a) * (1 + 1e-4), "dense")
    # a relative error of 0.01 % in the solution raises no error
    agree(gt, near(a), _cubic(gt, a), 1e-3)
    singular = gt.implicit_solution(lambda z, a: (z - a) ** 2, lambda a: a, "cg")
    with pytest.raises(GradtoolsError, match="relative residual of the linear solve"):
        gt.grad(lambda a: singular(a).sum())(a)


def test_an_argument_that_the_equation_ignores_is_disconnected(gt, backend_name):
    """The option `disconnected_inputs` of each operator applies to each leaf, even in a trace."""
    a, b = (gt.asarray(np.array([x, 2.0])) for x in (4.0, 3.0))
    closed = lambda a: gt.implicit_solution(lambda z, t: z**2 - a, lambda t: a**0.5, "dense")
    lost = lambda t: closed(a)(t).sum()
    with pytest.raises(DisconnectedInputError, match=r"^grad: argument 0 does not reach"):
        gt.grad(lost)(b)
    if backend_name == "jax":
        with pytest.raises(DisconnectedInputError, match=r"^grad: argument 0 does not reach"):
            gt.compile(gt.grad(lost))(b)
    with pytest.raises(DisconnectedInputError, match=r"^per_example_grad: argument 0"):
        gt.per_example_grad(lambda t, x: closed(a)(t).sum() + x.sum())(b, a)
    for zero in (gt.grad(lost, disconnected_inputs="zeros")(b), gt.jvp(lost, (b,), (b,))[1]):
        agree(gt, zero, 0 * zero)
    agree(gt, gt.grad(lambda a: closed(a)(b).sum())(a), 0.5 * a**-0.5)  # a is connected

    root = gt.implicit_solution(lambda z, t: z**2 - t["a"], lambda t: t["a"] ** 0.5, "dense")
    tree, of = {"a": a, "b": b}, lambda t: root(t).sum()
    found = gt.grad(of)(tree)
    agree(gt, found["a"], 0.5 * a**-0.5)
    agree(gt, found["b"], 0 * b)
    with pytest.raises(DisconnectedInputError, match=r"^grad: argument 0\['b'\] does not reach"):
        gt.grad(of, disconnected_inputs="strict")(tree)


@pytest.mark.parametrize(
    ("solver", "F", "text"),
    [
        ("dense", "nan", "dF/dz contains NaN or infinity at the z"),
        ("gmres", "nan", "dF/dz contains NaN or infinity at the z"),
        ("cg", "skew", "'cg' needs a symmetric dF/dz, and dF/dz is not symmetric; use 'gmres'"),
        ("cg", "singular", "dF/dz may be singular; 'dense' solves small systems"),
        ("dense", "singular", "dF/dz may be singular."),
    ],
)
def test_an_unsolved_linear_system_is_explained(gt, solver, F, text):
    a = gt.asarray(np.array([2.0, 1.0]))
    A = gt.asarray(np.array([[1.0, 3.0], [-3.0, 1.0]]))
    equations = {
        "nan": lambda z, a: gt.xp.sqrt(z * 0) + z - a,
        "skew": lambda z, a: A @ (z - a),
        "singular": lambda z, a: (z - a) ** 2,
    }
    root = gt.implicit_solution(equations[F], lambda a: 1 * a, solver)
    with pytest.raises(GradtoolsError, match="relative residual of the linear solve") as caught:
        gt.grad(lambda a: (root(a) * a).sum())(a)
    assert text in str(caught.value)
    assert ("'dense'" in str(caught.value)) == ((solver, F) == ("cg", "singular"))
    with pytest.raises(GradtoolsError, match="incoming gradient or tangent"):
        gt.grad(lambda a: (root(a) * np.nan).sum())(a)


def test_checked_mode_sees_the_solution_move(gt, backend_name, wx):
    """The finite differences of `checked` must recompute the solution despite stop_gradient."""
    from gradtools.testing import checked

    def solve(w, x):
        w, x = gt.stop_gradient(w), gt.stop_gradient(x)
        return newton(gt)(w, x)

    root = gt.implicit_solution(equation, solve, "dense")
    with checked() as report:
        gt.grad(lambda w, x: (root(w, x) ** 3).sum(), (0, 1))(*wx)
        gt.linearize(root, *wx)[1](*wx)
    assert report.compared


def test_notes_and_graphs_name_the_operator_and_not_its_private_rules(gt):
    wrong = []

    def F(z, a):
        return z * z - a * (None if wrong else 1)

    root = gt.implicit_solution(F, lambda a: a**0.5, "dense")
    text = gt.gradient_graph(root, gt.asarray(4.0)).to_text()
    assert "custom rule implicit_solution" in text and "_root" not in text
    pullback = gt.vjp(root, gt.asarray(4.0))[1]
    wrong.append(True)
    with pytest.raises(TypeError, match="NoneType") as caught:
        pullback(gt.asarray(1.0))
    assert not any("bwd" in note for note in getattr(caught.value, "__notes__", []))


def test_a_linear_solver_may_return_a_numpy_array_or_a_scalar(gt):
    def numpy_solve(matvec, b):
        A = np.stack([gt.to_numpy(matvec(gt.asarray(e))) for e in np.eye(len(b))], 1)
        return np.linalg.solve(A, gt.to_numpy(b))

    a = gt.asarray(np.array([4.0, 9.0]))
    root = gt.implicit_solution(lambda z, a: z * z - a, lambda a: a**0.5, numpy_solve)
    agree(gt, gt.grad(lambda a: root(a).sum())(a), gt.asarray(np.array([1 / 4, 1 / 6])))
    scalar = lambda matvec, b: (b / matvec(b / b))[0]
    root = gt.implicit_solution(lambda z, a: z * z - a, lambda a: a**0.5, scalar)
    agree(gt, gt.grad(root)(a[0]), gt.asarray(0.25))


@pytest.mark.parametrize("solver", ["gmres", "cg", "dense"])
def test_a_solver_that_jax_does_not_run_in_shard_map_names_the_others(backend_name, gt, solver):
    if backend_name != "jax":
        return
    import jax
    from jax.sharding import PartitionSpec as P

    root = gt.implicit_solution(lambda z, a: z * z - a, lambda a: a**0.5, solver)
    mesh = jax.make_mesh((1,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
    sharded = jax.shard_map(root, mesh=mesh, in_specs=P("d"), out_specs=P("d"))
    a, gradient = gt.asarray(np.array([4.0, 9.0])), gt.grad(lambda a: sharded(a).sum())
    if solver != "gmres":
        agree(gt, gradient(a), gt.asarray(np.array([1 / 4, 1 / 6])))
        return
    with pytest.raises(TypeError) as raised:
        gradient(a)
    assert "jax.scipy's gmres does not support shard_map" in raised.value.__notes__[0]
