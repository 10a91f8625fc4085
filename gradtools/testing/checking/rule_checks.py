"""`check_rule`: checks each part of a custom rule as a plain function.

With fun = f, fwd(x) = (f(x), r(x)), bwd(r, v) = J^H v and jvp(x, u) = (f(x), J u), the function
x -> bwd(r(x), v) is the gradient of Re<v, f>. Second order differentiates it through the residuals:

    d bwd(r(x), v) = sum over k of (d bwd / d r_k) (d r_k / d x)

so a residual without a derivative (r_k detached, or computed outside of the framework) makes second
order wrong. It is found by finite differences of r_k.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from gradtools.boundary import user_facing
from gradtools.errors import GradtoolsError, MissingRuleError
from gradtools.testing.checking import slopes
from gradtools.testing.checking.checks import check_context
from gradtools.testing.checking.comparisons import NAMES, flattened
from gradtools.testing.checking.derivative_checks import DerivativeCheck
from gradtools.testing.checking.error_patterns import pattern
from gradtools.testing.checking.probe import (
    FIRST,
    Probe,
    backend_name,
    inner,
    no_such_mode,
    size,
)
from gradtools.testing.checking.rule_causes import Causes
from gradtools.testing.checking.rule_parts import CALLER, taken_apart
from gradtools.testing.checking.rule_side_effects import PurityChecks
from gradtools.testing.checking.rule_vmap import check_batch
from gradtools.testing.report import DIFFERS, Comparison, Report, compare_arrays, mismatch


@user_facing
def check_rule(
    rule: Any,
    args: Sequence[Any],
    backend: Any,
    order: int = 2,
    *,
    seed: int = 0,
    precision: str = "highest",
) -> Report:
    """Checks a custom rule: its parts one by one, then the function that it makes.

    The parts are checked as plain functions: fwd's and jvp's value against fun's; that bwd
    returns one entry for each argument, each like its argument; bwd and jvp against slopes of
    fun, and against each other; bwd's linearity in the cotangent and jvp's in the tangent. At
    second order bwd(residuals, v) is differentiated through fwd: a residual whose derivative is
    lost on the way (detached, or computed outside the framework) is named, and so is a bwd or jvp
    that treats a residual or primal as a constant. Then `check_derivatives` checks the rule in
    all modes, and a batch of three examples under vmap is compared with the three alone. fwd, bwd
    and jvp must be functions of what they get: a rule that writes in place, reads state of the last
    call or draws random numbers is refused.

    Args:
        rule: The result of `gt.custom_rule`: callable, with the attributes `fun`, `fwd`, `bwd` and
            `jvp` (None if not given), and `static_argnames`. Or a `jax.custom_vjp` or
            `jax.custom_jvp` function of real arrays, or a `gradtools.rules.Rule`.
        args: As in `check_derivatives`.
        backend: As in `check_derivatives`.
        order: 1 or 2.
        seed: The seed of the random directions.
        precision: As in `check_derivatives`.

    Returns:
        A `Report`, as `check_derivatives` does.

    Raises:
        AgreementError: The rule is wrong. It names the part, the argument or the residual.
        GradtoolsError: `rule` is no rule, or as `check_derivatives` does.

    Example:
        >>> import numpy as np
        >>> from types import SimpleNamespace
        >>> from gradtools.testing import check_rule
        >>> class Square:
        ...     fun = staticmethod(lambda x: x * x)
        ...     fwd = staticmethod(lambda x: (x * x, x))
        ...     bwd = staticmethod(lambda x, ct: (3 * x * ct,))  # wrong: should be 2
        ...     __call__ = fun
        >>> check_rule(Square(), (np.array([1.0, 2.0]),), gt)  # doctest: +ELLIPSIS
        Traceback (most recent call last):
        gradtools.testing.report.AgreementError: ...bwd | finite differences of argument 0...
    """
    with check_context(CALLER, args, backend, order, None, precision) as notes:
        check = RuleCheck(rule, args, backend, seed)
        check.report.notes += notes
        check.parts(order)
        check.report.require()
        check.whole(order)
    return check.report.require()


class RuleCheck:
    """The comparisons for one rule at one point, collected in `report`."""

    def __init__(self, rule: Any, args: Sequence[Any], backend: Any, seed: int) -> None:
        self.backend, self.seed = backend_name(CALLER, backend), seed
        self.rule = taken_apart(rule, self.backend)
        if not isinstance(args, tuple | list):
            raise GradtoolsError(f"{CALLER}: args must be a tuple, got a {type(args).__name__}.")
        self.args = tuple(args)
        self.values = Probe(CALLER, self.rule.fun, self.args, self.backend)
        self.check = DerivativeCheck(self.values, None, seed=seed)
        name = getattr(rule, "__name__", None) or getattr(rule, "name", None) or "a rule"
        self.report = Report(f"check_rule of {name} in {self.backend}", NAMES)
        self.check.report = self.report
        self.gt, self.waist = self.values.gt, self.values.waist
        self.nones: set[int] = set()  # the leaves for which bwd returned None
        self.none_pushed = False  # whether jvp returned None
        self.causes = Causes(self)

    # --- first order: parts against finite differences of fun

    def parts(self, order: int) -> None:
        """Checks fwd, bwd and jvp one by one."""
        pulled = pushed = None
        PurityChecks(self).check()
        if self.rule.bwd is not None:
            self._same_value("fwd", lambda *a: self._fwd(*a)[0])
            pulled = self._pull(self.check.vs)
            self._check_bwd(pulled)
        if self.rule.jvp is not None:
            zeros = [np.zeros_like(x) for x in self.values.leaves]
            self._same_value("jvp", lambda *a: self._jvp(a, zeros)[0])
            pushed = self._check_jvp()
        if pulled is not None and pushed is not None:
            self._check_adjoint(pulled)
        if order == 2 and self.report and self.rule.bwd is not None:
            self._residuals()
            names = [f"bwd's cotangent of {path}" for path in self.values.paths]
            self._second("bwd", names, lambda *xs: self._cotangents(xs, self._vs_arrays()))
        if order == 2 and self.report and self.rule.jvp is not None:
            us = self.check._everywhere().us
            names = [f"jvp's tangent of {path}" for path in self.values.out_paths]
            self._second("jvp", names, lambda *xs: self._tangents(xs, us))
        self.check.say_undecided()

    def _same_value(self, part: str, run: Callable[..., Any]) -> None:
        other = Probe(CALLER, run, self.args, self.backend)
        if len(other.out) != len(self.values.out):
            raise GradtoolsError(
                f"{CALLER}: {part} returned {len(other.out)} floating outputs, fun returns "
                f"{len(self.values.out)}. {part} must return fun's output first."
            )
        for path, a, b in zip(self.values.out_paths, other.out, self.values.out, strict=True):
            record = compare_arrays(f"{part}'s value | fun's value", path, a, b, 0)
            if not record.agrees:
                record = record.because(pattern(a, b) or f"{part} computes another function")
            elif a.dtype != b.dtype:
                words = (str(a.dtype), str(b.dtype))
                record = mismatch(record.quantity, path, 0, words, a.shape)
                record = record.because(f"{part}'s output has another dtype")
            self.report.comparisons.append(record)

    def _check_bwd(self, pulled: list[np.ndarray]) -> None:
        for i, mine in enumerate(pulled):
            for direction in self.check._directions(i):
                us = direction.us
                line = lambda t, us=us: flattened(self.values.value(self.check._moved(us, t)))
                result = slopes.slope(line, self.values.eps)
                record = self.check._reverse_against_slope("bwd", direction, mine, line, result)
                if record.status == DIFFERS:
                    record = self.causes.of_bwd(record, i, pulled)
                self.report.comparisons.append(record)
        draw = lambda: [self.check._draw(y.shape, y.dtype) for y in self.values.out]
        pull = lambda _, vs: self._pull(vs)
        self.check._linear("bwd", "cotangent", pull, draw, self.values.paths)

    def _check_jvp(self) -> list[np.ndarray]:
        pushed: list[np.ndarray] = []
        for i, path in enumerate(self.values.paths):
            for direction in self.check._directions(i):
                us = direction.us
                pushed = self._push(us)
                line = lambda t, us=us: flattened(self.values.value(self.check._moved(us, t)))
                result = slopes.slope(line, self.values.eps)
                record = self._jvp_against(path, pushed, result)
                if record.status == DIFFERS:
                    agrees = lambda ys, p=path, f=result: self._jvp_against(p, ys, f).agrees
                    record = self.causes.of_jvp(record, i, us, agrees)
                self.report.comparisons.append(record)
        draw = lambda: self.check._everywhere().us
        push = lambda _, us: self._push(us)
        self.check._linear("jvp", "tangent", push, draw, self.values.out_paths)
        return pushed

    def _jvp_against(self, path: str, pushed: list[np.ndarray], measured: Any) -> Comparison:
        return self.check._against_slope("jvp", path, flattened(pushed), measured, 1, add=False)

    def _check_adjoint(self, pulled: list[np.ndarray]) -> None:
        for i, path in enumerate(self.values.paths):
            us = next(iter(self.check._directions(i))).us
            pushed = self._push(us)
            noise = self.check._exact(1) * max(size(self.check.vs, pushed), size(us, pulled))
            self.check._compare(
                "bwd | jvp", path, inner(us, pulled), inner(self.check.vs, pushed), 1, noise,
                "the two rules disagree", "Left Re<bwd(v), u>, right Re<v, jvp(u)>.",
            )  # fmt: skip

    # --- second order: the parts differentiated

    def _residuals(self) -> None:
        """Compares each residual's derivative with finite differences of the residual."""
        residuals = lambda *args: self._fwd(*args)[1]
        result = residuals(*self.values.rebuilt(self._moving()))
        if not any(map(self.values.differentiable, self.waist.flatten(result)[0])):
            return  # no residual has a derivative
        probe = Probe(CALLER, residuals, self.args, self.backend)
        check = DerivativeCheck(probe, None, seed=self.seed)
        for i, argument in enumerate(probe.paths):
            us = next(iter(check._directions(i))).us
            moved = self._derivative(probe, us)
            if moved is None:
                return
            line = lambda t, us=us: flattened(probe.value(check._moved(us, t)))
            parts = slopes.slope(line, probe.eps).parts(probe.out)
            for out_path, mine, part in zip(probe.out_paths, moved, parts, strict=True):
                name = f"residual {out_path.removeprefix('output') or '[0]'} by {argument}"
                record = check._against_slope("residual", name, mine, part, 2, add=False)
                if record.status == DIFFERS:
                    why = "a residual's derivative is lost between the arguments and fwd's return"
                    record = record.because(f"{why}: right at first order, wrong at second")
                self.report.comparisons.append(record)
        check.say_undecided()
        self.report.left_out += check.report.left_out

    def _derivative(self, probe: Probe, us: list[np.ndarray]) -> list[np.ndarray] | None:
        """The residuals' tangents; None, with a note, if fwd has no forward mode."""
        try:
            return probe.forward(probe.leaves, us)
        except Exception as error:
            if not no_such_mode(error):
                raise
        self.report.left_out.append("the residuals' derivatives: fwd has no forward mode")
        return None

    def _second(self, part: str, names: list[str], run: Callable[..., Any]) -> None:
        """Compares a part's derivative, as the framework computes it, with finite differences."""
        if (reason := self._not_differentiable(run)) is not None:
            self.report.left_out.append(f"second order of {part}: {reason}")
            return
        probe = Probe(CALLER, run, tuple(self.values.leaves), self.backend)
        probe.paths, probe.out_paths = self.values.paths, names
        check = DerivativeCheck(
            probe, None, seed=self.seed, labels={m: f"{m} mode over {part}" for m in FIRST}
        )
        check.allow_jumps = True
        check.first_order()
        for record in check.report.comparisons:
            if not record.agrees:
                cause = "right at first order, wrong at second: something is taken as constant"
                record = record.because(
                    cause, f"The derivative of {part} itself, as double backward takes it. "
                    + record.detail,
                )  # fmt: skip
            self.report.comparisons.append(record)
        self.report.left_out += [f"over {part}: {reason}" for reason in check.report.left_out]

    def _not_differentiable(self, run: Callable[..., Any]) -> str | None:
        """Why a part has no derivative in any mode, such as a host function without a rule."""
        try:
            ys, pullback = self.gt.vjp(run, *self._moving())
            pullback([self.waist.ones_like(y) for y in ys])
        except MissingRuleError as error:
            return str(error)
        except Exception:  # other errors are reported by the comparison
            return None
        return None

    def whole(self, order: int) -> None:
        """Runs the checks of `check_derivatives` on the rule as users call it."""
        probe = Probe(CALLER, self.rule.call, self.args, self.backend)
        check = DerivativeCheck(probe, None, seed=self.seed)
        check.report = self.report
        check.first_order()
        if order == 2:
            check.second_order()
        check_batch(probe, check)

    # --- the parts as functions of all arguments, on the backend's arrays

    def _fwd(self, *args: Any) -> tuple[Any, Any]:
        assert self.rule.fwd is not None
        out = self.rule.fwd(*args)
        if not isinstance(out, tuple) or len(out) != 2:
            raise GradtoolsError(
                f"{CALLER}: fwd must return a pair (output, residuals), got a {type(out).__name__}."
            )
        return out

    def _cotangents(self, moving: Sequence[Any], vs: list[Any]) -> list[Any]:
        """bwd's validated entries for the differentiable leaves; zeros for None."""
        args = self.values.rebuilt(moving)
        return self._pulled(args, *self._fwd(*args), vs)

    def _pulled(self, args: tuple[Any, ...], out: Any, residuals: Any, vs: list[Any]) -> list[Any]:
        leaves, tree = self.waist.flatten(out)
        left = iter(vs)
        full = [next(left) if self.values.differentiable(y) else None for y in leaves]
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
        moving = [k for k, x in enumerate(leaves) if self.values.differentiable(x)]
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

    def _tangents(self, moving: Sequence[Any], us: list[np.ndarray]) -> list[Any]:
        return self._pushed(self.values.rebuilt(moving), us)

    def _pushed(self, args: tuple[Any, ...], us: list[np.ndarray]) -> list[Any]:
        out, pushed = self._jvp(args, us)
        likes = self.waist.flatten(out)[0]
        kept = [y for y in likes if self.values.differentiable(y)]
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
            given = [t for y, t in pairs if self.values.differentiable(y)]
        pairs = zip(self.values.out_paths, kept, given, strict=True)
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

    def _jvp(self, args: tuple[Any, ...], us: list[np.ndarray]) -> tuple[Any, Any]:
        assert self.rule.jvp is not None
        free = [a for i, a in enumerate(args) if i not in self.rule.static]
        left = iter(self.values.arrays(us))
        tangents = []
        for a in free:
            leaves, tree = self.waist.flatten(a)
            moving = [next(left) if self.values.differentiable(x) else None for x in leaves]
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

    def _pull(self, vs: list[np.ndarray]) -> list[np.ndarray]:
        cts = list(self.values.arrays(vs))
        return self.values.numpy(self._cotangents(self._moving(), cts))

    def _push(self, us: list[np.ndarray]) -> list[np.ndarray]:
        return self.values.numpy(self._tangents(self._moving(), us))

    def _moving(self) -> Sequence[Any]:
        return self.values.arrays(self.values.leaves)

    def _vs_arrays(self) -> list[Any]:
        return list(self.values.arrays(self.check.vs))
