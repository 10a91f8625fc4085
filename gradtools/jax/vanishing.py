"""Where a gradient becomes zero at these values, though its path is whole.

The gradient is taken through the jaxpr, once for all leaves of a program. For a leaf whose
gradient is zero the jaxpr is run again with a zero added to every operand on the leaf's paths: the
gradient with respect to these zeros is what each operation hands on to each operand::

    y = f(x + 0_1, w + 0_2)        d/d0_1 = J_x^T y'

An operation whose result has a cotangent, and which hands on nothing, is where the gradient
vanishes. Calls, branches and short loops are written out, so that it is an operation inside of
them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any
from weakref import WeakKeyDictionary

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Literal

from gradtools.errors import GradtoolsError
from gradtools.jax import tracing
from gradtools.jax.graphs import graph_of
from gradtools.jax.seeing import Traced, trace
from gradtools.jax.trees import is_inexact
from gradtools.seeing.flow import links_of
from gradtools.seeing.graph import Dependence, Graph, Links, Node
from gradtools.seeing.recording import Run, Vanished

_NO_JVP = "callbacks do not support JVP"
_UNROLLED = 2000  # so many equations a loop may be when it is written out


def vanishing(run: Run, leaves: Sequence[Any], index: int) -> list[Vanished] | None:
    """Where the cotangent of a connected leaf becomes zero; None if its gradient is not zero."""
    traced = trace(run, leaves)
    if traced not in _gradients:
        _gradients[traced] = _nonzero(traced.closed, leaves)
    if _gradients[traced][index] or not leaves[index].size:
        return None
    if traced not in _walks:
        _walks[traced] = _walked(traced.closed, leaves, _gradients[traced])
    steps, alive = _walks[traced]
    return [found for step in steps if (found := _at(step, alive, 1 << index))]


_gradients: WeakKeyDictionary[Traced, list[bool]] = WeakKeyDictionary()
_walks: WeakKeyDictionary[Traced, tuple[list[_Step], list[bool]]] = WeakKeyDictionary()


def _nonzero(closed: Any, leaves: Sequence[Any]) -> list[bool]:
    """For each leaf, whether its gradient is anything else than zeros."""
    moving = [i for i, x in enumerate(leaves) if is_inexact(x)]
    found = [False] * len(leaves)
    try:
        gradients = _gradient(closed, leaves, moving)
    except GradtoolsError as error:
        if _NO_JVP not in str(error):
            raise
        for i in moving:
            found[i] = _is_nonzero_alone(closed, leaves, i)
        return found
    for i, g in zip(moving, gradients, strict=True):
        found[i] = _any(g)
    return found


def _gradient(closed: Any, leaves: Sequence[Any], moving: Sequence[int]) -> Sequence[Any]:
    def fun(*xs: Any) -> list[Any]:
        full = list(leaves)
        for i, x in zip(moving, xs, strict=True):
            full[i] = x
        outs = jax.core.eval_jaxpr(closed.jaxpr, closed.consts, *full)
        return [y for y in outs if is_inexact(y)]

    return _pulled(fun, [leaves[i] for i in moving])


def _is_nonzero_alone(closed: Any, leaves: Sequence[Any], index: int) -> bool:
    """The same of one leaf; of one that leaves JAX that is told already, and no number."""
    try:
        return _any(_gradient(closed, leaves, [index])[0])
    except GradtoolsError as error:
        if _NO_JVP not in str(error):
            raise
        return True


def _pulled(fun: Callable[..., list[Any]], xs: Sequence[Any]) -> Sequence[Any]:
    """The cotangents of xs for those that the outputs are given."""
    try:
        outs, pullback = jax.vjp(fun, *xs)
        return list(pullback(_seeds(outs)))
    except GradtoolsError:
        raise
    except Exception as error:
        raise GradtoolsError(
            f"why_zero: the gradient of f raised {type(error).__name__}: {error}"
        ) from error


def _seeds(outs: Sequence[Any]) -> list[Any]:
    """One for a single number, random otherwise."""
    rng = np.random.default_rng(0)
    if len(outs) == 1 and outs[0].size == 1:
        return [jnp.ones_like(outs[0])]
    return [jnp.asarray(rng.uniform(0.5, 1.5, y.shape), y.dtype) for y in outs]


def _any(x: Any) -> bool:
    return bool(jnp.any(x != 0))


# --- which operation ---------------------------------------------------------------------


def _walked(
    closed: Any, leaves: Sequence[Any], gradients: Sequence[bool]
) -> tuple[list[_Step], list[bool]]:
    """The operations on the paths of all leaves without a gradient, and which probes have one."""
    graph = graph_of(closed)
    lost = [is_inexact(x) and not found for x, found in zip(leaves, gradients, strict=True)]
    marked = [_Marked(x, (1 << i) * lost[i]) for i, x in enumerate(leaves)]
    plan = _Walk()
    plan.run(closed, graph, marked)

    def fun(*probes: Any) -> list[Any]:
        outs = _Walk(list(probes), plan.branches).run(closed, graph, marked)
        return [y for y in outs if is_inexact(y)]

    cts = _pulled(fun, [jnp.zeros(x.shape, x.dtype) for x in plan.probed])
    for step in plan.steps:
        step.given.update({k: cts[probe] for k, (probe, _) in step.results.items()})
    alive = jnp.stack([jnp.any(ct != 0) for ct in cts]) if cts else jnp.zeros(0)
    return plan.steps, [bool(x) for x in np.asarray(alive)]


def _at(step: _Step, alive: Sequence[bool], leaf: int) -> Vanished | None:
    """An operation that is handed a cotangent and hands none to an operand on the leaf's path."""
    given = {
        k: step.given[k] for k, (probe, on) in step.results.items() if on & leaf and alive[probe]
    }
    stopped = [i for i, (probe, on) in step.operands.items() if on & leaf and not alive[probe]]
    if not given or not stopped:
        return None
    if step.node.mark == "custom rule" and _is_always_zero(step, stopped, given):
        return Vanished(replace(step.node, loss="rule"))
    sized = [ct / jnp.max(jnp.abs(ct)) for ct in given.values()]
    return Vanished(step.node, any(map(_any, _pull(step, step.arrays, stopped, given, sized))))


