"""Aten's elementwise operations, in the vocabulary of the formula.

What is a word of its own stands in the tables, aten's name first; what is made of several words is
a function below, under aten's name. A translation is given the writer and the call's arguments by
aten's own names.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from gradtools.torch.translating.writer import Ref, Writer, as_said

Translation = Callable[[Writer, Any], Any]
ELEMENTWISE: dict[str, Translation] = {}

# These are said as the graph says them.
_WORDS = """
    exp exp2 expm1 log log2 log10 log1p sqrt rsqrt square reciprocal
    sin cos tan sinh cosh tanh sigmoid relu erf erfc erfinv lgamma digamma
    floor ceil round trunc silu abs sign angle logical_not
    neg asin acos atan asinh acosh atanh special_erfinv special_log1p isnan isfinite
    _conj conj_physical _conj_physical _neg_view fix sgn
    special_digamma special_gammaln special_exp2 bitwise_not
    clone contiguous resolve_conj resolve_neg view_of positive fused_moving
    maximum minimum logaddexp remainder logical_and logical_or logical_xor
    atan2 fmax fmin floor_divide lt le gt ge eq ne where masked_fill
"""
ELEMENTWISE |= dict.fromkeys(_WORDS.split(), as_said)


def operation(*names: str) -> Callable[[Translation], Translation]:
    """Enters a translation under aten's names."""

    def enter(translation: Translation) -> Translation:
        ELEMENTWISE.update(dict.fromkeys(names, translation))
        return translation

    return enter


@operation("bitwise_and", "bitwise_or", "bitwise_xor")
def _bitwise(w: Writer, o: Any) -> Ref:
    """Of booleans; of integers it is held as it was."""
    name = w.native.removeprefix("aten.").strip("_").replace("bitwise", "logical")
    refs = w.ref(o.self), w.ref(o.other)
    if any(r.kind for r in refs):
        return o.recorder.constant(o.outs[0])  # type: ignore[no-any-return]
    return w(name, *refs, dtype="bool")


@operation("add")
def _add(w: Writer, o: Any) -> Ref:
    return w.add(o.self, w.times(o.alpha, w.ref(o.other)))


@operation("sub", "subtract")
def _sub(w: Writer, o: Any) -> Ref:
    return w.sub(o.self, w.times(o.alpha, w.ref(o.other)))


@operation("rsub")
def _rsub(w: Writer, o: Any) -> Ref:
    return w.sub(o.other, w.times(o.alpha, o.self))


@operation("mul", "multiply")
def _mul(w: Writer, o: Any) -> Ref:
    return w.mul(o.self, o.other)


@operation("div", "divide", "true_divide")
def _div(w: Writer, o: Any) -> Ref:
    mode = getattr(o, "rounding_mode", None)
    if mode == "floor":
        return w("floor_divide", w.ref(o.self), w.ref(o.other))
    result = w.div(o.self, o.other)
    return w("trunc", result) if mode == "trunc" else result


@operation("pow", "float_power")
def _pow(w: Writer, o: Any) -> Ref:
    return w("power", w.ref(o.self), w.ref(o.exponent))


@operation("round")
def _round(w: Writer, o: Any) -> Ref:
    decimals = getattr(o, "decimals", 0)
    if not decimals:
        return w("round", o.self)
    return w.div(w("round", w.mul(o.self, 10.0**decimals)), 10.0**decimals)


@operation("fmod")
def _fmod(w: Writer, o: Any) -> Ref:
    return w.sub(o.self, w.mul(o.other, w("trunc", w.div(o.self, o.other))))


@operation("clamp", "clip", "hardtanh")
def _clamp(w: Writer, o: Any) -> Ref:
    low = getattr(o, "min", getattr(o, "min_val", None))
    high = getattr(o, "max", getattr(o, "max_val", None))
    if isinstance(low, Ref) or isinstance(high, Ref):
        result = o.self if low is None else w("maximum", o.self, low)
        return result if high is None else w("minimum", result, high)
    return _clipped(w, o.self, low, high)


def _clipped(w: Writer, x: Ref, low: Any, high: Any) -> Ref:
    """Between two numbers; integers stay what they are."""
    result = w("clip", x, low=low, high=high)
    return result if x.kind >= 2 else w("cast", result, dtype=x.dtype, dtype_=x.dtype)


