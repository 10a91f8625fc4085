"""`Formula`: a program and its adjoint as mathematics.

Reverse mode on expressions transforms a recorded program to its adjoint program. That is an
expression again: it can be simplified, written, evaluated, and differentiated once more,
which is double backward::

    first order    x_bar = J^H g
    second order   the adjoint of <u, x_bar>, as a function of x and g

A `Formula` prints as text, as LaTeX and in notebooks. It is evaluated in NumPy, to be compared
with a framework.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from gradtools.arguments.wording import with_article
from gradtools.errors import GradtoolsError
from gradtools.printing import printable
from gradtools.rules import replaced_at
from gradtools.seeing.formulas import typesetting as ts
from gradtools.seeing.formulas.algebra import add, real
from gradtools.seeing.formulas.complex_pairs import ComplexPair, find_pairs, together
from gradtools.seeing.formulas.expressions import (
    OPERATIONS,
    SEVERAL,
    Expr,
    evaluate,
    full,
    is_zero,
    placeholder,
)
from gradtools.seeing.formulas.expressions import order as ordered
from gradtools.seeing.formulas.opaque import pulled_back
from gradtools.seeing.formulas.recorded import Recorded
from gradtools.seeing.formulas.statements import Section, Statements, output_names, short_names
from gradtools.seeing.formulas.typesetting import Written
from gradtools.seeing.pictures import saving

if TYPE_CHECKING:
    from gradtools.seeing.formulas.formulating import Agreement
    from gradtools.seeing.pictures.saving import Forms

Arrays = Sequence[Any]


@dataclass(frozen=True)
class Check:
    """The comparison with a framework's automatic differentiation.

    Attributes:
        points: The number of random points near the arguments, or 1 for the arguments only.
        error: The greatest relative error.
        tolerance: The allowed relative error.
        note: A remark, or empty.
        given: Whether it also agrees at the arguments themselves.
    """

    points: int
    error: float
    tolerance: float
    note: str = ""
    given: bool = False

    def __str__(self) -> str:
        note = f"; {self.note}" if self.note else ""
        points = f"{self.points} random points" if self.points > 1 else "1 point"
        here = "the arguments and " if self.given else ""
        return (
            f"agrees with automatic differentiation at {here}{points} "
            f"(greatest relative error {self.error:.1e}){note}"
        )


class Values(NamedTuple):
    """The numbers of a formula: of the outputs, the gradients, and at order 2 of the last section.

    None stands where there is no derivative.
    """

    outputs: tuple[np.ndarray | None, ...]
    gradients: tuple[np.ndarray | None, ...]
    second: tuple[np.ndarray | None, ...] = ()


class Formula:
    """A program and its derivatives as mathematics.

    Args:
        recorded: The program. Its inputs are followed by differentiated captured arrays.
        order: 1, or 2 to add the double backward.
        wrt: The positions of the differentiated inputs; by default all floating and complex ones.

    Attributes:
        inputs: The names of the inputs.
        outputs: The names of the outputs.
        cotangents: The names of the outputs' cotangents.
        directions: At order 2, the names of the gradients' cotangents.
        gradients: The names of the inputs' cotangents.
        second: At order 2, the names of the results of the last section.
        order: 1, or 2 with the double backward.
        marked: The names of opaque operations.
        check: The comparison with automatic differentiation, or None.
    """

    check: Check | None = None
    _agreement: Callable[..., Agreement]

    def __init__(
        self, recorded: Recorded, order: int = 1, wrt: Sequence[int] | None = None
    ) -> None:
        inputs = recorded.opened
        self.order, self._recorded = order, recorded
        leaves = list(dict.fromkeys((*inputs, *recorded.held)))
        chosen = short_names([p["name"] for p in leaves])
        self._names = {p: ts.symbol(n) for p, n in zip(leaves, chosen, strict=True)}
        names = output_names(recorded.outputs, set(chosen))
        self._outputs = list(zip(recorded.outputs, names, strict=True))
        active = [k for k, p in enumerate(inputs) if p.is_inexact and (wrt is None or k in wrt)]
        sources = [inputs[k] for k in active]
        of_inputs = lambda grads: replaced_at([None] * len(inputs), active, grads)
        inexact = [(y, name) for y, name in self._outputs if y.is_inexact]
        self._cotangents = []
        for y, name in inexact:
            g = placeholder(f"cotangent of {name.text}", y.shape, y.kind)
            self._names[g] = ts.bar(name)
            self._cotangents.append(g)
        grads, self._table = adjoint([y for y, _ in inexact], self._cotangents, sources)
        barred = [ts.bar(self._names[p]) for p in inputs]
        self._gradients = list(zip(of_inputs(grads), barred, strict=True))
        self._directions: list[Expr] = []
        self._second: list[tuple[Expr | None, Written]] = []
        if order == 2:
            for p in sources:
                u = placeholder(f"u {p['name']}", p.shape, p.kind)
                self._names[u] = Written("u" if len(sources) == 1 else f"u_{self._names[p].text}")
                self._directions.append(u)
            both, _ = adjoint(grads, self._directions, [*sources, *self._cotangents])
            xs = [self._names[p].text for p in (*inputs, *self._cotangents)]
            count = len(sources)
            results = [*of_inputs(both[:count]), *both[count:]]
            written = [Written(f"∂s/∂{x}") for x in xs]
            self._second = list(zip(results, written, strict=True))
        self._pairs, self._whole = self._in_complex_numbers()
        marked = [x["name"] for x in ordered(recorded.outputs) if x.op == "by_name"]
        self.marked = tuple(dict.fromkeys(marked))
        of_leaves = lambda group: tuple(self._names[p].text for p in group)
        of_results = lambda group: tuple(name.text for _, name in group)
        self.inputs, self.outputs = of_leaves(inputs), of_results(self._outputs)
        self.cotangents, self.gradients = of_leaves(self._cotangents), of_results(self._gradients)
        self.directions, self.second = of_leaves(self._directions), of_results(self._second)

    def _in_complex_numbers(self) -> tuple[list[ComplexPair], list[tuple[Expr, Written]]]:
        """The adjoint of separate real and imaginary parts in complex form, if it has one."""
        inputs, cotangents = self._recorded.opened, self._cotangents
        pairs = find_pairs(inputs)
        if not pairs or len(cotangents) != 2 or cotangents[0].shape != cotangents[1].shape:
            return [], []
        base = "O" if "O" not in {p.name for p in pairs} else "out"
        pairs.append(ComplexPair.of(base, *cotangents))
        gradients = dict(zip(inputs, (g for g, _ in self._gradients), strict=True))
        found = together(gradients, pairs)
        if not found:
            return [], []
        self._names.update({p.whole: ts.symbol(p.name) for p in pairs[:-1]})
        self._names[pairs[-1].whole] = ts.bar(ts.symbol(base))
        return pairs, [(whole, ts.bar(self._names[p.whole])) for p, whole in found]

    # Reading.

    def __str__(self) -> str:
        lines = []
        for section in self._statements.sections:
            lines.append(f"{section.title} {section.of}".strip())
            lines += [*(f"  {a.text} = {b.text}" for a, b in section.lines), ""]
        lines += ["where", *(f"  {text}" for text in self._legend())]
        lines += [f"  {definition}" for definition in self._recognised()]
        lines += [f"  {note}" for note in self._statements.writer.notes]
        lines += [str(self.check)] if self.check is not None else []
        return printable("\n".join(lines))

    __repr__ = __str__

    def lines(self, section: int) -> list[str]:
        """The lines of one part: 0 the program, 1 its adjoint, 2 the adjoint of that."""
        parts = self._statements.sections
        if section not in range(len(parts)):
            raise GradtoolsError(
                f"formula.lines: part is {section!r}; expected one of 0 to {len(parts) - 1}. "
                "formula(f, *args, order=2) has one part more than order 1."
            )
        return [f"{a.text} = {b.text}" for a, b in parts[section].lines]

    def latex(self) -> str:
        """The formula in LaTeX: one ``aligned`` for each part, and one for definitions of names."""
        blocks = []
        for section in self._statements.sections:
            title = rf"\textbf{{{section.title}}}\ {ts.latex(section.of)}"
            rows = [ts.latex(f"{a.text} = {b.text}") for a, b in section.lines]
            blocks.append(_aligned_latex([title, *rows]))
        if names := self._recognised():
            blocks.append(_aligned_latex([*map(ts.latex, names)]))
        return "\n\\\\[1em]\n".join(blocks)

    def _repr_latex_(self) -> str:
        return f"$${_gathered(self)}$$"

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes a file in the format of its suffix: .txt, .tex (LaTeX to include) or .md.

        Raises:
            GradtoolsError: The suffix is unknown.
        """
        saving.save(self, FORMS, path)

    @cached_property
    def _statements(self) -> Statements:
        """The lines of all parts."""
        given = ", ".join(self.cotangents)
        gradients = [(x, name) for x, name in self._gradients if x is not None]
        sections = [
            Section("the program", "", self._outputs),
            Section("its adjoint, from", given, gradients),
        ]
        if self._whole:
            names = [
                [self._names[x].text for x in (p.whole, p.real, p.imaginary)] for p in self._pairs
            ]
            sums = ", ".join(f"{z} = {a} + i {b}" for z, a, b in names)
            sections.append(Section("that is, with", sums, self._whole))
        if self.order == 2:
            pairs = zip(self._directions, gradients, strict=True)
            s = ts.summed([ts.inner_product(self._names[u], name) for u, (_, name) in pairs])
            second = [(x, name) for x, name in self._second if x is not None]
            sections.append(Section("the adjoint of that, of s =", s.text, second))
        return Statements(sections, self._names, self._table)

    def _legend(self) -> list[str]:
        """The spaces of the leaves, as x ∈ ℝ^(i×j), the constants, and the lengths of the axes."""
        written, recorded = self._statements, self._recorded
        used = {*written.values, *recorded.opened}
        sizes: dict[str, int] = {}
        result = []
        for p in dict.fromkeys((*recorded.opened, *recorded.held)):
            if p in used:
                letters = written.axes.letters(p)
                sizes.update(zip(letters, p.shape, strict=True))
                over = "×".join(letters)
                high = f"^({over})" if len(letters) > 1 else f"^{over}" if over else ""
                result.append(f"{self._names[p].text} ∈ {_FIELDS[p.kind]}{high}")
        for x in written.constants:
            shape = "×".join(map(str, x.shape)) or "a number"
            result.append(f"{written.writer.names[x].text}: held by the program, {shape}")
        lengths = ", ".join(f"{l} = {n}" for l, n in sizes.items())
        return [*result, *([lengths] if lengths else [])]

    def _recognised(self) -> list[str]:
        """The definitions of recognized names."""
        used = self._statements.writer.recognised
        return [o.definition for name, o in OPERATIONS.items() if name in used and o.definition]

    # Numbers.

    def evaluate(
        self,
        inputs: Arrays,
        cotangents: Arrays | None = None,
        directions: Arrays | None = None,
    ) -> Values:
        """The numbers of every result, in float64 and complex128.

        Args:
            inputs: One array for each input.
            cotangents: One for each output that can have one; ones by default.
            directions: At order 2, one for each input that can have a derivative.

        Raises:
            GradtoolsError: The numbers or shapes do not fit.
        """
        known = self._known(inputs, cotangents, directions)
        groups = [[x for x, _ in named] for named in (self._outputs, self._gradients, self._second)]
        found = [x for group in groups for x in group if x is not None]
        values = dict(zip(found, evaluate(found, known), strict=True))
        shaped = lambda x: None if x is None else np.asarray(values[x]).reshape(x.shape)
        return Values(*(tuple(map(shaped, group)) for group in groups))

    def _known(
        self, inputs: Arrays, cotangents: Arrays | None = None, directions: Arrays | None = None
    ) -> dict[Expr, Any]:
        """The value of each placeholder."""
        opened, held = self._recorded.opened, self._recorded.held
        known = {p: v for p, v in held.items() if p not in self._recorded.wanted}
        ones = [np.ones(p.shape) for p in self._cotangents]
        for what, places, given in (
            ("inputs", opened, inputs),
            ("cotangents", self._cotangents, ones if cotangents is None else cotangents),
            ("directions", self._directions, directions or []),
        ):
            if len(given) != len(places):
                raise GradtoolsError(
                    f"formula: {len(places)} {what} are needed "
                    f"({', '.join(p['name'] for p in places) or 'none'}); {len(given)} were given"
                )
            known.update(zip(places, given, strict=True))
        return known

    def agrees_with(
        self,
        derivation: Callable[..., Any],
        *,
        points: int = 3,
        tolerance: float | None = None,
        seed: int = 0,
        convert: Callable[[np.ndarray], Any] | None = None,
    ) -> Agreement:
        """Compares a derivation made by hand with the framework's vjp.

        Args:
            derivation: A function of the inputs, then of the outputs' cotangents, one for each,
                then (at order 2) of the directions. It returns the inputs' cotangents in order
                (at order 2, what the last section lists); one alone need not be a tuple; None is
                zero.
            points: The number of random points near the arguments, in addition to these.
            tolerance: The allowed relative error; by default that of f's precision.
            seed: The seed of random points and cotangents.
            convert: Converts the derivation's arguments from NumPy arrays; by default to arrays
                of the framework.

        Returns:
            An `Agreement`, truthy if they agree, with the first differing entry.

        Raises:
            GradtoolsError: `derivation` is not a function, returns a wrong number of cotangents, or
                one for an argument that is not in ``argnums``. Its own errors are passed on.
        """
        if not callable(derivation):
            kind = with_article(type(derivation).__name__)
            raise GradtoolsError(
                f"formula.agrees_with: the derivation must be a function, got {kind}."
            )
        return self._agreement(self, derivation, points, tolerance, seed, convert)

    def point(self, rng: np.random.Generator) -> tuple[list, list, list]:
        """Random inputs, cotangents and directions, standard normal; integers are 0 or 1."""

        def draw(p: Expr) -> np.ndarray:
            if not p.is_inexact:
                return rng.integers(0, 2, p.shape).astype(bool if p.kind == "boolean" else np.int64)
            x = rng.normal(size=p.shape)
            return x + 1j * rng.normal(size=p.shape) if p.is_complex else x

        groups = (self._recorded.opened, self._cotangents, self._directions)
        inputs, cotangents, directions = ([draw(p) for p in group] for group in groups)
        return inputs, cotangents, directions


