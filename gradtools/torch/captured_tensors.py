"""Finds the tensors that a recomputed function captures, and replaces them in later runs.

In the first run inside of torch.func, no graph contains the captured tensors, so the function mode
`Captured` finds them. Outside of torch.func, `implicit_solution` uses `CapturedInEager`. The
captured tensors become inputs of the autograd node of f. Whenever f runs again, the mode `Replaced`
replaces the captured tensors with these inputs. `Function.apply` bypasses modes; a captured tensor
among its arguments raises an error.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import compress
from typing import Any, Self

import torch
from torch.overrides import TorchFunctionMode

from gradtools.errors import GradtoolsError
from gradtools.rules import replaced_where
from gradtools.torch import _upstream as upstream
from gradtools.torch import trees
from gradtools.torch.autograd_graph import nodes_of
from gradtools.torch.functorch_wrappers import (
    alive,
    is_dual,
    is_inexact,
    is_wrapped,
    levels_differentiating,
    levels_of_vmap,
    tensors_in,
)

Tensor = torch.Tensor
Tensors = list[Tensor]


class _Captures(threading.local):
    def __init__(self) -> None:
        self.mode: Replaced | None = None  # the innermost mode of this thread


_thread = _Captures()


def replaced_now() -> dict[int, tuple[Tensor, Tensor]]:
    """Returns the replaced tensors of this thread with their replacements, keyed by tensor id."""
    return {} if _thread.mode is None else _thread.mode.of


def as_read_now(xs: Sequence[Tensor]) -> list[Tensor]:
    """Returns xs as a list, with replacements in place of the replaced tensors.

    Call this function on the arguments of `Function.apply`, because `Function.apply` bypasses
    modes.
    """
    return list(xs) if _thread.mode is None else [*map(_thread.mode.other, xs)]


class Replaced(TorchFunctionMode):
    """Context manager that replaces captured tensors with other tensors in the operations of f.

    of: The attribute `of` of an outer `Replaced`, whose replacements also apply.
    """

    _before: Replaced | None = None
    _graph, _within = True, 0  # f's grad mode; number of grad-mode changes in a Function's forward

    def __init__(self, captured: Sequence[Tensor], others: Sequence[Tensor], of: Any = ()) -> None:
        super().__init__()
        pairs = [*zip(captured, others, strict=True)]
        self.of = {**dict(of), **{id(x): (x, other) for x, other in pairs}}
        self._left = {*map(id, captured)}

    def __torch_function__(self, fun: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if fun is upstream.set_grad_enabled:
            self._note_grad_mode(args[0])
        return fun(*self._entered(args), **self._entered(kwargs or {}))

    def _note_grad_mode(self, on: bool) -> None:
        """Records the grad mode that f sets. Changes by a Function's forward pass are ignored."""
        if torch.is_grad_enabled() != self._graph:
            self._within += 1
        elif self._within and on != self._graph:
            self._within -= 1
        else:
            self._graph = on

    def _entered(self, tree: Any) -> Any:
        return upstream.tree_map_only(Tensor, self.other, tree)

    def other(self, x: Tensor) -> Tensor:
        while (entry := self.of.get(id(x))) is not None:
            if torch.is_grad_enabled() != self._graph:  # f is in the forward pass of a Function
                raise GradtoolsError(
                    "f passes a tensor that it captures to a torch.autograd.Function, whose "
                    "arguments cannot be replaced when f is computed again. Pass the tensor to f "
                    "as an argument."
                )
            mode: Replaced | None = self
            while mode is not None:
                mode._left.discard(id(x))
                mode = mode._before
            x = entry[1]
        return x

    def __enter__(self) -> Self:
        self._before, _thread.mode = _thread.mode, self
        self._graph, self._within = torch.is_grad_enabled(), 0
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        _thread.mode = self._before
        super().__exit__(*error)

    def check(self, caller: str) -> None:
        """Raises an error if a captured tensor was not replaced."""
        if self._left:
            raise GradtoolsError(
                f"{caller}: f captures a tensor of a torch.func transform, but does not read the "
                "tensor when f is computed again in the backward pass. Pass the tensor to f as an "
                "argument."
            )


