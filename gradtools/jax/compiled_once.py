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
from functools import lru_cache, partial
from types import FunctionType, MethodType, ModuleType
from typing import Any

import jax
import numpy as np

from gradtools.function_variables import cells_of, globals_of, parts_of
from gradtools.jax._upstream import Literal
from gradtools.jax.jaxprs import Jaxpr, open_jaxpr, own, traced
from gradtools.rules import JvpRule, Rule

_SMALL = 64  # entries of an array that may be part of a key
_NUMBERS = (bool, int, float, complex, str, bytes, type(None), np.generic)
_DATA = (type, ModuleType, jax.sharding.Mesh, jax.sharding.AbstractMesh)
_LIBRARIES = ("jax", "jaxlib", "numpy", "flax", "gradtools", "builtins")


def run_compiled(f: Any, program: Callable[..., Any], *args: Any) -> Any:
    """`program(*args)`, compiled once; uncompiled if f reads values of arrays."""
    try:
        made, consts = traced(program, *args)
    except (jax.errors.ConcretizationTypeError, jax.errors.TracerArrayConversionError):
        return program(*args)
    flat = compiled(f, made.without_constants().jaxpr)([*map(own, consts)], jax.tree.leaves(args))
    return jax.tree.unflatten(made.treedef, flat)


def compiled(f: Any, jaxpr: Jaxpr, derive: Callable[..., Any] = jax.jit) -> Any:
    """`derive(run)` of a program `run(consts, xs)`; the same object for equal programs.

    Args:
        f: The user's function that the program was traced from; errors name its lines.
        jaxpr: The program.
        derive: Transforms the program's function.
    """
    f = f.func if isinstance(f, partial) else f
    source = inspect.unwrap(getattr(f, "__func__", f))
    code = getattr(source, "__code__", None) or type(source)
    try:
        return _derived(_Program((code, _key(jaxpr)), jaxpr), derive)
    except TypeError:  # not comparable, or not hashable
        return derive(_Program((), jaxpr))


class _Program:
    """A jaxpr as a function of constants and inputs, equal to others that compute the same."""

    def __init__(self, key: Hashable, jaxpr: Any) -> None:
        self.key, self.jaxpr = key, jaxpr

    def __hash__(self) -> int:
        return hash(self.key)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Program) and self.key == other.key

    def __call__(self, consts: Sequence[Any], xs: Sequence[Any]) -> list[Any]:
        return jax.core.eval_jaxpr(self.jaxpr, consts, *xs)


@lru_cache(maxsize=256)
def _derived(program: _Program, derive: Callable[..., Any]) -> Any:
    return derive(lambda consts, xs: program(consts, xs))


def _key(jaxpr: Any) -> Hashable:
    """A hashable form of a jaxpr, up to the names of its variables."""
    names: dict[Any, int] = {}

    def bound(variables: Sequence[Any]) -> Hashable:
        names.update((v, len(names) + i) for i, v in enumerate(variables))
        return tuple([v.aval for v in variables])

    def read(atoms: Sequence[Any]) -> Hashable:
        return tuple(
            [(v.aval, _value(v.val)) if isinstance(v, Literal) else names[v] for v in atoms]
        )

    rows: list[Hashable] = [bound(jaxpr.constvars), bound(jaxpr.invars)]
    for eqn in jaxpr.eqns:
        params, effects = _value(eqn.params), frozenset(eqn.effects)
        rows += [(eqn.primitive, read(eqn.invars), params, eqn.ctx, effects), bound(eqn.outvars)]
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
        return _key(open_jaxpr(x)), _value(tuple(getattr(x, "consts", ())))
    if isinstance(x, jax.Array | np.ndarray | np.generic | float | complex):
        if isinstance(x, jax.core.Tracer) or np.size(x) > _SMALL:
            raise TypeError("an array")
        array = np.asarray(x)  # its bits tell 0.0 from -0.0
        return type(x), str(array.dtype), array.shape, array.tobytes()
    if _runs(x) or isinstance(x, Rule):
        return tuple(_read(x))
    return type(x), x


def _runs(x: Any) -> bool:
    """Whether x is a function, or one of JAX's transformed functions."""
    return (callable(x) or hasattr(x, "call_wrapped")) and not isinstance(x, _DATA)


def _is_of_a_library(name: str | None) -> bool:
    return (name or "").partition(".")[0] in _LIBRARIES


def _read(function: Any) -> Iterator[Hashable]:
    """The code that runs when a rule is differentiated, and the numbers that it reads.

    Of a library's functions only the closures are read, and in them functions, rules and numbers.
    """
    todo, known = [function], dict[int, Any]()  # keeps the objects: ids are reused
    while todo:
        x = todo.pop()
        is_module = isinstance(x, ModuleType) and not _is_of_a_library(x.__name__)
        if isinstance(x, jax.Array | np.ndarray) or is_module:
            raise TypeError("read by a rule")
        if isinstance(x, _NUMBERS):
            yield _value(x)
        elif id(x) not in known and not isinstance(x, _DATA):
            known[id(x)] = x
            if isinstance(x, Rule):
                if type(x) not in (Rule, JvpRule):
                    raise TypeError("a rule of this call only")
                yield x
                todo += x.user_functions
            elif isinstance(x, FunctionType):
                yield x.__code__
                values = [*cells_of(x).values(), *(x.__defaults__ or ())]
                values += (x.__kwdefaults__ or {}).values()
                if _is_of_a_library(x.__module__):
                    kinds = (Rule, jax.Array, np.ndarray, *_NUMBERS)
                    todo += [y for y in values if isinstance(y, kinds) or _runs(y)]
                else:
                    todo += values + list(globals_of(x).values())
            elif isinstance(x, MethodType):
                todo += [x.__func__, x.__self__]
            else:
                parts = parts_of(x)
                yield type(x), len(parts)
                todo += parts or [*getattr(x, "params", ()), *getattr(x, "__dict__", {}).values()]
                todo += [x.f] if hasattr(x, "call_wrapped") else []  # JAX's WrappedFun
