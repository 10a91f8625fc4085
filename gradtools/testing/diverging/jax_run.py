"""Records a run in JAX: the values of all equations of f's jaxpr, and their cotangents.

The jaxpr is evaluated under `jax.vjp`, equation by equation (`seeing/jax/unrolling.py`). Each value
passes through an identity whose backward rule stores the cotangent.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from gradtools.jax import jaxprs
from gradtools.jax._upstream import constants_of, scopes_of
from gradtools.jax.arrays import to_numpy
from gradtools.jax.trees import conj, is_inexact
from gradtools.seeing.jax.source_lines import users_lines
from gradtools.seeing.jax.tracing import trace
from gradtools.seeing.jax.unrolling import Evaluate, Unrolling
from gradtools.testing.cross_checking.sides import Side
from gradtools.testing.diverging.runs import Place, Run, Step


def run_in_jax(side: Side, program: Any, leaves: dict[str, np.ndarray]) -> Run:
    """Records a forward run in JAX; the arguments are as in `run_in_torch`."""
    paths: list[str] = []

    def flat(arrays: Sequence[Any]) -> list[Any]:
        outs = side.named_arrays(program(*arrays))
        paths[:] = [*outs]
        return [jnp.asarray(y) for y in outs.values()]

    arrays, recorder, ends = side.arrays([*leaves.values()]), _UnrolledValues(), dict[str, Step]()
    closed = trace(flat, arrays).closed

    def record(*arrays: Any) -> Any:
        held = map(recorder.constant, constants_of(closed))
        own = (
            recorder.step(Step(Place(name), x, leaf=name, tracked=True))
            for name, x in zip(leaves, arrays, strict=True)
        )
        outs = recorder.evaluated(jaxprs.open_jaxpr(closed), [*held, *own], Place(""))
        ends.update(zip(paths, outs, strict=True))
        moving = {path: s.value for path, s in ends.items() if is_inexact(s.value)}
        return moving, [s.value for s in recorder.steps]

    outs, pullback, values = jax.vjp(record, *arrays, has_aux=True)
    for step, x in zip(recorder.steps, values, strict=True):
        step.value = to_numpy(x)

    def pull(cotangents: dict[str, Any]) -> None:
        pullback({p: conj(jnp.asarray(cotangents[p], y.dtype)) for p, y in outs.items()})
        for step in recorder.steps:
            if step.cotangent is not None:
                step.cotangent = to_numpy(conj(step.cotangent))

    return Run(recorder.steps, ends, pull)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _watched(step: Step, x: Any) -> Any:
    return x


def _store(step: Step, _: None, cotangent: Any) -> tuple[Any]:
    step.cotangent = cotangent
    return (cotangent,)


_watched.defvjp(lambda step, x: (x, None), _store)


class _UnrolledValues(Unrolling[Step, Place, Place]):
    """Records a `Step` for each value of the evaluated jaxpr."""

    longest = 5000

    def __init__(self) -> None:
        self.steps: list[Step] = []

    def step(self, step: Step) -> Step:
        """Appends a `Step` and, if the step is tracked, records the cotangent of its value."""
        self.steps.append(step)
        step.value = _watched(step, step.value) if step.tracked else step.value
        return step

    def array(self, value: Step) -> Any:
        return value.value

    def literal(self, literal: Any) -> Step:
        return self.step(Step(Place("literal"), jnp.asarray(literal.val, literal.aval.dtype)))

    def constant(self, x: Any) -> Step:
        return self.step(Step(Place("captured"), jnp.asarray(x), leaf="captured"))

    def place(self, at: Place, i: int, eqn: Any) -> Place:
        layer = ".".join(name for name, is_scope in scopes_of(eqn) if is_scope)
        return replace(at, lines=(*users_lines(eqn), *at.lines), layer=layer or at.layer)

    def inside(self, at: Place, k: int, iteration: int | None) -> Place:
        return at if iteration is None else replace(at, iteration=(*at.iteration, iteration))

    def operation(self, at: Place, name: str, evaluate: Evaluate, xs: Sequence[Step]) -> list[Step]:
        place, outs = replace(at, operation=name), evaluate([x.value for x in xs])
        moves = any(x.tracked for x in xs) and name != "stop_gradient"
        made = [Step(place, y, [*xs], tracked=moves and is_inexact(y)) for y in outs]
        return [*map(self.step, made)]
