"""`formula` in JAX: f is traced, and its jaxpr translated into framework-neutral operations.

The jaxpr is walked equation by equation; calls are opened, loops and branches become bodies.
What does not depend on the program's arguments needs no translation, it is computed on the way
(index arithmetic, masks, random keys) and held as a constant::

    lt 2 0;  add 2 5;  select_n ...;  gather x [2]      ->    x[2]

A value is either the number of a node's result or `Known`. A random draw is a node of its own,
with the value that it had. Numbers of integers are also known at the program's leaves, so that an
index can be seen to be within bounds.

The tables stand in `translating/tables.py`, indexing in `translating/indexing.py`, what holds
programs inside in `translating/calls.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import jax
import numpy as np

from gradtools.jax import jaxprs
from gradtools.seeing.formulas.recorded import Recorded
from gradtools.seeing.graphs.program import LeafProgram
from gradtools.seeing.jax import recorded_run
from gradtools.seeing.jax.translating import calls
from gradtools.seeing.jax.translating.folding import folded, is_foldable
from gradtools.seeing.jax.translating.indexing import INDEXING
from gradtools.seeing.jax.translating.tables import TABLE, as_said
from gradtools.seeing.jax.translating.writing import Entry, Known, Writer

_LEAVES = {**TABLE, **INDEXING}


def formula_graph(program: LeafProgram) -> Recorded:
    """One run of a program, forward only, in the words of `seeing/formulas/operation_record.py`.

    Args:
        program: A call of f. Its leaves are the graph's inputs, and give the values at which
            indices and random draws are looked at.

    Returns:
        The graph, and the arrays that it captures.
    """
    traced = recorded_run.trace(program.run, program.leaves)
    names = recorded_run.captured_arrays(program.run)
    writer = _JaxprTranslator()
    leaves = zip(program.names, program.leaves, strict=True)
    entries = [writer.leaf(name, x) for name, x in leaves]
    consts = [writer.held(c, names.get(id(c), "")) for c in getattr(traced.closed, "consts", ())]
    outs = writer.run(jaxprs.open_jaxpr(traced.closed), [*consts, *entries])
    result = writer.graph(*[writer.number(out) for out in outs])
    return Recorded(
        result.nodes,
        result.values,
        result.inputs,
        result.outputs,
        result.captured,
        held=writer.arrays,
        narrow=writer.narrowest,
    )


class _JaxprTranslator(Writer):
    """Writes what a jaxpr says."""

    def inner(self, deeper: bool = False) -> _JaxprTranslator:
        """The reader of a program inside."""
        return _JaxprTranslator(self.depth + deeper, inside=True, narrow=self.narrow)

    def run(self, jaxpr: Any, entries: Sequence[Entry]) -> list[Entry]:
        """Writes a jaxpr's equations; the entries of its outputs, of its constants and inputs."""
        silent = calls.without_derivative(jaxpr)

        def step(i: int, eqn: Any, entries: list[Entry]) -> list[Entry]:
            stops = eqn.primitive.name == "stop_gradient" and eqn.outvars[0] in silent
            return entries if stops else self.step(eqn, entries)

        read = jaxpr.replace(eqns=jaxprs.needed(jaxpr, effects=False))
        return jaxprs.interpreted(read, entries, step, _constant)

    def step(self, eqn: Any, entries: Sequence[Entry]) -> list[Entry]:
        """One equation."""
        if eqn.primitive.name in _OF_KEYS:
            entries = [self._at_leaves(e) for e in entries]
        found = calls.opened(self, eqn, entries)
        if found is not None:
            return found
        if is_foldable(eqn) and all(isinstance(e, Known) for e in entries):
            return _folded(eqn, entries)
        first = len(self._nodes)
        result = self._translated(eqn, [self.number(e) for e in entries])
        self.tell(eqn, first, result)
        return list(result)

    def _at_leaves(self, entry: Entry) -> Entry:
        """What a random key is made of, as it is at the leaves."""
        if isinstance(entry, Known):
            return entry
        value = self.concrete(entry)
        if value is None:
            return entry
        return Known(value.astype(self._values[entry].dtype))

    def _translated(self, eqn: Any, xs: list[int]) -> list[int]:
        translation = _LEAVES.get(eqn.primitive.name)
        if translation is None:
            result = as_said(self, eqn, xs)
        else:
            result = translation(self, eqn.params, *xs)
        if result is None:
            return self.marked(eqn, calls.native_name(eqn), xs)
        return list(result) if isinstance(result, (list, tuple)) else [result]


def trying(program: LeafProgram, wide: bool) -> AbstractContextManager[Any]:
    """Inside, f may run: JAX keeps nothing of it. wide: arrays of 64 bits may be made."""
    return jax.enable_x64(True) if wide else nullcontext()


_OF_KEYS = ("random_wrap", "random_seed", "random_fold_in", "random_bits", "threefry2x32")


def _constant(literal: Any) -> Entry:
    return Known(np.asarray(literal.val))


def _folded(eqn: Any, entries: Sequence[Any]) -> list[Entry]:
    drawn = next((e.drawn for e in entries if e.drawn), "")
    drawn = drawn or ("ε" if eqn.primitive.name == "random_bits" else "")
    return [Known(value, drawn) for value in folded(eqn, [e.value for e in entries])]


__all__ = ["formula_graph", "trying"]
