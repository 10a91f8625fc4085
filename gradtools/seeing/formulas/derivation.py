"""`Formula`: a program and its adjoint as mathematics, made by `derive`.

`derive` transforms a recorded program to its adjoint program and, at order 2, to the adjoint of
that. A `Formula` prints as text, as LaTeX and in notebooks. It is evaluated in NumPy, to be
compared with a framework.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from gradtools.arguments.wording import with_article
from gradtools.errors import GradtoolsError
from gradtools.printing import printable
from gradtools.seeing.formulas import files
from gradtools.seeing.formulas import typesetting as ts
from gradtools.seeing.formulas.complex_pairs import ComplexPair, find_pairs, pair, together
from gradtools.seeing.formulas.expressions import Expr, order, placeholder
from gradtools.seeing.formulas.operation_record import OPERATIONS, evaluate
from gradtools.seeing.formulas.recognition import recognise
from gradtools.seeing.formulas.recorded import Recorded
from gradtools.seeing.formulas.reverse import adjoint
from gradtools.seeing.formulas.statements import Section, Statements, leaf_names
from gradtools.seeing.formulas.typesetting import Written
from gradtools.seeing.pictures import saving

if TYPE_CHECKING:
    from gradtools.seeing.formulas.comparing import Agreement

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


class Formula:
    """A program and its derivatives as mathematics.

    Attributes:
        inputs: The names of the inputs.
        outputs: The names of the outputs.
        cotangents: The names of the outputs' cotangents.
        directions: At order 2, the names of the gradients' cotangents.
        gradients: The names of the inputs' cotangents.
        second: At order 2, the names of the results of the last section.
        draws: The names of the random draws.
        order: 1, or 2 with the double backward.
        marked: The names of opaque operations.
        check: The comparison with automatic differentiation, or None.
    """

    def __init__(self, derived: _FormulaPrograms, check: Check | None = None) -> None:
        self._derived = derived
        self._sections: list[Section] | None = None
        self.check = check
        self.order = derived.order
        named = [x["name"] for x in order(derived.outputs) if x.op == "by_name"]
        self.marked = tuple(dict.fromkeys(named))
        names = derived.names
        self.inputs = tuple(names[p].text for p in derived.recorded.opened)
        self.outputs = tuple(w.text for w in derived.output_names)
        self.draws = tuple(names[p].text for p in derived.recorded.draws)
        self.cotangents = tuple(names[p].text for p in derived.cotangents)
        self.directions = tuple(names[p].text for p in derived.directions)
        self.gradients = tuple(w.text for w in derived.gradient_names)
        self.second = tuple(w.text for w in derived.second_names)

    def held_by(self, agreement: Callable[..., Agreement]) -> Formula:
        """A copy that compares derivations by this function."""
        return Formula(replace(self._derived, agreement=agreement), self.check)

    def checked(self, check: Check) -> Formula:
        """A copy with the result of its comparison."""
        return Formula(self._derived, check)

    def noted(self, note: str, given: bool = False) -> Formula:
        """A copy with a note on its comparison."""
        assert self.check is not None
        return Formula(self._derived, replace(self.check, note=note, given=given))

    # Reading.

    def __str__(self) -> str:
        lines = []
        for section in self._written():
            lines += [section.title.text, *_aligned_text(section), ""]
        lines += ["where", *(f"  {w.text}" for w in self._derived.legend(self._statements))]
        lines += [f"  {name.text}" for name in self._recognised()]
        lines += [f"  {note}" for note in self._statements.writer.notes]
        lines += [str(self.check)] if self.check is not None else []
        return printable("\n".join(lines))

    def __repr__(self) -> str:
        return str(self)

    def lines(self, section: int) -> list[str]:
        """The lines of one part: 0 the program, 1 its adjoint, 2 the adjoint of that."""
        parts = self._written()
        if section not in range(len(parts)):
            raise GradtoolsError(
                f"formula.lines: part is {section!r}; expected one of 0 to {len(parts) - 1}. "
                "formula(f, *args, order=2) has one part more than order 1."
            )
        return [line.strip() for line in _aligned_text(parts[section])]

    def latex(self) -> str:
        """The formula in LaTeX: one ``aligned`` for each part, and one for definitions of names."""
        blocks = []
        for section in self._written():
            rows = [rf"&{a.latex} = {b.latex}" for a, b in section.lines]
            body = " \\\\\n".join(rows)
            title = rf"&{section.title.latex}"
            blocks.append("\\begin{aligned}\n" + title + " \\\\\n" + body + "\n\\end{aligned}")
        if names := self._recognised():
            body = " \\\\\n".join(rf"&{name.latex}" for name in names)
            blocks.append("\\begin{aligned}\n" + body + "\n\\end{aligned}")
        return "\n\\\\[1em]\n".join(blocks)

    def _repr_latex_(self) -> str:
        return f"$${files.gathered(self)}$$"

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes a file in the format of its suffix: .txt, .tex (LaTeX to include) or .md.

        Raises:
            GradtoolsError: The suffix is unknown.
        """
        saving.save(self, files.FORMS, path)

    def _written(self) -> list[Section]:
        if self._sections is None:
            self._statements = self._derived.statements()
            self._sections = list(self._statements.sections)
        return self._sections

    def _recognised(self) -> list[Written]:
        """The definitions of recognized names."""
        self._written()
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
        return self._derived.evaluate(inputs, cotangents, directions)

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
        assert self._derived.agreement is not None
        return self._derived.agreement(self, derivation, points, tolerance, seed, convert)

    def point(self, rng: np.random.Generator) -> tuple[list, list, list]:
        """Random inputs, cotangents and directions, standard normal; integers are 0 or 1."""
        d = self._derived
        groups = (d.recorded.opened, d.cotangents, d.directions)
        inputs, cotangents, directions = ([_draw(rng, p) for p in group] for group in groups)
        return inputs, cotangents, directions


