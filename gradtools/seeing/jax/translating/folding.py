"""Constant folding: equations with known operands are evaluated by NumPy or JAX.

Equations of constants are computed while a program is translated, those without a translation
when the formula is.

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
from gradtools.jax.jaxprs import is_inexact
from gradtools.jax.trees import conj

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


def function_of(eqn: Any) -> Callable[..., list[np.ndarray]]:
    """What an equation gives, of NumPy's arrays, in the precision of now."""
    wide = bool(jax.config.read("jax_enable_x64"))

    def run(*xs: Any) -> list[np.ndarray]:
        with jax.enable_x64(wide):
            return [np.asarray(y) for y in bound(eqn, _like(eqn.invars, xs))]

    return run


def pullback_of(eqn: Any) -> Callable[..., list[np.ndarray]]:
    """The cotangents of its operands, of these and the results' cotangents.

    NaN for an operand to which JAX has no derivative, where it has one to others.
    """
    wide, count = bool(jax.config.read("jax_enable_x64")), len(eqn.invars)

    def run(*values: Any) -> list[np.ndarray]:
        with jax.enable_x64(wide):
            xs, cts = _like(eqn.invars, values[:count]), _like(eqn.outvars, values[count:])
            try:
                return [np.asarray(x) for x in pulled(eqn)(xs, cts)]
            except (NotImplementedError, ValueError):
                return [_pulled_alone(eqn, k, xs, cts) for k in range(count)]

    return run


def _pulled_alone(eqn: Any, k: int, xs: Sequence[Any], cts: Sequence[Any]) -> np.ndarray:
    try:
        return np.asarray(pulled(eqn, (k,))(xs, cts)[k])
    except (NotImplementedError, ValueError):
        return np.full(xs[k].shape, np.nan)


def _like(atoms: Sequence[Any], values: Sequence[Any]) -> list[Any]:
    return [jnp.asarray(x, a.aval.dtype) for x, a in zip(values, atoms, strict=True)]


def pulled(
    eqn: Any, wrt: Sequence[int] | None = None
) -> Callable[[Sequence[Any], Sequence[Any]], list[Any]]:
    """What JAX pulls back through an equation (to some operands), in gradtools' convention."""

    def pull(xs: Sequence[Any], cts: Sequence[Any]) -> list[Any]:
        active, back, _ = _differentiated(eqn, xs, wrt)
        moving = [k for k, var in enumerate(eqn.outvars) if is_inexact(var)]
        place = dict(zip(active, back([conj(cts[k]) for k in moving]), strict=True))
        return [conj(place[k]) if k in place else jnp.zeros(x.shape) for k, x in enumerate(xs)]

    return pull


def forwarded(eqn: Any) -> Callable[[Sequence[Any]], list[Any]]:
    """What an equation gives while JAX differentiates it."""
    return lambda xs: _differentiated(eqn, xs)[2]


def _differentiated(
    eqn: Any, xs: Sequence[Any], wrt: Sequence[int] | None = None
) -> tuple[list[int], Any, list[Any]]:
    """The operands that are differentiated, JAX's pullback along them, and the results."""
    caller = range(len(xs)) if wrt is None else wrt
    active = [k for k in caller if is_inexact(eqn.invars[k])]
    moving = [k for k, var in enumerate(eqn.outvars) if is_inexact(var)]

    def fun(*some: Any) -> tuple[list[Any], list[Any]]:
        full = list(xs)
        for k, x in zip(active, some, strict=True):
            full[k] = x
        result = bound(eqn, full)
        return [result[k] for k in moving], result

    inexact, back, outs = jax.vjp(fun, *[xs[k] for k in active], has_aux=True)
    for k, y in zip(moving, inexact, strict=True):
        outs[k] = y
    return active, back, outs


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
    "copy": lambda p, x: x,
    "broadcast_in_dim": _broadcast,
    "iota": _iota,
    "reshape": lambda p, x, *_: x.reshape(p["new_sizes"]),
    "squeeze": lambda p, x: np.squeeze(x, tuple(int(a) for a in p["dimensions"])),
    "transpose": lambda p, x: np.transpose(x, p["permutation"]),
    "concatenate": lambda p, *xs: np.concatenate(xs, p["dimension"]),
    "add": lambda p, a, b: a + b,
    "sub": lambda p, a, b: a - b,
    "mul": lambda p, a, b: a * b,
    "neg": lambda p, a: -a,
    "max": lambda p, a, b: np.maximum(a, b),
    "min": lambda p, a, b: np.minimum(a, b),
    "eq": lambda p, a, b: a == b,
    "ne": lambda p, a, b: a != b,
    "lt": lambda p, a, b: a < b,
    "le": lambda p, a, b: a <= b,
    "gt": lambda p, a, b: a > b,
    "ge": lambda p, a, b: a >= b,
    "and": lambda p, a, b: a & b,
    "or": lambda p, a, b: a | b,
    "not": lambda p, a: ~a,
    "select_n": lambda p, c, *xs: np.choose(c.astype(int), xs),
}

__all__ = ["bound", "evaluated", "folded", "function_of", "is_foldable", "pullback_of", "pulled"]
