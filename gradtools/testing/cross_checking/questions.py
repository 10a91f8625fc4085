"""`CrossCheck`: the values and derivatives that `cross_check` compares, in one layout of arrays.

A `CrossCheck` evaluates quantities of two sides at one point, compares them, and distinguishes
rounding from disagreement. `mismatch_causes.py` uses it for further evaluations at nearby points.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from gradtools.errors import GradtoolsError
from gradtools.testing.checking.probe import first_line, no_such_mode
from gradtools.testing.cross_checking import tolerances
from gradtools.testing.cross_checking.pairing import Pairing, pair_parameters
from gradtools.testing.cross_checking.sides import Inputs, Output, Side, is_inexact, narrowed
from gradtools.testing.flat import Arrays
from gradtools.testing.report import (
    AGREES,
    DIFFERS,
    Comparison,
    Report,
    compare_arrays,
    largest,
    mismatch,
    widened,
)

MODES = ("forward_over_reverse", "reverse_over_reverse")
ROUNDING = 64  # differences below this many epsilons of the largest number may be rounding
_FAR = {"float64": 5e6, "complex128": 5e6}  # epsilons: 1e-9
Found = list[np.ndarray | None]  # one array for each leaf; None where it is not connected


@dataclass(frozen=True)
class Quantity:
    """A value or derivative that is computed on both sides.

    Attributes:
        quantity: Its name.
        order: The order of the derivative.
        ask: `(side number, leaves) -> one array for each path`, None where not connected.
        paths: The paths of the result's leaves.
        to_leaves: Whether the result has one array for each differentiated leaf.
    """

    quantity: str
    order: int
    ask: Callable[[int, Arrays], Sequence[np.ndarray | None]]
    paths: list[str]
    to_leaves: bool = True


@dataclass(frozen=True)
class Answer:
    """What both sides answered, in one layout."""

    probe: Quantity
    first: Found
    second: Found
    comparisons: list[Comparison]


class CrossCheck:
    """The comparison of two sides at one point."""

    def __init__(
        self,
        first: Side,
        second: Side,
        inputs: Inputs,
        kwargs: dict[str, Any],
        mapping: Any,
        seed: int,
        tolerance: float | None,
    ) -> None:
        self.sides = (first, second)
        self.inputs, self.seed, self.tolerance = inputs, seed, tolerance
        self.pairing: Pairing = pair_parameters(first, second, mapping)
        for side in self.sides:
            side.bind(inputs, kwargs)
        moving = list(inputs.moving.values())
        self.leaves: list[Arrays] = [[*s.free_params.values(), *moving] for s in self.sides]
        self.paths = [*self.pairing.paths, *inputs.moving]
        self.out_paths: list[str] = []
        self.weights: Arrays = []  # the cotangents of the gradient
        self.pulled: Arrays = []  # those of the vjp
        self.pushed: list[Arrays] = []  # the tangents of the jvp
        self.answers: list[Answer] = []
        self._nearby: dict[Any, Any] = {}
        self.outputs: list[Output] = []

    # --- the comparison

    def run(self, order: int, report: Report) -> None:
        """Fills the report, without causes."""
        report.notes += self.pairing.notes
        report.comparisons += self._parameters()
        if not all(c.agrees for c in report.comparisons):
            report.left_out.append("values and derivatives: the models' parameters differ")
            return
        comparable = self._values(report)
        if not (order and comparable):
            return
        if self.paths and self.out_paths:
            self._derivatives(order, report)
            return
        what = "output" if self.paths else "argument or parameter"
        report.left_out.append(f"derivatives: no {what} is floating or complex")

    def _parameters(self) -> list[Comparison]:
        """Compares the parameters; derivatives at different points would be meaningless."""
        count = len(self.pairing.paths)
        mine, theirs = self.carried(self.leaves[0])[:count], list[Any](self.leaves[1][:count])
        result = [
            self._compared("parameter", 0, *t)
            for t in zip(self.pairing.paths, mine, theirs, strict=True)
        ]
        if result:
            self.answers.append(
                Answer(
                    Quantity("parameter", 0, lambda k, x: x, self.pairing.paths),
                    mine,
                    theirs,
                    result,
                )
            )
        return result

    def _values(self, report: Report) -> bool:
        """Compares the outputs. Returns whether their derivatives can be compared."""
        self.outputs = [self.value(k, self.leaves[k]) for k in (0, 1)]
        first, second = self.outputs
        if sorted(first.paths) != sorted(second.paths):
            words = [
                f"{len(out.paths)} leaves: {', '.join(out.paths) or 'one array'}"
                for out in self.outputs
            ]
            c = mismatch("structure", "output", 0, (words[0], words[1]))
            fix = "Return the same tuples, lists and dictionaries."
            report.comparisons.append(c.because("another structure", fix))
            return False
        if not first.paths:
            raise GradtoolsError("cross_check: the programs return no array; return the result.")
        ask = lambda k, x: self._picked(first.paths, self.value(k, x))
        probe = Quantity("value", 0, ask, first.paths, to_leaves=False)
        firsts, seconds = (self._picked(first.paths, out) for out in self.outputs)
        report.comparisons += _dtypes(first.paths, firsts, seconds, report.notes)
        report.comparisons += self._answered(probe, firsts, seconds)
        self.out_paths = [p for p in first.paths if p in first.inexact()]
        shapes = zip(firsts, seconds, strict=True)
        if any(a is None or b is None or a.shape != b.shape for a, b in shapes):
            return False
        self.weights = self._drawn_cotangents("gradient")
        return set(first.inexact()) == set(second.inexact())

    def _derivatives(self, order: int, report: Report) -> None:
        outs = [f"output{path}" for path in self.out_paths]
        other = self._drawn_cotangents("vjp")
        push, twice = self.directions("jvp"), self.directions("hvp")
        self.pushed, self.pulled = push, other
        probes = [
            Quantity("gradient", 1, lambda k, x: self._pullback(k, x, self.weights), self.paths),
            Quantity("vjp", 1, lambda k, x: self._pullback(k, x, other), self.paths),
            Quantity(
                "jvp", 1, lambda k, x: self._pushforward(k, x, push[k]), outs, to_leaves=False
            ),
        ]
        for mode in MODES if order == 2 else ():
            ask = lambda k, x, mode=mode: self.sides[k].product(
                mode, x, twice[k], self._in_order(k, self.weights)
            )
            probes.append(Quantity(f"hvp, {mode.replace('_', ' ')}", 2, ask, self.paths))
        for probe in probes:
            self._put(probe, report)

    def _put(self, probe: Quantity, report: Report) -> None:
        answers: list[Any] = []
        for k in (0, 1):
            try:
                answers.append(self._ask(probe, k, self.leaves[k]))
            except Exception as error:
                answers.append(error)
        errors = [answer if isinstance(answer, Exception) else None for answer in answers]
        if errors == [None, None]:
            report.comparisons += self._answered(probe, *answers)
            return
        reasons = [
            f"{probe.quantity}: {side.name}: {first_line(error)}"
            for side, error in zip(self.sides, errors, strict=True)
            if error is not None
        ]
        lacking = all(no_such_mode(error) for error in errors if error is not None)
        if lacking and (None not in errors or "forward" in probe.quantity or not probe.to_leaves):
            report.left_out += reasons
        else:
            report.comparisons.append(_raised(probe, errors, "; ".join(reasons)))

    def _answered(self, probe: Quantity, firsts: Any, seconds: Any) -> list[Comparison]:
        """The comparisons of one probe's answers, rounding told apart."""
        noise = self._noise(probe, [*firsts, *seconds])
        result = []
        for i, path in enumerate(probe.paths):
            label = path if probe.quantity != "value" else f"output{path}"
            c = self._compared(probe.quantity, probe.order, label, firsts[i], seconds[i])
            result.append(self._without_rounding(c, probe, i, firsts[i], seconds[i], noise))
        self.answers.append(Answer(probe, list(firsts), list(seconds), result))
        return result

    def _compared(self, quantity: str, order: int, path: str, a: Any, b: Any) -> Comparison:
        if a is None and b is None:
            return Comparison(
                quantity, path, order, 0.0, 0.0, None, "not connected", "not connected"
            )
        if a is None or b is None:
            words = ("not connected", "connected") if a is None else ("connected", "not connected")
            return mismatch(quantity, path, order, words, (a if b is None else b).shape)
        return compare_arrays(quantity, path, a, b, order, tolerance=self.tolerance)

    # --- rounding of larger numbers that cancel

    def _noise(self, probe: Quantity, arrays: Sequence[np.ndarray | None]) -> float:
        """The largest difference that rounding of numbers of this size can make."""
        present = [*(x for x in arrays if x is not None), *self.leaves[0]]
        if probe.order:  # a derivative's intermediate results have the size of the output, too
            present += [x for out in self.outputs for x in out.inexact().values()]
        eps = max((tolerances.epsilon(x.dtype) for x in present), default=0.0)
        return ROUNDING * eps * max((largest(x) for x in present), default=0.0)

    def _without_rounding(
        self, c: Comparison, probe: Quantity, i: int, a: Any, b: Any, noise: float
    ) -> Comparison:
        """Rounding is told from a small disagreement by moving the inputs by an epsilon.

        A difference far below the largest numbers at hand is rounding if the result changes by
        as much as that when the inputs change by their last digit; otherwise it is real, however
        small. Entries far below the largest one of their own array are looked at likewise.
        """
        if c.place is None or not is_inexact(a) or not is_inexact(b):
            return c
        a, b = widened(a), widened(b)
        with np.errstate(all="ignore"):
            difference, size = np.abs(a - b), np.maximum(np.abs(a), np.abs(b))
        finite = np.isfinite(difference)
        suspect = finite & (difference > _distinct(c.dtype) * size)
        small = bool(finite.all()) and difference.max() <= noise
        if not (small if c.status == DIFFERS else suspect.any()):
            return c
        far = bool(difference.max() > _distinct(c.dtype) * size.max())
        if c.status == DIFFERS:  # the whole array is as small as rounding
            real = lambda moved: difference > 1000 * moved.max()
        else:
            real = lambda moved: suspect & (difference > 1000 * moved)
        result = real(self.moved(probe, i, a, b, far, lambda moved: not real(moved).any()))
        if c.status == DIFFERS:
            return c if result.any() else replace(c, error=1.0, status=AGREES)
        if not result.any():
            return c
        with np.errstate(all="ignore"):
            place = np.unravel_index(
                int(np.argmax(np.where(result, difference / size, 0))), a.shape
            )
        return replace(
            c,
            error=float(difference[place] / size[place] / c.tolerance),
            place=tuple(int(n) for n in place),
            first=a[place].item(),
            second=b[place].item(),
            status=DIFFERS,
        )

    def moved(
        self,
        probe: Quantity,
        i: int,
        a: np.ndarray,
        b: np.ndarray,
        far: bool = False,
        enough: Callable[[np.ndarray], bool] = lambda change: False,
    ) -> np.ndarray:
        """The largest change of each entry of a result when the inputs' last digits change.

        With `far` more digits change, but few enough for a smooth result to change little. There
        are four draws, or fewer once `enough` is true of the changes so far.
        """
        change = np.zeros(a.shape)
        for draw in range(4):
            for k, base in enumerate((a, b)):
                answer = self.evaluated_nearby(
                    probe, k, ("rounding, far" if far else "rounding", draw)
                )
                near = None if answer is None else answer[i]
                if near is not None:
                    with np.errstate(all="ignore"):
                        step = np.abs(widened(near) - base)
                    change = np.maximum(change, np.where(np.isfinite(step), step, 0.0))
                if enough(change):
                    return change
        return change

    # --- evaluation

    def _ask(self, probe: Quantity, k: int, leaves: Arrays) -> Found:
        """One side's answer in JAX's layout.

        Where a program makes errors of warnings, a framework's own are none of the user's.
        """
        with warnings.catch_warnings():
            for framework in ("torch", "jax"):
                warnings.filterwarnings("ignore", category=DeprecationWarning, module=framework)
            result = probe.ask(k, leaves)
        return self.carried(result) if k == 0 and probe.to_leaves else list(result)

    def evaluated_nearby(
        self, probe: Quantity, k: int, purpose: Any, size: float | None = None
    ) -> Found | None:
        """One side's answer at `nearby(k, purpose, size)`, kept; None if it raises there."""
        key = (probe.quantity, k, purpose, size)
        if key not in self._nearby:
            try:
                self._nearby[key] = self._ask(probe, k, self.nearby(k, purpose, size))
            except Exception:
                self._nearby[key] = None
        return self._nearby[key]

    def value(self, k: int, leaves: Arrays) -> Output:
        """One side's output; adds the side's name to an exception."""
        try:
            return self.sides[k].value(leaves)
        except Exception as error:
            error.add_note(f"cross_check: raised by the {self.sides[k].name} program.")
            held = {x.dtype.name for x in self.sides[k].params.values()}
            others = {x.dtype.name for x in leaves if x.dtype.kind == "f"} - held
            if held and others:
                error.add_note(
                    f"Its parameters are {' and '.join(sorted(held))}, an argument is "
                    f"{' and '.join(sorted(others))}: dtype='float64' casts them all."
                )
            raise

    def _picked(self, paths: list[str], out: Output) -> Found:
        named = dict(zip(out.paths, out.arrays, strict=True))
        return [named.get(path) for path in paths]

    def _pullback(self, k: int, leaves: Arrays, cts: Arrays) -> Found:
        return self.sides[k].pullback(leaves, self._in_order(k, cts))

    def _pushforward(self, k: int, leaves: Arrays, tangents: Arrays) -> Arrays:
        pushed = self.sides[k].forward(leaves, tangents)
        own = list(self.outputs[k].inexact())
        return [pushed[own.index(path)] for path in self.out_paths]

    def _in_order(self, k: int, cts: Arrays) -> Arrays:
        """Cotangents in the order of one side's outputs."""
        return [cts[self.out_paths.index(path)] for path in self.outputs[k].inexact()]

    # --- for the search for causes

    def sizes(self) -> dict[str, int]:
        """The axis lengths and sizes that occur, by name."""
        result: dict[str, int] = {}
        for path, x in [
            *self.inputs.named_arrays(),
            *zip(self.pairing.paths, self.leaves[1], strict=False),
        ]:
            for axis, size in enumerate(x.shape):
                batch = axis == 0 and x.ndim > 0 and path.startswith("argument")
                result[
                    f"the batch size, axis 0 of {path}" if batch else f"axis {axis} of {path}"
                ] = size
            result[f"the number of entries of {path}"] = x.size
        for path, x in zip(self.outputs[1].paths, self.outputs[1].arrays, strict=True):
            result[f"the number of entries of output{path}"] = x.size
        return result

    def operations(self, k: int) -> set[str] | None:
        """The names of the operations in one side's program; None if it cannot be traced."""
        try:
            return self.sides[k].operations(self.leaves[k])
        except Exception:
            return None

    # --- directions

    def carried(self, leaves: Sequence[np.ndarray | None]) -> Found:
        """Converts a list for PyTorch's leaves to JAX's layout."""
        count = len(self.sides[0].free_params)
        return [*self.pairing.carry(leaves[:count]), *leaves[count:]]

    def directions(self, purpose: Any) -> list[Arrays]:
        """One random direction, in each side's layout."""
        drawn = [self._draw(purpose, i, x) for i, x in enumerate(self.leaves[0])]
        return [
            drawn,
            [_like(d, x) for d, x in zip(self.carried(drawn), self.leaves[1], strict=True)],
        ]

    def nearby(self, k: int, purpose: Any, size: float | None) -> Arrays:
        """One side's leaves, perturbed along a random direction that is the same for both sides.

        The step is `size` times the largest entry of each leaf. With None it is the last digit of
        each entry, or more digits for the purpose "rounding, far".
        """
        drawn: Arrays = []
        for i, x in enumerate(self.leaves[0]):
            direction = widened(self._draw(purpose, i, x))
            biggest = largest(x) or 1.0
            if size is None:
                sizes = np.abs(widened(x))
                digits = _FAR.get(x.dtype.name, 1e2) if purpose[0] == "rounding, far" else 1.0
                scale = digits * tolerances.epsilon(x.dtype) * np.where(sizes > 0, sizes, biggest)
            else:
                scale = size * biggest
            drawn.append(scale * direction)
        steps: list[Any] = [*drawn] if k == 0 else self.carried(drawn)
        return [_like(widened(x) + d, x) for x, d in zip(self.leaves[k], steps, strict=True)]

    def _draw(self, purpose: Any, i: int, like: np.ndarray) -> np.ndarray:
        rng = np.random.default_rng([self.seed, *str(purpose).encode(), i])
        drawn = rng.standard_normal(like.shape)
        if like.dtype.kind == "c":
            drawn = drawn + 1j * rng.standard_normal(like.shape)
        return np.asarray(drawn).astype(like.dtype)

    def _drawn_cotangents(self, purpose: str) -> Arrays:
        """One for each inexact output; 1 for the gradient of one real number."""
        first = self.outputs[0].inexact()
        likes = [first[path] for path in self.out_paths]
        plain = len(likes) == 1 and likes[0].shape == () and likes[0].dtype.kind != "c"
        if plain and purpose == "gradient":
            return [np.ones_like(likes[0])]
        return [self._draw(purpose, i, x) for i, x in enumerate(likes)]


