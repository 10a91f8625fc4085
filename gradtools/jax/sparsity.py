"""Sparsity detection: which output entries may depend on which input entries, by the jaxpr."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.sparse import BCOO

from gradtools.jax._upstream import bind_again, constants_of
from gradtools.jax.jaxprs import (
    CALLS,
    RULED,
    Eqn,
    HeldJaxpr,
    Jaxpr,
    interpreted,
    is_inexact,
    open_jaxpr,
    programs_of,
)
from gradtools.sparse import entry_dependence as e
from gradtools.sparse.entry_dependence import AbstractArray, Entries

_ELEMENTWISE = frozenset(
    """
    abs acos acosh add add_any and asin asinh atan atan2 atanh bessel_i0e bessel_i1e cbrt ceil clamp
    conj convert_element_type copy copy_p copysign cos cosh digamma div erf erf_inv erfc exp exp2
    expm1 floor igamma igammac imag integer_pow lgamma log log1p logistic max min mul neg nextafter
    not or polygamma pow real reduce_precision regularized_incomplete_beta rem round rsqrt select_n
    sign sin sinh sqrt square stop_gradient sub tan tanh xor zeta optimization_barrier
    """.split()
)
_MOVING = frozenset(
    """
    broadcast_in_dim concatenate dynamic_slice dynamic_update_slice expand_dims gather pad reshape
    rev scatter slice squeeze transpose split
    """.split()
)
_PLACES = {  # operands that are indices
    "dynamic_slice": lambda n: range(1, n),
    "dynamic_update_slice": lambda n: range(2, n),
    "gather": lambda n: [1],
    "scatter": lambda n: [1],
}
_REDUCING = {"reduce_sum", "reduce_max", "reduce_min", "reduce_prod", "argmax", "argmin"}
_ALONG = {"cumsum", "cumprod", "cummax", "cummin", "cumlogsumexp", "sort"}


def detected(fun: Any, x: jax.Array, only: Callable[..., jax.Array]) -> tuple[Any, tuple[int, ...]]:
    """The pattern of fun's Jacobian at x, a boolean CSR matrix, and the shape of its output.

    only: Returns the only one of fun's outputs, or raises.
    """
    closed = jax.make_jaxpr(lambda x: only(fun(x)[0]))(x)
    constants = [AbstractArray(np.shape(c), None, _concrete(c)) for c in constants_of(closed)]
    (out,) = _run(open_jaxpr(closed), [*constants, AbstractArray(x.shape, e.identity(x.shape))])
    return out.pattern(x.size), out.shape


def _concrete(x: Any) -> Any:
    return None if isinstance(x, jax.core.Tracer) else x


def _run(jaxpr: Jaxpr, values: Sequence[AbstractArray]) -> list[AbstractArray]:
    literal = lambda atom: AbstractArray(np.shape(atom.val), None, atom.val)
    return interpreted(jaxpr, values, _step, literal)


def _step(_: int, eqn: Eqn, ins: list[AbstractArray]) -> Sequence[AbstractArray]:
    shapes = [v.aval.shape for v in eqn.outvars]
    if all(x.entries is None for x in ins):
        outs: list[Any] = [None for _ in shapes]
        if not eqn.effects and all(x.value is not None for x in ins):
            with suppress(Exception):  # what cannot run outside of its program stays unknown
                outs = [*map(_concrete, _evaluated(eqn, [x.value for x in ins]))]
        return [AbstractArray(shape, None, y) for shape, y in zip(shapes, outs, strict=True)]
    if not any(map(is_inexact, eqn.outvars)):  # an integer has no derivative
        return [AbstractArray(shape, None) for shape in shapes]
    name = eqn.primitive.name
    inside: list[AbstractArray] | None = None
    if name == "cond":
        runs = [_called([branch], ins[1:]) for branch in programs_of(eqn)]
        inside = []
        for column in zip(*[run or [] for run in runs], strict=True):
            reached = [x.entries for x in column if x.entries is not None]
            shape = column[0].shape
            inside.append(AbstractArray(shape, e.entrywise(shape, reached) if reached else None))
    elif name in CALLS or name in RULED:
        inside = _called(programs_of(eqn), ins)
    if inside is not None:
        return inside
    active = [x.entries for x in ins if x.entries is not None]
    make = _MADE.get(name, _everywhere)
    results = make(eqn, ins, active, shapes)
    pairs = zip(eqn.outvars, results, strict=True)
    return [AbstractArray(v.aval.shape, entries if is_inexact(v) else None) for v, entries in pairs]


def _called(programs: Sequence[HeldJaxpr], ins: list[AbstractArray]) -> list[AbstractArray] | None:
    if len(programs) != 1 or len(programs[0].jaxpr.invars) != len(ins):
        return None
    consts = [AbstractArray(np.shape(c), None, _concrete(c)) for c in programs[0].consts]
    return _run(programs[0].jaxpr, [*consts, *ins])


# --- transfer functions of the primitives


def _everywhere(eqn: Eqn, ins: Any, active: list[Entries], shapes: Any) -> list[Entries]:
    rule = eqn.params.get("rule")
    if getattr(rule, "reaches", None) == "identity":  # the first inputs, unchanged
        none = e.empty((1, active[0].matrix.shape[1]))
        return [
            x.entries or e.moved([Entries((1,), none)], np.full(x.shape, -1))
            for x in ins[: len(shapes)]
        ]
    return [e.everything(shape, active) for shape in shapes]


def _elementwise(eqn: Eqn, ins: Any, active: list[Entries], shapes: Any) -> list[Entries]:
    if len(shapes) == len(ins) > 1:  # an optimisation barrier
        return _everywhere(eqn, ins, active, shapes)
    return [e.entrywise(shapes[0], active)]


def _moved(eqn: Eqn, ins: list[AbstractArray], active: list[Entries], shapes: Any) -> list[Entries]:
    """The operation itself, applied to the indices of its operands' entries."""
    places = set(_PLACES.get(eqn.primitive.name, lambda n: [])(len(ins)))
    if any(k in places and x.value is None for k, x in enumerate(ins)):
        return [e.everything(shape, active) for shape in shapes]
    operands, start = list[Any](), 0
    for k, x in enumerate(ins):
        if k in places:
            operands.append(x.value)
        elif x.entries is None:
            operands.append(np.full(x.shape, -1, np.int32))
        else:
            operands.append(e.index_array(x.shape, start).astype(np.int32))
            start += int(np.prod(x.shape))
    return [e.moved(active, np.asarray(y)) for y in _evaluated(eqn, operands, True)]


