"""How a rule enters JAX: three primitives that turn into each other.

JAX lets a function have a forward rule or a reverse rule, not both (jax#3996). Three primitives
of our own have both, because differentiation and transposition only exchange them:

    primal     y = f(x)             its jvp binds primal and tangent
    tangent    dy = J(x) dx         linear in dx; its transpose is cotangent
    cotangent  x' = J(x)^T y'       linear in y'; its transpose is tangent

A rule is *linearized* when it is first differentiated: what its maps read becomes known, and a
missing map is made from the other one. The primal primitive then also gives the extras that
they read; their derivative is that of the code that made them, while an output's derivative is
the rule at every order. The jvp of the linear primitives is that of the Python maps. A
primitive's rule, unlike `custom_jvp`'s, survives scan, cond, remat and jit. A fourth one,
evaluation, holds a whole forward pass of rules that say so (`remat`): where its extras are not
used, as before a recomputation, the primal takes its place.

JAX's cotangents are the conjugates of gradtools'. A linearized rule speaks JAX's language; the
conversion is in `_native` and nowhere else.

The linear primitives take what the maps read, then those tangents (or cotangents) that are not
zero; the static masks `given` and `wanted` say which these are and which ones are asked for,
and `outs` what comes out.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.jet import jet_rules
from jax.interpreters import ad, batching, mlir
from jax.interpreters import partial_eval as pe

from gradtools.errors import GradtoolsError, NotImplementedRefusal, is_of, refusal, warn
from gradtools.jax import homogeneous, shardings, tracing
from gradtools.jax._upstream import Primitive
from gradtools.jax.lifetimes import LIFE, MortalPrimitive, mortal, remembered
from gradtools.jax.trees import conj, is_inexact, zeros_of
from gradtools.linearity import is_linear
from gradtools.rules import (
    KEYS,
    Entries,
    Linearized,
    Rule,
    batched,
    closes_over,
    saved_from,
    spread,
)

if TYPE_CHECKING:
    from gradtools.contract import Contract

Mask = tuple[bool, ...]
_local = threading.local()


def _local_list(what: str) -> list[Any]:
    """The rules whose maps are being lifted, or linearized, by this thread right now."""
    return _local.__dict__.setdefault(what, [])


@contextmanager
def _within(stack: list[Any], entry: Any) -> Iterator[None]:
    stack.append(entry)
    try:
        yield
    finally:
        stack.pop()


_NOT_LINEAR = (NotImplementedError, TypeError, ValueError, AssertionError)


def apply_rule(rule: Rule, *xs: Any) -> list[Any]:
    """`rule.primal(*xs)`, differentiated by the rule in every mode, at every order."""
    xs = varying_alike([_as_array(x) for x in xs])
    if rule.reverse_only:
        return _apply_reverse_only(rule, xs)
    if rule.captures and _closes_over_tracer(rule):
        rule, captured = (
            _lift_value(rule, xs) if rule in _local_list("lifting") else _lift_captured(rule, xs)
        )
        xs = varying_alike([*xs, *captured])
    return list(primal_p.bind(*xs, rule=rule))


def _as_array(x: Any) -> Any:
    """x; a number, or a tracer that may stand for one, as an array, which costs an operation."""
    return x if isinstance(x, jax.Array) and not jax.typeof(x).weak_type else jnp.asarray(x)


def varying_alike(xs: Sequence[Any]) -> list[Any]:
    """Under shard_map, all inputs varying over the same mesh axes.

    The derivative of that is the sum over the axes, which the cotangent of an input that does
    not vary needs.
    """
    union = frozenset().union(*map(_varies, xs))
    return [varying(x, union) for x in xs] if union else list(xs)


def varying(x: Any, axes: frozenset[Any]) -> Any:
    """x, typed as varying over these mesh axes too."""
    missing = axes - _varies(x)
    return jax.lax.pcast(x, tuple(sorted(missing)), to="varying") if missing else x


def _varies(x: Any) -> frozenset[Any]:
    """The mesh axes over which x is typed as different."""
    return frozenset(jax.typeof(x).manual_axis_type.varying)


@jax.custom_jvp
def _with_varying_tangent(x: Any) -> Any:
    """x; its tangent varies as it does. A jaxpr that is evaluated again relies on that."""
    return x


@_with_varying_tangent.defjvp
def _(primals: Any, tangents: Any) -> Any:
    (x,), (dx,) = primals, tangents
    return _with_varying_tangent(x), varying(dx, _varies(x))


# --- a rule at its first derivative ------------------------------------------------------


def _linearized(rule: Rule, xs: Sequence[Any], given: Mask | None = None) -> Rule:
    """The rule with both maps, and with what they read made explicit.

    Its maps are JAX's own: conjugated, with cotangents and tangents of floating outputs alone.

    given: Which inputs are differentiated, for a rule that wants to know (`symbolic`); the maps
        then hold for these.
    """
    if rule.forward is not None:
        return rule
    with _within(_local_list("linearizing"), rule.contract or rule):
        return _linearized_now(rule, xs, given if rule.symbolic else None)


def _linearized_now(rule: Rule, xs: Sequence[Any], given: Mask | None) -> Rule:
    _hold(rule, xs, given)
    found: list[Linearized] = []

    def forward(*xs: Any) -> list[Any]:
        made = _maps_at(rule, xs, given)
        found[:] = [_without_arrays(made)]  # tracers would leak
        return [*made.ys, *made.extras]

    closed = _traced(rule, forward, [jax.typeof(x) for x in xs])
    run = lambda *xs: jax.core.eval_jaxpr(closed.jaxpr, closed.consts, *xs)
    return _for_given(rule, rule.linearized(found[0], run), given)


def _traced(rule: Rule, fun: Callable[..., Any], at: Sequence[Any]) -> Any:
    """The jaxpr of what the author of a rule wrote."""
    try:
        return jax.make_jaxpr(fun)(*at)
    except _READS_A_VALUE as error:
        if rule.contract is None:
            raise
        raise refusal(error, f"{rule.contract.name}: {_IS_TRACED} JAX says: {error}") from error


_READS_A_VALUE = (jax.errors.ConcretizationTypeError, jax.errors.TracerArrayConversionError)
_IS_TRACED = (
    "its rule reads the value of an array (a Python if or while, bool(), float(), NumPy) where it "
    "is traced, as it is under jit, vmap, in loops and at second order. Use jax.numpy.where or "
    "jax.lax.cond; pass what selects the program by static_argnames; take NumPy code into the "
    "program by host_function."
)


def _evaluated_now(rule: Rule, xs: Sequence[Any], given: Mask | None) -> Any:
    """The outputs and extras where all inputs are known, and the maps: nothing is traced."""
    given, found = given if rule.symbolic else None, []

    def evaluate(*xs: Any) -> list[Any]:
        made = _maps_at(rule, xs, given)
        found[:] = [_without_arrays(made)]
        return _outputs_of(made)

    with _within(_local_list("linearizing"), rule.contract or rule):
        told = _hold(rule, xs, given)
        out = _under_the_trace(evaluate, xs)
        if not told:
            _hold_evaluated(rule, xs, found[0], out)
    again = lambda *xs: _outputs_of(_maps_at(rule, xs, given))
    return out, _for_given(rule, rule.linearized(found[0], again), given)


def _under_the_trace(fun: Callable[..., list[Any]], xs: Sequence[Any]) -> list[Any]:
    """`fun(*xs)` of numbers, outside of the linearization that is under way.

    Of each jitted function that is called within a trace JAX keeps an entry for that trace, when
    it is long over. To a `custom_jvp` it hands what it knows under the trace, where nothing is
    differentiated with respect to xs.
    """
    if isinstance(jax.lax.neg(0.0), jax.core.Tracer):  # a program is being traced
        return fun(*xs)
    under = jax.custom_jvp(fun)
    under.defjvp(_of_numbers)
    return list(under(*xs))


def _of_numbers(xs: Any, dxs: Any) -> Any:
    raise AssertionError("numbers have no tangents")


def _outputs_of(made: Linearized) -> list[Any]:
    return [*made.ys, *made.extras]


def _without_arrays(made: Linearized) -> Linearized:
    return replace(made, ys=[], extras=[None] * len(made.extras))


def _for_given(rule: Rule, maps: Rule, given: Mask | None) -> Rule:
    if given is None:
        return maps
    return replace(maps, perturbed=given, whole=rule, key=next(KEYS))


def _maps_at(rule: Rule, xs: Sequence[Any], given: Mask | None) -> Linearized:
    jointly = rule.joint is not None and rule.linearize is None
    made = _split(rule, xs, given) if jointly else None
    return made or _native(rule, rule.at(*xs, perturbed=given), xs, given)


def _known(xs: Sequence[Any]) -> bool:
    return not any(isinstance(x, jax.core.Tracer) for x in xs)


def _hold(rule: Rule, xs: Sequence[Any], given: Mask | None) -> bool:
    """Holds the maps that its author wrote to being zero at zero; see `contract`.

    Returns False where a cotangent map with kernels is to be held after the forward pass.
    """
    contract = rule.contract
    if contract is None:
        return True
    if rule.joint is not None:
        looks = (_looks(xs), given)
        contract.ask("tangent", looks, of=lambda: _hold_tangent(contract, rule, xs, given))
    if rule.linearize is not None and rule.fills("cotangent"):
        return contract.ask("cotangent", _looks(xs), of=lambda: _hold_cotangent(contract, rule, xs))
    return True


def _hold_evaluated(rule: Rule, xs: Sequence[Any], maps: Linearized, out: Sequence[Any]) -> None:
    """The same of a cotangent map with kernels, after the forward pass, which runs once."""
    contract, cotangent = rule.contract, maps.cotangent
    assert contract is not None and cotangent is not None
    saved = saved_from(maps.saves, xs, out)
    zeros = [*map(zeros_of, _present(_likes(out[: len(out) - len(maps.extras)])))]

    def check() -> bool:
        pulled = _under_the_trace(lambda *saved: cotangent(saved, zeros), saved)
        if not _known(pulled):  # mapped over, though the arguments are not
            return False
        wrong = homogeneous.nonzero_at([np.zeros(()) if x is None else x for x in pulled])
        if wrong is not None:
            raise contract.not_zero("cotangent", wrong)
        return True

    contract.ask("cotangent", _looks(xs), of=check)


def _looks(xs: Sequence[Any]) -> Any:
    return tuple([(aval.shape, str(aval.dtype)) for aval in map(jax.typeof, xs)])


def _hold_tangent(contract: Contract, rule: Rule, xs: Sequence[Any], given: Mask | None) -> bool:
    """Returns False where it cannot be told yet, for a kernel has no numbers."""
    full_like, places = _likes(xs), []

    def push(xs: Any, dxs: Any) -> list[Any]:
        assert rule.joint is not None
        full = spread(dxs, moving)
        dys = rule.joint(xs, _filled(full, full_like) if rule.fills("tangent") else full)[1]
        places[:] = [i for i, dy in enumerate(dys) if dy is not None]
        return _present(dys)

    moving = _moving(rule, full_like, given)
    likes = [like for like, m in zip(full_like, moving, strict=True) if m]
    try:
        closed = jax.make_jaxpr(push)([jax.typeof(x) for x in xs], likes)
    except _READS_A_VALUE:
        known = _known(xs)
        wrong = homogeneous.nonzero_at(push(xs, [*map(zeros_of, likes)])) if known else None
        if wrong is not None:
            raise contract.not_zero("tangent", places[wrong]) from None
        return True
    mask = [False] * len(xs) + [True] * len(likes)
    wrong, told = homogeneous.first_nonzero(closed, mask, [*xs, *likes])
    if wrong is not None:
        raise contract.not_zero("tangent", places[wrong])
    lost = homogeneous.lost_input(closed, mask)
    if lost is not None:
        contract.losing[_looks(xs)] = [i for i, m in enumerate(moving) if m][lost]
    return told


def _hold_cotangent(contract: Contract, rule: Rule, xs: Sequence[Any]) -> bool:
    places: list[int] = []

    def pull(*xs: Any) -> list[Any]:
        found = rule.at(*xs)
        assert found.cotangent is not None
        cts = [None if like is None else zeros_of(like) for like in _likes(found.ys)]
        if not _present(cts):
            return []
        everything = [*xs, *found.ys, *found.extras]
        pulled = found.cotangent([everything[i] for i in found.saves], cts)
        places[:] = [i for i, ct in enumerate(pulled) if ct is not None]
        return _present(pulled)

    try:
        closed = jax.make_jaxpr(pull)(*[jax.typeof(x) for x in xs])
        wrong, told = homogeneous.first_nonzero(closed, [False] * len(xs), xs, kernels=False)
    except _READS_A_VALUE:
        wrong, told = homogeneous.nonzero_at(pull(*xs)) if _known(xs) else None, True
    if wrong is not None:
        raise contract.not_zero("cotangent", places[wrong])
    return told


def _likes(xs: Sequence[Any]) -> list[Any]:
    """What each array looks like; None for one that is not differentiated."""
    avals = [jax.typeof(x) for x in xs]
    return [aval.update(weak_type=False) if is_inexact(aval) else None for aval in avals]


def _present(xs: Sequence[Any]) -> list[Any]:
    return [x for x in xs if x is not None]


def _hold_transposed(rule: Rule, looks: Any, pull: Any, likes: Sequence[Any]) -> None:
    """Whether bwd keeps all of its cotangents when it is transposed."""
    contract = rule.contract
    if contract is None:
        return

    def transposed() -> None:
        closed = jax.make_jaxpr(pull)(*map(zeros_of, likes))
        lost = homogeneous.lost_input(closed, [True] * len(likes))
        if lost is not None:
            raise contract.lost("cotangent", lost)

    contract.ask("transposed", looks, of=transposed)


def _native(
    rule: Rule, found: Linearized, xs: Sequence[Any], given: Mask | None = None
) -> Linearized:
    """The maps of one evaluation as JAX's own; a missing one is the other's transpose."""
    given_tangent, given_cotangent = found.tangent, found.cotangent
    like_xs, like_ys, looks = _likes(xs), _likes(found.ys), _looks(xs)
    inexact = [like is not None for like in like_ys]
    moving = _moving(rule, like_xs, given)

    def tangent(saved: Entries, dxs: Entries) -> list[Any]:
        if given_tangent is None:
            return transposed_cotangent(saved, dxs)
        if rule.fills("tangent"):
            dxs = _filled(dxs, like_xs)
        pairs = zip(given_tangent(saved, dxs), like_ys, strict=True)
        return [_checked(rule, "tangent", dy, like) for dy, like in pairs if like is not None]

    def cotangent(saved: Entries, cts: Entries) -> list[Any]:
        if given_cotangent is None:
            return transposed_tangent(saved, cts)
        if rule.fills("cotangent"):
            cts = _filled(cts, _present(like_ys))
        conjugated = spread([None if ct is None else conj(ct) for ct in cts], inexact)
        pairs = zip(given_cotangent(saved, conjugated), like_xs, strict=True)
        return [
            None if like is None else conj(_checked(rule, "cotangent", ct, like))
            for ct, like in pairs
        ]

    def transposed_cotangent(saved: Entries, dxs: Entries) -> list[Any]:
        def pull(*cts: Any) -> list[Any]:
            found = zip(cotangent(saved, cts), dxs, strict=True)
            return [ct for ct, dx in found if dx is not None]

        _hold_transposed(rule, looks, pull, _present(like_ys))
        return _transpose(rule, "cotangent", pull, _present(like_ys), _present(dxs))

    def transposed_tangent(saved: Entries, cts: Entries) -> list[Any]:
        if rule.contract is not None and looks in rule.contract.losing:
            raise rule.contract.lost("tangent", rule.contract.losing[looks])

        def push(*dxs: Any) -> list[Any]:
            return tangent(saved, spread(dxs, moving))

        examples = [like for like, m in zip(like_xs, moving, strict=True) if m]
        full = _filled(cts, _present(like_ys))
        return spread(_transpose(rule, "tangent", push, examples, full), moving)

    return replace(found, tangent=tangent, cotangent=cotangent)


def _plain_maps(rule: Rule, xs: Sequence[Any], ys: Sequence[Any]) -> Rule:
    """The maps of a rule that needs no evaluation to have them.

    They depend on what the arrays look like alone, and are kept with the rule: JAX compiles a
    primitive for each rule that it is bound with, and would compile and keep each call's own.
    """
    looks = tuple(jax.typeof(x) for x in (*xs, *ys))

    def make() -> Rule:
        made = _native(rule, rule.reading(xs, ys), xs)
        return rule.linearized(replace(made, ys=[], extras=[]), rule.primal)

    return remembered(rule, ("maps", looks), make)


def _moving(rule: Rule, likes: Sequence[Any], given: Mask | None) -> list[bool]:
    """Which inputs are differentiated."""
    return [
        like is not None and i not in rule.passive and (given is None or given[i])
        for i, like in enumerate(likes)
    ]


def _would_lose(rule: Rule, xs: Sequence[Any], push: Any, likes: Sequence[Any]) -> bool:
    """Whether a forward rule's map may not be transposed twice.

    An unchecked one is looked at here: in its own mode it stays as its author wrote it.
    """
    contract = rule.contract
    if contract is None:
        return False
    if contract.check != "never":
        return _looks(xs) in contract.losing
    try:
        closed = jax.make_jaxpr(push)(*map(zeros_of, likes))
    except _READS_A_VALUE:
        return True
    zero = [True] * len(likes)
    lost = homogeneous.lost_input(closed, zero)
    return lost is not None or not all(homogeneous.proved_zero(closed, zero))


def _split(rule: Rule, xs: Sequence[Any], given: Mask | None = None) -> Linearized | None:
    """A rule that gives values and tangents at once, parted into what x decides and the rest.

    The first part is the forward pass, and what it leaves for the second are the extras.
    Transposing runs whatever does not depend on a tangent, so transposing twice parts them.
    """
    full_like = _likes(xs)
    mask = _moving(rule, full_like, given)
    like_xs = [like for like, m in zip(full_like, mask, strict=True) if m]
    ys: list[Any] = []
    staged: list[bool] = []

    def push(*dxs: Any) -> list[Any]:
        assert rule.joint is not None
        full = spread(dxs, mask)
        ys[:], dys = rule.joint(xs, _filled(full, full_like) if rule.fills("tangent") else full)
        kinds = {type(dx) for dx in dxs if isinstance(dx, jax.core.Tracer)}
        staged[:] = [type(y) in kinds for y in ys]  # a value in the program of its tangent
        pairs = zip(dys, _likes(ys), strict=True)
        return [_checked(rule, "tangent", dy, like) for dy, like in pairs if like is not None]

    if any(_varies(x) for x in xs):
        return None
    if _would_lose(rule, xs, push, like_xs):
        return None
    try:
        pull = jax.linear_transpose(push, *map(_shape, like_xs))
        if any(staged):
            return None
        like_ys = _present(_likes(ys))
        hoisted, consts = hoist(lambda *cts: list(pull(list(cts))), *map(zeros_of, like_ys))
    except _READS_A_VALUE:
        raise
    except _NOT_LINEAR:
        return None  # forward mode needs no transpose; reverse mode will say why there is none

    follows = [isinstance(c, jax.core.Tracer) for c in consts]
    extras = [c for c, f in zip(consts, follows, strict=True) if f]
    fixed = [None if f else c for c, f in zip(consts, follows, strict=True)]  # outlives a trace

    def back(saved: Entries, *cts: Any) -> list[Any]:
        new = iter(saved)
        return hoisted([next(new) if f else c for c, f in zip(fixed, follows, strict=True)], *cts)

    def tangent(saved: Entries, dxs: Entries) -> list[Any]:
        full = _filled([dx for dx, m in zip(dxs, mask, strict=True) if m], like_xs)
        return _transpose(rule, "tangent", lambda *cts: back(saved, *cts), like_ys, full)

    def cotangent(saved: Entries, cts: Entries) -> list[Any]:
        return spread(back(saved, *_filled(cts, like_ys)), mask)

    places = {id(x): i for i, x in reversed(list(enumerate([*xs, *ys])))}
    own = list({id(c): c for c in extras if id(c) not in places}.values())
    places |= {id(c): len(xs) + len(ys) + k for k, c in enumerate(own)}
    return Linearized(list(ys), own, tuple([places[id(c)] for c in extras]), tangent, cotangent)


def _shape(aval: Any) -> Any:
    sharding = aval.sharding if any(shardings.entries(aval)) else None
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype, sharding=sharding)


def _filled(values: Sequence[Any], likes: Sequence[Any]) -> list[Any]:
    """`values` with zeros for None, where there is something to be zero."""
    pairs = zip(values, likes, strict=True)
    return [zeros_of(like) if v is None and like is not None else v for v, like in pairs]


def _checked(rule: Rule, which: str, value: Any, like: Any) -> Any:
    """A zero for None; an error where a map's result does not have the shape it must have."""
    if value is None:
        return zeros_of(like)
    if jnp.shape(value) != tuple(like.shape):
        raise GradtoolsError(
            f"rule {rule.name!r}: its {which} map returned shape {jnp.shape(value)}, "
            f"expected {tuple(like.shape)}, that of what it belongs to."
        )
    return jnp.asarray(value, like.dtype)


