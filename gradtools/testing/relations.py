"""How one of two arrays that should be equal differs from the other: one table of relations.

A relation has a name, a test and a sentence. `cross_check` looks for one between two results,
`first_divergence` between the values and cotangents of two operations, and the other checks between
a derivative and its differences. It must hold for every entry, much more closely than the arrays
agree. `related` tries moves of the entries, each alone and with a conjugate, a sign or a factor.
`expression_cause` compares what two sides compute from values that both have: ``gelu(x)`` against
``tanh gelu(x)``, ``x + 1e-05`` against ``x + 0.001``.
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
LAYOUTS = ("transposed", "permuted", "interleaved", "reversed")  # the same entries, elsewhere
_NEAR = 1e-6  # the relative error at which a factor is a known number
_MOST_AXES = 5
MASKED = 9e3  # numbers as large as this are a mask's
_CONJUGATE = "One side conjugates: another convention of a complex derivative."


class Relation(NamedTuple):
    """How two arrays are related: in a few words, and a sentence of evidence or advice."""

    name: str
    sentence: str = ""


Move = Callable[[np.ndarray], np.ndarray]
Moves = Iterator[tuple[Relation, Move]]


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
        b: The second side's, of the same shape or another.
        names: The names of the sides.
        order: The order of the derivative.
        near: The relative error at which a relation holds.
        sizes: Lengths that occur in the program by name, which explain a factor.
        single: Whether to name an unknown factor of constant arrays, which any two have.
    """
    if a.dtype == b.dtype == bool:
        return _mask_relation(a, b)
    a, b = widened(a), widened(b)
    return next(_relations(a, b, names, order, near, sizes or {}, single), None)


def _relations(
    a: np.ndarray, b: np.ndarray, names: Any, order: int, near: float, sizes: Any, single: bool
) -> Iterator[Relation]:
    lost = "stopped gradient" if order else "zero"
    both_ways = ((a, b, names[0]), (b, a, names[1]))  # each array as the wrong one
    for x, y, name in both_ways:
        if not x.any() and y.any():
            yield Relation(f"{lost} in {name}", f"It is exactly zero in {name}.")
    same = a.shape == b.shape
    if same and a.dtype.kind != "c" != b.dtype.kind:  # numbers of masks: -1e9 or -inf
        masks = a < -MASKED, b < -MASKED
        kept = ~masks[0] & ~masks[1]
        differ = masks[0].any() and masks[1].any() and (masks[0] != masks[1]).any()
        if differ and equal(a[kept], b[kept], _NEAR):
            unknown = Relation("another mask", "Other entries are masked.")
            yield _mask_relation(*masks) or unknown
    conjugates = (False, True) if a.dtype.kind == "c" and b.imag.any() else (False,)
    moves = (*layouts(b, a.shape), *(_rearrangements(b) if same else ()))
    for (how, move), conjugate in itertools.product(moves, conjugates):
        y = move(b).conj() if conjugate else move(b)
        if (factor := _factor(a, y, names, near, sizes, single)) is not None:
            parts = [how, Relation("conjugate", _CONJUGATE) if conjugate else Relation(""), factor]
            words = [", ".join(p.name for p in parts if p.name)]
            if words[0]:
                yield Relation(words[0], " ".join(p.sentence for p in parts if p.sentence))
    for axis, n in enumerate(a.shape if same else ()):
        ends = np.moveaxis(a, axis, 0), np.moveaxis(b, axis, 0)
        for x, y in (ends, ends[::-1]) if n > 3 else ():
            if np.ptp(np.abs(y[1:])) > 0 and equal(x[:-1], y[1:], near):
                words = f"shifted by one along axis {axis}"
                yield Relation(words, "Padding, a causal mask, or an offset.")
    for x, y, name in both_ways if same else ():
        absent = (x == 0) & (y != 0)
        if absent.any() and (x != 0).any() and equal(x, np.where(absent, 0, y), near):
            count = f"{int(absent.sum())} of {absent.size} entries are zero, the others agree."
            yield Relation(f"{lost} in places in {name}", count)


