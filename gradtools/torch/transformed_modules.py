"""Defines the modules that operators return.

For example, `chunked(module)` is a module with the state of the original module.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from gradtools.boundary import user_facing
from gradtools.torch import _upstream as upstream

_SHARED = (*upstream.SLOTS, upstream.NOT_SAVED)


def like_module(f: Any, make: Callable[[Any], Callable[..., Any]]) -> Any:
    """Returns `make(f)`, wrapped in a `Transformed` module if f is an eager `torch.nn.Module`."""
    plain = isinstance(f, nn.Module) and all(name in f.__dict__ for name in _SHARED)
    return Transformed(f, make(f)) if plain else make(f)


class Transformed(upstream.ModuleLike):
    """A module that shares the state of another module, but has another `forward`.

    As with `torch.nn.DataParallel`, transforming a module returns a module. Unlike with
    `DataParallel`, the names of parameters are unchanged, so the keys of `state_dict` are
    unchanged. Both modules share the dictionaries of parameters, buffers and submodules. Methods
    that a module may override are delegated to the original module.
    """

    def __init__(self, module: nn.Module, call: Callable[..., Any]) -> None:
        super().__init__()
        shared = {name: module.__dict__[name] for name in _SHARED}
        name = getattr(call, "__name__", "").partition("_")[0]
        self.__dict__.update(shared, _own=module, _call=call, _name=name, __wrapped__=module)

    @user_facing
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the transformed function."""
        return self._call(*args, **kwargs)

    @property
    def training(self) -> bool:
        return self._own.training

    @training.setter
    def training(self, mode: bool) -> None:
        if "_own" in self.__dict__:
            self._own.training = mode

    def __getattr__(self, name: str) -> Any:
        own = self.__dict__.get("_own")
        return super().__getattr__(name) if own is None else getattr(own, name)

    def __setattr__(self, name: str, value: Any) -> None:
        own = self.__dict__.get("_own")
        is_patch = name == "forward" or (name[0] == "_" and not hasattr(own, name))
        if own is None or name in self.__dict__ or is_patch:
            super().__setattr__(name, value)
        else:
            setattr(own, name, value)

    def __repr__(self) -> str:
        return f"{self._name}({self._own!r})"

    # --- methods that a module may override

    def train(self, mode: bool = True) -> Transformed:
        self._own.train(mode)
        return self

    def apply(self, fn: Callable[[nn.Module], None]) -> Transformed:  # type: ignore[override]
        self._own.apply(fn)
        return self

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return self._own.state_dict(*args, **kwargs)

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return self._own.load_state_dict(*args, **kwargs)
