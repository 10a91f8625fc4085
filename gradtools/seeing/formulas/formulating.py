"""The public operator that writes derivatives as mathematics, `formula`, and its comparison.

A backend records one run of f as expressions, and `Formula` transforms them to the adjoint program.
Before the formula is returned it is evaluated in NumPy and compared with the framework's own
automatic differentiation of f: reverse mode, and at order 2 reverse mode of reverse mode. They are
compared at the given arguments and at random points near them, if the program is the same there, in
the precision in which f runs. Derivations by hand are compared with the framework in the same way.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any

import numpy as np

from gradtools.arguments.checks import order_among
from gradtools.backend import Operators, P
from gradtools.code_origin import place_of
from gradtools.errors import GradtoolsError
from gradtools.rules import replaced_at
from gradtools.seeing.formulas.derivation import Agreement, Formula
from gradtools.seeing.graphs.program import LeafProgram, spoken

_POINTS = 3
# Relative distances of the random points (inf: anywhere); points where f is defined are compared.
_STEPS = [step for step in (0.1, 0.01, 0.001, np.inf) for _ in range(_POINTS)]
# By precision: the allowed relative error of order 1, and the scale of smaller arrays relative to
# the greatest number (see `compared`).
_DOUBLE, _SINGLE = (1e-8, 1e-4), (1e-3, 1e-2)
Point = tuple[list[np.ndarray], list[np.ndarray], list[np.ndarray]]
Group = Sequence[Any]  # one array for each name; None is not compared


class Formulating(Operators):
    """The operator `formula`, bound to one backend."""

    def formula(
        self,
        f: Callable[P, Any],
        *args: Any,
        order: int = 1,
        argnums: int | tuple[int, ...] = 0,
        **kwargs: Any,
    ) -> Formula:
        """Writes the adjoint program of f as mathematics, checked by automatic differentiation.

        With y = f(x), the cotangent of x is written x̄. At order 2 the adjoint program is
        differentiated once more, along a direction u for each cotangent of an input::

            order 1    x, ȳ     ->  x̄ = Jᴴ ȳ
            order 2    x, ȳ, u  ->  ∂s/∂x, ∂s/∂ȳ   of   s = <u, x̄>

        The formula is evaluated at random points near the arguments and compared with the
        framework's derivatives; if they differ, an error is raised. Captured arrays, parameters
        included, keep their values at these points. The formula describes one run of f, with the
        branches that Python's ``if`` took. Convolutions, linear algebra, loops and other operations
        outside of the vocabulary keep their names, and their adjoints are their vjps.

        Args:
            f: A function of pytrees of arrays, or a module. Inputs are named after f's
                parameters.
            *args: Arguments of f; arrays of any shape and dtype.
            order: 1, or 2 with the double backward.
            argnums: The position of the differentiated argument, or a tuple of positions; the
                leaves are floating or complex. In PyTorch captured parameters that require grad
                are differentiated as well, and ``argnums=()`` differentiates these alone.
            **kwargs: Keyword arguments of f.

        Returns:
            A `Formula`, printed by ``str()``, ``.latex()`` and notebooks. ``.marked`` lists the
            operations that are written by their names, ``.check`` is the result of the comparison,
            and ``.agrees_with(derivation)`` compares a derivation by hand with the framework's vjp.

        Raises:
            GradtoolsError: order is not 1 or 2; argnums is out of range or names an integer
                argument; f raises, returns no array, or cannot be differentiated by the framework;
                the formula and automatic differentiation differ (a bug in gradtools; the error
                shows both values).

        Example:
            >>> w, x = gt.asarray(np.ones((2, 3), "f")), gt.asarray(np.ones(3, "f"))
            >>> found = gt.formula(lambda W, x: W @ x, w, x, argnums=(0, 1))
            >>> found.lines(1)
            ['W̄ = ȳ xᵀ', 'x̄ = Wᵀ ȳ']
            >>> bool(found.agrees_with(lambda W, x, ct: (gt.xp.linalg.outer(ct, x), W.T @ ct)))
            True

        Source: Giles, Collected matrix derivative results for forward and reverse mode
        algorithmic differentiation, 2008; for complex numbers Kreutz-Delgado, 2009.
        """
        order = order_among("formula", order, (1, 2), "1, or 2 with the double backward")
        program = LeafProgram(self._backend, "formula", f, args, kwargs, argnums).with_values()
        # f's parameter names; x for an argument without a name
        alone = not any("argument 1" in name for name in program.names)
        x = "x" if alone else r"x\1"
        program.names = [re.sub(r"^argument (\d+)", x, n) for n in spoken(f, program.names)]
        return _Comparison(program, order).shown()


class _Comparison:
    """The formula of one recorded run of f, and its comparison with automatic differentiation."""

    def __init__(self, program: LeafProgram, order: int) -> None:
        self.program, self.order, self.backend = program, order, program.backend
        self.programs = program.framework.translating
        self.near: list[Point] = []  # the compared points near the arguments
        with program.running():
            self.recorded = recorded = self.programs.formula_graph(program)
        captured = range(len(recorded.inputs), len(recorded.opened))
        self.active = [k for k in (*program.wrt, *captured) if recorded.opened[k].is_inexact]
        self.formula = Formula(recorded, order, self.active)
        self.given = [np.asarray(self.backend.to_numpy(x)) for x in program.leaves]
        self.given += [recorded.held[p] for p in recorded.wanted]
        dtypes = recorded.dtypes | {self.backend.dtype_name(x) for x in program.leaves}
        if coarse := dtypes & {"float16", "bfloat16", "complex32"}:
            raise GradtoolsError(
                f"formula: f computes in {min(coarse)}, which is too coarse for a comparison. "
                "Pass float32 arguments."
            )
        self.single = bool(dtypes & {"float32", "complex64"})
        tolerance, self.floor = _SINGLE if self.single else _DOUBLE
        self.tolerance = tolerance * (10 ** (order - 1) if self.single else 1)

    def shown(self) -> Formula:
        """Returns the formula with the result of its comparison.

        The formula is compared at the given arguments and at random points near them, which are
        nearer if f's domain requires it.

        Raises:
            GradtoolsError: The numbers differ, or no value is finite and nothing was compared.
        """
        self.formula.compare = self.with_derivation
        (here,) = self._points([0.0])
        theirs = self._numbers(here)
        at_given = self._compared(self.formula, here, theirs)
        near, why_not = self._compared_nearby()
        if not near and not all_finite(theirs[:1]):
            raise GradtoolsError(
                "formula: no value of f is finite at the arguments or near them, so nothing was "
                "compared; give arguments at which the function and its derivatives are defined"
            )
        if not near and not at_given:
            raise _differs(at_given)
        note = "" if near else f"; {why_not}; compared at the given arguments alone"
        if not at_given:
            note = "; but not at the given arguments, which are at a tie, at an edge or where a "
            note += f"number is no longer finite: {at_given}"
        places = ["the arguments"] * bool(at_given) + [_counted(len(near))] * bool(near)
        said = f"agrees with automatic differentiation at {' and '.join(places)}"
        self.formula.check = _agreement([*near, *[at_given] * bool(at_given)], said, note)
        return self.formula

    def _compared_nearby(self) -> tuple[list[Agreement], str]:
        """Compares at points near the arguments; returns the reason if there is no comparison."""
        results: list[Agreement] = []
        for point in self._points(_STEPS):
            try:
                theirs = self._numbers(point)
            except GradtoolsError:  # f may be undefined there
                continue
            if not all_finite(theirs[:1]):
                continue
            result = self._compared(self.formula, point, theirs)
            if not result:
                other = self._recorded_at(point)
                same = other.inputs == self.formula.inputs
                if same and not self._compared(other, point, theirs):
                    raise _differs(result)
                self.near = []
                return [], "nearby f runs another program (values decide what it runs)"
            self.near.append(point)
            results.append(result)
            if len(results) == _POINTS:
                break
        return results, "nearby f is not defined (it raises, or a value is not finite)"

    def _compared(self, formula: Formula, point: Point, theirs: Sequence[Group]) -> Agreement:
        """Compares the formula's numbers at a point with the framework's numbers."""
        ours = formula.evaluate(*point)
        names = [*formula.outputs, *formula.gradients, *formula.second]
        groups = [*chain(*theirs)], [*chain(*ours)]
        return compared(names, *groups, self.tolerance, self.floor, ours, "formula")

    def _recorded_at(self, point: Point) -> Formula:
        """Returns the formula of the program that f runs at a nearby point."""
        before = self.program.leaves
        try:
            self.program.leaves = self._leaves(point)
            return Formula(self.programs.formula_graph(self.program), self.order, self.active)
        finally:
            self.program.leaves = before

    def with_derivation(
        self,
        derivation: Callable[..., Any],
        tolerance: float | None,
        convert: Callable[[np.ndarray], Any] | None,
    ) -> Agreement:
        """Compares a derivation by hand with the framework's vjps; see `Formula.agrees_with`."""
        formula = self.formula
        names = formula.gradients if self.order == 1 else formula.second
        tolerance = self.tolerance if tolerance is None else tolerance
        groups = (formula.inputs, formula.cotangents, formula.directions)
        counts = zip(map(len, groups), ("input", "cotangent", "direction"), strict=True)
        call = ", ".join(f"{n} {what}{'s' * (n != 1)}" for n, what in counts if n)
        results: list[Agreement] = []
        finite = False
        for point in (*self._points([0.0]), *self.near):
            theirs = self._numbers(point)
            finite = finite or all_finite(theirs)
            result = derivation(*map(convert or self._array, chain(*point)))
            own = list(result) if isinstance(result, tuple | list) else [result]
            own = [None if x is None else self.backend.to_numpy(self._array(x)) for x in own]
            own = _for_each_input(own, names, theirs[-1], call)
            agreement = compared(names, theirs[-1], own, tolerance, self.floor, theirs)
            if not agreement:
                return replace(agreement, message=f"no: {agreement.message}")
            results.append(agreement)
        if not finite:
            raise GradtoolsError(
                "formula.agrees_with: at no point are all values finite, so nothing was compared."
            )
        random = f" and {_counted(len(self.near))}" if self.near else ""
        return _agreement(results, f"yes: agrees at the arguments{random}", f", called with {call}")

    def _points(self, steps: Sequence[float]) -> Iterator[Point]:
        """Draws points at relative distances from the given arguments; 0 gives the arguments."""
        rng, own = np.random.default_rng(0), len(self.program.leaves)
        for step in steps:
            cotangents, directions = self.formula.random_cotangents(rng)
            inputs = [_moved(rng, x, step) if k < own else x for k, x in enumerate(self.given)]
            if self.single:
                narrow = lambda x: x.astype(np.complex64 if np.iscomplexobj(x) else np.float32)
                cotangents, directions = [*map(narrow, cotangents)], [*map(narrow, directions)]
            yield inputs, cotangents, directions

    def _leaves(self, point: Point) -> list[Any]:
        """Converts f's arguments to framework arrays; integers and random keys are unchanged."""
        given, is_inexact = self.program.leaves, self.backend.is_inexact
        pairs = zip(given, point[0][: len(given)], strict=True)
        return [self._array(x) if is_inexact(leaf) else leaf for leaf, x in pairs]

    def _array(self, x: Any) -> Any:
        """Converts a NumPy array or number to a framework array; other arrays are unchanged."""
        if hasattr(x, "dtype") and not isinstance(x, np.ndarray | np.generic):
            return x
        return self.backend.asarray(np.asarray(x), next(iter(self.program.leaves), None))

    def _numbers(self, point: Point) -> tuple[Group, ...]:
        """Returns the framework's outputs, gradients and, at order 2, their derivatives.

        A gradient is None where the input is not differentiated.
        """
        at = [self._leaves(point), *([*map(self._array, group)] for group in point[1:])]
        count, of_inputs = len(self.active), [None] * len(self.recorded.opened)
        differentiated = self.programs.differentiated
        try:
            outputs, *grads = differentiated(self.program, self.recorded, self.active, at)
        except GradtoolsError:
            raise
        except Exception as error:
            what = f"{type(error).__name__}: {str(error).strip().rstrip('.')}{place_of(error)}"
            raise GradtoolsError(
                f"formula: f runs, and automatic differentiation of it does not ({what}), so there "
                "is nothing to compare a formula with."
            ) from error
        wide = lambda xs: [*replaced_at(of_inputs, self.active, xs[:count]), *xs[count:]]
        return outputs, *map(wide, grads[: self.order])


