"""Defines opaque operations, which a formula shows by name and which the framework computes.

Convolutions, Fourier transforms, loops and functions with a custom rule are opaque. The adjoint of
an opaque operation is written as a vjp. The framework computes the operation, the vjp and the
adjoint of the vjp::

    y = solve(A, b)        Ā = vjp₁[solve](A, b; ȳ)        b̄ = vjp₂[solve](A, b; ȳ)
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from gradtools.rules import replaced_at
from gradtools.seeing.formulas import typesetting as ts
from gradtools.seeing.formulas.expressions import SEVERAL, Expr, expr, is_zero, operation

if TYPE_CHECKING:
    from gradtools.backend import Backend
    from gradtools.seeing.formulas.writing import Writer


@dataclass(frozen=True, eq=False)
class OpaqueFunction:
    """A function of NumPy arrays that PyTorch or JAX evaluates and differentiates."""

    backend: Backend
    run: Callable[..., Sequence[Any]]  # maps framework arrays to framework arrays
    likes: Sequence[Any]  # example array of each operand (dtype, device); None allows any dtype
    moving: tuple[bool, ...]  # whether each operand has a derivative

    def value(self, *values: np.ndarray) -> list[np.ndarray]:
        """Evaluates the function; returns the outputs as NumPy arrays."""
        backend, first = self.backend, next((x for x in self.likes if x is not None), None)
        pairs = zip(values, self.likes, strict=True)
        typed = lambda v, like: backend.cast(np.array(v), like)
        xs = [backend.asarray(v, first) if x is None else typed(v, x) for v, x in pairs]
        return [np.asarray(backend.to_numpy(y)) for y in self.run(*xs)]

    def vjp(self, chosen: Sequence[int], wanted: Sequence[int]) -> OpaqueFunction:
        """Returns the vjp of the outputs `chosen` with respect to the operands `wanted`.

        The vjp is a function of all operands and of the cotangents of the chosen outputs.
        """
        count, backend = len(self.moving), self.backend

        def pulled(*both: Any) -> list[Any]:
            xs = both[:count]

            def some(*at: Any) -> tuple[list[Any], list[Any]]:
                ys = self.run(*replaced_at(xs, wanted, at))
                return [ys[k] for k in chosen], []

            some.caller = "formula"  # type: ignore[attr-defined]
            at = [xs[k] for k in wanted]
            result = backend.vjp(some, at, groups=None, once=False)
            pairs = zip(both[count:], result.outs, strict=True)
            cotangents = [backend.cast(c, backend.dtype_name(y)) for c, y in pairs]
            grads = zip(at, result.pullback(cotangents), strict=True)
            return [backend.zeros_like(x) if g is None else g for x, g in grads]

        likes, moving = (*self.likes, *[None] * len(chosen)), (*self.moving, *[True] * len(chosen))
        return OpaqueFunction(backend, pulled, likes, moving)


def by_name(
    name: str,
    args: Iterable[Expr],
    outputs: Iterable[tuple[Sequence[int], str]],
    kernel: OpaqueFunction,
    **about: Any,
) -> list[Expr]:
    """Returns the outputs of an opaque operation, given the shape and kind of each output.

    about: The attributes of a vjp: the number of operands (`of`), the order of the vjp (`level`),
        and the indices of the operands with respect to which the vjp is computed (`places`).
    """
    call = expr("by_name", args, (), SEVERAL, name=name, kernel=kernel, **about)
    return [expr("output", (call,), s, kind, index=k) for k, (s, kind) in enumerate(outputs)]


def pulled_back(
    call: Expr, cotangents: Mapping[int, Expr], active: Collection[Expr]
) -> Sequence[Expr | None]:
    """Pulls the cotangents of an opaque operation's outputs back to its active operands."""
    kernel, args = call["kernel"], call.args
    given = {k: g for k, g in sorted(cotangents.items()) if not is_zero(g)}
    moving = [k for k, m in enumerate(kernel.moving) if m]
    wanted = [k for k in moving if args[k] in active]
    if not wanted or not given:
        return [None] * len(args)
    pulled = by_name(
        call["name"],
        (*args, *given.values()),
        [(args[k].shape, args[k].kind) for k in wanted],
        kernel.vjp([*given], wanted),
        of=len(args),
        level=call.get("level", 0) + 1,
        # Indices of `wanted` among the differentiable operands; () if only one operand is
        # differentiable.
        places=tuple(map(moving.index, wanted)) if len(moving) > 1 else (),
    )
    return replaced_at([None] * len(args), wanted, pulled)


def _write(w: Writer, x: Expr) -> ts.Written:
    (call,), place = x.args, x["index"]
    name, level = call["name"], call.get("level", 0)
    pieces = [w.operand(a) for a in call.args]
    if not level:
        return ts.Written(ts.function(name, pieces).text + (f"[{place}]" if place else ""))
    number = ts.below(str(call["places"][place] + 1)) if call["places"] else ""
    w.note(
        "vjp[f](x; u): the vector-Jacobian product of f at x with u; "
        "vjp₁: with respect to the first x"
    )
    groups = pieces[: call["of"]], pieces[call["of"] :]
    first, then = (ts.join(p, ", ", ts.SUM).text for p in groups)
    return ts.Written(f"vjp{number}[{'vjp of ' * (level - 1)}{name}]({first}; {then})")


operation("by_name", lambda y, *args: y["kernel"].value(*args))
operation("output", lambda y, call: call[y["index"]], form=_write)
