"""Defines results of checks: `Comparison` for one pair of arrays, `Report`, and `AgreementError`.

`compare_arrays` returns a `Comparison` of two NumPy arrays, a `Report` collects comparisons and
formats them as a table, and an `AgreementError` contains the report. This module does not depend on
a framework.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from gradtools.arguments.checks import whole_or_none
from gradtools.boundary import user_facing
from gradtools.errors import GradtoolsError
from gradtools.printing import aligned, coloured
from gradtools.testing.cross_checking import tolerances

Number = bool | int | float | complex
AGREES, DIFFERS, CONVENTION = "agrees", "differs", "convention"
_LINES_OF_AN_ERROR = 5
_NOTHING_FINITE = (
    "NaN or infinite on both sides",
    "No entry is finite, so nothing was compared. `why_zero(f, *args)` names the first line that "
    "produces a NaN or an infinity.",
)
_COLOURS = {AGREES: "32", DIFFERS: "31", CONVENTION: "33"}


@dataclass(frozen=True)
class Comparison:
    """The result of comparing two arrays.

    Attributes:
        quantity: The kind of the arrays, for example "value", "gradient" or "jvp".
        path: The path of the leaf, such as "output['loss']" or "argument 0", or a layer's name.
        order: The order of the derivative: 0, 1 or 2.
        error: The largest error in units of the tolerance. The arrays disagree if the error is
            above 1. The error is inf if it cannot be measured (NaN in only one array, different
            shapes or dtypes).
        tolerance: The allowed relative error.
        place: The index of the worst entry, () for a scalar, or None if no entries were compared.
        first: The first array's value at `place`, or a text such as "float32" or "not connected".
        second: The second array's value at `place`, or a text.
        shape: The shape of the arrays, or of the first array if the shapes differ.
        dtype: The coarser of the arrays' dtypes.
        status: "agrees", "differs", or "convention" (the arrays differ by a known convention).
        cause: The likely cause in a few words, or None if the cause is unknown.
        detail: The evidence for the cause, and advice.
        uncompared: The number of entries that are NaN, or the same infinity, in both arrays.
    """

    quantity: str
    path: str
    order: int
    error: float
    tolerance: float
    place: tuple[int, ...] | None
    first: Number | str | None
    second: Number | str | None
    shape: tuple[int, ...] = ()
    dtype: str = ""
    status: str = AGREES
    cause: str | None = None
    detail: str = ""
    uncompared: int = 0

    @property
    def ratio(self) -> Number | None:
        """The ratio first / second at the worst entry, or None if it is undefined."""
        words = isinstance(self.first, str) or isinstance(self.second, str)
        if words or self.first is None or not self.second:
            return None
        with np.errstate(all="ignore"):
            ratio = (np.asarray(self.first) / np.asarray(self.second)).item()
        return ratio if np.isfinite(ratio) else None

    @property
    def agrees(self) -> bool:
        """Whether the arrays agree, or differ only by a known convention."""
        return self.status != DIFFERS

    def because(self, cause: str, detail: str = "", status: str = DIFFERS) -> Comparison:
        """Returns a copy of the comparison with a cause."""
        return replace(self, cause=cause, detail=detail, status=status)

    def describe(self, names: Sequence[str] = ("first", "second")) -> str:
        """Formats one sentence with the values, the index, the error and the cause."""
        where = f" at {list(self.place)}" if self.place else ""
        ratio = "" if self.ratio is None else f", ratio {show(self.ratio)}"
        why = f" Likely cause: {self.cause}." if self.cause else ""
        return (
            f"{self.quantity} of {self.path}{where}: {names[0]} {show(self.first)}, "
            f"{names[1]} {show(self.second)}{ratio}; error {self.error:.2g} times the "
            f"tolerance {self.tolerance:g}.{why}{' ' + self.detail if self.detail else ''}"
        )


def compare_arrays(
    quantity: str,
    path: str,
    first: Any,
    second: Any,
    order: int = 0,
    *,
    tolerance: float | None = None,
    noise: float = 0.0,
) -> Comparison:
    """Compares two arrays.

    Args:
        quantity: The kind of the arrays, as in `Comparison`.
        path: The path of the leaf, as in `Comparison`.
        order: The order of the derivative, which selects the tolerance.
        first: A NumPy array or number.
        second: The NumPy array or number that is compared with `first`.
        tolerance: The relative tolerance. By default, it is selected by dtype and `order`.
        noise: Absolute differences up to this size count as rounding of larger numbers that
            cancel. By default, `noise` is 0.

    Returns:
        A `Comparison` with status "agrees" or "differs". Arrays without a finite entry on either
        side differ, since nothing was compared; in all other cases, the cause is None.

    Example:
        >>> found = compare_arrays("value", "output", np.array([1.0, 2.0]), np.array([1.0, 2.5]))
        >>> found.status, found.place, found.first, found.second
        ('differs', (1,), 2.0, 2.5)
    """
    first, second = np.asarray(first), np.asarray(second)
    dtype = tolerances.coarser(first.dtype, second.dtype)
    allowed = tolerances.tolerance(dtype, order) if tolerance is None else tolerance
    if first.shape != second.shape:
        words = f"shape {first.shape}", f"shape {second.shape}"
        found = mismatch(quantity, path, order, words, first.shape)
        return replace(found, tolerance=allowed, dtype=dtype)
    units = entry_errors(first, second, allowed, noise)
    if not units.size:
        return Comparison(quantity, path, order, 0, allowed, None, None, None, first.shape, dtype)
    place = tuple(map(int, np.unravel_index(int(np.argmax(units)), units.shape)))
    error, values = float(units[place]), (as_number(first[place]), as_number(second[place]))
    known = int((np.isfinite(widened(first)) | np.isfinite(widened(second))).sum())
    status, unknown = (DIFFERS, 0) if error > 1 else (AGREES, units.size - known)
    found = Comparison(
        quantity, path, order, error, allowed, place, *values, first.shape, dtype, status
    )
    found = replace(found, uncompared=unknown)
    return found if known or error > 1 else found.because(*_NOTHING_FINITE)


def mismatch(
    quantity: str, path: str, order: int, words: tuple[str, str], shape: tuple[int, ...] = ()
) -> Comparison:
    """Returns a `Comparison` with status "differs" and a text instead of each side's value."""
    return Comparison(
        quantity, path, order, math.inf, 0.0, None, *words, shape=shape, status=DIFFERS
    )


