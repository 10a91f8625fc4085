"""How a rule enters JAX: three primitives that turn into each other.

JAX lets a function have a forward rule or a reverse rule, not both (jax#3996). Three primitives
of our own have both, because differentiation and transposition only exchange them:

    primal     y = f(x)             its jvp binds primal and tangent
    tangent    dy = J(x) dx         linear in dx; its transpose is cotangent
    cotangent  x' = J(x)^T y'       linear in y'; its transpose is tangent

The jvp of a linear one is itself on the new tangent, plus `jax.jvp` of the Python rule in x, so
a rule is differentiated at any order. A primitive's rule, unlike `custom_jvp`'s, survives scan,
cond, remat and jit. JAX's cotangents are the conjugates of gradtools'; they are converted in
`_cotangent` and nowhere else.

The linear primitives take the inputs x, then those tangents (or cotangents) that are not zero;
the static masks `given` and `wanted` say which these are and which ones are asked for.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive, get_opaque_trace_state
from jax.interpreters import ad, batching, mlir

from gradtools.errors import GradtoolsError
from gradtools.jax.trees import conj, is_inexact
from gradtools.rules import KEYS, Rule, batched, spread

Mask = tuple[bool, ...]
_NO_TRACE = get_opaque_trace_state(convention="flax")


def apply_rule(rule: Rule, *xs: Any) -> list[Any]:
    """`rule.primal(*xs)`, differentiated by the rule in every mode, at every order."""
    xs = tuple(jnp.asarray(x) for x in xs)
    if rule.reverse_only:
        return _apply_reverse_only(rule, xs)
    if rule.captures and get_opaque_trace_state(convention="flax") != _NO_TRACE:
        rule, captured = _lift_captured(rule, xs)
        xs = (*xs, *captured)
    return list(primal_p.bind(*xs, rule=rule))


# --- the maps, as functions of flat arrays -----------------------------------------------


def _primal(*xs: Any, rule: Rule) -> list[Any]:
    return list(rule.primal(*xs))


def _tangent(*operands: Any, rule: Rule, given: Mask) -> list[Any]:
    n = len(rule.read(given))
    xs = rule.placed(operands[:n], len(given))
    dxs = spread(operands[n:], given)
    if rule.uses is not None:
        return list(rule.tangent(xs, dxs))
    outs = _primal_shapes(rule, xs)
    if rule.tangent is None:
        return _transposed_cotangent(rule, xs, dxs, outs)
    found = zip(rule.tangent(xs, dxs), outs, strict=True)
    return [_checked(rule, "tangent", dy, y.shape, y.dtype) for dy, y in found]


def _cotangent(*operands: Any, rule: Rule, given: Mask, wanted: Mask) -> list[Any]:
    n = len(rule.read(wanted))
    xs = rule.placed(operands[:n], len(wanted))
    cts = spread(operands[n:], given)
    if rule.cotangent is None:
        return _transposed_tangent(rule, xs, cts, wanted)
    found = rule.cotangent(xs, [None if ct is None else conj(ct) for ct in cts])
    if rule.uses is not None:
        return [conj(ct) for ct, w in zip(found, wanted, strict=True) if w]
    return [
        conj(_checked(rule, "cotangent", ct, rule.dx_shape(i, x.shape), x.dtype))
        for i, (ct, x) in enumerate(zip(found, xs, strict=True))
        if wanted[i]
    ]


def _transposed_cotangent(rule: Rule, xs: Any, dxs: Any, outs: Any) -> list[Any]:
    """J dx from the cotangent map alone: the transpose of y' -> J^T y'."""
    given = tuple(dx is not None for dx in dxs)
    carried = [_is_differentiable(o) for o in outs]
    examples = [o for o, c in zip(outs, carried, strict=True) if c]

    def pull(*cts: Any) -> list[Any]:
        return _cotangent(*xs, *cts, rule=rule, given=tuple(carried), wanted=given)

    found = _transpose(rule, "cotangent", pull, examples, [dx for dx in dxs if dx is not None])
    full = spread(found, carried)
    return [
        jnp.zeros(o.shape, o.dtype) if v is None else v for v, o in zip(full, outs, strict=True)
    ]


def _transposed_tangent(rule: Rule, xs: Any, cts: Any, wanted: Mask) -> list[Any]:
    """J^T y' from the tangent map alone."""
    outs = _primal_shapes(rule, xs)
    examples = [
        jax.ShapeDtypeStruct(rule.dx_shape(i, x.shape), x.dtype)
        for i, x in enumerate(xs)
        if wanted[i]
    ]

    def push(*dxs: Any) -> list[Any]:
        out = _tangent(*xs, *dxs, rule=rule, given=wanted)
        return [v for v, o in zip(out, outs, strict=True) if _is_differentiable(o)]

    pairs = [(ct, o) for ct, o in zip(cts, outs, strict=True) if _is_differentiable(o)]
    full = [jnp.zeros(o.shape, o.dtype) if ct is None else ct for ct, o in pairs]
    return _transpose(rule, "tangent", push, examples, full)


