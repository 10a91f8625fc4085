"""The matrix's programs in NumPy alone: values, and finite differences of them.

The programs of `scenario_table.py` are written with an array namespace, and NumPy has one. So the
oracle of the matrix is neither framework: a program is called in NumPy, in 64 bits, and becomes a
real number by one loss with random weights w,

    L(x) = sum over outputs of Re<w, y> + |y|^2 / 2,    y = f(x)

so that its slope along a direction t, and its second derivative along s and t, are single numbers
for central differences of sixth order. One reference serves both backends and every operator.
Arguments, weights and directions are rounded to the cell's dtype first: what a framework is given
in bfloat16 is, to the bit, what NumPy is given in 64 bits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from gradtools.errors import GradtoolsError
from gradtools.testing.cross_checking.tolerances import real_name
from tests.conformance.rig.programs import program_of
from tests.support.scenario_table import Scenario

Leaves = list[Any]
Path = Callable[[Leaves], Leaves]
ROWS = 5  # of a batch: two whole chunks of two and a half one
_STENCIL = ((1, 3 / 4), (2, -3 / 20), (3, 1 / 60))
_FIRST, _SECOND = 3e-3, 5e-3  # steps whose error is near 1e-12 and 1e-9 for scales of one


# --- trees of dicts, lists and tuples, in any framework -----------------------------------


def leaves_of(tree: Any) -> Leaves:
    """The leaves, dicts in the order of their sorted keys."""
    return [leaf for part in _parts(tree) for leaf in leaves_of(part)] if _inner(tree) else [tree]


def rebuilt(tree: Any, leaves: Iterator[Any]) -> Any:
    """A tree of the same form with these leaves; its dicts are sorted."""
    if not _inner(tree):
        return next(leaves)
    parts = [rebuilt(part, leaves) for part in _parts(tree)]
    return (
        dict(zip(sorted(tree), parts, strict=True)) if isinstance(tree, dict) else type(tree)(parts)
    )


def each_leaf(f: Callable[..., Any], tree: Any, *more: Any) -> Any:
    """f of each leaf, and of its fellows in further trees."""
    if not _inner(tree):
        return f(tree, *more)
    rows = zip(*(leaves_of(t) for t in (tree, *more)), strict=True)
    return rebuilt(tree, iter([f(*row) for row in rows]))


def _inner(tree: Any) -> bool:
    return isinstance(tree, (dict, list, tuple))


def _parts(tree: Any) -> list[Any]:
    return [tree[key] for key in sorted(tree)] if isinstance(tree, dict) else list(tree)


# --- a program with its arguments, as a cell asks -----------------------------------------


@dataclass(frozen=True)
class Kit:
    """What a program needs of a framework.

    Attributes:
        gt: What the records call gt: it has xp and asarray.
        cast: An array in the dtype of another, or of a name.
        inexact: Whether an output is a floating or complex array.
    """

    gt: Any
    cast: Callable[[Any, Any], Any]
    inexact: Callable[[Any], bool]


class _Numpy:
    xp = np
    asarray = staticmethod(np.asarray)


def _kind(x: Any) -> str:
    return str(np.asarray(x).dtype.kind)


NUMPY = Kit(
    _Numpy,
    lambda x, like: np.asarray(x).astype(like if isinstance(like, str) else np.asarray(like).dtype),
    lambda x: _kind(x) in "fc",
)


def _scaled(kit: Kit, out: Any, by: Any) -> Any:
    real, is_complex = kit.gt.xp.real, lambda x: "complex" in str(x.dtype)

    def one(y: Any) -> Any:
        if not kit.inexact(y):
            return y
        return y * kit.cast(real(by) if is_complex(by) and not is_complex(y) else by, y)

    return each_leaf(one, out)


def arranged(program: Scenario, arguments: str, kit: Kit) -> Callable[..., Any]:
    """The program as a function of the arguments that `arguments_of` gives."""
    f = program.bind(kit.gt)
    if arguments == "several":
        return lambda *xs: _scaled(kit, f(*xs[:-1]), xs[-1])
    if arguments == "integer":
        count = lambda n: kit.cast(kit.gt.xp.sum(n["count"]), "float32") / 4
        return lambda *xs: _scaled(kit, f(*xs[:-1]), count(xs[-1]))
    if arguments == "disconnected":
        return lambda x, *xs: f(x["used"], *xs)
    if arguments == "keyword":
        return lambda *xs, gain: _scaled(kit, f(*xs), gain)
    if arguments == "shared":
        return lambda x, y, *xs: f(each_leaf(lambda a, b: 0.5 * (a + b), x, y), *xs)
    return f


def arguments_of(program: Scenario, arguments: str) -> tuple[list[Any], dict[str, Any]]:
    """NumPy arguments by position and by name."""
    first, *rest = program.args
    kind = "complex128" if _kind(leaves_of(first)[0]) == "c" else "float64"
    if arguments == "several":
        return [first, *rest, np.asarray(1.3, kind)], {}
    if arguments == "integer":
        return [first, *rest, {"count": np.array([2, 3])}], {}
    if arguments == "disconnected":
        return [{"unused": np.full((2,), 0.5, kind), "used": first}, *rest], {}
    if arguments == "keyword":
        return [first, *rest], {"gain": np.asarray(0.7)}
    return [first, first, *rest] if arguments == "shared" else [first, *rest], {}


# --- numbers -----------------------------------------------------------------------------


def rounded(x: Any, dtype: str) -> np.ndarray:
    """A floating array as a dtype of a cell holds it, in 64 bits; others as they are."""
    x = np.asarray(x)
    if x.dtype.kind not in "fc":
        return x
    if x.dtype.kind == "c":
        return rounded(x.real, dtype) + 1j * rounded(x.imag, dtype)
    name = real_name(dtype)
    return _bfloat16(x) if name == "bfloat16" else x.astype(name).astype("float64")


def _bfloat16(x: np.ndarray) -> np.ndarray:
    """To the nearest number of eight bits, ties to even."""
    bits = np.atleast_1d(x.astype("float32")).view("uint32").astype("uint64")
    kept = (bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000
    return kept.astype("uint32").view("float32").astype("float64").reshape(x.shape)


def moved(leaves: Sequence[Any], step: float, along: Sequence[Any]) -> Leaves:
    """x + step t."""
    return [x + step * t for x, t in zip(leaves, along, strict=True)]


def _slope(at: Callable[[float], Any], h: float) -> Any:
    return sum(c * (at(k * h) - at(-k * h)) / h for k, c in _STENCIL)


def _normal(rng: np.random.Generator, like: Any) -> np.ndarray:
    shape = np.shape(like)
    drawn = rng.standard_normal(shape)
    return np.asarray(drawn + 1j * rng.standard_normal(shape) if np.iscomplexobj(like) else drawn)


# --- the reference -----------------------------------------------------------------------


@lru_cache(maxsize=512)
def reference_of(name: str, arguments: str, dtype: str, batched: bool = False) -> Reference:
    """The program of that name in NumPy, made once."""
    if not hasattr(np, "cumulative_sum"):
        raise GradtoolsError(
            f"the scenario matrix needs NumPy 2.1 or newer for its reference; this is "
            f"{np.__version__}. Fix: pip install 'numpy>=2.1'"
        )
    return (BatchReference if batched else Reference)(program_of(name), arguments, dtype)


class Reference:
    """A program at its arguments in NumPy.

    Attributes:
        args: The arguments, rounded to the dtype, in 64 bits; their dicts are sorted.
        kwargs: Those by name.
        actives: The positions that are differentiated: those of floating arguments.
        leaves: The leaves of these.
        weights: Of the loss, one for each floating output.
    """

    def __init__(self, program: Scenario, arguments: str, dtype: str) -> None:
        self.dtype = dtype
        self.f = arranged(program, arguments, NUMPY)
        args, kwargs = arguments_of(program, arguments)
        self.args = [each_leaf(lambda x: rounded(x, dtype), arg) for arg in args]
        self.kwargs = {name: rounded(x, dtype) for name, x in kwargs.items()}
        self.actives = tuple(i for i, arg in enumerate(args) if _floats(arg))
        self.leaves = self._leaves()
        self.weights = self.draw(9, self.outputs(self.leaves))

    def _leaves(self) -> Leaves:
        return [x for i in self.actives for x in leaves_of(self.args[i])]

    def draw(self, seed: int, like: Sequence[Any] | None = None) -> Leaves:
        """Independent normal numbers in the dtype, one array for each leaf."""
        rng = np.random.default_rng([seed, 20261121])
        like = self.leaves if like is None else like
        return [rounded(_normal(rng, x), self.dtype) for x in like]

    def outputs(self, leaves: Sequence[Any]) -> Leaves:
        """The program's floating outputs."""
        left, args = iter(leaves), list(self.args)
        for i in self.actives:
            args[i] = rebuilt(args[i], left)
        out = self.f(*args, **self.kwargs)
        return [np.asarray(y) for y in leaves_of(out) if NUMPY.inexact(y)]

    def loss(self, leaves: Sequence[Any]) -> float:
        """L at these leaves."""
        pairs = zip(self.outputs(leaves), self.weights, strict=True)
        return float(sum(np.sum(np.real(np.conj(w) * y) + np.abs(y) ** 2 / 2) for y, w in pairs))

    def slope(self, t: Sequence[Any], through: Path = list) -> float:
        """d/de L(through(x + e t)) at 0."""
        return float(_slope(lambda e: self.loss(through(moved(self.leaves, e, t))), _FIRST))

    def steepness(self, t: Sequence[Any]) -> float:
        """How large a slope along t is without cancellation: of one leaf at a time."""
        each = range(len(t))
        return sum(abs(self.slope([x if k == j else 0 * x for j, x in enumerate(t)])) for k in each)

    def curvature(self, s: Sequence[Any], t: Sequence[Any], through: Path = list) -> float:
        """d/da d/db L(through(x + a s + b t)) at 0."""

        def inner(a: float) -> Any:
            at = moved(self.leaves, a, s)
            return _slope(lambda b: self.loss(through(moved(at, b, t))), _SECOND)

        return float(_slope(inner, _SECOND))

    def push(self, t: Sequence[Any]) -> Leaves:
        """J t, entry by entry."""
        output = lambda k: lambda e: self.outputs(moved(self.leaves, e, t))[k]
        return [_slope(output(k), _FIRST) for k in range(len(self.weights))]


