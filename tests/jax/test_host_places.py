"""Tests the devices of results on eight simulated devices, eager and compiled.

Host functions and all other public functions must return their results on the devices of their
arguments, as operations of JAX do. All programs run in one subprocess.
"""

from __future__ import annotations

import pytest

from tests.support.devices import on_devices

BEGINNING = """
import itertools, warnings
warnings.simplefilter("ignore")
import jax, jax.numpy as jnp, numpy as np
import gradtools.jax as gt
from gradtools import GradtoolsError
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P, SingleDeviceSharding
E, A = AxisType.Explicit, AxisType.Auto
THIRD, XS = jax.devices()[3], np.linspace(0.1, 1, 32, dtype=np.float32).reshape(8, 4)

exp, product = gt.host_function(np.exp), gt.host_function(np.multiply)
exp.defvjp(lambda x: (y := exp(x), y), lambda y, c: (product(y, c),))
product.defvjp(
    lambda a, b: (product(a, b), (a, b)), lambda res, c: (product(res[1], c), product(res[0], c))
)
many = gt.host_function(np.exp, vectorized=True)
parts = gt.host_function(
    lambda a, b: (a.sum(), a @ b.T, b), out=lambda a, b: (
        gt.ArraySpec((), a.dtype), gt.ArraySpec((a.shape[0], b.shape[0]), a.dtype), b)
)

WAYS = {
    "value": lambda f, x: f(x), "vmap": lambda f, x: jax.vmap(f)(x),
    "grad": lambda f, x: gt.grad(lambda x: (f(x) ** 2).sum())(x),
    "jax.grad": lambda f, x: jax.grad(lambda x: (f(x) ** 2).sum())(x),
    "vmap of grad": lambda f, x: jax.vmap(gt.grad(lambda x: (f(x) ** 2).sum()))(x),
    "vjp": lambda f, x: gt.vjp(f, x)[1](x), "jvp": lambda f, x: gt.jvp(f, (x,), (x,)),
    "hvp": lambda f, x: gt.hvp(lambda x: (f(x) ** 2).sum(), (x,), (x,)),
    "twice": lambda f, x: gt.grad(lambda x: (gt.grad(lambda x: (f(x) ** 2).sum())(x)).sum())(x),
}


def where(xs):
    return [(x.sharding, x.committed, str(jax.typeof(x))) for x in jax.tree.leaves(xs)]


def same_place(a, b):
    alike = a.sharding.is_equivalent_to(b.sharding, a.ndim)
    return alike and a.committed == b.committed and jax.typeof(a) == jax.typeof(b)


def compare(name, found, expected, places=True):
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5)
        if places and not same_place(a, b):
            print(name, where(a), where(b))
"""

PLACES = (
    BEGINNING
    + """
JITTED = ("value", "vmap", "hvp")
MESHES = [(axes, jax.make_mesh((4, 2), ("i", "j"), axis_types=(axes, axes))) for axes in (A, E)]
for name, way in WAYS.items():
    f = many if name == "vmap" else exp
    jitted = jax.jit(lambda f, x: way(f, x), static_argnums=0)
    for x in (jnp.asarray(XS), jax.device_put(XS, THIRD)):
        expected = way(jnp.exp, x)
        compare(name, way(f, x), expected)
        if name in JITTED:
            compare((name, "jit"), jitted(f, x), expected)
    for (axes, mesh), spec in itertools.product(MESHES, (P("i"), P("j", "i"))):
        if axes == A and spec == P("i"):
            continue
        x = jax.device_put(XS.reshape(4, 8), NamedSharding(mesh, spec))
        with jax.set_mesh(mesh):
            expected = way(jnp.exp, x)
            compare((name, axes, spec), way(f, x), expected)
            if axes == E and name in JITTED and spec != P("i"):
                compare((name, spec, "jit"), jitted(f, x), expected)

# The results have different shapes from the inputs. The batch axes of the results are sharded like
# the batch axes of the inputs.
mesh = jax.make_mesh((4, 2), ("i", "j"), axis_types=(A, A))
x, w = (jax.device_put(XS, NamedSharding(mesh, spec)) for spec in (P("i", "j"), P("j")))
of_batch = jax.vmap(parts)(x[:, None], w[:, None])
whole, one = P(), P("i", None, "j")
for found, specs in ((parts(x, w), (whole, whole, P("i", "j"))), (of_batch, (P("i"), P("i"), one))):
    for y, spec in zip(found, specs):
        if not y.sharding.is_equivalent_to(NamedSharding(mesh, spec), y.ndim):
            print("other shapes", y.shape, y.sharding, spec)

# Under jit, JAX's callback returns an array on one of the eight devices; such arguments are valid.
back = jax.jit(lambda x: jax.pure_callback(np.exp, jax.ShapeDtypeStruct(x.shape, x.dtype), x))(x)
np.testing.assert_allclose(exp(back), np.exp(np.exp(XS)), rtol=1e-6)

try:
    product(jax.device_put(XS, THIRD), jax.device_put(XS, jax.devices()[5]))
except GradtoolsError as error:
    said = "host function 'multiply': its arguments are committed to different devices"
    if not str(error).startswith(said) or "cpu:3 and cpu:5" not in str(error):
        print(error)
else:
    print("no error for arguments on two devices")
print("done")
"""
)

PUBLIC = (
    BEGINNING
    + """
from tests.support.every_operator import POINT, USES, World, healthy

x = jax.device_put(np.float32(POINT), THIRD)
key = jax.device_put(jax.random.key(0), THIRD)
noisy = lambda x, k: x * jax.random.normal(k, x.shape)
carried = lambda x, c: (x * 2, c + x.sum())
NO_ARRAYS = ("random_key", "asarray", "ArraySpec", "is_recomputing", "xp", "to_numpy")
CALLS = {
    "keys": lambda: gt.chunked(noisy, 3, in_axes=(0, None), key_argnums=1)(x, key),
    "carry": lambda: gt.chunked(carried, 3, in_axes=(0, None), carry_argnums=1)(x, x[0]),
    "interleaved": lambda: gt.chunked(jnp.sin, 3, interleaved=True)(x),
    "split_key, placed": lambda: gt.split_key(key),
}
for use in USES:
    if "jax" in use.backends and use.public not in (*NO_ARRAYS, "split_key"):
        CALLS[use.name] = lambda use=use: use.run(World(gt, healthy(gt), x))
for name, call in CALLS.items():
    placed = [y for y in jax.tree.leaves(call()) if isinstance(y, jax.Array)]
    off = [y for y in placed if y.sharding.device_set != {THIRD}]
    if off:
        print(name, where(off))
print("done")
"""
)


@pytest.mark.slow
def test_a_host_functions_results_are_where_jaxs_own_operations_would_leave_them() -> None:
    assert on_devices(PLACES, 8) == "done"


@pytest.mark.slow
def test_no_public_function_moves_arrays_to_the_default_device() -> None:
    assert on_devices(PUBLIC, 8) == "done"