def _counted(points: int) -> str:
    return f"{points} random point{'s' * (points > 1)}"


def _agreement(results: Sequence[Agreement], said: str, note: str) -> Agreement:
    """Combines several results to one agreement."""
    error = max(result.error for result in results)
    return Agreement(True, error, message=f"{said} (greatest relative error {error:.1e}){note}")


def _differs(result: Agreement) -> GradtoolsError:
    """Returns the error that is raised instead of returning a wrong formula."""
    return GradtoolsError(
        f"formula: {result}; the formula is not shown. Please report the function"
    )


def compared(
    names: Sequence[str],
    theirs: Group,
    mine: Group,
    tolerance: float,
    floor: float = 0.0,
    scale: Sequence[Group] = (),
    who: str = "derivation",
) -> Agreement:
    """Compares each array of `mine` with the framework's array, unless the latter is None.

    An array's error is relative to its greatest modulus, or to `floor` times the greatest number in
    `scale`. Smaller arrays may be rounding errors of larger numbers that cancel: the gradient of a
    bias before batch normalization is 0 and is computed as 1e-17.

    who: The source of `mine`, for the message.
    """
    greatest = lambda x: float(np.max(np.abs(x[np.isfinite(x)]), initial=0))
    arrays = [np.asarray(x) for x in chain(*scale) if x is not None]
    least = floor * max((greatest(x) for x in arrays if x.dtype.kind in "fc"), default=0.0)
    worst = 0.0
    for name, expected, came in zip(names, theirs, mine, strict=True):
        if expected is None:
            continue
        a = np.asarray(expected) + 0.0
        b = np.zeros_like(a) if came is None else np.asarray(came) + 0.0
        if a.shape != b.shape:
            message = f"{name} has shape {a.shape}, the {who} gives {b.shape}"
            return Agreement(False, float("inf"), name, a.shape, b.shape, message)
        with np.errstate(all="ignore"):
            same = (a == b) | (np.isnan(a) & np.isnan(b))
            errors = np.where(same, 0.0, np.abs(a - b) / max(greatest(a), greatest(b), least))
        errors = np.where(np.isnan(errors), np.inf, errors)
        error = float(errors.max(initial=0.0))
        if error > tolerance:
            at = tuple(map(int, np.argwhere(errors > tolerance)[0]))
            where = name + (str(list(at)) if at else "")
            message = (
                f"{where} is {a[at]:.10g} by automatic differentiation, {b[at]:.10g} by the "
                f"{who} (relative error {error:.1e} over {name})"
            )
            return Agreement(False, error, where, a[at].item(), b[at].item(), message)
        worst = max(worst, error)
    return Agreement(True, worst)