# --- the map that was not given ----------------------------------------------------------


def _transpose(rule: Rule, which: str, linear: Any, examples: Any, values: Any) -> list[Any]:
    """The transpose of `linear` (shaped like `examples` to `values`), applied to `values`."""
    try:
        if any(_varies(v) for v in values):
            return _transposed_by_vjp(linear, examples, values)
        return list(jax.linear_transpose(linear, *map(_shape, examples))(list(values)))
    except _READS_A_VALUE:
        raise
    except _NOT_LINEAR as error:
        if not is_of("jax", error):
            raise
        raise GradtoolsError(
            f"rule {rule.name!r}: the other mode was to follow by transposing its {which} map, "
            f"but JAX cannot transpose it: a {which} map must be linear in its {which}s. "
            f"Give the missing map as well, or make this one linear. JAX says: {error}"
        ) from error


def _transposed_by_vjp(linear: Any, examples: Any, values: Any) -> list[Any]:
    """Under shard_map with check_vma=True jax.linear_transpose has no types for its inputs.

    The pullback of a linear map is its transpose, anywhere; that it is the same everywhere is
    read from the jaxpr.
    """
    axes = frozenset().union(*map(_varies, values))
    zeros = [varying(zeros_of(e), axes) for e in examples]

    def pulled(at: Any, cts: Any) -> Any:
        return jax.vjp(lambda *v: linear(*v), *at)[1](cts)

    if not _is_one_kernel(linear, zeros):
        flow = tracing.raw_matrix(jax.make_jaxpr(pulled)(zeros, list(values)))
        if any(any(row[: len(zeros)]) for row in flow):
            raise ValueError("its derivative depends on where it is taken")
    return list(pulled(zeros, list(values)))


