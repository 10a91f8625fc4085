"""What gradtools raises and warns.

Every error says what was asked, what was found (argument, leaf path, shape, dtype)
and what to do instead. Its text is part of the API.
"""

import warnings
from collections.abc import Hashable

from gradtools.code_origin import depth_of_the_user, raised_by


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
    warnings.warn(text, GradtoolsWarning, stacklevel=depth_of_the_user())


def warn_once(key: Hashable, text: str) -> None:
    """The same, said once for each key in this process."""
    if key not in SAID:
        SAID.add(key)
        warn(text)


SAID: set[Hashable] = set()


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
    """Whether a framework made an error, rather than the user or gradtools."""
    return not isinstance(error, GradtoolsError) and raised_by(package, error)


_FRAMEWORKS = {"torch": "PyTorch", "jax": "JAX", "jaxlib": "JAX"}


def needed(module: str, error: ModuleNotFoundError) -> ModuleNotFoundError:
    """What an import of gradtools raises: a framework is not installed, and how one gets it."""
    missing = (error.name or "").partition(".")[0]
    if missing not in _FRAMEWORKS:
        return error
    return ModuleNotFoundError(
        f"{module} needs {_FRAMEWORKS[missing]}, which is not installed. Fix: "
        f'pip install "gradtools[{missing.removesuffix("lib")}]".',
        name=error.name,
    )
