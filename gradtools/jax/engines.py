"""vjp, jvp and linearize in JAX, and which arguments reach the output, read from a jaxpr.

To find out whether an argument reaches the output, the function is traced to a jaxpr, which then is
evaluated, so that the user's Python code runs once. JAX's own zero cotangents do not show it. JAX's
pullback is the conjugate of gradtools'; it is converted here.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate
from typing import Any
from weakref import WeakKeyDictionary

import jax
import jax.numpy as jnp

from gradtools.arguments.calls import Call
from gradtools.backend import Array, Evaluation, Fun, Staged
from gradtools.errors import GradtoolsError
from gradtools.jax import jaxprs, reachability
from gradtools.jax._upstream import is_in_scope
from gradtools.jax.known_errors import explained
from gradtools.jax.rules.checking import avals_of
from gradtools.jax.rules.primitives import reverse_only_p
from gradtools.jax.trees import LinearMap, all_known, conj, zeros_of

DERIVATIVE_SCOPE = "gradtools_derivative"
_UNTRACEABLE = (jax.errors.JAXTypeError, jax.errors.NonConcreteBooleanIndexError)


def stage(fun: Fun, leaves: list[Array]) -> Staged:
    """The function as a jaxpr, with properties that are read from it."""
    traced = _traced(fun, leaves)
    if traced is None:
        return Staged(fun)
    traced.refuse_signs(fun)
    outs, inputs = (sum(x.size for x in xs) for xs in (traced.out_avals, leaves))
    pushes = reachability.moves_a_while(traced.jaxpr) and not traced.reverse_only
    wide = inputs < outs and not traced.reverse_only
    mode = "forward" if pushes or wide else "reverse"

    def run(*leaves: Array) -> Any:
        return traced.run(*leaves)

    run.caller, run.call = _caller(fun), fun  # type: ignore[attr-defined]
    return Staged(run, traced.reverse_only, mode, pushes)


def vjp(fun: Fun, leaves: list[Array], *, groups: Sequence[int] | None, once: bool) -> Evaluation:
    """One evaluation and its pullback.

    With concrete leaves a function that was traced before is traced again only if a gradient is all
    zeros, as that of an argument that does not reach the output.
    """
    note_derivative()
    if groups is None:
        return _evaluated(fun, leaves)
    known = all_known(leaves) and not reachability.within_a_trace()
    if known and _takes_no_sign(fun, leaves):
        evaluation = _evaluated(fun, leaves)
        whole = evaluation.pullback

        def pullback(cts: Sequence[Array | None]) -> list[Array | None]:
            """Traces fun if all gradients of a group are zero."""
            pulled, ends = whole(cts), [*accumulate(groups)]
            parts = [pulled[e - count : e] for e, count in zip(ends, groups, strict=True)]
            if all(not part or any(map(_is_nonzero, part)) for part in parts):
                return pulled
            traced = _traced(fun, leaves)
            if traced is None:
                evaluation.checked = False
                return pulled
            evaluation.where_lost = traced.where_lost
            evaluation.nested = evaluation.nested or traced.nested
            return traced.of_connected(pulled)

        evaluation.pullback, evaluation.checked = pullback, True
        return evaluation
    traced = _refusing_signs(fun, leaves)
    if traced is None:
        return _evaluated(fun, leaves)
    evaluation = _evaluated(traced.run, leaves, caller=_caller(fun))
    native = evaluation.pullback
    if any(x is y for x in traced.jaxpr.invars for y in traced.jaxpr.outvars):
        # No equation reads a leaf that is an output itself: mark it as read by this derivative.
        with jax.named_scope(DERIVATIVE_SCOPE):
            _ = [-x for x in leaves if isinstance(x, jax.core.Tracer)]
    return Evaluation(
        evaluation.outs,
        evaluation.extras,
        lambda cts: traced.of_connected(native(cts)),
        nested=traced.nested,
        where_lost=traced.where_lost,
    )


def _is_nonzero(x: Any) -> bool:
    if isinstance(x, jax.core.Tracer):
        return False
    on_host = all(d.platform == "cpu" for d in x.devices()) and x.is_fully_addressable
    return bool((jax.device_get(x) != 0).any() if on_host else jax.device_get(jnp.any(x)))


def _caller(fun: Fun) -> str:
    return getattr(fun, "caller", "vjp")


def _evaluated(fun: Fun, leaves: list[Array], caller: str | None = None) -> Evaluation:
    """JAX's own evaluation and pullback."""
    if caller is None:
        _refuse_signs(fun, leaves)
        caller = _caller(fun)
    with explained(caller), jax.named_scope(DERIVATIVE_SCOPE), _watched() as nested:
        outs, pull, extras = jax.vjp(fun, *leaves, has_aux=True)
    likes = [jax.typeof(y) for y in outs]  # the pullback must keep no arrays alive

    def pulled(pull: Any, cts: Sequence[Array | None]) -> list[Array]:
        filled = [zeros_of(x) if ct is None else ct for ct, x in zip(cts, likes, strict=True)]
        with explained(caller), jax.named_scope(DERIVATIVE_SCOPE):
            return [conj(x) for x in pull([conj(ct) for ct in filled])]

    return Evaluation(outs, extras, LinearMap(pulled, pull), nested=bool(nested), checked=False)