class BatchReference(Reference):
    """The program on each row of its first argument; the loss is the sum over the rows.

    Attributes:
        row: The reference of the first row.
        rows: The leaves of the first argument, row by row.
    """

    def __init__(self, program: Scenario, arguments: str, dtype: str) -> None:
        super().__init__(program, arguments, dtype)
        self.row = Reference(program, arguments, dtype)
        first = leaves_of(self.args[0])
        steps = [moved(first, 0.02 * k, self.draw(20 + k, first)) for k in range(ROWS)]
        self.rows = [[rounded(x, dtype) for x in xs] for xs in steps]
        stacked = [np.stack(xs) for xs in zip(*self.rows, strict=True)]
        self.args[0] = rebuilt(self.args[0], iter(stacked))
        self.leaves = self._leaves()

    def loss(self, leaves: Sequence[Any]) -> float:
        """The sum over rows of one row's loss."""
        count = len(self.rows[0])
        each = zip(*leaves[:count], strict=True)
        return sum(self.row.loss([*xs, *leaves[count:]]) for xs in each)

    def slopes_of_rows(self) -> np.ndarray:
        """What the loss of each row gains when its first argument is scaled up."""
        rest = self.leaves[len(self.rows[0]) :]
        scaled = lambda xs: lambda e: self.row.loss([*((1 + e) * x for x in xs), *rest])
        return np.array([_slope(scaled(xs), _FIRST) for xs in self.rows])


def _floats(arg: Any) -> bool:
    return all(_kind(x) in "fc" for x in leaves_of(arg))
