"""Filters tracebacks at the API boundary, and names the functions that operators return.

Each public operator, and each function that an operator returns, is `user_facing`. gradtools' own
frames are removed from the traceback of an error that leaves a `user_facing` function, so the
traceback ends at the user's line (as in JAX's traceback filtering). A successful call costs one
additional Python function call. ``GRADTOOLS_FULL_TRACEBACK=1`` keeps all frames.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from functools import partial, wraps
from inspect import signature
from itertools import takewhile
from types import FrameType, FunctionType, TracebackType
from typing import Any, TypeVar, cast

from gradtools.code_origin import USER, is_our_frame, whose_frame
from gradtools.errors import GradtoolsError

F = TypeVar("F", bound=Callable[..., Any])
C = TypeVar("C", bound=type)
FULL = "GRADTOOLS_FULL_TRACEBACK"


def user_facing(fun: F) -> F:
    """Wraps a function so that tracebacks of its errors omit gradtools' frames."""

    @wraps(fun)
    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            return fun(*args, **kwargs)
        except Exception as error:
            from gradtools.arguments.keyword_hints import wrong_call

            refusal = wrong_call(fun, args, error)
            if refusal is not None:
                try:
                    raise refusal from None
                except TypeError:
                    trimmed(refusal)
                    raise
            trimmed(error)
            raise  # a bare raise adds no traceback entry for this frame

    return cast(F, call)


def user_facing_methods(cls: C) -> C:
    """Makes every public method of a class `user_facing`; used as a class decorator."""
    for name, member in list(vars(cls).items()):
        if isinstance(member, FunctionType) and not name.startswith("_"):
            setattr(cls, name, user_facing(member))
    return cls


def like_function(prefix: str, f: Any, call: Any, suffix: str = "", doc: str = "") -> Any:
    """Returns `call` with f's name, signature and docstring; the result is picklable if f is.

    doc: The first line of the docstring, in which {} is replaced by f's name.
    """
    own_name = getattr(f, "__name__", type(f).__name__)
    name, own_doc = f"{prefix}{own_name}{suffix}", getattr(f, "__doc__", None)
    lines = [doc.format(own_name), own_doc if isinstance(own_doc, str) else ""]
    text = "\n\n".join(filter(None, lines))
    known = {"__name__": name, "__qualname__": name, "__wrapped__": f, "__doc__": text}
    call.__dict__.update(known)
    if type(call) is partial:
        # JAX's errors report the location of the innermost function of partials and wrappers.
        def own(fun: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
            try:
                return fun(*args, **kwargs)
            except Exception as error:
                trimmed(error)
                raise

        own.__name__, own.__dict__["__wrapped__"] = name, f
        call = TransformedFunction(own, call.func, *call.args, **call.keywords)
        call.__dict__.update(known)
    return call


class TransformedFunction(partial[Any]):
    """The function that an operator such as `grad` or `chunked` returns.

    Binds to instances like a method, as partials do in Python 3.14.
    """

    def __repr__(self) -> str:
        return f"<{vars(self).get('__name__', 'function')}, called with {signature_of(self)}>"

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        return self if instance is None else partial(self, instance)

    def __reduce__(self) -> Any:
        return _unpickled, (self.args, self.keywords, vars(self))


def signature_of(f: Any) -> str:
    """Formats the signature of f; returns "(...)" if f has no known signature."""
    try:
        return str(signature(f))
    except (TypeError, ValueError):
        return "(...)"


class LinearFunction(partial[Any]):
    """A pullback or pushforward that maps args to `run(native, *args)`."""

    __doc__ = property(lambda self: self.func.__doc__)  # type: ignore[assignment]

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        """Applies the pullback or pushforward to args."""
        try:
            return self.func(*self.args, *args, **kwargs)
        except Exception as error:
            trimmed(error)
            raise

    def __repr__(self) -> str:
        return repr_of_linear(self.func)


def repr_of_linear(run: Callable[..., Any]) -> str:
    """Returns the repr of a pullback or pushforward, with the first line of its docstring."""
    doc = (run.__doc__ or "").partition("\n")[0].rstrip(".")
    return f"<{getattr(run, '__name__', 'linear map')}{doc and ': ' + doc}>"


def _unpickled(args: Sequence[Any], keywords: dict[str, Any], known: dict[str, Any]) -> Any:
    method = like_function("", known["__wrapped__"], partial(args[0], *args[1:], **keywords))
    method.__dict__.update(known)
    return method


def trimmed(error: Exception) -> Exception:
    """Removes gradtools' own frames from the traceback of an error and of its causes."""
    if os.environ.get(FULL, "0") in ("", "0"):
        for each, hidden in hidden_frames(error):
            entries, result = list(_entries(each)), None
            for entry in reversed(entries):
                if not any(entry.tb_frame is frame for frame in hidden):
                    result = TracebackType(result, entry.tb_frame, entry.tb_lasti, entry.tb_lineno)
            each.__traceback__ = result
    return error


def hidden_frames(error: BaseException) -> Iterator[tuple[BaseException, list[FrameType]]]:
    """Yields the frames to hide, for an error and each of its causes and contexts.

    The hidden frames are gradtools' own frames and, for a GradtoolsError, the frames below the
    user's innermost line. For an unexpected error in gradtools' own code, no frames are hidden.
    """
    seen: list[BaseException] = []
    todo: list[BaseException | None] = [error]
    while todo:
        each = todo.pop()
        if each is None or any(each is one for one in seen):
            continue
        seen.append(each)
        todo += each.__cause__, each.__context__
        frames = [entry.tb_frame for entry in _entries(each)][::-1]  # innermost first
        is_refusal = any(isinstance(one, GradtoolsError) for one in seen)
        if not is_refusal and frames and is_our_frame(frames[0]):
            continue
        beneath = takewhile(lambda frame: whose_frame(frame) != USER, frames)
        yield each, [*filter(is_our_frame, frames), *(beneath if is_refusal else ())]


def _entries(error: BaseException) -> Iterator[TracebackType]:
    trace = error.__traceback__
    while trace is not None:
        yield trace
        trace = trace.tb_next
