"""Defines `GradientReport`, the result of `why_zero`."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from gradtools.printing import coloured, printable
from gradtools.seeing.diagnostics.findings import KINDS, Finding
from gradtools.seeing.graphs.nodes import grouped, shared_length


@dataclass(frozen=True)
class GradientReport:
    """The result of `why_zero`; `bool(report)` is False if no gradient is lost.

    Attributes:
        findings: The lost gradients, with one finding for each leaf and cause.
        arguments: The names of the leaves that were examined.
        notes: Notes on gradients that may be stopped intentionally. Each note contains a text and
            the names of the affected leaves.

    `str(report)` groups leaves with equal findings, for example "these 41 leaves: bert.*".
    """

    findings: tuple[Finding, ...]
    arguments: tuple[str, ...]
    notes: tuple[tuple[str, tuple[str, ...]], ...] = ()

    def __bool__(self) -> bool:
        return bool(self.findings)

    def __len__(self) -> int:
        return len(self.findings)

    def __iter__(self) -> Iterator[Finding]:
        return iter(self.findings)

    def __str__(self) -> str:
        blocks = []
        if not self.findings and not self.arguments:
            blocks.append(
                "Nothing was examined: f has no argument and captures no parameter. Pass its "
                "arguments, why_zero(f, x), or the trained model, why_zero(f, model=...)."
            )
        elif not self.findings:
            names = gathered(self.arguments, self.arguments)
            blocks.append(f"Nothing is lost: the output's gradient reaches {names}.")
        result = grouped(self.findings, lambda finding: finding.argument)
        places = lambda name: tuple(dict.fromkeys(map(_place, result[name])))
        for several in grouped(result, places).values():
            merged = _merged([result[name] for name in several])
            title = f"{gathered(several, self.arguments)} {_headline(merged, len(several) > 1)}"
            blocks += [title, *map(_lines, merged)]
        for text, noted in self.notes:
            of = f"{gathered(noted, noted)}: " if noted else ""
            blocks.append(f"Note: {of}{text}.")
        return printable("\n\n".join(blocks))

    def _repr_html_(self) -> str:
        return coloured(str(self))

    def to_dict(self) -> dict[str, Any]:
        """Returns the report as a dict that `json.dumps` accepts."""
        return {
            "findings": [
                {**asdict(f), "reason": f.reason, "fix": f.fix, "numerical": f.numerical}
                for f in self.findings
            ],
            "arguments": list(self.arguments),
            "notes": [{"text": text, "arguments": list(names)} for text, names in self.notes],
        }

    def to_json(self) -> str:
        """Returns the report as a JSON string."""
        return json.dumps(self.to_dict(), indent=2)


def _headline(findings: Sequence[Finding], several: bool) -> str:
    own = [KINDS[finding.kind].headline for finding in findings]
    if own[0] is not None and all(own):
        return own[0][several]
    lost = [f for f, headline in zip(findings, own, strict=True) if headline is None]
    if all(finding.numerical for finding in lost):
        one = "is connected, but its gradient is zero at these values:"
        return "are connected, but their gradients are zero at these values:" if several else one
    if any(finding.whole for finding in lost):
        return "get no gradient:" if several else "gets no gradient:"
    if several:
        return "get gradients, but one term of the loss contributes nothing to them:"
    return "gets a gradient, but one term of the loss contributes nothing to it:"


def _merged(several: Sequence[Sequence[Finding]]) -> list[Finding]:
    """Merges findings of several leaves if the findings have the same kind and source line."""
    merged = []
    for findings in grouped((f for of in several for f in of), _place).values():
        names = list(dict.fromkeys(f.operation for f in findings))
        more = ", ..." if len(names) > _OPERATIONS else ""
        scope = findings[0].scope[: shared_length([f.scope for f in findings])]
        operation = ", ".join(names[:_OPERATIONS]) + more
        merged.append(replace(findings[0], operation=operation, scope=scope))
    return merged


def _place(f: Finding) -> Any:
    return f.kind, f.source, f.whole, f.detail


_OPERATIONS = 3  # maximum number of operations listed for a group


_MOST = 5  # maximum number of names or modules listed for a group


def gathered(names: Sequence[str], known: Sequence[str]) -> str:
    """Abbreviates leaf names: "these 41 leaves: bert.*" if `names` contains all leaves of bert."""
    if len(names) == 1:
        return names[0]
    result, chosen = list[str](), set(names)
    every = dict.fromkeys([*known, *names])
    for prefix, below in grouped(every, lambda name: re.split(r"[.\[]", name)[0]).items():
        inside = [name for name in below if name in chosen]
        result += [f"{prefix}.*"] if len(inside) == len(below) > 1 else inside
    listed = ", ".join(result[:_MOST])
    more = f" and {len(result) - _MOST} more" if len(result) > _MOST else ""
    return f"these {len(names)} {_noun(names)}: {listed}{more}"


def _noun(names: Sequence[str]) -> str:
    """Returns "leaves" if any of the names belongs to an argument, otherwise "parameters"."""
    of_arguments = any(name.startswith(("argument", "keyword")) for name in names)
    return "leaves" if of_arguments else "parameters"


def _lines(finding: Finding) -> str:
    """Formats the source line, module, kind, reason and fix of a finding."""
    source = finding.source
    where = "somewhere in f" if source is None else str(source)
    where += f" in {source.function}" if source is not None and source.function else ""
    where += f", module {'.'.join(finding.scope)}" if finding.scope else ""
    place = f"{where}: " if KINDS[finding.kind].has_place else ""
    lines = [f"  {place}{finding.kind} ({finding.operation})"]
    if source is not None and source.text:
        lines.append(f"      {source.text}")
    detail = f": {finding.detail.rstrip('.')}" if finding.detail else ""
    lines.append(f"    {finding.reason[0].upper()}{finding.reason[1:]}{detail}.")
    lines.append(f"    Fix: {finding.fix}.")
    return "\n".join(lines)
