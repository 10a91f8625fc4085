"""gradtools edits and explains gradients and saves memory, with one API for PyTorch and JAX.

Choose the backend with an import; the rest of the program is the same for PyTorch and JAX::

    import gradtools.torch as gt      # or
    import gradtools.jax as gt

Importing ``gradtools`` itself imports neither framework.
"""

import typing as _typing
from importlib.util import find_spec as _find_spec

from gradtools.errors import DisconnectedInputError as DisconnectedInputError
from gradtools.errors import GradtoolsError as GradtoolsError
from gradtools.errors import GradtoolsWarning as GradtoolsWarning

__version__ = "0.1.0"
__all__ = [
    "DisconnectedInputError",
    "GradtoolsError",
    "GradtoolsWarning",
    "available_backends",
]


def available_backends() -> tuple[str, ...]:
    """Returns the backends whose framework is installed, without importing any of them.

    Returns:
        A tuple that contains ``"torch"`` if PyTorch is installed and ``"jax"`` if JAX is installed.

    Example:
        >>> import gradtools
        >>> set(gradtools.available_backends()) <= {"torch", "jax"}
        True
    """
    return tuple(name for name in ("torch", "jax") if _find_spec(name) is not None)


def __dir__() -> list[str]:
    return [*__all__, "__version__", "bridge", "jax", "testing", "torch"]


if not _typing.TYPE_CHECKING:  # type checkers accept any name if a module defines __getattr__

    def __getattr__(name: str) -> object:
        """Raises an `AttributeError` that names the modules that contain the operators."""
        raise AttributeError(
            f"module 'gradtools' has no attribute {name!r}. The operators belong to a backend: "
            "import gradtools.torch as gt, or import gradtools.jax as gt."
        )
