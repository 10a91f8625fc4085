"""Implements array conversions, random keys and the array-API namespace in PyTorch.

Conversions from NumPy preserve the dtype or raise an error. A key is an int64 tensor of two words.
Child i of the key (a, b), with the splitmix64 finalizer m and odd constants C and D, is

    a_i = m(a + (i + 1) C),    b_i = m(m(b + D a_i) + i).

The arithmetic is elementwise on integers, so it runs under ``torch.func.vmap`` on any device.
Both formulas are bijections of 64-bit words, so all children of a key are distinct. The reference
for m is Steele, Lea and Flood, "Fast splittable pseudorandom number generators" (OOPSLA 2014), in
Vigna's variant.

``gradtools.arrays`` documents the public names.
"""

from types import ModuleType
from typing import Any

import numpy as np
import torch

from gradtools.arguments.checks import whole_number
from gradtools.arrays import as_numpy, as_seed, is_plain
from gradtools.errors import GradtoolsError, RuntimeRefusal
from gradtools.torch import _upstream as upstream
from gradtools.torch.compiling import is_compiling

GOLDEN = -0x61C8864680B583EB  # 2**64 / golden ratio, as a signed word
ODD = -0x4498517A7B3558C5  # an odd word with about as many 1 bits as 0 bits


def asarray(x: Any, device_of: Any = None) -> torch.Tensor:
    """Converts an array to a tensor of the same dtype. A tensor is returned unchanged.

    device_of: A tensor whose device is used for the result, instead of the default device.
    """
    if isinstance(x, torch.Tensor):
        return x
    if is_compiling():  # in compiled code, NumPy arrays are tensors
        return torch.asarray(x)
    array = as_numpy(x)
    device = torch.empty(0).device if device_of is None else device_of.device
    if is_plain(x):
        return torch.tensor(array.tolist(), dtype=_default_dtype(array.dtype), device=device)
    # The tensor owns its memory, because `array` may be read-only, reversed or byte-swapped.
    owned = np.array(array, dtype=array.dtype.newbyteorder("="), order="C", copy=True)
    try:
        return torch.from_numpy(owned).to(device)
    except TypeError:
        return _reinterpreted(owned).to(device)


def to_numpy(x: Any) -> np.ndarray:
    """Detaches a tensor and copies it to a NumPy array. See ``gradtools.arrays``."""
    if not isinstance(x, torch.Tensor):
        return np.array(as_numpy(x, "to_numpy"))
    try:
        y = on_cpu(x)
        try:
            return y.numpy().copy()
        except TypeError:
            return _extended_to_numpy(y)
    except (RuntimeError, NotImplementedError, TypeError) as error:
        raise RuntimeRefusal(
            f"to_numpy: a {type(x).__name__} of shape {tuple(x.shape)} has no values that NumPy "
            "could read: it is inside a torch.func transform or torch.compile, on the meta device, "
            "or sparse. Return the tensor from the transformed function, as an auxiliary output if "
            "necessary, and convert it outside, or wrap the NumPy code in host_function; a sparse "
            "tensor needs .to_dense()."
        ) from error


def on_cpu(x: torch.Tensor) -> torch.Tensor:
    """Returns x without a graph, in memory that NumPy can read."""
    y = x.detach().cpu().resolve_conj().resolve_neg()
    return y.clone() if upstream.is_zero(y) else y  # a zero tensor has no memory to read


def random_key(seed: Any) -> torch.Tensor:
    """Makes a key, an int64 tensor of shape (2,), from a seed. See ``gradtools.arrays``."""
    if not (isinstance(seed, torch.Tensor) and seed.ndim == 0 and not seed.is_floating_point()):
        seed = torch.tensor(as_seed(seed), dtype=torch.int64)
    first = _mix(seed.to(torch.int64) + GOLDEN)
    return torch.stack([first, _mix(_mix(first) + ODD)])


