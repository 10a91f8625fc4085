"""Tests inputs, outputs, errors and transforms of host kernels in both frameworks."""

from __future__ import annotations

import numpy as np
import pytest

from gradtools import GradtoolsError, host_functions
from gradtools.host_kernels import ArraySpec
from tests.support.native import NATIVE
from tests.support.numpy_trees import lower


@pytest.fixture
def native(backend_name):
    return NATIVE[backend_name]


def same(found, expected):
    found, expected = lower(found), np.asarray(expected)
    assert (found.shape, found.dtype) == (expected.shape, expected.dtype)
    np.testing.assert_array_equal(found, expected)


@pytest.fixture
def host(gt):
    return gt.host_function


X = np.linspace(-1, 1, 6).reshape(2, 3)


def normalised(row):
    """Normalize one row. For a batch, the sum is over all rows, so the result differs."""
    return row / np.abs(row).sum()


def normalised_rows(rows):
    return rows / np.abs(rows).sum(-1, keepdims=True)


# --- arguments of a kernel ---------------------------------------------------------------


@pytest.mark.slow_at(("torch", "jit"))
@pytest.mark.parametrize("how", ["eager", "jit"])
@pytest.mark.parametrize(
    "dtype", ["float64", "float32", "float16", "complex128", "complex64", "int64", "uint8", "bool"]
)
@pytest.mark.parametrize("shape", [(2, 3), (), (0, 3)])
def test_a_kernel_gets_numpy_arrays_and_its_results_come_back(host, native, how, dtype, shape):
    seen = []

    def reverse(x):
        seen.append((type(x), x.shape, x.dtype.name))
        return x[..., ::-1] if x.ndim else x

    x = np.resize(X * 3, shape).astype(dtype)
    f = host(reverse)
    f = native.jit(f) if how == "jit" else f
    same(f(native.array(x)), x[..., ::-1] if shape else x)
    if x.size or how == "eager":  # XLA drops a callback whose outputs are empty
        assert seen == [(np.ndarray, shape, dtype)]


@pytest.mark.slow_at(("torch", "jit"))
@pytest.mark.parametrize("how", ["eager", "jit", "vmap"])
def test_bfloat16_arrives_as_float32_and_may_return_as_it(host, native, how):
    seen = []

    def third(x):
        seen.append(x.dtype.name)
        return x / np.float32(3)

    x = native.array(X, "bfloat16")
    wrap = {"eager": lambda f: f, "jit": native.jit, "vmap": native.vmap}[how]
    y = wrap(host(third))(x)
    assert native.dtype(y) == "bfloat16"
    assert native.bits(y) == native.bits(x / 3)
    assert set(seen) == {"float32"}


@pytest.mark.slow_at(("torch", "jit"))
@pytest.mark.parametrize("how", ["eager", "jit", "vmap"])
def test_a_kernel_cannot_write_into_its_argument(host, native, how):
    def double(x):
        x *= 2
        return x

    x = native.array(X)
    wrap = {"eager": lambda f: f, "jit": native.jit, "vmap": native.vmap}[how]
    with pytest.raises(Exception, match="read-only") as raised:
        lower(wrap(host(double))(x))
    assert how == "jit" or type(raised.value) is ValueError
    same(x, X)


def test_arguments_stand_in_c_order(host, native):
    def flags(x):
        return np.bool_(x.flags.c_contiguous and x.flags.aligned)

    x = native.array(X)
    f = host(flags, ArraySpec((), bool))
    assert f(x.T) and native.vmap(f)(x.T).all()


@pytest.mark.slow_at(("torch", "jit"))
@pytest.mark.parametrize("how", ["eager", "jit"])
def test_a_result_is_neither_its_argument_nor_the_kernels_own_memory(host, native, how):
    own = np.zeros((2, 3))

    def both(x):
        own[...] = x
        return x[:], own

    f = host(both, lambda x: (x, x))
    f = native.jit(f) if how == "jit" else f
    x, other = native.array(X), native.array(2 * X)
    y, z = f(x)
    f(other)
    same(z, X)
    if native.name == "torch":
        y += 1
    same(x, X)


def test_pytrees_go_in_and_come_out(host, native):
    def kernel(tree, factor, nothing, label):
        assert (factor, nothing, label) == (2.0, None, "a")
        return {"sum": tree["b"] + tree["a"][0], "count": np.int64(tree["b"].size)}

    def out(tree, factor, nothing, label):
        assert (nothing, label) == (None, "a")
        assert tree["a"][0] == ArraySpec((3,), "float64")
        return {"count": ArraySpec((), "int64"), "sum": tree["b"]}

    f = host(kernel, out)
    call = lambda a, b: f({"b": b, "a": [a]}, 2.0, None, "a")
    found = call(native.array(X[0]), native.array(X[1]))
    same(found["sum"], X[0] + X[1])
    same(found["count"], np.int64(3))
    found = native.vmap(call)(native.array(X), native.array(X))
    same(found["sum"], 2 * X)
    same(found["count"], np.array([3, 3]))


# --- return values of a kernel -----------------------------------------------------------

WRONG = {
    "shape": (lambda x: x[:, :2], None, r"'<lambda>': result has shape \(2, 2\) and dtype float64"),
    "dtype": (lambda x: x.astype("f4"), None, r"result has shape \(2, 3\) and dtype float32"),
    "broadcast": (lambda x: 1.0, None, r"result is the Python float 1.0; expected shape \(2, 3\)"),
    "float for int": (
        lambda x: 1.0,
        ArraySpec((), "int64"),
        "the Python float 1.0; expected shape",
    ),
    "too many": (lambda x: (x, x), None, "the kernel returned the structure"),
    "its path": (lambda x: {"a": x, "b": x[0]}, lambda x: {"a": x, "b": x}, r"result\['b'\] has s"),
}