def entry_errors(
    first: np.ndarray, second: np.ndarray, tolerance: float, noise: float
) -> np.ndarray:
    """Returns each entry's error in units of the tolerance.

    The error is inf if the entries differ and one of them is not finite or the tolerance is 0.
    """
    a, b = widened(first), widened(second)
    with np.errstate(all="ignore"):
        same = (a == b) | (np.isnan(a) & np.isnan(b))
        finite = np.isfinite(a) & np.isfinite(b)
        difference = np.where(finite & ~same, np.abs(a - b), 0.0)
        size = np.where(finite, np.maximum(np.abs(a), np.abs(b)), 0.0).max(initial=0.0)
        units = np.where(difference > noise, difference / size / tolerance, 0.0)
    return np.where(same, 0.0, np.where(finite, units, np.inf))


def widened(x: Any) -> np.ndarray:
    """Converts x to an array of dtype float64 or complex128."""
    x = np.asarray(x)
    return x.astype(np.complex128 if x.dtype.kind == "c" else np.float64)


def largest(x: Any) -> float:
    """Returns the largest finite absolute value of an array, or 0.0 if no entry is finite."""
    sizes = np.abs(widened(x))
    return float(sizes[np.isfinite(sizes)].max(initial=0.0))


def as_number(x: Any) -> Number:
    """Converts one entry of an array to a Python number."""
    kinds: dict[str, Any] = {"b": bool, "c": complex, "i": int, "u": int}
    return kinds.get(x.dtype.kind, float)(x)  # type: ignore[no-any-return]


