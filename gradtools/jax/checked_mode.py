"""JAX's half of `gradtools.testing.checked`: f is traced, and its jaxpr is evaluated with holds.

An interpreter records what each `stop_gradient` of f returns in the first run, and puts it back in
the others. gradtools' own stops carry a name scope.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Literal

from gradtools.code_origin import USER, Source, kind_of
from gradtools.jax import reachability
from gradtools.jax.trees import is_inexact
from gradtools.testing.checked_mode import CheckedProgram, Streams, set_here

_OWN, _USER = "gradtools_own", "gradtools_user"
_INLINED = {
    "pjit": "jaxpr", "jit": "jaxpr", "closed_call": "call_jaxpr", "core_call": "call_jaxpr",
    "remat": "jaxpr", "checkpoint": "jaxpr",
}  # fmt: skip


class Half(Streams, threading.local):
    """What `checked` needs of JAX."""

    rehearses = True  # f runs before at values, so that derivatives inside of it are compared
    is_native = False  # whether a derivative of JAX's own, at known values, is compared

    def scope(self, own: bool) -> AbstractContextManager[Any]:
        return jax.named_scope(_OWN if own else _USER)

    def numbers(self, xs: Sequence[Any]) -> list[Any]:
        wide = lambda x: np.complex128 if jnp.iscomplexobj(x) else np.float64
        return [None if x is None else np.asarray(x).astype(wide(x)) for x in xs]

    def like(self, values: Sequence[Any], likes: Sequence[Any]) -> list[Any]:
        pairs = zip(values, likes, strict=True)
        return [None if v is None else jnp.asarray(np.asarray(v).astype(x.dtype)) for v, x in pairs]

    def traced(self, xs: Sequence[Any]) -> bool:
        inside = reachability.within_a_trace() and not self.is_native
        return inside or any(isinstance(x, jax.core.Tracer) for x in xs)

    @contextmanager
    def native(self, xs: Sequence[Any]) -> Iterator[Any]:
        """The values of xs, and which of them JAX differentiates at; empty if they are traced."""
        values = list(xs)
        for i, x in enumerate(xs):
            while isinstance(values[i], jax.core.Tracer) and hasattr(values[i], "primal"):
                values[i] = values[i].primal
            values[i] = x if values[i] is x else jnp.asarray(values[i])
        moving = [v is not x and is_inexact(v) for v, x in zip(values, xs, strict=True)]
        if not any(moving) or any(isinstance(x, jax.core.Tracer) for x in values):
            yield [], []
            return
        self.is_native = True
        try:
            with jax.ensure_compile_time_eval():
                yield values, moving
        finally:
            self.is_native = False

    def program(self, fun: Any, leaves: Sequence[Any], captures: bool = False) -> HeldProgram:
        fun(*leaves)  # derivatives inside of f are compared at values
        return HeldProgram(fun, leaves)

    def plain(self, fn: Callable[..., Any], xs: Sequence[Any]) -> HeldProgram:
        return HeldProgram(lambda *a: (list(fn(*a)), []), xs)


half = Half()


class HeldProgram(CheckedProgram):
    """f, which runs again at other points."""

    half = half
    hold = staticmethod(jax.lax.stop_gradient)  # which the interpreter holds

    def __init__(self, fun: Any, leaves: Sequence[Any], edits: bool = True) -> None:
        super().__init__(fun, leaves, edits)
        self.eps = max([float(jnp.finfo(x.dtype).eps) for x in leaves])
        self.closed: Any = None
        try:
            with self._running():
                self.closed = jax.make_jaxpr(lambda *xs: list(fun(*xs)[0]))(*leaves)
        except jax.errors.JAXTypeError:  # f reads values: its stops are not seen
            self.unseen = 1
        self.base = half.numbers(self.held(*leaves))
        self.recorded = self.values

    def _running(self) -> AbstractContextManager[Any]:
        stack = ExitStack()
        stack.enter_context(set_here(program=self, own=0))
        # What is compiled without edits must not be kept for the next call.
        stack.enter_context(jax.disable_jit(not self.edits))
        return stack

    # --- what `checked` calls

    def held(self, *xs: Any) -> list[Any]:
        self.at = 0
        if self.closed is not None:
            return self._eval(self.closed.jaxpr, self.closed.consts, xs)
        with self._running():
            return list(self.fun(*xs)[0])

    def pullback(self, vs: Sequence[Any]) -> Callable[..., list[Any]]:
        """The pullback at fixed cotangents, as a function that can be differentiated."""

        def pulled(*xs: Any) -> list[Any]:
            ys, pull = jax.vjp(self.held, *xs)
            pairs = zip(half.like(vs, ys), ys, strict=True)
            cts = [jnp.zeros_like(y) if v is None else v for v, y in pairs]
            return [jnp.conj(g) for g in pull([jnp.conj(ct) for ct in cts])]

        return pulled

    def without_edits(self) -> HeldProgram:
        return HeldProgram(self.fun, self.leaves, edits=False)

    # --- the interpreter

    def _eval(self, jaxpr: Any, consts: Sequence[Any], xs: Sequence[Any]) -> list[Any]:
        env: dict[Any, Any] = {}
        read = lambda v: v.val if isinstance(v, Literal) else env[v]
        env.update(zip(jaxpr.constvars, consts, strict=True))
        env.update(zip(jaxpr.invars, xs, strict=True))
        for e in jaxpr.eqns:
            args, name = [read(v) for v in e.invars], e.primitive.name
            inner = e.params.get(_INLINED.get(name, ""))
            self.edited |= _is_edit(e)  # also one that was compiled before
            if name == "stop_gradient" and not _is_own(e):
                ys = [self._stopped(args[0])]
            elif inner is not None:
                ys = self._eval(getattr(inner, "jaxpr", inner), getattr(inner, "consts", ()), args)
            else:
                ys = self._bound(e, args)
            for y in ys:
                if self.recorded is None and jnp.issubdtype(y.dtype, jnp.inexact):
                    self.eps = max(self.eps, float(jnp.finfo(y.dtype).eps))
            env.update(zip(e.outvars, ys, strict=True))
        return [read(v) for v in jaxpr.outvars]

    def _bound(self, e: Any, args: list[Any]) -> list[Any]:
        def fn(*xs: Any) -> list[Any]:
            ys = e.primitive.bind(*xs, **e.primitive.get_bind_params(e.params))
            return ys if e.primitive.multiple_results else [ys]

        if self.recorded is None and any("stop_gradient" in str(p) for p in e.params.values()):
            self.unseen += 1
        inexact = [jnp.issubdtype(x.dtype, jnp.inexact) for x in map(jnp.asarray, args)]
        if self.operations is not None and all(inexact) and args:
            self.operations.append((_name(e), _line(e), fn, args))
        return fn(*args)

    def _stopped(self, x: Any) -> Any:
        if self.recorded is None:
            self.values.append(x)
            return jax.lax.stop_gradient(x)
        self.at += 1
        return jax.lax.stop_gradient(self.recorded[self.at - 1])


def _is_own(e: Any) -> bool:
    """Whether gradtools itself stops here."""
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
    traceback = e.source_info.traceback
    for frame in traceback.frames if traceback else ():
        if kind_of(frame.file_name) == USER:
            return Source(frame.file_name, frame.line_num)
    return None
