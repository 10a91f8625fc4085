"""Translates an aten call to its framework-neutral name, operands and attributes.

Attributes are the arguments that are not operands and differ from the schema's defaults. Their
names are those of `seeing/formulas/words.py`: axes count from 0, a permutation lists all axes, a
slice has a start and a limit on each axis. Operations without a neutral name keep PyTorch's own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from math import inf
from types import MappingProxyType
from typing import Any

import torch

from gradtools.seeing.graphs.attributes import numbers_text
from gradtools.seeing.graphs.operation_names import RELATIONS
from gradtools.seeing.torch import _upstream as private
from gradtools.seeing.torch.recording import operations
from gradtools.seeing.torch.undo import name_of
from gradtools.torch.functorch_wrappers import tensors_in

Tensor = torch.Tensor
Attributes = dict[str, Any]
Translated = tuple[str, Attributes]  # the operation's neutral name, and its attributes


class AtenCall:
    """A call of an aten operation, with its arguments bound to the schema."""

    def __init__(self, func: Any, args: Any, kwargs: Any) -> None:
        self.func, self.args, self.kwargs = func, args, kwargs
        self.raw, self.name = func.overloadpacket.__name__, name_of(func.overloadpacket)
        self.outs: list[Tensor] = []
        self.schema = private.schema_of(func).arguments
        self.bound = [*_bound(func, args, kwargs)]
        self.given = {argument.name: value for argument, value in self.bound}
        self.first = next((x for _, value in self.bound for x in tensors_in(value)), None)

    def run(self) -> Any:
        """Runs the operation."""
        return self.func(*self.args, **self.kwargs)

    def operands(self) -> list[Any]:
        """Its tensors, and the numbers passed for tensors, in order."""
        result: list[Any] = []
        for argument, value in self.bound:
            alias = argument.alias_info
            if _is_number(argument, value):
                result.append(value)
            elif not (argument.kwarg_only and alias and alias.is_write):  # out= is not read
                result += tensors_in(value)
        return [*_REORDERED[self.name](result)] if self.name in _REORDERED else result

    def arguments(self) -> Iterator[tuple[str, Any]]:
        """All arguments by name, with defaults filled in."""
        for argument in self.schema:
            yield argument.name, self.given.get(argument.name, argument.default_value)

    def written(self) -> Iterator[Tensor]:
        """The tensors that it writes to in place."""
        return _written(self.bound)

    def said(self, out: Any) -> tuple[str, Mapping[str, Any]]:
        """Its neutral name and its attributes; `out`: what it returned."""
        self.outs = [*tensors_in(out)]
        operation = operations.neutral(self.name)
        attributes = self._attributes()
        for key in (self.name, operation):
            for form in (_of_entries, _of_numbers, _of_layers):
                formed = form(key, self, operation, attributes)
                if formed is not None:
                    return formed[0], MappingProxyType(formed[1])
        return operation, MappingProxyType(attributes)

    @property
    def out(self) -> Tensor | None:
        """Its first result."""
        return self.outs[0] if self.outs else None

    @property
    def rank(self) -> int:
        """The number of axes of its first tensor."""
        return self.first.dim() if self.first is not None else 0

    def _attributes(self) -> dict[str, Any]:
        """The arguments that are not operands and differ from their defaults.

        The schema's dim and dims are `axis` (one) or `axes` (several), counted from 0.
        """
        result: Attributes = {}
        for argument, value in self.bound:
            default = argument.default_value if argument.has_default_value() else None
            plain = value is not None and not any(True for _ in tensors_in(value))
            if plain and argument.name not in _UNSAID and not _is_number(argument, value):
                value = _plain(value)
                if isinstance(value, torch.ScriptObject) or value != _plain(default):
                    result[argument.name] = value
        for argument in self.schema:
            default = argument.has_default_value() and argument.default_value
            given = self.given.get("dim")
            if argument.name == "dim" and type(default) is int and given in (None, default):
                result["dim"] = default

        rank = max(1, self.rank + (self.name == "stack"))
        for name in ("dim", "dims"):
            if name in result:
                axis = result.pop(name)
                axes = axis if isinstance(axis, tuple) else (axis,)
                if not isinstance(axis, tuple) and self.name not in _OF_AXES:
                    result["axis"] = axis % rank
                elif axes and self.rank:  # a scalar has no axes
                    result["axes"] = tuple(sorted(a % rank for a in axes))
        if result.pop("keepdim", False):
            result["keep"] = True
        return result


def _is_number(argument: Any, value: Any) -> bool:
    """Whether it is a number passed for a tensor operand."""
    needed = not argument.has_default_value()
    return _number(value) and needed and str(argument.type) in ("Tensor", "number")


def _number(value: Any) -> bool:
    return isinstance(value, int | float | complex) and not isinstance(value, bool)


def _bound(func: Any, args: Any, kwargs: Any) -> Iterator[tuple[Any, Any]]:
    """Pairs of schema argument and value, for the arguments that were passed."""
    for i, argument in enumerate(private.schema_of(func).arguments):
        if i < len(args):
            yield argument, args[i]
        elif argument.name in kwargs:
            yield argument, kwargs[argument.name]


def written(func: Any, args: Any, kwargs: Any) -> Iterator[Tensor]:
    """The tensors that an operation writes to in place."""
    return _written(_bound(func, args, kwargs))


def _written(bound: Iterable[tuple[Any, Any]]) -> Iterator[Tensor]:
    for argument, value in bound:
        if argument.alias_info is not None and argument.alias_info.is_write:
            yield from tensors_in(value)


def _plain(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return tuple(map(_plain, value))
    if isinstance(value, torch.dtype):
        return str(value).removeprefix("torch.")
    return value


# Identities: the result is the operand.
SAME = frozenset({"alias", "detach", "lift", "lift_fresh"})
# Where an array is, how it lies, which gradients are wanted: not what is computed.
_UNSAID = frozenset(
    ["layout", "device", "pin_memory", "non_blocking", "memory_format", "copy", "half_to_float"]
    + ["input_dtype", "implicit", "output_mask", "generator", "is_coalesced", "requires_size_one"]
    + ["compute_mode", "compute_log_sumexp", "return_debug_mask", "check_errors"]
)
_OF_AXES = frozenset(["prod", "all", "any", "amax", "amin", "logsumexp", "max", "min"])
_REORDERED: Mapping[str, Callable[[list[Any]], list[Any]]] = {
    **dict.fromkeys(("rsub", "triangular_solve"), lambda xs: [xs[1], xs[0], *xs[2:]]),
    "masked_fill": lambda xs: [xs[1], xs[2], xs[0]] if len(xs) == 3 else xs,
    "polygamma": lambda xs: xs[-1:],
}
_FILLED = {"zeros": 0, "zeros_like": 0, "new_zeros": 0, "ones": 1, "ones_like": 1, "new_ones": 1}


# --- names and attributes that are not as in the schema -------------------------------------
# Each function returns the neutral name and attributes of an operation, or None if it does not know
# the key: PyTorch's name or the neutral name. `said` are the attributes as in the schema.


def _of_entries(key: str, call: AtenCall, operation: str, said: Attributes) -> Translated | None:
    """Operations that move, select or fill entries."""
    given, y = call.given, call.out
    match key:
        case "reshape" | "broadcast":
            return operation, {"shape": tuple(y.shape)} if y is not None else said
        case "transpose":
            return operation, {"permutation": _permutation(call)}
        case "slice" | "select" | "slice_scatter" | "select_scatter":
            return operation, _window(call)
        case "split":  # the sizes of consecutive parts along an axis
            axis = said["axis"]
            return operation, {"sizes": tuple(part.shape[axis] for part in call.outs), "axis": axis}
        case "constant":  # what it is filled with; its shape and dtype are those of its value
            if call.name == "lift_fresh" and y is not None:
                held = numbers_text(y.shape, y.tolist)
                return operation, {"value": held} if held else {}
            if call.name in operations.NO_DATA and "fill_value" in given:
                return operation, {"value": given["fill_value"]}
            return operation, {"value": _FILLED[call.name]} if call.name in _FILLED else {}
    return None


def _permutation(call: AtenCall) -> tuple[int, ...]:
    """The axes of the operand, in the order of the result's."""
    order, given, rank = [*range(call.rank)], call.given, call.rank
    if call.name == "permute":
        order = [a % rank for a in given["dims"]]
    elif rank > 1:
        a, b = given.get("dim0", 0), given.get("dim1", 1)
        order[a], order[b] = order[b], order[a]
    return tuple(order)


