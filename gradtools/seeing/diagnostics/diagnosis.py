"""`why_zero`: where a gradient is lost, and the fix.

A lost gradient raises no error: the term is ignored in training. One recorded run locates the
operations at which data flows on and the derivative does not (`lost_terms.py`). If the path is
differentiable and the gradient is still zero, the cause is in the values, and the backend locates
where a nonzero cotangent became zero.

The kinds of loss, with their reasons and fixes, are in `findings.py`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from gradtools.code_origin import Source, definition_of
from gradtools.seeing.diagnostics.findings import KINDS, Finding
from gradtools.seeing.graphs.derivative_flow import backward, behind, forward
from gradtools.seeing.graphs.losing_operations import Loss, overwritten
from gradtools.seeing.graphs.lost_terms import losses
from gradtools.seeing.graphs.nodes import Dependence, Node, PlainGraph
from gradtools.seeing.graphs.passes import CUSTOM
from gradtools.seeing.graphs.program import LeafProgram
from gradtools.seeing.graphs.recording import CapturedParameter, Recording, Refusal, Vanished

# --- the diagnosis -----------------------------------------------------------------------

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


def recording_of(program: LeafProgram) -> Recording:
    """One recorded run of a program.

    Raises:
        GradtoolsError: f raised for reasons of its own.
    """
    with program.running():
        record: Callable[..., Recording] = program.framework.recorded_run.record
        return record(program.run, program.leaves, program.names)


@dataclass(frozen=True)
class Examined:
    """An array whose gradient is examined: a leaf of an argument, or a parameter.

    Attributes:
        name: Its name.
        numbers: The graph's values that carry its gradient; none if f does not read it.
        vanished: Where its gradient becomes zero at the given values; None if it is nonzero.
        absent: The kind of the finding if nothing of it flows to the output.
        stand_in: The name of a captured array that f reads in place of it, or empty.
    """

    name: str
    numbers: Sequence[int]
    vanished: Callable[[], Sequence[Vanished] | None] = lambda: None
    absent: str = "unused"
    stand_in: str = ""


def of_arguments(program: LeafProgram, recording: Recording) -> list[Examined]:
    """The leaves in `program.wrt`."""
    at_values = partial(program.framework.lost_gradients.vanishing, program.run, program.leaves)
    return [
        Examined(
            program.names[k],
            (recording.graph.inputs[k],),
            partial(at_values, k),
            stand_in=recording.stand_ins[k] if recording.stand_ins else "",
        )
        for k in program.wrt
    ]


def diagnosed(
    program: LeafProgram,
    recording: Recording,
    examined: Sequence[Examined],
    values: bool = True,
) -> list[Finding]:
    """The findings for each examined array; `values` includes zero gradients at the values."""
    if recording.refusal is not None:
        return [refused(program, recording.refusal)]
    graph, findings = recording.graph, list[Finding]()
    matters = behind(graph, tuple(graph.outputs))
    trained = [graph.inputs[k] for k in recording.wanted]
    trained += [number for p in recording.parameters for number in p.numbers]
    trained += [number for one in examined for number in one.numbers]
    for one in examined:
        best = max((matters.get(n, Dependence.NONE) for n in one.numbers), default=Dependence.NONE)
        for number in one.numbers:
            findings += from_losses(one.name, graph, losses(graph, number, trained))
        if best < Dependence.DIFFERENTIABLE:
            findings += _from_ends(program, recording, one, best)
        elif values and (vanished := one.vanished()) is not None:
            findings += _from_values(one.name, vanished)
    return findings


def refused(program: LeafProgram, refusal: Refusal) -> Finding:
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
        causes = [loss.node]
        if not kind and loss.node.loss in ("detached", "no_grad"):
            # what is detached only to leave the framework is lost where it leaves
            reached = forward(graph, {loss.value: Dependence.DIFFERENTIABLE})
            matters = backward(graph, dict.fromkeys(graph.outputs, Dependence.DIFFERENTIABLE))
            leaving = [
                node
                for node in graph.nodes
                if node.loss == "left_framework"
                and any(reached.get(v) for v in node.inputs)
                and any(matters.get(v) for v in node.outputs)
            ]
            same_line = [node for node in leaving if node.source == loss.node.source]
            causes = same_line[:1] or [loss.node, *leaving[:1]]
        for node in causes:
            own = "piecewise_linear" if _is_slope(graph, node) else node.loss
            findings.append(
                Finding(
                    name,
                    kind or (own if own in KINDS else None) or "discrete",
                    _called(node),
                    node.source or (loss.call.source if loss.call else None),
                    node.scope or (loss.call.scope if loss.call else ()),
                    loss.whole,
                    meant=loss.meant,
                )
            )
    return _without_repeats(findings)


def _called(node: Node) -> str:
    """An operation in the framework's own word; a rule by the name of its function."""
    name = node.attributes.get("name") if node.mark == CUSTOM else ""
    return str(name or node.native or node.operation)


