"""Records which values of a PyTorch run depend on each other, for `why_zero`.

The recorded operations are aten operations (`run_recorder.py`) with the name of the PyTorch
function that the user called. A torch.autograd.Function is recorded as a single node. A conversion
to NumPy or Python is recorded as a node; `recorded_run.py` finds the values that depend on the
converted data.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Container, Iterable, Sequence
from dataclasses import replace
from functools import partial
from itertools import takewhile, zip_longest
from types import MappingProxyType
from typing import Any, Self

import numpy as np
import torch
import torch.utils.checkpoint

from gradtools.code_origin import innermost, lines_of
from gradtools.seeing.diagnostics.findings import Finding
from gradtools.seeing.graphs.derivative_flow import join
from gradtools.seeing.graphs.nodes import Dependence, Links, Node, PlainGraph, Value
from gradtools.seeing.torch import _upstream as private
from gradtools.seeing.torch.operands import AtenCall
from gradtools.seeing.torch.recording import autograd_functions, operations
from gradtools.seeing.torch.recording.run_recorder import RecordedNode, RunRecorder
from gradtools.seeing.torch.recording.values import size_of
from gradtools.seeing.torch.undo import Run, Undo, copied, name_of
from gradtools.torch import _upstream as upstream
from gradtools.torch import known_errors
from gradtools.torch.functorch_wrappers import is_inexact, tensors_in, unwrapped
from gradtools.torch.operation_marks import RULE, function_of_ours, reason_of_detach

Tensor = torch.Tensor
_CUT, _FULL = Dependence.CUT, Dependence.DIFFERENTIABLE
Edge = tuple[Any, int]  # an autograd node and an output index

# Maps part of the text of a PyTorch error to the kind of lost gradient.
# `tests/torch/lost_gradients.py` raises each error, so tests fail if PyTorch changes a text.
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


class ConnectionRecorder(RunRecorder):
    """Records which values of a run depend on each other.

    Args:
        undo: Copies of the state that the run may change.
        replaced: The indices in `leavings` of the conversions at which data is perturbed.
        other: The function that perturbs the data.

    Attributes:
        outside: Pairs (source, target) of value indices. The target depends on the source through
            NumPy or a Python number.
        leavings: The nodes of conversions to NumPy or Python.
        entries: The NumPy and Python data that operations read after the first conversion, for the
            comparison of two runs. An entry contains the operation name, the node or the index of
            the captured value, and fingerprints of the data.
        sizes: Maps value indices to the largest absolute value of the tensor, as in
            `PassesAtValues`.
        refusal: The PyTorch error that ended the run, and the finding that describes the error.
        leaves: The copies of the leaves that were passed to the function, with their value indices
            in `inputs`.
        outs: The results of the function, with their value indices in `outputs`.
    """

    caller = "why_zero"
    levels = ("rules", "parameters", "functions", "operations")

    def __init__(
        self, undo: Undo, replaced: Container[int] = (), other: Callable[[Any], Any] = str
    ) -> None:
        super().__init__(undo)
        self.outside: list[tuple[int, int]] = []
        self.leavings: list[Node] = []
        self.entries: list[tuple[str, RecordedNode | int, list[Any]]] = []
        self.sizes: dict[int, float | None] = {}
        self.refusal: tuple[BaseException, Finding] | None = None
        self.leaves, self.outs = list[Any](), list[Any]()
        self.inputs, self.outputs = list[int](), list[int]()
        self._replaced, self._other = replaced, other
        self._results: list[Any] = []  # fingerprints of the results of the run
        self._scalars: list[int] = []  # value indices of Python numbers read from tensors
        self._is_plain = True  # False inside of torch.func transforms
        self._edges: dict[int, Edge] = {}  # maps the id of a tensor to its gradient edge

    def observe(self, run: Run, leaves: Sequence[Any], names: Sequence[str] = ()) -> Self:
        """Runs a function with copies of its leaves and records the run.

        A PyTorch error about gradients ends the run and is saved in `refusal`.
        """
        self.leaves = [copied(x) for x in leaves]
        named = zip_longest(self.leaves, names, fillvalue="")
        self.inputs = [self.introduced(x, name) for x, name in named]
        try:
            self.outs = [*self.run(run, self.leaves)]
        except Exception as error:
            causes: list[BaseException] = [error]
            while (cause := causes[-1].__cause__ or causes[-1].__context__) is not None:
                causes.append(cause)
            if self.refusal is None or self.refusal[0] not in causes:
                raise
        else:
            self.refusal = None  # the function caught the error
        with self.silent():
            number_of = lambda y: (self.of if isinstance(y, Tensor) else self.new)(y)
            self.outputs = [*map(number_of, self.outs)]
            self._results = [_contents(y) for y in self.outs]
        return self

    # --- calls

    def called(self, fun: Any, args: Any, kwargs: Any) -> Any:
        """Runs a PyTorch function and records its operations with the name of the function."""
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
        self._scalars, self._is_plain = [], upstream.peek_interpreter_stack() is None
        out = self._result(name, super().called, (fun, args, kwargs))
        with self.silent():
            results = [*map(unwrapped, tensors_in(out))]
            for x in [*xs, *results]:  # record grad_fn after the call
                self.of(x)
            self.outside += [(value, self.of(y)) for value in self._scalars for y in results]
        return out

    def _apart(self, raw: str, xs: list[Tensor], fun: Any, args: Any, kwargs: Any) -> Any:
        """Runs a function such as `detach`, whose result has no grad_fn, and records one node."""
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
            if name == "array_wrap":  # the result of a NumPy ufunc on a tensor
                left = [leaving for leaving in self.leavings if leaving.inputs[0] == numbers[0]]
                self.outside += [(leaving.outputs[0], number) for leaving in left[-1:]]
                numbers, tracked = [], []
            keeps = [not t or (name == "set_data" and not k) for k, t in enumerate(tracked)]
            links = (tuple(_FULL if keep else _CUT for keep in keeps),)
            loss = None if all(keeps) else _APART.get(name, "left_framework")
            self.add(name, numbers, [number], self.origin(), links=links, loss=loss)
            self.table.hold(y, number, alone=True)
            self._edges[id(y)] = edge_of(y)
            self._tracked[number] = y.requires_grad
            return out

    def operated(self, call: AtenCall) -> Any:
        """Records an aten operation, or a conversion if the result is a Python number."""
        if call.raw != "_local_scalar_dense":
            return super().operated(call)
        out = call.run()
        self._scalars.append(self.new(out))
        loss = "left_framework" if call.args[0].requires_grad else None
        numbers = [self.of(call.args[0])]
        self._leave("leave", loss, self._function or "item", numbers, self._scalars[-1])
        return out

    def write(self, call: AtenCall, numbers: Any, outs: Any, written: Any) -> Node:
        node = super().write(call, numbers, outs, written)
        with self.silent():
            of, made = self.made[-1], () if numbers else outs
            self._enter(node.native, of, (call.args, call.kwargs), made)
        return node

    def native(self, call: AtenCall) -> str:
        return self._function or call.name

    def ruled(self, kind: Any, apply: Any, args: Any, kwargs: Any) -> Any:
        """Records a call of a torch.autograd.Function as one node."""
        name, mark = autograd_functions.name_and_mark(kind, args)
        with self.silent():
            xs = [*map(unwrapped, tensors_in((args, kwargs)))]
            before = [version_of(x) for x in xs]
            numbers, tracked = [*map(self.of, xs)], [x.requires_grad for x in xs]
            with autograd_functions.ParametersRead() as read:
                out = self._result(name, apply, args, kwargs)
            ys = [*map(unwrapped, tensors_in(out))]
            changed = [x for x, version in zip(xs, before, strict=True) if version != version_of(x)]
            outs = list({id(y): y for y in (*changed, *ys)}.values())
            # A Function may also read captured tensors. Captured tensors get a gradient only from a
            # reentrant checkpoint, because a checkpoint recomputes its function in backward.
            again = kind is torch.utils.checkpoint.CheckpointFunction
            given, own = {id(x) for x in xs}, function_of_ours(kind)
            more = [] if own else [x for x in map(unwrapped, read.tensors) if id(x) not in given]
            captured = list({id(x): x for x in more}.values())
            numbers += map(self.of, captured)
            tracked += [not (again and any(y.requires_grad for y in ys))] * len(captured)

            def link(k: int, x: Tensor, y: Tensor) -> Dependence:
                flows = not tracked[k] or (y.requires_grad and k < len(xs))
                return _FULL if flows and is_inexact(x) and is_inexact(y) else _CUT

            operands = [*enumerate([*xs, *captured])]
            links = tuple(tuple(link(k, x, y) for k, x in operands) for y in outs)
            loss = None
            if any(of and row[k] == _CUT for row in links for k, of in enumerate(tracked)):
                is_off = (again and captured) or not torch.is_grad_enabled()
                loss = "no_grad" if is_off else "rule"
                loss = loss if any(map(is_inexact, outs)) else "discrete"
            at, made = len(self.made), [self.new(y) for y in outs]
            rule = getattr(args[0], "rule", None) if own == RULE else None
            about: dict[str, Any] = {"links": links, "loss": loss}
            about |= {"mark": mark} if mark else {}
            about |= {"attributes": {"bridged": True}} if getattr(rule, "is_bridged", False) else {}
            self.add(name, numbers, made, self.origin(), **about)
            for y, number in zip(outs, made, strict=True):
                if any(y is x for x in changed):
                    self.table.write(y, number, (self.origin(), True))
                self.hold(y, number)
                self.of(y)
                if y.grad_fn is not None:
                    self.positions[upstream.sequence_of(y.grad_fn)] = at
            return out

    def wrapped(self, kind: Any, make: Any, args: Any, kwargs: Any) -> Any:
        """Records the construction of a Parameter or a Buffer from a tensor."""
        xs = [*map(unwrapped, tensors_in((args, kwargs)))]
        return self._apart(kind.__name__, xs, make, args, kwargs)

    def _result(self, name: str, fun: Any, args: Any, kwargs: Any = MappingProxyType({})) -> Any:
        """Calls `fun`; saves a PyTorch error about gradients in `refusal`."""
        try:
            return fun(*args, **kwargs)
        except Exception as error:
            own = isinstance(error, RuntimeError | TypeError | ValueError | BufferError)
            kind = known_errors.known(error, REFUSALS) if own else None
            if kind is not None:
                source = self.origin().source or innermost(lines_of(error))
                message = str(error).strip().partition("\n")[0]
                self.refusal = error, Finding("", kind, name, source, self.scope, detail=message)
            raise

    # --- data that leaves PyTorch and returns

    def _leaves(
        self, raw: str, name: str, xs: list[Tensor], fun: Any, args: Any, kwargs: Any
    ) -> Any:
        """Records a conversion of tensors to NumPy arrays, Python numbers or branch conditions."""
        with self.silent():
            branch = raw in operations.BRANCHES
            numbers = [*map(self.of, xs)] if branch else [self.of(xs[0])]
            out = self._result(name, fun, args, kwargs)
            value = self.new(xs[0] if isinstance(out, list) else out)
            kind = ("branch", "discrete") if branch else ("leave", "left_framework")
            self._leave(*kind, name, numbers, value)
            return self._other(out) if len(self.leavings) - 1 in self._replaced else out

    def _leave(
        self, operation: str, loss: str | None, name: str, numbers: Sequence[int], value: int
    ) -> None:
        """Adds the node of a conversion to NumPy or Python; its output is the converted data."""
        about = {"operation": operation, "links": ((_CUT,) * len(numbers),), "loss": loss}
        made = self.add(name, numbers, [value], self.origin(), **about)
        self.leavings += [] if self.phase else [made.node]

    def _enter(self, name: str, of: RecordedNode | int, read: Any, made: Iterable[Any]) -> None:
        """Records NumPy and Python data that an operation reads, and tensors `made` from it."""
        if self.leavings and not self.phase:
            data = [x for x in upstream.tree_leaves(read) if not isinstance(x, Tensor)]
            self.entries.append((name, of, [*map(_contents, (*data, *made))]))

    def changes(self, other: ConnectionRecorder) -> list[int]:
        """Returns the values that differ in the run `other`, in which converted data is perturbed.

        A returned tensor that differs is included only if no entry of `entries` differs.
        """
        both = zip(self.entries, other.entries, strict=False)
        alike = takewhile(lambda pair: pair[0][0] == pair[1][0], both)  # until operations differ
        changed = [of for (_, of, data), (*_, new) in alike if data != new]
        entered = [of if isinstance(of, int) else self._operand(of) for of in changed]
        results = zip_longest(self._results, other._results)
        moved = [k for k, (a, b) in enumerate(results) if a != b and k < len(self.outs)]
        ends = [k for k in moved if not (entered and isinstance(self.outs[k], Tensor))]
        return [*entered, *(self.outputs[k] for k in ends)]

    def _operand(self, made: RecordedNode) -> int:
        """Adds an operand that represents NumPy or Python data to an operation."""
        number = self.new(0.0)
        made.node = replace(made.node, inputs=(*made.node.inputs, number))
        return number

    # --- values

    def new(self, x: Any, name: str = "") -> int:
        """Assigns a new value index to a tensor, NumPy array or Python number."""
        number = super().new(x, name)
        if isinstance(x, np.ndarray | np.generic | bool | int | float | complex):
            array = np.asarray(x)
            self.values[number] = Value(array.shape, array.dtype.name, name)
        return number

    def met(self, x: Tensor) -> int:
        """Assigns a value index to x; adds x to `entries` if x was not reachable before the run."""
        number = super().met(x)
        if id(x) not in self.undo.reachable:
            with self.silent():
                self._enter("captured", number, (), [x])
        return number

    def hold(self, x: Tensor, value: int) -> None:
        """Removes functorch wrappers from x, assigns a value index to it, and records its size."""
        base = unwrapped(x)
        super().hold(base, value)
        if value not in self.sizes and self._is_plain:
            with self.silent(), torch.no_grad():
                self.sizes[value] = size_of(base)
        self._edges.pop(id(base), None)

    def of(self, x: Tensor) -> int:
        """Removes functorch wrappers from x, and returns its value index."""
        with self.silent():
            base = unwrapped(x)
            number = super().of(base)
            self._edges[id(base)] = edge_of(base)
            return number

    def links_of_update(
        self, x: Tensor, written: Tensor, given: Sequence[int], grad: bool
    ) -> tuple[Links | None, str | None]:
        """Returns cut links and their loss if the write keeps x.grad_fn, otherwise (None, None)."""
        was_reconnected = self._edges.get(id(x), edge_of(x)) != edge_of(x)
        if not written.requires_grad or was_reconnected:
            return None, None
        links = ((*[_FULL] * (len(given) - 1), _CUT),)
        return links, "in_place_data" if grad else "no_grad"

    # --- the graph

    @property
    def captured_tensors(self) -> dict[int, Tensor]:
        """Maps value indices to captured tensors."""
        return {number: x for number, x in self.captured.items() if x is not None}

    def graph(self) -> PlainGraph:
        """Returns the graph of the recorded forward pass."""
        values = dict(self.values)
        for number, x in self.captured_tensors.items():
            values[number] = replace(values[number], name=self.names.get(id(x), ""))
        ends = tuple(self.inputs), tuple(self.outputs)
        joins = [join(source, target, _CUT) for source, target in self.outside]
        nodes = [self.linked(made) for made in self.made if not made.node.phase]
        return PlainGraph((*joins, *nodes), values, *ends, tuple(self.captured))


# Maps functions whose result has no grad_fn to the kind of lost gradient.
_APART = {
    **dict.fromkeys(
        ("data", "detach", "deepcopy", "array_wrap", "Parameter", "Buffer"), "detached"
    ),
    **dict.fromkeys(("tensor", "new_tensor"), "left_framework"),
    "set_data": "in_place_data",
}


def _contents(x: Any) -> Any:
    """Returns a fingerprint of a tensor, array or number, for the comparison of two runs."""
    if isinstance(x, Tensor) and not x.is_meta and x.layout is torch.strided:
        x = x.detach().resolve_conj().resolve_neg().cpu().contiguous().reshape(-1)
        x = x.view(torch.uint8).numpy()
    if isinstance(x, np.ndarray):
        return x.shape, x.dtype, zlib.crc32(np.ascontiguousarray(x).tobytes())
    return repr(x) if isinstance(x, float | int | complex | np.generic) else None


def edge_of(x: Tensor) -> Edge:
    """Returns (grad_fn, output index), the gradient edge of a tensor."""
    return x.grad_fn, x.output_nr


def version_of(x: Tensor) -> int | None:
    """Returns the version counter of a tensor; None for inference tensors."""
    return None if x.is_inference() else upstream.version_of(x)
