"""`check_rule`: checks fwd, bwd and jvp of a custom rule, then the differentiable function.

With fun = f, fwd(x) = (f(x), r(x)), bwd(r, v) = J^H v and jvp(x, u) = (f(x), J u), the function
x -> bwd(r(x), v) is the gradient of Re<v, f>. For second derivatives, this function is
differentiated through the residuals:

    d bwd(r(x), v) = sum over k of (d bwd / d r_k) (d r_k / d x)

A residual without a derivative (r_k detached, or computed outside of the framework) therefore makes
second derivatives wrong, and is detected by finite differences of r_k.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

import numpy as np

from gradtools.boundary import user_facing
from gradtools.custom_rules import CustomRule
from gradtools.custom_structure import Specialization
from gradtools.errors import GradtoolsError
from gradtools.rules import ARRAY
from gradtools.testing.checking.derivative_checks import DerivativeCheck, check_context
from gradtools.testing.flat import Arrays, Probe, backend_name, described, first_line, naming
from gradtools.testing.relations import relation
from gradtools.testing.report import Report, compare_arrays, largest

CALLER = "check_rule"
_NEARBY = 1.0625  # Factor that maps x to a nearby point.
_POINTS = 1.0, _NEARBY, 0.9375  # Factors that map x to the examples of a batch.
_DRAWN = (
    "differs between two calls of {} with the same arguments. Does the function draw random "
    "numbers or change state? Draw random numbers in fwd, and return them as residuals."
)
_STALE = (
    "changes after another call of fwd: bwd reads state of the last call (a global, an "
    "attribute, a closure's variable). Return this state from fwd as a residual."
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
    """Checks fwd, bwd and jvp of a custom rule, then the function that the rule defines.

    fwd, bwd and jvp must be functions of their arguments: a rule that writes in place, reads state
    from an earlier call, or draws random numbers in bwd or jvp is rejected. The outputs of fwd and
    jvp are compared with the output of fun. The checks of `check_derivatives` follow: bwd and jvp
    are compared with finite differences of fun and with each other, bwd must be linear in the
    cotangent, jvp must be linear in the tangent, and every mode that is derived from bwd and jvp is
    checked. For order 2, the derivative of each residual is compared with finite differences of the
    residual, and the error names a residual whose derivative is lost (detached, or computed outside
    the framework). Finally, the results for a batch of three examples under vmap are compared with
    the results for each example.

    Args:
        rule: The result of `gt.custom_rule` or `gt.host_function`. (`check_derivatives` checks
            functions with a native rule of PyTorch or JAX.)
        args: The arguments of the rule, as in `check_derivatives`.
        backend: The backend, as in `check_derivatives`.
        order: 1 or 2.
        seed: The seed of the random directions.

    Returns:
        A `Report` with one record for each comparison, as in `check_derivatives`.

    Raises:
        AgreementError: An output or a derivative of the rule is wrong. The error names the function
            (fwd, bwd or jvp) and the argument or the residual.
        GradtoolsError: `rule` is not a custom rule, or `check_derivatives` would raise this error
            for the same arguments.
        Exception: Any error that a function of the rule raises, with a note that names the
            function.

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
        check.parts()
        check.report.require()
        if order == 2 and rule.bwd is not None:
            check.residuals()
            check.report.require()
        check.whole(order)
        check.report.require()
        check.batch()
    return check.report.require()


