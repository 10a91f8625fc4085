"""Writes a program and its adjoints as lines of mathematics; names intermediate values.

A value is named if it is a result, if its expression is not short and is used more than once, or if
the text of its expression is longer than `_LONG` characters. The name of a cotangent is the name of
its primal value, with a bar. The name of a leaf is the shortest unique suffix of its path, such as
``argument 0['layers'][1].weight``.
"""

from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from gradtools.seeing.formulas import typesetting as ts
from gradtools.seeing.formulas.algebra import is_wrapper
from gradtools.seeing.formulas.expressions import SEVERAL, Expr, constant_of, order
from gradtools.seeing.formulas.typesetting import Written
from gradtools.seeing.formulas.writing import Axes, Writer

_LONG = 60  # maximum number of characters of an unnamed expression


@dataclass
class Section:
    """A section of the formula, such as the program, its adjoint or the adjoint of the adjoint."""

    title: str
    of: str  # the mathematical part of the title
    roots: list[tuple[Expr, Written]]  # result expressions with their names
    lines: list[str] = field(default_factory=list)  # equations


class Statements:
    """Writes the lines of all sections; a value has the same name in all sections."""

    def __init__(
        self,
        sections: Sequence[Section],
        leaves: Mapping[Expr, Written],
        cotangents: Mapping[Expr, Expr],
    ) -> None:
        self.sections = sections
        roots = [pair for s in sections for pair in s.roots]
        self._taken = {w.text for w in leaves.values()}
        self.axes = Axes(text for text in self._taken if len(text) == 1)
        self.writer = Writer(self.axes)
        self.writer.names.update(leaves)
        self.values = [x for x in order([x for x, _ in roots]) if x.kind != SEVERAL]
        self.axes.learn(self.values)
        self.constants = [x for x in self.values if x.op == "array"]
        self._forward = set(order([x for x, _ in sections[0].roots]))
        self._bases: Counter[str] = Counter()  # the number of values that share a base name
        self._counts: Counter[str] = Counter()
        self._name(roots, cotangents)
        done = set(self.constants)
        for section in sections:
            self._write(section, done)

    # Names.

    def _name(self, roots: Sequence[tuple[Expr, Written]], cotangents: Mapping[Expr, Expr]) -> None:
        """Assigns names to values; `cotangents` maps each primal value to its cotangent."""
        names = self.writer.names
        self._taken |= {w.text for _, w in roots}
        if len(self.sections) > 2:  # s is the differentiated scalar at order 2
            self._taken.add("s")
        for x, written in roots:
            if not _is_plain(x):
                names.setdefault(x, written)
        self._bases["c"] = len(self.constants)
        for x in self.constants:
            names[x] = self._new("c")
        primals: dict[Expr, Expr] = {}  # maps each cotangent to its primal value
        for v, c in cotangents.items():
            if not _is_plain(v) and v.shape == c.shape:
                primals.setdefault(c, v)
        repeated = self._repeated([x for x, _ in roots])
        values = {primals[x] for x in repeated if x in primals} - {*names, *repeated}
        # Name repeated values and the primal values of repeated cotangents.
        wanted = [*(x for x in self.values if x in values), *repeated]
        self._bases.update(self._base(x) for x in wanted if x not in primals)
        for x in wanted:
            v = primals.get(x)
            barred = ts.bar(names[v]) if v is not None and v in names else None
            if barred is None or barred.text in self._taken:
                names[x] = self._new("T" if barred else self._base(x))
            else:
                names[x] = barred
                self._taken.add(barred.text)
        for x in self.values:  # name long subexpressions
            unnamed = x not in names and not _is_plain(x) and not is_wrapper(x)
            if unnamed and len(self.writer.write(x).text) > _LONG:
                names[x] = self._new(self._base(x))

    def _repeated(self, roots: Sequence[Expr]) -> list[Expr]:
        """Returns long unnamed values that are used more than once, directly or transposed."""
        uses = Counter(roots)
        for x in self.values:
            if not is_wrapper(x):
                uses.update(map(_unwrapped, _operands(x)))
        result: list[Expr] = []
        weights: dict[Expr, float] = {}  # estimated text lengths; 0 for named values
        for x in self.values:
            own = 0.5 if x.op in _LIGHT else 0 if is_wrapper(x) or not x.args else 2
            own = 1 if x.op == "add" else own
            weights[x] = own + sum(weights.get(a, 0) for a in _operands(x))
            if x in self.writer.names:
                weights[x] = 0
            elif uses[x] > 1 and weights[x] >= 2 and not _is_plain(x):
                result.append(x)
                weights[x] = 0
        return result

    def _base(self, x: Expr) -> str:
        """Returns a base name for x that depends on the operation, such as e for exp."""
        if x.op in ("add", "einsum"):
            forward = any(a in self._forward for a in (x, *(x.args if is_wrapper(x) else ())))
            return ("Z" if x.rank > 1 else "z") if forward and x.rank else "T"
        base = _BASES.get(x.op, "T")
        return base.upper() if x.rank > 1 else base

    def _new(self, base: str) -> Written:
        alone = self._bases[base] == 1 and not self._counts[base]
        written = ts.symbol(base)
        while not alone or written.text in self._taken:
            alone = True
            self._counts[base] += 1
            written = ts.symbol(f"{base}{self._counts[base]}")
        self._taken.add(written.text)
        return written

    # Lines.

    def _write(self, section: Section, done: set[Expr]) -> None:
        """Writes an equation for each named value, and for each result of the section."""
        names, roots = self.writer.names, [x for x, _ in section.roots]
        values = [x for x in order(roots) if x in names and x.op != "placeholder"]
        used = {a for x in order(roots) for a in x.args}
        new = [x for x in values if x not in done and (x not in roots or x in used)]
        equation = lambda name, side: f"{name.text} = {side.text}"
        section.lines = [equation(names[x], self.writer.composed(x)) for x in new]
        for x, name in section.roots:
            own = names.get(x)
            is_other = own is not None and (x.op == "placeholder" or own.text != name.text)
            side = own if own is not None and is_other else self.writer.composed(x)
            if name.text not in (side.text, *(names[v].text for v in new)):
                section.lines.append(equation(name, side))
        done.update(new, roots)


