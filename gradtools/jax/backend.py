"""The waist in JAX: what `gradtools.backend.Backend` asks. `engines.py` differentiates."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from gradtools.backend import Array, backend_of
from gradtools.crossings import noted
from gradtools.jax import arrays, engines, parts, shardings, trees, wrapping
from gradtools.jax.rules import apply_rule, attempt, pull, push, transpose, value_and_push
from gradtools.jax.stateful import checkpointed, explained, stateful
from gradtools.jax.trees import LinearMap, is_inexact
from gradtools.rules import Rule, by_key

if TYPE_CHECKING:
    from gradtools.chunking import Chunks, Options
    from gradtools.host import Kernel
    from gradtools.seeing.graph import Graph
    from gradtools.seeing.program import Program


class JaxBackend:
    """What `gradtools.backend.Backend` asks, by JAX.

    The engines and the rules come with it; a member that imports a room is one of those that most
    programs never ask for, so that an import of gradtools stays light.
    """

    name = "jax"
    hvp_mode = "forward_over_reverse"
    xp = jnp

    @property
    def accumulation(self) -> Any:
        from gradtools.jax import accumulate

        return accumulate

    def __reduce__(self) -> Any:
        return backend_of, (self.name,)

    # --- pytrees

    flatten = staticmethod(trees.flatten)
    unflatten = staticmethod(trees.unflatten)
    leaf_paths = staticmethod(trees.leaf_paths)
    sketch = staticmethod(trees.flatten)

    def from_sketch(self, structure: Any) -> Any:
        return structure

    sketch_of = from_sketch
    draw = unflatten

    # --- arrays

    def is_array(self, x: Any) -> bool:
        # A literal of a program that is traced, a float with a dtype, says that it is one too.
        return isinstance(x, jax.Array) and not isinstance(x, int | float | complex)

    def is_inexact(self, x: Array) -> bool:
        return is_inexact(x)

    def is_complex(self, x: Array) -> bool:
        return jnp.issubdtype(x.dtype, jnp.complexfloating)

    def dtype_name(self, x: Array) -> str:
        return str(x.dtype)

    asarray = staticmethod(arrays.asarray)
    to_numpy = staticmethod(arrays.to_numpy)
    key = staticmethod(arrays.key)
    split = staticmethod(arrays.split)
    fold_in = staticmethod(arrays.fold_in)

    def as_leaf(self, x: Any) -> Any:
        """Weakly typed for a Python number; an integer stays what it is."""
        if isinstance(x, float | complex) or hasattr(x, "__array__"):
            return jnp.asarray(x)
        return x

    def cast(self, x: Any, like: Array | str) -> Array:
        return jnp.asarray(x, like if isinstance(like, str) else like.dtype)

    def real_scalar(self, x: Any, like: Array) -> Array:
        return jnp.asarray(x, jnp.finfo(like.dtype).dtype)

    def zeros_like(self, x: Array) -> Array:
        return jax.lax.full_like(x, 0)

    def look(self, x: Array) -> Any:
        return jax.typeof(x)

    def zeros(self, look: Any, beside: Array) -> Array:
        return shardings.like(jnp.zeros(look.shape, look.dtype), look)

    def ones_like(self, x: Array) -> Array:
        return jax.lax.full_like(x, 1)

    def unit_basis(self, x: Array) -> Array:
        basis = jnp.eye(x.size, dtype=x.dtype).reshape(x.size, *x.shape)
        return shardings.many_like(basis, x)

    def is_known_zero(self, x: Array) -> bool:
        return not isinstance(x, jax.core.Tracer) and not bool(jnp.any(x != 0))

    def is_symbolic_zero(self, x: Any) -> bool:
        return isinstance(x, jax.custom_derivatives.SymbolicZero)

    # --- derivatives

    stage = staticmethod(engines.stage)
    vjp = staticmethod(engines.vjp)
    jvp = staticmethod(engines.jvp)
    jvps = staticmethod(engines.jvps)
    linearize = staticmethod(engines.linearize)

    def direct_calls(self, of: Any) -> None:
        return None

    def sketch_values(self, fun: Callable[..., list[Array]], *xs: Array) -> None:
        jax.make_jaxpr(lambda *a: list(fun(*a)))(*[jax.typeof(x) for x in xs])

    def outliving(self, call: Any, outs: Sequence[Array]) -> tuple[Any, Sequence[Any]]:
        look = lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype)
        return call.without_values(look), [look(y) for y in outs]

    def linear_map(self, run: Callable[..., Any], native: Any) -> Callable[..., Any]:
        return LinearMap(run, native)

    def constant(self, x: Array, message: str, *sources: Any) -> Array:
        return x

    def apply_rule_by_key(self, key: str, *xs: Array) -> list[Array]:
        return apply_rule(by_key(key), *xs)

    def compiling(self) -> bool:
        return False  # jit traces Python as it is

    def apply_rule(self, rule: Rule, *xs: Array) -> list[Array]:
        return apply_rule(rule, *xs)

    transpose = staticmethod(transpose)
    pull = staticmethod(pull)
    push = staticmethod(push)
    value_and_push = staticmethod(value_and_push)
    attempt = staticmethod(attempt)

    def stop_gradient(self, x: Array) -> Array:
        return jax.lax.stop_gradient(x)

    def call_on_host(self, f: Callable[..., Any], args: Any, like: Any) -> Any:
        """`f(args)`; under a trace, if f wants NumPy arrays, by a callback of `like`'s shapes."""
        try:
            return f(args)
        except jax.errors.TracerArrayConversionError:
            shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(jnp.shape(x), x.dtype), like)
            return jax.pure_callback(
                lambda a: jax.tree.map(lambda y, s: np.asarray(y, s.dtype), f(_numpy(a)), shapes),
                shapes,
                args,
                vmap_method="sequential",
            )

    def call_kernel(self, call: Any, xs: Sequence[Array]) -> list[Array]:
        from gradtools.jax import host

        return host.call_kernel(call, xs)

    @cached_property
    def call_now(self) -> Callable[[Kernel, Sequence[Any]], Any]:
        from gradtools.jax import host

        return partial(host.call_now, self)

    def constant_result(self, fun: Callable[..., Any]) -> Callable[..., Any]:
        return fun  # jit runs Python as it is

    def refuse_to_compile(self, reason: str) -> None:
        pass  # jit traces everything

    # --- the framework's own transforms

    like_module = staticmethod(wrapping.like_module)
    opened = staticmethod(parts.opened)
    part_of = staticmethod(parts.part_of)

    is_model = staticmethod(parts.is_module)

    def repeatable(self, asked: str, f: Any) -> Any:
        return stateful(asked, f, ()) or f

    def model_of(self, f: Any) -> Any:
        from gradtools.jax import training

        return training.model_of(f)

    def held(self, asked: str, model: Any) -> Any:
        from gradtools.jax import training

        return training.held(asked, model)

    def optimised(self, asked: str, optimizer: Any, model: Any, held: Any) -> Any:
        from gradtools.jax import training

        return training.optimised(asked, optimizer, model, held)

    def lifted(self, asked: str, f: Any, args: Any, kwargs: Any, arrays: Any) -> Any:
        from gradtools.jax import training

        return training.lifted(asked, f, args, kwargs, arrays)

    def vmap(self, f: Any, in_axes: Any = 0, out_axes: Any = 0) -> Callable[..., Any]:
        return jax.vmap(f, in_axes, out_axes)

    def map_batches(self, f: Any, batch: list[Array], chunk_size: int | None) -> list[Array]:
        from gradtools.jax.loops import map_batch

        with explained("per_example_grad"):
            if chunk_size is None:
                return jax.vmap(f)(*batch)
            return map_batch(f, batch, None if chunk_size == 1 else chunk_size)

    def checkpoint(self, f: Any, options: Options) -> Callable[..., Any]:
        # what is computed again is the same program: nothing to verify
        return partial(checkpointed, f)

    def explicit(self, *args: Any, **kwargs: Any) -> Any:
        from gradtools.jax import tiling

        return tiling.explicit(*args, **kwargs)

    def sweep(self, *args: Any, **kwargs: Any) -> Any:
        from gradtools.jax import tiling

        return tiling.sweep(*args, **kwargs)

    def fold(self, *args: Any, **kwargs: Any) -> Any:
        from gradtools.jax import tiling

        return tiling.fold(*args, **kwargs)

    def sharded_like(self, x: Array, other: Array) -> Array:
        from gradtools.jax import shardings

        return shardings.like(x, other) if any(shardings.entries(other)) else x

    def tile_bytes(self, *args: Any, **kwargs: Any) -> int:
        from gradtools.jax import tiling

        return tiling.tile_bytes(*args, **kwargs)

    def run_chunks(self, chunks: Chunks) -> tuple[list[Array], list[Array]]:
        from gradtools.jax import chunking

        return chunking.run_chunks(chunks)

    def sum_chunks(self, chunks: Chunks) -> list[Array]:
        from gradtools.jax import chunking

        return chunking.sum_chunks(chunks)

    @cached_property
    def is_replaying(self) -> Callable[[], bool]:
        from gradtools.jax import chunking

        return chunking.is_replaying

    def gather(self, x: Any, axis_name: Any, group: Any) -> Any:
        from gradtools.jax import gathering

        return gathering.gather(x, axis_name, group)

    def frozen_uses(self, budget: int | None) -> Any:
        from gradtools.jax import freezing

        return freezing.frozen_uses(budget)

    def run_frozen(self, whole: Chunks, uses: Any) -> list[Array]:
        from gradtools.jax import freezing

        return freezing.run_frozen(whole, uses)

    def uncompiled(self, fun: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return fun(*args, **kwargs)  # jit traces everything

    def compile(self, f: Any, **options: Any) -> Callable[..., Any]:
        return jax.jit(f, **options)

    # --- seeing

    def record(self, run: Any, leaves: Sequence[Any], names: Sequence[str]) -> Any:
        from gradtools.jax import seeing

        return seeing.record(run, leaves, names)

    def vanishing(self, *args: Any) -> Any:
        from gradtools.jax import vanishing

        return vanishing.vanishing(*args)

    def watchable(self) -> bool:
        return True  # a trace sees into every transform

    def rerun(self, run: Any, leaves: Sequence[Any]) -> Sequence[Any]:
        from gradtools.jax import seeing

        if noted() is None or not seeing.crosses(run, leaves):
            return run(leaves)  # JAX keeps no state that it could change
        with jax.disable_jit():  # callbacks of compiled code run where nobody notes them
            return run(leaves)

    def gradient_graph(self, asked: Any) -> Graph:
        from gradtools.jax import passes

        return passes.gradient_graph(asked)

    @staticmethod
    def formula_graph(program: Program) -> Graph:
        """One run in the vocabulary of the formula."""
        from gradtools.jax import vocabulary

        return vocabulary.formula_graph(program)

    @staticmethod
    def trying(program: Program, wide: bool) -> AbstractContextManager[Any]:
        """Around attempts at a formula."""
        from gradtools.jax import vocabulary

        return vocabulary.trying(program, wide)

    def measure(self, f: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        from gradtools.jax import measures

        return measures.measure(f, args, kwargs)

    def functionalize(self, module: Any, **options: Any) -> Any:
        from gradtools.jax import modules

        return modules.functionalize(module, **options)


def _numpy(tree: Any) -> Any:
    return jax.tree.map(np.asarray, tree)
