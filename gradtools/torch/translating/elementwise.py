"""Aten's elementwise operations that the graph's word does not say all of.

All others are said as the graph says them (`as_said`). A translation is given the writer and the
call's arguments by aten's own names.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from gradtools.torch.translating.writer import Ref, Writer, as_said

Translation = Callable[[Writer, Any], Any]
ELEMENTWISE: dict[str, Translation] = {}


def operation(*names: str) -> Callable[[Translation], Translation]:
    """Enters a translation under aten's names."""

    def enter(translation: Translation) -> Translation:
        ELEMENTWISE.update(dict.fromkeys(names, translation))
        return translation

    return enter


@operation("copy", "fill", "zero")
def _copied(w: Writer, o: Any) -> Ref:
    """What is written into an array, in its dtype and shape."""
    shape, dtype = o.likes[0]
    x = w.ref(getattr(o, "src", getattr(o, "value", 0.0)))
    return w.cast(w.broadcast(x, shape), dtype)


@operation("rrelu_with_noise", "rrelu_with_noise_functional")
def _rrelu(w: Writer, o: Any) -> Ref | None:
    """Training draws the slopes below zero, which are what they were."""
    if not o.training:
        return w("leaky_relu", o.self, negative_slope=float(o.lower + o.upper) / 2)
    slopes = o.writes[0] if o.writes else o.outs[1]
    return w.mul(o.self, o.recorder.constant(slopes))


@operation("log_sigmoid_forward")
def _log_sigmoid(w: Writer, o: Any) -> Any:
    return [w("log_sigmoid", o.self), w("exp", w("negate", w("abs", o.self)))]


@operation("hardsigmoid")
def _hardsigmoid(w: Writer, o: Any) -> Any:
    o.recorder.narrow = "float32"  # PyTorch's backward kernel has 1/6 in float32
    return as_said(w, o)
