"""Lost gradients in training: the model's parameters, the loss's gradients, the optimizer's steps.

Three sets of arrays should be equal: the parameters of the model, the arrays that the loss's
gradient reaches, and the arrays that the optimizer changes. The backends list the first and the
last; one recorded run of the loss gives the second and locates the losses of the others.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from gradtools.backend import Backend
from gradtools.errors import GradtoolsError
from gradtools.seeing.diagnostics.diagnosis import (
    Examined,
    diagnosed,
    of_modules_in_use,
    recording_of,
    refused,
)
from gradtools.seeing.diagnostics.findings import Finding
from gradtools.seeing.frameworks import Framework
from gradtools.seeing.graphs.derivative_flow import behind, forward
from gradtools.seeing.graphs.gradient_losses import trains_others
from gradtools.seeing.graphs.nodes import Dependence
from gradtools.seeing.graphs.program import LeafProgram
from gradtools.seeing.graphs.recording import Vanished, Wanted

_FULL = Dependence.DIFFERENTIABLE
PARAMETER, FROZEN, TABLE, LOOSE = "parameter", "frozen", "table", "loose"
STATIC = "static"
_NO_PARAMETER = (FROZEN, TABLE, LOOSE, STATIC)
_NOT_LISTED = ("plain_list", "unregistered", "buffer")  # keys of KINDS, too


@dataclass(frozen=True)
class HeldArray:
    """An array that a model holds.

    Attributes:
        name: Its path in the model.
        array: The array.
        role: PARAMETER; FROZEN, a parameter without requires_grad; TABLE, a floating buffer; LOOSE,
            a floating tensor that is neither; STATIC, an array in a static field; or, for an array
            that should be listed as a parameter and is not, the kind of the finding.
    """

    name: str
    array: Any
    role: str = PARAMETER


@dataclass(frozen=True)
class Optimised:
    """The arrays that an optimizer changes.

    Attributes:
        holds: Whether it changes an array; None if that is unknown.
        strangers: The name and a detail of each array that it holds and the model does not.
        why: A detail on an array that it does not change.
    """

    holds: Callable[[HeldArray], bool | None]
    strangers: Sequence[tuple[str, str]] = ()
    why: Callable[[HeldArray], str] = lambda held: ""


@dataclass
class TrainingDiagnosis:
    """The findings on a model in training.

    Attributes:
        findings: The lost gradients.
        names: The names of the arrays that were examined.
        notes: What may be intended and is worth a look, each with its arrays.
        held: The arrays of the model.
    """

    findings: list[Finding] = field(default_factory=list)
    names: list[str] = field(default_factory=list)
    notes: list[tuple[str, list[str]]] = field(default_factory=list)
    held: list[HeldArray] = field(default_factory=list)


@dataclass(frozen=True)
class Loop:
    """The user's training loop: loss, model and optimizer.

    Attributes:
        f: The loss: a function, a module, or in PyTorch its tensor.
        args: Its arguments.
        kwargs: Its keyword arguments.
        model: The model, or a pytree of models and arrays; None if f is the model or holds it.
        optimizer: The optimizer, or several.
    """

    backend: Backend
    caller: str
    f: Any
    args: Sequence[Any]
    kwargs: dict[str, Any]
    model: Any = None
    optimizer: Any = None


_CUT_OR_UNREAD = "or its path is cut, which a finished graph does not show; with a closure that \
computes the loss, why_zero names the line"


def trained(loop: Loop, values: bool = True) -> TrainingDiagnosis:
    """The findings on the loop's trained arrays; `values` includes zero gradients at the values."""
    run = _LossRun(loop, values)
    run.look()
    run.compare_with_optimizer()
    run.note_targets()
    return run


