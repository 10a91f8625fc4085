"""The formula of a program: what automatic differentiation computes, to be read and checked.

`derive` turns a recorded `Graph` into its adjoint program and, at order 2, into the adjoint of
that. The result, a `Formula`, prints as text, as LaTeX and by itself in notebooks; it computes
its own numbers in NumPy, so that it can be compared with a framework before it is shown.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from gradtools.arguments.wording import with_article
from gradtools.errors import GradtoolsError
from gradtools.seeing.formulas import algebra, files
from gradtools.seeing.formulas import typesetting as ts
from gradtools.seeing.formulas.comparing import Agreement, Captured, compared_at, draw, near, verify
from gradtools.seeing.formulas.complex_pairs import ComplexPair, find_pairs, pair, together
from gradtools.seeing.formulas.evaluation import evaluate
from gradtools.seeing.formulas.expressions import Expr, order, placeholder, substitute
from gradtools.seeing.formulas.lowering import Lowered, lower
from gradtools.seeing.formulas.naming import leaf_names
from gradtools.seeing.formulas.operation_record import OPERATIONS
from gradtools.seeing.formulas.operations import control
from gradtools.seeing.formulas.recognition import recognise
from gradtools.seeing.formulas.reverse import adjoint
from gradtools.seeing.formulas.statements import Section, Statement, Statements, everything
from gradtools.seeing.formulas.typesetting import Written
from gradtools.seeing.graphs.nodes import PlainGraph
from gradtools.seeing.pictures import saving

Arrays = Sequence[Any]
Given = Arrays | None  # None for those of the formula


@dataclass(frozen=True)
class Check:
    """The comparison with a framework's automatic differentiation.

    Attributes:
        points: At how many points: random ones near the arguments, or the arguments' own alone.
        error: The greatest relative error.
        tolerance: What was allowed.
        note: What else has to be said of it; often nothing.
        given: Whether it agrees at the arguments themselves, too.
    """

    points: int
    error: float
    tolerance: float
    note: str = ""
    given: bool = False

    def __str__(self) -> str:
        said = f"; {self.note}" if self.note else ""
        points = f"{self.points} random points" if self.points > 1 else "1 point"
        here = "the arguments and " if self.given else ""
        return (
            f"agrees with automatic differentiation at {here}{points} "
            f"(greatest relative error {self.error:.1e}){said}"
        )


class Formula:
    """A program and its derivatives as mathematics.

    Attributes:
        inputs: The names of the inputs.
        outputs: The names of the outputs.
        cotangents: The names of the outputs' cotangents.
        directions: At order 2, the names of the cotangents of the inputs' cotangents.
        gradients: The names of the inputs' cotangents.
        second: At order 2, the names of what the last section lists.
        draws: The names of the random draws.
        order: 1, or 2 with the double backward.
        marked: The native names of operations without a translation; empty if there are none.
        check: The comparison with automatic differentiation, or None before there was one.
    """

    def __init__(self, derived: _FormulaPrograms, check: Check | None = None) -> None:
        self._derived = derived
        self._sections: list[Section] | None = None
        self.check = check
        self.order = derived.order
        self.marked = tuple(dict.fromkeys(derived.lowered.marked))
        names = derived.names
        self.inputs = tuple(names[p].text for p in derived.lowered.program.inputs)
        self.outputs = tuple(w.text for w in derived.output_names)
        self.draws = tuple(names[p].text for p in derived.lowered.draws)
        self.cotangents = tuple(names[p].text for p in derived.cotangents)
        self.directions = tuple(names[p].text for p in derived.directions)
        self.gradients = tuple(w.text for w in derived.gradient_names)
        self.second = tuple(w.text for w in derived.second_names)

    @property
    def computable(self) -> bool:
        """Whether every operation can be computed, so that the formula can be compared."""
        return self._derived.computable

    def at(
        self,
        inputs: Sequence[Any],
        captured: Mapping[int, Any],
        calling: Callable[[Callable[..., Any]], Callable[..., Any]],
    ) -> Formula:
        """The same formula, which knows the values with which it was recorded.

        Args:
            inputs: One array for each input. Random points are drawn near them.
            captured: The captured values, by number.
            calling: Makes a function of NumPy arrays of a derivation in the framework.
        """
        known = replace(self._derived, given=list(inputs), held=dict(captured), calling=calling)
        return Formula(known, self.check)

    def noted(self, note: str, given: bool = False) -> Formula:
        """The same, with something said about its comparison."""
        if self.check is None:
            return self
        return Formula(self._derived, replace(self.check, note=note, given=given))

    # Reading.

    def __str__(self) -> str:
        lines = []
        for section in self._written():
            lines += [section.title.text, *_aligned_text(section.lines), ""]
        lines += ["where", *(f"  {w.text}" for w in self._derived.legend(self._statements))]
        lines += [f"  {name.text}" for name in self._recognised()]
        lines += [f"  {note}" for note in self._statements.writer.notes]
        lines += [f"  ⚠ {name}, no translation" for name in self.marked]
        lines += [str(self.check)] if self.check is not None else []
        if not self.computable:
            lines.append("not compared with automatic differentiation")
        return "\n".join(lines)

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
        return [line.strip() for line in _aligned_text(parts[section].lines)]

    def latex(self) -> str:
        """The formula in LaTeX: one ``aligned`` for each part, and one for the names in it."""
        blocks = []
        for section in self._written():
            rows = [_latex_row(line) for line in section.lines]
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
        """Writes the form that the suffix names: .txt, .tex (LaTeX to include) or .md.

        Raises:
            GradtoolsError: The suffix names no form.
        """
        saving.save(self, files.FORMS, path)

    def _written(self) -> list[Section]:
        if self._sections is None:
            self._statements = self._derived.statements()
            self._sections = list(self._statements.sections)
        return self._sections

    def _recognised(self) -> list[Written]:
        """What the names stand for that the program does not use itself."""
        self._written()
        used = self._statements.writer.recognised
        return [o.definition for name, o in OPERATIONS.items() if name in used and o.definition]

    # Numbers.

    def evaluate(
        self,
        inputs: Sequence[Any],
        cotangents: Sequence[Any] | None = None,
        directions: Sequence[Any] | None = None,
        captured: Mapping[int, Any] | Sequence[Any] = (),
        draws: Sequence[Any] | None = None,
    ) -> Values:
        """The numbers of every result, in float64 and complex128.

        Args:
            inputs: One array for each input.
            cotangents: One for each output that can have one; ones by default.
            directions: At order 2, one for each input that can have a derivative.
            captured: One for each captured value: in order, or by its number in the graph; as
                they were recorded by default.
            draws: One for each random draw; as they were recorded by default.

        Raises:
            GradtoolsError: The numbers or shapes do not fit, or an operation is marked and
                cannot be computed.
        """
        captured = captured if len(captured) else self._derived.held or captured
        return self._derived.evaluate(inputs, cotangents, directions, captured, draws)

    def verified(
        self,
        reference: Callable[[list, list, list], tuple],
        *,
        points: int = 3,
        tolerance: float = 1e-9,
        seed: int = 0,
        sample: Callable[[np.random.Generator], tuple] | None = None,
        captured: Mapping[int, Any] | Sequence[Any] = (),
        finite: bool = True,
    ) -> Formula:
        """The same formula, compared with a framework's automatic differentiation.

        Args:
            reference: A function of lists (inputs, cotangents, directions) of NumPy arrays. It
                returns what the framework computes: (outputs, gradients) or, at order 2,
                (outputs, gradients, second), one entry for each name in ``outputs``,
                ``gradients`` and ``second``; None is not compared.
            points: At how many random points.
            tolerance: The relative error that is allowed.
            seed: Of the random points.
            sample: Draws (inputs, cotangents, directions); standard normal by default.
            captured: The captured values.
            finite: Whether all values must be finite at one of the points.

        Returns:
            The formula with the record of the comparison; as it was, if an operation without a
            translation cannot be computed (the formula says so).

        Raises:
            Differs: They differ; it says where, with both values.
            Outside: The values are finite at none of the points.
        """
        if not self.computable:
            return self
        rng = np.random.default_rng(seed)
        chosen = [sample(rng) if sample else self.point(rng) for _ in range(points)]
        worst = verify(self, reference, chosen, tolerance, captured, finite)
        return Formula(self._derived, Check(points, worst, tolerance))

    def agrees_with(
        self,
        derivation: Callable[..., Any],
        *,
        points: int = 3,
        tolerance: float = 1e-9,
        seed: int = 0,
        sample: Callable[[np.random.Generator], tuple] | None = None,
        captured: Mapping[int, Any] | Sequence[Any] = (),
        convert: Callable[[np.ndarray], Any] | None = None,
    ) -> Agreement:
        """Hold a derivation made by hand against the formula.

        Args:
            derivation: A function of the inputs, then of the outputs' cotangents, then (at
                order 2) of the directions. It returns the inputs' cotangents in order (at order
                2, what the last section lists); one alone need not be a tuple; None is zero.
            points: At how many random points.
            tolerance: The relative error that is allowed.
            seed: Of the random points.
            sample: Draws (inputs, cotangents, directions); by default near the arguments with
                which the formula was recorded, standard normal if none are known.
            captured: The captured values; as they were recorded by default.
            convert: Makes what the derivation is given from NumPy's arrays; by default they are
                made arrays of the framework in which the formula was recorded.

        Returns:
            Yes, or the first entry that differs, with both values.

        Raises:
            GradtoolsError: `derivation` is no function, returns another number of cotangents
                than there are inputs, or one that the formula does not have (of an argument that
                ``wrt`` does not name). What it raises itself comes through.
        """
        if not callable(derivation):
            came = with_article(type(derivation).__name__)
            raise GradtoolsError(
                f"formula.agrees_with: the derivation must be a function, got {came}."
            )
        rng = np.random.default_rng(seed)
        known = self._derived
        if sample is None and known.given is not None:
            sample = self.near(known.given)
        if convert is None and known.calling is not None:
            derivation = known.calling(derivation)
        chosen = [sample(rng) if sample else self.point(rng) for _ in range(points)]
        arrays = lambda xs: [np.asarray(x) for x in xs]
        plain = [(arrays(xs), arrays(gs), arrays(us)) for xs, gs, us in chosen]
        return compared_at(self, derivation, plain, tolerance, captured, convert)

    @property
    def has_free_signs(self) -> bool:
        """Whether the program reads singular vectors or eigenvectors."""
        values = {"svd": 1, "eigh": 0}
        read = order(self._derived.lowered.program.outputs)
        return any(x.op in values and x["output"] != values[x.op] for x in read)

    def near(
        self, inputs: Sequence[Any], step: float = 0.1
    ) -> Callable[[np.random.Generator], tuple]:
        """A ``sample`` that draws its inputs near these, with their signs.

        Args:
            inputs: One array for each input, such as those that the program was recorded with.
            step: The relative size of the steps away from them.
        """
        return near(inputs, self, step)

    def point(self, rng: np.random.Generator) -> tuple[list, list, list]:
        """Random inputs, cotangents and directions, standard normal; integers are 0 or 1."""
        d = self._derived
        groups = (d.lowered.program.inputs, d.cotangents, d.directions)
        inputs, cotangents, directions = ([draw(rng, p) for p in group] for group in groups)
        return inputs, cotangents, directions


@dataclass(frozen=True)
class Values:
    """The numbers of a formula.

    Attributes:
        outputs: The program's results.
        gradients: The inputs' cotangents, for inputs that can have one; None for others.
        second: At order 2: the derivatives of <u, gradients> by each input and by each
            cotangent; None where there is none.
    """

    outputs: tuple[np.ndarray | None, ...]
    gradients: tuple[np.ndarray | None, ...]
    second: tuple[np.ndarray | None, ...] = ()


@dataclass
class _FormulaPrograms:
    """All programs of a formula."""

    lowered: Lowered
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
    given: list[Any] | None = None
    held: Mapping[int, Any] = field(default_factory=dict)
    calling: Callable[[Callable[..., Any]], Callable[..., Any]] | None = None

    def _whole_title(self) -> Written:
        names = [[self.names[x] for x in (p.whole, p.real, p.imaginary)] for p in self.pairs]
        sums = [
            Written(f"{z.text} = {a.text} + i {b.text}", f"{z.latex} = {a.latex} + i\\, {b.latex}")
            for z, a, b in names
        ]
        return _title("that is, with", ts.join(sums, ", ", ",\\; ", ts.SUM))

    @property
    def computable(self) -> bool:
        roots = [x for x in (*self.outputs, *self.gradients, *self.second) if x is not None]
        return all(x["function"] is not None for x in everything(roots) if x.op == "opaque")

    def statements(self) -> Statements:
        result = Statements(self._sections(), self.names, self.tables)
        result.write()
        return result

    def _sections(self) -> list[Section]:
        sections = [
            Section(_title("the program"), list(zip(self.outputs, self.output_names, strict=True)))
        ]
        given = ts.join([self.names[p] for p in self.cotangents], ", ", ", ", ts.SUM)
        pairs = zip(self.gradients, self.gradient_names, strict=True)
        sections.append(
            Section(_title("its adjoint, from", given), [(g, n) for g, n in pairs if g is not None])
        )
        if self.whole:
            sections.append(Section(self._whole_title(), self.whole))
        if self.order == 2:
            pairs = zip(self.second, self.second_names, strict=True)
            sections.append(
                Section(self._second_title(), [(g, n) for g, n in pairs if g is not None])
            )
        return sections

    def _second_title(self) -> Written:
        shown = [
            n for g, n in zip(self.gradients, self.gradient_names, strict=True) if g is not None
        ]
        pairs = zip(self.directions, shown, strict=True)
        terms = [ts.inner_product(self.names[u], n) for u, n in pairs]
        return _title("the adjoint of that, of s =", ts.summed(terms))

    def legend(self, statements: Statements) -> list[Written]:
        leaves = [
            *self.lowered.program.inputs,
            *self.lowered.captured.values(),
            *self.lowered.draws,
        ]
        used = set(statements.values)
        sizes: dict[str, int] = {}
        result = []
        for p in leaves:
            if p not in used and p not in self.lowered.program.inputs:
                continue
            letters = statements.axes.letters(p)
            sizes.update(zip(letters, p.shape, strict=True))
            result.append(_space(self.names[p], p, letters))
        for x, name in statements.constants:
            shape = "×".join(map(str, x.shape)) or "a number"
            result.append(Written(f"{name.text}: held by the program, {shape}", name.latex))
        said = ", ".join(f"{l} = {n}" for l, n in sizes.items())
        return [*result, *([Written(said, said)] if said else [])]

    def evaluate(
        self, inputs: Arrays, cotangents: Given, directions: Given, captured: Captured, draws: Given
    ) -> Values:
        known = self.known(inputs, cotangents, directions, captured, draws)
        wanted = [*self.outputs, *self.gradients, *self.second]
        real = [x for x in wanted if x is not None]
        values = dict(zip(real, evaluate(real, known), strict=True))
        get = lambda xs: tuple(None if x is None else _shaped(x, values[x]) for x in xs)
        return Values(get(self.outputs), get(self.gradients), get(self.second))

    def known(
        self, inputs: Arrays, cotangents: Given, directions: Given, captured: Captured, draws: Given
    ) -> dict[Expr, Any]:
        program = self.lowered.program
        known = _matched("inputs", program.inputs, inputs)
        if cotangents is None:
            cotangents = [np.ones(p.shape) for p in self.cotangents]
        known |= _matched("cotangents", self.cotangents, cotangents)
        if self.order == 2:
            if directions is None:
                raise GradtoolsError("formula: order 2 needs directions, one for each gradient")
            known |= _matched("directions", self.directions, directions)
        known |= self._captured(captured)
        return known | self._draws(draws)

    def _captured(self, captured: Captured) -> dict[Expr, Any]:
        if isinstance(captured, Mapping):
            return {p: captured[v] for v, p in self.lowered.captured.items()}
        return _matched("captured", tuple(self.lowered.captured.values()), captured)

    def _draws(self, draws: Given) -> dict[Expr, Any]:
        if draws is None:
            return {p: v for p, v in self.lowered.draws.items() if v is not None}
        return _matched("draws", tuple(self.lowered.draws), draws)


def _shaped(x: Expr, value: np.ndarray) -> np.ndarray:
    return np.asarray(value).reshape(x.shape)


def _matched(what: str, places: Sequence[Expr], values: Any) -> dict[Expr, Any]:
    values = list(values)
    if len(values) != len(places):
        raise GradtoolsError(
            f"formula: {len(places)} {what} are needed "
            f"({', '.join(p['name'] for p in places) or 'none'}); {len(values)} were given"
        )
    return dict(zip(places, values, strict=True))


def derive(
    graph: PlainGraph,
    order: int = 1,
    names: Mapping[int, str] | None = None,
    wrt: Sequence[int] | None = None,
    named: bool = True,
) -> Formula:
    """The formula of a recorded program.

    Args:
        graph: The program, in the words of `operations/`.
        order: 1, or 2 for the double backward as well.
        names: How values are called, by number; by default their own names.
        wrt: The positions of the inputs to which it is differentiated; by default all that are
            floating or complex.
        named: Whether what is known by a name, such as softplus, is written and differentiated by
            it; else everything is differentiated as it was recorded.

    Raises:
        GradtoolsError: The order is neither 1 nor 2, or the record breaks the vocabulary.

    Example:
        >>> from gradtools.seeing.formulas.graph_builder import Builder
        >>> b = Builder()
        >>> w, x = b.input("W", (3, 4)), b.input("x", (4,))
        >>> print(derive(b.graph(b("matmul", w, x))).lines(1)[0])
        W̄ = ȳ xᵀ
    """
    if order not in (1, 2):
        raise GradtoolsError(f"formula: order is 1 or 2, not {order!r}")
    lowered = lower(graph, names)
    lowered.program = recognise(lowered.program) if named else lowered.program
    return Formula(_derive(lowered, order, wrt))


def _derive(lowered: Lowered, order_: int, wrt: Sequence[int] | None) -> _FormulaPrograms:
    program = lowered.program
    outputs = list(program.outputs)
    active = [k for k, p in enumerate(program.inputs) if p.is_inexact and (wrt is None or k in wrt)]
    names, output_names = leaf_names(lowered, outputs)
    inexact = [(y, w) for y, w in zip(outputs, output_names, strict=True) if y.is_inexact]
    cotangents = []
    for y, w in inexact:
        g = placeholder(f"cotangent of {w.text}", y.shape, y.kind, role="cotangent")
        cotangents.append(g)
        names[g] = ts.bar(w)
    sources = [program.inputs[k] for k in active]
    result, table = adjoint([y for y, _ in inexact], cotangents, sources)
    tables = [table]
    outputs, result = _with_one_loop_each(outputs, result)
    directions: list[Expr] = []
    second: list[Expr] = []
    second_names: list[Written] = []
    if order_ == 2:
        directions = [placeholder(f"u {p['name']}", p.shape, p.kind) for p in sources]
        for u, p in zip(directions, sources, strict=True):
            names[u] = _direction(names[p], len(sources))
        plain = control.without_rules(result)
        second, other = adjoint(plain, directions, [*sources, *cotangents])
        tables.append(other)
        second_names = [_partial(names[p]) for p in (*program.inputs, *cotangents)]
    outputs, result, second = _with_one_loop_each(outputs, result, second)
    place = dict(zip(active, result, strict=True))
    gradients = [place.get(k) for k in range(len(program.inputs))]
    gradient_names = [ts.bar(names[p]) for p in program.inputs]
    full_second = _spread(second, active, len(program.inputs), len(cotangents))
    pairs, whole = _in_complex_numbers(program.inputs, cotangents, gradients, names)
    programs = lowered, order_, outputs, cotangents, gradients, directions, full_second, tables
    written = names, output_names, gradient_names, second_names, pairs, whole
    return _FormulaPrograms(*programs, *written)


def _in_complex_numbers(
    inputs: Sequence[Expr],
    cotangents: Sequence[Expr],
    gradients: Sequence[Expr | None],
    names: dict[Expr, Written],
) -> tuple[list[ComplexPair], list[tuple[Expr, Written]]]:
    """The adjoint of separate real and imaginary parts, where it can be said of both together."""
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


def _spread(second: list, active: list[int], inputs: int, cotangents: int) -> list:
    if not second:
        return []
    place = dict(zip(active, second, strict=False))
    return [*(place.get(k) for k in range(inputs)), *second[len(second) - cotangents :]]


def _direction(x: Written, count: int) -> Written:
    if count == 1:
        return Written("u", "u")
    return Written(f"u_{x.text}", rf"u_{{{x.latex}}}")


def _partial(x: Written) -> Written:
    return Written(f"∂s/∂{x.text}", rf"\frac{{\partial s}}{{\partial {x.latex}}}")


def _with_one_loop_each(*groups: list[Expr]) -> list[list[Expr]]:
    """A loop that also keeps its history stands for the loop that does not."""
    roots = [x for group in groups for x in group]
    longest: dict[tuple, Expr] = {}
    for x in order(roots):
        if x.op == "scan":
            best = longest.get(_loop_key(x))
            if best is None or len(x["body"].outputs) > len(best["body"].outputs):
                longest[_loop_key(x)] = x

    def rebuild(x: Expr, args: tuple[Expr, ...]) -> Expr:
        if x.op != "scan":
            return algebra.rebuild(x, args)
        body = longest[_loop_key(x)]["body"]
        made: list[Expr] = algebra.apply("scan", *args, **{**x.parameters, "body": body})
        return made[x["output"]]

    if not longest:
        return [list(group) for group in groups]
    known = {}
    for x in order(roots):
        if x.op == "scan" and longest[_loop_key(x)]["body"] is not x["body"]:
            known[x] = rebuild(x, x.args)
    changed = iter(substitute(roots, known, rebuild))
    return [[next(changed) for _ in group] for group in groups]


def _loop_key(x: Expr) -> tuple:
    return (x.args, x["body"].inputs, x["length"], x["reverse"])


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


def _aligned_text(lines: Sequence[Statement]) -> list[str]:
    return [
        "  " * (line.depth + 1)
        + (f"{line.left.text} = {line.right.text}" if line.left is not None else line.right.text)
        for line in lines
    ]


def _latex_row(line: Statement) -> str:
    indent = r"\quad " * line.depth
    if line.left is None:
        return rf"&{indent}{line.right.latex}"
    return rf"&{indent}{line.left.latex} = {line.right.latex}"
