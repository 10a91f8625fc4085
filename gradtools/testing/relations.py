"""How one of two arrays that should be equal differs from the other, in a few words.

`related` looks for a relation of the entries: `cross_check` applies it to two results,
`first_divergence` to the values and cotangents of two operations, and the other checks to a
derivative and its differences. A relation must hold for every entry, much more closely than the
arrays agree. `expression_cause` compares the formulas that two sides compute from values that both
have: ``gelu(x)`` against ``tanh gelu(x)``, ``x + 1e-05`` against ``x + 0.001``.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from itertools import permutations
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
)  # relations of arrays with the same entries in another order
MASKED = 9e3  # larger numbers are taken for entries of a mask
_NEAR = 1e-6  # the relative error at which a factor is a known number
_MOST_AXES = 5


class Relation(NamedTuple):
    """How two arrays are related: in a few words, and a sentence of evidence or advice."""

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
    """The first relation that holds between two differing arrays; None if none does.

    Args:
        a: The first side's array.
        b: The second side's array, of the same or another shape.
        names: The names of the sides.
        order: The order of the derivative.
        near: The relative error at which a relation holds.
        sizes: Lengths that occur in the program by name, which explain a factor.
        single: Whether to name an unknown factor of constant arrays, which exists for any two.
    """
    if a.dtype == b.dtype == bool:
        return _mask_relation(a, b)
    found = _relations(widened(a), widened(b), names, order, near, sizes or {}, single)
    return next(map(Relation, found), None)


def _relations(
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
            found = _mask_relation(*masks)
            yield found.name if found else "another mask"
    conjugates = (False, True) if a.dtype.kind == "c" and b.imag.any() else (False,)
    moves = (*layouts(b, a.shape), *(_rearrangements(b) if same else ()))
    for (how, move), conjugate in itertools.product(moves, conjugates):
        y = move(b).conj() if conjugate else move(b)
        factor = _factor(a, y, near, sizes, single)
        if factor is not None and (how or conjugate or factor):
            yield ", ".join(filter(None, [how, "conjugate" * conjugate, factor]))
    for axis, n in enumerate(a.shape if same else ()):
        ends = np.moveaxis(a, axis, 0), np.moveaxis(b, axis, 0)
        for x, y in (ends, ends[::-1]) if n > 3 else ():
            if np.ptp(np.abs(y[1:])) > 0 and equal(x[:-1], y[1:], near):
                yield f"shifted by one along axis {axis}"
    for x, y, name in both_ways if same else ():
        absent = (x == 0) & (y != 0)
        if absent.any() and (x != 0).any() and equal(x, np.where(absent, 0, y), near):
            yield f"{lost} in places in {name}"


def layouts(x: np.ndarray, shape: tuple[int, ...]) -> Moves:
    """Moves of x to a shape: none, a reshape, axes permuted before or after one."""
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
    """Moves of x to its own shape that change the order of its entries."""
    if x.ndim > 1 and x.shape != x.T.shape:
        yield "transposed layout", lambda x: x.T.reshape(x.shape)
        yield "transposed layout", lambda x: x.reshape(x.shape[::-1]).T
    for axis, n in enumerate(x.shape):
        every = np.arange(n)
        orders = [(f"reversed axis {axis}", every[::-1])] if n > 2 else []
        for count in (k for k in (2, 3, 4) if n > 2 and n % k == 0):
            for order in [*permutations(range(count))][1:]:
                blocks = every.reshape(count, -1)[list(order)].ravel()
                orders.append((f"permuted blocks of axis {axis}", blocks))
        if n > 2 and n % 2 == 0:  # adjacent entries against two halves, as in rotary embeddings
            pairs = every.reshape(-1, 2).T, every.reshape(2, -1).T
            orders += [(f"interleaved axis {axis}", order.ravel()) for order in pairs]
        for name, order in orders:
            yield name, lambda x, order=order, axis=axis: np.take(x, order, axis)  # type: ignore[misc]


def _mask_relation(a: np.ndarray, b: np.ndarray) -> Relation | None:
    """How two masks are related: inverted, transposed, shifted by one."""
    if a.shape != b.shape or a.all() or b.all() or not (a.any() and b.any()):
        return None
    for axis, n in enumerate(a.shape):
        x, y = np.moveaxis(a, axis, 0), np.moveaxis(b, axis, 0)
        if n > 2 and ((x[1:] == y[:-1]).all() or (y[1:] == x[:-1]).all()):
            return Relation("mask shifted by one")
    names = {"inverted mask": ~b, "transposed mask": b, "inverted mask, transposed": ~b}
    for name, other in names.items():
        for layout, move in layouts(other, a.shape):
            if bool(layout) != (name == "inverted mask") and (move(other) == a).all():
                return Relation(name)
    return None


def _factor(a: np.ndarray, b: np.ndarray, near: float, sizes: Any, single: bool) -> str | None:
    """The factor of a over b in words, if it is the same everywhere; empty for 1."""
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
    real, imaginary = f"{ratio.real:.6g}", f"{ratio.imag:.4g}i"
    if abs(ratio.imag) < 1e-9 * abs(ratio):
        text = real
    else:
        text = imaginary if abs(ratio.real) < 1e-9 * abs(ratio) else f"{real} + {imaginary}"
    return f"{FACTOR} {text}" + (f", {named}" if named else "")


def factor_name(ratio: complex, sizes: Mapping[str, float]) -> str | None:
    """The likely meaning of a factor: a size, its root, n / (n - 1), 2, the imaginary unit.

    Args:
        ratio: The factor.
        sizes: Lengths that occur in the program, by name.

    Example:
        >>> factor_name(1 / 5, {"the batch size": 5})
        'the batch size'
    """
    ratio = complex(ratio)
    size = abs(ratio)
    if abs(ratio.imag) > _NEAR * size:
        return (
            "the imaginary unit" if abs(ratio - 1j * ratio.imag) < _NEAR > abs(size - 1) else None
        )
    table: list[tuple[float, str]] = []
    for name, n in ((name, n) for name, n in sizes.items() if n > 1):
        sample = f"n / (n - 1) for n = {n}, {name}: unbiased and biased"
        table += [(n, name), (n / (n - 1), sample)]
        table += [(math.sqrt(n / (n - 1)), f"the root of {sample}")] if n > 2 else []
    table.append((2.0, "a half square, or counted twice"))
    table += [(math.sqrt(n), f"the root of {name}") for name, n in sizes.items() if n > 2]
    is_ = lambda n: abs(size / n - 1) < _NEAR or abs(size * n - 1) < _NEAR
    return next((text for n, text in table if is_(n)), None)


def relation(
    first: np.ndarray, second: np.ndarray, names: Sequence[str] = SIDES, order: int = 1
) -> str | None:
    """How the finite entries of an array differ from another's of its shape, in a few words."""
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
    """Whether two arrays have equal shapes and agree to a relative error."""
    a, b = np.asarray(a), np.asarray(b)
    return a.shape == b.shape and bool((entry_errors(a, b, max(near, 1e-300), 0.0) <= 1).all())


