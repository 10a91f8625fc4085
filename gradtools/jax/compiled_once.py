"""A compilation cache for programs that eager code rebuilds at every call.

JAX caches the compilation of a loop, a `jit` or a `checkpoint` by the identity of its body, and an
operator builds a new body from the user's function at each call. So the function is traced at each
call (Python state may have changed), and equal programs of one function share one compilation
(hash consing):

    key = (the function's code, its jaxpr up to the names of variables)

Captured arrays are arguments of the program, so the cache keeps no array alive. A rule in the
program (`custom_jvp`, `custom_vjp`, `custom_rule`) runs later, when it is differentiated. Its code
and the numbers that it reads belong to the key; if it reads arrays, the program is not cached.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache, partial
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from gradtools.function_variables import cells_of, globals_of, names_in, parts_of
from gradtools.jax._upstream import Literal
from gradtools.jax.jaxprs import Jaxpr, open_jaxpr, without_consts
from gradtools.jax.rules.kept_alive import LIFE
from gradtools.jax.rules.primitives import LinearizedRule, captures_nothing
from gradtools.rules import JvpRule, Rule

Program = Callable[[Sequence[Any], Sequence[Any]], list[Any]]  # (consts, xs) -> ys

_KEPT = 256  # programs
_SMALL = 64  # entries of an array that may be part of a key
_NUMBERS = (bool, int, float, complex, str, bytes, type(None), np.generic)
_CONTAINERS = (list, tuple, dict, set, frozenset)
_DATA = (type, CodeType, jax.sharding.Mesh, jax.sharding.AbstractMesh)  # callable, and yet data


def compiled(f: Any, closed: Jaxpr, derive: Callable[[Program], Any] = jax.jit) -> Any:
    """`derive(run)` of a program `run(consts, xs)`; the same object for equal programs.

    Args:
        f: The user's function that the program was traced from. Its code (or its type, without
            any) is part of the key, for errors name its lines.
        closed: The program.
        derive: Transforms the program's function.
    """
    jaxpr = without_consts(closed)
    f = f.func if isinstance(f, partial) else f
    source = inspect.unwrap(getattr(f, "__func__", f))
    try:
        key = _Key((getattr(source, "__code__", None) or type(source), _program(jaxpr)), jaxpr)
        hash(key)
    except TypeError:  # not comparable, or not hashable
        return derive(partial(_run, jaxpr))
    return _derived(key, derive)


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


@lru_cache(maxsize=_KEPT)
def _derived(key: _Key, derive: Callable[[Program], Any]) -> Any:
    return derive(partial(_run, key.jaxpr))


@dataclass(frozen=True)
class _Key:
    """A program that compares equal to programs which compute the same."""

    key: Hashable
    jaxpr: Any = field(compare=False)


class _NotComparable(TypeError):
    """A program contains arrays or unknown objects, which a cache must not keep alive."""


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
        is_callback = "callback" in eqn.primitive.name
        params = _value(eqn.params, is_callback)
        rows.append((eqn.primitive, read(eqn.invars), params, eqn.ctx, frozenset(eqn.effects)))
        rows.append(bound(eqn.outvars))
    return (*rows, read(jaxpr.outvars))


def _value(x: Any, is_callback: bool = False) -> Hashable:
    """A hashable form of an equation's parameter, equal for parameters that do the same."""
    if isinstance(x, dict):
        return tuple([(k, _value(v, is_callback)) for k, v in x.items() if k != LIFE])
    if isinstance(x, tuple | list):
        return (type(x), *[_value(v, is_callback) for v in x])
    if hasattr(open_jaxpr(x), "eqns"):
        return _program(open_jaxpr(x)), _value(tuple(getattr(x, "consts", ())))
    if isinstance(x, _NUMBERS):
        return _bits(x)
    if isinstance(x, jax.Array | np.ndarray):
        if isinstance(x, jax.core.Tracer) or x.size > _SMALL:
            raise _NotComparable
        return type(x), _bits(np.asarray(x))
    if isinstance(x, Rule):
        return tuple(_read([x]))
    if (callable(x) or hasattr(x, "call_wrapped")) and not isinstance(x, _DATA):
        reads = tuple(_read([x]))
        return (x, reads) if is_callback else reads  # a callback is called, and not traced
    return type(x), x


def _bits(x: Any) -> Hashable:
    """A number by its type and bits, which tells 0.0 from -0.0 and 1 from True."""
    if isinstance(x, float | complex | np.ndarray | np.generic):
        array = np.asarray(x)
        return type(x), str(array.dtype), array.shape, array.tobytes()
    return type(x), x


def _read(functions: Sequence[Any]) -> Iterator[Hashable]:
    """The code of functions that run when a rule is differentiated, and the values they read."""
    todo, known = list(functions), dict[int, Any]()  # keeps the objects: ids are reused
    while todo:
        x = todo.pop()
        if isinstance(x, _NUMBERS):
            yield _bits(x)
        elif isinstance(x, jax.Array | np.ndarray):
            raise _NotComparable
        elif id(x) not in known:
            known[id(x)] = x
            parts = _parts(x)
            if isinstance(x, FunctionType):
                yield x.__code__
            elif isinstance(x, _CONTAINERS):
                yield type(x), len(x)
            elif isinstance(x, LinearizedRule) and x.source is not None:
                yield x.source
            elif isinstance(x, Rule) or not (parts or hasattr(x, "__dict__")):
                users = isinstance(x, Rule) and type(x) in (Rule, JvpRule) and x.contract
                if isinstance(x, Rule) and not (users or captures_nothing(x)):
                    raise _NotComparable  # made by this call only
                yield x
            else:
                yield (type(x),)
            todo += parts


def _parts(x: Any) -> list[Any]:
    """The objects that a function reads, or that an object references.

    For a function of a library these are its closure and defaults only.
    """
    if isinstance(x, FunctionType):
        bound = [*cells_of(x).values(), *(x.__defaults__ or ()), *(x.__kwdefaults__ or {}).values()]
        if not _is_a_library(getattr(x, "__module__", None) or ""):
            return bound + _globals(x)
        # A library's closure may change results by these; by its traces and caches it does not.
        values = (Rule, jax.Array, np.ndarray, *_NUMBERS)
        calls = lambda y: callable(y) or hasattr(y, "call_wrapped")
        return [y for y in bound if isinstance(y, values) or calls(y)]
    if isinstance(x, (ModuleType, *_DATA)):
        return []
    if isinstance(x, MethodType):
        return [x.__func__, x.__self__]
    if isinstance(x, Rule):
        return list(x.user_functions)
    names = getattr(type(x), "__gradtools_holds__", None)
    if names is not None:
        return [getattr(x, name) for name in names]
    if isinstance(x, set | frozenset):
        return sorted(x, key=repr)
    if parts := parts_of(x):
        return parts
    if hasattr(x, "call_wrapped"):  # JAX's WrappedFun
        return [x.f, *x.params]
    wrapped = [x.__wrapped__] if hasattr(x, "__wrapped__") else []
    return wrapped + list(getattr(x, "__dict__", {}).values())


def _globals(f: FunctionType) -> list[Any]:
    """The globals that a function names, and the attributes it may read of the user's modules."""
    result = []
    for x in globals_of(f).values():
        if isinstance(x, ModuleType) and not _is_a_library(x.__name__):
            result += [vars(x)[n] for n in names_in(f.__code__) if n in vars(x)]
        result.append(x)
    return result


def _is_a_library(name: str) -> bool:
    return name.partition(".")[0] in ("jax", "jaxlib", "numpy", "flax", "gradtools", "builtins")
