"""Defines the public operator `formula`, which writes derivatives as mathematics and checks them.

A backend records one run of a function f as expressions, and `Formula` derives the adjoint program
from these expressions. The formula is evaluated in NumPy and compared with the framework's
derivatives of f (reverse mode; reverse over reverse at order 2) before it is returned. The
comparison is made in the precision of f, at the given arguments and at nearby random points at
which f runs the same program. A manual derivation by the user is compared with the framework's
derivatives in the same way.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any

import numpy as np

from gradtools.arguments.checks import order_among
from gradtools.backend import Operators, P
from gradtools.code_origin import place_of
from gradtools.errors import GradtoolsError, TypeRefusal
from gradtools.seeing.formulas.derivation import Agreement, Formula
from gradtools.seeing.formulas.expressions import COMPLEX, REAL, Expr, evaluate
from gradtools.seeing.graphs.program import LeafProgram, spoken

_POINTS = 3
_STEPS = [step for step in (0.1, 0.01, 0.001) for _ in range(_POINTS)]  # relative distances
# Pairs of `tolerance` at order 1 and `floor` (see `compared`), in double and single precision.
_DOUBLE, _SINGLE = (1e-8, 1e-4), (1e-3, 1e-2)
_NARROW = {REAL: np.float32, COMPLEX: np.complex64}
Arrays = Sequence[Any]
Point = tuple[Arrays, Arrays, Arrays]  # inputs, cotangents and directions


class Formulating(Operators):
    """Defines `formula` for one backend, PyTorch or JAX."""

    def formula(
        self,
        f: Callable[P, Any],
        *args: Any,
        order: int = 1,
        argnums: int | tuple[int, ...] = 0,
        **kwargs: Any,
    ) -> Formula:
        """Writes the adjoint of f as mathematics, and checks it against automatic differentiation.

        With y = f(x), the cotangent of x is written x̄. At order 2 the adjoint program is
        differentiated once more, with a direction u for each input cotangent x̄::

            order 1    x, ȳ     ->  x̄ = Jᴴ ȳ
            order 2    x, ȳ, u  ->  ∂s/∂x, ∂s/∂ȳ   of   s = <u, x̄>

        The formula is compared with the framework's derivatives at the arguments and at random
        points near them; if the results differ, an error is raised. Captured arrays and parameters
        have the same values at all points. The formula describes one run of f, with the branches
        that Python's ``if`` took. Operations without a symbolic form, such as convolutions, linear
        algebra and loops, are written by name, and their adjoints are written as vjps.

        Args:
            f: A function of pytrees of arrays, or a module. The names of f's parameters are the
                names of the inputs in the formula.
            *args: Arguments of f; arrays of any shape and dtype, except 16-bit floating dtypes.
            order: 1 for the adjoint, or 2 for the adjoint and the double backward.
            argnums: The position of the differentiated argument, or a tuple of positions; the
                leaves are floating or complex. In PyTorch, captured parameters that require grad
                are also differentiated; ``argnums=()`` differentiates only captured parameters.
            **kwargs: Keyword arguments of f.

        Returns:
            A `Formula`. ``str()`` formats the formula as text, ``.latex()`` formats it as LaTeX,
            and notebooks display it. ``.marked`` lists the operations that are written by name,
            ``.check`` is the result of the comparison, and ``.agrees_with(derivation)``
            compares a manual derivation with the framework's vjp.

        Raises:
            GradtoolsError: order is not 1 or 2; argnums is out of range or names an integer
                argument; f raises an error, returns no array, or cannot be differentiated by the
                framework; f computes in a 16-bit floating dtype; the formula and automatic
                differentiation differ (a bug in gradtools; the error shows both values).

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
        # Use the names of f's parameters, or x for an unnamed argument.
        alone = not any("argument 1" in name for name in program.names)
        x = "x" if alone else r"x\1"
        program.names = [re.sub(r"^argument (\d+)", x, n) for n in spoken(f, program.names)]
        return _Comparison(program, order).shown()


