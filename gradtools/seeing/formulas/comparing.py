"""Compares a formula with a derivation by hand, and with a framework's numbers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from gradtools.errors import GradtoolsError
from gradtools.seeing.formulas.expressions import BOOLEAN, COMPLEX, INTEGER, Expr

if TYPE_CHECKING:
    from gradtools.seeing.formulas.derivation import Formula, Values

Captured = Mapping[int, Any] | Sequence[Any]  # by their numbers, or in order
Point = tuple[list[np.ndarray], list[np.ndarray], list[np.ndarray]]


class Differs(GradtoolsError):
    """A formula and automatic differentiation differ.

    Attributes:
        agreement: The first entry that differs, with both values.
    """

    def __init__(self, found: Agreement) -> None:
        self.agreement = found
        super().__init__(
            f"formula: {self.values()}; the formula is not shown. Please report the function"
        )

    def values(self) -> str:
        """The entry and both values, in words."""
        return (
            f"{self.agreement.where} is {self.agreement.formula} by the formula and "
            f"{self.agreement.derivation} by automatic differentiation"
        )


class Outside(GradtoolsError):
    """Nothing could be compared: the points lie where the function is not defined."""


@dataclass(frozen=True)
class Agreement:
    """Whether a derivation agrees with the formula; truthy if it does.

    Attributes:
        agrees: Yes or no.
        error: The greatest relative error over all that was compared.
        where: The first entry that differs, such as "x̄[0, 2]"; empty if none does.
        formula: The formula's value there.
        derivation: The derivation's value there.
        message: The same in words.
    """

    agrees: bool
    error: float
    where: str = ""
    formula: Any = None
    derivation: Any = None
    message: str = ""

    def __bool__(self) -> bool:
        return self.agrees

    def __str__(self) -> str:
        return self.message


def draw(rng: np.random.Generator, p: Expr) -> np.ndarray:
    """A random value for a placeholder: standard normal, or zeros and ones."""
    if p.kind in (INTEGER, BOOLEAN):
        return rng.integers(0, 2, p.shape).astype(bool if p.kind == BOOLEAN else np.int64)
    x = rng.normal(size=p.shape)
    return x + 1j * rng.normal(size=p.shape) if p.kind == COMPLEX else x


def relative_error(a: Any, b: Any, least: float = 0.0) -> float:
    """The greatest distance of two arrays over the greatest modulus of either.

    least: What that modulus is at least: of the rounding errors of larger numbers, that cancel.
    """
    a, b = np.asarray(a), np.asarray(b)
    if a.size == 0:
        return 0.0
    both = np.isnan(a) & np.isnan(b)
    with np.errstate(invalid="ignore"):  # inf - inf, where both are equal
        distance = np.where(both | (a == b), 0, np.abs(a - b))
    size = max(_greatest(a), _greatest(b), least)
    if not np.isfinite(distance).all():
        return float("inf")
    return float(np.max(distance) / size) if size else 0.0


def _greatest(x: np.ndarray) -> float:
    """The greatest modulus of what is finite."""
    return float(np.max(np.abs(x[np.isfinite(x)]), initial=0))


def verify(
    formula: Formula,
    reference: Callable[[list, list, list], tuple],
    points: Sequence[Point],
    tolerance: float,
    captured: Captured,
    finite: bool,
) -> float:
    """The greatest relative error against a framework's automatic differentiation.

    The arguments are those of `Formula.verified`. Where values need not be finite, NaN agrees with
    NaN.
    """

    def pairs(mine: Values, point: Point) -> Iterator[tuple[str, Any, Any]]:
        theirs = reference(*point)
        if finite and _both_undefined(mine.outputs, theirs[0]):
            return
        names = [formula.outputs, formula.gradients, formula.second][: formula.order + 1]
        ours = [mine.outputs, mine.gradients, mine.second][: formula.order + 1]
        for group in zip(names, ours, theirs, strict=True):
            triples = zip(*group, strict=True)
            yield from ((name, a, b) for name, a, b in triples if b is not None)

    worst, difference, counted = _held_against(formula, points, tolerance, captured, pairs)
    if difference is not None:
        raise Differs(difference)
    if finite:
        _must_be_finite(counted, len(points))
    return worst


def compared_at(
    formula: Formula,
    derivation: Callable[..., Any],
    points: Sequence[Point],
    tolerance: float,
    captured: Captured,
    convert: Callable[[np.ndarray], Any] | None,
) -> Agreement:
    """The derivation at each point beside the formula's own numbers; see `Formula.agrees_with`."""

    def pairs(mine: Values, point: Point) -> Iterator[tuple[str, Any, Any]]:
        expected = _expected(formula, mine)
        arrays = [x for group in point for x in group]
        given = derivation(*(arrays if convert is None else map(convert, arrays)))
        result = _returned(given, expected, formula)
        return ((name, a, b) for (name, a), b in zip(expected, result, strict=True))

    worst, difference, finite = _held_against(formula, points, tolerance, captured, pairs)
    if difference is not None:
        return difference
    _must_be_finite(finite, len(points))
    count = f"{len(points)} random points" if len(points) > 1 else "1 point"
    message = f"yes: agrees at {count} (greatest relative error {worst:.1e})"
    return Agreement(True, worst, message=message)


