"""Implements `checkpoint` in JAX, which recomputes a function in the backward pass."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import numpy as np

from gradtools.backend import Array
from gradtools.errors import GradtoolsError
from gradtools.integrations import integration
from gradtools.jax import jaxprs, reachability, trees
from gradtools.jax.compiled_once import compiled
from gradtools.rules import replaced_at


def stateful(caller: str, f: Callable[..., Any], args: Any) -> Any:
    """Wraps f with the state of the flax.nnx modules in f and args.

    Returns None if there are no modules.
    """
    nnx = integration("flax.nnx")
    return None if nnx is None else nnx.stateful(caller, f, args)


rematerialized = partial(jax.checkpoint, policy=lambda op, *_, **__: op.name == "pure_callback")
"""`jax.checkpoint` with a policy that saves only the results of host callbacks."""


def checkpointed(f: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    """Calls `f(*args, **kwargs)`. The backward pass recomputes f."""
    if not reachability.within_a_trace():
        return f(*args, **kwargs)  # f is not differentiated
    modules = stateful("checkpoint", f, (args, kwargs))
    if modules is None:
        return _recomputed(f, args, kwargs)

    def run(state: list[Array], args: Any, kwargs: Any) -> Any:
        modules.now = [jax.lax.stop_gradient(x) for x in state]
        return modules(*args, **kwargs), modules.after

    out, after = _recomputed(run, (modules.leaves, args, kwargs), {})
    modules.write(after)
    return out


def _recomputed(f: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Calls `f(*args, **kwargs)` without module state. The backward pass recomputes f.

    Captured NumPy arrays are copied. Array arguments are inputs of the program. All other values
    are constants of the program, so f may branch on these values.
    """
    leaves, treedef = jax.tree.flatten((args, kwargs))
    arrays = [i for i, x in enumerate(leaves) if isinstance(x, jax.Array | np.ndarray)]
    out_def: list[Any] = []

    def fresh(*xs: Any) -> Any:  # JAX caches traces by function, so `fresh` is a new function
        args, kwargs = jax.tree.unflatten(treedef, replaced_at(leaves, arrays, xs))
        outs, structure = trees.flatten(f(*args, **kwargs))
        out_def[:] = [structure]
        return outs

    xs = [jaxprs.own(leaves[i]) for i in arrays]
    program, consts = jaxprs.traced(jaxprs.named_after(f, fresh), *xs)
    refuse_to_repeat("checkpoint", program.jaxpr)
    outs = compiled(program.jaxpr, rematerialized)(consts, xs)
    return trees.unflatten(out_def[0], outs)


def refuse_to_repeat(caller: str, jaxpr: Any) -> None:
    """Raises an error if a program creates a mutable array, which JAX 0.10 cannot recompute.

    For a program with a mutable array, `jax.checkpoint` raises a KeyError without explanation, and
    a scan silently returns a wrong value in reverse mode.
    """
    if jaxprs.holds(jaxpr, "new_ref", "ref", "mutable_array", "empty_ref"):
        raise GradtoolsError(
            f"{caller}: f creates a mutable array (jax.new_ref), which JAX does not differentiate "
            "in repeated code. Write x = x.at[i].set(y) instead."
        )
