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
            leaves = self.waist.flatten(args[i])[0]
            given = [None] * len(leaves) if entry is None else self.waist.flatten(entry)[0]
            pairs = self._paired(given, leaves)
            if pairs is None:
                raise GradtoolsError(
                    f"{CALLER}: bwd's entry for argument {i} has {len(given)} leaves, the argument "
                    f"has {len(leaves)}. Return a tree like the argument, or None for a zero."
                )
            for g, x in pairs:
                if g is None:
                    self.nones.add(len(entries))
                entries.append(
                    self._validated(g, x, f"bwd's entry for argument {i}", "the argument")
                )
        return entries

    def pushed(self, args: tuple[Any, ...], us: Arrays) -> list[Any]:
        """jvp's validated tangents of the differentiable outputs; zeros for None."""
        out, pushed = self.jvp(args, us)
        likes = self.waist.flatten(out)[0]
        self.none_pushed = pushed is None
        given = [None] * len(likes) if pushed is None else self.waist.flatten(pushed)[0]
        pairs = self._paired(given, likes)
        if pairs is None:
            raise GradtoolsError(
                f"{CALLER}: jvp returned {len(given)} tangents for {len(likes)} outputs."
            )
        return [
            self._validated(t, y, f"jvp's tangent of {path}", "the output")
            for path, (t, y) in zip(self.out_paths, pairs, strict=True)
        ]

    def _paired(self, given: list[Any], likes: list[Any]) -> list[tuple[Any, Any]] | None:
        """The entries for the differentiable leaves among `likes`; None if the count is wrong.

        There is an entry for each leaf, or for each differentiable one.
        """
        moving = [y for y in likes if self.differentiable(y)]
        if len(given) == len(likes):
            given = [x for x, y in zip(given, likes, strict=True) if self.differentiable(y)]
        return list(zip(given, moving, strict=True)) if len(given) == len(moving) else None

    def _validated(self, x: Any, like: Any, what: str, of: str) -> Any:
        """An entry, validated to have a leaf's shape and dtype; zeros for None."""
        if x is None:
            return self.waist.zeros_like(like)
        if not self.waist.is_array(x):
            x = self.waist.cast(x, like)
        came, wanted = ((tuple(y.shape), self.waist.dtype_name(y)) for y in (x, like))
        if came != wanted:
            raise GradtoolsError(
                f"{CALLER}: {what} has shape {came[0]} and dtype {came[1]}, {of} has {wanted[0]} "
                f"and {wanted[1]}. Sum it over what was broadcast, or cast it back."
            )
        return x

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
