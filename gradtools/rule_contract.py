"""Checks that a user-written custom rule is consistent.

For y = f(x) a rule consists of `fwd` or a forward rule, whose output is f's output, and of maps

    dy = T(x) dx        x' = C(x) y'

Structure, shapes and dtypes are always checked. A map that is transposed for the other mode must be
linear: transposing silently drops a constant part. Linearity is checked once for each combination
of shapes and dtypes. Rules that are derived from another rule share the results of its checks.
`gradtools.testing.check_rule` runs more expensive checks.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any

from gradtools.arguments.wording import in_words
from gradtools.errors import GradtoolsError
from gradtools.integrations.containers import is_same
from gradtools.rules import total

_MOST = 1024


@dataclass(frozen=True)
class Aval:
    """An array's shape and dtype, for comparisons and messages."""

    shape: tuple[Any, ...]
    dtype: str

    def __str__(self) -> str:
        return f"{self.dtype}[{','.join(map(str, self.shape))}]"


@dataclass(frozen=True, eq=False, repr=False)
class Contract:
    """Runs the checks of a user-written rule and stores which checks passed.

    Attributes:
        name: The rule's name for messages, such as "custom_rule sinh".
        checked: Whether the rule is checked; False for a function of the other framework.
        passed: The keys of the checks that passed.
    """

    name: str
    checked: bool = True
    passed: set[Hashable] = field(default_factory=set)

    def check_once(self, *key: Hashable, check: Callable[[], Any]) -> bool:
        """Runs a check unless it has passed with this key; returns False if the check is undecided.

        check: A function that raises an error if the rule is wrong, and returns False if the check
            cannot be decided yet.
        """
        if not self.checked or key in self.passed:
            return True
        if len(self.passed) >= _MOST:
            self.passed.clear()
        self.passed.add(key)  # added first, since a rule may call itself
        decided = False
        try:
            decided = check() is not False
        finally:
            if not decided:
                self.passed.discard(key)
        return decided

    # --- the checks' messages

    def refusal(self, text: str) -> GradtoolsError:
        """Makes an error that names the rule."""
        return GradtoolsError(f"{self.name}: {text}")

    def check_outputs(
        self, who: str, came: Any, avals: list[Aval], expected: Any, wanted: list[Aval]
    ) -> None:
        """Raises an error if the output of fwd or of the forward rule differs from f's output.

        who: "fwd" or "the forward rule".
        came, avals: The structure and avals of the output of `who`.
        expected, wanted: The structure and avals of f's output.
        """
        fix = "The first result must be the function's own output at the same arguments."
        if not is_same(came, expected):
            raise self.refusal(
                f"{who} returned an output of the structure {in_words(came)}, but the function "
                f"returns {in_words(expected)}. {fix}"
            )
        for i, (aval, want) in enumerate(zip(avals, wanted, strict=True)):
            if aval != want:
                raise self.refusal(
                    f"{who} returned {aval} for output {i}, but the function returns {want}. {fix}"
                )


@dataclass(frozen=True, eq=False, repr=False)
class Primal:
    """An argument that `fwd` receives with `symbolic_zeros=True`.

    Attributes:
        value: The argument, an array or number.
        perturbed: Whether a derivative with respect to the argument may be needed. If False, the
            rule may omit the argument's cotangent and residuals (PyTorch's `needs_input_grad`,
            JAX's `perturbed`).
    """

    value: Any
    perturbed: bool


# --- a numerical test of linearity

Array = Any
Entries = Sequence[Any]  # arrays, or None for zero

_LEAST = 2.0**-9  # A smaller factor would make 16-bit numbers subnormal.
# The factors for which rounding errors are measured, and the tolerated multiple of the errors.
_ODD, _TIMES = (3.0, 5.0, 7.0), 16.0


def is_linear(
    run: Callable[[Entries], Entries],
    v: Entries,
    w: Entries,
    gap: Callable[[Array, Array], float],
    slack: Callable[[Array], float],
) -> bool:
    """Tests numerically whether `run` is linear; also works for kernels without a jaxpr.

    For a linear map L, L(v + w) equals L(v) + L(w) up to rounding errors. These errors are
    proportional to the terms that the map adds; if the terms cancel, the results do not bound the
    errors. The entries of v and w therefore have few significant bits, so that v + w and products
    with powers of two are exact. The rounding error of L(v + w) is compared with the rounding
    errors of L(3 v), L(5 v) and L(7 v).

    v, w: Vectors whose entries have four binary digits.
    gap: `gap(a, b)` is the largest modulus in a - b; equal entries and pairs of NaN count as 0.
    slack: `slack(y)` is the relative tolerance for an output y without cancellation.
    """
    scaled = lambda factor, xs: [None if x is None else factor * x for x in xs]
    size = lambda y: 0.0 if y is None else gap(y, 0.0 * y)
    tolerance = lambda y: 0.0 if y is None else slack(y)
    distance = lambda a, b: 0.0 if a is None or b is None else gap(a, b)  # None means zeros
    narrow = any(str(x.dtype).removeprefix("torch.") == "float16" for x in v)
    reach = 2.0**5 if narrow else 2.0**13  # the largest factor
    one, other = run(v), run(w)
    for factor in (-max(1 / reach, _LEAST), reach):  # a negative factor detects relu-like maps
        for y, was, came in zip(scaled(factor, one), one, run(scaled(factor, v)), strict=True):
            if not distance(y, came) <= tolerance(y) * abs(factor) * size(was):
                return False
    both = [a + b for a, b in zip(v, w, strict=True)]
    sums, left = run(both), list[int]()
    expected = [total(pair) for pair in zip(one, other, strict=True)]
    for k, (y, e) in enumerate(zip(sums, expected, strict=True)):
        largest = max(map(size, (one[k], other[k], y)))
        if not distance(y, e) <= tolerance(y) * largest:
            left.append(k)
    if not left:
        return True
    noise = [0.0] * len(sums)
    for at, ys in ((v, one), (w, other), (both, sums)):
        for factor in _ODD:
            results = run(scaled(factor, at))
            for k in left:
                off = distance(scaled(factor, ys)[k], results[k]) / factor
                noise[k] = max(noise[k], off)
    return all(distance(sums[k], expected[k]) <= _TIMES * noise[k] for k in left)