def adjoint(
    outputs: Sequence[Expr], cotangents: Sequence[Expr], wrt: Sequence[Expr]
) -> tuple[list[Expr], dict[Expr, Expr]]:
    """The adjoint program, by reverse mode: values are visited in reverse topological order.

    Returns:
        The cotangents of ``wrt``, and the cotangent of every value between.
    """
    values, leaves, active = ordered(outputs), set(wrt), set(wrt)
    for y in values:
        if (y.is_inexact or y.kind == SEVERAL) and any(a in active for a in y.args):
            active.add(y)
    gathered: dict[Expr, list[Expr]] = {}

    def contribute(x: Expr, g: Expr) -> None:
        """Adds a cotangent of x, real where x is."""
        g = real(g) if g.is_complex and not x.is_complex else g
        gathered.setdefault(x, []).append(g)

    for out, g in zip(outputs, cotangents, strict=True):
        contribute(out, g)
    summed: dict[Expr, Expr] = {}
    several: dict[Expr, dict[int, Expr]] = {}  # the cotangents of an opaque operation's outputs
    for y in reversed(values):
        if y not in active:
            continue
        if y in gathered:
            summed[y] = add(gathered.pop(y))
        if y in leaves:
            continue
        pulled: Sequence[Expr | None] = [None] * len(y.args)
        pullback = OPERATIONS[y.op].pullback
        if y.op == "output" and y in summed:
            several.setdefault(y.args[0], {})[y["index"]] = summed[y]
        elif y in several:
            pulled = pulled_back(y, several[y], active)
        elif y in summed and pullback is not None:
            pulled = pullback(y, summed[y], *y.args)
        for arg, c in zip(y.args, pulled, strict=True):
            if c is not None and arg in active and not is_zero(c):
                contribute(arg, c)
    return [summed[x] if x in summed else full(0.0, x.shape) for x in wrt], summed


_FIELDS = {"real": "ℝ", "complex": "ℂ", "integer": "ℤ", "boolean": "{0,1}"}


def _aligned_latex(rows: Sequence[str]) -> str:
    return "\\begin{aligned}\n" + " \\\\\n".join(f"&{row}" for row in rows) + "\n\\end{aligned}"


def _gathered(formula: Formula) -> str:
    """The formula's parts below each other, as one LaTeX ``gathered`` environment."""
    return "\\begin{gathered}\n" + formula.latex() + "\n\\end{gathered}"


# By the suffix of a file: text, LaTeX to include, and Markdown.
FORMS: Forms = {
    ".txt": lambda formula: f"{formula}\n",
    ".tex": lambda formula: (
        f"% needs the packages amsmath and amssymb\n% {formula.check}\n"
        f"\\[\n{_gathered(formula)}\n\\]\n"
    ),
    ".md": lambda formula: f"$$\n{_gathered(formula)}\n$$\n",
}
