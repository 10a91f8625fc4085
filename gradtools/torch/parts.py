"""Whole modules among a call's arguments: what is differentiated, and what is kept apart.

The part of a `torch.nn.Module` that is differentiated is the dictionary of its parameters that
require grad, by name; the rest is the module. f gets a structural copy with other parameters,
as `functionalize` makes it, which shares all else with the caller's module: frozen parameters,
buffers, hooks. What a call assigns anew is assigned to the caller's module, too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from gradtools.torch.compiling import is_compiling

Tensor = torch.Tensor


def opened(
    asked: str,
    f: Callable[..., Any],
    args: Sequence[Any],
    kwargs: dict[str, Any],
    argnums: Sequence[int],
) -> Opened | None:
    """The call as one of dictionaries of tensors; None if no differentiated argument is a module.

    Compiled code cannot build copies of modules: there they are refused as what is no array.
    """
    for i in argnums:
        if isinstance(args[i], nn.Module) and not is_compiling():
            return Opened(asked, f, args, argnums)
    return None


def part_of(tree: Any) -> Any:
    """The parameters of a module; anything else as it is."""
    return _part(tree) if isinstance(tree, nn.Module) else tree


def _part(module: nn.Module) -> dict[str, Tensor]:
    return {name: _alias(p) for name, p in module.named_parameters() if p.requires_grad}


def _alias(p: Tensor) -> Tensor:
    """A parameter detached, so that results are; what a derivative around this one is taken of."""
    return p.detach() if isinstance(p, nn.Parameter) else p


class Opened:
    """A call some of whose arguments are modules, as a function of their parameters.

    Attributes:
        args: The arguments, with its parameters in the place of each differentiated module.
    """

    is_tied = False  # a tied parameter is listed once
    changed = ()  # what a call changes is written at once

    def __init__(
        self, asked: str, f: Callable[..., Any], args: Sequence[Any], argnums: Sequence[int]
    ) -> None:
        self._f = f
        self.__name__ = getattr(f, "__name__", type(f).__name__)
        self._modules = {i: args[i] for i in argnums if isinstance(args[i], nn.Module)}
        from gradtools.torch import modules

        for module in self._modules.values():
            modules.check_module(asked, module)
        self.args = [_part(x) if i in self._modules else x for i, x in enumerate(args)]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """f at modules with these parameters."""
        from gradtools.torch import modules

        copies = {i: modules.Copy(module, args[i]) for i, module in self._modules.items()}
        whole = [copies[i].root if i in copies else x for i, x in enumerate(args)]
        try:
            return self._f(*whole, **kwargs)
        finally:
            for copy in copies.values():
                copy.hand_back()

    def effects(self) -> list[Tensor]:
        """Nothing: what a call changes is written at once."""
        return []

    def settle(self, extras: Sequence[Tensor]) -> None:
        """Nothing is left to be written."""

    def refuse_changes(self) -> None:
        """Nothing is lost."""
