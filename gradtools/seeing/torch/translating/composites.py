"""PyTorch functions recorded as one operation, such as einsum, in place of the aten calls in them.

What is written here is said by the function as it is called, beneath `torch.overrides`; the
arguments come as they were passed. A function may be left to aten for some arguments: then
`accepts` says no.
"""

from __future__ import annotations

import inspect
import string
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from gradtools.seeing.torch.translating.writer import Ref, Writer

Tensor = torch.Tensor
Translation = Callable[[Writer, Any], Any]
FUNCTIONS: dict[Any, Translation] = {}


def function(*functions: Any, accepts: Callable[[Any], bool] | None = None) -> Any:
    """Enters a translation of functions."""

    def enter(translation: Any) -> Any:
        if accepts is not None:
            translation.accepts = accepts
        FUNCTIONS.update(dict.fromkeys(functions, translation))
        return translation

    return enter


def _argument(o: Any, place: int, name: str, default: Any = None) -> Any:
    return o.args[place] if place < len(o.args) else o.kwargs.get(name, default)


def _real_parts(o: Any) -> bool:
    return bool(o.args[0].kind == 3)


def _part(word: str) -> Translation:
    return lambda w, o: w(word, o.args[0], dtype="float64")


# What keeps nothing for a backward pass that f itself may run.
PLAIN: dict[Any, Translation] = {}
_TENSOR: Any = Tensor
for _name in ("real", "imag"):
    _functions = (getattr(torch, _name), getattr(_TENSOR, _name).__get__)
    function(*_functions, accepts=_real_parts)(_part(_name))


@function(Tensor.detach, _TENSOR.data.__get__)
def _stop(w: Writer, o: Any) -> Ref:
    return w("stop", o.args[0])


PLAIN |= FUNCTIONS


def _are_values(o: Any) -> bool:
    return all(isinstance(x, Ref) for x in o.args[:2]) and len(o.args) == 2


@function(torch.matmul, Tensor.matmul, Tensor.__matmul__, accepts=_are_values)
def _matmul(w: Writer, o: Any) -> Ref:
    return w.matmul(*o.args)


@function(Tensor.__rmatmul__, accepts=_are_values)
def _rmatmul(w: Writer, o: Any) -> Ref:
    return w.matmul(o.args[1], o.args[0])


@function(F.linear)
def _linear(w: Writer, o: Any) -> Ref:
    """X Wᵀ + b, or W x + b of one vector."""
    x, weight = _argument(o, 0, "input"), _argument(o, 1, "weight")
    bias = _argument(o, 2, "bias")
    result = w.matmul(weight, x) if x.ndim == 1 else w.matmul(x, w.swap(weight))
    return result if bias is None else w.add(result, bias)


def _is_plain_einsum(o: Any) -> bool:
    said = o.args[0] if o.args else None
    return isinstance(said, str) and len(_operands(o)) == said.split("->")[0].count(",") + 1


def _operands(o: Any) -> list[Any]:
    given = list(o.args[1:])
    return list(given[0]) if len(given) == 1 and isinstance(given[0], list | tuple) else given


@function(torch.einsum, torch.functional.einsum, accepts=_is_plain_einsum)
def _einsum(w: Writer, o: Any) -> Ref:
    operands = _operands(o)
    said = _spelled_out(o.args[0].replace(" ", ""), operands)
    return w("einsum", *operands, shape=o.likes[0][0], subscripts=said)


def _spelled_out(said: str, operands: list[Any]) -> str:
    """With letters in place of "..." and with "->"."""
    left, arrow, right = said.partition("->")
    terms = left.split(",")
    if not arrow:
        letters = sorted({c for c in left if c.isalpha()})
        right = "..." * ("..." in left) + "".join(c for c in letters if left.count(c) == 1)
    free = [c for c in string.ascii_letters if c not in said]
    lengths = [
        x.ndim - len(t.replace("...", "")) if "..." in t else 0
        for t, x in zip(terms, operands, strict=True)
    ]
    most = max(lengths, default=0)
    filled = [
        t.replace("...", "".join(free[most - n : most]))
        for t, n in zip(terms, lengths, strict=True)
    ]
    return ",".join(filled) + "->" + right.replace("...", "".join(free[:most]))


_CROSS = inspect.signature(F.cross_entropy)


def _bound(signature: inspect.Signature, o: Any) -> dict[str, Any]:
    result = signature.bind(*o.args, **o.kwargs)
    result.apply_defaults()
    return dict(result.arguments)


def _is_plain_cross_entropy(o: Any) -> bool:
    a = _bound(_CROSS, o)
    target = a["target"]
    if a["weight"] is not None or a["label_smoothing"] or a["size_average"] or a["reduce"]:
        return False
    if target.kind == 2:
        return bool(a["input"].ndim > 1 or a["reduction"] != "mean")
    value = o.recorder.value_of(target)
    return value is not None and bool((value != a["ignore_index"]).all())


@function(F.cross_entropy, accepts=_is_plain_cross_entropy)
def _cross_entropy(w: Writer, o: Any) -> Ref:
    a = _bound(_CROSS, o)
    axis = 0 if a["input"].ndim == 1 else 1
    given = {"axis": axis, "reduction": a["reduction"]}
    return w(
        "cross_entropy", a["input"], a["target"], shape=o.likes[0][0], dtype="float64", **given
    )


@function(F.bilinear, accepts=lambda o: all(x.ndim <= 2 for x in o.args[:2]))
def _bilinear(w: Writer, o: Any) -> Ref:
    a, b, weight = o.args[:3]
    lead = "n" * (a.ndim - 1)
    said = f"{lead}i,oij,{lead}j->{lead}o"
    result = w("einsum", a, weight, b, shape=o.likes[0][0], subscripts=said)
    bias = _argument(o, 3, "bias")
    return result if bias is None else w.add(result, bias)


_ATTENTION = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal", "scale")


def _attention_arguments(o: Any) -> dict[str, Any]:
    defaults = {"attn_mask": None, "dropout_p": 0.0, "is_causal": False, "scale": None}
    return {**defaults, **dict(zip(_ATTENTION, o.args, strict=False)), **o.kwargs}


def _is_plain_attention(o: Any) -> bool:
    a = _attention_arguments(o)
    return not a["dropout_p"] and not a.get("enable_gqa", False)


@function(F.scaled_dot_product_attention, accepts=_is_plain_attention)
def _attention(w: Writer, o: Any) -> Ref:
    a = _attention_arguments(o)
    mask = [] if a["attn_mask"] is None else [a["attn_mask"]]
    given = {"is_causal": True if a["is_causal"] else None, "scale": a["scale"]}
    return w("attention", a["query"], a["key"], a["value"], *mask, shape=o.likes[0][0], **given)


_RMS = inspect.signature(F.rms_norm)


@function(F.rms_norm, accepts=lambda o: _bound(_RMS, o)["eps"] is not None)
def _rms_norm(w: Writer, o: Any) -> Ref:
    a = _bound(_RMS, o)
    x = a["input"]
    axes = tuple(range(x.ndim - len(a["normalized_shape"]), x.ndim))
    scale = [] if a["weight"] is None else [a["weight"]]
    return w("rms_norm", x, *scale, axes=axes, eps=float(a["eps"]), shape=x.shape)


@function(torch.linalg.matrix_power, torch.matrix_power, Tensor.matrix_power)
def _matrix_power(w: Writer, o: Any) -> Ref:
    exponent = _argument(o, 1, "n")
    return w("matrix_power", o.args[0], exponent=exponent)