def _window(call: AtenCall) -> Attributes:
    """Start, limit and stride on each axis of a slice; the axis that a selection drops."""
    assert call.first is not None
    shape, given = call.first.shape, call.given
    axis = given.get("dim", 0) % max(1, call.rank)
    start, limit, stride = [0] * len(shape), [*map(int, shape)], [1] * len(shape)
    dropped = {}
    if call.name in ("select", "select_scatter"):
        start[axis] = given["index"] % shape[axis]
        limit[axis] = start[axis] + 1
        dropped = {"drop": (axis,)}
    else:
        along = slice(given.get("start"), given.get("end"), given.get("step", 1))
        start[axis], limit[axis], stride[axis] = along.indices(shape[axis])
    attributes: Attributes = {"start": tuple(start), "limit": tuple(limit)}
    if any(n != 1 for n in stride):
        attributes["stride"] = tuple(stride)
    return attributes | dropped


def _of_numbers(key: str, call: AtenCall, operation: str, said: Attributes) -> Translated | None:
    """Elementwise operations, reductions and linear algebra."""
    given, x = call.given, call.first
    match key:
        case "compare":
            relation = RELATIONS.get(call.name)
            return operation, {**said, "relation": relation} if relation else said
        case "bitwise_and" | "bitwise_or" | "bitwise_xor" | "bitwise_not":
            of_truth = x is not None and x.dtype == torch.bool  # else bitwise, of integers
            return (operation if of_truth else call.name), said
        case "clip" if len(call.operands()) == 2:  # one bound is an operand
            return ("minimum" if given.get("min") is None else "maximum"), said
        case "norm":
            ord_ = given.get("ord", given.get("p", 2))
            said = {name: value for name, value in said.items() if name not in ("ord", "p")}
            if ord_ not in (2, 2.0, None):
                said["ord"] = ord_ if abs(ord_) != inf else float(ord_)
            return operation, said
        case "variance" | "deviation":
            unbiased, corrected = said.pop("unbiased", True), said.pop("correction", None)
            corrected = int(unbiased) if corrected is None else corrected
            return operation, {**said, "correction": corrected}
        case "fft_c2c" | "fft_r2c" | "fft_c2r":
            halved = call.name == "fft_r2c" and given["onesided"]
            back = call.name == "fft_c2c" and not given["forward"]
            return "irfft" if call.name == "fft_c2r" else "r" * halved + "i" * back + "fft", {}
    return None


def _of_layers(key: str, call: AtenCall, operation: str, said: Attributes) -> Translated | None:
    """Convolutions."""
    match key:
        case "convolution" | "convolution_backward":  # settings that differ from their defaults
            if said.get("transposed") and not call.name.endswith("backward"):
                operation = "convolution_transposed"
            usual = {"stride": 1, "dilation": 1, "padding": 0, "output_padding": 0, "groups": 1}
            kept: Attributes = {}
            for name, default in usual.items():
                value = said.get(name, default)
                values = value if isinstance(value, tuple) else (value,)
                if any(n != default for n in values):
                    kept[name] = tuple((n, n) for n in values) if name == "padding" else value
            return operation, kept
    return None


__all__ = ["SAME", "AtenCall", "written"]
