"""The user's line and the modules that are running.

`gradtools.code_origin` classifies stack frames. The line is the innermost one of the user's code,
else of an installed package. The search ends at the function that runs the user's program.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from gradtools.code_origin import PACKAGE, Source, innermost, lines_above
from gradtools.torch import _upstream as upstream


def place(end: Callable[..., Any]) -> tuple[Source | None, str]:
    """The user's running line, and "checkpoint" if it runs inside of one.

    end: The function that runs the user's program; outer frames are ignored.
    """
    lines = list(lines_above(1, end))
    again = any(upstream.is_of_checkpoint(frame) for frame, _ in lines)
    return innermost(lines, PACKAGE), "checkpoint" if again else ""


# --- modules -----------------------------------------------------------------------------


class Scopes:
    """The path of running modules, outermost first, each by its name in the one around it."""

    def __init__(self) -> None:
        self.path: tuple[str, ...] = ()
        self._running: list[torch.nn.Module] = []
        self._paths: list[tuple[str, ...]] = []
        self._names: dict[int, dict[int, str]] = {}

    @contextmanager
    def watching(self) -> Iterator[None]:
        """A context that tracks the modules which this thread calls."""
        thread = threading.get_ident()

        def enter(module: torch.nn.Module, args: Any) -> None:
            if threading.get_ident() == thread:
                self._enter(module)

        def leave(module: torch.nn.Module, args: Any, out: Any) -> None:
            if threading.get_ident() == thread and self._running:
                self._leave(module)

        handles = [
            register_module_forward_pre_hook(enter),
            register_module_forward_hook(leave, always_call=True),
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _enter(self, module: torch.nn.Module) -> None:
        name = self._names_in(self._running[-1]).get(id(module)) if self._running else None
        self._running.append(module)
        self._paths.append(self.path)
        self.path = (*self.path, name or type(module).__name__)

    def _leave(self, module: torch.nn.Module) -> None:
        """Pops a module, and those above it whose exit was not reported as they raised."""
        if all(running is not module for running in self._running):
            return
        while self._running:
            self.path = self._paths.pop()
            if self._running.pop() is module:
                return

    def _names_in(self, module: torch.nn.Module) -> dict[int, str]:
        if id(module) not in self._names:
            result = module.named_modules(remove_duplicate=True)
            self._names[id(module)] = {id(part): name for name, part in result}
        return self._names[id(module)]
