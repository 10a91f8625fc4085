"""Records a run in JAX: the value of every equation of f's jaxpr, and the cotangent at it.

Calls, branches and loops are entered, loops iteration by iteration. The recorded run is one program
of values and cotangents that is compiled without optimizations; a program with a `while` or a
`cond`, or a long loop, runs equation by equation.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from gradtools.code_origin import USER, Source, kind_of
from gradtools.jax import jaxprs
from gradtools.jax._upstream import Literal, constants_of, scopes_of, stack_of
from gradtools.testing.cross_checking.sides import Side
from gradtools.testing.diverging.runs import HALF, LIMIT, Draw, Place, Run, Step

_COMPILED = 400  # equations of loops; more compile for longer than they run one by one
_FAST_COMPILATION = {
    "xla_backend_optimization_level": 0,
    "xla_llvm_disable_expensive_passes": True,
}


def run_in_jax(side: Side, program: Any, leaves: Sequence[Any], names: Any, draw: Draw) -> Run:
    """Runs the program of a side at leaves; see `run_in_torch`."""
    paths: list[str] = []

    def flat(*arrays: Any) -> list[Any]:
        outs = side.named_arrays(program(*arrays))
        paths[:] = [*outs]
        return [jnp.asarray(y) for y in outs.values()]

    arrays = side.arrays(leaves)
    closed = jax.make_jaxpr(flat)(*arrays)
    constants = [jnp.asarray(c) for c in constants_of(closed)]
    recorders: list[_Equations] = []

    def record(arrays: Any, constants: Any, cotangents: Any) -> Any:
        recorder = _Equations()
        recorders[:] = [recorder]
        inputs = [recorder.leaf(x, name) for x, name in zip(arrays, names, strict=True)]
        held = recorder.held(constants)
        ends = recorder.run(jaxprs.open_jaxpr(closed), held, inputs, ())
        recorder.ends = [x if x.number >= 0 else recorder.leaf(x.value, "literal") for x in ends]
        recorder.pull(zip(recorder.ends, cotangents, strict=True))
        return [s.value for s in recorder.steps], [s.cotangent for s in recorder.steps]

    long = jaxprs.holds(closed, "scan") and _unrolled(closed) > _COMPILED
    if long or jaxprs.holds(closed, "while", "cond"):
        run, outs = record, flat(*arrays)
    else:
        run = jax.jit(record, compiler_options=_FAST_COMPILATION)
        outs = jax.jit(flat, compiler_options=_FAST_COMPILATION)(*arrays)
    ends = [Step(Place("output"), _array(y), accuracy=_widened(y)) for y in outs]
    drawn = draw(dict(zip(paths, ends, strict=True)))
    values, pulled = run(arrays, constants, [drawn[path] for path in paths])
    recorder = recorders[0]
    for step, value, g in zip(recorder.steps, values, pulled, strict=True):
        step.accuracy, step.value = _widened(value), _array(value)
        step.cotangent = None if g is None else _array(g)
    made = dict(zip(paths, recorder.ends, strict=True))
    return Run(recorder.steps, recorder.steps[: len(arrays)], made)


class _Equations:
    """An interpreter of jaxprs that records a step for each value, and a tape of the operations."""

    def __init__(self) -> None:
        self.steps: list[Step] = []
        self.ends: list[Step] = []
        self.tape: list[tuple[Any, list[Step], list[Step]]] = []
        self.iteration: tuple[int, ...] = ()
        self.layer = ""

    def add(
        self, op: str, lines: Any, value: Any, parents: Sequence[Step], inside: bool = False
    ) -> Step:
        known = [p for p in parents if p.number >= 0]
        place = Place(op, lines, self.layer, self.iteration)
        self.steps.append(Step(place, value, known, len(self.steps), inside=inside))
        return self.steps[-1]

    def leaf(self, value: Any, name: str) -> Step:
        self.steps.append(Step(Place(name), value, [], len(self.steps), leaf=name))
        return self.steps[-1]

    def run(
        self, jaxpr: Any, consts: Any, entries: Any, outer: tuple[Source, ...], taped: bool = True
    ) -> list[Step]:
        """The outputs of a jaxpr. outer: The lines of the equation that contains it."""
        env: dict[Any, Step] = dict(zip(jaxpr.constvars, consts, strict=True))
        env.update(zip(jaxpr.invars, entries, strict=True))

        def read(v: Any) -> Step:
            if not isinstance(v, Literal):
                return env[v]
            aval: Any = v.aval
            return Step(Place("literal", outer), jnp.asarray(v.val, aval.dtype))

        for eqn in jaxpr.eqns:
            frames = [f for f in stack_of(eqn) if kind_of(f.file_name) == USER]
            inner = [
                Source(f.file_name, f.line_num, f.function_name.split(".")[-1]) for f in frames
            ]
            layer = self.layer
            self.layer = ".".join(name for name, is_scope in scopes_of(eqn) if is_scope) or layer
            outs = self.equation(eqn, [read(v) for v in eqn.invars], (*inner, *outer), taped)
            self.layer = layer
            env.update(zip(eqn.outvars, outs, strict=True))
        return [read(v) for v in jaxpr.outvars]

    def equation(self, eqn: Any, xs: list[Step], lines: Any, taped: bool) -> list[Step]:
        name, inner = eqn.primitive.name, jaxprs.bodies(eqn)
        if name == "scan" and eqn.params["length"] * len(inner[0].jaxpr.eqns) < LIMIT:
            return self.scan(eqn, xs, lines, taped)
        if name == "while":
            return self.loop(eqn, xs, lines, taped)
        if name == "cond":
            k = min(max(int(xs[0].value), 0), len(inner) - 1)
            held = self.held(jaxprs.programs_of(eqn)[k].consts)
            return self.run(inner[k].jaxpr, held, xs[1:], lines, taped)
        if inner and name in (*jaxprs.CALLS, *jaxprs.RULED):
            held = self.held(jaxprs.programs_of(eqn)[0].consts)
            is_call = name in jaxprs.CALLS
            outs = self.run(inner[0].jaxpr, held, xs, lines, taped and is_call)
            if is_call:
                return outs
            xs = [*xs, *outs]  # the values inside of a function with a rule, which is one operation
        count = len(eqn.invars)
        return self.apply(name, lambda *v: jaxprs.bound(eqn, v[:count]), xs, lines, taped)

    def held(self, consts: Any) -> list[Step]:
        return [self.leaf(jnp.asarray(c), "captured") for c in consts]

    def apply(self, name: str, fun: Any, xs: list[Step], lines: Any, taped: bool) -> list[Step]:
        outs = [self.add(name, lines, y, xs, inside=not taped) for y in fun(*[x.value for x in xs])]
        if taped:
            self.tape.append((fun, xs, outs))
        return outs

    def scan(self, eqn: Any, xs: list[Step], lines: Any, taped: bool) -> list[Step]:
        body, params = jaxprs.programs_of(eqn)[0], eqn.params
        n, carried = jaxprs.scan_counts(eqn)
        first, carry, held = xs[:n], xs[n : n + carried], self.held(body.consts)
        rounds: list[Any] = [None] * params["length"]
        before = self.iteration
        for i in sorted(range(params["length"]), reverse=params["reverse"]):
            self.iteration = (*before, i)
            row = partial(_row, jnp.asarray(i))
            rows = [self.apply("row", row, [x], lines, taped)[0] for x in xs[n + carried :]]
            outs = self.run(body.jaxpr, held, [*first, *carry, *rows], lines, taped)
            carry, rounds[i] = outs[:carried], outs[carried:]
        self.iteration = before
        if not rounds:
            stacked = self.apply("scan", lambda *v: jaxprs.bound(eqn, v), xs, lines, taped)
            return [*carry, *stacked[carried:]]
        stack = lambda *v: [jnp.stack(v)]
        columns = [list(column) for column in zip(*rounds, strict=True)]
        return [*carry, *(self.apply("stack", stack, c, lines, taped)[0] for c in columns)]

    def loop(self, eqn: Any, xs: list[Step], lines: Any, taped: bool) -> list[Step]:
        test, body = jaxprs.programs_of(eqn)
        n, m = eqn.params["cond_nconsts"], eqn.params["body_nconsts"]
        gates, consts, carry = xs[:n], xs[n : n + m], xs[n + m :]
        in_test, in_body = self.held(test.consts), self.held(body.consts)
        before, i = self.iteration, 0
        while self.run(test.jaxpr, in_test, [*gates, *carry], lines, False)[0].value:
            self.iteration = (*before, i)
            if len(self.steps) > LIMIT:  # the rest is one operation
                rest = lambda *v: jaxprs.bound(eqn, v)
                carry = self.apply("while", rest, [*gates, *consts, *carry], lines, taped)
                break
            carry, i = self.run(body.jaxpr, in_body, [*consts, *carry], lines, taped), i + 1
        self.iteration = before
        return carry

    def pull(self, seeds: Any) -> None:
        """Sets the cotangents of all steps, in gradtools' convention."""
        cotangents: dict[int, Any] = {}

        def give(step: Step, g: Any) -> None:
            before = cotangents.get(id(step))
            cotangents[id(step)] = g if before is None else before + g

        for step, c in seeds:
            if c is not None:
                give(step, jnp.conj(jnp.asarray(c, step.value.dtype)))
        for fun, xs, outs in reversed(self.tape):
            known = [k for k, y in enumerate(outs) if id(y) in cotangents]
            wanted = [i for i, x in enumerate(xs) if _is_inexact(x.value) and x.number >= 0]
            wanted = [i for i in wanted if not xs[i].inside]
            if not known or not wanted:
                continue
            values = [x.value for x in xs]

            def part(*moving: Any, f: Any = fun, at: Any = (values, wanted, known)) -> list[Any]:
                values, wanted, known = at
                full = list(values)
                for i, x in zip(wanted, moving, strict=True):
                    full[i] = x
                ys = f(*full)
                return [ys[k] for k in known]

            pullback = jax.vjp(part, *[values[i] for i in wanted])[1]
            gradients = pullback([cotangents[id(outs[k])] for k in known])
            for i, g in zip(wanted, gradients, strict=True):
                give(xs[i], g)
        for step in self.steps:
            if id(step) in cotangents:
                step.cotangent = jnp.conj(cotangents[id(step)])


def _row(i: Any, x: Any) -> list[Any]:
    """One row; the index is an array, so that all rows share one compilation."""
    return [jax.lax.dynamic_index_in_dim(x, i, keepdims=False)]


def _unrolled(jaxpr: Any) -> int:
    """The number of equations with all scans unrolled."""
    count = 0
    for eqn in jaxprs.open_jaxpr(jaxpr).eqns:
        inner = sum(_unrolled(body.jaxpr) for body in jaxprs.bodies(eqn))
        count += eqn.params["length"] * inner if eqn.primitive.name == "scan" else max(inner, 1)
    return count


def _widened(x: Any) -> float:
    return HALF if x.dtype in (jnp.bfloat16, jnp.float16) else 0.0


def _is_inexact(x: Any) -> bool:
    return hasattr(x, "dtype") and jnp.issubdtype(x.dtype, jnp.inexact)


def _array(x: Any) -> np.ndarray:
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        return np.zeros(0)
    return np.asarray(x, np.float32 if x.dtype in (jnp.bfloat16, jnp.float16) else None)