def _is_one_kernel(linear: Any, zeros: Sequence[Any]) -> bool:
    """Whether the map is the backward pass of a host function: numbers say if it is linear."""
    closed = jax.make_jaxpr(lambda *v: linear(*v))(*zeros)
    eqns = [e for e in closed.jaxpr.eqns if e.primitive.name != "pvary"]
    if [e.primitive for e in eqns] != [primal_p] or eqns[0].params["rule"].source is None:
        return False
    moving = tuple([v not in closed.jaxpr.constvars for v in eqns[0].invars])
    likes = [zeros_of(v.aval.update(weak_type=False)) for v in eqns[0].invars]
    _check_linear(eqns[0].params["rule"], likes, moving)
    return True


def transpose(
    rule: Rule, which: str, linear: Any, at: Sequence[Any], examples: Any, values: Any
) -> list[Any]:
    """The transpose of `vs -> linear(at, *vs)` in gradtools' convention, at `values`."""

    def own(*vs: Any) -> list[Any]:
        return [conj(y) for y in linear(at, *map(conj, vs))]

    return _transpose(rule, which, own, [jax.typeof(x) for x in examples], values)


def pull(fun: Callable[..., list[Any]], xs: Sequence[Any], cts: Any) -> list[Any]:
    """The pullback of `fun` at xs, of `cts` (None: zero), or of what they give at the outputs."""
    known = [] if callable(cts) else _present(cts)
    axes = frozenset().union(*map(_varies, [*xs, *known]))
    outs, pullback = jax.vjp(lambda *a: list(fun(*a)), *[varying(x, axes) for x in xs])
    pairs = zip(outs, cts(outs) if callable(cts) else cts, strict=True)
    full = [jnp.zeros_like(y) if ct is None else conj(varying(ct, axes)) for y, ct in pairs]
    return [conj(x) for x in pullback(full)]


