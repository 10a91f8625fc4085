"""Tests host kernels in JAX: nested JAX calls, 64-bit dtypes and shard_map."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import gradtools.jax as gt
from gradtools import GradtoolsError
from gradtools.host_kernels import ArraySpec, Kernel

BACKEND = gt.grad.__self__._backend
X = np.linspace(-1, 1, 6).reshape(2, 3)
CAPTURED = jnp.arange(3.0)
JITTED = jax.jit(lambda x: 2 * x)
COMPILED = JITTED.lower(CAPTURED).compile()


def host(fun, out=None, vectorized=False):
    kernel = Kernel(fun, out, vectorized)

    def call(*args):
        bound, xs = kernel.bind(BACKEND, args)
        return BACKEND.call_kernel(bound, xs)[0]

    return call


INSIDE = {
    "zeros": lambda: jnp.zeros(3),
    "sin of an array": lambda: jnp.sin(CAPTURED),
    "sin of NumPy": lambda: jnp.sin(np.ones(3)),
    "asarray": lambda: jnp.asarray(np.ones(3)),
    "operator": lambda: CAPTURED + CAPTURED,
    "getitem": lambda: CAPTURED[0],
    "jit": lambda: JITTED(CAPTURED),
    "compiled": lambda: COMPILED(CAPTURED),
    "grad": lambda: jax.grad(lambda z: (z**2).sum())(CAPTURED),
    "vmap": lambda: jax.vmap(lambda z: z**2)(CAPTURED),
    "scan": lambda: jax.lax.scan(lambda a, b: (a, b), 0.0, CAPTURED),
    "random": lambda: jax.random.normal(jax.random.key(0), (3,)),
    "gradtools": lambda: host(lambda x: x)(np.ones(3)),
}


@pytest.mark.parametrize("how", ["eager", "jit", "vmap"])
@pytest.mark.parametrize("which", INSIDE)
def test_a_kernel_that_calls_jax_is_refused(which, how):
    # compile the call first, because cached calls on the C++ fast path must also raise the error
    INSIDE[which]()

    def kernel(x):
        INSIDE[which]()
        return x

    f = {"eager": lambda f: f, "jit": jax.jit, "vmap": jax.vmap}[how](host(kernel))
    with pytest.raises(Exception, match="host function 'kernel': it calls JAX") as raised:
        jax.block_until_ready(f(jnp.asarray(X)))
    assert how == "jit" or type(raised.value) is GradtoolsError
    # after the error, JAX works as before
    np.testing.assert_array_equal(JITTED(CAPTURED), 2 * np.arange(3.0))


@pytest.mark.parametrize("dtype", ["float64", "complex128", "int64", "uint64"])
@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit], ids=["eager", "jit"])
def test_without_x64_a_wide_spec_is_refused(default_precision, wrap, dtype):
    f = wrap(host(lambda x: x.astype(dtype), lambda x: ArraySpec(x.shape, dtype)))
    with pytest.raises(GradtoolsError, match=f"'<lambda>': .*{dtype}.*jax_enable_x64"):
        f(jnp.ones(3))


@pytest.mark.sampled(1, 4)
@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("vectorized", [True, False])
def test_shard_map(check_vma, vectorized):
    mesh = jax.make_mesh((len(jax.devices()),), ("i",), axis_types=(jax.sharding.AxisType.Auto,))
    f = host(lambda x: x + 1, vectorized=vectorized)
    for g in (f, jax.vmap(f)):
        mapped = jax.shard_map(g, mesh=mesh, in_specs=P("i"), out_specs=P("i"), check_vma=check_vma)
        np.testing.assert_array_equal(mapped(X), X + 1)
        np.testing.assert_array_equal(jax.jit(mapped)(X), X + 1)
