"""Calls that no mode of PyTorch shows, watched by standing in for what is called.

These are functions with their own rules, each one link whatever it does inside, and what wraps a
tensor in a Parameter. The places are the process's, so only one run is recorded at a time, and
calls of other threads pass.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from gradtools.rules import Rule, captured
from gradtools.torch import _upstream as upstream
from gradtools.torch.customcode import Called
from gradtools.torch.marks import RULE, function_of_ours
from gradtools.torch.recording.recorder import RecordedCall, Recorder, tensors_in

Tensor = torch.Tensor
# Beneath Function: who keeps a bound `apply` comes by here as well.
_FUNCTIONS: Any = upstream.Functions
_APPLY = "apply"
# Above what makes a Parameter or a Buffer. PyTorch's own functions are left as they are: dynamo,
# which may be imported in between, takes them for what it finds.
_PARAMETERS: Any = type(torch.nn.Parameter)


@contextmanager
def watching(recorder: Recorder) -> Iterator[None]:
    """Inside, all calls of this thread are written down, with the modules that they run in."""
    thread = threading.get_ident()

    def watched() -> bool:
        return threading.get_ident() == thread and not recorder.quiet

    def apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
        beneath = getattr(super(_FUNCTIONS, cls), _APPLY)
        return (
            _ruled(recorder, cls, beneath, args, kwargs) if watched() else beneath(*args, **kwargs)
        )

    def make(cls: Any, *args: Any, **kwargs: Any) -> Any:
        make = type.__call__
        return _made(recorder, cls, make, args, kwargs) if watched() else make(cls, *args, **kwargs)

    with recorder.scopes.watching():
        _FUNCTIONS.apply = classmethod(apply)
        _PARAMETERS.__call__ = make
        try:
            with recorder:
                yield
        finally:
            del _FUNCTIONS.apply
            del _PARAMETERS.__call__


def _made(recorder: Recorder, kind: Any, make: Any, args: Any, kwargs: Any) -> Any:
    call = recorder.entering(kind, args, kwargs)
    call.name = kind.__name__
    with recorder.silent():
        out = make(kind, *args, **kwargs)
        recorder.write(call, out)
        return out


def _ruled(recorder: Recorder, kind: Any, original: Any, args: Any, kwargs: Any) -> Any:
    call = recorder.entering(kind, (*args, *_captured(args)), kwargs)
    call.raw, (call.name, call.mark) = "apply", _rule_of(kind, args)
    with recorder.silent():
        try:
            out = original(*args, **kwargs)
        except Exception as error:
            recorder.note_refusal(call, error)
            raise
        call.unruled = _unruled(kind, call, out)
        recorder.write(call, out)
        nodes = [y.grad_fn for y in tensors_in(out) if y.grad_fn is not None]
        if nodes and not kwargs and _is_foreign(kind, call) and function_of_ours(kind) is None:
            recorder.note_rule(call, Called(nodes[0], kind, original, args))
        return out


def _is_foreign(kind: Any, call: RecordedCall) -> bool:
    """Whether a function's own rule is the user's, outside of transforms."""
    own = function_of_ours(kind) not in (None, RULE)
    foreign = not own and call.mark not in _AGAIN and not kind.__module__.startswith("torch.")
    return foreign and upstream.peek_interpreter_stack() is None


def _captured(args: Any) -> list[Tensor]:
    """What the function of an edit holds, if it is differentiated: no input of the edit's value."""
    rule = getattr(args[0], "rule", None) if args else None
    if not isinstance(rule, Rule) or rule.name not in _EDITS:
        return []
    wanted = lambda x: isinstance(x, Tensor) and x.requires_grad
    return list({id(x): x for x in captured(rule, wanted, Tensor)}.values())


_EDITS = ("scale_gradient", "clip_gradient", "transform_gradient", "known_gradient")
_AGAIN = ("chunked", "frozen", "checkpoint")  # what computes a part of f again
_MARKS = {**{name: name for name in _AGAIN}, **dict.fromkeys(_EDITS, "edited gradient")}


def _rule_of(kind: Any, args: Any) -> tuple[str, str]:
    """The name of a function with its own rule, and its mark."""
    recorded_as = function_of_ours(kind)
    if recorded_as is None:
        return kind.__name__, "custom rule"
    if recorded_as != RULE:
        program = getattr(args[0], "program", None) if args else None
        if program is not None and program.forward.asked in _MARKS:
            return program.forward.asked, _MARKS[program.forward.asked]
        return recorded_as, _MARKS.get(recorded_as, "")
    name = getattr(getattr(args[0], "rule", None), "name", kind.__name__)
    return name, _MARKS.get(name, "custom rule")


def _unruled(kind: Any, call: RecordedCall, out: Any) -> set[int]:
    """The inputs to which a function's own backward pass gives None: it is asked once."""
    outs = [y for y in tensors_in(out) if y.requires_grad and y.grad_fn is not None]
    asked = [k for k, t in enumerate(call.tracked) if t]
    if not outs or not asked or not _is_foreign(kind, call):
        return set()
    try:
        with torch.enable_grad():
            found = torch.autograd.grad(
                outs,
                [call.tensors[k] for k in asked],
                [torch.ones_like(y) for y in outs],
                retain_graph=True,
                allow_unused=True,
            )
    except Exception:  # it has no backward pass here: whoever takes the gradient is told so
        return set()
    return {call.numbers[k] for k, g in zip(asked, found, strict=True) if g is None}
