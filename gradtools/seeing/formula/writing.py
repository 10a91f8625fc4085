"""An expression as mathematics.

Whole arrays are written where that is unambiguous: products of matrices by juxtaposition, the
elementwise product as a circled dot, sums over axes by their letters. Axes align by their
letters, so a broadcast leaves no trace. Where whole arrays do not say it (three axes and more,
the same axis twice), `Writer.whole` raises `NeedsIndices`, and the statement is written entry by
entry with `Writer.entry`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from math import prod
from typing import Any

from gradtools.seeing.formula import typesetting as ts
from gradtools.seeing.formula.algebra import conj, constant_of, contracts, power
from gradtools.seeing.formula.axes import Axes, primed
from gradtools.seeing.formula.expressions import Expr
from gradtools.seeing.formula.functions import FUNCTIONS
from gradtools.seeing.formula.products import (
    Defined,
    Factors,
    chain,
    display_factors,
    summed_length,
)
from gradtools.seeing.formula.typesetting import (
    ATOM,
    BIG,
    POWER,
    PRODUCT,
    SUM,
    Written,
    bracket,
    function,
    join,
    negative,
    number,
    over,
    subscript,
    summed,
    superscript,
)


class NeedsIndices(Exception):
    """Whole arrays do not say it."""


class Writer:
    """Writes expressions.

    Attributes:
        axes: The letters of axes.
        names: What is written by a name.
        defined: What has been said already, by name.
        notes: What the reader must know about the signs that were used.
    """

    def __init__(self, axes: Axes) -> None:
        self.axes = axes
        self.names: dict[Expr, Written] = {}
        self.defined = Defined()
        self.notes: dict[str, None] = {}
        self._as_mean: set[Expr] = set()

    def define(self, x: Expr) -> None:
        """Say that a line has told what x is: from here on it may stand for several factors."""
        self.defined.add(x)

    # Whole arrays.

    def whole(self, x: Expr) -> Written:
        """The array; an expression without axes can always be written.

        Raises:
            NeedsIndices: It cannot be said without indices.
        """
        try:
            return self._whole(x)
        except NeedsIndices:
            if x.rank:
                raise
            return self.entry(x, ())

    def _whole(self, x: Expr) -> Written:
        if x in self.names:
            return self.names[x]
        constant = constant_of(x)
        if constant is not None:
            return number(constant)
        if x.op == "einsum":
            return self._product(x)
        if x.op == "add":
            self._must_align(x)
            return self.sum_of([self.whole(t) for t in self._in_order(x.args)])
        if x.op in FUNCTIONS:
            self._must_align(x)
            return self._function(x, [self.whole(a) for a in x.args], x.rank > 1)
        if x.op in _PRIMITIVES:
            return _PRIMITIVES[x.op](self, x)
        return function(x.op, [self.whole(a) for a in x.args])

    def sum_of(self, terms: list[Written]) -> Written:
        """A sum; the terms without a minus come first."""
        terms = sorted(terms, key=lambda t: t.text.startswith("-"))
        return summed(terms)

    def _in_order(self, terms: Sequence[Expr]) -> list[Expr]:
        """What is composed first, then names, then numbers."""

        def key(x: Expr) -> int:
            if constant_of(x) is not None:
                return 2
            plain = x.op == "einsum" and len(x.args) == 1 and not contracts(x)
            return int((x.args[0] if plain else x) in self.names)

        return sorted(terms, key=key)

    def _must_align(self, x: Expr) -> None:
        """Arguments with fewer axes align by letters, which must all differ."""
        letters = self.axes.letters(x)
        if len(set(letters)) == len(letters):
            return
        for a in x.args:
            if a.op == "einsum" and constant_of(a) is None and a not in self.names:
                _, _, labels = display_factors(a, self.names, False, self.defined)
                if not {l for names in labels for l in names} >= set(range(x.rank)):
                    raise NeedsIndices

    # Functions of each place.

    def _function(self, x: Expr, args: list[Written], matrix: bool) -> Written:
        if x.op in _FUNCTIONS:
            return _FUNCTIONS[x.op](x, args, matrix)
        return function(x.op, args)

    # Products.

    def _product(self, x: Expr) -> Written:
        coefficient, factors, labels = display_factors(x, self.names, False, self.defined)
        found = self._as_trace(x, factors, labels)
        f = Factors(coefficient, factors, labels, x)
        if found is None:
            f.apart()
            with self._mean_inside(f):
                found = self._core(f)
        else:
            f.apart()
        return self._with_scalars(f, found)

    @contextmanager
    def _mean_inside(self, f: Factors) -> Iterator[None]:
        """A factor that is a sum, under a coefficient that divides by its length, is a mean."""
        added = None
        for a, _ in f.arrays:
            count = summed_length(a)
            if a in self.names or count < 2 or added or isinstance(f.coefficient, complex):
                continue
            if abs(abs(f.coefficient) * count - 1) < 1e-12:
                added = a
        if added is None:
            yield
            return
        f.coefficient = 1.0 if f.coefficient > 0 else -1.0
        self._as_mean.add(added)
        try:
            yield
        finally:
            self._as_mean.discard(added)

    def _as_trace(self, x: Expr, factors: list[Expr], labels: list) -> Written | None:
        big = [(f, n) for f, n in zip(factors, labels, strict=True) if f.rank]
        if len(big) != 1 or big[0][0].rank != 2 or big[0][1][0] != big[0][1][1]:
            return None
        inner = self.whole(big[0][0])
        return function("diag" if x.rank else "tr", [inner])

    def _core(self, f: Factors) -> Written | None:
        """What has axes; None where nothing has."""
        if not f.arrays and not f.below:
            return None
        turned = self._as_transpose(f)
        if turned is not None:
            return turned
        for attempt in (self._inner_product, self._as_chain, self._aligned):
            found = attempt(f)
            if found is not None:
                return found
        raise NeedsIndices

    def _as_transpose(self, f: Factors) -> Written | None:
        """One array as it is, or with its last two axes exchanged."""
        if len(f.arrays) != 1 or f.below or f.summed:
            return None
        ((x, names),) = f.arrays
        n = f.target.rank
        if names == tuple(range(n)):
            return self.whole(x)
        if n >= 2 and names == (*range(n - 2), n - 1, n - 2):
            return self.transposed(x)
        return None

    def _inner_product(self, f: Factors) -> Written | None:
        """A full sum over two factors, or over one squared."""
        if f.out or f.below or not f.summed:
            return None
        if any(set(n) != f.summed or len(set(n)) < len(n) for _, n in f.arrays):
            return None
        if any(n != f.arrays[0][1] for _, n in f.arrays):
            return None
        if len(f.arrays) == 1:
            return self._full_sum(f)
        if any(a.is_complex for a, _ in f.arrays):
            return self._complex_inner_product(f)
        if self._is_mean(f):
            return None
        first, *rest = [self.whole(a) for a, _ in self._sorted(f.arrays)]
        second = rest[0] if len(rest) == 1 else self._hadamard(rest)
        return Written(
            f"⟨{first.text}, {second.text}⟩",
            rf"\left\langle {first.latex}, {second.latex} \right\rangle",
        )

    def _complex_inner_product(self, f: Factors) -> Written | None:
        """<a, b> where the first is conjugated."""
        starred = [a for a, _ in f.arrays if a.op == "conj"]
        if len(f.arrays) != 2 or len(starred) != 1:
            return None
        (other,) = [a for a, _ in f.arrays if a is not starred[0]]
        first, second = self.whole(starred[0].args[0]), self.whole(other)
        return Written(
            f"⟨{first.text}, {second.text}⟩",
            rf"\left\langle {first.latex}, {second.latex} \right\rangle",
        )

    def _full_sum(self, f: Factors) -> Written | None:
        ((x, _),) = f.arrays
        if self._is_mean(f) or x in self.names:
            return None
        squared = x.op == "power" and x["exponent"] == 2
        if not squared or x.is_complex:
            return None
        base = self.whole(x.args[0].args[0] if x.args[0].op == "abs" else x.args[0])
        return Written(f"‖{base.text}‖²", rf"\left\| {base.latex} \right\|^{{2}}", POWER)

    def _is_mean(self, f: Factors) -> bool:
        """Whether a sum of one array is written as its mean."""
        if f.target in self._as_mean:
            return True
        if not f.is_plain_sum or isinstance(f.coefficient, complex):
            return False
        count = prod(f.size[l] for l in f.summed)
        return count > 1 and abs(abs(f.coefficient) * count - 1) < 1e-12

    def _as_chain(self, f: Factors) -> Written | None:
        """Products of matrices and vectors."""
        if f.below or not f.arrays or (self._is_mean(f) and len(f.out) < 2):
            return None
        found = chain(f, self.axes)
        if found is None:
            return None
        pieces = [self._link(group, flipped) for group, flipped in found]
        if not f.out and found[0][0][0].rank == 2:
            return function("tr", [join(pieces, " ", " ", PRODUCT)])
        return join(pieces, " ", " ", PRODUCT)

    def _link(self, group: list[Expr], flipped: bool) -> Written:
        if group[0].op == "identity" and len(group) == 2:
            return function("diag", [self.whole(group[1])])
        if len(group) == 1:
            return self.transposed(group[0]) if flipped else self.whole(group[0]).at(PRODUCT)
        written = bracket(self._hadamard([self.whole(g) for g in group]))
        return superscript(written, "ᵀ", r"\top") if flipped else written

    def transposed(self, x: Expr) -> Written:
        """The transpose, the conjugate transpose where x is a conjugate."""
        if x.op == "conj" and x not in self.names:
            return superscript(self.whole(x.args[0]), "ᴴ", "H")
        if x.op == "inverse" and x not in self.names:
            return superscript(self.whole(x.args[0]), "⁻ᵀ", r"-\top")
        written = self.whole(x)
        if written.text.endswith("ᵀ") and written.level == POWER:
            stem = written.latex.removesuffix(r"^{\top}")
            return Written(written.text[:-1], stem, ATOM)
        return superscript(self.whole(x), "ᵀ", r"\top")

    def _aligned(self, f: Factors) -> Written | None:
        """Elementwise products, summed over axes by their letters."""
        letters = f.label_letters(self.axes)
        if len(set(letters.values())) < len(letters) and not _keeps_order(f, letters):
            return None
        if any(len(set(n)) < len(n) for _, n in (*f.arrays, *f.below)):
            return None
        if f.summed and not any(set(n) == set(f.size) for _, n in f.arrays):
            return None
        up = [self._oriented(a, n, f) for a, n in self._sorted(f.arrays)]
        down = [self._oriented(a, n, f) for a, n in f.below]
        top = self._hadamard(up) if up else number(1.0)
        if down:
            top = over(top.at(PRODUCT), self._hadamard(down))
        if not f.summed:
            return top
        name = "".join(letters[l] for l in sorted(f.summed, key=lambda l: letters[l]))
        if self._is_mean(f):
            if f.target not in self._as_mean:
                f.coefficient = 1.0 if f.coefficient > 0 else -1.0
            whole = not f.out
            return function("mean", [top], "" if whole else name)
        inner = top.at(POWER)
        return Written(f"Σ{ts.below(name)} {inner.text}", rf"\sum_{{{name}}} {inner.latex}", BIG)

    def _oriented(self, a: Expr, names: Sequence[int], f: Factors) -> Written:
        reference = f.reference()
        alone = len(f.arrays) == 1 and not f.below
        places = [reference.index(l) for l in names if l in f.out or not alone]
        if places == sorted(places):
            return self.whole(a)
        if a.rank == 2:
            return self.transposed(a)
        raise NeedsIndices

    def _sorted(self, arrays: Iterable[tuple[Expr, Any]]) -> list[tuple[Expr, Any]]:
        """Cotangents first, then names, then what is composed."""

        def key(entry: tuple[Expr, Any]) -> tuple:
            written = self.names.get(entry[0])
            return (written is None, written is not None and not ts.has_bar(written))

        return sorted(arrays, key=key)

    def _hadamard(self, pieces: list[Written]) -> Written:
        if len(pieces) == 1:
            return pieces[0]
        return join([p.at(PRODUCT) for p in pieces], " ⊙ ", r" \odot ", PRODUCT)

    def _with_scalars(self, f: Factors, core: Written | None) -> Written:
        up = [self.whole(s).at(PRODUCT) for s, _ in self._sorted((s, ()) for s in f.scalars)]
        down = [self.whole(s) for s in f.scalars_below]
        coefficient, below = _apart(f.coefficient)
        if below is not None:
            down = [below, *down]
        minus = not isinstance(coefficient, complex) and coefficient < 0
        coefficient = -coefficient if minus else coefficient
        pieces = ([number(coefficient).at(PRODUCT)] if coefficient != 1 else []) + up
        if core is not None:
            pieces.append(core.at(PRODUCT) if pieces or down else core)
        top = join(pieces, " ", " ", PRODUCT) if len(pieces) > 1 else (pieces or [number(1)])[0]
        if down:
            top = over(
                top,
                join([d.at(POWER) for d in down], " ", " ", PRODUCT) if len(down) > 1 else down[0],
            )
        return negative(top) if minus else top

    # Entries.

    def entry(self, x: Expr, letters: Sequence[str]) -> Written:
        """The entry of x at these indices."""
        if x in self.names:
            return self._indexed(self.names[x], letters)
        constant = constant_of(x)
        if constant is not None:
            return number(constant)
        if x.op == "einsum":
            return self._entry_of_product(x, letters)
        if x.op == "add":
            return self.sum_of([self.entry(t, letters) for t in self._in_order(x.args)])
        if x.op in FUNCTIONS:
            return self._function(x, [self.entry(a, letters) for a in x.args], False)
        if x.op == "identity":
            return Written(f"δ[{letters[0]}{letters[1]}]", rf"\delta_{{{''.join(letters)}}}")
        return self._indexed(self.whole(x), letters)

    def _indexed(self, x: Written, letters: Sequence[str]) -> Written:
        if not letters:
            return x
        return subscript(x, "".join(letters))

    def _entry_of_product(self, x: Expr, letters: Sequence[str]) -> Written:
        coefficient, factors, labels = display_factors(x, self.names, True, self.defined)
        f = Factors(coefficient, factors, labels, x)
        f.apart()
        names = dict(enumerate(letters))
        extra = sorted(f.summed)
        own = f.label_letters(self.axes)
        fresh = primed([own[l] for l in extra], letters)
        names.update(zip(extra, fresh, strict=True))
        at = lambda a, ls: self.entry(a, [names[l] for l in ls])
        up = [at(a, ls).at(PRODUCT) for a, ls in self._sorted(f.arrays)]
        down = [at(a, ls).at(POWER) for a, ls in f.below]
        top = join(up, " ", " ", PRODUCT) if len(up) > 1 else (up or [number(1.0)])[0]
        if down:
            top = over(top, join(down, " ", " ", PRODUCT) if len(down) > 1 else down[0])
        if not f.arrays and not f.below:
            return self._with_scalars(f, None)
        if extra:
            low = "".join(fresh)
            inner = top.at(PRODUCT)
            top = Written(f"Σ{ts.below(low)} {inner.text}", rf"\sum_{{{low}}} {inner.latex}", BIG)
        return self._with_scalars(f, top)

    def axis_names(self, x: Expr, axes: Iterable[int]) -> str:
        """The letters of some axes of x; nothing where they are all."""
        letters = self.axes.unique(x)
        chosen = tuple(axes)
        return "".join(letters[a] for a in chosen)

    def note(self, text: str) -> None:
        """Something that the reader must know."""
        self.notes[text] = None


def _keeps_order(f: Factors, letters: dict[int, str]) -> bool:
    """Whether one array is summed over axes that are not mistaken for those that are left."""
    if len(f.arrays) != 1 or f.below or f.out != list(range(f.target.rank)):
        return False
    gone = [letters[l] for l in f.summed]
    left = [l for l in f.arrays[0][1] if l not in f.summed]
    clear = len(set(gone)) == len(gone) and not {letters[l] for l in f.out} & set(gone)
    return left == f.out and clear


def _apart(coefficient: Any) -> tuple[Any, Written | None]:
    """A coefficient such as 1/5 or 1/√8 as a number below."""
    if isinstance(coefficient, complex) or coefficient == 0 or abs(coefficient) >= 1:
        return coefficient, None
    inverse = 1 / abs(coefficient)
    sign = 1.0 if coefficient > 0 else -1.0
    for n in (inverse, inverse * inverse):
        if abs(n - round(n)) < 1e-12 * n and inverse < 1e6:
            below = round(n) if n == inverse else round(n) ** 0.5
            return sign, number(float(below))
    for up in range(2, 10):
        if abs(inverse * up - round(inverse * up)) < 1e-12 * inverse:
            return sign * up, number(float(round(inverse * up)))
    return coefficient, None


# How functions of each place are written.

_Form = Callable[[Expr, list[Written], bool], Written]


def _power(x: Expr, args: list[Written], matrix: bool) -> Written:
    (base,) = args
    exponent = x["exponent"]
    if isinstance(exponent, complex) or exponent >= 0:
        return _raised(base, exponent, matrix)
    return over(number(1.0), _raised(base, -exponent, matrix))


def _raised(base: Written, exponent: Any, matrix: bool) -> Written:
    if exponent == 1:
        return base
    if matrix and exponent != 0.5:
        shown = number(exponent)
        plain = ts.power(Written("", ""), exponent).text
        return superscript(base, "^∘" + plain.lstrip("^"), rf"\circ {shown.latex}")
    return ts.power(base, exponent)


_SIGNS = {"<=": ("≤", r"\le"), ">=": ("≥", r"\ge"), "==": ("=", "="), "!=": ("≠", r"\ne")}


def _condition(x: Expr, args: list[Written]) -> Written:
    text, latex = _SIGNS.get(x["relation"], (x["relation"],) * 2)
    a, b = (arg.at(PRODUCT) for arg in args)
    return Written(f"{a.text} {text} {b.text}", f"{a.latex} {latex} {b.latex}", SUM)


def _compare(x: Expr, args: list[Written], matrix: bool) -> Written:
    inner = _condition(x, args)
    return Written(f"1[{inner.text}]", rf"\mathbf{{1}}\left[{inner.latex}\right]")


def _where(x: Expr, args: list[Written], matrix: bool) -> Written:
    c, a, b = args
    condition = c.text[2:-1] if c.text.startswith("1[") else c.text
    low = c.latex.removeprefix(r"\mathbf{1}\left[").removesuffix(r"\right]")
    return Written(
        f"{{{a.text} if {condition}; {b.text} otherwise}}",
        rf"\begin{{cases}} {a.latex} & {low} \\ {b.latex} & \text{{otherwise}} \end{{cases}}",
    )


def _modulus(x: Expr, args: list[Written], matrix: bool) -> Written:
    return Written(f"|{args[0].text}|", rf"\left|{args[0].latex}\right|")


def _clip(x: Expr, args: list[Written], matrix: bool) -> Written:
    low, high = (
        number(default if x[n] is None else x[n])
        for n, default in (("low", float("-inf")), ("high", float("inf")))
    )
    below = f"[{low.text}, {high.text}]"
    return function("clip", args, below)


def _polygamma(x: Expr, args: list[Written], matrix: bool) -> Written:
    order = x["order"]
    name = "ψ" + "′" * order if order < 4 else f"ψ^({order})"
    return function(name, args, latex=r"\psi" + (f"^{{({order})}}" if order else ""))


def _pow(x: Expr, args: list[Written], matrix: bool) -> Written:
    base = args[0].at(ATOM)
    return Written(f"{base.text}^({args[1].text})", f"{base.latex}^{{{args[1].latex}}}", POWER)


def _floor(left: str, right: str, name: str) -> _Form:
    return lambda x, args, matrix: Written(
        f"{left}{args[0].text}{right}", rf"\left\l{name} {args[0].latex} \right\r{name}"
    )


def _logical(text: str, latex: str) -> _Form:
    def form(x: Expr, args: list[Written], matrix: bool) -> Written:
        return join([a.at(POWER) for a in args], f" {text} ", f" {latex} ", PRODUCT)

    return form


def _named(text: str, latex: str = "") -> _Form:
    return lambda x, args, matrix: function(text, args, latex=latex)


_FUNCTIONS: dict[str, _Form] = {
    "power": _power,
    "pow": _pow,
    "compare": _compare,
    "where": _where,
    "abs": _modulus,
    "clip": _clip,
    "polygamma": _polygamma,
    "floor": _floor("⌊", "⌋", "floor"),
    "ceil": _floor("⌈", "⌉", "ceil"),
    "conj": lambda x, args, matrix: superscript(args[0], "*", "*"),
    "real": _named("Re"),
    "imag": _named("Im"),
    "angle": _named("arg", r"\arg"),
    "sign": _named("sgn"),
    "lgamma": _named("log Γ", r"\log\Gamma"),
    "normal_cdf": _named("Φ", r"\Phi"),
    "normal_density": _named("φ", r"\varphi"),
    "arctan2": _named("atan2"),
    "maximum": _named("max", r"\max"),
    "minimum": _named("min", r"\min"),
    "cast": lambda x, args, matrix: args[0],
    "scale_gradient": lambda x, args, matrix: args[0],
    "logical_and": _logical("∧", r"\land"),
    "logical_or": _logical("∨", r"\lor"),
    "logical_xor": _logical("⊕", r"\oplus"),
    "logical_not": lambda x, args, matrix: Written(
        f"1[not {args[0].text}]", rf"\mathbf{{1}}[\lnot {args[0].latex}]"
    ),
}


# How operations on whole arrays are written.


def _along(name: str, latex: str = "") -> Callable[[Writer, Expr], Written]:
    """A function along one axis."""

    def form(w: Writer, x: Expr) -> Written:
        below = w.axis_names(x.args[0], [x["axis"]]) if x.args[0].rank > 1 else ""
        shown = name + ("←" if x.get("reverse") else "")
        return function(shown, [w.whole(a) for a in x.args], below, latex)

    return form


def _reduction(name: str) -> Callable[[Writer, Expr], Written]:
    """A function over axes."""

    def form(w: Writer, x: Expr) -> Written:
        a = x.args[0]
        axes = x["axes"] if "axes" in dict(x.attributes) else (x["axis"],)
        below = w.axis_names(a, axes) if len(axes) < a.rank else ""
        return function(name, [w.whole(a)], below)

    return form


def _norm(w: Writer, x: Expr) -> Written:
    inner = w.whole(x.args[0])
    below = w.axis_names(x.args[0], x["axes"]) if len(x["axes"]) < x.args[0].rank else ""
    low = f"_{{{below}}}" if below else ""
    return Written(
        f"‖{inner.text}‖" + (ts.below(below) if below else ""),
        rf"\left\|{inner.latex}\right\|{low}",
    )


def _deviation(w: Writer, x: Expr) -> Written:
    a, eps = x.args[0], x["eps"]
    axes = x["axes"]
    below = w.axis_names(a, axes) if len(axes) < a.rank else ""
    inner = function("var", [w.whole(a)], below)
    if eps:
        inner = summed([inner, number(eps)])
        return Written(f"√({inner.text})", rf"\sqrt{{{inner.latex}}}", POWER)
    return Written(f"√{inner.text}", rf"\sqrt{{{inner.latex}}}", POWER)


def _standardize(w: Writer, x: Expr) -> Written:
    a = x.args[0]
    below = w.axis_names(a, x["axes"]) if len(x["axes"]) < a.rank else ""
    if x["eps"]:
        w.note(
            "standardize(x) = (x - mean(x)) / √(var(x) + ε), "
            f"ε = {number(x['eps']).text}, over the axes below"
        )
    return function("standardize", [w.whole(a)], below)


def _inverse(w: Writer, x: Expr) -> Written:
    return _inverse_of(w, x.args[0])


def _inverse_of(w: Writer, a: Expr) -> Written:
    """The inverse of a matrix; of a transpose it is A^-T, of a conjugate transpose A^-H."""
    turned = _transposed_leaf(a) if a not in w.names else None
    if turned is None:
        return superscript(w.whole(a), "⁻¹", "-1")
    if turned.op == "conj":
        return superscript(w.whole(turned.args[0]), "⁻ᴴ", "-H")
    return superscript(w.whole(turned), "⁻ᵀ", r"-\top")


def _transposed_leaf(a: Expr) -> Expr | None:
    if a.op != "einsum" or len(a.args) != 1 or a["coefficient"] != 1 or contracts(a):
        return None
    n = a.rank
    expected = (*range(n - 2), n - 1, n - 2)
    return a.args[0] if a["labels"][0] == expected else None


def _solve(w: Writer, x: Expr) -> Written:
    a, b = x.args
    return join([_inverse_of(w, a), w.whole(b).at(PRODUCT)], " ", " ", PRODUCT)


def _fourier(w: Writer, x: Expr) -> Written:
    a = x.args[0]
    below = w.axis_names(a, x["axes"]) if len(x["axes"]) < a.rank else ""
    w.note("ℱ: the discrete Fourier transform without a factor; ℱᴴ: its adjoint, n ℱ⁻¹")
    name, latex = ("ℱ", r"\mathcal{F}") if x["sign"] < 0 else ("ℱᴴ", r"\mathcal{F}^{H}")
    return function(name, [w.whole(a)], below, latex)


def _geometry(x: Expr) -> str:
    said = []
    if any(s != 1 for s in x["stride"]):
        said.append(f"stride {_list(x['stride'])}")
    if any(p != (0, 0) for p in x["padding"]):
        same = all(a == b for a, b in x["padding"])
        said.append(f"padding {_list([a for a, _ in x['padding']] if same else x['padding'])}")
    if any(d != 1 for d in x["dilation"]):
        said.append(f"dilation {_list(x['dilation'])}")
    if x.get("groups", 1) != 1:
        said.append(f"groups {x['groups']}")
    return ", ".join(said)


def _list(values: Sequence[Any]) -> str:
    return str(values[0]) if len(set(values)) == 1 else "x".join(map(str, values))


def _convolution(w: Writer, x: Expr) -> Written:
    said = _geometry(x)
    w.note("conv(X, W): convolution (cross-correlation)" + (f" with {said}" if said else ""))
    return function("conv", [w.whole(a) for a in x.args])


def _convolution_input(w: Writer, x: Expr) -> Written:
    w.note("convᵀ(Ȳ, W): its adjoint in the input X, the transposed convolution")
    return function("convᵀ", [w.whole(a) for a in x.args], latex=r"\operatorname{conv}^{\top}")


def _convolution_weight(w: Writer, x: Expr) -> Written:
    w.note("corr(X, Ȳ): its adjoint in the weight W, the correlation of input and cotangent")
    return function("corr", [w.whole(a) for a in x.args])


def _pool(name: str, note: str) -> Callable[[Writer, Expr], Written]:
    def form(w: Writer, x: Expr) -> Written:
        w.note(f"{note}; windows {_list(x['window'])}, stride {_list(x['stride'])}")
        args = [w.whole(a) for a in x.args]
        if len(args) == 1:
            return function(name, args)
        inside = Written(
            f"{args[0].text}; {args[1].text}", rf"{args[0].latex};\, {args[1].latex}", SUM
        )
        return function(name, [inside])

    return form


def _ranges(x: Expr, lows: Sequence[int], highs: Sequence[int], strides=None) -> str:
    strides = strides or (1,) * len(lows)
    said = []
    for n, a, b, s in zip(x.shape, lows, highs, strides, strict=True):
        if (a, b, s) == (0, n, 1):
            said.append(":")
        elif b == a + 1:
            said.append(str(a))
        else:
            said.append(f"{a or ''}:{'' if b == n else b}" + (f":{s}" if s != 1 else ""))
    return ", ".join(said)


def _slice(w: Writer, x: Expr) -> Written:
    a = x.args[0]
    where = _ranges(a, x["start"], x["limit"], x["stride"])
    return _part(w.whole(a), Written(where, where))


def _part(x: Written, where: Written) -> Written:
    """Entries of x, in square brackets."""
    x = x.at(ATOM)
    return Written(f"{x.text}[{where.text}]", rf"{x.latex}\left[{where.latex}\right]")


def _pad(w: Writer, x: Expr) -> Written:
    a = x.args[0]
    highs = [
        low + n + max(n - 1, 0) * i
        for n, low, i in zip(a.shape, x["low"], x["interior"], strict=True)
    ]
    where = _ranges(x, x["low"], highs, [i + 1 for i in x["interior"]])
    w.note("into[...](x): zeros with x at these places")
    inner = w.whole(a)
    return Written(
        f"into[{where}]({inner.text})",
        rf"\operatorname{{into}}_{{[{where}]}}\left({inner.latex}\right)",
    )


def _concatenate(w: Writer, x: Expr) -> Written:
    pieces = [w.whole(a) for a in x.args]
    between = "; " if x["axis"] == 0 else ", "
    latex = r";\; " if x["axis"] == 0 else r",\; "
    inside = join(pieces, between, latex, SUM)
    return Written(f"[{inside.text}]", rf"\left[{inside.latex}\right]")


def _places(w: Writer, x: Expr, whole_rank: int, indices: Sequence[Expr]) -> Written:
    said: list[Written] = [Written(":", ":")] * whole_rank
    for axis, i in zip(x["axes"], indices, strict=True):
        said[axis] = w.whole(i)
    while said and said[-1].text == ":":
        said.pop()
    return join(said, ", ", ", ", SUM)


def _index(w: Writer, x: Expr) -> Written:
    where = _places(w, x, x.args[0].rank, x.args[1:])
    return _part(w.whole(x.args[0]), where)


def _index_add(w: Writer, x: Expr) -> Written:
    where = _places(w, x, x.rank, x.args[1:])
    w.note("add_at[i](u): zeros with u added at the places i")
    return _at("add_at", where, [w.whole(x.args[0])])


def _index_set(w: Writer, x: Expr) -> Written:
    where = _places(w, x, x.rank, x.args[2:])
    w.note("set_at[i](x, u): x with u at the places i")
    return _at("set_at", where, [w.whole(a) for a in x.args[:2]])


def _at(name: str, where: Written, args: list[Written]) -> Written:
    inside = join(args, ", ", ", ", SUM)
    command = name.replace("_", r"\_")
    return Written(
        f"{name}[{where.text}]({inside.text})",
        rf"\operatorname{{{command}}}_{{[{where.latex}]}}\left({inside.latex}\right)",
    )


def _take_along(w: Writer, x: Expr) -> Written:
    where = w.whole(x.args[1])
    return _part(w.whole(x.args[0]), where)


def _put_along(w: Writer, x: Expr) -> Written:
    w.note("add_at[i](u): zeros with u added at the places i")
    return _at("add_at", w.whole(x.args[1]), [w.whole(x.args[0])])


def _along_set(w: Writer, x: Expr) -> Written:
    w.note("set_at[i](x, u): x with u at the places i")
    return _at("set_at", w.whole(x.args[1]), [w.whole(x.args[0]), w.whole(x.args[2])])


def _window(name: str, arrays: int) -> Callable[[Writer, Expr], Written]:
    def form(w: Writer, x: Expr) -> Written:
        where = join([w.whole(s) for s in x.args[arrays:]], ", ", ", ", SUM)
        return _at(name, where, [w.whole(a) for a in x.args[:arrays]])

    return form


def _reshape(w: Writer, x: Expr) -> Written:
    if x.shape == tuple(n for n in x.args[0].shape if n != 1):
        return w.whole(x.args[0])
    shape = "x".join(map(str, x.shape))
    inner = w.whole(x.args[0])
    w.note("reshape: row-major")
    return function("reshape", [inner], f"{shape}", r"\operatorname{reshape}")


def _triangle(w: Writer, x: Expr) -> Written:
    name = "triu" if x["upper"] else "tril"
    return function(name, [w.whole(x.args[0])], str(x["offset"]) if x["offset"] else "")


def _array(w: Writer, x: Expr) -> Written:
    return Written("c", "c")


def _log_determinant(w: Writer, x: Expr) -> Written:
    a = w.whole(x.args[0]).at(POWER)
    return Written(f"log |det {a.text}|", rf"\log\left|\det {a.latex}\right|", POWER)


def _opaque(w: Writer, x: Expr) -> Written:
    name = x["name"]
    inside = join([w.whole(a) for a in x.args], ", ", ", ", SUM)
    which = f"[{x['output']}]" if len(x["signature"]) > 1 else ""
    latex = name.replace("_", r"\_").replace("^*", "")
    star = "^{*}" * name.count("^*")
    return Written(
        f"⚠{name}({inside.text}){which}",
        rf"\operatorname{{{latex}}}{star}\left({inside.latex}\right){which}",
    )


def _ruled(w: Writer, x: Expr) -> Written:
    return w.whole(x.args[x["output"]])


def _cond(w: Writer, x: Expr) -> Written:
    """One case for each branch, the operands written in."""
    cases = []
    for branch in x["branches"]:
        w.names.update(zip(branch.inputs, [w.whole(a) for a in x.args[1:]], strict=True))
        cases.append(w.whole(branch.outputs[x["output"]]))
    index = w.whole(x.args[0])
    boolean = x.args[0].kind == "boolean"
    shown = list(enumerate(cases))[::-1] if boolean else list(enumerate(cases))
    said = [index.text if boolean else f"{index.text} = {k}" for k, _ in shown[:-1]]
    text = "; ".join(f"{c.text} if {s}" for (_, c), s in zip(shown, said, strict=False))
    rows = [rf"{c.latex} & {s}" for (_, c), s in zip(shown, said, strict=False)]
    rows.append(rf"{shown[-1][1].latex} & \text{{otherwise}}")
    return Written(
        f"{{{text}; {shown[-1][1].text} otherwise}}",
        r"\begin{cases} " + r" \\ ".join(rows) + r" \end{cases}",
    )


def _iota(w: Writer, x: Expr) -> Written:
    n = x.shape[x["axis"]]
    return Written(f"(0..{n - 1})", rf"(0, \dots, {n - 1})")


_PRIMITIVES: dict[str, Callable[[Writer, Expr], Written]] = {
    "array": _array,
    "iota": _iota,
    "identity": lambda w, x: Written("I", "I"),
    "reshape": _reshape,
    "slice": _slice,
    "pad": _pad,
    "concatenate": _concatenate,
    "one_hot": lambda w, x: function("onehot", [w.whole(x.args[0])]),
    "index": _index,
    "index_add": _index_add,
    "index_set": _index_set,
    "take_along": _take_along,
    "put_along": _put_along,
    "along_set": _along_set,
    "dynamic_slice": _window("window", 1),
    "dynamic_pad": _window("into", 1),
    "dynamic_update": _window("set_at", 2),
    "flip": lambda w, x: function(
        "flip", [w.whole(x.args[0])], w.axis_names(x, x["axes"]) if x.rank > 1 else ""
    ),
    "roll": lambda w, x: function("roll", [w.whole(x.args[0])], _list(x["shifts"])),
    **{name: _along(name) for name in ("softmax", "cumsum", "cumprod", "argsort")},
    "log_softmax": _along("log softmax", r"\log\operatorname{softmax}"),
    "logcumsumexp": _along("logcumsumexp"),
    "cumargmax": _along("cumargmax"),
    **{name: _reduction(name) for name in ("max", "min", "prod", "any", "all", "logsumexp")},
    "argmax": _reduction("argmax"),
    "variance": _reduction("var"),
    "deviation": _deviation,
    "standardize": _standardize,
    "norm": _norm,
    "convolution": _convolution,
    "convolution_input": _convolution_input,
    "convolution_weight": _convolution_weight,
    "max_pool": _pool("maxpool", "maxpool: the greatest of each window"),
    "max_unpool": _pool("unpool", "unpool(g; x): g put back to where x is greatest"),
    "max_pick": _pool("pick", "pick(u; x): u where x is greatest in each window"),
    "sum_pool": _pool("sumpool", "sumpool: the sum of each window"),
    "sum_unpool": _pool("sumpoolᵀ", "sumpoolᵀ: its adjoint"),
    "triangle": _triangle,
    "det": lambda w, x: function("det", [w.whole(x.args[0])]),
    "logabsdet": _log_determinant,
    "sign_det": lambda w, x: function("sgn det", [w.whole(x.args[0])]),
    "inverse": _inverse,
    "solve": _solve,
    "fourier": _fourier,
    "opaque": _opaque,
    "cond": _cond,
    "ruled": _ruled,
}

__all__ = ["NeedsIndices", "Writer", "conj", "power"]