def layouts(x: np.ndarray, shape: tuple[int, ...]) -> Moves:
    """Moves of x to a shape: none, a reshape, axes permuted before or after one."""
    if x.shape == shape:
        yield Relation(""), lambda x: x
    thin, target = ([n for n in s if n != 1] for s in (x.shape, shape))
    if x.size != math.prod(shape) or max(len(thin), len(target)) > _MOST_AXES:
        return
    alike = sorted(thin) == sorted(target)
    if x.shape != shape and (not alike or thin == target):
        yield Relation("reshaped layout"), lambda x: x.reshape(shape)
    for p in [*permutations(range(len(thin)))][1:]:
        if not alike or [thin[i] for i in p] == target:
            how = Relation("transposed layout", f"Axis i is axis {list(p)}[i] of the other.")
            yield how, lambda x, p=p: x.reshape(thin).transpose(p).reshape(shape)  # type: ignore[misc]
    for p in [*permutations(range(len(target)))][1:] if len(target) > len(thin) else ():
        split, back = [target[i] for i in p], np.argsort(p)
        move = lambda x, s=split, q=back: x.reshape(s).transpose(q).reshape(shape)  # type: ignore[misc]
        yield Relation("transposed layout"), move


def _rearrangements(x: np.ndarray) -> Moves:
    """Moves of x to its own shape that change the order of its entries."""
    if x.ndim > 1 and x.shape != x.T.shape:
        how = Relation("transposed layout", "It was reshaped where it should be transposed.")
        yield how, lambda x: x.T.reshape(x.shape)
        yield how, lambda x: x.reshape(x.shape[::-1]).T
    for axis, n in enumerate(x.shape):
        take = lambda order, axis=axis: lambda x: np.take(x, order, axis)
        if n <= 2:
            continue
        every = np.arange(n)
        flipped = "A flipped kernel, or a sequence read backwards."
        yield Relation(f"reversed axis {axis}", flipped), take(every[::-1])
        for count in (k for k in (2, 3, 4) if n % k == 0):
            for order in [*permutations(range(count))][1:]:
                detail = f"Block i is block {list(order)}[i]: gates, heads, or channels."
                blocks = every.reshape(count, -1)[list(order)].ravel()
                yield Relation(f"permuted blocks of axis {axis}", detail), take(blocks)
        for order in (every.reshape(-1, 2).T, every.reshape(2, -1).T) if n % 2 == 0 else ():
            how = Relation(f"interleaved axis {axis}", "Neighbours against two halves (RoPE).")
            yield how, take(order.ravel())


def _mask_relation(a: np.ndarray, b: np.ndarray) -> Relation | None:
    """How two masks are related: inverted, transposed, shifted by one."""
    if a.shape != b.shape or a.all() or b.all() or not (a.any() and b.any()):
        return None
    for axis, n in enumerate(a.shape):
        x, y = np.moveaxis(a, axis, 0), np.moveaxis(b, axis, 0)
        if n > 2 and ((x[1:] == y[:-1]).all() or (y[1:] == x[:-1]).all()):
            detail = f"Along axis {axis}: `<` against `<=`, or a diagonal."
            return Relation("mask shifted by one", detail)
    for name, other in (("inverted mask", ~b), ("transposed mask", b), ("", ~b)):
        for layout, move in layouts(other, a.shape):
            if bool(layout.name) != (name == "inverted mask") and (move(other) == a).all():
                return Relation(name or "inverted mask, transposed")
    return None


def _factor(
    a: np.ndarray, b: np.ndarray, names: Any, near: float, sizes: Any, single: bool
) -> Relation | None:
    """The factor of a over b, if it is the same everywhere; no words for 1."""
    size = float(np.vdot(b, b).real) if np.isfinite(b).all() else math.inf
    if not 0 < size < math.inf:
        return None
    ratio = complex(np.vdot(b, a) / size)
    if ratio == 0 or not np.isfinite(ratio) or not equal(a, ratio * b, near):
        return None
    if abs(ratio - 1) <= max(near, _NEAR):
        return Relation("")
    if abs(ratio + 1) <= max(near, _NEAR):
        return Relation("sign", "One is the negative of the other.")
    named = factor_name(ratio, sizes)
    if named is None and not single and bool((a == a.reshape(-1)[:1]).all()):
        return None
    text = f"{ratio.real:.4g}{ratio.imag:+.4g}i"
    if abs(ratio.imag) < 1e-9 * abs(ratio):
        text = f"{ratio.real:.6g}"
    elif abs(ratio.real) < 1e-9 * abs(ratio):
        text = f"{ratio.imag:.4g}i"
    detail = f"{names[0]} is {text} times {names[1]}."
    if named and ("size" in named or "entries" in named):
        detail += " A sum on one side, a mean on the other."
    return Relation(f"{FACTOR} {text}" + (f", {named}" if named else ""), detail)


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
    table: list[tuple[float, str]] = []
    for name, n in ((name, n) for name, n in sizes.items() if n > 1):
        sample = f"n / (n - 1) for n = {n}, {name}: unbiased and biased"
        table += [(n, name), (n / (n - 1), sample)]
        table += [(math.sqrt(n / (n - 1)), f"the root of {sample}")] if n > 2 else []
    table.append((2.0, "a half square, or counted twice"))
    table += [(math.sqrt(n), f"the root of {name}") for name, n in sizes.items() if n > 2]
    several = {n: name for name, n in reversed(list(sizes.items())) if n > 1}
    for n, m in itertools.combinations_with_replacement(sorted(several), 2):
        table.append((n * m, f"{several[n]}, times {several[m]}"))
    size = abs(ratio)
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
        second: Those of JAX's line.
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
    ends, begun = (itertools.product(first[k], second[k]) for k in (-1, 0))
    same_letters = lambda pair: pair[0].letters != pair[1].letters
    for e, f in (*alike, *sorted(ends, key=same_letters), *sorted(begun, key=same_letters)):
        if not any(e.same(x) for x in theirs) and not any(f.same(x) for x in ours):
            return _both(e, f, sizes or {})
    for k, lines in enumerate((first, second)):  # a function that one line leaves out
        for e in lines[-1]:
            if len(e.letters) == 1 and e.letters <= {*direct[1 - k]} and e.form not in e.letters:
                return _both(*[e, Expression(*e.letters)][:: -1 if k else 1], sizes or {})
    return ""


