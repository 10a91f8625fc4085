"""`Formula` represents a program and its adjoint, with text, LaTeX and notebook output."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from gradtools.arguments.checks import check_function, check_tolerance, order_among
from gradtools.boundary import user_facing
from gradtools.printing import printable
from gradtools.seeing.formulas import typesetting as ts
from gradtools.seeing.formulas.complex_pairs import in_complex_numbers
from gradtools.seeing.formulas.expressions import Expr, placeholder
from gradtools.seeing.formulas.expressions import order as ordered
from gradtools.seeing.formulas.reverse_mode import Recorded, adjoint
from gradtools.seeing.formulas.statements import Section, Statements, output_names, short_names
from gradtools.seeing.formulas.typesetting import Written

Results = list[tuple[Expr, Written]]  # each result, with its name


@dataclass(frozen=True)
class Agreement:
    """The result of a comparison with automatic differentiation; truthy if all numbers agree.

    Attributes:
        agrees: Whether all numbers agree within the tolerance.
        error: The largest relative error of an entry.
        where: The first entry that differs, such as "x̄[0, 2]"; empty if all entries agree.
        framework: The value of the entry `where` according to automatic differentiation.
        derivation: The value of the entry `where` according to the formula or the manual
            derivation.
        message: The text that `str` returns.
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


