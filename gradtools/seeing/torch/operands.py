"""Translates an aten call to its framework-neutral name, operands and attributes.

Attributes are the arguments that are not operands and differ from the schema's defaults. Their
names are those of `seeing/formulas/operations/`: axes count from 0, a permutation lists all axes, a
slice has a start and a limit on each axis. Operations without a neutral name keep PyTorch's own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from math import inf
from types import MappingProxyType
from typing import Any

import torch

from gradtools.seeing.graphs.attributes import numbers_text
from gradtools.seeing.torch.recording import operations
from gradtools.torch import _upstream as upstream
from gradtools.torch.functorch_wrappers import tensors_in
from gradtools.torch.rerunning import name_of

Tensor = torch.Tensor
Attributes = dict[str, Any]
Translated = tuple[str, Attributes]  # the operation's neutral name, and its attributes


class AtenCall:
    """A call of an aten operation, with its arguments bound to the schema."""

    def __init__(self, func: Any, args: Any, kwargs: Any) -> None:
        self.func, self.args, self.kwargs = func, args, kwargs
        self.raw, self.name = func.overloadpacket.__name__, name_of(func.overloadpacket)
        self.outs: list[Tensor] = []
        self.schema = upstream.arguments_of(func)
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
        operation = _NAMES.get(self.name) or operations.neutral(self.name)
        form = _FORMS.get(self.name) or _FORMS.get(operation)
        attributes = self._attributes()
        if form is not None:
            operation, attributes = form(self, operation, attributes)
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
    for i, argument in enumerate(upstream.arguments_of(func)):
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
_OWN = """
fmod addmm baddbmm addmv addbmm addr vdot block_diag as_strided eye unbind
linspace logspace diagonal_scatter fill_diagonal
"""  # `recording/operations.py` gives these the name of a related operation
_NAMES = {name: name for name in _OWN.split()} | {
    "select": "slice",
    "constant_pad_nd": "pad",
    "slice_scatter": "update",
    "select_scatter": "update",
    "repeat": "tile",
    "scatter": "scatter_along",
    "masked_fill": "where",
}
_REORDERED: Mapping[str, Callable[[list[Any]], list[Any]]] = {
    **dict.fromkeys(("rsub", "triangular_solve"), lambda xs: [xs[1], xs[0], *xs[2:]]),
    "masked_fill": lambda xs: [xs[1], xs[2], xs[0]] if len(xs) == 3 else xs,
    "polygamma": lambda xs: xs[-1:],
    **dict.fromkeys(("clamp_min", "clamp_max"), lambda xs: [x for x in xs if not _number(x)]),
}
_Form = Callable[[AtenCall, str, Attributes], Translated]


def _out_shape(call: AtenCall, operation: str, attributes: Attributes) -> Translated:
    return operation, {"shape": tuple(call.out.shape)} if call.out is not None else attributes


def _permuted(call: AtenCall, operation: str, attributes: Attributes) -> Translated:
    order = [*range(call.rank)]
    if call.name in ("movedim", "moveaxis"):
        ends = [x if isinstance(x, list | tuple) else [x] for x in map(call.given.get, _ENDS)]
        moved = {to % call.rank: a % call.rank for a, to in zip(*ends, strict=True)}
        left = iter([a for a in order if a not in moved.values()])
        order = [moved[p] if p in moved else next(left) for p in order]
    elif call.name == "permute":
        order = [a % call.rank for a in call.given["dims"]]
    elif call.rank > 1:
        default = (-2, -1) if call.name in ("mT", "mH", "adjoint") else (0, 1)
        a, b = call.given.get("dim0", default[0]), call.given.get("dim1", default[1])
        order[a], order[b] = order[b], order[a]
    return operation, {"permutation": tuple(order)}


_ENDS = ("source", "destination")  # of movedim


def _sliced(call: AtenCall, operation: str, attributes: Attributes) -> Translated:
    assert call.first is not None
    shape = call.first.shape
    axis = call.given.get("dim", 0) % max(1, call.rank)
    start, limit, stride = [0] * len(shape), [*map(int, shape)], [1] * len(shape)
    if call.name in ("select", "select_scatter"):
        start[axis] = call.given["index"] % shape[axis]
        limit[axis] = start[axis] + 1
        dropped = {"drop": (axis,)}
    else:
        lower, upper, step = slice(
            call.given.get("start"), call.given.get("end"), call.given.get("step", 1)
        ).indices(shape[axis])
        start[axis], limit[axis], stride[axis] = lower, upper, step
        dropped = {}
    attributes = {"start": tuple(start), "limit": tuple(limit)}
    if any(n != 1 for n in stride):
        attributes["stride"] = tuple(stride)
    return operation, attributes | dropped


def _compared(call: AtenCall, operation: str, attributes: Attributes) -> Translated:
    relation = _RELATIONS.get(call.name)
    return operation, {**attributes, "relation": relation} if relation else attributes


_RELATIONS = {
    "eq": "==",
    "ne": "!=",
    "lt": "<",
    "le": "<=",
    "gt": ">",
    "ge": ">=",
    "equal": "==",
    "not_equal": "!=",
    "less": "<",
    "less_equal": "<=",
    "greater": ">",
    "greater_equal": ">=",
}


def _convolved(call: AtenCall, operation: str, attributes: Attributes) -> Translated:
    """Stride, padding, dilation and groups that differ from their defaults."""
    if attributes.get("transposed") and not call.name.endswith("backward"):
        operation = "convolution_transposed"
    usual = {"stride": 1, "dilation": 1, "padding": 0, "output_padding": 0, "groups": 1}
    kept: dict[str, Any] = {}
    for name, default in usual.items():
        value = attributes.get(name, default)
        values = value if isinstance(value, tuple) else (value,)
        if any(n != default for n in values):
            kept[name] = tuple((n, n) for n in values) if name == "padding" else value
    return operation, kept


def _pooled(call: AtenCall, operation: str, attributes: Attributes) -> Translated:
    """Window, stride and padding; an adaptive pool has a window if equal windows fit."""
    attributes = dict(attributes)
    count = int(next(letter for letter in call.name if letter.isdigit()))
    each = lambda values: values * count if len(values) == 1 else values
    if "kernel_size" in attributes:
        window = attributes["window"] = each(attributes.pop("kernel_size"))
        if each(attributes.get("stride", ())) in (window, ()):
            attributes.pop("stride", None)
        padding = each(attributes.pop("padding", ()))
        if any(padding):
            attributes["padding"] = tuple((n, n) for n in padding)
    elif call.out is not None and call.first is not None:
        sizes = [*zip(call.first.shape[-count:], call.out.shape[-count:], strict=True)]
        if not any(n % m for n, m in sizes):
            attributes = {"window": tuple(n // m for n, m in sizes)}
    return operation, attributes


def _normed(call: AtenCall, operation: str, attributes: Attributes) -> Translated:
    attributes = dict(attributes)
    shape = attributes.pop("normalized_shape", ())
    if shape:
        attributes["axes"] = tuple(range(call.rank - len(shape), call.rank))
    return operation, attributes


def _clipped(call: AtenCall, operation: str, attributes: Attributes) -> Translated:
    """Bounds by name; with a single array as its bound, a clip is a minimum or maximum."""
    ends = {"min": "low", "max": "high", "min_val": "low", "max_val": "high"}
    limits = {"hardtanh": {"low": -1, "high": 1}, "relu6": {"low": 0, "high": 6}}
    known = limits.get(call.name, {})
    is_bound = lambda a, x: a.name in ends and (isinstance(x, Tensor) or _is_number(a, x))
    bounds = {a.name: x for a, x in call.bound if is_bound(a, x)}
    if len(bounds) == 1:
        ((name, bound),) = bounds.items()
        if not isinstance(bound, Tensor):
            return operation, {ends[name]: bound}
        operation = "minimum" if name == "max" else "maximum"
        attributes = {key: value for key, value in attributes.items() if key != "without"}
    return operation, known | {ends.get(key, key): value for key, value in attributes.items()}


def _padded(call: AtenCall, operation: str, attributes: Attributes) -> Translated:
    widths = call.given["pad"]
    missing = call.rank - len(widths) // 2
    low = [0] * missing + list(widths[0::2])[::-1]
    high = [0] * missing + list(widths[1::2])[::-1]
    value = call.given.get("value", 0) or 0
    attributes = {"low": tuple(low), "high": tuple(high)}
    return operation, attributes | ({"value": value} if value else {})


def _parted(call: AtenCall, operation: str, attributes: Attributes) -> Translated:
    """The sizes of consecutive parts along an axis."""
    axis = attributes["axis"]
    return operation, {"sizes": tuple(y.shape[axis] for y in call.outs), "axis": axis}


def _on_diagonal(call: AtenCall, operation: str, attributes: Attributes) -> Translated:
    """The two axes unless they are the last ones, and the offset."""
    rank = call.rank + (operation == "diagonal_matrix")
    given = dict(call.arguments())
    axes = tuple(given[name] % rank for name in ("dim1", "dim2"))
    attributes = {"axes": axes} if axes != (rank - 2, rank - 1) else {}
    return operation, attributes | ({"offset": given["offset"]} if given["offset"] else {})


def _bits(call: AtenCall, operation: str, attributes: Attributes) -> Translated:
    """A logical operation for booleans, a bitwise one for integers."""
    of_truth = call.first is not None and call.first.dtype == torch.bool
    return (operation if of_truth else call.name), attributes


def _triangle(call: AtenCall, operation: str, attributes: Attributes) -> Translated:
    offset = attributes.get("diagonal", 0)
    return operation, {"upper": call.name == "triu"} | ({"offset": offset} if offset else {})


def _indexed(call: AtenCall, operation: str, attributes: Attributes) -> Translated:
    indices = call.given.get("indices")
    if isinstance(indices, list | tuple):
        attributes = {
            **attributes,
            "axes": tuple(i for i, x in enumerate(indices) if x is not None),
        }
    elif "axis" in attributes:
        attributes = dict(attributes)
        attributes["axes"] = (attributes.pop("axis"),)
    if attributes.pop("accumulate", False):
        attributes["mode"] = "add"
    return operation, attributes


def _of_triangle(call: AtenCall, operation: str, attributes: Attributes) -> Translated:
    """Which triangle of the matrix is read, and on which side the matrix is."""
    given = dict(call.arguments())
    attributes = {"lower": not given["upper"], "left": given.get("left", True)}
    attributes = {key: False for key, value in attributes.items() if not value}
    attributes |= {"unit": True} if given["unitriangular"] else {}
    return operation, attributes | ({"transpose": True} if given.get("transpose") else {})


def _factored(call: AtenCall, operation: str, attributes: Attributes) -> Translated:
    """The name "qr", for a reduced factorisation with at least as many rows as columns."""
    assert call.first is not None
    rows, columns = call.first.shape[-2:]
    plain = rows >= columns and (attributes.get("mode", "reduced") == "reduced" or rows == columns)
    return ("qr", {}) if plain else (operation, attributes)


def _transformed(call: AtenCall, operation: str, attributes: Attributes) -> Translated:
    """The transform's direction, axes and normalization."""
    given = call.given
    halved = call.name == "fft_r2c" and given["onesided"]
    forward = call.name == "fft_r2c" or bool(given.get("forward"))
    operation = "irfft" if call.name == "fft_c2r" else "r" * halved + "i" * (not forward) + "fft"
    divisor = given["normalization"] if forward else 2 - given["normalization"]
    norm = ("backward", "ortho", "forward")[divisor]
    attributes = {"axes": tuple(a % call.rank for a in given["dim"])}
    attributes |= {"length": given["last_dim_size"]} if call.name == "fft_c2r" else {}
    return operation, attributes | ({"norm": norm} if norm != "backward" else {})


