"""The public operator that writes derivatives as mathematics, `formula`, and its comparison.

A backend records one run of f as expressions, and `Formula` transforms them to the adjoint program.
Before the formula is returned it is evaluated in NumPy and compared with the framework's own
automatic differentiation of f: reverse mode, and at order 2 reverse mode of reverse mode. That is
done at the given arguments and at random points near them, if the program is the same there, in
float64 and complex128 where f supports them, else in f's own precision. Derivations by hand are
compared with the framework in the same way.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from typing import Any

import numpy as np

from gradtools.arguments.checks import order_among
from gradtools.backend import Operators, P
from gradtools.code_origin import place_of
from gradtools.errors import GradtoolsError
from gradtools.rules import replaced_at
from gradtools.seeing.formulas.derivation import Check, Formula
from gradtools.seeing.formulas.opaque import OpaqueFunction
from gradtools.seeing.frameworks import Framework
from gradtools.seeing.graphs.program import LeafProgram, spoken

_POINTS = 3
_EXACT = 1e-8
_IN_SINGLE = 2e-4  # for float32: some thousand times its epsilon
_STEPS = (0.1, 0.01, 0.001, np.inf)  # relative distances of the random points; inf: anywhere
_CANCELLED = 1e-4  # relative to the greatest number, the scale for smaller arrays
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
        """The adjoint program of f as mathematics, compared with automatic differentiation.

        With y = f(x) and a cotangent ȳ for each output, a bar is the cotangent of what is under
        it; at order 2 the adjoint program is differentiated once more, along a direction u for
        each cotangent::

            order 1    x, ȳ     ->  x̄ = Jᴴ ȳ
            order 2    x, ȳ, u  ->  ∂s/∂x, ∂s/∂ȳ   of   s = <u, x̄>

        The formula is computed at random points near the arguments and compared with what the
        framework differentiates itself; where they differ nothing is returned. What holds for
        one run of f alone, such as the branch of a Python ``if``, is part of the formula.
        Convolutions, linear algebra, loops and other operations for which the formula has no
        algebra keep their names, and their adjoints are their vjps.

        Args:
            f: Takes and returns pytrees of arrays; a module, too. Inputs are called as f calls
                its parameters.
            *args: Arguments of f; arrays of any shape and dtype.
            order: 1, or 2 with the double backward.
            argnums: The position of the argument to which it is differentiated, or of several; its
                leaves are floating or complex. In PyTorch parameters that f holds and that require
                grad are differentiated as well, and ``argnums=()`` means these alone.
            **kwargs: Keyword arguments of f.

        Returns:
            A `Formula`: ``str()`` for terminals, ``.latex()`` for papers, and by itself in
            notebooks; ``.marked`` are the operations that are written by their names, ``.check``
            is the record of the comparison, and ``.agrees_with(derivation)`` compares a
            derivation by hand with the framework's vjp.

        Raises:
            GradtoolsError: order is not 1 or 2; argnums is out of range or names an integer
                argument; f raises, returns no array, or what it computes cannot be differentiated
                by the framework; the formula and automatic differentiation differ (which would be a
                bug in gradtools; the error shows both values).

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
        if not Framework(self._backend, "formula").recorded_run.watchable():
            raise GradtoolsError(
                "formula: called inside of a transform (vmap, grad) or of compiled code, where "
                "arrays have no values. Call it outside, on the function itself."
            )
        program = LeafProgram(self._backend, "formula", f, args, kwargs, argnums).with_values()
        # f's own names of its parameters; x for an argument without one
        alone = not any("argument 1" in name for name in program.names)
        x = "x" if alone else r"x\1"
        program.names = [re.sub(r"^argument (\d+)", x, n) for n in spoken(f, program.names)]
        return formulated(program, order)


class Differs(GradtoolsError):
    """A formula and automatic differentiation differ."""

    def __init__(self, difference: str) -> None:
        super().__init__(
            f"formula: {difference}; the formula is not shown. Please report the function"
        )
        self.difference = difference


class Outside(GradtoolsError):
    """Nothing could be compared, because the function is not defined at the points."""


