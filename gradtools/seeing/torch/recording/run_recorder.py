"""Records the aten operations of a PyTorch run as graph nodes.

A tensor is identified by its id; an alias of a known tensor is identified by its storage elements.
An in-place write gives the tensor a new value index. Views of the tensor get a new value index when
they are next read: a view is recomputed from its base, and a base is updated at the elements of a
written view.

An operation counts as differentiable if its results require grad when they are next read.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from gradtools.code_origin import lines_above
from gradtools.seeing.graphs.attributes import number_text
from gradtools.seeing.graphs.nodes import Dependence, Links, Node, even_links
from gradtools.seeing.graphs.passes import CUSTOM
from gradtools.seeing.torch import _upstream as private
from gradtools.seeing.torch.operands import SAME, AtenCall
from gradtools.seeing.torch.recording import operations
from gradtools.seeing.torch.recording.recorder import Origin, Recorder
from gradtools.seeing.torch.recording.values import Write, numbers_in
from gradtools.seeing.torch.undo import Undo, name_of
from gradtools.torch import _upstream as upstream
from gradtools.torch.functorch_wrappers import tensors_in
from gradtools.torch.operation_marks import CHUNK, DERIVATIVE, reason_of_detach
from gradtools.torch.operation_marks import mark as mark_of_running

Tensor = torch.Tensor
_CUT, _ZERO, _FULL = Dependence.CUT, Dependence.ZERO_DERIVATIVE, Dependence.DIFFERENTIABLE


@dataclass
class RecordedNode:
    """A recorded node, with the grad mode and other state of its execution.

    Attributes:
        node: The graph node; `node.links` is None if the links are not yet known.
        name: The aten name without the underscore of in-place variants.
        grad_enabled: Whether grad mode was enabled.
        inner: Whether the operation ran in a backward pass that the recorded function started.
        written: The number of leading inputs that the node modifies in place.
        rounds: Whether the operation rounds its result to an integer.
        known_loss: (name of the function to report, kind of lost gradient) if a PyTorch function
            stops the gradient, otherwise None.
        of: For a backward node, the position of the differentiated forward node.
    """

    node: Node
    name: str
    grad_enabled: bool
    inner: bool = False
    written: int = 0
    rounds: bool = False
    known_loss: tuple[str, str] | None = None
    of: int | None = None


class RunRecorder(Recorder[int]):
    """Records the aten operations of a run as `RecordedNode` objects.

    Attributes:
        made: The recorded nodes, in execution order.
        phase: The running pass: 0 forward, 1 backward, 2 backward of the backward.
        positions: Maps the sequence number of an autograd node to the position of its forward node.
        origins: Maps the sequence number of an autograd node to the origin of its forward node.
    """

    def __init__(self, undo: Undo) -> None:
        super().__init__(undo)
        self.made: list[RecordedNode] = []
        self.phase = 0
        self.positions: dict[int, int] = {}
        self.origins: dict[int, Origin] = {}
        self._function = ""  # name of the PyTorch function that the user called
        self._tracked: dict[int, bool] = {}  # whether each value required grad when first read
        self._views: dict[int, Node] = {}  # maps the first value index of a view to its node
        self._first: dict[int, int] = {}  # first value index of each modified tensor

    # --- calls

    def called(self, fun: Any, args: Any, kwargs: Any) -> Any:
        """Runs a PyTorch function; stores the name of the function while the function runs."""
        self._function = name_of(fun)
        try:
            return fun(*args, **kwargs)
        finally:
            self._function = ""

    def operated(self, call: AtenCall) -> Any:
        """Runs an aten operation and records a node."""
        if call.raw == "lift_fresh" and call.args[0].shape:  # a tensor created from Python numbers
            out = call.run()
            self.write(call, (), [out], ())
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
            node = self.write(call, numbers, outs if outs else [out], written)
            for made, number in zip(node.outputs, before, strict=False):
                self._first[made] = self._first.get(number, number)
            if call.raw == "clone" and (given[0].is_conj() or given[0].is_neg()):
                # kernels materialize lazy conjugates below autograd
                self._tracked[node.outputs[0]] = given[0].requires_grad and torch.is_grad_enabled()
        return out

    def _stops(self, name: str, x: Tensor) -> bool:
        """Returns whether a detach was called by the user, not by a rule or by autograd."""
        if name != "detach" or self.phase or self.rules or not x.requires_grad:
            return False
        if self._function != "data" and not private.is_inside_autograd():
            return False  # autograd detaches saved outputs
        return not (mark_of_running() or reason_of_detach() in (DERIVATIVE, CHUNK))

    def write(
        self, call: AtenCall, numbers: Sequence[int], outs: Sequence[Any], written: Sequence[Tensor]
    ) -> Node:
        """Adds the node of an operation and assigns value indices to the results."""
        name = call.name
        overwrites = not self.phase and bool(written) and name + "_" in operations.OVERWRITES
        if overwrites:
            numbers = numbers[len(written) :]
        if name in operations.NO_DATA:
            numbers = ()
        running, origin = private.current_node(), self.origin()
        sequence = upstream.nodes_made() - 1  # type: ignore[attr-defined]
        self.origins.setdefault(sequence, origin)
        self.positions.setdefault(sequence, len(self.made))
        made = [self.new(y) for y in outs]
        operation, attributes = call.said(outs)
        if origin.rule and origin.mark == CUSTOM:
            attributes = {**attributes, "rule": origin.rule}
        about = {"operation": operation, "attributes": {**attributes}}
        new = self.add(self.native(call), numbers, made, origin, **about)
        new.name, node, grad = name, new.node, new.grad_enabled
        if self.phase and running:
            new.of = self.positions.get(upstream.sequence_of(running))
        new.inner = not self.phase and running is not None
        new.written = 0 if overwrites else len(written)
        new.rounds = bool(call.kwargs.get("rounding_mode"))
        if not grad:
            new.known_loss = operations.library_call(lines_above(1, Recorder.run))
        for y, number in zip(outs, made, strict=True):
            if isinstance(y, Tensor):
                if any(y is x for x in written):
                    self.table.write(y, number, (origin, grad))
                elif call.func.is_view and len(outs) == 1:
                    self._views[number] = node
                self.hold(y, number)
        return node

    def add(
        self, native: str, inputs: Sequence[int], outputs: Sequence[int], at: Origin, **about: Any
    ) -> RecordedNode:
        """Adds a node with the given name, inputs, outputs, origin and other fields `about`."""
        given: dict[str, Any] = {"operation": operations.neutral(native), "mark": at.mark} | about
        given |= {"inputs": tuple(inputs), "outputs": tuple(outputs), "phase": self.phase}
        node = Node(native=native, source=at.source, scope=at.scope, **given)
        self.made.append(RecordedNode(node, native, torch.is_grad_enabled()))
        return self.made[-1]

    def native(self, call: AtenCall) -> str:
        """Returns the PyTorch name of an operation, such as "aten.add"."""
        return f"aten.{call.raw}"

    # --- value indices of tensors

    def hold(self, x: Tensor, value: int) -> None:
        """Assigns the value index `value` to x, with the first value of the storage as its base."""
        super().hold(x, value)
        memory = self.table.memory(x)
        if memory is not None and memory.value != value:
            self.values[value] = replace(self.values[value], base=memory.value)

    def number_of(self, y: Any) -> int:
        """Returns the value index of a tensor or of a Python number."""
        if isinstance(y, Tensor):
            return self.of(y)
        number = self.new(y, number_text(y) if isinstance(y, int | float | complex) else "")
        self.captured[number] = None
        return number

    def of(self, x: Tensor) -> int:
        """Returns the value index of x; in the forward pass, records whether x requires grad."""
        number = super().of(x)
        if not self.phase:
            self._tracked.setdefault(number, x.requires_grad)
        return number

    def met(self, x: Tensor) -> int:
        """Assigns a new value index to a captured tensor."""
        number = self.new(x, self.names.get(id(x)) or numbers_in(x))
        self.capture(x, number)
        return number

    def rewritten(self, x: Tensor, before: int, writes: Sequence[Write[int]]) -> int:
        """Adds an update node for each in-place write to the storage of x since its last read."""

        def first(number: int) -> int:
            return self._first.get(number, number)

        for write in writes:
            origin, grad = write.by
            number = self.new(x)
            view, part = (self._views.get(first(n)) for n in (before, write.value))
            operation, given = "update", [before, write.value]
            attributes: Mapping[str, Any] = {}
            if view is not None and first(view.inputs[0]) == first(write.value):
                operation, given, attributes = view.operation, [write.value], view.attributes
            elif part is not None and first(part.inputs[0]) == first(before):
                if part.operation == "reshape":
                    operation, given = "reshape", [write.value]
                    attributes = {"shape": tuple(x.shape)}
                elif part.operation == "slice":
                    attributes = part.attributes
            links, loss = self.links_of_update(x, write.tensor, given, grad)
            about = {"operation": operation, "attributes": attributes, "links": links, "loss": loss}
            self.add("update", given, [number], origin, **about).grad_enabled = grad
            self._first[number] = first(before)
            before = number
        return before

    def links_of_update(
        self, x: Tensor, written: Tensor, given: Sequence[int], grad: bool
    ) -> tuple[Links | None, str | None]:
        """Returns (links, kind of lost gradient) for an update of x, or (None, None) if unknown."""
        return None, None

    # --- links

    def linked(self, made: RecordedNode) -> Node:
        """Returns the node with its links; a link without a derivative is cut or zero_derivative.

        Nodes inside of a custom rule are unchanged, because the rule replaces their derivative.
        """
        node, values = made.node, self.values
        entering = [self._tracked.get(v, False) for v in node.inputs]
        if node.links is not None or not any(entering) or node.phase or node.mark:
            return node
        name = made.name
        inexact = [v for v in node.outputs if values[v].is_inexact]
        known = [self._tracked[v] for v in inexact if v in self._tracked]
        is_cut = not inexact or (bool(known) and not any(known))
        link, loss = _CUT, ""
        if made.rounds or operations.neutral(name) in operations.ZERO_DERIVATIVE:
            is_smooth = name in ("sgn", "sign") and values[node.inputs[0]].dtype.startswith("comp")
            link, loss = (_FULL, "") if is_smooth and not is_cut else (_ZERO, "zero_derivative")
        elif name in operations.DRAWS:
            link, loss = _ZERO, "discrete"
        elif name == "local_scalar_dense":
            loss = "left_framework"
        elif name in operations.UNDIFFERENTIABLE:
            loss = "discrete"
        elif name == "detach" or is_cut:
            whole = len(inexact) == len(node.outputs)
            loss = operations.loss_of(name, made.grad_enabled, whole)
            if made.inner and whole and not made.grad_enabled:
                loss = "inner_gradient"
        elif made.written and not made.grad_enabled:
            moved = any(entering[made.written :])
            links = even_links(node, values, cut=node.inputs[made.written :])
            return replace(node, links=links, loss="no_grad") if moved else node
        elif len(inexact) > 1 and not all(known):  # only some results are differentiable
            rows = even_links(node, values)
            cut = (_CUT,) * len(node.inputs)
            lost = [self._tracked.get(v) is False for v in node.outputs]
            links = tuple(cut if k else row for k, row in zip(lost, rows, strict=True))
            return replace(node, links=links, loss="discrete")
        if not loss:
            return node
        if made.known_loss is not None:
            native, loss = made.known_loss
            node = replace(node, native=native)
        return replace(node, links=even_links(node, values, link), loss=loss)