@operation("clamp_min")
def _clamp_min(w: Writer, o: Any) -> Ref:
    if isinstance(o.min, Ref):
        return w("maximum", o.self, o.min)
    return _clipped(w, o.self, o.min, None)


@operation("clamp_max")
def _clamp_max(w: Writer, o: Any) -> Ref:
    if isinstance(o.max, Ref):
        return w("minimum", o.self, o.max)
    return _clipped(w, o.self, None, o.max)


@operation("addcmul")
def _addcmul(w: Writer, o: Any) -> Ref:
    return w.add(o.self, w.times(o.value, w.mul(o.tensor1, o.tensor2)))


@operation("addcdiv")
def _addcdiv(w: Writer, o: Any) -> Ref:
    return w.add(o.self, w.times(o.value, w.div(o.tensor1, o.tensor2)))


@operation("lerp")
def _lerp(w: Writer, o: Any) -> Ref:
    return w.add(o.self, w.mul(o.weight, w.sub(o.end, o.self)))


@operation("hypot")
def _hypot(w: Writer, o: Any) -> Ref:
    return w("sqrt", w.add(w("square", o.self), w("square", o.other)))


@operation("xlogy", "special_xlogy")
def _xlogy(w: Writer, o: Any) -> Ref:
    a, b = w.ref(o.self), w.ref(o.other)
    return w.where(w.compare(a, "==", 0.0), 0.0, w.mul(a, w("log", b)))


@operation("logaddexp2")
def _logaddexp2(w: Writer, o: Any) -> Ref:
    scaled = w.mul(math.log(2), o.self), w.mul(math.log(2), o.other)
    return w.mul(1 / math.log(2), w("logaddexp", *scaled))


@operation("sinc", "special_sinc")
def _sinc(w: Writer, o: Any) -> Ref:
    x = w.mul(math.pi, o.self)
    zero = w.compare(x, "==", 0.0)
    safe = w.where(zero, 1.0, x)
    return w.where(zero, 1.0, w.div(w("sin", safe), safe))


@operation("frac")
def _frac(w: Writer, o: Any) -> Ref:
    return w.sub(o.self, w("trunc", o.self))


@operation("logit", "special_logit")
def _logit(w: Writer, o: Any) -> Ref:
    x = o.self if o.eps is None else w("clip", o.self, low=o.eps, high=1 - o.eps)
    return w("log", w.div(x, w.sub(1.0, x)))


@operation("polygamma", "special_polygamma")
def _polygamma(w: Writer, o: Any) -> Ref:
    return w("polygamma", o.self, order=o.n)


@operation("nan_to_num")
def _nan_to_num(w: Writer, o: Any) -> Ref:
    return w.where(w("is_nan", o.self, dtype="bool"), float(o.nan or 0.0), o.self)


@operation("heaviside")
def _heaviside(w: Writer, o: Any) -> Ref:
    above = w.cast(w.compare(o.self, ">", 0.0), "float64")
    return w.where(w.compare(o.self, "==", 0.0), o.values, above)


@operation("deg2rad")
def _deg2rad(w: Writer, o: Any) -> Ref:
    return w.mul(math.pi / 180, o.self)


@operation("rad2deg")
def _rad2deg(w: Writer, o: Any) -> Ref:
    return w.mul(180 / math.pi, o.self)


@operation("complex")
def _complex(w: Writer, o: Any) -> Ref:
    return w("complex", o.real, o.imag, dtype="complex128")


@operation("polar")
def _polar(w: Writer, o: Any) -> Ref:
    parts = w.mul(o.abs, w("cos", o.angle)), w.mul(o.abs, w("sin", o.angle))
    return w("complex", *parts, dtype="complex128")


@operation("_to_copy", "to", "copy", "fill", "zero", "expand_copy")
def _copied(w: Writer, o: Any) -> Ref:
    """In the dtype and shape of the result."""
    shape, dtype = o.likes[0]
    given = vars(o)
    if "src" in given or "value" in given:
        x = w.ref(given.get("src", given.get("value")))
    else:
        own = ("aten._to_copy", "aten.to", "aten.expand_copy")
        x = o.self if w.native in own else w.constant(0.0)
    return w.cast(w.broadcast(x, shape), dtype)


# --- activations -------------------------------------------------------------------------