def jvp(
    fun: Fun, leaves: list[Array], tangents: list[Array]
) -> tuple[list[Array], list[Array], list[Array]]:
    with _forward(fun, leaves, getattr(fun, "caller", "jvp")):
        outs, pushed, extras = jax.jvp(fun, leaves, tangents, has_aux=True)
    return outs, extras, pushed


@contextmanager
def _forward(fun: Fun, leaves: list[Array], caller: str) -> Iterator[None]:
    """Around forward mode: explains errors."""
    note_derivative()
    _refuse_signs(fun, leaves)
    with explained(caller), jax.named_scope(DERIVATIVE_SCOPE):
        yield


def jvps(
    fun: Fun, leaves: list[Array], many: Sequence[list[Array]]
) -> tuple[list[Array], list[Array], list[list[Array]]]:
    """`jvp` along many tangents, by vmap, with unbatched outputs."""
    if len(many) == 1:
        outs, extras, pushed = jvp(fun, leaves, many[0])
        return outs, extras, [pushed]
    stacked = [jax.numpy.stack(tangents) for tangents in zip(*many, strict=True)]
    each = jax.vmap(lambda *tangents: jvp(fun, leaves, list(tangents)), out_axes=(None, None, 0))
    outs, extras, pushed = each(*stacked)
    return outs, extras, [[x[k] for x in pushed] for k in range(len(many))]


def linearize(
    fun: Fun, leaves: list[Array]
) -> tuple[list[Array], list[Array], Callable[[list[Array]], list[Array]]]:
    """`(outs, extras, pushforward)`. A reverse-only rule raises when the pushforward is called."""
    with _forward(fun, leaves, "linearize"):
        outs, push, extras = jax.linearize(fun, *leaves, has_aux=True)
    return outs, extras, LinearMap(_pushed, push)


def _pushed(push: Any, tangents: list[Array]) -> list[Array]:
    with explained("linearize"):
        return push(*tangents)