class RuleCheck(DerivativeCheck):
    """Checks fwd, bwd and jvp of one rule at one point and collects the results in `report`."""

    def __init__(self, rule: Any, args: Sequence[Any], backend: Any, seed: int) -> None:
        linear = isinstance(rule, CustomRule) and getattr(rule, "adjoint", None) is not None
        if not isinstance(rule, CustomRule) or not (linear or rule.jvp or (rule.fwd and rule.bwd)):
            raise GradtoolsError(
                f"{CALLER}: got a {type(rule).__name__}, which is not a rule with derivatives; "
                "expected a gt.custom_rule after .defvjp(fwd, bwd) or .defjvp(rule). For "
                "a plain function use check_derivatives."
            )
        own_backend, name = rule._backend.name, backend_name(CALLER, backend)
        if own_backend != name:
            raise GradtoolsError(
                f"{CALLER}: the rule was made with gradtools.{own_backend}, but backend is "
                f"{name!r}; pass {own_backend!r}."
            )
        self.rule, self.args, self.backend, self.seed = rule, args, backend, seed
        own = {"forward": rule.jvp and "jvp", "reverse": rule.bwd and "bwd"}
        self.own = {mode: part for mode, part in own.items() if part}
        super().__init__(Probe(CALLER, rule, args, backend), list(self.own), seed, dict(self.own))
        waist, here = self.probe.waist, self._moved(1.0)
        statics, rest = rule._bound(here, {})
        leaves, treedef = waist.flatten(tuple(rest))
        others = tuple([ARRAY if waist.is_array(x) else x for x in leaves])
        self.functions = Specialization(rule, statics, treedef, others)
        arrays = list(filter(waist.is_array, leaves))
        self.avals = [(tuple(x.shape), x.dtype, waist.is_inexact(x)) for x in arrays]

    # --- calls of the rule's functions

    def _moved(self, factor: float) -> tuple[Any, ...]:
        """Returns the arguments, with each differentiated array multiplied by `factor`."""
        leaves = [(x * factor).astype(x.dtype) for x in self.probe.leaves]
        return self.probe.rebuilt(self.probe.arrays(leaves))

    def _arrays_in(self, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """Returns the arrays of the arguments that are not static."""
        waist = self.probe.waist
        return tuple(filter(waist.is_array, waist.flatten(tuple(self.rule._bound(args, {})[1]))[0]))

    def _named(self, part: str) -> Any:
        calls = {"fwd": "fwd(*args)", "bwd": "bwd(residuals, ct)", "jvp": "jvp(primals, tangents)"}
        return naming(CALLER, f"{described(getattr(self.rule, part))}, called as {calls[part]}")

    def fwd(self, *args: Any) -> Any:
        """Returns the output and the residuals of fwd."""
        xs, functions, fwd = self._arrays_in(args), self.functions, self.rule.fwd
        assert fwd is not None
        with self._named("fwd"):
            result = fwd(*functions.statics, *functions._fwd_arguments(xs, None))
        return functions.pair(result, "fwd", "(out, residuals)")

    def bwd(self, out: Any, residuals: Any, vs: list[Any]) -> list[Any]:
        """Returns bwd's validated cotangents, one for each array in the arguments."""
        leaves, treedef = self.probe.waist.flatten(out)
        left = iter(vs)
        full = [next(left) if self.probe.differentiable(y) else None for y in leaves]
        with self._named("bwd"):
            cotangent = self.probe.waist.unflatten(treedef, full)
            entries = self.functions.bwd(residuals, cotangent)
        return self.functions.cotangents(entries, self.avals)

    def jvp(self, args: tuple[Any, ...], us: Arrays) -> Any:
        """Returns jvp's output and its tangent along us."""
        left, xs = iter(self.probe.arrays(us)), self._arrays_in(args)
        tangents = tuple([next(left) if inexact else None for _, _, inexact in self.avals])
        with self._named("jvp"):
            result = self.functions.jvp(xs, tangents)
        return self.functions.pair(result, "jvp", "(out, tangent_out)")

    # --- the checks of fwd, bwd and jvp

    def parts(self) -> None:
        """Checks fwd, bwd and jvp at first order."""
        probe, runs = self.probe, dict[str, Callable[[], Any]]()
        args, us = self._moved(1.0), self.everywhere()
        if "reverse" in self.own:
            cts = list(probe.arrays(self.vs))
            runs["fwd"] = lambda: self.fwd(*args)
            out, residuals = self._unchanging("fwd", runs["fwd"], {"argument ": args})
            held = {"the cotangent of output": cts, "the residual ": residuals}
            pull, what = lambda: self.bwd(out, residuals, cts), "bwd's cotangent of array"
            first = self._unchanging("bwd", pull, held)
            self._same(what, first, pull(), _DRAWN.format("bwd"))
            with suppress(Exception):  # the nearby point may be outside of f's domain
                self.fwd(*self._moved(_NEARBY))
            self._same(what, first, pull(), _STALE)
        if "forward" in self.own:
            runs["jvp"] = lambda: self.jvp(args, us)
            pushed = self._unchanging("jvp", runs["jvp"], {"argument ": args})[1]
            self._same("jvp's tangent of output", pushed, runs["jvp"]()[1], _DRAWN.format("jvp"))
        if self.own:
            self.first_order()
        for part, run in runs.items():
            found = filter(probe.differentiable, probe.waist.flatten(run()[0])[0])
            for path, y, z in zip(probe.out_paths, probe.numpy(found), probe.out, strict=True):
                record = compare_arrays(f"{part}'s value | fun's value", path, y, z, 0)
                if not record.agrees:
                    cause = relation(y, z, (part, "fun"), 0)
                    record = record.because(
                        cause or f"{part} computes a different function than fun"
                    )
                self.report.comparisons.append(record)
        for n, c in enumerate(self.report.comparisons):  # add advice on how to correct bwd or jvp
            if not c.agrees and c.quantity.endswith("| finite differences"):
                look = f"Check the cotangent that bwd returns for {c.path}; None means zero."
                if c.quantity.startswith("jvp"):
                    tangent = f"the tangent of {c.path.rpartition(' by ')[2]}"
                    look = f"Check how jvp uses {tangent}; None means zero."
                if any(x.dtype.kind == "c" for x in probe.leaves):
                    look += (
                        " Is a conjugate missing? The cotangent is J^H v, and the tangent is J u."
                    )
                self.report.comparisons[n] = c.because(c.cause or "", f"{c.detail} {look}")

    def _unchanging(self, part: str, run: Callable[[], Any], trees: dict[str, Any]) -> Any:
        """Returns `run()`; raises an error if this call changes an array in `trees`.

        In-place changes are errors because the framework shares these arrays with other operations.
        """
        before = {name: self._copied(tree) for name, tree in trees.items()}
        result = run()
        for name, tree in trees.items():
            if path := _changed(before[name], self._copied(tree)):
                own = path.removeprefix("[").replace("]", "", 1) if "arg" in name else path
                raise GradtoolsError(
                    f"{CALLER}: {part} writes {name}{own.strip()} in place, but other operations "
                    "share this array. Make a new array (2 * x, not x.mul_(2)) or a copy."
                )
        return result

    def _same(self, what: str, first: Any, again: Any, why: str) -> None:
        """Raises an error if two calls of bwd or jvp returned different results."""
        if path := _changed(self._copied(first), self._copied(again)):
            path = path.replace("[", " ").replace("]", "") if "array" in what else path
            raise GradtoolsError(f"{CALLER}: {what}{path.rstrip()} {why}")

    def _copied(self, tree: Any) -> list[tuple[str, Any]]:
        """Returns the path and a NumPy copy of each leaf; the copy of a non-array is None."""
        waist, copy = self.probe.waist, self.probe.gt.to_numpy
        arrays = [np.array(copy(x)) if waist.is_array(x) else None for x in waist.flatten(tree)[0]]
        return list(zip(waist.leaf_paths(tree), arrays, strict=True))

    def residuals(self) -> None:
        """Compares each residual's derivative with finite differences of the residual."""
        residuals, waist = lambda *args: self.fwd(*args)[1], self.probe.waist
        found = waist.flatten(residuals(*self._moved(1.0)))[0]
        if not any(map(self.probe.differentiable, found)):
            return  # no residual has a derivative
        probe = Probe(CALLER, residuals, self.args, self.backend)
        check = DerivativeCheck(probe, seed=self.seed, labels={"forward": "residual"})
        check.present["reverse"] = False
        for i in range(len(probe.paths)):
            us = next(check.directions(i))
            if not check.has("forward", us):
                self.report.left_out.append("the residuals' derivatives: fwd has no forward mode")
                return
            check.slopes_along(us, i)
        why = "a residual of fwd has a wrong derivative with respect to the arguments"
        for c in (c for c in check.report if c.quantity != "value"):
            path = c.path.replace("output by", "output[0] by").replace("output", "residual ", 1)
            lost = (
                c
                if c.agrees
                else c.because(f"{why}: correct at first order, wrong at second order")
            )
            self.report.comparisons.append(replace(lost, path=path, order=2))
        check.note_undecided()
        self.report.left_out += check.report.left_out

    # --- the rule as users call it

    def whole(self, order: int) -> None:
        """Checks the modes that are derived from fwd, bwd and jvp, at first and second order."""
        self.modes, self.labels, done = None, {}, len(self.own) == 2
        if not done:
            self.present = {}
            self.first_order()
        if order == 2:
            self.second_order()
        for n, c in enumerate(self.report.comparisons):
            if not c.agrees and c.order == 2:
                inner = "reverse" if " over reverse" in c.quantity else "forward"
                part = self.own.get(inner) or next(iter(self.own.values()), "the kernel")
                detail = f"Check the derivative of {part}. {c.detail}"
                self.report.comparisons[n] = c.because(f"{part} is {c.cause}", detail)

    def batch(self) -> None:
        """Compares the rule's results under vmap over three examples with each example's results.

        A rule is written for one example, and the framework batches it. Typical sources of errors
        are host kernels with `vectorized=True`, rules with their own vmap, and code that depends on
        an array's rank.
        """
        probe = self.probe
        flat, gt, array, numpy = probe.flat, probe.gt, probe.array, probe.numpy
        pull = lambda xs, v: probe.pulled(flat, v, *xs)
        push = lambda xs, u: probe.pushed(flat, u, *xs)
        runs: dict[str, tuple[Sequence[str], Callable[..., Any], Arrays]] = {
            "value": (probe.out_paths, lambda xs, _: flat(*xs), []),
            "reverse mode": (probe.paths, pull, self.vs),
            "forward mode": (probe.out_paths, push, self.everywhere()),
        }
        points = [[(x * c).astype(x.dtype) for x in probe.leaves] for c in _POINTS]
        for name, (paths, run, vectors) in runs.items():
            if name != "value" and not self.present.get(name.split()[0]):
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
                self.equal(
                    f"{name} in a batch | one by one",
                    path,
                    sides,
                    10 * largest(np.stack(each)),
                    "the examples are mixed, or batch axes are treated as axes of one example",
                    "With vectorized=True, every array has the batch axes first; the kernel must "
                    "operate on the last axes only.",
                )


def _changed(before: list[tuple[str, Any]], after: list[tuple[str, Any]]) -> str:
    """Returns the path of the first array that differs, or "" if no array differs.

    If the path of this array is empty, " " is returned.
    """
    for (path, a), (_, b) in zip(before, after, strict=True):
        if a is not None and not np.array_equal(a, b, equal_nan=a.dtype.kind in "fc"):
            return path or " "
    return ""