def _pull(
    step: _Step, arrays: Sequence[Any], stopped: Sequence[int], given: Iterable[int], cts: Any
) -> Sequence[Any]:
    """What an operation at these operands hands on to those that got nothing."""

    def fun(*moving: Any) -> list[Any]:
        full = list(arrays)
        for i, x in zip(stopped, moving, strict=True):
            full[i] = x
        outs = _bind(step.eqn, full)
        return [outs[k] for k in given]

    return jax.vjp(fun, *[arrays[i] for i in stopped])[1](cts)


def _is_always_zero(step: _Step, stopped: Sequence[int], given: dict[int, Any]) -> bool:
    """Whether a rule hands on nothing elsewhere, too."""
    rng = np.random.default_rng(0)
    ones = [jnp.ones_like(ct) for ct in given.values()]
    for _ in range(3):
        arrays = [
            jnp.asarray(rng.normal(size=x.shape), x.dtype) if is_inexact(x) else x
            for x in step.arrays
        ]
        try:
            found = _pull(step, arrays, stopped, given, ones)
        except Exception:  # a point outside of its domain tells nothing
            return False
        if any(map(_any, found)):
            return False
    return True


@dataclass(frozen=True)
class _Marked:
    """An array, and the leaves, one bit each, in which it is differentiable."""

    array: Any
    leaves: int = 0

    @property
    def moves(self) -> bool:
        return bool(self.leaves) and is_inexact(self.array)


@dataclass(frozen=True)
class _Step:
    """One operation as it ran.

    Attributes:
        node: Its node.
        eqn: Its equation.
        arrays: Its operands.
        operands: By position the number of a probe, and the leaves on whose path it lies.
        results: The same of its results.
        given: The cotangents of its results.
    """

    node: Node
    eqn: Any
    arrays: tuple[Any, ...]
    operands: dict[int, tuple[int, int]]
    results: dict[int, tuple[int, int]]
    given: dict[int, Any] = field(default_factory=dict)


