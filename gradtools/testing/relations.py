"""Describes in a few words how two arrays that should be equal differ.

`related` compares the entries of two arrays. The arrays are two results in `cross_check`, the
values or cotangents of two operations in `first_divergence`, and a derivative and its finite
differences in the other checks. A relation must hold for all entries, within a tight tolerance.
`expression_cause` compares the formulas by which two programs compute a value from common operands,
for example ``gelu(x)`` and ``tanh gelu(x)``, or ``x + 1e-05`` and ``x + 0.001``.
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
LAYOUTS = ("transposed", "permuted", "interleaved", "reversed")  # Relations that permute entries.
MASKED = 9e3  # Numbers of larger magnitude are treated as entries of a mask.
_NEAR = 1e-6  # The relative tolerance for matching a factor to a known number.
_MOST_AXES = 5
_MOST_ENTRIES = 1 << 15


class Relation(NamedTuple):
    """A relation between two arrays: its name, and a sentence with the evidence or advice."""

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
    """Returns the first relation that matches two differing arrays, or None if none matches.

    Args:
        a: The first side's array.
        b: The second side's array, of the same or another shape.
        names: The names of the sides.
        order: The order of the derivative.
        near: The relative error up to which arrays count as equal.
        sizes: Axis lengths of the program's arrays, keyed by name; a length may explain a factor.
        single: Whether to report a factor without an explanation if all entries of an array are
            equal.
    """
    masks = a.dtype == b.dtype == bool
    if masks and (a.all() or b.all() or not (a.any() and b.any())):
        return None
    factor = lambda x, y: _factor(x, y, near, sizes or {}, single)
    lost = "stopped gradient" if order else "zero"
    found = _relations(widened(a), widened(b), names, lost, near, factor, masks)
    return next((Relation("mask: " * masks + words) for words in found), None)


def _relations(
    a: np.ndarray, b: np.ndarray, names: Any, lost: str, near: float, factor: Any, masks: bool
) -> Iterator[str]:
    """Yields the matching relations, from least to most likely to match by chance."""
    same = a.shape == b.shape
    both_ways = ((a, b, names[0]), (b, a, names[1]))  # either array may be wrong
    yield from (f"{lost} in {name}" for x, y, name in both_ways if not x.any() and y.any())
    if same:  # large negative numbers that mask entries: -1e9 or -inf
        hidden = [x.real < -MASKED for x in (a, b)]
        kept = ~hidden[0] & ~hidden[1]
        differ = (hidden[0] != hidden[1]).any() and hidden[0].any() and hidden[1].any()
        if differ and equal(a[kept], b[kept], _NEAR):
            yield (related(hidden[0], hidden[1]) or Relation("another mask")).name
    for axis in range(a.ndim) if same else ():
        x, y = np.moveaxis(a, axis, 0), np.moveaxis(b, axis, 0)
        varies = len(x) > 2 and np.ptp(np.abs(x[1:-1])) > 0
        if varies and (equal(x[:-1], y[1:], near) or equal(y[:-1], x[1:], near)):
            yield f"shifted by one along axis {axis}"
    moves = (*layouts(b, a.shape), *(_rearrangements(b) if same and not masks else ()))
    changes: dict[str, Move] = {"": lambda y: y}
    if masks:
        changes["inverted"] = lambda y: 1 - y
    elif a.dtype.kind == "c" and b.imag.any():
        changes["conjugate"] = np.conj
    for (how, move), (change, changed) in product(moves, changes.items()):
        named = factor(a, changed(move(b)))
        if named is not None and (how or change or named):
            yield ", ".join(filter(None, (how, change, named)))
    for x, y, name in both_ways if same and not masks else ():
        absent = (x == 0) & (y != 0)
        if absent.any() and (x != 0).any() and equal(x, np.where(absent, 0, y), near):
            yield f"{lost} in some entries in {name}"


def layouts(x: np.ndarray, shape: tuple[int, ...]) -> Moves:
    """Yields named functions that convert x to the given shape by a reshape, transpose or both."""
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
    """Yields named functions that reorder the entries of x and keep its shape."""
    if x.ndim > 1 and x.shape != x.T.shape:
        yield "transposed layout", lambda x: x.T.reshape(x.shape)
        yield "transposed layout", lambda x: x.reshape(x.shape[::-1]).T
    for axis, n in enumerate(x.shape):
        for name, order in orders(n):
            yield f"{name} {axis}", lambda x, o=order, k=axis: np.take(x, o, k)  # type: ignore[misc]


def orders(n: int) -> Iterator[tuple[str, np.ndarray]]:
    """Yields named permutations of an axis of length n that are common mistakes."""
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
    """Describes the factor a / b; returns "" if the factor is 1, and None if it is not constant."""
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
    real, imaginary = (x if abs(x) > 1e-9 * abs(ratio) else 0 for x in (ratio.real, ratio.imag))
    text = f"{complex(real, imaginary):.4g}" if imaginary else f"{real:.6g}"
    return f"{FACTOR} {text}" + (f", {named}" if named else "")


def factor_name(ratio: complex, sizes: Mapping[str, float]) -> str | None:
    """Explains a factor as a size, the square root of a size, n / (n - 1), 2 or i.

    Args:
        ratio: The factor.
        sizes: Axis lengths of the program's arrays, keyed by name.

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
        sample = f"n / (n - 1) for n = {n}, {name}, as in unbiased variance"
        table += [(n, name), (n / (n - 1), sample)]
        table += [(math.sqrt(n / (n - 1)), f"the square root of {sample}")] if n > 2 else []
    table.append((2.0, "a missing factor 1/2, or a term counted twice"))
    table += [(math.sqrt(n), f"the square root of {name}") for name, n in sizes.items() if n > 2]
    is_near = lambda n: min(abs(size / n - 1), abs(size * n - 1)) < _NEAR
    return next((text for n, text in table if is_near(n)), None)


