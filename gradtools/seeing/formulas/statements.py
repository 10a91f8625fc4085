"""Turns an adjoint program into lines of mathematics: named values, their order, loops.

A value gets a name if it is a result, if it is used more than once and is not short, if it comes
out of an operation with several outputs, or if a line would become too long. A cotangent is
called by what it is the cotangent of, with a bar.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from gradtools.seeing.formulas import typesetting as ts
from gradtools.seeing.formulas.algebra import constant_of, contracts, drop_axes, parts
from gradtools.seeing.formulas.axes import Axes
from gradtools.seeing.formulas.expressions import Expr, Program, order
from gradtools.seeing.formulas.operation_record import is_elementwise
from gradtools.seeing.formulas.typesetting import Written
from gradtools.seeing.formulas.writing import ExpressionWriter, NeedsIndices

_LONG = 60  # characters: a longer part of a line becomes a line of its own
_SEVERAL = {"scan", "while", "cond", "eigh", "svd", "qr"}


@dataclass(frozen=True)
class Statement:
    """A line: what is said, or the head of a loop.

    Attributes:
        left: What is defined; None for a loop's head.
        right: What it is, or the head.
        depth: Within how many loops it stands.
    """

    left: Written | None
    right: Written
    depth: int = 0


@dataclass
class Section:
    """One part of the formula: the program, its adjoint, the adjoint of that.

    Attributes:
        title: What it is.
        roots: The results, with their names.
        lines: What is written.
    """

    title: Written
    roots: list[tuple[Expr, Written]]
    lines: list[Statement] = field(default_factory=list)


class Statements:
    """Writes sections, one after the other, with names that hold for all of them."""

    def __init__(
        self,
        sections: Sequence[Section],
        leaves: Mapping[Expr, Written],
        cotangents: Sequence[Mapping[Expr, Expr]],
    ) -> None:
        self.sections = sections
        self.axes = Axes()
        self.writer = ExpressionWriter(self.axes)
        self.writer.names.update(leaves)
        self.values = everything([x for s in sections for x, _ in s.roots])
        self._matrices = {x.args[0] for x in self.values if x.op in ("half", "gaps")}
        self.axes.forbid(w.text for w in leaves.values() if len(w.text) == 1)
        self.axes.forbid("tsrq")
        self.axes.learn(self.values)
        self._taken = {w.text for w in leaves.values()}
        self._done: set[Expr] = set()
        self.constants: list[tuple[Expr, Written]] = []
        self._told: set[tuple] = set()
        self._stems: dict[Expr, Written] = {}
        self._clocks: dict[tuple, str] = {}
        self._loops: list[Expr] = []  # outer ones before those inside of them
        roots = [x for s in sections for x, _ in s.roots]
        self._uses = _uses(self.values, roots)
        self._bases: Counter[str] = Counter()
        self._counts: Counter[str] = Counter()
        self._chosen: set[Expr] = set()
        self._weights: dict[Expr, float] = {}
        self._name(cotangents)

    def write(self) -> None:
        """Fill the sections' lines."""
        for section in self.sections:
            self._section(section)

    # Names.

    def _name(self, cotangents: Sequence[Mapping[Expr, Expr]]) -> None:
        roots = [(x, w) for s in self.sections for x, w in s.roots]
        self._taken |= {w.text for _, w in roots}
        if len(self.sections) > 2:  # of order 2: the derivatives are those of s
            self._taken.add("s")
        names = self.writer.names
        for x, written in roots:
            if x not in names and not _is_plain(x):
                names[x] = written
            if x.op == "ruled" and not _is_plain(x.args[x["output"]]):
                names.setdefault(x.args[x["output"]], written)
        self._forward = set(everything([x for x, _ in self.sections[0].roots]))
        self._name_constants()
        self._name_loops()
        for x in self.values:
            if self._deserves(x):
                self._chosen.add(x)
        wanted = [x for x in self.values if x in self._chosen]
        wanted = self._with_origins(wanted, cotangents)
        origin = _origins(cotangents)
        self._bases.update(self._base(x) for x in wanted if x not in origin)
        for x in wanted:
            v = origin.get(x)
            if v is not None and v in names:
                names[x] = self._free(ts.bar(names[v]))
            else:
                names[x] = self._new(self._base(x))
        self._name_long()

    def _base(self, x: Expr) -> str:
        """What belongs to the program is named by its operation, the rest is a T."""
        if x.op not in ("add", "einsum"):
            return _base(x)
        forward = x in self._forward or any(a in self._forward for a in x.args if _is_wrapper(x))
        return ("Z" if x.rank > 1 else "z") if forward and x.rank else "T"

    def _name_constants(self) -> None:
        """Arrays that the program holds."""
        held = [x for x in self.values if x.op == "array"]
        for k, x in enumerate(held):
            name = ts.symbol(f"c{k + 1}" if len(held) > 1 else "c")
            name = self._new("c") if name.text in self._taken else name
            self._taken.add(name.text)
            self.writer.names[x] = name
            self._done.add(x)
            self.constants.append((x, name))

    def _deserves(self, x: Expr) -> bool:
        weight = self._weight(x)
        if x in self.writer.names or _is_plain(x):
            return False
        return x.op in _SEVERAL or (self._uses[x] > 1 and weight >= 2 and not _divides(x))

    def _weight(self, x: Expr) -> float:
        """How much there is to read in x, up to what has a name; its arguments come first."""
        inner = sum(self._inner_weight(a) for a in x.args)
        if x.op in _LIGHT or (x.op == "einsum" and len(x.args) == 1 and not contracts(x)):
            result = inner + (0.5 if x.op in _LIGHT else 0)
        else:
            result = inner + (1 if x.op == "add" else 2) if x.args else 0
        self._weights[x] = result
        return result

    def _inner_weight(self, a: Expr) -> float:
        if a in self.writer.names or a in self._chosen:
            return 0
        return self._weights.get(a, 0)

    def _with_origins(self, wanted: list[Expr], cotangents: Sequence[Mapping]) -> list[Expr]:
        """What a named cotangent belongs to gets a name as well."""
        if not cotangents:
            return wanted
        origin = _origins(cotangents[:1])
        more = []
        for x in wanted:
            v = origin.get(x)
            if v is not None and v not in self.writer.names and v not in wanted:
                more.append(v)
        self._chosen |= set(more)
        return [*(x for x in self.values if x in more), *wanted]

    def _new(self, base: str) -> Written:
        if self._bases[base] == 1 and not self._counts[base]:
            written = ts.symbol(base)
            if written.text not in self._taken:
                self._taken.add(written.text)
                return written
        while True:
            self._counts[base] += 1
            written = ts.symbol(f"{base}{self._counts[base]}")
            if written.text not in self._taken:
                self._taken.add(written.text)
                return written

    def _free(self, written: Written) -> Written:
        if written.text in self._taken:
            return self._new("T")
        self._taken.add(written.text)
        return written

    def _name_long(self) -> None:
        """Name what would make a line too long, or what cannot be written inside of another."""
        names = self.writer.names
        parents_whole = {a for x in self.values if _is_whole_only(x) for a in x.args}
        for x in self.values:
            inside = x in parents_whole
            if x in names or (_is_plain(x) and not inside):
                continue
            try:
                too_long = len(self._whole(x).text) > _LONG and not _is_plain(x)
            except NeedsIndices:
                too_long = inside or (not _is_wrapper(x) and self._is_long_entry(x))
                if inside:
                    names[x] = self._new(self._base(x))
                    continue
            if too_long and not _is_wrapper(x):
                names[x] = self._new(self._base(x))

    def _whole(self, x: Expr) -> Written:
        return self.writer.matrix(x) if x in self._matrices else self.writer.whole(x)

    def _is_long_entry(self, x: Expr) -> bool:
        return len(self.writer.entry(x, self.axes.unique(x)).text) > _LONG

    # Loops.

    def _name_loops(self) -> None:
        """Names for what goes round in each loop, and for what it leaves."""
        self._set_clocks([x for s in self.sections for x, _ in s.roots], "tsrq")
        for y in self._loops:
            self._name_loop(y)

    def _set_clocks(self, roots: Sequence[Expr], letters: str) -> None:
        """The letter of each loop's time: another one for a loop inside of a loop."""
        for x in order(roots):
            if x.op == "scan" and x.family not in self._clocks:
                self._clocks[x.family] = letters[0]
                self._loops.append(x)
            for program in _programs(x):
                inside = letters[1:] if x.op == "scan" and len(letters) > 1 else letters
                self._set_clocks(program.outputs, inside)

    def _clock(self, y: Expr) -> str:
        return self._clocks[y.family]

    def _name_loop(self, y: Expr) -> None:
        body, consts, carries = y["body"], y["consts"], y["carries"]
        names, outer = self.writer.names, self._outputs(y)
        for k, (p, a) in enumerate(zip(body.inputs, y.args, strict=True)):
            if k < consts:
                names.setdefault(p, self._outer_name(a))
            elif k >= consts + carries:
                self._time_axis(a, self._clock(y))
                names.setdefault(p, self._at_time(a, self._clock(y)))
        for k in range(carries):
            self._name_carry(y, k, outer.get(k))
        for k, out in outer.items():
            if k >= carries:
                self._time_axis(out, self._clock(y))
                self._name_stacked(y, k, out)

    def _at_time(self, a: Expr, t: str) -> Written:
        """One slice of what a loop goes over."""
        used = {l for names in parts(a)[2] for l in names}
        if 0 not in used and a.rank:
            return self._outer_name(drop_axes(a, range(1, a.rank)))
        name = self._outer_name(a)
        return name if ts.low(t) in name.text else ts.subscript(name, t)

    def _time_axis(self, x: Expr, t: str) -> None:
        self.axes.fix(x, 0, t)

    def _name_carry(self, y: Expr, k: int, out: Expr | None) -> None:
        body, names = y["body"], self.writer.names
        p, after = body.inputs[y["consts"] + k], body.outputs[k]
        base = self._stems.get(p) or self._carry_base(p)
        self._stems[p] = base
        t = self._clock(y)
        early, late = (t, f"{t}-1") if y["reverse"] else (f"{t}-1", t)
        names.setdefault(p, ts.subscript(base, early))
        if not _is_plain(after):
            names.setdefault(after, ts.subscript(base, late))
        if out is not None:
            names.setdefault(out, ts.subscript(base, _last(y)))

    def _carry_base(self, p: Expr) -> Written:
        """The name of what goes round: the program's own, or that of which it is the cotangent."""
        owner = p["of"]
        if owner is not None and owner in self._stems:
            return self._free(ts.bar(self._stems[owner]))
        name = ts.symbol(p["name"]) if p["name"] else None
        if name is not None and name.text not in self._taken:
            self._taken.add(name.text)
            self.axes.forbid([name.text])
            return name
        return self._new("g" if owner is not None else "h")

    def _name_stacked(self, y: Expr, k: int, out: Expr) -> None:
        """What each round gives: called as a whole and, within the loop, at its time."""
        names, inner, t = self.writer.names, y["body"].outputs[k], self._clock(y)
        if inner in y["body"].inputs:
            return
        told = y["tells"][k - y["carries"]] if k - y["carries"] < len(y["tells"]) else None
        carried = y["body"].outputs.index(inner)
        if out in names:
            stem = names[out]
        elif carried < y["carries"]:
            stem = self._stems[y["body"].inputs[y["consts"] + carried]]
        elif told is not None and told in names:
            timed = ts.low(t) in names[told].text
            stem = names[told] if timed else ts.subscript(names[told], t)
            stem = ts.bar(stem)
            if stem.text in self._taken | {w.text for w in names.values()}:
                stem = ts.subscript(self._new("T"), t)
            self._taken.add(stem.text)
            names[out] = names[inner] = stem
            return
        else:
            stem = self._new("y")
        names.setdefault(out, stem)
        if not _is_plain(inner):
            names.setdefault(inner, ts.subscript(stem, t))

    def _outputs(self, y: Expr) -> dict[int, Expr]:
        return {x["output"]: x for x in self.values if x.op == y.op and x.family == y.family}

    def _outer_name(self, a: Expr) -> Written:
        names = self.writer.names
        if a not in names and not _is_plain(a):
            names[a] = self._new(self._base(a))
        try:
            return self.writer.whole(a)
        except NeedsIndices:
            names[a] = self._new("T")
            return names[a]

    # Lines.

    def _section(self, section: Section) -> None:
        roots = {x for x, _ in section.roots}
        roots |= {x.args[x["output"]] for x in roots if x.op == "ruled"}
        wanted = order([x for x, _ in section.roots])
        for x in wanted:
            if x in self._done or x in roots:
                continue
            if x.op == "scan":
                self._done.add(x)
                self._loop(section, x, 0)
            elif self._is_named(x):
                section.lines.append(self._line(x, self.writer.names[x]))
                self._define(x)
        self._roots(section)

    def _roots(self, section: Section) -> None:
        """The results in order, but none before what it is written with."""
        left, needs = list(section.roots), self._needs(section)
        while left:
            waiting = {x for x, _ in left}
            free = (e for e in left if not needs[e[0]] & (waiting - {e[0]}))
            entry = next(free, left[0])
            left.remove(entry)
            self._emit(section, *entry)

    def _needs(self, section: Section) -> dict[Expr, frozenset[Expr]]:
        """The named results that each result is made of."""
        roots = {x for x, _ in section.roots}
        reach: dict[Expr, frozenset[Expr]] = {}
        for x in order(roots):
            below = frozenset().union(*(reach[a] for a in x.args))
            named = x in roots and x in self.writer.names and x.op != "placeholder"
            reach[x] = below | {x} if named else below
        return reach

    def _emit(self, section: Section, x: Expr, written: Written) -> None:
        if x.op == "scan":
            self._loop(section, x, 0)
        line = self._root(x, written)
        timed = {written.text, written.text + ts.low(self._clocks.get(x.family, "t"))}
        told = x.op == "scan" and line.right.text in timed
        if not told and line.left is not None and line.left.text != line.right.text:
            section.lines.append(line)
        self._define(x)

    def _define(self, x: Expr) -> None:
        self._done.add(x)
        if x in self.writer.names:
            self.writer.define(x)

    def _root(self, x: Expr, written: Written) -> Statement:
        own = self.writer.names.get(x)
        left = self._at_end(x)
        if left is not None:
            return Statement(written, left)
        if x.op == "ruled" and x not in self._done:
            inner = x.args[x["output"]]
            if self.writer.names.get(inner) is own and inner not in self._done:
                self._done.add(inner)
                return self._line(inner, written)
        if own is not None and (own.text != written.text or x.op == "scan"):
            return Statement(written, own)
        return self._line(x, written)

    def _line(self, x: Expr, written: Written, depth: int = 0) -> Statement:
        own = self.writer.names.pop(x, None) if x.op != "placeholder" else None
        try:
            return Statement(written, self._whole(x), depth)
        except NeedsIndices:
            letters = self.axes.unique(x)
            left = ts.subscript(written, "".join(letters))
            return Statement(left, self.writer.entry(x, letters), depth)
        finally:
            if own is not None:
                self.writer.names[x] = own

    def _loop(self, section: Section, y: Expr, depth: int) -> None:
        """A loop: its start, its head, and one line for each value."""
        if y.family in self._told:
            return
        self._told.add(y.family)
        body, consts, carries = y["body"], y["consts"], y["carries"]
        live = self._live(y)
        before = len(section.lines)
        for k in sorted(live):
            if k < carries:
                stem = self._stems[body.inputs[consts + k]]
                left = ts.subscript(stem, str(y["length"]) if y["reverse"] else "0")
                first = self.writer.whole(y.args[consts + k])
                if left.text != first.text:
                    section.lines.append(Statement(left, first, depth))
        section.lines.append(Statement(None, _head(y, self._clock(y)), depth))
        start = len(section.lines)
        for x in order([body.outputs[k] for k in sorted(live)]):
            if x.op == "scan":
                self._loop(section, x, depth + 1)
            elif x not in self._done and self._is_named(x):
                section.lines.append(self._line(x, self.writer.names[x], depth + 1))
                self._define(x)
        for k in sorted(live):
            self._tie_output(section, y, k, depth + 1)
        if len(section.lines) == start:  # the same rounds have been told before
            del section.lines[before:]

    def _at_end(self, x: Expr) -> Written | None:
        """What goes round in a loop, as it leaves it."""
        if x.op != "scan" or x["output"] >= x["carries"]:
            return None
        return ts.subscript(self._stems[x["body"].inputs[x["consts"] + x["output"]]], _last(x))

    def _is_named(self, x: Expr) -> bool:
        return x in self.writer.names and x.op != "placeholder"

    def _tie_output(self, section: Section, y: Expr, k: int, depth: int) -> None:
        """An output that is called otherwise inside gets a line that says so."""
        out, carries, t = y["body"].outputs[k], y["carries"], self._clock(y)
        if k < carries:
            stem = self._stems[y["body"].inputs[y["consts"] + k]]
            wanted = ts.subscript(stem, f"{t}-1" if y["reverse"] else t)
        else:
            outer = self.writer.names[self._outputs(y)[k]]
            timed = outer.text.endswith(ts.low(t))
            wanted = outer if timed else ts.subscript(outer, t)
        result = self._at_end(out) or self.writer.whole(out)
        if result.text != wanted.text:
            section.lines.append(Statement(wanted, result, depth))

    def _live(self, y: Expr) -> set[int]:
        """The outputs that somebody reads, and the carries that these need."""
        body, consts, carries = y["body"], y["consts"], y["carries"]
        entering = {p: k for k, p in enumerate(body.inputs[consts : consts + carries])}
        live, queue = set(), list(self._outputs(y))
        while queue:
            k = queue.pop()
            if k in live:
                continue
            live.add(k)
            queue += [entering[x] for x in order([body.outputs[k]]) if x in entering]
        history = {k for k in live if k >= carries and body.outputs[k] in entering}
        return live - history


