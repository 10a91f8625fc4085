"""Implements array conversions, random keys and the array-API namespace in JAX.

Conversions from NumPy preserve the dtype or raise an error. Without x64, JAX would silently convert
float64 to float32 and drop the high bits of seeds. Random keys are JAX's typed PRNG keys.

``gradtools.arrays`` documents the public names.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from gradtools.arguments.checks import whole_number
from gradtools.arrays import as_numpy, as_seed, is_plain
from gradtools.errors import GradtoolsError, TypeRefusal

X64 = 'jax.config.update("jax_enable_x64", True), at the start of the program, or JAX_ENABLE_X64=1'


class NoValues(TypeRefusal, jax.errors.TracerArrayConversionError):
    """Raised if a traced array is converted to NumPy; a subclass of JAX's conversion error."""

    def __init__(self, text: str) -> None:
        TypeError.__init__(self, text)


def asarray(x: Any, device_of: Any = None) -> jax.Array:
    """Converts an array to a JAX array of the same dtype. A JAX array is returned unchanged."""
    if isinstance(x, jax.Array):
        return x
    if type(x) in (float, complex):
        return jnp.asarray(x)  # weakly typed: operations use the dtype of the other operand
    array = as_numpy(x)
    dtype = array.dtype.newbyteorder("=")
    if is_plain(x):  # JAX's default dtype for a Python number of this kind
        wide = {"b": np.bool_, "i": np.int64, "u": np.uint64, "f": np.float64, "c": np.complex128}
        dtype = jax.dtypes.canonicalize_dtype(wide[dtype.kind])
    if jax.dtypes.canonicalize_dtype(dtype) != dtype:
        raise _too_wide(dtype, array.shape)
    try:
        cast = array.astype(dtype)
        if array.dtype.kind in "iu" and not np.array_equal(cast, array):
            name = np.dtype(dtype).name
            raise GradtoolsError(f"asarray: x contains an integer that does not fit into {name}.")
        return jnp.array(cast, copy=True)
    except TypeError as error:
        raise _too_wide(dtype, array.shape) from error


def to_numpy(x: Any) -> np.ndarray:
    """Copies an array to a NumPy array. See ``gradtools.arrays``."""
    if isinstance(x, jax.core.Tracer):
        raise NoValues(
            f"to_numpy: an array of shape {x.shape} has no values that NumPy could read inside "
            "jit, vmap, grad and other transforms. Return the array from the transformed function, "
            "as an auxiliary output if necessary, and convert it outside, or wrap the NumPy code "
            "in host_function."
        )
    if isinstance(x, jax.Array) and jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        return np.array(jax.random.key_data(x))
    return np.array(as_numpy(x, "to_numpy"))


def is_on_host(x: jax.Array) -> bool:
    """Returns whether a concrete array is stored in this process's memory on the CPU."""
    return all(d.platform == "cpu" for d in x.devices()) and x.is_fully_addressable


def random_key(seed: Any) -> jax.Array:
    """Makes a JAX key from an integer seed. See ``gradtools.arrays``."""
    if isinstance(seed, jax.Array):
        return jax.random.key(seed)
    seed = as_seed(seed)
    x64 = jax.dtypes.canonicalize_dtype(np.int64) == np.int64
    if not x64 and not -(2**31) <= seed < 2**31:
        raise GradtoolsError(
            f"random_key: without x64 JAX keeps only the low 32 bits of a seed, here of {seed}. "
            f"Pass a smaller seed, or enable x64: {X64}."
        )
    return jax.random.key(seed)


def split_key(key: jax.Array, n: int = 2) -> jax.Array:
    """Splits a key into n independent keys, an array of shape (n,). See ``gradtools.arrays``."""
    check_key("split_key", key)
    n = whole_number("split_key", "n", n, 1, "keys")
    return jax.random.split(key, n)


def fold_in(caller: str, key: jax.Array, index: Any) -> jax.Array:
    """Returns the key that is derived from `key` and an index, which may be traced."""
    check_key(caller, key)
    return jax.random.fold_in(key, index)


def check_key(caller: str, key: Any) -> None:
    """Raises an error if ``key`` is not a single key, typed or old-style (two uint32 words)."""
    if isinstance(key, jax.Array):
        typed = jnp.issubdtype(key.dtype, jax.dtypes.prng_key)
        if key.ndim == (0 if typed else 1) and (typed or key.dtype == np.uint32):
            return
    result = f"{key.dtype} of shape {key.shape}" if isinstance(key, jax.Array) else repr(key)
    raise GradtoolsError(
        f"{caller}: a key is made by random_key(seed) or is an entry of split_key(key, n); got "
        f"{result}."
    )


def _too_wide(dtype: np.dtype, shape: tuple[int, ...]) -> GradtoolsError:
    name = np.dtype(dtype).name
    if name in ("float64", "complex128", "int64", "uint64"):
        narrow = jax.dtypes.canonicalize_dtype(dtype)
        advice = f"enable x64, {X64}, or narrow the array yourself with x.astype(np.{narrow})"
    else:
        advice = "convert it first, for example x.astype(np.float32)"
    return GradtoolsError(
        f"asarray: JAX, as configured, does not support {name} (shape {shape}); {advice}."
    )
