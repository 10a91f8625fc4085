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

        # Omitted optional tensors before a given one, whose position would else be ambiguous.
        kinds = [a.name for a in self.schema if str(a.type) == "Optional[Tensor]"]
        there = [self.given.get(name) is not None for name in kinds]
        last = max((i for i, given in enumerate(there) if given), default=0)
        if lacking := [name for name, has in zip(kinds[:last], there, strict=False) if not has]:
            result["without"] = tuple(lacking)

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
    **dict.fromkeys(("clamp_min", "clamp_max"), lambda xs: [x for x in xs if not _number(x)]),
}
_FILLED = {"zeros": 0, "zeros_like": 0, "new_zeros": 0, "ones": 1, "ones_like": 1, "new_ones": 1}


# --- names and attributes that are not as in the schema -------------------------------------
# Each function returns the neutral name and attributes of an operation, or None if it does not know
# the key: PyTorch's name or the neutral name. `said` are the attributes as in the schema.


def _of_entries(key: str, call: AtenCall, operation: str, said: Attributes) -> Translated | None:
    """Operations that move, select or fill entries."""
    given, x, y = call.given, call.first, call.out
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
        case "index" | "scatter":
            indices = given.get("indices")
            if isinstance(indices, list | tuple):
                said["axes"] = tuple(i for i, index in enumerate(indices) if index is not None)
            elif "axis" in said:
                said["axes"] = (said.pop("axis"),)
            if said.pop("accumulate", False):
                said["mode"] = "add"
            return operation, said
        case "constant":  # what it is filled with; its shape and dtype are those of its value
            if call.name == "lift_fresh" and y is not None:
                held = numbers_text(y.shape, y.tolist)
                return operation, {"value": held} if held else {}
            if call.name in operations.NO_DATA and "fill_value" in given:
                return operation, {"value": given["fill_value"]}
            return operation, {"value": _FILLED[call.name]} if call.name in _FILLED else {}
        case "as_strided":  # a reshape if it covers a contiguous array in order
            in_order = [z is not None and z.is_contiguous() for z in (x, y)]
            if x is not None and y is not None and all(in_order) and x.numel() == y.numel():
                return "reshape", {"shape": tuple(y.shape)}
            return operation, said
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
        case "clip":  # bounds by name; with one array as its bound it is a minimum or maximum
            ends = {"min": "low", "max": "high", "min_val": "low", "max_val": "high"}
            limits = {"hardtanh": {"low": -1, "high": 1}, "relu6": {"low": 0, "high": 6}}
            is_bound = lambda a, x: a.name in ends and (isinstance(x, Tensor) or _is_number(a, x))
            bounds = {a.name: value for a, value in call.bound if is_bound(a, value)}
            if len(bounds) == 1:
                ((name, bound),) = bounds.items()
                if not isinstance(bound, Tensor):
                    return operation, {ends[name]: bound}
                operation = "minimum" if name == "max" else "maximum"
                said.pop("without", None)
            named = {ends.get(name, name): value for name, value in said.items()}
            return operation, limits.get(call.name, {}) | named
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
        case "fft_c2c" | "fft_r2c" | "fft_c2r":  # the direction, axes and normalization
            halved = call.name == "fft_r2c" and given["onesided"]
            forward = call.name == "fft_r2c" or bool(given.get("forward"))
            name = "irfft" if call.name == "fft_c2r" else "r" * halved + "i" * (not forward) + "fft"
            divisor = given["normalization"] if forward else 2 - given["normalization"]
            norm = ("backward", "ortho", "forward")[divisor]
            said = {"axes": tuple(a % call.rank for a in given["dim"])}
            said |= {"length": given["last_dim_size"]} if call.name == "fft_c2r" else {}
            return name, said | ({"norm": norm} if norm != "backward" else {})
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