_LIGHT = "power conj Re Im compare one_hot slice reshape abs sgn cast stop".split()
_BASES = {"exp": "e", "sigmoid": "s", "tanh": "h", "relu": "h", "softmax": "p", "output": "z"}
_BASES |= {"standardize": "n", "var": "v", "norm": "r"}


def _is_plain(x: Expr) -> bool:
    """Returns whether x is a leaf or a number, possibly transposed, scaled or conjugated."""
    if x.op == "placeholder" or constant_of(x) is not None:
        return True
    return (is_wrapper(x) or x.op == "conj") and _is_plain(x.args[0])


def _operands(x: Expr) -> tuple[Expr, ...]:
    """Returns the arguments of x, or of the opaque operation that computes x."""
    return x.args[0].args if x.op == "output" else x.args


def _unwrapped(x: Expr) -> Expr:
    while is_wrapper(x):
        x = x.args[0]
    return x


# --- names of leaves and results


def short_names(paths: Sequence[str]) -> list[str]:
    """Returns the shortest unique suffix of each path; 0.weight becomes weight_0."""
    found = [re.findall(r"[^\W_][\w]*|_\w+", p.replace("argument ", "arg")) for p in paths]
    parts = [f or [p.strip() or "x"] for f, p in zip(found, paths, strict=True)]
    ends = Counter(tuple(p[-n:]) for p in parts for n in range(1, 1 + len(p)))
    seen: Counter[str] = Counter()
    result = []
    for p in parts:
        unique = (p[-n:] for n in range(1, 1 + len(p)) if ends[tuple(p[-n:])] == 1)
        end = next((words for words in unique if not all(map(str.isdigit, words))), p)
        words = list(itertools.dropwhile(str.isdigit, end)) or ["x"]
        name = "_".join([*words, *itertools.takewhile(str.isdigit, end)])
        seen[name] += 1
        result.append(name if seen[name] == 1 else f"{name}_{seen[name]}")
    return result


def output_names(outputs: Sequence[Expr], taken: set[str]) -> list[Written]:
    """Returns a name for each output; no name is in `taken`."""
    if len(outputs) == 1:
        (y,) = outputs
        wanted = ["L"] if not y.rank and not y.is_complex else []
        wanted += ["Y", "F", "O"] if y.rank > 1 else ["y", "f", "o"]
        return [ts.symbol(next((w for w in wanted if w not in taken), "out"))]
    bases = (b for b in ("y", "f") if not any(t.startswith(b) for t in taken))
    base = next(bases, "out")
    return [ts.symbol(f"{base}{k + 1}") for k in range(len(outputs))]