def relation(
    first: np.ndarray, second: np.ndarray, names: Sequence[str] = SIDES, order: int = 1
) -> str | None:
    """Describes how the finite entries of two arrays of equal shape differ."""
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
    """Returns whether two arrays have equal shapes and agree within the relative error `near`."""
    a, b = np.asarray(a), np.asarray(b)
    return a.shape == b.shape and bool((entry_errors(a, b, max(near, 1e-300), 0.0) <= 1).all())


# --- expressions in common operands


class Expression(NamedTuple):
    """A formula in one or two operands.

    For example, ``c x`` is printed as ``2 y`` if the letter of the operand is y and c is 2.

    Attributes:
        function: The formula, with x and y for its operands and c for a constant.
        letters: The letters that are printed for the operands x and y, in order.
        c: The constant, rounded to 7 digits, or 0 if the formula has no constant.
    """

    function: str
    letters: str
    c: float = 0.0

    def __str__(self) -> str:
        own = dict(zip("xy", self.letters, strict=False)) | {"c": f"{self.c:.4g}"}
        return re.sub(r"\b[cxy]\b", lambda m: own[m[0]], self.function)


Expressions = list[Expression]


def expression_cause(
    first: Sequence[Expressions],
    second: Sequence[Expressions],
    direct: Sequence[Collection[str | None]] = ((), ()),
    sizes: Mapping[str, float] | None = None,
) -> str:
    """Describes how the expressions of two source lines differ, or returns "" if unknown.

    Args:
        first: For each value that PyTorch's line computes, the expressions that equal the value.
        second: For each value that JAX's line computes, the expressions that equal the value.
        direct: For each of the two lines, the letters of its direct operands.
        sizes: Axis lengths of the program's arrays, keyed by name; a length may explain a factor.
    """
    ours, theirs = ([*chain(*side)] for side in (first, second))
    forms = [sorted((e.function, e.letters) for e in side) for side in (ours, theirs)]
    functions = [[function for function, _ in side] for side in forms]
    used = [{*"".join(letters for _, letters in side)} for side in forms]
    if forms[0] != forms[1] and functions[0] == functions[1] and used[0] == used[1]:
        return "exchanged operands: gates, heads, or channels in another order"
    ends = [next((step for step in reversed(side) if step), []) for side in (first, second)]
    pairs = [(e, f) for e, f in product(ours, theirs) if e[:2] == f[:2]]
    for sides in (ends, (first[0], second[0])):
        pairs += sorted(product(*sides), key=lambda pair: {*pair[0][1]} != {*pair[1][1]})
    pairs = [(e, f) for e, f in pairs if e not in theirs and f not in ours]
    # Find a function that only one of the lines applies.
    for k, line in enumerate((first[-1], second[-1])):
        lacking = [e for e in line if e.letters in {*direct[1 - k]} and e.function != "x"]
        plain = [(e, Expression("x", e.letters)) for e in lacking]
        pairs += [(f, e) for e, f in plain] if k else plain
    return _both(*pairs[0], sizes or {}) if pairs else ""


def _both(e: Expression, f: Expression, sizes: Mapping[str, float]) -> str:
    """Formats two expressions, with the meaning of a constant if it is known."""
    if len({*e.letters, *f.letters}) == 1:
        e, f = (x._replace(letters="x" * len(x.letters)) for x in (e, f))
    words = f"{e} in torch, {f} in jax"
    if e.function == f.function == "c x" and abs(e.c + f.c - 1) < 1e-9:
        return f"{words}: the factors add up to 1"
    for x, y in ((e, f), (f, e)):
        if x.function == "c x" and y.function == "x" and (known := factor_name(x.c, sizes)):
            return f"{words}: {known}"
    return words