def _last(y: Expr) -> str:
    """The time at which a carry leaves a loop."""
    return "0" if y["reverse"] else str(y["length"])


def _head(y: Expr, t: str) -> Written:
    n = y["length"]
    first, last = (n, 1) if y["reverse"] else (1, n)
    return Written(
        f"for {t} = {first}, …, {last}:", rf"\text{{for }} {t} = {first}, \dots, {last}:"
    )


_LIGHT = {
    *("power", "conj", "real", "imag", "compare", "one_hot", "slice", "inverse", "reshape"),
    *("logical_not", "cast", "index", "take_along", "ruled", "scale_gradient", "stop", "abs"),
    "sign",
}


def _is_wrapper(x: Expr) -> bool:
    return x.op == "einsum" and len(x.args) == 1 and not contracts(x)


def _is_plain(x: Expr) -> bool:
    """Whether there is nothing to name: a leaf, a number, or one of them turned."""
    if x.op in ("placeholder", "number", "unit_matrix", "iota") or constant_of(x) is not None:
        return True
    return (_is_wrapper(x) or x.op == "conj") and _is_plain(x.args[0])


def _is_whole_only(x: Expr) -> bool:
    return not (is_elementwise(x) or x.op in ("einsum", "add"))


def everything(roots: Iterable[Expr]) -> list[Expr]:
    """All values, those of loops' and branches' programs included."""
    result: dict[Expr, None] = {}
    for x in order(roots):
        for program in _programs(x):
            result.update(dict.fromkeys(everything(program.outputs)))
            result.update(dict.fromkeys(program.inputs))
        result[x] = None
    return list(result)


