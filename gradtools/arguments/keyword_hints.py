"""Keyword arguments of other tools, and what to write instead.

The table of docs/coming-from.md for keywords: a refusal names the one that gradtools has.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar

from gradtools.errors import TypeRefusal

F = TypeVar("F", bound=Callable[..., Any])

_STATIC = (
    "name the parameters in static_argnames=; static arguments lead those of fwd as well as bwd"
)
_WHOLE = "all of f is computed again; call checkpoint around the parts for which that is wanted"
_NESTS = "leave it out; derivatives nest, and in PyTorch what requires grad gives attached results"
_COMPLEX = (
    "leave it out; grad of a real f takes complex arguments, and vjp and jvp take a complex f, too"
)
_HINTS: dict[str, str | dict[str, str]] = {
    "nondiff_argnums": _STATIC,
    "nondiff_argnames": _STATIC,
    "static_argnums": {"custom_rule": _STATIC, "checkpoint": "close over what is static"},
    "argnames": "give positions: argnums=0, or a tuple of them",
    "argnum": "write argnums=",
    "wrt": "write argnums=",
    "holomorphic": _COMPLEX,
    "allow_int": "leave integer arguments out of argnums",
    "create_graph": _NESTS,
    "retain_graph": "leave it out; the pullback of vjp may be called many times",
    "allow_unused": 'write disconnected_inputs="zeros"',
    "materialize_grads": 'write disconnected_inputs="zeros"',
    "vectorize": "leave it out; chunk_size= says how many passes run at once",
    "strict": 'grad and value_and_grad take disconnected_inputs="strict"',
    "in_dims": "write in_axes=",
    "out_dims": "write out_axes=",
    "randomness": "leave it out; each example draws its own numbers",
    "policy": f"{_WHOLE}, or use jax.checkpoint(f, policy=...), which composes with gradtools",
    "prevent_cse": _WHOLE,
    "use_reentrant": f"leave it out; {_WHOLE}",
    "concrete": _WHOLE,
    "batch_size": "write chunk_size=",
    "chunks": "write chunk_size=, the number of examples in a chunk",
    "retain": "write keep_graphs=",
    "outputs": "write select=",
    "result_shape_dtypes": "write out=ArraySpec(shape, dtype)",
    "vmap_method": "write vectorized=True, or leave it out for one call for each example",
}


def with_hints(operator: F) -> F:
    """The operator, which refuses a keyword of another tool by naming its own."""

    @wraps(operator)
    def hinting(self: Any, *args: Any, **kwargs: Any) -> Any:
        for name in kwargs:
            if name in _HINTS:
                raise TypeRefusal(_refusal(operator.__name__, name))
        return operator(self, *args, **kwargs)

    return hinting  # type: ignore[return-value]


def _refusal(operator: str, name: str) -> str:
    hint = _HINTS[name]
    if isinstance(hint, dict):
        hint = hint.get(operator, "leave it out")
    return f"{operator}: there is no argument {name}=. Instead, {hint}."