@dataclass
class Report:
    """The report of a check; `bool(report)` is True if everything agrees.

    Attributes:
        title: The title, such as "cross_check of f and g".
        names: The names of the two sides.
        comparisons: A `Comparison` for each compared array, in order.
        left_out: Quantities that could not be compared, with reasons.
        notes: Further remarks.

    Example:
        >>> from gradtools.testing import Report
        >>> report = Report("x", comparisons=[compare_arrays("value", "output", 1.0, 1.0)])
        >>> bool(report), report.worst.error
        (True, 0.0)
    """

    title: str
    names: tuple[str, str] = ("torch", "jax")
    comparisons: list[Comparison] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def __bool__(self) -> bool:
        return not self.disagreements

    def __iter__(self) -> Iterator[Comparison]:
        return iter(self.comparisons)

    def __len__(self) -> int:
        return len(self.comparisons)

    def __getitem__(self, i: int) -> Comparison:
        return self.comparisons[i]

    @property
    def disagreements(self) -> list[Comparison]:
        """The comparisons that differ and whose difference is not a known convention."""
        return [c for c in self.comparisons if not c.agrees]

    @property
    def conventions(self) -> list[Comparison]:
        """The comparisons that differ by a convention of the frameworks."""
        return [c for c in self.comparisons if c.status == CONVENTION]

    @property
    def first(self) -> Comparison | None:
        """The first disagreement, or None if everything agrees."""
        return next(iter(self.disagreements), None)

    @property
    def worst(self) -> Comparison | None:
        """The comparison with the largest error, or None if there are no comparisons."""
        return max(self.comparisons, key=lambda c: c.error, default=None)

    @property
    def cause(self) -> str | None:
        """The likely cause of the first disagreement, or None if there is no known cause."""
        return None if self.first is None else self.first.cause

    def summary(self) -> str:
        """Formats one line: the numbers of compared and differing arrays, and the largest error."""
        result, known = len(self.disagreements), len(self.conventions)
        agreeing = max((c.error for c in self.comparisons if c.status == AGREES), default=0.0)
        unknown = sum(c.uncompared for c in self.comparisons)
        parts = [
            f"{len(self)} arrays compared, {f'{result} disagree' if result else 'all agree'}"
            + (f", {known} by a known convention" if known else ""),
            f"largest error of agreeing arrays {agreeing:.2g} of the tolerance",
            f"{unknown} entries are NaN or infinite on both sides" if unknown else "",
            f"{len(self.left_out)} left out" if self.left_out else "",
        ]
        parts = [*filter(None, parts)] if self.comparisons else ["nothing was compared"]
        return f"{self.title}: {'; '.join(parts)}"

    @user_facing
    def table(self, colour: bool = False, limit: int | None = None) -> str:
        """Formats the report, one line for each comparison.

        Args:
            colour: Whether to add terminal colors.
            limit: The maximum number of comparisons to show. If there are more, agreements are not
                shown. If None, all comparisons are shown.
        """
        limit = whole_or_none("table", "limit", limit, 0, "comparisons")
        chosen, known, first = self.comparisons, self.conventions[:limit], self.first
        if limit is not None and len(self) > limit:
            chosen = [*self.disagreements, *self.conventions][:limit]
        cells = [("quantity", "leaf", "error", "place", *self.names, "ratio", "likely cause")]
        for c in chosen:
            place = str(list(c.place)) if c.place else ""
            numbers = f"{c.error:.2g}", place, show(c.first), show(c.second), show(c.ratio)
            numbers = numbers if c.error or not c.agrees else ("0", "", "", "", "")
            cause = c.cause or (f"{c.uncompared} entries not compared" if c.uncompared else "")
            cells.append((c.quantity, c.path, *numbers, cause))
        head, *rows = aligned(cells)
        if colour:
            pairs = zip(rows, chosen, strict=True)
            rows = [f"\x1b[{_COLOURS[c.status]}m{line}\x1b[0m" for line, c in pairs]
        lines = [self.summary()]
        lines += [f"First disagreement: {first.describe(self.names)}", ""] if first else []
        lines += [head, *rows]
        if hidden := len(self) - len(chosen):
            lines.append(f"... and {hidden} more; print(error.report) shows all")
        lines += [f"Convention: {c.describe(self.names)}" for c in known]
        lines += [f"Left out: {reason}" for reason in self.left_out]
        return "\n".join([*lines, *(f"Note: {note}" for note in self.notes)])

    def __str__(self) -> str:
        return self.table()

    def _repr_html_(self) -> str:
        return coloured(self.table(colour=True))

    def require(self) -> Report:
        """Returns the report itself if everything agrees.

        Raises:
            AgreementError: A comparison failed; the error contains the report.
        """
        if not self:
            raise AgreementError(self)
        return self


class AgreementError(GradtoolsError):
    """Raised if two computations that should agree differ.

    Attributes:
        report: The whole `Report`.
    """

    def __init__(self, report: Report) -> None:
        self.report = report
        super().__init__(report.table(limit=_LINES_OF_AN_ERROR))

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.report,)


def show(x: Any) -> str:
    """Formats a value of a comparison as short text."""
    if x is None or isinstance(x, str | bool | int):
        return "" if x is None else str(x)
    if isinstance(x, complex):
        return f"{x.real:.6g}{x.imag:+.6g}j"
    return f"{x:.9g}"
