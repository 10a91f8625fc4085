"""`why_zero` finds operations at which a gradient is lost, and suggests fixes.

A lost gradient raises no error, and training continues without it. The report contains:

a. leaves without a gradient, or with a zero gradient at the given values, and the operations at
   which the gradient is lost;
b. scalar summands of the loss that depend on leaves only through operations without a derivative,
   such as a conversion to NumPy or an argmax;
c. NaN and infinite values, and the source lines at which they first occur;
d. differences between the optimizer and the model (`training.py`);
e. gradient edits, such as `clip_gradient`, that pass no gradient to any leaf.

A `detach` or `stop_gradient` on one part of a tensor is not reported if other parts are
differentiated. `gradient_losses.py` finds (a), (b) and (e) in the graph of one recorded run;
`gradients_at_values.py` finds (a) and (c) in the forward and backward passes at the given values.
`findings.py` defines the kinds of lost gradients.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from gradtools.code_origin import Source, definition_of
from gradtools.seeing.diagnostics.findings import KINDS, Finding
from gradtools.seeing.diagnostics.gradients_at_values import LossPlace, PassesAtValues
from gradtools.seeing.graphs.derivative_flow import behind, flat
from gradtools.seeing.graphs.gradient_losses import (
    STOPS,
    Loss,
    losses,
    losses_between,
    lost_summands,
    useless_edits,
)
from gradtools.seeing.graphs.nodes import Dependence, Node, PlainGraph
from gradtools.seeing.graphs.passes import EDITED
from gradtools.seeing.graphs.program import LeafProgram
from gradtools.seeing.graphs.recording import Recording

_NONE, _FULL = Dependence.NONE, Dependence.DIFFERENTIABLE
Note = tuple[str, list[str]]  # the text of a note, and the names of the affected leaves


def recording_of(program: LeafProgram) -> Recording:
    """Records one run of a program, and the gradients at the values of its leaves.

    Raises:
        GradtoolsError: The function of the program raised an error.
    """
    with program.running():
        record: Callable[..., Recording] = program.framework.recorded_run.record
        recording = record(program.run, program.leaves, program.names)
        return replace(recording, graph=flat(recording.graph))


@dataclass
class Diagnosis:
    """The result of one analysis by `why_zero`.

    Attributes:
        findings: The lost gradients, each with the operation and the source line at which it is
            lost.
        names: The names of the arrays that were examined.
        notes: Notes on gradients that may be stopped intentionally. Each note contains a text and
            the names of the affected arrays.
    """

    findings: list[Finding] = field(default_factory=list)
    names: list[str] = field(default_factory=list)
    notes: list[Note] = field(default_factory=list)


def diagnosed(
    program: LeafProgram,
    recording: Recording,
    examined: Mapping[str, Sequence[int]],
    absent: str = "unused",
) -> Diagnosis:
    """Returns findings and notes on the gradients of the examined arrays.

    Args:
        program: The function and its leaves.
        recording: The recorded run of `program`.
        examined: Maps the name of each leaf or parameter to the indices of its values in the graph,
            an empty sequence if the program does not read the array.
        absent: The kind of finding, a key of `KINDS`, for an array from which no data flows to the
            output.
    """
    names = [*examined]
    if recording.refusal is not None:
        lost_by = names or ["the loss"]
        return Diagnosis([replace(recording.refusal, argument=name) for name in lost_by], names)
    graph, passes = recording.graph, recording.passes or PassesAtValues()
    findings, notes, at_values = list[Finding](), list[Note](), list[Finding]()
    matters = behind(graph, tuple(graph.outputs))
    numbers: dict[int, str] = {}
    for name, values in examined.items():
        best = max((matters.get(n, _NONE) for n in values), default=_NONE)
        leaf = next((n for n in values if n in passes.gradients), None)
        places = passes.places(leaf)
        is_absent = bool(passes.steps) and leaf is None
        rules = [rule for n in values if (rule := passes.last_rule(n, EDITED))] if is_absent else []
        if best == _FULL and rules:  # a custom rule or an edit returns no cotangent
            kinds = [(n, "edit" if n.mark == EDITED else "rule") for n in rules]
            findings += from_losses(name, [Loss(replace(n, loss=k), 0) for n, k in kinds])
        elif best == _FULL or (leaf is not None and places is None):
            numbers.update(dict.fromkeys(values, name))
        elif lost := [loss for number in values for loss in losses(graph, number)]:
            findings += from_losses(name, lost)
            continue
        elif not places:
            line = source_of(program.f) if absent == "unused" else None
            findings.append(Finding(name, absent, "argument", line))
        starting = [p for p in places or () if leaf is not None and passes.starts_at_zero(p, leaf)]
        if starting and len(starting) == len(places or ()):
            notes.append((f"{_at(starting[0].node)} {_STARTS_AT_ZERO}", [name]))
        elif places is not None:
            at_values += _from_values(name, places)

    every = [*numbers, *(v for v in graph.inputs if graph.values[v].is_inexact)]
    every += [n for _, x in recording.parameters for n in recording.numbers(x)]
    for number, loss in useless_edits(graph, numbers, every):
        findings += from_losses(numbers[number], [loss])
    known = {(f.argument, f.source) for f in findings}
    for name, lost in _of_summands(graph, numbers, every):
        if not _is_stopped(lost):
            findings += from_losses(name, lost)
        elif (name, lost[0].node.source) not in known:
            notes.append((f"{_at(lost[0].node)} {_STOPPED}", [name]))
    return Diagnosis(without_repeats([*findings, *at_values]), names, gathered_notes(notes))


def _of_summands(
    graph: PlainGraph, numbers: dict[int, str], every: Iterable[int]
) -> Iterator[tuple[str, list[Loss]]]:
    """Yields leaves that affect a loss summand only through nondifferentiable operations.

    Each item contains the name of a leaf and the operations at which its gradient is lost.
    """
    for value, role in lost_summands(graph, every):
        for number, name in numbers.items():
            lost = [replace(x, whole=False) for x in losses_between(graph, number, [value])]
            rounded = all(loss.node.loss == "zero_derivative" for loss in lost)
            if lost and not (role and _is_stopped(lost)) and not (role == "part" and rounded):
                yield name, lost


def _is_stopped(lost: Sequence[Loss]) -> bool:
    """Returns whether detach, stop_gradient or no_grad stops the gradient of a whole summand."""
    first = all(loss.node.loss in STOPS for loss in lost if not loss.further)
    later = any(loss.node.loss in STOPS for loss in lost if loss.further)
    return (first or later) and all(loss.node.loss != "left_framework" for loss in lost)


def from_losses(name: str, losses: Sequence[Loss]) -> list[Finding]:
    """Converts lost gradients of a leaf to findings, one per source line, kind and operation."""
    findings = []
    for loss in losses:
        node, kind = loss.node, loss.node.loss if loss.node.loss in KINDS else "discrete"
        where = node.source, node.scope
        findings.append(Finding(name, _kind(node, kind), _called(node), *where, loss.whole))
    return without_repeats(findings)


def _from_values(name: str, places: Sequence[LossPlace]) -> list[Finding]:
    """Creates one finding per operation at which a gradient is zero or NaN at the given values."""
    return [
        Finding(name, _kind(node, kind), _called(node), node.source, node.scope)
        for node, kind in ((place.node, place.kind) for place in places)
        if node.loss != "zero_derivative"  # reported already
    ]


def _kind(node: Node, kind: str | None) -> str:
    """Returns `kind`, or "bridged" if a function of the other framework loses the gradient."""
    is_inside = kind in ("rule", "discrete") and "bridged" in node.attributes
    return "bridged" if is_inside else str(kind)


def _called(node: Node) -> str:
    """Returns the name of the node's function or custom rule, or the framework's operation name."""
    return str(node.attributes.get("name") or node.native or node.operation)


def without_repeats(findings: Iterable[Finding]) -> list[Finding]:
    """Removes findings with the leaf, kind, operation and source line of an earlier finding."""
    kept: dict[Any, Finding] = {}
    for finding in findings:
        place = finding.source or finding.scope
        cause = finding.kind, finding.operation, place, finding.whole
        kept.setdefault((finding.argument, cause), finding)
    return list(kept.values())


# --- notes -------------------------------------------------------------------------------

_STOPPED = "stops the gradient of a whole summand of the loss; the summand is a constant"
_STARTS_AT_ZERO = (
    "multiplies by a trained factor that is zero at these values, as in LoRA and ReZero; the "
    "gradient is zero until the factor has changed"
)


def _at(node: Node) -> str:
    return f"{_called(node)} at {node.source or 'a line of f'}"


def gathered_notes(notes: Iterable[Note]) -> list[Note]:
    """Merges notes with equal texts into a single note that lists all their leaves."""
    names: dict[str, list[str]] = {}
    for text, of in notes:
        known = names.setdefault(text, [])
        known += [name for name in of if name not in known]
    return list(names.items())


# --- f and its parameters -----------------------------------------------------------------


def source_of(f: Any) -> Source | None:
    """Returns the source line of the definition of f, or of its `forward` or `__call__` method."""
    f = inspect.unwrap(getattr(f, "func", f))
    for candidate in (f, getattr(f, "forward", None), type(f).__call__):
        if source := definition_of(candidate):
            return source
    return None


def of_modules_in_use(recording: Recording) -> list[tuple[str, Any]]:
    """Returns the captured parameters of the modules that the recorded function uses.

    A captured module is ignored if the function reads none of its parameters.
    """
    root = lambda name: name.partition(".")[0]
    used = {root(name) for name, x in recording.parameters if recording.numbers(x)}
    return [(name, x) for name, x in recording.parameters if root(name) in used]
