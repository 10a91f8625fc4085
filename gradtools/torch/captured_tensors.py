"""Tensors that a recomputed function captures, and the tensors that it reads in their place.

In the first run inside of torch.func no graph shows the captured tensors, so a function mode finds
them (`Captured`). They become inputs of f's node. Whenever f runs again, a mode replaces them by
these inputs (`Replaced`). Modes do not see the arguments of `Function.apply`; a captured tensor
among them raises an error.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from gradtools.errors import GradtoolsError
from gradtools.torch import _upstream as upstream
from gradtools.torch.functorch_wrappers import is_inexact, is_wrapped

Tensor = torch.Tensor
Tensors = list[Tensor]
ENDED = -2  # what `maybe_get_level` returns for a wrapper of a transform that has ended


class _Captures(threading.local):
    def __init__(self) -> None:
        self.mode: Replaced | None = None  # the innermost one of this thread


_thread = _Captures()


def replaced_now() -> dict[int, tuple[Tensor, Tensor]]:
    """The tensors that are replaced in this thread, by id, each with its replacement."""
    return {} if _thread.mode is None else _thread.mode.of


def as_read_now(xs: Sequence[Tensor]) -> list[Tensor]:
    """The tensors or their replacements, as arguments of a node, which modes do not see."""
    return list(xs) if _thread.mode is None else [*map(_thread.mode.other, xs)]


class Replaced(TorchFunctionMode):
    """A context in which f's operations read other tensors in the place of captured ones.

    of: The tensors that are replaced already, by an outer context.
    """

    def __init__(self, captured: Sequence[Tensor], others: Sequence[Tensor], of: Any = ()) -> None:
        super().__init__()
        pairs = [*zip(captured, others, strict=True)]
        self.of = {**dict(of), **{id(x): (x, other) for x, other in pairs}}
        self._left = {*map(id, captured)}

    def __torch_function__(self, fun: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return fun(*self._entered(args), **self._entered(kwargs or {}))

    def _entered(self, tree: Any) -> Any:
        return upstream.tree_map_only(Tensor, self.other, tree)

    def other(self, x: Tensor) -> Tensor:
        while (entry := self.of.get(id(x))) is not None:
            self._left.discard(id(x))
            x = entry[1]
        return x

    def __enter__(self) -> Replaced:
        self._before, _thread.mode = _thread.mode, self
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        _thread.mode = self._before
        super().__exit__(*error)

    def check(self, caller: str) -> None:
        """Raises unless each captured tensor was replaced."""
        if self._left:
            raise GradtoolsError(
                f"{caller}: f captures a tensor of torch.func and does not read it when it is "
                "computed again in the backward pass. Pass it to f as an argument."
            )


class Captured(TorchFunctionMode):
    """A context that finds the tensors that f captures, inside of torch.func.

    f's own tensors are wrapped at `level`, which its arguments have entered. Other tensors that may
    be differentiated, or are batched, are captured, and enter that level as well.
    """

    def __init__(self, level: int) -> None:
        super().__init__()
        self.found: dict[int, tuple[Tensor, Tensor]] = {}
        self._level = level

    def __torch_function__(self, fun: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, level = kwargs or {}, upstream.peek_interpreter_stack()
        if level is None or level.level() < self._level:  # beneath, in a node of another program
            return fun(*args, **kwargs)
        if fun is torch.autograd.grad:  # of torch.func, which identifies its own wrappers
            return fun(*args, **kwargs)
        if fun.__name__ == "__get__":  # of a property such as shape, or T
            result = fun(*args, **kwargs)
            if not isinstance(result, Tensor):
                return result
        enter = lambda tree: upstream.tree_map_only(Tensor, self._entered, tree)
        return fun(*enter(args), **enter(kwargs))

    def _entered(self, x: Tensor) -> Tensor:
        entry = self.found.get(id(x))
        if entry is not None:
            return entry[1]
        while upstream.maybe_get_level(x) == ENDED:
            x = upstream.get_unwrapped(x)
        if not (x.requires_grad or is_wrapped(x)) or upstream.maybe_get_level(x) >= self._level:
            return x
        inside = upstream.wrap_for_grad(x, self._level)
        self.found[id(x)] = x, inside
        return inside


def batched_as(xs: Sequence[Tensor], ys: Sequence[Tensor]) -> Tensors:
    """Returns xs with one of them batched in each vmap in which any of ys is batched.

    torch.func enters no vmap for a pullback whose inputs are not batched in it, but f's draws in
    the first pass may be.
    """
    xs = list(xs)
    k = next(k for k, x in enumerate(xs) if is_inexact(x))
    for y in ys:
        if not _batching(y) <= set().union(*map(_batching, xs)):
            xs[k] = xs[k] - torch.zeros_like(y, dtype=xs[k].dtype).sum()
    return xs


def _batching(x: Tensor) -> set[int]:
    """The levels of vmap in which x is batched."""
    found = set[int]()
    while is_wrapped(x):
        if upstream.is_batchedtensor(x):
            found.add(upstream.maybe_get_level(x))
        x = upstream.get_unwrapped(x)
    return found
