"""What gradtools raises and warns.

Every error says what was asked, what was found (argument, leaf path, shape, dtype)
and what to do instead. Its text is part of the API.
"""

import dis
import os
import sys
import traceback
import warnings
from collections.abc import Hashable
from types import TracebackType

from gradtools.code_origin import is_ours, is_the_users


class GradtoolsError(Exception):
    """What was asked cannot be done, or would give a number that may be wrong."""


class DisconnectedInputError(GradtoolsError):
    """A differentiated argument does not reach the output by a differentiable path."""


class LostDerivativeError(GradtoolsError):
    """Custom code in f gives a gradient whose own derivative autograd loses."""


class RuntimeRefusal(GradtoolsError, RuntimeError):
    """A framework's refusal in words that say what to do, of the framework's own type."""


class NotImplementedRefusal(GradtoolsError, NotImplementedError):
    """The same, of what a framework has not implemented."""


class TypeRefusal(GradtoolsError, TypeError):
    """The same, where a framework takes it for an error of types."""


class ValueRefusal(GradtoolsError, ValueError):
    """The same, where a framework takes it for an error of values."""


class GradtoolsWarning(UserWarning):
    """Something the user should know, said once, in plain words."""


class MissingRuleError(GradtoolsError):
    """A host function without a rule was differentiated."""


def warn(text: str) -> None:
    """A `GradtoolsWarning` at the innermost line of the user's."""
    warnings.warn(text, GradtoolsWarning, stacklevel=_depth_of_the_user())


def warn_once(key: Hashable, text: str) -> None:
    """The same, said once for each key in this process."""
    if key not in SAID:
        SAID.add(key)
        warn(text)


SAID: set[Hashable] = set()


def _depth_of_the_user() -> int:
    """Above its caller; where no frame is the user's, that of the first outside of gradtools."""
    outside, depth, frame = 0, 1, sys._getframe(1)
    while not is_the_users(frame):
        if not outside and not is_ours(frame.f_code.co_filename):
            outside = depth
        if frame.f_back is None:
            return outside or depth
        depth, frame = depth + 1, frame.f_back
    return depth


def place_of(error: BaseException) -> str:
    """The innermost line of the user's that an error went through, in brackets."""
    entries = traceback.walk_tb(error.__traceback__)
    users = [(f.f_code.co_filename, line) for f, line in entries if is_the_users(f)]
    return f" ({os.path.basename(users[-1][0])}:{users[-1][1]})" if users else ""


def refusal(error: BaseException, text: str) -> GradtoolsError:
    """A framework's error in our words: a `GradtoolsError` that keeps the framework's type."""
    kinds = (result for kind, result in _REFUSALS.items() if isinstance(error, kind))
    return next(kinds, GradtoolsError)(text)


_REFUSALS: dict[type[Exception], type[GradtoolsError]] = {
    NotImplementedError: NotImplementedRefusal,  # before what it is a kind of
    RuntimeError: RuntimeRefusal,
    TypeError: TypeRefusal,
    ValueError: ValueRefusal,
}


def said_by(package: str, error: BaseException) -> str:
    """The text of an error that a framework made; none of the user's, nor of ours."""
    return str(error) if is_of(package, error) else ""


def is_of(package: str, error: BaseException) -> bool:
    """Whether a framework made an error, rather than the user or gradtools.

    A framework has no types for its refusals, only texts, and the user's errors may hold the same
    words. The user's are those that a `raise` statement made outside of the framework's modules;
    what its compiled half raises comes out of a call. The package itself raises what it is asked
    to (`torch._check`).
    """
    if isinstance(error, GradtoolsError):
        return False
    origin = _origin(error.__traceback__)
    if origin is None:
        return True
    code, module = origin.tb_frame.f_code.co_code, origin.tb_frame.f_globals.get("__name__", "")
    own = module.startswith((f"{package}.", f"{__package__}."))
    return own or code[origin.tb_lasti] != dis.opmap["RAISE_VARARGS"]


def _origin(traceback: TracebackType | None) -> TracebackType | None:
    """Where an error was made: the innermost entry."""
    while traceback is not None and traceback.tb_next is not None:
        traceback = traceback.tb_next
    return traceback


def needed(framework: str, title: str, error: ModuleNotFoundError) -> ModuleNotFoundError:
    """What a wing's import raises: its framework is not installed, and how one gets it."""
    if (error.name or "").partition(".")[0] not in (framework, f"{framework}lib"):
        return error
    return ModuleNotFoundError(
        f"gradtools.{framework} needs {title}, which is not installed. Mend: "
        f'pip install "gradtools[{framework}]".',
        name=error.name,
    )