def _draw(rng: np.random.Generator, p: Expr) -> np.ndarray:
    """A random value for a placeholder: standard normal, or zeros and ones."""
    if not p.is_inexact:
        return rng.integers(0, 2, p.shape).astype(bool if p.kind == "boolean" else np.int64)
    x = rng.normal(size=p.shape)
    return x + 1j * rng.normal(size=p.shape) if p.is_complex else x


@dataclass(frozen=True)
class Values:
    """The numbers of a formula.

    Attributes:
        outputs: The program's results.
        gradients: The inputs' cotangents, for inputs that can have one; None for others.
        second: At order 2: the derivatives of <u, gradients> with respect to each input and each
            cotangent; None if there is none.
    """

    outputs: tuple[np.ndarray | None, ...]
    gradients: tuple[np.ndarray | None, ...]
    second: tuple[np.ndarray | None, ...] = ()


@dataclass
class _FormulaPrograms:
    """The programs of a formula, and the names in them."""

    recorded: Recorded
    order: int
    outputs: list[Expr]
    cotangents: list[Expr]
    gradients: list[Expr | None]
    directions: list[Expr]
    second: list[Expr | None]
    tables: list[dict[Expr, Expr]]
    names: dict[Expr, Written]
    output_names: list[Written]
    gradient_names: list[Written]
    second_names: list[Written]
    pairs: list[ComplexPair]
    whole: list[tuple[Expr, Written]]
    agreement: Callable[..., Agreement] | None = None

    def statements(self) -> Statements:
        result = Statements(self._sections(), self.names, self.tables)
        result.write()
        return result

    def _sections(self) -> list[Section]:
        there = lambda xs, ws: [(x, w) for x, w in zip(xs, ws, strict=True) if x is not None]
        given = ts.join([self.names[p] for p in self.cotangents], ", ", ", ", ts.SUM)
        gradients = there(self.gradients, self.gradient_names)
        sections = [
            Section(_title("the program"), there(self.outputs, self.output_names)),
            Section(_title("its adjoint, from", given), gradients),
        ]
        if self.whole:
            sections.append(Section(self._whole_title(), self.whole))
        if self.order == 2:
            pairs = zip(self.directions, [w for _, w in gradients], strict=True)
            terms = [ts.inner_product(self.names[u], n) for u, n in pairs]
            title = _title("the adjoint of that, of s =", ts.summed(terms))
            sections.append(Section(title, there(self.second, self.second_names)))
        return sections

    def _whole_title(self) -> Written:
        names = [[self.names[x] for x in (p.whole, p.real, p.imaginary)] for p in self.pairs]
        sums = [
            Written(f"{z.text} = {a.text} + i {b.text}", f"{z.latex} = {a.latex} + i\\, {b.latex}")
            for z, a, b in names
        ]
        return _title("that is, with", ts.join(sums, ", ", ",\\; ", ts.SUM))

    def legend(self, statements: Statements) -> list[Written]:
        inputs = self.recorded.opened
        used = {*statements.values, *inputs}
        sizes: dict[str, int] = {}
        result = []
        for p in dict.fromkeys((*inputs, *self.recorded.held, *self.recorded.draws)):
            if p in used:
                letters = statements.axes.letters(p)
                sizes.update(zip(letters, p.shape, strict=True))
                result.append(_space(self.names[p], p, letters))
        for x, name in statements.constants:
            shape = "×".join(map(str, x.shape)) or "a number"
            result.append(Written(f"{name.text}: held by the program, {shape}", name.latex))
        said = ", ".join(f"{l} = {n}" for l, n in sizes.items())
        return [*result, *([Written(said, said)] if said else [])]

    def known(
        self, inputs: Arrays, cotangents: Arrays | None, directions: Arrays | None
    ) -> dict[Expr, Any]:
        """The value of each placeholder."""
        known = _matched("inputs", self.recorded.opened, inputs)
        if cotangents is None:
            cotangents = [np.ones(p.shape) for p in self.cotangents]
        known |= _matched("cotangents", self.cotangents, cotangents)
        if self.order == 2:
            if directions is None:
                raise GradtoolsError("formula: order 2 needs directions, one for each gradient")
            known |= _matched("directions", self.directions, directions)
        wanted = self.recorded.wanted
        known |= {p: v for p, v in self.recorded.held.items() if p not in wanted}
        return known | self.recorded.draws

    def evaluate(
        self, inputs: Arrays, cotangents: Arrays | None, directions: Arrays | None
    ) -> Values:
        known = self.known(inputs, cotangents, directions)
        wanted = [*self.outputs, *self.gradients, *self.second]
        real = [x for x in wanted if x is not None]
        values = dict(zip(real, evaluate(real, known), strict=True))
        shaped = lambda x: None if x is None else np.asarray(values[x]).reshape(x.shape)
        get = lambda xs: tuple(map(shaped, xs))
        return Values(get(self.outputs), get(self.gradients), get(self.second))


