"""`check_rule`: checks each part of a custom rule as a plain function.

With fun = f, fwd(x) = (f(x), r(x)), bwd(r, v) = J^H v and jvp(x, u) = (f(x), J u), the function
x -> bwd(r(x), v) is the gradient of Re<v, f>. Second order differentiates it through the residuals:

    d bwd(r(x), v) = sum over k of (d bwd / d r_k) (d r_k / d x)

so a residual without a derivative (r_k detached, or computed outside of the framework) makes second
order wrong. It is found by finite differences of r_k.

The `Specialization` of the rule calls the author's functions and validates what they return, as in
every use of a rule.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import numpy as np

from gradtools.boundary import user_facing
from gradtools.custom_rules import CustomRule
from gradtools.custom_structure import Specialization
from gradtools.errors import GradtoolsError, MissingRuleError
from gradtools.rules import ARRAY
from gradtools.testing.checking import slopes
from gradtools.testing.checking.comparisons import NAMES
from gradtools.testing.checking.derivative_checks import DerivativeCheck, check_context
from gradtools.testing.checking.probe import FIRST, Probe, first_line, no_such_mode
from gradtools.testing.flat import Arrays
from gradtools.testing.relations import relation
from gradtools.testing.report import DIFFERS, Report, compare_arrays, largest, mismatch

CALLER = "check_rule"
_NEARBY = 1.0625  # the factor to another point, near enough to be in f's domain
_POINTS = 1.0, _NEARBY, 0.9375  # the examples of a batch
_DRAWN = (
    "is another one where it is computed again: two calls of {} with the same arguments differ. "
    "Is a random number drawn in it, or a state changed? Draw it in fwd, and save it."
)
_STALE = (
    "is another one after another call of fwd: it reads what the last call left behind (a global, "
    "an attribute, a closure's variable). Return it from fwd as a residual."
)


@user_facing
def check_rule(
    rule: Any,
    args: Sequence[Any],
    backend: Any,
    order: int = 2,
    *,
    seed: int = 0,
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
        rule: The result of `gt.custom_rule` or `gt.host_function`. (A function with a rule of
            PyTorch's or JAX's own is checked by `check_derivatives`.)
        args: As in `check_derivatives`.
        backend: As in `check_derivatives`.
        order: 1 or 2.
        seed: The seed of the random directions.

    Returns:
        A `Report`, as `check_derivatives` does.

    Raises:
        AgreementError: The rule is wrong. It names the part, the argument or the residual.
        GradtoolsError: `rule` is no rule, or as `check_derivatives` does.

    Example:
        >>> import numpy as np
        >>> from gradtools.testing import check_rule
        >>> square = gt.custom_rule(lambda x: x * x)
        >>> square.defvjp(lambda x: (x * x, x), lambda x, ct: (3 * x * ct,))  # should be 2
        >>> check_rule(square, (np.array([1.0, 2.0]),), gt)  # doctest: +ELLIPSIS
        Traceback (most recent call last):
        gradtools.testing.report.AgreementError: ...bwd | finite differences of argument 0...
    """
    with check_context(CALLER, args, backend, order):
        check = RuleCheck(rule, args, backend, seed)
        check.parts(order)
        check.report.require()
        check.whole(order)
    return check.report.require()


