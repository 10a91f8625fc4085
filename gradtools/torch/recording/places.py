"""Where in the user's program a line runs: the innermost line of their own, and the modules.

A frame is the user's if its file belongs neither to a framework, to gradtools, to the standard
library, nor to an installed package; where there is none, the innermost of an installed package
stands in. The search ends at the function that runs the user's program.
"""

from __future__ import annotations

import os
import sys
import sysconfig
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from types import CodeType, FrameType
from typing import Any

import numpy as np
import torch
from torch.nn.modules.module import (
    register_module_forward_hook,
    register_module_forward_pre_hook,
)

import gradtools
from gradtools.seeing.graph import Source

_USER, _PACKAGE, _LIBRARY, _CHECKPOINT = range(4)
_MANAGED = ("chunking.py", "programs.py", "freezing.py")


def is_managed() -> bool:
    """Whether gradtools itself makes this call, to run a chunk or a frozen function apart."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        file = frame.f_code.co_filename
        if not file.startswith((_RECORDING, _TORCH)):
            return os.path.dirname(file) == _WING and os.path.basename(file) in _MANAGED
        frame = frame.f_back
    return False


def place(end: CodeType) -> tuple[Source | None, str]:
    """The user's line that is running, and "checkpoint" if it runs inside of one.

    end: The code of the function that ran the user's program; frames beyond are not looked at.
    """
    frame: FrameType | None = sys._getframe(1)
    found: FrameType | None = None
    kind, mark = _LIBRARY, ""
    while frame is not None and frame.f_code is not end:
        of = _kind(frame.f_code.co_filename)
        if of == _CHECKPOINT:
            mark = "checkpoint"
        elif of < kind:
            found, kind = frame, of
        frame = frame.f_back
    return (None if found is None else _source(found)), mark


def line_of_error(error: BaseException) -> Source | None:
    """The innermost line of the user's that an error went through."""
    found: Source | None = None
    trace = error.__traceback__
    while trace is not None:
        if _kind(trace.tb_frame.f_code.co_filename) == _USER:
            code = trace.tb_frame.f_code
            found = Source(code.co_filename, trace.tb_lineno, code.co_name)
        trace = trace.tb_next
    return found


def _source(frame: FrameType) -> Source:
    return Source(frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name)


@cache
def _kind(file: str) -> int:
    if file.endswith(os.path.join("torch", "utils", "checkpoint.py")):
        return _CHECKPOINT
    if file.startswith("<frozen ") or any(file.startswith(folder) for folder in _libraries()):
        return _LIBRARY
    if "site-packages" in file or "dist-packages" in file:
        return _PACKAGE
    return _LIBRARY if file.startswith(_STANDARD) else _USER


@cache
def _libraries() -> tuple[str, ...]:
    own = os.path.dirname(gradtools.__file__)
    return tuple(folder + os.sep for folder in (own, *map(_folder, (torch, np))))


def _folder(module: Any) -> str:
    return os.path.dirname(module.__file__)


_RECORDING = os.path.dirname(__file__) + os.sep
_WING = os.path.dirname(os.path.dirname(__file__))
_TORCH = _folder(torch) + os.sep
_STANDARD = sysconfig.get_paths()["stdlib"] + os.sep


# --- modules -----------------------------------------------------------------------------


class Scopes:
    """The modules that are running, outermost first, by the names that they have in each other."""

    def __init__(self) -> None:
        self.path: tuple[str, ...] = ()
        self._running: list[torch.nn.Module] = []
        self._paths: list[tuple[str, ...]] = []
        self._names: dict[int, dict[int, str]] = {}

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Inside, modules that this thread calls are noted."""
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
        """A module that raised may not have been left: those above it are left with it."""
        if all(running is not module for running in self._running):
            return
        while self._running:
            self.path = self._paths.pop()
            if self._running.pop() is module:
                return

    def _names_in(self, module: torch.nn.Module) -> dict[int, str]:
        if id(module) not in self._names:
            found = module.named_modules(remove_duplicate=True)
            self._names[id(module)] = {id(part): name for name, part in found}
        return self._names[id(module)]