def _programs(x: Expr) -> tuple[Program, ...]:
    if x.op == "scan":
        return (x["body"],)
    return tuple(x["branches"]) if x.op == "cond" else ()


def _uses(values: Sequence[Expr], roots: Sequence[Expr]) -> Counter[Expr]:
    """How often each value is read, turned or not."""
    count: Counter[Expr] = Counter(roots)
    for x in values:
        if _is_wrapper(x):
            continue
        for a in x.args if x.op != "ruled" else ():
            count[_unturned(a)] += 1
            if _unturned(a) is not a:
                count[a] += 1
    for x in values:
        if _divides(x):  # it is written below a line: what stands there is read as often
            count[_unturned(x.args[0])] += count[x] - 1
    return count


def _divides(x: Expr) -> bool:
    """Whether it is one over something."""
    return x.op == "power" and not isinstance(x["exponent"], complex) and x["exponent"] < 0


def _unturned(x: Expr) -> Expr:
    while _is_wrapper(x):
        x = x.args[0]
    return x


def _origins(cotangents: Sequence[Mapping[Expr, Expr]]) -> dict[Expr, Expr]:
    """What each cotangent belongs to, the most telling value first."""
    result: dict[Expr, Expr] = {}
    for table in cotangents[:1]:
        for v, c in table.items():
            if _is_plain(v) or v.shape != c.shape:
                continue
            if not _is_wrapper(v) or v["coefficient"] != 1 or contracts(v.args[0]):
                result.setdefault(c, v)
    return result


_ELEMENTWISE_BASE = {"exp": "e", "sigmoid": "s", "tanh": "h", "relu": "h"}
_BASES = {
    "softmax": "p",
    "log_softmax": "l",
    "standardize": "n",
    "deviation": "sigma",
    "variance": "v",
    "norm": "r",
    "convolution": "z",
    "add": "z",
    "scan": "h",
    "max_pool": "h",
    "argsort": "pi",
    "fourier": "f",
}


def _base(x: Expr) -> str:
    """What kind of a name fits: by its operation, capital with two axes and more."""
    if x.op in ("eigh", "svd", "qr"):
        return {"eigh": "λV", "svd": "UsV", "qr": "QR"}[x.op][x["output"]]
    base = _BASES.get(x.op) or _ELEMENTWISE_BASE.get(x.op) or "T"
    if base in ("sigma", "pi", "T"):
        return base
    return base.upper() if x.rank > 1 else base
