"""What a run does in PyTorch, counted: operations that compute something, and products' flops."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

FREE = ("aten.view", "aten.detach", "aten.alias", "aten.lift_fresh", "aten._to_copy")


class Count(TorchDispatchMode):
    """The operations that compute something, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not str(func).startswith(FREE):
            self.names.append(str(func))
        return func(*args, **(kwargs or {}))


def operations(run: Callable[[], Any]) -> list[str]:
    with Count() as count:
        run()
    return sorted(count.names)


def flops(run: Callable[[], Any]) -> int:
    with FlopCounterMode(display=False) as count:
        run()
    return count.get_total_flops()