def push(fun: Callable[..., list[Any]], xs: Sequence[Any], dxs: Sequence[Any]) -> list[Any]:
    """The pushforward of `fun` at xs, of `dxs`."""
    return value_and_push(fun, xs, dxs)[1]


def value_and_push(
    fun: Callable[..., list[Any]], xs: Sequence[Any], dxs: Sequence[Any]
) -> tuple[list[Any], list[Any]]:
    """The outputs and the pushforward, of one evaluation."""
    return jax.jvp(lambda *a: list(fun(*a)), tuple(xs), tuple(dxs))


def attempt(fun: Callable[..., list[Any]], *xs: Any) -> list[Any]:
    """`fun(*xs)`, raising now what else would be raised when the derivatives in it are run."""
    closed = jax.make_jaxpr(fun)(*xs)
    _check_runs(closed)
    return list(jax.core.eval_jaxpr(closed.jaxpr, closed.consts, *xs))


def _check_runs(closed: Any) -> None:
    def expand(eqn: Any) -> bool:
        derived = eqn.primitive is not primal_p or eqn.params["rule"].source is not None
        if eqn.primitive in (tangent_p, cotangent_p, primal_p) and derived:
            avals = [v.aval for v in eqn.invars]
            _check_runs(jax.make_jaxpr(partial(eqn.primitive.impl, **eqn.params))(*avals))
        return False

    tracing.uses_primitive(closed, expand)


# --- the primitives ----------------------------------------------------------------------


def _arrays(xs: Sequence[Any]) -> list[Any]:
    """The same with arrays for numbers, which JAX hands on as they were given."""
    return [x if hasattr(x, "shape") else jnp.asarray(x) for x in xs]


def _promoting(rule: Rule) -> Any:
    """An edit's own arithmetic, a real scale times a complex cotangent, however strict JAX is."""
    return jax.numpy_dtype_promotion("standard") if rule.identity else nullcontext()


def _primal(*xs: Any, rule: Rule) -> list[Any]:
    return list(rule.primal(*_arrays(xs)))


def _evaluation(*xs: Any, rule: Rule) -> list[Any]:
    """Outputs and extras in one, so that both are dropped or recomputed together."""
    return _forward(rule, _arrays(xs))


def _value(*operands: Any, rule: Rule, xs: int) -> list[Any]:
    return list(operands[xs : len(operands) - rule.extras])


def _tangent(*operands: Any, rule: Rule, given: Mask, ys: Any) -> list[Any]:
    n, operands = len(operands) - sum(given), tuple(_arrays(operands))
    assert rule.tangent is not None
    with _promoting(rule):
        return rule.tangent(operands[:n], spread(operands[n:], given))


def _cotangent(*operands: Any, rule: Rule, given: Mask, wanted: Mask, xs: Any, ys: Any) -> Any:
    n, operands = len(operands) - sum(given), tuple(_arrays(operands))

    def run(*operands: Any) -> list[Any]:
        assert rule.cotangent is not None
        with _promoting(rule):
            found = rule.cotangent(operands[:n], spread(operands[n:], given))
        return [ct for ct, w in zip(found, wanted, strict=True) if w]

    return run(*operands) if rule.flow is None else _without_the_rest(run, operands)


def _without_the_rest(run: Callable[..., list[Any]], operands: Sequence[Any]) -> list[Any]:
    """`run(*operands)` without the equations of which no result is used.

    Under jit XLA leaves them out; outside nobody else would.
    """
    closed = jax.make_jaxpr(run)(*operands)
    used, kept = set(map(id, closed.jaxpr.outvars)), []
    for eqn in reversed(closed.jaxpr.eqns):
        if eqn.effects or any(id(v) in used for v in eqn.outvars):
            kept.append(eqn)
            used.update(map(id, eqn.invars))
    return jax.core.eval_jaxpr(closed.jaxpr.replace(eqns=kept[::-1]), closed.consts, *operands)


def _define(name: str, run: Callable[..., list[Any]], abstract: Callable[..., Any]) -> Primitive:
    primitive = MortalPrimitive(name, "rule")
    primitive.def_impl(mortal(run))
    primitive.def_abstract_eval(mortal(abstract))
    mlir.register_lowering(primitive, mlir.lower_fun(mortal(run), multiple_results=True))
    return primitive


def _traced_outs(run: Callable[..., list[Any]]) -> Callable[..., Any]:
    def abstract(*avals: Any, **params: Any) -> list[Any]:
        # `make_jaxpr`, not `eval_shape`: its avals keep weak types and, under shard_map, the
        # axes over which a value varies.
        return list(_jaxpr(run, tuple(avals), params).out_avals)

    return abstract


def _jaxpr(run: Any, avals: tuple[Any, ...], params: dict[str, Any]) -> Any:
    params = {name: value for name, value in params.items() if name != LIFE}
    key = tuple([item for item in params.items() if item[0] != "rule"])
    make = lambda: jax.make_jaxpr(lambda *xs: run(*xs, **params))(*avals)
    return remembered(params["rule"], (run, avals, key), make)


primal_p = _define("gradtools_primal", _primal, _traced_outs(_primal))
evaluation_p = _define("gradtools_evaluation", _evaluation, _traced_outs(_evaluation))
value_p = _define("gradtools_value", _value, _traced_outs(_value))
tangent_p = _define("gradtools_tangent", _tangent, lambda *operands, ys, **_: list(ys))
cotangent_p = _define("gradtools_cotangent", _cotangent, lambda *operands, xs, **_: list(xs))