def after_backward(loop: Loop) -> TrainingDiagnosis:
    """The findings on a loss after its backward pass, from its graph and the parameters' .grad."""
    loss = loop.f
    if loop.model is None:
        raise GradtoolsError(
            f"{loop.caller}: f is a loss that was computed already, which does not say what is "
            "trained. Name it: model=, or give a closure that computes the loss."
        )
    if not hasattr(loss, "requires_grad"):
        raise GradtoolsError(
            f"{loop.caller}: f is an array, which here knows nothing of how it was computed. Give "
            "a closure that computes the loss: lambda: loss(model, batch)."
        )
    if not loss.requires_grad:
        return TrainingDiagnosis([Finding("the loss", "no_graph", "backward")], ["the loss"])
    diagnosis = trained(replace(loop, f=lambda: loss), values=False)
    diagnosis.findings = [
        replace(f, detail=_CUT_OR_UNREAD) if f.kind == "unread" else f for f in diagnosis.findings
    ]
    lost = {finding.argument for finding in diagnosis.findings}
    for held in diagnosis.held:
        grad = getattr(held.array, "grad", None)
        if held.role != PARAMETER or grad is None or held.name in lost:
            continue
        if not loop.backend.to_numpy(grad.detach()).any():
            diagnosis.findings.append(Finding(held.name, "zero_gradient", "backward"))
    return diagnosis


