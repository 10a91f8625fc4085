"""Implements host kernels in JAX with one primitive, which is lowered to a callback.

On concrete arrays the kernel is called directly, so its exceptions propagate unchanged. Under vmap,
the primitive is bound again with an additional leading batch axis. The primitive has no derivative;
the module `host_functions` wraps the primitive in a rule.

A result with the shape of an argument is sharded like that argument. Batch axes of results are
sharded like the batch axes of the arguments. All other results are replicated on the arguments'
devices.

A callback must not call JAX: the program and the callback would wait for each other (a deadlock,
observed on the CPU). JAX is therefore not allowed to execute programs while a kernel runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.interpreters import ad, batching, mlir
from jax.sharding import NamedSharding, PartitionSpec

from gradtools.host_kernels import KernelCall, Results, Shape
from gradtools.jax import shardings
from gradtools.jax._upstream import RulePrimitive, weakly_cached
from gradtools.jax.arrays import X64
from gradtools.jax.known_errors import CALLS_JAX, says


def call_kernel(call: KernelCall, xs: Sequence[Any]) -> list[Any]:
    """Calls the host kernel. Raises an error if JAX does not support the dtype of a result."""
    expected = call.results_of(xs)
    for spec in expected.specs:
        if jax.dtypes.canonicalize_dtype(spec.dtype) != jnp.dtype(spec.dtype):
            raise call.error(
                f"it must return dtype {spec.dtype}, which JAX supports only with x64. Enable "
                f"x64: {X64}; or pass out=ArraySpec(shape, dtype) with 32 bits."
            )
    return list(kernel_p.bind(*xs, call=call, expected=expected, batch=()))


# --- the primitive -----------------------------------------------------------------------


def _run(
    *xs: Any, call: KernelCall, expected: Results, batch: Shape, may_call_jax: bool = False
) -> list[Any]:
    arrays = [np.asarray(x) for x in xs]
    if may_call_jax:
        result = call.run(arrays, expected, batch)
    else:
        try:
            with jax.no_execution(True):
                result = call.run(arrays, expected, batch)
        except RuntimeError as error:
            if not says(error, CALLS_JAX):
                raise
            raise call.error(
                "it calls JAX, which is not allowed: in a compiled program the call would never "
                "return. Use NumPy in the kernel, or call JAX outside of the kernel."
            ) from error
    if not expected.widened:
        return result
    pairs = zip(result, expected.specs, strict=True)
    return [y.astype(jnp.dtype(s.dtype), copy=False) for y, s in pairs]


def _eager(*xs: Any, call: KernelCall, expected: Results, batch: Shape) -> list[Any]:
    """Calls the kernel. The results are on the devices to which the arguments are committed."""
    committed = [x for x in xs if isinstance(x, jax.Array) and x.committed]
    sets = [x.sharding.device_set for x in committed]
    other = next((devices for devices in sets if devices != sets[0]), None)
    if other is not None:
        names = [", ".join(sorted(map(str, devices))) for devices in (sets[0], other)]
        raise call.error(
            f"its arguments are committed to different devices, {names[0]} and {names[1]}. Move "
            "all arguments to one device with jax.device_put."
        )
    bridged = call.kernel.inside is not None  # a direct call cannot deadlock
    result = _run(*xs, call=call, expected=expected, batch=batch, may_call_jax=bridged)
    if not committed:
        return [jnp.asarray(y) for y in result]
    if len(sets[0]) == 1:
        return [jax.device_put(y, committed[0].sharding) for y in result]
    named = [(x, s) for x in committed if isinstance(s := x.sharding, NamedSharding)]
    mesh = named[0][1].mesh if named else jax.sharding.Mesh(list(sets[0]), ("devices",))
    args = [(x.shape, shardings.padded(s.spec, x.ndim)) for x, s in named]
    specs = [shardings.of_result((*batch, *s.shape), batch, args) for s in expected.specs]
    places = [NamedSharding(mesh, PartitionSpec(*spec)) for spec in specs]
    return [jax.device_put(y, place) for y, place in zip(result, places, strict=True)]


def _staged(*xs: Any, call: KernelCall, expected: Results, batch: Shape) -> list[Any]:
    shapes = [jax.ShapeDtypeStruct((*batch, *s.shape), jnp.dtype(s.dtype)) for s in expected.specs]
    ys = jax.pure_callback(
        lambda *arrays: _run(*arrays, call=call, expected=expected, batch=batch), shapes, *xs
    )
    return [shardings.sharded_like(y, batch, xs) for y in ys]


def _abstract(*xs: Any, **params: Any) -> list[Any]:
    def staged(*xs: Any) -> list[Any]:
        """Stages the callback. The results vary over each mesh axis over which an input varies."""
        axes = frozenset().union(*map(shardings.varies, xs))
        return [shardings.varying(y, axes) for y in _staged(*xs, **params)]

    # Under shard_map, the output types of `make_jaxpr` contain the axes over which a value varies.
    return list(jax.make_jaxpr(staged)(*xs).out_avals)


def _batch(xs: Any, dims: Any, *, call: KernelCall, expected: Results, batch: Shape) -> Any:
    size = next(x.shape[d] for x, d in zip(xs, dims, strict=True) if d is not None)
    front = [
        jnp.expand_dims(x, 0) if d is None else jnp.moveaxis(x, d, 0)
        for x, d in zip(xs, dims, strict=True)
    ]
    ys = kernel_p.bind(*front, call=call, expected=expected, batch=(size, *batch))
    return ys, [0] * len(ys)


def _jvp(xs: Any, dxs: Any, *, call: KernelCall, **params: Any) -> Any:
    raise call.no_derivative()


weakly_cached.add(KernelCall)
kernel_p = RulePrimitive("gradtools_kernel")
kernel_p.def_impl(_eager)
kernel_p.def_abstract_eval(_abstract)
batching.primitive_batchers[kernel_p] = _batch
ad.primitive_jvps[kernel_p] = _jvp
mlir.register_lowering(kernel_p, mlir.lower_fun(_staged, multiple_results=True))
