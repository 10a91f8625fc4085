"""Records how values of a PyTorch run are connected, for `why_zero`.

The operations are aten's (`run_recorder.py`), each with the name of the function that the user
called. A torch.autograd.Function is one node, whatever it runs inside. Data that leaves for NumPy
or Python is a node without results in PyTorch; `recorded_run.py` finds where it returns.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.utils.checkpoint
from torch.autograd.function import BackwardCFunction

from gradtools.code_origin import innermost, lines_of
from gradtools.seeing.graphs.nodes import Dependence, Links, Node, PlainGraph, Value
from gradtools.seeing.graphs.recording import RefusedCall
from gradtools.seeing.torch import _upstream as private
from gradtools.seeing.torch.operands import AtenCall
from gradtools.seeing.torch.recording import autograd_functions, operations
from gradtools.seeing.torch.recording.run_recorder import RecordedNode, RunRecorder
from gradtools.seeing.torch.recording.values import size_of
from gradtools.seeing.torch.undo import Undo, name_of
from gradtools.torch import _upstream as upstream
from gradtools.torch import known_errors
from gradtools.torch.functorch_wrappers import is_inexact, tensors_in, unwrapped
from gradtools.torch.operation_marks import function_of_ours, reason_of_detach

Tensor = torch.Tensor
_CUT, _FULL = Dependence.CUT, Dependence.DIFFERENTIABLE
Edge = tuple[Any, int]  # a node of autograd, and the number of its output
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


class TensorOperand(NamedTuple):
    """A tensor among the arguments of a Function, with its state before the call."""

    tensor: Tensor
    number: int
    tracked: bool
    version: int | None


class ConnectionRecorder(RunRecorder):
    """Records the connections of a run.

    Args:
        undo: As in `Recorder`.
        replace: The indices of leavings whose data is replaced, and the function that replaces it.

    Attributes:
        outside: As in `Graph`.
        reachable: The tensors that the program can reach before it runs, by id.
        leavings: The nodes by which data left for NumPy or Python so far.
        entries: For nodes after a leaving, fingerprints of the numbers and arrays among their
            arguments, to compare two runs.
        bad: The numbers of the tensors that have a NaN or infinite entry.
        given_infinity: The positions of nodes with such a Python number among their arguments.
        refusal: PyTorch's own error, and its description.
        aliases: The copies of the leaves that f was given.
        inputs: Their numbers.
        outs: What f returned.
        outputs: Their numbers.
    """

    caller = "why_zero"
    levels = ("rules", "parameters", "functions", "operations")

    def __init__(self, undo: Undo, replace: Replace | None = None) -> None:
        super().__init__(undo)
        self.outside: list[tuple[int, int]] = []
        self.reachable = undo.reachable
        self.leavings: list[Node] = []
        self.entries: dict[int, list[Any]] = {}
        self.bad: set[int] = set()
        self.given_infinity: set[int] = set()
        self.refusal: tuple[BaseException, RefusedCall] | None = None
        self.aliases: list[Any] = []
        self.inputs: list[int] = []
        self.outs: list[Any] = []
        self.outputs: list[int] = []
        self._replace = replace
        self._function = ""  # the function of PyTorch that the user called
        self._scalars: list[int] = []  # the Python numbers that it took of tensors
        self._looked_at: set[int] = set()  # the values that were searched for NaN and infinity
        self._edges: dict[int, Edge] = {}  # a tensor's place in autograd's graph, by its id
        self._at: dict[Edge, int] = {}  # the value at a place in autograd's graph

    # --- what runs

    def called(self, fun: Any, args: Any, kwargs: Any) -> Any:
        """Runs a function of PyTorch, whose operations get its name."""
        if _reads_only(fun):
            return fun(*args, **kwargs)
        if fun is private.custom_function_call:
            kind, *args = args
            return self.ruled(kind, partial(fun, kind), args, kwargs)
        raw, name = getattr(fun, "__name__", ""), name_of(fun)
        xs = [*map(unwrapped, tensors_in((args, kwargs)))]
        if raw in operations.BRANCHES or raw in operations.LEAVES:
            return self._leaves(raw, name, xs, fun, args, kwargs)
        in_list = name in ("as_tensor", "asarray") and not isinstance(args[0], Tensor)
        if xs and ((name in _APART and raw != "detach") or in_list):
            return self._apart(raw, xs[1:] if name == "new_tensor" else xs, fun, args, kwargs)
        self._function, self._scalars = name, []
        try:
            out = self._result(name, fun, args, kwargs)
        finally:
            self._function = ""
        with self.silent():
            results = [*map(unwrapped, tensors_in(out))]
            plain = upstream.peek_interpreter_stack() is None  # a transform's arrays are partial
            for x in [*xs, *results]:  # now autograd's graph shows how they are connected
                number = self.of(x)
                if plain and number not in self._looked_at:
                    self._looked_at.add(number)
                    self.bad |= set() if math.isfinite(size_of(x)) else {number}
            for value in self._scalars:
                self.outside += [(value, self.of(y)) for y in results]
        return out

    def _apart(self, raw: str, xs: list[Tensor], fun: Any, args: Any, kwargs: Any) -> Any:
        """Runs a function that makes a tensor apart from autograd's graph, as one node."""
        name = raw if raw in ("Parameter", "Buffer") else name_of(fun)
        with self.silent():
            numbers = [*map(self.of, xs)]
            tracked = [x.requires_grad for x in xs]
            out = self._result(name, fun, args, kwargs)
            y = xs[0] if name == "set_data" or raw == "detach_" else unwrapped(out)
            if name == "data" and reason_of_detach():
                self.hold(y, numbers[0])
                return out
            number = self.new(y)
            if name == "array_wrap":  # what a NumPy ufunc returns for a tensor operand
                left = [leaving for leaving in self.leavings if leaving.inputs[0] == numbers[0]]
                self.outside += [(leaving.outputs[0], number) for leaving in left[-1:]]
                numbers, tracked = [], []
            keeps = [not t or (name == "set_data" and not k) for k, t in enumerate(tracked)]
            links = (tuple(_FULL if keep else _CUT for keep in keeps),)
            loss = None if all(keeps) else _APART.get(name, "left_framework")
            self.add(operations.neutral(name), name, numbers, [number], links, loss)
            self.table.hold(y, number, alone=True)
            self._edges[id(y)] = edge_of(y)
            self._tracked[number] = y.requires_grad
            return out

    def operated(self, call: AtenCall) -> Any:
        """Records an aten operation; a number that a function takes of a tensor has left."""
        if call.raw != "_local_scalar_dense":
            return super().operated(call)
        out = call.run()
        value, number = self.new(out), self.of(call.args[0])
        loss = "left_framework" if call.args[0].requires_grad else None
        name = self._function or "item"
        self.leavings.append(self.add("leave", name, [number], [value], ((_CUT,),), loss).node)
        self._scalars.append(value)
        return out

    def write(self, call: AtenCall, numbers: Any, outs: Any, written: Any) -> Node:
        node, at = super().write(call, numbers, outs, written), len(self.made) - 1
        with self.silent():
            arguments = upstream.pytree.tree_leaves((call.args, call.kwargs))
            if any(isinstance(x, float) and not math.isfinite(x) for x in arguments):
                self.given_infinity.add(at)
            if self.leavings:
                made = [y for y in outs if isinstance(y, Tensor)] if not numbers else []
                contents = [y.numpy() for y in made if _is_plain(y)]  # no operation of PyTorch
                self.entries[at] = [*_fingerprints((call.args, call.kwargs, contents))]
        return node

    def native(self, call: AtenCall) -> str:
        return self._function or call.name

    def ruled(self, kind: Any, apply: Any, args: Any, kwargs: Any) -> Any:
        """Records a call of a torch.autograd.Function as one node."""
        ours = function_of_ours(kind)
        name, mark = autograd_functions.name_and_mark(kind, args)
        with self.silent():
            xs = [*map(unwrapped, tensors_in((args, kwargs)))]
            captured = autograd_functions.captured_by(args)
            operands = [self._operand(x, x.requires_grad) for x in (*xs, *captured)]
            with autograd_functions.ParametersRead() as read:
                out = self._result(name, apply, args, kwargs)
            reason = "rule" if torch.is_grad_enabled() else "no_grad"
            if not ours:
                # It also reads captured tensors, for which it returns no derivative, unless it is a
                # reentrant checkpoint that computes its function again in backward.
                again = kind is torch.utils.checkpoint.CheckpointFunction
                flows = again and any(y.requires_grad for y in tensors_in(out))
                given = {id(x.tensor) for x in operands}
                more = {id(x): x for x in map(unwrapped, read.tensors) if id(x) not in given}
                operands += [self._operand(x, not flows) for x in more.values()]
                reason = "reentrant" if again and more else reason
            unruled = autograd_functions.unruled(kind, mark, operands, out)
            changed = [x for x, _, _, version in operands if version != version_of(x)]
            outs = list({id(y): y for y in (*changed, *map(unwrapped, tensors_in(out)))}.values())
            numbers = [self.new(y) for y in outs]
            given_numbers = [x.number for x in operands]
            reached = {id(x) for x in xs} - {id(x.tensor) for x in operands if x.number in unruled}

            def link(x: TensorOperand, y: Tensor) -> Dependence:
                inexact = is_inexact(x.tensor) and is_inexact(y)
                flows = not x.tracked or (y.requires_grad and id(x.tensor) in reached)
                return _FULL if inexact and flows else _CUT

            links = tuple(tuple(link(x, y) for x in operands) for y in outs)
            lost = any(
                x.tracked and row[k] == _CUT for row in links for k, x in enumerate(operands)
            )
            if not any(is_inexact(y) for y in outs):
                reason = "discrete"
            at = len(self.made)
            operation = operations.neutral(name)
            loss = reason if lost else None
            self.add(operation, name, given_numbers, numbers, links, loss, mark)
            for y, number in zip(outs, numbers, strict=True):
                if any(y is x for x in changed):
                    self.table.write(y, number, (self.origin(), False, True))
                self.hold(y, number)
                self.of(y)
                if y.grad_fn is not None:
                    self.positions[upstream.sequence_of(y.grad_fn)] = at
            return out

    def _operand(self, x: Tensor, tracked: bool) -> TensorOperand:
        return TensorOperand(x, self.of(x), tracked, version_of(x))

    def wrapped(self, kind: Any, make: Any, args: Any, kwargs: Any) -> Any:
        """Records the construction of a Parameter or a Buffer from a tensor."""
        xs = [*map(unwrapped, tensors_in((args, kwargs)))]
        return self._apart(kind.__name__, xs, make, args, kwargs)

    def _result(self, name: str, fun: Any, args: Any, kwargs: Any) -> Any:
        """Makes a call; keeps PyTorch's error if it concerns a gradient."""
        try:
            return fun(*args, **kwargs)
        except Exception as error:
            own = isinstance(error, RuntimeError | TypeError | ValueError | BufferError)
            kind = known_errors.known(error, REFUSALS) if own else None
            if kind is not None:
                source = self.origin().source or innermost(lines_of(error))
                message = str(error).strip().partition("\n")[0]
                self.refusal = error, RefusedCall(kind, name, message, source, self.scope)
            raise

    # --- nodes

    @property
    def nodes(self) -> list[Node]:
        """The nodes so far, with their links."""
        return [*map(self.linked, self.made)]

    def add(
        self,
        operation: str,
        native: str,
        inputs: Sequence[int],
        outputs: Sequence[int],
        links: Links,
        loss: str | None = None,
        mark: str = "",
    ) -> RecordedNode:
        """Adds a node whose links are known."""
        here = self.origin()
        at = replace(here, mark=mark or here.mark)
        node = self.node(operation, native, inputs, outputs, at, links=links, loss=loss)
        self.made.append(RecordedNode(node, native, -1, torch.is_grad_enabled()))
        return self.made[-1]

    # --- data that leaves PyTorch, and returns

    def _leaves(
        self, raw: str, name: str, xs: list[Tensor], fun: Any, args: Any, kwargs: Any
    ) -> Any:
        """Records data that leaves for NumPy or Python, or as a boolean on which f may branch."""
        with self.silent():
            branch = raw in operations.BRANCHES
            numbers = [*map(self.of, xs)] if branch else [self.of(xs[0])]
            out = self._result(name, fun, args, kwargs)
            value = self.new(xs[0] if isinstance(out, list) else out)
            operation, loss = ("branch", "discrete") if branch else ("leave", "left_framework")
            links = ((_CUT,) * len(numbers),)
            self.leavings.append(self.add(operation, name, numbers, [value], links, loss).node)
            if self._replace is not None and len(self.leavings) - 1 in self._replace[0]:
                return self._replace[1](out)
            return out

    def enters(self, leaving: Node, at: int) -> None:
        """Connects data that left to the node at which it returned, by its position."""
        number = self.new(0.0)
        self.outside.append((leaving.outputs[0], number))
        self.made[at].hosts.append(number)

    # --- values

    def new(self, x: Any, name: str = "") -> int:
        """A new number for a tensor, a NumPy array or a Python number."""
        number = super().new(x, name)
        if isinstance(x, np.ndarray | np.generic | bool | int | float | complex):
            array = np.asarray(x)
            self.values[number] = Value(array.shape, array.dtype.name, name)
        return number

    def hold(self, x: Tensor, value: int) -> None:
        """Gives a tensor, unwrapped from transforms, this number."""
        base = unwrapped(x)
        super().hold(base, value)
        self._edges.pop(id(base), None)

    def of(self, x: Tensor) -> int:
        """The value of a tensor; a Function that no patch saw is added when its result is read."""
        with self.silent():
            base = unwrapped(x)
            number = super().of(base)
            edge = edge_of(base)
            if isinstance(edge[0], BackwardCFunction) and self._edges.get(id(base), edge) != edge:
                behind = [self._at_edge(*pair) for pair in edge[0].next_functions]
                xs = [k for k in behind if k is not None]
                after = self.new(base)
                links = ((*[_FULL] * len(xs), _CUT),)
                name = operations.word_of(edge[0])
                self.positions[upstream.sequence_of(edge[0])] = len(self.made)
                self.add("custom_rule", name, [*xs, number], [after], links, "rule", "custom rule")
                self.hold(base, after)
                self._tracked[after] = True
                number = after
            self._edges[id(base)] = edge
            if edge[0] is not None:
                self._at[edge] = number
            return number

    def _at_edge(self, node: Any, k: int) -> int | None:
        """The value at a place in autograd's graph, if it is known."""
        variable = getattr(node, "variable", None)
        return self._at.get((node, k)) if variable is None else self.of(variable)

    def links_of_update(
        self, x: Tensor, written: Tensor, given: Sequence[int], grad: bool
    ) -> tuple[Links | None, str | None]:
        """An update passes a derivative on if autograd gave x a new place in its graph."""
        was_reconnected = self._edges.get(id(x), edge_of(x)) != edge_of(x)
        if not written.requires_grad or was_reconnected:
            return None, None
        links = ((*[_FULL] * (len(given) - 1), _CUT),)
        return links, "in_place_data" if grad else "no_grad"

    # --- the graph

    @property
    def captured_tensors(self) -> dict[int, Tensor]:
        """The tensors that existed before the run, by number."""
        return {number: x for number, x in self.captured.items() if x is not None}

    def graph(self) -> PlainGraph:
        """The recorded graph."""
        values = dict(self.values)
        for number, x in self.captured_tensors.items():
            values[number] = replace(values[number], name=self.names.get(id(x), ""))
        ends = tuple(self.inputs), tuple(self.outputs)
        captured, outside = tuple(self.captured), tuple(self.outside)
        return PlainGraph(tuple(self.nodes), values, *ends, captured, outside)


# functions that make a tensor apart from autograd's graph, with the kind of loss
_APART = {
    **dict.fromkeys(
        ("data", "detach", "deepcopy", "array_wrap", "Parameter", "Buffer"), "detached"
    ),
    **dict.fromkeys(("tensor", "new_tensor"), "left_framework"),
    "set_data": "in_place_data",
}
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


def _is_plain(x: Tensor) -> bool:
    """Whether NumPy can read its memory."""
    on_cpu = x.device.type == "cpu" and x.layout is torch.strided
    return on_cpu and not x.requires_grad and x.dtype is not torch.bfloat16


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


def version_of(x: Tensor) -> int | None:
    """A tensor's version counter; None for inference tensors, which have none."""
    return None if x.is_inference() else upstream.version_of(x)
