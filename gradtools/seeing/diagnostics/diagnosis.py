"""`why_zero`: where a gradient is lost, and the fix.

A lost gradient raises no error: training ignores it. Reported are

a. leaves that get no gradient, or one that is zero at the given values, with the operations at
   which all of it is lost;
b. scalar summands of the loss whose data left the framework or became discrete on every path;
c. NaN and infinity, with the first line that makes them;
d. differences between the optimizer and the model (`training.py`);
e. edits of gradients through which no gradient reaches any leaf.

Nothing inside of a tensor that is otherwise differentiated is reported. One recorded run serves
(a), (b) and (e), by `graphs/gradient_losses.py`; a backward pass at the values serves the others.
The kinds of loss, with their reasons and fixes, are in `findings.py`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from gradtools.code_origin import Source, definition_of
from gradtools.seeing.diagnostics.findings import KINDS, Finding
from gradtools.seeing.graphs.derivative_flow import behind, forward
from gradtools.seeing.graphs.gradient_losses import (
    STOPS,
    Loss,
    losses,
    lost_summands,
    overwritten,
    useless_edits,
)
from gradtools.seeing.graphs.nodes import Dependence, Node, PlainGraph, memory_of
from gradtools.seeing.graphs.passes import CUSTOM
from gradtools.seeing.graphs.program import LeafProgram
from gradtools.seeing.graphs.recording import (
    CapturedParameter,
    Recording,
    RefusedCall,
    Vanished,
    Wanted,
)

_NONE, _FULL = Dependence.NONE, Dependence.DIFFERENTIABLE
Note = tuple[str, list[str]]  # a text, and the leaves that it concerns

_ZEROING = frozenset(
    {"multiply", "divide", "matmul", "einsum", "dot_general", "convolution", "power", "square"}
    | {"scatter-mul"}
)
_SETTING = frozenset(
    {"scatter", "dynamic_update_slice", "setitem", "copy", "fill", "zero", "index_put"}
    | {"index_copy", "index_fill", "masked_fill", "masked_scatter", "select_scatter"}
    | {"slice_scatter", "diagonal_scatter"}
)
_SELECTING = frozenset(
    {"index", "gather", "take_along", "slice", "split", "update", "scatter", "scatter_add"}
    | {"triangle", "concatenate", "stack", "pad", "constant_pad_nd", "sort", "topk", "kthvalue"}
    | {"median", "embedding", "embedding_bag", "grid_sampler2_d", "grid_sampler3_d"}
)
_FLAT = frozenset(
    {"relu", "clip", "maximum", "minimum", "max", "min", "where", "select", "leaky_relu", "abs"}
    | {"relu6", "hardtanh", "hardsigmoid", "threshold", "hardshrink", "softshrink", "max_pool"}
)
_RULES = (CUSTOM, "edited gradient")
_DERIVATIVES = ("grad", "backward", "unpack_dual")


def recording_of(program: LeafProgram, wanted: Wanted = lambda x: False) -> Recording:
    """One recorded run of a program, and its gradients at the given values.

    wanted: The captured arrays that are differentiated besides the leaves.

    Raises:
        GradtoolsError: f raised for reasons of its own.
    """
    with program.running():
        record: Callable[..., Recording] = program.framework.recorded_run.record
        return record(program.run, program.leaves, program.names, wanted)


@dataclass
class Diagnosis:
    """What `why_zero` finds.

    Attributes:
        findings: The lost gradients.
        names: The names of the arrays that were examined.
        notes: What may be intended and is worth a look, each with its arrays.
    """

    findings: list[Finding] = field(default_factory=list)
    names: list[str] = field(default_factory=list)
    notes: list[Note] = field(default_factory=list)


@dataclass(frozen=True)
class Examined:
    """An array whose gradient is examined: a leaf of an argument, or a parameter.

    Attributes:
        name: Its name.
        numbers: The graph's values that carry its gradient; none if f does not read it.
        vanished: Where its gradient becomes zero or NaN at the given values; None if it is sound.
        absent: The kind of the finding if nothing of it flows to the output.
        stand_in: The name of a captured array that f reads in place of it, or empty.
    """

    name: str
    numbers: Sequence[int]
    vanished: Sequence[Vanished] | None = None
    absent: str = "unused"
    stand_in: str = ""


def of_arguments(program: LeafProgram, recording: Recording) -> list[Examined]:
    """The leaves in `program.wrt`."""
    vanished = recording.vanished or [None] * len(program.leaves)
    return [
        Examined(
            program.names[k],
            (recording.graph.inputs[k],),
            vanished[k],
            stand_in=recording.stand_ins[k] if recording.stand_ins else "",
        )
        for k in program.wrt
    ]


def diagnosed(
    program: LeafProgram, recording: Recording, examined: Sequence[Examined]
) -> Diagnosis:
    """The findings for each examined array, and notes."""
    names = [one.name for one in examined]
    if recording.refusal is not None:
        return Diagnosis([refused(program, recording.refusal)], names)
    graph, findings, notes = recording.graph, list[Finding](), list[Note]()
    at_values = list[Finding]()
    matters = behind(graph, tuple(graph.outputs))
    best = {
        one.name: max((matters.get(n, _NONE) for n in one.numbers), default=_NONE)
        for one in examined
    }
    trained = [one for one in examined if best[one.name] == _FULL]
    numbers = {n: one.name for one in trained for n in one.numbers}
    moving = [n for one in trained if one.vanished is None for n in one.numbers]
    for one in examined:
        if best[one.name] < _FULL:
            for number in one.numbers:
                findings += from_losses(one.name, graph, losses(graph, number))
            findings += _from_ends(program, recording, one, best[one.name])
        elif (places := one.vanished) is not None:
            starting = [p for p in places if _starts_at_zero(graph, p, one, moving)]
            if places and len(starting) == len(places):
                notes.append((f"{_at(starting[0].node)} {_STARTS_AT_ZERO}", [one.name]))
            else:
                at_values += _from_values(one.name, places)

    every = [*numbers, *(v for v in graph.inputs if graph.values[v].is_inexact)]
    every += [n for p in recording.parameters for n in p.numbers]
    for number, loss in useless_edits(graph, numbers, every):
        findings += from_losses(numbers[number], graph, [loss])
    known = {(f.argument, f.source) for f in findings}
    for name, lost in _of_summands(graph, numbers, every):
        if not _is_stopped(lost):
            findings += from_losses(name, graph, lost)
        elif (name, lost[0].node.source) not in known:
            notes.append((f"{_at(lost[0].node)} {_STOPPED}", [name]))
    return Diagnosis(without_repeats([*findings, *at_values]), names, gathered_notes(notes))


def _of_summands(
    graph: PlainGraph, numbers: dict[int, str], every: Iterable[int]
) -> Iterator[tuple[str, list[Loss]]]:
    """The leaves whose data enters a summand of the loss that no derivative enters."""
    for summand, role in lost_summands(graph, every):
        for number, name in numbers.items():
            lost = summand.losses(number)
            rounded = all(loss.node.loss == "zero_derivative" for loss in lost)
            if lost and not (role and _is_stopped(lost)) and not (role == "part" and rounded):
                yield name, lost


def _is_stopped(lost: Sequence[Loss]) -> bool:
    """Whether a summand is stopped as a whole by detach, stop_gradient or no_grad."""
    first = all(loss.node.loss in STOPS for loss in lost if not loss.further)
    later = any(loss.node.loss in STOPS for loss in lost if loss.further)
    return (first or later) and all(loss.node.loss != "left_framework" for loss in lost)


def _starts_at_zero(
    graph: PlainGraph, place: Vanished, one: Examined, moving: Iterable[int]
) -> bool:
    """Whether a factor that is zero is trained and gets a gradient, as in LoRA and ReZero."""
    if _numerical_kind(place) != "multiplied_by_zero":
        return False
    others = set(moving).difference(one.numbers)
    added = place.node.operation == "matmul" and len(place.node.inputs) == 3  # the first of three
    factors = [v for v in place.node.inputs[added : added + 2] if v in graph.values]
    own = forward(graph, dict.fromkeys(one.numbers, _FULL))
    return any(
        behind(graph, (v,)).get(n) == _FULL for v in factors if not own.get(v) for n in others
    )


def refused(program: LeafProgram, refusal: RefusedCall) -> Finding:
    """The finding for an error of the framework that ended the run."""
    names = [program.names[index] for index in program.wrt]
    name = names[0] if len(names) == 1 else ", ".join(f"argument {i}" for i in program.argnums)
    return Finding(
        name, refusal.kind, refusal.operation, refusal.source, refusal.scope, detail=refusal.message
    )


def from_losses(
    name: str, graph: PlainGraph, losses: Sequence[Loss], kind: str | None = None
) -> list[Finding]:
    """One finding for each line and kind of one leaf's losses; `kind` overrides the kind."""
    findings = []
    for loss in losses:
        node, call = loss.node, loss.call
        own = "piecewise_linear" if _is_slope(graph, node) else node.loss
        source = node.source or (call.source if call else None)
        scope = node.scope or (call.scope if call else ())
        kind_of_node = kind or (own if own in KINDS else None) or "discrete"
        findings.append(Finding(name, kind_of_node, _called(node), source, scope, loss.whole))
    return without_repeats(findings)