def _flowing(*operands: Any, rule: Rule, xs: int | None = None) -> list[Any]:
    assert rule.flow is not None
    return list(rule.flow(*operands[:xs]))


def _flow(run: Callable[..., list[Any]]) -> Callable[[Any], Any]:
    """For `tracing`: the jaxpr of an equation of a primitive, if its rule's data flow counts."""

    def flow(eqn: Any) -> Any:
        if eqn.params["rule"].flow is None:
            return None
        return _jaxpr(run, tuple([v.aval for v in eqn.invars]), eqn.params)

    return flow


primal_p.gradtools_flow = value_p.gradtools_flow = _flow(_flowing)
tangent_p.gradtools_flow, cotangent_p.gradtools_flow = _flow(_tangent), _flow(_cotangent)


def _program(run: Callable[..., list[Any]]) -> Callable[[Any], Any]:
    """For `homogeneous`: the jaxpr of what an equation of a primitive computes."""
    return lambda eqn: _jaxpr(run, tuple([v.aval for v in eqn.invars]), eqn.params)


primal_p.gradtools_program = _program(_primal)
evaluation_p.gradtools_program = _program(_evaluation)
tangent_p.gradtools_program, cotangent_p.gradtools_program = (
    _program(_tangent),
    _program(_cotangent),
)


def _primal_jvp(xs: Any, dxs: Any, *, rule: Rule) -> tuple[list[Any], list[Any]]:
    given, xs = _given(rule, dxs), _arrays(xs)
    if not any(given):
        ys = primal_p.bind(*xs, rule=rule)
        return ys, [_zero(y) for y in ys]
    if rule.unlifted is not None:
        n = len(xs) - len(rule.closed_over)
        rule, captured = _lift_captured(rule.unlifted, xs[:n])
        xs, dxs = [*xs[:n], *captured], [*dxs[:n], *map(_zero, captured)]
        given = (*given[:n], *[False] * len(captured))
    ys, maps, saved = _evaluated(rule, xs, given)
    return ys, _pushed(maps, ys, saved, dxs, given)


def _evaluation_jvp(xs: Any, dxs: Any, *, rule: Rule) -> tuple[list[Any], list[Any]]:
    """The rule for the outputs; extras are differentiated through the code that made them."""
    given, out = _given(rule, dxs), evaluation_p.bind(*xs, rule=rule)
    if not any(given):
        return out, [_zero(y) for y in out]
    n = len(out) - rule.extras
    dys = _pushed(rule, out[:n], rule.saved(xs, out[:n], out[n:]), dxs, given)
    run = lambda *xs, rule: _forward(rule, xs)[n:]
    tangents = [dx if g else _zero(x) for x, dx, g in zip(xs, dxs, given, strict=True)]
    return out, [*dys, *_moved(run, xs, tangents, {"rule": rule})[1]]


def _evaluation_dce(used: list[bool], *live_and_eqn: Any) -> tuple[list[bool], Any]:
    """Where no extra is used, as in a forward pass that will be recomputed, f takes fwd's place.

    JAX 0.12 says before the equation which inputs are alive.
    """
    eqn = live_and_eqn[-1]
    n = len(used) - eqn.params["rule"].extras
    if not any(used):
        return [False] * len(eqn.invars), None
    if not any(used[n:]):
        eqn = eqn.replace(primitive=primal_p, outvars=eqn.outvars[:n])
    return [True] * len(eqn.invars), eqn


def _value_jvp(operands: Any, tangents: Any, *, rule: Rule, xs: int) -> Any:
    """The rule, whatever code made the values."""
    given = _given(rule, tangents[:xs])
    if rule.whole is not None and rule.perturbed is not None:
        wanted = tuple([g or p for g, p in zip(given, rule.perturbed, strict=True)])
        if wanted != rule.perturbed:  # its maps know nothing of some input
            ys, maps, saved = _evaluated(rule.whole, operands[:xs], wanted)
            return ys, _pushed(maps, ys, saved, tangents[:xs], given)
    ys = value_p.bind(*operands, rule=rule, xs=xs)
    if not any(given):
        return ys, [_zero(y) for y in ys]
    saved = rule.saved(operands[:xs], ys, operands[xs + len(ys) :])
    return ys, _pushed(rule, ys, saved, tangents[:xs], given)


def _given(rule: Rule, dxs: Any) -> Mask:
    given = tuple([_carries(dx) and i not in rule.passive for i, dx in enumerate(dxs)])
    if any(given[i] for i in rule.closed_over):
        raise _closed_over_error(rule)
    return given


def _pushed(maps: Rule, ys: Any, saved: Any, dxs: Any, given: Mask) -> list[Any]:
    axes = frozenset().union(*map(_varies, ys))
    moving = [varying(dx, axes) for dx, g in zip(dxs, given, strict=True) if g]
    params = {"rule": maps, "given": given, "ys": tuple(_present(_likes(ys)))}
    zero = _symbolically_zero([*saved, *moving], params)
    found = iter(tangent_p.bind(*saved, *moving, **params))
    dys = iter([_zero(dy) if z else dy for dy, z in zip(found, zero, strict=True)])
    return [next(dys) if is_inexact(y) else _zero(y) for y in ys]


def _symbolically_zero(operands: Sequence[Any], params: dict[str, Any]) -> list[bool]:
    """Which tangents are zero whatever the others are; asked of rules that can tell alone."""
    if "tangent" not in params["rule"].symbolic:
        return [False] * len(params["ys"])
    closed = _jaxpr(_tangent, tuple(map(jax.typeof, operands)), params)
    return homogeneous.proved_zero(closed, [False] * len(operands))


def _evaluated(rule: Rule, xs: Any, given: Mask | None = None) -> tuple[list[Any], Rule, list[Any]]:
    """The outputs, the rule's maps, and what these read.

    What the forward pass does is part of the program around it: a loop keeps what no step of it
    changes once, and extras are differentiated like anything else. Its outputs are handed on by
    a primitive, for their derivative is the rule.
    """
    if rule.linearize is None and rule.joint is None and rule.forward is None:
        ys = primal_p.bind(*xs, rule=rule)
        maps = _plain_maps(rule, xs, ys)
        return ys, maps, maps.saved(xs, ys)
    if rule.forward is None and _known(xs):
        out, maps = _evaluated_now(rule, xs, given)
    else:
        maps = _linearized(rule, xs, given)
        if maps.remat:
            out = evaluation_p.bind(*xs, rule=maps)
            ys, extras = out[: len(out) - maps.extras], out[len(out) - maps.extras :]
            return ys, maps, maps.saved(xs, ys, extras)
        out = _forward(maps, xs)
    first = len(out) - maps.extras
    raw, extras = [jax.lax.stop_gradient(y) for y in out[:first]], out[first:]
    ys = value_p.bind(*xs, *raw, *extras, rule=maps, xs=len(xs))
    return ys, maps, maps.saved(xs, ys, extras)


def _forward(maps: Rule, xs: Any) -> list[Any]:
    assert maps.forward is not None
    if not maps.extras:
        return list(maps.forward(*[jax.lax.stop_gradient(x) for x in xs]))
    return list(
        maps.forward(*[_with_varying_tangent(x) if _varies(x) and is_inexact(x) else x for x in xs])
    )


def _zero(y: Any) -> Any:
    return ad.Zero(jax.typeof(y).to_tangent_aval())


def _carries(dx: Any) -> bool:
    return type(dx) is not ad.Zero and getattr(dx, "dtype", None) != jax.dtypes.float0


def _closed_over_error(rule: Rule) -> GradtoolsError:
    return GradtoolsError(
        f"rule {rule.name!r} closes over an array with respect to which you differentiate; its "
        "derivative would be lost. Pass that array to the function as an argument."
    )


