"""Traces programs, including programs with Python branches on values or data-dependent shapes.

A program is traced abstractly, so no number is computed. A program under eager `jax.grad` may
branch on values, but plain tracing fails at such a branch, because tracers have no values. A
program that branches on values is traced under a `Trace` that wraps JAX's trace and forwards every
primitive to the wrapped trace. If Python needs the value of a tracer (``bool(x)``), the value is
computed from the jaxpr of the incomplete trace, and the program is traced again with all known
values::

    answers = ();  while the trace needs the value of y:  answers += (y at the leaves,)

Conversions to float, int or NumPy arrays raise an error, as in a plain trace.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from gradtools.jax import jaxprs
from gradtools.jax._upstream import Tracer, called_by_jax, set_current_trace, take_current_trace
from gradtools.jax.known_errors import refused_number
from gradtools.seeing.diagnostics.findings import Finding
from gradtools.seeing.graphs.reachable import named_objects
from gradtools.seeing.graphs.recording import Run
from gradtools.seeing.jax.source_lines import source_of_error

Answers = list[Any]
LEAVING = (
    jax.errors.TracerArrayConversionError,
    jax.errors.TracerIntegerConversionError,
    jax.errors.ConcretizationTypeError,
)


@dataclass(frozen=True)
class Traced:
    """A traced program, and the indices of its outputs that are not JAX arrays.

    Attributes:
        closed: The closed jaxpr of the program.
        host_outputs: The indices of outputs that are not JAX arrays.
    """

    closed: Any
    host_outputs: tuple[int, ...]


def trace(run: Run, leaves: Sequence[Any]) -> Traced:
    """Traces `run` at the given leaves."""
    host: list[int] = []

    def fun(*xs: Any) -> list[Any]:
        outs = list(run(list(xs)))
        host[:] = [k for k, y in enumerate(outs) if not isinstance(y, jax.Array)]
        return [_constant(y) if k in host else y for k, y in enumerate(outs)]

    try:
        return Traced(jax.make_jaxpr(fun)(*leaves), tuple(host))
    except jax.errors.NonConcreteBooleanIndexError:
        pass
    except jax.errors.ConcretizationTypeError as error:
        if what_left(error) is not None:
            raise
    return Traced(jaxpr_with_answers(fun, leaves), tuple(host))


def _constant(y: Any) -> Any:
    """Converts a NumPy or Python output to a JAX constant."""
    array = np.asarray(y)
    return jnp.asarray(array) if array.dtype.kind in "fciub" else jnp.zeros(())


# --- JAX's errors ------------------------------------------------------------------------


def what_left(error: Exception) -> Finding | None:
    """Returns a finding if a conversion to a NumPy array or number raised the error, else None."""
    line, modules = source_of_error(error)
    written = line.text if line is not None else ""
    if isinstance(error, jax.errors.TracerBoolConversionError):
        return None
    if isinstance(error, jax.errors.TracerArrayConversionError):
        operation = "numpy"
    elif isinstance(error, jax.errors.TracerIntegerConversionError):
        operation = "int"
    else:
        names = (name for name in ("item", "tolist") if f".{name}(" in written)
        operation = refused_number(error) or next(names, "")
    message = str(error).strip().splitlines()[0]
    lost = Finding("", "left_framework", operation, line, modules, detail=message)
    return lost if operation else None


# --- captured arrays ---------------------------------------------------------------------


def captured_arrays(run: Run) -> dict[int, str]:
    """Maps the ids of the arrays that a function captures to their names."""
    owner = getattr(run, "__self__", None)
    start = getattr(owner, "f", run)  # the user's f, without its arguments
    is_array = lambda x: isinstance(x, jax.Array | np.ndarray)
    result: dict[int, str] = {}
    for x, name in named_objects([(start, ""), (type(start).__call__, "")], is_array):
        if is_array(x):
            result.setdefault(id(x), name)
    return result


# --- programs that branch on values ------------------------------------------------------


def jaxpr_with_answers(fun: Callable[..., Any], leaves: Sequence[Any]) -> Any:
    """Returns `jax.make_jaxpr(fun)(*leaves)`, where `fun` may branch on values.

    Args:
        fun: A function from arrays to a list of arrays.
        leaves: The arrays at which branches and data-dependent shapes are evaluated.
    """
    answers: Answers = []
    while True:
        closed, complete = _attempt(fun, leaves, answers)
        if complete:
            return closed
        answers += map(np.asarray, jax.core.eval_jaxpr(closed.jaxpr, closed.consts, *leaves))


def _attempt(fun: Any, leaves: Any, answers: Answers) -> tuple[Any, bool]:
    """Returns (jaxpr, True) for the program, or (jaxpr, False) for the next required value."""
    complete = True

    def answering(*inner: Any) -> Any:
        nonlocal complete
        with take_current_trace() as parent:
            trace = _AnsweringTrace(parent, answers)
            try:
                with set_current_trace(trace):
                    outs = fun(*[_AnsweringTracer(trace, x) for x in inner])
            except _ValueNeeded as question:
                complete = False
                return question.inner
        return jax.tree.map(trace.unwrapped, outs)

    return jax.make_jaxpr(answering)(*leaves), complete


class _ValueNeeded(BaseException):
    """Raised if Python needs an unknown value; ``except Exception`` does not catch it."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner


