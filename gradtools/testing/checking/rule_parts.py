"""The functions of a custom rule (fun, fwd, bwd, jvp), from gradtools' rules or JAX's."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from gradtools.errors import GradtoolsError
from gradtools.rule_contract import Primal
from gradtools.testing.checking.probe import Probe
from gradtools.testing.flat import Arrays

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


class RuleProbe(Probe):
    """fun at args, whose reverse mode is the author's bwd, and whose forward mode is jvp.

    Attributes:
        rule: The parts.
        nones: The leaves for which bwd returned None.
        none_pushed: Whether jvp returned None.
    """

    def __init__(self, rule: Parts, args: Sequence[Any], backend: Any) -> None:
        super().__init__(CALLER, rule.fun, args, backend)
        self.rule, self.nones, self.none_pushed = rule, set[int](), False

    def reverse(self, xs: Arrays, vs: Arrays) -> Arrays:
        """What bwd makes of the cotangents vs."""
        return self.numpy(self.cotangents(self.arrays(xs), list(self.arrays(vs))))

    def forward(self, xs: Arrays, us: Arrays) -> Arrays:
        """What jvp makes of the tangents us."""
        return self.numpy(self.pushed(self.rebuilt(self.arrays(xs)), us))

    def moving(self) -> tuple[Any, ...]:
        """The differentiable leaves, in the framework's arrays."""
        return self.arrays(self.leaves)

    # --- the parts, on the framework's arrays

    def fwd(self, *args: Any) -> tuple[Any, Any]:
        """The output and the residuals."""
        assert self.rule.fwd is not None
        out = self.rule.fwd(*args)
        if not isinstance(out, tuple) or len(out) != 2:
            raise GradtoolsError(
                f"{CALLER}: fwd must return a pair (output, residuals), got a {type(out).__name__}."
            )
        return out

    def cotangents(self, moving: Sequence[Any], vs: list[Any]) -> list[Any]:
        """bwd's validated entries for the differentiable leaves; zeros for None."""
        args = self.rebuilt(moving)
        return self.pulled(args, *self.fwd(*args), vs)

    def pulled(self, args: tuple[Any, ...], out: Any, residuals: Any, vs: list[Any]) -> list[Any]:
        """The same from fwd's output and residuals."""
        leaves, tree = self.waist.flatten(out)
        left = iter(vs)
        full = [next(left) if self.differentiable(y) else None for y in leaves]
        assert self.rule.bwd is not None
        static = [args[i] for i in self.rule.static]
        result = self.rule.bwd(*static, residuals, self.waist.unflatten(tree, full))
        return self._entries(result, args)

    def _entries(self, cotangents: Any, args: tuple[Any, ...]) -> list[Any]:
        wanted = [i for i in range(len(args)) if i not in self.rule.static]
        if not isinstance(cotangents, tuple | list) or len(cotangents) != len(wanted):
            count = f"{len(cotangents)}" if isinstance(cotangents, tuple | list) else "no tuple"
            raise GradtoolsError(
                f"{CALLER}: bwd returned {count} entries, expected a tuple of {len(wanted)}, one "
                "for each argument (None for a zero)."
            )
        entries: list[Any] = []
        self.nones.clear()
        for i, entry in zip(wanted, cotangents, strict=True):
            entries += self._entry(i, entry, args[i], len(entries))
        return entries

    def _entry(self, i: int, entry: Any, arg: Any, first: int) -> list[Any]:
        """The cotangents of the differentiable leaves of argument i."""
        leaves = self.waist.flatten(arg)[0]
        given = [None] * len(leaves) if entry is None else self.waist.flatten(entry)[0]
        moving = [k for k, x in enumerate(leaves) if self.differentiable(x)]
        if len(given) != len(leaves):
            given = self._without_integers(i, given, leaves, moving)
        result: list[Any] = []
        for k in moving:
            x, g = leaves[k], given[k]
            if g is not None and tuple(g.shape) != tuple(x.shape):
                raise GradtoolsError(
                    f"{CALLER}: bwd's entry for argument {i} has shape {tuple(g.shape)}, the "
                    f"argument has {tuple(x.shape)}. Sum it over what was broadcast."
                )
            if g is not None and self.waist.dtype_name(g) != self.waist.dtype_name(x):
                raise GradtoolsError(
                    f"{CALLER}: bwd's entry for argument {i} has dtype {self.waist.dtype_name(g)}, "
                    f"the argument has {self.waist.dtype_name(x)}. Cast it back."
                )
            if g is None:
                self.nones.add(first + len(result))
            result.append(self.waist.zeros_like(x) if g is None else g)
        return result

    def _without_integers(self, i: int, given: Any, leaves: Any, moving: list[int]) -> list[Any]:
        if len(given) != len(moving):
            raise GradtoolsError(
                f"{CALLER}: bwd's entry for argument {i} has {len(given)} leaves, the argument has "
                f"{len(leaves)}. Return a tree like the argument, or None for a zero."
            )
        full: list[Any] = [None] * len(leaves)
        for k, g in zip(moving, given, strict=True):
            full[k] = g
        return full

    def pushed(self, args: tuple[Any, ...], us: Arrays) -> list[Any]:
        """jvp's validated tangents of the differentiable outputs; zeros for None."""
        out, pushed = self.jvp(args, us)
        likes = self.waist.flatten(out)[0]
        kept = [y for y in likes if self.differentiable(y)]
        self.none_pushed = pushed is None
        if pushed is None:
            return [self.waist.zeros_like(y) for y in kept]
        given = self.waist.flatten(pushed)[0]
        if len(given) not in (len(kept), len(likes)):
            raise GradtoolsError(
                f"{CALLER}: jvp returned {len(given)} tangents for {len(likes)} outputs."
            )
        if len(given) == len(likes):
            pairs = zip(likes, given, strict=True)
            given = [t for y, t in pairs if self.differentiable(y)]
        pairs = zip(self.out_paths, kept, given, strict=True)
        return [self._like_output(path, y, t) for path, y, t in pairs]

    def _like_output(self, path: str, y: Any, t: Any) -> Any:
        """A tangent, validated to have its output's shape and dtype; zeros for None."""
        if t is None or not self.waist.is_array(t):
            return self.waist.zeros_like(y) if t is None else self.waist.cast(t, y)
        looks = [(tuple(x.shape), self.waist.dtype_name(x)) for x in (t, y)]
        if looks[0] != looks[1]:
            raise GradtoolsError(
                f"{CALLER}: jvp's tangent of {path} has shape {looks[0][0]} and dtype "
                f"{looks[0][1]}, the output has {looks[1][0]} and {looks[1][1]}. Return one that "
                "looks like the output."
            )
        return t

    def jvp(self, args: tuple[Any, ...], us: Arrays) -> tuple[Any, Any]:
        """The output and its tangent."""
        assert self.rule.jvp is not None
        free = [a for i, a in enumerate(args) if i not in self.rule.static]
        left = iter(self.arrays(us))
        tangents = []
        for a in free:
            leaves, tree = self.waist.flatten(a)
            moving = [next(left) if self.differentiable(x) else None for x in leaves]
            none = not any(t is not None for t in moving)
            tangents.append(None if none else self.waist.unflatten(tree, moving))
        static = [args[i] for i in self.rule.static]
        result = self.rule.jvp(*static, tuple(free), tuple(tangents))
        if not isinstance(result, tuple) or len(result) != 2:
            raise GradtoolsError(
                f"{CALLER}: jvp must return a pair (output, tangent), got a "
                f"{type(result).__name__}."
            )
        return result