def _matched(what: str, places: Sequence[Expr], values: Any) -> dict[Expr, Any]:
    values = list(values)
    if len(values) != len(places):
        raise GradtoolsError(
            f"formula: {len(places)} {what} are needed "
            f"({', '.join(p['name'] for p in places) or 'none'}); {len(values)} were given"
        )
    return dict(zip(places, values, strict=True))


def derive(
    recorded: Recorded,
    order: int = 1,
    wrt: Sequence[int] | None = None,
    named: bool = True,
) -> Formula:
    """The formula of a recorded program.

    Args:
        recorded: The program. Its inputs are followed by differentiated captured arrays.
        order: 1, or 2 to add the double backward.
        wrt: The positions of the differentiated inputs; by default all floating and complex ones.
        named: Whether patterns such as softplus are recognized, and written and differentiated by
            name; else the program is differentiated as recorded.
    """
    if order not in (1, 2):
        raise GradtoolsError(f"formula: order is 1 or 2, not {order!r}")
    inputs, outputs = recorded.opened, list(recorded.outputs)
    outputs = recognise(outputs) if named else outputs
    active = [k for k, p in enumerate(inputs) if p.is_inexact and (wrt is None or k in wrt)]
    leaves = list(dict.fromkeys((*inputs, *recorded.held, *recorded.draws)))
    names, output_names = leaf_names(leaves, outputs)
    inexact = [(y, w) for y, w in zip(outputs, output_names, strict=True) if y.is_inexact]
    cotangents = []
    for y, w in inexact:
        g = placeholder(f"cotangent of {w.text}", y.shape, y.kind, role="cotangent")
        cotangents.append(g)
        names[g] = ts.bar(w)
    sources = [inputs[k] for k in active]
    result, table = adjoint([y for y, _ in inexact], cotangents, sources)
    tables = [table]
    directions: list[Expr] = []
    second: list[Expr | None] = []
    second_names: list[Written] = []
    if order == 2:
        directions = [placeholder(f"u {p['name']}", p.shape, p.kind) for p in sources]
        for u, p in zip(directions, sources, strict=True):
            names[u] = _direction(names[p], len(sources))
        both, other = adjoint(result, directions, [*sources, *cotangents])
        tables.append(other)
        second_names = [_partial(names[p]) for p in (*inputs, *cotangents)]
        place = dict(zip(active, both, strict=False))
        second = [*(place.get(k) for k in range(len(inputs))), *both[len(sources) :]]
    place = dict(zip(active, result, strict=True))
    gradients = [place.get(k) for k in range(len(inputs))]
    gradient_names = [ts.bar(names[p]) for p in inputs]
    pairs, whole = _in_complex_numbers(inputs, cotangents, gradients, names)
    programs = recorded, order, outputs, cotangents, gradients, directions, second, tables
    written = names, output_names, gradient_names, second_names, pairs, whole
    return Formula(_FormulaPrograms(*programs, *written))


