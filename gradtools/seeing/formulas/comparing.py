"""Compares the numbers of a formula, or of a derivation by hand, with a framework's vjps.

A `Point` consists of inputs, a cotangent for each inexact output and, at order 2, a direction for
each gradient.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from gradtools.errors import GradtoolsError

Point = tuple[list[np.ndarray], list[np.ndarray], list[np.ndarray]]
Group = Sequence[Any]  # one array for each name; None is not compared


class Differs(GradtoolsError):
    """A formula and automatic differentiation differ.

    Attributes:
        agreement: The first entry that differs, with both values.
    """

    def __init__(self, agreement: Agreement) -> None:
        self.agreement = agreement
        super().__init__(
            f"formula: {self.values()}; the formula is not shown. Please report the function"
        )

    def values(self) -> str:
        """A clause with the entry and both values."""
        return (
            f"{self.agreement.where} is {self.agreement.derivation} by the formula and "
            f"{self.agreement.framework} by automatic differentiation"
        )


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


def compared(
    names: Sequence[str], theirs: Group, mine: Group, tolerance: float, least: float
) -> Agreement:
    """Each of mine with the framework's own, where there is one.

    An array's error is relative to its greatest modulus, or to `least`, the size below which a
    whole array may be what is left of larger numbers that cancel.
    """
    worst = 0.0
    for name, expected, came in zip(names, theirs, mine, strict=True):
        if expected is None:
            continue
        a = np.asarray(expected) + 0.0
        b = np.zeros_like(a) if came is None else np.asarray(came) + 0.0
        if a.shape != b.shape:
            message = f"no: {name} has shape {a.shape}, the derivation gives {b.shape}"
            return Agreement(False, float("inf"), name, a.shape, b.shape, message)
        size = max(_greatest(a), _greatest(b), least)
        with np.errstate(all="ignore"):
            same = (a == b) | (np.isnan(a) & np.isnan(b))
            errors = np.where(same, 0.0, np.abs(a - b) / size)
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


def _greatest(x: np.ndarray) -> float:
    """The greatest finite modulus."""
    return float(np.max(np.abs(x[np.isfinite(x)]), initial=0))


_CANCELLED = 1e-4  # relative to the greatest number, the scale for smaller arrays


def least_of(groups: Sequence[Group]) -> float:
    """The scale below which an array may be rounding error of larger numbers that cancel.

    The gradient of a bias before batch normalisation is 0, but is computed as 1e-17.
    """
    arrays = [np.asarray(x) for group in groups for x in group if x is not None]
    sizes = [_greatest(x) for x in arrays if x.dtype.kind in "fc"]
    return _CANCELLED * max(sizes, default=0.0)


def all_finite(groups: Sequence[Group]) -> bool:
    """Whether all arrays are finite."""
    return all(np.isfinite(x).all() for group in groups for x in group if x is not None)


def moved(rng: np.random.Generator, x: np.ndarray, step: float) -> np.ndarray:
    """An array near x: entries times e**(step n), zeros plus step n; Hermitian where x is."""
    if x.dtype.kind not in "fc":
        return x
    n = rng.normal(size=x.shape)
    square = x.ndim >= 2 and x.shape[-1] == x.shape[-2] > 1
    if square and np.array_equal(x, x.swapaxes(-1, -2).conj()):
        n = (n + n.swapaxes(-1, -2)) / 2  # a Cholesky factor or eigenvalues may be taken of it
    return np.where(x == 0, step * n, x * np.exp(step * n))


def returned(given: Any, names: Sequence[str], expected: Group, call: str) -> list[Any]:
    """Normalizes a derivation's results to one entry for each input."""
    result = list(given) if isinstance(given, tuple | list) else [given]
    can = [k for k, a in enumerate(expected) if a is not None]
    if len(result) == len(can) < len(expected):
        place = dict(zip(can, result, strict=True))
        return [place.get(k) for k in range(len(expected))]
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