def _norm(call: AtenCall, operation: str, attributes: Attributes) -> Translated:
    ord_ = call.given.get("ord", call.given.get("p", 2))
    attributes = {key: value for key, value in attributes.items() if key not in ("ord", "p")}
    if ord_ not in (2, 2.0, None):
        attributes["ord"] = ord_ if abs(ord_) != inf else float(ord_)
    return operation, attributes


def _variance(call: AtenCall, operation: str, attributes: Attributes) -> Translated:
    attributes = dict(attributes)
    corrected = attributes.pop("correction", None if "unbiased" not in attributes else 1)
    corrected = int(attributes.pop("unbiased", True)) if corrected is None else corrected
    return operation, {**attributes, "correction": corrected}


def _rolled(call: AtenCall, operation: str, attributes: Attributes) -> Translated:
    return operation, {
        **attributes,
        "axes": tuple(a % call.rank for a in call.given.get("dims", ())),
    }


def _constant(call: AtenCall, operation: str, attributes: Attributes) -> Translated:
    """A constant: what it is filled with; its shape and dtype are those of its value."""
    values = {"zeros": 0, "zeros_like": 0, "new_zeros": 0, "ones": 1, "ones_like": 1, "new_ones": 1}
    if call.name == "lift_fresh" and call.out is not None:
        held = numbers_text(call.out.shape, call.out.tolist)
        return operation, {"value": held} if held else {}
    if call.name in operations.NO_DATA and "fill_value" in call.given:
        return operation, {"value": call.given["fill_value"]}
    filled = {"value": values[call.name]} if call.name in values else {}
    return operation, filled


