"""Defines `CrossCheck`, which computes and compares values and derivatives in JAX's layout.

A `CrossCheck` evaluates the values and derivatives of two programs at one point, compares the
results, and distinguishes rounding errors from disagreements. `causes.py` also evaluates the
quantities at nearby points.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from importlib import import_module
from typing import Any

import numpy as np

from gradtools.arguments.checks import whole_number
from gradtools.errors import GradtoolsError
from gradtools.testing.cross_checking import tolerances
from gradtools.testing.cross_checking.pairing import Pairing, pair_parameters
from gradtools.testing.cross_checking.sides import (
    Inputs,
    Output,
    Side,
    in_double_precision,
    inexact,
    narrowed,
)
from gradtools.testing.flat import Arrays, first_line, is_rounding, naming, no_such_mode
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

ROUNDING = 64  # the maximum rounding error, relative to eps times the largest number
MODES = ("forward_over_reverse", "reverse_over_reverse")
_COPY = (
    "The parameters of the two models differ. Copy PyTorch's parameters to JAX: mapping = "
    "match_parameters(torch_model, jax_model), jax_model = mapping.into(jax_model), "
    "cross_check(..., mapping=mapping)."
)
Leaves = list[np.ndarray | None]  # an array, or None, for each leaf


@dataclass
class Quantity:
    """A value or derivative that is computed on both sides.

    Attributes:
        name: The name in the report.
        order: The order of the derivative.
        compute: `compute(k, leaves)` returns one array for each path on side k (0 is PyTorch, 1 is
            JAX). An array is None if the output does not depend on the leaf.
        paths: The paths of the arrays, such as "argument 0" or "output".
        of_leaves: Whether there is one array for each differentiated leaf, rather than for each
            output.
        sides: The results of both sides, in JAX's layout.
    """

    name: str
    order: int
    compute: Callable[[int, Arrays], Sequence[np.ndarray | None]]
    paths: list[str]
    of_leaves: bool = True
    sides: Sequence[Leaves] = ()


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
    """Yields a `CrossCheck` of two programs; x64 is on in JAX if an array has double precision."""
    if not isinstance(args, tuple | list):
        raise GradtoolsError(
            f"{caller}: args must be a tuple with one entry for each argument, got a "
            f"{type(args).__name__}. For one argument write args=(x,)."
        )
    seed = whole_number(caller, "seed", seed, 0)
    for backend in ("torch", "jax"):
        import_module(f"gradtools.{backend}")  # raises an error with advice if not installed
    inputs = Inputs.read(caller, args, dtype)
    first = Side(caller, "torch", torch, dtype)
    arrays = [x for x in inputs.leaves if isinstance(x, np.ndarray | np.generic)]
    names = {x.dtype.name for x in (*arrays, *first.params.values())}
    wide = dtype == "float64" if dtype else not names.isdisjoint(("float64", "complex128"))
    with in_double_precision(wide):
        sides = first, Side(caller, "jax", jax, dtype)
        partial = caller == "first_divergence"  # first_divergence reports missing parameters
        pairing = pair_parameters(caller, *sides, mapping, partial)
        yield CrossCheck(caller, sides, inputs, pairing, seed, tolerance)


class CrossCheck:
    """Compares the values and derivatives of two programs at one point.

    Attributes:
        caller: The name of the check, for messages.
        sides: The program in PyTorch and in JAX.
        leaves: The differentiated leaves of each side in the layout of that side, parameters first.
        paths: The names of the leaves.
        quantities: The compared quantities, keyed by name.
        outputs: The outputs of both sides.
        out_paths: The paths of the floating and complex outputs.
        cotangents: One cotangent per path in `out_paths`; the gradient is the pullback of all
            cotangents.
    """

    def __init__(
        self,
        caller: str,
        sides: tuple[Side, Side],
        inputs: Inputs,
        pairing: Pairing,
        seed: int,
        tolerance: float | None,
    ) -> None:
        self.caller, self.sides, self.inputs, self.pairing = caller, sides, inputs, pairing
        self.seed, self.tolerance = seed, tolerance
        for side in sides:
            side.program = side.bound(inputs, side.free_params)
        moving = inputs.moving
        self.leaves = [[*side.free_params.values(), *moving.values()] for side in sides]
        self.paths = [*pairing.paths, *moving]
        self.outputs, self.out_paths = list[Output](), list[str]()
        self.cotangents: Arrays = []
        self.quantities: dict[str, Quantity] = {}

    # --- the comparison

    def run(self, order: int, report: Report) -> None:
        """Adds all comparisons to the report; `causes.explain` adds the causes of disagreements."""
        report.notes += self.pairing.notes
        report.comparisons += self.parameters()
        if not report:
            report.left_out.append("values and derivatives: the models' parameters differ")
        elif self._values(report) and order:
            if self.paths and self.out_paths:
                for quantity in self._derivatives(order):
                    self._add(quantity, report)
            else:
                ends = "output" if self.paths else "argument or parameter"
                report.left_out.append(
                    f"no derivative was compared: no {ends} is floating or complex"
                    f"{self.inputs.integers}. Pass floating arrays, such as x.astype(float)"
                )

    def parameters(self) -> list[Comparison]:
        """Compares the parameters, since derivatives at different points are not comparable."""
        result, mine = [], self.in_jax_layout(self.leaves[0])
        for path, a, b in zip(self.pairing.paths, mine, self.leaves[1], strict=False):
            c = compare_arrays("parameter", path, a, b, tolerance=self.tolerance)
            if not c.agrees and a is not None:
                found = relation(a, b, ("torch", "jax"), 0) or ""
                c = c.because(found if found.startswith(LAYOUTS) else "other parameters", _COPY)
            result.append(c)
        return result

    def _values(self, report: Report) -> bool:
        """Compares the outputs; returns whether the outputs' derivatives can be compared."""
        first, second = self.outputs = [self._output(k, self.leaves[k]) for k in (0, 1)]
        if first.keys() != second.keys():
            ours, theirs = (f"{len(x)} leaves: {', '.join(x) or 'one array'}" for x in self.outputs)
            c = mismatch("structure", "output", 0, (ours, theirs))
            fix = "Return the same tuples, lists and dictionaries."
            report.comparisons.append(c.because("another structure", fix))
            return False
        if not first:
            raise GradtoolsError("cross_check: the programs return no array; return the result.")
        for path, a in first.items():
            ours, theirs = a.dtype.name, second[path].dtype.name
            if ours != theirs == narrowed(ours):
                report.notes.append(
                    f"output{path} is {ours} in torch, {theirs} in jax (x64 is off)"
                )
            elif ours != theirs:
                c = mismatch("dtype", f"output{path}", 0, (ours, theirs), a.shape)
                fix = "Cast one of the outputs, or the inputs."
                report.comparisons.append(c.because("another dtype", fix))
        compute = lambda k, x: [self._output(k, x)[path] for path in first]
        quantity = Quantity("value", 0, compute, [f"output{p}" for p in first], of_leaves=False)
        self._compare(quantity, [[out[path] for path in first] for out in self.outputs], report)
        self.out_paths = [*inexact(first)]
        alike = all(a.shape == second[path].shape for path, a in first.items())
        return alike and inexact(first).keys() == inexact(second).keys()

    def _derivatives(self, order: int) -> list[Quantity]:
        """Returns the derivatives to compare, along random directions shared by both sides."""
        likes = [self.outputs[0][path] for path in self.out_paths]
        scalar = len(likes) == 1 and likes[0].shape == () and likes[0].dtype.kind != "c"
        drawn = [self._draw("gradient", i, x) for i, x in enumerate(likes)]
        self.cotangents = [np.ones_like(likes[0])] if scalar else drawn
        pullback = lambda k, x: self.sides[k].pullback(x, self.cotangents_of(k))
        result = [Quantity("gradient", 1, pullback, self.paths)]
        if order == 2:
            pushed, twice = self.directions("jvp"), self.directions("hvp")

            def pushforward(k: int, leaves: Arrays) -> Arrays:
                found = self.sides[k].derivative("forward", leaves, pushed[k])
                own = [*inexact(self.outputs[k])]
                return [found[own.index(path)] for path in self.out_paths]

            def product(mode: str, k: int, leaves: Arrays) -> Arrays:
                return self.sides[k].derivative(mode, leaves, self.cotangents_of(k), twice[k])

            outs = [f"output{path}" for path in self.out_paths]
            result.append(Quantity("jvp", 1, pushforward, outs, of_leaves=False))
            for mode in MODES:
                name = f"hvp, {mode.replace('_', ' ')}"
                result.append(Quantity(name, 2, partial(product, mode), self.paths))
        return result

    def cotangents_of(self, k: int) -> Arrays:
        """Returns the cotangents in the order of one side's outputs."""
        return [self.cotangents[self.out_paths.index(p)] for p in inexact(self.outputs[k])]

    def _add(self, quantity: Quantity, report: Report) -> None:
        """Compares a derivative; if a side raises an error, adds the error to the report."""
        results, raised = list[Leaves](), dict[str, Exception]()
        for k, side in enumerate(self.sides):
            try:
                results.append(self.evaluate(quantity, k, self.leaves[k]))
            except Exception as error:
                raised[side.name] = error
        if not raised:
            self._compare(quantity, results, report)
            return
        name = quantity.name
        reasons = [f"{name}: {side}: {first_line(error)}" for side, error in raised.items()]
        optional = len(raised) == 2 or "forward" in name or not quantity.of_leaves
        if optional and all(map(no_such_mode, raised.values())):
            report.left_out += reasons
            return
        ours, theirs = ("raises" if s.name in raised else "has a result" for s in self.sides)
        c = mismatch(name, "every leaf", quantity.order, (ours, theirs))
        which = "second derivative" if quantity.order == 2 else "derivative"
        cause = f"no {which} in {' and '.join(raised)}"
        report.comparisons.append(c.because(cause, "; ".join(reasons)))

    def _compare(self, quantity: Quantity, sides: Sequence[Leaves], report: Report) -> None:
        """Compares the arrays of one quantity; rounding errors count as agreement."""
        self.quantities[quantity.name], quantity.sides = quantity, sides
        name, order = quantity.name, quantity.order
        for i, (path, a, b) in enumerate(zip(quantity.paths, *sides, strict=True)):
            ours, theirs = ("not " * (x is None) + "connected" for x in (a, b))
            if a is None and b is None:
                c = Comparison(name, path, order, 0.0, 0.0, None, ours, theirs)
            elif a is None or b is None:
                c = mismatch(name, path, order, (ours, theirs))
            else:
                c = compare_arrays(name, path, a, b, order, tolerance=self.tolerance)
                if not c.agrees and c.place is not None and self._is_rounding(quantity, i, a, b):
                    c = replace(c, error=1.0, status=AGREES, cause=None)
            report.comparisons.append(c)

    def _is_rounding(self, quantity: Quantity, i: int, a: np.ndarray, b: np.ndarray) -> bool:
        """Returns whether a leaf's difference is rounding error of larger numbers that cancel."""
        present = [x for side in quantity.sides for x in side if x is not None]
        present += [*self.leaves[0], *(x for out in self.outputs for x in inexact(out).values())]
        eps = max(tolerances.epsilon(x.dtype) for x in present)
        with np.errstate(all="ignore"):
            off = np.abs(widened(a) - widened(b))
        bound = ROUNDING * eps * max(map(largest, present)) * bool(inexact({"": a}))
        evaluated = lambda k: lambda leaves: [self.evaluated_nearby(quantity, k, leaves)[i]]
        return any(is_rounding(off, evaluated(k), self.leaves[k], eps, bound) for k in (0, 1))

    # --- evaluation

    def evaluate(self, quantity: Quantity, k: int, leaves: Arrays) -> Leaves:
        """Returns the arrays of a quantity on side k, in JAX's layout.

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
        """Evaluates a quantity at other leaves; returns NaN if the program raises an error."""
        found: Leaves
        try:
            found = self.evaluate(quantity, k, leaves)
        except Exception:  # the point may be outside of the program's domain
            found = [None] * len(quantity.paths)
        return [np.array(np.nan) if x is None else x for x in found]

    def _output(self, k: int, leaves: Arrays) -> Output:
        with self.naming(self.sides[k]):
            return self.sides[k].output(leaves)

    def naming(self, side: Side) -> AbstractContextManager[None]:
        """Context manager that adds the side's name to an exception."""
        kind, others = {
            "torch": ("torch.Tensor", ("jax",)),
            "jax": ("jax.Array", ("torch", "Tensor")),
        }[side.name]

        def hint(error: Exception) -> str:
            foreign = isinstance(error, TypeError) and any(word in str(error) for word in others)
            return " Are torch= and jax= swapped?" if foreign else ""

        return naming(self.caller, f"the {side.name} program, which is called with {kind}s", hint)

    # --- directions and points

    def in_jax_layout(self, leaves: Sequence[np.ndarray | None], gradients: bool = False) -> Leaves:
        """Converts one array for each of PyTorch's leaves to JAX's layout."""
        count = len(self.sides[0].free_params)
        return [*self.pairing.in_jax_layout(leaves[:count], gradients), *leaves[count:]]

    def directions(self, purpose: Any, size: float | None = None) -> list[Arrays]:
        """Returns one random direction, in the layout of each side.

        size: The standard deviation of the entries, relative to the largest entry of each leaf. By
            default, the standard deviation is 1.
        """
        drawn = [self._draw(purpose, i, x) for i, x in enumerate(self.leaves[0])]
        if size is not None:
            scales = [size * (largest(x) or 1.0) for x in self.leaves[0]]
            drawn = [np.asarray(s * widened(d)) for s, d in zip(scales, drawn, strict=True)]
        theirs = zip(map(np.asarray, self.in_jax_layout(drawn)), self.leaves[1], strict=True)
        return [drawn, [d if size else d.astype(x.dtype) for d, x in theirs]]

    def nearby(self, purpose: Any, size: float) -> list[Arrays]:
        """Returns the leaves of both sides, moved along a random direction."""
        pairs = zip(self.leaves, self.directions(purpose, size), strict=True)
        return [
            [np.asarray(widened(x) + d).astype(x.dtype) for x, d in zip(xs, ds, strict=True)]
            for xs, ds in pairs
        ]

    def _draw(self, purpose: Any, i: int, like: np.ndarray) -> np.ndarray:
        rng = np.random.default_rng([self.seed, *str(purpose).encode(), i])
        drawn = rng.standard_normal(like.shape)
        if like.dtype.kind == "c":
            drawn = drawn + 1j * rng.standard_normal(like.shape)
        return np.asarray(drawn).astype(like.dtype)

    def sizes(self) -> dict[str, int]:
        """Maps descriptions to axis lengths of leaves, and to the sizes of leaves and outputs."""
        result: dict[str, int] = {}
        pairs = zip(self.paths, self.leaves[1], strict=True)
        for path, x in sorted(pairs, key=lambda pair: not pair[0].startswith("argument")):
            for axis, size in enumerate(x.shape):
                lead = "the batch size, " * (axis == 0 and path.startswith("argument"))
                result[f"{lead}axis {axis} of {path}"] = size
            result[f"the number of entries of {path}"] = x.size
        for path, x in (pair for out in self.outputs[1:] for pair in out.items()):
            result[f"the number of entries of output{path}"] = x.size
        return result
