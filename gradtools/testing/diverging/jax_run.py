"""Records a run in JAX: the value of every equation of f's jaxpr, and the cotangent at it.

The jaxpr is interpreted under `jax.vjp`. Each value passes through an identity whose backward rule
stores the cotangent. Calls, branches and loops are entered, loops iteration by iteration.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from gradtools.code_origin import USER, Source, kind_of
from gradtools.jax import jaxprs
from gradtools.jax._upstream import Literal, constants_of, scopes_of, stack_of
from gradtools.testing.cross_checking.sides import Side
from gradtools.testing.diverging.runs import HALF, LIMIT, Place, Run, Step

Lines = tuple[Source, ...]
Steps = list[Step]


def run_in_jax(side: Side, program: Any, leaves: dict[str, np.ndarray]) -> Run:
    """Runs a program forward; see `run_in_torch`."""
    paths: list[str] = []

    def flat(*arrays: Any) -> list[Any]:
        outs = side.named_arrays(program(*arrays))
        paths[:] = [*outs]
        return [jnp.asarray(y) for y in outs.values()]

    arrays = side.arrays([*leaves.values()])
    closed, recorder, ends = jax.make_jaxpr(flat)(*arrays), _Interpreter(), dict[str, Step]()

    def record(*arrays: Any) -> Any:
        own = [recorder.watched(Place(n), x, leaf=n) for n, x in zip(leaves, arrays, strict=True)]
        held = recorder.held(constants_of(closed))
        outs = recorder.run(jaxprs.open_jaxpr(closed), held, own, ())
        outs = [s if s.number >= 0 else recorder.add(s.place, s.value) for s in outs]
        ends.update(zip(paths, outs, strict=True))
        return [s.value for s in outs], [s.value for s in recorder.steps]

    outs, pullback, values = jax.vjp(record, *arrays, has_aux=True)
    for step, x in zip(recorder.steps, values, strict=True):
        step.value, step.accuracy = _array(x), _accuracy(x)

    def pull(cotangents: dict[str, Any]) -> None:
        pullback([_like(y, cotangents[path]) for path, y in zip(paths, outs, strict=True)])
        for step in recorder.steps:
            if step.cotangent is not None:
                step.cotangent = _array(jnp.conj(step.cotangent))

    return Run(recorder.steps, ends, pull)


def _like(y: Any, cotangent: np.ndarray) -> Any:
    """A cotangent of y in JAX's convention."""
    if not _is_inexact(y):
        return np.zeros(y.shape, jax.dtypes.float0)
    return jnp.conj(jnp.asarray(cotangent, y.dtype))


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _watched(step: Step, x: Any) -> Any:
    return x


def _store(step: Step, _: None, cotangent: Any) -> tuple[Any]:
    step.cotangent = cotangent
    return (cotangent,)


_watched.defvjp(lambda step, x: (x, None), _store)


