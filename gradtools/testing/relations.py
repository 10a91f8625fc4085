"""Describes in a few words how two arrays that should be equal differ.

`related` looks for a relation of the entries: `cross_check` applies it to two results,
`first_divergence` to the values and cotangents of two operations, and the other checks to a
derivative and its differences. A relation must hold for all entries, within a tight tolerance.
`expression_cause` compares the formulas that two sides compute from values that both
have: ``gelu(x)`` against ``tanh gelu(x)``, ``x + 1e-05`` against ``x + 0.001``.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from itertools import chain, combinations, permutations, product
from typing import Any, NamedTuple

import numpy as np

from gradtools.testing.report import entry_errors, largest, widened

SIDES = ("torch", "jax")
FACTOR = "constant factor"
LAYOUTS = (
    "transposed",
    "permuted",
    "interleaved",
    "reversed",
)  # of the same entries
MASKED = 9e3  # larger numbers are treated as entries of a mask
_NEAR = 1e-6  # the relative error at which a factor is a known number
_MOST_AXES = 5


class Relation(NamedTuple):
    """A relation of two arrays: its name, and a sentence of evidence or advice."""

    name: str
    sentence: str = ""


Move = Callable[[np.ndarray], np.ndarray]
Moves = Iterator[tuple[str, Move]]


def related(
    a: np.ndarray,
    b: np.ndarray,
    names: Sequence[str] = SIDES,
    order: int = 0,
    near: float = _NEAR,
    sizes: Mapping[str, float] | None = None,
    single: bool = False,
) -> Relation | None:
    """Returns the first relation that holds between two differing arrays; None if none does.

    Args:
        a: The first side's array.
        b: The second side's array, of the same or another shape.
        names: The names of the sides.
        order: The order of the derivative.
        near: The relative error at which a relation holds.
        sizes: Lengths that occur in the program by name, which explain a factor.
        single: Whether to name an unknown factor of constant arrays, which any two have.
    """
    if a.dtype == b.dtype == bool:
        found = _of_masks(a, b)
    else:
        found = _of_numbers(widened(a), widened(b), names, order, near, sizes or {}, single)
    return next(map(Relation, found), None)


def _of_masks(a: np.ndarray, b: np.ndarray) -> Iterator[str]:
    if a.shape != b.shape or a.all() or b.all() or not (a.any() and b.any()):
        return
    yield from ("mask shifted by one" for _ in _shifts(a, b, 2, np.array_equal))
    moved = [(bool(how), move(b)) for how, move in layouts(b, a.shape)]
    inverted, transposed = "inverted mask", "transposed mask"
    kinds = ((inverted, 0, 1), (transposed, 1, 0), (f"{inverted}, transposed", 1, 1))
    for name, is_moved, is_inverted in kinds:
        if any(how == is_moved and ((y ^ bool(is_inverted)) == a).all() for how, y in moved):
            yield name


def _of_numbers(
    a: np.ndarray, b: np.ndarray, names: Any, order: int, near: float, sizes: Any, single: bool
) -> Iterator[str]:
    lost, same = "stopped gradient" if order else "zero", a.shape == b.shape
    both_ways = ((a, b, names[0]), (b, a, names[1]))  # either array may be the wrong one
    yield from (f"{lost} in {name}" for x, y, name in both_ways if not x.any() and y.any())
    if same and a.dtype.kind != "c" != b.dtype.kind:  # numbers of masks: -1e9 or -inf
        masks = a < -MASKED, b < -MASKED
        kept = ~masks[0] & ~masks[1]
        differ = masks[0].any() and masks[1].any() and (masks[0] != masks[1]).any()
        if differ and equal(a[kept], b[kept], _NEAR):
            yield next(_of_masks(*masks), "another mask")
    conjugates = (False, True) if a.dtype.kind == "c" and b.imag.any() else (False,)
    moves = (*layouts(b, a.shape), *(_rearrangements(b) if same else ()))
    for (how, move), conjugate in product(moves, conjugates):
        y = move(b).conj() if conjugate else move(b)
        factor = _factor(a, y, near, sizes, single)
        if factor is not None and (how or conjugate or factor):
            yield ", ".join(filter(None, [how, "conjugate" * conjugate, factor]))
    if same:
        moved = lambda x, y: np.ptp(np.abs(y)) > 0 and equal(x, y, near)
        yield from (f"shifted by one along axis {axis}" for axis in _shifts(a, b, 3, moved))
        for x, y, name in both_ways:
            absent = (x == 0) & (y != 0)
            if absent.any() and (x != 0).any() and equal(x, np.where(absent, 0, y), near):
                yield f"{lost} in places in {name}"


def _shifts(a: np.ndarray, b: np.ndarray, longer: int, is_same: Callable[..., bool]) -> Any:
    """Yields the axes longer than `longer` along which one array is the other, shifted by one."""
    for axis in (axis for axis, n in enumerate(a.shape) if n > longer):
        x, y = np.moveaxis(a, axis, 0), np.moveaxis(b, axis, 0)
        if is_same(x[:-1], y[1:]) or is_same(y[:-1], x[1:]):
            yield axis


def layouts(x: np.ndarray, shape: tuple[int, ...]) -> Moves:
    """Yields moves of x to a shape: none, a reshape, a permutation before or after it."""
    if x.shape == shape:
        yield "", lambda x: x
    thin, target = ([n for n in s if n != 1] for s in (x.shape, shape))
    if x.size != math.prod(shape) or max(len(thin), len(target)) > _MOST_AXES:
        return
    alike = sorted(thin) == sorted(target)
    if x.shape != shape and (not alike or thin == target):
        yield "reshaped layout", lambda x: x.reshape(shape)
    for p in [*permutations(range(len(thin)))][1:]:
        if not alike or [thin[i] for i in p] == target:
            yield "transposed layout", _transposition(thin, p, shape)
    for p in [*permutations(range(len(target)))][1:] if len(target) > len(thin) else ():
        back = tuple(int(i) for i in np.argsort(p))
        yield "transposed layout", _transposition([target[i] for i in p], back, shape)


def _transposition(first: list[int], axes: tuple[int, ...], last: tuple[int, ...]) -> Move:
    return lambda x: x.reshape(first).transpose(axes).reshape(last)


def _rearrangements(x: np.ndarray) -> Moves:
    """Yields moves of x to its own shape that change the order of its entries."""
    if x.ndim > 1 and x.shape != x.T.shape:
        yield "transposed layout", lambda x: x.T.reshape(x.shape)
        yield "transposed layout", lambda x: x.reshape(x.shape[::-1]).T
    for axis, n in enumerate(x.shape):
        for name, order in orders(n):
            yield f"{name} {axis}", lambda x, o=order, k=axis: np.take(x, o, k)  # type: ignore[misc]


def orders(n: int) -> Iterator[tuple[str, np.ndarray]]:
    """Returns orders of the entries of an axis of length n that occur as mistakes."""
    every = np.arange(n)
    if n > 2:
        yield "reversed axis", every[::-1]
        for count in (k for k in (2, 3, 4) if n % k == 0):
            for order in [*permutations(range(count))][1:]:
                yield "permuted blocks of axis", every.reshape(count, -1)[list(order)].ravel()
    if n > 2 and n % 2 == 0:  # adjacent entries or two halves, as in rotary embeddings
        yield "interleaved axis", every.reshape(-1, 2).T.ravel()
        yield "interleaved axis", every.reshape(2, -1).T.ravel()


def _factor(a: np.ndarray, b: np.ndarray, near: float, sizes: Any, single: bool) -> str | None:
    """Describes the factor a / b if it is the same everywhere; empty for 1."""
    size = float(np.vdot(b, b).real) if np.isfinite(b).all() else math.inf
    ratio = complex(np.vdot(b, a) / size) if 0 < size < math.inf else 0j
    if ratio == 0 or not np.isfinite(ratio) or not equal(a, ratio * b, near):
        return None
    for known, name in ((1, ""), (-1, "sign")):
        if abs(ratio - known) <= max(near, _NEAR):
            return name
    named = factor_name(ratio, sizes)
    if named is None and not single and bool((a == a.reshape(-1)[:1]).all()):
        return None
    small, real, imaginary = 1e-9 * abs(ratio), f"{ratio.real:.6g}", f"{ratio.imag:.4g}i"
    both = f"{real} + {imaginary}" if abs(ratio.real) >= small else imaginary
    text = real if abs(ratio.imag) < small else both
    return f"{FACTOR} {text}" + (f", {named}" if named else "")


def factor_name(ratio: complex, sizes: Mapping[str, float]) -> str | None:
    """Names a factor: a size, its square root, n / (n - 1), 2, or the imaginary unit.

    Args:
        ratio: The factor.
        sizes: Lengths that occur in the program, by name.

    Example:
        >>> factor_name(1 / 5, {"the batch size": 5})
        'the batch size'
    """
    ratio, size = complex(ratio), abs(ratio)
    if abs(ratio.imag) > _NEAR * size:
        is_unit = abs(ratio.real) < _NEAR > abs(size - 1)
        return "the imaginary unit" if is_unit else None
    table: list[tuple[float, str]] = []
    for name, n in ((name, n) for name, n in sizes.items() if n > 1):
        sample = f"n / (n - 1) for n = {n}, {name}: unbiased and biased"
        table += [(n, name), (n / (n - 1), sample)]
        table += [(math.sqrt(n / (n - 1)), f"the root of {sample}")] if n > 2 else []
    table.append((2.0, "a half square, or counted twice"))
    table += [(math.sqrt(n), f"the root of {name}") for name, n in sizes.items() if n > 2]
    is_near = lambda n: min(abs(size / n - 1), abs(size * n - 1)) < _NEAR
    return next((text for n, text in table if is_near(n)), None)


def relation(
    first: np.ndarray, second: np.ndarray, names: Sequence[str] = SIDES, order: int = 1
) -> str | None:
    """Describes how the finite entries of two arrays of one shape differ."""
    a, b = widened(first), widened(second)
    if a.shape != b.shape:
        return None
    known = np.isfinite(a) & np.isfinite(b)
    a, b = (a, b) if known.all() else (a[known], b[known])
    if not (size := max(largest(a), largest(b))):
        return None
    found = related(a, b, names, order, min(1e-4, largest(a - b) / size / 100), single=True)
    return found and found.name


def equal(a: Any, b: Any, near: float) -> bool:
    """Returns whether two arrays have equal shapes and agree to a relative error."""
    a, b = np.asarray(a), np.asarray(b)
    return a.shape == b.shape and bool((entry_errors(a, b, max(near, 1e-300), 0.0) <= 1).all())


# --- expressions in values that both sides have


class Expression(NamedTuple):
    """A formula of operands, such as "c x".

    Attributes:
        function: The formula, with x and y for its operands and c for a constant.
        letters: The letters of its operands, in order.
        c: The constant.
        axes: The axes that it reduces, " over (0,)".
    """

    function: str
    letters: str
    c: float | None = None
    axes: str = ""

    @property
    def form(self) -> str:
        """The formula in its own letters."""
        own = dict(zip("xy", self.letters, strict=False))
        return re.sub(r"\b[xy]\b", lambda m: own[m[0]], self.function) + self.axes

    def __str__(self) -> str:
        return self.form if self.c is None else re.sub(r"\bc\b", f"{self.c:.4g}", self.form)

    def is_in(self, others: Expressions) -> bool:
        """Returns whether the expression is one of the formulas, with the same constant."""
        near = lambda d: self.c == d or abs((self.c or 0) - (d or 0)) <= 1e-9 * abs(self.c or 0)
        return any(self._replace(c=e.c) == e and near(e.c) for e in others)


Expressions = list[Expression]


def expression_cause(
    first: Sequence[Expressions],
    second: Sequence[Expressions],
    direct: Sequence[Collection[str | None]] = ((), ()),
    sizes: Mapping[str, float] | None = None,
) -> str:
    """Describes two lines by their expressions in common operands; empty if unknown.

    Args:
        first: The expressions of the values of PyTorch's line, in order.
        second: The expressions of the values of JAX's line.
        direct: The letters of the operands of each line.
        sizes: Lengths that occur in the program by name, which explain a factor.
    """
    ours, theirs = ([*chain(*side)] for side in (first, second))
    rooted = ([e for e in side if "sqrt" in e.function and e.c] for side in (ours, theirs))
    for pair in product(*rooted):
        places = ["outside" if "sqrt(x)" in e.function else "inside" for e in pair]
        if places[0] != places[1]:
            return f"an epsilon {places[0]} of the root in torch, {places[1]} in jax"
    forms, functions, operands = (
        [sorted(map(part, side)) for side in (ours, theirs)]
        for part in (lambda e: e.form, lambda e: e.function + e.axes, lambda e: e.letters)
    )
    used = [{*"".join(letters)} for letters in operands]
    if forms[0] != forms[1] and functions[0] == functions[1] and used[0] == used[1]:
        return "exchanged operands: gates, heads, or channels in another order"
    ends = [next((step for step in reversed(side) if step), []) for side in (first, second)]
    alike = lambda pair: pair[0][:2] == pair[1][:2]
    other_letters = lambda pair: {*pair[0].letters} != {*pair[1].letters}
    pairs = [*filter(alike, product(ours, theirs))]
    for sides in (ends, (first[0], second[0])):
        pairs += sorted(product(*sides), key=other_letters)
    for e, f in pairs:
        if not e.is_in(theirs) and not f.is_in(ours):
            return _both(e, f, sizes or {})
    for k, lines in enumerate((first, second)):  # a function that one line leaves out
        for e in lines[-1]:
            if len(e.letters) == 1 and e.letters in {*direct[1 - k]} and e.function != "x":
                sides = [e, Expression("x", e.letters)][:: -1 if k else 1]
                return _both(sides[0], sides[1], sizes or {})
    return ""


def _both(e: Expression, f: Expression, sizes: Mapping[str, float]) -> str:
    """Formats two expressions, with the meaning of a constant if it is known."""
    if len({*e.letters, *f.letters}) == 1:
        e, f = (x._replace(letters="x" * len(x.letters)) for x in (e, f))
    words = f"{e} in torch, {f} in jax"
    if e[:2] == f[:2] and e.function == "c x" and abs((e.c or 0) + (f.c or 0) - 1) < 1e-9:
        return f"{words}: a weight and its complement"
    scaled = next((x for x, y in ((e, f), (f, e)) if x.form == f"c {y.form}"), None)
    known = factor_name(scaled.c or 0, sizes) if scaled else None
    return f"{words}: {known}" if known else words


def expressions_of(a: np.ndarray, operands: Mapping[str, np.ndarray]) -> Expressions:
    """Finds expressions in the named operands that equal an array, the shortest first."""
    a = widened(a)
    if not 1 < a.size <= _MOST_ENTRIES or not np.isfinite(a).all():
        return []
    known = {n: widened(x) for n, x in operands.items() if 0 < x.size <= _MOST_ENTRIES}
    with np.errstate(all="ignore"):
        found = [e for e, y in _candidates(a, known) if equal(a, y, 1e-8)]
        found += [e._replace(letters=n) for n, x in known.items() for e in with_constant(a, x)]
    return sorted(dict.fromkeys(found), key=lambda e: len(e.form))


def _candidates(a: np.ndarray, known: Mapping[str, np.ndarray]) -> Iterator[tuple[Expression, Any]]:
    """Returns expressions that may equal an array, with their values."""
    for n, x in known.items():
        for text, f in _FUNCTIONS.items() if x.shape == a.shape else ():
            if text not in _REAL or not np.iscomplexobj(x):
                yield Expression(text, n), f(x)
        for axes in chain(*(combinations(range(x.ndim), k + 1) for k in range(x.ndim))):
            count = math.prod(x.shape[i] for i in axes)
            for text, g in _REDUCTIONS.items() if count > 1 else ():
                if a.size == (x.size if text.endswith("softmax(x)") else x.size // count):
                    y = g(x, axis=axes, keepdims=True).reshape(a.shape)
                    yield Expression(text, n, axes=f" over {axes}"), y
    for (n, x), (m, y) in permutations(known.items(), 2):
        lengths = zip(x.shape[::-1], y.shape[::-1], strict=False)
        if a.ndim in (x.ndim, y.ndim) and all(k == l or 1 in (k, l) for k, l in lengths):
            for text, (h, is_ordered) in _PAIRS.items():
                if n < m or is_ordered:
                    yield Expression(text, n + m), h(x, y)


def with_constant(a: np.ndarray, x: np.ndarray) -> Expressions:
    """Finds expressions in x and a constant c, shared by all entries, that equal an array."""
    if a.shape != x.shape or a.size < 2:
        return []
    a, x, found = widened(a), widened(x), []
    with np.errstate(all="ignore"):
        forms = {"c x": a / x, "x + c": a - x}
        if a.dtype == x.dtype == float and (x > 0).all() and (a > 0).all():
            forms["sqrt(x + c)"], forms["sqrt(x) + c"] = a**2 - x, a - np.sqrt(x)
            forms["1 / sqrt(x + c)"], forms["1 / (sqrt(x) + c)"] = a**-2.0 - x, 1 / a - np.sqrt(x)
            forms["x ** c"] = np.log(a) / np.log(x)
        for text, constants in forms.items():
            c = constants.ravel()[0]
            if np.isfinite(constants).all() and np.isreal(c) and np.ptp(np.abs(x)) > 0:
                off = np.abs(constants - c).max()
                if off <= 1e-9 * max(1.0, largest(x), abs(c)) and abs(c) > 10 * off:
                    found.append(Expression(text, "x", float(np.real(c))))
    return found


def _sigmoid(x: Any) -> Any:
    return 1 / (1 + np.exp(-x))


def _softmax(x: Any, axis: Any, **kept: Any) -> Any:
    e = np.exp(x - x.real.max(axis, keepdims=True))
    return e / e.sum(axis, keepdims=True)


_MOST_ENTRIES = 1 << 15
_FUNCTIONS: dict[str, Callable[[Any], Any]] = {
    "gelu(x)": lambda x: x * 0.5 * (1 + np.vectorize(math.erf, otypes=[float])(x / math.sqrt(2))),
    "tanh gelu(x)": lambda x: x * _sigmoid(math.sqrt(8 / math.pi) * (x + 0.044715 * x**3)),
    "silu(x)": lambda x: x * _sigmoid(x),
    "relu(x)": lambda x: np.maximum(x, 0),
    "elu(x)": lambda x: np.where(x > 0, x, np.expm1(np.minimum(x, 0))),
    "leaky_relu(x)": lambda x: np.where(x > 0, x, 0.01 * x),
    "softplus(x)": lambda x: np.logaddexp(x, 0),
    "sign(x)": np.sign,
}
_REAL = [*_FUNCTIONS]  # functions of real numbers
_FUNCTIONS |= {
    "x": lambda x: x,
    "sigmoid(x)": _sigmoid,
    "1 / sqrt(x)": lambda x: 1 / np.sqrt(x),
    "1 / x": lambda x: 1 / x,
    "x ** 3": lambda x: x**3,
}
_UFUNCS = "tanh sin cos exp log log1p expm1 sqrt abs square conj real imag"
_FUNCTIONS |= {f"{name}(x)": getattr(np, name) for name in _UFUNCS.split()}
_REDUCTIONS: dict[str, Callable[..., Any]] = {
    **{f"{name}(x)": getattr(np, name) for name in "sum mean max min var std".split()},
    "var(x, ddof=1)": lambda x, **kept: np.var(x, ddof=1, **kept),
    "std(x, ddof=1)": lambda x, **kept: np.std(x, ddof=1, **kept),
    "norm(x)": lambda x, **kept: np.sqrt(np.sum(np.abs(x) ** 2, **kept)),
    "softmax(x)": _softmax,
    "log_softmax(x)": lambda x, **kept: np.log(_softmax(x, **kept)),
}
_PAIRS: dict[str, tuple[Callable[[Any, Any], Any], bool]] = {  # function, is ordered
    "x + y": (np.add, False),
    "x - y": (np.subtract, True),
    "x * y": (np.multiply, False),
    "x / y": (np.divide, True),
    "x * conj(y)": (lambda x, y: x * np.conj(y) if np.iscomplexobj(y) else None, True),
    "maximum(x, y)": (np.maximum, False),
    "minimum(x, y)": (np.minimum, False),
}
