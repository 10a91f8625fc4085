"""The functions of a custom rule (fun, fwd, bwd, jvp) at given arguments, for `check_rule`.

A rule of any kind is taken as a `CustomRule`, whose `Specialization` calls the author's functions
and validates what they return, as in every use of a rule.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from importlib import import_module
from types import SimpleNamespace
from typing import Any

from gradtools.custom_rules import CustomRule
from gradtools.custom_structure import Specialization
from gradtools.errors import GradtoolsError
from gradtools.rules import ARRAY
from gradtools.testing.checking.probe import Probe
from gradtools.testing.flat import Arrays

CALLER = "check_rule"


def as_custom_rule(rule: Any, backend: str) -> tuple[CustomRule, Callable[..., Any]]:
    """The functions of a rule, and the function that users call.

    rule: What `gt.custom_rule` made, a custom rule of JAX, or a `Rule`.
    """
    waist, call = import_module(f"gradtools.{backend}")._api._backend, rule
    if hasattr(rule, "primal") and hasattr(rule, "cotangent"):
        record, rule = rule, _of_record(rule)
        call = lambda *xs: list(waist.apply_rule(record, *xs))
    fun, fwd, bwd, jvp = (getattr(rule, name, None) for name in ("fun", "fwd", "bwd", "jvp"))
    if not callable(fun) or not callable(call) or (jvp is None and (fwd is None or bwd is None)):
        raise GradtoolsError(
            f"{CALLER}: got a {type(rule).__name__}, which is no rule with derivatives; expected "
            "what gt.custom_rule made, after .defvjp(fwd, bwd) or .defjvp(rule). For a plain "
            "function use check_derivatives."
        )
    statics = tuple(getattr(rule, "static_argnames", ()) or ())
    places = getattr(rule, "nondiff_argnums", ())

    def statics_first(*args: Any) -> Any:
        """fwd of `jax.custom_vjp`, which takes static arguments in the function's order."""
        rest = list(args[len(places) :])
        for place, static in sorted(zip(places, args, strict=False), key=lambda pair: pair[0]):
            rest.insert(place, static)
        return own_fwd(*rest)

    own_fwd: Any = fwd
    if places:
        statics = tuple([list(inspect.signature(fun).parameters)[i] for i in places])
        fwd = fwd and statics_first
    made = CustomRule(waist, fun, statics)
    made.__name__ = getattr(rule, "__name__", None) or getattr(rule, "name", None) or "a rule"
    made.fwd, made.bwd, made.jvp = fwd, bwd, jvp
    zeros = getattr(rule, "symbolic_zeros", False)  # a bool in JAX
    made.symbolic_zeros = frozenset({"cotangent"} if zeros is True else zeros or ())
    return made, call


def _of_record(rule: Any) -> Any:
    """The functions of a `Rule` of flat arrays."""
    fun = lambda *xs: list(rule.primal(*xs))
    read = lambda xs: rule.saved(xs, fun(*xs))
    return SimpleNamespace(
        name=rule.name,
        fun=fun,
        fwd=rule.cotangent and (lambda *xs: (fun(*xs), list(xs))),
        bwd=rule.cotangent and (lambda xs, cts: tuple(rule.cotangent(read(xs), cts))),
        jvp=rule.tangent and (lambda xs, dxs: (fun(*xs), list(rule.tangent(read(xs), dxs)))),
    )


class RuleProbe(Probe):
    """fun at args, whose reverse mode is the author's bwd, and whose forward mode is jvp.

    Attributes:
        rule: The rule.
        parts: Its functions at this structure of the arguments.
        avals: Shape, dtype and whether it is inexact, of each array that is not static.
        nones: The leaves for which bwd returned None.
        none_pushed: Whether jvp returned None.
    """

    def __init__(self, rule: CustomRule, args: Sequence[Any], backend: Any) -> None:
        super().__init__(CALLER, rule.fun, args, backend)
        self.rule, self.nones, self.none_pushed = rule, set[int](), False
        is_array = self.waist.is_array
        statics, rest = rule._bound(self.rebuilt(self.moving()), {})
        leaves, treedef = self.waist.flatten(tuple(rest))
        others = tuple([ARRAY if is_array(x) else x for x in leaves])
        self.parts = Specialization(rule, statics, treedef, others)
        arrays = list(filter(is_array, leaves))
        self.avals = [(tuple(x.shape), x.dtype, self.waist.is_inexact(x)) for x in arrays]

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

    def _arrays_in(self, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """The arrays of the arguments that are not static."""
        leaves = self.waist.flatten(tuple(self.rule._bound(args, {})[1]))[0]
        return tuple(filter(self.waist.is_array, leaves))

    def fwd(self, *args: Any) -> Any:
        """The output and the residuals."""
        parts, fwd = self.parts, self.rule.fwd
        assert fwd is not None
        result = fwd(*parts.statics, *parts._fwd_arguments(self._arrays_in(args), None))
        return parts.pair(result, "fwd", "(out, residuals)")

    def cotangents(self, moving: Sequence[Any], vs: list[Any]) -> list[Any]:
        """bwd's validated entries for the differentiable leaves; zeros for None."""
        out, residuals = self.fwd(*self.rebuilt(moving))
        return self.pulled(out, residuals, vs)

    def pulled(self, out: Any, residuals: Any, vs: list[Any]) -> list[Any]:
        """The same from fwd's output and residuals."""
        leaves, treedef = self.waist.flatten(out)
        left = iter(vs)
        full = [next(left) if self.differentiable(y) else None for y in leaves]
        entries = self.parts.bwd(residuals, self.waist.unflatten(treedef, full))
        entries = self.parts.cotangents(entries, self.avals)
        pairs = zip(entries, self.avals, strict=True)
        result = [ct for ct, (_, _, inexact) in pairs if inexact]
        self.nones = {k for k, ct in enumerate(result) if ct is None}
        return self._filled(result, self.moving())

    def jvp(self, args: tuple[Any, ...], us: Arrays) -> Any:
        """The output and its tangent."""
        left, parts = iter(self.arrays(us)), self.parts
        tangents = [next(left) if inexact else None for _, _, inexact in self.avals]
        result = parts.jvp(self._arrays_in(args), tuple(tangents))
        return parts.pair(result, "jvp", "(out, tangent_out)")

    def pushed(self, args: tuple[Any, ...], us: Arrays) -> list[Any]:
        """jvp's validated tangents of the differentiable outputs; zeros for None."""
        out, pushed = self.jvp(args, us)
        ys, treedef = self.waist.flatten(out)
        self.none_pushed = pushed is None
        dys = zip(self.parts._like(pushed, treedef, "jvp's tangent"), ys, strict=True)
        moving = [(dy, y) for dy, y in dys if self.differentiable(y)]
        named = zip(self.out_paths, moving, strict=True)
        result = [self.parts._fitting(dy, y, f"jvp's tangent of {path}") for path, (dy, y) in named]
        return self._filled(result, [y for _, y in moving])

    def _filled(self, entries: Sequence[Any], likes: Sequence[Any]) -> list[Any]:
        pairs = zip(entries, likes, strict=True)
        return [self.waist.zeros_like(like) if x is None else x for x, like in pairs]