def _called(node: Node) -> str:
    """An operation in the framework's own word; a rule by the name of its function."""
    name = node.attributes.get("name") if node.mark == CUSTOM else ""
    return str(name or node.native or node.operation)


def _is_slope(graph: PlainGraph, node: Node) -> bool:
    """Whether a comparison is the derivative of a piecewise linear operation.

    PyTorch records the derivative as a part of the call that takes it; JAX traces it next to the
    operation.
    """
    if node.operation not in ("compare", "sign"):
        return False
    if node.native in _DERIVATIVES:
        return True
    inside = next((of for of, other in graph.walk() if other is node), graph)
    return any(other.phase for _, other in graph.walk()) and any(
        other.operation in _FLAT
        and other.source == node.source
        and not {*other.inputs, *other.outputs}.isdisjoint(node.inputs)
        for other in inside.nodes
    )


def without_repeats(findings: Iterable[Finding]) -> list[Finding]:
    """One finding for each leaf, kind and line."""
    kept: dict[Any, Finding] = {}
    for finding in findings:
        place = finding.source or (finding.operation, finding.scope)
        kept.setdefault((finding.argument, finding.kind, place, finding.whole), finding)
    return list(kept.values())


def _from_ends(
    program: LeafProgram, recording: Recording, one: Examined, best: Dependence
) -> list[Finding]:
    """Findings at the program's ends: f returns a host number, or does not read the array."""
    line, graph = source_of(program.f), recording.graph
    if recording.host_outputs:
        out = program.out_names[recording.host_outputs[0]]
        return [Finding(one.name, "host_number", "return", line, detail=f"{out} is one")]
    if best > _NONE:
        return []
    if one.stand_in:
        detail = f"it reads {one.stand_in}"
        return [Finding(one.name, "captured", one.stand_in, line, detail=detail)]
    result = [
        finding
        for number in one.numbers
        for finding in from_losses(one.name, graph, overwritten(graph, number), "overwritten")
        or _in_derivatives(one.name, graph, number)
    ]
    if one.absent == "unread":
        return result or [Finding(one.name, "unread", "parameter")]
    return result or [Finding(one.name, "unused", "argument", line)]


