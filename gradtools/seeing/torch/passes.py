"""A PyTorch program with its backward passes, as a graph of aten's operations.

f runs once under a dispatch mode that records each operation; then autograd runs once or twice
under the same mode. Autograd numbers its nodes in forward order (sequence numbers) and reports the
node that is running. So each operation of a later pass gets the line, the modules and the mark of
the forward operation that it differentiates.

A tensor is identified by its id, else by the elements of storage that it shares. An in-place write
gives the tensor a new value number, and likewise each of its views when it is next read: a view is
taken again of what was written, and its base is updated in the place of the view.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from types import MappingProxyType
from typing import Any

import torch

from gradtools.errors import RuntimeRefusal, is_of, warn
from gradtools.seeing.graphs.attributes import number_text
from gradtools.seeing.graphs.nodes import (
    Dependence,
    Node,
    PlainGraph,
    even_links,
    needed,
    shared_length,
)
from gradtools.seeing.graphs.passes import (
    CUSTOM,
    FORWARD,
    INNER,
    SECOND,
    cotangent_of,
    gradient_of,
    second_gradient_of,
    with_named_outputs,
)
from gradtools.seeing.graphs.program import LeafProgram
from gradtools.seeing.torch.live_graph import graph_of_outputs
from gradtools.seeing.torch.operands import SAME, AtenCall
from gradtools.seeing.torch.recording import operations
from gradtools.seeing.torch.recording.autograd_functions import name_and_mark
from gradtools.seeing.torch.recording.observation import recording_run
from gradtools.seeing.torch.recording.recorder import Origin, Recorder
from gradtools.seeing.torch.recording.values import Write, numbers_in
from gradtools.seeing.torch.undo import Undo, copied
from gradtools.torch import _upstream as upstream
from gradtools.torch.autograd_graph import leaves_of
from gradtools.torch.function_modes import PlainKernels
from gradtools.torch.functorch_wrappers import is_inexact, tensors_in
from gradtools.torch.known_errors import NO_DERIVATIVE, kernel_without
from gradtools.torch.operation_marks import DERIVATIVE, marked, reason_of_detach
from gradtools.torch.operation_marks import mark as mark_of_running

Tensor = torch.Tensor
_CUT, _ZERO = Dependence.CUT, Dependence.ZERO_DERIVATIVE


def gradient_graph(program: LeafProgram, order: int) -> PlainGraph:
    """The graph of a program's passes, with its effects undone.

    order: 0 forward alone, 1 with backward, 2 with backward of the backward.
    """

    def hooked_or_not() -> PlainGraph:
        try:
            return _recorded(program, order, hooked=True)
        except RuntimeError as error:
            if not is_of("torch", error):
                raise
        # torch.func's transforms refuse saved-tensor hooks; any other error is raised again.
        return _recorded(program, order, hooked=False)

    try:
        return hooked_or_not()
    except (RuntimeError, NotImplementedError) as error:
        kernel = kernel_without(NO_DERIVATIVE, error)
        if kernel is None or order < SECOND:
            raise
    warn(
        f"gradient_graph: {kernel} has no derivative; the passes are those of PyTorch's own "
        "alternative to that kernel."
    )
    with PlainKernels():
        return hooked_or_not()


def _recorded(program: LeafProgram, order: int, hooked: bool) -> PlainGraph:
    """The graph of a recorded run, whose effects are undone.

    hooked: Whether saved-tensor hooks record what is saved. Without them, only what later passes
        read is known.
    """
    with recording_run(f"{program.caller}: a program", program.run, program.leaves) as undo:
        recorder, active = _PassRecorder(undo, hooked), set(program.wrt)
        xs = [copied(x, k in active) for k, x in enumerate(program.leaves)]
        inputs = [recorder.introduced(x, name) for x, name in zip(xs, program.names, strict=True)]
        ys = recorder.run_pass(FORWARD, lambda: [*program.run(xs)])
        ends = _Ends(inputs, [recorder.number_of(y) for y in ys], [*program.out_names])
        outs = dict(zip(program.out_names, ys, strict=True))
        leaves = {program.names[k]: xs[k] for k in sorted(active)}
        tracked = [y for y in ys if _is_tracked(y)]
        leaves |= recorder.parameters(tracked, leaves.values())
        for phase in range(1, order + 1):
            outs = {name: y for name, y in outs.items() if _is_tracked(y)}
            if not outs:
                break
            again = phase < order
            cts = {
                cotangent_of(name): torch.ones_like(y, requires_grad=again)
                for name, y in outs.items()
            }
            ends.inputs += [recorder.introduced(ct, name) for name, ct in cts.items()]
            differentiated = partial(
                torch.autograd.grad,
                [*outs.values()],
                [*leaves.values()],
                [*cts.values()],
                create_graph=again,
                retain_graph=True,
                allow_unused=True,
            )
            grads = zip(leaves, recorder.run_pass(phase, differentiated), strict=True)
            named = gradient_of if phase < SECOND else second_gradient_of
            outs = {named(x): g for x, g in grads if g is not None}
            ends.outputs += [recorder.number_of(g) for g in outs.values()]
            ends.names += outs
            leaves = {**leaves, **cts}
        return recorder.graph(ends, order)


@dataclass
class _Ends:
    """The graph's inputs and outputs, by number, and the names of the outputs."""

    inputs: list[int]
    outputs: list[int]
    names: list[str]