@dataclass(frozen=True)
class Agreement:
    """Whether numbers agree with automatic differentiation; truthy if they do.

    Attributes:
        agrees: Whether they agree.
        error: The greatest relative error.
        where: The first differing entry, such as "x̄[0, 2]"; empty if none differs.
        framework: The framework's value there.
        derivation: The derivation's value there.
        message: The result as text.
    """

    agrees: bool
    error: float
    where: str = ""
    framework: Any = None
    derivation: Any = None
    message: str = ""

    def __bool__(self) -> bool:
        return self.agrees

    def __str__(self) -> str:
        return self.message


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


class _ComparedRun:
    """One recorded run of f, and the comparison of its formula with automatic differentiation.

    wide: Whether it is computed in double precision.
    """

    def __init__(self, program: LeafProgram, order: int, wide: bool) -> None:
        self.program, self.order, self.wide = program, order, wide
        self.step = 0.0  # the relative distance of the compared points; 0: the arguments alone
        self.backend = backend = program.backend
        # A context in which f may run; its effects are undone. If wide, 64-bit arrays are enabled,
        # and f's captured arrays are read in 64 bits.
        self._trying: Callable[[], AbstractContextManager[Any]]
        self._trying = partial(program.framework.programs.trying, program, wide)

        def values(x: Any) -> np.ndarray:
            """An array in float64 or complex128; integers are unchanged."""
            result = np.asarray(backend.to_numpy(x))
            wide = np.complex128 if result.dtype.kind == "c" else np.float64
            return result if result.dtype.kind in "biu" else result.astype(wide)

        self.given = [values(x) for x in program.leaves]
        with self._trying():
            if wide:
                double = lambda x: "complex128" if backend.is_complex(x) else "float64"
                widened = lambda x: backend.cast(x, double(x)) if backend.is_inexact(x) else x
                program.leaves = [*map(widened, program.leaves)]
            self.recorded = recorded = program.framework.programs.formula_graph(program)
            own = [*program.leaves, *(recorded.held[p] for p in recorded.wanted)]
            self._dtypes = [backend.dtype_name(x) for x in own]
            recorded.held.update({p: values(x) for p, x in recorded.held.items()})
        self.given += [recorded.held[p] for p in recorded.wanted]
        captured = range(len(recorded.inputs), len(recorded.opened))
        active = (*program.wrt, *captured)
        self._active = [k for k in active if recorded.opened[k].is_inexact]
        kinds = {recorded.narrow, *(() if wide else self._dtypes)}
        if kinds & {"float16", "bfloat16", "complex32"}:
            raise GradtoolsError(
                "formula: f does not run in float64, and what it gives in 16 bits is too coarse "
                "for a comparison. Pass float32 arguments."
            )
        single = kinds & {"float32", "complex64"}
        self.tolerance = _IN_SINGLE * 10 ** (order - 1) if single else _EXACT

    def formula(self) -> Formula:
        """The formula with the result of its comparison.

        It is compared at random points near the given arguments, nearer if f's domain requires it,
        and at these themselves.
        """
        formula = Formula(self.recorded, self.order, self._active)
        formula._agreement = self.agreement
        here = self._points(formula, step=0.0, count=1)
        why = "nearby f is not defined (it raises, or a value is not finite)"
        for self.step in _STEPS:
            try:
                check = self._check(formula, self._points(formula, self.step), is_near=True)
            except Outside as error:
                if error.__cause__ is not None:  # it may raise at the given arguments, too
                    self._numbers(here[0])
                continue
            except GradtoolsError:
                if not self._changes(formula):
                    raise
                why = (
                    "nearby f runs another program (a branch, a mask or a number that is taken "
                    "from the values)"
                )
                break
            try:
                self._check(formula, here, finite=False)
                formula.check = replace(check, given=True)
            except Differs as error:
                edge = (
                    "but not at the given arguments, which are at a tie, at an edge or where a "
                    "number is no longer finite: "
                )
                formula.check = replace(check, note=edge + error.difference)
            return formula
        self.step = 0.0
        note = f"{why}; compared at the given arguments alone, for which it holds"
        formula.check = replace(self._check(formula, here), note=note)
        return formula

    def _check(
        self, formula: Formula, points: Sequence[Point], finite: bool = True, is_near: bool = False
    ) -> Check:
        """Compares the formula's numbers with the framework's.

        Raises:
            Differs: They differ.
            Outside: The values are finite at none of the points, although required.
        """
        names = [*formula.outputs, *formula.gradients, *formula.second]
        worst, counted = 0.0, 0
        for point in points:
            theirs = self._numbers(point, is_near)
            if finite and not all_finite(theirs[:1]):
                continue
            ours = formula.evaluate(*point)
            result = compared(names, [*chain(*theirs)], [*chain(*ours)], self.tolerance, ours)
            if not result:
                raise Differs(
                    f"{result.where} is {result.derivation} by the formula and "
                    f"{result.framework} by automatic differentiation"
                )
            counted += all_finite(ours)
            worst = max(worst, result.error)
        if finite and not counted:
            raise Outside(
                f"formula: at none of {len(points)} points are all values finite, so nothing was "
                "compared; give arguments at which the function and its derivatives are defined"
            )
        return Check(len(points), worst, self.tolerance)

    def _changes(self, formula: Formula) -> bool:
        """Whether f runs another program at a nearby point, or raises there."""
        before, mark = self.program.leaves, self.recorded.fingerprint()
        try:
            for point in self._points(formula, _STEPS[0]):
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
        tolerance = self.tolerance if tolerance is None else tolerance
        groups = (formula.inputs, formula.cotangents, formula.directions)
        counts = zip(map(len, groups), ("input", "cotangent", "direction"), strict=True)
        call = ", ".join(f"{n} {what}{'s' * (n != 1)}" for n, what in counts if n)
        here = self._points(formula, 0.0, seed, 1)
        near = self._points(formula, self.step, seed, points) if self.step else []
        worst, counted, passed = 0.0, 0, 0
        for k, point in enumerate([*here, *near]):
            try:
                theirs = self._numbers(point, is_near=k > 0)
            except Outside:  # f is not defined there
                continue
            passed += 1
            counted += all_finite(theirs)
            with self._trying():
                result = derivation(*map(convert or self._array, chain(*point)))
                own = list(result) if isinstance(result, tuple | list) else [result]
                numpy = lambda x: None if x is None else self.backend.to_numpy(self._array(x))
                came = returned([*map(numpy, own)], names, theirs[-1], call)
            agreement = compared(names, theirs[-1], came, tolerance, theirs)
            if not agreement:
                return agreement
            worst = max(worst, agreement.error)
        if not counted:
            raise GradtoolsError(
                "formula.agrees_with: at no point are all values finite, so nothing was compared."
            )
        random = f" and {passed - 1} random point{'s' * (passed > 2)}" if passed > 1 else ""
        message = (
            f"yes: agrees at the arguments{random} (greatest relative error {worst:.1e}), "
            f"called with {call}"
        )
        return Agreement(True, worst, message=message)

    def _points(
        self, formula: Formula, step: float, seed: int = 0, count: int = _POINTS
    ) -> list[Point]:
        """Random points at this relative distance of the given arguments; these themselves at 0."""
        rng, result = np.random.default_rng(seed), []
        for _ in range(count):
            _, cotangents, directions = formula.point(rng)
            inputs = [moved(rng, x, step) for x in self.given]
            if not self.wide:  # in the precision in which f runs
                pairs = zip(inputs, self._dtypes, strict=True)
                inputs = [x.astype(dtype) if x.dtype.kind in "fc" else x for x, dtype in pairs]
                if any(x.dtype in (np.float32, np.complex64) for x in inputs):
                    single = lambda x: x.astype(np.complex64 if x.dtype.kind == "c" else np.float32)
                    cotangents, directions = [*map(single, cotangents)], [*map(single, directions)]
            result.append((inputs, cotangents, directions))
        return result

    def _leaves(self, values: Sequence[Any]) -> list[Any]:
        """The framework's arrays of all inputs; integers and random keys are the given ones."""
        own = enumerate(self.program.leaves)
        kept = {k: x for k, x in own if not self.backend.is_inexact(x)}
        return [kept[k] if k in kept else self._array(x) for k, x in enumerate(values)]

    def _array(self, x: Any) -> Any:
        """The framework's array of a NumPy array or number; other arrays as they are."""
        if hasattr(x, "dtype") and not isinstance(x, np.ndarray | np.generic):
            return x
        return self.backend.asarray(np.asarray(x), next(iter(self.program.leaves), None))

    def _numbers(self, point: Point, is_near: bool = False) -> tuple[list[Any], ...]:
        """The framework's outputs, gradients and, at order 2, their derivatives.

        A gradient is None where the input is not differentiated.

        is_near: Whether the point differs from the given arguments, so that f may raise.
        """
        inputs, cotangents, directions = point
        opened, outputs, active = self.recorded.opened, self.recorded.outputs, self._active
        inexact = [k for k, y in enumerate(outputs) if y.is_inexact]
        run = self.recorded.run or self.program.run

        def called(*leaves: Any) -> list[Any]:
            return [self.backend.asarray(y, next(iter(leaves), None)) for y in run(list(leaves))]

        moving = tuple(p.is_inexact for p in opened)
        f = OpaqueFunction(self.backend, called, self._leaves, moving, self._trying)
        of_inputs = lambda grads: replaced_at([None] * len(opened), active, grads)
        try:
            found = f.vjp(inexact, active, with_outputs=True).value(*inputs, *cotangents)
            groups = found[: len(outputs)], of_inputs(found[len(outputs) :])
            if self.order == 1:
                return groups
            given, count = len(inputs), len(active)
            both = [*active, *range(given, given + len(cotangents))]
            second = f.vjp(inexact, active).vjp(range(count), both)
            found = second.value(*inputs, *cotangents, *directions)
            return *groups, [*of_inputs(found[:count]), *found[count:]]
        except GradtoolsError:
            raise
        except Exception as error:  # at the given arguments f itself runs
            raise (Outside if is_near else GradtoolsError)(
                "formula: f runs, and automatic differentiation of it does not "
                f"({_described(error)}), so there is nothing to hold a formula against."
            ) from error