def split_key(key: torch.Tensor, n: int = 2) -> torch.Tensor:
    """Splits a key into n independent keys, a tensor of shape (n, 2). See ``gradtools.arrays``."""
    check_key("split_key", key)
    n = whole_number("split_key", "n", n, 1, "keys")
    return _children(key, torch.arange(n, dtype=torch.int64, device=key.device))


def fold_in(caller: str, key: torch.Tensor, index: int) -> torch.Tensor:
    """Returns the key that `split_key` would return at the given index."""
    check_key(caller, key)
    return _children(key, torch.tensor(index, dtype=torch.int64, device=key.device))


def _children(key: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """Returns the child keys at the given indices; the last axis has length two."""
    first = _mix(key[0] + (index + 1) * GOLDEN)
    return torch.stack([first, _mix(_mix(key[1] + first * ODD) + index)], dim=-1)


def seed_of(key: torch.Tensor) -> int:
    """Returns a 64-bit seed computed from a key, as a signed Python integer."""
    check_key("apply", key)
    return int(_mix(key[0] ^ _mix(key[1])).item())


def check_key(caller: str, key: Any) -> None:
    if isinstance(key, torch.Tensor) and key.dtype == torch.int64 and key.shape == (2,):
        return
    got = repr(key)
    if isinstance(key, torch.Tensor):
        got = f"a {key.dtype} tensor of shape {tuple(key.shape)}"
    raise GradtoolsError(
        f"{caller}: a key is an int64 tensor of shape (2,), made by random_key(seed) or a row of "
        f"split_key(key, n); got {got}."
    )


def xp() -> ModuleType:
    """Imports and returns PyTorch's array-API namespace."""
    try:
        import array_api_compat.torch as namespace
    except ImportError as error:
        raise GradtoolsError(
            "xp needs the package array-api-compat. Fix: pip install array-api-compat."
        ) from error
    return namespace


def _default_dtype(dtype: np.dtype) -> torch.dtype:
    default = torch.get_default_dtype()
    if dtype.kind == "u":
        raise GradtoolsError("asarray: an integer beyond 2**63 - 1 does not fit into int64.")
    table = {"b": torch.bool, "i": torch.int64, "f": default}
    return table.get(dtype.kind) or torch.promote_types(default, torch.complex32)


def _reinterpreted(array: np.ndarray) -> torch.Tensor:
    """Converts an array of an ml_dtypes dtype to a tensor by reinterpreting its bits."""
    dtype = getattr(torch, array.dtype.name, None)
    if not isinstance(dtype, torch.dtype) or dtype.itemsize != array.dtype.itemsize:
        raise GradtoolsError(
            f"asarray: PyTorch has no dtype {array.dtype.name} (shape {array.shape}). Convert "
            "the array first, for example x.astype(np.float64)."
        )
    return torch.from_numpy(array.view(f"u{dtype.itemsize}")).view(dtype)


def _extended_to_numpy(x: torch.Tensor) -> np.ndarray:
    """Converts a tensor to an ml_dtypes array, or to float32 if ml_dtypes is not installed."""
    try:
        import ml_dtypes
    except ImportError:
        return x.float().numpy()
    dtype = getattr(ml_dtypes, str(x.dtype).removeprefix("torch."), None)
    if dtype is None:
        raise TypeError(f"NumPy does not support {x.dtype} in this layout")
    return x.contiguous().view(getattr(torch, f"uint{8 * x.itemsize}")).numpy().view(dtype).copy()


def _mix(x: torch.Tensor) -> torch.Tensor:
    """Applies the splitmix64 finalizer, a bijection of 64-bit words (int64 wraps around)."""
    x = (x ^ _shift(x, 30)) * -0x40A7B892E31B1A47
    x = (x ^ _shift(x, 27)) * -0x6B2FB644ECCEEE15
    return x ^ _shift(x, 31)


def _shift(x: torch.Tensor, bits: int) -> torch.Tensor:
    """Applies a logical right shift; PyTorch's operator `>>` is an arithmetic shift."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)
