"""How one of two arrays that should be equal differs from the other: the list of known relations.

`cross_check` applies the list to results, `first_divergence` to the values and cotangents of two
operations. A relation must hold for every entry, much more closely than the two arrays agree.
Layouts come first (axes permuted, reshaped, reversed, shifted, in other blocks), each alone and
with a conjugate, a sign or a factor. Then each array is searched for as an expression in values
that both sides have: ``gelu(x)`` against ``tanh gelu(x)``, ``x + 1e-05`` against ``x + 0.001``.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import combinations_with_replacement, permutations
from typing import Any

import numpy as np

from gradtools.testing.report import entry_errors, largest, widened

Cause = tuple[str, str]  # in a few words, and the evidence or advice
Move = Callable[[np.ndarray], np.ndarray]
Operands = Mapping[str, np.ndarray]  # values by a letter
Expressions = list[tuple[str, float | None]]  # texts, with the constant c of each
FACTOR = "constant factor"
LAYOUTS = ("transposed", "permuted", "interleaved", "reversed")  # the same entries, elsewhere
_NEAR = 1e-6  # the relative error at which a factor is a known number
_MOST_AXES = 5
_MASKED = 9e3  # numbers as large as this are a mask's


def array_cause(
    a: np.ndarray,
    b: np.ndarray,
    names: Sequence[str],
    order: int,
    near: float,
    sizes: Mapping[str, float] | None = None,
    single: bool = False,
) -> Cause | None:
    """The first relation that holds between two differing arrays; None if none does.

    Args:
        a: The first side's array.
        b: The second side's, of the same shape or another.
        names: The names of the sides.
        order: The order of the derivative.
        near: The relative error at which a relation holds.
        sizes: Lengths that occur in the program by name, which explain a factor.
        single: Whether to name an unknown factor of constant arrays, which any two have.
    """
    if a.dtype == b.dtype == bool:
        return _mask_cause(a, b)
    a, b = widened(a), widened(b)
    lost = "stopped gradient" if order else "zero"
    both_ways = ((a, b, names[0]), (b, a, names[1]))  # each array as the wrong one
    for x, y, name in both_ways:
        if not x.any() and y.any():
            return f"{lost} in {name}", f"It is exactly zero in {name}."
    if masks := _masks(a, b):
        return _mask_cause(*masks) or ("another mask", "Other entries are masked.")
    same = a.shape == b.shape
    for words, detail, move in (*layouts(b, a.shape), *(rearrangements(b) if same else ())):
        y = move(b)
        for conjugate in (False, True) if a.dtype.kind == "c" and b.imag.any() else (False,):
            found = _factor(a, y.conj() if conjugate else y, names, near, sizes or {}, single)
            if found is None:
                continue
            parts = [words, "conjugate" if conjugate else "", found[0]]
            details = [detail, _CONJUGATE if conjugate else "", found[1]]
            if any(parts):
                return ", ".join(filter(None, parts)), " ".join(filter(None, details))
    if not same:
        return None
    for axis, n in enumerate(a.shape):
        ends = [(np.moveaxis(x, axis, 0), np.moveaxis(y, axis, 0)) for x, y in ((a, b), (b, a))]
        for x, y in ends if n > 3 else ():
            if np.ptp(np.abs(y[1:])) > 0 and equal(x[:-1], y[1:], near):
                return f"shifted by one along axis {axis}", "Padding, a causal mask, or an offset."
    for x, y, name in both_ways:
        absent = (x == 0) & (y != 0)
        if absent.any() and (x != 0).any() and equal(x, np.where(absent, 0, y), near):
            count = f"{int(absent.sum())} of {absent.size} entries"
            return f"{lost} in places in {name}", f"{count} are zero, the others agree."
    return None


_CONJUGATE = "One side conjugates: another convention of a complex derivative."


def layouts(x: np.ndarray, shape: tuple[int, ...]) -> Iterator[tuple[str, str, Move]]:
    """Moves of x to a shape: none, a reshape, axes permuted before or after one."""
    if x.shape == shape:
        yield "", "", lambda x: x
    thin, target = ([n for n in s if n != 1] for s in (x.shape, shape))
    if x.size != math.prod(shape) or max(len(thin), len(target)) > _MOST_AXES:
        return
    alike = sorted(thin) == sorted(target)
    if x.shape != shape and (not alike or thin == target):
        yield "reshaped layout", "", lambda x: x.reshape(shape)
    for p in [*permutations(range(len(thin)))][1:]:
        if not alike or [thin[i] for i in p] == target:
            detail = f"Axis i is axis {list(p)}[i] of the other."
            move: Move = lambda x, p=p: x.reshape(thin).transpose(p).reshape(shape)  # type: ignore[misc]
            yield "transposed layout", detail, move
    for p in [*permutations(range(len(target)))][1:] if len(target) > len(thin) else ():
        split, back = [target[i] for i in p], np.argsort(p)
        move = lambda x, s=split, q=back: x.reshape(s).transpose(q).reshape(shape)  # type: ignore[misc]
        yield "transposed layout", "", move


def rearrangements(x: np.ndarray) -> Iterator[tuple[str, str, Move]]:
    """Moves of x to its own shape that change the order of its entries."""
    if x.ndim > 1 and x.shape != x.T.shape:
        detail = "It was reshaped where it should be transposed."
        yield "transposed layout", detail, lambda x: x.T.reshape(x.shape)
        yield "transposed layout", detail, lambda x: x.reshape(x.shape[::-1]).T
    for axis, n in enumerate(x.shape):
        take = lambda order, axis=axis: lambda x: np.take(x, order, axis)
        if n <= 2:
            continue
        every = np.arange(n)
        detail = "A flipped kernel, or a sequence read backwards."
        yield f"reversed axis {axis}", detail, take(every[::-1])
        for count in (2, 3, 4):
            if n % count == 0:
                for order in [*permutations(range(count))][1:]:
                    detail = f"Block i is block {list(order)}[i]: gates, heads, or channels."
                    blocks = every.reshape(count, -1)[list(order)].ravel()
                    yield f"permuted blocks of axis {axis}", detail, take(blocks)
        if n % 2 == 0:
            detail = "Pairs of neighbours against two halves (RoPE)."
            for order in (every.reshape(-1, 2).T.ravel(), every.reshape(2, -1).T.ravel()):
                yield f"interleaved axis {axis}", detail, take(order)


def _masks(a: np.ndarray, b: np.ndarray) -> tuple[np.ndarray, np.ndarray] | None:
    """The masks of two arrays that hold -1e9 or -inf at different places, and agree elsewhere."""
    if a.shape != b.shape or a.dtype.kind == "c" or b.dtype.kind == "c":
        return None
    masks = a < -_MASKED, b < -_MASKED
    if not (masks[0].any() and masks[1].any()) or (masks[0] == masks[1]).all():
        return None
    kept = ~masks[0] & ~masks[1]
    return masks if equal(a[kept], b[kept], 1e-6) else None


def _mask_cause(a: np.ndarray, b: np.ndarray) -> Cause | None:
    """How two masks are related: inverted, transposed, shifted by one."""
    if a.shape != b.shape or a.all() or b.all() or not (a.any() and b.any()):
        return None
    detail = "Of two masks that agree otherwise."
    for axis, n in enumerate(a.shape):
        x, y = np.moveaxis(a, axis, 0), np.moveaxis(b, axis, 0)
        if n > 2 and ((x[1:] == y[:-1]).all() or (y[1:] == x[:-1]).all()):
            return "mask shifted by one", f"Along axis {axis}: `<` against `<=`, or a diagonal."
    for name, other in (("inverted mask", ~b), ("transposed mask", b), ("", ~b)):
        for layout, _, move in layouts(other, a.shape):
            if bool(layout) != (name == "inverted mask") and (move(other) == a).all():
                return name or "inverted mask, transposed", detail
    return None


def _factor(
    a: np.ndarray,
    b: np.ndarray,
    names: Sequence[str],
    near: float,
    sizes: Mapping[str, float],
    single: bool,
) -> Cause | None:
    """The factor of a over b, if it is the same everywhere; empty words for 1."""
    size = float(np.vdot(b, b).real) if np.isfinite(b).all() else math.inf
    if not 0 < size < math.inf:
        return None
    ratio = complex(np.vdot(b, a) / size)
    if ratio == 0 or not np.isfinite(ratio) or not equal(a, ratio * b, near):
        return None
    if abs(ratio - 1) <= max(near, _NEAR):
        return "", ""
    if abs(ratio + 1) <= max(near, _NEAR):
        return "sign", "One is the negative of the other."
    named = factor_name(ratio, sizes)
    constant = bool((a == a.reshape(-1)[:1]).all())
    if constant and named is None and not single:
        return None
    text = f"{ratio.real:.4g}{ratio.imag:+.4g}i"
    if abs(ratio.imag) < 1e-9 * abs(ratio):
        text = f"{ratio.real:.6g}"
    elif abs(ratio.real) < 1e-9 * abs(ratio):
        text = f"{ratio.imag:.4g}i"
    detail = f"{names[0]} is {text} times {names[1]}."
    if named and ("size" in named or "entries" in named):
        detail += " A sum on one side, a mean on the other."
    return f"{FACTOR} {text}" + (f", {named}" if named else ""), detail


def relation(
    first: np.ndarray, second: np.ndarray, names: Sequence[str], order: int = 1
) -> str | None:
    """How an array differs from another of its shape, in a few words; None if unknown."""
    a, b = widened(first), widened(second)
    if a.shape != b.shape:
        return None
    known = np.isfinite(a) & np.isfinite(b)
    if not known.all():
        a, b = a[known], b[known]
    if not (size := max(largest(a), largest(b))):
        return None
    near = min(1e-4, largest(a - b) / size / 100)
    cause = array_cause(a, b, names, order, near, single=True)
    return None if cause is None else cause[0]


def shape_cause(first: tuple[int, ...], second: tuple[int, ...]) -> Cause:
    """Why two results have different shapes."""
    if sorted(first) == sorted(second):
        return "transposed layout", f"The shapes {first} and {second} are permutations."
    if [n for n in first if n != 1] == [n for n in second if n != 1]:
        return "an axis of length 1", "keepdims, or a squeeze, on one side only."
    if () in (first, second):
        return "reduced on one side only", "Apply the same sum or mean on both sides."
    low, high = sorted((first, second), key=math.prod)
    if math.prod(high) == math.prod(low) ** 2 or set(low) == set(high):
        return "unintended broadcasting", "A column (n, 1) against a row (n,) gives (n, n)."
    return "another shape", ""


def equal(a: Any, b: Any, near: float) -> bool:
    """Whether two arrays have equal shapes and agree to a relative error."""
    a, b = np.asarray(a), np.asarray(b)
    return a.shape == b.shape and bool((entry_errors(a, b, max(near, 1e-300), 0.0) <= 1).all())


# --- expressions in values that both sides have


def expression_cause(
    first: Sequence[Expressions],
    second: Sequence[Expressions],
    names: Sequence[str],
    ends: Sequence[Expressions],
) -> Cause | None:
    """Two different expressions in common operands that the sides compute; None if unknown.

    first, second: The expressions of each side's values in the order of the program, of which the
        first ones differ.
    ends: The expressions of each side's whole formula, which are compared unless the first ones
        differ in a constant alone.
    """
    every = lambda side: [e for found in side for e in found]
    for (e, c), (f, d) in itertools.product(every(first), every(second)):
        if c and d and ("sqrt(x)" in e) != ("sqrt(x)" in f) and "sqrt" in e and "sqrt" in f:
            where = ["outside" if "sqrt(x)" in text else "inside" for text in (e, f)]
            words = f"an epsilon {where[0]} of the root in {names[0]}, {where[1]} in {names[1]}"
            return words, f"{expression_text(e, c)} and {expression_text(f, d)}."
    begun = list(itertools.product(first[0], second[0]))
    pairs = [((e, c), (f, d)) for (e, c), (f, d) in begun if e == f]
    for (e, c), (f, d) in (*pairs, *itertools.product(*ends), *begun):
        if e == f and _same(c, d):
            continue
        texts = expression_text(e, c), expression_text(f, d)
        words = f"{texts[0]} in {names[0]}, {texts[1]} in {names[1]}"
        if e == f and e.startswith("c ") and c and d and abs(c + d - 1) < 1e-9:
            return f"{words}: a weight and its complement", "A momentum m against 1 - m."
        return words, "The letters are values that both programs have."
    return None


def expressions_of(a: np.ndarray, operands: Operands) -> Expressions:
    """The expressions in its operands that an array is, with the constant c of each."""
    a = widened(a)
    if not 1 < a.size <= _MOST_ENTRIES or not np.isfinite(a).all():
        return []
    found: dict[str, float | None] = {}
    known = {n: widened(x) for n, x in operands.items() if 0 < x.size <= _MOST_ENTRIES}
    with np.errstate(all="ignore"):
        for name, x in known.items():
            real, alike = not np.iscomplexobj(x), x.shape == a.shape
            for text, f in _FUNCTIONS.items() if alike else ():
                if (real or text not in _REAL) and equal(a, f(x), 1e-8):
                    found[_named(text, x=name)] = None
            if alike:
                found |= {_named(text, x=name): c for text, c in _with_constant(a, x)}
            for axes in _subsets(x.ndim):
                count = math.prod(x.shape[i] for i in axes)
                for text, g in _REDUCTIONS.items() if count > 1 else ():
                    size = x.size if text.endswith("softmax(x)") else x.size // count
                    if size == a.size and equal(
                        a.ravel(), g(x, axis=axes, keepdims=True).ravel(), 1e-8
                    ):
                        found[_named(text, x=name) + f" over {axes}"] = None
        for (n, x), (m, y) in itertools.permutations(known.items(), 2):
            lengths = zip(x.shape[::-1], y.shape[::-1], strict=False)
            joined = all(k == l or 1 in (k, l) for k, l in lengths)
            for text, (h, orders) in (
                _PAIRS.items() if joined and a.ndim in (x.ndim, y.ndim) else ()
            ):
                if (n < m or orders) and equal(a, h(x, y), 1e-8):
                    found[_named(text, x=n, y=m)] = None
    return sorted(found.items(), key=lambda item: len(item[0]))


def _with_constant(a: np.ndarray, x: np.ndarray) -> Iterator[tuple[str, float]]:
    """Expressions in x with one constant c, which is the same for all entries."""
    forms = {"c x": a / x, "x + c": a - x}
    if not np.iscomplexobj(x) and not np.iscomplexobj(a) and (x > 0).all() and (a > 0).all():
        forms["sqrt(x + c)"], forms["sqrt(x) + c"] = a**2 - x, a - np.sqrt(x)
        forms["1 / sqrt(x + c)"], forms["1 / (sqrt(x) + c)"] = a**-2.0 - x, 1 / a - np.sqrt(x)
        forms["x ** c"] = np.log(a) / np.log(x)
    for text, constants in forms.items():
        c = constants.ravel()[0]
        if np.isfinite(constants).all() and np.isreal(c) and np.ptp(np.abs(x)) > 0:
            off = np.abs(constants - c).max()
            if off <= 1e-9 * max(1.0, largest(x), abs(c)) and abs(c) > 10 * off:
                yield text, float(np.real(c))


def _subsets(n: int) -> Iterator[tuple[int, ...]]:
    for count in range(1, n + 1):
        yield from itertools.combinations(range(n), count)


def _named(text: str, **names: str) -> str:
    return re.sub(r"\b[xy]\b", lambda m: names[m[0]], text)


def expression_text(expression: str, c: float | None) -> str:
    """An expression with the number of its constant."""
    return expression if c is None else re.sub(r"\bc\b", f"{c:.4g}", expression)


def _same(c: float | None, d: float | None) -> bool:
    return c == d or (c is not None and d is not None and abs(c - d) <= 1e-9 * abs(c))


def _sigmoid(x: Any) -> Any:
    return 1 / (1 + np.exp(-x))


def _softmax(x: Any, axis: Any, **kept: Any) -> Any:
    e = np.exp(x - x.real.max(axis, keepdims=True))
    return e / e.sum(axis, keepdims=True)


_MOST_ENTRIES = 1 << 15
_FUNCTIONS: dict[str, Callable[[Any], Any]] = {
    "x": lambda x: x,
    "gelu(x)": lambda x: x * 0.5 * (1 + np.vectorize(math.erf, otypes=[float])(x / math.sqrt(2))),
    "tanh gelu(x)": lambda x: x * _sigmoid(math.sqrt(8 / math.pi) * (x + 0.044715 * x**3)),
    "silu(x)": lambda x: x * _sigmoid(x),
    "relu(x)": lambda x: np.maximum(x, 0),
    "elu(x)": lambda x: np.where(x > 0, x, np.expm1(np.minimum(x, 0))),
    "leaky_relu(x)": lambda x: np.where(x > 0, x, 0.01 * x),
    "softplus(x)": lambda x: np.logaddexp(x, 0),
    "sign(x)": np.sign,
    "sigmoid(x)": _sigmoid,
    "tanh(x)": np.tanh,
    "sin(x)": np.sin,
    "cos(x)": np.cos,
    "exp(x)": np.exp,
    "log(x)": np.log,
    "log1p(x)": np.log1p,
    "expm1(x)": np.expm1,
    "sqrt(x)": np.sqrt,
    "1 / sqrt(x)": lambda x: 1 / np.sqrt(x),
    "1 / x": lambda x: 1 / x,
    "abs(x)": np.abs,
    "square(x)": lambda x: x * x,
    "x ** 3": lambda x: x**3,
    "conj(x)": np.conj,
    "real(x)": np.real,
    "imag(x)": np.imag,
}
_REAL = [*_FUNCTIONS][1:9]  # not of complex numbers
_REDUCTIONS: dict[str, Callable[..., Any]] = {
    "sum(x)": np.sum,
    "mean(x)": np.mean,
    "max(x)": np.max,
    "min(x)": np.min,
    "var(x)": np.var,
    "var(x, ddof=1)": lambda x, **kept: np.var(x, ddof=1, **kept),
    "std(x)": np.std,
    "std(x, ddof=1)": lambda x, **kept: np.std(x, ddof=1, **kept),
    "norm(x)": lambda x, **kept: np.sqrt(np.sum(np.abs(x) ** 2, **kept)),
    "softmax(x)": _softmax,
    "log_softmax(x)": lambda x, **kept: np.log(_softmax(x, **kept)),
}
_PAIRS: dict[str, tuple[Callable[[Any, Any], Any], bool]] = {  # and whether the order counts
    "x + y": (np.add, False),
    "x - y": (np.subtract, True),
    "x * y": (np.multiply, False),
    "x / y": (np.divide, True),
    "x * conj(y)": (lambda x, y: x * np.conj(y) if np.iscomplexobj(y) else None, True),
    "maximum(x, y)": (np.maximum, False),
    "minimum(x, y)": (np.minimum, False),
}


# --- names of factors


def factor_name(ratio: complex, sizes: Mapping[str, float]) -> str | None:
    """The likely meaning of a factor: a size, its root, n / (n - 1), a product of two sizes, 2.

    Args:
        ratio: The factor.
        sizes: Lengths that occur in the program, by name.

    Example:
        >>> factor_name(1 / 5, {"the batch size": 5})
        'the batch size'
    """
    ratio = complex(ratio)
    if abs(ratio.imag) > _NEAR * abs(ratio):
        turned = abs(abs(ratio) - 1) < _NEAR and abs(ratio.real) < _NEAR
        return "the imaginary unit" if turned else None
    factor = abs(ratio)
    is_ = lambda n: abs(factor / n - 1) < _NEAR or abs(factor * n - 1) < _NEAR
    for name, size in sizes.items():
        if size > 1 and is_(size):
            return name
        if size > 1 and is_(size / (size - 1)):
            return f"n / (n - 1) for n = {size}, {name}: unbiased and biased"
        if size > 2 and is_(math.sqrt(size / (size - 1))):
            return f"the root of n / (n - 1) for n = {size}, {name}: unbiased and biased"
    if is_(2.0):
        return "a half square, or counted twice"
    for name, size in sizes.items():
        if size > 2 and is_(math.sqrt(size)):
            return f"the root of {name}"
    several = {size: name for name, size in reversed(list(sizes.items())) if size > 1}
    for first, second in combinations_with_replacement(sorted(several), 2):
        if is_(first * second):
            return f"{several[first]}, times {several[second]}"
    return None
