"""Finds lost gradients in training: compares parameters, gradients and the optimizer's steps.

Three sets of arrays should be equal: the parameters of the model, the arrays that receive a
gradient from the loss, and the arrays that the optimizer changes. The backends list the model's
parameters and the optimizer's arrays; one recorded run of the loss shows which arrays receive a
gradient, and where other gradients are lost.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from gradtools.backend import Backend
from gradtools.seeing.diagnostics.diagnosis import (
    Diagnosis,
    diagnosed,
    gathered_notes,
    of_modules_in_use,
    recording_of,
)
from gradtools.seeing.diagnostics.findings import Finding
from gradtools.seeing.graphs.derivative_flow import behind, forward
from gradtools.seeing.graphs.gradient_losses import STOPS, trains_others
from gradtools.seeing.graphs.nodes import Dependence, PlainGraph
from gradtools.seeing.graphs.program import Framework, LeafProgram

_FULL = Dependence.DIFFERENTIABLE
PARAMETER, FROZEN, UNREGISTERED = "parameter", "frozen", "unregistered"


@dataclass(frozen=True)
class HeldArray:
    """A parameter or another array of a model.

    Attributes:
        name: The path of the array in the model, such as "encoder.weight".
        array: The tensor or JAX array.
        role: PARAMETER, FROZEN (a parameter without requires_grad), or UNREGISTERED (an array that
            requires grad but is not a parameter).
    """

    name: str
    array: Any
    role: str = PARAMETER


@dataclass(frozen=True)
class Optimised:
    """The arrays that an optimizer changes.

    Attributes:
        holds: A function that returns whether the optimizer contains an array.
        fault: A function that returns a finding if the optimizer does not train an array, and None
            if the optimizer trains the array or if this is unknown.
        strangers: The names of arrays that are in the optimizer but not in the model.
    """

    holds: Callable[[HeldArray], bool]
    fault: Callable[[HeldArray], Finding | None]
    strangers: Sequence[str] = ()


def trained(
    backend: Backend,
    f: Any,
    args: Sequence[Any],
    kwargs: dict[str, Any],
    model: Any = None,
    optimizer: Any = None,
) -> Diagnosis:
    """Returns findings and notes on the parameters that are trained with the loss f.

    Args:
        backend: The backend of the framework, PyTorch or JAX.
        f: The function or module that computes the loss.
        args: The positional arguments of f.
        kwargs: The keyword arguments of f.
        model: The model, or a pytree of models and arrays; None if f is the model or captures the
            model.
        optimizer: An optimizer, several optimizers, or None.
    """
    caller, is_named = "why_zero", model is not None
    framework = Framework(backend, caller).training
    model = model if is_named else framework.model_of(f)
    held: list[HeldArray] = [] if model is None else framework.held(caller, model)
    arrays = [h.array for h in held]
    lifted = framework.lifted(caller, f, args, kwargs, arrays)
    if lifted is None:
        program = LeafProgram(backend, caller, f, args, kwargs)
    else:
        program = LeafProgram(backend, caller, lifted, (arrays,), {}, (0,))
        program.names[:] = [h.name for h in held]
    recording = recording_of(program)
    graph = recording.graph
    if model is None:  # use the parameters that f captures
        held = [HeldArray(name, x) for name, x in of_modules_in_use(recording)]
    result = Diagnosis(names=[h.name for h in held if h.role != FROZEN])

    if lifted is None:
        given = {id(x): graph.inputs[k : k + 1] for k, x in enumerate(program.leaves)}
        of = lambda x: (*recording.numbers(x), *given.get(id(x), ()))
        numbers = {h.name: of(h.array) for h in held}
    else:
        numbers = {h.name: graph.inputs[k : k + 1] for k, h in enumerate(held)}
    hidden = [h.name for h in held if h.role == UNREGISTERED]
    result.findings += [Finding(name, UNREGISTERED, "module") for name in hidden]
    examined = {h.name: numbers[h.name] for h in held if h.role == PARAMETER}
    lost_gradients = diagnosed(program, recording, examined, "unread")
    matters = behind(graph, tuple(graph.outputs))
    own = {n for several in numbers.values() for n in several}
    others = [n for n in (*graph.inputs, *graph.captured) if n in matters and n not in own]
    shapes = {graph.values[n].shape for n in others}
    unread = {f.argument for f in lost_gradients.findings if f.kind == "unread"}
    is_copy = examined.keys() == unread and all(tuple(h.array.shape) in shapes for h in held)
    about = {"operation": "other arrays", "detail": "it reads other arrays of the same shapes"}
    changed = lambda f: replace(f, **about) if is_copy and f.kind == "unread" else f
    result.findings += map(changed, lost_gradients.findings)
    result.notes += lost_gradients.notes
    result.notes += [(_SPENT, [])] if recording.passes is None else []

    frozen = [h.name for h in held if h.role == FROZEN]
    wrong = frozen if len(frozen) == len(held) else []
    if optimizer is not None:
        optimised: Optimised = framework.optimised(caller, optimizer, model, held)
        wrong = wrong or [h.name for h in held if h.role == FROZEN and optimised.holds(h)]
        faults = [optimised.fault(h) for h in held if h.role == PARAMETER]
        result.findings += [fault for fault in faults if fault is not None]
        result.findings += [Finding(n, "other_model", "optimizer") for n in optimised.strangers]
        result.names += optimised.strangers
    result.findings += [Finding(name, "frozen", "requires_grad") for name in wrong]
    result.names += wrong
    read = {name for name, of in numbers.items() if any(matters.get(n) == _FULL for n in of)}
    if noted := [name for name in frozen if name in read and name not in wrong]:
        result.notes.append((_FROZEN, noted))
    _note_targets(result, graph, held, numbers, is_named)
    return result


_FROZEN = "not trained, because requires_grad is False"
_SPENT = (
    "the graph was freed or contains a reentrant checkpoint, so no backward pass ran and gradients "
    "at these values were not checked"
)


# --- networks whose gradients are stopped intentionally ----------------------------------

_TARGET = "not trained, like a target network or a teacher"
_UNSTEPPED = {"not_optimized", "raw_update"}  # a raw update is zero if the gradient is stopped


def _note_targets(
    result: Diagnosis,
    graph: PlainGraph,
    held: Sequence[HeldArray],
    numbers: Mapping[str, Sequence[int]],
    is_named: bool,
) -> None:
    """Moves findings on parameters of target networks and teachers to the notes.

    A parameter counts as a parameter of a target network or teacher if its gradient is lost only
    by `detach`, `stop_gradient` or `no_grad`, and if one of two conditions holds: the parameter
    belongs to a network with a trained copy (see `_twins`), or no optimizer changes the parameter
    and the user passed no model.
    """
    kinds: dict[str, set[str]] = {}
    for finding in result.findings:
        kinds.setdefault(finding.argument, set()).add(finding.kind)
    stopped = {name for name, of in kinds.items() if of <= STOPS | _UNSTEPPED}
    stopped = {name for name in stopped if kinds[name] & STOPS}
    unstepped = {n for n in stopped if kinds[n] & _UNSTEPPED and not is_named}
    parameters = [h for h in held if h.role == PARAMETER]
    names = unstepped | _twins(graph, parameters, numbers, stopped)
    for finding in result.findings:
        if finding.argument in names and finding.kind in STOPS:
            place = f"{finding.kind} at {finding.source or 'a line of f'}"
            result.notes.append((f"{place}: {_TARGET}", [finding.argument]))
    result.notes = gathered_notes(result.notes)
    result.findings = [f for f in result.findings if f.argument not in names]
    result.names = [name for name in result.names if name not in names]


def _twins(
    graph: PlainGraph,
    parameters: Sequence[HeldArray],
    numbers: Mapping[str, Sequence[int]],
    stopped: set[str],
) -> set[str]:
    """Returns the names in `stopped` that belong to a network with a trained copy, called a twin.

    The parameters of a twin have the names and shapes of the stopped parameters, under another
    prefix. A network that reads the outputs of the stopped network is its next layer, not a twin.
    Each loss term that depends on the stopped network, such as a distance between the outputs of
    the two networks, must have a derivative with respect to the twin's parameters.
    """
    modules: dict[str, dict[str, Any]] = {}  # maps each prefix to {rest of the name: shape}
    for one in parameters:
        for k in range(len(one.name)):
            if not k or one.name[k - 1] in ".]":
                modules.setdefault(one.name[:k], {})[one.name[k:]] = one.array.shape
    result: set[str] = set()
    for prefix, own in modules.items():
        names = {prefix + end for end in own}
        for other, theirs in modules.items() if names <= stopped else ():
            weights = [other + end for end in own]
            if own.items() <= theirs.items() and stopped.isdisjoint(weights):
                trained_ones = [n for name in weights for n in numbers[name]]
                lost = [n for name in names for n in numbers[name]]
                reached = forward(graph, dict.fromkeys(lost, _FULL))
                reads = any(  # whether the twin reads results of the stopped network
                    not set(trained_ones).isdisjoint(node.inputs)
                    and any(map(reached.get, node.inputs))
                    for node in graph.nodes
                )
                if trains_others(graph, lost, trained_ones) and not reads:
                    result |= names
    return result
