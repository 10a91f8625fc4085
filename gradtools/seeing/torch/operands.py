"""Translates an aten call to its framework-neutral name, operands and attributes.

Attributes are the arguments that are not operands and differ from the schema's defaults.
`seeing/formulas/words.py` defines the neutral names and their conventions: axes are counted from 0,
a permutation lists all axes, and a slice has a start and a limit on each axis. Other operations use
their PyTorch names.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
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


class AtenCall:
    """A call of an aten operation, with its arguments bound to the schema."""

    def __init__(self, func: Any, args: Any, kwargs: Any) -> None:
        self.func, self.args, self.kwargs = func, args, kwargs
        self.raw, self.name = func.overloadpacket.__name__, name_of(func.overloadpacket)
        self.outs: list[Tensor] = []
        self.schema = private.schema_of(func).arguments
        both = zip(self.schema, args, strict=False)
        self.bound = [*both, *((a, kwargs[a.name]) for a in self.schema if a.name in kwargs)]
        self.given = {argument.name: value for argument, value in self.bound}
        self.first = next((x for _, value in self.bound for x in tensors_in(value)), None)
        self.rank = self.first.dim() if self.first is not None else 0

    def run(self) -> Any:
        """Runs the operation."""
        return self.func(*self.args, **self.kwargs)

    def operands(self) -> list[Any]:
        """Returns the operands of the call in order: tensors, and numbers passed as tensors."""
        result: list[Any] = []
        for argument, value in self.bound:
            alias = argument.alias_info
            if _is_number(argument, value):
                result.append(value)
            elif not (argument.kwarg_only and alias and alias.is_write):  # out= is not an operand
                result += tensors_in(value)
        return [*_REORDERED[self.name](result)] if self.name in _REORDERED else result

    def written(self) -> Iterator[Tensor]:
        """Yields the tensors that the call modifies in place."""
        for argument, value in self.bound:
            if argument.alias_info is not None and argument.alias_info.is_write:
                yield from tensors_in(value)

    def said(self, out: Any) -> tuple[str, Mapping[str, Any]]:
        """Returns the neutral name and attributes of the call, given its result `out`."""
        self.outs = [*tensors_in(out)]
        name, attributes = operations.neutral(self.name), self._attributes()
        form = _FORMS.get(self.name) or _FORMS.get(name)
        if form is not None:
            attributes = form(self, attributes)
        if name in _RENAMED:
            name = _RENAMED[name](self)
        return name, MappingProxyType(attributes)

    def _attributes(self) -> Attributes:
        """Returns the arguments that are not operands and differ from their defaults.

        The schema's dim and dims become `axis` (an integer) or `axes` (a tuple), counted from 0.
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
    """Returns whether `value` is a Python number that was passed as a tensor operand."""
    number = isinstance(value, int | float | complex) and not isinstance(value, bool)
    needed = not argument.has_default_value()
    return number and needed and str(argument.type) in ("Tensor", "number")


def _plain(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return tuple(map(_plain, value))
    if isinstance(value, torch.dtype):
        return str(value).removeprefix("torch.")
    return value


# Operations that return their operand.
SAME = frozenset({"alias", "detach", "lift", "lift_fresh"})
# Arguments that do not affect the values, such as device and memory layout.
_UNSAID = """
layout device pin_memory non_blocking memory_format copy half_to_float input_dtype implicit
output_mask generator is_coalesced requires_size_one compute_mode compute_log_sumexp
return_debug_mask check_errors
""".split()
_OF_AXES = "prod all any amax amin logsumexp max min".split()
_REORDERED: Mapping[str, Callable[[list[Any]], list[Any]]] = {
    **dict.fromkeys(("rsub", "triangular_solve"), lambda xs: [xs[1], xs[0], *xs[2:]]),
    "masked_fill": lambda xs: [xs[1], xs[2], xs[0]] if len(xs) == 3 else xs,
    "polygamma": lambda xs: xs[-1:],
}


# --- names that depend on the arguments


def _bound_of(call: AtenCall) -> str:
    """Returns "maximum" or "minimum" for a clip with a single tensor bound, else "clip"."""
    one = "minimum" if call.given.get("min") is None else "maximum"
    return one if len(call.operands()) == 2 else "clip"


_RENAMED: Mapping[str, Callable[[AtenCall], str]] = {
    "clip": _bound_of,
    "convolution": lambda call: "convolution" + "_transposed" * bool(call.given.get("transposed")),
}


# --- attributes that are computed from the call and the schema's attributes


def _permuted(call: AtenCall, said: Attributes) -> Attributes:
    """Returns the permutation of the operand's axes for calls such as transpose and permute."""
    order, given, rank = [*range(call.rank)], call.given, call.rank
    if call.name == "permute":
        order = [a % rank for a in given["dims"]]
    elif rank > 1:
        a, b = given.get("dim0", 0), given.get("dim1", 1)
        order[a], order[b] = order[b], order[a]
    return {"permutation": tuple(order)}


def _window(call: AtenCall, said: Attributes) -> Attributes:
    """Returns start, limit and stride per axis of a slice or select, and the dropped axis."""
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
    strides = {"stride": tuple(stride)} if any(n != 1 for n in stride) else {}
    return {"start": tuple(start), "limit": tuple(limit), **strides, **dropped}


def _split(call: AtenCall, said: Attributes) -> Attributes:
    """Returns the sizes of the parts of a split along an axis."""
    axis = said["axis"]
    return {"sizes": tuple(part.shape[axis] for part in call.outs), "axis": axis}


def _filled(call: AtenCall, said: Attributes) -> Attributes:
    """Returns the fill value of a constant, without its shape and dtype."""
    if call.name == "lift_fresh" and call.outs:
        held = numbers_text(call.outs[0].shape, call.outs[0].tolist)
        return {"value": held} if held else {}
    if call.name in operations.NO_DATA and "fill_value" in call.given:
        return {"value": call.given["fill_value"]}
    filled = {"zeros": 0, "ones": 1}.get(call.name.removeprefix("new_").removesuffix("_like"))
    return {} if filled is None else {"value": filled}


def _variance(call: AtenCall, said: Attributes) -> Attributes:
    unbiased, corrected = said.pop("unbiased", True), said.pop("correction", None)
    return {**said, "correction": int(unbiased) if corrected is None else corrected}


def _convolved(call: AtenCall, said: Attributes) -> Attributes:
    """Returns the arguments of a convolution that differ from their defaults."""
    kept: Attributes = {}
    for name in ("stride", "dilation", "padding", "output_padding", "groups"):
        default = 1 if name in ("stride", "dilation", "groups") else 0
        value = said.get(name, default)
        values = value if isinstance(value, tuple) else (value,)
        if any(n != default for n in values):
            kept[name] = tuple((n, n) for n in values) if name == "padding" else value
    return kept


_FORMS: Mapping[str, Callable[[AtenCall, Attributes], Attributes]] = {
    **dict.fromkeys(
        ("reshape", "broadcast"), lambda call, said: {"shape": tuple(call.outs[0].shape)}
    ),
    "transpose": _permuted,
    **dict.fromkeys(("slice", "select", "slice_scatter", "select_scatter"), _window),
    "split": _split,
    "constant": _filled,
    "compare": lambda call, said: (
        {**said, "relation": RELATIONS[call.name]} if call.name in RELATIONS else said
    ),
    **dict.fromkeys(("variance", "deviation"), _variance),
    **dict.fromkeys(("convolution", "convolution_backward"), _convolved),
}
