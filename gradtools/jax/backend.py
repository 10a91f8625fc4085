"""The waist in JAX."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from gradtools.backend import Array, Evaluation, Fun, Staged
from gradtools.errors import GradtoolsError
from gradtools.jax import accumulate, arrays, modules, tracing
from gradtools.jax.rules import apply_rule, reverse_only_p
from gradtools.jax.trees import conj, is_inexact
from gradtools.rules import Rule

_SCOPE = "gradtools_derivative"
_UNTRACEABLE = (jax.errors.JAXTypeError, jax.errors.NonConcreteBooleanIndexError)


class JaxBackend:
    """What `gradtools.backend.Backend` asks, by JAX."""

    name = "jax"
    hvp_mode = "forward_over_reverse"
    xp = jnp
    accumulation = accumulate

    # --- pytrees

    def flatten(self, tree: Any) -> tuple[list[Any], Any]:
        return jax.tree.flatten(tree)

    def unflatten(self, treedef: Any, leaves: Sequence[Any]) -> Any:
        return jax.tree.unflatten(treedef, leaves)

    def leaf_paths(self, tree: Any) -> list[str]:
        return [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(tree)]

    # --- arrays

    def is_array(self, x: Any) -> bool:
        return isinstance(x, jax.Array)

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

    def cast(self, x: Any, like: Array | str) -> Array:
        return jnp.asarray(x, like if isinstance(like, str) else like.dtype)

    def real_scalar(self, x: Any, like: Array) -> Array:
        return jnp.asarray(x, jnp.finfo(like.dtype).dtype)

    def zeros_like(self, x: Array) -> Array:
        return jax.lax.full_like(x, 0)

    def ones_like(self, x: Array) -> Array:
        return jax.lax.full_like(x, 1)

    def unit_basis(self, x: Array) -> Array:
        return jnp.eye(x.size, dtype=x.dtype).reshape(x.size, *x.shape)

    def is_known_zero(self, x: Array) -> bool:
        return not isinstance(x, jax.core.Tracer) and not bool(jnp.any(x != 0))

    # --- derivatives

    def stage(self, fun: Fun, leaves: list[Array]) -> Staged:
        traced = _traced(fun, leaves)
        if traced is None:
            return Staged(fun)
        outs, inputs = (sum(x.size for x in xs) for xs in (traced.out_avals, leaves))
        return Staged(traced.run, traced.reverse_only, "forward" if inputs < outs else "reverse")

    def vjp(
        self, fun: Fun, leaves: list[Array], *, groups: Sequence[int] | None, once: bool
    ) -> Evaluation:
        traced = _traced(fun, leaves) if groups is not None else None
        with jax.named_scope(_SCOPE):
            outs, pull, extras = jax.vjp(
                fun if traced is None else traced.run, *leaves, has_aux=True
            )

        def pullback(cts: Sequence[Array | None]) -> list[Array | None]:
            filled = [
                jax.lax.full_like(y, 0) if ct is None else conj(ct)
                for ct, y in zip(cts, outs, strict=True)
            ]
            with jax.named_scope(_SCOPE):
                grads = [conj(g) for g in pull(filled)]
            if traced is None:
                return grads
            return [g if r else None for g, r in zip(grads, traced.reached, strict=True)]

        if traced is None:
            return Evaluation(outs, extras, pullback, checked=False)
        return Evaluation(
            outs,
            extras,
            pullback,
            nested=lambda: traced.nested,
            where_lost=lambda i: [str(cut) for cut in tracing.find_cuts(traced.closed, i)],
        )

    def jvp(
        self, fun: Fun, leaves: list[Array], tangents: list[Array]
    ) -> tuple[list[Array], list[Array], list[Array]]:
        try:
            with jax.named_scope(_SCOPE):
                outs, pushed, extras = jax.jvp(fun, leaves, tangents, has_aux=True)
        except TypeError as error:
            if "forward-mode autodiff (jvp) to a custom_vjp" not in str(error):
                raise
            raise _reverse_only_error("jvp") from error
        return outs, extras, pushed

    def linearize(
        self, fun: Fun, leaves: list[Array]
    ) -> tuple[list[Array], list[Array], Callable[[list[Array]], list[Array]]]:
        try:
            with jax.named_scope(_SCOPE):
                outs, push, extras = jax.linearize(fun, *leaves, has_aux=True)
        except TypeError as error:
            if "forward-mode autodiff (jvp) to a custom_vjp" not in str(error):
                raise
            raise _reverse_only_error("linearize") from error
        return outs, extras, lambda tangents: push(*tangents)

    def without_graph(self, fun: Callable[[], Any]) -> Any:
        return fun()

    def constant(self, x: Array, message: str, *sources: Any) -> Array:
        return x

    def apply_rule(self, rule: Rule, *xs: Array) -> list[Array]:
        return apply_rule(rule, *xs)

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

    def constant_result(self, fun: Callable[..., Any]) -> Callable[..., Any]:
        return fun  # jit runs Python as it is

    def refuse_to_compile(self, reason: str) -> None:
        pass  # jit traces everything

    # --- the framework's own transforms

    def vmap(self, f: Any, in_axes: Any = 0, out_axes: Any = 0) -> Callable[..., Any]:
        return jax.vmap(f, in_axes, out_axes)

    def map_batches(self, f: Any, batch: list[Array], chunk_size: int | None) -> list[Array]:
        if chunk_size is None:
            return jax.vmap(f)(*batch)
        size = None if chunk_size == 1 else chunk_size
        return jax.lax.map(lambda xs: f(*xs), tuple(batch), batch_size=size)

    def checkpoint(self, f: Any) -> Callable[..., Any]:
        return jax.checkpoint(f)

    def compile(self, f: Any, **options: Any) -> Callable[..., Any]:
        return jax.jit(f, **options)

    functionalize = staticmethod(modules.functionalize)


def _numpy(tree: Any) -> Any:
    return jax.tree.map(np.asarray, tree)


def _reverse_only_error(asked: str) -> GradtoolsError:
    return GradtoolsError(
        f"{asked}: f holds a function that has a reverse rule only (clip_gradient, "
        "transform_gradient, known_gradient, or a jax.custom_vjp), which forward mode cannot "
        "enter. Use vjp or grad, or for second derivatives mode='reverse_over_reverse'."
    )


@dataclass(frozen=True)
class _Traced:
    """A function of flat arrays, seen once as a jaxpr and then run from it."""

    closed: Any
    treedef: Any
    out_avals: list[Any]

    def run(self, *leaves: Array) -> Any:
        flat = jax.core.eval_jaxpr(self.closed.jaxpr, self.closed.consts, *leaves)
        return jax.tree.unflatten(self.treedef, flat)

    @cached_property
    def reached(self) -> list[bool]:
        """For each leaf, whether it reaches one of the differentiated outputs."""
        rows = tracing.reached_matrix(self.closed)[: len(self.out_avals)]
        return [any(row[i] for row in rows) for i in range(len(self.closed.in_avals))]

    @cached_property
    def reverse_only(self) -> bool:
        return tracing.uses_primitive(self.closed, lambda eqn: eqn.primitive is reverse_only_p)

    @cached_property
    def nested(self) -> bool:
        def inside(eqn: Any) -> bool:
            return _SCOPE in str(eqn.source_info.name_stack)

        return tracing.uses_primitive(self.closed, inside)


def _traced(fun: Fun, leaves: list[Array]) -> _Traced | None:
    """fun as a jaxpr; None where it branches on values or leaves the framework.

    The jaxpr is what is then evaluated, so the user's function runs once. Where this fails, what
    ran of it runs again: what else it does besides returning, it then does twice.
    """
    try:
        closed, shapes = jax.make_jaxpr(fun, return_shape=True)(*leaves)
    except _UNTRACEABLE:
        return None
    return _Traced(closed, jax.tree.structure(shapes), closed.out_avals[: len(shapes[0])])