class RuleCheck:
    """The comparisons for one rule at one point, collected in `report`."""

    def __init__(self, rule: Any, args: Sequence[Any], backend: Any, seed: int) -> None:
        if not isinstance(args, tuple | list):
            raise GradtoolsError(f"{CALLER}: args must be a tuple, got a {type(args).__name__}.")
        self.rule, self.args, self.backend, self.seed = rule, tuple(args), backend, seed
        self.parted = RuleProbe(_rule_of_parts(rule), self.args, backend)
        parts = {"forward": self.parted.rule.jvp, "reverse": self.parted.rule.bwd}
        modes = [mode for mode, part in parts.items() if part is not None]
        labels = {"forward": "jvp", "reverse": "bwd"}
        self.check = DerivativeCheck(self.parted, modes, seed=seed, labels=labels)
        name = f"{CALLER} of {self.parted.rule.__name__} in {self.parted.name}"
        self.report = self.check.report = Report(name, NAMES)

    def _probe(self, f: Callable[..., Any], args: Sequence[Any] | None = None) -> Probe:
        return Probe(CALLER, f, self.args if args is None else args, self.backend)

    # --- the parts

    def parts(self, order: int) -> None:
        """Checks fwd, bwd and jvp one by one, as plain functions."""
        probe, rule = self.parted, self.parted.rule
        us, vs = self.check.everywhere(), list(probe.arrays(self.check.vs))
        self._purity(us, vs)
        if rule.bwd is not None:
            self._same_value("fwd", lambda *a: probe.fwd(*a)[0])
        if rule.jvp is not None:
            zeros = [np.zeros_like(x) for x in probe.leaves]
            self._same_value("jvp", lambda *a: probe.jvp(a, zeros)[0])
        self.check.first_order()
        for n, c in enumerate(self.report.comparisons):  # say where to look
            if c.agrees or not c.quantity.endswith("| finite differences"):
                continue
            if c.quantity.startswith("bwd"):
                look = f"Look at what bwd returns for {c.path}."
                none = f"bwd returned None, a zero, for {c.path}"
                is_none = probe.paths.index(c.path) in probe.nones
            else:
                look = f"Look at what jvp does with the tangent of {c.path.rpartition(' by ')[2]}."
                none, is_none = "jvp returned None, a zero, for the tangent", probe.none_pushed
            if any(x.dtype.kind == "c" for x in probe.leaves):
                look += " Is a conjugate missing? The cotangent is J^H v, the tangent J u."
            cause = none if is_none else c.cause or ""
            self.report.comparisons[n] = c.because(cause, f"{c.detail} {look}")
        if order == 2 and self.report and rule.bwd is not None:
            self._residuals()
            names = [f"bwd's cotangent of {path}" for path in probe.paths]
            self._second("bwd", names, lambda *xs: probe.cotangents(xs, vs))
        if order == 2 and self.report and rule.jvp is not None:
            names = [f"jvp's tangent of {path}" for path in probe.out_paths]
            self._second("jvp", names, lambda *xs: probe.pushed(probe.rebuilt(xs), us))

    def _purity(self, us: Arrays, cts: list[Any]) -> None:
        """Raises if a part is no function of its arguments, or changes them.

        A framework calls fwd and bwd at any time and any number of times, with arrays that it
        shares with others.
        """
        probe = self.parted
        args = probe.rebuilt(probe.arrays(probe.leaves))

        def copies(tree: Any) -> list[Any]:
            leaves = probe.waist.flatten(tree)[0]
            return [probe.gt.to_numpy(x) if probe.waist.is_array(x) else None for x in leaves]

        def unchanging(part: str, run: Callable[[], Any], trees: dict[str, Any]) -> Any:
            before = [copies(tree) for tree in trees.values()]
            result = run()
            for (what, tree), old in zip(trees.items(), before, strict=True):
                for path, a, b in zip(probe.waist.leaf_paths(tree), old, copies(tree), strict=True):
                    if a is not None and not np.array_equal(a, b, equal_nan=a.dtype.kind in "fc"):
                        own = path.removeprefix("[").replace("]", "", 1)
                        raise GradtoolsError(
                            f"{CALLER}: {part} writes {what}{own if 'arg' in what else path} in "
                            "place, which others hold as well. Make a new array (2 * x, not "
                            "x.mul_(2)), or copy it first."
                        )
            return result

        def same(first: Arrays, again: Arrays, what: str, paths: Sequence[str], why: str) -> None:
            for path, a, b in zip(paths, first, again, strict=True):
                if not np.array_equal(a, b, equal_nan=True):
                    raise GradtoolsError(f"{CALLER}: {what} of {path} {why}")

        if probe.rule.bwd is not None:
            out, res = unchanging("fwd", lambda: probe.fwd(*args), {"argument ": args})
            pull = lambda: probe.numpy(probe.pulled(out, res, cts))
            held = {"the cotangent of output": cts, "the residual ": res}
            first = unchanging("bwd", pull, held)
            same(first, pull(), "bwd's cotangent", probe.paths, _DRAWN.format("bwd"))
            nearby = [(x * _NEARBY).astype(x.dtype) for x in probe.leaves]
            with suppress(Exception):  # the nearby point may be outside of f's domain
                probe.fwd(*probe.rebuilt(probe.arrays(nearby)))
            same(first, pull(), "bwd's cotangent", probe.paths, _STALE)
        if probe.rule.jvp is not None:
            push = lambda: probe.numpy(probe.pushed(args, us))
            first = unchanging("jvp", push, {"argument ": args})
            same(first, push(), "jvp's tangent", probe.out_paths, _DRAWN.format("jvp"))

    def _same_value(self, part: str, run: Callable[..., Any]) -> None:
        other, values = self._probe(run), self.parted
        if len(other.out) != len(values.out):
            raise GradtoolsError(
                f"{CALLER}: {part} returned {len(other.out)} floating outputs, fun returns "
                f"{len(values.out)}. {part} must return fun's output first."
            )
        for path, a, b in zip(values.out_paths, other.out, values.out, strict=True):
            record = compare_arrays(f"{part}'s value | fun's value", path, a, b, 0)
            if not record.agrees:
                record = record.because(
                    relation(a, b, (part, "fun"), 0) or f"{part} computes another function"
                )
            elif a.dtype != b.dtype:
                words = (str(a.dtype), str(b.dtype))
                record = mismatch(record.quantity, path, 0, words, a.shape)
                record = record.because(f"{part}'s output has another dtype")
            self.report.comparisons.append(record)

    def _residuals(self) -> None:
        """Compares each residual's derivative with finite differences of the residual."""
        fwd, waist = self.parted.fwd, self.parted.waist
        residuals = lambda *args: fwd(*args)[1]
        found = residuals(*self.parted.rebuilt(self.parted.arrays(self.parted.leaves)))
        if not any(map(self.parted.differentiable, waist.flatten(found)[0])):
            return  # no residual has a derivative
        probe = self._probe(residuals)
        check = DerivativeCheck(probe, seed=self.seed)
        for i, argument in enumerate(probe.paths):
            us = next(check.directions(i))
            try:
                moved = probe.forward(probe.leaves, us)
            except Exception as error:
                if not no_such_mode(error):
                    raise
                self.report.left_out.append("the residuals' derivatives: fwd has no forward mode")
                return
            parts = slopes.slope(check.line(us), probe.eps).parts(probe.out)
            for out_path, mine, part in zip(probe.out_paths, moved, parts, strict=True):
                name = f"residual {out_path.removeprefix('output') or '[0]'} by {argument}"
                record = check.against_slope("residual", name, mine, part, 2)
                if record.status == DIFFERS:
                    why = "a residual's derivative is lost between the arguments and fwd's return"
                    record = record.because(f"{why}: right at first order, wrong at second")
                self.report.comparisons.append(record)
        check.note_undecided()
        self.report.left_out += check.report.left_out

    def _second(self, part: str, names: list[str], run: Callable[..., Any]) -> None:
        """Compares a part's derivative, as the framework computes it, with finite differences."""
        gt, waist = self.parted.gt, self.parted.waist
        try:
            ys, pullback = gt.vjp(run, *self.parted.arrays(self.parted.leaves))
            pullback([waist.ones_like(y) for y in ys])
        except MissingRuleError as error:  # such as a host function without a rule
            self.report.left_out.append(f"second order of {part}: {error}")
            return
        except Exception:  # other errors are reported by the comparison
            pass
        probe = self._probe(run, tuple(self.parted.leaves))
        probe.paths, probe.out_paths = self.parted.paths, names
        labels = {mode: f"{mode} mode over {part}" for mode in FIRST}
        check = DerivativeCheck(probe, seed=self.seed, labels=labels)
        check.first_order()
        for record in check.report.comparisons:
            if not record.agrees:
                cause = "right at first order, wrong at second: something is taken as constant"
                words = f"The derivative of {part} itself, as double backward takes it."
                record = record.because(cause, f"{words} {record.detail}")
            self.report.comparisons.append(record)
        self.report.left_out += [f"over {part}: {reason}" for reason in check.report.left_out]

    # --- the rule as users call it

    def whole(self, order: int) -> None:
        """Checks the rule in all modes, then a batch of three examples.

        A rule is written for one example, and the framework batches it. Mistakes are possible in a
        host kernel with `vectorized=True`, in a rule with its own vmap, and in code that reads the
        rank.
        """
        probe = self._probe(self.rule)
        check = DerivativeCheck(probe, seed=self.seed)
        check.report = self.report
        check.first_order()
        if order == 2:
            check.second_order()
        flat, gt, array, numpy = probe.flat, probe.gt, probe.array, probe.numpy
        pull = lambda xs, v: gt.vjp(flat, *xs)[1](list(v))
        push = lambda xs, u: gt.jvp(flat, tuple(xs), tuple(u))[1]
        runs: dict[str, tuple[Sequence[str], Callable[..., Any], Arrays]] = {
            "value": (probe.out_paths, lambda xs, _: flat(*xs), []),
            "reverse mode": (probe.paths, pull, check.vs),
            "forward mode": (probe.out_paths, push, check.everywhere()),
        }
        points = [[(x * c).astype(x.dtype) for x in probe.leaves] for c in _POINTS]
        for name, (paths, run, vectors) in runs.items():
            if name != "value" and not check.present.get(name.split()[0]):
                continue
            extra = probe.arrays(vectors)
            try:
                single = [numpy(run(probe.arrays(xs), extra)) for xs in points]
                stacked = tuple([array(np.stack(leaf)) for leaf in zip(*points, strict=True)])
                together = numpy(gt.vmap(run, in_axes=(0, None))(stacked, extra))
            except Exception as error:
                self.report.left_out.append(f"{name} in a batch: {first_line(error)}")
                continue
            for path, many, *each in zip(paths, together, *single, strict=True):
                sides = lambda _, many=many, each=each: (many, np.stack(each))
                check.equal(
                    f"{name} in a batch | one by one",
                    path,
                    sides,
                    1,
                    10 * largest(np.stack(each)),
                    "the examples of a batch are mixed, or its axes are taken for an example's",
                    "With vectorized=True a kernel gets the axes of the batch in front of every "
                    "array, and works on the last axes alone.",
                )