class _Comparison:
    """Compares the formula of one recorded run of f with automatic differentiation."""

    def __init__(self, program: LeafProgram, order: int) -> None:
        self.program, self.order, self.backend = program, order, program.backend
        self.programs = program.framework.translating
        self.points: list[Point] = []  # points at which the formula agrees with the framework
        self.places = ""  # description of the points for messages
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
        """Returns the formula with the result of the comparison in ``formula.check``.

        The formula is compared at the given arguments and at random points near them. A random
        point at which the function raises an error or computes a number that is not finite is
        replaced by a nearer point.

        Raises:
            GradtoolsError: The formula differs from automatic differentiation, or the function
                raises an error or computes a number that is not finite at each of the points.
        """
        rng = np.random.default_rng(0)
        here = self._point(rng, 0.0)
        theirs = self._numbers(here)
        at_given = self._compared(self.formula, here, theirs)
        agrees_here = bool(at_given) and all_finite(chain(*theirs))
        self.points = [here] * agrees_here
        near = self._compared_nearby(rng)
        if not self.points and not at_given and all_finite(chain(*theirs)):
            raise GradtoolsError(_differs(at_given))
        if not self.points:
            raise GradtoolsError(
                "formula: no value of f is finite at the arguments or near them, so nothing was "
                "compared; give arguments at which the function and its derivatives are defined"
            )
        note = "" if near else "; at nearby points f is undefined or takes another branch"
        if not agrees_here:
            note = "; it does not agree at the given arguments, where f is not differentiable or a "
            note += f"value is not finite{'' if at_given else f': {at_given}'}"
        places = ["the arguments"] * agrees_here
        places += [f"{len(near)} random point{'s' * (len(near) > 1)}"] * bool(near)
        self.places = " and ".join(places)
        said = f"agrees with automatic differentiation at {self.places}"
        self.formula.check = _agreement([*near, *[at_given] * agrees_here], said, note)
        self.formula.compare = self.with_derivation
        return self.formula

    def _compared_nearby(self, rng: np.random.Generator) -> list[Agreement]:
        """Compares the formula at random nearby points at which f runs the same program."""
        results: list[Agreement] = []
        for step in _STEPS:
            point = self._point(rng, step)
            try:
                theirs = self._numbers(point)
            except GradtoolsError:  # the function may be undefined at the point
                continue
            if not all_finite(chain(*theirs)):
                continue
            result = self._compared(self.formula, point, theirs)
            if result:
                self.points.append(point)
                results.append(result)
            elif not self._runs_another_program(point, theirs):
                raise GradtoolsError(_differs(result))
            if len(results) == _POINTS:
                break
        return results

    def _runs_another_program(self, point: Point, theirs: Sequence[Arrays]) -> bool:
        """Returns whether f runs a different program at `point` with a formula that agrees."""
        before = self.program.leaves
        self.program.leaves = self._leaves(point)
        try:
            recorded = self.programs.formula_graph(self.program)
        finally:
            self.program.leaves = before
        names = [[p["name"] for p in run.opened] for run in (self.recorded, recorded)]
        if names[0] != names[1]:
            return True
        other = Formula(recorded, self.order, self.active)
        return bool(self._compared(other, point, theirs))

    def _compared(self, formula: Formula, point: Point, theirs: Sequence[Arrays]) -> Agreement:
        """Compares the formula's numbers at a point with the framework's numbers."""
        places = zip(chain(*formula.places), chain(*point), strict=True)
        found, names = zip(*chain(*formula.results), strict=True)
        ours = evaluate(found, {**formula.held, **dict(places)})
        texts, theirs = [name.text for name in names], [*chain(*theirs)]
        return compared(texts, theirs, ours, self.tolerance, self.floor, ours, "formula")

    def with_derivation(self, derivation: Callable[..., Any], tolerance: float | None) -> Agreement:
        """Compares a manual derivation with the framework's vjps; see `Formula.agrees_with`."""
        formula = self.formula
        names = [name.text for _, name in formula.results[self.order]]
        tolerance = self.tolerance if tolerance is None else tolerance
        counts = zip(map(len, formula.places), ("input", "cotangent", "direction"), strict=True)
        call = ", ".join(f"{n} {what}{'s' * (n != 1)}" for n, what in counts if n)
        results: list[Agreement] = []
        for point in self.points:
            theirs = self._numbers(point)
            values = [*map(self._array, chain(*point))]
            try:
                result = derivation(*values)
            except TypeError as error:
                if error.__traceback__ is None or error.__traceback__.tb_next is not None:
                    raise  # raised inside of derivation
                raise TypeRefusal(
                    f"formula.agrees_with: derivation is called with {call}, in this order: "
                    f"{error}."
                ) from error
            own = list(result) if isinstance(result, tuple | list) else [result]
            if len(own) != len(names):
                raise GradtoolsError(
                    f"formula.agrees_with: the derivation, called with {call}, returned "
                    f"{len(own)} values; expected a value for each of {', '.join(names)}, in this "
                    "order (None for zero)"
                )
            mine = [None if x is None else self.backend.to_numpy(self._array(x)) for x in own]
            wanted, scale = theirs[self.order], [*chain(*theirs)]
            agreement = compared(names, wanted, mine, tolerance, self.floor, scale)
            if not agreement:
                return replace(agreement, message=f"no: {agreement.message}")
            results.append(agreement)
        return _agreement(results, f"yes: agrees at {self.places}", f", called with {call}")

    def _point(self, rng: np.random.Generator, step: float) -> Point:
        """Draws a random point; its inputs are at a relative distance `step` from the arguments."""
        own = len(self.program.leaves)
        inputs = [_moved(rng, x, step) if k < own else x for k, x in enumerate(self.given)]

        def draw(p: Expr) -> np.ndarray:
            x = rng.normal(size=p.shape) + (1j * rng.normal(size=p.shape) if p.is_complex else 0)
            return x.astype(_NARROW[p.kind]) if self.single else np.asarray(x)

        _, cotangents, directions = self.formula.places
        return inputs, [*map(draw, cotangents)], [*map(draw, directions)]

    def _leaves(self, point: Point) -> list[Any]:
        """Returns the leaves with the values of `point`; integers and random keys are unchanged."""
        given, is_inexact = self.program.leaves, self.backend.is_inexact
        pairs = zip(given, point[0][: len(given)], strict=True)
        return [self._array(x) if is_inexact(leaf) else leaf for leaf, x in pairs]

    def _array(self, x: Any) -> Any:
        """Converts a NumPy array or number to a framework array; other arrays are unchanged."""
        if hasattr(x, "dtype") and not isinstance(x, np.ndarray | np.generic):
            return x
        return self.backend.asarray(np.asarray(x), next(iter(self.program.leaves), None))

    def _numbers(self, point: Point) -> Sequence[Arrays]:
        """Computes outputs, gradients and, at order 2, second derivatives with the framework."""
        at = [self._leaves(point), *([*map(self._array, group)] for group in point[1:])]
        try:
            return self.programs.differentiated(self.program, self.recorded, self.active, at)
        except GradtoolsError:
            raise
        except Exception as error:
            what = f"{type(error).__name__}: {str(error).strip().rstrip('.')}{place_of(error)}"
            raise GradtoolsError(
                f"formula: f runs, but automatic differentiation of f fails ({what}), so the "
                "formula cannot be checked."
            ) from error


