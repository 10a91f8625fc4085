"""Reading a written formula: the text itself is parsed and computed, line by line.

That the expression behind a line is right says nothing about what stands on the page. `Reader`
takes the page at its word: axes align by their letters, two arrays side by side are a matrix
product, a circled dot is the elementwise product, which binds less. Each line's value is compared
with that of the expression it stands for. Loops are read by eye.
"""

import re
import unicodedata

import numpy as np

from gradtools.seeing.formulas.expressions import evaluate

SMALL = dict(zip("ᵢⱼₖₗₘₙₚᵣₛₐₑₕᵤᵥ", "ijklmnprsaehuv", strict=True))
POWERS = {"²": 2, "³": 3, "⁴": 4, "⁵": 5, "⁶": 6, "^(3/2)": 1.5}


class Named:
    """An array whose axes have letters; a row is a transposed vector."""

    def __init__(self, array, letters, row=False):
        self.array, self.letters, self.row = np.asarray(array), tuple(letters), row
        assert self.array.ndim == len(self.letters), (self.array.shape, letters)

    @property
    def rank(self):
        return len(self.letters)

    def map(self, f):
        return Named(f(self.array), self.letters, self.row)


def aligned(f, a, b):
    """F of two arrays whose axes align by letters."""
    if a.letters == b.letters:
        return Named(f(a.array, b.array), a.letters)
    if not a.rank or not b.rank:
        return Named(f(a.array, b.array), a.letters or b.letters)
    assert len(set(a.letters)) == a.rank and len(set(b.letters)) == b.rank, "ambiguous"
    union = a.letters + tuple(x for x in b.letters if x not in a.letters)
    if set(b.letters) >= set(a.letters):
        union = b.letters
    lay = lambda x: _laid(x, union)
    return Named(f(lay(a), lay(b)), union)


def _laid(x, union):
    order = [x.letters.index(c) for c in union if c in x.letters]
    shape = [x.array.shape[x.letters.index(c)] if c in x.letters else 1 for c in union]
    return np.transpose(x.array, order).reshape(shape)


def beside(a, b):
    """Two arrays side by side."""
    if not a.rank or not b.rank:
        return Named(a.array * b.array, a.letters + b.letters, a.row or b.row)
    if a.rank == 1 and b.rank == 1:
        if a.row and not b.row:
            return Named(a.array @ b.array, ())
        assert b.row and not a.row, "two vectors side by side"
        return Named(np.multiply.outer(a.array, b.array), a.letters + b.letters)
    if a.rank == 1:
        assert a.row, "a vector before a matrix"
        return Named(a.array @ b.array, b.letters[:-2] + b.letters[-1:], row=True)
    if b.rank == 1:
        assert not b.row
        return Named(a.array @ b.array, a.letters[:-1])
    lead = max(a.letters[:-2], b.letters[:-2], key=len)
    return Named(np.matmul(a.array, b.array), (*lead, a.letters[-2], b.letters[-1]))


def transposed(x):
    if x.rank == 1:
        return Named(x.array, x.letters, row=not x.row)
    return Named(np.swapaxes(x.array, -1, -2), (*x.letters[:-2], x.letters[-1], x.letters[-2]))


def _softmax(x, axis):
    e = np.exp(x - x.max(axis, keepdims=True))
    return e / e.sum(axis, keepdims=True)


def _standard(x, axes, eps):
    return (x - x.mean(axes, keepdims=True)) / np.sqrt(x.var(axes, keepdims=True) + eps)


PLACES = {
    **{n: getattr(np, n) for n in ("exp", "log", "sinh", "cosh", "tanh")},
    "relu": lambda x: np.maximum(x, 0),
    "sigmoid": lambda x: 1 / (1 + np.exp(-x)),
    "softplus": lambda x: np.log1p(np.exp(x)),
    "Re": np.real,
    "sgn": np.sign,
}
OVER = {
    "mean": lambda x, a: x.mean(a),
    "var": lambda x, a: x.var(a),
    "max": lambda x, a: x.max(a),
    "logsumexp": lambda x, a: np.log(np.exp(x).sum(a)),
}
FUNCTIONS = sorted([*PLACES, *OVER, "softmax", "standardize", "onehot"], key=len, reverse=True)