class Formula:
    """A program and its derivatives, written as mathematics.

    Args:
        recorded: The recorded program. The inputs of the program are the leaves of the arguments,
            followed by the differentiated captured arrays.
        order: The order of the derivatives: 1, or 2 to include the double backward.
        active: The positions of the differentiated inputs.

    Attributes:
        inputs: The names of the inputs.
        gradients: The names of the gradients.
        marked: The names of operations that are written by name, such as "solve".
        check: The result of the comparison with automatic differentiation.
    """

    check: Agreement | None = None
    compare: Callable[..., Agreement] | None = None  # implements `agrees_with`

    def __init__(self, recorded: Recorded, order: int, active: Sequence[int]) -> None:
        inputs = recorded.opened
        sources = [inputs[k] for k in active]
        self._inputs, self.held = inputs, recorded.held
        leaves = list(dict.fromkeys((*inputs, *recorded.held)))
        chosen = short_names([p["name"] for p in leaves])
        self._names = {p: ts.symbol(n) for p, n in zip(leaves, chosen, strict=True)}
        names = output_names(recorded.outputs, set(chosen))
        self._outputs: Results = list(zip(recorded.outputs, names, strict=True))
        inexact = [(y, name) for y, name in self._outputs if y.is_inexact]
        cotangents = [
            self._introduced(f"cotangent of {name.text}", y, ts.bar(name)) for y, name in inexact
        ]
        grads, self._table = adjoint([y for y, _ in inexact], cotangents, sources)
        barred = [ts.bar(self._names[p]) for p in sources]
        self._gradients: Results = list(zip(grads, barred, strict=True))
        directions: list[Expr] = []
        self._second: Results = []
        if order == 2:
            for p in sources:
                u = "u" if len(sources) == 1 else f"u_{self._names[p].text}"
                directions.append(self._introduced(f"u {p['name']}", p, Written(u)))
            xs = [*sources, *cotangents]
            both, _ = adjoint(grads, directions, xs)
            written = [Written(f"∂s/∂{self._names[x].text}") for x in xs]
            self._second = list(zip(both, written, strict=True))
        self.places = (inputs, cotangents, directions)  # placeholders on which the results depend
        self.results = (self._outputs, self._gradients, self._second)
        self._in_complex_numbers(dict(zip(sources, grads, strict=True)))
        marked = [x["name"] for x in ordered(recorded.outputs) if x.op == "by_name"]
        self.marked = tuple(dict.fromkeys(marked))
        self.inputs = tuple(self._names[p].text for p in inputs)
        self.gradients = tuple(name.text for _, name in self._gradients)

    def _introduced(self, what: str, like: Expr, name: Written) -> Expr:
        """Creates a named placeholder with the shape and kind of `like`."""
        result = placeholder(what, like.shape, like.kind)
        self._names[result] = name
        return result

    def _in_complex_numbers(self, gradients: Mapping[Expr, Expr]) -> None:
        """Names the complex arrays that combine real and imaginary parts, and their gradients."""
        found = in_complex_numbers(self._inputs, gradients, self.places[1])
        self._pairs = [p for p, _ in found]
        self._names.update({p.whole: ts.symbol(p.name) for p in self._pairs})
        self._whole = [(x, ts.bar(self._names[p.whole])) for p, x in found if x is not None]
        if found:  # the last pair contains the output cotangents
            self._names[self._pairs[-1].whole] = ts.bar(ts.symbol(self._pairs[-1].name))

    # Text output and comparison.

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

    @user_facing
    def lines(self, section: int) -> list[str]:
        """Returns the lines of a section; section 0 is the program and section 1 is its adjoint."""
        sections = self._statements.sections
        more = "" if self._second else "; pass order=2 to formula for the second derivatives"
        expected = f"a section from 0 to {len(sections) - 1}{more}"
        places = range(-len(sections), len(sections))
        return [*sections[order_among("formula.lines", section, places, expected, "section")].lines]

    def latex(self) -> str:
        """Returns the formula in LaTeX, with ``aligned`` blocks for sections and definitions."""
        blocks = []
        for section in self._statements.sections:
            title = rf"\textbf{{{section.title}}}\ {ts.latex(section.of)}"
            blocks.append([title, *map(ts.latex, section.lines)])
        if names := self._statements.writer.definitions:
            blocks.append([*map(ts.latex, names)])
        aligned = [" \\\\\n".join(f"&{row}" for row in rows) for rows in blocks]
        return "\n\\\\[1em]\n".join(f"\\begin{{aligned}}\n{a}\n\\end{{aligned}}" for a in aligned)

    def _repr_latex_(self) -> str:
        return f"$$\\begin{{gathered}}\n{self.latex()}\n\\end{{gathered}}$$"

    @cached_property
    def _statements(self) -> Statements:
        """Returns the program and its adjoints as lines of mathematics."""
        barred = ", ".join(self._names[p].text for p in self.places[1])
        sections = [
            Section("the program", "", self._outputs),
            Section("its adjoint, from", barred, self._gradients),
        ]
        if self._whole:
            of = lambda p: [self._names[x].text for x in (p.whole, p.real, p.imaginary)]
            sums = ", ".join("{} = {} + i {}".format(*of(p)) for p in self._pairs)
            sections.append(Section("that is, with", sums, self._whole))
        if self._second:
            pairs = zip(self.places[2], self._gradients, strict=True)
            s = ts.summed([ts.inner_product(self._names[u], name) for u, (_, name) in pairs])
            sections.append(Section("the adjoint of the adjoint, of s =", s.text, self._second))
        return Statements(sections, self._names, self._table)

    def _legend(self) -> list[str]:
        """Returns the declarations of leaves (x ∈ ℝ^(i×j)), constants and axis lengths."""
        written = self._statements
        used = {*written.values, *self._inputs}
        sizes: dict[str, int] = {}
        result = []
        for p in dict.fromkeys((*self._inputs, *self.held)):
            if p in used:
                letters = written.axes.letters(p)
                sizes.update(zip(letters, p.shape, strict=True))
                over = "×".join(letters)
                high = f"^({over})" if len(letters) > 1 else f"^{over}" if over else ""
                result.append(f"{self._names[p].text} ∈ {_FIELDS[p.kind]}{high}")
        for x in written.constants:
            shape = "×".join(map(str, x.shape)) or "a number"
            result.append(f"{written.writer.names[x].text}: a constant of the program, {shape}")
        lengths = ", ".join(f"{l} = {n}" for l, n in sizes.items())
        return [*result, *([lengths] if lengths else [])]

    @user_facing
    def agrees_with(
        self, derivation: Callable[..., Any], *, tolerance: float | None = None
    ) -> Agreement:
        """Compares a manual derivation with the framework's vjp.

        The results are compared at the arguments of `formula` and at random points near them.

        Args:
            derivation: A function whose arguments are the inputs, one cotangent for each output
                and, at order 2, the directions. The function returns the cotangents of the
                differentiated inputs in order or, at order 2, the results of the last section of
                the formula. A single cotangent may be returned without a tuple; None represents
                zeros.
            tolerance: The allowed relative error. The default depends on the precision of f.

        Returns:
            An `Agreement`, which is truthy if the results agree and otherwise contains the first
            entry that differs.

        Raises:
            GradtoolsError: The function `derivation` returns the wrong number of cotangents. Errors
                of `derivation` are propagated.
        """
        check_function("formula.agrees_with", derivation, "derivation", curried=False)
        check_tolerance("formula.agrees_with", tolerance)
        assert self.compare is not None
        return self.compare(derivation, tolerance)


_FIELDS = {"real": "ℝ", "complex": "ℂ", "integer": "ℤ", "boolean": "{0,1}"}