# --- expressions in values that both sides have


class Expression(NamedTuple):
    """A formula in letters, such as "c x", and its constant c, None without one."""

    form: str
    c: float | None = None

    def __str__(self) -> str:
        return self.form if self.c is None else re.sub(r"\bc\b", f"{self.c:.4g}", self.form)

    @property
    def letters(self) -> set[str]:
        """The letters of its operands."""
        return {*re.findall(r"\b[u-z]\b", self.form)}

    @property
    def function(self) -> str:
        """The formula without the names of its operands."""
        return re.sub(r"\b[u-z]\b", "_", self.form)

    @property
    def head(self) -> str:
        """The formula without its axes."""
        return self.form.partition(" over ")[0]

    def same(self, other: Expression) -> bool:
        """Whether both are one formula with one constant."""
        c, d = self.c, other.c
        near = c is not None and d is not None and abs(c - d) <= 1e-9 * abs(c)
        return self.form == other.form and (c == d or near)


Expressions = list[Expression]


def expression_cause(
    first: Sequence[Expressions],
    second: Sequence[Expressions],
    direct: Sequence[Collection[str | None]] = ((), ()),
    sizes: Mapping[str, float] | None = None,
) -> str:
    """Two different expressions in common operands that two lines compute; empty if unknown.

    Args:
        first: The expressions of the values of PyTorch's line, in order.
        second: The same for JAX's line.
        direct: The letters of the operands of each line.
        sizes: Lengths that occur in the program by name, which explain a factor.
    """
    ours, theirs = ([e for step in side for e in step] for side in (first, second))
    for e, f in itertools.product(ours, theirs):
        roots = "sqrt" in e.form and "sqrt" in f.form and bool(e.c and f.c)
        if roots and ("sqrt(x)" in e.form) != ("sqrt(x)" in f.form):
            where = ["outside" if "sqrt(x)" in x.form else "inside" for x in (e, f)]
            return f"an epsilon {where[0]} of the root in torch, {where[1]} in jax"
    if _is_exchange(ours, theirs):
        return "exchanged operands: gates, heads, or channels in another order"
    alike = [(e, f) for e, f in itertools.product(ours, theirs) if e.head == f.head]
    last = lambda side: next((step for step in reversed(side) if step), ())
    ends, begun = (
        itertools.product(last(first), last(second)),
        itertools.product(first[0], second[0]),
    )
    same_letters = lambda pair: pair[0].letters != pair[1].letters
    for e, f in (*alike, *sorted(ends, key=same_letters), *sorted(begun, key=same_letters)):
        if not any(e.same(x) for x in theirs) and not any(f.same(x) for x in ours):
            return _both(e, f, sizes or {})
    for k, lines in enumerate((first, second)):  # a function that one line leaves out
        for e in lines[-1]:
            if len(e.letters) == 1 and e.letters <= {*direct[1 - k]} and e.form not in e.letters:
                sides = [e, Expression(next(iter(e.letters)))][:: -1 if k else 1]
                return _both(sides[0], sides[1], sizes or {})
    return ""