def _in_derivatives(name: str, graph: PlainGraph, value: int) -> list[Finding]:
    """The finding for a leaf that f differentiates through but whose derivative is constant.

    PyTorch's recording contains the calls that take the derivative. In JAX the forward pass of
    the inner derivative is dead code.
    """
    reached = forward(graph, {value: _FULL})
    steps = [node for node in graph.nodes if any(map(reached.get, node.inputs))]
    taken = [node for node in steps if node.native in _DERIVATIVES]
    is_flat = lambda node: node.operation in _FLAT or node.native in _FLAT
    flat = any(map(is_flat, steps))
    inside = any(node.phase or (flat and node.native in _DERIVATIVES) for node in graph.nodes)
    if not steps or not (taken or inside):
        return []
    at = next((node for node in taken if not any(map(reached.get, node.outputs))), steps[-1])
    shared = {v for v in graph.values if memory_of(graph.values, v) == value}  # it and its views
    readers = [n for n in graph.nodes if not shared.isdisjoint(n.inputs)]
    again = sum(shared.isdisjoint(n.outputs) for n in readers) > 1  # by a backward pass, too
    through = flat or (again and any(is_flat(n) for _, n in graph.walk()))
    kind = "piecewise_linear" if through else "constant_derivative"
    return [Finding(name, kind, _called(at), at.source, at.scope)]


def _from_values(name: str, vanished: Sequence[Vanished]) -> list[Finding]:
    """One finding for each operation at which a cotangent became zero or NaN at the values."""
    if not vanished:
        return [Finding(name, "cancelled", "add", detail="where is not known")]
    return [
        Finding(
            name,
            _numerical_kind(place),
            _called(place.node),
            place.node.source,
            place.node.scope,
            primitive=place.node.operation,
        )
        for place in vanished
        if place.node.loss != "zero_derivative"  # that is reported already
    ]


def _numerical_kind(vanished: Vanished) -> str:
    node = vanished.node
    if vanished.kind:
        return vanished.kind
    if node.mark in _RULES and node.operation != "multiply":
        return "rule"
    if node.native in _DERIVATIVES and node.operation in _FLAT | {"threshold_backward"}:
        return "piecewise_linear"
    if node.native in _SETTING and vanished.operands == (0,):
        return "overwritten"
    if _ZEROING & {node.operation, node.native}:
        return "multiplied_by_zero"
    if node.operation in _SELECTING:
        return "empty"
    return "dead"


# --- notes -------------------------------------------------------------------------------

_STOPPED = "stops a summand of the loss as a whole: it is a number in the loss and trains nothing"
_STARTS_AT_ZERO = (
    "multiplies by a trained factor that is zero at these values, as in LoRA and ReZero; the "
    "gradient is zero until the factor has moved"
)


def _at(node: Node) -> str:
    return f"{_called(node)} at {node.source or 'a line of f'}"


def gathered_notes(notes: Iterable[Note]) -> list[Note]:
    """One note for each text, with all of its leaves."""
    names: dict[str, list[str]] = {}
    for text, of in notes:
        known = names.setdefault(text, [])
        known += [name for name in of if name not in known]
    return list(names.items())


# --- f and what it holds -----------------------------------------------------------------


def source_of(f: Any) -> Source | None:
    """The line at which a function, or the forward method of a module, is defined."""
    f = inspect.unwrap(getattr(f, "func", f))
    for candidate in (f, getattr(f, "forward", None), type(f).__call__):
        if source := definition_of(candidate):
            return source
    return None


def of_modules_in_use(parameters: Sequence[CapturedParameter]) -> list[CapturedParameter]:
    """The parameters of modules of which f reads at least one parameter.

    A module that is merely reachable from f's closure or globals is not part of f.
    """
    root = lambda p: p.name.partition(".")[0]
    used = {root(p) for p in parameters if p.numbers}
    return [p for p in parameters if root(p) in used]
