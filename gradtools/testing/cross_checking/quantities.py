"""`CrossCheck`: the values and derivatives that `cross_check` compares, in JAX's layout.

A `CrossCheck` evaluates quantities of two sides at one point, compares them, and distinguishes
rounding from disagreement. `causes.py` evaluates them at nearby points as well.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from importlib import import_module
from itertools import product
from typing import Any

import numpy as np

from gradtools.errors import GradtoolsError
from gradtools.testing.checking.probe import first_line, no_such_mode
from gradtools.testing.cross_checking import tolerances
from gradtools.testing.cross_checking.pairing import Pairing, pair_parameters
from gradtools.testing.cross_checking.sides import (
    Inputs,
    Output,
    Side,
    in_double_precision,
    inexact,
    is_inexact,
    narrowed,
)
from gradtools.testing.flat import Arrays
from gradtools.testing.relations import LAYOUTS, relation
from gradtools.testing.report import (
    AGREES,
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
_COPY = (
    "The two models hold different numbers. Copy them: mapping = match_parameters(torch_model, "
    "jax_model), jax_model = mapping.into(jax_model), cross_check(..., mapping=mapping)."
)
Leaves = list[np.ndarray | None]  # one array for each leaf; None where it is not connected


@dataclass(frozen=True)
class Quantity:
    """A value or derivative that is computed on both sides.

    Attributes:
        name: Its name in the report.
        order: The order of the derivative.
        compute: `(side's number, leaves) -> one array for each path`, None where not connected.
        paths: The paths of the result's leaves.
        of_leaves: Whether the result has one array for each differentiated leaf.
    """

    name: str
    order: int
    compute: Callable[[int, Arrays], Sequence[np.ndarray | None]]
    paths: list[str]
    of_leaves: bool = True


@dataclass(frozen=True)
class Result:
    """A quantity on both sides, in one layout, and the comparison of each leaf."""

    quantity: Quantity
    sides: tuple[Leaves, Leaves]
    comparisons: list[Comparison]


@contextmanager
def crossed(
    caller: str,
    torch: Any,
    jax: Any,
    args: Any,
    *,
    argnums: int | Sequence[int] | None = None,
    mapping: Any = None,
    dtype: str | None = None,
    seed: int = 0,
    tolerance: float | None = None,
) -> Iterator[CrossCheck]:
    """The cross-check of two programs, in a context of 64 bits if one of the arrays has them."""
    if not isinstance(args, tuple | list):
        raise GradtoolsError(
            f"{caller}: args must be a tuple with one entry for each argument, got a "
            f"{type(args).__name__}. For one argument write args=(x,)."
        )
    for backend in ("torch", "jax"):
        import_module(f"gradtools.{backend}")  # says how to install a missing framework
    inputs = Inputs.read(caller, args, argnums, dtype)
    first = Side(caller, "torch", torch, dtype)
    arrays = [x for x in inputs.leaves if isinstance(x, np.ndarray | np.generic)]
    names = {x.dtype.name for x in (*arrays, *first.params.values())}
    wide = dtype == "float64" if dtype else not names.isdisjoint(("float64", "complex128"))
    with in_double_precision(wide):
        second = Side(caller, "jax", jax, dtype)
        yield CrossCheck(caller, first, second, inputs, mapping, seed, tolerance)


class CrossCheck:
    """The comparison of two sides at one point.

    Attributes:
        caller: The name of the check, for messages.
        sides: The program in PyTorch and in JAX.
        leaves: The differentiated leaves of each side, parameters first, in its own layout.
        results: What was compared.
        outputs: The outputs of both sides.
        cotangents: One for each inexact output, of which the gradient is the pullback.
    """

    def __init__(
        self,
        caller: str,
        first: Side,
        second: Side,
        inputs: Inputs,
        mapping: Any,
        seed: int,
        tolerance: float | None,
    ) -> None:
        self.caller, self.sides = caller, (first, second)
        self.inputs, self.seed, self.tolerance = inputs, seed, tolerance
        partial = caller == "first_divergence"  # it may be asked because of a missing parameter
        self.pairing: Pairing = pair_parameters(caller, first, second, mapping, partial)
        for side in self.sides:
            side.bind(inputs)
        moving = list(inputs.moving.values())
        self.leaves: list[Arrays] = [[*s.free_params.values(), *moving] for s in self.sides]
        self.paths = [*self.pairing.paths, *inputs.moving]
        self.outputs: list[Output] = []
        self.out_paths: list[str] = []
        self.cotangents: Arrays = []
        self.results: list[Result] = []
        self._nearby: dict[Any, Leaves | None] = {}

    # --- the comparison

    def run(self, order: int, report: Report) -> None:
        """Fills the report, without causes."""
        report.notes += self.pairing.notes
        report.comparisons += self.parameters()
        if not report:
            report.left_out.append("values and derivatives: the models' parameters differ")
            return
        comparable = self._values(report)
        if not (order and comparable):
            return
        if self.paths and self.out_paths:
            for quantity in self._derivatives(order):
                self._add(quantity, report)
            return
        what = "output" if self.paths else "argument or parameter"
        report.left_out.append(f"derivatives: no {what} is floating or complex")

    def parameters(self) -> list[Comparison]:
        """Compares the parameters; derivatives at different points would be meaningless."""
        result, mine = [], self.in_jax_layout(self.leaves[0])
        for path, a, b in zip(self.pairing.paths, mine, self.leaves[1], strict=False):
            c = self._compared("parameter", 0, path, a, b)
            if not c.agrees and a is not None:
                found = relation(a, b, ("torch", "jax"), 0) or ""
                c = c.because(found if found.startswith(LAYOUTS) else "other parameters", _COPY)
            result.append(c)
        return result

    def _values(self, report: Report) -> bool:
        """Compares the outputs. Returns whether their derivatives can be compared."""
        self.outputs = [self.value(k, self.leaves[k]) for k in (0, 1)]
        first, second = self.outputs
        if first.keys() != second.keys():
            words = [f"{len(out)} leaves: {', '.join(out) or 'one array'}" for out in self.outputs]
            c = mismatch("structure", "output", 0, (words[0], words[1]))
            fix = "Return the same tuples, lists and dictionaries."
            report.comparisons.append(c.because("another structure", fix))
            return False
        if not first:
            raise GradtoolsError("cross_check: the programs return no array; return the result.")
        paths = [*first]
        picked = lambda out: [out[path] for path in paths]
        firsts, seconds = map(picked, self.outputs)
        for path, a, b in zip(paths, firsts, seconds, strict=True):
            if narrowed(a.dtype.name) == b.dtype.name != a.dtype.name:
                note = f"output{path} is {a.dtype} in torch and {b.dtype} in jax, without x64"
                report.notes.append(note)
            elif a.dtype != b.dtype:
                words = [a.dtype.name, b.dtype.name]
                c = mismatch("dtype", f"output{path}", 0, (words[0], words[1]), a.shape)
                fix = "Cast one of the outputs, or the inputs."
                report.comparisons.append(c.because("another dtype", fix))
        compute = lambda k, x: picked(self.value(k, x))
        quantity = Quantity("value", 0, compute, paths, of_leaves=False)
        report.comparisons += self._compare(quantity, firsts, seconds)
        self.out_paths = [*inexact(first)]
        alike = all(a.shape == b.shape for a, b in zip(firsts, seconds, strict=True))
        return alike and inexact(first).keys() == inexact(second).keys()

    def _derivatives(self, order: int) -> list[Quantity]:
        """The derivatives to compare: along random directions, the same on both sides."""
        first = inexact(self.outputs[0])
        likes = [first[path] for path in self.out_paths]
        scalar = len(likes) == 1 and likes[0].shape == () and likes[0].dtype.kind != "c"
        drawn = [self._draw("gradient", i, x) for i, x in enumerate(likes)]
        self.cotangents = [np.ones_like(likes[0])] if scalar else drawn
        pushed, twice = self.directions("jvp"), self.directions("hvp")

        def pushforward(k: int, leaves: Arrays) -> Arrays:
            result = self.sides[k].forward(leaves, pushed[k])
            own = [*inexact(self.outputs[k])]
            return [result[own.index(path)] for path in self.out_paths]

        pullback = lambda k, x: self.sides[k].pullback(x, self.cotangents_of(k))
        result = [Quantity("gradient", 1, pullback, self.paths)]
        if order == 2:
            outs = [f"output{path}" for path in self.out_paths]
            result.append(Quantity("jvp", 1, pushforward, outs, of_leaves=False))
        for mode in MODES if order == 2 else ():
            compute = lambda k, x, mode=mode: self.sides[k].product(
                mode, x, twice[k], self.cotangents_of(k)
            )
            result.append(Quantity(f"hvp, {mode.replace('_', ' ')}", 2, compute, self.paths))
        return result

    def cotangents_of(self, k: int) -> Arrays:
        """The cotangents in the order of one side's outputs."""
        return [self.cotangents[self.out_paths.index(p)] for p in inexact(self.outputs[k])]

    def _add(self, quantity: Quantity, report: Report) -> None:
        """Compares a derivative, unless a side raises an error."""
        results: list[Any] = []
        raised: dict[str, Exception] = {}
        for k, side in enumerate(self.sides):
            try:
                results.append(self.evaluate(quantity, k, self.leaves[k]))
            except Exception as error:
                raised[side.name] = error
        if not raised:
            report.comparisons += self._compare(quantity, *results)
            return
        name = quantity.name
        reasons = [f"{name}: {side}: {first_line(error)}" for side, error in raised.items()]
        optional = len(raised) == 2 or "forward" in name or not quantity.of_leaves
        if optional and all(map(no_such_mode, raised.values())):
            report.left_out += reasons
            return
        words = ["raises" if side.name in raised else "has a result" for side in self.sides]
        c = mismatch(name, "every leaf", quantity.order, (words[0], words[1]))
        which = "second derivative" if quantity.order == 2 else "derivative"
        cause = f"no {which} in {' and '.join(raised)}"
        report.comparisons.append(c.because(cause, "; ".join(reasons)))

    def _compare(self, quantity: Quantity, firsts: Any, seconds: Any) -> list[Comparison]:
        """Compares the leaves of one quantity; differences that are rounding agree."""
        present = [*(x for x in (*firsts, *seconds) if x is not None), *self.leaves[0]]
        if quantity.order:  # a derivative's intermediate results have the size of the output, too
            present += [x for out in self.outputs for x in inexact(out).values()]
        # the largest difference that rounding of numbers of this size can make
        eps = max((tolerances.epsilon(x.dtype) for x in present), default=0.0)
        noise = ROUNDING * eps * max((largest(x) for x in present), default=0.0)
        result = Result(quantity, (list(firsts), list(seconds)), [])
        self.results.append(result)
        for i, path in enumerate(quantity.paths):
            label = path if quantity.name != "value" else f"output{path}"
            c = self._compared(quantity.name, quantity.order, label, firsts[i], seconds[i])
            if self._is_rounding(c, result, i, noise):
                c = replace(c, error=1.0, status=AGREES, cause=None)
            result.comparisons.append(c)
        return result.comparisons

    def _compared(self, name: str, order: int, path: str, a: Any, b: Any) -> Comparison:
        if a is None and b is None:
            words = ("not connected", "not connected")
            return Comparison(name, path, order, 0.0, 0.0, None, *words)
        if a is None or b is None:
            words = ("not connected", "connected") if a is None else ("connected", "not connected")
            return mismatch(name, path, order, words, (a if b is None else b).shape)
        return compare_arrays(name, path, a, b, order, tolerance=self.tolerance)

    # --- rounding of larger numbers that cancel

    def _is_rounding(self, c: Comparison, result: Result, i: int, noise: float) -> bool:
        """Whether a small disagreement is rounding, by moving the inputs by an epsilon.

        A difference far below the largest numbers at hand is rounding if the result changes by
        as much when the inputs change by their last digit; otherwise it is real, however small.
        """
        a, b = (side[i] for side in result.sides)
        if c.agrees or c.place is None or a is None or b is None:
            return False
        if not is_inexact(a) or not is_inexact(b):
            return False
        a, b = widened(a), widened(b)
        with np.errstate(all="ignore"):
            difference, size = np.abs(a - b), np.maximum(np.abs(a), np.abs(b))
        if not (np.isfinite(difference).all() and difference.max() <= noise):
            return False
        far = difference.max() > min(math.sqrt(tolerances.epsilon(c.dtype)) * 1e4, 0.5) * size.max()
        change = self.changes_by_rounding(result, i, bool(far))
        return bool(difference.max() <= 1000 * change.max())

    def changes_by_rounding(self, result: Result, i: int, far: bool = False) -> np.ndarray:
        """The largest change of each entry of leaf i when the inputs' last digits change.

        With `far` more digits change, but few enough for a smooth result to change little.
        """
        bases = [widened(side[i]) for side in result.sides]
        change = np.zeros(bases[0].shape)
        for draw, (k, base) in product(range(4), enumerate(bases)):
            purpose = ("rounding, far" if far else "rounding", draw)
            near = self.evaluated_nearby(result.quantity, k, purpose)
            if near is not None and near[i] is not None:
                with np.errstate(all="ignore"):
                    step = np.abs(widened(near[i]) - base)
                change = np.maximum(change, np.where(np.isfinite(step), step, 0.0))
        return change

    # --- evaluation

    def evaluate(self, quantity: Quantity, k: int, leaves: Arrays) -> Leaves:
        """One side's result in JAX's layout.

        Where a program makes errors of warnings, a framework's own are none of the user's.
        """
        with warnings.catch_warnings():
            for framework in ("torch", "jax"):
                warnings.filterwarnings("ignore", category=DeprecationWarning, module=framework)
            result = quantity.compute(k, leaves)
        own = k == 0 and quantity.of_leaves
        return self.in_jax_layout(result, gradients=True) if own else list(result)

    def evaluated_nearby(
        self, quantity: Quantity, k: int, purpose: Any, size: float | None = None
    ) -> Leaves | None:
        """One side's result at `nearby(k, purpose, size)`, memoized; None if it raises there."""
        key = (quantity.name, k, purpose, size)
        if key not in self._nearby:
            try:
                self._nearby[key] = self.evaluate(quantity, k, self.nearby(k, purpose, size))
            except Exception:
                self._nearby[key] = None
        return self._nearby[key]

    def value(self, k: int, leaves: Arrays) -> Output:
        """One side's output."""
        with self.naming(self.sides[k]):
            return self.sides[k].value(leaves)

    @contextmanager
    def naming(self, side: Side) -> Iterator[None]:
        """A context that adds the side's name to an exception."""
        try:
            yield
        except Exception as error:
            error.add_note(f"{self.caller}: raised by the {side.name} program.")
            raise

    # --- directions and points

    def in_jax_layout(self, leaves: Sequence[np.ndarray | None], gradients: bool = False) -> Leaves:
        """Converts one array for each of PyTorch's leaves to JAX's layout."""
        count = len(self.sides[0].free_params)
        return [*self.pairing.in_jax_layout(leaves[:count], gradients), *leaves[count:]]

    def directions(self, purpose: Any) -> list[Arrays]:
        """One random direction, in each side's layout."""
        drawn = [self._draw(purpose, i, x) for i, x in enumerate(self.leaves[0])]
        theirs = zip(self.in_jax_layout(drawn), self.leaves[1], strict=True)
        return [drawn, [np.asarray(d).astype(x.dtype) for d, x in theirs]]

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
        steps: list[Any] = [*drawn] if k == 0 else self.in_jax_layout(drawn)
        pairs = zip(self.leaves[k], steps, strict=True)
        return [np.asarray(widened(x) + d).astype(x.dtype) for x, d in pairs]

    def _draw(self, purpose: Any, i: int, like: np.ndarray) -> np.ndarray:
        rng = np.random.default_rng([self.seed, *str(purpose).encode(), i])
        drawn = rng.standard_normal(like.shape)
        if like.dtype.kind == "c":
            drawn = drawn + 1j * rng.standard_normal(like.shape)
        return np.asarray(drawn).astype(like.dtype)

    def sizes(self) -> dict[str, int]:
        """The axis lengths and sizes that occur, by name."""
        result: dict[str, int] = {}
        parameters = zip(self.pairing.paths, self.leaves[1], strict=False)
        for path, x in [*self.inputs.moving.items(), *parameters]:
            for axis, size in enumerate(x.shape):
                batch = axis == 0 and path.startswith("argument")
                lead = "the batch size, " if batch else ""
                result[f"{lead}axis {axis} of {path}"] = size
            result[f"the number of entries of {path}"] = x.size
        for path, x in self.outputs[1].items():
            result[f"the number of entries of output{path}"] = x.size
        return result
