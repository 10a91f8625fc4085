"""A linear kernel with an adjoint has derivatives in every mode and order without a rule.

The reference is the same linear map written in the framework.
"""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
import scipy.sparse.linalg

from gradtools import GradtoolsError
from gradtools.testing import AgreementError, check_rule

M = np.random.default_rng(0).normal(size=(3, 5))
C = M + 1j * np.random.default_rng(1).normal(size=(3, 5))


def product(gt, matrix, vectorized=False):
    """Return a matrix product as a host function, and the same product in the framework."""
    op = scipy.sparse.linalg.aslinearoperator(matrix)
    dtype = str(matrix.dtype)
    spec = lambda n: gt.ArraySpec((n,), dtype)
    host = gt.host_function(op.matvec, out=spec(op.shape[0]), adjoint=op.rmatvec)
    if vectorized:
        host = gt.host_function(
            lambda x: x @ matrix.T, spec(op.shape[0]), True, lambda y: y @ matrix.conj()
        )
    return host, lambda x: gt.asarray(matrix) @ x


def half_spectrum(gt):
    """Return rfft as a host function whose adjoint accounts for the entries that rfft omits."""

    def adjoint(y):
        full = np.zeros(6, complex)
        full[:4] = y
        return 6 * np.fft.ifft(full).real

    out = lambda x, *_: gt.ArraySpec((x.shape[0] // 2 + 1,), "complex128")
    host = gt.host_function(np.fft.rfft, out=out, adjoint=adjoint)
    return host, gt.xp.fft.rfft


def spectrum(gt):
    host = gt.host_function(np.fft.fft, adjoint=lambda y: len(y) * np.fft.ifft(y))
    return host, gt.xp.fft.fft


def pair(gt):
    """Return the map (x, y) -> (M x + M y, x - y) as a host function and in the framework."""
    out = lambda x, y: {"a": gt.ArraySpec((3,), "float64"), "b": x}
    host = gt.host_function(
        lambda x, y: {"a": M @ (x + y), "b": x - y},
        out=out,
        adjoint=lambda c: (M.T @ c["a"] + c["b"], M.T @ c["a"] - c["b"]),
    )
    both = lambda x: (lambda t: gt.xp.concat([t["a"], t["b"]]))(host(x[:5], x[5:]))
    m = gt.asarray(M)
    plain = lambda x: gt.xp.concat([m @ (x[:5] + x[5:]), x[:5] - x[5:]])
    return both, plain


KINDS = {
    "real": (partial(product, matrix=M), np.float64, 5),
    "complex": (partial(product, matrix=C), np.complex128, 5),
    "float32": (partial(product, matrix=M.astype("float32")), np.float32, 5),
    "vectorized": (partial(product, matrix=C, vectorized=True), np.complex128, 5),
    "fft": (spectrum, np.complex128, 5),
    "rfft": (half_spectrum, np.float64, 6),
    "pair": (pair, np.float64, 10),
}


def numbers(gt, name, *lead, seed=2):
    _, dtype, n = KINDS[name]
    draw = np.random.default_rng(seed).normal
    x = draw(size=(*lead, n)) + (1j * draw(size=(*lead, n)) if dtype == np.complex128 else 0)
    return gt.asarray(np.asarray(x, dtype))


def losses(gt, name):
    """Return a nonlinear loss of the kernel, and the same loss of the framework's linear map."""

    def of(linear):
        def loss(x):
            y = gt.xp.abs(linear(gt.xp.sin(x))) ** 2
            return (y**2).sum() + gt.xp.sin(y).sum()

        return loss

    return [of(linear) for linear in KINDS[name][0](gt)]


def close(gt, found, expected):
    a, b = gt.to_numpy(found), gt.to_numpy(expected)
    assert a.dtype == b.dtype
    rtol = 1e-4 if a.dtype in (np.float32, np.complex64) else 1e-10
    np.testing.assert_allclose(a, b, rtol=rtol, atol=rtol * np.abs(b).max())


@pytest.mark.slow_at(("jax", "rfft"), ("jax", "pair"), ("jax", "complex"))
@pytest.mark.parametrize("name", KINDS)
def test_first_and_second_order_in_both_modes_are_those_of_the_framework(gt, name):
    ours, plain = losses(gt, name)
    x, u = numbers(gt, name), numbers(gt, name, seed=3)
    close(gt, gt.grad(ours)(x), gt.grad(plain)(x))
    close(gt, gt.jvp(ours, (x,), (u,))[1], gt.jvp(plain, (x,), (u,))[1])
    for mode in ("forward_over_reverse", "reverse_over_reverse"):
        found, expected = (gt.hvp(f, (x,), (u,), mode=mode) for f in (ours, plain))
        close(gt, found[1][0], expected[1][0])
    along = lambda f: lambda x: gt.jvp(f, (x,), (u,))[1]
    close(gt, gt.grad(along(ours))(x), gt.grad(along(plain))(x))
    close(gt, gt.jvp(along(ours), (x,), (u,))[1], gt.jvp(along(plain), (x,), (u,))[1])


@pytest.mark.slow_at(("jax", "rfft"), ("jax", "pair"))
@pytest.mark.parametrize("name", KINDS)
def test_under_vmap_and_at_third_order(gt, name):
    ours, plain = losses(gt, name)
    x, u = numbers(gt, name, 3), numbers(gt, name, seed=3)
    close(gt, gt.vmap(gt.grad(ours))(x), gt.vmap(gt.grad(plain))(x))
    close(gt, gt.grad(lambda x: gt.vmap(ours)(x).sum())(x), gt.vmap(gt.grad(plain))(x))
    second = lambda f: lambda x: gt.hvp(f, (x,), (u,))[1][0]
    third = lambda f: gt.grad(lambda x: gt.xp.abs(second(f)(x)).sum())
    close(gt, third(ours)(x[0]), third(plain)(x[0]))


def test_check_rule_tells_a_right_adjoint_from_a_wrong_one(gt):
    x = gt.to_numpy(numbers(gt, "fft"))
    assert check_rule(spectrum(gt)[0], (x,), gt)
    for kernel, adjoint in ((np.fft.fft, np.fft.ifft), (np.conj, lambda y: y), (np.sin, np.sin)):
        with pytest.raises(AgreementError):
            check_rule(gt.host_function(kernel, adjoint=adjoint), (x,), gt)


def test_a_wrong_adjoint_is_another_number(gt):
    host = gt.host_function(lambda x: 2 * x, adjoint=lambda y: 3 * y)
    x = numbers(gt, "real")
    close(gt, gt.grad(lambda x: host(x).sum())(x), 3 * gt.xp.ones_like(x))
    close(gt, gt.jvp(lambda x: host(x).sum(), (x,), (x,))[1], 2 * x.sum())


def test_a_constant_in_a_kernel_is_refused_where_the_kernel_is_its_own_derivative(gt):
    calls, A = [], M[:, :3]

    def affine(x):
        calls.append(x)
        return A @ x + 1.0

    host = gt.host_function(affine, adjoint=lambda y: A.T @ y)
    x = gt.asarray(M[0, :3])
    close(gt, gt.grad(lambda x: host(x).sum())(x), gt.asarray(A.sum(0)))
    assert len(calls) == 1  # the adjoint alone is evaluated in reverse mode
    loss = lambda x: (host(x) ** 2).sum()
    twice = gt.grad(lambda x: (gt.grad(loss)(x) ** 2).sum())
    for of in (lambda x: gt.jvp(host, (x,), (x,)), gt.hessian(loss), twice):
        with pytest.raises(GradtoolsError, match=r"'affine' .* is not 0 at 0. Add a constant out"):
            of(x)
    solver = gt.host_function(lambda x: x * (np.vdot(x, x) / np.vdot(x, x)), adjoint=lambda y: y)
    close(gt, gt.jvp(solver, (x,), (2 * x,))[1], 2 * x)  # NaN at 0 is not a constant


def test_an_adjoint_of_another_shape_or_dtype_is_refused(gt):
    x = numbers(gt, "real")
    for adjoint in (lambda y: y[:2], lambda y: y.astype("float32"), lambda y: None):
        host = gt.host_function(lambda x: x * 2, adjoint=adjoint)
        with pytest.raises(GradtoolsError, match="host function"):
            gt.to_numpy(gt.grad(lambda x, host=host: host(x).sum())(x))


def test_what_is_not_linear_is_refused_in_words(gt):
    host = gt.host_function(lambda x, n=2: n * x, adjoint=lambda y: 2 * y)
    x = numbers(gt, "real")
    with pytest.raises(GradtoolsError, match=r"called with other arguments.*functools.partial"):
        gt.grad(lambda x: host(x, 3).sum())(x)
    rows = gt.host_function(lambda x, i: x + i, adjoint=lambda y: (y, y))
    with pytest.raises(GradtoolsError, match="an argument has dtype int"):
        gt.grad(lambda x: rows(x, gt.asarray(np.arange(5, dtype="int32"))).sum())(x)
    host.defvjp(lambda x: (host(x), None), lambda r, c: (c,))
    with pytest.raises(GradtoolsError, match="also has a rule"):
        gt.grad(lambda x: host(x).sum())(x)
    with pytest.raises(GradtoolsError, match="adjoint must be a function"):
        gt.host_function(lambda x: x, adjoint=3)


def test_a_kernel_that_mixes_entries_is_differentiated_twice_outside_of_vmap(gt):
    """Outside of vmap, the backward pass calls the user's rule, not its batched version."""
    f = gt.host_function(lambda x: np.cumsum(x) ** 2)
    back = gt.host_function(lambda x, c: np.cumsum((2 * np.cumsum(x) * c)[::-1])[::-1])
    twice = gt.host_function(
        lambda x, c, v: (
            np.cumsum((2 * c * np.cumsum(v))[::-1])[::-1],
            2 * np.cumsum(x) * np.cumsum(v),
        ),
        out=lambda x, c, v: (x, c),
    )
    f.defvjp(lambda x: (f(x), x), lambda x, c: (back(x, c),))
    back.defvjp(lambda x, c: (back(x, c), (x, c)), lambda r, v: twice(*r, v))
    rows = lambda g: lambda x: (gt.vmap(g)(x) ** 2).sum()
    plain = lambda x: (gt.asarray(np.tri(5)) @ x) ** 2
    x, u = numbers(gt, "real", 3), numbers(gt, "real", 3, seed=3)
    for mode in ("reverse_over_reverse", "forward_over_reverse"):
        found, expected = (gt.hvp(rows(g), (x,), (u,), mode=mode) for g in (f, plain))
        close(gt, found[0][0], expected[0][0])
        close(gt, found[1][0], expected[1][0])
