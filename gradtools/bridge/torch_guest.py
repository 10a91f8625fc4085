"""Runs PyTorch functions in a JAX program, with PyTorch as the guest framework.

PyTorch functions may write in place and draw from global generators, which JAX cannot represent.
The first call receives copies of all arguments. Later calls receive copies of the arguments that
the first call wrote to; the other arguments share JAX's memory. A function that draws random
numbers is rejected, because its derivatives would draw other numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jax.sharding import SingleDeviceSharding
from torch.utils.dlpack import from_dlpack

from gradtools.arguments.wording import with_article
from gradtools.backend import backend_of
from gradtools.bridge import _upstream as private
from gradtools.bridge.functions import Foreign, ForeignSignature
from gradtools.bridge.memory import (
    array_of,
    numpy_of_tensor,
    shares_device,
    tensor_of_numpy,
)
from gradtools.errors import GradtoolsError
from gradtools.host_kernels import ArraySpec
from gradtools.jax.reachability import within_a_trace
from gradtools.torch import _upstream as upstream

Tensor = torch.Tensor
_ARRAY = type(jax.device_put(np.zeros(())))


class TorchGuest:
    """The operations of PyTorch as the guest framework of a bridged function."""

    name, title, operator, host_title = "torch", "PyTorch", "to_jax", "JAX"
    backend, host = backend_of("torch"), backend_of("jax")
    vmap = staticmethod(torch.vmap)
    entry = staticmethod(lambda run: run)  # nothing is compiled

    def protected(self, xs: Sequence[Tensor], written: set[int] | None) -> Sequence[Tensor]:
        """Returns the arguments, with copies of arguments that the function may write to."""
        return [x.clone() if written is None or i in written else x for i, x in enumerate(xs)]

    def as_array(self, name: str, y: Any) -> Tensor:
        """Converts a leaf of a function's result to a tensor."""
        if isinstance(y, Tensor):
            return y
        if isinstance(y, bool | int | float | complex | np.ndarray | np.generic):
            constant: Any = torch.as_tensor(y)
            constant.gradtools_came = with_article(type(y).__name__)
            return constant
        raise GradtoolsError(
            f"to_jax: {name} returned a {type(y).__name__}; expected a pytree of tensors."
        )

    def refuse_constants(self, name: str, ys: Sequence[Tensor]) -> None:
        """Raises an error if no result of a differentiated function was returned as a tensor."""
        came = [getattr(y, "gradtools_came", "") for y in ys]
        if all(came):
            raise GradtoolsError(
                f"to_jax: {name} is differentiated, but returned {came[0]}. Return a tensor: "
                ".item(), float() and .numpy() lose the gradient. For a constant: y.detach()."
            )

    def specs_of(self, name: str, xs: Sequence[Any]) -> tuple[ArraySpec, ...]:
        """Returns the JAX arrays' ArraySpecs."""
        for x in xs:
            if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
                raise GradtoolsError(
                    f"to_jax: an argument of {name} is a typed key, which PyTorch does not have. "
                    "Pass jax.random.key_data(key), or bridge a module, whose apply takes key=."
                )
        return tuple([ArraySpec(x.shape, x.dtype.name) for x in xs])

    def are_plain(self, xs: Sequence[Any]) -> bool:
        """Returns whether all arrays are concrete, untraced, and on a device that PyTorch can use.

        Other arrays are copied through host memory, and results are copied back to the device.
        """
        for x in xs:
            if type(x) is not _ARRAY or type(x.sharding) is not SingleDeviceSharding:
                return False
            if not shares_device(x):
                return False
        return not within_a_trace()

    def abstract(self, of: Foreign, specs: Sequence[ArraySpec]) -> list[ArraySpec]:
        """Returns the outputs' ArraySpecs, inferred with fake tensors.

        State that the function changes during inference, such as caches of modules, is restored.
        """
        from gradtools.seeing.torch.undo import undone

        with (
            undone(of.base.fun, ()),
            private.outermost(),
            private.fake_tensors(allow_non_fake_inputs=True),
        ):
            try:
                ys = of.run(*[torch.empty(s.shape, dtype=getattr(torch, s.dtype)) for s in specs])
            except GradtoolsError:
                raise
            except Exception as error:
                raise GradtoolsError(
                    f"to_jax: a traced program (jit, vmap, scan) needs the shape and dtype of "
                    f"{of.name}'s result, which could not be inferred. Declare both: "
                    "to_jax(f, out=ArraySpec(shape, dtype)), a pytree of ArraySpecs, or a function "
                    f"of the arguments' ArraySpecs. PyTorch says: {error}"
                ) from error
            return [_spec(y) for y in ys]

    # --- calls

    def called(
        self, signature: ForeignSignature, run: Any, xs: Sequence[jax.Array]
    ) -> list[jax.Array]:
        """Calls the function on JAX arrays."""
        who = f"to_jax: the result of {signature.of.name}"
        with private.outermost():
            ys = self._evaluated(signature, run, [from_dlpack(x) for x in xs])
            return [array_of(y, who) for y in ys]

    def called_on_host(
        self, signature: ForeignSignature, run: Any, arrays: Sequence[np.ndarray]
    ) -> list[np.ndarray]:
        """Calls the function on NumPy arrays, in a host callback's thread."""
        with private.outermost():
            ts = [tensor_of_numpy(a, s) for a, s in zip(arrays, signature.ins, strict=True)]
            return [numpy_of_tensor(y) for y in self._evaluated(signature, run, ts)]

    def _evaluated(self, signature: ForeignSignature, run: Any, ts: list[Tensor]) -> list[Tensor]:
        of, base = signature.of, signature.of.base
        is_first = base.written is None and of is base
        stream = torch.get_rng_state() if base.written is None else None
        if is_first:
            ts, base.written = [t.clone() for t in ts], set()
        try:
            outs = run(*ts)
            if stream is not None and not torch.equal(stream, torch.get_rng_state()):
                torch.set_rng_state(stream)
                raise GradtoolsError(
                    f"to_jax: {of.name} draws random numbers from PyTorch's global generator, so "
                    "its derivative would draw other numbers. Call eval() on the module, or bridge "
                    "it: apply, params, state = to_jax(module), and pass a key to apply."
                )
        except BaseException:
            base.written = None if is_first else base.written
            raise
        signature.record(run, [_spec(y) for y in outs])
        outs = [y.detach().clone() for y in outs]
        written = {i for i, t in enumerate(ts) if upstream.version_of(t)}
        if is_first:
            base.written = written
        elif written:
            raise GradtoolsError(
                f"to_jax: {of.name} wrote to an argument, but not in its first call, so JAX's "
                "array was changed. Clone the argument before you write to it: x = x.clone()."
            )
        return outs


def _spec(y: Tensor) -> ArraySpec:
    return ArraySpec(tuple(y.shape), str(y.dtype).removeprefix("torch."))
