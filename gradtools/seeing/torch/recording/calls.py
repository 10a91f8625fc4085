"""Records one run of a PyTorch function as a graph of the functions that it calls, for `why_zero`.

Each call of a PyTorch function becomes a node. A tensor that is changed in place gets a new value
number. Whether a call is differentiable is read from autograd's graph: a walk from the output back
to known tensors. So a custom Function, a checkpoint or a transform is one node like any other.

A tensor is identified by its id. A tensor whose creation was not recorded is connected by its
autograd graph, walked back to known tensors, else by storage that it shares with a known tensor.
Otherwise it existed before the run and is captured.

Data that leaves for NumPy or Python has no graph; `recorded_run.py` finds where it returns.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.utils.checkpoint
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import get_gradient_edge

from gradtools.code_origin import innermost, lines_above, lines_of
from gradtools.seeing.graphs.nodes import Dependence, Links, Node, PlainGraph, Value
from gradtools.seeing.graphs.recording import RefusedCall
from gradtools.seeing.torch.recording import autograd_functions, operations
from gradtools.seeing.torch.recording.recorded_calls import (
    CallLinks,
    RecordedCall,
    TensorOperand,
    version_of,
)
from gradtools.seeing.torch.recording.recorder import Recorder
from gradtools.seeing.torch.recording.values import KnownTensor, Write, size_of
from gradtools.seeing.torch.undo import Undo, name_of
from gradtools.torch import _upstream as upstream
from gradtools.torch import known_errors
from gradtools.torch.autograd_graph import leaves_of
from gradtools.torch.functorch_wrappers import is_inexact, tensors_in, unwrapped
from gradtools.torch.operation_marks import CHUNK, function_of_ours, reason_of_detach

Tensor = torch.Tensor
_CUT, _FULL = Dependence.CUT, Dependence.DIFFERENTIABLE
Numbers = list[int]
Edge = tuple[Any, int]  # (grad_fn, output_nr)
Replace = tuple[frozenset[int], Callable[[Any], Any]]

# PyTorch's own errors about lost gradients, by a part of their text, with the kind of loss of each.
# `tests/support/torch_lost_gradients.py` raises each, so that tests notice a new wording.
REFUSALS = {
    "Can't call numpy() on Tensor that requires grad": "left_framework",
    "Can't export tensors that require gradient": "left_framework",
    "only integer tensors of a single element can be converted to an index": "integer_cast",
    "a leaf Variable that requires grad is being used in an in-place operation": "in_place_data",
    "a view of a leaf Variable that requires grad is being used in an in-place": "in_place_data",
    "modified by an inplace operation": "in_place_data",
    "only Tensors of floating point": "integer_cast",
    "Only Tensors created explicitly by the user": "detached",
    "Inference tensors cannot be saved for backward": "no_grad",
    "Inplace update to inference tensor outside InferenceMode": "no_grad",
    "Setting requires_grad=True on inference tensor": "no_grad",
    "appears to not have been used in the graph": "unused",
    "does not require grad and does not have a grad_fn": "detached",
}


class CallRecorder(Recorder[int]):
    """Records the PyTorch functions that run under it.

    Tensors are unwrapped from transforms to reach autograd's graph.

    Args:
        undo: As in `Recorder`.
        replace: The indices of leavings whose data is replaced, and the function that replaces it.

    Attributes:
        nodes: The nodes so far.
        outside: As in `Graph`.
        made: For each node of autograd the position of the recorded node that made it.
        reachable: The tensors that the program can reach before it runs, by id.
        leavings: The nodes by which data left for NumPy or Python so far.
        entries: For nodes after a leaving, fingerprints of the numbers and arrays among their
            arguments, to compare two runs.
        bad: The numbers of the tensors that have a NaN or infinite entry.
        given_infinity: The positions of nodes with such a Python number among their arguments.
        refusal: PyTorch's own error, and its description.
    """

    caller, needs_rules = "why_zero", False
    levels = ("rules", "parameters", "functions")

    def __init__(self, undo: Undo, replace: Replace | None = None) -> None:
        super().__init__(undo)
        self.nodes: list[Node] = []
        self.outside: list[tuple[int, int]] = []
        self.made: dict[Any, int] = {}
        self.reachable = undo.reachable
        self.leavings: list[Node] = []
        self.entries: dict[int, list[Any]] = {}
        self.bad: set[int] = set()
        self.given_infinity: set[int] = set()
        self.refusal: tuple[BaseException, RefusedCall] | None = None
        self._replace = replace
        self._gradients: Numbers = []  # `.grad` after each backward pass
        self._edges: dict[Edge, int] = {}
        self._edge_at_hold: dict[int, Edge] = {}  # when a known tensor got its number, by its id

    # --- what runs

    def called(self, fun: Any, args: Any, kwargs: Any) -> Any:
        """Records a call of a PyTorch function; its inner calls are not recorded."""
        if _reads_only(fun):
            return fun(*args, **kwargs)
        if fun is upstream.custom_function_call:
            kind, *args = args
            return self.ruled(kind, partial(fun, kind), args, kwargs)
        call = self.entering(fun, args, kwargs)
        with self.silent():
            out = self._result(call, fun, args, kwargs)
            branches = call.raw in operations.BRANCHES
            if branches or call.raw in operations.LEAVES:
                return self._leaves(call, out, branches)
            if call.raw == "__array_wrap__":  # what a NumPy ufunc returns for a tensor operand
                of, number = call.numbers[0], self.new(out)
                left = [leaving for leaving in self.leavings if leaving.inputs[0] == of]
                self.outside += [(leaving.outputs[0], number) for leaving in left[-1:]]
                if isinstance(out, Tensor):
                    self.hold(out, number)
            elif call.raw in ("grad", "backward") and call.kwargs.get("create_graph"):
                self._differentiates(call, out)
            elif call.raw == "backward":  # .grad depends on the loss, without a graph
                value, links = self.new(0.0), ((_CUT,) * len(call.numbers),)
                self.add("stop", call.name, call.numbers, [value], links, "inner_gradient")
                self._gradients.append(value)
            else:
                self.write(call, out)
            return out

    def ruled(self, kind: Any, apply: Any, args: Any, kwargs: Any) -> Any:
        """Records a call of a torch.autograd.Function as one node."""
        ours = function_of_ours(kind)
        call = self.entering(kind, (*args, *autograd_functions.captured_by(args)), kwargs)
        call.raw, (call.name, call.mark) = "apply", autograd_functions.name_and_mark(kind, args)
        with self.silent():
            with autograd_functions.ParametersRead() as read:
                out = self._result(call, apply, args, kwargs)
            if not ours:
                # It also reads captured tensors, for which it returns no derivative, unless it is a
                # reentrant checkpoint that computes its function again in backward.
                again = kind is torch.utils.checkpoint.CheckpointFunction
                flows = again and any(y.requires_grad for y in tensors_in(out))
                given = {id(x.tensor) for x in call.operands}
                more = [x for x in _distinct(read.tensors) if id(x) not in given]
                call.operands += [
                    TensorOperand(x, self.of(x), not flows, version_of(x)) for x in more
                ]
                call.reason = "reentrant" if again and more else ""
            call.unruled = autograd_functions.unruled(kind, call, out)
            self.write(call, out)
            return out

    def wrapped(self, kind: Any, make: Any, args: Any, kwargs: Any) -> Any:
        """Records the construction of a Parameter or a Buffer from a tensor."""
        call = self.entering(kind, args, kwargs)
        call.name = kind.__name__
        with self.silent():
            out = make(*args, **kwargs)
            self.write(call, out)
            return out

    def entering(self, fun: Any, args: Any, kwargs: Any) -> RecordedCall:
        """What a call is given."""
        with self.silent():
            numbered = [(unwrapped(x), self.of(x)) for x in tensors_in((args, kwargs))]
            for x, _ in numbered:
                if self.was_reconnected(x):  # a view of what was written to
                    self.hold(x, self.of(x))
            return RecordedCall(
                getattr(fun, "__name__", ""),
                name_of(fun),
                args,
                kwargs,
                [
                    TensorOperand(x, number, x.requires_grad, version_of(x))
                    for x, number in numbered
                ],
                torch.is_grad_enabled(),
            )

    def _result(self, call: RecordedCall, fun: Any, args: Any, kwargs: Any) -> Any:
        """Makes a call; keeps PyTorch's error if it concerns a gradient."""
        try:
            return fun(*args, **kwargs)
        except Exception as error:
            own = isinstance(error, RuntimeError | TypeError | ValueError | BufferError)
            kind = known_errors.known(error, REFUSALS) if own else None
            if kind is not None:
                source = self.origin().source or innermost(lines_of(error))
                message = str(error).strip().partition("\n")[0]
                self.refusal = error, RefusedCall(kind, call.name, message, source, self.scope)
            raise

    # --- nodes

    def add(
        self,
        operation: str,
        native: str,
        inputs: Sequence[int],
        outputs: Sequence[int],
        links: Links | None,
        loss: str | None = None,
        mark: str = "",
        made: Iterable[Any] = (),
        **more: Any,
    ) -> int:
        """Adds a node with the running line as its source; made: The nodes of autograd it made."""
        here = self.origin()
        at = replace(here, mark=mark or here.mark)
        if loss and (known := operations.library_call(lines_above(1, Recorder.run))):
            native, loss = known
        more |= {"links": links, "loss": loss}
        self.nodes.append(self.node(operation, native, inputs, outputs, at, **more))
        for fn in made:
            self.made.setdefault(fn, len(self.nodes) - 1)
        return len(self.nodes) - 1

    def write(self, call: RecordedCall, out: Any) -> None:
        """Adds the node of a call that makes or changes tensors."""
        rewritten = {id(x): x for x in call.rewritten()}
        changed = [  # in its contents, or in its place in autograd's graph
            x
            for x, _, tracked, _ in call.operands
            if id(x) not in rewritten and (tracked > x.requires_grad or self.was_reconnected(x))
        ]
        changed = _distinct([*rewritten.values(), *changed])
        fresh = [x for x in tensors_in(out) if self.known(x) is None]
        if not (changed or fresh):
            return
        outs = [*changed, *_distinct(fresh)]
        walks = [self.walk(unwrapped(y)) for y in outs]
        dropped = {id(x) for x in changed} if call.overwrites() else set[int]()
        if call.name in operations.APART and reason_of_detach() == CHUNK:
            # gradtools' own detach, which runs a chunk separately and connects it by a Function
            links = ((_FULL,) * len(call.operands),) * len(outs)
            result = CallLinks("identity", call.numbers, links, None)
        else:
            hosts = self._gradients if call.raw == "__get__" and call.name == "grad" else []
            result = call.links(outs, [values for values, _ in walks], hosts, dropped)
        numbers = [self.new(y) for y in outs]
        node = self.add(
            result.operation,
            call.name,
            result.inputs,
            numbers,
            result.links,
            result.loss,
            call.mark,
            [fn for _, nodes in walks for fn in nodes],
            overwrites=tuple([x.number for x in call.operands if id(x.tensor) in dropped]),
        )
        numbers_given = upstream.pytree.tree_leaves((call.args, call.kwargs))
        if any(isinstance(x, float) and not math.isfinite(x) for x in numbers_given):
            self.given_infinity.add(node)
        if self.leavings:
            self.entries[node] = [*_fingerprints((call.args, call.kwargs))]
        pairs = [*zip(outs, numbers, strict=True)]
        for y, number in pairs:
            if id(y) in rewritten:
                self.table.write(y, number, call)
        for y, number in pairs:
            self.hold(y, number)
        for x in rewritten.values():  # only now autograd's graph shows whether views are connected
            for other in [*self.table.sharing(x)]:
                self.of(other)

    def _differentiates(self, call: RecordedCall, out: Any) -> None:
        """Records a differentiable derivative inside f."""
        outs = list(tensors_in(call.args[:1]))
        if call.raw == "grad":
            pairs = list(zip(call.args[1], out, strict=True))
        else:
            leaves = call.kwargs.get("inputs") or leaves_of(outs)
            pairs = [(x, x.grad) for x in leaves]
        self.write(call, [g for _, g in pairs])

    # --- data that leaves PyTorch, and returns

    def _leaves(self, call: RecordedCall, out: Any, branch: bool) -> Any:
        """Records data that leaves for NumPy or Python, or as a boolean on which f may branch."""
        numbers = call.numbers if branch else call.numbers[:1]
        value = self.new(call.operands[0].tensor if isinstance(out, list) else out)
        operation, loss = ("branch", "discrete") if branch else ("leave", "left_framework")
        node = self.add(operation, call.name, numbers, [value], ((_CUT,) * len(numbers),), loss)
        self.leavings.append(self.nodes[node])
        if self._replace is not None and len(self.leavings) - 1 in self._replace[0]:
            return self._replace[1](out)
        return out

    def enters(self, leaving: Node, node: int) -> None:
        """Connects data that left to the node at which it returned."""
        number = self.new(0.0)
        self.outside.append((leaving.outputs[0], number))
        old = self.nodes[node]
        assert old.links is not None
        links = tuple([(*row, _FULL) for row in old.links])
        self.nodes[node] = replace(old, inputs=(*old.inputs, number), links=links)

    # --- values

    def new(self, x: Any, name: str = "") -> int:
        """A new number for a tensor, a NumPy array or a Python number."""
        number = super().new(x, name)
        if isinstance(x, np.ndarray | np.generic | bool | int | float | complex):
            array = np.asarray(x)
            self.values[number] = Value(array.shape, array.dtype.name, name)
        elif not math.isfinite(size_of(unwrapped(x))):
            self.bad.add(number)
        return number

    def known(self, x: Tensor) -> KnownTensor[int] | None:
        """The entry of this tensor object; aliases differ in autograd's graph."""
        return self.table.get(unwrapped(x))

    def hold(self, x: Tensor, value: int) -> None:
        """Gives a tensor, unwrapped from transforms, this number."""
        base = unwrapped(x)
        self.table.hold(base, value, alone=True)
        self._edge_at_hold[id(base)] = edge_of(base)
        if base.grad_fn is not None:
            self._edges[edge_of(base)] = value

    def of(self, x: Tensor) -> int:
        """The value of a tensor; a Function that no patch saw is added when its result is read."""
        number, base = super().of(x), unwrapped(x)
        if not isinstance(base.grad_fn, BackwardCFunction) or not self.was_reconnected(base):
            return number
        behind, made = self.walk(base)
        after, links = self.new(base), ((*[_FULL] * len(behind), _CUT),)
        name = operations.word_of(base.grad_fn)
        about = {"mark": "custom rule", "made": made}
        self.add("custom_rule", name, [*behind, number], [after], links, "rule", **about)
        self.hold(base, after)
        return after

    def was_reconnected(self, x: Tensor) -> bool:
        """Whether a known tensor's grad_fn changed since it got its number."""
        return x.requires_grad and edge_of(x) != self._edge_at_hold[id(x)]

    def rewritten(self, x: Tensor, before: int, writes: Sequence[Write[int]]) -> int:
        """Adds an update node for each write, differentiable if autograd changed x's grad_fn."""
        for write in writes:
            behind = write.tensor.requires_grad and not self.was_reconnected(x)
            loss = ("in_place_data" if write.by.grad else "no_grad") if behind else None
            number = self.new(x)
            made = self.walk(x)[1]
            links = ((_FULL, _CUT if behind else _FULL),)
            given = [before, write.value]
            self.add("update", write.by.name, given, [number], links, loss, made=made)
            self.hold(x, number)
            before = number
        return before

    def met(self, x: Tensor) -> int:
        """The number of an unrecorded tensor; another object for a known tensor has that one's."""
        base = unwrapped(x)
        known = self._edges.get(edge_of(base)) if base.grad_fn is not None else None
        if known is not None:
            return known
        number = self.new(x)
        if id(base) not in self.reachable and base.grad_fn is not None:
            behind, made = self.walk(base)
            if behind:
                operation = operations.neutral_of_node(base.grad_fn)
                name, links = operations.word_of(base.grad_fn), ((_FULL,) * len(behind),)
                self.add(operation, name, behind, [number], links, made=made)
                return number
        elif id(base) not in self.reachable:
            source = next(self.table.sharing(base), None)
            if source is not None:  # a Parameter or an unrecorded view
                stopped = is_inexact(base) and source.requires_grad
                links = ((_FULL if is_inexact(base) and not stopped else _CUT,),)
                name = type(base).__name__ if isinstance(base, torch.nn.Parameter) else "alias"
                operation, loss = ("stop", "detached") if stopped else ("identity", None)
                self.add(operation, name, [self.of(source)], [number], links, loss)
                return number
        self.capture(base, number)
        return number

    def walk(self, out: Tensor) -> tuple[list[int], list[Any]]:
        """The known values behind a tensor in autograd's graph, and the nodes in between."""
        if out.grad_fn is None:  # a leaf depends on its own previous value
            known = self.known(out) if out.requires_grad else None
            return ([] if known is None else [known.value]), []
        result: dict[int, None] = {}
        edge = get_gradient_edge(out)
        todo: list[tuple[Any, int]] = [(edge.node, edge.output_nr)]
        seen: dict[Any, None] = {}
        while todo:
            node, k = todo.pop()
            number = self._edges.get((node, k))
            if number is None and type(node).__name__ == "AccumulateGrad":
                number = self.of(node.variable)
            if number is not None:
                result[number] = None
            elif node not in seen:
                seen[node] = None
                todo += [pair for pair in node.next_functions if pair[0] is not None]
        return list(result), list(seen)

    # --- the graph

    def graph(self, inputs: Sequence[int], outputs: Sequence[int]) -> PlainGraph:
        """The recorded graph."""
        values = dict(self.values)
        for number, x in self.captured.items():
            values[number] = replace(values[number], name=self.names.get(id(x), ""))
        captured = tuple(self.captured)
        return PlainGraph(
            tuple(self.nodes), values, tuple(inputs), tuple(outputs), captured, tuple(self.outside)
        )


