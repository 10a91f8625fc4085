"""Tests batches sharded over meshes with Explicit and Auto axes, on eight simulated CPU devices.

All programs run in one subprocess and are compared with the same programs on one device.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import gradtools.jax as gt
from gradtools.jax import shardings
from tests.support.devices import on_devices

PROGRAM = """
import itertools, warnings
warnings.simplefilter("ignore")
import jax, jax.numpy as jnp, numpy as np
import gradtools.jax as gt
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
jax.config.update("jax_enable_x64", True)
E, A = AxisType.Explicit, AxisType.Auto
assert jax.make_mesh((8,), ("d",)).axis_types == (E,)  # the default of JAX
MESHES = {
    "explicit": jax.make_mesh((4, 2), ("d", "m"), axis_types=(E, E)),
    "auto": jax.make_mesh((4, 2), ("d", "m"), axis_types=(A, A)),
    "mixed": jax.make_mesh((4, 2), ("d", "m"), axis_types=(E, A)),
    "mixed the other way": jax.make_mesh((4, 2), ("d", "m"), axis_types=(A, E)),
}
SPECS = P("d", None), P(("d", "m"), None), P(None, "m")
rng = np.random.default_rng(0)
XS, WS = rng.normal(size=(16, 8)), rng.normal(size=(8, 8))
f = lambda w, x: jnp.sin(x) * jnp.tanh(w).sum()
mean = lambda w, x: (f(w, x) ** 2).mean()
one = lambda w, x: (f(w, x) ** 2).sum()
counted = lambda w, x, c: (f(w, x), c + x.sum())
chunked = lambda size, **o: lambda w, x: gt.chunked(f, size, (None, 0), **o)(w, x)
layer = lambda w, x: jnp.tanh(x @ w)
frozen = gt.frozen(lambda x: jnp.sin(x) * 2)


def ruled(w, x):
    rule = gt.custom_rule(lambda x: x * x)
    rule.defvjp(lambda x: (x * x, x), lambda x, c: (2 * x * c,))
    return rule(x) * w.sum()


def hosted(w, x):
    rule = gt.custom_rule(gt.host_function(np.sin))
    rule.defvjp(lambda x: (rule(x), x), lambda x, c: (c * jnp.cos(x),))
    return rule(x) * w.sum()


PROGRAMS = {
    "host": hosted,
    "chunked": chunked(4), "uneven": chunked(5),
    "interleaved": chunked(4, interleaved=True),
    "uneven and interleaved": chunked(5, interleaved=True), "one chunk": chunked(16),
    "layer": lambda w, x: gt.chunked(layer, 8, (None, 0))(w, x),
    "uneven layer": lambda w, x: gt.chunked(layer, 5, (None, 0))(w, x),
    "interleaved layer": lambda w, x: gt.chunked(layer, 8, (None, 0), interleaved=True)(w, x),
    "microbatched_value_and_grad layer": lambda w, x: gt.microbatched_value_and_grad(
        lambda w, x: (layer(w, x) ** 2).mean(), 8)(w, x),
    "layer by example": lambda w, x: gt.per_example_grad(
        lambda w, x: (layer(w, x) ** 2).sum(), chunk_size=8)(w, x),
    "checkpointed layer": gt.checkpoint(layer),
    "columns": lambda w, x: gt.chunked(f, 4, (None, 1), 1)(w, x),
    "carry": lambda w, x: gt.chunked(counted, 4, (None, 0, None), carry_argnums=2)(w, x, 0.0),
    "microbatched_value_and_grad": lambda w, x: gt.microbatched_value_and_grad(mean, 4)(w, x),
    "uneven microbatched": lambda w, x: (
        gt.microbatched_value_and_grad(mean, 5, weights=np.arange(16.0))(w, x)
    ),
    "per example": lambda w, x: gt.per_example_grad(one, chunk_size=4)(w, x),
    "per example uneven": lambda w, x: gt.per_example_grad(one, chunk_size=5)(w, x),
    "per example, one by one": lambda w, x: gt.per_example_grad(one, chunk_size=1)(w, x),
    "checkpoint": gt.checkpoint(f),
    "frozen": lambda w, x: gt.grad(lambda x: (frozen(x) ** 2 * jnp.tanh(w).sum()).sum())(x),
    "rule": ruled, "jacobian": lambda w, x: gt.jacobian(jnp.sin)(x) * w.sum(),
    "clip": lambda w, x: gt.clip_gradient(x, max_value=0.1) ** 2 * w.sum(),
    "straight": lambda w, x: gt.straight_through(jnp.round, jnp.sin)(x) * w.sum(),
    "mixed partial": lambda w, x: gt.mixed_partial(
        lambda y, g: (y * g.sum()).sum() ** 2, lambda z: jnp.sin(z) * 2, w, x, x),
}
total = lambda p: lambda w, x: sum((y**2).sum() for y in jax.tree.leaves(p(w, x)))
WAYS = {"jit": jax.jit, "gradient": lambda p: jax.jit(jax.grad(total(p), (0, 1)))}
LAID_OUT = ("chunked", "uneven", "interleaved", "per example")
EAGER = ("uneven", "uneven microbatched", "per example uneven")


