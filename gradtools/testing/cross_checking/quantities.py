"""`CrossCheck`: the values and derivatives that `cross_check` compares, in JAX's layout.

A `CrossCheck` evaluates quantities of two sides at one point, compares them, and distinguishes
rounding from disagreement. `causes.py` evaluates them at nearby points as well.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from importlib import import_module
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
from gradtools.testing.flat import Arrays, is_rounding, naming
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

ROUNDING = 64  # epsilons of the largest number that may be rounding
MODES = ("forward_over_reverse", "reverse_over_reverse")
_COPY = (
    "The two models hold different numbers. Copy them: mapping = match_parameters(torch_model, "
    "jax_model), jax_model = mapping.into(jax_model), cross_check(..., mapping=mapping)."
)
Leaves = list[np.ndarray | None]  # one array for each leaf; None where it is not connected


@dataclass
class Quantity:
    """A value or derivative that is computed on both sides.

    Attributes:
        name: Its name in the report.
        order: The order of the derivative.
        compute: `(side's number, leaves) -> one array for each path`, None where not connected.
        paths: The paths of the result's leaves.
        of_leaves: Whether the result has one array for each differentiated leaf.
        sides: The results of both sides, in JAX's layout.
        comparisons: The comparison of each leaf.
    """

    name: str
    order: int
    compute: Callable[[int, Arrays], Sequence[np.ndarray | None]]
    paths: list[str]
    of_leaves: bool = True
    sides: tuple[Leaves, Leaves] = ([], [])
    comparisons: list[Comparison] = field(default_factory=list)


@contextmanager
def crossed(
    caller: str,
    torch: Any,
    jax: Any,
    args: Any,
    *,
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
    inputs = Inputs.read(caller, args, dtype)
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
        quantities: The compared quantities, by name.
        outputs: The outputs of both sides.
        cotangents: One for each inexact output; the gradient is their pullback.
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
        partial = caller == "first_divergence"  # it may report a missing parameter
        self.pairing: Pairing = pair_parameters(caller, first, second, mapping, partial)
        for side in self.sides:
            side.bind(inputs)
        moving = list(inputs.moving.values())
        self.leaves: list[Arrays] = [[*s.free_params.values(), *moving] for s in self.sides]
        self.paths = [*self.pairing.paths, *inputs.moving]
        self.outputs: list[Output] = []
        self.out_paths: list[str] = []
        self.cotangents: Arrays = []
        self.quantities: dict[str, Quantity] = {}

    # --- the comparison

    def run(self, order: int, report: Report) -> None:
        """Fills the report, without causes."""
        report.notes += self.pairing.notes
        report.comparisons += self.parameters()
        if not report:
            report.left_out.append("values and derivatives: the models' parameters differ")
        elif self._values(report) and order:
            ends = "argument or parameter" if not self.paths else "output"
            if self.paths and self.out_paths:
                for quantity in self._derivatives(order):
                    self._add(quantity, report)
            else:
                report.left_out.append(
                    f"no derivative was compared: no {ends} is floating or complex"
                    f"{self.inputs.integers}. Pass floating arrays, such as x.astype(float)"
                )

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
        picked = lambda out: [out[path] for path in first]
        firsts, seconds = map(picked, self.outputs)
        for path, a, b in zip(first, firsts, seconds, strict=True):
            if narrowed(a.dtype.name) == b.dtype.name != a.dtype.name:
                note = f"output{path} is {a.dtype} in torch and {b.dtype} in jax, without x64"
                report.notes.append(note)
            elif a.dtype != b.dtype:
                c = mismatch("dtype", f"output{path}", 0, (a.dtype.name, b.dtype.name), a.shape)
                fix = "Cast one of the outputs, or the inputs."
                report.comparisons.append(c.because("another dtype", fix))
        compute = lambda k, x: picked(self.value(k, x))
        paths = [f"output{path}" for path in first]
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

    def _compare(self, quantity: Quantity, firsts: Leaves, seconds: Leaves) -> list[Comparison]:
        """Compares the leaves of one quantity; differences that are rounding agree."""
        self.quantities[quantity.name] = quantity
        quantity.sides = list(firsts), list(seconds)
        for i, (path, a, b) in enumerate(zip(quantity.paths, firsts, seconds, strict=True)):
            c = self._compared(quantity.name, quantity.order, path, a, b)
            if not c.agrees and c.place is not None and self._is_rounding(quantity, i):
                c = replace(c, error=1.0, status=AGREES, cause=None)
            quantity.comparisons.append(c)
        return quantity.comparisons

    def _compared(self, name: str, order: int, path: str, a: Any, b: Any) -> Comparison:
        if a is None and b is None:
            words = ("not connected", "not connected")
            return Comparison(name, path, order, 0.0, 0.0, None, *words)
        if a is None or b is None:
            words = ("not connected", "connected") if a is None else ("connected", "not connected")
            return mismatch(name, path, order, words, (a if b is None else b).shape)
        return compare_arrays(name, path, a, b, order, tolerance=self.tolerance)

    def _is_rounding(self, quantity: Quantity, i: int) -> bool:
        """Whether the difference of one leaf is rounding of larger numbers that cancel."""
        a, b = (side[i] for side in quantity.sides)
        if a is None or b is None or not (is_inexact(a) and is_inexact(b)):
            return False
        present = [x for side in quantity.sides for x in side if x is not None]
        present += [*self.leaves[0], *(x for out in self.outputs for x in inexact(out).values())]
        eps = max(tolerances.epsilon(x.dtype) for x in present)
        with np.errstate(all="ignore"):
            off = np.abs(widened(a) - widened(b))
        bound = ROUNDING * eps * max(map(largest, present))
        evaluated = lambda k: lambda leaves: [self.evaluated_nearby(quantity, k, leaves)[i]]
        return any(is_rounding(off, evaluated(k), self.leaves[k], eps, bound) for k in (0, 1))

    # --- evaluation

    def evaluate(self, quantity: Quantity, k: int, leaves: Arrays) -> Leaves:
        """One side's result in JAX's layout.

        Deprecation warnings of the frameworks' own code are ignored, in case the program turns
        warnings into errors.
        """
        with warnings.catch_warnings():
            for framework in ("torch", "jax"):
                warnings.filterwarnings("ignore", category=DeprecationWarning, module=framework)
            result = quantity.compute(k, leaves)
        own = k == 0 and quantity.of_leaves
        return self.in_jax_layout(result, gradients=True) if own else list(result)

    def evaluated_nearby(self, quantity: Quantity, k: int, leaves: Arrays) -> Arrays:
        """One side's result at another point; NaN where the program raises there."""
        found: Leaves
        try:
            found = self.evaluate(quantity, k, leaves)
        except Exception:  # the point may be outside of the program's domain
            found = [None] * len(quantity.paths)
        return [np.array(np.nan) if x is None else x for x in found]

    def value(self, k: int, leaves: Arrays) -> Output:
        """One side's output."""
        with self.naming(self.sides[k]):
            return self.sides[k].value(leaves)

    def naming(self, side: Side) -> AbstractContextManager[None]:
        """A context that adds the side's name to an exception."""
        return naming(self.caller, f"the {side.name} program")

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

    def nearby(self, k: int, purpose: Any, size: float) -> Arrays:
        """One side's leaves, moved along a random direction that is the same for both sides.

        The step is `size` times the largest entry of each leaf.
        """
        steps = [size * (largest(x) or 1.0) for x in self.leaves[0]]
        drawn = [self._draw(purpose, i, x) for i, x in enumerate(self.leaves[0])]
        moves: list[Any] = [s * widened(d) for s, d in zip(steps, drawn, strict=True)]
        moves = moves if k == 0 else self.in_jax_layout(moves)
        pairs = zip(self.leaves[k], moves, strict=True)
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
                lead = "the batch size, " * (axis == 0 and path.startswith("argument"))
                result[f"{lead}axis {axis} of {path}"] = size
            result[f"the number of entries of {path}"] = x.size
        for path, x in (pair for out in self.outputs[1:] for pair in out.items()):
            result[f"the number of entries of output{path}"] = x.size
        return result