def _held_against(
    formula: Formula,
    points: Sequence[Point],
    tolerance: float,
    captured: Captured,
    pairs: Callable[[Values, Point], Iterator[tuple[str, Any, Any]]],
) -> tuple[float, Agreement | None, int]:
    """The greatest relative error, the first difference, and at how many points all is finite."""
    worst, counted = 0.0, 0
    for point in points:
        mine = formula.evaluate(*point, captured=captured)
        counted += _all_finite(mine)
        least = _least(mine)
        for name, a, b in pairs(mine, point):
            if a is None:
                continue
            difference = _difference(name, a, b, tolerance, least)
            if difference is not None:
                return worst, difference, counted
            worst = max(worst, relative_error(a, _array(b, a), least))
    return worst, None, counted


_CANCELLED = 1e-4  # of the greatest number: smaller arrays are compared with this in mind


def _least(values: Values) -> float:
    """The size below which a whole array may be what is left of larger numbers that cancel.

    The bias before a batch normalisation has the gradient 0, which rounding makes 1e-17.
    """
    arrays = [x for x in (*values.outputs, *values.gradients, *values.second) if x is not None]
    finite = [np.abs(x[np.isfinite(x)]).max(initial=0) for x in arrays if x.dtype.kind in "fc"]
    return _CANCELLED * float(max(finite, default=0.0))


def _all_finite(values: Values) -> bool:
    arrays = (*values.outputs, *values.gradients, *values.second)
    return all(np.isfinite(a).all() for a in arrays if a is not None)


def _both_undefined(mine: Sequence[Any], theirs: Sequence[Any]) -> bool:
    """Whether f has a value that is not finite, the same by both: its derivatives say nothing."""
    pairs = [(a, np.asarray(b)) for a, b in zip(mine, theirs, strict=True) if b is not None]
    return any(
        not np.isfinite(b).all() and np.array_equal(np.isfinite(a), np.isfinite(b))
        for a, b in pairs
    )


def _must_be_finite(finite: int, points: int) -> None:
    """A comparison of NaN with NaN compares nothing."""
    if not finite:
        raise Outside(
            f"formula: at none of {points} points are all values finite, so nothing was compared; "
            "give arguments at which the function and its derivatives are defined"
        )


def near(
    inputs: Sequence[Any], formula: Formula, step: float = 0.1
) -> Callable[[np.random.Generator], tuple[list, list, list]]:
    """Draws points near these inputs: each entry times e**(step n), zeros plus step n.

    A Hermitian matrix stays one.
    """
    given = [np.asarray(x) for x in inputs]

    def sample(rng: np.random.Generator) -> tuple[list, list, list]:
        _, cotangents, directions = formula.point(rng)
        return [_moved(rng, x, step) for x in given], cotangents, directions

    return sample


