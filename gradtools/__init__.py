"""gradtools: edit, explain and save memory on gradients, one API for PyTorch and JAX.

Pick the backend by import; the rest of the program keeps its shape::

    import gradtools.torch as gt      # or
    import gradtools.jax as gt

Importing ``gradtools`` itself imports neither framework.
"""

import sys as _sys
import typing as _typing
from importlib import import_module as _import_module
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
    "namespace",
]


def available_backends() -> tuple[str, ...]:
    """The backends whose framework is installed, without importing any of them.

    Returns:
        A tuple, in this order, of those of ``"torch"`` and ``"jax"`` that can be imported.

    Example:
        >>> import gradtools
        >>> set(gradtools.available_backends()) <= {"torch", "jax"}
        True
    """
    return tuple(name for name in ("torch", "jax") if _find_spec(name) is not None)


def namespace(*arrays: _typing.Any) -> _typing.Any:
    """The namespace of the framework that arrays belong to, for code that serves both.

    Args:
        arrays: Tensors of PyTorch, or arrays or tracers of JAX. Others, such as Python numbers and
            NumPy arrays, are ignored.

    Returns:
        `gradtools.torch` or `gradtools.jax`. A framework that is not yet imported stays so.

    Raises:
        GradtoolsError: No array belongs to a framework, or two belong to different ones.

    Example:
        >>> import gradtools
        >>> def squared_slope(f, x):
        ...     gt = gradtools.namespace(x)
        ...     return gt.grad(f)(x) ** 2
    """
    kinds = {"torch": "Tensor", "jax": "Array"}
    loaded = {name: kind for name, kind in kinds.items() if name in _sys.modules}
    found = {
        name
        for name, kind in loaded.items()
        if any(isinstance(x, getattr(_sys.modules[name], kind)) for x in arrays)
    }
    if len(found) != 1:
        came = ", ".join(f"{type(x).__module__}.{type(x).__name__}" for x in arrays) or "nothing"
        which = "both frameworks" if found else "neither framework"
        raise GradtoolsError(
            f"namespace: the arguments ({came}) belong to {which}; pass tensors of PyTorch or "
            "arrays of JAX."
        )
    return _import_module(f"gradtools.{found.pop()}")


def __dir__() -> list[str]:
    return [*__all__, "__version__", "bridge", "jax", "testing", "torch"]


if not _typing.TYPE_CHECKING:  # where a type checker reads a __getattr__, no misspelt name is found

    def __getattr__(name: str) -> object:
        """Raises an error that says where the operators are."""
        raise AttributeError(
            f"module 'gradtools' has no attribute {name!r}. The operators belong to a backend: "
            "import gradtools.torch as gt, or import gradtools.jax as gt."
        )
