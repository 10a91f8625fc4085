"""Evaluates a jaxpr at given values, including the operations of calls, branches and loops.

`why_zero` (`passes.py`) uses this module to examine the passes of a program, and `first_divergence`
uses this module to compare the values of two programs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Generic, TypeVar

import jax
import jax.numpy as jnp

from gradtools.jax import jaxprs

V = TypeVar("V")  # representation of an array, such as (array, index)
P = TypeVar("P")  # location of an equation
J = TypeVar("J")  # location of a jaxpr
Evaluate = Callable[[list[Any]], list[Any]]


class Unrolling(Generic[V, P, J]):
    """Evaluates a jaxpr equation by equation; subclasses record the operations.

    Attributes:
        longest: The maximum number of equations to evaluate in an unrolled loop, over all
            iterations. A longer scan is evaluated as one operation. In a longer while loop, the
            remaining iterations are evaluated as one operation.
    """

    longest = 2000

    # --- representation

    def array(self, value: V) -> Any:
        """Returns the JAX array that `value` represents."""
        raise NotImplementedError

    def literal(self, literal: Any) -> V:
        """Returns the representation of a literal of a jaxpr."""
        raise NotImplementedError

    def constant(self, x: Any) -> V:
        """Returns the representation of a constant array of a jaxpr."""
        raise NotImplementedError

    def place(self, at: J, i: int, eqn: Any) -> P:
        """Returns the location of equation i of a jaxpr."""
        raise NotImplementedError

    def inside(self, at: P, k: int, iteration: int | None) -> J:
        """Returns the location of inner jaxpr k of an equation, in an iteration of a loop."""
        raise NotImplementedError

    def operation(self, at: P, name: str, evaluate: Evaluate, xs: Sequence[V]) -> list[V]:
        """Evaluates and records an operation; returns its results."""
        raise NotImplementedError

    def enters(self, eqn: Any, at: P) -> bool:
        """Returns whether to evaluate the inner jaxprs of an equation step by step."""
        name = eqn.primitive.name
        if name == "scan":
            size = eqn.params["length"] * len(jaxprs.programs_of(eqn)[0].jaxpr.eqns)
            return 0 < size <= self.longest
        return name in ("cond", "while", *jaxprs.CALLS)

    # --- evaluation

    def evaluated(self, jaxpr: Any, entries: Sequence[V], at: J) -> list[V]:
        """Evaluates an open jaxpr with constants and inputs `entries`; returns the outputs."""
        step = lambda i, eqn, xs: self.equation(eqn, xs, self.place(at, i, eqn))
        return jaxprs.interpreted(jaxpr, entries, step, self.literal)

    def equation(self, eqn: Any, xs: list[V], at: P) -> list[V]:
        """Evaluates an equation, or its inner jaxprs; returns the results."""
        name = eqn.primitive.name
        if not self.enters(eqn, at):
            return self.operation(at, name, partial(jaxprs.bound, eqn), xs)
        if name == "scan":
            return self._scan(eqn, xs, at)
        if name == "while":
            return self._while(eqn, xs, at)
        k, programs = 0, jaxprs.programs_of(eqn)
        if name == "cond":
            k, xs = min(max(int(self.array(xs[0])), 0), len(programs) - 1), xs[1:]
        return self.program(programs[k], xs, self.inside(at, k, None))

    def program(self, held: jaxprs.HeldJaxpr, xs: Sequence[V], at: J) -> list[V]:
        """Evaluates an inner jaxpr and returns the outputs."""
        return self.evaluated(held.jaxpr, [*map(self.constant, held.consts), *xs], at)

    def _scan(self, eqn: Any, xs: list[V], at: P) -> list[V]:
        held, length = jaxprs.programs_of(eqn)[0], eqn.params["length"]
        count, carried = jaxprs.scan_counts(eqn)
        # If the index is an array, JAX compiles the operation only once for all rows.
        index = lambda x, i: jax.lax.dynamic_index_in_dim(x, jnp.asarray(i), keepdims=False)
        rows = lambda x: [index(x[0], i) for i in range(length)]
        columns = [self.operation(at, "row", rows, [x]) for x in xs[count + carried :]]
        first, carry = xs[:count], xs[count : count + carried]
        rounds: list[list[V]] = [[]] * length
        for i in reversed(range(length)) if eqn.params["reverse"] else range(length):
            given = [*first, *carry, *(column[i] for column in columns)]
            outs = self.program(held, given, self.inside(at, 0, i))
            carry, rounds[i] = outs[:carried], outs[carried:]
        stack = lambda rows: [jnp.stack(rows)]
        columns = [[*column] for column in zip(*rounds, strict=True)]
        return [*carry, *(self.operation(at, "stack", stack, column)[0] for column in columns)]

    def _while(self, eqn: Any, xs: list[V], at: P) -> list[V]:
        test, body = jaxprs.programs_of(eqn)
        n, m = eqn.params["cond_nconsts"], eqn.params["body_nconsts"]
        gates, consts, carry, i = xs[:n], xs[n : n + m], xs[n + m :], 0
        while self.array(self.program(test, [*gates, *carry], self.inside(at, 0, i))[0]):
            if i * len(body.jaxpr.eqns) > self.longest:
                rest = partial(jaxprs.bound, eqn)
                return self.operation(at, "while", rest, [*gates, *consts, *carry])
            carry = self.program(body, [*consts, *carry], self.inside(at, 1, i))
            i += 1
        return carry
