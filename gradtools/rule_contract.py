"""Checks of user-written rules: output structure, shapes, dtypes, and linearity of their maps.

For y = f(x) a rule consists of `fwd` or a forward rule, whose output is f's own, and of maps

    dy = T(x) dx        x' = C(x) y'

which are linear: T(x) 0 = 0 and C(x) 0 = 0, and transposing a map twice gives the map back.
A map with a constant part (the author forgot the tangent) is no derivative, and transposing it for
the other mode would silently drop the constant part.

This module holds the bookkeeping and the error messages for both frameworks. Each framework
evaluates the maps in its own way: JAX reads the jaxpr, PyTorch computes numbers. With
`check="first"` each check runs once for a rule and a signature; rules derived from it share the
result.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from gradtools.arguments.wording import in_words
from gradtools.errors import GradtoolsError
from gradtools.rules import total

CHECKS = ("first", "always", "never")
_MOST = 1024


def checked_word(caller: str, check: Any) -> str:
    """`check` itself, or an error if it is not one of CHECKS."""
    if check not in CHECKS:
        raise GradtoolsError(
            f"{caller}: check is {check!r}; expected 'first' (once for each signature), 'always' "
            "or 'never'."
        )
    return str(check)


@dataclass(frozen=True)
class Aval:
    """An array's shape and dtype, for comparisons and messages."""

    shape: tuple[Any, ...]
    dtype: str

    def __str__(self) -> str:
        return f"{self.dtype}[{','.join(map(str, self.shape))}]"


@dataclass(frozen=True, eq=False, repr=False)
class Contract:
    """The checks of one user-written rule, and its author's options.

    Attributes:
        name: The rule's name in messages, such as "custom_rule sinh".
        check: When it is checked: "first", "always" or "never".
        functions: The names of its functions, such as {"bwd": "sin_bwd"}, for printing.
        remat: Whether f computes the value instead of fwd if the residuals are not used, because
            they are recomputed later (`optimize_remat`).
        passed: The checks that passed, with `check="first"`.
        lost_tangents: The signatures at which transposing the forward rule would lose a tangent,
            and the index of that tangent.
    """

    name: str
    check: str = "first"
    functions: Mapping[str, str] = field(default_factory=dict)
    remat: bool = False
    passed: set[Hashable] = field(default_factory=set)
    lost_tangents: dict[Hashable, int] = field(default_factory=dict)

    def check_once(self, *key: Hashable, check: Callable[[], Any]) -> bool:
        """Runs a check unless it passed before under this key. Returns False if undecided.

        check: Raises if the rule is wrong; returns False if that cannot be decided yet.
        """
        if self.check == "never" or (self.check == "first" and key in self.passed):
            return True
        if len(self.passed) >= _MOST:
            self.passed.clear()
        self.passed.add(key)  # before the check, since a rule may use itself
        decided = False
        try:
            decided = check() is not False
        finally:
            if not decided:
                self.passed.discard(key)
        return decided

    # --- the checks' messages

    def refusal(self, text: str) -> GradtoolsError:
        """An error that names the rule."""
        return GradtoolsError(f"{self.name}: {text}")

    def check_outputs(
        self, who: str, came: Any, avals: list[Aval], expected: Any, wanted: list[Aval]
    ) -> None:
        """Raises unless fwd's or the forward rule's output has the structure and avals of f's.

        who: "fwd" or "the forward rule".
        came, avals: The structure and avals of its output.
        expected, wanted: Those of f's output.
        """
        fix = (
            "Its first result must be the function's own output at the same arguments"
            f"{_LIKELY.get(who, '')}."
        )
        if came != expected:
            raise self.refusal(
                f"{who} returned an output of the structure {in_words(came)}, but the function "
                f"returns {in_words(expected)}. {fix}"
            )
        for i, (aval, want) in enumerate(zip(avals, wanted, strict=True)):
            if aval != want:
                raise self.refusal(
                    f"{who} returned {aval} for output {i}, but the function returns {want}. {fix}"
                )

    def check_values(
        self, who: str, pairs: Sequence[Any], dtypes: Sequence[str], lead: str
    ) -> None:
        """Raises if a rule's value differs from f's, by more than rounding or iteration explains.

        who: "fwd" or "the forward rule".
        pairs: For each output f's value and the rule's, as NumPy arrays.
        lead: fwd's parameters as text if static arguments come first, else empty.
        """
        for i, ((own, came), dtype) in enumerate(zip(pairs, dtypes, strict=False)):
            known = np.isfinite(own) & np.isfinite(came)
            pair = [np.where(known, y, 0).astype(np.result_type(y, 1.0)) for y in (own, came)]
            gaps, largest = np.abs(pair[0] - pair[1]), np.abs(pair).max(initial=0)
            if gaps.max(initial=0) <= _VALUE_SLACK.get(dtype, 0.3) * largest:
                continue
            at = np.unravel_index(gaps.argmax(), gaps.shape)
            where = f"output {i}" + (f" at {tuple(map(int, at))}" if at else "")
            order = f" Static arguments lead: fwd is called as fwd({lead})." if lead else ""
            raise self.refusal(
                f"{who} returned {came[at]:.6g} for {where}, but the function returns "
                f"{own[at]:.6g} at the same arguments.{order} If that is meant, "
                "custom_rule(f, check='never') keeps both."
            )

    def check_zero(self, which: str, wrong: int | None, places: Sequence[int] = ()) -> None:
        """Raises if a map does not take zero to zero.

        which: "tangent" or "cotangent", what the map is linear in.
        wrong: The index of a result that is not zero, None if all are.
        places: The positions of the checked results among all results, if there are others.
        """
        if wrong is None:
            return
        i = places[wrong] if places else wrong
        who, what, form, mode = _OF[which]
        raise self.refusal(
            f"{who} is not zero where every {which} is zero ({what} {i}), so it is not linear in "
            f"the {which}s, and no derivative. Did you forget to multiply by the {which}? {form} "
            f"If a constant part is meant, custom_rule(f, check='never') keeps it in {mode} mode; "
            "the other mode would lose it."
        ) from None

    def not_transposable(self, which: str, i: int) -> GradtoolsError:
        """The error of a map that loses its i-th input when it is transposed twice.

        which: "tangent" or "cotangent".
        """
        who, _, _, mode = _OF[which]
        return self.refusal(
            f"transposing {who} twice does not give it back: {which} {i} passes through something "
            "that no derivative crosses (a stopped gradient, an integer, a comparison), so the "
            f"other mode would lose it. Give the rule of the other mode too, or make the {mode} "
            "one linear."
        )


