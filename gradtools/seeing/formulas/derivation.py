"""`Formula`: a program and its adjoint as text, as LaTeX, in notebooks, and as numbers."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from gradtools.errors import GradtoolsError
from gradtools.printing import printable
from gradtools.rules import replaced_at
from gradtools.seeing.formulas import typesetting as ts
from gradtools.seeing.formulas.complex_pairs import in_complex_numbers
from gradtools.seeing.formulas.expressions import Expr, evaluate, placeholder
from gradtools.seeing.formulas.expressions import order as ordered
from gradtools.seeing.formulas.reverse_mode import Recorded, adjoint
from gradtools.seeing.formulas.statements import Section, Statements, output_names, short_names
from gradtools.seeing.formulas.typesetting import Written
from gradtools.seeing.pictures import saving

Arrays = Sequence[Any]


@dataclass(frozen=True)
class Agreement:
    """Whether numbers agree with automatic differentiation; truthy if they do.

    Attributes:
        agrees: Whether all numbers agree.
        error: The greatest relative error.
        where: The first differing entry, such as "x̄[0, 2]"; empty if none differs.
        framework: The framework's value there.
        derivation: The compared value there.
        message: The result as text.
    """

    agrees: bool
    error: float
    where: str = ""
    framework: Any = None
    derivation: Any = None
    message: str = ""

    def __bool__(self) -> bool:
        return self.agrees

    def __str__(self) -> str:
        return self.message


class Values(NamedTuple):
    """The numbers of a formula: outputs, gradients, and at order 2 the results of the last section.

    None means that there is no derivative.
    """

    outputs: tuple[np.ndarray | None, ...]
    gradients: tuple[np.ndarray | None, ...]
    second: tuple[np.ndarray | None, ...] = ()


class Formula:
    """A program and its derivatives as mathematics.

    Args:
        recorded: The program. The inputs are followed by differentiated captured arrays.
        order: 1, or 2 with the double backward.
        active: The positions of the differentiated inputs.

    Attributes:
        inputs, outputs, cotangents, gradients, directions, second: The names, as text.
        marked: The operations that are written by their names.
        check: The comparison with automatic differentiation.
    """

    check: Agreement | None = None
    compare: Callable[..., Agreement] | None = None  # compares with a derivation; see `agrees_with`

    def __init__(self, recorded: Recorded, order: int, active: Sequence[int]) -> None:
        inputs = recorded.opened
        self.order, self._recorded = order, recorded
        leaves = list(dict.fromkeys((*inputs, *recorded.held)))
        chosen = short_names([p["name"] for p in leaves])
        self._names = {p: ts.symbol(n) for p, n in zip(leaves, chosen, strict=True)}
        names = output_names(recorded.outputs, set(chosen))
        self._outputs = list(zip(recorded.outputs, names, strict=True))
        sources = [inputs[k] for k in active]
        of_inputs = lambda grads: replaced_at([None] * len(inputs), active, grads)
        inexact = [(y, name) for y, name in self._outputs if y.is_inexact]
        self._cotangents = [
            self._introduced(f"cotangent of {name.text}", y, ts.bar(name)) for y, name in inexact
        ]
        grads, self._table = adjoint([y for y, _ in inexact], self._cotangents, sources)
        barred = [ts.bar(self._names[p]) for p in inputs]
        self._gradients = list(zip(of_inputs(grads), barred, strict=True))
        self._directions: list[Expr] = []
        self._second: list[tuple[Expr | None, Written]] = []
        if order == 2:
            for p in sources:
                u = "u" if len(sources) == 1 else f"u_{self._names[p].text}"
                self._directions.append(self._introduced(f"u {p['name']}", p, Written(u)))
            both, _ = adjoint(grads, self._directions, [*sources, *self._cotangents])
            count, xs = len(sources), (*inputs, *self._cotangents)
            written = [Written(f"∂s/∂{self._names[x].text}") for x in xs]
            results = [*of_inputs(both[:count]), *both[count:]]
            self._second = list(zip(results, written, strict=True))
        self._in_complex_numbers()
        marked = [x["name"] for x in ordered(recorded.outputs) if x.op == "by_name"]
        self.marked = tuple(dict.fromkeys(marked))
        of_leaves = lambda group: tuple(self._names[p].text for p in group)
        of_results = lambda group: tuple(name.text for _, name in group)
        self.inputs, self.outputs = of_leaves(inputs), of_results(self._outputs)
        self.cotangents, self.gradients = of_leaves(self._cotangents), of_results(self._gradients)
        self.directions, self.second = of_leaves(self._directions), of_results(self._second)

    def _introduced(self, what: str, like: Expr, name: Written) -> Expr:
        """Returns a new placeholder of this shape, with its name."""
        result = placeholder(what, like.shape, like.kind)
        self._names[result] = name
        return result

    def _in_complex_numbers(self) -> None:
        """Names the pairs of real and imaginary parts and their gradients in complex form."""
        gradients = dict(zip(self._recorded.opened, (g for g, _ in self._gradients), strict=True))
        found = in_complex_numbers(gradients, self._cotangents)
        self._pairs = [p for p, _ in found]
        self._names.update({p.whole: ts.symbol(p.name) for p in self._pairs})
        self._whole = [(x, ts.bar(self._names[p.whole])) for p, x in found if x is not None]
        if found:  # the last pair contains cotangents
            self._names[self._pairs[-1].whole] = ts.bar(ts.symbol(self._pairs[-1].name))

    # Reading.

    def __str__(self) -> str:
        parts = []
        for section in self._statements.sections:
            lines = (f"  {line}" for line in section.lines)
            parts += [f"{section.title} {section.of}".strip(), *lines, ""]
        writer = self._statements.writer
        notes = [*self._legend(), *writer.definitions, *writer.notes]
        parts += ["where", *(f"  {text}" for text in notes)]
        parts += [str(self.check)] if self.check is not None else []
        return printable("\n".join(parts))

    __repr__ = __str__

    def lines(self, section: int) -> list[str]:
        """Returns the lines of the program (0), its adjoint (1), or the adjoint's adjoint (2)."""
        return [*self._statements.sections[section].lines]

    def latex(self) -> str:
        """Formats the formula in LaTeX: one ``aligned`` per part, and one for definitions."""
        blocks = []
        for section in self._statements.sections:
            title = rf"\textbf{{{section.title}}}\ {ts.latex(section.of)}"
            blocks.append([title, *map(ts.latex, section.lines)])
        if names := self._statements.writer.definitions:
            blocks.append([*map(ts.latex, names)])
        aligned = [" \\\\\n".join(f"&{row}" for row in rows) for rows in blocks]
        return "\n\\\\[1em]\n".join(f"\\begin{{aligned}}\n{a}\n\\end{{aligned}}" for a in aligned)

    def _gathered(self) -> str:
        """Stacks the parts in one LaTeX ``gathered`` environment."""
        return f"\\begin{{gathered}}\n{self.latex()}\n\\end{{gathered}}"

    def _repr_latex_(self) -> str:
        return f"$${self._gathered()}$$"

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes a file in the format of its suffix: .txt, .tex (LaTeX to include) or .md.

        Raises:
            GradtoolsError: The suffix is unknown.
        """
        saving.save(self, FORMS, path)

    @cached_property
    def _statements(self) -> Statements:
        """The lines of all parts."""
        gradients = [(x, name) for x, name in self._gradients if x is not None]
        sections = [
            Section("the program", "", self._outputs),
            Section("its adjoint, from", ", ".join(self.cotangents), gradients),
        ]
        if self._whole:
            of = lambda p: [self._names[x].text for x in (p.whole, p.real, p.imaginary)]
            sums = ", ".join("{} = {} + i {}".format(*of(p)) for p in self._pairs)
            sections.append(Section("that is, with", sums, self._whole))
        if self.order == 2:
            pairs = zip(self._directions, gradients, strict=True)
            s = ts.summed([ts.inner_product(self._names[u], name) for u, (_, name) in pairs])
            second = [(x, name) for x, name in self._second if x is not None]
            sections.append(Section("the adjoint of that, of s =", s.text, second))
        return Statements(sections, self._names, self._table)

    def _legend(self) -> list[str]:
        """Lists the leaves' spaces (x ∈ ℝ^(i×j)), the constants and the axis lengths."""
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

    # Numbers.

    def evaluate(
        self, inputs: Arrays, cotangents: Arrays | None = None, directions: Arrays = ()
    ) -> Values:
        """Evaluates every result in float64 or complex128.

        Args:
            inputs: One array for each input.
            cotangents: One per differentiable output; ones by default.
            directions: At order 2, one per differentiable input.

        Raises:
            GradtoolsError: The numbers or shapes do not fit.
        """
        if cotangents is None:
            cotangents = [np.ones(p.shape) for p in self._cotangents]
        places = (*self._recorded.opened, *self._cotangents, *self._directions)
        given = (*inputs, *cotangents, *directions)
        if len(given) != len(places):
            raise GradtoolsError(
                f"formula: {len(places)} arrays are needed "
                f"({', '.join(self._names[p].text for p in places)}); {len(given)} were given"
            )
        known = {**self._recorded.held, **dict(zip(places, given, strict=True))}
        groups = [[x for x, _ in named] for named in (self._outputs, self._gradients, self._second)]
        found = [x for group in groups for x in group if x is not None]
        values = dict(zip(found, evaluate(found, known), strict=True))
        shaped = lambda x: None if x is None else np.asarray(values[x]).reshape(x.shape)
        return Values(*(tuple(map(shaped, group)) for group in groups))

    def random_cotangents(self, rng: np.random.Generator) -> tuple[list, list]:
        """Returns random cotangents and directions, standard normal."""

        def draw(p: Expr) -> np.ndarray:
            x = rng.normal(size=p.shape)
            return x + 1j * rng.normal(size=p.shape) if p.is_complex else np.asarray(x)

        return [*map(draw, self._cotangents)], [*map(draw, self._directions)]

    def agrees_with(
        self,
        derivation: Callable[..., Any],
        *,
        tolerance: float | None = None,
        convert: Callable[[np.ndarray], Any] | None = None,
    ) -> Agreement:
        """Compares a derivation by hand with the framework's vjp, at random points as well.

        Args:
            derivation: A function of the inputs, then of one cotangent for each output, then (at
                order 2) of the directions. It returns the inputs' cotangents in order
                (at order 2, the results of the last section). A single result need not be a
                tuple; None means zero.
            tolerance: The allowed relative error; by default the tolerance of f's precision.
            convert: Converts the derivation's arguments from NumPy arrays; by default to arrays
                of the framework.

        Returns:
            An `Agreement`, truthy if they agree, with the first differing entry.

        Raises:
            GradtoolsError: `derivation` returns a wrong number of cotangents, or one for an
                argument that is not in ``argnums``. Errors of `derivation` are passed on.
        """
        assert self.compare is not None
        return self.compare(derivation, tolerance, convert)


_FIELDS = {"real": "ℝ", "complex": "ℂ", "integer": "ℤ", "boolean": "{0,1}"}
# By the suffix of a file: text, LaTeX to include, and Markdown.
FORMS: saving.Forms = {
    ".txt": lambda formula: f"{formula}\n",
    ".tex": lambda formula: (
        f"% needs the packages amsmath and amssymb\n% {formula.check}\n"
        f"\\[\n{formula._gathered()}\n\\]\n"
    ),
    ".md": lambda formula: f"$$\n{formula._gathered()}\n$$\n",
}
