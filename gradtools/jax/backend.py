"""Defines the JAX backend, an implementation of `gradtools.backend.Backend`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from gradtools.backend import Array, FrameworkBackend, LazyMember
from gradtools.clipping import clip_norm
from gradtools.jax import arrays, engines, jaxprs, module_arguments, shardings, trees
from gradtools.jax.known_errors import NO_VALUES, READS_A_VALUE
from gradtools.jax.reachability import within_a_trace
from gradtools.jax.rules.installing import apply_rule, attempt
from gradtools.jax.rules.transposing import pull, transpose
from gradtools.jax.trees import LinearMap
from gradtools.rules import replaced_at

if TYPE_CHECKING:
    from gradtools.arguments.chunks import ChunkOptions


class JaxBackend(FrameworkBackend):
    """Implements `gradtools.backend.Backend` for JAX.

    The engines and rules are imported with this module. Other members are imported on first access.
    """

    name, package = "jax", "gradtools.jax"
    hvp_mode = "forward_over_reverse"
    xp = jnp

    # --- pytrees

    flatten = staticmethod(trees.flatten)
    flatten_arrays = staticmethod(trees.flatten_arrays)
    unflatten = staticmethod(trees.unflatten)
    leaf_paths = staticmethod(trees.leaf_paths)
    entries_of = staticmethod(trees.entries_of)

    # --- arrays

    is_array = staticmethod(trees.is_array)
    is_inexact = staticmethod(trees.is_inexact)

    def is_traced(self, x: Any) -> bool:
        return isinstance(x, jax.core.Tracer)

    def number_on_host(self, x: Array) -> Any:
        known = not isinstance(x, jax.core.Tracer) and arrays.is_on_host(x)
        return jax.device_get(x).item() if known else None

    def hint_at_traced_value(self, error: Exception, who: str = "f") -> str:
        return f"{who} {NO_VALUES}" if isinstance(error, READS_A_VALUE) else ""

    asarray = staticmethod(arrays.asarray)
    to_numpy = staticmethod(arrays.to_numpy)
    random_key = staticmethod(arrays.random_key)  # not lazy: compiled code may call `random_key`
    split_key = staticmethod(arrays.split_key)  # not lazy: compiled code may call `split_key`

    def as_leaf(self, x: Any) -> Any:
        """Converts x to an array, which is weakly typed if x is a Python float or complex number.

        A Python integer is returned unchanged.
        """
        if isinstance(x, float | complex) or hasattr(x, "__array__"):
            return jnp.asarray(x)
        return x

    def cast(self, x: Any, like: Array | str) -> Array:
        return jnp.asarray(x, like if isinstance(like, str) else like.dtype)

    def real_scalar(self, x: Any, like: Array) -> Array:
        return jnp.asarray(x, jnp.finfo(like.dtype).dtype)

    def clipped_by_norm(self, xs: list[Array], bound: Any) -> list[Array]:
        return _clip_norm(self, xs, bound)

    zeros_like = staticmethod(partial(jax.lax.full_like, fill_value=0))
    aval = staticmethod(jax.typeof)

    def zeros(self, aval: Any, device_of: Array) -> Array:
        return shardings.like(jnp.zeros(aval.shape, aval.dtype), aval)

    ones_like = staticmethod(partial(jax.lax.full_like, fill_value=1))

    def unit_basis(self, x: Array, before: int = 0, after: int = 0) -> Array:
        basis = super().unit_basis(x, before, after)
        spec = shardings.entries(x)
        if any(spec):
            basis = shardings.on_mesh(basis, jax.typeof(x).sharding.mesh, (None, *spec))
        return shardings.varying(basis, shardings.varies(x))

    def is_known_zero(self, x: Array) -> bool:
        return not isinstance(x, jax.core.Tracer) and not bool(jnp.any(x != 0))

    def is_symbolic_zero(self, x: Any) -> bool:
        return isinstance(x, jax.custom_derivatives.SymbolicZero)

    # --- derivatives

    stage = staticmethod(engines.stage)
    vjp = staticmethod(engines.vjp)
    reached = staticmethod(engines.reached)
    jvp = staticmethod(engines.jvp)
    jvps = staticmethod(engines.jvps)
    linearize = staticmethod(engines.linearize)

    def abstract_eval(self, fun: Callable[..., list[Array]], *xs: Array) -> None:
        with suppress(*READS_A_VALUE):  # fun needs the values of its arguments
            jax.make_jaxpr(lambda *a: list(fun(*a)))(*[jax.typeof(x) for x in xs])

    def no_tangent(self, x: Any) -> Any:
        return np.zeros(jnp.shape(x), jax.dtypes.float0)

    def outliving(
        self, call: Any, outs: Sequence[Array], out: Any = None
    ) -> tuple[Any, Sequence[Any]]:
        aval = lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype)
        return call.without_values(aval, out), [aval(y) for y in outs]

    linear_map = staticmethod(LinearMap)

    apply_rule = staticmethod(apply_rule)

    def closure_converted(
        self, f: Callable[..., Any], /, *args: Any, **kwargs: Any
    ) -> tuple[Callable[..., Any], list[Array]]:
        if not within_a_trace():
            return super().closure_converted(f, *args, **kwargs)
        leaves, treedef = trees.flatten((args, kwargs))
        leaves = [self.as_leaf(x) for x in leaves]
        places, out_def = [i for i, x in enumerate(leaves) if trees.is_array(x)], list[Any]()

        def flat(*xs: Array) -> Any:
            args, kwargs = trees.unflatten(treedef, replaced_at(leaves, places, xs))
            outs, structure = trees.flatten(f(*args, **kwargs))
            out_def[:] = [structure]
            return outs

        program, consts = jaxprs.traced(flat, *[leaves[i] for i in places])
        held = [i for i, c in enumerate(consts) if isinstance(c, jax.core.Tracer)]
        if not held:
            return super().closure_converted(f, *args, **kwargs)
        rest = replaced_at(consts, held, [None] * len(held))  # tracers in `rest` would leak

        def converted(captured: list[Array], *args: Any, **kwargs: Any) -> Any:
            leaves, _ = trees.flatten((args, kwargs))
            outs = program(replaced_at(rest, held, captured), *[leaves[i] for i in places])
            return trees.unflatten(out_def[0], outs)

        return converted, [consts[i] for i in held]

    compiles_rules = True
    transpose = staticmethod(transpose)
    pull = staticmethod(pull)
    attempt = staticmethod(attempt)

    stop_gradient = staticmethod(jax.lax.stop_gradient)

    def call_on_host(self, f: Callable[..., Any], args: Any, like: Any) -> Any:
        """Calls `f(args)`. If f converts a tracer to NumPy, f runs in a `pure_callback` instead."""
        try:
            return f(args)
        except jax.errors.TracerArrayConversionError:
            shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(jnp.shape(x), x.dtype), like)
            return jax.pure_callback(
                lambda a: jax.tree.map(
                    lambda y, s: np.asarray(y, s.dtype), f(jax.tree.map(np.asarray, a)), shapes
                ),
                shapes,
                args,
                vmap_method="sequential",
            )

    # --- the framework's own transforms

    like_module = staticmethod(module_arguments.like_module)
    opened = staticmethod(module_arguments.opened)
    part_of = staticmethod(module_arguments.part_of)

    traces_marks = True
    marked, retaining = LazyMember("marks"), LazyMember("marks")

    vmap, compile = staticmethod(jax.vmap), staticmethod(jax.jit)

    def map_batches(
        self, f: Any, batch: list[Array], chunk_size: int | None, one_draw: bool = False
    ) -> list[Array]:
        from gradtools.jax.slicing import map_batch

        if chunk_size is None:
            return jax.vmap(f)(*batch)
        return map_batch(f, batch, None if chunk_size == 1 else chunk_size)

    def checkpoint(self, f: Any, options: ChunkOptions) -> Callable[..., Any]:
        # The recomputation evaluates the same program, so outputs need no verification.
        return partial(self._checkpointed, f)

    def _checkpointed(self, f: Any, /, *args: Any, **kwargs: Any) -> Any:
        self.check_arrays(args, kwargs)
        return self.run_checkpointed(f, *args, **kwargs)

    run_checkpointed = LazyMember("recomputing", "checkpointed")


_clip_norm = jax.jit(clip_norm, static_argnums=0, inline=True)  # eager code dispatches one program
