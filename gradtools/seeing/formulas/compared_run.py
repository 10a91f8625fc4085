"""Compares a formula with the framework's automatic differentiation at several points.

The formula is evaluated in NumPy, the program and its vjps by the framework, at the given arguments
and at random points near them, if the program is the same there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import numpy as np

from gradtools.backend import Backend
from gradtools.code_origin import place_of
from gradtools.errors import GradtoolsError
from gradtools.seeing.formulas.comparing import (
    Agreement,
    Differs,
    Outside,
    Point,
    all_finite,
    compared,
    least_of,
    moved,
    returned,
)
from gradtools.seeing.formulas.derivation import Check, Formula, derive
from gradtools.seeing.formulas.operations.opaque import OpaqueFunction
from gradtools.seeing.graphs.program import LeafProgram

_POINTS = 3
_EXACT = 1e-8
_IN_SINGLE = 2e-4  # for float32: some thousand times its epsilon
_STEPS = (0.1, 0.01, 0.001)  # relative distances of the random points
_AS_RECORDED = (
    "written as f computes it, for with names such as softplus the values differ at the arguments:"
)
_OTHER_PROGRAM = (
    "nearby f runs another program (a branch, a mask or a number that is taken from the values)"
)
_OTHER_DRAWS = "nearby f draws other numbers, for what it draws from depends on the values"
_NO_NEIGHBOURS = "nearby f is not defined (it raises, or a value is not finite)"
_AT_AN_EDGE = (
    "but not at the given arguments, which are at a tie, at an edge or where a number is no "
    "longer finite:"
)
_NO_DERIVATIVE = (
    "formula: f runs, and automatic differentiation of it does not ({}), so there is nothing to "
    "hold a formula against."
)
_NOWHERE = (
    "formula: at none of {} points are all values finite, so nothing was compared; give "
    "arguments at which the function and its derivatives are defined"
)


def formulated(program: LeafProgram, order: int) -> Formula:
    """The compared formula, in double precision if f runs in it, else in f's own precision.

    Raises:
        GradtoolsError: f raises, is not differentiated by the framework, or differs from it.
    """
    leaves = list(program.leaves)
    try:
        return _ComparedRun(program, order, wide=True).formula()
    except (Differs, Outside):
        raise
    except Exception:  # f does not run in double precision; its own errors are raised below
        program.leaves = leaves
    try:
        return _ComparedRun(program, order, wide=False).formula()
    except GradtoolsError:
        raise
    except Exception as error:
        what = _described(error)
        try:
            program.framework.recorded_run.rerun(program.run, program.leaves)
        except Exception:  # f's own error, reported with its line
            raise GradtoolsError(
                f"formula: f raised {what}. It must run and be differentiable at the given "
                "arguments."
            ) from error
        raise GradtoolsError(
            f"formula: f runs, but its formula could not be made ({what}). If the framework "
            "differentiates f at these arguments, please report the function."
        ) from error


def _described(error: BaseException) -> str:
    """An error's type, message, and line in the user's code."""
    return f"{type(error).__name__}: {str(error).strip().rstrip('.')}{place_of(error)}"


def _values(backend: Backend, x: Any) -> np.ndarray:
    """An array in float64 or complex128; integers are unchanged."""
    result = np.asarray(backend.to_numpy(x))
    if result.dtype.kind in "biuc":
        return result.astype(np.complex128) if result.dtype.kind == "c" else result
    return result.astype(np.float64)


class _ComparedRun:
    """One recorded run of f, and the comparison of its formula with automatic differentiation.

    Args:
        program: The user's call.
        order: The order of the formula.
        wide: Whether it is computed in double precision.
    """

    def __init__(self, program: LeafProgram, order: int, wide: bool) -> None:
        self.program, self.order, self.wide = program, order, wide
        self._step = 0.0  # the relative distance of the compared points; 0: of the arguments alone
        self.backend = backend = program.backend
        self.given = [_values(backend, x) for x in program.leaves]
        with self._trying():
            if wide:
                program.leaves = [self._widened(x) for x in program.leaves]
            self.recorded = recorded = program.framework.programs.formula_graph(program)
            own = [*program.leaves, *(recorded.held[p] for p in recorded.wanted)]
            self._dtypes = [backend.dtype_name(x) for x in own]
            recorded.held.update({p: _values(backend, x) for p, x in recorded.held.items()})
        self.given += [recorded.held[p] for p in recorded.wanted]
        captured = range(len(recorded.inputs), len(recorded.opened))
        active = (*program.wrt, *captured)
        self._active = [k for k in active if recorded.opened[k].is_inexact]

    def _widened(self, x: Any) -> Any:
        if not self.backend.is_inexact(x):
            return x
        return self.backend.cast(x, "complex128" if self.backend.is_complex(x) else "float64")

    def _trying(self) -> AbstractContextManager[Any]:
        """A context in which f may run and whose effects are undone.

        If wide, 64-bit arrays are enabled, and f's captured arrays are read in 64 bits.
        """
        block: AbstractContextManager[Any] = self.program.framework.programs.trying(
            self.program, self.wide
        )
        return block

    # --- the formula

    def formula(self) -> Formula:
        """The formula with the result of its comparison."""
        formula = self._derive(named=True)
        try:
            check = self._check_nearby(formula)
        except Outside:
            return self._of_one_run(formula, _NO_NEIGHBOURS)
        except GradtoolsError as error:
            if self._changes(formula):
                return self._of_one_run(formula, _OTHER_PROGRAM)
            if formula.draws:
                return self._of_one_run(formula, _OTHER_DRAWS)
            as_recorded = self._as_recorded(error) if isinstance(error, Differs) else None
            if as_recorded is None:
                raise
            return as_recorded
        formula.check = replace(check, given=True)
        try:
            self._check(formula, [self._here(formula)])
        except Differs as error:
            formula.check = replace(check, note=f"{_AT_AN_EDGE} {error.values()}")
            return self._as_recorded(error) or formula
        return formula

    def _derive(self, named: bool) -> Formula:
        """named: whether patterns are recognized and written by name."""
        formula = derive(self.recorded, self.order, self._active, named)
        formula._agreement = self.agreement
        return formula

    def _of_one_run(self, formula: Formula, why: str) -> Formula:
        self._step = 0.0
        check = self._check(formula, [self._here(formula)], finite=True)
        note = f"{why}; compared at the given arguments alone, for which it holds"
        formula.check = replace(check, note=note)
        return formula

    def _as_recorded(self, error: Differs) -> Formula | None:
        """The formula without recognized names, if it agrees with the framework; NaN equals NaN."""
        formula = self._derive(named=False)
        try:
            self._check(formula, [self._here(formula)])
            check = self._check_nearby(formula, finite=False)
        except Differs:
            return None
        formula.check = replace(check, note=f"{_AS_RECORDED} {error.values()}", given=True)
        return formula

    def _check_nearby(self, formula: Formula, finite: bool = True) -> Check:
        """Compares at random points near the given arguments, nearer if f's domain requires it."""
        for step in _STEPS:
            self._step, sample = step, self._sample(formula, step)
            try:
                return self._check(formula, sample, finite, is_near=True)
            except Outside as error:
                outside = error
        raise outside

    def _check(
        self,
        formula: Formula,
        points: Sequence[Point],
        finite: bool = False,
        is_near: bool = False,
    ) -> Check:
        """Compares the formula's numbers with the framework's.

        Raises:
            Differs: They differ.
            Outside: The values are finite at none of the points, although required.
        """
        names = [*formula.outputs, *formula.gradients, *formula.second]
        worst, counted, tolerance = 0.0, 0, self._tolerance()
        for point in points:
            theirs = self._numbers(point, is_near)
            values = formula.evaluate(*point)
            ours = (values.outputs, values.gradients, values.second)
            counted += all_finite(ours)
            if finite and _undefined(ours[0], theirs[0]):
                continue
            result = compared(names, _joined(theirs), _joined(ours), tolerance, least_of(ours))
            if not result:
                raise Differs(result)
            worst = max(worst, result.error)
        if finite and not counted:
            raise Outside(_NOWHERE.format(len(points)))
        return Check(len(points), worst, tolerance)

    def _changes(self, formula: Formula) -> bool:
        """Whether f runs another program at a nearby point, or raises there."""
        before, mark = self.program.leaves, self.recorded.fingerprint()
        try:
            for point in self._sample(formula, _STEPS[0]):
                with self._trying():
                    self.program.leaves = self._leaves(point[0][: len(before)])
                    other = self.program.framework.programs.formula_graph(self.program)
                if other.fingerprint() != mark:
                    return True
        except Exception:  # f is not defined there
            return True
        finally:
            self.program.leaves = before
        return False

    # --- a derivation by hand

    def agreement(
        self,
        formula: Formula,
        derivation: Callable[..., Any],
        points: int,
        tolerance: float | None,
        seed: int,
        convert: Callable[[np.ndarray], Any] | None,
    ) -> Agreement:
        """Compares a derivation by hand with the framework's vjps; see `Formula.agrees_with`."""
        names = formula.gradients if self.order == 1 else formula.second
        tolerance = self._tolerance() if tolerance is None else tolerance
        call = _counted(formula)
        near = self._sample(formula, self._step, seed, points) if self._step else []
        worst, counted, passed = 0.0, 0, 0
        for k, point in enumerate([self._here(formula, seed), *near]):
            try:
                theirs = self._numbers(point, is_near=k > 0)
            except Outside:  # f is not defined there
                continue
            passed += 1
            counted += all_finite(theirs)
            came = returned(self._derived(derivation, point, convert), names, theirs[-1], call)
            result = compared(names, theirs[-1], came, tolerance, least_of(theirs))
            if not result:
                return result
            worst = max(worst, result.error)
        if not counted:
            raise GradtoolsError(_NOWHERE.format(len(near) + 1))
        random = f" and {passed - 1} random point{'s' * (passed > 2)}" if passed > 1 else ""
        message = (
            f"yes: agrees at the arguments{random} (greatest relative error {worst:.1e}), "
            f"called with {call}"
        )
        return Agreement(True, worst, message=message)

    def _derived(self, derivation: Callable[..., Any], point: Point, convert: Any) -> Any:
        """The results of a derivation at a point, as NumPy arrays."""
        with self._trying():
            result = derivation(*map(convert or self._array, _joined(point)))
            numpy = lambda x: None if x is None else self.backend.to_numpy(self._array(x))
            return tuple(map(numpy, result)) if isinstance(result, tuple | list) else numpy(result)

    # --- points and precision

    def _here(self, formula: Formula, seed: int = 0) -> Point:
        """The given arguments, with random cotangents."""
        return self._rounded((self.given, *formula.point(np.random.default_rng(seed))[1:]))

    def _sample(
        self, formula: Formula, step: float, seed: int = 0, points: int = _POINTS
    ) -> list[Point]:
        """Random points near the given arguments."""
        rng, result = np.random.default_rng(seed), []
        for _ in range(points):
            _, cotangents, directions = formula.point(rng)
            inputs = [moved(rng, x, step) for x in self.given]
            result.append(self._rounded((inputs, cotangents, directions)))
        return result

    def _tolerance(self) -> float:
        if self.wide and not self.recorded.narrow:
            return _EXACT
        kinds = {self.recorded.narrow, *(() if self.wide else self._dtypes)}
        if kinds & {"float16", "bfloat16", "complex32"}:
            raise GradtoolsError(
                "formula: f does not run in float64, and what it gives in 16 bits is too coarse "
                "for a comparison. Pass float32 arguments."
            )
        single = kinds & {"float32", "complex64"}
        return _IN_SINGLE * 10 ** (self.order - 1) if single else _EXACT

    def _rounded(self, point: Point) -> Point:
        """The point in the precision in which f runs."""
        if self.wide:
            return point
        inputs, *others = point
        pairs = zip(inputs, self._dtypes, strict=True)
        arrays = [x.astype(dtype) if x.dtype.kind in "fc" else x for x, dtype in pairs]
        if not any(a.dtype in (np.float32, np.complex64) for a in arrays):
            return arrays, others[0], others[1]
        single = lambda x: x.astype(np.complex64 if x.dtype.kind == "c" else np.float32)
        return arrays, [*map(single, others[0])], [*map(single, others[1])]

    def _leaves(self, values: Sequence[Any]) -> list[Any]:
        """The framework's arrays of all inputs; integers and random keys are the given ones."""
        own = self.program.leaves
        kept = [k < len(own) and not self.backend.is_inexact(own[k]) for k in range(len(values))]
        return [own[k] if kept[k] else self._array(x) for k, x in enumerate(values)]

    def _array(self, x: Any) -> Any:
        """The framework's array of a NumPy array or number; other arrays as they are."""
        if hasattr(x, "dtype") and not isinstance(x, np.ndarray | np.generic):
            return x
        return self.backend.asarray(np.asarray(x), next(iter(self.program.leaves), None))

    # --- the framework's own numbers

    def _numbers(self, point: Point, is_near: bool = False) -> tuple[list[Any], ...]:
        """The framework's outputs, gradients and, at order 2, their derivatives.

        is_near: Whether the point differs from the given arguments, so that f may raise.
        """
        try:
            return self._computed(*point)
        except GradtoolsError:
            raise
        except Exception as error:  # at the given arguments f itself runs
            message = _NO_DERIVATIVE.format(_described(error))
            raise (Outside if is_near else GradtoolsError)(message) from error

    def _computed(
        self, inputs: list[Any], cotangents: list[Any], directions: list[Any]
    ) -> tuple[list[Any], ...]:
        inexact = [k for k, y in enumerate(self.recorded.outputs) if y.is_inexact]
        moving = tuple(p.is_inexact for p in self.recorded.opened)
        f = OpaqueFunction(self.backend, self._run, self._leaves, moving, self._trying)
        found = f.vjp(inexact, self._active, with_outputs=True).value(*inputs, *cotangents)
        count, given = len(self.recorded.outputs), len(inputs)
        groups = found[:count], self._spread(found[count:])
        if self.order == 1:
            return groups
        both = [*self._active, *range(given, given + len(cotangents))]
        adjoint = f.vjp(inexact, self._active)
        second = adjoint.vjp(range(len(self._active)), both)
        found, count = second.value(*inputs, *cotangents, *directions), len(self._active)
        return *groups, [*self._spread(found[:count]), *found[count:]]

    def _run(self, *leaves: Any) -> list[Any]:
        """f's outputs, for all of its inputs."""
        run, like = self.recorded.run or self.program.run, next(iter(leaves), None)
        return [self.backend.asarray(y, like) for y in run(list(leaves))]

    def _spread(self, grads: Sequence[Any]) -> list[Any]:
        """One gradient for each input; None for those that are not differentiated."""
        place = dict(zip(self._active, grads, strict=True))
        return [place.get(k) for k in range(len(self.recorded.opened))]


def _joined(groups: Sequence[Sequence[Any]]) -> list[Any]:
    return [x for group in groups for x in group]


def _undefined(mine: Sequence[Any], theirs: Sequence[Any]) -> bool:
    """Whether f is not finite, equally in both, so that derivatives need not be compared."""
    pairs = [(a, np.asarray(b)) for a, b in zip(mine, theirs, strict=True) if b is not None]
    return any(
        not np.isfinite(b).all() and np.array_equal(np.isfinite(a), np.isfinite(b))
        for a, b in pairs
    )


def _counted(formula: Formula) -> str:
    """The number of arguments of a derivation, as text."""
    counts = {
        "input": len(formula.inputs),
        "cotangent": len(formula.cotangents),
        "direction": len(formula.directions),
    }
    return ", ".join(f"{n} {what}{'s' * (n != 1)}" for what, n in counts.items() if n)
