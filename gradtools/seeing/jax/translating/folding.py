"""Constant folding: equations with known operands are evaluated by JAX, one at a time."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from gradtools.jax import jaxprs
from gradtools.jax._upstream import Literal


def is_foldable(eqn: Any) -> bool:
    """Whether an equation of constants can be folded: it has no effects and no host callback."""
    return not eqn.effects and eqn.primitive.name not in _LEAVING


_LEAVING = ("pure_callback", "io_callback", "debug_callback", "gradtools_kernel")


def folded(eqn: Any, values: Sequence[Any]) -> list[Any]:
    """The results of an equation as NumPy arrays, also inside of a trace; keys stay JAX arrays."""
    is_key = lambda x: jnp.issubdtype(x.dtype, jax.dtypes.extended)
    with jax.ensure_compile_time_eval():
        return [x if is_key(x) else np.asarray(x) for x in bound(eqn, values)]


def bound(eqn: Any, values: Sequence[Any]) -> list[Any]:
    """The results of an equation for these operands, which may be tracers."""
    pairs = zip(eqn.invars, values, strict=True)
    given = {atom: value for atom, value in pairs if not isinstance(atom, Literal)}
    one = _empty().replace(eqns=[eqn], invars=list(given), outvars=list(eqn.outvars))
    return jax.core.eval_jaxpr(one, [], *given.values())


@cache
def _empty() -> Any:
    empty = jaxprs.open_jaxpr(jax.make_jaxpr(lambda: ())())
    return empty.replace(debug_info=empty.debug_info.with_unknown_names())


__all__ = ["bound", "folded", "is_foldable"]
