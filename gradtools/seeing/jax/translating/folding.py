"""Constant folding: equations with known operands are evaluated by NumPy or JAX.

What programs do most with constants, index arithmetic and masks, NumPy does at once; all else JAX
computes itself, one equation at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from gradtools.jax import jaxprs
from gradtools.jax._upstream import Literal

Fold = Callable[..., Any]


def is_foldable(eqn: Any) -> bool:
    """Whether an equation of constants is a constant: it has no effects, and stays in JAX."""
    return not eqn.effects and eqn.primitive.name not in _LEAVING


_LEAVING = ("pure_callback", "io_callback", "debug_callback", "gradtools_kernel")


def folded(eqn: Any, values: Sequence[Any]) -> list[Any]:
    """The results of an equation."""
    fold = _FOLDS.get(eqn.primitive.name)
    if fold is not None and all(isinstance(v, np.ndarray | np.generic) for v in values):
        with np.errstate(all="ignore"):
            result = np.asarray(fold(eqn.params, *values))
        return [result.astype(eqn.outvars[0].aval.dtype, copy=False)]
    return [_plain(x) for x in evaluated(eqn, values)]


def evaluated(eqn: Any, values: Sequence[Any]) -> list[Any]:
    """The same by JAX, at once."""
    with jax.ensure_compile_time_eval():
        return bound(eqn, values)


def bound(eqn: Any, values: Sequence[Any]) -> list[Any]:
    """What an equation gives for these operands, wherever it runs."""
    pairs = zip(eqn.invars, values, strict=True)
    given = {atom: value for atom, value in pairs if not isinstance(atom, Literal)}
    one = _empty().replace(eqns=[eqn], invars=list(given), outvars=list(eqn.outvars))
    return jax.core.eval_jaxpr(one, [], *given.values())


@cache
def _empty() -> Any:
    empty = jaxprs.open_jaxpr(jax.make_jaxpr(lambda: ())())
    return empty.replace(debug_info=empty.debug_info.with_unknown_names())


def _plain(x: Any) -> Any:
    return x if jnp.issubdtype(x.dtype, jax.dtypes.extended) else np.asarray(x)


def _broadcast(p: Mapping[str, Any], x: Any, *_: Any) -> Any:
    shape, axes = tuple(p["shape"]), tuple(p["broadcast_dimensions"])
    lie = [1] * len(shape)
    for n, a in zip(x.shape, axes, strict=True):
        lie[a] = n
    return np.broadcast_to(x.reshape(lie), shape)


def _iota(p: Mapping[str, Any], *_: Any) -> Any:
    shape, axis = tuple(p["shape"]), p["dimension"]
    lie = [n if a == axis else 1 for a, n in enumerate(shape)]
    return np.broadcast_to(np.arange(shape[axis]).reshape(lie), shape)


_FOLDS: dict[str, Fold] = {
    "convert_element_type": lambda p, x: x.astype(p["new_dtype"]),
    "broadcast_in_dim": _broadcast,
    "iota": _iota,
    "reshape": lambda p, x, *_: x.reshape(p["new_sizes"]),
    "concatenate": lambda p, *xs: np.concatenate(xs, p["dimension"]),
    "add": lambda p, a, b: a + b,
    "sub": lambda p, a, b: a - b,
    "mul": lambda p, a, b: a * b,
    "ge": lambda p, a, b: a >= b,
    "lt": lambda p, a, b: a < b,
    "select_n": lambda p, c, *xs: np.choose(c.astype(int), xs),
}

__all__ = ["bound", "evaluated", "folded", "is_foldable"]
