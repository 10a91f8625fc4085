"""Sparse Jacobians and Hessians equal dense Jacobians and Hessians and require few products."""

from __future__ import annotations

import numpy as np
import pytest

from gradtools import GradtoolsError

sparse = pytest.importorskip("scipy.sparse")
N = 12
RNG = np.random.default_rng(0)
X = RNG.normal(size=N)
BANDED = np.diag(np.full(N, 2.0)) + np.diag(np.ones(N - 1), 1)


def joined(gt, *xs):
    return gt.xp.concat([x.reshape((-1,)) for x in xs])


def stencil(gt, x):
    return x[1:-1] ** 2 * x[:-2] - gt.xp.sin(x[2:])


def arrow(gt, x):
    return joined(gt, x[:1] * gt.xp.sum(x), x[0] * x[1:])


def blocks(gt, x):
    rows = x.reshape((3, 4))
    return rows / gt.xp.sum(rows**2, axis=1)[:, None]


PROGRAMS = {  # the program, and the number of entries of its Jacobian that may be nonzero
    "elementwise": (lambda gt, x: gt.xp.tanh(x) * x, N),
    "stencil": (stencil, 3 * (N - 2)),
    "arrow": (arrow, 3 * N - 2),
    "blocks": (blocks, 4 * N),
    "constant matrices": (
        lambda gt, x: gt.asarray(BANDED) @ gt.xp.tanh(gt.asarray(BANDED) @ x),
        3 * N - 3,
    ),
    "indices": (lambda gt, x: x[np.array([3, 1, 1])] * 2.0, 3),
    "where": (lambda gt, x: gt.xp.where(x > 0, x, x**2), N),
    "stopped": (lambda gt, x: gt.stop_gradient(x) * x, N),
    "constant": (lambda gt, x: gt.xp.zeros_like(x), 0),
    "one number": (lambda gt, x: gt.xp.sum(x**2).reshape((1,)), N),
    "reversed gradient": (lambda gt, x: gt.reverse_gradient(x) ** 2, N),
}


def dense(x):
    return np.asarray(x.to_dense().detach() if hasattr(x, "to_dense") else x.todense())


def count(x):
    return x._nnz() if hasattr(x, "_nnz") else x.nse


@pytest.mark.sampled(torch=(33, 33), jax=(18, 33))
@pytest.mark.parametrize("mode", ["auto", "forward", "reverse"])
@pytest.mark.parametrize("name", PROGRAMS)
def test_a_sparse_jacobian_is_the_dense_one(gt, name, mode):
    program, entries = PROGRAMS[name]
    x = gt.asarray(X)
    wanted = gt.to_numpy(gt.jacobian(lambda x: program(gt, x))(x))
    pattern = wanted != 0
    found = gt.jacobian(lambda x: program(gt, x), mode=mode, sparsity=pattern)(x)
    assert found.shape == wanted.shape
    np.testing.assert_allclose(dense(found), wanted, rtol=1e-12, atol=1e-13)
    assert count(found) == entries


def pattern_of_framework(gt, pattern):
    if gt.__name__.endswith("torch"):
        return gt.asarray(pattern.toarray()).to_sparse()
    from jax.experimental.sparse import BCOO

    return BCOO.from_scipy_sparse(pattern)


@pytest.mark.parametrize("kind", ["scipy", "boolean", "framework", "shape of the Jacobian"])
def test_a_pattern_is_taken_in_every_form(gt, kind):
    pattern = sparse.diags([1.0, 1.0, 1.0], [0, 1, 2], shape=(N - 2, N)).tocsr()
    given = {
        "scipy": lambda: pattern,
        "boolean": lambda: pattern.toarray() != 0,
        "framework": lambda: pattern_of_framework(gt, pattern),
        "shape of the Jacobian": lambda: (pattern.toarray() != 0).reshape(N - 2, N),
    }[kind]()
    x = gt.asarray(X)
    found = gt.jacobian(lambda x: stencil(gt, x), sparsity=given)(x)
    wanted = gt.to_numpy(gt.jacobian(lambda x: stencil(gt, x))(x))
    np.testing.assert_allclose(dense(found), wanted, rtol=1e-12, atol=1e-13)
    assert count(found) == 3 * (N - 2)


def products_of(gt, monkeypatch, run):
    """Count the products that a call computes, including the product that checks the result."""
    rows = []
    backend = gt.grad.__self__._backend
    plain = backend.map_batches

    def counted(f, batch, *args, **kwargs):
        rows.append(batch[0].shape[0])
        return plain(f, batch, *args, **kwargs)

    monkeypatch.setattr(backend, "map_batches", counted)
    run()
    return sum(rows)


def test_a_pattern_with_one_axis_is_that_of_a_gradient(gt):
    result = gt.jacobian(lambda x: (x**2).sum(), sparsity=sparse.coo_array(np.ones(N)))
    dense = result(gt.asarray(X))
    dense = dense.to_dense() if hasattr(dense, "to_dense") else dense.todense()
    np.testing.assert_allclose(gt.to_numpy(dense), 2 * X)


@pytest.mark.torch
def test_a_sparse_jacobian_is_right_inside_of_torch_func():
    torch = pytest.importorskip("torch")
    import gradtools.torch as gt

    f = lambda x: torch.tanh(x) ** 2
    total = lambda x: gt.jacobian(f, sparsity=np.eye(4))(x).to_dense().sum()
    x = torch.linspace(0.1, 1.0, 4, dtype=torch.float64)
    expected = torch.func.grad(lambda x: torch.func.jacrev(f)(x).sum())(x)
    torch.testing.assert_close(torch.func.grad(total)(x), expected)
    torch.testing.assert_close(gt.grad(total)(x), expected)


PRODUCTS = [("stencil", 3), ("elementwise", 1), ("one number", 1), ("arrow", N)]


