"""The functions that operators return: their names, signatures, texts and pickling."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from inspect import signature
from typing import Any


def like_function(prefix: str, f: Any, call: Any, suffix: str = "", doc: str = "") -> Any:
    """`call` with f's name (and a prefix), signature and docstring; picklable if f is.

    doc: The first line of its docstring, in which {} is f's name.
    """
    own_name = getattr(f, "__name__", type(f).__name__)
    name, own_doc = f"{prefix}{own_name}{suffix}", getattr(f, "__doc__", None)
    lines = [doc.format(own_name), own_doc if isinstance(own_doc, str) else ""]
    text = "\n\n".join(filter(None, lines))
    known = {"__name__": name, "__qualname__": name, "__wrapped__": f, "__doc__": text}
    try:
        call.__dict__.update(known)
    except AttributeError:  # dynamo's representation of a partial has no attributes
        return call
    if type(call) is partial:
        # JAX's errors name the place of the function inside of partials, and of what that wraps.
        def own(fun: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
            return fun(*args, **kwargs)

        own.__name__, own.__dict__["__wrapped__"] = name, f
        call = _Method(own, call.func, *call.args, **call.keywords)
        call.__dict__.update(known)
    return call


class _Method(partial[Any]):
    """A partial that binds as a method in a class, as Python 3.14's do."""

    def __repr__(self) -> str:
        return f"<{vars(self).get('__name__', 'function')}, called with {signature_of(self)}>"

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        return self if instance is None else partial(self, instance)

    def __reduce__(self) -> Any:
        return _unpickled, (self.args, self.keywords, vars(self))


def signature_of(f: Any) -> str:
    """The signature of f in a text, "(...)" if it is unknown."""
    try:
        return str(signature(f))
    except (TypeError, ValueError):
        return "(...)"


class Linear(partial[Any]):
    """A pullback or pushforward: `run(native, *args)` as a function of args."""

    def __repr__(self) -> str:
        return repr_of_linear(self.func)


def repr_of_linear(run: Callable[..., Any]) -> str:
    """The text of a linear function by its docstring's first line."""
    doc = (run.__doc__ or "").partition("\n")[0].rstrip(".")
    return f"<{getattr(run, '__name__', 'linear map')}{doc and ': ' + doc}>"


def _unpickled(args: Sequence[Any], keywords: dict[str, Any], known: dict[str, Any]) -> Any:
    method = like_function("", known["__wrapped__"], partial(args[0], *args[1:], **keywords))
    method.__dict__.update(known)
    return method
