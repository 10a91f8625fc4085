"""A cache of linearized jaxprs, for functions that eager code differentiates again and again.

A function is traced at each call, for what it closes over may have changed. Where what comes out is
alike (`jaxpr_equality.py`), with other arrays in it perhaps, its linearization is the same, too:
done once, it is two jaxprs

    forward   (consts, xs) -> (ys, residuals)        backward   (residuals, cts) -> J^T cts

which are evaluated operation by operation, as JAX does outside of jit. To linearize by evaluating
takes longer than the operations of a small function do. A program that comes once is evaluated so.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.tree_util import Partial

from gradtools.jax.jaxpr_equality import derived
from gradtools.jax.jaxprs import Jaxpr, open_jaxpr
from gradtools.jax.reachability import within_a_trace


@dataclass(frozen=True, eq=False, repr=False)
class LinearizedProgram:
    """A function of flat arrays, linearized for arrays of certain types.

    Attributes:
        forward: Gives outputs, extras and residuals.
        backward: The pullback.
        count: How many outputs are differentiated.
        extras: How many are not.
    """

    forward: Callable[..., list[Any]]
    backward: Callable[..., list[Any]]
    count: int
    extras: int

    @classmethod
    def of(cls, run: Callable[..., Any], count: int, consts: Any, leaves: Any) -> LinearizedProgram:
        """The linearization of `run(consts, xs)`, in the first `count` outputs."""
        structure: list[Any] = []

        def forward(consts: Any, xs: Any) -> Any:
            def parted(*xs: Any) -> Any:
                ys = run(consts, xs)
                return ys[:count], ys[count:]

            ys, pull, extras = jax.vjp(parted, *xs, has_aux=True)
            residuals, treedef = jax.tree.flatten(pull)
            structure[:] = [treedef]
            return ys, extras, residuals

        def backward(residuals: Any, cts: Any) -> Any:
            return jax.tree.unflatten(structure[0], residuals)(cts)

        there, avals = jax.make_jaxpr(forward, return_shape=True)(list(consts), list(leaves))
        ys, extras, residuals = avals
        back = jax.make_jaxpr(backward)(residuals, ys)
        return cls(_evaluation(there), _evaluation(back), count, len(extras))

    def evaluated(self, consts: Sequence[Any], leaves: Sequence[Any]) -> tuple[Any, Any, Any]:
        """`(outs, pull, extras)` there, as `jax.vjp` gives them."""
        result = self.forward(*consts, *leaves)
        start = self.count + self.extras
        pull = Partial(self._pulled, result[start:])
        return result[: self.count], pull, result[self.count : start]

    def _pulled(self, residuals: Sequence[Any], cts: Sequence[Any]) -> list[Any]:
        return self.backward(*residuals, *cts)


def evaluated(jaxpr: Jaxpr, consts: Sequence[Any], *xs: Any) -> list[Any]:
    """The results of a jaxpr as arrays; JAX gives a constant among them as a literal."""
    ys = jax.core.eval_jaxpr(jaxpr, consts, *xs)
    return [y if isinstance(y, jax.Array) else jnp.asarray(y) for y in ys]


def _evaluation(closed: Jaxpr) -> Callable[..., list[Any]]:
    """A jaxpr as a function that evaluates it, operation by operation."""
    return partial(evaluated, open_jaxpr(closed), closed.consts)


class _Recurring:
    """Programs that are alike, and the linearizations of the first of them."""

    def __init__(self, run: Callable[..., Any]) -> None:
        self.run, self.known = run, dict[Any, LinearizedProgram]()
        self.met: set[Any] = set()


def linearized_before(closed: Jaxpr, count: int, leaves: Sequence[Any]) -> LinearizedProgram | None:
    """The linearization of a program that comes again; None where there is none to keep.

    Within a trace there is none: what is traced is linearized once, anyhow. Nor where JAX is to
    tell the line of an operation, for that would be the line of the program that came first.
    """
    config: Any = jax.config
    if within_a_trace() or closed.effects or config.jax_debug_nans or config.jax_debug_infs:
        return None
    switches = config.jax_enable_x64, config.jax_default_matmul_precision
    key = (count, *switches, config.jax_numpy_dtype_promotion, jax.sharding.get_abstract_mesh())
    program: _Recurring = derived(closed, _Recurring)
    if key not in program.known:
        if key not in program.met:
            program.met.add(key)
            return None
        program.known[key] = LinearizedProgram.of(program.run, count, closed.consts, leaves)
    return program.known[key]