@pytest.mark.parametrize(("name", "products"), PRODUCTS)
def test_a_band_takes_a_product_for_each_of_its_diagonals(gt, monkeypatch, name, products):
    f, x = lambda x: PROGRAMS[name][0](gt, x), gt.asarray(X)
    run = gt.jacobian(f, sparsity=gt.to_numpy(gt.jacobian(f)(x)) != 0)
    assert products_of(gt, monkeypatch, lambda: run(gt.asarray(X))) == products + 1


def energy(gt, x):
    return gt.xp.sum(x[1:] * x[:-1]) + gt.xp.sum(gt.xp.sin(x))


@pytest.mark.parametrize("mode", ["auto", "forward_over_reverse", "reverse_over_reverse"])
def test_a_hessian_takes_a_pattern_of_one_side_of_the_diagonal(gt, monkeypatch, mode):
    x = gt.asarray(X)
    wanted = gt.to_numpy(gt.hessian(lambda x: energy(gt, x))(x))
    for pattern in (wanted != 0, np.triu(wanted != 0)):
        run = gt.hessian(lambda x: energy(gt, x), mode=mode, sparsity=pattern)
        np.testing.assert_allclose(dense(run(x)), wanted, rtol=1e-12, atol=1e-13)
    assert products_of(gt, monkeypatch, lambda: run(x)) == 4


def test_a_sparse_jacobian_in_a_trace_and_mapped():
    jax = pytest.importorskip("jax")
    import gradtools.jax as gj

    x = jax.numpy.asarray(X)
    f = lambda x: stencil(gj, x)
    band = np.triu(np.tril(np.ones((N - 2, N)), 2))
    found = jax.jit(gj.jacobian(f, sparsity=band))(x)
    assert np.isnan(jax.jit(gj.jacobian(f, sparsity=np.eye(N - 2, N)))(x).data).all()
    np.testing.assert_allclose(found.todense(), gj.jacobian(f)(x), rtol=1e-12, atol=1e-13)
    mapped = jax.vmap(lambda x: gj.jacobian(f, sparsity=band)(x).todense())(x[None])
    np.testing.assert_allclose(mapped[0], gj.jacobian(f)(x), rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ("banded", "sparsity is 'banded'; expected a boolean array"),
        (3.0, r"sparsity has shape \(\)"),
        (np.ones((2, 5)), r"sparsity has shape \(2, 5\); .* 12 columns"),
        (np.ones((3, N)), "sparsity has 3 rows; expected 10"),
        (len, "sparsity is builtin_function_or_method"),
    ],
    ids=str,
)
def test_what_is_no_pattern_is_refused(gt, given, text):
    with pytest.raises(GradtoolsError, match=text):
        gt.jacobian(lambda x: stencil(gt, x), sparsity=given)(gt.asarray(X))


def test_a_sparse_jacobian_is_differentiable(gt):
    f = lambda w, x: w * stencil(gt, x) ** 2
    values = lambda j: j.values() if hasattr(j, "values") else j.data
    band = np.triu(np.tril(np.ones((N - 2, N)), 2))
    total = lambda w: gt.xp.sum(values(gt.jacobian(lambda x: f(w, x), sparsity=band)(x)))
    x = gt.asarray(X)
    wanted = gt.to_numpy(gt.jacobian(lambda x: stencil(gt, x) ** 2)(x)).sum()
    np.testing.assert_allclose(
        gt.to_numpy(gt.grad(total)(gt.asarray(np.float64(2.0)))), wanted, rtol=1e-12
    )


@pytest.mark.slow_at("torch")
def test_a_sparse_jacobian_in_compiled_code(gt):
    values = lambda j: j.coalesce().values() if hasattr(j, "coalesce") else j.data
    run = lambda x: values(gt.jacobian(lambda x: x**3, sparsity=np.eye(N))(x)) * 1.0
    np.testing.assert_allclose(gt.to_numpy(gt.compile(run)(gt.asarray(X))), 3 * X**2)


@pytest.mark.parametrize("mode", ["auto", "forward", "reverse"])
def test_a_pattern_that_omits_an_entry_is_refused(gt, mode):
    x = gt.asarray(X)
    with pytest.raises(GradtoolsError, match="jacobian: sparsity omits nonzero entries"):
        gt.jacobian(lambda x: stencil(gt, x), mode=mode, sparsity=np.eye(N - 2, N))(x)
    with pytest.raises(GradtoolsError, match="hessian: sparsity omits nonzero entries"):
        gt.hessian(lambda x: energy(gt, x), sparsity=np.eye(N))(x)


def test_an_infinite_entry_hides_no_other(gt):
    f = lambda x: joined(gt, gt.xp.sqrt(x[:1]), (x[0] + x[1]).reshape((1,)), x[2:3])
    with pytest.raises(GradtoolsError, match="sparsity omits nonzero entries"):
        gt.jacobian(f, sparsity=np.eye(3))(gt.asarray(np.array([0.0, 1.0, 2.0])))


@pytest.mark.parametrize("mode", ["forward", "reverse"])
def test_a_sparse_jacobian_of_an_array_that_varies_in_a_shard_map(backend_name, gt, mode):
    if backend_name != "jax":
        return
    import jax
    from jax.sharding import PartitionSpec as P

    def of_device(x):
        return gt.jacobian(lambda x: x**3, mode=mode, sparsity=np.eye(3) > 0)(x).todense()

    mesh = jax.make_mesh((1,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
    sharded = jax.shard_map(of_device, mesh=mesh, in_specs=P("d"), out_specs=P("d"))
    x = np.array([1.0, 2.0, 3.0])
    np.testing.assert_allclose(sharded(gt.asarray(x)), np.diag(3 * x**2), rtol=1e-12)
