"""One program of the scenario matrix in one backend, and how answers about it are judged.

A `Problem` puts the numbers of a `Reference` into the framework, in the cell's dtype, and makes
the same loss of the program there. Whatever an operator answers comes back to NumPy and is held
against the reference: contracted with independent directions where differences give a single
number, or entry by entry where they give the whole array.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from importlib import import_module
from typing import Any

import numpy as np

from gradtools.testing.checking.probe import inner, size
from gradtools.testing.cross_checking.tolerances import FINITE_DIFFERENCES, real_name, tolerance
from gradtools.testing.flat import FlatFunction
from tests.conformance.rig.matrix import Cell
from tests.conformance.rig.reference import (
    BatchReference,
    Kit,
    Leaves,
    Reference,
    arranged,
    each_leaf,
    leaves_of,
    rebuilt,
    reference_of,
)

DIFFERENCES = "finite differences in NumPy"
CALL = "a call in NumPy"
CLOSED = "closed form"
DOT = "dot product"
EAGER = "eager"


@dataclass(frozen=True)
class CellComparison:
    """One comparison of a cell.

    Attributes:
        oracle: What it is held against.
        error: The error in units of the tolerance: at most 1 agrees; NaN does not.
        remark: What else is to be said, such as two shapes that differ.
    """

    oracle: str
    error: float
    remark: str = ""

    def __bool__(self) -> bool:
        return self.error <= 1


@lru_cache
def _share(backend: str, is_complex: bool) -> Callable[[Any, Any], Any]:
    """One output's part of the loss, with weights.

    The loss is no part of what is tried. In JAX it is compiled as a whole, once for a shape: op by
    op it would be twenty programs, with those of its derivatives.
    """
    gt = import_module(f"gradtools.{backend}")
    xp, cast = gt.xp, gt._api._backend.cast

    def of_real(y: Any, w: Any) -> Any:
        return xp.sum(cast(w, y) * y + y * y / 2)

    def of_complex(y: Any, w: Any) -> Any:
        return xp.sum(xp.real(xp.conj(cast(w, y)) * y) + xp.abs(y) ** 2 / 2)

    share = of_complex if is_complex else of_real
    if backend != "jax":
        return share
    import jax

    return jax.jit(share)


class Problem(FlatFunction):
    """A cell's program in one backend, with the loss made of it.

    Attributes:
        ref: The same in NumPy.
        f: The program, under the cell's checkpoint if it has one.
    """

    def __init__(self, cell: Cell, backend: str, batched: bool = False) -> None:
        super().__init__(backend)
        self.cell = cell
        self.ref: Reference = reference_of(cell.program.name, cell.arguments, cell.dtype, batched)
        self.kit = Kit(self.gt, self.waist.cast, self.differentiable)
        self.f = arranged(cell.program, cell.arguments, self.kit)
        if cell.transform == "checkpoint":
            self.f = self.gt.checkpoint(self.f)
        self.kwargs = {name: self.array(x) for name, x in self.ref.kwargs.items()}
        self._still = [each_leaf(self.array, arg) for arg in self.ref.args]
        self._forms = [each_leaf(lambda _: None, arg) for arg in self.ref.args]
        self._weights = self.arrays(self.ref.weights)

    # --- arrays

    def array(self, x: Any) -> Any:
        """A NumPy array in the framework, floats in the cell's dtype."""
        x = np.asarray(x)
        made = self.gt.asarray(x)
        return self.waist.cast(made, self._dtype(x)) if x.dtype.kind in "fc" else made

    def _dtype(self, x: np.ndarray) -> str:
        """Of a real array beside complex ones: their real part's."""
        return self.cell.dtype if np.iscomplexobj(x) else real_name(self.cell.dtype)

    def along(self, t: Sequence[Any]) -> tuple[Any, ...]:
        """A direction as the active arguments take it."""
        return self.active(self.arrays(t))

    @property
    def positions(self) -> tuple[int, ...]:
        """Of the active arguments, where no others are handed over."""
        return tuple(range(len(self.ref.actives)))

    # --- the program and its loss

    def active(self, leaves: Sequence[Any]) -> tuple[Any, ...]:
        """The active arguments with these leaves."""
        left = iter(leaves)
        return tuple(rebuilt(self._forms[i], left) for i in self.ref.actives)

    def args(self, active: Sequence[Any]) -> list[Any]:
        """All arguments."""
        moving = dict(zip(self.ref.actives, active, strict=True))
        return [moving.get(i, still) for i, still in enumerate(self._still)]

    def outputs(self, out: Any) -> Leaves:
        """The floating leaves of what the program returned."""
        return [y for y in leaves_of(out) if self.differentiable(y)]

    def total(self, out: Any) -> Any:
        """The loss of what the program returned."""
        pairs = zip(self.outputs(out), self._weights, strict=True)
        parts = [_share(self.name, self.waist.is_complex(y))(y, w) for y, w in pairs]
        return sum(parts[1:], parts[0])

    def call(self, active: Sequence[Any], f: Callable[..., Any] | None = None) -> Any:
        """The program, or f in its place, at these active arguments."""
        return (f or self.f)(*self.args(active), **self.kwargs)

    def outs(self, *active: Any) -> Leaves:
        """The floating outputs as a function of the active arguments."""
        return self.outputs(self.call(active))

    def flat(self, *leaves: Any) -> Leaves:
        """The same of the leaves of these arguments, one by one."""
        return self.outs(*self.active(leaves))

    def loss(self, *active: Any) -> Any:
        """The loss as a function of the active arguments."""
        return self.total(self.call(active))

    def loss_of(self, f: Callable[..., Any]) -> Callable[..., Any]:
        """The loss of another function in the program's place."""
        return lambda *active: self.total(self.call(active, f))

    def edited(self, edit: Callable[[Any], Any]) -> Callable[..., Any]:
        """The loss of edited arguments."""
        return lambda *active: self.loss(*(edit(x) for x in active))

    # --- judging

    def near(
        self, oracle: str, found: Any, expected: Any, scale: Any, order: int = 1
    ) -> CellComparison:
        """An outcome: the largest error relative to the largest entry of scale."""
        found, expected = np.asarray(found), np.asarray(expected)
        if found.shape != expected.shape:
            return CellComparison(oracle, np.nan, f"shape {found.shape}, not {expected.shape}")
        if not found.size:
            return CellComparison(oracle, 0.0)
        largest = max(float(np.max(np.abs(scale))), float(np.max(np.abs(expected))), 1e-30)
        error = float(np.max(np.abs(found - expected))) / largest
        return CellComparison(oracle, error / self._allowed(oracle, order))

    def _allowed(self, oracle: str, order: int) -> float:
        dtype = real_name(self.cell.dtype)
        if oracle == DIFFERENCES and dtype == "float64":
            return FINITE_DIFFERENCES[dtype] * (10 if order == 2 else 1)
        return tolerance(dtype, order)

    def slopes(
        self, grads: Sequence[Any], factor: float = 1.0, **more: Any
    ) -> Iterator[CellComparison]:
        """<gradient, t> against the loss's slope, for two directions."""
        for seed in (1, 2):
            t = self.ref.draw(seed)
            expected = factor * self.ref.slope(t, **more)
            yield self.near(DIFFERENCES, inner(grads, t), expected, size(grads, t))

    def slope(
        self, found: Any, t: Sequence[Any], factor: float = 1.0, **more: Any
    ) -> CellComparison:
        """A number against the loss's slope along t."""
        expected = np.asarray(factor * self.ref.slope(t, **more))
        return self.near(DIFFERENCES, found, expected, self.ref.steepness(t))

    def curvatures(
        self, product: Sequence[Any], t: Any, factor: float = 1.0, **more: Any
    ) -> Iterator[CellComparison]:
        """<H t, s> against the loss's second derivative, for one more direction."""
        s = self.ref.draw(3)
        expected = factor * self.ref.curvature(s, t, **more)
        yield self.near(DIFFERENCES, inner(product, s), expected, size(product, s), 2)

    def entries(self, found: Sequence[Any], expected: Sequence[Any]) -> Iterator[CellComparison]:
        """J t against differences, entry by entry."""
        for x, y in zip(found, expected, strict=True):
            yield self.near(DIFFERENCES, x, y, y)

    def value(self, found: Any, expected: Any) -> CellComparison:
        """A value against NumPy's."""
        return self.near(CALL, found, np.asarray(expected), expected, 0)


class BatchProblem(Problem):
    """The problem whose first argument is a batch, and whose loss is the sum over its rows."""

    ref: BatchReference

    def __init__(self, cell: Cell, backend: str) -> None:
        super().__init__(cell, backend, batched=True)
        self.row = Problem(cell, backend)

    @property
    def axes(self) -> tuple[int | None, ...]:
        """The first argument is split, all others are shared."""
        return (0, *(None for _ in self.ref.args[1:]))

    def chunked(self) -> Callable[..., Any]:
        """The program on the batch, in chunks of two."""
        one = lambda *args: self.outputs(self.f(*args, **self.kwargs))
        chunked = self.gt.chunked(self.gt.vmap(one, in_axes=self.axes), 2, in_axes=self.axes)
        return lambda *args, **_: chunked(*args)

    def scaled_loss(self, s: Any, first: Any) -> Any:
        """The loss of one row whose first argument is multiplied by a number."""
        rest = [self._still[i] for i in self.ref.actives[1:]]
        return self.row.loss(each_leaf(lambda x: x * self.waist.cast(s, x), first), *rest)