def _moved(rng: np.random.Generator, x: np.ndarray, step: float) -> np.ndarray:
    if x.dtype.kind not in "fc":
        return x
    n = rng.normal(size=x.shape)
    if _is_hermitian(x):  # what a Cholesky factor or eigenvalues are taken of stays so
        n = (n + n.swapaxes(-1, -2)) / 2
    return np.where(x == 0, step * n, x * np.exp(step * n))


def _is_hermitian(x: np.ndarray) -> bool:
    square = x.ndim >= 2 and x.shape[-1] == x.shape[-2] > 1
    return square and np.array_equal(x, x.swapaxes(-1, -2).conj())


def _expected(formula: Formula, values: Values) -> list[tuple[str, np.ndarray | None]]:
    if formula.order == 1:
        return list(zip(formula.gradients, values.gradients, strict=True))
    return list(zip(formula.second, values.second, strict=True))


def _returned(given: Any, expected: Sequence[tuple[str, Any]], formula: Formula) -> list[Any]:
    """One entry for each input, or only for those that can have a derivative."""
    result = list(given) if isinstance(given, (tuple, list)) else [given]
    can = [k for k, (_, a) in enumerate(expected) if a is not None]
    if len(result) == len(expected):
        _not_compared(result, can, formula)
        return result
    if len(result) == len(can):
        place = dict(zip(can, result, strict=True))
        return [place.get(k) for k in range(len(expected))]
    names = ", ".join(name for name, _ in expected)
    raise GradtoolsError(
        f"formula.agrees_with: the derivation returned {len(result)} values; "
        f"one is expected for each of {names}, in this order (None where it is zero)"
    )


def _not_compared(found: Sequence[Any], can: Sequence[int], formula: Formula) -> None:
    """Nothing is said of a derivative that the formula does not have."""
    names = formula.gradients if formula.order == 1 else formula.second
    more = [k for k, x in enumerate(found) if x is not None and k not in can]
    if more:
        raise GradtoolsError(
            f"formula.agrees_with: the derivation returned {', '.join(names[k] for k in more)}, "
            "which the formula does not have, so that it cannot be compared. Return None there, "
            "or make the formula with wrt= naming that argument"
        )


def _array(b: Any, like: np.ndarray) -> np.ndarray:
    if b is None:
        return np.zeros_like(like)
    b = b.detach() if hasattr(b, "detach") else b
    return np.asarray(b.resolve_conj() if hasattr(b, "resolve_conj") else b)


def _difference(
    name: str, a: np.ndarray, b: Any, tolerance: float, least: float
) -> Agreement | None:
    result = _array(b, a)
    if result.shape != a.shape:
        message = f"no: {name} has shape {a.shape}, the derivation gives {result.shape}"
        return Agreement(False, float("inf"), name, a.shape, result.shape, message)
    error = relative_error(a, result, least)
    if error <= tolerance:
        return None
    at = _first(a, result, tolerance, least)
    where = name + (str(list(map(int, at))) if at else "")
    message = (
        f"no: {where} is {a[at]:.10g} by the formula, {result[at]:.10g} by the derivation "
        f"(relative error {error:.1e} over {name})"
    )
    return Agreement(False, error, where, a[at].item(), result[at].item(), message)


def _first(a: np.ndarray, b: np.ndarray, tolerance: float, least: float) -> tuple:
    """The first entry that differs by more than is allowed."""
    size = max(np.max(np.abs(a), initial=0), np.max(np.abs(b), initial=0), least)
    differs = ~(np.abs(a - b) <= tolerance * size) & (a != b) & ~(np.isnan(a) & np.isnan(b))
    return tuple(np.argwhere(differs)[0]) if differs.any() else (0,) * a.ndim
