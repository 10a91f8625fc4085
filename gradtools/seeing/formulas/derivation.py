"""`Formula`: a program and its adjoint as mathematics, made by `derive`.

`derive` transforms a recorded program to its adjoint program and, at order 2, to the adjoint of
that. A `Formula` prints as text, as LaTeX and in notebooks. It is evaluated in NumPy, to be
compared with a framework.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from gradtools.arguments.wording import with_article
from gradtools.errors import GradtoolsError
from gradtools.printing import printable
from gradtools.seeing.formulas import files
from gradtools.seeing.formulas import typesetting as ts
from gradtools.seeing.formulas.complex_pairs import ComplexPair, find_pairs, pair, together
from gradtools.seeing.formulas.expressions import Expr, placeholder
from gradtools.seeing.formulas.expressions import order as ordered
from gradtools.seeing.formulas.operation_record import OPERATIONS, evaluate
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


class Formula:
    """A program and its derivatives as mathematics.

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
    _statements: Statements | None = None

    def __init__(self, recorded: Recorded, order: int, wrt: Sequence[int] | None) -> None:
        inputs = recorded.opened
        self.order, self._recorded = order, recorded
        self._outputs = list(recorded.outputs)
        leaves = list(dict.fromkeys((*inputs, *recorded.held)))
        self._names, self._output_names = leaf_names(leaves, self._outputs)
        active = [k for k, p in enumerate(inputs) if p.is_inexact and (wrt is None or k in wrt)]
        sources = [inputs[k] for k in active]
        inexact = [(y, w) for y, w in self._named_outputs if y.is_inexact]
        self._cotangents = [self._cotangent(y, w) for y, w in inexact]
        grads, self._table = adjoint([y for y, _ in inexact], self._cotangents, sources)
        spread = lambda xs: [dict(zip(active, xs, strict=False)).get(k) for k in range(len(inputs))]
        self._gradients = spread(grads)
        self._gradient_names = [ts.bar(self._names[p]) for p in inputs]
        self._directions: list[Expr] = []
        self._second: list[Expr | None] = []
        self._second_names: list[Written] = []
        if order == 2:
            self._directions = [self._direction(p, len(sources)) for p in sources]
            both, _ = adjoint(grads, self._directions, [*sources, *self._cotangents])
            self._second = [*spread(both), *both[len(sources) :]]
            xs = [self._names[p] for p in (*inputs, *self._cotangents)]
            self._second_names = [Written(f"∂s/∂{x.text}") for x in xs]
        self._pairs, self._whole = self._in_complex_numbers()
        marked = [x["name"] for x in ordered(self._outputs) if x.op == "by_name"]
        self.marked = tuple(dict.fromkeys(marked))
        texts = lambda ps: tuple(self._names[p].text for p in ps)
        self.inputs = texts(inputs)
        self.outputs = tuple(w.text for w in self._output_names)
        self.cotangents, self.directions = texts(self._cotangents), texts(self._directions)
        self.gradients = tuple(w.text for w in self._gradient_names)
        self.second = tuple(w.text for w in self._second_names)

    @property
    def _named_outputs(self) -> list[tuple[Expr, Written]]:
        return list(zip(self._outputs, self._output_names, strict=True))

    def _cotangent(self, y: Expr, name: Written) -> Expr:
        g = placeholder(f"cotangent of {name.text}", y.shape, y.kind)
        self._names[g] = ts.bar(name)
        return g

    def _direction(self, p: Expr, count: int) -> Expr:
        u, x = placeholder(f"u {p['name']}", p.shape, p.kind), self._names[p]
        self._names[u] = Written("u" if count == 1 else f"u_{x.text}")
        return u

    def _in_complex_numbers(self) -> tuple[list[ComplexPair], list[tuple[Expr, Written]]]:
        """The adjoint of separate real and imaginary parts in complex form, if it has one."""
        pairs, cotangents = find_pairs(self._recorded.opened), self._cotangents
        if not pairs or len(cotangents) != 2 or cotangents[0].shape != cotangents[1].shape:
            return [], []
        base = "O" if "O" not in {p.name for p in pairs} else "out"
        pairs.append(pair(base, *cotangents))
        place = dict(zip(self._recorded.opened, self._gradients, strict=True))
        result = []
        for p in pairs[:-1]:
            a, b = place[p.real], place[p.imaginary]
            joined = None if a is None or b is None else together(a, b, pairs)
            if joined is None:
                return [], []
            self._names[p.whole] = ts.symbol(p.name)
            result.append((joined, ts.bar(self._names[p.whole])))
        self._names[pairs[-1].whole] = ts.bar(ts.symbol(base))
        return pairs, result

    # Reading.

    def __str__(self) -> str:
        lines = []
        for section in self._written().sections:
            lines += [f"{section.title} {section.of}".strip(), *_aligned_text(section), ""]
        lines += ["where", *(f"  {text}" for text in self._legend())]
        lines += [f"  {definition}" for definition in self._recognised()]
        lines += [f"  {note}" for note in self._written().writer.notes]
        lines += [str(self.check)] if self.check is not None else []
        return printable("\n".join(lines))

    def __repr__(self) -> str:
        return str(self)

    def lines(self, section: int) -> list[str]:
        """The lines of one part: 0 the program, 1 its adjoint, 2 the adjoint of that."""
        parts = self._written().sections
        if section not in range(len(parts)):
            raise GradtoolsError(
                f"formula.lines: part is {section!r}; expected one of 0 to {len(parts) - 1}. "
                "formula(f, *args, order=2) has one part more than order 1."
            )
        return [line.strip() for line in _aligned_text(parts[section])]

    def latex(self) -> str:
        """The formula in LaTeX: one ``aligned`` for each part, and one for definitions of names."""
        blocks = []
        for section in self._written().sections:
            title = rf"\textbf{{{section.title}}}\ {ts.latex(section.of)}"
            rows = [ts.latex(f"{a.text} = {b.text}") for a, b in section.lines]
            blocks.append(_aligned_latex([title, *rows]))
        if names := self._recognised():
            blocks.append(_aligned_latex([*map(ts.latex, names)]))
        return "\n\\\\[1em]\n".join(blocks)

    def _repr_latex_(self) -> str:
        return f"$${files.gathered(self)}$$"

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes a file in the format of its suffix: .txt, .tex (LaTeX to include) or .md.

        Raises:
            GradtoolsError: The suffix is unknown.
        """
        saving.save(self, files.FORMS, path)

    def _written(self) -> Statements:
        if self._statements is None:
            self._statements = Statements(self._sections(), self._names, self._table)
        return self._statements

    def _sections(self) -> list[Section]:
        there = lambda xs, ws: [(x, w) for x, w in zip(xs, ws, strict=True) if x is not None]
        given = ", ".join(self._names[p].text for p in self._cotangents)
        gradients = there(self._gradients, self._gradient_names)
        sections = [
            Section("the program", "", self._named_outputs),
            Section("its adjoint, from", given, gradients),
        ]
        if self._whole:
            sections.append(Section("that is, with", self._sums(), self._whole))
        if self.order == 2:
            pairs = zip(self._directions, [w for _, w in gradients], strict=True)
            terms = [ts.inner_product(self._names[u], n) for u, n in pairs]
            second = there(self._second, self._second_names)
            sections.append(Section("the adjoint of that, of s =", ts.summed(terms).text, second))
        return sections

    def _sums(self) -> str:
        """The complex arrays as the sums of their parts."""
        names = [[self._names[x].text for x in (p.whole, p.real, p.imaginary)] for p in self._pairs]
        return ", ".join(f"{z} = {a} + i {b}" for z, a, b in names)

    def _legend(self) -> list[str]:
        """The spaces of the leaves, the constants, and the lengths of the axes."""
        written, recorded = self._written(), self._recorded
        used = {*written.values, *recorded.opened}
        sizes: dict[str, int] = {}
        result = []
        for p in dict.fromkeys((*recorded.opened, *recorded.held)):
            if p in used:
                letters = written.axes.letters(p)
                sizes.update(zip(letters, p.shape, strict=True))
                result.append(_space(self._names[p], p, letters))
        for x, name in written.constants:
            shape = "×".join(map(str, x.shape)) or "a number"
            result.append(f"{name.text}: held by the program, {shape}")
        lengths = ", ".join(f"{l} = {n}" for l, n in sizes.items())
        return [*result, *([lengths] if lengths else [])]

    def _recognised(self) -> list[str]:
        """The definitions of recognized names."""
        used = self._written().writer.recognised
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
        groups = (self._outputs, self._gradients, self._second)
        real = [x for group in groups for x in group if x is not None]
        values = dict(zip(real, evaluate(real, known), strict=True))
        shaped = lambda x: None if x is None else np.asarray(values[x]).reshape(x.shape)
        return Values(*(tuple(map(shaped, group)) for group in groups))

    def _known(
        self, inputs: Arrays, cotangents: Arrays | None = None, directions: Arrays | None = None
    ) -> dict[Expr, Any]:
        """The value of each placeholder."""
        recorded = self._recorded
        known = _matched("inputs", recorded.opened, inputs)
        if cotangents is None:
            cotangents = [np.ones(p.shape) for p in self._cotangents]
        known |= _matched("cotangents", self._cotangents, cotangents)
        if self.order == 2:
            if directions is None:
                raise GradtoolsError("formula: order 2 needs directions, one for each gradient")
            known |= _matched("directions", self._directions, directions)
        return known | {p: v for p, v in recorded.held.items() if p not in recorded.wanted}

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
        groups = (self._recorded.opened, self._cotangents, self._directions)
        inputs, cotangents, directions = ([_draw(rng, p) for p in group] for group in groups)
        return inputs, cotangents, directions


def derive(
    recorded: Recorded,
    order: int = 1,
    wrt: Sequence[int] | None = None,
) -> Formula:
    """The formula of a recorded program.

    Args:
        recorded: The program. Its inputs are followed by differentiated captured arrays.
        order: 1, or 2 to add the double backward.
        wrt: The positions of the differentiated inputs; by default all floating and complex ones.
    """
    if order not in (1, 2):
        raise GradtoolsError(f"formula: order is 1 or 2, not {order!r}")
    return Formula(recorded, order, wrt)


def _draw(rng: np.random.Generator, p: Expr) -> np.ndarray:
    """A random value for a placeholder: standard normal, or zeros and ones."""
    if not p.is_inexact:
        return rng.integers(0, 2, p.shape).astype(bool if p.kind == "boolean" else np.int64)
    x = rng.normal(size=p.shape)
    return x + 1j * rng.normal(size=p.shape) if p.is_complex else x


def _matched(what: str, places: Sequence[Expr], values: Any) -> dict[Expr, Any]:
    values = list(values)
    if len(values) != len(places):
        raise GradtoolsError(
            f"formula: {len(places)} {what} are needed "
            f"({', '.join(p['name'] for p in places) or 'none'}); {len(values)} were given"
        )
    return dict(zip(places, values, strict=True))


_FIELDS = {"real": "ℝ", "complex": "ℂ", "integer": "ℤ", "boolean": "{0,1}"}


def _space(name: Written, p: Expr, letters: Sequence[str]) -> str:
    """The declaration of a leaf: x ∈ ℝ^(i×j)."""
    over = "×".join(letters)
    high = f"^({over})" if len(letters) > 1 else f"^{over}" if over else ""
    return f"{name.text} ∈ {_FIELDS[p.kind]}{high}"


def _aligned_text(section: Section) -> list[str]:
    return [f"  {a.text} = {b.text}" for a, b in section.lines]


def _aligned_latex(rows: Sequence[str]) -> str:
    return "\\begin{aligned}\n" + " \\\\\n".join(f"&{row}" for row in rows) + "\n\\end{aligned}"
