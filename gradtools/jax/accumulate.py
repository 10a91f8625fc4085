"""Accumulates gradients in JAX without side effects: each operator returns a new buffer.

The buffer is a pytree that the user passes from step to step, like the state of an optimizer, so
the operators run under jit and need no lock. `gradtools.accumulate` documents the public names.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from gradtools.accumulate import State
from gradtools.arguments.wording import with_article
from gradtools.errors import GradtoolsError
from gradtools.gradient_targets import paired, refuse
from gradtools.jax import trees
from gradtools.jax._upstream import get_opaque_trace_state
from gradtools.jax.gathering import check_axis, sum_over_ranks, tracked_axes
from gradtools.jax.module_arguments import part_of
from gradtools.jax.shardings import varies as varies  # the accumulator calls `varies`


def write_gradients(target: Any, grads: Any, *, add: bool) -> Any:
    """Returns a copy of the target in which the gradients are added to the leaves.

    If not `add`, the gradients replace the leaves. A leaf whose gradient is None is unchanged.
    """
    caller = "accumulate_gradients" if add else "assign_gradients"
    target, grads = part_of(target), part_of(grads)
    if target is None:
        leaves, treedef = trees.flatten(grads)
        arrays = [_array(g) for g in leaves]  # an entry that is not an array becomes None
        pairs = zip(leaves, arrays, strict=True)
        zeros = [g if array is None else jnp.zeros_like(array) for g, array in pairs]
        target = trees.unflatten(treedef, zeros)
    new: list[Any] = []
    for entry in paired("jax", trees, caller, target, grads):
        if entry.grad is None:
            new.append(entry.target)
            continue
        p: Any = _array(entry.target)
        g: Any = _array(entry.grad)
        for side, array, given in (("target", p, entry.target), ("grads", g, entry.grad)):
            if array is None or not jnp.issubdtype(array.dtype, jnp.inexact):
                came = with_article(type(given).__name__) if array is None else spec(array)
                fix = "Omit entries without a gradient from grads, or set them to None."
                refuse(caller, f"{side}{entry.path} is {came}", "a floating or complex array", fix)
        if (p.shape, p.dtype) != (g.shape, g.dtype):
            fix = (
                "Convert the gradient to the buffer's dtype, or pass None as the first buffer."
                if p.shape == g.shape
                else "Reduce the gradient over the batch, or check which parameter it belongs to."
            )
            refuse(caller, f"grads{entry.path} is {spec(g)}", f"{spec(p)}, like the buffer", fix)
        new.append(p + g if add else copied(g))
    return trees.unflatten(trees.flatten(target)[1], new)


# --- functions of the accumulator -------------------------------------------------------


def detached(x: Any) -> jax.Array | None:
    """Stops the gradient of x and converts x to an array. Returns None if x is not an array."""
    array = _array(x)
    return array if array is None else jnp.asarray(jax.lax.stop_gradient(array))


def copied(x: jax.Array) -> jax.Array:
    """Copies x to new memory, so that the original may be donated or deleted."""
    return jnp.array(x, copy=True)


def times(xs: Any, number: float) -> list[Any]:
    return [x * number for x in xs]


def over(xs: Any, number: float) -> list[Any]:
    return [x / number for x in xs]


def current_trace() -> Any:
    """Returns a key of the current trace.

    Outside of all traces, the key is the same in every thread.
    """
    return get_opaque_trace_state(convention="gradtools")


def spec(x: Any) -> str:
    return f"{x.dtype} of shape {tuple(x.shape)}"


def spec_in_words(spec: str) -> str:
    return spec


def added(totals: Any, xs: Any, weight: Any) -> bool:
    """Returns False: JAX arrays do not support in-place addition."""
    return False


def sums_over_ranks(own: State | None, group: Any, axis_name: Any) -> Any:
    """Returns `(treedef, sums, weight, dtypes)`, with sums and weight over a mapped axis."""
    caller = "GradientAccumulator.mean"
    if own is None:  # all devices run one program, so nothing was added on any device
        raise GradtoolsError(
            f"{caller}: nothing has been added, so there is no mean. Call add(grads) first."
        )
    check_axis(caller, axis_name, group)
    axes = tracked_axes(axis_name)
    for path, varying in zip(own.paths, own.varies, strict=True):
        if not axes <= varying:
            raise GradtoolsError(
                f"{caller}: grads{path} does not vary over {axis_name!r}. Under shard_map with "
                "check_vma=True the gradient with respect to parameters that all devices share has "
                "been summed over the axis, without weights. Differentiate with respect to "
                'jax.lax.pcast(params, axis_name, to="varying").'
            )
    weight, *sums = sum_over_ranks([own.weight, *own.totals], axis_name)
    return own.treedef, sums, weight, own.dtypes


def _array(x: Any) -> jax.Array | None:
    """Returns x as a JAX array; NumPy arrays are copied.

    Returns None if x is not a numeric array or number.
    """
    if isinstance(x, jax.Array):
        return x
    if not isinstance(x, (np.ndarray, np.generic, int, float, complex)):
        return None
    if np.asarray(x).dtype in (jax.dtypes.float0, np.dtype(object)):
        return None
    return jnp.array(x)