@dataclass
class _Walk:
    """Runs a jaxpr beside its graph, adding probes to what depends on one of the leaves.

    The first walk has none: it counts them, and remembers the operands and the branches taken.
    """

    probes: list[Any] | None = None
    branches: list[int] = field(default_factory=list)
    probed: list[Any] = field(default_factory=list)
    steps: list[_Step] = field(default_factory=list)
    _branch: int = 0

    def run(self, closed: Any, graph: Graph, args: Sequence[_Marked]) -> list[Any]:
        consts = map(_Marked, closed.consts)
        return [y.array for y in self.jaxpr(closed.jaxpr, graph, [*consts, *args])]

    def jaxpr(self, jaxpr: Any, graph: Graph, args: Sequence[_Marked]) -> list[_Marked]:
        env: dict[Any, _Marked] = dict(zip([*jaxpr.constvars, *jaxpr.invars], args, strict=True))
        for eqn, node in zip(jaxpr.eqns, graph.nodes, strict=True):
            operands = [_read(env, atom) for atom in eqn.invars]
            outs = None
            if any(x.moves for x in operands):
                outs = self.written_out(eqn, node, operands)
            if outs is None:
                outs = self.operation(eqn, node, operands, links_of(graph, node))
            env.update(zip(eqn.outvars, outs, strict=True))
        return [_read(env, atom) for atom in jaxpr.outvars]

    def operation(
        self, eqn: Any, node: Node, operands: Sequence[_Marked], links: Links
    ) -> list[_Marked]:
        operands_at, arrays = self.with_probes(operands)
        outs = [
            _Marked(y, _leaves(row, operands))
            for y, row in zip(_bind(eqn, arrays), links, strict=False)
        ]
        results_at, probed = self.with_probes(outs)
        if self.probes is None and operands_at and results_at:
            kept = tuple(x.array for x in operands)
            self.steps.append(_Step(node, eqn, kept, operands_at, results_at))
        return [_Marked(y, out.leaves) for y, out in zip(probed, outs, strict=True)]

    def with_probes(self, xs: Sequence[_Marked]) -> tuple[dict[int, tuple[int, int]], list[Any]]:
        places = {}
        arrays = []
        for i, x in enumerate(xs):
            if x.moves:
                places[i] = len(self.probed), x.leaves
            arrays.append(self.with_probe(x))
        return places, arrays

    def with_probe(self, x: _Marked) -> Any:
        if not x.moves:
            return x.array
        self.probed.append(x.array if self.probes is None else None)
        return x.array if self.probes is None else x.array + self.probes[len(self.probed) - 1]

    # --- what is written out

    def written_out(
        self, eqn: Any, node: Node, operands: Sequence[_Marked]
    ) -> list[_Marked] | None:
        name, inner = eqn.primitive.name, tracing.bodies(eqn)
        if name == "cond":
            return self.branch(node, inner, operands)
        if name == "scan":
            return self.loop(eqn, node, inner[0], operands)
        if name in _CALLS and inner:
            return self.body(node, 0, inner[0], operands)
        return None

    def body(self, node: Node, k: int, inner: Any, operands: Sequence[_Marked]) -> list[_Marked]:
        args = [operands[i] for i in inner.inputs]
        return self.jaxpr(inner.jaxpr, node.bodies[k].graph, args)

    def branch(self, node: Node, inner: Any, operands: Sequence[_Marked]) -> list[_Marked]:
        if self.probes is None:
            self.branches.append(min(max(int(operands[0].array), 0), len(inner) - 1))
        self._branch += 1
        k = self.branches[self._branch - 1]
        return self.body(node, k, inner[k], operands)

    def loop(
        self, eqn: Any, node: Node, inner: Any, operands: Sequence[_Marked]
    ) -> list[_Marked] | None:
        length = eqn.params["length"]
        if not length or length * len(inner.jaxpr.eqns) > _UNROLLED:
            return None
        consts, carried = tracing.scan_counts(eqn)
        first, carry = operands[:consts], list(operands[consts : consts + carried])
        rounds = []
        order = range(length)[::-1] if eqn.params["reverse"] else range(length)
        for i in order:
            rows = [_Marked(x.array[i], x.leaves) for x in operands[consts + carried :]]
            outs = self.body(node, 0, inner, [*first, *carry, *rows])
            carry = outs[:carried]
            rounds.append(outs[carried:])
        columns = zip(*(rounds[::-1] if eqn.params["reverse"] else rounds), strict=True)
        return [*carry, *map(_stacked, columns)]


_CALLS = ("jit", "pjit", "closed_call", "core_call", "remat", "remat2", "checkpoint")


def _stacked(rows: Sequence[_Marked]) -> _Marked:
    leaves = 0
    for x in rows:
        leaves |= x.leaves
    return _Marked(jnp.stack([x.array for x in rows]), leaves)


def _leaves(links: Sequence[Dependence], operands: Sequence[_Marked]) -> int:
    found = 0
    for link, x in zip(links, operands, strict=True):
        if link == Dependence.DIFFERENTIABLE:
            found |= x.leaves
    return found


def _read(env: dict[Any, _Marked], atom: Any) -> _Marked:
    return _Marked(atom.val) if isinstance(atom, Literal) else env[atom]


def _bind(eqn: Any, arrays: Sequence[Any]) -> list[Any]:
    with eqn.ctx.manager:
        outs = eqn.primitive.bind(*arrays, **eqn.primitive.get_bind_params(eqn.params))
    return list(outs) if eqn.primitive.multiple_results else [outs]


__all__ = ["vanishing"]
