"""What the doctor says: a table of dependences, and a report of lost gradients.

Both are plain data with a text; colour is put on by whoever prints to a terminal.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import groupby
from typing import Any

from gradtools import display
from gradtools.seeing.findings import Finding
from gradtools.seeing.graph import Dependence

_BOLD, _RED, _GREEN, _DIM, _END = "\033[1m", "\033[31m", "\033[32m", "\033[2m", "\033[0m"


@dataclass(frozen=True)
class DependenceTable:
    """How each output leaf depends on each input leaf.

    Attributes:
        outputs: The names of the output leaves.
        inputs: The names of the input leaves.
        matrix: ``matrix[output][input]``.

    ``table["output", "argument 0"]`` is one entry; ``str(table)`` is the table as text.
    """

    outputs: tuple[str, ...]
    inputs: tuple[str, ...]
    matrix: tuple[tuple[Dependence, ...], ...]

    def __getitem__(self, key: tuple[str, str]) -> Dependence:
        out, into = key
        try:
            return self.matrix[self.outputs.index(out)][self.inputs.index(into)]
        except ValueError:
            raise KeyError(f"{key}: outputs are {self.outputs}, inputs {self.inputs}") from None

    def _rows(self) -> list[tuple[str, ...]]:
        columns = zip(*self.matrix, strict=True) if self.matrix else [()] * len(self.inputs)
        rows = [(name, *map(str, row)) for name, row in zip(self.inputs, columns, strict=True)]
        return [("", *self.outputs), *rows]

    def _repr_html_(self) -> str:
        return display.table(self._rows())

    def __str__(self) -> str:
        rows = self._rows()
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = ("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)
        return "\n".join(lines)


@dataclass(frozen=True)
class Report:
    """What `why_zero` found. It is false when nothing is lost.

    Attributes:
        findings: Every place at which a gradient is lost, by argument, in program order.
        arguments: The names of the leaves that were asked about.
        depends: For each leaf that has a finding, whether the output moved when the leaf was
            moved: None where that could not be tried.
    """

    findings: tuple[Finding, ...]
    arguments: tuple[str, ...]
    depends: dict[str, bool | None]

    def __bool__(self) -> bool:
        return bool(self.findings)

    def __len__(self) -> int:
        return len(self.findings)

    def __iter__(self) -> Iterator[Finding]:
        return iter(self.findings)

    def __str__(self) -> str:
        return self.text()

    def _repr_html_(self) -> str:
        return display.coloured(self.text(colour=True))

    def text(self, colour: bool = False) -> str:
        """The report as text, with a terminal's colours if asked for."""
        paint = _painted if colour else _plain
        if not self.findings:
            names = _listed(self.arguments)
            return paint(_GREEN, f"Nothing is lost: the output's gradient reaches {names}.")
        blocks = [
            self._block(name, list(group), paint)
            for name, group in groupby(self.findings, key=lambda finding: finding.argument)
        ]
        return "\n\n".join(blocks)

    def _block(self, name: str, findings: Sequence[Finding], paint: Any) -> str:
        lines = [paint(_BOLD, f"{name} {_headline(findings)}")]
        for finding in findings:
            lines += ["", *_lines(finding, paint)]
        verdict = _VERDICTS.get(self.depends.get(name))
        if verdict and any(finding.whole for finding in findings):
            lines += ["", f"  {verdict}"]
        return "\n".join(lines)

    def to_dict(self) -> dict[str, Any]:
        """The report as plain data, for JSON."""
        return {
            "findings": [
                {**asdict(f), "reason": f.reason, "mend": f.mend, "numerical": f.numerical}
                for f in self.findings
            ],
            "arguments": list(self.arguments),
            "depends": dict(self.depends),
        }

    def to_json(self) -> str:
        """The report as JSON."""
        return json.dumps(self.to_dict(), indent=2)


_VERDICTS: dict[bool | None, str] = {
    True: "The output does change when this argument is moved: a gradient is missing.",
    False: "The output did not change when this argument was moved: it may be constant in it.",
}


def _headline(findings: Sequence[Finding]) -> str:
    if all(finding.numerical for finding in findings):
        return "is connected, but its gradient is zero at these values:"
    if any(finding.whole for finding in findings):
        return "gets no gradient:"
    return "gets a gradient, but one part of what it gives is lost:"


def _lines(finding: Finding, paint: Any) -> list[str]:
    lines = [f"  {paint(_RED, _where(finding))}: {finding.kind} ({finding.operation})"]
    if finding.source and finding.source.text:
        lines.append(f"      {finding.source.text}")
    detail = f": {finding.detail.rstrip('.')}" if finding.detail else ""
    lines.append(f"    {finding.reason[0].upper()}{finding.reason[1:]}{detail}.")
    lines.append(f"    {paint(_DIM, 'Mend:')} {finding.mend}.")
    return lines


def _where(finding: Finding) -> str:
    if finding.source is None:
        where = "somewhere in f"
    else:
        where = str(finding.source)
        where += f" in {finding.source.function}" if finding.source.function else ""
    return where + (f", module {'.'.join(finding.scope)}" if finding.scope else "")


def _listed(names: Sequence[str]) -> str:
    if len(names) > 4:
        return f"all {len(names)} leaves"
    return " and ".join(filter(None, [", ".join(names[:-1]), names[-1]])) if names else "nothing"


def _painted(code: str, text: str) -> str:
    return f"{code}{text}{_END}"


def _plain(code: str, text: str) -> str:
    return text
