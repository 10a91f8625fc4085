"""All monkey patches of PyTorch, for calls that a TorchFunctionMode cannot see.

At the end are two function modes, for the tensors that a function captured.

Within a block `around(owner, beneath, args, kwargs)` replaces this thread's calls of
`owner(*args, **kwargs)`; `beneath` calls the next outer block's function, or the original. A patch
of a class is installed from the first block of any thread until the end of the last one; calls in
threads without a block go to the original.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
import torch.utils.checkpoint
from torch.overrides import TorchFunctionMode

from gradtools.torch import _upstream as upstream
from gradtools.torch.function_modes import OwnMode

Tensor = torch.Tensor
Around = Callable[[Any, Callable[..., Any], Any, Any], Any]


class _Patch:
    """A patched method of a class, which calls this thread's blocks."""

    def __init__(self, holder: Any, name: str, kind: Callable[[Any], Any] = lambda f: f) -> None:
        self._holder, self._name, self._kind = holder, name, kind
        self._lock, self._count = threading.Lock(), 0
        self._local, self._before = threading.local(), None

    @contextmanager
    def by(self, around: Around) -> Iterator[None]:
        """Context in which `around` replaces this thread's calls."""

        def call(owner: Any, /, *args: Any, **kwargs: Any) -> Any:
            return self._called(len(self._blocks()), owner, *args, **kwargs)

        blocks = self._blocks()
        with self._lock:
            self._count += 1
            if self._count == 1:
                self._before = vars(self._holder).get(self._name)
                setattr(self._holder, self._name, self._kind(call))
        blocks.append(around)
        try:
            yield
        finally:
            blocks.pop()
            with self._lock:
                self._count -= 1
                if not self._count and self._before is None:
                    delattr(self._holder, self._name)
                elif not self._count:
                    setattr(self._holder, self._name, self._before)

    def _blocks(self) -> list[Around]:
        """This thread's blocks, outermost first."""
        blocks: list[Around] = self._local.__dict__.setdefault("blocks", [])
        return blocks

    def _called(self, depth: int, owner: Any, /, *args: Any, **kwargs: Any) -> Any:
        if depth:
            beneath = partial(self._called, depth - 1, owner)
            return self._blocks()[depth - 1](owner, beneath, args, kwargs)
        before: Any = self._before
        if before is None:
            return getattr(super(self._holder, owner), self._name)(*args, **kwargs)
        bound = (None, owner) if self._kind is classmethod else (owner,)
        return before.__get__(*bound)(*args, **kwargs)


_FUNCTIONS = [_Patch(kind, "apply", classmethod) for kind in upstream.Functions]


@contextmanager
def functions_applied(around: Around) -> Iterator[None]:
    """Patches `Function.apply`; the owner is the Function's class.

    Up to PyTorch 2.13 a bound `apply` is seen as well, since the patch is in a base class.
    """
    with ExitStack() as patches:
        for patch in _FUNCTIONS:
            patches.enter_context(patch.by(around))
        yield


hooks_set = _Patch(torch.Tensor, "register_hook").by
"""Patches `Tensor.register_hook`; the owner is the tensor."""


class Substituted(TorchFunctionMode):
    """Mode that substitutes other tensors for those that a function captured."""

    def __init__(self, captured: Sequence[Tensor], others: Sequence[Tensor]) -> None:
        super().__init__()
        self.captured = captured  # keeps them alive, so that ids are unique
        self.others = {id(x): other for x, other in zip(captured, others, strict=True)}

    def __torch_function__(self, fun: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = self.within((args, kwargs or {}))
        return fun(*args, **kwargs)

    def __enter__(self) -> Substituted:
        # A bound `apply` bypasses the patch; then the graph reaches the captured tensor: an error.
        applied = lambda kind, beneath, args, kwargs: beneath(*self.within(args), **kwargs)
        self._functions = functions_applied(applied)
        self._functions.__enter__()
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._functions.__exit__(*error)

    def within(self, tree: Any) -> Any:
        return upstream.tree_map_only(Tensor, lambda x: self.others.get(id(x), x), tree)


class Reads(OwnMode):
    """Mode that records which tensors a function reads, of those with `wanted(x)`."""

    def __init__(self, wanted: Callable[[Tensor], bool]) -> None:
        super().__init__()
        self.seen: dict[int, Tensor] = {}  # the tensors, by their ids
        self._wanted = wanted

    def __torch_function__(self, fun: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if getattr(fun, "__name__", "") != "__get__":  # which reads a shape, say
            for x in upstream.tree_leaves((args, kwargs)):
                if isinstance(x, Tensor) and self._wanted(x):
                    self.seen[id(x)] = x
        return fun(*args, **kwargs)