def _is_exchange(ours: Expressions, theirs: Expressions) -> bool:
    """Whether two lines apply the same functions to the same values, but in exchanged roles."""
    forms, letters, functions = (
        [sorted(f(e) for e in side) for side in (ours, theirs)]
        for f in (lambda e: e.form, lambda e: sorted(e.letters), lambda e: e.function)
    )
    used = [{x for e in side for x in e} for side in letters]
    return forms[0] != forms[1] and functions[0] == functions[1] and used[0] == used[1]


def _both(e: Expression, f: Expression, sizes: Mapping[str, float]) -> str:
    """The text for two expressions, with the meaning of a constant if it is known."""
    words = f"{e} in torch, {f} in jax"
    if len(letters := e.letters | f.letters) == 1:
        words = re.sub(rf"\b{letters.pop()}\b", "x", words)
    if e.form == f.form and e.form.startswith("c ") and abs((e.c or 0) + (f.c or 0) - 1) < 1e-9:
        return f"{words}: a weight and its complement"
    scaled = e if e.form == f"c {f.form}" else f if f.form == f"c {e.form}" else None
    known = factor_name(scaled.c or 0, sizes) if scaled else None
    return f"{words}: {known}" if known else words


def expressions_of(a: np.ndarray, operands: Mapping[str, np.ndarray]) -> Expressions:
    """The expressions in the operands, by letter, that equal an array; the shortest first."""
    a = widened(a)
    if not 1 < a.size <= _MOST_ENTRIES or not np.isfinite(a).all():
        return []
    found: dict[Expression, None] = {}
    known = {n: widened(x) for n, x in operands.items() if 0 < x.size <= _MOST_ENTRIES}
    with np.errstate(all="ignore"):
        for name, x in known.items():
            real, alike = not np.iscomplexobj(x), x.shape == a.shape
            for text, f in _FUNCTIONS.items() if alike else ():
                if (real or text not in _REAL) and equal(a, f(x), 1e-8):
                    found[Expression(_named(text, x=name))] = None
            for e in with_constant(a, x):
                found[Expression(_named(e.form, x=name), e.c)] = None
            every = (itertools.combinations(range(x.ndim), n + 1) for n in range(x.ndim))
            for axes, (text, g) in itertools.product(itertools.chain(*every), _REDUCTIONS.items()):
                count = math.prod(x.shape[i] for i in axes)
                size = x.size if text.endswith("softmax(x)") else x.size // count
                if count > 1 and size == a.size:
                    y = g(x, axis=axes, keepdims=True).ravel()
                    if equal(a.ravel(), y, 1e-8):
                        found[Expression(_named(text, x=name) + f" over {axes}")] = None
        for (n, x), (m, y) in itertools.permutations(known.items(), 2):
            lengths = zip(x.shape[::-1], y.shape[::-1], strict=False)
            fits = a.ndim in (x.ndim, y.ndim) and all(k == l or 1 in (k, l) for k, l in lengths)
            for text, (h, orders) in _PAIRS.items() if fits else ():
                if (n < m or orders) and equal(a, h(x, y), 1e-8):
                    found[Expression(_named(text, x=n, y=m))] = None
    return sorted(found, key=lambda e: len(e.form))


def with_constant(a: np.ndarray, x: np.ndarray) -> Expressions:
    """The expressions in x and one constant c, the same for all entries, that equal an array."""
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
                    found.append(Expression(text, float(np.real(c))))
    return found


def _named(text: str, **names: str) -> str:
    return re.sub(r"\b[xy]\b", lambda m: names[m[0]], text)


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
