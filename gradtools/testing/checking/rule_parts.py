"""The functions of a custom rule (fun, fwd, bwd, jvp), from gradtools' rules or JAX's."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from gradtools.errors import GradtoolsError
from gradtools.rule_contract import Primal

CALLER = "check_rule"


@dataclass(frozen=True)
class Parts:
    """The functions of a rule; `call` is the rule itself, as users call it."""

    call: Callable[..., Any]
    fun: Callable[..., Any]
    fwd: Callable[..., Any] | None
    bwd: Callable[..., Any] | None
    jvp: Callable[..., Any] | None
    static: tuple[int, ...]


def taken_apart(rule: Any, backend: str) -> Parts:
    """The parts of what `gt.custom_rule` made, of JAX's own custom rules, or of a `Rule`."""
    if hasattr(rule, "primal") and hasattr(rule, "cotangent"):
        return _of_record(rule, backend)
    fun = getattr(rule, "fun", None)
    fwd, bwd, jvp = (getattr(rule, name, None) for name in ("fwd", "bwd", "jvp"))
    if not callable(fun) or not callable(rule) or (jvp is None and (fwd is None or bwd is None)):
        raise GradtoolsError(
            f"{CALLER}: got a {type(rule).__name__}, which is no rule with derivatives; expected "
            "what gt.custom_rule made, after .defvjp(fwd, bwd) or .defjvp(rule). For a plain "
            "function use check_derivatives."
        )
    static = _static(rule, fun)
    zeros = getattr(rule, "symbolic_zeros", False)  # a bool in JAX
    if fwd is not None and not isinstance(zeros, bool) and "cotangent" in zeros:
        fwd = _perturbed_fwd(fwd, import_module(f"gradtools.{backend}")._api._backend, len(static))
    if static and fwd is not None and getattr(rule, "static_argnames", ()):
        fwd = _in_the_functions_order(fwd, static)
    return Parts(rule, fun, fwd, bwd, jvp, static)


def _perturbed_fwd(fwd: Callable[..., Any], waist: Any, statics: int) -> Any:
    """fwd of a rule with symbolic zeros, as one of plain arguments: all are differentiated."""

    def primal(x: Any) -> Any:
        if waist.is_array(x):
            return Primal(x, waist.is_inexact(x))
        return Primal(x, False) if isinstance(x, int | float | complex) else x

    def plain(*args: Any) -> Any:
        leaves, tree = waist.flatten(args[statics:])
        return fwd(*args[:statics], *waist.unflatten(tree, [primal(x) for x in leaves]))

    return plain


def _in_the_functions_order(fwd: Callable[..., Any], static: tuple[int, ...]) -> Any:
    """fwd of `gt.custom_rule`, whose static arguments lead, as a function of fun's arguments."""

    def ordered(*args: Any) -> Any:
        rest = [a for i, a in enumerate(args) if i not in static]
        return fwd(*[args[i] for i in static], *rest)

    return ordered


def _static(rule: Any, fun: Callable[..., Any]) -> tuple[int, ...]:
    given = getattr(rule, "nondiff_argnums", ())
    names = tuple(getattr(rule, "static_argnames", ()) or ())
    if not names:
        return tuple(given or ())
    parameters = list(inspect.signature(fun).parameters)
    return tuple(sorted(parameters.index(name) for name in names))


def _of_record(rule: Any, backend: str) -> Parts:
    waist = import_module(f"gradtools.{backend}")._api._backend
    fun = lambda *xs: list(rule.primal(*xs))
    fwd = lambda *xs: (fun(*xs), list(xs))
    read = lambda xs: rule.saved(xs, fun(*xs))
    bwd = lambda xs, cts: tuple(rule.cotangent(read(xs), cts))
    jvp = lambda xs, dxs: (fun(*xs), list(rule.tangent(read(xs), dxs)))
    return Parts(
        lambda *xs: list(waist.apply_rule(rule, *xs)),
        fun,
        fwd if rule.cotangent else None,
        bwd if rule.cotangent else None,
        jvp if rule.tangent else None,
        (),
    )