def _is_tracked(y: Any) -> bool:
    return isinstance(y, Tensor) and y.requires_grad and is_inexact(y)


# --- recording ---------------------------------------------------------------------------


@dataclass
class _RecordedNode:
    """A node, and what is known when it runs."""

    node: Node
    sequence: int
    grad_enabled: bool
    inner: bool = False  # part of a derivative that f itself takes


class _PassRecorder(Recorder[int]):
    """Records the aten operations of each pass; `hooked`: with saved-tensor hooks."""

    caller, needs_rules = "gradient_graph", False

    def __init__(self, undo: Undo, hooked: bool) -> None:
        super().__init__(undo)
        self.made: list[_RecordedNode] = []
        self.levels = "rules", *(["saved"] if hooked else []), "operations"
        self._phase = FORWARD
        self._origins: dict[int, Origin] = {}
        self._packed: list[tuple[int, int, int]] = []  # sequence, number, phase
        self._tracked: dict[int, bool] = {}
        self._makers: dict[int, tuple[Any, tuple[str, ...]]] = {}  # autograd's node, the modules
        self._views: dict[int, Node] = {}  # by the first number of the tensor that it made
        self._first: dict[int, int] = {}  # of a tensor that was written to, its first number

    # --- what runs

    def run_pass(self, phase: int, fun: Callable[[], Any]) -> Any:
        """Runs `fun()` and records its operations in this pass."""
        self._phase = phase
        with marked(""):
            return self.run(fun)

    def operated(self, call: AtenCall) -> Any:
        """Records an aten operation."""
        if call.raw == "lift_fresh" and call.args[0].shape:  # a tensor of Python numbers
            out = call.run()
            self._write(call, (), [out], ())
            return out
        written = self.keep_written(call)
        before = [self.number_of(x) for x in written]
        given = call.operands()
        numbers = [self.number_of(x) for x in given]
        out = call.run()
        outs = [*written, *(y for y in tensors_in(out) if all(y is not x for x in written))]
        if call.raw in SAME and not self._stops(call.raw, given[0]):
            self.hold(outs[0], numbers[0])
        elif outs or isinstance(out, bool | int | float | complex):
            self._write(call, numbers, outs if outs else [out], written)
            for x, number in zip(written, before, strict=True):
                self._first[self.number_of(x)] = self._first.get(number, number)
        return out

    def _stops(self, name: str, x: Tensor) -> bool:
        """Whether the user stops a gradient here, rather than a rule or autograd itself."""
        if name != "detach" or self._phase or self.rules or not x.requires_grad:
            return False
        return not (mark_of_running() or reason_of_detach() == DERIVATIVE)

    def _write(
        self, call: AtenCall, numbers: Sequence[int], outs: Sequence[Any], written: Sequence[Tensor]
    ) -> None:
        name = call.name
        if name + "_" in operations.OVERWRITES and written:
            numbers = numbers[len(written) :]
        if name in operations.NO_DATA:
            numbers = ()
        sequence, origin = upstream.nodes_made() - 1, self.origin()  # type: ignore[attr-defined]
        self._origins.setdefault(sequence, origin)
        made, running = [self.new(y) for y in outs], upstream.current_node()
        if self._phase and running is not None and name == "add" and len(numbers) == 2:
            # Autograd sums what comes over two paths as the last that it does for the second of
            # them. The sum belongs to the modules around both.
            nodes, scopes = zip(*[self._makers.get(n, (None, ())) for n in numbers], strict=True)
            if None not in nodes and nodes.count(running) == 1 and not self.rules:
                origin = replace(origin, scope=scopes[0][: shared_length(scopes)])
        self._makers.update((number, (running, origin.scope)) for number in made)
        operation, attributes = call.said(outs)
        if origin.rule and origin.mark == CUSTOM:
            attributes = MappingProxyType({**attributes, "rule": origin.rule})
        native, more = f"aten.{call.raw}", {"attributes": attributes, "phase": self._phase}
        node = self.node(operation, native, numbers, made, origin, **more)
        inner = not self._phase and running is not None
        self.made.append(_RecordedNode(node, sequence, torch.is_grad_enabled(), inner))
        for y, number in zip(outs, made, strict=True):
            if isinstance(y, Tensor):
                if any(y is x for x in written):
                    self.table.write(y, number, origin)
                elif call.func.is_view and len(outs) == 1:
                    self._views[number] = node
                self.hold(y, number)

    def origin(self) -> Origin:
        """The running line, modules and mark; in later passes those of the forward operation."""
        here, managed = super().origin(), mark_of_running()
        rule, own = next((known for known in self.rules if known[1]), ("", ""))
        source, mark = here.source, managed or own or here.mark
        running = upstream.current_node()
        of = self._origins.get(-1 if running is None else upstream.sequence_of(running), Origin())
        if not self._phase:  # in a derivative that f itself takes, f's own lines take precedence
            return Origin(source or of.source, here.scope, mark, rule)
        summed = upstream.is_summed_by_autograd(running)
        inherited, rule = ("", "") if summed else (of.mark, rule or of.rule)
        if source is None or (of.source is not None and "-packages" in source.file):
            source = of.source
        if managed and of.mark:  # a frozen function is a chunk to gradtools
            mark = of.mark
        return Origin(source, here.scope or of.scope, mark or inherited, rule)

    def ruled(self, kind: Any, apply: Any, args: Any, kwargs: Any) -> Any:
        """Runs a torch.autograd.Function and marks its operations."""
        with self.within(*name_and_mark(kind, args)):
            out = apply(*args, **kwargs)
            for y in tensors_in(out):  # it may compute nothing forward, and something backward
                if y.grad_fn is not None:
                    self._origins.setdefault(upstream.sequence_of(y.grad_fn), self.origin())
            return out

    # --- what is saved

    def saves(self, x: Tensor) -> tuple[Tensor, int]:
        """Packs a saved tensor: detached, to avoid a reference cycle, and with its version."""
        with self.silent(), torch.no_grad():
            number = self.of(x)
            kept = x.detach()
            sequence = upstream.nodes_made() - 1  # type: ignore[attr-defined]
            self._packed.append((sequence, number, self._phase))
            self.hold(kept, number)
            return kept, upstream.version_of(kept)

    @staticmethod
    def read_saved(kept: tuple[Tensor, int]) -> Tensor:
        """Unpacks a saved tensor; raises if it was modified in place since."""
        x, version = kept
        if upstream.version_of(x) != version:
            raise RuntimeRefusal(
                "a tensor that is needed for the gradient was modified in place after it was "
                f"saved (shape {tuple(x.shape)}); use an operation that is not in place"
            )
        return x

    def _saved(self, order: int) -> dict[int, tuple[int, ...]]:
        """The values that each node, by position, saves for a pass that was recorded."""
        of: dict[tuple[int, int], list[int]] = {}
        for i, made in enumerate(self.made):
            of.setdefault((made.sequence, made.node.phase), []).append(i)
        result: dict[int, tuple[int, ...]] = {}
        for sequence, number, phase in self._packed:
            nodes = of.get((sequence, phase), []) if phase < order else []
            around = lambda node: (*node.inputs, *node.outputs)
            touching = [i for i in nodes if number in around(self.made[i].node)]
            for i in (touching or nodes)[:1]:
                result[i] = tuple(dict.fromkeys((*result.get(i, ()), number)))
        return result

    # --- numbers of tensors

    def hold(self, x: Tensor, value: int) -> None:
        """Gives x this number; the storage's first value becomes its base."""
        super().hold(x, value)
        memory = self.table.memory(x)
        if memory is not None and memory.value != value:
            self.values[value] = replace(self.values[value], base=memory.value)

    def number_of(self, y: Any) -> int:
        """The value number of a tensor or of a Python number."""
        if isinstance(y, Tensor):
            return self.of(y)
        number = self.new(y, number_text(y) if isinstance(y, int | float | complex) else "")
        self.captured[number] = None
        return number

    def of(self, x: Tensor) -> int:
        """The number of a tensor; of the forward pass it is noted whether a derivative flows."""
        number = super().of(x)
        if not self._phase:
            self._tracked[number] = self._tracked.get(number, False) or x.requires_grad
        return number

    def met(self, x: Tensor) -> int:
        """The number of what f holds."""
        number = self.new(x, self.names.get(id(x)) or numbers_in(x))
        self.capture(x, number)
        return number

    def rewritten(self, x: Tensor, before: int, writes: Sequence[Write[int]]) -> int:
        """Adds an update node for each write to x's storage since it was last seen."""

        def first(number: int) -> int:
            return self._first.get(number, number)

        for write in writes:
            number = self.new(x)
            view, part = (self._views.get(first(n)) for n in (before, write.value))
            operation, given = "update", [before, write.value]
            attributes: Mapping[str, Any] = MappingProxyType({})
            if view is not None and first(view.inputs[0]) == first(write.value):
                operation, given, attributes = view.operation, [write.value], view.attributes
            elif part is not None and first(part.inputs[0]) == first(before):
                if part.operation == "reshape":
                    shape = MappingProxyType({"shape": tuple(x.shape)})
                    operation, given, attributes = "reshape", [write.value], shape
                elif part.operation == "slice":
                    attributes = part.attributes
            more = {"attributes": attributes, "phase": self._phase}
            node = self.node(operation, "update", given, [number], write.by, **more)
            self.made.append(_RecordedNode(node, -1, torch.is_grad_enabled()))
            self._first[number] = first(before)
            before = number
        return before

    # --- captured tensors

    def parameters(self, outs: Any, given: Any) -> dict[str, Tensor]:
        """The captured leaves that require grad and reach the outputs, by name."""
        own = {id(x) for x in given}
        result: dict[str, tuple[int, Tensor]] = {}
        for x in reversed(list(leaves_of(list(outs)))):
            known = self.table.get(x)
            if id(x) not in own and known is not None:
                value = self.values[known.value]
                name = value.name or f"captured tensor {len(result)}"
                result[name] = known.value, x
                self.values[known.value] = replace(value, name=name)
        ordered = sorted(result.items(), key=lambda item: item[1][0])
        return {name: x for name, (_, x) in ordered}

    # --- the whole

    def graph(self, ends: _Ends, order: int) -> PlainGraph:
        """The recorded graph, without dead code of the later passes."""
        saved = self._saved(order)
        nodes = [replace(self._linked(m), saved=saved.get(i, ())) for i, m in enumerate(self.made)]
        stays = lambda node: not (node.phase or node.mark)  # keep dead code that f itself runs
        nodes = [nodes[i] for i in needed(nodes, ends.outputs, stays)]
        read = {value for node in nodes for value in node.inputs}.union(ends.outputs)
        captured = tuple(number for number in self.captured if number in read)
        inputs, outputs = tuple(ends.inputs), tuple(ends.outputs)
        graph = PlainGraph(tuple(nodes), self.values, inputs, outputs, captured)
        return with_named_outputs(graph, ends.names)

    def _linked(self, made: _RecordedNode) -> Node:
        """A node with its links; those of derivatives that f itself takes are marked `INNER`.

        The links of a node of f are cut or zero if it passes no derivative on.
        """
        node, values = made.node, self.values
        entering = any(self._tracked.get(v, False) for v in node.inputs)
        if entering and not (node.phase or node.mark):
            name = node.native.removeprefix("aten.").strip("_")
            inexact = [v for v in node.outputs if values[v].is_inexact]
            known = [self._tracked[v] for v in inexact if v in self._tracked]
            link, loss = _CUT, ""
            if name in operations.ZERO_DERIVATIVE:
                link, loss = _ZERO, "zero_derivative"
            elif name == "local_scalar_dense":
                loss = "left_framework"
            elif name == "detach" or not inexact or (known and not any(known)):
                whole = len(inexact) == len(node.outputs)
                loss = operations.loss_of(name, made.grad_enabled, whole)
            if loss:
                node = replace(node, links=even_links(node, values, link), loss=loss)
        return replace(node, mark=node.mark or INNER) if made.inner else node


__all__ = ["gradient_graph", "graph_of_outputs"]