def expressions_of(a: np.ndarray, operands: Mapping[str, np.ndarray]) -> Expressions:
    """Returns the expressions of the operands that equal an array, the shortest first."""
    a, found = widened(a), list[Expression]()
    if not 1 < a.size <= _MOST_ENTRIES or not np.isfinite(a).all():
        return found
    known = {n: widened(x) for n, x in operands.items() if 0 < x.size <= _MOST_ENTRIES}

    def add(text: str, letters: str, y: Any) -> None:
        if equal(a, y, 1e-8):
            found.append(Expression(text, letters))

    with np.errstate(all="ignore"):
        for n, x in known.items():
            for text, f in _FUNCTIONS.items() if x.shape == a.shape else ():
                add(text, n, f(x))
            found += [e._replace(letters=n) for e in with_constant(a, x)]
            for axes in chain(*(combinations(range(x.ndim), k + 1) for k in range(x.ndim))):
                size = x.size // (count := math.prod(x.shape[i] for i in axes))
                for text, g in _REDUCTIONS.items() if count > 1 else ():
                    if a.size == (x.size if text.endswith("softmax(x)") else size):
                        y = g(x, axis=axes, keepdims=True).reshape(a.shape)
                        add(f"{text} over {axes}", n, y)
        for (n, x), (m, y) in permutations(known.items(), 2):
            lengths = zip(x.shape[::-1], y.shape[::-1], strict=False)
            if a.ndim in (x.ndim, y.ndim) and all(k == l or 1 in (k, l) for k, l in lengths):
                for text, h in _PAIRS.items():
                    if n < m or text not in _SYMMETRIC:
                        add(text, n + m, h(x, y))
    return sorted(dict.fromkeys(found), key=lambda e: len(e.function))


def with_constant(a: np.ndarray, x: np.ndarray) -> Expressions:
    """Finds expressions in x and a constant c, shared by all entries, that equal an array."""
    if a.shape != x.shape or a.size < 2:
        return []
    a, x, found = widened(a), widened(x), []
    positive = bool((x.real > 0).all() and (a.real > 0).all())
    with np.errstate(all="ignore"):
        for text, solved in _CONSTANTS.items() if np.ptp(np.abs(x)) > 0 else ():
            constants = solved(a, x)
            c = constants.flat[0]
            off = np.abs(constants - c).max()
            holds = np.isreal(c) and off <= 1e-9 * max(1.0, largest(x), abs(c)) < np.inf
            if holds and abs(c) > 10 * off and (positive or text in ("c x", "x + c")):
                found.append(Expression(text, "x", float(f"{np.real(c):.7g}")))
    return found


def _sigmoid(x: Any) -> Any:
    return 1 / (1 + np.exp(-x))


def _softmax(x: Any, axis: Any, **kept: Any) -> Any:
    e = np.exp(x - x.real.max(axis, keepdims=True))
    return e / e.sum(axis, keepdims=True)


_erf = np.vectorize(math.erf, otypes=[float])
_UFUNCS = "tanh sin cos exp log log1p expm1 sqrt abs square conj real imag"
_FUNCTIONS: dict[str, Callable[[Any], Any]] = {
    "x": lambda x: x,
    "1 / x": lambda x: 1 / x,
    "1 / sqrt(x)": lambda x: 1 / np.sqrt(x),
    "sigmoid(x)": _sigmoid,
    "relu(x)": lambda x: np.maximum(x, 0),
    "leaky_relu(x)": lambda x: np.where(x > 0, x, 0.01 * x),
    "elu(x)": lambda x: np.where(x > 0, x, np.expm1(np.minimum(x, 0))),
    "silu(x)": lambda x: x * _sigmoid(x),
    "softplus(x)": lambda x: np.logaddexp(x.real, 0),
    "gelu(x)": lambda x: x * 0.5 * (1 + _erf(x.real / math.sqrt(2))),
    "tanh gelu(x)": lambda x: x * _sigmoid(math.sqrt(8 / math.pi) * (x + 0.044715 * x**3)),
    **{f"{name}(x)": getattr(np, name) for name in _UFUNCS.split()},
}
_REDUCTIONS: dict[str, Callable[..., Any]] = {
    **{f"{name}(x)": getattr(np, name) for name in "sum mean max min var std".split()},
    "var(x, ddof=1)": lambda x, **kept: np.var(x, ddof=1, **kept),
    "std(x, ddof=1)": lambda x, **kept: np.std(x, ddof=1, **kept),
    "norm(x)": lambda x, **kept: np.sqrt(np.sum(np.abs(x) ** 2, **kept)),
    "softmax(x)": _softmax,
    "log_softmax(x)": lambda x, **kept: np.log(_softmax(x, **kept)),
}
_PAIRS: dict[str, Callable[[Any, Any], Any]] = {
    "x + y": np.add,
    "x - y": np.subtract,
    "x * y": np.multiply,
    "x / y": np.divide,
    "x * conj(y)": lambda x, y: x * np.conj(y) if np.iscomplexobj(y) else None,
    "maximum(x, y)": np.maximum,
    "minimum(x, y)": np.minimum,
}
_SYMMETRIC = ("x + y", "x * y", "maximum(x, y)", "minimum(x, y)")
_CONSTANTS: dict[str, Callable[[Any, Any], Any]] = {  # solve for the constant
    "c x": lambda a, x: a / x,
    "x + c": lambda a, x: a - x,
    "sqrt(x + c)": lambda a, x: a**2 - x,
    "sqrt(x) + c": lambda a, x: a - np.sqrt(x),
    "1 / sqrt(x + c)": lambda a, x: a**-2.0 - x,
    "1 / (sqrt(x) + c)": lambda a, x: 1 / a - np.sqrt(x),
    "x ** c": lambda a, x: np.log(a) / np.log(x),
}