class Reader:
    """Reads one line at a time, with the values of the names that it may meet."""

    def __init__(self, names, eps=0.0, sizes=None):
        self.names = dict(sorted(names.items(), key=lambda e: -len(e[0])))
        self.eps, self.sizes = eps, sizes or {}

    def read(self, text, indexed=False):
        self.text, self.at, self.indexed = text, 0, indexed
        value = self.sum()
        assert self.at == len(self.text), f"not read: {self.text[self.at :]!r} of {text!r}"
        return value

    def sees(self, token):
        return self.text.startswith(token, self.at)

    def take(self, token):
        if self.sees(token):
            self.at += len(token)
            return True
        return False

    def need(self, token):
        assert self.take(token), f"{token!r} expected at {self.text[self.at :]!r}"

    def sum(self):
        value = self.term().map(np.negative) if self.take("-") else self.term()
        while True:
            if self.take(" + "):
                value = aligned(np.add, value, self.term())
            elif self.take(" - "):
                value = aligned(np.subtract, value, self.term())
            else:
                return value

    def term(self):
        if not self.take("Σ"):
            return self.product()
        letters = self.letters()
        self.need(" ")
        inner = self.product() if self.indexed else self.atom_or_entries()
        gone = [inner.letters.index(c) for c in letters]
        left = [c for c in inner.letters if c not in letters]
        return Named(inner.array.sum(tuple(gone)), left)

    def atom_or_entries(self):
        """What follows a sum sign: a whole array, or a product of entries."""
        start = self.at
        try:
            found = self.atom()
            if self.at == len(self.text) or self.text[self.at] in " )⟩":
                return found
        except (AssertionError, ValueError):
            pass
        self.at, self.indexed = start, True
        found = self.product()
        self.indexed = False
        return found

    def product(self):
        value = self.chain()
        while True:
            if self.take(" ⊙ "):
                value = aligned(np.multiply, value, self.chain())
            elif self.take(" / "):
                value = aligned(np.divide, value, self.chain())
            else:
                return value

    def chain(self):
        value = self.atom()
        ends = (*("+-⊙/≤≥><=≠"), "if ", "otherwise")
        while self.sees(" ") and not any(self.sees(f" {end}") for end in ends):
            self.need(" ")
            other = self.atom()
            value = aligned(np.multiply, value, other) if self.indexed else beside(value, other)
        return value

    def letters(self):
        found = []
        while self.at < len(self.text) and self.text[self.at] in SMALL:
            letter = SMALL[self.text[self.at]]
            self.at += 1
            while self.take("′"):
                letter += "'"
            found.append(letter)
        return found

    def atom(self):
        value = self.bare()
        while True:
            if self.take("ᵀ"):
                value = transposed(value)
            elif self.take("ᴴ"):
                value = transposed(value).map(np.conj)
            elif self.take("*"):
                value = value.map(np.conj)
            elif k := next(
                (k for s, k in POWERS.items() if self.take("^∘" + s) or self.take(s)), 0
            ):
                value = value.map(lambda x, k=k: x**k)
            else:
                return value

    def bare(self):
        for parse in (self.bracket, self.number, self.function, self.name):
            found = parse()
            if found is not None:
                return found
        raise AssertionError(f"what is {self.text[self.at :]!r}?")

    def bracket(self):
        if self.take("("):
            value = self.sum()
            self.need(")")
            return value
        if self.take("1["):
            value = self.condition()
            self.need("]")
            return value
        if self.take("√"):
            return self.bare().map(np.sqrt)
        if self.take("|"):
            value = self.sum()
            self.need("|")
            return value.map(np.abs)
        if self.take("‖"):
            value = self.sum()
            self.need("‖")
            axes = tuple(value.letters.index(c) for c in self.letters()) or None
            left = [c for k, c in enumerate(value.letters) if axes and k not in axes]
            return Named(np.sqrt((np.abs(value.array) ** 2).sum(axes)), left)
        if self.take("⟨"):
            a = self.sum()
            self.need(", ")
            b = self.sum()
            self.need("⟩")
            return Named(aligned(lambda x, y: np.conj(x) * y, a, b).array.sum(), ())
        if self.take("{"):
            a = self.sum()
            self.need(" if ")
            c = self.condition()
            self.need("; ")
            b = self.sum()
            self.need(" otherwise}")
            return _chosen(c, a, b)
        return None

    def condition(self):
        a = self.sum()
        for sign, f in {
            " ≤ ": np.less_equal,
            " ≥ ": np.greater_equal,
            " > ": np.greater,
            " < ": np.less,
            " = ": np.equal,
            " ≠ ": np.not_equal,
        }.items():
            if self.take(sign):
                return aligned(lambda x, y, f=f: f(x, y) * 1.0, a, self.sum())
        raise AssertionError(f"no relation at {self.text[self.at :]!r}")

    def number(self):
        found = re.match(r"\d+(\.\d+)?(e[+-]?\d+)?(?!\[)", self.text[self.at :])
        if found is None:
            return None
        self.at += found.end()
        value = float(found.group())
        if self.sees("/") and not self.sees("/ "):
            self.need("/")
            value /= float(self.bare().array)
        return Named(value, ())

    def function(self):
        for name in FUNCTIONS:
            rest = self.text[self.at :]
            found = re.match(re.escape(name) + r"([ᵢⱼₖₗₘₙₚᵣₛₐₑₕᵤᵥ′]*)\(", rest)
            if found is None:
                continue
            self.at += len(name)
            letters = self.letters()
            self.need("(")
            value = self.sum()
            self.need(")")
            return self.call(name, letters, value)
        return None

    def call(self, name, letters, x):
        axes = tuple(_axis(x, c) for c in letters) or tuple(range(x.rank))
        if name in PLACES:
            return x.map(PLACES[name])
        if name == "softmax":
            return x.map(lambda v: _softmax(v, axes[0]))
        if name in OVER:
            left = [c for k, c in enumerate(x.letters) if k not in axes]
            return Named(OVER[name](x.array, axes), left)
        if name == "standardize":
            return x.map(lambda v: _standard(v, axes, self.eps))
        letter, size = self.sizes["onehot"]
        return Named(np.eye(size)[x.array], (*x.letters, letter))

    def name(self):
        for name, (array, letters) in self.names.items():
            if self.take(name):
                if not self.indexed or not np.ndim(array):
                    return Named(array, letters)
                own = self.letters()
                assert len(own) == np.ndim(array), f"{name} has {np.ndim(array)} axes, not {own}"
                return _diagonal(Named(array, letters), own)
        return None