@operation("softplus")
def _softplus(w: Writer, o: Any) -> Ref:
    result = w("softplus", o.self, beta=float(o.beta))
    linear = w.compare(w.times(o.beta, o.self), ">", float(o.threshold))
    return w.where(linear, o.self, result)


@operation("leaky_relu")
def _leaky_relu(w: Writer, o: Any) -> Ref:
    return w("leaky_relu", o.self, slope=float(o.negative_slope))


@operation("rrelu_with_noise", "rrelu_with_noise_functional")
def _rrelu(w: Writer, o: Any) -> Ref | None:
    """Training draws the slopes below zero, which are what they were."""
    if not o.training:
        return w("leaky_relu", o.self, slope=float(o.lower + o.upper) / 2)
    slopes = o.writes[0] if o.writes else o.outs[1]
    return w.mul(o.self, o.recorder.constant(slopes))


@operation("elu")
def _elu(w: Writer, o: Any) -> Ref:
    inner = w.times(o.input_scale, o.self)
    return w.times(o.scale, w("elu", inner, alpha=float(o.alpha)))


@operation("celu")
def _celu(w: Writer, o: Any) -> Ref:
    below = w.mul(o.alpha, w("expm1", w.div(o.self, o.alpha)))
    return w.where(w.compare(o.self, ">", 0.0), o.self, below)


@operation("gelu")
def _gelu(w: Writer, o: Any) -> Ref:
    return w("gelu", o.self, approximate=True if o.approximate == "tanh" else None)


@operation("log_sigmoid_forward", "log_sigmoid")
def _log_sigmoid(w: Writer, o: Any) -> Any:
    return [w("log_sigmoid", o.self), w("exp", w("negate", w("abs", o.self)))]


@operation("mish")
def _mish(w: Writer, o: Any) -> Ref:
    return w.mul(o.self, w("tanh", w("softplus", o.self)))


@operation("hardsigmoid")
def _hardsigmoid(w: Writer, o: Any) -> Ref:
    o.recorder.narrow = "float32"  # PyTorch's backward kernel has 1/6 in float32
    return w.div(w("clip", w.add(o.self, 3.0), low=0.0, high=6.0), 6.0)


@operation("hardswish")
def _hardswish(w: Writer, o: Any) -> Ref:
    return w.mul(o.self, w.div(w("clip", w.add(o.self, 3.0), low=0.0, high=6.0), 6.0))


@operation("softshrink")
def _softshrink(w: Writer, o: Any) -> Ref:
    above, below = w.sub(o.self, o.lambd), w.add(o.self, o.lambd)
    inner = w.where(w.compare(o.self, "<", -o.lambd), below, 0.0)
    return w.where(w.compare(o.self, ">", o.lambd), above, inner)


@operation("hardshrink")
def _hardshrink(w: Writer, o: Any) -> Ref:
    return w.where(w.compare(w("abs", o.self), ">", o.lambd), o.self, 0.0)


@operation("threshold")
def _threshold(w: Writer, o: Any) -> Ref:
    return w.where(w.compare(o.self, ">", o.threshold), o.self, o.value)


@operation("_prelu_kernel")
def _prelu(w: Writer, o: Any) -> Ref:
    return w.where(w.compare(o.self, ">", 0.0), o.self, w.mul(o.weight, o.self))


@operation("glu")
def _glu(w: Writer, o: Any) -> Ref:
    axis = o.dim % o.self.ndim
    half = o.self.shape[axis] // 2
    a, b = w.cut(o.self, axis, 0, half), w.cut(o.self, axis, half, 2 * half)
    return w.mul(a, w("sigmoid", b))


# --- what autograd computes, where f takes a derivative itself ---------------------------


@operation("tanh_backward")
def _tanh_backward(w: Writer, o: Any) -> Ref:
    return w.mul(o.grad_output, w.sub(1.0, w("square", w("conj", o.output))))


@operation("sigmoid_backward")
def _sigmoid_backward(w: Writer, o: Any) -> Ref:
    y = w("conj", o.output)
    return w.mul(o.grad_output, w.mul(w.sub(1.0, y), y))


@operation("threshold_backward")
def _threshold_backward(w: Writer, o: Any) -> Ref:
    return w.where(w.compare(o.self, "<=", o.threshold), 0.0, o.grad_output)