class _LossRun(TrainingDiagnosis):
    """One recorded run of the loss with the arrays of the model, and what it shows."""

    def __init__(self, loop: Loop, values: bool) -> None:
        super().__init__()
        backend, caller = loop.backend, loop.caller
        self._loop, self._framework = loop, Framework(backend, caller).training
        model = self._framework.model_of(loop.f) if loop.model is None else loop.model
        self.model = model
        self.held = [] if model is None else self._framework.held(caller, model)
        arrays = [h.array for h in self.held]
        lifted = self._framework.lifted(caller, loop.f, loop.args, loop.kwargs, arrays)
        self._is_lifted = lifted is not None
        if lifted is None:
            self.program = LeafProgram(backend, caller, loop.f, loop.args, loop.kwargs)
        else:
            self.program = LeafProgram(backend, caller, lifted, (arrays,), {}, (0,))
            self.program.names[:] = [h.name for h in self.held]
        own = {id(h.array) for h in self.held if h.role == PARAMETER}
        wanted: Wanted = lambda x: model is None or id(x) in own
        self.recording = recording_of(self.program, wanted if values else None)
        if model is None:  # what f itself holds and asks for a gradient
            parameters = of_modules_in_use(self.recording.parameters)
            self.held = [HeldArray(p.name, p.array) for p in parameters]
        self.names = [h.name for h in self.held if h.role not in _NO_PARAMETER]

    def _numbers(self, k: int) -> Sequence[int]:
        """The graph's values that carry the gradient of array k."""
        if self._is_lifted:
            return self.recording.graph.inputs[k : k + 1]
        return self.recording.reads.get(id(self.held[k].array), ())

    def _vanished(self, k: int) -> Sequence[Vanished] | None:
        """Where the gradient of array k becomes zero or NaN at the given values."""
        if self._is_lifted:
            return self.recording.vanished[k] if self.recording.vanished else None
        return self.recording.vanished_captured.get(id(self.held[k].array))

    def look(self) -> None:
        """Adds what the run says of each array."""
        graph = self.recording.graph
        if self.recording.refusal is not None:
            lost = refused(self.program, self.recording.refusal)
            self.findings += [replace(lost, argument=n) for n in self.names or ["the loss"]]
            return
        examined = [
            Examined(h.name, self._numbers(k), self._vanished(k), "unread")
            for k, h in enumerate(self.held)
            if h.role == PARAMETER
        ]
        self.findings += [
            Finding(h.name, h.role, "module") for h in self.held if h.role in _NOT_LISTED
        ]
        findings, notes = diagnosed(self.program, self.recording, examined)
        self.findings += findings
        self.notes += notes
        matters = behind(graph, tuple(graph.outputs))
        reaches = lambda k: any(matters.get(n) == _FULL for n in self._numbers(k))
        for role, text in _NOTES:  # arrays that would get a gradient, and ask for none
            names = [h.name for k, h in enumerate(self.held) if h.role == role and reaches(k)]
            if names:
                self.notes.append((text, names))
        self.notes += [(_SPENT, [])] if self.recording.spent else []

    def twins(self, stopped: set[str]) -> set[str]:
        """The stopped parameters of networks that have a trained twin, such as target networks.

        A twin has the same names and shapes under another prefix. It must not read the stopped
        network's outputs, as the next layer of the same network would. Each term that depends on
        the stopped network must train the twin, as a distance between their outputs does.
        """
        graph = self.recording.graph
        numbers = {h.name: self._numbers(k) for k, h in enumerate(self.held)}
        modules: dict[str, dict[str, Any]] = {}  # by prefix: the shapes by the rest of the name
        for one in self.held:
            if one.role == PARAMETER:
                for k in range(len(one.name)):
                    if not k or one.name[k - 1] in ".]":
                        modules.setdefault(one.name[:k], {})[one.name[k:]] = one.array.shape
        result: set[str] = set()
        for prefix, own in modules.items():
            names = {prefix + end for end in own}
            for other, theirs in modules.items() if names <= stopped else ():
                weights = [other + end for end in own]
                if own.items() <= theirs.items() and stopped.isdisjoint(weights):
                    trained = [n for name in weights for n in numbers[name]]
                    lost = [n for name in names for n in numbers[name]]
                    reached = forward(graph, dict.fromkeys(lost, _FULL))
                    reads = any(  # a weight beside the stopped network's outputs
                        not set(trained).isdisjoint(node.inputs)
                        and any(map(reached.get, node.inputs))
                        for node in graph.nodes
                    )
                    if trains_others(graph, lost, trained) and not reads:
                        result |= names
        return result

    def compare_with_optimizer(self) -> None:
        """Adds the parameters that the optimizer lacks, and the frozen ones that it holds."""
        loop = self._loop
        if loop.optimizer is None:
            asking = [h for h in self.held if h.role not in (TABLE, LOOSE, STATIC)]
            if self.held and all(h.role == FROZEN for h in asking):
                self._add_frozen([h.name for h in asking])
                self.notes = [note for note in self.notes if note[0] != _NOTES[0][1]]
            return
        optimised = self._framework.optimised(loop.caller, loop.optimizer, self.model, self.held)
        frozen = []
        for held in self.held:
            holds = optimised.holds(held)
            if held.role == PARAMETER and holds is False:
                detail = optimised.why(held)
                self.findings.append(
                    Finding(held.name, "not_optimized", "optimizer", detail=detail)
                )
            elif held.role == FROZEN and holds:
                frozen.append(held.name)
        self._add_frozen(frozen)
        for name, detail in optimised.strangers:
            self.findings.append(Finding(name, "other_model", "optimizer", detail=detail))
            self.names.append(name)
        self.notes = [
            (text, left)
            for text, names in self.notes
            if (left := [name for name in names if name not in frozen]) or not names
        ]

    def _add_frozen(self, names: list[str]) -> None:
        self.findings += [Finding(name, "frozen", "requires_grad") for name in names]
        self.names += names

    def note_targets(self) -> None:
        """Makes notes of parameters that are stopped on purpose: of target networks and teachers.

        They are stopped as a whole, by a stop or no_grad alone; and they are the twin of a network
        that is trained, or nobody named them and no step of the optimizer changes them.
        """
        kinds: dict[str, set[str]] = {}
        for finding in self.findings:
            kinds.setdefault(finding.argument, set()).add(finding.kind)
        stopped = {name for name, of in kinds.items() if of <= _STOPS | {"not_optimized"}}
        stopped = {name for name in stopped if kinds[name] & _STOPS}
        is_named = self._loop.model is not None
        unstepped = {n for n in stopped if "not_optimized" in kinds[n] and not is_named}
        for text, names in ((_TWIN, self.twins(stopped)), (_UNSTEPPED, unstepped)):
            places: dict[str, list[str]] = {}
            for finding in self.findings:
                if finding.argument in names and finding.kind in _STOPS:
                    place = f"{finding.kind} at {finding.source or 'a line of f'}: {text}"
                    places.setdefault(place, []).append(finding.argument)
            self.notes += [(place, list(dict.fromkeys(of))) for place, of in places.items()]
            self.findings = [f for f in self.findings if f.argument not in names]
            self.names = [name for name in self.names if name not in names]


_SPENT = (
    "no backward pass goes through the graph, which was freed or holds a reentrant checkpoint: "
    "gradients at these values were not looked at"
)
_NOTES = (
    (FROZEN, "requires_grad is False, so it is not trained"),
    (TABLE, "a buffer that the loss depends on; no optimizer changes it"),
    (STATIC, "it is in a static field, so it is a constant: no optimizer changes it"),
    (LOOSE, "a tensor that the loss depends on and the model does not hold as a parameter"),
)
_STOPS = {"detached", "no_grad"}
_UNSTEPPED = (
    "not trained, and no optimizer steps it, as a target network, a teacher, what is frozen"
)
_TWIN = "not trained, next to a network like it that is, as a target network or a teacher"