def _strided(call: AtenCall, operation: str, attributes: Attributes) -> Translated:
    """A reshape if it covers a contiguous array in order; else as_strided."""
    x, y = call.first, call.out
    in_order = [z is not None and z.is_contiguous() for z in (x, y)]
    if x is not None and y is not None and all(in_order) and x.shape.numel() == y.shape.numel():
        return "reshape", {"shape": tuple(y.shape)}
    return operation, attributes


_FORMS: Mapping[str, _Form] = {
    **dict.fromkeys(("reshape", "broadcast"), _out_shape),
    "transpose": _permuted,
    **dict.fromkeys(("slice", "select", "slice_scatter", "select_scatter"), _sliced),
    "tile": lambda call, operation, attributes: (operation, {"reps": attributes["repeats"]}),
    "compare": _compared,
    **dict.fromkeys(("convolution", "convolution_backward"), _convolved),
    **dict.fromkeys(("max_pool", "avg_pool", "max_pool2d_with_indices_backward"), _pooled),
    **dict.fromkeys(("avg_pool2d_backward",), _pooled),
    **dict.fromkeys(("layer_norm", "rms_norm", "native_layer_norm_backward"), _normed),
    "clip": _clipped,
    "split": _parted,
    **dict.fromkeys(("diagonal", "diagonal_matrix"), _on_diagonal),
    "triangular_solve": _of_triangle,
    "linalg_qr": _factored,
    **dict.fromkeys(("fft_c2c", "fft_r2c", "fft_c2r"), _transformed),
    **dict.fromkeys(("bitwise_and", "bitwise_or", "bitwise_xor", "bitwise_not"), _bits),
    "polygamma": lambda call, operation, attributes: (operation, {"order": call.given["n"]}),
    "pad": _padded,
    "triangle": _triangle,
    **dict.fromkeys(("index", "scatter"), _indexed),
    "norm": _norm,
    **dict.fromkeys(("variance", "deviation"), _variance),
    "roll": _rolled,
    "constant": _constant,
    "as_strided": _strided,
}

__all__ = ["SAME", "AtenCall", "written"]