def _is_slope(graph: PlainGraph, node: Node) -> bool:
    """Whether a comparison is the derivative of a piecewise linear operation, as JAX traces it."""
    if node.operation not in ("compare", "sign"):
        return False
    inside = next((of for of, other in graph.walk() if other is node), graph)
    return any(other.phase for _, other in graph.walk()) and any(
        other.operation in _FLAT
        and other.source == node.source
        and not {*other.inputs, *other.outputs}.isdisjoint(node.inputs)
        for other in inside.nodes
    )


def _without_repeats(findings: Sequence[Finding]) -> list[Finding]:
    """One finding for each kind and line; unintended losses take precedence."""
    kept: dict[Any, Finding] = {}
    for finding in sorted(findings, key=lambda finding: finding.meant):
        place = finding.source or (finding.operation, finding.scope)
        kept.setdefault((finding.kind, place, finding.whole), finding)
    return list(kept.values())


def _from_ends(
    program: LeafProgram, recording: Recording, one: Examined, best: Dependence
) -> list[Finding]:
    """Findings at the program's ends: f returns a host number, or does not read the array."""
    line, graph = source_of(program.f), recording.graph
    if recording.host_outputs:
        out = program.out_names[recording.host_outputs[0]]
        return [Finding(one.name, "host_number", "return", line, detail=f"{out} is one")]
    if best > Dependence.NONE:
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
    reached = forward(graph, {value: Dependence.DIFFERENTIABLE})
    steps = [node for node in graph.nodes if any(map(reached.get, node.inputs))]
    taken = [node for node in steps if node.native in _DERIVATIVES]
    is_flat = lambda node: node.operation in _FLAT or node.native in _FLAT
    flat = any(map(is_flat, steps))
    inside = any(node.phase or (flat and node.native in _DERIVATIVES) for node in graph.nodes)
    if not steps or not (taken or inside):
        return []
    at = next((node for node in taken if not any(map(reached.get, node.outputs))), steps[-1])
    again = sum(value in node.inputs for node in graph.nodes) > 1  # by the backward pass, too
    through = flat or (again and any(is_flat(n) for _, n in graph.walk()))
    kind = "piecewise_linear" if through else "constant_derivative"
    return [Finding(name, kind, _called(at), at.source, at.scope)]


_DERIVATIVES = ("grad", "backward", "unpack_dual")


def _from_values(name: str, vanished: Sequence[Vanished]) -> list[Finding]:
    """One finding for each operation at which a cotangent became zero at the given values."""
    if not vanished:
        return [Finding(name, "cancelled", "add", detail="where is not known")]
    return _without_repeats(
        [
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
    )


def apart(findings: Sequence[Finding]) -> tuple[list[Finding], list[tuple[str, list[str]]]]:
    """Splits findings into real ones and notes of intentional stops."""
    noted: dict[str, list[str]] = {}
    for finding in findings:
        if finding.meant:
            text = f"{finding.operation} at {finding.source or 'a line of f'} {_MEANT}"
            names = noted.setdefault(text, [])
            names += [] if finding.argument in names else [finding.argument]
    return [f for f in findings if not f.meant], list(noted.items())


_MEANT = (
    "stops a term in which others are trained, as in a target, an advantage or a probe; it does "
    "not train this"
)


def _numerical_kind(vanished: Vanished) -> str:
    node = vanished.node
    if vanished.kind:
        return vanished.kind
    if vanished.cancelled:
        return "cancelled"
    if node.loss == "rule":
        return "rule"
    if node.native in _DERIVATIVES and node.operation in _FLAT | {"threshold_backward"}:
        return "piecewise_linear"
    if vanished.empty:
        return "empty"
    if vanished.underflow:
        return "underflow"
    if node.native in _SETTING and vanished.operands == (0,):
        return "overwritten"
    if _ZEROING & {node.operation, node.native}:
        return "multiplied_by_zero"
    if node.operation in _SELECTING:
        return "empty"
    return "dead"


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
