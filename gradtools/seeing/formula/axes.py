"""Names for axes: axes of different arrays that are the same get the same letter.

Every operation ties axes of its arguments to axes of its result: those of a sum one by one,
those of a product by their labels. What is tied is one axis of the problem, such as the batch or
the classes, and gets one letter, so that ``sum over n`` says what it means.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from gradtools.seeing.formula.algebra import axis_groups
from gradtools.seeing.formula.expressions import Expr
from gradtools.seeing.formula.functions import FUNCTIONS

Axis = tuple[Expr, int]
_LETTERS = "ijklmnprsuvaeh"  # those that exist as small letters in Unicode
_SAME = {
    *("add", "softmax", "log_softmax", "standardize", "cumsum", "cumprod", "logcumsumexp"),
    *("flip", "roll", "triangle", "argsort", "cumargmax", "index_set", "dynamic_update"),
    *("fourier", "cholesky", "expm", "half", "gaps"),
}


class Axes:
    """Which axes are the same, and how they are called."""

    def __init__(self) -> None:
        self._parent: dict[Axis, Axis] = {}
        self._letters: dict[Axis, str] = {}
        self._taken: set[str] = set()

    def _root(self, axis: Axis) -> Axis:
        path = []
        while (up := self._parent.get(axis, axis)) != axis:
            path.append(axis)
            axis = up
        for below in path:
            self._parent[below] = axis
        return axis

    def tie(self, a: Axis, b: Axis) -> None:
        """Say that two axes are the same, if they are as long."""
        (x, i), (y, j) = a, b
        if i < x.rank and j < y.rank and x.shape[i] == y.shape[j] != 1:
            first, second = self._root(a), self._root(b)
            if first != second:
                self._parent[second] = first

    def tie_all(self, a: Expr, b: Expr) -> None:
        """Say that the axes of two arrays are the same one by one."""
        if a.rank == b.rank:
            for k in range(a.rank):
                self.tie((a, k), (b, k))

    def learn(self, values: Iterable[Expr]) -> None:
        """Tie what these operations tie."""
        for y in values:
            _tie(self, y)

    def forbid(self, letters: Iterable[str]) -> None:
        """Letters that mean something else."""
        self._taken.update(letters)

    def fix(self, x: Expr, axis: int, letter: str) -> None:
        """Say how an axis is called."""
        self._letters[self._root((x, axis))] = letter
        self._taken.add(letter)

    def letter(self, x: Expr, axis: int) -> str:
        """The letter of an axis."""
        root = self._root((x, axis))
        if root not in self._letters:
            free = (c for c in _endless() if c not in self._taken)
            self._letters[root] = next(free)
            self._taken.add(self._letters[root])
        return self._letters[root]

    def letters(self, x: Expr) -> tuple[str, ...]:
        """The letters of all axes; twice the same letter where it is the same axis twice."""
        return tuple(self.letter(x, a) for a in range(x.rank))

    def unique(self, x: Expr) -> tuple[str, ...]:
        """The letters of all axes, with primes where one comes again."""
        return primed(self.letters(x))


def _endless() -> Iterable[str]:
    yield from _LETTERS
    n = 1
    while True:
        yield from (f"{c}{n}" for c in "ijklmn")
        n += 1


def primed(letters: Sequence[str], taken: Iterable[str] = ()) -> tuple[str, ...]:
    """The letters, made different from each other and from those that are taken."""
    seen, found = set(taken), []
    for letter in letters:
        while letter in seen:
            letter += "'"
        seen.add(letter)
        found.append(letter)
    return tuple(found)


def _tie(axes: Axes, y: Expr) -> None:
    if y.op in FUNCTIONS or y.op in _SAME:
        for a in y.args:
            axes.tie_all(y, a)
    elif y.op in _TIES:
        _TIES[y.op](axes, y)


def _tie_einsum(axes: Axes, y: Expr) -> None:
    first: dict[int, Axis] = {l: (y, l) for l in range(y.rank)}
    for a, names in zip(y.args, y["labels"], strict=True):
        for k, l in enumerate(names):
            axes.tie(first.setdefault(l, (a, k)), (a, k))


def _tie_reduced(axes: Axes, y: Expr) -> None:
    (x,) = y.args
    left = [a for a in range(x.rank) if a not in y["axes"]]
    for k, a in enumerate(left):
        axes.tie((y, k), (x, a))


def _tie_argmax(axes: Axes, y: Expr) -> None:
    (x,) = y.args
    for k, a in enumerate(a for a in range(x.rank) if a != y["axis"]):
        axes.tie((y, k), (x, a))


def _tie_reshape(axes: Axes, y: Expr) -> None:
    (x,) = y.args
    for old, new in axis_groups(x.shape, y.shape) or []:
        if len(old) == len(new) == 1:
            axes.tie((x, old[0]), (y, new[0]))


def _tie_first(axes: Axes, y: Expr) -> None:
    """Of all arguments, wherever the axis is as long."""
    for x in y.args:
        if x.rank == y.rank:
            axes.tie_all(y, x)


def _tie_one_hot(axes: Axes, y: Expr) -> None:
    for k in range(y.rank - 1):
        axes.tie((y, k), (y.args[0], k))


def _tie_index(axes: Axes, y: Expr) -> None:
    _tie_indexed(axes, y, y.args[0], y, y.args[1:])


def _tie_index_add(axes: Axes, y: Expr) -> None:
    _tie_indexed(axes, y, y, y.args[0], y.args[1:])


def _tie_indexed(axes: Axes, y: Expr, whole: Expr, part: Expr, indices: Sequence[Expr]) -> None:
    """The integer arrays' axes lead in the part, those of the whole that are left follow."""
    left = [a for a in range(whole.rank) if a not in y["axes"]]
    lead = part.rank - len(left)
    for k, a in enumerate(left):
        axes.tie((part, lead + k), (whole, a))
    for i in indices:
        for k in range(i.rank):
            axes.tie((part, lead - i.rank + k), (i, k))


