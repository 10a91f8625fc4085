"""Defines a context manager in which float32 matrix products have full precision.

Depending on the settings, accelerators multiply float32 matrices in TF32 or bfloat16: float32 has
24 significand bits, TF32 has 11 and bfloat16 has 8. With reduced precision, correct float32
derivatives differ between the frameworks, so the checks run at the highest precision and restore
the settings afterwards.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from functools import cache, partial
from typing import Any

_FULL = ("none", "ieee", "highest", "float32")
Setting = tuple[Callable[[], Any], Callable[[Any], Any]]  # the setting's getter and setter
_NEWER = ("cuda.matmul", "cudnn.conv", "cudnn.rnn", "mkldnn.matmul", "mkldnn.conv", "mkldnn.rnn")


@contextmanager
def highest_precision(backends: Iterable[str]) -> Iterator[None]:
    """Context manager in which the given frameworks compute float32 products in full precision.

    Args:
        backends: The names of the frameworks: "torch", "jax" or both.
    """
    with ExitStack() as inside:
        if "jax" in backends:
            import jax

            config: Any = jax.config
            value = config.jax_default_matmul_precision
            if value not in (*_FULL, None) or (not value and jax.default_backend() != "cpu"):
                inside.enter_context(jax.default_matmul_precision("highest"))
        if "torch" in backends:
            before = {name: get() for name, (get, _) in settings_of_torch().items()}
            newer = {name: "ieee" for name in before if name.endswith(".fp32_precision")}
            if any(before[name] not in _FULL for name in newer) or not newer:
                inside.callback(_put, before)
                older = {"float32_matmul_precision": "highest", "cudnn.allow_tf32": False}
                _put({name: x for name, x in older.items() if before[name] is not None})
                _put({name: x for name, x in newer.items() if before[name] not in _FULL})
        yield


def _put(wanted: dict[str, Any]) -> None:
    """Applies PyTorch settings. Older settings come first because they overwrite newer settings."""
    for name, (get, put) in settings_of_torch().items():
        if wanted.get(name) is not None and get() != wanted[name]:
            put(wanted[name])


@cache
def settings_of_torch() -> dict[str, Setting]:
    """Returns PyTorch's precision settings for float32 products, in the order of application.

    The two older settings, for matrix products and for cuDNN, are first because they overwrite the
    newer settings for each library and operation. If an older setting contradicts the newer
    settings, reading the older setting raises an error; its value is then None.
    """
    import torch

    get, put = torch.get_float32_matmul_precision, torch.set_float32_matmul_precision
    found: dict[str, Setting] = {"float32_matmul_precision": (partial(_read, get), put)}
    get, put = _attribute(torch.backends.cudnn, "allow_tf32")
    found["cudnn.allow_tf32"] = partial(_read, get), put
    for name in _NEWER if hasattr(torch.backends.cudnn, "conv") else ():  # from PyTorch 2.9 on
        holder = operator.attrgetter(name)(torch.backends)
        found[f"{name}.fp32_precision"] = _attribute(holder, "fp32_precision")
    return found


def _attribute(holder: Any, name: str) -> Setting:
    """Returns the getter and setter of a property, even if assignments to it raise an error.

    `torch.testing._internal` calls `torch.backends.disable_global_flags`, after which an assignment
    to the property raises an error.
    """
    flag = vars(type(holder)).get(name)
    if flag is None:
        return partial(getattr, holder, name), partial(setattr, holder, name)
    return flag.getter, flag.setter


def _read(get: Callable[[], Any]) -> Any:
    try:
        return get()
    except RuntimeError:  # "you have used a mix of the legacy and new APIs"
        return None