def _axis(x, letter):
    """The axis of this letter; with a prime, the second axis of the letter."""
    if letter in x.letters:
        return x.letters.index(letter)
    same = [k for k, c in enumerate(x.letters) if c == letter.rstrip("'")]
    return same[letter.count("'")]


def _diagonal(x, letters):
    """An array at these indices; one index twice takes the diagonal."""
    distinct = list(dict.fromkeys(letters))
    at = [distinct.index(c) for c in letters]
    return Named(np.einsum(x.array, at, range(len(distinct))), distinct)


def _chosen(c, a, b):
    shape = aligned(np.add, aligned(np.add, c, a), b)
    lay = lambda v: np.broadcast_to(_laid(v, shape.letters), shape.array.shape)
    return Named(np.where(lay(c) != 0, lay(a), lay(b)), shape.letters)


def check_page(formula, point, **reading):
    """Every line of the formula against the expression that it stands for; how many were read."""
    str(formula)
    statements, known = formula._statements, formula._known(*point)
    known |= {p.whole: known[p.real] + 1j * known[p.imaginary] for p in formula._pairs}
    expressions = {w.text: x for x, w in statements.writer.names.items()}
    for section in statements.sections:
        expressions.update({w.text: x for x, w in section.roots})
    values = dict(zip(expressions, evaluate(list(expressions.values()), known), strict=True))
    letters = {n: statements.axes.letters(x) for n, x in expressions.items()}
    names = {n: (values[n].reshape(expressions[n].shape), letters[n]) for n in expressions}
    count = 0
    for section in statements.sections:
        for line in section.lines:
            _check_line(line, names, reading)
            count += 1
    return count


def _check_line(line, names, reading):
    left, right = (part.text for part in line)
    stem = max((n for n in names if left.startswith(n)), key=len)
    index = left[len(stem) :]
    reader = Reader({n: v for n, v in names.items() if n != stem or n in right}, **reading)
    found = reader.read(right, indexed=bool(index))
    array, letters = names[stem]
    if index:
        wanted = Reader({})
        wanted.text, wanted.at = index, 0
        letters = tuple(wanted.letters())
    if found.letters != letters:
        assert len(set(letters)) == len(letters), f"{left}: axes {found.letters}, {letters}"
        found = Named(np.broadcast_to(_laid(found, letters), array.shape), letters)
    np.testing.assert_allclose(found.array, array, rtol=1e-9, atol=1e-11, err_msg=str(left))


def undefined(formula):
    """The names that are read before a line has said what they are."""
    str(formula)
    names = formula._statements.writer.names
    known = {w.text for w in formula._names.values()}
    generated = re.compile(r"[A-Zλ]\u0304?[₀-₉]*(?![a-z])")
    said, missing = set(known), []
    for section in formula._statements.sections:
        for line in section.lines:
            left, right = (part.text for part in line)
            text = unicodedata.normalize("NFD", right)
            for found in map(str, generated.findall(text)):
                name = unicodedata.normalize("NFC", found)
                if name in {w.text for w in names.values()} and name not in said:
                    missing.append((name, right))
            said.add(left)
            said.update(n for n in (w.text for w in names.values()) if left.startswith(n))
    return missing