def _in_complex_numbers(
    inputs: Sequence[Expr],
    cotangents: Sequence[Expr],
    gradients: Sequence[Expr | None],
    names: dict[Expr, Written],
) -> tuple[list[ComplexPair], list[tuple[Expr, Written]]]:
    """The adjoint of separate real and imaginary parts in complex form, if it has one."""
    pairs = find_pairs(inputs)
    if not pairs or len(cotangents) != 2 or cotangents[0].shape != cotangents[1].shape:
        return [], []
    base = "O" if "O" not in {p.name for p in pairs} else "out"
    result = pair(base, *cotangents)
    all_pairs = [*pairs, result]
    place = dict(zip(inputs, gradients, strict=True))
    found = []
    for p in pairs:
        a, b = place[p.real], place[p.imaginary]
        joined = None if a is None or b is None else together(a, b, all_pairs)
        if joined is None:
            return [], []
        names[p.whole] = ts.symbol(p.name)
        found.append((joined, ts.bar(names[p.whole])))
    names[result.whole] = ts.bar(ts.symbol(base))
    return all_pairs, found


def _direction(x: Written, count: int) -> Written:
    if count == 1:
        return Written("u", "u")
    return Written(f"u_{x.text}", rf"u_{{{x.latex}}}")


def _partial(x: Written) -> Written:
    return Written(f"∂s/∂{x.text}", rf"\frac{{\partial s}}{{\partial {x.latex}}}")


def _title(text: str, more: Written | None = None) -> Written:
    latex = rf"\textbf{{{text}}}"
    if more is None:
        return Written(text, latex)
    return Written(f"{text} {more.text}", rf"{latex}\ {more.latex}")


def _space(name: Written, p: Expr, letters: Sequence[str]) -> Written:
    field = {"real": "ℝ", "complex": "ℂ", "integer": "ℤ", "boolean": "{0,1}"}[p.kind]
    latex = {"ℝ": r"\mathbb{R}", "ℂ": r"\mathbb{C}", "ℤ": r"\mathbb{Z}"}.get(field, r"\{0,1\}")
    over = "×".join(letters)
    high = f"^({over})" if len(letters) > 1 else (f"^{over}" if over else "")
    return Written(
        f"{name.text} ∈ {field}{high}",
        rf"{name.latex} \in {latex}" + (f"^{{{over.replace('×', ' times ')}}}" if over else ""),
    )


def _aligned_text(section: Section) -> list[str]:
    return [f"  {a.text} = {b.text}" for a, b in section.lines]