def _transpose(rule: Rule, which: str, linear: Any, examples: Any, values: Any) -> list[Any]:
    if any(_varies(v) for v in values):
        raise GradtoolsError(
            f"rule {rule.name!r}: the other mode was to follow by transposing its {which} map, "
            "which jax.linear_transpose cannot do under shard_map with check_vma=True. Give both "
            "maps, or pass check_vma=False."
        )
    shapes = [jax.ShapeDtypeStruct(e.shape, e.dtype) for e in examples]
    try:
        found = jax.linear_transpose(linear, *shapes)(list(values))
    except (NotImplementedError, TypeError, ValueError, AssertionError) as error:
        raise GradtoolsError(
            f"rule {rule.name!r}: the other mode was to follow by transposing its {which} map, "
            f"but JAX cannot transpose it: a {which} map must be linear in its {which}s. "
            f"Give the missing map as well, or make this one linear. JAX says: {error}"
        ) from error
    return list(found)


def _varies(x: Any) -> bool:
    """Whether x is typed as different on the devices of a mesh axis."""
    return bool(jax.typeof(x).manual_axis_type.varying)


def _checked(rule: Rule, which: str, value: Any, shape: Any, dtype: Any) -> Any:
    """A zero for None; an error where a map's result does not have the shape it must have."""
    if value is None:
        return jnp.zeros(shape, dtype)
    if jnp.shape(value) != tuple(shape):
        raise GradtoolsError(
            f"rule {rule.name!r}: its {which} map returned shape {jnp.shape(value)}, "
            f"expected {tuple(shape)}, that of what it belongs to."
        )
    return jnp.asarray(value, dtype)


def _primal_shapes(rule: Rule, xs: Sequence[Any]) -> list[Any]:
    return jax.eval_shape(lambda *a: list(rule.primal(*a)), *xs)


def _is_differentiable(x: Any) -> bool:
    return is_inexact(x)


# --- the primitives ----------------------------------------------------------------------


def _define(name: str, run: Callable[..., list[Any]]) -> Primitive:
    primitive = Primitive(name)
    primitive.multiple_results = True
    primitive.def_impl(run)

    def abstract(*avals: Any, **params: Any) -> list[Any]:
        # `make_jaxpr`, not `eval_shape`: its avals keep weak types and, under shard_map, the
        # axes over which a value varies.
        return _abstract(run, tuple(avals), tuple(params.items()))

    primitive.def_abstract_eval(abstract)
    mlir.register_lowering(primitive, mlir.lower_fun(run, multiple_results=True))
    return primitive


@lru_cache(maxsize=1024)
def _abstract(run: Any, avals: tuple[Any, ...], params: tuple[Any, ...]) -> list[Any]:
    return list(jax.make_jaxpr(lambda *xs: run(*xs, **dict(params)))(*avals).out_avals)


primal_p = _define("gradtools_primal", _primal)
tangent_p = _define("gradtools_tangent", _tangent)
cotangent_p = _define("gradtools_cotangent", _cotangent)


def _primal_jvp(xs: Any, dxs: Any, *, rule: Rule) -> tuple[list[Any], list[Any]]:
    ys = primal_p.bind(*xs, rule=rule)
    given = tuple(_carries(dx) and i not in rule.passive for i, dx in enumerate(dxs))
    for i in rule.closed_over:
        if given[i]:
            raise _closed_over_error(rule)
    if not any(given):
        return ys, [_zero(y) for y in ys]
    moving = [dx for dx, g in zip(dxs, given, strict=True) if g]
    dys = tangent_p.bind(*rule.read(xs), *moving, rule=rule, given=given)
    return ys, [dy if _is_differentiable(y) else _zero(y) for y, dy in zip(ys, dys, strict=True)]


def _zero(y: Any) -> Any:
    return ad.Zero(jax.typeof(y).to_tangent_aval())


def _carries(dx: Any) -> bool:
    return type(dx) is not ad.Zero and getattr(dx, "dtype", None) != jax.dtypes.float0


def _closed_over_error(rule: Rule) -> GradtoolsError:
    return GradtoolsError(
        f"rule {rule.name!r} closes over an array with respect to which you differentiate; its "
        "derivative would be lost. Pass that array to the function as an argument."
    )


