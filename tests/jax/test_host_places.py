"""Where a host function's results are: on eight devices that the host plays, eager and compiled.

JAX's own operations leave results where their arguments are; so do host functions, and what is
public besides. One process runs all of it.
"""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

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

# Results of other shapes; the axes of a batch are sharded as the batch is.
mesh = jax.make_mesh((4, 2), ("i", "j"), axis_types=(A, A))
x, w = (jax.device_put(XS, NamedSharding(mesh, spec)) for spec in (P("i", "j"), P("j")))
of_batch = jax.vmap(parts)(x[:, None], w[:, None])
whole, one = P(), P("i", None, "j")
for found, specs in ((parts(x, w), (whole, whole, P("i", "j"))), (of_batch, (P("i"), P("i"), one))):
    for y, spec in zip(found, specs):
        if not y.sharding.is_equivalent_to(NamedSharding(mesh, spec), y.ndim):
            print("other shapes", y.shape, y.sharding, spec)

# What is whole on one device of many, as JAX's own callback leaves it, is an argument too.
back = jax.jit(lambda x: jax.pure_callback(np.exp, jax.ShapeDtypeStruct(x.shape, x.dtype), x))(x)
np.testing.assert_allclose(exp(back), np.exp(np.exp(XS)), rtol=1e-6)

try:
    product(jax.device_put(XS, THIRD), jax.device_put(XS, jax.devices()[5]))
except GradtoolsError as error:
    said = "host function 'multiply': its arguments are committed to different devices"
    if not str(error).startswith(said) or "cpu:3 and cpu:5" not in str(error):
        print(error)
else:
    print("two devices were taken for one")
print("done")
"""
)

PUBLIC = (
    BEGINNING
    + """
x, w = jax.device_put(XS, THIRD), jax.device_put(np.float32(2), THIRD)
key = jax.device_put(jax.random.key(0), THIRD)
f = lambda x: (jnp.sin(x) ** 2).sum()
g = lambda w, x: (w * x).sum()
noisy = lambda x, k: x * jax.random.normal(k, x.shape)
rule = gt.custom_rule(jnp.sin)
rule.defjvp(lambda p, t: (jnp.sin(p[0]), jnp.cos(p[0]) * t[0]))
rounded = gt.straight_through(np.round)


def mean(**options):
    total = gt.GradientAccumulator(**options)
    total.add({"x": x}), total.add({"x": x}, weight=2)
    return total.mean(), total.sum()


CALLS = {
    "grad": lambda: gt.grad(f)(x), "value_and_grad": lambda: gt.value_and_grad(f)(x),
    "linearize": lambda: gt.linearize(jnp.sin, x)[1](x), "hessian": lambda: gt.hessian(f)(x),
    "forward": lambda: gt.jacobian(jnp.sin, mode="forward", chunk_size=3)(x),
    "reverse": lambda: gt.jacobian(jnp.sin, mode="reverse", chunk_size=3)(x),
    "reverse twice": lambda: gt.hvp(f, (x,), (x,), mode="reverse_over_reverse"),
    "per example": lambda: gt.per_example_grad(g, chunk_size=3)(w, x),
    "mixed_partial": lambda: gt.mixed_partial(lambda y, z: (y * z).sum() ** 2, jnp.sin, x, x, x),
    "minimax": lambda: gt.minimax_value_and_grad(lambda a, b: (a * b).sum(), 0, 1)(x, x),
    "checkpoint": lambda: gt.grad(gt.checkpoint(f))(x),
    "reverse_gradient": lambda: gt.grad(lambda x: f(gt.reverse_gradient(x)))(x),
    "scale_gradient": lambda: gt.grad(lambda x: f(gt.scale_gradient(x, 2.0)))(x),
    "clip_gradient": lambda: gt.grad(lambda x: f(gt.clip_gradient(x, max_norm=1.0)))(x),
    "transform": lambda: gt.grad(lambda x: f(gt.transform_gradient(x, lambda c: 2 * c)))(x),
    "straight_through": lambda: (rounded(x), gt.grad(lambda x: f(rounded(x)))(x)),
    "custom_rule": lambda: (rule(x), gt.hvp(lambda x: f(rule(x)), (x,), (x,))),
    "frozen": lambda: gt.hvp(lambda x: f(gt.frozen(jnp.sin)(x)), (x,), (x,)),
    "chunked": lambda: gt.value_and_grad(lambda x: f(gt.chunked(jnp.sin, 3)(x)))(x),
    "keys": lambda: gt.chunked(noisy, 3, in_axes=(0, None), key_argnums=1)(x, key),
    "carry": lambda: gt.chunked(
        lambda x, c: (x * 2, c + x.sum()), 3, in_axes=(0, None), carry_argnums=1)(x, w),
    "interleaved": lambda: gt.chunked(jnp.sin, 4, interleaved=True)(x),
    "microbatched_value_and_grad": lambda: (
        gt.microbatched_value_and_grad(lambda w, x: (w * x).mean(), 3)(w, x)
    ),
    "accumulator": mean, "compensated": lambda: mean(dtype="float32", compensated=True),
    "accumulate": lambda: gt.accumulate_gradients({"x": x}, {"x": x}),
    "assign": lambda: gt.assign_gradients({"x": x}, {"x": None}),
    "split_key": lambda: gt.split_key(key),
}
for name, call in CALLS.items():
    off = [y for y in jax.tree.leaves(call()) if y.sharding.device_set != {THIRD}]
    if off:
        print(name, where(off))
print("done")
"""
)


def said_by(program: str) -> str:
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8"
    found = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "XLA_FLAGS": flags, "TF_CPP_MIN_LOG_LEVEL": "2"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    return found.stdout.strip() if found.returncode == 0 else found.stdout + found.stderr[-3000:]


@pytest.mark.slow
def test_a_host_functions_results_are_where_jaxs_own_operations_would_leave_them() -> None:
    assert said_by(PLACES) == "done"


@pytest.mark.slow
def test_no_public_function_moves_arrays_to_the_default_device() -> None:
    assert said_by(PUBLIC) == "done"