def reading(pairs: Sequence[tuple[Tensor, Tensor]]) -> AbstractContextManager[Any]:
    """Returns a context manager in which the second tensor of each pair replaces the first."""
    if not pairs or torch.compiler.is_compiling():
        return nullcontext()
    originals, others = zip(*pairs, strict=True)
    return Replaced(originals, others, replaced_now())


class Captured(Replaced):
    """Context manager that finds the tensors that f captures, inside of torch.func.

    f's arguments, and tensors computed from the arguments, are wrapped at `level`. Other tensors
    that require grad or are batched are captured tensors, which this mode wraps at `level` too.

    own: The arguments of f that are not wrapped at `level`, such as integers.
    hidden: Whether other tensors may have tangents that are not visible inside of torch.func.
    """

    def __init__(self, level: int, own: Sequence[Any], hidden: bool = False) -> None:
        super().__init__((), (), replaced_now())
        self._own = {id(x): x for x in own}
        self.found: dict[int, tuple[Tensor, Tensor]] = {}
        self._level, self._hidden = level, hidden

    def __torch_function__(self, fun: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        # The wrappers that torch.func passes to `autograd.grad` must not be replaced.
        if self._is_beneath() or fun is torch.autograd.grad:
            return fun(*args, **kwargs)
        if fun.__name__ == "__get__":  # fun reads a property such as shape or T
            result = fun(*args, **kwargs)
            if not isinstance(result, Tensor):
                return result
        enter = lambda tree: upstream.tree_map_only(Tensor, self._entered_level, tree)
        return fun(*enter(args), **enter(kwargs))

    def other(self, x: Tensor) -> Tensor:
        x = super().other(x)
        return x if self._is_beneath() else self._entered_level(x)

    def _is_beneath(self) -> bool:
        """Returns whether the level of f is not active, as in the rule of a Function for vmap."""
        for level in upstream.get_interpreter_stack() or ():
            if level.level() == self._level:  # a rule may create another level with this number
                return level.key() != upstream.TransformType.Grad
        return True

    def _entered_level(self, x: Tensor) -> Tensor:
        entry = self.found.get(id(x))
        if entry is not None:
            return entry[1]
        if id(x) in self._own:
            return x
        # A tensor that an outer recomputation replaces belongs to a suspended or ended transform.
        read = alive(super().other(x))
        moves = read.requires_grad or is_wrapped(read) or (self._hidden and is_inexact(read))
        if not moves or upstream.maybe_get_level(read) == self._level:
            return x
        if upstream.maybe_get_level(read) > self._level:  # x belongs to a transform that f calls
            beneath = _beneath(read, self._level)
            if beneath is not None and levels_differentiating([beneath]):
                raise GradtoolsError(
                    "f passes a tensor that it captures to a torch.func transform, whose "
                    "arguments cannot be replaced when f is computed again. Pass the tensor to f "
                    "as an argument."
                )
            return x
        outer = x if self._before is None else self._before.other(x)
        inside = upstream.wrap_for_grad(outer, self._level)
        self.found[id(x)] = x, inside
        return inside


class CapturedInEager(Replaced):
    """Context manager that finds the differentiated tensors that f captures, outside of torch.func.

    own: The arguments of f. Results of the operations of f, and tensors whose graph is newer than
        this context, are not captured tensors.
    """

    def __init__(self, own: Sequence[Any]) -> None:
        super().__init__((), (), replaced_now())
        self.found: dict[int, tuple[Tensor, Tensor]] = {}
        self._own, self._began = {id(x): x for x in own}, upstream.nodes_made()

    def __torch_function__(self, fun: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        for x in tensors_in((args, kwargs)):
            self._note(x)
        y = fun(*args, **kwargs)
        self._own.update((id(x), x) for x in tensors_in(y))
        return y

    def other(self, x: Tensor) -> Tensor:
        self._note(x)
        return super().other(x)

    def _note(self, x: Tensor) -> None:
        read = super().other(x)
        tracked = read.requires_grad and torch.is_grad_enabled() and self._is_old(read)
        if id(x) not in self._own and (tracked or is_dual(read)):
            self.found[id(x)] = x, x

    def check_all(self, ys: Sequence[Tensor]) -> None:
        """Raises an error if f's outputs depend on a captured tensor that was not found."""
        read = [super(CapturedInEager, self).other(x) for x, _ in self.found.values()]
        ends, own = {x.grad_fn for x in read} - {None}, {*map(id, read), *self._own}
        for node in nodes_of(ys, ends):
            leaf = node.variable if type(node) is upstream.AccumulateGrad else None
            lost = leaf is not None and id(leaf) not in own
            if lost or (node not in ends and upstream.sequence_of(node) < self._began):
                raise GradtoolsError(
                    "implicit_solution: F closes over a differentiated tensor and passes it only "
                    "to an autograd.Function, where the tensor cannot be replaced. Pass the tensor "
                    "to F as an argument."
                )

    def _is_old(self, x: Tensor) -> bool:
        return x.grad_fn is None or upstream.sequence_of(x.grad_fn) < self._began


def closure_converted(
    f: Callable[..., Any], /, *args: Any, **kwargs: Any
) -> tuple[Callable[..., Any], Tensors]:
    """See `Backend.closure_converted`. Evaluates f once."""
    leaves, treedef = trees.flatten((args, kwargs))
    moving = [isinstance(x, Tensor) and is_inexact(x) for x in leaves]
    modes = list[Any]()

    def fun(*xs: Tensor) -> tuple[Tensor, ...]:
        args, kwargs = trees.unflatten(treedef, replaced_where(leaves, moving, xs))
        level = upstream.peek_interpreter_stack()
        mode: Any = CapturedInEager(xs)
        if level is not None:
            fixed = [x for x, m in zip(leaves, moving, strict=True) if not m]
            mode = Captured(level.level(), fixed, hidden=upstream.forward_level() >= 0)
        with mode:
            y = f(*args, **kwargs)
        modes.append(mode)
        return tuple(tensors_in(y))

    given = [*compress(leaves, moving)]
    if upstream.peek_interpreter_stack() is not None:
        torch.func.vjp(fun, *given)
    else:
        with torch.enable_grad():
            outs = fun(*given)
        modes[0].check_all(outs)
    found = [x for x, _ in modes[0].found.values()]

    def converted(captured: Tensors, *args: Any, **kwargs: Any) -> Any:
        pairs = [(x, y) for x, y in zip(found, captured, strict=True) if x is not y]
        if not pairs:
            return f(*args, **kwargs)
        with reading(pairs) as mode:
            y = f(*args, **kwargs)
        mode.check("implicit_solution")
        return upstream.tree_map_only(Tensor, mode.other, y)

    return converted, as_read_now(found)


def _beneath(x: Tensor, level: int) -> Tensor | None:
    """Removes x's grad wrappers above `level`. Returns None if the result is not below `level`."""
    while upstream.maybe_get_level(x) > level:
        if not upstream.is_gradtrackingtensor(x):
            return None
        x = upstream.get_unwrapped(x)
    return x if upstream.maybe_get_level(x) < level else None


def batched_as(xs: Sequence[Tensor], ys: Sequence[Tensor]) -> Tensors:
    """Returns xs; one of them becomes batched in every vmap in which a tensor of ys is batched.

    torch.func does not enter a level of vmap for a pullback whose inputs are not batched, but the
    random numbers that f drew in the first pass may be batched.
    """
    xs = list(xs)
    k = next(k for k, x in enumerate(xs) if is_inexact(x))
    for y in ys:
        if not levels_of_vmap(y) <= set().union(*map(levels_of_vmap, xs)):
            xs[k] = xs[k] - torch.zeros_like(y, dtype=xs[k].dtype).sum()
    return xs