def all_finite(groups: Sequence[Group]) -> bool:
    """Returns whether all arrays are finite."""
    return all(np.isfinite(x).all() for group in groups for x in group if x is not None)


def _moved(rng: np.random.Generator, x: np.ndarray, step: float) -> np.ndarray:
    """Returns an array near x: entries times e**(step n), zeros plus step n."""
    if x.dtype.kind not in "fc" or not step:
        return x
    n = rng.normal(size=x.shape)
    if np.isinf(step):
        return np.asarray(n, x.dtype)
    return np.asarray(np.where(x == 0, step * n, x * np.exp(step * n)), x.dtype)


def _for_each_input(result: list, names: Sequence[str], expected: Group, call: str) -> list[Any]:
    """Expands a derivation's results to one per input, None without a derivative."""
    can = [k for k, a in enumerate(expected) if a is not None]
    if len(result) == len(can) < len(expected):
        return replaced_at([None] * len(expected), can, result)
    if len(result) != len(expected):
        raise GradtoolsError(
            f"formula.agrees_with: the derivation, called with {call}, returned {len(result)} "
            f"values; one is expected for each of {', '.join(names)}, in this order (None where "
            "it is zero)"
        )
    more = [names[k] for k, x in enumerate(result) if x is not None and k not in can]
    if more:
        raise GradtoolsError(
            f"formula.agrees_with: the derivation returned {', '.join(more)}, which is not "
            "differentiated, so that it cannot be compared. Return None there, or make the "
            "formula with argnums= naming that argument"
        )
    return result