class _AnsweringTrace(jax.core.Trace):  # type: ignore[misc]
    """Forwards every primitive to the wrapped trace and wraps the results."""

    def __init__(self, parent: Any, answers: Answers) -> None:
        super().__init__()
        self.parent = parent
        self.requires_low = parent.requires_low
        self._answers, self._asked = answers, 0

    def unwrapped(self, x: Any) -> Any:
        return x.inner if isinstance(x, _AnsweringTracer) and x.front is self else x

    def wrapped(self, x: Any) -> Any:
        return _AnsweringTracer(self, x) if isinstance(x, jax.core.Tracer) else x

    def process_primitive(self, primitive: Any, tracers: Any, params: Any, /) -> Any:
        with set_current_trace(self.parent):
            outs = primitive.bind(*map(self.unwrapped, tracers), **params)
        if not primitive.multiple_results:
            return self.wrapped(outs)
        return [self.wrapped(x) for x in outs]

    def stage_value(self, val: Any) -> Any:
        return self.wrapped(self.parent.stage_value(self.unwrapped(val)))

    def answer(self, tracer: _AnsweringTracer) -> Any:
        """Returns the next known value; raises `_ValueNeeded` if there is none."""
        if self._asked == len(self._answers):
            raise _ValueNeeded([tracer.inner])
        self._asked += 1
        return self._answers[self._asked - 1]


def _forwarding(name: str) -> Callable[..., Any]:
    """Returns a method that calls the wrapped trace's method `name` with unwrapped tracers."""

    def process(self: _AnsweringTrace, *args: Any, **kwargs: Any) -> Any:
        plain = [
            [self.unwrapped(x) for x in arg] if isinstance(arg, list | tuple) else arg
            for arg in args
        ]
        with set_current_trace(self.parent):
            outs = getattr(self.parent, name)(*plain, **kwargs)
        return [self.wrapped(x) for x in outs]

    return process


for _name in ("call", "custom_jvp_call", "custom_vjp_call", "shard_map"):
    setattr(_AnsweringTrace, f"process_{_name}", _forwarding(f"process_{_name}"))


class _AnsweringTracer(Tracer):
    """A tracer that wraps a tracer of JAX and may have a known value."""

    __slots__ = ("front", "inner")

    def __init__(self, front: _AnsweringTrace, inner: Any) -> None:
        super().__init__(front, jax.typeof(inner))
        self.front, self.inner = front, inner

    def __bool__(self) -> bool:
        return bool(self.front.answer(self) if self.size == 1 else self.inner)

    def to_concrete_value(self) -> Any:
        return self.front.answer(self)

    def __array__(self, *args: Any, **kwargs: Any) -> Any:
        """Returns the value if JAX converts the tracer; raises an error if the user converts it."""
        return (
            self.front.answer(self) if called_by_jax(1) else self.inner.__array__(*args, **kwargs)
        )

    @property
    def dimension_as_value(self) -> Any:  # type: ignore[override]
        """Returns a function that JAX calls to unwrap a tracer that a closure captures.

        JAX reads this attribute of every array, because some arrays are symbolic dimensions.
        Integers may be used as shapes, so integer tracers raise AttributeError, and JAX then
        requests the value.
        """
        if not jaxprs.is_inexact(self):
            raise AttributeError("dimension_as_value")
        return lambda: self.inner

    def full_lower(self) -> Any:
        return self


def _leaving(name: str) -> Callable[..., Any]:
    """Returns a method that calls the wrapped tracer's conversion, which raises an error."""
    return lambda self, *args: getattr(self.inner, name)(*args)


for _name in ("__index__", "__int__", "__float__", "__complex__", "item", "tolist"):
    setattr(_AnsweringTracer, _name, _leaving(_name))
