"""Fused kernels without forward mode, and the plain ones of PyTorch that take their place.

Fused attention and recurrent layers on the CPU cannot push a tangent. Their kernels are chosen by
switches, so where one fails that operation alone is done again with the switches off: the random
streams as they were before it, everything else as it stands, and the function around it runs once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from gradtools.backend import Fun
from gradtools.errors import is_of, warn_once
from gradtools.torch import _upstream as upstream
from gradtools.torch.compiling import is_compiling
from gradtools.torch.engines import caller_of, jvp
from gradtools.torch.known_errors import NO_FORWARD_MODE, kernel_without
from gradtools.torch.modes import Modes
from gradtools.torch.randomness import Randomness
from gradtools.torch.state import Snapshot

Tensor = torch.Tensor

_CHOSEN_BY_SWITCHES = frozenset(
    ("scaled_dot_product_attention", "multi_head_attention_forward")
    + ("lstm", "gru", "rnn_tanh", "rnn_relu")
)


def jvps(
    fun: Fun, leaves: list[Tensor], many: Sequence[list[Tensor]]
) -> tuple[list[Tensor], list[Tensor], list[list[Tensor]]]:
    """`jvp` along many tangents, by any kernel, without a graph.

    A dual number carries one tangent: each takes an evaluation of its own, and all start from
    what stood behind the function before the first.
    """
    restart = restarting(fun, leaves, len(many))
    result: list[Any] = []
    with torch.no_grad(), by_any_kernel(caller_of(fun)):
        for tangents in many:
            restart()
            result.append(jvp(fun, leaves, tangents))
    outs, extras, _ = result[0]
    return outs, extras, [pushed for _, _, pushed in result]


def restarting(fun: Fun, leaves: Sequence[Tensor], count: int) -> Callable[[], None]:
    """What to call before each of `count` evaluations: all start from what stood before them."""
    if count < 2 or is_compiling():
        return lambda: None
    given = getattr(fun, "args", ()), getattr(fun, "kwargs", {})
    return Snapshot.of([*given, getattr(fun, "f", fun)], leaves).restore


@contextmanager
def by_any_kernel(caller: str) -> Iterator[None]:
    """Inside, forward mode takes another kernel where one has none, and says so once."""
    if is_compiling():
        yield
        return
    with _ByAnyKernel(caller):
        yield


class _ByAnyKernel(TorchFunctionMode):
    def __init__(self, caller: str) -> None:
        super().__init__()
        self.caller = caller

    def __torch_function__(self, fun: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if getattr(fun, "__name__", "") not in _CHOSEN_BY_SWITCHES:
            return fun(*args, **kwargs)
        kinds = {
            x.device.type for x in upstream.tree_leaves((args, kwargs)) if isinstance(x, Tensor)
        }
        streams = Randomness.everywhere(kinds)
        try:
            return fun(*args, **kwargs)
        except NotImplementedError as error:
            if not is_of("torch", error):
                raise
            kernel = kernel_without(NO_FORWARD_MODE, error) or fun.__name__
        streams.restore()
        with Modes.now(kinds).by_other_kernels().again():
            result = fun(*args, **kwargs)
        warn_once(
            (self.caller, kernel),
            f"{self.caller}: {kernel} has no forward mode; there PyTorch's own alternative takes "
            "its place.",
        )
        return result