# --- the functions of a rule at given arguments


def _rule_of_parts(rule: Any) -> CustomRule:
    """A copy of a rule as a `custom_rule` of its functions."""
    given = isinstance(rule, CustomRule)
    linear = getattr(rule, "adjoint", None) is not None if given else False
    if not given or not (linear or rule.jvp or (rule.fwd and rule.bwd)):
        raise GradtoolsError(
            f"{CALLER}: got a {type(rule).__name__}, which is no rule with derivatives; expected "
            "what gt.custom_rule made, after .defvjp(fwd, bwd) or .defjvp(rule). For a plain "
            "function use check_derivatives."
        )
    made = CustomRule(rule._backend, rule if linear else rule.fun, rule.static_argnames)
    made.__name__ = rule.__name__
    made.fwd, made.bwd, made.jvp = rule.fwd, rule.bwd, rule.jvp
    made.symbolic_zeros = rule.symbolic_zeros
    if linear:  # a linear host function is its own jvp
        moved = lambda xs, dxs: [x if dx is None else dx for x, dx in zip(xs, dxs, strict=True)]
        made.jvp = lambda xs, dxs: (rule(*xs), rule(*moved(xs, dxs)))
    return made


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
        statics, rest = rule._bound(self.rebuilt(self.arrays(self.leaves)), {})
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
        return self._filled(result, self.arrays(self.leaves))

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
