"""Converts arrays between the frameworks with DLPack, without a copy if this is safe.

DLPack does not coordinate writes, and JAX's arrays are immutable. Arguments are shared; results
are copied once, because PyTorch may later write to a tensor that is referenced elsewhere.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from torch.utils.dlpack import from_dlpack

from gradtools.errors import GradtoolsError, refusal
from gradtools.host_kernels import ArraySpec
from gradtools.jax.arrays import X64
from gradtools.torch import _upstream as upstream

Tensor = torch.Tensor
_WIDE = frozenset(("float64", "int64", "complex128", "uint64"))
_WIDE_DTYPES = frozenset(getattr(torch, name) for name in _WIDE)
_BFLOAT16 = "bfloat16"


def refuse_wide(dtype: str, who: str) -> None:
    """Raises an error for a 64-bit dtype if x64 is off, because JAX would silently narrow it."""
    if dtype in _WIDE and not jax.config.read("jax_enable_x64"):
        raise GradtoolsError(
            f"{who} has dtype {dtype}, which JAX does not support without x64. Enable x64: {X64}; "
            "or cast to 32 bits."
        )


def array_of(t: Tensor, who: str) -> jax.Array:
    """Returns a JAX array that may share a tensor's memory; do not write to the tensor."""
    if t.dtype in _WIDE_DTYPES:
        refuse_wide(str(t.dtype).removeprefix("torch."), who)
    t = t.detach().resolve_conj().resolve_neg()
    if upstream.is_zero(t):  # PyTorch's derivatives contain zero tensors without memory
        t = t.clone()
    if 0 in t.stride():  # JAX rejects broadcast tensors, such as a cotangent of a sum
        t = t.contiguous()
    try:
        return jnp.from_dlpack(t)
    except jax.errors.JaxRuntimeError:  # raised unless t is a permuted contiguous tensor
        return jnp.from_dlpack(t.contiguous())
    except (RuntimeError, TypeError, ValueError, BufferError) as error:
        if t.is_cpu:
            raise
        raise refusal(
            error,
            f"{who} is on {t.device}, and JAX has no such device here. Move it with .cpu(), or "
            f"install JAX for this device. The error was: {error}",
        ) from error


def shares_device(x: jax.Array) -> bool:
    """Returns whether DLPack would import a PyTorch result to the device of x.

    A CPU tensor becomes an array on JAX's first CPU device.
    """
    device: Any = next(iter(x.sharding.device_set))
    if device.platform == "cpu":
        return _cpus() == 1
    return bool(device.local_hardware_id < torch.cuda.device_count())


@cache
def _cpus() -> int:
    return jax.local_device_count("cpu")


# --- NumPy, in callbacks -----------------------------------------------------------------


def tensor_of_numpy(x: np.ndarray, spec: ArraySpec) -> Tensor:
    """Returns a tensor that may share an array's memory; do not write to the tensor."""
    if spec.dtype == _BFLOAT16:  # NumPy reads bfloat16 as raw bytes
        return tensor_of_numpy(x.view(np.int16), replace(spec, dtype="int16")).view(torch.bfloat16)
    try:
        return from_dlpack(x)
    except BufferError:  # PyTorch 2.8 rejects read-only arrays
        return torch.from_numpy(x.copy())


def numpy_of_tensor(t: Tensor) -> np.ndarray:
    """Converts a tensor to NumPy, sharing memory on the CPU; bfloat16 becomes float32."""
    return (t.float() if t.dtype is torch.bfloat16 else t).numpy(force=True)