def _evaluated(eqn: Eqn, operands: Sequence[Any], numbers: bool = False) -> list[Any]:
    """Evaluates an equation at concrete operands, also inside of a trace."""
    if numbers and eqn.params.get("fill_value") is not None:
        eqn = eqn.replace(params={**eqn.params, "fill_value": -1})
    with jax.ensure_compile_time_eval():
        outs = bind_again(eqn, operands)
    return list(outs) if eqn.primitive.multiple_results else [outs]


def _reduced(eqn: Eqn, ins: Any, active: list[Entries], shapes: Any) -> list[Entries]:
    return [e.over_axes(active[0], eqn.params["axes"])]


def _lines(eqn: Eqn, ins: Any, active: list[Entries], shapes: Any) -> list[Entries]:
    axis = eqn.params.get("axis", eqn.params.get("dimension"))
    whole = e.entrywise(active[0].shape, active)
    return [e.along(whole, [axis]) for _ in shapes]


def _product(eqn: Eqn, ins: list[AbstractArray], active: Any, shapes: Any) -> list[Entries]:
    contracted, batched = eqn.params["dimension_numbers"]
    indices = []
    for x, sums, batch in zip(ins, contracted, batched, strict=True):
        free = [i for i in range(len(x.shape)) if i not in sums and i not in batch]
        size = [int(np.prod([x.shape[i] for i in some])) for some in (batch, free, sums)]
        indices.append(e.index_array(x.shape).transpose([*batch, *free, *sums]).reshape(size))
    return [Entries(shapes[0], e.product(ins, indices, lambda x: np.asarray(x) != 0))]


def _convolved(eqn: Eqn, ins: list[AbstractArray], active: Any, shapes: Any) -> list[Entries]:
    image, kernel = ins
    p, numbers = eqn.params, eqn.params["dimension_numbers"]
    if kernel.entries is not None or p["batch_group_count"] != 1 or np.prod(image.shape) >= 2**24:
        return [e.everything(shapes[0], active)]
    spatial = [kernel.shape[i] for i in numbers.rhs_spec[2:]]
    index = e.index_array(image.shape).transpose(numbers.lhs_spec) + 1.0
    with jax.ensure_compile_time_eval():
        patches = jax.lax.conv_general_dilated_patches(
            jnp.asarray(index, np.float32), spatial, p["window_strides"], p["padding"],
            p["lhs_dilation"], p["rhs_dilation"], precision=jax.lax.Precision.HIGHEST,
        )  # fmt: skip
    groups = p["feature_group_count"]
    at = np.rint(np.asarray(patches)).astype(np.int64) - 1
    n, out = image.shape[numbers.lhs_spec[0]], shapes[0][numbers.out_spec[1]]
    where = None
    if kernel.value is not None:
        where = (np.asarray(kernel.value) != 0).transpose(numbers.rhs_spec).reshape(out, -1)
    made = e.windows(active[0], at.reshape(n, groups, at.shape[1] // groups, -1), where, out)
    order = np.argsort(numbers.out_spec)
    plain = [shapes[0][i] for i in numbers.out_spec]
    return [e.moved([made], e.index_array(plain).transpose(order))]


_MADE = {
    **dict.fromkeys(_ELEMENTWISE, _elementwise),
    **dict.fromkeys(_MOVING, _moved),
    **dict.fromkeys(_REDUCING, _reduced),
    **dict.fromkeys(_ALONG, _lines),
    "dot_general": _product,
    "conv_general_dilated": _convolved,
}


# --- sparse arrays


def sparse_array(index: np.ndarray, values: jax.Array, shape: Sequence[int]) -> BCOO:
    """A BCOO array: one row of `index` for each axis, sorted, each entry once."""
    indices = jnp.asarray(index.T, np.int32)
    return BCOO((values, indices), shape=tuple(shape), indices_sorted=True, unique_indices=True)


def summed(groups: np.ndarray, terms: jax.Array, like: jax.Array) -> jax.Array:
    """The sums of terms by group, an array like `like`."""
    return jnp.zeros_like(like).at[groups].add(terms)
