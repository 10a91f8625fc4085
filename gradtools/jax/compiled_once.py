"""Caches the compilation of programs that eager code traces again in every call.

JAX caches the compilation of a loop, a `jit` or a `checkpoint` by the identity of its function, but
an operator creates a new function in each call. The user's function is traced in each call, since
the values that it reads may have changed, and programs with equal equations share one compilation.
Captured arrays are arguments of the program, so the cache does not reference arrays.

A program with a user-defined rule (`custom_jvp`, `custom_vjp`, `custom_rule`) is compiled in each
call, because the code of the rule runs later and may read different values. For a JAX function with
a rule, such as `jax.nn.relu`, the equations of its pullback are part of the cache key.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from gradtools.code_origin import is_in
from gradtools.jax import jaxprs
from gradtools.jax._upstream import CustomVJPException, Literal, file_of
from gradtools.jax.jaxprs import Eqn, Jaxpr, open_jaxpr, traced
from gradtools.jax.known_errors import READS_A_VALUE
from gradtools.jax.rules.transposing import pull
from gradtools.jax.trees import is_inexact
from gradtools.rules import JvpRule, Rule

_SMALL = 64  # maximum size of an array in a key
_PLAIN = (type, jax.sharding.Mesh, jax.sharding.AbstractMesh)  # callable objects, not functions


def run_compiled(program: Callable[..., Any], *args: Any) -> Any:
    """Compiles and calls `program(*args)`.

    A program that reads the values of arrays is called without compilation.
    """
    try:
        made, consts = traced(program, *args)
    except READS_A_VALUE:
        return program(*args)
    flat = compiled(made.jaxpr)(consts, jax.tree.leaves(args))
    return jax.tree.unflatten(made.treedef, flat)


def compiled(jaxpr: Jaxpr, derive: Callable[..., Any] = jax.jit) -> Any:
    """Returns `derive(run)`, where `run(consts, xs)` evaluates the jaxpr.

    The same object is returned for equal jaxprs.
    """
    jaxpr = jaxpr.replace(constvars=jaxpr.constvars)  # drops the arrays of a JAX 0.12 jaxpr
    try:
        return _derived(_Program(_key(jaxpr), jaxpr), derive)
    except TypeError:  # a parameter is not comparable or not hashable
        return derive(_Program((), jaxpr).__call__)


@dataclass(frozen=True)
class _Program:
    """A jaxpr as a function of constants and inputs. Programs with equal equations are equal."""

    key: Hashable
    jaxpr: Jaxpr = field(compare=False)

    def __call__(self, consts: Sequence[Any], xs: Sequence[Any]) -> list[Any]:
        return jax.core.eval_jaxpr(self.jaxpr, consts, *xs)


@lru_cache(maxsize=256)
def _derived(program: _Program, derive: Callable[..., Any]) -> Any:
    return derive(program.__call__)


def _key(jaxpr: Any, of_rule: bool = False) -> Hashable:
    """Returns a hashable form of a jaxpr that does not depend on the names of variables.

    of_rule: Whether the jaxpr is the pullback of a rule, which must not contain another rule.
    """
    names: dict[Any, int] = {}

    def named(variables: Sequence[Any]) -> Hashable:
        names.update((v, len(names) + i) for i, v in enumerate(variables))
        return tuple([v.aval for v in variables])

    def read(atoms: Sequence[Any]) -> Hashable:
        return tuple(
            [(v.aval, _value(v.val)) if isinstance(v, Literal) else names[v] for v in atoms]
        )

    rows: list[Hashable] = [named(jaxpr.constvars), named(jaxpr.invars)]
    for eqn in jaxpr.eqns:
        params = eqn.params
        if eqn.primitive.name in jaxprs.RULED and not of_rule and _is_of_jax(eqn):
            params = {k: x for k, x in params.items() if not _is_function(x)}
            rows.append(_key_of_rule(eqn))
        rows += [(eqn.primitive, read(eqn.invars), _value(params), eqn.ctx), named(eqn.outvars)]
    return (*rows, frozenset(jaxpr.effects), read(jaxpr.outvars))


def _value(x: Any) -> Hashable:
    """Returns a hashable form of a parameter of an equation.

    Parameters with equal forms have the same effect. Raises TypeError for large arrays and for
    functions with a closure.
    """
    if isinstance(x, dict):
        return tuple([(k, _value(v)) for k, v in x.items()])
    if isinstance(x, tuple | list):
        return (type(x), *map(_value, x))
    if hasattr(open_jaxpr(x), "eqns"):
        return _key(open_jaxpr(x)), _value(tuple(getattr(x, "consts", ())))
    if isinstance(x, jax.Array | np.ndarray | np.generic | float | complex):
        if isinstance(x, jax.core.Tracer) or np.size(x) > _SMALL:
            raise TypeError("an array")
        array = np.asarray(x)  # the bytes distinguish 0.0 from -0.0
        return type(x), str(array.dtype), array.shape, array.tobytes()
    is_rule = isinstance(x, Rule)
    if is_rule and (x.user_functions or type(x) not in (Rule, JvpRule)):
        raise TypeError("not hashable: a rule that may read arrays or be a new object")
    if not is_rule and _is_function(x) and getattr(x, "__closure__", x) is not None:
        raise TypeError("not hashable: a function that may read arrays")
    return type(x), x


def _is_of_jax(eqn: Eqn) -> bool:
    """Returns whether the function of a custom rule is defined by JAX or marked as a chunk."""
    function = jaxprs.programs_of(eqn)[0].jaxpr
    return jaxprs.is_chunk(function) or is_in(("jax",), file_of(function))


def _key_of_rule(eqn: Eqn) -> Hashable:
    """Returns a hashable form of the pullback of a function with a rule."""
    given = lambda ys: [jnp.ones_like(y) if is_inexact(y) else None for y in ys]
    pulled = lambda *xs: pull(lambda *xs: jaxprs.bound(eqn, xs), xs, given)
    try:
        closed = jax.make_jaxpr(pulled)(*[v.aval for v in eqn.invars])
    except CustomVJPException as error:  # some inputs are captured arrays
        raise TypeError("not hashable: a rule that captures arrays") from error
    if closed.consts:
        raise TypeError("not hashable: a rule that reads arrays")
    return _key(jaxprs.live(open_jaxpr(closed)), of_rule=True)


def _is_function(x: Any) -> bool:
    """Returns whether x is a function, including functions that JAX has transformed."""
    return (callable(x) or hasattr(x, "call_wrapped")) and not isinstance(x, _PLAIN)
