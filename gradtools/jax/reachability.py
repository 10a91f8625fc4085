"""Determines which inputs of a jaxpr reach which outputs.

An input reaches an output if data flows from the input to the output without passing a cut: a
stopped gradient, a conversion of floats to integers or booleans, or a host callback. A derivative
that is zero (round, sign, x**0) is not a cut. JAX's symbolic zeros do not make this distinction, so
this module analyzes the data flow of the jaxpr (a forward may-analysis)::

    bits(out) = OR of bits(in) over the inputs of the equation that flow to `out`

Sets of inputs are bit masks with one bit per input; each sub-jaxpr is analyzed once. The *raw* flow
is the same analysis without cuts and with control dependence.

`seeing/jax/graphs.py` builds the graph in which `why_zero` finds the cause of a zero gradient.
"""

from collections.abc import Iterator, Sequence
from functools import reduce
from operator import or_
from typing import Any

from gradtools.jax import _upstream as upstream
from gradtools.jax._upstream import Literal
from gradtools.jax.jaxprs import (
    DRAWS,
    RULED,
    Eqn,
    InnerJaxpr,
    Jaxpr,
    bodies,
    inexact,
    is_inexact,
    may_not_run,
    open_jaxpr,
    targets,
)


def within_a_trace() -> bool:
    """Returns whether a JAX trace or transform is running in this thread."""
    return not upstream.trace_state_clean()


def reached_matrix(closed_jaxpr: Jaxpr, raw: bool = False) -> list[list[bool]]:
    """Returns a boolean matrix: entry (k, i) is True if input i of a jaxpr reaches output k.

    If not `raw`, integer and boolean inputs reach no output, and no input reaches an integer or
    boolean output.
    """
    jaxpr = open_jaxpr(closed_jaxpr)
    active, given = ([raw or x for x in inexact(v)] for v in (jaxpr.invars, jaxpr.outvars))
    return [
        [there and known and bool(mask >> i & 1) for i, known in enumerate(active)]
        for there, mask in zip(given, Flow(raw).of_jaxpr(jaxpr), strict=True)
    ]


def _union(mask: int, bits: Sequence[int]) -> int:
    """Returns the union of `bits[i]` over all i in a mask."""
    total = 0
    while mask:
        low = mask & -mask
        total |= bits[low.bit_length() - 1]
        mask ^= low
    return total


# --- leaf equations ----------------------------------------------------------------------


_STOPS = ("stop_gradient", "pure_callback", "io_callback")
_COMPARISONS = ("eq", "ne", "lt", "le", "gt", "ge")
ONE_TO_ONE = (
    *("optimization_barrier", "device_put", "gradtools_reverse_only"),
    *("psum", "psum2", "psum_invariant", "pmax", "pmin", "pvary", "pbroadcast"),
)


def _leaf_edges(eqn: Eqn, raw: bool) -> list[int] | None:
    """Returns a mask of inputs for each output of an equation without inner jaxprs.

    Returns None if all inputs flow to all outputs.
    """
    name, count, outs = eqn.primitive.name, len(eqn.invars), len(eqn.outvars)
    if not raw and name in _STOPS:
        return [0] * outs
    if not raw and name in ("gradtools_primal", "gradtools_value"):
        from gradtools.host_kernels import ArraySpec

        rule, avals, matrix = eqn.params["rule"], [v.aval for v in eqn.invars], None
        if name == "gradtools_primal" and callable(rule.reaches):
            matrix = rule.reaches(*[ArraySpec(a.shape, str(a.dtype)) for a in avals])
        if matrix is not None:
            return [*map(_mask, matrix)]
        if rule.nondifferentiable:
            return [_mask([i not in rule.nondifferentiable for i in range(count)])] * outs
    if name == "sort":
        keys = (1 << eqn.params["num_keys"]) - 1 if raw else 0
        return [1 << i | keys for i in range(count)]
    if name in ONE_TO_ONE and count == outs:
        return [1 << i for i in range(count)]
    return None


def _mask(row: Sequence[bool]) -> int:
    return sum(1 << i for i, connected in enumerate(row) if connected)


# --- the flow ----------------------------------------------------------------------------