def _tangent_jvp(operands: Any, tangents: Any, *, rule: Rule, given: Mask, ys: Any) -> Any:
    """Itself on the new tangent, plus the derivative of the Python map in what it reads."""
    n = len(operands) - sum(given)
    params = {"rule": rule, "given": given, "ys": ys}
    out = tangent_p.bind(*operands, **params)
    parts = []
    if any(_carries(dv) for dv in tangents[n:]):
        pairs = zip(tangents[n:], operands[n:], strict=True)
        dvs = [varying(ad.instantiate_zeros(dv), _varies(v)) for dv, v in pairs]
        parts.append(tangent_p.bind(*operands[:n], *dvs, **params))
    if any(_carries(dx) for dx in tangents[:n]):
        parts.append(_python_jvp(_tangent, operands, tangents[:n], params)[1])
    if not parts:
        return out, [_zero(o) for o in out]
    return out, [_add(*terms) for terms in zip(*parts, strict=True)]


def _cotangent_jvp(operands: Any, tangents: Any, **params: Any) -> Any:
    """The derivative of the Python map, in the cotangents too: it need not be linear in them."""
    moves = any(_carries(dv) for dv in tangents)
    if moves and params["rule"].flow is not None:  # its value costs as much as it does
        return _python_jvp(_cotangent, operands, tangents, params)
    out = cotangent_p.bind(*operands, **params)
    if not moves:
        return out, [_zero(o) for o in out]
    return out, _python_jvp(_cotangent, operands, tangents, params)[1]


def _python_jvp(run: Any, operands: Any, tangents: Any, params: Any) -> tuple[Any, Any]:
    rule, n = params["rule"], len(operands) - sum(params["given"])
    sources = range(n) if rule.saves is None else rule.saves
    if any(_carries(dx) and sources[i] in rule.closed_over for i, dx in enumerate(tangents[:n])):
        raise _closed_over_error(rule)
    return _moved(run, operands, tangents, params)


def _moved(run: Any, operands: Any, tangents: Any, params: dict[str, Any]) -> tuple[Any, Any]:
    """The jvp of Python code in the operands that have a tangent."""
    moving = [i for i, dx in enumerate(tangents) if _carries(dx)]

    def at(*changed: Any) -> list[Any]:
        full = list(operands)
        for i, x in zip(moving, changed, strict=True):
            full[i] = x
        return run(*full, **params)

    steps = [varying(tangents[i], _varies(operands[i])) for i in moving]
    return jax.jvp(at, [operands[i] for i in moving], steps)


def _add(first: Any, *more: Any) -> Any:
    for term in more:
        first = ad.add_tangents(first, term)
    return first


def _tangent_transpose(cts: Any, *operands: Any, rule: Rule, given: Mask, ys: Any) -> list[Any]:
    n = len(operands) - sum(given)
    present = tuple([type(ct) is not ad.Zero for ct in cts])
    if not any(present):
        return [None] * len(operands)
    params = {
        "rule": rule,
        "given": present,
        "wanted": given,
        "xs": tuple([v.aval for v in operands[n:]]),
        "ys": ys,
    }
    at = [*operands[:n], *[ct for ct, p in zip(cts, present, strict=True) if p]]
    if rule.contract is not None and not rule.fills("cotangent"):
        _hold_symbolic(rule.contract, at, n, params)
    return [None] * n + list(cotangent_p.bind(*at, **params))


def _hold_symbolic(contract: Contract, at: Sequence[Any], n: int, params: Any) -> None:
    """Holds bwd to being zero at zero where it is told which cotangents are there."""

    def check() -> bool:
        closed = jax.make_jaxpr(partial(_cotangent, **params))(*map(jax.typeof, at))
        zero = [i >= n for i in range(len(at))]
        wrong, told = homogeneous.first_nonzero(closed, zero, at)
        if wrong is not None:
            places = [i for i, w in enumerate(params["wanted"]) if w]
            raise contract.not_zero("cotangent", places[wrong])
        return told

    contract.ask("cotangent", _looks(at), params["given"], params["wanted"], of=check)


def _cotangent_transpose(
    dxs: Any, *operands: Any, rule: Rule, given: Mask, wanted: Mask, xs: Any, ys: Any
) -> list[Any]:
    n = len(operands) - sum(given)
    full = spread(dxs, wanted)
    moving = tuple([dx is not None and type(dx) is not ad.Zero for dx in full])
    if not any(moving):
        return [None] * len(operands)
    present = [dx for dx, m in zip(full, moving, strict=True) if m]
    dys = tangent_p.bind(*operands[:n], *present, rule=rule, given=moving, ys=ys)
    return [None] * n + [dy for dy, g in zip(dys, given, strict=True) if g]


def _primal_transpose(cts: Any, *xs: Any, rule: Rule) -> list[Any]:
    """Of a rule that stands in a linear function: its pullback anywhere, say at zero."""
    unknown = tuple([ad.is_undefined_primal(x) for x in xs])
    if (rule.contract or rule) in _local_list("linearizing"):
        return _code_transposed(cts, xs, rule, unknown)
    at = [zeros_of(x.aval) if u else x for x, u in zip(xs, unknown, strict=True)]
    _check_linear(rule, at, unknown)
    ys, maps, saved = _evaluated(rule, at)
    inexact = [is_inexact(y) for y in ys]
    present = [type(ct) is not ad.Zero for ct in cts]
    given = tuple([p for p, i in zip(present, inexact, strict=True) if i])
    if not any(given):
        return [None] * len(xs)
    found = cotangent_p.bind(
        *saved,
        *(ct for ct, p in zip(cts, present, strict=True) if p),
        rule=maps,
        given=given,
        wanted=unknown,
        xs=tuple([x.aval for x, u in zip(xs, unknown, strict=True) if u]),
        ys=tuple(_present(_likes(ys))),
    )
    return spread(found, unknown)


def _code_transposed(cts: Any, xs: Any, rule: Rule, unknown: Mask) -> list[Any]:
    """Of a linear function that its own forward rule uses: here ends what would never end."""

    def run(*moved: Any) -> list[Any]:
        new = iter(moved)
        full = [next(new) if u else x for x, u in zip(xs, unknown, strict=True)]
        return list(rule.primal(*full))

    likes = [_shape(x.aval) for x, u in zip(xs, unknown, strict=True) if u]
    full = [ad.instantiate_zeros(ct) for ct in cts]
    return spread(jax.linear_transpose(run, *likes)(full), unknown)


_LINEAR: weakref.WeakSet[Rule] = weakref.WeakSet()


def _check_linear(rule: Rule, xs: Sequence[Any], moving: Mask) -> None:
    """Whether the rule's value is linear in some inputs, once for each rule.

    A rule's value may be a kernel that nobody can transpose, so only numbers can tell. They are
    those at hand, or while a program is traced made-up ones.
    """
    source = rule.source or rule
    if source in _LINEAR:
        return
    made_up = any(isinstance(x, jax.core.Tracer) for x in xs)
    try:
        with jax.ensure_compile_time_eval():
            same = _goes_through(rule, xs, moving, made_up)
    except Exception as error:
        if not made_up:
            raise
        warn(
            f"{rule.name} is transposed, and whether it is linear could not be checked, for at "
            f"made-up values it raises {type(error).__name__}: {error}"
        )
        same = True
    if not same:
        raise ValueError(f"{rule.name} is not linear in what it is to be transposed in")
    _LINEAR.add(source)


