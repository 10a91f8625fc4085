"""Taylor mode in JAX: an interpreter of jaxprs on arrays with their Taylor coefficients."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from gradtools.backend import Fun
from gradtools.jax import jaxprs
from gradtools.jax.engines import DERIVATIVE_SCOPE, note_derivative
from gradtools.taylor import SLOPES, Algebra, Series, powers

_LINEAR = frozenset(
    "add add_any sub neg reshape transpose broadcast_in_dim squeeze expand_dims slice "
    "concatenate reduce_sum cumsum rev real imag conj complex convert_element_type copy copy_p "
    "split reduce_window_sum fft".split()
)
_BILINEAR = frozenset(("mul", "dot_general", "conv_general_dilated"))
_IN_ITS_FIRST = {  # linear in so many first operands, if the others are constant
    "gather": 1,
    "dynamic_slice": 1,
    "pad": 2,
    "div": 1,
}
_ELEMENTWISE = frozenset(
    "abs acos acosh asin asinh atan atanh cbrt ceil cosh digamma erfc erf_inv floor integer_pow "
    "lgamma round sign sinh tan".split()
)
_INLINED = ("jit", "pjit", "closed_call", "core_call")


def carry_series(
    fun: Fun, moved: Sequence[Series], algebra: Algebra
) -> tuple[list[Series], list[Any]]:
    """fun's outputs with their series, and its extras."""
    counts: list[int] = []

    def flat(*leaves: Any) -> list[Any]:
        outs, extras = fun(*leaves)
        counts.append(len(outs))
        return [*outs, *extras]

    note_derivative()
    with jax.named_scope(DERIVATIVE_SCOPE):
        closed = jax.make_jaxpr(flat)(*[x.primal for x in moved])
        results = _run(closed, moved, algebra)
    still = (None,) * algebra.order
    outs = [y if isinstance(y, Series) else Series(y, still) for y in results[: counts[-1]]]
    return outs, [y.primal if isinstance(y, Series) else y for y in results[counts[-1] :]]


def _run(closed: Any, entries: Sequence[Any], algebra: Algebra) -> list[Any]:
    consts = [*closed.consts]
    step = lambda i, eqn, xs: _step(eqn, xs, algebra)
    return jaxprs.interpreted(jaxprs.open_jaxpr(closed), [*consts, *entries], step)


def _step(eqn: Any, xs: list[Any], algebra: Algebra) -> Sequence[Any]:
    moved = [i for i, x in enumerate(xs) if isinstance(x, Series)]
    if not moved:
        return jaxprs.bound(eqn, xs)
    name = eqn.primitive.name
    if name in _INLINED:
        return _run(eqn.params["jaxpr"], xs, algebra)
    primals = [x.primal if isinstance(x, Series) else x for x in xs]
    movers = [xs[i] for i in moved]

    def at(*values: Any) -> list[Any]:
        filled = list(primals)
        for i, value in zip(moved, values, strict=True):
            filled[i] = value
        return jaxprs.bound(eqn, filled)

    first = _IN_ITS_FIRST.get(name, 0)
    alone = name in _BILINEAR and len(moved) == 1
    if name in _LINEAR or alone or (first and moved[-1] < first):
        return _linear(eqn, xs, moved, primals, at, algebra)
    if name in _BILINEAR:
        x, y = movers
        terms = algebra.product(lambda a, b: jaxprs.bound(eqn, [a, b])[0], x, y, False)
        return [Series(at(x.primal, y.primal)[0], tuple(terms))]
    if name == "div":
        return [_quotient(xs[0], xs[1], algebra)]
    x, order = movers[0].primal, algebra.order
    real = name in _ELEMENTWISE and not jnp.iscomplexobj(x)
    if len(moved) == 1 and (name in SLOPES or real):
        y, slopes = at(x)[0], list[Any]()  # f', f'', ... at x
        if name in SLOPES:
            slopes = SLOPES[name](jnp, x, y, order)
        elif name == "integer_pow":
            slopes = powers(x, eqn.params["y"], order)
        else:
            one = jnp.ones_like(x)
            f: Any = lambda x: at(x)[0]
            for _ in range(order):
                f = partial(lambda g, x: jax.jvp(g, (x,), (one,))[1], f)
                slopes.append(f(x))
        return [Series(y, tuple(algebra.elementwise(slopes, movers[0])))]
    return _any(eqn, movers, at, algebra)


def _linear(
    eqn: Any, xs: list[Any], moved: list[int], primals: list[Any], at: Any, algebra: Algebra
) -> Sequence[Any]:
    """The series of an equation that is affine in its operands with series."""
    affine = eqn.primitive.name in ("add", "add_any", "sub", "concatenate", "pad", "complex")
    still = [jnp.zeros_like(p) if affine and i not in moved else p for i, p in enumerate(primals)]

    def part(*values: Any) -> list[Any]:
        filled = list(still)
        for i, value in zip(moved, values, strict=True):
            filled[i] = value
        return jaxprs.bound(eqn, filled)

    movers = [xs[i] for i in moved]
    ys = at(*[x.primal for x in movers])
    if not any(map(jaxprs.is_inexact, eqn.outvars)):  # a conversion to integers
        return ys
    terms = algebra.linear(part, movers, False)
    return [Series(y, tuple(t)) for y, t in zip(ys, terms, strict=True)] if terms else ys


def _quotient(x: Any, y: Any, algebra: Algebra) -> Series:
    """The series of x / y, for a y with a series."""
    slopes = powers(y.primal, -1, algebra.order)
    inverse = Series(1 / y.primal, tuple(algebra.elementwise(slopes, y)))
    if not isinstance(x, Series):
        terms = algebra.linear(lambda t: [x * t], [inverse], False)[0]
        return Series(x / y.primal, tuple(terms))
    terms = algebra.product(lambda a, b: a * b, x, inverse, False)
    return Series(x.primal / y.primal, tuple(terms))


def _any(eqn: Any, movers: list[Series], at: Any, algebra: Algebra) -> Sequence[Any]:
    """The series of any equation, by nested forward mode."""
    inexact = jaxprs.inexact(eqn.outvars)
    if not any(inexact):
        return at(*[x.primal for x in movers])

    def fun(*values: Any) -> tuple[list[Any], list[Any]]:
        ys = at(*values)
        pairs = list(zip(ys, inexact, strict=True))
        return [y for y, keeps in pairs if keeps], [y for y, keeps in pairs if not keeps]

    outs, extras = algebra.general(fun, movers)
    left, rest = iter(outs), iter(extras)
    return [next(left) if keeps else next(rest) for keeps in inexact]
