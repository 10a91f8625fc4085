"""Checks of user-written rules: output structure, shapes, dtypes, and linearity of their maps.

For y = f(x) a rule consists of `fwd` or a forward rule, whose output is f's own, and of maps

    dy = T(x) dx        x' = C(x) y'

which are linear: T(x) 0 = 0 and C(x) 0 = 0, and transposing a map twice gives the map back.
A map with a constant part (the author forgot the tangent) is no derivative: where the other mode
is made by transposing it, the constant part would be gone without a word.

Here stand the questions and the words, once for both frameworks. How a map is asked is up to
the framework: JAX reads its program, PyTorch computes it. With `check="first"` each question is
asked once for a rule and a signature, and not again for what is derived from it.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from gradtools.arguments.wording import in_words
from gradtools.errors import GradtoolsError

CHECKS = ("first", "always", "never")
_MOST = 1024


def checked_word(caller: str, check: Any) -> str:
    """`check` itself, or an error if it is none of the known words."""
    if check not in CHECKS:
        raise GradtoolsError(
            f"{caller}: check is {check!r}; expected 'first' (once for each signature), 'always' "
            "or 'never'."
        )
    return str(check)


@dataclass(frozen=True)
class Aval:
    """An array's shape and dtype, as messages and comparisons speak of them."""

    shape: tuple[Any, ...]
    dtype: str

    def __str__(self) -> str:
        return f"{self.dtype}[{','.join(map(str, self.shape))}]"


@dataclass(frozen=True, eq=False, repr=False)
class Contract:
    """What one rule of an author is held to, and what its author said of it.

    Attributes:
        name: What messages call the rule, such as "custom_rule sinh".
        check: When it is checked: "first", "always" or "never".
        functions: What its functions are called, such as {"bwd": "sin_bwd"}, for whoever prints.
        remat: Whether the value is that of f, and not of fwd, where what fwd saves is not used:
            before a recomputation.
        answered: The questions that were, with `check="first"`.
        losing: At which signatures the forward rule cannot be transposed without loss, and which
            tangent it loses.
    """

    name: str
    check: str = "first"
    functions: Mapping[str, str] = field(default_factory=dict)
    remat: bool = False
    answered: set[Hashable] = field(default_factory=set)
    losing: dict[Hashable, int] = field(default_factory=dict)

    def ask(self, *question: Hashable, of: Callable[[], Any]) -> bool:
        """Runs a check, unless it was passed before; whether it can be told.

        of: Raises what speaks against the rule; returns False where it cannot be told yet.
        """
        if self.check == "never" or (self.check == "first" and question in self.answered):
            return True
        if len(self.answered) >= _MOST:
            self.answered.clear()
        self.answered.add(question)  # before: a rule may use itself
        passed = False
        try:
            passed = of() is not False
        finally:
            if not passed:
                self.answered.discard(question)
        return passed

    # --- what is said

    def refusal(self, text: str) -> GradtoolsError:
        """An error that names the rule."""
        return GradtoolsError(f"{self.name}: {text}")

    def same_outputs(
        self, who: str, came: Any, avals: list[Aval], expected: Any, wanted: list[Aval]
    ) -> None:
        """Whether what the forward pass returned is f's output in structure, shapes and dtypes.

        who: "fwd" or "the forward rule".
        came, expected: The structures.
        avals, wanted: The arrays.
        """
        mend = (
            "Its first result must be the function's own output at the same arguments"
            f"{_LIKELY.get(who, '')}."
        )
        if came != expected:
            raise self.refusal(
                f"{who} returned an output of the structure {in_words(came)}, but the function "
                f"returns {in_words(expected)}. {mend}"
            )
        for i, (aval, want) in enumerate(zip(avals, wanted, strict=True)):
            if aval != want:
                raise self.refusal(
                    f"{who} returned {aval} for output {i}, but the function returns {want}. {mend}"
                )

    def same_values(self, who: str, pairs: Sequence[Any], dtypes: Sequence[str], lead: str) -> None:
        """Raises if a rule's value is another than f's, by more than any rounding or iteration.

        who: "fwd" or "the forward rule".
        pairs: For each output f's value and the rule's, as NumPy arrays.
        lead: How fwd is called where static arguments lead, else empty.
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

    def hold_zero(self, which: str, wrong: int | None, places: Sequence[int] = ()) -> None:
        """Raises if a map does not take zero to zero.

        which: "tangent" or "cotangent", after what the map is linear in.
        wrong: Which of its results is not zero, None if all are.
        places: Where the results stand among all of the map's, if there are others.
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

    def lost(self, which: str, i: int) -> GradtoolsError:
        """The error of a map of which a part is gone when it is transposed twice.

        which: "tangent" or "cotangent".
        i: Of which of its inputs.
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
        perturbed: Whether its derivative may be asked for. Where it is False no cotangent is
            needed, nor what would have to be saved for it: what PyTorch calls
            `needs_input_grad`, and JAX `perturbed`.
    """

    value: Any
    perturbed: bool