_READS = frozenset(
    {"dim", "size", "numel", "stride", "storage_offset", "is_floating_point", "is_complex"}
    | {"__len__", "is_contiguous", "element_size", "nelement", "ndimension", "get_device"}
    | {"data_ptr"}
    | {"untyped_storage", "storage", "__repr__", "__format__", "__hash__", "register_hook"}
    | {"_set_grad_enabled", "is_inference", "is_signed", "is_conj", "is_neg", "retain_grad"}
    | {"is_tensor", "result_type", "can_cast", "register_post_accumulate_grad_hook", "__dir__"}
)
_TENSORS_OF = frozenset({"data", "T", "mT", "H", "mH", "real", "imag", "grad"})


def _reads_only(fun: Any) -> bool:
    name = getattr(fun, "__name__", "")
    if name in ("__get__", "__set__"):
        of = fun.__self__.__name__
        return of not in _TENSORS_OF if name == "__get__" else of not in ("data", "requires_grad")
    return name in _READS


def _fingerprints(x: Any, depth: int = 4) -> Iterator[Any]:
    """Fingerprints of the numbers and NumPy arrays among arguments, to compare two runs."""
    if isinstance(x, slice):
        x = [x.start, x.stop, x.step]
    items = list(x.values()) if isinstance(x, dict) else x
    if depth and isinstance(items, list | tuple):
        for item in items[:_MOST]:
            yield from _fingerprints(item, depth - 1)
    elif isinstance(x, np.ndarray):
        yield x.shape, x.dtype, zlib.crc32(np.ascontiguousarray(x).tobytes())
    elif isinstance(x, float | int | complex | np.generic):
        yield repr(x)


_MOST = 1000  # entries of a list that are compared


def edge_of(x: Tensor) -> Edge:
    """A tensor's place in autograd's graph."""
    return x.grad_fn, x.output_nr


def _distinct(xs: Sequence[Tensor]) -> list[Tensor]:
    """Each once."""
    return list({id(unwrapped(x)): x for x in xs}.values())