@pytest.mark.slow_at(("torch", "jit"))
@pytest.mark.parametrize("how", ["eager", "jit", "vmap"])
@pytest.mark.parametrize("which", WRONG)
def test_a_wrong_result_is_refused_in_words(host, native, which, how):
    fun, out, match = WRONG[which]
    f, x = host(fun, out), native.array(X)
    if how == "vmap":
        f, x = native.vmap(f), native.array(X[None])
    with pytest.raises(Exception, match=match) as raised:
        lower((native.jit(f) if how == "jit" else f)(x))
    assert how == "jit" or type(raised.value) is GradtoolsError
    assert "host function '<lambda>'" in str(raised.value)


# --- exceptions --------------------------------------------------------------------------


class KernelFailedError(RuntimeError):
    pass


def failing(x):
    raise KernelFailedError("the kernel failed")


@pytest.mark.slow_at(("torch", "jit"))
@pytest.mark.parametrize("how", ["eager", "jit", "vmap"])
def test_a_kernels_exception_reaches_the_user(host, native, how):
    wrap = {"eager": lambda f: f, "jit": native.jit, "vmap": native.vmap}[how]
    kind = Exception if (native.name, how) == ("jax", "jit") else KernelFailedError
    with pytest.raises(kind, match="the kernel failed"):
        lower(wrap(host(failing))(native.array(X)))


# --- vmap --------------------------------------------------------------------------------


@pytest.mark.slow_at("torch")
def test_by_default_vmap_calls_the_kernel_once_for_each_example(host, native):
    shapes = []

    def kernel(row):
        shapes.append(row.shape)
        return normalised(row)

    for wrap in (lambda f: f, native.jit):
        shapes.clear()
        same(wrap(native.vmap(host(kernel)))(native.array(X)), normalised_rows(X))
        assert shapes == [(3,), (3,)]


@pytest.mark.sweep_at("torch")
def test_a_vectorized_kernel_is_called_once_with_the_batch_in_front(host, native):
    shapes = []

    def kernel(rows, factor):
        shapes.append((rows.shape, factor.shape))
        return factor[..., None] * normalised_rows(rows)

    f = host(kernel, vectorized=True)
    two = native.array(2.0)
    for wrap in (lambda f: f, native.jit):
        shapes.clear()
        mapped = native.vmap(lambda x: f(x, two))
        same(wrap(mapped)(native.array(X)), 2 * normalised_rows(X))
        assert shapes == [((2, 3), (2,))]


@pytest.mark.sweep_at(("torch", "jit"))
@pytest.mark.parametrize("vectorized", [False, True])
@pytest.mark.parametrize("how", ["eager", "jit"])
def test_vmap_nests(host, native, vectorized, how):
    calls = []

    def kernel(x, y):
        calls.append((x.shape, y.shape))
        return x * y.sum(-1, keepdims=True)

    f = host(kernel, vectorized=vectorized)
    x = np.arange(24.0).reshape(4, 2, 3)
    mapped = native.vmap(native.vmap(f, (0, None)), (1, 0))
    mapped = native.jit(mapped) if how == "jit" else mapped
    found = mapped(native.array(x), native.array(X))
    same(found, x.transpose(1, 0, 2) * X.sum(-1)[:, None, None])
    assert calls == ([((2, 4, 3), (2, 4, 3))] if vectorized else [((3,), (3,))] * 8)


@pytest.mark.slow_at(("torch", "jit"))
@pytest.mark.parametrize("how", ["eager", "jit"])
@pytest.mark.parametrize("where", ["loop", "while_loop", "cond", "checkpoint"])
def test_a_kernel_runs_inside_control_flow(host, native, where, how):
    f = host(lambda x: x + 1)
    if where in ("loop", "while_loop"):
        g, expected = lambda x: getattr(native, where)(f, x, 3), X + 3
    elif where == "cond":
        g, expected = lambda x: native.cond(True, f, lambda x: x, x), X + 1
    else:
        g, expected = native.checkpoint(f), X + 1
    same((native.jit(g) if how == "jit" else g)(native.array(X)), expected)


# --- loops, cond, checkpoint, compiled ---------------------------------------------------


@pytest.mark.sweep_at("torch")
def test_calls_with_other_constants_are_other_calls(host, native):
    f = host(lambda x, s: np.asarray(s * x, x.dtype))
    for wrap in (lambda f: f, native.jit):
        both = wrap(lambda x: (f(x, 1), f(x, 0.0), f(x, -0.0)))
        one, zero, minus = both(native.array(X[1]))
        same(one, X[1])
        assert not np.signbit(lower(zero)[2]) and np.signbit(lower(minus)[2])


# --- the rules of a kernel's derivatives


def test_the_rules_of_a_kernels_derivatives_are_made_once_for_equal_calls(gt, monkeypatch):
    made, maps = [], host_functions._KernelMaps
    monkeypatch.setattr(
        host_functions, "_KernelMaps", lambda *args: (made.append(args), maps(*args))[1]
    )
    sin, cos = gt.host_function(np.sin), gt.host_function(np.cos)
    sin.defvjp(lambda x: (sin(x), x), lambda x, ct: (ct * cos(x),))
    x = gt.asarray(X)
    for _ in range(3):
        same(gt.grad(lambda x: sin(x).sum())(x), np.cos(X))
    assert len(made) == 1
