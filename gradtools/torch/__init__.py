"""Exports gradtools' operators for PyTorch: `import gradtools.torch as gt`."""

import typing as _typing
from importlib import import_module as _import_module
from types import ModuleType as _ModuleType

from gradtools.api import Api as _Api
from gradtools.api import no_attribute as _no_attribute
from gradtools.errors import needed as _needed
from gradtools.versions import check_version as _check_version

try:
    import torch as _torch

    _check_version("torch", _torch.__version__)
    from gradtools.torch.backend import TorchBackend as _Backend
except ModuleNotFoundError as _error:
    raise _needed(__name__, _error) from None

_api = _Api(_Backend())
_LAYERS = ("nn",)  # modules with layers, imported on first access

if _typing.TYPE_CHECKING:
    from gradtools.public import *  # noqa: F403 - declared once, for both backends

    xp: _ModuleType  # array_api_compat.torch, which has no type hints
else:  # type checkers accept any name if a module defines __getattr__
    __all__ = list(_api.names)

    def __getattr__(name: str) -> object:
        """Returns the public object with the given name; its module is imported on first access."""
        if name in _LAYERS:
            return _import_module(f"{__name__}.{name}")
        if name not in __all__:
            __tracebackhide__ = True
            raise _no_attribute(__name__, name)
        result = globals()[name] = getattr(_api, name)
        return result


def __dir__() -> list[str]:
    return _api.names