def _goes_through(rule: Rule, xs: Sequence[Any], moving: Mask, made_up: bool) -> bool:
    plain = [homogeneous.wave(x, 0.5, 1.0) if made_up else x for x in xs]
    linear_in = [x for x, m in zip(xs, moving, strict=True) if m]
    v, w = ([homogeneous.wave(x, shift, 0.0) for x in linear_in] for shift in (1.0, 2.0))

    def run(vs: Sequence[Any]) -> list[Any]:
        new = iter(vs)
        changed = [next(new) if m else p for p, m in zip(plain, moving, strict=True)]
        return [y for y in rule.primal(*changed) if is_inexact(y)]

    reach = 2.0**5 if any(x.dtype == jnp.float16 for x in v) else 2.0**13
    return is_linear(run, v, w, _gap, _slack, reach)


def _gap(a: Any, b: Any) -> float:
    alike = (a == b) | (jnp.isnan(a) & jnp.isnan(b))
    return float(jnp.max(jnp.where(alike, 0.0, jnp.abs(a - b)), initial=0.0))


def _slack(x: Any) -> float:
    return float(jnp.finfo(x.dtype).eps) ** 0.5


ad.primitive_jvps[primal_p] = mortal(_primal_jvp)
ad.primitive_jvps[evaluation_p] = mortal(_evaluation_jvp)
pe.dce_rules[evaluation_p] = _evaluation_dce
ad.primitive_jvps[value_p] = mortal(_value_jvp)
ad.primitive_jvps[tangent_p] = mortal(_tangent_jvp)
ad.primitive_jvps[cotangent_p] = mortal(_cotangent_jvp)
ad.primitive_transposes[primal_p] = mortal(_primal_transpose)
ad.primitive_transposes[tangent_p] = mortal(_tangent_transpose)
ad.primitive_transposes[cotangent_p] = mortal(_cotangent_transpose)


# --- vmap --------------------------------------------------------------------------------


class _Lists:
    """What `rules.batched` asks of a framework."""

    @staticmethod
    def vmap_list(fun: Callable[..., Any], axes: tuple[Any, ...], size: int) -> Any:
        if not axes or all(a is None for a in axes):
            return lambda *xs: [jnp.broadcast_to(y, (size, *y.shape)) for y in fun(*xs)]
        return jax.vmap(fun, in_axes=axes, axis_size=size)

    @staticmethod
    def vmap_extras(fun: Callable[..., Any], axes: Any, size: int, extras: Any) -> Any:
        """vmap, and which results carry the batch: extras that do not depend on it need not."""

        def run(*xs: Any) -> tuple[list[Any], list[Any]]:
            closed = jax.make_jaxpr(lambda *a: list(fun(*a)))(*_examples(xs, axes))
            out_axes = _out_axes(closed, axes, extras())
            if not out_axes:
                return [], []
            if all(a is None for a in out_axes):
                return jax.core.eval_jaxpr(closed.jaxpr, closed.consts, *xs), out_axes
            mapped = jax.vmap(
                lambda *a: jax.core.eval_jaxpr(closed.jaxpr, closed.consts, *a),
                in_axes=axes,
                out_axes=out_axes,
                axis_size=size,
            )
            return mapped(*xs), out_axes

        return run

    @staticmethod
    def sum_leading(x: Any) -> Any:
        return jnp.sum(x, axis=0)


def _examples(xs: Sequence[Any], axes: Sequence[Any]) -> list[Any]:
    """What one example's inputs look like."""
    avals = [jax.typeof(x) for x in xs]
    pairs = zip(avals, axes, strict=True)
    return [a if axis is None else shardings.without_axis(a, 0) for a, axis in pairs]


def _out_axes(closed: Any, axes: Sequence[Any], extras: int) -> list[Any]:
    """0 for each result; for an extra that no mapped input reaches, None."""
    flow = tracing.raw_matrix(closed)
    carried = [any(r and a == 0 for r, a in zip(row, axes, strict=True)) for row in flow]
    first = len(carried) - extras
    return [0 if i < first or c else None for i, c in enumerate(carried)]


def _batched(rule: Rule, x_axes: Any, saved_axes: Any, size: int) -> Rule:
    make = lambda: batched(rule, _Lists, x_axes, saved_axes, size)
    return remembered(rule, ("batched", x_axes, saved_axes, size), make)


def _batched_evaluation(rule: Rule, axes: tuple[Any, ...], size: int) -> Rule:
    """The rule of a batch of which every extra carries the batch."""

    def make() -> Rule:
        assert rule.forward is not None
        saved_axes = saved_from(rule.saves, axes)
        forward = _Lists.vmap_list(rule.forward, axes, size)
        return replace(batched(rule, _Lists, axes, saved_axes, size), forward=forward)

    return remembered(rule, ("evaluation", axes, size), make)


def _batch(primitive: Primitive) -> Any:
    def run(args: Any, dims: Any, *, rule: Rule, **params: Any) -> Any:
        size = next(x.shape[d] for x, d in zip(args, dims, strict=True) if d is not None)
        args = [_to_front(x, d) for x, d in zip(args, dims, strict=True)]
        axes = [None if d is None else 0 for d in dims]
        n = len(args) - sum(params["given"]) if "given" in params else 0

        like = next(x for x, axis in zip(args, axes, strict=True) if axis == 0)

        def wide(avals: Any) -> Any:
            return tuple([shardings.with_leading(a, size, like) for a in avals])

        if primitive is primal_p:
            rule = _batched(rule, tuple(axes), None, size)
        elif primitive is evaluation_p:
            rule = _batched_evaluation(rule, tuple(axes), size)
        elif primitive is value_p:
            first, last = params["xs"], len(args) - rule.extras
            everything = [*axes[:first], *axes[first:last], *axes[last:]]
            saved_axes = saved_from(rule.saves, everything[:first], everything[first:])
            args[first:last] = [
                x if axis == 0 else shardings.spread(x, size, like)
                for x, axis in zip(args[first:last], axes[first:last], strict=True)
            ]
            rule = _batched(rule, tuple(axes[:first]), saved_axes, size)
        elif primitive is tangent_p:
            dx_axes = spread(axes[n:], params["given"])
            rule = _batched(rule, tuple(dx_axes), tuple(axes[:n]), size)
            params["ys"] = wide(params["ys"])
        else:
            cts = zip(args[n:], axes[n:], strict=True)
            args[n:] = [x if a == 0 else shardings.spread(x, size, like) for x, a in cts]
            rule = _batched(rule, (0,) * len(params["wanted"]), tuple(axes[:n]), size)
            params["xs"], params["ys"] = wide(params["xs"]), wide(params["ys"])
        out = primitive.bind(*args, rule=rule, **params)
        return out, [0] * len(out)

    return run


def _to_front(x: Any, dim: int | None) -> Any:
    return x if dim is None else jnp.moveaxis(x, dim, 0)


for _p in (primal_p, evaluation_p, value_p, tangent_p, cotangent_p):
    batching.primitive_batchers[_p] = mortal(_batch(_p))


def _no_series(primitive: Primitive) -> Callable[..., Any]:
    def refuse(*_: Any, **params: Any) -> Any:
        rule = params.get("rule")
        raise NotImplementedRefusal(
            f"jet: f holds the rule {rule.name if rule else primitive.name!r}, which gives first "
            "derivatives and not series. Nest jvp or grad instead."
        )

    return refuse


for _p in (primal_p, evaluation_p, value_p, tangent_p, cotangent_p):
    jet_rules[_p] = _no_series(_p)


# --- rules without a tangent map ---------------------------------------------------------