@dataclass(frozen=True)
class _TracedFunction:
    """A function of flat arrays that was traced once, and is evaluated from its jaxpr.

    eqns: The jaxpr's equations at any depth.
    """

    closed: Any
    jaxpr: Any
    eqns: list[Any]
    treedef: Any
    out_avals: list[Any]

    def run(self, *leaves: Array) -> Any:
        flat = jax.core.eval_jaxpr(self.jaxpr, self.closed.consts, *leaves)
        full = [y if isinstance(y, jax.Array) else jnp.asarray(y) for y in flat]
        return jax.tree.unflatten(self.treedef, full)

    def of_connected(self, pulled: Sequence[Array | None]) -> list[Array | None]:
        """The gradients of the leaves that reach an output; None for the others."""
        return [g if c else None for g, c in zip(pulled, self.connected, strict=True)]

    @cached_property
    def connected(self) -> list[bool]:
        """For each leaf, whether it reaches an output."""
        rows = reachability.reached_matrix(self.closed)[: len(self.out_avals)]
        return [any(row[i] for row in rows) for i in range(len(self.closed.in_avals))]

    def where_lost(self, index: int) -> list[str]:
        """The operations at which leaf `index` is lost, one for each line."""
        from gradtools.seeing.jax.recorded_run import where_lost

        return where_lost(self.closed, len(self.out_avals), index)

    def refuse_signs(self, fun: Fun) -> None:
        """Raises if a complex sign lies on a path from a leaf to a differentiated output."""
        if not any(map(reachability.is_complex_sign, self.eqns)):
            return
        from gradtools.seeing.graphs.losing_operations import between
        from gradtools.seeing.jax.graphs import graph_of

        graph = graph_of(self.closed)
        shown = replace(graph, outputs=graph.outputs[: len(self.out_avals)])
        # the loss at the sign of a real number is of another kind than "rule"
        is_complex_sign = lambda node: node.native == "sign" and node.loss == "rule"
        for value in graph.inputs:
            for node in between(shown, value, is_complex_sign):
                place = f" at {node.source}" if node.source else ""
                raise GradtoolsError(
                    f"{getattr(fun, 'caller', 'gradtools')}: f takes the sign of complex "
                    f"numbers{place}, whose derivative this version of JAX takes for zero (z / |z| "
                    "turns with z). Write z / jnp.abs(z); or gt.stop_gradient of the sign if it is "
                    "meant to be a constant."
                )

    @cached_property
    def reverse_only(self) -> bool:
        return any(eqn.primitive is reverse_only_p for eqn in self.eqns)

    @cached_property
    def nested(self) -> bool:
        """Whether the function takes a derivative itself."""
        return is_in_scope(self.eqns, DERIVATIVE_SCOPE)


_here = threading.local()


def note_derivative() -> None:
    for nested in _here.__dict__.get("open", ()):
        nested[:] = [True]


@contextmanager
def _watched() -> Iterator[list[bool]]:
    """Around a function's evaluation: yields a list that stays empty if f takes no derivative."""
    around = _here.__dict__.setdefault("open", [])
    around.append([])
    try:
        yield around[-1]
    finally:
        around.pop()


def _traced(fun: Fun, leaves: list[Array]) -> _TracedFunction | None:
    """fun as a jaxpr; None if it branches on values or leaves the framework.

    The jaxpr is evaluated afterwards, so that the user's function runs once. If tracing fails, the
    function runs again, and its Python side effects up to the failure happen twice.
    """
    try:
        closed, shapes = jax.make_jaxpr(fun, return_shape=True)(*leaves)
    except _UNTRACEABLE:
        return None
    jaxpr, eqns = jaxprs.open_jaxpr(closed), [*jaxprs.equations(closed)]
    outs = closed.out_avals[: len(shapes[0])]
    return _TracedFunction(closed, jaxpr, eqns, jax.tree.structure(shapes), outs)


# --- the sign of complex numbers ----------------------------------------------------------
#
# The differential of s = z / |z| is ds = i s Im(conj(s) dz) / |z|. JAX up to version 0.10 has the
# rule of a real sign, so every path through a complex sign is missing in the gradient, without an
# error. Such a function is refused.

_signless: WeakKeyDictionary[Callable[..., Any], set[Any]] = WeakKeyDictionary()
"""The shapes and dtypes at which a user's function takes no complex sign, or cannot be traced."""


def _refuse_signs(fun: Fun, leaves: list[Array]) -> None:
    """Raises if a derivative passes through the sign of complex numbers.

    For this a user's function is traced only at complex inputs, and once.
    """
    is_complex = isinstance(fun, Call) and any(map(jnp.iscomplexobj, leaves))
    if is_complex and not _takes_no_sign(fun, leaves):
        _refusing_signs(fun, leaves)


def _refusing_signs(fun: Fun, leaves: list[Array]) -> _TracedFunction | None:
    """`_traced`; raises if the function takes a complex sign, else records that it does not."""
    traced = _traced(fun, leaves)
    if traced is not None:
        traced.refuse_signs(fun)
    with suppress(AttributeError, TypeError):  # f has no weak reference, or no hash
        _signless.setdefault(fun.f, set()).add(avals_of(leaves))  # type: ignore[attr-defined]
    return traced


def _takes_no_sign(fun: Any, leaves: list[Array]) -> bool:
    """Whether f is known to take no complex sign at these shapes, or JAX has the rule."""
    if not reachability.complex_sign_is_a_step():
        return True
    try:
        return avals_of(leaves) in _signless.get(fun.f, ())
    except (AttributeError, TypeError):
        return False
