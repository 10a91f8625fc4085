"""Reads the autograd graph of existing tensors.

No program runs. Autograd's nodes are visited from the results to the leaves and listed in the order
of the forward pass. A node contains its forward operation and its saved tensors. Operands without a
derivative are available only if the node saved them.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from types import MappingProxyType
from typing import Any

import torch
from torch.autograd.graph import Node as GradFn

from gradtools.errors import GradtoolsError
from gradtools.seeing.graphs.nodes import Dependence, Node, PlainGraph, Value
from gradtools.seeing.graphs.passes import CUSTOM, with_named_outputs
from gradtools.seeing.torch import _upstream as private
from gradtools.seeing.torch.recording import operations
from gradtools.seeing.torch.recording.values import like, numbers_in
from gradtools.torch.trees import flatten, leaf_paths

Tensor = torch.Tensor
_SAVED = "_saved_"
_WRAPPED = 2**63  # greater values are negative axes, stored as unsigned integers


def graph_of_outputs(outputs: Any) -> PlainGraph:
    """Reads the autograd graph of a pytree of tensors."""
    pairs = zip(leaf_paths(outputs), flatten(outputs)[0], strict=True)
    named = [(f"output{path}", y) for path, y in pairs if isinstance(y, Tensor)]
    if not any(y.requires_grad for _, y in named):
        raise GradtoolsError(
            "gradient_graph: outputs has no tensor with a graph: each was detached, computed under "
            "no_grad, or computed from constants. Fix: pass a result before it is "
            "detached, or call why_zero, which names the line."
        )
    return _AutogradReader().graph(named)


class _AutogradReader:
    """Converts autograd's nodes to `Node`s."""

    def __init__(self) -> None:
        self.values: dict[int, Value] = {}
        self.numbers: dict[Any, int] = {}  # by (id of a node, output) or (id of a tensor, -1)
        self.held: list[Any] = []  # keeps objects alive so that ids stay unique
        self.inputs: list[int] = []
        self.captured: list[int] = []

    def graph(self, named: list[tuple[str, Tensor]]) -> PlainGraph:
        nodes = [self.node(fn) for fn in in_order([y.grad_fn for _, y in named])]
        outputs = [self.tensor(y) for _, y in named]
        whole = PlainGraph(
            tuple(nodes), self.values, tuple(self.inputs), tuple(outputs), tuple(self.captured)
        )
        return with_named_outputs(whole, [path for path, _ in named])

    def node(self, fn: GradFn) -> Node:
        self.held.append(fn)
        for k, x in enumerate(private.described(fn)):
            self.numbers[id(fn), k] = self.new(Value(*like(x)))
        outputs = tuple(n for key, n in self.numbers.items() if key[0] == id(fn))
        saved, attributes = self.saved(fn)
        held = [v for v in saved if v in self.captured]
        operands = self.operands(fn, held)
        unknown = [v for v in held if v not in operands]
        flows = tuple(_FULL if given is not None else _CUT for given, _ in fn.next_functions)
        flows = flows[: len(operands)] + (_CUT,) * len(unknown)
        rule = isinstance(fn, torch.autograd.function.BackwardCFunction)
        name = operations.word_of(fn)
        return Node(
            "custom_rule" if rule else operations.neutral_of_node(fn),
            (*operands, *unknown),
            outputs,
            fn.name(),
            attributes=MappingProxyType({**attributes, **({"rule": name} if rule else {})}),
            links=(flows,) * len(outputs),
            mark=CUSTOM if rule else "",
            saved=tuple(dict.fromkeys(saved)),
        )

    def operands(self, fn: GradFn, held: list[int]) -> list[int]:
        """Returns the operands of a node in order.

        Operands without a derivative are the node's saved constants if the numbers match; otherwise
        they are placeholders.
        """
        result, constants = [], iter(held)
        is_known = sum(given is None for given, _ in fn.next_functions) == len(held)
        for given, k in fn.next_functions:
            variable = getattr(given, "variable", None)
            if variable is not None:
                result.append(self.tensor(variable))
            elif given is not None:
                result.append(self.numbers[id(given), k])
            elif is_known:
                result.append(next(constants))
            else:  # autograd does not store it
                self.captured.append(self.new(Value((), "unknown", "?")))
                result.append(self.captured[-1])
        return result

    def tensor(self, x: Tensor) -> int:
        """Returns the value number of a tensor: a node's output, a leaf, or a saved constant."""
        if x.grad_fn is not None and (id(x.grad_fn), x.output_nr) in self.numbers:
            return self.numbers[id(x.grad_fn), x.output_nr]
        if (id(x), -1) not in self.numbers:
            self.held.append(x)
            leaf = x.requires_grad and x.is_leaf
            name = f"leaf {len(self.inputs)}" if leaf else numbers_in(x)
            number = self.new(Value(*like(x), name))
            (self.inputs if leaf else self.captured).append(number)
            self.numbers[id(x), -1] = number
        return self.numbers[id(x), -1]

    def new(self, value: Value) -> int:
        number = len(self.values)
        self.values[number] = value
        return number

    def saved(self, fn: GradFn) -> tuple[list[int], dict[str, Any]]:
        """Returns the tensors that a node saves, and its static attributes."""
        tensors, attributes = list[int](), dict[str, Any]()
        for key in dir(fn):
            if not key.startswith(_SAVED):
                continue
            try:
                result = getattr(fn, key)
            except RuntimeError:  # freed by a backward pass
                continue
            name = key.removeprefix(_SAVED)
            several = result if isinstance(result, tuple | list) else (result,)
            is_layout = "_sym_" in key or (name in ("alpha", "beta") and result == 1)
            if any(isinstance(x, Tensor) for x in several):
                tensors += [self.tensor(x) for x in several if isinstance(x, Tensor)]
            elif name != "tensors" and _is_plain(result) and not is_layout:
                attributes["base" if fn.name() == "PowBackward2" else name] = _signed(result)
        if isinstance(fn, torch.autograd.function.BackwardCFunction):
            with suppress(RuntimeError):
                own = [x for x in fn.saved_tensors if isinstance(x, Tensor)]
                tensors += map(self.tensor, own)
        return tensors, attributes


def in_order(ends: list[Any]) -> Iterator[GradFn]:
    """Yields the ancestors of `ends` in topological order, without the leaves' AccumulateGrad."""
    done: set[Any] = set()
    todo = [(fn, False) for fn in reversed(ends) if fn is not None]
    while todo:
        fn, ready = todo.pop()
        if ready:
            yield fn
        elif fn not in done and not hasattr(fn, "variable"):
            done.add(fn)
            todo.append((fn, True))
            todo += [(given, False) for given, _ in fn.next_functions if given is not None]


_FULL, _CUT = Dependence.DIFFERENTIABLE, Dependence.CUT


def _is_plain(x: Any) -> bool:
    many = isinstance(x, tuple) and all(isinstance(n, bool | int | float) for n in x)
    return many or (isinstance(x, int | float | str) and not isinstance(x, bool))


def _signed(x: Any) -> Any:
    if isinstance(x, tuple):
        return tuple(map(_signed, x))
    return x - 2 * _WRAPPED if isinstance(x, int) and x >= _WRAPPED else x


__all__ = ["graph_of_outputs", "in_order"]
