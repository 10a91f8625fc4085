"""Runs JAX functions in a PyTorch program, with JAX as the guest framework.

`jax.jit` compiles the function and its derivatives. A call blocks until the results are ready,
because PyTorch owns the memory of the arguments and may write to it after the call.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from torch.utils.dlpack import from_dlpack

from gradtools.backend import backend_of
from gradtools.bridge.functions import Foreign, ForeignSignature
from gradtools.bridge.memory import array_of, refuse_wide
from gradtools.errors import GradtoolsError
from gradtools.host_kernels import ArraySpec
from gradtools.jax.known_errors import READS_A_VALUE, explained
from gradtools.rules import closed_over_error
from gradtools.torch import _upstream as upstream
from gradtools.torch.functorch_wrappers import PLAIN, is_wrapped
from gradtools.torch.modes import is_followed

Tensor = torch.Tensor


class JaxGuest:
    """The operations of JAX as the guest framework of a bridged function."""

    name, title, operator, host_title = "jax", "JAX", "to_torch", "PyTorch"
    backend, host = backend_of("jax"), backend_of("torch")
    vmap = staticmethod(jax.vmap)
    refuse_constants = staticmethod(lambda name, ys: None)  # a tracer has no value to return
    protected = staticmethod(lambda xs, written: xs)  # a JAX function cannot write to its arguments

    def __init__(self, jit: bool = True) -> None:
        self.jit = jit

    def entry(self, run: Any) -> Any:
        """Returns `run`, compiled by `jax.jit` unless jit=False."""
        return jax.jit(run) if self.jit else run

    def as_array(self, name: str, y: Any) -> jax.Array:
        """Converts a leaf of a function's result to an array."""
        try:
            return jnp.asarray(y)
        except (TypeError, ValueError):
            raise GradtoolsError(
                f"to_torch: {name} returned a {type(y).__name__}; expected a pytree of arrays."
            ) from None

    def specs_of(self, name: str, xs: Sequence[Tensor]) -> tuple[ArraySpec, ...]:
        """Returns the tensors' ArraySpecs. Traced sizes (torch.jit.trace) become constants."""
        shapes = [tuple([int(n) if isinstance(n, Tensor) else n for n in x.shape]) for x in xs]
        dtypes = [str(x.dtype).removeprefix("torch.") for x in xs]
        for dtype in dtypes:
            refuse_wide(dtype, f"to_torch: an argument of {name}")
        return tuple(map(ArraySpec, shapes, dtypes))

    def are_plain(self, xs: Sequence[Any]) -> bool:
        """Returns whether xs are concrete tensors outside of autograd, transforms and tracing."""
        grad = torch.is_grad_enabled()
        for x in xs:
            if type(x) not in PLAIN or (grad and x.requires_grad) or is_wrapped(x):
                return False
            if upstream.is_legacy_batched(x):
                return False
        return not is_followed()

    def abstract(self, of: Foreign, specs: Sequence[ArraySpec]) -> list[ArraySpec]:
        """Returns the outputs' ArraySpecs, computed by `jax.eval_shape`."""
        try:
            ys = jax.eval_shape(of.run, *[jax.ShapeDtypeStruct(s.shape, s.dtype) for s in specs])
        except READS_A_VALUE as error:
            raise _reads_values(of.name, error) from error
        return [ArraySpec(y.shape, y.dtype.name) for y in ys]

    # --- calls

    def called(self, signature: ForeignSignature, run: Any, xs: Sequence[Tensor]) -> list[Tensor]:
        """Calls the function on tensors."""
        who = f"to_torch: an argument of {signature.of.name}"
        ys = self._evaluated(signature, run, [array_of(x, who) for x in xs])
        return [from_dlpack(y).clone() for y in ys]

    def called_on_host(
        self, signature: ForeignSignature, run: Any, arrays: Sequence[np.ndarray]
    ) -> list[np.ndarray]:
        """Calls the function on NumPy arrays, in a host callback."""
        pairs = zip(arrays, signature.ins, strict=True)
        xs = [jnp.array(a, s.dtype, copy=True) for a, s in pairs]
        ys = self._evaluated(signature, run, xs)
        return [np.array(y, np.float32 if y.dtype == jnp.bfloat16 else None) for y in ys]

    def _evaluated(self, signature: ForeignSignature, run: Any, xs: Sequence[Any]) -> list[Any]:
        try:
            with explained(self.operator):  # also explains compilation errors
                ys = run(*xs)
        except READS_A_VALUE as error:
            if not self.jit:
                raise
            raise _reads_values(signature.of.name, error) from error
        for y in ys:
            if isinstance(y, jax.core.Tracer):
                raise closed_over_error(signature.of.name)
            y.block_until_ready()
        signature.record(run, [ArraySpec(y.shape, y.dtype.name) for y in ys])
        return ys


def _reads_values(name: str, error: Exception) -> GradtoolsError:
    return GradtoolsError(
        f"to_torch: {name} reads values of its arguments (a Python if, float(), np.asarray), but "
        "traced arguments have no values. Use jnp.where or jax.lax.cond, or do not trace f: "
        "to_torch(f, out=ArraySpec(shape, dtype), jit=False), where only traced programs need "
        f"out. JAX's error: {error}"
    )