def _tie_along(axes: Axes, y: Expr) -> None:
    x, i = y.args[:2]
    for k in range(y.rank):
        axes.tie((y, k), (i if y.op == "take_along" else x, k))
        if k != y["axis"]:
            axes.tie((y, k), (x, k))


def _ties(*pairs: tuple[int, int, int, int]) -> Callable[[Axes, Expr], None]:
    """Ties of axes by (array, axis, array, axis), array -1 being the result."""

    def tie(axes: Axes, y: Expr) -> None:
        at = lambda k: y if k < 0 else y.args[k]
        for a, i, b, j in pairs:
            axes.tie((at(a), i), (at(b), j))

    return tie


def _tie_solve(axes: Axes, y: Expr) -> None:
    a, b = y.args
    axes.tie((y, y.rank - 2), (a, a.rank - 1))
    axes.tie((b, b.rank - 2), (a, a.rank - 2))
    axes.tie((y, y.rank - 1), (b, b.rank - 1))


def _tie_inverse(axes: Axes, y: Expr) -> None:
    (a,) = y.args
    axes.tie((y, y.rank - 2), (a, a.rank - 1))
    axes.tie((y, y.rank - 1), (a, a.rank - 2))


def _tie_convolution(axes: Axes, y: Expr) -> None:
    pairs = {
        "convolution": ((-1, 0, 0, 0), (-1, 1, 1, 0), (0, 1, 1, 1)),
        "convolution_input": ((-1, 0, 0, 0), (0, 1, 1, 0), (-1, 1, 1, 1)),
        "convolution_weight": ((-1, 0, 1, 1), (0, 0, 1, 0), (-1, 1, 0, 1)),
    }[y.op]
    _ties(*pairs)(axes, y)


def _tie_scan(axes: Axes, y: Expr) -> None:
    body, consts, carries, k = y["body"], y["consts"], y["carries"], y["output"]
    for n, (p, a) in enumerate(zip(body.inputs, y.args, strict=True)):
        shift = int(n >= consts + carries)
        for axis in range(p.rank):
            axes.tie((p, axis), (a, axis + shift))
    inner, shift = body.outputs[k], int(k >= carries)
    for axis in range(inner.rank):
        axes.tie((inner, axis), (y, axis + shift))
    for p, out in zip(body.inputs[consts : consts + carries], body.outputs, strict=False):
        axes.tie_all(p, out)


def _tie_ruled(axes: Axes, y: Expr) -> None:
    axes.tie_all(y, y.args[y["output"]])


_REDUCED = ("max", "min", "prod", "logsumexp", "deviation", "variance", "norm", "any", "all")
_TIES: dict[str, Callable[[Axes, Expr], None]] = {
    "einsum": _tie_einsum,
    "reshape": _tie_reshape,
    "one_hot": _tie_one_hot,
    "index": _tie_index,
    "index_add": _tie_index_add,
    "take_along": _tie_along,
    "put_along": _tie_along,
    "argmax": _tie_argmax,
    "solve": _tie_solve,
    "inverse": _tie_inverse,
    "pinv": _tie_inverse,
    "scan": _tie_scan,
    "ruled": _tie_ruled,
    **dict.fromkeys(_REDUCED, _tie_reduced),
    **dict.fromkeys(("slice", "pad", "concatenate", "along_set", "max_pool"), _tie_first),
    **dict.fromkeys(("max_unpool", "max_pick", "sum_pool", "sum_unpool"), _tie_first),
    **{f"convolution{name}": _tie_convolution for name in ("", "_input", "_weight")},
}
