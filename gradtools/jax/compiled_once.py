"""A compilation cache for programs that eager code rebuilds at every call.

JAX caches the compilation of a loop, a `jit` or a `checkpoint` by the identity of its body, and an
operator builds a new body from the user's function at each call. So the function is traced at each
call, since what it reads may have changed, and equal programs share one compilation::

    key = (the function's code, its jaxpr up to the names of variables)

Captured arrays are arguments of the program, so the cache keeps no array alive. A rule in the
program (`custom_jvp`, `custom_vjp`, `custom_rule`) runs later, when it is differentiated: its code
and the numbers that it reads belong to the key. A program whose rules read arrays is not cached.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache, partial
from types import FunctionType, MethodType, ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from gradtools.function_variables import cells_of, globals_of, parts_of
from gradtools.jax._upstream import Literal
from gradtools.jax.jaxprs import Jaxpr, open_jaxpr, without_consts
from gradtools.jax.rules.kept_alive import LIFE
from gradtools.jax.rules.primitives import LinearizedRule, captures_nothing
from gradtools.rules import JvpRule, Rule

Program = Callable[[Sequence[Any], Sequence[Any]], list[Any]]  # (consts, xs) -> ys

_KEPT = 256  # programs
_SMALL = 64  # entries of an array that may be part of a key
_NUMBERS = (bool, int, float, complex, str, bytes, type(None), np.generic)
_LIBRARIES = ("jax", "jaxlib", "numpy", "flax", "gradtools", "builtins")


def compiled(f: Any, closed: Jaxpr, derive: Callable[[Program], Any] = jax.jit) -> Any:
    """`derive(run)` of a program `run(consts, xs)`; the same object for equal programs.

    Args:
        f: The user's function that the program was traced from; errors name its lines.
        closed: The program.
        derive: Transforms the program's function.
    """
    jaxpr = without_consts(closed)
    f = f.func if isinstance(f, partial) else f
    source = inspect.unwrap(getattr(f, "__func__", f))
    try:
        key = _Key((getattr(source, "__code__", None) or type(source), _program(jaxpr)), jaxpr)
        return _derived(key, derive)
    except TypeError:  # not comparable, or not hashable
        return derive(partial(_run, jaxpr))


def run_compiled(f: Any, program: Callable[..., Any], *args: Any) -> Any:
    """`program(*args)`, compiled once; uncompiled if f reads values of arrays."""
    try:
        closed, shapes = jax.make_jaxpr(program, return_shape=True)(*args)
    except (jax.errors.ConcretizationTypeError, jax.errors.TracerArrayConversionError):
        return program(*args)
    consts = [own(c) for c in closed.consts]
    flat = compiled(f, closed)(consts, jax.tree.leaves(args))
    return jax.tree.unflatten(jax.tree.structure(shapes), flat)


def own(x: Any) -> Any:
    """A copy of a NumPy array, which the user may overwrite before the backward pass."""
    return jnp.array(x) if isinstance(x, np.ndarray) else x


def _run(jaxpr: Any, consts: Sequence[Any], xs: Sequence[Any]) -> list[Any]:
    return jax.core.eval_jaxpr(jaxpr, consts, *xs)


@dataclass(frozen=True)
class _Key:
    """A program that compares equal to programs which compute the same."""

    key: Hashable
    jaxpr: Any = field(compare=False)


@lru_cache(maxsize=_KEPT)
def _derived(key: _Key, derive: Callable[[Program], Any]) -> Any:
    return derive(partial(_run, key.jaxpr))


def _program(jaxpr: Any) -> Hashable:
    """A hashable form of a jaxpr, up to the names of its variables."""
    names: dict[Any, int] = {}

    def bound(variables: Sequence[Any]) -> Hashable:
        for v in variables:
            names[v] = len(names)
        return tuple([v.aval for v in variables])

    def read(atoms: Sequence[Any]) -> Hashable:
        return tuple(
            [(v.aval, _value(v.val)) if isinstance(v, Literal) else names[v] for v in atoms]
        )

    rows: list[Hashable] = [bound(jaxpr.constvars), bound(jaxpr.invars)]
    for eqn in jaxpr.eqns:
        params = _value({k: v for k, v in eqn.params.items() if k != LIFE})
        rows.append((eqn.primitive, read(eqn.invars), params, eqn.ctx, frozenset(eqn.effects)))
        rows.append(bound(eqn.outvars))
    return (*rows, read(jaxpr.outvars))


def _value(x: Any) -> Hashable:
    """A hashable form of an equation's parameter, equal for parameters that do the same.

    Raises TypeError for large arrays, and for rules that read arrays.
    """
    if isinstance(x, dict):
        return tuple([(k, _value(v)) for k, v in x.items()])
    if isinstance(x, tuple | list):
        return (type(x), *map(_value, x))
    if hasattr(open_jaxpr(x), "eqns"):
        return _program(open_jaxpr(x)), _value(tuple(getattr(x, "consts", ())))
    if isinstance(x, (jax.Array, np.ndarray, np.generic, float, complex)):
        if isinstance(x, jax.core.Tracer) or np.size(x) > _SMALL:
            raise TypeError("an array")
        array = np.asarray(x)  # its bits tell 0.0 from -0.0
        return type(x), str(array.dtype), array.shape, array.tobytes()
    if isinstance(x, Rule) or ((callable(x) or hasattr(x, "call_wrapped")) and not _is_data(x)):
        return tuple(_read(x))
    return type(x), x


def _is_data(x: Any) -> bool:
    return isinstance(x, (type, ModuleType, jax.sharding.Mesh, jax.sharding.AbstractMesh))


def _is_of_a_library(name: str | None) -> bool:
    return (name or "").partition(".")[0] in _LIBRARIES


def _is_module_of_the_user(x: Any) -> bool:
    return isinstance(x, ModuleType) and not _is_of_a_library(x.__name__)


def _read(function: Any) -> Iterator[Hashable]:
    """The code that runs when a rule is differentiated, and the numbers that it reads.

    Of a library's functions only the closures are read, and in them functions, rules and numbers.
    """
    todo, known = [function], dict[int, Any]()  # keeps the objects: ids are reused
    while todo:
        x = todo.pop()
        if isinstance(x, jax.Array | np.ndarray) or _is_module_of_the_user(x):
            raise TypeError("read by a rule")
        if isinstance(x, _NUMBERS):
            yield _value(x)
            continue
        if id(x) in known or _is_data(x):
            continue
        known[id(x)] = x
        parts = parts_of(x)
        if isinstance(x, LinearizedRule) and x.source is not None:
            yield x.source
        elif isinstance(x, Rule):
            if not (captures_nothing(x) or (type(x) in (Rule, JvpRule) and x.contract)):
                raise TypeError("a rule of this call only")
            yield x
            parts = list(x.user_functions)
        elif isinstance(x, FunctionType):
            yield x.__code__
            values = [*cells_of(x).values(), *(x.__defaults__ or ())]
            values += (x.__kwdefaults__ or {}).values()
            if _is_of_a_library(x.__module__):
                own = (Rule, jax.Array, np.ndarray, *_NUMBERS)
                calls = lambda y: callable(y) or hasattr(y, "call_wrapped")
                parts = [y for y in values if isinstance(y, own) or calls(y)]
            else:
                parts = values + list(globals_of(x).values())
        elif isinstance(x, MethodType):
            parts = [x.__func__, x.__self__]
        else:
            yield type(x), len(parts)
            parts = parts or [*getattr(x, "params", ()), *getattr(x, "__dict__", {}).values()]
            parts += [x.f] if hasattr(x, "call_wrapped") else []  # JAX's WrappedFun
        todo += parts