def _like(x: Any, like: np.ndarray) -> np.ndarray:
    return np.asarray(x).astype(like.dtype)


def _distinct(dtype: str) -> float:
    """The relative difference from which a single entry counts as different."""
    return min(math.sqrt(tolerances.epsilon(dtype)) * 1e4, 0.5)


def _dtypes(paths: list[str], firsts: Any, seconds: Any, notes: list[str]) -> list[Comparison]:
    """A record for each output whose dtypes differ; 32-bit integers without x64 give a note."""
    result = []
    for path, a, b in zip(paths, firsts, seconds, strict=True):
        if narrowed(a.dtype.name) == b.dtype.name != a.dtype.name:
            notes.append(f"output{path} is {a.dtype} in torch and {b.dtype} in jax, without x64")
        elif a.dtype != b.dtype:
            words = (a.dtype.name, b.dtype.name)
            c = mismatch("dtype", f"output{path}", 0, words, a.shape)
            result.append(c.because("another dtype", "Cast one of the outputs, or the inputs."))
    return result


def _raised(probe: Quantity, errors: list[Exception | None], reason: str) -> Comparison:
    first, second = ("has a result" if error is None else "raises" for error in errors)
    c = mismatch(probe.quantity, "every leaf", probe.order, (first, second))
    which = "second derivative" if probe.order == 2 else "derivative"
    where = [name for name, error in zip(("torch", "jax"), errors, strict=True) if error]
    return c.because(f"no {which} in {' and '.join(where)}", reason)