class _Interpreter:
    """An interpreter of jaxprs that records a step for each value."""

    def __init__(self) -> None:
        self.steps: Steps = []
        self.iteration: tuple[int, ...] = ()
        self.layer = ""

    def add(self, place: Place, value: Any, parents: Sequence[Step] = (), leaf: str = "") -> Step:
        known = [p for p in parents if p.number >= 0]
        self.steps.append(Step(place, value, known, len(self.steps), leaf=leaf))
        return self.steps[-1]

    def watched(
        self, place: Place, value: Any, parents: Sequence[Step] = (), leaf: str = ""
    ) -> Step:
        """A step whose cotangent is recorded."""
        step = self.add(place, value, parents, leaf)
        step.tracked, step.value = True, _watched(step, value)
        return step

    def held(self, consts: Any) -> Steps:
        return [self.add(Place("captured"), jnp.asarray(c), leaf="captured") for c in consts]

    def run(
        self, jaxpr: Any, consts: Steps, entries: Steps, outer: Lines, tracked: bool = True
    ) -> Steps:
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
            lines = (
                *(Source(f.file_name, f.line_num, _last(f.function_name)) for f in frames),
                *outer,
            )
            layer = self.layer
            self.layer = ".".join(name for name, is_scope in scopes_of(eqn) if is_scope) or layer
            outs = self.equation(eqn, [read(v) for v in eqn.invars], lines, tracked)
            self.layer = layer
            env.update(zip(eqn.outvars, outs, strict=True))
        return [read(v) for v in jaxpr.outvars]

    def equation(self, eqn: Any, xs: Steps, lines: Lines, tracked: bool) -> Steps:
        name, inner = eqn.primitive.name, jaxprs.bodies(eqn)
        if name == "scan" and 0 < eqn.params["length"] * len(inner[0].jaxpr.eqns) < LIMIT:
            return self.scan(eqn, xs, lines, tracked)
        if name == "while":
            return self.loop(eqn, xs, lines, tracked)
        if name == "cond":
            k = min(max(int(xs[0].value), 0), len(inner) - 1)
            held = self.held(jaxprs.programs_of(eqn)[k].consts)
            return self.run(inner[k].jaxpr, held, xs[1:], lines, tracked)
        parents = xs
        if inner and name in (*jaxprs.CALLS, *jaxprs.RULED):
            held, is_call = self.held(jaxprs.programs_of(eqn)[0].consts), name in jaxprs.CALLS
            outs = self.run(inner[0].jaxpr, held, xs, lines, tracked and is_call)
            if is_call:
                return outs
            parents = [*xs, *outs]  # a function with a rule is one operation in the backward pass
        return self.apply(name, partial(jaxprs.bound, eqn), xs, lines, tracked, parents)

    def apply(
        self,
        name: str,
        fun: Callable[[list[Any]], list[Any]],
        xs: Steps,
        lines: Lines,
        tracked: bool,
        parents: Steps | None = None,
    ) -> Steps:
        """The results of an operation."""
        tracked = tracked and any(x.tracked for x in xs) and name != "stop_gradient"
        place = Place(name, lines, self.layer, self.iteration)
        return [
            (self.watched if tracked and _is_inexact(y) else self.add)(place, y, parents or xs)
            for y in fun([x.value for x in xs])
        ]

    def scan(self, eqn: Any, xs: Steps, lines: Lines, tracked: bool) -> Steps:
        body, length = jaxprs.programs_of(eqn)[0], eqn.params["length"]
        n, carried = jaxprs.scan_counts(eqn)
        first, carry, held = xs[:n], xs[n : n + carried], self.held(body.consts)
        rounds: list[Any] = [None] * length
        before = self.iteration
        for i in sorted(range(length), reverse=eqn.params["reverse"]):
            self.iteration = (*before, i)
            at = jnp.asarray(i)  # an array, so that all rows share one compilation
            row = lambda x, at=at: [jax.lax.dynamic_index_in_dim(x[0], at, keepdims=False)]
            rows = [self.apply("row", row, [x], lines, tracked)[0] for x in xs[n + carried :]]
            outs = self.run(body.jaxpr, held, [*first, *carry, *rows], lines, tracked)
            carry, rounds[i] = outs[:carried], outs[carried:]
        self.iteration = before
        stack = lambda rows: [jnp.stack(rows)]
        columns = [[*column] for column in zip(*rounds, strict=True)]
        return [*carry, *(self.apply("stack", stack, c, lines, tracked)[0] for c in columns)]

    def loop(self, eqn: Any, xs: Steps, lines: Lines, tracked: bool) -> Steps:
        test, body = jaxprs.programs_of(eqn)
        n, m = eqn.params["cond_nconsts"], eqn.params["body_nconsts"]
        gates, consts, carry = xs[:n], xs[n : n + m], xs[n + m :]
        in_test, in_body = self.held(test.consts), self.held(body.consts)
        before, i = self.iteration, 0
        while self.run(test.jaxpr, in_test, [*gates, *carry], lines, False)[0].value:
            self.iteration = (*before, i)
            if len(self.steps) > LIMIT:  # the rest is one operation
                rest = partial(jaxprs.bound, eqn)
                carry = self.apply("while", rest, [*gates, *consts, *carry], lines, tracked)
                break
            carry, i = self.run(body.jaxpr, in_body, [*consts, *carry], lines, tracked), i + 1
        self.iteration = before
        return carry


def _last(name: str) -> str:
    return name.rpartition(".")[2]


def _is_inexact(x: Any) -> bool:
    return hasattr(x, "dtype") and jnp.issubdtype(x.dtype, jnp.inexact)


def _accuracy(x: Any) -> float:
    return HALF if x.dtype in (jnp.bfloat16, jnp.float16) else 0.0


def _array(x: Any) -> np.ndarray:
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        return np.zeros(0)
    return np.asarray(x, np.float32 if _accuracy(x) else None)
