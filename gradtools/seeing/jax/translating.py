"""Implements `formula` for JAX: translates the jaxpr of f to expressions, and differentiates f.

The jaxpr of f is translated equation by equation. Values that do not depend on the arguments are
computed immediately. An equation is translated with its neutral name and attributes (`operands.py`)
if the vocabulary contains this name; otherwise the equation becomes an opaque operation. Loops,
branches, functions with custom rules, and JAX functions with an opaque part also become opaque
operations, because a name such as `solve` is more readable than LU factors. Random draws are
constants.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from gradtools.backend import Backend
from gradtools.jax import jaxprs
from gradtools.jax._upstream import Literal
from gradtools.jax.jaxprs import function_name, is_chunk
from gradtools.rules import replaced_at
from gradtools.seeing.formulas.algebra import reshape
from gradtools.seeing.formulas.expressions import Expr, evaluate, kind_of, order, placeholder
from gradtools.seeing.formulas.opaque import OpaqueFunction, by_name
from gradtools.seeing.formulas.operations import picked, sliced, take_along
from gradtools.seeing.formulas.reverse_mode import Recorded
from gradtools.seeing.formulas.words import constant, fitted, has_opaque_part, translated
from gradtools.seeing.graphs.program import LeafProgram
from gradtools.seeing.jax import operands, recorded_run, source_lines


def formula_graph(program: LeafProgram) -> Recorded:
    """Translates the program to expressions; evaluates indices and random draws at its leaves."""
    traced = recorded_run.trace(program.run, program.leaves)
    names = recorded_run.captured_arrays(program.run)
    translator = _Translator(program.backend)
    leaves = zip(program.names, program.leaves, strict=True)
    entries = [translator.leaf(name, x) for name, x in leaves]
    consts = getattr(traced.closed, "consts", ())
    held = [translator.captured(c, names.get(id(c), "")) for c in consts]
    outs = translator.run(jaxprs.open_jaxpr(traced.closed), [*held, *entries])
    outputs = tuple(map(translator.expr, outs))
    read = set(order(outputs))
    contents = {p: np.asarray(x) for p, x in translator.held.items() if p in read}
    dtypes = frozenset(translator.dtypes)
    return Recorded(tuple(translator.inputs), outputs, contents, dtypes=dtypes)


def differentiated(
    program: LeafProgram, recorded: Recorded, active: Sequence[int], point: Sequence[list[Any]]
) -> list[list[Any]]:
    """Returns outputs, gradients and, if `point` has directions, second derivatives of the program.

    active: The positions of the differentiated inputs.
    point: The inputs, the cotangents and, at order 2, the directions.
    """
    inputs, cotangents, directions = point
    inexact = [k for k, y in enumerate(recorded.outputs) if y.is_inexact]
    run = lambda *leaves: [*map(jnp.asarray, program.run(list(leaves)))]
    moving = tuple(p.is_inexact for p in recorded.inputs)
    f = OpaqueFunction(program.backend, run, [None] * len(inputs), moving)
    once = f.vjp(inexact, active)
    outputs, gradients = f.value(*inputs), once.value(*inputs, *cotangents)
    if not directions:
        return [outputs, gradients, []]
    both = [*active, *range(len(inputs), len(inputs) + len(cotangents))]
    twice = once.vjp(range(len(active)), both)
    return [outputs, gradients, twice.value(*inputs, *cotangents, *directions)]


# An expression, or a NumPy array or random key that does not depend on the arguments.
Entry = Any


class _Translator:
    """Translates the equations of a jaxpr to expressions."""

    def __init__(self, backend: Backend) -> None:
        self.backend = backend
        self.inputs: list[Expr] = []
        self.held: dict[Expr, Any] = {}  # captured arrays
        self.dtypes: set[str] = set()  # dtypes of floating and complex results
        self._leaves: dict[Expr, Any] = {}  # leaves of the arguments

    def leaf(self, name: str, x: Any) -> Entry:
        """Returns a placeholder for a leaf of the arguments; returns random keys unchanged."""
        if _is_key(x):
            self.inputs.append(placeholder(name, jax.random.key_data(x).shape, "integer"))
            return x
        self.inputs.append(placeholder(name, x.shape, kind_of(x.dtype)))
        self._leaves[self.inputs[-1]] = x
        return self.inputs[-1]

    def captured(self, x: Any, name: str = "") -> Entry:
        """Returns a placeholder for an inexact or named array; returns other arrays unchanged."""
        if _is_key(x) or x.dtype == np.uint32:
            return x
        if not (name or jnp.issubdtype(x.dtype, jnp.inexact)):
            return np.asarray(x)
        known = (p for p, held in self.held.items() if held is x)
        p = next(known, None) or placeholder(name, x.shape, kind_of(x.dtype))
        self.held[p] = x
        return p

    def expr(self, entry: Entry) -> Expr:
        """Converts an entry to an expression."""
        if isinstance(entry, Expr):
            return entry
        value = np.asarray(entry)
        floating = jnp.issubdtype(value.dtype, jnp.floating)
        return constant(value.astype(np.float64) if floating else value)

    def value_of(self, x: Expr) -> np.ndarray:
        """Evaluates an expression at the leaves of the arguments."""
        known = self._leaves | self.held
        return evaluate([x], {p: known[p] for p in order([x]) if p.op == "placeholder"})[0]

    # Equations.

    def run(self, jaxpr: Any, entries: Sequence[Entry]) -> list[Entry]:
        """Translates a jaxpr; `entries` are the constants and inputs. Returns the outputs."""
        step = lambda i, eqn, entries: self._step(eqn, entries)
        return jaxprs.interpreted(jaxpr, entries, step, lambda lit: np.asarray(lit.val))

    def _step(self, eqn: Any, entries: Sequence[Entry]) -> list[Entry]:
        """Translates one equation."""
        name = eqn.primitive.name
        if name in _OF_KEYS:  # evaluate random keys at the leaves
            key_of = lambda e: self.value_of(e).astype(np.uint32) if isinstance(e, Expr) else e
            entries = [*map(key_of, entries)]
        if name in (*jaxprs.CALLS, *jaxprs.RULED):
            return self._call(eqn, entries)
        known = [e for e in entries if not isinstance(e, Expr)]
        if len(known) == len(entries) and not eqn.effects and name not in _LEAVING:
            with jax.ensure_compile_time_eval():  # constant folding, also inside of a trace
                return [x if _is_key(x) else np.asarray(x) for x in _bound(eqn, known)]
        if name in _RULES:
            return self._named(eqn, entries, eqn.params["rule"].name)
        if not any(map(_is_key, known)):
            results = self._read(eqn, entries)
            if results is not None and None not in results:
                return self._fitted(eqn, results)
        # A host function is written with the name of its kernel.
        kernel = getattr(eqn.params.get("call"), "kernel", None)
        shown = getattr(kernel, "name", None) or operands.name_of(eqn)
        return self._named(eqn, entries, shown)

    def _read(self, eqn: Any, entries: Sequence[Entry]) -> Sequence[Expr | None] | None:
        """Translates an equation; returns None if the vocabulary does not contain the operation."""
        places, exponents = operands.operands_of(eqn)
        xs = [*map(self.expr, entries)]
        if eqn.primitive.name == "gather":
            result = self._gathered(eqn, *xs)
            return None if result is None else [result]
        xs = [*(xs[i] for i in places), *(constant(float(n)) for n in exponents)]
        likes, attributes = [*map(_like, eqn.outvars)], operands.attributes_of(eqn)
        return translated(operands.name_of(eqn), xs, attributes, likes, self.value_of)

    def _gathered(self, eqn: Any, x: Expr, indices: Expr) -> Expr | None:
        """Translates x[i], take_along_axis and x[arange(n), i]; returns None for other gathers."""
        d, known = eqn.params["dimension_numbers"], self.value_of(indices)
        axes, batched = tuple(d.start_index_map), tuple(d.operand_batching_dims)
        sizes = np.array(eqn.params["slice_sizes"])
        limits = np.array(x.shape)[[*axes]] - sizes[[*axes]]
        if not indices.rank or not np.all((known >= 0) & (known <= limits)):
            return None
        if indices.is_constant and indices.rank == 1:
            start = np.zeros(x.rank, int)
            start[[*axes]] = known
            return reshape(sliced(x, start=start, limit=start + sizes), eqn.outvars[0].aval.shape)
        if d.offset_dims:
            return None
        if len(axes) == 1 and batched == tuple(d.start_indices_batching_dims):
            i, rank = reshape(indices, indices.shape[:-1]), len(batched) + 1
            return take_along(x, i, axis=axes[0]) if rank == x.rank == i.rank else None
        if batched or axes != (0, 1) or indices.op != "output" or known.shape != (x.shape[0], 2):
            return None
        rows = indices.args[0].args  # operands of concatenate, without the iota
        counts = known[:, 0].tolist() == [*range(x.shape[0])] and len(rows) == 1
        if not counts or self.value_of(rows[0]).ravel().tolist() != known[:, 1].tolist():
            return None
        return picked(x, reshape(rows[0], (x.shape[0],)))

    def _fitted(self, eqn: Any, results: Sequence[Any]) -> list[Entry]:
        dtypes = [var.aval.dtype for var in eqn.outvars]
        self.dtypes.update(str(t) for t in dtypes if jnp.issubdtype(t, jnp.inexact))
        return [fitted(x, _like(var)) for x, var in zip(results, eqn.outvars, strict=True)]

    def _named(self, eqn: Any, entries: Sequence[Entry], name: str) -> list[Entry]:
        """Translates an equation to an opaque operation, whose kernel contains known integers."""

        def is_shown(e: Entry) -> bool:
            is_number = not (isinstance(e, Expr) or np.ndim(e) or _is_key(e))
            return is_number or isinstance(e, Expr) or bool(jnp.issubdtype(e.dtype, jnp.inexact))

        shown = [k for k, e in enumerate(entries) if is_shown(e)]
        avals = [eqn.invars[k].aval for k in shown]
        run = lambda *xs: _bound(eqn, replaced_at(entries, shown, xs))
        inexact = tuple(map(self.backend.is_inexact, avals))
        kernel = OpaqueFunction(self.backend, run, avals, inexact)
        args = [self.expr(entries[k]) for k in shown]
        return self._fitted(eqn, by_name(name, args, map(_like, eqn.outvars), kernel))

    def _opened(self, program: Any, entries: Sequence[Entry]) -> list[Entry]:
        """Translates an inner jaxpr at the given operands (inlining)."""
        return self.run(program.jaxpr, [*map(self.captured, program.consts), *entries])

    def _call(self, eqn: Any, entries: Sequence[Entry]) -> list[Entry]:
        """Inlines a call, or translates it to an opaque operation or to one_hot or logaddexp."""
        (program,) = jaxprs.programs_of(eqn)
        jaxpr = program.jaxpr
        own = bool(source_lines.is_own(jaxpr)) and not source_lines.is_gradtools(jaxpr)
        name = str(eqn.params.get("name") or function_name(jaxpr))
        name = name.lstrip("_").rpartition(".")[2] or eqn.primitive.name
        given = [e for e in entries if isinstance(e, Expr)]
        own = own and bool(given)
        if own and name in ("one_hot", "logaddexp"):
            attributes = {"size": eqn.outvars[0].aval.shape[-1]} if name == "one_hot" else {}
            xs, likes = [*map(self.expr, entries)], [*map(_like, eqn.outvars)]
            results = translated(name, xs, attributes, likes, self.value_of)
            if results is not None:
                return self._fitted(eqn, results)
        plain = own and eqn.primitive.name == "custom_jvp_call"
        if jaxprs.is_ruled(eqn) and not plain and not is_chunk(jaxpr):
            return self._named(eqn, entries, name)
        results = self._opened(program, entries)
        made = [e for e in results if isinstance(e, Expr)]
        if own and len(jaxpr.eqns) > 1 and has_opaque_part(made, given):
            return self._named(eqn, entries, name)
        return results


_RULES = tuple(
    f"gradtools_{name}" for name in ("primal", "evaluation", "value", "tangent", "cotangent")
)
_LEAVING = ("pure_callback", "io_callback", "debug_callback", "gradtools_kernel")
_OF_KEYS = ("random_wrap", "random_seed", "random_fold_in", "random_bits", "threefry2x32")


def _bound(eqn: Any, values: Sequence[Any]) -> list[Any]:
    """Evaluates an equation at the given operands; literals have their own dtype."""
    pairs = zip(eqn.invars, values, strict=True)
    return jaxprs.bound(eqn, [a.val if isinstance(a, Literal) else x for a, x in pairs])


def _like(var: Any) -> tuple[tuple[int, ...], str]:
    return tuple(var.aval.shape), kind_of(var.aval.dtype)


def _is_key(x: Any) -> bool:
    return bool(jnp.issubdtype(x.dtype, jax.dtypes.extended))
