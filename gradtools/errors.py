"""Defines gradtools' exceptions and warnings.

Every message names the function, the argument (leaf path, shape, dtype), the expected value, and
the fix. Error texts are part of the API.
"""

import warnings
from collections.abc import Callable, Hashable
from typing import Any

from gradtools.code_origin import depth_of_the_user, raised_by


class GradtoolsError(Exception):
    """Raised if a call is invalid or unsupported, or if its result might be wrong."""


class DisconnectedInputError(GradtoolsError):
    """Raised if no differentiable path connects a differentiated argument to the output."""


class DerivativeError(GradtoolsError, AssertionError):
    """Raised by `gradtools.testing.checked` if a derivative differs from finite differences."""


class Refusal(GradtoolsError):
    """A `GradtoolsError` that is also a built-in exception; tracebacks print `GradtoolsError`."""

    def __init_subclass__(cls) -> None:
        cls.__qualname__ = "GradtoolsError"

    def __reduce__(self) -> Any:  # the class cannot be pickled by its qualified name
        return _refused, (type(self).__name__, self.args)


class RuntimeRefusal(Refusal, RuntimeError):
    """Raised in place of a framework's RuntimeError, with a message that names the fix."""


class NotImplementedRefusal(Refusal, NotImplementedError):
    """Raised in place of a framework's NotImplementedError, with a message that names the fix."""


class TypeRefusal(Refusal, TypeError):
    """Raised in place of a TypeError, with a message that names the fix."""


class ValueRefusal(Refusal, ValueError):
    """Raised in place of a framework's ValueError, with a message that names the fix."""


class GradtoolsWarning(UserWarning):
    """The category of gradtools' warnings."""


class DisconnectedInputWarning(GradtoolsWarning):
    """Issued if a differentiated argument may be disconnected from the output."""


class MissingRuleError(GradtoolsError):
    """Raised if a host function without a rule is differentiated."""


def warn(text: str, category: type[GradtoolsWarning] = GradtoolsWarning) -> None:
    """Issues a `GradtoolsWarning` at the user's innermost line."""
    warnings.warn(text, category, stacklevel=depth_of_the_user())


def warn_once(key: Hashable, text: str) -> None:
    """Issues a `GradtoolsWarning` once per process for each key."""
    if key not in WARNED:
        WARNED.add(key)
        warn(text)


WARNED: set[Hashable] = set()


def refusal(error: BaseException, text: str) -> GradtoolsError:
    """Makes a `GradtoolsError` with the given text and the type of a framework's error."""
    kinds: Any = (ours for kind, ours in _REFUSALS.items() if isinstance(error, kind))
    return next(kinds, GradtoolsError)(text)


def _refused(name: str, args: tuple[Any, ...]) -> GradtoolsError:
    kinds: Any = (kind for kind in _REFUSALS.values() if kind.__name__ == name)
    return next(kinds, GradtoolsError)(*args)


_REFUSALS: dict[type[Exception], type[Refusal]] = {
    NotImplementedError: NotImplementedRefusal,  # precedes its base class RuntimeError
    RuntimeError: RuntimeRefusal,
    TypeError: TypeRefusal,
    ValueError: ValueRefusal,
}


def said_by(package: str, error: BaseException) -> str:
    """Returns the text of an error that a framework raised; returns "" for other errors."""
    return str(error) if is_of(package, error) else ""


def is_of(package: str, error: BaseException) -> bool:
    """Returns whether an error is not a `GradtoolsError` and was not raised by the user's code."""
    return not isinstance(error, GradtoolsError) and raised_by(package, error)


def noted(note: str, fun: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Returns `fun(*args, **kwargs)`; adds the note, which describes the call, to a TypeError."""
    try:
        return fun(*args, **kwargs)
    except TypeError as error:
        error.add_note(note)
        raise


_FRAMEWORKS = {"torch": "PyTorch", "jax": "JAX", "jaxlib": "JAX"}


def needed(module: str, error: ModuleNotFoundError) -> ModuleNotFoundError:
    """Returns the error for a backend whose framework is not installed, with the pip command."""
    missing = (error.name or "").partition(".")[0]
    if missing not in _FRAMEWORKS:
        return error
    return ModuleNotFoundError(
        f"{module} needs {_FRAMEWORKS[missing]}, which is not installed. Fix: "
        f'pip install "gradtools[{missing.removesuffix("lib")}]".',
        name=error.name,
    )
