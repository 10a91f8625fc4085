"""The backward pass of a jaxpr at given values, for `seeing/diagnostics/bad_gradients.py`.

The jaxpr runs once on a tape (`tape.py`) for all leaves of a program, then one cotangent is pulled
back step by step::

    ct of an operand += pull of a step (ct of its results)

Zeros are propagated, because zero times an infinite slope is NaN, unless JAX itself has symbolic
zeros there.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property, partial
from typing import Any
from weakref import WeakKeyDictionary

import jax
import jax.numpy as jnp
import numpy as np

from gradtools.errors import GradtoolsError, is_of
from gradtools.jax import jaxprs
from gradtools.jax.trees import is_inexact
from gradtools.rules import replaced_at
from gradtools.seeing.diagnostics import bad_gradients
from gradtools.seeing.diagnostics.bad_gradients import Differentiated, PassedCotangents
from gradtools.seeing.graphs.derivative_flow import any_of
from gradtools.seeing.graphs.nodes import Node
from gradtools.seeing.graphs.recording import Run, Vanished
from gradtools.seeing.jax.recorded_run import Traced, trace
from gradtools.seeing.jax.tape import Moving, Tape, TapeStep


def vanishing(
    run: Run, leaves: Sequence[Any], index: int, held: Sequence[Any] = ()
) -> list[Vanished] | None:
    """Where the cotangent of a leaf becomes zero or NaN; None if neither."""
    traced = trace(run, leaves)
    if traced not in _known:
        try:
            _known[traced] = _examined(traced, leaves)
        except GradtoolsError:
            raise
        except Exception as error:
            raise GradtoolsError(
                f"why_zero: the gradient of f raised {type(error).__name__}: {error}"
            ) from error
    return _known[traced].get(index)


_known: WeakKeyDictionary[Traced, dict[int, list[Vanished] | None]] = WeakKeyDictionary()


def _examined(traced: Traced, leaves: Sequence[Any]) -> dict[int, list[Vanished] | None]:
    """`vanishing` for all leaves."""
    closed, graph, tape = traced.closed, traced.graph, Tape()
    args = [tape.moving(x, 1 << i) for i, x in enumerate(leaves)]
    outs = tape.run(closed, graph, args)
    back = _Backward(tape, args, outs)
    grads = back.gradients([*back.leaves])
    if any(map(_is_nan, grads.values())) and not _is_nan_at_once(closed, leaves):
        back = _Backward(tape, args, outs, zeros=False)
    places = bad_gradients.examined(back)
    if any(map(_is_nan, back.outs)):
        origins = bad_gradients.ValueOrigins()
        ends = Tape(origins=origins).run(closed, graph, args)
        nodes = origins.of(id(y.array) for y in ends)
        places = {k: bad_gradients.at_origins(of, nodes) for k, of in places.items()}
    return places


def _is_nan_at_once(closed: Any, leaves: Sequence[Any]) -> bool:
    """Whether a gradient by `jax.vjp` of the whole program is NaN; True if it raises."""
    inexact = [i for i, x in enumerate(leaves) if is_inexact(x)]

    def fun(*xs: Any) -> list[Any]:
        full = replaced_at(leaves, inexact, xs)
        outs = jax.core.eval_jaxpr(closed.jaxpr, closed.consts, *full)
        return [y for y in outs if is_inexact(y)]

    try:
        outs, pullback = jax.vjp(fun, *[leaves[i] for i in inexact])
        return any(map(_is_nan, pullback(_seeds(outs))))
    except Exception:  # some step leaves JAX, which has its own finding
        return True


class _Backward(Differentiated):
    """A program on a tape, with its backward pass.

    Args:
        tape: The tape.
        args: The leaves.
        outs: The results, whose cotangents are random.
        zeros: Whether zeros are propagated.
    """

    def __init__(
        self, tape: Tape, args: Sequence[Moving], outs: Sequence[Moving], zeros: bool = True
    ) -> None:
        self._steps, self._args, self._zeros = tape.steps, args, zeros
        self._ends = [y for y in outs if is_inexact(y.array)]
        self.outs = [y.array for y in self._ends]
        # what no output depends on differentiably has its own findings
        reaching = any_of(y.leaves for y in outs)
        self.leaves = {k: x.array for k, x in enumerate(args) if x.leaves & reaching}

    def gradients(self, leaves: Sequence[int]) -> dict[int, Any]:
        cts = self._run[0]
        return {k: cts.get(self.key_of(k), jnp.zeros_like(self.leaves[k])) for k in leaves}

    def backward(self, leaves: Sequence[int]) -> Sequence[PassedCotangents]:
        return self._run[1]

    def key_of(self, leaf: int) -> int:
        return self._args[leaf].number

    def size(self, x: Any) -> float:
        return _size(x)

    @cached_property
    def _run(self) -> tuple[dict[int, Any], list[PassedCotangents]]:
        """The cotangents of the leaves by number, and the operations."""
        cts: dict[int, Any] = {}
        passes = []

        def add(x: Moving, ct: Any) -> None:
            if ct is not None and x.leaves and (self._zeros or _any(ct)):
                cts[x.number] = ct if x.number not in cts else cts[x.number] + ct

        for y, seed in zip(self._ends, _seeds(self.outs), strict=True):
            add(y, seed)
        for at in reversed(range(len(self._steps))):
            step = self._steps[at]
            taken = [cts.pop(y.number, None) for y in step.results.values()]
            given = {
                k: ct
                for k, ct in zip(step.results, taken, strict=True)
                if ct is not None and (self._zeros or _any(ct))
            }
            if not given:
                continue
            passed = self._pulled(step, given)
            tiny = [4 * float(jnp.finfo(ct.dtype).tiny) for ct in given.values()]
            for x, ct in zip(step.operands.values(), passed, strict=True):
                add(x, ct)
            explained = None if step.packs else partial(_explained, step, given)
            results = [y.number for y in step.results.values()]
            operands = [x.number for x in step.operands.values()]
            of_results = [given.get(k) for k in step.results]
            ends = results, operands, of_results, passed
            passes.append(PassedCotangents(at, *ends, explained, partial(max, tiny)))
        return cts, passes[::-1]

    def _pulled(self, step: TapeStep, given: dict[int, Any]) -> list[Any]:
        """The operands' cotangents; None if the step leaves JAX, which has its own finding."""
        try:
            return step.pulled(given, list(step.operands))
        except Exception as error:
            closed = jax.make_jaxpr(step.apply)(step.arrays)
            is_callback = lambda eqn: eqn.primitive.name.endswith("_callback")
            if not (is_of("jax", error) and any(map(is_callback, jaxprs.equations(closed)))):
                raise
        unknown = any_of(x.leaves for x in step.operands.values())
        self.leaves = {k: x for k, x in self.leaves.items() if not unknown >> k & 1}
        return [None] * len(step.operands)