# --- numbers


def compared(
    names: Sequence[str], theirs: Group, mine: Group, tolerance: float, scale: Sequence[Group] = ()
) -> Agreement:
    """Each of mine with the framework's own, where there is one.

    An array's error is relative to its greatest modulus, or to 1e-4 of the greatest number in
    `scale`: below that a whole array may be what is left of larger numbers that cancel, such as
    the gradient of a bias before batch normalisation, which is 0 and is computed as 1e-17.
    """
    greatest = lambda x: float(np.max(np.abs(x[np.isfinite(x)]), initial=0))
    arrays = [np.asarray(x) for x in chain(*scale) if x is not None]
    least = _CANCELLED * max((greatest(x) for x in arrays if x.dtype.kind in "fc"), default=0.0)
    worst = 0.0
    for name, expected, came in zip(names, theirs, mine, strict=True):
        if expected is None:
            continue
        a = np.asarray(expected) + 0.0
        b = np.zeros_like(a) if came is None else np.asarray(came) + 0.0
        if a.shape != b.shape:
            message = f"no: {name} has shape {a.shape}, the derivation gives {b.shape}"
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
                f"no: {where} is {a[at]:.10g} by automatic differentiation, {b[at]:.10g} by the "
                f"derivation (relative error {error:.1e} over {name})"
            )
            return Agreement(False, error, where, a[at].item(), b[at].item(), message)
        worst = max(worst, error)
    return Agreement(True, worst)


def all_finite(groups: Sequence[Group]) -> bool:
    """Whether all arrays are finite."""
    return all(np.isfinite(x).all() for group in groups for x in group if x is not None)


def moved(rng: np.random.Generator, x: np.ndarray, step: float) -> np.ndarray:
    """An array near x: entries times e**(step n), zeros plus step n; symmetric where x is."""
    if x.dtype.kind not in "fc" or not step:
        return x
    n = rng.normal(size=x.shape)
    if np.isinf(step):
        return n.astype(x.dtype)
    square = x.ndim >= 2 and x.shape[-1] == x.shape[-2] > 1
    if square and np.array_equal(x, x.swapaxes(-1, -2).conj()):
        n = (n + n.swapaxes(-1, -2)) / 2  # a Cholesky factor or eigenvalues may be taken of it
    return np.where(x == 0, step * n, x * np.exp(step * n))


def returned(result: list, names: Sequence[str], expected: Group, call: str) -> list[Any]:
    """Normalizes a derivation's results to one entry for each input."""
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