def check(name, way, run, spec, mesh, expected):
    w = jax.device_put(WS, NamedSharding(mesh, P()))
    x = jax.device_put(XS, NamedSharding(mesh, spec))
    found = run(w, x)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(np.asarray(a), np.asarray(b), rtol=1e-9, atol=1e-9)
    if way == "jit" and E in mesh.axis_types:
        out = jax.tree.leaves(found)[0]  # sharded like the batch
        assert jax.typeof(out).sharding.spec[0] == jax.typeof(x).sharding.spec[0], name


for (number, (name, p)), (way, how) in itertools.product(
    enumerate(PROGRAMS.items()), WAYS.items()
):
    if way == "jit" and name not in LAID_OUT:
        continue
    in_turn = [*MESHES][1:][number % 3]  # one of the meshes that are not fully explicit
    run = how(p)
    expected = run(jnp.asarray(WS), jnp.asarray(XS))
    for (kind, mesh), spec in itertools.product(MESHES.items(), SPECS):
        if kind != "explicit" and (spec != SPECS[1] or kind != in_turn):
            continue
        try:
            if way == "jit":  # no mesh is set
                check(name, way, run, spec, mesh, expected)
                continue
            with jax.set_mesh(mesh):
                check(name, way, run, spec, mesh, expected)
                if name in EAGER and spec == SPECS[0]:
                    check(name, way, jax.grad(total(p), (0, 1)), spec, mesh, expected)
        except Exception as error:
            print(name, way, kind, spec, type(error).__name__, str(error)[:300])


def token_means(varying):
    # Accumulates gradients on eight devices; the first device has no tokens.
    counts = np.arange(16.0) % 5 * (np.arange(16) >= 2)
    loss = lambda w, x, t: (t * jnp.sin(x @ w).sum(1)).sum() / t.sum()

    def step(w, x, t):
        own = jax.lax.pcast(w, "d", to="varying") if varying else w
        acc = gt.GradientAccumulator()
        for k in range(2):
            acc.add(gt.grad(loss)(own, x[k:k + 1], t[k:k + 1]), t[k])
        return acc.mean(axis_name="d")

    mesh = jax.sharding.Mesh(np.array(jax.devices()), ("d",))
    run = jax.jit(jax.shard_map(
        step, mesh=mesh, in_specs=(P(), P("d"), P("d")), out_specs=P(), check_vma=varying))
    found, expected = run(WS, XS, counts), jax.grad(loss)(WS, XS, counts)
    np.testing.assert_allclose(found, expected, rtol=1e-12, atol=1e-14)


token_means(True), token_means(False)
print("done")
"""


@pytest.mark.slow
def test_every_operator_gives_the_numbers_of_one_device_over_explicit_axes() -> None:
    assert on_devices(PROGRAM, 8) == "done"


XS = np.random.default_rng(0).normal(size=(7, 2))


@pytest.mark.slow_at("3", "7")
@pytest.mark.parametrize("size", [2, 3, 7])
def test_rows_that_are_left_over_have_their_gradients_over_an_explicit_axis(size) -> None:
    mesh = jax.make_mesh((1,), ("d",), axis_types=(AxisType.Explicit,))
    with jax.set_mesh(mesh):
        x = jax.device_put(jnp.asarray(XS), NamedSharding(mesh, P("d")))
        each = gt.per_example_grad(lambda w, x: (w**2 * x).sum(), chunk_size=size)
        np.testing.assert_allclose(each(jnp.ones(2), x), 2 * XS)


@pytest.mark.slow_at("known")
@pytest.mark.parametrize("edit", ["known", "transform"])
def test_a_gradient_that_is_put_in_is_laid_out_as_what_it_is_of(edit) -> None:
    mesh = jax.make_mesh((1,), ("d",), axis_types=(AxisType.Explicit,))
    edited = {
        "known": lambda x: gt.replace_gradient(x, jnp.ones((7, 2))),
        "transform": lambda x: gt.transform_gradient(x, lambda c: jnp.ones((7, 2))),
    }[edit]
    with jax.set_mesh(mesh):
        x = jax.device_put(jnp.asarray(XS), NamedSharding(mesh, P("d")))
        g = gt.grad(lambda x: (edited(x) ** 2).sum())(x)
        assert (jax.typeof(g), g.tolist()) == (jax.typeof(x), np.ones((7, 2)).tolist())


@pytest.mark.parametrize(("rows", "entry"), [(8, "d"), (7, None)])
def test_an_axis_is_sharded_by_the_devices_that_divide_it(rows, entry) -> None:
    mesh = jax.sharding.AbstractMesh((4,), ("d",), axis_types=(AxisType.Explicit,))
    like = jax.ShapeDtypeStruct((8, 2), jnp.float32, sharding=NamedSharding(mesh, P("d")))
    with jax.sharding.use_abstract_mesh(mesh):
        f = lambda x: shardings.placed(shardings.whole(x, 0)[:rows], 0, "d")
        assert jax.eval_shape(f, like).sharding.spec[0] == entry