_VALUE_SLACK = dict.fromkeys(("float32", "float64", "complex64", "complex128"), 0.02)
_LIKELY = {
    "fwd": ": fwd(*args) returns (f(*args), residuals), without a cast or an extra axis",
    "the forward rule": ": the rule returns (f(*primals), tangent)",
}
_OF = {
    "tangent": (
        "what the forward rule returns as a tangent",
        "its tangent of output",
        "For y = sin(x) it is cos(x) * t, and not cos(x).",
        "forward",
    ),
    "cotangent": (
        "what bwd returns",
        "its cotangent of array",
        "For y = sin(x) it is (cos(x) * ct,), and not (cos(x),).",
        "reverse",
    ),
}


@dataclass(frozen=True, eq=False, repr=False)
class Primal:
    """An argument as `fwd` sees it with `symbolic_zeros=True`.

    Attributes:
        value: The array or number.
        perturbed: Whether its derivative may be needed. If False, neither its cotangent nor
            residuals for it are: PyTorch's `needs_input_grad`, JAX's `perturbed`.
    """

    value: Any
    perturbed: bool


# --- a numerical test of linearity

Array = Any
Entries = Sequence[Any]  # arrays, or None for a zero

_LEAST = 2.0**-9  # dividing by more would make 16-bit numbers subnormal
_ODD, _TIMES = (3.0, 5.0, 7.0), 16.0  # samples of the rounding, and the tolerance in units of it


def is_linear(
    run: Callable[[Entries], Entries],
    v: Entries,
    w: Entries,
    gap: Callable[[Array, Array], float],
    slack: Callable[[Array], float],
) -> bool:
    """Whether `run` preserves sums and multiples, as for kernels, which have no jaxpr or graph.

    In floating point both hold up to rounding, which is as large as the terms that the map adds
    up, and cannot be bounded by the results if these terms cancel. So the vectors have few binary
    digits. Multiplying by a power of two then is exact, and so is v + w; the rounding in L(v + w)
    is compared with that in L(3 v), L(5 v) and L(7 v).

    v, w: Vectors of four binary digits.
    gap: The largest modulus of a difference; equal entries and pairs of NaN count as 0.
    slack: The relative tolerance for an array if nothing cancels.
    """
    scaled = lambda factor, xs: [None if x is None else factor * x for x in xs]
    size = lambda y: 0.0 if y is None else gap(y, 0.0 * y)
    tolerance = lambda y: 0.0 if y is None else slack(y)
    distance = lambda a, b: 0.0 if a is None or b is None else gap(a, b)  # None stands for zeros
    narrow = any(str(x.dtype).removeprefix("torch.") == "float16" for x in v)
    reach = 2.0**5 if narrow else 2.0**13  # the largest factor
    one, other = run(v), run(w)
    for factor in (-max(1 / reach, _LEAST), reach):  # a negative one finds relu-like maps
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
