"""Records one run of a PyTorch function as a graph of the functions that it calls, for `why_zero`.

Each call of a PyTorch function becomes a node. A tensor that is changed in place gets a new value
number. Whether a call is differentiable is read from autograd's graph: a walk from the output back
to known tensors. So a custom Function, a checkpoint or a transform is one node like any other.

Data that leaves for NumPy or Python has no graph; `numpy_round_trips.py` finds where it returns.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
import torch

from gradtools.code_origin import Source, innermost, lines_of
from gradtools.seeing.diagnostics.rule_cuts import LOSS
from gradtools.seeing.graphs.nodes import Dependence, PlainGraph
from gradtools.seeing.graphs.recording import Refusal
from gradtools.seeing.torch.recording import autograd_functions, operations
from gradtools.seeing.torch.recording.autograd_functions import (
    ParametersRead,
    is_reentrant_checkpoint,
)
from gradtools.seeing.torch.recording.dependences import links_of
from gradtools.seeing.torch.recording.refusals import refusal_of
from gradtools.seeing.torch.recording.value_numbers import Numbering, version_of
from gradtools.torch import _upstream as upstream
from gradtools.torch.compiling import leaves_of
from gradtools.torch.double_backward import Called
from gradtools.torch.functorch_wrappers import tensors_in, unwrapped
from gradtools.torch.operation_marks import CHUNK, function_of_ours, reason_of_detach
from gradtools.torch.rerunning import Undo, name_of

Tensor = torch.Tensor
_CUT, _FULL = Dependence.CUT, Dependence.DIFFERENTIABLE
Numbers = list[int]
Replace = tuple[frozenset[int], Callable[[Any], Any]]


@dataclass(frozen=True)
class Leaving:
    """Data that left for NumPy or Python.

    Attributes:
        value: The value number of the NumPy array or Python number.
        read: The value number of the tensor that it was read from.
        source: The line at which it left.
        branch: Whether it is a boolean, on which the program may branch.
    """

    value: int
    read: int
    source: Source | None
    branch: bool


@dataclass
class RecordedCall:
    """A call of a PyTorch function, with the state of its arguments before the call.

    Attributes:
        raw: The function's name as PyTorch spells it.
        name: The name without underscores of in-place and reflected variants.
        tensors: The tensors among its arguments, unwrapped from transforms.
        numbers: Their value numbers.
        tracked: Which of them require grad.
        versions: Their version counters.
        grad: Whether grad mode was on.
        mark: As in `Node`.
        unruled: The numbers of inputs for which its own backward returns None.
        reason: The kind of its losses, if known.
    """

    raw: str
    name: str
    args: Any
    kwargs: Any
    tensors: list[Tensor]
    numbers: Numbers
    tracked: list[bool]
    versions: list[int | None]
    grad: bool
    mark: str = ""
    unruled: set[int] = field(default_factory=set)
    reason: str = ""

    def rewritten(self) -> list[Tensor]:
        """The tensors whose contents the call changed."""
        if self.name == "set_data":
            return self.tensors[:1]
        pairs = zip(self.tensors, self.versions, strict=True)
        return _distinct([x for x, version in pairs if version != version_of(x)])

    def changed(self, numbering: Numbering) -> list[Tensor]:
        """The rewritten tensors, and those whose autograd graph changed."""
        pairs = zip(self.tensors, self.tracked, strict=True)
        others = [
            x for x, tracked in pairs if tracked > x.requires_grad or numbering.was_reconnected(x)
        ]
        return _distinct([*self.rewritten(), *others])

    def overwritten(self) -> bool:
        """Whether it overwrites a tensor without reading it."""
        if self.raw in operations.OVERWRITES:
            return True
        key = self.args[1] if self.raw == "__setitem__" else None
        return key is Ellipsis or (isinstance(key, slice) and key == slice(None))


class CallRecorder(Numbering):
    """Records the PyTorch functions that run under it.

    Args:
        undo: As in `Recorder`.
        replace: The indices of leavings whose data is replaced, and the function that replaces it.

    Attributes:
        leavings: All data that left so far.
        entries: For nodes after a leaving, fingerprints of the numbers and arrays among their
            arguments, to compare two runs.
        refusal: PyTorch's own error, and its description.
    """

    caller, levels = "why_zero or dependence", ("rules", "parameters", "functions")

    def __init__(self, undo: Undo, replace: Replace | None = None) -> None:
        super().__init__(undo)
        self.leavings: list[Leaving] = []
        self.entries: dict[int, list[Any]] = {}
        self.refusal: tuple[BaseException, Refusal] | None = None
        self._replace = replace
        self._gradients: Numbers = []  # `.grad` after each backward pass
        self._with_rules: list[tuple[int, Numbers, Called]] = []  # the node, the inputs, the call

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
            return self._done(call, self._result(call, fun, args, kwargs))

    def _result(self, call: RecordedCall, fun: Any, args: Any, kwargs: Any) -> Any:
        try:
            return fun(*args, **kwargs)
        except Exception as error:
            self.note_refusal(call, error)
            raise

    def ruled(self, kind: Any, apply: Any, args: Any, kwargs: Any) -> Any:
        """Records a call of a torch.autograd.Function as one node."""
        call = self.entering(kind, (*args, *autograd_functions.captured_by(args)), kwargs)
        call.raw, (call.name, call.mark) = "apply", autograd_functions.name_and_mark(kind, args)
        with self.silent():
            with ParametersRead() as read:
                out = self._result(call, apply, args, kwargs)
            if not function_of_ours(kind):
                self._add_read(call, read.tensors, is_reentrant_checkpoint(kind), out)
            call.unruled = autograd_functions.unruled(kind, call, out)
            self.write(call, out)
            if autograd_functions.is_foreign(kind, call) and not (kwargs or function_of_ours(kind)):
                self._note_rule(call, kind, apply, args, out)
            return out

    def _add_read(self, call: RecordedCall, read: list[Tensor], again: bool, out: Any) -> None:
        """Adds captured tensors that a Function reads, for which it returns no derivative.

        again: Whether it recomputes its function in backward, and so does return one.
        """
        given = {id(x) for x in call.tensors}
        more = [x for x in _distinct(read) if id(x) not in given]
        flows = again and any(y.requires_grad for y in tensors_in(out))
        call.tensors += more
        call.numbers += map(self.of, more)
        call.tracked += [not flows] * len(more)
        call.versions += map(version_of, more)
        call.reason = "reentrant" if again and more else ""

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
            raw, given = getattr(fun, "__name__", ""), list(tensors_in((args, kwargs)))
            numbers, tensors = [self.of(x) for x in given], [unwrapped(x) for x in given]
            for x in filter(self.was_reconnected, tensors):  # views of what was written to
                self.hold(x, self.of(x))
            return RecordedCall(
                raw,
                name_of(fun),
                args,
                kwargs,
                tensors,
                numbers,
                [x.requires_grad for x in tensors],
                [version_of(x) for x in tensors],
                torch.is_grad_enabled(),
            )

    def note_refusal(self, call: RecordedCall, error: Exception) -> None:
        """Keeps PyTorch's error if it concerns a gradient."""
        kind = refusal_of(error)
        if kind is None:
            return
        source = self.origin().source or innermost(lines_of(error))
        message = str(error).strip().partition("\n")[0]
        result = Refusal(kind, call.name, message, source, self.scopes.path)
        self.refusal = (error, result)

    def _done(self, call: RecordedCall, out: Any) -> Any:
        branches = call.raw in operations.BRANCHES
        if branches or call.raw in operations.LEAVES:
            return self._leaves(call, out, branches)
        if call.raw == "__array_wrap__":
            self._wraps(call, out)
        elif call.raw in ("grad", "backward") and call.kwargs.get("create_graph"):
            self._differentiates(call, out)
        elif call.raw == "backward":  # what is left in .grad depends on the loss, without a graph
            value, links = self.new(0.0), ((_CUT,) * len(call.numbers),)
            self.add("stop", call.name, call.numbers, [value], links, "inner_gradient")
            self._gradients.append(value)
        else:
            self.write(call, out)
        return out

    # --- nodes

    def write(self, call: RecordedCall, out: Any) -> None:
        """Adds the node of a call that makes or changes tensors."""
        changed = call.changed(self)
        fresh = [x for x in tensors_in(out) if self.known(x) is None]
        if not (changed or fresh):
            return
        outs = [*changed, *_distinct(fresh)]
        walks = [self.walk(unwrapped(y)) for y in outs]
        dropped = {id(x) for x in changed} if call.overwritten() else set()
        hosts = self._gradients if call.raw == "__get__" and call.name == "grad" else []
        reached = [values for values, _ in walks]
        managed = call.name in operations.APART and reason_of_detach() == CHUNK
        result = links_of(call, outs, reached, hosts, dropped, managed)
        numbers = [self.new(y) for y in outs]
        operands = zip(call.tensors, call.numbers, strict=True)
        node = self.add(
            result.operation,
            call.name,
            result.inputs,
            numbers,
            result.links,
            result.loss,
            call.mark,
            overwrites=tuple([n for x, n in operands if id(x) in dropped]),
        )
        if self.leavings:
            self.entries[node] = [*_fingerprints((call.args, call.kwargs))]
        for _, nodes in walks:
            self.note_made(nodes, node)
        pairs = [*zip(outs, numbers, strict=True)]
        rewritten = {id(x): x for x in call.rewritten()}
        for y, number in pairs:
            if id(y) in rewritten:
                self.table.write(y, number, call)
        for y, number in pairs:
            self.hold(y, number)
        for x in rewritten.values():  # only now autograd's graph shows whether views are connected
            for other in [*self.table.sharing(x)]:
                self.of(other)

    # --- derivatives that have a graph

    def _note_rule(self, call: RecordedCall, kind: Any, apply: Any, args: Any, out: Any) -> None:
        """Keeps the latest call of a user's Function, to check its double backward later."""
        nodes = [y.grad_fn for y in tensors_in(out) if y.grad_fn is not None]
        if nodes and upstream.peek_interpreter_stack() is None:
            called = Called(nodes[0], kind, args)
            self._with_rules.append((len(self.nodes) - 1, call.numbers, called))

    def _differentiates(self, call: RecordedCall, out: Any) -> None:
        """Records a differentiable derivative inside f, and terms that user's Functions lose."""
        outs = list(tensors_in(call.args[:1]))
        if call.raw == "grad":
            pairs = list(zip(call.args[1], out, strict=True))
        else:
            leaves = call.kwargs.get("inputs") or leaves_of(outs)
            pairs = [(x, x.grad) for x in leaves]
        self.write(call, [g for _, g in pairs])
        for x, g in pairs:
            if g is not None:
                self._add_missing(g, [rule for rule in self._with_rules if rule[2].loses(outs, x)])

    def _add_missing(self, gradient: Tensor, rules: Sequence[tuple[int, Numbers, Called]]) -> None:
        """Adds to a gradient the terms that rules lose, as `missing` nodes with cut links."""
        terms = []
        for at, inputs, _ in rules:
            terms.append(self.new(gradient))
            links = ((_CUT,) * len(inputs),)
            self.nodes.append(
                replace(
                    self.nodes[at],
                    operation="missing",
                    inputs=tuple(inputs),
                    outputs=(terms[-1],),
                    links=links,
                    loss=LOSS,
                )
            )
        if terms:
            whole = [self.of(gradient), *terms]
            number = self.new(gradient)
            self.add("add", "grad", whole, [number], ((_FULL,) * len(whole),))
            self.hold(gradient, number)

    # --- data that leaves PyTorch, and returns

    def _leaves(self, call: RecordedCall, out: Any, branch: bool) -> Any:
        """Records data that leaves for NumPy or Python, or as a boolean on which f may branch."""
        numbers = call.numbers if branch else call.numbers[:1]
        value = self.new(call.tensors[0] if isinstance(out, list) else out)
        operation, loss = ("branch", "discrete") if branch else ("leave", "left_framework")
        node = self.add(operation, call.name, numbers, [value], ((_CUT,) * len(numbers),), loss)
        self.leavings.append(Leaving(value, numbers[0], self.nodes[node].source, branch))
        if self._replace is not None and len(self.leavings) - 1 in self._replace[0]:
            return self._replace[1](out)
        return out

    def _wraps(self, call: RecordedCall, out: Any) -> None:
        """Records the tensor that a NumPy ufunc returns for a tensor operand."""
        left = [leaving.value for leaving in self.leavings if leaving.read == call.numbers[0]]
        number = self.new(out)
        self.outside += [(value, number) for value in left[-1:]]
        if isinstance(out, Tensor):
            self.hold(out, number)

    def enters(self, leaving: Leaving, node: int) -> None:
        """Connects data that left to the node at which it returned."""
        number = self.new(0.0)
        self.outside.append((leaving.value, number))
        old = self.nodes[node]
        assert old.links is not None
        links = tuple([(*row, _FULL) for row in old.links])
        self.nodes[node] = replace(old, inputs=(*old.inputs, number), links=links)

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


def _distinct(xs: Sequence[Tensor]) -> list[Tensor]:
    """Each once."""
    return list({id(unwrapped(x)): x for x in xs}.values())
