"""Defines dispatch modes that count operations and FLOPs in PyTorch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode, flop_registry

FREE = ("aten.view", "aten.detach", "aten.alias", "aten.lift_fresh", "aten._to_copy")


class Count(TorchDispatchMode):
    """Record the names of operations in order, except for operations that compute nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not str(func).startswith(FREE):
            self.names.append(str(func))
        return func(*args, **(kwargs or {}))


class Work(TorchDispatchMode):
    """Count FLOPs of products, and one operation per element that other operations compute."""

    def __init__(self) -> None:
        super().__init__()
        self.flops = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if formula := flop_registry.get(func.overloadpacket):
            self.flops += formula(*args, **(kwargs or {}), out_val=out)
        elif not func.is_view and not str(func).startswith(FREE):
            self.flops += sum(x.numel() for x in tree_leaves(out) if _computes(x))
        return out


def _computes(x: Any) -> bool:
    return isinstance(x, torch.Tensor) and (x.is_floating_point() or x.is_complex())


def operations(run: Callable[[], Any]) -> list[str]:
    with Count() as count:
        run()
    return sorted(count.names)


def flops(run: Callable[[], Any]) -> int:
    with FlopCounterMode(display=False) as count:
        run()
    return count.get_total_flops()