def _explained(step: TapeStep, given: Mapping[int, Any], path: Sequence[int]) -> tuple[Node, float]:
    """The node and the size of the cotangents that it passes, without underflow."""
    stopped = [[*step.operands][k] for k in path]
    sizes = {k: _size(ct) for k, ct in given.items() if _any(ct)}
    if not (stopped and sizes):
        return step.node, 0.0
    if step.node.mark == "custom rule" and _is_always_zero(step, given, stopped):
        return replace(step.node, loss="rule"), 0.0
    sized = {k: given[k] / size for k, size in sizes.items()}
    return step.node, max(map(_size, step.pulled(sized, stopped))) * max(sizes.values())


def _is_always_zero(step: TapeStep, given: Mapping[int, Any], stopped: list[int]) -> bool:
    """Whether a rule passes zeros at other points, too."""
    rng = np.random.default_rng(0)
    ones = {k: jnp.ones_like(ct) for k, ct in given.items()}
    for _ in range(3):
        arrays = [
            jnp.asarray(rng.normal(size=x.shape), x.dtype) if is_inexact(x) else x
            for x in step.arrays
        ]
        try:
            pulled = step.pulled(ones, stopped, arrays)
        except Exception:  # outside of its domain nothing can be concluded
            return False
        if any(map(_any, pulled)):
            return False
    return True


# --- arrays ------------------------------------------------------------------------------


def _size(x: Any) -> float:
    """The greatest modulus of an array's entries; NaN if one is NaN."""
    return float(jnp.max(jnp.abs(x))) if x is not None and x.size else 0.0


def _is_nan(x: Any) -> bool:
    return not math.isfinite(_size(x))


def _any(x: Any) -> bool:
    """Whether an array has a nonzero entry; on the CPU without compiling anything."""
    if x.is_fully_addressable and all(d.platform == "cpu" for d in x.devices()):
        return bool(np.any(np.asarray(x) != 0))
    return bool(_is_any_nonzero(x))


_is_any_nonzero = jax.jit(lambda x: jnp.any(x != 0))


def _seeds(outs: Sequence[Any]) -> list[Any]:
    """The outputs' cotangents: 1 for a single scalar, random otherwise."""
    rng = np.random.default_rng(0)
    if len(outs) == 1 and outs[0].size == 1:
        return [jnp.ones_like(outs[0])]
    return [jnp.asarray(rng.uniform(0.5, 1.5, y.shape), y.dtype) for y in outs]
