"""A function or model of one framework inside the other: `from gradtools import bridge`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from gradtools.bridge.functions import Bridged
from gradtools.bridge.jax_guest import JaxGuest
from gradtools.bridge.torch_guest import TorchGuest

__all__ = ["to_jax", "to_torch"]

_TORCH = TorchGuest()


def to_jax(f: Callable[..., Any], out: Any = None) -> Any:
    """x"""
    return Bridged(_TORCH, f, out)


def to_torch(f: Callable[..., Any], out: Any = None, jit: bool = True) -> Any:
    """x"""
    return Bridged(JaxGuest(jit), f, out)