def _linear_jvp(primitive: Primitive, run: Any) -> Any:
    """The jvp of a map that is linear in v and smooth in x: L(x, dv) + d/dx [L(x, v)] dx."""

    def jvp(operands: Any, tangents: Any, *, rule: Rule, **params: Any) -> Any:
        inputs = params["wanted"] if "wanted" in params else params["given"]
        n = len(rule.read(inputs))
        xs, vs = operands[:n], operands[n:]
        dxs, dvs = tangents[:n], tangents[n:]
        out = primitive.bind(*operands, rule=rule, **params)
        parts = []
        if any(_carries(dv) for dv in dvs):
            dvs = [ad.instantiate_zeros(dv) for dv in dvs]
            parts.append(primitive.bind(*xs, *dvs, rule=rule, **params))
        position = rule.read(range(len(inputs)))
        moving = [i for i, dx in enumerate(dxs) if _carries(dx)]
        if any(position[i] in rule.closed_over for i in moving):
            raise _closed_over_error(rule)
        if moving:
            parts.append(_in_primals(run, xs, vs, dxs, moving, dict(params, rule=rule)))
        if not parts:
            return out, [_zero(o) for o in out]
        return out, [_add(*terms) for terms in zip(*parts, strict=True)]

    return jvp


def _in_primals(run: Any, xs: Any, vs: Any, dxs: Any, moving: Any, params: Any) -> list[Any]:
    def at(*changed: Any) -> list[Any]:
        full = list(xs)
        for i, x in zip(moving, changed, strict=True):
            full[i] = x
        return run(*full, *vs, **params)

    return jax.jvp(at, [xs[i] for i in moving], [dxs[i] for i in moving])[1]


def _add(first: Any, *more: Any) -> Any:
    for term in more:
        first = ad.add_tangents(first, term)
    return first


def _tangent_transpose(cts: Any, *operands: Any, rule: Rule, given: Mask) -> list[Any]:
    n = len(rule.read(given))
    xs, given_cts = operands[:n], tuple(type(ct) is not ad.Zero for ct in cts)
    if not any(given_cts):
        return [None] * len(operands)
    present = [ct for ct in cts if type(ct) is not ad.Zero]
    found = cotangent_p.bind(*xs, *present, rule=rule, given=given_cts, wanted=given)
    return [None] * n + list(found)


def _cotangent_transpose(
    dxs: Any, *operands: Any, rule: Rule, given: Mask, wanted: Mask
) -> list[Any]:
    n = len(rule.read(wanted))
    xs = operands[:n]
    full = spread(dxs, wanted)
    moving = tuple(dx is not None and type(dx) is not ad.Zero for dx in full)
    if not any(moving):
        return [None] * len(operands)
    present = [dx for dx, m in zip(full, moving, strict=True) if m]
    dys = tangent_p.bind(*xs, *present, rule=rule, given=moving)
    return [None] * n + [dy for dy, g in zip(dys, given, strict=True) if g]


ad.primitive_jvps[primal_p] = _primal_jvp
ad.primitive_jvps[tangent_p] = _linear_jvp(tangent_p, _tangent)
ad.primitive_jvps[cotangent_p] = _linear_jvp(cotangent_p, _cotangent)
ad.primitive_transposes[tangent_p] = _tangent_transpose
ad.primitive_transposes[cotangent_p] = _cotangent_transpose


# --- vmap --------------------------------------------------------------------------------


class _Lists:
    """The two things that `rules.batched` asks of a framework."""

    @staticmethod
    def vmap_list(fun: Callable[..., Any], axes: tuple[Any, ...], size: int) -> Any:
        if not axes or all(a is None for a in axes):
            return lambda *xs: [jnp.broadcast_to(y, (size, *y.shape)) for y in fun(*xs)]
        return jax.vmap(fun, in_axes=axes, axis_size=size)

    @staticmethod
    def sum_leading(x: Any) -> Any:
        return jnp.sum(x, axis=0)


@lru_cache(maxsize=1024)
def _batched(rule: Rule, x_axes: Any, dx_axes: Any, size: int) -> Rule:
    return batched(rule, _Lists, x_axes, dx_axes, size)


def _batch(primitive: Primitive) -> Any:
    def run(args: Any, dims: Any, *, rule: Rule, **params: Any) -> Any:
        size = next(x.shape[d] for x, d in zip(args, dims, strict=True) if d is not None)
        args = [_to_front(x, d) for x, d in zip(args, dims, strict=True)]
        axes = [None if d is None else 0 for d in dims]
        if primitive is primal_p:
            rule = _batched(rule, tuple(axes), tuple(axes), size)
        elif primitive is tangent_p:
            n = len(rule.read(params["given"]))
            x_axes = rule.placed(axes[:n], len(params["given"]))
            dx_axes = spread(axes[n:], params["given"])
            rule = _batched(rule, tuple(x_axes), tuple(dx_axes), size)
        else:
            n = len(rule.read(params["wanted"]))
            x_axes = rule.placed(axes[:n], len(params["wanted"]))
            cts = zip(args[n:], axes[n:], strict=True)
            args[n:] = [x if a == 0 else jnp.broadcast_to(x, (size, *x.shape)) for x, a in cts]
            rule = _batched(rule, tuple(x_axes), (0,) * len(x_axes), size)
        out = primitive.bind(*args, rule=rule, **params)
        return out, [0] * len(out)

    return run


