"""Implements `gradtools.testing.checked` in JAX, by evaluating f's jaxpr with recorded values.

An interpreter records the result of each `stop_gradient` of f in the first run, and reuses it in
later runs. Values that are computed only from stopped values are evaluated twice, with the recorded
results and with new results, because a custom rule may treat such an operand as fixed or as
recomputed. Edits other than `straight_through` are evaluated as identities. A name scope
marks the `stop_gradient` equations of gradtools itself.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from gradtools.code_origin import USER, Source, kind_of
from gradtools.jax import jaxprs, reachability
from gradtools.jax._upstream import stack_of
from gradtools.jax.trees import is_inexact
from gradtools.testing.checked_mode import CheckedProgram, here, set_here

_OWN, _USER = "gradtools_own", "gradtools_user"


def scope(own: bool) -> AbstractContextManager[Any]:
    return jax.named_scope(_OWN if own else _USER)


@contextmanager
def unchanged() -> Iterator[None]:
    """Context manager that restores the random states of Python and NumPy on exit."""
    states = random.getstate(), np.random.get_state()  # noqa: NPY002 - the stream that f may use
    try:
        yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])  # noqa: NPY002 - as above


def like(values: Sequence[Any], likes: Sequence[Any]) -> list[Any]:
    """Converts NumPy arrays to arrays with the dtypes of `likes`."""
    pairs = zip(values, likes, strict=True)
    return [jnp.asarray(np.asarray(v).astype(x.dtype)) for v, x in pairs]


def traced(xs: Sequence[Any]) -> bool:
    inside = reachability.within_a_trace() and not here.native
    return inside or any(isinstance(x, jax.core.Tracer) for x in xs)


@contextmanager
def native(xs: Sequence[Any]) -> Iterator[Any]:
    """Yields the values of xs and the mask of differentiated xs, or two empty lists.

    The lists are empty if no element of xs is differentiated or a value is traced.
    """
    values = list(xs)
    for i, x in enumerate(xs):
        while isinstance(values[i], jax.core.Tracer) and hasattr(values[i], "primal"):
            values[i] = values[i].primal
        values[i] = x if values[i] is x else jnp.asarray(values[i])
    moving = [v is not x and is_inexact(v) for v, x in zip(values, xs, strict=True)]
    if not any(moving) or any(isinstance(x, jax.core.Tracer) for x in values):
        yield [], []
        return
    with set_here(native=True), jax.ensure_compile_time_eval():
        yield values, moving


class _Value(NamedTuple):
    """A value that depends on f's arguments; constants are arrays.

    Attributes:
        value: The value. If its gradient is stopped, it is computed from recorded results.
        recomputed: If the gradient is stopped, the value computed without recorded results.
    """

    value: Any
    recomputed: Any = None


def _value(x: Any) -> Any:
    return x.value if isinstance(x, _Value) else x


def _recomputed(x: Any) -> Any:
    return x.recomputed if _is_stopped(x) else _value(x)


def _is_stopped(x: Any) -> bool:
    return isinstance(x, _Value) and x.recomputed is not None


def _is_differentiable(x: Any) -> bool:
    return isinstance(x, _Value) and x.recomputed is None


class HeldProgram(CheckedProgram):
    """Runs f again at other points, with the results of `stop_gradient` from the first run."""

    half = sys.modules[__name__]

    def __init__(self, backend: Any, member: str, fun: Any, leaves: Any, captures: bool) -> None:
        super().__init__(backend, member, fun, leaves)
        self.eps = max(float(jnp.finfo(x.dtype).eps) for x in leaves)
        self.closed: Any = None
        with unchanged():
            fun(*leaves)  # compares derivatives inside of f at concrete values
        with self.at(self.numbers(leaves)) as xs:
            try:
                self.closed = jax.make_jaxpr(lambda *xs: list(fun(*xs)[0]))(*xs)
            except jax.errors.JAXTypeError:  # f reads values, so f cannot be traced
                self.unseen = 1
            self.run(*xs)
        self.recorded = self.values

    @contextmanager
    def at(self, points: Sequence[Any]) -> Iterator[list[Any]]:
        with set_here(program=self, own=self.closed is not None), unchanged():
            yield like(points, self.leaves)

    def run(self, *xs: Any) -> list[Any]:
        if self.closed is None:
            return list(self.fun(*xs)[0])
        given = [*map(jnp.asarray, self.closed.consts), *map(_Value, xs)]
        return [_value(y) for y in jaxprs.interpreted(self.closed.jaxpr, given, self._step)]

    def hold(self, x: Any) -> Any:
        """Returns x in the first run, and the recorded x in later runs, without a gradient."""
        if self.recorded is None:
            self.values.append(x)
            return jax.lax.stop_gradient(x)
        self.place += 1
        return jax.lax.stop_gradient(self.recorded[self.place - 1])

    def _step(self, _: int, e: Any, args: list[Any]) -> list[Any]:
        if e.primitive.name == "stop_gradient" and not _is_own(e):
            new = jax.lax.stop_gradient(_recomputed(args[0]))
            return [_Value(self.hold(_value(args[0])), new)]
        if _is_edit(e):
            if _name(e) == "straight_through":
                x, y = map(_value, args[:2])
                return [_Value(y + self.hold(x - y))]
            return args[: len(e.outvars)]  # an edit may have further arguments
        if e.primitive.name in jaxprs.CALLS:
            (program,) = jaxprs.programs_of(e)
            consts = map(jnp.asarray, program.consts)  # NumPy arrays cannot be indexed by tracers
            return jaxprs.interpreted(program.jaxpr, [*consts, *args], self._step)
        differentiable, stopped = (
            any(map(is_kind, args)) for is_kind in (_is_differentiable, _is_stopped)
        )
        recompute = differentiable and stopped and self._recomputes(e, args)
        ys = jaxprs.bound(e, [*map(_recomputed if recompute else _value, args)])
        self._look_at(e, [y for y in ys if jnp.issubdtype(y.dtype, jnp.inexact)])
        if differentiable:
            return [*map(_Value, ys)]
        if not stopped:
            return ys
        return [*map(_Value, ys, ys if e.effects else jaxprs.bound(e, [*map(_recomputed, args)]))]

    def _recomputes(self, e: Any, args: list[Any]) -> bool:
        """Returns whether the stopped operands of an equation are recomputed.

        The rule of `custom_linear_solve` differentiates with respect to the matrix, and never with
        respect to the solver's operands, such as LU factors. These operands are therefore
        recomputed if the matrix is differentiated. Other rules may treat a stopped operand as fixed
        or recomputed.
        """
        if e.primitive.name == "custom_linear_solve":
            return any(map(_is_differentiable, args[: e.params["const_lengths"].matvec]))
        if not jaxprs.programs_of(e) and _is_of_jax(e.primitive):
            return False
        self.stops_reach_rules = True
        return self.recompute

    def _look_at(self, e: Any, ys: list[Any]) -> None:
        """Updates `eps` and `unseen`, and records the outputs of the equation."""
        if self.recorded is None:
            self.unseen += any("stop_gradient" in str(p) for p in e.params.values())
            self.eps = max(self.eps, *(float(jnp.finfo(y.dtype).eps) for y in ys), 0.0)
        if not _is_own(e) or "rule" in e.params:
            self.see(_name(e), _line(e), ys)


def _is_of_jax(primitive: Any) -> bool:
    from jax.extend.core import primitives  # loads Pallas

    return any(primitive is p for p in vars(primitives).values())


def _is_own(e: Any) -> bool:
    """Returns whether an equation was created by gradtools, according to its name stack."""
    scopes = str(e.source_info.name_stack)
    return scopes.rfind(_OWN) > scopes.rfind(_USER)


def _is_edit(e: Any) -> bool:
    if e.primitive.name == "custom_vjp_call":  # a reverse-only edit
        eqns = e.params["call_jaxpr"].eqns
        return len(eqns) == 1 and eqns[0].primitive.name == "gradtools_reverse_only"
    rule = e.params.get("rule")
    return e.primitive.name == "gradtools_primal" and getattr(rule, "reaches", None) == "identity"


def _name(e: Any) -> str:
    rule, inner = e.params.get("rule"), e.params.get("call_jaxpr")
    called = getattr(getattr(inner, "jaxpr", inner), "debug_info", None)
    return getattr(rule, "name", None) or getattr(called, "func_name", e.primitive.name)


def _line(e: Any) -> Source | None:
    for frame in stack_of(e):
        if kind_of(frame.file_name) == USER:
            return Source(frame.file_name, frame.line_num)
    return None
