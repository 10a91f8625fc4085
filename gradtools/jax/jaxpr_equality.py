"""Whether two jaxprs are equal up to the names of their variables.

JAX keeps what it derives from a program, such as its linearisation, by the program's identity, and
what is traced anew is another one. So of programs that are alike the first is run (hash consing),
and what was derived from it serves again. Python still runs each time: what it reads may change.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import jax
import numpy as np

from gradtools.jax._upstream import ClosedJaxpr, Jaxpr, Literal
from gradtools.jax.jaxprs import equations, open_jaxpr
from gradtools.rules import Rule

_PROGRAMS = (Jaxpr, ClosedJaxpr)
_NO_CODE = (type, jax.sharding.Mesh, jax.sharding.AbstractMesh)  # callable, and yet data
_KEPT = 128  # programs


def derived(closed: Any, derive: Callable[[Callable[..., Any]], Any]) -> Any:
    """derive(run) for a program `run(consts, xs)`, the same one for programs that are alike."""
    jaxpr, eqns = open_jaxpr(closed), equations(closed)
    if _holds_code(jaxpr):
        return derive(_Runs(jaxpr))
    return _derived(_Alike(jaxpr, eqns), derive)


@lru_cache(maxsize=_KEPT)
def _derived(alike: _Alike, derive: Callable[..., Any]) -> Any:
    return derive(_Runs(alike.jaxpr))


class _Runs:
    """A program as a function of what it closes over and of its arguments."""

    def __init__(self, jaxpr: Any) -> None:
        self.jaxpr = jaxpr

    def __call__(self, consts: Sequence[Any], xs: Sequence[Any]) -> list[Any]:
        return jax.core.eval_jaxpr(self.jaxpr, consts, *xs)


class _Alike:
    """A program, equal to those that are alike. eqns: Its equations at any depth."""

    def __init__(self, jaxpr: Any, eqns: Sequence[Any]) -> None:
        self.jaxpr = jaxpr
        avals = tuple([v.aval for v in (*jaxpr.constvars, *jaxpr.invars)])
        self._hash = hash((avals, *map(_numbered, eqns)))

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Alike) and _alike(self.jaxpr, other.jaxpr)


def _numbered(eqn: Any) -> Any:
    """The operation and the numbers among its operands, which often are all that differs."""
    return eqn.primitive, tuple([_bits(v.val) for v in eqn.invars if isinstance(v, Literal)])


def _alike(a: Any, b: Any) -> bool:
    if a is b:
        return True
    if len(a.eqns) != len(b.eqns) or a.effects != b.effects:
        return False
    names: dict[Any, Any] = {}  # of a's variables, those of b

    def bound(us: Sequence[Any], vs: Sequence[Any]) -> bool:
        names.update(zip(us, vs, strict=False))
        return len(us) == len(vs) and all(u.aval == v.aval for u, v in zip(us, vs, strict=True))

    def read(us: Sequence[Any], vs: Sequence[Any]) -> bool:
        return len(us) == len(vs) and all(map(same, us, vs))

    def same(u: Any, v: Any) -> bool:
        if isinstance(u, Literal):
            return isinstance(v, Literal) and u.aval == v.aval and _bits(u.val) == _bits(v.val)
        return names.get(u) is v

    return (
        bound(a.constvars, b.constvars)
        and bound(a.invars, b.invars)
        and all(
            p.primitive is q.primitive
            and p.ctx == q.ctx
            and p.effects == q.effects
            and read(p.invars, q.invars)
            and _same(p.params, q.params)
            and bound(p.outvars, q.outvars)
            for p, q in zip(a.eqns, b.eqns, strict=True)
        )
        and read(a.outvars, b.outvars)
    )


def _same(p: Any, q: Any) -> bool:
    if p is q:
        return True
    if type(p) is not type(q):
        return False
    if isinstance(p, dict):
        return p.keys() == q.keys() and all(_same(p[k], q[k]) for k in p)
    if isinstance(p, tuple | list):
        return len(p) == len(q) and all(map(_same, p, q))
    if isinstance(p, _PROGRAMS):
        return _alike(open_jaxpr(p), open_jaxpr(q))
    if isinstance(p, float | complex | np.ndarray | np.generic):
        return _bits(p) == _bits(q)
    return (p == q) is True


def _bits(x: Any) -> tuple[Any, ...]:
    """A number, in which NaN is itself and -0.0 is not 0.0."""
    x = np.asarray(x)
    return x.shape, x.dtype, x.tobytes()


def _holds_code(p: Any) -> bool:
    """Whether a program, or a parameter, holds Python functions, or arrays within its parts.

    What functions read may change, and neither they nor arrays are to be kept alive.
    """
    if isinstance(p, _PROGRAMS):
        inside = (eqn.params for eqn in p.eqns)
        return bool(getattr(p, "consts", ())) or any(map(_holds_code, inside))
    if isinstance(p, dict | tuple | list):
        return any(map(_holds_code, p.values() if isinstance(p, dict) else p))
    if isinstance(p, Rule):
        return True
    is_code = callable(p) or hasattr(p, "call_wrapped")
    return (is_code and not isinstance(p, _NO_CODE)) or isinstance(p, jax.Array)