def _to_front(x: Any, dim: int | None) -> Any:
    return x if dim is None else jnp.moveaxis(x, dim, 0)


for _p in (primal_p, tangent_p, cotangent_p):
    batching.primitive_batchers[_p] = _batch(_p)


# --- rules without a tangent map ---------------------------------------------------------

reverse_only_p = _define("gradtools_reverse_only", lambda *xs: list(xs))
reverse_only_p.__doc__ = "Marks, in a jaxpr, a function that forward mode cannot enter."


def _mark_batch(args: Any, dims: Any) -> Any:
    return reverse_only_p.bind(*args), dims


batching.primitive_batchers[reverse_only_p] = _mark_batch


def _apply_reverse_only(rule: Rule, xs: Sequence[Any]) -> list[Any]:
    """A plain `custom_vjp`. Its fwd applies the edit again, so that second order sees it too."""
    rule, captured = _lift_captured(rule, xs) if rule.captures else (rule, [])

    @jax.custom_vjp
    def edited(*operands: Any) -> list[Any]:
        return reverse_only_p.bind(*rule.primal(*operands))

    def fwd(*operands: Any) -> Any:
        return edited(*operands), operands

    def bwd(operands: Any, cts: Any) -> Any:
        found = rule.cotangent(operands, [conj(ct) for ct in cts])
        return tuple(
            jnp.zeros_like(x) if ct is None else conj(jnp.asarray(ct, x.dtype))
            for ct, x in zip(found, operands, strict=True)
        )

    edited.defvjp(fwd, bwd)
    return edited(*xs, *captured)


# --- arrays that a rule closes over ------------------------------------------------------


def hoist(fun: Callable[..., Any], *examples: Any) -> tuple[Callable[..., Any], list[Any]]:
    """`fun` with what it closes over made explicit: `hoisted(consts, *args)`, and consts.

    A rule runs when the trace in which it was made may have ended, and a tracer that it closes
    over is dead by then. So what it closes over becomes an input.
    """
    closed, shapes = jax.make_jaxpr(fun, return_shape=True)(*examples)
    treedef = jax.tree.structure(shapes)

    def hoisted(consts: Sequence[Any], *args: Any) -> Any:
        flat = jax.core.eval_jaxpr(closed.jaxpr, consts, *jax.tree.leaves(args))
        return jax.tree.unflatten(treedef, flat)

    return hoisted, list(closed.consts)


def _lift_captured(rule: Rule, xs: Sequence[Any]) -> tuple[Rule, list[Any]]:
    """The rule with the arrays it closes over appended to its inputs, and those arrays.

    Each map is traced with every tangent present. A rule that closes over nothing is returned
    as it is.
    """
    n = len(xs)
    dxs = [
        jnp.zeros_like(x) if _is_differentiable(x) and i not in rule.passive else None
        for i, x in enumerate(xs)
    ]
    cts = [
        jnp.zeros(y.shape, y.dtype) if _is_differentiable(y) else None
        for y in _primal_shapes(rule, xs)
    ]
    consts: list[Any] = []

    def lift(fun: Any, *examples: Any) -> Any:
        if fun is None:
            return None
        hoisted, found = hoist(fun, *examples)
        start, stop = n + len(consts), n + len(consts) + len(found)
        consts.extend(found)
        return lambda operands, *args: hoisted(operands[start:stop], *args)

    primal = lift(lambda *a: list(rule.primal(*a)), *xs)
    tangent = lift(rule.tangent, list(xs), dxs)
    cotangent = lift(rule.cotangent, list(xs), cts)
    if not consts:
        return rule, []

    def run_cotangent(a: Any, v: Any) -> list[Any]:
        found = cotangent(a, list(a[:n]), _filled(v, cts))
        return [*found, *([None] * (len(a) - n))]

    lifted = replace(
        rule,
        primal=lambda *a: primal(a, *a[:n]),
        tangent=tangent and (lambda a, v: tangent(a, list(a[:n]), _filled(v[:n], dxs))),
        cotangent=cotangent and run_cotangent,
        captures=False,
        key=next(KEYS),
        closed_over=tuple(range(n, n + len(consts))),
    )
    return lifted, consts


def _filled(values: Sequence[Any], examples: Sequence[Any]) -> list[Any]:
    """`values` with zeros for None wherever `examples` has an array, and None elsewhere."""
    return [
        None if e is None else jnp.zeros(e.shape, e.dtype) if v is None else v
        for v, e in zip(values, examples, strict=True)
    ]