reverse_only_p = Primitive("gradtools_reverse_only")
reverse_only_p.multiple_results = True
reverse_only_p.def_impl(lambda *xs, name: list(xs))
reverse_only_p.def_abstract_eval(lambda *avals, name: list(avals))
mlir.register_lowering(
    reverse_only_p, mlir.lower_fun(lambda *xs, name: list(xs), multiple_results=True)
)
reverse_only_p.__doc__ = "Marks, in a jaxpr, a function that forward mode cannot enter."


def _mark_batch(args: Any, dims: Any, name: str) -> Any:
    return reverse_only_p.bind(*args, name=name), dims


batching.primitive_batchers[reverse_only_p] = _mark_batch


def _apply_reverse_only(rule: Rule, xs: Sequence[Any]) -> list[Any]:
    """A plain `custom_vjp`. Its fwd applies the edit again, so that second order sees it too."""
    rule, captured = _lift_captured(rule, xs) if rule.captures else (rule, [])

    @jax.custom_vjp
    def edited(*operands: Any) -> list[Any]:
        return reverse_only_p.bind(*rule.primal(*operands), name=rule.name)

    def fwd(*operands: Any) -> Any:
        return edited(*operands), operands

    def bwd(operands: Any, cts: Any) -> Any:
        with _promoting(rule):
            found = rule.cotangent(rule.saved(operands, []), [conj(ct) for ct in cts])
        return tuple(
            jnp.zeros_like(x) if ct is None else conj(jnp.asarray(ct, x.dtype))
            for ct, x in zip(found, operands, strict=True)
        )

    edited.defvjp(fwd, bwd)
    return edited(*xs, *captured)


# --- arrays that a rule closes over ------------------------------------------------------


def _closes_over_tracer(rule: Rule) -> bool:
    """Whether what the author of a rule wrote holds an array of a running trace.

    A rule may use itself, so to trace its maps whenever it is applied would never end.
    """
    if not tracing.within_a_trace():
        return False
    return closes_over(rule, lambda x: isinstance(x, jax.core.Tracer), jax.Array)


def hoist(fun: Callable[..., Any], *examples: Any) -> tuple[Callable[..., Any], list[Any]]:
    """`fun` with what it closes over made explicit: `hoisted(consts, *args)`, and consts.

    A rule runs when the trace in which it was made may have ended, and a tracer that it closes
    over is dead by then. So what it closes over becomes an input.
    """
    closed, shapes = jax.make_jaxpr(fun, return_shape=True)(*examples)
    treedef = jax.tree.structure(shapes)
    # Without consts, which the closed one holds, and from JAX 0.12 on the open one as well.
    jaxpr = closed.jaxpr.replace(constvars=closed.jaxpr.constvars)

    def hoisted(consts: Sequence[Any], *args: Any) -> Any:
        flat = jax.core.eval_jaxpr(jaxpr, consts, *jax.tree.leaves(args))
        return jax.tree.unflatten(treedef, flat)

    return hoisted, list(closed.consts)


def _lift_captured(rule: Rule, xs: Sequence[Any]) -> tuple[Rule, list[Any]]:
    """The rule with the arrays it closes over appended to its inputs, and those arrays.

    Each map is traced with every tangent present. A rule that closes over nothing is returned
    as it is.
    """
    with _within(_local_list("lifting"), rule):
        return _lift_maps(rule, xs)


def _lift_value(rule: Rule, xs: Sequence[Any]) -> tuple[Rule, list[Any]]:
    """The same where a rule's maps use the rule itself: its value is traced, its maps later."""
    n = len(xs)
    hoisted, consts = hoist(lambda *a: list(rule.primal(*a)), *xs)
    lifted = replace(
        rule,
        primal=lambda *a: hoisted(a[n:], *a[:n]),
        captures=False,
        closed_over=tuple(range(n, n + len(consts))),
        unlifted=rule,
        flow=None,
        key=next(KEYS),
    )
    return lifted, consts


def _lift_maps(rule: Rule, xs: Sequence[Any]) -> tuple[Rule, list[Any]]:
    n = len(xs)
    consts: list[Any] = []

    def lift(fun: Any, *examples: Any) -> Any:
        if fun is None:
            return None
        hoisted, found = hoist(fun, *examples)
        start, stop = len(consts), len(consts) + len(found)
        consts.extend(found)
        return lambda own, *args: hoisted(own[start:stop], *args)

    primal = lift(lambda *a: list(rule.primal(*a)), *xs)
    moving = [
        is_inexact(x) and i not in rule.passive and (rule.reverse_only or not _known([x]))
        for i, x in enumerate(xs)
    ]  # with respect to what is known nothing is differentiated; an edit shows what it cuts
    flow = primal if rule.flow is rule.primal else lift(rule.flow, *xs)
    if not any(moving):
        return (rule, []) if not consts else _lifted(rule, n, consts, primal, flow)
    maps = rule if rule.reverse_only else _linearized(rule, xs)
    results = jax.eval_shape(
        lambda *a: maps.forward(*a) if maps.forward else primal(consts, *a), *xs
    )
    ys = results[: len(results) - maps.extras]
    zeros = [jnp.zeros(x.shape, x.dtype) for x in [*xs, *results]]
    saved = [jnp.zeros(s.shape, s.dtype) for s in maps.saved(xs, ys, results[len(ys) :])]
    dxs = [z if m else None for z, m in zip(zeros, moving, strict=False)]
    cts = [z for z in zeros[n : n + len(ys)] if is_inexact(z) or rule.reverse_only]
    forward = None if rule.reverse_only else lift(maps.forward, *xs)
    tangent = lift(maps.tangent, saved, dxs)
    cotangent = lift(maps.cotangent, saved, cts)
    if not consts:
        return rule, []
    return _lifted(maps, n, consts, primal, flow, forward, tangent, cotangent, dxs, cts)


def _lifted(
    rule: Rule,
    n: int,
    consts: list[Any],
    primal: Any,
    flow: Any,
    forward: Any = None,
    tangent: Any = None,
    cotangent: Any = None,
    dxs: Sequence[Any] = (),
    cts: Sequence[Any] = (),
) -> tuple[Rule, list[Any]]:
    count = len(consts)
    positions = range(n) if rule.saves is None else rule.saves
    saves = [i if i < n else i + count for i in positions]
    dxs, cts = ([None if x is None else _shape(x) for x in xs] for xs in (dxs, cts))

    def unmoved(_: Any, __: Any) -> list[Any]:
        raise _closed_over_error(rule)

    def run_tangent(a: Any, v: Any) -> list[Any]:
        return tangent(a[len(saves) :], list(a[: len(saves)]), _zeros_for(v[:n], dxs))

    def run_cotangent(a: Any, v: Any) -> list[Any]:
        found = cotangent(a[len(saves) :], list(a[: len(saves)]), _zeros_for(v, cts))
        return [*found, *([None] * count)]

    lifted = replace(
        rule,
        primal=lambda *a: primal(a[n:], *a[:n]),
        flow=rule.flow and (lambda *a: flow(a[n:], *a[:n])),
        forward=forward and (lambda *a: forward(a[n:], *a[:n])),
        tangent=run_tangent if tangent else None if cotangent else unmoved,
        cotangent=cotangent and run_cotangent,
        linearize=None if cotangent else rule.linearize,
        joint=None if cotangent else rule.joint,
        saves=(*saves, *range(n, n + count)),
        captures=False,
        closed_over=tuple(range(n, n + count)),
        written=(),
        key=next(KEYS),
    )
    return lifted, consts


def _zeros_for(values: Sequence[Any], examples: Sequence[Any]) -> list[Any]:
    """`values` with zeros for None wherever `examples` has an array, and None elsewhere."""
    return [
        None if e is None else jnp.zeros(e.shape, e.dtype) if v is None else v
        for v, e in zip(values, examples, strict=True)
    ]
