"""Runs the user's function once under a recorder and undoes its effects.

f runs eagerly, compiled code included, at copies of its leaves that require grad. Afterwards the
state of the snapshot, captured tensors and `.grad` are restored.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from gradtools.code_origin import innermost, lines_of
from gradtools.errors import GradtoolsError, LostDerivativeError
from gradtools.seeing.graphs.recording import Refusal, Run
from gradtools.seeing.torch.recording.autograd_functions import look_up_applies
from gradtools.seeing.torch.recording.calls import CallRecorder
from gradtools.torch import _upstream as upstream
from gradtools.torch.compiling import is_compiling, leaves_of
from gradtools.torch.replaying.recomputing import recorded
from gradtools.torch.rerunning import Undo, copied, put_back

Tensor = torch.Tensor
_here = threading.local()


def watchable() -> bool:
    """Whether a run can be recorded here: in plain eager code, and not in another recording."""
    inside = is_compiling() or upstream.peek_interpreter_stack() is not None
    return not inside and not getattr(_here, "recording", False)


@dataclass
class ObservedRun:
    """A run that was recorded.

    Attributes:
        recorder: What it wrote down.
        leaves: The leaves as the user gave them.
        names: Their names.
        aliases: The copies of them that f was given.
        inputs: Their numbers.
        outs: What it returned; empty if PyTorch refused something.
    """

    recorder: CallRecorder
    leaves: Sequence[Any]
    names: Sequence[str]
    aliases: list[Any]
    inputs: list[int]
    outs: list[Any]
    refusal: Refusal | None = None

    def output(self, y: Any) -> int:
        """The number of something that f returned."""
        with self.recorder.silent():
            if isinstance(y, Tensor):
                return self.recorder.of(y)
            return self.recorder.new(y)

    def stand_ins(self) -> tuple[str, ...]:
        """For each leaf the name of what was read from outside in its place."""

        def is_same(a: Tensor, b: Tensor) -> bool:
            if a is b:
                return True
            if a.layout is not torch.strided or b.layout is not torch.strided or a.numel() == 0:
                return False
            return a.data_ptr() == b.data_ptr() and a.shape == b.shape and a.device == b.device

        result = []
        for leaf in self.leaves:
            read = self.recorder.captured.values() if isinstance(leaf, Tensor) else ()
            names = [
                self.recorder.names.get(id(x), "a captured tensor")
                for x in read
                if is_same(x, leaf)
            ]
            result.append(names[0] if names else "")
        return tuple(result)

    def parameters(self) -> tuple[tuple[str, int | None], ...]:
        """What f holds that requires grad, and its number if f read it."""
        numbers = {id(x): number for number, x in self.recorder.captured.items()}
        names = self.recorder.names
        # f[0]['argument 1'][0].weight, which the arguments hold, is argument 1.weight
        held = re.compile(r"^f(\[\d+\])?\['(argument [^']*)'\](\[0\])?")
        return tuple([(held.sub(r"\2", names[id(x)]), numbers.get(id(x))) for x in self.held()])

    def held(self) -> tuple[Tensor, ...]:
        """What f holds that requires grad."""
        own = {id(x) for x in self.leaves}
        result = self.recorder.reachable.values()
        return tuple([x for x in result if x.requires_grad and x.is_leaf and id(x) not in own])

    def reads(self) -> dict[int, list[int]]:
        """The numbers of what was there before, and of what had been computed from it, by id."""
        result: dict[int, list[int]] = {}
        for number, x in self.recorder.captured.items():
            result.setdefault(id(x), []).append(number)
            for leaf in leaves_of([x]) if x.grad_fn is not None else ():
                result.setdefault(id(leaf), []).append(number)
        return result


@contextmanager
def observed(
    run: Run,
    leaves: Sequence[Any],
    names: Sequence[str],
    recorder_of: Callable[[Undo], CallRecorder] = CallRecorder,
) -> Iterator[ObservedRun]:
    """A context with a recorded run, whose effects are undone on exit."""
    with recording_run("a run", run, leaves) as undo:
        recorder, aliases = recorder_of(undo), [copied(x) for x in leaves]
        inputs = [recorder.introduced(x, name) for x, name in zip(aliases, names, strict=True)]
        seen = ObservedRun(recorder, leaves, names, aliases, inputs, [])
        try:
            seen.outs = [*recorder.run(run, aliases)]
        except Exception as error:
            if isinstance(error, LostDerivativeError):
                source = innermost(lines_of(error))
                seen.refusal = Refusal("inside_rule", "derivative", str(error), source)
            elif recorder.refusal is not None and _comes_from(error, recorder.refusal[0]):
                seen.refusal = recorder.refusal[1]
            else:
                raise
        yield seen


@contextmanager
def recording_run(what: str, run: Run, leaves: Sequence[Any]) -> Iterator[Undo]:
    """A context in which this thread may record one run; its effects are undone on exit.

    what: The subject of the error if no run can be recorded here.
    """
    if not watchable():
        raise GradtoolsError(
            f"{what} can be recorded in plain eager code only, not inside a transform of "
            "torch.func, in compiled code, or while another run is recorded."
        )
    with put_back(run, leaves) as undo:
        look_up_applies(undo.start.reached)
        _here.recording = True
        try:
            with recorded(), torch.inference_mode(False), torch.enable_grad():
                yield undo
        finally:
            _here.recording = False


def _comes_from(error: BaseException | None, origin: BaseException) -> bool:
    while error is not None:
        if error is origin:
            return True
        error = error.__cause__ or error.__context__
    return False