class Flow:
    """Propagates bit masks of inputs through jaxprs and equations.

    Args:
        raw: Whether to ignore cuts and include control dependence: the operands of a condition flow
            to all results of the branches or of the loop.
    """

    def __init__(self, raw: bool):
        self.raw = raw
        self.uncut = self if raw else Flow(raw=True)
        self._known: dict[int, tuple[Jaxpr, list[int]]] = {}  # references keep ids unique

    def of_jaxpr(self, jaxpr: Jaxpr) -> list[int]:
        """Returns, for each output of a jaxpr, the mask of the inputs that flow to it."""
        if id(jaxpr) not in self._known:
            env = self.propagate(jaxpr, [1 << i for i in range(len(jaxpr.invars))])
            self._known[id(jaxpr)] = jaxpr, _read(env, jaxpr.outvars)
        return self._known[id(jaxpr)][1]

    def propagate(self, jaxpr: Jaxpr, bits: Sequence[int]) -> dict[Any, int]:
        """Returns the bits of all variables of a jaxpr, given the bits of the inputs."""
        env = dict(zip(jaxpr.invars, bits, strict=True))
        for eqn in jaxpr.eqns:
            inputs = _read(env, eqn.invars)
            if any(inputs):
                env.update(zip(targets(eqn), self.step(eqn, inputs), strict=True))
        return env

    def visited(self, jaxpr: Jaxpr, bits: Sequence[int]) -> Iterator[tuple[Eqn, list[int]]]:
        """Yields the equations at any depth, with the operands' bits in all steps of a loop."""
        env = self.propagate(jaxpr, bits)
        for eqn in jaxpr.eqns:
            inputs = _read(env, eqn.invars)
            yield eqn, inputs
            for body in bodies(eqn):
                entering = [inputs[i] for i in body.inputs]
                for k, i in body.carries:
                    entering[i] |= env.get(eqn.outvars[k], 0)
                yield from self.visited(body.jaxpr, entering)

    def step(self, eqn: Eqn, bits: Sequence[int]) -> list[int]:
        """Returns the bits of the variables that an equation writes, given the operands' bits."""
        inner, written = bodies(eqn), inexact(targets(eqn))
        if inner:
            return [_union(mask, bits) for mask in self._edges(eqn, inner)]
        edges = _leaf_edges(eqn, self.raw)
        if edges is not None and len(written) == len(eqn.outvars):
            outputs = [_union(mask, bits) for mask in edges]
            return [b if self.raw or i else 0 for i, b in zip(written, outputs, strict=True)]
        # Every input flows to every output, except that floats do not flow to integers or bools.
        total = reduce(or_, bits, 0)
        kept = eqn.primitive.name in _COMPARISONS and upstream.is_activation_rule(eqn)
        if self.raw or all(written) or kept:
            return [total] * len(written)
        floats = [b for var, b in zip(eqn.invars, bits, strict=True) if is_inexact(var)]
        return [total if i else total & ~reduce(or_, floats, 0) for i in written]

    def _edges(self, eqn: Eqn, bodies: list[InnerJaxpr]) -> list[int]:
        """Returns a mask of inputs for each output of an equation with inner jaxprs."""
        if eqn.primitive.name in RULED and not self.raw:  # the rule replaces the derivative
            masks = self.uncut._edges(eqn, bodies)
            return [m if is_inexact(var) else 0 for var, m in zip(eqn.outvars, masks, strict=True)]
        name, masks = eqn.primitive.name, [0] * len(eqn.outvars)
        if may_not_run(eqn):  # a loop without iterations returns the initial values of the carry
            for k, i in bodies[-1].carries:
                masks[k] = 1 << bodies[-1].inputs[i]
        for body in bodies:
            if not body.gate:
                inner = self.of_jaxpr(body.jaxpr)
                back = {i: inner[k] for k, i in body.carries}
                inputs = [1 << i for i in body.inputs]
                outputs = [_union(_closure(mask, back), inputs) for mask in inner]
                masks = [a | b for a, b in zip(masks, outputs, strict=True)]
        gates = 0  # the inputs that determine which branch runs, or the number of iterations
        if self.raw and name == "cond":
            gates = 1
        for gate in (body for body in bodies if self.raw and body.gate):
            carried = {i: masks[k] for k, i in gate.carries}
            inputs = [carried.get(i, 1 << at) for i, at in enumerate(gate.inputs)]
            flows = [_union(mask, inputs) for mask in self.of_jaxpr(gate.jaxpr)]
            gates = reduce(or_, flows, 0)
        return [mask | gates for mask in masks]


def draws(closed: Jaxpr) -> set[Any]:
    """Returns (primitive, shape) of each random draw whose key does not depend on the inputs."""
    jaxpr = open_jaxpr(closed)
    return {
        (eqn.primitive.name, eqn.params["shape"])
        for eqn, bits in Flow(raw=True).visited(jaxpr, [1] * len(jaxpr.invars))
        if eqn.primitive.name in DRAWS and not any(bits)
    }


def _read(env: dict[Any, int], atoms: Sequence[Any]) -> list[int]:
    return [0 if isinstance(atom, Literal) else env.get(atom, 0) for atom in atoms]


def _closure(mask: int, back: dict[int, int]) -> int:
    """Returns the transitive closure of a mask over the carries of a loop."""
    total = pending = mask
    while pending:
        low = pending & -pending
        new = back.get(low.bit_length() - 1, 0) & ~total
        total |= new
        pending = (pending ^ low) | new
    return total