def _agreement(results: Sequence[Agreement], said: str, note: str) -> Agreement:
    """Combines agreements at several points into one `Agreement`."""
    error = max(result.error for result in results)
    return Agreement(True, error, message=f"{said} (greatest relative error {error:.1e}){note}")


def _differs(result: Agreement) -> str:
    """Returns the error message for a formula that differs from automatic differentiation."""
    return f"formula: {result}; the formula is not shown. Please report the function."


def compared(
    names: Sequence[str],
    theirs: Arrays,
    mine: Arrays,
    tolerance: float,
    floor: float = 0.0,
    scale: Arrays = (),
    who: str = "derivation",
) -> Agreement:
    """Compares each array of `mine` with an array of `theirs`; None represents zeros.

    Errors are relative to the largest absolute value in the two arrays, or to `floor` times the
    largest absolute value in `scale` if this product is larger. Arrays with smaller numbers may
    contain only rounding errors. For example, the gradient of a bias before batch normalization is
    0 but is computed as 1e-17.

    who: The name of `mine` in the message, such as "formula".
    """
    greatest = lambda x: float(np.max(np.abs(x[np.isfinite(x)]), initial=0))
    arrays = map(np.asarray, scale)
    least = floor * max((greatest(x) for x in arrays if x.dtype.kind in "fc"), default=0.0)
    worst = 0.0
    for name, expected, came in zip(names, theirs, mine, strict=True):
        a = np.asarray(expected) + 0.0
        b = np.zeros_like(a) if came is None else np.asarray(came) + 0.0
        if a.shape != b.shape:
            message = f"{name} has shape {a.shape}, but shape {b.shape} in the {who}"
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


def all_finite(arrays: Iterable[Any]) -> bool:
    """Returns whether all numbers of the arrays are finite."""
    return all(np.isfinite(x).all() for x in arrays)


def _moved(rng: np.random.Generator, x: np.ndarray, step: float) -> np.ndarray:
    """Returns x * exp(step * n) with random n; replaces zeros with step * n."""
    if x.dtype.kind not in "fc" or not step:
        return x
    n = rng.normal(size=x.shape)
    return np.asarray(np.where(x == 0, step * n, x * np.exp(step * n)), x.dtype)