def _is_exchange(ours: Expressions, theirs: Expressions) -> bool:
    """Whether two lines apply the same functions to the same values, but each to another one."""
    forms, letters, functions = (
        [sorted(f(e) for e in side) for side in (ours, theirs)]
        for f in (lambda e: e.form, lambda e: sorted(e.letters), lambda e: e.function)
    )
    used = [{x for e in side for x in e} for side in letters]
    return forms[0] != forms[1] and functions[0] == functions[1] and used[0] == used[1]


def _both(e: Expression, f: Expression, sizes: Mapping[str, float]) -> str:
    """Two expressions, and what the constants in them may be."""
    words = f"{e} in torch, {f} in jax"
    if len(letters := e.letters | f.letters) == 1:
        words = re.sub(rf"\b{letters.pop()}\b", "x", words)
    if e.form == f.form and e.form.startswith("c ") and abs((e.c or 0) + (f.c or 0) - 1) < 1e-9:
        return f"{words}: a weight and its complement"
    scaled = e if e.form == f"c {f.form}" else f if f.form == f"c {e.form}" else None
    known = factor_name(scaled.c or 0, sizes) if scaled else None
    return f"{words}: {known}" if known else words


def expressions_of(a: np.ndarray, operands: Mapping[str, np.ndarray]) -> Expressions:
    """The expressions that an array is in its operands, by letter; the shortest ones first."""
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
            for text, c in _with_constant(a, x) if alike else ():
                found[Expression(_named(text, x=name), c)] = None
            for axes in (
                s for n in range(x.ndim) for s in itertools.combinations(range(x.ndim), n + 1)
            ):
                count = math.prod(x.shape[i] for i in axes)
                for text, g in _REDUCTIONS.items() if count > 1 else ():
                    size = x.size if text.endswith("softmax(x)") else x.size // count
                    if size == a.size and equal(
                        a.ravel(), g(x, axis=axes, keepdims=True).ravel(), 1e-8
                    ):
                        found[Expression(_named(text, x=name) + f" over {axes}")] = None
        for (n, x), (m, y) in itertools.permutations(known.items(), 2):
            lengths = zip(x.shape[::-1], y.shape[::-1], strict=False)
            joined = all(k == l or 1 in (k, l) for k, l in lengths)
            for text, (h, orders) in (
                _PAIRS.items() if joined and a.ndim in (x.ndim, y.ndim) else ()
            ):
                if (n < m or orders) and equal(a, h(x, y), 1e-8):
                    found[Expression(_named(text, x=n, y=m))] = None
    return sorted(found, key=lambda e: len(e.form))


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
_REAL = [*_FUNCTIONS]  # not of complex numbers
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
_PAIRS: dict[str, tuple[Callable[[Any, Any], Any], bool]] = {  # and whether the order counts
    "x + y": (np.add, False),
    "x - y": (np.subtract, True),
    "x * y": (np.multiply, False),
    "x / y": (np.divide, True),
    "x * conj(y)": (lambda x, y: x * np.conj(y) if np.iscomplexobj(y) else None, True),
    "maximum(x, y)": (np.maximum, False),
    "minimum(x, y)": (np.minimum, False),
}
